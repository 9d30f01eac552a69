"""`step_together`: one pass of the trunk for all tasks, against `step` with a pass a task."""

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from networks import AB, TASKS, Setup, assert_equal, refused, sgd_of
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

import cs_kernels as cs
from cs_kernels.engine.stacked.mode import RunTrunk

pytestmark = pytest.mark.loop


@pytest.mark.parametrize("method", [cs.ConnectionStrength(), cs.Sum()], ids=repr)
@pytest.mark.parametrize(
    "schedule", [cs.Joint(), cs.Sequential(), cs.Switch(1), cs.Mixed(2, seed=1, draw="step")]
)
def test_trains_as_step(method: cs.Method, schedule: cs.Schedule) -> None:
    assert_trains_alike(method, schedule, epochs=2)


def test_partial_labels() -> None:
    chosen = [("edges",), ("normals", "depth"), None, ("depth", "edges"), ("normals",)]
    assert_trains_alike(tasks=lambda batch: chosen[batch % 5])


@pytest.mark.parametrize(
    "weighting",
    [
        cs.FixedWeights({"depth": 1.0, "normals": 10.0, "edges": 0.1}),
        cs.RandomWeights(seed=2),
        cs.DynamicWeightAverage(),
    ],
    ids=lambda weighting: type(weighting).__name__,
)
def test_weightings(weighting: cs.Weighting) -> None:
    assert_trains_alike(weighting=weighting, epochs=2)


def test_weighting_by_known_losses() -> None:
    """All losses are known before any is weighed, as after `backward`."""
    torch.manual_seed(0)
    trunk, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.ones(5, 3)
    found = []
    for way in ("backward", "together"):
        own = copy.deepcopy(trunk)
        sgd = sgd_of(own)
        opt = cs.MultiTaskOptimizer(
            own, sgd, AB, cs.Sum(), weighting=cs.SmoothTchebycheff(0.5, warmup=0)
        )
        opt.start_epoch(0)
        for _ in range(3):
            if way == "backward":
                z = own(x.double())
                opt.backward({"a": z.square().mean(), "b": (z - 3).square().mean()})
                sgd.step()
            else:
                opt.step_together(
                    lambda run: {
                        t: (z - 3 * AB.index(t)).square().mean() for t, z in run(x.double()).items()
                    }
                )
        found.append([*own.parameters()])
    torch.testing.assert_close(*found, **CLOSE)


def test_uncertainty() -> None:
    def train(way: str) -> list[Tensor]:
        setup = setup_of_sgd()
        weighting = cs.UncertaintyWeights(dict.fromkeys(TASKS, "regression"))
        setup.optimizer.add_param_group({"params": [*weighting.parameters()]})
        opt = setup.start(weighting=weighting)
        for batch in range(4):
            if way == "step":
                opt.step(setup.closure(batch))
            else:
                opt.step_together(together(setup, batch))
        return [*setup.state(), *weighting.parameters()]

    # The weighting's parameters are float32.
    torch.testing.assert_close(train("together"), train("step"), rtol=1e-5, atol=1e-6)


def freeze(*names: str) -> Callable[[Setup], None]:
    def change(setup: Setup) -> None:
        for name in names:
            setup.trunk.get_submodule(name).requires_grad_(False)

    return change


@pytest.mark.parametrize(
    "change",
    [
        freeze("stem"),
        freeze("block", "up_norm"),
        lambda setup: setup.trunk.stem_norm.eval(),
        lambda setup: setup.trunk.to(memory_format=torch.channels_last),
    ],
    ids=["stem", "block", "eval", "channels_last"],
)
def test_parts_frozen(change: Callable[[Setup], None]) -> None:
    assert_trains_alike(change=change)


