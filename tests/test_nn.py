"""Task-specific normalization, conversion, and which layer is seen in front of it."""

import copy

import pytest
import torch
from networks import PRIORITIZED, TASKS, Setup, Trunk
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.checks import checked_overrides
from cs_kernels.layout import find_layout, gammas
from cs_kernels.watching import Watcher


@pytest.mark.parametrize(
    ("ours", "theirs", "shape"),
    [
        (cs.nn.TaskBatchNorm1d, nn.BatchNorm1d, (6, 5)),
        (cs.nn.TaskBatchNorm1d, nn.BatchNorm1d, (6, 5, 3)),
        (cs.nn.TaskBatchNorm2d, nn.BatchNorm2d, (6, 5, 3, 3)),
        (cs.nn.TaskBatchNorm3d, nn.BatchNorm3d, (6, 5, 2, 3, 3)),
    ],
)
def test_each_task_is_a_torch_batchnorm(
    ours: type[cs.nn.TaskBatchNorm], theirs: type[nn.Module], shape: tuple[int, ...]
) -> None:
    options = {"eps": 1e-3, "momentum": 0.3, "affine": True, "track_running_stats": True}
    norm = ours(5, TASKS, **options)
    plain = {task: theirs(5, **options) for task in TASKS}
    assert norm.tasks == tuple(TASKS)
    for task in [*TASKS, TASKS[0]]:
        x = torch.randn(shape)
        with cs.nn.active_task(norm, task):
            assert torch.equal(norm(x), plain[task](x))
    for task in TASKS:
        state = norm.get_submodule(task).state_dict()
        assert state.keys() == plain[task].state_dict().keys()
        for name, tensor in plain[task].state_dict().items():
            assert torch.equal(state[name], tensor)
    assert set(norm.state_dict()) == {f"{t}.{k}" for t in TASKS for k in plain[t].state_dict()}


def test_options_reach_every_task() -> None:
    norm = cs.nn.TaskBatchNorm1d(3, TASKS, 1e-2, None, False, False)
    for task in TASKS:
        child = norm.of(task)
        assert (child.eps, child.momentum, child.affine) == (1e-2, None, False)
        assert child.running_var is None


def test_conversion_keeps_a_pretrained_network() -> None:
    torch.manual_seed(0)
    original = Trunk()
    for _ in range(3):
        original(torch.randn(4, 3, 6, 6))
    original.stem_norm.weight.requires_grad_(False)
    original.eval()
    converted = copy.deepcopy(original)
    assert cs.nn.convert_task_batchnorm(converted, TASKS) is converted
    x = torch.randn(4, 3, 6, 6)
    for task in TASKS:
        with cs.nn.active_task(converted, task):
            assert torch.equal(converted(x), original(x))
        assert not converted.stem_norm.of(task).weight.requires_grad
        assert not converted.stem_norm.of(task).training
    weights = {converted.stem_norm.of(task).weight.data_ptr() for task in TASKS}
    assert len(weights) == len(TASKS)


