"""A refused open changes, adds and removes no file of the store.

The writers of these stores were killed. The redo log has commits that the LMDB file may lack, so that an open
starts with a recovery, which writes.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import lmdb
import msgspec
import pytest

from holdfast import failpoints
from holdfast import store as stores
from holdfast.config import MAP_BYTES
from holdfast.errors import HoldfastError, NotFound, SchemaMismatch, StoreCorrupt
from holdfast.store import schema
from holdfast.store.admin import raw_access
from holdfast.store.admin.copy import TargetNotEmpty, copy_store
from holdfast.store.lmdb import writer
from holdfast.store.lmdb.backup import restore_backup
from holdfast.store.lmdb.writer_address import (
    LOG_BYTES_MAX,
    LOG_FILE,
    WriterArguments,
)
from tests.process.conftest import LIMITS
from tests.process.refusal_checks import refused, untouched
from tests.process.watch import assert_no_process_left

pytestmark = pytest.mark.timeout(60)

MODULES = (
    "holdfast.store.lmdb.inspection",
    "holdfast.store.lmdb.recovered_view",
    "holdfast.store.lmdb.redo_log",
)

PAGE = 4096
ROWS = 60

# Commits through an engine in this process and kills the process, so that the redo log is not closed.
KILLED_WRITER_SCRIPT = """
import os, signal, sys
from pathlib import Path
from holdfast.store import schema
from holdfast.store.requests import CommitRequest
from holdfast.store.lmdb.writer import open_engine, try_lock

path = Path(sys.argv[1])
path.mkdir(parents=True, exist_ok=True)
lock = try_lock(path)
backend, engine = open_engine(path, bootstrap=True)
for n in range(int(sys.argv[2])):
    puts = {b"row %03d" % n: bytes([n % 256]) * 300}
    [answer] = engine.commit([CommitRequest(n + 1, b"client", backend.last_id(), puts=puts)])
    assert answer.error is None
    if n == int(sys.argv[2]) // 2:
        backend._redo_log.checkpoint()
        backend._redo_log._wait_for_checkpoint()
last = eval(sys.argv[3])
if last:
    txn = backend.begin()
    txn.put_many(list(last.items()))
    txn.commit()
os.kill(os.getpid(), signal.SIGKILL)
"""


def write_and_kill(path: Path, last: dict[bytes, bytes] | None = None) -> Path:
    """Make the store of a killed writer whose last commit has these rows. Equal stores are copies of the first."""
    made = _killed_stores.get(repr(last))
    if made is None:
        folder = tempfile.mkdtemp(prefix="hf-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
        made = _killed_stores[repr(last)] = Path(folder) / "store"
        _run_killed_writer(made, last)
    shutil.copytree(made, path, dirs_exist_ok=True)
    return path


_killed_stores: dict[str, Path] = {}


@pytest.fixture(scope="module", autouse=True)
def _remove_killed_stores() -> Iterator[None]:
    yield
    for path in _killed_stores.values():
        shutil.rmtree(path.parent)
    _killed_stores.clear()


def _run_killed_writer(path: Path, last: dict[bytes, bytes] | None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WRITER_SCRIPT, str(path), str(ROWS), repr(last or {})],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    assert done.returncode == -9, done.stderr.decode()


def assert_store_opens(path: Path) -> None:
    """Assert that the store opens, accepts a commit and has all rows."""
    with stores.open(path, limits=LIMITS) as store:
        store.transact(lambda txn: txn.put(("more",), b"1"))
    assert_no_process_left(path, LIMITS.idle_exit_s)
    env = lmdb.open(str(path), map_size=MAP_BYTES, readonly=True)
    with env.begin() as txn:
        rows = [txn.get(b"row %03d" % n) for n in range(ROWS)]
    env.close()
    assert rows == [bytes([n % 256]) * 300 for n in range(ROWS)]


def test_open_after_a_kill_recovers_every_row(home: Path) -> None:
    assert_store_opens(write_and_kill(home))


def test_writer_does_not_refuse_a_store_created_concurrently(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An inspection without the lock can read a partial state of another writer."""
    home.mkdir()
    lock = writer.WriterLock()

    def create_and_lock(path: Path) -> None:
        write_and_kill(path)
        assert lock.try_acquire(path)

    given = WriterArguments(str(home), True, 0.1, 1 << 20, 1.0)
    with (
        closing(lock),
        kept_stdout(),
        failpoints.on("redo_log.header_read", calls=create_and_lock, times=1) as header_read,
    ):
        assert writer.main([msgspec.json.encode(given).decode()]) == 0
    assert header_read.hits > 1
    assert capfd.readouterr().out == "held\n"


