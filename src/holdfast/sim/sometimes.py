"""What must happen at times, or the simulator proves nothing.

Each fault, each act of fate and each guard has a name here and is counted in every run. Over enough
seeds none may stay at zero: a guard that never fired was never tested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from holdfast.sim import check_app
from holdfast.sim.faults import Fault
from holdfast.sim.history import Event, History
from holdfast.sim.lease_events import expanded, stuck_now
from holdfast.sim.settings import HAS_LEDGER
from holdfast.tasks.runs import of_runs

# Over this many seeds everything below must have been seen.
SEEDS_MIN = 400

Plain = dict[str, Any]
Sight = Callable[[Event], bool]


def _refused(op: str, code: str) -> Sight:
    return lambda event: event.op == op and event.code == code


def _did(op: str, fits: Callable[[Event], bool] = lambda event: True) -> Sight:
    return lambda event: event.op == op and event.applied and fits(event)


def _fate(op: str, fits: Callable[[Event], bool] = lambda event: True) -> Sight:
    return lambda event: event.op == op and fits(event)


def _buried_for(code: str) -> Sight:
    return lambda event: (
        event.op == "audit"
        and any(
            letter["code"] == code
            for queue in event.value["queues"].values()
            for letter in queue["dead"].values()
        )
    )


_SIGHTS: dict[str, Sight] = {
    **{
        f"fault: {fault.value}": _fate("fault", lambda event, fault=fault: event.args["kind"] == fault.value)  # type: ignore[misc]
        for fault in Fault
    },
    "fault: outcome forgotten": _fate("fault", lambda event: event.args["kind"] == "outcome forgotten"),
    "fate: process killed": _fate("kill"),
    "fate: wall clock forward": _fate("clock", lambda event: event.args["step_ns"] > 0),
    "fate: wall clock back": _fate("clock", lambda event: event.args["step_ns"] < 0),
    "fate: reboot": _fate("reboot"),
    "fate: takeover": _fate("takeover"),
    "fate: backup restored": _fate("restore"),
    "boot: wrong marker": _fate("boot", lambda event: event.value["outcome"] == "schema_mismatch"),
    "boot: missing marker": _fate("boot", lambda event: event.value["outcome"] == "not_found"),
    "boot: bootstrap": _fate(
        "boot", lambda event: event.args["marker"] is None and event.value["outcome"] == "opened"
    ),
    "store: genuine conflict": lambda event: event.code == "conflict" and event.value.get("why", "injected") != "injected",
    "store: several in one commit": lambda event: event.op == "group" and event.args["size"] > 1,
    "store: snapshot too old": lambda event: event.code == "conflict" and "too old" in event.value.get("why", ""),
    "store: replaced under a client": lambda event: event.code == "store_replaced",
    "lease: held by another": _refused("lease.acquire", "held"),
    "lease: the same again": _did("lease.acquire", lambda event: event.value["expires_ns"] != event.at_ns + event.args["ttl_ns"]),
    "lease: epoch above 1": _did("lease.acquire", lambda event: event.value["epoch"] > 1),
    "lease: new generation": _did("lease.acquire", lambda event: event.value["generation"] > 1),
    "lease: renewed": _did("lease.renew", lambda event: event.value[0] is not None),
    "lease: renewal refused": _did("lease.renew", lambda event: event.value[0] is None),
    "lease: renewed one of two": _did("lease.renew", lambda event: event.value[0] is not None and None in event.value),
    "lease: release refused": _refused("lease.release", "fenced"),
    "lease: forced": _did("lease.force_release"),
    "lease: never granted": _refused("lease.force_release", "not_found"),
    "lease: marked stale": _did("lease.mark_stale", lambda event: bool(event.value)),
    "guard: write fenced": _refused("host_cycle", "fenced"),
    "guard: sweep fenced": _refused("truncate_journal", "fenced"),
    "guard: restored fence": lambda event: event.code == "fenced" and "restored" in str(event.value.get("why")),
    "guard: expired": lambda event: event.code == "fenced" and "expired" in str(event.value.get("why")),
    "journal: head moved": _refused("host_cycle", "head_moved"),
    "journal: truncated": _did("truncate_journal"),
    "journal: packed into segments": lambda event: event.op == "audit" and any(
        journal["head"] and journal["head"]["packed"] for journal in event.value["journals"].values()
    ),
    "snapshot: baseline": _did("save_snapshot", lambda event: bool(event.args["baseline"])),
    "inbox: already there": _did("inbox.put", lambda event: bool(event.value["already"])),
    "inbox: key conflict": _refused("inbox.put", "key_conflict"),
    "inbox: key expired": _refused("inbox.put", "key_expired"),
    "inbox: keys collected": _did("dedupe.collect", lambda event: event.value > 0),
    "blob: collected": _did("blobs.collect", lambda event: event.value > 0),
    "claim: ack lost": _refused("queue.ack", "claim_lost"),
    "claim: fail lost": _refused("queue.fail", "claim_lost"),
    "claim: bury lost": _refused("queue.bury", "claim_lost"),
    "claim: release lost": _refused("queue.release", "claim_lost"),
    "claim: extension lost": _did("queue.extend", lambda event: None in event.value),
    "claim: settlement lost": _did("queue.settle", lambda event: "lost" in event.value),
    "claim: taken over": _did("queue.claim", lambda event: any(claim["expiries"] for claim in event.value)),
    "claim: second failure": _did("queue.claim", lambda event: any(claim["failures"] for claim in event.value)),
    "claim: handed back": _did("claims.hand_back"),
    "claim: reaped": _did("queue.reap", lambda event: event.value > 0),
    "timer: fired": _did("claims.take", lambda event: bool(event.value["timers"])),
    "dead: by failures": _did("queue.settle", lambda event: "dead" in event.value),
    "dead: by expiries": _buried_for("expiries_exhausted"),
    "dead: buried": _did("queue.bury"),
    "dead: by a bug in a handler": _buried_for("handler_error"),
    "dead: redriven": _did("queue.redrive"),
    "dead: gone before the redrive": _refused("queue.redrive", "not_found"),
    "dead: purged": _did("queue.purge_dead", lambda event: event.value > 0),
}  # fmt: skip


def _answered(fits: Callable[[dict[str, Any]], bool]) -> Sight:
    return _did("tenure.acquire", lambda event: any(fits(one) for one in event.value))


def _records(fits: Callable[[dict[str, Any]], bool]) -> Sight:
    return lambda event: (
        event.op == "audit"
        and any(
            fits(record)
            for universe in event.value["worlds"].values()
            for record in universe["records"].values()
        )
    )


def _steps(event: Event) -> Iterator[Plain]:
    if event.op == "commit" and event.applied:
        for body in event.args["cycle"]["bodies"]:
            yield check_app.step_of(body)


def _got(fits: Callable[[Plain], bool], kind: str = "") -> Sight:
    """A receipt that a world has journaled."""
    return lambda event: any(
        step["ingress"]["kind"] == "receipt"
        and step["ingress"]["type"].startswith(kind)
        and fits(check_app.receipt_of(step["ingress"]))
        for step in _steps(event)
    )


def _fired(fits: Callable[[Plain], bool] = lambda ingress: True) -> Sight:
    return lambda event: any(
        step["ingress"]["kind"] == "timer" and fits(step["ingress"]) for step in _steps(event)
    )


def _wanted(kind: str) -> Sight:
    return _did(
        "commit",
        lambda event: any(one["effect_kind"] == kind for one in event.args["cycle"]["intents"]),
    )


def _forked(name: str, value: str) -> Sight:
    return _did("fork", lambda event: event.args.get(name) == value)


def _given(name: str, *, again: bool = False) -> Sight:
    """A fork takes something over; or again, what its parent had taken over itself."""
    return _did(
        "inherit.bequeath",
        lambda event: any(
            not again or one["redrive_of"] is not None for one in event.args["wishes"][name]
        ),
    )


def _queued(queue: str) -> Sight:
    return lambda event: (
        event.op == "audit"
        and any(
            name.endswith(queue) and found["items"] for name, found in event.value["queues"].items()
        )
    )


def _carries(
    event: Event, what: str, fits: Callable[[Plain], bool] = lambda one: True, at_least: int = 1
) -> bool:
    """Whether a cycle settles effects (`token`), or tells timers (`alarm`), in its commit."""
    carried = event.args["cycle"].get("carried", ())
    return sum(one[what] is not None and fits(one[what]) for one in carried) >= at_least


def _refused_ring(code: str) -> Sight:
    return lambda event: event.op == "commit" and event.code == code and _carries(event, "alarm")


_EFFECTS: dict[str, Sight] = {
    "effect: called": _fate("effect.call"),
    "effect: called again": _fate("effect.call", lambda event: event.args["attempt"] > 1),
    "effect: done": _got(lambda receipt: receipt["status"] == "ok", "fx."),
    "effect: done at a later attempt": _got(
        lambda receipt: receipt["status"] == "ok" and receipt["attempts"] > 1, "fx."
    ),
    **{
        f"effect: ended, {code}": _got(lambda receipt, code=code: receipt["code"] == code)  # type: ignore[misc]
        for code in ("not_now", "never", "bad_result", "timeout", "expiries_exhausted", "exited",
                     "cancelled", "dropped_by_fork", "by_hand")
    },
    "effect: settled in its world's commit": _did("commit", lambda event: _carries(event, "token")),
    "effect: settled otherwise, others came first": lambda event: (
        event.op == "commit" and event.code == "conflict" and _carries(event, "token")
    ),
    "timer: told in its world's commit": _did("commit", lambda event: _carries(event, "alarm")),
    "timer: told in its world's commit, by the calendar": _did(
        "commit", lambda event: _carries(event, "alarm", lambda one: one["queue"].endswith("/calendar"))
    ),
    "timer: several told in one commit of their world": _did(
        "commit", lambda event: _carries(event, "alarm", at_least=2)
    ),
    "timer: told in its world's commit, whose answer was lost": _did(
        "commit", lambda event: event.result == "unknown" and _carries(event, "alarm")
    ),
    **{
        f"timer: not told in its world's commit, {code}": _refused_ring(code)
        for code in ("conflict", "fenced")
    },
    "effect: redriven": _did("receipts.redrive_effects"),
    "effect: of a redrive": _got(lambda receipt: receipt["redrive_of"] is not None, "fx."),
    "effect: paid by rate": _did("rate.grant"),
    "fork: effects answered": _forked("effects", "fail"),
    "fork: effects reissued": _forked("effects", "reissue"),
    "fork: timers kept": _forked("timers", "keep"),
    "fork: told what was certain": _given("answers"),
    "fork of a fork: effects taken over": _given("effects", again=True),
    "fork of a fork: timers taken over": _given("timers", again=True),
    "timer: worker fired": _did("firing.fire_due", lambda event: event.value > 0),
    "timer: event in a journal": _fired(),
    "timer: waits on the calendar": _queued("/timers/calendar"),
    "timer: cancelled": _wanted("timer.cancel"),
    "mail: waits for a full inbox": _queued("/effects/fabric.send"),
    "mail: abroad": _did("fabric.accept_many"),
    "mail: abroad, sent again": _did(
        "fabric.accept_many",
        lambda event: any(one["status"] == "already_enqueued" for one in event.value),
    ),
    "mail: sender told": _got(lambda receipt: receipt["status"] == "ok", "fabric.send"),
}  # fmt: skip

_WORLDS: dict[str, Sight] = {
    "world: cycle": _did("commit"),
    "world: cycle fenced": _refused("commit", "fenced"),
    "world: cycle of unknown outcome, applied": _did("commit", lambda event: event.result == "unknown"),
    "world: cycle of unknown outcome, not applied": lambda event: (
        event.op == "commit" and event.result == "unknown" and not event.applied
    ),
    "world: cycle against a full disk": _refused("commit", "store_full"),
    "world: snapshot in a cycle": _did("commit", lambda event: event.args["cycle"]["snapshot"] is not None),
    "world: snapshot on leaving": _did("cycle.leave", lambda event: bool(event.args["cycles"])),
    "world: journal packed": _did("compact", lambda event: bool(event.value)),
    "world: upkeep fenced": _refused("compact", "fenced"),
    "world: history cut": _did("history.trim"),
    "world: history cut in parts": _did("history.trim", lambda event: bool(event.value)),
    "world: cut fenced": _refused("_cut", "fenced"),
    "world: purged": _did("purge.begin"),
    "world: purge refused, in use": _refused("purge.begin", "world_in_use"),
    "world: erased": _did("purge.erase", lambda event: not event.value),
    "world: erased in parts": _did("purge.erase", lambda event: bool(event.value)),
    "world: erased by the leader": _did("_guarded", lambda event: bool(event.args.get("lease"))),
    "world: reducer raised": _did("commit", lambda event: bool(event.args["cycle"]["failed"])),
    "world: failed event redriven": _did("queue.redrive", lambda event: event.args["queue"].endswith("failed-events")),
    "world: failed event delivered again": _did("redrive.redeliver", lambda event: event.value > 0),
    "world: stopped before an unknown item": _did("cycle.stop", lambda event: event.args["seq"] > 0),
    "world: stopped for the code of an entry": _did("cycle.stop", lambda event: event.args["height"] > 0),
    "world: parked for want of the code of an entry": _did(
        "catalog.change", lambda event: event.args["event"] == "park"
    ),
    "world: unknown item given up": _did(
        "commit", lambda event: any(one["code"] == "unknown_event" for one in event.args["cycle"]["failed"])
    ),
    "world: key of an item that waits": _did(
        "ingress.deliver", lambda event: (event.value["item"] or {}).get("state") == "waiting"
    ),
    "world: key of an item that is dead": _did(
        "ingress.deliver", lambda event: (event.value["item"] or {}).get("state") == "dead"
    ),
    "world: granted anew": _answered(lambda one: one["lease"] is not None and one["lease"]["epoch"] > 1),
    "world: held by another": _answered(lambda one: one["refusal"] == "held"),
    "world: assigned to another": _answered(lambda one: one["refusal"] == "assigned_to_another"),
    "world: paused, not granted": _answered(lambda one: one["refusal"] == "paused"),
    "world: parked for a stuck reducer": _did(
        "tenure.acquire", lambda event: any(stuck_now(event, one) for one in event.value)
    ),
    "world: parked for a fickle reducer": _did("tenure.park"),
    "world: tried alone": _did("tenure.try_alone"),
    "world: key of an effect refused": _got(lambda receipt: receipt["code"] == "key_conflict"),
    "world: key sent again": _did("ingress.deliver", lambda event: bool(event.value["already"])),
    "world: key sent with another body": _refused("ingress.deliver", "key_conflict"),
    "world: deleted": _records(lambda record: record["status"] == "deleted"),
    "fork: made": _did("plant"),
    "fork: made in one transaction": _did("fork"),
    "fork: below the parent's head": _did("fork", lambda event: event.args["at"] > 0),
    "fork: there": _records(lambda record: record["lineage"] is not None),
    "worker: drained": _did("workers.drain", lambda event: bool(event.value["draining"])),
    "worker: forgotten": _did("workers.forget", lambda event: bool(event.value)),
    "orchestrator: placed": _did("place"),
    "orchestrator: placing fenced": _refused("place", "fenced"),
    "orchestrator: moved": _did("_move_page"),
    "authority: held by another": _refused("authority.acquire", "already_held_by_other"),
    "authority: taken over": _did("authority.acquire", lambda event: event.value["epoch"] > 1),
    "authority: lost": lambda event: event.op == "authority.renew" and event.code in ("not_held", "owner_mismatch"),
    "authority: released": _did("authority.release"),
    "authority: forced": _did("authority.force_release", lambda event: event.value > 0),
    "authority: marked stale": _did("authority.mark_stale", lambda event: bool(event.value)),
}  # fmt: skip


def _logged(kind: str, fits: Callable[[bytes], bool] = lambda body: True) -> Sight:
    """An entry of a run's log: its kind comes first, after two bytes of lengths."""
    told = kind.encode()
    return lambda event: (
        event.op == "_write"
        and event.applied
        and any(body[2 : 2 + len(told)] == told and fits(body) for body in event.args["bodies"])
    )


