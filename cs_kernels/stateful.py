"""The base class of methods and weightings: state for checkpoints and CUDA graphs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor


def check_names(state: object, names: Iterable[str]) -> None:
    """Raises ValueError unless the state is a mapping with entries of these names."""
    expected = [*names]
    if not isinstance(state, Mapping) or not set(expected) <= set(state):
        found = list(state) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f"state must have the entries {expected}, got {found}")


def check_tensors(
    state: Mapping[str, Any], name: str, tasks: Sequence[str], shape: Sequence[int] = ()
) -> set[str]:
    """Checks that an entry of a state maps tasks to tensors of a shape; returns these tasks.

    Raises:
        ValueError: A tensor has another shape, or the entry has other tasks.

    """
    by_task = state[name]
    if not isinstance(by_task, Mapping) or not set(by_task) <= set(tasks):
        found = list(by_task) if isinstance(by_task, Mapping) else type(by_task).__name__
        raise ValueError(f"state[{name!r}] must map tasks in {list(tasks)} to values, got {found}")
    for task, tensor in by_task.items():
        if not isinstance(tensor, Tensor) or tensor.shape != tuple(shape):
            got = str(tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__)
            raise ValueError(
                f"state must have a tensor of shape {tuple(shape)} for {task!r} in {name!r}, got"
                f" {got}"
            )
    return set(by_task)


def check_same_tasks(found: Mapping[str, set[str]]) -> None:
    """Raises ValueError unless all entries of a state, given by name, have the same tasks."""
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
    """Checks entries as `check_tensors` does, and that they have the same tasks."""
    check_same_tasks({name: check_tensors(state, name, tasks, of) for name, of in shapes.items()})


def check_epoch(epoch: object) -> None:
    """Raises ValueError unless the epoch is None or an integer of at least 0."""
    if epoch is not None and not (isinstance(epoch, int) and epoch >= 0):
        raise ValueError(f"state must have an epoch of at least 0, or None, got {epoch!r}")


class Stateful:
    """An object that may have a state, which changes from step to step."""

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs, and that is restored if a step fails."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`."""
        del state

    def check_state(self, state: Mapping[str, Any], tasks: Sequence[str]) -> None:
        """Raises ValueError if a `state_dict` is invalid; called before it is loaded."""
        del state, tasks

    @classmethod
    def has_state(cls) -> bool:
        """Whether objects of this class may have a state."""
        return cls.state_dict is not Stateful.state_dict

    def is_undone(self) -> bool:
        """Whether the state is restored if a step fails."""
        return self.has_state()

    def captured_state(self) -> list[Tensor]:
        """The tensors of the state, for `MultiTaskOptimizer.capture`.

        The replay of a CUDA graph runs no Python code, so steps must read these tensors on the
        device and update them in place. If tensors are replaced, the step is captured again.

        Raises:
            ValueError: Replays would go wrong; by default, if a subclass has a state but does not
                override this method.

        """
        if self.has_state():
            raise ValueError(
                f"a captured step must update its state in place, but {self!r} has a state and no"
                " captured_state()"
            )
        return []
