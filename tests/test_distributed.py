"""Several ranks agree bit for bit, and match one process that trains on the whole batch."""

import copy
import gc
import pickle
import warnings
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from networks import assert_equal, sgd_of, without_collections
from rank_networks import (
    METHODS,
    TASKS,
    Dense,
    Network,
    Sent,
    assert_near,
    assert_trains_as_one_process,
    conflicting_loss,
    distributed,
    names_of,
    on_ranks,
    optimizer_on_ranks,
    part_of_this_rank,
    shard,
    trained,
    whole_copies,
)
from ranks import DEVICE, Pools
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cs_kernels as cs
from cs_kernels.ranks import buckets

pytestmark = pytest.mark.ranks


def _with_some_labels(rank: int, size: int, kind: str, method: str) -> list[list[Tensor]]:
    """Rank 0 has labels for all tasks, rank 1 for two, rank 2 for none.

    In the last step, only rank 0 has labels, for one task.
    """
    states, n = [], 12 // size
    for schedule in (cs.Joint(), cs.Sequential()):
        network = Network(kind, rank, size)
        opt = network.start(METHODS[method](), schedule)
        for step in range(4):
            labels = [TASKS, ["edges", "depth"], []] if step < 3 else [TASKS[:1], [], []]
            every = list(dict.fromkeys(task for of_rank in labels[:size] for task in of_rank))

            def loss(task: str) -> Tensor:
                if kind == "alone":  # The mean of the ranks' means.
                    has = [r for r in range(size) if task in labels[r]]
                    parts = [slice(r * n, (r + 1) * n) for r in has]
                    return torch.stack([network.loss(step, task, part) for part in parts]).mean()
                assert task in labels[rank] or kind == "fully_shard"
                return (task in labels[rank]) * network.loss(step, task)

            due = {*every} & {*opt.due_tasks} or {*every}
            losses = opt.step(loss, tasks=every if kind == "alone" else labels[rank])
            assert set(losses) == due
        states.append([*network.state(), *losses.values()])
    return states


def _in_parts(rank: int, size: int, kind: str, method: str) -> tuple[list[Tensor], Any]:
    """A step has two micro-batches on rank 0 and three on others; with shards, two on all."""
    network = Network(kind, rank, size)
    opt = network.start_phases(method)
    assert len(opt.trace(partial(network.loss, 0)).prioritized) == 5
    priorities = opt.priority()
    assert {int(p) for of_layer in priorities.values() for p in of_layer} == {0, 1, 2}
    number = 2 if rank == 0 or kind == "fully_shard" else 3
    samples, number = (12, 1) if kind == "alone" else (6 // number, number)
    parts = [slice(n * samples, (n + 1) * samples) for n in range(number)]
    for step in range(6):
        opt.step([lambda task, part=p: network.loss(step, task, part) / number for p in parts])
    return network.state(), priorities


def _scaled(rank: int, size: int, kind: str, method: str) -> list[Tensor]:
    """A scaler skips a step on all ranks if one rank's gradients are non-finite."""
    network = Network(kind, rank, size, heads_too=True)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    opt = network.start_phases(method, scaler=scaler)
    for step in range(6):
        factor = float("inf") if step == 2 and (rank == 1 or kind == "alone") else 1.0
        opt.step(lambda task: factor * network.loss(step, task))
    assert scaler.get_scale() == 512
    return network.state()


CASES = [
    *((trained, kind, 2) for kind in ("replicated", "DDP", "fully_shard")),
    *((trained, kind, 3) for kind in ("replicated", "DDP views", "fully_shard")),
    (trained, "fully_shard 2-D", 4),
    *((_with_some_labels, "replicated", size) for size in (2, 3)),
    (_with_some_labels, "fully_shard", 2),
    *((_in_parts, kind, 2) for kind in ("replicated", "DDP", "fully_shard")),
    *((_scaled, kind, 2) for kind in ("replicated", "fully_shard")),
]


@pytest.mark.each
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES, ids=names_of(CASES))
def test_ranks_train_as_one_process(pools: Pools, case: Any, method: str) -> None:
    assert_trains_as_one_process(pools, case, method)


KINDS = pytest.mark.parametrize("kind", ["replicated", "DDP", "fully_shard"])
REPLICATED_OR_SHARDED = pytest.mark.parametrize("kind", ["replicated", "fully_shard"])


