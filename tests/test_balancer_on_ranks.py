"""GradientBalancer: several ranks against one process, and the communication of its steps."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from rank_networks import Sent, part_of_this_rank, shard, whole_copies
from ranks import Pools
from torch import Tensor, nn

import cs_kernels as cs

pytestmark = pytest.mark.ranks

TASKS = ["a", "b", "c"]
_STEPS = 4


def _trained(rank: int, kind: str, method: str = "NashMTL") -> dict[str, object]:
    """Trains; returns the state, weights, products, and how many elements each step sends.

    Task "c" is absent in step 1.
    """
    torch.manual_seed(1)
    trunk = nn.Sequential(nn.Linear(6, 41), nn.Tanh(), nn.Linear(41, 30))
    network = nn.ModuleDict({"trunk": trunk, **{task: nn.Linear(30, 1) for task in TASKS}})
    whole: nn.Module = _Whole(network.double())
    if kind == "DDP":
        whole = nn.parallel.DistributedDataParallel(whole, find_unused_parameters=True)
    if kind.startswith("fully_shard"):
        shard(trunk[0], trunk[2], whole, replicas=kind.endswith("2-D"))
    # foreach, the default on a GPU, refuses a mix of sharded and whole tensors.
    sgd = torch.optim.SGD(network.parameters(), 1e-3, momentum=0.9, foreach=False)
    balancer = cs.GradientBalancer(trunk.parameters(), TASKS, getattr(cs, method)(), sgd, every=2)
    sent = []
    for step in range(_STEPS):
        tasks = TASKS[:2] if step == 1 else TASKS
        sgd.zero_grad()
        collectives = Sent()
        for n, task in enumerate(tasks):
            x = part_of_this_rank(torch.randn(12, 6, dtype=torch.float64))
            last = task == tasks[-1]
            waits = kind == "DDP" and not last
            without = whole.no_sync() if waits else contextlib.nullcontext()  # type: ignore[operator]
            with collectives, without, balancer.task(task):
                ((whole(x, task) - n).square().mean() * 10**n).backward()
        with collectives:
            sgd.step()
        sent.append(sum(collectives.elements.values()))
    report = balancer.report()
    return {
        "state": whole_copies(network.parameters()),
        "weights": report.weights,
        "gramian": report.gramian,
        "counts": report.counts,
        "sent": sent,
    }


class _Whole(nn.Module):
    """The module that DistributedDataParallel wraps."""

    def __init__(self, network: nn.ModuleDict) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, task: str) -> Tensor:
        y: Tensor = self.network[task](self.network["trunk"](x))
        return y


@pytest.mark.parametrize("method", ["NashMTL", "GradVac"])
@pytest.mark.parametrize(
    ("kind", "size"), [("DDP", 2), ("DDP", 3), ("fully_shard", 2), ("fully_shard 2-D", 4)]
)
def test_ranks_train_as_one_process(pools: Pools, kind: str, size: int, method: str) -> None:
    """Results agree up to the rounding of sketches; weights have the same bits on all ranks."""
    found = pools(size).agreed(_trained, kind, method)
    expected = pools(1).agreed(_trained, "alone", method)
    for name in ("weights", "gramian", "counts"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found["state"], expected["state"], rtol=1e-4, atol=1e-7)


def test_what_a_step_sends(pools: Pools) -> None:
    """With DDP, a step sends DDP's own reduction, plus sketches if it solves."""
    found = pools(2).agreed(_trained, "DDP")
    numel = sum(p.numel() for p in found["state"])
    sketches = 3 * 2048  # 2,048 bins for the trunk's 1,547 parameters.
    between, solves = found["sent"][2:]
    assert between <= 1.05 * numel
    assert between + sketches <= solves <= 1.05 * numel + sketches + len(TASKS)


def _uneven(rank: int, how: str) -> tuple[Tensor, Tensor]:
    """Products and weights after training; in one step, one rank has no block, or raises."""
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    sgd = torch.optim.SGD([p], lr=0.0)
    balancer = cs.GradientBalancer([p], ["a", "b"], cs.NTKMTL(), sgd)
    for step in range(3):
        for task in balancer.tasks:
            grad = torch.randn(3, dtype=torch.float64) + rank
            if step == 1 and rank == 1 and how == "absent":
                continue
            with contextlib.suppress(ZeroDivisionError), balancer.task(task):
                (p * grad).sum().backward()
                if step == 1 and rank == 1:
                    raise ZeroDivisionError
        weights = torch.stack([*balancer.weights.values()])
        sgd.step()
        if step == 1 and how == "exception":
            assert torch.equal(torch.stack([*balancer.weights.values()]), weights)
        p.grad = None
    return balancer.gramian, torch.stack([*balancer.weights.values()])


def test_ranks_that_differ_in_a_step(pools: Pools) -> None:
    """A block that raises counts like an absent one."""
    pairs = [pools(2).agreed(_uneven, how) for how in ("absent", "exception")]
    torch.testing.assert_close(pairs[0], pairs[1])


def _bad_calls(rank: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    network = nn.Linear(4, 3)
    balancer = cs.GradientBalancer(network.parameters(), TASKS)
    with pytest.raises(RuntimeError, match=r"backward\(losses\) must run in one process, got 2"):
        balancer.backward({"a": network(torch.ones(2, 4)).sum()})
    tasks = TASKS[::-1] if rank else TASKS
    with pytest.raises(ValueError, match=r"all ranks must use the same tasks, .*and rank 1 uses"):
        cs.GradientBalancer(nn.Linear(2, 2).parameters(), tasks)
    with pytest.raises(TypeError, match=r"must be in one process to be copied"):
        balancer.__getstate__()
    shard(network)
    with pytest.raises(ValueError, match="process_group must be None after fully_shard"):
        cs.GradientBalancer(network.parameters(), TASKS, process_group=dist.group.WORLD)
    whole = nn.Linear(4, 4)
    mesh = dist.init_device_mesh(next(whole.parameters()).device.type, (2,))
    split = parallelize_module(whole, mesh, ColwiseParallel())
    with pytest.raises(ValueError, match="must be sharded by fully_shard alone"):
        cs.GradientBalancer(split.parameters(), TASKS)
    mixed = [*network.parameters(), nn.Parameter(torch.ones(3))]
    with pytest.raises(
        ValueError, match="must all be sharded on the same mesh, or all be whole, got"
    ):
        cs.GradientBalancer(mixed, TASKS)


def test_bad_calls(pools: Pools) -> None:
    pools(2).run(_bad_calls)
