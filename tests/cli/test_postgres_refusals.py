"""What a store on PostgreSQL refuses: each is one line that says what to do, and shows no password."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from holdfast import store as stores
from holdfast.errors import HoldfastError, SchemaMismatch, StoreCorrupt
from holdfast.store import schema
from holdfast.store.pg import server as servers
from holdfast.store.pg.server import Denied, NoDatabase, Pooled, ReadOnlyServer, ServerTooOld
from holdfast.store.postgres import PostgresStore
from tests.cli.conftest import Run
from tests.ops.app import app
from tests.pgcluster import DATABASE, USER, Cluster
from tests.pooler import pooled
from tests.postgres import OLDEST, fresh_url, in_database, role_url, server

pytestmark = pytest.mark.timeout(60)

MODULES = ("holdfast.store.pg.server", "holdfast.store.pg.pooler", "holdfast.cli.target")

SECRET = "sw0rdfish"
TABLES = ("holdfast_row", "holdfast_commit", "holdfast_schema")


@pytest.fixture
def url() -> str:
    """A database with a store in it."""
    made = fresh_url()
    PostgresStore(made).close()
    return made


def refused(run: Run, url: str, kind: type[HoldfastError]) -> str:
    """Refused when a store is opened, when an app is, and by a command; the line of that."""
    for open in (stores.open, app.open):
        with pytest.raises(kind) as raised:
            open(url)
        assert SECRET not in f"{raised.value} {raised.value!r}"
    ran = run("worlds", "list", "--store", url)
    assert (ran.code, ran.out) == (1, "")
    assert ran.error.startswith(f"{kind.code}: ")
    assert SECRET not in ran.err
    return ran.error


def test_a_wrong_password(run: Run, url: str) -> None:
    guarded = role_url(url, "guarded", SECRET)
    line = refused(run, guarded.replace(SECRET, f"{SECRET}!"), Denied)
    assert "password" in line


def test_no_password_where_one_is_asked_for(run: Run, url: str) -> None:
    guarded = role_url(url, "guarded", SECRET)
    assert "password" in refused(run, guarded.replace(f":{SECRET}@", "@"), Denied)


def test_a_role_that_is_not_there(run: Run, url: str) -> None:
    line = refused(run, url.replace("//postgres:@", f"//nobody_here:{SECRET}@"), Denied)
    assert "nobody_here" in line


def test_a_role_that_may_not_log_in(run: Run, url: str) -> None:
    assert "log in" in refused(run, role_url(url, "asleep", login=False), Denied)


def test_a_role_that_may_not_connect(run: Run, url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        name = sql.Identifier(connection.info.dbname)
        connection.execute(sql.SQL("REVOKE CONNECT ON DATABASE {} FROM PUBLIC").format(name))
    assert "permission denied" in refused(run, role_url(url, "stranger"), Denied)


def test_a_role_that_may_not_read_the_store(run: Run, url: str) -> None:
    assert "permission denied" in refused(run, role_url(url, "stranger"), Denied)


def test_a_role_that_may_not_make_a_store() -> None:
    url = role_url(fresh_url(), "stranger")
    with pytest.raises(Denied) as raised:
        app.open(url)
    assert "CREATE" in str(raised.value)


def test_a_database_that_is_not_there(run: Run) -> None:
    line = refused(run, in_database(server(), "nowhere"), NoDatabase)
    assert "nowhere" in line
    assert "createdb" in line


def test_a_server_that_is_too_old(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """No server that old is at hand: the one of version 16 is called too old."""
    monkeypatch.setattr(servers, "SERVER_MIN", 170000)
    line = refused(run, fresh_url(OLDEST), ServerTooOld)
    assert "16." in line
    assert "newer" in line


def test_a_database_that_takes_no_writes(run: Run, url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        name = sql.Identifier(connection.info.dbname)
        connection.execute(
            sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name)
        )
    assert "primary" in refused(run, url, ReadOnlyServer)


def test_a_standby(run: Run) -> None:
    with Cluster() as cluster:
        assert cluster.standby is not None
        host = cluster.standby
        url = f"postgresql://{USER}@{host.host}:{host.port}/{DATABASE}"
        assert "primary" in refused(run, url, ReadOnlyServer)


def test_a_store_of_a_newer_release(run: Run, url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "UPDATE holdfast_row SET value = %b WHERE key = %b",
            (schema.marker(schema.SCHEMA_MAJOR + 1, 0), schema.MARKER_KEY),
        )
    before = stored(url)
    assert "version of holdfast" in refused(run, url, SchemaMismatch)
    assert stored(url) == before


def test_a_schema_of_a_newer_release(run: Run, url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE holdfast_schema SET version = version + 1")
    before = stored(url)
    assert "version of holdfast" in refused(run, url, SchemaMismatch)
    assert stored(url) == before


def test_a_meta_row_that_cannot_be_read(run: Run, url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "UPDATE holdfast_row SET value = %b WHERE key = %b", (b"\xc1", schema.META_KEY)
        )
    before = stored(url)
    assert "meta row" in refused(run, url, StoreCorrupt)
    assert stored(url) == before


def stored(url: str) -> dict[str, str]:
    """A hash of every relation that the store has."""
    with psycopg.connect(url) as connection:
        names = connection.execute(
            "SELECT relname FROM pg_class WHERE relname LIKE 'holdfast%' AND relkind IN ('r', 'i')"
        ).fetchall()
        tables = [name for (name,) in names if name in TABLES]
        found = {name: "" for (name,) in names}
        for table in tables:
            rows = connection.execute(
                sql.SQL(
                    "SELECT md5(coalesce(string_agg(t::text, chr(10) ORDER BY t::text), '')) FROM {} t"
                ).format(sql.Identifier(table))
            ).fetchone()
            assert rows is not None
            found[table] = rows[0]
        return found


@pytest.mark.parametrize("mode", ["transaction", "statement"])
def test_a_pooler_that_hands_sessions_round(run: Run, url: str, mode: str) -> None:
    with pooled(url, mode=mode) as behind:
        assert "server itself" in refused(run, behind, Pooled)


def test_a_pooler_that_takes_no_options(run: Run, url: str) -> None:
    with pooled(url, mode="transaction", takes_options=False) as behind:
        assert "server itself" in refused(run, behind, Pooled)


@pytest.fixture
def session(url: str) -> Iterator[str]:
    with pooled(url, mode="session") as behind:
        yield behind


def test_a_pooler_that_keeps_a_session_for_each_is_as_good_as_the_server(session: str) -> None:
    with PostgresStore(session) as store:
        store.transact(lambda txn: txn.put(b"k", b"v"))
        assert store.read(lambda txn: txn.get(b"k")) == b"v"
