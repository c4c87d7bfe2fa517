"""Checkers of effects, timers and mail: each fails on a history that is wrong in its way."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from holdfast.clock import S
from holdfast.sim import check_app
from holdfast.sim.checkers import CHECKERS, check_all
from tests.sim.universe import SUBJECT, Universe, W, came, event, pack, paid, receipt, record, row

QUOTES = "u/effects/fx.quote"
MAILS = "u/effects/fabric.send"
DELAYS, CALENDAR = "u/timers", "u/timers/calendar"
KEY = "1-key"


def ordered(key: str | None = None, id: str = "o") -> Universe:
    """An effect wanted, and in its queue."""
    wanted = event("Ordered", id=id, what="a", key=key)
    u = Universe().granted(1).sent(2, 1, wanted).cycle(3, wanted)
    return u.waits(u.wants[0], QUOTES)


def claimed(u: Universe, at_s: float, number: int = 1, owner: str = "p", **more: Any) -> Universe:
    token = {"queue": QUOTES, "seq": 1, "number": number, "owner": owner}
    claim = {
        **token,
        "expires_ns": int((at_s + 5) * S),
        "failures": 0,
        "expiries": number - 1,
        "payload": u.rows["queues"][QUOTES]["items"][1]["payload"],
        "blob": b"",
        **more,
    }
    return u.did(at_s, "claims.take", {"queue": QUOTES}, {"items": [claim], "timers": []})


def called(u: Universe, at_s: float, n: int = 1, key: str = KEY, **more: Any) -> Universe:
    args = {"n": n, "kind": "fx.quote", "key": key, "attempt": 1, "world": W, "args": ["a", "o"]}
    u.history.add(int(at_s * S), "effect.call", {**args, **more}, actor="p", incarnation="1")
    return u


def settled(u: Universe, at_s: float, number: int = 1, owner: str = "p") -> Universe:
    token = {"queue": QUOTES, "seq": 1, "number": number, "owner": owner}
    return u.did(at_s, "queue.settle", {"acks": [token], "fails": [], "then": []}, ["done"])


def done(**told: Any) -> Universe:
    """An effect wanted, claimed, called, and its receipt in the inbox."""
    u = called(claimed(ordered(), 4), 5)
    settled(u, 6).ended(QUOTES)
    return u.arrived(receipt(u.wants[0], **{"value": pack(1.0), **told}))


def cancelled(ask: bool = True) -> Universe:
    bought = event("Bought", id="o", what="a", key=None, priority=0)
    u = Universe().granted(1).sent(2, 1, bought).cycle(3, bought)
    if ask:
        regret = event("Regretted", id="r", nth=0)
        u.sent(4, 2, regret).cycle(5, regret)
    return u.arrived(receipt(u.wants[0], status="error", code="cancelled", attempts=0))


def slept(seconds: int = 10) -> Universe:
    """A timer set at 3 s, and waiting."""
    wanted = event("Slept", id="s", seconds=seconds, key="t0")
    u = Universe().granted(1).sent(2, 1, wanted).cycle(3, wanted)
    return u.waits(u.wants[0], DELAYS)


def fired(u: Universe, at_s: float, wall_s: float = 0, queue: str = DELAYS) -> Universe:
    """A timer worker fires, and the timer's event is in the inbox."""
    args = {"universe": "u", "wall_ns": int(wall_s * S), "limit": 9}
    u.did(at_s, "firing.fire_due", args, 1).ended(queue)
    return u.arrived(came("timer", "Paid", paid("s~", 1)[2], u.wants[0].hash))


def alarm(u: Universe, wall_s: float = 0, queue: str = DELAYS) -> dict[str, Any]:
    """What a cycle says of a timer that it tells its world."""
    place = {"queue": queue, "seq": 1, "slot": "t0", "wall_ns": int(wall_s * S)}
    return {"token": None, "intent_hash": u.wants[0].hash, "alarm": place}


def rang(u: Universe, at_s: float, wall_s: float = 0, queue: str = DELAYS) -> Universe:
    """The timer's event is journaled in the commit that takes it off, and was in no inbox."""
    told = came("timer", "Paid", paid("s~", 1)[2], u.wants[0].hash)
    return u.cycle(at_s, told, carried=[alarm(u, wall_s, queue)]).ended(queue)


