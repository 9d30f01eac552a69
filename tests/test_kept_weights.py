"""`update_every`: steps whose task weights are those of an earlier step."""

import copy
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from networks import AB, GRAMIAN_METHODS, TASKS, Setup, assert_equal, with_gradient
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cs_kernels as cs

pytestmark = pytest.mark.loop

Losses = Callable[[int], Mapping[str, Tensor]]
"""From the number of a step."""
Rows = dict[str, list[Tensor | None]]
"""By task, the gradient of each parameter."""


class Given(cs.GramianMethod):
    """Task weights that are given: other ones in each step that asks for them."""

    def __init__(self, *weights: Sequence[float], update_every: int = 3, groups: Any = "all"):
        super().__init__(groups, update_every)
        self.given, self.asked = weights, 0

    def weights(self, gramian: Tensor, step: cs.Step | None = None) -> Tensor:
        self.asked += 1
        weights = gramian.new_tensor(self.given[(self.asked - 1) % len(self.given)])
        return weights.expand(gramian.shape[:-1]).clone()


def parts() -> tuple[nn.Module, nn.ModuleDict, Tensor]:
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    heads = nn.ModuleDict({task: nn.Linear(4, 2) for task in TASKS}).double()
    return trunk, heads, torch.randn(8, 7, 5).double()


def optimizer_of(method: cs.Method, trunk: nn.Module, *others: Any, **options: Any) -> Any:
    parameters = {p: None for m in (trunk, *others) for p in m.parameters()}
    sgd = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return cs.MultiTaskOptimizer(trunk, sgd, options.pop("tasks", TASKS), method, **options)


def gradients(losses: Mapping[str, Tensor], parameters: Sequence[nn.Parameter]) -> Rows:
    """From plain autograd."""
    rows: Rows = {}
    for task, loss in losses.items():
        for parameter in parameters:
            parameter.grad = None
        loss.backward(retain_graph=True)
        rows[task] = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return rows


def assert_update(
    rows: Rows,
    weights: Mapping[str, float],
    parameters: Sequence[nn.Parameter],
    shared: Iterable[Tensor],
) -> None:
    """Shared parameters have the weighted sum in `.grad`; others the plain sum."""
    of_shared = set(shared)
    for n, parameter in enumerate(parameters):
        found = [
            grad * weights[task] if parameter in of_shared else grad
            for task, grad in ((task, grads[n]) for task, grads in rows.items())
            if grad is not None
        ]
        if found:
            torch.testing.assert_close(parameter.grad, sum(found[1:], found[0]))
        else:
            assert parameter.grad is None


def follow(
    opt: cs.MultiTaskOptimizer,
    losses: Losses,
    shared: Iterable[Tensor],
    *,
    steps: int = 4,
    every: int = 3,
    backward: Callable[[Mapping[str, Tensor]], object] | None = None,
) -> list[int]:
    """Trains, and compares each update; returns how many passes reach a parameter in each step."""
    parameters = [p for group in opt.optimizer.param_groups for p in group["params"]]
    shared, passes = [*shared], list[int]()
    for number in range(steps):
        rows = gradients(losses(number), parameters)
        note = shared[0].register_post_accumulate_grad_hook(lambda _, n=number: passes.append(n))
        (backward or opt.backward)(losses(number))
        note.remove()
        report = opt.report()
        assert report.weights_from == number - number % every
        assert report.task_weights is not None
        weights = dict(zip(report.rows, report.task_weights.tolist(), strict=True))
        assert_update(rows, weights, parameters, shared)
        opt.optimizer.step()
    counted = Counter(passes)
    return [counted[number] for number in range(steps)]


@pytest.mark.parametrize("method", GRAMIAN_METHODS, ids=lambda method: type(method).__name__)
def test_steps_between_make_one_backward_pass(method: cs.GramianMethod) -> None:
    trunk, heads, x = parts()
    method = type(method)(update_every=3)
    opt = optimizer_of(method, trunk, heads)

    def losses(number: int) -> dict[str, Tensor]:
        z = trunk(x[number])
        return {task: (head(z) - n).square().mean() for n, (task, head) in enumerate(heads.items())}

    assert follow(opt, losses, trunk.parameters(), steps=7) == [3, 1, 1, 3, 1, 1, 3]
    assert "update_every=3" in repr(method)
    assert "update_every" not in repr(type(method)())


def test_steps_between_keep_one_gradient() -> None:
    """The update of the step before is freed, where the next one would be written with rows."""
    for every in (1, 3):
        opt, losses, trunk = started(cs.PCGrad(update_every=every))
        for number in range(2):
            before = [weakref.ref(p.grad) for p in trunk.parameters() if p.grad is not None]
            opt.backward(losses(number))
            opt.optimizer.step()
        assert {grad() is None for grad in before} == {every > 1}


