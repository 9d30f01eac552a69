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
    optimizer_of,
    problem,
    refused,
    sgd_of,
    started,
    started_problem,
)
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.ops import operands
from cs_kernels.ops.gpu import GpuOperators
from cs_kernels.ops.operands import check_counter, checked_options

pytestmark = pytest.mark.loop


def _with(**options: Any) -> cs.MultiTaskOptimizer:
    model, *_ = problem()
    given = {"trunk": model, "optimizer": sgd_of(model), "tasks": AB, "method": cs.Sum()}
    return cs.MultiTaskOptimizer(**{**given, **options})


@pytest.mark.parametrize("warm", [False, True])
@BOTH_PHASES
@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (lambda x: x.expand(3), ValueError, r"closure must return a real scalar.*\(3,\).*'depth'"),
        (lambda x: x + 0j, ValueError, r"a real scalar, got a torch.complex128 tensor.*'depth'"),
        (lambda x: x.detach(), ValueError, r"closure must return a loss with a graph"),
        (lambda x: x.item(), TypeError, r"closure must return a tensor, got float"),
        (lambda x: None, TypeError, r"closure must return a tensor, got NoneType"),
        (lambda x: 1 / 0, ZeroDivisionError, "division by zero"),
    ],
)
def test_bad_closure(
    result: Callable[[Tensor], object],
    error: type[Exception],
    message: str,
    schedule: cs.Schedule,
    warm: bool,
) -> None:
    setup, opt = started(schedule=schedule)
    if warm:
        opt.step(setup.closure(0))
    counters = opt.state_dict()
    with refused(lambda: setup.state(grads=False), error, message):
        opt.step(lambda task: result(setup.closure(1)(task)))
    assert counters == opt.state_dict()
    assert all(p.grad is None for p in setup.parameters())


@pytest.mark.parametrize("warm", [False, True])
def test_bad_closure_of_the_last_task_in_a_joint_step(warm: bool) -> None:
    (setup, opt), (straight, other) = started(), started()
    if warm:
        opt.step(setup.closure(0))
        other.step(straight.closure(0))
    with refused(lambda: setup.state(grads=False), ValueError, "scalar"):
        opt.step(lambda t: setup.closure(1)(t).expand(2 if t == TASKS[-1] else 1))
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
    setup, opt = started(schedule=schedule)
    opt.step(setup.closure(0))
    with refused(setup.state, ValueError, message):
        opt.step(setup.closure(1), tasks=tasks)


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


def test_no_task_specific_normalization() -> None:
    trunk = Trunk()
    with pytest.raises(ValueError, match=r"trunk must have task-specific normalization.*Trunk"):
        optimizer_of(trunk)
    optimizer_of(trunk, cs.Sum())


@BOTH_PHASES
def test_no_covered_layer(schedule: cs.Schedule) -> None:
    """There are layers and normalizations, but never one right after the other."""
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4))
    opt = optimizer_of(cs.nn.convert_task_batchnorm(trunk, AB), schedule=schedule)
    for _ in range(2):
        message = r"(?s)trunk must have a layer.*0\.weight.*plain sum"
        with refused(trunk.state_dict, ValueError, message):
            opt.step(lambda task: trunk(torch.randn(8, 3)).square().mean())
    assert all(p.grad is None for p in trunk.parameters())


@pytest.mark.parametrize("method", [cs.Sum(), cs.ConnectionStrength()], ids=repr)
def test_empty_shared_set(method: cs.Method) -> None:
    with pytest.raises(ValueError, match=r"trunk must have a shared parameter.*got 0"):
        optimizer_of(cs.nn.TaskBatchNorm1d(4, AB), method)


def test_optimizer_built_before_the_conversion() -> None:
    trunk = Trunk()
    sgd = sgd_of(trunk)
    cs.nn.convert_task_batchnorm(trunk, TASKS)
    with pytest.raises(ValueError, match=r"optimizer must hold.*stem_norm\.depth\.weight"):
        cs.MultiTaskOptimizer(trunk, sgd, TASKS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": {"nowhere": "stem_norm"}}, "layers must name layers.*'nowhere'"),
        (
            {"layers": {"stem": "nowhere"}},
            "layers must map to task-specific.*'nowhere' for 'stem'",
        ),
        ({"layers": {"stem": "up_norm"}}, "'stem' has 8, got 'up_norm' with 6"),
        ({"tasks": ["depth", "flow"]}, r"tasks must be known.*got 'flow'"),
        (
            {"weighting": cs.FixedWeights({"depth": 1.0})},
            r"weighting must have a weight for each.*\['depth'\]",
        ),
    ],
)
def test_what_does_not_fit_the_trunk(options: dict[str, Any], message: str) -> None:
    setup = Setup()
    with pytest.raises(ValueError, match=message):
        cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, **{"tasks": TASKS, **options})


