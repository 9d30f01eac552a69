"""Decides whether a build includes the CUDA kernels, for setup.py.

The module runs in an isolated build, which has only the standard library. It neither imports torch
nor queries a GPU: the decision depends only on installed software.
"""

import ast
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_OLDEST_TOOLKIT = (12, 0)


@dataclass(frozen=True)
class Torch:
    """An installed torch."""

    version: str | None
    """None if torch's version.py does not define it."""
    cuda: str | None
    """The version of CUDA that torch was built with; None for a CPU build."""


@dataclass(frozen=True)
class Decision:
    """Whether to build the CUDA kernels."""

    option: str
    """CMake's option: "1", "0", or "auto", which builds the kernels if the toolkit can compile."""
    reason: str

    @property
    def why(self) -> str:
        """The reason, and how to override the decision."""
        if self.option == "0":
            return f"{self.reason} (CS_KERNELS_CUDA=1 builds them)"
        otherwise = "CS_KERNELS_CUDA=0 leaves them out, CUDAARCHS=90 builds for one architecture"
        return f"{self.reason} ({otherwise})"

    def __str__(self) -> str:
        return f"CUDA kernels: {'no' if self.option == '0' else 'yes'}: {self.why}"


def decide(
    requested: str | None, toolkit: tuple[int, int] | None, torch: Torch | None, driver: bool
) -> Decision:
    """Follows the request if there is one; otherwise, builds the kernels where they are usable.

    Args:
        requested: The environment variable CS_KERNELS_CUDA.
        toolkit: The version of the CUDA toolkit on the path.
        torch: The torch in the environment for which the package is built.
        driver: Whether NVIDIA's driver is installed.

    Raises:
        ValueError: The request is neither 0, 1 nor auto.

    """
    if requested not in (None, "", "auto", "0", "1"):
        raise ValueError(f"CS_KERNELS_CUDA must be 0, 1 or auto, got {requested!r}")
    if requested in ("0", "1"):
        return Decision(requested, f"CS_KERNELS_CUDA={requested}")
    if toolkit is None:
        return Decision("0", "no CUDA compiler (nvcc) was on the path")
    if toolkit < _OLDEST_TOOLKIT:
        oldest, version = (".".join(map(str, version)) for version in (_OLDEST_TOOLKIT, toolkit))
        return Decision(
            "0", f"CUDA {oldest} or later is required, but CUDA {version} was on the path"
        )
    if torch is not None and torch.version is not None:
        cuda = "no CUDA" if torch.cuda is None else f"CUDA {torch.cuda}"
        return Decision(
            "0" if torch.cuda is None else "auto",
            f"torch {torch.version} in this environment has {cuda}",
        )
    which = "no torch" if torch is None else "a torch whose CUDA version is unknown"
    return Decision(
        "auto" if driver else "0",
        f"the build found {which}, and {'the' if driver else 'no'} NVIDIA driver",
    )


def installed_torch(folders: Iterable[Path]) -> Torch | None:
    """The first torch in these package folders, according to its version.py."""
    for folder in folders:
        path = folder / "torch" / "version.py"
        if path.is_file():
            constants = _constants(path)
            # A CPU build has `cuda = None`; a missing name proves nothing.
            if not isinstance(constants.get("__version__"), str) or "cuda" not in constants:
                return Torch(None, None)
            cuda = constants["cuda"]
            return Torch(str(constants["__version__"]), cuda and str(cuda))
    return None


def _constants(path: Path) -> dict[str, object]:
    """The literal values that a module assigns to its names."""
    try:
        module = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    constants: dict[str, object] = {}
    for statement in module.body:
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        if isinstance(statement.value, ast.Constant):
            for target in targets:
                if isinstance(target, ast.Name):
                    constants[target.id] = statement.value.value
    return constants


def package_folders() -> list[Path]:
    """The package folders of the environment for which the package is built.

    The folders are not on the path of an isolated build. Builds by pip keep the environment's
    prefix. Builds by uv and `python -m build` have their own prefix, without torch.
    """
    folders = [*sys.path, *(sysconfig.get_path(name) for name in ("purelib", "platlib"))]
    folders += site.getsitepackages()
    if sys.prefix == sys.base_prefix:
        folders.append(site.getusersitepackages())
    return [Path(folder) for folder in dict.fromkeys(folders) if folder]


def toolkit_version() -> tuple[int, int] | None:
    """The version of the CUDA compiler that CMake would choose."""
    compiler = shlex.split(os.environ.get("CUDACXX", "")) or ["nvcc"]
    path = shutil.which(compiler[0])
    if path is None:
        return None
    try:
        output = subprocess.run(
            [path, "--version"], capture_output=True, text=True, check=False
        ).stdout
    except OSError:
        return None
    release = re.search(r"release (\d+)\.(\d+)", output)
    return (int(release[1]), int(release[2])) if release else None


def driver_installed(module: Path = Path("/proc/driver/nvidia/version")) -> bool:
    """Whether NVIDIA's driver is installed: its module is loaded, or its library can be found."""
    if module.exists():
        return True
    ldconfig = shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")
    if ldconfig is None:
        return False
    libraries = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False).stdout
    return library_cached(libraries)


def library_cached(libraries: str) -> bool:
    """Whether the output of `ldconfig -p` lists the driver's library.

    Toolkits ship a library for linking (`stubs`) and one for older drivers (`compat`). Neither is a
    driver.
    """
    return any(
        line.lstrip().startswith("libcuda.so.1 ") and not re.search(r"/(stubs|compat)/", line)
        for line in libraries.splitlines()
    )


def decision() -> Decision:
    """The decision for this build."""
    return decide(
        os.environ.get("CS_KERNELS_CUDA"),
        toolkit_version(),
        installed_torch(package_folders()),
        driver_installed(),
    )
