"""The schema upgrade from 0.2 to 0.6: an open for writing raises the marker, and older code refuses the store then."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from holdfast import store as stores
from holdfast.clock import SimClock
from holdfast.config import WriterLimits
from holdfast.errors import NotFound, SchemaMismatch
from holdfast.store import schema
from holdfast.store.admin import raw_access
from holdfast.store.admin.copy import copy_store
from holdfast.store.admin.new_generation import start_new_generation
from holdfast.store.api import Store
from holdfast.store.engine import StoreEngine, check_schema
from holdfast.store.lmdb.backup import restore_backup
from holdfast.store.lmdb.inspection import inspect_store
from holdfast.store.lmdb.redo_log import LOG_FILES, RedoRecovery, _read_headers
from holdfast.store.memory_backend import MemoryBackend
from holdfast.store.postgres.store import PostgresStore
from holdfast.store.requests import CommitRequest
from holdfast.store.schema import SCHEMA_VERSION, SchemaMatch
from tests.postgres import fresh_url
from tests.process.refusal_checks import refused, untouched
from tests.store.former_store import CLOSED, KILLED, unpack_store

pytestmark = pytest.mark.timeout(120)

LIMITS = WriterLimits(idle_exit_s=0.2, reader_check_s=0.2)
FORMER, CURRENT, NEWER = b"RSV0\0\0\2\0", b"RSV0\0\0\6\0", b"RSV0\0\0\7\0"
OPENERS = 6


@pytest.fixture(params=[CLOSED, KILLED])
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a 0.2 store. The redo log of the killed one has to be replayed."""
    return unpack_store(tmp_path, request.param, monkeypatch)


@pytest.fixture
def url() -> str:
    """The URL of a 0.2 store in PostgreSQL that has commits."""
    url = fresh_url(empty=True)
    with PostgresStore(url) as store:
        put(store, b"a")
        put(store, b"b")
    set_marker(url, FORMER)
    return url


def put(store: Store, key: bytes) -> None:
    store.transact(lambda txn: txn.put(key, b"1"))


