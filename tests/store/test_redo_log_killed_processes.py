"""The redo log with processes that are killed, or system calls that fail, at one exact point."""

from __future__ import annotations

import errno
import queue
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import lmdb
import pytest

from holdfast import failpoints
from holdfast.config import MAP_BYTES, READERS_MAX
from holdfast.errors import StoreError, StoreFull
from holdfast.store.lmdb import redo_log
from holdfast.store.lmdb.backend import LmdbBackend
from holdfast.store.lmdb.redo_log import DATA_FILE, LOG_FILES, RedoLog

Rows = dict[bytes, bytes]
KEYS = 200
DEADLINE_S = 60

# Starts a recovery and is killed before it replays the commit with the given number.
KILLED_IN_RECOVERY = """
import os, signal, sys
from pathlib import Path
from holdfast import failpoints
from holdfast.store.lmdb import backend

def die_at(id):
    if id == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

with failpoints.on("redo_log.replay_commit", calls=die_at):
    backend.LmdbBackend(Path(sys.argv[1]), readonly=False, logged=True)
"""

# Opens the file and reads nothing.
IDLE_READER = """
import lmdb, sys
env = lmdb.open(sys.argv[1], readonly=True, map_size=int(sys.argv[2]), max_readers=int(sys.argv[3]))
print("open", flush=True)
sys.stdin.read()
"""

# Opens snapshots until the reader table is full.
READER_TABLE_FILLER = """
import lmdb, sys
env = lmdb.open(sys.argv[1], readonly=True, map_size=int(sys.argv[2]), max_readers=int(sys.argv[3]))
taken = []
try:
    while True:
        taken.append(env.begin())
except lmdb.ReadersFullError:
    print(len(taken), flush=True)
sys.stdin.read()
"""

# Commits, and is killed inside its next write transaction, which holds the write lock.
KILLED_IN_COMMIT = """
import os, signal, sys
from pathlib import Path
from holdfast.store.lmdb.backend import LmdbBackend
backend = LmdbBackend(Path(sys.argv[1]), readonly=False, logged=True)
for n in range(5):
    txn = backend.begin()
    txn.put_many([(b"n", b"%d" % n)])
    txn.commit()
backend._redo_log._wait_for_checkpoint()
txn = backend.begin()
print(txn.id - 1, flush=True)
sys.stdin.read()
"""


# Makes many commits after its base and appends one more record to the log without the commit in LMDB.
WRITER_WITH_UNCOMMITTED_RECORD = """
import sys
from pathlib import Path
from holdfast.store.lmdb import redo_log
from holdfast.store.lmdb.backend import LmdbBackend
redo_log.REDO_COMMITS = redo_log.REDO_BYTES = 10**9
backend = LmdbBackend(Path(sys.argv[1]), readonly=False, logged=True)
def change(rows, committed=True):
    txn = backend.begin()
    txn.put_many(rows)
    if committed:
        txn.commit()
    else:
        backend._redo_log.append(txn.id, rows)
        txn.abort()
change([(b"k%03d" % n, bytes([n]) * 1500) for n in range(200)])
backend._redo_log.checkpoint()
backend._redo_log._wait_for_checkpoint()
for n in range(60):
    change([(b"k%03d" % ((n * 14 + m * 50) % 200), bytes([n]) * 1400) for m in range(4)], committed=n < 59)
print("logged", flush=True)
sys.stdin.read()
"""

# Recovers, and is killed before it starts a new log.
KILLED_AFTER_RECOVERY = """
import os, signal, sys
from pathlib import Path
from holdfast import failpoints
from holdfast.store.lmdb import backend
with failpoints.on("redo_log.replayed", calls=lambda _: os.kill(os.getpid(), signal.SIGKILL)):
    backend.LmdbBackend(Path(sys.argv[1]), readonly=False, logged=True)
"""


class SimulatedKill(BaseException):
    pass


def logged(path: Path) -> LmdbBackend:
    return LmdbBackend(path, readonly=False, logged=True)


def put(backend: LmdbBackend, rows: Rows) -> None:
    txn = backend.begin()
    txn.put_many(list(rows.items()))
    txn.commit()


def rows_of(backend: LmdbBackend) -> Rows:
    with closing(backend.snapshot()) as snapshot:
        return dict(snapshot.scan(b"\0", b"\xff", None, False))


