"""The layers that are timed: shapes of weights, output channels first."""

from itertools import pairwise

Shape = tuple[int, ...]


def resnet18() -> list[Shape]:
    """The 20 convolutions of ResNet-18, 11.2 M weights."""
    shapes: list[Shape] = [(64, 3, 7, 7)]
    inputs = 64
    for channels in (64, 128, 256, 512):
        shapes += [(channels, inputs, 3, 3)] + 3 * [(channels, channels, 3, 3)]
        if inputs != channels:
            shapes.append((channels, inputs, 1, 1))
        inputs = channels
    return shapes


def resnet50() -> list[Shape]:
    """The 53 convolutions of ResNet-50 and its classifier, 25.5 M weights."""
    shapes: list[Shape] = [(64, 3, 7, 7)]
    inputs = 64
    for channels, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [
                (channels, inputs, 1, 1),
                (channels, channels, 3, 3),
                (4 * channels, channels, 1, 1),
            ]
            if block == 0:
                shapes.append((4 * channels, inputs, 1, 1))
            inputs = 4 * channels
    return [*shapes, (1000, 2048)]


def small() -> list[Shape]:
    """An encoder-decoder of 0.3 M weights."""
    widths = [3, 24, 32, 48, 64, 96, 96, 64, 48, 32, 24]
    return [(o, i, 3, 3) for i, o in pairwise(widths)]


NETWORKS = {"small": small(), "resnet18": resnet18(), "resnet50": resnet50()}
