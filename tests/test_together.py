"""`step_together`: one pass of the trunk for all tasks, against `step` with a pass per task."""

import copy
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from networks import (
    AB,
    GRAMIAN_METHODS,
    TASKS,
    Composed,
    Setup,
    assert_equal,
    optimizer_of,
    refused,
    sgd_of,
    with_gradient,
)
from stacking import (
    BY_LAYER,
    CLOSE,
    Case,
    assert_alike,
    branches,
    checkpointed,
    converted,
    normed,
    pictures,
    scenes,
    small,
    squares,
    together,
    vectors,
)
from torch import Tensor, nn
from torch.nn.functional import linear

import cs_kernels as cs
from cs_kernels.engine import loss_graph
from cs_kernels.engine.stacked.layer_updates import LayerUpdates
from cs_kernels.engine.stacked.together import RunTrunk
from cs_kernels.ops import backends

pytestmark = pytest.mark.loop

PRIORITY = cs.ConnectionStrength()
LAYERWISE = pytest.mark.parametrize("method", [PRIORITY, BY_LAYER], ids=repr)


class Shorter(cs.GramianMethod):
    """A user-defined method whose weights are inverse lengths."""

    layerwise = True

    def weights(self, gramian: Tensor, step: cs.Step | None = None) -> Tensor:
        length = gramian.diagonal(dim1=-2, dim2=-1).sqrt()
        return torch.where(length > 0, 1 / length, 0.0)


def triple(loss: Tensor, **options: bool) -> None:
    (loss * 3).backward(**options)


OPTIONS: list[dict[str, Any]] = [
    *({"method": type(method)(groups="layer")} for method in GRAMIAN_METHODS),
    {"method": cs.Protect("depth", groups="layer")},
    {"method": cs.SAGO("depth")},
    {"method": cs.PCGrad("mean", seed=3, groups="layer")},
    {"method": cs.GradVac(beta=0.3, groups="layer")},
    {"method": cs.GradVac(target=0.2, groups="layer")},
    {"method": Shorter(groups="layer")},
    *(
        {"method": method, "schedule": schedule}
        for method in (PRIORITY, cs.Sum())
        for schedule in (cs.Joint(), cs.Sequential(), cs.Switch(1), cs.Mixed(2, 1, "step"))
    ),
    {"weighting": cs.FixedWeights({"depth": 1.0, "normals": 10.0, "edges": 0.1})},
    {"weighting": cs.RandomWeights(seed=2)},
    {"weighting": cs.DynamicWeightAverage()},
    {"weighting": cs.UncertaintyWeights(dict.fromkeys(TASKS, "regression"))},
    # `max_norm` limits gradients without the factor of a scaler or of `backward`; the backward pass
    # measures this factor.
    *(
        {"method": method, "backward": backward, "scaler": scaler}
        for method in (PRIORITY, cs.NashMTL(max_norm=0.01, groups="layer"))
        for backward in (None, triple)
        for scaler in (None, torch.amp.GradScaler("cpu", init_scale=8.0))
        if backward or scaler
    ),
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(options))
def test_options_train_as_with_step(options: dict[str, Any]) -> None:
    weights = options.get("weighting", cs.EqualWeights()).parameters()  # In float32.
    close = {"rtol": 1e-5, "atol": 1e-6} if weights else CLOSE
    steps = 5 if "weighting" in options else 4 if "schedule" in options else 2
    opt = assert_alike(scenes(), steps, close=close, **options)
    report = opt.report()
    assert report.conflicts is None or report.conflicts.any()


def freezes(*names: str) -> Callable[[Composed], None]:
    def begins(network: Composed) -> None:
        for name, parameter in network.trunk.named_parameters():
            parameter.requires_grad_(not name.startswith(names))

    return begins


