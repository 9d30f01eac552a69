"""`backward(losses, features=z)`: gradients are combined at a shared representation."""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from networks import AB, assert_equal, problem, refused, sgd_of
from ranks import Ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cs_kernels as cs

pytestmark = pytest.mark.loop

ABC = ["a", "b", "c"]


class Residual(nn.Module):
    """A convolutional trunk with a skip connection inside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.first = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.second = nn.Conv2d(6, 6, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = torch.relu(self.norm(self.stem(x)))
        return (torch.tanh(x + self.second(torch.relu(self.first(x)))),)


class Scales(nn.Module):
    """Attention, then two features: one a token, one a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.token = nn.Linear(8, 4)
        self.tokens = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.embed(x)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.token(x[:, 0]), self.tokens(x).transpose(1, 2)


class Network(nn.Module):
    """A trunk, and a head a task on every feature; the last task has only the last feature."""

    def __init__(self, kind: str, tasks: Sequence[str] = ABC, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.kind, self.tasks = kind, list(tasks)
        self.trunk = Residual() if kind == "residual" else Scales()
        sizes = {"residual": [216], "scales": [4, 18]}[kind]
        self.heads = nn.ModuleDict(
            {task: nn.ModuleList(nn.Linear(size, 2) for size in sizes) for task in tasks}
        )
        self.double()
        self.x = torch.randn(*{"residual": (4, 3, 6, 6), "scales": (4, 3, 5)}[kind]).double()
        self.targets = {t: (1 + n) * torch.randn(4, 2).double() for n, t in enumerate(tasks)}

    def features(self) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self.trunk(self.x)
        return found

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
    grads = (
        torch.autograd.grad(loss, features, retain_graph=True, allow_unused=True)
        for loss in losses.values()
    )
    return torch.stack([row_of(of_task, features) for of_task in grads])


def _dropped(method: cs.GradDrop, rows: Tensor, number: int) -> Tensor:
    update = torch.empty_like(rows[0])
    tasks = len(rows)
    leaks = [float(method.leak)] * tasks
    with cs.use_backend("reference"):
        torch.ops.cs_kernels.drop_signs_([update], [*rows], leaks, method.seed, number, tasks)
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
    named = dict(network.named_parameters())
    heads = {n: p for n, p in named.items() if n.startswith("heads.")}
    rows, found = [], dict[str, Tensor]()
    for loss in losses.values():
        inputs = [*features, *heads.values()]
        grads = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
        rows.append(row_of(grads[: len(features)], features))
        for name, grad in zip(heads, grads[len(features) :], strict=True):
            if grad is not None:
                found[name] = found[name] + grad if name in found else grad
    matrix = torch.stack(rows)
    if isinstance(method, cs.GradDrop):
        update = _dropped(method, matrix, number)
    else:
        assert isinstance(method, cs.GramianMethod)
        seen = {task: loss.detach() for task, loss in losses.items()}
        step = cs.Step(number, tuple(losses), seen, seen)
        update = method.weights(matrix @ matrix.T, step) @ matrix
    pairs = zip(update.split([z.numel() for z in features]), features, strict=True)
    parts = [u.as_strided(z.shape, z.stride()) for u, z in pairs]
    trunk = {n: p for n, p in named.items() if n.startswith("trunk.")}
    of_trunk = torch.autograd.grad(features, [*trunk.values()], parts)
    return found | dict(zip(trunk, of_trunk, strict=True))


def assert_gradients(network: Network, expected: dict[str, Tensor]) -> None:
    found = {name: grad for name, grad in network.gradients().items() if grad is not None}
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


METHODS: list[Callable[[], cs.Method]] = [
    cs.PCGrad,
    cs.MGDA,
    cs.CAGrad,
    cs.IMTLG,
    cs.UPGrad,
    cs.NashMTL,
    cs.AlignedMTL,
    cs.GradDrop,
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


def test_one_linear_layer_and_one_sample() -> None:
    """dW_i = dz_i x^T, so <dW_i, dW_j> = <dz_i, dz_j> |x|^2, and MGDA has the same weights."""
    trunk = nn.Linear(2, 2, bias=False).double()
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    rows = torch.tensor([[1.0, 0.0], [-1.0, 2.0]], dtype=torch.float64)
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, cs.MGDA(), scaler=None)

    def losses(z: Tensor) -> dict[str, Tensor]:
        return {task: (z * row).sum() for task, row in zip(AB, rows, strict=True)}

    z = trunk(x)
    opt.backward(losses(z), features=z)
    # The min-norm point of (1, 0) and (-1, 2): weights 3/4 and 1/4, (1/2, 1/2).
    assert opt.report().task_weights.tolist() == pytest.approx([0.75, 0.25], abs=1e-12)
    torch.testing.assert_close(opt.report().gramian, rows @ rows.T)
    torch.testing.assert_close(trunk.weight.grad, torch.tensor([[0.5], [0.5]]).double() @ x)
    opt.optimizer.zero_grad()
    of_features = opt.report().gramian
    opt.backward(losses(trunk(x)))
    torch.testing.assert_close(opt.report().gramian, 25 * of_features)
    torch.testing.assert_close(trunk.weight.grad, torch.tensor([[0.5], [0.5]]).double() @ x)


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
    expected = {}
    for i in range(2):  # Two networks of one feature each, as far as the weights go.
        one = copy.deepcopy(network)
        z = one.features()
        losses = one.losses(z)
        rows = rows_of(losses, z[i : i + 1])
        gramian = rows @ rows.T
        expected[i] = gramian, cs.MGDA().weights(gramian) @ rows
    opt = network.start(cs.MGDA(groups="layer"))
    network.backward(opt)
    report = opt.report()
    assert report.layers == ("0", "1")
    torch.testing.assert_close(report.gramian, torch.stack([expected[i][0] for i in range(2)]))
    z = (other := copy.deepcopy(network)).features()
    parts = [expected[i][1].as_strided(z[i].shape, z[i].stride()) for i in range(2)]
    of_trunk = torch.autograd.grad(z, [*other.trunk.parameters()], parts)
    torch.testing.assert_close([p.grad for p in network.trunk.parameters()], [*of_trunk])


@EVERY
def test_a_scaler_changes_nothing(make: Callable[[], cs.Method]) -> None:
    plain, scaled = Network("residual"), Network("residual")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    opt = scaled.start(make(), scaler=scaler)
    for _ in range(3):
        plain.backward(one := plain.start(make()))
        scaled.backward(opt)
        found = {n: None if g is None else g / 2**16 for n, g in scaled.gradients().items()}
        torch.testing.assert_close(found, plain.gradients(), rtol=1e-12, atol=1e-14)
        if isinstance(make(), cs.GramianMethod):
            torch.testing.assert_close(one.report().gramian, opt.report().gramian)
        break
    scaler.unscale_(opt.optimizer)
    torch.testing.assert_close(scaled.gradients(), plain.gradients(), rtol=1e-12, atol=1e-14)


def test_weightings() -> None:
    """A factor and a regularizer whose own parameter learns."""
    network = Network("scales")
    twin = copy.deepcopy(network)
    kinds = dict.fromkeys(ABC, "classification")
    weighting = cs.UncertaintyWeights(kinds)
    with torch.no_grad():
        for n, sigma in enumerate(weighting.parameters()):
            sigma.fill_(0.3 * n)
    factors = {task: torch.exp(-2 * s.detach()) for task, s in weighting.log_sigma.items()}
    expected = by_hand(twin, cs.CAGrad(), lambda task, loss: factors[task] * loss)
    losses = {task: loss.detach() for task, loss in twin.losses(twin.features()).items()}
    opt = network.start(cs.CAGrad(), weighting)
    network.backward(opt)
    assert_gradients(network, expected)
    for task, sigma in weighting.log_sigma.items():
        torch.testing.assert_close(
            sigma.grad, (1 - 2 * factors[task] * losses[task]).float(), rtol=1e-5, atol=1e-6
        )


def test_a_report() -> None:
    network = Network("residual")
    opt = network.start(cs.PCGrad())
    network.backward(opt)
    scalars = opt.report().scalars()
    z = network.features()
    rows = rows_of(network.losses(z), z)
    for task, row in zip(ABC, rows, strict=True):
        assert scalars[f"gradient_norm/{task}"] == pytest.approx(float(row.norm()), rel=1e-9)
    cosine = torch.cosine_similarity(rows[0], rows[1], dim=0)
    assert scalars["cosine/a,b"] == pytest.approx(float(cosine), rel=1e-9)
    assert scalars["surgery_ms"] > 0
    assert opt.report().step == 0
    opt.optimizer.step()
    network.backward(opt)
    assert opt.report().step == 1


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
    losses = network.losses((narrow.double(), second))
    opt.backward(losses, features=[narrow, second])
    expected = by_hand(copy.deepcopy(network), cs.MGDA())
    found = {name: grad for name, grad in network.gradients().items() if grad is not None}
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_features_that_are_not_dense() -> None:
    """A part of an output, whose rest no loss needs, and expanded gradients."""
    trunk = nn.Linear(3, 6).double()
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, cs.IMTLG())
    x = torch.randn(5, 3).double()

    def losses(z: Tensor) -> dict[str, Tensor]:
        return {"a": z.mean(), "b": (z * torch.arange(4.0)).sum()}

    z = trunk(x)[:, 1:5]
    assert not z.is_contiguous()
    opt.backward(losses(z), features=z)
    found = trunk.weight.grad.clone()
    z = trunk(x)[:, 1:5]
    rows = torch.stack(
        [torch.autograd.grad(v, z, retain_graph=True)[0].flatten() for v in losses(z).values()]
    )
    update = cs.IMTLG().weights(rows @ rows.T) @ rows
    (expected,) = torch.autograd.grad(z, trunk.weight, update.view_as(z))
    torch.testing.assert_close(found, expected)


