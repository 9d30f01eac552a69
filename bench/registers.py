"""Registers, stacks and spills of the CUDA kernels, as ptxas reports them in a build's log.

    CS_KERNELS_REPORT=1 pip install -v . 2>&1 | tee build.log; python bench/registers.py build.log

Ends with 1 if a kernel has a stack or spills, or if there is no kernel.
"""

import re
import subprocess
import sys
from pathlib import Path

from cs_kernels import _C

_KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<architecture>\w+)'"
    r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores,"
    r" (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def _readable(names: list[str]) -> list[str]:
    """Demangled names without namespaces and arguments."""
    result = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [
        re.sub(r"cs_kernels::cuda::|\(anonymous namespace\)::|^void |\(int\)|\(\w+\)$", "", name)
        for name in result
    ]


def main(log: Path) -> int:
    """Prints a line a kernel, the greatest of all architectures; the exit status."""
    kernels = [match.groupdict() for match in _KERNEL.finditer(log.read_text())]
    for kernel, name in zip(kernels, _readable([k["name"] for k in kernels]), strict=True):
        kernel["name"] = name
    columns = ("registers", "stack", "stores", "loads")
    architectures = sorted({kernel["architecture"] for kernel in kernels})
    print(f"{len(kernels)} kernels for {', '.join(architectures)}; the greatest of these, in bytes")
    print(f"{'kernel':50}" + "".join(f"{column:>10}" for column in columns))
    for name in sorted({kernel["name"] for kernel in kernels}):
        of_name = [kernel for kernel in kernels if kernel["name"] == name]
        greatest = (max(int(kernel[column]) for kernel in of_name) for column in columns)
        print(f"{name:50}" + "".join(f"{number:10}" for number in greatest))
    cuda = getattr(_C, "cuda", None)
    for tasks in (2, 4, 8, 16, 64) if cuda else ():
        of_block = ", ".join(f"{kernel} {n}" for kernel, n in cuda.shared_memory(tasks).items())
        print(f"shared memory of a block without held tiles, {tasks} tasks: {of_block}")
    failed = [k for k in kernels if any(k[column] != "0" for column in columns[1:])]
    for kernel in failed:
        print(f"in local memory: {kernel['name']} for {kernel['architecture']}")
    return int(bool(failed) or not kernels)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
