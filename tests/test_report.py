"""`MultiTaskOptimizer.report`: its numbers against a plain loop's, and what asking for it costs."""

import math

import pytest
import torch
from layers import Kind
from loops import CASES, Loop
from networks import TASKS, Setup, assert_equal, gradient_rows, started, started_problem
from plain import rows
from recorder import Reads, Recorder
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.engine import cuda_graphs
from cs_kernels.trunk.layers import shared_parameters

pytestmark = pytest.mark.loop

SCALED = pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])


def _one_step(
    method: cs.Method | None, scaled: bool
) -> tuple[Setup, cs.MultiTaskOptimizer, dict[str, Tensor]]:
    """With the rate 0: weights and statistics are still those of the step."""
    setup = Setup(optimizer=torch.optim.SGD, lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None
    opt = setup.start(method, scaler=scaler)
    opt.start_epoch(3)
    return setup, opt, opt.step(setup.closure(0))


def _gradients(setup: Setup) -> list[list[Tensor]]:
    """Each task's gradients of the shared parameters in the first batch."""
    found = []
    for task in TASKS:
        with cs.nn.active_task(setup.trunk, task):
            loss = setup.closure(0)(task)
        shared = shared_parameters(setup.trunk).values()
        found.append(list(torch.autograd.grad(loss, list(shared))))
    return found


@SCALED
@pytest.mark.parametrize(
    "method", [cs.CAGrad(), cs.PCGrad(seed=3), cs.MGDA(groups="layer")], ids=repr
)
def test_gramian_methods(method: cs.GramianMethod, scaled: bool) -> None:
    """Norms, cosines and task weights give the update that is in `.grad`."""
    setup, opt, losses = _one_step(method, scaled)
    report = opt.report()
    assert (report.step, report.epoch, report.phase, report.method) == (0, 3, 2, repr(method))
    assert (report.tasks, report.rows) == (tuple(TASKS), tuple(TASKS))
    assert_equal(dict(report.losses), losses)
    assert report.products is report.channels is report.removed is None

    per_layer = method.groups == "layer"
    shared = shared_parameters(setup.trunk)
    layer_of = [name.rpartition(".")[0] if per_layer else "" for name in shared]
    layers = list(dict.fromkeys(layer_of))
    assert report.layers == (tuple(layers) if per_layer else ())

    def of_layers(tensors: list[Tensor]) -> list[Tensor]:
        pairs = list(zip(layer_of, tensors, strict=True))
        return [torch.cat([x.flatten() for of, x in pairs if of == layer]) for layer in layers]

    matrices = [torch.stack(rows) for rows in zip(*map(of_layers, _gradients(setup)), strict=True)]
    updates = of_layers([p.grad for p in shared.values()])
    numbers = report.gramian, report.gradient_norms, report.cosines, report.conflicts
    numbers = *numbers, report.task_weights, report.update_norm
    for matrix, update, gramian, norms, cosines, conflicts, weights, length in zip(
        matrices, updates, *(x if per_layer else x.unsqueeze(0) for x in numbers), strict=True
    ):
        torch.testing.assert_close(gramian, matrix @ matrix.T)
        torch.testing.assert_close(norms, matrix.norm(dim=1))
        unit = matrix / matrix.norm(dim=1, keepdim=True)
        torch.testing.assert_close(cosines, unit @ unit.T)
        assert_equal(conflicts, matrix @ matrix.T < 0)
        torch.testing.assert_close(weights @ matrix, update)
        torch.testing.assert_close(length, update.norm())

    scalars = report.scalars()
    whole = torch.cat(matrices, 1)
    for i, task in enumerate(TASKS):
        assert scalars[f"gradient_norm/{task}"] == pytest.approx(float(whole[i].norm()))
        mean = float(report.task_weights.view(-1, 3).mean(0)[i])
        assert scalars[f"task_weight/{task}"] == mean
        for j in range(i):
            cosine = torch.cosine_similarity(whole[i], whole[j], dim=0)
            assert scalars[f"cosine/{TASKS[j]},{task}"] == pytest.approx(float(cosine))
    assert scalars["update_norm"] == pytest.approx(float(torch.cat(updates).norm()))
    assert scalars["surgery_ms"] > 0
    assert not any("weighted" in name or "channel" in name for name in scalars)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@SCALED
def test_connection_strength(backend: str, scaled: bool) -> None:
    """Channel groups, conflicts and removed energy, layer by layer, from gradients by autograd."""
    with cs.use_backend(backend):
        setup, opt, _ = _one_step(None, scaled)
    report, priority = opt.report(), opt.priority()
    assert report.layers == tuple(priority)
    names = shared_parameters(setup.trunk)
    grads = dict(zip(names, zip(*_gradients(setup), strict=True), strict=True))
    removed, conflicts, pairs = torch.zeros(3, dtype=torch.float64), 0, 0
    for n, (layer, of_layer) in enumerate(priority.items()):
        assert torch.equal(report.priorities[n], of_layer)
        assert torch.equal(report.channels[n], of_layer.bincount(minlength=3))
        module = setup.trunk.get_submodule(layer)
        dim, groups = (1, module.groups) if isinstance(module, nn.ConvTranspose2d) else (0, 1)
        kind = Kind("", tuple(module.weight.shape), out_channel_dim=dim, groups=groups)
        of_rows = [rows(grad, kind) for grad in grads[f"{layer}.weight"]]
        for i in range(3):
            group = [g[of_layer == i].flatten() for g in of_rows]
            for j in range(3):
                product = group[i] @ group[j]
                torch.testing.assert_close(report.products[n, i, j], product)
                assert bool(report.conflicts[n, i, j]) == bool(product < 0)
                lost = (product / group[i].norm()) ** 2 if product < 0 else 0 * product
                torch.testing.assert_close(report.removed[n, i, j], lost)
                removed[j] += lost
                pairs += i != j and len(group[i]) > 0
                conflicts += bool(product < 0)
    assert conflicts > 0
    scalars = report.scalars()
    channels = torch.cat(list(priority.values()))
    for i, task in enumerate(TASKS):
        assert scalars[f"removed_norm/{task}"] == pytest.approx(float(removed[i].sqrt()))
        share = float((channels == i).double().mean())
        assert scalars[f"channel_share/{task}"] == pytest.approx(share)
    assert scalars["conflict_share"] == pytest.approx(conflicts / pairs)
    assert report.gramian is report.cosines is report.gradient_norms is report.update_norm is None


def test_tasks_that_take_no_part() -> None:
    """Their rows stay, with no gradient: they are in no conflict, and in no pair."""
    setup, opt = started()
    opt.step(setup.closure(0))
    opt.step(setup.closure(1), tasks=["edges", "depth"])
    report = opt.report()
    assert (report.tasks, report.rows) == (("depth", "edges"), tuple(TASKS))
    assert not report.conflicts[:, 1].any()
    assert not report.conflicts[:, :, 1].any()
    held = report.channels > 0
    share = report.conflicts.sum() / (held[:, 0].sum() + held[:, 2].sum())
    scalars = report.scalars()
    assert scalars["conflict_share"] == pytest.approx(float(share))
    assert "removed_norm/normals" not in scalars
    assert scalars["channel_share/normals"] > 0
    opt.step(setup.closure(1), tasks=["edges"])
    assert "conflict_share" not in opt.report().scalars()


def test_without_surgery() -> None:
    """Phase 1 and the plain sum have losses; the weighted ones if there is a weighting."""
    setup, opt = started(schedule=cs.Sequential())
    losses = opt.step(setup.closure(0))
    expected = {"phase": 1.0} | {f"loss/{task}": float(losses[task]) for task in TASKS}
    assert opt.report().scalars() == expected
    weighting = cs.FixedWeights({"depth": 2.0, "normals": 1.0, "edges": 0.5})
    setup, opt = started(cs.Sum(), weighting=weighting)
    losses = opt.step(setup.closure(0))
    scalars = opt.report().scalars()
    assert scalars.pop("surgery_ms") >= 0
    assert scalars["weighted_loss/depth"] == 2 * float(losses["depth"])
    assert scalars["weighted_loss/edges"] == 0.5 * float(losses["edges"])
    assert len(scalars) == 1 + 2 * len(TASKS)


def test_backward() -> None:
    model, loss, opt = started_problem(cs.UPGrad())
    losses = {task: loss(task) for task in opt.tasks}
    matrix = gradient_rows(list(model.trunk.parameters()), losses.values())
    opt.backward(losses)
    torch.testing.assert_close(opt.report().gramian, matrix @ matrix.T)


def test_the_last_step_is_reported() -> None:
    """Not a failed one, and none of another run."""
    setup, opt = started()
    with pytest.raises(RuntimeError, match="call step or backward first"):
        opt.report()
    opt.step(setup.closure(0))
    before = opt.report()
    opt.step(setup.closure(1))
    report = opt.report()
    assert (before.step, report.step) == (0, 1)
    assert len({report, opt.report(), report}) == 2  # They are compared by identity.
    assert not torch.equal(before.products, report.products)
    with pytest.raises(ZeroDivisionError):
        opt.step(lambda task: 1 / 0)
    assert_equal(opt.report().products, report.products)
    opt.load_state_dict(opt.state_dict())
    with pytest.raises(RuntimeError, match="call step or backward first"):
        opt.report()


def test_a_nan_is_seen() -> None:
    """It must not look like an update without conflicts."""
    setup, opt = started()
    opt.step(lambda task: setup.closure(0)(task) * (float("nan") if task == "edges" else 1.0))
    removed = opt.report().removed
    assert removed[:, :, 2].isnan().any()
    assert math.isnan(opt.report().scalars()["removed_norm/edges"])
    assert not removed[:, 0, 1].isnan().any()


@pytest.mark.parametrize("name", ["ConnectionStrength", "PCGrad", "NashMTL-layer", "Mixed"])
def test_replays_report_as_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cuda_graphs.DEVICES, "cpu", Recorder)
    monkeypatch.setattr(Recorder, "replays", 0)
    captured, eager = CASES[name](captured=True), CASES[name](captured=False)
    kept = [
        [loop.train(number, number + 1).opt.report() for loop in (captured, eager)]
        for number in range(10)
    ]
    assert Recorder.replays > 3
    for first, second in kept:  # Later replays have changed none of them.
        scalars = [report.scalars() for report in (first, second)]
        for numbers in scalars:
            numbers.pop("surgery_ms", None)
        assert scalars[0] == scalars[1]
        assert (first.step, first.epoch, first.phase) == (second.step, second.epoch, second.phase)


