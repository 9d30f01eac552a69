"""Functions and hooks with an effect per backward pass: handled, or refused with a reason."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.utils.checkpoint
from networks import AB, Injects, sgd_of
from torch import Tensor, nn

import cs_kernels as cs

pytestmark = pytest.mark.loop


@pytest.fixture(autouse=True)
def _double(float64: None) -> None:
    """Sets the default dtype to float64."""


class Ones(cs.GramianMethod):
    """The plain sum of separate gradients."""

    def weights(self, gramian: Tensor, step: cs.Step | None = None) -> Tensor:
        return torch.ones_like(gramian[..., 0])


class Overwrites(torch.autograd.Function):
    """Swish, whose backward pass overwrites its saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        x.data.copy_(grad * s * (1 + x * (1 - s)))
        return x.data


class ScalesSaved(torch.autograd.Function):
    """A loss that computes its gradient in the forward pass; `backward` scales it in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.gradient = 2 * x.detach() / x.numel()
        return x.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        ctx.gradient *= grad
        return ctx.gradient


class Cached(torch.autograd.Function):
    """A function whose first backward pass consumes its cache."""

    cache: ClassVar[dict[int, float]] = {}

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Cached.cache[5] = 3.0
        return 3.0 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * Cached.cache.pop(5)


class Clamps(torch.autograd.Function):
    """A nonlinear function of the gradient, but the same one in every pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.01, 0.01)


PARTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "injected": (lambda h: Injects.apply(h, h.square().mean()), "count once per task.*first"),
    "overwritten": (Overwrites.apply, "gradients of first.* that differ"),
    "cache": (Cached.apply, "KeyError: 5 in a second pass of 'a'"),
}


class Network:
    """A trunk with a part in its middle, two heads, and their losses."""

    def __init__(
        self, part: Callable[[Tensor], Tensor], method: cs.Method | None = None, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.trunk = nn.ModuleDict({"first": nn.Linear(6, 8), "last": nn.Linear(8, 5)})
        self.heads = nn.ModuleDict({task: nn.Linear(5, 1) for task in AB})
        self.x, self.part = torch.randn(16, 6), part
        self.sgd = sgd_of(self.trunk, self.heads)
        self.opt = cs.MultiTaskOptimizer(self.trunk, self.sgd, AB, method or Ones(), **options)

    def features(self) -> Tensor:
        z: Tensor = self.trunk["last"](self.part(self.trunk["first"](self.x)))
        return z.tanh()

    def losses(self) -> dict[str, Tensor]:
        z = self.features()
        return {t: (self.heads[t](z) - i).square().mean() for i, t in enumerate(AB)}

    def make(self, how: str) -> None:
        if how == "step":
            self.opt.step(lambda task: self.losses()[task])
        else:
            self.opt.backward(self.losses())

    def gradient(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.trunk.parameters()])


def _plain(part: Callable[[Tensor], Tensor]) -> Tensor:
    network = Network(part)
    sum(network.losses().values()).backward()
    return network.gradient()


@pytest.mark.parametrize("update", [True, False])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("part", PARTS)
def test_a_pass_that_cannot_be_repeated(part: str, every: int, update: bool) -> None:
    function, message = PARTS[part]
    network = Network(function, Ones(update_every=every))
    before = [p.detach().clone() for p in network.trunk.parameters()]
    for _ in range(2):  # Every call is refused, not only the first.
        with pytest.raises(RuntimeError, match=f"(?s){message}.*use step.*check_passes=False"):
            network.opt.backward(network.losses(), update=update)
    assert all(p.grad is None for p in (*network.trunk.parameters(), *network.heads.parameters()))
    assert all(map(torch.equal, before, network.trunk.parameters()))
    with pytest.raises(RuntimeError, match=message):
        network.opt.trace(network.losses())


@pytest.mark.parametrize("part", ["overwritten", "cache", "injected"])
def test_ways_out(part: str) -> None:
    """Alternatives: features, one pass for the sum of the losses, and a graph per task."""
    function, _ = PARTS[part]
    expected = _plain(function)
    network = Network(function)
    z = network.features()
    losses = {t: (network.heads[t](z) - i).square().mean() for i, t in enumerate(AB)}
    network.opt.backward(losses, features=z)
    torch.testing.assert_close(network.gradient(), expected, rtol=1e-12, atol=1e-14)
    network = Network(function, cs.Sum())
    network.opt.backward(network.losses())
    torch.testing.assert_close(network.gradient(), expected, rtol=1e-12, atol=1e-14)
    if part != "injected":  # An injected gradient would count in each task's pass.
        network = Network(function)
        network.opt.step(lambda task: network.losses()[task])
        torch.testing.assert_close(network.gradient(), expected, rtol=1e-12, atol=1e-14)


def test_the_switch() -> None:
    network = Network(Overwrites.apply, check_passes=False)
    network.opt.backward(network.losses())
    assert not torch.allclose(network.gradient(), _plain(Overwrites.apply), rtol=0.01)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 0.5), (0.5, 1.0)])
