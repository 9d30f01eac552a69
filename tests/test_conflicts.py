"""Counts of conflicts by parameter, against plain float64 gradients of each loss."""

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from loops import Loop, assert_alike, numbers
from networks import (
    TASKS,
    Setup,
    assert_equal,
    optimizer_of,
    problem,
    restore,
    saved,
    started,
    started_problem,
)
from rank_networks import Network
from ranks import Ranks, on_its_device
from recorder import Reads, Recorder
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.engine import cuda_graphs
from cs_kernels.ranks import buckets
from cs_kernels.trunk.layers import shared_parameters

pytestmark = pytest.mark.loop

SCALED = pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])

Gradients = Mapping[str, Sequence[Tensor | None]]
"""By task, for each parameter."""


class Plain:
    """The counts by definition, one gradient after the other: by parameter, and by module."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        tasks: list[str] = TASKS,
        threshold: float = 0.0,
        *,
        by_module: bool = False,
    ) -> None:
        self.parameters, self.tasks, self.threshold = dict(parameters), tasks, threshold
        self.members: dict[str, list[int]] = {}
        for n, name in enumerate(parameters):
            self.members.setdefault(name.rpartition(".")[0] if by_module else name, []).append(n)
        shape = len(self.members), len(tasks), len(tasks)
        self.counts, self.steps = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        self.cosines = torch.full(shape, math.nan, dtype=torch.float64)
        given = parameters, tasks, threshold
        self.of_modules = None if by_module else Plain(*given, by_module=True)

    def gradients(self, loss: Tensor) -> list[Tensor | None]:
        trained = [p for p in self.parameters.values() if p.requires_grad]
        grads = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
        found = dict(zip(map(id, trained), grads, strict=True))
        return [found.get(id(p)) for p in self.parameters.values()]

    def _joined(self, row: Sequence[Tensor | None], members: list[int]) -> Tensor | None:
        """The gradients of some parameters as one vector."""
        if all(row[n] is None for n in members):
            return None
        like = list(self.parameters.values())
        parts = [torch.zeros_like(like[n]) if row[n] is None else row[n] for n in members]
        return torch.cat([part.flatten() for part in parts])

    def add(self, grads: Gradients) -> None:
        self.cosines = torch.full_like(self.cosines, math.nan)
        all_finite = all(g.isfinite().all() for row in grads.values() for g in row if g is not None)
        for n, members in enumerate(self.members.values()):
            of_tasks = {task: self._joined(row, members) for task, row in grads.items()}
            for (i, first), (j, second) in itertools.product(enumerate(self.tasks), repeat=2):
                g, h = of_tasks.get(first), of_tasks.get(second)
                if g is None or h is None:
                    continue
                scale = g.norm() * h.norm()
                cosine = (g * h).sum() / scale if scale != 0 else torch.zeros(())
                self.cosines[n, i, j] = cosine
                self.steps[n, i, j] += int(all_finite)
                below = i != j and bool(cosine < self.threshold)
                self.counts[n, i, j] += int(all_finite and below)
        if self.of_modules is not None:
            self.of_modules.add(grads)

    def check(self, found: cs.Conflicts) -> None:
        assert found.names == tuple(self.members)
        assert found.tasks == tuple(self.tasks)
        assert found.threshold == self.threshold
        assert found.cosines.dtype == found.gramians.dtype == torch.float64
        torch.testing.assert_close(found.cosines, self.cosines, equal_nan=True)
        assert_equal(found.counts, self.counts)
        assert_equal(found.steps, self.steps)
        torch.testing.assert_close(found.share, self.counts.double() / self.steps, equal_nan=True)
        scores = [int(of_one.triu(1).sum()) for of_one in self.counts]
        assert found.scores() == dict(zip(self.members, scores, strict=True))
        assert list(found.scores().values()) == sorted(scores, reverse=True)
        if self.of_modules is not None:
            self.of_modules.check(found.by_module())


def _gradients(
    setup: Setup, plain: Plain, loss: Callable[[str], Tensor], tasks: Sequence[str] = TASKS
) -> Gradients:
    """By autograd, without a change of the running statistics."""
    before = copy.deepcopy(setup.trunk.state_dict())
    found = {}
    for task in tasks:
        with cs.nn.active_task(setup.trunk, task):
            found[task] = plain.gradients(loss(task))
    setup.trunk.load_state_dict(before)
    return found


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


@pytest.mark.each
@pytest.mark.parametrize("threshold", [-0.1, 0.0, 0.2])
@pytest.mark.parametrize("method", METHODS)
def test_counts(backend: str, method: str, threshold: float) -> None:
    """Steps with all tasks, with two and with one; a layer is frozen for some of them."""
    setup, opt = started(METHODS[method]())
    plain = Plain(shared_parameters(setup.trunk), threshold=threshold)
    opt.step(setup.closure(0))  # Not counted.
    opt.count_conflicts(threshold)
    plain.check(opt.conflicts())
    for number in range(9):
        setup.trunk.block.second.requires_grad_(not 3 <= number < 6)
        setup.trunk.stem.bias.requires_grad_(number < 5)
        tasks = {4: ["edges", "depth"], 7: ["normals"]}.get(number, TASKS)
        loss = setup.closure(number % 8)
        expected = _gradients(setup, plain, loss, tasks)
        opt.step(loss, tasks)
        plain.add(expected)
        plain.check(opt.conflicts())
    found = opt.conflicts()
    assert 0 < found.counts.sum() < found.steps.sum()
    assert found.steps[:, 0, 0].unique().tolist() == [5, 8]
    assert found.by_module().by_module() is found.by_module()
    assert opt.report().step == 9


def test_one_forward_pass_and_micro_batches() -> None:
    """Gradients of all micro-batches are added up; the heads in the trunk are one task's own."""
    model, _, x, targets = problem(tasks=TASKS)
    opt = optimizer_of(model, cs.PCGrad(), tasks=TASKS)
    opt.count_conflicts(0.2)
    names = {n: p for n, p in model.named_parameters() if n.startswith("trunk")}
    # Nothing reaches "unused": it may still be shared.
    unused = {f"unused.{name}": p for name, p in model.unused.named_parameters()}
    plain = Plain({**names, **unused}, threshold=0.2)
    for number in range(8):
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
                before = sums.get(task, [0.0] * len(grads))
                pairs = zip(before, grads, strict=True)
                sums[task] = [None if g is None else b + g for b, g in pairs]
            opt.backward(losses, update=n == len(rows))
        opt.optimizer.step()
        plain.add(sums)
        plain.check(opt.conflicts())
    assert opt.conflicts().counts.sum() > 0


