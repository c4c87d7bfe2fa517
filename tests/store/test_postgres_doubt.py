"""Commits whose answer was lost: they happened once, or never will."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from holdfast.errors import CommitUnknown, HoldfastError, Invalid
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.store.engine import Request
from holdfast.store.pg import engine as engines
from holdfast.store.pg import server
from holdfast.store.pg.engine import PgEngine
from holdfast.store.postgres import PostgresStore
from tests.pgcluster import Cluster
from tests.postgres import fresh_url
from tests.process.watch import until

pytestmark = pytest.mark.timeout(60)

Send = Callable[..., int]
# Of sessions that wait for a standby.
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
CANCEL = "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


@pytest.fixture
def store() -> Iterator[PostgresStore]:
    with PostgresStore(fresh_url()) as opened:
        opened.transact(_grow)
        yield opened


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("happened", [True, False])
def test_a_commit_whose_answer_is_lost_happened_once_or_not_at_all(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch, happened: bool, at_once: bool
) -> None:
    if at_once:
        _be_alone(store)
    grown = store.read(_grown)
    _lose_answers(monkeypatch, 1, happened=happened)
    assert store.transact(_grow) == grown + 1
    assert store.read(_grown) == grown + 1
    assert store.counters.doubts == 1


def test_answers_lost_several_times_in_a_row_change_nothing(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _lose_answers(monkeypatch, 3, happened=False)
    assert [store.transact(_grow) for _ in range(3)] == [2, 3, 4]
    assert store.read(_grown) == 4


def test_a_commit_that_arrives_after_it_was_looked_for_does_not_happen(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network may hold back what was sent at once, and deliver it when nobody expects it any more."""
    _be_alone(store)
    late: list[tuple[Any, ...]] = []
    whole = PgEngine._send

    def held_back(self: PgEngine, connection: Any, values: Any, at_once: bool) -> int:
        if not late:
            late.append(values)
            connection.close()
            raise psycopg.OperationalError("cut")
        if len(late) == 1:
            # Those who retry find nothing else to do: the number alone must keep the late one away.
            late.append(())
            raise psycopg.errors.QueryCanceled("not now")
        return whole(self, connection, values, at_once)

    monkeypatch.setattr(PgEngine, "_send", held_back)
    with pytest.raises(HoldfastError):
        store.transact(_grow)
    grown = store.read(_grown)
    with psycopg.connect(store.address, autocommit=True) as other:
        assert other.execute(engines._APPLY, late[0], binary=True).fetchall() == [(None,)]
    assert store.read(_grown) == grown
    assert store.transact(_grow) == grown + 1


