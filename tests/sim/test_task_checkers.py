"""Checkers of tasks: a story that is right breaks nothing, one that is wrong in a way is found out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast import codec
from holdfast.clock import S, SimClock
from holdfast.durable import journal
from holdfast.sim.audit import audit
from holdfast.sim.check_tasks import SUBJECT, findings
from holdfast.sim.checkers import CHECKERS, check_all
from holdfast.sim.history import History, plain
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryBackend
from holdfast.tasks import coordinator as tasks
from holdfast.tasks.coordinator import End, Hold, New, Report
from holdfast.tasks.records import (
    Completed,
    Created,
    Dead,
    Entry,
    Expired,
    Extended,
    Granted,
)
from holdfast.tasks.rows import Counts, Limits, Spec, Status, keys_of, pack, pack_int, packed_text

Plain = dict[str, Any]

KEYS = keys_of("u")
SPEC = Spec("work", queue="a", lease_ns=10 * S, attempts=2, expiries_max=2, window_ns=20 * S)


class Story:
    """What is done to a real coordinator, told as the simulator tells it; `answer` tells it otherwise."""

    def __init__(self) -> None:
        self.clock = SimClock()
        self.store = LocalStore("memory:", MemoryBackend(), self.clock)
        self.history = History()
        self.history.add(0, "config", {})
        self._commits = 0

    def did(self, operation: Any, *args: Any, answer: Callable[[Any], Any] | None = None) -> Story:
        value = plain(self.store.transact(operation, "u", *args))
        names = operation.fn.__code__.co_varnames[1 : operation.fn.__code__.co_argcount]
        defaults = operation.fn.__defaults__ or ()
        told = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        told |= dict(zip(names, ("u", *args), strict=False))
        self._commits += 1
        self.history.add(
            self.store.now_ns(), f"tasks.{operation.__name__}", plain(told), actor="a",
            incarnation="1", value=answer(value) if answer else value, commit_no=self._commits,
        )  # fmt: skip
        return self

    def told(self, op: str, value: Any, **args: Any) -> Story:
        """What is said to have been done, and was not."""
        self._commits += 1
        self.history.add(
            self.store.now_ns(), f"tasks.{op}", plain(args), actor="a", incarnation="1",
            value=value, commit_no=self._commits,
        )  # fmt: skip
        return self

    def submit(self, *new: New, spec: Spec = SPEC, **how: Any) -> Story:
        return self.did(tasks.submit, spec, list(new) or [New(b"x")], **how)

    def lease(self, limit: int = 1, alone: bool = False, **how: Any) -> Story:
        return self.did(tasks.lease, "w", ["a"], limit, alone, **how)

    def settle(self, *reports: Report, generation: int = 1, **how: Any) -> Story:
        return self.did(tasks.settle, "w", generation, list(reports), **how)

    def extend(self, *holds: Hold, **how: Any) -> Story:
        return self.did(tasks.extend, 1, list(holds), **how)

    def later(self, seconds: float) -> Story:
        self.clock.advance(int(seconds * S))
        return self

    def change(self, change: Callable[[Txn], None]) -> Story:
        """Behind the coordinator's back."""
        self.store.transact(change)
        return self

    def logged(self, *records: Any) -> Story:
        """An entry that the coordinator did not write."""

        def append(txn: Txn) -> None:
            head = journal.head(txn, SUBJECT)
            entry = Entry(txn.now_ns, txn.generation, list(records))
            journal.append(txn, SUBJECT, [codec.pack(entry)], expected_head=head.height)

        return self.change(append)

    def audit(self) -> Story:
        rows = self.store.read(lambda txn: txn.scan(b"\x14", b"\xff"))
        self.history.add(self.store.now_ns(), "audit", {}, value=audit(rows))
        return self


def status(**fields: Any) -> Callable[[Txn], None]:
    def change(txn: Txn) -> None:
        row = txn.get(KEYS.statuses + pack_int(1))
        assert row is not None
        values = {**plain(codec.unpack_as(Status, row)), **fields}
        txn.put(KEYS.statuses + pack_int(1), pack(Status(**values)))

    return change


def first(**fields: Any) -> Callable[[Plain], Plain]:
    """The first grant was told otherwise."""
    return lambda leased: {**leased, "grants": [{**leased["grants"][0], **fields}]}


def drop(prefix: bytes) -> Callable[[Txn], None]:
    return lambda txn: txn.delete(txn.scan(prefix, prefix + b"\xff", 1)[0][0])


def cut(txn: Txn) -> None:
    journal.checkpoint(txn, SUBJECT, 3)
    journal.truncate(txn, SUBJECT, 10)


def forge(txn: Txn) -> None:
    row = txn.get(KEYS.bodies + pack_int(1))
    assert row is not None
    txn.put(KEYS.bodies + pack_int(2), row)