_LEDGER: dict[str, Sight] = {
    "ledger: append fenced": _refused("_write", "fenced"),
    "ledger: append of unknown outcome, applied": _did("_write", lambda event: event.result == "unknown"),
    "ledger: append of unknown outcome, not applied": lambda event: (
        event.op == "_write" and event.result == "unknown" and not event.applied
    ),
    "ledger: checkpoint": _did("_write", lambda event: event.args["checkpoint"] is not None),
    "ledger: several entries in one commit": _did("_write", lambda event: len(event.args["bodies"]) > 1),
    "ledger: truncated": lambda event: event.op == "audit" and any(
        name.startswith("run/") and (found["head"] or {"floor": 1})["floor"] > 1
        for name, found in event.value["journals"].items()
    ),
    **{
        f"ledger: reclaimed, {why}": _logged("reclaimed", lambda body, why=why: why.encode() in body)  # type: ignore[misc]
        for why in ("expired", "closed", "superseded")
    },
    "ledger: retry ripened": _logged("ripened"),
    "ledger: cancelled": _logged("cancelling"),
    "ledger: grace ended": _logged("cancelled"),
    "ledger: halted": _logged("halted"),
    **{
        f"ledger: run {status}": _fate("ledger.over", lambda event, status=status: event.args["status"] == status)  # type: ignore[misc]
        for status in ("finished", "cancelled", "halted")
    },
}  # fmt: skip


