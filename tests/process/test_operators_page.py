"""docs/operators.md: its blocks are run in order, on a separate PostgreSQL server.

A block `sql` is run by psql as a superuser, and a block `sh` by a shell. The server must accept each setting
of a block `conf`. The test does the operator's steps between the blocks (stop and start the server).
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from holdfast import store as stores
from holdfast.durable import queue
from holdfast.errors import Fenced
from holdfast.store import schema, tuples
from holdfast.store.api import Store
from holdfast.store.postgres.cached_snapshot import SCANNED_MAX
from holdfast.store.postgres.read_pool import READ_CONNECTIONS_MAX
from holdfast.store.postgres.server import ServerDenied
from tests.pgcluster import ClusterServer, PostgresCluster, binaries
from tests.process.test_tutorial import PageBlock, blocks_of
from tests.processes import ROOT

PAGE = ROOT / "docs" / "operators.md"
BLOCK_S = 60
DATABASE = "jobs"
MANY = schema.key_prefix(schema.Space.APP_STATE, "many")
# One connection for commits, one for notifications, and the read pool.
CONNECTIONS_MAX = READ_CONNECTIONS_MAX + 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[PostgresCluster]:
    with PostgresCluster(standby=False) as found:
        yield found


class OperatorShell:
    """Runs the blocks, and performs the steps that the page describes in text."""

    def __init__(self, cluster: PostgresCluster) -> None:
        self.server: ClusterServer = cluster.primary
        self._bin, self._user = binaries(18)
        self.archive = cluster.folder / "archive"
        self.backup = cluster.folder / "backup"
        self.archive.mkdir()
        self._chown_to_server(self.archive)
        self.restore_time = ""

    def url(self, user: str, database: str) -> str:
        return f"postgresql://{user}@127.0.0.1:{self.server.port}/{database}"

    @property
    def store(self) -> str:
        return self.url("holdfast_app", DATABASE)

    def restart_with_archive(self) -> None:
        copy = f"test ! -f {self.archive}/%f && cp %p {self.archive}/%f"
        self.server.change_settings(archive_mode="on", archive_command=copy)
        self.server.stop()
        self.server.start()

    def sql(self, text: str) -> str:
        made = self.server.query_value(
            f"SELECT count(*) FROM pg_database WHERE datname = '{DATABASE}'"
        )
        admin = self.url("postgres", DATABASE if made else "postgres")
        return self._run([str(self._bin / "psql"), admin, "-v", "ON_ERROR_STOP=1"], text)

    def sh(self, text: str) -> str:
        path = [str(Path(sys.executable).parent), str(self._bin), os.environ["PATH"]]
        names = {
            "PATH": os.pathsep.join(path),
            "ADMIN": self.url("postgres", "postgres"),
            "OWNER": self.url("holdfast_owner", DATABASE),
            "STORE": self.store,
            "BACKUP": str(self.backup),
            "DATA": str(self.server.data),
            "ARCHIVE": str(self.archive),
            "WHEN": self.restore_time,
        }
        return self._run(["bash", "-euc", text], "", names)

    def conf(self, text: str) -> None:
        with self.server.admin() as connection:
            for name, value in re.findall(r"^(\w+) = '?(.*?)'?$", text, re.MULTILINE):
                setting = sql.Identifier(name)
                take = sql.SQL("ALTER SYSTEM SET {} = {}").format(setting, sql.Literal(value))
                connection.execute(take)
                connection.execute(sql.SQL("ALTER SYSTEM RESET {}").format(setting))

    def begin_restore(self) -> None:
        self.server.stop()
        shutil.rmtree(self.server.data)

    def finish_restore(self) -> None:
        self._chown_to_server(self.server.data)
        self.server.start()
        self.server.await_(
            lambda: not self.server.query_value("SELECT pg_is_in_recovery()"), "recovery"
        )

    def record_restore_time(self) -> None:
        self.restore_time = str(self.server.query_value("SELECT clock_timestamp()::text"))

    def _chown_to_server(self, path: Path) -> None:
        if self._user is None:
            return
        record = pwd.getpwnam(self._user)
        for one in (path, *path.rglob("*")):
            os.chown(one, record.pw_uid, record.pw_gid)
        path.chmod(0o700)

    def _run(self, argv: list[str], text: str, names: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            argv,
            input=text,
            env={**os.environ, **(names or {})},
            capture_output=True,
            text=True,
            timeout=BLOCK_S,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def put(store: Store, count: int) -> None:
    store.transact(queue.put_many, "mail", [b"x"] * count)


def ready_count(store: Store) -> int:
    counts: queue.QueueCounts = store.read(queue.counts, "mail")
    return counts.ready


def blocks() -> list[PageBlock]:
    return blocks_of(PAGE.read_text(encoding="utf-8"))


def test_every_block_of_the_operators_page_is_executed() -> None:
    assert len(blocks()) == PAGE.read_text(encoding="utf-8").count("```") // 2
    assert {block.kind for block in blocks()} == {"sql", "sh", "conf"}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_operators_page_restores_to_a_point_in_time(cluster: PostgresCluster) -> None:
    operator = OperatorShell(cluster)
    operator.restart_with_archive()
    generations: list[int] = []
    claims: list[queue.Claim] = []
    for block in blocks():
        if block.kind == "conf":
            operator.conf(block.text)
        elif block.kind == "sql":
            operator.sql(block.text)
        elif "pg_basebackup" in block.text:
            with stores.open(operator.store) as store:
                generations.append(store.generation)
                put(store, 3)
            operator.sh(block.text)
            with stores.open(operator.store) as store:
                put(store, 4)
                operator.record_restore_time()
                put(store, 5)
                claims += store.transact(queue.claim, "mail", "lost", 1, 600 * 10**9)
        elif "recovery.signal" in block.text:
            operator.begin_restore()
            operator.sh(block.text)
            operator.finish_restore()
        else:
            operator.sh(block.text)
    with stores.open(operator.store) as store:
        assert ready_count(store) == 7, "what was there at the time, and nothing after it"
        assert store.generation > generations[0]
        with pytest.raises(Fenced):
            store.transact(queue.ack, [claims[0].token])


@pytest.mark.slow
def test_database_role_without_grants_cannot_create_the_store(
    cluster: PostgresCluster,
) -> None:
    with cluster.primary.admin() as connection:
        connection.execute("CREATE ROLE outsider LOGIN")
        connection.execute("CREATE DATABASE elsewhere")
    url = f"postgresql://outsider@127.0.0.1:{cluster.primary.port}/elsewhere"
    with pytest.raises(ServerDenied):
        stores.open(url)


@pytest.mark.slow
def test_process_opens_at_most_the_documented_connections(cluster: PostgresCluster) -> None:
    documented = re.search(r"at most \*\*(\d+)\*\*", PAGE.read_text(encoding="utf-8"))
    assert documented is not None
    assert int(documented[1]) == CONNECTIONS_MAX
    with cluster.primary.admin() as connection:
        connection.execute("CREATE DATABASE counted")
    url = f"postgresql://postgres@127.0.0.1:{cluster.primary.port}/counted"
    barrier = threading.Barrier(READ_CONNECTIONS_MAX + 1)
    with stores.open(url) as store:
        put(store, 1)
        store.wait("nothing", 0, 0)
        keys = [MANY + tuples.pack_int(n) for n in range(SCANNED_MAX + 1)]
        store.transact(lambda txn: [txn.put(key, b"") for key in keys])

        def read() -> None:
            def look(txn: stores.Txn) -> None:
                # A large scan without a limit needs a snapshot, and a snapshot needs a connection.
                assert len(txn.scan(MANY, tuples.prefix_end(MANY), None)) > SCANNED_MAX
                barrier.wait(BLOCK_S)
                barrier.wait(BLOCK_S)

            store.read(look)

        readers = [threading.Thread(target=read) for _ in range(READ_CONNECTIONS_MAX)]
        for reader in readers:
            reader.start()
        barrier.wait(BLOCK_S)
        with psycopg.connect(url) as connection:
            row = connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = 'counted' "
                "AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            ).fetchone()
        barrier.wait(BLOCK_S)
        for reader in readers:
            reader.join()
    assert row == (CONNECTIONS_MAX,)