def _opposed(threshold: float = 0.0) -> tuple[nn.Module, cs.MultiTaskOptimizer]:
    """Two tasks; the gradients of the bias are the loss factors, those of the weight are zero."""
    trunk = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(False))
    opt = optimizer_of(trunk, cs.PCGrad(), lr=0.0)
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
    scores = {"0.weight": int(threshold > 0), "0.bias": 1, "1.weight": 0, "1.bias": 0}
    assert found.scores() == scores
    torch.testing.assert_close(found.by_module().cosines[0], opposed)


@SCALED
def test_steps_that_are_not_finite(scaled: bool) -> None:
    """They count nowhere, also not for parameters and tasks whose gradients are finite."""
    setup = Setup(optimizer=torch.optim.SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) if scaled else None
    opt = setup.start(cs.CAGrad(), scaler=scaler)
    opt.count_conflicts()
    plain = Plain(shared_parameters(setup.trunk))
    last = list(plain.parameters).index("up.bias")
    for number in range(8):
        bad = number == 4

        def loss(task: str, number: int = number, bad: bool = bad) -> Tensor:
            value = setup.closure(number)(task)
            infinite = bad and task == "edges"
            return value + torch.inf * setup.trunk.up.bias.sum() if infinite else value

        before = saved(setup)
        grads = _gradients(setup, plain, loss)
        opt.step(loss)
        plain.add(grads)
        found = opt.conflicts()
        plain.check(found)
        if bad:
            assert found.cosines[last, 2].isnan().all()
            assert found.cosines[last, 0, 1].isfinite()
            restore(before, setup)
        else:
            # The products are those of the gradients without the factor of the scaler.
            grad = grads["depth"][0].flatten()
            torch.testing.assert_close(found.gramians[0, 0, 0], grad @ grad)
    assert opt.conflicts().steps.unique().tolist() == [7]