def test_a_loss_of_two_tasks_that_scales_its_gradient_in_place(
    weights: tuple[float, float],
) -> None:
    network = Network(torch.tanh)
    common = ScalesSaved.apply(network.features())
    losses = {task: w * common for task, w in zip(AB, weights, strict=True)}
    with pytest.raises(RuntimeError, match="differ by"):
        network.opt.backward(losses)


def test_tasks_without_the_first_share_a_part() -> None:
    """The first task that reaches a shared part, here 'b', repeats its pass."""
    torch.manual_seed(0)
    trunk = nn.ModuleDict({"one": nn.Linear(3, 4), "two": nn.Linear(3, 4)})
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), ["a", "b", "c"], Ones())
    x = torch.randn(8, 3)
    z = Overwrites.apply(trunk["two"](x))
    losses = {"a": trunk["one"](x).square().mean(), "b": z.square().mean(), "c": z.mean()}
    with pytest.raises(RuntimeError, match=r"of 'b' gave gradients of two\.weight that differ"):
        opt.backward(losses)


@pytest.mark.parametrize("first", ["ab", "a", "ca", "ab ca"])
@pytest.mark.parametrize("part", ["overwritten", "injected"])
def test_tasks_that_come_together_later(part: str, first: str) -> None:
    """Two tasks share a part that at most one task has reached in each earlier step."""
    function, _ = PARTS[part]
    torch.manual_seed(0)
    trunk = nn.Linear(3, 4)
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), ["a", "b", "c"], Ones())
    x = torch.randn(8, 3)

    def losses(tasks: str) -> dict[str, Tensor]:
        z = trunk(x)
        h = function(z)
        every = {"a": z.square().mean(), "b": h.square().mean(), "c": h.mean()}
        return {task: every[task] for task in tasks}

    for tasks in first.split():
        opt.backward(losses(tasks))
        opt._engine.optimizers[0].step()
    with pytest.raises(RuntimeError, match=r"a pass must be|count once per task"):
        opt.backward(losses("abc"))
    opt.backward(losses("ab"), update=False)
    with pytest.raises(RuntimeError, match=r"a pass must be|count once per task"):
        opt.backward(losses("bc"))


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_heads_share_behind_features(part: str) -> None:
    function, _ = PARTS[part]
    network = Network(torch.tanh)
    z = network.features()
    h = function(z)
    losses = {t: (network.heads[t](h) - i).square().mean() for i, t in enumerate(AB)}
    with pytest.raises(RuntimeError, match=r"features\[0\]|KeyError: 5"):
        network.opt.backward(losses, features=z)
    z = network.features()
    h = z.tanh()
    losses = {t: (network.heads[t](h) - i).square().mean() for i, t in enumerate(AB)}
    network.opt.backward(losses, features=z)


def test_a_part_outside_the_trunk_that_tasks_share() -> None:
    """A router beside the trunk gets the injected gradient once per task."""
    network = Network(torch.tanh)
    router = nn.Linear(5, 5)
    network.sgd.add_param_group({"params": [*router.parameters()]})
    z = network.features()
    h = Injects.apply(z, router(z.detach()).square().mean())
    losses = {t: (network.heads[t](h) - i).square().mean() for i, t in enumerate(AB)}
    with pytest.raises(RuntimeError, match=r"count once per task: .* gave a parameter of shape"):
        network.opt.backward(losses)


class Buffered(torch.autograd.Function):
    """A linear map that returns gradients in a static buffer, as a CUDA graph does."""

    buffer: ClassVar[Tensor]

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        torch.mm(grad.T, x, out=Buffered.buffer)
        return grad @ weight, Buffered.buffer.detach()


@pytest.mark.parametrize("how", ["step", "list", "backward", "together", "micro"])
@pytest.mark.parametrize("method", [cs.PCGrad, cs.GradDrop, Ones, cs.Sum])
def test_gradients_in_a_buffer_that_is_written_again(how: str, method: type[cs.Method]) -> None:
    expected = []
    for function in (nn.functional.linear, Buffered.apply):
        torch.manual_seed(0)
        Buffered.buffer = torch.zeros(3, 5)
        trunk = nn.Linear(5, 3, bias=False)
        opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, method())
        x = torch.randn(4, 5)

        def loss(task: str, z: Tensor) -> Tensor:
            return z.square().mean() if task == "a" else (z - 1).tanh().mean()

        for _ in range(3):
            if how in ("step", "list"):
                one = partial(lambda f, t: loss(t, f(x, trunk.weight)), function)
                two = partial(lambda f, t: loss(t, f(2 * x, trunk.weight)), function)
                opt.step([one, two] if how == "list" else one)
                continue
            apart = how != "together" and method is not cs.Sum
            if how == "micro":
                z = function(2 * x, trunk.weight)
                graphs = {t: function(2 * x, trunk.weight) if apart else z for t in AB}
                opt.backward({t: loss(t, graphs[t]) for t in AB}, update=False)
            z = function(x, trunk.weight)
            graphs = {t: function(x, trunk.weight) if apart else z for t in AB}
            opt.backward({t: loss(t, graphs[t]) for t in AB})
            opt._engine.optimizers[0].step()
        expected.append(trunk.weight.detach().clone())
    assert torch.equal(*expected)