def _dense(kind: str, method: str) -> tuple[nn.Module, cs.MultiTaskOptimizer]:
    buckets.BUCKET_BYTES = 100
    torch.manual_seed(2)
    plain = Dense()
    network, options = distributed(plain, kind, plain.trunk[0])
    sgd = torch.optim.SGD(
        plain.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1, foreach=False
    )
    options["weighting"] = cs.FixedWeights(dict(zip(TASKS, (1.0, 0.5, 2.0), strict=True)))
    return network, cs.MultiTaskOptimizer(network, sgd, TASKS, METHODS[method](), **options)


@pytest.mark.each
@pytest.mark.parametrize("method", ["CAGrad", "CAGrad-kept", "GradDrop", "MGDA", "Sum"])
@KINDS
@pytest.mark.parametrize("parts", [1, 2])
@on_ranks(2, alone={"kind": "alone", "parts": 1})
def test_losses_of_one_forward_pass(rank: int, kind: str, method: str, parts: int) -> Any:
    """`backward` with the losses of one forward pass, in one or two micro-batches."""
    network, opt = _dense(kind, method)
    means = []
    for batch in torch.randn(5, 12, 5):
        means.append(dict.fromkeys(TASKS, torch.zeros(())))
        for n, x in enumerate(part_of_this_rank(batch).chunk(parts), 1):
            losses = {task: loss / parts for task, loss in network(x).items()}
            if rank == 1:  # Collectives must not depend on the order of the losses.
                losses = dict(reversed(losses.items()))
            for task, loss in opt.backward(losses, update=n == parts).items():
                means[-1][task] = means[-1][task] + loss
        opt.optimizer.step()
    return whole_copies(network.parameters()), means


@pytest.mark.each
@KINDS
@pytest.mark.parametrize("call", ["step", "backward"])
@on_ranks(2)
def test_steps_with_cached_weights_send_as_much_as_plain_steps(
    rank: int, kind: str, call: str
) -> None:
    sent = []
    for method in (cs.Sum(), cs.CAGrad(update_every=9), cs.CAGrad()):
        network, opt = _dense(kind, "Sum")
        opt.method = method
        for batch in torch.randn(3, 12, 5):
            x = part_of_this_rank(batch)
            with Sent() as mode:
                if call == "step":
                    opt.step(lambda task, x=x, network=network: network(x, task))
                else:
                    opt.backward(network(x))
                    opt.optimizer.step()
        sent.append(mode.elements)
    assert sent[0] == sent[1]
    if call == "backward" or kind != "fully_shard":  # Else every pass has reductions.
        assert sent[2].total() > sent[0].total()


class Thirds(cs.GramianMethod):
    """The same weights in every step."""

    def weights(self, gramian: Tensor, step: cs.Step | None = None) -> Tensor:
        return gramian.new_tensor([0.3, 1.5, -0.6])


@pytest.mark.each
@pytest.mark.parametrize("what", ["a loss without its head", "a neck on one rank", "an input"])
@REPLICATED_OR_SHARDED
@on_ranks(2)
def test_ranks_make_equally_many_passes_with_cached_weights(rank: int, what: str, kind: str) -> Any:
    """If one rank's graph needs one pass per task, all ranks make one pass per task."""
    plain = nn.ModuleList([nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))])
    plain += [nn.Linear(4, 4), nn.ModuleDict({task: nn.Linear(4, 2) for task in TASKS})]
    batches, found = torch.randn(4, 6, 5).chunk(2, 1)[rank], []
    for every in (1, 9):
        trunk, *others = copy.deepcopy(plain)
        trunk, options = distributed(trunk, kind)
        opt = optimizer_on_ranks(trunk, Thirds(update_every=every), heads=others, **options)
        for x in batches:
            z = trunk(x.clone().requires_grad_(what == "an input" and rank == 0))
            y = others[0](z) if what == "a neck on one rank" else z
            losses = {task: conflicting_loss(others[1][task](y), task) for task in TASKS}
            if rank == 1 and what != "an input":
                losses |= {task: 0 * z.sum() for task in TASKS[1:]}
            opt.backward(losses)
            opt.optimizer.step()
        found.append(whole_copies([p for m in (trunk, *others) for p in m.parameters()]))
    assert_near(*found)
    return found


@pytest.mark.parametrize("tasks", [1, 3])
@on_ranks(2)
def test_parameters_are_gathered_once_for_all_backward_passes(rank: int, tasks: int) -> None:
    network = Dense()
    shard(network.trunk[0], network.trunk[2], network)
    opt = optimizer_on_ranks(network, cs.PCGrad(), tasks=TASKS[:tasks], process_group=None)
    for _ in range(3):
        losses = network(torch.ones(4, 5))
        with Sent() as sent:
            opt.backward({task: losses[task] for task in TASKS[:tasks]})
        opt.optimizer.step()
    assert sent.numbers["allgather_base"] == 2


