"""Every Triton kernel compiles for the GPUs that there are, without spilling registers.

No GPU takes part: Triton brings the assembler, and its disassembler says what a kernel holds.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

from cs_kernels.ops.operands import ALIGNED_SCALES
from cs_kernels.ops.triton import (
    DROP_PARTS,
    OPTIONS,
    Variant,
    gradient_constants,
    gradients,
    phase2,
    phase2_constants,
    phase2_options,
    solver_options,
    solvers,
)

ARCHITECTURES = [80, 90, 100]
TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
}
TASKS = [2, 4, 8, 64]

# What pointers point to, where the argument's name alone does not say: the weight, gamma, ...
_POINTERS = {
    "items": "*i32",
    "tensors": "*i64",
    "tensor": "*i64",
    "table": "*i64",
    "ticket": "*i32",
    "counters": "*i32",
    "energy": "*fp64",
    "gamma": "*fp32",
    "variance": "*fp32",
    "epsilon": "*fp64",
    "products": "*fp64",
    "factors": "*fp64",
    "factor": "*fp64",
    "leaks": "*fp64",
    "keys": "*i64",
    "key": "*i64",
    "gramian": "*fp64",
    "weights": "*fp64",
    "strength": "*fp64",
}
_NUMBERS = {"tasks": "i32", "rows": "i32"}

Case = tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]
"""Name, kernel, types of further arguments, compile-time arguments, options."""


def _cases() -> Iterator[Case]:
    for dtype, pointer in TYPES.items():
        name = str(dtype).removeprefix("torch.")
        for tasks in TASKS:
            variant = Variant.of(tasks, dtype)
            case = f"{name}-K{tasks}"
            constants = phase2_constants(variant, dtype)
            options = phase2_options(variant.tasks)
            yield f"phase2-{case}", phase2.phase2_kernel, {}, constants, options
            constants = gradient_constants(variant, dtype)
            result = {"out": "*fp64"}
            yield f"gramian-{case}", gradients.gramian_kernel, result, constants, OPTIONS
            yield f"combine-{case}", gradients.combine_kernel, {}, constants, OPTIONS
            constants = gradient_constants(variant, dtype, DROP_PARTS)
            yield f"drop-{case}", gradients.drop_signs_kernel, {}, constants, OPTIONS
        for vector in (1, 16 // dtype.itemsize):
            of_weight = {"weight": pointer}
            constants = {"VECTOR": vector}
            yield f"energy-{name}-{vector}", phase2.energy_kernel, of_weight, constants, OPTIONS
    for tasks in TASKS:
        for normalize in (False, True):
            constants = {"NORMALIZE": normalize, "TASKS": tasks}
            case = f"strength-K{tasks}-{normalize}"
            yield case, phase2.strength_kernel, {"out": "*fp64"}, constants, OPTIONS
        constants = {"TASKS": tasks}
        yield f"priority-K{tasks}", phase2.priority_kernel, {"out": "*i64"}, constants, OPTIONS
    for tasks in (2, 4, 8, 16, 32, 64):
        for solver in ("pcgrad", "cagrad", "mgda", "nash_mtl", "imtl_g", "upgrad"):
            kernel = getattr(solvers, f"{solver}_kernel")
            constants, options = {"TASKS": tasks}, solver_options(tasks)
            yield f"{solver}-K{tasks}", kernel, {"out": "*fp64"}, constants, options
        for scale in ALIGNED_SCALES:
            constants = {"TASKS": tasks, "SCALE": scale}
            case = f"aligned_mtl-K{tasks}-{scale}"
            kernel = solvers.aligned_mtl_kernel
            yield case, kernel, {"out": "*fp64"}, constants, solver_options(tasks)


CASES = list(_cases())


def _source(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> ASTSource:
    known = {**_POINTERS, **_NUMBERS, **types, **dict.fromkeys(constants, "constexpr")}
    signature = {parameter.name: known[parameter.name] for parameter in kernel.params}
    aligned = {
        (parameter.num,): [["tt.divisibility", 16]]
        for parameter in kernel.params
        if signature[parameter.name].startswith("*") and not parameter.do_not_specialize
    }
    return ASTSource(kernel, signature, constants, aligned)


def resources(case: Case, architecture: int, folder: Path) -> dict[str, int]:
    """Registers, stack and shared memory of a kernel, in bytes where they are memory."""
    _, kernel, types, constants, options = case
    source = _source(kernel, types, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    report = subprocess.run(
        [tool, "-res-usage", binary], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", report)
    assert found, report
    names = ("registers", "stack", "shared", "local")
    return dict(zip(names, map(int, found.groups()), strict=True))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_no_register_spills(
    case: Case, architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    used = resources(case, architecture, tmp_path)
    assert used["stack"] == used["local"] == 0, used