@pytest.mark.parametrize("name", ["ConnectionStrength", "PCGrad", "NashMTL-layer", "Sum", "Mixed"])
def test_a_report_changes_nothing(name: str) -> None:
    """Nor does it read anything on the host before a number is read."""
    asked, silent = CASES[name](captured=False), CASES[name](captured=False)
    for number in range(6):
        asked.train(number, number + 1)
        with Reads() as reads:
            report = asked.opt.report()
            for part in ("cosines", "update_norm", "channels", "conflicts", "removed"):
                getattr(report, part)
        assert reads.names == []
        str(report)
    silent.train(0, 6)
    assert_equal(asked.setup.state(), silent.setup.state())


def test_nothing_prioritized_that_trains() -> None:
    setup, opt = started()
    opt.step(setup.closure(0))
    for weight in ("stem", "block.first.0", "block.second", "up"):
        setup.trunk.get_submodule(weight).requires_grad_(False)
    opt.step(setup.closure(0))
    report = opt.report()
    assert report.layers == ()
    assert not any("share" in name for name in report.scalars())


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


def test_a_method_may_report_nothing() -> None:
    loop = Loop(cs.GradDrop(), captured=False).train(0, 1)
    names = {"phase", "surgery_ms", *(f"loss/{t}" for t in TASKS)}
    assert set(loop.opt.report().scalars()) == names


def test_cosines_are_at_most_one() -> None:
    """The square of the root of 3 is rounded below 3."""
    equal = torch.full((2, 2), 3.0, dtype=torch.float64)
    report = cs.Report(0, None, 2, "", ("a", "b"), {}, {}, gramian=equal)
    assert report.cosines is not None
    assert report.cosines.tolist() == [[1, 1], [1, 1]]
