"""Bad input raises before anything is changed; the message names the argument and quotes it."""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layers import operator_calls
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
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import cs_kernels as cs
from cs_kernels.ops.backends import OPERATORS
from cs_kernels.ops.checks import check_counter
from cs_kernels.ops.operands import Operands, checked_options

pytestmark = pytest.mark.loop


def _with(**options: Any) -> cs.MultiTaskOptimizer:
    model, *_ = problem()
    given = {"trunk": model, "optimizer": sgd_of(model), "tasks": AB, "method": cs.Sum()}
    return cs.MultiTaskOptimizer(**{**given, **options})


def _on_trunk(**options: Any) -> cs.MultiTaskOptimizer:
    setup = Setup()
    return cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, **{"tasks": TASKS, **options})


@pytest.mark.parametrize("warm", [False, True])
@BOTH_PHASES
@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (lambda x: x.expand(3), ValueError, r"must return a floating-point scalar.*\(3,\).*'{}'"),
        (lambda x: x + 0j, ValueError, "point scalar, got a torch.complex128 tensor.*'{}'"),
        (lambda x: x.detach(), ValueError, "closure must return a loss with a graph"),
        (lambda x: x.item(), TypeError, "closure must return a tensor, got float"),
        (lambda x: None, TypeError, "closure must return a tensor, got NoneType"),
        (lambda x: SimpleNamespace(loss=x), TypeError, "got SimpleNamespace for '{}': take its .l"),
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
    """The failed step leaves no trace: later steps equal those of a run without it."""
    setups = [started(schedule=schedule) for _ in range(2)]
    for setup, opt in setups if warm else ():
        opt.step(setup.closure(0))
    (setup, opt), (straight, _) = setups
    bad, counters = TASKS[-isinstance(schedule, cs.Joint)], opt.state_dict()
    with refused(lambda: setup.state(grads=False), error, message.format(bad)):
        opt.step(lambda t: (result if t == bad else Tensor.sum)(setup.closure(1)(t)))
    assert counters == opt.state_dict()
    assert all(p.grad is None for p in setup.parameters())
    for one, other in setups:
        other.step(one.closure(1))
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


@BOTH_PHASES
def test_no_covered_layer(schedule: cs.Schedule) -> None:
    """Layers and normalizations exist, but no normalization directly follows a layer."""
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4))
    opt = optimizer_of(cs.nn.convert_task_batchnorm(trunk, AB), schedule=schedule)
    for _ in range(2):
        message = r"(?s)trunk must have a layer.*0\.weight.*plain sum"
        with refused(trunk.state_dict, ValueError, message):
            opt.step(lambda task: trunk(torch.randn(8, 3)).square().mean())
    assert all(p.grad is None for p in trunk.parameters())


def _sparse() -> None:
    trunk = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4), nn.BatchNorm1d(4))
    opt = optimizer_of(cs.nn.convert_task_batchnorm(trunk, AB))
    try:
        opt.step(lambda task: trunk(torch.tensor([0, 1, 2])).square().mean())
    finally:
        assert all(p.grad is None for p in trunk.parameters())


def _built_before_the_conversion() -> None:
    trunk = Trunk()
    sgd = sgd_of(trunk)
    cs.nn.convert_task_batchnorm(trunk, TASKS)
    cs.MultiTaskOptimizer(trunk, sgd, TASKS)


def _on_two_devices() -> None:
    model, *_ = problem()
    model.unused.to("meta")
    optimizer_of(model, cs.Sum())
    optimizer_of(model, cs.PCGrad())


def _before(call: Callable[[Setup, cs.MultiTaskOptimizer], object], **options: Any) -> None:
    """Makes a call before the first step; the call must change nothing."""
    setup, opt = started(**options)
    before = setup.state()
    try:
        call(setup, opt)
    finally:
        assert_equal(before, setup.state())


def _step(setup: Setup, opt: cs.MultiTaskOptimizer) -> None:
    opt.step(setup.closure(0))