def rang_and_replaced() -> Universe:
    """A timer is set anew in the cycle in which the old one is told: that has rung before."""
    u = slept(5)
    again = event("Slept", id="s2", seconds=30, key="t0")
    told = came("timer", "Paid", paid("s~", 1)[2], u.wants[0].hash)
    u.sent(8, 2, again).cycle(8.5, again, told, carried=[alarm(u)]).ended(DELAYS)
    return u.waits(u.wants[1], DELAYS, 2)


def replaced_and_rang() -> Universe:
    """A timer is told in a later cycle than the one in which it was set anew."""
    u = slept(5)
    again = event("Slept", id="s2", seconds=30, key="t0")
    rang(u.sent(4, 2, again).cycle(5, again).ended(DELAYS), 8.5)
    return u.waits(u.wants[1], DELAYS, 2)


def fired_and_rang() -> Universe:
    """A timer is in the inbox already, and its world is told once more."""
    u = fired(slept(5), 8.2)
    told = came("timer", "Paid", paid("s~", 1)[2], u.wants[0].hash)
    return u.cycle(8.5, told, told, carried=[alarm(u)])


def rang_unheard() -> Universe:
    """A timer is taken off by a cycle that tells something else."""
    u = slept(5)
    other = paid("p", 1)
    return u.sent(8, 2, other).cycle(8.5, other, carried=[alarm(u)]).ended(DELAYS)


def dated() -> Universe:
    """A timer by the calendar, at 107 s, for the account's clock is at 7 ns."""
    wanted = event("Dated", id="s", seconds=107, key="t0")
    u = Universe().granted(1).sent(2, 1, wanted).cycle(3, wanted)
    return u.waits(u.wants[0], CALENDAR)


def ticked(missed: str) -> Universe:
    """A timer that repeats each minute, fired an hour after its first time; the next one waits."""
    wanted = event("Ticked", id="s", rule="*/1 * * * *", missed=missed, key="t0")
    u = Universe().granted(1).sent(2, 1, wanted).cycle(3, wanted)
    u.waits(u.wants[0], CALENDAR)
    args = {"universe": "u", "wall_ns": 3660 * S, "limit": 9}
    u.did(9, "firing.fire_due", args, 1).ended(CALENDAR)
    following = check_app.digest(b"every", u.wants[0].hash, (3720 * S).to_bytes(8, "big"))
    again = check_app.Want(following, "timer.set", u.wants[0].params)
    return u.waits(again, CALENDAR, 2)


def told_of(u: Universe) -> Universe:
    return u.arrived(came("timer", "Paid", paid("s~", 1)[2], u.wants[0].hash))


def moved(*mails: int) -> Universe:
    """Money moved to another account, whose inbox has so many of the message."""
    wanted = event("Moved", id="m", amount=2, to="w2")
    u = Universe().granted(1).sent(2, 1, wanted).cycle(3, wanted)
    [want] = u.wants
    mail = came("fabric", "Paid", paid("m>", 2)[2], want.hash, from_world=W, from_height=1)
    rows = {seq: row(None, mail) for seq in mails}
    u.rows["inboxes"]["u/w2"] = {"rows": rows, "cursor": 0, "last_seq": len(rows)}
    catalog = u.rows["worlds"]["u"]
    catalog["records"]["w2"] = record("w2")
    catalog["names"]["Account/w2"] = "w2"
    catalog["counts"]["active"] = 2
    catalog["hints"].append(["", "w2"])
    return u


def forked(policy: str, u: Universe | None = None, *, of: str = W, name: str = "c1") -> Universe:
    """A fork of an account that waits for an effect, or of its fork."""
    u = u or ordered()
    height = u.height
    state = check_app.stored(u.states[height])
    hash = hashlib.sha256(state).digest()
    lineage = {"parent_world_id": of, "parent_snapshot_hash": hash, "forked_at_height": height}
    made = record(name, lineage=lineage)
    u.did(6, "fork", {"name": name, "child_id": name, "effects": policy}, made)
    catalog = u.rows["worlds"]["u"]
    catalog["records"][name] = made
    catalog["names"][f"Account/{name}"] = name
    catalog["counts"]["active"] += 1
    catalog["hints"].append(["", name])
    chain = u.rows["journals"][SUBJECT]["entries"][height]["hash"]
    head = {"height": height, "hash": chain, "checkpoint": height, "floor": height + 1}
    rows = {"head": {**head, "below": chain, "packed": 0}, "entries": {}, "doubled": []}
    u.rows["journals"][f"u/{name}"] = rows
    saved = {"hash": b"", "at_ns": 0, "bytes": 0, "state": state}
    baseline = {"height": height, "hash": b""}
    u.rows["snapshots"][f"u/{name}"] = {"states": {height: saved}, "baseline": baseline}
    return u


