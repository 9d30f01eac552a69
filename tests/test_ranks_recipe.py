"""The recipe for many ranks, as torchrun starts it: trains, and goes on from its checkpoints."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import cs_kernels as cs

pytestmark = pytest.mark.ranks

RECIPE = Path(__file__).parent.parent / "examples" / "ranks.py"
STEPS = 16
SAVED = 10
"""The first of two checkpoints, in the middle of the second epoch."""

# Both with a checkpoint from two ranks. Training statistics are those of the parts of a batch, so
# only fixed ones give other numbers of ranks the same losses.
KINDS = {"replicated": (), "sharded": ("--sharded", "--fixed-statistics")}

Losses = dict[int, tuple[int, float, float]]
"""By step: the phase, and the losses of two tasks."""


@contextmanager
def _started(size: int, folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The recipe on some ranks, stopped at the end."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    recipe = [str(RECIPE), "--steps", str(STEPS), "--checkpoint", str(folder), *options]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(cs.__file__).parent.parent),
    }
    pipe = subprocess.PIPE
    command = [*torchrun, f"--nproc-per-node={size}", *recipe]
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


def _losses(process: subprocess.Popen[str]) -> Losses:
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    lines = re.findall(r"^step (\d+): phase (\d), sum (\S+), product (\S+)$", out, re.M)
    return {int(step): (int(phase), float(a), float(b)) for step, phase, a, b in lines}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Losses, Path]]:
    """For each kind: the losses of an uninterrupted run, and the folder of its first checkpoint."""
    folders = [tmp_path_factory.mktemp(kind) for kind in KINDS]
    # Two at once: each waits half of the time.
    first, second = (
        _started(2, folder, *options)
        for folder, options in zip(folders, KINDS.values(), strict=True)
    )
    with first as one, second as other:
        losses = _losses(one), _losses(other)
    for folder in folders:
        assert {path.name for path in folder.iterdir()} == {str(SAVED), str(STEPS)}
        shutil.rmtree(folder / str(STEPS))
    return dict(zip(KINDS, zip(losses, folders, strict=True), strict=True))


def test_resumed_runs_go_on_exactly(
    straight: dict[str, tuple[Losses, Path]], tmp_path: Path
) -> None:
    for kind, (_, folder) in straight.items():
        shutil.copytree(folder, tmp_path / kind)
    first, second = (_started(2, tmp_path / kind, *options) for kind, options in KINDS.items())
    with first as one, second as other:
        resumed = _losses(one), _losses(other)
    for found, (losses, _) in zip(resumed, straight.values(), strict=True):
        assert list(losses) == list(range(STEPS))
        assert {phase for phase, *_ in losses.values()} == {1, 2}
        assert found == {step: losses[step] for step in range(SAVED, STEPS)}


def test_other_numbers_of_ranks_go_on(
    straight: dict[str, tuple[Losses, Path]], tmp_path: Path
) -> None:
    """One that is not sharded, and four that are, from a checkpoint of two that were."""
    losses, folder = straight["sharded"]
    for name in ("one", "four"):
        shutil.copytree(folder, tmp_path / name)
    first = _started(1, tmp_path / "one", "--fixed-statistics")
    second = _started(4, tmp_path / "four", *KINDS["sharded"])
    with first as one, second as four:
        resumed = _losses(one), _losses(four)
    for found in resumed:
        assert list(found) == list(range(SAVED, STEPS))
        for step, (phase, *values) in found.items():
            assert phase == losses[step][0]
            assert values == pytest.approx(losses[step][1:], rel=1e-5)
