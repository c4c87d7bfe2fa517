"""The deletion of old stage runs from a store: which runs a policy deletes, and their deletion. Outputs stay."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from holdfast.clock import S
from holdfast.errors import Invalid
from holdfast.ledger import run_deletion
from holdfast.ledger.runs import RunRecord
from holdfast.ops.run_documents import NoRun
from holdfast.store.api import Store

DAY_NS = 86_400 * S
NAMES_PER_READ = 100


class PruneDocument(msgspec.Struct, frozen=True):
    """A run and whether it was deleted. `why` is the reason if it stays."""

    name: str
    run_id: str
    status: str
    deleted: bool
    why: str


class RunPolicyRequest(NamedTuple):
    """Keep the newest `keep` runs of each name, and runs that ended less than `older_than_days` ago."""

    name: str | None = None
    keep: int = run_deletion.KEEP_DEFAULT
    older_than_days: float | None = None
    dry_run: bool = False


def prune_runs(store: Store, request: RunPolicyRequest) -> list[PruneDocument]:
    """Delete old runs, and return every run with its verdict."""
    days = request.older_than_days
    if request.keep < 1 or (days is not None and not days >= 0):
        raise Invalid(what="prune", why="--keep must be at least 1, --older-than at least 0")
    records = [
        record for record in run_deletion.all_records(store) if request.name in (None, record.name)
    ]
    if request.name is not None and not records:
        raise NoRun(what="run", name=request.name)
    names = sorted({record.name for record in records})
    before_ns = None if days is None else store.now_ns() - int(days * DAY_NS)
    live = frozenset(
        name
        for at in range(0, len(names), NAMES_PER_READ)
        for name in store.read(run_deletion.live_names, names[at : at + NAMES_PER_READ])
    )
    verdicts = run_deletion.plan_retention(
        records, keep=request.keep, before_ns=before_ns, live=live
    )
    deletable = [verdict.record for verdict in verdicts if verdict.is_deletable]
    stayed = {} if request.dry_run else _delete(store, names, records, deletable)
    return [
        PruneDocument(
            record.name,
            record.run_id,
            record.status.value,
            not reason and not request.dry_run and not stayed.get(record.run_id),
            reason or stayed.get(record.run_id, ""),
        )
        for record, reason in verdicts
    ]


def _delete(
    store: Store, names: list[str], records: list[RunRecord], deletable: list[RunRecord]
) -> dict[str, str]:
    """Delete runs. Return the runs that stay, by id, each with the reason."""
    stayed: dict[str, str] = {}
    objects = _spool_objects(records)
    for name in names:
        run_ids = [record.run_id for record in deletable if record.name == name]
        if run_ids:
            stayed |= run_deletion.delete_or_drop_input(store, name, run_ids, objects)
    if objects is not None:
        deleted_ids = {record.run_id for record in deletable} - stayed.keys()
        objects.sweep(store, [record for record in records if record.run_id not in deleted_ids])
    return stayed


def _spool_objects(records: list[RunRecord]) -> run_deletion.RunObjects | None:
    """Return the deleter of spool objects; None if no run has a spool, or its library is not installed."""
    if not any(record.spool for record in records):
        return None
    try:
        from holdfast.spark.spool_maintenance import SpoolDeletion
    except ImportError:
        return None
    return SpoolDeletion()