class Times(torch.autograd.Function):
    """A function of one's own, of an input and a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Decoder(nn.Module):
    """A trunk, and what stands between it and the losses, by the name of a case."""

    def __init__(self, case: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.case = case
        self.trunk = nn.ModuleDict({"one": nn.Linear(5, 6), "two": nn.Linear(6, 6)})
        self.heads = nn.ModuleDict({task: nn.Linear(6, 2) for task in AB})
        self.between = nn.ModuleDict({task: nn.Linear(6, 6) for task in [*AB, "both"]})
        if case == "own parts of the trunk":
            self.trunk["between"] = self.between
        if case == "frozen heads":
            self.heads.requires_grad_(False)
        self.complex = nn.Parameter(torch.randn(6, dtype=torch.complex128))
        if case == "complex":
            self.trunk.register_parameter("scale", self.complex)
        self.double()
        self.learned = nn.ParameterDict({task: torch.zeros(()).double() for task in AB})
        self.x = torch.randn(8, 7, 5).double()
        if case == "input with a gradient":
            self.x.requires_grad_()

    def losses(self, number: int) -> dict[str, Tensor]:
        case, trunk = self.case, self.trunk
        double = with_gradient(lambda x: 2 * x, lambda grad: 2 * grad)
        z = torch.tanh(trunk["one"](self.x[number]))
        if case == "a function of one's own":
            z = double(z)
        if case == "checkpointed":
            z = checkpoint(trunk["two"], z, use_reentrant=False)
        if case == "complex":
            z = (z * trunk.scale).abs()
        if case == "shared neck":
            z = torch.tanh(self.between["both"](z))
        z = (
            checkpoint(trunk["two"], z, use_reentrant=True)
            if case == "reentrant"
            else trunk["two"](z)
        )
        outputs = {}
        for task, head in self.heads.items():
            y = z
            if case in ("layer behind adapters", "own parts of the trunk"):
                y = trunk["two"](torch.tanh(self.between[task](z)))
            if case == "a head of one's own":
                y = Times.apply(y, self.between[task].bias)
            if case == "one head":
                head = self.heads["a"]
            if case == "reentrant head":
                y = checkpoint(head, y, use_reentrant=True)
            elif case != "no heads":
                y = head(y)
            outputs[task] = (y - AB.index(task)).square().mean()
            if case == "learned":
                outputs[task] = outputs[task] * (-self.learned[task]).exp() + self.learned[task]
        if case == "one loss":
            return dict.fromkeys(AB, outputs["a"])
        return outputs


ONE_PASS = {
    "heads": True,
    "no heads": True,
    "frozen heads": True,
    "one head": True,
    "one loss": False,  # Its head's gradient counts twice.
    "learned": True,
    "layer behind adapters": True,
    "own parts of the trunk": True,
    "checkpointed": True,
    "a function of one's own": True,
    "a head of one's own": True,
    "complex": True,
    "shared neck": False,
    "input with a gradient": False,
    "reentrant": False,
    "reentrant head": False,
}


@pytest.mark.filterwarnings("ignore:reentrant checkpointing hides")
@pytest.mark.parametrize("case", ONE_PASS)
@pytest.mark.parametrize("weights", [(0.25, 2.0), (-1.5, 0.0)], ids=str)
def test_gradients_of_other_parameters_are_not_weighted(
    case: str, weights: tuple[float, ...]
) -> None:
    """One pass where it can give that, else one for each task."""
    model = Decoder(case)
    used, rows = [*model.parameters()], gradients(model.losses(0), [*model.parameters()])
    used = [p for p, *grads in zip(used, *rows.values(), strict=True) if grads != [None, None]]
    opt = optimizer_of(Given(weights), model.trunk, nn.ParameterList(used), tasks=AB)
    own = set(model.between.parameters()) if case == "own parts of the trunk" else set()
    shared = [p for p in model.trunk.parameters() if p not in own]
    passes = follow(opt, model.losses, shared)
    assert passes == ([2, 1, 1, 2] if ONE_PASS[case] else [2, 2, 2, 2])


def test_a_checkpoint_hides_parameters_that_others_show() -> None:
    """A penalty shows the head's parameters, and reentrant checkpointing hides their other use."""
    trunk, heads, x = parts()
    opt = optimizer_of(Given((0.25, 2.0, -1.0)), trunk, heads)

    def losses(number: int) -> dict[str, Tensor]:
        z = trunk(x[number])
        return {
            task: checkpoint(head, z, use_reentrant=True).square().mean()
            + sum(p.square().sum() for p in head.parameters())
            for task, head in heads.items()
        }

    assert follow(opt, losses, trunk.parameters()) == [3, 3, 3, 3]


