"""Tests that need a GPU; the operators' own run there through the `backend` fixture."""

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
from torch import Tensor
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
    """Each backend of a GPU, without deterministic mode, whose fills hide missing writes."""
    torch.use_deterministic_algorithms(False)
    with cs.use_backend(request.param), torch.device("cuda"):
        yield request.param


@contextlib.contextmanager
def never_waits() -> Iterator[None]:
    """Raises where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _calls(tasks: int = 3, counter: Tensor | None = None) -> dict[str, Callable[[], list[Tensor]]]:
    """Every operator of a step on tensors that stay, as a function that returns what it wrote."""
    arguments = trunk_arguments([sample(kind, tasks, torch.float32) for kind in KINDS])
    updates = arguments["updates"]
    grads = arguments["grads"] = [grad.contiguous() for grad in arguments["grads"]]
    zeros = [0] * len(updates)

    def phase2() -> list[Tensor]:
        return [_ops.phase2_update_(*arguments.values()), *updates]

    def drop() -> list[Tensor]:
        _ops.drop_signs_(updates, grads, [0.1] * tasks, 1, 2, tasks, counter)
        return updates

    def gramian_method(name: str, *more: object) -> Callable[[], list[Tensor]]:
        def run() -> list[Tensor]:
            gramian = _ops.gramian(grads, zeros, 1, tasks)
            options = solver_options(name, gramian)
            solved = getattr(_ops, f"{name}_weights")(gramian, *options, *more)
            _ops.combine_(updates, grads, solved, zeros, tasks)
            return [*updates, gramian, solved, *(o for o in options if isinstance(o, Tensor))]

        return run

    drawing = ("pcgrad", "gradvac")
    solvers = {n: gramian_method(n, *([counter] if n in drawing else [])) for n in SOLVERS}
    return {"phase2": phase2, "drop": drop, **solvers}


STEPS = ["phase2", "drop", *SOLVERS]


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return [t.clone() for t in tensors]


@pytest.mark.parametrize("tasks", [1, 4, 8, 9])
def test_sanitized_steps(backend: str, tasks: int) -> None:
    """Every operator on small sizes: what `make sanitize-gpu` runs under the sanitizers."""
    for run in _calls(tasks).values():
        assert all(written.isfinite().all() for written in run())


@pytest.mark.parametrize("name", STEPS)
def test_never_waits(backend: str, name: str) -> None:
    """There is no host synchronization from the gradients to the update."""
    run = _calls()[name]
    run()
    with never_waits():
        run()


@pytest.mark.parametrize("name", STEPS)
def test_same_bits_in_every_run(backend: str, name: str) -> None:
    run = _calls()[name]
    first = _copies(run())
    for _ in range(20):
        assert_equal(run(), first)


@pytest.mark.parametrize("name", STEPS)
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
    """As eager calls of the next steps, which differ; the host does not read it."""
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


def _assert_close(captured: Loop, eager: Loop) -> None:
    """Up to the order of sums in torch's own kernels."""
    found = []
    for loop in (captured, eager):
        leaves = tree_leaves([loop.setup.state(), loop.losses, loop.opt.state_dict()])
        found.append([leaf for leaf in leaves if isinstance(leaf, Tensor | float | int)])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_captured_steps(backend: str, case: str) -> None:
    """Warm-up, capture and replays train as eager steps do."""
    _assert_close(*(CASES[case](captured=captured).train() for captured in (True, False)))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_captured_optimizers(
    backend: str, kind: Callable[..., torch.optim.Optimizer], scaled: bool
) -> None:
    """Also with a scaler, and with a learning rate that a schedule writes in device memory."""
    loops = []
    for captured in (True, False):
        options = {} if kind is torch.optim.SGD else {"capturable": True}
        optimizer = partial(kind, fused=True, **options)
        scaler = torch.amp.GradScaler("cuda", init_scale=8.0) if scaled else None
        lr = torch.tensor(0.01)
        loop = Loop(cs.PCGrad(), captured=captured, optimizer=optimizer, scaler=scaler, lr=lr)
        rate = torch.optim.lr_scheduler.ExponentialLR(loop.setup.optimizer, 0.9)
        loops.append(loop.train(stop=14, rate=rate))
    _assert_close(*loops)


def test_captured_again_after_a_change(backend: str) -> None:
    """A learning rate that is a number, in both phases; the graphs' memory is made anew."""
    loops = []
    for captured in (True, False):
        loop = Loop(cs.GradDrop(), cs.Mixed(3, 1, "step"), captured=captured)
        rate = torch.optim.lr_scheduler.StepLR(loop.setup.optimizer, 10, 0.5)
        loops.append(loop.train(stop=40, rate=rate))
    _assert_close(*loops)


