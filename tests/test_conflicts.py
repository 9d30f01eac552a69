"""Counts of conflicts by parameter, against plain float64 gradients of each loss."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from loops import Loop, assert_alike, numbers
from networks import (
    AB,
    TASKS,
    Setup,
    assert_equal,
    problem,
    restore,
    saved,
    sgd_of,
    started,
    started_problem,
)
from rank_networks import Network
from ranks import Ranks
from recorder import Reads, Recorder
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.engine import cuda_graphs
from cs_kernels.ranks import buckets

pytestmark = pytest.mark.loop

Gradients = Mapping[str, Sequence[Tensor | None]]
"""By task, for each parameter."""


@dataclass
class Plain:
    """The counts by definition, one gradient after the other."""

    names: list[str]
    tasks: list[str]
    threshold: float = 0.0
    cosines: Tensor = field(init=False)
    counts: Tensor = field(init=False)
    steps: Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = len(self.names), len(self.tasks), len(self.tasks)
        self.counts, self.steps = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        self.cosines = torch.full(shape, math.nan, dtype=torch.float64)

    def add(self, grads: Gradients) -> None:
        self.cosines = torch.full_like(self.cosines, math.nan)
        all_finite = all(g.isfinite().all() for row in grads.values() for g in row if g is not None)
        for n in range(len(self.names)):
            for i, first in enumerate(self.tasks):
                for j, second in enumerate(self.tasks):
                    g, h = (grads[t][n] if t in grads else None for t in (first, second))
                    if g is None or h is None:
                        continue
                    scale = g.norm() * h.norm()
                    cosine = (g * h).sum() / scale if scale != 0 else torch.zeros(())
                    self.cosines[n, i, j] = cosine
                    self.steps[n, i, j] += int(all_finite)
                    below = i != j and bool(cosine < self.threshold)
                    self.counts[n, i, j] += int(all_finite and below)

    def check(self, found: cs.Conflicts) -> None:
        assert found.names == tuple(self.names)
        assert found.tasks == tuple(self.tasks)
        assert found.threshold == self.threshold
        assert found.cosines.dtype == found.gramians.dtype == torch.float64
        torch.testing.assert_close(found.cosines, self.cosines, equal_nan=True)
        assert_equal(found.counts, self.counts)
        assert_equal(found.steps, self.steps)
        torch.testing.assert_close(found.share, self.counts.double() / self.steps, equal_nan=True)
        scores = [int(of_one.triu(1).sum()) for of_one in self.counts]
        assert found.scores() == dict(zip(self.names, scores, strict=True))
        assert list(found.scores().values()) == sorted(scores, reverse=True)


def _by_module(names: Sequence[str]) -> dict[str, list[int]]:
    modules: dict[str, list[int]] = {}
    for n, name in enumerate(names):
        modules.setdefault(name.rpartition(".")[0], []).append(n)
    return modules


def _joined(row: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor | None:
    """The gradients of a module as one vector."""
    if all(grad is None for grad in row):
        return None
    zipped = zip(row, like, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in zipped])


class Both:
    """The counts by parameter and by module."""

    def __init__(
        self, parameters: Mapping[str, Tensor], tasks: list[str], threshold: float = 0.0
    ) -> None:
        self.parameters = dict(parameters)
        self.modules = _by_module(list(parameters))
        self.plain = Plain(list(parameters), tasks, threshold)
        self.of_modules = Plain(list(self.modules), tasks, threshold)

    def gradients(self, loss: Tensor) -> list[Tensor | None]:
        trained = [p for p in self.parameters.values() if p.requires_grad]
        grads = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
        found = dict(zip(map(id, trained), grads, strict=True))
        return [found.get(id(p)) for p in self.parameters.values()]

    def add(self, grads: Gradients) -> None:
        self.plain.add(grads)
        likes = list(self.parameters.values())
        self.of_modules.add(
            {
                task: [
                    _joined([row[n] for n in of], [likes[n] for n in of])
                    for of in self.modules.values()
                ]
                for task, row in grads.items()
            }
        )

    def check(self, found: cs.Conflicts) -> None:
        self.plain.check(found)
        self.of_modules.check(found.by_module())


def _shared(setup: Setup) -> dict[str, nn.Parameter]:
    own = {id(p) for norm in cs.nn.task_norms(setup.trunk) for p in norm.parameters()}
    return {name: p for name, p in setup.trunk.named_parameters() if id(p) not in own}


def _gradients(setup: Setup, both: Both, batch: int, tasks: Sequence[str]) -> Gradients:
    """By autograd, without a change of the running statistics."""
    before = copy.deepcopy(setup.trunk.state_dict())
    found = {}
    for task in tasks:
        with cs.nn.active_task(setup.trunk, task):
            found[task] = both.gradients(setup.closure(batch)(task))
    setup.trunk.load_state_dict(before)
    return found


METHODS: dict[str, Callable[[], cs.Method]] = {
    "PCGrad": cs.PCGrad,
    "ConnectionStrength": cs.ConnectionStrength,
    "GradDrop": cs.GradDrop,
    "Sum": lambda: cs.Sum(separate=True),
    "CAGrad-layer": lambda: cs.CAGrad(groups="layer"),
}


@pytest.mark.each
@pytest.mark.parametrize("threshold", [-0.1, 0.0, 0.2])
@pytest.mark.parametrize("method", METHODS)
def test_counts(backend: str, method: str, threshold: float) -> None:
    """Steps with all tasks, with two and with one; a layer is frozen for some of them."""
    setup, opt = started(METHODS[method]())
    both = Both(_shared(setup), TASKS, threshold)
    opt.step(setup.closure(0))  # Not counted.
    opt.count_conflicts(threshold)
    both.check(opt.conflicts())
    for number in range(9):
        setup.trunk.block.second.requires_grad_(not 3 <= number < 6)
        setup.trunk.stem.bias.requires_grad_(number < 5)
        tasks = {4: ["edges", "depth"], 7: ["normals"]}.get(number, TASKS)
        expected = _gradients(setup, both, number % 8, tasks)
        opt.step(setup.closure(number % 8), tasks)
        both.add(expected)
        both.check(opt.conflicts())
    found = opt.conflicts()
    assert 0 < found.counts.sum() < found.steps.sum()
    assert found.steps[:, 0, 0].unique().tolist() == [5, 8]
    assert opt.report().step == 9


def test_one_forward_pass_and_micro_batches() -> None:
    """Gradients of all micro-batches are added up; the heads in the trunk are one task's own."""
    model, loss, x, targets = problem(tasks=TASKS)
    opt = cs.MultiTaskOptimizer(model, sgd_of(model), TASKS, cs.PCGrad())
    opt.count_conflicts(0.2)
    names = {n: p for n, p in model.named_parameters() if n.startswith("trunk")}
    both = Both(names, TASKS, 0.2)
    del loss
    for number in range(8):
        rows = torch.arange(7).roll(number).chunk(1 + number % 3)
        sums: dict[str, list[Tensor]] = {}
        for n, part in enumerate(rows, 1):
            features = model.trunk(x[part])
            losses = {
                task: (model.heads[task](features) - targets[task][part]).square().mean()
                for task in (TASKS if n == 1 else TASKS[1:])
            }
            for task, value in losses.items():
                grads = both.gradients(value)
                before = sums.get(task, [0.0] * len(grads))
                sums[task] = [b + g for b, g in zip(before, grads, strict=True)]
            opt.backward(losses, update=n == len(rows))
        opt.optimizer.step()
        both.add(sums)
        found = opt.conflicts()
        # Nothing reaches "unused": it may still be shared.
        assert found.names[-2:] == ("unused.weight", "unused.bias")
        assert not found.steps[-2:].any()
        kept = [n for n, name in enumerate(found.names) if name in names]
        torch.testing.assert_close(found.cosines[kept], both.plain.cosines)
        assert_equal(found.counts[kept], both.plain.counts)
        assert_equal(found.steps[kept], both.plain.steps)
        of_modules = found.by_module()
        assert of_modules.names == ("trunk.0", "trunk.2", "unused")
        assert_equal(of_modules.counts[:2], both.of_modules.counts)
    assert found.counts.sum() > 0


