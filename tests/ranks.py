"""Test processes that train together, one per rank, with gloo on this machine.

With CS_KERNELS_TEST_RANKS=cuda in the environment, they use NCCL on its GPUs.
"""

import gc
import itertools
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

DEVICE = os.environ.get("CS_KERNELS_TEST_RANKS", "cpu")
"""The device type for tensors of ranks, and of the single process for comparison."""

TIMEOUT = timedelta(minutes=15)
"""A limit that only prevents waiting forever."""


def on_its_device(rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function with a rank's device as the default; moves its results to the CPU."""
    device = torch.device(DEVICE, rank % torch.cuda.device_count() if DEVICE == "cuda" else 0)
    if DEVICE == "cuda":
        torch.cuda.set_device(device)
    with device if DEVICE == "cuda" else nullcontext():
        return tree_map_only(Tensor, Tensor.cpu, function(rank, *arguments))


def _serve(rank: int, size: int, store: str, connection: Connection) -> None:
    """Runs the functions that it receives, until the connection closes."""
    torch.use_deterministic_algorithms(DEVICE == "cpu")  # New tensors are filled with NaN.
    gc.freeze()  # Garbage collections then skip imported objects.
    os.environ["LOCAL_RANK"] = str(rank)  # As torchrun does.
    for number in itertools.count():
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        # Each function gets a new process group, whose threads end with the group.
        dist.init_process_group(
            "nccl" if DEVICE == "cuda" else "gloo",
            init_method=f"file://{store}{number}",
            rank=rank,
            world_size=size,
            timeout=TIMEOUT,
        )
        torch.manual_seed(0)
        torch.set_num_threads(1)  # Sums depend on the number, which Accelerate changes.
        try:
            function = getattr(function, "on_a_rank", function)
            answer = True, on_its_device(rank, function, *arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        gc.collect()
        if answer[0]:
            # A rank that still waits for a message would fail if the group were destroyed.
            connection.send(answer)
            connection.recv()
        dist.destroy_process_group()
        if not answer[0]:
            connection.send(answer)


def forked(
    target: Callable[..., object], *arguments: Any, daemon: bool = False
) -> multiprocessing.process.BaseProcess:
    """Starts a process as a fork of one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    imported = [name for name in ("paper.train", "transformers") if name in sys.modules]
    context.set_forkserver_preload(["rank_networks", "torch.distributed.fsdp", *imported])
    process = context.Process(target=target, args=arguments, daemon=daemon)
    # Before Python 3.12.8, the server ignores sys.path, and silently imports nothing from there.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        process.start()
    return process


class Ranks:
    """Processes that wait for functions to run."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._connections, self._processes = [], []
        for rank in range(size):
            here, there = multiprocessing.Pipe()
            self._processes.append(forked(_serve, rank, size, store, there, daemon=True))
            there.close()
            self._connections.append(here)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of `function(rank, *arguments)`, in the order of the ranks.

        Raises:
            AssertionError: A rank has failed.

        """
        for connection in self._connections:
            connection.send((function, arguments))
        answers = [connection.recv() for connection in self._connections]
        for connection, (passed, _) in zip(self._connections, answers, strict=True):
            if passed:
                connection.send("all have answered")
        failed = [f"rank {r}: {text}" for r, (passed, text) in enumerate(answers) if not passed]
        assert not failed, "\n".join(failed)
        return [result for _, result in answers]

    def agreed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of `run`, which must have the same bits on all ranks."""
        first, *others = self.run(function, *arguments)
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=0)
        return first

    def stop(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(10)
            process.kill()
        self._folder.cleanup()


Pools = Callable[[int], Ranks]
"""The type of the fixture `pools`."""
