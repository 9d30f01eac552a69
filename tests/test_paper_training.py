"""The paper's experiments: training, interruption, and the runs of a table."""

import contextlib
import copy
import dataclasses
import fcntl
import functools
import json
import math
import os
import re
import shutil
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from paper import __main__ as command
from paper import recon, runner, timing
from paper.experiments import SINGLE, SMALL, TABLES, Run, Settings, table
from paper.losses import total_loss
from paper.networks import make_network
from paper.small import make_small
from paper.tasks import IGNORE, MEASURES, TASKS
from paper.train import Training
from ranks import forked
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

import cs_kernels as cs

pytestmark = pytest.mark.paper

SETTINGS = Settings(
    epochs=1, batch=2, rate=1e-3, size=(32, 64), width=1 / 16, pretrained=False, workers=0
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for name in TASKS:
        make_small(root, name, train=5, val=3, size=(32, 64))
    return root


@pytest.fixture(autouse=True)
def on_the_cpu(request, monkeypatch):
    """Disables the GPU, whose kernels may add in another order; tests compare bits."""
    if "cuda" not in request.node.name:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def make_run(row="Mixed", data="cityscapes", network="segnet", **changes) -> Run:
    run = {"tasks": tuple(TASKS[data]), "weighting": "equal", "seed": 0}
    run |= {name: changes.pop(name) for name in list(changes) if name in run}
    if network == "hrnet18":
        changes["width"] = 1.0
    return Run(data, network, row, settings=dataclasses.replace(SETTINGS, **changes), **run)


def train(run, folder, data, **options) -> dict:
    folder.mkdir(exist_ok=True)
    return Training(run, folder, data, **options).train()


@pytest.fixture
def place(tmp_path, data) -> runner.Place:
    return runner.Place(data, tmp_path / "runs")


def run_all(runs, place, jobs=1):
    runner.run_all(runs, place, jobs, Console(quiet=True))


TRAINED = [name for name in TABLES if name != "time"]
small_table = functools.partial(table, seeds=[0], small=True, changes={})


def runs_of(*names, **options) -> list[Run]:
    parts = [part for name in names for part in small_table(name, **options)]
    return [run for part in parts for run in part.runs()]


def killed(checkpoint, target, *arguments):
    """Starts a process, and kills it once it has written a checkpoint."""
    process = forked(target, *arguments)
    try:
        while not checkpoint.exists():
            assert process.is_alive()
            time.sleep(0.05)
    finally:
        process.kill()
        process.join()


def same(a, b) -> bool:
    """Whether two states or results are equal, apart from times and settings."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        compared = a.keys() - {"seconds", "epoch_seconds", "run"}
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in compared)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def state(module) -> dict:
    return copy.deepcopy(dict(module.state_dict()))


def are_finite(metrics, name, tasks) -> bool:
    measures = [measure for measure in MEASURES[name] if measure.task in tasks]
    return all(math.isfinite(metrics[m.task][m.name]) for m in measures)


SCORES = {"encoder.0.0": 3, "decoder.0.0": 1}


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(
            make_run("Mixed", "nyud", "hrnet18", weighting="tuned", batch=4),
            marks=pytest.mark.full,
        ),
        pytest.param(
            make_run("PCGrad", "pascal", "resnet18", weighting="dwa", batch=4),
            marks=pytest.mark.full,
        ),
        make_run(SINGLE, "nyud", "hrnet18", tasks=("normals",)),
        *(make_run(row) for row in ("GD", "Cross-Stitch", "RotoGrad")),
        make_run("Mixed", weighting="uncertainty"),
    ],
    ids=lambda run: run.name,
)
def test_an_epoch_of_each_network(tmp_path, data, run):
    training = Training(run, tmp_path, data)
    before = state(training.network)
    result = training.train()
    (epoch,) = result["history"]
    assert are_finite(result["metrics"], run.data, run.tasks)
    assert list(epoch["losses"]) == list(result["metrics"]) == list(run.tasks)
    assert all(map(math.isfinite, epoch["losses"].values()))
    assert json.loads(json.dumps(result)) == json.loads((tmp_path / "result.json").read_text())
    assert list((tmp_path / "tensorboard").iterdir())
    # Each task's head and the trunk have been trained.
    after = training.network.state_dict()
    for part in ["trunk.", *(f"heads.{task}." for task in run.tasks)]:
        assert any(key.startswith(part) and not before[key].equal(after[key]) for key in before)
    assert bool(epoch["shares"]) == (run.row == "Mixed")


@pytest.mark.kernel("cuda")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("amp", [None, "float16"])
@pytest.mark.parametrize(
    ("name", "network", "row"),
    [("nyud", "hrnet18", "Mixed"), ("pascal", "hrnet18", "PCGrad"), ("cityscapes", "segnet", "GD")],
)
def test_an_epoch_on_cuda(tmp_path, data, name, network, row, amp):
    training = Training(make_run(row, name, network, amp=amp), tmp_path, data)
    assert next(training.network.parameters()).is_cuda
    assert are_finite(training.train()["metrics"], name, TASKS[name])


@pytest.mark.parametrize(
    ("name", "network"),
    [
        ("cityscapes", "segnet"),
        pytest.param("nyud", "resnet18", marks=pytest.mark.full),
    ],
)
def test_gradient_descent_equals_a_plain_loop(tmp_path, data, name, network):
    """The plain loop runs a backward pass for each weighted loss."""
    task_norm = name == "nyud"
    tasks = {
        task: TASKS[name][task] for task in (["edge", "normals"] if task_norm else TASKS[name])
    }
    options = {"weighting": "tuned", "epochs": 2, "weight_decay": 1e-4, "tasks": tuple(tasks)}
    options["batch"] = 4 if task_norm else 2
    training = Training(make_run("GD", name, network, **options), tmp_path, data)
    torch.manual_seed(0)
    plain = make_network(network, tasks, width=SETTINGS.width, task_norm=task_norm)
    adam = torch.optim.Adam(plain.parameters(), lr=1e-3, weight_decay=1e-4)
    expected = []
    for epoch in range(2):
        training.sampler.set_epoch(epoch)
        training.train_set.set_epoch(epoch)
        adam.param_groups[0]["lr"] = 1e-3 * (1 - epoch / 2) ** 0.9
        sums = dict.fromkeys(tasks, 0.0)
        for batch in training.loader:
            adam.zero_grad()
            for task, what in tasks.items():
                active = cs.nn.active_task(plain.trunk, task) if task_norm else None
                with active or contextlib.nullcontext():
                    loss = total_loss(what, plain(batch["picture"], [task])[task], batch[task])
                (what.weight * loss).backward()
                sums[task] += loss.item() / len(training.loader)
            adam.step()
        expected.append(sums)
    # Where a gradient is zero, as for a bias before a normalization, Adam's update is a quotient of
    # rounding errors, which statistics of few pixels amplify.
    for epoch, losses in zip(training.train()["history"], expected, strict=True):
        assert epoch["losses"] == pytest.approx(losses, rel=5e-3 if task_norm else 1e-4)


@pytest.mark.parametrize(
    ("row", "weighting"),
    [
        ("Mixed", "uncertainty"),
        ("PCGrad + Recon", "equal"),
        pytest.param("GD", "dwa", marks=pytest.mark.full),
        pytest.param("GradDrop", "equal", marks=pytest.mark.full),
        pytest.param("RotoGrad", "equal", marks=pytest.mark.full),
    ],
)
def test_a_resumed_run_equals_one_that_was_not_interrupted(
    tmp_path, data, monkeypatch, row, weighting
):
    monkeypatch.setattr(recon, "SHARE", 0.75)  # Conflicts are counted in three epochs.
    run = make_run(row, weighting=weighting, epochs=4, workers=2 if row == "GradDrop" else 0)
    options = {"conflicts": SCORES} if "Recon" in row else {}
    whole = train(run, tmp_path / "whole", data, **options)
    step, steps = Training.step, []

    def failing(self, batch):
        steps.append(1)
        if len(steps) == 2 * 2 + 2:  # In the middle of the third epoch.
            raise KeyboardInterrupt
        return step(self, batch)

    monkeypatch.setattr(Training, "step", failing)
    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "parts", data, **options)
    monkeypatch.setattr(Training, "step", step)
    torch.manual_seed(123)  # Another process has other random numbers.
    assert same(whole, train(run, tmp_path / "parts", data, **options))
    folders = [tmp_path / name for name in ("whole", "parts")]
    assert same(*(torch.load(folder / "checkpoint.pt") for folder in folders))
    if row == "GD":
        one, other = ((folder / "conflicts.json").read_text() for folder in folders)
        assert one == other
        assert any(json.loads(one).values())


@pytest.mark.full
def test_a_killed_run_resumes(tmp_path, data):
    """The run gets SIGKILL, as on a machine that runs out of memory."""
    run, folder = make_run(epochs=400), tmp_path / "killed"
    folder.mkdir()
    (folder / "run.json").write_text(run.to_json())
    # The number of threads determines the order of sums in convolutions.
    how = folder / "log.txt", torch.get_num_threads(), ""
    killed(folder / "checkpoint.pt", runner._train_here, [str(folder), "--data", str(data)], *how)
    resumed, whole = (Training(run, tmp_path / name, data) for name in ("killed", "whole"))
    epoch = resumed.epoch
    assert 1 <= epoch < 400
    resumed._train_epoch(None, lambda: None)
    while whole.epoch < epoch + 1:
        whole._train_epoch(None, lambda: None)
    for part in ("network", "opt"):
        assert same(*(state(getattr(training, part)) for training in (whole, resumed)))


def test_seeds_are_independent(tmp_path, data):
    """Seeds determine batches, initial weights, and the draws of methods and schedules."""
    trainings = []
    for row, part in (("PCGrad", "method"), ("Mixed", "schedule")):
        for seed in (0, 1):
            training = Training(make_run(row, seed=seed), tmp_path / f"{row}{seed}", data)
            assert f"seed={seed}" in repr(getattr(training.opt, part))
            trainings.append(training)
    orders = []
    for training in trainings[:2]:
        for epoch in range(40):
            training.sampler.set_epoch(epoch)
            orders.append(tuple(training.sampler))
    # One seed's orders are not the other's shifted by an epoch; some orders recur by chance.
    assert orders[1:40] != orders[40:79]
    weights = [training.network.trunk.encoder[0][0].weight for training in trainings[:2]]
    assert not torch.equal(*weights)


def test_orders_of_tasks_begin_with_the_same_weights(tmp_path, data):
    orders = [(*TASKS["nyud"],), (*reversed(TASKS["nyud"]),)]
    runs = [make_run("Mixed", "nyud", "resnet18", tasks=order) for order in orders]
    a, b = (Training(run, tmp_path / str(i), data) for i, run in enumerate(runs))
    assert same(state(a.network), state(b.network))
    assert [opt.tasks for opt in (a.opt, b.opt)] == orders


def test_batches_without_labels_of_a_task(tmp_path, data):
    """The task's head is unchanged, even by momentum; a batch without labels makes no step."""
    training = Training(make_run("GD"), tmp_path, data)
    training.opt.start_epoch(0)
    batch = next(iter(training.loader))
    training.step(batch)
    network = training.network
    for task, labelled in (("depth", ["semseg"]), ("semseg", [])):
        before = state(network)
        batch[task] = torch.full_like(batch[task], IGNORE)
        assert list(training.step(batch)) == labelled
        changed = {
            key.split(".")[1] for key, x in state(network).items() if not x.equal(before[key])
        }
        assert ("semseg" in changed, "depth" in changed) == (bool(labelled), False)
        assert labelled or not changed


def _on_a_rank(rank, run, folder, data):
    with mock.patch.dict(os.environ, WORLD_SIZE="2", RANK=str(rank)):
        return Training(run, folder, data).train()


@pytest.mark.ranks
def test_ranks_without_labels(tmp_path, data, pools):
    """If no rank has labels for a batch, no rank makes a step."""
    shutil.copytree(data / "cityscapes", tmp_path / "cityscapes")
    for number in range(3):
        path = tmp_path / "cityscapes" / "train" / "depth" / f"{number}.npy"
        np.save(path, np.zeros_like(np.load(path)))
    run = make_run(SINGLE, tasks=("depth",), ranks=2, epochs=4)
    result, _ = pools(2).run(_on_a_rank, run, tmp_path, tmp_path)
    assert any(math.isfinite(epoch["losses"]["depth"]) for epoch in result["history"])


@pytest.mark.parametrize("row", ["Mixed", "PCGrad"])
def test_mixed_precision(tmp_path, data, row):
    """Losses are close to float32's, but not equal."""
    exact, *mixed = (
        train(make_run(row, epochs=2, amp=amp), tmp_path / str(amp), data)
        for amp in (None, "bfloat16", "float16")
    )
    for result in mixed:
        for a, b in zip(exact["history"], result["history"], strict=True):
            assert b["losses"] == pytest.approx(a["losses"], rel=0.1)
            assert not {*a["losses"].values()} & {*b["losses"].values()}


@pytest.mark.full
@pytest.mark.compile
def test_compiled(tmp_path, data, monkeypatch):
    plain = train(make_run(), tmp_path / "plain", data)
    graphs = torch._dynamo.testing.CompileCounter()
    compiled, compile_of = [], functools.partial(torch.compile, backend=graphs)
    monkeypatch.setattr(torch, "compile", lambda m: compiled.append(m) or compile_of(m))
    result = train(make_run(compile=True), tmp_path / "compiled", data)
    assert len(compiled) == 1
    assert graphs.frame_count > 0
    assert same(plain, result)


@pytest.mark.parametrize(
    ("run", "checkpoint", "message"),
    [
        (make_run(batch=8), None, "a batch of 8 needs as many pictures, got 5"),
        (make_run(ranks=2), None, "ranks must be 2 as in run.json, .*, got 1"),
        (make_run("RotoGrad", amp="bfloat16"), None, "RotoGrad must run in one process, without"),
        (make_run("GD + Recon"), None, "needs the conflicts of cityscapes/segnet/equal/GD/seed0"),
        (make_run("GD"), b"cut", r"checkpoint.pt cannot be read: delete it"),
    ],
)
def test_a_run_that_does_not_fit(tmp_path, data, run, checkpoint, message):
    if checkpoint:
        (tmp_path / "checkpoint.pt").write_bytes(checkpoint)
    with pytest.raises(ValueError, match=message):
        Training(run, tmp_path, data)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("small", [True, False])
def test_every_run_of_a_table_has_its_own_folder(name, small):
    """No two runs share a folder, and a run that is read back is equal."""
    runs = {*runs_of(name, seeds=[0, 1], small=small)}
    assert len({run.name for run in runs}) == len(runs)
    for run in runs:
        assert Run.from_json(run.to_json()) == run
        assert all(part and " " not in part for part in run.name.split("/"))


def test_runs_of_tables():
    """Tables share runs; RotoGrad trains in one process; every network has small settings."""
    nyud, pascal, scaling, ablation, order = (
        {*runs_of(name)} for name in ("nyud", "pascal", "scaling", "ablation", "order")
    )
    assert nyud | pascal < scaling
    assert nyud & ablation & order
    runs = runs_of("cityscapes", changes={"ranks": 2, "amp": "bfloat16"})
    settings = {run.row: (run.settings.ranks, run.settings.amp) for run in runs}
    assert settings["RotoGrad"] == (1, None)
    assert settings["Mixed"] == (2, "bfloat16")
    assert {f"{run.data}/{run.network}" for run in runs_of(*TRAINED)} == set(SMALL)
    with pytest.raises(ValueError, match=r"table must be one of .*, got 'coco'"):
        small_table("coco")


def test_missing_runs_follow_the_runs_they_need(place, tmp_path):
    [part] = small_table("cityscapes")
    backwards = dataclasses.replace(part, rows=dict(reversed(part.rows.items())))
    rows = [run.row for run in runner.missing([backwards], place)]
    assert rows.index("GD") < rows.index("CAGrad + Recon")
    assert len(rows) == len(set(rows)) + 1  # The single-task row has two runs.
    with pytest.raises(FileNotFoundError, match="cityscapes is not a folder"):
        runner.missing([part], runner.Place(tmp_path, tmp_path / "runs"))


def test_a_folder_of_another_run(tmp_path, data, place):
    """Other settings or other data are refused, whatever files the folder has."""
    run, folder = make_run("GD"), place.folder(make_run("GD"))
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(make_run("GD", epochs=7).to_json())
    assert not place.is_done(run)  # Nothing has been trained.
    train(run, folder, data)
    (folder / "run.json").unlink()
    assert place.is_done(run)
    assert place.is_done(make_run("GD", workers=3))
    with pytest.raises(ValueError, match="expected and found: epochs 7 and 1"):
        place.is_done(make_run("GD", epochs=7))
    make_small(tmp_path / "other", "cityscapes", train=4, val=3, size=(32, 64))
    with pytest.raises(ValueError, match=r"belongs to another run.*: different data"):
        runner.Place(tmp_path / "other", tmp_path / "runs").is_done(run)
    (folder / "result.json").unlink()
    (folder / "run.json").write_text(run.to_json())
    with pytest.raises(ValueError, match=r"checkpoint.pt is from other data"):
        Training(run, folder, tmp_path / "other")
    with pytest.raises(ValueError, match=r"expected and found: rate 0.5 and 0.001"):
        place.is_done(make_run("GD", rate=0.5))
    (folder / "result.json").write_text("")
    with pytest.raises(ValueError, match=r"seed0 has a damaged file: delete the folder"):
        place.is_done(run)


def test_a_diverged_network_has_no_metrics(tmp_path, data):
    training = Training(make_run("GD"), tmp_path, data)
    with torch.no_grad():
        training.network.heads["semseg"][-1].bias.fill_(torch.nan)
    metrics = training.evaluate()
    assert all(map(math.isnan, metrics["semseg"].values()))
    assert all(map(math.isfinite, metrics["depth"].values()))


def _command(run, place):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    run_all([run], place)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_runs_end_with_the_command(place, ranks):
    """Runs end even if the command is killed."""
    run = make_run(epochs=2000, ranks=ranks)
    folder = place.folder(run)
    killed(folder / "checkpoint.pt", _command, run, place)
    with (folder / "lock").open() as lock:
        while True:  # 2000 epochs would take longer than the tests' time limit.
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.05)
            assert not (folder / "result.json").exists()
    assert not (folder / "result.json").exists()


