"""`step_together`: one pass of the trunk for all tasks, against `step` with a pass a task."""

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from networks import (
    AB,
    TASKS,
    Composed,
    Setup,
    assert_equal,
    optimizer_of,
    refused,
    sgd_of,
    started,
    with_gradient,
)
from stacking import (
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
    together,
    trained,
    vectors,
)
from torch import Tensor, nn
from torch.nn.functional import linear

import cs_kernels as cs
from cs_kernels.engine.stacked.together import RunTrunk

pytestmark = pytest.mark.loop


def from_number(_: nn.Module, z: Tensor, task: str) -> Tensor:
    """A loss whose target is the task's number."""
    return (z - 3 * AB.index(task)).square().mean()


@pytest.mark.parametrize("method", [cs.ConnectionStrength(), cs.Sum()], ids=repr)
@pytest.mark.parametrize(
    "schedule", [cs.Joint(), cs.Sequential(), cs.Switch(1), cs.Mixed(2, seed=1, draw="step")]
)
def test_trains_as_step(method: cs.Method, schedule: cs.Schedule) -> None:
    assert_trains_alike(method, schedule, epochs=2)


@pytest.mark.parametrize("method", [None, cs.GradVac(beta=0.5, groups="layer")], ids=repr)
def test_partial_labels(method: cs.Method | None) -> None:
    chosen = [("edges",), ("normals", "depth"), None, ("depth", "edges"), ("normals",)]
    assert_trains_alike(method, tasks=lambda batch: chosen[batch % 5])


@pytest.mark.parametrize(
    "weighting",
    [
        cs.FixedWeights({"depth": 1.0, "normals": 10.0, "edges": 0.1}),
        cs.RandomWeights(seed=2),
        cs.DynamicWeightAverage(),
        cs.UncertaintyWeights(dict.fromkeys(TASKS, "regression")),
    ],
    ids=lambda weighting: type(weighting).__name__,
)
def test_weightings(weighting: cs.Weighting) -> None:
    in_float32 = {"rtol": 1e-5, "atol": 1e-6}  # As the parameters of a weighting are.
    close = in_float32 if weighting.parameters() else CLOSE
    assert_trains_alike(weighting=weighting, epochs=2, close=close)


def test_weighting_by_known_losses() -> None:
    """All losses are known before any is weighed, as after `backward`."""
    trunk = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    options = {"method": cs.Sum(), "weighting": cs.SmoothTchebycheff(0.5, warmup=0)}
    train = partial(trained, trunk, vectors(), loss=from_number, **options)
    found = [train(way)[1] for way in ("backward", "together")]
    torch.testing.assert_close(*found, **CLOSE)


def freeze(*names: str) -> Callable[[Setup, int], None]:
    def change(setup: Setup, batch: int) -> None:
        for name in names:
            setup.trunk.get_submodule(name).requires_grad_(False)

    return change


@pytest.mark.parametrize(
    "change",
    [
        freeze("stem"),
        freeze("block", "up_norm"),
        lambda setup, batch: setup.trunk.block.requires_grad_(batch // 2 % 2 == 1),
        lambda setup, batch: setup.trunk.stem_norm.eval(),
        lambda setup, batch: setup.trunk.to(memory_format=torch.channels_last),
    ],
    ids=["stem", "block", "unfrozen", "eval", "channels_last"],
)
def test_parts_frozen(change: Callable[[Setup, int], object]) -> None:
    assert_trains_alike(change=change)


def behind_a_layer(layer: nn.Module, channels: int, dims: int) -> nn.Module:
    """A layer with a normalization behind it, with another layer before."""
    kind = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d][dims]
    norm = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][dims]
    first = kind(3, 4) if dims == 0 else kind(3, 4, 1)
    return nn.Sequential(first, norm(4), nn.ReLU(), layer, norm(channels))


