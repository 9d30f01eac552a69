"""`step_together` with Gramian methods by layer, and the memory of the gradients that wait."""

import copy
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from networks import AB, assert_equal, sgd_of
from stacking import (
    CLOSE,
    Branches,
    Checkpointed,
    Head,
    assert_alike,
    assert_trains_alike,
    converted,
    pictures,
    setup_of_sgd,
    small,
    together,
    trained,
)
from torch import Tensor, nn
from trunks import CASES
from trunks import Setup as TrunkSetup

import cs_kernels as cs
from cs_kernels.engine.stacked.layer_updates import LayerUpdates
from cs_kernels.ops import backends

pytestmark = pytest.mark.loop

METHODS = [
    cs.PCGrad(seed=3, groups="layer"),
    cs.PCGrad("mean", groups="layer"),
    cs.CAGrad(groups="layer"),
    cs.MGDA(groups="layer"),
    cs.AlignedMTL(groups="layer"),
    cs.NashMTL(groups="layer"),
    cs.IMTLG(groups="layer"),
    cs.UPGrad(groups="layer"),
    cs.FairGrad(groups="layer"),
    cs.ConFIG(groups="layer"),
    cs.GradVac(beta=0.3, groups="layer"),
    cs.GradVac(target=0.2, groups="layer"),
    cs.NTKMTL(groups="layer"),
    cs.DBMTL(groups="layer"),
]


def assert_same_gramians(one: cs.MultiTaskOptimizer, other: cs.MultiTaskOptimizer) -> None:
    first, second = one.report(), other.report()
    assert first.layers == second.layers
    assert len(first.layers) > 1
    scale = first.gramian.abs().max().item()
    torch.testing.assert_close(second.gramian, first.gramian, rtol=1e-9, atol=1e-12 * scale)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_trains_as_step(method: cs.GramianMethod) -> None:
    """Biases too, and draws by the number of the layer."""
    opt = assert_trains_alike(method)
    assert opt.report().conflicts.any()


def test_partial_labels() -> None:
    """The state of a method too."""
    chosen = [("edges",), ("normals", "depth"), None, ("depth", "edges"), ("normals",)]
    method = cs.GradVac(beta=0.5, groups="layer")
    first, second = setup_of_sgd(), setup_of_sgd()
    one, other = (setup.start(copy.deepcopy(method)) for setup in (first, second))
    for n in range(10):
        one.step(first.closure(n % 8), chosen[n % 5])
        other.step_together(together(second, n % 8), chosen[n % 5])
        torch.testing.assert_close(second.state(), first.state(), **CLOSE)
        assert_same_gramians(one, other)
        states = [opt.method.state_dict() for opt in (one, other)]
        torch.testing.assert_close(states[1].pop("targets"), states[0].pop("targets"), **CLOSE)
        assert states[0] == states[1]


@pytest.mark.networks
@pytest.mark.parametrize("name", ["resnet18", pytest.param("hrnet_w18", marks=pytest.mark.full)])
def test_trunks(name: str) -> None:
    first, second = TrunkSetup(CASES[name]), TrunkSetup(CASES[name])
    for setup in (first, second):
        setup.method = cs.UPGrad(groups="layer")
    one, other = first.optimizer(), second.optimizer()
    for _ in range(2):
        losses = one.step(first.loss)
        found = other.step_together(
            lambda run: {t: second.loss_of(z, t) for t, z in run(second.x).items()}
        )
        torch.testing.assert_close(found, losses, **CLOSE)
        states = [setup.trunk.state_dict() for setup in (first, second)]
        torch.testing.assert_close(states[1], states[0], rtol=1e-9, atol=1e-10)
    assert_same_gramians(one, other)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_weight_or_bias(frozen: str) -> None:
    trunk = small()
    getattr(trunk[3], frozen).requires_grad_(False)
    assert_alike(trunk, pictures(), method=cs.MGDA(groups="layer"))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool) -> None:
    x = pictures().requires_grad_(reentrant)
    assert_alike(Checkpointed(small(), reentrant), x, method=cs.PCGrad(groups="layer"))


def test_factors_of_the_loss() -> None:
    """`max_norm` is one of gradients without the factor, which the backward pass shows."""

    def factor(loss: Tensor, **options: bool) -> None:
        (loss * 3).backward(**options)

    trunk, x = small().float(), pictures().float()
    for options in (
        {"backward": factor},
        {"scaler": torch.amp.GradScaler("cpu", init_scale=8.0)},
        {"backward": factor, "scaler": torch.amp.GradScaler("cpu", init_scale=8.0)},
    ):
        found = [
            trained(
                trunk, x, way, method=cs.NashMTL(max_norm=0.01, groups="layer"),
                **copy.deepcopy(options),
            )
            for way in ("step", "together")
        ]  # fmt: skip
        torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-6)
        norms = [opt.report().update_norm for opt, _ in found]
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-4, atol=1e-6)


