"""Tests that need a GPU; the operators' tests run on it through the `backend` fixture."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from layers import KINDS, Kind, sample, solver_options, trunk_arguments
from loops import CASES, Loop
from networks import Setup, assert_equal, refused
from stacking import together
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.utils._pytree import tree_leaves

import cs_kernels as cs
from cs_kernels.ops.solvers import SOLVERS

BACKENDS = [name for name in ("triton", "cuda") if cs.available_backends()[name] is None]

pytestmark = [
    pytest.mark.kernel("triton", "cuda"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

_ops = torch.ops.cs_kernels


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each GPU backend, without deterministic mode, whose fills would hide missing writes."""
    torch.use_deterministic_algorithms(False)
    with cs.use_backend(request.param), torch.device("cuda"):
        yield request.param


@contextlib.contextmanager
def never_waits() -> Iterator[None]:
    """Raises if the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _calls(tasks: int = 3, counter: Tensor | None = None) -> dict[str, Callable[[], list[Tensor]]]:
    """Every operator of a step on fixed tensors, as a function that returns the written tensors."""
    arguments = trunk_arguments([sample(kind, tasks, torch.float32) for kind in KINDS])
    updates = arguments["updates"]
    grads = arguments["grads"] = [grad.contiguous() for grad in arguments["grads"]]
    zeros = [0] * len(updates)

    def phase2() -> list[Tensor]:
        return [_ops.phase2_update_(*arguments.values()), *updates]

    def drop() -> list[Tensor]:
        _ops.drop_signs_(updates, grads, [0.1] * tasks, 1, 2, tasks, counter)
        return updates

    sums = torch.zeros(512, device=grads[0].device)
    weight = torch.full((), 0.7, dtype=torch.float64, device=grads[0].device)

    def sketch() -> list[Tensor]:
        sums.zero_()
        _ops.sketch_(sums, grads[:2], [0, 1000], 1)
        torch._foreach_zero_(updates)
        given = sums, updates, grads[::tasks], [5000 * n for n in range(len(updates))], 1
        _ops.sketch_and_weight_(*given, weight, True)
        return [sums, *updates]

    def by_gramian(name: str) -> list[Tensor]:
        gramian = _ops.gramian(grads, zeros, 1, tasks)
        options = solver_options(name, gramian)
        draw = [counter] if name in ("pcgrad", "gradvac") else []
        solved = getattr(_ops, f"{name}_weights")(gramian, *options, *draw)
        _ops.combine_(updates, grads, solved, zeros, tasks)
        return [*updates, gramian, solved, *(o for o in options if isinstance(o, Tensor))]

    solvers = {n: partial(by_gramian, n) for n in SOLVERS}
    return {"phase2": phase2, "drop": drop, "sketch": sketch, **solvers}


each_step = pytest.mark.parametrize("name", ["phase2", "drop", "sketch", *SOLVERS])


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return [t.clone() for t in tensors]


@pytest.mark.parametrize("tasks", [1, 4, 8, 9])
def test_sanitized_steps(backend: str, tasks: int) -> None:
    """Runs every operator on small sizes, for `make sanitize-gpu`."""
    for run in _calls(tasks).values():
        assert all(written.isfinite().all() for written in run())


@each_step
def test_same_bits_in_every_run(backend: str, name: str) -> None:
    """There is no host synchronization between the gradients and the update."""
    run = _calls()[name]
    first = _copies(run())
    for _ in range(20):
        with never_waits():
            written = run()
        assert_equal(written, first)


@each_step
def test_capture_and_replay(backend: str, name: str) -> None:
    run = _calls()[name]
    expected = _copies(run())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        written = run()
    for _ in range(3):
        for tensor in written:
            tensor.zero_()
        graph.replay()
        assert_equal(written, expected)


@pytest.mark.parametrize("name", ["drop", "pcgrad", "gradvac"])
def test_a_counter_draws_anew_in_replays(backend: str, name: str) -> None:
    """Replays equal the eager calls of successive steps; the host does not read the counter."""
    counter = torch.zeros(1, dtype=torch.int64)
    run = _calls(counter=counter)[name]
    expected = []
    for number in range(5):
        counter.fill_(number)
        expected.append(_copies(run()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        written = run()
        counter.add_(1)
    counter.zero_()
    for of_step in expected:
        graph.replay()
        assert_equal(written, of_step)
    assert len({tuple(step[0].flatten().tolist()) for step in expected}) > 1


def _assert_trains_alike(train: Callable[..., Loop]) -> None:
    """Compares captured with eager steps, up to the order of sums in torch's own kernels."""
    found = []
    for captured in (True, False):
        loop = train(captured=captured)
        leaves = tree_leaves([loop.setup.state(), loop.losses, loop.opt.state_dict()])
        found.append([leaf for leaf in leaves if isinstance(leaf, Tensor | float | int)])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_captured_steps(backend: str, case: str) -> None:
    _assert_trains_alike(lambda captured: CASES[case](captured=captured).train())


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_captured_optimizers(
    backend: str, kind: Callable[..., torch.optim.Optimizer], scaled: bool
) -> None:
    """A scheduler writes the learning rate to device memory; the loop may have a scaler."""
    options = {} if kind is torch.optim.SGD else {"capturable": True}

    def train(captured: bool) -> Loop:
        loop = Loop(
            cs.PCGrad(),
            captured=captured,
            optimizer=partial(kind, fused=True, **options),
            scaler=torch.amp.GradScaler("cuda", init_scale=8.0) if scaled else None,
            lr=torch.tensor(0.01),
        )
        return loop.train(stop=14, rate=ExponentialLR(loop.setup.optimizer, 0.9))

    _assert_trains_alike(train)


