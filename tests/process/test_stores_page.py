"""The page about stores does what it says: its blocks are taken from the text and run."""

from __future__ import annotations

import os
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.postgres import fresh_url
from tests.process.test_tutorial import Block, blocks_of, pattern_of, printed_by, script_of
from tests.process.watch import assert_nobody_is_left
from tests.processes import ROOT, Proc

PAGE = ROOT / "docs" / "stores.md"
DATABASE = "postgresql://db.example/shop"
PAGE_S = 100
LINGER_S = 3.0


def blocks() -> list[Block]:
    """Those of the page, with a database of ours."""
    text = PAGE.read_text(encoding="utf-8")
    url = fresh_url()
    return [block._replace(text=block.text.replace(DATABASE, url)) for block in blocks_of(text)]


def test_every_block_of_the_page_is_one_that_we_run() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = blocks_of(text)
    assert len(found) == text.count("```") // 2
    for before, block in pairwise(found):
        assert block.file or block.kind in ("sh", "text")
        assert block.kind != "text" or before.kind == "sh"


@pytest.mark.timeout(PAGE_S + 30)
def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    found = blocks()
    files = [block for block in found if block.file]
    # The first part is about one store: the file comes where the page has it.
    for block in files:
        if block.kind == "python":
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    [config] = [block for block in files if block.kind == "toml"]
    at = found.index(config)
    found[at] = Block("sh", "", f"cat > {config.file} <<'TOML'\n{config.text}TOML")
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
    for pattern, told in shown:
        assert re.fullmatch(pattern, told, re.DOTALL), told
    for name in ("data", "accounts"):
        assert_nobody_is_left(tmp_path / name, LINGER_S)