def test_no_active_task() -> None:
    setup = Setup()
    with refused(setup.state, RuntimeError, r"no active task.*'depth', 'normals', 'edges'"):
        setup.trunk(setup.batches[0][0])


@pytest.mark.parametrize("call", [cs.nn.set_task, cs.nn.active_task])
def test_no_module_to_activate(call: Callable[[Any, str], object]) -> None:
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module, got None"):
        call(None, "depth")


def test_unknown_active_task() -> None:
    setup = Setup()
    cs.nn.set_task(setup.trunk, "depth")
    message = r"task must be one of.*'flow'"
    with pytest.raises(ValueError, match=message):
        cs.nn.set_task(setup.trunk, "flow")
    with pytest.raises(ValueError, match=message), cs.nn.active_task(setup.trunk, "flow"):
        pass
    assert {norm.active for norm in cs.nn.task_norms(setup.trunk)} == {"depth"}


def test_sparse_gradients() -> None:
    trunk = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4), nn.BatchNorm1d(4))
    opt = optimizer_of(cs.nn.convert_task_batchnorm(trunk, AB))
    with pytest.raises(ValueError, match=r"dense gradients, got a torch\.sparse_coo.*0\.weight"):
        opt.step(lambda task: trunk(torch.tensor([0, 1, 2])).square().mean())
    assert all(p.grad is None for p in trunk.parameters())


def test_epoch_and_report_before_their_time() -> None:
    setup, opt = started(schedule=cs.Mixed(3))
    with refused(setup.state, RuntimeError, r"Mixed.*start_epoch"):
        opt.step(setup.closure(0))
    for report in (opt.coverage, opt.priority):
        with pytest.raises(RuntimeError, match="call step or trace first"):
            report()


W, G, V = torch.randn(4, 3, 3, 3), torch.ones(2, 4), torch.ones(2, 4)
GRADS, PRIORITY = torch.randn(2, 4, 3, 3, 3), torch.zeros(4, dtype=torch.int64)
NORM = cs.nn.convert_task_batchnorm(Trunk(), AB)
SGD = sgd_of(nn.Linear(1, 1))
T65 = [f"t{i}" for i in range(65)]
strength, project = cs.functional.connection_strength, cs.functional.project_conflicts
update, priority = cs.functional.phase2_update, cs.functional.task_priority
gramian, combine = cs.functional.gramian, cs.functional.combine
EYE = torch.eye(2, dtype=torch.float64)


