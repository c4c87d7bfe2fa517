"""The PostgreSQL store and its server: restarts, time-outs, clocks, secrets, migrations, sizes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from psycopg import sql

from holdfast.clock import MS
from holdfast.config import VALUE_BYTES_MAX
from holdfast.errors import Busy, HoldfastError, SchemaMismatch, StoreForked
from holdfast.store.api import Txn, operation
from holdfast.store.pg import engine, known, migrations, server, topics
from holdfast.store.pg.server import Denied, Unreachable
from holdfast.store.postgres import PostgresStore
from tests.pgcluster import Cluster
from tests.postgres import admin, fresh_url
from tests.processes import python_proc

pytestmark = pytest.mark.timeout(90)

DEADLINE_S = 60.0


@pytest.fixture
def url() -> str:
    return fresh_url()


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    with PostgresStore(url) as opened:
        yield opened


# -- a server that comes and goes ------------------------------------------------------------------


def test_a_store_outlives_restarts_of_its_server() -> None:
    with (
        Cluster(standby=False) as cluster,
        PostgresStore(cluster.primary.conninfo()) as store,
    ):
        done: list[int] = []
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                done.append(store.transact(_grow))
                assert store.read(lambda txn: txn.get(b"k")) is None

        worker = threading.Thread(target=work)
        worker.start()
        for immediate in (False, True):
            _until_more(done)
            cluster.primary.stop(immediate=immediate)
            cluster.primary.start()
        _until_more(done)
        stop.set()
        worker.join(DEADLINE_S)
        assert done == list(range(1, len(done) + 1))
        assert store.retries > 0
        assert store._engine.away.since_ns == 0


def test_who_waits_for_a_topic_hears_it_after_a_restart() -> None:
    with (
        Cluster(standby=False) as cluster,
        PostgresStore(cluster.primary.conninfo()) as one,
        PostgresStore(cluster.primary.conninfo()) as other,
    ):
        since = one.wait("bell", 0, 0.0)
        cluster.primary.stop()
        cluster.primary.start()
        heard: list[int] = []
        waiting = threading.Thread(target=lambda: heard.append(one.wait("bell", since, DEADLINE_S)))
        waiting.start()
        other.transact(lambda txn: txn.notify("bell"))
        waiting.join(DEADLINE_S)
        assert heard[0] > since


def test_a_server_that_stays_away_is_named_with_the_time_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from holdfast.store import postgres

    monkeypatch.setattr(engine, "AWAY_S", 0.2)
    monkeypatch.setattr(postgres, "READER_S", 0.2)
    with (
        Cluster(standby=False) as cluster,
        PostgresStore(cluster.primary.conninfo()) as store,
    ):
        store.transact(_grow)
        cluster.primary.stop()
        before_ns = time.time_ns()
        with pytest.raises(Unreachable) as written:
            store.transact(_grow)
        with pytest.raises(Unreachable) as read:
            store.read(lambda txn: txn.get(b"k"))
        for raised in (written, read):
            assert before_ns <= raised.value.fields["since_ns"] <= time.time_ns()


# -- time-outs -------------------------------------------------------------------------------------


def test_a_commit_waits_for_the_lock_no_longer_than_it_may(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "LOCK_S", 1)
    with PostgresStore(url) as store, psycopg.connect(url) as other:
        other.execute("SELECT pg_advisory_xact_lock(%s::bigint)", (store._engine._lock,))
        with pytest.raises(Busy):
            store.transact(_grow)
        other.rollback()
        assert store.transact(_grow) == 1


def test_a_statement_takes_no_longer_than_it_may(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STATEMENT_S", 1)
    with PostgresStore(url) as store, psycopg.connect(url) as other:
        other.execute("LOCK TABLE holdfast_row IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(Busy):
            store.read(lambda txn: txn.get(b"k"))
        with pytest.raises(Busy):
            store.transact(lambda txn: txn.put(b"k", b""))
        other.rollback()
        store.transact(lambda txn: txn.put(b"k", b""))


def test_an_operation_that_dawdles_under_the_lock_loses_it_and_is_run_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "IDLE_S", 1)
    with PostgresStore(url) as store:
        connection = store._engine._connection
        assert connection is not None
        pid = connection.info.backend_pid
        _dawdling[:] = [lambda: _until(lambda: not _there(pid))]
        assert store.transact(_dawdle) == 1
        assert _dawdling == []
        assert store.read(lambda txn: txn.count(b"n")) == 1


# -- time ------------------------------------------------------------------------------------------


def test_store_time_goes_on_when_the_servers_clock_is_set_back(url: str) -> None:
    """Neither back nor frozen: leases expire as they would have."""
    _skew(url)
    with PostgresStore(_with_skew(url)) as store:
        before_ns = store.transact(_now)
        _set_back(url, "1 hour")
        after_ns = store.transact(_now)
        assert after_ns > before_ns
        _until(lambda: store.transact(_now) > after_ns + 20 * MS)
        with PostgresStore(_with_skew(url)) as other:
            assert other.transact(_now) > after_ns + 20 * MS


def test_store_time_is_never_before_the_last_commit_even_for_who_opens_later(url: str) -> None:
    _skew(url)
    with PostgresStore(_with_skew(url)) as store:
        before_ns = store.transact(_now)
    _set_back(url, "1 hour")
    with PostgresStore(_with_skew(url)) as store:
        assert store.now_ns() >= before_ns
        assert store.transact(_now) > before_ns


def test_a_commit_that_comes_too_late_for_its_time_is_applied_again(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process was stopped in between: leases may have run out meanwhile."""
    while not store.counters.at_once:
        store.transact(_grow)
    grown, trips = store.transact(_grow), store.counters.round_trips
    monkeypatch.setattr(engine, "LATE_US", -1_000_000)
    assert store.transact(_grow) == grown + 1
    assert store.counters.forestalled == 1
    assert store.counters.round_trips == trips + 3


