"""The uses: data and metrics against hand-computed values, runs, and the command."""

import copy
import json
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from layers import Kind
from networks import assert_equal, flat_grad, gradient_rows
from plain import projected_rows
from plain_training import PlainTraining, largest_difference
from rich.console import Console
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from uses import __main__ as command
from uses import (
    agreement,
    digits,
    finetune,
    lagged,
    photograph,
    pinn,
    priorities,
    protect,
    tabular,
)
from uses.finetune import CLASSES, HEIGHT, STRIDE, WIDTH
from uses.use import Column, _cell, delta_m, interval, write

import cs_kernels as cs

pytestmark = pytest.mark.paper


@pytest.fixture
def small(monkeypatch):
    """Fewer rows and pictures, shorter texts, and a corner of the photograph."""
    monkeypatch.setattr(tabular, "TRAINED", 640)
    monkeypatch.setattr(digits, "TEST_PICTURES", 200)
    corners = tuple(scene.crop(slice(64, 192), slice(128)) for scene in photograph.load())
    monkeypatch.setattr(photograph, "scenes", lambda: corners)
    sources = protect._sources
    monkeypatch.setattr(protect, "_sources", lambda *of: sources(*of)[:30])
    caches = (tabular.single_tasks, finetune.single_tasks, protect.texts, protect.pretrained)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


RESULTS = [{"x": x, "y": None} for x in (1.0, 2.0, 3.0, 4.0, 10.0)]


@pytest.mark.parametrize(
    ("column", "results", "text"),
    [
        (Column("x", "", 1, 100), RESULTS, "400.0 ± 439.0"),
        (Column("x", "", 1, median=True), RESULTS, "3.0 (1.0-10.0)"),
        (Column("x", "", 0), RESULTS[:1], "1"),
        (Column("y", "", 1), RESULTS, "-"),
    ],
)
def test_cells(column, results, text):
    """The 97.5% quantile of Student's t with four degrees of freedom is 2.776."""
    assert _cell(column, results) == text
    half = pytest.approx(2.776 * 12.5**0.5 / 5**0.5, abs=1e-3)
    assert interval([result["x"] for result in RESULTS]) == (4, half)


def test_delta_m_by_hand():
    baseline = {"years": 0.8, "kids": 1.0, "affair": 0.7}
    values = {"years": 0.84, "kids": 1.1, "affair": 0.7}
    assert delta_m(values, baseline, [*values], ["kids"]) == pytest.approx((5 - 10 + 0) / 3)
    assert delta_m(baseline, baseline, [*values]) == 0


@pytest.mark.parametrize("name", ["few", "three"])
def test_labels_follow_the_digits_from_left_to_right(name):
    """A digit may be at any position where no pixel is darker than the digit's."""
    data, part = load_digits(), digits.PARTS[name]
    small = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    large = functional.interpolate(small, size=(digits.SIDE, digits.SIDE), mode="bilinear")
    training, testing = digits.make_pictures(part, seed=1)
    assert not {*training.digits.flatten().tolist()} & {*testing.digits.flatten().tolist()}
    assert len(training.images) == part.pictures
    for pictures in (training, testing):
        assert pictures.labels.tolist() == data.target[pictures.digits].tolist()
        # By picture and position: [N, height, width, SIDE, SIDE].
        places = pictures.images[:, 0].unfold(1, digits.SIDE, 1).unfold(2, digits.SIDE, 1)
        for i, shown in enumerate(pictures.digits.T):
            near = places[:, :, digits.APART * i : digits.APART * i + 2]
            fits = (near >= large[shown][:, None]).flatten(3).all(3)
            assert fits.flatten(1).any(1).all()


def scenes_of(count):
    return finetune.make_scenes(count, finetune.split(0)[0], torch.Generator().manual_seed(0))


