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


def hrnet18() -> list[Shape]:
    """The 305 convolutions of HRNet-18's stem and stages, 9.5 M weights; many are small."""
    shapes: list[Shape] = [(64, 3, 3, 3), (64, 64, 3, 3)]
    inputs = 64
    for block in range(4):
        shapes += [(64, inputs, 1, 1), (64, 64, 3, 3), (256, 64, 1, 1)]
        if block == 0:
            shapes.append((256, inputs, 1, 1))
        inputs = 256
    widths = [18, 36, 72, 144]
    shapes += [(18, 256, 3, 3), (36, 256, 3, 3)]
    for branches, modules in ((2, 1), (3, 4), (4, 3)):
        if branches > 2:
            shapes.append((widths[branches - 1], widths[branches - 2], 3, 3))
        for _ in range(modules):
            for width in widths[:branches]:
                shapes += 8 * [(width, width, 3, 3)]
            for into in range(branches):
                for source in range(branches):
                    if source > into:  # from a coarser branch
                        shapes.append((widths[into], widths[source], 1, 1))
                    if source < into:  # from a finer one, halved again and again
                        shapes += (into - source - 1) * [(widths[source], widths[source], 3, 3)]
                        shapes.append((widths[into], widths[source], 3, 3))
    return shapes


def wide() -> list[Shape]:
    """Linear layers, 100.7 M weights."""
    return 24 * [(2048, 2048)]


def first_layers(network: str) -> list[Shape]:
    """Enough of a network to see that a benchmark runs, in no time."""
    return NETWORKS[network][:4]


NETWORKS = {
    "small": small(),
    "resnet18": resnet18(),
    "resnet50": resnet50(),
    "hrnet18": hrnet18(),
    "wide": wide(),
}
