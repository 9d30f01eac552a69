"""Task-specific normalization: conversion, checkpoints, a task's life."""

import copy
from functools import partial

import pytest
import torch
from networks import AB, TASKS, Setup, Trunk, assert_equal, optimizer_of, refused
from torch import Tensor, nn

import cs_kernels as cs

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
@pytest.mark.parametrize("options", [(1e-3, 0.3), (1e-2, None, False, False)])
def test_each_task_is_a_torch_batchnorm(
    ours: type[cs.nn.TaskBatchNorm],
    theirs: type[nn.Module],
    shape: tuple[int, ...],
    options: tuple[float | bool | None, ...],
) -> None:
    norm = ours(5, TASKS, *options)
    plain = {task: theirs(5, *options) for task in TASKS}
    assert norm.tasks == tuple(TASKS)
    for task in [*TASKS, TASKS[0]]:
        x = torch.randn(shape)
        with cs.nn.active_task(norm, task):
            assert torch.equal(norm(x), plain[task](x))
        assert repr(norm.of(task)) == repr(plain[task])
    for task in TASKS:
        assert_equal(norm.get_submodule(task).state_dict(), plain[task].state_dict())
    assert set(norm.state_dict()) == {f"{t}.{k}" for t in TASKS for k in plain[t].state_dict()}


# --- conversion ---


def _assert_predict(trunk: nn.Module, plain: nn.Module, x: Tensor) -> None:
    """Each task predicts, in evaluation, as a network without task-specific normalization."""
    for task in cs.nn.task_norms(trunk)[0].tasks:
        with cs.nn.active_task(trunk.eval(), task):
            assert torch.equal(trunk(x), plain.eval()(x))


def test_conversion_keeps_a_pretrained_network() -> None:
    original, x = Trunk(), torch.randn(4, 3, 6, 6)
    for _ in range(3):
        original(torch.randn(4, 3, 6, 6))
    original.stem_norm.weight.requires_grad_(False)
    original.eval()
    converted = copy.deepcopy(original)
    assert cs.nn.convert_task_batchnorm(converted, TASKS) is converted
    norms = [converted.stem_norm.of(task) for task in TASKS]
    assert not converted.stem_norm.training
    assert not any(norm.training or norm.weight.requires_grad for norm in norms)
    assert len({norm.weight.data_ptr() for norm in norms}) == len(TASKS)
    _assert_predict(converted, original, x)


def test_conversion_of_subclasses_and_shared_modules() -> None:
    class Normalized(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(super().forward(x))

    norm = Normalized(3)
    network = nn.ModuleDict({"one": norm, "two": norm})
    network["inner"] = nn.Sequential(norm, nn.SyncBatchNorm(3))
    network["inner"].add_module("parent", network)  # Modules may refer to each other.
    cs.nn.convert_task_batchnorm(network, TASKS)
    converted, inner = network["one"], network["inner"]
    assert isinstance(converted, cs.nn.TaskBatchNorm)
    assert converted is network["two"] is inner[0]
    assert isinstance(converted.of("depth"), Normalized)
    assert isinstance(inner[1].of("depth"), nn.SyncBatchNorm)
    assert cs.nn.convert_task_batchnorm(network, TASKS)["one"] is converted
    one_task = cs.nn.extract_task(network, "edges")
    assert type(one_task["one"]) is Normalized
    assert one_task["one"] is one_task["inner"][0]
    alone = cs.nn.convert_task_batchnorm(nn.BatchNorm1d(3), TASKS)
    assert isinstance(alone, cs.nn.TaskBatchNorm)
    assert type(cs.nn.extract_task(alone, "edges")) is nn.BatchNorm1d


def test_what_cannot_be_converted() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.LayerNorm(4))
    with pytest.raises(ValueError, match=r"batch normalization.*2 LayerNorm, 1 GroupNorm"):
        cs.nn.convert_task_batchnorm(module, AB)
    with pytest.raises(ValueError, match=r"got Linear with these normalizations: none"):
        cs.nn.convert_task_batchnorm(nn.Linear(3, 4), AB)
    module = nn.Sequential(nn.Linear(2, 4), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match=r"must have run once.*got 1, a LazyBatchNorm1d"):
        cs.nn.convert_task_batchnorm(module, AB)
    module(torch.randn(3, 2))
    cs.nn.convert_task_batchnorm(module, AB)


def test_active_task_is_restored() -> None:
    trunk = Setup().trunk

    def active() -> set[str | None]:
        return {norm.active for norm in cs.nn.task_norms(trunk)}

    cs.nn.set_task(trunk, "depth")
    with cs.nn.active_task(trunk, "edges"):
        assert active() == {"edges"}
        with cs.nn.active_task(trunk, "normals"):
            assert active() == {"normals"}
        assert active() == {"edges"}
    assert active() == {"depth"}


# --- checkpoints ---


