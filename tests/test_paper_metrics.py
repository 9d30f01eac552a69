"""Losses and metrics of the paper's experiments, against torchmetrics and hand-computed values."""

import math

import pytest
import torch
from paper.losses import loss, total_loss
from paper.metrics import delta_m, make_metric
from paper.tasks import IGNORE, MEASURES, TASKS, Task
from torch.nn import functional
from torchmetrics.functional.classification import multiclass_jaccard_index

pytestmark = pytest.mark.paper

CLASSES = Task("classes", 5)
DEPTH = Task("depth", 1)
NORMALS = Task("normals", 3)
EDGES = Task("edges", 1, edge_weight=0.95)
SALIENCY = Task("saliency", 1)
EVERY_KIND = pytest.mark.parametrize(
    "task", [CLASSES, DEPTH, NORMALS, EDGES, SALIENCY], ids=lambda task: task.kind
)


def evaluated(task, *batches) -> dict[str, float]:
    metric = make_metric(task)
    for prediction, target in batches:
        metric.update(prediction, target)
    return metric.compute()


def make(task, pictures=2, seed=0):
    """Random predictions, and random targets with about a fifth of the pixels unknown."""
    generator = torch.Generator().manual_seed(seed)
    shape = (pictures, task.channels, 6, 7)
    prediction = torch.randn(shape, generator=generator, dtype=torch.float64)
    unknown = torch.rand((pictures, 6, 7), generator=generator) < 0.2
    if task.kind == "classes":
        target = torch.randint(task.channels, (pictures, 6, 7), generator=generator)
        return prediction, target.masked_fill(unknown, IGNORE)
    target = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
    if task.kind == "normals":
        target = functional.normalize(target - 1, dim=1)
    if task.kind in ("edges", "saliency"):
        target = (target > 1.1).double()
    return prediction, target.masked_fill(unknown[:, None], IGNORE)


FOUND = functional.one_hot(torch.tensor([0, 1, 1, 1, 1, 0]), 5).T.float()
ANGLES = torch.deg2rad(torch.tensor([0.0, 10.0, 20.0, 25.0, 90.0, 45.0], dtype=torch.float64))
DIRECTIONS = torch.stack([ANGLES.sin(), 0 * ANGLES, ANGLES.cos()])
UPRIGHT = [[0.0] * 5 + [IGNORE], [0.0] * 5 + [IGNORE], [1.0] * 5 + [IGNORE]]
OF_ANGLES = {"mean": 29, "median": 20, "<11.25": 40, "<22.5": 60, "<30": 80}
OF_DEPTH = {"rmse": math.sqrt((0.25 + 9) / 3), "abs_err": 3.5 / 3, "abs_rel": (0.5 + 0.75) / 3}


@pytest.mark.parametrize(
    ("task", "prediction", "target", "expected"),
    [
        # mIoU (1/2 + 2/4 + 0) / 3, mAcc (1/2 + 1 + 0) / 3: classes 3 and 4 do not occur.
        (CLASSES, FOUND, [0, 0, 1, 1, 2, IGNORE], {"PAcc": 60, "mIoU": 100 / 3, "mAcc": 50}),
        (DEPTH, [1.5, 2.0, 1.0, 9.0], [1.0, 2.0, 4.0, IGNORE], OF_DEPTH),
        (NORMALS, 3 * DIRECTIONS, UPRIGHT, OF_ANGLES),
        (EDGES, [2.0, -1.0, 3.0, -2.0, 5.0], [1.0, 1.0, 0.0, 0.0, IGNORE], {"F": 100 * 2 / 4}),
        (SALIENCY, [-9.0] * 4, [0.0] * 4, {"mIoU": 100, "maxF": 0}),
        (SALIENCY, [9.0] * 4, [0.0] * 4, {"mIoU": 0, "maxF": 0}),
    ],
)
def test_metrics_by_hand(task, prediction, target, expected):
    """Checks the metrics of one row of pixels."""
    prediction = torch.as_tensor(prediction).reshape(1, task.channels, 1, -1)
    target = torch.as_tensor(target).reshape(1, -1, 1, prediction.shape[-1])
    result = evaluated(task, (prediction, target[:, 0] if task is CLASSES else target))
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert result[name] == pytest.approx(value, abs=1e-3 if name == "median" else None)


def means_over_pictures(prediction, target):
    """IoU, precision and recall by threshold, averaged over pictures."""
    rows = []
    for logits, truth in zip(prediction.flatten(1), target.flatten(1), strict=True):
        known = truth != IGNORE
        found = torch.sigmoid(logits.float())[known] > torch.linspace(0.2, 0.9, 15)[:, None]
        true = truth[known] > 0
        both = (found & true).sum(1)
        counts = (found | true).sum(1), found.sum(1).clamp(min=1), true.sum()
        rows.append([both / count for count in counts])
    return (torch.stack(part).mean(0) for part in zip(*rows, strict=True))


