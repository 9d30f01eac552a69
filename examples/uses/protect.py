"""Protecting an ability of a language model while it forgets, or learns, another text.

A small decoder of characters is pretrained on three texts that every installation of the packages
below has: the documentation of Python's language (`pydoc_data`, PSF license), the code of Python's
standard library without documentation strings (PSF license), and the documentation strings of SciPy
(BSD license). Then it

- forgets the code (SimNPO), while batches of the language's documentation keep what it knows; or
- learns torch's C++ headers (BSD license), while the same batches keep what it knows.

SciPy's documentation is never in a batch then: it measures what the batches to keep do not cover.
Each row starts from the same pretrained network; a seed draws other batches.
"""

import ast
import json
import pydoc_data.topics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import scipy
import style
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

import cs_kernels as cs
from uses.use import Column, Result, Use, interval, seeded

TASKS = KEEP, TRAIN = ("keep", "train")
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
LENGTH, BATCH = 128, 8
"""Characters in a sample, and samples in a batch of each task."""
PRETRAINING_STEPS, PRETRAINING_RATE = 3000, 3e-3
STEPS, RATE, EVERY = 240, 3e-4, 12
"""Steps of AdamW after the pretraining, its learning rate, and the steps between measurements."""
WEIGHTS = (3.0, 10.0, 30.0)
FORGOTTEN = 3.0
"""The loss of the text to forget at which rows are compared."""


class Decoder(nn.Module):
    """A transformer that predicts the next character."""

    def __init__(self, width: int = 128, layers: int = 5, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), width)
        self.places = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, functional.gelu, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, len(CHARACTERS))

    def forward(self, text: Tensor) -> Tensor:
        """[N, T] -> [N, T, characters]."""
        x = self.characters(text) + self.places(torch.arange(text.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.output(self.norm(x))


def _without_documentation(source: str) -> str:
    """Python code without comments and documentation strings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            if isinstance(body[0].value, ast.Constant):
                body[0] = ast.Pass()
    return ast.unparse(tree)


def _documentation(source: str) -> str:
    nodes = (ast.FunctionDef, ast.ClassDef, ast.Module)
    found = (ast.get_docstring(n) for n in ast.walk(ast.parse(source)) if isinstance(n, nodes))
    return "\n".join(filter(None, found))


def _sources(folder: Path, pattern: str) -> list[str]:
    return [path.read_text("utf-8") for path in sorted(folder.glob(pattern))]


@cache
def texts() -> dict[str, Tensor]:
    """The first million characters of each text, as indices; others are left out."""
    whole = {
        "documentation": "\n".join(pydoc_data.topics.topics.values()),
        "code": "\n".join(
            map(_without_documentation, _sources(Path(ast.__file__).parent, "[a-z]*.py"))
        ),
        "science": "\n".join(
            map(_documentation, _sources(Path(scipy.__file__).parent, "[a-z]*/[a-z_]*.py"))
        ),
        "headers": "\n".join(_sources(Path(torch.__file__).parent, "include/ATen/*.h")),
    }
    index = np.full(128, -1)
    index[[*CHARACTERS.encode()]] = np.arange(len(CHARACTERS))
    found = {}
    for name, text in whole.items():
        numbers = index[np.frombuffer(text.encode("ascii", "ignore"), np.uint8)]
        found[name] = torch.tensor(numbers[numbers >= 0][:1_000_000])
    return found


def batch(
    name: str, generator: torch.Generator, size: int = BATCH, held_out: bool = False
) -> Tensor:
    """[N, T + 1]: samples from the first nine tenths of a text, or from the last one."""
    text = texts()[name]
    border = len(text) * 9 // 10
    text = text[border:] if held_out else text[:border]
    starts = torch.randint(len(text) - LENGTH - 1, (size, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)]


def loss(network: nn.Module, samples: Tensor) -> Tensor:
    """The mean cross-entropy per character of each sample [N]."""
    logits = network(samples[:, :-1]).transpose(1, 2)
    return functional.cross_entropy(logits, samples[:, 1:], reduction="none").mean(1)


def simnpo(of_samples: Tensor, beta: float = 1.0) -> Tensor:
    """The loss of forgetting: SimNPO (Fan et al. 2024), without a margin."""
    return -2 / beta * functional.logsigmoid(beta * of_samples).mean()


@torch.no_grad()
def measure(network: nn.Module, names: Sequence[str], samples: int) -> dict[str, float]:
    """The loss of each text, on parts that are never trained on."""
    of_texts = (batch(name, seeded(0), samples, held_out=True) for name in names)
    return {name: float(loss(network, x).mean()) for name, x in zip(names, of_texts, strict=True)}


@cache
def pretrained(quick: bool) -> dict[str, Tensor]:
    """The state of a network that knows three texts."""
    torch.manual_seed(0)
    network, steps = Decoder(), 20 if quick else PRETRAINING_STEPS
    adamw = torch.optim.AdamW(network.parameters(), PRETRAINING_RATE)
    rate = torch.optim.lr_scheduler.OneCycleLR(adamw, PRETRAINING_RATE, steps)
    generator = seeded(0)
    for _ in range(steps):
        samples = [batch(name, generator, BATCH) for name in ("documentation", "code", "science")]
        adamw.zero_grad()
        loss(network, torch.cat(samples)).mean().backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        adamw.step()
        rate.step()
    return network.state_dict()