class Adapted(nn.Module):
    """A trunk with an adapter a task, which may be left out, or used by the others too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.adapters = nn.ModuleDict({task: nn.Linear(4, 4) for task in AB})
        self.double()


@pytest.mark.parametrize("call", ["step", "backward"])
@pytest.mark.parametrize("case", ["unfrozen", "first used", "used by another"])
def test_own_parts_of_the_trunk(call: str, case: str) -> None:
    """What is first reached gets the plain sum once, and solves anew; so does what is unfrozen."""
    trunk, heads = Adapted(), nn.ModuleDict({task: nn.Linear(4, 2) for task in AB}).double()
    _, _, x = parts()
    opt = optimizer_of(Given((0.25, 2.0), (-1.0, 3.0)), trunk, heads, tasks=AB)
    parameters = opt.optimizer.param_groups[0]["params"]

    def losses(number: int) -> dict[str, Tensor]:
        z = torch.tanh(trunk.layer(x[number]))
        found = {}
        for task in AB:
            y = z
            if case != "first used" or number > 0:
                y = trunk.adapters[task](y)
            if case == "used by another" and number > 0:
                y = y + trunk.adapters["a"](z)
            found[task] = heads[task](y).square().mean()
        return found

    for number in range(4):
        if case == "unfrozen":
            trunk.adapters.requires_grad_(number > 0)
        rows = gradients(losses(number), parameters)
        if call == "step":
            opt.step(lambda task, n=number: losses(n)[task])
        else:
            opt.backward(losses(number))
        report = opt.report()
        solves = number in {"unfrozen": (0, 1), "first used": (0, 2)}.get(case, (0, 3))
        assert (report.weights_from == number) == solves
        weights = dict(zip(report.rows, report.task_weights.tolist(), strict=True))
        shared = [*trunk.layer.parameters()]
        if case == "used by another" and number == 3:
            shared += trunk.adapters["a"].parameters()
        assert_update(rows, weights, parameters, shared)
        if call == "backward":
            opt.optimizer.step()


def test_weights_of_features_are_not_those_of_layers() -> None:
    trunk, heads, losses = features_and_losses()
    opt = optimizer_of(cs.UPGrad(update_every=9), trunk, heads)
    found = []
    for number in range(6):
        z, of_tasks = losses(number)
        opt.backward(of_tasks, features=z if number % 4 < 2 else None)
        opt.optimizer.step()
        found.append(opt.report().weights_from)
    assert found == [0, 0, 2, 2, 4, 4]


def test_another_update_every_in_mid_training() -> None:
    opt, losses, _ = started(cs.UPGrad())
    found = []
    for number, every in enumerate([9, 9, 1, 9, 9, 2, 2, 2]):
        opt.method.update_every = every
        opt.backward(losses(number))
        opt.optimizer.step()
        found.append(opt.report().weights_from)
    assert found == [0, 0, 2, 3, 3, 5, 5, 7]


def test_a_method_object_of_two_loops() -> None:
    """Each has kept weights of its own."""
    method = cs.CAGrad(update_every=4)
    loops = [started(method) for _ in range(2)]
    found = []
    for number in range(3):
        for n, (opt, losses, _) in enumerate(loops):
            opt.backward({t: x * (1 + n) ** TASKS.index(t) for t, x in losses(number).items()})
            opt.optimizer.step()
            found.append(opt.report().task_weights)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[5])
    assert not torch.equal(found[0], found[1])
    loops[0][0].method = cs.UPGrad(update_every=4)
    loops[0][0].backward(loops[0][1](3))
    assert loops[0][0].report().weights_from == 3


@pytest.mark.parametrize("method", [cs.MGDA, cs.NashMTL, cs.PCGrad])
@pytest.mark.parametrize("groups", ["all", "layer"])
def test_weights_with_a_zero_gradient_are_not_kept(method: Any, groups: Any) -> None:
    """MGDA would train nothing but a task that had no labels in the batch that solves."""
    opt, losses, _ = started(method(groups=groups, update_every=3))
    found = []
    for number in range(6):
        of_tasks = losses(number)
        if number in (0, 3, 4):
            of_tasks["edges"] = 0 * of_tasks["edges"]
        opt.backward(of_tasks)
        opt.optimizer.step()
        found.append(opt.report().weights_from)
    assert found == [0, 1, 1, 1, 4, 5]


def test_functions_of_one_task_see_its_own_gradient() -> None:
    """Hooks and functions between a head and what the tasks have in common need not be linear."""
    trunk, heads, x = parts()
    opt = optimizer_of(Given((0.25, -3.0, 20.0)), trunk, heads)
    unit = with_gradient(lambda y: y * 1.0, lambda grad: grad / grad.norm())

    def losses(number: int) -> dict[str, Tensor]:
        z = trunk(x[number])
        branches = dict(zip(TASKS, (z * 1.0 for _ in TASKS), strict=True))
        branches["depth"].register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        branches["normals"] = unit(branches["normals"])
        return {task: heads[task](y).square().mean() for task, y in branches.items()}

    assert follow(opt, losses, trunk.parameters()) == [3, 1, 1, 3]


def test_a_pass_for_each_task_frees_the_graph() -> None:
    model = Decoder("shared neck")
    opt = optimizer_of(Given((0.25, 2.0)), model.trunk, model, tasks=AB)
    for number in range(2):
        losses = model.losses(number)
        opt.backward(losses)
        with pytest.raises(RuntimeError, match="a second time"):
            losses["a"].backward()
        opt.optimizer.step()


class Hidden(torch.autograd.Function):
    """Runs a module whose parameters the graph does not have, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.module(x).backward(grad)
        return x.grad, None


