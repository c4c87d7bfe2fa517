"""Transactions of the ledger service on its run's record and blocks, each under the run's lease."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from holdfast.durable.lease import Lease
from holdfast.ledger import runs
from holdfast.store.api import Txn


def moved(
    txn: Txn, lease: Lease, run_id: str, event: runs.Event, changes: dict[str, Any]
) -> runs.RunRecord:
    """Change the run's status. A run that is sealed supersedes the one whose rows it takes over."""
    txn.require_live(lease)
    now = runs.move(txn, run_id, event, **changes)
    if event is runs.Event.SEAL and now.base_run:
        base = runs.get(txn, now.base_run)
        if base is not None and base.status in (runs.Status.OPEN, runs.Status.CANCELLING):
            runs.move(txn, base.run_id, runs.Event.SUPERSEDE)
    return now


def changed(txn: Txn, lease: Lease, run_id: str, changes: dict[str, Any]) -> runs.RunRecord:
    """Change fields of the run's record; its status stays."""
    txn.require_live(lease)
    record = replace(runs.the(txn, run_id), **changes)
    runs.put(txn, record)
    return record


def without_blocks(txn: Txn, lease: Lease, run_id: str, numbers: list[int]) -> None:
    """Remove input blocks."""
    txn.require_live(lease)
    for n in numbers:
        txn.delete(runs.block_key(run_id, n))
