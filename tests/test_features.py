"""`backward(losses, features=z)`: gradients are combined at a shared representation."""

import copy
import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
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
Losses = dict[str, Tensor]
Features = Tensor | Sequence[Tensor]
Call = tuple[cs.MultiTaskOptimizer, Losses, Any]
"""An optimizer, and the losses and features for its `backward`."""


def scales() -> nn.Module:
    """A trunk with two features: of the first token of each sequence, and of all tokens."""

    def run(trunk: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x = trunk.norm(trunk.embed(x)).tanh()
        return trunk.token(x[:, 0]), trunk.tokens(x).transpose(1, 2)

    layers = {"embed": (5, 8), "token": (8, 4), "tokens": (8, 6)}
    linear = {name: nn.Linear(*sizes) for name, sizes in layers.items()}
    return Composed(run, norm=nn.LayerNorm(8), **linear)


class Network(nn.Module):
    """A trunk, and a head per task on every feature; the last task uses only the last feature."""

    def __init__(self, kind: str = "scales", tasks: Sequence[str] = ABC) -> None:
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
        features = self.trunk(self.x)
        return features if isinstance(features, tuple) else (features,)

    def loss(self, task: str, features: Sequence[Tensor]) -> Tensor:
        pairs = [*zip(self.heads[task], features, strict=True)]
        if task == self.tasks[-1]:
            pairs = pairs[-1:]
        outputs = [head(z.flatten(1)) for head, z in pairs]
        return (sum(outputs[1:], outputs[0]) - self.targets[task]).square().mean()

    def losses(self, features: Sequence[Tensor], tasks: Sequence[str] | None = None) -> Losses:
        return {task: self.loss(task, features) for task in tasks or self.tasks}

    def start(self, method: cs.Method, *others: nn.Module, **options: Any) -> cs.MultiTaskOptimizer:
        sgd = sgd_of(self.trunk, self.heads, *others, lr=0.02)
        return cs.MultiTaskOptimizer(self.trunk, sgd, self.tasks, method, **options)

    def backward(self, opt: cs.MultiTaskOptimizer) -> None:
        features = self.features()
        opt.backward(self.losses(features), features=features)


def parameters_of(opt: cs.MultiTaskOptimizer) -> list[nn.Parameter]:
    return opt.optimizer.param_groups[0]["params"]


def gradients_of(opt: cs.MultiTaskOptimizer) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in parameters_of(opt)]


def row_of(loss: Tensor, features: Sequence[Tensor]) -> Tensor:
    """A loss's gradients, in the order of the features' memory."""
    grads = torch.autograd.grad(loss, features, retain_graph=True, materialize_grads=True)
    rows = [torch.empty_like(z).copy_(grad) for z, grad in zip(features, grads, strict=True)]
    return torch.cat([row.as_strided((row.numel(),), (1,)).double() for row in rows])


def combination(opt: cs.MultiTaskOptimizer, losses: Losses, rows: Tensor) -> Tensor:
    method, number = opt.method, opt.state_dict()["steps"]
    if isinstance(method, cs.GradDrop):
        update, leaks = torch.empty_like(rows[0]), [float(method.leak)] * len(rows)
        options = leaks, method.seed, number, len(rows)
        with cs.use_backend("reference"):
            torch.ops.cs_kernels.drop_signs_([update], [*rows], *options)
        return update
    if isinstance(method, cs.Sum):
        return rows.sum(0)
    seen = {task: loss.detach() for task, loss in losses.items()}
    return method.weights(rows @ rows.T, cs.Step(number, tuple(losses), seen, seen)) @ rows


def definition(
    opt: cs.MultiTaskOptimizer, losses: Losses, features: Sequence[Tensor]
) -> tuple[list[Tensor | None], Tensor]:
    """The gradients of the optimizer's parameters from plain autograd, and the Gramian."""
    by_layer = getattr(opt.method, "groups", "all") == "layer"
    groups = [[z] for z in features] if by_layer else [features]
    rows = [torch.stack([row_of(x, group) for x in losses.values()]) for group in groups]
    update = torch.cat([combination(opt, losses, of_group) for of_group in rows])
    updates = [
        part.as_strided(z.shape, torch.empty_like(z).stride()).to(z.dtype)
        for z, part in zip(features, update.split([z.numel() for z in features]), strict=True)
    ]
    options = {"retain_graph": True, "allow_unused": True}
    through = torch.autograd.grad(features, parameters_of(opt), updates, **options)
    plain = torch.autograd.grad(sum(losses.values()), parameters_of(opt), **options)
    gramians = [of_group @ of_group.T for of_group in rows]
    gramian = torch.stack(gramians) if by_layer else gramians[0]
    return [b if a is None else a for a, b in zip(through, plain, strict=True)], gramian


