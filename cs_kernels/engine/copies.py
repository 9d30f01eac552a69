"""Copies and pickles of a MultiTaskOptimizer, built from its arguments and its state."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from cs_kernels.engine.engine import Engine

T = TypeVar("T")


class PartOfEngine(Generic[T]):
    """An attribute of MultiTaskOptimizer that is stored in its engine."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, opt: "Copyable | None", owner: type) -> T:
        if opt is None:
            raise AttributeError(f"{self._name} is an attribute of objects of {owner.__name__}")
        part: T = getattr(opt._engine, self._name)
        return part

    def __set__(self, opt: "Copyable", part: T) -> None:
        setattr(opt._engine, self._name, part)


class Copyable:
    """The base class of MultiTaskOptimizer, which is copied as its arguments plus its state."""

    _engine: Engine

    @abstractmethod
    def _saved(self) -> dict[str, Any]:
        """Arguments and state."""

    @abstractmethod
    def _restore(self, saved: dict[str, Any]) -> None:
        """Builds this object from arguments and state."""

    def __getstate__(self) -> dict[str, Any]:
        """The arguments and the state, even of a copy that is not built yet."""
        if "_copied" in self.__dict__:
            return dict(self.__dict__["_copied"])
        _check_copyable(self._engine)
        return self._saved()

    def __setstate__(self, saved: dict[str, Any]) -> None:
        """Builds the copy now, or on its first use if its trunk is still incomplete.

        The trunk is incomplete if it contains the optimizer.
        """
        self.__dict__["_copied"] = saved
        if hasattr(saved["trunk"], "_modules"):
            self._restore(self.__dict__.pop("_copied"))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Builds a copy on its first use."""
            if "_copied" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            self._restore(self.__dict__.pop("_copied"))
            return getattr(self, name)


def _check_copyable(engine: Engine) -> None:
    """Raises if a copy could not continue the training loop."""
    if engine.accumulation.is_open():
        raise RuntimeError(
            "MultiTaskOptimizer cannot be copied or pickled while gradients of"
            " backward(..., update=False) wait for their update, because they would be lost:"
            " call backward(...) first"
        )
    if engine.ranks.is_distributed:
        raise TypeError(
            f"MultiTaskOptimizer must be in one process to be copied or pickled, got"
            f" {engine.ranks.size} ranks: save its state_dict()"
        )
