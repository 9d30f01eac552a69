"""Messages that the package raises, read from its sources, and entries of docs/errors.md."""

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "errors.md"

HOLE = "\0"
"""A value that is inserted into a message."""

REASONS = {
    "cs_kernels/layout.py": {"_norm_of", "_unfit"},
    "cs_kernels/ops/backends.py": {"_no_triton"},
    "cs_kernels/ops/cuda.py": {"unavailable"},
}
"""Functions that return a part of a report or of a message, which somebody may search for."""


class Message(NamedTuple):
    where: str
    template: str


def squeezed(template: str) -> str:
    """One space for all white space, one hole for adjacent ones."""
    return re.sub(f"{HOLE}+", HOLE, " ".join(template.split()))


class UnreadableError(Exception):
    """A message is built in a way that `Module` cannot read."""


class Module:
    """The messages of one Python file."""

    def __init__(self, name: str, source: str, functions: dict[str, list[ast.FunctionDef]]) -> None:
        self.name = name
        self.source = source
        self._functions = functions
        """The functions of the whole package, by name."""

    def messages(self) -> Iterator[Message]:
        for node in _nodes(self.source):
            where = f"{self.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Raise) and node.exc is not None:
                found = self._raised(node.exc, where)
            elif isinstance(node, ast.Call) and (
                self._is_exception(node.func) or self._is_note(node.func)
            ):
                # Also one that is returned, or kept in a variable and raised later.
                found = self._of_arguments(node, where)
            elif isinstance(node, ast.FunctionDef) and node.name in REASONS.get(self.name, ()):
                found = self._returned(node, where)
            else:
                continue
            yield from (Message(where, squeezed(template)) for template in found)

    @staticmethod
    def _is_note(function: ast.expr) -> bool:
        return isinstance(function, ast.Attribute) and function.attr == "add_note"

    @staticmethod
    def _is_exception(function: ast.expr) -> bool:
        name = function.attr if isinstance(function, ast.Attribute) else None
        name = function.id if isinstance(function, ast.Name) else name
        known = getattr(builtins, name or "", None)
        is_builtin = isinstance(known, type) and issubclass(known, BaseException)
        return is_builtin or bool(name and re.fullmatch(r"[A-Z]\w*(Error|Exception)", name))

    def _raised(self, raised: ast.expr, where: str) -> list[str]:
        """The messages of a `raise`; none where a class, or an exception from elsewhere, is."""
        if isinstance(raised, ast.Name):
            return []
        if not isinstance(raised, ast.Call):
            raise UnreadableError(f"{where}: raise {ast.unparse(raised)}")
        if self._is_exception(raised.func):
            return []  # A call, which is found as one.
        if isinstance(raised.func, ast.Name) and raised.func.id in self._functions:
            return []  # It makes the exception, by a call that is found where it is.
        return self._of_arguments(raised, where)  # The class is an argument of the function.

    def _of_arguments(self, call: ast.Call, where: str) -> list[str]:
        if not call.args and not call.keywords:
            return []
        return self._templates(call.args[0], where)

    def _templates(self, text: ast.expr, where: str) -> list[str]:
        """A literal, or what a function of the package returns."""
        if isinstance(text, ast.Call):
            name = getattr(text.func, "attr", getattr(text.func, "id", ""))
            found = [t for f in self._functions.get(name, ()) for t in self._returned(f, where)]
            if found:
                return found
        template = self._template(text)
        if not template.replace(HOLE, "").strip():
            raise UnreadableError(f"{where}: {ast.unparse(text)}")
        return [template]

    def _returned(self, function: ast.FunctionDef, where: str) -> list[str]:
        """The strings that a function returns, alone or in a tuple."""
        found = []
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None:
                value = node.value
                parts = value.elts if isinstance(value, ast.Tuple) else [value]
                strings = (p for p in parts if isinstance(p, ast.Constant | ast.JoinedStr))
                found += [self._template(part) for part in strings if self._template(part)]
        return found

    def _template(self, text: ast.expr) -> str:
        if isinstance(text, ast.Constant):
            return text.value if isinstance(text.value, str) else ""
        if isinstance(text, ast.JoinedStr):
            return "".join(map(self._template, text.values))
        if isinstance(text, ast.BinOp) and isinstance(text.op, ast.Add):
            return self._template(text.left) + self._template(text.right)
        return HOLE


@cache
def _nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


@cache
def _words(source: str) -> set[str]:
    """Every string that may be inserted into a message."""
    nodes = _nodes(source)
    parts = {id(p) for node in nodes if isinstance(node, ast.JoinedStr) for p in node.values}
    constants = (n for n in nodes if isinstance(n, ast.Constant) and id(n) not in parts)
    return {squeezed(node.value) for node in constants if isinstance(node.value, str)}


