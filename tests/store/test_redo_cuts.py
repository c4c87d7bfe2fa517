"""Power cuts at the worst of moments: in a recovery, in the first checkpoint, in a checkpoint under commits.

The disk of this model is less kind than that of `test_redo`. Between two syncs a sector has had many
contents, and any of them may be what is found; so for a file's length, and for its name in the directory. A
sync says nothing of what is written while it runs. The machine may go down again and again while it recovers.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.store import redo, rows
from holdfast.store.redo import DATA, FILES, Header, Recovery, Redo
from holdfast.store.rows import LmdbBackend

SECTOR = 512
PAGE = 4096
KEYS = 150
CUTS = 4
SEEDS = 15
# Cuts of a recovery in a row, before one comes to its end.
AGAIN_MAX = 3
Rows = dict[bytes, bytes]


class Cut(BaseException):
    pass


class File:
    """What the file holds, and for each sector all that may be found after a cut, the last one as written."""

    def __init__(self, data: bytes, *, named: bool) -> None:
        self.now = data
        # With the number of the write each.
        self.sectors: dict[int, list[tuple[int, bytes]]] = {}
        self.sizes = [(0, len(data))]
        self._writes = self._synced = 0
        self.synced = data
        # Whether its name is in the directory for sure.
        self.named = named
        self.gone = False

    def written(self, data: bytes) -> None:
        self._writes += 1
        for at in range(0, len(data), PAGE):
            if data[at : at + PAGE] == self.now[at : at + PAGE]:
                continue
            for n in range(at // SECTOR, -(-min(at + PAGE, len(data)) // SECTOR)):
                new = data[n * SECTOR : (n + 1) * SECTOR]
                if new != self.now[n * SECTOR : (n + 1) * SECTOR]:
                    self.sectors.setdefault(n, []).append((self._writes, new))
        self.sizes.append((self._writes, len(data)))
        self.now = data

    def mark(self) -> tuple[int, bytes]:
        """What there is when a sync begins."""
        return self._writes, self.now

    def settle(self, mark: tuple[int, bytes]) -> None:
        """The sync that began then has come to its end: only what came later is in doubt."""
        if mark[0] < self._synced:
            return  # a later one came to its end before it
        self._synced, self.synced = mark
        self.sectors = {
            n: later
            for n, all in self.sectors.items()
            if (later := [(no, one) for no, one in all if no > self._synced])
        }
        later_sizes = [(no, size) for no, size in self.sizes if no > self._synced]
        self.sizes = [(self._synced, len(self.synced)), *later_sizes]

    def found(self, rng: random.Random) -> bytes:
        share = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        sizes = [size for _, size in self.sizes]
        out = bytearray(self.synced.ljust(max(sizes), b"\0"))
        for n, all in self.sectors.items():
            if rng.random() < share:
                _, one = rng.choice(all) if rng.random() < 0.5 else all[-1]
                out[n * SECTOR : n * SECTOR + len(one)] = one
        return bytes(out[: rng.choice(sizes)])


class Disk:
    """A directory, and what of its files may be found after a cut."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(exist_ok=True)
        self.files: dict[str, File] = {}
        for name in (DATA, *FILES):
            if (path / name).exists():
                self.files[name] = File((path / name).read_bytes(), named=True)
        self.steps = 0
        self.cut_at = -1

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.cut_at:
            raise Cut

    def look(self, name: str) -> File:
        """Take in what was written to a file, by whomever."""
        there = (self.path / name).exists()
        if name not in self.files or (there and self.files[name].gone):
            self.files[name] = File(b"", named=False)
        file = self.files[name]
        if there:
            file.written((self.path / name).read_bytes())
        file.gone = not there
        return file

    def sync(self, name: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.step()
        mark = self.look(name).mark()
        meanwhile()
        self.files[name].settle(mark)
        self.step()

    def sync_directory(self) -> None:
        self.step()
        for name in (DATA, *FILES):
            file = self.look(name)
            file.named = not file.gone
        self.step()

    def left(self, target: Path, rng: random.Random) -> None:
        target.mkdir()
        for name in (DATA, *FILES):
            file = self.look(name)
            if file.named == (not file.gone):
                there = file.named
            else:
                there = rng.random() < 0.5
            if there:
                (target / name).write_bytes(file.found(rng))


class Env:
    """LMDB's environment, on such a disk."""

    def __init__(self, env: Any, house: House) -> None:
        self._env, self._house = env, house
        self.stat, self.begin = env.stat, env.begin

    def sync(self, force: bool) -> None:
        assert force
        self._house.disk.sync(DATA, self._house.meanwhile)


class Asked:
    """In the place of the syncing thread and of its queue."""

    def __init__(self, house: House) -> None:
        self._house = house
        self.todo: list[Callable[[], None]] = []

    def put(self, what: Callable[[], None] | None) -> None:
        if what is not None:
            self.todo.append(what)
            if not self._house.is_open:
                self._house.settle()


class House:
    """A backend on such a disk, and what it should hold."""

    def __init__(self, tmp: Path, patch: pytest.MonkeyPatch, rng: random.Random) -> None:
        self.rng = rng
        self._tmp = tmp
        self._made = 0
        self.rows: Rows = {}
        # What it holds if the commit that was under way has happened, too.
        self.next: Rows | None = None
        self.is_open = False
        self.committing = False
        self._arrange(patch)
        self.disk = Disk(self._new())
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
        # The file is made by LMDB alone: its birth is not the log's affair.
        backend = LmdbBackend(self.disk.path, readonly=False, logged=logged)
        self.disk.step()
        return backend

    def _check(self, backend: LmdbBackend) -> None:
        with closing(backend.snapshot()) as snapshot:
            found = dict(snapshot.scan(b"\0", b"\xff", None, False))
        if found == self.next:
            self.rows = found
        self.next = None
        assert found == self.rows

    def fill(self) -> None:
        """A tree of some pages, none of them free: then pages that are needed are the ones to be had."""
        self._change([(b"k%03d" % n, self.rng.randbytes(1500)) for n in range(KEYS)], [])

    def commit(self) -> None:
        touched = [b"k%03d" % self.rng.randrange(KEYS) for _ in range(self.rng.randint(1, 5))]
        gone = [key for key in sorted(set(touched)) if self.rng.random() < 0.1]
        puts = [
            (key, self.rng.randbytes(self.rng.choice((1, 700, 1500, 6000))))
            for key in touched
            if key not in gone
        ]
        self._change([*puts, (b"turn", self.rng.randbytes(8))], gone)

    def _change(self, puts: list[tuple[bytes, bytes]], gone: list[bytes]) -> None:
        self.committing = True
        txn = self.backend.begin()
        txn.put_many(puts)
        for key in gone:
            txn.delete(key)
        self.next = {k: v for k, v in {**self.rows, **dict(puts)}.items() if k not in gone}
        txn.commit()
        self.rows, self.next = self.next, None
        self.committing = False
        self.disk.look(DATA)

    def meanwhile(self) -> None:
        """Commits go on beside a sync."""
        for _ in range(self.rng.choice((0, 0, 1, 3))):
            # Above that they wait for it.
            if self.is_open and not self.committing and self.redo._at <= redo.REDO_BYTES_MAX:
                self.commit()

    def settle(self) -> None:
        while self.asked.todo:
            self.asked.todo.pop(0)()
            self.redo._settled.set()

    def some(self) -> None:
        for _ in range(self.rng.randint(3, 40)):
            self.commit()
            if self.rng.random() < 0.15:
                self.settle()

    def cut(self) -> None:
        """The power goes, and comes back, and perhaps goes again while the store is recovered."""
        for _ in range(AGAIN_MAX):
            self._go_down()
            self.disk.cut_at = self.rng.randint(1, 60)
            with suppress(Cut):
                self.open()
                return
        self._go_down()
        self.open()

    def _go_down(self) -> None:
        left = self._new()
        self.disk.left(left, self.rng)
        if self.is_open:
            self.backend.env.close()
        self.is_open = self.committing = False
        shutil.rmtree(self.disk.path)
        self.disk = Disk(left)

    def _new(self) -> Path:
        self._made += 1
        return self._tmp / str(self._made)

    def _arrange(self, patch: pytest.MonkeyPatch) -> None:
        house = self
        pwrite, ftruncate, replayed = os.pwrite, os.ftruncate, Recovery._commit

        class Watched(Redo):
            def __init__(self, path: Path, env: Any, *, round: int) -> None:
                house.redo = self
                house.asked = Asked(house)
                patch.setattr(redo.queue, "SimpleQueue", lambda: house.asked)
                super().__init__(path, Env(env, house), round=round)  # type: ignore[arg-type]

            def _wait(self) -> None:
                house.settle()
                super()._wait()

        class NoThread:
            def __init__(self, **_: object) -> None: ...
            def start(self) -> None: ...
            def join(self) -> None: ...

        def name_of(fd: int) -> str:
            return os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))

        def written(fd: int, data: Any, at: int) -> int:
            house.disk.step()
            wrote = pwrite(fd, data, at)
            house.disk.look(name_of(fd))
            house.disk.step()
            return wrote

        def cut_off(fd: int, size: int) -> None:
            ftruncate(fd, size)
            house.disk.look(name_of(fd))
            house.disk.step()

        def synced(fd: int) -> None:
            house.disk.sync(name_of(fd), house.meanwhile)

        def commit(self: Recovery, env: Any, id: int, body: bytes) -> None:
            house.disk.step()
            replayed(self, env, id, body)
            house.disk.look(DATA)
            house.disk.step()

        def replay(self: Recovery, env: Any, real: Any = Recovery.replay) -> None:
            house.disk.look(DATA)
            real(self, env)
            if self._base is not None:
                house.disk.sync(DATA)

        patch.setattr(rows, "Redo", Watched)
        patch.setattr(redo.threading, "Thread", NoThread)
        patch.setattr(redo.os, "pwrite", written)
        patch.setattr(redo.os, "ftruncate", cut_off)
        patch.setattr(redo.os, "fdatasync", synced)
        patch.setattr(redo.os, "fsync", synced)
        patch.setattr(redo, "_sync_directory", lambda path: house.disk.sync_directory())
        patch.setattr(Recovery, "_commit", commit)
        patch.setattr(Recovery, "replay", replay)