def test_two_outputs_of_one_operation() -> None:
    trunk = nn.Linear(3, 6).double()
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, cs.MGDA())
    first, second = trunk(torch.randn(5, 3).double()).chunk(2, dim=1)
    opt.backward({"a": first.square().mean(), "b": second.mean()}, features=[first, second])
    # Neither loss depends on the other's half: half a square of norms, by hand.
    gramian = opt.report().gramian
    assert gramian[0, 1] == 0
    (w, _), norms = opt.report().task_weights.tolist(), gramian.diagonal()
    assert w == pytest.approx(float(norms[1] / norms.sum()))
    one, two = trunk.weight.grad.clone().chunk(2)
    opt.optimizer.zero_grad()
    assert one.any()
    assert two.any()


def _whole(z: Callable[[Tensor], Tensor] = lambda z: z) -> tuple[Any, ...]:
    """A network whose heads are in the trunk, its losses and its features."""
    model, _, x, targets = problem()
    opt = cs.MultiTaskOptimizer(model, sgd_of(model), AB, cs.MGDA())
    features = z(model.trunk(x))
    losses = {t: (model.heads[t](features) - targets[t]).square().mean() for t in AB}
    return model, opt, losses, features


def test_heads_inside_the_trunk() -> None:
    """They are the tasks' own: each gets the gradient of its loss."""
    model, opt, losses, z = _whole()
    own = {t: torch.autograd.grad(losses[t], model.heads[t].weight, retain_graph=True) for t in AB}
    opt.backward(losses, features=z)
    for task in AB:
        torch.testing.assert_close(model.heads[task].weight.grad, own[task][0])
    assert model.unused.weight.grad is None


