"""Losses and metrics of the paper's experiments, against torchmetrics and by hand."""

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


def evaluated(task: Task, *batches) -> dict[str, float]:
    metric = make_metric(task)
    for prediction, target in batches:
        metric.update(prediction, target)
    return metric.compute()


def make(task: Task, pictures: int = 2, seed: int = 0):
    """Random predictions and targets, a fifth of which is unknown."""
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


def joined(batches):
    return (torch.cat(parts) for parts in zip(*batches, strict=True))


FOUND = functional.one_hot(torch.tensor([0, 1, 1, 1, 1, 0]), 5).T.float()
ANGLES = torch.deg2rad(torch.tensor([0.0, 10.0, 20.0, 25.0, 90.0, 45.0], dtype=torch.float64))
DIRECTIONS = torch.stack([ANGLES.sin(), 0 * ANGLES, ANGLES.cos()])
UPRIGHT = [[0.0] * 5 + [IGNORE], [0.0] * 5 + [IGNORE], [1.0] * 5 + [IGNORE]]
OF_ANGLES = {"mean": 29, "median": 20, "<11.25": 40, "<22.5": 60, "<30": 80}
OF_DEPTH = {"rmse": math.sqrt((0.25 + 9) / 3), "abs_err": 3.5 / 3, "abs_rel": (0.5 + 0.75) / 3}


@pytest.mark.parametrize(
    ("task", "prediction", "target", "expected"),
    [
        # (1/2 + 2/4 + 0) / 3 and (1/2 + 1 + 0) / 3: classes 3 and 4 occur nowhere.
        (CLASSES, FOUND, [0, 0, 1, 1, 2, IGNORE], {"PAcc": 60, "mIoU": 100 / 3, "mAcc": 50}),
        (DEPTH, [1.5, 2.0, 1.0, 9.0], [1.0, 2.0, 4.0, IGNORE], OF_DEPTH),
        (NORMALS, 3 * DIRECTIONS, UPRIGHT, OF_ANGLES),
        (EDGES, [2.0, -1.0, 3.0, -2.0, 5.0], [1.0, 1.0, 0.0, 0.0, IGNORE], {"F": 100 * 2 / 4}),
        (SALIENCY, [-9.0] * 4, [0.0] * 4, {"mIoU": 100, "maxF": 0}),
        (SALIENCY, [9.0] * 4, [0.0] * 4, {"mIoU": 0, "maxF": 0}),
    ],
)
def test_metrics_by_hand(task: Task, prediction, target, expected):
    """The metrics of one row of pixels."""
    prediction = torch.as_tensor(prediction).reshape(1, task.channels, 1, -1)
    target = torch.as_tensor(target).reshape(1, -1, 1, prediction.shape[-1])
    result = evaluated(task, (prediction, target[:, 0] if task is CLASSES else target))
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert result[name] == pytest.approx(value, abs=1e-3 if name == "median" else None)


def test_classes_are_pooled_over_batches():
    batches = [make(CLASSES, 2, seed) for seed in range(3)]
    prediction, target = joined(batches)
    expected = multiclass_jaccard_index(prediction.argmax(1), target, 5, ignore_index=IGNORE)
    assert evaluated(CLASSES, *batches)["mIoU"] == pytest.approx(100 * expected.item())
    one_by_one = [evaluated(CLASSES, batch)["mIoU"] for batch in batches]
    assert sum(one_by_one) / 3 != pytest.approx(100 * expected.item())


@pytest.mark.parametrize("pictures", [1, 4, 5])
def test_normals_are_those_of_all_angles(pictures: int):
    batches = [make(NORMALS, pictures, seed) for seed in range(2)]
    prediction, target = joined(batches)
    cosine = functional.cosine_similarity(prediction, target, dim=1)[target[:, 0] != IGNORE]
    angle = torch.rad2deg(cosine.clamp(-1, 1).arccos())
    result = evaluated(NORMALS, *batches)
    assert result["mean"] == pytest.approx(angle.mean().item())
    assert result["median"] == pytest.approx(angle.median().item(), abs=1e-3)


