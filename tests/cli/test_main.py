"""The command line: help, one-line errors, exit codes."""

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from holdfast import __version__
from holdfast.cli import COMMANDS, Command
from tests.cli.conftest import RunCommand
from tests.processes import ROOT, Proc

HEAVY_MODULES = (
    "lmdb",
    "msgspec",
    "holdfast.store",
    "holdfast.durable",
    "holdfast.runner",
    "holdfast.sim",
)


def test_help_lists_the_commands_and_imports_no_heavy_module() -> None:
    code = (
        "import sys; from holdfast.cli import main; main(['--help']); "
        f"print([name for name in {HEAVY_MODULES} if name in sys.modules])"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    *usage, loaded = completed.stdout.splitlines()
    assert loaded == "[]"
    listed = {line.split()[0] for line in usage if line.startswith("    ")}
    assert listed == {name for name, command in COMMANDS.items() if command.help}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(run: RunCommand, name: str) -> None:
    result = run(name, "--help")
    assert result.code == 0
    assert result.out.startswith(f"usage: holdfast {name}")


def test_version_option_prints_the_version(run: RunCommand) -> None:
    assert run("--version").out == f"holdfast {__version__}\n"


def test_version_equals_the_version_of_the_project_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__


@pytest.mark.parametrize("argv", [[], ["nothing"], ["dead"], ["dead", "show"], ["backup"]])
def test_wrong_usage_exits_with_2(run: RunCommand, argv: list[str]) -> None:
    result = run(*argv)
    assert result.code == 2
    assert "usage: holdfast" in result.err
    assert result.out == ""


def test_error_is_printed_as_one_line_with_code_and_hint(run: RunCommand, path: Path) -> None:
    result = run("store", "info", "--store", path)
    assert result.code == 1
    assert result.out == ""
    assert result.error.startswith("not_found: ")
    assert result.error.endswith("creates a sample one)")


def test_store_url_is_read_from_the_environment(
    run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_STORE", str(tmp_path / "elsewhere"))
    assert "elsewhere" in run("store", "info").error


def test_commands_do_not_create_a_store_at_a_mistyped_path(run: RunCommand, path: Path) -> None:
    for argv in (["store", "info"], ["dead", "list", "mail"], ["backup", path.parent / "copy"]):
        assert run(*argv, "--store", path).code == 1
    assert list(path.parent.iterdir()) == []


def test_unexpected_exception_is_printed_as_one_internal_error_line(
    run: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMANDS, "broken", Command("tests.cli.handlers", "fails"))
    result = run("broken", "now")
    assert result.code == 1
    assert result.error.startswith("internal: RuntimeError: first line second line (this is a bug")


def test_missing_file_is_printed_as_an_io_error(
    run: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMANDS, "broken", Command("tests.cli.handlers", "fails"))
    result = run("broken", "missing")
    assert result.code == 1
    assert result.error.startswith("io: No such file or directory: nowhere (")


def test_keyboard_interrupt_exits_with_130(
    run: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMANDS, "broken", Command("tests.cli.handlers", "fails"))
    result = run("broken", "interrupt")
    assert (result.code, result.err) == (130, "")


def test_sigint_during_the_demo_exits_with_130_and_prints_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast.cli", "demo", "--store", str(tmp_path / "store")]
    with Proc.spawn(command, ready=None) as demo:
        demo.expect("Two workers start")
        os.kill(demo.pid, signal.SIGINT)
        assert demo.wait() == 130
        assert demo.errors == []


def test_closed_stdout_pipe_prints_no_error(path: Path, letters: list[int]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "holdfast.cli", "store", "info", "--store", str(path)]
    with os.fdopen(writing, "wb") as out:
        completed = subprocess.run(
            command, stdout=out, stderr=subprocess.PIPE, cwd=ROOT, check=False
        )
    assert completed.returncode == 1
    assert completed.stderr == b""
