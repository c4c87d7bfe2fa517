"""The journal: heights without gaps, an expected head, a chain of hashes, truncation."""

import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import codec
from holdfast.clock import S, SimClock
from holdfast.config import BATCH_MAX, BLOB_THRESHOLD_BYTES
from holdfast.durable import journal
from holdfast.durable.journal import GENESIS, Head
from holdfast.errors import Fenced, HeadMoved, Invalid, NotFound, StoreCorrupt
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Store, Txn
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryBackend

MODULES = ("holdfast.durable.journal",)
LARGE = b"x" * (BLOB_THRESHOLD_BYTES + 1)


def append(store: Store, *bodies: bytes, expected: int) -> Head:
    head: Head = store.transact(journal.append, "w", list(bodies), expected_head=expected)
    return head


def bodies(store: Store, lo: int = 1, hi: int = 1000) -> list[bytes]:
    return [entry.body for entry in store.read(journal.read, "w", lo, hi, 1000)]


def filled(store: Store, n: int) -> Head:
    return append(store, *[b"%d" % at for at in range(1, n + 1)], expected=0)


def key_of(height: int) -> bytes:
    return schema.prefix(schema.Space.JOURNAL, "w", "e", height)


# -- appending -----------------------------------------------------------------------------------


def test_heights_start_at_1(store: Store) -> None:
    assert append(store, b"a", expected=0).height == 1
    assert store.read(journal.read, "w", 1, 2, 1)[0].height == 1


def test_a_new_journal_is_empty(store: Store) -> None:
    assert store.read(journal.head, "w") == Head(0, GENESIS, 0, 1, GENESIS)


@pytest.mark.spec("004", "Idempotency anchors", "an append names the head it stands on")
def test_an_append_on_the_expected_head_continues_the_heights(store: Store) -> None:
    append(store, b"a", b"b", expected=0)
    assert append(store, b"c", expected=2).height == 3
    assert bodies(store) == [b"a", b"b", b"c"]


@pytest.mark.spec(
    "004", "Idempotency anchors", "an append on another head than the current one is refused"
)
@pytest.mark.parametrize("expected", [0, 1, 3])
def test_an_append_on_another_head_changes_nothing(store: Store, expected: int) -> None:
    append(store, b"a", b"b", expected=0)
    with pytest.raises(HeadMoved) as error:
        append(store, b"c", expected=expected)
    assert error.value.fields == {"subject": "w", "expected": expected, "found": 2}
    assert bodies(store) == [b"a", b"b"]


def test_a_moved_head_is_no_fence() -> None:
    assert not issubclass(HeadMoved, Fenced)
    assert not HeadMoved.retryable


def test_appending_nothing_still_checks_the_head(store: Store) -> None:
    assert append(store, expected=0) == Head()
    with pytest.raises(HeadMoved):
        append(store, expected=1)


def test_an_append_reads_its_own_entries_back(store: Store) -> None:
    def both(txn: Txn) -> list[bytes]:
        journal.append(txn, "w", [b"a", LARGE], expected_head=0)
        return [entry.body for entry in journal.read(txn, "w", 1, 3, 10)]

    assert store.transact(both) == [b"a", LARGE]


def test_an_aborted_transaction_leaves_no_entry(store: Store) -> None:
    def abort(txn: Txn) -> None:
        journal.append(txn, "w", [b"a"], expected_head=0)
        raise NotFound(what="nothing")

    with pytest.raises(NotFound):
        store.transact(abort)
    assert store.read(journal.head, "w").height == 0


def test_subjects_do_not_disturb_each_other(store: Store) -> None:
    append(store, b"a", expected=0)
    assert store.transact(journal.append, "x", [b"b"], expected_head=0).height == 1


def test_entries_carry_the_time_of_their_append(sim_store: Store, clock: SimClock) -> None:
    append(sim_store, b"a", expected=0)
    clock.advance(S)
    append(sim_store, b"b", expected=1)
    first, second = sim_store.read(journal.read, "w", 1, 3, 10)
    assert second.at_ns - first.at_ns >= S - 100


# -- reading -------------------------------------------------------------------------------------


def test_a_range_is_half_open(store: Store) -> None:
    filled(store, 5)
    assert bodies(store, 2, 4) == [b"2", b"3"]


def test_a_read_is_limited(store: Store) -> None:
    filled(store, 5)
    assert len(store.read(journal.read, "w", 1, 6, 3)) == 3


