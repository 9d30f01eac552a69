"""Captured steps: in a stand-in for CUDA graphs, replays equal eager steps bit for bit."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from loops import CASES, STEPS, Loop, assert_alike, numbers
from networks import (
    AB,
    TASKS,
    assert_equal,
    problem,
    refused,
    restore,
    saved,
    sgd_of,
    started,
    started_problem,
)
from recorder import Recorder
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.engine import cuda_graphs

pytestmark = pytest.mark.loop


@pytest.fixture(autouse=True)
def _captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures steps on the CPU with the recorder."""
    monkeypatch.setitem(cuda_graphs.DEVICES, "cpu", Recorder)
    monkeypatch.setattr(Recorder, "captures", 0)
    monkeypatch.setattr(Recorder, "replays", 0)


def trained_alike(train: Callable[..., Loop]) -> Loop:
    """Trains with captured steps, then with eager ones; returns the first loop."""
    captured, eager = train(captured=True), train(captured=False)
    assert_alike(captured, eager)
    return captured


@pytest.mark.parametrize("name", CASES)
def test_replays_are_steps(name: str) -> None:
    """Losses, parameters, buffers, gradients and states agree; all steps after warm-up replay."""
    trained_alike(lambda captured: CASES[name](captured=captured).train())
    phases = 2 if name in ("Switch", "Mixed", "FAMO") else 1
    assert Recorder.captures == phases
    assert Recorder.replays == STEPS - 2 * phases


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["PCGrad", "GradDrop", "Mixed", "Uncertainty", "Tchebycheff", "FAMO", "GradNorm"]
)
def test_a_captured_run_resumes(name: str) -> None:
    """A run resumes captured or eager; later replays do not change a saved state."""
    first = CASES[name](captured=True).train(0, 7)
    states = saved(first.setup, first.opt)
    kept = first.opt.state_dict()
    straight = first.train(7, STEPS)
    assert numbers(kept) == numbers(states[-1])
    for captured in (True, False):
        resumed = CASES[name](captured=captured)
        restore(copy.deepcopy(states[:-1]) + states[-1:], resumed.setup, resumed.opt)
        resumed.train(7, STEPS)
        assert_equal(resumed.setup.state(), straight.setup.state())
        assert_equal(resumed.losses, straight.losses[7:])
        assert numbers(resumed.opt) == numbers(straight.opt)
        assert numbers(kept) == numbers(states[-1])


@pytest.mark.parametrize("method", [cs.PCGrad(), cs.GradDrop(), cs.Sum()], ids=repr)
def test_replays_draw_anew(method: cs.Method) -> None:
    """Gradients are constant, in three conflicting directions; for Sum, dropout is random."""
    trunk = nn.Linear(2, 1, bias=False)
    directions = torch.tensor([[1.0, 0.0], [-0.6, 0.9], [-0.5, -1.0]])
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk, lr=0.0), TASKS, method)
    rate = 0.5 if isinstance(method, cs.Sum) else 0.0
    dropout = partial(nn.functional.dropout, p=rate)
    captured = opt.capture(lambda task: trunk(dropout(directions[TASKS.index(task)])).sum())
    updates = []
    for _ in range(23):
        captured()
        updates.append(tuple(trunk.weight.grad.flatten().tolist()))
    assert Recorder.replays == 20
    assert len(set(updates[3:])) > 3


def _other_steps_between(captured: bool) -> Loop:
    """Eager steps advance the counter too, and `.grad` belongs to the last step."""
    loop = Loop(cs.GradDrop(), captured=captured)
    for number in range(10):
        loop.train(number, number + 1)
        if number % 3 == 2:
            loop.opt.step(loop._loss)
        if number == 5:
            loop.setup.optimizer.zero_grad()
    return loop


def _a_learning_rate_in_a_tensor(captured: bool) -> Loop:
    """A scheduler changes the learning rate in every step."""
    loop = Loop(cs.PCGrad(), captured=captured, lr=torch.tensor(0.05), fused=True)
    rate = torch.optim.lr_scheduler.ExponentialLR(loop.setup.optimizer, 0.8)
    return loop.train(stop=8, rate=rate)


