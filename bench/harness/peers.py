"""TorchJD, on the same gradients. Its Nash-MTL is the authors' own, and UPGrad comes from it."""

import warnings
from collections.abc import Callable

import torch
import torchjd.autojac
from torch import Tensor, nn
from torchjd import aggregation

from harness.textbook import Gradients

TORCHJD: dict[str, Callable[[int], aggregation.Aggregator]] = {
    "PCGrad": lambda tasks: aggregation.PCGrad(),
    "CAGrad": lambda tasks: aggregation.CAGrad(0.4),
    "MGDA": lambda tasks: aggregation.MGDA(),
    "AlignedMTL": lambda tasks: aggregation.AlignedMTL(),
    "NashMTL": lambda tasks: aggregation.NashMTL(tasks),
    "IMTLG": lambda tasks: aggregation.IMTLG(),
    "UPGrad": lambda tasks: aggregation.UPGrad(),
    "FairGrad": lambda tasks: aggregation.FairGrad(1.0),
    "ConFIG": lambda tasks: aggregation.ConFIG(),
    "GradVac": lambda tasks: aggregation.GradVac(),
    "GradDrop": lambda tasks: aggregation.GradDrop(),
}


def torchjd_matrix(aggregator: aggregation.Aggregator, matrix: Tensor) -> Tensor:
    """TorchJD's aggregator alone, on a K x N matrix that is already there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result: Tensor = aggregator(matrix)
    return result


def stacked(grads: Gradients) -> list[Tensor]:
    """TorchJD's `.jac` of each parameter: its K gradients as one tensor."""
    return [torch.stack(of_parameter) for of_parameter in zip(*grads, strict=True)]


def best_options(aggregator: aggregation.Aggregator) -> dict[str, bool]:
    """Where TorchJD can do without the whole matrix, that is the faster way on a CPU."""
    gramian_based = isinstance(aggregator, aggregation.GramianWeightedAggregator)
    return {"optimize_gramian_computation": True} if gramian_based else {}


def torchjd_step(
    aggregator: aggregation.Aggregator,
    parameters: list[nn.Parameter],
    jacobians: list[Tensor],
    **options: bool,
) -> None:
    """TorchJD as its users call it: from the `.jac` of all parameters to their `.grad`."""
    for parameter, jacobian in zip(parameters, jacobians, strict=True):
        parameter.jac = jacobian  # type: ignore[attr-defined]
        parameter.grad = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchjd.autojac.jac_to_grad(parameters, aggregator, **options)
