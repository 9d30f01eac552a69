"""Drives CMake: CMakeLists.txt has what to compile and how, pyproject.toml all else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE / "python"))

from cuda_decision import decision  # noqa: E402
from long_description import long_description  # noqa: E402


class CMakeBuild(build_ext):
    """Builds `cs_kernels._C` with CMake, where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        """Configures and builds one extension."""
        output = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        # Given, it outlives this build: another one with the same options compiles nothing again.
        build = Path(os.environ.get("CS_KERNELS_BUILD") or self.build_temp).resolve()
        cuda = decision()
        print(cuda, flush=True)
        configure = [
            "cmake",
            f"-S{_HERE}",
            f"-B{build}",
            "-GNinja",
            # The folder may have been another Python's.
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


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    ext_modules=[Extension("cs_kernels._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
