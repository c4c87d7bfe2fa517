"""A store that is copied is the same store elsewhere, and never two of it, whatever happens on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from holdfast import store as stores
from holdfast.clock import S
from holdfast.config import WriterLimits
from holdfast.durable import lease, queue
from holdfast.errors import (
    CopyUnfinished,
    HoldfastError,
    Invalid,
    NotFound,
    SchemaMismatch,
    StoreBusy,
    StoreMoved,
)
from holdfast.store import blobs, marks, places, schema
from holdfast.store import copy as copies
from holdfast.store.api import Store
from holdfast.store.copy import Copied, CopyDiffers, Phase, SameStore, TargetTaken
from holdfast.store.engine import guard_schema
from holdfast.store.pg import presence
from holdfast.store.pg.presence import BeingCopied
from holdfast.store.places import Place
from holdfast.store.postgres import PostgresStore
from holdfast.store.probe import now
from tests.postgres import fresh_url

pytestmark = pytest.mark.timeout(120)

LIMITS = WriterLimits(linger_s=0.05, reader_check_s=0.05)
KINDS = ("lmdb", "postgres")
PAIRS = [(here, there) for here in KINDS for there in KINDS]
PATIENCE_S = 10.0
TTL_NS = 3600 * S

Made = Callable[[str], str]
each_kind = pytest.mark.parametrize("kind", KINDS)
each_pair = pytest.mark.parametrize(("here", "there"), PAIRS)


@pytest.fixture
def place(tmp_path: Path) -> Made:
    """URLs of places where nothing is yet."""
    made = iter(range(100))

    def place(kind: str) -> str:
        return fresh_url() if kind == "postgres" else str(tmp_path / f"store-{next(made)}")

    return place


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.store.pg import place as pg

    for module in (places, pg):
        monkeypatch.setattr(module, "PAGE_ROWS", 7)


def open_store(url: str, *, bootstrap: bool = True) -> Store:
    return stores.open(url, bootstrap=bootstrap, limits=LIMITS)


def fill(url: str) -> None:
    """Some of everything that a store keeps rows of."""
    with open_store(url) as store:
        store.transact(queue.put_many, "mail", [b"one", b"", b"three" * 100])
        store.transact(queue.claim, "mail", "w", 1, TTL_NS)
        store.transact(lease.acquire, "world/ada", "w", "i", TTL_NS)
        store.transact(lambda txn: txn.append(("log",), b"first"))
        store.transact(lambda txn: txn.add(("count",), 41))
        store.transact(lambda txn: txn.put(("blob",), blobs.put(txn, b"large" * 5000)))
        store.transact(lambda txn: txn.put(b"\x00\xff raw", b"\x00"))


@contextmanager
def held(here: str, there: str) -> Iterator[tuple[Place, Place]]:
    source = places.source(here, patience_s=PATIENCE_S)
    try:
        target = places.target(there, patience_s=PATIENCE_S)
        try:
            yield source, target
        finally:
            target.close()
    finally:
        source.close()


def move(here: str, there: str, *, keep: bool = False) -> Copied:
    with held(here, there) as (source, target):
        return copies.copy(source, target, keep=keep, progress=silent)


def silent(phase: Phase, rows: int, bytes: int, about: int | None) -> None:
    return


def rows_of(url: str) -> dict[bytes, bytes]:
    opened = places.source(url, patience_s=PATIENCE_S)
    try:
        return {key: value for page in opened.pages(b"") for key, value in page}
    finally:
        opened.close()


# -- what arrives ----------------------------------------------------------------------------------


@each_pair
def test_every_row_is_there_and_no_other(place: Made, here: str, there: str) -> None:
    source, target = place(here), place(there)
    fill(source)
    before = rows_of(source)
    done = move(source, target)
    assert rows_of(target) == before
    assert done.rows == len(before)
    assert {"queue", "lease", "lease_log", "sequence", "blob", "other"} <= done.spaces.keys()


@each_pair
def test_a_moved_store_goes_on_as_it_was(place: Made, here: str, there: str) -> None:
    source, target = place(here), place(there)
    fill(source)
    with open_store(source) as store:
        generation, last_ns = store.generation, store.transact(now)
    move(source, target)
    with open_store(target, bootstrap=False) as store:
        assert store.generation == generation
        assert store.transact(now) > last_ns
        assert store.transact(lambda txn: txn.append(("log",), b"second")) == 2
        assert store.transact(lease.acquire, "world/ada", "w", "i", TTL_NS).epoch == 1
        assert store.read(queue.counts, "mail").claimed == 1
        name = store.read(lambda txn: txn.get(("blob",)))
        assert store.read(blobs.sound, name)


@each_pair
def test_commit_numbers_go_on_above_those_of_the_source(place: Made, here: str, there: str) -> None:
    source, target = place(here), place(there)
    fill(source)
    last = move(source, target).last
    assert last.commit_no >= 7
    with open_store(target) as store:
        store.transact(now)
    opened = places.source(target, patience_s=PATIENCE_S)
    assert opened.last().commit_no > last.commit_no
    opened.close()


@each_pair
def test_a_moved_store_may_move_again(place: Made, here: str, there: str) -> None:
    first, second, third = place(here), place(there), place(here)
    fill(first)
    before = rows_of(first)
    move(first, second)
    move(second, third)
    assert rows_of(third) == before


@each_kind
def test_a_store_that_nobody_wrote_to_is_moved_too(place: Made, kind: str) -> None:
    source, target = place(kind), place(kind)
    open_store(source).close()
    assert move(source, target).rows == 0
    with open_store(target, bootstrap=False) as store:
        assert store.generation == 1


@each_kind
def test_a_page_is_bounded_by_bytes(place: Made, kind: str) -> None:
    url = place(kind)
    size = places.PAGE_BYTES // 4
    plant(url, {b"%02d" % n: bytes(size) for n in range(12)})
    opened = places.source(url, patience_s=PATIENCE_S)
    try:
        pages = [len(page) for page in opened.pages(b"")]
    finally:
        opened.close()
    assert sum(pages) == 12
    assert max(pages) <= 5


# -- one of the two --------------------------------------------------------------------------------


@each_pair
def test_the_source_cannot_be_opened_any_more_and_says_where_its_rows_are(
    place: Made, here: str, there: str
) -> None:
    source, target = place(here), place(there)
    fill(source)
    with held(source, target) as (a, b):
        copies.copy(a, b, keep=False, progress=silent)
        named = b.url
    with pytest.raises(StoreMoved) as told:
        open_store(source)
    assert told.value.to == named


def test_a_client_that_was_cut_off_cannot_commit_into_a_store_that_moved_meanwhile(
    place: Made,
) -> None:
    source, target = place("postgres"), place("lmdb")
    fill(source)
    with PostgresStore(source) as client:
        client.transact(now)
        with psycopg.connect(source, autocommit=True) as admin:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname ="
                " current_database() AND application_name = 'holdfast'"
            )
        move(source, target)
        with pytest.raises(StoreMoved):
            client.transact(now)


def test_a_client_that_nobody_knew_of_cannot_commit_into_a_store_that_moved_meanwhile(
    place: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a release that does not say that it is there, and has not been cut off either."""
    source, target = place("postgres"), place("lmdb")
    fill(source)
    monkeypatch.setattr(presence, "attend", lambda connection, lock: None)
    with PostgresStore(source) as client:
        client.transact(now)
        move(source, target)
        before = rows_of(source)
        with pytest.raises(StoreMoved):
            client.transact(now)
    assert rows_of(source) == before


