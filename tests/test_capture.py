"""Captured steps: replays train as eager steps do, bit by bit, in a model of CUDA graphs."""

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
    """Steps on the CPU are captured."""
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
    """Losses, parameters, buffers, gradients and states; after the warm-up all are replays."""
    trained_alike(lambda captured: CASES[name](captured=captured).train())
    phases = 2 if name in ("Switch", "Mixed", "FAMO") else 1
    assert Recorder.captures == phases
    assert Recorder.replays == STEPS - 2 * phases


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["PCGrad", "GradDrop", "Mixed", "Uncertainty", "Tchebycheff", "FAMO", "GradNorm"]
)
def test_a_captured_run_resumes(name: str) -> None:
    """In both ways, captured and eager; what was saved does not change in later replays."""
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


@pytest.mark.parametrize("method", [cs.PCGrad(), cs.GradDrop()], ids=repr)
def test_replays_draw_anew(method: cs.Method) -> None:
    """On gradients that stay: three directions, each in conflict with the others."""
    trunk = nn.Linear(2, 1, bias=False)
    directions = torch.tensor([[1.0, 0.0], [-0.6, 0.9], [-0.5, -1.0]])
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk, lr=0.0), TASKS, method)
    captured = opt.capture(lambda task: trunk(directions[TASKS.index(task)]).sum())
    updates = []
    for _ in range(23):
        captured()
        updates.append(tuple(trunk.weight.grad.flatten().tolist()))
    assert Recorder.replays == 20
    assert len(set(updates[3:])) > 3


def test_other_steps_between_replays() -> None:
    """The counter follows, and `.grad` is that of the last step."""

    def train(captured: bool) -> Loop:
        loop = Loop(cs.GradDrop(), captured=captured)
        for number in range(10):
            loop.train(number, number + 1)
            if number % 3 == 2:
                loop.opt.step(loop._loss)
            if number == 5:
                loop.setup.optimizer.zero_grad()
        return loop

    trained_alike(train)
    assert Recorder.captures == 1


def _norm(loop: Loop) -> Any:
    return next(iter(cs.nn.task_norms(loop.setup.trunk)))


def _move(loop: Loop, _: int) -> None:
    """The parameters stay the same objects and get other memory, as by `module.to`."""
    for parameter in loop.setup.trunk.parameters():
        parameter.data = parameter.data.clone()


def _replace_buffer(norm: nn.Module) -> None:
    norm.running_mean = norm.running_mean + 1


def _replace_norm(loop: Loop, _: int) -> None:
    """With the same parameters; a step sees it before the captured one does."""
    old, new = _norm(loop).depth, nn.BatchNorm2d(8, eps=0.5).double()
    new.weight, new.bias = old.weight, old.bias
    _norm(loop).depth = new
    loop.opt.step(loop._loss, TASKS[:2])


def _clip(loop: Loop, _: int) -> None:
    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(loop.setup.parameters(), 0.01)

    loop.setup.optimizer.register_step_pre_hook(clip)


def _option(loop: Loop, _: int) -> None:
    name, value = ("leak", 0.5) if isinstance(loop.opt.method, cs.GradDrop) else ("max_norm", 9)
    setattr(loop.opt.method, name, value)


