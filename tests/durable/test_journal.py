"""The journal: heights without gaps, the expected head, the hash chain, truncation."""

import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import codec
from holdfast.clock import S, SimClock
from holdfast.config import BATCH_MAX, BLOB_THRESHOLD_BYTES
from holdfast.durable import journal
from holdfast.durable.journal import GENESIS, JournalHead
from holdfast.errors import Fenced, HeadMoved, Invalid, NotFound, StoreCorrupt
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Store, Txn
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend

MODULES = ("holdfast.durable.journal",)
LARGE = b"x" * (BLOB_THRESHOLD_BYTES + 1)


def append(store: Store, *bodies: bytes, expected: int) -> JournalHead:
    head: JournalHead = store.transact(journal.append, "w", list(bodies), expected_head=expected)
    return head


def bodies(store: Store, lo: int = 1, hi: int = 1000) -> list[bytes]:
    return [entry.body for entry in store.read(journal.read, "w", lo, hi, 1000)]


def append_numbered(store: Store, n: int) -> JournalHead:
    return append(store, *[b"%d" % at for at in range(1, n + 1)], expected=0)


def entry_key(height: int) -> bytes:
    return schema.key_prefix(schema.Space.JOURNAL, "w", "e", height)


# -- appending -----------------------------------------------------------------------------------


def test_append_heights_start_at_1(store: Store) -> None:
    assert append(store, b"a", expected=0).height == 1
    assert store.read(journal.read, "w", 1, 2, 1)[0].height == 1


def test_head_of_a_new_journal_is_empty(store: Store) -> None:
    assert store.read(journal.head, "w") == JournalHead(0, GENESIS, 0, 1, GENESIS)


@pytest.mark.spec(
    "004", "Idempotency anchors", "an append with the current head continues the heights"
)
def test_append_on_the_expected_head_continues_the_heights(store: Store) -> None:
    append(store, b"a", b"b", expected=0)
    assert append(store, b"c", expected=2).height == 3
    assert bodies(store) == [b"a", b"b", b"c"]


@pytest.mark.spec("004", "Idempotency anchors", "an append with another head is refused")
@pytest.mark.parametrize("expected", [0, 1, 3])
def test_append_on_another_head_raises_head_moved(store: Store, expected: int) -> None:
    append(store, b"a", b"b", expected=0)
    with pytest.raises(HeadMoved) as error:
        append(store, b"c", expected=expected)
    assert error.value.fields == {"subject": "w", "expected": expected, "found": 2}
    assert bodies(store) == [b"a", b"b"]


def test_head_moved_is_neither_fenced_nor_retryable() -> None:
    assert not issubclass(HeadMoved, Fenced)
    assert not HeadMoved.retryable


def test_empty_append_checks_the_head(store: Store) -> None:
    assert append(store, expected=0) == JournalHead()
    with pytest.raises(HeadMoved):
        append(store, expected=1)


def test_transaction_reads_the_entries_that_it_appended(store: Store) -> None:
    def both(txn: Txn) -> list[bytes]:
        journal.append(txn, "w", [b"a", LARGE], expected_head=0)
        return [entry.body for entry in journal.read(txn, "w", 1, 3, 10)]

    assert store.transact(both) == [b"a", LARGE]


def test_aborted_append_leaves_no_entry(store: Store) -> None:
    def abort(txn: Txn) -> None:
        journal.append(txn, "w", [b"a"], expected_head=0)
        raise NotFound(what="nothing")

    with pytest.raises(NotFound):
        store.transact(abort)
    assert store.read(journal.head, "w").height == 0


def test_journals_of_subjects_are_independent(store: Store) -> None:
    append(store, b"a", expected=0)
    assert store.transact(journal.append, "x", [b"b"], expected_head=0).height == 1


def test_entries_have_the_time_of_their_append(sim_store: Store, clock: SimClock) -> None:
    append(sim_store, b"a", expected=0)
    clock.advance(S)
    append(sim_store, b"b", expected=1)
    first, second = sim_store.read(journal.read, "w", 1, 3, 10)
    assert second.at_ns - first.at_ns >= S - 100


# -- reading -------------------------------------------------------------------------------------


def test_read_range_is_half_open(store: Store) -> None:
    append_numbered(store, 5)
    assert bodies(store, 2, 4) == [b"2", b"3"]


def test_read_returns_at_most_limit_entries(store: Store) -> None:
    append_numbered(store, 5)
    assert len(store.read(journal.read, "w", 1, 6, 3)) == 3


def test_read_keeps_the_order_of_heights_above_one_byte(store: Store) -> None:
    append_numbered(store, 600)
    assert bodies(store) == [b"%d" % at for at in range(1, 601)]


def test_read_above_the_head_is_empty(store: Store) -> None:
    append_numbered(store, 1)
    assert bodies(store, 2, 9) == []


# -- the chain -----------------------------------------------------------------------------------


