"""docs/errors.md has every message that the package raises, and no other one."""

import copy
import re
import textwrap
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import AB, optimizer_of, sgd_of
from raised_messages import (
    HOLE,
    PAGE,
    Entry,
    Message,
    UnreadableError,
    count_literals,
    cpp_messages,
    find_misses,
    patterns_of,
    read_entries,
    read_sources,
    section_of,
    shown,
    squeezed,
)
from torch import Tensor, nn

import cs_kernels as cs


def test_every_message_has_an_entry() -> None:
    missing, _ = find_misses(read_sources(), read_entries())
    if missing:
        pytest.fail(
            "\n".join(
                f"{message.where} raises `{shown(message.template)}`, which docs/errors.md lacks:"
                f" add a ```text block with it, its cause and its remedy, in the section"
                f" {section_of(message.where, read_sources())}"
                for message in missing
            )
        )


def test_every_entry_is_a_message() -> None:
    _, stale = find_misses(read_sources(), read_entries())
    if stale:
        pytest.fail(
            "\n".join(
                f"docs/errors.md:{entry.line} has `{shown(entry.template)}`, which nothing in the"
                " package raises any more: change it, or remove it with its text"
                for entry in stale
            )
        )


def test_entries_are_distinct_and_say_something() -> None:
    """Holes alone would be everything."""
    entries = read_entries()
    assert len(entries) > 200
    assert all(len(re.findall(r"[A-Za-z_]{2,}", entry.template)) >= 3 for entry in entries)
    assert {e: n for e, n in Counter(entry.template for entry in entries).items() if n > 1} == {}


def test_every_entry_has_a_cause_and_a_remedy() -> None:
    """Prose, behind each block of messages."""
    blocks = re.split(r"^```text\n.*?^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    short = [block for block in blocks[1:] if len(re.sub(r"^#.*", "", block, flags=re.M)) < 40]
    assert short == []


def test_links_lead_to_headings() -> None:
    text = PAGE.read_text()
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    slugs = {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in headings}
    links = re.findall(r"\]\(#([^)]*)\)", text)
    assert links
    assert set(links) <= slugs


def _with(name: str, code: str) -> list[Message]:
    """The messages that have no entry when a file has some code more, and only then."""
    now, entries = read_sources(), read_entries()
    sources = {**now, name: now.get(name, "") + "\n\n" + textwrap.dedent(code)}
    known = {message.template for message in find_misses(now, entries)[0]}
    return [m for m in find_misses(sources, entries)[0] if m.template not in known]


@pytest.mark.parametrize(
    "code",
    [
        "def f(x):\n    raise ValueError('loss must be green')",
        "def f(x):\n    raise ValueError(f'loss must be green, got {x}')",
        "def f(x):\n    raise ValueError('loss must be ' + 'green, got ' + str(x))",
        "def f(x):\n    raise ValueError('loss must be green,'\n        f' got {x}') from None",
        "def f(x):\n    return ValueError(f'loss must be green, got {x}')",
        "def f(x):\n    error = ValueError('loss must be green')\n    raise error",
        "def f(x):\n    raise RankError('loss must be green')",
        "def f(x):\n    raise distributed.RankError('loss must be green')",
        "def f(kind):\n    raise kind('loss must be green')",
        "def f(error):\n    error.add_note('loss must be green')",
        "def g(x):\n    return f'loss must be green, got {x}'\n\n"
        "def f(x):\n    raise ValueError(g(x))",
        # As general as other messages, or a little more special.
        "def f(x, y):\n    raise ValueError(f'{x} must be {y}, not green')",
        "def f(x, y):\n    raise ValueError(f'{x} must be in [0, {y})')",
        "def f(x):\n    raise ValueError(f'optimizer must be an optimizer, got {x}')",
    ],
)
@pytest.mark.parametrize("name", ["cs_kernels/checks.py", "cs_kernels/ops/new.py"])
def test_a_new_message_is_noticed(name: str, code: str) -> None:
    (message,) = _with(name, code)
    assert message.where.startswith(name)


@pytest.mark.parametrize(
    "code",
    [
        "def f(message):\n    raise ValueError(message)",
        "def f(x):\n    raise ValueError(str(x))",
        "def f(x):\n    raise ValueError(f'{x}')",
        "def f(errors):\n    raise errors[0]",
    ],
)
def test_messages_that_cannot_be_read_are_refused(code: str) -> None:
    with pytest.raises(UnreadableError, match=r"checks\.py:\d+: "):
        _with("cs_kernels/checks.py", code)


def test_exceptions_without_a_message_need_no_entry() -> None:
    code = """
        def f():
            try:
                raise StaleLayoutError
            except StaleLayoutError as error:
                raise error from None
            raise KeyError()
    """
    assert _with("cs_kernels/checks.py", code) == []


def test_an_entry_that_nothing_raises_is_noticed() -> None:
    """Also one that looks like a general message with words that the package does not have."""
    for template in (
        "trunk must be green",
        f"trunk must be green, got {HOLE}",
        f"{HOLE} must be green, got {HOLE}",
        f"epoch must be an integer of the Gregorian calendar, got {HOLE}",
        f"ranks must have the same colour: rank {HOLE} has {HOLE}, rank {HOLE} has {HOLE}",
    ):
        _, stale = find_misses(read_sources(), [Entry(0, "", template)])
        assert [entry.template for entry in stale] == [template]


def test_messages_in_cpp() -> None:
    source = """
        throw std::invalid_argument("a; b " +
                                    std::to_string(n) + ", got " + std::to_string(f(n)));
        throw std::runtime_error(std::string("cannot ") + what + ": " "it is late");
        throw py::type_error("c");
        throw py::error_already_set();
    """
    expected = [f"a; b {HOLE}, got {HOLE}", f"cannot {HOLE}: it is late", "c"]
    assert [m.template for m in cpp_messages("x.cpp", source)] == expected
    with pytest.raises(UnreadableError, match=r"x\.cpp:1: "):
        list(cpp_messages("x.cpp", "throw std::runtime_error(message);"))


def _entry_of(text: str) -> str:
    """The most specific entry that an error's text fits."""
    fitting = [
        e.template for e in read_entries() if patterns_of(e.template)[1].fullmatch(squeezed(text))
    ]
    assert fitting, text
    return shown(max(fitting, key=count_literals))


class Loop:
    """A training loop, as small as it can be."""

    def __init__(self, *, converted: bool = True, **options: Any) -> None:
        self.trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())
        if converted:
            cs.nn.convert_task_batchnorm(self.trunk, AB)
        self.heads = nn.ModuleDict({task: nn.Linear(4, 1) for task in AB})
        self.sgd = sgd_of(self.trunk, self.heads)
        self.x = torch.randn(8, 3)
        given = {"trunk": self.trunk, "optimizer": self.sgd, "tasks": AB, **options}
        self.opt = cs.MultiTaskOptimizer(**given)

    def loss(self, task: str) -> Tensor:
        result: Tensor = self.heads[task](self.trunk(self.x)).square().mean()
        return result

    def losses(self) -> dict[str, Tensor]:
        return {task: self.loss(task) for task in AB}


