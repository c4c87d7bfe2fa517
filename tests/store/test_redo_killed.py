"""The redo log and processes that are killed, or that are refused something, at one particular point."""

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

from holdfast.config import MAP_BYTES, READERS_MAX
from holdfast.errors import StoreError, StoreFull
from holdfast.store import redo
from holdfast.store.pages import Pages
from holdfast.store.redo import DATA, FILES, Redo
from holdfast.store.rows import LmdbBackend

Rows = dict[bytes, bytes]
KEYS = 200
DEADLINE_S = 60

# Recovers, and is killed before the commit of that number is done again.
RECOVERS = """
import os, signal, sys
from pathlib import Path
from holdfast.store import redo, rows

def commit(self, env, id, body, real=redo.Recovery._commit):
    if id == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, env, id, body)

redo.Recovery._commit = commit
rows.LmdbBackend(Path(sys.argv[1]), readonly=False, logged=True)
"""

# Has the file open, and reads nothing.
READS = """
import lmdb, sys
env = lmdb.open(sys.argv[1], readonly=True, map_size=int(sys.argv[2]), max_readers=int(sys.argv[3]))
print("open", flush=True)
sys.stdin.read()
"""

# Has as many snapshots as there may be.
CROWDS = """
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

# Commits, and is killed in its next commit with the lock on it.
WRITES = """
import os, signal, sys
from pathlib import Path
from holdfast.store.rows import LmdbBackend
backend = LmdbBackend(Path(sys.argv[1]), readonly=False, logged=True)
for n in range(5):
    txn = backend.begin()
    txn.put_many([(b"n", b"%d" % n)])
    txn.commit()
backend._redo._wait()
txn = backend.begin()
print(txn.id - 1, flush=True)
sys.stdin.read()
"""


# Commits much after its base, and logs one thing more that LMDB is not told of.
GOES_ON = """
import sys
from pathlib import Path
from holdfast.store import redo
from holdfast.store.rows import LmdbBackend
redo.REDO_COMMITS = redo.REDO_BYTES = 10**9
backend = LmdbBackend(Path(sys.argv[1]), readonly=False, logged=True)
def change(rows, told=True):
    txn = backend.begin()
    txn.put_many(rows)
    if told:
        txn.commit()
    else:
        backend._redo.append(txn.id, rows)
        txn.abort()
change([(b"k%03d" % n, bytes([n]) * 1500) for n in range(200)])
backend._redo.checkpoint()
backend._redo._wait()
for n in range(60):
    change([(b"k%03d" % ((n * 14 + m * 50) % 200), bytes([n]) * 1400) for m in range(4)], told=n < 59)
print("logged", flush=True)
sys.stdin.read()
"""

# Recovers, and is killed before its own log begins.
RECOVERS_ONLY = """
import os, signal, sys
from pathlib import Path
from holdfast.store import rows
rows.Redo = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
rows.LmdbBackend(Path(sys.argv[1]), readonly=False, logged=True)
"""


class Killed(BaseException):
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


def redo_of(backend: LmdbBackend) -> Redo:
    assert backend._redo is not None
    return backend._redo


def killed(backend: LmdbBackend) -> None:
    redo_of(backend)._wait()
    redo_of(backend).abandon()
    backend.env.close()


def outgrown(path: Path, patch: pytest.MonkeyPatch) -> Rows:
    """A store whose log has far more to do again than its file has free pages."""
    patch.setattr(redo, "REDO_COMMITS", 10**9)
    patch.setattr(redo, "REDO_BYTES", 10**9)
    # A log takes the disk space that it needs, and no more.
    patch.setattr(redo, "_reserve", lambda fd: None)
    backend = logged(path)
    rows = {b"k%03d" % n: bytes([n]) * 1500 for n in range(KEYS)}
    put(backend, rows)
    redo_of(backend).checkpoint()
    redo_of(backend)._wait()
    for n in range(60):
        change = {b"k%03d" % ((n * 7 + m) % KEYS): bytes([n + m]) * 1400 for m in range(4)}
        put(backend, change)
        rows |= change
    killed(backend)
    return rows


@contextmanager
def python(script: str, *args: object) -> Iterator[subprocess.Popen[bytes]]:
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


def test_recoveries_that_are_killed_one_after_the_other_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = outgrown(tmp_path, monkeypatch)
    for id in (30, 55, 45):
        with python(RECOVERS, tmp_path, id) as process:
            assert process.wait(DEADLINE_S) == -signal.SIGKILL
    with closing(logged(tmp_path)) as backend:
        assert rows_of(backend) == rows


def test_a_writer_killed_between_the_file_and_the_lock_file_leaves_a_store_that_goes_on(
    tmp_path: Path,
) -> None:
    with python(WRITES, tmp_path) as writer:
        assert writer.stdout is not None
        last = int(writer.stdout.readline())
        with python(READS, tmp_path, MAP_BYTES, READERS_MAX) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline()
            writer.kill()
            writer.wait(DEADLINE_S)
            _set_back(tmp_path, last)
            with python(RECOVERS, tmp_path, 0) as second:
                assert second.wait(DEADLINE_S) == 0
    with closing(logged(tmp_path)) as backend:
        put(backend, {b"after": b"1"})
        assert rows_of(backend) == {b"n": b"4", b"after": b"1"}


def test_a_recovery_beside_readers_that_is_killed_leaves_the_base_for_the_next(
    tmp_path: Path,
) -> None:
    with python(GOES_ON, tmp_path) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline()
        with python(READS, tmp_path, MAP_BYTES, READERS_MAX) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline()
            writer.kill()
            writer.wait(DEADLINE_S)
            with python(RECOVERS_ONLY, tmp_path) as second:
                assert second.wait(DEADLINE_S) == -signal.SIGKILL
    rows = {b"k%03d" % n: bytes([n]) * 1500 for n in range(KEYS)}
    for n in range(60):
        # Half of the rows are those of the base.
        rows |= {b"k%03d" % ((n * 14 + m * 50) % KEYS): bytes([n]) * 1400 for m in range(4)}
    with closing(logged(tmp_path)) as backend:
        assert rows_of(backend) == rows


def _set_back(path: Path, last: int) -> None:
    """What LMDB's lock file says while the last step of a commit is to be done."""
    with open(path / "lock.mdb", "r+b") as lock:
        at = lock.read(128).index(struct.pack("<Q", last))
        lock.seek(at)
        lock.write(struct.pack("<Q", last - 1))


