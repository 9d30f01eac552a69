"""`backward(losses, features=z)`: gradients are combined at a shared representation."""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from networks import (
    AB,
    Composed,
    Trunk,
    assert_equal,
    optimizer_of,
    problem,
    refused,
    sgd_of,
    with_gradient,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cs_kernels as cs

pytestmark = pytest.mark.loop

ABC = ["a", "b", "c"]


def scales() -> nn.Module:
    """Attention, then two features: one a token, one a sequence."""

    def run(trunk: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x = trunk.embed(x)
        y = trunk.norm(x)
        x = x + trunk.attention(y, y, y, need_weights=False)[0]
        return trunk.token(x[:, 0]), trunk.tokens(x).transpose(1, 2)

    return Composed(
        run,
        embed=nn.Linear(5, 8),
        norm=nn.LayerNorm(8),
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
        token=nn.Linear(8, 4),
        tokens=nn.Linear(8, 6),
    )


class Network(nn.Module):
    """A trunk, and a head a task on every feature; the last task has only the last feature."""

    def __init__(self, kind: str, tasks: Sequence[str] = ABC) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tasks = list(tasks)
        self.trunk = Trunk() if kind == "residual" else scales()
        sizes = [6 * 12 * 12] if kind == "residual" else [4, 18]
        self.heads = nn.ModuleDict(
            {task: nn.ModuleList(nn.Linear(size, 2) for size in sizes) for task in tasks}
        )
        self.double()
        self.x = torch.randn((4, 3, 6, 6) if kind == "residual" else (4, 3, 5)).double()
        self.targets = {t: (1 + n) * torch.randn(4, 2).double() for n, t in enumerate(tasks)}

    def features(self) -> tuple[Tensor, ...]:
        found = self.trunk(self.x)
        return found if isinstance(found, tuple) else (found,)

    def loss(self, task: str, features: Sequence[Tensor]) -> Tensor:
        pairs = [*zip(self.heads[task], features, strict=True)]
        if task == self.tasks[-1]:
            pairs = pairs[-1:]
        outputs = [head(z.flatten(1)) for head, z in pairs]
        return (sum(outputs[1:], outputs[0]) - self.targets[task]).square().mean()

    def losses(
        self, features: Sequence[Tensor], tasks: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        return {task: self.loss(task, features) for task in tasks or self.tasks}

    def start(
        self, method: cs.Method, weighting: cs.Weighting | None = None, **options: Any
    ) -> cs.MultiTaskOptimizer:
        sgd = sgd_of(self.trunk, self.heads, lr=0.02)
        if weighting is not None:
            sgd.param_groups[0]["params"] += weighting.parameters()
        return cs.MultiTaskOptimizer(
            self.trunk, sgd, self.tasks, method, weighting=weighting, **options
        )

    def backward(self, opt: cs.MultiTaskOptimizer, tasks: Sequence[str] | None = None) -> None:
        features = self.features()
        opt.backward(self.losses(features, tasks), features=features)

    def gradients(self) -> dict[str, Tensor | None]:
        return {n: None if p.grad is None else p.grad.clone() for n, p in self.named_parameters()}


def row_of(grads: Sequence[Tensor | None], features: Sequence[Tensor]) -> Tensor:
    """Gradients of features in one row, in the order of the features' memory; zeros for None."""
    parts = [torch.zeros_like(z) for z in features]
    for part, grad in zip(parts, grads, strict=True):
        if grad is not None:
            part.copy_(grad)
    return torch.cat([part.as_strided((part.numel(),), (1,)) for part in parts])


def rows_of(losses: dict[str, Tensor], features: Sequence[Tensor]) -> Tensor:
    options = {"retain_graph": True, "allow_unused": True}
    grads = (torch.autograd.grad(loss, features, **options) for loss in losses.values())
    return torch.stack([row_of(of_task, features) for of_task in grads])


def _dropped(method: cs.GradDrop, rows: Tensor, number: int) -> Tensor:
    update, leaks = torch.empty_like(rows[0]), [float(method.leak)] * len(rows)
    with cs.use_backend("reference"):
        torch.ops.cs_kernels.drop_signs_([update], [*rows], leaks, method.seed, number, len(rows))
    return update


def by_hand(
    network: Network,
    method: cs.Method,
    weigh: Callable[[str, Tensor], Tensor] = lambda task, loss: loss,
    tasks: Sequence[str] | None = None,
    number: int = 0,
) -> dict[str, Tensor]:
    """The definition: every gradient of one step, in plain autograd."""
    features = network.features()
    losses = {t: weigh(t, loss) for t, loss in network.losses(features, tasks).items()}
    rows = rows_of(losses, features)
    if isinstance(method, cs.GradDrop):
        update = _dropped(method, rows, number)
    else:
        assert isinstance(method, cs.GramianMethod)
        seen = {task: loss.detach() for task, loss in losses.items()}
        update = method.weights(rows @ rows.T, cs.Step(number, tuple(losses), seen, seen)) @ rows
    heads = dict(network.heads.named_parameters(prefix="heads"))
    options = {"retain_graph": True, "allow_unused": True}
    of_heads = torch.autograd.grad(sum(losses.values()), [*heads.values()], **options)
    found = {n: grad for n, grad in zip(heads, of_heads, strict=True) if grad is not None}
    return found | through_trunk(network, features, update.split([z.numel() for z in features]))


def through_trunk(
    network: Network, features: Sequence[Tensor], updates: Sequence[Tensor]
) -> dict[str, Tensor]:
    """The gradients of the trunk from rows of features."""
    trunk = dict(network.trunk.named_parameters(prefix="trunk"))
    parts = [u.as_strided(z.shape, z.stride()) for u, z in zip(updates, features, strict=True)]
    of_trunk = torch.autograd.grad(features, [*trunk.values()], parts)
    return dict(zip(trunk, of_trunk, strict=True))


def assert_gradients(
    network: Network, expected: dict[str, Tensor], rtol: float = 1e-12, atol: float = 1e-13
) -> None:
    found = {name: grad for name, grad in network.gradients().items() if grad is not None}
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


METHODS: list[Callable[[], cs.Method]] = [
    *(cs.PCGrad, cs.MGDA, cs.CAGrad, cs.IMTLG, cs.UPGrad, cs.NashMTL, cs.AlignedMTL, cs.GradDrop)
]
EVERY = pytest.mark.parametrize("make", METHODS, ids=lambda make: make.__name__)
BOTH_KINDS = pytest.mark.parametrize("kind", ["residual", "scales"])


@EVERY
@BOTH_KINDS
@pytest.mark.parametrize("tasks", [ABC, ["a", "c"], ["b"]], ids="".join)
def test_equals_the_definition(make: Callable[[], cs.Method], kind: str, tasks: list[str]) -> None:
    network = Network(kind)
    expected = by_hand(copy.deepcopy(network), make(), tasks=tasks)
    network.backward(network.start(make()), tasks)
    assert_gradients(network, expected)
    before = network.gradients()
    (plain := copy.deepcopy(network)).backward(plain.start(cs.Sum()), tasks)
    if len(tasks) > 1:  # The comparison would hold without surgery; there is some.
        assert not torch.allclose(
            before["trunk." + next(iter(network.trunk.state_dict()))],
            next(plain.trunk.parameters()).grad,
        )


@BOTH_KINDS
def test_sum_is_plain_backward(kind: str) -> None:
    network = Network(kind)
    plain = copy.deepcopy(network)
    network.backward(network.start(cs.Sum()))
    sum(plain.losses(plain.features()).values()).backward()
    assert_equal(network.gradients(), plain.gradients())


@EVERY
def test_steps_equal_the_plain_loop(make: Callable[[], cs.Method]) -> None:
    """Ten steps, also of methods with a state."""
    network = Network("scales")
    twin, method = copy.deepcopy(network), make()
    opt = network.start(make())
    plain = sgd_of(twin.trunk, twin.heads, lr=0.02)
    for number in range(10):
        network.backward(opt)
        opt.optimizer.step()
        named = dict(twin.named_parameters())
        for name, grad in by_hand(twin, method, number=number).items():
            named[name].grad = grad
        plain.step()
        plain.zero_grad()
    torch.testing.assert_close(network.state_dict(), twin.state_dict(), rtol=1e-10, atol=1e-12)


def test_groups_are_features() -> None:
    network = Network("scales")
    z = network.features()
    losses = network.losses(z)
    rows = [rows_of(losses, [feature]) for feature in z]
    gramians = [of_feature @ of_feature.T for of_feature in rows]
    updates = [cs.MGDA().weights(g) @ r for g, r in zip(gramians, rows, strict=True)]
    expected = through_trunk(network, z, updates)
    opt = network.start(cs.MGDA(groups="layer"))
    network.backward(opt)
    assert opt.report().layers == ("0", "1")
    torch.testing.assert_close(opt.report().gramian, torch.stack(gramians))
    of_trunk = {n: g for n, g in network.gradients().items() if n.startswith("trunk.")}
    torch.testing.assert_close(of_trunk, expected)


@EVERY
def test_a_scaler_changes_nothing(make: Callable[[], cs.Method]) -> None:
    plain, scaled = Network("residual"), Network("residual")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    one, opt = plain.start(make()), scaled.start(make(), scaler=scaler)
    plain.backward(one)
    scaled.backward(opt)
    found = {n: None if g is None else g / 2**16 for n, g in scaled.gradients().items()}
    torch.testing.assert_close(found, plain.gradients(), rtol=1e-12, atol=1e-14)
    if isinstance(make(), cs.GramianMethod):
        torch.testing.assert_close(one.report().gramian, opt.report().gramian)
    scaler.unscale_(opt.optimizer)
    torch.testing.assert_close(scaled.gradients(), plain.gradients(), rtol=1e-12, atol=1e-14)


def test_weightings() -> None:
    """A factor and a regularizer whose own parameter learns."""
    network = Network("scales")
    twin = copy.deepcopy(network)
    weighting = cs.UncertaintyWeights(dict.fromkeys(ABC, "classification"))
    with torch.no_grad():
        for n, sigma in enumerate(weighting.parameters()):
            sigma.fill_(0.3 * n)
    factors = {task: torch.exp(-2 * s.detach()) for task, s in weighting.log_sigma.items()}
    expected = by_hand(twin, cs.CAGrad(), lambda task, loss: factors[task] * loss)
    losses = {task: loss.detach() for task, loss in twin.losses(twin.features()).items()}
    network.backward(network.start(cs.CAGrad(), weighting))
    assert_gradients(network, expected)
    for task, sigma in weighting.log_sigma.items():
        torch.testing.assert_close(
            sigma.grad, (1 - 2 * factors[task] * losses[task]).float(), rtol=1e-5, atol=1e-6
        )


def test_a_report() -> None:
    network = Network("residual")
    opt = network.start(cs.PCGrad())
    for number in range(2):
        network.backward(opt)
        assert opt.report().step == number
        assert opt.report().scalars()["surgery_ms"] > 0
        opt.optimizer.step()


def test_both_ways_in_turn() -> None:
    """A call with features leaves nothing behind for a call without, nor the other way round."""
    network = Network("scales")
    opt = network.start(cs.MGDA())
    for _ in range(2):
        expected = by_hand(copy.deepcopy(network), cs.MGDA())
        network.backward(opt)
        assert_gradients(network, expected)
        opt.optimizer.zero_grad()
        (fresh := copy.deepcopy(network)).start(cs.MGDA()).backward(fresh.losses(fresh.features()))
        opt.backward(network.losses(network.features()))
        torch.testing.assert_close(network.gradients(), fresh.gradients())
        opt.optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    """The features have the dtype of autocast."""
    network = Network("scales").float()
    network.x = network.x.float()
    network.targets = {task: y.float() for task, y in network.targets.items()}
    opt = network.start(cs.MGDA())
    with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
        features = network.features()
        losses = network.losses(features)
    assert {z.dtype for z in features} == {dtype}
    rows = rows_of(losses, features).double()
    opt.backward(losses, features=features)
    torch.testing.assert_close(opt.report().gramian, rows @ rows.T, rtol=1e-6, atol=1e-9)
    assert all(p.grad.dtype is torch.float32 for p in network.parameters() if p.grad is not None)


def test_features_of_two_dtypes() -> None:
    network = Network("scales")
    opt = network.start(cs.MGDA())
    first, second = network.features()
    narrow = first.float()
    opt.backward(network.losses((narrow.double(), second)), features=[narrow, second])
    expected = by_hand(copy.deepcopy(network), cs.MGDA())
    assert_gradients(network, expected, rtol=1e-5, atol=1e-6)


def test_features_that_are_not_dense() -> None:
    """A part of an output, whose rest no loss needs, and expanded gradients."""
    trunk, x = nn.Linear(3, 6).double(), torch.randn(5, 3).double()

    def start() -> tuple[Tensor, dict[str, Tensor]]:
        z = trunk(x)[:, 1:5]
        assert not z.is_contiguous()
        return z, {"a": z.mean(), "b": (z * torch.arange(4.0)).sum()}

    z, losses = start()
    optimizer_of(trunk, cs.IMTLG()).backward(losses, features=z)
    z, losses = start()
    grads = [torch.autograd.grad(v, z, retain_graph=True)[0].flatten() for v in losses.values()]
    rows = torch.stack(grads)
    update = cs.IMTLG().weights(rows @ rows.T) @ rows
    (expected,) = torch.autograd.grad(z, trunk.weight, update.view_as(z))
    torch.testing.assert_close(trunk.weight.grad, expected)


def test_two_outputs_of_one_operation() -> None:
    trunk = nn.Linear(3, 6).double()
    opt = optimizer_of(trunk, cs.MGDA())
    first, second = trunk(torch.randn(5, 3).double()).chunk(2, dim=1)
    opt.backward({"a": first.square().mean(), "b": second.mean()}, features=[first, second])
    # Neither loss depends on the other's half: half a square of norms, by hand.
    gramian = opt.report().gramian
    assert gramian[0, 1] == 0
    (w, _), norms = opt.report().task_weights.tolist(), gramian.diagonal()
    assert w == pytest.approx(float(norms[1] / norms.sum()))
    assert all(half.any() for half in trunk.weight.grad.chunk(2))


def test_heads_inside_the_trunk() -> None:
    """They are the tasks' own: each gets the gradient of its loss."""
    model, _, x, targets = problem()
    z = model.trunk(x)
    losses = {t: (model.heads[t](z) - targets[t]).square().mean() for t in AB}
    own = {t: torch.autograd.grad(losses[t], model.heads[t].weight, retain_graph=True) for t in AB}
    optimizer_of(model, cs.MGDA()).backward(losses, features=z)
    for task in AB:
        torch.testing.assert_close(model.heads[task].weight.grad, own[task][0])
    assert model.unused.weight.grad is None


def test_a_part_behind_the_features_that_heads_share() -> None:
    """Outside the trunk, gradients add up; their common graph is there for both."""
    network = Network("residual", AB)
    neck = nn.Conv2d(6, 6, 1).double()
    opt = cs.MultiTaskOptimizer(network.trunk, sgd_of(network, neck), AB, cs.PCGrad())
    (z,) = network.features()
    losses = network.losses([torch.sigmoid(neck(z))])
    expected = torch.autograd.grad(sum(losses.values()), [*neck.parameters()], retain_graph=True)
    opt.backward(losses, features=z)
    torch.testing.assert_close([p.grad for p in neck.parameters()], [*expected])


def test_gradients_with_one_memory() -> None:
    """Autograd gives both parameters the same tensor; the heads' gradients must not share it."""
    trunk = nn.Linear(3, 4).double()
    head = nn.ParameterList(nn.Parameter(torch.zeros(5, 4).double()) for _ in range(2))
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk, head), ["a"], cs.MGDA())
    z = trunk(torch.randn(5, 3).double())
    opt.backward({"a": (z + head[0] + head[1]).square().sum()}, features=z)
    assert_equal(head[0].grad, head[1].grad)
    head[0].grad.mul_(2)
    torch.testing.assert_close(head[0].grad, 2 * head[1].grad)


def test_gradients_that_the_next_pass_overwrites() -> None:
    """As those in the memory of a CUDA graph, parts of one allocation."""
    memory = torch.empty(2, 20).double()
    reused = with_gradient(Tensor.clone, lambda grad: memory[1].view(5, 4).copy_(grad).detach())
    trunk, x = nn.Linear(3, 4).double(), torch.randn(5, 3).double()
    opt = optimizer_of(trunk, cs.MGDA())
    found = []
    for copied in (reused, Tensor.clone):
        z = trunk(x)
        first, second = copied(z), copied(z)
        losses = {"a": first.square().mean(), "b": (second.cumsum(0) - 1).square().mean()}
        opt.backward(losses, features=z)
        found.append([trunk.weight.grad.clone(), opt.report().gramian])
        opt.optimizer.zero_grad()
    assert_equal(*found)


def test_hooks_of_parameters_run_once() -> None:
    network, twin = Network("residual", AB), Network("residual", AB)
    calls: list[str] = []
    for name, p in network.named_parameters():
        p.register_hook(lambda g, name=name: (calls.append(name), 2 * g)[1])
        p.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(f"{name} after"))
    network.backward(network.start(cs.MGDA()))
    twin.backward(twin.start(cs.MGDA()))
    grads = twin.gradients()
    assert sorted(calls) == sorted([*grads, *(f"{name} after" for name in grads)])
    torch.testing.assert_close(network.gradients(), {name: 2 * g for name, g in grads.items()})


