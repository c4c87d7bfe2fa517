"""`holdfast store rebuild`: derived rows from their logs, or nothing written at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast import codec
from holdfast import store as stores
from holdfast.authority import dispatch_log
from holdfast.authority.dispatch import DispatchStatus
from holdfast.authority.dispatch_log import DispatchLog
from holdfast.authority.outcome import DispatchOutcomeReason
from holdfast.clock import S
from holdfast.config import WriterLimits
from holdfast.durable import item, queue
from holdfast.durable.lease import Fence, State
from holdfast.ops.recount import recount
from holdfast.store import schema, tuples
from holdfast.store.api import Store, Txn
from holdfast.store.schema import Space
from holdfast.store.tuples import pack_int
from holdfast.tasks import checkpoint, coordinator, runs
from holdfast.tasks import rows as task_rows
from holdfast.tasks.coordinator import New
from holdfast.world import catalog, unknown
from holdfast.world.need import Need
from tests.cli.conftest import Run
from tests.postgres import fresh_url

MODULES = ("holdfast.ops.indexes", "holdfast.ops.rebuild", "holdfast.cli.store_rebuild")


class Added(hf.Event):
    amount: int


class Sum(hf.World):
    total: int = 0

    @hf.on(Added)
    def added(self, event: Added, cx: hf.Context) -> None:
        self.total += event.amount


@hf.task
def double(n: int) -> int:
    return 2 * n


LIMITS = WriterLimits(linger_s=0.05, reader_check_s=0.05)
OTHER = "bank/other"
HOUR_NS = 3600 * S

app = hf.App("bank", worlds=[Sum], tasks=[double])


def quick(path: Path | str) -> Store:
    """The store with a writer that ends soon after its last client, also for clients that come now."""
    return stores.open(path, limits=LIMITS)


@pytest.fixture
def lived(path: Path) -> Path:
    """A store with worlds, leases that were given back, tasks that are done and one that waits."""
    with quick(path), app.open(str(path)) as bank:
        for name in ("ada", "bob"):
            bank.world(Sum, name).send(Added(1))
            bank.world(Sum, name).wait_for(lambda state: state.total == 1)
        assert list(bank.map(double, range(5))) == [0, 2, 4, 6, 8]
    with quick(path), app.open(str(path), roles=()) as bank:
        bank.submit(double.options(delay_s=3600, key="seven"), 7)
        bank.world(Sum, "ada").send(Added(2))
        fill(bank.store)
    return path


def fill(store: Store) -> None:
    """Items in every state, a run of tasks that wait, and dispatches."""
    store.transact(queue.put_many, OTHER, [b"x"] * 3, group="some")
    store.transact(queue.put, OTHER, b"y", priority=1)
    store.transact(queue.put, OTHER, b"z", not_before_ns=store.now_ns() + HOUR_NS)
    store.transact(queue.claim, OTHER, "w", 2, HOUR_NS)
    store.transact(queue.post_dead, OTHER, b"d", "broken", "of itself")
    new = [New(b"\x92\x91\x01\x80")] * 3
    store.transact(coordinator.submit, "bank", task_rows.Spec("double"), new)
    log = DispatchLog(store, "bank")
    for name in ("first", "second"):
        log.request(name, "somewhere")
    log.tried("second")
    log.concluded("first", DispatchOutcomeReason.LEADER_MISSING, retries_left=1)


def rows(path: Path | str) -> dict[bytes, bytes]:
    with quick(path) as store:
        found = store.read(lambda txn: txn.scan(b"\x00", b"\xff\xff"))
    own = (schema.META_KEY, schema.MARKER_KEY)
    return {k: v for k, v in found if k not in own and not k.startswith(schema.OUTCOME)}


def changed(path: Path | str, change: Callable[[Txn], Any]) -> None:
    with quick(path) as store:
        store.transact(change)


def verified(run: Run, path: Path) -> int:
    with quick(path):
        return run("verify", "--store", path, "--jobs", 1).code


def first(txn: Txn, prefix: bytes) -> tuple[bytes, bytes]:
    [(key, row)] = txn.scan(prefix, tuples.after(prefix), 1)
    return key, row


def world_id(txn: Txn, name: str) -> str:
    found = catalog.find(txn, "bank", "Sum", name)
    assert found is not None
    return found


def lose_name(txn: Txn) -> None:
    txn.delete(schema.prefix(Space.WORLD, "bank", "n", "Sum", "ada"))


def lose_counter(txn: Txn) -> None:
    txn.put(schema.prefix(Space.WORLD, "bank", "c", "active"), schema.int_bytes(99))


def lose_index(txn: Txn) -> None:
    txn.delete(first(txn, schema.prefix(Space.WORLD, "bank", "b"))[0])


def lose_hint(txn: Txn) -> None:
    prefix = schema.prefix(Space.READY, "bank")
    for key, _ in txn.scan(prefix, tuples.after(prefix), 100):
        txn.delete(key)


def change_fence(txn: Txn) -> None:
    key = schema.prefix(Space.LEASE, "fence", f"bank/{world_id(txn, 'bob')}")
    row = txn.get(key)
    assert row is not None
    fence = codec.unpack_as(Fence, row)
    txn.put(key, codec.pack(Fence(State.HELD, "thief", "1", fence.generation, fence.epoch + 7)))
    txn.put(schema.prefix(Space.LEASE, "by", "thief", f"bank/{world_id(txn, 'bob')}"), b"")


def change_authority(txn: Txn) -> None:
    key = schema.prefix(Space.LEASE, "fence", "bank/authority")
    row = txn.get(key)
    assert row is not None
    fence = codec.unpack_as(Fence, row)
    txn.put(key, codec.pack(Fence(State.FREE, "", "", fence.generation, fence.epoch + 3)))


def change_queue_counter(txn: Txn) -> None:
    txn.put(item.keys_of("bank/other").counts, codec.pack(item.Counts(ready=5)))


def change_task_counts(txn: Txn) -> None:
    keys = task_rows.keys_of("bank")
    txn.put(keys.counts + task_rows.packed_text("default"), codec.pack(task_rows.Counts(dead=9)))


def change_task_status(txn: Txn) -> None:
    keys = task_rows.keys_of("bank")
    key, row = first(txn, keys.statuses)
    status = task_rows.decode_status(row)
    txn.put(key, codec.pack(replace(status, attempt=77, reason="planted")))


def lose_all(txn: Txn, *prefixes: bytes) -> None:
    found = [row for prefix in prefixes for row in txn.scan(prefix, tuples.after(prefix), 100)]
    assert found
    for key, _ in found:
        txn.delete(key)


def lose_queue_indexes(txn: Txn) -> None:
    keys = item.keys_of(OTHER)
    for prefix in (keys.ready, keys.delayed, keys.claims, keys.owners, keys.died):
        lose_all(txn, prefix)


def swap_queue_indexes(txn: Txn) -> None:
    """What is claimed is ready as well, and a row names another item than its key."""
    keys = item.keys_of(OTHER)
    _, packed_seq = first(txn, keys.claims)
    txn.put(keys.ready_key(1, 0, packed_seq), packed_seq)
    txn.put(first(txn, keys.delayed)[0], packed_seq)


def lose_dispatch_indexes(txn: Txn) -> None:
    keys = dispatch_log.keys_of("bank")
    lose_all(txn, keys.marks, *keys.states.values())
    txn.put(keys.deferred, schema.int_bytes(9))
    txn.delete(keys.counts[DispatchStatus.PENDING])


def change_dispatch_marks(txn: Txn) -> None:
    key, row = first(txn, dispatch_log.keys_of("bank").marks)
    txn.put(key, b"first" if row == b"second" else b"second")


def lose_task_places(txn: Txn) -> None:
    keys = task_rows.keys_of("bank")
    lose_all(txn, keys.ready)
    lose_all(txn, keys.delayed)


def change_task_places(txn: Txn) -> None:
    """One task of a run is parked as well, and one that has ended is ready again."""
    keys = task_rows.keys_of("bank")
    spec = task_rows.Spec("double")
    _, row = first(txn, keys.ready)
    last = pack_int(runs.run_of(row)[1])
    limited = tuples.pack((spec.queue, "some")) + task_rows.order(spec, last)
    txn.put(keys.parked + limited, last)
    ended = first(txn, keys.statuses)[0][len(keys.statuses) :]
    txn.put(keys.ready + task_rows.order(spec, ended), ended)


def lose_task_key(txn: Txn) -> None:
    lose_all(txn, task_rows.keys_of("bank").keys)


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
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda one: one.__name__)
def test_a_row_that_differs_is_as_its_log_says_again(
    run: Run, lived: Path, damage: Callable[[Txn], None]
) -> None:
    before = rows(lived)
    changed(lived, damage)
    assert verified(run, lived) == 1
    planted = rows(lived)
    argv = ["store", "rebuild", "--universe", "bank", "--store", lived]
    dry = run(*argv, "--dry-run", "--json").document
    assert dry["differences"]
    assert (dry["written"], dry["rows"] > 0) == (False, True)
    assert rows(lived) == planted
    ran = run(*argv, "--json")
    assert ran.code == 0, ran.err
    done = ran.document
    assert (done["written"], done["rows"]) == (True, dry["rows"])
    assert rows(lived) == before
    assert verified(run, lived) == 0


def test_a_world_that_waits_for_other_code_is_listed_again(run: Run, lived: Path) -> None:
    def stop(txn: Txn) -> None:
        record = catalog.record(txn, "bank", world_id(txn, "ada"))
        unknown.mark(txn, record, Need("Sum", "event", "Other", 1), 2)

    def lose_list(txn: Txn) -> None:
        txn.delete(first(txn, schema.prefix(Space.WORLD, "bank", "u"))[0])

    changed(lived, stop)
    before = rows(lived)
    changed(lived, lose_list)
    done = run("store", "rebuild", "--universe", "bank", "--store", lived, "--json")
    assert done.code == 0, done.err
    assert rows(lived) == before


def test_a_sound_store_is_left_as_it_is(run: Run, lived: Path) -> None:
    before = rows(lived)
    ran = run("store", "rebuild", "--universe", "bank", "--store", lived)
    assert (ran.code, "nothing was written" in ran.out) == (0, True)
    assert rows(lived) == before


def break_log(txn: Txn) -> None:
    prefix = schema.prefix(Space.JOURNAL, task_rows.keys_of("bank").subject, "e")
    key, row = first(txn, prefix)
    txn.put(key, row[:-1] + bytes([row[-1] ^ 1]))


def test_nothing_is_written_when_the_log_itself_does_not_verify(run: Run, lived: Path) -> None:
    changed(lived, break_log)
    changed(lived, change_task_counts)
    before = rows(lived)
    ran = run("store", "rebuild", "--universe", "bank", "--store", lived)
    assert (ran.code, ran.error.partition(":")[0]) == (1, "log_broken")
    assert rows(lived) == before


def lose_item(txn: Txn) -> None:
    txn.delete(first(txn, item.keys_of(OTHER).items)[0])


def lose_claim(txn: Txn) -> None:
    txn.delete(first(txn, item.keys_of(OTHER).holds)[0])


def lose_letter(txn: Txn) -> None:
    txn.delete(first(txn, item.keys_of(OTHER).dead)[0])


def break_place(txn: Txn) -> None:
    txn.put(first(txn, task_rows.keys_of("bank").ready)[0], b"")


@pytest.mark.parametrize(
    "loss", [lose_item, lose_claim, lose_letter, break_place], ids=lambda one: one.__name__
)
def test_nothing_is_written_when_a_row_cannot_be_told_from_any_log(
    run: Run, lived: Path, loss: Callable[[Txn], None]
) -> None:
    changed(lived, loss)
    changed(lived, lose_counter)
    before = rows(lived)
    ran = run("store", "rebuild", "--universe", "bank", "--store", lived)
    assert (ran.code, ran.error.partition(":")[0]) == (1, "not_rebuilt")
    assert rows(lived) == before


def test_a_result_that_is_lost_below_the_log_is_not_made_up(run: Run, lived: Path) -> None:
    with quick(lived) as store:
        for _ in range(2):
            # The log is kept from the checkpoint before the latest.
            assert checkpoint.make(store, "bank")
            store.transact(coordinator.submit, "bank", task_rows.Spec("double"), [New(b"")])

    def lose_result(txn: Txn) -> None:
        txn.delete(first(txn, task_rows.keys_of("bank").statuses)[0])

    changed(lived, lose_result)
    before = rows(lived)
    ran = run("store", "rebuild", "--universe", "bank", "--store", lived)
    assert (ran.code, ran.error.partition(":")[0]) == (1, "not_rebuilt")
    assert rows(lived) == before


@pytest.mark.postgresql
def test_on_postgresql_rows_that_differ_are_as_their_logs_say_again(run: Run) -> None:
    url = fresh_url()
    with app.open(url) as bank:
        bank.world(Sum, "bob").send(Added(1))
        bank.world(Sum, "ada").send(Added(1))
        assert list(bank.map(double, range(3))) == [0, 2, 4]
        for name in ("ada", "bob"):
            bank.world(Sum, name).wait_for(lambda state: state.total == 1)
    with app.open(url, roles=()) as bank:
        bank.submit(double.options(delay_s=3600, key="seven"), 7)
        bank.world(Sum, "ada").send(Added(2))
        fill(bank.store)
    before = rows(url)
    argv = ["store", "rebuild", "--universe", "bank", "--store", url, "--json"]
    assert run(*argv).document["written"] is False
    for damage in DAMAGE:
        changed(url, damage)
        done = run(*argv)
        assert done.code == 0, (damage, done.err)
        assert done.document["written"], damage
        assert rows(url) == before, damage
    with stores.open(url):
        assert run(*argv).error.startswith("store_busy")
    changed(url, lose_item)
    changed(url, lose_counter)
    before = rows(url)
    assert run(*argv).error.startswith("not_rebuilt")
    assert rows(url) == before


def test_it_waits_for_nobody_that_has_the_store_open(run: Run, lived: Path) -> None:
    changed(lived, lose_counter)
    with quick(lived) as held:
        ran = run("store", "rebuild", "--universe", "bank", "--store", lived)
        assert (ran.code, ran.error.partition(":")[0]) == (1, "store_busy")
        assert differs(held)


def test_a_universe_that_is_not_there_is_not_found(run: Run, lived: Path) -> None:
    ran = run("store", "rebuild", "--universe", "nowhere", "--store", lived)
    assert ran.error.startswith("not_found")


def differs(store: Store) -> bool:
    return bool(store.read(recount))
