"""Planted bugs (mutants): each guard of the product removed in turn. The checkers must catch every
one.

Some guards cover for each other. Where removing one guard does no harm, the pair is removed. The
mutants of worlds and hosting are in `mutants_worlds`, of effects, timers and mail in
`mutants_effects`, of fused commits in `mutants_fused_commit`, of the ledger in `mutants_ledger`, of
tasks in `mutants_tasks`, of dispatch requests in `mutants_dispatch`. All others are here.
`source_edits` plants them.
"""

from __future__ import annotations

from holdfast.sim.settings import HAS_LEDGER, SimulationSettings, Workload
from tests.simulation.mutants_dispatch import DISPATCH
from tests.simulation.mutants_effects import EFFECTS
from tests.simulation.mutants_fused_commit import FUSED_COMMIT
from tests.simulation.mutants_ledger import LEDGER
from tests.simulation.mutants_tasks import TASKS
from tests.simulation.mutants_worlds import HISTORIES, VERSIONS, WORLDS
from tests.simulation.source_edits import Edit, Mutant

_guard = "store.txn:check_guard"
_held = "durable.claim:_live_claim_row"
_FENCE = Edit(_guard, "fence != guard.fence", "False")
_GENERATION = Edit(_guard, "guard.generation != generation", "False")
_EXPIRY = Edit(_guard, "expiry is None or now_ns >= schema.decode_int(expiry)", "False")
_NUMBER = Edit(_held, "claim_row.claims != token.number\n        or ", "")
_OWNER = Edit(_held, "claim_row.owner != token.owner\n        or ", "")
_CLAIM_TIME = Edit(_held, "txn.now_ns >= claim_row.expires_ns", "False")
_HEAD = Edit("durable.journal:append", "old_head.height != expected_head", "False")
_READS = Edit("store.validation:WriteSet.check", "not self.keys.isdisjoint(reads)", "False")