@contextmanager
def kept_stdout() -> Iterator[None]:
    """Restore the file descriptor 1, which a writer redirects after its status line."""
    kept = os.dup(1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def test_open_after_a_power_cut_recovers_every_row(home: Path) -> None:
    """The LMDB file is at its base, as after a power cut. The rows come from the redo log."""
    write_and_kill(home)
    stale_meta(home)
    assert_store_opens(home)


def stale_meta(home: Path) -> None:
    """Overwrite both meta pages with the meta page of the redo log's base, and all newer pages with garbage."""
    from holdfast.store.lmdb.redo_log import LOG_FILES, RedoHeader, _read_headers

    bases: list[RedoHeader] = [
        one for name in LOG_FILES for one in _read_headers(home / name) if one.meta
    ]
    base = max(bases, key=lambda one: one.epoch)
    last = struct.unpack_from("<Q", base.meta, 136)[0]
    with open(home / "data.mdb", "r+b") as file:
        for n in range(2):
            file.seek(n * PAGE)
            file.write(struct.pack("<Q", n) + base.meta[8:])
        size = file.seek(0, os.SEEK_END)
        for at in range((last + 1) * PAGE, size, PAGE):
            file.seek(at)
            file.write(bytes([0xA5]) * min(PAGE, size - at))


SCHEMAS: dict[str, bytes] = {
    "a newer minor version": schema.encode_marker(schema.SCHEMA_MAJOR, schema.SCHEMA_MINOR + 1),
    "a newer major version": schema.encode_marker(schema.SCHEMA_MAJOR + 1, 0),
    "an older version": schema.encode_marker(0, 0),
    "no version": b"what is this",
}


@pytest.mark.parametrize("marker", SCHEMAS)
@pytest.mark.parametrize("cut", [False, True], ids=["killed", "power cut"])
@pytest.mark.spec(
    "001",
    "Schema-version guard",
    "a store with a different marker in an unreplayed redo log is refused, and no file changes",
)
def test_schema_mismatch_in_an_unreplayed_redo_log_changes_no_file(
    home: Path, marker: str, cut: bool
) -> None:
    write_and_kill(home, {schema.MARKER_KEY: SCHEMAS[marker]})
    if cut:
        stale_meta(home)
    with untouched(home), refused(SchemaMismatch):
        stores.open(home, limits=LIMITS)


def test_unreadable_meta_row_or_outcome_is_store_corrupt(home: Path, tmp_path: Path) -> None:
    for n, key in enumerate((schema.META_KEY, schema.OUTCOME + b"\x15\x01")):
        path = write_and_kill(tmp_path / str(n), {key: b"\xc1 no record"})
        with untouched(path), refused(StoreCorrupt):
            stores.open(path, limits=LIMITS)


def header_bytes(fields: list[object], magic: bytes = b"holdfast redo 1\n") -> bytes:
    body = msgspec.msgpack.encode(fields)
    return magic + struct.pack("<II", zlib.crc32(body), len(body)) + body


def rewrite_headers(
    home: Path, change: Callable[[list[object]], list[object]], magic: bytes
) -> None:
    for name in ("redo.0", "redo.1"):
        with open(home / name, "r+b") as file:
            for at in (0, 2048):
                file.seek(at)
                data = file.read(512)
                if not any(data):
                    continue
                size = struct.unpack_from("<I", data, 20)[0]
                fields = msgspec.msgpack.decode(data[24 : 24 + size])
                file.seek(at)
                file.write(header_bytes(change(fields), magic))


def test_redo_log_of_another_schema_is_not_replayed(home: Path) -> None:
    write_and_kill(home)

    def newer(fields: list[object]) -> list[object]:
        assert fields[4] == [schema.SCHEMA_MAJOR, schema.SCHEMA_MINOR]
        return [*fields[:4], [schema.SCHEMA_MAJOR, schema.SCHEMA_MINOR + 1], *fields[5:]]

    rewrite_headers(home, newer, b"holdfast redo 1\n")
    with untouched(home), refused(SchemaMismatch):
        stores.open(home, limits=LIMITS)


def test_redo_log_of_another_format_is_schema_mismatch(home: Path) -> None:
    write_and_kill(home)
    rewrite_headers(home, lambda fields: fields, b"holdfast redo 2\n")
    with untouched(home), refused(SchemaMismatch):
        stores.open(home, limits=LIMITS)


def test_redo_log_without_salt_and_schema_is_replayed(home: Path) -> None:
    """Redo logs of earlier versions: records begin with the checksum, headers end with `closed`."""
    write_and_kill(home)
    salts: dict[str, bytes] = {}
    for name in ("redo.0", "redo.1"):
        data = bytearray((home / name).read_bytes())
        for at in (0, 2048):
            if any(data[at : at + 512]):
                size = struct.unpack_from("<I", data, at + 20)[0]
                fields = msgspec.msgpack.decode(bytes(data[at + 24 : at + 24 + size]))
                salts[name] = fields[5]
                old = header_bytes(fields[:4])
                data[at : at + 512] = old + bytes(512 - len(old))
        out, at = bytearray(data[:PAGE]), PAGE
        while salts[name] and data.startswith(salts[name], at):
            _, size, round, id = struct.unpack_from("<IIQQ", data, at + 8)
            body = bytes(data[at + 32 : at + 32 + size])
            tail = struct.pack("<IQQ", size, round, id)
            out += struct.pack("<I", zlib.crc32(body, zlib.crc32(tail))) + tail + body
            at += 32 + size
        (home / name).write_bytes(out.ljust(len(data), b"\0"))
    stale_meta(home)
    assert_store_opens(home)


DAMAGE: dict[str, Callable[[Path], None]] = {}


def damage(change: Callable[[Path], None]) -> Callable[[Path], None]:
    DAMAGE[change.__name__.replace("_", " ")] = change
    return change


def overwrite(file: Path, at: int, data: bytes) -> None:
    with open(file, "r+b") as opened:
        opened.seek(at)
        opened.write(data)


@damage
def a_header_is_garbage(home: Path) -> None:
    overwrite(home / "redo.0", 3, b"\xff" * 30)


@damage
def the_header_of_the_base_is_garbage(home: Path) -> None:
    overwrite(home / "redo.1", 2048 + 40, b"\xff" * 30)


@damage
def headers_are_zero(home: Path) -> None:
    overwrite(home / "redo.0", 0, bytes(PAGE))


@damage
def a_log_is_empty(home: Path) -> None:
    os.truncate(home / "redo.0", 0)


@damage
def a_log_is_missing(home: Path) -> None:
    (home / "redo.0").unlink()


@damage
def a_record_is_damaged_before_others(home: Path) -> None:
    overwrite(_log_in_use(home), PAGE + 100, b"\xff" * 8)


@damage
def the_data_file_is_missing(home: Path) -> None:
    (home / "data.mdb").unlink()


@damage
def both_meta_pages_are_zero(home: Path) -> None:
    overwrite(home / "data.mdb", 0, bytes(2 * PAGE))


@damage
def every_page_is_garbage(home: Path) -> None:
    size = (home / "data.mdb").stat().st_size
    overwrite(home / "data.mdb", 2 * PAGE, b"\x5a" * (size - 2 * PAGE))


@damage
def the_data_file_is_cut_off(home: Path) -> None:
    os.truncate(home / "data.mdb", 3 * PAGE)


@damage
def a_directory_is_in_the_place_of_the_socket(home: Path) -> None:
    (home / "writer.sock").unlink(missing_ok=True)
    (home / "writer.sock").mkdir()


@damage
def a_directory_is_in_the_place_of_the_table_of_readers(home: Path) -> None:
    (home / "lock.mdb").unlink(missing_ok=True)
    (home / "lock.mdb").mkdir(mode=0o755)


def _log_in_use(home: Path) -> Path:
    from holdfast.store.lmdb.redo_log import _read_headers

    return max(
        (home / name for name in ("redo.0", "redo.1")),
        key=lambda file: max(one.epoch for one in _read_headers(file)),
    )


@pytest.mark.parametrize("change", DAMAGE)
@pytest.mark.parametrize("lock_files", [True, False], ids=["as it was", "without lock files"])
def test_damaged_store_raises_store_corrupt_and_changes_no_file(
    home: Path, change: str, lock_files: bool
) -> None:
    write_and_kill(home)
    DAMAGE[change](home)
    if not lock_files:
        for name in ("lock.mdb", "writer.lock", "writer.log"):
            if (home / name).is_file():
                (home / name).unlink()
    for _ in range(2):
        with untouched(home), pytest.raises(StoreCorrupt):
            stores.open(home, limits=LIMITS)


def test_open_does_not_recreate_a_missing_data_file(home: Path) -> None:
    with stores.open(home, limits=LIMITS) as store:
        store.transact(lambda txn: txn.put(("row",), b"acknowledged"))
    assert_no_process_left(home, LIMITS.idle_exit_s)
    (home / "data.mdb").unlink()
    with untouched(home), refused(StoreCorrupt):
        stores.open(home, limits=LIMITS)


def test_only_a_successful_open_truncates_the_writer_log(home: Path) -> None:
    write_and_kill(home)
    (home / LOG_FILE).write_bytes(b"why it ended\n" * (LOG_BYTES_MAX // 10))
    header = _log_in_use(home).read_bytes()[:16]
    with open(_log_in_use(home), "r+b") as log:
        log.write(b"damaged")
    with untouched(home), refused(StoreCorrupt):
        stores.open(home, limits=LIMITS)
    damaged = next(one for one in home.glob("redo.?") if one.read_bytes().startswith(b"damaged"))
    with open(damaged, "r+b") as log:
        log.write(header)
    assert_store_opens(home)
    assert (home / LOG_FILE).stat().st_size <= LOG_BYTES_MAX


def test_open_without_bootstrap_refuses_a_store_without_marker(home: Path, tmp_path: Path) -> None:
    """The data file exists, and it is not a Holdfast store."""
    env = lmdb.open(str(home), map_size=MAP_BYTES)
    with env.begin(write=True) as txn:
        txn.put(b"theirs", b"1")
    env.close()
    with untouched(home), refused(NotFound):
        stores.open(home, bootstrap=False, limits=LIMITS)


# -- commands ----------------------------------------------------------------------------------------


def test_refused_restore_leaves_the_store_unchanged(home: Path, tmp_path: Path) -> None:
    write_and_kill(home)
    backup = tmp_path / "backup"
    backup.mkdir()
    shutil.copyfile(home / "data.mdb", backup / "data.mdb")
    size = (backup / "data.mdb").stat().st_size
    overwrite(backup / "data.mdb", 2 * PAGE, b"\x5a" * (size - 2 * PAGE))
    with untouched(home, backup), pytest.raises(StoreCorrupt):
        restore_backup(backup, home)
    with untouched(backup), pytest.raises(StoreCorrupt):
        restore_backup(backup, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert_store_opens(home)


@pytest.mark.parametrize("side", ["source", "target"])
def test_refused_copy_leaves_source_and_target_unchanged(
    home: Path, tmp_path: Path, side: str
) -> None:
    other = tmp_path / "other"
    if side == "source":
        write_and_kill(home, {schema.MARKER_KEY: schema.encode_marker(schema.SCHEMA_MAJOR + 1, 0)})
    else:
        write_and_kill(home)
        # Another store, not a copy of the first.
        _run_killed_writer(other, None)
    kind: type[HoldfastError] = SchemaMismatch if side == "source" else TargetNotEmpty
    kept = (home,) if side == "source" else (home, other)

    def copies() -> None:
        with ExitStack() as opened:
            here = opened.enter_context(closing(raw_access.open_source(f"lmdb:{home}")))
            there = opened.enter_context(closing(raw_access.open_target(f"lmdb:{other}")))
            copy_store(here, there, keep_source=True, progress=lambda *_: None)

    with untouched(*kept), pytest.raises(kind):
        copies()