@pytest.mark.parametrize("method", [cs.Sum(), cs.PCGrad()], ids=repr)
def test_hooks_of_features_run_once(method: cs.Method) -> None:
    """On the gradient that goes through the trunk."""
    network, twin = Network("scales"), Network("scales")
    calls: list[int] = []
    features = network.features()
    for n, z in enumerate(features):
        z.register_hook(lambda g, n=n: (calls.append(n), 2 * g)[1])
    network.start(method).backward(network.losses(features), features=features)
    twin.backward(twin.start(method))
    assert sorted(calls) == [0, 1]
    doubled = {n: 2 * g if n.startswith("trunk.") else g for n, g in twin.gradients().items()}
    torch.testing.assert_close(network.gradients(), doubled)
    assert all(len(z._backward_hooks) == 1 for z in features)


@pytest.mark.parametrize("method", [cs.Sum(), cs.PCGrad(), cs.GradDrop()], ids=repr)
def test_every_part_has_one_backward_pass(method: cs.Method) -> None:
    """Also the node of the feature, which `backward(inputs=...)` would run for each task."""
    network, calls = Network("residual"), list[str]()
    names = ["trunk.bare", "trunk.up", *(f"heads.{task}.0" for task in ABC)]
    for name in names:
        network.get_submodule(name).register_full_backward_hook(
            lambda *_, name=name: calls.append(name)
        )
    (z,) = network.features()
    z.grad_fn.register_hook(lambda *_: calls.append("z"))
    network.start(method).backward(network.losses([z]), features=z)
    assert sorted(calls) == sorted([*names, "z"])