def _load_weighting(loop: Loop, _: int) -> None:
    """A step of other tasks has other kept weights."""
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
    "buffer": lambda loop, _: _replace_buffer(_norm(loop).depth),
    "buffer of a head": lambda loop, _: _replace_buffer(loop.setup.heads["depth"][0]),
    "normalization": _replace_norm,
    "hook": _clip,
    "option": _option,
    "weighting": lambda loop, number: setattr(
        loop.opt, "weighting", cs.FixedWeights(dict.fromkeys(TASKS, 1 / number))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("method", [cs.GradDrop, cs.NashMTL])
def test_captured_again(method: Callable[[], cs.Method], change: str) -> None:
    """Something changes before steps 5 and 8; the heads have statistics too."""

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


def test_a_learning_rate_in_a_tensor() -> None:
    """It changes in every step, and nothing is captured again."""

    def train(captured: bool) -> Loop:
        loop = Loop(cs.PCGrad(), captured=captured, lr=torch.tensor(0.05), fused=True)
        rate = torch.optim.lr_scheduler.ExponentialLR(loop.setup.optimizer, 0.8)
        return loop.train(stop=8, rate=rate)

    trained_alike(train)
    assert (Recorder.captures, Recorder.replays) == (1, 6)


def test_a_scaler() -> None:
    """It skips a step with infinite gradients, and lowers its scale, in a replay too."""

    def train(captured: bool) -> Loop:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
        optimizer = partial(torch.optim.SGD, momentum=0.9, fused=True)
        loop = Loop(cs.CAGrad(), captured=captured, optimizer=optimizer, scaler=scaler)
        loop.setup.batches[6][1].fill_(torch.inf)
        scales.append(loop.train().opt.scaler)
        return loop

    scales: list[torch.amp.GradScaler] = []
    loop = trained_alike(train)
    assert all(tensor.isfinite().all() for tensor in loop.setup.state(grads=False))
    assert scales[0].get_scale() == scales[1].get_scale() < 8 * 2**3
    assert Recorder.captures == 1


def test_nash_mtl_keeps_nothing() -> None:
    """A batch whose gradients are not finite leaves nothing for the steps after it."""

    def train(captured: bool) -> Loop:
        loop = Loop(cs.NashMTL(), captured=captured)
        loop.setup.batches[6][1].fill_(torch.inf)

        def finite(*_: object) -> None:
            for parameter in loop.setup.parameters():
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)

        loop.setup.optimizer.register_step_pre_hook(finite)
        return loop.train(stop=9)

    loop = trained_alike(train)
    assert Recorder.replays == 7
    assert loop.opt.method.captured_state() == []
    assert all(tensor.isfinite().all() for tensor in loop.setup.state(grads=False))


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
    """Replays do not copy running statistics for steps that fail."""
    for schedule in (cs.Joint(), cs.Sequential()):
        Loop(cs.PCGrad(), schedule, captured=True).train(stop=3)
        assert "aten::native_batch_norm" in Recorder.operators
        assert {"aten::cat", "aten::stack"}.isdisjoint(Recorder.operators)


def test_without_graphs_every_call_is_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(cuda_graphs.DEVICES, "cpu")
    trained_alike(lambda captured: Loop(cs.GradDrop(), captured=captured).train(stop=4))


class Counting(cs.GramianMethod):
    """A method of a user, with a state on the host."""

    def weights(self, gramian: Tensor, step: cs.Step | None = None) -> Tensor:
        return gramian.new_ones(len(gramian))

    def state_dict(self) -> dict[str, Any]:
        return {"number": 3}


class Factor(cs.Weighting):
    def weigh(self, task: str, loss: Tensor, step: cs.Step) -> Tensor:
        return loss * 2

    def state_dict(self) -> dict[str, Any]:
        return {"factor": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backward": Tensor.backward}, "backward must be None for a captured step, got <"),
        ({"method": cs.NashMTL(3)}, r"update_every must be 1 in a captured step, got 3 by Nash"),
        ({"method": Counting()}, r"state in place, but Counting\(\) has a state and no"),
        ({"weighting": Factor()}, "state in place, but .*Factor"),
        (
            {"scaler": torch.amp.GradScaler("cpu")},
            "scaler must have optimizers with fused=True.*got SGD without",
        ),
    ],
)
def test_what_replays_would_get_wrong(options: dict[str, Any], message: str) -> None:
    _, loss, opt = started_problem(**{"method": cs.PCGrad(), **options})
    with pytest.raises(ValueError, match=message):
        opt.capture(loss)
    assert opt.state_dict()["steps"] == Recorder.captures == 0


def test_arguments() -> None:
    _, loss, opt = started_problem(cs.PCGrad())
    for arguments, error, message in (
        ({"closure": None}, TypeError, "closure must be a function"),
        ({"tasks": ["c"]}, ValueError, "tasks must be among .*got 'c'"),
        ({"warmup": 0}, ValueError, "warmup must be at least 1, got 0"),
        ({"warmup": 1.5}, TypeError, "warmup must be an integer, got 1.5"),
    ):
        with pytest.raises(error, match=message):
            opt.capture(**{"closure": loss, **arguments})


