"""In-doubt commits: a commit whose answer was lost is applied once or never."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from holdfast import failpoints
from holdfast.errors import CommitUnknown, HoldfastError, Invalid
from holdfast.failpoints import Failpoint
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.store.postgres import engine as engines
from holdfast.store.postgres import server
from holdfast.store.postgres.store import PostgresStore
from holdfast.store.requests import CommitRequest
from tests.pgcluster import PostgresCluster
from tests.postgres import fresh_url
from tests.process.watch import until

pytestmark = pytest.mark.timeout(60)

Send = Callable[..., int]
# Sessions that wait for a synchronous standby.
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
CANCEL = "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


@pytest.fixture
def store() -> Iterator[PostgresStore]:
    with PostgresStore(fresh_url()) as opened:
        opened.transact(_append_row)
        yield opened


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("happened", [True, False])
def test_in_doubt_commit_is_applied_exactly_once(
    store: PostgresStore, happened: bool, at_once: bool
) -> None:
    if at_once:
        _commit_until_optimistic(store)
    grown = store.read(_count_rows)
    with _losing_answers(1, happened=happened):
        assert store.transact(_append_row) == grown + 1
    assert store.read(_count_rows) == grown + 1
    assert store.counters.resolved_in_doubt == 1


def test_in_doubt_commit_survives_several_lost_answers(store: PostgresStore) -> None:
    with _losing_answers(3, happened=False):
        assert [store.transact(_append_row) for _ in range(3)] == [2, 3, 4]
    assert store.read(_count_rows) == 4


def test_commit_that_arrives_after_its_in_doubt_resolution_is_void(store: PostgresStore) -> None:
    """The network may deliver a delayed optimistic commit after the client resolved it as not committed."""
    _commit_until_optimistic(store)
    late: list[tuple[Any, ...]] = []

    def hold_back(connection: Any, values: Any, more: Any) -> None:
        late.append(values)
        if len(late) == 1:
            connection.close()
            raise psycopg.OperationalError("cut")
        # The retry fails, so only the void record with the commit number keeps the late commit out.
        raise psycopg.errors.QueryCanceled("not now")

    with (
        failpoints.on("postgres.send", calls=hold_back, times=2),
        pytest.raises(HoldfastError),
    ):
        store.transact(_append_row)
    grown = store.read(_count_rows)
    with psycopg.connect(store.address, autocommit=True) as other:
        assert other.execute(engines._APPLY, late[0], binary=True).fetchall() == [(None,)]
    assert store.read(_count_rows) == grown
    assert store.transact(_append_row) == grown + 1


def test_broken_batch_is_applied_once_when_an_answer_is_lost(store: PostgresStore) -> None:
    broken = CommitRequest(2, b"c", 0, adds={b"k": 1}, topics=["t\ud800"])
    requests = [
        CommitRequest(1, b"c", 0, adds={b"n": 1}),
        broken,
        CommitRequest(3, b"c", 0, adds={b"n": 1}),
    ]
    with _losing_answers(1, happened=True) as sent:
        answers = store._engine.commit(requests)
    assert sent.hits > 1
    assert [answer.error and answer.error[0] for answer in answers] == [None, Invalid.code, None]
    assert store.read(lambda txn: txn.count(b"n")) == 2


def test_request_that_raises_does_not_fail_its_batch(store: PostgresStore) -> None:
    requests = [CommitRequest(n, b"c", 0, adds={b"n": 1}) for n in range(5)]
    requests[2].adds = {b"n": 1 << 80}
    commits = store.counters.commits
    answers = store._engine.commit(requests)
    assert [answer.error is None for answer in answers] == [True, True, False, True, True]
    assert store.read(lambda txn: txn.count(b"n")) == 4
    assert store.counters.commits == commits + 1


@pytest.mark.parametrize("at_once", [True, False])
def test_unencodable_topic_fails_its_request_only_and_releases_the_lock(
    store: PostgresStore, at_once: bool
) -> None:
    if at_once:
        _commit_until_optimistic(store)
    requests = [CommitRequest(n, b"c", 0, adds={b"n": 1}, topics=["t"]) for n in range(5)]
    requests[2].topics = ["t\ud800"]
    answers = store._engine.commit(requests)
    assert [answer.error is None for answer in answers] == [True, True, False, True, True]
    assert store.read(lambda txn: txn.count(b"n")) == 4


def test_unresolved_in_doubt_commit_raises_commit_unknown(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "AWAY_S", 0.0)
    with _losing_answers(1, happened=True), pytest.raises(CommitUnknown):
        store.transact(_append_row)
    assert store.read(_count_rows) == 2
    assert store.transact(_append_row) == 3


def test_in_doubt_commit_without_its_record_raises_commit_unknown(store: PostgresStore) -> None:
    def remove_record() -> None:
        with psycopg.connect(store.address, autocommit=True) as other:
            other.execute("UPDATE holdfast_commit SET no = no + 1000")

    with (
        _losing_answers(1, happened=True, then=remove_record),
        pytest.raises(CommitUnknown),
    ):
        store.transact(_append_row)


def test_abandoned_session_with_the_commit_lock_is_terminated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The network was cut: the server keeps the session and waits for the rest of the transaction."""
    monkeypatch.setattr(server, "IDLE_S", 3600)
    monkeypatch.setattr(server, "LOCK_S", 3600)
    with PostgresStore(fresh_url()) as store:
        connection = store._engine._connect()
        store._engine._lock_and_sync(connection)
        store._engine._connection = None
        assert store.transact(_append_row) == 1
        connection.close()