def test_memory_holds_gradients_of_features_alone() -> None:
    """While heads' passes run, no shared parameter has a gradient; afterwards, no row is left."""
    network = Network("residual")
    opt = network.start(cs.MGDA())
    found: list[bool] = []
    combine, kept = opt.method.combine, list[weakref.ref[Tensor]]()

    def look(gradients: cs.TaskGradients, layout: cs.Layout, step: cs.Step) -> None:
        rows = [g for row in gradients.rows for g in row if g is not None]
        assert [g.shape for g in rows] == 3 * [torch.Size((4, 6, 12, 12))]
        kept.extend(map(weakref.ref, rows))
        found.append(any(p.grad is not None for p in network.trunk.parameters()))
        combine(gradients, layout, step)

    opt.method.combine = look
    network.backward(opt)
    gc.collect()
    assert found == [False]
    assert all(g() is None for g in kept)
    assert all(g is None for row in opt._engine.ranks.gradients.rows for g in row)


def test_graphs_are_freed() -> None:
    network = Network("residual")
    (z,) = network.features()
    losses = network.losses([z])
    network.start(cs.MGDA()).backward(losses, features=z)
    for loss, leaf in (
        *((losses[t], network.heads[t][0].weight) for t in ABC),
        (z.sum(), network.trunk.stem.weight),
    ):
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, leaf)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("retains", [True, False])
def test_features_keep_no_gradient(retains: bool) -> None:
    network = Network("residual")
    opt = network.start(cs.MGDA())
    (z,) = network.features()
    if retains:
        z.retain_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.backward(network.losses([z]), features=z)
    assert z.grad is None