def test_unfrozen_in_training() -> None:
    """The layers are found anew."""
    first, second = setup_of_sgd(), setup_of_sgd()
    one, other = first.start(), second.start()
    for batch in range(8):
        for setup in (first, second):
            setup.trunk.block.requires_grad_(batch // 2 % 2 == 1)
        one.step(first.closure(batch))
        other.step_together(together(second, batch))
        torch.testing.assert_close(second.state(), first.state(), **CLOSE)


class Layers(nn.Module):
    """A layer with a normalization behind it, with another layer before."""

    def __init__(self, layer: nn.Module, channels: int, dims: int) -> None:
        super().__init__()
        kind = {0: nn.Linear, 1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
        norm = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims]
        self.first = kind(3, 4) if dims == 0 else kind(3, 4, 1)
        self.first_norm = norm(4)
        self.layer = layer
        self.norm = norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first_norm(self.first(x)))
        result: Tensor = self.norm(self.layer(x))
        return result


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
    trunk = converted(Layers(make(), channels, dims))
    opt = assert_alike(trunk, torch.randn(4, 3, *[7] * dims).double())
    assert len(opt.coverage().prioritized) == 2
    assert opt.report().conflicts.any()


class Tokens(nn.Module):
    """Embeddings, dropout, a linear layer of three dimensions, and outputs in a dictionary."""

    def __init__(self, p: float = 0.0, order: str = "batch") -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.linear = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.dropout = nn.Dropout(p)
        self.order = order

    def forward(self, inputs: dict[str, Tensor], scale: float = 1.0) -> dict[str, Any]:
        x = self.embedding(inputs["tokens"]) * inputs["mask"].unsqueeze(-1) * scale
        if self.order == "time":
            x = x.transpose(0, 1)
        y = self.linear(x)
        y = self.norm(y.flatten(0, 1)).unflatten(0, y.shape[:2])
        return {"all": [self.dropout(y)], "size": 3}


def tokens() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"tokens": torch.randint(0, 9, (4, 6)), "mask": torch.rand(4, 6).double()}


def losses_of(outputs: dict[str, Any]) -> dict[str, Tensor]:
    assert all(z["size"] == 3 for z in outputs.values())
    return {task: (z["all"][0] - n).square().mean() for n, (task, z) in enumerate(outputs.items())}


def test_nested_inputs_and_outputs() -> None:
    states = []
    for way in ("step", "together"):
        torch.manual_seed(2)
        trunk = converted(Tokens())
        opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB)
        for _ in range(2):
            if way == "step":
                opt.step(
                    lambda t: (trunk(tokens(), scale=2.0)["all"][0] - AB.index(t)).square().mean()
                )
            else:
                opt.step_together(lambda run: losses_of(run(tokens(), scale=2.0)))
        states.append(trunk.state_dict())
    torch.testing.assert_close(*states, **CLOSE)


def test_dropout_draws_a_mask_a_task() -> None:
    trunk = converted(Tokens(p=0.5))
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB)
    masks = {}

    def forward(run: RunTrunk) -> dict[str, Tensor]:
        outputs = run(tokens())
        masks.update({task: z["all"][0] == 0 for task, z in outputs.items()})
        return losses_of(outputs)

    for _ in range(2):
        opt.step_together(forward)
        assert not torch.equal(*masks.values())
        assert all(0.2 < mask.double().mean() < 0.8 for mask in masks.values())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool) -> None:
    """Also the statistics, which recomputation updates again."""
    x = pictures().requires_grad_(reentrant)  # As reentrant checkpointing wants it.
    opt = assert_alike(Checkpointed(small(), reentrant), x)
    assert len(opt.coverage().prioritized) == 2


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    x = pictures()
    _, expected = trained(small(), x, "step")
    trunk = small()
    compiled = torch.compile(trunk, backend=backend)
    opt = cs.MultiTaskOptimizer(compiled, sgd_of(trunk, lr=0.02), AB)

    def loss(z: Tensor, task: str) -> Tensor:
        at = torch.linspace(-1, 2, z.numel(), dtype=z.dtype).view(z.shape)
        return (z * (at if task == "a" else 0.3 * at.flip(-1) - at)).tanh().mean()

    for _ in range(3):
        opt.step_together(lambda run: {t: loss(z, t) for t, z in run(x).items()})
    found = [*trunk.state_dict().values(), *(p.grad for p in trunk.parameters())]
    torch.testing.assert_close(found, expected, **CLOSE)
    assert len(opt.coverage().prioritized) == 2