def test_conversion_of_subclasses_and_shared_modules() -> None:
    class Normalized(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(super().forward(x))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = Normalized(3)
            self.two = self.one
            self.inner = nn.Sequential(self.one, nn.SyncBatchNorm(3))

    network = cs.nn.convert_task_batchnorm(Network(), TASKS)
    assert isinstance(network.one, cs.nn.TaskBatchNorm)
    assert network.one is network.two is network.inner[0]
    assert isinstance(network.one.of("depth"), Normalized)
    assert isinstance(network.inner[1].of("depth"), nn.SyncBatchNorm)
    again = cs.nn.convert_task_batchnorm(network, TASKS)
    assert again.one is network.one
    alone = cs.nn.convert_task_batchnorm(nn.BatchNorm1d(3), TASKS)
    assert isinstance(alone, cs.nn.TaskBatchNorm)


def test_active_task_is_restored() -> None:
    setup = Setup()
    norms = cs.nn.task_norms(setup.trunk)
    cs.nn.set_task(setup.trunk, "depth")
    with cs.nn.active_task(setup.trunk, "edges"):
        assert {norm.active for norm in norms} == {"edges"}
        with cs.nn.active_task(setup.trunk, "normals"):
            assert {norm.active for norm in norms} == {"normals"}
        assert {norm.active for norm in norms} == {"edges"}
    assert {norm.active for norm in norms} == {"depth"}


def test_state_dict_round_trip() -> None:
    first, second = Setup(0), Setup(1)
    second.trunk.load_state_dict(first.trunk.state_dict())
    x = first.batches[0][0]
    for task in TASKS:
        with cs.nn.active_task(first.trunk, task), cs.nn.active_task(second.trunk, task):
            assert torch.equal(first.trunk(x), second.trunk(x))


def _layout(trunk: nn.Module, x: Tensor, **overrides: str | None) -> cs.layout.Layout:
    watcher = Watcher(trunk, lambda module, task: None)
    for task in TASKS:
        with cs.nn.active_task(trunk, task), watcher.passing(task) as watched:
            trunk(x)
        assert watched
        watcher.learned(task)
    return find_layout(trunk, TASKS, watcher, checked_overrides(trunk, overrides), {})


@pytest.mark.parametrize("autocast", [False, True])
def test_layers_are_seen_not_named(autocast: bool) -> None:
    setup = Setup(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        layout = _layout(setup.trunk, setup.batches[0][0].float())
    assert layout.coverage.prioritized == PRIORITIZED
    assert layout.coverage.plain["bare.weight"].startswith("no task-specific normalization")
    assert "stem.bias" in layout.coverage.plain
    assert {layer.name: layer.out_channel_dim for layer in layout.layers}["up"] == 1
    report = str(layout.coverage)
    assert "4 of 9 shared parameters are prioritized" in report
    assert "stem.weight" in report
    assert "prioritized by stem_norm" in report
    # No hook is left behind.
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in setup.trunk.modules())


def test_a_scale_that_is_no_parameter_gives_no_priority() -> None:
    setup = Setup(dtype=torch.float32)
    norm = setup.trunk.stem_norm.get_submodule(TASKS[0])
    torch.nn.utils.parametrize.register_parametrization(norm, "weight", nn.Identity())
    layout = _layout(setup.trunk, setup.batches[0][0].float())
    assert "stem_norm has a scale that is not a parameter" in layout.coverage.plain["stem.weight"]


class Reused(nn.Module):
    """One layer in front of two normalizations, one normalization behind two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(4, 4)
        self.norm_a = nn.BatchNorm1d(4)
        self.norm_b = nn.BatchNorm1d(4)
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)
        self.common = nn.BatchNorm1d(4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.left.weight
        self.idle = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_a(self.twice(x)) + self.norm_b(self.twice(x))
        x = self.common(self.left(x)) + self.common(self.right(x))
        x = self.block(self.block(x))
        result: Tensor = self.tied(x)
        return result


def test_reused_modules() -> None:
    trunk = cs.nn.convert_task_batchnorm(Reused(), TASKS)
    coverage = _layout(trunk, torch.randn(8, 4)).coverage
    assert coverage.prioritized == {
        "left.weight": "common",
        "right.weight": "common",
        "block.0.weight": "block.1",
    }
    assert coverage.plain["twice.weight"] == "several normalizations follow: norm_a, norm_b"
    assert coverage.plain["idle.weight"] == "the layer has not run"


def test_explicit_layers_override() -> None:
    trunk = cs.nn.convert_task_batchnorm(Reused(), TASKS)
    overrides = {"twice": "norm_a", "left": None, "right": None, "idle": "norm_b"}
    coverage = _layout(trunk, torch.randn(8, 4), **overrides).coverage
    assert coverage.prioritized == {
        "twice.weight": "norm_a",
        "block.0.weight": "block.1",
        "idle.weight": "norm_b",
    }
    assert coverage.plain["right.weight"] == "excluded by `layers`"


def test_a_normalization_without_statistics_gives_no_priority() -> None:
    trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False))
    cs.nn.convert_task_batchnorm(trunk, TASKS)
    coverage = _layout(trunk, torch.randn(8, 3)).coverage
    assert coverage.plain["0.weight"] == "1 keeps no running variance"


def test_a_normalization_without_scale_counts_as_one() -> None:
    trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False))
    cs.nn.convert_task_batchnorm(trunk, TASKS)
    (layer,) = _layout(trunk, torch.randn(8, 3)).layers
    assert all(torch.equal(gamma, torch.ones(4)) for gamma in gammas([layer]))
    sgd = torch.optim.SGD(trunk.parameters(), lr=0.1)
    opt = cs.MultiTaskOptimizer(trunk, sgd, TASKS)
    opt.step(lambda task: trunk(torch.randn(8, 3)).square().mean())
    assert opt.priority()["0"].shape == (4,)


def test_trace_changes_nothing() -> None:
    setup = Setup()
    opt = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS)
    before = setup.state()
    coverage = opt.trace(setup.closure(0))
    assert coverage.prioritized == PRIORITIZED
    assert all(torch.equal(a, b) for a, b in zip(before, setup.state(), strict=True))
