"""Failed steps do not change states of methods and weightings; wrong states are not loaded."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from networks import AB, GRAMIAN_METHODS, same_bits, sgd_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import cs_kernels as cs

pytestmark = pytest.mark.loop

TASKS = ["a", "b", "c"]
Part = cs.Method | cs.Weighting

PARTS: dict[str, Callable[[], Part]] = {
    **{kind.__name__: kind for kind in (cs.Sum, cs.GradDrop, *map(type, GRAMIAN_METHODS))},
    "GradVac by layer": lambda: cs.GradVac(groups="layer", beta=0.5),
    "Protect": lambda: cs.Protect("a", levels={"b": 1}),
    "SAGO": lambda: cs.SAGO("a"),
    "kept": lambda: cs.UPGrad(update_every=4),
    "Clipped": lambda: cs.Clipped(cs.GradVac(), 1.0),
    "FixedWeights": lambda: cs.FixedWeights(dict.fromkeys(TASKS, 0.5)),
    "UncertaintyWeights": lambda: cs.UncertaintyWeights(dict.fromkeys(TASKS, "regression")),
    "DynamicWeightAverage": cs.DynamicWeightAverage,
    "RandomWeights": lambda: cs.RandomWeights(0),
    "SmoothTchebycheff": lambda: cs.SmoothTchebycheff(warmup=0),
    "FAMO": cs.FAMO,
    "FAMO later": lambda: cs.FAMO(reevaluate=False),
    "GradNorm": cs.GradNorm,
}


class Loop:
    """A small training loop with a method or weighting, after two steps."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.heads = nn.ModuleDict({task: nn.Linear(8, 1) for task in TASKS})
        part = PARTS[name]()
        given = {
            "method": cs.UPGrad(),
            ("method", "weighting")[isinstance(part, cs.Weighting)]: part,
        }
        learned = part.parameters() if isinstance(part, cs.Weighting) else []
        parameters = [*self.trunk.parameters(), *self.heads.parameters(), *learned]
        self.opt = cs.MultiTaskOptimizer(
            self.trunk, torch.optim.SGD(parameters, lr=0.05), TASKS, **given
        )
        self.opt.start_epoch(0)
        self.batches = torch.randn(6, 8, 4)
        self.steps(2)

    def steps(self, stop: int) -> None:
        while (number := self.opt.state_dict()["steps"]) < stop:
            x = self.batches[number]
            self.opt.step(
                lambda t: (self.heads[t](self.trunk(x)) - TASKS.index(t)).square().mean() + 0.1
            )

    def state(self) -> Any:
        return copy.deepcopy([self.opt.state_dict(), self.trunk.state_dict()])


