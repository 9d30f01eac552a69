"""The exchange of gradients between ranks, tested in a single process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from networks import AB, assert_equal, optimizer_of, sgd_of
from rank_networks import distributed, shard, whole_copies
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cs_kernels as cs
from cs_kernels.ops.reference.phase2 import channel_rows
from cs_kernels.ranks import buckets
from cs_kernels.ranks.buckets import Buckets
from cs_kernels.ranks.pieces import channel_array, pieces_of
from cs_kernels.torch_internals.autograd import current_pass

pytestmark = pytest.mark.loop


@given(
    groups=st.integers(1, 3),
    outer=st.integers(1, 3),
    channels=st.integers(1, 4),
    inner=st.integers(1, 3),
    data=st.data(),
)
def test_pieces_have_the_channels_of_the_weight(
    groups: int, outer: int, channels: int, inner: int, data: st.DataObject
) -> None:
    """Every element of a range is in one piece, in the row of its channel."""
    weight = torch.arange(groups * outer * channels * inner).view(groups * outer, channels, inner)
    channel_of = torch.empty(weight.numel(), dtype=torch.int64)
    for channel, row in enumerate(channel_rows(weight, 1, groups)):
        channel_of[row] = channel
    array = channel_array(weight.shape, weight.stride(), 1, groups)
    assert array == (groups, outer, channels, inner)
    start = data.draw(st.integers(0, weight.numel()))
    stop = data.draw(st.integers(start, weight.numel()))
    pieces = pieces_of(start, stop, array)
    assert len(pieces) <= 7
    found = start
    for piece in pieces:
        of_piece = piece.of(weight.flatten()[start:], start)
        rows = channel_rows(of_piece, piece.out_channel_dim, piece.groups)
        assert len(rows) == piece.channels
        for channel, row in enumerate(rows, piece.first_channel):
            assert (channel_of[row] == channel).all()
        assert of_piece.flatten().tolist() == list(range(found, found + of_piece.numel()))
        found += of_piece.numel()
    assert found == stop


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("transposed", [False, True])
def test_buckets_keep_the_memory_format(
    group: dist.ProcessGroup, memory_format: torch.memory_format, transposed: bool
) -> None:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    weight = kind(6, 4, 3, groups=2).to(memory_format=memory_format).weight
    made = Buckets({3: weight}, group)
    assert made.views[3].stride() == weight.stride()
    made.views[3].copy_(weight.detach())
    dim, groups = (1, 2) if transposed else (0, 1)
    rows = channel_rows(weight.detach(), dim, groups)
    pieces = pieces_of(0, weight.numel(), made.array(3, dim, groups))
    assert sum(piece.channels for piece in pieces) == len(rows)
    for piece in pieces:
        found = channel_rows(piece.of(made.flat[0], 0), piece.out_channel_dim, piece.groups)
        expected = rows[piece.first_channel : piece.first_channel + piece.channels]
        assert_equal(found.sort(1).values, expected.sort(1).values)


@pytest.mark.parametrize("stored", [torch.contiguous_format, torch.channels_last], ids=str)
def test_kept_gradients_of_any_layout_are_flattened_in_the_order_of_the_bucket(
    group: dist.ProcessGroup, stored: torch.memory_format
) -> None:
    weight = nn.Conv2d(6, 4, 3).to(memory_format=torch.channels_last).weight
    grad = torch.randn(weight.shape).to(memory_format=stored)
    made = Buckets({0: weight}, group)
    made.views[0].copy_(grad)
    assert_equal(made.flat_of(0, grad), made.flat[0][: weight.numel()])


class Deep(nn.Module):
    """A chain of layers, one of which may run twice, with or without checkpointing."""

    def __init__(self, again: int, reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5))
        self.again, self.reentrant, self.twice = again, reentrant, True

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.layers, *[self.layers[self.again]] * self.twice]:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x

    def loss(self, task: str) -> Tensor:
        x = torch.linspace(-1, 1, 18, dtype=self.layers[0][0].weight.dtype)
        return (self(x.view(3, 6).requires_grad_()) - int(task == "b")).square().mean()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The buckets that were sent, and whether this was during a backward pass."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 400)  # One layer per bucket.
    result: list[tuple[int, bool]] = []
    send = Buckets.send

    def noted(self: Buckets, bucket: int, parts: Any) -> None:
        result.append((bucket, current_pass() >= 0))
        send(self, bucket, parts)

    monkeypatch.setattr(Buckets, "send", noted)
    return result


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("method", [cs.PCGrad(), cs.Sum()], ids=repr)
def test_buckets_are_sent_during_the_backward_pass(
    group: dist.ProcessGroup,
    sent: list[tuple[int, bool]],
    reentrant: bool | None,
    method: cs.Method,
) -> None:
    """From a task's second pass on, buckets are sent early; one rank trains as without a group."""
    states = []
    for options in ({}, {"process_group": group}):
        torch.manual_seed(0)
        trunk = Deep(0, reentrant).double()
        opt = optimizer_of(trunk, method, **options)
        for _ in range(3):
            sent.clear()
            opt.step(trunk.loss)
        states.append(whole_copies(trunk.parameters()))
    torch.testing.assert_close(*states, rtol=1e-12, atol=1e-14)
    rounds = 1 if isinstance(method, cs.Sum) else 2
    assert [bucket for bucket, _ in sent] == [0, 1, 2, 3, 4] * rounds
    assert all(early for bucket, early in sent if bucket < 4)


