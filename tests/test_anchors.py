"""Kept gradients of protected tasks, against a plain loop in float64."""

import copy
import io
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from networks import TASKS as RANK_TASKS
from networks import flat_grad, gradient_rows
from rank_networks import Network, on_ranks
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.step import Anchor

TASKS = ["old", "new", "newer"]
STEPS = 30


class Loop:
    """A trunk, a head per task, and a batch per step."""

    def __init__(self, method: cs.Method, trunk: nn.Module | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6)).double()
        self.trunk = layers if trunk is None else trunk
        self.heads = nn.ModuleDict({task: nn.Linear(6, 1) for task in TASKS}).double()
        self.x = torch.randn(STEPS, 4, 5, dtype=torch.float64)
        self.parameters = [*self.trunk.parameters(), *self.heads.parameters()]
        self.sgd = torch.optim.SGD(self.parameters, 0.05, momentum=0.5)
        self.opt = cs.MultiTaskOptimizer(self.trunk, self.sgd, TASKS, method, **options)
        self.calls: list[tuple[int, str]] = []

    def loss(self, step: int, task: str) -> Tensor:
        self.calls.append((step, task))
        return (self.heads[task](self.trunk(self.x[step])) - TASKS.index(task)).square().mean()

    def step(self, step: int) -> None:
        self.opt.step(partial(self.loss, step))

    def backward(self, step: int) -> None:
        self.opt.backward({task: self.loss(step, task) for task in self.opt.due_tasks})
        self.sgd.step()

    def micro_batches(self, step: int) -> None:
        for part in (0, 1):
            due = self.opt.due_tasks
            losses = {task: self.loss(step, task) / 2 for task in due}
            self.opt.backward(losses, update=part == 1)
        self.sgd.step()

    def closures(self, step: int) -> None:
        def half(task: str) -> Tensor:
            return self.loss(step, task) / 2

        self.opt.step([half] * 2)


def _flat(grads: Any) -> Tensor:
    return torch.cat([grad.flatten() for grad in grads])


def _train_plainly(loop: Loop, every: int, rank: int | None, only: bool) -> None:
    """The same training as a plain loop."""
    kept: list[Tensor] = []
    shared = [*loop.trunk.parameters()]
    for step in range(STEPS):
        refreshes = step % every == 0
        loop.sgd.zero_grad()
        rows = {}
        for task in TASKS if refreshes else TASKS[1:]:
            own = [*loop.heads[task].parameters()]
            grads = torch.autograd.grad(loop.loss(step, task), [*shared, *own])
            rows[task] = _flat(grads[: len(shared)])
            for parameter, grad in zip(own, grads[len(shared) :], strict=True):
                parameter.grad = grad
        z = rows["new"] + rows["newer"]
        if refreshes:
            kept = [rows["old"], *kept][: rank or 1]
        if rank is None:
            update = z - torch.clamp(z @ kept[0], max=0) / (kept[0] @ kept[0]) * kept[0]
        else:
            span = torch.stack(kept, 1)
            update = z - span @ torch.linalg.lstsq(span, z.unsqueeze(1)).solution[:, 0]
        if refreshes and not only:
            update = update + rows["old"]
        for parameter, grad in zip(shared, update.split([p.numel() for p in shared]), strict=True):
            parameter.grad = grad.view_as(parameter).clone()
        loop.sgd.step()


@pytest.mark.loop
@pytest.mark.parametrize("way", ["step", "backward", "micro_batches", "closures"])
@pytest.mark.parametrize(
    ("every", "rank", "only"),
    [
        (1, None, False),
        (4, None, False),
        (16, None, True),
        (1, 3, False),
        (4, 2, True),
        (4, 9, False),
    ],
)
def test_a_plain_loop_trains_the_same(way: str, every: int, rank: int | None, only: bool) -> None:
    options = {"refresh_every": every, "rank": rank, "constraint_only": only}
    loop = Loop(cs.Protect("old", **options))
    for step in range(STEPS):
        getattr(loop, way)(step)
    plain = Loop(cs.Sum())
    _train_plainly(plain, every, rank, only)
    torch.testing.assert_close(loop.parameters, plain.parameters, rtol=1e-9, atol=1e-10)
    passes = [task for _, task in loop.calls].count("old")
    assert passes == len(range(0, STEPS, every)) * (
        2 if way in ("micro_batches", "closures") else 1
    )