def test_replays_do_not_wait(backend: str) -> None:
    loop = Loop(cs.NashMTL(), weighting=cs.DynamicWeightAverage(), captured=True).train()
    with never_waits():
        loop.step()


@pytest.mark.parametrize("method", [cs.ConnectionStrength(), cs.MGDA(groups="layer")], ids=repr)
@pytest.mark.parametrize("captured", [False, True])
def test_reports_do_not_wait(backend: str, method: cs.Method, captured: bool) -> None:
    """The time of the surgery is known from the step after the first report on, if it is eager."""
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
        torch.zeros(1)  # A graph without a kernel warns.
        with pytest.raises(RuntimeError, match=r"use MultiTaskOptimizer\.capture"):
            loop.step()


@pytest.mark.parametrize("name", STEPS)
def test_on_another_stream(backend: str, name: str) -> None:
    """Writes are ordered after the earlier work on that stream."""
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
    calls = [_calls()["phase2"] for _ in range(2)]
    expected = [_copies(run()) for run in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for run, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(run())
    torch.cuda.synchronize()
    assert_equal(results[-2:], expected)


def test_a_capture_before_any_step_says_so(backend: str) -> None:
    update, grads = torch.empty(5, 7), list(torch.randn(2, 5, 7))
    with (
        pytest.raises(RuntimeError, match="make a step before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        _ops.combine_([update], grads, torch.ones(1, 2), [0], 2)


def test_more_than_2_to_the_31_elements(backend: str) -> None:
    rows, length = 2**16 + 3, 2**15
    grads = [torch.randn(rows, length, dtype=torch.bfloat16) for _ in range(2)]
    priority = torch.zeros(rows, dtype=torch.int64)
    priority[-2:] = 1
    update = torch.full_like(grads[0], torch.nan)
    _ops.project_conflicts_([update], grads, [priority], [0], [1], 2)
    last = [g[-2:].clone() for g in grads]
    expected = torch.empty_like(last[0])
    _ops.project_conflicts_([expected], last, [priority[-2:].clone()], [0], [1], 2)
    assert torch.equal(update[-2:], expected)
    assert update.isfinite().all()
    weights = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    _ops.combine_([update], grads, weights, [0], 2)
    assert torch.equal(update[-2:], last[0] - last[1])


def test_a_large_trunk(backend: str) -> None:
    """Programs wait and overtake each other; the result is still that of the reference."""
    kind = Kind("layer", (512, 256, 3, 3))
    ours = trunk_arguments([sample(kind, 4, torch.float32) for _ in range(6)])
    updates = [update.fill_(torch.nan) for update in ours["updates"]]
    others = [torch.empty_like(update) for update in updates]
    priorities = _ops.phase2_update_(*ours.values())
    with cs.use_backend("reference"):
        expected = _ops.phase2_update_(*{**ours, "updates": others}.values())
    assert torch.equal(priorities, expected)
    torch.testing.assert_close(updates, others, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", [cs.ConnectionStrength(), cs.PCGrad(), cs.GradDrop()], ids=repr)
def test_training_as_on_the_cpu(backend: str, method: cs.Method) -> None:
    """Three steps in float64: the same network, up to the order of sums."""
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
    """Three steps in float64, as `step`; after the first, which checks the trunk, none waits."""
    first, second = Setup(), Setup()
    one, other = first.start(method), second.start(copy.deepcopy(method))
    for batch in range(3):
        one.step(first.closure(batch))
        with never_waits() if batch else contextlib.nullcontext():
            other.step_together(together(second, batch))
    torch.testing.assert_close(second.parameters(), first.parameters(), rtol=1e-6, atol=1e-9)


def test_a_step_that_fails(backend: str) -> None:
    """Running statistics are as before, whichever kernel has copied them."""
    setup = Setup()
    opt = setup.start()
    opt.step(setup.closure(0))

    def fails(task: str) -> Tensor:
        setup.closure(1)(task)
        raise KeyError(task)

    with refused(lambda: dict(setup.trunk.named_buffers()), KeyError, setup.tasks[0]):
        opt.step(fails)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_a_device_that_is_not_the_current_one(backend: str) -> None:
    grads = torch.randn(3, 8, 5, device="cuda:1")
    priority = torch.zeros(8, dtype=torch.int64, device="cuda:1")
    update = cs.functional.project_conflicts(grads, priority)
    with cs.use_backend("reference"):
        torch.testing.assert_close(update, cs.functional.project_conflicts(grads, priority))