def _a_scaler(captured: bool) -> Loop:
    """The scaler skips a step with infinite gradients and lowers its scale, even in a replay."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
    optimizer = partial(torch.optim.SGD, momentum=0.9, fused=True)
    loop = Loop(cs.CAGrad(), captured=captured, optimizer=optimizer, scaler=scaler)
    loop.setup.batches[6][1].fill_(torch.inf)
    assert loop.train().opt.scaler.get_scale() == 16
    return loop


def _a_batch_whose_gradients_are_not_finite(captured: bool) -> Loop:
    """Nash-MTL keeps no state from such a batch."""
    loop = Loop(cs.NashMTL(), captured=captured)
    loop.setup.batches[6][1].fill_(torch.inf)

    def finite(*_: object) -> None:
        for parameter in loop.setup.parameters():
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)

    loop.setup.optimizer.register_step_pre_hook(finite)
    assert loop.opt.method.captured_state() == []
    return loop.train(stop=9)


@pytest.mark.parametrize(
    ("train", "replays"),
    [
        (_other_steps_between, 8),
        (_a_learning_rate_in_a_tensor, 6),
        (_a_scaler, 12),
        (_a_batch_whose_gradients_are_not_finite, 7),
    ],
)
def test_events_after_which_nothing_is_captured_again(
    train: Callable[[bool], Loop], replays: int
) -> None:
    loop = trained_alike(train)
    assert (Recorder.captures, Recorder.replays) == (1, replays)
    assert all(tensor.isfinite().all() for tensor in loop.setup.state(grads=False))


def _replace_norm(loop: Loop, _: int) -> None:
    """The new normalization has the same parameters; an eager step runs before the next replay."""
    old, new = loop.setup.trunk.stem_norm.depth, nn.BatchNorm2d(8, eps=0.5).double()
    new.weight, new.bias = old.weight, old.bias
    loop.setup.trunk.stem_norm.depth = new
    loop.opt.step(loop._loss, TASKS[:2])


def _replace_buffer(norm: nn.Module) -> None:
    norm.running_mean = norm.running_mean + 1


def _move(loop: Loop, _: int) -> None:
    """Like `module.to`, keeps the parameter objects and moves their memory."""
    for parameter in loop.setup.trunk.parameters():
        parameter.data = parameter.data.clone()


def _option(loop: Loop, _: int) -> None:
    name, value = ("leak", 0.5) if isinstance(loop.opt.method, cs.GradDrop) else ("max_norm", 9)
    setattr(loop.opt.method, name, value)


def _load_weighting(loop: Loop, _: int) -> None:
    """A step with other tasks caches other weights."""
    loop.opt.weighting.load_state_dict(loop.opt.weighting.state_dict())
    loop.opt.step(loop._loss, TASKS[:2])


CHANGES: dict[str, Callable[[Loop, int], object]] = {
    "rate": lambda loop, number: loop.setup.optimizer.param_groups[0].update(lr=0.1 / number),
    "state of the weighting": _load_weighting,
    "frozen, then not": lambda loop, number: loop.setup.trunk.up.requires_grad_(number == 8),
    "moved": _move,
    "loaded": lambda loop, _: restore(saved(loop.setup, loop.opt), loop.setup, loop.opt),
    "state of the torch optimizer": lambda loop, _: restore(saved(loop.setup), loop.setup),
    "evaluation": lambda loop, number: loop.setup.trunk.train(number == 8),
    "evaluation of heads": lambda loop, number: loop.setup.heads.train(number == 8),
    "buffer": lambda loop, _: _replace_buffer(loop.setup.trunk.stem_norm.depth),
    "buffer of a head": lambda loop, _: _replace_buffer(loop.setup.heads["depth"][0]),
    "normalization": _replace_norm,
    "hook": lambda loop, _: loop.setup.optimizer.register_step_pre_hook(
        lambda *_: (nn.utils.clip_grad_norm_(loop.setup.parameters(), 0.01), None)[1]
    ),
    "option": _option,
    "weighting": lambda loop, number: setattr(
        loop.opt, "weighting", cs.FixedWeights(dict.fromkeys(TASKS, 1 / number))
    ),
}


@pytest.mark.slow
@pytest.mark.each
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("method", [cs.GradDrop, cs.NashMTL])
def test_captured_again(method: Callable[[], cs.Method], change: str) -> None:
    """The change occurs before steps 5 and 8; the heads have statistics, too."""

    def train(captured: bool) -> Loop:
        loop = Loop(method(), None, cs.DynamicWeightAverage(), captured=captured)
        for task, head in loop.setup.heads.items():
            norm = nn.BatchNorm2d(6, affine=False).double()
            loop.setup.heads[task] = nn.Sequential(norm, head)
        for start, stop in ((0, 5), (5, 8), (8, STEPS)):
            if start:
                CHANGES[change](loop, start)
            loop.train(start, stop)
        return loop

    trained_alike(train)
    assert Recorder.captures >= 2
    assert Recorder.replays >= 4


def test_a_warmup_counts_steps_that_were_made() -> None:
    _, loss, opt = started_problem(cs.PCGrad())
    results: list[Any] = [None, None, 1.0, 1.0]

    def sometimes(task: str) -> Tensor:
        return loss(task) * results[0] if results[0] is not None else None

    captured = opt.capture(sometimes, warmup=1)
    for _ in range(2):
        with pytest.raises(TypeError, match="closure must return a tensor"):
            captured()
        results.pop(0)
    for made in range(2):
        captured()
        assert (Recorder.captures, Recorder.replays) == (made, made)


def test_snapshots_stay_outside() -> None:
    """Replays do not copy running statistics to undo failed steps."""
    for schedule in (cs.Joint(), cs.Sequential()):
        Loop(cs.PCGrad(), schedule, captured=True).train(stop=3)
        assert "aten::native_batch_norm" in Recorder.operators
        assert {"aten::cat", "aten::stack"}.isdisjoint(Recorder.operators)


def test_without_graphs_every_call_is_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(cuda_graphs.DEVICES, "cpu")
    trained_alike(lambda captured: Loop(cs.GradDrop(), captured=captured).train(stop=4))


class Counting(cs.GramianMethod):
    """A user's method, with state on the host."""

    def weights(self, gramian: Tensor, step: cs.Step | None = None) -> Tensor:
        return gramian.new_ones(len(gramian))

    def state_dict(self) -> dict[str, Any]:
        return {"number": 3}


