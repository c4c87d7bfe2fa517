"""The command line itself: help, errors in one line, exit codes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import __version__
from holdfast.cli import COMMANDS, Command
from tests.cli.conftest import Run
from tests.processes import ROOT, Proc

HEAVY = ("lmdb", "msgspec", "holdfast.store", "holdfast.durable", "holdfast.runner", "holdfast.sim")


def test_help_lists_the_commands_and_loads_none_of_them() -> None:
    code = (
        "import sys; from holdfast.cli import main; main(['--help']); "
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *usage, loaded = said.stdout.splitlines()
    assert loaded == "[]"
    listed = {line.split()[0] for line in usage if line.startswith("    ")}
    assert listed == {name for name, command in COMMANDS.items() if command.help}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(run: Run, name: str) -> None:
    ran = run(name, "--help")
    assert ran.code == 0
    assert ran.out.startswith(f"usage: holdfast {name}")


def test_version(run: Run) -> None:
    assert run("--version").out == f"holdfast {__version__}\n"


@pytest.mark.parametrize("argv", [[], ["nothing"], ["dead"], ["dead", "show"], ["backup"]])
def test_wrong_usage_is_exit_code_2(run: Run, argv: list[str]) -> None:
    ran = run(*argv)
    assert ran.code == 2
    assert "usage: holdfast" in ran.err
    assert ran.out == ""


def test_an_error_is_one_line_with_its_code_and_what_to_do(run: Run, path: Path) -> None:
    ran = run("store", "info", "--store", path)
    assert ran.code == 1
    assert ran.out == ""
    assert ran.error.startswith("not_found: ")
    assert ran.error.endswith("one to look at)")


def test_the_store_comes_from_the_environment(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_STORE", str(tmp_path / "elsewhere"))
    assert "elsewhere" in run("store", "info").error


def test_a_mistyped_path_does_not_become_a_store(run: Run, path: Path) -> None:
    for argv in (["store", "info"], ["dead", "list", "mail"], ["backup", path.parent / "copy"]):
        assert run(*argv, "--store", path).code == 1
    assert list(path.parent.iterdir()) == []


def test_a_bug_is_one_line_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "broken", Command("tests.cli.handlers", "fails"))
    ran = run("broken", "now")
    assert ran.code == 1
    assert ran.error.startswith("internal: RuntimeError: first line second line (this is a bug")


def test_a_file_that_is_not_there_is_no_bug(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "broken", Command("tests.cli.handlers", "fails"))
    ran = run("broken", "missing")
    assert ran.code == 1
    assert ran.error.startswith("io: No such file or directory: nowhere (")


def test_an_interrupt_is_exit_code_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "broken", Command("tests.cli.handlers", "fails"))
    ran = run("broken", "interrupt")
    assert (ran.code, ran.err) == (130, "")


def test_ctrl_c_in_the_middle_of_a_demo_leaves_quietly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast.cli", "demo", "--store", str(tmp_path / "store")]
    with Proc.spawn(command, ready=None) as demo:
        demo.expect("Two workers start")
        os.kill(demo.pid, signal.SIGINT)
        assert demo.wait() == 130
        assert demo.errors == []


def test_a_reader_who_has_seen_enough_is_no_error(path: Path, letters: list[int]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "holdfast.cli", "store", "info", "--store", str(path)]
    with os.fdopen(writing, "wb") as out:
        said = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, cwd=ROOT, check=False)
    assert said.returncode == 1
    assert said.stderr == b""
