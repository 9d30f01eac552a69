"""Task-specific normalization: layers in front of it, conversion, checkpoints, a task's life."""

import copy
from functools import partial

import pytest
import torch
from networks import (
    AB,
    PRIORITIZED,
    TASKS,
    Setup,
    Trunk,
    assert_equal,
    optimizer_of,
    refused,
    started,
)
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.trunk.layers import gammas
from cs_kernels.trunk.pairing import checked_overrides, find_layout
from cs_kernels.trunk.watcher import Watcher

pytestmark = pytest.mark.loop


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
        assert_equal(norm.get_submodule(task).state_dict(), plain[task].state_dict())
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


def _layout(trunk: nn.Module, x: Tensor, **overrides: str | None) -> cs.Layout:
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
    coverage = _layout(cs.nn.convert_task_batchnorm(trunk, TASKS), torch.randn(8, 3)).coverage
    assert coverage.plain["0.weight"] == "1 keeps no running variance"


def test_a_normalization_without_scale_counts_as_one() -> None:
    trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False))
    cs.nn.convert_task_batchnorm(trunk, TASKS)
    (layer,) = _layout(trunk, torch.randn(8, 3)).layers
    assert all(torch.equal(gamma, torch.ones(4)) for gamma in gammas([layer]))
    opt = optimizer_of(trunk, tasks=TASKS)
    opt.step(lambda task: trunk(torch.randn(8, 3)).square().mean())
    assert opt.priority()["0"].shape == (4,)


def test_trace_changes_nothing() -> None:
    setup, opt = started()
    before = setup.state()
    assert opt.trace(setup.closure(0)).prioritized == PRIORITIZED
    assert_equal(before, setup.state())


def test_nothing_to_convert() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.LayerNorm(4))
    with pytest.raises(ValueError, match=r"batch normalization.*2 LayerNorm, 1 GroupNorm"):
        cs.nn.convert_task_batchnorm(module, AB)
    with pytest.raises(ValueError, match=r"got Linear with these normalizations: none"):
        cs.nn.convert_task_batchnorm(nn.Linear(3, 4), AB)


def test_modules_that_refer_to_each_other() -> None:
    parent = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    parent[0].add_module("parent", parent)
    cs.nn.convert_task_batchnorm(parent, AB)
    assert isinstance(parent[1], cs.nn.TaskBatchNorm)


def _trained(seed: int = 0) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(0))
    x = torch.randn(2, 3, 6, 6)
    for _ in range(2):
        network(x)
    nn.init.uniform_(network[1].weight)
    return network, x