class Ramp(cs.Weighting):
    """Weights losses by the number of the step."""

    def weigh(self, task: str, loss: Tensor, step: cs.Step) -> Tensor:
        return loss * step.number


class StateOfRamp(Ramp):
    def state_dict(self) -> dict[str, Any]:
        return {"factor": 2}


def _capture(**options: Any) -> object:
    given = {name: options.pop(name) for name in ("tasks", "warmup", "closure") if name in options}
    _, loss, opt = started_problem(**{"method": cs.PCGrad(), **options})
    return opt.capture(**{"closure": loss, **given})


def _capture_with(kind: Callable[..., torch.optim.Optimizer], *others: Tensor) -> object:
    model, loss, *_ = problem()
    optimizer = kind([*model.parameters(), *map(nn.Parameter, others)])
    return cs.MultiTaskOptimizer(model, optimizer, AB, cs.PCGrad()).capture(loss)


def _capture_without_momentum() -> object:
    setup, opt = started()
    setup.trunk.up_norm.of("depth").momentum = None
    return opt.capture(setup.closure(0))


META, SCALER = torch.ones(3, device="meta"), torch.amp.GradScaler("cpu")


@pytest.mark.parametrize(
    ("capture", "message"),
    [
        (partial(_capture, backward=Tensor.backward), "backward must be None for a captured step"),
        (partial(_capture, method=cs.NashMTL(3)), "update_every must be 1 .*, got 3 from Nash"),
        (partial(_capture, method=Counting()), r"state in place, but Counting\(\) has a state"),
        (partial(_capture, weighting=StateOfRamp()), "state in place, but .*StateOfRamp"),
        (partial(_capture, scaler=SCALER), "optimizer must have fused=True .*got SGD without"),
        (partial(_capture, closure=None), "closure must be a function"),
        (partial(_capture, tasks=["c"]), "tasks must be among .*got 'c'"),
        (partial(_capture, warmup=0), "warmup must be at least 1, got 0"),
        (partial(_capture, warmup=1.5), "warmup must be an integer, got 1.5"),
        (partial(_capture_with, torch.optim.Adam), r"built with capturable=True.*got Adam with"),
        (partial(_capture_with, torch.optim.SGD, META), r"cpu alone.*shape \(3,\) is on meta"),
        (_capture_without_momentum, r"momentum=None in up_norm\.depth"),
    ],
)
def test_replays_that_would_be_wrong_are_refused(
    capture: Callable[[], object], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        capture()
    assert Recorder.captures == 0


class Counted(torch.optim.SGD):
    """Stores the number of a step on the host."""

    def step(self, closure: None = None) -> None:
        super().step()
        self.state[self.param_groups[0]["params"][0]]["step"] = 1


@pytest.mark.parametrize(
    ("optimizer", "weighting", "message"),
    [
        (Counted, None, r"keep its state on cpu.*got 'step': 1"),
        (torch.optim.SGD, Ramp(), r"step\.number changes from replay to replay"),
    ],
)
def test_numbers_of_the_host_in_a_capture(
    optimizer: Callable[..., torch.optim.Optimizer], weighting: cs.Weighting | None, message: str
) -> None:
    """Steps before the capture work as usual."""
    model, loss, *_ = problem()
    sgd = optimizer(model.parameters(), lr=0.1)
    opt = cs.MultiTaskOptimizer(model, sgd, AB, cs.PCGrad(), weighting=weighting)
    captured = opt.capture(loss, warmup=1)
    captured()
    with refused(model.state_dict, RuntimeError, message):
        captured()
    assert opt.state_dict()["steps"] == 1


def test_autocast_around_a_captured_step() -> None:
    """The graph would read the half-precision weights in autocast's cache forever."""
    _, loss, opt = started_problem(cs.PCGrad())
    captured = opt.capture(loss, warmup=1)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError, match="autocast must be inside the closure"):
            captured()
        torch.set_autocast_cache_enabled(False)
        for _ in range(3):
            captured()
    assert Recorder.replays == 2


