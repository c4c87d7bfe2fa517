"""A worker that is killed exactly between two steps of a flow: the next worker runs the second step only."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from holdfast import store as stores
from tests.process.conftest import LIMITS
from tests.process.two_step_app import CALLS, app, two_steps
from tests.processes import Proc, python_proc

MODULES = ("holdfast.workers.flows.activation", "holdfast.flows.operations")

LONG_S = 60.0


def test_flow_of_a_worker_killed_between_two_steps_does_not_repeat_the_first(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker dies by SIGKILL at the failpoint `flows.committed`, with the outcome of the first step recorded."""
    calls = tmp_path / "calls"
    monkeypatch.setenv(CALLS, str(calls))
    env = {CALLS: str(calls)}
    argv = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.two_step_app:app"]
    argv += ["--store", str(home), "--role", "task", "--role", "timer"]
    with (
        stores.open(home, limits=LIMITS) as store,
        app.open(store, roles=()) as rt,
        python_proc("tests.process.two_step_app", str(home), env=env) as dying,
    ):
        handle = rt.start(two_steps)
        assert dying.wait(LONG_S) == -signal.SIGKILL
        [step] = handle.steps()
        assert (step.name, step.value, step.state) == ("first", 1, "completed")
        with Proc.spawn(argv, env=env) as worker:
            assert handle.result(LONG_S) == 2
            made = [line.split() for line in calls.read_text().splitlines()]
            assert [(name, int(pid)) for name, pid, _ in made] == [
                ("first", dying.pid), ("second", worker.pid),
            ]  # fmt: skip
            assert handle.steps()[0] == step
            worker.terminate()
            assert worker.wait(LONG_S) == 0
