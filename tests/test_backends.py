"""The choice of a backend, and the compiled module with forks, threads and changed sources."""

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from networks import same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import cs_kernels as cs
from cs_kernels import _C
from cs_kernels.ops import checks
from cs_kernels.ops.checks import check_statistics
from cs_kernels.ops.gpu import GpuOperators
from cs_kernels.ops.operands import Operands

pytestmark = pytest.mark.kernel

_PROGRAM = """
import json, torch, cs_kernels as cs
from cs_kernels import _C
from layers import Kind, sample
results = {}
for dtype in ("float32", "float64", "bfloat16", "float16"):
    torch.manual_seed(0)
    args = sample(Kind("conv", (64, 40, 3, 3)), 4, getattr(torch, dtype))
    update, _ = cs.functional.phase2_update(args.weight, args.gamma, args.running_var, args.grads)
    results[dtype] = update.double().flatten()[:2000].tolist()
print(json.dumps([_C.cpu_instruction_set, results]))
"""

# The numbers that torch.randn draws depend on the processor; torch.rand's do not.
_BITS = """
import hashlib, json, torch, cs_kernels as cs
from cs_kernels import _C
from cs_kernels.ops.solvers import SOLVERS
from layers import KINDS, sample, solver_options, trunk_arguments
torch.manual_seed(0)
torch.randn = lambda *shape: (torch.rand(*shape) - 0.5) * 8
found = {}
def add(name, *tensors):
    digest = found.setdefault(name, hashlib.sha256())
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
    trunk = trunk_arguments([sample(kind, 3, dtype) for kind in KINDS])
    updates, grads, ops = trunk["updates"], trunk["grads"], torch.ops.cs_kernels
    add("phase2", ops.phase2_update_(*trunk.values()), *updates)
    add("gramian", ops.gramian(grads, [0] * len(updates), 1, 3))
    ops.combine_(updates, grads, torch.tensor([[0.3, 0.7, -1.1]]), [0] * len(updates), 3)
    add("combine", *updates)
    ops.drop_signs_(updates, grads, [0.0, 0.5, 0.1], 1, 2, 3)
    add("drop_signs", *updates)
    sketch = torch.zeros(512)
    ops.sketch_(sketch, updates, [10000 * n for n in range(len(updates))], 1)
    add("sketch", sketch)
    moved = [update.clone() for update in updates]
    given = moved, updates, [10000 * n for n in range(len(updates))]
    ops.sketch_and_weight_(sketch, *given, 1, torch.tensor(0.7).double(), True)
    add("sketch_and_weight", sketch, *moved)
rows = torch.randn(64, 4, 6).double()
gramian = rows @ rows.mT
for name in SOLVERS:
    given = gramian if name != "mgda" else gramian[None]
    add(name, getattr(ops, f"{name}_weights")(given, *solver_options(name, given)))
print(json.dumps([_C.cpu_instruction_set, {name: d.hexdigest()[:16] for name, d in found.items()}]))
"""


def _run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def _output(program: str, **environment: str) -> str:
    done = _run(program, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def projection() -> tuple[Tensor, Tensor, Tensor]:
    """Gradients, the priority and the update of a layer."""
    grads, priority = torch.randn(3, 256, 64, 3, 3), torch.arange(256) % 3
    return grads, priority, cs.functional.project_conflicts(grads, priority)


def _chosen(device: str) -> str:
    return cs.ops.backends._select(device).module_name.removeprefix("cs_kernels.ops.")


def test_names_and_reasons() -> None:
    backends = cs.available_backends()
    assert set(backends) == {"reference", "cpu", "triton", "cuda"}
    assert backends["reference"] is None
    assert backends["cpu"] is None, backends["cpu"]
    for name, reason in backends.items():
        if reason is not None:
            message = re.escape(f"'{name}' cannot run here: {reason}")
            with pytest.raises(RuntimeError, match=message), cs.use_backend(name):
                pass


@pytest.mark.slow
def test_a_module_that_was_not_built_is_reported_as_such(tmp_path: Path) -> None:
    """The reported reason is not a circular import."""
    package = Path(cs.__file__).parent
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("*.so"))
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import cs_kernels as cs
assert cs.__file__.startswith({str(tmp_path)!r})
print(cs.available_backends()["cpu"])
"""
    assert "No module named 'cs_kernels._C' (not compiled;" in _output(program)


@pytest.mark.slow
def test_without_the_compiled_module_the_reference_computes() -> None:
    program = """
