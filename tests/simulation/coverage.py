"""Coverage of a simulation ("sometimes assertions"): conditions that must occur in some run.

Each fault, each environment action and each guard has a name here and is counted in every run. Over
enough seeds no count may stay at zero: a guard that never fired was never tested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from holdfast.flows.states import FlowState
from holdfast.schedules.states import OccurrenceState
from holdfast.sim.faults import Fault
from holdfast.sim.history import History, HistoryEvent
from holdfast.sim.settings import HAS_LEDGER
from holdfast.tasks.row_ranges import is_range_lease
from tests.simulation import model_app
from tests.simulation.lease_events import expand, parked_as_stuck

# Over this many seeds every condition below must have occurred.
SEEDS_MIN = 400

Plain = dict[str, Any]
EventPredicate = Callable[[HistoryEvent], bool]


@dataclass(frozen=True)
class OpPredicate:
    """A condition on the events of one operation. Events of other operations are not examined."""

    op: str
    fits: EventPredicate

    def __call__(self, event: HistoryEvent) -> bool:
        return event.op == self.op and self.fits(event)


def _refused(op: str, code: str) -> EventPredicate:
    return OpPredicate(op, lambda event: event.code == code)


def _applied(op: str, fits: Callable[[HistoryEvent], bool] = lambda event: True) -> EventPredicate:
    return OpPredicate(op, lambda event: event.applied and fits(event))


def _happened(op: str, fits: Callable[[HistoryEvent], bool] = lambda event: True) -> EventPredicate:
    return OpPredicate(op, fits)


def _dead_lettered_for(code: str) -> EventPredicate:
    return OpPredicate(
        "audit",
        lambda event: any(
            letter["code"] == code
            for queue in event.value["queues"].values()
            for letter in queue["dead"].values()
        ),
    )


_PRIMITIVE_POINTS: dict[str, EventPredicate] = {
    **{
        f"fault: {fault.value}": _happened("fault", lambda event, fault=fault: event.args["kind"] == fault.value)  # type: ignore[misc]
        for fault in Fault
    },
    "fault: outcome forgotten": _happened("fault", lambda event: event.args["kind"] == "outcome forgotten"),
    "fate: process killed": _happened("kill"),
    "fate: wall clock forward": _happened("clock", lambda event: event.args["step_ns"] > 0),
    "fate: wall clock back": _happened("clock", lambda event: event.args["step_ns"] < 0),
    "fate: reboot": _happened("reboot"),
    "fate: takeover": _happened("takeover"),
    "fate: backup restored": _happened("restore"),
    "boot: wrong marker": _happened("boot", lambda event: event.value["outcome"] == "schema_mismatch"),
    "boot: missing marker": _happened("boot", lambda event: event.value["outcome"] == "not_found"),
    "boot: bootstrap": _happened(
        "boot", lambda event: event.args["marker"] is None and event.value["outcome"] == "opened"
    ),
    "store: genuine conflict": lambda event: event.code == "conflict" and event.value.get("why", "injected") != "injected",
    "store: several in one commit": lambda event: event.op == "group" and event.args["size"] > 1,
    "store: snapshot too old": lambda event: event.code == "conflict" and "too old" in event.value.get("why", ""),
    "store: replaced under a client": lambda event: event.code == "store_replaced",
    "lease: held by another": _refused("lease.acquire", "held"),
    "lease: the same again": _applied("lease.acquire", lambda event: event.value["expires_ns"] != event.at_ns + event.args["ttl_ns"]),
    "lease: epoch above 1": _applied("lease.acquire", lambda event: event.value["epoch"] > 1),
    "lease: new generation": _applied("lease.acquire", lambda event: event.value["generation"] > 1),
    "lease: renewed": _applied("lease.renew", lambda event: event.value[0] is not None),
    "lease: renewal refused": _applied("lease.renew", lambda event: event.value[0] is None),
    "lease: renewed one of two": _applied("lease.renew", lambda event: event.value[0] is not None and None in event.value),
    "lease: release refused": _refused("lease.release", "fenced"),
    "lease: forced": _applied("lease.force_release"),
    "lease: never granted": _refused("lease.force_release", "not_found"),
    "lease: marked stale": _applied("lease.mark_stale", lambda event: bool(event.value)),
    "guard: write fenced": _refused("host_cycle", "fenced"),
    "guard: sweep fenced": _refused("truncate_journal", "fenced"),
    "guard: restored fence": lambda event: event.code == "fenced" and "restored" in str(event.value.get("why")),
    "guard: expired": lambda event: event.code == "fenced" and "expired" in str(event.value.get("why")),
    "journal: head moved": _refused("host_cycle", "head_moved"),
    "journal: truncated": _applied("truncate_journal"),
    "journal: packed into segments": lambda event: event.op == "audit" and any(
        journal["head"] and journal["head"]["packed"] for journal in event.value["journals"].values()
    ),
    "snapshot: baseline": _applied("save_snapshot", lambda event: bool(event.args["baseline"])),
    "inbox: already there": _applied("inbox.put", lambda event: bool(event.value["already"])),
    "inbox: key conflict": _refused("inbox.put", "key_conflict"),
    "inbox: key expired": _refused("inbox.put", "key_expired"),
    "inbox: keys collected": _applied("dedupe.expire", lambda event: event.value > 0),
    "blob: collected": _applied("blobs.collect", lambda event: event.value > 0),
    "claim: ack lost": _refused("queue.ack", "claim_lost"),
    "claim: fail lost": _refused("queue.fail", "claim_lost"),
    "claim: bury lost": _refused("queue.dead_letter", "claim_lost"),
    "claim: release lost": _refused("queue.release", "claim_lost"),
    "claim: extension lost": _applied("queue.extend", lambda event: None in event.value),
    "claim: settlement lost": _applied("queue.finish_batch", lambda event: "lost" in event.value),
    "claim: taken over": _applied("queue.claim", lambda event: any(claim["expiries"] for claim in event.value)),
    "claim: second failure": _applied("queue.claim", lambda event: any(claim["failures"] for claim in event.value)),
    "claim: handed back": _applied("claims.release_unstarted"),
    "claim: reaped": _applied("queue.expire_overdue", lambda event: event.value > 0),
    "timer: fired": _applied("claims.claim_batch", lambda event: bool(event.value["timers"])),
    "dead: by failures": _applied("queue.finish_batch", lambda event: "dead" in event.value),
    "dead: by expiries": _dead_lettered_for("expiries_exhausted"),
    "dead: buried": _applied("queue.dead_letter"),
    "dead: by a bug in a handler": _dead_lettered_for("handler_error"),
    "dead: redriven": _applied("queue.redrive"),
    "dead: gone before the redrive": _refused("queue.redrive", "not_found"),
    "dead: purged": _applied("queue.purge_dead", lambda event: event.value > 0),
}  # fmt: skip


def _acquire_answered(fits: Callable[[dict[str, Any]], bool]) -> EventPredicate:
    return _applied("hosting_lease.acquire", lambda event: any(fits(one) for one in event.value))


def _some_record(fits: Callable[[dict[str, Any]], bool]) -> EventPredicate:
    return OpPredicate(
        "audit",
        lambda event: any(
            fits(record)
            for universe in event.value["worlds"].values()
            for record in universe["records"].values()
        ),
    )


def _steps(event: HistoryEvent) -> Iterator[Plain]:
    if event.op == "commit" and event.applied:
        for body in event.args["cycle"]["bodies"]:
            yield model_app.step_of(body)


def _journaled_receipt(fits: Callable[[Plain], bool], kind: str = "") -> EventPredicate:
    """Match a commit that journals a receipt that `fits` accepts, of a kind with this prefix."""
    return OpPredicate(
        "commit",
        lambda event: any(
            step["ingress"]["kind"] == "receipt"
            and step["ingress"]["type"].startswith(kind)
            and fits(model_app.receipt_of(step["ingress"]))
            for step in _steps(event)
        ),
    )


def _journaled_timer(fits: Callable[[Plain], bool] = lambda ingress: True) -> EventPredicate:
    return OpPredicate(
        "commit",
        lambda event: any(
            step["ingress"]["kind"] == "timer" and fits(step["ingress"]) for step in _steps(event)
        ),
    )


def _published_intent(kind: str) -> EventPredicate:
    return _applied(
        "commit",
        lambda event: any(one["effect_kind"] == kind for one in event.args["cycle"]["intents"]),
    )


def _forked(name: str, value: str) -> EventPredicate:
    return _applied("fork", lambda event: event.args.get(name) == value)


def _inherited(name: str, *, again: bool = False) -> EventPredicate:
    """Match a fork that inherits something. With `again`, something that its parent had
    inherited."""
    return _applied(
        "fork.copy_to_child",
        lambda event: any(
            not again or one["redrive_of"] is not None for one in event.args["pending"][name]
        ),
    )


def _has_queued(queue: str) -> EventPredicate:
    return OpPredicate(
        "audit",
        lambda event: any(
            name.endswith(queue) and found["items"] for name, found in event.value["queues"].items()
        ),
    )


def _fuses(
    event: HistoryEvent,
    what: str,
    fits: Callable[[Plain], bool] = lambda one: True,
    at_least: int = 1,
) -> bool:
    """Whether a fused commit settles effects (`token`) or delivers timers (`alarm`)."""
    carried = event.args["cycle"].get("carried", ())
    return sum(one[what] is not None and fits(one[what]) for one in carried) >= at_least


def _refused_fused_timer(code: str) -> EventPredicate:
    return OpPredicate("commit", lambda event: event.code == code and _fuses(event, "alarm"))


_EFFECT_POINTS: dict[str, EventPredicate] = {
    "effect: called": _happened("effect.call"),
    "effect: called again": _happened("effect.call", lambda event: event.args["attempt"] > 1),
    "effect: done": _journaled_receipt(lambda receipt: receipt["status"] == "ok", "fx."),
    "effect: done at a later attempt": _journaled_receipt(
        lambda receipt: receipt["status"] == "ok" and receipt["attempts"] > 1, "fx."
    ),
    **{
        f"effect: ended, {code}": _journaled_receipt(lambda receipt, code=code: receipt["code"] == code)  # type: ignore[misc]
        for code in ("not_now", "never", "bad_result", "timeout", "expiries_exhausted", "exited",
                     "cancelled", "dropped_by_fork", "by_hand")
    },
    "effect: settled in its world's commit": _applied("commit", lambda event: _fuses(event, "token")),
    "effect: settled otherwise, others came first": lambda event: (
        event.op == "commit" and event.code == "conflict" and _fuses(event, "token")
    ),
    "timer: told in its world's commit": _applied("commit", lambda event: _fuses(event, "alarm")),
    "timer: told in its world's commit, by the calendar": _applied(
        "commit", lambda event: _fuses(event, "alarm", lambda one: one["queue"].endswith("/calendar"))
    ),
    "timer: several told in one commit of their world": _applied(
        "commit", lambda event: _fuses(event, "alarm", at_least=2)
    ),
    "timer: told in its world's commit, whose answer was lost": _applied(
        "commit", lambda event: event.result == "unknown" and _fuses(event, "alarm")
    ),
    **{
        f"timer: not told in its world's commit, {code}": _refused_fused_timer(code)
        for code in ("conflict", "fenced")
    },
    "effect: redriven": _applied("effects.redrive_effects"),
    "effect: of a redrive": _journaled_receipt(lambda receipt: receipt["redrive_of"] is not None, "fx."),
    "effect: paid by rate": _applied("rate.grant"),
    "fork: effects answered": _forked("effects", "fail"),
    "fork: effects reissued": _forked("effects", "reissue"),
    "fork: timers kept": _forked("timers", "keep"),
    "fork: told what was certain": _inherited("answers"),
    "fork of a fork: effects taken over": _inherited("effects", again=True),
    "fork of a fork: timers taken over": _inherited("timers", again=True),
    "timer: worker fired": _applied("timers.deliver_due", lambda event: event.value > 0),
    "timer: event in a journal": _journaled_timer(),
    "timer: waits on the calendar": _has_queued("/timers/calendar"),
    "timer: cancelled": _published_intent("timer.cancel"),
    "mail: waits for a full inbox": _has_queued("/effects/fabric.send"),
    "mail: abroad": _applied("messages.accept_many"),
    "mail: abroad, sent again": _applied(
        "messages.accept_many",
        lambda event: any(one["status"] == "already_enqueued" for one in event.value),
    ),
    "mail: sender told": _journaled_receipt(lambda receipt: receipt["status"] == "ok", "fabric.send"),
}  # fmt: skip

_WORLD_POINTS: dict[str, EventPredicate] = {
    "world: cycle": _applied("commit"),
    "world: cycle fenced": _refused("commit", "fenced"),
    "world: cycle of unknown outcome, applied": _applied("commit", lambda event: event.result == "unknown"),
    "world: cycle of unknown outcome, not applied": lambda event: (
        event.op == "commit" and event.result == "unknown" and not event.applied
    ),
    "world: cycle against a full disk": _refused("commit", "store_full"),
    "world: snapshot in a cycle": _applied("commit", lambda event: event.args["cycle"]["snapshot"] is not None),
    "world: snapshot on leaving": _applied("cycle.commit_and_release", lambda event: bool(event.args["cycles"])),
    "world: journal packed": _applied("compact", lambda event: bool(event.value)),
    "world: upkeep fenced": _refused("compact", "fenced"),
    "world: history cut": _applied("history.trim"),
    "world: history cut in parts": _applied("history.trim", lambda event: bool(event.value)),
    "world: cut fenced": _refused("_cut", "fenced"),
    "world: purged": _applied("purge.begin_purge"),
    "world: purge refused, in use": _refused("purge.begin_purge", "world_in_use"),
    "world: erased": _applied("purge.erase", lambda event: not event.value),
    "world: erased in parts": _applied("purge.erase", lambda event: bool(event.value)),
    "world: erased by the leader": _applied("_run_guarded", lambda event: bool(event.args.get("lease"))),
    "world: reducer raised": _applied("commit", lambda event: bool(event.args["cycle"]["failed"])),
    "world: failed event redriven": _applied("queue.redrive", lambda event: event.args["queue"].endswith("failed-events")),
    "world: failed event delivered again": _applied("events.redeliver", lambda event: event.value > 0),
    "world: stopped before an unknown item": _applied("cycle.stop_and_release", lambda event: event.args["seq"] > 0),
    "world: stopped for the code of an entry": _applied("cycle.stop_and_release", lambda event: event.args["height"] > 0),
    "world: parked for want of the code of an entry": _applied(
        "catalog.change_status", lambda event: event.args["event"] == "park"
    ),
    "world: unknown item given up": _applied(
        "commit", lambda event: any(one["code"] == "unknown_event" for one in event.args["cycle"]["failed"])
    ),
    "world: key of an item that waits": _applied(
        "ingress.deliver", lambda event: (event.value["item"] or {}).get("state") == "waiting"
    ),
    "world: key of an item that is dead": _applied(
        "ingress.deliver", lambda event: (event.value["item"] or {}).get("state") == "dead"
    ),
    "world: granted anew": _acquire_answered(lambda one: one["lease"] is not None and one["lease"]["epoch"] > 1),
    "world: held by another": _acquire_answered(lambda one: one["refusal"] == "held"),
    "world: assigned to another": _acquire_answered(lambda one: one["refusal"] == "assigned_to_another"),
    "world: paused, not granted": _acquire_answered(lambda one: one["refusal"] == "paused"),
    "world: parked for a stuck reducer": _applied(
        "hosting_lease.acquire", lambda event: any(parked_as_stuck(event, one) for one in event.value)
    ),
    "world: parked for a fickle reducer": _applied("hosting_lease.park"),
    "world: tried alone": _applied("hosting_lease.mark_isolated"),
    "world: key of an effect refused": _journaled_receipt(lambda receipt: receipt["code"] == "key_conflict"),
    "world: key sent again": _applied("ingress.deliver", lambda event: bool(event.value["already"])),
    "world: key sent with another body": _refused("ingress.deliver", "key_conflict"),
    "world: deleted": _some_record(lambda record: record["status"] == "deleted"),
    "fork: made": _applied("create_fork"),
    "fork: made in one transaction": _applied("fork"),
    "fork: below the parent's head": _applied("fork", lambda event: event.args["at"] > 0),
    "fork: there": _some_record(lambda record: record["lineage"] is not None),
    "worker: drained": _applied("worker_registry.set_draining", lambda event: bool(event.value["draining"])),
    "worker: forgotten": _applied("worker_registry.remove", lambda event: bool(event.value)),
    "orchestrator: placed": _applied("place"),
    "orchestrator: placing fenced": _refused("place", "fenced"),
    "orchestrator: moved": _applied("_move_page"),
    "authority: held by another": _refused("leader_lease.acquire", "already_held_by_other"),
    "authority: taken over": _applied("leader_lease.acquire", lambda event: event.value["epoch"] > 1),
    "authority: lost": lambda event: event.op == "leader_lease.renew" and event.code in ("not_held", "owner_mismatch"),
    "authority: released": _applied("leader_lease.release"),
    "authority: forced": _applied("leader_lease.force_release", lambda event: event.value > 0),
    "authority: marked stale": _applied("leader_lease.mark_stale", lambda event: bool(event.value)),
}  # fmt: skip


def _logged_entry(kind: str, fits: Callable[[bytes], bool] = lambda body: True) -> EventPredicate:
    """Match an entry of a run's log. Its kind follows two length bytes."""
    encoded_kind = kind.encode()
    return lambda event: (
        event.op == "_write"
        and event.applied
        and any(
            body[2 : 2 + len(encoded_kind)] == encoded_kind and fits(body)
            for body in event.args["bodies"]
        )
    )


