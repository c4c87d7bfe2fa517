"""The redo log under power cuts: acknowledged commits survive any subset of unsynced sector writes.

The disk is simulated. A sync makes the current contents of a file durable. A power cut leaves, for each sector,
the synced contents or the later ones. `Cut` ends the process at any system call.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast import failpoints
from holdfast.errors import StoreCorrupt, StoreError, StoreFull
from holdfast.store.lmdb import redo_log
from holdfast.store.lmdb.backend import LmdbBackend
from holdfast.store.lmdb.redo_log import DATA_FILE, LOG_FILES

MODULES = ("holdfast.store.lmdb.redo_log", "holdfast.store.lmdb.backend")

SECTOR = 512
KEYS = 60
SEEDS = 25
CUTS = 3
Rows = dict[bytes, bytes]


class PowerCut(BaseException):
    pass


class DeferredSyncJobs:
    """A fake job queue of the sync thread: the test decides when the jobs run."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []

    def put(self, job: Callable[[], None] | None) -> None:
        if job is not None:
            self.jobs.append(job)


class SimulatedDisk:
    """A simulated disk: a directory, and the durable contents of its files."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.durable: dict[str, bytes] = {}
        self.cut_at = -1
        self.calls = 0
        # The name of the planted bug, or an empty string.
        self.bug = ""
        self._fdatasync, self._pwrite = os.fdatasync, os.pwrite
        patch.setattr(redo_log.os, "fdatasync", self._fdatasync_recorded)
        patch.setattr(redo_log.os, "pwrite", self._pwrite_recorded)

    def mark_synced(self, name: str) -> None:
        self.durable[name] = (self.path / name).read_bytes()

    def step(self) -> None:
        """Raise `Cut` if the power cut is due at this call."""
        self.calls += 1
        if self.calls == self.cut_at:
            raise PowerCut

    def write_after_cut(self, target: Path, rng: random.Random) -> None:
        """Write the contents of the disk after a power cut to `target`."""
        target.mkdir()
        for name in (DATA_FILE, *LOG_FILES):
            if not (self.path / name).exists():
                continue
            current, durable = (self.path / name).read_bytes(), self.durable.get(name, b"")
            share = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
            size = (
                len(current)
                if rng.random() < 0.5 or name != DATA_FILE
                else max(len(durable), SECTOR)
            )
            out = bytearray()
            for at in range(0, size, SECTOR):
                old, new = durable[at : at + SECTOR], current[at : at + SECTOR]
                out += new if rng.random() < share else old.ljust(len(new), b"\0")
            (target / name).write_bytes(out)

    def _fdatasync_recorded(self, fd: int) -> None:
        self.step()
        self._fdatasync(fd)
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        if not (self.bug == "log not synced" and name in LOG_FILES):
            self.mark_synced(name)
        self.step()

    def _pwrite_recorded(self, fd: int, data: Any, at: int) -> int:
        self.step()
        wrote = self._pwrite(fd, data, at)
        self.step()
        return wrote


class SyncRecordingEnv:
    """An LMDB environment whose sync is recorded by the simulated disk."""

    def __init__(self, env: Any, disk: SimulatedDisk) -> None:
        self._env, self._disk = env, disk

    def sync(self, force: bool) -> None:
        self._disk.step()
        self._env.sync(force)
        if self._disk.bug != "file not synced":
            self._disk.mark_synced(DATA_FILE)
        self._disk.step()

    def begin(self) -> Any:
        txn = self._env.begin()
        return UnpinnedSnapshot(txn) if self._disk.bug == "base not kept" else txn

    def stat(self) -> Any:
        return self._env.stat()


class UnpinnedSnapshot:
    def __init__(self, txn: Any) -> None:
        self._id = txn.id()
        txn.abort()

    def id(self) -> int:
        return int(self._id)

    def abort(self) -> None: ...


class RedoRig:
    """A backend on a simulated disk, and its expected rows."""

    def __init__(
        self, tmp: Path, patch: pytest.MonkeyPatch, armed: ExitStack, rng: random.Random
    ) -> None:
        self.rng = rng
        self._tmp, self._patch = tmp, patch
        armed.enter_context(failpoints.on("redo_log.open", calls=self._on_log_open))
        armed.enter_context(failpoints.on("redo_log.begin_epoch", calls=self._on_epoch))
        self._directories = 0
        self.bug = ""
        self.rows: Rows = {}
        # The expected rows if the interrupted commit is durable.
        self.rows_if_committed: Rows | None = None
        self.open(self._new_directory())

    def open(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        self.disk = SimulatedDisk(path, self._patch)
        self.sync_jobs = DeferredSyncJobs()
        for name in LOG_FILES:
            if (path / name).exists():
                self.disk.mark_synced(name)
        # The epoch of the checkpoint in the constructor of the log. Its sync job runs in the sync thread.
        self._first_epoch = redo_log.RedoRecovery(path).next_epoch + 1
        self.backend = LmdbBackend(path, readonly=False, logged=True)
        # A read beyond the end of the mapped file would crash this process.
        info, page_bytes = self.backend.env.info(), self.backend.env.stat()["psize"]
        assert (path / DATA_FILE).stat().st_size >= (info["last_pgno"] + 1) * page_bytes
        self.disk.bug = self.bug

    def _on_log_open(self, log: redo_log.RedoLog) -> None:
        self.redo_log = log
        self.disk.mark_synced(DATA_FILE)
        log._env = SyncRecordingEnv(log._env, self.disk)  # type: ignore[assignment]

    def _on_epoch(self, log: redo_log.RedoLog) -> None:
        if log._epoch > self._first_epoch:
            log._sync_jobs = self.sync_jobs  # type: ignore[assignment]

    def commit(self) -> None:
        after = dict(self.rows)
        txn = self.backend.begin()
        puts, deletes = [], []
        for _ in range(self.rng.randint(1, 6)):
            key = b"k%02d" % self.rng.randrange(KEYS)
            if self.rng.random() < 0.2:
                deletes.append(key)
                after.pop(key, None)
            elif key not in deletes:
                size = self.rng.choice((1, 50, 700, 3000, 9000))
                puts.append((key, self.rng.randbytes(size)))
                after[key] = puts[-1][1]
        puts.append((b"turn", b"%d" % self.rng.getrandbits(60)))
        after[b"turn"] = puts[-1][1]
        puts = [row for row in puts if row[0] not in deletes]
        txn.put_many(puts)
        for key in deletes:
            txn.delete(key)
        self.rows_if_committed = after
        txn.commit()
        self.rows, self.rows_if_committed = after, None

    def run_sync_jobs(self) -> None:
        """Run the pending sync jobs, so that the running checkpoint completes."""
        while self.sync_jobs.jobs:
            self.sync_jobs.jobs.pop(0)()
            self.redo_log._checkpoint_done.set()

    def run_random_commits(self) -> None:
        """Run random commits and checkpoints until a power cut, if one is due."""
        for _ in range(self.rng.randint(3, 25)):
            self.commit()
            if self.rng.random() < 0.3:
                self.redo_log.checkpoint()
            if self.rng.random() < 0.3:
                self.run_sync_jobs()

    def cut_power(self) -> None:
        """Simulate a power cut and a restart, and check the recovered rows."""
        directory = self._new_directory()
        self.disk.write_after_cut(directory, self.rng)
        self.backend.env.close()
        self.open(directory)
        recovered = self.read_rows()
        if recovered == self.rows_if_committed:
            self.rows = recovered
        self.rows_if_committed = None
        assert_same_rows(recovered, self.rows)

    def read_rows(self) -> Rows:
        with closing(self.backend.snapshot()) as snapshot:
            return dict(snapshot.scan(b"\0", b"\xff", None, False))

    def _new_directory(self) -> Path:
        self._directories += 1
        return self._tmp / str(self._directories)


def assert_same_rows(found: Rows, expected: Rows) -> None:
    """Compare without pytest's assertion introspection, which needs minutes for large rows."""
    different = sorted(
        key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)
    )
    if different:
        raise AssertionError(f"{len(different)} rows differ, the first is {different[0]!r}")


