"""The commands without a checkout: the package alone in a directory, as an installed wheel has it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT

COMMAND_S = 120


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a copy of the package."""
    directory = tmp_path_factory.mktemp("site-packages")
    shutil.copytree(
        ROOT / "src" / "holdfast",
        directory / "holdfast",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    return directory


def run(site: Path, cwd: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    code = "import holdfast, sys; from holdfast.cli import main; "
    code += "assert holdfast.__file__.startswith(sys.argv[1]); sys.exit(main(sys.argv[2:]))"
    return subprocess.run(
        [sys.executable, "-c", code, str(site), *argv],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )


@pytest.mark.parametrize("argv", [["demo"], ["demo", "--json"], ["sim"], ["sim", "--seeds", "5"]])
def test_command_that_needs_a_checkout_prints_one_line_and_exits_2(
    site: Path, tmp_path: Path, argv: list[str]
) -> None:
    done = run(site, tmp_path, *argv)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("holdfast: no_checkout: ")
    assert "git clone" in line
    assert ("--app MODULE:APP" in line) == (argv[0] == "sim")


def test_sim_app_runs_from_a_wheel(site: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "cli" / "simulated_apps.py", tmp_path / "bank.py")
    held = run(site, tmp_path, "sim", "--app", "bank:steady", "--seeds", "1")
    assert (held.returncode, held.stderr) == (0, "")
    assert held.stdout.startswith("1 seeds from 0 of bank:steady: ")
    failed = run(site, tmp_path, "sim", "--app", "bank:unsteady", "--seeds", "1")
    assert (failed.returncode, failed.stderr) == (1, "")
    assert failed.stdout.endswith("again: holdfast sim --app bank:unsteady --seed 0\n")


def test_wheel_does_not_import_the_tests(site: Path, tmp_path: Path) -> None:
    """A package `tests` of the user's project is not taken for the oracle."""
    trap = tmp_path / "tests" / "simulation"
    trap.mkdir(parents=True)
    for package in (trap.parent, trap):
        (package / "__init__.py").write_text("raise AssertionError('imported')")
    done = run(site, tmp_path, "sim")
    assert done.returncode == 2
    assert done.stderr.startswith("holdfast: no_checkout: ")
