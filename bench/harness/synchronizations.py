"""Host synchronizations that code would make on a GPU, counted while it runs on the CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Each needs a number or a shape from the device; decompositions and inverses check for success.
_OPERATORS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_dim",
    "aten::_unique2",
    "aten::_linalg_eigh",
    "aten::_linalg_svd",
    "aten::_linalg_check_errors",
    "aten::linalg_pinv",
}
_FUNCTIONS = {"cpu", "numpy", "tolist", "__array__"}


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        indices = args[1] if name in ("aten::index", "aten::index_put", "aten::index_put_") else ()
        masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
        self.count += name in _OPERATORS or bool(masks)
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        targets = [a for a in (*args, *kwargs.values()) if isinstance(a, str | torch.device)]
        to_host = name == "to" and any(str(target) == "cpu" for target in targets)
        self.count += name in _FUNCTIONS or to_host
        return func(*args, **kwargs)


def host_synchronizations(run: Callable[[], object]) -> int:
    """The host synchronizations of one call, if its tensors were on a GPU."""
    with _Operators() as operators, _Functions() as functions:
        run()
    return operators.count + functions.count