def test_a_part_behind_the_features_that_heads_share() -> None:
    """Outside the trunk, gradients add up; their common graph is there for both."""
    network = Network("residual", AB)
    neck = nn.Conv2d(6, 6, 1).double()
    sgd = sgd_of(network, neck)
    opt = cs.MultiTaskOptimizer(network.trunk, sgd, AB, cs.PCGrad())
    (z,) = network.features()
    mixed = torch.sigmoid(neck(z))
    losses = network.losses([mixed])
    expected = torch.autograd.grad(sum(losses.values()), [*neck.parameters()], retain_graph=True)
    opt.backward(losses, features=z)
    torch.testing.assert_close([p.grad for p in neck.parameters()], [*expected])


def test_gradients_with_one_memory() -> None:
    """Autograd gives both parameters the same tensor; the heads' gradients must not share it."""
    trunk, scale = nn.Linear(3, 4).double(), nn.Parameter(torch.zeros(5, 4).double())
    other = nn.Parameter(torch.zeros(5, 4).double())
    sgd = torch.optim.SGD([*trunk.parameters(), scale, other], lr=0.1)
    opt = cs.MultiTaskOptimizer(trunk, sgd, ["a"], cs.MGDA())
    z = trunk(torch.randn(5, 3).double())
    opt.backward({"a": (z + scale + other).square().sum()}, features=z)
    assert_equal(scale.grad, other.grad)
    scale.grad.mul_(2)
    torch.testing.assert_close(scale.grad, 2 * other.grad)


