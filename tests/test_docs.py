"""The documentation: its Python code runs, and the files and commands that it names exist."""

import contextlib
import inspect
import io
import re
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import page_plots
import page_tables
import pytest
import torch

import cs_kernels as cs
from cs_kernels.engine import supports

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parent.parent
SITE = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", *SITE]
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
INCLUDED = re.compile(r' *--8<-- "([\w/.]+)"\n')

CONTEXT = """
from pathlib import Path

import torch
import cs_kernels as cs

tasks = ["depth", "edges"]
trunk = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 1), torch.nn.BatchNorm2d(8))
heads = torch.nn.ModuleDict({task: torch.nn.Conv2d(8, 1, 1) for task in tasks})
x, targets = torch.randn(2, 3, 4, 4), {task: torch.randn(2, 1, 4, 4) for task in tasks}
loss_of = dict.fromkeys(tasks, torch.nn.functional.mse_loss)
batches, first_epoch, epochs = [x] * 3, 2, 4
path = Path("checkpoint.pt")
CONVERT
optimizer = torch.optim.SGD([*trunk.parameters(), *heads.parameters()], lr=0.1)
opt = cs.MultiTaskOptimizer(trunk, optimizer, tasks, METHOD)


def losses_of(batch):
    return {task: loss_of[task](heads[task](trunk(batch)), targets[task]) for task in tasks}
"""
"""The code before a fragment, a block that is marked `py`."""

MODEL = """
from types import SimpleNamespace

import torch
import cs_kernels as cs


class Model(torch.nn.Linear):
    def forward(self, x, y):
        return SimpleNamespace(loss=torch.nn.functional.mse_loss(super().forward(x), y))


model = Model(3, 2)
adamw = torch.optim.AdamW(model.parameters())
batch = {task: {"x": torch.randn(4, 3), "y": torch.randn(4, 2)} for task in ("old", "new")}
batches = [batch] * 5
"""
"""The code before a fragment that fine-tunes a model."""


def _blocks(page: str) -> list[tuple[str, str]]:
    """The language and the text of each block of code."""
    found = FENCE.findall((ROOT / page).read_text())
    return [(language, textwrap.dedent(code)) for language, code in found]


def _marked(language: str) -> list[Any]:
    return [
        pytest.param(page, number, id=f"{page}-{number}")
        for page in PAGES
        for number, block in enumerate(_blocks(page))
        if block[0] == language
    ]


def _run(code: str, name: str) -> tuple[dict[str, Any], str]:
    """Runs code; returns its global variables and its output."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, name, "exec"), names)
    return names, printed.getvalue()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")
@pytest.mark.parametrize(("page", "number"), _marked("python"))
def test_python_runs(page: str, number: int) -> None:
    code = _blocks(page)[number][1]
    names, printed = _run(code, page)
    if "print(opt.coverage())" in code:
        assert "1 of 2 shared parameters are prioritized" in printed
    after = (ROOT / page).read_text().partition(f"{code}```")[2]
    if shown := re.match(r"\n\nprints\n\n```\n(.*?)```", after, re.DOTALL):
        assert printed == shown[1]
    trunk = names.get("trunk")
    if re.search(r"opt\.(step|backward)\(", code) and isinstance(trunk, torch.nn.Module):
        assert any(p.grad is not None for p in trunk.parameters())


def test_the_example_of_connection_strength_performs_surgery() -> None:
    """The example's report has channel shares, which exist only in Phase 2."""
    page = "docs/start.md"
    code = next(code for _, code in _blocks(page) if "convert_task_batchnorm" in code)
    names, printed = _run(code, page)
    assert "phase 2, ConnectionStrength()" in printed
    assert "channel share" in printed
    shares = [names["opt"].report().scalars()[f"channel_share/{task}"] for task in names["tasks"]]
    assert sum(shares) == pytest.approx(1)


