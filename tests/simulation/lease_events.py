"""Lease events: the lease effects of world and leader operations, expressed as lease operations.

`hosting_lease.acquire` grants many leases at once, `catalog.change_status` evicts a holder,
`leader_lease.renew` renews a lease. The lease checkers see these as grants, evictions and renewals.
`cycle.commit` commits cycles of many worlds independently and expands to a `commit` for each of
them. `claims.settle_and_claim` expands to settling and claiming. Each such event is followed by its
expansion at the same place of the history.

Three operations occur only inside others:

    lease.leave    released if the caller still holds it; the result does not report which
    lease.evict    taken from its holder, if there is one
    lease.burn     granted and revoked in one transaction, which uses up the epoch
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from holdfast.sim.history import HistoryEvent

FENCED = ("fenced", "not_held", "owner_mismatch")
HELD = ("held", "already_held_by_other")


def expand(events: Iterable[HistoryEvent]) -> Iterator[HistoryEvent]:
    for event in events:
        yield event
        expansion = _EXPANSIONS.get(event.op)
        if expansion is not None:
            yield from expansion(event)


def _expand_acquire(event: HistoryEvent) -> Iterator[HistoryEvent]:
    if not event.applied:
        return
    for answer in event.value:
        resource = f"{event.args['universe']}/{answer['world_id']}"
        asked = {name: event.args[name] for name in ("worker", "incarnation", "ttl_ns")}
        args = {"resource": resource, **asked}
        if answer["lease"] is not None:
            yield _derived_event(event, "lease.acquire", args, value=answer["lease"])
        elif answer["refusal"] == "held":
            refused = {"result": "fail", "value": {"code": "held"}, "commit_no": 0}
            yield _derived_event(event, "lease.acquire", args, **refused)
        elif parked_as_stuck(event, answer):
            yield _derived_event(event, "lease.burn", {"resource": resource})


def parked_as_stuck(event: HistoryEvent, answer: dict[str, Any]) -> bool:
    """Whether this call parked the world because its reducer lost one lease too many."""
    blocker = (answer["record"] or {}).get("blocker")
    return (
        answer["refusal"] == "parked"
        and blocker is not None
        and blocker["code"] == "reducer_stuck"
        and blocker["since_ns"] == event.at_ns
    )


def _expand_cycles(event: HistoryEvent) -> Iterator[HistoryEvent]:
    """Expand a commit of several cycles. Each is applied or refused independently."""
    cycles = event.args["cycles"]
    answers = event.value if event.applied else [None] * len(cycles)
    for cycle, answer in zip(cycles, answers, strict=True):
        args = {"cycle": cycle, "lease": cycle["lease"]}
        if answer is not None:
            error = {"code": answer[0]}
            yield _derived_event(event, "commit", args, result="fail", value=error, commit_no=0)
        elif event.result == "fail":
            yield _derived_event(event, "commit", args, value=event.value)
        else:
            yield _derived_event(event, "commit", args)


def _expand_cycle(event: HistoryEvent) -> Iterator[HistoryEvent]:
    cycle = event.args["cycle"]
    yield _derived_event(
        event, "commit", {"cycle": cycle, "lease": cycle["lease"]}, value=event.value
    )


def _expand_settle_and_claim(event: HistoryEvent) -> Iterator[HistoryEvent]:
    if event.applied:
        yield _derived_event(event, "queue.finish_batch", event.args, value=event.value["ends"])
        yield _derived_event(event, "claims.claim_batch", event.args, value=event.value["taken"])


def _expand_shutdown(event: HistoryEvent) -> Iterator[HistoryEvent]:
    """Expand a shutdown: final snapshots and released leases, each if still possible."""
    if event.applied:
        for lease in event.args["held"]:
            yield _derived_event(event, "lease.leave", {"lease": lease})


def _expand_flow_commits(event: HistoryEvent) -> Iterator[HistoryEvent]:
    """Expand a commit of several flows. A refused one applies nothing, and its commits follow one by one."""
    if event.applied:
        for work, answer in zip(event.args["works"], event.value, strict=True):
            args = {"universe": event.args["universe"], "work": work}
            yield _derived_event(event, "flows.commit", args, value=answer)


def _expand_stop(event: HistoryEvent) -> Iterator[HistoryEvent]:
    """Expand a stop: a world released at an event type that its host does not know."""
    if event.applied:
        yield _derived_event(event, "lease.release", {"lease": event.args["held"]})


def _expand_change(event: HistoryEvent) -> Iterator[HistoryEvent]:
    if event.applied and event.args.get("event") != "resume":
        resource = f"{event.args['universe']}/{event.args['world_id']}"
        yield _derived_event(event, "lease.evict", {"resource": resource})


def _expand_leader_acquire(event: HistoryEvent) -> Iterator[HistoryEvent]:
    args = event.args
    asked = {
        "resource": _leader_lease_resource(event),
        "worker": args["owner"],
        "incarnation": args["incarnation"],
        "ttl_ns": args["ttl_ns"],
    }
    if event.applied:
        yield _derived_event(event, "lease.acquire", asked, value=event.value)
    elif event.code in HELD:
        yield _derived_event(event, "lease.acquire", asked, value={"code": "held"})


def _expand_leader_renew(event: HistoryEvent) -> Iterator[HistoryEvent]:
    asked = {"leases": [event.args["lease"]], "ttl_ns": event.args["ttl_ns"]}
    if event.applied:
        yield _derived_event(event, "lease.renew", asked, value=[event.value])
    elif event.code in FENCED:
        yield _derived_event(event, "lease.renew", asked, result="ok", value=[None])


def _expand_leader_release(event: HistoryEvent) -> Iterator[HistoryEvent]:
    if event.applied:
        yield _derived_event(event, "lease.release", {"lease": event.args["lease"]})
    elif event.code in FENCED:
        error = {"code": "fenced"}
        yield _derived_event(event, "lease.release", {"lease": event.args["lease"]}, value=error)


def _expand_mark_stale(event: HistoryEvent) -> Iterator[HistoryEvent]:
    if event.applied:
        yield _derived_event(
            event,
            "lease.mark_stale",
            {"resource": _leader_lease_resource(event)},
            value=event.value,
        )


def _expand_force_release(event: HistoryEvent) -> Iterator[HistoryEvent]:
    if event.applied and event.value:
        resource = {"resource": _leader_lease_resource(event)}
        yield _derived_event(event, "lease.force_release", resource, value=event.value)


def _leader_lease_resource(event: HistoryEvent) -> str:
    return f"{event.args['universe']}/authority"


def _derived_event(
    event: HistoryEvent, op: str, args: dict[str, Any], **changes: Any
) -> HistoryEvent:
    return replace(event, op=op, args=args, **{"value": None, **changes})


_EXPANSIONS: dict[str, Callable[[HistoryEvent], Iterator[HistoryEvent]]] = {
    "cycle.commit": _expand_cycles,
    "cycle.apply": _expand_cycle,
    "cycle.commit_and_release": _expand_shutdown,
    "cycle.stop_and_release": _expand_stop,
    "claims.settle_and_claim": _expand_settle_and_claim,
    "flows.commit_many": _expand_flow_commits,
    "hosting_lease.acquire": _expand_acquire,
    "hosting_lease.park": _expand_change,
    "catalog.change_status": _expand_change,
    "purge.begin_purge": _expand_change,
    "leader_lease.acquire": _expand_leader_acquire,
    "leader_lease.renew": _expand_leader_renew,
    "leader_lease.release": _expand_leader_release,
    "leader_lease.mark_stale": _expand_mark_stale,
    "leader_lease.force_release": _expand_force_release,
}
