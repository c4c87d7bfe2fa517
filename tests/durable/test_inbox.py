"""The inbox: ordered ingress, once per key, consumed by a cursor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast import codec
from holdfast.clock import S, SimClock
from holdfast.config import BATCH_MAX, BLOB_THRESHOLD_BYTES
from holdfast.durable import dedupe, inbox
from holdfast.durable.inbox import Put
from holdfast.errors import Invalid, KeyConflict, KeyExpired, NotFound, StoreCorrupt
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Store, Txn
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryBackend

MODULES = ("holdfast.durable.inbox",)
LARGE = b"x" * (BLOB_THRESHOLD_BYTES + 1)


def put(store: Store, body: bytes, key: str | None = None, world: str = "w") -> Put:
    answer: Put = store.transact(inbox.put, world, key, body)
    return answer


def bodies(store: Store) -> list[bytes]:
    return [ingress.body for ingress in store.read(inbox.read, "w", 100)]


# -- putting -------------------------------------------------------------------------------------


def test_ingress_is_numbered_from_1_without_a_gap(store: Store) -> None:
    assert [put(store, b"a").seq, put(store, b"b").seq] == [1, 2]


def test_ingress_without_a_key_is_delivered_every_time(store: Store) -> None:
    put(store, b"a")
    put(store, b"a")
    assert bodies(store) == [b"a", b"a"]


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "a message id that is there already is answered as such, not delivered again",
)
def test_a_repeat_is_answered_with_the_first_number(store: Store) -> None:
    first = put(store, b"a", "k")
    put(store, b"b")
    assert first == Put(1, already=False)
    assert put(store, b"a", "k") == Put(1, already=True)
    assert bodies(store) == [b"a", b"b"]


def test_a_repeat_is_recognised_after_the_first_was_consumed(store: Store) -> None:
    put(store, b"a", "k")
    store.transact(inbox.advance, "w", 1)
    assert put(store, b"a", "k") == Put(1, already=True)
    assert bodies(store) == []


def test_the_same_key_with_another_body_is_a_conflict(store: Store) -> None:
    put(store, b"a", "k")
    with pytest.raises(KeyConflict):
        put(store, b"b", "k")
    assert bodies(store) == [b"a"]


def test_a_refused_put_uses_up_no_number(store: Store) -> None:
    put(store, b"a", "k")
    with pytest.raises(KeyConflict):
        put(store, b"b", "k")
    assert put(store, b"c").seq == 2


def test_a_key_counts_per_world(store: Store) -> None:
    put(store, b"a", "k", world="w")
    assert put(store, b"b", "k", world="x") == Put(1, already=False)


def test_worlds_and_keys_that_read_alike_together_are_kept_apart(store: Store) -> None:
    put(store, b"a", "b:c", world="a")
    assert put(store, b"a", "c", world="a:b") == Put(1, already=False)


def test_a_key_issued_before_what_was_forgotten_is_expired(
    sim_store: Store, clock: SimClock
) -> None:
    issued_ns = sim_store.now_ns()
    sim_store.transact(inbox.put, "w", "k", b"a", issued_ns)
    clock.advance(100 * S)
    sim_store.transact(dedupe.collect, inbox.SCOPE, 10 * S, 10)
    with pytest.raises(KeyExpired):
        sim_store.transact(inbox.put, "w", "k", b"a", issued_ns)
    assert bodies(sim_store) == [b"a"]


def test_a_put_rings_the_topic(store: Store) -> None:
    since = store.wait(inbox.topic("w"), 0, timeout=0)
    put(store, b"a")
    assert store.wait(inbox.topic("w"), since, timeout=10) > since


def test_a_repeat_does_not_ring_the_topic(sim_store: Store) -> None:
    put(sim_store, b"a", "k")
    rung = sim_store.wait(inbox.topic("w"), 0, timeout=0)
    put(sim_store, b"a", "k")
    assert sim_store.wait(inbox.topic("w"), rung, timeout=0) == rung


def test_many_are_put_in_order_over_several_worlds(store: Store) -> None:
    puts = store.transact(inbox.put_many, [("w", None, b"a"), ("x", None, b"b"), ("w", "k", b"c")])
    assert [answer.seq for answer in puts] == [1, 1, 2]
    assert bodies(store) == [b"a", b"c"]


def test_a_key_that_comes_twice_in_one_batch_is_delivered_once(store: Store) -> None:
    puts = store.transact(inbox.put_many, [("w", "k", b"a"), ("w", "k", b"a")])
    assert puts == [Put(1, already=False), Put(1, already=True)]


def test_a_batch_is_all_or_none(store: Store) -> None:
    with pytest.raises(KeyConflict):
        store.transact(inbox.put_many, [("w", "k", b"a"), ("w", "k", b"b")])
    assert bodies(store) == []


# -- reading and consuming -----------------------------------------------------------------------


def test_reading_starts_after_the_cursor_and_is_limited(store: Store) -> None:
    for body in (b"a", b"b", b"c"):
        put(store, body)
    store.transact(inbox.advance, "w", 1)
    assert [i.seq for i in store.read(inbox.read, "w", 1)] == [2]


def test_an_ingress_says_its_key_and_its_time(store: Store) -> None:
    put(store, b"a", "k")
    [found] = store.read(inbox.read, "w", 1)
    assert (found.seq, found.key, found.body) == (1, "k", b"a")
    assert found.at_ns > 0


def test_consuming_deletes_what_the_cursor_passes(store: Store) -> None:
    for body in (b"a", b"b", b"c"):
        put(store, body)
    store.transact(inbox.advance, "w", 2)
    assert bodies(store) == [b"c"]
    assert store.read(inbox.cursor, "w") == 2


def test_numbers_go_on_after_everything_is_consumed(store: Store) -> None:
    put(store, b"a")
    store.transact(inbox.advance, "w", 1)
    assert put(store, b"b").seq == 2


def test_the_cursor_never_falls(store: Store) -> None:
    put(store, b"a")
    store.transact(inbox.advance, "w", 1)
    with pytest.raises(Invalid) as error:
        store.transact(inbox.advance, "w", 0)
    assert error.value.what == "inbox cursor"


def test_the_cursor_never_passes_the_last_number(store: Store) -> None:
    put(store, b"a")
    with pytest.raises(NotFound):
        store.transact(inbox.advance, "w", 2)
    assert store.read(inbox.cursor, "w") == 0


def test_advancing_to_where_the_cursor_is_changes_nothing(store: Store) -> None:
    store.transact(inbox.advance, "w", 0)
    assert store.read(inbox.cursor, "w") == 0


def test_the_depth_is_what_is_unread(store: Store) -> None:
    assert store.read(inbox.depth, "w") == 0
    for body in (b"a", b"b", b"c"):
        put(store, body)
    store.transact(inbox.advance, "w", 1)
    assert store.read(inbox.depth, "w") == 2


def test_a_large_body_is_read_back_and_let_go_when_consumed(
    sim_store: Store, clock: SimClock
) -> None:
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
def test_bad_input_is_named(store: Store, what: str) -> None:
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
def test_what_is_consumed_is_what_was_put_once_per_key_in_order(
    steps: list[tuple[str, str | int | None]],
) -> None:
    store = LocalStore("memory:", MemoryBackend(), SimClock())
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


# -- damage --------------------------------------------------------------------------------------

FIELDS = [("key", "other"), ("at_ns", 1), ("body", b"bad"), ("blob", bytes(32))]


def change(store: Store, seq: int, **fields: object) -> None:
    """What damage to the files would do to a row."""

    def write(txn: Txn) -> None:
        prefix = schema.prefix(schema.Space.INBOX, "w", "e")
        key, row = txn.scan(prefix + tuples.pack_int(seq), tuples.after(prefix), 1)[0]
        txn.put(key, codec.pack(replace(codec.unpack_as(inbox.Kept, row), **fields)))

    store.transact(write)


@pytest.mark.parametrize(("field", "value"), FIELDS, ids=[name for name, _ in FIELDS])
def test_a_damaged_ingress_is_not_read_and_those_before_it_are(
    store: Store, field: str, value: object
) -> None:
    for body in (b"first", b"second", b"third"):
        put(store, body, body.decode())
    change(store, 2, **{field: value})
    assert bodies(store) == [b"first"]
    assert [seq for seq, _ in store.read(lambda txn: list(inbox.damaged(txn, "w")))] == [2]
    store.transact(inbox.advance, "w", 1)
    with pytest.raises(StoreCorrupt) as damaged:
        bodies(store)
    assert damaged.value.fields["seq"] == 2


def test_a_large_ingress_whose_blob_is_damaged_is_not_read(store: Store) -> None:
    put(store, b"first")
    put(store, LARGE)

    def write(txn: Txn) -> None:
        prefix = schema.prefix(schema.Space.BLOB, "data")
        [(key, data)] = txn.scan(prefix, tuples.after(prefix), 2)
        txn.put(key, b"y" + data[1:])

    store.transact(write)
    assert bodies(store) == [b"first"]
    assert store.read(lambda txn: list(inbox.damaged(txn, "w"))) == [(2, "no blob with its hash")]
    assert len(store.read(lambda txn: list(blobs.unsound(txn)))) == 1
    store.transact(inbox.advance, "w", 1)
    with pytest.raises(StoreCorrupt, match="another hash"):
        bodies(store)


def test_a_row_from_before_there_were_checksums_is_read(store: Store) -> None:
    put(store, b"first")
    change(store, 1, crc=0)
    assert bodies(store) == [b"first"]
    assert store.read(lambda txn: list(inbox.damaged(txn, "w"))) == []
