"""`holdfast store rebuild`: it restores derived rows from their logs, or writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast import codec
from holdfast import store as stores
from holdfast.clock import S
from holdfast.config import WriterLimits
from holdfast.dispatch import log as dispatch_log
from holdfast.dispatch.log import DispatchLog
from holdfast.dispatch.outcomes import DispatchOutcomeReason
from holdfast.dispatch.request import DispatchStatus
from holdfast.durable import item, queue
from holdfast.durable.lease import LeaseFence, LeaseState
from holdfast.ops import rebuild
from holdfast.ops.verify import find_differences
from holdfast.store import schema, tuples
from holdfast.store.api import Store, Txn
from holdfast.store.schema import Space
from holdfast.store.tuples import pack_int
from holdfast.tasks import checkpoint, operations, row_ranges
from holdfast.tasks import model as task_rows
from holdfast.tasks.operations import TaskToSubmit
from holdfast.world import catalog, unknown_events
from holdfast.world.code_requirement import CodeRequirement
from tests.cli.conftest import RunCommand
from tests.postgres import fresh_url

MODULES = ("holdfast.ops.index_rebuild", "holdfast.ops.rebuild", "holdfast.cli.store_rebuild")


class AmountAdded(hf.Event):
    amount: int


class Sum(hf.World):
    total: int = 0

    @hf.on(AmountAdded)
    def added(self, event: AmountAdded, cx: hf.Context) -> None:
        self.total += event.amount


@hf.task
def double(n: int) -> int:
    return 2 * n


LIMITS = WriterLimits(idle_exit_s=0.05, reader_check_s=0.05)
OTHER = "bank/other"
HOUR_NS = 3600 * S

app = hf.App("bank", worlds=[Sum], tasks=[double])


def open_with_short_linger(path: Path | str) -> Store:
    """Open the store with a writer that exits soon after its last client. Later clients share that writer."""
    return stores.open(path, limits=LIMITS)


@pytest.fixture
def used_store(path: Path) -> Path:
    """A store with worlds, released leases, completed tasks and one waiting task."""
    with open_with_short_linger(path), app.open(str(path)) as bank:
        for name in ("ada", "bob"):
            bank.world(Sum, name).send(AmountAdded(1))
            bank.world(Sum, name).wait_for(lambda state: state.total == 1)
        assert list(bank.map(double, range(5))) == [0, 2, 4, 6, 8]
    with open_with_short_linger(path), app.open(str(path), roles=()) as bank:
        bank.submit(double.options(delay_s=3600, key="seven", tag="eu"), 7)
        bank.world(Sum, "ada").send(AmountAdded(2))
        fill(bank.store)
    return path


def fill(store: Store) -> None:
    """Add queue items in every state, a range of waiting tasks, and dispatches."""
    store.transact(queue.put_many, OTHER, [b"x"] * 3, group="some")
    store.transact(queue.put, OTHER, b"y", priority=1)
    store.transact(queue.put, OTHER, b"z", not_before_ns=store.now_ns() + HOUR_NS)
    store.transact(queue.claim, OTHER, "w", 2, HOUR_NS)
    store.transact(queue.add_dead_letter, OTHER, b"d", "broken", "of itself")
    new = [TaskToSubmit(b"\x92\x91\x01\x80")] * 3
    store.transact(operations.submit, "bank", task_rows.TaskSpec("double"), new)
    log = DispatchLog(store, "bank")
    for name in ("first", "second"):
        log.request(name, "somewhere")
    log.tried("second")
    log.concluded("first", DispatchOutcomeReason.LEADER_MISSING, retries_left=1)


def stored_rows(path: Path | str) -> dict[bytes, bytes]:
    with open_with_short_linger(path) as store:
        rows = store.read(lambda txn: txn.scan(b"\x00", b"\xff\xff"))
    store_keys = (schema.META_KEY, schema.MARKER_KEY)
    return {k: v for k, v in rows if k not in store_keys and not k.startswith(schema.OUTCOME)}


def damage_store(path: Path | str, change: Callable[[Txn], Any]) -> None:
    with open_with_short_linger(path) as store:
        store.transact(change)


def verify_exit_code(run: RunCommand, path: Path) -> int:
    with open_with_short_linger(path):
        return run("verify", "--store", path, "--jobs", 1).code


def first_row(txn: Txn, prefix: bytes) -> tuple[bytes, bytes]:
    [(key, row)] = txn.scan(prefix, tuples.prefix_end(prefix), 1)
    return key, row


def world_id(txn: Txn, name: str) -> str:
    found_id = catalog.find_id(txn, "bank", "Sum", name)
    assert found_id is not None
    return found_id


def lose_name(txn: Txn) -> None:
    txn.delete(schema.key_prefix(Space.WORLD, "bank", "n", "Sum", "ada"))


def lose_counter(txn: Txn) -> None:
    txn.put(schema.key_prefix(Space.WORLD, "bank", "c", "active"), schema.encode_int(99))


def lose_index(txn: Txn) -> None:
    txn.delete(first_row(txn, schema.key_prefix(Space.WORLD, "bank", "b"))[0])


def lose_hint(txn: Txn) -> None:
    prefix = schema.key_prefix(Space.READY, "bank")
    for key, _ in txn.scan(prefix, tuples.prefix_end(prefix), 100):
        txn.delete(key)


def change_fence(txn: Txn) -> None:
    key = schema.key_prefix(Space.LEASE, "fence", f"bank/{world_id(txn, 'bob')}")
    row = txn.get(key)
    assert row is not None
    fence = codec.unpack_as(LeaseFence, row)
    txn.put(
        key,
        codec.pack(LeaseFence(LeaseState.HELD, "thief", "1", fence.generation, fence.epoch + 7)),
    )
    txn.put(schema.key_prefix(Space.LEASE, "by", "thief", f"bank/{world_id(txn, 'bob')}"), b"")


def change_authority(txn: Txn) -> None:
    key = schema.key_prefix(Space.LEASE, "fence", "bank/authority")
    row = txn.get(key)
    assert row is not None
    fence = codec.unpack_as(LeaseFence, row)
    txn.put(key, codec.pack(LeaseFence(LeaseState.FREE, "", "", fence.generation, fence.epoch + 3)))


def change_queue_counter(txn: Txn) -> None:
    txn.put(item.keys_of("bank/other").counts, codec.pack(item.QueueCounts(ready=5)))


def change_task_counts(txn: Txn) -> None:
    keys = task_rows.keys_of("bank")
    txn.put(keys.counts + task_rows.pack_text("default"), codec.pack(task_rows.TaskCounts(dead=9)))


def change_task_status(txn: Txn) -> None:
    keys = task_rows.keys_of("bank")
    key, row = first_row(txn, keys.statuses)
    status = task_rows.decode_status(row)
    txn.put(key, codec.pack(replace(status, attempt=77, reason="planted")))


def lose_all(txn: Txn, *prefixes: bytes) -> None:
    rows = [row for prefix in prefixes for row in txn.scan(prefix, tuples.prefix_end(prefix), 100)]
    assert rows
    for key, _ in rows:
        txn.delete(key)


def lose_queue_indexes(txn: Txn) -> None:
    keys = item.keys_of(OTHER)
    for prefix in (keys.ready, keys.delayed, keys.by_expiry, keys.by_owner, keys.dead_by_time):
        lose_all(txn, prefix)


def swap_queue_indexes(txn: Txn) -> None:
    """Index a claimed item as ready too, and let a delayed row name another item than its key."""
    keys = item.keys_of(OTHER)
    _, packed_seq = first_row(txn, keys.by_expiry)
    txn.put(keys.ready_key(1, 0, packed_seq), packed_seq)
    txn.put(first_row(txn, keys.delayed)[0], packed_seq)


def lose_dispatch_indexes(txn: Txn) -> None:
    keys = dispatch_log.keys_of("bank")
    lose_all(txn, keys.marks, *keys.states.values())
    txn.put(keys.deferred, schema.encode_int(9))
    txn.delete(keys.counts[DispatchStatus.PENDING])


def change_dispatch_marks(txn: Txn) -> None:
    key, row = first_row(txn, dispatch_log.keys_of("bank").marks)
    txn.put(key, b"first" if row == b"second" else b"second")


def lose_task_places(txn: Txn) -> None:
    keys = task_rows.keys_of("bank")
    lose_all(txn, keys.ready)
    lose_all(txn, keys.delayed)


def change_task_places(txn: Txn) -> None:
    """Index one task of a range as parked too, and an ended task as ready."""
    keys = task_rows.keys_of("bank")
    spec = task_rows.TaskSpec("double")
    _, row = first_row(txn, keys.ready)
    last = pack_int(row_ranges.decode_range(row)[1])
    limited = tuples.pack((spec.queue, "some")) + task_rows.index_key(spec, last)
    txn.put(keys.throttled + limited, last)
    ended = first_row(txn, keys.statuses)[0][len(keys.statuses) :]
    txn.put(keys.ready + task_rows.index_key(spec, ended), ended)


def lose_task_key(txn: Txn) -> None:
    lose_all(txn, task_rows.keys_of("bank").idempotency_keys)


def lose_task_tag(txn: Txn) -> None:
    lose_all(txn, task_rows.keys_of("bank").tags)


def lose_task_list(txn: Txn) -> None:
    lose_all(txn, task_rows.keys_of("bank").listed)


DAMAGE = [
    lose_name,
    lose_counter,
    lose_index,
    lose_hint,
    change_fence,
    change_authority,
    change_queue_counter,
    change_task_counts,
    change_task_status,
    lose_queue_indexes,
    swap_queue_indexes,
    lose_dispatch_indexes,
    change_dispatch_marks,
    lose_task_places,
    change_task_places,
    lose_task_key,
    lose_task_tag,
    lose_task_list,
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda one: one.__name__)
def test_store_rebuild_restores_a_damaged_row_from_its_log(
    run: RunCommand, used_store: Path, damage: Callable[[Txn], None]
) -> None:
    before = stored_rows(used_store)
    damage_store(used_store, damage)
    assert verify_exit_code(run, used_store) == 1
    damaged = stored_rows(used_store)
    argv = ["store", "rebuild", "--universe", "bank", "--store", used_store]
    dry = run(*argv, "--dry-run", "--json").document
    assert dry["differences"]
    assert (dry["written"], dry["rows"] > 0) == (False, True)
    assert stored_rows(used_store) == damaged
    result = run(*argv, "--json")
    assert result.code == 0, result.err
    document = result.document
    assert (document["written"], document["rows"]) == (True, dry["rows"])
    assert stored_rows(used_store) == before
    assert verify_exit_code(run, used_store) == 0


def test_store_rebuild_restores_the_index_of_worlds_that_wait_for_code(
    run: RunCommand, used_store: Path
) -> None:
    def stop(txn: Txn) -> None:
        record = catalog.get_record(txn, "bank", world_id(txn, "ada"))
        unknown_events.mark_stopped(txn, record, CodeRequirement("Sum", "event", "Other", 1), seq=2)

    def lose_list(txn: Txn) -> None:
        txn.delete(first_row(txn, schema.key_prefix(Space.WORLD, "bank", "u"))[0])

    damage_store(used_store, stop)
    before = stored_rows(used_store)
    damage_store(used_store, lose_list)
    result = run("store", "rebuild", "--universe", "bank", "--store", used_store, "--json")
    assert result.code == 0, result.err
    assert stored_rows(used_store) == before


def test_store_rebuild_of_a_consistent_store_writes_nothing(
    run: RunCommand, used_store: Path
) -> None:
    before = stored_rows(used_store)
    result = run("store", "rebuild", "--universe", "bank", "--store", used_store)
    assert (result.code, "nothing was written" in result.out) == (0, True)
    assert stored_rows(used_store) == before


def break_log(txn: Txn) -> None:
    prefix = schema.key_prefix(Space.JOURNAL, task_rows.keys_of("bank").subject, "e")
    key, row = first_row(txn, prefix)
    txn.put(key, row[:-1] + bytes([row[-1] ^ 1]))


def test_store_rebuild_with_a_broken_log_writes_nothing(run: RunCommand, used_store: Path) -> None:
    damage_store(used_store, break_log)
    damage_store(used_store, change_task_counts)
    before = stored_rows(used_store)
    result = run("store", "rebuild", "--universe", "bank", "--store", used_store)
    assert (result.code, result.error.partition(":")[0]) == (1, "log_broken")
    assert stored_rows(used_store) == before


def lose_item(txn: Txn) -> None:
    txn.delete(first_row(txn, item.keys_of(OTHER).items)[0])


def lose_claim(txn: Txn) -> None:
    txn.delete(first_row(txn, item.keys_of(OTHER).claim_rows)[0])


def lose_letter(txn: Txn) -> None:
    txn.delete(first_row(txn, item.keys_of(OTHER).dead)[0])


def break_place(txn: Txn) -> None:
    txn.put(first_row(txn, task_rows.keys_of("bank").ready)[0], b"")


@pytest.mark.parametrize(
    "loss", [lose_item, lose_claim, lose_letter, break_place], ids=lambda one: one.__name__
)
def test_store_rebuild_writes_nothing_when_a_lost_row_has_no_log(
    run: RunCommand, used_store: Path, loss: Callable[[Txn], None]
) -> None:
    damage_store(used_store, loss)
    damage_store(used_store, lose_counter)
    before = stored_rows(used_store)
    result = run("store", "rebuild", "--universe", "bank", "--store", used_store)
    assert (result.code, result.error.partition(":")[0]) == (1, "not_rebuilt")
    assert stored_rows(used_store) == before


def test_store_rebuild_refuses_when_a_result_older_than_the_log_is_lost(
    run: RunCommand, used_store: Path
) -> None:
    with open_with_short_linger(used_store) as store:
        for _ in range(2):
            # The log starts at the checkpoint before the latest one.
            assert checkpoint.create(store, "bank")
            store.transact(
                operations.submit, "bank", task_rows.TaskSpec("double"), [TaskToSubmit(b"")]
            )

    def lose_result(txn: Txn) -> None:
        txn.delete(first_row(txn, task_rows.keys_of("bank").statuses)[0])

    damage_store(used_store, lose_result)
    before = stored_rows(used_store)
    result = run("store", "rebuild", "--universe", "bank", "--store", used_store)
    assert (result.code, result.error.partition(":")[0]) == (1, "not_rebuilt")
    assert stored_rows(used_store) == before


@pytest.mark.postgresql
def test_store_rebuild_on_postgresql(run: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    url = fresh_url()
    with app.open(url) as bank:
        bank.world(Sum, "bob").send(AmountAdded(1))
        bank.world(Sum, "ada").send(AmountAdded(1))
        assert list(bank.map(double, range(3))) == [0, 2, 4]
        for name in ("ada", "bob"):
            bank.world(Sum, name).wait_for(lambda state: state.total == 1)
    with app.open(url, roles=()) as bank:
        bank.submit(double.options(delay_s=3600, key="seven", tag="eu"), 7)
        bank.world(Sum, "ada").send(AmountAdded(2))
        fill(bank.store)
    before = stored_rows(url)
    argv = ["store", "rebuild", "--universe", "bank", "--store", url, "--json"]
    assert run(*argv).document["written"] is False
    for damage in DAMAGE:
        damage_store(url, damage)
        result = run(*argv)
        assert result.code == 0, (damage, result.err)
        assert result.document["written"], damage
        assert stored_rows(url) == before, damage
    with stores.open(url), monkeypatch.context() as patch:
        patch.setattr(rebuild, "GRACE_S", -WriterLimits().idle_exit_s)
        assert run(*argv).error.startswith("store_busy")
    damage_store(url, lose_item)
    damage_store(url, lose_counter)
    before = stored_rows(url)
    assert run(*argv).error.startswith("not_rebuilt")
    assert stored_rows(url) == before


@pytest.mark.usefixtures("short_lock_waits")
def test_store_rebuild_of_an_open_store_raises_store_busy(
    run: RunCommand, used_store: Path
) -> None:
    damage_store(used_store, lose_counter)
    with open_with_short_linger(used_store) as store:
        result = run("store", "rebuild", "--universe", "bank", "--store", used_store)
        assert (result.code, result.error.partition(":")[0]) == (1, "store_busy")
        assert has_differences(store)


def test_store_rebuild_of_an_unknown_universe_is_not_found(
    run: RunCommand, used_store: Path
) -> None:
    result = run("store", "rebuild", "--universe", "nowhere", "--store", used_store)
    assert result.error.startswith("not_found")


def has_differences(store: Store) -> bool:
    return bool(store.read(find_differences))
