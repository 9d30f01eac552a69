"""Pairs of a layer and its normalization, also through views, and if they first run late."""

import copy
import gc
import pickle
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from networks import (
    AB,
    BOTH_PHASES,
    PRIORITIZED,
    Composed,
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

NOTHING = "no task-specific normalization takes its output"
OTHERS = "norm normalizes a dimension other than the channels"


def opposed(y: Tensor, task: str) -> Tensor:
    """A loss whose gradients for the two tasks conflict in every channel."""
    return (1 if task == "a" else -2) * y.sum() + y.square().mean()


def loss_of(trunk: nn.Module, x: Tensor) -> Callable[[str], Tensor]:
    return lambda task: opposed(trunk(x), task)


def watched_passes(opt: cs.MultiTaskOptimizer) -> int:
    return opt._engine.trunk.watcher.version


@pytest.mark.parametrize("autocast", [False, True])
def test_layers_are_seen_not_named(autocast: bool) -> None:
    """A trace finds layers by their calls, and changes nothing."""
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


class Doubled(nn.BatchNorm1d):
    """A normalization with more statistics than its input has channels."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x, x], 1))


def direct(n: Composed, x: Tensor) -> Tensor:
    return n.norm(n.layer(x))


def in_place(n: Composed, x: Tensor) -> Tensor:
    y = n.layer(x)
    y.view(-1).relu_()
    return n.norm(y.flatten(0, 1))


def after_inference(n: Composed, x: Tensor) -> Tensor:
    """Inference mode hides version counters."""
    with torch.inference_mode():
        n.norm(n.layer(x).relu_())
    return n.norm(n.layer(x).relu_())


LINEAR, BN = nn.Linear(3, 8), nn.BatchNorm1d(8)
PARAMETRIZED = nn.utils.parametrize.register_parametrization(
    nn.BatchNorm1d(8), "weight", nn.Identity()
)
PAIRS: list[tuple[Callable[[Any, Tensor], Tensor], nn.Module, nn.Module, Sequence[int], Any]] = [
    (lambda n, x: n.norm(n.layer(x).flatten(0, 1)), LINEAR, BN, (2, 5, 3), None),
    (lambda n, x: n.norm(n.layer(x).transpose(1, 2)), LINEAR, BN, (2, 5, 3), None),
    (lambda n, x: n.norm(input=n.layer(x)), LINEAR, BN, (5, 3), None),
    (lambda n, x: n.norm(n.layer(x)[..., 0, 0]), nn.Conv2d(3, 8, 2), BN, (4, 3, 2, 2), None),
    (direct, nn.ConvTranspose1d(3, 8, 2), BN, (2, 3, 5), None),
    (direct, nn.Conv3d(3, 8, 2), nn.BatchNorm3d(8), (2, 3, 4, 4, 4), None),
    (in_place, LINEAR, BN, (2, 5, 3), NOTHING),
    (after_inference, LINEAR, BN, (5, 3), NOTHING),
    (lambda n, x: n.norm(n.layer(x).relu()), LINEAR, BN, (5, 3), NOTHING),
    (lambda n, x: n.norm(n.layer(x).relu_()), LINEAR, BN, (5, 3), NOTHING),
    (lambda n, x: n.norm(n.layer(x)[:, :5]), LINEAR, nn.BatchNorm1d(5), (5, 3), OTHERS),
    # BatchNorm1d normalizes dimension 1, which a Linear does not change, even if sizes agree.
    (direct, LINEAR, nn.BatchNorm1d(5), (4, 5, 3), OTHERS),
    (direct, LINEAR, BN, (4, 8, 3), OTHERS),
    (direct, LINEAR, Doubled(16), (4, 3), "norm does not have the 8 channels of the layer"),
    (direct, LINEAR, PARAMETRIZED, (4, 3), "norm has a scale that is not a parameter"),
    (
        direct,
        LINEAR,
        nn.BatchNorm1d(8, track_running_stats=False),
        (4, 3),
        "norm keeps no running variance",
    ),
]


@pytest.mark.parametrize(("run", "layer", "norm", "shape", "reason"), PAIRS)
def test_a_normalization_takes_the_output_of_a_layer(
    run: Callable[..., Tensor], layer: nn.Module, norm: nn.Module, shape: list[int], reason: Any
) -> None:
    """A layer's output may be viewed; if no layer precedes the normalization, every step raises."""
    trunk = copy.deepcopy(Composed(run, layer=layer, norm=norm))
    opt = optimizer_of(cs.nn.convert_task_batchnorm(trunk, AB))
    loss = loss_of(trunk, torch.randn(shape))
    message = re.escape(str(reason))
    for _ in range(2 if reason else 1):
        coverage = opt.trace(loss)
        assert coverage.prioritized == ({} if reason else {"layer.weight": "norm"})
        assert coverage.plain.get("layer.weight") == reason
        if reason:
            with refused(trunk.state_dict, ValueError, f"(?s)must have a layer whose.*{message}"):
                opt.step(loss)


def reused(n: Any, x: Tensor) -> Tensor:
    """One layer before two normalizations, and one normalization behind two layers."""
    x = n.norm_a(n.twice(x)) + n.norm_b(n.twice(x))
    x = n.common(n.left(x)) + n.common(n.right(x))
    x = n.tied(n.block(n.block(x)))
    # The weight's output channels are dimension 1 of one layer and dimension 0 of the other.
    return x + n.norm_c(n.down(x[:, :, None]))[:, :, 0] + n.up(x[:, :, None])[:, :, 0]


def test_reused_modules() -> None:
    names = "twice", "left", "right", "tied", "idle", "spare"
    layers = {name: nn.Linear(4, 4) for name in names}
    norms = {name: nn.BatchNorm1d(4) for name in ("norm_a", "norm_b", "norm_c", "common")}
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    up, down = nn.ConvTranspose1d(4, 4, 1), nn.Conv1d(4, 4, 1)
    layers["tied"].weight, down.weight = layers["left"].weight, up.weight
    layers["spare"].weight = layers["right"].weight  # This layer does not run.
    trunk = Composed(reused, **layers, **norms, block=block, up=up, down=down)
    cs.nn.convert_task_batchnorm(trunk, AB)

    def coverage(layers: dict[str, str | None]) -> cs.Coverage:
        opt = optimizer_of(trunk, cs.Sum(), layers=layers)
        return opt.trace(loss_of(trunk, torch.randn(8, 4)))

    found, of_block = coverage({}), {"block.0.weight": "block.1"}
    assert found.prioritized == {"left.weight": "common", "right.weight": "common", **of_block}
    assert found.plain["twice.weight"] == "several normalizations follow: norm_a, norm_b"
    assert found.plain["idle.weight"] == "the layer has not run"
    assert found.plain["up.weight"] == "up, down differ in the dimension of their channels"
    named = {"twice": "norm_a", "left": None, "right": None, "idle": "norm_b"}
    found = coverage(named)
    assert found.prioritized == {"twice.weight": "norm_a", "idle.weight": "norm_b", **of_block}
    assert found.plain["right.weight"] == "excluded by `layers`"


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


def test_coverage_shows_frozen_parameters() -> None:
    trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    opt = optimizer_of(cs.nn.convert_task_batchnorm(trunk, AB))
    opt.step(loss_of(trunk, torch.randn(8, 3)))
    trunk[2].requires_grad_(False)
    assert opt.coverage().plain["2.weight"].startswith("frozen; ")
    assert "0.weight  prioritized by 1" in str(opt.coverage())
    trunk[0].weight.requires_grad_(False)
    assert opt.coverage().prioritized == {"0.weight": "1"}
    assert "0.weight  frozen; prioritized by 1" in str(opt.coverage())


def test_custom_layers_can_be_named() -> None:
    own = Composed(lambda n, x: nn.functional.linear(x, n.weight) + 1)
    own.weight = nn.Parameter(torch.randn(4, 3))
    trunk = cs.nn.convert_task_batchnorm(nn.Sequential(own, nn.BatchNorm1d(4)), AB)
    opt = optimizer_of(trunk, layers={"0": "1"})
    opt.step(loss_of(trunk, torch.randn(16, 3)))
    assert opt.coverage().prioritized == {"0.weight": "1"}
    assert opt.priority()["0"].shape == (4,)


def test_layers_are_never_ignored() -> None:
    """`layers` may use another name of a module, or another module with the same weight."""
    trunk, _, _ = deep()
    trunk.alias, trunk.emb = trunk[0][0], nn.Embedding(3, 4)
    opt = optimizer_of(trunk, cs.Sum(), layers={"alias": None, "emb": None})
    coverage = opt.trace(loss_of(trunk, torch.randn(16, 4)))
    assert coverage.plain["0.0.weight"] == "excluded by `layers`"
    for layers, message in (
        ({"0.1.a": "0.1"}, "with a shared weight, got '0.1.a'"),
        ({"0": None}, "with a shared weight, got '0'"),
        ({"alias": None, "0.0": "0.1"}, "one weight to one normalization"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer_of(trunk, cs.Sum(), layers=layers)


def test_a_whole_network_of_tasks() -> None:
    """Heads inside the trunk have normalizations; layers of a head belong to its task."""
    blocks = {"stem": (3, 4), "head_a": (4, 4), "head_b": (4, 4)}
    trunk = nn.ModuleDict(
        {n: nn.Sequential(nn.Linear(*of), nn.BatchNorm1d(4)) for n, of in blocks.items()}
    )
    opt = optimizer_of(cs.nn.convert_task_batchnorm(trunk, AB))
    x = torch.randn(16, 3)
    opt.step(lambda task: trunk[f"head_{task}"](trunk["stem"](x)).square().mean())
    coverage = opt.coverage()
    assert coverage.prioritized == {"stem.0.weight": "stem.1"}
    assert coverage.own["head_a.0.weight"] == "a"
    assert list(opt.priority()) == ["stem.0"]
    assert str(coverage).startswith("1 of 2 shared parameters are prioritized, 75.0 % of 16")


class Deep(nn.Sequential):
    """Blocks, of which only some run."""

    runs: Sequence[int] = (0,)

    def forward(self, x: Tensor) -> Tensor:
        for n in self.runs:
            x = torch.relu(self[n](x))
        return x


def deep(
    blocks: int = 3, **options: Any
) -> tuple[Deep, cs.MultiTaskOptimizer, Callable[[str], Tensor]]:
    trunk = Deep(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(blocks)))
    trunk = cs.nn.convert_task_batchnorm(trunk, AB)
    return trunk, optimizer_of(trunk, **options), loss_of(trunk, torch.randn(16, 4))


@BOTH_PHASES
@pytest.mark.filterwarnings("ignore:the gradient of")
def test_a_layer_that_first_runs_later(schedule: cs.Schedule) -> None:
    """The layer is prioritized in the same step, as if `layers` had named it, even in a copy."""
    trunk, opt, _ = deep(schedule=schedule)
    told, layers = copy.deepcopy(trunk), {f"{n}.0": f"{n}.1" for n in range(3)}
    runs, x = [(trunk, opt)], torch.randn(16, 4)
    runs.append((told, optimizer_of(told, schedule=schedule, layers=layers)))
    for depth in (1, 1, 2, 3):
        for network, optimizer in runs:
            network.runs = range(depth)
            optimizer.step(loss_of(network, x))
        if len(runs) == 2:
            runs.append(copy.deepcopy(runs[0]))
        coverage = opt.coverage()
        assert len(coverage.prioritized) == depth
        waiting = [name for name, why in coverage.plain.items() if why == "the layer has not run"]
        assert waiting == [f"{n}.0.weight" for n in range(depth, 3)]
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in trunk.modules())
    for network, _ in runs[1:]:
        assert_equal(network.state_dict(), trunk.state_dict())


@BOTH_PHASES
def test_a_layer_of_one_task(schedule: cs.Schedule) -> None:
    """One layer runs only for the second task; below, one task runs no prioritized layer."""
    trunk, opt, loss = deep(schedule=schedule)

    def deeper(task: str) -> Tensor:
        trunk.runs = [0] if task == "a" else [0, 1]
        return loss(task)

    opt.step(deeper)
    assert opt.coverage().prioritized == {"0.0.weight": "0.1"}
    assert opt.coverage().own["1.0.weight"] == "b"  # No other task reaches it.
    blocks = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
    trunk = cs.nn.convert_task_batchnorm(
        Deep(nn.Sequential(*blocks[:2]), nn.Sequential(blocks[2])), [*AB, "c"]
    )
    opt, x = optimizer_of(trunk, tasks=[*AB, "c"], schedule=schedule), torch.randn(8, 4)
    opt.step(lambda task: trunk[int(task == "a")](x).square().mean())
    assert opt.coverage().prioritized == {"0.0.weight": "0.1"}


def test_a_first_run_in_a_pass_that_fails() -> None:
    trunk, opt, loss = deep()
    opt.step(loss)
    trunk.runs = [0, 1]
    with pytest.raises(ZeroDivisionError):
        opt.step(lambda task: loss(task) / (1 // 0))
    opt.step(loss)
    assert "1.0.weight" in opt.coverage().prioritized


def test_a_first_run_outside_a_step_changes_nothing() -> None:
    """Validation, also in inference mode and of copies, neither adds pairs nor sets hooks."""
    trunk, opt, loss = deep()
    opt.step(loss)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for network in (trunk, copy.deepcopy(trunk), pickle.loads(pickle.dumps(trunk))):
            network.runs = range(3)
            network.eval()
            with mode(), cs.nn.active_task(network, "a"):
                network(torch.randn(16, 4))
        trunk.train()
        trunk.runs = [0]
        opt.step(loss)
        assert opt.coverage().prioritized == {"0.0.weight": "0.1"}


def test_a_deleted_optimizer_leaves_no_hooks() -> None:
    """Neither the torch optimizer nor layers that have not run keep a hook."""
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


ORDERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": lambda n, x: n.one(n.first(x)) + n.other(n.second(x)),
    "exchanged": lambda n, x: n.other(n.first(x)) + n.one(n.second(x)),
    "one for both": lambda n, x: n.one(n.first(x)) + n.one(n.second(x)),
    "without": lambda n, x: n.one(n.first(x)) + n.second(x),
    "activated": lambda n, x: n.one(torch.relu(n.first(x))) + n.other(n.second(x)),
    "a row": lambda n, x: n.other(n.second(n.one(n.first(x)))),
    "another row": lambda n, x: n.second(n.third(n.first(x))),
}


def changing(order: str = "plain") -> tuple[Composed, Tensor]:
    """Two layers and three normalizations, two of which have opposed priorities."""
    layers = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)}
    norms = {name: nn.BatchNorm1d(4) for name in ("one", "other", "third")}
    trunk = cs.nn.convert_task_batchnorm(Composed(ORDERS[order], **layers, **norms), AB)
    scales = torch.tensor([2.0, 2.0, 0.1, 0.1])
    for children in (trunk.one.children(), reversed([*trunk.third.children()])):
        for child, scale in zip(children, (scales, scales.flip(0)), strict=True):
            child.weight.data = scale.clone()
    return trunk, torch.randn(16, 4)