def gradvac(similarities: Tensor) -> Tensor:
    weights: Tensor = torch.ops.cs_kernels.gradvac_weights(EYE, similarities, 0.1, 1, 2)
    return weights


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cs.PCGrad("max"), "reduction must be 'sum' or 'mean', got 'max'"),
        (lambda: cs.PCGrad(groups="row"), "groups must be 'all' or 'layer', got 'row'"),
        (lambda: cs.PCGrad(seed=-1), r"seed must lie in \[0, 2\^63\), got -1"),
        (lambda: cs.CAGrad(-1.0), "c must be finite and at least 0, got -1.0"),
        (lambda: cs.CAGrad("x"), "c must be finite and at least 0, got 'x'"),
        (lambda: cs.Sum("yes"), "separate must be True or False, got 'yes'"),
        (lambda: cs.FairGrad(0), r"alpha must lie in \[1/16, 16\], got 0"),
        (lambda: cs.FairGrad("1"), r"alpha must lie in \[1/16, 16\], got '1'"),
        (lambda: cs.GradVac(1.0), r"target must be None or lie in \[-1, 1\), got 1.0"),
        (lambda: cs.GradVac(beta=1.5), r"beta must lie in \[0, 1\], got 1.5"),
        (lambda: cs.GradVac(seed=-1), r"seed must lie in \[0, 2\^63\), got -1"),
        (lambda: gradvac(EYE.float()), "similarities must be float64 of shape .2, 2.*float32"),
        (lambda: gradvac(torch.zeros(2, 3).double()), r"similarities must.*shape \(2, 3\)"),
        (lambda: gradvac(torch.zeros(2, 4).double()[:, ::2]), "contiguous, got strides .4, 2"),
        (lambda: cs.CAGrad(rescale=3), "rescale must be 0, 1 or 2, got 3"),
        (lambda: cs.MGDA("l1"), r"normalize must be None, 'l2', 'loss' or 'loss\+', got 'l1'"),
        (lambda: cs.AlignedMTL("max"), "scale must be 'min', 'median' or 'rmse', got 'max'"),
        (lambda: cs.NashMTL(0), "update_every must be at least 1, got 0"),
        (lambda: cs.NashMTL(max_norm=-1), "max_norm must be finite and at least 0, got -1"),
        (lambda: cs.GradDrop(seed=1 << 63), r"seed must lie in \[0, 2\^63\), got 9223"),
        (lambda: cs.GradDrop(1.5), r"leak must lie in \[0, 1\], got 1.5"),
        (lambda: cs.GradDrop([0.5, -0.5]), r"leak must lie in \[0, 1\], got -0.5"),
        (lambda: _with(method=cs.GradDrop([0.0])), "leak must have 2 entries, one a task, got 1"),
        (lambda: cs.UncertaintyWeights({"a": "ranking"}), "tasks must be 'regression' or"),
        (
            lambda: cs.UncertaintyWeights({"depth": "regression"}).check(TASKS),
            "weighting must have a kind for each of",
        ),
        (lambda: cs.DynamicWeightAverage(0.0), "temperature must be positive and finite, got 0.0"),
        (lambda: cs.DynamicWeightAverage("2"), "temperature must be.*got '2'"),
        (lambda: cs.GradDrop("x"), r"leak must lie in \[0, 1\], got 'x'"),
        (lambda: cs.GradDrop(None), r"leak must lie in \[0, 1\], got None"),
        (lambda: cs.FixedWeights({"a": "x"}), "weights must be finite, got 'x'"),
        (lambda: cs.Mixed(0), "epochs must be at least 1, got 0"),
        (lambda: cs.Mixed(3, draw="batch"), "draw must be 'epoch' or 'step', got 'batch'"),
        (lambda: cs.Switch(-1), "epoch must be at least 0, got -1"),
        (lambda: cs.FixedWeights({"a": float("nan")}), "weights must be finite, got nan for 'a'"),
        (
            lambda: cs.MGDA("loss").weights(torch.eye(2)),
            "must have the losses for normalize='loss'",
        ),
        (
            lambda: cs.nn.convert_task_batchnorm(NORM, ["c"]),
            r"stem_norm.*\['a', 'b'\]; got \['c'\]",
        ),
        (lambda: _with().start_epoch(-1), "epoch must be at least 0, got -1"),
        (lambda: _with().step([]), "closure must be a function or a sequence"),
        (lambda: _with(tasks=T65, method=cs.PCGrad()), "at most 64 .*PCGrad.*got 65"),
        (lambda: _with(tasks=T65, method=cs.GradDrop()), "at most 64 .*GradDrop.*got 65"),
        (
            lambda: _with(optimizer=torch.optim.LBFGS(SGD.param_groups)),
            "without a closure, got LBFGS",
        ),
        (lambda: _with(optimizer=[]), "optimizer must be.*got none"),
        (lambda: _with(optimizer=[SGD, SGD]), "each parameter once, got"),
        (lambda: strength(W, G[:, :3], V), r"gamma.*\[K, 4\].*\(2, 3\)"),
        (lambda: strength(W, G, V[:1]), r"running_var.*\(2, 4\).*\(1, 4\)"),
        (lambda: strength(W, G, V, eps=[1e-5]), r"eps.*2 numbers.*\[1e-05\]"),
        (lambda: strength(W, G, V, out_channel_dim=2), "out_channel_dim must be 0 or 1, got 2"),
        (lambda: strength(W, G, V, groups=2), "groups.*got 2"),
        (lambda: strength(W, G.to("meta"), V), "gamma must be on cpu, got meta"),
        (lambda: priority(G[0]), r"strength.*\[K, O\].*\(4,\)"),
        (lambda: project(GRADS[0, 0, 0, 0], PRIORITY), r"grads.*\(3,\)"),
        (lambda: project(GRADS, PRIORITY[:3]), r"priority.*\(4,\).*\(3,\)"),
        (lambda: project(GRADS, PRIORITY + 2), r"priority.*\[0, 2\), got 2"),
        (lambda: project(GRADS, PRIORITY - 1), r"priority.*\[0, 2\), got -1"),
        (lambda: project(GRADS, PRIORITY.to("meta")), "priority must be on cpu, got meta"),
        (
            lambda: update(W, G, V, GRADS[:1]),
            r"grads must have shape \(2, 4, 3, 3, 3\), got \(1, 4, 3, 3, 3\)",
        ),
        (lambda: update(W, G, V, GRADS.to("meta")), "grads must be on cpu, got meta"),
        (lambda: gramian(torch.ones(3)), r"grads must have shape \[K, "),
        (lambda: gramian(torch.ones(65, 3)), r"tasks must be in \[1, 64\], got 65"),
        (lambda: combine(G, torch.ones(3)), r"coefficients must have shape \(2,\), got \(3,\)"),
        (lambda: torch.ops.cs_kernels.channel_energies([], [], []), "weights must be one at least"),
    ],
)
def test_bad_values(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
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
        (lambda: _with(method=cs.PCGrad), "method must.*got the class PCGrad"),
        (lambda: _with(method="pcgrad"), "method must.*got str 'pcgrad'"),
        (lambda: _with(schedule=cs.Joint), "schedule.*the class Joint"),
        (lambda: _with(schedule="joint"), "schedule.*str 'joint'"),
        (lambda: _with(weighting={"a": 1.0}), "weighting must.*got dict"),
        (lambda: _with(weighting=cs.EqualWeights), "weighting must.*the class EqualWeights"),
        (lambda: _with(trunk=[Trunk()]), "trunk must be a.*got list"),
        (lambda: _with(optimizer="adam"), "optimizer must be a torch optimizer"),
        (lambda: _with(tasks={"a", "b"}), "tasks must be a sequence"),
        (lambda: _with(tasks=3), "tasks must be a sequence.*got 3"),
        (lambda: _with().start_epoch(1.5), "epoch must be an integer, got 1.5"),
        (lambda: _with().start_epoch(None), "epoch must be an integer, got None"),
        (lambda: _with().trace(None), "closure must be a function"),
        (lambda: _with().step("a"), r"closure must be a function.*got str 'a'"),
        (lambda: strength(W.int(), G, V), "weight must be.*torch.int32"),
        (lambda: priority(G.long()), "strength must be.*torch.int64"),
        (lambda: project(GRADS, PRIORITY.int()), "priority.*torch.int32"),
        (lambda: update(W, G, V, GRADS.double()), "grads.*float32.*float64"),
        (lambda: gramian(G.long()), "grads must be one of"),
        (lambda: combine(G, torch.ones(2).long()), "coefficients must be one of"),
        # A new solver's options, say: they must not be taken for none.
        (
            lambda: checked_options(W, 1.0, 2.0),
            "options must be none, a scale, a number, a seed",
        ),
        (lambda: checked_options(W, 5), "options must be none, a scale, a number, a seed"),
        (lambda: checked_options(W, None), "options must be none, a scale, a number, a seed"),
    ],
)
def test_wrong_types(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    ("counter", "error", "message"),
    [
        (torch.zeros(1), TypeError, "counter must be torch.int64, got torch.float32"),
        (torch.zeros(2).long(), ValueError, "counter must have 1 elements, got 2"),
    ],
)
def test_a_counter_that_does_not_fit(
    backend: str, counter: Tensor, error: type[Exception], message: str
) -> None:
    update = torch.zeros(4)
    with pytest.raises(error, match=message):
        torch.ops.cs_kernels.drop_signs_([update], [W[:4, 0, 0, 0]], [0.0], 0, 0, 1, counter)
    with pytest.raises(error, match=message):
        torch.ops.cs_kernels.pcgrad_weights(torch.eye(2), 0, 0, counter)
    assert update.tolist() == [0.0] * 4
    with pytest.raises(ValueError, match="counter must be on cpu, got meta"):
        check_counter(torch.zeros(1, device="meta").long(), update.device)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0], "offsets must have 2 entries, one an update, got 1"),
        ([], "offsets must have 2 entries, one an update, got 0"),
        ([0, 4, 8], "offsets must have 2 entries, one an update, got 3"),
        ([4, -1], r"offsets must lie in \[0, 2\^63 - 4\] .* 4 elements, got -1"),
        ([2**63 - 3, 0], r"offsets must lie in \[0, 2\^63 - 4\] .* got 9223372036854775805"),
    ],
)
def test_offsets_that_do_not_fit(backend: str, offsets: list[int], message: str) -> None:
    updates, grads = [torch.zeros(4), torch.zeros(4)], [torch.ones(4), torch.ones(4)]
    with pytest.raises(ValueError, match=message):
        torch.ops.cs_kernels.drop_signs_(updates, grads, [0.0], 0, 0, 1, None, offsets)
    assert [update.tolist() for update in updates] == [[0.0] * 4] * 2