_PLANTED: dict[str, tuple[Edit, ...]] = {
    # leases
    "guard: no fence": (_FENCE,),
    "guard: no expiry": (_EXPIRY,),
    "guard: no generation": (_GENERATION,),
    "guard: neither fence nor expiry": (_FENCE, _EXPIRY),
    "guard: not evaluated at apply": (
        Edit("store.validation:check_guards", "in request.guards", "in ()"),
    ),
    "acquire: epoch not raised": (
        Edit("durable.lease:acquire", "status.epoch + 1", "max(status.epoch, 1)"),
    ),
    "acquire: over a live lease": (
        Edit(
            "durable.lease:acquire",
            "if status.is_live(txn.now_ns, txn.generation):",
            "if status.is_live(txn.now_ns, txn.generation) and status.worker == worker:",
        ),
    ),
    "acquire: any incarnation of the worker": (
        Edit(
            "durable.lease:acquire",
            "(status.worker, status.incarnation) != (worker, incarnation)",
            "status.worker != worker",
        ),
    ),
    "acquire: expiry not written": (
        Edit(
            "durable.lease:acquire",
            "status = _expire(txn, resource, status)",
            "status = replace(status, state=LeaseState.FREE)",
        ),
    ),
    "acquire: old generation in the fence": (
        Edit(
            "durable.lease:acquire",
            "incarnation,\n        txn.generation,",
            "incarnation,\n        status.generation,",
        ),
    ),
    "lease: live across generations": (
        Edit(
            "durable.lease:LeaseStatus.is_live",
            "self.generation == generation\n            and ",
            "",
        ),
    ),
    "renew: expired": (
        Edit("durable.lease:renew", " or not status.is_live(txn.now_ns, txn.generation)", ""),
    ),
    "renew: by another": (Edit("durable.lease:renew", " or not _matches(status, lease)", ""),),
    "release: by another": (Edit("durable.lease:release", " or not _matches(status, lease)", ""),),
    "release: epochs start anew": (
        Edit(
            "durable.lease:_set_free",
            "status.generation, status.epoch, 0",
            "status.generation, 0, 0",
        ),
    ),
    "mark stale: a live lease": (
        Edit("durable.lease:mark_stale", " or status.is_live(txn.now_ns, txn.generation)", ""),
    ),
    # claims
    "claim: number not checked": (_NUMBER,),
    "claim: number and owner not checked": (_NUMBER, _OWNER),
    "claim: expiry not checked": (_CLAIM_TIME,),
    "claim: number not raised": (
        Edit("durable.queue:claim_admitted", "item.claims + 1", "max(item.claims, 1)"),
    ),
    "claim: expired too early": (
        Edit("durable.queue:_overdue_claims", "txn.now_ns + 1", "txn.now_ns + 1_000_000_000"),
    ),
    "claim: never expired": (Edit("durable.queue:_overdue_claims", "txn.now_ns + 1", "0"),),
    "ack: claim rows stay": (
        Edit(
            "durable.claim:_delete_done",
            "items.delete_claim(txn, keys, claim_row, packed_seq)",
            "pass",
        ),
    ),
    "ack: item stays": (
        Edit("durable.claim:_delete_done", "txn.delete(keys.items + packed_seq)", "pass"),
    ),
    # budgets and dead letters
    "budget: expiries without end": (
        Edit("durable.queue:_expire", "after.expiries >= budget.expiries_max", "False"),
    ),
    "budget: expiries not counted": (
        Edit("durable.queue:_expire", "item.expiries + 1", "item.expiries"),
    ),
    "budget: failures without end": (
        Edit("durable.claim:_fail", " or failures >= budget.failures_max", ""),
    ),
    "budget: failures not counted": (
        Edit("durable.claim:_fail", "failures = item.failures + 1", "failures = item.failures"),
    ),
    "dead letter: item kept, too": (
        Edit("durable.dead_letters:write_letter", "txn.delete(keys.items + packed_seq)", "pass"),
    ),
    "dead letter: payload lost": (
        Edit("durable.dead_letters:_store_letter", "item.payload", 'b""'),
    ),
    "redrive: dead letter kept, too": (
        Edit("durable.dead_letters:_remove_letter", "txn.delete(keys.dead + packed_seq)", "pass"),
    ),
    "sequence: reused after a delete": (
        Edit(
            "durable.item:insert",
            "last = txn.count(keys.last_seq)",
            "last = max([seq_of(v) for _, v in txn.scan(keys.items, tuples.prefix_end(keys.items))"
            " if len(v) < 10] + [tuples.unpack_last_int(k, len(keys.items)) for k, _ in"
            " txn.scan(keys.items, tuples.prefix_end(keys.items))], default=0)",
        ),
    ),
    "counters: not maintained": (
        Edit("durable.item:QueueCounterDelta.apply", "not any(changes.values())", "True"),
    ),
    "counters: wrong after a delay": (
        Edit(
            "durable.item:insert",
            "ItemState.DELAYED if delayed else ItemState.READY",
            "ItemState.READY",
        ),
    ),
    # timers
    "timers: in the order they were put": (
        Edit("runner.claim_ops:claim_batch", "by_due=name == timers", "by_due=False"),
    ),
    "timers: ready ones are not put in line": (
        Edit(
            "durable.queue:claim_admitted",
            "_move_ready_to_delayed(txn, keys, sweep, delta)",
            "pass",
        ),
    ),
    "timer: ready at once": (
        Edit("durable.item:insert", "delayed = not_before_ns > now_ns", "delayed = False"),
    ),
    "timer: woken early": (
        Edit("durable.queue:_promote_due", "txn.now_ns + 1", "txn.now_ns + 1_000_000_000"),
    ),
    "timer: never woken": (Edit("durable.queue:_promote_due", "txn.now_ns + 1", "0"),),
    # inbox and keys
    "inbox: key not looked up": (Edit("durable.inbox:put", "first_seq is not None", "False"),),
    "inbox: key not remembered": (
        Edit("durable.dedupe:remember", "txn.put(keys.records + packed", "(keys.records + packed"),
    ),
    "inbox: cursor not moved": (
        Edit("durable.inbox:advance", "txn.put(keys.cursor", "(keys.cursor"),
    ),
    "inbox: rows stay below the cursor": (
        Edit("durable.inbox:advance", "txn.delete(key)", "pass"),
    ),
    "inbox: sequence reused": (
        Edit(
            "store.txn:next_seq",
            "txn.count(counter) + 1",
            "1 + max([tuples.unpack_last_int(k, len(space)) for k, _ in"
            " txn.scan(space, tuples.prefix_end(space))], default=0)",
        ),
    ),
    "key: other body taken": (
        Edit("durable.dedupe:check", "record.body_hash != body_hash", "False"),
    ),
    "key: collected early": (
        Edit("durable.dedupe:expire", "txn.now_ns - older_than_ns", "txn.now_ns"),
    ),
    "key: too late taken for new": (Edit("durable.dedupe:check", "issued_ns < floor_ns", "False"),),
    # journal and snapshots
    "journal: expected head ignored": (_HEAD,),
    "journal: truncated beyond the checkpoint": (
        Edit(
            "durable.journal:truncate",
            "old_head.floor, old_head.checkpoint, limit",
            "old_head.floor, old_head.height, limit",
        ),
    ),
    "journal: checkpoint not needed": (
        Edit(
            "durable.journal:truncate",
            "old_head.checkpoint, limit",
            "old_head.checkpoint + 2, limit",
        ),
    ),
    "journal: packed beyond the checkpoint": (
        Edit(
            "durable.journal:compact",
            "lo, old_head.checkpoint, limit",
            "lo, old_head.height + 1, limit",
        ),
    ),
    "snapshot: baseline pruned": (Edit("durable.snapshot:prune", " if key not in kept_keys", ""),),
    # blobs
    "blob: reference not counted": (
        Edit("store.blobs:retain", "refs.count + 1", "max(refs.count, 1)"),
    ),
    "blob: reference not dropped": (
        Edit("durable.claim:_delete_done", "if claim_row.blob:", "if False:"),
    ),
    # the engine
    "validation: reads": (_READS,),
    "validation: ranges": (
        Edit("store.validation:WriteSet.check", "self._sorted_keys[at] < hi", "False"),
    ),
    "validation: snapshot from before a takeover": (
        Edit("store.validation:RecentCommits.check", "snapshot < self._unknown_until", "False"),
    ),
    "validation: within one commit": (
        Edit("store.validation:RecentCommits.check", "if current.keys:", "if False:"),
    ),
    "validation: nothing": (
        Edit("store.validation:RecentCommits.check", "not reads and not ranges", "True"),
    ),
    "resend: outcome not looked up": (
        Edit("store.engine:StoreEngine._apply", "known is not None", "False"),
    ),
    "resend: outcomes lost in a takeover": (
        Edit(
            "store.engine:StoreEngine._load_outcomes",
            "self._outcomes.update(zip(names, answers, strict=True))",
            "pass",
        ),
    ),
    "time: follows the wall clock": (
        Edit(
            "store.engine:StoreEngine.now_ns",
            "self._clock.boot_ns() + self._anchor.offset_ns",
            "self._clock.wall_ns()",
        ),
    ),
    "time: no floor after a reboot": (
        Edit("clock:anchor_at_open", "max(clock.wall_ns(), floor_ns + 1)", "clock.wall_ns()"),
    ),
    # boot
    "schema: any marker will do": (
        Edit("store.engine:check_schema", "match is not schema.SchemaMatch.SAME", "False"),
    ),
    "schema: missing marker is no matter": (
        Edit("store.engine:check_schema", "not bootstrap", "False"),
    ),
}

_LEDGER = {f"ledger {name}": edits for name, edits in LEDGER.items() if HAS_LEDGER}
_TASKS = {f"task {name}": edits for name, edits in TASKS.items()}
_DISPATCH = {f"dispatch {name}": edits for name, edits in DISPATCH.items()}

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
    }.items()
}


def is_dispatch_bug(name: str | None) -> bool:
    """Whether runs with this planted bug have the dispatch workload."""
    return name in _DISPATCH


def can_reach(name: str, settings: SimulationSettings) -> bool:
    """Whether a run with these settings can reach the planted bug. Other runs are skipped."""
    if is_dispatch_bug(name):
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
