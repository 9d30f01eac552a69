"""Every Triton kernel compiles for current GPUs, and spills few or no registers.

No GPU is needed: Triton includes the assembler, and its disassembler lists a kernel's resources.
"""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

from cs_kernels.ops import solvers as solver_table
from cs_kernels.ops.triton import (
    OPTIONS,
    Variant,
    combine,
    gradient_constants,
    gradient_options,
    phase2,
    sketch,
    solver_options,
    solvers,
)

pytestmark = pytest.mark.compile

TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
}
TASKS = [2, 4, 8, 64]
CONSTANTS: dict[str, list[tuple[str, Any]]] = {
    "aligned_mtl": [("SCALE", scale) for scale in solver_table.ALIGNED_SCALES],
    "fair_grad": [("SOLVES_S", False), ("SOLVES_S", True)],
}
SOLVERS = [
    (name, *constant) for name in solver_table.SOLVERS for constant in CONSTANTS.get(name, [()])
]

# The types of pointers, and the names of their arguments.
_NAMES = {
    "*i32": "items ticket counters",
    "*i64": "tensors tensor table drawn",
    "*fp32": "gamma variance",
    "*fp64": "energy epsilon item_products products coefficients factor fairness leaks gramian"
    " weights similarities strength out",
}
_POINTERS = {name: pointer for pointer, names in _NAMES.items() for name in names.split()}
_NUMBERS = {"tasks": "i32", "rows": "i32"}


