"""A record of the system that was changed by damage differs from its second source, and `verify` says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from holdfast import codec
from holdfast import store as stores
from holdfast.clock import SimClock
from holdfast.config import BLOB_THRESHOLD_BYTES
from holdfast.durable import inbox, item, journal, lease, snapshot
from holdfast.ops.recount import recount
from holdfast.store import schema
from holdfast.store.api import Store, Txn
from holdfast.store.schema import Space
from holdfast.tasks import coordinator
from holdfast.tasks import rows as task_rows
from holdfast.tasks.coordinator import New
from holdfast.world import catalog, publish
from tests.ops.app import Asked
from tests.ops.rig import Rig

MODULES = ("holdfast.ops.recount_records",)

UNIVERSE = "bank"
SUBJECT = "a journal of its own"
LOG = schema.prefix(Space.LEASE_LOG)


@pytest.fixture
def store() -> Iterator[Store]:
    with stores.open("memory:", clock=SimClock()) as store:
        store.transact(catalog.create, UNIVERSE, "Account", "ada", "1" * 32)
        store.transact(journal.append, SUBJECT, [b"one", b"two"])
        store.transact(snapshot.save, SUBJECT, 2, b"a state")
        store.transact(snapshot.set_baseline, SUBJECT, 2)
        store.transact(coordinator.submit, UNIVERSE, task_rows.Spec("double"), [New(b"\x90")])
        store.transact(lease.acquire, "resource", "worker", "1", 10**12)
        assert store.read(recount) == []
        yield store


def change(store: Store, prefix: bytes, damage: Callable[[bytes], bytes], at: int = 0) -> None:
    def write(txn: Txn) -> None:
        key, row = txn.scan(prefix, prefix + b"\xff", 10)[at]
        txn.put(key, damage(row))

    store.transact(write)


def found(store: Store) -> list[tuple[str, str]]:
    return [(one.kind, one.what) for one in store.read(recount)]


def test_an_entry_of_a_journal_that_is_no_world_s(store: Store) -> None:
    entries = schema.prefix(Space.JOURNAL, SUBJECT, "e")
    change(store, entries, lambda row: row.replace(b"two", b"twO"), at=1)
    assert found(store) == [("journal", "entry 2")]


def test_the_hash_of_a_baseline(store: Store) -> None:
    def damage(row: bytes) -> bytes:
        base = codec.unpack_as(snapshot.Baseline, row)
        return codec.pack(replace(base, hash=bytes(32)))

    change(store, schema.prefix(Space.SNAPSHOT, SUBJECT, "baseline"), damage)
    assert found(store) == [("snapshot", "hash of the baseline")]


def test_the_height_of_a_baseline(store: Store) -> None:
    def damage(row: bytes) -> bytes:
        return codec.pack(replace(codec.unpack_as(snapshot.Baseline, row), height=3))

    change(store, schema.prefix(Space.SNAPSHOT, SUBJECT, "baseline"), damage)
    assert found(store) == [("snapshot", "baseline at 3")]


@pytest.mark.parametrize("field", ["universe", "world_id"])
def test_a_world_record_under_another_key(store: Store, field: str) -> None:
    def damage(row: bytes) -> bytes:
        return codec.pack(replace(codec.unpack_as(catalog.WorldRecord, row), **{field: "other"}))

    change(store, schema.prefix(Space.WORLD, UNIVERSE, "w"), damage)
    assert ("catalog", "record of") in found(store)


def test_a_spec_that_its_name_is_not_the_hash_of(store: Store) -> None:
    specs = task_rows.keys_of(UNIVERSE).specs
    change(store, specs, lambda row: row.replace(b"double", b"dovble"))
    assert found(store) == [("task", "hash of a spec")]


def test_a_line_of_the_lease_log_of_no_kind(store: Store) -> None:
    change(store, LOG, lambda row: row.replace(b"granted", b"grafted"))
    assert ("lease", "kind of line 1") in found(store)


def test_a_blob_that_its_name_is_not_the_hash_of(store: Store) -> None:
    store.transact(snapshot.save, SUBJECT, 3, b"x" * (BLOB_THRESHOLD_BYTES + 1))
    change(store, schema.prefix(Space.BLOB, "data"), lambda row: b"y" + row[1:])
    assert found(store) == [("blob", "content")]


def test_an_event_that_waits(store: Store) -> None:
    store.transact(inbox.put, f"{UNIVERSE}/{'1' * 32}", None, b"acknowledged")
    waiting = schema.prefix(Space.INBOX)
    change(store, waiting, lambda row: row.replace(b"acknow", b"acknoW"))
    assert ("inbox", "ingress 1") in found(store)


def test_an_effect_that_waits() -> None:
    rig = Rig()
    rig.account().send(Asked("GBP"))
    rig.work()
    assert rig.store.read(recount) == []
    queued = item.keys_of(publish.effects(UNIVERSE, "fx.quote")).items
    change(rig.store, queued, lambda row: row.replace(b"GBP", b"USD"))
    assert [one.kind for one in rig.store.read(recount)] == ["effect"]


def test_whose_effect_waits() -> None:
    rig = Rig()
    rig.account().send(Asked("GBP"))
    rig.work()

    def damage(row: bytes) -> bytes:
        return codec.pack(replace(codec.unpack_as(publish.Pending, row), world_id="another"))

    change(rig.store, schema.prefix(Space.WORLD, UNIVERSE, "i"), damage)
    assert [one.kind for one in rig.store.read(recount)] == ["effect"]
