"""docs/asyncio.md, docs/effects.md, docs/tasks.md, docs/flows.md and the migration pages: their blocks are run in order,
in one directory.

A block `py` of a migration page is the program of the other system. It is compiled and not run. A block `python FILE` is written to that file. All blocks `python` run in one session, and each block `sh` in
a separate shell. A block `text` is the expected output of the block before it, where `…` matches any text.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.process.test_tutorial import blocks_of, pattern_of
from tests.process.watch import assert_no_client_left
from tests.processes import ROOT, Proc

GUIDES = [ROOT / "docs" / name for name in ("asyncio.md", "effects.md", "tasks.md", "flows.md")]
MIGRATIONS = [
    ROOT / "docs" / name for name in ("from-temporal.md", "from-celery.md", "from-dbos.md")
]
PAGES = [*GUIDES, *MIGRATIONS]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
PAGE_S = 100
MARK = "--- block"

# Reads the blocks as JSON from a file, and prints a line with the block's number before its output.
SESSION = """
import json, subprocess, sys
sys.path.insert(0, ".")
names = {"__name__": "page"}
for at, (kind, text) in json.load(open("blocks.json")):
    print("--- block", at, flush=True)
    if kind == "python":
        exec(compile(text, f"block {at}", "exec"), names)
    else:
        subprocess.run(["bash", "-euc", text], check=True)
"""


@each_page
def test_every_block_of_the_page_is_executed(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = blocks_of(text)
    assert len(blocks) == text.count("```") // 2
    blocks = [block for block in blocks if page in GUIDES or block.kind != "py"]
    assert {block.kind for block in blocks} == {"python", "sh", "text"}
    for before, block in pairwise(blocks):
        assert block.kind != "text" or (before.kind != "text" and not before.file)


@pytest.mark.parametrize("page", MIGRATIONS, ids=lambda page: page.name)
def test_program_is_shorter_than_that_of_the_other_system(page: Path) -> None:
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    [theirs] = [block.text for block in blocks if block.kind == "py"]
    compile(theirs, page.name, "exec")
    [ours, client, *_] = [block.text for block in blocks if block.kind == "python"]
    assert code_lines(ours) + code_lines(client) < code_lines(theirs)


def code_lines(source: str) -> int:
    """The lines with code. The layout of the formatter does not count."""
    return len([line for line in ast.unparse(ast.parse(source)).splitlines() if line.strip()])


@pytest.mark.slow
@pytest.mark.timeout(PAGE_S + 20)
@each_page
def test_page_examples_print_the_documented_output(page: Path, tmp_path: Path) -> None:
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    run = []
    for at, block in enumerate(blocks):
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        elif block.kind not in ("text", "py"):
            run.append((at, (block.kind, block.text)))
    (tmp_path / "blocks.json").write_text(json.dumps(run), encoding="utf-8")
    (tmp_path / "session.py").write_text(SESSION, encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with Proc.spawn(
        [sys.executable, "session.py"], ready=None, cwd=tmp_path, env={"PATH": path}
    ) as session:
        code = session.wait(PAGE_S)
        printed = "\n".join(session.lines)
        assert code == 0, printed + "\n".join(session.errors)
    parts = re.split(rf"^{MARK} (\d+)\n?", printed, flags=re.MULTILINE)
    printed_by_block = {
        int(at): text.rstrip() for at, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    for at, (block, after) in enumerate(pairwise(blocks)):
        if not block.file and block.kind not in ("text", "py"):
            expected = pattern_of(after.text) if after.kind == "text" else ""
            assert re.fullmatch(expected, printed_by_block[at]), (
                f"block {at} printed:\n{printed_by_block[at]}"
            )
    assert_no_client_left(tmp_path / "data")
