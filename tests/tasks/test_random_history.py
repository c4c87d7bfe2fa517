"""Random histories of all task operations. The rig checks the rows after every step."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.clock import SimClock
from holdfast.tasks.states import TASK_TRANSITIONS
from tests.durable.conftest import SIMULATED
from tests.tasks.random_history import RandomTaskHistory
from tests.tasks.rig import TaskOperationsRig, entry_records

SEEDS = range(12)
STEPS = 120


def log_records(rig: TaskOperationsRig) -> list[list[object]]:
    return [list(entry_records(entry)) for entry in rig.entries()]


@pytest.mark.parametrize("seed", SEEDS)
def test_task_rows_equal_the_log_after_every_random_step(rig: TaskOperationsRig, seed: int) -> None:
    for _ in RandomTaskHistory(rig, seed).run(STEPS):
        pass
    assert len(rig.rows_by_height) > STEPS // 3


@pytest.mark.parametrize("seed", SEEDS)
def test_every_task_ends_once_no_attempt_fails(rig: TaskOperationsRig, seed: int) -> None:
    history = RandomTaskHistory(rig, seed)
    for _ in history.run(STEPS):
        pass
    history.run_to_completion()
    assert all(status.state in TASK_TRANSITIONS.terminal for status in rig.rows().values())


@pytest.mark.parametrize("seed", [3, 8])
def test_random_task_history_leaves_the_same_log_on_every_store(seed: int, tmp_path: Path) -> None:
    logs_per_store = []
    for name, opener in SIMULATED.items():
        path = tmp_path / name
        path.mkdir()
        clock = SimClock()
        for store in opener(path, clock):
            rig = TaskOperationsRig(store, clock)
            for _ in RandomTaskHistory(rig, seed).run(STEPS):
                pass
            logs_per_store.append(log_records(rig))
    assert all(log == logs_per_store[0] for log in logs_per_store)
