"""The redo log under power cuts during a recovery, the first checkpoint, or a checkpoint with concurrent commits.

The simulated disk is stricter than the one in `test_redo_log`. A power cut may leave any contents that a sector had
since the last sync, any file length since then, and a missing directory entry. A sync does not cover writes that
arrive while it runs. The power may fail repeatedly during a recovery.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast import failpoints
from holdfast.store.lmdb import redo_log
from holdfast.store.lmdb.backend import LmdbBackend
from holdfast.store.lmdb.redo_log import DATA_FILE, LOG_FILES, RedoHeader, RedoLog, RedoRecovery

SECTOR = 512
PAGE = 4096
KEYS = 150
CUTS = 4
SEEDS = 15
# The maximum of consecutive power cuts during a recovery.
CUTS_IN_RECOVERY_MAX = 3
Rows = dict[bytes, bytes]


class SimulatedPowerCut(BaseException):
    pass


class SectorHistoryFile:
    """The contents of a file, and for each sector all contents that a power cut may leave, oldest first."""

    def __init__(self, data: bytes, *, is_entry_durable: bool) -> None:
        self.current = data
        # Sector number -> (write number, contents).
        self.sectors: dict[int, list[tuple[int, bytes]]] = {}
        self.sizes = [(0, len(data))]
        self._writes = self._synced = 0
        self.synced = data
        # Whether the directory entry is durable.
        self.is_entry_durable = is_entry_durable
        self.is_missing = False

    def record_contents(self, data: bytes) -> None:
        self._writes += 1
        for at in range(0, len(data), PAGE):
            if data[at : at + PAGE] == self.current[at : at + PAGE]:
                continue
            for n in range(at // SECTOR, -(-min(at + PAGE, len(data)) // SECTOR)):
                new = data[n * SECTOR : (n + 1) * SECTOR]
                if new != self.current[n * SECTOR : (n + 1) * SECTOR]:
                    self.sectors.setdefault(n, []).append((self._writes, new))
        self.sizes.append((self._writes, len(data)))
        self.current = data

    def start_sync(self) -> tuple[int, bytes]:
        """Return the write number and the contents at the start of a sync."""
        return self._writes, self.current

    def complete_sync(self, mark: tuple[int, bytes]) -> None:
        """Complete the sync that started at `mark`: only later writes stay volatile."""
        if mark[0] < self._synced:
            return  # a later sync has already completed
        self._synced, self.synced = mark
        self.sectors = {
            n: later
            for n, versions in self.sectors.items()
            if (later := [(no, contents) for no, contents in versions if no > self._synced])
        }
        later_sizes = [(no, size) for no, size in self.sizes if no > self._synced]
        self.sizes = [(self._synced, len(self.synced)), *later_sizes]

    def contents_after_cut(self, rng: random.Random) -> bytes:
        share = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        sizes = [size for _, size in self.sizes]
        out = bytearray(self.synced.ljust(max(sizes), b"\0"))
        for n, versions in self.sectors.items():
            if rng.random() < share:
                _, contents = rng.choice(versions) if rng.random() < 0.5 else versions[-1]
                out[n * SECTOR : n * SECTOR + len(contents)] = contents
        return bytes(out[: rng.choice(sizes)])


class SectorHistoryDisk:
    """A simulated disk: a directory, and the possible contents of its files after a power cut."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(exist_ok=True)
        self.files: dict[str, SectorHistoryFile] = {}
        for name in (DATA_FILE, *LOG_FILES):
            if (path / name).exists():
                self.files[name] = SectorHistoryFile(
                    (path / name).read_bytes(), is_entry_durable=True
                )
        self.steps = 0
        self.cut_at = -1

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.cut_at:
            raise SimulatedPowerCut

    def record_writes(self, name: str) -> SectorHistoryFile:
        """Record the writes to a file since the last call."""
        exists = (self.path / name).exists()
        if name not in self.files or (exists and self.files[name].is_missing):
            self.files[name] = SectorHistoryFile(b"", is_entry_durable=False)
        file = self.files[name]
        if exists:
            file.record_contents((self.path / name).read_bytes())
        file.is_missing = not exists
        return file

    def sync(self, name: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.step()
        mark = self.record_writes(name).start_sync()
        meanwhile()
        self.files[name].complete_sync(mark)
        self.step()

    def sync_directory(self) -> None:
        self.step()
        for name in (DATA_FILE, *LOG_FILES):
            file = self.record_writes(name)
            file.is_entry_durable = not file.is_missing
        self.step()

    def write_after_cut(self, target: Path, rng: random.Random) -> None:
        target.mkdir()
        for name in (DATA_FILE, *LOG_FILES):
            file = self.record_writes(name)
            if file.is_entry_durable == (not file.is_missing):
                exists = file.is_entry_durable
            else:
                exists = rng.random() < 0.5
            if exists:
                (target / name).write_bytes(file.contents_after_cut(rng))


class SyncOnDiskEnv:
    """An LMDB environment whose sync is recorded by the simulated disk."""

    def __init__(self, env: Any, rig: RecoveryCutRig) -> None:
        self._env, self._rig = env, rig
        self.stat, self.begin = env.stat, env.begin

    def sync(self, force: bool) -> None:
        assert force
        self._rig.disk.sync(DATA_FILE, self._rig.commit_during_sync)


class DeferredSyncQueue:
    """A fake job queue of the sync thread: the test decides when the jobs run."""

    def __init__(self, rig: RecoveryCutRig) -> None:
        self._rig = rig
        self.jobs: list[Callable[[], None]] = []

    def put(self, job: Callable[[], None] | None) -> None:
        if job is not None:
            self.jobs.append(job)
            if not self._rig.is_open:
                self._rig.run_sync_jobs()


class RecoveryCutRig:
    """A backend on a simulated disk, and its expected rows."""

    def __init__(
        self, tmp: Path, patch: pytest.MonkeyPatch, armed: ExitStack, rng: random.Random
    ) -> None:
        self.rng = rng
        self._tmp = tmp
        self._directories = 0
        self.rows: Rows = {}
        # The expected rows if the interrupted commit is durable.
        self.rows_if_committed: Rows | None = None
        self.is_open = False
        self.committing = False
        self._patch_disk_calls(patch)
        self._arm_failpoints(armed)
        self.disk = SectorHistoryDisk(self._new_directory())
        self.open()

    def open(self) -> None:
        self.is_open = False
        plain = self.rng.random() < 0.15
        if plain:
            with closing(self._backend(logged=False)) as backend:
                self._check(backend)
        self.backend = self._backend(logged=True)
        self._check(self.backend)
        self.is_open = True

    def _backend(self, *, logged: bool) -> LmdbBackend:
        # LMDB creates the data file without the redo log, so its creation is not simulated.
        backend = LmdbBackend(self.disk.path, readonly=False, logged=logged)
        self.disk.step()
        return backend

    def _check(self, backend: LmdbBackend) -> None:
        with closing(backend.snapshot()) as snapshot:
            recovered = dict(snapshot.scan(b"\0", b"\xff", None, False))
        if recovered == self.rows_if_committed:
            self.rows = recovered
        self.rows_if_committed = None
        assert recovered == self.rows

    def fill(self) -> None:
        """Build a tree without free pages, so that commits reuse pages that a recovery needs."""
        self._change([(b"k%03d" % n, self.rng.randbytes(1500)) for n in range(KEYS)], [])

    def commit(self) -> None:
        touched = [b"k%03d" % self.rng.randrange(KEYS) for _ in range(self.rng.randint(1, 5))]
        deleted = [key for key in sorted(set(touched)) if self.rng.random() < 0.1]
        puts = [
            (key, self.rng.randbytes(self.rng.choice((1, 700, 1500, 6000))))
            for key in touched
            if key not in deleted
        ]
        self._change([*puts, (b"turn", self.rng.randbytes(8))], deleted)

    def _change(self, puts: list[tuple[bytes, bytes]], deleted: list[bytes]) -> None:
        self.committing = True
        txn = self.backend.begin()
        txn.put_many(puts)
        for key in deleted:
            txn.delete(key)
        self.rows_if_committed = {
            k: v for k, v in {**self.rows, **dict(puts)}.items() if k not in deleted
        }
        txn.commit()
        self.rows, self.rows_if_committed = self.rows_if_committed, None
        self.committing = False
        self.disk.record_writes(DATA_FILE)

    def commit_during_sync(self) -> None:
        """Run commits during a sync."""
        for _ in range(self.rng.choice((0, 0, 1, 3))):
            # Above REDO_BYTES_MAX commits block until the checkpoint completes.
            if (
                self.is_open
                and not self.committing
                and self.redo._append_at <= redo_log.REDO_BYTES_MAX
            ):
                self.commit()

    def run_sync_jobs(self) -> None:
        while self.asked.jobs:
            self.asked.jobs.pop(0)()
            self.redo._checkpoint_done.set()

    def run_random_commits(self) -> None:
        for _ in range(self.rng.randint(3, 40)):
            self.commit()
            if self.rng.random() < 0.15:
                self.run_sync_jobs()

    def cut_power(self) -> None:
        """Simulate a power cut and a restart, with further power cuts during the recovery."""
        for _ in range(CUTS_IN_RECOVERY_MAX):
            self._cut_power_once()
            self.disk.cut_at = self.rng.randint(1, 60)
            with suppress(SimulatedPowerCut):
                self.open()
                return
        self._cut_power_once()
        self.open()

    def _cut_power_once(self) -> None:
        directory = self._new_directory()
        self.disk.write_after_cut(directory, self.rng)
        if self.is_open:
            self.backend.env.close()
        self.is_open = self.committing = False
        shutil.rmtree(self.disk.path)
        self.disk = SectorHistoryDisk(directory)

    def _new_directory(self) -> Path:
        self._directories += 1
        return self._tmp / str(self._directories)

    def _patch_disk_calls(self, patch: pytest.MonkeyPatch) -> None:
        rig = self
        pwrite, ftruncate = os.pwrite, os.ftruncate

        class NoThread:
            def __init__(self, **_: object) -> None: ...
            def start(self) -> None: ...
            def join(self) -> None: ...

        def name_of(fd: int) -> str:
            return os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))

        def pwrite_recorded(fd: int, data: Any, at: int) -> int:
            rig.disk.step()
            wrote = pwrite(fd, data, at)
            rig.disk.record_writes(name_of(fd))
            rig.disk.step()
            return wrote

        def truncate(fd: int, size: int) -> None:
            ftruncate(fd, size)
            rig.disk.record_writes(name_of(fd))
            rig.disk.step()

        def sync_recorded(fd: int) -> None:
            if os.path.isdir(f"/proc/self/fd/{fd}"):
                rig.disk.sync_directory()
            else:
                rig.disk.sync(name_of(fd), rig.commit_during_sync)

        patch.setattr(redo_log.threading, "Thread", NoThread)
        patch.setattr(redo_log.os, "pwrite", pwrite_recorded)
        patch.setattr(redo_log.os, "ftruncate", truncate)
        patch.setattr(redo_log.os, "fdatasync", sync_recorded)
        patch.setattr(redo_log.os, "fsync", sync_recorded)

    def _arm_failpoints(self, armed: ExitStack) -> None:
        def replay_commit(_: int) -> None:
            self.disk.step()

        def commit_replayed(_: int) -> None:
            self.disk.record_writes(DATA_FILE)
            self.disk.step()

        def replay(_: RedoRecovery) -> None:
            self.disk.record_writes(DATA_FILE)

        def replayed(_: RedoRecovery) -> None:
            self.disk.sync(DATA_FILE)

        def opened(log: RedoLog) -> None:
            self.redo, self.asked = log, DeferredSyncQueue(self)
            log._sync_jobs = self.asked  # type: ignore[assignment]
            log._env = SyncOnDiskEnv(log._env, self)  # type: ignore[assignment]

        def checkpoint_wait(_: RedoLog) -> None:
            self.run_sync_jobs()

        for name, function in (
            ("redo_log.replay_commit", replay_commit),
            ("redo_log.commit_replayed", commit_replayed),
            ("redo_log.replay", replay),
            ("redo_log.replayed", replayed),
            ("redo_log.open", opened),
            ("redo_log.checkpoint_wait", checkpoint_wait),
        ):
            armed.enter_context(failpoints.on(name, calls=function))