def test_kept_weights_beside_a_buffer_that_one_task_does_not_reach() -> None:
    """The engine copies gradients after each pass; no copy counts as a function's write."""
    tasks, updates = ["a", "b", "c"], []
    for function in (nn.functional.linear, Buffered.apply):
        torch.manual_seed(0)
        Buffered.buffer = torch.zeros(3, 5)
        trunk = nn.ModuleDict({"x": nn.Linear(5, 3, bias=False), "y": nn.Linear(5, 3)})
        x = torch.randn(4, 5)

        def loss(task: str, f: Callable[..., Tensor] = function) -> Tensor:
            z = trunk["y"](x)
            z = z if task == "c" else z + f(x, trunk["x"].weight)
            return (z - tasks.index(task)).square().mean()

        opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), tasks, Ones(update_every=3))
        for _ in range(3):
            opt.step(loss)
        updates.append(torch.cat([p.detach().flatten() for p in trunk.parameters()]))
    torch.testing.assert_close(*updates, rtol=1e-12, atol=1e-14)


class Doubles(torch.autograd.Function):
    """Returns a tensor that it also keeps, like a function with `out=`."""

    buffer: ClassVar[Tensor]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.mul(grad, 2.0, out=Doubles.buffer)


class Grows(torch.autograd.Function):
    """A function whose gradient grows from pass to pass, always in the same tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = 1.0
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        ctx.factor += 1.0
        return torch.mul(grad, ctx.factor, out=Doubles.buffer)


def test_a_buffer_that_differs_from_pass_to_pass() -> None:
    network = Network(torch.tanh)
    z = network.features()
    Doubles.buffer = torch.zeros_like(z)
    shared = Grows.apply(z)
    losses = {t: (network.heads[t](shared) - i).square().mean() for i, t in enumerate(AB)}
    with pytest.raises(RuntimeError, match=r"gave gradients of features\[0\] that differ"):
        network.opt.backward(losses, features=z)


@pytest.mark.parametrize("method", [Ones, cs.PCGrad])
def test_a_buffer_of_heads_behind_features(method: type[cs.Method]) -> None:
    updates = []
    for double in (lambda x: 2 * x, Doubles.apply):
        network = Network(torch.tanh, method())
        z = network.features()
        Doubles.buffer = torch.zeros_like(z)
        losses = {t: (network.heads[t](double(z)) - i).square().mean() for i, t in enumerate(AB)}
        network.opt.backward(losses, features=z)
        updates.append(network.gradient())
    torch.testing.assert_close(*updates, rtol=1e-12, atol=1e-14)


def test_kept_weights_of_features_behind_a_function() -> None:
    """The function may hide parameters, whose reach does not matter for gradients of features."""
    network = Network(Clamps.apply, cs.UPGrad(update_every=4))
    solved = []
    for _ in range(8):
        z = network.features()
        losses = {t: (network.heads[t](z) - i).square().mean() for i, t in enumerate(AB)}
        network.opt.backward(losses, features=z)
        network.sgd.step()
        solved.append(network.opt.report().weights_from)
    assert solved == [0, 0, 0, 0, 4, 4, 4, 4]


@pytest.mark.parametrize("how", ["step", "backward"])
def test_a_buffer_outside_the_trunk(how: str) -> None:
    """Both tasks use the buffered head, so its gradients add up in `.grad`."""
    expected = []
    for function in (nn.functional.linear, Buffered.apply):
        network = Network(torch.tanh)
        Buffered.buffer = torch.zeros(1, 5)
        head = network.heads["a"]

        def loss(task: str, n: Network = network, f: Any = function, h: Any = head) -> Tensor:
            return (f(n.features(), h.weight) - len(task) * (task == "a")).square().mean()

        for _ in range(2):
            if how == "step":
                network.opt.step(loss)
            else:
                network.opt.backward({task: loss(task) for task in AB})
                network.sgd.step()
        expected.append(head.weight.detach().clone())
    assert torch.equal(*expected)


@pytest.mark.parametrize("part", [Clamps.apply, torch.tanh], ids=["clamps", "tanh"])
def test_parts_that_are_repeatable(part: Callable[[Tensor], Tensor]) -> None:
    """The first call makes three more passes, later calls none."""
    network, passes = Network(part), [0]
    rows = []
    for task in AB:
        rows.append(torch.autograd.grad(network.losses()[task], [*network.trunk.parameters()]))
    expected = torch.cat([(a + b).flatten() for a, b in zip(*rows, strict=True)])
    for more in (3, 0):
        losses = network.losses()
        passes[0] = 0
        network.trunk["first"].weight.register_hook(lambda _: passes.__setitem__(0, passes[0] + 1))
        network.opt.backward(losses)
        torch.testing.assert_close(network.gradient(), expected, rtol=1e-12, atol=1e-14)
        network.trunk["first"].weight._backward_hooks.clear()
        assert passes[0] == len(AB) + more
        network.sgd.zero_grad()


class _ChannelNorm(nn.LayerNorm):
    """Normalizes the channels of [B, C, H, W], and leaves memory in channels-last order."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def test_gradients_that_sum_to_zero_up_to_rounding() -> None:
    """The rounding error depends on the memory order, which differs on arrival and in `.grad`."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 1), _ChannelNorm(8), nn.Conv2d(8, 8, 2, stride=2), nn.Flatten()
    trunk = nn.Sequential(*layers, nn.Linear(128, 4)).double()
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, cs.UPGrad())
    z = trunk(torch.randn(2, 3, 8, 8, dtype=torch.float64))
    opt.backward({task: (z - n).square().mean() for n, task in enumerate(AB)})


def test_a_nan_is_no_difference() -> None:
    network = Network(lambda h: h * torch.nan)
    network.opt.backward(network.losses())
    assert network.gradient().isnan().any()


@pytest.mark.parametrize("how", ["step", "backward"])
@pytest.mark.parametrize("method", [Ones, cs.Sum, cs.PCGrad])
def test_an_optimizer_in_a_hook(how: str, method: type[cs.Method]) -> None:
    """An optimizer in a hook would make one update per task, without surgery."""
    network = Network(torch.tanh, method())
    weight = network.trunk["first"].weight
    inner = torch.optim.SGD([weight], lr=0.1)
    weight.register_post_accumulate_grad_hook(lambda _: inner.step())
    with pytest.raises(RuntimeError, match=r"first.weight changed during"):
        network.make(how)
    assert all(p.grad is None for p in network.trunk.parameters())


def _node_of(parameter: Tensor) -> Any:
    return parameter.view_as(parameter).grad_fn.next_functions[0][0]


CHANGING: dict[str, Callable[[Tensor, Callable[[Tensor], None]], object]] = {
    "post-accumulate": lambda p, seen: p.register_post_accumulate_grad_hook(seen),
    "node": lambda p, seen: _node_of(p).register_hook(lambda *_: seen(p)),
}


@pytest.mark.parametrize("how", ["step", "backward"])
@pytest.mark.parametrize("method", [Ones, cs.Sum])
@pytest.mark.parametrize("place", CHANGING)
def test_a_hook_that_changes_gradients(how: str, method: type[cs.Method], place: str) -> None:
    """A penalty in a hook would count once per task; hooks that only read are allowed."""
    network = Network(torch.tanh, method())
    weight, seen = network.trunk["first"].weight, []
    node = _node_of(weight)  # Without a reference, the node would be freed.
    CHANGING[place](weight, lambda p: seen.append(p.grad.norm()))
    network.make(how)
    assert seen
    assert node is not None
    network = Network(torch.tanh, method())
    weight = network.trunk["first"].weight
    node = _node_of(weight)
    CHANGING[place](weight, lambda p: setattr(p, "grad", p.grad + p.detach()))
    with pytest.raises(RuntimeError, match=r"changed those of first.weight.*register_hook"):
        network.make(how)
    assert all(p.grad is None for p in network.trunk.parameters())


@pytest.mark.parametrize("every", [1, 2])
def test_a_penalty_before_the_gradient_is_accumulated(every: int) -> None:
    network = Network(torch.tanh, Ones(update_every=every))
    weight = network.trunk["first"].weight
    node = _node_of(weight)
    node.register_prehook(lambda grads: (grads[0] + 0.1 * weight.detach(),))
    with pytest.raises(RuntimeError, match=r"a hook changed those of first.weight:"):
        network.make("backward")


def test_reentrant_checkpointing_is_not_checked() -> None:
    """A warning says that passes are not checked; the injected loss is not refused."""
    network = Network(lambda h: Injects.apply(h, h.square().mean()))
    run = torch.utils.checkpoint.checkpoint
    plain = network.part
    network.part = lambda h: run(torch.tanh, plain(h), use_reentrant=True)
    with pytest.warns(UserWarning, match="reentrant checkpointing prevents .*use_reentrant=False"):
        network.opt.backward(network.losses())


def test_a_hook_of_many_gradients_that_torch_does_not_repeat() -> None:
    """Torch's error gets a note that names the remedy."""
    network = Network(torch.tanh)
    seen: list[object] = []
    parameters = [*network.trunk.parameters()]
    handle = torch.autograd.graph.register_multi_grad_hook(parameters, seen.append)
    with pytest.raises(RuntimeError) as raised:
        network.opt.backward(network.losses())
    if hasattr(raised.value, "__notes__"):
        assert "check_passes=False" in "".join(raised.value.__notes__)
    network.opt.step(lambda task: network.losses()[task])
    handle.remove()


