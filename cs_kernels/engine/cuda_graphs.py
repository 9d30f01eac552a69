"""CUDA graphs: records the work of a step on a device, and replays it."""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Graphs(Protocol):
    """Records and replays steps on one type of device."""

    def __init__(self, device: torch.device) -> None: ...

    @staticmethod
    def is_capturing() -> bool:
        """Whether any code is capturing a graph now."""

    def aside(self) -> AbstractContextManager[None]:
        """A context for the eager steps before a capture; their device work stays in order."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Records `run` without executing it; returns a function that replays it."""


class CudaGraphs:
    """CUDA graphs that share one memory pool, so only one may be replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()

    @staticmethod
    def is_capturing() -> bool:
        """Whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Switches to the capture's stream, because libraries allocate workspaces per stream."""
        outside = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream), warnings.catch_warnings():
                # Torch warns about capturable=True outside a capture, but the capture follows.
                warnings.filterwarnings("ignore", "This instance was constructed with capturable")
                yield
        finally:
            outside.wait_stream(self._stream)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Records `run`, while other threads, such as a data loader's, may use the device."""
        from cs_kernels.ops.gpu.device import captured_tables  # Slow to import; only needed here.

        graph = torch.cuda.CUDAGraph()
        # A pool lives as long as any graph that uses it.
        pool = next((other.pool() for other in self._graphs), None)
        with (
            captured_tables() as tables,
            torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local"),
        ):
            run()
        self._graphs.add(graph)
        return _Replay(graph, tables)


class _Replay:
    """Replays a CUDA graph, and keeps the tables that it reads until the last replay has ended."""

    def __init__(self, graph: torch.cuda.CUDAGraph, tables: list[object]) -> None:
        self._graph = graph
        self._tables = tables
        self._replayed = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def __call__(self) -> None:
        self._graph.replay()
        self._replayed.record()

    def __del__(self) -> None:
        self._replayed.synchronize()


DEVICES: dict[str, type[Graphs]] = {"cuda": CudaGraphs}
"""By type of device."""


def refuse_capture(device: torch.device) -> None:
    """Raises a RuntimeError during the capture of a CUDA graph."""
    graphs = DEVICES.get(device.type)
    if graphs is not None and graphs.is_capturing():
        raise RuntimeError(
            "a CUDA graph must not be captured around a step, because replays would repeat its"
            " phase and number, and skip its checks: use MultiTaskOptimizer.capture(closure)"
        )
