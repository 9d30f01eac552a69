from collections.abc import Sequence

from torch import Tensor

cpu_instruction_set: str
max_tasks: int

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
def phase2(
    *,
    tasks: int,
    types: Sequence[int],
    layouts: Sequence[tuple[int, int, int, int]],
    updates: Sequence[int],
    gradients: Sequence[int],
    priorities: Sequence[int],
    weights: Sequence[int],
    gamma: int,
    variance: int,
    epsilon: Sequence[float],
    threads: int,
) -> None: ...
def gramian(
    *,
    tasks: int,
    groups: int,
    types: Sequence[int],
    sizes: Sequence[int],
    gradients: Sequence[int],
    group_of: Sequence[int],
    out: int,
    threads: int,
) -> None: ...
def combine(
    *,
    tasks: int,
    groups: int,
    types: Sequence[int],
    sizes: Sequence[int],
    gradients: Sequence[int],
    group_of: Sequence[int],
    updates: Sequence[int],
    weights: int,
    threads: int,
) -> None: ...
def drop_signs(
    *,
    tasks: int,
    types: Sequence[int],
    sizes: Sequence[int],
    gradients: Sequence[int],
    updates: Sequence[int],
    leaks: Sequence[float],
    seed: int,
    step: int,
    threads: int,
) -> None: ...
def pcgrad_weights(
    gramians: int, count: int, tasks: int, weights: int, seed: int, step: int, /
) -> None: ...
def cagrad_weights(gramians: int, count: int, tasks: int, weights: int, c: float, /) -> None: ...
def mgda_weights(gramians: int, count: int, tasks: int, weights: int, /) -> None: ...
def aligned_mtl_weights(
    gramians: int, count: int, tasks: int, weights: int, scale: int, /
) -> None: ...
def nash_mtl_weights(gramians: int, count: int, tasks: int, weights: int, /) -> None: ...
def imtl_g_weights(gramians: int, count: int, tasks: int, weights: int, /) -> None: ...
def upgrad_weights(gramians: int, count: int, tasks: int, weights: int, /) -> None: ...
def channel_layout(
    shape: Sequence[int], strides: Sequence[int], out_channel_dim: int, groups: int
) -> tuple[int, int, int, int] | None: ...
def misfits(tensors: list[Tensor] | list[Tensor | None], likes: list[Tensor]) -> list[int]: ...

class Operands:
    def __init__(
        self,
        outputs: list[Tensor],
        gradients: list[Tensor | None],
        tasks: int,
        out_channel_dims: Sequence[int],
        groups: Sequence[int],
    ) -> None: ...
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
    def gradient_addresses(self) -> list[int]: ...
    @property
    def unfit(self) -> list[int]: ...
    @property
    def misfits(self) -> list[int]: ...
