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


def evaluated(task: Task, *batches) -> dict[str, float]:
    metric = make_metric(task)
    for prediction, target in batches:
        metric.update(prediction, target)
    return metric.compute()


def make(task: Task, pictures: int, seed: int = 0):
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


def test_classes_by_hand():
    # Truth 0 0 1 1 2, unknown; found 0 1 1 1 1, 0: class 3 and 4 occur nowhere.
    target = torch.tensor([[[0, 0, 1, 1, 2, IGNORE]]])
    found = torch.tensor([[[0, 1, 1, 1, 1, 0]]])
    prediction = functional.one_hot(found, 5).permute(0, 3, 1, 2).float()
    result = evaluated(CLASSES, (prediction, target))
    assert result["PAcc"] == pytest.approx(60)
    assert result["mIoU"] == pytest.approx(100 * (1 / 2 + 2 / 4 + 0) / 3)
    assert result["mAcc"] == pytest.approx(100 * (1 / 2 + 1 + 0) / 3)


def test_classes_are_pooled_over_batches():
    batches = [make(CLASSES, 2, seed) for seed in range(3)]
    prediction = torch.cat([batch[0] for batch in batches])
    target = torch.cat([batch[1] for batch in batches])
    expected = multiclass_jaccard_index(prediction.argmax(1), target, 5, ignore_index=IGNORE)
    assert evaluated(CLASSES, *batches)["mIoU"] == pytest.approx(100 * expected.item())
    one_by_one = [evaluated(CLASSES, batch)["mIoU"] for batch in batches]
    assert sum(one_by_one) / 3 != pytest.approx(100 * expected.item())


def test_depth_by_hand():
    target = torch.tensor([1.0, 2.0, 4.0, IGNORE]).reshape(1, 1, 1, 4)
    prediction = torch.tensor([1.5, 2.0, 1.0, 9.0]).reshape(1, 1, 1, 4)
    result = evaluated(DEPTH, (prediction, target))
    assert result["rmse"] == pytest.approx(math.sqrt((0.25 + 0 + 9) / 3))
    assert result["abs_err"] == pytest.approx(3.5 / 3)
    assert result["abs_rel"] == pytest.approx((0.5 + 0 + 0.75) / 3)


def test_normals_by_hand():
    angles = torch.tensor([0.0, 10.0, 20.0, 25.0, 90.0, 45.0], dtype=torch.float64)
    radians = torch.deg2rad(angles)
    prediction = 3 * torch.stack([radians.sin(), torch.zeros(6), radians.cos()]).reshape(1, 3, 1, 6)
    target = torch.zeros(1, 3, 1, 6, dtype=torch.float64)
    target[:, 2] = 1
    target[..., 5] = IGNORE
    result = evaluated(NORMALS, (prediction, target))
    assert result["mean"] == pytest.approx(29)
    assert result["median"] == pytest.approx(20, abs=1e-3)
    assert [result[name] for name in ("<11.25", "<22.5", "<30")] == pytest.approx([40, 60, 80])


@pytest.mark.parametrize("pictures", [1, 4, 5])
def test_normals_are_those_of_all_angles(pictures: int):
    batches = [make(NORMALS, pictures, seed) for seed in range(2)]
    prediction, target = (torch.cat(parts) for parts in zip(*batches, strict=True))
    cosine = functional.cosine_similarity(prediction, target, dim=1)[target[:, 0] != IGNORE]
    angle = torch.rad2deg(cosine.clamp(-1, 1).arccos())
    result = evaluated(NORMALS, *batches)
    assert result["mean"] == pytest.approx(angle.mean().item())
    assert result["median"] == pytest.approx(angle.median().item(), abs=1e-3)


def test_saliency_is_the_best_threshold_of_the_means():
    batches = [make(SALIENCY, 3, seed) for seed in range(2)]
    prediction, target = (torch.cat(parts) for parts in zip(*batches, strict=True))
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


def test_saliency_of_an_empty_picture():
    empty = torch.zeros(1, 1, 2, 2)
    assert evaluated(SALIENCY, (empty - 9, empty))["mIoU"] == 100
    assert evaluated(SALIENCY, (empty + 9, empty))["mIoU"] == 0


def test_pictures_of_unknown_saliency_do_not_count():
    prediction, target = make(SALIENCY, 3)
    unknown = torch.full_like(target, IGNORE)
    both = (torch.cat([prediction, prediction]), torch.cat([target, unknown]))
    assert evaluated(SALIENCY, both) == evaluated(SALIENCY, (prediction, target))