import sys
sys.modules["cs_kernels._C"] = None
import torch, cs_kernels as cs
reasons = cs.available_backends()
assert reasons["reference"] is None
for name in ("cpu", "triton", "cuda"):
    assert "cs_kernels._C cannot be imported" in reasons[name], reasons
update = cs.functional.project_conflicts(torch.eye(2).reshape(2, 1, 2), torch.zeros(1).long())
assert update.tolist() == [[1.0, 1.0]], update
trunk = cs.nn.convert_task_batchnorm(
    torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)), ["a", "b"])
opt = cs.MultiTaskOptimizer(trunk, torch.optim.SGD(trunk.parameters(), lr=0.1), ["a", "b"])
for _ in range(2):
    opt.step(lambda task: trunk(torch.randn(8, 3)).square().mean())
"""
    said = "operators on cpu tensors run as plain torch operations, many times slower"
    done = _run(program)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(said) == 1
    chosen = program.partition("trunk =")[0]
    assert said not in _run(chosen, CS_KERNELS_BACKEND="reference").stderr


def test_a_device_without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that need float64 raise before they compute anything, as on Apple's GPUs."""

    class WithoutFloat64(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **kwargs or {})
            if isinstance(result, Tensor) and result.dtype is torch.float64:
                raise TypeError("Cannot convert to float64")
            return result

    monkeypatch.setattr(checks, "_without_float64", checks._without_float64.__wrapped__)
    trunk = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    cs.nn.convert_task_batchnorm(trunk, ["a", "b"])
    adam = torch.optim.Adam(trunk.parameters())
    needed = "must be on a device with float64, got cpu: train on the CPU"
    with WithoutFloat64():
        for method in (cs.PCGrad(), cs.UPGrad(), cs.CAGrad(), cs.ConnectionStrength()):
            with pytest.raises(ValueError, match=f"trunk {needed}"):
                cs.MultiTaskOptimizer(trunk, adam, ["a", "b"], method)
        with pytest.raises(ValueError, match=f"parameters {needed}"):
            cs.GradientBalancer(trunk.parameters(), ["a", "b"])
        with pytest.raises(ValueError, match=f"tensors {needed}"):
            cs.ops.backends.router("task_priority", None)(torch.ones(2, 2))
        cs.MultiTaskOptimizer(trunk, adam, ["a", "b"], cs.Sum())


def test_an_unknown_backend() -> None:
    with pytest.raises(ValueError, match=r"name must be one of.*got 'gpu'"), cs.use_backend("gpu"):
        pass


def test_a_backend_of_another_device_does_not_fall_back() -> None:
    with (
        cs.use_backend("cpu"),
        pytest.raises(RuntimeError, match="'cpu' supports only cpu tensors"),
    ):
        cs.ops.backends.router("task_priority", "cuda")(torch.ones(2, 2))


def test_the_auto_choice_is_native() -> None:
    assert (_chosen("cpu"), _chosen("mps")) == ("cpu", "reference")
    with cs.use_backend("reference"):
        assert _chosen("cpu") == "reference"


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CS_KERNELS_BACKEND", "reference")
    assert _chosen("cpu") == "reference"
    with cs.use_backend("cpu"):
        assert _chosen("cpu") == "cpu"
    monkeypatch.setenv("CS_KERNELS_BACKEND", "cuda")
    with pytest.raises(RuntimeError, match="CS_KERNELS_BACKEND 'cuda' cannot run here"):
        cs.functional.task_priority(torch.ones(2, 2))