def _opposed(threshold: float = 0.0) -> tuple[nn.Module, cs.MultiTaskOptimizer]:
    """Two tasks; the gradients of the bias are the loss factors, those of the weight are zero."""
    trunk = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    trunk.requires_grad_(False)
    trunk[0].requires_grad_(True)
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk, lr=0.0), AB, cs.PCGrad())
    opt.count_conflicts(threshold)
    return trunk, opt


@pytest.mark.parametrize("threshold", [0.0, 0.2])
def test_zero_gradients(threshold: float) -> None:
    """Their cosine is 0: a conflict below a positive threshold only."""
    trunk, opt = _opposed(threshold)
    opt.step(lambda task: trunk(torch.zeros(2, 1)).mean() * (1 if task == "a" else -1))
    found = opt.conflicts()
    opposed = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    assert_equal(found.cosines[0], torch.zeros(2, 2, dtype=torch.float64))
    torch.testing.assert_close(found.cosines[1], opposed)
    assert found.cosines[2:].isnan().all()
    assert found.counts[:2, 0, 1].tolist() == [int(threshold > 0), 1]
    assert found.scores() == {"0.weight": int(threshold > 0), "0.bias": 1} | dict.fromkeys(
        ["1.weight", "1.bias"], 0
    )
    torch.testing.assert_close(found.by_module().cosines[0], opposed)


