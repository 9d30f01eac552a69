"""`backward(losses, features=z)` on several ranks, each with the features of its own samples."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from networks import TASKS, assert_equal, refused
from rank_networks import (
    BrokenError,
    Sent,
    assert_trains_as_one_process,
    conflicting_loss,
    distributed,
    names_of,
    on_ranks,
    optimizer_on_ranks,
    part_of_this_rank,
    shard,
    whole_copies,
)
from ranks import DEVICE, Pools
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

import cs_kernels as cs
from cs_kernels.ranks import buckets
from cs_kernels.ranks.strategy import RankError

pytestmark = pytest.mark.ranks

METHODS: dict[str, Callable[[], cs.Method]] = {
    "PCGrad": partial(cs.PCGrad, seed=3),
    "PCGrad-layer": partial(cs.PCGrad, seed=3, groups="layer"),
    "GradVac-layer": partial(cs.GradVac, beta=0.5, groups="layer"),
    "CAGrad": cs.CAGrad,
    "DBMTL": cs.DBMTL,
    "MGDA": partial(cs.MGDA, "loss+"),
    "NashMTL": partial(cs.NashMTL, update_every=2),
    "Protect": partial(cs.Protect, TASKS[0]),
    "SAGO": partial(cs.SAGO, TASKS[0]),
    "UPGrad": cs.UPGrad,
    "Sum": cs.Sum,
}
SIZES = {2: (7, 5), 3: (5, 4, 3), 4: (3, 4, 2, 3)}
"""Each rank's number of samples, by the number of ranks."""


class Trunk(nn.Module):
    """A trunk with a stem and two features."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(5, 13), nn.Tanh())
        self.first = nn.Linear(13, 7)
        self.second = nn.Linear(13, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.stem(x)
        return torch.tanh(self.first(y)), self.second(y).exp()


class Whole(nn.Module):
    """The trunk with heads on both features; the last task uses only the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.heads = nn.ModuleDict(
            {t: nn.ModuleList([nn.Linear(7, 2), nn.Linear(4, 2)]) for t in TASKS}
        )
        self.unused = nn.Parameter(torch.ones(3))

    def outputs(self, features: Sequence[Tensor]) -> dict[str, Tensor]:
        found = {}
        for task in TASKS:
            pairs = [*zip(self.heads[task], features, strict=True)][task == TASKS[-1] :]
            outputs = [head(z) for head, z in pairs]
            found[task] = sum(outputs[1:], outputs[0])
        return found

    def forward(self, x: Tensor) -> tuple[Sequence[Tensor], dict[str, Tensor]]:
        features = self.trunk(x)
        return features, self.outputs(features)