@contextmanager
def closing_leaked_descriptors() -> Iterator[None]:
    """Close the file descriptors that a simulated power cut leaves open."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    for name in set(os.listdir("/proc/self/fd")) - before:
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if os.path.basename(target).split(" ")[0] in (DATA_FILE, *LOG_FILES):
                os.close(int(name))


PlantBug = Callable[[pytest.MonkeyPatch, ExitStack], object]


def run_history(tmp: Path, seed: int, plant_bug: PlantBug | None = None) -> None:
    rng = random.Random(seed)
    with (
        closing_leaked_descriptors(),
        pytest.MonkeyPatch.context() as patch,
        ExitStack() as armed,
    ):
        patch.setattr(redo_log, "REDO_COMMITS", rng.choice((1, 3, 8, 1000)))
        patch.setattr(redo_log, "REDO_BYTES", 64 * 1024)
        patch.setattr(redo_log, "REDO_BYTES_MAX", rng.choice((20_000, 200_000, 10**9)))
        if plant_bug is not None:
            plant_bug(patch, armed)
        rig = RecoveryCutRig(tmp, patch, armed, rng)
        rig.fill()
        for _ in range(CUTS):
            rig.disk.steps, rig.disk.cut_at = 0, rng.randint(1, 250)
            with suppress(SimulatedPowerCut):
                rig.run_random_commits()
            rig.cut_power()
        rig.disk.cut_at = -1
        rig.run_random_commits()
        rig.run_sync_jobs()
        rig._check(rig.backend)
        rig.backend.env.close()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_acknowledged_commits_survive_power_cuts_in_recoveries(tmp_path: Path, seed: int) -> None:
    run_history(tmp_path, seed)


@pytest.mark.deep
def test_acknowledged_commits_survive_many_power_cuts_in_recoveries(tmp_path: Path) -> None:
    for seed in range(1_000, 1_400):
        (tmp_path / str(seed)).mkdir()
        run_history(tmp_path / str(seed), seed)
        shutil.rmtree(tmp_path / str(seed))


# -- the model finds planted bugs ---------------------------------------------------------------------


def base_not_pinned_in_recovery(_: pytest.MonkeyPatch, armed: ExitStack) -> None:
    armed.enter_context(
        failpoints.on("redo_log.base_pinned", calls=lambda snapshot: snapshot.abort())
    )


def base_released_before_the_next_is_durable(patch: pytest.MonkeyPatch, _: ExitStack) -> None:
    patch.setattr(redo_log, "_BASES_MAX", 1)


def base_header_written_before_its_sync(_: pytest.MonkeyPatch, armed: ExitStack) -> None:
    def write_base_header(log: RedoLog) -> None:
        if log._epoch > 5:
            meta = os.pread(
                log._data_fd, redo_log.META_BYTES, (log._bases[-1].id() % 2) * log._page_bytes
            )
            header = RedoHeader(log._epoch, log._bases[-1].id(), meta)
            redo_log._write(log._log_fd, redo_log._encode_header(header), redo_log._BASE_HEADER_AT)

    armed.enter_context(failpoints.on("redo_log.checkpoint_started", calls=write_base_header))


PLANTED_BUGS = (
    base_not_pinned_in_recovery,
    base_released_before_the_next_is_durable,
    base_header_written_before_its_sync,
)
FOUND_EXIT_CODE = 3


def find_planted_bug(name: str, tmp: Path) -> int:
    plant = next(one for one in PLANTED_BUGS if one.__name__ == name)
    for seed in range(120):
        (tmp / str(seed)).mkdir()
        try:
            run_history(tmp / str(seed), seed, plant)
        except Exception:
            return FOUND_EXIT_CODE
        shutil.rmtree(tmp / str(seed))
    return 0


@pytest.mark.parametrize("plant", PLANTED_BUGS)
def test_power_cut_histories_find_a_planted_recovery_bug(tmp_path: Path, plant: PlantBug) -> None:
    # Runs in a child process: reading a tree with lost pages crashes the process.
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.store.test_redo_log_cuts_in_recovery",
            plant.__name__,
            str(tmp_path),
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        timeout=100,
    )
    killed = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)
    assert done.returncode in (FOUND_EXIT_CODE, *killed), done.stderr.decode()


if __name__ == "__main__":
    sys.exit(find_planted_bug(sys.argv[1], Path(sys.argv[2])))
