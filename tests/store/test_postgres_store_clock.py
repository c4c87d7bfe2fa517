"""StoreClock on PostgreSQL: store time neither freezes nor leaps at clock steps, and processes agree on it."""

from __future__ import annotations

from urllib.parse import quote

import psycopg
import pytest
from psycopg import sql

from holdfast.clock import MS, S
from holdfast.store import api
from holdfast.store.admin.raw_access import open_source
from holdfast.store.api import Txn, operation
from holdfast.store.postgres.store import PostgresStore
from holdfast.store.postgres.store_clock import CATCH_UP_DIVISOR, STEP_NS, StoreClock
from tests.postgres import fresh_url

pytestmark = pytest.mark.timeout(60)

HOUR = 3600 * S
# Longer than any test takes, and shorter than any clock step of a store test.
LONG = 600 * S


class ClockRig:
    """A StoreClock with a simulated server clock and a simulated boot clock."""

    def __init__(self) -> None:
        self.store_clock = StoreClock()
        self.server_ns = 1_000 * HOUR
        self.boot_ns = 5 * S
        self.floor_ns = 0
        self.store_clock.start(self.server_ns, self.boot_ns, floor_ns=0, ahead_ns=0)

    @property
    def now_ns(self) -> int:
        return self.boot_ns + self.store_clock.offset_ns

    def advance(self, ns: int, *, set_ns: int = 0, took_ns: int = 1 * MS) -> int:
        """Advance the server clock and the boot clock by `ns`, and step the server clock by `set_ns`.

        The store clock observes both. Return how far store time moved.
        """
        before_ns = self.now_ns
        self.boot_ns += ns
        self.server_ns += ns + set_ns
        self.store_clock.observe(
            self.server_ns, self.boot_ns - took_ns, self.boot_ns, floor_ns=self.floor_ns
        )
        return self.now_ns - before_ns


@pytest.fixture
def clock_rig() -> ClockRig:
    return ClockRig()


@pytest.mark.parametrize("step_ns", [HOUR, -HOUR, 1 * S, -1 * S, 1000 * HOUR])
def test_server_clock_step_does_not_step_store_time(clock_rig: ClockRig, step_ns: int) -> None:
    assert abs(clock_rig.advance(1 * S, set_ns=step_ns) - 1 * S) <= 2 * MS


@pytest.mark.parametrize("step_ns", [HOUR, -HOUR])
def test_reverted_server_clock_step_does_not_move_store_time(
    clock_rig: ClockRig, step_ns: int
) -> None:
    first_ns = clock_rig.now_ns
    clock_rig.advance(1 * S, set_ns=step_ns)
    clock_rig.advance(1 * S, set_ns=-step_ns)
    assert abs(clock_rig.now_ns - first_ns - 2 * S) <= S // CATCH_UP_DIVISOR + 2 * MS
    assert abs(clock_rig.store_clock.lead_ns) <= S // CATCH_UP_DIVISOR + 2 * MS


