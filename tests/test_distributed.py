"""Many ranks: the bits of each other, and what one process gives on the whole batch."""

import gc
import pickle
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from networks import assert_equal
from rank_networks import (
    KINDS,
    METHODS,
    TASKS,
    Dense,
    Network,
    Whole,
    assert_near,
    both_phases,
    trained,
)
from ranks import Ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cs_kernels as cs
from cs_kernels.ranks import buckets

pytestmark = pytest.mark.ranks


@pytest.mark.each
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("kind", "size"), KINDS)
def test_ranks_train_as_one_process(
    pools: Callable[[int], Ranks], kind: str, size: int, method: str
) -> None:
    results = pools(size).run(trained, size, kind, method)
    for other in results[1:]:
        assert_equal(other, results[0])
    state, losses, phases = trained(0, size, "alone", method)
    assert set(phases) == {1, 2}
    assert_near(results[0][0], state)
    assert_near(results[0][1], losses)


def _with_some_labels(rank: int, size: int, kind: str, method: str) -> list[list[Tensor]]:
    """Rank 0 has all labels, rank 1 those of two tasks, rank 2 and the last step of 1 none."""
    buckets.BUCKET_BYTES = 700
    labels = [TASKS, ["edges", "depth"], []]
    states, networks = [], list[Network]()
    for schedule in (cs.Joint(), cs.Sequential()):
        networks.append(Network(kind, rank, size))
        opt = networks[-1].start(METHODS[method](), schedule)
        for step in range(4):
            of_ranks = [labels[r] if step < 3 else TASKS[: 1 - r] for r in range(size)]

            def loss(task: str, step: int = step, of_ranks: Any = of_ranks) -> Tensor:
                network = networks[-1]
                if kind == "alone":
                    # The ranks' means with the same weight.
                    parts = zip(range(size), of_ranks, strict=True)
                    samples = 12 // size
                    having = [
                        network.loss(step, task, slice(r * samples, (r + 1) * samples))
                        for r, tasks in parts
                        if task in tasks
                    ]
                    return torch.stack(having).mean()
                if task not in of_ranks[rank]:
                    assert kind == "fully_shard"
                    return 0 * network.loss(step, task)
                result: Tensor = network.loss(step, task)
                return result

            every = [task for task in TASKS if any(task in tasks for tasks in of_ranks)]
            if kind == "alone":
                losses = opt.step(loss, tasks=dict.fromkeys(t for o in of_ranks for t in o))
            else:
                losses = opt.step(loss, tasks=of_ranks[rank])
            assert set(losses) == set(every)
        states.append([*networks[-1].state(), *losses.values()])
    return states


@pytest.mark.each
@pytest.mark.parametrize("method", ["ConnectionStrength", "MGDA", "Sum"])
@pytest.mark.parametrize(
    ("kind", "size"), [("replicated", 2), ("replicated", 3), ("fully_shard", 2)]
)
def test_a_task_counts_with_the_ranks_that_have_labels(
    pools: Callable[[int], Ranks], kind: str, size: int, method: str
) -> None:
    first, *others = pools(size).run(_with_some_labels, size, kind, method)
    for other in others:
        assert_equal(other, first)
    assert_near(first, _with_some_labels(0, size, "alone", method))


