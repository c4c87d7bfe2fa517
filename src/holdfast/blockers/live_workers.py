"""The live workers of a role, and the sentence about what their code declares."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.leadership import declarations, worker_registry
from holdfast.leadership.declarations import Declaration
from holdfast.leadership.worker_registry import WorkerRecord
from holdfast.store.api import Txn

# Workers that one answer reads.
WORKERS_MAX = 1_000


def is_live(txn: Txn, record: WorkerRecord) -> bool:
    return txn.now_ns < record.heartbeat_ns + worker_registry.TTL_NS


def list_live(txn: Txn, universe: str, role: str) -> list[WorkerRecord]:
    """Return the workers of a role with a recent heartbeat."""
    records = worker_registry.list_registered(txn, universe, "", WORKERS_MAX)
    return [record for record in records if role in record.roles and is_live(txn, record)]


def codes_of(txn: Txn, universe: str, workers: Sequence[WorkerRecord]) -> list[Declaration | None]:
    """Return the code declarations of workers. None: not stored."""
    return [declarations.read(txn, universe, one.code) if one.code else None for one in workers]


def none_declares(count: int) -> str:
    """Format how many workers are live, none of which declares a type."""
    if count == 0:
        return "no worker live"
    if count == 1:
        return "1 worker live, it does not declare it"
    return f"{count:,} workers live, {'neither' if count == 2 else 'none'} declares it"
