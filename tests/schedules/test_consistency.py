"""Verification of the rows of schedules: a change of each kind of row is found and named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast import codec
from holdfast.clock import SimClock
from holdfast.flows.model import keys_of as flow_keys_of
from holdfast.ops import index_rebuild
from holdfast.schedules import consistency
from holdfast.schedules.model import (
    ScheduleRow,
    decode_occurrence,
    decode_schedule,
    keys_of,
)
from holdfast.schedules.states import OccurrenceState
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend
from tests.flows.damage import Change, edit, lose, put
from tests.schedules.rig import ScheduleRig

MODULES = ("holdfast.schedules.consistency", "holdfast.ops.index_rebuild")
UNIVERSE = "flows"
KEYS = keys_of(UNIVERSE)


@hf.flow
async def tidy() -> None:
    await hf.sleep(86_400)


app = hf.App(UNIVERSE, flows=[tidy])


@pytest.fixture
def rig() -> Iterator[ScheduleRig]:
    """A schedule whose first occurrence runs and whose second one is queued."""
    clock = SimClock()
    with InProcessStore("memory:", MemoryBackend(), clock) as store:
        rig = ScheduleRig(store, clock, app)
        rig.create("daily", tidy, overlap="queue", key="daily-1")
        rig.pass_until("2026-11-13T09:21:00")
        assert differences(rig) == []
        yield rig
        rig.flows.threads.shutdown(wait=True)


def differences(rig: ScheduleRig) -> list[Any]:
    found: list[Any] = rig.store.read(lambda txn: list(consistency.find_differences(txn, UNIVERSE)))
    return found


def edit_schedule(**fields: Any) -> Change:
    def edited(row: bytes) -> bytes:
        stored: ScheduleRow = decode_schedule(row)
        return codec.pack(replace(stored, **fields))

    return edit(KEYS.schedules, edited)


def edit_occurrence(**fields: Any) -> Change:
    return edit(KEYS.occurrences, lambda row: codec.pack(replace(decode_occurrence(row), **fields)))


def end_flow(txn: Txn) -> None:
    """The flow of the last occurrence is gone, so nothing starts the queued one."""
    lose(flow_keys_of(UNIVERSE).heads)(txn)


DERIVED: dict[str, tuple[Change, str]] = {
    "due row lost": (lose(KEYS.due), "due at"),
    "due row of another time": (put(KEYS.due_row(5, "daily"), b""), "due at 5"),
    "due row of no schedule": (put(KEYS.due_row(5, "none"), b""), "due at 5"),
    "queue row lost": (lose(KEYS.queue), "queue at"),
    "queue row of no occurrence": (put(KEYS.queued("daily", 5), b""), "queue at 5"),
    "number of queued occurrences": (edit_schedule(queued=7), "queued occurrences"),
    "key lost": (lose(KEYS.keys), "key"),
    "key of no schedule": (
        put(KEYS.keys + tuples.pack(("other",)), codec.pack(["daily", b""])),
        "key",
    ),
}
SOURCES: dict[str, tuple[Change, str]] = {
    "name of a schedule": (
        lambda txn: txn.put(KEYS.schedule("other"), txn.get(KEYS.schedule("daily")) or b""),
        "name",
    ),
    "occurrence lost": (lose(KEYS.occurrences), "last occurrence"),
    "occurrence without a decision": (edit_occurrence(state=OccurrenceState.DUE), "occurrence"),
    "occurrence without its flow": (edit_occurrence(seq=0), "occurrence"),
    "occurrence of another flow": (edit_occurrence(seq=9), "last occurrence"),
    "flow of the last occurrence": (end_flow, "the task or flow that the queue waits for"),
    "change lost": (lose(KEYS.changes), "change 1"),
}


@pytest.mark.parametrize("name", DERIVED | SOURCES)
def test_verify_names_a_changed_row_of_a_schedule(rig: ScheduleRig, name: str) -> None:
    change, what = (DERIVED | SOURCES)[name]
    rig.store.transact(change)
    found = differences(rig)
    assert any(difference.what.startswith(what) for difference in found)
    assert all(difference.kind == "schedule" for difference in found)


@pytest.mark.parametrize("name", DERIVED)
def test_rebuild_restores_each_row_of_a_schedule_that_follows_from_others(
    rig: ScheduleRig, name: str
) -> None:
    before = rows_of(rig)
    rig.store.transact(DERIVED[name][0])
    assert rows_of(rig) != before
    rig.store.transact(index_rebuild.rebuild_schedules, UNIVERSE)
    assert rows_of(rig) == before


def rows_of(rig: ScheduleRig) -> list[Any]:
    prefix = schema.key_prefix(schema.Space.SCHEDULE, UNIVERSE)
    return list(rig.store.read(lambda txn: txn.scan(prefix, tuples.prefix_end(prefix))))