def test_heights_of_more_than_a_byte_stay_in_order(store: Store) -> None:
    filled(store, 600)
    assert bodies(store) == [b"%d" % at for at in range(1, 601)]


def test_above_the_head_there_is_nothing(store: Store) -> None:
    filled(store, 1)
    assert bodies(store, 2, 9) == []


# -- the chain -----------------------------------------------------------------------------------


def test_equal_bodies_have_different_hashes(store: Store) -> None:
    append(store, b"a", b"a", expected=0)
    first, second = store.read(journal.read, "w", 1, 3, 10)
    assert first.hash != second.hash


def test_the_head_has_the_hash_of_the_last_entry(store: Store) -> None:
    head = filled(store, 3)
    assert head.hash == store.read(journal.read, "w", 3, 4, 1)[0].hash


def test_a_sound_journal_verifies(store: Store) -> None:
    filled(store, 5)
    append(store, LARGE, expected=5)
    store.read(journal.verify, "w")


def test_an_empty_journal_verifies(store: Store) -> None:
    store.read(journal.verify, "w")


def tamper_with_entry(store: Store, height: int, **change: Any) -> None:
    def change_it(txn: Txn) -> None:
        row = txn.get(key_of(height))
        assert row is not None
        kept = codec.unpack_as(journal.Kept, row)
        txn.put(key_of(height), codec.pack(journal.replace(kept, **change)))

    store.transact(change_it)


@pytest.mark.parametrize("change", [{"body": b"?"}, {"at_ns": 1}, {"hash": bytes(32)}])
def test_a_changed_entry_is_found_at_its_height(store: Store, change: dict[str, Any]) -> None:
    filled(store, 5)
    tamper_with_entry(store, 3, **change)
    with pytest.raises(StoreCorrupt) as error:
        store.read(journal.verify, "w")
    assert error.value.height == 3


@pytest.mark.parametrize("height", [1, 3, 5])
def test_a_missing_entry_is_found_at_its_height(store: Store, height: int) -> None:
    filled(store, 5)
    store.transact(lambda txn: txn.delete(key_of(height)))
    with pytest.raises(StoreCorrupt) as error:
        store.read(journal.verify, "w")
    assert error.value.height == height


def test_a_changed_blob_is_found_at_its_height(store: Store) -> None:
    append(store, b"a", LARGE, expected=0)
    key = schema.prefix(schema.Space.BLOB, "data")
    [(data, _)] = store.read(lambda txn: txn.scan(key, tuples.after(key)))
    store.transact(lambda txn: txn.put(data, b"?"))
    with pytest.raises(StoreCorrupt) as error:
        store.read(journal.verify, "w")
    assert error.value.height == 2


# -- checkpoint and truncation -------------------------------------------------------------------


def test_nothing_is_truncated_without_a_checkpoint(store: Store) -> None:
    filled(store, 5)
    assert store.transact(journal.truncate, "w", 100) == 0


def test_truncation_removes_what_is_below_the_checkpoint(store: Store) -> None:
    filled(store, 5)
    store.transact(journal.checkpoint, "w", 4)
    assert store.transact(journal.truncate, "w", 100) == 3
    assert bodies(store, 4) == [b"4", b"5"]
    assert store.read(journal.head, "w").floor == 4


def test_truncation_is_bounded_and_goes_on_where_it_stopped(store: Store) -> None:
    filled(store, 5)
    store.transact(journal.checkpoint, "w", 5)
    assert [store.transact(journal.truncate, "w", 3) for _ in range(3)] == [3, 1, 0]


def test_what_is_left_still_verifies(store: Store) -> None:
    filled(store, 5)
    store.transact(journal.checkpoint, "w", 4)
    store.transact(journal.truncate, "w", 2)
    store.read(journal.verify, "w")
    tamper_with_entry(store, 3, body=b"?")
    with pytest.raises(StoreCorrupt) as error:
        store.read(journal.verify, "w")
    assert error.value.height == 3


def test_appending_goes_on_after_everything_was_truncated(store: Store) -> None:
    filled(store, 3)
    store.transact(journal.checkpoint, "w", 3)
    store.transact(journal.truncate, "w", 100)
    append(store, b"4", expected=3)
    store.read(journal.verify, "w")
    assert bodies(store, 3) == [b"3", b"4"]


def test_reading_below_the_floor_is_not_found(store: Store) -> None:
    filled(store, 5)
    store.transact(journal.checkpoint, "w", 4)
    store.transact(journal.truncate, "w", 100)
    with pytest.raises(NotFound) as error:
        bodies(store, 3)
    assert error.value.floor == 4