def test_a_checkpoint_of_the_unconverted_network() -> None:
    plain, x = _trained()
    state = copy.deepcopy(plain.state_dict())
    for strict in (True, False):
        trunk = cs.nn.convert_task_batchnorm(_trained(1)[0], TASKS)
        assert not any(trunk.load_state_dict(state, strict=strict))
        trunk.eval(), plain.eval()
        for task in TASKS:
            with cs.nn.active_task(trunk, task):
                assert torch.equal(trunk(x), plain(x))
        assert state.keys() == plain.state_dict().keys()
    # Missing and unexpected keys are still reported.
    del state["1.bias"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"1\.depth\.bias"'):
        trunk.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*nobody"):
        trunk.load_state_dict({**plain.state_dict(), "1.nobody": torch.ones(1)})


def test_a_task_named_as_a_weight() -> None:
    """`norm.weight.weight` is the converted one's, `norm.weight` the unconverted one's."""
    plain, x = _trained()
    trunk = cs.nn.convert_task_batchnorm(_trained(1)[0], ["weight", "bias"])
    trunk.load_state_dict(plain.state_dict())
    again = cs.nn.convert_task_batchnorm(_trained(2)[0], ["weight", "bias"])
    again.load_state_dict(trunk.state_dict())
    with cs.nn.active_task(again.eval(), "bias"):
        assert torch.equal(again(x), plain.eval()(x))


def test_extract_task() -> None:
    plain, x = _trained()
    trunk = cs.nn.convert_task_batchnorm(copy.deepcopy(plain), TASKS)
    opt = optimizer_of(trunk, tasks=TASKS)
    for _ in range(2):
        opt.step(lambda task: (1 + TASKS.index(task)) * trunk(x).square().mean())
    before = copy.deepcopy(trunk.state_dict())
    for task in TASKS:
        network = cs.nn.extract_task(trunk, task)
        assert not cs.nn.task_norms(network)
        assert type(network[1]) is nn.BatchNorm2d
        state = network.state_dict()
        assert state.keys() == plain.state_dict().keys()
        fresh = copy.deepcopy(plain)
        fresh.load_state_dict(state)
        trunk.eval(), network.eval(), fresh.eval()
        with cs.nn.active_task(trunk, task):
            assert torch.equal(network(x), trunk(x))
            assert torch.equal(fresh(x), trunk(x))
        exported = torch.export.export(network, (x,))
        torch.testing.assert_close(exported.module()(x), network(x))
        with torch.no_grad():
            network[0].weight.zero_()
    assert_equal(trunk.state_dict(), before)
    alone = cs.nn.extract_task(cs.nn.TaskBatchNorm1d(3, TASKS), "edges")
    assert type(alone) is nn.BatchNorm1d
    with pytest.raises(ValueError, match=r"task must be one of.*'flow'"):
        cs.nn.extract_task(trunk, "flow")
    with pytest.raises(ValueError, match=r"task-specific normalization, got Conv2d with none"):
        cs.nn.extract_task(nn.Conv2d(1, 1, 1), "depth")


def test_extract_a_module_that_is_used_twice() -> None:
    norm = nn.BatchNorm1d(3)
    trunk = nn.ModuleDict({"one": norm, "inner": nn.Sequential(nn.Linear(3, 3), norm)})
    network = cs.nn.extract_task(cs.nn.convert_task_batchnorm(trunk, AB), "a")
    assert network["one"] is network["inner"][1]


def test_add_task() -> None:
    trunk, x = _trained()
    opt = optimizer_of(cs.nn.convert_task_batchnorm(trunk, AB))
    opt.step(lambda task: (1 if task == "a" else 3) * trunk(x).square().mean())
    trunk[1].of("a").weight.requires_grad_(False)
    for task, like, message in (
        ("a", "b", "task must be a new one, got 'a'"),
        ("c", "d", "task must be one of"),
        ("x.y", "a", "without a dot"),
        ("forward", "a", "named as an attribute"),
    ):
        with pytest.raises(ValueError, match=message):
            cs.nn.add_task(trunk, task, like=like)
        assert trunk[1].tasks == ("a", "b")
    with pytest.raises(ValueError, match="task-specific normalization, got Linear"):
        cs.nn.add_task(nn.Linear(3, 3), "c", like="a")
    new = cs.nn.add_task(trunk, "c", like="a")
    assert [p.requires_grad for p in new] == [False, True]
    trunk.eval()
    with cs.nn.active_task(trunk, "a"):
        expected = trunk(x)
    with cs.nn.active_task(trunk, "c"):
        assert torch.equal(trunk(x), expected)
    trunk.train()
    with pytest.raises(ValueError, match=r"optimizer must hold.*1\.c\.bias"):
        cs.MultiTaskOptimizer(trunk, opt.optimizer, [*AB, "c"])
    opt.optimizer.add_param_group({"params": new})
    opt = cs.MultiTaskOptimizer(trunk, opt.optimizer, [*AB, "c"])
    opt.step(lambda task: trunk(x).square().mean() * (2 if task == "c" else 1))
    assert not torch.equal(trunk[1].of("a").bias, trunk[1].of("c").bias)


def test_update_bn() -> None:
    """One task's statistics are torch's own of that task's network; the others' stay."""
    trunk, _ = _trained()
    cs.nn.convert_task_batchnorm(trunk, TASKS)
    trunk[2].eval()
    loader = [[torch.randn(4, 3, 6, 6), torch.zeros(4)] for _ in range(3)]
    plain = cs.nn.extract_task(trunk, "depth")
    torch.optim.swa_utils.update_bn(loader, plain)
    before = copy.deepcopy(trunk.state_dict())
    modes = [module.training for module in trunk.modules()]
    cs.nn.update_bn(loader, trunk, "depth")
    assert modes == [module.training for module in trunk.modules()]
    assert trunk[1].of("depth").momentum == 0.1
    assert trunk[1].active is None
    expected = {f"1.depth.{name}": of_depth for name, of_depth in plain[1].state_dict().items()}
    assert_equal(dict(trunk.state_dict()), {**before, **expected})
    for name in ("1.depth.running_mean", "1.depth.running_var"):
        assert not torch.equal(expected[name], before[name])
    for bad, error, message in (
        ([], ValueError, "loader must yield"),
        ([torch.randn(4, 3, 6, 6), "no tensor"], TypeError, "conv2d"),
    ):
        with refused(trunk.state_dict, error, message):
            cs.nn.update_bn(bad, trunk, "depth")
        assert trunk[1].of("depth").momentum == 0.1
    with pytest.raises(ValueError, match="task must be one of"):
        cs.nn.update_bn(loader, trunk, "flow")


def test_update_bn_leaves_frozen_normalizations_alone() -> None:
    """Plain ones and the task's; but a trunk in evaluation is not taken for a frozen one."""
    loader = [torch.randn(8, 3) for _ in range(3)]
    layers = [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3)]
    trunk = nn.Sequential(*layers, cs.nn.TaskBatchNorm1d(3, TASKS), nn.BatchNorm1d(3))
    trunk[3].eval()
    trunk[5].eval()
    trunk.add_module("6", cs.nn.TaskBatchNorm1d(3, TASKS).eval())
    for evaluates in (False, True):
        if evaluates:
            trunk.eval()
        before = copy.deepcopy(trunk.state_dict())
        cs.nn.update_bn(loader, trunk, "depth")
        after = trunk.state_dict()
        changed = {name.rpartition(".")[0] for name in after if not after[name].equal(before[name])}
        assert changed == ({"4.depth", "6.depth"} if evaluates else {"1", "4.depth"})
        assert not any(trunk[n].training for n in (3, 5, 6))
    trunk.eval()
    trunk[5:].train()
    before = copy.deepcopy(trunk.state_dict())
    cs.nn.update_bn(loader, trunk, "depth")
    assert not trunk[6].of("depth").running_mean.equal(before["6.depth.running_mean"])
    assert trunk[4].of("depth").running_mean.equal(before["4.depth.running_mean"])
    trunk.train()
    for norm in cs.nn.task_norms(trunk):
        norm.eval()
    with refused(trunk.state_dict, ValueError, "must have a normalization of 'depth' in training"):
        cs.nn.update_bn(loader, trunk, "depth")


