"""Snapshots: states at a height, and the one to restore from."""

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
def test_what_was_saved_is_loaded(store: Store, state: bytes) -> None:
    assert save(store, 3, state) == hashlib.sha256(state).digest()
    assert store.read(snapshot.load, "w", 3) == state


def test_a_snapshot_that_is_not_there_is_not_found(store: Store) -> None:
    with pytest.raises(NotFound):
        store.read(snapshot.load, "w", 3)


def test_saving_the_same_state_again_changes_nothing(sim_store: Store, clock: SimClock) -> None:
    save(sim_store, 3, LARGE)
    save(sim_store, 3, LARGE)
    sim_store.transact(snapshot.prune, "w", 0)
    clock.advance(S)
    assert sim_store.transact(blobs.collect, 0, 10) == 1


def test_a_height_has_one_state(store: Store) -> None:
    save(store, 3, b"one")
    with pytest.raises(Invalid) as error:
        save(store, 3, b"two")
    assert error.value.what == "snapshot"
    assert store.read(snapshot.load, "w", 3) == b"one"


@pytest.mark.parametrize("state", [b"small", LARGE])
def test_a_changed_state_is_not_loaded(store: Store, state: bytes) -> None:
    save(store, 3, state)

    def tamper(txn: Txn) -> None:
        for prefix in (
            schema.prefix(schema.Space.SNAPSHOT, "w", "s"),
            schema.prefix(schema.Space.BLOB, "data"),
        ):
            for key, row in txn.scan(prefix, tuples.after(prefix)):
                txn.put(key, row.replace(b"small", b"SMALL").replace(b"xxxx", b"yyyy"))

    store.transact(tamper)
    with pytest.raises(StoreCorrupt) as error:
        store.read(snapshot.load, "w", 3)
    assert error.value.height == 3


def test_heights_are_listed_highest_first(store: Store) -> None:
    for height in (300, 1, 20):
        save(store, height)
    assert heights(store) == [300, 20, 1]


def test_without_a_baseline_there_is_none(store: Store) -> None:
    assert store.read(snapshot.baseline, "w") is None


def test_the_baseline_names_a_snapshot_and_its_hash(store: Store) -> None:
    hash = save(store, 3)
    assert store.transact(snapshot.set_baseline, "w", 3) == Baseline(3, hash)
    assert store.read(snapshot.baseline, "w") == Baseline(3, hash)


def test_the_baseline_needs_its_snapshot(store: Store) -> None:
    with pytest.raises(NotFound):
        store.transact(snapshot.set_baseline, "w", 3)


def test_snapshot_and_baseline_fit_one_transaction(store: Store) -> None:
    def both(txn: Txn) -> Baseline:
        snapshot.save(txn, "w", 3, LARGE)
        return snapshot.set_baseline(txn, "w", 3)

    assert store.transact(both).height == 3


def test_the_baseline_never_moves_down(store: Store) -> None:
    save(store, 3)
    save(store, 5)
    store.transact(snapshot.set_baseline, "w", 5)
    with pytest.raises(Invalid) as error:
        store.transact(snapshot.set_baseline, "w", 3)
    assert error.value.min == 5


def test_pruning_keeps_the_highest(store: Store) -> None:
    for height in range(1, 6):
        save(store, height)
    assert store.transact(snapshot.prune, "w", 2) == 3
    assert heights(store) == [5, 4]


def test_pruning_never_takes_the_baseline(store: Store) -> None:
    for height in range(1, 6):
        save(store, height)
    store.transact(snapshot.set_baseline, "w", 2)
    assert store.transact(snapshot.prune, "w", 1) == 3
    assert heights(store) == [5, 2]


def test_pruning_lets_large_states_go(sim_store: Store, clock: SimClock) -> None:
    save(sim_store, 1, LARGE)
    save(sim_store, 2, LARGE)
    sim_store.transact(snapshot.prune, "w", 1)
    clock.advance(S)
    assert sim_store.transact(blobs.collect, 0, 10) == 0
    assert sim_store.read(snapshot.load, "w", 2) == LARGE
    sim_store.transact(snapshot.prune, "w", 0)
    clock.advance(S)
    assert sim_store.transact(blobs.collect, 0, 10) == 1


def test_subjects_do_not_disturb_each_other(store: Store) -> None:
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
def test_bad_input_is_named(store: Store, what: str) -> None:
    with pytest.raises(Invalid) as error:
        BAD[what](store)
    assert error.value.what == what


@pytest.mark.parametrize("more", [-1, 0, 1, 5])
def test_a_state_larger_than_a_value_is_stored_in_parts(store: Store, more: int) -> None:
    state = bytes(range(251)) * ((2 * VALUE_BYTES_MAX) // 251) + b"z" * (SNAPSHOT_PART_BYTES + more)
    assert save(store, 3, state) == hashlib.sha256(state).digest()
    assert store.read(snapshot.load, "w", 3) == state


def test_parts_go_with_their_snapshot_and_equal_ones_are_stored_once(sim_store: Store) -> None:
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


def test_a_part_that_was_changed_is_noticed(sim_store: Store) -> None:
    save(sim_store, 1, b"p" * (SNAPSHOT_PART_BYTES + 1))

    def change(txn: Txn) -> None:
        prefix = schema.prefix(schema.Space.BLOB, "data")
        for key, data in txn.scan(prefix, tuples.after(prefix), 10):
            txn.put(key, b"q" + data[1:])

    sim_store.transact(change)
    with pytest.raises(StoreCorrupt):
        sim_store.read(snapshot.load, "w", 1)


def blob_count(store: Store) -> int:
    prefix = schema.prefix(schema.Space.BLOB, "data")
    return store.read(lambda txn: len(txn.scan(prefix, tuples.after(prefix), 100)))
