"""Blobs: stored once, counted by reference, collected after a grace, never lost."""

import hashlib
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.clock import S, SimClock
from holdfast.errors import Conflict, Invalid, NotFound
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Store, Txn
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryBackend
from holdfast.store.txn import ClientTxn
from holdfast.store.wire import fill, request_of

MODULES = ("holdfast.store.blobs",)
GRACE = 10 * S


def put(store: Store, data: bytes = b"data") -> bytes:
    name: bytes = store.transact(blobs.put, data)
    return name


def release(store: Store, name: bytes) -> None:
    store.transact(blobs.release, name)


def collect(store: Store, limit: int = 100) -> int:
    removed: int = store.transact(blobs.collect, GRACE, limit)
    return removed


def rows(store: Store) -> int:
    prefix = schema.prefix(schema.Space.BLOB)
    return len(store.read(lambda txn: txn.scan(prefix, tuples.after(prefix))))


def test_a_blob_is_found_by_the_hash_of_its_content(store: Store) -> None:
    name = put(store)
    assert name == hashlib.sha256(b"data").digest()
    assert store.read(blobs.get, name) == b"data"


def test_an_unknown_hash_is_not_found(store: Store) -> None:
    with pytest.raises(NotFound):
        store.read(blobs.get, bytes(32))


def test_a_transaction_reads_back_the_blob_it_puts(store: Store) -> None:
    assert store.transact(lambda txn: blobs.get(txn, blobs.put(txn, b"data"))) == b"data"


def test_equal_content_is_stored_once(store: Store) -> None:
    put(store)
    before = rows(store)
    put(store)
    assert rows(store) == before


def test_a_blob_stays_while_anything_refers_to_it(sim_store: Store, clock: SimClock) -> None:
    name = put(sim_store)
    put(sim_store)
    release(sim_store, name)
    clock.advance(2 * GRACE)
    assert collect(sim_store) == 0
    assert sim_store.read(blobs.get, name) == b"data"


def test_a_blob_stays_through_the_grace(sim_store: Store, clock: SimClock) -> None:
    name = put(sim_store)
    release(sim_store, name)
    clock.advance(GRACE // 2)
    assert collect(sim_store) == 0
    assert sim_store.read(blobs.get, name) == b"data"


def test_after_the_grace_nothing_is_left_of_it(sim_store: Store, clock: SimClock) -> None:
    release(sim_store, put(sim_store))
    clock.advance(2 * GRACE)
    assert collect(sim_store) == 1
    assert rows(sim_store) == 0


def test_the_same_content_put_during_the_grace_is_kept(sim_store: Store, clock: SimClock) -> None:
    name = put(sim_store)
    release(sim_store, name)
    put(sim_store)
    clock.advance(2 * GRACE)
    assert collect(sim_store) == 0
    assert sim_store.read(blobs.get, name) == b"data"


def test_the_grace_runs_from_the_last_release(sim_store: Store, clock: SimClock) -> None:
    release(sim_store, put(sim_store))
    clock.advance(GRACE)
    release(sim_store, put(sim_store))
    clock.advance(GRACE // 2)
    assert collect(sim_store) == 0


def test_collection_is_bounded_and_takes_the_longest_idle_first(
    sim_store: Store, clock: SimClock
) -> None:
    first, second = put(sim_store, b"1"), put(sim_store, b"2")
    release(sim_store, second)
    clock.advance(S)
    release(sim_store, first)
    clock.advance(2 * GRACE)
    assert collect(sim_store, limit=1) == 1
    assert sim_store.read(blobs.get, first) == b"1"
    assert collect(sim_store, limit=1) == 1


def test_releasing_more_than_was_put_is_refused(store: Store) -> None:
    name = put(store)
    release(store, name)
    with pytest.raises(NotFound):
        release(store, name)


def test_retaining_what_is_not_there_is_refused(store: Store) -> None:
    with pytest.raises(NotFound):
        store.transact(blobs.retain, bytes(32))


@pytest.mark.parametrize(("grace_ns", "limit"), [(-1, 1), (1, -1), (1, 1 << 20)])
def test_a_bad_collection_is_invalid(store: Store, grace_ns: int, limit: int) -> None:
    with pytest.raises(Invalid):
        store.transact(blobs.collect, grace_ns, limit)


def test_a_collection_between_the_read_and_the_commit_of_a_put_makes_it_conflict(
    clock: SimClock,
) -> None:
    store = LocalStore("memory:", MemoryBackend(), clock)
    name = put(store)
    release(store, name)
    clock.advance(2 * GRACE)
    # A client in another process: it found the data on its snapshot, so it does not send it.
    late = ClientTxn(
        store.backend.snapshot(),
        snapshot=store.backend.last_id(),
        generation=1,
        now=store.now_ns,
    )
    blobs.put(late, b"data")
    assert late.writes == {}
    assert collect(store) == 1
    [answer] = store.engine.commit([request_of(late, 1, b"late")])
    with pytest.raises(Conflict):
        fill(late, answer)
    put(store)
    assert store.read(blobs.get, name) == b"data"


class BlobMachine(RuleBasedStateMachine):
    """Whatever has a reference can be read; whatever has none goes after the grace, and only then."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = SimClock()
        self.store = LocalStore("memory:", MemoryBackend(), self.clock)
        self.refs: Counter[bytes] = Counter()

    @rule(data=st.sampled_from([b"a", b"b", b"c"]))
    def put(self, data: bytes) -> None:
        self.refs[put(self.store, data)] += 1

    @rule(data=st.sampled_from([b"a", b"b", b"c"]))
    def release(self, data: bytes) -> None:
        name = hashlib.sha256(data).digest()
        if self.refs[name]:
            release(self.store, name)
            self.refs[name] -= 1

    @rule(data=st.sampled_from([b"a", b"b", b"c"]))
    def move(self, data: bytes) -> None:
        """One row that named it goes and another comes, in one transaction, in either order."""
        name = hashlib.sha256(data).digest()
        if self.refs[name]:

            def both(txn: Txn) -> None:
                blobs.release(txn, name)
                blobs.put(txn, data)

            self.store.transact(both)

    @rule(limit=st.integers(0, 3))
    def collect(self, limit: int) -> None:
        collect(self.store, limit)

    @rule(seconds=st.integers(0, 15))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds * S)

    @invariant()
    def what_is_referred_to_is_there(self) -> None:
        for name, count in self.refs.items():
            if count:
                assert self.store.read(blobs.sound, name)

    def teardown(self) -> None:
        self.clock.advance(2 * GRACE)
        collect(self.store)
        assert rows(self.store) == 2 * len(+self.refs)


TestBlobsAreNeverLost = BlobMachine.TestCase
TestBlobsAreNeverLost.settings = settings(max_examples=60, stateful_step_count=40)
