"""docs/http-api.md and docs/world-operations.md: their `sh` blocks are run in order, in one shell for each page, and
their output is compared."""

from __future__ import annotations

import os
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.pgcluster import free_port
from tests.process.test_tutorial import blocks_of, pattern_of, printed_by, script_of
from tests.process.watch import assert_no_client_left
from tests.processes import ROOT, Proc, require_programs

PAGES = [ROOT / "docs" / name for name in ("http-api.md", "world-operations.md")]
PAGE_S = 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_the_http_api_page_is_executed(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = blocks_of(text)
    assert len(blocks) == text.count("```") // 2
    assert {block.kind for block in blocks} == {"python", "sh", "text"}
    for before, block in pairwise(blocks):
        assert block.kind != "text" or before.kind == "sh"


@pytest.mark.slow
@pytest.mark.timeout(PAGE_S + 20)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_http_api_page_examples_print_the_documented_output(page: Path, tmp_path: Path) -> None:
    require_programs("curl", "jq")
    text = page.read_text(encoding="utf-8")
    for port in ("8787", "8788"):
        text = text.replace(port, str(free_port()))
    blocks = blocks_of(text)
    for block in blocks:
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {"PATH": path, "HOLDFAST_TOKEN": ""}
    # Responses do not end with a line feed, so each block mark starts on a new line.
    script = script_of(blocks).replace("echo '--- block", "echo; echo '--- block")
    with Proc.spawn(["bash", "-c", script], ready=None, cwd=tmp_path, env=env) as shell:
        code = shell.wait(PAGE_S)
        printed = printed_by([line for line in shell.lines if line])
        assert code == 0, f"block {max(printed)} failed:\n" + "\n".join(shell.errors)
    for at, (block, after) in enumerate(pairwise(blocks)):
        if block.kind == "sh" and after.kind == "text":
            printed_text = "\n".join(printed[at])
            assert re.fullmatch(pattern_of(after.text), printed_text), (
                f"block {at} printed:\n{printed_text}"
            )
    assert_no_client_left(tmp_path / "data")
