"""The pytest plugin and its scenarios: failing seeds, the fewest faults, and their replay."""

import os
import random
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import Invalid
from holdfast.sim.scenario import ScenarioFailed, ScenarioOptions, run_scenario, run_seeds
from tests.processes import ROOT

COMMAND_S = 120
PLUGIN = "holdfast_pytest"
CI_VARIABLES = ("CI", "BUILD_NUMBER")
USER_TEST = """
import holdfast as hf

charged = []


def charge(id: str) -> int:
    charged.append(id)  # twice, if its worker dies before the outcome is recorded
    return 5


@hf.flow
async def order(id: str) -> int:
    return await hf.step(charge, id)


app = hf.App("shop", flows=[order])


def pay(s):
    charged.clear()
    assert s.start(order, "o-1").result(timeout=600) == 5
    assert len(charged) == 1


def calm(s):
    assert s.start(order, "o-1").result(timeout=600) == 5


def test_pay(holdfast_sim):
    holdfast_sim(app, pay, seeds=60)


def test_calm(holdfast_sim):
    holdfast_sim(app, calm, seeds=3)
"""

charged: list[str] = []
draws: list[float] = []


def charge(id: str) -> int:
    charged.append(id)
    return 5


async def draw(value: float) -> float:
    return value


@hf.flow
async def order(id: str) -> int:
    return await hf.step(charge, id)


@hf.flow
async def gamble() -> float:
    return await hf.step(draw, random.random())


app = hf.App("shop", flows=[order, gamble])


def pay(s: Any) -> None:
    charged.clear()
    assert s.start(order, "o-1").result(timeout=600) == 5
    assert len(charged) == 1


def failure_of(**options: Any) -> str:
    with pytest.raises(ScenarioFailed) as failed:
        run_seeds(app, pay, replay="pytest x", **options)
    return str(failed.value)


def test_failing_seed_is_shrunk_to_few_crashes_that_replay_it() -> None:
    text = failure_of(seeds=60)
    least, total = map(int, re.findall(r"with (\d+) of its (\d+) faults:", text)[0])
    assert 1 <= least <= 4 < total
    [seed, faults] = re.findall(r"--holdfast-seed (\d+) --holdfast-faults ([\d,]+)$", text)[0]
    assert len(re.findall(r"  \d\. at [\d.]+ s \w+: ", text)) == least
    options, allowed = ScenarioOptions(), frozenset(map(int, faults.split(",")))
    assert isinstance(run_scenario(app, pay, int(seed), options, allowed).error, AssertionError)
    assert run_scenario(app, pay, int(seed), options, frozenset()).error is None


def test_bug_without_crashes_is_reported_as_such() -> None:
    """A flow that passes a random number to a step fails in every run: the parity check names the step."""

    def play(s: Any) -> None:
        s.start(gamble)

    with pytest.raises(ScenarioFailed) as failed:
        run_seeds(app, play, seeds=2, replay="pytest x")
    text = str(failed.value)
    assert text.startswith(
        "seed 0 fails: FlowDisparity: flow gamble/f1-1 at step draw#1: run again"
    )
    assert "also without its" in text
    assert text.endswith("again: pytest x --holdfast-seed 0 --holdfast-faults none")


def test_scenario_starts_the_random_module_with_the_seed_and_restores_it() -> None:
    def note(s: Any) -> None:
        draws.append(random.random())

    draws.clear()
    state = random.getstate()
    for _ in range(2):
        run_seeds(app, note, seeds=2)
    assert draws[:2] == draws[2:]
    assert random.getstate() == state


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"seeds": 0}, "seeds"),
        ({"start": -1}, "start"),
        ({"shrink_runs": "many"}, "shrink_runs"),
        ({"crash": True}, "holdfast_sim"),
    ],
    ids=["no seed", "negative start", "text", "unknown option"],
)
def test_bad_option_is_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(Invalid, match=f"what='{what}'"):
        run_seeds(app, pay, **options)


def test_scenario_that_is_no_function_is_refused() -> None:
    with pytest.raises(Invalid, match="expected='a function scenario"):
        run_seeds(app, None)  # type: ignore[arg-type]


# -- the plugin ------------------------------------------------------------------------------------


def run_pytest(directory: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    (directory / "test_user.py").write_text(USER_TEST, encoding="utf-8")
    (directory / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", PLUGIN, *argv],
        cwd=directory,
        # With CI in the environment, pytest prints the whole message a second time in its summary.
        env={
            **{name: value for name, value in os.environ.items() if name not in CI_VARIABLES},
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_ADDOPTS": "",
        },
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )


def test_plugin_prints_the_failing_seed_and_its_replay_fails_alike(tmp_path: Path) -> None:
    done = run_pytest(tmp_path)
    assert "1 failed, 1 passed" in done.stdout
    [again] = re.findall(r"again: pytest (.*)", done.stdout)
    assert again.startswith("test_user.py::test_pay --holdfast-seed ")
    replayed = run_pytest(tmp_path, *again.split())
    assert "1 failed" in replayed.stdout
    assert re.findall(r"again: pytest (.*)", replayed.stdout) == [again]
    other = run_pytest(tmp_path, *again.split()[:-1], "none")
    assert "1 passed" in other.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--holdfast-faults", "1"], "--holdfast-faults needs --holdfast-seed"),
        (["--holdfast-seed", "1", "--holdfast-faults", "x"], "is a list of numbers, or none: x"),
    ],
    ids=["without a seed", "no number"],
)
def test_bad_plugin_option_is_refused(tmp_path: Path, argv: list[str], message: str) -> None:
    done = run_pytest(tmp_path, "test_user.py::test_calm", *argv)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr


def test_loading_the_plugin_imports_nothing_of_holdfast() -> None:
    code = "import holdfast_pytest, sys; print([m for m in sys.modules if m.split('.')[0] == 'holdfast'])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=COMMAND_S, check=True
    )
    assert done.stdout == "[]\n"


def test_project_declares_the_plugin_and_puts_it_into_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["entry-points"]["pytest11"] == {"holdfast": "holdfast_pytest"}
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["only-include"] == ["src/holdfast", "src/holdfast_pytest.py"]
    assert wheel["sources"] == ["src"]
