"""Power cuts: whatever part of what was not synced reached the disk, what was acknowledged is there.

The disk here is a model. A sync of a file makes durable what the file holds then; a cut leaves, sector by
sector, either that or what was written later. `Cut` stands for the end of the process, at any call.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import StoreCorrupt, StoreError, StoreFull
from holdfast.store import redo
from holdfast.store.redo import DATA, FILES
from holdfast.store.rows import LmdbBackend

MODULES = ("holdfast.store.redo", "holdfast.store.rows")

SECTOR = 512
KEYS = 60
SEEDS = 25
CUTS = 3
Rows = dict[bytes, bytes]


class Cut(BaseException):
    pass


class Later:
    """In the place of the syncing thread: what it would do is done when the test says so."""

    def __init__(self) -> None:
        self.todo: list[Callable[[], None]] = []

    def put(self, what: Callable[[], None] | None) -> None:
        if what is not None:
            self.todo.append(what)


class Disk:
    """A directory, and what of its files would survive."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.durable: dict[str, bytes] = {}
        self.cut_at = -1
        self.calls = 0
        # None is the one that is wanted; the others are planted bugs.
        self.bug = ""
        self._fdatasync, self._pwrite = os.fdatasync, os.pwrite
        patch.setattr(redo.os, "fdatasync", self._synced)
        patch.setattr(redo.os, "pwrite", self._written)

    def synced(self, name: str) -> None:
        self.durable[name] = (self.path / name).read_bytes()

    def step(self) -> None:
        """Here the machine may go down."""
        self.calls += 1
        if self.calls == self.cut_at:
            raise Cut

    def left(self, target: Path, rng: random.Random) -> None:
        """What is found on the disk after a cut."""
        target.mkdir()
        for name in (DATA, *FILES):
            if not (self.path / name).exists():
                continue
            now, then = (self.path / name).read_bytes(), self.durable.get(name, b"")
            share = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
            size = len(now) if rng.random() < 0.5 or name != DATA else max(len(then), SECTOR)
            out = bytearray()
            for at in range(0, size, SECTOR):
                old, new = then[at : at + SECTOR], now[at : at + SECTOR]
                out += new if rng.random() < share else old.ljust(len(new), b"\0")
            (target / name).write_bytes(out)

    def _synced(self, fd: int) -> None:
        self.step()
        self._fdatasync(fd)
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        if not (self.bug == "log not synced" and name in FILES):
            self.synced(name)
        self.step()

    def _written(self, fd: int, data: Any, at: int) -> int:
        self.step()
        wrote = self._pwrite(fd, data, at)
        self.step()
        return wrote


class Env:
    """LMDB's environment, with a sync that the disk knows of."""

    def __init__(self, env: Any, disk: Disk) -> None:
        self._env, self._disk = env, disk

    def sync(self, force: bool) -> None:
        self._disk.step()
        self._env.sync(force)
        if self._disk.bug != "file not synced":
            self._disk.synced(DATA)
        self._disk.step()

    def begin(self) -> Any:
        txn = self._env.begin()
        return Unpinned(txn) if self._disk.bug == "base not kept" else txn

    def stat(self) -> Any:
        return self._env.stat()


class Unpinned:
    def __init__(self, txn: Any) -> None:
        self._id = txn.id()
        txn.abort()

    def id(self) -> int:
        return int(self._id)

    def abort(self) -> None: ...