def _in_parts(rank: int, size: int, kind: str, method: str) -> list[Tensor]:
    """Micro-batches: two on rank 0, three on the others, except with `fully_shard`."""
    buckets.BUCKET_BYTES = 700
    network = Network(kind, rank, size)
    opt = network.start(METHODS[method](), both_phases())
    opt.start_epoch(1)
    for step in range(6):
        number = 2 if rank == 0 or kind == "fully_shard" else 3
        samples = (12 if kind == "alone" else 12 // size) // number

        def loss(task: str, n: int, step: int = step, number: int = number) -> Tensor:
            part = slice(n * samples, (n + 1) * samples)
            return network.loss(step, task, part) / number

        opt.step([lambda task, n=n: loss(task, n) for n in range(number)])
    return network.state()


@pytest.mark.each
@pytest.mark.parametrize("method", ["ConnectionStrength", "CAGrad", "Sum"])
@pytest.mark.parametrize("kind", ["replicated", "DDP", "fully_shard"])
def test_micro_batches(pools: Callable[[int], Ranks], kind: str, method: str) -> None:
    first, *others = pools(2).run(_in_parts, 2, kind, method)
    for other in others:
        assert_equal(other, first)
    assert_near(first, trained(0, 2, "alone", method)[0])


def _scaled(rank: int, size: int, kind: str, method: str) -> tuple[list[Tensor], float]:
    """With a scaler; in one step, the gradient of one rank is not finite."""
    buckets.BUCKET_BYTES = 700
    network = Network(kind, rank, size, heads_too=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    opt = network.start(METHODS[method](), both_phases(), scaler=scaler)
    opt.start_epoch(1)
    for step in range(6):
        factor = float("inf") if step == 2 and (rank == 1 or kind == "alone") else 1.0
        opt.step(lambda task, step=step, factor=factor: factor * network.loss(step, task))
    return network.state(), scaler.get_scale()


@pytest.mark.each
@pytest.mark.parametrize("method", ["ConnectionStrength", "PCGrad", "Sum"])
@pytest.mark.parametrize("kind", ["replicated", "fully_shard"])
def test_a_scaler_skips_the_step_on_all_ranks(
    pools: Callable[[int], Ranks], kind: str, method: str
) -> None:
    first, *others = pools(2).run(_scaled, 2, kind, method)
    for other in others:
        assert_equal(other, first)
    state, scale = _scaled(0, 2, "alone", method)
    assert scale < 1024
    assert first[1] == scale
    assert_near(first[0], state)


def _one_forward_pass(
    rank: int, size: int, kind: str, method: str, parts: int
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """`backward`, with the losses of one forward pass; in several parts that add up."""
    buckets.BUCKET_BYTES = 100
    torch.manual_seed(2)
    plain = Dense()
    network: nn.Module = plain
    options: dict[str, Any] = {}
    if kind == "replicated":
        options["process_group"] = dist.group.WORLD
    if kind.startswith("DDP"):
        network = nn.parallel.DistributedDataParallel(plain, gradient_as_bucket_view=True)
    if kind == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (size,))
        fully_shard(plain.body[0], mesh=mesh)
        fully_shard(plain, mesh=mesh)
    parameters = list(plain.parameters())
    sgd = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)
    opt = cs.MultiTaskOptimizer(network, sgd, TASKS, METHODS[method](), **options)
    batches = torch.randn(5, 12, 5)
    returned = []
    for batch in batches:
        mine = batch if kind == "alone" else batch.chunk(size)[rank]
        for n, x in enumerate(mine.chunk(parts), 1):
            losses = {task: loss / parts for task, loss in network(x).items()}
            if rank == 1:  # The order of the losses is that of no collective.
                losses = dict(reversed(losses.items()))
            returned.append(opt.backward(losses, update=n == parts))
        sgd.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
    return [p.detach().clone() for p in whole], returned


@pytest.mark.each
@pytest.mark.parametrize("method", ["CAGrad", "GradDrop", "MGDA", "Sum"])
@pytest.mark.parametrize("kind", ["replicated", "DDP", "fully_shard"])
@pytest.mark.parametrize("parts", [1, 2])
def test_losses_of_one_forward_pass(
    pools: Callable[[int], Ranks], kind: str, method: str, parts: int
) -> None:
    first, *others = pools(2).run(_one_forward_pass, 2, kind, method, parts)
    for other in others:
        assert_equal(other, first)
    assert_near(first[0], _one_forward_pass(0, 2, "alone", method, 1)[0])


class Gathers(TorchDispatchMode):
    """Counts the collectives in which `fully_shard` gathers parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function.namespace == "c10d" and "allgather" in str(function):
            self.count += any(t.is_floating_point() for t in tree_leaves(args[:2]))
        return function(*args, **(kwargs or {}))


def _gathers(rank: int, size: int, tasks: int) -> int:
    from torch.distributed.fsdp import fully_shard

    trunk = Dense()
    mesh = dist.init_device_mesh("cpu", (size,))
    for layer in (trunk.body[0], trunk.body[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(trunk, mesh=mesh)
    sgd = torch.optim.SGD(trunk.parameters(), lr=0.05)
    opt = cs.MultiTaskOptimizer(trunk, sgd, TASKS[:tasks], cs.PCGrad())
    for _ in range(3):
        losses = trunk(torch.ones(4, 5))
        with Gathers() as gathers:
            opt.backward({task: losses[task] for task in TASKS[:tasks]})
        sgd.step()
    return gathers.count


def test_parameters_are_gathered_once_for_all_backward_passes(
    pools: Callable[[int], Ranks],
) -> None:
    assert pools(2).run(_gathers, 2, 1) == pools(2).run(_gathers, 2, 3) == [2, 2]


def _forgotten(rank: int, size: int, kind: str) -> list[Tensor]:
    """Gradients that were dropped or not used, as with one process."""
    torch.manual_seed(2)
    trunk = Dense()
    options: dict[str, Any] = {}
    if kind == "replicated":
        options["process_group"] = dist.group.WORLD
    if kind == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        fully_shard(trunk, mesh=dist.init_device_mesh("cpu", (size,)))
    parameters = list(trunk.parameters())
    sgd = torch.optim.SGD(parameters, lr=0.05)
    opt = cs.MultiTaskOptimizer(trunk, sgd, TASKS, cs.PCGrad(), **options)
    x = torch.randn(3, 12, 5)
    mine = x if kind == "alone" else x.chunk(size, dim=1)[rank]
    for set_to_none in (True, False):
        opt.backward(trunk(mine[0]), update=False)
        sgd.zero_grad(set_to_none=set_to_none)
        opt.backward(trunk(mine[1]), update=False)
        with pytest.raises(RuntimeError, match="wait for their update"):
            sgd.step()
        opt.backward(trunk(mine[2]))
        with pytest.raises(RuntimeError, match=r"still in .grad"):
            opt.backward(trunk(mine[0]))
        sgd.step()
    opt.backward(trunk(mine[0]), update=False)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    with pytest.raises(RuntimeError, match="clip or unscale after the update"):
        opt.backward(trunk(mine[1]))
    with pytest.warns(UserWarning, match="has dropped the gradients of 1 calls"):
        opt.backward(trunk(mine[1]))
    sgd.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
    return [p.detach().clone() for p in whole]


@pytest.mark.parametrize("kind", ["replicated", "fully_shard"])
def test_gradients_that_are_dropped(pools: Callable[[int], Ranks], kind: str) -> None:
    first, *others = pools(2).run(_forgotten, 2, kind)
    for other in others:
        assert_equal(other, first)
    assert_near(first, _forgotten(0, 1, "alone"))


def test_methods_differ_on_this_network() -> None:
    """Else the other tests would show nothing."""
    states = {name: trained(0, 1, "alone", name)[0] for name in METHODS}
    for name, state in states.items():
        for other in states:
            if other < name:
                pairs = zip(state, states[other], strict=True)
                assert max(float((a - b).abs().max()) for a, b in pairs) > 1e-3, (name, other)


def _inside_ddp(rank: int, size: int, kind: str) -> Any:
    """DistributedDataParallel around the trunk and the heads together."""
    torch.manual_seed(0)
    plain = Whole()
    network: nn.Module = plain
    if size > 1:
        flags = {} if kind == "no group" else {kind: True}
        network = nn.parallel.DistributedDataParallel(plain, **flags)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    options = {} if size == 1 or kind == "no group" else {"process_group": dist.group.WORLD}
    with pytest.warns(UserWarning, match="missing on 2") if kind == "no group" else nullcontext():
        opt = cs.MultiTaskOptimizer(plain.trunk, sgd, TASKS, cs.PCGrad(), **options)
    x = torch.randn(4, 12, 5)
    try:
        for batch in x:
            mine = batch if size == 1 else batch.chunk(size)[rank]
            opt.step(lambda task, mine=mine: network(mine, task))
            if kind == "find_unused_parameters":
                network.require_backward_grad_sync = True  # As Lightning does after its step.
    except (RuntimeError, ValueError) as error:
        return str(error)
    return [p.detach().clone() for p in plain.parameters()]


def test_a_wrapper_around_trunk_and_heads(pools: Callable[[int], Ranks]) -> None:
    """`step` sees it in its first pass."""
    first, second = pools(2).run(_inside_ddp, 2, "find_unused_parameters")
    assert_equal(first, second)
    assert_near(first, _inside_ddp(0, 1, "alone"))
    for text in pools(2).run(_inside_ddp, 2, "static_graph"):
        assert re.match("DistributedDataParallel must be built without static_graph=True", text)
    for text in pools(2).run(_inside_ddp, 2, "no group"):
        assert re.match("process_group must be that of the DistributedDataParallel", text)


def _handed_over_plain(rank: int, size: int) -> list[Tensor]:
    """The trunk's own forward pass shows the wrapper around it; ranks have other tasks."""
    buckets.BUCKET_BYTES = 100
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 7))
    heads = nn.ModuleDict({task: nn.Linear(7, 3) for task in TASKS})
    network = plain if size == 1 else nn.parallel.DistributedDataParallel(plain)
    parameters = [*plain.parameters(), *heads.parameters()]
    sgd = torch.optim.SGD(parameters, lr=0.1)
    group = None if size == 1 else dist.group.WORLD
    opt = cs.MultiTaskOptimizer(plain, sgd, TASKS, cs.PCGrad(), process_group=group)
    for batch in torch.randn(6, 12, 5):
        losses = {}
        for n, part in enumerate(batch.chunk(2)):  # Each part has labels for some tasks.
            if size == 1 or n == rank:
                z = network(part)
                for task in TASKS[n : n + 2]:
                    loss = (heads[task](z) - TASKS.index(task)).square().mean()
                    losses[task] = (losses[task] + loss) / 2 if task in losses else loss
        opt.backward(losses)
        sgd.step()
    return [p.detach().clone() for p in parameters]


