"""docs/operators.md does what it says: its blocks are run in order, on a PostgreSQL of their own.

A block `sql` goes to psql as a superuser, a block `sh` to a shell, and of a block `conf` each setting is one
that the server takes. What an operator does between the blocks (stop the server, start it) the test does.
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
from holdfast.store.pg.readers import READERS_MAX
from holdfast.store.pg.server import Denied
from holdfast.store.pg.view import SCANNED_MAX
from tests.pgcluster import Cluster, Server, binaries
from tests.process.test_tutorial import Block, blocks_of
from tests.processes import ROOT

PAGE = ROOT / "docs" / "operators.md"
BLOCK_S = 60
DATABASE = "jobs"
MANY = schema.prefix(schema.Space.APP_STATE, "many")
# One commits, one listens; the others read.
CONNECTIONS_MAX = READERS_MAX + 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(standby=False) as found:
        yield found


class Operator:
    """Runs blocks, and does what the page says in words."""

    def __init__(self, cluster: Cluster) -> None:
        self.server: Server = cluster.primary
        self._bin, self._user = binaries(18)
        self.archive = cluster.folder / "archive"
        self.backup = cluster.folder / "backup"
        self.archive.mkdir()
        self._owned(self.archive)
        self.when = ""

    def url(self, user: str, database: str) -> str:
        return f"postgresql://{user}@127.0.0.1:{self.server.port}/{database}"

    @property
    def store(self) -> str:
        return self.url("holdfast_app", DATABASE)

    def restart_with_archive(self) -> None:
        copy = f"test ! -f {self.archive}/%f && cp %p {self.archive}/%f"
        self.server.settle(archive_mode="on", archive_command=copy)
        self.server.stop()
        self.server.start()

    def sql(self, text: str) -> str:
        made = self.server.ask(f"SELECT count(*) FROM pg_database WHERE datname = '{DATABASE}'")
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
            "WHEN": self.when,
        }
        return self._run(["bash", "-euc", text], "", names)

    def conf(self, text: str) -> None:
        with self.server.admin() as connection:
            for name, value in re.findall(r"^(\w+) = '?(.*?)'?$", text, re.MULTILINE):
                setting = sql.Identifier(name)
                take = sql.SQL("ALTER SYSTEM SET {} = {}").format(setting, sql.Literal(value))
                connection.execute(take)
                connection.execute(sql.SQL("ALTER SYSTEM RESET {}").format(setting))

    def restore_begins(self) -> None:
        self.server.stop()
        shutil.rmtree(self.server.data)

    def restore_ends(self) -> None:
        self._owned(self.server.data)
        self.server.start()
        self.server.await_(lambda: not self.server.ask("SELECT pg_is_in_recovery()"), "recovery")

    def note_the_time(self) -> None:
        self.when = str(self.server.ask("SELECT clock_timestamp()::text"))

    def _owned(self, path: Path) -> None:
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


def ready(store: Store) -> int:
    counts: queue.Counts = store.read(queue.counts, "mail")
    return counts.ready


def blocks() -> list[Block]:
    return blocks_of(PAGE.read_text(encoding="utf-8"))


def test_every_block_of_the_page_is_one_that_we_run() -> None:
    assert len(blocks()) == PAGE.read_text(encoding="utf-8").count("```") // 2
    assert {block.kind for block in blocks()} == {"sql", "sh", "conf"}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_page_does_what_it_says(cluster: Cluster) -> None:
    operator = Operator(cluster)
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
                operator.note_the_time()
                put(store, 5)
                claims += store.transact(queue.claim, "mail", "lost", 1, 600 * 10**9)
        elif "recovery.signal" in block.text:
            operator.restore_begins()
            operator.sh(block.text)
            operator.restore_ends()
        else:
            operator.sh(block.text)
    with stores.open(operator.store) as store:
        assert ready(store) == 7, "what was there at the time, and nothing after it"
        assert store.generation > generations[0]
        with pytest.raises(Fenced):
            store.transact(queue.ack, [claims[0].token])


@pytest.mark.slow
def test_a_role_without_more_privileges_than_the_page_grants_cannot_make_tables(
    cluster: Cluster,
) -> None:
    with cluster.primary.admin() as connection:
        connection.execute("CREATE ROLE outsider LOGIN")
        connection.execute("CREATE DATABASE elsewhere")
    url = f"postgresql://outsider@127.0.0.1:{cluster.primary.port}/elsewhere"
    with pytest.raises(Denied):
        stores.open(url)


@pytest.mark.slow
def test_a_process_has_no_more_connections_than_the_page_says(cluster: Cluster) -> None:
    told = re.search(r"at most \*\*(\d+)\*\*", PAGE.read_text(encoding="utf-8"))
    assert told is not None
    assert int(told[1]) == CONNECTIONS_MAX
    with cluster.primary.admin() as connection:
        connection.execute("CREATE DATABASE counted")
    url = f"postgresql://postgres@127.0.0.1:{cluster.primary.port}/counted"
    gate = threading.Barrier(READERS_MAX + 1)
    with stores.open(url) as store:
        put(store, 1)
        store.wait("nothing", 0, 0)
        keys = [MANY + tuples.pack_int(n) for n in range(SCANNED_MAX + 1)]
        store.transact(lambda txn: [txn.put(key, b"") for key in keys])

        def read() -> None:
            def look(txn: stores.Txn) -> None:
                # Without a limit, and much: that takes a snapshot, which takes a connection.
                assert len(txn.scan(MANY, tuples.after(MANY), None)) > SCANNED_MAX
                gate.wait(BLOCK_S)
                gate.wait(BLOCK_S)

            store.read(look)

        readers = [threading.Thread(target=read) for _ in range(READERS_MAX)]
        for reader in readers:
            reader.start()
        gate.wait(BLOCK_S)
        with psycopg.connect(url) as connection:
            row = connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = 'counted' "
                "AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            ).fetchone()
        gate.wait(BLOCK_S)
        for reader in readers:
            reader.join()
    assert row == (CONNECTIONS_MAX,)