def test_normals_of_a_diverged_network():
    """The caller reports NaN; no index is out of range."""
    prediction, target = make(NORMALS, 1)
    evaluated(NORMALS, (prediction * math.nan, target))


def test_edges_by_hand():
    target = torch.tensor([1.0, 1.0, 0.0, 0.0, IGNORE]).reshape(1, 1, 1, 5)
    prediction = torch.tensor([2.0, -1.0, 3.0, -2.0, 5.0]).reshape(1, 1, 1, 5)
    assert evaluated(EDGES, (prediction, target))["F"] == pytest.approx(100 * 2 * 1 / (2 + 2))


@pytest.mark.kernel("cuda")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("task", [CLASSES, DEPTH, NORMALS, EDGES, SALIENCY], ids=lambda t: t.kind)
def test_metrics_on_cuda(task: Task):
    prediction, target = make(task, 2)
    metric = make_metric(task).to("cuda")
    metric.update(prediction.cuda(), target.cuda())
    assert metric.compute() == pytest.approx(evaluated(task, (prediction, target)))


@pytest.mark.parametrize("task", [CLASSES, DEPTH], ids=lambda t: t.kind)
def test_metrics_of_one_rank_do_not_wait_for_others(task: Task):
    """`compute` on one rank alone would wait for ever."""
    metric = make_metric(task, all_ranks=False)
    parts = metric.values() if task.kind == "classes" else [metric]
    assert not any(part.sync_on_compute for part in parts)
    metric = make_metric(task)
    parts = metric.values() if task.kind == "classes" else [metric]
    assert all(part.sync_on_compute for part in parts)


def test_metrics_stay_in_float64_on_a_half_precision_network():
    metric = make_metric(DEPTH).half()
    assert metric.sums.dtype == torch.float64


@pytest.mark.parametrize("task", [CLASSES, DEPTH, NORMALS, EDGES, SALIENCY], ids=lambda t: t.kind)
def test_unknown_pixels_do_not_count(task: Task):
    prediction, target = make(task, 2)
    unknown = (target == IGNORE).reshape(2, -1, 6, 7)[:, :1]
    other = torch.where(unknown, 7 * torch.randn_like(prediction), prediction)
    assert unknown.any()
    assert not torch.equal(other, prediction)
    assert torch.equal(loss(task, prediction, target), loss(task, other, target))
    assert evaluated(task, (prediction, target)) == evaluated(task, (other, target))


def test_losses_by_hand():
    prediction, target = make(CLASSES, 2)
    expected = functional.cross_entropy(prediction, target, ignore_index=IGNORE)
    assert loss(CLASSES, prediction, target) == pytest.approx(expected)

    prediction, target = make(DEPTH, 2)
    known = target != IGNORE
    expected = (prediction - target)[known].abs().mean()
    assert loss(DEPTH, prediction, target) == pytest.approx(expected)

    prediction, target = make(NORMALS, 2)
    known = target != IGNORE
    unit = prediction / prediction.norm(dim=1, keepdim=True)
    expected = (unit - target)[known].abs().mean()
    assert loss(NORMALS, prediction, target) == pytest.approx(expected)

    prediction, target = make(EDGES, 2)
    known, p = target != IGNORE, torch.sigmoid(prediction)
    terms = torch.where(target > 0, -0.95 * p.log(), -0.05 * (1 - p).log())
    assert loss(EDGES, prediction, target) == pytest.approx(terms[known].sum() / known.numel())

    prediction, target = make(SALIENCY, 2)
    known, p = target != IGNORE, torch.sigmoid(prediction)
    share = (target[known] > 0).double().mean()
    terms = torch.where(target > 0, -(1 - share) * p.log(), -share * (1 - p).log())
    assert loss(SALIENCY, prediction, target) == pytest.approx(terms[known].sum() / known.numel())


@pytest.mark.parametrize("task", [CLASSES, DEPTH, NORMALS, EDGES, SALIENCY], ids=lambda t: t.kind)
def test_a_loss_of_nothing_known_is_zero(task: Task):
    prediction, target = make(task, 2)
    prediction.requires_grad_()
    value = loss(task, prediction, torch.full_like(target, IGNORE))
    value.backward()
    assert value == 0
    assert not prediction.grad.any()


def test_the_total_is_over_all_scales():
    prediction, target = make(DEPTH, 2)
    prediction = prediction.float()
    target = target.float()
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
