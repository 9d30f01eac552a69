"""Counts of conflicts by parameter, against plain float64 gradients of each loss."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from layers import SMALL
from loops import Loop, assert_alike, numbers
from networks import (
    TASKS,
    Setup,
    assert_equal,
    optimizer_of,
    problem,
    refused,
    restore,
    saved,
    started,
    started_problem,
)
from rank_networks import Network, on_ranks
from recorder import Reads, Recorder
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.engine import cuda_graphs
from cs_kernels.trunk.layers import shared_parameters

pytestmark = pytest.mark.loop

SCALED = pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])


Gradients = Mapping[str, Sequence[Tensor | None]]
"""For each task, a gradient per parameter."""


class Plain:
    """The counts by definition, for each parameter and then for each module."""

    def __init__(self, parameters: Mapping[str, Tensor], threshold: float) -> None:
        self.parameters, self.threshold = dict(parameters), threshold
        modules: dict[str, list[int]] = {}
        for n, name in enumerate(parameters):
            modules.setdefault(name.rpartition(".")[0], []).append(n)
        self.names, self.members = [*parameters, *modules], [[n] for n in range(len(parameters))]
        self.members += modules.values()
        shape = len(self.names), len(TASKS), len(TASKS)
        self.counts, self.steps = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        self.products, self.cosines = (torch.full(shape, math.nan).double() for _ in range(2))

    def gradients(self, loss: Tensor) -> list[Tensor | None]:
        trained = [p for p in self.parameters.values() if p.requires_grad]
        grads = iter(torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True))
        return [next(grads) if p.requires_grad else None for p in self.parameters.values()]

    def _row(self, grads: Sequence[Tensor | None] | None, members: list[int]) -> Tensor:
        """The gradients of some parameters as one vector; NaN if there are none."""
        like = list(self.parameters.values())
        own = [None if grads is None else grads[n] for n in members]
        fill = math.nan if all(grad is None for grad in own) else 0.0
        pairs = zip(members, own, strict=True)
        parts = [torch.full_like(like[n], fill) if grad is None else grad for n, grad in pairs]
        return torch.cat([part.flatten() for part in parts])

    def add(self, grads: Gradients) -> None:
        finite = all(g.isfinite().all() for row in grads.values() for g in row if g is not None)
        for n, members in enumerate(self.members):
            rows = torch.stack([self._row(grads.get(task), members) for task in TASKS])
            norms = rows.norm(dim=1)
            scale = norms * norms[:, None]
            self.products[n] = rows @ rows.T
            self.cosines[n] = torch.where(scale == 0, 0.0, self.products[n] / scale)
            if finite:
                self.steps[n] += ~scale.isnan()
                self.counts[n] += (self.cosines[n] < self.threshold) & ~torch.eye(3).bool()

    def check(self, conflicts: cs.Conflicts) -> None:
        first = len(self.parameters)
        for part, rows in ((conflicts, slice(first)), (conflicts.by_module(), slice(first, None))):
            facts = part.names, part.tasks, part.threshold
            assert facts == (tuple(self.names[rows]), tuple(TASKS), self.threshold)
            counts, steps = self.counts[rows], self.steps[rows]
            assert_equal([part.counts, part.steps], [counts, steps])
            results, expected = (part.gramians, part.cosines), (self.products, self.cosines)
            torch.testing.assert_close(results, tuple(x[rows] for x in expected), equal_nan=True)
            torch.testing.assert_close(part.share, counts.double() / steps, equal_nan=True)
            scores = [int(of_row.triu(1).sum()) for of_row in counts]
            assert part.scores() == dict(zip(part.names, scores, strict=True))
            assert list(part.scores().values()) == sorted(scores, reverse=True)


def counting(
    method: cs.Method | None = None, threshold: float = 0.0, **options: Any
) -> tuple[Setup, cs.MultiTaskOptimizer]:
    setup, opt = started(method or cs.PCGrad(), **options)
    opt.count_conflicts(threshold)
    return setup, opt


METHODS: dict[str, Callable[[], cs.Method]] = {
    "PCGrad": cs.PCGrad,
    "ConnectionStrength": cs.ConnectionStrength,
    "GradDrop": cs.GradDrop,
    "Sum": lambda: cs.Sum(separate=True),
    "CAGrad-layer": lambda: cs.CAGrad(groups="layer"),
}


@pytest.mark.slow
@pytest.mark.each
@pytest.mark.parametrize(
    ("threshold", "scaled"), [(-0.1, False), (0.0, True), (0.2, False)], ids=str
)
@pytest.mark.parametrize("method", [*METHODS][: 3 if SMALL else None])
def test_counts(backend: str, method: str, threshold: float, scaled: bool) -> None:
    """Steps have all tasks, two or one; a layer is frozen in some of them.

    A step with non-finite gradients counts nowhere.
    """
    setup = Setup(optimizer=torch.optim.SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) if scaled else None
    opt = setup.start(METHODS[method](), scaler=scaler)
    plain = Plain(shared_parameters(setup.trunk), threshold)
    opt.step(setup.closure(0))  # Not counted: counting starts below.
    opt.count_conflicts(threshold)
    plain.check(opt.conflicts())
    for number in range(7):
        setup.trunk.block.second.requires_grad_(not 3 <= number < 5)
        setup.trunk.stem.bias.requires_grad_(number < 4)
        tasks = {3: ["edges", "normals"], 5: ["normals"]}.get(number, TASKS)

        def loss(task: str, number: int = number) -> Tensor:
            value, bad = setup.closure(number)(task), number == 2 and task == "edges"
            return value + torch.inf * setup.trunk.up.bias.sum() if bad else value

        before, grads = saved(setup), {}
        for task in tasks:
            with cs.nn.active_task(setup.trunk, task):
                grads[task] = plain.gradients(loss(task))
        restore(before, setup)
        opt.step(loss, tasks)
        plain.add(grads)
        plain.check(opt.conflicts())
        if number == 2:
            restore(before, setup)
    conflicts = opt.conflicts()
    assert 0 < conflicts.counts.sum() < conflicts.steps.sum()
    assert conflicts.steps[:, 0, 0].unique().tolist() == [2, 3, 4]
    assert conflicts.by_module().by_module() is conflicts.by_module()


def test_one_forward_pass_and_micro_batches() -> None:
    """Gradients of micro-batches add up; each head in the trunk has a single task."""
    model, _, x, targets = problem(tasks=TASKS)
    opt = optimizer_of(model, cs.PCGrad(), tasks=TASKS)
    opt.count_conflicts(0.2)
    # Nothing has reached "unused" yet, so it may still be shared.
    named = model.named_parameters()
    plain = Plain({name: p for name, p in named if not name.startswith("heads")}, 0.2)
    for number in range(4):
        rows = torch.arange(7).roll(number).chunk(1 + number % 3)
        sums: dict[str, list[Tensor | None]] = {}
        for n, part in enumerate(rows, 1):
            features = model.trunk(x[part])
            losses = {
                task: (model.heads[task](features) - targets[task][part]).square().mean()
                for task in (TASKS if n == 1 else TASKS[1:])
            }
            for task, value in losses.items():
                grads = plain.gradients(value)
                pairs = zip(sums.get(task, [0.0] * len(grads)), grads, strict=True)
                sums[task] = [None if g is None else b + g for b, g in pairs]
            opt.backward(losses, update=n == len(rows))
        opt.optimizer.step()
        plain.add(sums)
        plain.check(opt.conflicts())
    assert opt.conflicts().counts.sum() > 0


def opposed(layers: int, threshold: float) -> tuple[nn.Module, cs.MultiTaskOptimizer]:
    """A trunk for two tasks; the biases' gradients are proportional to the losses' factors."""
    trunk = nn.Sequential(*(nn.Linear(1, 1) for _ in range(layers)))
    opt = optimizer_of(trunk, cs.PCGrad(), lr=0.0)
    opt.count_conflicts(threshold)
    return trunk, opt


@pytest.mark.parametrize("threshold", [0.0, 0.2])
def test_zero_gradients(threshold: float) -> None:
    """The cosine of a zero gradient is 0, a conflict only if the threshold is positive."""
    trunk, opt = opposed(2, threshold)
    trunk[1].requires_grad_(False)
    opt.step(lambda task: trunk(torch.zeros(2, 1)).mean() * (1 if task == "a" else -1))
    conflicts = opt.conflicts()
    cosines = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    assert_equal(conflicts.cosines[0], torch.zeros(2, 2, dtype=torch.float64))
    torch.testing.assert_close(conflicts.cosines[1], cosines)
    assert conflicts.cosines[2:].isnan().all()
    assert not conflicts.counts.diagonal(dim1=1, dim2=2).any()
    weight = int(threshold > 0)
    assert conflicts.scores() == {"0.weight": weight, "0.bias": 1, "1.weight": 0, "1.bias": 0}
    torch.testing.assert_close(conflicts.by_module().cosines[0], cosines)


def test_which_steps_count() -> None:
    """Only completed joint steps count, if shared parameters train; a new count is empty."""
    setup, opt = counting(schedule=cs.Switch(1))

    def fails() -> None:
        hook = setup.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            opt.step(setup.closure(0))
        hook.remove()

    def in_epoch(epoch: int) -> None:
        opt.start_epoch(epoch)
        opt.step(setup.closure(1))

    def frozen() -> None:
        shared = [p.requires_grad_(False) for p in shared_parameters(setup.trunk).values()]
        opt.step(setup.closure(1))
        for parameter in shared:
            parameter.requires_grad_(True)

    acts = {"turns": partial(in_epoch, 0), "joint": partial(in_epoch, 1), "fails": fails}
    acts |= {
        "frozen": frozen,
        "anew": opt.count_conflicts,
        "off": partial(opt.count_conflicts, None),
    }
    whole = [("turns", 0), ("joint", 1), ("fails", 1), ("turns", 1), ("joint", 2), ("frozen", 2)]
    anew = [("anew", 0), ("joint", 1), ("off", None), ("joint", None), ("anew", 0), ("joint", 1)]
    for act, steps in whole + anew:
        acts[act]()
        assert ("conflicts" in opt.state_dict()) == (steps is not None)
        if steps is None:
            with pytest.raises(RuntimeError, match=r"call count_conflicts\(\) before the steps"):
                opt.conflicts()
            continue
        conflicts = opt.conflicts()
        assert conflicts.steps.unique().tolist() == [steps]
        assert conflicts.cosines.isfinite().all() or act != "joint"
        assert conflicts.cosines.isnan().all() or act not in ("frozen", "anew")
    opt.step(setup.closure(2))
    assert conflicts.steps.unique().tolist() == [1]  # Unchanged: a copy.


@pytest.mark.parametrize("method", METHODS)
def test_counting_changes_nothing(method: str) -> None:
    """Neither updates nor host reads change; `conflicts()` itself reads nothing."""
    names, states = [], []
    for start in (started, counting):
        setup, opt = start(METHODS[method](), weighting=cs.DynamicWeightAverage())
        opt.start_epoch(0)
        opt.step(setup.closure(0))
        with Reads() as reads:
            for number in range(1, 4):
                opt.step(setup.closure(number), None if number != 2 else TASKS[::2])
            if start is counting:
                conflicts = opt.conflicts()
                for part in (conflicts, conflicts.by_module()):
                    assert part.cosines.shape == part.share.shape
                repr(conflicts)
                opt.state_dict()
        names.append(reads.names)
        states.append(setup.state())
    assert names[0] == names[1]
    assert_equal(*states)


def numbers_of(opt: cs.MultiTaskOptimizer) -> list[Tensor]:
    parts = opt.conflicts(), opt.conflicts().by_module()
    return [t.nan_to_num(9.0) for p in parts for t in (p.gramians, p.counts, p.steps)]


@pytest.mark.slow
@pytest.mark.each
@SCALED
@pytest.mark.parametrize("method", METHODS)
def test_replays_count(method: str, scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays count conflicts, also after counting restarts, a freeze and a loaded checkpoint."""
    monkeypatch.setitem(cuda_graphs.DEVICES, "cpu", Recorder)
    monkeypatch.setattr(Recorder, "replays", 0)
    loops = []
    for captured in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3) if scaled else None
        optimizer = partial(torch.optim.SGD, momentum=0.9, fused=True) if scaled else None
        loop = Loop(METHODS[method](), captured=captured, optimizer=optimizer, scaler=scaler)
        for number in range(24):
            if number == 5:  # A graph exists already.
                loop.opt.count_conflicts()
            if number == 10:
                loop.opt.step(loop._loss, TASKS[:2])
            if number == 12:
                loop.setup.trunk.up.requires_grad_(False)
            if number == 16:
                restore(saved(loop.setup, loop.opt), loop.setup, loop.opt)
            if number == 20:
                loop.opt.count_conflicts(0.3)
            loop.train(number, number + 1)
        loops.append(loop)
        if captured:
            assert Recorder.replays >= 8
            # A graph builds its own masks, since masks of eager steps may be freed.
            assert "aten::arange.start" in Recorder.operators
    assert_alike(*loops)
    assert_equal(*(numbers_of(loop.opt) for loop in loops))
    assert loops[0].opt.conflicts().steps.max() == 4