def in_turns(network: Composed) -> None:
    network.trunk.block.requires_grad_(network.number // 2 == 1)


PARTIAL = [["edges"], ["normals", "depth"], None, ["depth", "edges"], ["normals"]]
CHANGES: dict[str, Callable[[Any], Any]] = {
    "partial labels": lambda network: PARTIAL[network.number % 5],
    "stem": freezes("stem"),
    "weight": freezes("up.weight"),
    "bias": freezes("up.bias", "block", "up_norm"),
    "all layers": freezes("stem", "block.first.0", "block.second", "up"),
    "unfrozen": in_turns,
    "eval": lambda network: network.trunk.stem_norm.train(False) and None,
    "channels_last": lambda network: network.to(memory_format=torch.channels_last) and None,
}


@pytest.mark.parametrize("method", [PRIORITY, cs.GradVac(beta=0.5, groups="layer")], ids=repr)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_from_step_to_step(change: str, method: cs.Method) -> None:
    assert_alike(scenes(CHANGES[change]), 4, method=method)


def from_number(_: nn.Module, z: Tensor, task: str) -> Tensor:
    """A loss whose target is proportional to the task's index."""
    return (z - 3 * AB.index(task)).square().mean()


def first_runs_later(trunk: Any, x: Tensor) -> Tensor:
    y = trunk.norm(trunk.first(x))
    return y + trunk.other(trunk.second(x)) if trunk.number > 1 else y


class Own(nn.Linear):
    """A layer whose weight is a function of its parameter."""

    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__(3, 4)
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.of(self.weight), self.bias)


class Named(nn.Linear):
    """Reads attributes of its weight, and passes arguments by name."""

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, nn.Parameter)
        x = x.float().to(self.weight).type_as(self.weight) + self.weight.new_zeros(3)
        return linear(input=x, weight=self.weight, bias=self.bias)


LAYERS: list[Callable[[], list[nn.Module]]] = [
    lambda: [nn.Linear(3, 4, bias=False), nn.Linear(4, 6)],
    lambda: [
        nn.Conv1d(3, 4, 3, padding="valid"),
        nn.Conv1d(4, 6, 3, stride=2, padding=1),
        nn.ConvTranspose1d(6, 4, 3, stride=2, output_padding=1),
    ],
    lambda: [
        nn.Conv2d(3, 4, (3, 2), stride=(2, 1), dilation=(1, 2)),
        nn.Conv2d(4, 8, 3, groups=4, padding=1),
        nn.Conv2d(8, 4, (3, 4), padding="same", dilation=(1, 3)),
        nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
        nn.ConvTranspose2d(6, 6, 3, padding=1, groups=2),
    ],
    lambda: [
        nn.Conv3d(3, 4, 3, padding=1, bias=False),
        nn.ConvTranspose3d(4, 6, 2, dilation=2, bias=False),
    ],
]


def of_layers(dims: int) -> Case:
    """Layers, each followed by a normalization."""
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][dims]
    modules = []
    for layer in LAYERS[dims]():
        channels = layer.out_features if dims == 0 else layer.out_channels
        modules += [layer, norm(channels), nn.Tanh()]
    return Case(converted(nn.Sequential(*modules)), torch.randn(4, 3, *[5] * dims).double())


def words(p: float = 0.0, mixes: bool = False) -> Case:
    """Embeddings, dropout, a linear layer on three dimensions, and outputs in a dictionary."""

    def run(trunk: Any, inputs: dict[str, Tensor], scale: float = 1.0) -> dict[str, Any]:
        tokens = inputs["tokens"]
        tokens = (tokens + tokens[:1]) % 9 if mixes else tokens
        y = trunk.linear(trunk.embedding(tokens) * inputs["mask"].unsqueeze(-1) * scale)
        y = trunk.norm(y.flatten(0, 1)).unflatten(0, y.shape[:2])
        return {"all": [nn.functional.dropout(y, p)], "size": 3}

    def loss(network: nn.Module, z: dict[str, Any], task: str) -> Tensor:
        assert z["size"] == 3
        return from_number(network, z["all"][0], task)

    torch.manual_seed(0)
    tokens = {"tokens": torch.randint(0, 9, (4, 6)), "mask": torch.rand(4, 6).double()}
    layers = {"embedding": nn.Embedding(9, 4), "linear": nn.Linear(4, 5)}
    trunk = converted(Composed(run, **layers, norm=nn.BatchNorm1d(5)))
    return Case(trunk, lambda run, _: run(tokens, scale=2.0), loss)


def norm_in_head() -> Case:
    def loss(network: Any, z: Tensor, task: str) -> Tensor:
        cs.nn.set_task(network["head"], task)
        result: Tensor = network["head"](z).sin().mean()
        return result

    head = converted(nn.Sequential(nn.BatchNorm2d(5)))
    network = nn.ModuleDict({"trunk": small(), "head": head})
    return Case(network, pictures(), loss, trunk=lambda network: network["trunk"])


def ordered(names: str) -> Case:
    trunk = small()
    cs.nn.add_task(trunk, "c", like="a")
    return Case(trunk, pictures(), tasks=[*names])