def test_gradients_that_the_next_pass_overwrites() -> None:
    """As those in the memory of a CUDA graph, parts of one allocation."""
    memory = torch.empty(2, 20).double()

    class Reused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            return z.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return memory[1].view(5, 4).copy_(grad).detach()

    trunk = nn.Linear(3, 4).double()
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, cs.MGDA())
    x = torch.randn(5, 3).double()

    def losses(z: Tensor) -> dict[str, Tensor]:
        return {"a": z.square().mean(), "b": (z.cumsum(0) - 1).square().mean()}

    z = trunk(x)
    opt.backward({t: losses(Reused.apply(z))[t] for t in AB}, features=z)
    found, gramian = trunk.weight.grad.clone(), opt.report().gramian
    opt.optimizer.zero_grad()
    opt.backward(losses(z := trunk(x)), features=z)
    assert_equal(gramian, opt.report().gramian)
    assert_equal(found, trunk.weight.grad)


def test_hooks_of_parameters_run_once() -> None:
    network = Network("residual", AB)
    calls: list[str] = []
    for name, p in network.named_parameters():
        p.register_hook(lambda g, name=name: (calls.append(name), 2 * g)[1])
        p.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(f"{name} after"))
    twin = Network("residual", AB)
    network.backward(network.start(cs.MGDA()))
    twin.backward(twin.start(cs.MGDA()))
    names = [name for name, _ in network.named_parameters()]
    assert sorted(calls) == sorted([*names, *(f"{name} after" for name in names)])
    for name, grad in twin.gradients().items():
        torch.testing.assert_close(network.get_parameter(name).grad, 2 * grad)


@pytest.fixture
def one_of_each() -> tuple[Network, dict[str, int]]:
    """Counts backward passes of two layers of the trunk, and of each head."""
    network, calls = Network("residual"), dict[str, int]()
    for name in ("trunk.first", "trunk.second", *(f"heads.{task}.0" for task in ABC)):
        calls[name] = 0

        def count(*_: object, name: str = name) -> None:
            calls[name] += 1

        network.get_submodule(name).register_full_backward_hook(count)
    return network, calls


@pytest.mark.parametrize("method", [cs.Sum(), cs.PCGrad(), cs.GradDrop()], ids=repr)
def test_the_trunk_has_one_backward_pass(
    one_of_each: tuple[Network, dict[str, int]], method: cs.Method
) -> None:
    network, calls = one_of_each
    network.backward(network.start(method))
    assert set(calls.values()) == {1}


def test_the_node_of_the_feature_runs_once() -> None:
    """Also that of the feature itself, which `backward(inputs=...)` would run for each task."""
    network, calls = Network("residual"), []
    (z,) = network.features()
    z.grad_fn.register_hook(lambda *_: calls.append(1))
    network.start(cs.PCGrad()).backward(network.losses([z]), features=z)
    assert len(calls) == 1