def test_equal_bodies_have_different_hashes(store: Store) -> None:
    append(store, b"a", b"a", expected=0)
    first, second = store.read(journal.read, "w", 1, 3, 10)
    assert first.hash != second.hash


def test_head_has_the_hash_of_the_last_entry(store: Store) -> None:
    head = append_numbered(store, 3)
    assert head.hash == store.read(journal.read, "w", 3, 4, 1)[0].hash


def test_verify_accepts_an_intact_journal(store: Store) -> None:
    append_numbered(store, 5)
    append(store, LARGE, expected=5)
    store.read(journal.verify, "w")


def test_verify_accepts_an_empty_journal(store: Store) -> None:
    store.read(journal.verify, "w")


def tamper_with_entry(store: Store, height: int, **change: Any) -> None:
    def write(txn: Txn) -> None:
        row = txn.get(entry_key(height))
        assert row is not None
        stored = codec.unpack_as(journal.EntryRow, row)
        txn.put(entry_key(height), codec.pack(journal.replace(stored, **change)))

    store.transact(write)


@pytest.mark.parametrize("change", [{"body": b"?"}, {"at_ns": 1}, {"hash": bytes(32)}])
def test_verify_reports_a_changed_entry_at_its_height(store: Store, change: dict[str, Any]) -> None:
    append_numbered(store, 5)
    tamper_with_entry(store, 3, **change)
    with pytest.raises(StoreCorrupt) as error:
        store.read(journal.verify, "w")
    assert error.value.height == 3


@pytest.mark.parametrize("height", [1, 3, 5])
def test_verify_reports_a_missing_entry_at_its_height(store: Store, height: int) -> None:
    append_numbered(store, 5)
    store.transact(lambda txn: txn.delete(entry_key(height)))
    with pytest.raises(StoreCorrupt) as error:
        store.read(journal.verify, "w")
    assert error.value.height == height


def test_verify_reports_a_changed_blob_at_its_height(store: Store) -> None:
    append(store, b"a", LARGE, expected=0)
    key = schema.key_prefix(schema.Space.BLOB, "data")
    [(data, _)] = store.read(lambda txn: txn.scan(key, tuples.prefix_end(key)))
    store.transact(lambda txn: txn.put(data, b"?"))
    with pytest.raises(StoreCorrupt) as error:
        store.read(journal.verify, "w")
    assert error.value.height == 2


# -- checkpoint and truncation -------------------------------------------------------------------


def test_truncate_without_a_checkpoint_removes_no_entry(store: Store) -> None:
    append_numbered(store, 5)
    assert store.transact(journal.truncate, "w", 100) == 0


def test_truncate_removes_entries_below_the_checkpoint(store: Store) -> None:
    append_numbered(store, 5)
    store.transact(journal.checkpoint, "w", 4)
    assert store.transact(journal.truncate, "w", 100) == 3
    assert bodies(store, 4) == [b"4", b"5"]
    assert store.read(journal.head, "w").floor == 4


def test_truncate_is_bounded_and_resumes(store: Store) -> None:
    append_numbered(store, 5)
    store.transact(journal.checkpoint, "w", 5)
    assert [store.transact(journal.truncate, "w", 3) for _ in range(3)] == [3, 1, 0]


def test_verify_works_after_truncate(store: Store) -> None:
    append_numbered(store, 5)
    store.transact(journal.checkpoint, "w", 4)
    store.transact(journal.truncate, "w", 2)
    store.read(journal.verify, "w")
    tamper_with_entry(store, 3, body=b"?")
    with pytest.raises(StoreCorrupt) as error:
        store.read(journal.verify, "w")
    assert error.value.height == 3


def test_append_continues_after_truncate(store: Store) -> None:
    append_numbered(store, 3)
    store.transact(journal.checkpoint, "w", 3)
    store.transact(journal.truncate, "w", 100)
    append(store, b"4", expected=3)
    store.read(journal.verify, "w")
    assert bodies(store, 3) == [b"3", b"4"]


def test_read_below_the_floor_raises_not_found(store: Store) -> None:
    append_numbered(store, 5)
    store.transact(journal.checkpoint, "w", 4)
    store.transact(journal.truncate, "w", 100)
    with pytest.raises(NotFound) as error:
        bodies(store, 3)
    assert error.value.floor == 4


@pytest.mark.parametrize("height", [1, 6])
def test_checkpoint_below_the_last_or_above_the_head_raises_invalid(
    store: Store, height: int
) -> None:
    append_numbered(store, 5)
    store.transact(journal.checkpoint, "w", 2)
    with pytest.raises(Invalid) as error:
        store.transact(journal.checkpoint, "w", height)
    assert (error.value.what, error.value.min, error.value.max) == ("checkpoint", 2, 5)
    assert store.read(journal.head, "w").checkpoint == 2


def test_truncate_releases_blobs_of_large_bodies(sim_store: Store, clock: SimClock) -> None:
    append(sim_store, LARGE, b"b", expected=0)
    sim_store.transact(journal.checkpoint, "w", 2)
    sim_store.transact(journal.truncate, "w", 100)
    clock.advance(S)
    assert sim_store.transact(blobs.collect, 0, 10) == 1