def test_parameters_of_one_task() -> None:
    """They get that task's gradient, as in `step`: heads, and branches that others do not use."""
    torch.manual_seed(0)
    heads, branches = converted(Head()), converted(Branches())
    x = torch.randn(6, 3).double()

    def of_head(trunk: nn.Module, z: Any, task: str) -> Tensor:
        return trunk.heads[task](z).sin().mean()

    def of_branch(trunk: nn.Module, z: Any, task: str) -> Tensor:
        return z[AB.index(task)].sin().mean() + (z[1].cos().mean() if task == "b" else 0)

    for trunk, loss in ((heads, of_head), (branches, of_branch)):
        results = []
        for way in ("step", "together"):
            own = copy.deepcopy(trunk)
            opt = cs.MultiTaskOptimizer(own, sgd_of(own), AB, cs.MGDA(groups="layer"))
            for _ in range(3):
                if way == "step":
                    opt.step(lambda task: loss(own, own(x), task))
                else:
                    opt.step_together(lambda run: {t: loss(own, z, t) for t, z in run(x).items()})
            results.append((own.state_dict(), opt.coverage().own))
        torch.testing.assert_close(results[1][0], results[0][0], **CLOSE)
        assert results[0][1] == results[1][1]
        assert results[0][1]


def test_parameters_that_another_task_reaches_later() -> None:
    """They are shared from then on, also in steps where one task alone reaches them."""
    torch.manual_seed(0)
    trunk, x = converted(Branches()), torch.randn(6, 3).double()

    def loss(z: list[Tensor], task: str, step: int) -> Tensor:
        total = z[AB.index(task)].sin().mean()
        return total + z[0].cos().mean() if step == 2 and task == "b" else total

    states = []
    for way in ("step", "together", "both"):
        own = copy.deepcopy(trunk)
        opt = cs.MultiTaskOptimizer(own, sgd_of(own), AB, cs.MGDA(groups="layer"))
        owned = []
        for step in range(5):
            if way == "step" or (way == "both" and step == 2):
                opt.step(lambda t: loss(own(x), t, step))
            else:
                opt.step_together(lambda run: {t: loss(z, t, step) for t, z in run(x).items()})
            owned.append(len(opt.coverage().own))
        states.append([own.state_dict(), owned])
    assert states[0][1][1] > states[0][1][2]
    for found, owned in states[1:]:
        torch.testing.assert_close(found, states[0][0], **CLOSE)
        assert owned == states[0][1]


class Blocks(nn.Module):
    """The second block does not always run, and may be hidden in a function."""

    def __init__(self, hides: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(3)
        )
        self.heads = nn.ModuleDict({t: nn.Linear(3, 1) for t in "abc"})
        self.never = nn.Linear(3, 3)
        self.skips, self.hides = False, hides

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.blocks[0](x).tanh()
        if not self.skips:
            x = x + self.blocks[1](x).tanh()
        x = Twice.apply(x) if self.hides else x
        x = self.blocks[2](x)
        return [x, x]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize(
    "method",
    [cs.ConnectionStrength(), cs.MGDA(groups="layer"), cs.PCGrad(groups="layer")],
    ids=repr,
)
def test_layers_that_do_not_always_run(method: cs.Method, hides: bool) -> None:
    """Also if the graph of a step without them is the one that was searched."""
    torch.manual_seed(0)
    tasks = ["a", "b", "c"]
    trunk, x = converted(Blocks(hides), tasks), torch.randn(6, 3).double()

    def loss(trunk: nn.Module, z: list[Tensor], task: str) -> Tensor:
        return (trunk.heads[task](z[1]) - tasks.index(task)).sin().square().mean()

    skipped = {0, 33, 34, 64}
    results = []
    for way in ("step", "together"):
        own = copy.deepcopy(trunk)
        opt = cs.MultiTaskOptimizer(own, sgd_of(own), tasks, copy.deepcopy(method))
        found = []
        for step in range(66):
            own.skips = step in skipped
            if way == "step":
                opt.step(lambda t: loss(own, own(x), t))
            else:
                opt.step_together(lambda run: {t: loss(own, z, t) for t, z in run(x).items()})
            found.append([p.grad for p in own.parameters()])
        results.append((found, [*own.state_dict().values()], opt.report().layers))
    torch.testing.assert_close(results[1][:2], results[0][:2], rtol=1e-8, atol=1e-10)
    assert results[0][2] == results[1][2]