def park(txn: Txn) -> None:
    """Back to where it was before it was let in."""
    [(key, row)] = txn.scan(KEYS.ready, KEYS.ready + b"\xff", 1)
    txn.delete(key)
    txn.put(KEYS.parked + tuples.pack(("a", "l", "a", 0, 0, 2)), row)


Tell = Callable[[Story], Story]

RIGHT: dict[str, Tell] = {
    "a run, in pieces": lambda s: (
        s.submit(*[New(b"%d" % n) for n in range(6)]).lease(4).audit().did(tasks.cancel, [2, 5]).audit()
        .extend(Hold(3, 2)).settle(Report(1, 2), Report(4, 2, End.FAILED)).audit()
        .submit(New(b"w", after=(3, 6))).audit().later(11).lease(9).audit().later(11).lease(9).audit()),
    "all ends well": lambda s: (
        s.submit(New(b"x"), New(b"y", after=(-1,)), New(b"z", delay_ns=S)).lease(3).audit()
        .settle(Report(1, 1)).lease(3).later(2).lease(3).audit()
        .settle(Report(2, 3), Report(3, 5, End.FAILED)).audit()),
    "expired, late, redriven": lambda s: (
        s.submit().lease().later(11).lease(alone=True).audit()
        .settle(Report(1, 1)).extend(Hold(1, 3, True)).audit()
        .settle(Report(1, 3, End.REFUSED)).did(tasks.redrive, [1]).audit()),
    "cancelled in its place and at work": lambda s: (
        s.submit(New(b"x", limit="l"), New(b"y", limit="l")).did(tasks.limit, "a", Limits(0, 1))
        .lease(2).audit().did(tasks.cancel, [1]).audit().lease(2).did(tasks.cancel, [2]).audit()),
    "forgotten": lambda s: (
        s.submit(New(b"x", key="k"), spec=Spec("work", queue="a", retain_ns=S)).lease()
        .settle(Report(1, 1)).later(2).did(tasks.maintain, 100).audit()
        .submit(New(b"y", key="k")).audit()),
}  # fmt: skip

