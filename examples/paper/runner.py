"""Trains the runs of a table that have no result yet, several at a time."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from queue import SimpleQueue

import torch
from recipes.atomic import atomic_write
from rich.console import Console
from rich.progress import Progress

from paper import train
from paper.datasets import fingerprint
from paper.experiments import Part, Run
from paper.train import columns

EXAMPLES = Path(__file__).parents[1]
CONTEXT = multiprocessing.get_context("forkserver")
ONE_THREAD = threading.Lock()
"""Held in `start` and `join`: `start` polls all processes, but an exit code can be read once."""


class FailedRunsError(RuntimeError):
    """Raised if runs fail in their processes; the message contains the ends of their logs."""


@dataclass(frozen=True)
class Place:
    """The folders of data sets and runs, and options for starting runs."""

    data: Path
    runs: Path
    threads: int = 1
    """CPU threads of each process."""
    _fingerprints: dict[str, str] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def fingerprint(self, data: str) -> str:
        """The fingerprint of a data set, computed in the first call."""
        if data not in self._fingerprints:
            self._fingerprints[data] = fingerprint(data, self.data)
        return self._fingerprints[data]

    def folder(self, run: Run) -> Path:
        """The folder of a run."""
        return self.runs / run.name

    def is_done(self, run: Run) -> bool:
        """Whether a run has a result.

        Raises:
            FileNotFoundError: The data are missing.
            ValueError: A checkpoint or result in the folder is damaged, or from other settings or
                data.

        """
        folder = self.folder(run)
        result = folder / "result.json"
        try:
            if result.exists():
                read = json.loads(result.read_text())
                found = Run.from_dict(read["run"])
            elif (folder / "checkpoint.pt").exists():
                found = Run.from_json((folder / "run.json").read_text())
            else:
                return False
        except json.JSONDecodeError as error:
            raise ValueError(f"{folder} has a damaged file: delete the folder") from error
        differences = run.differences(found)
        if not differences and result.exists() and read["data"] != self.fingerprint(run.data):
            differences = "different data"
        if differences:
            raise ValueError(
                f"{folder} belongs to another run: delete it, or choose another folder with --out;"
                f" expected and found: {differences}"
            )
        return result.exists()

    def train(self, run: Run, gpu: str | None = None) -> float:
        """Trains a run in its own process, with output in log.txt; returns the seconds it took.

        Args:
            run: A run without a result.
            gpu: The only GPU that the process sees, as in CUDA_VISIBLE_DEVICES; None for all GPUs.

        Raises:
            RuntimeError: The process failed, or the run that this one needs has failed.

        """
        start, folder = time.perf_counter(), self.folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / "run.json") as file:
            file.write(run.to_json().encode())
        arguments = [str(folder), "--data", str(self.data), "--ends-with", str(os.getpid())]
        if (needed := run.needs()) is not None:
            conflicts = self.folder(needed) / "conflicts.json"
            if not conflicts.exists():
                raise RuntimeError(f"{run.name} needs {conflicts}, whose run has failed")
            arguments += ["--conflicts", str(conflicts)]
        log = folder / "log.txt"
        if (ranks := run.settings.ranks) > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone"]
            command = [*torchrun, f"--nproc-per-node={ranks}", "-m", "paper.train", *arguments]
            with log.open("a") as file:
                ended = subprocess.run([sys.executable, *command], stdout=file, stderr=file)
            code = ended.returncode
        else:
            # A forked process has all modules; importing them takes longer than a small run.
            process = CONTEXT.Process(target=_train_here, args=(arguments, log, self.threads, gpu))
            with ONE_THREAD:
                process.start()
            wait([process.sentinel])
            with ONE_THREAD:
                process.join()
            code = process.exitcode
        if code:
            tail = "\n".join(log.read_text().splitlines()[-15:])
            raise RuntimeError(f"{run.name} ended with exit code {code}; the end of {log}:\n{tail}")
        return time.perf_counter() - start


def _train_here(arguments: list[str], log: Path, threads: int, gpu: str | None) -> None:
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(threads)
    train.main(arguments)


def missing(parts: list[Part], place: Place) -> list[Run]:
    """The runs without a result, without duplicates, each after the run that it needs.

    Raises:
        FileNotFoundError: The data are missing.
        ValueError: As `Place.is_done`.

    """
    for data in {part.data for part in parts}:
        place.fingerprint(data)  # Before any run is started.
    runs = dict.fromkeys(run for part in parts for run in part.runs())
    needed = dict.fromkeys(run.needs() for run in runs if run.needs() is not None)
    return [run for run in {**needed, **runs} if not place.is_done(run)]


def run_all(runs: list[Run], place: Place, jobs: int, console: Console) -> None:
    """Trains runs, `jobs` at a time; runs that need other runs' conflicts come last.

    Raises:
        FailedRunsError: A run has failed; the others have been trained.

    """
    os.environ["OMP_NUM_THREADS"] = str(place.threads)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    CONTEXT.set_forkserver_preload(["paper.train"])
    failures: list[BaseException] = []
    gpus: SimpleQueue[str | None] = SimpleQueue()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
        map(str, range(torch.cuda.device_count()))
    )
    names = visible.split(",") if visible and jobs > 1 else [None]
    for job in range(jobs):
        gpus.put(names[job % len(names)])

    def train_one(run: Run) -> float:
        gpu = gpus.get()
        try:
            return place.train(run, gpu)
        finally:
            gpus.put(gpu)

    with Progress(*columns(), console=console) as progress, ThreadPoolExecutor(jobs) as pool:
        bar = progress.add_task("runs", total=len(runs))
        for stage in (False, True):
            chosen = [run for run in runs if (run.needs() is not None) == stage]
            started = {pool.submit(train_one, run): run for run in chosen}
            try:
                for future in as_completed(started):
                    progress.advance(bar)
                    if (error := future.exception()) is not None:
                        failures.append(error)
                        console.print(f"{started[future].name} failed")
                    else:
                        console.print(f"{started[future].name}: {future.result():.0f} s")
            except BaseException:
                # After Ctrl-C, no further run starts.
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    if failures:
        raise FailedRunsError("\n".join(map(str, failures)))
