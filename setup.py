"""Builds with CMake: CMakeLists.txt defines the extension, pyproject.toml everything else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE / "python"))

from cuda_decision import decision  # noqa: E402
from long_description import long_description  # noqa: E402

_REQUEST = os.environ.get("CS_KERNELS_NATIVE") or "auto"
_CUDA = os.environ.get("CS_KERNELS_CUDA") == "1"
if _REQUEST not in ("0", "1", "auto"):
    sys.exit(f"CS_KERNELS_NATIVE must be 0, 1 or auto, got {_REQUEST!r}")
if _REQUEST == "0" and _CUDA:
    sys.exit("CS_KERNELS_CUDA=1 conflicts with CS_KERNELS_NATIVE=0, which builds no kernels")


class CMakeBuild(build_ext):
    """Builds `cs_kernels._C` with CMake, in the folder that setuptools expects."""

    def run(self) -> None:
        """Builds the extension; on failure, exits if it was requested, else uses pure torch."""
        try:
            super().run()
        except (ImportError, OSError, subprocess.CalledProcessError) as error:
            for ext in self.extensions:  # An earlier build's module may not match.
                Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
            why = f"cs_kernels has no compiled kernels: {_why(error)}"
            if _CUDA or _REQUEST == "1":
                sys.exit(why)
            self.extensions.clear()
            print(f"{why}. It will use slower pure torch; to fail instead, set CS_KERNELS_NATIVE=1")

    def build_extension(self, ext: Extension) -> None:
        """Configures and builds one extension."""
        import pybind11

        output = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        # A folder in CS_KERNELS_BUILD outlives this build, so a rebuild with the same options
        # compiles nothing.
        build = Path(os.environ.get("CS_KERNELS_BUILD") or self.build_temp).resolve()
        cache = build / "CMakeCache.txt"
        if cache.exists() and f"CMAKE_CACHEFILE_DIR:INTERNAL={build}\n" not in cache.read_text():
            shutil.rmtree(build)  # The checkout was copied or moved, which CMake refuses.
        cuda = decision()
        print(cuda, flush=True)
        configure = [
            "cmake",
            f"-S{_HERE}",
            f"-B{build}",
            "-GNinja",
            # The folder may have been configured for another Python.
            "-U*Python*",
            "-U*PYTHON*",
            f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={output}",
            f"-DCS_KERNELS_CUDA={cuda.option}",
            f"-DCS_KERNELS_WITHOUT_CUDA={cuda.why}",
            f"-DCS_KERNELS_REPORT={os.environ.get('CS_KERNELS_REPORT', '0')}",
        ]
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build)], check=True)


def _why(error: Exception) -> str:
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    failed = (
        "the compiler failed" if "--build" in error.cmd else "CMake could not configure the build"
    )
    return f"{failed}, as its messages above say"


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    # Without an extension, the wheel runs on every platform.
    ext_modules=[] if _REQUEST == "0" else [Extension("cs_kernels._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