@pytest.mark.parametrize("height", [1, 6])
def test_a_checkpoint_neither_falls_nor_passes_the_head(store: Store, height: int) -> None:
    filled(store, 5)
    store.transact(journal.checkpoint, "w", 2)
    with pytest.raises(Invalid) as error:
        store.transact(journal.checkpoint, "w", height)
    assert (error.value.what, error.value.min, error.value.max) == ("checkpoint", 2, 5)
    assert store.read(journal.head, "w").checkpoint == 2


def test_truncation_lets_large_bodies_go(sim_store: Store, clock: SimClock) -> None:
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
def test_bad_input_is_named(store: Store, what: str) -> None:
    with pytest.raises(Invalid) as error:
        BAD[what](store)
    assert error.value.what == what


# -- properties ----------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.binary(max_size=20), max_size=5), max_size=8),
    st.data(),
)
def test_whatever_is_appended_and_truncated_the_rest_is_read_back_and_verifies(
    batches: list[list[bytes]], data: st.DataObject
) -> None:
    store = LocalStore("memory:", MemoryBackend(), SimClock())
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


def mixed(store: Store, count: int, checkpoint: int) -> list[journal.Entry]:
    def fill(txn: Txn) -> None:
        large = b"L" * (BLOB_THRESHOLD_BYTES + 1)
        bodies = [large if n % 7 == 0 else b"body %d" % n for n in range(count)]
        journal.append(txn, "s", bodies, expected_head=0)
        journal.checkpoint(txn, "s", checkpoint)

    store.transact(fill)
    return everything(store)


def everything(store: Store, lo: int = 1) -> list[journal.Entry]:
    found: list[journal.Entry] = store.read(journal.read, "s", lo, 10_000, 10_000)
    return found


def test_packing_entries_into_segments_changes_nothing_that_is_read(store: Store) -> None:
    before = mixed(store, 50, checkpoint=40)
    assert store.transact(lambda txn: journal.compact(txn, "s", 16)) == 16
    assert store.transact(lambda txn: journal.compact(txn, "s", 16)) == 16
    assert everything(store) == before
    assert everything(store, lo=20) == before[19:]
    store.read(journal.verify, "s")
    for lo, hi, limit in [(1, 5, 10), (15, 18, 10), (16, 17, 1), (30, 36, 10), (33, 50, 3)]:
        expected = before[lo - 1 : hi - 1][:limit]
        assert store.read(journal.read, "s", lo, hi, limit) == expected


def test_packing_stops_below_the_checkpoint_and_goes_on_where_it_stopped(store: Store) -> None:
    mixed(store, 20, checkpoint=12)
    packed = [store.transact(lambda txn: journal.compact(txn, "s", 5)) for _ in range(4)]
    assert packed == [5, 5, 0, 0]
    assert store.read(journal.head, "s").packed == 10


def test_segments_are_truncated_whole_and_the_rest_still_verifies(store: Store) -> None:
    before = mixed(store, 50, checkpoint=40)
    store.transact(lambda txn: journal.compact(txn, "s", 16))
    store.transact(lambda txn: journal.compact(txn, "s", 16))
    assert store.transact(lambda txn: journal.truncate(txn, "s", 5)) == 16
    assert everything(store, lo=17) == before[16:]
    store.read(journal.verify, "s")
    assert store.transact(lambda txn: journal.truncate(txn, "s", 100)) == 16
    assert store.transact(lambda txn: journal.truncate(txn, "s", 100)) == 7
    assert store.transact(lambda txn: journal.truncate(txn, "s", 100)) == 0
    assert everything(store, lo=40) == before[39:]
    store.read(journal.verify, "s")


def test_a_changed_segment_is_found_by_the_chain(store: Store) -> None:
    mixed(store, 20, checkpoint=20)
    store.transact(lambda txn: journal.compact(txn, "s", 10))

    def tamper(txn: Txn) -> None:
        prefix = schema.prefix(schema.Space.JOURNAL, "s", "s")
        [(key, row)] = txn.scan(prefix, tuples.after(prefix))
        first, entries = codec.unpack(zlib.decompress(row))
        entries[3][2] = b"another body"
        txn.put(key, zlib.compress(codec.pack([first, entries])))

    store.transact(tamper)
    with pytest.raises(StoreCorrupt) as caught:
        store.read(journal.verify, "s")
    assert caught.value.height == 4
