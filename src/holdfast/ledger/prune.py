"""Deletion of runs: which runs of a store may go, and their removal in bounded steps.

- The newest `keep` runs of each name stay, and so does every run that one of them needs: its base, back to the run
  whose rows the output has, the run that holds its input, and the run that it retries.
- A run that is pinned holds outcomes of a run that stays. Its outcomes stay, its input goes: a name whose input
  grows every day would otherwise keep every input.
- The run that a name leads to stays while it is at work or can be resumed. An older run of the name can
  never be resumed, whatever its status says: a driver that died left it so.
- A deletion takes many transactions. A crash in between leaves a run that is marked; the next prune
  removes the rest of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from holdfast.clock import SYSTEM, S
from holdfast.durable import lease
from holdfast.errors import Fenced, Held, Invalid
from holdfast.ledger import runs
from holdfast.ledger.lease_renewal import renewed
from holdfast.ledger.runs import RunRecord
from holdfast.store.api import Store, Txn

KEEP = 3
# Rows that one transaction removes at most: a block has megabytes.
ROWS_MAX = 100
LEASE_NS = 30 * S
LEAVE_NS = 20 * S
LOOK_S = 0.05


class Verdict(NamedTuple):
    """A run, and why it stays; it goes when there is no reason."""

    record: RunRecord
    reason: str

    @property
    def goes(self) -> bool:
        return not self.reason


def judge(
    records: Sequence[RunRecord],
    *,
    keep: int = KEEP,
    before_ns: int | None = None,
    live: frozenset[str] = frozenset(),
) -> list[Verdict]:
    """What happens to each run, newest first. `live`: names whose lease a driver holds.

    With `before_ns` only runs that ended before it go.
    """
    newest = sorted(records, key=lambda record: (record.created_ns, record.run_id), reverse=True)
    seen: dict[str, int] = {}
    needed: dict[str, str] = {}
    # Runs whose rows are shown as those of one run with the run that retries them.
    chained: set[str] = set()
    bases: set[str] = set()
    verdicts = []
    for record in newest:
        rank = seen[record.name] = seen.get(record.name, 0) + 1
        own = "" if record.deleting else _reason(record, rank, keep, before_ns, live)
        reason = needed.get(record.run_id, "") or own
        if reason:
            for other in (record.retry_of, record.input_run):
                needed.setdefault(other, f"run {record.run_id} needs it")
            # What a run took over from others is pinned. Its base is compared with it, and the output is followed
            # from the last run that has written it.
            if own or record.run_id in chained or (record.run_id in bases and not _owns(record)):
                needed.setdefault(record.base_run, f"run {record.run_id} needs it")
                bases.add(record.base_run)
            if own or record.run_id in chained:
                chained.add(record.retry_of)
        verdicts.append(Verdict(record, reason))
    return verdicts


def _owns(record: RunRecord) -> bool:
    """Whether the output has the rows of this run, as far as the record tells."""
    by_service = record.sink.get("kind", "") in ("", "parquet", "delta", "iceberg")
    return record.status is runs.Status.FINISHED and (by_service or runs.WRITTEN in record.config)


def _reason(
    record: RunRecord, rank: int, keep: int, before_ns: int | None, live: frozenset[str]
) -> str:
    if rank == 1 and record.name in live:
        return "a driver is at work on it"
    if rank == 1 and record.status in runs.GOING:
        return "it can be resumed"
    if rank <= keep:
        return f"one of the newest {keep}"
    if before_ns is not None and (record.finished_ns or record.created_ns) >= before_ns:
        return "younger than the bound"
    return ""


def all_records(store: Store) -> list[RunRecord]:
    found: list[RunRecord] = []
    while page := store.read(runs.runs, found[-1].run_id if found else ""):
        found += page
    return found


def live_names(txn: Txn, names: Sequence[str]) -> frozenset[str]:
    """Those names whose run a driver holds."""
    found = []
    for name in names:
        held = lease.current(txn, runs.lease_resource(name))
        if held is not None and held.live(txn.now_ns, txn.generation):
            found.append(name)
    return frozenset(found)


class Objects(Protocol):
    """What runs keep outside of the store: in their spools."""

    def reach(self, record: RunRecord) -> None:
        """`SpoolKept` if objects of this run cannot be deleted from here; nothing is touched yet."""

    def delete(self, record: RunRecord) -> None:
        """Delete all of them; `SpoolKept` if that is refused."""

    def delete_input(self, record: RunRecord) -> None:
        """Delete the objects of its input; `SpoolKept` if that is refused."""

    def sweep(self, store: Store, records: Sequence[RunRecord]) -> None:
        """Delete what none of these runs, and no run that was deleted, needs."""


class SpoolKept(Invalid):
    code = "spool_kept"
    hint = "install holdfast[spark] and give credentials in the environment; the run is kept"


def delete(store: Store, name: str, run_ids: Sequence[str], objects: Objects | None = None) -> int:
    """Remove these runs of a name, all of their rows; how many rows. The deletion holds the lease of the
    name, so no driver begins meanwhile. `RunPinned`: a run that stays rests on one of them. The objects of a
    run with a spool go first, by `objects`."""
    held = _acquired(store, name)
    renewed_ns = SYSTEM.mono_ns()
    removed = 0
    try:
        for run_id in run_ids:
            _delete_objects(store, held, name, run_id, objects)
            while step := store.transact(_step, held, name, run_id):
                removed += step
                if SYSTEM.mono_ns() - renewed_ns > LEASE_NS // 3:
                    renewed_ns = SYSTEM.mono_ns()
                    held = store.transact(lease.renew, [held], LEASE_NS)[0] or held
    finally:
        with contextlib.suppress(Fenced):
            store.transact(lease.release, held)
    return removed


def drop_input(store: Store, name: str, run_id: str, objects: Objects | None = None) -> bool:
    """Remove the input of a run whose outcomes others rest on. The record says so first. False: the run can be
    resumed, or is none of this name."""
    held = _acquired(store, name)
    try:
        record, newest = store.read(runs.get, run_id), store.read(runs.latest, name)
        if record is None or record.name != name:
            return False
        if record.status in runs.GOING and newest is not None and newest.run_id == run_id:
            return False
        others = store.read(runs.of_name, name)
        if any(one.input_run == run_id and not one.input_dropped for one in others):
            return False  # its blocks are the input of another run, too
        if record.spool and objects is None:
            raise SpoolKept(run=run_id, spool=record.spool)
        while store.transact(_input_step, held, run_id):
            held = store.transact(lease.renew, [held], LEASE_NS)[0] or held
        if record.spool and objects is not None:
            with renewed(store, held, LEASE_NS):
                objects.delete_input(record)
    finally:
        with contextlib.suppress(Fenced):
            store.transact(lease.release, held)
    return True


def _input_step(txn: Txn, held: lease.Lease, run_id: str) -> int:
    txn.require_live(held)
    return runs.drop_input(txn, run_id, ROWS_MAX)


def prune(
    store: Store, name: str, run_ids: Sequence[str], objects: Objects | None = None
) -> dict[str, str]:
    """Delete runs of a name; why those stayed that could not be deleted. Of a run that others rest on the input
    goes."""
    stayed: dict[str, str] = {}
    for run_id in run_ids:
        try:
            delete(store, name, [run_id], objects)
        except SpoolKept as kept:
            stayed[run_id] = str(kept)
        except runs.RunAtWork:
            stayed[run_id] = "a driver is at work on it"
        except runs.RunPinned as pinned:
            stayed[run_id] = f"rows of run {pinned.by} rest on it"
            with contextlib.suppress(SpoolKept, runs.RunAtWork):
                if drop_input(store, name, run_id, objects):
                    stayed[run_id] += "; its input is deleted"
    return stayed


def retain(store: Store, name: str, keep: int, objects: Objects | None = None) -> dict[str, str]:
    """Delete all but the newest `keep` runs of a name and what these need; why others stayed. The ledger service of a
    run that has just ended is waited for."""
    until_ns = SYSTEM.mono_ns() + LEAVE_NS
    while store.read(live_names, [name]) and SYSTEM.mono_ns() < until_ns:
        SYSTEM.sleep(LOOK_S)
    verdicts = judge(store.read(runs.of_name, name), keep=keep)
    return prune(store, name, [one.record.run_id for one in verdicts if one.goes], objects)


def _delete_objects(
    store: Store, held: lease.Lease, name: str, run_id: str, objects: Objects | None
) -> None:
    """Mark a run before its objects are deleted, so that no driver resumes it with half of them."""
    record = store.read(runs.get, run_id)
    if record is None or record.name != name or not record.spool:
        return
    if objects is None:
        raise SpoolKept(run=run_id, spool=record.spool)
    if not record.deleting:
        objects.reach(record)
    if store.transact(_marked, held, run_id) is not None:
        with renewed(store, held, LEASE_NS):
            objects.delete(record)


def _marked(txn: Txn, held: lease.Lease, run_id: str) -> RunRecord | None:
    txn.require_live(held)
    return runs.mark_deleting(txn, run_id, resumable=True)


def _acquired(store: Store, name: str) -> lease.Lease:
    incarnation = SYSTEM.entropy(8).hex()
    try:
        found: lease.Lease = store.transact(
            lease.acquire, runs.lease_resource(name), f"prune-{incarnation}", incarnation, LEASE_NS
        )
    except Held as other:
        raise runs.RunAtWork(name=name, worker=other.worker) from None
    return found


def _step(txn: Txn, held: lease.Lease, name: str, run_id: str) -> int:
    txn.require_live(held)
    record = runs.get(txn, run_id)
    if record is None or record.name != name:
        return 0
    return runs.delete(txn, run_id, ROWS_MAX, resumable=True)