def _dense(**options: Any) -> Loop:
    """A loop with one forward pass for all tasks."""
    return Loop(converted=False, method=cs.PCGrad(), **options)


def _optimizer_before_the_conversion() -> None:
    trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    sgd = sgd_of(trunk)
    cs.nn.convert_task_batchnorm(trunk, AB)
    cs.MultiTaskOptimizer(trunk, sgd, AB)


def _a_copy_of_the_trunk(*, frozen: bool) -> None:
    loop = Loop()
    twin = copy.deepcopy(loop.trunk).requires_grad_(not frozen)
    cs.nn.set_task(twin, "a")
    loop.opt.step(lambda task: loop.heads[task](twin(loop.x)).mean())


def _another_task_in_the_closure() -> None:
    loop = Loop()

    def closure(task: str) -> Tensor:
        cs.nn.set_task(loop.trunk, "a")
        return loop.loss(task)

    loop.opt.step(closure)


def _two_backward_calls() -> None:
    loop = _dense()
    loop.opt.backward(loop.losses())
    loop.opt.backward(loop.losses())


def _after_the_first_micro_batch(then: Callable[[Loop], object]) -> None:
    loop = _dense()
    loop.opt.backward(loop.losses(), update=False)
    then(loop)


def _clipped_in_between(loop: Loop) -> None:
    nn.utils.clip_grad_norm_(loop.trunk.parameters(), 1e-3)
    loop.opt.backward(loop.losses())


def _an_activation_in_between() -> None:
    trunk = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4))
    opt = optimizer_of(cs.nn.convert_task_batchnorm(trunk, AB))
    opt.step(lambda task: trunk(torch.randn(8, 3)).square().mean())


def _sparse_gradients() -> None:
    trunk = nn.Embedding(5, 4, sparse=True)
    optimizer_of(trunk, cs.PCGrad()).step(lambda task: trunk(torch.arange(3)).square().mean())


def _frozen() -> None:
    trunk = nn.Linear(3, 4).requires_grad_(False)
    optimizer_of(trunk, cs.PCGrad())


def _another_backend() -> None:
    with cs.use_backend("gpu"):
        pass


def _misspelt(loop: Loop) -> None:
    with cs.nn.active_task(loop.trunk, "A"):
        pass