LAYERS = {
    "linear": (lambda: nn.Linear(4, 6), 6, 0),
    "linear without bias": (lambda: nn.Linear(4, 6, bias=False), 6, 0),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), 6, 1),
    "conv2d": (lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), dilation=(1, 2)), 6, 2),
    "conv3d": (lambda: nn.Conv3d(4, 6, 3, padding=1, bias=False), 6, 3),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), 8, 2),
    "same": (lambda: nn.Conv2d(4, 6, (3, 4), padding="same", dilation=(1, 3)), 6, 2),
    "valid": (lambda: nn.Conv1d(4, 6, 3, padding="valid"), 6, 1),
    "reflect": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), 6, 2),
    "transposed1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), 6, 1),
    "transposed2d": (lambda: nn.ConvTranspose2d(4, 6, 3, padding=1, groups=2), 6, 2),
    "transposed3d": (lambda: nn.ConvTranspose3d(4, 6, 2, dilation=2, bias=False), 6, 3),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    make, channels, dims = LAYERS[name]
    torch.manual_seed(0)
    trunk = converted(behind_a_layer(make(), channels, dims))
    opt = assert_alike(trunk, torch.randn(4, 3, *[7] * dims).double())
    assert len(opt.coverage().prioritized) == 2
    assert opt.report().conflicts.any()


def of_words(p: float = 0.0, mixes: bool = False) -> nn.Module:
    """Embeddings, dropout, a linear layer of three dimensions, and outputs in a dictionary."""

    def run(trunk: Any, inputs: dict[str, Tensor], scale: float = 1.0) -> dict[str, Any]:
        words = inputs["tokens"]
        words = (words + words[:1]) % 9 if mixes else words
        y = trunk.linear(trunk.embedding(words) * inputs["mask"].unsqueeze(-1) * scale)
        y = trunk.norm(y.flatten(0, 1)).unflatten(0, y.shape[:2])
        return {"all": [nn.functional.dropout(y, p)], "size": 3}

    layers = {"embedding": nn.Embedding(9, 4), "linear": nn.Linear(4, 5)}
    return converted(Composed(run, **layers, norm=nn.BatchNorm1d(5)))


def tokens() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"tokens": torch.randint(0, 9, (4, 6)), "mask": torch.rand(4, 6).double()}


def of_tokens(network: nn.Module, z: dict[str, Any], task: str) -> Tensor:
    assert z["size"] == 3
    return from_number(network, z["all"][0], task)


def test_nested_inputs_and_outputs() -> None:
    assert_alike(of_words(), lambda run: run(tokens(), scale=2.0), loss=of_tokens)


def test_dropout_draws_a_mask_a_task() -> None:
    masks: dict[str, Tensor] = {}

    def loss(network: nn.Module, z: dict[str, Any], task: str) -> Tensor:
        masks[task] = z["all"][0] == 0
        return of_tokens(network, z, task)

    def watch(*_: object) -> None:
        assert not torch.equal(*masks.values())
        assert all(0.2 < mask.double().mean() < 0.8 for mask in masks.values())

    trained(of_words(p=0.5), tokens(), "together", loss=loss, watch=watch)


def test_integers_over_the_batch() -> None:
    with pytest.raises(ValueError, match="depends on another's"):
        trained(of_words(mixes=True), tokens(), "together", loss=of_tokens)


@pytest.mark.parametrize("method", [cs.ConnectionStrength(), cs.PCGrad(groups="layer")], ids=repr)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool, method: cs.Method) -> None:
    """Also the statistics, which recomputation updates again."""
    x = pictures().requires_grad_(reentrant)  # As reentrant checkpointing wants it.
    trunk = small()
    opt = assert_alike(checkpointed(reentrant, trunk[:3], trunk[3:]), x, method=method)
    assert len(opt.coverage().prioritized) == 2


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    _, expected = trained(small(), pictures(), "step")
    compiled = partial(torch.compile, backend=backend)
    opt, found = trained(small(), pictures(), "together", trunk=compiled)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert len(opt.coverage().prioritized) == 2


def test_autocast() -> None:
    """In the same types as `step`: what differs is the order of sums of bfloat16 numbers."""
    train = partial(trained, small().float(), pictures().float(), steps=1)

    def step(make: Callable[[], object]) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            make()

    _, exact = train("step")
    _, expected = train("step", step=step)
    _, found = train("together", step=step)
    for one, other, third in zip(expected, found, exact, strict=True):
        assert other.dtype is one.dtype
        error, size = (other - one).double().norm(), one.double().norm()
        assert error <= 0.01 * size + 1e-6
        if one.dim() > 1:  # Autocast has an effect.
            assert (third - one).double().norm() > 1e-4 * size


