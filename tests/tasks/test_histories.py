"""Histories of everything at once; the rows are verified after every step of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.clock import SimClock
from holdfast.tasks.states import TABLE
from tests.durable.conftest import SIMULATED
from tests.tasks.histories import History
from tests.tasks.rig import Desk, singles

SEEDS = range(12)
STEPS = 120


def logs(desk: Desk) -> list[list[object]]:
    return [list(singles(entry)) for entry in desk.entries()]


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_are_what_the_log_says_after_every_step(desk: Desk, seed: int) -> None:
    for _ in History(desk, seed).run(STEPS):
        pass
    assert len(desk.lived) > STEPS // 3


@pytest.mark.parametrize("seed", SEEDS)
def test_everything_comes_to_an_end_once_nothing_fails(desk: Desk, seed: int) -> None:
    history = History(desk, seed)
    for _ in history.run(STEPS):
        pass
    history.finish()
    assert all(status.state in TABLE.terminal for status in desk.rows().values())


@pytest.mark.parametrize("seed", [3, 8])
def test_the_same_history_on_every_store_leaves_the_same_log(seed: int, tmp_path: Path) -> None:
    found = []
    for name, opener in SIMULATED.items():
        path = tmp_path / name
        path.mkdir()
        clock = SimClock()
        for store in opener(path, clock):
            desk = Desk(store, clock)
            for _ in History(desk, seed).run(STEPS):
                pass
            found.append(logs(desk))
    assert all(one == found[0] for one in found)