@pytest.mark.full
def test_runs_in_processes(place):
    """Runs get other runs' conflicts; one of two ranks writes; after a failure, others train."""
    runs = [
        *(make_run("PCGrad + Recon"), make_run("GD"), make_run("Mixed", ranks=2)),
        *(make_run("GD + Recon", seed=1, batch=8), make_run("GD", seed=1, batch=8)),
        make_run("PCGrad"),  # Locked below, as if the run had outlived its command.
    ]
    place.folder(runs[-1]).mkdir(parents=True)
    with (place.folder(runs[-1]) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(runner.FailedRunsError) as raised:
            run_all(runs, place, jobs=2)
    for message in (
        r"GD/seed1 ended with exit code 1(.|\n)*as many pictures",
        r"GD_\+_Recon/seed1 needs .*GD/seed1/conflicts.json",
        r"PCGrad/seed0 ended with exit code 1(.|\n)*/seed0 is being trained by another process",
    ):
        assert re.search(message, str(raised.value))
    assert [place.is_done(run) for run in runs] == [True] * 3 + [False] * 3
    for run in runs[:3]:
        result = json.loads((place.folder(run) / "result.json").read_text())
        assert result["ranks"] == run.settings.ranks
        assert are_finite(result["metrics"], run.data, run.tasks)
        assert "mIoU" in (place.folder(run) / "log.txt").read_text()


def test_the_exit_codes_of_many_short_runs(tmp_path, monkeypatch):
    """An exit code can be read once, but every thread that starts a run polls all processes."""
    monkeypatch.setattr(runner, "_train_here", print)
    run_all([make_run(seed=n) for n in range(60)], runner.Place(tmp_path, tmp_path), jobs=6)


def test_runs_do_not_begin_after_an_interruption(tmp_path, monkeypatch):
    begun = []

    def interrupted(self, run, gpu=None):
        begun.append(run)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner.Place, "train", interrupted)
    monkeypatch.setattr(Console, "print", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_all([make_run(seed=n) for n in range(5)], runner.Place(tmp_path, tmp_path))
    assert len(begun) < 5


def operations(training, size) -> int:
    batch = timing._random_batch(training, 1, size)
    training.step(batch)  # The first step also checks its passes.
    with FlopCounterMode(display=False) as counted:
        training.step(batch)
    return counted.get_total_flops()


@pytest.mark.full
def test_runs_of_one_kind_take_equally_many_operations(tmp_path, data):
    """Recon's copies make no difference; counts grow with pixels; single tasks' heads differ."""
    kinds = {}
    for run in runs_of("cityscapes"):
        training = Training(run, tmp_path, data, SCORES)
        if training.opt is not None:
            training.opt.start_epoch(0)
        counts = kinds.setdefault(timing._kind(run), [])
        counts.append(operations(training, (32, 64)))
        if run.row == "GD":
            assert operations(training, (64, 64)) == 2 * counts[-1]
    assert sorted(map(len, kinds.values())) == [1, 1, 2, 5, 6]
    for counts in kinds.values():
        assert max(counts) == pytest.approx(min(counts), rel=0.03)


def test_a_plan_has_a_line_for_each_kind(place, monkeypatch, capsys):
    """Steps take 20 s for single tasks, 100 s for others; an epoch has one step."""
    monkeypatch.setattr(timing, "_step_seconds", lambda t, _: 20.0 if len(t.tasks) == 1 else 100.0)
    runs = runs_of("ablation", seeds=[0, 1], changes={"epochs": 30})
    timing.estimate(runs, place, 2, Console(width=60))
    assert capsys.readouterr().out.splitlines()[:3] == [
        "nyud hrnet18 Single-task: 20.00 s per step, 10.0 min per run, 6 runs",
        "nyud hrnet18 Phase 1, Phase 2, Phase 1, then 2, Mixed: 100.00 s per step,"
        " 50.0 min per run, 8 runs",
        "about 3.8 h in all, for 2 runs at once at full speed",
    ]


def test_a_plan_reads_no_pictures(tmp_path, data, capsys, monkeypatch):
    shutil.copytree(data / "cityscapes", tmp_path / "cityscapes")
    for path in (tmp_path / "cityscapes").rglob("*.npy"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be read"):
        train(make_run("GD"), tmp_path / "run", tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    runs = [make_run("GD"), make_run("GD + Recon")]
    timing.estimate(runs, runner.Place(tmp_path, tmp_path), 1, Console())
    *kinds, total, note = capsys.readouterr().out.splitlines()
    assert len(kinds) == 2
    assert re.fullmatch(r"about \d+\.\d min in all", total)
    assert "an estimate, extrapolated from one core's time" in note


def test_a_step_is_extrapolated_by_pixels(tmp_path, data, monkeypatch):
    """A step takes 1 ms, plus 1 us per pixel."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(timing, "_processor_seconds", lambda _, side: 1e-3 + 1e-6 * side**2)
    training = Training(make_run(batch=4), tmp_path, data)
    for threads in (1, 2):
        expected = (1e-3 + 1e-6 * 4 * 32 * 64) / threads
        assert timing._step_seconds(training, threads) == pytest.approx(expected)


MISSING = r".*/NYUD_MT is not a folder; the README of \S+ describes.*"
WITHOUT_TRACEBACK = FileExistsError("made"), ValueError("made"), runner.FailedRunsError("made")


@pytest.mark.parametrize(
    ("arguments", "raised", "match"),
    [
        *(([name, *plan], None, MISSING) for name in ("nyud", "time") for plan in ([], ["--plan"])),
        *((["nyud"], error, "made") for error in WITHOUT_TRACEBACK),
        *((["nyud"], error, None) for error in (TypeError, RuntimeError)),
    ],
)
def test_errors_that_users_can_mend_have_no_traceback(
    tmp_path, monkeypatch, arguments, raised, match
):
    """Python prints the text on stderr and exits with 1; other errors keep their tracebacks."""
    folders = ["--data", str(tmp_path), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["paper", *arguments, *folders])
    if raised:
        monkeypatch.setattr(command, "missing", mock.Mock(side_effect=raised))
    with pytest.raises(SystemExit if match else raised) as ended:
        command.main()
    assert match is None or re.fullmatch(match, ended.value.code)