@each_pair
def test_with_keep_both_are_stores_and_the_copy_is_another_one(
    place: Made, here: str, there: str
) -> None:
    source, target = place(here), place(there)
    fill(source)
    before = rows_of(source)
    move(source, target, keep=True)
    assert rows_of(target) == before
    with open_store(source) as first, open_store(target) as second:
        assert first.generation == 1
        assert second.generation > 1_700_000_000_000, "as that of a restored backup"
        stale = first.transact(lease.acquire, "world/ada", "w", "i", TTL_NS)
        assert second.transact(lease.renew, [stale], TTL_NS) == [None]


# -- a run that dies -------------------------------------------------------------------------------


class Died(BaseException):
    pass


class Mortal:
    """A place whose process dies at one of its writes: before it or after it."""

    def __init__(self, place: Place, count: Counter, at: int) -> None:
        self._place, self._count, self._at = place, count, at
        self.url = place.url

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._place, name)
        if name not in ("put", "empty", "settle", "mark", "close_down"):
            return found

        def write(*args: Any) -> None:
            self._step()
            found(*args)
            self._step()

        return write

    def _step(self) -> None:
        self._count.steps += 1
        if self._count.steps == self._at:
            raise Died


class Counter:
    steps = 0


def move_and_die(here: str, there: str, at: int) -> bool:
    """Whether it died; else it was done before."""
    count = Counter()
    with held(here, there) as (source, target), suppress(Died):
        copies.copy(
            Mortal(source, count, at), Mortal(target, count, at), keep=False, progress=silent
        )
        return False
    return True