@pytest.mark.parametrize(
    ("mistake", "entry"),
    [
        (lambda: Loop(converted=False), "trunk must have task-specific normalization for"),
        (
            _optimizer_before_the_conversion,
            "optimizer must hold every parameter of trunk that requires a gradient",
        ),
        (
            lambda: Loop(optimizer=torch.optim.LBFGS([nn.Parameter(torch.ones(1))])),
            "optimizer must make a step without a closure",
        ),
        (lambda: Loop(method=cs.PCGrad), "method must be a method such as cs.PCGrad()"),
        (lambda: Loop(schedule="joint"), "schedule must be a schedule such as"),
        (lambda: Loop(tasks="ab"), "tasks must be a sequence of names"),
        (lambda: Loop(tasks=["a", "c"]), "tasks must be known to every"),
        (
            lambda: Loop(weighting=cs.FixedWeights({"a": 1.0})),
            "weighting must have a weight for each",
        ),
        (lambda: Loop(layers={"0.weight": "1"}), "layers must name layers of trunk"),
        (lambda: Loop(process_group="gloo"), "process_group must be a process group"),
        (_frozen, "trunk must have a shared parameter that requires a gradient"),
        (lambda: cs.Mixed(epochs=2.5), "{...} must be an integer"),
        (lambda: cs.NashMTL(update_every=0), "{...} must be at least"),
        (
            lambda: cs.nn.convert_task_batchnorm(nn.LayerNorm(3), AB),
            "module must have batch normalization to convert",
        ),
        (lambda: cs.nn.TaskBatchNorm1d(3, ["train"]), "tasks must not be named as an attribute"),
        (lambda: Loop().trunk(torch.ones(8, 3)), "no active task: call the network inside"),
        (lambda: _misspelt(Loop()), "task must be one of"),
        (lambda: torch.fx.symbolic_trace(Loop().trunk), "a trace would keep the task"),
        (
            lambda: Loop().opt.step(lambda task: nn.Linear(3, 1)(torch.ones(1, 3)).sum()),
            "optimizer must hold every parameter that a loss depends on",
        ),
        (lambda: Loop().opt.step({}), "closure must be a function from a task to its loss, got {"),
        (lambda: Loop().opt.step(print), "closure must return a tensor"),
        (
            lambda: (o := Loop()).opt.step(lambda task: o.loss(task).expand(2)),
            "closure must return a real scalar",
        ),
        (
            lambda: (o := Loop()).opt.step(lambda task: o.loss(task).detach()),
            "closure must return a loss with a graph",
        ),
        (
            lambda: _a_copy_of_the_trunk(frozen=False),
            "optimizer must hold every parameter that a loss depends on",
        ),
        (
            lambda: _a_copy_of_the_trunk(frozen=True),
            "a loss must depend on a parameter of trunk",
        ),
        (_another_task_in_the_closure, "closure must leave"),
        (lambda: (o := Loop()).opt.step(o.loss, tasks=["c"]), "tasks must be among"),
        (
            lambda: (o := Loop(schedule=cs.Mixed(3))).opt.step(o.loss),
            "{...} depends on the epoch: call start_epoch(epoch) first",
        ),
        (lambda: Loop().opt.coverage(), "which layers are prioritized is seen in a forward pass"),
        (_an_activation_in_between, "trunk must have a layer whose output goes to"),
        (_sparse_gradients, "trunk must have dense gradients"),
        (
            lambda: (o := Loop()).opt.backward({"a": o.x.mean() * o.trunk[0].bias.sum()}),
            "trunk must have no task-specific normalization for backward",
        ),
        (
            lambda: (o := _dense()).opt.backward(o.loss),
            "losses must be a mapping {task: loss}, got",
        ),
        (
            lambda: (o := _dense(schedule=cs.Sequential())).opt.backward(o.losses()),
            "backward makes joint updates, but",
        ),
        (_two_backward_calls, "the update of the last backward(...) is still in .grad"),
        (
            lambda: _after_the_first_micro_batch(lambda loop: loop.sgd.step()),
            "the gradients of backward(..., update=False) wait for their update",
        ),
        (
            lambda: _after_the_first_micro_batch(_clipped_in_between),
            "the gradients of backward(..., update=False) must stay as they are",
        ),
        (
            lambda: _after_the_first_micro_batch(lambda loop: loop.opt.step(loop.loss)),
            "step would forget the gradients of backward(..., update=False)",
        ),
        (
            lambda: _dense().opt.load_state_dict(Loop().opt.state_dict()),
            "state must be of {...} {...}, got",
        ),
        (lambda: Loop().opt.load_state_dict({}), "state must have"),
        (
            lambda: (o := Loop(backward=Tensor.backward)).opt.capture(o.loss),
            "backward must be None for a captured step",
        ),
        (_another_backend, "name must be one of"),
        (
            lambda: cs.functional.task_priority(torch.ones(3)),
            "strength must have shape [K, O], got",
        ),
    ],
)
def test_the_text_of_a_mistake_is_found(mistake: Callable[[], object], entry: str) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
        mistake()
    assert _entry_of(str(raised.value)).startswith(entry)
