"""Pairs of a layer and its normalization, also through views, hooks and late first runs."""

import copy
import gc
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from networks import AB, BOTH_PHASES, assert_equal, optimizer_of, problem, refused, sgd_of
from torch import Tensor, nn

import cs_kernels as cs

pytestmark = pytest.mark.loop


class Network(nn.Module):
    """Layers and one forward function."""

    def __init__(self, forward: str, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.how = forward

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = getattr(self, f"_{self.how}")(x)
        return result

    def _in_place(self, x: Tensor) -> Tensor:
        return self.norm(self.relu(self.layer(x)))

    def _flattened(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.norm(y.flatten(0, 1)).reshape_as(y)

    def _transposed(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x).transpose(1, 2))

    def _in_place_through_a_view(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y.view(-1).relu_()
        return self.norm(y.flatten(0, 1))

    def _direct(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))

    def _by_keyword(self, x: Tensor) -> Tensor:
        return self.norm(input=self.layer(x))

    def _half(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)[:, :4])

    def _squeezed(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x).squeeze(-1).squeeze(-1))


def _coverage(trunk: nn.Module, x: Tensor) -> cs.Coverage:
    cs.nn.convert_task_batchnorm(trunk, AB)
    return optimizer_of(trunk, cs.Sum()).trace(lambda task: trunk(x).sum())


@pytest.mark.parametrize("inplace", [False, True])
def test_an_activation_in_between_counts_in_place_too(inplace: bool) -> None:
    trunk = Network(
        "in_place", layer=nn.Conv2d(3, 4, 1), relu=nn.ReLU(inplace), norm=nn.BatchNorm2d(4)
    )
    coverage = _coverage(trunk, torch.randn(2, 3, 5, 5))
    assert coverage.prioritized == {}
    assert coverage.plain["layer.weight"].startswith("no task-specific normalization takes")


@pytest.mark.parametrize(
    ("forward", "layer", "norm", "x", "seen"),
    [
        ("flattened", nn.Linear(3, 8), nn.BatchNorm1d(8), (2, 5, 3), True),
        ("transposed", nn.Linear(3, 8), nn.BatchNorm1d(8), (2, 5, 3), True),
        ("in_place_through_a_view", nn.Linear(3, 8), nn.BatchNorm1d(8), (2, 5, 3), False),
        ("by_keyword", nn.Linear(3, 8), nn.BatchNorm1d(8), (5, 3), True),
        ("squeezed", nn.Conv2d(3, 8, 2), nn.BatchNorm1d(8), (4, 3, 2, 2), True),
        ("half", nn.Conv2d(3, 8, 1), nn.BatchNorm2d(4), (2, 3, 5, 5), False),
        ("direct", nn.ConvTranspose1d(3, 8, 2), nn.BatchNorm1d(8), (2, 3, 5), True),
        ("direct", nn.Conv3d(3, 8, 2), nn.BatchNorm3d(8), (2, 3, 4, 4, 4), True),
    ],
)
def test_views(
    forward: str, layer: nn.Module, norm: nn.Module, x: tuple[int, ...], seen: bool
) -> None:
    coverage = _coverage(Network(forward, layer=layer, norm=norm), torch.randn(x))
    assert coverage.prioritized == ({"layer.weight": "norm"} if seen else {})


@pytest.mark.parametrize("positions", [5, 8])
def test_a_normalization_over_positions(positions: int) -> None:
    """BatchNorm1d takes dimension 1, which a Linear leaves as it was: also if sizes agree."""
    trunk = Network("direct", layer=nn.Linear(3, 8), norm=nn.BatchNorm1d(positions))
    x = torch.randn(4, positions, 3)
    coverage = _coverage(trunk, x)
    assert coverage.plain["layer.weight"] == "norm normalizes other channels than its outputs"
    with pytest.raises(ValueError, match=r"(?s)must have a layer.*other channels than its outputs"):
        optimizer_of(trunk).step(lambda task: trunk(x).square().mean())


def test_a_module_whose_statistics_have_another_size() -> None:
    class Doubled(nn.BatchNorm1d):
        def __init__(self, channels: int) -> None:
            super().__init__(2 * channels)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.cat([x, x], 1))

    trunk = Network("direct", layer=nn.Linear(3, 8), norm=Doubled(8))
    coverage = _coverage(trunk, torch.randn(4, 3))
    assert coverage.plain["layer.weight"] == "norm has other channels than its 8 outputs"


