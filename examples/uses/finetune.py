"""Fine-tuning: a network that classifies digits learns to detect and segment them.

A residual network of timm is pretrained on single digits. It is then trained with a head for
detection and one for segmentation, on few pictures of several digits. scikit-learn's 1,797
handwritten digits need no download. With `DOWNLOADED = True`, timm's own weights replace the
pretraining.

Rows with "+BN", "Phase 1", "Phase 2" and "Mixed" have task-specific batch normalization, which
starts with the pretrained scales and statistics. "frozen" freezes the stem and the first stage;
"unfrozen" does so only in the first third of the epochs. "Phase 1" makes two optimizer steps per
batch, and "Mixed" one and a half on average; "Sum+steps" makes as many as "Phase 1".
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import style
import torch
import torchvision_operators
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import cs_kernels as cs
from uses.use import Column, Result, Use, delta_m, draw_gains, seeded

torchvision_operators.define()  # timm imports torchvision.
import timm  # noqa: E402
from torchvision import ops  # noqa: E402

BACKBONE, DOWNLOADED = "test_resnet", False
TASKS = ("boxes", "pixels")
CLASSES = 10
HEIGHT, WIDTH, STRIDE = 32, 64, 4
SIZES = 14, 22
"""Sizes of digits in a picture, in pixels."""
TEST_DIGITS, TEST_PICTURES = 600, 500
NOISE, MOST = 0.08, 3
PICTURES, BATCH = 384, 16
PRETRAINING_EPOCHS, EPOCHS = 12, 20
RATE, HEAD_RATE = 1e-3, 4e-3
"""AdamW's learning rates of backbone and heads; both fall to 0 along half a cosine."""
SCHEDULES = ("Phase 1", "Phase 2", "Mixed", "Mixed, unfrozen")
CONVERTED = ("Sum+BN", *SCHEDULES)
"""Rows with task-specific batch normalization."""
ROWS = (
    *(
        "Single-task",
        "Sum, from scratch",
        "Sum, frozen",
        "Sum, unfrozen",
        "Sum",
        "Sum+steps",
        "PCGrad",
        "UPGrad",
    ),
    *CONVERTED,
)


@dataclass(frozen=True)
class Scenes:
    """Pictures [N, 1, H, W], and the tasks' targets."""

    images: Tensor
    boxes: list[Tensor]
    """Per picture, [digits, 5]: left, top, right, bottom in pixels, and the class."""
    pixels: Tensor
    """[N, H, W]: 0 in the background, 1 + class in a digit."""

    def __getitem__(self, index: Tensor) -> "Scenes":
        boxes = [self.boxes[i] for i in index.tolist()]
        return Scenes(self.images[index], boxes, self.pixels[index])


def _noisy(images: Tensor, generator: torch.Generator) -> Tensor:
    """Gives each picture random contrast, brightness and noise."""
    contrast, brightness = torch.rand(2, len(images), 1, 1, 1, generator=generator)
    noise = NOISE * torch.randn(images.shape, generator=generator)
    return images * (0.5 + contrast / 2) + brightness / 2 + noise


def _digits(usable: Tensor) -> tuple[Tensor, Tensor]:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[usable, None] / 16
    return images, torch.tensor(data.target)[usable]


def split(seed: int) -> tuple[Tensor, Tensor]:
    """The indices of the digits for training and for testing."""
    order = torch.randperm(1797, generator=seeded(seed))
    return order[TEST_DIGITS:], order[:TEST_DIGITS]