@pytest.mark.loop
def test_each_layer_has_its_own_projection() -> None:
    loop = Loop(cs.Protect("old", refresh_every=3, groups="layer"))
    (old,) = gradient_rows([*loop.trunk.parameters()], [loop.loss(0, "old")])
    loop.step(0)
    z = gradient_rows([*loop.trunk.parameters()], [loop.loss(1, t) for t in TASKS[1:]]).sum(0)
    loop.step(1)
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in (loop.trunk[0], loop.trunk[2])]
    pairs = zip(z.split(sizes), old.split(sizes), strict=True)
    expected = [a - torch.clamp(a @ b, max=0) / (b @ b) * b for a, b in pairs]
    torch.testing.assert_close(flat_grad(loop.trunk), torch.cat(expected))


@pytest.mark.loop
def test_clipped_gradients_are_projected_off_a_kept_one() -> None:
    loop = Loop(cs.Clipped(cs.Protect("old", refresh_every=3), 0.3))
    (old,) = gradient_rows([*loop.trunk.parameters()], [loop.loss(0, "old")])
    loop.step(0)
    rows = gradient_rows([*loop.trunk.parameters()], [-loop.loss(1, t) for t in TASKS[1:]])
    z = (rows * (0.3 / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
    assert z @ old < 0
    loop.opt.step(lambda task: -loop.loss(1, task))
    torch.testing.assert_close(flat_grad(loop.trunk), z - z @ old / (old @ old) * old)


@pytest.mark.loop
@pytest.mark.parametrize("keep_on", [None, "cpu"])
@pytest.mark.parametrize("at", [2, 8])
def test_a_resumed_run_has_the_same_bits(at: int, keep_on: Any) -> None:
    def make() -> Loop:
        return Loop(cs.Protect("old", refresh_every=4, rank=2, keep_on=keep_on))

    whole, first, second = make(), make(), make()
    for step in range(12):
        whole.step(step)
    for step in range(at):
        first.step(step)
    file = io.BytesIO()
    parts = first.opt, first.trunk, first.heads, first.sgd
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    for part, state in zip(
        (second.opt, second.trunk, second.heads, second.sgd), states, strict=True
    ):
        part.load_state_dict(state)
    for step in range(at, 12):
        second.step(step)
    assert all(map(torch.equal, second.parameters, whole.parameters))


@pytest.mark.loop
def test_a_state_without_or_with_wrong_gradients() -> None:
    loop = Loop(cs.Protect("old", refresh_every=4))
    loop.step(0)
    state = loop.opt.state_dict()
    wrong = copy.deepcopy(state)
    wrong["anchors"]["gradients"]["old/0"]["0.bias"] = torch.zeros(3)
    with pytest.raises(
        ValueError, match=r"kept gradient of 'old' for '0.bias' of shape \(7,\), got \(3,\)"
    ):
        loop.opt.load_state_dict(wrong)
    other = Loop(
        cs.Protect("old", refresh_every=4), nn.Sequential(nn.Flatten(), nn.Linear(5, 6)).double()
    )
    with pytest.raises(ValueError, match=r"kept gradient of 'old' for '0.weight', which is not"):
        other.opt.load_state_dict(state)
    assert loop.opt.due_tasks == ("new", "newer")
    del state["anchors"]
    with pytest.raises(ValueError, match=r"state must have .*'anchors'"):
        loop.opt.load_state_dict(state)


@pytest.mark.loop
def test_a_state_of_a_run_that_trained_other_parameters() -> None:
    first, second = (Loop(cs.Protect("old", refresh_every=9)) for _ in range(2))
    first.trunk[0].requires_grad_(False)
    first.step(0)
    assert first.opt.due_tasks == ("new", "newer")
    second.opt.load_state_dict(first.opt.state_dict())
    assert second.opt.due_tasks == tuple(TASKS)


@pytest.mark.loop
@pytest.mark.parametrize("rank", [None, 2])
def test_a_network_in_another_precision(rank: int | None) -> None:
    loop = Loop(cs.Protect("old", refresh_every=2, rank=rank))
    loop.step(0)
    for part in (loop.trunk, loop.heads):
        part.float()
    loop.x = loop.x.float()
    for step in (1, 2, 3):
        loop.sgd.state.clear()
        loop.step(step)
    assert loop.opt.report().kept_from == {"old": 2}


@pytest.mark.loop
def test_a_failed_step_leaves_kept_gradients_alone() -> None:
    loop, other = (Loop(cs.Protect("old", refresh_every=2)) for _ in range(2))

    def fail(task: str) -> Tensor:
        if task == "newer":
            raise KeyError(task)
        return other.loss(5, task)

    for step in range(4):
        loop.step(step)
        with pytest.raises(KeyError):
            other.opt.step(fail)
        other.step(step)
    assert all(map(torch.equal, other.parameters, loop.parameters))


@pytest.mark.loop
@pytest.mark.parametrize("rank", [None, 2])
def test_a_non_finite_gradient_is_not_kept(rank: int | None) -> None:
    method = cs.Protect("old", refresh_every=9, rank=rank)
    nan = torch.full((4, 4), torch.nan, dtype=torch.float64)
    step = cs.Step(9, tuple(TASKS), anchors=(Anchor("old", 2),))
    assert method.weights(nan, step).isnan().all()
    loop = Loop(method)
    loop.opt.step(lambda task: loop.loss(0, task) * (torch.inf if task == "old" else 1))
    assert loop.opt.due_tasks == tuple(TASKS)


@pytest.mark.loop
def test_frozen_and_unfrozen_parameters() -> None:
    """A freeze or its end makes all tasks due again; frozen parameters get no update."""
    loop = Loop(cs.Protect("old", refresh_every=9))
    loop.step(0)
    loop.trunk[0].requires_grad_(False)
    assert loop.opt.due_tasks == tuple(TASKS)
    loop.sgd.zero_grad()
    loop.opt.backward({task: loop.loss(1, task) for task in TASKS[1:]})
    assert loop.trunk[0].weight.grad is None
    assert loop.opt.report().kept_from == {"old": 0}
    loop.sgd.step()
    assert loop.opt.due_tasks == tuple(TASKS)
    loop.step(2)
    assert loop.opt.due_tasks == tuple(TASKS[1:])
    loop.trunk[0].requires_grad_(True)
    assert loop.opt.due_tasks == tuple(TASKS)
    before = loop.trunk[0].weight.detach().clone()
    loop.step(3)
    assert not loop.trunk[0].weight.equal(before)
    loop.step(4)
    assert loop.opt.report().kept_from == {"old": 3}


@pytest.mark.loop
def test_a_loss_that_is_not_due_replaces_the_kept_gradient() -> None:
    loop = Loop(cs.Protect("old", refresh_every=9))
    loop.step(0)
    loop.opt.backward({task: loop.loss(1, task) for task in TASKS})
    loop.sgd.step()
    loop.step(2)
    report = loop.opt.report()
    assert report.kept_from == {"old": 1}
    assert report.tasks == ("new", "newer")
    assert report.rows == ("new", "newer", "old")
    assert report.scalars()["kept_age/old"] == 1
    assert "old    kept age 1, gradient norm" in str(report)


@pytest.mark.loop
def test_only_protected_tasks_have_labels() -> None:
    loop = Loop(cs.Protect("old", refresh_every=9))
    for step in range(2):
        loop.opt.step(partial(loop.loss, step), tasks=["old"])
    assert [task for _, task in loop.calls] == ["old", "old"]


@pytest.mark.loop
def test_an_unconstrained_update_warns() -> None:
    loop = Loop(cs.Protect("old", refresh_every=3))
    with pytest.warns(UserWarning, match="contain 'old', because no gradient of it is kept"):
        loop.opt.backward({"new": loop.loss(0, "new")})
    loop.sgd.step()
    loop.backward(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.opt.backward({"new": loop.loss(2, "new")})


@pytest.mark.loop
def test_another_method_and_another_phase() -> None:
    loop = Loop(cs.Protect("old", refresh_every=9), schedule=cs.Mixed(2, draw="step", seed=3))
    loop.opt.start_epoch(1)
    for step in range(6):
        loop.step(step)
        if loop.opt.phase == 1:
            assert loop.opt.due_tasks == tuple(TASKS)
    loop.opt.method = cs.Protect("new", refresh_every=9)
    assert loop.opt.due_tasks == tuple(TASKS)


@pytest.mark.loop
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cs.Protect("a", refresh_every=0), "refresh_every must be at least 1, got 0"),
        (lambda: cs.Protect("a", rank=0), "rank must be at least 1, got 0"),
        (lambda: cs.Protect("a", rank=1, levels={"b": 1}), "levels must be None with rank, got"),
        (
            lambda: cs.Protect("a", keep_on="cpu"),
            "keep_on='cpu' needs refresh_every above 1, or rank",
        ),
        (lambda: cs.Protect("a", keep_on="gpu"), "keep_on must be 'cpu' or None, got 'gpu'"),
        (lambda: cs.Protect("a", rank=2, update_every=2), "update_every must be 1 if gradients"),
        (
            lambda: cs.GradientBalancer(
                nn.Linear(2, 2).parameters(), ["a", "b"], cs.Protect("a", refresh_every=2)
            ),
            "method must not keep gradients, got Protect",
        ),
    ],
)
def test_wrong_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.loop
def test_gradnorm_takes_only_the_tasks_of_the_step() -> None:
    loop = Loop(cs.Protect("old", refresh_every=2), weighting=cs.GradNorm())
    for step in range(4):
        loop.step(step)
    assert loop.opt.report().rows == ("new", "newer", "old")


