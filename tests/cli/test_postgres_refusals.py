"""Errors of a PostgreSQL store: each is one line with a hint and without the password."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from holdfast import store as stores
from holdfast.errors import HoldfastError, SchemaMismatch, StoreCorrupt
from holdfast.store import schema
from holdfast.store.postgres import server as servers
from holdfast.store.postgres.server import (
    NoDatabase,
    PoolerUnsupported,
    ReadOnlyServer,
    ServerDenied,
    ServerTooOld,
)
from holdfast.store.postgres.store import PostgresStore
from tests.cli.conftest import RunCommand
from tests.ops.app import app
from tests.pgbouncer import running_pgbouncer
from tests.pgcluster import DATABASE, USER, PostgresCluster
from tests.postgres import OLDEST, fresh_url, in_database, role_url, server

pytestmark = pytest.mark.timeout(60)

MODULES = (
    "holdfast.store.postgres.server",
    "holdfast.store.postgres.pooler",
    "holdfast.cli.store_option",
)

SECRET = "sw0rdfish"
STORE_TABLES = ("holdfast_row", "holdfast_commit", "holdfast_schema")


@pytest.fixture
def url() -> str:
    """A database that contains a store."""
    database_url = fresh_url()
    PostgresStore(database_url).close()
    return database_url


def require_refusal(run: RunCommand, url: str, error_type: type[HoldfastError]) -> str:
    """Require that opening a store, opening an app and a command all fail. Return the command's error line."""
    for open in (stores.open, app.open):
        with pytest.raises(error_type) as raised:
            open(url)
        assert SECRET not in f"{raised.value} {raised.value!r}"
    result = run("worlds", "list", "--store", url)
    assert (result.code, result.out) == (1, "")
    assert result.error.startswith(f"{error_type.code}: ")
    assert SECRET not in result.err
    return result.error


def test_wrong_password_is_denied(run: RunCommand, url: str) -> None:
    guarded = role_url(url, "guarded", SECRET)
    line = require_refusal(run, guarded.replace(SECRET, f"{SECRET}!"), ServerDenied)
    assert "password" in line


def test_missing_password_is_denied(run: RunCommand, url: str) -> None:
    guarded = role_url(url, "guarded", SECRET)
    assert "password" in require_refusal(run, guarded.replace(f":{SECRET}@", "@"), ServerDenied)


def test_unknown_role_is_denied(run: RunCommand, url: str) -> None:
    line = require_refusal(
        run, url.replace("//postgres:@", f"//nobody_here:{SECRET}@"), ServerDenied
    )
    assert "nobody_here" in line


def test_role_without_login_is_denied(run: RunCommand, url: str) -> None:
    assert "log in" in require_refusal(run, role_url(url, "asleep", login=False), ServerDenied)


def test_role_without_connect_privilege_is_denied(run: RunCommand, url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        name = sql.Identifier(connection.info.dbname)
        connection.execute(sql.SQL("REVOKE CONNECT ON DATABASE {} FROM PUBLIC").format(name))
    assert "permission denied" in require_refusal(run, role_url(url, "stranger"), ServerDenied)


def test_role_without_read_privilege_is_denied(run: RunCommand, url: str) -> None:
    assert "permission denied" in require_refusal(run, role_url(url, "stranger"), ServerDenied)


def test_role_without_create_privilege_cannot_create_a_store() -> None:
    url = role_url(fresh_url(empty=True), "stranger")
    with pytest.raises(ServerDenied) as raised:
        app.open(url)
    assert "CREATE" in str(raised.value)


def test_unknown_database_raises_no_database(run: RunCommand) -> None:
    line = require_refusal(run, in_database(server(), "nowhere"), NoDatabase)
    assert "nowhere" in line
    assert "createdb" in line


def test_old_server_version_is_refused(run: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    """No older server is installed, so the minimum version is raised above version 16."""
    monkeypatch.setattr(servers, "SERVER_MIN", 170000)
    line = require_refusal(run, fresh_url(OLDEST), ServerTooOld)
    assert "16." in line
    assert "newer" in line


def test_read_only_database_is_refused(run: RunCommand, url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        name = sql.Identifier(connection.info.dbname)
        connection.execute(
            sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name)
        )
    assert "primary" in require_refusal(run, url, ReadOnlyServer)


def test_standby_server_is_refused(run: RunCommand) -> None:
    with PostgresCluster() as cluster:
        assert cluster.standby is not None
        host = cluster.standby
        url = f"postgresql://{USER}@{host.host}:{host.port}/{DATABASE}"
        assert "primary" in require_refusal(run, url, ReadOnlyServer)


def test_newer_schema_marker_is_refused_and_unchanged(run: RunCommand, url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "UPDATE holdfast_row SET value = %b WHERE key = %b",
            (schema.encode_marker(schema.SCHEMA_MAJOR + 1, 0), schema.MARKER_KEY),
        )
    before = relation_hashes(url)
    assert "version of holdfast" in require_refusal(run, url, SchemaMismatch)
    assert relation_hashes(url) == before


def test_newer_table_schema_version_is_refused_and_unchanged(run: RunCommand, url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE holdfast_schema SET version = version + 1")
    before = relation_hashes(url)
    assert "version of holdfast" in require_refusal(run, url, SchemaMismatch)
    assert relation_hashes(url) == before


def test_undecodable_meta_row_is_refused_and_unchanged(run: RunCommand, url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "UPDATE holdfast_row SET value = %b WHERE key = %b", (b"\xc1", schema.META_KEY)
        )
    before = relation_hashes(url)
    assert "meta row" in require_refusal(run, url, StoreCorrupt)
    assert relation_hashes(url) == before


def relation_hashes(url: str) -> dict[str, str]:
    """A hash of every relation of the store."""
    with psycopg.connect(url) as connection:
        names = connection.execute(
            "SELECT relname FROM pg_class WHERE relname LIKE 'holdfast%' AND relkind IN ('r', 'i')"
        ).fetchall()
        tables = [name for (name,) in names if name in STORE_TABLES]
        hashes = {name: "" for (name,) in names}
        for table in tables:
            rows = connection.execute(
                sql.SQL(
                    "SELECT md5(coalesce(string_agg(t::text, chr(10) ORDER BY t::text), '')) FROM {} t"
                ).format(sql.Identifier(table))
            ).fetchone()
            assert rows is not None
            hashes[table] = rows[0]
        return hashes


@pytest.mark.parametrize("mode", ["transaction", "statement"])
def test_pooler_in_transaction_or_statement_mode_is_refused(
    run: RunCommand, url: str, mode: str
) -> None:
    with running_pgbouncer(url, mode=mode) as pooled_url:
        assert "server itself" in require_refusal(run, pooled_url, PoolerUnsupported)


def test_pooler_without_startup_options_is_refused(run: RunCommand, url: str) -> None:
    with running_pgbouncer(url, mode="transaction", takes_options=False) as pooled_url:
        assert "server itself" in require_refusal(run, pooled_url, PoolerUnsupported)


@pytest.fixture
def session_pool_url(url: str) -> Iterator[str]:
    with running_pgbouncer(url, mode="session") as pooled_url:
        yield pooled_url


def test_pooler_in_session_mode_is_accepted(session_pool_url: str) -> None:
    with PostgresStore(session_pool_url) as store:
        store.transact(lambda txn: txn.put(b"k", b"v"))
        assert store.read(lambda txn: txn.get(b"k")) == b"v"
