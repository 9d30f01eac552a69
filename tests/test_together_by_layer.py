"""`step_together` with Gramian methods by layer, and the memory of the gradients that wait."""

import copy
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from networks import AB, Composed, assert_equal, optimizer_of, refused, with_gradient
from stacking import (
    BY_LAYER,
    CLOSE,
    LAYERWISE,
    assert_alike,
    assert_trains_alike,
    branches,
    checkpointed,
    converted,
    head,
    of_head,
    pictures,
    small,
    squares,
    trained,
    vectors,
)
from torch import Tensor, nn
from torch.nn.functional import linear
from trunks import CASES
from trunks import TASKS as TRUNK_TASKS
from trunks import Setup as TrunkSetup

import cs_kernels as cs
from cs_kernels.engine.stacked.layer_updates import LayerUpdates
from cs_kernels.engine.stacked.together import RunTrunk
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


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_trains_as_step(method: cs.GramianMethod) -> None:
    """Biases too, and draws by the number of the layer."""
    opt = assert_trains_alike(method)
    assert len(opt.report().layers) > 1
    assert opt.report().conflicts.any()


@pytest.mark.networks
@pytest.mark.parametrize("name", ["resnet18", pytest.param("hrnet_w18", marks=pytest.mark.full)])
def test_trunks(name: str) -> None:
    setup = TrunkSetup(CASES[name])
    method, loss = cs.UPGrad(groups="layer"), lambda _, z, task: setup.loss_of(z, task)
    options = {"tasks": TRUNK_TASKS, "loss": loss, "lr": 0.0, "method": method}
    assert_alike(setup.trunk, setup.x, steps=2, **options)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_weight_or_bias(frozen: str) -> None:
    trunk = small()
    getattr(trunk[3], frozen).requires_grad_(False)
    assert_alike(trunk, pictures(), method=BY_LAYER)


def of_branch(trunk: nn.Module, z: list[Tensor], task: str) -> Tensor:
    return z[AB.index(task)].sin().mean() + (z[1].cos().mean() if task == "b" else 0)


@pytest.mark.parametrize(("network", "loss"), [(head, of_head), (branches, of_branch)])
def test_parameters_of_one_task(
    network: Callable[[], nn.Module], loss: Callable[..., Tensor]
) -> None:
    """They get that task's gradient, as in `step`: heads, and branches that others do not use."""
    opt = assert_alike(converted(network()), vectors(), loss=loss, method=BY_LAYER)
    assert opt.coverage().own


def test_parameters_that_another_task_reaches_later() -> None:
    """They are shared from then on, also in steps where one task alone reaches them."""
    trunk, x = converted(branches()), vectors()
    owned: dict[str, list[int]] = {}

    def loss(network: nn.Module, z: list[Tensor], task: str) -> Tensor:
        total = z[AB.index(task)].sin().mean()
        return total + z[0].cos().mean() if network.number == 2 and task == "b" else total

    def train(way: str) -> list[Tensor | None]:
        numbers = owned[way] = []
        watch = lambda opt, network: numbers.append(len(opt.coverage().own))  # noqa: E731
        return trained(trunk, x, way, steps=5, loss=loss, watch=watch, method=BY_LAYER)[1]

    expected = train("step")
    for way in ("together", "mixed"):
        torch.testing.assert_close(train(way), expected, **CLOSE)
        assert owned[way] == owned["step"]
    assert owned["step"][1] > owned["step"][2]


SKIPPED = {0, 33, 34, 64}


def blocks(hides: bool = False) -> nn.Module:
    """The second block does not always run, and may be hidden in a function."""

    def run(network: Any, x: Tensor) -> list[Tensor]:
        x = network.blocks[0](x).tanh()
        if network.number not in SKIPPED:
            x = x + network.blocks[1](x).tanh()
        x = network.blocks[2](twice(x) if hides else x)
        return [x, x]

    return Composed(
        run,
        blocks=nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(3)),
        heads=nn.ModuleDict({t: nn.Linear(3, 1) for t in "abc"}),
        never=nn.Linear(3, 3),
    )


