"""The tests' fixtures, and the hooks that mark, select and time tests."""

import gc
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist
import torchvision_operators
from layers import EMULATION, INTERPRETED, SMALL, emulate, patch_language_once
from pairwise import left_out
from plain_training import in_float64
from ranks import Ranks
from torch import Tensor

import cs_kernels as cs

if EMULATION:
    emulate()
if INTERPRETED:
    patch_language_once()

# Oversubscribed cores make multi-process tests six times as slow.
if "PYTEST_XDIST_WORKER" in os.environ:
    workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # In child processes.

KINDS = ("docs", "paper", "ranks", "compile", "frameworks", "networks", "loop", "kernel")
"""Every test needs one of these markers; the table of times uses its first, in this order."""

RUNNABLE = [name for name, reason in cs.available_backends().items() if reason is None]
# The emulation's seed and number of resident blocks: one block after another, or three at a time in
# random order. The number of blocks decides whether shared memory holds all tiles of a small trunk.
ORDERS = {"cuda": (0, 1), "cuda-shuffled": (1, 3)} if EMULATION else {}


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seeds torch; in kernel tests, deterministic mode fills new tensors with NaN.

    An element that no kernel writes then shows as NaN.
    """
    torch.use_deterministic_algorithms(request.node.get_closest_marker("kernel") is not None)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _no_process_group() -> Iterator[None]:
    """Destroys the process group that a test or its framework leaves behind."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def group(tmp_path: Path) -> dist.ProcessGroup:
    """A process group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@pytest.fixture(autouse=True)
def _compiles() -> Iterator[None]:
    """Asserts that a test leaves torch.compile on; else later tests would run eagerly."""
    yield
    if "torch._dynamo" not in sys.modules:
        return
    if torch._dynamo.eval_frame._stance.stance != "default":
        gc.collect()  # A traceback may keep a pass alive, which restores the stance when it ends.
    stance = torch._dynamo.eval_frame._stance.stance
    torch.compiler.set_stance("default")
    assert stance == "default"


@pytest.fixture
def float64() -> Iterator[None]:
    with in_float64():
        yield


@pytest.fixture
def accelerate() -> Iterator[Any]:
    """The accelerate package; its global state is reset before and after the test."""
    torchvision_operators.define()
    package = pytest.importorskip("accelerate")

    def forget() -> None:
        package.state.AcceleratorState._reset_state(reset_partial_state=True)
        package.state.GradientState._reset_state()

    forget()
    yield package
    forget()


class Elsewhere:
    """Runs a backend's operators on copies of a test's tensors on another device.

    Whole storages are copied there and back, so tensors keep their memory layout.
    """

    def __init__(self, backend: Any) -> None:
        self._device = backend.devices[0]
        operators = backend.operators.items()
        self.operators = {name: self._moved(operator) for name, operator in operators}
        self.run_sketch = self._moved(backend.run_sketch)

    def _moved(self, operator: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            memory: dict[int, tuple[Tensor, Tensor]] = {}
            result = operator(*(self._there(a, memory) for a in args))
            for here, there in memory.values():
                here.copy_(there)
            return [r.cpu() for r in result] if isinstance(result, list) else self._back(result)

        return call

    @staticmethod
    def _back(result: Any) -> Any:
        return result.cpu() if isinstance(result, Tensor) else result

    def _there(self, argument: Any, memory: dict[int, tuple[Tensor, Tensor]]) -> Any:
        if isinstance(argument, list | tuple):
            return [self._there(a, memory) for a in argument]
        if not isinstance(argument, Tensor):
            return argument
        storage = argument.untyped_storage()
        if storage.data_ptr() not in memory:
            here = torch.empty(0, dtype=torch.uint8).set_(storage)
            memory[storage.data_ptr()] = here, here.to(self._device, copy=True)
        there = memory[storage.data_ptr()][1].untyped_storage()
        view = torch.empty(0, dtype=argument.dtype, device=self._device)
        return view.set_(there, argument.storage_offset(), argument.shape, argument.stride())


@pytest.fixture(params=[name for name in RUNNABLE if name not in ORDERS] + list(ORDERS))
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Activates each backend that can run here; a GPU backend gets copies of the tensors."""
    name = request.param.removesuffix("-shuffled")
    if request.param in ORDERS:
        cs.ops.cuda._kernels.order(*ORDERS[request.param])
    chosen = cs.ops.backends._BACKENDS[name]
    if not chosen.computes_on("cpu"):
        elsewhere = Elsewhere(chosen)
        monkeypatch.setattr(cs.ops.backends, "_select", lambda device: elsewhere)
    with cs.use_backend(name):
        yield name


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], Ranks]]:
    """Pools of rank processes by size, each started once per session."""
    started: dict[int, Ranks] = {}

    def pool(size: int) -> Ranks:
        if size not in started:
            started[size] = Ranks(size)
        return started[size]

    yield pool
    for ranks in started.values():
        ranks.stop()


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full"))


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, object]) -> None:
    doctest_namespace["torch"] = torch
    doctest_namespace["cs"] = cs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="fast tests of kernels and the loop")
    parser.addoption("--full", action="store_true", help="all cases, not a sample")
    parser.addoption("--part", metavar="K/N", help="the sample, and part K (from 0) of the rest")
    parser.addoption("--backends", metavar="A,B", help="only the kernel tests of these backends")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Fails a test without a kind marker, because some runs would silently leave it out."""
    if not any(marker.name in KINDS for marker in metafunc.definition.iter_markers()):
        name = metafunc.definition.name
        pytest.fail(f"{name} must have one of the markers {', '.join(KINDS)}", pytrace=False)


def _backends(item: pytest.Item) -> set[str]:
    """The backends that a test runs on: its parameter, or its marker's arguments."""
    chosen = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
    if chosen in RUNNABLE or chosen in ORDERS:
        return {chosen.removesuffix("-shuffled")}
    return {name for marker in item.iter_markers("kernel") for name in marker.args}


