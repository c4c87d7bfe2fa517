"""Blobs: content-addressed, reference-counted, garbage-collected after a grace period, never lost."""

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
from holdfast.store.in_process import InProcessStore
from holdfast.store.lmdb.protocol import build_request, resolve_deferred
from holdfast.store.memory_backend import MemoryBackend
from holdfast.store.txn import ClientTxn

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


def count_rows(store: Store) -> int:
    prefix = schema.key_prefix(schema.Space.BLOB)
    return len(store.read(lambda txn: txn.scan(prefix, tuples.prefix_end(prefix))))


def test_blob_is_named_by_the_hash_of_its_content(store: Store) -> None:
    name = put(store)
    assert name == hashlib.sha256(b"data").digest()
    assert store.read(blobs.get, name) == b"data"


def test_get_of_an_unknown_hash_raises_not_found(store: Store) -> None:
    with pytest.raises(NotFound):
        store.read(blobs.get, bytes(32))


def test_transaction_reads_the_blob_that_it_put(store: Store) -> None:
    assert store.transact(lambda txn: blobs.get(txn, blobs.put(txn, b"data"))) == b"data"


def test_equal_content_is_stored_once(store: Store) -> None:
    put(store)
    before = count_rows(store)
    put(store)
    assert count_rows(store) == before


def test_referenced_blob_is_not_collected(sim_store: Store, clock: SimClock) -> None:
    name = put(sim_store)
    put(sim_store)
    release(sim_store, name)
    clock.advance(2 * GRACE)
    assert collect(sim_store) == 0
    assert sim_store.read(blobs.get, name) == b"data"


def test_blob_is_not_collected_during_the_grace_period(sim_store: Store, clock: SimClock) -> None:
    name = put(sim_store)
    release(sim_store, name)
    clock.advance(GRACE // 2)
    assert collect(sim_store) == 0
    assert sim_store.read(blobs.get, name) == b"data"


def test_unreferenced_blob_is_collected_after_the_grace_period(
    sim_store: Store, clock: SimClock
) -> None:
    release(sim_store, put(sim_store))
    clock.advance(2 * GRACE)
    assert collect(sim_store) == 1
    assert count_rows(sim_store) == 0


def test_blob_put_again_during_the_grace_period_is_kept(sim_store: Store, clock: SimClock) -> None:
    name = put(sim_store)
    release(sim_store, name)
    put(sim_store)
    clock.advance(2 * GRACE)
    assert collect(sim_store) == 0
    assert sim_store.read(blobs.get, name) == b"data"


def test_grace_period_starts_at_the_last_release(sim_store: Store, clock: SimClock) -> None:
    release(sim_store, put(sim_store))
    clock.advance(GRACE)
    release(sim_store, put(sim_store))
    clock.advance(GRACE // 2)
    assert collect(sim_store) == 0


def test_collect_is_bounded_and_removes_the_longest_idle_first(
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


def test_release_without_a_reference_raises_not_found(store: Store) -> None:
    name = put(store)
    release(store, name)
    with pytest.raises(NotFound):
        release(store, name)


def test_retain_of_an_unknown_blob_raises_not_found(store: Store) -> None:
    with pytest.raises(NotFound):
        store.transact(blobs.retain, bytes(32))


@pytest.mark.parametrize(("grace_ns", "limit"), [(-1, 1), (1, -1), (1, 1 << 20)])
def test_collect_with_bad_arguments_raises_invalid(store: Store, grace_ns: int, limit: int) -> None:
    with pytest.raises(Invalid):
        store.transact(blobs.collect, grace_ns, limit)


def test_collect_between_read_and_commit_of_a_put_conflicts(
    clock: SimClock,
) -> None:
    store = InProcessStore("memory:", MemoryBackend(), clock)
    name = put(store)
    release(store, name)
    clock.advance(2 * GRACE)
    # A client in another process finds the data on its snapshot, so it does not send it.
    client_txn = ClientTxn(
        store.backend.snapshot(),
        snapshot=store.backend.last_id(),
        generation=1,
        now=store.now_ns,
    )
    blobs.put(client_txn, b"data")
    assert client_txn.writes == {}
    assert collect(store) == 1
    [answer] = store.engine.commit([build_request(client_txn, 1, b"late")])
    with pytest.raises(Conflict):
        resolve_deferred(client_txn, answer)
    put(store)
    assert store.read(blobs.get, name) == b"data"


class BlobMachine(RuleBasedStateMachine):
    """A referenced blob is readable; an unreferenced blob is removed after the grace period, not earlier."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = SimClock()
        self.store = InProcessStore("memory:", MemoryBackend(), self.clock)
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
        """Release one reference and add another in one transaction."""
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
    def referenced_blobs_are_intact(self) -> None:
        for name, count in self.refs.items():
            if count:
                assert self.store.read(blobs.is_intact, name)

    def teardown(self) -> None:
        self.clock.advance(2 * GRACE)
        collect(self.store)
        assert count_rows(self.store) == 2 * len(+self.refs)


TestBlobsAreNeverLost = BlobMachine.TestCase
TestBlobsAreNeverLost.settings = settings(max_examples=60, stateful_step_count=40)
