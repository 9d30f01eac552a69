"""A tensor subclass in the place of a parameter."""

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass


def as_parameter(tensor: Tensor) -> None:
    """Makes `isinstance(tensor, nn.Parameter)` true."""
    tensor._is_param = True