def assert_definition(
    opt: cs.MultiTaskOptimizer,
    losses: Losses,
    features: Any,
    *,
    unweighted: Losses | None = None,
    factor: float = 1.0,
    rtol: float = 1e-10,
) -> None:
    """Asserts that gradients equal the definition times a factor, and share no memory."""
    many = [features] if isinstance(features, Tensor) else features
    expected, gramian = definition(opt, losses, many)
    opt.backward(unweighted or losses, features=features)
    expected = [None if g is None else factor * g for g in expected]
    options = {"rtol": rtol, "atol": rtol * factor}
    torch.testing.assert_close(gradients_of(opt), expected, **options)
    if isinstance(opt.method, cs.GramianMethod):
        torch.testing.assert_close(opt.report().gramian, gramian, rtol=rtol, atol=rtol)
    memory = [p.grad.untyped_storage().data_ptr() for p in parameters_of(opt) if p.grad is not None]
    assert len({*memory}) == len(memory)


METHODS: dict[str, Callable[[], cs.Method]] = {
    kind.__name__: kind
    for kind in (cs.PCGrad, cs.MGDA, cs.CAGrad, cs.IMTLG, cs.UPGrad, cs.NashMTL, cs.AlignedMTL)
} | {"GradDrop": cs.GradDrop, "Sum": cs.Sum, "layer": lambda: cs.MGDA(groups="layer")}


