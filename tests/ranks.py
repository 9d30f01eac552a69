"""Processes that train together in tests, each a rank, with gloo on this machine."""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)


def _serve(rank: int, size: int, store: str, connection: Connection) -> None:
    """Runs the functions that it is sent, until there are no more."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # New tensors are filled with NaN.
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=TIMEOUT
    )
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            connection.send((True, function(rank, *arguments)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


class Ranks:
    """Processes that wait for functions to run."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        # One process imports everything, and is forked for each rank.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["rank_networks", "torch.distributed.fsdp"])
        self._connections, self._processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, store, there), daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of `function(rank, *arguments)`, in the order of the ranks.

        Raises:
            AssertionError: A rank has failed.

        """
        for connection in self._connections:
            connection.send((function, arguments))
        answers = [connection.recv() for connection in self._connections]
        failed = [f"rank {r}: {text}" for r, (passed, text) in enumerate(answers) if not passed]
        assert not failed, "\n".join(failed)
        return [result for _, result in answers]

    def stop(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(10)
            process.kill()
        self._folder.cleanup()