@pytest.mark.compile
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # Dynamo's.
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_trunk_and_heads(backend: str) -> None:
    network = Network("scales")
    expected = by_hand(copy.deepcopy(network), cs.CAGrad())
    opt = network.start(cs.CAGrad())
    trunk = torch.compile(network.trunk, backend=backend)
    heads = {
        task: torch.compile(lambda z, task=task: network.loss(task, z), backend=backend)
        for task in ABC
    }
    for _ in range(2):
        z = trunk(network.x)
        opt.backward({task: head(z) for task, head in heads.items()}, features=z)
        assert_gradients(network, expected)
        opt.optimizer.zero_grad()


@pytest.mark.compile
def test_losses_and_features_of_one_compiled_function_are_refused() -> None:
    network = Network("residual")
    opt = network.start(cs.CAGrad())

    @torch.compile(backend="aot_eager")
    def run() -> tuple[Tensor, dict[str, Tensor]]:
        (z,) = network.features()
        return z, network.losses([z])

    z, losses = run()
    with pytest.raises(ValueError, match="a loss must depend on features, got one for 'a'"):
        opt.backward(losses, features=z)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_trunk(reentrant: bool) -> None:
    network = Network("residual")
    network.trunk.eval()  # The forward pass runs twice.
    expected = by_hand(copy.deepcopy(network), cs.MGDA())
    z = checkpoint(network.trunk, network.x.requires_grad_(), use_reentrant=reentrant)
    network.start(cs.MGDA()).backward(network.losses([z]), features=z)
    assert_gradients(network, expected)