@pytest.mark.parametrize(
    ("kind", "tasks", "scale"),
    [
        ("residual", "abc", 1.0),
        ("scales", "abc", 2.0**16),
        ("scales", "ac", 1.0),
        ("residual", "b", 1.0),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_updates_equal_the_definition(method: str, kind: str, tasks: str, scale: float) -> None:
    """Steps may have a subset of the tasks, and a scaler."""
    network = Network(kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
    opt = network.start(METHODS[method](), scaler=scaler)
    first = parameters_of(opt)[0]
    for number in range(2):
        z = network.features()
        losses = network.losses(z, [*tasks])
        (plain,) = torch.autograd.grad(sum(losses.values()), first, retain_graph=True)
        assert_definition(opt, losses, z, factor=scale)
        if number == 0 and len(tasks) > 1:  # Surgery changes every update but Sum's.
            assert torch.allclose(first.grad, scale * plain) == (method == "Sum")
        assert opt.report().step == number
        assert opt.report().scalars()["surgery_ms"] > 0
        scaler.step(opt.optimizer)
        scaler.update()


def test_weightings() -> None:
    """The weighting has factors, and regularizers with trainable parameters."""
    network, weighting = Network(), cs.UncertaintyWeights(dict.fromkeys(ABC, "classification"))
    for n, sigma in enumerate(weighting.parameters()):
        sigma.data.fill_(0.3 * n)
    learned = nn.ParameterList(weighting.parameters())
    opt = network.start(cs.CAGrad(), learned, weighting=weighting)
    z = network.features()
    losses = network.losses(z)
    weighted = {t: (-2 * s).exp() * losses[t] + s for t, s in weighting.log_sigma.items()}
    assert_definition(opt, weighted, z, unweighted=losses, rtol=1e-5)


def test_both_ways_in_turn() -> None:
    """Calls with and without features alternate, and neither affects the other."""
    network = Network()
    opt = network.start(cs.MGDA())
    for _ in range(2):
        z = network.features()
        assert_definition(opt, network.losses(z), z)
        opt.optimizer.zero_grad()
        fresh = copy.deepcopy(network)
        plain = fresh.start(cs.MGDA())
        for one, its in ((opt, network), (plain, fresh)):
            one.backward(its.losses(its.features()))
        assert_equal(gradients_of(opt), gradients_of(plain))
        opt.optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    """The features have the dtype of autocast."""
    network = Network().float()
    network.x = network.x.float()
    network.targets = {task: y.float() for task, y in network.targets.items()}
    with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
        z = network.features()
        losses = network.losses(z)
    assert {x.dtype for x in z} == {dtype}
    assert_definition(network.start(cs.MGDA()), losses, z, rtol=1e-5)


def _two_dtypes() -> Call:
    network = Network()
    first, second = network.features()
    narrow = first.float()
    losses = network.losses((narrow.double(), second))
    return network.start(cs.MGDA()), losses, [narrow, second]


def _parts_of_one_output() -> Call:
    """Features are strided views, the losses use no other columns, and gradients are expanded."""
    trunk = nn.Linear(3, 8).double()
    first, second = trunk(torch.randn(5, 3).double())[:, 1:7].chunk(2, dim=1)
    losses = {"a": first.mean(), "b": (second * torch.arange(3.0)).sum() - first.square().mean()}
    return optimizer_of(trunk, cs.IMTLG()), losses, [first, second]


def _heads_inside_the_trunk() -> Call:
    """Each head belongs to one task, and gets the gradient of that task's loss."""
    model, _, x, targets = problem()
    z = model.trunk(x)
    losses = {t: (model.heads[t](z) - targets[t]).square().mean() for t in AB}
    return optimizer_of(model, cs.MGDA()), losses, z


def _neck_behind_features() -> Call:
    """The neck is outside the trunk, so its gradients add up; its graph serves both losses."""
    network, neck = Network("residual", AB), nn.Conv2d(6, 6, 1).double()
    (z,) = network.features()
    return network.start(cs.PCGrad(), neck), network.losses([torch.sigmoid(neck(z))]), z


def _gradients_with_one_memory() -> Call:
    """Autograd gives both parameters the same gradient tensor."""
    trunk = nn.Linear(3, 4).double()
    head = nn.ParameterList(nn.Parameter(torch.zeros(5, 4).double()) for _ in range(2))
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk, head), ["a"], cs.MGDA())
    z = trunk(torch.randn(5, 3).double())
    return opt, {"a": (z + head[0] + head[1]).square().sum()}, z


def _gradients_that_the_next_pass_overwrites() -> Call:
    """As in a CUDA graph, all passes write to one allocation."""
    memory = torch.empty(2, 20).double()
    reused = with_gradient(Tensor.clone, lambda grad: memory[1].view(5, 4).copy_(grad).detach())
    trunk = nn.Linear(3, 4).double()
    z = trunk(torch.randn(5, 3).double())
    losses = {"a": reused(z).square().mean(), "b": (reused(z).cumsum(0) - 1).square().mean()}
    return optimizer_of(trunk, cs.MGDA()), losses, z


@pytest.mark.parametrize(
    "make",
    [
        _two_dtypes,
        _parts_of_one_output,
        _heads_inside_the_trunk,
        _neck_behind_features,
        _gradients_with_one_memory,
        _gradients_that_the_next_pass_overwrites,
    ],
)
def test_graphs(make: Callable[[], Call]) -> None:
    assert_definition(*make(), rtol=1e-5 if make is _two_dtypes else 1e-10)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_trunk(reentrant: bool) -> None:
    network = Network("residual")
    network.trunk.eval()  # The forward pass runs twice.
    opt, z = network.start(cs.MGDA()), network.features()
    expected, _ = definition(opt, network.losses(z), z)
    z = checkpoint(network.trunk, network.x.requires_grad_(), use_reentrant=reentrant)
    opt.backward(network.losses([z]), features=z)
    torch.testing.assert_close(gradients_of(opt), expected)


@pytest.mark.compile
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # Dynamo causes this warning.
def test_compiled_trunk_and_heads() -> None:
    network = Network()
    opt, z = network.start(cs.CAGrad()), network.features()
    expected, _ = definition(opt, network.losses(z), z)
    trunk = torch.compile(network.trunk, backend="aot_eager")
    loss = torch.compile(network.loss, backend="aot_eager")
    for _ in range(2):
        z = trunk(network.x)
        opt.backward({task: loss(task, z) for task in ABC}, features=z)
        torch.testing.assert_close(gradients_of(opt), expected)
        opt.optimizer.zero_grad()


@pytest.mark.parametrize("method", [cs.Sum(), cs.PCGrad(), cs.GradDrop()], ids=repr)
def test_every_hook_runs_once(method: cs.Method) -> None:
    """A feature's hook gets the combined gradient, and the feature's node runs once."""
    network, twin, calls = Network("residual"), Network("residual"), Counter[str]()

    def note(name: str) -> Callable[..., None]:
        return lambda *_: calls.update([name])

    def double(name: str) -> Callable[[Tensor], Tensor]:
        return lambda grad: (calls.update([name]), 2 * grad)[1]

    opt, other = network.start(method), twin.start(method)
    for name, p in network.named_parameters():
        p.register_hook(double(name))
        p.register_post_accumulate_grad_hook(note(f"{name} after"))
    modules = ["trunk.bare", "trunk.up", *(f"heads.{task}.0" for task in ABC)]
    for name in modules:
        network.get_submodule(name).register_full_backward_hook(note(name))
    (z,) = network.features()
    z.register_hook(double("z"))
    z.grad_fn.register_hook(note("node"))
    opt.backward(network.losses([z]), features=z)
    twin.backward(other)
    names = [name for name, _ in network.named_parameters()]
    assert calls == Counter([*names, *(f"{name} after" for name in names), *modules, "z", "node"])
    expected = [
        (4 if name.startswith("trunk.") else 2) * p.grad for name, p in twin.named_parameters()
    ]
    torch.testing.assert_close(gradients_of(opt), expected)
    assert len(z._backward_hooks) == 1


def test_memory_holds_gradients_of_features_alone() -> None:
    """No shared parameter has a gradient before the update; afterwards, no row remains."""
    network, kept = Network("residual"), list[weakref.ref[Tensor]]()
    opt = network.start(cs.MGDA())
    combine = opt.method.combine

    def look(gradients: cs.TaskGradients, layout: cs.Layout, step: cs.Step) -> None:
        rows = [g for row in gradients.rows for g in row if g is not None]
        assert [g.shape for g in rows] == 3 * [torch.Size((4, 6, 12, 12))]
        assert all(p.grad is None for p in network.trunk.parameters())
        kept.extend(map(weakref.ref, rows))
        combine(gradients, layout, step)

    opt.method.combine = look
    network.backward(opt)
    gc.collect()
    assert kept
    assert all(g() is None for g in kept)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("retains", [True, False])
def test_graphs_are_freed_and_features_keep_no_gradient(retains: bool) -> None:
    network = Network("residual")
    (z,) = network.features()
    losses = network.losses([z])
    if retains:
        z.retain_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network.start(cs.MGDA()).backward(losses, features=z)
    assert z.grad is None
    leaves = {t: network.heads[t][0].weight for t in ABC}
    for loss, leaf in (
        *((losses[t], leaves[t]) for t in ABC),
        (z.sum(), network.trunk.stem.weight),
    ):
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, leaf)


