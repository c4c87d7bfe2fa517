"""Planted bugs: each guard of the product removed in turn. The checkers must catch every one.

Some guards cover each other. Where a single one can be removed without harm, the pair is planted.
Those of worlds and of who hosts them are in `mutants_worlds`, those of what worlds want of others in
`mutants_effects`, those of timers that are carried in `mutants_carrying`, those of a run's ledger in `mutants_ledger`, those of tasks in `mutants_tasks`, all
others here; how they are planted is in `edits`.
"""

from __future__ import annotations

from holdfast.sim.edits import Edit, Mutant
from holdfast.sim.mutants_carrying import CARRYING
from holdfast.sim.mutants_effects import EFFECTS
from holdfast.sim.mutants_ledger import LEDGER
from holdfast.sim.mutants_tasks import TASKS
from holdfast.sim.mutants_worlds import HISTORIES, VERSIONS, WORLDS
from holdfast.sim.settings import HAS_LEDGER, Settings, Workload

_guard = "store.txn:check_guard"
_held = "durable.claim:_hold"
_FENCE = Edit(_guard, "fence != guard.fence", "False")
_GENERATION = Edit(_guard, "guard.generation != generation", "False")
_EXPIRY = Edit(_guard, "expiry is None or now_ns >= schema.int_of(expiry)", "False")
_NUMBER = Edit(_held, "hold.claims != token.number or ", "")
_OWNER = Edit(_held, "hold.owner != token.owner or ", "")
_CLAIM_TIME = Edit(_held, "txn.now_ns >= hold.expires_ns", "False")
_HEAD = Edit("durable.journal:append", "was.height != expected_head", "False")
_READS = Edit("store.applying:Written.check", "not self.keys.isdisjoint(reads)", "False")