def test_of_a_broken_batch_nothing_is_done_twice_when_an_answer_is_lost(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _lose_answers(monkeypatch, 1, happened=True)
    broken = Request(2, b"c", 0, adds={b"k": 1}, topics=["t\ud800"])
    requests = [
        Request(1, b"c", 0, adds={b"n": 1}),
        broken,
        Request(3, b"c", 0, adds={b"n": 1}),
    ]
    answers = store._engine.commit(requests)
    assert [answer.error and answer.error[0] for answer in answers] == [None, Invalid.code, None]
    assert store.read(lambda txn: txn.count(b"n")) == 2


def test_a_request_that_breaks_fails_alone(store: PostgresStore) -> None:
    requests = [Request(n, b"c", 0, adds={b"n": 1}) for n in range(5)]
    requests[2].adds = {b"n": 1 << 80}
    commits = store.counters.commits
    answers = store._engine.commit(requests)
    assert [answer.error is None for answer in answers] == [True, True, False, True, True]
    assert store.read(lambda txn: txn.count(b"n")) == 4
    assert store.counters.commits == commits + 1


@pytest.mark.parametrize("at_once", [True, False])
def test_a_topic_that_cannot_be_sent_fails_alone_and_holds_no_lock(
    store: PostgresStore, at_once: bool
) -> None:
    if at_once:
        _be_alone(store)
    requests = [Request(n, b"c", 0, adds={b"n": 1}, topics=["t"]) for n in range(5)]
    requests[2].topics = ["t\ud800"]
    answers = store._engine.commit(requests)
    assert [answer.error is None for answer in answers] == [True, True, False, True, True]
    assert store.read(lambda txn: txn.count(b"n")) == 4


def test_who_cannot_find_out_says_so(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "AWAY_S", 0.0)
    _lose_answers(monkeypatch, 1, happened=True)
    with pytest.raises(CommitUnknown):
        store.transact(_grow)
    assert store.read(_grown) == 2
    assert store.transact(_grow) == 3


def test_a_record_that_is_gone_already_leaves_it_unknown(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgotten() -> None:
        with psycopg.connect(store.address, autocommit=True) as other:
            other.execute("UPDATE holdfast_commit SET no = no + 1000")

    _lose_answers(monkeypatch, 1, happened=True, then=forgotten)
    with pytest.raises(CommitUnknown):
        store.transact(_grow)


def test_a_session_that_was_left_behind_with_the_lock_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The network was cut: the server does not know, and would wait for the rest of the transaction."""
    monkeypatch.setattr(server, "IDLE_S", 3600)
    monkeypatch.setattr(server, "LOCK_S", 3600)
    with PostgresStore(fresh_url()) as store:
        connection = store._engine._connect()
        store._engine._enter(connection)
        store._engine._connection = None
        assert store.transact(_grow) == 1
        connection.close()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_commit_whose_wait_for_the_standby_is_cancelled_is_not_acknowledged_before_it_is_there(
    at_once: bool,
) -> None:
    """The server says so by a warning; the one who looks is cancelled as well. Then it need not wait."""
    with Cluster(standby=False) as cluster, PostgresStore(cluster.primary.conninfo()) as store:
        store.transact(_grow)
        if at_once:
            _be_alone(store)
        grown, retries = store.read(_grown), store.retries
        cluster.primary.settle(synchronous_standby_names="nobody")
        _await_waiting(cluster)
        done: list[object] = []
        asked = threading.Thread(target=lambda: done.append(store.transact(_grow)), daemon=True)
        asked.start()
        try:
            for times in (1, 2):
                until(lambda: cluster.primary.ask(WAITING), "a commit that waits")
                cluster.primary.ask(CANCEL)
                until(lambda times=times: done or store.retries >= retries + times, "its look")
            until(lambda: done or cluster.primary.ask(WAITING), "another wait")
            assert done == []
        finally:
            cluster.primary.settle(synchronous_standby_names="")
            asked.join(30)
        assert done == [grown + 1]
        assert store.read(_grown) == grown + 1


def test_a_warning_of_something_else_is_no_doubt(store: PostgresStore) -> None:
    with psycopg.connect(store.address, autocommit=True) as other:
        other.execute(
            "CREATE FUNCTION warn() RETURNS trigger LANGUAGE plpgsql "
            "AS $$ BEGIN RAISE WARNING 'mind'; RETURN NEW; END $$"
        )
        other.execute(
            "CREATE TRIGGER warn AFTER INSERT ON holdfast_commit FOR EACH ROW EXECUTE FUNCTION warn()"
        )
    assert store.transact(_grow) == 2
    assert store.counters.doubts == 0


def _lose_answers(
    monkeypatch: pytest.MonkeyPatch,
    times: int,
    *,
    happened: bool,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Cut the connection before or after a commit, so many times."""
    whole = PgEngine._send
    left = iter(range(times))

    def cut(self: PgEngine, connection: Any, values: Any, at_once: bool) -> int:
        if next(left, None) is None:
            return whole(self, connection, values, at_once)
        if happened:
            whole(self, connection, values, at_once)
        connection.close()
        then()
        raise psycopg.OperationalError("cut")

    monkeypatch.setattr(PgEngine, "_send", cut)


def _await_waiting(cluster: Cluster) -> None:
    """A setting takes hold a little after it was made: until then no commit waits for a standby."""
    with cluster.primary.admin() as probe:

        def waits() -> bool:
            trying = threading.Thread(
                target=lambda: probe.execute("COMMENT ON SCHEMA public IS 'a commit'"), daemon=True
            )
            trying.start()
            until(lambda: not trying.is_alive() or cluster.primary.ask(WAITING), "its end")
            waited = trying.is_alive()
            cluster.primary.ask(CANCEL)
            trying.join(30)
            return waited

        until(waits, "that commits wait")


def _be_alone(store: PostgresStore) -> None:
    while not store.counters.at_once:
        store.transact(_grow)


def _grow(txn: Txn) -> object:
    return txn.append(b"k", b"")


def _grown(txn: Txn) -> int:
    return len(txn.scan(b"k", tuples.after(b"k")))
