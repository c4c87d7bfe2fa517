"""A step of the calendar clock under a running worker and writer, by days and in both directions.

The step is made where Holdfast reads the calendar, `time.time_ns` of each process: a kernel has one calendar clock for all
processes of the machine, which time namespaces do not separate, and other programs of the machine use it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.clock import S
from tests.process.watch import assert_no_client_left, until
from tests.processes import Proc

DAY_S = 86_400
STEPPED_CLOCK = """
import os, time
read_clock, steps = time.time_ns, os.environ["CLOCK_STEP_FILE"]
def stepped():
    with open(steps) as file:
        return read_clock() + int(file.read())
time.time_ns = stepped
"""
APP = """
import time
from pathlib import Path
import holdfast as hf

class Planned(hf.Event):
    pass

class Rang(hf.Event):
    pass

@hf.task(attempts=1, lease_s=2, expiries_max=1)
def wait_for_file(name: str) -> int:
    while not Path(name).exists():
        time.sleep(0.01)
    return hf.current_task().attempt

@hf.task
def note() -> None:
    pass

@hf.flow
async def nap(seconds: float) -> str:
    await hf.sleep(seconds)
    return "rested"

class Bell(hf.World):
    planned: int = 0
    rang: int = 0

    @hf.on(Planned)
    def on_planned(self, event: Planned, cx: hf.Context) -> None:
        cx.after(1.0, Rang(), key="bell")
        self.planned += 1

    @hf.on(Rang)
    def on_rang(self, event: Rang, cx: hf.Context) -> None:
        self.rang += 1

app = hf.App("steps", worlds=[Bell], tasks=[wait_for_file, note], flows=[nap])
"""


class SteppedMachine:
    """A worker, and the writer that it starts, with a calendar clock that the test steps."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._steps = directory / "step"
        self.step(0)
        clock = directory / "clock"
        clock.mkdir()
        (clock / "sitecustomize.py").write_text(STEPPED_CLOCK)
        (directory / "steps.py").write_text(APP)
        env = {**os.environ, "PYTHONPATH": str(clock), "CLOCK_STEP_FILE": str(self._steps)}
        line = [sys.executable, "-m", "holdfast.cli", "up", "steps:app", "--store", "data"]
        self.worker = Proc.spawn([*line, "--lease-s", "2"], cwd=directory, env=env, fresh=True)

    def step(self, seconds: int) -> None:
        """Step the clock to this distance from that of the machine."""
        new = self._steps.with_suffix(".new")
        new.write_text(str(seconds * S))
        new.replace(self._steps)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[SteppedMachine]:
    made = SteppedMachine(tmp_path)
    yield made
    made.worker.close()
    assert_no_client_left(tmp_path / "data")


@pytest.mark.deep
@pytest.mark.timeout(120)
@pytest.mark.parametrize("days", [400, -400])
def test_step_of_the_clock_changes_no_lease_no_delay_and_no_sleep(
    machine: SteppedMachine, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    monkeypatch.syspath_prepend(str(machine.directory))
    import steps  # type: ignore[import-not-found]

    try:
        with steps.app.open(str(machine.directory / "data"), roles=()) as rt:
            busy = rt.submit(steps.wait_for_file, str(machine.directory / "done"))
            until(lambda: busy.status().state == "LEASED", "the lease")
            bell, nap = rt.world(steps.Bell, "a"), rt.start(steps.nap, 1.0)
            bell.send(steps.Planned())
            bell.wait_for(lambda state: state.planned == 1)
            began_ns = rt.store.now_ns()
            machine.step(days * DAY_S)
            # Two leases pass, of the task, of the world and of the leader.
            until(lambda: rt.store.now_ns() > began_ns + 5 * S, "two leases")
            assert rt.store.now_ns() < began_ns + 60 * S
            bell.wait_for(lambda state: state.rang == 1, timeout=30)
            assert nap.result(timeout=30) == "rested"
            machine.step(0)
            (machine.directory / "done").touch()
            assert busy.result(timeout=30) == 1, "no other attempt"
            assert rt.submit(steps.note).result(timeout=30) is None
            assert bell.state().rang == 1
        assert not any("lost" in line for line in machine.worker.errors)
    finally:
        sys.modules.pop("steps", None)