def test_autocast() -> None:
    """In the same types as `step`: what differs is the order of sums of bfloat16 numbers."""
    trunk, x = small().float(), pictures().float()

    def step(make: Callable[[], object]) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            make()

    _, exact = trained(trunk, x, "step", steps=1)
    _, expected = trained(trunk, x, "step", steps=1, step=step)
    _, found = trained(trunk, x, "together", steps=1, step=step)
    for one, other, third in zip(expected, found, exact, strict=True):
        assert other.dtype is one.dtype
        error, size = (other - one).double().norm(), one.double().norm()
        assert error <= 0.01 * size + 1e-6
        if one.dim() > 1:  # Autocast has an effect.
            assert (third - one).double().norm() > 1e-4 * size


def test_scaler_and_backward() -> None:
    def factor(loss: Tensor, **options: bool) -> None:
        (loss * 3).backward(**options)

    trunk, x = small().float(), pictures().float()
    for options in ({"scaler": lambda: torch.amp.GradScaler("cpu", init_scale=8.0)}, {}):
        made = [{k: make() for k, make in options.items()} for _ in range(2)]
        _, expected = trained(trunk, x, "step", **made[0])
        _, found = trained(trunk, x, "together", **made[1])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    one, _ = trained(trunk, x, "step", backward=factor, steps=1)
    other, _ = trained(trunk, x, "together", backward=factor, steps=1)
    torch.testing.assert_close(other.report().removed, one.report().removed, rtol=1e-4, atol=1e-6)


def test_layer_that_first_runs_later() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(3, 4)
            self.norm = nn.BatchNorm1d(4)
            self.other = nn.BatchNorm1d(4)
            self.late = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.first(x))
            return y + self.other(self.second(x)) if self.late else y

    states = []
    for way in ("step", "together"):
        torch.manual_seed(2)
        trunk = converted(Late())
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).double()
        opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB)
        for step in range(4):
            trunk.late = step > 1
            if way == "step":
                opt.step(lambda t: (trunk(x) - AB.index(t) * x[:, :1]).square().mean())
            else:
                opt.step_together(
                    lambda run: {
                        t: (z - AB.index(t) * x[:, :1]).square().mean() for t, z in run(x).items()
                    }
                )
        states.append((trunk.state_dict(), opt.coverage().prioritized))
    torch.testing.assert_close(states[0][0], states[1][0], **CLOSE)
    assert states[0][1] == states[1][1] == {"first.weight": "norm", "second.weight": "other"}


def test_state_after_an_error() -> None:
    setup = setup_of_sgd()
    opt = setup.start()
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
    again = setup_of_sgd()
    other = again.start()
    for batch in range(2):
        other.step(again.closure(batch))
    torch.testing.assert_close(setup.state(), again.state(), **CLOSE)


class Odd(nn.Module):
    """A trunk that does something that a stacked pass cannot serve."""

    def __init__(self, does: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.plain = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(1))
        self.does = does

    def forward(self, x: Tensor) -> Any:
        if self.does == "time":  # The batch in dimension 1.
            y = self.layer(x.unsqueeze(0).expand(2, *x.shape))
            return self.norm(y.flatten(0, 1)).unflatten(0, y.shape[:2])[0]
        if self.does == "sorts":
            x = x[x[:, 0].argsort()]
        y = self.norm(self.layer(x))
        if self.does == "twice":
            y = y + self.norm(self.layer(x + 1))
        elif self.does == "standardizes":
            y = y + self.norm(nn.functional.linear(x, self.layer.weight - self.layer.weight.mean()))
        elif self.does in MIXES:
            y = MIXES[self.does](y)
        elif self.does == "counts":
            self.seen += 1
        elif self.does == "scalar":
            return y, y.square().mean()
        elif self.does == "transposes":
            return y.t()
        return y


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "centers": lambda y: y - y.mean(0),
    "next": lambda y: y + torch.cat([y[1:], y[-1:]]).square(),
    "last": lambda y: y - y[-1:],
    "halves": lambda y: torch.cat([y.chunk(2)[0] - y.chunk(2)[1], y.chunk(2)[1]]),
    "median": lambda y: y * (y > y.median()),
    "nans": lambda y: y - y.nan_to_num().mean(0),
    "cumsum": lambda y: y.flip(0).cumsum(0).flip(0),
}
ODD = {
    **dict.fromkeys(MIXES, "one task's part depends on another's"),
    "time": "one task's part depends on another's",
    "sorts": "one task's part depends on another's",
    "twice": "several times",
    "standardizes": r"in (sub|__sub__|mean)",
    "counts": "must not change its buffers",
    "scalar": r"got the output of trunk with a tensor of shape \(\)",
    "transposes": "the output of trunk",
}


