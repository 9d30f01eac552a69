"""Task-specific batch normalization for networks."""

from cs_kernels.nn.convert import add_task, convert_task_batchnorm, extract_task, update_bn
from cs_kernels.nn.task_norm import (
    TaskBatchNorm,
    TaskBatchNorm1d,
    TaskBatchNorm2d,
    TaskBatchNorm3d,
    active_task,
    set_task,
)
from cs_kernels.nn.task_norm import task_norms as task_norms

__all__ = [
    "TaskBatchNorm",
    "TaskBatchNorm1d",
    "TaskBatchNorm2d",
    "TaskBatchNorm3d",
    "active_task",
    "add_task",
    "convert_task_batchnorm",
    "extract_task",
    "set_task",
    "update_bn",
]
