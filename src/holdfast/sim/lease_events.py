"""What operations of worlds and of authority do to leases, told as lease operations.

`tenure.acquire` grants many leases at once, `catalog.change` takes one away, `authority.renew` renews
one: to the checkers of leases these are grants, evictions and renewals like any other. And
`cycle.commit` commits cycles of many worlds, each by itself: a `commit` for each of them; `claims.turn`
settles and claims. Each such event is followed by what it did, in the same place of the history.

Besides the operations of `durable.lease` there are three that only happen inside others:

    lease.leave    released, if it is still the holder's; nobody is told whether it was
    lease.evict    taken from whoever has it, if anybody has
    lease.burn     granted and taken away in one transaction: the epoch is used up
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from holdfast.sim.history import Event

FENCED = ("fenced", "not_held", "owner_mismatch")
HELD = ("held", "already_held_by_other")


def expanded(events: Iterable[Event]) -> Iterator[Event]:
    for event in events:
        yield event
        told = _TOLD.get(event.op)
        if told is not None:
            yield from told(event)


def _acquired(event: Event) -> Iterator[Event]:
    if not event.applied:
        return
    for answer in event.value:
        resource = f"{event.args['universe']}/{answer['world_id']}"
        asked = {name: event.args[name] for name in ("worker", "incarnation", "ttl_ns")}
        args = {"resource": resource, **asked}
        if answer["lease"] is not None:
            yield _as(event, "lease.acquire", args, value=answer["lease"])
        elif answer["refusal"] == "held":
            refused = {"result": "fail", "value": {"code": "held"}, "commit_no": 0}
            yield _as(event, "lease.acquire", args, **refused)
        elif stuck_now(event, answer):
            yield _as(event, "lease.burn", {"resource": resource})


def stuck_now(event: Event, answer: dict[str, Any]) -> bool:
    """Whether this very call parked the world: for a reducer that lost one lease too many."""
    blocker = (answer["record"] or {}).get("blocker")
    return (
        answer["refusal"] == "parked"
        and blocker is not None
        and blocker["code"] == "reducer_stuck"
        and blocker["since_ns"] == event.at_ns
    )


def _cycled(event: Event) -> Iterator[Event]:
    """The cycles of one call, each applied, or refused for a reason of its own."""
    cycles = event.args["cycles"]
    answers = event.value if event.applied else [None] * len(cycles)
    for cycle, answer in zip(cycles, answers, strict=True):
        args = {"cycle": cycle, "lease": cycle["lease"]}
        if answer is not None:
            told = {"code": answer[0]}
            yield _as(event, "commit", args, result="fail", value=told, commit_no=0)
        elif event.result == "fail":
            yield _as(event, "commit", args, value=event.value)
        else:
            yield _as(event, "commit", args)


def _cycled_alone(event: Event) -> Iterator[Event]:
    cycle = event.args["cycle"]
    yield _as(event, "commit", {"cycle": cycle, "lease": cycle["lease"]}, value=event.value)


def _turned(event: Event) -> Iterator[Event]:
    if event.applied:
        yield _as(event, "queue.settle", event.args, value=event.value["ends"])
        yield _as(event, "claims.take", event.args, value=event.value["taken"])


def _left(event: Event) -> Iterator[Event]:
    """The last snapshots, and the leases given back: each if it can be."""
    if event.applied:
        for lease in event.args["held"]:
            yield _as(event, "lease.leave", {"lease": lease})


def _stopped(event: Event) -> Iterator[Event]:
    """A world given back before an item that its host does not know."""
    if event.applied:
        yield _as(event, "lease.release", {"lease": event.args["held"]})


def _changed(event: Event) -> Iterator[Event]:
    if event.applied and event.args.get("event") != "resume":
        resource = f"{event.args['universe']}/{event.args['world_id']}"
        yield _as(event, "lease.evict", {"resource": resource})


def _led(event: Event) -> Iterator[Event]:
    args = event.args
    asked = {
        "resource": _authority(event),
        "worker": args["owner"],
        "incarnation": args["incarnation"],
        "ttl_ns": args["ttl_ns"],
    }
    if event.applied:
        yield _as(event, "lease.acquire", asked, value=event.value)
    elif event.code in HELD:
        yield _as(event, "lease.acquire", asked, value={"code": "held"})


def _led_on(event: Event) -> Iterator[Event]:
    asked = {"leases": [event.args["lease"]], "ttl_ns": event.args["ttl_ns"]}
    if event.applied:
        yield _as(event, "lease.renew", asked, value=[event.value])
    elif event.code in FENCED:
        yield _as(event, "lease.renew", asked, result="ok", value=[None])


def _stepped_down(event: Event) -> Iterator[Event]:
    if event.applied:
        yield _as(event, "lease.release", {"lease": event.args["lease"]})
    elif event.code in FENCED:
        told = {"code": "fenced"}
        yield _as(event, "lease.release", {"lease": event.args["lease"]}, value=told)


def _marked(event: Event) -> Iterator[Event]:
    if event.applied:
        yield _as(event, "lease.mark_stale", {"resource": _authority(event)}, value=event.value)


def _forced(event: Event) -> Iterator[Event]:
    if event.applied and event.value:
        resource = {"resource": _authority(event)}
        yield _as(event, "lease.force_release", resource, value=event.value)


def _authority(event: Event) -> str:
    return f"{event.args['universe']}/authority"


def _as(event: Event, op: str, args: dict[str, Any], **changes: Any) -> Event:
    return replace(event, op=op, args=args, **{"value": None, **changes})


_TOLD: dict[str, Callable[[Event], Iterator[Event]]] = {
    "cycle.commit": _cycled,
    "cycle.apply": _cycled_alone,
    "cycle.leave": _left,
    "cycle.stop": _stopped,
    "claims.turn": _turned,
    "tenure.acquire": _acquired,
    "tenure.park": _changed,
    "catalog.change": _changed,
    "purge.begin": _changed,
    "authority.acquire": _led,
    "authority.renew": _led_on,
    "authority.release": _stepped_down,
    "authority.mark_stale": _marked,
    "authority.force_release": _forced,
}
