"""The example of docs/traces.md, and its table of spans."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.processes import ROOT

PAGE = (ROOT / "docs" / "traces.md").read_text(encoding="utf-8")

PROGRAM = """
import holdfast as hf

@hf.task
def resize(name: str) -> str:
    return name

with hf.App("jobs", tasks=[resize]).open("memory:", roles=("task",)) as rt:
    assert rt.submit(resize, "a").result(30) == "a"
provider.shutdown()
"""


def test_example_prints_the_spans_of_a_task(tmp_path: Path) -> None:
    [example] = re.findall(r"(?:^    from .*\n)(?:^    .*\n|^\n)+", PAGE, re.M)
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(example) + PROGRAM, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    decoder, text, names, traces = json.JSONDecoder(), done.stdout, set(), set()
    while text.strip():
        span, end = decoder.raw_decode(text.lstrip())
        text = text.lstrip()[end:]
        names.add(span["name"])
        traces.add(span["context"]["trace_id"])
    assert names == {"submit resize", "lease default", "run resize"}
    assert len(traces) == 1


def test_table_lists_the_spans_that_the_code_makes() -> None:
    listed = {name.split()[0] for name in re.findall(r"^\| `([a-z]+ [A-Za-z:]+)` \|", PAGE, re.M)}
    made = set()
    for path in (ROOT / "src" / "holdfast").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        made |= set(re.findall(r'f"([a-z]+) \{[^"]*\}",\s*traces\.[A-Z]', text))
        made |= set(re.findall(r'traces\.sending\(\s*"([a-z]+)"', text))
    assert listed == made
