"""The plan of a GPU's blocks: waits never deadlock, and every element is visited once."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from cs_kernels.ops import cuda, triton
from cs_kernels.ops.gpu import GpuOperators, combine, device, phase2_plan
from cs_kernels.ops.gpu.phase2_plan import ItemKind, TensorField

pytestmark = pytest.mark.kernel

LAYOUTS = [(1, 1, 300, 27), (1, 1, 64, 640), (2, 5, 40, 9), (1, 1, 0, 4), (1, 1, 3, 0)] * 3
LAYOUTS.append((1, 1, 50_000, 70))
PLAIN = [(1, 1, 1, 70_001), (1, 1, 1, 5), (1, 1, 1, 0)]


GPU = torch.device("cuda")
refused = partial(pytest.raises, RuntimeError, match="run one step before the capture")


@pytest.mark.parametrize("eps", [True, False])
@pytest.mark.parametrize("processors", [1, 3, 132, 1000])
@pytest.mark.parametrize("tasks", [2, 9])
@pytest.mark.parametrize("operators", [triton.operators, cuda.operators], ids=["triton", "cuda"])
def test_items_depend_on_earlier_ones(
    monkeypatch: pytest.MonkeyPatch, operators: GpuOperators, tasks: int, processors: int, eps: bool
) -> None:
    """On a GPU of any size, no block may wait for one that never starts."""
    if operators is cuda.operators and cuda._kernels is None:
        pytest.skip("cs_kernels was built without CUDA kernels")
    monkeypatch.setattr(phase2_plan, "multiprocessors", lambda device: processors)
    layers = len(LAYOUTS)
    tiling = operators.tiling(tasks, torch.float32)
    all_eps = (1e-5,) * (layers * tasks) if eps else None
    chosen = (True,) * (layers + len(PLAIN))
    given = tuple(LAYOUTS + PLAIN), (1,) * layers, all_eps, chosen, tiling, torch.device("cpu")
    plan = phase2_plan.phase2_plan(*given)
    items = plan.items.tolist()
    assert len({tuple(item) for item in items}) == len(items)
    place = {tuple(item): n for n, item in enumerate(items)}
    for t, numbers in enumerate(plan.tensors.tolist()):
        fields = dict(zip(TensorField, numbers, strict=True))
        rows, segments = fields[TensorField.ROWS], fields[TensorField.SIZE]
        number = {kind: sum(k == kind and u == t for k, u, _ in items) for kind in ItemKind}
        sums = number[ItemKind.SUM]
        per_item = fields[TensorField.TILES] * tiling.tile_segments
        assert sums == fields[TensorField.SUM_ITEMS] == -(-segments // per_item)
        projections = -(-sums // fields[TensorField.PROJECT_SUMS])
        assert number[ItemKind.PROJECT] == (projections if t < layers else 0)
        energies = eps and t < layers and segments > 0
        energy_items = -(-rows // fields[TensorField.ENERGY_ROWS]) if energies else 0
        assert number[ItemKind.ENERGY] == fields[TensorField.ENERGY_ITEMS] == energy_items
        assert sums <= phase2_plan.MOST_SUM_ITEMS or t >= layers
        energy, summed, projected = (
            [place[kind, t, n] for n in range(number[kind])] for kind in ItemKind
        )
        assert max(energy, default=-1) < min(summed, default=len(items))
        assert max(summed, default=-1) < min(projected, default=len(items))
        if projected:  # Projections follow early enough to find their operands in the cache.
            between = items[max(summed) + 1 : projected[-1]]
            lag = sum(kind == ItemKind.SUM for kind, _, _ in between)
            assert lag <= tiling.lag * processors
            sums_follow = any(kind == ItemKind.SUM for kind, _, _ in items[projected[-1] :])
            assert lag == tiling.lag * processors or not sums_follow


@pytest.mark.parametrize("offsets", [None, (9, 2**40, 0, 7, 2**32, 5)])
@pytest.mark.parametrize("most_tiles", [1, 16])
@pytest.mark.parametrize("processors", [1, 132])
def test_groups_have_their_items_together(
    monkeypatch: pytest.MonkeyPatch,
    processors: int,
    most_tiles: int,
    offsets: tuple[int, ...] | None,
) -> None:
    monkeypatch.setattr(combine, "multiprocessors", lambda device: processors)
    sizes, group_of = (5000, 0, 70, 123_456, 1, 999), (1, 0, 2, 1, 2, 1)
    chosen = (True, True, True, True, False, True)
    plan = combine.gradient_plan(
        sizes, group_of, 4, chosen, 512, most_tiles, torch.device("cpu"), offsets
    )
    fields = plan.tensors.tolist()
    assert plan.empty_groups == (0, 3)
    covered = [0] * len(sizes)
    for n, (tensor, _) in enumerate(plan.items.tolist()):
        size, group, first, number, tiles, place = fields[tensor]
        assert (size, group) == (sizes[tensor], group_of[tensor])
        assert place == (sum(sizes[:tensor]) if offsets is None else offsets[tensor])
        assert first <= n < first + number
        covered[tensor] += 512 * tiles
    for size, here, elements in zip(sizes, chosen, covered, strict=True):
        assert elements >= size if here else elements == 0


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Sets whether the GPU's stream counts as captured."""
    state = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[0])
    return lambda capturing: state.__setitem__(0, capturing)