@contextmanager
def descriptors_given_back() -> Iterator[None]:
    """A process that is cut off has no chance to close its files."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    for name in set(os.listdir("/proc/self/fd")) - before:
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if os.path.basename(target).split(" ")[0] in (DATA, *FILES):
                os.close(int(name))


def history(
    tmp: Path, seed: int, plant: Callable[[pytest.MonkeyPatch], None] | None = None
) -> None:
    rng = random.Random(seed)
    with descriptors_given_back(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(redo, "REDO_COMMITS", rng.choice((1, 3, 8, 1000)))
        patch.setattr(redo, "REDO_BYTES", 64 * 1024)
        patch.setattr(redo, "REDO_BYTES_MAX", rng.choice((20_000, 200_000, 10**9)))
        if plant is not None:
            plant(patch)
        house = House(tmp, patch, rng)
        house.fill()
        for _ in range(CUTS):
            house.disk.steps, house.disk.cut_at = 0, rng.randint(1, 250)
            with suppress(Cut):
                house.some()
            house.cut()
        house.disk.cut_at = -1
        house.some()
        house.settle()
        house._check(house.backend)
        house.backend.env.close()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_was_acknowledged_survives_cuts_in_recoveries_too(tmp_path: Path, seed: int) -> None:
    history(tmp_path, seed)


@pytest.mark.deep
def test_what_was_acknowledged_survives_many_cuts_in_recoveries(tmp_path: Path) -> None:
    for seed in range(1_000, 1_400):
        (tmp_path / str(seed)).mkdir()
        history(tmp_path / str(seed), seed)
        shutil.rmtree(tmp_path / str(seed))


# -- the model finds what it is there for -------------------------------------------------------------


def base_not_kept_in_a_recovery(patch: pytest.MonkeyPatch) -> None:
    def replay(self: Recovery, env: Any) -> None:
        at = int(env.info()["last_txnid"])
        for id, body in () if self._base is None else redo._records(self._path, self._base):
            if id > at:
                self._commit(env, id, body)

    patch.setattr(Recovery, "replay", replay)


def base_given_up_before_the_next_is_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(redo, "_BASES_MAX", 1)


def base_told_of_before_it_is_synced(patch: pytest.MonkeyPatch) -> None:
    begin = Redo.checkpoint

    def checkpoint(self: Redo) -> None:
        settled = self._settled.is_set()
        begin(self)
        if settled and self._round > 5:
            meta = os.pread(self._data, redo.META_BYTES, (self._bases[-1].id() % 2) * self._psize)
            told = Header(self._round, self._bases[-1].id(), meta)
            redo._write(self._file, redo._headed(told), redo._BASED_AT)

    patch.setattr(Redo, "checkpoint", checkpoint)


PLANTS = (
    base_not_kept_in_a_recovery,
    base_given_up_before_the_next_is_there,
    base_told_of_before_it_is_synced,
)
FOUND = 3


def hunt(name: str, tmp: Path) -> int:
    plant = next(one for one in PLANTS if one.__name__ == name)
    for seed in range(120):
        (tmp / str(seed)).mkdir()
        try:
            history(tmp / str(seed), seed, plant)
        except Exception:
            return FOUND
        shutil.rmtree(tmp / str(seed))
    return 0


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_found(
    tmp_path: Path, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    # In a process of its own: a tree of pages that were lost is the end of whoever reads it.
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.test_redo_cuts", plant.__name__, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        timeout=100,
    )
    killed = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)
    assert done.returncode in (FOUND, *killed), done.stderr.decode()


if __name__ == "__main__":
    sys.exit(hunt(sys.argv[1], Path(sys.argv[2])))