def _tokens(change: Callable[[Tensor], object]) -> Callable[[Network], Any]:
    """The loss of c depends on a feature z; the call passes `change(z)` as features."""

    def call(network: Network) -> tuple[Losses, object]:
        _, z = network.features()
        return {"c": network.loss("c", (z, z))}, change(z)

    return call


def _past(part: Callable[[Network], Tensor]) -> Callable[[Network], Any]:
    """Part of b's loss bypasses the features."""

    def call(network: Network) -> tuple[Losses, Any]:
        z = network.features()
        return network.losses(z) | {"b": network.loss("b", z) + part(network)}, z

    return call


def _hidden(network: Network) -> tuple[Losses, Tensor]:
    """Reentrant checkpointing hides the parameters."""
    y = checkpoint(network.trunk.embed, network.x, use_reentrant=True)
    z = network.trunk.tokens(y)
    return {"a": z.square().mean(), "b": z.mean() + y.mean()}, z


def _behind(network: Network) -> tuple[Losses, Tensor]:
    """The gradients of a trunk layer after the features would only be summed."""
    y = network.trunk.embed(network.x)
    z = network.trunk.tokens(y)
    return {"a": z.square().mean(), "b": z.mean()}, y


def _another(number: int) -> Callable[[Network], Any]:
    """Features of another network, alone or with this network's."""

    def call(network: Network) -> tuple[Losses, Any]:
        other = Network().requires_grad_(False)
        other.x.requires_grad_()
        features = [network.features()[1], other.features()[1]][1 - number :]
        return {"c": network.loss("c", [sum(features)] * 2)}, features

    return call