class Network:
    """A network on ranks; `kind` says how the trunk and, if named, its heads are distributed."""

    def __init__(
        self,
        kind: str,
        rank: int,
        size: int,
        method: cs.Method,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        buckets.BUCKET_BYTES = 300  # Small enough for several buckets.
        torch.manual_seed(1)
        self.alone, self.rank, self.sizes = kind == "alone", rank, SIZES[size]
        self.plain = Whole().to(dtype)
        kind, _, more = kind.partition(" with ")
        whole, trunk = self.plain, self.plain.trunk
        if more == "sharded heads":
            shard(*(layer for of_task in whole.heads.values() for layer in of_task))
        shared = whole if more == "heads" else trunk
        layers = [trunk.stem[0], trunk.first, *([trunk] if more == "heads" else [])]
        self.network, group = distributed(shared, kind, *layers)
        self.run = self.network if more == "heads" else self._run
        self.x = torch.randn(6, sum(self.sizes), 5, dtype=dtype)
        self.targets = 2 * torch.randn(6, len(TASKS), sum(self.sizes), 2, dtype=dtype)
        parameters = [*trunk.parameters(), *whole.heads.parameters()]
        others = [*options.get("weighting", cs.EqualWeights()).parameters(), self.plain.unused]
        self.optimizers = [
            torch.optim.SGD(some, lr=0.05, momentum=0.9, foreach=False)
            for some in (parameters, others)
        ]
        given = self.network, self.optimizers, TASKS, method
        self.opt = cs.MultiTaskOptimizer(*given, **group, **options)

    def _run(self, x: Tensor) -> tuple[Sequence[Tensor], dict[str, Tensor]]:
        features = self.network(x)
        return features, self.plain.outputs(features)

    def losses(
        self, step: int, labels: Sequence[Sequence[str]] | None = None
    ) -> tuple[Sequence[Tensor], dict[str, Tensor]]:
        """The features, and each task's mean loss over the ranks that have its labels."""
        ranks = range(len(self.sizes)) if self.alone else [self.rank]
        labels = labels or [TASKS] * len(self.sizes)
        x, targets = self.x[step].split(self.sizes), self.targets[step].split(self.sizes, dim=1)
        features, outputs = self.run(torch.cat([x[r] for r in ranks]))
        losses = {}
        for n, task in enumerate(TASKS):
            parts = zip(ranks, outputs[task].split([self.sizes[r] for r in ranks]), strict=True)
            means = [(y - targets[r][n]).square().mean() for r, y in parts if task in labels[r]]
            if means:
                losses[task] = torch.stack(means).mean()
        return features, losses

    def backward(self, step: int, labels: Sequence[Sequence[str]] | None = None) -> Any:
        features, losses = self.losses(step, labels)
        if not losses:  # Without losses, only the number of features counts.
            features = [torch.empty(0)] * 2
        return self.opt.backward(losses, features=features)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state(self) -> list[Tensor]:
        return whole_copies(self.plain.parameters())


def _facts(opt: cs.MultiTaskOptimizer) -> list[Tensor]:
    """The numbers of a report, and of the states of the method and the weighting."""
    report = opt.report()
    states = opt.method.state_dict(), opt.weighting.state_dict()
    leaves = tree_leaves((report.gramian, report.task_weights, states))
    return [x for x in leaves if isinstance(x, Tensor)]


def _trained(
    rank: int, size: int, kind: str, method: str, labels: Sequence[Any] = (None,) * 6
) -> list[Any]:
    network = Network(kind, rank, size, METHODS[method]())
    found = []
    for step, of_ranks in enumerate(labels):
        found += [network.backward(step, of_ranks), _facts(network.opt)]
        network.step()
    return [*found, network.state()]


def _with_some_labels(rank: int, size: int, kind: str, method: str) -> list[Any]:
    """Ranks lack some or all labels; the last task's loss needs only one of the features."""
    first = [TASKS, TASKS[1:], [], TASKS[:1]][:size]
    second = [TASKS[2:], [], TASKS[:1], TASKS[1:]][:size]
    labels = first, first, second, second, first[::-1], [TASKS] * size
    return _trained(rank, size, kind, method, labels)


def _scaled(rank: int, size: int, kind: str, method: str) -> list[Any]:
    """All ranks skip the step in which one rank has an infinite loss."""
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    weighting = cs.UncertaintyWeights(dict.fromkeys(TASKS, "regression"))
    options = {"weighting": weighting, "scaler": scaler}
    network = Network(kind, rank, size, METHODS[method](), **options)
    found = []
    for step in range(6):
        if step == 2 and rank in (1, 0 if network.alone else 1):
            network.targets[step, 0] = float("inf")
        losses = network.backward(step)
        found += [losses, _facts(network.opt)] if step != 2 else []
        for optimizer in network.optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512
    return [*found, network.state(), whole_copies(weighting.parameters())]


KINDS = ["replicated", "DDP", "DDP with heads", "fully_shard", "fully_shard with heads"]
CASES = [
    *((_trained, kind, 2) for kind in (*KINDS, "fully_shard with sharded heads")),
    *((_trained, kind, 3) for kind in ("replicated", "fully_shard")),
    (_trained, "fully_shard 2-D", 4),
    *((_with_some_labels, "replicated", size) for size in (2, 3, 4)),
    (_with_some_labels, "DDP with heads", 2),
    *((_scaled, kind, 2) for kind in ("replicated", "fully_shard with sharded heads")),
]


@pytest.mark.each
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES, ids=names_of(CASES))
def test_ranks_train_as_one_process(pools: Pools, case: Any, method: str) -> None:
    assert_trains_as_one_process(pools, case, method)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, alone={"kind": "alone"}, rtol=1e-13)