def redo_log_of(backend: LmdbBackend) -> RedoLog:
    assert backend._redo_log is not None
    return backend._redo_log


def close_as_killed(backend: LmdbBackend) -> None:
    redo_log_of(backend)._wait_for_checkpoint()
    redo_log_of(backend).close_files()
    backend.env.close()


def killed_store_with_long_log(path: Path, patch: pytest.MonkeyPatch) -> Rows:
    """Create a killed store whose log replays more pages than its file has free."""
    patch.setattr(redo_log, "REDO_COMMITS", 10**9)
    patch.setattr(redo_log, "REDO_BYTES", 10**9)
    # Without the reservation a log file has the size of its records.
    patch.setattr(redo_log.os, "posix_fallocate", lambda *_: None)
    backend = logged(path)
    rows = {b"k%03d" % n: bytes([n]) * 1500 for n in range(KEYS)}
    put(backend, rows)
    redo_log_of(backend).checkpoint()
    redo_log_of(backend)._wait_for_checkpoint()
    for n in range(60):
        change = {b"k%03d" % ((n * 7 + m) % KEYS): bytes([n + m]) * 1400 for m in range(4)}
        put(backend, change)
        rows |= change
    close_as_killed(backend)
    return rows


@contextmanager
def python_child(script: str, *args: object) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def test_consecutive_killed_recoveries_lose_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = killed_store_with_long_log(tmp_path, monkeypatch)
    for id in (30, 55, 45):
        with python_child(KILLED_IN_RECOVERY, tmp_path, id) as process:
            assert process.wait(DEADLINE_S) == -signal.SIGKILL
    with closing(logged(tmp_path)) as backend:
        assert rows_of(backend) == rows


def test_store_recovers_after_a_kill_between_data_and_lock_file_writes(
    tmp_path: Path,
) -> None:
    with python_child(KILLED_IN_COMMIT, tmp_path) as writer:
        assert writer.stdout is not None
        last = int(writer.stdout.readline())
        with python_child(IDLE_READER, tmp_path, MAP_BYTES, READERS_MAX) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline()
            writer.kill()
            writer.wait(DEADLINE_S)
            _set_lock_file_back(tmp_path, last)
            with python_child(KILLED_IN_RECOVERY, tmp_path, 0) as second:
                assert second.wait(DEADLINE_S) == 0
    with closing(logged(tmp_path)) as backend:
        put(backend, {b"after": b"1"})
        assert rows_of(backend) == {b"n": b"4", b"after": b"1"}


def test_recovery_killed_with_open_readers_keeps_the_base(
    tmp_path: Path,
) -> None:
    with python_child(WRITER_WITH_UNCOMMITTED_RECORD, tmp_path) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline()
        with python_child(IDLE_READER, tmp_path, MAP_BYTES, READERS_MAX) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline()
            writer.kill()
            writer.wait(DEADLINE_S)
            with python_child(KILLED_AFTER_RECOVERY, tmp_path) as second:
                assert second.wait(DEADLINE_S) == -signal.SIGKILL
    rows = {b"k%03d" % n: bytes([n]) * 1500 for n in range(KEYS)}
    for n in range(60):
        # Half of the rows keep the values of the base.
        rows |= {b"k%03d" % ((n * 14 + m * 50) % KEYS): bytes([n]) * 1400 for m in range(4)}
    with closing(logged(tmp_path)) as backend:
        assert rows_of(backend) == rows


def _set_lock_file_back(path: Path, last: int) -> None:
    """Set the transaction number in LMDB's lock file to the state before the last step of a commit."""
    with open(path / "lock.mdb", "r+b") as lock:
        at = lock.read(128).index(struct.pack("<Q", last))
        lock.seek(at)
        lock.write(struct.pack("<Q", last - 1))


@pytest.mark.parametrize("commits", [1, 2])
def test_recovered_store_closed_without_a_commit_opens_again(tmp_path: Path, commits: int) -> None:
    """Recovery writes the same commit to both meta pages, and each page keeps its own page number."""
    backend = logged(tmp_path)
    for n in range(commits):
        put(backend, {b"n": b"%d" % n})
    redo_log_of(backend).checkpoint()
    close_as_killed(backend)
    logged(tmp_path).close()
    backend = logged(tmp_path)
    assert rows_of(backend) == {b"n": b"%d" % (commits - 1)}
    backend.close()