def run_history(tmp: Path, patch: pytest.MonkeyPatch, seed: int, bug: str = "") -> None:
    rng = random.Random(seed)
    with ExitStack() as armed:
        rig = RedoRig(tmp, patch, armed, rng)
        for _ in range(CUTS):
            rig.disk.bug = rig.bug = bug
            rig.disk.calls, rig.disk.cut_at = 0, rng.randint(1, 120)
            with suppress(PowerCut):
                rig.run_random_commits()
            rig.disk.cut_at = -1
            rig.cut_power()
        rig.run_random_commits()
        assert_same_rows(rig.read_rows(), rig.rows)
        rig.backend.env.close()


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as made:
        yield made


@pytest.mark.parametrize("seed", range(SEEDS))
def test_acknowledged_commits_survive_power_cuts(
    tmp_path: Path, patch: pytest.MonkeyPatch, seed: int
) -> None:
    run_history(tmp_path, patch, seed)


@pytest.mark.deep
def test_acknowledged_commits_survive_many_power_cuts(tmp_path: Path) -> None:
    for seed in range(100, 400):
        (tmp_path / str(seed)).mkdir()
        with pytest.MonkeyPatch.context() as patch:
            run_history(tmp_path / str(seed), patch, seed)
        shutil.rmtree(tmp_path / str(seed))


