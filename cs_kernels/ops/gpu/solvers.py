"""Task weights from Gramians on a GPU."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from cs_kernels.ops.checks import check_solver
from cs_kernels.ops.gpu.device import on_device
from cs_kernels.ops.operands import Option, dense


class SolverOperators(ABC):
    @abstractmethod
    def launch_solver(self, name: str, gramian: Tensor, weights: Tensor, *options: Option) -> None:
        """Writes float64 weights [count, K] for Gramians [count, K, K]."""

    def solve(self, name: str, gramian: Tensor, *options: Option) -> Tensor:
        """Reads K * K numbers and writes K numbers per Gramian."""
        check_solver(name, gramian, *options)
        weights = gramian.new_empty(gramian.shape[:-1], dtype=torch.float64)
        if weights.numel():
            with on_device(gramian.device):
                self.launch_solver(name, dense(gramian), weights, *options)
        return weights
