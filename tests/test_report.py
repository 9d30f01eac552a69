"""`MultiTaskOptimizer.report`: its numbers against a plain loop's, and its cost."""

import math

import pytest
import torch
from layers import Kind
from loops import CASES
from networks import TASKS, Setup, assert_equal, gradient_rows, started, started_problem
from plain import rows
from recorder import Reads, Recorder
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.engine import cuda_graphs
from cs_kernels.trunk.layers import shared_parameters

pytestmark = pytest.mark.loop

SCALED = pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])


def one_step(
    method: cs.Method | None, scaled: bool
) -> tuple[Setup, cs.MultiTaskOptimizer, dict[str, Tensor], dict[str, list[Tensor]]]:
    """Makes a step with learning rate 0; also returns losses, and tasks' gradients by parameter."""
    setup = Setup(optimizer=torch.optim.SGD, lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None
    opt = setup.start(method, scaler=scaler)
    opt.start_epoch(3)
    losses, shared = opt.step(setup.closure(0)), shared_parameters(setup.trunk)
    grads: dict[str, list[Tensor]] = {name: [] for name in shared}
    for task in TASKS:
        with cs.nn.active_task(setup.trunk, task):
            found = torch.autograd.grad(setup.closure(0)(task), [*shared.values()])
        for name, grad in zip(shared, found, strict=True):
            grads[name].append(grad)
    return setup, opt, losses, grads


@SCALED
@pytest.mark.parametrize(
    "method", [cs.CAGrad(), cs.PCGrad(seed=3), cs.MGDA(groups="layer")], ids=repr
)
def test_gramian_methods(method: cs.GramianMethod, scaled: bool) -> None:
    """Norms, cosines and task weights reproduce the update in `.grad`."""
    setup, opt, losses, grads = one_step(method, scaled)
    report, by_layer = opt.report(), method.groups == "layer"
    assert (report.step, report.epoch, report.phase, report.method) == (0, 3, 2, repr(method))
    assert (report.tasks, report.rows) == (tuple(TASKS), tuple(TASKS))
    assert_equal(dict(report.losses), losses)
    assert report.products is report.channels is report.removed is None
    members: dict[str, list[str]] = {}
    for name in grads:
        members.setdefault(name.rpartition(".")[0] if by_layer else "", []).append(name)
    assert report.layers == (tuple(members) if by_layer else ())
    shared = shared_parameters(setup.trunk)
    columns = ("gramian", "gradient_norms", "cosines", "conflicts", "task_weights", "update_norm")
    matrices, updates = [], []
    for n, names in enumerate(members.values()):
        matrix = torch.stack([torch.cat([grads[m][i].flatten() for m in names]) for i in range(3)])
        update = torch.cat([shared[m].grad.flatten() for m in names])
        numbers = (getattr(report, name) for name in columns)
        gramian, norms, cosines, conflicts, weights, length = (
            x[n] if by_layer else x for x in numbers
        )
        unit = matrix / matrix.norm(dim=1, keepdim=True)
        products = matrix @ matrix.T, matrix.norm(dim=1), unit @ unit.T, weights @ matrix
        torch.testing.assert_close((gramian, norms, cosines, update), products)
        assert_equal(conflicts, products[0] < 0)
        torch.testing.assert_close(length, update.norm())
        matrices.append(matrix)
        updates.append(update)
    whole, weights = torch.cat(matrices, 1), report.task_weights.view(-1, 3).mean(0)
    expected = {"phase": 2.0, "update_norm": float(torch.cat(updates).norm())}
    for i, task in enumerate(TASKS):
        expected[f"loss/{task}"] = float(losses[task])
        expected[f"gradient_norm/{task}"] = float(whole[i].norm())
        expected[f"task_weight/{task}"] = float(weights[i])
        for j in range(i):
            cosine = torch.cosine_similarity(whole[i], whole[j], dim=0)
            expected[f"cosine/{TASKS[j]},{task}"] = float(cosine)
    scalars = report.scalars()
    assert scalars.pop("surgery_ms") > 0
    assert scalars == pytest.approx(expected)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@SCALED
def test_connection_strength(backend: str, scaled: bool) -> None:
    """Compares each layer's groups, conflicts and removed squared norms with plain autograd."""
    with cs.use_backend(backend):
        setup, opt, _, grads = one_step(None, scaled)
    report, priority = opt.report(), opt.priority()
    assert report.layers == tuple(priority)
    removed, conflicts, pairs = torch.zeros(3, dtype=torch.float64), 0, 0
    for n, (layer, chosen) in enumerate(priority.items()):
        assert torch.equal(report.priorities[n], chosen)
        assert torch.equal(report.channels[n], chosen.bincount(minlength=3))
        module = setup.trunk.get_submodule(layer)
        dim, groups = (1, module.groups) if isinstance(module, nn.ConvTranspose2d) else (0, 1)
        kind = Kind("", tuple(module.weight.shape), out_channel_dim=dim, groups=groups)
        by_task = [rows(grad, kind) for grad in grads[f"{layer}.weight"]]
        for i in range(3):
            group = torch.stack([g[chosen == i].flatten() for g in by_task])
            products = group @ group[i]
            lost = torch.where(products < 0, (products / group[i].norm()) ** 2, 0.0)
            found = report.products[n, i], report.removed[n, i], report.conflicts[n, i]
            torch.testing.assert_close(found, (products, lost, products < 0))
            removed += lost
            pairs += 2 * bool(group.numel())
            conflicts += int((products < 0).sum())
    assert conflicts > 0
    scalars, channels = report.scalars(), torch.cat(list(priority.values()))
    for i, task in enumerate(TASKS):
        assert scalars[f"removed_norm/{task}"] == pytest.approx(float(removed[i].sqrt()))
        share = float((channels == i).double().mean())
        assert scalars[f"channel_share/{task}"] == pytest.approx(share)
    assert scalars["conflict_share"] == pytest.approx(conflicts / pairs)
    assert report.gramian is report.cosines is report.gradient_norms is report.update_norm is None


def test_absent_tasks() -> None:
    """Absent tasks keep their rows, which have no gradients, conflicts or pairs."""
    setup, opt = started()
    opt.step(setup.closure(0))
    opt.step(setup.closure(1), tasks=["edges", "depth"])
    report, scalars = opt.report(), opt.report().scalars()
    assert (report.tasks, report.rows) == (("depth", "edges"), tuple(TASKS))
    assert not report.conflicts[:, 1].any()
    assert not report.conflicts[:, :, 1].any()
    groups = (report.channels > 0)[:, ::2].sum()
    assert scalars["conflict_share"] == pytest.approx(float(report.conflicts.sum() / groups))
    assert "removed_norm/normals" not in scalars
    assert scalars["channel_share/normals"] > 0
    opt.step(setup.closure(1), tasks=["edges"])
    assert "conflict_share" not in opt.report().scalars()
    for weight in ("stem", "block.first.0", "block.second", "up"):
        setup.trunk.get_submodule(weight).requires_grad_(False)
    opt.step(setup.closure(0))
    assert opt.report().layers == ()
    assert not any("share" in name for name in opt.report().scalars())


WEIGHTS = {"depth": 2.0, "normals": 1.0, "edges": 0.5}


@pytest.mark.parametrize(
    ("method", "phase", "weighting"),
    [
        (cs.Sum(), 1, None),
        (cs.Sum(), 2, cs.FixedWeights(WEIGHTS)),
        (cs.GradDrop(), 2, None),
    ],
)
def test_without_surgery(method: cs.Method, phase: int, weighting: cs.Weighting | None) -> None:
    """The report has the losses, and with a weighting also the weighted losses."""
    schedule = cs.Sequential() if phase == 1 else cs.Joint()
    setup, opt = started(method, schedule, weighting=weighting)
    losses = {task: float(loss) for task, loss in opt.step(setup.closure(0)).items()}
    expected = {"phase": phase} | {f"loss/{task}": loss for task, loss in losses.items()}
    if weighting is not None:
        expected |= {f"weighted_loss/{task}": WEIGHTS[task] * losses[task] for task in TASKS}
    scalars = opt.report().scalars()
    assert phase == 1 or scalars.pop("surgery_ms") >= 0
    assert scalars == expected


def test_backward() -> None:
    model, loss, opt = started_problem(cs.UPGrad())
    losses = {task: loss(task) for task in opt.tasks}
    matrix = gradient_rows(list(model.trunk.parameters()), losses.values())
    opt.backward(losses)
    torch.testing.assert_close(opt.report().gramian, matrix @ matrix.T)


def test_the_last_successful_step_is_reported() -> None:
    """A failed step and another run's step are not reported."""
    setup, opt = started()
    with pytest.raises(RuntimeError, match="call step or backward first"):
        opt.report()
    opt.step(setup.closure(0))
    before = opt.report()
    opt.step(setup.closure(1))
    report = opt.report()
    assert (before.step, report.step) == (0, 1)
    assert len({report, opt.report(), report}) == 2  # Reports are compared by identity.
    assert not torch.equal(before.products, report.products)
    with pytest.raises(ZeroDivisionError):
        opt.step(lambda task: 1 / 0)
    assert_equal(opt.report().products, report.products)
    # A NaN must not look like an update without conflicts.
    opt.step(lambda task: setup.closure(0)(task) * (math.nan if task == "edges" else 1.0))
    removed = opt.report().removed
    assert removed[:, :, 2].isnan().any()
    assert math.isnan(opt.report().scalars()["removed_norm/edges"])
    assert not removed[:, 0, 1].isnan().any()
    opt.load_state_dict(opt.state_dict())
    with pytest.raises(RuntimeError, match="call step or backward first"):
        opt.report()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ConnectionStrength", "PCGrad", "NashMTL-layer", "Sum", "Mixed"])
def test_replays_and_reports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays report as steps do; reports change nothing, and read nothing until printed."""
    monkeypatch.setitem(cuda_graphs.DEVICES, "cpu", Recorder)
    monkeypatch.setattr(Recorder, "replays", 0)
    captured, eager, silent = (CASES[name](captured=captured) for captured in (True, False, False))
    reports = []
    for number in range(6):
        for loop in (captured, eager):
            loop.train(number, number + 1)
            with Reads() as reads:
                report = loop.opt.report()
                for part in ("cosines", "update_norm", "channels", "conflicts", "removed"):
                    getattr(report, part)
            assert reads.names == []
            reports.append(report)
        str(report)
    assert Recorder.replays > 1
    # Later steps have not changed earlier reports.
    for first, second in zip(reports[::2], reports[1::2], strict=True):
        numbers = [{**report.scalars(), "surgery_ms": 0} for report in (first, second)]
        assert numbers[0] == numbers[1]
        assert (first.step, first.epoch, first.phase) == (second.step, second.epoch, second.phase)
    silent.train(0, 6)
    assert_equal(eager.setup.state(), silent.setup.state())


def test_as_text() -> None:
    tasks = ["a/b", "c,d", "e"]
    setup = Setup(tasks=tasks)
    opt = setup.start(cs.PCGrad())
    opt.step(setup.closure(0))
    report = opt.report()
    head, *lines = str(report).splitlines()
    assert head.startswith("step 0, phase 2, PCGrad(reduction='sum', seed=0), update norm ")
    assert [line.split()[0] for line in lines] == tasks
    value = report.scalars()["cosine/a/b,c,d"]
    assert f"cosine with a/b {value:.4g}" in lines[1]
    assert repr(report) == f"Report(step=0, phase=2, tasks={tasks}, of=['gramian'])"


def test_cosines_are_at_most_one() -> None:
    """The square of sqrt(3), rounded, is less than 3, so a quotient could exceed 1."""
    equal = torch.full((2, 2), 3.0, dtype=torch.float64)
    report = cs.Report(0, None, 2, "", ("a", "b"), {}, {}, gramian=equal)
    assert report.cosines is not None
    assert report.cosines.tolist() == [[1, 1], [1, 1]]