@contextmanager
def planted_bug(bug: str) -> Iterator[None]:
    with ExitStack() as armed:
        if bug == "meta page not put back":
            kept: list[bytes] = []

            def keep(path: Path) -> None:
                kept[:] = [(path / DATA_FILE).read_bytes()]

            def put_back(path: Path) -> None:
                (path / DATA_FILE).write_bytes(kept[0])

            armed.enter_context(failpoints.on("redo_log.restore_meta", calls=keep))
            armed.enter_context(failpoints.on("redo_log.meta_restored", calls=put_back))
        if bug == "second log not read":

            def unlink_second(path: Path, base: redo_log.RedoHeader) -> None:
                (path / LOG_FILES[(base.epoch + 1) % 2]).unlink(missing_ok=True)

            armed.enter_context(failpoints.on("redo_log.read_records", calls=unlink_second))
        yield


@pytest.mark.parametrize(
    "bug",
    [
        "log not synced",
        "file not synced",
        "base not kept",
        "meta page not put back",
        "second log not read",
    ],
)
def test_power_cut_histories_find_a_planted_bug(tmp_path: Path, bug: str) -> None:
    for seed in range(200):
        (tmp_path / str(seed)).mkdir()
        with pytest.MonkeyPatch.context() as patch, planted_bug(bug):
            try:
                run_history(tmp_path / str(seed), patch, seed, bug)
            except Exception:
                return
        shutil.rmtree(tmp_path / str(seed))
    raise AssertionError(f"{bug}: nothing was lost in 200 histories")


# -- without a power cut -----------------------------------------------------------------------------


def put(backend: LmdbBackend, **rows: bytes) -> None:
    txn = backend.begin()
    txn.put_many([(key.encode(), value) for key, value in rows.items()])
    txn.commit()


def rows_of(backend: LmdbBackend) -> Rows:
    with closing(backend.snapshot()) as snapshot:
        return dict(snapshot.scan(b"\0", b"\xff", None, False))


def logged(path: Path) -> LmdbBackend:
    path.mkdir(exist_ok=True)
    return LmdbBackend(path, readonly=False, logged=True)


def close_as_killed(backend: LmdbBackend) -> None:
    """Close the files without a checkpoint, as the kernel does for a killed process."""
    assert backend._redo_log is not None
    backend._redo_log._wait_for_checkpoint()
    backend._redo_log.close_files()
    backend.env.close()


def test_logged_commit_missing_in_lmdb_is_replayed(tmp_path: Path) -> None:
    backend = logged(tmp_path)
    put(backend, a=b"1")
    txn = backend.begin()
    txn.put_many([(b"b", b"2")])
    assert backend._redo_log is not None
    backend._redo_log.append(txn.id, [(b"b", b"2"), (b"a", None)])
    txn.abort()
    close_as_killed(backend)
    with closing(logged(tmp_path)) as again:
        assert rows_of(again) == {b"b": b"2"}