@pytest.mark.parametrize(
    ("what", "passes"), [("a layer for all", 1), ("a layer a task", 3), ("heads", 3)]
)
def test_functions_that_hide_parameters(what: str, passes: int) -> None:
    """A shared one may be hidden behind what the tasks have in common, and nowhere else."""
    trunk, heads, x = parts()
    first, last = trunk[0], trunk[1:]
    trunk.register_parameter("unused", nn.Parameter(torch.ones(2).double()))
    opt = optimizer_of(Given((0.25, -3.0, 20.0)), trunk, heads)

    def losses(number: int) -> dict[str, Tensor]:
        z = first(x[number])
        found = {}
        together = Hidden.apply(z, last) if what == "a layer for all" else None
        for task, head in heads.items():
            if what == "heads":
                found[task] = Hidden.apply(last(z), head).square().mean()
            else:
                y = Hidden.apply(z, last) if together is None else together
                found[task] = head(y).square().mean()
        return found

    shared = [*first.parameters(), *last.parameters()]
    assert follow(opt, losses, shared) == [3, passes, passes, 3]


@pytest.mark.parametrize("grad_mode", [True, False])
def test_losses_with_nodes_in_common(grad_mode: bool) -> None:
    """One loss for two tasks, and one that is a part of another, without heads."""
    trunk, _, x = parts()
    opt = optimizer_of(Given((0.25, -3.0, 20.0)), trunk)

    def losses(number: int) -> dict[str, Tensor]:
        one = trunk(x[number]).square().mean()
        return {"depth": one, "normals": one, "edges": one.exp()}

    def backward(of_tasks: Mapping[str, Tensor]) -> None:
        with torch.set_grad_enabled(grad_mode):
            opt.backward(of_tasks)

    assert follow(opt, losses, trunk.parameters(), backward=backward) == [3, 1, 1, 3]


def test_a_loss_that_is_a_parameter() -> None:
    trunk = nn.Module()
    trunk.scale = nn.Parameter(torch.tensor(2.0).double())
    opt = optimizer_of(Given((0.5, 3.0)), trunk, tasks=AB)
    assert follow(opt, lambda _: {"a": trunk.scale, "b": trunk.scale * 2}, [trunk.scale]) == [
        *(2, 2, 2),
        2,
    ]


def test_a_backward_pass_without_gradient_mode() -> None:
    opt, losses, _ = started(Given((0.5, 3.0, -2.0)))
    for number in range(2):
        of_tasks = losses(number)
        with torch.no_grad():
            opt.backward(of_tasks)
        opt.optimizer.step()


def test_weights_that_a_method_cannot_solve_for_are_not_kept() -> None:
    opt, losses, _ = started(Given((math.nan, 1.0, 1.0), (1.0, 1.0, 1.0)))
    found = []
    for number in range(4):
        opt.backward(losses(number))
        opt.optimizer.zero_grad()
        found.append(opt.report().weights_from)
    assert found == [0, 1, 1, 1]


def test_a_loaded_state_is_copied() -> None:
    opt, losses, _ = started(cs.UPGrad(update_every=3))
    opt.backward(losses(0))
    opt.optimizer.step()
    state = opt.state_dict()
    opt.load_state_dict(state)
    state["kept"][0]["weights"].fill_(7.0)
    opt.backward(losses(1))
    assert opt.report().weights_from == 0
    assert (opt.report().task_weights != 7).all()


def test_a_state_of_other_groups_is_not_used() -> None:
    states = []
    for groups in ("all", "layer"):
        opt, losses, _ = started(cs.UPGrad(groups=groups, update_every=9))
        opt.backward(losses(0))
        opt.optimizer.step()
        states.append(opt.state_dict())
    for groups, state in zip(("layer", "all"), states, strict=True):
        opt, losses, _ = started(cs.UPGrad(groups=groups, update_every=9))
        opt.load_state_dict(state)
        opt.backward(losses(1))
        assert opt.report().weights_from == 1


class Reuses(cs.GramianMethod):
    """Its weights are always in one tensor."""

    buffer = torch.ones(3).double()

    def weights(self, gramian: Tensor, step: cs.Step | None = None) -> Tensor:
        return self.buffer


def test_kept_weights_are_copies() -> None:
    method = Reuses(update_every=2)
    opt, losses, _ = started(method)
    opt.backward(losses(0))
    opt.optimizer.step()
    method.buffer.fill_(7.0)
    opt.backward(losses(1))
    assert opt.report().task_weights.tolist() == [1.0] * 3


def features_and_losses() -> Any:
    """A trunk, heads, and the losses of a step."""
    trunk, heads, x = parts()

    def losses(number: int, tasks: Sequence[str] = TASKS, rows: slice = slice(None)) -> Any:
        z = trunk(x[number % 8, rows])
        return z, {t: (heads[t](z) - TASKS.index(t)).square().mean() for t in tasks}

    return trunk, heads, losses