def test_boxes_hold_the_digits():
    """Every digit's pixels lie in a box of its class, and the box of a lone digit is tight."""
    scenes = scenes_of(40)
    assert {len(boxes) for boxes in scenes.boxes} == {1, 2, 3}
    for mask, boxes in zip(scenes.pixels, scenes.boxes, strict=True):
        outside = mask.clone()
        for left, top, right, bottom, label in boxes.long().tolist():
            inside = outside[top:bottom, left:right]
            inside[inside == label + 1] = 0
        assert not outside.any()
        if len(boxes) == 1:
            y, x = mask.nonzero(as_tuple=True)
            assert boxes[0, :4].tolist() == [x.min(), y.min(), x.max() + 1, y.max() + 1]


def test_metrics_and_losses_of_perfect_outputs():
    scenes = scenes_of(30)
    boxes = torch.full((len(scenes.boxes), CLASSES + 4, HEIGHT // STRIDE, WIDTH // STRIDE), -9.0)
    for image, of_image in zip(boxes, scenes.boxes, strict=True):
        for left, top, right, bottom, label in of_image.tolist():
            x, y = (int((a + b) / 2 // STRIDE) for a, b in ((left, right), (top, bottom)))
            center = STRIDE * (x + 0.5), STRIDE * (y + 0.5)
            sides = center[0] - left, center[1] - top, right - center[0], bottom - center[1]
            image[int(label), y, x] = 9.0
            image[CLASSES:, y, x] = (torch.tensor(sides) / 8).log()
    assert finetune.average_precision(boxes, scenes.boxes) > 0.9  # Two centers may share a cell.
    assert finetune.loss_of_boxes(boxes, scenes) < 0.2
    pixels = functional.one_hot(scenes.pixels, CLASSES + 1).movedim(-1, 1).float()
    coarse = functional.avg_pool2d(pixels, STRIDE)
    wrong = coarse.roll(1, 1)
    assert 0.5 < finetune.mean_iou(coarse, scenes.pixels) < 1
    assert finetune.mean_iou(wrong, scenes.pixels) < 0.05
    assert finetune.loss_of_pixels(9 * coarse, scenes) < finetune.loss_of_pixels(wrong, scenes)


def test_average_precision_by_hand():
    """An image of two digits: one is found, then a wrong digit, then the other one."""
    boxes = [torch.tensor([[2.0, 2, 18, 18, 3], [40.0, 10, 56, 26, 7]])]
    output = torch.full((1, CLASSES + 4, 8, 16), -20.0)

    def predict(label, score, place):
        output[(0, label, *place)] = score
        output[(0, slice(CLASSES, None), *place)] = 0.0  # 8 pixels to each side.

    predict(3, 5.0, (2, 2))  # Its center is at (10, 10).
    predict(3, 4.0, (4, 2))  # The IoU with the first digit is below 0.5.
    predict(7, 3.0, (4, 11))
    assert finetune.average_precision(output, boxes) == pytest.approx((1 + 2 / 3) / 2)
    predict(8, 6.0, (4, 11))  # The wrong class.
    assert finetune.average_precision(output, boxes) == pytest.approx((1 / 2 + 2 / 4) / 2)


def test_frozen_layers_keep_weights_and_statistics_until_they_are_unfrozen():
    torch.manual_seed(0)
    network, scenes = finetune.Network(finetune.TASKS), scenes_of(4)
    opt = finetune.make_optimizer("Sum, unfrozen", network, finetune.TASKS, 0, 3)
    for frozen in (True, False, True):
        finetune.freeze(network, frozen)
        before = {name: value.clone() for name, value in network.trunk.state_dict().items()}
        finetune.step("Sum, unfrozen", opt, network, scenes)
        names = [n for n, v in network.trunk.state_dict().items() if not torch.equal(v, before[n])]
        early = [name.startswith(("conv1", "bn1", "layer1")) for name in names]
        assert (any(early), all(early)) == (not frozen, False)


def test_export_equals_the_network():
    network, _ = finetune.fit("Mixed, unfrozen", finetune.TASKS, 0, True)
    network.eval()
    images = scenes_of(5).images
    for task in finetune.TASKS:
        with cs.nn.active_task(network.trunk, task), torch.no_grad():
            expected = network.heads[task](network.trunk(images))
        exported = finetune.export(network, task).module()(images)
        torch.testing.assert_close(exported, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", pinn.PROBLEMS)
def test_solution_has_no_losses(float64, name):
    problem = pinn.PROBLEMS[name]()
    exact = partial(problem.solution)
    exact.log_coefficient = torch.tensor(problem.coefficient or 1.0).log()
    losses = problem.losses(exact)
    assert list(losses) == list(problem.weights)
    if name == "inverse":
        assert losses.pop("data") == pytest.approx(pinn.NOISE**2, rel=0.5)
    assert max(losses.values()) < 1e-16


def test_solution_of_burgers(float64):
    """Finite differences fit the equation; the shock has the slope of Basdevant et al. (1986)."""
    burgers, h = pinn.Burgers(), 1e-4
    u, (t, x) = burgers.solution, h * torch.eye(2)
    points = torch.cartesian_prod(torch.linspace(0.1, 1, 7), torch.tensor([-0.8, -0.3, 0.2, 0.6]))
    u_t, u_x = ((u(points + d) - u(points - d)) / (2 * h) for d in (t, x))
    u_xx = (u(points + x) - 2 * u(points) + u(points - x)) / h**2
    torch.testing.assert_close(u_t + u(points) * u_x, pinn.VISCOSITY * u_xx, atol=1e-5, rtol=0)
    left, right = u(torch.tensor([[1.6037 / np.pi, -h / 10], [1.6037 / np.pi, h / 10]]))
    assert (left - right) / (h / 5) == pytest.approx(152.00516, rel=1e-4)
    grid = burgers.grid()
    torch.testing.assert_close(u(grid), u(grid, nodes=180), atol=1e-6, rtol=0)


def halfway(a, b):
    direction = a / a.norm() + b / b.norm()
    return direction @ (a + b) * direction / direction.square().sum()


@pytest.mark.parametrize(
    ("method", "merged"),
    [
        ("Sum", lambda a, b: a + b),
        ("tuned weights", lambda a, b: a + 1000 * b),
        ("PCGrad", lambda a, b: a + b - (a @ b).clamp(max=0) * (b / (b @ b) + a / (a @ a))),
        ("ConFIG", halfway),
    ],
)
def test_a_step_equals_a_plain_loop(float64, method, merged):
    """With two tasks, PCGrad's order does not matter, and ConFIG needs no pseudoinverse."""
    problem, network = pinn.Helmholtz(), pinn.Network()
    _, opt = pinn.optimizers(network, problem, method, seed=0)
    losses = problem.losses(network)
    rows = gradient_rows([*network.parameters()], losses.values())
    opt.backward(losses)
    torch.testing.assert_close(flat_grad(network), merged(*rows))


@pytest.mark.parametrize(
    "row",
    [
        "helmholtz/ConFIG, every 10",
        *(pytest.param(row, marks=pytest.mark.full) for row in ("burgers/Sum", "inverse/Sum")),
    ],
)
def test_quick_runs_lower_the_loss(row):
    result = pinn.train(row, 0, True)
    first, last = (sum(result["losses"][i].values()) for i in (0, -1))
    assert last < first
    assert len(result["curve"]) == pinn.EVALUATIONS
    assert ("coefficient" in result) == (row == "inverse/Sum")
    assert {column.key for column in pinn.USE.columns} <= {*result, "coefficient"}


def test_the_picture(tmp_path):
    curve = [(step, step / 10, 1 / step) for step in (1, 2, 3)]
    pinn.draw({row: [{"curve": curve}] * 2 for row in pinn.USE.rows}, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"pinn.svg", "pinn-dark.svg"}


PART = priorities.part_of("unequal", True)


@pytest.mark.parametrize("shape", [(6, 8, 5, 4), (6, 8)])
def test_the_tracked_variance_equals_batch_normalization(shape):
    tracked, plain = priorities.TrackedGroupNorm(4, 8), nn.GroupNorm(4, 8)
    batch = nn.BatchNorm2d(8) if len(shape) == 4 else nn.BatchNorm1d(8)
    for seed in range(3):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * (1 + seed)
        batch(x)
        assert torch.equal(tracked(x), plain(x))
    torch.testing.assert_close(tracked.running_var, batch.running_var)
    before = tracked.running_var.clone()
    tracked.eval()(x)
    assert torch.equal(tracked.running_var, before)


@pytest.mark.parametrize("norm", list(priorities.NORMS))
def test_every_layer_is_prioritized_and_tasks_have_their_own_scales(small, norm):
    run = priorities.make_run(PART, norm, cs.ConnectionStrength(), 0)
    run.train(digits.make_pictures(PART, 0)[0], 0)
    assert "100.0 %" in str(run.opt.coverage())
    norms = [m for m in run.trunk.modules() if isinstance(m, cs.nn.TaskBatchNorm)]
    assert len(norms) == 3
    left, right = (norms[0].of(task) for task in ("left", "right"))
    assert not torch.equal(left.weight, right.weight)
    # The first layer's output is the same for all tasks, so only the scales differ.
    torch.testing.assert_close(left.running_var, right.running_var)
    assert not torch.equal(norms[1].of("left").running_var, norms[1].of("right").running_var)


def test_the_null_shuffles_priorities_and_changes_nothing_else(monkeypatch, small):
    null = priorities.Shuffled(3)
    given = [torch.arange(40), torch.tensor([0, 0, 1, 2])]
    one, other = null.shuffle(given), null.shuffle(given)
    assert_equal(one, other)
    assert not torch.equal(one[0], given[0])
    assert_equal([p.sort().values for p in one], given)

    def trained(method):
        run = priorities.make_run(PART, "GroupNorm", method, 0)
        run.train(digits.make_pictures(PART, 0)[0], 0)
        return nn.utils.parameters_to_vector(run.trunk.parameters()).detach()

    ours, random = trained(cs.ConnectionStrength()), trained(priorities.Shuffled(0))
    monkeypatch.setattr(priorities.Shuffled, "shuffle", lambda self, given: given)
    torch.testing.assert_close(trained(priorities.Shuffled(0)), ours, rtol=1e-4, atol=1e-5)
    assert (ours - random).abs().max() > 1e-3


def test_agreement_by_hand():
    one = [torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2])]
    other = [torch.tensor([0, 1, 1, 0]), torch.tensor([2, 0])]
    same, chance = agreement.agreement(one, other, 3)
    assert same == pytest.approx((2 + 1) / 6)
    assert chance == pytest.approx((4 * 0.5 + 2 * 0.5) / 6)
    shares = [torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.9, 0.8, 0.7, 0.6]])]
    assert agreement.rank_correlation(shares, shares) == pytest.approx(1)
    assert agreement.rank_correlation(shares, [1 - shares[0]]) == pytest.approx(-1)
    assert agreement.rank_correlation(shares, [shares[0][:, [0, 2, 1, 3]]]) == pytest.approx(0.8)


