"""Task-specific normalization: conversion, checkpoints, and tasks that are added or extracted."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from networks import AB, TASKS, Trunk, assert_equal, optimizer_of, refused
from torch import Tensor, nn

import cs_kernels as cs

pytestmark = pytest.mark.loop

convert, active_task = cs.nn.convert_task_batchnorm, cs.nn.active_task


@pytest.mark.parametrize(
    ("dims", "shape"), [(1, (6, 5)), (1, (6, 5, 3)), (2, (6, 5, 3, 3)), (3, (6, 5, 2, 3, 3))]
)
@pytest.mark.parametrize("options", [(1e-3, 0.3), (1e-2, None, False, False)])
def test_each_task_is_a_torch_batchnorm(
    dims: int, shape: tuple[int, ...], options: tuple[float | bool | None, ...]
) -> None:
    norm = getattr(cs.nn, f"TaskBatchNorm{dims}d")(5, TASKS, *options)
    plain = {task: getattr(nn, f"BatchNorm{dims}d")(5, *options) for task in TASKS}
    assert norm.tasks == tuple(TASKS)
    for task in [*TASKS, TASKS[0]]:
        x = torch.randn(shape)
        with active_task(norm, task):
            assert torch.equal(norm(x), plain[task](x))
        assert repr(norm.of(task)) == repr(plain[task])
    expected = {f"{t}.{k}": value for t in TASKS for k, value in plain[t].state_dict().items()}
    assert_equal(dict(norm.state_dict()), expected)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_device_and_dtype(dims: int) -> None:
    norm = getattr(cs.nn, f"TaskBatchNorm{dims}d")(5, AB, device="meta", dtype=torch.float64)
    found = {(value.device.type, value.dtype) for value in norm.parameters()}
    assert found == {("meta", torch.float64)}


def _assert_predict(trunk: nn.Module, plain: nn.Module, x: Tensor) -> None:
    """Asserts that in evaluation each task predicts like the unconverted network."""
    for task in cs.nn.task_norms(trunk)[0].tasks:
        with active_task(trunk.eval(), task):
            assert torch.equal(trunk(x), plain.eval()(x))


def test_conversion_keeps_a_pretrained_network() -> None:
    original, x = Trunk(), torch.randn(4, 3, 6, 6)
    original(x)
    original.stem_norm.weight.requires_grad_(False)
    converted = copy.deepcopy(original.eval())
    assert convert(converted, TASKS) is converted
    norms = [*converted.stem_norm.children()]
    assert not converted.stem_norm.training
    assert not any(norm.training or norm.weight.requires_grad for norm in norms)
    assert len({norm.weight.data_ptr() for norm in norms}) == len(TASKS)
    _assert_predict(converted, original, x)


def test_conversion_of_subclasses_and_shared_modules() -> None:
    norm = Activated(3)
    network = nn.ModuleDict({"one": norm, "two": norm})
    network["inner"] = nn.Sequential(norm, nn.SyncBatchNorm(3))
    network["inner"].add_module("parent", network)  # Modules may refer to each other.
    convert(network, TASKS)
    converted, inner = network["one"], network["inner"]
    assert isinstance(converted, cs.nn.TaskBatchNorm)
    assert converted is network["two"] is inner[0]
    assert isinstance(converted.of("depth"), Activated)
    assert isinstance(inner[1].of("depth"), nn.SyncBatchNorm)
    assert convert(network, TASKS)["one"] is converted
    one_task = cs.nn.extract_task(network, "edges")
    assert type(one_task["one"]) is Activated
    assert one_task["one"] is one_task["inner"][0]
    alone = convert(nn.BatchNorm1d(3), TASKS)
    assert isinstance(alone, cs.nn.TaskBatchNorm)
    assert type(cs.nn.extract_task(alone, "edges")) is nn.BatchNorm1d


def test_active_task_is_restored() -> None:
    trunk = convert(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)), TASKS)

    def active() -> list[str | None]:
        return [norm.active for norm in cs.nn.task_norms(trunk)]

    cs.nn.set_task(trunk, "depth")
    with active_task(trunk, "edges"):
        with active_task(trunk, "normals"):
            assert active() == ["normals"] * 2
        assert active() == ["edges"] * 2
    assert active() == ["depth"] * 2


class Activated(nn.BatchNorm2d):
    """A normalization that contains another module, as in timm."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.act = nn.PReLU(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


