"""Damaged argument blobs: only their own task is affected, other tasks are leased."""

from __future__ import annotations

from holdfast import store as stores
from holdfast.clock import SimClock
from holdfast.config import BLOB_THRESHOLD_BYTES
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.tasks import operations
from holdfast.tasks.model import TaskSpec
from holdfast.tasks.operations import GrantRequest, TaskToSubmit

MODULES = ("holdfast.tasks.grants",)


def test_task_with_damaged_arguments_does_not_block_other_leases() -> None:
    with stores.open("memory:", clock=SimClock()) as store:
        large = b"x" * (BLOB_THRESHOLD_BYTES + 1)
        store.transact(
            operations.submit,
            "bank",
            TaskSpec("double"),
            [TaskToSubmit(large), TaskToSubmit(b"\x90")],
        )

        def damage(txn: Txn) -> None:
            prefix = schema.key_prefix(schema.Space.BLOB, "data")
            [(key, data)] = txn.scan(prefix, tuples.prefix_end(prefix), 2)
            txn.put(key, b"y" + data[1:])

        store.transact(damage)
        grants = store.transact(operations.lease, "bank", GrantRequest("worker", ["default"], 10))
        assert sorted(grant.args for grant in grants.grants) == [b"", b"\x90"]