def triple(loss: Tensor, **options: bool) -> None:
    (loss * 3).backward(**options)


@pytest.mark.parametrize("method", [None, cs.NashMTL(max_norm=0.01, groups="layer")], ids=repr)
@pytest.mark.parametrize("backward", [None, triple])
@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", init_scale=8.0)])
def test_factors_of_the_loss(
    method: cs.Method | None,
    backward: Callable[..., None] | None,
    scaler: torch.amp.GradScaler | None,
) -> None:
    """`max_norm` is one of gradients without the factor, which the backward pass shows."""
    options = {"method": method, "backward": backward, "scaler": scaler}
    close = {"rtol": 1e-4 if method else 1e-5, "atol": 1e-6}
    assert_alike(small().float(), pictures().float(), close=close, **options)


def test_layer_that_first_runs_later() -> None:
    def run(trunk: Composed, x: Tensor) -> Tensor:
        y = trunk.norm(trunk.first(x))
        return y + trunk.other(trunk.second(x)) if trunk.number > 1 else y

    layers = {"first": nn.Linear(3, 4), "second": nn.Linear(3, 4)}
    trunk = Composed(run, **layers, norm=nn.BatchNorm1d(4), other=nn.BatchNorm1d(4))
    opt = assert_alike(converted(trunk), vectors(), loss=from_number, steps=4)
    assert opt.coverage().prioritized == {"first.weight": "norm", "second.weight": "other"}


def test_state_after_an_error() -> None:
    setup, opt = started()
    opt.step_together(together(setup, 0))
    parameters = [*setup.trunk.parameters()]

    def fails(run: RunTrunk) -> dict[str, Tensor]:
        together(setup, 1)(run)
        raise ArithmeticError("the user's")

    def fails_behind(run: RunTrunk) -> dict[str, Tensor]:
        losses = together(setup, 1)(run)
        losses["depth"].register_hook(lambda _: 1 / 0)
        return losses

    for forward, match in ((fails, "the user's"), (fails_behind, "division by zero")):
        with refused(lambda: setup.state(grads=False), ArithmeticError, match):
            opt.step_together(forward)
        assert all(p.grad is None for p in setup.parameters())
        assert all(p is q for p, q in zip(setup.trunk.parameters(), parameters, strict=True))
        assert all("_stack" not in vars(norm) for norm in cs.nn.task_norms(setup.trunk))
    opt.step_together(together(setup, 1))
    again, other = started()
    for batch in range(2):
        other.step_together(together(again, batch))
    assert_equal(setup.state(), again.state())


def _counts(trunk: Any, x: Tensor) -> Tensor:
    trunk.seen += 1
    return trunk.normed(x)


def _over_time(trunk: Any, x: Tensor) -> Tensor:
    """The batch is in dimension 1."""
    y = trunk.layer(x.expand(2, *x.shape))
    return trunk.norm(y.flatten(0, 1)).unflatten(0, y.shape[:2])[0]


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "centers": lambda y: y - y.mean(0),
    "next": lambda y: y + torch.cat([y[1:], y[-1:]]).square(),
    "last": lambda y: y - y[-1:],
    "halves": lambda y: torch.cat([y.chunk(2)[0] - y.chunk(2)[1], y.chunk(2)[1]]),
    "median": lambda y: y * (y > y.median()),
    "nans": lambda y: y - y.nan_to_num().mean(0),
    "sums before": lambda y: y.cumsum(0),
    "sums behind": lambda y: y.flip(0).cumsum(0).flip(0),
}
OF_ANOTHER = "one task's part depends on another's"
ODD: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    name: (lambda odd, x, mix=mix: mix(odd.normed(x)), OF_ANOTHER) for name, mix in MIXES.items()
} | {
    "time": (_over_time, OF_ANOTHER),
    "sorts": (lambda odd, x: odd.normed(x[x[:, 0].argsort()]), OF_ANOTHER),
    "twice": (lambda odd, x: odd.normed(x) + odd.normed(x + 1), "several times"),
    "standardizes": (
        lambda odd, x: odd.normed(x) + odd.norm(linear(x, odd.layer.weight - 1)),
        r"in (sub|__sub__)",
    ),
    "counts": (_counts, "must not change its buffers"),
    "scalar": (
        lambda odd, x: (y := odd.normed(x), y.mean()),
        r"got the output of trunk with a tensor of shape \(\)",
    ),
    "transposes": (lambda odd, x: odd.normed(x).t(), "the output of trunk"),
}