def test_saliency_is_the_best_threshold_of_the_means():
    batches = [make(SALIENCY, 3, seed) for seed in range(2)]
    prediction, target = joined(batches)
    best_iou, best_f = 0.0, 0.0
    for threshold in torch.linspace(0.2, 0.9, 15):
        ious, precisions, recalls = [], [], []
        for logits, truth in zip(prediction, target, strict=True):
            known = truth != IGNORE
            found, true = torch.sigmoid(logits.float())[known] > threshold, truth[known] > 0
            both = (found & true).sum().item()
            ious.append(both / (found | true).sum().item())
            precisions.append(both / max(1, found.sum().item()))
            recalls.append(both / true.sum().item())
        best_iou = max(best_iou, sum(ious) / 6)
        p, r = sum(precisions) / 6, sum(recalls) / 6
        best_f = max(best_f, 2 * p * r / (p + r))
    result = evaluated(SALIENCY, *batches)
    assert result["mIoU"] == pytest.approx(100 * best_iou)
    assert result["maxF"] == pytest.approx(100 * best_f)


def test_pictures_of_unknown_saliency_do_not_count():
    prediction, target = make(SALIENCY, 3)
    unknown = torch.full_like(target, IGNORE)
    both = (torch.cat([prediction, prediction]), torch.cat([target, unknown]))
    assert evaluated(SALIENCY, both) == evaluated(SALIENCY, (prediction, target))


def test_normals_of_a_diverged_network():
    """The caller reports NaN; no index is out of range."""
    prediction, target = make(NORMALS)
    evaluated(NORMALS, (prediction * math.nan, target))


@pytest.mark.kernel("cuda")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@EVERY_KIND
def test_metrics_on_cuda(task: Task):
    prediction, target = make(task)
    metric = make_metric(task).to("cuda")
    metric.update(prediction.cuda(), target.cuda())
    assert metric.compute() == pytest.approx(evaluated(task, (prediction, target)))


@pytest.mark.parametrize("task", [CLASSES, DEPTH], ids=lambda t: t.kind)
def test_metrics_of_one_rank_do_not_wait_for_others(task: Task):
    """`compute` on one rank alone would wait for ever."""
    for options, waits in (({}, True), ({"all_ranks": False}, False)):
        metric = make_metric(task, **options)
        parts = metric.values() if task.kind == "classes" else [metric]
        assert {part.sync_on_compute for part in parts} == {waits}


def test_metrics_stay_in_float64_on_a_half_precision_network():
    for metric in (make_metric(DEPTH).half(), make_metric(DEPTH).set_dtype(torch.float16)):
        assert metric.sums.dtype == torch.float64


@EVERY_KIND
def test_unknown_pixels_do_not_count(task: Task):
    prediction, target = make(task)
    unknown = (target == IGNORE).reshape(2, -1, 6, 7)[:, :1]
    other = torch.where(unknown, 7 * torch.randn_like(prediction), prediction)
    assert unknown.any()
    assert not torch.equal(other, prediction)
    assert torch.equal(loss(task, prediction, target), loss(task, other, target))
    assert evaluated(task, (prediction, target)) == evaluated(task, (other, target))


@EVERY_KIND
def test_losses_by_hand(task: Task):
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


@EVERY_KIND
def test_a_loss_of_nothing_known_is_zero(task: Task):
    prediction, target = make(task)
    value = loss(task, prediction.requires_grad_(), torch.full_like(target, IGNORE))
    value.backward()
    assert value == 0
    assert not prediction.grad.any()


def test_the_total_is_over_all_scales():
    prediction, target = (tensor.float() for tensor in make(DEPTH))
    parts = [prediction, 2 * prediction]
    expected = sum(loss(DEPTH, part, target) for part in parts)
    assert torch.equal(total_loss(DEPTH, parts, target), expected)


def test_delta_m_of_a_printed_row():
    baseline = {"depth": {"rmse": 0.667}, "semseg": {"mIoU": 33.18}, "normals": {"mean": 20.75}}
    values = {"depth": {"rmse": 0.565}, "semseg": {"mIoU": 41.10}, "normals": {"mean": 19.54}}
    counted = [measure for measure in MEASURES["nyud"] if measure.counts]
    assert delta_m(values, baseline, counted) == pytest.approx(15.00, abs=0.01)
    assert delta_m(baseline, baseline, counted) == 0


@pytest.mark.parametrize("data", TASKS)
def test_every_measure_is_a_metric_of_its_task(data: str):
    for measure in MEASURES[data]:
        task = TASKS[data][measure.task]
        assert measure.name in evaluated(task, make(task, 1))
