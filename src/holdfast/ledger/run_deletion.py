"""Run deletion: the retention policy of a store's runs and their removal in bounded steps.

- The newest `keep` runs of each name are kept. So is every run that one of them needs: its base
  runs back to the run whose rows are in the output, the run that holds its input, and the run that
  it retries.
- A pinned run holds outcomes of a kept run. Its outcomes stay and its input is deleted. Otherwise a
  name whose input grows every day would keep every input.
- The latest run of a name is kept while it is active or resumable. An older run of the name is
  never resumable, with any status: its driver died.
- A deletion takes many transactions. After a crash the run is marked as deleting, and the next
  prune removes the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from holdfast.clock import SYSTEM, S
from holdfast.durable import lease
from holdfast.errors import Fenced, Held, Invalid
from holdfast.ledger import runs, stage_costs
from holdfast.ledger.lease_renewal import renew_in_background
from holdfast.ledger.runs import RunRecord
from holdfast.store.api import Store, Txn

KEEP_DEFAULT = 3
# Maximum rows that one transaction removes: a block has megabytes.
DELETE_ROWS_MAX = 100
LEASE_NS = 30 * S
SERVICE_EXIT_WAIT_NS = 20 * S
POLL_S = 0.05


class RetentionVerdict(NamedTuple):
    """A run and the reason to keep it. An empty reason means that it can be deleted."""

    record: RunRecord
    reason: str

    @property
    def is_deletable(self) -> bool:
        return not self.reason


def plan_retention(
    records: Sequence[RunRecord],
    *,
    keep: int = KEEP_DEFAULT,
    before_ns: int | None = None,
    live: frozenset[str] = frozenset(),
) -> list[RetentionVerdict]:
    """Decide for each run, newest first, whether to keep it. `live`: names whose lease a driver
    holds.

    With `before_ns` only runs that ended before it are deletable.
    """
    newest = sorted(records, key=lambda record: (record.created_ns, record.run_id), reverse=True)
    seen: dict[str, int] = {}
    needed: dict[str, str] = {}
    # Runs whose rows appear together with the run that retries them.
    retry_chain_runs: set[str] = set()
    bases: set[str] = set()
    verdicts = []
    for record in newest:
        rank = seen[record.name] = seen.get(record.name, 0) + 1
        keep_reason = "" if record.deleting else _keep_reason(record, rank, keep, before_ns, live)
        reason = needed.get(record.run_id, "") or keep_reason
        if reason:
            for other in (record.retry_of, record.input_run):
                needed.setdefault(other, f"run {record.run_id} needs it")
            # Adopted outcomes are protected by pins. The base is needed for comparison, and the
            # output is followed back to the last run that wrote it.
            if (
                keep_reason
                or record.run_id in retry_chain_runs
                or (record.run_id in bases and not _wrote_output(record))
            ):
                needed.setdefault(record.base_run, f"run {record.run_id} needs it")
                bases.add(record.base_run)
            if keep_reason or record.run_id in retry_chain_runs:
                retry_chain_runs.add(record.retry_of)
        verdicts.append(RetentionVerdict(record, reason))
    return verdicts


def _wrote_output(record: RunRecord) -> bool:
    """Return whether the output holds the rows of this run. The run record is the evidence."""
    by_service = record.sink.get("kind", "") in ("", "parquet", "delta", "iceberg")
    return record.status is runs.RunLifecycle.FINISHED and (
        by_service or runs.WRITTEN_KEY in record.config
    )


def _keep_reason(
    record: RunRecord, rank: int, keep: int, before_ns: int | None, live: frozenset[str]
) -> str:
    if rank == 1 and record.name in live:
        return "a driver runs it"
    if rank == 1 and record.status in runs.UNFINISHED:
        return "it can be resumed"
    if rank <= keep:
        return f"it is one of the newest {keep} runs"
    if before_ns is not None and (record.finished_ns or record.created_ns) >= before_ns:
        return "it is younger than the age limit"
    return ""


def all_records(store: Store) -> list[RunRecord]:
    records: list[RunRecord] = []
    while page := store.read(runs.list_runs, records[-1].run_id if records else ""):
        records += page
    return records


def live_names(txn: Txn, names: Sequence[str]) -> frozenset[str]:
    """Return the names whose run lease a driver holds."""
    live = []
    for name in names:
        run_lease = lease.current_status(txn, runs.lease_resource(name))
        if run_lease is not None and run_lease.is_live(txn.now_ns, txn.generation):
            live.append(name)
    return frozenset(live)


class RunObjects(Protocol):
    """The objects of runs outside the store: their spools."""

    def reach(self, record: RunRecord) -> None:
        """Raise `SpoolKept` if the objects of this run cannot be deleted from here. Deletes
        nothing.
        """

    def delete(self, record: RunRecord) -> None:
        """Delete all objects of the run. Raises `SpoolKept` if the spool refuses."""

    def delete_input(self, record: RunRecord) -> None:
        """Delete the objects of the run's input. Raises `SpoolKept` if the spool refuses."""

    def sweep(self, store: Store, records: Sequence[RunRecord]) -> None:
        """Delete unreferenced objects of these runs and late objects of deleted runs."""


class SpoolKept(Invalid):
    code = "spool_kept"
    hint = "the run is kept; install holdfast[spark] and set the spool's credentials in the environment"


