"""States of methods and weightings: a failed step leaves them, a wrong one is not loaded."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from networks import AB, same_bits, sgd_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import cs_kernels as cs

pytestmark = pytest.mark.loop

TASKS = ["a", "b", "c"]

OWNERS: dict[str, Callable[[], dict[str, Any]]] = {
    **{
        method.__name__: lambda method=method: {"method": method()}
        for method in (
            cs.Sum,
            cs.PCGrad,
            cs.CAGrad,
            cs.MGDA,
            cs.AlignedMTL,
            cs.GradDrop,
            cs.NashMTL,
            cs.IMTLG,
            cs.UPGrad,
            cs.FairGrad,
            cs.ConFIG,
            cs.NTKMTL,
            cs.DBMTL,
            cs.GradVac,
        )
    },
    "GradVac by layer": lambda: {"method": cs.GradVac(groups="layer", beta=0.5)},
    "kept": lambda: {"method": cs.UPGrad(update_every=4)},
    "Clipped": lambda: {"method": cs.Clipped(cs.GradVac(), 1.0)},
    "FixedWeights": lambda: {"weighting": cs.FixedWeights(dict.fromkeys(TASKS, 0.5))},
    "UncertaintyWeights": lambda: {
        "weighting": cs.UncertaintyWeights(dict.fromkeys(TASKS, "regression"))
    },
    "DynamicWeightAverage": lambda: {"weighting": cs.DynamicWeightAverage()},
    "RandomWeights": lambda: {"weighting": cs.RandomWeights(0)},
    "SmoothTchebycheff": lambda: {"weighting": cs.SmoothTchebycheff(warmup=0)},
    "FAMO": lambda: {"weighting": cs.FAMO()},
    "FAMO later": lambda: {"weighting": cs.FAMO(reevaluate=False)},
    "GradNorm": lambda: {"weighting": cs.GradNorm()},
}


class Loop:
    def __init__(self, owner: str) -> None:
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.heads = nn.ModuleDict({task: nn.Linear(8, 1) for task in TASKS})
        given = {"method": cs.UPGrad(), **OWNERS[owner]()}
        weighting = given.get("weighting")
        learned = [] if weighting is None else weighting.parameters()
        self.sgd = torch.optim.SGD(
            [*self.trunk.parameters(), *self.heads.parameters(), *learned], lr=0.05
        )
        self.opt = cs.MultiTaskOptimizer(self.trunk, self.sgd, TASKS, **given)
        self.opt.start_epoch(0)
        self.batches = torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(1))
        self.number = 0

    def step(self) -> None:
        x = self.batches[self.number]
        self.opt.step(
            lambda t: (self.heads[t](self.trunk(x)) - TASKS.index(t)).square().mean() + 0.1
        )
        self.number += 1

    def state(self) -> Any:
        return copy.deepcopy([self.opt.state_dict(), self.trunk.state_dict()])


class FailsIn(TorchDispatchMode):
    """Raises at the n-th operation of the package's."""

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


@pytest.mark.parametrize("owner", OWNERS)
def test_a_failed_step_leaves_every_state(owner: str) -> None:
    """And the next steps are those of a run without it."""
    loop, other = Loop(owner), Loop(owner)
    for one in (loop, other):
        one.step(), one.step()
    before = loop.state()
    for number in range(1, 9):
        if loop.number == other.number:
            try:
                with FailsIn(number):
                    loop.step()
            except torch.OutOfMemoryError:
                assert same_bits(loop.state(), before), number
    while other.number < 5:
        other.step()
    while loop.number < 5:
        loop.step()
    assert same_bits(loop.state(), other.state())


def _changed(state: dict[str, Any], *path: Any, to: Any) -> dict[str, Any]:
    state = copy.deepcopy(state)
    place: Any = state
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return state


def _without(of: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in of.items() if name != key}


WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "NaN": (
        "kept",
        lambda s: _changed(s, "kept", 0, "weights", to=torch.full((3,), torch.nan)),
        "finite weights of shape",
    ),
    "shape": ("kept", lambda s: _changed(s, "kept", 0, "weights", to=torch.ones(1)), "of shape"),
    "tasks": ("kept", lambda s: _changed(s, "kept", 0, "tasks", to=("x",)), "tasks among"),
    "number": ("kept", lambda s: _changed(s, "kept", 0, "number", to=-1), "number"),
    "targets": (
        "GradVac",
        lambda s: _changed(s, "method", 1, "targets", to=torch.zeros(3)),
        "finite targets of shape",
    ),
    "names": ("GradVac", lambda s: _changed(s, "method", 1, "tasks", to=("x", "y", "z")), "among"),
    "inner": (
        "Clipped",
        lambda s: _changed(s, "method", 1, "state", "targets", to=torch.zeros(3)),
        "finite targets",
    ),
    "a logit less": (
        "FAMO",
        lambda s: _changed(
            s, "weighting", 1, "logits", to=_without(s["weighting"][1]["logits"], "a")
        ),
        "same tasks",
    ),
    "a loss less": (
        "FAMO",
        lambda s: _changed(s, "weighting", 1, "last", to=_without(s["weighting"][1]["last"], "a")),
        "same tasks",
    ),
    "a logit's shape": (
        "FAMO",
        lambda s: _changed(s, "weighting", 1, "logits", "a", to=torch.zeros(3)),
        "of shape",
    ),
    "first": (
        "GradNorm",
        lambda s: _changed(s, "weighting", 1, "first", to={}),
        "same tasks",
    ),
    "nadirs": (
        "SmoothTchebycheff",
        lambda s: _changed(s, "weighting", 1, "nadirs", "z", to=torch.zeros(())),
        "tasks among",
    ),
    "its epoch": (
        "SmoothTchebycheff",
        lambda s: _changed(s, "weighting", 1, "epoch", to=1.5),
        "epoch",
    ),
    "means": (
        "DynamicWeightAverage",
        lambda s: _changed(s, "weighting", 1, "means", to={"a": [float("nan")]}),
        "finite means",
    ),
    "log sigma": (
        "UncertaintyWeights",
        lambda s: _changed(s, "weighting", 1, to=_without(s["weighting"][1], "a")),
        "same tasks",
    ),
    **{
        f"steps {value}": ("PCGrad", lambda s, value=value: _changed(s, "steps", to=value), "steps")
        for value in (-7, 2**70, 1.5)
    },
    **{
        f"epoch {value}": ("PCGrad", lambda s, value=value: _changed(s, "epoch", to=value), "epoch")
        for value in (-1, 2.7, "1")
    },
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_state_is_not_loaded(wrong: str) -> None:
    owner, change, message = WRONG[wrong]
    loop, other = Loop(owner), Loop(owner)
    for one in (loop, other):
        one.step(), one.step()
    state = loop.opt.state_dict()
    state["weighting"] = list(state["weighting"])
    state["method"] = list(state["method"])
    loop.opt.load_state_dict(state)
    with pytest.raises(ValueError, match=message):
        loop.opt.load_state_dict(change(state))
    for one in (loop, other):
        one.step()
    assert same_bits(loop.state(), other.state())


@pytest.mark.parametrize("how", ["step", "backward"])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("method", [cs.DBMTL, cs.NashMTL, lambda: cs.MGDA("loss+"), cs.UPGrad])
@pytest.mark.parametrize(
    "weighting",
    [
        cs.EqualWeights,
        lambda: cs.UncertaintyWeights(dict.fromkeys(AB, "regression")),
        lambda: cs.FAMO(reevaluate=False),
        lambda: cs.SmoothTchebycheff(warmup=0),
        cs.DynamicWeightAverage,
        cs.GradNorm,
    ],
)
def test_a_loss_of_nan_with_a_finite_gradient(
    how: str, at: int, method: Callable[[], cs.Method], weighting: Callable[[], cs.Weighting]
) -> None:
    """A mean over no labels: its gradient is zero, and training goes on."""
    torch.manual_seed(0)
    trunk, heads = nn.Linear(5, 6), nn.ModuleDict({task: nn.Linear(6, 3) for task in AB})
    weighs = weighting()
    parameters = [*trunk.parameters(), *heads.parameters(), *weighs.parameters()]
    sgd = torch.optim.SGD(parameters, lr=0.05)
    opt = cs.MultiTaskOptimizer(trunk, sgd, AB, method(), weighting=weighs)
    opt.start_epoch(0)
    for number in range(4):
        x, labels = torch.randn(8, 5), torch.randint(0, 3, (8,))

        def loss(task: str, x: Tensor = x, labels: Tensor = labels, number: int = number) -> Tensor:
            ignored = task == "a" and number == at
            target = torch.full_like(labels, -100) if ignored else labels
            return nn.functional.cross_entropy(heads[task](trunk(x)), target)

        if how == "step":
            losses = opt.step(loss)
        else:
            losses = opt.backward({task: loss(task) for task in AB})
            sgd.step()
        assert losses["a"].isnan() == (number == at)
        assert all(p.isfinite().all() for p in parameters)


@pytest.mark.parametrize("empty", [(0,), (0, 1), (0, 1, 2)])
def test_log_sigma_of_micro_batches_without_labels(empty: tuple[int, ...]) -> None:
    """Its gradient is that of the others, and of the regularizer once."""
    torch.manual_seed(0)
    trunk, head = nn.Linear(3, 4), nn.Linear(4, 1)
    weighting = cs.UncertaintyWeights({"b": "regression"})
    sgd = sgd_of(trunk, head)
    sgd.add_param_group({"params": weighting.parameters(), "lr": 0.0})
    opt = cs.MultiTaskOptimizer(trunk, sgd, ["b"], cs.Sum(), weighting=weighting)
    x = torch.randn(3, 8, 3)

    def closure(n: int) -> Callable[[str], Tensor]:
        factor = torch.nan if n in empty else 1 / 3
        return lambda _: (
            head(trunk(x[n])).square().mean().detach() * factor + 0 * head(trunk(x[n])).sum()
        )

    losses = [float(closure(n)("b").detach()) for n in range(3)]
    opt.step([closure(n) for n in range(3)])
    (sigma,) = weighting.parameters()
    expected = 1 - sum(loss for n, loss in enumerate(losses) if n not in empty)
    assert float(sigma.grad) == pytest.approx(expected, rel=1e-5)