class Checked(agreement.Compared):
    """Compares each step's updates with the plain formulas, on random gradients."""

    def combine(self, gradients, layout, step):
        super().combine(gradients, layout, step)
        lists, priorities = layout.lists, gradients.priorities(layout.lists)
        gradients.rows = [[torch.randn_like(p) for p in gradients.parameters] for _ in range(3)]
        found = agreement.removed(gradients, lists, priorities)
        for n, priority, of_layer in zip(lists.weight_indices, priorities, found, strict=True):
            rows = torch.stack([row[n] for row in gradients.rows]).double()
            expected = projected_rows(rows, priority, Kind("", tuple(rows.shape[1:])))
            expected = expected.flatten() - rows.sum(0).flatten()
            torch.testing.assert_close(of_layer, expected, rtol=1e-4, atol=1e-5)
        self.last = agreement.compare(gradients, lists, priorities)
        gradients.clear()


@pytest.mark.parametrize("norm", list(priorities.NORMS))
def test_comparisons_of_updates(small, norm):
    method = Checked(0)
    run = priorities.make_run(PART, norm, method, 0)
    run.train(digits.make_pictures(PART, 0)[0], 0)
    assert method.last["like_random"] == pytest.approx(1)  # `Checked` passes the same priorities.
    assert method.last["removes"] == method.last["random_removes"] > 0
    assert -1 < method.last["like_pcgrad"] < 1


