"""Layers of every kind, with gradients and normalizations, for the tests of the operators."""

import importlib
import os
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cs_kernels.ops import backends, cuda
from cs_kernels.ops.solvers import SOLVERS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's kernels run in its slow interpreter, which needs smaller samples."""

EMULATION = os.environ.get("CS_KERNELS_EMULATION")
"""A folder with the CUDA kernels compiled for this processor; see tests/emulation."""

SMALL = INTERPRETED or EMULATION is not None
"""Whether kernels run so slowly that tests take smaller samples."""

GPU_BACKENDS = "triton", "cuda"
"""Backends that sum a tile's products in float32, so gradients must lie in [1e-18, 1e18]."""

TASKS = (1, 2, 3, 4, 8, 9) if EMULATION else (2, 4, 9) if INTERPRETED else range(1, 11)
"""Numbers of tasks on both sides of the limits between the kernels' variants."""


def emulate() -> None:
    """Replaces the CUDA kernels with their emulation."""
    sys.path.append(os.environ["CS_KERNELS_EMULATION"])
    cuda.use_kernels(importlib.import_module("_emulation"))
    backends._BACKENDS["cuda"] = backends.Backend("cs_kernels.ops.cuda", ("cpu",), lambda: None)


def patch_language_once() -> None:
    """Keeps Triton's interpreter from patching its language in every call of a device function.

    That would take most of the time.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set[str]()

    def patch_once(function: Any) -> Any:
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch(function)
        return interpreter._LangPatchScope()  # restores nothing

    interpreter._patch_lang = patch_once


SOLVER_OPTIONS = {
    "pcgrad": (1, 2),
    "cagrad": (0.4,),
    "aligned_mtl": ("median",),
    "fair_grad": (2.0,),
}
"""Further arguments of the solvers' operators, after the Gramian."""


def solver_options(name: str, gramian: Tensor) -> tuple[Any, ...]:
    """The entry of `SOLVER_OPTIONS`; GradVac gets new targets, because it writes to them."""
    if name == "gradvac":
        return torch.full_like(gramian, 0.3, dtype=torch.float64), 0.1, 1, 2
    return SOLVER_OPTIONS.get(name, ())


@dataclass(frozen=True)
class Kind:
    """The shape of a weight, and the dimension and groups of its output channels."""

    name: str
    shape: tuple[int, ...]
    out_channel_dim: int = 0
    groups: int = 1

    @property
    def channels(self) -> int:
        return self.shape[self.out_channel_dim] * (self.groups if self.out_channel_dim else 1)

    @property
    def layout(self) -> dict[str, int]:
        """Keyword arguments for the functions of `cs_kernels.functional`."""
        return {"out_channel_dim": self.out_channel_dim, "groups": self.groups}


KINDS = [
    Kind("linear", (24, 40)),
    Kind("linear_wide", (3, 1030)),
    Kind("one_channel", (1, 8, 3, 3)),
    Kind("conv1d", (12, 5, 7)),
    Kind("conv2d", (16, 9, 3, 3)),
    Kind("conv2d_pointwise", (31, 33, 1, 1)),
    Kind("conv3d", (6, 4, 3, 3, 3)),
    Kind("grouped", (12, 3, 5, 5)),
    Kind("depthwise", (20, 1, 3, 3)),
    Kind("transposed1d", (6, 10, 4), 1),
    Kind("transposed2d", (9, 14, 2, 2), 1),
    Kind("transposed2d_pointwise", (11, 13, 1, 1), 1),
    Kind("transposed2d_grouped", (8, 5, 4, 4), 1, 4),
    Kind("transposed2d_depthwise", (10, 1, 3, 3), 1, 10),
    Kind("transposed3d", (3, 6, 2, 3, 2), 1),
]

FORMATS = ["contiguous", "channels_last", "misaligned", "strided"]


def laid_out(tensor: Tensor, memory: str) -> Tensor:
    """The same values in a given memory layout."""
    if memory == "channels_last":
        if tensor.ndim == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        if tensor.ndim == 5:
            return tensor.contiguous(memory_format=torch.channels_last_3d)
        # Other numbers of dimensions have no such format; the first two are swapped in memory.
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if memory == "misaligned":
        storage = tensor.new_zeros(tensor.numel() + 1)
        return storage[1:].view(tensor.shape).copy_(tensor)
    if memory == "strided":
        wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
        return wide[..., ::2].copy_(tensor)
    return tensor.contiguous()