ALONE = "through features alone.*"
CALLS: dict[str, Callable[[Network], Any]] = {
    "sequence of them, got none": _tokens(lambda z: []),
    r"features must be a tensor.*got str 'z' as features\[0\]": _tokens(lambda z: "z"),
    r"features must be a tensor.*got dict as features\[0\]": _tokens(lambda z: {"z": z}),
    r"features must be a tensor.*got NoneType as features\[1\]": _tokens(lambda z: [z, None]),
    r"part of a graph, but features\[0\], of shape \(4,.*has no": _tokens(lambda z: z.detach()),
    r"\[0\], of shape .*, is a leaf": _tokens(lambda z: z.detach().requires_grad_()),
    r"floating-point .*complex128": _tokens(lambda z: z.to(torch.complex128)),
    r"different tensors, but features\[0\].*features\[1\]": _tokens(lambda z: [z, z]),
    r"features\[1\] depends on features\[0\]": _tokens(lambda z: [z, z.relu()]),
    r"features\[0\] depends on features\[1\]": _tokens(lambda z: [z.tanh().exp(), z]),
    r"features\[0\] depends on features\[1\](?#a view)": _tokens(lambda z: [z.mT, z]),
    "a loss must depend on features, but the loss of 'c'": _tokens(lambda z: z.tanh()),
    # A skip connection, a tied weight, a layer's second use, the trunk's input.
    ALONE + "'b' also depends on trunk.embed.(weight|bias)": _past(
        lambda n: n.trunk.embed(n.x).mean()
    ),
    ALONE + "'b' also depends on trunk.embed.weight": _past(
        lambda n: n.trunk.embed.weight.square().sum()
    ),
    ALONE + "'b' also depends on .*norm": _past(
        lambda n: n.trunk.norm(torch.arange(8).double()).std()
    ),
    ALONE + r"'b' also depends on a leaf of shape \(4, 3, 5\) by a": _past(lambda n: n.x.sum()),
    ALONE + "'b' also depends on a leaf of shape": _hidden,
    ALONE + r"'a' also depends on trunk\.\w+": lambda n: (n.losses(z := n.features()), z[1]),
    ALONE + r"'a' also depends on trunk\.(?#first)": lambda n: (
        {"a": (z := n.features())[1].mean() + z[0].mean()},
        z[1:],
    ),
    "the loss of 'c' depends on none": lambda n: (
        {"c": n.loss("c", n.features())},
        n.features(),
    ),
    r"shared parameter of trunk, got features\[0\] of shape \(4, 6, 3\) that": _another(0),
    r"shared parameter of trunk, got features\[1\] of shape \(4, 6, 3\) that": _another(1),
    r"several losses reach.*'a' and 'b' depend on trunk\.tokens\.(weight|bias)": _behind,
}


def assert_refused(
    opt: cs.MultiTaskOptimizer, call: Any, match: str, error: Any = ValueError, **options: Any
) -> None:
    """Asserts that the call raises, and changes neither parameters nor gradients."""
    for p in parameters_of(opt):
        p.grad = torch.zeros_like(p)
    losses, features = call

    def state() -> list[Any]:
        return [parameters_of(opt), gradients_of(opt), opt.state_dict()["steps"]]

    with refused(state, error, match):
        opt.backward(losses, features=features, **options)


@pytest.mark.parametrize(("method", "steps"), [(cs.MGDA(), 0), (cs.MGDA(), 3), (cs.Sum(), 0)])
@pytest.mark.parametrize("match", CALLS)
def test_refused_calls(match: str, method: cs.Method, steps: int) -> None:
    """Such calls are refused in the first step and in later ones."""
    network = Network()
    network.x.requires_grad_()
    opt = network.start(method)
    for _ in range(steps):
        network.backward(opt)
        opt.optimizer.step()
    error = TypeError if "must be a tensor" in match else ValueError
    assert_refused(opt, CALLS[match](network), match, error)


def _counting(network: Network) -> cs.MultiTaskOptimizer:
    opt = network.start(cs.MGDA())
    opt.count_conflicts()
    return opt


def _converted(network: Network, method: cs.Method) -> cs.MultiTaskOptimizer:
    network.trunk = cs.nn.convert_task_batchnorm(Trunk().double(), ABC)
    return network.start(method)