def test_a_wrapped_trunk_that_is_handed_over_plain(pools: Callable[[int], Ranks]) -> None:
    first, second = pools(2).run(_handed_over_plain, 2)
    assert_equal(first, second)
    assert_near(first, _handed_over_plain(0, 1))


def _wrapped_without_a_group(rank: int, size: int) -> str:
    plain = nn.Linear(3, 2)
    network = nn.parallel.DistributedDataParallel(plain)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="missing on 2 ranks"):
        opt = cs.MultiTaskOptimizer(plain, sgd, TASKS, cs.PCGrad())
    try:
        y = network(torch.ones(2, 3)).square().mean()
        opt.backward(dict.fromkeys(TASKS, y))
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_a_wrapper_without_a_group_in_backward(pools: Callable[[int], Ranks]) -> None:
    for text in pools(2).run(_wrapped_without_a_group, 2):
        assert text.startswith("process_group must be that of the DistributedDataParallel")


def _wrapped_for_two(rank: int, size: int) -> list[tuple[bool, bool]]:
    """Two optimizers on one wrapper, as in a cell of a notebook that is run twice."""
    network = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    sgd = torch.optim.SGD(network.parameters(), lr=0.1)
    found = []

    def note() -> None:
        found.append((network.require_backward_grad_sync, network.require_forward_param_sync))

    first = cs.MultiTaskOptimizer(network, sgd, TASKS, cs.PCGrad())
    second = cs.MultiTaskOptimizer(network, sgd, TASKS, cs.PCGrad())
    note()
    del first
    note()
    del second
    note()
    return found