@pytest.mark.parametrize("common", [True, False])
def test_a_hook_that_adds_to_each_pass(common: bool) -> None:
    """Each loss may also have its own graph, with the same parameters."""
    network = Network(torch.tanh)
    network.trunk["first"].weight.register_hook(lambda grad: grad + 1)
    losses = network.losses() if common else {t: network.losses()[t] for t in AB}
    with pytest.raises(RuntimeError, match=r"count once per task: .* gave first\.weight"):
        network.opt.backward(losses)


@pytest.mark.parametrize("method", [Ones, cs.Sum])
@pytest.mark.parametrize("how", ["step", "backward"])
def test_a_hook_that_moves_gradients(how: str, method: type[cs.Method]) -> None:
    network = Network(torch.tanh, method())
    last = network.trunk["last"]

    def move(p: Tensor) -> None:
        p.main_grad, p.grad = p.grad, None

    for parameter in last.parameters():
        parameter.register_post_accumulate_grad_hook(move)
    with pytest.raises(
        RuntimeError, match=r"gradients of last.weight \(and 1 more\) are gone after the pass"
    ):
        network.make(how)


class AddsUpElsewhere(torch.autograd.Function):
    """Adds the gradient of a weight to its `main_grad`, as fused layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, returns: bool, rebinds: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.returns, ctx.rebinds = weight, returns, rebinds
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if ctx.rebinds:
            ctx.weight.main_grad = grad.T @ x + getattr(ctx.weight, "main_grad", 0)
        else:
            ctx.weight.main_grad += grad.T @ x
        zeros = torch.zeros_like(ctx.weight) if ctx.returns else None
        return grad @ ctx.weight, zeros, None, None


@pytest.mark.parametrize("rebinds", [False, True])
@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("how", ["step", "backward"])
def test_a_function_that_adds_gradients_up_elsewhere(
    how: str, returns: bool, rebinds: bool
) -> None:
    """The function may return None or zeros, and may rebind the attribute in every pass."""
    network = Network(torch.tanh)
    network.trunk["fused"] = nn.Linear(8, 8, bias=False)
    weight: Any = network.trunk["fused"].weight
    if not rebinds:
        weight.main_grad = torch.zeros_like(weight)
    network.part = lambda x: AddsUpElsewhere.apply(x.tanh(), weight, returns, rebinds)
    sgd = sgd_of(network.trunk, network.heads)
    network.opt = cs.MultiTaskOptimizer(network.trunk, sgd, AB, Ones())
    with pytest.raises(RuntimeError, match=r"has changed fused\.weight\.main_grad, where"):
        network.make(how)
    network.opt = cs.MultiTaskOptimizer(network.trunk, sgd, AB, Ones(), check_passes=False)
    network.make(how)


def test_attributes_without_memory_to_read() -> None:
    """Such attributes do not count as gradients that a function accumulates."""
    network = Network(torch.tanh)
    weight: Any = network.trunk["last"].weight
    weight.offloaded = torch.zeros_like(weight)
    weight.offloaded.untyped_storage().resize_(0)
    weight.sparse, weight.meta = torch.zeros(5, 8).to_sparse(), torch.zeros(5, 8, device="meta")
    weight.negative, weight.other = torch._neg_view(torch.zeros(5, 8)), weight
    network.make("backward")


def test_a_new_setup_is_checked_again() -> None:
    network = Network(torch.tanh)
    network.opt.backward(network.losses())
    network.sgd.step()
    network.part = Overwrites.apply
    network.opt.backward(network.losses())  # Later calls are not checked.
    network.sgd.step()
    network.trunk["last"].bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="that differ"):
        network.opt.backward(network.losses())


def _cached_loss(network: Network, task: str) -> Tensor:
    """A contrastive loss without a graph; its hook recomputes the embeddings in chunks."""

    def embed(x: Tensor) -> Tensor:
        h: Tensor = network.heads[task](network.trunk["last"](network.trunk["first"](x).tanh()))
        return h

    with torch.no_grad():
        found = embed(network.x)
    found.requires_grad_()
    loss = (found @ found.T).logsumexp(1).mean()
    loss.backward()
    assert found.grad is not None
    grads = found.grad.split(5)
    loss = loss.detach().requires_grad_()

    def hook(scale: Tensor) -> None:
        with torch.enable_grad():
            for x, grad in zip(network.x.split(5), grads, strict=True):
                (embed(x) * grad).sum().mul(scale).backward()

    loss.register_hook(hook)
    return loss


def _same_loss(network: Network, task: str) -> Tensor:
    z = network.heads[task](network.trunk["last"](network.trunk["first"](network.x).tanh()))
    return (z @ z.T).logsumexp(1).mean()


@pytest.mark.parametrize(
    "method", [cs.Sum, cs.PCGrad, cs.UPGrad, lambda: cs.UPGrad(update_every=3)]
)
def test_a_loss_whose_gradient_a_hook_makes(method: Callable[[], cs.Method]) -> None:
    """`step` treats it like a plain loss; `backward` refuses it."""
    cached, plain = Network(torch.tanh, method()), Network(torch.tanh, method())
    for _ in range(4):
        cached.opt.step(lambda task: _cached_loss(cached, task))
        plain.opt.step(lambda task: _same_loss(plain, task))
        torch.testing.assert_close(cached.gradient(), plain.gradient(), rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match=r"gradient from a hook on a leaf.*use step\(closure\)"):
        cached.opt.backward({task: _cached_loss(cached, task) for task in AB})


@pytest.mark.parametrize(
    "method", [cs.Sum, cs.UPGrad, cs.MGDA, cs.NashMTL, cs.FairGrad, cs.ConFIG, cs.GradDrop]
)
def test_a_block_that_is_frozen_in_the_closure(method: type[cs.Method]) -> None:
    """The block belongs to the task for which it trains, as when adapters are switched."""

    def norms(toggle: bool) -> Tensor:
        torch.manual_seed(1)
        low, up = nn.Linear(5, 6), nn.Linear(6, 6)
        trunk = nn.ModuleList([low, up])
        heads = nn.ModuleDict({task: nn.Linear(6, 1) for task in AB})
        opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk, heads, lr=0.0), AB, method())
        x = torch.randn(4, 5)

        def loss(task: str) -> Tensor:
            if toggle:
                low.requires_grad_(task == "a")
            z = low(x)
            z = z.detach() if not toggle and task == "b" else z
            return (heads[task](up(z.tanh())) - AB.index(task)).square().mean()

        found = []
        for _ in range(3):
            opt.step(loss)
            found.append(low.weight.grad.norm())
        return torch.stack(found)

    torch.testing.assert_close(norms(True), norms(False), rtol=1e-12, atol=0)


class Inner(torch.autograd.Function):
    """Manual checkpointing: `backward` reruns the function and makes an inner backward pass."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.run(x).backward(grad)
        return None, x.grad