def odd(does: str) -> tuple[nn.Module, cs.MultiTaskOptimizer]:
    trunk = Odd(does)
    trunk.plain.eval()
    own = trunk.plain
    del trunk.plain
    trunk = converted(trunk)
    trunk.plain = own.double()
    return trunk, cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB)


def of_odd(z: Any) -> Tensor:
    return sum(y.square().mean() for y in (z if isinstance(z, tuple) else (z,)))


@pytest.mark.parametrize("does", ODD)
def test_refuses_trunks(does: str) -> None:
    trunk, opt = odd(does)
    x = torch.randn(6, 3).double()

    def state() -> list[Tensor]:
        return [t.clone() for t in trunk.state_dict().values()]

    with refused(state, ValueError, ODD[does]):
        opt.step_together(lambda run: {t: of_odd(z) for t, z in run(x).items()})
    opt.step(lambda task: of_odd(trunk(x)))


def test_steps_of_one_task_do_not_show_whether_parts_stay_apart() -> None:
    _, opt = odd("centers")
    x = torch.randn(6, 3).double()

    def forward(run: RunTrunk) -> dict[str, Tensor]:
        return {t: of_odd(z) for t, z in run(x).items()}

    for task in AB:
        opt.step_together(forward, [task])
    with pytest.raises(ValueError, match="one task's part depends on another's"):
        opt.step_together(forward)


def test_weight_that_is_no_layers_may_be_used_in_any_way() -> None:
    class Standardized(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight - self.weight.mean(1, keepdim=True)
            return nn.functional.linear(x, weight, self.bias)

    trunk = converted(
        nn.Sequential(Standardized(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.BatchNorm1d(5))
    )
    opt = assert_alike(trunk, torch.randn(6, 3).double())
    assert list(opt.coverage().prioritized) == ["2.weight"]


@pytest.mark.parametrize("once", [True, False])
def test_weight_in_a_loss(once: bool) -> None:
    """In the first step, and in a later one, when graphs are not searched."""
    trunk = small()
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB)
    x = pictures()
    if not once:
        opt.step_together(lambda run: {t: z.square().mean() for t, z in run(x).items()})
    weight = trunk[3].weight
    with pytest.raises(ValueError, match=r"3\.weight .*by the loss of 'b'"):
        opt.step_together(
            lambda run: {
                t: z.square().mean() + (weight.square().sum() if t == "b" else 0)
                for t, z in run(x).items()
            }
        )
    with pytest.raises(ValueError, match=r"3\.weight .*in square"):
        opt.step_together(
            lambda run: {
                t: z.square().mean() + trunk[3].weight.square().sum() for t, z in run(x).items()
            }
        )


def test_losses_must_be_of_their_own_outputs() -> None:
    trunk = small()
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB)
    x = pictures()

    def crossed(run: RunTrunk) -> dict[str, Tensor]:
        z = run(x)
        return {"a": z["a"].square().mean(), "b": (z["b"] - z["a"]).square().mean()}

    free = nn.Parameter(torch.ones(2))
    held = cs.MultiTaskOptimizer(trunk, torch.optim.SGD([*trunk.parameters(), free], lr=0.1), AB)

    def run_it(run: RunTrunk) -> dict[str, Tensor]:
        return run(x)

    state = lambda: [t.clone() for t in trunk.state_dict().values()]  # noqa: E731
    for one, forward, match in (
        (opt, crossed, "one for 'b' that depends on those of 'a'"),
        (held, lambda run: dict.fromkeys(run(x), free.sum()), "depends on none"),
        (opt, lambda run: {"a": run(x)["a"].mean()}, r"every task, \['a', 'b'\], got"),
        (opt, run_it, "must hold a real scalar"),
        (opt, lambda run: {t: (z * free[0]).mean() for t, z in run(x).items()}, "must hold every"),
    ):
        with refused(state, ValueError, match):
            one.step_together(forward)
    z = run_detached = opt.step_together(
        lambda run: (
            lambda z: {"a": z["a"].square().mean(), "b": (z["b"] - z["a"].detach()).square().mean()}
        )(run(x))
    )
    assert list(z) == list(run_detached) == AB