def test_group_norm_takes_the_place_of_batch_norm():
    trunk = photograph.with_group_norm(photograph.demo.Trunk(), ["a", "b"])
    kinds = [type(m.of("a")) for m in trunk.modules() if isinstance(m, cs.nn.TaskBatchNorm)]
    assert len(kinds) == 16
    assert set(kinds) == {priorities.TrackedGroupNorm}
    assert not any(isinstance(m, nn.BatchNorm2d) for m in trunk.modules())
    with cs.nn.active_task(trunk, "b"):
        assert trunk(torch.randn(1, 3, 16, 16)).shape == (1, 24, 8, 8)


@pytest.mark.parametrize(("use", "count"), [(finetune, 1797), (tabular, 6366)])
def test_training_and_test_data_are_disjoint(use, count):
    trained, held_out = use.split(3)
    assert sorted([*trained.tolist(), *held_out.tolist()]) == list(range(count))
    assert not torch.equal(use.split(4)[0], trained)


def test_rows_are_masked_and_scaled():
    train, test = tabular.load(3)
    assert [len(train.inputs), len(test.inputs)] == [*map(len, tabular.split(3))]
    for task in tabular.TASKS:
        assert train.known[task].float().mean() == pytest.approx(tabular.KEPT[task], abs=0.03)
        assert test.known[task].all()
        assert train.targets[task].isfinite().all()
    numbers = train.inputs[:, :4]  # Only training rows determine the scale.
    torch.testing.assert_close(numbers.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(numbers.std(0), torch.ones(4))
    assert (train.inputs[:, 4:].sum(1) == 2).all()
    # The metrics need both classes, and counts that include zero.
    assert train.targets["affair"].unique().tolist() == [0, 1]
    assert train.targets["kids"].min() == 0


@pytest.mark.parametrize("task", tabular.TASKS)
def test_a_masked_label_never_changes_a_loss(task):
    train, _ = tabular.load(0)
    targets, known = train.targets[task], train.known[task].clone()
    known[::2] = False
    outputs = torch.randn(len(targets), requires_grad=True)
    loss = tabular.masked_loss(task, outputs, targets, known)
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert not gradient[~known].any()
    assert gradient[known].all()
    spoiled = targets.where(known, torch.nan)
    assert torch.equal(tabular.masked_loss(task, outputs, spoiled, known), loss)


EACH = {
    "years": lambda out, target: (out - target) ** 2,
    "kids": lambda out, target: out.exp() - target * out,
    "affair": lambda out, target: functional.softplus(out) - target * out,
}


def plain_loss(network, batch, task):
    known = batch.known[task]
    out = network.heads[task](network.trunk(batch.inputs))[:, 0]
    return EACH[task](out[known], batch.targets[task][known]).mean()


@pytest.mark.parametrize("row", ["Sum", "PCGrad"])
def test_steps_with_missing_tasks_equal_a_plain_loop(float64, row):
    """Two tasks have labels in each step, so that PCGrad's random order does not matter."""
    rows = tabular.load(1)[0][:128]
    targets = {task: values.double() for task, values in rows.targets.items()}
    rows = rows._replace(inputs=rows.inputs.double(), targets=targets)
    network = tabular.Network(rows.inputs.shape[1], tabular.TASKS)
    parts = {"trunk": cs.nn.extract_task(network.trunk, "kids"), "heads": network.heads}
    single = copy.deepcopy(nn.ModuleDict(parts)).train()
    options = {"lr": tabular.RATE, "weight_decay": tabular.DECAY}
    plain = PlainTraining(single, tabular.TASKS, plain_loss, torch.optim.AdamW, {}, **options)
    if row == "Sum":
        plain._pcgrad = lambda *_: {}
    opt = tabular.make_optimizer(row, network, tabular.TASKS, seed=0, epochs=1)
    for number, missing in enumerate(("kids", "affair", "years", "kids")):
        batch, half = rows[32 * number : 32 * number + 32], torch.arange(32) % 2 == number % 2
        known = {task: half & (task != missing) for task in tabular.TASKS}
        batch = batch._replace(known=known)
        present = [task for task in tabular.TASKS if task != missing]
        assert list(tabular.step(opt, network, batch)) == present
        plain.step(2, [batch], present)
    assert plain.conflicts or row == "Sum"
    assert largest_difference(network.state_dict(), plain.state()) < 1e-9


def test_a_batch_without_labels_makes_no_step():
    rows = tabular.load(0)[0][:8]
    rows = rows._replace(known=dict.fromkeys(tabular.TASKS, torch.zeros(8, dtype=torch.bool)))
    network = tabular.Network(rows.inputs.shape[1], tabular.TASKS)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    opt = tabular.make_optimizer("Sum", network, tabular.TASKS, 0, 1)
    assert tabular.step(opt, network, rows) == {}
    assert_equal(dict(network.state_dict()), before)


@pytest.mark.parametrize(
    ("use", "row"),
    [
        *((digits, row) for row in ("two/Single-task", "few/UPGrad", "unequal/Mixed")),
        *((tabular, row) for row in ("Single-task", "Mixed", "Sum+UncertaintyWeights")),
    ],
)
def test_runs_are_reproducible(small, use, row):
    """Tabular sets its own seed: every row also trains the single tasks, which must be equal."""
    results = []
    for seed in (0, 99 if use is tabular else 0):
        tabular.single_tasks.cache_clear()
        torch.manual_seed(seed)
        results.append(use.USE.train(row, 5, True) | {"seconds": 0})
    first, second = results
    assert first == second
    tasks = tabular.TASKS if use is tabular else digits.PARTS[row.split("/")[0]].tasks
    assert all(0 <= first[task] < 10 for task in tasks)
    if use is digits:
        assert first["worst"] == min(first[task] for task in tasks)
    if row == "few/UPGrad":  # Phase 1 and single tasks have nothing to compare.
        assert 0 <= first["conflict"] <= 1
        assert None not in first["conflicts"]


@pytest.mark.parametrize(
    "use",
    [
        tabular.USE,
        *(
            pytest.param(module.USE, marks=pytest.mark.full)
            for module in (agreement, photograph, finetune, priorities, protect)
        ),
    ],
    ids=lambda use: use.name,
)
def test_every_row_trains_and_the_pictures_are_drawn(tmp_path, small, use):
    """Trains only with losses of unequal scale, and reuses the results for equal losses."""
    results = {}
    for row in reversed(use.rows):
        other = row.replace("equal/", "unequal/") if row.startswith("equal/") else row
        results[row] = results[other] if other in results else [use.train(row, 0, True)]
    for column in use.columns:
        assert any(column.key in of_row[0] for of_row in results.values())
    assert results.get("Single-task", [{}])[0].get("delta_m", 0) == 0
    if use is finetune.USE:
        assert len({of_row[0]["boxes"] for of_row in results.values()}) > len(results) / 2
    write(use, results, tmp_path, Console(quiet=True))
    assert (tmp_path / f"{use.name}.md").read_text().count("\n") == len(results) + 2
    for look in ("", "-dark"):
        assert (tmp_path / f"{use.name}{look}.svg").stat().st_size > 1000


@pytest.mark.full
def test_the_balancer_trains_the_other_uses(tmp_path, small):
    """Each "exact" result equals the `delta_m` that the use's own `train` returns."""
    rows = {"survey, Delta m/UPGrad": tabular, "fine-tuning, Delta m/PCGrad": finetune}
    results = {}
    for row, use in rows.items():
        results[row] = [lagged.train(row, 0, True)] * 2
        torch.manual_seed(0)
        assert results[row][0]["exact"] == use.USE.train(row.split("/")[1], 0, True)["delta_m"]
        assert math.isfinite(results[row][0]["lagged"])
        assert results[row][0]["lagged"] != 0
    use = replace(lagged.USE, rows=[*rows])
    write(use, results, tmp_path, Console(quiet=True))
    assert (tmp_path / "lagged.md").read_text().count("\n") == len(rows) + 4
    assert (tmp_path / "lagged.svg").stat().st_size > 1000


def test_a_stopped_command_resumes(tmp_path, monkeypatch, small):
    """Only the missing result is computed again, and is the same; a thread replaces processes."""
    monkeypatch.setattr(
        "uses.use.ProcessPoolExecutor", lambda jobs, mp_context: ThreadPoolExecutor(jobs)
    )
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    rows = ("Single-task", "Mixed", "Sum")
    monkeypatch.setattr(tabular, "USE", replace(tabular.USE, rows=rows))
    given = ["tabular", "--seeds", "0", "1", "--quick", "--jobs", "1", "--out", str(tmp_path)]

    def trained():
        """The table without its seconds, and the files with their times."""
        command.main(given)
        folder = tmp_path / "tabular" / "quick"
        text = (folder / "tabular.md").read_text()
        table = [line.split(" | ")[:-1] for line in text.splitlines()]
        assert len(table) == len(rows) + 4
        assert "Means over 2 seeds" in text
        return table, {file: file.stat().st_mtime_ns for file in folder.rglob("seed*.json")}

    table, before = trained()
    assert len(before) == 2 * len(rows)
    lost = sorted(before)[3]
    expected = json.loads(lost.read_text())
    lost.unlink()
    again, after = trained()
    assert again == table
    assert [file for file, at in after.items() if at != before[file]] == [lost]
    assert json.loads(lost.read_text()) | {"seconds": 0} == expected | {"seconds": 0}


@pytest.mark.full
def test_ctrl_c_ends_the_command(tmp_path):
    """Runs that have not started are cancelled."""
    given = ["digits", "--quick", "--seeds", "0", "--jobs", "1", "--out", tmp_path]
    python = os.pathsep.join(str(Path(m.__file__).parents[1]) for m in (cs, command))
    process = subprocess.Popen(
        [sys.executable, "-m", "uses", *given],
        env=os.environ | {"PYTHONPATH": python, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not [*tmp_path.rglob("seed*.json")] and process.poll() is None:
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()[0]
    os.killpg(process.pid, signal.SIGINT)
    printed, _ = process.communicate()
    assert process.returncode == 130, printed
    assert "run the same command again" in printed
    assert 0 < len([*tmp_path.rglob("seed*.json")]) < len(digits.USE.rows) / 2


def test_texts_of_installed_packages(small: None) -> None:
    texts = protect.texts()
    assert min(map(len, texts.values())) > 100_000
    code = "".join(protect.CHARACTERS[i] for i in texts["code"][:20_000])
    assert '"""' not in code
    assert code.count("def ") > 50
    x = protect.batch("code", torch.Generator().manual_seed(0))
    assert x.shape == (protect.BATCH, protect.LENGTH + 1)


def test_the_comparison_at_one_loss() -> None:
    path = {"new": [1.0, 3.0, 7.0], "kept": [1.0, 1.5, 2.5], "other": [2.0, 2.0, 4.0]}
    assert protect.at_level(path, 5.0) == {"new": 5.0, "kept": 2.0, "other": 3.0, "steps": 12.0}
    falls = {name: [*reversed(values)] for name, values in path.items()}
    assert protect.at_level(falls, 5.0)["steps"] == 4.0
    assert protect.at_level(path, 8.0)["other"] is None