def test_buckets_are_sent_during_the_pass_from_the_features(
    group: dist.ProcessGroup, sent: list[tuple[int, bool]]
) -> None:
    trunk = Deep(0, None).double()
    opt = optimizer_of(trunk, cs.MGDA(), process_group=group)
    for _ in range(3):
        sent.clear()
        opt.optimizer.zero_grad()
        z = trunk(torch.linspace(-1, 1, 18).double().view(3, 6))
        opt.backward({"a": z.square().mean(), "b": (z - 1).square().mean()}, features=z)
    assert [bucket for bucket, early in sent if early] == [0, 1, 2, 3]


def test_a_layer_that_runs_twice_from_time_to_time(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 170)
    states = []
    for options in ({}, {"process_group": group}):
        torch.manual_seed(0)
        trunk = Deep(-1, reentrant=True).double()
        opt = optimizer_of(trunk, cs.PCGrad(), **options)
        for trunk.twice in (True, False, True):
            opt.step(trunk.loss)
        states.append(whole_copies(trunk.parameters()))
    torch.testing.assert_close(*states, rtol=1e-12, atol=1e-14)


def test_a_gradient_that_comes_after_it_was_sent_is_refused(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reentrant checkpointing accumulates a layer's gradient once per run of the layer."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 170)
    trunk = Deep(-1, reentrant=True)  # The last layer's bucket is sent first.
    opt = optimizer_of(trunk, cs.PCGrad(), process_group=group)
    trunk.twice = False
    opt.step(trunk.loss)
    trunk.twice = True
    before = whole_copies(trunk.parameters())
    with pytest.raises(RuntimeError, match="must not change after they were sent"):
        opt.step(trunk.loss)
    assert_equal([*trunk.parameters()], before)
    opt.step(trunk.loss)
    assert not torch.equal(trunk.layers[0][0].weight, before[0])


def test_arguments(group: dist.ProcessGroup) -> None:
    trunk = nn.Linear(3, 3)
    with pytest.raises(TypeError, match=r"process_group must be a process group .*, got 'gloo'"):
        optimizer_of(trunk, cs.PCGrad(), process_group="gloo")
    opt = optimizer_of(trunk, cs.PCGrad(), process_group=group)
    with pytest.raises(ValueError, match="process_group must be None for a captured step"):
        opt.capture(lambda task: trunk(torch.ones(2, 3)).sum())
    with pytest.raises(ValueError, match="tasks must name at least one task"):
        opt.step(lambda task: trunk(torch.ones(2, 3)).sum(), tasks=[])
    with pytest.raises(ValueError, match="batched must be False with a process group, got True"):
        opt.backward({task: trunk(torch.ones(2, 3)).sum() for task in "ab"}, batched=True)


def test_fsdp1_is_refused(group: dist.ProcessGroup) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    class Wrapped(FullyShardedDataParallel):
        """Skips the constructor of FSDP, which needs an accelerator."""

        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self.inner = module

        def __getattr__(self, name: str) -> Any:
            return nn.Module.__getattr__(self, name)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    layer = nn.Linear(3, 3)
    sgd = sgd_of(layer)
    message = r"FullyShardedDataParallel \(FSDP1\).*fully_shard"
    for trunk in (Wrapped(layer), nn.Sequential(Wrapped(layer))):
        with pytest.raises(TypeError, match=message):
            cs.MultiTaskOptimizer(trunk, sgd, AB, cs.PCGrad())
    with pytest.raises(TypeError, match=message):
        optimizer_of(layer, cs.PCGrad()).step(lambda task: Wrapped(layer)(torch.ones(2, 3)).sum())


def test_shards_that_do_not_fit_are_refused(group: dist.ProcessGroup) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    trunk = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    shard(trunk[1])
    with pytest.raises(ValueError, match=r"sharded as a whole, but 0.weight is not, while 1"):
        optimizer_of(trunk, cs.PCGrad())
    shard(trunk)
    with pytest.raises(ValueError, match="process_group must be None for a trunk that is sharded"):
        optimizer_of(trunk, cs.PCGrad(), process_group=group)
    other = nn.Linear(3, 3, bias=False)
    mesh = dist.init_device_mesh("cpu", (1,))
    fully_shard(other, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
    with pytest.raises(ValueError, match=r"dimension 0, .*got weight with \(Shard\(dim=1\)"):
        optimizer_of(other, cs.PCGrad())
    sgd, scaler = sgd_of(trunk, nn.Linear(3, 1)), torch.amp.GradScaler("cpu")
    with pytest.raises(
        ValueError, match="both sharded and other parameters with a scaler, got SGD"
    ):
        cs.MultiTaskOptimizer(trunk, sgd, AB, cs.PCGrad(), scaler=scaler)


def test_the_graph_of_a_loss_of_shards_is_checked(group: dist.ProcessGroup) -> None:
    trunk, head = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 1)
    shard(trunk)
    opt, x = optimizer_of(trunk, cs.PCGrad()), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"must hold every parameter .* but lacks Linear"):
        opt.step(lambda task: head(trunk(x)).sum())
    opt.optimizer.add_param_group({"params": head.parameters()})
    for _ in range(2):
        opt.step(lambda task: head(trunk(x)).sum())
    trunk(x).square().sum().backward()
    with pytest.raises(
        RuntimeError, match=r"0.weight \(and 1 more\) come from a loss outside this"
    ):
        opt.step(lambda task: trunk(x).sum())
    opt = cs.MultiTaskOptimizer(trunk, opt.optimizer, AB, cs.PCGrad())
    with pytest.raises(ValueError, match="depend on a parameter of trunk, but the loss of 'a'"):
        opt.step(lambda task: head(x.new_ones(1, 4)).sum())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", [cs.CAGrad(), cs.GradDrop(), cs.Sum()], ids=repr)