def test_phase_1_and_a_new_start() -> None:
    setup, opt = counting(schedule=cs.Switch(1))
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
    opt.count_conflicts(None)
    opt.step(setup.closure(4))
    with pytest.raises(RuntimeError, match="conflicts are not counted"):
        opt.conflicts()
    assert "conflicts" not in opt.state_dict()
    opt.count_conflicts()
    opt.step(setup.closure(5))
    assert opt.conflicts().steps.max() == 1


def test_a_failed_step_is_not_counted() -> None:
    """Also not by the next step of Phase 1."""
    setup, opt = counting(schedule=cs.Switch(1))

    opt.start_epoch(1)
    hook = setup.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
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
    setup, opt = counting()
    opt.step(setup.closure(0))
    for parameter in shared_parameters(setup.trunk).values():
        parameter.requires_grad_(False)
    opt.step(setup.closure(1))
    assert opt.conflicts().cosines.isnan().all()
    assert opt.conflicts().steps.unique().tolist() == [1]


@pytest.mark.parametrize("method", METHODS)
def test_counting_changes_nothing(method: str) -> None:
    """Neither updates nor what steps read on the host; the call reads nothing, its numbers do."""
    names, states = [], []
    for start in (started, counting):
        setup, opt = start(METHODS[method](), weighting=cs.DynamicWeightAverage())
        opt.start_epoch(0)
        opt.step(setup.closure(0))
        with Reads() as reads:
            for number in range(1, 6):
                opt.step(setup.closure(number), None if number != 3 else TASKS[::2])
            if start is counting:
                found = opt.conflicts()
                for part in (found, found.by_module()):
                    assert part.cosines.shape == part.share.shape
                repr(found)
        names.append(reads.names)
        states.append(setup.state())
    assert names[0] == names[1]
    assert_equal(*states)
    with Reads() as reads:
        opt.state_dict()
    assert reads.names == []


def _numbers(opt: cs.MultiTaskOptimizer) -> list[Tensor]:
    found = opt.conflicts()
    parts = (found, found.by_module())
    return [t.nan_to_num(9.0) for p in parts for t in (p.gramians, p.counts, p.steps)]


@pytest.mark.slow
@SCALED
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


def _train(setup: Setup, opt: cs.MultiTaskOptimizer, start: int, stop: int) -> None:
    for number in range(start, stop):
        opt.step(setup.closure(number))


def test_a_resumed_run_goes_on() -> None:
    straight, interrupted, resumed = (counting(threshold=0.1) for _ in range(3))
    _train(*straight, 0, 8)
    _train(*interrupted, 0, 5)
    states = saved(*interrupted)
    kept = interrupted[1].state_dict()
    _train(*interrupted, 5, 6)
    assert numbers(kept) == numbers(states[-1])  # Later steps have not changed it.
    _train(*resumed, 0, 2)
    restore(states, *resumed)
    counts = resumed[1].conflicts()
    assert counts.cosines.isnan().all()
    assert counts.steps.unique().tolist() == [5]
    _train(*resumed, 5, 8)
    assert_equal(_numbers(resumed[1]), _numbers(straight[1]))

    off = started(cs.PCGrad())
    assert "conflicts" not in off[1].state_dict()
    restore(states, *off)  # Left out.
    with pytest.raises(RuntimeError, match="not counted"):
        off[1].conflicts()
    older = {key: value for key, value in states[-1].items() if key != "conflicts"}
    resumed[1].load_state_dict(older)
    assert not resumed[1].conflicts().steps.any()