def odd(does: str) -> tuple[nn.Module, cs.MultiTaskOptimizer]:
    """A trunk that does something that a stacked pass cannot serve."""
    trunk = Composed(ODD[does][0], layer=nn.Linear(3, 3), norm=nn.BatchNorm1d(3))
    trunk.register_buffer("seen", torch.zeros(1))
    trunk.normed = lambda x: trunk.norm(trunk.layer(x))
    trunk = converted(trunk)
    return trunk, optimizer_of(trunk)


def of_odd(z: Any) -> Tensor:
    return sum(y.square().mean() for y in (z if isinstance(z, tuple) else (z,)))


def together_of_odd(run: RunTrunk) -> dict[str, Tensor]:
    return {task: of_odd(z) for task, z in run(vectors()).items()}


@pytest.mark.parametrize("does", ODD)
def test_refuses_trunks(does: str) -> None:
    trunk, opt = odd(does)
    with refused(trunk.state_dict, ValueError, ODD[does][1]):
        opt.step_together(together_of_odd)
    opt.step(lambda task: of_odd(trunk(vectors())))


def test_steps_of_one_task_do_not_show_whether_parts_stay_apart() -> None:
    _, opt = odd("centers")
    for task in AB:
        opt.step_together(together_of_odd, [task])
    with pytest.raises(ValueError, match=OF_ANOTHER):
        opt.step_together(together_of_odd)


sign = with_gradient(Tensor.sign, lambda grad: grad)