def started(method: cs.Method, **options: Any) -> Any:
    trunk, heads, losses = features_and_losses()
    return optimizer_of(method, trunk, heads, **options), lambda *args: losses(*args)[1], trunk


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_pass_for_each_task(micro_batches: int) -> None:
    """In `step`, gradients of normalizations and heads are not weighted."""
    setup = Setup()
    opt = setup.start(Given((0.5, 0.0, -2.0), (1.0, 3.0, 0.25)))
    norms = {p for norm in cs.nn.task_norms(setup.trunk) for p in norm.parameters()}
    shared = [p for p in setup.trunk.parameters() if p not in norms]

    def losses(number: int) -> dict[str, Tensor]:
        found = {}
        for task in TASKS:
            with cs.nn.active_task(setup.trunk, task):
                parts = [setup.closure(number + n)(task) for n in range(micro_batches)]
            found[task] = sum(parts[1:], parts[0])
        return found

    for number in range(4):
        rows = gradients(losses(number), setup.parameters())
        opt.step([setup.closure(number + n) for n in range(micro_batches)])
        report = opt.report()
        assert report.weights_from == number - number % 3
        weights = dict(zip(report.rows, report.task_weights.tolist(), strict=True))
        assert_update(rows, weights, setup.parameters(), shared)


def held_rows(opt: cs.MultiTaskOptimizer) -> int:
    return sum(g is not None for row in opt._engine.ranks.gradients.rows for g in row)


def test_micro_batches() -> None:
    """Each makes one backward pass too; later ones may lack tasks."""
    trunk, heads, losses = features_and_losses()
    weights = dict(zip(TASKS, (0.5, 3.0, -2.0), strict=True))
    opt = optimizer_of(Given((0.5, 3.0, -2.0)), trunk, heads)
    twin = copy.deepcopy(nn.ModuleList([trunk, heads]))
    parameters = [*twin.parameters()]
    given = [TASKS, TASKS[1:], TASKS[:1]]
    for number in range(3):
        twin.load_state_dict(nn.ModuleList([trunk, heads]).state_dict())
        total: Rows = {}
        for n, tasks in enumerate(given):
            opt.backward(losses(n, tasks)[1], update=n == 2)
            rows = opt._engine.ranks.gradients.rows
            in_rows = any(g is not None for row in rows for g in row)
            assert in_rows == (number == 0 and n < 2)
            x = parts()[2][n]
            of_twin = {t: (twin[1][t](twin[0](x)) - TASKS.index(t)).square().mean() for t in tasks}
            for task, row in gradients(of_twin, parameters).items():
                pairs = zip(total.get(task, row), row, strict=True)
                added = [a if b is None else b if a is b or a is None else a + b for a, b in pairs]
                total[task] = added
        assert opt.report().weights_from == 0
        for parameter, p in zip(opt.optimizer.param_groups[0]["params"], parameters, strict=True):
            p.grad = parameter.grad
        assert_update(total, weights, parameters, twin[0].parameters())
        opt.optimizer.step()


def test_micro_batches_of_some_tasks_solve_anew() -> None:
    """A later one may bring a task without a weight; so may the first one be of other tasks."""
    opt, losses, _ = started(Given((0.5, 3.0), (7.0, 7.0, 7.0), update_every=9), tasks=TASKS)
    for first, second, solves in (
        (TASKS[:2], TASKS[:2], True),
        (TASKS[:2], TASKS[:2], True),  # The first call cannot know of the second.
        (TASKS[:2], TASKS, True),
        (TASKS, TASKS, False),
        (TASKS[:2], TASKS, True),
    ):
        asked = opt.method.asked
        opt.method.given = [(0.5,) * len(second)]
        opt.backward(losses(0, first), update=False)
        opt.backward(losses(1, second))
        opt.optimizer.step()
        assert (opt.method.asked > asked) == solves


def test_other_tasks_are_solved_anew() -> None:
    method = Given((0.5, 0.5, 0.5), (0.25, 0.25), (2.0, 2.0, 2.0), update_every=9)
    opt, losses, _ = started(method)
    found = []
    for number, tasks in enumerate([TASKS, TASKS, TASKS[1:], TASKS[1:], TASKS, TASKS]):
        opt.backward(losses(number, tasks))
        opt.optimizer.step()
        report = opt.report()
        assert report.rows == tuple(tasks)
        found.append((report.weights_from, report.task_weights[0].item()))
    assert found == [(0, 0.5), (0, 0.5), (2, 0.25), (2, 0.25), (4, 2.0), (4, 2.0)]


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_not_kept(first: int, value: float) -> None:
    """The next step solves anew; gradients that are not finite reach `.grad` with kept weights."""
    opt, losses, trunk = started(cs.UPGrad(update_every=3))
    found = []
    for number in range(6):
        of_tasks = losses(number)
        if number == first:
            of_tasks["normals"] = of_tasks["normals"] * value
        opt.backward(of_tasks)
        found.append(opt.report().weights_from)
        assert trunk[0].weight.grad.isfinite().all() == (number != first)
        if number != first:
            opt.optimizer.step()
        opt.optimizer.zero_grad()
    assert found == ([0, 1, 1, 1, 4, 4] if first == 0 else [0, 0, 0, 3, 4, 4])
    opt.backward({t: loss * (value if t == "edges" else 1) for t, loss in losses(6).items()})
    assert not trunk[0].weight.grad.isfinite().any()


