"""Snapshots: states by height, and the baseline for a restore."""

import hashlib

import pytest

from holdfast.clock import S, SimClock
from holdfast.config import (
    BATCH_MAX,
    BLOB_THRESHOLD_BYTES,
    SNAPSHOT_PART_BYTES,
    VALUE_BYTES_MAX,
)
from holdfast.durable import snapshot
from holdfast.durable.snapshot import Baseline
from holdfast.errors import Invalid, NotFound, StoreCorrupt
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Store, Txn

MODULES = ("holdfast.durable.snapshot",)
LARGE = b"x" * (BLOB_THRESHOLD_BYTES + 1)


def save(store: Store, height: int, state: bytes = b"state") -> bytes:
    hash: bytes = store.transact(snapshot.save, "w", height, state)
    return hash


def heights(store: Store) -> list[int]:
    return store.read(snapshot.heights, "w", 100)


@pytest.mark.parametrize("state", [b"", b"small", LARGE])
def test_load_returns_the_saved_state(store: Store, state: bytes) -> None:
    assert save(store, 3, state) == hashlib.sha256(state).digest()
    assert store.read(snapshot.load, "w", 3) == state


def test_load_of_a_missing_snapshot_raises_not_found(store: Store) -> None:
    with pytest.raises(NotFound):
        store.read(snapshot.load, "w", 3)


def test_save_of_the_same_state_adds_no_blob_reference(sim_store: Store, clock: SimClock) -> None:
    save(sim_store, 3, LARGE)
    save(sim_store, 3, LARGE)
    sim_store.transact(snapshot.prune, "w", 0)
    clock.advance(S)
    assert sim_store.transact(blobs.collect, 0, 10) == 1


def test_save_of_another_state_at_the_same_height_raises_invalid(store: Store) -> None:
    save(store, 3, b"one")
    with pytest.raises(Invalid) as error:
        save(store, 3, b"two")
    assert error.value.what == "snapshot"
    assert store.read(snapshot.load, "w", 3) == b"one"


@pytest.mark.parametrize("state", [b"small", LARGE])
def test_load_of_a_changed_state_raises_store_corrupt(store: Store, state: bytes) -> None:
    save(store, 3, state)

    def tamper(txn: Txn) -> None:
        for prefix in (
            schema.key_prefix(schema.Space.SNAPSHOT, "w", "s"),
            schema.key_prefix(schema.Space.BLOB, "data"),
        ):
            for key, row in txn.scan(prefix, tuples.prefix_end(prefix)):
                txn.put(key, row.replace(b"small", b"SMALL").replace(b"xxxx", b"yyyy"))

    store.transact(tamper)
    with pytest.raises(StoreCorrupt) as error:
        store.read(snapshot.load, "w", 3)
    assert error.value.height == 3


def test_snapshot_heights_are_listed_highest_first(store: Store) -> None:
    for height in (300, 1, 20):
        save(store, height)
    assert heights(store) == [300, 20, 1]


def test_baseline_is_none_before_it_is_set(store: Store) -> None:
    assert store.read(snapshot.baseline, "w") is None


def test_baseline_has_the_height_and_hash_of_its_snapshot(store: Store) -> None:
    hash = save(store, 3)
    assert store.transact(snapshot.set_baseline, "w", 3) == Baseline(3, hash)
    assert store.read(snapshot.baseline, "w") == Baseline(3, hash)


def test_set_baseline_without_a_snapshot_raises_not_found(store: Store) -> None:
    with pytest.raises(NotFound):
        store.transact(snapshot.set_baseline, "w", 3)


def test_save_and_set_baseline_work_in_one_transaction(store: Store) -> None:
    def both(txn: Txn) -> Baseline:
        snapshot.save(txn, "w", 3, LARGE)
        return snapshot.set_baseline(txn, "w", 3)

    assert store.transact(both).height == 3