@pytest.mark.slow
def test_every_instruction_set_agrees() -> None:
    results = {}
    for name in ("baseline", "avx2", "avx512"):
        ran, results[ran] = json.loads(_output(_PROGRAM, CS_KERNELS_CPU_ISA=name))
    for of_set in results.values():
        for dtype, numbers in of_set.items():
            eps = torch.finfo(getattr(torch, dtype)).eps
            result, baseline = (torch.tensor(n) for n in (numbers, results["baseline"][dtype]))
            torch.testing.assert_close(result, baseline, rtol=2 * eps, atol=16 * eps)


@pytest.mark.slow
def test_an_unknown_instruction_set_is_refused() -> None:
    program = "import cs_kernels as cs; print(cs.available_backends()['cpu'])"
    reason = _output(program, CS_KERNELS_CPU_ISA="AVX2")
    assert "CS_KERNELS_CPU_ISA must be avx512, avx2 or baseline, got 'AVX2'" in reason


@pytest.mark.slow
def test_the_baseline_has_the_same_bits_everywhere() -> None:
    """The expected hashes are from x86-64; Arm gives the same ones."""
    name, found = json.loads(_output(_BITS, CS_KERNELS_CPU_ISA="baseline"))
    assert name == "baseline"
    assert found == {
        "phase2": "bdf210dae6e4cf62",
        "gramian": "a9b4e0cb32891ffa",
        "combine": "d40eb91527d5e88c",
        "drop_signs": "33d6009d5dc24da2",
        "sketch": "88d6f9ca84d8e566",
        "sketch_and_weight": "a7406b529748364a",
        "pcgrad": "0588ec47803fe340",
        "cagrad": "6dfbaef8114c636f",
        "mgda": "ab820c1904819722",
        "aligned_mtl": "cf5dc20f2dc2c144",
        "nash_mtl": "fd2a8d68292509bf",
        "imtl_g": "14e8c20c32f6580b",
        "upgrad": "e05afb3c7e439081",
        "fair_grad": "c98884f3ba29dc0e",
        "config": "8da871761c8a7a92",
        "gradvac": "d83e1a5bd0bc1f4c",
    }


def test_after_fork(projection: tuple[Tensor, Tensor, Tensor]) -> None:
    """A data loader's workers are forked processes, too; torch uses one thread in them."""
    grads, priority, expected = projection
    update = torch.empty_like(expected).share_memory_()

    def work() -> None:
        torch.set_num_threads(1)
        torch.ops.cs_kernels.project_conflicts_([update], [*grads], [priority], [0], [1], 3)

    process = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    process.start()
    process.join(1200)
    assert process.exitcode == 0
    assert torch.equal(update, expected)


def test_callers_on_several_threads(projection: tuple[Tensor, Tensor, Tensor]) -> None:
    grads, priority, expected = projection

    def work(_: int) -> bool:
        updates = (cs.functional.project_conflicts(grads, priority) for _ in range(20))
        return all(torch.equal(update, expected) for update in updates)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