def test_after_trace_a_step_without_a_prioritized_layer_raises() -> None:
    trunk = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4))
    cs.nn.convert_task_batchnorm(trunk, AB)
    opt, x = optimizer_of(trunk), torch.randn(6, 3)

    def loss(task: str) -> Tensor:
        return trunk(x).square().mean()

    assert opt.trace(loss).prioritized == {}
    for _ in range(2):
        with refused(trunk.state_dict, ValueError, "must have a layer whose output"):
            opt.step(loss)


class Deep(nn.Module):
    """A number of blocks that run is an argument."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(3)
        )
        self.depth = 1

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.depth]:
            x = torch.relu(block(x))
        return x


def _conflict(trunk: nn.Module, x: Tensor, task: str) -> Tensor:
    """Tasks in conflict in every channel."""
    return (1 if task == "a" else -2) * trunk(x).sum() + trunk(x).square().mean()


def _deep() -> tuple[Deep, cs.MultiTaskOptimizer, Callable[[str], Tensor]]:
    trunk, x = cs.nn.convert_task_batchnorm(Deep(), AB), torch.randn(16, 4)
    return trunk, optimizer_of(trunk), lambda task: _conflict(trunk, x, task)


@BOTH_PHASES
def test_a_layer_that_first_runs_later(schedule: cs.Schedule) -> None:
    """It is prioritized in that very step, as in a run that has traced it before."""
    networks = []
    for told in (False, True):
        torch.manual_seed(0)
        trunk = cs.nn.convert_task_batchnorm(Deep(), AB)
        x = torch.randn(16, 4)
        layers = {f"blocks.{n}.0": f"blocks.{n}.1" for n in range(3)} if told else None
        opt = optimizer_of(trunk, schedule=schedule, layers=layers)
        for depth in (1, 1, 2, 3):
            trunk.depth = depth
            opt.step(lambda task, trunk=trunk, x=x: _conflict(trunk, x, task))
            if not told:
                assert len(opt.coverage().prioritized) == depth
                waiting = [f"blocks.{n}.0.weight" for n in range(depth, 3)]
                plain = opt.coverage().plain.items()
                assert [n for n, why in plain if why == "the layer has not run"] == waiting
        networks.append(trunk.state_dict())
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in trunk.modules()) or told
    assert_equal(*networks)


def test_a_layer_that_first_runs_in_the_second_task() -> None:
    trunk, opt, loss = _deep()

    def deeper(task: str) -> Tensor:
        trunk.depth = 1 if task == "a" else 2
        return loss(task)

    opt.step(deeper)
    assert opt.coverage().prioritized == {"blocks.0.0.weight": "blocks.0.1"}
    assert opt.coverage().own["blocks.1.0.weight"] == "b"  # No other task reaches it.


def test_a_network_with_a_layer_that_has_not_run_is_copied_and_saved() -> None:
    """The hooks that wait for its first run are not copied."""
    trunk, opt, loss = _deep()
    opt.step(loss)
    average = copy.deepcopy(trunk)
    loaded = pickle.loads(pickle.dumps(trunk))
    torch.save(trunk, io.BytesIO())
    version = opt._engine.trunk.watcher.version
    for other in (average, loaded):
        other.depth = 3
        with cs.nn.active_task(other, "a"):
            other(torch.randn(16, 4))
    assert opt._engine.trunk.watcher.version == version


def test_a_first_run_in_a_pass_that_fails() -> None:
    trunk, opt, loss = _deep()
    opt.step(loss)
    trunk.depth = 2
    with pytest.raises(ZeroDivisionError):
        opt.step(lambda task: loss(task) / (1 // 0))
    opt.step(loss)
    assert "blocks.1.0.weight" in opt.coverage().prioritized


class Shifted(nn.Module):
    """A convolution of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight) + 1


def test_layers_of_ones_own_can_be_named() -> None:
    torch.manual_seed(0)
    trunk = nn.Sequential(Shifted(), nn.BatchNorm1d(4))
    cs.nn.convert_task_batchnorm(trunk, AB)
    x = torch.randn(16, 3)
    opt = optimizer_of(trunk, layers={"0": "1"})
    opt.step(lambda task: _conflict(trunk, x, task))
    assert opt.coverage().prioritized == {"0.weight": "1"}
    assert opt.priority()["0"].shape == (4,)


