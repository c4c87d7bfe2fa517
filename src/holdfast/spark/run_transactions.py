"""Transactions of the ledger service on its run's record and input blocks, each under the run's
lease.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from holdfast.durable.lease import Lease
from holdfast.ledger import runs
from holdfast.store.api import Txn


def change_status(
    txn: Txn, lease: Lease, run_id: str, event: runs.RunEvent, changes: dict[str, Any]
) -> runs.RunRecord:
    """Change the run's status. Sealing a run supersedes the unfinished base run that it adopts
    from.
    """
    txn.require_live(lease)
    after = runs.change_status(txn, run_id, event, **changes)
    if event is runs.RunEvent.SEAL and after.base_run:
        base = runs.get_record(txn, after.base_run)
        if base is not None and base.status in (
            runs.RunLifecycle.OPEN,
            runs.RunLifecycle.CANCELLING,
        ):
            runs.change_status(txn, base.run_id, runs.RunEvent.SUPERSEDE)
    return after


def change_fields(txn: Txn, lease: Lease, run_id: str, changes: dict[str, Any]) -> runs.RunRecord:
    """Change fields of the run's record other than its status."""
    txn.require_live(lease)
    record = replace(runs.get_existing(txn, run_id), **changes)
    runs.put_record(txn, record)
    return record


def delete_blocks(txn: Txn, lease: Lease, run_id: str, numbers: list[int]) -> None:
    """Delete input blocks."""
    txn.require_live(lease)
    for n in numbers:
        txn.delete(runs.block_key(run_id, n))