@pytest.mark.parametrize("how", ["scaler", "backward"])
def test_factors_of_losses(how: str) -> None:
    """The update has the factor; the weights, and what is trained, do not."""
    states = []
    for factor in (1.0, 64.0):
        sgd_scaler = torch.amp.GradScaler("cpu", init_scale=factor)
        options: dict[str, Any] = {"scaler": sgd_scaler}
        if how == "backward":
            options = {"backward": lambda loss, f=factor, **o: (f * loss).backward(**o)}
        opt, losses, trunk = started(cs.CAGrad(update_every=2), **options)
        for number in range(5):
            opt.backward(losses(number))
            if how == "scaler":
                sgd_scaler.step(opt.optimizer)
                sgd_scaler.update()
            else:
                for p in opt.optimizer.param_groups[0]["params"]:
                    p.grad /= factor
                opt.optimizer.step()
        states.append([trunk.state_dict(), opt.report().task_weights])
    torch.testing.assert_close(*states)


@pytest.mark.parametrize(
    "weighting",
    [
        lambda: cs.FixedWeights({"depth": 2.0, "normals": 0.5, "edges": 3.0}),
        lambda: cs.UncertaintyWeights(dict.fromkeys(TASKS, "regression")),
        lambda: cs.SmoothTchebycheff(0.5, 1),
        lambda: cs.FAMO(reevaluate=False),
    ],
)
def test_weighted_losses(weighting: Callable[[], cs.Weighting]) -> None:
    """Task weights are of the gradients of the weighted losses, which go on changing."""
    trunk, heads, of_step = features_and_losses()
    made = weighting()
    learned = made.parameters()
    others = heads, nn.ParameterList(learned)
    opt = optimizer_of(Given((0.5, 3.0, -2.0)), trunk, *others, weighting=made)
    of_network = [*trunk.parameters(), *heads.parameters()]
    opt.start_epoch(0)

    def losses(number: int) -> dict[str, Tensor]:
        return of_step(number)[1]

    for number in range(6):
        before = copy.deepcopy(opt.weighting)
        twin = dict(zip(before.parameters(), learned, strict=True))
        step = cs.Step(number, tuple(TASKS))
        step.known = {task: loss.detach() for task, loss in losses(number).items()}
        weighted = {}
        for task, loss in losses(number).items():
            weighted[task] = before.weigh(task, loss, step)
            extra = before.regularizer(task)
            weighted[task] = weighted[task] if extra is None else weighted[task] + extra
        rows = gradients(weighted, of_network)
        opt.backward(losses(number))
        found = opt.report()
        weights = dict(zip(found.rows, found.task_weights.tolist(), strict=True))
        assert_update(rows, weights, of_network, trunk.parameters())
        for copied, parameter in twin.items():
            torch.testing.assert_close(parameter.grad, copied.grad)
        opt.optimizer.step()


def test_gradnorm_learns_from_steps_that_solve() -> None:
    opt, losses, _ = started(cs.PCGrad(update_every=3), weighting=cs.GradNorm())
    seen = []
    for number in range(7):
        opt.backward(losses(number))
        opt.optimizer.step()
        weights = opt.weighting.state_dict()["weights"]
        seen.append(torch.stack([weights[task][0] for task in TASKS]))
    changes = [not torch.equal(a, b) for a, b in pairwise(seen)]
    assert changes == [False, False, True, False, False, True]


def test_a_draw_is_kept_with_its_weights() -> None:
    """PCGrad's order and GradVac's; the latter's targets move in steps that solve."""
    for method in (cs.PCGrad(seed=3, update_every=4), cs.GradVac(0.5, update_every=4)):
        opt, losses, _ = started(method)
        found = []
        for number in range(5):
            opt.backward(losses(number))
            opt.optimizer.step()
            found.append(opt.report().task_weights)
        for other in found[1:4]:
            assert torch.equal(other, found[0])
        assert not torch.equal(found[4], found[0])
    method = cs.GradVac(beta=0.5, update_every=3)
    opt, losses, _ = started(method)
    targets = []
    for number in range(4):
        opt.backward(losses(number))
        opt.optimizer.step()
        targets.append(method.state_dict()["targets"])
    assert torch.equal(targets[0], targets[2])
    assert not torch.equal(targets[2], targets[3])


MAKES: dict[str, Callable[[], cs.Method]] = {
    "PCGrad": lambda: cs.PCGrad(seed=2, update_every=3),
    "GradVac": lambda: cs.GradVac(beta=0.3, update_every=3),
    "NashMTL-layer": lambda: cs.NashMTL(update_every=3, groups="layer"),
    "CAGrad": lambda: cs.CAGrad(update_every=2),
}


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_resumed_run_is_bit_equal(name: str, stop: int) -> None:
    """Also if it is stopped between two solves, before any pass of the new process."""

    def trained(first: int, last: int, states: Sequence[Any] = ()) -> tuple[Any, ...]:
        trunk, heads, losses = features_and_losses()
        opt = optimizer_of(MAKES[name](), trunk, heads, schedule=cs.Joint())
        parts = trunk, heads, opt.optimizer, opt
        for part, state in zip(parts, states, strict=bool(states)):
            part.load_state_dict(state)
        for number in range(first, last):
            opt.backward(losses(number)[1])
            opt.optimizer.step()
        return parts

    states = copy.deepcopy([part.state_dict() for part in trained(0, stop)])
    resumed, whole = trained(stop, 8, states), trained(0, 8)
    assert_equal(*([part.state_dict() for part in of[:2]] for of in (resumed, whole)))
    assert_equal(*(of[3].report().task_weights for of in (resumed, whole)))
    assert resumed[3].report().weights_from == whole[3].report().weights_from
    pickled = copy.deepcopy(resumed[3])
    assert pickled.state_dict()["kept"][0]["number"] == whole[3].report().weights_from