def test_method_after_an_error() -> None:
    """The state of a method is that of before, even if it has made a part of the updates."""
    torch.manual_seed(0)
    trunk, x = converted(Blocks()), torch.randn(6, 3).double()
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, cs.GradVac(beta=0.5, groups="layer"))

    def step() -> None:
        opt.step_together(
            lambda run: {t: trunk.heads[t](z[0]).square().mean() for t, z in run(x).items()}
        )

    step()
    before = copy.deepcopy(opt.method.state_dict())
    assert before["targets"].any()

    def fails(grad: Tensor) -> None:
        raise ArithmeticError

    def watch(module: nn.Module, given: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fails)

    hook = trunk.blocks[0][1].register_forward_hook(watch)
    with pytest.raises(ArithmeticError):
        step()
    hook.remove()
    after = opt.method.state_dict()
    torch.testing.assert_close(after.pop("targets"), before.pop("targets"), rtol=0, atol=0)
    assert after == before


@pytest.mark.parametrize("method", [cs.ConnectionStrength(), cs.MGDA(groups="layer")], ids=repr)
def test_layer_of_a_constant(method: cs.Method) -> None:
    """The rows of a tensor that is not of the batch are no tasks'."""

    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("grid", torch.randn(4, 2))
            self.at, self.layer, self.norm = nn.Linear(2, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.norm(self.layer(x) + self.at(self.grid).mean(0))
            return result

    torch.manual_seed(0)
    trunk, x = converted(Grid()), torch.randn(6, 3).double()
    layers = {"at": "norm"} if method.prioritizes else None
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, method, layers=layers)
    with pytest.raises(ValueError, match=r"got at\.weight with a tensor of shape \(4, 2\)"):
        opt.step_together(lambda run: {t: z.square().mean() for t, z in run(x).items()})


def test_inputs_are_not_kept() -> None:
    trunk = small()
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, cs.MGDA(groups="layer"))
    inputs = [pictures().requires_grad_()]
    opt.step_together(lambda run: {t: z.square().mean() for t, z in run(inputs[0]).items()})
    alive = weakref.ref(inputs.pop())
    assert alive() is None


def test_method_of_ones_own() -> None:
    class Shorter(cs.GramianMethod):
        layerwise = True

        def weights(self, gramian: Tensor, step: cs.Step | None = None) -> Tensor:
            length = gramian.diagonal(dim1=-2, dim2=-1).sqrt()
            return torch.where(length > 0, 1 / length, 0.0)

    assert_alike(small(), pictures(), method=Shorter(groups="layer"))


def test_report_without_a_layer() -> None:
    reports = []
    for way in ("step", "together"):
        trunk = small()
        trunk[0].weight.requires_grad_(False)
        trunk[3].weight.requires_grad_(False)
        opt, _ = trained(trunk, pictures(), way)
        reports.append(opt.report())
    assert reports[0].rows == reports[1].rows == tuple(AB)
    assert reports[0].products.shape == reports[1].products.shape == (0, 2, 2)


class Odd(nn.Module):
    """A trunk of which one parameter or weight is used in another way."""

    def __init__(self, does: str) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.norm = nn.LayerNorm(3)
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.one(x))
        if self.does == "scale":
            x = x * self.scale
        elif self.does == "norm":
            x = self.norm(x)
        elif self.does == "split":
            return nn.functional.linear(x, self.two.weight) + self.two.bias
        elif self.does == "mixed":
            x = nn.functional.linear(x, self.two.weight, self.one.bias)
        elif self.does == "tied":
            x = nn.functional.linear(self.two(x), self.two.weight)
        elif self.does == "twice":
            x = nn.functional.linear(self.two(x), self.two.weight.clone(), self.two.bias)
        return self.two(x)


