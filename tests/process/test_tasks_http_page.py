"""docs/tasks-http.md does what it says: its `sh` blocks are run in order, in one shell."""

from __future__ import annotations

import os
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.pgcluster import free_port
from tests.process.test_tutorial import blocks_of, pattern_of, printed_by, script_of
from tests.process.watch import assert_nobody_is_left
from tests.processes import ROOT, Proc, need

PAGE = ROOT / "docs" / "tasks-http.md"
PAGE_S = 100
LINGER_S = 3.0


def test_every_block_of_the_page_is_one_that_we_run() -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = blocks_of(text)
    assert len(blocks) == text.count("```") // 2
    assert {block.kind for block in blocks} == {"python", "sh", "text"}
    for before, block in pairwise(blocks):
        assert block.kind != "text" or before.kind == "sh"


@pytest.mark.slow
@pytest.mark.timeout(PAGE_S + 20)
def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    need("curl", "jq")
    # Another port than the usual one, where somebody may be listening.
    text = PAGE.read_text(encoding="utf-8").replace("8787", str(free_port()))
    blocks = blocks_of(text)
    for block in blocks:
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {"PATH": path, "HOLDFAST_TOKEN": ""}
    # Answers do not end with a line feed: the mark of the next block is on a line of its own.
    script = script_of(blocks).replace("echo '--- block", "echo; echo '--- block")
    with Proc.spawn(["bash", "-c", script], ready=None, cwd=tmp_path, env=env) as shell:
        code = shell.wait(PAGE_S)
        printed = printed_by([line for line in shell.lines if line])
        assert code == 0, f"block {max(printed)} failed:\n" + "\n".join(shell.errors)
        assert any("no_token" in line for line in shell.errors), shell.errors
    for at, (block, after) in enumerate(pairwise(blocks)):
        if block.kind == "sh" and after.kind == "text":
            told = "\n".join(printed[at])
            assert re.fullmatch(pattern_of(after.text), told), f"block {at} printed:\n{told}"
    assert_nobody_is_left(tmp_path / "data", LINGER_S)