def test_undone_append_is_not_replayed(tmp_path: Path) -> None:
    backend = logged(tmp_path)
    put(backend, a=b"1")
    assert backend._redo_log is not None
    txn = backend.begin()
    backend._redo_log.append(txn.id, [(b"b", b"2")])
    txn.abort()
    backend._redo_log.undo_append()
    put(backend, c=b"3")
    close_as_killed(backend)
    with closing(logged(tmp_path)) as again:
        assert rows_of(again) == {b"a": b"1", b"c": b"3"}


def test_recovery_of_a_closed_store_changes_nothing(tmp_path: Path) -> None:
    with closing(logged(tmp_path)) as backend:
        put(backend, a=b"1")
    before = (tmp_path / DATA_FILE).read_bytes()
    redo_log.RedoRecovery(tmp_path).restore_base()
    assert (tmp_path / DATA_FILE).read_bytes() == before


def test_backend_without_a_redo_log_replays_and_discards_the_logs(tmp_path: Path) -> None:
    backend = logged(tmp_path)
    put(backend, a=b"1")
    close_as_killed(backend)
    with closing(LmdbBackend(tmp_path, readonly=False)) as plain:
        assert rows_of(plain) == {b"a": b"1"}
        put(plain, b=b"2")
    with closing(logged(tmp_path)) as again:
        assert rows_of(again) == {b"a": b"1", b"b": b"2"}


@pytest.mark.parametrize("other", ["older", "newer"])
def test_redo_log_of_another_data_file_raises_store_corrupt(tmp_path: Path, other: str) -> None:
    with closing(logged(tmp_path / "other")) as backend:
        for n in range(1 if other == "older" else 50):
            put(backend, n=b"%d" % n)
    home = tmp_path / "home"
    backend = logged(home)
    for n in range(20):
        put(backend, n=b"%d" % n)
    assert backend._redo_log is not None
    backend._redo_log.checkpoint()
    close_as_killed(backend)
    shutil.copyfile(tmp_path / "other" / DATA_FILE, home / DATA_FILE)
    before = (home / DATA_FILE).read_bytes()
    with pytest.raises(StoreCorrupt, match="redo"):
        logged(home)
    assert (home / DATA_FILE).read_bytes() == before


def test_commits_wait_for_the_checkpoint_when_the_redo_log_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redo_log, "REDO_BYTES_MAX", 64 * 1024)
    with closing(logged(tmp_path)) as backend:
        for n in range(200):
            put(backend, **{f"k{n % 7}": bytes([n % 251]) * 8_000})
        sizes = [(tmp_path / name).stat().st_size for name in LOG_FILES]
    assert max(sizes) < redo_log.REDO_BYTES + 64 * 1024


def test_commit_after_a_failed_data_sync_raises_store_error(tmp_path: Path) -> None:
    backend = logged(tmp_path)
    put(backend, a=b"1")
    assert backend._redo_log is not None
    sync_called = threading.Event()

    class FailingSyncEnv:
        def __init__(self, env: Any) -> None:
            self.begin = env.begin

        def sync(self, force: bool) -> None:
            sync_called.set()
            raise OSError(5, "Input/output error")

    env = backend._redo_log._env
    backend._redo_log._env = FailingSyncEnv(env)  # type: ignore[assignment]
    backend._redo_log.checkpoint()
    assert sync_called.wait(30)
    backend._redo_log._checkpoint_done.wait(30)
    with pytest.raises(StoreError, match="Input/output"):
        put(backend, b=b"2")
    with closing(backend.snapshot()) as snapshot:
        assert snapshot.get(b"b") is None
    backend.env.close()


def test_full_disk_in_the_redo_log_fails_only_that_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = logged(tmp_path)
    put(backend, a=b"1")
    pwrite = os.pwrite

    def full(fd: int, data: Any, at: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(redo_log.os, "pwrite", full)
    with pytest.raises(StoreFull):
        put(backend, b=b"2")
    monkeypatch.setattr(redo_log.os, "pwrite", pwrite)
    put(backend, c=b"3")
    close_as_killed(backend)
    with closing(logged(tmp_path)) as again:
        assert rows_of(again) == {b"a": b"1", b"c": b"3"}