def test_no_table_is_made_during_a_capture(capture: Callable[[bool], None]) -> None:
    """Tensors that a captured launch reads are kept: replays may outlive the cached plan."""
    tables = combine.gradient_plan((3,), (0,), 1, (True,), 512, 1, torch.device("cpu"))
    device.refuse_capture(GPU)
    capture(True)
    with refused():
        device.refuse_capture(GPU)
    for_good = list(device._immortal_tables)
    with device.captured_tables() as captured:
        device.keep(tables, GPU)
    assert captured == [tables]
    assert device._immortal_tables == for_good


def test_a_capture_sends_from_memory_that_was_pinned_before_it(
    monkeypatch: pytest.MonkeyPatch, capture: Callable[[bool], None]
) -> None:
    """Each capture has its own memory, since replays send the values again."""
    pinned: list[Tensor] = []

    def pin(numbers: int) -> Tensor:
        pinned.append(torch.empty(numbers, dtype=torch.int64))
        return pinned[-1]

    monkeypatch.setattr(device, "_pinned", pin)
    monkeypatch.setattr(device, "_capture_reserve", [])
    capture(True)
    with refused():
        device.host_buffer(10, GPU)
    capture(False)
    assert device.host_buffer(10, GPU) is not device.host_buffer(10, GPU)
    memory = pinned[0]
    assert len(pinned) == 3  # A reserve of a megabyte, and one buffer per call.
    capture(True)
    with device.captured_tables() as captured:
        buffers = [device.host_buffer(10 + n, GPU) for n in range(20)]
    assert len(pinned) == 3
    assert all(a is b for a, b in zip(buffers, captured, strict=True))
    for n, buffer in enumerate(buffers):
        buffer.fill_(n)
    assert [buffer.tolist() for buffer in buffers] == [(10 + n) * [n] for n in range(20)]
    assert {buffer.untyped_storage().data_ptr() for buffer in buffers} == {memory.data_ptr()}
    with refused():
        device.host_buffer(len(memory), GPU)
    capture(False)
    device.host_buffer(len(memory), GPU)
    capture(True)
    assert len(device.host_buffer(len(memory), GPU)) == len(memory)


def test_kernels_with_other_tables_are_refused() -> None:
    """Kernels with another table layout would mistake one field for another."""

    class Kernels:
        def tables(self) -> dict[str, dict[str, int]]:
            return {"TensorField": {"rows": 1, "length": 0}}

    with pytest.raises(ImportError, match=r"must have the fields .* in TensorField, got .*build"):
        cuda.use_kernels(Kernels())


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ((1, 1, 2**30, 1), "fewer than 1073741824 segments of .* got 1073741824"),
        ((1, 1, 1, 2**32), "output channel must have fewer than .* got 4294967296"),
    ],
)
def test_layers_that_are_too_large(layout: tuple[int, ...], message: str) -> None:
    """Kernels count segments, and the elements of an output channel, in 32 bits."""
    tiling = triton.operators.tiling(2, torch.float32)
    with pytest.raises(ValueError, match=message):
        phase2_plan.phase2_plan(
            (layout,),
            (1,),
            None,
            (True,),
            tiling,
            torch.device("cpu"),  # type: ignore[arg-type]
        )