WRONG: list[tuple[str, str, Tell]] = [
    ("L1", "granted while another has it", lambda s: (
        s.submit(New(b"x"), New(b"y")).lease().lease(answer=first(seq=1)))),
    ("L1", "granted beside others, and suspect", lambda s: (
        s.submit().lease().later(11).lease(alone=True, answer=first(suspect=False)))),
    ("L2", "a lease given twice", lambda s: (
        s.submit(New(b"x"), New(b"y")).lease().lease(answer=first(lease=1)))),
    ("L4", "extended, and over", lambda s: (
        s.submit().lease().later(11).extend(Hold(1, 1), answer=lambda _: [99]))),
    ("L4", "extended by the log, and over", lambda s: (
        s.submit().lease().later(11).logged(Extended([1], [1], [99], [False])).audit())),
    ("L5", "granted, and the log has no expiry", lambda s: (
        s.submit().lease().later(11).logged(Granted(2, "w", 99, [1])).audit())),
    ("L5", "expired before its time", lambda s: (
        s.submit().lease().logged(Expired(1, [1])).audit())),
    ("L9", "extended without progress beyond its window", lambda s: (
        s.submit().lease().later(9).extend(Hold(1, 1), answer=lambda all_: [all_[0] + 60 * S]))),
    ("L9", "said to have gone on", lambda s: (
        s.submit().lease().change(status(progress_ns=5)).audit())),
    ("L10", "it waits, and has a lease", lambda s: (
        s.submit().lease().settle(Report(1, 1, End.FAILED)).change(status(lease=7)).audit())),
    ("L10", "it is leased, for ever", lambda s: (
        s.submit().lease().change(status(expires_ns=0)).audit())),
    ("S1", "granted, and it had ended", lambda s: (
        s.submit(New(b"x"), New(b"y")).lease().settle(Report(1, 1))
        .lease(answer=first(seq=1, attempt=2)))),
    ("S1", "in a state that no record led to", lambda s: (
        s.submit().lease().change(status(state=3, expires_ns=0)).audit())),
    ("S1", "granted while it waits for another", lambda s: (
        s.submit(New(b"x"), New(b"y", after=(-1,)), New(b"z")).lease(1)
        .lease(answer=first(seq=2)))),
    ("S1", "a record of no task", lambda s: s.submit().logged(Dead([9], "why")).audit()),
    ("S1", "created twice", lambda s: s.submit().logged(Created([1], b"")).audit()),
    ("S2", "dead after its end", lambda s: (
        s.submit().lease().settle(Report(1, 1)).logged(Dead([1], "why")).audit())),
    ("S2", "another result", lambda s: (
        s.submit().lease().settle(Report(1, 1, End.OK, b"r")).change(status(result=b"q")).audit())),
    ("S2", "cancelled after its end", lambda s: (
        s.submit().lease().settle(Report(1, 1)).did(tasks.cancel, [1], answer=lambda _: [True]))),
    ("S2", "redriven twice", lambda s: (
        s.submit().did(tasks.cancel, [1]).did(tasks.redrive, [1])
        .did(tasks.redrive, [1], answer=lambda _: [3]))),
    ("S3", "an attempt that was not counted", lambda s: (
        s.submit().lease().change(status(attempt=0)).audit())),
    ("S3", "failures without end", lambda s: (
        s.submit().lease().settle(Report(1, 1, End.FAILED)).change(status(failures=9)).audit())),
    ("S4", "a counter that is no recount", lambda s: (
        s.submit().change(lambda txn: txn.put(KEYS.counts + packed_text("a"), pack(Counts(ready=7))))
        .audit())),
    ("S6", "a late report counted", lambda s: (
        s.submit().lease().later(11).settle(Report(1, 1), answer=lambda _: [0]))),
    ("S6", "lost, and not on record", lambda s: (
        s.submit().lease().later(11)
        .told("settle", [1], worker="w", generation=1, reports=[Report(1, 1)]).audit())),
    ("S6", "completed by the log under another lease", lambda s: (
        s.submit().lease().logged(Completed([1], [8], b"")).audit())),
    ("J2", "a height that is missing", lambda s: (
        s.submit().lease().change(lambda txn: txn.delete(
            journal._keys(SUBJECT).entries + pack_int(1))).audit())),
    ("J4", "cut off, and nothing to begin from", lambda s: (
        s.submit().lease().submit().change(cut).audit())),
    ("J5", "rows that the log does not say", lambda s: (
        s.submit().lease().change(status(reason="because")).audit())),
    ("J5", "a task that is not in the log", lambda s: s.submit().change(forge).audit()),
    ("D2", "in no place", lambda s: s.submit().change(drop(KEYS.ready)).audit()),
    ("D2", "in two places", lambda s: (
        s.submit().change(lambda txn: txn.put(KEYS.suspects + b"\x02a\x00\x14\x14\x15\x01",
                                              pack_int(1))).audit())),
    ("D2", "leased, and nobody looks", lambda s: s.submit().lease().change(drop(KEYS.expiries)).audit()),
    ("D2", "gone before its time", lambda s: s.submit().change(drop(KEYS.bodies)).audit()),
    ("D2", "a number given twice", lambda s: s.submit().submit(answer=lambda _: [1])),
    ("D3", "a key that is forgotten", lambda s: (
        s.submit(New(b"x", key="k")).change(drop(KEYS.keys)).audit())),
    ("T1", "granted before its time", lambda s: (
        s.submit(New(b"x", delay_ns=5 * S), New(b"y")).lease(answer=first(seq=1)))),
    ("I4", "a key that made two tasks", lambda s: (
        s.submit(New(b"x", key="k")).submit(New(b"x", key="k"), answer=lambda _: [2]))),
    ("I5", "a key with other arguments", lambda s: (
        s.submit(New(b"x", key="k")).told("submit", [1], spec=SPEC, new=[New(b"y", key="k")]))),
    ("R3", "parked for nobody", lambda s: (
        s.submit(New(b"x", limit="l"), New(b"y", limit="l")).did(tasks.limit, "a", Limits(0, 1))
        .lease(2).settle(Report(1, 1)).change(park).audit())),
    ("A3", "more than the queue's limit", lambda s: (
        s.submit(New(b"x"), New(b"y")).told("limit", None, queue="a", limits=Limits(1, 0)).lease(2))),
    ("A3", "more than the limit of a key", lambda s: (
        s.submit(New(b"x", limit="l"), New(b"y", limit="l"))
        .told("limit", None, queue="a", limits=Limits(0, 1)).lease(2))),
    ("A4", "the next was passed over", lambda s: (
        s.submit(New(b"x"), New(b"y")).lease(1, answer=first(seq=2, args=b"y")))),
]  # fmt: skip


@pytest.mark.parametrize("tell", RIGHT.values(), ids=RIGHT)
def test_a_story_that_is_right_breaks_nothing(tell: Tell) -> None:
    story = Story()
    tell(story)
    assert check_all(story.history) == []


@pytest.mark.parametrize(
    ("number", "tell"),
    [(number, tell) for number, _, tell in WRONG],
    ids=[f"{number}-{what}" for number, what, _ in WRONG],
)
def test_a_story_that_is_wrong_is_found_out(number: str, tell: Tell) -> None:
    story = Story()
    tell(story)
    assert number in {found.number for found in findings(story.history)}
    assert CHECKERS[number](story.history)
    assert not any("unreadable" in violation.what for violation in check_all(story.history))
