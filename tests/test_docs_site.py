"""The site of docs/: a strict build succeeds, has the API page, and rejects a dead link."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from tests.processes import ROOT
from tools.site_pages import api_page, without_foreign_links

BUILD_S = 120


def build(directory: Path, site: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        line, cwd=directory, env=env, capture_output=True, text=True, timeout=BUILD_S, check=False
    )


@pytest.mark.timeout(BUILD_S + 20)
def test_strict_build_has_every_page(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("")
        folder = name.parent if name.name == "README" else name
        assert (tmp_path / folder / "index.html").exists(), page
    home = (tmp_path / "index.html").read_text()
    assert 'href="tutorial-worlds/"' in home
    assert 'id="world"' in (tmp_path / "api" / "index.html").read_text()


@pytest.mark.timeout(BUILD_S + 20)
def test_strict_build_rejects_a_dead_link(tmp_path: Path) -> None:
    for part in ("mkdocs.yml", "README.md"):
        shutil.copy(ROOT / part, tmp_path / part)
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "site_pages.py", tmp_path / "tools" / "site_pages.py")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# Holdfast\n\n[dead](docs/nowhere.md)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    assert "nowhere.md" in done.stderr


def test_api_page_has_every_public_name() -> None:
    text = api_page()
    assert [name for name in holdfast.__all__ if f"\n## {name}\n" not in text] == []
    assert "hf.simulate(" in text


def test_link_to_a_file_outside_docs_becomes_its_path() -> None:
    text = "[bank](../examples/bank/) [here](flows.md) [web](https://example.com)"
    assert without_foreign_links(text, "../") == (
        "bank (`examples/bank/`) [here](flows.md) [web](https://example.com)"
    )
