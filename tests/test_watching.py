"""Pairs of a layer and its normalization, also through views, hooks and late first runs."""

import copy
import gc
import pickle
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from networks import (
    AB,
    BOTH_PHASES,
    PRIORITIZED,
    Setup,
    assert_equal,
    optimizer_of,
    problem,
    refused,
    sgd_of,
)
from torch import Tensor, nn

import cs_kernels as cs

pytestmark = pytest.mark.loop


class Network(nn.Module):
    """Layers, and a function that runs them."""

    def __init__(self, run: Callable[["Network", Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Doubled(nn.BatchNorm1d):
    """A normalization with more statistics than its input has channels."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x, x], 1))


def _conflict(trunk: nn.Module, x: Tensor, task: str) -> Tensor:
    """Tasks in conflict in every channel."""
    return _conflict_of(trunk(x), task)


def _conflict_of(y: Tensor, task: str) -> Tensor:
    return (1 if task == "a" else -2) * y.sum() + y.square().mean()


def _coverage(trunk: nn.Module, *shape: int, **layers: str | None) -> cs.Coverage:
    trunk, x = cs.nn.convert_task_batchnorm(trunk, AB), torch.randn(shape)
    return optimizer_of(trunk, cs.Sum(), layers=layers).trace(lambda task: trunk(x).sum())


@pytest.mark.parametrize("autocast", [False, True])
def test_layers_are_seen_not_named(autocast: bool) -> None:
    """In a trace, which changes nothing."""
    setup = Setup(dtype=torch.float32)
    opt, before = setup.start(), setup.state()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        coverage = opt.trace(setup.closure(0))
    assert_equal(before, setup.state())
    assert coverage.prioritized == PRIORITIZED
    assert coverage.plain["bare.weight"] == NOTHING
    assert "stem.bias" in coverage.plain
    assert "4 of 9 shared parameters are prioritized" in str(coverage)
    assert re.search("stem.weight +prioritized by stem_norm", str(coverage))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in setup.trunk.modules())


def _direct(network: Network, x: Tensor) -> Tensor:
    return network.norm(network.layer(x))


def _in_place(network: Network, x: Tensor) -> Tensor:
    y = network.layer(x)
    y.view(-1).relu_()
    return network.norm(y.flatten(0, 1))


NOTHING = "no task-specific normalization takes its output"
OTHERS = "norm normalizes other channels than its outputs"
LINEAR, OF_5, OF_8 = nn.Linear(3, 8), nn.BatchNorm1d(5), nn.BatchNorm1d(8)
PARAMETRIZED = nn.utils.parametrize.register_parametrization(
    nn.BatchNorm1d(8), "weight", nn.Identity()
)
WITHOUT_STATISTICS = nn.BatchNorm1d(8, track_running_stats=False)


@pytest.mark.parametrize(
    ("run", "layer", "norm", "shape", "reason"),
    [
        (lambda n, x: n.norm(n.layer(x).flatten(0, 1)), LINEAR, OF_8, (2, 5, 3), None),
        (lambda n, x: n.norm(n.layer(x).transpose(1, 2)), LINEAR, OF_8, (2, 5, 3), None),
        (lambda n, x: n.norm(input=n.layer(x)), LINEAR, OF_8, (5, 3), None),
        (lambda n, x: n.norm(n.layer(x)[..., 0, 0]), nn.Conv2d(3, 8, 2), OF_8, (4, 3, 2, 2), None),
        (_direct, nn.ConvTranspose1d(3, 8, 2), OF_8, (2, 3, 5), None),
        (_direct, nn.Conv3d(3, 8, 2), nn.BatchNorm3d(8), (2, 3, 4, 4, 4), None),
        (_in_place, LINEAR, OF_8, (2, 5, 3), NOTHING),
        (lambda n, x: n.norm(n.layer(x).relu()), LINEAR, OF_8, (5, 3), NOTHING),
        (lambda n, x: n.norm(n.layer(x).relu_()), LINEAR, OF_8, (5, 3), NOTHING),
        (lambda n, x: n.norm(n.layer(x)[:, :5]), LINEAR, OF_5, (5, 3), OTHERS),
        # BatchNorm1d takes dimension 1, which a Linear leaves as it was: also if sizes agree.
        (_direct, LINEAR, OF_5, (4, 5, 3), OTHERS),
        (_direct, LINEAR, OF_8, (4, 8, 3), OTHERS),
        (_direct, LINEAR, Doubled(16), (4, 3), "norm has other channels than its 8 outputs"),
        (_direct, LINEAR, PARAMETRIZED, (4, 3), "norm has a scale that is not a parameter"),
        (_direct, LINEAR, WITHOUT_STATISTICS, (4, 3), "norm keeps no running variance"),
    ],
)
def test_a_normalization_takes_the_output_of_a_layer(
    run: Callable[[Network, Tensor], Tensor],
    layer: nn.Module,
    norm: nn.Module,
    shape: tuple[int, ...],
    reason: str | None,
) -> None:
    """Or a view of it with the same channels."""
    coverage = _coverage(copy.deepcopy(Network(run, layer=layer, norm=norm)), *shape)
    assert coverage.prioritized == ({} if reason else {"layer.weight": "norm"})
    assert coverage.plain.get("layer.weight") == reason


def test_a_weight_of_two_kinds_of_layers() -> None:
    """Its output channels are dimension 1 of one of them and dimension 0 of the other."""
    up, down = nn.ConvTranspose2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
    down.weight, norm = up.weight, nn.BatchNorm2d(6)
    trunk = Network(lambda n, x: n.up(n.norm(n.down(x))), up=up, down=down, norm=norm)
    reason = "up, down have other dimensions for their outputs"
    assert _coverage(trunk, 2, 6, 4, 4).plain["up.weight"] == reason


def _reused(n: Network, x: Tensor) -> Tensor:
    """One layer in front of two normalizations, one normalization behind two layers."""
    x = n.norm_a(n.twice(x)) + n.norm_b(n.twice(x))
    x = n.common(n.left(x)) + n.common(n.right(x))
    return n.tied(n.block(n.block(x)))


def test_reused_modules() -> None:
    layers = {name: nn.Linear(4, 4) for name in ("twice", "left", "right", "tied", "idle")}
    norms = {name: nn.BatchNorm1d(4) for name in ("norm_a", "norm_b", "common")}
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    layers["tied"].weight = layers["left"].weight
    trunk = Network(_reused, **layers, **norms, block=block)
    coverage, of_block = _coverage(trunk, 8, 4), {"block.0.weight": "block.1"}
    assert coverage.prioritized == {"left.weight": "common", "right.weight": "common", **of_block}
    assert coverage.plain["twice.weight"] == "several normalizations follow: norm_a, norm_b"
    assert coverage.plain["idle.weight"] == "the layer has not run"
    named = {"twice": "norm_a", "left": None, "right": None, "idle": "norm_b"}
    coverage = _coverage(trunk, 8, 4, **named)
    assert coverage.prioritized == {"twice.weight": "norm_a", "idle.weight": "norm_b", **of_block}
    assert coverage.plain["right.weight"] == "excluded by `layers`"


def test_a_normalization_without_scale_counts_as_one() -> None:
    x, priorities = {task: torch.randn(8, 3) for task in AB}, []
    for affine in (False, True):
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=affine))
        opt = optimizer_of(cs.nn.convert_task_batchnorm(trunk, AB))
        trunk[1].requires_grad_(False)
        opt.step(lambda task: trunk(x[task]).square().mean())
        priorities.append(opt.priority()["0"].tolist())
    assert priorities[0] == priorities[1]
    assert set(priorities[0]) == {0, 1}


def test_coverage_shows_what_is_frozen_now() -> None:
    trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    opt = optimizer_of(cs.nn.convert_task_batchnorm(trunk, AB))
    opt.step(lambda task: trunk(torch.randn(8, 3)).square().mean())
    trunk[2].requires_grad_(False)
    assert opt.coverage().plain["2.weight"].startswith("frozen; ")
    assert "0.weight  prioritized by 1" in str(opt.coverage())
    trunk[0].weight.requires_grad_(False)
    coverage = opt.coverage()
    assert coverage.prioritized == {"0.weight": "1"}
    assert "0.weight  frozen; prioritized by 1" in str(coverage)


def test_a_step_without_a_prioritized_layer_raises() -> None:
    """After a trace too."""
    trunk = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(5))
    opt, x = optimizer_of(cs.nn.convert_task_batchnorm(trunk, AB)), torch.randn(4, 5, 3)
    loss = partial(_conflict, trunk, x)
    message = "(?s)must have a layer whose output.*other channels than its outputs"
    for _ in range(2):
        with refused(trunk.state_dict, ValueError, message):
            opt.step(loss)
        assert opt.trace(loss).prioritized == {}


def test_inference_mode_hides_changes_in_place() -> None:
    trunk = Network(
        lambda n, x: n.norm(n.layer(x).relu_()), layer=nn.Linear(3, 4), norm=nn.BatchNorm1d(4)
    )
    cs.nn.convert_task_batchnorm(trunk, AB)
    opt, x = optimizer_of(trunk, cs.Sum()), torch.randn(6, 3)

    def loss(task: str) -> Tensor:
        trunk.eval()
        with torch.inference_mode():
            trunk(x)
        trunk.train()
        return trunk(x).sum()

    assert opt.trace(loss).prioritized == {}


# --- first runs ---


class Deep(nn.Sequential):
    """Blocks, of which only some run."""

    depth = 1

    def __init__(self, blocks: int = 3) -> None:
        super().__init__(
            *(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(blocks))
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in list(self)[: self.depth]:
            x = torch.relu(block(x))
        return x


def _deep() -> tuple[Deep, cs.MultiTaskOptimizer, Callable[[str], Tensor]]:
    trunk, x = cs.nn.convert_task_batchnorm(Deep(), AB), torch.randn(16, 4)
    return trunk, optimizer_of(trunk), partial(_conflict, trunk, x)


@BOTH_PHASES
@pytest.mark.filterwarnings("ignore:the gradient of")
def test_a_layer_that_first_runs_later(schedule: cs.Schedule) -> None:
    """It is prioritized in that very step, as in a run that was told of it, and in a copy."""
    trunk, x = cs.nn.convert_task_batchnorm(Deep(), AB), torch.randn(16, 4)
    told, layers = copy.deepcopy(trunk), {f"{n}.0": f"{n}.1" for n in range(3)}
    opt = optimizer_of(trunk, schedule=schedule)
    runs = [(trunk, opt), (told, optimizer_of(told, schedule=schedule, layers=layers))]
    for depth in (1, 1, 2, 3):
        for network, optimizer in runs:
            network.depth = depth
            optimizer.step(partial(_conflict, network, x))
        if len(runs) == 2:
            runs.append(copy.deepcopy(runs[0]))
        coverage = opt.coverage()
        assert len(coverage.prioritized) == depth
        waiting = [name for name, why in coverage.plain.items() if why == "the layer has not run"]
        assert waiting == [f"{n}.0.weight" for n in range(depth, 3)]
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in trunk.modules())
    for network, _ in runs[1:]:
        assert_equal(network.state_dict(), trunk.state_dict())


def test_a_layer_that_first_runs_in_the_second_task() -> None:
    trunk, opt, loss = _deep()

    def deeper(task: str) -> Tensor:
        trunk.depth = 1 if task == "a" else 2
        return loss(task)

    opt.step(deeper)
    assert opt.coverage().prioritized == {"0.0.weight": "0.1"}
    assert opt.coverage().own["1.0.weight"] == "b"  # No other task reaches it.


@BOTH_PHASES
def test_a_first_task_without_a_prioritized_layer(schedule: cs.Schedule) -> None:
    """The others have one."""
    trunk = Deep()
    trunk[1][1] = nn.Identity()
    cs.nn.convert_task_batchnorm(trunk, [*AB, "c"])
    opt, x = optimizer_of(trunk, tasks=[*AB, "c"], schedule=schedule), torch.randn(8, 4)
    opt.step(lambda task: trunk[int(task == "a")](x).square().mean())
    assert opt.coverage().prioritized == {"0.0.weight": "0.1"}


def test_a_first_run_in_a_pass_that_fails() -> None:
    trunk, opt, loss = _deep()
    opt.step(loss)
    trunk.depth = 2
    with pytest.raises(ZeroDivisionError):
        opt.step(lambda task: loss(task) / (1 // 0))
    opt.step(loss)
    assert "1.0.weight" in opt.coverage().prioritized


def test_a_first_run_outside_a_step_is_nobodys_concern() -> None:
    """Validation, also in inference mode and of copies, neither adds pairs nor sets hooks."""
    trunk, opt, loss = _deep()
    opt.step(loss)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for network in (trunk, copy.deepcopy(trunk), pickle.loads(pickle.dumps(trunk))):
            network.depth = 3
            network.eval()
            with mode(), cs.nn.active_task(network, "a"):
                network(torch.randn(16, 4))
        trunk.train()
        trunk.depth = 1
        opt.step(loss)
        assert opt.coverage().prioritized == {"0.0.weight": "0.1"}


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


# --- layers that are named, or are a task's own ---


def test_layers_of_ones_own_can_be_named() -> None:
    own = Network(lambda n, x: nn.functional.linear(x, n.weight) + 1)
    own.weight = nn.Parameter(torch.randn(4, 3))
    trunk = cs.nn.convert_task_batchnorm(nn.Sequential(own, nn.BatchNorm1d(4)), AB)
    opt = optimizer_of(trunk, layers={"0": "1"})
    opt.step(partial(_conflict, trunk, torch.randn(16, 3)))
    assert opt.coverage().prioritized == {"0.weight": "1"}
    assert opt.priority()["0"].shape == (4,)


def test_layers_are_never_ignored() -> None:
    """By another name of the same module, or of another module with the same weight."""
    trunk = cs.nn.convert_task_batchnorm(Deep(), AB)
    trunk.alias, trunk.emb = trunk[0][0], nn.Embedding(3, 4)
    opt = optimizer_of(trunk, cs.Sum(), layers={"alias": None, "emb": None})
    coverage = opt.trace(partial(_conflict, trunk, torch.randn(16, 4)))
    assert coverage.plain["0.0.weight"] == "excluded by `layers`"
    for layers, message in (
        ({"0.1.a": "0.1"}, "with a shared weight, got '0.1.a'"),
        ({"0": None}, "with a shared weight, got '0'"),
        ({"alias": None, "0.0": "0.1"}, "one weight to one normalization"),
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


# --- networks that change ---

ORDERS: dict[str, Callable[[Network, Tensor], Tensor]] = {
    "plain": lambda n, x: n.one(n.first(x)) + n.other(n.second(x)),
    "exchanged": lambda n, x: n.other(n.first(x)) + n.one(n.second(x)),
    "one for both": lambda n, x: n.one(n.first(x)) + n.one(n.second(x)),
    "without": lambda n, x: n.one(n.first(x)) + n.second(x),
    "activated": lambda n, x: n.one(torch.relu(n.first(x))) + n.other(n.second(x)),
    "a row": lambda n, x: n.other(n.second(n.one(n.first(x)))),
    "another row": lambda n, x: n.second(n.third(n.first(x))),
}


def _changing(order: str = "plain") -> tuple[Network, Tensor]:
    """Two layers, and normalizations of which two have opposed priorities."""
    layers = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)}
    norms = {name: nn.BatchNorm1d(4) for name in ("one", "other", "third")}
    trunk = cs.nn.convert_task_batchnorm(Network(ORDERS[order], **layers, **norms), AB)
    scales = torch.tensor([2.0, 2.0, 0.1, 0.1])
    for norm, flips in ((trunk.one, False), (trunk.third, True)):
        for child, flips_more in zip(norm.children(), (False, True), strict=True):
            child.weight.data = scales.flip(0) if flips != flips_more else scales.clone()
    return trunk, torch.randn(16, 4)


@pytest.mark.parametrize("by_attribute", [False, True])
@pytest.mark.parametrize("call", ["step", "trace"])
def test_a_normalization_that_is_exchanged(by_attribute: bool, call: str) -> None:
    """Its own scale and variance give the priority from the next step on, or from a trace."""
    trunk, x = _changing("a row")
    opt = optimizer_of(trunk)
    opt.step(partial(_conflict, trunk, x))
    before, priority = opt.coverage().prioritized, opt.priority()["first"]
    assert before == {"first.weight": "one", "second.weight": "other"}
    if by_attribute:
        trunk.one, trunk.third = trunk.third, trunk.one
    else:
        trunk.run = ORDERS["another row"]
    twin, x = copy.deepcopy(trunk), torch.randn(16, 4)
    fresh = optimizer_of(twin)
    for network, optimizer in ((trunk, opt), (twin, fresh)):
        getattr(optimizer, call)(partial(_conflict, network, x))
    assert opt.coverage().prioritized == fresh.coverage().prioritized
    assert (opt.coverage().prioritized == before) == by_attribute
    assert_equal(opt.priority(), fresh.priority())
    assert torch.equal(opt.priority()["first"], 1 - priority)
    assert_equal([*trunk.parameters()], [*twin.parameters()])


def _watched_passes(opt: cs.MultiTaskOptimizer) -> int:
    return opt._engine.trunk.watcher.version


@pytest.mark.parametrize(
    ("order", "together"),
    [
        *((order, False) for order in ("exchanged", "one for both", "without", "activated")),
        ("exchanged", True),
    ],
)
def test_normalizations_that_have_run_before_in_other_places(order: str, together: bool) -> None:
    """And back: a step sees the layers as a new optimizer would; one pass for all, the next one."""
    trunk, x = _changing()
    opt = optimizer_of(trunk)

    def step(opt: cs.MultiTaskOptimizer, trunk: nn.Module) -> None:
        if together:
            opt.step_together(lambda run: {t: _conflict_of(y, t) for t, y in run(x).items()})
        else:
            opt.step(partial(_conflict, trunk, x))

    orders = [n for n in ("plain", "exchanged", order, "plain", order) for _ in range(2)]
    for number, now in enumerate(orders):
        trunk.run = ORDERS[now]
        twin = copy.deepcopy(trunk)
        fresh = optimizer_of(twin)
        step(opt, trunk)
        step(fresh, twin)
        if together and number % 2 == 0:
            continue
        found, expected = opt.coverage(), fresh.coverage()
        assert (found.prioritized, found.plain) == (expected.prioritized, expected.plain)
        assert_equal([*trunk.parameters()], [*twin.parameters()])
    watched = _watched_passes(opt)
    for _ in range(3):  # What was seen goes on to hold.
        step(opt, trunk)
    assert _watched_passes(opt) == watched


def test_a_network_that_is_different_in_each_pass() -> None:
    """It is not watched for ever, if nothing new is seen; but a layer that first runs still is."""
    trunk, x = cs.nn.convert_task_batchnorm(Deep(4), AB), torch.randn(16, 4)
    trunk[3].requires_grad_(False)  # No gradient shows its first run.
    opt = optimizer_of(trunk, lr=1e-3)

    def loss(task: str) -> Tensor:
        y = x
        for n in order:
            y = torch.relu(trunk[n](y))
        return _conflict_of(y, task)

    for step in range(40):
        order = torch.randperm(3, generator=torch.Generator().manual_seed(step)).tolist()
        opt.step(loss)
        if step == 20:
            watched = _watched_passes(opt)
    assert _watched_passes(opt) == watched
    assert len(opt.coverage().prioritized) == 3
    order.append(3)
    opt.step(loss)
    assert len(opt.coverage().prioritized) == 4


def test_normalizations_that_take_turns() -> None:
    """A layer has no priority if they change from step to step, and the report says why."""
    trunk, x = _changing()
    opt = optimizer_of(trunk, cs.Sum())
    for step in range(9):
        trunk.run = ORDERS["exchanged" if step % 2 else "plain"]
        opt.step(partial(_conflict, trunk, x))
    assert opt.coverage().plain["first.weight"] == "several normalizations follow: one, other"


def test_a_normalization_that_is_exchanged_in_the_last_pass_of_a_step() -> None:
    """It is seen in the next step. Layers that do not run in it keep what was seen before."""
    trunk, x = _changing("a row")
    opt, loss = optimizer_of(trunk), partial(_conflict, trunk, x)
    opt.step(loss)

    def later(task: str) -> Tensor:
        trunk.run = ORDERS["another row" if task == "b" else "a row"]
        return loss(task)

    opt.step(later)
    opt.step(loss)
    assert opt.coverage().prioritized["first.weight"] == "third"
    watched = _watched_passes(opt)
    opt.step(loss)
    assert _watched_passes(opt) == watched


def test_a_trace_does_not_hide_other_parameters() -> None:
    trunk, loss, *_ = problem()
    opt = optimizer_of(trunk, cs.PCGrad())
    opt.step(loss)
    trunk.trunk[0] = copy.deepcopy(trunk.trunk[0])

    def fails(task: str) -> Tensor:
        raise KeyError(task)

    for call in (lambda: opt.step(loss), lambda: opt.trace(fails), lambda: opt.trace(loss)) * 2:
        with pytest.raises(ValueError, match="trunk must keep the parameters"):
            call()