class FailsIn(TorchDispatchMode):
    """Raises in the n-th operator of the package."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if str(function).startswith("cs_kernels."):
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError("injected")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", PARTS)
def test_a_failed_step_leaves_every_state(name: str) -> None:
    """The next steps equal those of a run without the failure."""
    loop, other = Loop(name), Loop(name)
    before = loop.state()
    for number in range(1, 9):
        try:
            with FailsIn(number):
                loop.steps(3)
            break
        except torch.OutOfMemoryError:
            assert same_bits(loop.state(), before), number
    for one in (loop, other):
        one.steps(5)
    assert same_bits(loop.state(), other.state())


NAN, MISSING = torch.full((3,), torch.nan), object()
KEPT, METHOD, WEIGHTING = ("kept", 0), ("method", 1), ("weighting", 1)
WRONG: list[tuple[str, tuple[Any, ...], object, str]] = [
    ("kept", (*KEPT, "weights"), NAN, "finite task weights of shape"),
    ("kept", (*KEPT, "weights"), torch.ones(1), "of shape"),
    ("kept", (*KEPT, "tasks"), ("x",), "task weights for tasks in"),
    ("kept", (*KEPT, "number"), -1, "number"),
    ("GradVac", (*METHOD, "targets"), NAN, "finite targets of shape"),
    ("GradVac", (*METHOD, "tasks"), ("x", "y", "z"), "no tasks other than"),
    ("Clipped", (*METHOD, "state", "targets"), NAN, "finite targets"),
    ("FAMO", (*WEIGHTING, "logits", "a"), MISSING, "same tasks"),
    ("FAMO", (*WEIGHTING, "last", "a"), MISSING, "same tasks"),
    ("FAMO", (*WEIGHTING, "logits", "a"), torch.zeros(3), "of shape"),
    ("GradNorm", (*WEIGHTING, "first"), {}, "same tasks"),
    ("SmoothTchebycheff", (*WEIGHTING, "nadirs", "z"), torch.zeros(()), "must map tasks in"),
    ("SmoothTchebycheff", (*WEIGHTING, "epoch"), 1.5, "epoch"),
    ("DynamicWeightAverage", (*WEIGHTING, "means"), {"a": [float("nan")]}, "finite means"),
    ("UncertaintyWeights", (*WEIGHTING, "a"), MISSING, "same tasks"),
    *(("PCGrad", ("steps",), value, "steps") for value in (-7, 2**70, 1.5)),
    *(("PCGrad", ("epoch",), value, "epoch") for value in (-1, 2.7, "1")),
]


@pytest.mark.parametrize(("name", "path", "value", "message"), WRONG)
def test_a_wrong_state_is_not_loaded(
    name: str, path: tuple[Any, ...], value: object, message: str
) -> None:
    """The loop continues as if there had been no attempt to load."""
    loop, other = Loop(name), Loop(name)
    state = copy.deepcopy(loop.opt.state_dict())
    loop.opt.load_state_dict(state)
    state |= {part: list(state[part]) for part in ("method", "weighting")}
    entry: Any = state
    for key in path[:-1]:
        entry = entry[key]
    if value is MISSING:
        del entry[path[-1]]
    else:
        entry[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        loop.opt.load_state_dict(state)
    for one in (loop, other):
        one.steps(3)
    assert same_bits(loop.state(), other.state())


@pytest.mark.pairwise
@pytest.mark.parametrize("way", ["step", "backward"])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("method", [cs.DBMTL, cs.NashMTL, lambda: cs.MGDA("loss+"), cs.UPGrad])
@pytest.mark.parametrize(
    "weighting",
    [
        *(cs.EqualWeights, cs.DynamicWeightAverage, cs.GradNorm),
        lambda: cs.UncertaintyWeights(dict.fromkeys(AB, "regression")),
        lambda: cs.FAMO(reevaluate=False),
        lambda: cs.SmoothTchebycheff(warmup=0),
    ],
)
def test_a_loss_of_nan_with_a_finite_gradient(
    way: str, at: int, method: Callable[[], cs.Method], weighting: Callable[[], cs.Weighting]
) -> None:
    """A mean over no labels is NaN, but its gradient is zero, and training continues."""
    trunk, heads = nn.Linear(5, 6), nn.ModuleDict({task: nn.Linear(6, 3) for task in AB})
    weighs = weighting()
    parameters = [*trunk.parameters(), *heads.parameters(), *weighs.parameters()]
    sgd = torch.optim.SGD(parameters, lr=0.05)
    opt = cs.MultiTaskOptimizer(trunk, sgd, AB, method(), weighting=weighs)
    opt.start_epoch(0)
    for number in range(4):
        x, labels = torch.randn(8, 5), torch.randint(0, 3, (8,))

        def loss(task: str) -> Tensor:
            target = torch.full_like(labels, -100) if task == "a" and number == at else labels
            return nn.functional.cross_entropy(heads[task](trunk(x)), target)

        if way == "step":
            losses = opt.step(loss)
        else:
            losses = opt.backward({task: loss(task) for task in AB})
            sgd.step()
        assert losses["a"].isnan() == (number == at)
        assert all(p.isfinite().all() for p in parameters)


@pytest.mark.parametrize("empty", [(0,), (0, 1), (0, 1, 2)])
def test_log_sigma_of_micro_batches_without_labels(empty: tuple[int, ...]) -> None:
    """The gradient of log sigma covers the other micro-batches, and the regularizer once."""
    trunk, head = nn.Linear(3, 4), nn.Linear(4, 1)
    weighting = cs.UncertaintyWeights({"b": "regression"})
    sgd = sgd_of(trunk, head)
    sgd.add_param_group({"params": weighting.parameters(), "lr": 0.0})
    opt = cs.MultiTaskOptimizer(trunk, sgd, ["b"], cs.Sum(), weighting=weighting)
    losses = [torch.nan if n in empty else n + 0.5 for n in range(3)]

    def loss(n: int, _: str) -> Tensor:
        return losses[n] + 0 * head(trunk(torch.ones(3))).sum()

    opt.step([partial(loss, n) for n in range(3)])
    (sigma,) = weighting.parameters()
    expected = 1 - sum(loss for n, loss in enumerate(losses) if n not in empty)
    assert float(sigma.grad) == pytest.approx(expected, rel=1e-5)
