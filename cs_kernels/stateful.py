"""The base of methods and weightings: their state, for checkpoints and for CUDA graphs."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class Stateful:
    """Something that may have a state from step to step."""

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs; a step that fails goes back to it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        del state

    @classmethod
    def has_state(cls) -> bool:
        """Whether there may be one."""
        return cls.state_dict is not Stateful.state_dict

    def captured_state(self) -> list[Tensor]:
        """The tensors of the state, for `MultiTaskOptimizer.capture`.

        Python code does not run when a CUDA graph is replayed, so each step must read them on the
        device and update them in place. A step is captured again when they are other tensors.

        Raises:
            ValueError: Replays would go wrong. Here: it has a state, and does not say how.

        """
        if self.has_state():
            raise ValueError(
                f"a captured step must update its state in place, but {self!r} has a state and no"
                " captured_state()"
            )
        return []