def make_scenes(count: int, usable: Tensor, generator: torch.Generator) -> Scenes:
    """Pictures with a few of the usable digits, which may overlap."""
    digits, labels = _digits(usable)
    images, pixels = torch.zeros(count, 1, HEIGHT, WIDTH), torch.zeros(count, HEIGHT, WIDTH).long()
    boxes = []

    def random(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for image, mask in zip(images, pixels, strict=True):
        of_picture = []
        for _ in range(random(1, MOST)):
            digit, size = random(0, len(usable) - 1), random(*SIZES)
            top, left = random(0, HEIGHT - size), random(0, WIDTH - size)
            (small,) = functional.interpolate(digits[[digit]], size=size, mode="bilinear")
            ink = small[0] > 0.3
            place = (slice(top, top + size), slice(left, left + size))
            torch.maximum(image[0][place], small[0], out=image[0][place])
            mask[place][ink] = 1 + labels[digit]
            y, x = ink.nonzero(as_tuple=True)
            box = left + x.min(), top + y.min(), left + x.max() + 1, top + y.max() + 1
            of_picture.append([*map(int, box), int(labels[digit])])
        boxes.append(torch.tensor(of_picture, dtype=torch.float32))
    return Scenes(_noisy(images, generator), boxes, pixels)


class Head(nn.Module):
    """Predictions at a stride of 4 pixels, from the features at strides of 4 and 8."""

    def __init__(self, channels: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.mixed = nn.Conv2d(sum(channels), 32, 3, padding=1)
        self.outputs = nn.Conv2d(32, outputs, 1)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """[N, outputs, H / 4, W / 4]."""
        fine, coarse = features
        coarse = functional.interpolate(coarse, fine.shape[-2:], mode="bilinear")
        return self.outputs(self.mixed(torch.cat([fine, coarse], 1)).relu())


class Network(nn.Module):
    """The trunk, with or without task-specific statistics, and a head per task."""

    def __init__(self, tasks: Iterable[str], downloaded: bool = False) -> None:
        super().__init__()
        options = {"features_only": True, "in_chans": 1, "out_indices": (1, 2)}
        self.trunk = timm.create_model(BACKBONE, pretrained=downloaded, **options)
        outputs = {"boxes": CLASSES + 4, "pixels": CLASSES + 1}
        channels = self.trunk.feature_info.channels()
        self.heads = nn.ModuleDict({task: Head(channels, outputs[task]) for task in tasks})
        if "boxes" in self.heads:  # Few positions have a digit.
            nn.init.constant_(self.heads["boxes"].outputs.bias[:CLASSES], -4.0)

    @property
    def early(self) -> list[nn.Module]:
        """The stem and the first stage."""
        return [self.trunk[name] for name in ("conv1", "bn1", "layer1")]


def freeze(network: Network, frozen: bool) -> None:
    """Freezes the early layers, with their statistics, or trains everything."""
    network.train()
    for part in network.early:
        part.requires_grad_(not frozen).train(not frozen)


@cache
def pretrained(seed: int, quick: bool) -> dict[str, Tensor]:
    """The state of a trunk that classifies single digits."""
    torch.manual_seed(seed)
    trunk = Network((), DOWNLOADED).trunk
    if DOWNLOADED:
        return trunk.state_dict()
    classifier = nn.Linear(trunk.feature_info.channels()[-1], CLASSES)
    parameters = [*trunk.parameters(), *classifier.parameters()]
    epochs = 1 if quick else PRETRAINING_EPOCHS
    adamw = torch.optim.AdamW(parameters, lr=3e-3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, epochs)
    digits, labels = _digits(split(seed)[0])
    generator = seeded(seed)
    for _ in range(epochs):
        for index in torch.randperm(len(digits), generator=generator).split(64):
            large = functional.interpolate(digits[index], size=18, mode="bilinear")
            images = _noisy(functional.pad(large, (7, 7, 7, 7)), generator)
            output = classifier(trunk(images)[-1].mean((2, 3)))
            adamw.zero_grad()
            functional.cross_entropy(output, labels[index]).backward()
            adamw.step()
        cosine.step()
    return trunk.state_dict()


def _corners(output: Tensor) -> Tensor:
    """Each position's predicted box [N, H / 4, W / 4, 4], from its distances to the four sides."""
    y, x = torch.meshgrid(*(torch.arange(n) for n in output.shape[-2:]), indexing="ij")
    center = STRIDE * (torch.stack([x, y], -1) + 0.5)
    distances = 8 * output[:, CLASSES:].permute(0, 2, 3, 1).clamp(-4, 4).exp()
    return torch.cat([center - distances[..., :2], center + distances[..., 2:]], -1)


def loss_of_boxes(output: Tensor, scenes: Scenes) -> Tensor:
    """A focal loss of the classes, with target 1 at digits' centers, and the GIoU loss there."""
    picture = torch.cat([torch.full((len(b),), i) for i, b in enumerate(scenes.boxes)])
    corners, classes = torch.cat(scenes.boxes).split((4, 1), -1)
    x, y = ((corners[:, :2] + corners[:, 2:]) / (2 * STRIDE)).long().unbind(-1)
    centers = torch.zeros_like(output[:, :CLASSES])
    centers[picture, classes[:, 0].long(), y, x] = 1
    focal = ops.sigmoid_focal_loss(output[:, :CLASSES], centers, reduction="sum") / len(picture)
    found = _corners(output)[picture, y, x]
    return focal + ops.generalized_box_iou_loss(found, corners, reduction="mean")


def loss_of_pixels(output: Tensor, scenes: Scenes) -> Tensor:
    """The cross-entropy of all pixels."""
    output = functional.interpolate(output, scale_factor=STRIDE, mode="bilinear")
    return functional.cross_entropy(output, scenes.pixels)


LOSSES = {"boxes": loss_of_boxes, "pixels": loss_of_pixels}


def average_precision(output: Tensor, boxes: Sequence[Tensor]) -> float:
    """Average precision over all pictures; the class must be correct, and the IoU at least 0.5.

    A box is predicted where a class's score is larger than at the eight neighboring positions.
    """
    scores = output[:, :CLASSES].sigmoid()
    peaks = scores * (scores == functional.max_pool2d(scores, 3, 1, padding=1))
    corners = _corners(output)
    matches: list[tuple[float, bool]] = []
    for of_picture, boxes_here, truth in zip(peaks, corners, boxes, strict=True):
        best, place = of_picture.flatten().topk(20)
        classes, y, x = torch.unravel_index(place, of_picture.shape)
        overlap = ops.box_iou(boxes_here[y, x], truth[:, :4])
        overlap[classes[:, None] != truth[:, 4]] = 0
        for score, row in zip(best.tolist(), overlap, strict=True):  # By decreasing score.
            iou, which = row.max(0)
            matches.append((score, bool(iou >= 0.5)))
            overlap[:, which] *= float(iou < 0.5)  # Each digit counts once.
    right = torch.tensor([hit for _, hit in sorted(matches, reverse=True)]).double()
    precision = right.cumsum(0) / torch.arange(1, len(right) + 1)
    highest = precision.flip(0).cummax(0).values.flip(0)
    return float((highest * right).sum() / sum(map(len, boxes)))


def mean_iou(output: Tensor, pixels: Tensor) -> float:
    """The mean IoU of the classes and the background, over all pictures."""
    found = functional.interpolate(output, scale_factor=STRIDE, mode="bilinear").argmax(1)
    pairs = torch.bincount((pixels * (CLASSES + 1) + found).flatten(), minlength=(CLASSES + 1) ** 2)
    matrix = pairs.reshape(CLASSES + 1, CLASSES + 1).double()
    both = matrix.diagonal()
    return float((both / (matrix.sum(0) + matrix.sum(1) - both)).mean())


@torch.no_grad()
def evaluate(network: Network, tasks: Sequence[str], scenes: Scenes) -> dict[str, float]:
    """Average precision, and the mean intersection over union."""
    values = {}
    network.eval()
    for task in tasks:
        with cs.nn.active_task(network.trunk, task):
            output = network.heads[task](network.trunk(scenes.images))
        values[task] = (
            average_precision(output, scenes.boxes)
            if task == "boxes"
            else mean_iou(output, scenes.pixels)
        )
    return values


def make_optimizer(
    row: str, network: Network, tasks: Sequence[str], seed: int, epochs: int
) -> cs.MultiTaskOptimizer:
    """AdamW with smaller steps for the trunk, and the surgery of a row."""
    groups = [
        {"params": [*network.trunk.parameters()]},
        {"params": [*network.heads.parameters()], "lr": HEAD_RATE},
    ]
    adamw = torch.optim.AdamW(groups, lr=RATE)
    methods = {"PCGrad": cs.PCGrad(seed=seed), "UPGrad": cs.UPGrad()}
    methods |= dict.fromkeys(SCHEDULES, cs.ConnectionStrength())
    schedules = {"Phase 1": cs.Sequential(), "Phase 2": cs.Joint()}
    schedule = cs.Mixed(epochs, seed) if row.startswith("Mixed") else schedules.get(row, cs.Joint())
    method = methods.get(row, cs.Sum())
    return cs.MultiTaskOptimizer(network.trunk, adamw, tasks, method, schedule=schedule)


def step(row: str, opt: cs.MultiTaskOptimizer, network: Network, scenes: Scenes) -> None:
    """Makes a step; task-specific normalization needs a forward pass per task."""

    def loss(task: str, features: Sequence[Tensor]) -> Tensor:
        return LOSSES[task](network.heads[task](features), scenes)

    if row in CONVERTED:
        opt.step(lambda task: loss(task, network.trunk(scenes.images)))
        return
    features = network.trunk(scenes.images)
    opt.backward({task: loss(task, features) for task in opt.tasks})
    opt.optimizer.step()


def fit(row: str, tasks: Sequence[str], seed: int, quick: bool) -> tuple[Network, Result]:
    """Trains a network for some tasks; returns it with its metrics and seconds."""
    count, epochs = (2 * BATCH, 3) if quick else (PICTURES, EPOCHS)
    epochs *= len(TASKS) if row == "Sum+steps" else 1
    generator = seeded(seed)
    usable, held_out = split(seed)
    scenes = make_scenes(count, usable, generator)
    test = make_scenes(BATCH if quick else TEST_PICTURES, held_out, generator)
    state = pretrained(seed, quick)
    torch.manual_seed(seed)
    network = Network(tasks)
    if not row.endswith("scratch"):
        network.trunk.load_state_dict(state)
    if row in CONVERTED:
        cs.nn.convert_task_batchnorm(network.trunk, tasks)
    opt = make_optimizer(row, network, tasks, seed, epochs)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt.optimizer, epochs)
    start = time.perf_counter()
    for epoch in range(epochs):
        opt.start_epoch(epoch)
        unfrozen = row.endswith("unfrozen") and epoch >= epochs // 3
        freeze(network, row.endswith("frozen") and not unfrozen)
        for index in torch.randperm(count, generator=generator).split(BATCH):
            step(row, opt, network, scenes[index])
        cosine.step()
    seconds = time.perf_counter() - start
    return network, {**evaluate(network, tasks, test), "seconds": seconds}


def export(network: Network, task: str) -> torch.export.ExportedProgram:
    """The trunk with one task's normalization and its head, for any number of pictures."""

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = cs.nn.extract_task(network.trunk, task)
            self.head = network.heads[task]

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.trunk(images))

    images = torch.zeros(2, 1, HEIGHT, WIDTH)
    batch = torch.export.Dim("batch", min=1, max=4096)
    return torch.export.export(Alone().eval(), (images,), dynamic_shapes=({0: batch},))