W, G, V = torch.randn(4, 3), torch.ones(2, 4), torch.ones(2, 4)
GRADS, PRIORITY = torch.randn(2, 4, 3), torch.zeros(4, dtype=torch.int64)
convert = cs.nn.convert_task_batchnorm
OF_MODULES = convert, cs.nn.extract_task, cs.nn.set_task, cs.nn.active_task
NORM, ALONE = convert(Trunk(), AB), cs.nn.TaskBatchNorm1d(4, AB)
SGD = sgd_of(nn.Linear(1, 1))
LBFGS, ONE = torch.optim.LBFGS(SGD.param_groups), cs.FixedWeights({"depth": 1.0})
DEPTH = cs.UncertaintyWeights({"depth": "regression"})
KINDS = cs.UncertaintyWeights(dict.fromkeys(TASKS, "regression"))
MIXED = partial(cs.Mixed, 3)
OPTIONS = r"options must be \(\), \(scale,\), \(number,\), \(seed, step"
T65, SEEDED = [f"t{i}" for i in range(65)], (cs.PCGrad, cs.GradDrop, cs.GradVac)
strength, project = cs.functional.connection_strength, cs.functional.project_conflicts
update, priority = cs.functional.phase2_update, cs.functional.task_priority
gramian, combine = cs.functional.gramian, cs.functional.combine
EYE, WIDE = torch.eye(2, dtype=torch.float64), torch.zeros(1, 2, 3, dtype=torch.float64)
ones, zeros = torch.ones, torch.zeros


def _operands(dim: int, groups: int, empty: bool = False) -> None:
    weight = zeros(4, 0 if empty else 3, 2)
    Operands([weight], [weight], 1, out_channel_dims=[dim], groups=[groups])


META, _ops = torch.empty(4, 3, device="meta"), torch.ops.cs_kernels


def gradvac(similarities: Tensor) -> Tensor:
    weights: Tensor = _ops.gradvac_weights(EYE, similarities, 0.1, 1, 2)
    return weights


