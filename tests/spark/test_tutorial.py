"""The Spark tutorial: its commands print the documented output, and its files equal the example."""

from __future__ import annotations

import os
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.process.test_tutorial import blocks_of, pattern_of, printed_by, script_of
from tests.process.watch import assert_no_process_left
from tests.processes import ROOT, Proc
from tests.spark.conftest import INTERPRETED, WARM

TUTORIAL = ROOT / "docs" / "tutorial-spark.md"
EXAMPLE = ROOT / "examples" / "label_documents"

# The same results with less processor time.
CONFIG = {"spark.ui.enabled": "false", **INTERPRETED, **WARM}
TUTORIAL_S = 400
LINGER_S = 5.0

DOCUMENTS = 1950
# The bound of repeated calls: rows begun and not reported by each killed task. Two tasks are killed with the
# driver. Each of the three deadly rows kills one task, because its later attempts run isolated.
CONCURRENCY, FLUSH_ROWS = 8, 16
REPEATED_MAX = (2 + 3) * (CONCURRENCY + FLUSH_ROWS)


def test_tutorial_files_equal_the_example_files() -> None:
    blocks = blocks_of(TUTORIAL.read_text(encoding="utf-8"))
    files = {block.file: block.text for block in blocks if block.kind == "python"}
    found = {path.name: path.read_text(encoding="utf-8") for path in EXAMPLE.glob("*.py")}
    assert files == found


def test_every_tutorial_block_is_executed() -> None:
    text = TUTORIAL.read_text(encoding="utf-8")
    blocks = blocks_of(text)
    assert len(blocks) == text.count("```") // 2
    assert {block.kind for block in blocks} == {"python", "sh", "text"}
    for before, block in pairwise(blocks):
        assert block.kind != "text" or before.kind == "sh"


@pytest.mark.slow
@pytest.mark.timeout(TUTORIAL_S + 20)
def test_tutorial_output_matches_and_repeated_calls_are_bounded(tmp_path: Path) -> None:
    blocks = blocks_of(TUTORIAL.read_text(encoding="utf-8"))
    for block in blocks:
        if block.kind == "python":
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    settings = " ".join(f"--conf {name}={value}" for name, value in CONFIG.items())
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {"PATH": path, "PYSPARK_SUBMIT_ARGS": f"{settings} pyspark-shell"}
    with Proc.spawn(["bash", "-c", script_of(blocks)], ready=None, cwd=tmp_path, env=env) as shell:
        code = shell.wait(TUTORIAL_S)
        printed = printed_by(shell.lines)
        assert code == 0, f"block {max(printed)} failed:\n" + "\n".join(shell.errors)
    for at, (block, after) in enumerate(pairwise(blocks)):
        if block.kind == "sh" and after.kind == "text":
            output = "\n".join(printed[at]).rstrip()
            assert re.fullmatch(pattern_of(after.text), output), f"block {at} printed:\n{output}"
    bill = (tmp_path / "bill.txt").read_text(encoding="utf-8").splitlines()
    assert len(set(bill)) == DOCUMENTS
    assert len(bill) - DOCUMENTS <= REPEATED_MAX
    assert_no_process_left(tmp_path / "data", LINGER_S)