def test_captured_again_after_a_change(backend: str) -> None:
    """Each new learning rate, a Python number, needs new captures of both phases, in new memory."""

    def train(captured: bool) -> Loop:
        loop = Loop(cs.GradDrop(), cs.Mixed(3, 1, "step"), captured=captured)
        return loop.train(stop=40, rate=StepLR(loop.setup.optimizer, 10, 0.5))

    _assert_trains_alike(train)


def test_replays_do_not_wait(backend: str) -> None:
    loop = Loop(cs.NashMTL(), weighting=cs.DynamicWeightAverage(), captured=True).train()
    with never_waits():
        loop.step()


@pytest.mark.parametrize("method", [cs.ConnectionStrength(), cs.MGDA(groups="layer")], ids=repr)
@pytest.mark.parametrize("captured", [False, True])
def test_reports_do_not_wait(backend: str, method: cs.Method, captured: bool) -> None:
    """Only eager steps time their surgery, starting with the step after the first report."""
    loop = Loop(method, captured=captured).train(stop=6)
    with never_waits():
        report = loop.opt.report()
        for part in ("cosines", "update_norm", "channels", "conflicts", "removed"):
            getattr(report, part)
    assert "surgery_ms" not in report.scalars()
    loop.train(6, 7)
    assert (loop.opt.report().scalars().get("surgery_ms", 0) > 0) is not captured


def test_a_capture_around_a_step_is_refused(backend: str) -> None:
    loop = Loop(cs.PCGrad(), captured=False).train(stop=3)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1)  # An empty graph would warn.
        with pytest.raises(RuntimeError, match=r"use MultiTaskOptimizer\.capture"):
            loop.step()


@each_step
def test_on_another_stream(backend: str, name: str) -> None:
    """Writes are ordered after earlier work on the current stream."""
    run = _calls()[name]
    expected = _copies(run())
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        result = _copies(run())
    stream.synchronize()
    assert_equal(result, expected)


def test_two_streams_at_once(backend: str) -> None:
    """Calls in flight share no memory."""
    calls = [(_calls()["phase2"], torch.cuda.Stream()) for _ in range(2)]
    expected = [_copies(run()) for run, _ in calls]
    torch.cuda.synchronize()
    results = []
    for run, stream in 20 * calls:
        with torch.cuda.stream(stream):
            results.append(run())
    torch.cuda.synchronize()
    assert_equal(results[-2:], expected)


