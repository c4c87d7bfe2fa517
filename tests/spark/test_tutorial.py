"""The Spark tutorial does what it says, and its files are those of the example."""

from __future__ import annotations

import os
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.process.test_tutorial import blocks_of, pattern_of, printed_by, script_of
from tests.process.watch import assert_nobody_is_left
from tests.processes import ROOT, Proc

TUTORIAL = ROOT / "docs" / "tutorial-spark.md"
EXAMPLE = ROOT / "examples" / "label_documents"

TUTORIAL_S = 400
LINGER_S = 5.0

DOCUMENTS = 1950
# What may be called again: rows begun and not reported, of each task that dies. Two are killed with
# the driver, and each of the three deadly rows kills one; its later tries are alone.
CONCURRENCY, FLUSH_ROWS = 8, 16
REPEATED_MAX = (2 + 3) * (CONCURRENCY + FLUSH_ROWS)


def test_the_files_of_the_tutorial_are_those_of_the_example() -> None:
    blocks = blocks_of(TUTORIAL.read_text(encoding="utf-8"))
    files = {block.file: block.text for block in blocks if block.kind == "python"}
    found = {path.name: path.read_text(encoding="utf-8") for path in EXAMPLE.glob("*.py")}
    assert files == found


def test_every_block_of_the_tutorial_is_one_that_we_run() -> None:
    text = TUTORIAL.read_text(encoding="utf-8")
    blocks = blocks_of(text)
    assert len(blocks) == text.count("```") // 2
    assert {block.kind for block in blocks} == {"python", "sh", "text"}
    for before, block in pairwise(blocks):
        assert block.kind != "text" or before.kind == "sh"


@pytest.mark.slow
@pytest.mark.timeout(TUTORIAL_S + 20)
def test_the_tutorial_does_what_it_says_and_the_bill_does_not_grow(tmp_path: Path) -> None:
    blocks = blocks_of(TUTORIAL.read_text(encoding="utf-8"))
    for block in blocks:
        if block.kind == "python":
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with Proc.spawn(
        ["bash", "-c", script_of(blocks)], ready=None, cwd=tmp_path, env={"PATH": path}
    ) as shell:
        code = shell.wait(TUTORIAL_S)
        printed = printed_by(shell.lines)
        assert code == 0, f"block {max(printed)} failed:\n" + "\n".join(shell.errors)
    for at, (block, after) in enumerate(pairwise(blocks)):
        if block.kind == "sh" and after.kind == "text":
            told = "\n".join(printed[at]).rstrip()
            assert re.fullmatch(pattern_of(after.text), told), f"block {at} printed:\n{told}"
    bill = (tmp_path / "bill.txt").read_text(encoding="utf-8").splitlines()
    assert len(set(bill)) == DOCUMENTS
    assert len(bill) - DOCUMENTS <= REPEATED_MAX
    assert_nobody_is_left(tmp_path / "data", LINGER_S)