@pytest.mark.parametrize("of", [lambda w: w - w.mean(1, keepdim=True), sign])
def test_weight_that_is_no_layers_may_be_used_in_any_way(of: Callable[[Tensor], Tensor]) -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return linear(x, of(self.weight), self.bias)

    trunk = converted(nn.Sequential(Own(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.BatchNorm1d(5)))
    opt = assert_alike(trunk, vectors())
    assert list(opt.coverage().prioritized) == ["2.weight"]
    with pytest.raises(ValueError, match=r"use 0\.weight "):
        trained(converted(nn.Sequential(Own(3, 4), nn.BatchNorm1d(4))), vectors(), "together")


def test_arguments_by_name_and_types_of_weights() -> None:
    class Named(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert isinstance(self.weight, nn.Parameter)
            x = x.float().to(self.weight).type_as(self.weight) + self.weight.new_zeros(3)
            return linear(input=x, weight=self.weight, bias=self.bias)

    trunk = Composed(
        lambda trunk, x: trunk.norm(input=trunk.linear(x)),
        linear=Named(3, 4),
        norm=nn.BatchNorm1d(4),
    )
    opt = assert_alike(converted(trunk), vectors())
    assert list(opt.coverage().prioritized) == ["linear.weight"]


@pytest.mark.parametrize("steps", [0, 1])
def test_weight_in_a_loss(steps: int) -> None:
    """In the first step, and in a later one, when graphs are not searched."""
    trunk, x = small(), pictures()
    opt, weight = optimizer_of(trunk), trunk[3].weight
    for _ in range(steps):
        opt.step_together(squares(x))
    for decay, match in (
        (lambda: weight.square().sum(), r"3\.weight .*by the loss of 'b'"),
        (lambda: trunk[3].weight.square().sum(), r"3\.weight .*in square"),
    ):
        with pytest.raises(ValueError, match=match):
            opt.step_together(
                lambda run, decay=decay: {
                    t: loss + (decay() if t == "b" else 0) for t, loss in squares(x)(run).items()
                }
            )


def test_losses_must_be_of_their_own_outputs() -> None:
    trunk, x = small(), pictures()
    free = nn.Parameter(torch.ones(2))
    opt = optimizer_of(trunk)
    held = cs.MultiTaskOptimizer(trunk, torch.optim.SGD([*trunk.parameters(), free], lr=0.1), AB)

    def crossed(run: RunTrunk, of: Callable[[Tensor], Tensor] = lambda z: z) -> dict[str, Tensor]:
        z = run(x)
        return {"a": z["a"].square().mean(), "b": (z["b"] - of(z["a"])).square().mean()}

    for one, forward, match in (
        (opt, crossed, "one for 'b' that depends on those of 'a'"),
        (held, lambda run: dict.fromkeys(run(x), free.sum()), "depends on none"),
        (opt, lambda run: {"a": run(x)["a"].mean()}, r"every task, \['a', 'b'\], got"),
        (opt, lambda run: run(x), "must hold a real scalar"),
        (opt, lambda run: {t: (z * free[0]).mean() for t, z in run(x).items()}, "must hold every"),
    ):
        with refused(trunk.state_dict, ValueError, match):
            one.step_together(forward)
    assert list(opt.step_together(partial(crossed, of=Tensor.detach))) == AB


def test_refuses_methods_and_settings() -> None:
    x, trunk = pictures(), small()
    for options, match in (
        ({"method": cs.PCGrad()}, r"got PCGrad\(.*\): use step"),
        ({"method": cs.Sum(separate=True)}, "never has all gradients"),
        ({"weighting": cs.FAMO()}, "must not compute losses again"),
    ):
        with pytest.raises(ValueError, match=match):
            optimizer_of(trunk, **options).step_together(squares(x))
    with pytest.raises(TypeError, match="forward must be a function"):
        optimizer_of(trunk).step_together({"a": x.sum()})
    plain = nn.Sequential(small(), nn.BatchNorm2d(5)).double()
    opt = optimizer_of(plain)
    with pytest.raises(ValueError, match=r"no batch normalization in training .* got 1:"):
        opt.step_together(squares(x))
    plain[1].eval()
    opt.step_together(squares(x))
    for inputs, sizes in (
        ((x, x[:2]), r"\(2,\), \(4,\)"),
        ((x, x.sum()), r"\(\), \(4,\)"),
        ((), ""),
    ):
        with pytest.raises(ValueError, match=rf"got the sizes \[{sizes}\]"):
            opt.step_together(lambda run, inputs=inputs: dict(run(*inputs)))


def test_a_task_at_a_time_in_phase_1() -> None:
    opt, x, seen = optimizer_of(small(), schedule=cs.Sequential()), pictures(), []

    def forward(run: RunTrunk) -> dict[str, Tensor]:
        losses = squares(x)(run)
        seen.append(list(losses))
        return losses

    assert list(opt.step_together(forward)) == AB
    assert seen == [["a"], ["b"]]

    with pytest.raises(KeyError, match="b") as caught:
        opt.step_together(lambda run: {"a": run(x)["a"].mean(), "b": run(x)["b"].mean()})
    assert "iterate over its items" in caught.value.__notes__[0]


def test_task_norm_in_heads() -> None:
    def loss(network: nn.ModuleDict, z: Tensor, task: str) -> Tensor:
        cs.nn.set_task(network["head"], task)
        return network["head"](z).sin().mean()

    network = nn.ModuleDict({"trunk": small(), "head": converted(nn.Sequential(nn.BatchNorm2d(5)))})
    assert_alike(network, pictures(), loss=loss, trunk=lambda network: network["trunk"])


def test_statistics_of_heads_are_restored() -> None:
    trunk = small()
    heads = nn.ModuleDict({t: nn.BatchNorm2d(5) for t in AB}).double()
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk, heads), AB)

    def losses(run: RunTrunk) -> dict[str, Tensor]:
        return {t: heads[t](z).square().mean() + z.mean() for t, z in run(pictures()).items()}

    def fails(run: RunTrunk) -> dict[str, Tensor]:
        raise ArithmeticError(losses(run))

    for _ in range(2):
        with refused(heads.state_dict, ArithmeticError, "a"):
            opt.step_together(fails)
        opt.step_together(losses)


def test_order_of_tasks_and_a_single_one() -> None:
    for names in itertools.permutations(["a", "b", "c"]):
        trunk = small()
        cs.nn.add_task(trunk, "c", like="a")
        assert_alike(trunk, pictures(), tasks=list(names), steps=1)
    trunk = converted(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), ["a"])
    assert_alike(trunk, vectors(), tasks=["a"])


def test_trunk_that_changes_its_input() -> None:
    """The first layer reads what is there now."""
    trunk = converted(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 4), nn.BatchNorm1d(4)))
    assert_alike(trunk, lambda run: run(vectors()), loss=from_number)