def test_a_lazy_normalization_has_to_run_first() -> None:
    module = nn.Sequential(nn.Linear(2, 4), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match=r"must have run once.*got 1, a LazyBatchNorm1d"):
        cs.nn.convert_task_batchnorm(module, AB)
    module(torch.randn(3, 2))
    cs.nn.convert_task_batchnorm(module, AB)


@pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning"
)
def test_traces_of_a_converted_network_are_refused() -> None:
    """They would keep one task for good; traces of one task's network are allowed."""
    trunk, x = _trained()
    cs.nn.set_task(cs.nn.convert_task_batchnorm(trunk, AB).eval(), "a")
    for trace in (torch.fx.symbolic_trace, partial(torch.jit.trace, example_inputs=x)):
        with pytest.raises(RuntimeError, match="extract_task"):
            trace(trunk)
    plain = cs.nn.extract_task(trunk, "a")
    assert torch.equal(torch.fx.symbolic_trace(plain)(x), trunk(x))


@pytest.mark.parametrize("assign", [False, True])
def test_an_unconverted_checkpoint_in_a_bigger_network(assign: bool) -> None:
    """Every task has memory of its own afterwards."""
    plain, x = _trained()
    state = {f"trunk.{name}": tensor for name, tensor in plain.state_dict().items()}
    network = nn.ModuleDict({"trunk": cs.nn.convert_task_batchnorm(_trained(1)[0], TASKS)})
    network.load_state_dict(state, assign=assign)
    network.eval(), plain.eval()
    norm = network["trunk"][1]
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        places = {getattr(norm.of(task), name).data_ptr() for task in TASKS}
        assert len(places | {getattr(plain[1], name).data_ptr()}) == len(TASKS) + 1
    for task in TASKS:
        assert isinstance(norm.of(task).weight, nn.Parameter)
        with cs.nn.active_task(network, task):
            assert torch.equal(network["trunk"](x), plain(x))


def test_a_checkpoint_with_one_task_more() -> None:
    """The message has the keys of the checkpoint."""
    more = cs.nn.convert_task_batchnorm(_trained()[0], ["a", "b", "c"])
    trunk = cs.nn.convert_task_batchnorm(_trained(1)[0], AB)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"1\.c\.weight"') as raised:
        trunk.load_state_dict(more.state_dict())
    assert "a.c" not in str(raised.value)


class Activated(nn.BatchNorm2d):
    """With a module inside, as timm has them."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.act = nn.PReLU(features)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.act(super().forward(x))
        return result


def test_an_unconverted_checkpoint_of_a_nested_normalization() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 1), Activated(4))
    nn.init.uniform_(plain[1].act.weight)
    trunk = cs.nn.convert_task_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 1), Activated(4)), AB)
    trunk.load_state_dict(plain.state_dict())
    assert torch.equal(trunk[1].of("b").act.weight, plain[1].act.weight)


def test_a_weight_of_two_kinds_of_layers() -> None:
    """Its output channels are dimension 1 of one of them and dimension 0 of the other."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(6, 6, 3, padding=1, bias=False)
            self.down = nn.Conv2d(6, 6, 3, padding=1, bias=False)
            self.down.weight = self.up.weight
            self.norm = nn.BatchNorm2d(6)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.up(self.norm(self.down(x)))
            return result

    trunk = cs.nn.convert_task_batchnorm(Tied(), TASKS)
    coverage = _layout(trunk, torch.randn(2, 6, 4, 4)).coverage
    assert coverage.plain["up.weight"] == "up, down have other dimensions for their outputs"


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
