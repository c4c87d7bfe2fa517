"""The type checkers know the arguments and results of the public API: mypy and pyright report each deliberate mistake at
its line, and nothing in the examples."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.tidy_rules import ROOT

MODULES = (
    "holdfast.app.aio",
    "holdfast.app.flows",
    "holdfast.app.runtime",
    "holdfast.app.world_handle",
    "holdfast.world.context",
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MISTAKES = ROOT / "tests/typing/mistakes.py"
EXAMPLES = ROOT / "examples"
# Scripts that import each other by their file name.
SCRIPTS = ("agent", "shell-worker")

Messages = Mapping[Path, Mapping[int, list[str]]]


def test_mypy_reports_each_mistake_at_its_line(mypy: Messages) -> None:
    assert_each_mistake_is_reported(mypy)


def test_pyright_reports_each_mistake_at_its_line(pyright: Messages) -> None:
    assert_each_mistake_is_reported(pyright)


def test_mypy_reports_nothing_in_the_examples(mypy: Messages) -> None:
    assert not {path: found for path, found in mypy.items() if path != MISTAKES}


def test_pyright_reports_nothing_in_the_examples(pyright: Messages) -> None:
    assert not {path: found for path, found in pyright.items() if path != MISTAKES}


def assert_each_mistake_is_reported(messages: Messages) -> None:
    lines = enumerate(MISTAKES.read_text(encoding="utf-8").splitlines(), start=1)
    expected = {number: line for number, line in lines if line.endswith("# mistake")}
    reported = messages[MISTAKES]
    assert len(expected) > 40
    assert not [line for number, line in expected.items() if number not in reported]
    assert not {number: text for number, text in reported.items() if number not in expected}


@pytest.fixture(scope="module")
def mypy() -> Messages:
    options = ["--config-file", ROOT / "tests/typing/mypy.ini"]
    packages = [
        path for path in EXAMPLES.iterdir() if path.name not in SCRIPTS and any(path.glob("*.py"))
    ]
    output = run("mypy", *options, *packages, MISTAKES)
    for script in SCRIPTS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MYPYPATH", str(EXAMPLES / script))
            output += run("mypy", *options, *(EXAMPLES / script).glob("*.py"))
    found: defaultdict[Path, defaultdict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for line in output.splitlines():
        if ": note: " in line:
            continue
        message = re.fullmatch(r"(.*?):(\d+): error: (.*)", line)
        assert message, output
        found[ROOT / message[1]][int(message[2])].append(message[3])
    return found


@pytest.fixture(scope="module")
def pyright() -> Messages:
    output = run("pyright", "--outputjson", "--pythonpath", sys.executable)
    report = json.loads(output)
    assert report["summary"]["filesAnalyzed"] > 20
    found: defaultdict[Path, defaultdict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for message in report["generalDiagnostics"]:
        number = message["range"]["start"]["line"] + 1
        found[Path(message["file"])][number].append(message["message"])
    return found


def run(checker: str, *arguments: str | Path) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", checker, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode in (0, 1), ended.stderr
    return ended.stdout