def in_fork(u: Universe, name: str = "c1", **told: Any) -> Universe:
    rows = {1: row(None, receipt(u.wants[0], **told))}
    u.rows["inboxes"][f"u/{name}"] = {"rows": rows, "cursor": 0, "last_seq": 1}
    return u


def forked_twice(*, told: bool) -> Universe:
    """A fork that is told what it does not get, forked before it has read that."""
    dropped = {"status": "error", "code": "dropped_by_fork"}
    u = forked("reissue", in_fork(forked("fail"), **dropped), of="c1", name="c2")
    return in_fork(u, "c2", **dropped) if told else u


def deleted(u: Universe) -> Universe:
    args = {"universe": "u", "world_id": W, "event": "delete"}
    return u.did(7, "catalog.change", args, record(W, status="deleted"))


def granted(u: Universe, at_s: float, from_s: float, slot_ns: int = 210_000_000) -> Universe:
    block = {"from_ns": int(from_s * S), "slot_ns": slot_ns, "tokens": 2}
    return u.did(at_s, "rate.grant", {"queue": QUOTES, "rate_per_s": 5.0, "wanted": 2}, block)


RIGHT: dict[str, Callable[[], Universe]] = {
    "an effect that waits": ordered,
    "an effect that is done": done,
    "an effect that is cancelled": cancelled,
    "an effect called twice, with one key": lambda: called(done(), 7, 2),
    "a call of a life of the store that is over": lambda: called(done(), 7, 2, "0-x", late=True),
    "a timer that waits": slept,
    "a timer that fired": lambda: fired(slept(), 13),
    "a timer of the calendar": lambda: fired(dated(), 4, 107.5, CALENDAR),
    "a timer told in its world's commit": lambda: rang(slept(5), 8.5),
    "a timer of the calendar, told in its world's commit": lambda: rang(
        dated(), 4, 107.5, CALENDAR
    ),
    "a timer told in the commit that sets it anew": rang_and_replaced,
    "a timer that repeats": lambda: told_of(ticked("one")),
    "a timer that skips what it missed": lambda: ticked("skip"),
    "mail": lambda: (u := moved(1)).arrived(receipt(u.wants[0])),
    "a fork that is told": lambda: in_fork(forked("fail"), status="error", code="dropped_by_fork"),
    "a fork that inherits nothing": lambda: forked("drop"),
    "a fork of what was cancelled": lambda: in_fork(
        forked("fail", cancelled()), status="error", code="cancelled"
    ),
    "a fork of a fork that is told": lambda: forked_twice(told=True),
    "a key that is refused": lambda: refused(1),
    "tokens of a rate": lambda: granted(granted(ordered(), 4, 4), 4.1, 4.42),
}

