from collections.abc import Callable
from typing import Any

from torch import Tensor

from cs_kernels.ops.aliases import Floats, Grads, Ints, Tensors

cpu_instruction_set: str
openmp: bool
max_tasks: int
data_types: list[str]
solvers: list[str]
tolerances: dict[str, float]
cuda: Any
cuda_architectures: str
without_cuda: str

Layout = tuple[int, int, int, int]

def channel_layout(
    shape: Ints, strides: Ints, out_channel_dim: int, groups: int
) -> Layout | None: ...
def misfits(tensors: Grads, likes: Tensors) -> list[int]: ...

class Operands:
    tasks: int
    types: list[int]
    layouts: list[Layout]
    sizes: list[int]
    kernel_sizes: list[int]
    addresses: list[int]
    gradients: list[int]
    unfit: list[int]
    misfits: list[int]
    def __init__(
        self, outputs: Tensors, grads: Grads, tasks: int, out_channel_dims: Ints, groups: Ints
    ) -> None: ...
    def write_table(
        self, table: int, width: int, aligned: int, layers: int, whole_rows: bool
    ) -> None: ...
    def signature(self) -> bytes: ...
    def set_gradient(self, index: int, address: int) -> None: ...
    def channels(self, tensor: int) -> int: ...

# Addresses are int; sizes are in elements.
def channel_energies(
    *, type: int, layout: Layout, weight: int, energy: int, threads: int
) -> None: ...
def strengths(
    *,
    energy: int,
    gamma: int,
    variance: int,
    epsilon: Floats,
    rows: int,
    normalize: bool,
    strength: int,
) -> None: ...
def task_priority(*, strength: int, tasks: int, rows: int, priority: int) -> None: ...
def phase2(
    operands: Operands,
    *,
    priorities: Ints,
    weights: Ints,
    gamma: int,
    variance: int,
    epsilon: Floats,
    products: int,
    threads: int,
) -> None: ...
def phase2_products(
    operands: Operands, *, priorities: Ints, products: int, threads: int
) -> None: ...
def phase2_apply(operands: Operands, *, priorities: Ints, products: int, threads: int) -> None: ...
def gramian(operands: Operands, *, group_of: Ints, groups: int, out: int, threads: int) -> None: ...
def combine(
    operands: Operands,
    *,
    group_of: Ints,
    groups: int,
    weights: int,
    protected_task: int,
    threads: int,
) -> None: ...
def drop_signs(
    operands: Operands,
    *,
    leaks: Floats,
    state: int,
    counter: int,
    offsets: Ints | None,
    threads: int,
) -> None: ...
def sketch(
    sketch: Tensor,
    tensor: Tensor,
    index: int,
    key: int,
    update: Tensor | None,
    weight: float,
    add: bool,
    threads: int,
) -> bool: ...

class SketchPass:
    def __init__(
        self,
        reached: set[int],
        grad_enabled: Callable[[], bool],
        increment_versions: Callable[[tuple[Tensor, ...]], None],
    ) -> None: ...
    def open(
        self, sketches: list[Tensor], key: int, weights: list[float], threads: int
    ) -> None: ...
    def close(self) -> None: ...

class SketchHook:
    def __init__(
        self,
        sketch_pass: SketchPass,
        leaf: Tensor,
        parameter: int,
        module: int,
        index: int,
        otherwise: Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None] | None],
    ) -> None: ...
    def __call__(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None] | None: ...

def solve(
    solver: int,
    gramians: int,
    count: int,
    tasks: int,
    weights: int,
    option: int,
    counter: int,
    rate: float,
    similarities: int,
) -> None: ...
