"""copy_store: a moved store is the same store at its target, and a crash never leaves two openable stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from holdfast import failpoints
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
from holdfast.store import blobs, schema
from holdfast.store.admin import copy as copies
from holdfast.store.admin import marker, raw_access
from holdfast.store.admin.copy import CopyDiffers, CopyPhase, CopyResult, SameStore, TargetNotEmpty
from holdfast.store.admin.raw_access import RawStore
from holdfast.store.api import Store
from holdfast.store.engine import check_schema
from holdfast.store.postgres.presence import StoreBeingCopied
from holdfast.store.postgres.store import PostgresStore
from tests.postgres import drop_tables, fresh_url
from tests.probe_operations import now

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("probe_writers")]

LIMITS = WriterLimits(idle_exit_s=0.05, reader_check_s=0.05)
KINDS = ("lmdb", "postgres")
PAIRS = [(here, there) for here in KINDS for there in KINDS]
PATIENCE_S = 10.0
TTL_NS = 3600 * S

MakeUrl = Callable[[str], str]
each_kind = pytest.mark.parametrize("kind", KINDS)
each_pair = pytest.mark.parametrize(("here", "there"), PAIRS)


@pytest.fixture
def make_url(tmp_path: Path) -> MakeUrl:
    """Return a factory of URLs of empty locations."""
    made = iter(range(100))

    def make_url(kind: str) -> str:
        return (
            fresh_url(empty=True) if kind == "postgres" else str(tmp_path / f"store-{next(made)}")
        )

    return make_url


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.store.postgres import raw_store as pg

    for module in (raw_access, pg):
        monkeypatch.setattr(module, "PAGE_ROWS", 7)


def open_store(url: str, *, bootstrap: bool = True) -> Store:
    return stores.open(url, bootstrap=bootstrap, limits=LIMITS)


def fill_store(url: str) -> None:
    """Write rows of several key spaces."""
    with open_store(url) as store:
        store.transact(queue.put_many, "mail", [b"one", b"", b"three" * 100])
        store.transact(queue.claim, "mail", "w", 1, TTL_NS)
        store.transact(lease.acquire, "world/ada", "w", "i", TTL_NS)
        store.transact(lambda txn: txn.append(("log",), b"first"))
        store.transact(lambda txn: txn.add(("count",), 41))
        store.transact(lambda txn: txn.put(("blob",), blobs.put(txn, b"large" * 5000)))
        store.transact(lambda txn: txn.put(b"\x00\xff raw", b"\x00"))


@contextmanager
def open_raw_stores(here: str, there: str) -> Iterator[tuple[RawStore, RawStore]]:
    source = raw_access.open_source(here, lock_wait_s=PATIENCE_S)
    try:
        target = raw_access.open_target(there, lock_wait_s=PATIENCE_S)
        try:
            yield source, target
        finally:
            target.close()
    finally:
        source.close()


def move_store(here: str, there: str, *, keep_source: bool = False) -> CopyResult:
    with open_raw_stores(here, there) as (source, target):
        return copies.copy_store(source, target, keep_source=keep_source, progress=ignore_progress)


def ignore_progress(phase: CopyPhase, rows: int, bytes: int, row_estimate: int | None) -> None:
    return


def rows_of(url: str) -> dict[bytes, bytes]:
    raw_store = raw_access.open_source(url, lock_wait_s=PATIENCE_S)
    try:
        return {key: value for page in raw_store.pages(b"") for key, value in page}
    finally:
        raw_store.close()


# -- contents of the target ------------------------------------------------------------------------


@each_pair
def test_copy_transfers_exactly_the_rows_of_the_source(
    make_url: MakeUrl, here: str, there: str
) -> None:
    source, target = make_url(here), make_url(there)
    fill_store(source)
    before = rows_of(source)
    result = move_store(source, target)
    assert rows_of(target) == before
    assert result.rows == len(before)
    assert {"queue", "lease", "lease_log", "sequence", "blob", "other"} <= result.spaces.keys()


@each_pair
def test_moved_store_keeps_generation_time_and_rows(
    make_url: MakeUrl, here: str, there: str
) -> None:
    source, target = make_url(here), make_url(there)
    fill_store(source)
    with open_store(source) as store:
        generation, last_ns = store.generation, store.transact(now)
    move_store(source, target)
    with open_store(target, bootstrap=False) as store:
        assert store.generation == generation
        assert store.transact(now) > last_ns
        assert store.transact(lambda txn: txn.append(("log",), b"second")) == 2
        assert store.transact(lease.acquire, "world/ada", "w", "i", TTL_NS).epoch == 1
        assert store.read(queue.counts, "mail").claimed == 1
        name = store.read(lambda txn: txn.get(("blob",)))
        assert store.read(blobs.is_intact, name)


@each_pair
def test_commit_numbers_of_a_moved_store_continue_above_the_source(
    make_url: MakeUrl, here: str, there: str
) -> None:
    source, target = make_url(here), make_url(there)
    fill_store(source)
    last = move_store(source, target).last_commit
    assert last.commit_no >= 7
    with open_store(target) as store:
        store.transact(now)
    raw_store = raw_access.open_source(target, lock_wait_s=PATIENCE_S)
    assert raw_store.last_commit().commit_no > last.commit_no
    raw_store.close()


@each_pair
def test_moved_store_can_be_moved_again(make_url: MakeUrl, here: str, there: str) -> None:
    first, second, third = make_url(here), make_url(there), make_url(here)
    fill_store(first)
    before = rows_of(first)
    move_store(first, second)
    move_store(second, third)
    assert rows_of(third) == before


@each_kind
def test_store_without_rows_can_be_moved(make_url: MakeUrl, kind: str) -> None:
    source, target = make_url(kind), make_url(kind)
    open_store(source).close()
    assert move_store(source, target).rows == 0
    with open_store(target, bootstrap=False) as store:
        assert store.generation == 1


@each_kind
def test_copy_page_is_bounded_by_bytes(make_url: MakeUrl, kind: str) -> None:
    url = make_url(kind)
    size = raw_access.PAGE_BYTES // 4
    create_store(url, {b"%02d" % n: bytes(size) for n in range(12)})
    raw_store = raw_access.open_source(url, lock_wait_s=PATIENCE_S)
    try:
        pages = [len(page) for page in raw_store.pages(b"")]
    finally:
        raw_store.close()
    assert sum(pages) == 12
    assert max(pages) <= 5


# -- at most one store opens -----------------------------------------------------------------------


@each_pair
def test_open_of_a_moved_source_raises_store_moved_with_the_target(
    make_url: MakeUrl, here: str, there: str
) -> None:
    source, target = make_url(here), make_url(there)
    fill_store(source)
    with open_raw_stores(source, target) as (a, b):
        copies.copy_store(a, b, keep_source=False, progress=ignore_progress)
        named = b.url
    with pytest.raises(StoreMoved) as raised:
        open_store(source)
    assert raised.value.to == named


def test_disconnected_client_of_a_moved_store_gets_store_moved(
    make_url: MakeUrl,
) -> None:
    source, target = make_url("postgres"), make_url("lmdb")
    fill_store(source)
    with PostgresStore(source) as client:
        client.transact(now)
        with psycopg.connect(source, autocommit=True) as admin:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname ="
                " current_database() AND application_name = 'holdfast'"
            )
        move_store(source, target)
        with pytest.raises(StoreMoved):
            client.transact(now)


def test_client_without_presence_lock_gets_store_moved(
    make_url: MakeUrl,
) -> None:
    """A client of an old release takes no presence lock, and its connection is still open."""
    source, target = make_url("postgres"), make_url("lmdb")
    fill_store(source)

    def unlock(connection: Any) -> None:
        connection.execute("SELECT pg_advisory_unlock_all()")

    with failpoints.on("postgres.presence_locked", calls=unlock), PostgresStore(source) as client:
        client.transact(now)
        move_store(source, target)
        before = rows_of(source)
        with pytest.raises(StoreMoved):
            client.transact(now)
    assert rows_of(source) == before


@each_pair
def test_copy_with_keep_source_has_a_new_generation(
    make_url: MakeUrl, here: str, there: str
) -> None:
    source, target = make_url(here), make_url(there)
    fill_store(source)
    before = rows_of(source)
    move_store(source, target, keep_source=True)
    assert rows_of(target) == before
    with open_store(source) as first, open_store(target) as second:
        assert first.generation == 1
        assert second.generation > 1_700_000_000_000, "as that of a restored backup"
        stale = first.transact(lease.acquire, "world/ada", "w", "i", TTL_NS)
        assert second.transact(lease.renew, [stale], TTL_NS) == [None]


# -- a crashed copy --------------------------------------------------------------------------------


class CopyCrash(BaseException):
    pass


class CrashingRawStore:
    """A RawStore whose process crashes before or after one of its writes."""

    def __init__(self, raw_store: RawStore, counter: WriteStepCounter, crash_at: int) -> None:
        self._raw_store, self._counter, self._crash_at = raw_store, counter, crash_at
        self.url = raw_store.url

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._raw_store, name)
        if name not in ("put", "clear", "finish", "write_marker", "mark_moved"):
            return attribute

        def write(*args: Any) -> None:
            self._step()
            attribute(*args)
            self._step()

        return write

    def _step(self) -> None:
        self._counter.steps += 1
        if self._counter.steps == self._crash_at:
            raise CopyCrash


class WriteStepCounter:
    steps = 0


def move_and_crash(here: str, there: str, crash_at: int) -> bool:
    """Move the store and crash at step `at`. Return False if the move completed before that step."""
    counter = WriteStepCounter()
    with open_raw_stores(here, there) as (source, target), suppress(CopyCrash):
        copies.copy_store(
            CrashingRawStore(source, counter, crash_at),
            CrashingRawStore(target, counter, crash_at),
            keep_source=False,
            progress=ignore_progress,
        )
        return False
    return True


@pytest.mark.usefixtures("small_pages")
@each_pair
def test_copy_crashed_at_any_write_leaves_one_store_and_can_be_resumed(
    make_url: MakeUrl, here: str, there: str
) -> None:
    before = {b"%02d" % n: bytes([n]) for n in range(16)}
    at, outcomes = 0, set()
    databases = [make_url(kind) if kind == "postgres" else "" for kind in (here, there)]
    while True:
        at += 1
        for url in filter(None, databases):
            drop_tables(url)
        source, target = databases[0] or make_url(here), databases[1] or make_url(there)
        create_store(source, before)
        if not move_and_crash(source, target, at):
            break
        open_now = (marker_allows_open(source), marker_allows_open(target))
        outcomes.add(open_now)
        assert open_now != (True, True), f"two stores after step {at}"
        if open_now != (False, True):
            move_store(source, target)
        assert rows_of(target) == before
        assert (marker_allows_open(source), marker_allows_open(target)) == (False, True)
    assert at > 8
    assert outcomes == {(True, False), (False, False), (False, True)}


def create_store(url: str, rows: dict[bytes, bytes]) -> None:
    """Create a store with these rows without an engine."""
    raw_store = raw_access.open_target(url)
    raw_store.clear(marker.encode_marker(marker.MovedTo("", "")))
    raw_store.put(sorted(rows.items()))
    raw_store.finish(
        schema.encode_marker(), schema.StoreMeta("id", 1, "", 0, 5), raw_access.LastCommit(3, 5)
    )
    raw_store.close()


def marker_allows_open(url: str) -> bool:
    """Check the schema marker as every open does."""
    raw_store = raw_access.open_target(url, lock_wait_s=PATIENCE_S)
    try:
        check_schema(
            raw_store.marker(), (schema.SCHEMA_MAJOR, schema.SCHEMA_MINOR), bootstrap=False
        )
    except (StoreMoved, CopyUnfinished, NotFound):
        return False
    finally:
        raw_store.close()
    return True


def can_open(url: str) -> bool:
    try:
        open_store(url, bootstrap=False).close()
    except (StoreMoved, CopyUnfinished, NotFound):
        return False
    return True


@pytest.mark.usefixtures("small_pages")
@each_pair
def test_resumed_copy_does_not_copy_rows_again(make_url: MakeUrl, here: str, there: str) -> None:
    source, target = make_url(here), make_url(there)
    fill_store(source)
    assert move_and_crash(source, target, crash_at=5)
    seen: list[int] = []
    with open_raw_stores(source, target) as (a, b):
        result = copies.copy_store(
            a,
            b,
            keep_source=False,
            progress=lambda phase, rows, *_: (
                seen.append(rows) if phase is CopyPhase.COPYING else None
            ),
        )
    assert result.resumed
    assert seen[-1] < result.rows


@pytest.mark.usefixtures("small_pages")
@each_pair
def test_copy_restarts_when_the_source_changed_after_a_crash(
    make_url: MakeUrl, here: str, there: str
) -> None:
    source, target = make_url(here), make_url(there)
    fill_store(source)
    assert move_and_crash(source, target, crash_at=5)
    with open_store(source) as store:
        store.transact(lambda txn: txn.delete(b"\x00\xff raw"))
    before = rows_of(source)
    assert not move_store(source, target).resumed
    assert rows_of(target) == before


@each_kind
def test_open_of_an_unfinished_copy_raises_copy_unfinished(make_url: MakeUrl, kind: str) -> None:
    source, target = make_url("lmdb"), make_url(kind)
    fill_store(source)
    assert move_and_crash(source, target, crash_at=4)
    with pytest.raises(CopyUnfinished) as raised:
        open_store(target)
    assert raised.value.source.endswith(source)


class BitFlippingRawStore:
    """A RawStore on a bad disk: one bit of one value is written flipped."""

    def __init__(self, raw_store: RawStore) -> None:
        self._raw_store = raw_store
        self.url = raw_store.url

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw_store, name)

    def put(self, rows: list[tuple[bytes, bytes]]) -> None:
        key, value = rows[-1]
        changed = bytes([value[0] ^ 1]) + value[1:] if value else b"\x01"
        self._raw_store.put([*rows[:-1], (key, changed)])


@each_pair
def test_flipped_bit_in_the_copy_raises_copy_differs(
    make_url: MakeUrl, here: str, there: str
) -> None:
    source, target = make_url(here), make_url(there)
    fill_store(source)
    with open_raw_stores(source, target) as (a, b), pytest.raises(CopyDiffers) as raised:
        copies.copy_store(a, BitFlippingRawStore(b), keep_source=False, progress=ignore_progress)
    assert raised.value.space == "queue", "the last of its page"
    assert can_open(source)
    assert not can_open(target)


# -- refused copies --------------------------------------------------------------------------------


@each_pair
def test_copy_to_an_existing_store_raises_target_not_empty(
    make_url: MakeUrl, here: str, there: str
) -> None:
    source, target = make_url(here), make_url(there)
    fill_store(source)
    with open_store(target) as store:
        store.transact(now)
    before = rows_of(target)
    with pytest.raises(TargetNotEmpty):
        move_store(source, target)
    assert rows_of(target) == before
    assert can_open(source)


@each_kind
def test_copy_to_an_unfinished_copy_of_another_store_raises_target_not_empty(
    make_url: MakeUrl, kind: str
) -> None:
    one, other, target = make_url("lmdb"), make_url("lmdb"), make_url(kind)
    fill_store(one)
    fill_store(other)
    assert move_and_crash(one, target, crash_at=4)
    with pytest.raises(TargetNotEmpty):
        move_store(other, target)
    move_store(one, target)


@each_kind
def test_copy_to_a_moved_source_raises_target_not_empty(make_url: MakeUrl, kind: str) -> None:
    first, second, third = make_url(kind), make_url("lmdb"), make_url("lmdb")
    fill_store(first)
    move_store(first, second)
    fill_store(third)
    with pytest.raises(TargetNotEmpty):
        move_store(third, first)


def test_move_of_a_moved_source_raises_store_moved(make_url: MakeUrl) -> None:
    first, second, third = make_url("lmdb"), make_url("lmdb"), make_url("postgres")
    fill_store(first)
    move_store(first, second)
    with pytest.raises(StoreMoved):
        move_store(first, third)


@each_kind
def test_copy_of_a_newer_schema_raises_schema_mismatch(make_url: MakeUrl, kind: str) -> None:
    source, target = make_url(kind), make_url("lmdb")
    fill_store(source)
    raw_store = raw_access.open_source(source, lock_wait_s=PATIENCE_S)
    raw_store.write_marker(schema.encode_marker(schema.SCHEMA_MAJOR + 1, 0))
    raw_store.close()
    with pytest.raises(SchemaMismatch):
        move_store(source, target)


@each_kind
def test_copy_of_an_open_store_raises_store_busy(make_url: MakeUrl, kind: str) -> None:
    source = make_url(kind)
    fill_store(source)
    with open_store(source), pytest.raises(StoreBusy):
        raw_access.open_source(source)


def test_open_during_a_copy_raises_store_being_copied(make_url: MakeUrl) -> None:
    source = make_url("postgres")
    fill_store(source)
    raw_store = raw_access.open_source(source, lock_wait_s=PATIENCE_S)
    try:
        with pytest.raises(StoreBeingCopied):
            open_store(source)
    finally:
        raw_store.close()


@each_kind
def test_copy_from_an_empty_location_raises_not_found(make_url: MakeUrl, kind: str) -> None:
    with pytest.raises(NotFound):
        raw_access.open_source(make_url(kind))


def test_memory_store_as_copy_source_or_target_raises_invalid() -> None:
    for open_raw_store in (raw_access.open_source, raw_access.open_target):
        with pytest.raises(Invalid):
            open_raw_store("memory:")


def test_copy_to_a_backup_of_the_same_store_raises_same_store(
    make_url: MakeUrl, tmp_path: Path
) -> None:
    source = make_url("lmdb")
    fill_store(source)
    with open_store(source) as store:
        store.backup(str(tmp_path / "copy"))
    with pytest.raises(SameStore):
        move_store(source, str(tmp_path / "copy"))


def test_copy_and_move_markers_decode_and_refuse_an_open() -> None:
    origin = marker.CopySource("id", 1, 2, 3)
    for copy_state in (
        marker.CopyInProgress("c", "./a", origin, keep_source=True),
        marker.MovedTo("c", "./b"),
    ):
        assert marker.decode_marker(marker.encode_marker(copy_state)) == copy_state
        with pytest.raises(HoldfastError):
            marker.refuse_unopenable(marker.encode_marker(copy_state))
    assert marker.decode_marker(schema.encode_marker()) is None
    assert marker.decode_marker(None) is None


def test_digest_spaces_has_one_digest_per_space() -> None:
    digests = copies.digest_spaces(
        iter([[(schema.key_prefix(space, "k"), b"v") for space in schema.Space]])
    )
    assert digests.keys() == {space.name.lower() for space in schema.Space}
    assert {one.rows for one in digests.values()} == {1}