def test_refuses_methods_and_settings() -> None:
    x = pictures()

    def step(opt: cs.MultiTaskOptimizer) -> None:
        opt.step_together(lambda run: {t: z.square().mean() for t, z in run(x).items()})

    trunk = small()
    given = trunk, sgd_of(trunk), AB
    for opt, match in (
        (cs.MultiTaskOptimizer(*given, cs.PCGrad()), r"got PCGrad\(.*\): use step"),
        (cs.MultiTaskOptimizer(*given, cs.Sum(separate=True)), "never has all gradients"),
        (cs.MultiTaskOptimizer(*given, weighting=cs.FAMO()), "must not compute losses again"),
    ):
        with pytest.raises(ValueError, match=match):
            step(opt)
    with pytest.raises(TypeError, match="forward must be a function"):
        cs.MultiTaskOptimizer(*given).step_together({"a": x.sum()})
    plain = nn.Sequential(small(), nn.BatchNorm2d(5)).double()
    opt = cs.MultiTaskOptimizer(plain, sgd_of(plain), AB)
    with pytest.raises(ValueError, match=r"no batch normalization in training .* got 1:"):
        step(opt)
    plain[1].eval()
    step(opt)
    for inputs, match in (
        ((x, x[:2]), r"got the sizes \[\(2,\), \(4,\)\]"),
        ((x, x.sum()), r"got the sizes \[\(\), \(4,\)\]"),
        ((), r"got the sizes \[\]"),
    ):
        with pytest.raises(ValueError, match=match):
            opt.step_together(lambda run, inputs=inputs: dict(run(*inputs)))


def test_a_task_at_a_time_in_phase_1() -> None:
    trunk = small()
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, schedule=cs.Sequential())
    x = pictures()
    seen = []

    def forward(run: RunTrunk) -> dict[str, Tensor]:
        z = run(x)
        seen.append(list(z))
        return {t: y.square().mean() for t, y in z.items()}

    assert list(opt.step_together(forward)) == AB
    assert seen == [["a"], ["b"]]

    with pytest.raises(KeyError, match="b") as caught:
        opt.step_together(lambda run: {"a": run(x)["a"].mean(), "b": run(x)["b"].mean()})
    assert "iterate over its items" in caught.value.__notes__[0]


def test_task_norm_in_heads() -> None:
    states = []
    for way in ("step", "together"):
        trunk, head = small(), converted(nn.Sequential(nn.BatchNorm2d(5)))
        opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk, head), AB)
        for _ in range(2):
            if way == "step":
                opt.step(lambda t: _active(head, t)(trunk(pictures())).sin().mean())
            else:
                opt.step_together(
                    lambda run: {
                        t: _active(head, t)(z).sin().mean() for t, z in run(pictures()).items()
                    }
                )
        states.append([*trunk.state_dict().values(), *head.state_dict().values()])
    torch.testing.assert_close(*states, **CLOSE)


def _active(module: nn.Module, task: str) -> nn.Module:
    cs.nn.set_task(module, task)
    return module