_PLANTED: dict[str, tuple[Edit, ...]] = {
    # leases
    "guard: no fence": (_FENCE,),
    "guard: no expiry": (_EXPIRY,),
    "guard: no generation": (_GENERATION,),
    "guard: neither fence nor expiry": (_FENCE, _EXPIRY),
    "guard: not evaluated at apply": (
        Edit("store.applying:check_guards", "in request.guards", "in ()"),
    ),
    "acquire: epoch not raised": (
        Edit("durable.lease:acquire", "found.epoch + 1", "max(found.epoch, 1)"),
    ),
    "acquire: over a live lease": (
        Edit(
            "durable.lease:acquire",
            "if found.live(txn.now_ns, txn.generation):",
            "if found.live(txn.now_ns, txn.generation) and found.worker == worker:",
        ),
    ),
    "acquire: any incarnation of the worker": (
        Edit(
            "durable.lease:acquire",
            "(found.worker, found.incarnation) != (worker, incarnation)",
            "found.worker != worker",
        ),
    ),
    "acquire: expiry not written": (
        Edit(
            "durable.lease:acquire",
            "found = _expire(txn, resource, found)",
            "found = replace(found, state=State.FREE)",
        ),
    ),
    "acquire: old generation in the fence": (
        Edit(
            "durable.lease:acquire",
            "incarnation,\n        txn.generation,",
            "incarnation,\n        found.generation,",
        ),
    ),
    "lease: live across generations": (
        Edit("durable.lease:Status.live", "self.generation == generation and ", ""),
    ),
    "renew: expired": (
        Edit("durable.lease:renew", " or not found.live(txn.now_ns, txn.generation)", ""),
    ),
    "renew: by another": (Edit("durable.lease:renew", " or not _is_of(found, lease)", ""),),
    "release: by another": (Edit("durable.lease:release", " or not _is_of(found, lease)", ""),),
    "release: epochs start anew": (
        Edit("durable.lease:_free", "found.generation, found.epoch, 0", "found.generation, 0, 0"),
    ),
    "mark stale: a live lease": (
        Edit("durable.lease:mark_stale", " or found.live(txn.now_ns, txn.generation)", ""),
    ),
    # claims
    "claim: number not checked": (_NUMBER,),
    "claim: number and owner not checked": (_NUMBER, _OWNER),
    "claim: expiry not checked": (_CLAIM_TIME,),
    "claim: number not raised": (
        Edit("durable.queue:claim_judged", "was.claims + 1", "max(was.claims, 1)"),
    ),
    "claim: expired too early": (
        Edit("durable.queue:_overdue", "txn.now_ns + 1", "txn.now_ns + 1_000_000_000"),
    ),
    "claim: never expired": (Edit("durable.queue:_overdue", "txn.now_ns + 1", "0"),),
    "ack: claim rows stay": (
        Edit("durable.claim:_finish", "items.drop_claim(txn, keys, hold, packed_seq)", "pass"),
    ),
    "ack: item stays": (
        Edit("durable.claim:_finish", "txn.delete(keys.items + packed_seq)", "pass"),
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
        Edit("durable.dead:inter", "txn.delete(keys.items + packed_seq)", "pass"),
    ),
    "dead letter: payload lost": (Edit("durable.dead:_keep", "item.payload", 'b""'),),
    "redrive: dead letter kept, too": (
        Edit("durable.dead:_take", "txn.delete(keys.dead + packed_seq)", "pass"),
    ),
    "sequence: reused after a delete": (
        Edit(
            "durable.item:insert",
            "last = txn.count(keys.last_seq)",
            "last = max([seq_of(v) for _, v in txn.scan(keys.items, tuples.after(keys.items))"
            " if len(v) < 10] + [tuples.unpack_last_int(k, len(keys.items)) for k, _ in"
            " txn.scan(keys.items, tuples.after(keys.items))], default=0)",
        ),
    ),
    "counters: not maintained": (
        Edit("durable.item:Tally.save", "not any(moved.values())", "True"),
    ),
    "counters: wrong after a delay": (
        Edit("durable.item:insert", "State.DELAYED if delayed else State.READY", "State.READY"),
    ),
    # timers
    "timers: in the order they were put": (
        Edit("runner.claims:take", "by_due=name == timers", "by_due=False"),
    ),
    "timers: ready ones are not put in line": (
        Edit("durable.queue:claim_judged", "_line_up(txn, keys, sweep, tally)", "pass"),
    ),
    "timer: ready at once": (
        Edit("durable.item:insert", "delayed = not_before_ns > now_ns", "delayed = False"),
    ),
    "timer: woken early": (
        Edit("durable.queue:_wake", "txn.now_ns + 1", "txn.now_ns + 1_000_000_000"),
    ),
    "timer: never woken": (Edit("durable.queue:_wake", "txn.now_ns + 1", "0"),),
    # inbox and keys
    "inbox: key not looked up": (Edit("durable.inbox:put", "first is not None", "False"),),
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
            " txn.scan(space, tuples.after(space))], default=0)",
        ),
    ),
    "key: other body taken": (
        Edit("durable.dedupe:check", "found.body_hash != body_hash", "False"),
    ),
    "key: collected early": (
        Edit("durable.dedupe:collect", "txn.now_ns - older_than_ns", "txn.now_ns"),
    ),
    "key: too late taken for new": (Edit("durable.dedupe:check", "issued_ns < floor_ns", "False"),),
    # journal and snapshots
    "journal: expected head ignored": (_HEAD,),
    "journal: truncated beyond the checkpoint": (
        Edit(
            "durable.journal:truncate",
            "was.floor, was.checkpoint, limit",
            "was.floor, was.height, limit",
        ),
    ),
    "journal: checkpoint not needed": (
        Edit("durable.journal:truncate", "was.checkpoint, limit", "was.checkpoint + 2, limit"),
    ),
    "journal: packed beyond the checkpoint": (
        Edit("durable.journal:compact", "lo, was.checkpoint, limit", "lo, was.height + 1, limit"),
    ),
    "snapshot: baseline pruned": (Edit("durable.snapshot:prune", " if key not in spared", ""),),
    # blobs
    "blob: reference not counted": (
        Edit("store.blobs:retain", "refs.count + 1", "max(refs.count, 1)"),
    ),
    "blob: reference not dropped": (Edit("durable.claim:_finish", "if hold.blob:", "if False:"),),
    # the engine
    "validation: reads": (_READS,),
    "validation: ranges": (Edit("store.applying:Written.check", "self._sorted[at] < hi", "False"),),
    "validation: snapshot from before a takeover": (
        Edit("store.applying:Ring.check", "snapshot < self._oldest", "False"),
    ),
    "validation: within one commit": (
        Edit("store.applying:Ring.check", "if written.keys:", "if False:"),
    ),
    "validation: nothing": (Edit("store.applying:Ring.check", "not reads and not ranges", "True"),),
    "resend: outcome not looked up": (
        Edit("store.engine:Engine._apply", "known is not None", "False"),
    ),
    "resend: outcomes lost in a takeover": (
        Edit(
            "store.engine:Engine._load_outcomes",
            "self._outcomes.update(zip(names, answers, strict=True))",
            "pass",
        ),
    ),
    "time: follows the wall clock": (
        Edit(
            "store.engine:Engine.now_ns",
            "self._clock.boot_ns() + self._anchor.offset_ns",
            "self._clock.wall_ns()",
        ),
    ),
    "time: no floor after a reboot": (
        Edit("clock:anchor", "max(clock.wall_ns(), floor_ns + 1)", "clock.wall_ns()"),
    ),
    # boot
    "schema: any marker will do": (
        Edit("store.engine:guard_schema", "version != expected", "False"),
    ),
    "schema: missing marker is no matter": (
        Edit("store.engine:guard_schema", "not bootstrap", "False"),
    ),
}

_LEDGER = {f"ledger {name}": edits for name, edits in LEDGER.items() if HAS_LEDGER}
_TASKS = {f"task {name}": edits for name, edits in TASKS.items()}

MUTANTS: dict[str, Mutant] = {
    name: Mutant(name, edits)
    for name, edits in {**_PLANTED, **WORLDS, **EFFECTS, **CARRYING, **_LEDGER, **_TASKS}.items()
}


def concerns(name: str, settings: Settings) -> bool:
    """Whether a run of this kind comes past the planted bug at all, or may be left out."""
    workload = settings.workload
    if name in _TASKS or workload == Workload.TASKS:
        return name in _TASKS and workload == Workload.TASKS
    if name in CARRYING:
        return settings.household
    if name in VERSIONS:
        return settings.versions
    if name in HISTORIES:
        return settings.keep is not None
    if name in EFFECTS:
        return workload == Workload.EFFECTS
    if name in WORLDS:
        return workload not in (Workload.LEDGER, Workload.SPINE)
    return (name in _LEDGER) == (workload == Workload.LEDGER)