def test_weight_and_bias_together() -> None:
    """Neither the counts nor the cosines of a module are those of its parameters."""
    trunk = nn.Linear(1, 1)
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk, lr=0.0), AB, cs.PCGrad())
    opt.count_conflicts()
    factors = {"a": (2.0, -1.0), "b": (2.0, 1.0)}

    def loss(task: str) -> Tensor:
        first, second = factors[task]
        return first * trunk.weight.sum() + second * trunk.bias.sum()

    for _ in range(3):
        opt.step(loss)
    found = opt.conflicts()
    assert found.scores() == {"bias": 3, "weight": 0}
    assert found.by_module().scores() == {"": 0}
    assert found.by_module().cosines[0, 0, 1].item() == pytest.approx(3 / 5)
    assert found.by_module().by_module().names == ("",)


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_steps_that_are_not_finite(scaled: bool) -> None:
    """They count nowhere, also not for parameters and tasks whose gradients are finite."""
    setup = Setup()
    setup.optimizer = torch.optim.SGD(setup.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) if scaled else None
    opt = setup.start(cs.CAGrad(), scaler=scaler)
    opt.count_conflicts()
    both = Both(_shared(setup), TASKS)
    for number in range(8):
        bad = number == 4

        def loss(task: str, number: int = number, bad: bool = bad) -> Tensor:
            value = setup.closure(number)(task)
            if bad and task == "edges":
                value = value + torch.inf * setup.trunk.up.bias.sum()
            return value

        before = copy.deepcopy(setup.trunk.state_dict())
        grads = {}
        for task in TASKS:
            with cs.nn.active_task(setup.trunk, task):
                grads[task] = both.gradients(loss(task))
        setup.trunk.load_state_dict(before)
        opt.step(loss)
        both.add(grads)
        both.check(opt.conflicts())
        if bad:
            last = list(_shared(setup)).index("up.bias")
            found = opt.conflicts()
            assert found.cosines[last, 2].isnan().all()
            assert found.cosines[last, 0, 1].isfinite()
            if not scaled:
                setup.trunk.load_state_dict(before)
                for head in setup.heads.parameters():
                    head.data.nan_to_num_(0.0, 0.0, 0.0)
        else:
            # The products are those of the gradients without the factor of the scaler.
            grad = grads["depth"][0].flatten()
            torch.testing.assert_close(opt.conflicts().gramians[0, 0, 0], grad @ grad)
    assert opt.conflicts().steps.unique().tolist() == [7]


def test_phase_1_and_a_new_start() -> None:
    setup, opt = started(cs.PCGrad(), cs.Switch(1))
    opt.count_conflicts()
    opt.start_epoch(0)
    opt.step(setup.closure(0))
    assert not opt.conflicts().steps.any()
    opt.start_epoch(1)
    opt.step(setup.closure(1))
    kept = opt.conflicts()
    opt.step(setup.closure(2))
    assert kept.steps.unique().tolist() == [1]
    assert opt.conflicts().steps.unique().tolist() == [2]
    opt.count_conflicts(0.5)
    assert not opt.conflicts().steps.any()
    assert opt.conflicts().cosines.isnan().all()
    opt.step(setup.closure(3))
    assert (opt.conflicts().threshold, opt.conflicts().steps.max().item()) == (0.5, 1)
    assert opt.conflicts().counts.sum() >= (opt.conflicts().cosines < 0).sum()


