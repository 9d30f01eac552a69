"""Whether a build has the CUDA kernels, for setup.py.

It runs in an isolated build, where nothing but the standard library is to be had. Torch is never
imported and no GPU is asked: what is installed decides.
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
    """None if its files do not tell."""
    cuda: str | None
    """The version of CUDA that it was built with."""


@dataclass(frozen=True)
class Decision:
    """Whether to build the CUDA kernels."""

    option: str
    """For CMake: 1, 0, or auto: if there is a toolkit that compiles."""
    reason: str

    @property
    def why(self) -> str:
        """The reason, and how to get the other."""
        if self.option == "0":
            return f"{self.reason} (CS_KERNELS_CUDA=1 builds them)"
        otherwise = "CS_KERNELS_CUDA=0 leaves them out, CUDAARCHS=90 builds for one architecture"
        return f"{self.reason} ({otherwise})"

    def __str__(self) -> str:
        return f"CUDA kernels: {'no' if self.option == '0' else 'yes'}: {self.why}"


def decide(
    requested: str | None, toolkit: tuple[int, int] | None, torch: Torch | None, driver: bool
) -> Decision:
    """Builds them for those who can use them, if nothing is requested.

    Args:
        requested: The environment variable CS_KERNELS_CUDA.
        toolkit: The version of the CUDA toolkit on the path.
        torch: The one in the environment that the package is built for.
        driver: Whether NVIDIA's driver is installed.

    Raises:
        ValueError: What is requested is not known.

    """
    if requested not in (None, "", "auto", "0", "1"):
        raise ValueError(f"CS_KERNELS_CUDA must be 0, 1 or auto, got {requested!r}")
    if requested in ("0", "1"):
        return Decision(requested, f"CS_KERNELS_CUDA={requested}")
    if toolkit is None:
        return Decision("0", "no CUDA compiler (nvcc) was on the path")
    if toolkit < _OLDEST_TOOLKIT:
        needed, found = (".".join(map(str, version)) for version in (_OLDEST_TOOLKIT, toolkit))
        return Decision("0", f"they need CUDA {needed} or later, on the path was {found}")
    if torch is not None and torch.version is not None:
        has = "no CUDA" if torch.cuda is None else f"CUDA {torch.cuda}"
        return Decision(
            "0" if torch.cuda is None else "auto",
            f"torch {torch.version} in this environment has {has}",
        )
    found = "no torch" if torch is None else "a torch that does not tell whether it has CUDA"
    return Decision(
        "auto" if driver else "0",
        f"the build found {found}, and {'the' if driver else 'no'} NVIDIA driver",
    )


def installed_torch(folders: Iterable[Path]) -> Torch | None:
    """The first torch in some folders of packages, from its version.py."""
    for folder in folders:
        path = folder / "torch" / "version.py"
        if path.is_file():
            facts = _constants(path)
            # Builds for the CPU say `cuda = None`; silence is no answer.
            if not isinstance(facts.get("__version__"), str) or "cuda" not in facts:
                return Torch(None, None)
            return Torch(str(facts["__version__"]), facts["cuda"] and str(facts["cuda"]))
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
    """Where the environment that the package is built for has its packages.

    They are not on the path of an isolated build. The prefix of pip's builds is still that of the
    environment. Those of uv and of `python -m build` have a prefix of their own, without torch.
    """
    folders = [*sys.path, *(sysconfig.get_path(name) for name in ("purelib", "platlib"))]
    folders += site.getsitepackages()
    if sys.prefix == sys.base_prefix:
        folders.append(site.getusersitepackages())
    return [Path(folder) for folder in dict.fromkeys(folders) if folder]


def toolkit_version() -> tuple[int, int] | None:
    """The version of the CUDA compiler that CMake would take."""
    compiler = shlex.split(os.environ.get("CUDACXX", "")) or ["nvcc"]
    found = shutil.which(compiler[0])
    if found is None:
        return None
    try:
        output = subprocess.run(
            [found, "--version"], capture_output=True, text=True, check=False
        ).stdout
    except OSError:
        return None
    release = re.search(r"release (\d+)\.(\d+)", output)
    return (int(release[1]), int(release[2])) if release else None


def driver_installed(module: Path = Path("/proc/driver/nvidia/version")) -> bool:
    """Whether NVIDIA's driver is: its module is loaded, or its library can be found."""
    if module.exists():
        return True
    ldconfig = shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")
    if ldconfig is None:
        return False
    libraries = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False).stdout
    return library_cached(libraries)


def library_cached(libraries: str) -> bool:
    """Whether the output of `ldconfig -p` has the driver's library.

    Toolkits bring one to link with (`stubs`) and one for older drivers (`compat`): no driver.
    """
    return any(
        line.lstrip().startswith("libcuda.so.1 ") and not re.search(r"/(stubs|compat)/", line)
        for line in libraries.splitlines()
    )


def decision() -> Decision:
    """For this build."""
    return decide(
        os.environ.get("CS_KERNELS_CUDA"),
        toolkit_version(),
        installed_torch(package_folders()),
        driver_installed(),
    )