def test_memory_holds_gradients_of_features_alone() -> None:
    """While heads' passes run, no shared parameter has a gradient; afterwards, no row is left."""
    network = Network("residual")
    opt = network.start(cs.MGDA())
    found: list[bool] = []
    combine, kept = opt.method.combine, list[weakref.ref[Tensor]]()

    def look(gradients: cs.TaskGradients, layout: cs.Layout, step: cs.Step) -> None:
        rows = [g for row in gradients.rows for g in row if g is not None]
        assert [g.shape for g in rows] == 3 * [torch.Size((4, 6, 6, 6))]
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
    for task, loss in losses.items():  # The heads' alone.
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, network.heads[task][0].weight)
    with pytest.raises(RuntimeError, match="second time"):
        z.sum().backward()


def test_features_keep_no_gradient() -> None:
    network = Network("residual")
    opt = network.start(cs.MGDA())
    (z,) = network.features()
    z.retain_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.backward(network.losses([z]), features=z)
    assert z.grad is None
    (z,) = network.features()
    opt.optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.backward(network.losses([z]), features=z)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert z.grad is None


def test_a_resumed_run_is_bit_equal() -> None:
    def start() -> tuple[Network, cs.MultiTaskOptimizer]:
        network = Network("scales")
        return network, network.start(cs.NashMTL(update_every=2))

    def train(network: Network, opt: cs.MultiTaskOptimizer, steps: int) -> None:
        for _ in range(steps):
            network.backward(opt)
            opt.optimizer.step()

    (whole, opt), (first, other) = start(), start()
    train(whole, opt, 7)
    train(first, other, 3)
    states = copy.deepcopy([first.state_dict(), other.optimizer.state_dict(), other.state_dict()])
    resumed, again = start()
    for part, state in zip((resumed, again.optimizer, again), states, strict=True):
        part.load_state_dict(state)
    train(resumed, again, 4)
    assert_equal(whole.state_dict(), resumed.state_dict())


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
    expected = by_hand(copy.deepcopy(network), cs.MGDA())
    network.trunk.norm.eval()  # The forward pass runs twice.
    twin = copy.deepcopy(network)
    expected = by_hand(twin, cs.MGDA())
    x = network.x.requires_grad_()
    (z,) = checkpoint(network.trunk, x, use_reentrant=reentrant)
    network.start(cs.MGDA()).backward(network.losses([z]), features=z)
    assert_gradients(network, expected)


def test_a_reentrant_head_is_refused_by_torch() -> None:
    network = Network("residual", AB)
    opt = network.start(cs.MGDA())
    (z,) = network.features()
    losses = {t: checkpoint(lambda z, t=t: network.loss(t, [z]), z, use_reentrant=True) for t in AB}
    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        opt.backward(losses, features=z)
    assert all(p.grad is None for p in network.parameters())


# Errors, before anything is changed