def test_two_networks_on_two_threads() -> None:
    """Each gets the same bits as when it trains alone."""

    def train(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        trunk = torch.nn.Linear(30, 20)
        with torch.no_grad():
            trunk.weight.copy_(torch.randn(20, 30, generator=generator))
            trunk.bias.zero_()
        adam = torch.optim.Adam(trunk.parameters())
        opt = cs.MultiTaskOptimizer(trunk, adam, ["a", "b"], cs.PCGrad(seed=seed))
        for _ in range(50):
            x = torch.randn(8, 30, generator=generator)
            opt.step(lambda task: (trunk(x) - float(task == "a")).square().mean())
        return [p.detach() for p in trunk.parameters()]

    alone = [train(seed) for seed in range(2)]
    with ThreadPoolExecutor(2) as threads:
        assert same_bits([*threads.map(train, range(2))], alone)


def test_flush_to_zero_is_the_callers() -> None:
    """Every thread flushes subnormal numbers, or none does."""
    grads = torch.full((1, 512, 512), 1e-40)
    priority = torch.zeros(512, dtype=torch.int64)
    assert cs.functional.project_conflicts(grads, priority).eq(grads[0]).all()
    assert torch.set_flush_denormal(True)
    try:
        for _ in range(5):
            update = cs.functional.project_conflicts(grads, priority)
            assert update.view(torch.int32).eq(0).all()
    finally:
        torch.set_flush_denormal(False)


def test_memory_is_poisoned() -> None:
    """The other tests rely on NaN in results that a kernel does not write."""
    assert torch.empty(1000).isnan().all()


def test_tensors_on_different_devices_give_no_address_away() -> None:
    """The error keeps a GPU kernel from reading host memory, and vice versa."""

    def launch(*_: object, **__: object) -> None:
        raise AssertionError("launched")

    stub = type("Stub", (GpuOperators,), dict.fromkeys(GpuOperators.__abstractmethods__, launch))
    kernels, ones = stub(), torch.ones(8)
    grads = [torch.ones(4, 3), torch.empty(4, 3, device="meta")]
    with pytest.raises(ValueError, match=r"grads must be .* on cpu, got .* on meta"):
        Operands([torch.zeros(4, 3)], grads, 2)
    elsewhere, like = torch.empty(8, device="meta"), torch.ones(4, 3)
    layers = [elsewhere], [0], [1]
    for name, call in {
        "running_var": lambda: check_statistics(ones, elsewhere, [0.0] * 2, [4], 2, like.device),
        "priorities": lambda: kernels.project_conflicts_([like], [like] * 2, *layers, 2),
        "updates": lambda: Operands([ones, elsewhere], [ones] * 2, 1),
        "gamma": lambda: kernels.connection_strength(like, elsewhere, ones, [1.0] * 2, True, 0, 1),
        "weights": lambda: kernels.channel_energies([like, elsewhere], [0, 0], [1, 1]),
    }.items():
        with pytest.raises(ValueError, match=f"{name} must be on cpu, got meta"):
            call()
    for name in ("cpu", "triton", "cuda"):
        combine = cs.ops.backends._BACKENDS[name].operators["combine_"]
        with pytest.raises(ValueError, match="weights must be on cpu, got meta"):
            combine([ones], [ones] * 8, elsewhere[None], [0], 8)


@pytest.mark.parametrize("name", ["reference", "cpu", "triton", "cuda"])
def test_a_backend_has_every_operator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing operator is reported when its backend is first used, not when it is called."""
    backends = cs.ops.backends
    module = backends._BACKENDS[name].module_name
    assert set(backends._operators.__wrapped__(module)) == set(backends.OPERATORS)
    monkeypatch.setattr(backends, "OPERATORS", [*backends.OPERATORS, "fold_"])
    with pytest.raises(NotImplementedError, match=rf"{module} must implement .* lacks \['fold_'\]"):
        backends._operators.__wrapped__(module)


@pytest.mark.slow
def test_a_module_of_other_sources_is_refused() -> None:
    """Such a module remains after an update of the package without a rebuild."""
    program = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("cs_kernels._C", {_C.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.solvers.reverse()
sys.modules["cs_kernels._C"] = module
import cs_kernels
"""
    done = _run(program)
    assert "cs_kernels._C must have solvers ['pcgrad', " in done.stderr


@pytest.mark.slow
def test_triton_is_imported_when_it_is_needed() -> None:
    """Importing Triton takes longer than importing the package."""
    program = "import sys, cs_kernels; sys.exit('cs_kernels.ops.triton' in sys.modules)"
    assert _run(program).returncode == 0