@pytest.mark.parametrize(
    ("start", "match"),
    [
        *(
            (partial(_converted, method=method), "trunk must have no task-specific normalization")
            for method in (cs.ConnectionStrength(), cs.PCGrad())
        ),
        (_counting, "count_conflicts needs gradients of all shared"),
        (lambda n: n.start(cs.MGDA(), backward=Tensor.backward), "backward must be None.*got <"),
        (lambda n: n.start(cs.MGDA(), schedule=cs.Sequential()), "is in Phase 1: use step"),
    ],
)
def test_unsupported_with_features(start: Callable[..., Any], match: str) -> None:
    network = Network()
    call = {"a": network.heads["a"][0].weight.sum()}, torch.ones(1)
    assert_refused(start(network), call, match, (ValueError, RuntimeError))


def test_micro_batches() -> None:
    network = Network()
    opt, z = network.start(cs.MGDA()), network.features()
    match = "update must be True.*got False"
    assert_refused(opt, (network.losses(z), z), match, update=False)
    opt.backward(network.losses(z), update=False)
    with pytest.raises(RuntimeError, match="features must be None in a call that ends micro-batch"):
        network.backward(opt)
    with pytest.warns(UserWarning, match="RuntimeError in backward has dropped the gradients"):
        network.backward(opt)
    with pytest.raises(RuntimeError, match=r"update of the last backward\(\.\.\.\) is still"):
        network.backward(opt)


@pytest.mark.compile
def test_losses_and_features_of_one_compiled_function_are_refused() -> None:
    network = Network()

    @torch.compile(backend="aot_eager")
    def run() -> tuple[Losses, Sequence[Tensor]]:
        z = network.features()
        return network.losses(z), z

    match = "a loss must depend on features, but the loss of 'a'"
    assert_refused(network.start(cs.CAGrad()), run(), match)


class Nothing(cs.Method):
    def combine(self, gradients: cs.TaskGradients, layout: cs.Layout, step: cs.Step) -> None:
        del gradients, layout, step


class Decay(cs.EqualWeights):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def regularizer(self, task: str) -> Tensor | None:
        return self.weight.square().sum()


def _reentrant_heads(network: Network) -> Call:
    z = network.features()
    heads = {t: lambda *z, t=t: network.loss(t, z) for t in ABC}
    losses = {t: checkpoint(head, *z, use_reentrant=True) for t, head in heads.items()}
    return network.start(cs.MGDA()), losses, z


def _another_network_that_is_hidden(network: Network) -> Call:
    other = Network()
    z = checkpoint(other.trunk, other.x.requires_grad_(), use_reentrant=True)
    return network.start(cs.MGDA(), other), network.losses(z), z


def _no_gradient_on_the_way(network: Network) -> Call:
    z = network.features()
    cut = with_gradient(Tensor.clone, lambda grad: None)
    losses = network.losses(z) | {"b": network.loss("b", [*map(cut, z)])}
    return network.start(cs.MGDA()), losses, z


def _passing(network: Network, opt: cs.MultiTaskOptimizer) -> Call:
    z = network.features()
    return opt, network.losses(z), z


def _decay(network: Network) -> Call:
    weighting = Decay(network.trunk.embed.weight)
    return _passing(network, network.start(cs.MGDA(), weighting=weighting))


def _head_that_is_not_held(network: Network) -> Call:
    sgd = sgd_of(network.trunk)
    return _passing(network, cs.MultiTaskOptimizer(network.trunk, sgd, ABC, cs.MGDA()))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (_reentrant_heads, RuntimeError, "use_reentrant=True"),
        (_decay, ValueError, r"through features alone.*trunk\.embed\.weight"),
        (_another_network_that_is_hidden, ValueError, r"parameter of trunk, got features\[0\]"),
        (_head_that_is_not_held, ValueError, "optimizer must hold every parameter"),
        (
            lambda n: _passing(n, n.start(Nothing())),
            RuntimeError,
            "but Nothing",
        ),
        (_no_gradient_on_the_way, ValueError, "with respect to features, but the loss of 'b' has"),
    ],
)
def test_failing_passes(make: Callable[..., Call], error: type[Exception], match: str) -> None:
    opt, losses, features = make(Network())
    with pytest.raises(error, match=match):
        opt.backward(losses, features=features)
    assert all(p.grad is None for p in parameters_of(opt))


def test_a_call_after_a_failing_pass() -> None:
    network = Network()
    opt = network.start(cs.MGDA())
    for at in ("heads.b.0.weight", "trunk.embed.weight"):
        hook = network.get_parameter(at).register_hook(lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            network.backward(opt)
        assert all(p.grad is None for p in network.parameters())
        hook.remove()
        z = network.features()
        assert_definition(opt, network.losses(z), z)
        opt.optimizer.step()