@pytest.mark.parametrize("commits", [1, 2])
def test_a_store_that_was_recovered_and_closed_without_a_commit_opens_again(
    tmp_path: Path, commits: int
) -> None:
    """Recovery leaves the same commit on both meta pages, and each page has its own number."""
    backend = logged(tmp_path)
    for n in range(commits):
        put(backend, {b"n": b"%d" % n})
    redo_of(backend).checkpoint()
    killed(backend)
    logged(tmp_path).close()
    backend = logged(tmp_path)
    assert rows_of(backend) == {b"n": b"%d" % (commits - 1)}
    backend.close()


def test_a_file_without_its_last_unused_pages_is_read_as_a_whole_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = logged(tmp_path)
    for _ in range(10):
        # Free pages are used again when no snapshot needs them.
        put(backend, {b"a": b"1"})
        redo_of(backend).checkpoint()
        redo_of(backend)._wait()
    txn = backend.begin()
    txn.put_many([(b"c", b"2"), (b"b", bytes(1 << 20))])
    txn.delete(b"b")
    txn.commit()
    backend.close()
    read: list[object] = []
    real = Pages.check_all
    monkeypatch.setattr(Pages, "check_all", lambda pages: (read.append(pages), real(pages))[1])
    for _ in range(3):
        backend = logged(tmp_path)
        assert rows_of(backend) == {b"a": b"1", b"c": b"2"}
        backend.close()
    assert len(read) == 1


@pytest.mark.parametrize("rounds", [1, 2])
def test_who_is_killed_while_it_removes_the_logs_leaves_a_store_that_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    backend = logged(tmp_path)
    for _ in range(rounds):
        put(backend, {b"a": b"1"})
        put(backend, {b"a": b"2"})
        redo_of(backend).checkpoint()
        redo_of(backend)._wait()
    put(backend, {b"a": b"3"})
    killed(backend)
    unlink = Path.unlink
    removed: list[Path] = []

    def first(self: Path, missing_ok: bool = False) -> None:
        if removed:
            raise Killed
        removed.append(self)
        unlink(self, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", first)
        with pytest.raises(Killed):
            LmdbBackend(tmp_path, readonly=False)
    assert len([name for name in FILES if (tmp_path / name).exists()]) == 1
    before = (tmp_path / DATA).read_bytes()
    redo.Recovery(tmp_path).put_back()
    assert (tmp_path / DATA).read_bytes() == before
    with closing(logged(tmp_path)) as again:
        assert rows_of(again) == {b"a": b"3"}


def test_a_long_log_is_not_cut_off_before_the_next_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = outgrown(tmp_path, monkeypatch)
    backend = logged(tmp_path)
    for n in range(20):
        rows |= (change := {b"k%03d" % n: bytes([n]) * 3000})
        put(backend, change)
    redo_of(backend)._asked = queue.SimpleQueue()  # nobody serves it: the checkpoint never ends
    redo_of(backend).checkpoint()
    put(backend, {b"k000": b"0"})
    rows[b"k000"] = b"0"
    redo_of(backend).abandon()
    backend.env.close()
    monkeypatch.setattr(redo, "REDO_BYTES_MAX", 20_000)

    def killed_before_it_writes(*_: object) -> NoReturn:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(redo, "_headed", killed_before_it_writes)
        with pytest.raises(Killed):
            logged(tmp_path)
    with closing(logged(tmp_path)) as backend:
        assert rows_of(backend) == rows


def test_who_opens_the_file_waits_while_its_meta_page_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outgrown(tmp_path, monkeypatch)
    seen: list[bool] = []

    def put_back(*_: object) -> None:
        probe = "import fcntl,sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_SH | fcntl.LOCK_NB, 1, 0)"
        command = [sys.executable, "-c", probe, str(tmp_path / "lock.mdb")]
        done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S)
        seen.append(b"BlockingIOError" in done.stderr)

    monkeypatch.setattr(redo, "_put_back", put_back)
    redo.Recovery(tmp_path).put_back()
    assert seen == [True]