@cache
def single_tasks(seed: int, quick: bool) -> Result:
    """The metrics of one network per task, and their total seconds."""
    parts = {task: fit("Single-task", [task], seed, quick)[1] for task in TASKS}
    metrics = {task: part[task] for task, part in parts.items()}
    return {**metrics, "seconds": sum(part["seconds"] for part in parts.values())}


def train(row: str, seed: int, quick: bool) -> Result:
    """Trains a row of the table."""
    baseline = single_tasks(seed, quick)
    result = baseline if row == "Single-task" else fit(row, TASKS, seed, quick)[1]
    return {**result, "delta_m": delta_m(result, baseline, TASKS)}


def draw(results: Mapping[str, list[Result]], folder: Path) -> None:
    """Plots both metrics minus Sum's with the same seed."""

    def gains(row: str, task: str) -> list[float]:
        pairs = zip(results[row], results["Sum"], strict=True)
        return [100 * (run[task] - of_sum[task]) for run, of_sum in pairs]

    def both() -> Figure:
        figure, axes = style.panels(1, 2, 4.6, sharey=True)
        for ax, task in zip(axes[0], TASKS, strict=True):
            draw_gains(ax, {row: gains(row, task) for row in results})
            ax.set_title(task)
        figure.suptitle("Average precision and mean IoU, less those of Sum")
        figure.supxlabel("percentage points, with 95 % intervals", fontsize=11)
        return figure

    style.save(folder / "finetune.svg", both)


USE = Use(
    name="finetune",
    title="fine-tuning",
    rows=ROWS,
    train=train,
    columns=(
        Column("boxes", "boxes: AP %↑", 1, 100),
        Column("pixels", "pixels: mIoU %↑", 1, 100),
        Column("delta_m", "Delta m in %", 1),
        Column("seconds", "seconds", 1),
    ),
    draw=draw,
)