class House:
    """A backend on such a disk, and what it should hold."""

    def __init__(self, tmp: Path, patch: pytest.MonkeyPatch, rng: random.Random) -> None:
        self.rng = rng
        self._tmp, self._patch = tmp, patch
        self._made = 0
        self.bug = ""
        self.rows: Rows = {}
        # What it holds if the commit that was under way has happened.
        self.next: Rows | None = None
        self.open(self._new())

    def open(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        self.disk = Disk(path, self._patch)
        self.later = Later()
        begun: list[redo.Redo] = []
        disk, later = self.disk, self.later

        class Watched(redo.Redo):
            def __init__(self, path: Path, env: Any, *, round: int) -> None:
                begun.append(self)
                disk.synced(DATA)
                super().__init__(path, Env(env, disk), round=round)  # type: ignore[arg-type]

            def checkpoint(self) -> None:
                if len(begun) == 1 and self._round > self.first:
                    self._asked = later  # type: ignore[assignment]
                super().checkpoint()

            first = 0

        self._patch.setattr("holdfast.store.rows.Redo", Watched)
        for name in FILES:
            if (path / name).exists():
                disk.synced(name)
        Watched.first = redo.Recovery(path).round
        self.backend = LmdbBackend(path, readonly=False, logged=True)
        # Reading past the end of the file would be the end of this process.
        info, page_bytes = self.backend.env.info(), self.backend.env.stat()["psize"]
        assert (path / DATA).stat().st_size >= (info["last_pgno"] + 1) * page_bytes
        self.redo = begun[0]
        disk.bug = self.bug

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
        self.next = after
        txn.commit()
        self.rows, self.next = after, None

    def settle(self) -> None:
        """Let the checkpoint that is under way come to its end."""
        while self.later.todo:
            self.later.todo.pop(0)()
            self.redo._settled.set()

    def some(self) -> None:
        """Commits and checkpoints, in any order, until a cut comes, if one comes."""
        for _ in range(self.rng.randint(3, 25)):
            self.commit()
            if self.rng.random() < 0.3:
                self.redo.checkpoint()
            if self.rng.random() < 0.3:
                self.settle()

    def cut(self) -> None:
        """The power goes, and comes back."""
        left = self._new()
        self.disk.left(left, self.rng)
        self.backend.env.close()
        self.open(left)
        found = self.found()
        if found == self.next:
            self.rows = found
        self.next = None
        assert_same_rows(found, self.rows)

    def found(self) -> Rows:
        with closing(self.backend.snapshot()) as snapshot:
            return dict(snapshot.scan(b"\0", b"\xff", None, False))

    def _new(self) -> Path:
        self._made += 1
        return self._tmp / str(self._made)


def assert_same_rows(found: Rows, expected: Rows) -> None:
    """Compare without an explanation of the difference: pytest needs minutes to explain large rows."""
    different = sorted(
        key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)
    )
    if different:
        raise AssertionError(f"{len(different)} rows differ, the first is {different[0]!r}")


def history(tmp: Path, patch: pytest.MonkeyPatch, seed: int, bug: str = "") -> None:
    rng = random.Random(seed)
    house = House(tmp, patch, rng)
    for _ in range(CUTS):
        house.disk.bug = house.bug = bug
        house.disk.calls, house.disk.cut_at = 0, rng.randint(1, 120)
        with suppress(Cut):
            house.some()
        house.disk.cut_at = -1
        house.cut()
    house.some()
    assert_same_rows(house.found(), house.rows)
    house.backend.env.close()


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as made:
        yield made


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_was_acknowledged_survives_power_cuts(
    tmp_path: Path, patch: pytest.MonkeyPatch, seed: int
) -> None:
    history(tmp_path, patch, seed)


@pytest.mark.deep
def test_what_was_acknowledged_survives_many_power_cuts(tmp_path: Path) -> None:
    for seed in range(100, 400):
        (tmp_path / str(seed)).mkdir()
        with pytest.MonkeyPatch.context() as patch:
            history(tmp_path / str(seed), patch, seed)
        shutil.rmtree(tmp_path / str(seed))


def forgetful(patch: pytest.MonkeyPatch, what: str) -> None:
    if what == "meta page not put back":
        patch.setattr(redo, "_put_back", lambda *_: None)
    if what == "second log not read":
        records = redo._records

        def first(path: Path, base: redo.Header) -> Iterator[tuple[int, bytes]]:
            (path / FILES[(base.round + 1) % 2]).unlink()
            return records(path, base)

        patch.setattr(redo, "_records", first)


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
def test_a_planted_bug_is_found(tmp_path: Path, bug: str) -> None:
    for seed in range(200):
        (tmp_path / str(seed)).mkdir()
        with pytest.MonkeyPatch.context() as patch:
            forgetful(patch, bug)
            try:
                history(tmp_path / str(seed), patch, seed, bug)
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


def killed(backend: LmdbBackend) -> None:
    """End as a process does that is killed: nothing is said, and what was written stays."""
    assert backend._redo is not None
    backend._redo._wait()
    backend._redo.abandon()
    backend.env.close()