_LEDGER_POINTS: dict[str, EventPredicate] = {
    "ledger: append fenced": _refused("_write", "fenced"),
    "ledger: append of unknown outcome, applied": _applied("_write", lambda event: event.result == "unknown"),
    "ledger: append of unknown outcome, not applied": lambda event: (
        event.op == "_write" and event.result == "unknown" and not event.applied
    ),
    "ledger: checkpoint": _applied("_write", lambda event: event.args["checkpoint"] is not None),
    "ledger: several entries in one commit": _applied("_write", lambda event: len(event.args["bodies"]) > 1),
    "ledger: truncated": lambda event: event.op == "audit" and any(
        name.startswith("run/") and (found["head"] or {"floor": 1})["floor"] > 1
        for name, found in event.value["journals"].items()
    ),
    **{
        f"ledger: reclaimed, {why}": _logged_entry("reclaimed", lambda body, why=why: why.encode() in body)  # type: ignore[misc]
        for why in ("expired", "closed", "superseded")
    },
    "ledger: retry ripened": _logged_entry("ripened"),
    "ledger: cancelled": _logged_entry("cancelling"),
    "ledger: grace ended": _logged_entry("cancelled"),
    "ledger: halted": _logged_entry("halted"),
    **{
        f"ledger: run {status}": _happened("ledger.over", lambda event, status=status: event.args["status"] == status)  # type: ignore[misc]
        for status in ("finished", "cancelled", "halted")
    },
}  # fmt: skip


