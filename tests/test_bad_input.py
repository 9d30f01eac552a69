"""What does not fit raises before anything is changed, and the message names and quotes it."""

from collections.abc import Callable

import pytest
import torch
from networks import TASKS, Setup, Trunk, assert_equal
from torch import Tensor, nn

import cs_kernels as cs

SCHEDULES = [cs.Joint(), cs.Sequential()]


def _optimizer(setup: Setup, schedule: cs.Schedule | None = None) -> cs.MultiTaskOptimizer:
    return cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS, schedule=schedule)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
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
    # Nothing of the failed step is left inside either.
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
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
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


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
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


def test_state_of_other_tasks() -> None:
    setup = Setup()
    opt = _optimizer(setup)
    with pytest.raises(ValueError, match=r"state must be of tasks.*\['a'\]"):
        opt.load_state_dict({**opt.state_dict(), "tasks": ["a"]})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: cs.Mixed(0), "epochs must be at least 1, got 0"),
        (lambda: cs.Mixed(3, draw="batch"), "draw must be 'epoch' or 'step', got 'batch'"),
        (lambda: cs.Switch(-1), "epoch must be at least 0, got -1"),
        (lambda: cs.FixedWeights({"a": float("nan")}), "weights must be finite, got nan for 'a'"),
    ],
)
def test_bad_options(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


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
    ],
)
def test_functional(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