def outputs_of_branches(*batches: str) -> Case:
    """Each task uses one output, and in some steps "b" uses two; tasks may share outputs."""

    def chosen(network: nn.Module) -> list[str]:
        return [*batches[network.number % len(batches)]]

    def loss(network: nn.Module, z: list[Tensor], task: str) -> Tensor:
        total = z[chosen(network).index(task)].sin().mean()
        return total + z[0].cos().mean() if network.number in (2, 4) and task == "b" else total

    tasks = sorted(set("".join(batches)))
    torch.manual_seed(0)
    return Case(branches(tasks), vectors(), loss, tasks, begins=chosen)


def composed(run: Callable[[Any, Tensor], Tensor], *layers: nn.Module) -> Case:
    """A trunk with normalizations `norm` and `other`."""
    named = dict(zip(("first", "second"), layers, strict=False))
    norms = {name: nn.BatchNorm1d(4) for name in ("norm", "other")}
    return Case(converted(Composed(run, **named, **norms)), vectors(), from_number)


def own_weight(of: Callable[[Tensor], Tensor]) -> Case:
    return Case(converted(nn.Sequential(Own(of), nn.ReLU(), *normed(4, 5))), vectors())


NETWORKS: dict[str, Callable[[], Case]] = {
    **{f"layers-{dims}": partial(of_layers, dims) for dims in range(4)},
    # Reentrant checkpointing needs an input that requires a gradient. The recomputation must not
    # update statistics again.
    **{
        f"checkpointed-{reentrant}": lambda reentrant=reentrant: Case(
            checkpointed(reentrant, (trunk := small())[:3], trunk[3:]),
            pictures().requires_grad_(reentrant),
        )
        for reentrant in (True, False)
    },
    "later": lambda: composed(first_runs_later, nn.Linear(3, 4), nn.Linear(3, 4)),
    "named": lambda: composed(lambda net, x: net.norm(input=net.first(x)), Named(3, 4)),
    "in place": lambda: Case(  # The linear layer reads the changed input.
        converted(nn.Sequential(nn.ReLU(inplace=True), *normed(3, 4))),
        lambda run, _: run(vectors()),
        from_number,
    ),
    "a norm in the head": norm_in_head,
    "other order": partial(ordered, "cab"),
    "one task": lambda: Case(converted(normed(3, 4), ["a"]), vectors(), tasks=["a"]),
    "branches": partial(outputs_of_branches, "ab"),
    "branches of others": partial(outputs_of_branches, "ab", "bc"),
    "branches of some": partial(outputs_of_branches, "a", "b", "ca"),
}
# Only for the priority method: it restricts weights of prioritized layers to one use, but allows
# any use of other weights, as here.
PRIORITIZED: dict[str, Callable[[], Case]] = {
    "words": words,
    "centered weight": lambda: own_weight(lambda w: w - w.mean(1, keepdim=True)),
    "signs": lambda: own_weight(with_gradient(Tensor.sign, lambda grad: grad)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, method) for name in NETWORKS for method in (PRIORITY, BY_LAYER)),
        *((name, PRIORITY) for name in PRIORITIZED),
    ],
)
def test_networks_train_as_with_step(name: str, method: cs.Method) -> None:
    case = (NETWORKS | PRIORITIZED)[name]()
    assert_alike(case, 6 if "branches" in name else 4 if name == "later" else 2, method=method)


def test_parameters_that_another_task_reaches_in_step() -> None:
    """Such parameters are shared from then on, even in steps where only one task reaches them."""
    assert_alike(outputs_of_branches("ab"), 6, way="mixed", method=BY_LAYER)


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    case = Case(small(), pictures(), trunk=partial(torch.compile, backend=backend))
    assert len(assert_alike(case).coverage().prioritized) == 2


twice = with_gradient(lambda x: 2 * x, lambda grad: 2 * grad)


