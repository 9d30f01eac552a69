"""The recipe for several ranks: training under torchrun, and resuming from its checkpoints."""

import contextlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import DEVICE, Pools, Ranks

import cs_kernels as cs

pytestmark = pytest.mark.ranks

RECIPE = Path(__file__).parent.parent / "examples" / "ranks.py"
STEPS = 16
SAVED = 10
"""The first of two checkpoints, in the middle of the second epoch."""

# Both kinds save a checkpoint on two ranks. Batch statistics depend on each rank's part of a batch,
# so another number of ranks gives the same losses only with fixed statistics.
KINDS = {"replicated": (), "sharded": ("--sharded", "--fixed-statistics")}

Losses = dict[int, tuple[int, float, float]]
"""The phase and the losses of two tasks, by step."""

Runs = dict[str, tuple[Losses, Path]]
"""The losses of an uninterrupted run and the folder of its first checkpoint, by kind."""


def _arguments(folder: Path, *options: str) -> list[str]:
    return [str(RECIPE), "--steps", str(STEPS), "--checkpoint", str(folder), *options]


def _losses(out: str) -> Losses:
    lines = re.findall(r"^step (\d+): phase (\d), sum (\S+), product (\S+)$", out, re.M)
    return {int(step): (int(phase), float(a), float(b)) for step, phase, a, b in lines}


def _on_a_rank(rank: int, arguments: list[str]) -> str:
    """Runs the recipe in the group of this process; returns what it prints."""
    with (
        torch.device("cpu"),  # The recipe places its tensors itself.
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(sys, "argv", arguments),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        runpy.run_path(str(RECIPE), run_name="__main__")
    return out.getvalue()


def _trained(ranks: Ranks, folder: Path, *options: str) -> Losses:
    first, *others = ranks.run(_on_a_rank, _arguments(folder, *options))
    assert not any(others)
    return _losses(first)


@pytest.fixture(scope="module")
def straight(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = {}
    for kind, options in KINDS.items():
        folder = tmp_path_factory.mktemp(kind)
        runs[kind] = _trained(pools(2), folder, *options), folder
        assert {path.name for path in folder.iterdir()} == {str(SAVED), str(STEPS)}
        shutil.rmtree(folder / str(STEPS))
    return runs


@pytest.mark.full
def test_as_torchrun_starts_it(straight: Runs, tmp_path: Path) -> None:
    """Under torchrun, the recipe resumes exactly."""
    losses, folder = straight["sharded"]
    shutil.copytree(folder, tmp_path / "sharded")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = _arguments(tmp_path / "sharded", *KINDS["sharded"])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if DEVICE == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    paths = [str(Path(cs.__file__).parent.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(
        [*torchrun, *arguments], env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    assert _losses(done.stdout) == {step: losses[step] for step in range(SAVED, STEPS)}


@pytest.mark.parametrize(
    ("kind", "size", "options"),
    [
        *((kind, 2, options) for kind, options in KINDS.items()),
        pytest.param("sharded", 1, KINDS["sharded"][1:], marks=pytest.mark.full),
        pytest.param("sharded", 4, KINDS["sharded"], marks=pytest.mark.full),
    ],
)
def test_resumed_runs_go_on(
    pools: Pools, straight: Runs, tmp_path: Path, kind: str, size: int, options: tuple[str, ...]
) -> None:
    """Resuming is exact on two ranks, and also works on one unsharded and on four sharded ranks."""
    losses, folder = straight[kind]
    assert list(losses) == list(range(STEPS))
    assert {phase for phase, *_ in losses.values()} == {1, 2}
    shutil.copytree(folder, tmp_path / kind)
    resumed = _trained(pools(size), tmp_path / kind, *options)
    assert list(resumed) == list(range(SAVED, STEPS))
    for step, (phase, *values) in resumed.items():
        assert phase == losses[step][0]
        assert values == pytest.approx(losses[step][1:], rel=1e-5 if size != 2 else 0, abs=0)
