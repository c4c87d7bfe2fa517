"""The wheel: its files, and its commands without a checkout.

The wheel is built and installed into a directory, without its dependencies. They come from the interpreter of the tests.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.processes import ROOT

COMMAND_S = 120
# No index is asked: the build uses the installed hatchling.
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
PYTHON_COMMAND = (
    "import holdfast, sys; from holdfast.cli import main; "
    "assert holdfast.__file__.startswith(sys.argv[1]); sys.exit(main(sys.argv[2:]))"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(directory)]
    done = run_command([*PIP, "wheel", *options, str(ROOT)], directory)
    assert done.returncode == 0, done.stderr
    [built] = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which only the wheel is installed."""
    directory = tmp_path_factory.mktemp("site-packages")
    options = ["--no-deps", "--no-index", "--no-compile", "--target", str(directory)]
    done = run_command([*PIP, "install", *options, str(wheel)], directory)
    assert done.returncode == 0, done.stderr
    return directory


def run_command(
    argv: Sequence[str], cwd: Path, site: Path | None = None
) -> subprocess.CompletedProcess[str]:
    path = {} if site is None else {"PYTHONPATH": str(site)}
    return subprocess.run(
        argv,
        cwd=cwd,
        env={**os.environ, **path},
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )


def run(site: Path, cwd: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return run_command([sys.executable, "-c", PYTHON_COMMAND, str(site), *argv], cwd, site)


def test_wheel_has_exactly_the_files_of_the_package(wheel: Path) -> None:
    source = ROOT / "src"
    files = {
        str(path.relative_to(source))
        for path in [source / "holdfast_pytest.py", *(source / "holdfast").rglob("*")]
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in names if name.partition("/")[0].endswith(".dist-info")}
    assert names - metadata == files
    assert {Path(name).name for name in metadata} == {
        "METADATA", "WHEEL", "RECORD", "LICENSE", "entry_points.txt",
    }  # fmt: skip


def test_wheel_has_no_tests_benchmarks_or_examples(wheel: Path) -> None:
    parts = {part for name in zipfile.ZipFile(wheel).namelist() for part in Path(name).parts}
    assert not parts & {"tests", "bench", "examples", "docs", "tools", "conftest.py", "__pycache__"}


def test_installed_script_prints_its_help(site: Path, tmp_path: Path) -> None:
    done = run_command([str(site / "bin" / "holdfast"), "--help"], tmp_path, site)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: holdfast ")


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