def test_one_rank_trains_as_no_group(
    group: dist.ProcessGroup, dtype: torch.dtype, method: cs.Method
) -> None:
    """The trunk contains the heads, and a layer that no task reaches."""
    states = []
    for options in ({}, {"process_group": group}):
        torch.manual_seed(0)
        trunk = nn.ModuleDict({n: nn.Linear(6, 6) for n in ("body", *AB, "unused")}).to(dtype)
        sgd = torch.optim.SGD(trunk.parameters(), lr=0.1, weight_decay=0.1)
        opt = cs.MultiTaskOptimizer(trunk, sgd, AB, method, **options)
        x = torch.randn(4, 6).to(dtype)
        for _ in range(3):
            losses = opt.step(lambda task: trunk[task](trunk["body"](x)).square().mean())
        states.append([*whole_copies(trunk.parameters()), *losses.values()])
    assert_equal(*states)


@pytest.mark.parametrize("first", [True, False])
def test_sync_batchnorm_can_be_converted_before_or_after(
    group: dist.ProcessGroup, first: bool
) -> None:
    network: nn.Module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    x = torch.randn(2, 3, 5, 5)
    expected = network.eval()(x)
    conversions = [
        lambda network: nn.SyncBatchNorm.convert_sync_batchnorm(network, group),
        lambda network: cs.nn.convert_task_batchnorm(network, AB),
    ]
    for convert in conversions if first else reversed(conversions):
        network = convert(network)
    for task in AB:
        norm = network[1].of(task)
        assert isinstance(norm, nn.SyncBatchNorm)
        assert norm.process_group is group
        with cs.nn.active_task(network, task):
            assert_equal(network(x), expected)
    cs.nn.add_task(network, "c", like="a")
    assert isinstance(cs.nn.extract_task(network, "c")[1], nn.SyncBatchNorm)
    opt = optimizer_of(network, process_group=group)
    opt.step(lambda task: network(x).square().mean())
    assert opt.coverage().prioritized == {"0.weight": "1"}


@pytest.mark.kernel("cuda")
@pytest.mark.skipif(not dist.is_nccl_available() or not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", ["replicated", "fully_shard"])
@pytest.mark.parametrize(
    "method", [cs.ConnectionStrength(), cs.PCGrad(), cs.GradDrop(), cs.Sum()], ids=repr
)
def test_one_rank_on_a_gpu_trains_as_no_group(tmp_path: Path, method: cs.Method, kind: str) -> None:
    """With NCCL, which allows one rank per GPU, in both phases."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    states = []
    for shared in ("alone", kind):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 5, 3))
        trunk, options = distributed(cs.nn.convert_task_batchnorm(plain, AB).cuda(), shared)
        opt = optimizer_of(trunk, method, cs.Mixed(2, seed=3, draw="step"), **options)
        opt.start_epoch(1)
        for _ in range(6):
            x = torch.randn(4, 3, 8, 8, device="cuda")
            opt.step(lambda task: (trunk(x) - int(task == "b")).square().mean())
        states.append(whole_copies(trunk.parameters()))
    torch.testing.assert_close(*states, rtol=1e-5, atol=1e-6)


def test_shards_of_normalizations_do_not_keep_all_gradients(group: dist.ProcessGroup) -> None:
    """`fully_shard` reduces a module's gradients in one buffer; the gradients are views of it."""
    plain = nn.Sequential(nn.Conv2d(3, 64, 3, bias=False), nn.BatchNorm2d(64))
    trunk = cs.nn.convert_task_batchnorm(plain, AB)
    shard(trunk)
    for schedule, number in ((cs.Joint(), 4), (cs.Sequential(), 2)):
        opt = optimizer_of(trunk, None, schedule)
        for _ in range(2):
            x = torch.randn(4, 3, 5, 5)
            opt.step(lambda task: trunk(x).square().mean())
        norms = [p for p in [*trunk.parameters()][1:] if p.grad is not None]
        assert len(norms) == number
        for parameter in norms:
            assert parameter.grad.to_local().untyped_storage().nbytes() <= 64 * 4 * 4
