"""Checkers of effects, timers and mail accept valid histories and report each violation."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from holdfast.clock import S
from tests.sim.universe_history import (
    SUBJECT,
    WORLD_ID,
    UniverseHistory,
    event,
    inbox_row,
    make_ingress,
    pack,
    paid,
    receipt,
    world_record,
)
from tests.simulation import model_app
from tests.simulation.checkers import CHECKERS, check_all

QUOTES = "u/effects/fx.quote"
MAILS = "u/effects/fabric.send"
DELAY_TIMERS, CALENDAR_TIMERS = "u/timers", "u/timers/calendar"
KEY = "1-key"


def ordered(key: str | None = None, id: str = "o") -> UniverseHistory:
    """An effect intent in its queue."""
    order_event = event("Ordered", id=id, what="a", key=key)
    u = UniverseHistory().granted(1).sent(2, 1, order_event).cycle(3, order_event)
    return u.put_in_queue(u.intents[0], QUOTES)


def claimed(
    u: UniverseHistory, at_s: float, number: int = 1, owner: str = "p", **more: Any
) -> UniverseHistory:
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
    return u.committed(
        at_s, "claims.claim_batch", {"request": {"queue": QUOTES}}, {"items": [claim], "timers": []}
    )


def called(
    u: UniverseHistory, at_s: float, n: int = 1, key: str = KEY, **more: Any
) -> UniverseHistory:
    args = {
        "n": n,
        "kind": "fx.quote",
        "key": key,
        "attempt": 1,
        "world": WORLD_ID,
        "args": ["a", "o"],
    }
    u.history.add(int(at_s * S), "effect.call", {**args, **more}, actor="p", incarnation="1")
    return u


def settled(u: UniverseHistory, at_s: float, number: int = 1, owner: str = "p") -> UniverseHistory:
    token = {"queue": QUOTES, "seq": 1, "number": number, "owner": owner}
    return u.committed(
        at_s, "queue.finish_batch", {"acks": [token], "fails": [], "operations": []}, ["done"]
    )


def done(**overrides: Any) -> UniverseHistory:
    """An effect claimed, called and acked, with its receipt in the inbox."""
    u = called(claimed(ordered(), 4), 5)
    settled(u, 6).empty_queue(QUOTES)
    return u.put_in_inbox(receipt(u.intents[0], **{"value": pack(1.0), **overrides}))


def cancelled(with_cancel_event: bool = True) -> UniverseHistory:
    bought = event("Bought", id="o", what="a", key=None, priority=0)
    u = UniverseHistory().granted(1).sent(2, 1, bought).cycle(3, bought)
    if with_cancel_event:
        regret = event("Regretted", id="r", nth=0)
        u.sent(4, 2, regret).cycle(5, regret)
    return u.put_in_inbox(receipt(u.intents[0], status="error", code="cancelled", attempts=0))


def timer_set(seconds: int = 10) -> UniverseHistory:
    """A timer set at 3 s, in its queue."""
    set_event = event("Slept", id="s", seconds=seconds, key="t0")
    u = UniverseHistory().granted(1).sent(2, 1, set_event).cycle(3, set_event)
    return u.put_in_queue(u.intents[0], DELAY_TIMERS)


def timer_fired(
    u: UniverseHistory, at_s: float, wall_s: float = 0, queue: str = DELAY_TIMERS
) -> UniverseHistory:
    """The timer worker fires the timer and puts its event into the inbox."""
    args = {"universe": "u", "wall_ns": int(wall_s * S), "limit": 9}
    u.committed(at_s, "timers.deliver_due", args, 1).empty_queue(queue)
    return u.put_in_inbox(make_ingress("timer", "Paid", paid("s~", 1)[2], u.intents[0].hash))


def fused_timer(u: UniverseHistory, wall_s: float = 0, queue: str = DELAY_TIMERS) -> dict[str, Any]:
    """Record of a timer in the fused part of a cycle."""
    timer_row = {"queue": queue, "seq": 1, "slot": "t0", "wall_ns": int(wall_s * S)}
    return {"token": None, "intent_hash": u.intents[0].hash, "alarm": timer_row}


def timer_in_cycle(
    u: UniverseHistory, at_s: float, wall_s: float = 0, queue: str = DELAY_TIMERS
) -> UniverseHistory:
    """A fused commit removes the timer and journals its event without the inbox."""
    timer_event = make_ingress("timer", "Paid", paid("s~", 1)[2], u.intents[0].hash)
    return u.cycle(at_s, timer_event, fused=[fused_timer(u, wall_s, queue)]).empty_queue(queue)


def timer_replaced_in_its_cycle() -> UniverseHistory:
    """A cycle journals the event of a timer and replaces the timer. The old timer was due before."""
    u = timer_set(5)
    second_set = event("Slept", id="s2", seconds=30, key="t0")
    timer_event = make_ingress("timer", "Paid", paid("s~", 1)[2], u.intents[0].hash)
    u.sent(8, 2, second_set).cycle(
        8.5, second_set, timer_event, fused=[fused_timer(u)]
    ).empty_queue(DELAY_TIMERS)
    return u.put_in_queue(u.intents[1], DELAY_TIMERS, 2)


def timer_in_cycle_after_replacement() -> UniverseHistory:
    """A cycle journals the event of a timer that an earlier cycle replaced."""
    u = timer_set(5)
    second_set = event("Slept", id="s2", seconds=30, key="t0")
    timer_in_cycle(u.sent(4, 2, second_set).cycle(5, second_set).empty_queue(DELAY_TIMERS), 8.5)
    return u.put_in_queue(u.intents[1], DELAY_TIMERS, 2)


def timer_fired_and_in_cycle() -> UniverseHistory:
    """The event of a timer is in the inbox, and a cycle journals it a second time."""
    u = timer_fired(timer_set(5), 8.2)
    timer_event = make_ingress("timer", "Paid", paid("s~", 1)[2], u.intents[0].hash)
    return u.cycle(8.5, timer_event, timer_event, fused=[fused_timer(u)])


def timer_removed_without_event() -> UniverseHistory:
    """A fused commit removes a timer without journaling its event."""
    u = timer_set(5)
    other = paid("p", 1)
    return u.sent(8, 2, other).cycle(8.5, other, fused=[fused_timer(u)]).empty_queue(DELAY_TIMERS)


def calendar_timer_set() -> UniverseHistory:
    """A calendar timer due at 107 s. The clock of the account is at 7 ns."""
    set_event = event("Dated", id="s", seconds=107, key="t0")
    u = UniverseHistory().granted(1).sent(2, 1, set_event).cycle(3, set_event)
    return u.put_in_queue(u.intents[0], CALENDAR_TIMERS)


def recurring_timer_fired(missed: str) -> UniverseHistory:
    """A recurring timer of one minute, fired an hour after its first occurrence. The next one is queued."""
    set_event = event("Ticked", id="s", rule="*/1 * * * *", missed=missed, key="t0")
    u = UniverseHistory().granted(1).sent(2, 1, set_event).cycle(3, set_event)
    u.put_in_queue(u.intents[0], CALENDAR_TIMERS)
    args = {"universe": "u", "wall_ns": 3660 * S, "limit": 9}
    u.committed(9, "timers.deliver_due", args, 1).empty_queue(CALENDAR_TIMERS)
    following = model_app.digest(b"every", u.intents[0].hash, (3720 * S).to_bytes(8, "big"))
    next_intent = model_app.ExpectedIntent(following, "timer.set", u.intents[0].params)
    return u.put_in_queue(next_intent, CALENDAR_TIMERS, 2)


def add_timer_event(u: UniverseHistory) -> UniverseHistory:
    return u.put_in_inbox(make_ingress("timer", "Paid", paid("s~", 1)[2], u.intents[0].hash))


def mail_delivered(*seqs: int) -> UniverseHistory:
    """A transfer to another account, with the message at these seqs of its inbox."""
    move_event = event("Moved", id="m", amount=2, to="w2")
    u = UniverseHistory().granted(1).sent(2, 1, move_event).cycle(3, move_event)
    [intent] = u.intents
    mail = make_ingress(
        "fabric", "Paid", paid("m>", 2)[2], intent.hash, from_world=WORLD_ID, from_height=1
    )
    rows = {seq: inbox_row(None, mail) for seq in seqs}
    u.rows["inboxes"]["u/w2"] = {"rows": rows, "cursor": 0, "last_seq": len(rows)}
    catalog = u.rows["worlds"]["u"]
    catalog["records"]["w2"] = world_record("w2")
    catalog["names"]["Account/w2"] = "w2"
    catalog["counts"]["active"] = 2
    catalog["hints"].append(["", "w2"])
    return u


def forked(
    policy: str, u: UniverseHistory | None = None, *, parent_id: str = WORLD_ID, name: str = "c1"
) -> UniverseHistory:
    """A fork of an account with a pending effect, or a fork of that fork."""
    u = u or ordered()
    height = u.height
    state = model_app.snapshot_bytes(u.states[height])
    hash = hashlib.sha256(state).digest()
    lineage = {
        "parent_world_id": parent_id,
        "parent_snapshot_hash": hash,
        "forked_at_height": height,
    }
    child_record = world_record(name, lineage=lineage)
    u.committed(6, "fork", {"name": name, "child_id": name, "effects": policy}, child_record)
    catalog = u.rows["worlds"]["u"]
    catalog["records"][name] = child_record
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


def add_receipt_to_fork(u: UniverseHistory, name: str = "c1", **overrides: Any) -> UniverseHistory:
    rows = {1: inbox_row(None, receipt(u.intents[0], **overrides))}
    u.rows["inboxes"][f"u/{name}"] = {"rows": rows, "cursor": 0, "last_seq": 1}
    return u


def forked_twice(*, with_receipt: bool) -> UniverseHistory:
    """A fork with a dropped_by_fork receipt in its inbox, forked before it has read the receipt."""
    drop_receipt = {"status": "error", "code": "dropped_by_fork"}
    u = forked(
        "reissue", add_receipt_to_fork(forked("fail"), **drop_receipt), parent_id="c1", name="c2"
    )
    return add_receipt_to_fork(u, "c2", **drop_receipt) if with_receipt else u


def deleted(u: UniverseHistory) -> UniverseHistory:
    args = {"universe": "u", "world_id": WORLD_ID, "event": "delete"}
    return u.committed(7, "catalog.change_status", args, world_record(WORLD_ID, status="deleted"))


def rate_granted(
    u: UniverseHistory, at_s: float, from_s: float, slot_ns: int = 210_000_000
) -> UniverseHistory:
    block = {"from_ns": int(from_s * S), "slot_ns": slot_ns, "tokens": 2}
    return u.committed(at_s, "rate.grant", {"queue": QUOTES, "rate_per_s": 5.0, "wanted": 2}, block)


RIGHT: dict[str, Callable[[], UniverseHistory]] = {
    "an effect that waits": ordered,
    "an effect that is done": done,
    "an effect that is cancelled": cancelled,
    "an effect called twice, with one key": lambda: called(done(), 7, 2),
    "a call of a life of the store that is over": lambda: called(done(), 7, 2, "0-x", late=True),
    "a timer that waits": timer_set,
    "a timer that fired": lambda: timer_fired(timer_set(), 13),
    "a timer of the calendar": lambda: timer_fired(calendar_timer_set(), 4, 107.5, CALENDAR_TIMERS),
    "a timer told in its world's commit": lambda: timer_in_cycle(timer_set(5), 8.5),
    "a timer of the calendar, told in its world's commit": lambda: timer_in_cycle(
        calendar_timer_set(), 4, 107.5, CALENDAR_TIMERS
    ),
    "a timer told in the commit that sets it anew": timer_replaced_in_its_cycle,
    "a timer that repeats": lambda: add_timer_event(recurring_timer_fired("one")),
    "a timer that skips what it missed": lambda: recurring_timer_fired("skip"),
    "mail": lambda: (u := mail_delivered(1)).put_in_inbox(receipt(u.intents[0])),
    "a fork that is told": lambda: add_receipt_to_fork(
        forked("fail"), status="error", code="dropped_by_fork"
    ),
    "a fork that inherits nothing": lambda: forked("drop"),
    "a fork of what was cancelled": lambda: add_receipt_to_fork(
        forked("fail", cancelled()), status="error", code="cancelled"
    ),
    "a fork of a fork that is told": lambda: forked_twice(with_receipt=True),
    "a key that is refused": lambda: key_refused(1),
    "tokens of a rate": lambda: rate_granted(rate_granted(ordered(), 4, 4), 4.1, 4.42),
}

WRONG: list[tuple[str, str, Callable[[], UniverseHistory]]] = [
    ("E1", "an effect has two receipts", lambda: (u := done()).put_in_inbox(receipt(u.intents[0], value=pack(1.0)))),
    ("E1", "an effect has its receipt, and waits", lambda: (u := done()).put_in_queue(u.intents[0], QUOTES, 2)),
    ("E1", "an effect is done, and nobody told", lambda: settled(claimed(ordered(), 4), 5).empty_queue(QUOTES)),
    ("E1", "an effect waits, and nobody knows", lambda: ordered().audit("worlds", "u", "pending", to={})),
    ("E1", "an effect is cancelled that is wanted", lambda: cancelled(with_cancel_event=False)),
    ("E1", "a cancelled effect is still to be done", lambda: (u := cancelled()).put_in_queue(u.intents[0], "u/effects/fx.pay")),
    ("E1", "a receipt says error, and not why", lambda: done(status="error", value=b"")),
    ("E1", "a receipt says error for a time-out", lambda: done(status="error", code="timeout", value=b"")),
    ("E1", "a key was refused, and nobody told", lambda: key_refused(0)),
    ("E1", "a key was refused once, and told twice", lambda: key_refused(2)),
    ("E1", "a refusal under the name of what the key stands for", lambda: key_refused(1, "hash")),
    ("E1", "a refusal that says that it was done", lambda: key_refused(1, status="ok", code="", value=pack(1.0))),
    ("E1", "an effect of a deleted world is begun", lambda: claimed(deleted(ordered()), 8)),
    ("E1", "a deleted world gets a receipt", lambda: receipt_after_delete()),
    ("E1", "mail is delivered, and its sender not told", lambda: mail_delivered(1)),
    ("E2", "a receipt under a claim that another has", lambda: settled(claimed(claimed(ordered(), 4), 10, 2, "q"), 11)),
    ("E2", "a receipt under a claim that ran out", lambda: settled(claimed(ordered(), 4), 9.5)),
    ("E2", "a receipt under the claim's number, by another", lambda: settled(claimed(ordered(), 4), 5, 1, "q")),
    ("E2", "a receipt under no claim", lambda: settled(settled(claimed(ordered(), 4), 5), 6)),
    ("E3", "an effect is called again with another key", lambda: called(done(), 7, 2, "1-other")),
    ("E3", "two effects are called with one key", lambda: called(done(), 7, 2, args=["b", "p"])),
    ("E3", "a call has no key", lambda: called(done(), 7, 2, "")),
    ("E3", "a receipt of a call that nobody made", lambda: done(value=pack(9.0))),
    ("E3", "a receipt of another's call", lambda: called(done(value=pack(2.0)), 7, 2, "k", args=["b", "p"])),
    ("T1", "a timer fired early", lambda: timer_fired(timer_set(), 12.9)),
    ("T1", "a timer fired twice", lambda: add_timer_event(timer_fired(timer_set(), 13))),
    ("T1", "a timer fired, and waits", lambda: (u := timer_fired(timer_set(), 13)).put_in_queue(u.intents[0], DELAY_TIMERS, 2)),
    ("T1", "a timer is gone", lambda: timer_set().empty_queue(DELAY_TIMERS)),
    ("T1", "a timer of the calendar fired early by the wall", lambda: timer_fired(calendar_timer_set(), 400, 106.5, CALENDAR_TIMERS)),
    ("T1", "a timer that was replaced fired", lambda: replaced_timer_fired()),
    ("T1", "a timer is told in its world's commit, early", lambda: timer_in_cycle(timer_set(5), 7.9)),
    ("T1", "a timer of the calendar is told in its world's commit, early", lambda: timer_in_cycle(calendar_timer_set(), 4, 106.5, CALENDAR_TIMERS)),
    ("T1", "a timer is told in its world's commit, and waits", lambda: (u := timer_in_cycle(timer_set(5), 8.5)).put_in_queue(u.intents[0], DELAY_TIMERS)),
    ("T1", "a timer is told in two commits of its world", lambda: timer_in_cycle(timer_in_cycle(timer_set(5), 8.5), 9)),
    ("T1", "a timer is fired, and told in its world's commit", lambda: timer_fired_and_in_cycle()),
    ("T1", "a timer that was replaced is told in its world's commit", lambda: timer_in_cycle_after_replacement()),
    ("T1", "a timer is taken off by a commit that does not tell it", lambda: timer_removed_without_event()),
    ("L3", "a timer is told under a lease that ran out", lambda: timer_in_cycle(timer_set(9), 12.5)),
    ("T1", "a timer of the calendar waits for store time", lambda: (u := calendar_timer_set()).empty_queue(CALENDAR_TIMERS).put_in_queue(u.intents[0], DELAY_TIMERS)),
    ("T1", "what was missed is told, and was to be skipped", lambda: add_timer_event(recurring_timer_fired("skip"))),
    ("T1", "an occurrence is over, and nobody told", lambda: recurring_timer_fired("one")),
    ("T1", "a timer that repeats does not wait again", lambda: add_timer_event(recurring_timer_fired("one")).empty_queue(CALENDAR_TIMERS)),
    ("T1", "a slot holds what is gone", lambda: timer_fired(timer_set(), 13).audit("worlds", "u", "slots", to=timer_set().rows["worlds"]["u"]["slots"])),
    ("F1", "mail is there twice", lambda: (u := mail_delivered(1, 2)).put_in_inbox(receipt(u.intents[0]))),
    ("F1", "mail is there, and still to be sent", lambda: (u := mail_delivered(1)).put_in_queue(u.intents[0], MAILS)),
    ("K1", "a fork is not told what it does not get", lambda: forked("fail")),
    ("K1", "a fork is not told what was cancelled", lambda: forked("fail", cancelled())),
    ("K1", "a fork is told that it was dropped what was cancelled", lambda: add_receipt_to_fork(forked("fail", cancelled()), status="error", code="dropped_by_fork")),
    ("K1", "a fork of a fork is not told what that does not get", lambda: forked_twice(with_receipt=False)),
    ("K1", "a fork gets a receipt of its parent's", lambda: add_receipt_to_fork(forked("drop"), value=pack(1.0))),
    ("J1", "a timer that no entry set", lambda: add_timer_event(ordered())),
    ("D1", "an effect is done, and its claim still there", lambda: acked_with_leftover_rows(expiry=True)),
    ("D1", "an effect is done, and waits again", lambda: acked_with_leftover_rows(expiry=False)),
    ("D2", "an effect waits in two places", lambda: ordered().audit("queues", QUOTES, "delayed", to=[[9, 1]])),
    ("S3", "an effect is claimed with fewer expiries than it had", lambda: claimed(claimed(ordered(), 4), 10, 2, "q", expiries=0)),
    ("A2", "two pools have the same tokens", lambda: rate_granted(rate_granted(ordered(), 4, 4), 4.1, 4.3)),
    ("A2", "tokens of the past", lambda: rate_granted(ordered(), 4, 3)),
    ("A2", "more tokens in a second than the rate", lambda: rate_granted(ordered(), 4, 4, slot_ns=190_000_000)),
]  # fmt: skip


def key_refused(
    receipts: int, hash_field: str = "positional_id", **overrides: Any
) -> UniverseHistory:
    """A key reused for another effect, with this number of conflict receipts."""
    u = ordered("k0")
    second_event = event("Ordered", id="p", what="b", key="k0")
    u.sent(4, 2, second_event).cycle(5, second_event)
    intent = replace(u.intents[1], hash=getattr(u.intents[1], hash_field))
    conflict = receipt(intent, **{"status": "error", "code": "key_conflict", **overrides})
    return u.put_in_inbox(*[conflict] * receipts)


def replaced_timer_fired() -> UniverseHistory:
    """A timer replaced before it is due. The replaced timer fires nevertheless."""
    u = timer_set()
    second_set = event("Slept", id="s2", seconds=30, key="t0")
    u.sent(4, 2, second_set).cycle(5, second_set).empty_queue(DELAY_TIMERS)
    timer_fired(u, 14)
    return u.put_in_queue(u.intents[1], DELAY_TIMERS, 2)


def receipt_after_delete() -> UniverseHistory:
    u = deleted(ordered())
    catalog = u.rows["worlds"]["u"]
    catalog["records"][WORLD_ID] = world_record(WORLD_ID, status="deleted")
    catalog["names"], catalog["counts"] = {}, {"deleted": 1}
    u.empty_queue(QUOTES).audit(at_s=40)
    return u.put_in_inbox(receipt(u.intents[0], status="error", code="never")).audit(at_s=41)


def acked_with_leftover_rows(*, expiry: bool) -> UniverseHistory:
    """An acked effect with leftover queue rows."""
    u = done()
    rows = u.rows["queues"][QUOTES]
    if expiry:
        rows["expiry"], rows["owners"] = [[9, 1]], [["p", 1]]
        return u
    rows.update(ordered().rows["queues"][QUOTES])
    return u


@pytest.mark.parametrize("name", RIGHT)
def test_effect_checkers_accept_a_valid_history(name: str) -> None:
    assert check_all(RIGHT[name]().audit().history) == []


@pytest.mark.parametrize(("number", "what", "make"), WRONG, ids=[f"{n}: {w}" for n, w, _ in WRONG])
def test_effect_checker_reports_a_violating_history(
    number: str, what: str, make: Callable[[], UniverseHistory]
) -> None:
    u = make()
    if u.history.events[-1].op != "audit":
        u.audit()
    violations = CHECKERS[number](u.history)
    assert [violation.number for violation in violations][:1] == [number]


@pytest.mark.parametrize("queue", [DELAY_TIMERS, CALENDAR_TIMERS])
def test_timer_checker_reports_a_timer_overdue_at_quiescence(queue: str) -> None:
    u = timer_set() if queue == DELAY_TIMERS else calendar_timer_set()
    u.rows["queues"][queue]["items"][1]["not_before_ns"] = 13 * S
    u.committed(60, "quiet", {"waiting": []}, True)
    u.audit(at_s=61)
    late = 20 * S if queue == CALENDAR_TIMERS else 0
    u.history.events[-1].args["wall_ns"] = late
    assert [violation.number for violation in CHECKERS["T2"](u.history)] == ["T2"]


def test_timer_checker_measures_calendar_timers_by_wall_time() -> None:
    u = calendar_timer_set()
    u.rows["queues"][CALENDAR_TIMERS]["items"][1]["not_before_ns"] = 13 * S
    u.committed(60, "quiet", {"waiting": []}, True).audit(at_s=61)
    u.history.events[-1].args["wall_ns"] = 12 * S
    assert CHECKERS["T2"](u.history) == []