@dataclass
class Sample:
    """The arguments of Phase 2 for one layer."""

    kind: Kind
    weight: Tensor
    gamma: Tensor
    running_var: Tensor
    grads: Tensor
    eps: list[float]

    def float64(self) -> "Sample":
        """The same values in float64, contiguous."""
        names = "weight", "gamma", "running_var", "grads"
        return replace(self, **{name: getattr(self, name).double().contiguous() for name in names})


def sample(kind: Kind, tasks: int, dtype: torch.dtype, memory: str = "contiguous") -> Sample:
    """Random arguments; about half of all pairs of tasks are in conflict."""
    weight = laid_out(torch.randn(kind.shape).to(dtype), memory)
    grads = torch.stack([torch.randn(kind.shape) for _ in range(tasks)]).to(dtype)
    if memory != "contiguous":  # A stack whose rows have the weight's memory layout.
        strides = weight.stride()
        span = sum((n - 1) * s for n, s in zip(kind.shape, strides, strict=True)) + 2
        first = 1 if memory == "misaligned" else 0
        flat = torch.zeros(tasks * span + 1, dtype=dtype)
        grads = flat.as_strided((tasks, *kind.shape), (span, *strides), first).copy_(grads)
    gamma, running_var = torch.randn(tasks, kind.channels), torch.rand(tasks, kind.channels) + 0.1
    return Sample(kind, weight, gamma, running_var, grads, [1e-5 * (i + 1) for i in range(tasks)])


def trunk_arguments(layers: list[Sample]) -> dict[str, Any]:
    """The arguments of `phase2_update_` for all layers in one call."""
    return {
        "updates": [torch.empty_like(layer.weight) for layer in layers],
        "grads": [grad for layer in layers for grad in layer.grads],
        "weights": [layer.weight for layer in layers],
        "gamma": torch.cat([layer.gamma.flatten() for layer in layers]),
        "running_var": torch.cat([layer.running_var.flatten() for layer in layers]),
        "eps": [eps for layer in layers for eps in layer.eps],
        "out_channel_dims": [layer.kind.out_channel_dim for layer in layers],
        "groups": [layer.kind.groups for layer in layers],
        "tasks": len(layers[0].grads),
    }


def operator_calls() -> dict[str, tuple[Any, ...]]:
    """Arguments for every operator; each call creates new tensors."""
    layers = [sample(kind, 3, torch.float32) for kind in KINDS]
    weight, gamma, running = torch.randn(4, 3), torch.ones(2, 4), torch.ones(2, 4)
    updates = [torch.zeros(4, 3), torch.zeros(5)]
    grads = [torch.randn(4, 3), None, torch.randn(5), torch.randn(5)]
    priorities, products = [torch.tensor([0, 1, 1, 0])], torch.randn(1, 2, 2, dtype=torch.float64)
    statistics = torch.rand(7), torch.rand(14), torch.rand(14)
    wide = torch.eye(3).double()
    gramians = {"mgda": torch.rand(2, 1, 3, 3), "pcgrad": wide, "cagrad": wide}
    calls: dict[str, tuple[Any, ...]] = {
        "connection_strength": (weight, gamma, running, [1e-5, 1e-5], True, 0, 1),
        "task_priority": (torch.rand(3, 5),),
        "project_conflicts_": (updates, grads, priorities, [0], [1], 2),
        "phase2_update_": tuple(trunk_arguments(layers).values()),
        "channel_energies": ([torch.randn(4, 3), torch.randn(2, 5, 3)], [0, 1], [1, 2]),
        "energy_priority": (*statistics, [1e-5] * 4, [4, 3]),
        "phase2_products_": (updates, grads, priorities, [0], [1], 2),
        "phase2_apply_": (updates, grads, priorities, products, [0], [1], 2),
        "gramian": (grads, [0, 1], 2, 2),
        "combine_": (updates, grads, torch.rand(2, 2), [1, 0], 2),
        "sketch_": (torch.zeros(512), [torch.randn(4, 3), torch.randn(700)], [5, 17], 1),
        "sketch_and_weight_": (
            *(torch.zeros(512), [torch.randn(4, 3), torch.randn(700)]),
            *([torch.randn(4, 3), torch.randn(700)], [5, 17], 1, torch.tensor(0.7).double(), True),
        ),
        "drop_signs_": (updates, grads, [0.0, 0.5], 1, 2, 2),
    }
    for name in SOLVERS:
        gramian = gramians.get(name, torch.eye(3))
        calls[f"{name}_weights"] = gramian, *solver_options(name, gramian)
    return calls