def test_optimizers_that_cannot_be_captured() -> None:
    model, loss, *_ = problem()
    adam, sgd = torch.optim.Adam(model.parameters()), sgd_of(model)
    sgd.add_param_group({"params": [nn.Parameter(torch.ones(3, device="meta"))]})
    for optimizer, message in (
        (adam, r"built with capturable=True.*got Adam with"),
        (sgd, r"parameters on cpu alone.*shape \(3,\) on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            cs.MultiTaskOptimizer(model, optimizer, AB, cs.PCGrad()).capture(loss)


def test_an_optimizer_that_counts_on_the_host() -> None:
    """Its steps before the capture are as ever."""

    class Counted(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            super().step()
            self.state[self.param_groups[0]["params"][0]]["step"] = 1

    model, loss, *_ = problem()
    sgd = Counted(model.parameters(), lr=0.1)
    captured = cs.MultiTaskOptimizer(model, sgd, AB, cs.PCGrad()).capture(loss, warmup=1)
    captured()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"keep its state on cpu.*got 'step': 1"):
        captured()
    assert_equal(model.state_dict(), before)


def test_a_weighting_by_the_number_of_the_step() -> None:
    class Ramp(cs.Weighting):
        def weigh(self, task: str, loss: Tensor, step: cs.Step) -> Tensor:
            return loss * step.number

    _, loss, opt = started_problem(weighting=Ramp(), method=cs.PCGrad())
    captured = opt.capture(loss, warmup=1)
    captured()
    with pytest.raises(RuntimeError, match=r"step\.number changes from replay to replay"):
        captured()
    assert opt.state_dict()["steps"] == 1


def test_autocast_around_a_captured_step() -> None:
    """Its cache has weights cast to half precision, which the graph would read for ever."""
    _, loss, opt = started_problem(cs.PCGrad())
    captured = opt.capture(loss, warmup=1)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(RuntimeError, match="autocast must be inside the closure"),
    ):
        captured()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        for _ in range(3):
            captured()
    assert Recorder.replays == 2


def test_batch_normalization_without_momentum() -> None:
    setup, opt = started()
    setup.trunk.up_norm.of("depth").momentum = None
    with pytest.raises(ValueError, match=r"momentum=None in up_norm\.depth"):
        opt.capture(setup.closure(0))


def test_gradients_that_wait_for_their_update() -> None:
    _, loss, opt = started_problem(cs.PCGrad())
    captured = opt.capture(loss, warmup=1)
    for _ in range(3):
        captured()
    opt.backward({task: loss(task) for task in AB}, update=False)
    for call in (captured, lambda: opt.capture(loss)):
        with pytest.raises(RuntimeError, match=r"forget the gradients of backward"):
            call()
    opt.backward({task: loss(task) for task in AB})
    with pytest.raises(RuntimeError, match=r"the update of the last backward"):
        captured()
    assert Recorder.replays == 2


def test_a_capture_around_a_step_is_refused() -> None:
    _, loss, opt = started_problem(cs.PCGrad())
    losses = {task: loss(task) for task in AB}
    captured = opt.capture(loss)
    Recorder.capturing = True
    try:
        for call in (
            lambda: opt.step(loss),
            lambda: opt.backward(losses),
            captured,
            lambda: opt.capture(loss),
        ):
            with pytest.raises(RuntimeError, match=r"use MultiTaskOptimizer.capture\(closure\)"):
                call()
    finally:
        Recorder.capturing = False
    assert opt.state_dict()["steps"] == 0


@pytest.mark.parametrize("schedule", [cs.Joint(), cs.Sequential()], ids=repr)
def test_a_capture_that_fails_changes_nothing(schedule: cs.Schedule) -> None:
    """Nor do later steps differ."""
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


def test_a_saved_state_stays_as_it_is() -> None:
    """Tensors that are updated in place are copied into a state, and out of it."""
    gramian = torch.tensor([[1.0, -0.5], [-0.5, 2.0]]).double()
    parts = nash, weighting = cs.NashMTL(), cs.DynamicWeightAverage()

    def step(number: int) -> None:
        nash.weights(gramian * (number + 1), cs.Step(number, ("a", "b")))
        weighting.observe(cs.Step(losses={"a": torch.tensor(1.0 + number)}))

    weighting.start_epoch(0)
    step(0)
    step(1)
    states = [part.state_dict() for part in parts]
    before = numbers(*states)
    step(2)
    assert numbers(*states) == before
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    step(3)
    assert numbers(*states) == before
    assert numbers(*parts) != before


def test_dropout_draws_in_replays() -> None:
    _, loss, opt = started_problem(cs.CAGrad())
    captured = opt.capture(lambda task: nn.functional.dropout(loss(task).expand(8), 0.5).sum())
    assert len({captured()["a"].item() for _ in range(12)}) > 3
    assert Recorder.replays == 9
