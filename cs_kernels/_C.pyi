from collections.abc import Sequence

cpu_instruction_set: str

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