KINDS = ["replicated", "fully_shard"]


def _trained(network: Network, steps: range, **options: Any) -> cs.MultiTaskOptimizer:
    opt = network.start(cs.Protect(RANK_TASKS[0], refresh_every=4, rank=2), **options)
    for step in steps:
        opt.step(partial(network.loss, step))
    return opt


def _state_alone() -> dict[str, Any]:
    return _trained(Network("alone", 0, 1), range(6)).state_dict()


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, {"kind": "alone"})
def test_a_state_of_one_process_resumes_on_ranks(rank: int, kind: str) -> list[Tensor]:
    network = Network(kind, rank, 2)
    opt = _trained(network, range(6))
    opt.load_state_dict(_state_alone())
    opt.step(partial(network.loss, 6))
    assert opt.report().kept_from == {RANK_TASKS[0]: 4}
    return network.state()


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_checkpoint_of_ranks_has_the_same_bits(rank: int, kind: str) -> list[Tensor]:
    networks = [Network(kind, rank, 2) for _ in range(2)]
    first, second = (_trained(network, range(6)) for network in networks)
    with tempfile.TemporaryDirectory() as mine:
        folder = [mine]
        dist.broadcast_object_list(folder)
        dcp.save({"opt": first}, checkpoint_id=folder[0])
        fresh = networks[1].start(cs.Protect(RANK_TASKS[0], refresh_every=4, rank=2))
        fresh.optimizer.load_state_dict(second.optimizer.state_dict())
        dcp.load({"opt": fresh}, checkpoint_id=folder[0])
        dist.barrier()
    for network, opt in zip(networks, (first, fresh), strict=True):
        for step in (6, 7):
            opt.step(partial(network.loss, step))
    states = [network.state() for network in networks]
    assert all(map(torch.equal, *states))
    return states[0]
