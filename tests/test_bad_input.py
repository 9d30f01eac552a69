"""Bad input raises before anything is changed; the message names the argument and quotes it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import (
    AB,
    BOTH_PHASES,
    EVERY_METHOD,
    TASKS,
    Setup,
    Trunk,
    assert_equal,
    problem,
    sgd_of,
)
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.ops import operands
from cs_kernels.ops.gpu import GpuOperators
from cs_kernels.ops.operands import option_word


def _optimizer(setup: Setup, schedule: cs.Schedule | None = None) -> cs.MultiTaskOptimizer:
    return cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS, schedule=schedule)


def _with(**options: object) -> cs.MultiTaskOptimizer:
    model, *_ = problem()
    return cs.MultiTaskOptimizer(model, sgd_of(model), AB, cs.Sum(), **options)


@pytest.mark.parametrize("warm", [False, True])
@BOTH_PHASES
@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (
            lambda loss: loss.expand(3),
            ValueError,
            r"closure must return a real scalar.*\(3,\).*'depth'",
        ),
        (
            lambda loss: loss + 0j,
            ValueError,
            r"a real scalar, got a torch.complex128 tensor.*'depth'",
        ),
        (lambda loss: loss.detach(), ValueError, r"closure must return a loss with a graph"),
        (lambda loss: loss.item(), TypeError, r"closure must return a tensor, got float"),
        (lambda loss: None, TypeError, r"closure must return a tensor, got NoneType"),
        (lambda loss: 1 / 0, ZeroDivisionError, "division by zero"),
    ],
)
def test_bad_closure(
    result: Callable[[Tensor], object],
    error: type[Exception],
    message: str,
    schedule: cs.Schedule,
    warm: bool,
) -> None:
    setup = Setup()
    opt = _optimizer(setup, schedule)
    if warm:
        opt.step(setup.closure(0))
    before, counters = setup.state(grads=False), opt.state_dict()
    with pytest.raises(error, match=message):
        opt.step(lambda task: result(setup.closure(1)(task)))
    assert_equal(before, setup.state(grads=False))
    assert counters == opt.state_dict()
    assert all(p.grad is None for p in setup.parameters())


@pytest.mark.parametrize("warm", [False, True])
def test_bad_closure_of_the_last_task_in_a_joint_step(warm: bool) -> None:
    setup, straight = Setup(), Setup()
    opt, other = _optimizer(setup), _optimizer(straight)
    if warm:
        opt.step(setup.closure(0))
        other.step(straight.closure(0))
    before = setup.state(grads=False)
    with pytest.raises(ValueError, match="scalar"):
        opt.step(lambda t: setup.closure(1)(t).expand(2 if t == TASKS[-1] else 1))
    assert_equal(before, setup.state(grads=False))
    assert all(p.grad is None for p in setup.parameters())
    # The failed step leaves nothing inside either.
    opt.step(setup.closure(1))
    other.step(straight.closure(1))
    assert_equal(setup.state(), straight.state())


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["depth", "flow"], r"tasks must be among .*got 'flow'"),
        (["depth", "depth"], r"tasks must be distinct, got 'depth' twice"),
        ([], r"tasks must name at least one task"),
    ],
)
@BOTH_PHASES
def test_bad_tasks_of_a_step(tasks: list[str], message: str, schedule: cs.Schedule) -> None:
    setup = Setup()
    opt = _optimizer(setup, schedule)
    opt.step(setup.closure(0))
    before = setup.state()
    with pytest.raises(ValueError, match=message):
        opt.step(setup.closure(1), tasks=tasks)
    assert_equal(before, setup.state())


@pytest.mark.parametrize(
    ("tasks", "error", "message"),
    [
        ([], ValueError, "at least one"),
        (["a", "a"], ValueError, "'a' twice"),
        ("depth", TypeError, "sequence of names, got 'depth'"),
        ([1], TypeError, r"sequence of names, got \[1\]"),
        (["a.b"], ValueError, "without a dot, got 'a.b'"),
        ([""], ValueError, "non-empty"),
        (["forward"], ValueError, "'forward'"),
    ],
)
def test_bad_task_names(tasks: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cs.nn.TaskBatchNorm2d(3, tasks)
    trunk = Trunk()
    names = [name for name, _ in trunk.named_modules()]
    with pytest.raises(error, match=message):
        cs.nn.convert_task_batchnorm(trunk, tasks)
    assert names == [name for name, _ in trunk.named_modules()]


def test_unknown_task_of_the_trunk() -> None:
    setup = Setup()
    with pytest.raises(ValueError, match=r"tasks must be known.*got 'flow'"):
        cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, ["depth", "flow"])


def test_no_task_specific_normalization() -> None:
    trunk = Trunk()
    sgd = torch.optim.SGD(trunk.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"trunk must have task-specific normalization.*Trunk"):
        cs.MultiTaskOptimizer(trunk, sgd, TASKS)
    cs.MultiTaskOptimizer(trunk, sgd, TASKS, cs.Sum())


@BOTH_PHASES
def test_no_covered_layer(schedule: cs.Schedule) -> None:
    """There are layers and normalizations, but never one right after the other."""
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4))
    cs.nn.convert_task_batchnorm(trunk, TASKS)
    sgd = torch.optim.SGD(trunk.parameters(), lr=0.1)
    opt = cs.MultiTaskOptimizer(trunk, sgd, TASKS, schedule=schedule)
    before = [t.clone() for t in trunk.state_dict().values()]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"(?s)trunk must have a layer.*0\.weight.*plain sum"):
            opt.step(lambda task: trunk(torch.randn(8, 3)).square().mean())
    assert_equal(before, list(trunk.state_dict().values()))
    assert all(p.grad is None for p in trunk.parameters())


@pytest.mark.parametrize("method", [cs.Sum(), cs.ConnectionStrength()], ids=repr)
def test_empty_shared_set(method: cs.Method) -> None:
    trunk = cs.nn.TaskBatchNorm1d(4, TASKS)
    sgd = torch.optim.SGD(trunk.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"trunk must have a shared parameter.*got 0"):
        cs.MultiTaskOptimizer(trunk, sgd, TASKS, method)


def test_optimizer_built_before_the_conversion() -> None:
    trunk = Trunk()
    sgd = torch.optim.SGD(trunk.parameters(), lr=0.1)
    cs.nn.convert_task_batchnorm(trunk, TASKS)
    with pytest.raises(ValueError, match=r"optimizer must hold.*stem_norm\.depth\.weight"):
        cs.MultiTaskOptimizer(trunk, sgd, TASKS)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"nowhere": "stem_norm"}, "layers must name layers.*'nowhere'"),
        ({"stem": "nowhere"}, "layers must map to task-specific.*'nowhere' for 'stem'"),
        ({"stem": "up_norm"}, "'stem' has 8, got 'up_norm' with 6"),
    ],
)
def test_bad_layers(layers: dict[str, str], message: str) -> None:
    setup = Setup()
    with pytest.raises(ValueError, match=message):
        cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS, layers=layers)


def test_no_active_task() -> None:
    setup = Setup()
    before = setup.state()
    with pytest.raises(RuntimeError, match=r"no active task.*'depth', 'normals', 'edges'"):
        setup.trunk(setup.batches[0][0])
    assert_equal(before, setup.state())


def test_unknown_active_task() -> None:
    setup = Setup()
    cs.nn.set_task(setup.trunk, "depth")
    with pytest.raises(ValueError, match=r"task must be one of.*'flow'"):
        cs.nn.set_task(setup.trunk, "flow")
    with (
        pytest.raises(ValueError, match=r"task must be one of.*'flow'"),
        cs.nn.active_task(setup.trunk, "flow"),
    ):
        pass
    assert {norm.active for norm in cs.nn.task_norms(setup.trunk)} == {"depth"}


def test_sparse_gradients() -> None:
    trunk = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4), nn.BatchNorm1d(4))
    cs.nn.convert_task_batchnorm(trunk, TASKS)
    sgd = torch.optim.SGD(trunk.parameters(), lr=0.1)
    opt = cs.MultiTaskOptimizer(trunk, sgd, TASKS)
    with pytest.raises(ValueError, match=r"dense gradients, got a torch\.sparse_coo.*0\.weight"):
        opt.step(lambda task: trunk(torch.tensor([0, 1, 2])).square().mean())
    assert all(p.grad is None for p in trunk.parameters())


def test_epoch_and_report_before_their_time() -> None:
    setup = Setup()
    opt = _optimizer(setup, cs.Mixed(3))
    before = setup.state()
    with pytest.raises(RuntimeError, match=r"Mixed.*start_epoch"):
        opt.step(setup.closure(0))
    assert_equal(before, setup.state())
    for report in (opt.coverage, opt.priority):
        with pytest.raises(RuntimeError, match="call step or trace first"):
            report()
    with pytest.raises(ValueError, match="epoch must be at least 0, got -1"):
        opt.start_epoch(-1)
    with pytest.raises(ValueError, match="closure must be a function or a sequence"):
        opt.step([])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cs.PCGrad("max"), "reduction must be 'sum' or 'mean', got 'max'"),
        (lambda: cs.PCGrad(groups="row"), "groups must be 'all' or 'layer', got 'row'"),
        (lambda: cs.PCGrad(seed=-1), r"seed must lie in \[0, 2\^63\), got -1"),
        (lambda: cs.CAGrad(-1.0), "c must be finite and at least 0, got -1.0"),
        (lambda: cs.CAGrad("x"), "c must be finite and at least 0, got x"),
        (lambda: cs.CAGrad(rescale=3), "rescale must be 0, 1 or 2, got 3"),
        (lambda: cs.MGDA("l1"), r"normalize must be None, 'l2', 'loss' or 'loss\+', got 'l1'"),
        (lambda: cs.AlignedMTL("max"), "scale must be 'min', 'median' or 'rmse', got 'max'"),
        (lambda: cs.NashMTL(0), "update_every must be at least 1, got 0"),
        (lambda: cs.NashMTL(max_norm=-1), "max_norm must be finite and at least 0, got -1"),
        (lambda: cs.GradDrop(seed=1 << 63), r"seed must lie in \[0, 2\^63\), got 9223"),
        (lambda: cs.GradDrop(1.5), r"leak must lie in \[0, 1\], got 1.5"),
        (lambda: cs.GradDrop([0.5, -0.5]), r"leak must lie in \[0, 1\], got -0.5"),
        (lambda: cs.UncertaintyWeights({"a": "ranking"}), "tasks must be 'regression' or"),
        (
            lambda: cs.UncertaintyWeights({"depth": "regression"}).check(TASKS),
            "weighting must have a kind for each of",
        ),
        (lambda: cs.DynamicWeightAverage(0.0), "temperature must be positive and finite, got 0.0"),
        (lambda: cs.DynamicWeightAverage("2"), "temperature must be.*got 2"),
        (lambda: cs.FixedWeights({"a": "x"}), "weights must be finite, got x"),
        (lambda: cs.Mixed(0), "epochs must be at least 1, got 0"),
        (lambda: cs.Mixed(3, draw="batch"), "draw must be 'epoch' or 'step', got 'batch'"),
        (lambda: cs.Switch(-1), "epoch must be at least 0, got -1"),
        (lambda: cs.FixedWeights({"a": float("nan")}), "weights must be finite, got nan for 'a'"),
    ],
)
def test_bad_options(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cs.PCGrad(seed=1.5), "seed must be an integer, got 1.5"),
        (lambda: cs.GradDrop(seed="1"), "seed must be an integer, got '1'"),
        (lambda: cs.Mixed(3.5), "epochs must be an integer, got 3.5"),
        (lambda: cs.Mixed(3, seed="x"), "seed must be an integer, got 'x'"),
        (lambda: cs.Switch(1.5), "epoch must be an integer, got 1.5"),
        (lambda: cs.FixedWeights([1, 2]), r"weights must be a mapping.*\[1, 2\]"),
        (lambda: cs.UncertaintyWeights(["a"]), r"tasks must be a mapping.*\['a'\]"),
        (lambda: cs.nn.convert_task_batchnorm(None, AB), "module must be.*got None"),
        (lambda: cs.nn.extract_task(None, "a"), "module must be.*got None"),
        (lambda: _with(scaler=True), "scaler must be.*got True"),
        (lambda: _with(backward="x"), "backward must be a function.*got 'x'"),
        (lambda: _with(layers=["trunk.0"]), r"layers must be a mapping.*trunk\.0"),
        (lambda: _with().start_epoch(1.5), "epoch must be an integer, got 1.5"),
        (lambda: _with().start_epoch(None), "epoch must be an integer, got None"),
        (lambda: _with().trace(None), "closure must be a function"),
    ],
)
def test_options_of_a_wrong_type(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def test_weights_of_other_tasks() -> None:
    setup = Setup()
    with pytest.raises(ValueError, match=r"weighting must have a weight for each.*\['depth'\]"):
        cs.MultiTaskOptimizer(
            setup.trunk, setup.optimizer, TASKS, weighting=cs.FixedWeights({"depth": 1.0})
        )


def test_converted_for_other_tasks() -> None:
    trunk = cs.nn.convert_task_batchnorm(Trunk(), ["a", "b"])
    with pytest.raises(ValueError, match=r"stem_norm.*\['a', 'b'\]; got \['c'\]"):
        cs.nn.convert_task_batchnorm(trunk, ["c"])


W, G, V = torch.randn(4, 3, 3, 3), torch.ones(2, 4), torch.ones(2, 4)
GRADS, PRIORITY = torch.randn(2, 4, 3, 3, 3), torch.zeros(4, dtype=torch.int64)
F = cs.functional


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: F.connection_strength(W.int(), G, V), TypeError, "weight must be.*torch.int32"),
        (lambda: F.connection_strength(W, G[:, :3], V), ValueError, r"gamma.*\[K, 4\].*\(2, 3\)"),
        (
            lambda: F.connection_strength(W, G, V[:1]),
            ValueError,
            r"running_var.*\(2, 4\).*\(1, 4\)",
        ),
        (
            lambda: F.connection_strength(W, G, V, eps=[1e-5]),
            ValueError,
            r"eps.*2 numbers.*\[1e-05\]",
        ),
        (
            lambda: F.connection_strength(W, G, V, out_channel_dim=2),
            ValueError,
            "out_channel_dim must be 0 or 1, got 2",
        ),
        (lambda: F.connection_strength(W, G, V, groups=2), ValueError, "groups.*got 2"),
        (
            lambda: F.connection_strength(W, G.to("meta"), V),
            ValueError,
            "gamma must be on cpu, got meta",
        ),
        (lambda: F.task_priority(G[0]), ValueError, r"strength.*\[K, O\].*\(4,\)"),
        (lambda: F.task_priority(G.long()), TypeError, "strength must be.*torch.int64"),
        (lambda: F.project_conflicts(GRADS[0, 0, 0, 0], PRIORITY), ValueError, r"grads.*\(3,\)"),
        (lambda: F.project_conflicts(GRADS, PRIORITY[:3]), ValueError, r"priority.*\(4,\).*\(3,\)"),
        (
            lambda: F.project_conflicts(GRADS, PRIORITY + 2),
            ValueError,
            r"priority.*\[0, 2\), got 2",
        ),
        (
            lambda: F.project_conflicts(GRADS, PRIORITY - 1),
            ValueError,
            r"priority.*\[0, 2\), got -1",
        ),
        (lambda: F.project_conflicts(GRADS, PRIORITY.int()), TypeError, "priority.*torch.int32"),
        (
            lambda: F.project_conflicts(GRADS, PRIORITY.to("meta")),
            ValueError,
            "priority must be on cpu, got meta",
        ),
        (
            lambda: F.phase2_update(W, G, V, GRADS[:1]),
            ValueError,
            r"grads must have shape \(2, 4, 3, 3, 3\), got \(1, 4, 3, 3, 3\)",
        ),
        (lambda: F.phase2_update(W, G, V, GRADS.double()), TypeError, "grads.*float32.*float64"),
        (
            lambda: F.phase2_update(W, G, V, GRADS.to("meta")),
            ValueError,
            "grads must be on cpu, got meta",
        ),
        (lambda: F.gramian(torch.ones(3)), ValueError, r"grads must have shape \[K, "),
        (lambda: F.gramian(G.long()), TypeError, "grads must be one of"),
        (lambda: F.gramian(torch.ones(65, 3)), ValueError, r"tasks must be in \[1, 64\], got 65"),
        (
            lambda: F.combine(G, torch.ones(3)),
            ValueError,
            r"coefficients must have shape \(2,\), got \(3,\)",
        ),
        (lambda: F.combine(G, torch.ones(2).long()), TypeError, "coefficients must be one of"),
    ],
)
def test_functional(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


T65 = [f"t{i}" for i in range(65)]


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda m: (m, sgd_of(m), T65, cs.PCGrad()), ValueError, "at most 64 .*PCGrad.*got 65"),
        (
            lambda m: (m, sgd_of(m), T65, cs.GradDrop()),
            ValueError,
            "at most 64 .*GradDrop.*got 65",
        ),
        (
            lambda m: (m, torch.optim.LBFGS(m.parameters()), AB, cs.PCGrad()),
            ValueError,
            "without a closure, got LBFGS",
        ),
        (lambda m: (m, sgd_of(m), AB, cs.PCGrad), TypeError, "method must.*got the class PCGrad"),
        (lambda m: (m, sgd_of(m), AB, "pcgrad"), TypeError, "method must.*got str 'pcgrad'"),
        (
            lambda m: (m, sgd_of(m), AB, cs.Sum(), cs.Joint),
            TypeError,
            "schedule.*the class Joint",
        ),
        (lambda m: (m, sgd_of(m), AB, cs.Sum(), "joint"), TypeError, "schedule.*str 'joint'"),
        (
            lambda m: (m, sgd_of(m), AB, cs.Sum(), cs.Joint(), {"a": 1.0}),
            TypeError,
            "weighting must.*got dict",
        ),
        (
            lambda m: (m, sgd_of(m), AB, cs.Sum(), cs.Joint(), cs.EqualWeights),
            TypeError,
            "weighting must.*the class EqualWeights",
        ),
        (lambda m: ([m], sgd_of(m), AB, cs.Sum()), TypeError, "trunk must be a.*got list"),
        (lambda m: (m, "adam", AB, cs.Sum()), TypeError, "optimizer must be a torch optimizer"),
        (lambda m: (m, [], AB, cs.Sum()), ValueError, "optimizer must be.*got none"),
        (
            lambda m: (m, [sgd_of(m), sgd_of(m)], AB, cs.Sum()),
            ValueError,
            "each parameter once, got",
        ),
        (lambda m: (m, sgd_of(m), {"a", "b"}, cs.Sum()), TypeError, "tasks must be a sequence"),
        (lambda m: (m, sgd_of(m), 3, cs.Sum()), TypeError, "tasks must be a sequence.*got 3"),
    ],
)
def test_bad_arguments(
    build: Callable[[nn.Module], tuple[object, ...]], error: type[Exception], message: str
) -> None:
    model, *_ = problem()
    with pytest.raises(error, match=message):
        cs.MultiTaskOptimizer(*build(model))


def test_a_trunk_on_two_devices() -> None:
    model, *_ = problem()
    model.unused.to("meta")
    sgd = sgd_of(model)
    with pytest.raises(ValueError, match=r"on one device.*trunk.0.weight on cpu.*on meta"):
        cs.MultiTaskOptimizer(model, sgd, AB, cs.PCGrad())
    cs.MultiTaskOptimizer(model, sgd, AB, cs.Sum())


def test_the_call_that_was_meant() -> None:
    model, loss, *_ = problem()
    opt = cs.MultiTaskOptimizer(model, sgd_of(model), AB, cs.PCGrad())
    losses = {task: loss(task) for task in AB}
    for given in (losses, [*losses.values()], losses["a"]):
        with pytest.raises(TypeError, match=r"got (dict|Tensor): .*call backward\(\{task: loss"):
            opt.step(given)
    with pytest.raises(TypeError, match=r"mapping \{task: loss\}, got list"):
        opt.backward([*losses.values()])
    with pytest.raises(TypeError, match=r"got function: with a closure, call step\(closure\)"):
        opt.backward(loss)
    with pytest.raises(TypeError, match=r"closure must be a function.*got str 'a'"):
        opt.step("a")


@EVERY_METHOD
def test_backward_on_a_converted_trunk_names_step(method: cs.Method) -> None:
    setup = Setup()
    opt = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS, method)
    with cs.nn.active_task(setup.trunk, "depth"):
        losses = {task: setup.closure(0)(task) for task in TASKS}
    before = setup.state()
    with pytest.raises(ValueError, match=r"use step\(closure\)"):
        opt.backward(losses)
    assert_equal(before, setup.state())


@EVERY_METHOD
def test_another_task_may_not_stay_active(method: cs.Method) -> None:
    setup = Setup()
    opt = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS, method)

    def sets(task: str) -> Tensor:
        cs.nn.set_task(setup.trunk, "depth")
        return setup.closure(0)(task)

    before = setup.state()
    with pytest.raises(ValueError, match=r"closure must leave 'normals' active.*active_task"):
        opt.step(sets)
    assert_equal(before, setup.state())


@pytest.mark.parametrize("shape", [(3,), (2, 3), (0, 0)], ids=str)
def test_gramians_of_wrong_shape(backend: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"gramian must have shape \[\.\.\., K, K\]"):
        cs.UPGrad().weights(torch.ones(shape))


@pytest.mark.parametrize(
    ("energies", "eps", "channels", "message"),
    [
        ((2, 4), 2, [8], r"energies must have shape \(8,\), got \(2, 4\)"),
        ((9,), 2, [8], r"energies must have shape \(8,\), got \(9,\)"),
        ((8,), 5, [4, 4], "eps must have K entries for each of 2 layers, got 5"),
        ((8,), 0, [8], "eps must have K entries for each of 1 layers, got 0"),
        ((8,), 4, [-1, 9], r"channels must not be negative, got \[-1, 9\]"),
    ],
)
def test_energies_that_do_not_fit(
    backend: str, energies: tuple[int, ...], eps: int, channels: list[int], message: str
) -> None:
    """Kernels would read or write past the end."""
    if backend == "reference":
        pytest.skip("its errors are torch's")
    statistics = torch.ones(2, 8)
    with pytest.raises(ValueError, match=message):
        torch.ops.cs_kernels.energy_priority(
            torch.ones(energies), statistics, statistics, [1e-5] * eps, channels
        )


_ONES = torch.ones(4, 3)


@pytest.mark.skipif(operands.unavailable is not None, reason="without the compiled module")
@pytest.mark.parametrize(
    ("operator", "arguments", "message"),
    [
        (
            "connection_strength",
            (_ONES, torch.ones(2, 4, device="meta"), torch.ones(2, 4), [1.0] * 2, True, 0, 1),
            "gamma must be on cpu, got meta",
        ),
        (
            "channel_energies",
            ([_ONES, _ONES.to("meta")], [0, 0], [1, 1]),
            "weights must be on cpu, got meta",
        ),
    ],
)
def test_no_kernel_gets_an_address_of_another_device(
    operator: str, arguments: tuple[object, ...], message: str
) -> None:
    def launch(*_: object, **__: object) -> None:
        raise AssertionError("launched")

    stub = type("Stub", (GpuOperators,), dict.fromkeys(GpuOperators.__abstractmethods__, launch))
    with pytest.raises(ValueError, match=message):
        getattr(stub(), operator)(*arguments)


@pytest.mark.parametrize("options", [(1.0, 2.0), (5,), (None,)])
def test_options_that_no_solver_has(options: tuple[object, ...]) -> None:
    """A new solver's, say: they must not be taken for none."""
    with pytest.raises(TypeError, match="options must be none, a scale, a number or a seed"):
        option_word(*options)


def test_more_priorities_than_updates() -> None:
    arguments: tuple[Any, ...] = ([torch.zeros(4, 3)], [torch.ones(4, 3)] * 2)
    priorities = [torch.zeros(4).long()] * 2
    for operator in ("project_conflicts_", "phase2_products_"):
        with pytest.raises(ValueError, match="priorities must be at most 1, one an update, got 2"):
            getattr(torch.ops.cs_kernels, operator)(*arguments, priorities, [0, 0], [1, 1], 2)


def test_no_weights_have_no_energies() -> None:
    with pytest.raises(ValueError, match="weights must be one at least"):
        torch.ops.cs_kernels.channel_energies([], [], [])