WRONG: list[tuple[str, str, Callable[[], Universe]]] = [
    ("E1", "an effect has two receipts", lambda: (u := done()).arrived(receipt(u.wants[0], value=pack(1.0)))),
    ("E1", "an effect has its receipt, and waits", lambda: (u := done()).waits(u.wants[0], QUOTES, 2)),
    ("E1", "an effect is done, and nobody told", lambda: settled(claimed(ordered(), 4), 5).ended(QUOTES)),
    ("E1", "an effect waits, and nobody knows", lambda: ordered().audit("worlds", "u", "pending", to={})),
    ("E1", "an effect is cancelled that is wanted", lambda: cancelled(ask=False)),
    ("E1", "a cancelled effect is still to be done", lambda: (u := cancelled()).waits(u.wants[0], "u/effects/fx.pay")),
    ("E1", "a receipt says error, and not why", lambda: done(status="error", value=b"")),
    ("E1", "a receipt says error for a time-out", lambda: done(status="error", code="timeout", value=b"")),
    ("E1", "a key was refused, and nobody told", lambda: refused(0)),
    ("E1", "a key was refused once, and told twice", lambda: refused(2)),
    ("E1", "a refusal under the name of what the key stands for", lambda: refused(1, "hash")),
    ("E1", "a refusal that says that it was done", lambda: refused(1, status="ok", code="", value=pack(1.0))),
    ("E1", "an effect of a deleted world is begun", lambda: claimed(deleted(ordered()), 8)),
    ("E1", "a deleted world gets a receipt", lambda: in_the_grave()),
    ("E1", "mail is delivered, and its sender not told", lambda: moved(1)),
    ("E2", "a receipt under a claim that another has", lambda: settled(claimed(claimed(ordered(), 4), 10, 2, "q"), 11)),
    ("E2", "a receipt under a claim that ran out", lambda: settled(claimed(ordered(), 4), 9.5)),
    ("E2", "a receipt under the claim's number, by another", lambda: settled(claimed(ordered(), 4), 5, 1, "q")),
    ("E2", "a receipt under no claim", lambda: settled(settled(claimed(ordered(), 4), 5), 6)),
    ("E3", "an effect is called again with another key", lambda: called(done(), 7, 2, "1-other")),
    ("E3", "two effects are called with one key", lambda: called(done(), 7, 2, args=["b", "p"])),
    ("E3", "a call has no key", lambda: called(done(), 7, 2, "")),
    ("E3", "a receipt of a call that nobody made", lambda: done(value=pack(9.0))),
    ("E3", "a receipt of another's call", lambda: called(done(value=pack(2.0)), 7, 2, "k", args=["b", "p"])),
    ("T1", "a timer fired early", lambda: fired(slept(), 12.9)),
    ("T1", "a timer fired twice", lambda: told_of(fired(slept(), 13))),
    ("T1", "a timer fired, and waits", lambda: (u := fired(slept(), 13)).waits(u.wants[0], DELAYS, 2)),
    ("T1", "a timer is gone", lambda: slept().ended(DELAYS)),
    ("T1", "a timer of the calendar fired early by the wall", lambda: fired(dated(), 400, 106.5, CALENDAR)),
    ("T1", "a timer that was replaced fired", lambda: replaced()),
    ("T1", "a timer is told in its world's commit, early", lambda: rang(slept(5), 7.9)),
    ("T1", "a timer of the calendar is told in its world's commit, early", lambda: rang(dated(), 4, 106.5, CALENDAR)),
    ("T1", "a timer is told in its world's commit, and waits", lambda: (u := rang(slept(5), 8.5)).waits(u.wants[0], DELAYS)),
    ("T1", "a timer is told in two commits of its world", lambda: rang(rang(slept(5), 8.5), 9)),
    ("T1", "a timer is fired, and told in its world's commit", lambda: fired_and_rang()),
    ("T1", "a timer that was replaced is told in its world's commit", lambda: replaced_and_rang()),
    ("T1", "a timer is taken off by a commit that does not tell it", lambda: rang_unheard()),
    ("L3", "a timer is told under a lease that ran out", lambda: rang(slept(9), 12.5)),
    ("T1", "a timer of the calendar waits for store time", lambda: (u := dated()).ended(CALENDAR).waits(u.wants[0], DELAYS)),
    ("T1", "what was missed is told, and was to be skipped", lambda: told_of(ticked("skip"))),
    ("T1", "an occurrence is over, and nobody told", lambda: ticked("one")),
    ("T1", "a timer that repeats does not wait again", lambda: told_of(ticked("one")).ended(CALENDAR)),
    ("T1", "a slot holds what is gone", lambda: fired(slept(), 13).audit("worlds", "u", "slots", to=slept().rows["worlds"]["u"]["slots"])),
    ("F1", "mail is there twice", lambda: (u := moved(1, 2)).arrived(receipt(u.wants[0]))),
    ("F1", "mail is there, and still to be sent", lambda: (u := moved(1)).waits(u.wants[0], MAILS)),
    ("K1", "a fork is not told what it does not get", lambda: forked("fail")),
    ("K1", "a fork is not told what was cancelled", lambda: forked("fail", cancelled())),
    ("K1", "a fork is told that it was dropped what was cancelled", lambda: in_fork(forked("fail", cancelled()), status="error", code="dropped_by_fork")),
    ("K1", "a fork of a fork is not told what that does not get", lambda: forked_twice(told=False)),
    ("K1", "a fork gets a receipt of its parent's", lambda: in_fork(forked("drop"), value=pack(1.0))),
    ("J1", "a timer that no entry set", lambda: told_of(ordered())),
    ("D1", "an effect is done, and its claim still there", lambda: kept(expiry=True)),
    ("D1", "an effect is done, and waits again", lambda: kept(expiry=False)),
    ("D2", "an effect waits in two places", lambda: ordered().audit("queues", QUOTES, "delayed", to=[[9, 1]])),
    ("S3", "an effect is claimed with fewer expiries than it had", lambda: claimed(claimed(ordered(), 4), 10, 2, "q", expiries=0)),
    ("A2", "two pools have the same tokens", lambda: granted(granted(ordered(), 4, 4), 4.1, 4.3)),
    ("A2", "tokens of the past", lambda: granted(ordered(), 4, 3)),
    ("A2", "more tokens in a second than the rate", lambda: granted(ordered(), 4, 4, slot_ns=190_000_000)),
]  # fmt: skip


