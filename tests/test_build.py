"""Builds with and without CUDA kernels: setup.py decides before it compiles."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import cuda_decision
import pytest
from cuda_decision import Torch, decide, driver_installed, installed_torch, library_cached

import cs_kernels as cs
from cs_kernels import _C
from cs_kernels.ops import cuda

pytestmark = pytest.mark.kernel

CPU, ROCM = Torch("2.13.0+cpu", None), Torch("2.13.0+rocm7.1", None)
CUDA = Torch("2.13.0", "13.0")
SILENT = Torch(None, None)
NO_ANSWER = "the build found a torch whose CUDA version is unknown"
VERSION_FILES = [
    ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", CPU),
    ("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", CUDA),
    ("__version__ = '2.13.0+rocm7.1'\ncuda = None\nhip = '7.1'\n", ROCM),
    ("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\n)", SILENT),
    ("__version__ = '2.13.0'\ncuda = compute()\n", SILENT),
    ("__version__ = '2.13.0'\n", SILENT),
    ("__version__ = compute()\ncuda = None\n", SILENT),
    ("cuda = None\0", SILENT),
    ("", SILENT),
]
Toolkit = tuple[int, int] | None


def _install(folder: Path, version: str) -> Path:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "version.py").write_text(version)
    # An import of this torch ends the process.
    (folder / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    return folder


@pytest.mark.parametrize(
    ("torch", "toolkit", "driver", "option", "reason"),
    [
        (CPU, (13, 0), False, "0", "torch 2.13.0+cpu in this environment has no CUDA"),
        (CPU, (13, 0), True, "0", "torch 2.13.0+cpu in this environment has no CUDA"),
        (ROCM, (13, 0), True, "0", "torch 2.13.0+rocm7.1 in this environment has no CUDA"),
        (CUDA, (13, 0), False, "auto", "torch 2.13.0 in this environment has CUDA 13.0"),
        (CUDA, (12, 0), True, "auto", "torch 2.13.0 in this environment has CUDA 13.0"),
        (CUDA, (11, 8), True, "0", "CUDA 12.0 or later is required, but CUDA 11.8 was on the path"),
        (CUDA, None, True, "0", "no CUDA compiler (nvcc) was on the path"),
        (None, None, True, "0", "no CUDA compiler (nvcc) was on the path"),
        (None, (13, 0), True, "auto", "the build found no torch, and the NVIDIA driver"),
        (None, (13, 0), False, "0", "the build found no torch, and no NVIDIA driver"),
        (SILENT, (13, 0), True, "auto", f"{NO_ANSWER}, and the NVIDIA driver"),
        (SILENT, (13, 0), False, "0", f"{NO_ANSWER}, and no NVIDIA driver"),
    ],
)
def test_who_gets_the_kernels(
    torch: Torch | None, toolkit: Toolkit, driver: bool, option: str, reason: str
) -> None:
    decision = decide(None, toolkit, torch, driver)
    assert (decision.option, decision.reason) == (option, reason)


@pytest.mark.parametrize(("version", "torch"), VERSION_FILES)
def test_the_version_file_of_torch(tmp_path: Path, version: str, torch: Torch) -> None:
    assert installed_torch([_install(tmp_path, version)]) == torch


def test_the_first_torch_counts(tmp_path: Path) -> None:
    """The first folder wins, as in an import; missing folders are skipped."""
    (without, _), (with_cuda, _), *_ = VERSION_FILES
    one, other = _install(tmp_path / "a", with_cuda), _install(tmp_path / "b", without)
    assert installed_torch([tmp_path / "none", one, other]) == CUDA
    assert installed_torch([other, one]) == CPU
    assert installed_torch([tmp_path / "none"]) is None


@pytest.mark.parametrize("torch", [None, CPU, CUDA])
@pytest.mark.parametrize("driver", [False, True])
@pytest.mark.parametrize("toolkit", [None, (11, 8), (13, 0)])
def test_a_request_overrides(torch: Torch | None, driver: bool, toolkit: Toolkit) -> None:
    """A request is honored even if there is no toolkit: CMake then fails."""
    for option in "01":
        assert decide(option, toolkit, torch, driver).option == option
    for option in ("auto", ""):
        assert decide(option, toolkit, torch, driver) == decide(None, toolkit, torch, driver)


def test_an_unknown_request() -> None:
    with pytest.raises(ValueError, match=re.escape("must be 0, 1 or auto, got 'yes'")):
        decide("yes", (13, 0), None, True)


def test_one_line_explains_the_decision() -> None:
    assert str(decide(None, (13, 0), CPU, True)) == (
        "CUDA kernels: no: torch 2.13.0+cpu in this environment has no CUDA"
        " (CS_KERNELS_CUDA=1 builds them)"
    )
    assert str(decide(None, (13, 0), None, True)) == (
        "CUDA kernels: yes: the build found no torch, and the NVIDIA driver"
        " (CS_KERNELS_CUDA=0 leaves them out, CUDAARCHS=90 builds for one architecture)"
    )


def test_the_library_of_the_driver() -> None:
    """Toolkits contain libraries of the same name, which do not prove that there is a driver."""
    line = "\tlibcuda.so.1 (libc6,x86-64) => {}/libcuda.so.1\n"
    other = "\tlibcudart.so.13 (libc6,x86-64) => /usr/local/cuda/lib64/libcudart.so.13\n"
    assert library_cached(other + line.format("/lib/x86_64-linux-gnu"))
    assert library_cached(line.format("/usr/lib/wsl/lib"))
    assert not library_cached(other)
    assert not library_cached(line.format("/usr/local/cuda/lib64/stubs"))
    assert not library_cached(line.format("/usr/local/cuda-13.0/compat"))


def test_the_module_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_decision, "library_cached", lambda libraries: False)
    assert not driver_installed(tmp_path / "version")
    (tmp_path / "version").write_text("NVRM version")
    assert driver_installed(tmp_path / "version")


@pytest.mark.parametrize(
    ("program", "version"),
    [
        ("echo 'Cuda compilation tools, release 12.9, V12.9.86'", (12, 9)),
        ("echo 'release 13.0, V13.0.48'", (13, 0)),
        ("echo 'not a compiler'; exit 1", None),
    ],
)
def test_the_version_of_the_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, version: Toolkit
) -> None:
    """Like CMake, the search prefers CUDACXX to the path."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\n{program}\n")
    nvcc.chmod(0o755)
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert cuda_decision.toolkit_version() == version
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert cuda_decision.toolkit_version() is None
    monkeypatch.setenv("CUDACXX", str(nvcc))
    assert cuda_decision.toolkit_version() == version


