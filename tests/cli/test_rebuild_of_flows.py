"""`holdfast store rebuild` of flows and schedules: it restores their indexes, or writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast import codec
from holdfast.flows import name_index
from holdfast.flows.model import keys_of as flow_keys_of
from holdfast.schedules.model import decode_schedule
from holdfast.schedules.model import keys_of as schedule_keys_of
from holdfast.store import tuples
from holdfast.store.api import Txn
from tests.cli.conftest import RunCommand
from tests.cli.test_store_rebuild import (
    damage_store,
    open_with_short_linger,
    stored_rows,
    verify_exit_code,
)
from tests.flows import damage
from tests.flows.damage import SOURCES, UNIVERSE, edit, edit_head, lose, put
from tests.process.watch import until

FLOWS, SCHEDULES = flow_keys_of(UNIVERSE), schedule_keys_of(UNIVERSE)


@pytest.fixture
def used_store(path: Path) -> Path:
    """A store with flows in several states, and a schedule whose second occurrence is queued."""
    with open_with_short_linger(path), damage.app.open(str(path)) as rt:
        order = damage.start_flows(rt.start)
        ended = [rt.flow(damage.done, key="d-1"), rt.flow("f1-3")]
        until(lambda: all(f.done() for f in ended) and is_sleeping(order), "every kind of row")
    with open_with_short_linger(path), damage.app.open(str(path), roles=()) as rt:
        schedule = rt.schedule(
            "daily", damage.child, every="0 3 * * *", overlap="queue", key="daily-1"
        )
        started, queued = schedule.run_now(), schedule.run_now()
        assert started is not None
        assert queued is None
    return path


def is_sleeping(flow: Any) -> bool:
    return any(blocker["code"] == "sleeping" for blocker in flow.why())


def lose_indexes_of_flows(txn: Txn) -> None:
    for prefix in (
        FLOWS.states,
        name_index.prefix_of(UNIVERSE),
        FLOWS.counts,
        FLOWS.keys,
        FLOWS.due,
        FLOWS.retained,
        FLOWS.retained_runs,
        FLOWS.children,
        FLOWS.published,
    ):
        lose(prefix)(txn)
    lose(FLOWS.mail_keys, 2)(txn)


def add_stray_rows_of_flows(txn: Txn) -> None:
    put(FLOWS.states + tuples.pack((7, 99)), b"")(txn)
    put(FLOWS.due_key(5, 99, "hf.sleep", 1), b"")(txn)
    put(FLOWS.retained + tuples.pack((5, 99)), b"")(txn)
    put(FLOWS.children + tuples.pack((2, 1)), b"")(txn)


def change_heads_of_flows(txn: Txn) -> None:
    edit_head(damage.RAISING, failures=0, error_type="KeyError")(txn)
    edit_head(damage.DONE, records=1, ended_ns=5)(txn)


def lose_indexes_of_schedules(txn: Txn) -> None:
    for prefix in (SCHEDULES.due, SCHEDULES.queue, SCHEDULES.keys):
        lose(prefix)(txn)


def add_stray_rows_of_schedules(txn: Txn) -> None:
    put(SCHEDULES.due_row(5, "daily"), b"")(txn)
    put(SCHEDULES.queued("daily", 5), b"")(txn)
    put(SCHEDULES.keys + tuples.pack(("daily-2",)), codec.pack(["daily", b""]))(txn)


def change_counter_of_schedule(txn: Txn) -> None:
    def edited(row: bytes) -> bytes:
        return codec.pack(replace(decode_schedule(row), queued=7))

    edit(SCHEDULES.schedules, edited)(txn)


@pytest.mark.parametrize(
    "change",
    [
        lose_indexes_of_flows,
        add_stray_rows_of_flows,
        change_heads_of_flows,
        lose_indexes_of_schedules,
        add_stray_rows_of_schedules,
        change_counter_of_schedule,
    ],
    ids=lambda one: one.__name__,
)
def test_store_rebuild_restores_rows_of_flows_and_schedules(
    run: RunCommand, used_store: Path, change: Callable[[Txn], None]
) -> None:
    before = stored_rows(used_store)
    damage_store(used_store, change)
    assert verify_exit_code(run, used_store) == 1
    result = run("store", "rebuild", "--universe", UNIVERSE, "--store", used_store, "--json")
    assert result.code == 0, result.err
    assert result.document["written"]
    assert stored_rows(used_store) == before
    assert verify_exit_code(run, used_store) == 0


def remove_index_of_names(txn: Txn) -> None:
    txn.delete(name_index.mark_key(UNIVERSE))
    prefix = name_index.prefix_of(UNIVERSE)
    for key, _ in txn.scan(prefix, tuples.prefix_end(prefix)):
        txn.delete(key)


def test_store_rebuild_lists_flows_of_an_older_version_by_name(
    run: RunCommand, used_store: Path
) -> None:
    before = stored_rows(used_store)
    damage_store(used_store, remove_index_of_names)
    assert verify_exit_code(run, used_store) == 0
    result = run("store", "rebuild", "--universe", UNIVERSE, "--store", used_store)
    assert result.code == 0, result.err
    assert "rows were written; all rows match their logs" in result.out
    assert stored_rows(used_store) == before


@pytest.mark.parametrize(
    ("loss", "error"),
    [
        ("last record lost", "log_broken"),
        ("record of a former run lost", "log_broken"),
        ("head lost", "not_rebuilt"),
        ("event lost", "not_rebuilt"),
    ],
)
def test_store_rebuild_with_lost_records_of_flows_writes_nothing(
    run: RunCommand, used_store: Path, loss: str, error: str
) -> None:
    damage_store(used_store, SOURCES[loss][0])
    damage_store(used_store, lose_indexes_of_schedules)
    before = stored_rows(used_store)
    result = run("store", "rebuild", "--universe", UNIVERSE, "--store", used_store)
    assert (result.code, result.error.partition(":")[0]) == (1, error)
    assert stored_rows(used_store) == before