def test_a_failed_step_is_not_counted() -> None:
    """Also not by the next step of Phase 1."""
    setup, opt = started(cs.PCGrad(), cs.Switch(1))
    opt.count_conflicts()
    opt.start_epoch(1)

    def fails(*_: object) -> None:
        raise OSError("no step")

    hook = setup.optimizer.register_step_pre_hook(fails)
    with pytest.raises(OSError, match="no step"):
        opt.step(setup.closure(0))
    hook.remove()
    assert not opt.conflicts().steps.any()
    opt.start_epoch(0)
    opt.step(setup.closure(0))
    assert not opt.conflicts().steps.any()
    opt.start_epoch(1)
    opt.step(setup.closure(0))
    assert opt.conflicts().steps.unique().tolist() == [1]


def test_nothing_trains() -> None:
    setup, opt = started(cs.PCGrad())
    opt.count_conflicts()
    opt.step(setup.closure(0))
    for parameter in _shared(setup).values():
        parameter.requires_grad_(False)
    opt.step(setup.closure(1))
    assert opt.conflicts().cosines.isnan().all()
    assert opt.conflicts().steps.unique().tolist() == [1]


@pytest.mark.parametrize("method", METHODS)
def test_updates_are_the_same(method: str) -> None:
    setups = []
    for counts in (False, True):
        setup, opt = started(METHODS[method](), weighting=cs.DynamicWeightAverage())
        opt.start_epoch(0)
        if counts:
            opt.count_conflicts()
        for number in range(6):
            opt.step(setup.closure(number), None if number != 3 else TASKS[:2])
        setups.append(setup)
    assert_equal(setups[0].state(), setups[1].state())


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_read_on_the_host(method: str) -> None:
    """Neither in a step nor by the call; the first numbers are."""
    setup, opt = started(METHODS[method]())
    names = []
    for counts in (False, True):
        if counts:
            opt.count_conflicts()
        opt.step(setup.closure(0))
        with Reads() as reads:
            opt.step(setup.closure(1))
            opt.step(setup.closure(2), ["edges", "depth"])  # New masks.
            if counts:
                found = opt.conflicts()
                for part in (found, found.by_module()):
                    assert part.cosines.shape == part.share.shape
                repr(found)
        names.append(reads.names)
    assert names[0] == names[1]
    with Reads() as reads:
        opt.state_dict()
    assert reads.names == []