# -- bad input -----------------------------------------------------------------------------------

BAD = {
    "subject": lambda s: s.transact(journal.append, "", [b"a"], expected_head=0),
    "bodies": lambda s: append(s, *[b""] * (BATCH_MAX + 1), expected=0),
    "lo": lambda s: s.read(journal.read, "w", 0, 1, 1),
    "limit": lambda s: s.read(journal.read, "w", 1, 1, -1),
}


@pytest.mark.parametrize("what", BAD)
def test_journal_with_bad_input_raises_invalid_with_the_field(store: Store, what: str) -> None:
    with pytest.raises(Invalid) as error:
        BAD[what](store)
    assert error.value.what == what


# -- properties ----------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.binary(max_size=20), max_size=5), max_size=8),
    st.data(),
)
def test_journal_verifies_after_any_append_and_truncate(
    batches: list[list[bytes]], data: st.DataObject
) -> None:
    store = InProcessStore("memory:", MemoryBackend(), SimClock())
    written: list[bytes] = []
    for batch in batches:
        append(store, *batch, expected=len(written))
        written += batch
    low = store.read(journal.head, "w").checkpoint
    store.transact(journal.checkpoint, "w", data.draw(st.integers(low, len(written))))
    store.transact(journal.truncate, "w", data.draw(st.integers(0, 10)))
    floor = store.read(journal.head, "w").floor
    assert bodies(store, floor) == written[floor - 1 :]
    store.read(journal.verify, "w")


# -- segments ------------------------------------------------------------------------------------


def append_mixed(store: Store, count: int, checkpoint: int) -> list[journal.ChainedEntry]:
    def fill(txn: Txn) -> None:
        large = b"L" * (BLOB_THRESHOLD_BYTES + 1)
        bodies = [large if n % 7 == 0 else b"body %d" % n for n in range(count)]
        journal.append(txn, "s", bodies, expected_head=0)
        journal.checkpoint(txn, "s", checkpoint)

    store.transact(fill)
    return read_all(store)


def read_all(store: Store, lo: int = 1) -> list[journal.ChainedEntry]:
    entries: list[journal.ChainedEntry] = store.read(journal.read, "s", lo, 10_000, 10_000)
    return entries


def test_compact_into_segments_does_not_change_reads(store: Store) -> None:
    before = append_mixed(store, 50, checkpoint=40)
    assert store.transact(lambda txn: journal.compact(txn, "s", 16)) == 16
    assert store.transact(lambda txn: journal.compact(txn, "s", 16)) == 16
    assert read_all(store) == before
    assert read_all(store, lo=20) == before[19:]
    store.read(journal.verify, "s")
    for lo, hi, limit in [(1, 5, 10), (15, 18, 10), (16, 17, 1), (30, 36, 10), (33, 50, 3)]:
        expected = before[lo - 1 : hi - 1][:limit]
        assert store.read(journal.read, "s", lo, hi, limit) == expected


def test_compact_stops_below_the_checkpoint_and_resumes(store: Store) -> None:
    append_mixed(store, 20, checkpoint=12)
    packed = [store.transact(lambda txn: journal.compact(txn, "s", 5)) for _ in range(4)]
    assert packed == [5, 5, 0, 0]
    assert store.read(journal.head, "s").packed_to == 10


def test_truncate_removes_whole_segments_and_verify_works(store: Store) -> None:
    before = append_mixed(store, 50, checkpoint=40)
    store.transact(lambda txn: journal.compact(txn, "s", 16))
    store.transact(lambda txn: journal.compact(txn, "s", 16))
    assert store.transact(lambda txn: journal.truncate(txn, "s", 5)) == 16
    assert read_all(store, lo=17) == before[16:]
    store.read(journal.verify, "s")
    assert store.transact(lambda txn: journal.truncate(txn, "s", 100)) == 16
    assert store.transact(lambda txn: journal.truncate(txn, "s", 100)) == 7
    assert store.transact(lambda txn: journal.truncate(txn, "s", 100)) == 0
    assert read_all(store, lo=40) == before[39:]
    store.read(journal.verify, "s")


def test_verify_reports_a_changed_segment(store: Store) -> None:
    append_mixed(store, 20, checkpoint=20)
    store.transact(lambda txn: journal.compact(txn, "s", 10))

    def tamper(txn: Txn) -> None:
        prefix = schema.key_prefix(schema.Space.JOURNAL, "s", "s")
        [(key, row)] = txn.scan(prefix, tuples.prefix_end(prefix))
        first, entries = codec.unpack(zlib.decompress(row))
        entries[3][2] = b"another body"
        txn.put(key, zlib.compress(codec.pack([first, entries])))

    store.transact(tamper)
    with pytest.raises(StoreCorrupt) as caught:
        store.read(journal.verify, "s")
    assert caught.value.height == 4