def delete_runs(
    store: Store, name: str, run_ids: Sequence[str], objects: RunObjects | None = None
) -> int:
    """Delete these runs of a name with all their rows and return the number of rows. The function
    holds the lease of the name, so no driver can start. `RunPinned`: a kept run depends on one of
    them. `objects` first deletes the spool objects of a run.
    """
    run_lease = _acquire_lease(store, name)
    renewed_ns = SYSTEM.mono_ns()
    removed = 0
    try:
        for run_id in run_ids:
            _delete_objects(store, run_lease, name, run_id, objects)
            while step := store.transact(_delete_step, run_lease, name, run_id):
                removed += step
                if SYSTEM.mono_ns() - renewed_ns > LEASE_NS // 3:
                    renewed_ns = SYSTEM.mono_ns()
                    run_lease = store.transact(lease.renew, [run_lease], LEASE_NS)[0] or run_lease
    finally:
        with contextlib.suppress(Fenced):
            store.transact(lease.release, run_lease)
    return removed


def drop_run_input(store: Store, name: str, run_id: str, objects: RunObjects | None = None) -> bool:
    """Delete the input of a run whose outcomes other runs use. The record is marked first. Returns
    False if the run is resumable or belongs to another name.
    """
    run_lease = _acquire_lease(store, name)
    try:
        record, newest = store.read(runs.get_record, run_id), store.read(runs.get_latest, name)
        if record is None or record.name != name:
            return False
        if record.status in runs.UNFINISHED and newest is not None and newest.run_id == run_id:
            return False
        others = store.read(runs.list_runs_of, name)
        if any(one.input_run == run_id and not one.input_dropped for one in others):
            return False  # its blocks are also the input of another run
        if record.spool and objects is None:
            raise SpoolKept(run=run_id, spool=record.spool)
        while store.transact(_drop_input_step, run_lease, run_id):
            run_lease = store.transact(lease.renew, [run_lease], LEASE_NS)[0] or run_lease
        if record.spool and objects is not None:
            with renew_in_background(store, run_lease, LEASE_NS):
                objects.delete_input(record)
    finally:
        with contextlib.suppress(Fenced):
            store.transact(lease.release, run_lease)
    return True


def _drop_input_step(txn: Txn, run_lease: lease.Lease, run_id: str) -> int:
    txn.require_live(run_lease)
    return runs.delete_input(txn, run_id, DELETE_ROWS_MAX)


def delete_or_drop_input(
    store: Store, name: str, run_ids: Sequence[str], objects: RunObjects | None = None
) -> dict[str, str]:
    """Delete runs of a name; return the reason for each run that was kept. A pinned run loses its
    input.
    """
    kept: dict[str, str] = {}
    for run_id in run_ids:
        try:
            delete_runs(store, name, [run_id], objects)
        except SpoolKept as error:
            kept[run_id] = str(error)
        except runs.RunAtWork:
            kept[run_id] = "a driver runs it"
        except runs.RunPinned as pinned:
            kept[run_id] = f"rows of run {pinned.by} rest on it"
            with contextlib.suppress(SpoolKept, runs.RunAtWork):
                if drop_run_input(store, name, run_id, objects):
                    kept[run_id] += "; its input is deleted"
    return kept


def keep_newest(
    store: Store, name: str, keep: int, objects: RunObjects | None = None
) -> dict[str, str]:
    """Delete all but the newest `keep` runs of a name and the runs that they need; return why
    others were kept. Waits for the ledger service of a run that has just ended.
    """
    until_ns = SYSTEM.mono_ns() + SERVICE_EXIT_WAIT_NS
    while store.read(live_names, [name]) and SYSTEM.mono_ns() < until_ns:
        SYSTEM.sleep(POLL_S)
    verdicts = plan_retention(store.read(runs.list_runs_of, name), keep=keep)
    return delete_or_drop_input(
        store, name, [one.record.run_id for one in verdicts if one.is_deletable], objects
    )


def _delete_objects(
    store: Store, run_lease: lease.Lease, name: str, run_id: str, objects: RunObjects | None
) -> None:
    """Mark a run as deleting before its objects are removed, so that no driver resumes it half
    deleted.
    """
    record = store.read(runs.get_record, run_id)
    if record is None or record.name != name or not record.spool:
        return
    if objects is None:
        raise SpoolKept(run=run_id, spool=record.spool)
    if not record.deleting:
        objects.reach(record)
    if store.transact(_mark_deleting, run_lease, run_id) is not None:
        with renew_in_background(store, run_lease, LEASE_NS):
            objects.delete(record)


def _mark_deleting(txn: Txn, run_lease: lease.Lease, run_id: str) -> RunRecord | None:
    txn.require_live(run_lease)
    return runs.mark_deleting(txn, run_id, resumable=True)


def _acquire_lease(store: Store, name: str) -> lease.Lease:
    incarnation = SYSTEM.entropy(8).hex()
    try:
        run_lease: lease.Lease = store.transact(
            lease.acquire, runs.lease_resource(name), f"prune-{incarnation}", incarnation, LEASE_NS
        )
    except Held as other:
        raise runs.RunAtWork(name=name, worker=other.worker) from None
    return run_lease


def _delete_step(txn: Txn, run_lease: lease.Lease, name: str, run_id: str) -> int:
    txn.require_live(run_lease)
    record = runs.get_record(txn, run_id)
    if record is None or record.name != name:
        return 0
    progress = runs.get_progress(txn, run_id)
    removed = runs.delete_rows(txn, run_id, DELETE_ROWS_MAX, resumable=True)
    if progress is not None and runs.get_progress(txn, run_id) is None:
        stage_costs.forget_run(txn, name, progress)
    return removed
