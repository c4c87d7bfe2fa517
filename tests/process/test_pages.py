"""docs/effects.md and docs/tasks.md do what they say: their blocks are run in order, in one directory.

A block `python FILE` is written to that file, a block `python` is run in one session with those before
it, a block `sh` in a shell of its own, and a block `text` is what the one before it printed. In it, `…`
stands for anything.
"""

from __future__ import annotations

import json
import os
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.process.test_tutorial import blocks_of, pattern_of
from tests.process.watch import assert_nobody_is_left
from tests.processes import ROOT, Proc

PAGES = [ROOT / "docs" / name for name in ("effects.md", "tasks.md")]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
PAGE_S = 100
LINGER_S = 3.0
MARK = "--- block"

# Blocks come as JSON in a file; what each prints comes behind a line that says which one it is.
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
def test_every_block_of_the_page_is_one_that_we_run(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = blocks_of(text)
    assert len(blocks) == text.count("```") // 2
    assert {block.kind for block in blocks} == {"python", "sh", "text"}
    for before, block in pairwise(blocks):
        assert block.kind != "text" or (before.kind != "text" and not before.file)


@pytest.mark.slow
@pytest.mark.timeout(PAGE_S + 20)
@each_page
def test_the_page_does_what_it_says(page: Path, tmp_path: Path) -> None:
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    run = []
    for at, block in enumerate(blocks):
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        elif block.kind != "text":
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
    told = {int(at): said.rstrip() for at, said in zip(parts[1::2], parts[2::2], strict=True)}
    for at, (block, after) in enumerate(pairwise(blocks)):
        if not block.file and block.kind != "text":
            expected = pattern_of(after.text) if after.kind == "text" else ""
            assert re.fullmatch(expected, told[at]), f"block {at} printed:\n{told[at]}"
    assert_nobody_is_left(tmp_path / "data", LINGER_S)
