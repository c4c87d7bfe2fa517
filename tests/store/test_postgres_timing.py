"""Store time on PostgreSQL when clocks are set: it neither freezes nor leaps, and processes agree on it."""

from __future__ import annotations

from urllib.parse import quote

import psycopg
import pytest
from psycopg import sql

from holdfast.clock import MS, S
from holdfast.store import api
from holdfast.store.api import Txn, operation
from holdfast.store.pg.timing import FASTER, STEP_NS, Timing
from holdfast.store.places import source
from holdfast.store.postgres import PostgresStore
from tests.postgres import fresh_url

pytestmark = pytest.mark.timeout(60)

HOUR = 3600 * S
# Longer than any test takes, and shorter than any step of a clock in them.
LONG = 600 * S


class Heard:
    """A process that asks a server for the time; both clocks are ours to set."""

    def __init__(self) -> None:
        self.timing = Timing()
        self.server_ns = 1_000 * HOUR
        self.boot_ns = 5 * S
        self.floor_ns = 0
        self.timing.start(self.server_ns, self.boot_ns, floor_ns=0, ahead_ns=0)

    @property
    def now_ns(self) -> int:
        return self.boot_ns + self.timing.offset_ns

    def after(self, ns: int, *, set_ns: int = 0, took_ns: int = 1 * MS) -> int:
        """Ask after that long, the clock having been set meanwhile: by how much store time moved."""
        before_ns = self.now_ns
        self.boot_ns += ns
        self.server_ns += ns + set_ns
        self.timing.hear(
            self.server_ns, self.boot_ns - took_ns, self.boot_ns, floor_ns=self.floor_ns
        )
        return self.now_ns - before_ns


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.mark.parametrize("step_ns", [HOUR, -HOUR, 1 * S, -1 * S, 1000 * HOUR])
def test_a_clock_that_is_set_moves_store_time_by_what_has_passed(
    heard: Heard, step_ns: int
) -> None:
    assert abs(heard.after(1 * S, set_ns=step_ns) - 1 * S) <= 2 * MS


@pytest.mark.parametrize("step_ns", [HOUR, -HOUR])
def test_a_clock_that_is_set_right_again_changes_nothing(heard: Heard, step_ns: int) -> None:
    first_ns = heard.now_ns
    heard.after(1 * S, set_ns=step_ns)
    heard.after(1 * S, set_ns=-step_ns)
    assert abs(heard.now_ns - first_ns - 2 * S) <= S // FASTER + 2 * MS
    assert abs(heard.timing.lead_ns) <= S // FASTER + 2 * MS


def test_steps_one_after_the_other_add_up_to_no_leap(heard: Heard) -> None:
    first_ns = heard.now_ns
    for step_ns in (HOUR, -3 * HOUR, 5 * HOUR, -1 * S, 2 * S, -3 * HOUR):
        heard.after(1 * S, set_ns=step_ns)
    assert abs(heard.now_ns - first_ns - 6 * S) <= 6 * (S // FASTER) + 2 * MS


def test_what_two_clocks_drift_apart_is_followed(heard: Heard) -> None:
    """Over a night without a commit, too."""
    night = 8 * HOUR
    drift_ns = night // 5_000
    assert drift_ns > STEP_NS
    assert heard.after(night, set_ns=drift_ns) == night + drift_ns
    assert heard.timing.lead_ns == 0


def test_a_clock_that_was_set_forward_is_caught_up_with_slowly(heard: Heard) -> None:
    heard.after(1 * S, set_ns=1 * S)
    rates = [heard.after(1 * S) for _ in range(2 * FASTER)]
    assert all(1 * S - 2 * MS <= moved <= 1 * S + S // FASTER + 2 * MS for moved in rates)
    assert abs(heard.now_ns - heard.server_ns) <= STEP_NS


def test_a_long_silence_makes_up_for_no_more_than_a_short_one(heard: Heard) -> None:
    heard.after(1 * S, set_ns=HOUR)
    assert heard.after(HOUR) <= HOUR + 1 * S


def test_others_commits_are_believed_over_our_own_clock(heard: Heard) -> None:
    """Our machine was halted for an hour, and its clock with it."""
    heard.floor_ns = heard.now_ns + HOUR
    heard.after(1 * MS, set_ns=HOUR)
    assert heard.now_ns >= heard.floor_ns
    assert abs(heard.timing.lead_ns) <= STEP_NS


# -- stores ------------------------------------------------------------------------------------------


@pytest.fixture
def url() -> str:
    """Of a database whose server has a clock that can be set."""
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
def test_a_server_whose_clock_is_set_makes_nothing_expire(
    url: str, steps: tuple[str, ...], alone: bool
) -> None:
    with PostgresStore(url) as store:
        first_ns = store.transact(_now)
        while alone and not store.counters.at_once:
            store.transact(_now)
        for step in steps:
            _set(url, step)
            times = [store.transact(_now) for _ in range(5)]
            assert times == sorted(times)
            assert first_ns < times[-1] < first_ns + LONG
            assert first_ns < store.now_ns() < first_ns + LONG


def test_who_opens_a_store_later_goes_by_the_time_of_those_who_have_it(url: str) -> None:
    with PostgresStore(url) as one:
        first_ns = one.transact(_now)
        _set(url, "1 hour")
        one.transact(_now)
        with PostgresStore(url) as other:
            assert first_ns < other.transact(_now) < first_ns + LONG
        assert first_ns < one.transact(_now) < first_ns + LONG


def test_who_opens_a_store_when_the_clock_is_right_again_goes_by_it(url: str) -> None:
    with PostgresStore(url) as store:
        first_ns = store.transact(_now)
        for step in ("1 hour", "0"):
            _set(url, step)
            store.transact(_now)
            store.transact(_now)
    with PostgresStore(url) as store:
        assert first_ns < store.transact(_now) < first_ns + LONG
        assert store._engine._timing.ahead_ns < S


def test_a_clock_that_was_set_back_and_right_while_nobody_was_there_is_forgotten(url: str) -> None:
    with PostgresStore(url) as store:
        first_ns = store.transact(_now)
    for step in ("-1 hour", "0"):
        _set(url, step)
        with PostgresStore(url) as store:
            assert first_ns < store.transact(_now) < first_ns + LONG


def test_the_difference_is_written_once_and_not_with_every_commit(url: str) -> None:
    with PostgresStore(url) as store:
        store.transact(_now)
        _set(url, "1 hour")
        for _ in range(5):
            store.transact(_now)
        was = store._engine._meta
        assert was.offset_ns > 3000 * S
        store.transact(_now)
        assert store._engine._meta is was


def test_a_store_that_is_moved_takes_its_time_along(url: str) -> None:
    with PostgresStore(url) as store:
        first_ns = store.transact(_now)
        _set(url, "1 hour")
        store.transact(_now)
        store.transact(_now)
    held = source(url, patience_s=30.0)
    try:
        assert first_ns < held.now_ns() < first_ns + LONG
    finally:
        held.close()


def _set(url: str, to: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("UPDATE skew SET by = {}").format(sql.Literal(to)))


def _now_at_commit(txn: Txn) -> int:
    txn.put(b"touched", b"")
    return txn.now_ns


_now = operation(_now_at_commit)
_now.name = "holdfast.store.pg.testing:now"


@pytest.fixture(autouse=True)
def _operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(api._resolved, _now.name, _now)