@pytest.mark.parametrize("groups", ["all", "layer"])
def test_reports_and_conflicts(groups: Any) -> None:
    opt, losses, _ = started(cs.PCGrad(groups=groups, update_every=3))
    opt.count_conflicts()
    counts, of_solve = [], torch.empty(0)
    for number in range(7):
        opt.backward(losses(number))
        opt.optimizer.step()
        report, conflicts = opt.report(), opt.conflicts()
        counts.append(int(conflicts.steps.max()))
        of_solve = conflicts.cosines if number % 3 == 0 else of_solve
        assert_equal(conflicts.cosines, of_solve)
        scalars = report.scalars()
        names = {name.split("/")[0] for name in scalars}
        assert {"task_weight", "loss", "phase", "surgery_ms"} <= names
        solved = number % 3 == 0
        assert ({"cosine", "update_norm", "gradient_norm"} <= names) == solved
        assert (report.gramian is not None) == (report.cosines is not None) == solved
        assert "task weight" in str(report)
        assert repr(report)
    assert counts == [1, 1, 1, 2, 2, 2, 3]
    opt, losses, _ = started(cs.PCGrad())
    for number in range(2):
        opt.backward(losses(number))
        opt.optimizer.step()
        assert opt.report().weights_from == number
    for method in (cs.Sum(), cs.GradDrop()):
        opt, losses, _ = started(method)
        opt.backward(losses(0))
        assert opt.report().weights_from is None


@pytest.mark.parametrize("groups", ["all", "layer"])
def test_at_features(groups: Any) -> None:
    """The combination of the features' gradients has the kept weights."""
    trunk, heads, losses = features_and_losses()
    method = Given((0.5, 3.0, -2.0), (1.0, 0.0, 4.0), groups=groups)
    opt = optimizer_of(method, trunk, heads)

    def backward(_: object) -> None:
        z, of_tasks = losses(numbers.pop(0))
        opt.backward(of_tasks, features=z)

    numbers, found = [*range(4)], []
    parameters = opt.optimizer.param_groups[0]["params"]
    for number in range(4):
        rows = gradients(losses(number)[1], parameters)
        backward(None)
        report = opt.report()
        found.append(report.weights_from)
        weights = dict(zip(TASKS, report.task_weights.view(-1).tolist(), strict=True))
        assert_update(rows, weights, parameters, trunk.parameters())
        opt.optimizer.step()
    assert found == [0, 0, 0, 3]
    assert method.asked == 2


def test_layer_by_layer() -> None:
    """Gradients are kept one by one, but nothing is solved; the same in one pass of the trunk."""
    setups = [Setup() for _ in range(3)]
    makes = [lambda: cs.CAGrad(groups="layer", update_every=3)] * 2 + [
        lambda: cs.CAGrad(groups="layer")
    ]
    opts = [setup.start(make()) for setup, make in zip(setups, makes, strict=True)]
    for setup in setups:
        setup.trunk.double()
    solves = Counter[int]()
    for n, opt in enumerate(opts):
        weights = opt.method.weights
        opt.method.weights = partial(  # type: ignore[method-assign]
            lambda *args, n, weights: (solves.update([n]), weights(*args))[1], n=n, weights=weights
        )
    for number in range(4):
        x, targets = setups[0].batches[number]
        opts[0].step(setups[0].closure(number))
        opts[1].step_together(
            lambda run: {
                task: (setups[1].heads[task](z) - targets[TASKS.index(task)]).square().mean()
                for task, z in run(x).items()
            }
        )
        opts[2].step(setups[2].closure(number))
        first, second = (opt.report() for opt in opts[:2])
        assert first.weights_from == second.weights_from == number - number % 3
        torch.testing.assert_close(first.task_weights, second.task_weights)
        grads = [[p.grad for p in setup.parameters()] for setup in setups]
        torch.testing.assert_close(grads[0], grads[1])
        assert (number % 3 == 0) == (first.gramian is not None) == (second.gramian is not None)
        assert (first.task_weights.shape[0]) == len(first.layers) > 1
        if number == 0:
            assert_equal(grads[0], grads[2])
        if number == 1:
            assert not torch.equal(grads[0][0], grads[2][0])
    assert solves[0] == 2