def _mark(item: pytest.Item) -> None:
    """Adds the implied markers; all tests on ranks share one worker and its processes."""
    if not isinstance(item, pytest.Function):
        item.add_marker("docs")
    if _backends(item):
        item.add_marker("kernel")
    if item.get_closest_marker("ranks") and not item.get_closest_marker("xdist_group"):
        item.add_marker(pytest.mark.xdist_group("ranks"))


def _name_groups(items: list[pytest.Item]) -> None:
    """Appends @GROUP to names: pytest 9.2 ignores the groups that xdist 3.8 sets."""
    for item in items:
        group = item.get_closest_marker("xdist_group")
        if group and "@" not in item.nodeid.rpartition("]")[2] and hasattr(item, "_id"):
            item._id = type(item._id).parse(f"{item.nodeid}@{group.args[0]}")


def _is_quick(item: pytest.Item) -> bool:
    """Whether `--quick` runs a test: fast kernel and loop tests, in float32 and bfloat16."""
    kinds = {marker.name for marker in item.iter_markers()}
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    dtypes = {value for value in values if isinstance(value, torch.dtype)}
    quick = not kinds & {"slow", *KINDS} - {"kernel", "loop"}
    return quick and dtypes <= {torch.float32, torch.bfloat16}


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Marks tests before `-k` and `-m` select some of them, and samples the selected ones."""
    for item in items:
        _mark(item)
    yield
    if getattr(config.option, "loadgroup", False):
        _name_groups(items)
    chosen = items[:]
    if config.getoption("--backends"):
        names = {*config.getoption("--backends").split(",")}
        chosen = [item for item in chosen if _backends(item) & names]
    if config.getoption("--quick"):
        chosen = [item for item in chosen if _is_quick(item)]
    if not config.getoption("--full"):
        quick = config.getoption("--quick")
        rest = left_out(chosen, most=1 if SMALL else 2, quick=quick)
        if config.getoption("--part"):
            part, parts = map(int, config.getoption("--part").split("/"))
            rest -= {*[item for item in chosen if item in rest][part::parts]}
        chosen = [item for item in chosen if item not in rest]
    kept = {*chosen}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen
    gc.freeze()  # Garbage collections then skip imported objects and pytest's items.


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # Some libraries complain about objects that are left at exit.


def pytest_configure(config: pytest.Config) -> None:
    examples = 100 if config.getoption("--full") else 10 if SMALL else 40
    hypothesis.settings.register_profile(
        "examples",
        deadline=None,
        max_examples=examples,
        # The backend fixture stays active for all examples of a test, as intended.
        suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    )
    hypothesis.settings.load_profile("examples")
    if INTERPRETED:
        # NumPy warns about operations that a GPU computes silently, such as infinity minus
        # infinity.
        config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the time that tests of each marker took, summed over all processes."""
    seconds, numbers = Counter[str](), Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                kind = next(kind for kind in KINDS if kind in report.keywords)
                seconds[kind] += report.duration
                numbers[kind] += report.when == "call"
    if seconds:
        terminalreporter.section("seconds by marker")
    for kind, total in seconds.most_common():
        terminalreporter.line(f"{kind:<10} {total:6.0f} s  {numbers[kind]:5} tests")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips compilation tests under Triton's interpreter, and files that `--quick` leaves out."""
    if collection_path.suffix != ".py":
        return None
    if INTERPRETED and collection_path.name == "test_triton_compiles.py":
        return True
    if not config.getoption("--quick"):
        return None
    text = collection_path.read_text()
    slow = re.search(r"^pytestmark = .*mark\.(paper|slow)", text, re.MULTILINE)
    quick = collection_path.name.startswith("test_") and re.search(r"mark\.(kernel|loop)", text)
    return None if quick and not slow else True