def _trained(seed: int = 0, norm: type[nn.Module] = nn.BatchNorm2d) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), norm(4), nn.ReLU(), nn.Flatten(0))
    x = torch.randn(2, 3, 6, 6)
    network(x)
    for parameter in network[1].parameters():
        nn.init.uniform_(parameter)
    return network, x


def _converted(
    tasks: list[str] = TASKS, seed: int = 1, norm: type[nn.Module] = nn.BatchNorm2d
) -> nn.Module:
    return convert(_trained(seed, norm)[0], tasks)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, Activated])
@pytest.mark.parametrize("options", [{}, {"strict": False}, {"assign": True}], ids=repr)
def test_a_checkpoint_of_the_unconverted_network(
    norm: type[nn.Module], options: dict[str, bool]
) -> None:
    """The network may be part of a larger one; afterwards, tasks share no memory."""
    plain, x = _trained(norm=norm)
    network = nn.ModuleDict({"trunk": _converted(norm=norm)})
    state = {f"trunk.{name}": tensor for name, tensor in plain.state_dict().items()}
    names = list(state)
    assert not any(network.load_state_dict(state, **options))
    assert list(state) == names
    _assert_predict(network["trunk"], plain, x)
    states = [n.state_dict(keep_vars=True) for n in (plain[1], *network["trunk"][1].children())]
    for of_tensor in zip(*(state.values() for state in states), strict=True):
        assert len({tensor.data_ptr() for tensor in of_tensor}) == len(TASKS) + 1
        assert len({type(tensor) for tensor in of_tensor}) == 1


@pytest.mark.parametrize("tasks", [TASKS, ["weight", "bias"]])
def test_a_checkpoint_of_the_converted_network(tasks: list[str]) -> None:
    """`norm.weight.weight` belongs to a task named "weight", `norm.weight` to no task."""
    plain, x = _trained()
    first, second = _converted(tasks), _converted(tasks, seed=2)
    first.load_state_dict(plain.state_dict())
    second.load_state_dict(first.state_dict())
    _assert_predict(second, plain, x)
    nn.init.uniform_(first[1].of(tasks[1]).weight)
    second.load_state_dict(first.state_dict())
    assert_equal(second.state_dict(), first.state_dict())


def test_extract_task() -> None:
    plain, x = _trained()
    trunk = convert(copy.deepcopy(plain), TASKS)
    opt = optimizer_of(trunk, tasks=TASKS)
    for _ in range(2):
        opt.step(lambda task: (1 + TASKS.index(task)) * trunk(x).square().mean())
    before = copy.deepcopy(trunk.state_dict())
    for task in TASKS:
        network = cs.nn.extract_task(trunk, task)
        assert type(network[1]) is nn.BatchNorm2d
        plain.load_state_dict(network.state_dict())
        trunk.eval(), network.eval(), plain.eval()
        with active_task(trunk, task):
            assert torch.equal(network(x), trunk(x))
            assert torch.equal(plain(x), trunk(x))
        exported = torch.export.export(network, (x,))
        torch.testing.assert_close(exported.module()(x), network(x))
        for parameter in network.parameters():
            parameter.detach().zero_()
    assert_equal(trunk.state_dict(), before)


def test_add_task() -> None:
    trunk, x = _trained()
    opt = optimizer_of(convert(trunk, AB))
    opt.step(lambda task: (1 if task == "a" else 3) * trunk(x).square().mean())
    trunk[1].of("a").weight.requires_grad_(False)
    new = cs.nn.add_task(trunk, "c", like="a")
    assert [p.requires_grad for p in new] == [False, True]
    with active_task(trunk.eval(), "c"):
        assert torch.equal(trunk(x), cs.nn.extract_task(trunk, "a")(x))
    trunk.train()
    with pytest.raises(ValueError, match=r"optimizer must hold.*1\.c\.bias"):
        cs.MultiTaskOptimizer(trunk, opt.optimizer, [*AB, "c"])
    opt.optimizer.add_param_group({"params": new})
    opt = cs.MultiTaskOptimizer(trunk, opt.optimizer, [*AB, "c"])
    opt.step(lambda task: trunk(x).square().mean() * (2 if task == "c" else 1))
    assert not torch.equal(trunk[1].of("a").bias, trunk[1].of("c").bias)


LOADER = [[torch.randn(4, 3, 6, 6), torch.zeros(4)] for _ in range(3)]