def test_layers_that_are_left_out_are_solved_anew() -> None:
    trunk, heads, x = parts()
    extra = nn.Linear(4, 4).double()
    trunk.add_module("extra", extra)
    opt = optimizer_of(cs.UPGrad(groups="layer", update_every=9), trunk, heads)
    found = []
    for number in range(5):
        z = trunk[:3](x[number])
        z = z if number in (2, 3) else extra(z)
        opt.backward({task: head(z).square().mean() for task, head in heads.items()})
        opt.optimizer.step()
        found.append((opt.report().weights_from, len(opt.report().layers)))
    assert found == [(0, 3), (0, 3), (2, 2), (2, 2), (4, 3)]


def test_layers_that_are_others_are_solved_anew() -> None:
    trunk, heads, losses = features_and_losses()
    opt = optimizer_of(cs.UPGrad(groups="layer", update_every=9), trunk, heads)
    found = []
    for number in range(4):
        trunk[0].requires_grad_(number != 2)
        opt.backward(losses(number)[1])
        opt.optimizer.step()
        found.append((opt.report().weights_from, len(opt.report().layers)))
    assert found == [(0, 2), (0, 2), (2, 1), (3, 2)]


def test_steps_of_both_phases_count() -> None:
    trunk, heads, of_step = features_and_losses()
    opt = optimizer_of(cs.MGDA(update_every=3), trunk, heads, schedule=cs.Mixed(2, 5, "step"))
    opt.start_epoch(1)
    since, found = None, []
    for number in range(12):
        phase = opt.phase
        opt.step(lambda task, n=number: of_step(n)[1][task])
        report = opt.report()
        assert report.phase == phase
        if phase == 1:
            assert report.weights_from is None
            continue
        since = number if since is None or number - since >= 3 else since
        assert report.weights_from == since
        found.append(since)
    assert len(found) > len(set(found)) > 1


def test_a_step_that_fails_keeps_no_weights() -> None:
    def fails(*_: object) -> None:
        raise OSError("full")

    trunk, heads, of_step = features_and_losses()
    opt = optimizer_of(cs.CAGrad(update_every=3), trunk, heads)
    hook = opt.optimizer.register_step_pre_hook(fails)
    with pytest.raises(OSError, match="full"):
        opt.step(lambda task: of_step(0)[1][task])
    hook.remove()
    opt.step(lambda task: of_step(1)[1][task])
    assert opt.report().weights_from == 0
    opt.step(lambda task: of_step(2)[1][task])
    assert opt.report().weights_from == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    trunk, heads, x = parts()
    trunk.to(dtype), heads.to(dtype)
    opt = optimizer_of(Given((0.25, 2.0, -1.0)), trunk, heads)

    def losses(number: int) -> dict[str, Tensor]:
        z = trunk(x[number].to(dtype))
        return {t: (head(z) - n).square().mean() for n, (t, head) in enumerate(heads.items())}

    parameters = opt.optimizer.param_groups[0]["params"]
    for number in range(2):
        rows = gradients(losses(number), parameters)
        opt.backward(losses(number))
        for n, parameter in enumerate(parameters):
            assert parameter.grad.dtype is dtype
            factors = [0.25, 2.0, -1.0] if parameter in set(trunk.parameters()) else [1.0] * 3
            found = [
                g[n] * f for g, f in zip(rows.values(), factors, strict=True) if g[n] is not None
            ]
            torch.testing.assert_close(
                parameter.grad, sum(found[1:], found[0]), rtol=0.05, atol=0.05
            )


@pytest.mark.parametrize("method", [cs.PCGrad, cs.GradVac, cs.UPGrad, cs.NashMTL])
def test_refused(method: Callable[..., cs.Method]) -> None:
    for value in (0, -3, 1.5, None):
        with pytest.raises((ValueError, TypeError), match="update_every must be"):
            method(update_every=value)
    setup = Setup()
    opt = setup.start(method(update_every=2))
    with pytest.raises(ValueError, match="update_every must be 1 in a captured step, got 2 by"):
        opt.capture(setup.closure(0))


@pytest.mark.parametrize("how", ["thawed", "frozen", "switched in the closure"])
@pytest.mark.parametrize("cut", range(1, 7))
def test_a_resumed_run_with_other_parameters_that_train(how: str, cut: int) -> None:
    """What trained at the last solve is part of the state, so both solve in the same steps."""
    results = []
    for at in (None, cut):
        trunk, heads, x = parts()
        opt = optimizer_of(cs.UPGrad(update_every=3), trunk, heads)
        solved = []
        for number in range(8):
            if number == at:
                state = copy.deepcopy(opt.state_dict())
                trunk.requires_grad_(True)
                opt = optimizer_of(cs.UPGrad(update_every=3), trunk, heads)
                opt.load_state_dict(state)

            def loss(task: str, number: int = number) -> Tensor:
                if how.startswith("switched"):
                    trunk[0].requires_grad_(task == TASKS[0])
                return (heads[task](trunk(x[number])) - 1).square().mean()

            if not how.startswith("switched"):
                trunk[0].requires_grad_((number < 2) == (how == "frozen"))
            opt.step(loss)
            solved.append(opt.report().weights_from)
        results.append(solved)
    assert results[0] == results[1]
