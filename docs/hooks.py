"""Hooks of the site: pictures from other folders, formulas, and a check of the API pages."""

import html
import re
import sys
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "python"))

from long_description import repository  # noqa: E402

RESULTS = ROOT / "examples" / "results"
PICTURES = [ROOT / "bench" / "results", RESULTS, RESULTS / "uses"]
MODULES = ["cs_kernels", "cs_kernels.nn", "cs_kernels.functional"]
"""Their `__all__` is what is public."""
FINISHED = ["api/methods.md", "api/schedules.md"]
"""Pages of objects that are built and handed over: what their users write is the constructor."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The version, and a link to the repository, in the footer of every page."""
    version = re.search(r'__version__ = "(.+)"', (ROOT / "cs_kernels" / "__init__.py").read_text())
    assert version is not None
    config.copyright = f'Version {version[1]} · <a href="{repository()}">repository</a>'
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Pictures of benchmarks and examples stay where they are made: images/NAME here."""
    for picture in (path for folder in PICTURES for path in sorted(folder.glob("*.svg"))):
        target = f"images/{picture.name}"
        files.append(File.generated(config, target, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """A picture becomes its two versions, for light and for dark pages."""
    if page.file.src_uri in FINISHED:
        options = "\n    options:\n      members: false"
        markdown = re.sub(r"^::: \S+$", rf"\g<0>{options}", markdown, flags=re.MULTILINE)
    light_and_dark = r"![\1](\2.svg#only-light)![\1](\2-dark.svg#only-dark)"
    return re.sub(r"!\[([^]]*)\]\(([\w/.]+)\.svg\)", light_and_dark, markdown)


def on_page_content(text: str, **_: Any) -> str:
    """Formulas become MathML, which browsers draw without a script."""

    def formula(match: re.Match[str]) -> str:
        display = "inline" if match[1] == "span" else "block"
        return convert(html.unescape(match[2]), display=display)

    pattern = r'<(span|div) class="arithmatex">\\[([](.*?)\\[)\]]</\1>'
    return re.sub(pattern, formula, text, flags=re.DOTALL)


def on_pre_build(config: MkDocsConfig) -> None:
    """Every public name has an entry and a docstring; so have the members of a public class."""
    pages = "\n".join(p.read_text() for p in sorted(Path(config.docs_dir, "api").glob("*.md")))
    listed = set(re.findall(r"^::: (\S+)", pages, flags=re.MULTILINE))
    package = griffe.load("cs_kernels", search_paths=[str(ROOT)])
    faults = []
    for module in map(package.modules_collection.get_member, MODULES):
        for export in module.exports or ():
            name = f"{module.path}.{export}"
            found = module[str(export)]
            if found.is_module:
                continue
            if name not in listed:
                faults.append(f"{name} is public and has no entry in docs/api/")
            faults += [f"{path} is public and has no docstring" for path in _undocumented(found)]
            listed.discard(name)
    faults += [f"{name} has an entry in docs/api/ and is not public" for name in sorted(listed)]
    if faults:
        raise PluginError("\n".join(faults))


def _undocumented(part: Any) -> list[str]:
    """A function, class or public member of a class that has no docstring, here or in a base."""
    missing = [] if part.has_docstring else [part.path]
    if part.is_class:
        for name, member in part.members.items():
            if name.startswith("_") or member.is_alias:
                continue
            inherited = any(name in base.members for base in part.mro())
            if not member.has_docstring and not inherited:
                missing.append(member.path)
    return missing