def test_readers_that_take_every_place_do_not_end_the_writer(tmp_path: Path) -> None:
    backend = logged(tmp_path)
    put(backend, {b"a": b"0"})
    with python(CROWDS, tmp_path, MAP_BYTES, READERS_MAX) as crowd:
        assert crowd.stdout is not None
        assert int(crowd.stdout.readline()) > READERS_MAX // 2
        for n in range(5):
            put(backend, {b"a": b"%d" % n})
            redo_of(backend).checkpoint()
            redo_of(backend)._wait()
    backend.close()


def test_a_store_is_closed_with_all_of_it_synced_even_without_room_for_a_snapshot(
    tmp_path: Path,
) -> None:
    backend = logged(tmp_path)
    put(backend, {b"a": b"1"})
    env = backend.env
    synced: list[int] = []

    class Crowded:
        def begin(self) -> NoReturn:
            raise lmdb.ReadersFullError("no place")

        def sync(self, force: bool) -> None:
            env.sync(force)
            synced.append(int(env.info()["last_txnid"]))

    redo_of(backend)._env = Crowded()  # type: ignore[assignment]
    put(backend, {b"a": b"2"})
    backend.close()
    assert synced == [2]


def test_an_append_that_lmdb_refuses_leaves_the_last_record_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = logged(tmp_path)
    put(backend, {b"a": b"1"})
    with monkeypatch.context() as patch:

        def full(*_: object) -> NoReturn:
            raise lmdb.ReadersFullError("no place")

        patch.setattr(redo_of(backend), "append", full)
        with pytest.raises(Exception, match="no place"):
            put(backend, {b"b": b"2"})
    assert [id for id, _ in _records(tmp_path)] == [1]
    killed(backend)
    with closing(logged(tmp_path)) as again:
        assert rows_of(again) == {b"a": b"1"}


def _records(path: Path) -> list[tuple[int, bytes]]:
    headers = [header for name in FILES if (header := redo._log(path / name)) is not None]
    return list(redo._records(path, max(headers, key=lambda header: header.round)))


def test_a_log_that_cannot_be_synced_ends_the_writer_even_if_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = logged(tmp_path)
    put(backend, {b"a": b"1"})

    def full(fd: int) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(redo.os, "fdatasync", full)
        with pytest.raises(StoreError) as refused:
            put(backend, {b"b": b"2"})
    # It may be there when the store is opened again: to be full would mean that it is not.
    assert not isinstance(refused.value, StoreFull)
    with pytest.raises(StoreError):
        put(backend, {b"c": b"3"})
    backend.env.close()
    with closing(logged(tmp_path)) as again:
        assert rows_of(again) == {b"a": b"1", b"b": b"2"}


def test_a_checkpoint_that_cannot_begin_fails_the_next_commit_and_not_the_one_that_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redo, "REDO_COMMITS", 1)
    backend = logged(tmp_path)
    redo_of(backend)._wait()

    def broken(fd: int, size: int, at: int) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(redo.os, "pread", broken)
        put(backend, {b"a": b"1"})
    with pytest.raises(StoreError, match="Input/output"):
        put(backend, {b"b": b"2"})
    assert rows_of(backend) == {b"a": b"1"}
    backend.env.close()


@pytest.mark.parametrize("bound", ["REDO_COMMITS_MAX", "REDO_BYTES_MAX"])
def test_commits_wait_for_a_checkpoint_that_takes_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    class Waited(Exception):
        pass

    def wait() -> NoReturn:
        raise Waited

    monkeypatch.setattr(redo, bound, 20 if bound == "REDO_COMMITS_MAX" else 10_000)
    backend = logged(tmp_path)
    redo_of(backend)._asked = queue.SimpleQueue()  # nobody serves it
    put(backend, {b"n": b"0"})
    redo_of(backend).checkpoint()
    monkeypatch.setattr(redo_of(backend), "_wait", wait)
    made = 0
    with suppress(Waited):
        while made < 100:
            put(backend, {b"n": b"1" * 500})
            made += 1
    assert 0 < made < 30
    redo_of(backend).abandon()
    backend.env.close()


def test_a_record_larger_than_the_whole_log_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redo, "REDO_BYTES_MAX", 64 * 1024)
    backend = logged(tmp_path)
    for n in range(4):
        rows = {b"big": bytes([n]) * 3_000_000, b"n": b"%d" % n}
        put(backend, rows)
    killed(backend)
    with closing(logged(tmp_path)) as again:
        assert rows_of(again) == rows