@REPLICATED_OR_SHARDED
@on_ranks(2, alone={"kind": "alone"})
def test_gradients_that_are_dropped(rank: int, kind: str) -> list[Tensor]:
    network, opt = _dense(kind, "PCGrad")
    sgd, x = opt.optimizer, part_of_this_rank(torch.randn(3, 12, 5), 1)
    for set_to_none in (True, False):
        opt.backward(network(x[0]), update=False)
        sgd.zero_grad(set_to_none=set_to_none)
        opt.backward(network(x[1]), update=False)
        with pytest.raises(RuntimeError, match="wait for their update"):
            sgd.step()
        opt.backward(network(x[2]))
        with pytest.raises(RuntimeError, match=r"still in .grad"):
            opt.backward(network(x[0]))
        sgd.step()
    opt.backward(network(x[0]), update=False)
    for parameter in network.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    with pytest.raises(RuntimeError, match="clip, unscale or add"):
        opt.backward(network(x[1]))
    with pytest.warns(UserWarning, match="has dropped the gradients of 1 calls"):
        opt.backward(network(x[1]))
    sgd.step()
    return whole_copies(network.parameters())


@pytest.mark.parametrize("no_sync", [False, True])
@on_ranks(2, alone={})
def test_a_wrapper_around_trunk_and_heads(rank: int, no_sync: bool) -> list[Tensor]:
    """The first pass reveals the wrapper even in `no_sync`, whose exit enables reductions again."""
    network: Any = (plain := Dense())
    if dist.is_initialized():
        plain.unused = plain.unused if not no_sync else nn.Identity()
        network = DistributedDataParallel(plain, find_unused_parameters=not no_sync)
    opt = optimizer_on_ranks(plain.trunk, cs.PCGrad(), heads=[plain.heads])
    inside = network.no_sync if no_sync and dist.is_initialized() else nullcontext
    for batch in torch.randn(4, 12, 5):
        first, last = part_of_this_rank(batch).chunk(2)
        with inside():
            opt.backward(network(first), update=False)
        opt.backward(network(last))
        opt.optimizer.step()
        opt.optimizer.zero_grad()
        opt.step(lambda task: network(part_of_this_rank(batch), task))
        network.require_backward_grad_sync = True  # As Lightning does after its step.
    del opt
    gc.collect()
    assert getattr(network, "require_forward_param_sync", True)
    return whole_copies([*plain.trunk.parameters(), *plain.heads.parameters()])


@on_ranks(2, alone={})
def test_a_wrapped_trunk_that_is_handed_over_plain(rank: int) -> list[Tensor]:
    """A forward pass of the trunk reveals its wrapper; ranks have different tasks."""
    buckets.BUCKET_BYTES = 100
    plain = Dense()
    trunk, _ = distributed(plain.trunk, "DDP" if dist.is_initialized() else "alone")
    opt = optimizer_on_ranks(plain.trunk, cs.PCGrad(), heads=[plain.heads])
    for batch in torch.randn(6, 12, 5):
        losses: dict[str, list[Tensor]] = {}
        for n, part in enumerate(batch.chunk(2)):  # Each part has labels for some tasks.
            if n == rank or not dist.is_initialized():
                z = trunk(part)
                for task in TASKS[n : n + 2]:
                    losses.setdefault(task, []).append(conflicting_loss(plain.heads[task](z), task))
        opt.backward({task: torch.stack(of_task).mean() for task, of_task in losses.items()})
        opt.optimizer.step()
    return whole_copies(plain.parameters())


MESSAGES = {
    "static graph": "DistributedDataParallel must be built without static_graph=True",
    "no group": "process_group must be the process group of the DistributedDataParallel",
    "other ranks": "process_group must have the ranks of the DistributedDataParallel around trunk,"
    r" \[0, 1\], got \[RANK\]$",
}