def _refused(
    network: Network, opt: cs.MultiTaskOptimizer, error: type[Exception], match: str
) -> AbstractContextManager[None]:
    """`.grad` too stays as it was."""
    for p in network.parameters():
        p.grad = torch.full_like(p, 0.0)

    def state() -> list[object]:
        return [network.state_dict(), network.gradients(), opt.state_dict()["steps"]]

    return refused(state, error, match)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda z: [], ValueError, "sequence of them, got none"),
        (lambda z: "z", TypeError, r"features must be a tensor.*got str 'z' as features\[0\]"),
        (lambda z: {"z": z}, TypeError, r"features must be a tensor.*got dict as features\[0\]"),
        (lambda z: [z, None], TypeError, r"got NoneType as features\[1\]"),
        (
            lambda z: z.detach(),
            ValueError,
            r"with a graph, got features\[0\] of shape \(4,.*without",
        ),
        (lambda z: z.detach().requires_grad_(), ValueError, r"\[0\] of shape .* that is a leaf"),
        (lambda z: z.to(torch.complex128), ValueError, r"real numbers, got a .*complex128"),
        (
            lambda z: [z, z],
            ValueError,
            r"different tensors, got one as features\[0\].*features\[1\]",
        ),
        (lambda z: [z, z.relu()], ValueError, r"features\[1\] that depends on features\[0\]"),
        (lambda z: [z.tanh().exp(), z], ValueError, r"features\[0\] that depends on features\[1\]"),
        (lambda z: [z.view(-1), z], ValueError, r"features\[0\] that depends on features\[1\]"),
        (lambda z: z.tanh(), ValueError, "a loss must depend on features, got one for 'a'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("method", [cs.MGDA(), cs.Sum()], ids=repr)
def test_features_that_do_not_fit(
    change: Callable[[Tensor], object], error: type[Exception], match: str, method: cs.Method
) -> None:
    network = Network("residual")
    opt = network.start(method)
    (z,) = network.features()
    with _refused(network, opt, error, match):
        opt.backward(network.losses([z]), features=change(z))


def test_features_with_hooks() -> None:
    network = Network("residual")
    opt = network.start(cs.MGDA())
    (z,) = network.features()
    hook = z.register_hook(lambda g: 2 * g)
    losses = network.losses([z])
    with _refused(network, opt, ValueError, r"no hooks.*got 1 on features\[0\]"):
        opt.backward(losses, features=z)
    hook.remove()
    opt.optimizer.zero_grad()
    opt.backward(losses, features=z)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_loss_that_depends_on_no_feature(steps: int) -> None:
    network = Network("residual")
    opt = network.start(cs.MGDA())
    for _ in range(steps):
        network.backward(opt)
        opt.optimizer.step()
    (z,), (other,) = network.features(), network.features()
    losses = network.losses([z]) | {"c": network.loss("c", [other])}
    with _refused(network, opt, ValueError, "depend on features, got one for 'c'"):
        opt.backward(losses, features=z)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("method", [cs.MGDA(), cs.Sum()], ids=repr)
@pytest.mark.parametrize(
    ("past", "name"),
    [
        (lambda network: network.trunk.embed(network.x).mean(), "trunk.embed.(weight|bias)"),
        (lambda network: network.trunk.embed.weight.square().sum(), "trunk.embed.weight"),
        (
            lambda network: network.trunk.norm(torch.arange(8).double()).std(),
            "norm",
        ),
    ],
)
def test_a_trunk_parameter_past_the_features(
    past: Callable[[Network], Tensor], name: str, method: cs.Method, steps: int
) -> None:
    """A skip connection and a tied weight, in the first step or later."""
    network = Network("scales")
    opt = network.start(method)
    for _ in range(steps):
        network.backward(opt)
        opt.optimizer.step()
    z = network.features()
    losses = network.losses(z)
    losses["b"] = losses["b"] + past(network)
    with _refused(network, opt, ValueError, f"through features alone.*'b' depends on.*{name}"):
        opt.backward(losses, features=z)


def test_a_feature_that_is_left_out() -> None:
    network = Network("scales")
    opt = network.start(cs.MGDA())
    z = network.features()
    with _refused(network, opt, ValueError, r"'a' depends on trunk\.\w+"):
        opt.backward(network.losses(z), features=z[1])
    with _refused(network, opt, ValueError, r"'a' depends on trunk\.\w+"):
        opt.backward({"a": z[1].square().mean() + z[0].mean()}, features=z[1:])


def test_a_hidden_part_past_the_features() -> None:
    """Reentrant checkpointing shows no parameter."""
    network = Network("scales")
    opt = network.start(cs.MGDA())
    x = network.x.clone().requires_grad_()
    y = checkpoint(network.trunk.embed, x, use_reentrant=True)
    z = network.trunk.tokens(y)
    losses = {"a": z.square().mean(), "b": z.mean() + y.mean()}
    with _refused(network, opt, ValueError, "'b' depends on a leaf of shape"):
        opt.backward(losses, features=z)


def test_an_input_past_the_features() -> None:
    network = Network("scales")
    opt = network.start(cs.MGDA())
    network.x.requires_grad_()
    z = network.features()
    losses = network.losses(z) | {"a": network.loss("a", z) + network.x.sum()}
    with _refused(network, opt, ValueError, r"'a' depends on a leaf of shape \(4, 3, 5\) past"):
        opt.backward(losses, features=z)


def test_a_shared_parameter_behind_the_features() -> None:
    """The second layer of the trunk, whose gradients would only be added."""
    model, _, x, targets = problem()
    opt = cs.MultiTaskOptimizer(model, sgd_of(model), AB, cs.MGDA())
    z = model.trunk[:2](x)
    y = model.trunk[2](z)
    losses = {t: (model.heads[t](y) - targets[t]).square().mean() for t in AB}
    match = r"several losses reach.*those of 'a' and 'b' depend on trunk\.trunk\.2\.(weight|bias)"
    with refused(lambda: model.state_dict(), ValueError, match):
        opt.backward(losses, features=z)


def test_a_weighting_that_reaches_past_the_features() -> None:
    """It shows in the passes: all gradients are None afterwards."""

    class Decay(cs.EqualWeights):
        def regularizer(self, task: str) -> Tensor | None:
            return network.trunk.stem.weight.square().sum()

    network = Network("residual")
    opt = network.start(cs.MGDA(), Decay())
    with pytest.raises(ValueError, match=r"through features alone.*trunk\.stem\.weight"):
        network.backward(opt)
    assert all(p.grad is None for p in network.parameters())


def test_features_from_elsewhere() -> None:
    network, other = Network("residual"), Network("residual")
    opt = cs.MultiTaskOptimizer(network.trunk, sgd_of(network, other), ABC, cs.MGDA())
    (z,) = other.features()
    match = r"shared parameter of trunk, got features\[0\] of shape \(4, 6, 6, 6\) that"
    with _refused(network, opt, ValueError, match):
        opt.backward(network.losses([z]), features=z)
    (first,) = network.features()
    match = r"shared parameter of trunk, got features\[1\]"
    with _refused(network, opt, ValueError, match):
        opt.backward(network.losses([first + z]), features=[first, z])


def test_features_from_elsewhere_that_hide_it() -> None:
    network, other = Network("residual"), Network("residual")
    opt = cs.MultiTaskOptimizer(network.trunk, sgd_of(network, other), ABC, cs.MGDA())
    (z,) = checkpoint(other.trunk, other.x.requires_grad_(), use_reentrant=True)
    with pytest.raises(ValueError, match=r"a shared parameter of trunk, got features\[0\]"):
        opt.backward(network.losses([z]), features=z)
    assert all(p.grad is None for p in [*network.parameters(), *other.parameters()])


def test_an_unheld_head() -> None:
    network = Network("residual")
    opt = cs.MultiTaskOptimizer(network.trunk, sgd_of(network.trunk), ABC, cs.MGDA())
    with pytest.raises(ValueError, match="optimizer must hold every parameter"):
        network.backward(opt)


def test_connection_strength() -> None:
    network = Network("residual")
    cs.nn.convert_task_batchnorm(network.trunk, ABC)
    opt = network.start(cs.ConnectionStrength())
    with pytest.raises(ValueError, match=r"method must take.*ConnectionStrength\(\)"):
        opt.backward({"a": network.heads["a"][0].weight.sum()}, features=torch.ones(1))
    other = Network("residual")
    cs.nn.convert_task_batchnorm(other.trunk, ABC)
    with pytest.raises(ValueError, match="trunk must have no task-specific normalization"):
        other.start(cs.PCGrad()).backward(
            {"a": other.heads["a"][0].weight.sum()}, features=torch.ones(1)
        )


def test_micro_batches() -> None:
    network = Network("residual")
    opt = network.start(cs.MGDA())
    (z,) = network.features()
    with _refused(network, opt, ValueError, "update must be True.*got False"):
        opt.backward(network.losses([z]), features=z, update=False)
    opt.backward(network.losses([z]), update=False)
    (z,) = network.features()
    with pytest.raises(RuntimeError, match="features must be None in a call that ends those with"):
        opt.backward(network.losses([z]), features=z)
    with pytest.warns(UserWarning, match="RuntimeError in backward has dropped the gradients"):
        opt.backward(network.losses([z]), features=z)


def test_counting_conflicts_needs_all_gradients() -> None:
    network = Network("residual")
    opt = network.start(cs.MGDA())
    opt.count_conflicts()
    (z,) = network.features()
    with _refused(network, opt, ValueError, "count_conflicts needs gradients of all shared"):
        opt.backward(network.losses([z]), features=z)
    opt.count_conflicts(None)
    opt.backward(network.losses([z]), features=z)


def test_a_function_of_a_framework() -> None:
    network = Network("residual")
    opt = network.start(cs.MGDA(), backward=Tensor.backward)
    (z,) = network.features()
    with _refused(network, opt, ValueError, "backward must be None.*got <"):
        opt.backward(network.losses([z]), features=z)


def test_phase_1_and_an_update_that_would_be_lost() -> None:
    network = Network("residual")
    opt = network.start(cs.MGDA(), schedule=cs.Sequential())
    with pytest.raises(RuntimeError, match="is in Phase 1: use step"):
        network.backward(opt)
    opt = network.start(cs.MGDA())
    network.backward(opt)
    with pytest.raises(RuntimeError, match=r"update of the last backward\(\.\.\.\) is still"):
        network.backward(opt)


@pytest.mark.parametrize("at", ["head", "trunk"])
def test_gradients_are_none_after_a_failing_pass(at: str) -> None:
    network = Network("residual")
    opt = network.start(cs.MGDA())
    before = copy.deepcopy(network.state_dict())
    (z,) = network.features()
    losses = network.losses([z])

    def fail(_: Tensor) -> None:
        raise RuntimeError("no")

    at_weight = network.heads["b"][0].weight if at == "head" else network.trunk.stem.weight
    hook = at_weight.register_hook(fail)
    with pytest.raises(RuntimeError, match=r"^no$"):
        opt.backward(losses, features=z)
    assert all(p.grad is None for p in network.parameters())
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
    with pytest.raises(RuntimeError, match="got none of features by Nothing"):
        network.backward(network.start(Nothing()))
    assert all(p.grad is None for p in network.parameters())


def test_a_loss_without_a_gradient_of_the_features() -> None:
    """Its graph leads there; an operation on the way gives no gradient."""

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            return z.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    network = Network("residual")
    opt = network.start(cs.MGDA())
    (z,) = network.features()
    losses = network.losses([z]) | {"b": network.loss("b", [Stop.apply(z)])}
    with pytest.raises(ValueError, match="gradient with respect to features, got none for 'b'"):
        opt.backward(losses, features=z)
    assert all(p.grad is None for p in network.parameters())


def _refused_on_a_rank(rank: int) -> list[str]:
    """Replicated, then with heads after `fully_shard` behind a trunk that is not."""
    from torch.distributed.fsdp import fully_shard

    found = []
    for sharded in (False, True):
        network = Network("residual")
        if sharded:
            for head in network.heads.values():
                fully_shard(head[0], mesh=dist.init_device_mesh("cpu", (2,)))
        group = None if sharded else dist.group.WORLD
        opt = network.start(cs.MGDA(), process_group=group)
        (z,) = network.features()
        losses = {"a": z.square().mean()}
        with pytest.raises(ValueError, match="backward with features") as raised:
            opt.backward(losses, features=z)
        found.append(str(raised.value))
    return found


@pytest.mark.ranks
def test_many_ranks(pools: Callable[[int], Ranks]) -> None:
    for replicated, sharded in pools(2).run(_refused_on_a_rank):
        assert replicated.startswith("process_group must be None")
        assert "got 2 ranks" in replicated
        assert sharded.startswith("optimizer must hold whole parameters")
        assert "got 6 after fully_shard" in sharded
