"""Clock leaps at boot: the store refuses a leap of store time beyond a bound and warns of a long one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import lmdb
import pytest

from holdfast import codec
from holdfast import store as stores
from holdfast.clock import S, SimClock
from holdfast.config import MAP_BYTES, WriterLimits
from holdfast.errors import Invalid, StoreTimeLeap
from holdfast.store import clock_leap, schema
from holdfast.store.engine import StoreEngine
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend
from holdfast.store.requests import CommitRequest
from holdfast.workers.readiness import ReadinessReason
from holdfast.workers.readiness_facts import read_readiness
from tests.process.refusal_checks import refused, untouched
from tests.process.watch import assert_no_process_left

MODULES = ("holdfast.store.clock_leap",)

DAY_NS = 24 * 3600 * S
LIMITS = WriterLimits(idle_exit_s=0.2, reader_check_s=0.2)


def engine_with_commit(backend: MemoryBackend, clock: SimClock) -> StoreEngine:
    engine = StoreEngine(backend, clock)
    [answer] = engine.commit(
        [CommitRequest(1, b"client", backend.last_id(), puts={b"\x02a": b"1"})]
    )
    assert answer.error is None
    return engine


@pytest.mark.parametrize("days", [3653, 367])
def test_clock_far_ahead_after_a_boot_raises_store_time_leap(days: int) -> None:
    backend, clock = MemoryBackend(), SimClock()
    before_ns = engine_with_commit(backend, clock).now_ns()
    clock.reboot()
    clock.step_wall(days * DAY_NS)
    rows = dict(backend.rows)
    with refused(StoreTimeLeap, says=clock_leap.TRUSTED_UNTIL_VARIABLE):
        StoreEngine(backend, clock)
    assert backend.rows == rows
    clock.step_wall(-days * DAY_NS)
    assert 0 < StoreEngine(backend, clock).now_ns() - before_ns < DAY_NS


def test_wall_clock_step_within_a_boot_does_not_move_store_time() -> None:
    backend, clock = MemoryBackend(), SimClock()
    before_ns = engine_with_commit(backend, clock).now_ns()
    clock.step_wall(3653 * DAY_NS)
    assert 0 <= StoreEngine(backend, clock).now_ns() - before_ns < DAY_NS


@pytest.mark.parametrize(
    ("days", "says"),
    [(0, ""), (29, ""), (31, "31 days ahead"), (365, "365 days ahead"), (-3, "days behind")],
)
def test_readiness_warns_of_a_long_clock_leap_until_the_next_boot(days: int, says: str) -> None:
    backend, clock = MemoryBackend(), SimClock()
    engine_with_commit(backend, clock)
    clock.reboot()
    clock.step_wall(days * DAY_NS)
    for _ in range(2):
        store = InProcessStore("memory:", backend, clock)
        store.transact(lambda txn: txn.put(("b",), b"1"))
        texts = [
            one.text
            for one in read_readiness(store, "u").warnings
            if one.reason is ReadinessReason.STORE_TIME
        ]
        assert [says in one for one in texts] == ([True] if says else [])
    clock.reboot()
    if days > 0:
        again = read_readiness(InProcessStore("memory:", backend, clock), "u")
        assert ReadinessReason.STORE_TIME not in {one.reason for one in again.warnings}


def age_store(home: Path, days: int) -> None:
    """Move the times in the store back by `days` and set an earlier boot id."""
    env = lmdb.open(str(home), map_size=MAP_BYTES)
    with env.begin(write=True) as txn:
        rows = [(bytes(key), bytes(value)) for key, value in txn.cursor()]
        for key, value in rows:
            if key.startswith(schema.OUTCOME):
                fields = codec.unpack(value)
                fields[2] -= days * DAY_NS
                txn.put(key, codec.pack(fields))
            elif key == schema.META_KEY:
                meta = codec.unpack_as(schema.StoreMeta, value)
                floor_ns = meta.floor_ns - days * DAY_NS
                fresh = schema.StoreMeta(meta.store_id, meta.generation, "earlier", 0, floor_ns)
                txn.put(key, codec.pack(fresh))
    env.close()


def test_embedded_store_opens_after_a_clock_leap_only_with_a_trusted_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "store"
    with stores.open(home, limits=LIMITS) as store:
        store.transact(lambda txn: txn.put(("a",), b"1"))
    assert_no_process_left(home, LIMITS.idle_exit_s)
    age_store(home, 3653)
    with untouched(home), refused(StoreTimeLeap, says="days=3653"):
        stores.open(home, limits=LIMITS)
    monkeypatch.setenv(clock_leap.TRUSTED_UNTIL_VARIABLE, "2020-01-01")
    with untouched(home), refused(StoreTimeLeap):
        stores.open(home, limits=LIMITS)
    monkeypatch.setenv(clock_leap.TRUSTED_UNTIL_VARIABLE, "soon")
    with untouched(home), refused(Invalid, says=clock_leap.TRUSTED_UNTIL_VARIABLE):
        stores.open(home, limits=LIMITS)
    tomorrow = datetime.now(UTC) + timedelta(days=2)
    monkeypatch.setenv(clock_leap.TRUSTED_UNTIL_VARIABLE, tomorrow.date().isoformat())
    with stores.open(home, limits=LIMITS) as store:
        assert store.read(lambda txn: txn.get(("a",))) == b"1"
        store.transact(lambda txn: txn.put(("a",), b"2"))
    assert_no_process_left(home, LIMITS.idle_exit_s)
    monkeypatch.delenv(clock_leap.TRUSTED_UNTIL_VARIABLE)
    with stores.open(home, limits=LIMITS) as store:
        assert store.read(lambda txn: txn.get(("a",))) == b"2"
    assert_no_process_left(home, LIMITS.idle_exit_s)