def test_a_capture_before_any_step_says_so(backend: str) -> None:
    update, grads = torch.empty(5, 7), list(torch.randn(2, 5, 7))
    with (
        pytest.raises(RuntimeError, match="run one step before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        _ops.combine_([update], grads, torch.ones(1, 2), [0], 2)


def test_more_than_2_to_the_31_elements(backend: str) -> None:
    rows = 2**16 + 3
    grads = [torch.randn(rows, 2**15, dtype=torch.bfloat16) for _ in range(2)]
    priority = torch.zeros(rows, dtype=torch.int64)
    priority[-2:] = 1
    update = torch.full_like(grads[0], torch.nan)
    _ops.project_conflicts_([update], grads, [priority], [0], [1], 2)
    last = [g[-2:].clone() for g in grads]
    expected = torch.empty_like(last[0])
    _ops.project_conflicts_([expected], last, [priority[-2:].clone()], [0], [1], 2)
    assert torch.equal(update[-2:], expected)
    assert update.isfinite().all()
    _ops.combine_([update], grads, torch.tensor([[1.0, -1.0]]).double(), [0], 2)
    assert torch.equal(update[-2:], last[0] - last[1])


def test_a_large_trunk(backend: str) -> None:
    """Blocks wait for and overtake each other; the result still matches the reference."""
    kind = Kind("layer", (512, 256, 3, 3))
    arguments = trunk_arguments([sample(kind, 4, torch.float32) for _ in range(6)])
    updates = [update.fill_(torch.nan) for update in arguments["updates"]]
    priorities = _ops.phase2_update_(*arguments.values())
    arguments["updates"] = expected = [torch.empty_like(update) for update in updates]
    with cs.use_backend("reference"):
        assert torch.equal(priorities, _ops.phase2_update_(*arguments.values()))
    torch.testing.assert_close(updates, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", [cs.ConnectionStrength(), cs.PCGrad(), cs.GradDrop()], ids=repr)
def test_training_as_on_the_cpu(backend: str, method: cs.Method) -> None:
    """Three steps in float64 give the same network, up to the order of sums."""
    networks = []
    for device in ("cpu", "cuda"):
        with torch.device("cpu"):
            setup = Setup()
        setup.trunk.to(device)
        setup.heads.to(device)
        setup.batches = [(x.to(device), y.to(device)) for x, y in setup.batches]
        opt = setup.start(method)
        with cs.use_backend("reference" if device == "cpu" else backend):
            for batch in range(3):
                opt.step(setup.closure(batch))
        networks.append([p.detach().cpu() for p in setup.parameters()])
    torch.testing.assert_close(*networks, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("method", [cs.ConnectionStrength(), cs.MGDA(groups="layer")], ids=repr)
def test_step_together(backend: str, method: cs.Method) -> None:
    """Three float64 steps match `step`'s; only the first, which checks the trunk, waits."""
    first, second = Setup(), Setup()
    one, other = first.start(method), second.start(copy.deepcopy(method))
    for batch in range(3):
        one.step(first.closure(batch))
        with never_waits() if batch else contextlib.nullcontext():
            other.step_together(together(second, batch))
    torch.testing.assert_close(second.parameters(), first.parameters(), rtol=1e-6, atol=1e-9)


def test_a_step_that_fails(backend: str) -> None:
    """Running statistics are unchanged, whichever kernel copied them."""
    setup = Setup()
    opt = setup.start()
    opt.step(setup.closure(0))
    with refused(lambda: dict(setup.trunk.named_buffers()), ZeroDivisionError, "division"):
        opt.step(lambda task: setup.closure(1)(task) + 1 // 0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_a_device_that_is_not_the_current_one(backend: str) -> None:
    grads = torch.randn(3, 8, 5, device="cuda:1")
    priority = torch.zeros(8, dtype=torch.int64, device="cuda:1")
    update = cs.functional.project_conflicts(grads, priority)
    with cs.use_backend("reference"):
        torch.testing.assert_close(update, cs.functional.project_conflicts(grads, priority))


def _balanced(device: str) -> list[Tensor]:
    """Parameters after some GradientBalancer steps, which do not wait from the third on."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        trunk, heads = nn.Linear(12, 90), nn.ModuleDict({t: nn.Linear(90, 1) for t in "ab"})
        network = nn.ModuleList([trunk, heads]).double()
        x = torch.randn(4, 8, 12, dtype=torch.float64).to(device)
    network.to(device)
    sgd = torch.optim.SGD(network.parameters(), 0.1)
    balancer = cs.GradientBalancer(trunk.parameters(), heads, cs.NashMTL(), sgd, sketch=256)
    for number, batch in enumerate(x):
        sgd.zero_grad()
        with never_waits() if device == "cuda" and number > 1 else contextlib.nullcontext():
            for n, task in enumerate(heads):
                with balancer.task(task):
                    (heads[task](trunk(batch).tanh()) - n).square().mean().backward()
            sgd.step()
    return [p.detach().cpu() for p in network.parameters()]


def test_balancer(backend: str) -> None:
    with cs.use_backend("cpu"), torch.device("cpu"):
        expected = _balanced("cpu")
    # Within a thread, products of sketches are added in float32.
    torch.testing.assert_close(_balanced("cuda"), expected, rtol=1e-6, atol=1e-9)