def test_an_answer_that_took_long_does_not_hold_store_time_back(store: PostgresStore) -> None:
    now_ns = store.now_ns()
    boot_ns = store._engine._clock.boot_ns()
    store._engine._hear((now_ns - 10 * 10**9) // 1000, boot_ns - 11 * 10**9)
    assert store.now_ns() >= now_ns


# -- secrets ---------------------------------------------------------------------------------------


@pytest.fixture
def locked_url(url: str) -> Iterator[str]:
    """A role that must give its password, and owns the database."""
    with admin() as connection:
        connection.execute("DROP ROLE IF EXISTS locked")
        connection.execute("CREATE ROLE locked LOGIN PASSWORD 'hunter2'")
        [(path,)] = connection.execute("SHOW hba_file").fetchall()
    hba = Path(path)
    before = hba.read_text()
    hba.write_text(f"local all locked scram-sha-256\n{before}")
    with admin() as connection:
        connection.execute("SELECT pg_reload_conf()")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("GRANT CREATE, USAGE ON SCHEMA public TO locked")
    locked = url.replace("postgres:@", "locked@")
    _until(lambda: _refused(locked))
    yield locked
    hba.write_text(before)
    with admin() as connection:
        connection.execute("SELECT pg_reload_conf()")
        connection.execute("SELECT 1")


def test_a_password_comes_from_the_url_the_environment_or_a_file(
    locked_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with PostgresStore(locked_url.replace("locked@", "locked:hunter2@")) as store:
        assert store.transact(_grow) == 1
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    with PostgresStore(locked_url) as store:
        assert store.transact(_grow) == 2
    monkeypatch.delenv("PGPASSWORD")
    passwords = tmp_path / "pgpass"
    passwords.write_text("*:*:*:locked:hunter2\n")
    passwords.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(passwords))
    with PostgresStore(locked_url) as store:
        assert store.transact(_grow) == 3


def test_a_password_is_in_no_error_no_log_and_no_text_of_the_store(
    locked_url: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    with PostgresStore(locked_url.replace("locked@", "locked:hunter2@")) as store:
        store.transact(_grow)
        shown = [store.url, repr(store), str(vars(store._engine.away)), repr(store.counters)]
    errors: list[HoldfastError] = []
    for bad in (
        locked_url.replace("locked@", "locked:hunter22@"),
        locked_url.replace("locked@", "locked:hunter22@") + "&no_such_option=1",
        "postgresql://locked:hunter22@127.0.0.1:1/db",
        "postgresql://127.0.0.1:1/db?user=locked&password=hunter22",
    ):
        with pytest.raises(HoldfastError) as raised:
            PostgresStore(bad)
        errors.append(raised.value)
    assert isinstance(errors[0], Denied)
    shown += [f"{error} {error!r} {error.fields}" for error in errors]
    shown += [record.getMessage() for record in caplog.records]
    shown += list(capfd.readouterr())
    assert not [text for text in shown if "hunter2" in text]


# -- migrations ------------------------------------------------------------------------------------


def test_a_database_of_a_newer_release_is_refused_and_left_as_it_is(url: str) -> None:
    PostgresStore(url).close()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE holdfast_schema SET version = version + 1")
        with pytest.raises(SchemaMismatch) as raised:
            PostgresStore(url)
        assert "\n" not in str(raised.value)
        found = connection.execute("SELECT version FROM holdfast_schema").fetchone()
    assert found == (migrations.VERSION + 1,)


def test_migrations_are_applied_once_however_many_come_at_the_same_time(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PostgresStore(url) as store:
        store.transact(_grow)
    monkeypatch.setattr(
        migrations, "MIGRATIONS", (*migrations.MIGRATIONS, ("CREATE TABLE more (n int)",))
    )
    monkeypatch.setattr(migrations, "VERSION", migrations.VERSION + 1)
    grown: list[object] = []

    def come() -> None:
        with PostgresStore(url) as store:
            grown.append(store.transact(_grow))

    threads = [threading.Thread(target=come) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(grown) == [2, 3, 4, 5]  # type: ignore[type-var]
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT version FROM holdfast_schema").fetchall() == [
            (migrations.VERSION,)
        ]


def test_a_migration_that_fails_leaves_everything_as_it_was(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    PostgresStore(url).close()
    broken = ("CREATE TABLE more (n int)", "CREATE TABLE more (n int)")
    with monkeypatch.context() as patched:
        patched.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, broken))
        patched.setattr(migrations, "VERSION", migrations.VERSION + 1)
        with pytest.raises(HoldfastError):
            PostgresStore(url)
    with PostgresStore(url) as store:
        assert store.transact(_grow) == 1


def test_each_table_is_vacuumed_by_settings_of_its_own(store: PostgresStore) -> None:
    with psycopg.connect(store.address) as connection:
        found = connection.execute(
            "SELECT relname, array_to_string(reloptions, ' ') FROM pg_class "
            "WHERE relname IN ('holdfast_row', 'holdfast_commit')"
        ).fetchall()
    assert len(found) == 2
    for _, options in found:
        assert "autovacuum_vacuum_scale_factor=0" in options
        assert "autovacuum_vacuum_threshold=" in options


def test_the_server_gathers_no_statistics_of_the_keys_of_commits_nor_of_values(
    store: PostgresStore,
) -> None:
    store.transact(_grow)
    with psycopg.connect(store.address, autocommit=True) as connection:
        connection.execute("ANALYZE holdfast_row, holdfast_commit")
        found = connection.execute(
            "SELECT tablename, attname FROM pg_stats WHERE tablename LIKE 'holdfast%'"
        ).fetchall()
    assert {("holdfast_row", "key"), ("holdfast_commit", "no")} <= set(found)
    assert not {("holdfast_row", "value"), ("holdfast_commit", "keys")} & set(found)


def test_a_store_from_before_the_second_migration_stops_to_gather_them_too(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:1])
        patched.setattr(migrations, "VERSION", 1)
        old = PostgresStore(url)
    with old, PostgresStore(url) as new:
        # A process of the release before goes on.
        assert [one.transact(_grow) for one in (old, new, old)] == [1, 2, 3]
        with psycopg.connect(url) as connection:
            found = connection.execute(
                "SELECT attname FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid "
                "WHERE relname LIKE 'holdfast%' AND relkind = 'r' AND attstattarget = 0 AND attnum > 0"
            ).fetchall()
    assert sorted(found) == [("keys",), ("value",)]


def test_commits_that_nothing_asks_for_the_keys_of_lose_them(store: PostgresStore) -> None:
    store.transact(_grow)
    with psycopg.connect(store.address, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO holdfast_commit SELECT n, at_ns, client, keys "
            "FROM holdfast_commit, generate_series(no + 1, 5999) AS n "
            "WHERE no = (SELECT max(no) FROM holdfast_commit)"
        )
        assert store.transact(_grow) == 2
        found = connection.execute(
            "SELECT keys IS NULL, min(no), max(no) FROM holdfast_commit WHERE no > 1 GROUP BY 1"
        ).fetchall()
        [(kept,)] = connection.execute("SELECT count(*) FROM holdfast_commit").fetchall()
    assert kept == 6000
    assert (True, 1001, 4000) in found
    # A process that has heard of fewer commits than these starts anew.
    assert known.SINCE_MAX <= 6000 - 4000


# -- sizes -----------------------------------------------------------------------------------------


def test_topics_that_do_not_fit_into_one_notification_ring_all(url: str) -> None:
    many = [f"topic-{n}-{'x' * 50}" for n in range(500)]
    assert len("".join(many)) > 8000 > topics.PAYLOAD_BYTES_MAX
    with PostgresStore(url) as one, PostgresStore(url) as other:
        since = other.wait(many[-1], 0, 0.0)
        one.transact(lambda txn: [txn.notify(topic) for topic in many])
        assert other.wait(many[-1], since, DEADLINE_S) > since


def test_a_topic_of_any_text_travels(url: str) -> None:
    with PostgresStore(url) as one, PostgresStore(url) as other:
        for topic in ("späß/⚙", "a\nb", "x" * 9_000, "*"):
            since = other.wait(topic, 0, 0.0)
            one.transact(lambda txn, topic=topic: txn.notify(topic))
            assert other.wait(topic, since, DEADLINE_S) > since


def test_values_of_the_largest_size_are_kept_as_they_are(store: PostgresStore) -> None:
    large = os.urandom(1024) * (VALUE_BYTES_MAX // 1024)
    store.transact(lambda txn: [txn.put(b"k%d" % n, large) for n in range(4)])
    with PostgresStore(store.address) as other:
        assert other.read(lambda txn: txn.get(b"k3")) == large
        assert [len(value) for _, value in other.read(lambda txn: txn.scan(b"k", b"l", 9))] == [
            VALUE_BYTES_MAX
        ] * 4


def test_a_commit_of_very_many_rows_is_one_commit(store: PostgresStore) -> None:
    store.transact(lambda txn: [txn.put(b"row%06d" % n, b"") for n in range(60_000)])
    assert store.counters.commits == 1
    assert len(store.read(lambda txn: txn.scan(b"row", b"rox"))) == 60_000


# -- processes -------------------------------------------------------------------------------------


def test_a_forked_child_is_refused_and_its_parent_goes_on(store: PostgresStore) -> None:
    store.transact(_grow)
    pid = os.fork()
    if not pid:
        try:
            store.transact(_grow)
        except StoreForked:
            store.close()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert store.transact(_grow) == 2
    assert store.read(lambda txn: txn.count(b"n")) == 0


@pytest.mark.parametrize(("way", "count"), [("fork_and_exit", 10), ("pool", 8), ("preexec", 6)])
def test_children_forked_under_load_end_and_leave_the_sessions_alone(
    url: str, way: str, count: int
) -> None:
    with python_proc("tests.process.forks", url, way, str(count)) as forker:
        assert forker.expect("o", 80) == f"done {count}"
        assert forker.expect("retries") == "retries 0"
        assert forker.wait() == 0


def test_a_child_forked_inside_a_transaction_sends_nothing_to_the_server(
    store: PostgresStore,
) -> None:
    store.transact(lambda txn: txn.put(b"k", b"v"))

    def fork(txn: Txn) -> int:
        txn.get(b"k")
        pid = os.fork()
        if not pid:
            try:
                txn.get(b"another")
            except StoreForked:
                return 0
            os._exit(2)
        return pid

    parent = os.getpid()
    for read in (store.read, lambda fn: store._on_snapshot(fn, (), {})[1]):
        status = 1
        try:
            pid = read(fork)
        except StoreForked:
            status = 0
        finally:
            if os.getpid() != parent:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert store.transact(_grow) == 1
    assert store.retries == 0


def test_closing_does_not_wait_for_the_listener(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "LISTEN_S", 3600.0)
    store = PostgresStore(url)
    store.wait("bell", 0, 0.0)
    listener = store._topics._thread
    store.close()
    assert not listener.is_alive()


# -- helpers ---------------------------------------------------------------------------------------

_dawdling: list[Callable[[], None]] = []


def _dawdle_now(txn: Txn) -> int:
    while _dawdling:
        _dawdling.pop()()
    txn.add(b"n", 1)
    return txn.count(b"n")


_dawdle = operation(_dawdle_now)
_dawdle.name = "holdfast.store.pg.testing:dawdle"


def _now_at_commit(txn: Txn) -> int:
    txn.put(b"touched", b"")
    return txn.now_ns


_now = operation(_now_at_commit)
_now.name = "holdfast.store.pg.testing:now"


@pytest.fixture(autouse=True)
def _operations(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.store import api

    for one in (_dawdle, _now):
        monkeypatch.setitem(api._resolved, one.name, one)


def _grow(txn: Txn) -> Any:
    return txn.append(b"k", b"")


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def _until_more(done: list[int]) -> None:
    before = len(done)
    _until(lambda: len(done) > before + 5)


def _there(pid: int) -> bool:
    with admin() as connection:
        found = connection.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", (pid,))
        return found.fetchone() is not None


def _refused(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return True
    return False


def _skew(url: str) -> None:
    """Put a clock before the server's own that can be set back."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE skew (by interval NOT NULL)")
        connection.execute("INSERT INTO skew VALUES ('0')")
        connection.execute(
            "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE "
            "AS 'SELECT pg_catalog.clock_timestamp() - by FROM public.skew'"
        )


def _with_skew(url: str) -> str:
    return f"{url}&options={quote('-c search_path=public,pg_catalog')}"


def _set_back(url: str, by: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("UPDATE skew SET by = {}").format(sql.Literal(by)))