@pytest.mark.parametrize(
    ("what", "how"),
    [
        *product(("no group", "other ranks"), ("step", "backward")),
        *(("static graph", "step"), ("other ranks", "wrapped")),
    ],
)
@on_ranks(2)
def test_wrappers_that_do_not_fit_are_refused(rank: int, what: str, how: str) -> None:
    own = [dist.new_group([n]) for n in range(2)][rank]
    group = {"static graph": dist.group.WORLD, "no group": None, "other ranks": own}[what]
    plain = Dense()
    network = DistributedDataParallel(plain, static_graph=what == "static graph")
    trunk = network if how == "wrapped" else plain.trunk
    warned = pytest.warns(UserWarning, match="missing on 2") if group is None else nullcontext()

    def train() -> None:
        with warned:
            given = trunk, sgd_of(plain), TASKS, cs.PCGrad()
            opt = cs.MultiTaskOptimizer(*given, process_group=group)
        if how == "backward":
            opt.backward(network(torch.ones(2, 5)))
        opt.step(lambda task: network(torch.ones(2, 5), task))

    with pytest.raises(ValueError, match=MESSAGES[what].replace("RANK", str(rank))):
        train()


@on_ranks(2)
def test_a_wrapper_reduces_again_after_its_last_optimizer(rank: int) -> list[list[Tensor]]:
    """Two optimizers use one wrapper, as when a notebook cell runs twice.

    After both are deleted, plain fine-tuning works without a garbage collection.
    """
    network = DistributedDataParallel(Dense(), find_unused_parameters=True)
    sgd, x = sgd_of(network), part_of_this_rank(torch.randn(4, 12, 5), 1)

    def reduces() -> tuple[bool, bool]:
        return network.require_backward_grad_sync, network.require_forward_param_sync

    with without_collections():
        opts = [cs.MultiTaskOptimizer(network, sgd, TASKS, cs.PCGrad()) for _ in range(2)]
        for batch in x:
            opts[1].step(lambda task: network(batch, task))
        state = whole_copies(network.parameters())
        while opts:
            assert reduces() == (False, False)
            opts.pop(0)
        assert reduces() == (True, True)
    for batch in x:
        sgd.zero_grad()
        sum(network(batch).values()).backward()
        sgd.step()
    return [state, whole_copies(network.parameters())]


@pytest.mark.parametrize("fails", [False, True])
@on_ranks(3)
def test_groups_end_with_their_optimizer(rank: int, fails: bool) -> None:
    """The groups' threads end without a garbage collection."""

    def threads() -> int:
        return len([*Path("/proc/self/task").iterdir()])

    network = Network("replicated", rank, 3)
    with without_collections():
        before = threads()
        for _ in range(3):  # Each optimizer has new groups, with new names.
            if fails:
                with pytest.raises(ValueError, match="layers must name"):
                    network.start(cs.PCGrad(), layers={"nowhere": None})
                continue
            network.start(cs.PCGrad()).step(partial(network.loss, 0))
            assert threads() > before
            del network.opt
        assert threads() == before


@on_ranks(2)
def test_another_default_device(rank: int) -> list[Tensor]:
    """Messages between hosts ignore the default device."""
    results = []
    for device in ("cpu", "meta"):
        network = Network("replicated", rank, 2)
        with torch.device(device):
            opt = network.start_phases("CAGrad")
            for step in range(3):
                opt.step(partial(network.loss, step))
        results.append(network.state())
    assert_equal(*results)
    return results[0]


@on_ranks(2)
def test_ranks_that_nothing_names_are_warned(rank: int) -> None:
    said = []
    for kind in ("alone", "replicated", "DDP", "fully_shard"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt = Network(kind, rank, 2).start(cs.PCGrad())
        said += [str(w.message) for w in caught if "process_group" in str(w.message)]
    (only,) = said
    assert only.startswith("process_group= is missing on 2 ranks")
    with pytest.raises(TypeError, match=r"save its state_dict\(\)"):
        pickle.dumps(opt)


class InHalves(cs.Sum):
    """The plain sum, assigned in two calls."""

    def __init__(self) -> None:
        super().__init__(separate=True)

    def combine(self, gradients: cs.TaskGradients, layout: cs.Layout, step: cs.Step) -> None:
        reached = gradients.reached()
        for i, update in zip(reached, gradients.updates(reached), strict=True):
            update.copy_(sum(grad for grad in gradients.of([i]) if grad is not None))
        gradients.assign(reached[:2])
        gradients.assign(reached[2:])


@REPLICATED_OR_SHARDED
@on_ranks(2)
def test_a_method_may_assign_in_several_calls(rank: int, kind: str) -> None:
    states = []
    for method in (InHalves(), cs.Sum()):
        network = Network(kind, rank, 2)
        network.start(method).step(partial(network.loss, 0))
        states.append(network.state())
    assert_near(*states)