_CPP_EXCEPTION = re.compile(
    r"(?:std|py)::(?!error_already)\w*(?:error|argument|range)\s*\("
    r"((?:\"(?:[^\"\\]|\\.)*\"|[^\";])*);"
)
"""An exception with all of its arguments, in which a literal may have a semicolon."""


def cpp_messages(name: str, source: str) -> Iterator[Message]:
    """The literals of exceptions, with holes for what stands between them."""
    for match in _CPP_EXCEPTION.finditer(source):
        where = f"{name}:{1 + source.count(chr(10), 0, match.start())}"
        pieces = re.split(r'"((?:[^"\\]|\\.)*)"', match[1])
        if len(pieces) == 1:
            raise UnreadableError(f"{where}: {match[0]}")
        between = (re.sub(r"std::string\(|[\s+()]", "", piece) for piece in pieces[::2])
        pieces[::2] = [HOLE if code else "" for code in between]
        yield Message(where, squeezed("".join(pieces)))


@cache
def read_sources() -> dict[str, str]:
    files = sorted((ROOT / "cs_kernels").rglob("*.py"))
    return {str(file.relative_to(ROOT)): file.read_text() for file in files}


def _modules(sources: dict[str, str]) -> list[Module]:
    functions: dict[str, list[ast.FunctionDef]] = {}
    for source in sources.values():
        for node in _nodes(source):
            if isinstance(node, ast.FunctionDef):
                functions.setdefault(node.name, []).append(node)
    return [Module(name, source, functions) for name, source in sources.items()]


def _raised(sources: dict[str, str]) -> list[Message]:
    found = [message for module in _modules(sources) for message in module.messages()]
    for file in sorted((ROOT / "python").glob("*.*")):
        found += cpp_messages(str(file.relative_to(ROOT)), file.read_text())
    return found


class Entry(NamedTuple):
    line: int
    section: str
    template: str


@cache
def read_entries() -> list[Entry]:
    """The messages in ```text blocks, which blank lines separate."""
    text, found, section = PAGE.read_text(), [], ""
    for match in re.finditer(r"^## ([^\n]+)$|^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if match[1]:
            section = match[1]
            continue
        start = 2 + text.count("\n", 0, match.start())
        for message in match[2].split("\n\n"):
            template = re.sub(r"\{\w+\}", HOLE, message)
            found.append(Entry(start, section, squeezed(template)))
            start += message.count("\n") + 2
    return found


@cache
def patterns_of(template: str) -> list[re.Pattern[str]]:
    """Two, as where a hole ends may be ambiguous: the first holes short, or long."""
    literals = [re.escape(literal) for literal in template.split(HOLE)]
    return [re.compile(value.join(literals), re.DOTALL) for value in ("(.+?)", "(.+)")]


@cache
def _filled(template: str, entry: str) -> list[set[str]]:
    """The words of an entry in the holes of a message; none if it is another message."""
    found = []
    if all(literal in entry for literal in template.split(HOLE)):
        for match in (pattern.fullmatch(entry) for pattern in patterns_of(template)):
            if match is None:
                break
            values = (value for filled in match.groups() for value in filled.split(HOLE))
            found.append({squeezed(value) for value in values if value.strip()})
    return found


def count_literals(template: str) -> int:
    """How specific a template is."""
    return len(template.replace(HOLE, ""))


def _fits(template: str, entry: str, words: set[str]) -> bool:
    """Whether an entry is the message, perhaps with words of the package in place of a hole."""
    return any(values <= words for values in _filled(template, entry))


def find_misses(sources: dict[str, str], entries: list[Entry]) -> tuple[list[Message], list[Entry]]:
    """The messages that have no entry, and the entries that have no message.

    Several templates may fit an entry, since "{name} must be {kind}, got {value}" fits many. It is
    that of the most specific ones.
    """
    messages = _raised(sources)
    words = set().union(*map(_words, sources.values()))
    templates = {message.template for message in messages}
    found: set[str] = set()
    stale = []
    for entry in entries:
        fitting = [t for t in templates if _fits(t, entry.template, words)]
        most = max(map(count_literals, fitting), default=0)
        found.update(t for t in fitting if count_literals(t) == most)
        if not fitting:
            stale.append(entry)
    return [message for message in messages if message.template not in found], stale


def shown(template: str) -> str:
    return template.replace(HOLE, "{...}")


def section_of(where: str, sources: dict[str, str]) -> str:
    """The section with most of the other messages of a file."""
    name = where.split(":")[0]
    words = set().union(*map(_words, sources.values()))
    of_file = [m.template for m in _raised(sources) if m.where.startswith(f"{name}:")]
    sections = Counter(
        entry.section
        for entry in read_entries()
        if any(_fits(template, entry.template, words) for template in of_file)
    )
    return f'"{sections.most_common(1)[0][0]}"' if sections else "one that fits"