def blocks(hides: bool = False) -> Case:
    """The second block runs only in some steps, and a function may hide it."""

    def run(network: Any, x: Tensor) -> list[Tensor]:
        x = network.blocks[0](x).tanh()
        if network.number not in (0, 3, 4, 5):
            x = x + network.blocks[1](x).tanh()
        x = network.blocks[2](twice(x) if hides else x)
        return [x, x]

    def loss(network: Any, z: list[Tensor], task: str) -> Tensor:
        result: Tensor = (network.heads[task](z[1]) - "abc".index(task)).sin().square().mean()
        return result

    layers = nn.ModuleList(normed(3, 3) for _ in range(3))
    heads = nn.ModuleDict({t: nn.Linear(3, 1) for t in "abc"})
    network = Composed(run, blocks=layers, heads=heads, never=nn.Linear(3, 3))
    return Case(converted(network, "abc"), vectors()[:5], loss, [*"abc"], hides=hides)


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("method", [PRIORITY, BY_LAYER, cs.PCGrad(groups="layer")], ids=repr)
def test_layers_that_do_not_always_run(
    method: cs.Method, hides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps work even if the graph was checked in a step in which a layer did not run."""
    monkeypatch.setattr(loss_graph, "_CHECKED_EVERY", 3)
    close = {"rtol": 1e-8, "atol": 1e-10}
    assert_alike(blocks(hides), 7, close=close, method=method)


def test_run_called_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls work even if the step checks graphs; only prioritized layers must run just once."""
    monkeypatch.setattr(loss_graph, "_CHECKED_EVERY", 3)

    def both(run: Callable[[Tensor], Any], _: object) -> Any:
        z, y = run(pictures()), run(pictures() + 1)
        return {t: (z[t], y[t]) for t in z} if isinstance(z, dict) else (z, y)

    def loss(_: nn.Module, outputs: tuple[Tensor, Tensor], task: str) -> Tensor:
        return outputs[0].sin().mean() + outputs[1].cos().mean()

    assert_alike(Case(small(), both, loss), 5, method=cs.Sum())


def test_dropout_draws_a_mask_per_task() -> None:
    masks: dict[str, Tensor] = {}
    case = words(p=0.5)

    def loss(network: nn.Module, z: dict[str, Any], task: str) -> Tensor:
        masks[task] = z["all"][0] == 0
        return from_number(network, z["all"][0], task)

    case.loss = loss
    case.trained("together", 1)
    assert not torch.equal(*masks.values())
    assert all(0.2 < mask.double().mean() < 0.8 for mask in masks.values())


def test_autocast() -> None:
    """Dtypes equal those of `step`; only the order of bfloat16 sums differs."""
    case, grads = Case(small().float(), pictures().float()), []
    for way, enabled in (("step", False), ("step", True), ("together", True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            _, [(_, (_, _, found, *_))] = case.trained(way, 1)
        grads.append(found)
    for exact, one, other in zip(*grads, strict=True):
        assert other.dtype is one.dtype
        error, size = (other - one).double().norm(), one.double().norm()
        assert error <= 0.01 * size + 1e-6
        if one.dim() > 1:  # Autocast has an effect.
            assert (exact - one).double().norm() > 1e-4 * size


def counts(net: Any, x: Tensor) -> Tensor:
    net.seen += 1
    return net.normed(x)


def over_time(net: Any, x: Tensor) -> Tensor:
    """The batch is in dimension 1."""
    y = net.layer(x.expand(2, *x.shape))
    return net.norm(y.flatten(0, 1)).unflatten(0, y.shape[:2])[0]


def mixes(mix: Callable[[Tensor], Tensor]) -> tuple[Callable[[Any, Tensor], Tensor], str]:
    return lambda net, x: mix(net.normed(x)), OF_ANOTHER


OF_ANOTHER, GRID = "one task's part depends on another's", torch.ones(4, 3).double()
AT_GRID = r"but two\.weight has a tensor of shape \(4, 3\)"
TRUNKS: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "centers": mixes(lambda y: y - y.mean(0)),
    "next": mixes(lambda y: y + torch.cat([y[1:], y[-1:]]).square()),
    "last": mixes(lambda y: y - y[-1:]),
    "halves": mixes(lambda y: torch.cat([y.chunk(2)[0] - y.chunk(2)[1], y.chunk(2)[1]])),
    "median": mixes(lambda y: y * (y > y.median())),
    "nans": mixes(lambda y: y - y.nan_to_num().mean(0)),
    "sums before": mixes(lambda y: y.cumsum(0)),
    "sums behind": mixes(lambda y: y.flip(0).cumsum(0).flip(0)),
    "time": (over_time, OF_ANOTHER),
    "sorts": (lambda net, x: net.normed(x[x[:, 0].argsort()]), OF_ANOTHER),
    "twice": (lambda net, x: net.normed(x) + net.normed(x + 1), "more than once"),
    "minus": (lambda net, x: net.normed(x) + linear(x, net.layer.weight - 1), r"in (sub|__sub__)"),
    "counts": (counts, "must not change its buffers"),
    "scalar": (lambda net, x: torch.aminmax(net.normed(x)), r"output of trunk has .* shape \(\)"),
    "transposes": (lambda net, x: net.normed(x).t(), "the output of trunk"),
    "grid": (lambda net, x: net.norm(net.layer(x) + net.two(GRID).mean(0)), AT_GRID),
}
# Cases behind another layer, for a method that updates layer by layer.
BEHIND: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "scale": (lambda net, y: net.two(y * net.scale), "got scale elsewhere: use step, or freeze it"),
    "norm": (lambda net, y: net.two(net.other(y)), "got other.weight elsewhere: use step"),
    "split": (lambda net, y: linear(y, net.two.weight) + net.two.bias, "two.bias .* used in "),
    "mixed": (lambda net, y: net.two(linear(y, net.two.weight, net.layer.bias)), "more than once"),
    "tied": (lambda net, y: linear(net.two(y), net.two.weight), "two.weight .* more than once"),
    "cloned": (lambda net, y: net.two(linear(y, net.two.weight.clone())), "weight .* in clone"),
    "grid behind": (lambda net, y: y + net.two(GRID).mean(0), AT_GRID),
}


def odd(name: str) -> tuple[nn.Module, cs.MultiTaskOptimizer]:
    run = TRUNKS[name][0] if name in TRUNKS else None
    trunk = Composed(
        run or (lambda net, x: BEHIND[name][0](net, net.layer(x).tanh())),
        layer=nn.Linear(3, 3),
        two=nn.Linear(3, 3),
        norm=nn.BatchNorm1d(3),
        other=nn.LayerNorm(3),
    )
    trunk.register_buffer("seen", torch.zeros(1))
    trunk.scale = nn.Parameter(torch.ones(3))
    trunk.normed = lambda x: trunk.norm(trunk.layer(x))
    layers = {"two": "norm"} if name == "grid" else None
    return trunk, optimizer_of(converted(trunk), PRIORITY if run else BY_LAYER, layers=layers)


def of_odd(z: Any) -> Tensor:
    return sum(y.square().mean() for y in (z if isinstance(z, tuple | list) else (z,)))


def together_of_odd(run: RunTrunk) -> dict[str, Tensor]:
    return {task: of_odd(z) for task, z in run(vectors()).items()}


@pytest.mark.parametrize("name", [*TRUNKS, *BEHIND])
def test_refuses_trunks(name: str) -> None:
    (trunk, opt), message = odd(name), (TRUNKS | BEHIND)[name][1]
    with refused(trunk.state_dict, ValueError, message):
        opt.step_together(together_of_odd)
    opt.step(lambda task: of_odd(trunk(vectors())))
    if "elsewhere" in message:
        before = trunk.layer.weight.clone()
        for parameter in (trunk.scale, *trunk.other.parameters()):
            parameter.requires_grad_(False)
        opt.step_together(together_of_odd)
        assert not torch.equal(trunk.layer.weight, before)


def test_refuses_other_trunks() -> None:
    own = converted(nn.Sequential(Own(lambda w: w * 2), nn.BatchNorm1d(4)))
    for case, message in (
        (words(mixes=True), OF_ANOTHER),
        (Case(own, vectors()), r"use 0\.weight "),
    ):
        with pytest.raises(ValueError, match=message):
            case.trained("together")


def test_steps_of_one_task_do_not_show_whether_parts_stay_apart() -> None:
    _, opt = odd("centers")
    for task in AB:
        opt.step_together(together_of_odd, [task])
    with pytest.raises(ValueError, match=OF_ANOTHER):
        opt.step_together(together_of_odd)


def test_unknown_reach() -> None:
    """If a function may hide parameters, all losses must depend on the same outputs."""
    trunk, x = branches(), vectors().requires_grad_()
    layers = [nn.Linear(4, 4).double() for _ in range(3)]
    trunk.one, trunk.two = checkpointed(True, *layers[:2]), layers[2]
    opt = optimizer_of(trunk, BY_LAYER)

    def losses(run: RunTrunk, uses: Callable[[str], list[int]]) -> dict[str, Tensor]:
        return {t: sum(z[n].square().mean() for n in uses(t)) for t, z in run(x).items()}

    with pytest.raises(ValueError, match="must know which tasks reach"):
        opt.step_together(partial(losses, uses=lambda task: [AB.index(task)]))
    opt.step_together(partial(losses, uses=lambda task: [0, 1]))


class Weighs(cs.GradVac):
    def weights(self, gramian: Tensor, step: cs.Step | None = None) -> Tensor:
        return super().weights(gramian, step)


class Combines(cs.MGDA):
    def combine(self, *arguments: Any) -> None:
        super().combine(*arguments)


LAYERS_ONLY = "groups='layer' for step_together"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": cs.PCGrad()}, r"got PCGrad\(.*\): use step"),
        ({"method": cs.Sum(separate=True)}, "never has all gradients"),
        ({"weighting": cs.FAMO()}, "must not compute losses again"),
        ({"method": cs.NashMTL(update_every=2)}, LAYERS_ONLY),
        ({"method": cs.MGDA()}, LAYERS_ONLY),
        ({"method": cs.GradDrop()}, LAYERS_ONLY),
        ({"method": Weighs(groups="layer")}, LAYERS_ONLY),
        ({"method": Combines(groups="layer")}, LAYERS_ONLY),
    ],
    ids=str,
)
def test_refuses_methods_and_weightings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimizer_of(small(), **options).step_together(squares(pictures()))