def test_update_bn() -> None:
    """The task's statistics equal torch's for its extracted network; no other state changes."""
    trunk = _converted()
    trunk[2].eval()
    plain = cs.nn.extract_task(trunk, "depth")
    torch.optim.swa_utils.update_bn(LOADER, plain)
    before = copy.deepcopy(trunk.state_dict())
    cs.nn.update_bn(LOADER, trunk, "depth")
    assert trunk[1].of("depth").momentum == 0.1
    assert trunk[1].active is None
    expected = {f"1.depth.{name}": of_depth for name, of_depth in plain[1].state_dict().items()}
    assert_equal(dict(trunk.state_dict()), {**before, **expected})
    for name in ("1.depth.running_mean", "1.depth.running_var"):
        assert not torch.equal(expected[name], before[name])


def test_update_bn_leaves_frozen_normalizations_alone() -> None:
    """Normalizations in eval mode are frozen.

    If the whole trunk is in eval mode, only plain normalizations are frozen.
    """
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
    with refused(trunk.state_dict, ValueError, "normalization for task 'depth' that is not frozen"):
        changed()


@pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning"
)
def test_traces_of_a_converted_network_are_refused() -> None:
    """A trace would fix one task forever; traces of one task's network are allowed."""
    trunk, x = _trained()
    cs.nn.set_task(convert(trunk, AB).eval(), "a")
    for trace in (torch.fx.symbolic_trace, partial(torch.jit.trace, example_inputs=x)):
        with pytest.raises(RuntimeError, match="extract_task"):
            trace(trunk)
    plain = cs.nn.extract_task(trunk, "a")
    assert torch.equal(torch.fx.symbolic_trace(plain)(x), trunk(x))


NORMS = [nn.Linear(3, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.LayerNorm(4)]
STATE, NONE = _trained()[0].state_dict(), "task-specific normalization, but Linear has none"
WITHOUT_BIAS = {name: value for name, value in STATE.items() if name != "1.bias"}
ABC = _converted([*AB, "c"]).state_dict()
add_task, update_bn = partial(cs.nn.add_task, like="a"), cs.nn.update_bn
BAD = [*LOADER, [LOADER[0][0].double()]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda _: convert(nn.Sequential(*NORMS), AB), "normalization.*2 LayerNorm, 1 GroupNorm"),
        (lambda _: convert(nn.Linear(3, 4), AB), "got Linear with these normalizations: none"),
        (
            lambda _: convert(nn.LazyBatchNorm1d(), AB),
            "run once.*got module, an uninitialized LazyBatchNorm1d",
        ),
        (lambda trunk: trunk.load_state_dict({**STATE, "1.nobody": 0}), "Unexpected key.*nobody"),
        (lambda trunk: trunk.load_state_dict(WITHOUT_BIAS), r'Missing key.*"1\.a\.bias"'),
        (lambda trunk: trunk.load_state_dict(ABC), r'Unexpected key(?!.*a\.c).*"1\.c\.weight"'),
        (lambda trunk: cs.nn.extract_task(trunk, "flow"), "task must be one of.*'flow'"),
        (lambda _: cs.nn.extract_task(nn.Linear(3, 3), "depth"), NONE),
        (lambda trunk: cs.nn.add_task(trunk, "a", like="b"), "task must be new, got 'a'"),
        (lambda trunk: cs.nn.add_task(trunk, "c", like="d"), "task must be one of"),
        (lambda trunk: add_task(trunk, "x.y"), "without a dot"),
        (lambda trunk: add_task(trunk, "forward"), "name of a module attribute"),
        (lambda _: add_task(nn.Linear(3, 3), "c"), NONE),
        (lambda trunk: update_bn([], trunk, "a"), "loader must yield"),
        (lambda trunk: update_bn(BAD, trunk, "a"), "type"),
        (lambda trunk: update_bn(LOADER, trunk, "flow"), "task must be one of"),
    ],
)
def test_refusals(call: Callable[[nn.Module], object], message: str) -> None:
    """Refused calls leave the trunk unchanged."""
    trunk = _converted(AB)
    names = [name for name, _ in trunk.named_modules()]
    before = copy.deepcopy(trunk.state_dict())
    with pytest.raises((ValueError, RuntimeError), match=f"(?s){message}"):
        call(trunk)
    assert names == [name for name, _ in trunk.named_modules()]
    assert all(norm.momentum == 0.1 for norm in trunk[1].children())
    if "key" not in message:
        assert_equal(trunk.state_dict(), before)