twice = with_gradient(lambda x: 2 * x, lambda grad: 2 * grad)


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize(
    "method",
    [cs.ConnectionStrength(), cs.MGDA(groups="layer"), cs.PCGrad(groups="layer")],
    ids=repr,
)
def test_layers_that_do_not_always_run(method: cs.Method, hides: bool) -> None:
    """Also if the graph of a step without them is the one that was searched."""
    tasks = ["a", "b", "c"]
    without_gradient = []

    def loss(network: Composed, z: list[Tensor], task: str) -> Tensor:
        return (network.heads[task](z[1]) - tasks.index(task)).sin().square().mean()

    def watch(_: object, network: Composed) -> None:
        without_gradient.append([p.grad is None for p in network.parameters()])

    trunk, x = converted(blocks(hides), tasks), vectors()
    close = {"rtol": 1e-8, "atol": 1e-10}
    options = {"method": method, "hides": hides, "close": close, "lr": 0.1}
    assert_alike(trunk, x, steps=66, tasks=tasks, loss=loss, watch=watch, **options)
    assert without_gradient[66:] == without_gradient[:66]


def test_method_after_an_error() -> None:
    """The state of a method is that of before, even if it has made a part of the updates."""
    trunk, x = converted(blocks()), vectors()
    trunk.number = 1
    opt = optimizer_of(trunk, cs.GradVac(beta=0.5, groups="layer"))

    def forward(run: RunTrunk) -> dict[str, Tensor]:
        return {t: trunk.heads[t](z[0]).square().mean() for t, z in run(x).items()}

    def fails(grad: Tensor) -> None:
        raise ArithmeticError

    def watch(module: nn.Module, given: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fails)

    opt.step_together(forward)
    before = copy.deepcopy(opt.method.state_dict())
    assert before["targets"].any()
    trunk.blocks[0][1].register_forward_hook(watch)
    with pytest.raises(ArithmeticError):
        opt.step_together(forward)
    after = opt.method.state_dict()
    assert_equal(after.pop("targets"), before.pop("targets"))
    assert after == before


@LAYERWISE
def test_layer_of_a_constant(method: cs.Method) -> None:
    """The rows of a tensor that is not of the batch are no tasks'."""
    grid = torch.randn(4, 2).double()
    modules = {"at": nn.Linear(2, 3), "layer": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3)}
    run = lambda trunk, x: trunk.norm(trunk.layer(x) + trunk.at(grid).mean(0))  # noqa: E731
    trunk = converted(Composed(run, **modules))
    layers = {"at": "norm"} if method.prioritizes else None
    with pytest.raises(ValueError, match=r"got at\.weight with a tensor of shape \(4, 2\)"):
        optimizer_of(trunk, method, layers=layers).step_together(squares(vectors()))


def test_method_of_ones_own() -> None:
    class Shorter(cs.GramianMethod):
        layerwise = True

        def weights(self, gramian: Tensor, step: cs.Step | None = None) -> Tensor:
            length = gramian.diagonal(dim1=-2, dim2=-1).sqrt()
            return torch.where(length > 0, 1 / length, 0.0)

    assert_alike(small(), pictures(), method=Shorter(groups="layer"))


def test_report_without_a_layer() -> None:
    trunk = small()
    for layer in (0, 3):
        trunk[layer].weight.requires_grad_(False)
    report = assert_alike(trunk, pictures()).report()
    assert report.rows == tuple(AB)
    assert report.products.shape == (0, 2, 2)


