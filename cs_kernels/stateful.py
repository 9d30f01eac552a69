"""The base of methods and weightings: their state, for checkpoints and for CUDA graphs."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def check_tensors(
    state: Mapping[str, Any], name: str, tasks: Sequence[str], shape: Sequence[int] = ()
) -> set[str]:
    """The tasks of a state's entry, which must have a tensor of one shape for each of them.

    Raises:
        ValueError: A tensor has another shape, or the entry has other tasks.

    """
    by_task = state[name]
    if not isinstance(by_task, Mapping) or not set(by_task) <= set(tasks):
        found = list(by_task) if isinstance(by_task, Mapping) else type(by_task).__name__
        raise ValueError(f"state must have tasks among {list(tasks)} in {name!r}, got {found}")
    for task, tensor in by_task.items():
        if not isinstance(tensor, Tensor) or tensor.shape != tuple(shape):
            got = str(tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__)
            raise ValueError(
                f"state must have a tensor of shape {tuple(shape)} for {task!r} in {name!r}, got"
                f" {got}"
            )
    return set(by_task)


def check_same_tasks(found: Mapping[str, set[str]]) -> None:
    """Raises ValueError if entries of a state, by name, have different tasks."""
    (first, tasks), *others = found.items()
    for name, of_other in others:
        if of_other != tasks:
            raise ValueError(
                f"state must have the same tasks in {first!r} and {name!r}, got {sorted(tasks)}"
                f" and {sorted(of_other)}"
            )


def check_entries(
    state: Mapping[str, Any], tasks: Sequence[str], shapes: Mapping[str, Sequence[int]]
) -> None:
    """Raises ValueError if entries, by name, lack a tensor of their shape for the same tasks."""
    check_same_tasks({name: check_tensors(state, name, tasks, of) for name, of in shapes.items()})


def check_epoch(epoch: object) -> None:
    """Raises ValueError for anything but None and integers of at least 0."""
    if epoch is not None and not (isinstance(epoch, int) and epoch >= 0):
        raise ValueError(f"state must have an epoch of at least 0, or None, got {epoch!r}")


class Stateful:
    """Something that may have a state from step to step."""

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs; a step that fails goes back to it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        del state

    def check_state(self, state: Mapping[str, Any], tasks: Sequence[str]) -> None:
        """Raises ValueError for a `state_dict` that does not fit, before it is loaded."""
        del state, tasks

    @classmethod
    def has_state(cls) -> bool:
        """Whether there may be a state."""
        return cls.state_dict is not Stateful.state_dict

    def is_undone(self) -> bool:
        """Whether a step that fails goes back to the state before it."""
        return self.has_state()

    def captured_state(self) -> list[Tensor]:
        """The tensors of the state, for `MultiTaskOptimizer.capture`.

        Python code does not run when a CUDA graph is replayed, so each step must read them on the
        device and update them in place. A step is captured again when they are other tensors.

        Raises:
            ValueError: Replays would go wrong. By default: there is a state, but no override.

        """
        if self.has_state():
            raise ValueError(
                f"a captured step must update its state in place, but {self!r} has a state and no"
                " captured_state()"
            )
        return []
