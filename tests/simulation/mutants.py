"""Planted bugs (mutants): each guard of the product removed in turn. The checkers must catch every
one.

Some guards cover for each other. Where removing one guard does no harm, the pair is removed. The
mutants of worlds and hosting are in `mutants_worlds`, of effects, timers and mail in
`mutants_effects`, of fused commits in `mutants_fused_commit`, of the ledger in `mutants_ledger`, of
tasks in `mutants_tasks`, of dispatch requests in `mutants_dispatch`, of flows and schedules in
`mutants_flows`. All others are here.
`source_edits` plants them.
"""

from __future__ import annotations

from holdfast.sim.settings import HAS_LEDGER, SimulationSettings, Workload
from tests.simulation.mutants_dispatch import DISPATCH
from tests.simulation.mutants_effects import EFFECTS
from tests.simulation.mutants_flows import FLOWS
from tests.simulation.mutants_fused_commit import FUSED_COMMIT
from tests.simulation.mutants_ledger import LEDGER
from tests.simulation.mutants_tasks import TASKS
from tests.simulation.mutants_worlds import HISTORIES, VERSIONS, WORLDS
from tests.simulation.source_edits import Edit, Mutant

_guard = "store.txn:check_guard"
_live_claim_row = "durable.claim:_live_claim_row"
_FENCE = Edit(_guard, "fence != guard.fence", "False")
_GENERATION = Edit(_guard, "guard.generation != generation", "False")
_EXPIRY = Edit(_guard, "expiry is None or now_ns >= schema.decode_int(expiry)", "False")
_NUMBER = Edit(_live_claim_row, "claim_row.claims != token.number\n        or ", "")
_OWNER = Edit(_live_claim_row, "claim_row.owner != token.owner\n        or ", "")
_CLAIM_TIME = Edit(_live_claim_row, "txn.now_ns >= claim_row.expires_ns", "False")
_HEAD = Edit("durable.journal:append", "old_head.height != expected_head", "False")
_READS = Edit("store.validation:WriteSet.check", "not self.keys.isdisjoint(reads)", "False")

