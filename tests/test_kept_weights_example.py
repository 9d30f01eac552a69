"""The example with kept task weights: its training and its tables."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import demo
import kept_weights
import numpy as np
import pytest
import stereo
from rich.progress import Progress

import cs_kernels as cs

pytestmark = [pytest.mark.docs, pytest.mark.full, pytest.mark.xdist_group("kept_weights_example")]

TINY = demo.Settings(epochs=4, steps=2, crop=48, batch=2)  # Every task has labels in each crop.
SEEDS = [0, 1]
TASKS = list(stereo.TASKS)

Scenes = tuple[stereo.Scene, stereo.Scene]


class Made(NamedTuple):
    scenes: Scenes
    runs: kept_weights.Runs
    folder: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Runs the script on the training scene, with a small scene to evaluate on."""
    train, test = stereo.load()
    scenes = train, test.crop(slice(0, 64), slice(0, 64))
    folder, runs = tmp_path_factory.mktemp("kept_weights"), []

    def write(of_rows: kept_weights.Runs, *rest: Any) -> None:
        runs.append(of_rows)
        original(of_rows, *rest)

    original = kept_weights.write
    seeds = [str(seed) for seed in SEEDS]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kept_weights, "load", lambda: scenes)
        patched.setattr(kept_weights, "QUICK", TINY)
        patched.setattr(kept_weights, "write", write)
        patched.setattr(sys, "argv", ["", "--quick", "--seeds", *seeds, "--out", str(folder)])
        kept_weights.main()
    return Made(scenes, runs[0], folder)


def trained(method: Callable[[], cs.Method], seed: int, scenes: Scenes) -> demo.Run:
    run = demo.Run(TASKS, demo.Row(method), TINY, seed, scenes[0], demo.Ranks())
    with Progress(disable=True) as progress:
        run.train("", progress)
    return run


@pytest.mark.parametrize("name", ["Sum", *kept_weights.METHODS])
def test_every_1_is_the_method_without_the_option(name: str, made: Made) -> None:
    method = partial(cs.PCGrad, seed=1) if name == "PCGrad" else getattr(cs, name)
    assert made.runs[name, 1][1]["losses"] == trained(method, 1, made.scenes).losses


def test_weights_are_kept(made: Made) -> None:
    """Weights are solved for in all steps, steps 0 and 5, or step 0; an epoch has two steps."""
    assert list(made.runs) == [
        kept_weights.SUM,
        *((name, every) for name in kept_weights.METHODS for every in kept_weights.EVERY),
    ]
    for name in kept_weights.METHODS:
        of_rows = [made.runs[name, every][0] for every in kept_weights.EVERY]
        solved = [[bool(cosines) for cosines in run["cosines"]] for run in of_rows]
        assert solved == [[True] * 4, [True, False, True, False], [True, False, False, False]]
        assert len({run["losses"]["normals"][-1] for run in of_rows}) == len(of_rows)


def test_conflicts_of_an_epoch_come_from_steps_that_solve(made: Made) -> None:
    run = trained(partial(cs.UPGrad, update_every=5), 0, made.scenes)
    assert [bool(shares) for shares in run.modules] == [True, False, True, False]
    assert all(0 <= share <= 1 for share in run.modules[2].values())


def test_the_tables_have_all_rows(made: Made) -> None:
    text = (made.folder / "kept_weights.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    second = 2 + len(made.runs)
    assert cells[0] == cells[second] == kept_weights.HEAD
    assert [(row[0], int(row[1] or 1)) for row in cells[2:second]] == list(made.runs)
    differences = {(row[0], row[1]): row for row in cells[second + 2 :]}
    assert len(differences) == len(kept_weights.METHODS) * (len(kept_weights.EVERY) + 1)
    column = kept_weights.HEAD.index("edges loss↓")
    first, fifth = (
        np.array([run["losses"]["edges"][-1] for run in made.runs["PCGrad", every]])
        for every in (1, 5)
    )
    expected = f"{(fifth - first).mean():+.4f}±{(fifth - first).std(ddof=1):.4f}"
    assert differences["PCGrad", "5 minus 1"][column] == expected
    spread = f"{first.std(ddof=1):.4f}"
    assert differences["PCGrad", "1: deviation between seeds"][column] == spread
