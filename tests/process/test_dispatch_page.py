"""docs/dispatch.md: its code blocks are run and their output is compared with the page."""

from __future__ import annotations

import os
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.process.test_tutorial import blocks_of, pattern_of, printed_by, script_of
from tests.process.watch import assert_no_client_left
from tests.processes import ROOT, Proc
from tests.tmux_panes import INSTALL, TmuxServer

PAGE = ROOT / "docs" / "dispatch.md"
PAGE_S = 100


def test_every_block_of_the_dispatch_page_is_executed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = blocks_of(text)
    assert len(blocks) == text.count("```") // 2
    assert {block.kind for block in blocks} == {"python", "sh", "text"}
    assert all(block.file for block in blocks if block.kind == "python")
    for before, block in pairwise(blocks):
        assert block.kind != "text" or before.kind == "sh"


@pytest.mark.slow
@pytest.mark.timeout(PAGE_S + 30)
def test_dispatch_page_examples_print_the_documented_output(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if shutil.which("tmux") is None:
        pytest.fail(f"tmux is not installed: {INSTALL}", pytrace=False)
    # A unique tmux server: the name on the page may be in use on this machine.
    text = PAGE.read_text(encoding="utf-8").replace("holdfast-page", f"holdfast-page-{os.getpid()}")
    request.addfinalizer(TmuxServer(f"holdfast-page-{os.getpid()}", tmp_path).remove_files)
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
    for pattern, printed_text in shown:
        assert re.fullmatch(pattern, printed_text.rstrip()), (
            f"{printed_text}\n--- is not ---\n{pattern}"
        )
    assert_no_client_left(tmp_path / "data")