@pytest.mark.parametrize(
    ("does", "match"),
    [
        ("scale", "got scale elsewhere: use step, or freeze it"),
        ("norm", "got norm.weight elsewhere: use step"),
        ("split", "two.bias .* used in "),
        ("mixed", "several times"),
        ("tied", "two.weight .* several times"),
        ("twice", "two.weight .* used in clone"),
    ],
)
def test_refuses_trunks(does: str, match: str) -> None:
    torch.manual_seed(0)
    trunk, x = Odd(does).double(), torch.randn(6, 3).double()
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, cs.MGDA(groups="layer"))

    def losses(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {t: (z - n).square().mean() for n, (t, z) in enumerate(outputs.items())}

    before = [p.clone() for p in trunk.parameters()]
    with pytest.raises(ValueError, match=match):
        opt.step_together(lambda run: losses(run(x)))
    assert_equal([*trunk.parameters()], before)
    if does in ("scale", "norm"):
        own = trunk.scale if does == "scale" else trunk.norm
        own.requires_grad_(False)
        opt.step_together(lambda run: losses(run(x)))
        assert not torch.equal(trunk.one.weight, before[1 if does == "scale" else 0])


def test_refuses_methods() -> None:
    trunk = small()

    class Weighs(cs.GradVac):
        def weights(self, gramian: Tensor, step: cs.Step | None = None) -> Tensor:
            return super().weights(gramian, step)

    class Combines(cs.MGDA):
        def combine(self, *arguments: Any) -> None:
            super().combine(*arguments)

    for method in (
        cs.NashMTL(update_every=2, groups="layer"),
        Weighs(groups="layer"),
        Combines(groups="layer"),
        cs.MGDA(),
        cs.GradDrop(),
    ):
        opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, method)
        with pytest.raises(ValueError, match="groups='layer' for step_together"):
            opt.step_together(lambda run: {t: z.mean() for t, z in run(pictures()).items()})


def test_unknown_reach() -> None:
    """If a function may hide parameters, all losses must depend on the same outputs."""
    trunk = converted(Branches())
    x = torch.randn(6, 3).double().requires_grad_()
    trunk.one, trunk.two = (nn.Sequential(nn.Linear(4, 4)).double() for _ in AB)
    trunk.one = Checkpointed(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).double(), True)
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, cs.MGDA(groups="layer"))
    with pytest.raises(ValueError, match="must show which task reaches"):
        opt.step_together(
            lambda run: {t: z[AB.index(t)].square().mean() for t, z in run(x).items()}
        )
    opt.step_together(lambda run: {t: sum(y.square().mean() for y in z) for t, z in run(x).items()})


def test_backend_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, autograd makes the backward pass in a thread of its own."""
    trunk = small()
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB)
    combine, found, flush = cs.ConnectionStrength.combine, set[str | None](), LayerUpdates.flush

    def watched(self: cs.ConnectionStrength, *arguments: Any) -> None:
        found.add(backends._requested.get())
        combine(self, *arguments)

    def elsewhere(self: LayerUpdates) -> None:
        thread = threading.Thread(target=flush, args=(self,))
        thread.start()
        thread.join()

    monkeypatch.setattr(cs.ConnectionStrength, "combine", watched)
    monkeypatch.setattr(LayerUpdates, "flush", elsewhere)
    with cs.use_backend("reference"):
        opt.step_together(lambda run: {t: z.square().mean() for t, z in run(pictures()).items()})
    assert found == {"reference"}


@pytest.mark.parametrize("method", [cs.ConnectionStrength(), cs.MGDA(groups="layer")], ids=repr)
def test_memory_of_gradients(monkeypatch: pytest.MonkeyPatch, method: cs.Method) -> None:
    """Gradients of no more than the largest layer wait; small layers are combined in one call."""
    torch.manual_seed(0)
    widths = [3, 4, 4, 40, 40, 4, 4, 4, 4]
    pairs = itertools.pairwise(widths)
    trunk = converted(
        nn.Sequential(
            *(module for m, n in pairs for module in (nn.Linear(m, n), nn.BatchNorm1d(n)))
        )
    )
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, method)
    x = torch.randn(5, 3).double()
    alive: list[weakref.ref[Tensor]] = []
    most, calls = 0, 0
    hand_over, combine = LayerUpdates.hand_over, type(method).combine

    def counted(self: LayerUpdates, parameter: Tensor, grads: Iterable[Tensor]) -> None:
        def noted() -> Iterator[Tensor]:
            nonlocal most
            for grad in grads:
                alive.append(weakref.ref(grad))
                present = [found for found in (known() for known in alive) if found is not None]
                most = max(most, sum(found.numel() for found in present))
                yield grad

        hand_over(self, parameter, noted())

    def counts(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        combine(*arguments)

    monkeypatch.setattr(LayerUpdates, "hand_over", counted)
    monkeypatch.setattr(type(method), "layerwise", True)
    monkeypatch.setattr(method, "combine", lambda *arguments: counts(method, *arguments))
    opt.step_together(lambda run: {t: (z - 1).square().mean() for t, z in run(x).items()})
    largest = 40 * 40 + (0 if method.prioritizes else 40)
    assert most == 2 * largest
    assert calls == 3