def assert_as_new(
    opt: cs.MultiTaskOptimizer,
    trunk: nn.Module,
    step: Callable[[cs.MultiTaskOptimizer, nn.Module], object],
    compares: bool = True,
) -> None:
    """A step sees the layers as a new optimizer would, and makes the same updates."""
    twin = copy.deepcopy(trunk)
    fresh = optimizer_of(twin)
    step(opt, trunk)
    step(fresh, twin)
    if compares:
        found, expected = opt.coverage(), fresh.coverage()
        assert (found.prioritized, found.plain) == (expected.prioritized, expected.plain)
        assert_equal(opt.priority(), fresh.priority())
        assert_equal([*trunk.parameters()], [*twin.parameters()])


@pytest.mark.parametrize("by_attribute", [False, True])
@pytest.mark.parametrize("call", ["step", "trace"])
def test_a_normalization_that_is_exchanged(by_attribute: bool, call: str) -> None:
    """The new scale and variance determine the priority from the next step or trace on."""
    trunk, x = changing("a row")
    opt = optimizer_of(trunk)
    opt.step(loss_of(trunk, x))
    before, priority = opt.coverage().prioritized, opt.priority()["first"]
    assert before == {"first.weight": "one", "second.weight": "other"}
    if by_attribute:
        trunk.one, trunk.third = trunk.third, trunk.one
    else:
        trunk.run = ORDERS["another row"]
    x = torch.randn(16, 4)
    assert_as_new(opt, trunk, lambda opt, trunk: getattr(opt, call)(loss_of(trunk, x)))
    assert (opt.coverage().prioritized == before) == by_attribute
    assert torch.equal(opt.priority()["first"], 1 - priority)


