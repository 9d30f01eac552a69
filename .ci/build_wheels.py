"""Builds a wheel with CUDA kernels for every available Python, and tests each wheel.

A further wheel, without compiled kernels, serves all other platforms.

    build_wheels.py [--require-torch] [--no-pure] [PYTHON ...]

Kernels do not depend on Python, so they are compiled once, for the first wheel. The compilers'
output goes to build/wheel.log, and the wheels to dist, with the manylinux tag of the oldest Linux
that has their symbols.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13", "3.14")

_ROOT = Path(__file__).resolve().parents[1]

# Checks that a Python works and has headers, ensurepip and venv: pyenv has commands for versions
# that are not installed, and Debian's Pythons may lack the other parts.
_PROBE = """
import ensurepip, pathlib, sys, sysconfig, venv
assert pathlib.Path(sysconfig.get_path("include"), "Python.h").exists()
print(f"{sys.version_info[0]}.{sys.version_info[1]}")
"""


def _version(python: str) -> str | None:
    """The version of a Python, or None if no wheel can be built for it."""
    try:
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _find(version: str) -> str | None:
    """Finds a Python of this version on the path or in pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    installed = sorted(pyenv.glob(f"{version}.*/bin/python{version}"), reverse=True)
    for python in (f"python{version}", *map(str, installed)):
        found = shutil.which(python)
        if found is not None and _version(found) == version:
            return found
    return None


def _pip(python: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-m", "pip", *arguments],
        cwd=_ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def _must(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode != 0:
        sys.exit("\n".join([*done.stdout.splitlines()[-100:], f"failed: {done.args}"]))


def _install_torch(python: Path) -> bool:
    """Installs torch's CPU build, if one exists; other builds bring gigabytes of CUDA libraries."""
    pin = re.search(r"^torch==(\S+)$", (_ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pin is not None
    done = _pip(python, "install", "--quiet", f"torch=={pin[1]}+cpu")
    if "No matching distribution found for torch" in done.stdout:
        return False
    _must(done)
    return True


def _build(python: Path, log: Path, folder: Path, **variables: str) -> Path:
    """Builds a wheel for this machine, and appends the compilers' output to the log.

    Build requirements come from the package index alone; an extra index serves only torch.
    """
    command = ("wheel", "--verbose", "--no-deps", "--wheel-dir", str(folder), ".")
    done = _pip(python, *command, PIP_EXTRA_INDEX_URL="", **variables)
    with log.open("a") as file:
        file.write(done.stdout)
    _must(done)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _repair(wheel: Path) -> Path:
    """Copies the wheel to dist, with a manylinux tag.

    The loader uses torch's OpenMP, which is already in memory; a copy in the wheel would start a
    second pool of threads.
    """
    dist, tools = _ROOT / "dist", Path(sys.executable).parent
    before = set(dist.glob("*.whl"))
    _must(
        subprocess.run(
            [
                *(sys.executable, "-m", "auditwheel", "repair", "--exclude", "libgomp.so.1"),
                *("--wheel-dir", dist, wheel),
            ],
            env=os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    )
    (repaired,) = set(dist.glob("*.whl")) - before
    return repaired


def _use(python: Path, *arguments: str) -> str:
    """Tests the installed wheel, isolated from the sources and from the caller's path."""
    used = subprocess.run(
        [python, "-I", _ROOT / ".ci/check_wheel.py", *arguments],
        cwd=python.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    _must(used)
    return used.stdout.splitlines()[-1]


def _pure(python: Path, log: Path, folder: Path) -> None:
    """Builds a wheel without compiled kernels into dist, and tests it; needs torch installed."""
    wheel = _build(python, log, folder, CS_KERNELS_NATIVE="0", CS_KERNELS_CUDA="0")
    _must(_pip(python, "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)))
    print(f"{wheel.name}: {_use(python, '--pure')}", flush=True)
    shutil.copy(wheel, _ROOT / "dist")


def main() -> None:
    """Builds all wheels; exits with a message if a wheel fails, or if no Python is found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--require-torch", action="store_true", help="fail if a Python lacks torch")
    parser.add_argument("--no-pure", action="store_true", help="only wheels for this platform")
    parser.add_argument("pythons", nargs="*", help=f"default: {', '.join(VERSIONS)}, if installed")
    arguments = parser.parse_args()
    pythons = {}
    for wanted in arguments.pythons or VERSIONS:
        python = wanted if arguments.pythons else _find(wanted)
        version = _version(python) if python else None
        if python is not None and version is not None:
            pythons[version] = python
        elif arguments.pythons:
            sys.exit(f"{wanted} does not run, or lacks its headers or ensurepip")
        else:
            print(f"Python {wanted}: skipped, as it is not installed here")
    if not pythons:
        sys.exit(f"a Python of {', '.join(VERSIONS)} must be installed, with its headers")
    build = Path(os.environ.setdefault("CS_KERNELS_BUILD", "build/compiled"))
    # If a folder is reused, CMake keeps the architectures of the first build, and setuptools keeps
    # modules that the sources no longer have.
    for folder in (_ROOT / "dist", _ROOT / build, *(_ROOT / "build").glob("lib*")):
        shutil.rmtree(folder, ignore_errors=True)
    log = _ROOT / "build" / "wheel.log"
    log.parent.mkdir(exist_ok=True)
    log.unlink(missing_ok=True)
    os.environ |= {"CS_KERNELS_CUDA": "1", "CS_KERNELS_REPORT": "1"}
    pure = arguments.no_pure
    for version, source in pythons.items():
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            _must(
                subprocess.run(
                    [source, "-m", "venv", folder], capture_output=True, text=True, check=False
                )
            )
            python = Path(folder) / "bin" / "python"
            wheel = _repair(_build(python, log, Path(folder) / "wheel"))
            built = time.monotonic()
            torch = _install_torch(python)
            if arguments.require_torch and not torch:
                sys.exit(f"there is no CPU build of torch for Python {version}")
            dependencies = ["--constraint", "constraints.txt"] if torch else ["--no-deps"]
            _must(_pip(python, "install", "--quiet", *dependencies, str(wheel)))
            used = _use(python, *([] if torch else ["--alone"]))
            seconds = f"built in {built - start:.0f} s, used in {time.monotonic() - built:.0f} s"
            print(f"{wheel.name}: {seconds}; {used}", flush=True)
            if torch and not pure:
                _pure(python, log, Path(folder) / "pure")
            pure |= torch
        if not torch:
            print(f"Python {version}: there is no CPU build of torch, so only _C was imported")


if __name__ == "__main__":
    main()