def _numbers(opt: cs.MultiTaskOptimizer) -> list[Tensor]:
    found = opt.conflicts()
    parts = (found, found.by_module())
    return [t.nan_to_num(9.0) for p in parts for t in (p.gramians, p.counts, p.steps)]


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("method", METHODS)
def test_replays_count(method: str, scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place; after another start, a change of what trains and a checkpoint too."""
    monkeypatch.setitem(cuda_graphs.DEVICES, "cpu", Recorder)
    monkeypatch.setattr(Recorder, "replays", 0)
    loops = []
    for captured in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3) if scaled else None
        optimizer = partial(torch.optim.SGD, momentum=0.9, fused=True) if scaled else None
        loop = Loop(METHODS[method](), captured=captured, optimizer=optimizer, scaler=scaler)
        for number in range(24):
            if number == 5:  # There is a graph already.
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
            # A graph has masks of its own: those of eager steps may be forgotten.
            assert "aten::arange.start" in Recorder.operators
    assert_alike(*loops)
    assert_equal(*(_numbers(loop.opt) for loop in loops))
    assert loops[0].opt.conflicts().steps.max() == 4


def test_a_resumed_run_goes_on() -> None:
    def build(threshold: float | None = 0.1) -> tuple[Setup, cs.MultiTaskOptimizer]:
        setup, opt = started(cs.PCGrad())
        if threshold is not None:
            opt.count_conflicts(threshold)
        return setup, opt

    def train(setup: Setup, opt: cs.MultiTaskOptimizer, start: int, stop: int) -> None:
        for number in range(start, stop):
            opt.step(setup.closure(number))

    straight, interrupted, resumed = build(), build(), build()
    train(*straight, 0, 8)
    train(*interrupted, 0, 5)
    states = saved(*interrupted)
    kept = interrupted[1].state_dict()
    train(*interrupted, 5, 6)
    assert numbers(kept) == numbers(states[-1])  # Later steps have not changed it.
    train(*resumed, 0, 2)
    restore(states, *resumed)
    counts = resumed[1].conflicts()
    assert counts.cosines.isnan().all()
    assert counts.steps.unique().tolist() == [5]
    train(*resumed, 5, 8)
    assert_equal(_numbers(resumed[1]), _numbers(straight[1]))

    off = build(None)
    assert "conflicts" not in off[1].state_dict()
    restore(states, *off)  # Left out.
    with pytest.raises(RuntimeError, match="not counted"):
        off[1].conflicts()
    older = {key: value for key, value in states[-1].items() if key != "conflicts"}
    resumed[1].load_state_dict(older)
    assert not resumed[1].conflicts().steps.any()

    other = build(0.2)
    train(*other, 0, 2)
    before = _numbers(other[1])[1:3]
    renamed = copy.deepcopy(states[-1])
    renamed["conflicts"][0]["parameters"][0] = "nowhere.weight"
    renamed["conflicts"][0]["threshold"] = 0.2
    for state, message in (
        (states[-1], r"conflicts counted with threshold 0\.2, got 0\.1"),
        (renamed, r"shared parameters of trunk, got 'nowhere\.weight'"),
        ({**states[-1], "conflicts": ()}, "whole state_dict"),
    ):
        with pytest.raises(ValueError, match=message):
            other[1].load_state_dict(state)
        assert_equal(_numbers(other[1])[1:3], before)


def test_counts_are_by_name() -> None:
    """The checkpoint of a smaller trunk, which is part of the larger one."""
    _, first, small = started_problem(cs.PCGrad())
    small.count_conflicts()
    small.step(first)
    state = small.state_dict()["conflicts"][0]
    wide, loss, *_ = problem()
    wide.trunk.insert(0, nn.Linear(5, 5).double())
    large = cs.MultiTaskOptimizer(wide, sgd_of(wide), AB, cs.PCGrad())
    large.count_conflicts()
    assert state["parameters"][:2] == ["trunk.0.weight", "trunk.0.bias"]
    moved = [name.replace("trunk.2", "trunk.3") for name in state["parameters"]]
    modules = [name.replace("trunk.2", "trunk.3") for name in state["modules"]]
    large.load_state_dict(
        {**large.state_dict(), "conflicts": ({**state, "parameters": moved, "modules": modules},)}
    )
    found = large.conflicts()
    for part, names in (
        (found, [*moved[:2], "trunk.3.weight", "trunk.3.bias"]),
        (found.by_module(), ["trunk.0", "trunk.3"]),
    ):
        steps = dict(zip(part.names, part.steps[:, 0, 1].tolist(), strict=True))
        assert [name for name, number in steps.items() if number] == names
    del loss


def _counted(rank: int, size: int, kind: str, method: str) -> list[Tensor]:
    """Six joint steps; one lacks a task, in one the gradients of one rank are infinite."""
    buckets.BUCKET_BYTES = 700
    network = Network(kind, rank, size)
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
    found = opt.conflicts()
    return [cosines, found.counts, found.steps, found.by_module().counts, *_saved_counts(opt)]


def _saved_counts(opt: cs.MultiTaskOptimizer) -> list[Tensor]:
    (state,) = opt.state_dict()["conflicts"]
    return [state["counts"], state["steps"]]


@pytest.mark.ranks
@pytest.mark.each
@pytest.mark.parametrize("method", ["PCGrad", "ConnectionStrength"])
@pytest.mark.parametrize("kind", ["replicated", "fully_shard"])
def test_ranks_count_as_one_process(pools: Callable[[int], Ranks], kind: str, method: str) -> None:
    first, *others = pools(2).run(_counted, 2, kind, method)
    for other in others:
        assert_equal(other, first)
    alone = _counted(0, 2, "alone", method)
    torch.testing.assert_close(first[0], alone[0], rtol=1e-4, atol=1e-4)  # float32 gradients
    assert_equal(first[1:], alone[1:])
    assert first[2].max() == 5
    assert first[1].any()


def _on_one_rank(rank: int, size: int) -> str:
    network = Network("replicated", rank, size)
    opt = network.start(cs.PCGrad())
    if rank == 1:
        opt.count_conflicts(0.5)
    with pytest.raises(RuntimeError) as raised:
        opt.step(partial(network.loss, 0))
    opt.count_conflicts(0.5)
    opt.step(partial(network.loss, 0))
    return str(raised.value)


@pytest.mark.ranks
def test_all_ranks_have_to_count(pools: Callable[[int], Ranks]) -> None:
    for text in pools(2).run(_on_one_rank, 2):
        assert "the same threshold of count_conflicts: rank 0 has None, rank 1 has 0.5" in text


def test_as_text() -> None:
    trunk, opt = _opposed()
    for sign in (1, -1, -1):
        opt.step(lambda task, s=sign: trunk(torch.ones(2, 1)).mean() * (1 if task == "a" else s))
    weight, bias, *_ = str(opt.conflicts()).splitlines()[1:]
    assert weight == "  0.weight  2 of 3,  66.7 %"
    assert bias == "  0.bias    2 of 3,  66.7 %"
    assert str(opt.conflicts()).splitlines()[-1] == "  1.bias    0 of 0"
    assert repr(opt.conflicts()) == "Conflicts(threshold=0.0, tasks=['a', 'b'], P=4)"
    deep = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    opt = cs.MultiTaskOptimizer(deep, sgd_of(deep), AB, cs.PCGrad())
    opt.count_conflicts(-0.25)
    opt.step(lambda task: deep(torch.ones(1, 2)).sum() * (1 if task == "a" else -1))
    head, *lines, last = str(opt.conflicts()).splitlines()
    assert "below -0.25" in head
    assert [line.split()[0] for line in lines] == list(opt.conflicts().scores())[:10]
    assert last == "  and 2 more"


@pytest.mark.parametrize(
    "threshold", [1.01, -2, math.nan, math.inf, "0", torch.tensor(0.0)], ids=repr
)
def test_thresholds_outside_are_refused(threshold: Any) -> None:
    setup, opt = started(cs.PCGrad())
    opt.count_conflicts(0.5)
    opt.step(setup.closure(0))
    with pytest.raises(ValueError, match=r"threshold must lie in \[-1, 1\], got"):
        opt.count_conflicts(threshold)
    assert opt.conflicts().threshold == 0.5
    assert opt.conflicts().steps.max() == 1


def test_bad_calls_are_refused() -> None:
    setup, opt = started(cs.PCGrad())
    opt.step(setup.closure(0))
    with pytest.raises(RuntimeError, match=r"call count_conflicts\(\) before the steps"):
        opt.conflicts()
    _, summed = started(cs.Sum())
    with pytest.raises(ValueError, match=r"got Sum\(\).*use cs\.Sum\(separate=True\)"):
        summed.count_conflicts()
    tasks = [f"t{n}" for n in range(65)]
    trunk = nn.Linear(1, 1)
    many = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), tasks, Own())
    with pytest.raises(ValueError, match="at most 64 for count_conflicts, got 65"):
        many.count_conflicts()


def test_counting_ends() -> None:
    setup, opt = started(cs.PCGrad())
    opt.count_conflicts(0.5)
    opt.step(setup.closure(0))
    opt.count_conflicts(None)
    with pytest.raises(RuntimeError, match="conflicts are not counted"):
        opt.conflicts()
    assert "conflicts" not in opt.state_dict()
    opt.step(setup.closure(1))
    opt.count_conflicts()
    opt.step(setup.closure(2))
    assert opt.conflicts().steps.max() == 1


class Own(cs.Method):
    """A method of a user, which takes any number of tasks."""

    def combine(self, gradients: cs.TaskGradients, layout: cs.Layout, step: cs.Step) -> None:
        for i in gradients.reached():
            gradients.updates([i])[0].zero_()
        gradients.assign(gradients.reached())


def test_a_trunk_that_is_moved() -> None:
    """Here to another dtype."""
    setup, opt = started(cs.PCGrad())
    opt.count_conflicts()
    opt.step(setup.closure(0))
    setup.trunk.float()
    setup.heads.float()
    setup.optimizer.state.clear()
    setup.batches = [tuple(part.float() for part in batch) for batch in setup.batches]
    opt.step(setup.closure(1))
    assert opt.conflicts().steps.unique().tolist() == [2]
    assert opt.conflicts().cosines.isfinite().all()