def test_gradients_that_wait_for_their_update() -> None:
    _, loss, opt = started_problem(cs.PCGrad())
    captured = opt.capture(loss, warmup=1)
    for _ in range(3):
        captured()
    opt.backward({task: loss(task) for task in AB}, update=False)
    for call in (captured, lambda: opt.capture(loss)):
        with pytest.raises(RuntimeError, match=r"drop the gradients of backward"):
            call()
    opt.backward({task: loss(task) for task in AB})
    with pytest.raises(RuntimeError, match=r"the update of the last backward"):
        captured()
    assert Recorder.replays == 2


def test_a_capture_around_a_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, loss, opt = started_problem(cs.PCGrad())
    losses, step, capture = {task: loss(task) for task in AB}, opt.step, opt.capture
    captured = capture(loss)
    monkeypatch.setattr(Recorder, "capturing", True)
    for call, *given in ((step, loss), (opt.backward, losses), (captured,), (capture, loss)):
        with pytest.raises(RuntimeError, match=r"use MultiTaskOptimizer.capture\(closure\)"):
            call(*given)
    assert opt.state_dict()["steps"] == 0


@pytest.mark.parametrize("schedule", [cs.Joint(), cs.Sequential()], ids=repr)
def test_a_capture_that_fails_changes_nothing(schedule: cs.Schedule) -> None:
    """Later steps equal eager steps, too."""
    wrong: list[str] = []

    def start(captured: bool) -> Loop:
        loop = Loop(cs.GradDrop(), schedule, cs.DynamicWeightAverage(), captured=captured)

        def loss(task: str) -> Tensor:
            value = loop._loss(task)
            return value * value.item() if task in wrong else value

        loop.step = loop.opt.capture(loss, warmup=2) if captured else partial(loop.opt.step, loss)
        return loop.train(0, 2)

    captured, eager = start(True), start(False)
    before = captured.setup.state(grads=False)
    wrong.append("normals")
    with pytest.raises(RuntimeError, match="a host synchronization in a capture"):
        captured.train(2, 3)
    assert_equal(captured.setup.state(grads=False), before)
    assert numbers(captured.opt) == numbers(eager.opt)
    assert all(p.grad is None for p in captured.setup.parameters())
    wrong.clear()
    assert_alike(captured.train(2, 8), eager.train(2, 8))