def test_a_resumed_run_goes_on() -> None:
    runs = [counting(threshold=0.1) for _ in range(2)]
    (setup, opt), resumed = runs
    for number in range(3):
        opt.step(setup.closure(number))
    states, state = saved(setup, opt), opt.state_dict()
    opt.step(setup.closure(3))
    assert numbers(state) == numbers(states[-1])  # Later steps have not changed it.
    restore(states, setup, opt)
    for number in range(2):
        resumed[1].step(resumed[0].closure(number))
    restore(states, *resumed)
    assert opt.conflicts().cosines.isnan().all()
    assert resumed[1].conflicts().steps.unique().tolist() == [3]
    for run, started_run in runs:
        started_run.step(run.closure(4))
    assert_equal(numbers_of(opt), numbers_of(resumed[1]))
    off = started(cs.PCGrad())
    restore(states, *off)  # The counts are left out.
    assert "conflicts" not in off[1].state_dict()
    opt.load_state_dict({key: value for key, value in states[-1].items() if key != "conflicts"})
    assert not opt.conflicts().steps.any()


def test_counts_are_by_name() -> None:
    """A larger trunk loads the counts of a smaller one, by the names of parameters."""
    _, loss, small = started_problem(cs.PCGrad())
    small.count_conflicts()
    small.step(loss)
    (state,) = small.state_dict()["conflicts"]
    wide, *_ = problem()
    wide.trunk.insert(0, nn.Linear(5, 5).double())
    large = optimizer_of(wide, cs.PCGrad())
    large.count_conflicts()
    moved = {
        key: [name.replace("trunk.2", "trunk.3") for name in state[key]]
        for key in ("parameters", "modules")
    }
    large.load_state_dict({**large.state_dict(), "conflicts": ({**state, **moved},)})
    conflicts = large.conflicts()
    parameters = [f"trunk.{layer}.{name}" for layer in (0, 3) for name in ("weight", "bias")]
    for part, names in ((conflicts, parameters), (conflicts.by_module(), ["trunk.0", "trunk.3"])):
        steps = dict(zip(part.names, part.steps[:, 0, 1].tolist(), strict=True))
        assert [name for name, number in steps.items() if number] == names


