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
from holdfast.durable import item, queue
from holdfast.durable.lease import Fence, State
from holdfast.ops.recount import recount
from holdfast.store import schema, tuples
from holdfast.store.api import Store, Txn
from holdfast.store.schema import Space
from holdfast.tasks import rows as task_rows
from holdfast.world import catalog, unknown
from holdfast.world.need import Need
from tests.cli.conftest import Run

MODULES = ("holdfast.ops.rebuild", "holdfast.cli.store_rebuild")


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


app = hf.App("bank", worlds=[Sum], tasks=[double])


@pytest.fixture
def lived(path: Path) -> Path:
    """A store with worlds, leases that were given back, tasks that are done and one that waits."""
    with app.open(str(path)) as bank:
        for name in ("ada", "bob"):
            bank.world(Sum, name).send(Added(1))
            bank.world(Sum, name).wait_for(lambda state: state.total == 1)
        assert list(bank.map(double, range(5))) == [0, 2, 4, 6, 8]
    with app.open(str(path), roles=()) as bank:
        bank.submit(double.options(delay_s=3600), 7)
        bank.world(Sum, "ada").send(Added(2))
        bank.store.transact(queue.put, "bank/other", b"x")
    return path


def rows(path: Path) -> dict[bytes, bytes]:
    with stores.open(path) as store:
        found = store.read(lambda txn: txn.scan(b"\x00", b"\xff\xff"))
    own = (schema.META_KEY, schema.MARKER_KEY)
    return {k: v for k, v in found if k not in own and not k.startswith(schema.OUTCOME)}


def changed(path: Path, change: Callable[[Txn], Any]) -> None:
    with stores.open(path) as store:
        store.transact(change)


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
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda one: one.__name__)
def test_a_row_that_differs_is_as_its_log_says_again(
    run: Run, lived: Path, damage: Callable[[Txn], None]
) -> None:
    before = rows(lived)
    changed(lived, damage)
    assert run("verify", "--store", lived, "--jobs", 1).code == 1
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
    assert run("verify", "--store", lived, "--jobs", 1).code == 0


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


def test_nothing_is_written_when_a_row_cannot_be_told_from_any_log(run: Run, lived: Path) -> None:
    def lose_item(txn: Txn) -> None:
        txn.delete(first(txn, item.keys_of("bank/other").items)[0])

    changed(lived, lose_item)
    changed(lived, lose_counter)
    before = rows(lived)
    ran = run("store", "rebuild", "--universe", "bank", "--store", lived)
    assert (ran.code, ran.error.partition(":")[0]) == (1, "not_rebuilt")
    assert rows(lived) == before


def test_it_waits_for_nobody_that_has_the_store_open(run: Run, lived: Path) -> None:
    changed(lived, lose_counter)
    with stores.open(lived) as held:
        ran = run("store", "rebuild", "--universe", "bank", "--store", lived)
        assert (ran.code, ran.error.partition(":")[0]) == (1, "store_busy")
        assert differs(held)


def test_a_universe_that_is_not_there_is_not_found(run: Run, lived: Path) -> None:
    ran = run("store", "rebuild", "--universe", "nowhere", "--store", lived)
    assert ran.error.startswith("not_found")


def differs(store: Store) -> bool:
    return bool(store.read(recount))