VALUES: list[tuple[Callable[[], object], str]] = [
    (_built_before_the_conversion, r"optimizer must hold.*stem_norm\.depth\.weight"),
    (_sparse, r"must be dense, but the gradient of .*0\.weight has layout torch\.sparse_coo"),
    (_on_two_devices, r"on one device.*trunk.0.weight on cpu.*on meta"),
    (lambda: cs.nn.set_task(NORM, "flow"), "task must be one of.*'flow'"),
    (lambda: cs.nn.active_task(NORM, "flow").__enter__(), "task must be one of.*'flow'"),
    (lambda: check_counter(ones(1, device="meta").long(), W.device), "on cpu, got meta"),
    (lambda: _ops.task_priority(META[0]), r"strength must have shape \[K, O\], got \(3,\)"),
    (lambda: _ops.channel_energies([META], [1], [3]), "groups must divide dimension 0"),
    (lambda: _ops.gramian([META, None], [0, 0], 2, 0), "tasks must be in"),
    (lambda: cs.PCGrad("max"), "reduction must be 'sum' or 'mean', got 'max'"),
    (lambda: cs.PCGrad(groups="row"), "groups must be 'all' or 'layer', got 'row'"),
    *((partial(kind, seed=-1), r"seed must lie in \[0, 2\^63\), got -1") for kind in SEEDED),
    *((partial(cs.CAGrad, c), f"c must be finite and at least 0, got {c!r}") for c in (-1.0, "x")),
    (lambda: cs.Sum("yes"), "separate must be True or False, got 'yes'"),
    *((partial(cs.FairGrad, a), rf"must lie in \[1/16, 16\], got {a!r}") for a in (0, 17, "1")),
    (lambda: cs.GradVac(1.0), r"target must be None or lie in \[-1, 1\), got 1.0"),
    (lambda: cs.GradVac(beta=1.5), r"beta must lie in \[0, 1\], got 1.5"),
    (lambda: gradvac(EYE.float()), "similarities must be float64 of shape .2, 2.*float32"),
    (lambda: gradvac(torch.zeros(2, 3).double()), r"similarities must.*shape \(2, 3\)"),
    (lambda: gradvac(torch.zeros(2, 4).double()[:, ::2]), "contiguous, got strides .4, 2"),
    (lambda: cs.CAGrad(rescale=3), "rescale must be 0, 1 or 2, got 3"),
    (lambda: cs.MGDA("l1"), r"normalize must be None, 'l2', 'loss' or 'loss\+', got 'l1'"),
    (lambda: cs.AlignedMTL("max"), "scale must be 'min', 'median' or 'rmse', got 'max'"),
    (lambda: cs.NashMTL(0), "update_every must be at least 1, got 0"),
    (lambda: cs.NashMTL(max_norm=-1), "max_norm must be finite and at least 0, got -1"),
    (lambda: cs.GradDrop(seed=1 << 63), r"seed must lie in \[0, 2\^63\), got 9223"),
    *(
        (partial(cs.GradDrop, x), r"leak must lie in \[0, 1\], got")
        for x in (1.5, [0.5, -0.5], "x")
    ),
    (lambda: _with(method=cs.GradDrop([0.0])), "leak must have 2 entries, one per task, got 1"),
    (lambda: cs.UncertaintyWeights({"a": "ranking"}), "tasks must be 'regression' or"),
    (lambda: DEPTH.check(TASKS), "weighting must have exactly the tasks"),
    (lambda: cs.DynamicWeightAverage(0.0), "temperature must be positive and finite, got 0.0"),
    (lambda: cs.Mixed(0), "epochs must be at least 1, got 0"),
    (lambda: cs.Mixed(3, draw="batch"), "draw must be 'epoch' or 'step', got 'batch'"),
    (lambda: cs.Switch(-1), "epoch must be at least 0, got -1"),
    (lambda: cs.FixedWeights({"a": float("nan")}), "weights must be finite, got nan for 'a'"),
    (lambda: cs.MGDA("loss").weights(EYE), "must be a Step with losses for normalize='loss'"),
    (lambda: convert(NORM, ["c"]), r"stem_norm is already .*\['a', 'b'\], got \['c'\]"),
    (lambda: optimizer_of(Trunk()), r"trunk must have task-specific normalization.*Trunk"),
    *((partial(optimizer_of, ALONE, m), "a shared.*none of its 0") for m in (None, cs.Sum())),
    (lambda: _on_trunk(layers={"nowhere": "stem_norm"}), "layers must name layers.*'nowhere'"),
    (lambda: _on_trunk(layers={"stem": "nowhere"}), "layers must map.*'nowhere' for 'stem'"),
    (lambda: _on_trunk(layers={"stem": "up_norm"}), "'stem' has 8, got 'up_norm' with 6"),
    (lambda: _on_trunk(tasks=["depth", "flow"]), r"must have all tasks.*lacks 'flow'"),
    (lambda: _on_trunk(weighting=ONE), r"weighting must have a weight for each.*\['depth'\]"),
    (lambda: _on_trunk(layers={"stem": None}, method=cs.PCGrad()), "layers must be empty for PCG"),
    (lambda: _on_trunk(weighting=KINDS), r"optimizer must hold the parameters\(\) of weighting"),
    (lambda: _with().start_epoch(-1), "epoch must be at least 0, got -1"),
    (lambda: _with().step([]), "closure must be a function or a sequence"),
    *((partial(_with, tasks=T65, method=kind()), "at most 64 .*got 65") for kind in SEEDED),
    (lambda: _with(optimizer=LBFGS), "without a closure, got LBFGS"),
    (lambda: _with(optimizer=[]), "optimizer must be.*got none"),
    (lambda: _with(optimizer=[SGD, SGD]), "each parameter once, got"),
    (lambda: strength(W, G[:, :3], V), r"gamma.*\[K, 4\].*\(2, 3\)"),
    (lambda: strength(W, G, V[:1]), r"running_var.*\(2, 4\).*\(1, 4\)"),
    (lambda: strength(W, G, V, eps=[1e-5]), r"eps.*2 numbers.*\[1e-05\]"),
    (lambda: strength(W, G, V, out_channel_dim=2), "out_channel_dim must be 0 or 1, got 2"),
    (lambda: strength(W, G, V, groups=2), "groups.*got 2"),
    (lambda: strength(W, G.to("meta"), V), "gamma must be on cpu, got meta"),
    (lambda: priority(G[0]), r"strength.*\[K, O\].*\(4,\)"),
    (lambda: project(GRADS[0, 0], PRIORITY), r"grads.*\(3,\)"),
    (lambda: project(GRADS, PRIORITY[:3]), r"priority.*\(4,\).*\(3,\)"),
    (lambda: project(GRADS, PRIORITY + 2), r"priority.*\[0, 2\), got 2"),
    (lambda: project(GRADS, PRIORITY - 1), r"priority.*\[0, 2\), got -1"),
    (lambda: project(GRADS, PRIORITY.to("meta")), "priority must be on cpu, got meta"),
    (lambda: update(W, G, V, GRADS[:1]), r"grads must have shape \(2, 4, 3\), got \(1, 4, 3\)"),
    (lambda: update(W, G, V, GRADS.to("meta")), "grads must be on cpu, got meta"),
    (lambda: update(W, G, V, GRADS, out=W[0]), r"out must be.*\(4, 3\) on cpu.*\(3,\)"),
    (lambda: update(W, G, V, GRADS, out=W.double()), r"float32 of.*got torch.float64"),
    (lambda: update(W, G, V, GRADS, out=W.to("meta")), r"out must be.*on cpu, got.*on meta"),
    (lambda: update(W, G, V, GRADS, out=W), "out must not overlap the memory range of weight, but"),
    (
        lambda: project(GRADS, PRIORITY, out=GRADS[1]),
        "out must not overlap the memory range of grads",
    ),
    (lambda: project(GRADS, PRIORITY, out=W.half()), r"out must be.*got torch.float16"),
    (lambda: project(GRADS, PRIORITY, out=ones(3).expand(4, 3)), r"got strides \(0, 1\)"),
    (
        lambda: combine(GRADS, ones(2), out=GRADS[0]),
        "out must not overlap the memory range of grads",
    ),
    (lambda: combine(GRADS, ones(2), out=W.T), r"out must be.*\(4, 3\).*got.*\(3, 4\)"),
    (lambda: combine(GRADS, ones(2), out=W.to("meta")), r"out must be.*on meta"),
    (lambda: gramian(torch.ones(3)), r"grads must have shape \[K, "),
    (lambda: gramian(torch.ones(65, 3)), r"tasks must be in \[1, 64\], got 65"),
    (lambda: cs.DynamicWeightAverage("2"), "temperature must be.*got '2'"),
    (lambda: cs.FixedWeights({"a": "x"}), "weights must be finite, got 'x'"),
    *((partial(_operands, d, 1), f"out_channel_dim must be 0 or 1, got {d}") for d in (-1, 2)),
    *((partial(_operands, 1, 0, empty), "groups must be at least 1") for empty in (False, True)),
    (lambda: combine(G, torch.ones(3)), r"coefficients must have shape \(2,\), got \(3,\)"),
    (lambda: _ops.channel_energies([], [], []), "weights must have at least one tensor"),
]
TYPES: list[tuple[Callable[[], object], str]] = [
    *((partial(kind, seed="1"), "seed must be an integer, got '1'") for kind in (*SEEDED, MIXED)),
    (lambda: cs.NashMTL(True), "update_every must be an integer, got True"),
    (lambda: cs.Switch(1.5), "epoch must be an integer, got 1.5"),
    (lambda: cs.Mixed(3.5), "epochs must be an integer, got 3.5"),
    (lambda: cs.FixedWeights([1, 2]), r"weights must be a mapping.*\[1, 2\]"),
    (lambda: cs.UncertaintyWeights(["a"]), r"tasks must be a mapping.*\['a'\]"),
    *(
        (partial(call, None, AB), r"module must be a torch\.nn\.Module, got None")
        for call in OF_MODULES
    ),
    (lambda: _with(scaler=True), "scaler must be.*got True"),
    (lambda: _with(backward="x"), "backward must be a function.*got 'x'"),
    (lambda: _with(layers=["trunk.0"]), r"layers must be a mapping.*trunk\.0"),
    (lambda: _with(method=cs.PCGrad), "method must.*got the class PCGrad"),
    (lambda: _with(schedule="joint"), "schedule.*str 'joint'"),
    (lambda: _with(weighting=cs.EqualWeights), "weighting must.*the class EqualWeights"),
    (lambda: _with(weighting={"a": 1.0}), "weighting must.*got dict"),
    (lambda: _with(trunk=[Trunk()]), "trunk must be a.*got list"),
    (lambda: _with(optimizer="adam"), "optimizer must be a torch optimizer"),
    (lambda: _with(tasks={"a", "b"}), "tasks must be a sequence"),
    (lambda: _with().start_epoch(1.5), "epoch must be an integer, got 1.5"),
    (lambda: _with().trace(None), "closure must be a function"),
    (lambda: _with().step("a"), r"closure must be a function.*got str 'a'"),
    (lambda: strength(W.int(), G, V), "weight must be.*torch.int32"),
    (lambda: priority(G.long()), "strength must be.*torch.int64"),
    (lambda: project(GRADS, PRIORITY.int()), "priority.*torch.int32"),
    (lambda: update(W, G, V, GRADS.double()), "grads.*float32.*float64"),
    (lambda: gramian(G.long()), "grads must be one of"),
    (lambda: combine(G, torch.ones(2).long()), "coefficients must be one of"),
    # Options that no solver takes must raise, and not become the defaults.
    *((partial(checked_options, W, *given), OPTIONS) for given in ((1.0, 2.0), (5,), (None,))),
]
TIMES: list[tuple[Callable[[], object], str]] = [
    (lambda: NORM(zeros(2, 3, 6, 6)), "no active task.*'a', 'b'"),
    (partial(_before, _step, schedule=cs.Mixed(3)), r"Mixed.*start_epoch"),
    (partial(_before, lambda _, opt: opt.coverage()), "call step or trace first"),
    (partial(_before, lambda _, opt: opt.priority()), "call step or trace first"),
]


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        *((ValueError, *row) for row in VALUES),
        *((TypeError, *row) for row in TYPES),
        *((RuntimeError, *row) for row in TIMES),
    ],
)
def test_bad_arguments(error: type[Exception], call: Callable[[], object], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
    assert {norm.active for norm in cs.nn.task_norms(NORM)} == {None}


@pytest.mark.parametrize(
    ("counter", "error", "message"),
    [
        (torch.zeros(1), TypeError, "counter must be torch.int64, got torch.float32"),
        (torch.zeros(2).long(), ValueError, "counter must have 1 elements, got 2"),
    ],
)
def test_bad_counter(backend: str, counter: Tensor, error: type[Exception], message: str) -> None:
    """The counter is checked even in a call without tensors."""
    update = zeros(4)
    for updates, grads in (([update], [W[:, 0]]), ([], [])):
        with refused(lambda: update, error, message):
            _ops.drop_signs_(updates, grads, [0.0], 0, 0, 1, counter)
    with pytest.raises(error, match=message):
        _ops.pcgrad_weights(torch.eye(2), 0, 0, counter)


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
def test_the_active_task_of_every_method(method: cs.Method) -> None:
    setup, opt = started(method)
    loss = setup.closure(0)
    with cs.nn.active_task(setup.trunk, "depth"):
        losses = {task: loss(task) for task in TASKS}
    with refused(setup.state, ValueError, r"no task-specific normalization.*use step\(closure\)"):
        opt.backward(losses)
    with refused(setup.state, ValueError, r"closure must leave 'normals' active.*active_task"):
        opt.step(lambda task: cs.nn.set_task(setup.trunk, "depth") or loss(task))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules() -> None:
    trunk = nn.Sequential(torch.jit.script(nn.Linear(3, 4)))
    with pytest.raises(ValueError, match=r"no traced or scripted module, .*, got 0: pass"):
        cs.MultiTaskOptimizer(trunk, torch.optim.SGD(trunk.parameters()), AB, cs.PCGrad())


def _offsets(*offsets: int) -> tuple[object, ...]:
    updates, grads = [zeros(4), zeros(4)], [ones(4), ones(4)]
    return "drop_signs_", updates, grads, [0.0], 0, 0, 1, None, [*offsets]


def _energies(shape: tuple[int, ...], eps: int, channels: list[int]) -> tuple[object, ...]:
    return "energy_priority", ones(shape), ones(2, 8), ones(2, 8), [1e-5] * eps, channels


def _stage(name: str, priorities: int = 1, *products: Tensor) -> tuple[object, ...]:
    updates, grads = [zeros(4, 3)], [ones(4, 3)] * 2
    return name, updates, grads, [zeros(4).long()] * priorities, *products, [0], [1], 2


def _phase2(**change: object) -> tuple[object, ...]:
    given = {"updates": [zeros(4, 3)], "grads": [ones(4, 3)] * 2, "weights": [ones(4, 3)]}
    factors = {"gamma": ones(8), "running_var": ones(8), "eps": [0.0] * 2}
    return "phase2_update_", *{**given, **factors, **change}.values(), [0], [1], 2


def _sketch(*shape: int, step: int = 1, offsets: Sequence[int] = (0,)) -> tuple[object, ...]:
    return "sketch_", zeros(shape)[..., ::step], [ones(4)], [*offsets], 0


def _weighting(**change: object) -> tuple[object, ...]:
    given = {"updates": [zeros(4)], "weight": ones(()).double(), **change}
    return (
        "sketch_and_weight_",
        zeros(256),
        given["updates"],
        [ones(4)],
        [0],
        0,
        given["weight"],
        True,
    )


SQUARE = r"gramian must have shape \[\.\.\., K, K\]"
STAGES = "project_conflicts_", "phase2_products_"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((_offsets(*o), f"offsets must have 2 .*got {len(o)}") for o in ((), (0,), (0, 4, 8))),
        (_offsets(4, -1), r"offsets must lie in \[0, 2\^63 - 4\] .* 4 elements, got -1"),
        (_offsets(2**63 - 3, 0), rf"offsets must lie in \[0, 2\^63 - 4\] .* got {2**63 - 3}"),
        *((_sketch(n), rf"sketch must have shape \[d\], .*\({n},\)") for n in (128, 255, 300)),
        (_sketch(2, 256), r"sketch must have shape \[d\], .*got \(2, 256\)"),
        (_sketch(512, step=2), "sketch must be contiguous"),
        (_sketch(256, offsets=[0, 1]), "offsets must have 1 entries, one per tensor, got 2"),
        (_sketch(256, offsets=[2**63 - 3]), rf"offsets must lie in .* got {2**63 - 3}"),
        (
            _sketch(256, offsets=[2**63 - 2**30 - 3]),
            r"offsets must lie in \[0, 2\^63 - 2\^30 - 4\]",
        ),
        (_weighting(updates=[]), "updates must have 1 entries, one per tensor, got 0"),
        (_weighting(updates=[zeros(3)]), r"updates must be torch.float32 of shape \(4,\)"),
        (_weighting(updates=[zeros(1).expand(4)]), "updates must not have elements that share"),
        (_weighting(weight=ones(())), "weight must be a float64 scalar, got torch.float32"),
        (_weighting(weight=ones(1).double()), r"weight must be a float64 scalar, .* \(1,\)"),
        *((("upgrad_weights", g), SQUARE) for g in (ones(3), ones(2, 3), ones(0, 0), ones(()))),
        (_energies((2, 4), 2, [8]), r"energies must have shape \(8,\), got \(2, 4\)"),
        (_energies((9,), 2, [8]), r"energies must have shape \(8,\), got \(9,\)"),
        (_energies((8,), 5, [4, 4]), "eps must have K entries for each of 2 layers, got 5"),
        (_energies((8,), 0, [8]), "eps must have K entries for each of 1 layers, got 0"),
        (_energies((8,), 4, [-1, 9]), r"channels must not be negative, got \[-1, 9\]"),
        *((_stage(name, 2), "priorities must have at most 1 entries, .*got 2") for name in STAGES),
        (_stage("phase2_apply_", 1, WIDE), r"\(1, 2, 2\), got torch.float64 .*\(1, 2, 3\)"),
        (_stage("phase2_apply_", 1, ones(1, 2, 2)), "products must be float64 .*got torch.float32"),
        ((*_phase2(), ones(1, 2, 2).double().mT), "products must be contiguous, got strides"),
        (("gramian", [ones(4)] * 2, [1], 1, 2), r"group_of must lie in \[0, 1\), got \[1\]"),
        (_phase2(grads=[ones(4, 3)]), "grads must have 2 entries.*got 1"),
        (_phase2(grads=[ones(4, 3), ones(3, 4)]), r"grads must be.*\(4, 3\).*\(3, 4\)"),
        (_phase2(grads=[ones(4, 3).double(), None]), "grads must be torch.float32.*float64"),
        (_phase2(running_var=ones(7)), "running_var must have 8 elements, got 7"),
        (_phase2(eps=[0.0]), "eps must have 2 entries, one per layer and task, got 1"),
        (_phase2(weights=[ones(4, 2)]), r"weights must be.*\(4, 3\).*\(4, 2\)"),
        (("upgrad_weights", torch.eye(65)), r"K in \[1, 64\], got \(65, 65\)"),
        (("fair_grad_weights", EYE, 0.0), "alpha must be positive and finite, got 0.0"),
        (("task_priority", ones(0, 4)), r"strength must have shape \[K, O\], got \(0, 4\)"),
        (("task_priority", ones(4)), r"strength must have shape \[K, O\], got \(4,\)"),
        (("combine_", [zeros(4)], [ones(4)], ones(1, 1), [0, 0], 1), "group_of must have 1"),
        (("combine_", [zeros(4)], [ones(4)], ones(1, 1, 1), [0], 1), r"must .* \(1, 1, 1\)"),
        (("drop_signs_", [], [], [0.0] * 2, 0, 0, 1, ones(1).long()), "leaks must have 1 entries"),
        (("combine_", [ones(1).expand(4)], [W[:, 0]], ones(1, 1), [0], 1), "updates must not have"),
        (("gramian", [ones(4)], [0], -1, 1), "groups must not be negative, got -1"),
        (("gramian", [ones(4)] * 2, [0], 1, 0), r"tasks must be in \[1, 64\], got 0"),
        *(
            (("gramian", [None] * 2 * n, [0] * n, 1, 2), "grads must have at .*none")
            for n in (0, 1)
        ),
        (("project_conflicts_", [], [], [], [], [], 0), r"tasks must be in \[1, .*, got 0"),
        (("connection_strength", W, ones(0, 4), ones(0, 4), [], True, 0, 1), "tasks must .* got 0"),
        (("connection_strength", W, ones(4, 2), ones(2, 4), [0.0] * 2, True, 0, 1), "gamma must"),
    ],
)
def test_kernels_touch_no_wrong_memory(backend: str, call: tuple[Any, ...], message: str) -> None:
    name, *arguments = call
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
    with refused(lambda: tensors, ValueError, message):
        getattr(_ops, name)(*arguments)


