"""The use that fine-tunes a pretrained network: its pictures, metrics, frozen stages, export."""

from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from uses import finetune, use
from uses.finetune import CLASSES, HEIGHT, STRIDE, TASKS, WIDTH, Network, Scenes

import cs_kernels as cs

pytestmark = pytest.mark.paper


def scenes_of(count: int, seed: int = 0) -> Scenes:
    usable, _ = finetune.split(seed)
    return finetune.make_scenes(count, usable, torch.Generator().manual_seed(seed))


def perfect_boxes(scenes: Scenes) -> Tensor:
    """The output whose boxes are those of the digits."""
    output = torch.full((len(scenes.boxes), CLASSES + 4, HEIGHT // STRIDE, WIDTH // STRIDE), -9.0)
    for image, boxes in zip(output, scenes.boxes, strict=True):
        for left, top, right, bottom, label in boxes.tolist():
            x, y = int((left + right) / 2 // STRIDE), int((top + bottom) / 2 // STRIDE)
            center = STRIDE * (x + 0.5), STRIDE * (y + 0.5)
            sides = center[0] - left, center[1] - top, right - center[0], bottom - center[1]
            image[int(label), y, x] = 9.0
            image[CLASSES:, y, x] = (torch.tensor(sides) / 8).log()
    return output


def test_digits_for_training_and_testing_are_apart() -> None:
    trained, held_out = finetune.split(3)
    assert sorted([*trained.tolist(), *held_out.tolist()]) == list(range(1797))
    assert not torch.equal(finetune.split(4)[0], trained)


def test_boxes_hold_the_digits() -> None:
    """Every digit's pixels lie in a box of its class, and a box that none covers is filled."""
    scenes = scenes_of(40)
    assert {len(boxes) for boxes in scenes.boxes} == {1, 2, 3}
    for mask, boxes in zip(scenes.pixels, scenes.boxes, strict=True):
        for label in mask.unique().tolist()[1:]:
            inside = torch.zeros_like(mask, dtype=torch.bool)
            for left, top, right, bottom, of_box in boxes.long().tolist():
                if of_box == label - 1:
                    inside[top:bottom, left:right] = True
            assert inside[mask == label].all()
        if len(boxes) == 1:
            y, x = mask.nonzero(as_tuple=True)
            assert boxes[0, :4].tolist() == [x.min(), y.min(), x.max() + 1, y.max() + 1]


def test_metrics_and_losses_of_perfect_outputs() -> None:
    scenes = scenes_of(30)
    output = perfect_boxes(scenes)
    assert finetune.average_precision(output, scenes.boxes) > 0.9  # Two centers may share a place.
    assert finetune.loss_of_boxes(output, scenes) < 0.2
    pixels = nn.functional.one_hot(scenes.pixels, CLASSES + 1).movedim(-1, 1).float()
    coarse = nn.functional.avg_pool2d(pixels, STRIDE)
    assert 0.5 < finetune.mean_iou(coarse, scenes.pixels) < 1
    wrong = coarse.roll(1, 1)
    assert finetune.mean_iou(wrong, scenes.pixels) < 0.05
    assert finetune.loss_of_pixels(9 * coarse, scenes) < finetune.loss_of_pixels(wrong, scenes)


def test_average_precision_by_hand() -> None:
    """Two digits: found first, then a false one, then the other, and one of them twice."""
    boxes = [torch.tensor([[2.0, 2, 18, 18, 3], [40.0, 10, 56, 26, 7]])]
    output = torch.full((1, CLASSES + 4, 8, 16), -20.0)

    def predict(label: int, score: float, center: tuple[int, int]) -> None:
        x, y = center
        output[0, label, y, x] = score
        output[0, CLASSES:, y, x] = 0.0  # 8 pixels to each side.

    predict(3, 5.0, (2, 2))  # Its center is at (10, 10).
    predict(3, 4.0, (2, 4))  # IoU < 0.5 with it.
    predict(7, 3.0, (11, 4))
    assert finetune.average_precision(output, boxes) == pytest.approx((1 + 2 / 3) / 2)
    predict(8, 6.0, (11, 4))  # Of the wrong class.
    assert finetune.average_precision(output, boxes) == pytest.approx((1 / 2 + 2 / 4) / 2)


def test_frozen_layers_keep_weights_and_statistics_until_they_are_unfrozen() -> None:
    torch.manual_seed(0)
    network, scenes = Network(TASKS), scenes_of(4)
    opt = finetune.make_optimizer("Sum, unfrozen", network, TASKS, 0, 3)

    def changed() -> tuple[bool, bool]:
        before = {name: value.clone() for name, value in network.trunk.state_dict().items()}
        finetune.step("Sum, unfrozen", opt, network, scenes)
        names = [n for n, v in network.trunk.state_dict().items() if not torch.equal(v, before[n])]
        early = [name.startswith(("conv1", "bn1", "layer1")) for name in names]
        return any(early), not all(early)

    finetune.freeze(network, True)
    assert changed() == (False, True)
    finetune.freeze(network, False)
    assert changed() == (True, True)
    finetune.freeze(network, True)
    assert changed() == (False, True)


def test_task_specific_normalization_begins_with_pretrained_statistics() -> None:
    state = finetune.pretrained(0, True)
    network, images = Network(TASKS), scenes_of(2).images
    network.trunk.load_state_dict(state)
    assert (network.trunk["bn1"].running_mean != 0).any()
    network.eval()
    expected = network.trunk(images)
    cs.nn.convert_task_batchnorm(network.trunk, TASKS)
    for task in TASKS:
        with cs.nn.active_task(network.trunk, task):
            found = network.trunk(images)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_export_equals_the_network() -> None:
    network, _ = finetune.fit("Mixed, unfrozen", TASKS, 0, True)
    network.eval()
    images = scenes_of(5).images
    for task in TASKS:
        with cs.nn.active_task(network.trunk, task), torch.no_grad():
            expected = network.heads[task](network.trunk(images))
        found = finetune.export(network, task).module()(images)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_every_row_trains_and_the_picture_is_drawn(tmp_path: Path) -> None:
    results = {row: [finetune.train(row, 0, True)] for row in finetune.ROWS}
    assert results["Single-task"][0]["delta_m"] == 0
    assert len({result[0]["boxes"] for result in results.values()}) > len(results) / 2
    use.write(finetune.USE, results, tmp_path, Console(quiet=True))
    assert (tmp_path / "finetune.md").read_text().count("\n") == len(results) + 2
    for look in ("", "-dark"):
        assert (tmp_path / f"finetune{look}.svg").stat().st_size > 1000
