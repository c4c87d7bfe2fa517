"""Record checks of `verify`: a damaged record differs from its second source and is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from holdfast import codec
from holdfast import store as stores
from holdfast.clock import SimClock
from holdfast.config import BLOB_THRESHOLD_BYTES
from holdfast.durable import inbox, item, journal, lease, snapshot
from holdfast.ops.verify import find_differences
from holdfast.store import schema
from holdfast.store.api import Store, Txn
from holdfast.store.schema import Space
from holdfast.tasks import model as task_rows
from holdfast.tasks import operations
from holdfast.tasks.operations import TaskToSubmit
from holdfast.world import catalog, intents
from tests.ops.account_rig import AccountRig
from tests.ops.app import Asked

MODULES = ("holdfast.ops.verify", "holdfast.durable.consistency", "holdfast.world.consistency")

UNIVERSE = "bank"
SUBJECT = "a journal of its own"
LEASE_LOG = schema.key_prefix(Space.LEASE_LOG)


@pytest.fixture
def store() -> Iterator[Store]:
    with stores.open("memory:", clock=SimClock()) as store:
        store.transact(catalog.create, UNIVERSE, "Account", "ada", "1" * 32)
        store.transact(journal.append, SUBJECT, [b"one", b"two"])
        store.transact(snapshot.save, SUBJECT, 2, b"a state")
        store.transact(snapshot.set_baseline, SUBJECT, 2)
        store.transact(
            operations.submit, UNIVERSE, task_rows.TaskSpec("double"), [TaskToSubmit(b"\x90")]
        )
        store.transact(lease.acquire, "resource", "worker", "1", 10**12)
        assert store.read(find_differences) == []
        yield store


def damage_row(store: Store, prefix: bytes, damage: Callable[[bytes], bytes], at: int = 0) -> None:
    def write(txn: Txn) -> None:
        key, row = txn.scan(prefix, prefix + b"\xff", 10)[at]
        txn.put(key, damage(row))

    store.transact(write)


def find_kinds(store: Store) -> list[tuple[str, str]]:
    return [(difference.kind, difference.what) for difference in store.read(find_differences)]


def test_changed_entry_of_a_journal_without_a_world_is_found(store: Store) -> None:
    entries = schema.key_prefix(Space.JOURNAL, SUBJECT, "e")
    damage_row(store, entries, lambda row: row.replace(b"two", b"twO"), at=1)
    assert find_kinds(store) == [("journal", "entry 2")]


def test_changed_hash_of_a_baseline_is_found(store: Store) -> None:
    def damage(row: bytes) -> bytes:
        base = codec.unpack_as(snapshot.Baseline, row)
        return codec.pack(replace(base, hash=bytes(32)))

    damage_row(store, schema.key_prefix(Space.SNAPSHOT, SUBJECT, "baseline"), damage)
    assert find_kinds(store) == [("snapshot", "hash of the baseline")]


def test_changed_height_of_a_baseline_is_found(store: Store) -> None:
    def damage(row: bytes) -> bytes:
        return codec.pack(replace(codec.unpack_as(snapshot.Baseline, row), height=3))

    damage_row(store, schema.key_prefix(Space.SNAPSHOT, SUBJECT, "baseline"), damage)
    assert find_kinds(store) == [("snapshot", "baseline at 3")]


@pytest.mark.parametrize("field", ["universe", "world_id"])
def test_world_record_under_another_key_is_found(store: Store, field: str) -> None:
    def damage(row: bytes) -> bytes:
        return codec.pack(replace(codec.unpack_as(catalog.WorldRecord, row), **{field: "other"}))

    damage_row(store, schema.key_prefix(Space.WORLD, UNIVERSE, "w"), damage)
    assert ("catalog", "record of") in find_kinds(store)


def test_task_spec_with_a_wrong_hash_is_found(store: Store) -> None:
    specs = task_rows.keys_of(UNIVERSE).specs
    damage_row(store, specs, lambda row: row.replace(b"double", b"dovble"))
    assert find_kinds(store) == [("task", "hash of a spec")]


def test_lease_log_line_of_unknown_kind_is_found(store: Store) -> None:
    damage_row(store, LEASE_LOG, lambda row: row.replace(b"granted", b"grafted"))
    assert ("lease", "kind of line 1") in find_kinds(store)


def test_blob_with_a_wrong_hash_is_found(store: Store) -> None:
    store.transact(snapshot.save, SUBJECT, 3, b"x" * (BLOB_THRESHOLD_BYTES + 1))
    damage_row(store, schema.key_prefix(Space.BLOB, "data"), lambda row: b"y" + row[1:])
    assert find_kinds(store) == [("blob", "content")]


def test_changed_inbox_event_is_found(store: Store) -> None:
    store.transact(inbox.put, f"{UNIVERSE}/{'1' * 32}", None, b"acknowledged")
    waiting = schema.key_prefix(Space.INBOX)
    damage_row(store, waiting, lambda row: row.replace(b"acknow", b"acknoW"))
    assert ("inbox", "ingress 1") in find_kinds(store)


def test_changed_queued_effect_is_found() -> None:
    rig = AccountRig()
    rig.account().send(Asked("GBP"))
    rig.run_worker()
    assert rig.store.read(find_differences) == []
    queued = item.keys_of(intents.effect_queue(UNIVERSE, "fx.quote")).items
    damage_row(rig.store, queued, lambda row: row.replace(b"GBP", b"USD"))
    assert [difference.kind for difference in rig.store.read(find_differences)] == ["effect"]


def test_changed_world_of_a_pending_effect_is_found() -> None:
    rig = AccountRig()
    rig.account().send(Asked("GBP"))
    rig.run_worker()

    def damage(row: bytes) -> bytes:
        return codec.pack(replace(codec.unpack_as(intents.PendingEffect, row), world_id="another"))

    damage_row(rig.store, schema.key_prefix(Space.WORLD, UNIVERSE, "i"), damage)
    assert [difference.kind for difference in rig.store.read(find_differences)] == ["effect"]