def test_several_server_clock_steps_do_not_move_store_time(clock_rig: ClockRig) -> None:
    first_ns = clock_rig.now_ns
    for step_ns in (HOUR, -3 * HOUR, 5 * HOUR, -1 * S, 2 * S, -3 * HOUR):
        clock_rig.advance(1 * S, set_ns=step_ns)
    assert abs(clock_rig.now_ns - first_ns - 6 * S) <= 6 * (S // CATCH_UP_DIVISOR) + 2 * MS


def test_store_clock_follows_clock_drift(clock_rig: ClockRig) -> None:
    """The drift of eight hours without a commit is corrected at once."""
    night = 8 * HOUR
    drift_ns = night // 5_000
    assert drift_ns > STEP_NS
    assert clock_rig.advance(night, set_ns=drift_ns) == night + drift_ns
    assert clock_rig.store_clock.lead_ns == 0


def test_store_clock_catches_up_with_a_forward_step_slowly(clock_rig: ClockRig) -> None:
    clock_rig.advance(1 * S, set_ns=1 * S)
    rates = [clock_rig.advance(1 * S) for _ in range(2 * CATCH_UP_DIVISOR)]
    assert all(1 * S - 2 * MS <= moved <= 1 * S + S // CATCH_UP_DIVISOR + 2 * MS for moved in rates)
    assert abs(clock_rig.now_ns - clock_rig.server_ns) <= STEP_NS


def test_catch_up_of_the_store_clock_is_bounded_after_a_long_pause(clock_rig: ClockRig) -> None:
    clock_rig.advance(1 * S, set_ns=HOUR)
    assert clock_rig.advance(HOUR) <= HOUR + 1 * S


def test_store_time_is_not_before_commits_of_other_processes(clock_rig: ClockRig) -> None:
    """The client machine was halted for an hour, and its boot clock with it."""
    clock_rig.floor_ns = clock_rig.now_ns + HOUR
    clock_rig.advance(1 * MS, set_ns=HOUR)
    assert clock_rig.now_ns >= clock_rig.floor_ns
    assert abs(clock_rig.store_clock.lead_ns) <= STEP_NS


# -- stores ------------------------------------------------------------------------------------------


@pytest.fixture
def url() -> str:
    """Return the URL of a database whose clock function can be set."""
    made = fresh_url()
    with psycopg.connect(made, autocommit=True) as connection:
        connection.execute("CREATE TABLE skew (by interval NOT NULL)")
        connection.execute("INSERT INTO skew VALUES ('0')")
        connection.execute(
            "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE "
            "AS 'SELECT pg_catalog.clock_timestamp() + by FROM public.skew'"
        )
    return f"{made}&options={quote('-c search_path=public,pg_catalog')}"


@pytest.mark.parametrize("steps", [("-1 hour", "0"), ("1 hour", "0"), ("1 hour",), ("-1 hour",)])
@pytest.mark.parametrize("alone", [True, False])
def test_server_clock_step_does_not_move_store_time_of_commits(
    url: str, steps: tuple[str, ...], alone: bool
) -> None:
    with PostgresStore(url) as store:
        first_ns = store.transact(_commit_time)
        while alone and not store.counters.optimistic:
            store.transact(_commit_time)
        for step in steps:
            _set_server_clock(url, step)
            times = [store.transact(_commit_time) for _ in range(5)]
            assert times == sorted(times)
            assert first_ns < times[-1] < first_ns + LONG
            assert first_ns < store.now_ns() < first_ns + LONG


def test_store_opened_after_a_clock_step_uses_the_existing_store_time(url: str) -> None:
    with PostgresStore(url) as one:
        first_ns = one.transact(_commit_time)
        _set_server_clock(url, "1 hour")
        one.transact(_commit_time)
        with PostgresStore(url) as other:
            assert first_ns < other.transact(_commit_time) < first_ns + LONG
        assert first_ns < one.transact(_commit_time) < first_ns + LONG


def test_store_opened_after_a_reverted_clock_step_follows_the_server_clock(url: str) -> None:
    with PostgresStore(url) as store:
        first_ns = store.transact(_commit_time)
        for step in ("1 hour", "0"):
            _set_server_clock(url, step)
            store.transact(_commit_time)
            store.transact(_commit_time)
    with PostgresStore(url) as store:
        assert first_ns < store.transact(_commit_time) < first_ns + LONG
        assert store._engine._store_clock.ahead_ns < S


def test_clock_step_reverted_between_opens_does_not_move_store_time(url: str) -> None:
    with PostgresStore(url) as store:
        first_ns = store.transact(_commit_time)
    for step in ("-1 hour", "0"):
        _set_server_clock(url, step)
        with PostgresStore(url) as store:
            assert first_ns < store.transact(_commit_time) < first_ns + LONG


def test_clock_offset_is_written_once_not_with_every_commit(url: str) -> None:
    with PostgresStore(url) as store:
        store.transact(_commit_time)
        _set_server_clock(url, "1 hour")
        for _ in range(5):
            store.transact(_commit_time)
        meta = store._engine._meta
        assert meta.offset_ns > 3000 * S
        store.transact(_commit_time)
        assert store._engine._meta is meta


def test_moved_store_keeps_its_store_time(url: str) -> None:
    with PostgresStore(url) as store:
        first_ns = store.transact(_commit_time)
        _set_server_clock(url, "1 hour")
        store.transact(_commit_time)
        store.transact(_commit_time)
    raw_store = open_source(url, lock_wait_s=30.0)
    try:
        assert first_ns < raw_store.now_ns() < first_ns + LONG
    finally:
        raw_store.close()


def _set_server_clock(url: str, to: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("UPDATE skew SET by = {}").format(sql.Literal(to)))


def _read_commit_time(txn: Txn) -> int:
    txn.put(b"touched", b"")
    return txn.now_ns


_commit_time = operation("testing.now")(_read_commit_time)


@pytest.fixture(autouse=True)
def _operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(api._operations, _commit_time.name, _commit_time)
