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
from holdfast.store.postgres import engine, local_state, migrations, notifications, server
from holdfast.store.postgres.server import PostgresUnreachable, ServerDenied
from holdfast.store.postgres.store import PostgresStore
from tests.pgcluster import PostgresCluster
from tests.postgres import admin, fresh_url
from tests.processes import python_proc

pytestmark = pytest.mark.timeout(90)

DEADLINE_S = 60.0


@pytest.fixture
def url() -> str:
    return fresh_url(empty=True)


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    with PostgresStore(url) as opened:
        yield opened


# -- server restarts -------------------------------------------------------------------------------


def test_store_survives_restarts_of_its_server() -> None:
    with (
        PostgresCluster(standby=False) as cluster,
        PostgresStore(cluster.primary.conninfo()) as store,
    ):
        done: list[int] = []
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                done.append(store.transact(_append_row))
                assert store.read(lambda txn: txn.get(b"k")) is None

        worker = threading.Thread(target=work)
        worker.start()
        for immediate in (False, True):
            _until_more_commits(done)
            cluster.primary.stop(immediate=immediate)
            cluster.primary.start()
        _until_more_commits(done)
        stop.set()
        worker.join(DEADLINE_S)
        assert done == list(range(1, len(done) + 1))
        assert store.retries > 0
        assert store._engine.outage.since_ns == 0


def test_wait_is_notified_after_a_server_restart() -> None:
    with (
        PostgresCluster(standby=False) as cluster,
        PostgresStore(cluster.primary.conninfo()) as one,
        PostgresStore(cluster.primary.conninfo()) as other,
    ):
        since = one.wait("bell", 0, 0.0)
        cluster.primary.stop()
        cluster.primary.start()
        commits: list[int] = []
        waiting = threading.Thread(
            target=lambda: commits.append(one.wait("bell", since, DEADLINE_S))
        )
        waiting.start()
        other.transact(lambda txn: txn.notify("bell"))
        waiting.join(DEADLINE_S)
        assert commits[0] > since


def test_postgres_unreachable_carries_the_start_of_the_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from holdfast.store.postgres import store as postgres_store

    monkeypatch.setattr(engine, "AWAY_S", 0.2)
    monkeypatch.setattr(postgres_store, "BORROW_WAIT_S", 0.2)
    with (
        PostgresCluster(standby=False) as cluster,
        PostgresStore(cluster.primary.conninfo()) as store,
    ):
        store.transact(_append_row)
        cluster.primary.stop()
        before_ns = time.time_ns()
        with pytest.raises(PostgresUnreachable) as written:
            store.transact(_append_row)
        with pytest.raises(PostgresUnreachable) as read:
            store.read(lambda txn: txn.get(b"k"))
        for raised in (written, read):
            assert before_ns <= raised.value.fields["since_ns"] <= time.time_ns()


# -- time-outs -------------------------------------------------------------------------------------


def test_commit_raises_busy_after_the_lock_timeout(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "LOCK_S", 1)
    with PostgresStore(url) as store, psycopg.connect(url) as other:
        other.execute("SELECT pg_advisory_xact_lock(%s::bigint)", (store._engine._lock,))
        with pytest.raises(Busy):
            store.transact(_append_row)
        other.rollback()
        assert store.transact(_append_row) == 1