def _granted(fits: Callable[[Plain], bool]) -> EventPredicate:
    return lambda event: (
        event.op in ("tasks.report_and_lease", "tasks.lease")
        and event.applied
        and any(
            fits(grant)
            for grant in (event.value if event.op == "tasks.lease" else event.value["leased"])[
                "grants"
            ]
        )
    )


def _report_answered(answer: int) -> EventPredicate:
    return lambda event: (
        event.op in ("tasks.report_and_lease", "tasks.apply_reports")
        and event.applied
        and answer in (event.value if event.op == "tasks.apply_reports" else event.value["answers"])
    )


def _some_task(fits: Callable[[Plain], bool]) -> EventPredicate:
    return OpPredicate(
        "audit",
        lambda event: any(
            fits(row)
            for found in event.value.get("tasks", {}).values()
            for row in found["statuses"].values()
        ),
    )


def _in_wait_state(place: str) -> EventPredicate:
    return lambda event: (
        event.op == "audit" and any(found[place] for found in event.value.get("tasks", {}).values())
    )


_TASK_POINTS: dict[str, EventPredicate] = {
    "task: granted again": _granted(lambda grant: grant["attempt"] > 1),
    "task: granted in a run": _granted(lambda grant: is_range_lease(grant["lease"])),
    "task: suspect granted": _granted(lambda grant: bool(grant["suspect"])),
    "task: report committed": _report_answered(0),
    "task: report cancelled": _report_answered(1),
    "task: report rejected": _report_answered(2),
    "task: extended": _applied("tasks.extend", lambda event: any(event.value)),
    "task: extension refused": _applied("tasks.extend", lambda event: 0 in event.value),
    "task: cancelled": _applied("tasks.cancel", lambda event: True in event.value),
    "task: cancelled too late": _applied("tasks.cancel", lambda event: False in event.value),
    "task: redriven": _applied("tasks.redrive"),
    **{
        f"task: {name}": _some_task(lambda row, state=state: row["state"] == state)  # type: ignore[misc]
        for state, name in ((2, "completed"), (3, "failed"), (4, "dead"))
    },
    "task: died of too many expiries": _some_task(lambda row: row["reason"] == "expiries_exhausted"),
    "task: died of another": _some_task(lambda row: row["reason"] == "dependency_failed"),
    "task: waits for others": _some_task(lambda row: row["waits"] > 0),
    **{f"task: in its place, {place}": _in_wait_state(place) for place in ("ready", "suspect", "parked", "stray", "delayed")},
    "task: log cut": lambda event: event.op == "audit" and any(
        name.startswith("tasks/") and (found["head"] or {"floor": 1})["floor"] > 1
        for name, found in event.value["journals"].items()
    ),
    "task: superseded in making a checkpoint": _applied("tasks_checkpoint.add_chunk", lambda event: not event.value),
}  # fmt: skip