@pytest.mark.parametrize(
    ("does", "match"),
    [
        (lambda net, x: net.two(x * net.scale), "got scale elsewhere: use step, or freeze it"),
        (lambda net, x: net.two(net.norm(x)), "got norm.weight elsewhere: use step"),
        (lambda net, x: linear(x, net.two.weight) + net.two.bias, "two.bias .* used in "),
        (lambda net, x: net.two(linear(x, net.two.weight, net.one.bias)), "several times"),
        (lambda net, x: linear(net.two(x), net.two.weight), "two.weight .* several times"),
        (lambda net, x: net.two(linear(x, net.two.weight.clone())), "two.weight .* used in clone"),
    ],
    ids=["scale", "norm", "split", "mixed", "tied", "twice"],
)
def test_refuses_trunks(does: Callable[[Any, Tensor], Tensor], match: str) -> None:
    """A parameter or weight is used in another way than by one layer."""
    modules = {"one": nn.Linear(3, 3), "two": nn.Linear(3, 3), "norm": nn.LayerNorm(3)}
    trunk, x = Composed(lambda trunk, x: does(trunk, trunk.one(x).tanh()), **modules), vectors()
    trunk.scale = nn.Parameter(torch.ones(3))
    trunk.double()
    opt = optimizer_of(trunk, BY_LAYER)
    with refused(trunk.state_dict, ValueError, match):
        opt.step_together(squares(x))
    if "elsewhere" in match:
        before = trunk.one.weight.clone()
        for own in (trunk.scale, trunk.norm):
            own.requires_grad_(False)
        opt.step_together(squares(x))
        assert not torch.equal(trunk.one.weight, before)


class Weighs(cs.GradVac):
    def weights(self, gramian: Tensor, step: cs.Step | None = None) -> Tensor:
        return super().weights(gramian, step)


class Combines(cs.MGDA):
    def combine(self, *arguments: Any) -> None:
        super().combine(*arguments)


@pytest.mark.parametrize(
    "method",
    [
        *(cs.NashMTL(update_every=2), cs.MGDA(), cs.GradDrop()),
        *(Weighs(groups="layer"), Combines(groups="layer")),
    ],
    ids=repr,
)
def test_refuses_methods(method: cs.Method) -> None:
    with pytest.raises(ValueError, match="groups='layer' for step_together"):
        optimizer_of(small(), method).step_together(squares(pictures()))


def test_unknown_reach() -> None:
    """If a function may hide parameters, all losses must depend on the same outputs."""
    trunk, x = converted(branches()), vectors().requires_grad_()
    layers = [nn.Linear(4, 4).double() for _ in range(3)]
    trunk.one, trunk.two = checkpointed(True, *layers[:2]), layers[2]
    opt = optimizer_of(trunk, BY_LAYER)

    def losses(run: RunTrunk, uses: Callable[[str], list[int]]) -> dict[str, Tensor]:
        return {t: sum(z[n].square().mean() for n in uses(t)) for t, z in run(x).items()}

    with pytest.raises(ValueError, match="must show which task reaches"):
        opt.step_together(partial(losses, uses=lambda task: [AB.index(task)]))
    opt.step_together(partial(losses, uses=lambda task: [0, 1]))


def test_backend_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, autograd makes the backward pass in a thread of its own."""
    trunk = small()
    opt = optimizer_of(trunk)
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
        opt.step_together(squares(pictures()))
    assert found == {"reference"}


@LAYERWISE
def test_memory_of_gradients(monkeypatch: pytest.MonkeyPatch, method: cs.Method) -> None:
    """Gradients of no more than the largest layer wait; small layers are combined in one call."""
    pairs = itertools.pairwise([3, 4, 4, 40, 40, 4, 4, 4, 4])
    layers = ((nn.Linear(m, n), nn.BatchNorm1d(n)) for m, n in pairs)
    trunk = converted(nn.Sequential(*itertools.chain.from_iterable(layers)))
    alive: list[weakref.ref[Tensor]] = []
    most, hand_over = 0, LayerUpdates.hand_over
    method = copy.deepcopy(method)
    method.combine = combine = Mock(side_effect=method.combine)

    def counted(self: LayerUpdates, parameter: Tensor, grads: Iterable[Tensor]) -> None:
        def noted() -> Iterator[Tensor]:
            nonlocal most
            for grad in grads:
                alive.append(weakref.ref(grad))
                present = [found for found in (known() for known in alive) if found is not None]
                most = max(most, sum(found.numel() for found in present))
                yield grad

        hand_over(self, parameter, noted())

    monkeypatch.setattr(LayerUpdates, "hand_over", counted)
    x = vectors()
    optimizer_of(trunk, method).step_together(
        lambda run: {task: (z - 1).square().mean() for task, z in run(x).items()}
    )
    largest = 40 * 40 + (0 if method.prioritizes else 40)
    assert most == 2 * largest
    assert combine.call_count == 3