# Before the first normalization, the tasks' batches are the same, and a sum sees no difference.
@pytest.mark.parametrize(
    ("method", "inside"),
    [(cs.ConnectionStrength(), 0), (cs.ConnectionStrength(), 1), (cs.Sum(), 1)],
    ids=repr,
)
def test_tensors_past_run(method: cs.Method, inside: int) -> None:
    """They have the batches of all tasks."""
    trunk = small()
    kept: list[Tensor] = []
    trunk[inside].register_forward_hook(lambda _, __, output: kept.append(output))
    with pytest.raises(ValueError, match="another tensor of the trunk"):
        optimizer_of(trunk, method).step_together(
            lambda run: {
                t: loss + kept[-1].square().mean() for t, loss in squares(pictures())(run).items()
            }
        )


# In the second case, the same outputs are used in the same order, by other tasks.
@pytest.mark.parametrize("batches", [["ab"], ["ab", "bc"], ["a", "b", "ca"]])
def test_outputs_that_a_task_does_not_use(batches: list[str]) -> None:
    """Parameters that a task does not reach have no gradient: momentum and decay leave them."""
    seen: list[object] = []

    def chosen(number: int) -> list[str]:
        return [*batches[number % len(batches)]]

    def loss(network: nn.Module, z: list[Tensor], task: str) -> Tensor:
        total = z[chosen(network.number).index(task)].sin().mean()
        return total + z[0].cos().mean() if network.number > 4 and task == "b" else total

    def watch(opt: cs.MultiTaskOptimizer, network: nn.Module) -> None:
        seen.append((str(opt.coverage()), [p.grad is None for p in network.parameters()]))

    tasks = sorted(set("".join(batches)))
    torch.manual_seed(0)
    assert_alike(
        converted(branches(), tasks),
        vectors(),
        steps=8,
        tasks=tasks,
        loss=loss,
        chosen=chosen,
        watch=watch,
        optimizer=partial(torch.optim.AdamW, weight_decay=0.1),
        close={"rtol": 1e-7, "atol": 1e-9},
    )
    assert seen[:8] == seen[8:]
    assert any(any(without) for _, without in seen)


@LAYERWISE
def test_nothing_stays_in_memory(method: cs.Method) -> None:
    trunk = small()
    opt = optimizer_of(trunk, method)
    alive: list[weakref.ref[Tensor]] = []

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
    assert all("_stack" not in vars(norm) for norm in cs.nn.task_norms(trunk))


@LAYERWISE
def test_no_circles_are_left(method: cs.Method) -> None:
    """Python frees the tensors of a step at once, and not when it next looks for circles."""
    opt = optimizer_of(small(), method)

    def tensors_after_a_step() -> int:
        opt.step_together(squares(pictures()))
        return sum(issubclass(type(found), Tensor) for found in gc.get_objects())

    tensors_after_a_step()
    gc.collect()
    gc.disable()
    try:
        assert tensors_after_a_step() == tensors_after_a_step()
    finally:
        gc.enable()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_weights(register: str) -> None:
    trunk = small()
    getattr(trunk[3].weight, register)(lambda given: None)
    with pytest.raises(ValueError, match=r"no hook on 3\.weight "):
        optimizer_of(trunk).step_together(squares(pictures()))


def test_forward_that_runs_other_things() -> None:
    trunk, x = small(), pictures()
    opt = optimizer_of(trunk)

    def direct(run: RunTrunk) -> dict[str, Tensor]:
        return {t: z.square().mean() + trunk(x).mean() for t, z in run(x).items()}

    def steps_back(run: RunTrunk) -> dict[str, Tensor]:
        losses = squares(x)(run)
        losses["a"].backward(retain_graph=True)
        return losses

    for forward, error, match in (
        (direct, ValueError, "forward must run trunk by run"),
        (steps_back, RuntimeError, "leave out backward"),
        (lambda run: run(y for y in [x]), ValueError, "run must get tensors in lists"),
    ):
        with pytest.raises(error, match=match):
            opt.step_together(forward)
        assert all(p.grad is None for p in trunk.parameters())
    trunk.register_forward_hook(lambda _, __, output: SimpleNamespace(z=output))
    with pytest.raises(ValueError, match="trunk must return tensors in lists"):
        opt.step_together(lambda run: {t: z.z.mean() for t, z in run(x).items()})


