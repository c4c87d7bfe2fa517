"""The rebuild of derived rows of a universe from their sources, with exclusive access to the store.

    catalog      names and counters, from the world records
    assignment   the index by worker, from the assignments; hints, from the inboxes
    lease        fences and the index by worker, from the lease log
    authority    the lease of the universe, from its log
    effect       the index of tags, from the effects
    queue        indexes, from items, claims and dead letters; counters, from the indexes
    dispatch     indexes and counters, from the requests
    task         statuses, from the task log; wait states and keys, from bodies and statuses; counters
    flow         heads, from the records; indexes, keys, timers, published values and counters, from heads and records
    statistic    error groups, from failed tasks and flows and dead letters; ends per minute, from tasks and flows
    schedule     the due index, the queue of occurrences, its counter and the keys, from schedules and occurrences

The rebuild holds an exclusive lock on the store (`store.admin.raw_access`). It verifies the logs first and
raises `LogBroken` for a damaged one. It builds the rows in memory and verifies them there. If a difference
remains, it raises `NotRebuilt`. Both errors leave the store unchanged. Otherwise one commit writes all rows.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import NamedTuple

from msgspec.structs import replace

from holdfast import codec
from holdfast.config import WriterLimits
from holdfast.durable import consistency as durable_consistency
from holdfast.durable import inbox, item, journal
from holdfast.durable import lease as leases
from holdfast.durable.difference import Difference
from holdfast.effects import daily_costs
from holdfast.errors import NotFound, StoreCorrupt
from holdfast.flows import derived_rows
from holdfast.flows.model import FlowId
from holdfast.leadership import leader_lease
from holdfast.ledger import stage_costs
from holdfast.ops import (
    catalog_queries,
    decode_errors,
    ended_count_check,
    error_group_check,
    index_rebuild,
    limit_check,
    store_copy,
    verify,
)
from holdfast.store import schema, tuples
from holdfast.store.admin import raw_access
from holdfast.store.prefix_scan import iter_names, iter_rows
from holdfast.store.schema import Space
from holdfast.store.txn import ApplyTxn
from holdfast.tasks import consistency as task_consistency
from holdfast.tasks import model as task_rows
from holdfast.tasks import replay_check
from holdfast.tasks.row_ranges import SEQ_END, range_lease_statuses
from holdfast.tasks.states import TaskState
from holdfast.world import catalog
from holdfast.world import consistency as world_consistency
from holdfast.world.catalog import WorldStatus, subject_of
from holdfast.world.code_requirement import CodeRequirement

SHOWN_MAX = 5
# How long to wait for the writer process to exit, beyond its idle timeout.
GRACE_S = 5.0


class LogBroken(StoreCorrupt):
    code = "log_broken"
    hint = "rows cannot be rebuilt from a log that fails verification: restore a backup"


class NotRebuilt(StoreCorrupt):
    code = "not_rebuilt"
    hint = "no log contains these rows, and nothing was written: restore a backup"


class RebuildResult(NamedTuple):
    """The differences before the rebuild, the number of changed rows, and whether they were written."""

    differences: list[Difference]
    rows: int
    written: bool


def rebuild(url: str, universe: str, *, dry_run: bool = False) -> RebuildResult:
    """Rebuild the derived rows of a universe. Raise StoreBusy while another process has the store open."""
    lock_wait_s = WriterLimits().idle_exit_s + GRACE_S
    with contextlib.closing(raw_access.open_source(url, lock_wait_s=lock_wait_s)) as store:
        if not dry_run:
            store_copy.require_no_leases(store)
        meta = store.meta()
        if meta is None:
            raise NotFound(what="store", url=url)
        with store.open_rows() as base:
            txn = ApplyTxn(base, now_ns=store.now_ns(), generation=meta.generation)
            if universe not in _universes(txn):
                raise NotFound(what="universe", universe=universe)
            _verify_logs(txn, universe)
            before = _differences(txn, universe)
            if before:
                _build_rows(txn, universe, len(before))
            else:
                _backfill(txn, universe)
            remaining = _differences(txn, universe)
            if remaining:
                shown = [
                    "{kind} {where}: {what}".format(**difference.document())
                    for difference in remaining[:SHOWN_MAX]
                ]
                raise NotRebuilt(universe=universe, differences=len(remaining), first=shown)
            changes = {key: row for key, row in txn.writes.items() if base.get(key) != row}
        if changes and not dry_run:
            store.apply_changes(changes)
        return RebuildResult(before, len(changes), bool(changes) and not dry_run)


# -- inside --------------------------------------------------------------------------------------


def _universes(txn: ApplyTxn) -> set[str]:
    spaces = (Space.TASK, Space.FLOW, Space.SCHEDULE)
    return {
        *catalog_queries.universes(txn),
        *(name for space in spaces for name in iter_names(txn, (int(space),))),
    }


def _verify_logs(txn: ApplyTxn, universe: str) -> None:
    for log, subject in (
        ("authority", leader_lease.resource(universe)),
        ("tasks", task_rows.keys_of(universe).subject),
    ):
        try:
            journal.verify(txn, subject)
        except StoreCorrupt as error:
            raise LogBroken(**{**error.fields, "log": log}) from None
        except codec.DECODE_ERRORS as error:
            raise LogBroken(log=log, subject=subject, why=str(error)) from None
    replay = replay_check.LogReplay(txn, universe)
    for difference in replay.run():
        raise LogBroken(
            log="tasks", height=difference.height, why=f"{difference.what}: {difference.found}"
        )
    for flow in derived_rows.load_flows(txn, universe).flows.values():
        for why in index_rebuild.broken_records(flow):
            raise LogBroken(log="flows", flow=str(FlowId(flow.body.generation, flow.seq)), why=why)


def _differences(txn: ApplyTxn, universe: str) -> list[Difference]:
    differences = verify.find_differences(txn)
    prefixes = (universe, f"{universe}/")
    return [
        difference
        for difference in differences
        if difference.where == prefixes[0] or difference.where.startswith(prefixes[1])
    ]


def _build_rows(txn: ApplyTxn, universe: str, differences: int) -> None:
    try:
        for part in (
            _catalog,
            _assignments,
            _leases,
            _queues,
            index_rebuild.rebuild_effect_tags,
            index_rebuild.rebuild_dispatches,
            _tasks,
            index_rebuild.rebuild_flows,
            index_rebuild.rebuild_schedules,
            limit_check.rebuild,
            error_group_check.rebuild,
            ended_count_check.rebuild,
            daily_costs.rebuild,
            stage_costs.rebuild,
        ):
            part(txn, universe)
    except decode_errors.DECODE_ERRORS as error:
        first = [decode_errors.error_text(error)]
        raise NotRebuilt(universe=universe, differences=differences, first=first) from None


def _backfill(txn: ApplyTxn, universe: str) -> None:
    """Write the rows that older versions did not have. Verify accepts that they are missing."""
    index_rebuild.rebuild_effect_tags(txn, universe)
    index_rebuild.rebuild_flow_names(txn, universe)
    index_rebuild.rebuild_task_list(txn, universe)
    error_group_check.rebuild(txn, universe)


def _catalog(txn: ApplyTxn, universe: str) -> None:
    names: dict[bytes, bytes] = {}
    counted: Counter[str] = Counter()
    for record in world_consistency.iter_records(txn, universe):
        counted[record.status.value] += 1
        if record.status is not WorldStatus.DELETED:
            key = schema.key_prefix(Space.WORLD, universe, "n", record.type, record.name)
            names[key] = record.world_id.encode()
    index_rebuild.replace_rows(txn, schema.key_prefix(Space.WORLD, universe, "n"), names)
    for status in WorldStatus:
        key = schema.key_prefix(Space.WORLD, universe, "c", status.value)
        if txn.count(key) != counted[status.value]:
            txn.put(key, schema.encode_int(counted[status.value]))


def _assignments(txn: ApplyTxn, universe: str) -> None:
    index: dict[bytes, bytes] = {}
    for record in world_consistency.iter_records(txn, universe):
        assignment = catalog.find_assignment(txn, universe, record.world_id)
        if assignment is not None:
            worker = assignment.desired_worker_id or ""
            index[schema.key_prefix(Space.WORLD, universe, "b", worker, record.world_id)] = b""
        deleted = record.status is WorldStatus.DELETED
        if deleted or not inbox.depth(txn, subject_of(universe, record.world_id)):
            continue
        stopped = record.unknown
        if stopped is not None and stopped.waits:
            # The world waits for a worker that can handle its next item, and is indexed by that need.
            need = CodeRequirement(record.type, stopped.side, stopped.type, stopped.version)
            listed = stopped.row_key(universe, record.type, record.world_id)
            txn.put(listed, codec.pack(need))
        else:
            catalog.mark_runnable(txn, universe, record.world_id)
    index_rebuild.replace_rows(txn, schema.key_prefix(Space.WORLD, universe, "b"), index)


def _leases(txn: ApplyTxn, universe: str) -> None:
    prefix = f"{universe}/"
    for resource, logged in durable_consistency.logged_leases(txn).items():
        if not resource.startswith(prefix):
            continue
        fence, expiry = (
            schema.key_prefix(Space.LEASE, kind, resource) for kind in ("fence", "expiry")
        )
        stored = txn.get(fence)
        if stored is None and logged.fence.state is leases.LeaseState.FREE:
            continue
        if stored is None or codec.unpack_as(leases.LeaseFence, stored) != logged.fence:
            txn.put(fence, codec.pack(logged.fence))
            txn.put(expiry, schema.encode_int(logged.expires_ns))
    right = {
        (fence.worker, resource)
        for resource, fence in durable_consistency.iter_fences(txn)
        if fence.state is leases.LeaseState.HELD
    }
    for worker, resource in (
        durable_consistency.worker_pairs(txn, schema.key_prefix(Space.LEASE, "by")) | right
    ):
        if resource.startswith(prefix):
            key = schema.key_prefix(Space.LEASE, "by", worker, resource)
            if (worker, resource) in right:
                txn.put(key, b"")
            else:
                txn.delete(key)


def _queues(txn: ApplyTxn, universe: str) -> None:
    for name in iter_names(txn, (int(Space.QUEUE),)):
        if not name.startswith(f"{universe}/"):
            continue
        index_rebuild.rebuild_queue(txn, name)
        keys = item.keys_of(name)
        ready, delayed, claimed, dead = (
            sum(1 for _ in iter_rows(txn, prefix))
            for prefix in (keys.ready, keys.delayed, keys.by_expiry, keys.dead)
        )
        counts = item.counts_of(txn, keys)
        right = replace(counts, ready=ready, delayed=delayed, claimed=claimed, dead=dead)
        if right != counts:
            txn.put(keys.counts, codec.pack(right))


def _tasks(txn: ApplyTxn, universe: str) -> None:
    keys = task_rows.keys_of(universe)
    replay = replay_check.LogReplay(txn, universe)
    for _ in replay.run():
        pass
    leased = range_lease_statuses(txn, keys, 0, SEQ_END)
    for key, _ in list(iter_rows(txn, keys.bodies)):
        packed = key[len(keys.bodies) :]
        replayed = replay.tasks.get(task_rows.unpack_seq(packed))
        row = txn.get(keys.statuses + packed)
        seq = task_rows.unpack_seq(packed)
        status = (
            leased.get(seq, task_rows.NEW_STATUS) if row is None else task_rows.decode_status(row)
        )
        if replayed is None:
            continue
        if row is None and replayed.state == TaskState.COMPLETED:
            # The result was in the lost status row and cannot be restored.
            continue
        fields = {name: getattr(replayed, name) for name in replay_check.LOGGED_FIELDS}
        right = replace(status, **fields)
        if right != status:
            txn.put(keys.statuses + packed, codec.pack(right))
    index_rebuild.rebuild_wait_states(txn, universe)
    index_rebuild.rebuild_keys(txn, universe)
    index_rebuild.rebuild_tags(txn, universe)
    index_rebuild.rebuild_task_list(txn, universe)
    _task_counts(txn, universe)


def _task_counts(txn: ApplyTxn, universe: str) -> None:
    keys = task_rows.keys_of(universe)
    counted, running = task_consistency.count_tasks(txn, keys)
    queues = {str(tuples.unpack(key)[-1]) for key, _ in iter_rows(txn, keys.counts)}
    for queue in queues | set(counted):
        right = task_rows.TaskCounts(
            **{name: counted[queue][name] for name in task_rows.TaskCounts.__struct_fields__}
        )
        if task_rows.get_counts(txn, keys, queue) != right:
            txn.put(keys.counts + task_rows.pack_text(queue), codec.pack(right))
    stored_pairs = durable_consistency.worker_pairs(txn, keys.leased_per_limit)
    for pair in {*stored_pairs, *running}:
        key = keys.leased_per_limit + tuples.pack(pair)
        if txn.count(key) != running[pair]:
            txn.put(key, schema.encode_int(running[pair]))