class Returned(torch.autograd.Function):
    """Like `Inner`, but computes the parameters' gradients and returns them."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.run, ctx.parameters = run, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        return None, *torch.autograd.grad(y, [x, *ctx.parameters], grad)


class Halves(cs.GramianMethod):
    """Weights of 1/2 and 2, whatever the gradients are."""

    def weights(self, gramian: Tensor, step: cs.Step | None = None) -> Tensor:
        return gramian.new_tensor([0.5, 2.0])


@pytest.mark.parametrize("hidden", ["a", "b", "ab", ""])
@pytest.mark.parametrize("how", ["inner", "returned", "cached"])
@pytest.mark.parametrize("way", ["step", "backward"])
def test_kept_weights_of_parts_with_a_backward_pass_inside(how: str, hidden: str, way: str) -> None:
    """Each task's gradient is weighted once, whether or not the graph hides parameters."""
    network = Network(torch.tanh, Halves(update_every=3))
    first, last = network.trunk["first"], network.trunk["last"]

    def trunk(x: Tensor, task: str) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return last(first(x).tanh())

        if task not in hidden or how == "cached":
            return run(x)
        if how == "inner":
            return Inner.apply(run, x)
        return Returned.apply(run, x, *first.parameters(), *last.parameters())

    def loss(task: str) -> Tensor:
        x = network.x.clone().requires_grad_()
        found: Tensor = (network.heads[task](trunk(x, task)) - AB.index(task)).square().mean()
        if how == "cached" and task in hidden:
            found = found + _cached_loss(network, task)
        return found

    rows = []
    for task in AB:
        loss(task).backward()
        rows.append([p.grad for p in network.trunk.parameters()])
        network.sgd.zero_grad()
    expected = torch.cat([(0.5 * a + 2 * b).flatten() for a, b in zip(*rows, strict=True)])
    for _ in range(4):
        if way == "step":
            network.sgd.param_groups[0]["lr"] = 0.0
            network.opt.step(loss)
        else:
            network.opt.backward({task: loss(task) for task in AB})
        torch.testing.assert_close(network.gradient(), expected, rtol=1e-10, atol=1e-12)
        network.sgd.param_groups[0]["lr"] = 0.0
        if way != "step":
            network.sgd.step()