X = pictures()


def plus(run: RunTrunk, term: Any, at: Any = "b") -> dict[str, Tensor]:
    """Losses; `b`'s includes the square of a weight, or of an output of the trunk or a layer."""
    losses = squares(X)(run)
    if isinstance(term, nn.Module | dict):
        term = term[at] if isinstance(term, dict) else term(X)
    return losses | {"b": losses["b"] + term.square().mean()}


def crossed(run: RunTrunk, of: Callable[[Tensor], Tensor] = lambda z: z) -> dict[str, Tensor]:
    z = run(X)
    return {"a": z["a"].square().mean(), "b": (z["b"] - of(z["a"])).square().mean()}


def penalized(run: RunTrunk, of: Tensor, inputs: Tensor) -> dict[str, Tensor]:
    """A gradient penalty, which would need second derivatives of the layers."""
    losses = {t: z.square().mean() for t, z in run(inputs).items()}
    grads = {t: torch.autograd.grad(x, of, create_graph=True)[0] for t, x in losses.items()}
    return {t: loss + grads[t].square().sum() for t, loss in losses.items()}


def steps_back(run: RunTrunk) -> dict[str, Tensor]:
    losses = squares(X)(run)
    losses["a"].backward(retain_graph=True)
    return losses


FREE, INPUT = nn.Parameter(torch.ones(()).double()), pictures().requires_grad_()
PENALTY = "as for a gradient penalty: use step"
# `net.other` is `net[3].weight` from outside the pass; `net.outputs` are outputs of layers.
FORWARDS: dict[str, tuple[Callable[[Any, RunTrunk], Any], str]] = {
    "crossed": (lambda net, run: crossed(run), "the loss of 'b' depends on the outputs of 'a'"),
    "of none": (lambda net, run: dict.fromkeys(run(X), net[4].a.bias.sum()), "depends on none"),
    "missing": (lambda net, run: {"a": run(X)["a"].mean()}, r"every task, \['a', 'b'\], got"),
    "outputs": (lambda net, run: run(X), "must hold a floating-point scalar"),
    "not held": (lambda net, run: plus(run, FREE), "must hold every"),
    "a weight": (lambda net, run: plus(run, net.other), r"3\.weight .*by the loss of 'b'"),
    "a weight in the pass": (lambda net, run: plus(run, net[3].weight), r"3\.weight .*in square"),
    "direct": (lambda net, run: plus(run, net), "forward must call run"),
    "backward": (lambda net, run: steps_back(run), r"after it: remove backward\(\) from"),
    "generator": (lambda net, run: run(x for x in [X]), "run must get tensors in lists"),
    "sizes": (lambda net, run: run(X, X[:2]), r"got the sizes \[\(2,\), \(4,\)\]"),
    "no size": (lambda net, run: run(X, X.sum()), r"got the sizes \[\(\), \(4,\)\]"),
    "nothing": (lambda net, run: run(), r"got the sizes \[\]"),
    # Before the first normalization, all tasks' batches are equal, so sums do not reveal the task.
    "past run 0": (lambda net, run: plus(run, net.outputs, 0), "a tensor inside the trunk"),
    "past run 1": (lambda net, run: plus(run, net.outputs, 1), "a tensor inside the trunk"),
    # Without the check, torch's error would only mention views.
    "in place": (
        lambda net, run: {t: z.relu_().mean() for t, z in run(X).items()},
        r"ReLU\(inplace=True\) does: use step",
    ),
    "penalty of inputs": (lambda net, run: penalized(run, INPUT, INPUT), PENALTY),
    "penalty of weights": (lambda net, run: penalized(run, net.other, X), PENALTY),
}