def execute(url: str, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        found = connection.execute(statement.encode(), parameters)
        return found.fetchall() if found.description else []


def set_marker(url: str, marker: bytes) -> None:
    execute(
        url, "UPDATE holdfast_row SET value = %s WHERE key = %s", bytes(marker), schema.MARKER_KEY
    )


def marker_in_postgres(url: str) -> bytes:
    [(marker,)] = execute(url, "SELECT value FROM holdfast_row WHERE key = %s", schema.MARKER_KEY)
    return bytes(marker)


def marker_in_directory(path: Path) -> bytes | None:
    """The marker after a recovery. Reads the files only."""
    with RedoRecovery(path).open_view() as view:
        assert view is not None
        return view.get(schema.MARKER_KEY)


def versions_in_use(path: Path) -> set[tuple[int, int] | None]:
    """The versions in the headers of the logs that a recovery replays."""
    headers = [header for name in LOG_FILES for header in _read_headers(path / name)]
    last = max(header.epoch for header in headers)
    if any(header.closed and header.epoch == last for header in headers):
        return set()
    return {header.schema for header in headers if header.epoch >= last - 1}


# -- the decision --------------------------------------------------------------------------------

DECISIONS = [
    # found, expected, the decision
    ((0, 6), (0, 6), SchemaMatch.SAME),
    ((0, 2), (0, 6), SchemaMatch.UPGRADE),
    ((0, 3), (0, 6), SchemaMatch.UPGRADE),
    ((0, 4), (0, 6), SchemaMatch.UPGRADE),
    ((0, 5), (0, 6), SchemaMatch.UPGRADE),
    ((0, 1), (0, 6), SchemaMatch.REFUSE),
    ((0, 0), (0, 6), SchemaMatch.REFUSE),
    ((0, 7), (0, 6), SchemaMatch.REFUSE),
    ((1, 2), (0, 6), SchemaMatch.REFUSE),
    ((1, 3), (0, 6), SchemaMatch.REFUSE),
    # A user's own version must match.
    ((7, 1), (7, 1), SchemaMatch.SAME),
    ((7, 0), (7, 1), SchemaMatch.REFUSE),
    ((0, 2), (7, 1), SchemaMatch.REFUSE),
    ((0, 2), (0, 7), SchemaMatch.REFUSE),
    ((0, 6), (0, 2), SchemaMatch.REFUSE),
]


@pytest.mark.parametrize(("found", "expected", "decision"), DECISIONS)
def test_versions_are_compared_by_the_table(
    found: tuple[int, int], expected: tuple[int, int], decision: SchemaMatch
) -> None:
    assert SCHEMA_VERSION == (0, 6)
    assert schema.compare_versions(found, expected) is decision
    marker = schema.encode_marker(*found)
    if decision is SchemaMatch.SAME:
        assert check_schema(marker, expected, bootstrap=False)
        assert check_schema(marker, expected, bootstrap=False, allow_upgrade=True)
        return
    with pytest.raises(SchemaMismatch):
        check_schema(marker, expected, bootstrap=True)
    if decision is SchemaMatch.UPGRADE:
        assert not check_schema(marker, expected, bootstrap=False, allow_upgrade=True)
        return
    with pytest.raises(SchemaMismatch):
        check_schema(marker, expected, bootstrap=True, allow_upgrade=True)


@pytest.mark.parametrize("allow_upgrade", [False, True])
def test_a_missing_marker_needs_bootstrap_and_is_not_current(allow_upgrade: bool) -> None:
    assert not check_schema(None, SCHEMA_VERSION, bootstrap=True, allow_upgrade=allow_upgrade)
    with pytest.raises(NotFound):
        check_schema(None, SCHEMA_VERSION, bootstrap=False, allow_upgrade=allow_upgrade)


# -- the engine ----------------------------------------------------------------------------------


def test_the_engine_raises_the_marker_in_one_commit_before_the_first_request() -> None:
    backend, clock = MemoryBackend(), SimClock()
    former = StoreEngine(backend, clock)
    [answer] = former.commit([CommitRequest(1, b"client", backend.last_id(), puts={b"k": b"1"})])
    backend.set(schema.MARKER_KEY, FORMER)
    before = backend.last_id()
    engine = StoreEngine(backend, clock, bootstrap=False)
    assert backend.get(schema.MARKER_KEY) == CURRENT
    assert backend.last_id() == before + 1
    assert engine.commit_no == answer.commit_no
    StoreEngine(backend, clock, bootstrap=False)
    assert backend.last_id() == before + 1


def test_the_engine_of_a_users_own_version_upgrades_nothing() -> None:
    backend = MemoryBackend()
    StoreEngine(backend, SimClock(), schema_version=(0, 2))
    with pytest.raises(SchemaMismatch):
        StoreEngine(backend, SimClock(), schema_version=(0, 7))
    assert backend.get(schema.MARKER_KEY) == FORMER


# -- LMDB ----------------------------------------------------------------------------------------


def test_an_open_raises_the_marker_of_a_directory(home: Path) -> None:
    assert marker_in_directory(home) == FORMER
    with stores.open(home, limits=LIMITS, bootstrap=False) as store:
        # Durable before the client has sent anything.
        assert marker_in_directory(home) == CURRENT
        put(store, b"new")
        assert store.generation == 1
    assert marker_in_directory(home) == CURRENT
    with stores.open(home, limits=LIMITS, bootstrap=False) as store:
        assert store.read(lambda txn: txn.get(b"new")) == b"1"


def test_an_inspection_changes_nothing(home: Path) -> None:
    with untouched(home):
        inspect_store(home, bootstrap=False)
    assert marker_in_directory(home) == FORMER


# Opens the engine of a directory and kills its own process at a point of the upgrade.
KILLED_AT = """
import os, signal, sys
from pathlib import Path
from holdfast.store.engine import StoreEngine
from holdfast.store.lmdb import redo_log
from holdfast.store.lmdb.writer import open_engine

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def die_after(method):
    def run(*args):
        method(*args)
        die()
    return run

point = sys.argv[2]
if point == "before replay":
    redo_log.RedoRecovery.replay = die
elif point == "before commit":
    StoreEngine._open = die
elif point == "before append":
    redo_log.RedoLog.append = die
elif point == "after append":
    redo_log.RedoLog.append = die_after(redo_log.RedoLog.append)
elif point == "after commit":
    redo_log.RedoLog.on_committed = die
open_engine(Path(sys.argv[1]), bootstrap=False)
backend = None
die()
"""


@pytest.mark.parametrize(
    ("point", "marker"),
    [
        ("before replay", FORMER),
        ("before commit", FORMER),
        ("before append", FORMER),
        ("after append", CURRENT),
        ("after commit", CURRENT),
        ("after open", CURRENT),
    ],
)
def test_a_crash_during_the_upgrade_leaves_one_of_both_versions(
    home: Path, point: str, marker: bytes
) -> None:
    died = subprocess.run(
        [sys.executable, "-c", KILLED_AT, str(home), point], capture_output=True, timeout=60
    )
    assert died.returncode == -9, died.stderr.decode()
    assert marker_in_directory(home) == marker
    # Former code reads the headers of the logs first and refuses any version but its own. The upgrade is a record
    # after a base of 0.2, so the headers let it read the marker.
    assert versions_in_use(home) <= {(0, 2)}
    stores.open(home, limits=LIMITS, bootstrap=False).close()
    assert marker_in_directory(home) == CURRENT


def test_a_checkpoint_after_the_upgrade_has_the_new_version(home: Path) -> None:
    script = KILLED_AT.replace(
        "backend = None", "backend._redo_log.checkpoint(); backend._redo_log._wait_for_checkpoint()"
    ).replace("open_engine(Path", "backend, _ = open_engine(Path")
    died = subprocess.run(
        [sys.executable, "-c", script, str(home), "never"], capture_output=True, timeout=60
    )
    assert died.returncode == -9, died.stderr.decode()
    assert (0, 6) in versions_in_use(home)
    stores.open(home, limits=LIMITS, bootstrap=False).close()


def test_a_directory_of_a_newer_minor_version_is_refused_unchanged(home: Path) -> None:
    with closing(raw_access.open_source(str(home))) as raw_store:
        raw_store.write_marker(NEWER)
    with untouched(home), refused(SchemaMismatch):
        stores.open(home, limits=LIMITS)


def test_a_restored_backup_keeps_its_version_until_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = unpack_store(tmp_path, CLOSED, monkeypatch)
    for name in LOG_FILES:
        (backup / name).unlink()
    target = tmp_path / "restored"
    with untouched(backup):
        restore_backup(backup, target)
    assert marker_in_directory(target) == FORMER
    stores.open(target, limits=LIMITS, bootstrap=False).close()
    assert marker_in_directory(target) == CURRENT
    shutil.rmtree(target)


@pytest.mark.parametrize("to", ["lmdb", "postgresql"])
@pytest.mark.parametrize("keep_source", [True, False], ids=["copy", "move"])
def test_a_copy_has_the_current_version(
    home: Path, tmp_path: Path, to: str, keep_source: bool
) -> None:
    target_url = str(tmp_path / "target") if to == "lmdb" else fresh_url(empty=True)
    with (
        closing(raw_access.open_source(str(home))) as source,
        closing(raw_access.open_target(target_url)) as target,
    ):
        copy_store(source, target, keep_source=keep_source, progress=lambda *_: None)
        assert target.marker() == CURRENT
        assert (source.marker() == FORMER) is keep_source
    stores.open(target_url, bootstrap=False).close()


# -- PostgreSQL ----------------------------------------------------------------------------------


def test_an_open_raises_the_marker_of_a_database_as_a_commit(url: str) -> None:
    [(no, at_ns)] = execute(url, "SELECT max(no), max(at_ns) FROM holdfast_commit")
    with PostgresStore(url, bootstrap=False) as store:
        assert marker_in_postgres(url) == CURRENT
        [(raised_no, raised_ns)] = execute(
            url, "SELECT no, at_ns FROM holdfast_commit ORDER BY no DESC LIMIT 1"
        )
        assert raised_no == no + 1
        assert at_ns < raised_ns <= store.now_ns()
        put(store, b"c")
    with PostgresStore(url, bootstrap=False) as store:
        assert store.read(lambda txn: txn.get(b"c")) == b"1"
    assert execute(url, "SELECT max(no) FROM holdfast_commit") == [(no + 2,)]


def test_a_process_of_the_former_version_cannot_commit_after_the_upgrade(url: str) -> None:
    set_marker(url, CURRENT)
    with PostgresStore(url) as former:
        # The store as former code has it open.
        former._engine._version = (0, 2)
        set_marker(url, FORMER)
        put(former, b"c")
        with PostgresStore(url) as store:
            with pytest.raises(SchemaMismatch):
                put(former, b"d")
            put(store, b"e")
            with pytest.raises(SchemaMismatch):
                put(former, b"f")
            found = store.read(lambda txn: [txn.get(key) for key in (b"c", b"d", b"e", b"f")])
    assert found == [b"1", None, b"1", None]


def test_processes_that_open_a_database_at_once_raise_its_marker_once(url: str) -> None:
    [(no,)] = execute(url, "SELECT max(no) FROM holdfast_commit")
    start = threading.Barrier(OPENERS)
    opened: list[PostgresStore] = []

    def open_store() -> None:
        start.wait(30)
        opened.append(PostgresStore(url, bootstrap=False))

    openers = [threading.Thread(target=open_store) for _ in range(OPENERS)]
    for opener in openers:
        opener.start()
    for opener in openers:
        opener.join(60)
    assert len(opened) == OPENERS
    assert marker_in_postgres(url) == CURRENT
    assert execute(url, "SELECT max(no) FROM holdfast_commit") == [(no + 1,)]
    for n, store in enumerate(opened):
        put(store, b"of %d" % n)
    for store in opened:
        store.close()


def test_an_open_that_fails_during_the_upgrade_leaves_the_former_version(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.store.postgres import session

    monkeypatch.setattr(session, "_RECORD_COMMIT", "SELECT 1 / 0, %b, %b")
    with pytest.raises(Exception, match="division by zero"):
        PostgresStore(url, bootstrap=False)
    assert marker_in_postgres(url) == FORMER
    monkeypatch.undo()
    PostgresStore(url, bootstrap=False).close()
    assert marker_in_postgres(url) == CURRENT


def test_a_database_that_lost_the_upgrade_is_refused_until_it_is_opened_again(url: str) -> None:
    """A lagging standby became the primary: the commit of the upgrade is lost."""
    with PostgresStore(url) as store:
        set_marker(url, FORMER)
        execute(url, "DELETE FROM holdfast_commit WHERE no = (SELECT max(no) FROM holdfast_commit)")
        store._engine._disconnect()
        with pytest.raises(SchemaMismatch):
            put(store, b"c")
    with PostgresStore(url) as store:
        put(store, b"c")
    assert marker_in_postgres(url) == CURRENT


def test_a_new_generation_keeps_the_version_until_the_next_open(url: str) -> None:
    start_new_generation(url)
    assert marker_in_postgres(url) == FORMER
    PostgresStore(url, bootstrap=False).close()
    assert marker_in_postgres(url) == CURRENT


def test_a_database_of_a_newer_minor_version_is_refused_unchanged(url: str) -> None:
    set_marker(url, NEWER)
    before = execute(url, "SELECT max(no) FROM holdfast_commit")
    with pytest.raises(SchemaMismatch):
        PostgresStore(url)
    assert marker_in_postgres(url) == NEWER
    assert execute(url, "SELECT max(no) FROM holdfast_commit") == before