@pytest.mark.parametrize(
    ("dim", "groups", "message"),
    [
        (2, 1, "out_channel_dim must be 0 or 1, got 2"),
        (1 << 40, 1, f"out_channel_dim must be 0 or 1, got {1 << 40}"),
        (0, 2, "groups must be 1 where out_channel_dim is 0, got 2"),
        (1, -1, "groups must be at least 1, got -1"),
        (1, 3, r"groups must divide dimension 0 of \(4, 3\), got 3"),
        (1, 8, r"groups must divide dimension 0 of \(4, 3\), got 8"),
        (1, 6148914691236517206, r"groups must divide dimension 0 of \(4, 3\), got 6148"),
    ],
)
def test_layouts_leave_no_element_unwritten(
    backend: str, dim: int, groups: int, message: str
) -> None:
    """The rejected layouts do not fit the tensor, or their number of channels overflows."""
    updates, grads, tensor = [zeros(4, 3)], [ones(4, 3)] * 2, ones(4, 3)
    rows = (groups * 3) % 2**64 if dim == 1 and groups > 0 else 4
    priorities, statistics = [zeros(rows if rows < 99 else 2).long()], [ones(2, 4)] * 2
    layout, one = ([dim], [groups]), (dim, groups)
    products, eps = ones(1, 2, 2).double(), [1e-5] * 2
    calls = {
        "project_conflicts_": (updates, grads, priorities, *layout, 2),
        "phase2_products_": (updates, grads, priorities, *layout, 2),
        "phase2_apply_": (updates, grads, priorities, products, *layout, 2),
        "phase2_update_": (updates, grads, [tensor], *statistics, eps, *layout, 2),
        "channel_energies": ([tensor], *layout),
        "connection_strength": (tensor, *statistics, eps, True, *one),
    }
    for name, call in calls.items():
        with refused(lambda: updates, ValueError, message):
            getattr(_ops, name)(*call)


def test_tensors_without_the_channels(backend: str) -> None:
    message = r"(groups must divide|out_channel_dim must be a) dimension"
    for shape, *layout in (
        ((1, 6), [1], [2]),
        ((0, 6), [1], [2]),
        ((6,), [1], [1]),
        ((), [0], [1]),
    ):
        with pytest.raises(ValueError, match=message):
            _ops.project_conflicts_([zeros(shape)], [ones(shape)], [zeros(1).long()], *layout, 1)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_meta_tensor_among_others_runs_no_fake(backend: str, name: str) -> None:
    leaves, structure = tree_flatten(operator_calls()[name])
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for i in places if len(places) > 1 else ():
        given = [leaf.to("meta") if i == n else leaf for n, leaf in enumerate(leaves)]
        with pytest.raises(ValueError, match=r"tensors must be on one device.*'cpu', 'meta'"):
            getattr(_ops, name)(*tree_unflatten(given, structure))


def test_a_call_without_tensors(backend: str) -> None:
    """The dispatcher finds no device; the result is the same on every backend."""
    _ops.project_conflicts_([], [], [], [], [], 2)
    assert _ops.phase2_products_([], [], [], [], [], 2).shape == (0, 2, 2)