class Activated(nn.BatchNorm2d):
    """With a module inside, as timm has them."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.act = nn.PReLU(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


def _trained(seed: int = 0, norm: type[nn.Module] = nn.BatchNorm2d) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), norm(4), nn.ReLU(), nn.Flatten(0))
    x = torch.randn(2, 3, 6, 6)
    for _ in range(2):
        network(x)
    for parameter in network[1].parameters():
        nn.init.uniform_(parameter)
    return network, x


def _converted(
    tasks: list[str] = TASKS, seed: int = 1, norm: type[nn.Module] = nn.BatchNorm2d
) -> nn.Module:
    return cs.nn.convert_task_batchnorm(_trained(seed, norm)[0], tasks)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, Activated])
@pytest.mark.parametrize("options", [{}, {"strict": False}, {"assign": True}], ids=repr)
def test_a_checkpoint_of_the_unconverted_network(
    norm: type[nn.Module], options: dict[str, bool]
) -> None:
    """Also in a bigger network; every task has memory of its own afterwards."""
    plain, x = _trained(norm=norm)
    network = nn.ModuleDict({"trunk": _converted(norm=norm)})
    state = {f"trunk.{name}": tensor for name, tensor in plain.state_dict().items()}
    names = list(state)
    assert not any(network.load_state_dict(state, **options))
    assert list(state) == names
    _assert_predict(network["trunk"], plain, x)
    norms = [plain[1], *network["trunk"][1].children()]
    for of_tensor in zip(
        *(norm.state_dict(keep_vars=True).values() for norm in norms), strict=True
    ):
        assert len({tensor.data_ptr() for tensor in of_tensor}) == len(TASKS) + 1
        assert len({type(tensor) for tensor in of_tensor}) == 1


def test_keys_that_a_checkpoint_lacks_or_has_more() -> None:
    """The message has the keys of the checkpoint."""
    state, trunk = _trained()[0].state_dict(), _converted()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*nobody"):
        trunk.load_state_dict({**state, "1.nobody": torch.ones(1)})
    del state["1.bias"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"1\.depth\.bias"'):
        trunk.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"1\.c\.weight"') as raised:
        _converted(AB).load_state_dict(_converted(["a", "b", "c"]).state_dict())
    assert "a.c" not in str(raised.value)


@pytest.mark.parametrize("tasks", [TASKS, ["weight", "bias"]])
def test_a_checkpoint_of_the_converted_network(tasks: list[str]) -> None:
    """`norm.weight.weight` is the converted one's, `norm.weight` the unconverted one's."""
    plain, x = _trained()
    first, second = _converted(tasks), _converted(tasks, seed=2)
    first.load_state_dict(plain.state_dict())
    second.load_state_dict(first.state_dict())
    _assert_predict(second, plain, x)
    nn.init.uniform_(first[1].of(tasks[1]).weight)
    second.load_state_dict(first.state_dict())
    assert_equal(second.state_dict(), first.state_dict())


# --- a task's life ---


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
            network[1].weight.zero_()
    assert_equal(trunk.state_dict(), before)
    with pytest.raises(ValueError, match=r"task must be one of.*'flow'"):
        cs.nn.extract_task(trunk, "flow")
    with pytest.raises(ValueError, match=r"task-specific normalization, got Conv2d with none"):
        cs.nn.extract_task(nn.Conv2d(1, 1, 1), "depth")


def test_add_task() -> None:
    trunk, x = _trained()
    opt = optimizer_of(cs.nn.convert_task_batchnorm(trunk, AB))
    opt.step(lambda task: (1 if task == "a" else 3) * trunk(x).square().mean())
    trunk[1].of("a").weight.requires_grad_(False)
    for task, like, message in (
        ("a", "b", "task must be new, got 'a'"),
        ("c", "d", "task must be one of"),
        ("x.y", "a", "without a dot"),
        ("forward", "a", "named like an attribute"),
    ):
        with pytest.raises(ValueError, match=message):
            cs.nn.add_task(trunk, task, like=like)
        assert trunk[1].tasks == ("a", "b")
    with pytest.raises(ValueError, match="task-specific normalization, got Linear"):
        cs.nn.add_task(nn.Linear(3, 3), "c", like="a")
    new = cs.nn.add_task(trunk, "c", like="a")
    assert [p.requires_grad for p in new] == [False, True]
    with cs.nn.active_task(trunk.eval(), "c"):
        assert torch.equal(trunk(x), cs.nn.extract_task(trunk, "a")(x))
    trunk.train()
    with pytest.raises(ValueError, match=r"optimizer must hold.*1\.c\.bias"):
        cs.MultiTaskOptimizer(trunk, opt.optimizer, [*AB, "c"])
    opt.optimizer.add_param_group({"params": new})
    opt = cs.MultiTaskOptimizer(trunk, opt.optimizer, [*AB, "c"])
    opt.step(lambda task: trunk(x).square().mean() * (2 if task == "c" else 1))
    assert not torch.equal(trunk[1].of("a").bias, trunk[1].of("c").bias)


def test_update_bn() -> None:
    """One task's statistics are torch's own of that task's network; the others' stay."""
    trunk = _converted()
    trunk[2].eval()
    loader = [[torch.randn(4, 3, 6, 6), torch.zeros(4)] for _ in range(3)]
    plain = cs.nn.extract_task(trunk, "depth")
    torch.optim.swa_utils.update_bn(loader, plain)
    before = copy.deepcopy(trunk.state_dict())
    cs.nn.update_bn(loader, trunk, "depth")
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
    layers = [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3).eval()]
    trunk = nn.Sequential(*layers, cs.nn.TaskBatchNorm1d(3, TASKS), nn.BatchNorm1d(3).eval())
    trunk.append(cs.nn.TaskBatchNorm1d(3, TASKS).eval())

    def changed() -> set[str]:
        """The normalizations whose statistics are recomputed."""
        before = copy.deepcopy(trunk.state_dict())
        modes = [module.training for module in trunk.modules()]
        cs.nn.update_bn([torch.randn(8, 3) for _ in range(3)], trunk, "depth")
        assert modes == [module.training for module in trunk.modules()]
        after = trunk.state_dict()
        return {name.rpartition(".")[0] for name in after if not after[name].equal(before[name])}

    assert changed() == {"1", "4.depth"}
    trunk.eval()
    assert changed() == {"4.depth", "6.depth"}
    trunk[5:].train()
    assert changed() == {"5", "6.depth"}
    trunk.train()
    for norm in cs.nn.task_norms(trunk):
        norm.eval()
    with refused(
        trunk.state_dict, ValueError, "must have a normalization of 'depth' in train mode"
    ):
        changed()


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