def test_statistics_of_heads_are_restored() -> None:
    trunk = small()
    heads = nn.ModuleDict({t: nn.BatchNorm2d(5) for t in AB}).double()
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk, heads), AB)

    def losses(run: RunTrunk, fails: bool) -> dict[str, Tensor]:
        found = {t: heads[t](z).square().mean() + z.mean() for t, z in run(pictures()).items()}
        if fails:
            raise ArithmeticError
        return found

    for fails in (True, False, True):
        before = copy.deepcopy(heads.state_dict())
        if not fails:
            opt.step_together(lambda run: losses(run, False))
            continue
        with pytest.raises(ArithmeticError):
            opt.step_together(lambda run: losses(run, True))
        assert_equal(heads.state_dict(), before)


def test_order_of_tasks_and_a_single_one() -> None:
    x = pictures()
    for names in itertools.permutations(["a", "b", "c"]):
        trunk = small()
        cs.nn.add_task(trunk, "c", like="a")
        _, expected = trained(trunk, x, "step", tasks=list(names), steps=1)
        _, found = trained(trunk, x, "together", tasks=list(names), steps=1)
        torch.testing.assert_close(found, expected, **CLOSE)
    trunk = converted(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), ["a"])
    assert_alike(trunk, torch.randn(5, 3).double(), tasks=["a"])


def test_trunk_that_changes_its_input() -> None:
    """The first layer reads what is there now."""
    torch.manual_seed(0)
    trunk = converted(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 4), nn.BatchNorm1d(4)))
    x = torch.randn(6, 3).double()
    states = []
    for way in ("step", "together"):
        own = copy.deepcopy(trunk)
        opt = cs.MultiTaskOptimizer(own, sgd_of(own), AB)
        for _ in range(2):
            if way == "step":
                opt.step(lambda t: (own(x.clone()) - AB.index(t)).square().mean())
            else:
                opt.step_together(
                    lambda run: {
                        t: (z - AB.index(t)).square().mean() for t, z in run(x.clone()).items()
                    }
                )
        states.append(own.state_dict())
    torch.testing.assert_close(*states, **CLOSE)


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
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, method)
    with pytest.raises(ValueError, match="another tensor of the trunk"):
        opt.step_together(
            lambda run: {
                t: z.square().mean() + kept[-1].square().mean() for t, z in run(pictures()).items()
            }
        )


def test_integers_over_the_batch() -> None:
    class Mixed(Tokens):
        def forward(self, inputs: dict[str, Tensor], scale: float = 1.0) -> dict[str, Any]:
            tokens = inputs["tokens"]
            return super().forward({**inputs, "tokens": (tokens + tokens[:1]) % 9}, scale)

    trunk = converted(Mixed())
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB)
    with pytest.raises(ValueError, match="depends on another's"):
        opt.step_together(lambda run: losses_of(run(tokens())))


# In the second case, the same outputs are used in the same order, by other tasks.
@pytest.mark.parametrize("batches", [["ab"], ["ab", "bc"], ["a", "b", "ca"]])
def test_outputs_that_a_task_does_not_use(batches: list[str]) -> None:
    """Parameters that a task does not reach have no gradient: momentum and decay leave them."""
    torch.manual_seed(0)
    tasks = sorted(set("".join(batches)))
    trunk = converted(Branches(), tasks)
    x = torch.randn(6, 3).double()

    def loss(z: list[Tensor], task: str, step: int) -> Tensor:
        total = z[batches[step % len(batches)].index(task)].sin().mean()
        return total + z[0].cos().mean() if step > 4 and task == "b" else total

    results = []
    for way in ("step", "together"):
        own = copy.deepcopy(trunk)
        adam = torch.optim.AdamW(own.parameters(), lr=0.01, weight_decay=0.1)
        opt = cs.MultiTaskOptimizer(own, adam, tasks)
        coverage, grads = [], []
        for step in range(8):
            chosen = batches[step % len(batches)]
            if way == "step":
                opt.step(lambda t: loss(own(x), t, step), list(chosen))
            else:
                opt.step_together(
                    lambda run: {t: loss(z, t, step) for t, z in run(x).items()}, list(chosen)
                )
            coverage.append(str(opt.coverage()))
            grads.append([p.grad is None for p in own.parameters()])
        results.append((own.state_dict(), grads, coverage, opt.report().products))
    assert any(map(any, results[0][1]))
    assert results[0][1:3] == results[1][1:3]
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(results[1][3], results[0][3], rtol=1e-7, atol=1e-9)


