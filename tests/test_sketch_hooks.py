"""The balancer's hooks in C++ do exactly what its hook in Python does."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import Marked, Returns, inferred, misaligned
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.balancing import arrivals
from cs_kernels.ops.sketch_hooks import SketchHooks

pytestmark = [
    pytest.mark.loop,
    pytest.mark.skipif(cs.ops.available_backends()["cpu"] is not None, reason="not compiled"),
]

TASKS = ("a", "b", "c")


FORMS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "plain": lambda tensor: tensor,
    "none": lambda tensor: None,
    "negated": lambda tensor: torch._neg_view(-tensor),
    "subclass": lambda tensor: tensor.clone().as_subclass(Marked),
    "misaligned": misaligned,
    "inferred": inferred,
    "transposed": lambda tensor: tensor.T.contiguous().T,
    "expanded": lambda tensor: tensor[:1].expand(tensor.shape),
}


class _Loop:
    """Steps of two layers; the second layer's gradients arrive first."""

    def __init__(
        self,
        method: cs.Method | None = None,
        numel: int = 6,
        dtype: torch.dtype = torch.float32,
        *,
        alone: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.first = nn.Linear(numel, 5, dtype=dtype)
        self.last = nn.Linear(5, 4, dtype=dtype)
        self.calls: list[str] = []
        network = nn.Sequential(self.first, self.last)
        named = [("0.weight", self.first.weight)] if alone else network.named_parameters()
        self.balancer = cs.GradientBalancer(named, TASKS, method)
        self.change: Callable[[Tensor], Tensor | None] = FORMS["plain"]
        self.between: Callable[[_Loop], None] = lambda loop: None
        self.inside: Callable[[_Loop], None] = lambda loop: None
        self.options: dict[str, bool] = {}

    def loss(self, task: str) -> Tensor:
        x = torch.linspace(-1, 1 + TASKS.index(task), 3 * self.first.in_features)
        x = x.view(3, -1).to(self.first.weight.dtype)
        weight = Returns.apply(self.first.weight, self.change)
        y = self.last(nn.functional.linear(x, weight, self.first.bias).tanh())
        return (y - TASKS.index(task)).square().sum()

    def step(self) -> list[Any]:
        """Returns `.grad`, the products and the weights of the next step."""
        for p in (*self.first.parameters(), *self.last.parameters()):
            p.grad = None
        for task in TASKS:
            with self.balancer.task(task):
                loss = self.loss(task)
                self.inside(self)
                loss.backward(**self.options)
            self.between(self)
        self.balancer.update()
        grads = [p.grad for p in (*self.first.parameters(), *self.last.parameters())]
        report = self.balancer.report()
        return [*grads, report.gramian, report.weights, self.calls]


def _freeze(loop: _Loop) -> None:
    """Freezes the weight, but for the first pass of a step."""
    loop.first.weight.requires_grad_(loop.first.weight.grad is None)


def _thaw(loop: _Loop) -> None:
    loop.first.weight.requires_grad_(True)


def _note(loop: _Loop) -> None:
    """Registers a hook that runs after the accumulation."""
    if not loop.first.weight._post_accumulate_grad_hooks:
        loop.first.weight.register_post_accumulate_grad_hook(
            lambda p: loop.calls.append(str(p.grad.sum().item()))
        )


def _penalty(loop: _Loop) -> None:
    """A pass outside of any block."""
    loop.first.weight.square().sum().backward()


def _form_total(form: str) -> Callable[[_Loop], None]:
    def change(loop: _Loop) -> None:
        total = loop.first.weight.grad
        if total is not None:
            loop.first.weight.grad = FORMS[form](total.clone())

    return change


SITUATIONS: dict[str, dict[str, Any]] = {
    **{f"a {name} gradient": {"change": form} for name, form in FORMS.items()},
    **{
        f"a {name} .grad": {"between": _form_total(name)}
        for name in ("negated", "subclass", "misaligned", "transposed")
    },
    "frozen after the forward pass": {"inside": _freeze, "between": _thaw},
    "a late hook": {"between": _note},
    "create_graph": {"options": {"create_graph": True}},
    "a penalty outside of blocks": {"between": _penalty},
}


def _assert_as_in_python(run: Callable[[], list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares the results with those of hooks in Python, bit for bit."""
    found = run()
    monkeypatch.setattr(SketchHooks, "hook", lambda self, *arguments: arguments[-1])
    for a, b in zip(found, run(), strict=True):
        same = a is b is None or a == b if not isinstance(b, Tensor) else _same(a, b)
        assert same, (a, b)


def _same(a: Tensor, b: Tensor) -> bool:
    a, b = (t.detach().as_subclass(Tensor).resolve_neg() for t in (a, b))
    return a.dtype is b.dtype and torch.equal(a, b)


def _expected(loop: _Loop) -> Tensor | None:
    """The sum of the weighted gradients of the first weight."""
    total = None
    for task, weight in loop.balancer.weights.items():
        (grad,) = torch.autograd.grad(loop.loss(task), loop.first.weight, allow_unused=True)
        if grad is not None:
            total = (0 if total is None else total) + grad.as_subclass(Tensor) * weight.float()
    return total


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.filterwarnings("ignore:no gradient of the parameters has arrived")
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("method", [cs.UPGrad(), cs.Sum()], ids=repr)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_same_bits_as_in_python(
    situation: str, method: cs.Method, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter that is alone has hooks in Python, since the first gradient opens a pass."""

    def run() -> list[Any]:
        loop = _Loop(copy.deepcopy(method), alone=alone)
        loop.step()
        vars(loop).update(SITUATIONS[situation])
        expected = _expected(loop)
        results = [*loop.step(), *loop.step()]
        if situation not in ("frozen after the forward pass", "a penalty outside of blocks"):
            found = results[0]
            torch.testing.assert_close(
                None if found is None else found.detach().as_subclass(Tensor), expected
            )
        # The hook was registered after the first of six passes.
        assert len(loop.calls) == 5 * (situation == "a late hook")
        return results

    _assert_as_in_python(run, monkeypatch)


@pytest.mark.parametrize("groups", ["all", "layer"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_types_and_modules(
    dtype: torch.dtype, groups: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the layers has so many elements that its kernel releases the interpreter's lock."""

    def run() -> list[Any]:
        loop = _Loop(cs.UPGrad(groups=groups), 1 << 12, dtype)
        return [*loop.step(), *loop.step()]

    _assert_as_in_python(run, monkeypatch)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The indices of the parameters whose hooks in Python were called."""
    called: list[int] = []
    original = arrivals._Arrival.__call__

    def call(self: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None] | None:
        called.append(self._number)
        return original(self, grads)

    monkeypatch.setattr(arrivals._Arrival, "__call__", call)
    return called


def test_python_hooks_only_begin_a_pass(calls: list[int]) -> None:
    """In a step's first pass, hooks in Python write; later, a pass's first gradient opens it."""
    loop = _Loop()
    loop.step()
    calls.clear()
    loop.step()
    assert len(calls) == 4 + 1 + 1
    watching = _Loop(cs.Sum())
    calls.clear()
    watching.step()
    assert len(calls) == len(TASKS)
    with cs.use_backend("reference"):
        calls.clear()
        loop.step()
    assert len(calls) == 4 * len(TASKS)


def test_zeros_without_memory() -> None:
    """Torch has a kind of tensor that has no address, and that nothing may write to."""

    def run(zeros: Callable[[Tensor], Tensor]) -> list[Any]:
        loop = _Loop(alone=True)
        loop.change = lambda grad: zeros(grad) if loop.first.weight.grad is not None else grad
        found = [*loop.step(), *loop.step()]
        with loop.balancer.task("a"):  # Every gradient of the pass is zero.
            loop.first.weight.grad = None
            Returns.apply(loop.first.weight, zeros).sum().backward()
        return [*found, loop.first.weight.grad + 0]

    found = run(lambda grad: torch._efficientzerotensor(grad.shape, dtype=grad.dtype))
    expected = run(torch.zeros_like)
    for a, b in zip(found, expected, strict=True):
        assert a == b if isinstance(a, list) else torch.equal(a, b)


def test_an_exception_closes_the_pass() -> None:
    loop = _Loop()
    loop.step()
    for p in (*loop.first.parameters(), *loop.last.parameters()):
        p.grad = torch.zeros_like(p)
    with contextlib.suppress(KeyError), loop.balancer.task("a"):
        loop.loss("a").backward()
        raise KeyError
    expected = torch.autograd.grad(loop.loss("b"), [loop.first.weight])[0]
    loop.first.weight.grad = None
    loop.loss("b").backward()
    assert torch.equal(loop.first.weight.grad, expected)


def test_graphs_know_that_a_gradient_has_changed() -> None:
    loop = _Loop()
    loop.step()
    scale = torch.ones((), requires_grad=True)
    penalty = (scale * loop.first.weight.grad).sum()
    with loop.balancer.task("a"):
        loop.loss("a").backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_dropped_gradients_are_noticed() -> None:
    """Hooks in C++ report which parameters they have reached."""
    loop, plain = _Loop(), _Loop()
    for each in (loop, plain):
        each.step()
        for p in (*each.first.parameters(), *each.last.parameters()):
            p.grad = torch.zeros_like(p)
    with loop.balancer.task("a"):
        loop.loss("a").backward()
    loop.first.weight.grad = None
    for each in (loop, plain):
        for task in TASKS:
            with each.balancer.task(task):
                each.loss(task).backward()
        each.balancer.update()
    assert torch.equal(loop.balancer.gramian, plain.balancer.gramian)


def test_an_exception_that_a_block_survives() -> None:
    """The first gradient raises; what the hooks then sketch is dropped with the step."""
    weight = nn.Parameter(torch.randn(5, 3))
    other = nn.Parameter(torch.randn(3))
    balancer = cs.GradientBalancer([weight, other], ["a"], cs.UPGrad())
    for rejected in (True, False):
        weight.grad = other.grad = None
        with balancer.task("a"):
            if rejected:
                rows = nn.functional.embedding(torch.tensor([1]), weight, sparse=True)
                with pytest.raises(TypeError, match="gradients of the parameters must be dense"):
                    rows.sum().backward()
            (weight @ other).square().sum().backward()
    expected = sum(
        grad.square().sum()
        for grad in torch.autograd.grad((weight @ other).square().sum(), [weight, other])
    )
    balancer.update()
    torch.testing.assert_close(balancer.gramian, expected.double().view(1, 1), rtol=1e-5, atol=0)


def test_a_state_that_is_loaded_inside_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later gradients of the block belong to the loaded step."""

    def run() -> list[Any]:
        loop = _Loop()
        loop.step()
        state = loop.balancer.state_dict()
        loop.step()
        with loop.balancer.task("a"):
            loop.loss("a").backward()
            loop.balancer.load_state_dict(state)
            loop.loss("a").backward()
        return loop.step()

    _assert_as_in_python(run, monkeypatch)


def test_a_late_hook_that_was_removed(calls: list[int]) -> None:
    loop = _Loop()
    loop.step()
    loop.first.weight.register_post_accumulate_grad_hook(lambda p: None).remove()
    calls.clear()
    loop.step()
    assert calls.count(0) == 1


def test_a_list_of_gradients() -> None:
    """Compiled autograd passes a list, for which the hook in Python is called."""
    received: list[Any] = []
    hook = SketchHooks(torch.device("cpu"), set(), lambda tensors: None).hook(
        torch.ones(2), 0, 0, 0, received.append
    )
    assert hook([None]) is None  # type: ignore[arg-type]
    assert received == [[None]]