@pytest.mark.usefixtures("small_pages")
@each_pair
def test_a_run_that_dies_at_any_write_leaves_one_store_at_most_and_the_next_run_finishes(
    place: Made, here: str, there: str
) -> None:
    before = {b"%02d" % n: bytes([n]) for n in range(16)}
    at, outcomes = 0, set()
    while True:
        at += 1
        source, target = place(here), place(there)
        plant(source, before)
        if not move_and_die(source, target, at):
            break
        open_now = (may_open(source), may_open(target))
        outcomes.add(open_now)
        assert open_now != (True, True), f"two stores after step {at}"
        if open_now != (False, True):
            move(source, target)
        assert rows_of(target) == before
        assert (may_open(source), may_open(target)) == (False, True)
    assert at > 8
    assert outcomes == {(True, False), (False, False), (False, True)}


def plant(url: str, rows: dict[bytes, bytes]) -> None:
    """A store with these rows, made without an engine."""
    made = places.target(url)
    made.empty(marks.write(marks.Moved("", "")))
    made.put(sorted(rows.items()))
    made.settle(schema.marker(), schema.Meta("id", 1, "", 0, 5), places.Last(3, 5))
    made.close()


def may_open(url: str) -> bool:
    """What everybody asks who opens a store."""
    opened = places.target(url, patience_s=PATIENCE_S)
    try:
        guard_schema(opened.marker(), (schema.SCHEMA_MAJOR, schema.SCHEMA_MINOR), bootstrap=False)
    except (StoreMoved, CopyUnfinished, NotFound):
        return False
    finally:
        opened.close()
    return True


def opens(url: str) -> bool:
    try:
        open_store(url, bootstrap=False).close()
    except (StoreMoved, CopyUnfinished, NotFound):
        return False
    return True


@pytest.mark.usefixtures("small_pages")
@each_pair
def test_what_was_copied_before_is_not_copied_again(place: Made, here: str, there: str) -> None:
    source, target = place(here), place(there)
    fill(source)
    assert move_and_die(source, target, at=5)
    seen: list[int] = []
    with held(source, target) as (a, b):
        done = copies.copy(
            a,
            b,
            keep=False,
            progress=lambda phase, rows, *_: seen.append(rows) if phase is Phase.COPYING else None,
        )
    assert done.resumed
    assert seen[-1] < done.rows


@pytest.mark.usefixtures("small_pages")
@each_pair
def test_a_source_that_went_on_after_a_dead_run_is_copied_from_the_beginning(
    place: Made, here: str, there: str
) -> None:
    source, target = place(here), place(there)
    fill(source)
    assert move_and_die(source, target, at=5)
    with open_store(source) as store:
        store.transact(lambda txn: txn.delete(b"\x00\xff raw"))
    before = rows_of(source)
    assert not move(source, target).resumed
    assert rows_of(target) == before


@each_kind
def test_an_unfinished_copy_cannot_be_opened(place: Made, kind: str) -> None:
    source, target = place("lmdb"), place(kind)
    fill(source)
    assert move_and_die(source, target, at=4)
    with pytest.raises(CopyUnfinished) as told:
        open_store(target)
    assert told.value.source.endswith(source)