@pytest.mark.parametrize(("page", "number"), _marked("py"))
def test_fragments_run(
    page: str, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Fragments that are files of the repository have tests of their own."""
    code = _blocks(page)[number][1]
    if included := INCLUDED.fullmatch(code):
        assert (ROOT / included[1]).exists()
        return
    monkeypatch.chdir(tmp_path)
    if "model(**" in code:
        _run(MODEL + code, page)
        return
    code = INCLUDED.sub(lambda included: (ROOT / included[1]).read_text(), code)
    plain = "backward(" in code or "convert_task" in code
    convert = "" if plain else "cs.nn.convert_task_batchnorm(trunk, tasks)"
    method = "cs.PCGrad()" if plain else "None"
    _run(CONTEXT.replace("CONVERT", convert).replace("METHOD", method) + code, page)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_name_their_language(page: str) -> None:
    for language, code in _blocks(page):
        assert language in {"", "bibtex", "diff", "py", "python", "sh", "text"}, code
        if language in ("", "text"):
            assert "import " not in code


@pytest.mark.parametrize("page", PAGES)
def test_lists_are_numbered_in_order(page: str) -> None:
    """A wrapped line that starts with a number and a period would become an item."""
    last: dict[str, int] = {}
    text = FENCE.sub("", (ROOT / page).read_text())
    for indent, number in re.findall(r"^( *)(\d+)\. ", text, re.MULTILINE):
        assert int(number) in (1, last.get(indent, 0) + 1), f"{indent}{number}."
        last[indent] = int(number)


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    """Targets of make, and files that commands name."""
    targets = re.findall(r"^([\w -]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    known = {target for line in targets for target in line.split()}
    in_text = re.findall(r"`((?:make|bash|python|torchrun) [^`\n]+)`", (ROOT / page).read_text())
    in_blocks = "".join(code for language, code in _blocks(page) if language == "sh").splitlines()
    for command in [*in_text, *in_blocks]:
        words = command.partition("#")[0].split()
        if words[:1] == ["make"]:
            assert {w for w in words[1:] if re.fullmatch(r"[a-z][a-z-]*", w)} <= known, command
        for word in words:
            if re.fullmatch(r"[\w/.-]+\.(py|txt)", word):
                assert (ROOT / word).exists(), command


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    """A name is a file's path, or the end of its path."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    if not files:
        pytest.skip("not a git checkout")
    named = re.findall(r"`([\w/.-]+\.(?:py|pyi|cpp|cu|h|md))`", (ROOT / page).read_text())
    found = {name for name in named if re.search(rf"(^|/){re.escape(name)}$", files, re.MULTILINE)}
    assert set(named) == found


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_the_repository(page: str) -> None:
    """Links to files and their headings exist; `make docs` checks the site's links."""
    text = FENCE.sub("", (ROOT / page).read_text())
    for target in re.findall(r"\]\((?!https?:|\.\./\.\./actions)([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        file = ROOT / path if path else ROOT / page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]
            assert anchor in slugs, target


def test_the_support_table_matches_the_code() -> None:
    assert supports.table() in (ROOT / "docs/limits.md").read_text()


def test_the_readme_is_one_page() -> None:
    """The README and its examples are short, and its counts match the package."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 140
    assert all(
        len(code.splitlines()) <= 8 for language, code in _blocks("README.md") if language == "py"
    )
    public = [getattr(cs, name) for name in cs.__all__]
    kinds = [kind for kind in public if isinstance(kind, type) and not inspect.isabstract(kind)]
    methods, weightings = (
        {kind for kind in kinds if issubclass(kind, base)} - {cs.Clipped}
        for base in (cs.Method, cs.Weighting)
    )
    assert f"weigh losses | {len(methods)}; {len(weightings)} |" in text
    assert "seventeen methods" in text
    listed = (ROOT / "docs/methods.md").read_text()
    for kind in methods | weightings:
        assert f"| [`{kind.__name__}`]" in listed


def test_the_readme_has_the_numbers_of_the_records() -> None:
    """Checks the numbers in the text; other tests check the table and the picture."""
    text = (ROOT / "README.md").read_text().replace("\n", " ")
    rows = {row["step"]: row for row in page_plots.front()}
    cheapest = min(row["over_plain"] for row in rows.values())
    assert f"as little as {100 * (cheapest - 1):.0f} % more than a plain step" in text
    (plain,) = (
        case
        for case in page_tables.last("price", "resnet18")["cases"]
        if (case["network"], case["tasks"], case["step"]) == ("resnet18", 4, "plain")
    )
    assert f"its gradients take {plain['peak_bytes'] / 1e6:.0f} MB" in text


def test_a_custom_method() -> None:
    code = next(code for _, code in _blocks("docs/extending.md") if "InverseLengths" in code)
    weights = _run(code, "docs/extending.md")[0]["InverseLengths"]().weights
    assert weights(torch.diag(torch.tensor([4.0, 0.0]))).tolist() == [0.5, 0.0]
    assert weights(torch.full((2, 2), torch.inf)).isnan().all()