def test_a_trunk_on_two_devices() -> None:
    model, *_ = problem()
    model.unused.to("meta")
    with pytest.raises(ValueError, match=r"on one device.*trunk.0.weight on cpu.*on meta"):
        optimizer_of(model, cs.PCGrad())
    optimizer_of(model, cs.Sum())


def test_the_call_that_was_meant() -> None:
    _, loss, opt = started_problem(cs.PCGrad())
    losses = {task: loss(task) for task in AB}
    for given in (losses, [*losses.values()], losses["a"]):
        with pytest.raises(TypeError, match=r"got (dict|Tensor): .*call backward\(\{task: loss"):
            opt.step(given)
    with pytest.raises(TypeError, match=r"mapping \{task: loss\}, got list"):
        opt.backward([*losses.values()])
    with pytest.raises(TypeError, match=r"got function: with a closure, call step\(closure\)"):
        opt.backward(loss)


@EVERY_METHOD
def test_backward_on_a_converted_trunk_names_step(method: cs.Method) -> None:
    setup, opt = started(method)
    with cs.nn.active_task(setup.trunk, "depth"):
        losses = {task: setup.closure(0)(task) for task in TASKS}
    message = r"no task-specific normalization.*use step\(closure\)"
    with refused(setup.state, ValueError, message):
        opt.backward(losses)


