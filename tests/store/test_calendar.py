"""A wrong calendar at a boot: a leap of store time beyond a bound is refused, a long one is warned of."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import lmdb
import pytest

from holdfast import codec
from holdfast import store as stores
from holdfast.authority.readiness import Reason
from holdfast.clock import S, SimClock
from holdfast.config import MAP_BYTES, WriterLimits
from holdfast.errors import Invalid, StoreTimeLeap
from holdfast.roles.readiness import look
from holdfast.store import calendar, schema
from holdfast.store.engine import Engine, Request
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryBackend
from tests.process.refusals import refused, untouched
from tests.process.watch import assert_nobody_is_left

MODULES = ("holdfast.store.calendar",)

DAY_NS = 24 * 3600 * S
LIMITS = WriterLimits(linger_s=0.2, reader_check_s=0.2)


def committed(backend: MemoryBackend, clock: SimClock) -> Engine:
    engine = Engine(backend, clock)
    [answer] = engine.commit([Request(1, b"client", backend.last_id(), puts={b"\x02a": b"1"})])
    assert answer.error is None
    return engine


@pytest.mark.parametrize("days", [3653, 367])
def test_a_calendar_far_ahead_after_a_boot_is_refused_and_changes_nothing(days: int) -> None:
    backend, clock = MemoryBackend(), SimClock()
    before_ns = committed(backend, clock).now_ns()
    clock.reboot()
    clock.step_wall(days * DAY_NS)
    rows = dict(backend.rows)
    with refused(StoreTimeLeap, says=calendar.VARIABLE):
        Engine(backend, clock)
    assert backend.rows == rows
    clock.step_wall(-days * DAY_NS)
    assert 0 < Engine(backend, clock).now_ns() - before_ns < DAY_NS


def test_within_a_boot_the_calendar_changes_nothing() -> None:
    backend, clock = MemoryBackend(), SimClock()
    before_ns = committed(backend, clock).now_ns()
    clock.step_wall(3653 * DAY_NS)
    assert 0 <= Engine(backend, clock).now_ns() - before_ns < DAY_NS


@pytest.mark.parametrize(
    ("days", "says"),
    [(0, ""), (29, ""), (31, "31 days ahead"), (365, "365 days ahead"), (-3, "days behind")],
)
def test_ready_warns_of_a_long_leap_until_the_next_boot(days: int, says: str) -> None:
    backend, clock = MemoryBackend(), SimClock()
    committed(backend, clock)
    clock.reboot()
    clock.step_wall(days * DAY_NS)
    for _ in range(2):
        store = LocalStore("memory:", backend, clock)
        store.transact(lambda txn: txn.put(("b",), b"1"))
        told = [one.text for one in look(store, "u").warnings if one.reason is Reason.STORE_TIME]
        assert [says in one for one in told] == ([True] if says else [])
    clock.reboot()
    if days > 0:
        again = look(LocalStore("memory:", backend, clock), "u")
        assert Reason.STORE_TIME not in {one.reason for one in again.warnings}


def age(home: Path, days: int) -> None:
    """As if the last commit was so long ago, under an earlier boot."""
    env = lmdb.open(str(home), map_size=MAP_BYTES)
    with env.begin(write=True) as txn:
        rows = [(bytes(key), bytes(value)) for key, value in txn.cursor()]
        for key, value in rows:
            if key.startswith(schema.OUTCOME):
                fields = codec.unpack(value)
                fields[2] -= days * DAY_NS
                txn.put(key, codec.pack(fields))
            elif key == schema.META_KEY:
                meta = codec.unpack_as(schema.Meta, value)
                floor_ns = meta.floor_ns - days * DAY_NS
                fresh = schema.Meta(meta.store_id, meta.generation, "earlier", 0, floor_ns)
                txn.put(key, codec.pack(fresh))
    env.close()


def test_an_embedded_store_is_refused_untouched_and_opened_when_the_calendar_is_vouched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "store"
    with stores.open(home, limits=LIMITS) as store:
        store.transact(lambda txn: txn.put(("a",), b"1"))
    assert_nobody_is_left(home, LIMITS.linger_s)
    age(home, 3653)
    with untouched(home), refused(StoreTimeLeap, says="days=3653"):
        stores.open(home, limits=LIMITS)
    monkeypatch.setenv(calendar.VARIABLE, "2020-01-01")
    with untouched(home), refused(StoreTimeLeap):
        stores.open(home, limits=LIMITS)
    monkeypatch.setenv(calendar.VARIABLE, "soon")
    with untouched(home), refused(Invalid, says=calendar.VARIABLE):
        stores.open(home, limits=LIMITS)
    tomorrow = datetime.now(UTC) + timedelta(days=2)
    monkeypatch.setenv(calendar.VARIABLE, tomorrow.date().isoformat())
    with stores.open(home, limits=LIMITS) as store:
        assert store.read(lambda txn: txn.get(("a",))) == b"1"
        store.transact(lambda txn: txn.put(("a",), b"2"))
    assert_nobody_is_left(home, LIMITS.linger_s)
    monkeypatch.delenv(calendar.VARIABLE)
    with stores.open(home, limits=LIMITS) as store:
        assert store.read(lambda txn: txn.get(("a",))) == b"2"
    assert_nobody_is_left(home, LIMITS.linger_s)