def test_a_wrapper_is_switched_on_by_its_last_optimizer(pools: Callable[[int], Ranks]) -> None:
    for found in pools(2).run(_wrapped_for_two, 2):
        assert found == [(False, False), (False, False), (True, True)]


def _other_ranks(rank: int, size: int, wrapped: bool) -> str:
    """A group that is not the wrapper's."""
    groups = [dist.new_group([n]) for n in range(size)]
    plain = nn.Linear(3, 2)
    network = nn.parallel.DistributedDataParallel(plain)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    trunk = network if wrapped else plain
    try:
        opt = cs.MultiTaskOptimizer(trunk, sgd, TASKS, cs.PCGrad(), process_group=groups[rank])
        opt.step(lambda task: network(torch.ones(2, 3)).square().mean())
    except ValueError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_group_that_is_not_the_wrapper_s(pools: Callable[[int], Ranks], wrapped: bool) -> None:
    for rank, text in enumerate(pools(2).run(_other_ranks, 2, wrapped)):
        assert text.startswith("process_group must have the ranks of the DistributedDataParallel")
        assert text.endswith(f"around trunk, [0, 1], got [{rank}]")


def _with_frozen_garbage(rank: int, size: int) -> tuple[list[Tensor], list[Tensor], list[bool]]:
    """The network is fine-tuned plainly after the optimizer has gone."""
    torch.manual_seed(0)
    plain = Dense()
    network = nn.parallel.DistributedDataParallel(plain, find_unused_parameters=True)
    gc.freeze()
    gc.disable()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    opt = cs.MultiTaskOptimizer(network, sgd, TASKS, cs.PCGrad())
    x = torch.randn(4, 12, 5)
    for batch in x:
        mine = batch.chunk(size)[rank]
        opt.step(lambda task, mine=mine: network(mine)[task])
    trained = [p.detach().clone() for p in plain.parameters()]
    flags = [network.require_backward_grad_sync]
    del opt
    gc.enable()
    flags += [network.require_backward_grad_sync, network.require_forward_param_sync]
    for batch in x:
        sgd.zero_grad()
        mine = batch.chunk(size)[rank]
        sum(network(mine).values()).backward()
        sgd.step()
    return trained, [p.detach().clone() for p in plain.parameters()], flags


