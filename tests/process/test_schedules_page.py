"""docs/schedules.md: its code blocks are run and their output is compared with the page."""

from __future__ import annotations

import os
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.process.test_tutorial import blocks_of, pattern_of, printed_by, script_of, without_times
from tests.process.watch import assert_no_client_left
from tests.processes import ROOT, Proc

PAGE = ROOT / "docs" / "schedules.md"
PAGE_S = 90


@pytest.mark.slow
@pytest.mark.timeout(PAGE_S + 30)
def test_schedules_page_examples_print_the_documented_output(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = blocks_of(text)
    assert len(blocks) == text.count("```") // 2
    for block in blocks:
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with Proc.spawn(
        ["bash", "-c", script_of(blocks)], ready=None, cwd=tmp_path, env={"PATH": path}
    ) as shell:
        code = shell.wait(PAGE_S)
        printed = printed_by(shell.lines)
        assert code == 0, f"block {max(printed)} failed:\n" + "\n".join(shell.errors)
    shown = [
        (pattern_of(after.text), without_times("\n".join(printed[at])))
        for at, (block, after) in enumerate(pairwise(blocks))
        if block.kind == "sh" and after.kind == "text"
    ]
    assert len(shown) == 5
    for pattern, printed_text in shown:
        assert re.fullmatch(pattern, printed_text), printed_text
    assert_no_client_left(tmp_path / "data")