def _granted(fits: Callable[[Plain], bool]) -> Sight:
    return lambda event: (
        event.op in ("tasks.turn", "tasks.lease")
        and event.applied
        and any(
            fits(grant)
            for grant in (event.value if event.op == "tasks.lease" else event.value["leased"])[
                "grants"
            ]
        )
    )


def _answered_task(answer: int) -> Sight:
    return lambda event: (
        event.op in ("tasks.turn", "tasks.settle")
        and event.applied
        and answer in (event.value if event.op == "tasks.settle" else event.value["answers"])
    )


def _some_task(fits: Callable[[Plain], bool]) -> Sight:
    return lambda event: (
        event.op == "audit"
        and any(
            fits(row)
            for found in event.value.get("tasks", {}).values()
            for row in found["statuses"].values()
        )
    )


def _placed(place: str) -> Sight:
    return lambda event: (
        event.op == "audit" and any(found[place] for found in event.value.get("tasks", {}).values())
    )


_TASKS: dict[str, Sight] = {
    "task: granted again": _granted(lambda grant: grant["attempt"] > 1),
    "task: granted in a run": _granted(lambda grant: of_runs(grant["lease"])),
    "task: suspect granted": _granted(lambda grant: bool(grant["suspect"])),
    "task: report committed": _answered_task(0),
    "task: report cancelled": _answered_task(1),
    "task: report rejected": _answered_task(2),
    "task: extended": _did("tasks.extend", lambda event: any(event.value)),
    "task: extension refused": _did("tasks.extend", lambda event: 0 in event.value),
    "task: cancelled": _did("tasks.cancel", lambda event: True in event.value),
    "task: cancelled too late": _did("tasks.cancel", lambda event: False in event.value),
    "task: redriven": _did("tasks.redrive"),
    **{
        f"task: {name}": _some_task(lambda row, state=state: row["state"] == state)  # type: ignore[misc]
        for state, name in ((2, "completed"), (3, "failed"), (4, "dead"))
    },
    "task: died of too many expiries": _some_task(lambda row: row["reason"] == "expiries_exhausted"),
    "task: died of another": _some_task(lambda row: row["reason"] == "dependency_failed"),
    "task: waits for others": _some_task(lambda row: row["waits"] > 0),
    **{f"task: in its place, {place}": _placed(place) for place in ("ready", "suspect", "parked", "stray", "delayed")},
    "task: log cut": lambda event: event.op == "audit" and any(
        name.startswith("tasks/") and (found["head"] or {"floor": 1})["floor"] > 1
        for name, found in event.value["journals"].items()
    ),
    "task: superseded in making a checkpoint": _did("tasks.add", lambda event: not event.value),
}  # fmt: skip

