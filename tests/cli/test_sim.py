"""`holdfast sim`: an application under random events (`--app`), and the project's own simulation."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import RunCommand
from tests.processes import ROOT

APPS = "tests.cli.simulated_apps"


def test_sim_app_prints_one_summary_line_when_every_seed_holds(run: RunCommand) -> None:
    result = run("sim", "--app", f"{APPS}:steady", "--seeds", 3, "--start", 7)
    assert (result.code, result.err) == (0, "")
    [line] = result.out.splitlines()
    assert line.startswith(f"3 seeds from 7 of {APPS}:steady: ")
    assert line.endswith(", 0 failed")


def test_sim_app_prints_the_command_that_replays_a_failing_seed(run: RunCommand) -> None:
    result = run("sim", "--app", f"{APPS}:unsteady", "--seeds", 2)
    assert (result.code, result.err) == (1, "")
    lines = result.out.splitlines()
    assert len(lines) == 2
    for seed, line in enumerate(lines):
        assert line.startswith(f"seed {seed}: Unsteady/")
        assert "handled again, its state is" in line or "it is parked" in line
        assert line.endswith(f"    again: holdfast sim --app {APPS}:unsteady --seed {seed}")

    again = run("sim", "--app", f"{APPS}:unsteady", "--seed", 1)
    assert again.code == 1
    *actions, verdict = again.out.splitlines()
    assert any(action.startswith("send Unsteady/") for action in actions)
    assert verdict.startswith("seed 1: Unsteady/")


def test_sim_app_runs_a_seed_twice_with_the_same_actions(run: RunCommand) -> None:
    first, second = (run("sim", "--app", f"{APPS}:steady", "--seed", 11) for _ in range(2))
    assert first.code == 0
    assert first.out.splitlines()[-1] == "seed 11: no violation"
    assert first.out == second.out


def test_sim_app_names_the_event_and_the_type_without_a_generator(run: RunCommand) -> None:
    result = run("sim", "--app", f"{APPS}:ungenerable", "--seeds", 1)
    assert (result.code, result.out) == (2, "")
    assert result.error.startswith("ungenerable: what='event Coded' type=")
    assert "pattern=" in result.error


@pytest.mark.parametrize("app", ["nothing:app", f"{APPS}:missing", APPS])
def test_sim_app_that_cannot_be_loaded_is_a_usage_error(run: RunCommand, app: str) -> None:
    result = run("sim", "--app", app)
    assert result.code == 2
    assert result.error.startswith("no_app: ")


def test_sim_app_without_an_event_is_refused(run: RunCommand) -> None:
    result = run("sim", "--app", f"{APPS}:idle")
    assert result.code == 1
    assert "no world of the app handles an event" in result.error


@pytest.mark.parametrize("option", [["--mutants"], ["--exhaustive"], ["--backend", "lmdb"]])
def test_sim_app_refuses_options_of_the_projects_own_simulation(
    run: RunCommand, option: list[str]
) -> None:
    result = run("sim", "--app", f"{APPS}:steady", *option)
    assert (result.code, result.error) == (2, f"usage: {option[0]} does not apply with --app")


def test_sim_app_finds_an_application_in_a_local_package_named_tests(tmp_path: Path) -> None:
    package = tmp_path / "tests"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(ROOT / "tests" / "cli" / "simulated_apps.py", package / "bank.py")
    command = [sys.executable, "-m", "holdfast.cli", "sim", "--app", "tests.bank:steady"]
    done = subprocess.run(
        [*command, "--seeds", "1"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_sim_without_app_runs_the_simulation_of_the_checkout(run: RunCommand) -> None:
    result = run("sim", "--seed", 3)
    assert result.code == 0
    assert "no violation" in result.out