class Flipping:
    """A place on a bad disk: one bit of one value arrives changed."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.url = place.url

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place, name)

    def put(self, rows: list[tuple[bytes, bytes]]) -> None:
        key, value = rows[-1]
        changed = bytes([value[0] ^ 1]) + value[1:] if value else b"\x01"
        self._place.put([*rows[:-1], (key, changed)])


@each_pair
def test_a_bit_that_changed_on_the_way_is_noticed_and_the_source_stays(
    place: Made, here: str, there: str
) -> None:
    source, target = place(here), place(there)
    fill(source)
    with held(source, target) as (a, b), pytest.raises(CopyDiffers) as told:
        copies.copy(a, Flipping(b), keep=False, progress=silent)
    assert told.value.space == "queue", "the last of its page"
    assert opens(source)
    assert not opens(target)


# -- what is refused -------------------------------------------------------------------------------


@each_pair
def test_a_place_with_a_store_is_not_overwritten(place: Made, here: str, there: str) -> None:
    source, target = place(here), place(there)
    fill(source)
    with open_store(target) as store:
        store.transact(now)
    before = rows_of(target)
    with pytest.raises(TargetTaken):
        move(source, target)
    assert rows_of(target) == before
    assert opens(source)


@each_kind
def test_an_unfinished_copy_of_another_store_is_not_overwritten(place: Made, kind: str) -> None:
    one, other, target = place("lmdb"), place("lmdb"), place(kind)
    fill(one)
    fill(other)
    assert move_and_die(one, target, at=4)
    with pytest.raises(TargetTaken):
        move(other, target)
    move(one, target)


@each_kind
def test_a_store_that_was_moved_away_is_no_place_for_another(place: Made, kind: str) -> None:
    first, second, third = place(kind), place("lmdb"), place("lmdb")
    fill(first)
    move(first, second)
    fill(third)
    with pytest.raises(TargetTaken):
        move(third, first)


def test_a_moved_store_is_not_moved_elsewhere(place: Made) -> None:
    first, second, third = place("lmdb"), place("lmdb"), place("postgres")
    fill(first)
    move(first, second)
    with pytest.raises(StoreMoved):
        move(first, third)


@each_kind
def test_a_store_of_a_newer_schema_is_not_copied(place: Made, kind: str) -> None:
    source, target = place(kind), place("lmdb")
    fill(source)
    opened = places.source(source, patience_s=PATIENCE_S)
    opened.mark(schema.marker(schema.SCHEMA_MAJOR + 1, 0))
    opened.close()
    with pytest.raises(SchemaMismatch):
        move(source, target)


@each_kind
def test_a_store_that_somebody_has_open_is_not_copied(place: Made, kind: str) -> None:
    source = place(kind)
    fill(source)
    with open_store(source), pytest.raises(StoreBusy):
        places.source(source)


def test_a_store_cannot_be_opened_while_it_is_copied(place: Made) -> None:
    source = place("postgres")
    fill(source)
    opened = places.source(source, patience_s=PATIENCE_S)
    try:
        with pytest.raises(BeingCopied):
            open_store(source)
    finally:
        opened.close()


@each_kind
def test_a_place_without_a_store_is_no_source(place: Made, kind: str) -> None:
    with pytest.raises(NotFound):
        places.source(place(kind))


def test_a_store_in_memory_is_neither_source_nor_target() -> None:
    for find in (places.source, places.target):
        with pytest.raises(Invalid):
            find("memory:")


def test_a_backup_of_the_same_store_is_not_taken_for_a_free_place(
    place: Made, tmp_path: Path
) -> None:
    source = place("lmdb")
    fill(source)
    with open_store(source) as store:
        store.backup(str(tmp_path / "copy"))
    with pytest.raises(SameStore):
        move(source, str(tmp_path / "copy"))


def test_a_marker_that_is_no_version_is_read_as_what_it_says() -> None:
    origin = marks.Origin("id", 1, 2, 3)
    for said in (marks.Copying("c", "./a", origin, keep=True), marks.Moved("c", "./b")):
        assert marks.read(marks.write(said)) == said
        with pytest.raises(HoldfastError):
            marks.refuse(marks.write(said))
    assert marks.read(schema.marker()) is None
    assert marks.read(None) is None


def test_every_space_has_a_sum_of_its_own() -> None:
    found = copies.sums(iter([[(schema.prefix(space, "k"), b"v") for space in schema.Space]]))
    assert found.keys() == {space.name.lower() for space in schema.Space}
    assert {one.rows for one in found.values()} == {1}