def test_a_wrapper_reduces_again_when_the_optimizer_is_gone(pools: Callable[[int], Ranks]) -> None:
    first, second = pools(2).run(_with_frozen_garbage, 2)
    assert_equal(first[:2], second[:2])
    assert first[2] == [False, True, True]


def _threads() -> int:
    return len([*Path("/proc/self/task").iterdir()])


def _groups_of_an_optimizer(rank: int, size: int, fails: bool) -> tuple[int, int, int]:
    """The threads before an optimizer, with it, and after it has gone; without a collection."""
    network = Network("replicated", rank, size)
    gc.collect()
    gc.disable()
    before = _threads()
    if fails:
        for _ in range(2):
            with pytest.raises(ValueError, match="layers must name"):
                network.start(METHODS["PCGrad"](), layers={"nowhere": None})
        return before, before, _threads()
    for _ in range(3):  # The groups of each are other ones, under other names.
        opt = network.start(METHODS["PCGrad"]())
        opt.step(partial(network.loss, 0))
        opt.report()
        during = _threads()
        del opt, network.opt
    gc.enable()
    return before, during, _threads()


@pytest.mark.parametrize("fails", [False, True])
def test_groups_end_with_their_optimizer(pools: Callable[[int], Ranks], fails: bool) -> None:
    for before, during, after in pools(3).run(_groups_of_an_optimizer, 3, fails):
        assert before == after
        assert fails or during > before


def _on_another_device(rank: int, size: int) -> list[Tensor]:
    """Messages stay on the hosts."""
    results = []
    for device in ("cpu", "meta"):
        network = Network("replicated", rank, size)
        torch.set_default_device(device)
        try:
            opt = network.start(METHODS["CAGrad"](), both_phases())
            opt.start_epoch(1)
            for step in range(3):
                opt.step(partial(network.loss, step))
        finally:
            torch.set_default_device("cpu")
        results.append(network.state())
    assert_equal(*results)
    return results[0]


def test_another_default_device(pools: Callable[[int], Ranks]) -> None:
    first, second = pools(2).run(_on_another_device, 2)
    assert_equal(first, second)


def _one_warning(rank: int, size: int) -> list[str]:
    """Ranks that no argument names, and those that one does."""
    said = []
    for kind in ("alone", "replicated", "DDP", "fully_shard"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Network(kind, rank, size).start(METHODS["PCGrad"]())
        said += [str(w.message) for w in caught if "process_group" in str(w.message)]
    return said


def test_ranks_that_nothing_names_are_warned(pools: Callable[[int], Ranks]) -> None:
    for said in pools(2).run(_one_warning, 2):
        assert len(said) == 1
        assert said[0].startswith("process_group= is missing on 2 ranks")


def _pickled(rank: int, size: int) -> str:
    opt = Network("replicated", rank, size).start(METHODS["PCGrad"]())
    with pytest.raises(TypeError) as caught:
        pickle.dumps(opt)
    return str(caught.value)


def test_an_optimizer_of_many_ranks_is_not_pickled(pools: Callable[[int], Ranks]) -> None:
    assert all("save its state_dict()" in text for text in pools(2).run(_pickled, 2))


class _InHalves(cs.Sum):
    """The plain sum, assigned in two calls."""

    def __init__(self) -> None:
        super().__init__(separate=True)

    def combine(self, gradients: cs.TaskGradients, layout: cs.Layout, step: cs.Step) -> None:
        reached = gradients.reached()
        updates = gradients.updates(reached)
        grads = gradients.of(reached)
        for n, update in enumerate(updates):
            of_tasks = [g for g in grads[n * len(TASKS) : (n + 1) * len(TASKS)] if g is not None]
            update.copy_(sum(of_tasks[1:], of_tasks[0]))
        gradients.assign(reached[:2])
        gradients.assign(reached[2:])


def _in_halves(rank: int, size: int, kind: str) -> list[Tensor]:
    states = []
    for method in (_InHalves(), cs.Sum()):
        network = Network(kind, rank, size)
        opt = network.start(method)
        opt.step(partial(network.loss, 0))
        local = (getattr(p.detach(), "_local_tensor", p.detach()) for p in network.parameters)
        states.append([p.clone() for p in local])
    return states


@pytest.mark.parametrize("kind", ["replicated", "fully_shard"])
def test_a_method_may_assign_in_several_calls(pools: Callable[[int], Ranks], kind: str) -> None:
    for halves, whole in pools(2).run(_in_halves, 2, kind):
        assert_near(halves, whole)