def _source(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> ASTSource:
    known = {**_POINTERS, **_NUMBERS, **types, **dict.fromkeys(constants, "constexpr")}
    signature = {parameter.name: known[parameter.name] for parameter in kernel.params}
    aligned = {
        (parameter.num,): [["tt.divisibility", 16]]
        for parameter in kernel.params
        if signature[parameter.name].startswith("*") and not parameter.do_not_specialize
    }
    return ASTSource(kernel, signature, constants, aligned)


class Contractions:
    """Counts unrounded products that are added to a value from another lane.

    A sum of products over lanes may then differ between lanes in its last bit. `branches` counts
    branches whose condition depends on such a sum: some lanes may take them while others do not.
    """

    def __init__(self, ptx: str) -> None:
        self.number = self.branches = 0
        shuffled, uneven = set[str](), set[str]()
        lines = [
            found.groups(default="") for found in map(_INSTRUCTION.match, ptx.splitlines()) if found
        ]
        before = -1
        while len(uneven) > before:  # Repeats, since PTX has loops.
            before, self.number, self.branches = len(uneven), 0, 0
            for predicate, kind, written, rest in lines:
                to, read = _REGISTER.findall(written), _REGISTER.findall(rest)
                if kind == "shfl" or (kind in _SAME_BITS and shuffled.intersection(read)):
                    shuffled.update(to)
                contracted = kind == "fma" and len(read) == 3 and read[2] in shuffled
                self.number += contracted
                self.branches += kind == "bra" and predicate in uneven
                if contracted or uneven.intersection([predicate, *read]):
                    uneven.update(to)


_INSTRUCTION = re.compile(r"\s*(?:@!?(%\w+)\s+)?(\w+)(?:[.\w:]*)\s+(\{[^}]*\}|[^,;\[]*)([^;]*);")
_REGISTER = re.compile(r"%\w+")
_SAME_BITS = {"cvt", "shl", "or", "mov"}
"""Instructions that make a 64-bit number from two 32-bit numbers."""


OTHERS = [pytest.param(number, marks=pytest.mark.full) for number in (86, 89, 100)]


@pytest.fixture(params=[80, 90, 120, *OTHERS])
def check(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Contractions]:
    """Compiles a kernel for one architecture; asserts that it spills at most `most_stack` bytes.

    Its shared memory must fit on every GPU, and all lanes must take the same branches.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target = GPUTarget("cuda", request.param, 32)
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"

    def run(
        kernel: Any,
        constants: Any,
        options: Any = OPTIONS,
        *,
        most_stack: int = 0,
        uneven: bool = False,
        **types: str,
    ) -> Contractions:
        source = _source(kernel, types, constants)
        binary = tmp_path / "kernel.cubin"
        compiled = triton.compile(source, target, options)
        binary.write_bytes(compiled.asm["cubin"])
        done = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True)
        used = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", done.stdout))
        assert int(used["STACK"]) <= most_stack, used
        assert used["LOCAL"] == "0", used
        assert int(used["SHARED"]) <= 99 << 10, used
        contractions = Contractions(compiled.asm["ptx"])
        assert (contractions.branches > 0) == uneven
        return contractions

    return run


def _of_gradients(kernel: Any, **constants: Any) -> Callable[..., None]:
    @pytest.mark.each
    @pytest.mark.parametrize("tasks", TASKS)
    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    def test(check: Callable[..., Contractions], dtype: torch.dtype, tasks: int) -> None:
        variant = Variant.of(tasks, dtype)
        known = gradient_constants(variant, dtype) | constants
        check(kernel, known, gradient_options(variant.tasks))

    return test


test_phase2 = _of_gradients(phase2.phase2_kernel)
test_gramian = _of_gradients(combine.gramian_kernel)
test_combine = _of_gradients(combine.combine_kernel, PROTECTED=None)
test_combine_with_protected_signs = _of_gradients(combine.combine_kernel, PROTECTED=1)
test_drop_signs = _of_gradients(combine.drop_signs_kernel)


@pytest.mark.each
@pytest.mark.parametrize("size", [256, 65536])
@pytest.mark.parametrize("updates", [False, True])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_sketch(
    check: Callable[..., Contractions], dtype: torch.dtype, updates: bool, size: int
) -> None:
    constants = {
        "SIZE": size,
        "DTYPE": tl.dtype(TYPES[dtype][1:]),
        "UPDATES": updates,
        "ADDS": updates,
    }
    tensors = {"data": TYPES[dtype], "update": TYPES[dtype], "weight": "*fp64"}
    check(sketch.sketch_kernel, constants, **tensors, sketch="*fp32", words="*i64")


@pytest.mark.each
@pytest.mark.parametrize("vectorized", [False, True])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_energy(check: Callable[..., Contractions], dtype: torch.dtype, vectorized: bool) -> None:
    vector = 16 // dtype.itemsize if vectorized else 1
    check(phase2.energy_kernel, {"VECTOR": vector}, weight=TYPES[dtype])


@pytest.mark.each
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("tasks", TASKS)
def test_strength(check: Callable[..., Contractions], tasks: int, normalize: bool) -> None:
    check(phase2.strength_kernel, {"NORMALIZE": normalize, "TASKS": tasks})


@pytest.mark.each
@pytest.mark.parametrize("tasks", TASKS)
def test_priority(check: Callable[..., Contractions], tasks: int) -> None:
    check(phase2.priority_kernel, {"TASKS": tasks}, out="*i64")


@pytest.mark.each
@pytest.mark.parametrize("tasks", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_solvers(check: Callable[..., Contractions], solver: tuple[Any, ...], tasks: int) -> None:
    name, *constant = solver
    constants = {"TASKS": tasks, **dict([constant] if constant else [])}
    kernel = getattr(solvers, f"{name}_kernel")
    # With 64 tasks, ConFIG's kernel spills 12 registers on two architectures, GradVac's 6 on one.
    found = check(kernel, constants, solver_options(tasks), most_stack=48 if tasks == 64 else 0)
    assert found.number == 0


def test_contraction_would_be_seen(check: Callable[..., Contractions]) -> None:
    """With fused multiply-adds, FairGrad's loop would end in only some lanes of a warp."""
    options = {**solver_options(8), "enable_fp_fusion": True}
    found = check(solvers.fair_grad_kernel, {"TASKS": 8, "SOLVES_S": False}, options, uneven=True)
    assert found.number > 0