@EVERY_METHOD
def test_another_task_may_not_stay_active(method: cs.Method) -> None:
    setup, opt = started(method)

    def sets(task: str) -> Tensor:
        cs.nn.set_task(setup.trunk, "depth")
        return setup.closure(0)(task)

    message = r"closure must leave 'normals' active.*active_task"
    with refused(setup.state, ValueError, message):
        opt.step(sets)


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
    given = torch.ones(energies), torch.ones(2, 8), torch.ones(2, 8), [1e-5] * eps, channels
    with pytest.raises(ValueError, match=message):
        torch.ops.cs_kernels.energy_priority(*given)


@pytest.mark.skipif(operands.unavailable is not None, reason="without the compiled module")
@pytest.mark.parametrize(
    ("operator", "arguments", "message"),
    [
        ("connection_strength", (W, G.to("meta"), V, [1.0] * 2, True, 0, 1), "gamma"),
        ("channel_energies", ([W, W.to("meta")], [0, 0], [1, 1]), "weights"),
    ],
)
def test_no_kernel_gets_an_address_of_another_device(
    operator: str, arguments: tuple[object, ...], message: str
) -> None:
    def launch(*_: object, **__: object) -> None:
        raise AssertionError("launched")

    stub = type("Stub", (GpuOperators,), dict.fromkeys(GpuOperators.__abstractmethods__, launch))
    with pytest.raises(ValueError, match=f"{message} must be on cpu, got meta"):
        getattr(stub(), operator)(*arguments)


def test_more_priorities_than_updates() -> None:
    arguments: tuple[Any, ...] = ([torch.zeros(4, 3)], [torch.ones(4, 3)] * 2)
    priorities = [torch.zeros(4).long()] * 2
    for operator in ("project_conflicts_", "phase2_products_"):
        with pytest.raises(ValueError, match="priorities must be at most 1, one an update, got 2"):
            getattr(torch.ops.cs_kernels, operator)(*arguments, priorities, [0, 0], [1, 1], 2)