def test_run_called_twice() -> None:
    """Also in the step that checks again; a weight that is prioritized runs once."""
    x = pictures()

    def twice(run: Callable[[Tensor], Any]) -> Any:
        z, y = run(x), run(x + 1)
        return {t: (z[t], y[t]) for t in z} if isinstance(z, dict) else (z, y)

    def loss(_: nn.Module, outputs: tuple[Tensor, Tensor], task: str) -> Tensor:
        return outputs[0].sin().mean() + outputs[1].cos().mean()

    close = {"rtol": 1e-9, "atol": 1e-9}
    assert_alike(small(), twice, loss=loss, steps=34, lr=1e-3, method=cs.Sum(), close=close)


def test_heads_in_trunk() -> None:
    x = vectors()[:5]  # An odd batch.
    assert_alike(converted(head()), x, loss=of_head)


def _normed(head: nn.Module) -> tuple[nn.Module, nn.ModuleDict, cs.MultiTaskOptimizer]:
    trunk = converted(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)))
    heads = nn.ModuleDict({task: copy.deepcopy(head) for task in AB}).double()
    return trunk, heads, cs.MultiTaskOptimizer(trunk, sgd_of(trunk, heads), AB)


def test_a_head_that_begins_in_place() -> None:
    """Torch's own sentence is about views."""
    trunk, heads, opt = _normed(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 1)))

    def forward(run: RunTrunk) -> dict[str, Tensor]:
        return {task: heads[task](z).square().mean() for task, z in run(vectors()).items()}

    with refused(trunk.state_dict, ValueError, r"ReLU\(inplace=True\) does: use step"):
        opt.step_together(forward)
    opt.step(lambda task: heads[task](trunk(vectors())).square().mean())


@pytest.mark.parametrize("of", ["input", "weight"])
def test_a_gradient_penalty(of: str) -> None:
    """It would need the layers' second derivatives."""
    trunk, heads, opt = _normed(nn.Linear(4, 1))
    x = vectors().requires_grad_()

    def loss(task: str, z: Tensor) -> Tensor:
        loss = heads[task](z).square().mean()
        penalized = x if of == "input" else trunk[0].weight
        (grad,) = torch.autograd.grad(loss, penalized, create_graph=True)
        result: Tensor = loss + grad.square().sum()
        return result

    with refused(trunk.state_dict, ValueError, "as for a gradient penalty: use step"):
        opt.step_together(lambda run: {task: loss(task, z) for task, z in run(x).items()})
    opt.step(lambda task: loss(task, trunk(x)))


def test_a_refused_pass_notes_for_no_task_what_it_reaches() -> None:
    """Whichever task is checked first."""
    setup = Setup()
    held = [*setup.trunk.parameters(), *setup.heads["depth"].parameters()]
    opt = cs.MultiTaskOptimizer(setup.trunk, torch.optim.SGD(held, lr=0.1), TASKS)
    before = opt.state_dict()["reach"]
    with pytest.raises(ValueError, match="optimizer must hold every parameter that a loss depends"):
        opt.step_together(together(setup, 0))
    assert opt.state_dict()["reach"] == before


@pytest.mark.parametrize("training", [True, False])
def test_a_stem_that_ran_before_the_check_of_the_parts(training: bool) -> None:
    """The check restores its statistics without a trace in its graph, and so does a failed step."""
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double().train(training)
    trunk = converted(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    parameters = [*stem.parameters(), *trunk.parameters()]
    opt = cs.MultiTaskOptimizer(trunk, torch.optim.SGD(parameters, lr=0.1), AB)
    opt.step_together(lambda run: squares(stem(vectors()))(run))
    assert stem[0].weight.grad is not None
    trunk[0].bias.requires_grad_(False)  # The next step checks the parts again.
    before = copy.deepcopy(stem.state_dict())

    def fails(run: RunTrunk) -> dict[str, Tensor]:
        squares(stem(vectors()))(run)
        raise KeyError("a")

    with pytest.raises(KeyError):
        opt.step_together(fails)
    assert_equal(stem.state_dict(), before)