def test_file_without_its_last_unused_pages_is_checked_once(tmp_path: Path) -> None:
    backend = logged(tmp_path)
    for _ in range(10):
        # Free pages become reusable when no snapshot needs them.
        put(backend, {b"a": b"1"})
        redo_log_of(backend).checkpoint()
        redo_log_of(backend)._wait_for_checkpoint()
    txn = backend.begin()
    txn.put_many([(b"c", b"2"), (b"b", bytes(1 << 20))])
    txn.delete(b"b")
    txn.commit()
    backend.close()
    with failpoints.on("lmdb.check_pages") as check_pages:
        for _ in range(3):
            backend = logged(tmp_path)
            assert rows_of(backend) == {b"a": b"1", b"c": b"2"}
            backend.close()
    assert check_pages.hits == 1


@pytest.mark.parametrize("rounds", [1, 2])
def test_store_opens_after_a_kill_during_the_removal_of_redo_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    backend = logged(tmp_path)
    for _ in range(rounds):
        put(backend, {b"a": b"1"})
        put(backend, {b"a": b"2"})
        redo_log_of(backend).checkpoint()
        redo_log_of(backend)._wait_for_checkpoint()
    put(backend, {b"a": b"3"})
    close_as_killed(backend)
    unlink = Path.unlink
    removed: list[Path] = []

    def first(self: Path, missing_ok: bool = False) -> None:
        if removed:
            raise SimulatedKill
        removed.append(self)
        unlink(self, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", first)
        with pytest.raises(SimulatedKill):
            LmdbBackend(tmp_path, readonly=False)
    assert len([name for name in LOG_FILES if (tmp_path / name).exists()]) == 1
    before = (tmp_path / DATA_FILE).read_bytes()
    redo_log.RedoRecovery(tmp_path).restore_base()
    assert (tmp_path / DATA_FILE).read_bytes() == before
    with closing(logged(tmp_path)) as again:
        assert rows_of(again) == {b"a": b"3"}


def test_long_redo_log_is_not_truncated_before_the_next_log_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = killed_store_with_long_log(tmp_path, monkeypatch)
    backend = logged(tmp_path)
    for n in range(20):
        rows |= (change := {b"k%03d" % n: bytes([n]) * 3000})
        put(backend, change)
    redo_log_of(backend)._sync_jobs = queue.SimpleQueue()  # not served: the checkpoint never ends
    redo_log_of(backend).checkpoint()
    put(backend, {b"k000": b"0"})
    rows[b"k000"] = b"0"
    redo_log_of(backend).close_files()
    backend.env.close()
    monkeypatch.setattr(redo_log, "REDO_BYTES_MAX", 20_000)
    with (
        failpoints.on("redo_log.begin_epoch", raises=SimulatedKill),
        pytest.raises(SimulatedKill),
    ):
        logged(tmp_path)
    with closing(logged(tmp_path)) as backend:
        assert rows_of(backend) == rows


def test_restore_of_the_meta_page_excludes_other_openers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_store_with_long_log(tmp_path, monkeypatch)
    blocked: list[bool] = []

    def try_lock(path: Path) -> None:
        probe = "import fcntl,sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_SH | fcntl.LOCK_NB, 1, 0)"
        command = [sys.executable, "-c", probe, str(path / "lock.mdb")]
        done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S)
        blocked.append(b"BlockingIOError" in done.stderr)

    with failpoints.on("redo_log.restore_meta", calls=try_lock):
        redo_log.RedoRecovery(tmp_path).restore_base()
    assert blocked == [True]


def test_full_reader_table_does_not_fail_commits_and_checkpoints(tmp_path: Path) -> None:
    backend = logged(tmp_path)
    put(backend, {b"a": b"0"})
    with python_child(READER_TABLE_FILLER, tmp_path, MAP_BYTES, READERS_MAX) as crowd:
        assert crowd.stdout is not None
        assert int(crowd.stdout.readline()) > READERS_MAX // 2
        for n in range(5):
            put(backend, {b"a": b"%d" % n})
            redo_log_of(backend).checkpoint()
            redo_log_of(backend)._wait_for_checkpoint()
    backend.close()


