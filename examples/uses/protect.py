"""Protects an ability of a language model while the model forgets or learns another text.

A small decoder of characters is pretrained on three texts that every installation of the packages
below has: the documentation of Python's language (`pydoc_data`, PSF license), the code of Python's
standard library without documentation strings (PSF license), and the documentation strings of SciPy
(BSD license). Then it

- forgets the code (gradient ascent or SimNPO), while batches of the language's documentation
  preserve other abilities; or
- learns torch's C++ headers (BSD license), while the same batches preserve its abilities.

SciPy's documentation is not in these batches, so its loss measures the effect on abilities that the
protected batches do not cover. All rows start from the same pretrained network; seeds determine the
batches.
"""

import ast
import pydoc_data.topics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import mean

import numpy as np
import scipy
import style
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

import cs_kernels as cs
from uses.use import Column, Result, Use, seeded

TASKS = KEEP, TRAIN = ("keep", "train")
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
LENGTH, BATCH = 128, 8
"""Characters in a sample, and samples in a batch of each task."""
PRETRAINING_STEPS, PRETRAINING_RATE = 3000, 3e-3
EVERY = 8
"""The number of steps between two measurements."""


@dataclass(frozen=True)
class Problem:
    """A text that the pretrained network forgets or learns, and the training."""

    new: str
    """The name of the text."""
    objective: Callable[[Tensor], Tensor]
    """Computes the task's loss from the mean loss of each sample, [N]."""
    rate: float
    """AdamW's learning rate."""
    steps: int
    level: float
    """The loss of the new text at which rows are compared."""
    rows: Sequence[str]
    """The names of the rows in `ROWS`."""


def simnpo(of_samples: Tensor) -> Tensor:
    """A bounded loss of forgetting: SimNPO (Fan et al. 2024) with beta = 1 and no margin."""
    return -2 * functional.logsigmoid(of_samples).mean()


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


def make_network(quick: bool) -> Decoder:
    """The network, or a tiny one for quick runs."""
    return Decoder(width=16, layers=1) if quick else Decoder()


def _without_documentation(source: str) -> str:
    """Python code without comments and documentation strings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
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
    """The first million characters of each text as indices, without unknown characters."""
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
    """Samples [N, T + 1] from the first nine tenths of a text, or from the last tenth."""
    text = texts()[name]
    border = len(text) * 9 // 10
    text = text[border:] if held_out else text[:border]
    starts = torch.randint(len(text) - LENGTH - 1, (size, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)]


def loss(network: nn.Module, samples: Tensor) -> Tensor:
    """The mean cross-entropy per character of each sample [N]."""
    logits = network(samples[:, :-1]).transpose(1, 2)
    return functional.cross_entropy(logits, samples[:, 1:], reduction="none").mean(1)


@torch.no_grad()
def measure(network: nn.Module, names: Sequence[str], samples: int) -> dict[str, float]:
    """The loss on each text's held-out tenth."""
    of_texts = (batch(name, seeded(0), samples, held_out=True) for name in names)
    return {name: float(loss(network, x).mean()) for name, x in zip(names, of_texts, strict=True)}


@cache
def pretrained(quick: bool) -> dict[str, Tensor]:
    """The state of a network that is pretrained on three texts."""
    torch.manual_seed(0)
    network, steps = make_network(quick), 20 if quick else PRETRAINING_STEPS
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


ROWS = {
    "new alone": (cs.Sum, 0.0, 1),
    "Sum": (cs.Sum, 1.0, 1),
    "Sum, times 3": (cs.Sum, 3.0, 1),
    "Sum, times 10": (cs.Sum, 10.0, 1),
    "Sum, every 4th": (cs.Sum, 1.0, 4),
    "Sum, every 16th": (cs.Sum, 1.0, 16),
    "PCGrad": (cs.PCGrad, 1.0, 1),
    "UPGrad": (cs.UPGrad, 1.0, 1),
    "SAGO": (partial(cs.SAGO, KEEP), 1.0, 1),
    "Protect": (partial(cs.Protect, KEEP), 1.0, 1),
    "Protect, times 3": (partial(cs.Protect, KEEP), 3.0, 1),
    "Protect, times 10": (partial(cs.Protect, KEEP), 10.0, 1),
    "Protect, by layer": (partial(cs.Protect, KEEP, groups="layer"), 1.0, 1),
    "Protect, kept 4": (partial(cs.Protect, KEEP, refresh_every=4), 1.0, 1),
    "Protect, kept 16": (partial(cs.Protect, KEEP, refresh_every=16), 1.0, 1),
    "Protect, span 4": (partial(cs.Protect, KEEP, refresh_every=4, rank=4), 1.0, 1),
    "Protect, balancer": (partial(cs.Protect, KEEP), 1.0, 1),
}
"""By row: the method, the protected loss's weight, and the number of steps per use of it."""


