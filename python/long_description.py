"""The README with absolute links, as the package's long description, for setup.py."""

import re
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_CODE = re.compile(r"(```.*?```|`[^`\n]+`)", re.DOTALL)
_RELATIVE = re.compile(r"""(\]\(|\b(?:src|srcset|href)=["'])(?![a-z]+:|#)([^\s)"']+)""")
_PICTURES = (".gif", ".jpg", ".png", ".svg")


def repository() -> str:
    """The repository's address from pyproject.toml."""
    project = (_ROOT / "pyproject.toml").read_text()
    match = re.search(r'^Repository = "(.+)"$', project, re.MULTILINE)
    assert match is not None
    return match[1]


def with_absolute_links(text: str, repository: str) -> str:
    """Makes relative links and pictures absolute, in Markdown and embedded HTML but not in code."""

    def absolute(match: re.Match[str]) -> str:
        if match[2].startswith("../../"):  # A page of the repository's site, such as its issues.
            return f"{match[1]}{repository}/{match[2][6:]}"
        kind = "raw" if match[2].endswith(_PICTURES) else "blob"
        return f"{match[1]}{repository}/{kind}/main/{match[2]}"

    parts = _CODE.split(text)
    parts[::2] = [_RELATIVE.sub(absolute, part) for part in parts[::2]]
    return "".join(parts)


def long_description() -> str:
    """The long description of this package."""
    return with_absolute_links((_ROOT / "README.md").read_text(), repository())
