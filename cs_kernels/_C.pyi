from collections.abc import Sequence
from typing import Any

from torch import Tensor

cpu_instruction_set: str
max_tasks: int
data_types: list[str]
solvers: list[str]
tolerances: dict[str, float]
cuda: Any

def channel_layout(
    shape: Sequence[int], strides: Sequence[int], out_channel_dim: int, groups: int
) -> tuple[int, int, int, int] | None: ...
def misfits(tensors: list[Tensor] | list[Tensor | None], likes: list[Tensor]) -> list[int]: ...

class Operands:
    def __init__(
        self,
        outputs: list[Tensor],
        grads: list[Tensor | None],
        tasks: int,
        out_channel_dims: Sequence[int],
        groups: Sequence[int],
    ) -> None: ...
    @property
    def tasks(self) -> int: ...
    @property
    def types(self) -> list[int]: ...
    @property
    def layouts(self) -> list[tuple[int, int, int, int]]: ...
    @property
    def sizes(self) -> list[int]: ...
    @property
    def kernel_sizes(self) -> list[int]: ...
    @property
    def addresses(self) -> list[int]: ...
    @property
    def gradients(self) -> list[int]: ...
    @property
    def unfit(self) -> list[int]: ...
    @property
    def misfits(self) -> list[int]: ...
    def set_gradient(self, index: int, address: int) -> None: ...
    def channels(self, tensor: int) -> int: ...

def connection_strength(
    *,
    type: int,
    layout: tuple[int, int, int, int],
    weight: int,
    kernel_size: int,
    gamma: int,
    variance: int,
    epsilon: Sequence[float],
    normalize: bool,
    strength: int,
    threads: int,
) -> None: ...
def task_priority(*, strength: int, tasks: int, rows: int, priority: int) -> None: ...
def channel_energies(
    *, type: int, layout: tuple[int, int, int, int], weight: int, energy: int, threads: int
) -> None: ...
def energy_priority(
    *, energy: int, gamma: int, variance: int, epsilon: Sequence[float], rows: int, priority: int
) -> None: ...
def phase2(
    operands: Operands,
    *,
    priorities: Sequence[int],
    weights: Sequence[int],
    gamma: int,
    variance: int,
    epsilon: Sequence[float],
    threads: int,
) -> None: ...
def phase2_products(
    operands: Operands, *, priorities: Sequence[int], products: int, threads: int
) -> None: ...
def phase2_apply(
    operands: Operands, *, priorities: Sequence[int], products: int, threads: int
) -> None: ...
def gramian(
    operands: Operands, *, group_of: Sequence[int], groups: int, out: int, threads: int
) -> None: ...
def combine(
    operands: Operands, *, group_of: Sequence[int], groups: int, weights: int, threads: int
) -> None: ...
def drop_signs(operands: Operands, *, leaks: Sequence[float], key: int, threads: int) -> None: ...
def solve(
    solver: int, gramians: int, count: int, tasks: int, weights: int, option: int
) -> None: ...
def random_key(seed: int, step: int) -> int: ...