def test_an_update_in_float64_equals_the_whole_batchs(rank: int, kind: str) -> list[Tensor]:
    network = Network(kind, rank, 2, cs.UPGrad(), torch.float64)
    network.backward(0)
    return whole_copies(1e8 * p.grad for p in network.plain.parameters() if p.grad is not None)


@pytest.mark.parametrize("kind", ["replicated", "fully_shard"])
@on_ranks(2)
def test_the_trunk_is_reduced_once(rank: int, kind: str) -> None:
    """A step also sends K x K products, the heads' gradients, and twice 2 K + 2 numbers."""
    network = Network(kind, rank, 2, cs.PCGrad())
    for step in range(2):
        network.backward(step)
        network.step()
    with Sent() as sent:
        network.backward(2)
    tasks, trunk = len(TASKS), [*network.plain.trunk.parameters()]
    small = tasks * tasks + 2 * (2 * tasks + 2)
    heads = sum(p.numel() for p in network.plain.heads.parameters() if p.grad is not None)
    if kind == "replicated":  # Buckets have a little padding.
        buckets = sent.numbers["allreduce"] - 4
        padding = sent.elements["allreduce"] - small - heads - sum(p.numel() for p in trunk)
        assert sent.numbers.total() == buckets + 4 > 5
        assert 0 <= padding < 8 * buckets
    else:
        rows = sum(-(-len(p) // 2) * 2 * p.shape[1:].numel() for p in trunk)
        assert sent.elements["allreduce"] == small + heads
        assert sent.elements["reduce_scatter_base"] == rows
    # Before the passes, after the heads' passes, and after the trunk's pass.
    assert sent.messages == 3


@on_ranks(2)
def test_shards_of_heads_in_the_trunk_are_gathered_once_for_all_passes(rank: int) -> None:
    """Each of the four parameter groups is gathered once forward and once backward."""
    network = Network("fully_shard with heads", rank, 2, cs.PCGrad())
    for step in range(3):
        with Sent() as sent:
            network.backward(step)
        network.step()
    assert sent.numbers["allgather_base"] == 8


@pytest.mark.parametrize("kind", ["replicated", "fully_shard"])
@on_ranks(2, alone={"kind": "alone"}, rtol=1e-5)
def test_both_ways_in_turn(rank: int, kind: str) -> list[Any]:
    network, found = Network(kind, rank, 2, cs.CAGrad()), []
    for step in range(6):
        if step % 3 == 0:
            found.append(network.backward(step))
        else:
            found.append(network.opt.backward(network.losses(step)[1]))
        found.append(_facts(network.opt))
        network.step()
    return [*found, network.state()]


@pytest.mark.parametrize("reentrant", [None, False, True])
@on_ranks(2)
def test_statistics_that_both_passes_change(rank: int, reentrant: bool | None) -> list[Tensor]:
    """With checkpointing, a trunk runs again in its backward pass."""
    buckets.BUCKET_BYTES = 100
    trunk = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    heads = nn.ModuleDict({task: nn.Linear(4, 2) for task in TASKS})
    opt = optimizer_on_ranks(trunk, cs.MGDA(), heads=[heads])
    for batch in torch.randn(4, 12, 5):
        x = part_of_this_rank(batch).requires_grad_()
        z = trunk(x) if reentrant is None else checkpoint(trunk, x, use_reentrant=reentrant)
        losses = {t: conflicting_loss(heads[t](z), t) for t in TASKS[: 3 - rank]}
        opt.backward(losses, features=z)
        opt.optimizer.step()
    return [*whole_copies([*trunk.parameters(), *heads.parameters()]), *trunk.buffers()]


@on_ranks(2)
def test_a_resumed_run_is_bit_equal(rank: int) -> list[Tensor]:
    def train(states: Sequence[Any], steps: range) -> tuple[Network, list[Any]]:
        network = Network("replicated", rank, 2, cs.NashMTL(update_every=2))
        parts = [network.plain, *network.optimizers, network.opt]
        for part, state in zip(parts, states, strict=bool(states)):
            part.load_state_dict(state)
        for step in steps:
            network.backward(step)
            network.step()
        return network, [copy.deepcopy(part.state_dict()) for part in parts]

    _, states = train((), range(3))
    of_ranks: list[Any] = [None, None]
    dist.all_gather_object(of_ranks, tree_map_only(Tensor, Tensor.tolist, states[-1]))
    assert of_ranks[0] == of_ranks[1]
    resumed, straight = train(states, range(3, 6))[0].state(), train((), range(6))[0].state()
    assert_equal(resumed, straight)
    return straight


RESETS = pytest.mark.skipif(torch.__version__ < "2.13", reason="fully_shard cannot be reset")


@pytest.mark.parametrize(
    "kind", ["replicated", pytest.param("fully_shard with sharded heads", marks=RESETS)]
)
@pytest.mark.parametrize("where", ["heads.normals.1", "trunk.stem"])
@on_ranks(2)
def test_a_pass_that_fails(rank: int, kind: str, where: str) -> list[Tensor]:
    """The pass fails on one replica or on all shards; in the trunk, after buckets were sent."""
    network, twin = (Network(kind, rank, 2, cs.PCGrad()) for _ in range(2))
    error, message = RankError, r"^rank 1 failed in step \d: BrokenError: in a hook"
    if fails := rank == 1 or kind != "replicated":
        error, message = BrokenError, "^in a hook"

    def fail(grad: Tensor) -> None:
        raise BrokenError("in a hook")

    def watch(module: nn.Module, _: Any, y: Tensor) -> None:
        if fails:
            y.register_hook(fail)

    for step in range(4):
        if step in (0, 2):
            hook = network.plain.get_submodule(where).register_forward_hook(watch)
            with refused(network.state, error, message):
                network.backward(step)
            assert all(p.grad is None for p in network.plain.parameters())
            hook.remove()
        for one in (network, twin):
            one.backward(step)
            one.step()
    assert_equal(network.state(), twin.state())
    return network.state()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("no graph", r"features must be outputs of trunk .* graph, but features\[0\]"),
        ("one", r"number of features: rank 0 has 2, rank 1 has 1$"),
        ("none", r"number of features: rank 0 has 2, rank 1 has 0$"),
    ],
)
@on_ranks(2)
def test_features_that_differ_between_ranks(rank: int, given: str, message: str) -> None:
    """All ranks raise before anything is changed."""
    network = Network("replicated", rank, 2, cs.PCGrad())
    network.backward(0)
    network.step()
    features, outputs = network.run(network.x[1])
    losses = {task: y.square().mean() for task, y in outputs.items()}
    error = RankError
    if rank == 1 and given == "no graph":
        error, features = ValueError, [features[0].detach(), features[1]]
    elif rank == 1:
        losses, features = {TASKS[2]: losses[TASKS[2]]}, features[1] if given == "one" else None
    before = [p.grad for p in network.plain.parameters()]
    with refused(network.state, error, message):
        network.opt.backward(losses, features=features)
    assert all(p.grad is g for p, g in zip(network.plain.parameters(), before, strict=True))
    network.backward(1)


@pytest.mark.parametrize("kind", ["replicated", "fully_shard"])
@on_ranks(2)
def test_unsupported_with_features_on_ranks(rank: int, kind: str) -> None:
    network = Network(kind, rank, 2, cs.GradDrop())
    with refused(network.state, ValueError, r"method must not draw .*several ranks.*GradDrop\("):
        network.backward(0)
    if kind == "fully_shard":
        network = Network(kind, rank, 2, cs.PCGrad())
        with refused(network.state, RankError, r"same tasks on all ranks .*: rank 1 lacks"):
            network.backward(0, [TASKS, TASKS[1:]])