def refused(times: int, name: str = "place", **told: Any) -> Universe:
    """The same key for something else, and so many words about it."""
    u = ordered("k0")
    other = event("Ordered", id="p", what="b", key="k0")
    u.sent(4, 2, other).cycle(5, other)
    want = replace(u.wants[1], hash=getattr(u.wants[1], name))
    conflict = receipt(want, **{"status": "error", "code": "key_conflict", **told})
    return u.arrived(*[conflict] * times)


def replaced() -> Universe:
    """A timer set again before its time, and the first one fires all the same."""
    u = slept()
    again = event("Slept", id="s2", seconds=30, key="t0")
    u.sent(4, 2, again).cycle(5, again).ended(DELAYS)
    fired(u, 14)
    return u.waits(u.wants[1], DELAYS, 2)


def in_the_grave() -> Universe:
    u = deleted(ordered())
    catalog = u.rows["worlds"]["u"]
    catalog["records"][W] = record(W, status="deleted")
    catalog["names"], catalog["counts"] = {}, {"deleted": 1}
    u.ended(QUOTES).audit(at_s=40)
    return u.arrived(receipt(u.wants[0], status="error", code="never")).audit(at_s=41)


def kept(*, expiry: bool) -> Universe:
    """Acknowledged, and something of it left behind."""
    u = done()
    rows = u.rows["queues"][QUOTES]
    if expiry:
        rows["expiry"], rows["owners"] = [[9, 1]], [["p", 1]]
        return u
    rows.update(ordered().rows["queues"][QUOTES])
    return u


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_history_is_right(name: str) -> None:
    assert check_all(RIGHT[name]().audit().history) == []


@pytest.mark.parametrize(("number", "what", "make"), WRONG, ids=[f"{n}: {w}" for n, w, _ in WRONG])
def test_a_wrong_history_is_found_out(number: str, what: str, make: Callable[[], Universe]) -> None:
    u = make()
    if u.history.events[-1].op != "audit":
        u.audit()
    found = CHECKERS[number](u.history)
    assert [violation.number for violation in found][:1] == [number]


@pytest.mark.parametrize("queue", [DELAYS, CALENDAR])
def test_a_timer_that_is_overdue_when_all_is_at_rest_is_found_out(queue: str) -> None:
    u = slept() if queue == DELAYS else dated()
    u.rows["queues"][queue]["items"][1]["not_before_ns"] = 13 * S
    u.did(60, "quiet", {"waiting": []}, True)
    u.audit(at_s=61)
    late = 20 * S if queue == CALENDAR else 0
    u.history.events[-1].args["wall_ns"] = late
    assert [one.number for one in CHECKERS["T2"](u.history)] == ["T2"]


def test_a_timer_of_the_calendar_is_not_overdue_by_store_time() -> None:
    u = dated()
    u.rows["queues"][CALENDAR]["items"][1]["not_before_ns"] = 13 * S
    u.did(60, "quiet", {"waiting": []}, True).audit(at_s=61)
    u.history.events[-1].args["wall_ns"] = 12 * S
    assert CHECKERS["T2"](u.history) == []