def _flow_head(state: FlowState) -> EventPredicate:
    """Match a commit that writes a flow head in this state."""
    return _flow_rows("heads", lambda head: head["state"] == state)


def _flow_record(kind: str, name: str = "") -> EventPredicate:
    """Match a commit that writes a record of this kind for a step whose name begins with `name`."""
    return _flow_rows(
        "records",
        lambda run: any(
            record["kind"] == kind and record.get("name", "").startswith(name)
            for record in run.values()
        ),
    )


def _occurrence(state: OccurrenceState) -> EventPredicate:
    """An occurrence of a schedule in this state."""
    return OpPredicate(
        "audit",
        lambda event: any(
            row["state"] == state
            for schedules in event.value.get("schedules", {}).values()
            for rows in schedules["occurrences"].values()
            for row in rows.values()
        ),
    )


def _flow_rows(kind: str, fits: Callable[[Plain], bool]) -> EventPredicate:
    return OpPredicate(
        "audit",
        lambda event: any(
            fits(row)
            for flows in event.value.get("flows", {}).values()
            for row in flows[kind].values()
        ),
    )


_FLOW_POINTS: dict[str, EventPredicate] = {
    **{f"flow: in state {state.name}": _flow_head(state) for state in FlowState},
    **{
        f"schedule: occurrence in state {state.name}": _occurrence(state)
        for state in OccurrenceState
        # Its time has come: no row has this state.
        if state is not OccurrenceState.DUE
    },
    "flow: continued as a next run": _flow_rows("heads", lambda head: head["run"] > 1),
    "flow: step failed": _flow_record("failure"),
    "flow: slept": _flow_record("completed", "hf.sleep"),
    "flow: received an event": _flow_record("completed", "hf.receive"),
    "flow: receive timed out": _flow_record("failure", "hf.receive"),
    "flow: compensated": _flow_record("completed", "undo:"),
    "flow: compensation failed": _flow_record("failure", "undo:"),
    "flow: compensation redriven": _flow_record("undo_redriven"),
    "flow: timed out": _flow_record("timed_out"),
    "flow: redriven": _flow_record("redriven"),
    "flow: redriven from the top": _flow_rows("bodies", lambda body: bool(body.get("redrive_of"))),
    "flow: forked at a step": _flow_rows("bodies", lambda body: bool(body.get("fork_at"))),
    "flow: forked at its end": _flow_rows(
        "bodies", lambda body: bool(body.get("fork_of")) and not body["fork_at"]
    ),
    "flow: resumed": _flow_record("resumed"),
    "flow: started by a world": _flow_rows(
        "bodies", lambda body: bool((body.get("parent") or {}).get("intent"))
    ),
    "flow: effect done": _flow_record("completed", "pay"),
    "flow: effect failed": _flow_record("failure", "pay"),
    "flow: abandoned child": _flow_rows(
        "bodies", lambda body: bool((body.get("parent") or {}).get("flow")) and not body["parent"]["cancels"]
    ),
    "flow: commit of a lost lease refused": _refused("flows.commit", "fenced"),
    "flow: event sent with a key": _applied("flows.send", lambda event: bool(event.args["mail"].get("key"))),
}  # fmt: skip

