"""State dicts: a resumed run has the same bits, and a state that does not fit is refused."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import AB, TASKS, Setup, assert_equal, restore, saved, sgd_of, started_problem
from torch import Tensor, nn

import cs_kernels as cs

pytestmark = pytest.mark.loop


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}),
        (torch.optim.AdamW, {"lr": 1e-2}),
        (torch.optim.RMSprop, {"lr": 1e-3}),
        (torch.optim.Adagrad, {"lr": 1e-2}),
    ],
)
def test_resumed_run_is_bit_equal(
    optimizer: Callable[..., torch.optim.Optimizer], options: dict[str, float]
) -> None:
    """The run stops in the middle of an epoch; a scheduler changes the learning rate."""

    def build() -> tuple[Setup, cs.MultiTaskOptimizer, torch.optim.lr_scheduler.LRScheduler]:
        setup = Setup(optimizer=optimizer, **options)
        opt = setup.start(schedule=cs.Mixed(epochs=4, seed=1, draw="step"))
        return setup, opt, torch.optim.lr_scheduler.StepLR(setup.optimizer, 1, 0.5)

    def train(parts: tuple, start: int, stop: int) -> set[int]:
        setup, opt, rate = parts
        phases = set()
        for step in range(start, stop):
            if step % 2 == 0:
                opt.start_epoch(step // 2)
            phases.add(opt.phase)
            opt.step(setup.closure(step))
            if step % 2:
                rate.step()
        return phases

    straight, interrupted, resumed = build(), build(), build()
    assert train(straight, 0, 8) == {1, 2}
    train(interrupted, 0, 5)
    restore(saved(*interrupted), *resumed)
    train(resumed, 5, 8)
    assert_equal(straight[0].state(), resumed[0].state())
    assert straight[1].state_dict() == resumed[1].state_dict()
    assert straight[0].optimizer.param_groups[0]["lr"] == options["lr"] * 0.5**4


def _pickled(parts: Any) -> Any:
    return pickle.loads(pickle.dumps(parts))


def _through_a_file(parts: Any) -> Any:
    file = io.BytesIO()
    torch.save(parts, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIED = pytest.mark.parametrize("copied", [copy.deepcopy, _pickled, _through_a_file])
KINDS = dict.fromkeys(TASKS, "regression")


@COPIED
@pytest.mark.parametrize(
    ("method", "schedule", "weighting"),
    [
        (cs.ConnectionStrength(), cs.Mixed(4, seed=1), cs.FAMO()),
        (cs.PCGrad(seed=2), cs.Joint(), cs.DynamicWeightAverage()),
        (cs.NashMTL(update_every=3), cs.Joint(), cs.UncertaintyWeights(KINDS)),
        (cs.GradVac(), cs.Switch(1), cs.RandomWeights(3)),
    ],
    ids=repr,
)
def test_a_copy_trains_on_bit_equal(
    copied: Callable[[Any], Any], method: cs.Method, schedule: cs.Schedule, weighting: cs.Weighting
) -> None:
    """The copy includes the network and the torch optimizer."""
    setup = Setup()
    method, weighting = copy.deepcopy((method, weighting))
    if weighting.parameters():
        setup.optimizer.add_param_group({"params": weighting.parameters()})
    layers = {"bare": None, "stem": "stem_norm"} if method.prioritizes else None
    opt = setup.start(method, schedule, weighting=weighting, layers=layers)
    opt.count_conflicts(0.1)
    opt.start_epoch(0)
    for step in range(4):
        opt.step(setup.closure(step))
    twin, other = copied((setup, opt))
    states = []
    for parts, optimizer in ((setup, opt), (twin, other)):
        for step in range(4, 8):
            optimizer.start_epoch(step // 2)
            optimizer.step(parts.closure(step))
        states.append((parts.state(), str(optimizer.state_dict()), str(optimizer.conflicts())))
    assert other.trunk is twin.trunk
    assert_equal(states[0][0], states[1][0])
    assert states[0][1:] == states[1][1:]


class Own(nn.Linear):
    """A network that holds its own optimizer."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.sgd = torch.optim.SGD(self.parameters(), lr=0.1)
        self.opt = cs.MultiTaskOptimizer(self, self.sgd, AB, cs.PCGrad())

    def train_step(self, x: Tensor) -> None:
        self.opt.step(lambda task: (self(x) - (1 if task == "a" else -1)).square().mean())


