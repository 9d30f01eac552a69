"""Tests an installed wheel: `python check_wheel.py [--alone | --pure]`.

By default, the wheel must have CUDA kernels; with `--pure`, it must have no compiled module.
`--alone` loads the compiled module without the package, whose import needs torch.
"""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import warnings
from array import array
from types import ModuleType


def _alone() -> ModuleType:
    distribution = importlib.metadata.distribution("cs_kernels")
    files = distribution.files or ()
    (file,) = (file for file in files if file.name.startswith("_C.") and file.suffix == ".so")
    spec = importlib.util.spec_from_file_location("cs_kernels._C", distribution.locate_file(file))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_alone() -> str:
    """Checks that the module loads, and that a kernel computes on memory without torch."""
    module = _alone()
    weight, energies = array("f", [3, 4, 0, 2]), array("d", [0, 0])
    module.channel_energies(
        type=module.data_types.index("float32"),
        layout=module.channel_layout((2, 2), (2, 1), 0, 1),
        weight=weight.buffer_info()[0],
        energy=energies.buffer_info()[0],
        threads=1,
    )
    assert energies.tolist() == [25, 4], energies
    assert hasattr(module, "cuda"), module.without_cuda
    return "the compiled module alone, without torch"


def check_tag(expected: str) -> None:
    """Checks the tag, by which installers choose the wheel."""
    tags = importlib.metadata.distribution("cs_kernels").read_text("WHEEL") or ""
    assert expected in tags, tags


def check(*, pure: bool) -> str:
    """Checks that the package imports, an operator computes, and the report lists the kernels."""
    import torch

    import cs_kernels as cs

    backends = cs.available_backends()
    if pure:
        assert "not compiled" in (backends["cpu"] or ""), backends
    else:
        assert backends["cpu"] is None, backends
        assert backends["cuda"] in (None, "there is no NVIDIA GPU"), backends
    with warnings.catch_warnings(record=True) as caught:
        update = cs.functional.project_conflicts(torch.ones(2, 1, 2), torch.zeros(1).long())
    assert update.tolist() == [[2.0, 2.0]], update
    assert [w.category for w in caught] == [UserWarning] * pure, caught
    printed = subprocess.check_output([sys.executable, "-Im", "cs_kernels", "--json"], text=True)
    assert pure or json.loads(printed)["cuda_architectures"], printed
    return f"with torch {torch.__version__}"


if __name__ == "__main__":
    without = "--pure" in sys.argv
    check_tag("py3-none-any" if without else "manylinux")
    print("it works:", check_alone() if "--alone" in sys.argv else check(pure=without))
