"""The page about dispatches does what it says: its blocks are taken from the text and run."""

from __future__ import annotations

import os
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.panes import INSTALL, TmuxServer
from tests.process.test_tutorial import blocks_of, pattern_of, printed_by, script_of
from tests.process.watch import assert_nobody_is_left
from tests.processes import ROOT, Proc

PAGE = ROOT / "docs" / "dispatch.md"
PAGE_S = 100
LINGER_S = 3.0


def test_every_block_of_the_page_is_one_that_we_run() -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = blocks_of(text)
    assert len(blocks) == text.count("```") // 2
    assert {block.kind for block in blocks} == {"python", "sh", "text"}
    assert all(block.file for block in blocks if block.kind == "python")
    for before, block in pairwise(blocks):
        assert block.kind != "text" or before.kind == "sh"


@pytest.mark.slow
@pytest.mark.timeout(PAGE_S + 30)
def test_the_page_does_what_it_says(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if shutil.which("tmux") is None:
        pytest.fail(f"tmux is not installed: {INSTALL}", pytrace=False)
    # A server of our own: the page's name for it may be taken on this machine.
    text = PAGE.read_text(encoding="utf-8").replace("holdfast-page", f"holdfast-page-{os.getpid()}")
    request.addfinalizer(TmuxServer(f"holdfast-page-{os.getpid()}", tmp_path).clean)
    blocks = blocks_of(text)
    for block in blocks:
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with Proc.spawn(
        ["bash", "-c", script_of(blocks)], ready=None, cwd=tmp_path, env={"PATH": path, "TMUX": ""}
    ) as shell:
        code = shell.wait(PAGE_S)
        printed = printed_by(shell.lines)
        assert code == 0, f"block {max(printed)} failed:\n" + "\n".join(shell.errors)
    shown = [
        (pattern_of(after.text), re.sub(r"\d{4}-\S+ \S+", "(time)", "\n".join(printed[at])))
        for at, (block, after) in enumerate(pairwise(blocks))
        if block.kind == "sh" and after.kind == "text"
    ]
    assert len(shown) >= 6
    for pattern, told in shown:
        assert re.fullmatch(pattern, told.rstrip()), f"{told}\n--- is not ---\n{pattern}"
    assert_nobody_is_left(tmp_path / "data", LINGER_S)