def test_weights_in_functions_that_ask_no_subclass() -> None:
    class Sign(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sign()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    class Binary(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, Sign.apply(self.weight), self.bias)

    torch.manual_seed(0)
    x = torch.randn(6, 3).double()
    assert_alike(converted(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Binary(4, 4))), x)
    trunk = converted(nn.Sequential(Binary(3, 4), nn.BatchNorm1d(4)))
    with pytest.raises(ValueError, match=r"use 0\.weight "):
        trained(trunk, x, "together")


def test_arguments_by_name_and_types_of_weights() -> None:
    class Named(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert isinstance(self.weight, nn.Parameter)
            x = x.float().to(self.weight).type_as(self.weight) + self.weight.new_zeros(3)
            return nn.functional.linear(input=x, weight=self.weight, bias=self.bias)

    class Trunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = Named(3, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.norm(input=self.linear(x))
            return result

    torch.manual_seed(0)
    opt = assert_alike(converted(Trunk()), torch.randn(6, 3).double())
    assert list(opt.coverage().prioritized) == ["linear.weight"]


def test_nothing_stays_in_memory() -> None:
    trunk = small()
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB)
    alive: list[weakref.ref[Tensor]] = []

    def forward(run: RunTrunk, fails: bool) -> dict[str, Tensor]:
        x = pictures()
        outputs = run(x)
        alive.extend(map(weakref.ref, (x, *outputs.values())))
        if fails:
            raise ArithmeticError
        return {t: z.square().mean() for t, z in outputs.items()}

    for fails in (False, True, False):
        try:
            opt.step_together(lambda run, fails=fails: forward(run, fails))
        except ArithmeticError:
            assert fails
        assert all(reference() is None for reference in alive)
    assert all("_stack" not in vars(norm) for norm in cs.nn.task_norms(trunk))


@pytest.mark.parametrize("method", [cs.ConnectionStrength(), cs.MGDA(groups="layer")], ids=repr)
def test_no_circles_are_left(method: cs.Method) -> None:
    """Python frees the tensors of a step at once, and not when it next looks for circles."""
    trunk = small()
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, method)

    def tensors() -> int:
        return sum(issubclass(type(found), Tensor) for found in gc.get_objects())

    def step() -> None:
        opt.step_together(lambda run: {t: z.square().mean() for t, z in run(pictures()).items()})

    step()
    gc.collect()
    gc.disable()
    try:
        step()
        before = tensors()
        step()
        assert tensors() == before
    finally:
        gc.enable()


def test_hooks_on_weights() -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        trunk = small()
        getattr(trunk[3].weight, register)(lambda given: None)
        opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB)
        with pytest.raises(ValueError, match=r"no hook on 3\.weight "):
            opt.step_together(
                lambda run: {t: z.square().mean() for t, z in run(pictures()).items()}
            )


def test_forward_that_runs_other_things() -> None:
    trunk, x = small(), pictures()
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB)

    def direct(run: RunTrunk) -> dict[str, Tensor]:
        return {t: z.square().mean() + trunk(x).mean() for t, z in run(x).items()}

    def steps_back(run: RunTrunk) -> dict[str, Tensor]:
        losses = {t: z.square().mean() for t, z in run(x).items()}
        losses["a"].backward(retain_graph=True)
        return losses

    @dataclass
    class Output:
        z: Tensor

    for forward, error, match in (
        (direct, ValueError, "forward must run trunk by run"),
        (steps_back, RuntimeError, "leave out backward"),
        (lambda run: run(y for y in [x]), ValueError, "run must get tensors in lists"),
    ):
        with pytest.raises(error, match=match):
            opt.step_together(forward)
        assert all(p.grad is None for p in trunk.parameters())
    hook = trunk.register_forward_hook(lambda _, __, output: Output(output))
    with pytest.raises(ValueError, match="trunk must return tensors in lists"):
        opt.step_together(lambda run: {t: z.z.mean() for t, z in run(x).items()})
    hook.remove()