# Errors, before anything is changed


def assert_refused(
    network: Network,
    opt: cs.MultiTaskOptimizer,
    losses: dict[str, Tensor],
    features: object,
    match: str,
    error: type[Exception] = ValueError,
    update: bool = True,
) -> None:
    """`.grad` too stays as it was."""
    for p in network.parameters():
        p.grad = torch.full_like(p, 0.0)

    def state() -> list[object]:
        return [network.state_dict(), network.gradients(), opt.state_dict()["steps"]]

    with refused(state, error, match):
        opt.backward(losses, features=features, update=update)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda z: [], "sequence of them, got none"),
        (lambda z: "z", r"features must be a tensor.*got str 'z' as features\[0\]"),
        (lambda z: {"z": z}, r"features must be a tensor.*got dict as features\[0\]"),
        (lambda z: [z, None], r"features must be a tensor.*got NoneType as features\[1\]"),
        (lambda z: z.detach(), r"with a graph, got features\[0\] of shape \(4,.*without"),
        (lambda z: z.detach().requires_grad_(), r"\[0\] of shape .* that is a leaf"),
        (lambda z: z.to(torch.complex128), r"real numbers, got a .*complex128"),
        (lambda z: [z, z], r"different tensors, got one as features\[0\].*features\[1\]"),
        (lambda z: [z, z.relu()], r"features\[1\] that depends on features\[0\]"),
        (lambda z: [z.tanh().exp(), z], r"features\[0\] that depends on features\[1\]"),
        (lambda z: [z.view(-1), z], r"features\[0\] that depends on features\[1\]"),
        (lambda z: z.tanh(), "a loss must depend on features, got one for 'a'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("method", [cs.MGDA(), cs.Sum()], ids=repr)
def test_features_that_do_not_fit(
    change: Callable[[Tensor], object], match: str, method: cs.Method
) -> None:
    network = Network("residual")
    (z,) = network.features()
    error = TypeError if "must be a tensor" in match else ValueError
    assert_refused(network, network.start(method), network.losses([z]), change(z), match, error)


Losses = tuple[dict[str, Tensor], Sequence[Tensor] | Tensor]


def _past(part: Callable[[Network], Tensor]) -> Callable[..., Losses]:
    """A part of b's loss leads past the features."""
    return lambda n, z: (n.losses(z) | {"b": n.loss("b", z) + part(n)}, z)


def _hidden(network: Network, _: object) -> Losses:
    """Reentrant checkpointing shows no parameter."""
    y = checkpoint(network.trunk.embed, network.x, use_reentrant=True)
    z = network.trunk.tokens(y)
    return {"a": z.square().mean(), "b": z.mean() + y.mean()}, z


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("method", [cs.MGDA(), cs.Sum()], ids=repr)
@pytest.mark.parametrize(
    ("losses", "match"),
    [
        (_past(lambda n: n.trunk.embed(n.x).mean()), "'b' depends on trunk.embed.(weight|bias)"),
        (_past(lambda n: n.trunk.embed.weight.square().sum()), "'b' depends on trunk.embed.weight"),
        (_past(lambda n: n.trunk.norm(torch.arange(8).double()).std()), "'b' depends on .*norm"),
        (_past(lambda n: n.x.sum()), r"'b' depends on a leaf of shape \(4, 3, 5\) past"),
        (_hidden, "'b' depends on a leaf of shape"),
        (lambda n, z: (n.losses(z), z[1]), r"'a' depends on trunk\.\w+"),
        (lambda n, z: ({"a": z[1].mean() + z[0].mean()}, z[1:]), r"'a' depends on trunk\.\w+"),
        (
            lambda n, z: ({"c": n.loss("c", n.features())}, z),
            "got one for 'c' that depends on none",
        ),
    ],
)
def test_what_leads_past_the_features(
    losses: Callable[..., Losses], match: str, method: cs.Method, steps: int
) -> None:
    """A skip connection, a tied weight, another forward pass, in the first step or later."""
    network = Network("scales")
    network.x.requires_grad_()
    opt = network.start(method)
    for _ in range(steps):
        network.backward(opt)
        opt.optimizer.step()
    match = match if "none" in match else f"through features alone.*{match}"
    assert_refused(network, opt, *losses(network, network.features()), match)


def test_a_shared_parameter_behind_the_features() -> None:
    """The second layer of the trunk, whose gradients would only be added."""
    model, _, x, targets = problem()
    z = model.trunk[:2](x)
    y = model.trunk[2](z)
    losses = {t: (model.heads[t](y) - targets[t]).square().mean() for t in AB}
    match = r"several losses reach.*those of 'a' and 'b' depend on trunk\.trunk\.2\.(weight|bias)"
    with refused(model.state_dict, ValueError, match):
        optimizer_of(model, cs.MGDA()).backward(losses, features=z)


@pytest.mark.parametrize("number", [0, 1])
def test_features_from_elsewhere(number: int) -> None:
    network, other = Network("residual"), Network("residual")
    opt = cs.MultiTaskOptimizer(network.trunk, sgd_of(network, other), ABC, cs.MGDA())
    features = [*network.features(), *other.features()][1 - number :]
    match = rf"shared parameter of trunk, got features\[{number}\] of shape \(4, 6, 12, 12\) that"
    assert_refused(network, opt, network.losses([sum(features)]), features, match)


def _counting(network: Network) -> cs.MultiTaskOptimizer:
    opt = network.start(cs.MGDA())
    opt.count_conflicts()
    return opt


def _converted(network: Network, method: cs.Method) -> cs.MultiTaskOptimizer:
    cs.nn.convert_task_batchnorm(network.trunk, ABC)
    return network.start(method)


@pytest.mark.parametrize(
    ("start", "match"),
    [
        (lambda n: _converted(n, cs.ConnectionStrength()), r"must take.*ConnectionStrength\(\)"),
        (lambda n: _converted(n, cs.PCGrad()), "trunk must have no task-specific normalization"),
        (_counting, "count_conflicts needs gradients of all shared"),
        (lambda n: n.start(cs.MGDA(), backward=Tensor.backward), "backward must be None.*got <"),
        (lambda n: n.start(cs.MGDA(), schedule=cs.Sequential()), "is in Phase 1: use step"),
    ],
)
def test_what_does_not_go_with_features(
    start: Callable[[Network], cs.MultiTaskOptimizer], match: str
) -> None:
    network = Network("residual")
    losses = {"a": network.heads["a"][0].weight.sum()}
    error = RuntimeError if "Phase 1" in match else ValueError
    assert_refused(network, start(network), losses, torch.ones(1), match, error)


def test_micro_batches() -> None:
    network = Network("residual")
    opt = network.start(cs.MGDA())
    (z,) = network.features()
    losses = network.losses([z])
    assert_refused(network, opt, losses, z, "update must be True.*got False", update=False)
    opt.backward(network.losses([z]), update=False)
    with pytest.raises(RuntimeError, match="features must be None in a call that ends those with"):
        network.backward(opt)
    with pytest.warns(UserWarning, match="RuntimeError in backward has dropped the gradients"):
        network.backward(opt)
    with pytest.raises(RuntimeError, match=r"update of the last backward\(\.\.\.\) is still"):
        network.backward(opt)


# Errors in the passes: all gradients are None afterwards


@contextmanager
def fails(network: Network, error: type[Exception], match: str) -> Iterator[None]:
    with pytest.raises(error, match=match):
        yield
    assert all(p.grad is None for p in network.parameters())


def test_a_reentrant_head_is_refused_by_torch() -> None:
    network = Network("residual", AB)
    (z,) = network.features()
    losses = {t: checkpoint(lambda z, t=t: network.loss(t, [z]), z, use_reentrant=True) for t in AB}
    with fails(network, RuntimeError, "use_reentrant=True"):
        network.start(cs.MGDA()).backward(losses, features=z)


def test_a_weighting_that_reaches_past_the_features() -> None:
    class Decay(cs.EqualWeights):
        def regularizer(self, task: str) -> Tensor | None:
            return network.trunk.stem.weight.square().sum()

    network = Network("residual")
    with fails(network, ValueError, r"through features alone.*trunk\.stem\.weight"):
        network.backward(network.start(cs.MGDA(), Decay()))


def test_features_from_elsewhere_that_hide_it() -> None:
    network, other = Network("residual"), Network("residual")
    opt = cs.MultiTaskOptimizer(network.trunk, sgd_of(network, other), ABC, cs.MGDA())
    z = checkpoint(other.trunk, other.x.requires_grad_(), use_reentrant=True)
    with fails(network, ValueError, r"a shared parameter of trunk, got features\[0\]"):
        opt.backward(network.losses([z]), features=z)
    assert all(p.grad is None for p in other.parameters())


def test_an_unheld_head() -> None:
    network = Network("residual")
    opt = cs.MultiTaskOptimizer(network.trunk, sgd_of(network.trunk), ABC, cs.MGDA())
    with fails(network, ValueError, "optimizer must hold every parameter"):
        network.backward(opt)


@pytest.mark.parametrize("at", ["heads.b.0.weight", "trunk.stem.weight"])
def test_gradients_are_none_after_a_failing_pass(at: str) -> None:
    network = Network("residual")
    opt = network.start(cs.MGDA())
    before = copy.deepcopy(network.state_dict())
    hook = network.get_parameter(at).register_hook(lambda _: 1 // 0)
    with fails(network, ZeroDivisionError, "by zero"):
        network.backward(opt)
    hook.remove()
    network.load_state_dict(before)  # Normalization has seen a batch.
    expected = by_hand(copy.deepcopy(network), cs.MGDA())
    network.backward(opt)
    assert_gradients(network, expected)


def test_a_method_that_assigns_nothing() -> None:
    class Nothing(cs.Method):
        def combine(self, gradients: cs.TaskGradients, layout: cs.Layout, step: cs.Step) -> None:
            del gradients, layout, step

    network = Network("residual")
    with fails(network, RuntimeError, "got none of features by Nothing"):
        network.backward(network.start(Nothing()))


def test_a_loss_without_a_gradient_of_the_features() -> None:
    """Its graph leads there; an operation on the way gives no gradient."""
    network = Network("residual")
    (z,) = network.features()
    losses = network.losses([z]) | {
        "b": network.loss("b", [with_gradient(Tensor.clone, lambda grad: None)(z)])
    }
    with fails(network, ValueError, "gradient with respect to features, got none for 'b'"):
        network.start(cs.MGDA()).backward(losses, features=z)


def test_gramians_of_one_linear_layer_and_one_sample() -> None:
    """dW_i = dz_i x^T, so the Gramians differ by the factor |x|^2."""
    trunk, x = nn.Linear(2, 2, bias=False).double(), torch.tensor([[3.0, 4.0]]).double()
    rows = torch.tensor([[1.0, 0.0], [-1.0, 2.0]]).double()
    opt, gramians = optimizer_of(trunk, cs.MGDA()), []
    for at_features in (True, False):
        z = trunk(x)
        losses = {task: (z * row).sum() for task, row in zip(AB, rows, strict=True)}
        opt.backward(losses, features=z if at_features else None)
        gramians.append(opt.report().gramian)
        assert opt.report().task_weights.tolist() == pytest.approx([0.75, 0.25])
        opt.optimizer.zero_grad()
    torch.testing.assert_close(gramians, [rows @ rows.T, 25 * rows @ rows.T])


def test_a_resumed_run_is_bit_equal() -> None:
    def trained(steps: int, states: Sequence[Any] = ()) -> tuple[Any, ...]:
        network = Network("scales")
        opt = network.start(cs.NashMTL(update_every=2))
        parts = network, opt.optimizer, opt
        for part, state in zip(parts, states, strict=bool(states)):
            part.load_state_dict(state)
        for _ in range(steps):
            network.backward(opt)
            opt.optimizer.step()
        return parts

    states = copy.deepcopy([part.state_dict() for part in trained(3)])
    assert_equal(trained(4, states)[0].state_dict(), trained(7)[0].state_dict())