@pytest.mark.ranks
@pytest.mark.each
@pytest.mark.parametrize("method", ["PCGrad", "ConnectionStrength"])
@pytest.mark.parametrize("kind", ["replicated", "fully_shard"])
@on_ranks(2, alone={"kind": "alone"}, rtol=1e-4)
def test_ranks_count_as_one_process(rank: int, kind: str, method: str) -> list[Tensor]:
    """Six joint steps: one lacks a task, and one has infinite gradients on one rank."""
    network = Network(kind, rank, 2)
    opt = network.start(METHODS[method]())
    opt.count_conflicts()
    for step in range(6):
        factor = float("inf") if step == 5 and (rank == 1 or kind == "alone") else 1.0
        opt.step(
            lambda task, step=step, factor=factor: factor * network.loss(step, task),
            ["depth", "edges"] if step == 3 else None,
        )
        if step == 4:
            cosines = opt.conflicts().cosines
    conflicts, (state,) = opt.conflicts(), opt.state_dict()["conflicts"]
    counts = conflicts.counts, conflicts.steps, conflicts.by_module().counts
    assert conflicts.steps.max() == 5
    assert conflicts.counts.any()
    return [cosines, *counts, state["counts"], state["steps"]]


@pytest.mark.ranks
@on_ranks(2)
def test_all_ranks_have_to_count(rank: int) -> None:
    network = Network("replicated", rank, 2)
    opt = network.start(cs.PCGrad())
    if rank == 1:
        opt.count_conflicts(0.5)
    message = "the same threshold of count_conflicts: rank 0 has None, rank 1 has 0.5"
    with pytest.raises(RuntimeError, match=message):
        opt.step(partial(network.loss, 0))
    opt.count_conflicts(0.5)
    opt.step(partial(network.loss, 0))


