"""Checkpoints of the recipes: a kill during a write leaves a complete one."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_training import FOLDER, recipe
from recipes.atomic import atomic_write
from torch import Tensor

pytestmark = [pytest.mark.frameworks, pytest.mark.slow]

KILLS = 15
KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from atomic import atomic_write

path = Path(sys.argv[1])
values = torch.zeros(300_000)
random.seed(0)


def save():
    if sys.argv[2] == "atomic":
        with atomic_write(path) as file:
            torch.save(values, file)
    else:
        torch.save(values, path)


save()
for _ in range(int(sys.argv[3])):
    process = os.fork()
    if not process:
        while True:
            save()
    time.sleep(random.uniform(0.002, 0.02))
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    try:
        assert torch.equal(torch.load(path), values)
        print("readable")
    except Exception as error:
        print(repr(error).replace(chr(10), " "))
"""


@pytest.mark.parametrize("way", ["atomic", "plain"])
def test_a_kill_at_a_random_moment_leaves_a_readable_file(way: str, tmp_path: Path) -> None:
    """The plain way leaves unreadable files, which proves that kills do occur during writes."""
    command = [sys.executable, "-c", KILLED, str(tmp_path / "a.pt"), way, str(KILLS)]
    environment = {**os.environ, "PYTHONPATH": str(FOLDER)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = done.stdout.splitlines()
    assert len(results) == KILLS
    assert (set(results) == {"readable"}) == (way == "atomic"), results
    assert {path.name for path in tmp_path.iterdir()} <= {"a.pt", "a.pt.new"}


def test_the_disk_has_the_file_before_its_name_and_the_name_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With this order, even a power failure leaves a complete file."""
    path, done = tmp_path / "a", []
    (tmp_path / "a.new").write_bytes(b"longer than the new one")  # Left by a killed process.
    real = os.fsync

    def fsync(descriptor: int) -> None:
        done.append((Path(f"/proc/self/fd/{descriptor}").readlink(), path.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with atomic_write(path) as file:
        file.write(b"new")
    assert done == [(tmp_path / "a.new", False), (tmp_path, True)]
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert path.read_bytes() == b"new"


class _KilledError(Exception):
    """Simulates a kill."""


TRAIN: dict[str, Any] = {
    "plain_loop": lambda module, *options: module.train(*options),
    "several_optimizers": lambda module, *options: module.train(*options),
    "weightings": lambda module, *options: module.train("dynamic", *options),
}


@pytest.mark.parametrize("name", TRAIN)
def test_a_recipe_resumes_after_a_kill_in_the_midst_of_a_checkpoint(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module, path, save = recipe(name), tmp_path / "a.pt", torch.save

    def half(state: object, to: Any) -> None:
        whole = io.BytesIO()
        save(state, whole)
        written = whole.getvalue()[: len(whole.getvalue()) // 2]
        to.write_bytes(written) if isinstance(to, Path) else to.write(written)
        raise _KilledError

    TRAIN[name](module, 2, path)
    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(_KilledError):
        TRAIN[name](module, 3, path)
    monkeypatch.setattr(torch, "save", save)
    resumed: dict[str, Tensor] = TRAIN[name](module, 4, path)[0].state_dict()
    straight = TRAIN[name](module, 4)[0].state_dict()
    assert all(torch.equal(resumed[key], straight[key]) for key in straight)
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]
