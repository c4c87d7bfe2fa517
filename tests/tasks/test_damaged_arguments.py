"""Arguments that damage has changed fail their own task; others are given."""

from __future__ import annotations

from holdfast import store as stores
from holdfast.clock import SimClock
from holdfast.config import BLOB_THRESHOLD_BYTES
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.tasks import coordinator
from holdfast.tasks.coordinator import New
from holdfast.tasks.rows import Spec

MODULES = ("holdfast.tasks.giving",)


def test_a_task_whose_arguments_are_damaged_keeps_no_other_back() -> None:
    with stores.open("memory:", clock=SimClock()) as store:
        large = b"x" * (BLOB_THRESHOLD_BYTES + 1)
        store.transact(coordinator.submit, "bank", Spec("double"), [New(large), New(b"\x90")])

        def damage(txn: Txn) -> None:
            prefix = schema.prefix(schema.Space.BLOB, "data")
            [(key, data)] = txn.scan(prefix, tuples.after(prefix), 2)
            txn.put(key, b"y" + data[1:])

        store.transact(damage)
        grants = store.transact(coordinator.lease, "bank", "worker", ["default"], 10)
        assert sorted(one.args for one in grants.grants) == [b"", b"\x90"]