# Counted by actors, not found in events.
_COUNTED_BY_ACTORS = {
    "flow: request repeated",
    "flow: step longer than its lease",
    "flow: worker with an unknown outcome",
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

_EVENT_POINTS = {
    **_PRIMITIVE_POINTS,
    **_EFFECT_POINTS,
    **_WORLD_POINTS,
    **_LEDGER_POINTS,
    **_TASK_POINTS,
    **_FLOW_POINTS,
}
COVERAGE_POINTS: frozenset[str] = frozenset(
    name
    for name in {*_EVENT_POINTS, *_COUNTED_BY_ACTORS}
    if HAS_LEDGER or not name.startswith("ledger: ")
)


def count_coverage(history: History, counted_by_actors: Counter[str]) -> Counter[str]:
    counts = Counter(
        {name: n for name, n in counted_by_actors.items() if name in _COUNTED_BY_ACTORS}
    )
    for event in expand(history):
        for name, matches in _points_of(event.op):
            if matches(event):
                counts[name] += 1
    return counts


@cache
def _points_of(op: str) -> list[tuple[str, EventPredicate]]:
    """Return the conditions that an event of this operation may meet."""
    return [
        (name, matches)
        for name, matches in _EVENT_POINTS.items()
        if not isinstance(matches, OpPredicate) or matches.op == op
    ]


def uncovered_points(counts: Counter[str]) -> list[str]:
    return sorted(name for name in COVERAGE_POINTS if not counts[name])