@pytest.mark.parametrize(
    ("name", "method", "steps"),
    [
        *((name, PRIORITY, 0) for name in FORWARDS),
        ("past run 1", cs.Sum(), 0),
        # These are also refused in a later step, which does not search graphs.
        *((name, PRIORITY, 1) for name in ("a weight", "a weight in the pass")),
    ],
)
def test_refuses_forwards(name: str, method: cs.Method, steps: int) -> None:
    (forward, message), trunk = FORWARDS[name], small()
    vars(trunk).update(other=trunk[3].weight, outputs={})
    opt = optimizer_of(trunk, method)
    for n in (0, 1):
        trunk[n].register_forward_hook(lambda _, __, y, n=n: trunk.outputs.update({n: y}))
    for _ in range(steps):
        opt.step_together(squares(X))
    before = opt.state_dict()["reach"]
    with refused(trunk.state_dict, (ValueError, RuntimeError), message):
        opt.step_together(partial(forward, trunk))
    assert opt.state_dict()["reach"] == before
    assert all(p.grad is None for p in trunk.parameters())
    opt.step_together(partial(crossed, of=Tensor.detach))


def test_refuses_other_things() -> None:
    trunk = nn.Sequential(small(), nn.BatchNorm2d(5)).double()
    opt = optimizer_of(trunk)
    with pytest.raises(TypeError, match="forward must be a function"):
        opt.step_together({"a": X.sum()})
    with pytest.raises(ValueError, match=r"no plain batch normalization in training .* got 1:"):
        opt.step_together(squares(X))
    trunk[1].eval()
    opt.step_together(squares(X))
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        hook = getattr(trunk[0][3].weight, register)(lambda given: None)
        with pytest.raises(ValueError, match=r"no hook on 0\.3\.weight "):
            opt.step_together(squares(X))
        hook.remove()
    trunk.register_forward_hook(lambda _, __, output: SimpleNamespace(z=output))
    with pytest.raises(ValueError, match="trunk must return tensors in lists"):
        opt.step_together(lambda run: {t: z.z.mean() for t, z in run(X).items()})