@pytest.mark.parametrize(
    ("order", "together"),
    [
        *((order, False) for order in ("exchanged", "one for both", "without", "activated")),
        ("exchanged", True),
    ],
)
def test_normalizations_that_have_run_before_in_other_places(order: str, together: bool) -> None:
    """Pairs also change back. If one pass serves all tasks, the next step sees the change."""
    trunk, x = changing()
    opt = optimizer_of(trunk)

    def step(opt: cs.MultiTaskOptimizer, trunk: nn.Module) -> None:
        if together:
            opt.step_together(lambda run: {t: opposed(y, t) for t, y in run(x).items()})
        else:
            opt.step(loss_of(trunk, x))

    orders = [n for n in ("plain", "exchanged", order, "plain", order) for _ in range(2)]
    for number, trunk.run in enumerate(ORDERS[name] for name in orders):
        assert_as_new(opt, trunk, step, compares=not together or number % 2 == 1)
    watched = watched_passes(opt)
    for _ in range(3):  # Pairs stay valid without watching.
        step(opt, trunk)
    assert watched_passes(opt) == watched


def test_a_network_that_is_different_in_each_pass() -> None:
    """Watching ends once it finds nothing new; a layer that first runs later is still found."""
    trunk, opt, loss = deep(4, lr=1e-3)
    trunk[3].requires_grad_(False)  # Frozen: no gradient reveals its first run.
    for step in range(40):
        trunk.runs = torch.randperm(3, generator=torch.Generator().manual_seed(step)).tolist()
        opt.step(loss)
        if step == 20:
            watched = watched_passes(opt)
    assert watched_passes(opt) == watched
    assert len(opt.coverage().prioritized) == 3
    trunk.runs = [*trunk.runs, 3]
    opt.step(loss)
    assert len(opt.coverage().prioritized) == 4


def test_normalizations_that_take_turns() -> None:
    """A layer whose normalization alternates has no priority, and the coverage says why."""
    trunk, x = changing()
    opt = optimizer_of(trunk, cs.Sum())
    for step in range(9):
        trunk.run = ORDERS["exchanged" if step % 2 else "plain"]
        opt.step(loss_of(trunk, x))
    assert opt.coverage().plain["first.weight"] == "several normalizations follow: one, other"


def test_a_normalization_that_is_exchanged_in_the_last_pass_of_a_step() -> None:
    """The next step finds the exchange; layers that do not run in that step keep their pairs."""
    trunk, x = changing("a row")
    opt, loss = optimizer_of(trunk), loss_of(trunk, x)
    opt.step(loss)

    def later(task: str) -> Tensor:
        trunk.run = ORDERS["another row" if task == "b" else "a row"]
        return loss(task)

    opt.step(later)
    opt.step(loss)
    assert opt.coverage().prioritized["first.weight"] == "third"
    watched = watched_passes(opt)
    opt.step(loss)
    assert watched_passes(opt) == watched


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
