"""The inbox: ordered entries, deduplicated by key, consumed by a cursor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast import codec
from holdfast.clock import S, SimClock
from holdfast.config import BATCH_MAX, BLOB_THRESHOLD_BYTES
from holdfast.durable import dedupe, inbox
from holdfast.durable.inbox import PutResult
from holdfast.errors import Invalid, KeyConflict, KeyExpired, NotFound, StoreCorrupt
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Store, Txn
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend

MODULES = ("holdfast.durable.inbox",)
LARGE = b"x" * (BLOB_THRESHOLD_BYTES + 1)


def put(store: Store, body: bytes, key: str | None = None, world: str = "w") -> PutResult:
    answer: PutResult = store.transact(inbox.put, world, key, body)
    return answer


def bodies(store: Store) -> list[bytes]:
    return [ingress.body for ingress in store.read(inbox.read, "w", 100)]


# -- putting -------------------------------------------------------------------------------------


def test_put_numbers_entries_from_1_without_a_gap(store: Store) -> None:
    assert [put(store, b"a").seq, put(store, b"b").seq] == [1, 2]


def test_put_without_a_key_is_not_deduplicated(store: Store) -> None:
    put(store, b"a")
    put(store, b"a")
    assert bodies(store) == [b"a", b"a"]


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "a put with a repeated key returns the seq of the first put",
)
def test_put_of_a_repeated_key_returns_the_first_seq(store: Store) -> None:
    first = put(store, b"a", "k")
    put(store, b"b")
    assert first == PutResult(1, already=False)
    assert put(store, b"a", "k") == PutResult(1, already=True)
    assert bodies(store) == [b"a", b"b"]


def test_put_of_a_repeated_key_is_deduplicated_after_it_was_consumed(store: Store) -> None:
    put(store, b"a", "k")
    store.transact(inbox.advance, "w", 1)
    assert put(store, b"a", "k") == PutResult(1, already=True)
    assert bodies(store) == []


def test_put_with_another_body_raises_key_conflict(store: Store) -> None:
    put(store, b"a", "k")
    with pytest.raises(KeyConflict):
        put(store, b"b", "k")
    assert bodies(store) == [b"a"]


def test_refused_put_uses_no_seq(store: Store) -> None:
    put(store, b"a", "k")
    with pytest.raises(KeyConflict):
        put(store, b"b", "k")
    assert put(store, b"c").seq == 2


def test_dedupe_key_is_scoped_by_world(store: Store) -> None:
    put(store, b"a", "k", world="w")
    assert put(store, b"b", "k", world="x") == PutResult(1, already=False)


def test_dedupe_keys_with_separators_do_not_collide(store: Store) -> None:
    put(store, b"a", "b:c", world="a")
    assert put(store, b"a", "c", world="a:b") == PutResult(1, already=False)


def test_put_with_a_key_below_the_floor_raises_key_expired(
    sim_store: Store, clock: SimClock
) -> None:
    issued_ns = sim_store.now_ns()
    sim_store.transact(inbox.put, "w", "k", b"a", issued_ns)
    clock.advance(100 * S)
    sim_store.transact(dedupe.expire, inbox.DEDUPE_SCOPE, 10 * S, 10)
    with pytest.raises(KeyExpired):
        sim_store.transact(inbox.put, "w", "k", b"a", issued_ns)
    assert bodies(sim_store) == [b"a"]


def test_put_notifies_the_inbox_topic(store: Store) -> None:
    since = store.wait(inbox.topic("w"), 0, timeout=0)
    put(store, b"a")
    assert store.wait(inbox.topic("w"), since, timeout=10) > since


def test_put_of_a_repeated_key_does_not_notify_the_topic(sim_store: Store) -> None:
    put(sim_store, b"a", "k")
    since = sim_store.wait(inbox.topic("w"), 0, timeout=0)
    put(sim_store, b"a", "k")
    assert sim_store.wait(inbox.topic("w"), since, timeout=0) == since


def test_put_many_keeps_the_order_over_several_worlds(store: Store) -> None:
    puts = store.transact(inbox.put_many, [("w", None, b"a"), ("x", None, b"b"), ("w", "k", b"c")])
    assert [answer.seq for answer in puts] == [1, 1, 2]
    assert bodies(store) == [b"a", b"c"]


def test_put_many_deduplicates_a_key_within_the_batch(store: Store) -> None:
    puts = store.transact(inbox.put_many, [("w", "k", b"a"), ("w", "k", b"a")])
    assert puts == [PutResult(1, already=False), PutResult(1, already=True)]


def test_put_many_is_atomic(store: Store) -> None:
    with pytest.raises(KeyConflict):
        store.transact(inbox.put_many, [("w", "k", b"a"), ("w", "k", b"b")])
    assert bodies(store) == []


# -- reading and consuming -----------------------------------------------------------------------


def test_read_starts_after_the_cursor_and_is_limited(store: Store) -> None:
    for body in (b"a", b"b", b"c"):
        put(store, body)
    store.transact(inbox.advance, "w", 1)
    assert [i.seq for i in store.read(inbox.read, "w", 1)] == [2]


def test_inbox_entry_has_its_key_and_time(store: Store) -> None:
    put(store, b"a", "k")
    [entry] = store.read(inbox.read, "w", 1)
    assert (entry.seq, entry.key, entry.body) == (1, "k", b"a")
    assert entry.at_ns > 0


def test_advance_deletes_consumed_entries(store: Store) -> None:
    for body in (b"a", b"b", b"c"):
        put(store, body)
    store.transact(inbox.advance, "w", 2)
    assert bodies(store) == [b"c"]
    assert store.read(inbox.cursor, "w") == 2


def test_seq_continues_after_all_entries_are_consumed(store: Store) -> None:
    put(store, b"a")
    store.transact(inbox.advance, "w", 1)
    assert put(store, b"b").seq == 2


def test_advance_to_a_lower_cursor_raises_invalid(store: Store) -> None:
    put(store, b"a")
    store.transact(inbox.advance, "w", 1)
    with pytest.raises(Invalid) as error:
        store.transact(inbox.advance, "w", 0)
    assert error.value.what == "inbox cursor"


def test_advance_beyond_the_last_seq_raises_not_found(store: Store) -> None:
    put(store, b"a")
    with pytest.raises(NotFound):
        store.transact(inbox.advance, "w", 2)
    assert store.read(inbox.cursor, "w") == 0


def test_advance_to_the_current_cursor_changes_nothing(store: Store) -> None:
    store.transact(inbox.advance, "w", 0)
    assert store.read(inbox.cursor, "w") == 0


def test_depth_is_the_number_of_unread_entries(store: Store) -> None:
    assert store.read(inbox.depth, "w") == 0
    for body in (b"a", b"b", b"c"):
        put(store, body)
    store.transact(inbox.advance, "w", 1)
    assert store.read(inbox.depth, "w") == 2


def test_blob_of_a_large_body_is_released_by_advance(sim_store: Store, clock: SimClock) -> None:
    put(sim_store, LARGE, "k")
    assert bodies(sim_store) == [LARGE]
    sim_store.transact(inbox.advance, "w", 1)
    clock.advance(S)
    assert sim_store.transact(blobs.collect, 0, 10) == 1


# -- bad input -----------------------------------------------------------------------------------

BAD = {
    "world": lambda s: put(s, b"a", world=""),
    "key": lambda s: put(s, b"a", ""),
    "limit": lambda s: s.read(inbox.read, "w", -1),
    "items": lambda s: s.transact(inbox.put_many, [("w", None, b"")] * (BATCH_MAX + 1)),
    "inbox cursor": lambda s: s.transact(inbox.advance, "w", BATCH_MAX + 1),
}


@pytest.mark.parametrize("what", BAD)
def test_inbox_with_bad_input_raises_invalid_with_the_field(store: Store, what: str) -> None:
    with pytest.raises(Invalid) as error:
        BAD[what](store)
    assert error.value.what == what


# -- properties ----------------------------------------------------------------------------------


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.sampled_from([None, "j", "k", "l"])),
            st.tuples(st.just("take"), st.integers(1, 3)),
        ),
        max_size=30,
    )
)
def test_consumed_entries_are_the_puts_once_per_key_in_order(
    steps: list[tuple[str, str | int | None]],
) -> None:
    store = InProcessStore("memory:", MemoryBackend(), SimClock())
    accepted: list[bytes] = []
    consumed: list[bytes] = []
    for at, (step, detail) in enumerate(steps):
        if step == "put":
            assert detail is None or isinstance(detail, str)
            body = b"%d" % at if detail is None else detail.encode()
            if not put(store, body, detail).already:
                accepted.append(body)
        else:
            assert isinstance(detail, int)
            batch = store.read(inbox.read, "w", detail)
            if batch:
                store.transact(inbox.advance, "w", batch[-1].seq)
                consumed += [ingress.body for ingress in batch]
        assert store.read(inbox.depth, "w") == len(accepted) - len(consumed)
    assert consumed + bodies(store) == accepted


# -- corruption ----------------------------------------------------------------------------------

FIELDS = [("key", "other"), ("at_ns", 1), ("body", b"bad"), ("blob", bytes(32))]


def corrupt_row(store: Store, seq: int, **fields: object) -> None:
    """Change fields of a stored row, like file corruption."""

    def write(txn: Txn) -> None:
        prefix = schema.key_prefix(schema.Space.INBOX, "w", "e")
        key, row = txn.scan(prefix + tuples.pack_int(seq), tuples.prefix_end(prefix), 1)[0]
        txn.put(key, codec.pack(replace(codec.unpack_as(inbox.InboxRow, row), **fields)))

    store.transact(write)


@pytest.mark.parametrize(("field", "value"), FIELDS, ids=[name for name, _ in FIELDS])
def test_read_stops_before_a_corrupt_entry(store: Store, field: str, value: object) -> None:
    for body in (b"first", b"second", b"third"):
        put(store, body, body.decode())
    corrupt_row(store, 2, **{field: value})
    assert bodies(store) == [b"first"]
    assert [seq for seq, _ in store.read(lambda txn: list(inbox.iter_damaged(txn, "w")))] == [2]
    store.transact(inbox.advance, "w", 1)
    with pytest.raises(StoreCorrupt) as damaged:
        bodies(store)
    assert damaged.value.fields["seq"] == 2


def test_read_stops_before_an_entry_with_a_corrupt_blob(store: Store) -> None:
    put(store, b"first")
    put(store, LARGE)

    def write(txn: Txn) -> None:
        prefix = schema.key_prefix(schema.Space.BLOB, "data")
        [(key, data)] = txn.scan(prefix, tuples.prefix_end(prefix), 2)
        txn.put(key, b"y" + data[1:])

    store.transact(write)
    assert bodies(store) == [b"first"]
    assert store.read(lambda txn: list(inbox.iter_damaged(txn, "w"))) == [
        (2, "no blob with its hash")
    ]
    assert len(store.read(lambda txn: list(blobs.corrupt_blobs(txn)))) == 1
    store.transact(inbox.advance, "w", 1)
    with pytest.raises(StoreCorrupt, match="another hash"):
        bodies(store)


def test_row_without_a_checksum_is_read(store: Store) -> None:
    put(store, b"first")
    corrupt_row(store, 1, crc=0)
    assert bodies(store) == [b"first"]
    assert store.read(lambda txn: list(inbox.iter_damaged(txn, "w"))) == []