_PLANTED: dict[str, tuple[Edit, ...]] = {
    # leases
    "lease guard: skips the fence check": (_FENCE,),
    "lease guard: skips the expiry check": (_EXPIRY,),
    "lease guard: skips the generation check": (_GENERATION,),
    "lease guard: skips the fence and the expiry check": (_FENCE, _EXPIRY),
    "lease guard: is not checked when a commit is applied": (
        Edit("store.validation:check_guards", "in request.guards", "in ()"),
    ),
    "lease acquire: keeps the epoch of the former lease": (
        Edit("durable.lease:acquire", "status.epoch + 1", "max(status.epoch, 1)"),
    ),
    "lease acquire: replaces a live lease of another worker": (
        Edit(
            "durable.lease:acquire",
            "if status.is_live(txn.now_ns, txn.generation):",
            "if status.is_live(txn.now_ns, txn.generation) and status.worker == worker:",
        ),
    ),
    "lease acquire: returns a live lease to another incarnation of its worker": (
        Edit(
            "durable.lease:acquire",
            "(status.worker, status.incarnation) != (worker, incarnation)",
            "status.worker != worker",
        ),
    ),
    "lease acquire: does not record the expiry of the overdue lease": (
        Edit(
            "durable.lease:acquire",
            "status = _expire(txn, resource, status)",
            "status = replace(status, state=LeaseState.FREE)",
        ),
    ),
    "lease acquire: writes the former generation into the fence": (
        Edit(
            "durable.lease:acquire",
            "incarnation,\n        txn.generation,",
            "incarnation,\n        status.generation,",
        ),
    ),
    "lease status: counts a lease of a former generation as live": (
        Edit(
            "durable.lease:LeaseStatus.is_live",
            "self.generation == generation\n            and ",
            "",
        ),
    ),
    "lease renew: renews an expired lease": (
        Edit("durable.lease:renew", " or not status.is_live(txn.now_ns, txn.generation)", ""),
    ),
    "lease renew: renews without comparing the holder": (
        Edit("durable.lease:renew", " or not _matches(status, lease)", ""),
    ),
    "lease release: releases without comparing the holder": (
        Edit("durable.lease:release", " or not _matches(status, lease)", ""),
    ),
    "lease release: resets the epoch to zero": (
        Edit(
            "durable.lease:_set_free",
            "status.generation, status.epoch, 0",
            "status.generation, 0, 0",
        ),
    ),
    "lease mark stale: expires a live lease": (
        Edit("durable.lease:mark_stale", " or status.is_live(txn.now_ns, txn.generation)", ""),
    ),
    # claims
    "claim: skips the claim number check": (_NUMBER,),
    "claim: skips the claim number and the owner check": (_NUMBER, _OWNER),
    "claim: skips the expiry check": (_CLAIM_TIME,),
    "claim: keeps the number of the former claim": (
        Edit("durable.queue:claim_admitted", "item.claims + 1", "max(item.claims, 1)"),
    ),
    "claim: expires one second early": (
        Edit("durable.queue:_overdue_claims", "txn.now_ns + 1", "txn.now_ns + 1_000_000_000"),
    ),
    "claim: never expires": (Edit("durable.queue:_overdue_claims", "txn.now_ns + 1", "0"),),
    "ack: leaves the claim rows": (
        Edit(
            "durable.claim:_delete_done",
            "items.delete_claim(txn, keys, claim_row, packed_seq)",
            "pass",
        ),
    ),
    "ack: leaves the item row": (
        Edit("durable.claim:_delete_done", "txn.delete(keys.items + packed_seq)", "pass"),
    ),
    # budgets and dead letters
    "retry budget: ignores the maximum of expiries": (
        Edit("durable.queue:_expire", "after.expiries >= budget.expiries_max", "False"),
    ),
    "retry budget: does not count expiries": (
        Edit("durable.queue:_expire", "item.expiries + 1", "item.expiries"),
    ),
    "retry budget: ignores the maximum of failures": (
        Edit("durable.claim:_fail", " or failures >= budget.failures_max", ""),
    ),
    "retry budget: does not count failures": (
        Edit("durable.claim:_fail", "failures = item.failures + 1", "failures = item.failures"),
    ),
    "dead letter: leaves the item row": (
        Edit("durable.dead_letters:write_letter", "txn.delete(keys.items + packed_seq)", "pass"),
    ),
    "dead letter: drops the payload": (
        Edit("durable.dead_letters:_store_letter", "item.payload", 'b""'),
    ),
    "queue redrive: leaves the dead letter": (
        Edit("durable.dead_letters:_remove_letter", "txn.delete(keys.dead + packed_seq)", "pass"),
    ),
    "queue insert: reuses the seq of a deleted item": (
        Edit(
            "durable.item:insert",
            "last = txn.count(keys.last_seq)",
            "last = max([seq_of(v) for _, v in txn.scan(keys.items, tuples.prefix_end(keys.items))"
            " if len(v) < 10] + [tuples.unpack_last_int(k, len(keys.items)) for k, _ in"
            " txn.scan(keys.items, tuples.prefix_end(keys.items))], default=0)",
        ),
    ),
    "queue counters: are not updated": (
        Edit("durable.item:QueueCounterDelta.apply", "not any(changes.values())", "True"),
    ),
    "queue counters: count a delayed item as ready": (
        Edit(
            "durable.item:insert",
            "ItemState.DELAYED if delayed else ItemState.READY",
            "ItemState.READY",
        ),
    ),
    # timers
    "timer claim: claims by priority and seq instead of due time": (
        Edit("runner.claim_ops:claim_batch", "by_due=name == timers", "by_due=False"),
    ),
    "timer claim: leaves ready timers out of the due order": (
        Edit(
            "durable.queue:claim_admitted",
            "_move_ready_to_delayed(txn, keys, sweep, delta)",
            "pass",
        ),
    ),
    "queue insert: makes a delayed item ready at once": (
        Edit("durable.item:insert", "delayed = not_before_ns > now_ns", "delayed = False"),
    ),
    "delayed item: is promoted one second early": (
        Edit("durable.queue:_promote_due", "txn.now_ns + 1", "txn.now_ns + 1_000_000_000"),
    ),
    "delayed item: is never promoted": (Edit("durable.queue:_promote_due", "txn.now_ns + 1", "0"),),
    # inbox and keys
    "inbox put: ignores a known key": (
        Edit("durable.inbox:put_with_limits", "first_seq is not None", "False"),
    ),
    "dedupe: does not store the key": (
        Edit("durable.dedupe:remember", "txn.put(keys.records + packed", "(keys.records + packed"),
    ),
    "inbox advance: does not move the cursor": (
        Edit("durable.inbox:advance", "txn.put(keys.cursor", "(keys.cursor"),
    ),
    "inbox advance: leaves rows below the cursor": (
        Edit("durable.inbox:advance", "txn.delete(key)", "pass"),
    ),
    "inbox put: reuses the seq of a deleted row": (
        Edit(
            "store.txn:next_seq",
            "txn.count(counter) + 1",
            "1 + max([tuples.unpack_last_int(k, len(space)) for k, _ in"
            " txn.scan(space, tuples.prefix_end(space))], default=0)",
        ),
    ),
    "dedupe: accepts another body under a known key": (
        Edit("durable.dedupe:check", "record.body_hash != body_hash", "False"),
    ),
    "dedupe: expires keys before their retention ends": (
        Edit("durable.dedupe:expire", "txn.now_ns - older_than_ns", "txn.now_ns"),
    ),
    "dedupe: accepts a request older than the retained keys": (
        Edit("durable.dedupe:check", "issued_ns < floor_ns", "False"),
    ),
    # journal and snapshots
    "journal append: ignores the expected head": (_HEAD,),
    "journal truncate: removes all entries below the head": (
        Edit(
            "durable.journal:truncate",
            "old_head.floor, old_head.checkpoint, limit",
            "old_head.floor, old_head.height, limit",
        ),
    ),
    "journal truncate: removes two entries from the checkpoint on": (
        Edit(
            "durable.journal:truncate",
            "old_head.checkpoint, limit",
            "old_head.checkpoint + 2, limit",
        ),
    ),
    "journal compact: packs entries up to the head": (
        Edit(
            "durable.journal:compact",
            "lo, old_head.checkpoint, limit",
            "lo, old_head.height + 1, limit",
        ),
    ),
    "snapshot prune: removes the baseline": (
        Edit("durable.snapshot:prune", " if key not in kept_keys", ""),
    ),
    # blobs
    "blob retain: does not count a second reference": (
        Edit("store.blobs:retain", "refs.count + 1", "max(refs.count, 1)"),
    ),
    "ack: does not release the blob": (
        Edit("durable.claim:_delete_done", "if claim_row.blob:", "if False:"),
    ),
    # the engine
    "commit validation: ignores overwritten reads": (_READS,),
    "commit validation: ignores writes into read ranges": (
        Edit("store.validation:WriteSet.check", "self._sorted_keys[at] < hi", "False"),
    ),
    "commit validation: accepts a snapshot older than the known write sets": (
        Edit("store.validation:RecentCommits.check", "snapshot < self._unknown_until", "False"),
    ),
    "commit validation: ignores earlier writes of the same batch": (
        Edit("store.validation:RecentCommits.check", "if current.keys:", "if False:"),
    ),
    "commit validation: validates nothing": (
        Edit("store.validation:RecentCommits.check", "not reads and not ranges", "True"),
    ),
    "commit retry: applies a request again although its outcome is known": (
        Edit("store.engine:StoreEngine._apply", "known is not None", "False"),
    ),
    "commit retry: loads no outcomes after a takeover": (
        Edit(
            "store.engine:StoreEngine._load_outcomes",
            "self._outcomes.update(zip(names, answers, strict=True))",
            "pass",
        ),
    ),
    "store time: follows the wall clock": (
        Edit(
            "store.engine:StoreEngine.now_ns",
            "self._clock.boot_ns() + self._anchor.offset_ns",
            "self._clock.wall_ns()",
        ),
    ),
    "store time: falls below its floor after a reboot": (
        Edit("clock:anchor_at_open", "max(clock.wall_ns(), floor_ns + 1)", "clock.wall_ns()"),
    ),
    # boot
    "schema check: accepts a different marker": (
        Edit("store.engine:check_schema", "match is not schema.SchemaMatch.SAME", "False"),
    ),
    "schema check: accepts a missing marker": (
        Edit("store.engine:check_schema", "not bootstrap", "False"),
    ),
}