@pytest.mark.parametrize("at_once", [True, False])
def test_commit_with_a_cancelled_standby_wait_is_not_acknowledged_early(
    at_once: bool,
) -> None:
    """The server sends a warning, and the wait of the in-doubt resolution is cancelled as well.

    The commit returns after the standby is no longer required.
    """
    with (
        PostgresCluster(standby=False) as cluster,
        PostgresStore(cluster.primary.conninfo()) as store,
    ):
        store.transact(_append_row)
        if at_once:
            _commit_until_optimistic(store)
        grown, retries = store.read(_count_rows), store.retries
        cluster.primary.change_settings(synchronous_standby_names="nobody")
        _await_standby_waits(cluster)
        done: list[object] = []
        committing = threading.Thread(
            target=lambda: done.append(store.transact(_append_row)), daemon=True
        )
        committing.start()
        try:
            for times in (1, 2):
                until(lambda: cluster.primary.query_value(WAITING), "a commit that waits")
                cluster.primary.query_value(CANCEL)
                until(lambda times=times: done or store.retries >= retries + times, "its look")
            until(lambda: done or cluster.primary.query_value(WAITING), "another wait")
            assert done == []
        finally:
            cluster.primary.change_settings(synchronous_standby_names="")
            committing.join(30)
        assert done == [grown + 1]
        assert store.read(_count_rows) == grown + 1


def test_unrelated_server_warning_does_not_put_a_commit_in_doubt(store: PostgresStore) -> None:
    with psycopg.connect(store.address, autocommit=True) as other:
        other.execute(
            "CREATE FUNCTION warn() RETURNS trigger LANGUAGE plpgsql "
            "AS $$ BEGIN RAISE WARNING 'mind'; RETURN NEW; END $$"
        )
        other.execute(
            "CREATE TRIGGER warn AFTER INSERT ON holdfast_commit FOR EACH ROW EXECUTE FUNCTION warn()"
        )
    assert store.transact(_append_row) == 2
    assert store.counters.resolved_in_doubt == 0


@contextmanager
def _losing_answers(
    times: int, *, happened: bool, then: Callable[[], None] = lambda: None
) -> Iterator[Failpoint]:
    """Close the connection before or after each of the first `times` commits."""

    def cut(connection: Any, *_: object) -> None:
        connection.close()
        then()
        raise psycopg.OperationalError("cut")

    place = "postgres.sent" if happened else "postgres.send"
    with failpoints.on(place, calls=cut, times=times) as point:
        yield point


def _await_standby_waits(cluster: PostgresCluster) -> None:
    """Wait until the reloaded setting is active and commits wait for a standby."""
    with cluster.primary.admin() as probe:

        def waits() -> bool:
            trying = threading.Thread(
                target=lambda: probe.execute("COMMENT ON SCHEMA public IS 'a commit'"), daemon=True
            )
            trying.start()
            until(lambda: not trying.is_alive() or cluster.primary.query_value(WAITING), "its end")
            waited = trying.is_alive()
            cluster.primary.query_value(CANCEL)
            trying.join(30)
            return waited

        until(waits, "that commits wait")


def _commit_until_optimistic(store: PostgresStore) -> None:
    while not store.counters.optimistic:
        store.transact(_append_row)


def _append_row(txn: Txn) -> object:
    return txn.append(b"k", b"")


def _count_rows(txn: Txn) -> int:
    return len(txn.scan(b"k", tuples.prefix_end(b"k")))