@pytest.mark.parametrize("task", [CLASSES, NORMALS, SALIENCY], ids=lambda task: task.kind)
@pytest.mark.parametrize("pictures", [1, 4, 5])
def test_metrics_are_pooled_over_batches(task, pictures):
    """Metrics pool all batches; saliency takes the best threshold of means over pictures."""
    batches = [make(task, pictures, seed) for seed in range(3)]
    prediction, target = (torch.cat(parts) for parts in zip(*batches, strict=True))
    result = evaluated(task, *batches)
    if task is CLASSES:
        options = {"num_classes": 5, "ignore_index": IGNORE}
        iou = multiclass_jaccard_index(prediction.argmax(1), target, **options)
        expected = {"mIoU": 100 * iou.item()}
    elif task is NORMALS:
        cosine = functional.cosine_similarity(prediction, target, dim=1)[target[:, 0] != IGNORE]
        angle = torch.rad2deg(cosine.clamp(-1, 1).arccos())
        expected = {"mean": angle.mean().item(), "median": angle.median().item()}
    else:
        iou, p, r = means_over_pictures(prediction, target)
        best = {"mIoU": iou, "maxF": 2 * p * r / (p + r)}
        expected = {name: 100 * value.nan_to_num().max().item() for name, value in best.items()}
    for name, value in expected.items():
        assert result[name] == pytest.approx(value, abs=1e-3 if name == "median" else None)


def test_pictures_of_unknown_saliency_do_not_count():
    prediction, target = make(SALIENCY, 3)
    unknown = torch.full_like(target, IGNORE)
    both = (torch.cat([prediction, prediction]), torch.cat([target, unknown]))
    assert evaluated(SALIENCY, both) == evaluated(SALIENCY, (prediction, target))


def test_normals_of_a_diverged_network():
    """NaN normals raise nothing and give no invalid bin: the caller reports the divergence."""
    prediction, target = make(NORMALS)
    evaluated(NORMALS, (prediction * math.nan, target))


@pytest.mark.kernel("cuda")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@EVERY_KIND
def test_metrics_on_cuda(task):
    prediction, target = make(task)
    metric = make_metric(task).to("cuda")
    metric.update(prediction.cuda(), target.cuda())
    assert metric.compute() == pytest.approx(evaluated(task, (prediction, target)))


@pytest.mark.parametrize("task", [CLASSES, DEPTH], ids=lambda t: t.kind)
def test_metrics_of_one_rank_do_not_wait_for_others(task):
    """By default, `compute` on only one rank would wait forever."""
    for options, waits in (({}, True), ({"all_ranks": False}, False)):
        metric = make_metric(task, **options)
        parts = metric.values() if task.kind == "classes" else [metric]
        assert {part.sync_on_compute for part in parts} == {waits}


def test_metrics_stay_in_float64_on_a_half_precision_network():
    for metric in (make_metric(DEPTH).half(), make_metric(DEPTH).set_dtype(torch.float16)):
        assert metric.sums.dtype == torch.float64


@EVERY_KIND
def test_losses(task):
    """The loss equals a formula; unknown pixels have no effect; if none is known, it is zero."""
    prediction, target = make(task)
    known = target != IGNORE
    if task.kind == "classes":
        expected = functional.cross_entropy(prediction, target, ignore_index=IGNORE)
    elif task.kind in ("edges", "saliency"):
        p, positive = torch.sigmoid(prediction), (target[known] > 0).double().mean()
        weight = 0.95 if task is EDGES else 1 - positive
        terms = torch.where(target > 0, -weight * p.log(), -(1 - weight) * (1 - p).log())
        expected = terms[known].sum() / known.numel()
    else:
        length = prediction.norm(dim=1, keepdim=True) if task is NORMALS else 1
        expected = (prediction / length - target)[known].abs().mean()
    assert loss(task, prediction, target) == pytest.approx(expected)
    total = total_loss(task, [prediction.float(), 2 * prediction.float()], target)
    both = [loss(task, factor * prediction.float(), target) for factor in (1, 2)]
    assert torch.equal(total, sum(both))

    unknown = ~known.reshape(2, -1, 6, 7)[:, :1]
    other = torch.where(unknown, 7 * torch.randn_like(prediction), prediction)
    assert not torch.equal(other, prediction)
    assert torch.equal(loss(task, prediction, target), loss(task, other, target))
    assert evaluated(task, (prediction, target)) == evaluated(task, (other, target))
    value = loss(task, prediction.requires_grad_(), torch.full_like(target, IGNORE))
    value.backward()
    assert value == 0
    assert not prediction.grad.any()


def test_delta_m_of_a_printed_row():
    baseline = {"depth": {"rmse": 0.667}, "semseg": {"mIoU": 33.18}, "normals": {"mean": 20.75}}
    values = {"depth": {"rmse": 0.565}, "semseg": {"mIoU": 41.10}, "normals": {"mean": 19.54}}
    counted = [measure for measure in MEASURES["nyud"] if measure.counts]
    assert delta_m(values, baseline, counted) == pytest.approx(15.00, abs=0.01)
    assert delta_m(baseline, baseline, counted) == 0


@pytest.mark.parametrize("data", TASKS)
def test_every_measure_is_a_metric_of_its_task(data):
    for measure in MEASURES[data]:
        task = TASKS[data][measure.task]
        assert measure.name in evaluated(task, make(task, 1))
