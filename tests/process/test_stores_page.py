"""docs/stores.md: its code blocks are run and their output is compared with the page."""

from __future__ import annotations

import os
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.postgres import fresh_url
from tests.process.test_tutorial import PageBlock, blocks_of, pattern_of, printed_by, script_of
from tests.process.watch import assert_no_client_left
from tests.processes import ROOT, Proc

PAGE = ROOT / "docs" / "stores.md"
DATABASE = "postgresql://db.example/shop"
PAGE_S = 100


def blocks() -> list[PageBlock]:
    """The blocks of the page, with the URL of a test database."""
    text = PAGE.read_text(encoding="utf-8")
    url = fresh_url(empty=True)
    return [block._replace(text=block.text.replace(DATABASE, url)) for block in blocks_of(text)]


def test_every_block_of_the_stores_page_is_executed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = blocks_of(text)
    assert len(found) == text.count("```") // 2
    for before, block in pairwise(found):
        assert block.file or block.kind in ("sh", "text")
        assert block.kind != "text" or before.kind == "sh"


@pytest.mark.timeout(PAGE_S + 30)
def test_stores_page_examples_print_the_documented_output(tmp_path: Path) -> None:
    found = blocks()
    files = [block for block in found if block.file]
    # The first part of the page uses one store, so the configuration is written where the page shows it.
    for block in files:
        if block.kind == "python":
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    [config] = [block for block in files if block.kind == "toml"]
    at = found.index(config)
    found[at] = PageBlock("sh", "", f"cat > {config.file} <<'TOML'\n{config.text}TOML")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {"PATH": path, "HOLDFAST_STORE": "", "HOLDFAST_CONFIG": ""}
    with Proc.spawn(["bash", "-c", script_of(found)], ready=None, cwd=tmp_path, env=env) as shell:
        code = shell.wait(PAGE_S)
        printed = printed_by(shell.lines)
        assert code == 0, f"block {max(printed)} failed:\n" + "\n".join(shell.errors)
    shown = [
        (pattern_of(after.text), "\n".join(printed[at]))
        for at, (block, after) in enumerate(pairwise(found))
        if block.kind == "sh" and after.kind == "text"
    ]
    assert len(shown) == 5
    for pattern, printed_text in shown:
        assert re.fullmatch(pattern, printed_text, re.DOTALL), printed_text
    for name in ("data", "accounts"):
        assert_no_client_left(tmp_path / name)