def test_a_commit_that_lmdb_was_not_told_of_is_made_up_for(tmp_path: Path) -> None:
    backend = logged(tmp_path)
    put(backend, a=b"1")
    txn = backend.begin()
    txn.put_many([(b"b", b"2")])
    assert backend._redo is not None
    backend._redo.append(txn.id, [(b"b", b"2"), (b"a", None)])
    txn.abort()
    killed(backend)
    with closing(logged(tmp_path)) as again:
        assert rows_of(again) == {b"b": b"2"}


def test_a_commit_that_lmdb_refused_does_not_come_back(tmp_path: Path) -> None:
    backend = logged(tmp_path)
    put(backend, a=b"1")
    assert backend._redo is not None
    txn = backend.begin()
    backend._redo.append(txn.id, [(b"b", b"2")])
    txn.abort()
    backend._redo.void()
    put(backend, c=b"3")
    killed(backend)
    with closing(logged(tmp_path)) as again:
        assert rows_of(again) == {b"a": b"1", b"c": b"3"}


def test_a_store_that_was_closed_has_nothing_to_recover(tmp_path: Path) -> None:
    with closing(logged(tmp_path)) as backend:
        put(backend, a=b"1")
    before = (tmp_path / DATA).read_bytes()
    redo.Recovery(tmp_path).put_back()
    assert (tmp_path / DATA).read_bytes() == before


def test_a_backend_without_a_log_takes_up_what_the_log_has_and_ends_it(tmp_path: Path) -> None:
    backend = logged(tmp_path)
    put(backend, a=b"1")
    killed(backend)
    with closing(LmdbBackend(tmp_path, readonly=False)) as plain:
        assert rows_of(plain) == {b"a": b"1"}
        put(plain, b=b"2")
    with closing(logged(tmp_path)) as again:
        assert rows_of(again) == {b"a": b"1", b"b": b"2"}


@pytest.mark.parametrize("other", ["older", "newer"])
def test_another_file_in_its_place_is_refused_and_not_touched(tmp_path: Path, other: str) -> None:
    with closing(logged(tmp_path / "other")) as backend:
        for n in range(1 if other == "older" else 50):
            put(backend, n=b"%d" % n)
    home = tmp_path / "home"
    backend = logged(home)
    for n in range(20):
        put(backend, n=b"%d" % n)
    assert backend._redo is not None
    backend._redo.checkpoint()
    killed(backend)
    shutil.copyfile(tmp_path / "other" / DATA, home / DATA)
    before = (home / DATA).read_bytes()
    with pytest.raises(StoreCorrupt, match="redo"):
        logged(home)
    assert (home / DATA).read_bytes() == before


def test_commits_that_outrun_the_checkpoint_wait_for_it_and_the_log_stays_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redo, "REDO_BYTES_MAX", 64 * 1024)
    with closing(logged(tmp_path)) as backend:
        for n in range(200):
            put(backend, **{f"k{n % 7}": bytes([n % 251]) * 8_000})
        sizes = [(tmp_path / name).stat().st_size for name in FILES]
    assert max(sizes) < redo.REDO_BYTES + 64 * 1024


def test_a_file_that_cannot_be_synced_ends_the_writer(tmp_path: Path) -> None:
    backend = logged(tmp_path)
    put(backend, a=b"1")
    assert backend._redo is not None
    asked = threading.Event()

    class Broken:
        def __init__(self, env: Any) -> None:
            self.begin = env.begin

        def sync(self, force: bool) -> None:
            asked.set()
            raise OSError(5, "Input/output error")

    env = backend._redo._env
    backend._redo._env = Broken(env)  # type: ignore[assignment]
    backend._redo.checkpoint()
    assert asked.wait(30)
    backend._redo._settled.wait(30)
    with pytest.raises(StoreError, match="Input/output"):
        put(backend, b=b"2")
    with closing(backend.snapshot()) as snapshot:
        assert snapshot.get(b"b") is None
    backend.env.close()


def test_a_log_on_a_full_disk_fails_the_commit_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = logged(tmp_path)
    put(backend, a=b"1")
    pwrite = os.pwrite

    def full(fd: int, data: Any, at: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(redo.os, "pwrite", full)
    with pytest.raises(StoreFull):
        put(backend, b=b"2")
    monkeypatch.setattr(redo.os, "pwrite", pwrite)
    put(backend, c=b"3")
    killed(backend)
    with closing(logged(tmp_path)) as again:
        assert rows_of(again) == {b"a": b"1", b"c": b"3"}