def test_a_refused_pass_does_not_change_reach() -> None:
    """One task passes the check before another is refused; neither changes the reach."""
    setup = Setup()
    setup.optimizer = sgd_of(setup.trunk, setup.heads["depth"])
    opt = setup.start()
    before = opt.state_dict()["reach"]
    with pytest.raises(ValueError, match="optimizer must hold every parameter that a loss depends"):
        opt.step_together(together(setup, 0))
    assert opt.state_dict()["reach"] == before


def test_a_task_at_a_time_in_phase_1() -> None:
    opt, seen = optimizer_of(small(), schedule=cs.Sequential()), []

    def forward(run: RunTrunk) -> dict[str, Tensor]:
        losses = squares(X)(run)
        seen.append(list(losses))
        return losses

    assert list(opt.step_together(forward)) == AB
    assert seen == [["a"], ["b"]]
    with pytest.raises(KeyError, match="b") as caught:
        opt.step_together(lambda run: {"a": run(X)["a"].mean(), "b": run(X)["b"].mean()})
    assert "iterate over its items" in caught.value.__notes__[0]


@pytest.mark.parametrize("method", [PRIORITY, cs.GradVac(beta=0.5, groups="layer")], ids=repr)
@pytest.mark.parametrize("where", ["forward", "loss", "trunk"])
def test_state_after_an_error(where: str, method: cs.Method) -> None:
    """Weights, the method and all statistics are unchanged, even outside the trunk.

    The same holds if some updates have already been made; the next step is as if nothing had
    failed.
    """
    breaks, states = "nothing", []

    def fail(_: object) -> None:
        raise ArithmeticError("the user's")

    def watch(_: object, __: object, y: Tensor) -> None:
        if breaks == "trunk" and y.requires_grad:
            y.register_hook(fail)

    def forward(net: Any, run: RunTrunk) -> dict[str, Tensor]:
        outputs = run(net.stem(vectors()))
        losses = {t: net.heads[t](z).sin().mean() + z.square().mean() for t, z in outputs.items()}
        if breaks == "forward":
            fail(None)
        if breaks == "loss":
            losses["b"].register_hook(fail)
        return losses

    for fails in (False, True):
        torch.manual_seed(0)
        trunk = converted(nn.Sequential(*normed(3, 4), nn.ReLU(), *normed(4, 5)))
        heads = nn.ModuleDict({t: nn.BatchNorm1d(5) for t in AB})
        net = Composed(forward, stem=normed(3, 3), trunk=trunk, heads=heads).double()
        opt = cs.MultiTaskOptimizer(trunk, sgd_of(net), AB, copy.deepcopy(method))
        trunk[1].register_forward_hook(watch)
        opt.step_together(net)
        trunk[0].bias.requires_grad_(False)  # The next step checks the parts again.
        if fails:
            parameters, breaks = [*trunk.parameters()], where
            with refused(net.state_dict, ArithmeticError, "the user's"):
                opt.step_together(net)
            assert [*map(id, trunk.parameters())] == [*map(id, parameters)]
            assert all(p.grad is None for p in net.parameters())
            assert all("_stack" not in vars(norm) for norm in cs.nn.task_norms(trunk))
            breaks = "nothing"
        opt.step_together(net)
        targets, grads = opt.method.state_dict().get("targets"), [p.grad for p in net.parameters()]
        states.append([*net.state_dict().values(), targets, *grads])
    assert_equal(*states)