def test_states_that_do_not_fit() -> None:
    setup, opt = counting(threshold=0.2)
    _train(setup, opt, 0, 2)
    before, good = _numbers(opt)[1:3], opt.state_dict()
    (counted,) = good["conflicts"]
    renamed = {**counted, "parameters": ["nowhere.weight", *counted["parameters"][1:]]}
    for conflicts, message in (
        (({**counted, "threshold": 0.1},), r"conflicts counted with threshold 0\.2, got 0\.1"),
        ((renamed,), r"shared parameters of trunk, got 'nowhere\.weight'"),
        ((), "whole state_dict"),
    ):
        with pytest.raises(ValueError, match=message):
            opt.load_state_dict({**good, "conflicts": conflicts})
        assert_equal(_numbers(opt)[1:3], before)


def test_counts_are_by_name() -> None:
    """The checkpoint of a smaller trunk, which is part of the larger one."""
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
    found = large.conflicts()
    parameters = [f"trunk.{layer}.{name}" for layer in (0, 3) for name in ("weight", "bias")]
    for part, names in ((found, parameters), (found.by_module(), ["trunk.0", "trunk.3"])):
        steps = dict(zip(part.names, part.steps[:, 0, 1].tolist(), strict=True))
        assert [name for name, number in steps.items() if number] == names


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
    (state,) = opt.state_dict()["conflicts"]
    saved_counts = state["counts"], state["steps"]
    return [cosines, found.counts, found.steps, found.by_module().counts, *saved_counts]


@pytest.mark.ranks
@pytest.mark.each
@pytest.mark.parametrize("method", ["PCGrad", "ConnectionStrength"])
@pytest.mark.parametrize("kind", ["replicated", "fully_shard"])
def test_ranks_count_as_one_process(pools: Callable[[int], Ranks], kind: str, method: str) -> None:
    first, *others = pools(2).run(_counted, 2, kind, method)
    for other in others:
        assert_equal(other, first)
    alone = on_its_device(0, _counted, 2, "alone", method)
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
    opt = optimizer_of(deep, cs.PCGrad())
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
    setup, opt = counting(threshold=0.5)
    opt.step(setup.closure(0))
    with pytest.raises(ValueError, match=r"threshold must lie in \[-1, 1\], got"):
        opt.count_conflicts(threshold)
    assert opt.conflicts().threshold == 0.5
    assert opt.conflicts().steps.max() == 1


class Own(cs.Method):
    """A method of a user, which takes any number of tasks."""

    def combine(self, gradients: cs.TaskGradients, layout: cs.Layout, step: cs.Step) -> None:
        raise NotImplementedError


def test_bad_calls_are_refused() -> None:
    setup, opt = started(cs.PCGrad())
    opt.step(setup.closure(0))
    with pytest.raises(RuntimeError, match=r"call count_conflicts\(\) before the steps"):
        opt.conflicts()
    _, summed = started(cs.Sum())
    with pytest.raises(ValueError, match=r"got Sum\(\).*use cs\.Sum\(separate=True\)"):
        summed.count_conflicts()
    many = optimizer_of(nn.Linear(1, 1), Own(), tasks=[f"t{n}" for n in range(65)])
    with pytest.raises(ValueError, match="at most 64 for count_conflicts, got 65"):
        many.count_conflicts()


def test_a_trunk_that_is_moved() -> None:
    """Here to another dtype."""
    setup, opt = counting()
    opt.step(setup.closure(0))
    setup.trunk.float()
    setup.heads.float()
    setup.optimizer.state.clear()
    setup.batches = [tuple(part.float() for part in batch) for batch in setup.batches]
    opt.step(setup.closure(1))
    assert opt.conflicts().steps.unique().tolist() == [2]
    assert opt.conflicts().cosines.isfinite().all()
