"""Hooks of `mkdocs.yml`: the home page from README.md, and the page of the public names from their docstrings.

A link to a file outside `docs/` becomes its path, because the site has no such page.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import holdfast

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, "index.md", content=home_page()))
    files.append(File.generated(config, "api.md", content=api_page()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return without_foreign_links(markdown, "../")


def home_page() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = text.replace("](docs/decisions/)", "](decisions/0001-record-decisions.md)")
    return without_foreign_links(text.replace("](docs/", "]("), "")


def without_foreign_links(markdown: str, prefix: str) -> str:
    """Replace links to files of the repository that are not pages. `prefix` leads to its root."""

    def replace(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        path = target.removeprefix(prefix).partition("#")[0]
        is_foreign = target.startswith(prefix) and "://" not in target
        outside = not (ROOT / "docs" / path).exists() and (ROOT / path).exists()
        return f"{text} (`{path}`)" if is_foreign and path and outside else link[0]

    return _LINK.sub(replace, markdown)


def api_page() -> str:
    """A section for each public name: its signature and its docstring."""
    lines = ["# Python API", "", "The names of the package `holdfast`, by `import holdfast as hf`."]
    for name in sorted(holdfast.__all__, key=str.lower):
        value = getattr(holdfast, name)
        lines += ["", f"## {name}", ""]
        if callable(value):
            lines += ["```python", f"hf.{name}{_signature(value)}", "```", ""]
        if callable(value) or inspect.ismodule(value):
            lines.append(_docstring(value))
    return "\n".join(lines) + "\n"


def _signature(value: Any) -> str:
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""


def _docstring(value: Any) -> str:
    """The own docstring as text: indented lines are code, and nothing of it is a link."""
    own = inspect.getdoc(value) if "__doc__" in vars(value) or inspect.isroutine(value) else ""
    return (own or "").replace("[", "\\[").replace("<", "&lt;")