_LEDGER = {f"ledger {name}": edits for name, edits in LEDGER.items() if HAS_LEDGER}
_TASKS = {f"task {name}": edits for name, edits in TASKS.items()}
_DISPATCH = {f"dispatch {name}": edits for name, edits in DISPATCH.items()}

_FLOWS = {f"flow {name}": edits for name, edits in FLOWS.items()}

MUTANTS: dict[str, Mutant] = {
    name: Mutant(name, edits)
    for name, edits in {
        **_PLANTED,
        **WORLDS,
        **EFFECTS,
        **FUSED_COMMIT,
        **_LEDGER,
        **_TASKS,
        **_DISPATCH,
        **_FLOWS,
    }.items()
}


def is_dispatch_bug(name: str | None) -> bool:
    """Whether runs with this planted bug have the dispatch workload."""
    return name in _DISPATCH


def is_flow_bug(name: str | None) -> bool:
    """Whether runs with this planted bug have the workload of flows."""
    return name in _FLOWS


def can_reach(name: str, settings: SimulationSettings) -> bool:
    """Whether a run with these settings can reach the planted bug. Other runs are skipped."""
    if is_dispatch_bug(name) or is_flow_bug(name):
        return True
    workload = settings.workload
    if name in _TASKS or workload == Workload.TASKS:
        return name in _TASKS and workload == Workload.TASKS
    if name in FUSED_COMMIT:
        return settings.colocated
    if name in VERSIONS:
        return settings.mixed_versions
    if name in HISTORIES:
        return settings.history_bound is not None
    if name in EFFECTS:
        return workload == Workload.EFFECTS
    if name in WORLDS:
        return workload not in (Workload.LEDGER, Workload.SPINE)
    return (name in _LEDGER) == (workload == Workload.LEDGER)