class Writes(torch.autograd.Function):
    """A linear map that adds to `.grad` itself, as fused weight gradients do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        mine = grad.T @ x
        ctx.weight.grad = mine if ctx.weight.grad is None else ctx.weight.grad.add_(mine)
        return grad @ weight, None


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("check_passes", [True, False])
def test_kept_weights_of_gradients_that_functions_write(first: int, check_passes: bool) -> None:
    """No hook sees such gradients, so they cannot be weighted, in the first step or later."""
    network = Network(torch.tanh)
    middle = nn.Parameter(torch.eye(8) / 2)
    network.trunk.register_parameter("middle", middle)
    sgd = torch.optim.SGD([*network.trunk.parameters(), *network.heads.parameters()], lr=0.0)
    network.opt = cs.MultiTaskOptimizer(
        network.trunk, sgd, AB, Halves(update_every=3), check_passes=check_passes
    )

    def step(function: Callable[..., Tensor]) -> Tensor:
        network.part = lambda h: function(h, middle)
        network.make("step")
        return network.gradient()

    expected = step(Writes.apply if first == 0 else nn.functional.linear)
    with pytest.raises(RuntimeError, match=r"update_every must be 1 .* the gradient of middle"):
        step(Writes.apply)
    network.opt.method.update_every = 1
    torch.testing.assert_close(step(Writes.apply), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shows", ["trunk", "own trunk", "head"])
def test_kept_weights_of_a_shared_layer_that_a_function_of_one_task_hides(shows: str) -> None:
    """A pass for all tasks could not weight hidden gradients, even if the graph shows the layer."""
    network = Network(torch.tanh, Halves(update_every=3))
    shared, widen = network.trunk["last"], torch.eye(5, 8)

    def step(hide: Callable[[Tensor], Tensor]) -> Tensor:
        z = network.features()
        of_a = network.features() if shows == "own trunk" else z
        of_b = shared(z @ widen) if shows == "head" else z
        a, b = network.heads["a"](of_a + hide(of_a @ widen)), network.heads["b"](of_b)
        network.sgd.param_groups[0]["lr"] = 0.0
        network.opt.backward({"a": a.square().mean(), "b": b.square().mean()})
        update = network.gradient()
        network.sgd.step()
        return update

    expected = step(shared)
    for _ in range(3):  # Two steps with kept weights, and one that solves.
        torch.testing.assert_close(
            step(lambda h: Inner.apply(shared, h)), expected, rtol=1e-10, atol=1e-12
        )


def test_kept_weights_of_functions_that_write_in_graphs_of_their_own() -> None:
    network = Network(torch.tanh, Halves(update_every=3))
    first, weight = network.trunk["first"], network.trunk["last"].weight

    def losses() -> dict[str, Tensor]:
        outputs = {t: network.heads[t](Writes.apply(first(network.x).tanh(), weight)) for t in AB}
        return {task: y.square().mean() for task, y in outputs.items()}

    network.opt.backward(losses())
    network.sgd.zero_grad()
    with pytest.raises(RuntimeError, match=r"update_every must be 1 .* gradient of last.weight"):
        network.opt.backward(losses())


@pytest.mark.parametrize("method", [Ones, cs.Sum])
def test_a_function_of_a_head_with_a_backward_pass_inside(method: type[cs.Method]) -> None:
    """Behind features, the gradients count once, even for a layer that the graph also shows."""
    network = Network(torch.tanh, method())
    z, extra = network.features(), nn.Linear(5, 5)
    network.sgd.add_param_group({"params": [*extra.parameters()]})
    losses = {t: network.heads[t](extra(z)).square().mean() for t in AB}
    losses["a"] = losses["a"] + extra(z).square().mean()
    expected = torch.autograd.grad(sum(losses.values()), extra.weight, retain_graph=True)[0]
    z = network.features()
    losses = {t: network.heads[t](extra(z)).square().mean() for t in AB}
    losses["a"] = losses["a"] + Inner.apply(extra, z).square().mean()
    network.opt.backward(losses, features=z)
    torch.testing.assert_close(extra.weight.grad, expected, rtol=1e-10, atol=1e-12)


class Fused(torch.autograd.Function):
    """A loss as in fused kernels: its gradient is saved, and scaled in place."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, target: float) -> Tensor:
        ctx.save_for_backward(2 * (z.detach() - target) / z.numel())
        return (z - target).square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (saved,) = ctx.saved_tensors
        return saved.mul_(grad), None


