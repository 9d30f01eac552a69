"""Registers, stacks and spills of the CUDA kernels, as ptxas reports them in a build's log.

    CS_KERNELS_REPORT=1 pip install -v . 2>&1 | tee build.log; python bench/registers.py build.log

The exit status is 1 if a kernel has a stack or spills, or if there is no kernel.
"""

import re
import subprocess
import sys
from pathlib import Path

from cs_kernels import _C

COLUMNS = ("registers", "stack", "stores", "loads")
KERNEL = re.compile(
    r"Compiling entry function '(?P<name>.+?)' for '(?P<architecture>\w+)'"
    r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores,"
    r" (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)
# Removed from demangled names.
NAMESPACES_AND_ARGUMENTS = r"cs_kernels::cuda::|\(anonymous namespace\)::|^void |\(int\)|\(\w+\)$"

if __name__ == "__main__":
    log = Path(sys.argv[1]).read_text()
    demangled = subprocess.run(["c++filt"], input=log, capture_output=True, text=True, check=True)
    kernels = [match.groupdict() for match in KERNEL.finditer(demangled.stdout)]
    of_name: dict[str, list[dict[str, str]]] = {}
    for kernel in kernels:
        name = re.sub(NAMESPACES_AND_ARGUMENTS, "", kernel["name"])
        of_name.setdefault(name, []).append(kernel)
    architectures = ", ".join(sorted({kernel["architecture"] for kernel in kernels}))
    print(f"{len(kernels)} kernels for {architectures}; maximum per name; memory in bytes")
    print(f"{'kernel':50}" + "".join(f"{column:>10}" for column in COLUMNS))
    for name, found in sorted(of_name.items()):
        greatest = (max(int(kernel[column]) for kernel in found) for column in COLUMNS)
        print(f"{name:50}" + "".join(f"{number:10}" for number in greatest))
    cuda = getattr(_C, "cuda", None)
    for tasks in (2, 4, 8, 16, 64) if cuda else ():
        of_block = ", ".join(f"{kernel} {n}" for kernel, n in cuda.shared_memory(tasks).items())
        print(f"shared memory per block, bytes, {tasks} tasks: {of_block}")
    failed = [k for k in kernels if any(k[column] != "0" for column in COLUMNS[1:])]
    for kernel in failed:
        print(f"in local memory: {kernel['name']} for {kernel['architecture']}")
    sys.exit(bool(failed) or not kernels)