@COPIED
@pytest.mark.parametrize("twice", [False, True])
def test_a_network_that_holds_its_optimizer(copied: Callable[[Any], Any], twice: bool) -> None:
    own, x = Own(), torch.randn(5, 3)
    own.train_step(x)
    twin = copied(copied(own)) if twice else copied(own)
    for network in (own, twin):
        network.train_step(x)
    assert twin.opt.trunk is twin
    assert_equal([*own.parameters()], [*twin.parameters()])
    assert twin.opt.state_dict() == own.opt.state_dict()


def test_checkpoints_that_do_not_fit_are_refused_whole() -> None:
    (_, loss, opt), (_, _, fresh) = (
        started_problem(cs.NashMTL(3), weighting=cs.DynamicWeightAverage()) for _ in range(2)
    )
    opt.start_epoch(2)
    opt.step(loss)
    good = copy.deepcopy(opt.state_dict())
    untouched = copy.deepcopy(fresh.state_dict())
    half_weighting = copy.deepcopy(good["weighting"])
    del half_weighting[1]["means"]
    reach = {"nowhere.weight": {"reached": [], "tried": []}}
    equal = "EqualWeights", {}
    for bad, message in (
        ([], "state must have"),
        ({k: v for k, v in good.items() if k != "method"}, r"state must have.*'method'"),
        ({**good, "method": ("PCGrad", {})}, "for method NashMTL, got one for PCGrad"),
        ({**good, "weighting": equal}, "for weighting DynamicWeightAverage, got one for Equal"),
        ({**good, "tasks": 5}, "state must have tasks .*, got 5"),
        ({**good, "tasks": ["a"]}, r"have tasks \['a', 'b'\], got \['a'\]"),
        ({**good, "tasks": ["b", "a"]}, r"have tasks \['a', 'b'\], got \['b', 'a'\]"),
        (
            {**good, "kept": ({"number": 4},)},
            r"a complete state_dict .*KeyError\('tasks'",
        ),
        ({**good, "weighting": half_weighting}, r"a complete state_dict .*KeyError\('means'"),
        ({**good, "steps": None}, "a complete state_dict"),
        ({**good, "reach": (reach,)}, "shared parameters of trunk, got 'nowhere.weight'"),
    ):
        with pytest.raises(ValueError, match=message):
            fresh.load_state_dict(bad)
        assert fresh.state_dict() == untouched
    fresh.load_state_dict(good)
    assert fresh.state_dict()["steps"] == 1


def test_a_checkpoint_for_an_optimizer_that_has_trained_on() -> None:
    """Until the next passes, the state determines which task reaches which parameter."""
    trunk, x = nn.ModuleDict({"one": nn.Linear(3, 4), "own": nn.Linear(3, 4)}), torch.randn(8, 3)
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, cs.PCGrad())

    def step(tasks: str) -> dict[str, str]:
        def loss(task: str) -> Tensor:
            y: Tensor = trunk["one"](x)
            return (y + trunk["own"](x) if task in tasks else y).square().mean()

        opt.step(loss)
        return opt.coverage().own

    of_b = step("b")
    state = copy.deepcopy(opt.state_dict())
    assert (of_b, step("ab")) == ({"own.weight": "b", "own.bias": "b"}, {})
    opt.load_state_dict(state)
    assert opt.coverage().own == of_b
    assert step("ab") == {}


def test_tensors_of_a_checkpoint_move_to_where_they_are_needed() -> None:
    """Simulates a checkpoint on a device other than the losses' device."""
    weighting = cs.DynamicWeightAverage()
    weighting.start_epoch(0)
    weighting.observe(cs.Step(losses={"a": torch.tensor(1.0)}))
    resumed = cs.DynamicWeightAverage()
    resumed.load_state_dict(weighting.state_dict())
    resumed.observe(cs.Step(losses={"a": torch.tensor(2.0, device="meta")}))
    assert resumed.state_dict()["totals"]["a"].device.type == "meta"