OLD = {"kept": "documentation", "other": "SciPy"}
DRAWN = ("Sum", "Sum, times 10", "UPGrad", "SAGO", "Protect", "Protect, times 3")
"""The rows in the picture."""
PROBLEMS = {
    "ascent": Problem("code", lambda of_samples: -of_samples.mean(), 3e-4, 96, 4.0, tuple(ROWS)),
    "SimNPO": Problem("code", simnpo, 3e-4, 96, 3.0, ("new alone", *DRAWN)),
    "learn": Problem("headers", Tensor.mean, 1e-3, 72, 1.7, tuple(ROWS)),
}


def losses(
    problem: Problem, network: nn.Module, generator: torch.Generator
) -> Callable[[str], Tensor]:
    """The loss of each task on new batches."""
    samples = {KEEP: batch("documentation", generator), TRAIN: batch(problem.new, generator)}
    objectives = {KEEP: Tensor.mean, TRAIN: problem.objective}
    return lambda task: objectives[task](loss(network, samples[task]))


def make_step(
    row: str, network: nn.Module, adamw: torch.optim.Optimizer
) -> Callable[[int, Callable[[str], Tensor]], None]:
    """Returns a function that makes a step of a row, from the step's number and the losses."""
    make, weight, every = ROWS[row]
    if row.endswith("balancer"):
        balancer = cs.GradientBalancer(network.parameters(), TASKS, make(), adamw)

        def balanced(_: int, loss_of: Callable[[str], Tensor]) -> None:
            adamw.zero_grad()
            for task in TASKS:
                with balancer.task(task):
                    loss_of(task).backward()
            adamw.step()

        return balanced
    weighting = cs.FixedWeights({KEEP: weight or 1.0, TRAIN: 1.0})
    opt = cs.MultiTaskOptimizer(network, adamw, TASKS, make(), weighting=weighting)

    def step(number: int, loss_of: Callable[[str], Tensor]) -> None:
        opt.step(loss_of, tasks=TASKS if weight and number % every == 0 else [TRAIN])

    return step


def train(row: str, seed: int, quick: bool) -> Result:
    """Makes a run; returns the texts' losses every few steps, and at the level of comparison."""
    name, _, row = row.partition("/")
    problem = PROBLEMS[name]
    torch.manual_seed(seed)
    network = make_network(quick)
    network.load_state_dict(pretrained(quick))
    adamw = torch.optim.AdamW(network.parameters(), problem.rate, weight_decay=0.0)
    step, generator = make_step(row, network, adamw), seeded(seed)
    names = {"new": problem.new, "kept": "documentation", "other": "science"}
    path: dict[str, list[float]] = {name: [] for name in names}
    for number in range((EVERY if quick else problem.steps) + 1):
        if number % EVERY == 0:
            found = measure(network, list(names.values()), 4 if quick else 48)
            for name, text in names.items():
                path[name].append(found[text])
        step(number, losses(problem, network, generator))
    return {**at_level(path, problem.level), "path": path}


def at_level(path: Mapping[str, Sequence[float]], level: float) -> Result:
    """Interpolates all losses to where the new text's loss first crosses a level."""
    new, up = path["new"], level > path["new"][0]
    for i, (before, after) in enumerate(pairwise(new)):
        if before != after and (after >= level) == up and (before >= level) != up:
            share = (level - before) / (after - before)
            found = {k: path[k][i] + share * (path[k][i + 1] - path[k][i]) for k in path}
            return {**found, "steps": EVERY * (i + share)}
    return dict.fromkeys([*path, "steps"])


def draw(results: Mapping[str, list[Result]], folder: Path) -> None:
    """Plots the old texts' losses against the new text's loss, as means over the seeds."""

    def paths() -> Figure:
        figure, axes = style.panels(len(PROBLEMS), 2, 9.0)
        for (problem, facts), of_problem in zip(PROBLEMS.items(), axes, strict=True):
            for (name, text), ax in zip(OLD.items(), of_problem, strict=True):
                for row in DRAWN:
                    runs = [run["path"] for run in results[f"{problem}/{row}"]]
                    x, y = (
                        [mean(at) for at in zip(*(run[of] for run in runs), strict=True)]
                        for of in ("new", name)
                    )
                    shown = [n for n, loss in enumerate(x) if loss <= 2 * facts.level]
                    line = "--" if "," in row else "-"
                    color = style.method(row)
                    ax.plot([x[n] for n in shown], [y[n] for n in shown], line, label=row, c=color)
                ax.axvline(facts.level, color=style.GREY, linewidth=0.8, linestyle=":")
                ax.set(title=f"{problem}: {text}", xlabel=f"loss of the {facts.new}", ylabel="loss")
        style.legend_below(figure, axes[0, 0], 3)
        return figure

    style.save(folder / "protect.svg", paths)


USE = Use(
    name="protect",
    title="row",
    rows=[f"{name}/{row}" for name, problem in PROBLEMS.items() for row in problem.rows],
    train=train,
    columns=(
        Column("kept", "documentation", 3),
        Column("other", "SciPy", 3),
        Column("steps", "steps", 0),
    ),
    draw=draw,
)