def test_run_called_twice() -> None:
    """Also in the step that checks again; a weight that is prioritized runs once."""
    trunk = small()
    x = pictures()
    states = []
    for way in ("step", "together"):
        own = copy.deepcopy(trunk)
        opt = cs.MultiTaskOptimizer(own, sgd_of(own, lr=1e-3), AB, cs.Sum())
        for _ in range(34):
            if way == "step":
                opt.step(lambda t: own(x).sin().mean() + own(x + 1).cos().mean())
            else:
                opt.step_together(
                    lambda run: {
                        t: z.sin().mean() + y.cos().mean()
                        for (t, z), y in zip(run(x).items(), run(x + 1).values(), strict=True)
                    }
                )
        states.append(own.state_dict())
    torch.testing.assert_close(*states, rtol=1e-9, atol=1e-9)


def test_heads_in_trunk() -> None:
    torch.manual_seed(0)
    trunk, x = converted(Head()), torch.randn(5, 3).double()  # An odd batch.
    results = []
    for way in ("step", "together"):
        own = copy.deepcopy(trunk)
        opt = cs.MultiTaskOptimizer(own, sgd_of(own), AB)
        for _ in range(3):
            if way == "step":
                opt.step(lambda t: own.heads[t](own(x)).sin().mean())
            else:
                opt.step_together(
                    lambda run: {t: own.heads[t](z).sin().mean() for t, z in run(x).items()}
                )
        results.append((own.state_dict(), str(opt.coverage())))
    torch.testing.assert_close(results[0][0], results[1][0], **CLOSE)
    assert results[0][1] == results[1][1]


def _normed(head: nn.Module) -> tuple[nn.Module, nn.ModuleDict, cs.MultiTaskOptimizer]:
    trunk = converted(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)))
    heads = nn.ModuleDict({task: copy.deepcopy(head) for task in AB}).double()
    return trunk, heads, cs.MultiTaskOptimizer(trunk, sgd_of(trunk, heads), AB)


def test_a_head_that_begins_in_place() -> None:
    """Torch's own sentence is about views."""
    trunk, heads, opt = _normed(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 1)))
    x = torch.randn(5, 3).double()

    def forward(run: RunTrunk) -> dict[str, Tensor]:
        return {task: heads[task](z).square().mean() for task, z in run(x).items()}

    with refused(trunk.state_dict, ValueError, r"ReLU\(inplace=True\) does: use step"):
        opt.step_together(forward)
    opt.step(lambda task: heads[task](trunk(x)).square().mean())


@pytest.mark.parametrize("of", ["input", "weight"])
def test_a_gradient_penalty(of: str) -> None:
    """It would need the layers' second derivatives."""
    trunk, heads, opt = _normed(nn.Linear(4, 1))
    x = torch.randn(5, 3).double()

    def loss(task: str, z: Tensor, x: Tensor) -> Tensor:
        loss = heads[task](z).square().mean()
        (grad,) = torch.autograd.grad(
            loss, x if of == "input" else trunk[0].weight, create_graph=True
        )
        result: Tensor = loss + grad.square().sum()
        return result

    def forward(run: RunTrunk) -> dict[str, Tensor]:
        leaf = x.clone().requires_grad_()
        return {task: loss(task, z, leaf) for task, z in run(leaf).items()}

    def closure(task: str) -> Tensor:
        leaf = x.clone().requires_grad_()
        return loss(task, trunk(leaf), leaf)

    with refused(trunk.state_dict, ValueError, "as for a gradient penalty: use step"):
        opt.step_together(forward)
    opt.step(closure)