# Seen by actors rather than in events.
_TOLD = {
    "task: key refused",
    "task: after one that is none",
    "task: turn of unknown outcome",
    "task: late worker told",
    "task: worker of another generation",
    "task: forgotten before it was cancelled",
    "task: not to be redriven",
    "task: checkpoint made",
    "host fenced",
    "stubborn host refused",
    "renewal withheld for lack of progress",
    "late worker refused",
    "old claim refused",
    "runner lost a claim",
    "producer gave up",
    "world stopped in good order",
    "orchestrator stopped in good order",
    "reducer killed its process",
    "sender's key refused",
    "sent to a fork that is not there",
    "sender gave up",
    "keeper refused",
    "adapter stopped in good order",
    "timer stopped in good order",
    "household stopped in good order",
    "household: a step under way",
    "household: a round of timers taken back",
    "household: a round of timers not answered in time",
    "effect: died before the call",
    "effect: died after the call",
    "effect: answered in the wrong shape",
    "ledger: answer lost",
    "ledger: claim refused, report taken",
    "ledger: claim waits at the service",
    "ledger: connection closed",
    "ledger: died before the sink's commit",
    "ledger: died between the sink's commit and the log",
    "ledger: grant claimed ahead",
    "ledger: grant given back",
    "ledger: halted by an illegal commit",
    "ledger: halted by an illegal report",
    "ledger: late at the sink",
    "ledger: opened again by its driver",
    "ledger: opened by a new driver",
    "ledger: reconciled with the sink",
    "ledger: report fenced",
    "ledger: report sent again",
    "ledger: row killed its task",
    "ledger: service ended by commit_unknown",
    "ledger: service ended by fenced",
    "ledger: service left in good order",
    "ledger: service paused",
    "ledger: task slept past its lease",
    "ledger: told to stop",
    "ledger: wait for backoff",
    "ledger: wait for busy",
    "ledger: wait for lag",
    "ledger: zombie stopped",
}

_ALL = {**_SIGHTS, **_EFFECTS, **_WORLDS, **_LEDGER, **_TASKS}
SOMETIMES: frozenset[str] = frozenset(
    name for name in {*_ALL, *_TOLD} if HAS_LEDGER or not name.startswith("ledger: ")
)


def sightings(history: History, told: Counter[str]) -> Counter[str]:
    found = Counter({name: n for name, n in told.items() if name in _TOLD})
    for event in expanded(history):
        for name, sees in _ALL.items():
            if sees(event):
                found[name] += 1
    return found


def never(seen: Counter[str]) -> list[str]:
    return sorted(name for name in SOMETIMES if not seen[name])