def test_close_syncs_all_commits_with_a_full_reader_table(
    tmp_path: Path,
) -> None:
    backend = logged(tmp_path)
    put(backend, {b"a": b"1"})
    env = backend.env
    synced: list[int] = []

    class FullReaderTableEnv:
        def begin(self) -> NoReturn:
            raise lmdb.ReadersFullError("no place")

        def sync(self, force: bool) -> None:
            env.sync(force)
            synced.append(int(env.info()["last_txnid"]))

    redo_log_of(backend)._env = FullReaderTableEnv()  # type: ignore[assignment]
    put(backend, {b"a": b"2"})
    backend.close()
    assert synced == [2]


def test_failed_append_keeps_the_last_redo_record(tmp_path: Path) -> None:
    backend = logged(tmp_path)
    put(backend, {b"a": b"1"})
    with (
        failpoints.on("redo_log.append", raises=lmdb.ReadersFullError("no place")),
        pytest.raises(Exception, match="no place"),
    ):
        put(backend, {b"b": b"2"})
    assert [id for id, _ in _records(tmp_path)] == [1]
    close_as_killed(backend)
    with closing(logged(tmp_path)) as again:
        assert rows_of(again) == {b"a": b"1"}


def _records(path: Path) -> list[tuple[int, bytes]]:
    headers = [
        header
        for name in LOG_FILES
        if (header := redo_log._read_latest_header(path / name)) is not None
    ]
    return list(redo_log._iter_records(path, max(headers, key=lambda header: header.epoch)))


def test_failed_redo_log_sync_raises_store_error_not_store_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = logged(tmp_path)
    put(backend, {b"a": b"1"})

    def full(fd: int) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(redo_log.os, "fdatasync", full)
        with pytest.raises(StoreError) as refused:
            put(backend, {b"b": b"2"})
    # The commit may be durable after a reopen, but StoreFull means that it is not committed.
    assert not isinstance(refused.value, StoreFull)
    with pytest.raises(StoreError):
        put(backend, {b"c": b"3"})
    backend.env.close()
    with closing(logged(tmp_path)) as again:
        assert rows_of(again) == {b"a": b"1", b"b": b"2"}


def test_checkpoint_that_cannot_start_fails_the_next_commit_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redo_log, "REDO_COMMITS", 1)
    backend = logged(tmp_path)
    redo_log_of(backend)._wait_for_checkpoint()

    def broken(fd: int, size: int, at: int) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(redo_log.os, "pread", broken)
        put(backend, {b"a": b"1"})
    with pytest.raises(StoreError, match="Input/output"):
        put(backend, {b"b": b"2"})
    assert rows_of(backend) == {b"a": b"1"}
    backend.env.close()


@pytest.mark.parametrize(("commits_max", "bytes_max"), [(20, 10**9), (10**9, 10_000)])
def test_commits_wait_for_a_checkpoint_at_the_redo_log_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commits_max: int, bytes_max: int
) -> None:
    class CheckpointAwaited(Exception):
        pass

    monkeypatch.setattr(redo_log, "REDO_COMMITS_MAX", commits_max)
    monkeypatch.setattr(redo_log, "REDO_BYTES_MAX", bytes_max)
    backend = logged(tmp_path)
    redo_log_of(backend)._sync_jobs = queue.SimpleQueue()  # not served
    put(backend, {b"n": b"0"})
    redo_log_of(backend).checkpoint()
    commits = 0
    with (
        failpoints.on("redo_log.checkpoint_wait", raises=CheckpointAwaited),
        suppress(CheckpointAwaited),
    ):
        while commits < 100:
            put(backend, {b"n": b"1" * 500})
            commits += 1
    assert 0 < commits < 30
    redo_log_of(backend).close_files()
    backend.env.close()


def test_redo_record_larger_than_the_log_bound_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redo_log, "REDO_BYTES_MAX", 64 * 1024)
    backend = logged(tmp_path)
    for n in range(4):
        rows = {b"big": bytes([n]) * 3_000_000, b"n": b"%d" % n}
        put(backend, rows)
    close_as_killed(backend)
    with closing(logged(tmp_path)) as again:
        assert rows_of(again) == rows