def test_layers_are_never_ignored() -> None:
    """By another name of the same module, or of another module with the same weight."""
    trunk = Deep()
    trunk.alias = trunk.blocks[0][0]
    trunk.emb = nn.Embedding(3, 4)
    cs.nn.convert_task_batchnorm(trunk, AB)
    x = torch.randn(16, 4)
    opt = optimizer_of(trunk, cs.Sum(), layers={"alias": None, "emb": None})
    coverage = opt.trace(lambda task: _conflict(trunk, x, task))
    assert coverage.plain["blocks.0.0.weight"] == "excluded by `layers`"
    for layers, message in (
        ({"blocks.0.1.a": "blocks.0.1"}, "with a shared weight, got 'blocks.0.1.a'"),
        ({"blocks.0": None}, "with a shared weight, got 'blocks.0'"),
        ({"alias": None, "blocks.0.0": "blocks.0.1"}, "one weight to one normalization"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer_of(trunk, cs.Sum(), layers=layers)


def test_a_whole_network_of_tasks() -> None:
    """Normalizations of heads inside the trunk: their layers are the task's own."""
    trunk = nn.ModuleDict(
        {
            "stem": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
            **{f"head_{t}": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for t in AB},
        }
    )
    cs.nn.convert_task_batchnorm(trunk, AB)
    opt, x = optimizer_of(trunk), torch.randn(16, 3)
    opt.step(lambda task: trunk[f"head_{task}"](trunk["stem"](x)).square().mean())
    coverage = opt.coverage()
    assert coverage.prioritized == {"stem.0.weight": "stem.1"}
    assert coverage.own["head_a.0.weight"] == "a"
    assert list(opt.priority()) == ["stem.0"]
    assert str(coverage).startswith("1 of 2 shared parameters are prioritized, 75.0 % of 16")


class Exchanged(nn.Module):
    """Two layers and two normalizations, one behind the other in either order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.one, self.other, self.third = (nn.BatchNorm1d(4) for _ in range(3))
        self.name = "one"

    def forward(self, x: Tensor) -> Tensor:
        x = getattr(self, self.name)(self.first(x))
        return self.other(self.second(x)) if self.name == "one" else self.second(x)


def _exchanged() -> tuple[nn.Module, cs.MultiTaskOptimizer, Callable[[str], Tensor]]:
    torch.manual_seed(0)
    trunk, x = cs.nn.convert_task_batchnorm(Exchanged(), AB), torch.randn(16, 4)
    scales = torch.tensor([2.0, 2.0, 0.1, 0.1])
    for norm, flips in ((trunk.one, False), (trunk.third, True)):  # Opposed priorities.
        for child, flips_more in zip(norm.children(), (False, True), strict=True):
            child.weight.data = scales.flip(0) if flips != flips_more else scales.clone()
    return trunk, optimizer_of(trunk), lambda task: _conflict(trunk, x, task)


def _by_attribute(trunk: nn.Module) -> None:
    trunk.one, trunk.third = trunk.third, trunk.one


def _by_name(trunk: nn.Module) -> None:
    trunk.name = "third"


@pytest.mark.parametrize("change", [_by_attribute, _by_name])
@pytest.mark.parametrize("traces", [False, True])
def test_a_normalization_that_is_exchanged(
    change: Callable[[nn.Module], None], traces: bool
) -> None:
    """Its own scale and variance give the priority from the next step on, or from a trace."""
    trunk, opt, loss = _exchanged()
    opt.step(loss)
    before, priority = {"first.weight": "one", "second.weight": "other"}, opt.priority()["first"]
    assert opt.coverage().prioritized == before
    change(trunk)
    twin = copy.deepcopy(trunk)
    x = torch.randn(16, 4)
    fresh = optimizer_of(twin)
    if traces:
        opt.trace(lambda task: _conflict(trunk, x, task))
        fresh.trace(lambda task: _conflict(twin, x, task))
    else:
        opt.step(lambda task: _conflict(trunk, x, task))
        fresh.step(lambda task: _conflict(twin, x, task))
    assert opt.coverage().prioritized == fresh.coverage().prioritized
    assert (opt.coverage().prioritized == before) == (change is _by_attribute)
    assert_equal(opt.priority(), fresh.priority())
    assert torch.equal(opt.priority()["first"], 1 - priority)
    assert_equal([*trunk.parameters()], [*twin.parameters()])


class Changing(nn.Module):
    """Two layers and two normalizations, behind one another as `how` says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.one, self.other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.how = "plain"

    def forward(self, x: Tensor) -> Tensor:
        x, y = self.first(x), self.second(x)
        if self.how == "exchanged":
            return self.other(x) + self.one(y)
        if self.how == "one for both":
            return self.one(x) + self.one(y)
        if self.how == "without":
            return self.one(x) + y
        if self.how == "activated":
            x = torch.relu(x)
        return self.one(x) + self.other(y)


def _step(opt: cs.MultiTaskOptimizer, trunk: nn.Module, x: Tensor, *, together: bool) -> None:
    def loss(task: str, y: Tensor) -> Tensor:
        return (1 if task == "a" else -2) * y.sum() + y.square().mean()

    if together:
        opt.step_together(lambda run: {task: loss(task, y) for task, y in run(x).items()})
    else:
        opt.step(lambda task: loss(task, trunk(x)))


@pytest.mark.parametrize(
    ("how", "together"),
    [
        ("exchanged", False),
        ("one for both", False),
        ("without", False),
        ("activated", False),
        ("exchanged", True),
    ],
)
def test_normalizations_that_have_run_before_in_other_places(how: str, together: bool) -> None:
    """And back: a step sees the layers as a new optimizer would; one pass for all, the next one."""
    torch.manual_seed(0)
    trunk, x = cs.nn.convert_task_batchnorm(Changing(), AB), torch.randn(16, 4)
    opt = optimizer_of(trunk)
    order = [n for n in ("plain", "exchanged", how, "plain", how) for _ in range(2)]
    for step, now in enumerate(order):
        trunk.how = now
        twin = copy.deepcopy(trunk)
        fresh = optimizer_of(twin)
        _step(opt, trunk, x, together=together)
        _step(fresh, twin, x, together=together)
        if together and step % 2 == 0:
            continue
        found, expected = opt.coverage(), fresh.coverage()
        assert (found.prioritized, found.plain) == (expected.prioritized, expected.plain)
        assert_equal([*trunk.parameters()], [*twin.parameters()])
    version = opt._engine.trunk.watcher.version
    for _ in range(3):  # What was seen goes on to hold.
        _step(opt, trunk, x, together=together)
    assert opt._engine.trunk.watcher.version == version


def test_a_network_that_is_different_in_each_pass() -> None:
    """It is not watched for ever, if nothing new is seen."""
    torch.manual_seed(0)
    trunk, x = cs.nn.convert_task_batchnorm(Deep(), AB), torch.randn(16, 4)
    opt = optimizer_of(trunk, lr=1e-3)
    for step in range(40):
        order = torch.randperm(3, generator=torch.Generator().manual_seed(step)).tolist()

        def loss(task: str, order: list[int] = order) -> Tensor:
            y = x
            for n in order:
                y = torch.relu(trunk.blocks[n](y))
            return (1 if task == "a" else -2) * y.sum() + y.square().mean()

        opt.step(loss)
        if step == 20:
            version = opt._engine.trunk.watcher.version
    assert opt._engine.trunk.watcher.version == version
    assert len(opt.coverage().prioritized) == 3


def test_normalizations_that_take_turns() -> None:
    """A layer has no priority if they change from step to step, and the report says why."""
    torch.manual_seed(0)
    trunk, x = cs.nn.convert_task_batchnorm(Changing(), AB), torch.randn(16, 4)
    opt = optimizer_of(trunk, cs.Sum())
    for step in range(9):
        trunk.how = "exchanged" if step % 2 else "plain"
        opt.step(lambda task: _conflict(trunk, x, task))
    assert opt.coverage().plain["first.weight"] == "several normalizations follow: one, other"


def test_a_normalization_that_is_exchanged_in_the_last_pass_of_a_step() -> None:
    """It is seen in the next step. Layers that do not run in it keep what was seen before."""
    trunk, opt, loss = _exchanged()
    opt.step(loss)

    def later(task: str) -> Tensor:
        trunk.name = "third" if task == "b" else "one"
        return loss(task)

    opt.step(later)
    trunk.name = "third"
    opt.step(loss)
    assert opt.coverage().prioritized["first.weight"] == "third"
    version = opt._engine.trunk.watcher.version
    opt.step(loss)
    assert opt._engine.trunk.watcher.version == version


# --- Conversion and a task's life ---------------------------------------------------------------


def test_a_first_run_outside_a_step_is_nobodys_concern() -> None:
    """Validation, also in inference mode, neither adds pairs nor sets hooks."""
    trunk, opt, loss = _deep()
    x = torch.randn(16, 4)
    opt.step(loss)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        trunk.depth = 3
        trunk.eval()
        with mode(), cs.nn.active_task(trunk, "a"):
            trunk(x)
        pickle.dumps(trunk)
        trunk.train()
        trunk.depth = 1
        opt.step(loss)
        assert set(opt.coverage().prioritized) == {"blocks.0.0.weight"}


def test_inference_mode_hides_changes_in_place() -> None:
    trunk = Network("in_place", layer=nn.Linear(3, 4), relu=nn.ReLU(True), norm=nn.BatchNorm1d(4))
    cs.nn.convert_task_batchnorm(trunk, AB)
    opt, x = optimizer_of(trunk, cs.Sum()), torch.randn(6, 3)

    def loss(task: str) -> Tensor:
        trunk.eval()
        with torch.inference_mode():
            trunk(x)
        trunk.train()
        return trunk(x).sum()

    assert opt.trace(loss).prioritized == {}


def test_an_optimizer_is_copied_with_a_layer_that_has_not_run() -> None:
    trunk, x = cs.nn.convert_task_batchnorm(Deep(), AB), torch.randn(16, 4)
    opt = optimizer_of(trunk)
    opt.step(lambda task: _conflict(trunk, x, task))
    other, again = copy.deepcopy((trunk, opt))
    for depth in (1, 2):
        trunk.depth = other.depth = depth
        opt.step(lambda task: _conflict(trunk, x, task))
        again.step(lambda task: _conflict(other, x, task))
    assert_equal([*trunk.parameters()], [*other.parameters()])


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x: Tensor, task: str) -> Tensor:
        x = self.stem(x)
        return x if task == "a" else self.normed(x)


@BOTH_PHASES
def test_a_first_task_without_a_prioritized_layer(schedule: cs.Schedule) -> None:
    """The others have one."""
    tasks = ["a", "b", "c"]
    trunk = cs.nn.convert_task_batchnorm(Branches(), tasks)
    x = torch.randn(8, 3)
    opt = optimizer_of(trunk, tasks=tasks, schedule=schedule)
    opt.step(lambda task: trunk(x, task).square().mean())
    assert opt.coverage().prioritized == {"normed.0.weight": "normed.1"}


def test_nothing_is_left_of_an_optimizer_that_is_gone() -> None:
    """No hook stays, neither in the torch optimizer nor in layers that have not run."""
    model, loss, *_ = problem()
    sgd = sgd_of(model)
    hooks = len(sgd._optimizer_step_post_hooks), len(sgd._optimizer_step_pre_hooks)
    for _ in range(3):
        opt = cs.MultiTaskOptimizer(model, sgd, AB, cs.PCGrad())
        opt.step(loss)
        assert model.unused._forward_pre_hooks
        del opt
        gc.collect()
        assert not model.unused._forward_pre_hooks
    assert hooks == (len(sgd._optimizer_step_post_hooks), len(sgd._optimizer_step_pre_hooks))


def test_a_trace_does_not_hide_other_parameters() -> None:
    trunk, loss, *_ = problem()
    opt = optimizer_of(trunk, cs.PCGrad())
    opt.step(loss)
    name, layer = next((n, m) for n, m in trunk.named_modules() if isinstance(m, nn.Linear))
    trunk.set_submodule(name, copy.deepcopy(layer))

    def fails(task: str) -> Tensor:
        raise KeyError(task)

    for call in (lambda: opt.step(loss), lambda: opt.trace(fails), lambda: opt.trace(loss)) * 2:
        with pytest.raises(ValueError, match="trunk must keep the parameters"):
            call()