@LAYERWISE
def test_nothing_stays_in_memory(method: cs.Method) -> None:
    opt, alive = optimizer_of(small(), method), []

    def forward(run: RunTrunk, fails: bool) -> dict[str, Tensor]:
        x = pictures().requires_grad_()
        outputs = run(x)
        alive.extend(map(weakref.ref, (x, *outputs.values())))
        if fails:
            raise ArithmeticError
        return {t: z.square().mean() for t, z in outputs.items()}

    for fails in (False, True, False):
        with suppress(ArithmeticError):
            opt.step_together(partial(forward, fails=fails))
        assert all(reference() is None for reference in alive)
    assert len(alive) == 9


@LAYERWISE
def test_no_reference_cycles_are_left(method: cs.Method) -> None:
    """Python frees a step's tensors at once, not in its next search for cycles."""
    opt, counts = optimizer_of(small(), method), []
    opt.step_together(squares(X))
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            opt.step_together(squares(X))
            counts.append(sum(issubclass(type(x), Tensor) for x in gc.get_objects()))
    finally:
        gc.enable()
    assert counts[0] == counts[1]


def test_backend_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, autograd runs the backward pass in a thread of its own."""
    combine, requested, flush = cs.ConnectionStrength.combine, set[str | None](), LayerUpdates.flush

    def watched(self: cs.ConnectionStrength, *arguments: Any) -> None:
        requested.add(backends._requested.get())
        combine(self, *arguments)

    def elsewhere(self: LayerUpdates) -> None:
        thread = threading.Thread(target=flush, args=(self,))
        thread.start()
        thread.join()

    monkeypatch.setattr(cs.ConnectionStrength, "combine", watched)
    monkeypatch.setattr(LayerUpdates, "flush", elsewhere)
    with cs.use_backend("reference"):
        optimizer_of(small()).step_together(squares(X))
    assert requested == {"reference"}


@LAYERWISE
def test_memory_of_gradients(monkeypatch: pytest.MonkeyPatch, method: cs.Method) -> None:
    """Waiting gradients are at most the largest layer's; small layers are combined in one call."""
    layers = (normed(m, n) for m, n in itertools.pairwise([3, 4, 4, 40, 40, 4, 4, 4, 4]))
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
                updates = {id(p.grad) for p in trunk.parameters()}
                present = [g for g in (reference() for reference in alive) if g is not None]
                most = max(most, sum(g.numel() for g in present if id(g) not in updates))
                yield grad

        hand_over(self, parameter, noted())

    monkeypatch.setattr(LayerUpdates, "hand_over", counted)
    optimizer_of(trunk, method).step_together(
        lambda run: {task: (z - 1).square().mean() for task, z in run(vectors()).items()}
    )
    assert most == 2 * (40 * 40 + (0 if method.prioritizes else 40))
    assert combine.call_count == 3