@pytest.mark.parametrize("every", [1, 3])
def test_parts_of_one_task_alone_need_not_be_repeatable(every: int) -> None:
    """A fused loss per task, and an auxiliary loss injected in one task's head."""
    network = Network(torch.tanh, Ones(update_every=every))

    def losses(*, fused: bool) -> dict[str, Tensor]:
        z = network.features()
        h = network.heads["a"](z)
        auxiliary = h.square().mean()
        if fused:
            h = Injects.apply(h, auxiliary)
            return {"a": Fused.apply(h, 0.5), "b": Fused.apply(network.heads["b"](z), 1.0)}
        of_b = (network.heads["b"](z) - 1.0).square().mean()
        return {"a": (h - 0.5).square().mean() + auxiliary, "b": of_b}

    for _ in range(4):
        sum(losses(fused=False).values()).backward()
        expected = network.gradient()
        network.sgd.zero_grad()
        network.opt.backward(losses(fused=True))
        torch.testing.assert_close(network.gradient(), expected, rtol=1e-10, atol=1e-12)
        network.sgd.step()
        network.sgd.zero_grad()


def test_a_failed_step_does_not_change_reach() -> None:
    """The failed step's batch may be dropped, so its passes must not count."""
    torch.manual_seed(0)
    trunk = nn.ModuleDict({"one": nn.Linear(3, 4), "own": nn.Linear(3, 4)})
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, Halves())
    x = torch.randn(8, 3)

    def loss(task: str) -> Tensor:
        z = trunk["one"](x)
        return (z + trunk["own"](x) if task == "b" else z).square().mean()

    def failing(task: str) -> Tensor:
        if task == "b":
            raise ZeroDivisionError
        return (trunk["one"](x) + trunk["own"](x)).square().mean()

    opt.step(loss)
    before = opt.state_dict()["reach"]
    with pytest.raises(ZeroDivisionError):
        opt.step(failing)
    assert opt.state_dict()["reach"] == before
    expected = torch.autograd.grad(loss("b"), trunk["own"].weight)[0]
    opt.step(loss)
    torch.testing.assert_close(trunk["own"].weight.grad, expected)