def test_as_text() -> None:
    trunk, opt = opposed(6, -0.25)
    for layer in range(1, 6):
        trunk[layer].requires_grad_(False)
    for sign in (1, -1, -1):
        opt.step(lambda task, s=sign: trunk(torch.ones(2, 1)).mean() * (1 if task == "a" else s))
    head, *lines, last = str(opt.conflicts()).splitlines()
    assert "below -0.25" in head
    assert lines[:2] == ["  0.weight  2 of 3,  66.7 %", "  0.bias    2 of 3,  66.7 %"]
    assert lines[-1] == "  4.bias    0 of 0"
    assert [line.split()[0] for line in lines] == list(opt.conflicts().scores())[:10]
    assert last == "  and 2 more"
    assert repr(opt.conflicts()) == "Conflicts(threshold=-0.25, tasks=['a', 'b'], P=12)"


class Own(cs.Method):
    """A user's method, for any number of tasks."""

    def combine(self, gradients: cs.TaskGradients, layout: cs.Layout, step: cs.Step) -> None:
        raise NotImplementedError


def test_refusals() -> None:
    """Refused calls leave the counts unchanged."""
    setup, opt = counting(threshold=0.5)
    opt.step(setup.closure(0))
    good = opt.state_dict()
    (state,) = good["conflicts"]
    renamed = {**state, "parameters": ["nowhere.weight", *state["parameters"][1:]]}
    summed = started(cs.Sum())[1]
    many = optimizer_of(nn.Linear(1, 1), Own(), tasks=[f"t{n}" for n in range(65)])
    outside = r"threshold must lie in \[-1, 1\], got"

    def load(*conflicts: object) -> None:
        opt.load_state_dict({**good, "conflicts": conflicts})

    for call, message in (
        *(
            (partial(opt.count_conflicts, threshold), outside)
            for threshold in (1.01, -2, math.nan, math.inf, "0", torch.tensor(0.0))
        ),
        (partial(load, {**state, "threshold": 0.1}), r"counted with threshold 0\.5, got 0\.1"),
        (partial(load, renamed), r"shared parameters of trunk, got 'nowhere\.weight'"),
        (partial(load, {**state, "modules": ["nowhere"]}), "modules of trunk, got 'nowhere'"),
        (load, "complete state_dict"),
        (summed.count_conflicts, r"got Sum\(\).*use cs\.Sum\(separate=True\)"),
        (many.count_conflicts, "at most 64 tasks for count_conflicts, got 65"),
    ):
        with refused(lambda: numbers_of(opt)[1:3], ValueError, message):
            call()
    assert opt.conflicts().threshold == 0.5
    assert opt.conflicts().steps.max() == 1


def test_a_trunk_that_is_moved() -> None:
    """The trunk moves to another dtype."""
    setup, opt = counting()
    opt.step(setup.closure(0))
    setup.trunk.float()
    setup.heads.float()
    setup.optimizer.state.clear()
    setup.batches = [tuple(part.float() for part in batch) for batch in setup.batches]
    opt.step(setup.closure(1))
    assert opt.conflicts().steps.unique().tolist() == [2]
    assert opt.conflicts().cosines.isfinite().all()