@pytest.mark.parametrize("isolated", [False, True])
def test_torch_is_found_by_the_prefix(tmp_path: Path, isolated: bool) -> None:
    """Torch is found without an import, even if pip's isolated build hides it from sys.path."""
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    _install(packages, VERSION_FILES[1][0])
    hide = "sys.path[:] = [path for path in sys.path if 'site-packages' not in path];"
    show = "import cuda_decision as c; print(c.installed_torch(c.package_folders()))"
    done = subprocess.run(
        [tmp_path / "venv/bin/python", "-c", f"import sys; {hide if isolated else ''} {show}"],
        env={**os.environ, "PYTHONPATH": str(Path(cuda_decision.__file__).parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(CUDA)


def test_the_package_tells_why_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "CS_KERNELS_CUDA=0 (=1 builds them)"
    monkeypatch.setattr(cuda, "_kernels", None)
    monkeypatch.setattr(_C, "without_cuda", why, raising=False)
    assert cuda.unavailable() == f"the package was built without CUDA kernels: {why}"


def test_the_compiled_module_has_kernels_or_the_reason() -> None:
    """Users are told what this build decided."""
    assert hasattr(_C, "cuda") != hasattr(_C, "without_cuda")
    if hasattr(_C, "without_cuda"):
        assert _C.without_cuda in (cs.available_backends()["cuda"] or "")
        assert "CS_KERNELS_CUDA=1" in _C.without_cuda


OLD = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def _build_of(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs setup.py with a CMake that fails, in a folder of links to the files that it reads."""
    root = Path(cuda_decision.__file__).parents[1]
    copy = tmp_path / "copy"
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "python", "cs_kernels"):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).symlink_to(root / name)
    (copy / "pybind11.py").write_text("get_cmake_dir = str")
    cmake = tmp_path / "bin" / "cmake"
    cmake.parent.mkdir()
    cmake.write_text("#!/bin/sh\necho 'no compiler' >&2\nexit 1\n")
    cmake.chmod(0o755)
    (copy / "temp").mkdir()  # As if the checkout had been moved.
    (copy / "temp" / "CMakeCache.txt").write_text("CMAKE_CACHEFILE_DIR:INTERNAL=/elsewhere\n")
    (copy / "lib" / "cs_kernels").mkdir(parents=True)
    (copy / "lib" / "cs_kernels" / OLD).touch()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CS_KERNELS")}
    path = f"{cmake.parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", "lib", "--build-temp", "temp"],
        cwd=copy,
        env={**clean, "PATH": path, "PYTHONPATH": str(copy), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "status", "says"),
    [
        ({}, 0, "cs_kernels has no compiled kernels: CMake could not"),
        ({"CS_KERNELS_NATIVE": "1"}, 1, "cs_kernels has no compiled kernels: CMake could not"),
        ({"CS_KERNELS_CUDA": "1"}, 1, "cs_kernels has no compiled kernels: CMake could not"),
        ({"CS_KERNELS_NATIVE": "0"}, 0, ""),
        ({"CS_KERNELS_NATIVE": "yes"}, 1, "CS_KERNELS_NATIVE must be 0, 1 or auto, got 'yes'"),
        (
            {"CS_KERNELS_NATIVE": "0", "CS_KERNELS_CUDA": "1"},
            1,
            "conflicts with CS_KERNELS_NATIVE=0",
        ),
    ],
)
def test_a_build_without_a_compiler(
    tmp_path: Path, variables: dict[str, str], status: int, says: str
) -> None:
    """The package is pure torch, or the build fails with a sentence after CMake's output."""
    done = _build_of(tmp_path, **variables)
    assert done.returncode == status, done.stderr
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert ("no compiler" in done.stderr) == ("CMake" in says)
    left = [path.name for path in tmp_path.rglob("*") if path.name in ("CMakeCache.txt", OLD)]
    assert not left or "CMake" not in says