def test_a_failed_step_leaves_nothing_to_check() -> None:
    """The task's next pass reaches fewer parameters than the failed step's."""
    trunk = nn.ModuleDict({"one": nn.Linear(3, 4), "own": nn.Linear(3, 4)})
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, Ones())
    x = torch.randn(8, 3)

    def loss(names: list[str], _: str) -> Tensor:
        return torch.stack([trunk[name](x) for name in names]).square().mean()

    with pytest.raises(KeyError, match="none"):
        opt.step([partial(loss, ["one", "own"]), partial(loss, ["none"])])
    opt.step(partial(loss, ["one"]))


def test_the_check_leaves_no_trace() -> None:
    """The check restores statistics that checkpointing changes, and runs for a few setups only."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8)
    trunk = nn.ModuleDict({"first": nn.Linear(6, 8), "norm": norm, "last": nn.Linear(8, 5)})
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, Ones())
    x, passes = torch.randn(16, 6), [0]

    def run(x: Tensor) -> Tensor:
        return trunk["last"](norm(trunk["first"](x)))

    def losses() -> dict[str, Tensor]:
        z = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
        z.register_hook(lambda _: passes.__setitem__(0, passes[0] + 1))
        return {"a": z.square().mean(), "b": (z - 1).square().mean()}

    known = losses()
    before = norm.num_batches_tracked.clone()
    opt.trace(known)
    assert torch.equal(norm.num_batches_tracked, before)
    for step in range(20):  # Freezes a layer in every other step.
        trunk["first"].requires_grad_(step % 2 == 0)
        opt.backward(losses())
        opt._engine.optimizers[0].zero_grad()
    assert passes[0] <= 20 * 2 + 3 * 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_that_adds_in_any_order(dtype: torch.dtype) -> None:
    """Atomic additions on a GPU must not cause a false alarm."""

    class Adds(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.repeat_interleave(16, 1)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            parts = grad.unflatten(1, (-1, 16)).unbind(2)
            total = torch.zeros_like(parts[0])
            for i in torch.randperm(16):
                total = total + parts[int(i)]
            return total

    torch.set_default_dtype(torch.float32)
    for seed in range(3):
        torch.manual_seed(seed)
        trunk = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 8)).to(dtype)
        opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, Ones())
        z = Adds.apply(trunk(torch.randn(64, 6, dtype=dtype)))
        opt.backward({"a": z.float().square().mean(), "b": (z.float() - 1).square().mean()})


def test_gradients_without_numbers() -> None:
    """Covers a function that returns None with kept weights, jagged tensors, and over 64 tasks."""

    class Skips(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad, None

    network = Network(torch.tanh, Halves(update_every=3))
    for _ in range(4):
        z = network.features()
        skipped = Skips.apply(z, network.trunk["last"].weight)
        network.opt.backward({"a": z.square().mean(), "b": skipped.mean()})
        network.sgd.step()
    trunk = nn.Linear(3, 4)
    x = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, Ones())
    y = trunk(x).values()
    opt.backward({"a": y.square().mean(), "b": y.mean()})

    class Added(cs.Method):
        def combine(self, gradients: cs.TaskGradients, layout: cs.Layout, step: cs.Step) -> None:
            reached = gradients.reached()
            for i, update in zip(reached, gradients.updates(reached), strict=True):
                update.copy_(sum(g for g in gradients.of([i]) if g is not None))
            gradients.assign(reached)

    tasks = [str(n) for n in range(70)]
    trunk = nn.Linear(3, 4)
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), tasks, Added())
    y = trunk(torch.randn(8, 3))
    opt.backward({task: (y - n).square().mean() for n, task in enumerate(tasks)})


def test_trace_of_losses_that_add_up_in_one_pass() -> None:
    network = Network(PARTS["injected"][0], cs.Sum())
    network.opt.trace(network.losses())


@pytest.mark.parametrize("swap", [False, True])
def test_a_network_that_is_cast_between_steps(swap: bool) -> None:
    network = Network(torch.tanh)
    try:
        torch.__future__.set_swap_module_params_on_conversion(swap)
        for dtype in (torch.float64, torch.float32, torch.float64):
            network.trunk.to(dtype), network.heads.to(dtype)
            network.x = network.x.to(dtype)
            network.make("step")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