def test_set_baseline_to_a_lower_height_raises_invalid(store: Store) -> None:
    save(store, 3)
    save(store, 5)
    store.transact(snapshot.set_baseline, "w", 5)
    with pytest.raises(Invalid) as error:
        store.transact(snapshot.set_baseline, "w", 3)
    assert error.value.min == 5


def test_prune_keeps_the_highest_snapshots(store: Store) -> None:
    for height in range(1, 6):
        save(store, height)
    assert store.transact(snapshot.prune, "w", 2) == 3
    assert heights(store) == [5, 4]


def test_prune_keeps_the_baseline(store: Store) -> None:
    for height in range(1, 6):
        save(store, height)
    store.transact(snapshot.set_baseline, "w", 2)
    assert store.transact(snapshot.prune, "w", 1) == 3
    assert heights(store) == [5, 2]


def test_prune_releases_blobs_of_large_states(sim_store: Store, clock: SimClock) -> None:
    save(sim_store, 1, LARGE)
    save(sim_store, 2, LARGE)
    sim_store.transact(snapshot.prune, "w", 1)
    clock.advance(S)
    assert sim_store.transact(blobs.collect, 0, 10) == 0
    assert sim_store.read(snapshot.load, "w", 2) == LARGE
    sim_store.transact(snapshot.prune, "w", 0)
    clock.advance(S)
    assert sim_store.transact(blobs.collect, 0, 10) == 1


def test_snapshots_of_subjects_are_independent(store: Store) -> None:
    save(store, 3)
    store.transact(snapshot.save, "x", 4, b"other")
    assert heights(store) == [3]


BAD = {
    "subject": lambda s: s.transact(snapshot.save, "", 1, b""),
    "height": lambda s: save(s, -1),
    "keep": lambda s: s.transact(snapshot.prune, "w", -1),
    "limit": lambda s: s.read(snapshot.heights, "w", BATCH_MAX + 1),
}


@pytest.mark.parametrize("what", BAD)
def test_snapshot_with_bad_input_raises_invalid_with_the_field(store: Store, what: str) -> None:
    with pytest.raises(Invalid) as error:
        BAD[what](store)
    assert error.value.what == what


@pytest.mark.parametrize("more", [-1, 0, 1, 5])
def test_state_larger_than_a_value_is_stored_in_parts(store: Store, more: int) -> None:
    state = bytes(range(251)) * ((2 * VALUE_BYTES_MAX) // 251) + b"z" * (SNAPSHOT_PART_BYTES + more)
    assert save(store, 3, state) == hashlib.sha256(state).digest()
    assert store.read(snapshot.load, "w", 3) == state


def test_snapshot_parts_are_shared_and_removed_with_their_snapshots(sim_store: Store) -> None:
    part = b"p" * SNAPSHOT_PART_BYTES
    save(sim_store, 1, part + part + b"first")
    save(sim_store, 2, part + part + b"second")
    assert blob_count(sim_store) == 3
    sim_store.transact(snapshot.prune, "w", 1)
    sim_store.transact(blobs.collect, 0, 100)
    assert blob_count(sim_store) == 2
    assert sim_store.read(snapshot.load, "w", 2) == part + part + b"second"
    assert sim_store.transact(snapshot.erase, "w", 100)
    assert blob_count(sim_store) == 0


def test_load_with_a_changed_part_raises_store_corrupt(sim_store: Store) -> None:
    save(sim_store, 1, b"p" * (SNAPSHOT_PART_BYTES + 1))

    def change(txn: Txn) -> None:
        prefix = schema.key_prefix(schema.Space.BLOB, "data")
        for key, data in txn.scan(prefix, tuples.prefix_end(prefix), 10):
            txn.put(key, b"q" + data[1:])

    sim_store.transact(change)
    with pytest.raises(StoreCorrupt):
        sim_store.read(snapshot.load, "w", 1)


def blob_count(store: Store) -> int:
    prefix = schema.key_prefix(schema.Space.BLOB, "data")
    return store.read(lambda txn: len(txn.scan(prefix, tuples.prefix_end(prefix), 100)))
