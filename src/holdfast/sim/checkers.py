"""One checker per line of INVARIANTS.md that applies so far, by its number.

A checker is a function from a history to the violations it shows. It knows the history and the
layout of the rows, and nothing of the product's code; `tests/sim/test_checkers.py` shows each of
them failing on a history written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from holdfast.sim import (
    check_dispatch,
    check_lease,
    check_ledger,
    check_queue,
    check_run,
    check_tasks,
    check_world,
    check_worlds,
)
from holdfast.sim.history import History
from holdfast.sim.violation import Violation

Check = Callable[[History], Iterable[Violation]]


@dataclass(frozen=True)
class Checker:
    number: str
    says: str
    checks: tuple[Check, ...]

    def __call__(self, history: History) -> list[Violation]:
        return [violation for check in self.checks for violation in check(history)]


def _found(number: str) -> Check:
    """What the replays found under this number."""
    return lambda history: [v for v in _replays(history) if v.number == number]


def _replays(history: History) -> list[Violation]:
    if history.memo is None:
        replays = (
            check_queue, check_world, check_worlds, check_ledger, check_tasks, check_dispatch,
        )  # fmt: skip
        history.memo = [found for replay in replays for found in replay.findings(history)]
    return history.memo


_LINES: list[tuple[str, str, tuple[Check, ...]]] = [
    (
        "L1",
        "validity intervals of different holders are disjoint",
        (check_lease.check_l1, _found("L1")),
    ),
    ("L2", "epochs strictly increase per grant", (check_lease.check_l2, _found("L2"))),
    ("L3", "guarded writes are of the current holder, in time", (check_lease.check_l3,)),
    (
        "L4",
        "a renewal keeps holder and epoch, and was not late",
        (check_lease.check_l4, _found("L4")),
    ),
    (
        "L5",
        "a grant after an expiry is preceded by its record",
        (check_lease.check_l5, _found("L5")),
    ),
    ("L6", "a fenced incarnation commits nothing more", (check_lease.check_l6,)),
    ("L7", "sweeps and deletes carry a token", (check_lease.check_l7, _found("L7"))),
    ("L8", "lease operations follow the sequential model", (check_lease.check_l8,)),
    ("L9", "no renewal without progress", (check_lease.check_l9, _found("L9"))),
    ("L10", "a leased task has one lease, a waiting one none", (_found("L10"),)),
    ("S1", "every transition is in its table", (check_lease.check_s1, _found("S1"))),
    ("S2", "one terminal for each attempt, committed is for good", (_found("S2"),)),
    ("S3", "budgets hold, exhaustion is death, once", (_found("S3"),)),
    ("S4", "maintained counters are a recount", (_found("S4"),)),
    ("S5", "reclaim is a function of its inputs", (_found("S5"),)),
    ("S6", "a report of a lost grant changes nothing", (_found("S6"),)),
    ("J1", "no effect before its journal record", (_found("J1"),)),
    ("J2", "heights are gap-free, appends need the head", (_found("J2"),)),
    ("J3", "a replay is what happened, byte for byte", (_found("J3"),)),
    ("J4", "baseline and tail are the journal", (_found("J4"),)),
    ("J5", "derived rows are what the log says", (_found("J5"),)),
    ("J6", "each cycle ends with the digest of its state", (_found("J6"),)),
    ("I1", "acknowledged ingress is journaled exactly once", (_found("I1"),)),
    ("I2", "journal order is inbox order, the cursor monotone", (_found("I2"),)),
    ("I3", "nothing below the cursor is unjournaled", (_found("I3"),)),
    ("I4", "unknown ingress appears 0 or 1 times, retries converge", (_found("I4"),)),
    ("I5", "same key, other body is a conflict", (_found("I5"),)),
    ("I6", "replayed events are told once, by a cursor that stays", (_found("I6"),)),
    ("I7", "code consumes nothing that it does not know", (_found("I7"),)),
    ("E1", "each intent ends in exactly one receipt", (_found("E1"),)),
    ("E2", "receipts are accepted under the current claim alone", (_found("E2"),)),
    ("E3", "every call of an intent, or of a row, has one key", (_found("E3"),)),
    ("F1", "mail is in one place, and its sender is told once", (_found("F1"),)),
    ("K1", "a fork has its parent's state, and nothing else", (_found("K1"),)),
    ("A1", "a lease goes to no worker that the assignment excludes", (_found("A1"),)),
    ("A2", "no more begins in a second than a rate allows", (check_run.check_a2,)),
    ("A3", "no more tasks are leased than their limit allows", (_found("A3"),)),
    ("A4", "the next task is granted, by priority and age", (_found("A4"),)),
    ("A5", "a text is given to a pane once, and whole", (_found("A5"),)),
    ("T1", "a timer fires once, never early", (_found("T1"),)),
    ("T2", "overdue timers fire after any downtime", (check_run.check_t2,)),
    ("D1", "ack removes item and claim; dead letters keep all", (_found("D1"),)),
    ("D2", "each item is in exactly one place", (_found("D2"),)),
    ("D3", "keys are kept while a retry may come", (_found("D3"),)),
    ("R1", "ready is what blockers there are, all told", (_found("R1"),)),
    ("R2", "what is held back is told, with its reason", (_found("R2"),)),
    ("R3", "after faults stop, nothing runnable waits", (check_run.check_r3, _found("R3"))),
    ("P1", "the sink holds each committed success once, in order", (_found("P1"),)),
    ("P2", "what ended is not executed again", (_found("P2"),)),
    ("B1", "a wrong schema marker refuses, and writes nothing", (check_run.check_b1,)),
]

CHECKERS: dict[str, Checker] = {
    number: Checker(number, says, checks) for number, says, checks in _LINES
}


def check_all(history: History) -> list[Violation]:
    found: list[Violation] = []
    for checker in CHECKERS.values():
        try:
            found += checker(history)
        except Exception as error:
            # A history that makes no sense to a checker is not one it can vouch for.
            found.append(Violation(checker.number, f"unreadable: {type(error).__name__}: {error}"))
    return found