def test_statement_raises_busy_after_the_statement_timeout(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STATEMENT_S", 1)
    with PostgresStore(url) as store, psycopg.connect(url) as other:
        other.execute("LOCK TABLE holdfast_row IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(Busy):
            store.read(lambda txn: txn.get(b"k"))
        with pytest.raises(Busy):
            store.transact(lambda txn: txn.put(b"k", b""))
        other.rollback()
        store.transact(lambda txn: txn.put(b"k", b""))


def test_operation_slower_than_the_idle_timeout_is_run_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "IDLE_S", 1)
    with PostgresStore(url) as store:
        connection = store._engine._connection
        assert connection is not None
        pid = connection.info.backend_pid
        _pending_delays[:] = [lambda: _until(lambda: not _session_exists(pid))]
        assert store.transact(_slow_operation) == 1
        assert _pending_delays == []
        assert store.read(lambda txn: txn.count(b"n")) == 1


# -- time ------------------------------------------------------------------------------------------


def test_store_time_advances_after_the_server_clock_is_set_back(url: str) -> None:
    """Store time neither steps back nor freezes, so leases expire on time."""
    _shadow_server_clock(url)
    with PostgresStore(_with_shadowed_clock(url)) as store:
        before_ns = store.transact(_commit_time)
        _set_clock_back(url, "1 hour")
        after_ns = store.transact(_commit_time)
        assert after_ns > before_ns
        _until(lambda: store.transact(_commit_time) > after_ns + 20 * MS)
        with PostgresStore(_with_shadowed_clock(url)) as other:
            assert other.transact(_commit_time) > after_ns + 20 * MS


def test_store_time_after_open_is_not_before_the_last_commit(url: str) -> None:
    _shadow_server_clock(url)
    with PostgresStore(_with_shadowed_clock(url)) as store:
        before_ns = store.transact(_commit_time)
    _set_clock_back(url, "1 hour")
    with PostgresStore(_with_shadowed_clock(url)) as store:
        assert store.now_ns() >= before_ns
        assert store.transact(_commit_time) > before_ns


def test_optimistic_commit_after_its_deadline_is_applied_again(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was stopped before the commit arrived, so leases may have expired."""
    while not store.counters.optimistic:
        store.transact(_append_row)
    grown, trips = store.transact(_append_row), store.counters.round_trips
    monkeypatch.setattr(engine, "OPTIMISTIC_DEADLINE_US", -1_000_000)
    assert store.transact(_append_row) == grown + 1
    assert store.counters.lost_races == 1
    assert store.counters.round_trips == trips + 3


def test_slow_clock_answer_does_not_set_store_time_back(store: PostgresStore) -> None:
    now_ns = store.now_ns()
    boot_ns = store._engine._clock.boot_ns()
    store._engine._observe_clock((now_ns - 10 * 10**9) // 1000, boot_ns - 11 * 10**9)
    assert store.now_ns() >= now_ns


# -- secrets ---------------------------------------------------------------------------------------


@pytest.fixture
def locked_url(url: str) -> Iterator[str]:
    """Return a URL with a role that needs a password and may create tables."""
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
    _until(lambda: _connection_refused(locked))
    yield locked
    hba.write_text(before)
    with admin() as connection:
        connection.execute("SELECT pg_reload_conf()")
        connection.execute("SELECT 1")


def test_password_is_read_from_url_environment_or_pgpass_file(
    locked_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with PostgresStore(locked_url.replace("locked@", "locked:hunter2@")) as store:
        assert store.transact(_append_row) == 1
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    with PostgresStore(locked_url) as store:
        assert store.transact(_append_row) == 2
    monkeypatch.delenv("PGPASSWORD")
    passwords = tmp_path / "pgpass"
    passwords.write_text("*:*:*:locked:hunter2\n")
    passwords.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(passwords))
    with PostgresStore(locked_url) as store:
        assert store.transact(_append_row) == 3


def test_password_is_in_no_error_log_or_repr_of_the_store(
    locked_url: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    with PostgresStore(locked_url.replace("locked@", "locked:hunter2@")) as store:
        store.transact(_append_row)
        texts = [store.url, repr(store), str(vars(store._engine.outage)), repr(store.counters)]
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
    assert isinstance(errors[0], ServerDenied)
    texts += [f"{error} {error!r} {error.fields}" for error in errors]
    texts += [record.getMessage() for record in caplog.records]
    texts += list(capfd.readouterr())
    assert not [text for text in texts if "hunter2" in text]


# -- migrations ------------------------------------------------------------------------------------


def test_newer_migration_version_raises_schema_mismatch(url: str) -> None:
    PostgresStore(url).close()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE holdfast_schema SET version = version + 1")
        with pytest.raises(SchemaMismatch) as raised:
            PostgresStore(url)
        assert "\n" not in str(raised.value)
        version = connection.execute("SELECT version FROM holdfast_schema").fetchone()
    assert version == (migrations.VERSION + 1,)


def test_concurrent_opens_apply_a_migration_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with PostgresStore(url) as store:
        store.transact(_append_row)
    monkeypatch.setattr(
        migrations, "MIGRATIONS", (*migrations.MIGRATIONS, ("CREATE TABLE more (n int)",))
    )
    monkeypatch.setattr(migrations, "VERSION", migrations.VERSION + 1)
    grown: list[object] = []

    def open_and_append() -> None:
        with PostgresStore(url) as store:
            grown.append(store.transact(_append_row))

    threads = [threading.Thread(target=open_and_append) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(grown) == [2, 3, 4, 5]  # type: ignore[type-var]
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT version FROM holdfast_schema").fetchall() == [
            (migrations.VERSION,)
        ]


def test_failed_migration_is_rolled_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PostgresStore(url).close()
    broken = ("CREATE TABLE more (n int)", "CREATE TABLE more (n int)")
    with monkeypatch.context() as patched:
        patched.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, broken))
        patched.setattr(migrations, "VERSION", migrations.VERSION + 1)
        with pytest.raises(HoldfastError):
            PostgresStore(url)
    with PostgresStore(url) as store:
        assert store.transact(_append_row) == 1


def test_each_table_has_its_own_autovacuum_settings(store: PostgresStore) -> None:
    with psycopg.connect(store.address) as connection:
        tables = connection.execute(
            "SELECT relname, array_to_string(reloptions, ' ') FROM pg_class "
            "WHERE relname IN ('holdfast_row', 'holdfast_commit')"
        ).fetchall()
    assert len(tables) == 2
    for _, options in tables:
        assert "autovacuum_vacuum_scale_factor=0" in options
        assert "autovacuum_vacuum_threshold=" in options


def test_server_collects_no_statistics_of_commit_keys_and_row_values(
    store: PostgresStore,
) -> None:
    store.transact(_append_row)
    with psycopg.connect(store.address, autocommit=True) as connection:
        connection.execute("ANALYZE holdfast_row, holdfast_commit")
        columns = connection.execute(
            "SELECT tablename, attname FROM pg_stats WHERE tablename LIKE 'holdfast%'"
        ).fetchall()
    assert {("holdfast_row", "key"), ("holdfast_commit", "no")} <= set(columns)
    assert not {("holdfast_row", "value"), ("holdfast_commit", "keys")} & set(columns)


def test_second_migration_disables_column_statistics(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:1])
        patched.setattr(migrations, "VERSION", 1)
        old = PostgresStore(url)
    with old, PostgresStore(url) as new:
        # A process of the previous release keeps working.
        assert [one.transact(_append_row) for one in (old, new, old)] == [1, 2, 3]
        with psycopg.connect(url) as connection:
            columns = connection.execute(
                "SELECT attname FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid "
                "WHERE relname LIKE 'holdfast%' AND relkind = 'r' AND attstattarget = 0 AND attnum > 0"
            ).fetchall()
    assert sorted(columns) == [("keys",), ("value",)]


def test_keys_of_old_commit_records_are_cleared(store: PostgresStore) -> None:
    store.transact(_append_row)
    with psycopg.connect(store.address, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO holdfast_commit SELECT n, at_ns, client, keys "
            "FROM holdfast_commit, generate_series(no + 1, 5999) AS n "
            "WHERE no = (SELECT max(no) FROM holdfast_commit)"
        )
        assert store.transact(_append_row) == 2
        ranges = connection.execute(
            "SELECT keys IS NULL, min(no), max(no) FROM holdfast_commit WHERE no > 1 GROUP BY 1"
        ).fetchall()
        [(kept,)] = connection.execute("SELECT count(*) FROM holdfast_commit").fetchall()
    assert kept == 6000
    assert (True, 1001, 4000) in ranges
    # A process further behind than COMMITS_READ_MAX resets its local state, so it does not need these keys.
    assert local_state.COMMITS_READ_MAX <= 6000 - 4000


# -- sizes -----------------------------------------------------------------------------------------


def test_topics_larger_than_one_notification_payload_notify_all(url: str) -> None:
    many = [f"topic-{n}-{'x' * 50}" for n in range(500)]
    assert len("".join(many)) > 8000 > notifications.PAYLOAD_BYTES_MAX
    with PostgresStore(url) as one, PostgresStore(url) as other:
        since = other.wait(many[-1], 0, 0.0)
        one.transact(lambda txn: [txn.notify(topic) for topic in many])
        assert other.wait(many[-1], since, DEADLINE_S) > since


def test_notify_accepts_topics_with_any_text(url: str) -> None:
    with PostgresStore(url) as one, PostgresStore(url) as other:
        for topic in ("späß/⚙", "a\nb", "x" * 9_000, "*"):
            since = other.wait(topic, 0, 0.0)
            one.transact(lambda txn, topic=topic: txn.notify(topic))
            assert other.wait(topic, since, DEADLINE_S) > since


def test_values_of_the_maximum_size_are_stored_unchanged(store: PostgresStore) -> None:
    large = os.urandom(1024) * (VALUE_BYTES_MAX // 1024)
    store.transact(lambda txn: [txn.put(b"k%d" % n, large) for n in range(4)])
    with PostgresStore(store.address) as other:
        assert other.read(lambda txn: txn.get(b"k3")) == large
        assert [len(value) for _, value in other.read(lambda txn: txn.scan(b"k", b"l", 9))] == [
            VALUE_BYTES_MAX
        ] * 4


def test_commit_of_sixty_thousand_rows_is_one_commit(store: PostgresStore) -> None:
    store.transact(lambda txn: [txn.put(b"row%06d" % n, b"") for n in range(60_000)])
    assert store.counters.commits == 1
    assert len(store.read(lambda txn: txn.scan(b"row", b"rox"))) == 60_000


# -- processes -------------------------------------------------------------------------------------


def test_forked_child_raises_store_forked_and_its_parent_works(store: PostgresStore) -> None:
    store.transact(_append_row)
    pid = os.fork()
    if not pid:
        try:
            store.transact(_append_row)
        except StoreForked:
            store.close()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert store.transact(_append_row) == 2
    assert store.read(lambda txn: txn.count(b"n")) == 0


@pytest.mark.parametrize(("way", "count"), [("fork_and_exit", 10), ("pool", 8), ("preexec", 6)])
def test_children_forked_under_load_exit_without_closing_sessions(
    url: str, way: str, count: int
) -> None:
    with python_proc("tests.process.forks", url, way, str(count)) as forker:
        assert forker.expect("o", 80) == f"done {count}"
        assert forker.expect("retries") == "retries 0"
        assert forker.wait() == 0


def test_child_forked_inside_a_transaction_sends_no_statement(
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
    for read in (store.read, lambda fn: store._run_on_snapshot(fn, (), {})[1]):
        status = 1
        try:
            pid = read(fork)
        except StoreForked:
            status = 0
        finally:
            if os.getpid() != parent:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert store.transact(_append_row) == 1
    assert store.retries == 0


def test_close_does_not_wait_for_the_notification_listener(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "LISTEN_S", 3600.0)
    store = PostgresStore(url)
    store.wait("bell", 0, 0.0)
    listener = store._notifications._thread
    store.close()
    assert not listener.is_alive()


# -- helpers ---------------------------------------------------------------------------------------

_pending_delays: list[Callable[[], None]] = []


def _run_delays_and_count(txn: Txn) -> int:
    while _pending_delays:
        _pending_delays.pop()()
    txn.add(b"n", 1)
    return txn.count(b"n")


_slow_operation = operation("testing.dawdle")(_run_delays_and_count)


def _read_commit_time(txn: Txn) -> int:
    txn.put(b"touched", b"")
    return txn.now_ns


_commit_time = operation("testing.server_now")(_read_commit_time)


@pytest.fixture(autouse=True)
def _operations(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.store import api

    for one in (_slow_operation, _commit_time):
        monkeypatch.setitem(api._operations, one.name, one)


def _append_row(txn: Txn) -> Any:
    return txn.append(b"k", b"")


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def _until_more_commits(done: list[int]) -> None:
    before = len(done)
    _until(lambda: len(done) > before + 5)


def _session_exists(pid: int) -> bool:
    with admin() as connection:
        sessions = connection.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", (pid,))
        return sessions.fetchone() is not None


def _connection_refused(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return True
    return False


def _shadow_server_clock(url: str) -> None:
    """Shadow the server's clock function with one that can be set back."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE skew (by interval NOT NULL)")
        connection.execute("INSERT INTO skew VALUES ('0')")
        connection.execute(
            "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE "
            "AS 'SELECT pg_catalog.clock_timestamp() - by FROM public.skew'"
        )


def _with_shadowed_clock(url: str) -> str:
    return f"{url}&options={quote('-c search_path=public,pg_catalog')}"


def _set_clock_back(url: str, by: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("UPDATE skew SET by = {}").format(sql.Literal(by)))
