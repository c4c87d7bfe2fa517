"""Registry of checkers: one per line of INVARIANTS.md that applies so far, by its number.

A checker is a function from a history to its violations. It uses the history and the layout of the
rows, and no product code. `tests/sim/test_checkers.py` shows each of them failing on a hand-written
history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from holdfast.sim.history import History
from tests.simulation import (
    check_dispatch,
    check_flows,
    check_journals,
    check_lease,
    check_ledger,
    check_queue,
    check_schedules,
    check_start_and_end,
    check_tasks,
    check_worlds,
)
from tests.simulation.violation import Violation

Check = Callable[[History], Iterable[Violation]]


@dataclass(frozen=True)
class Checker:
    number: str
    statement: str
    checks: tuple[Check, ...]

    def __call__(self, history: History) -> list[Violation]:
        return [violation for check in self.checks for violation in check(history)]


def _violations_numbered(number: str) -> Check:
    """Select the violations with this number from the replays."""
    return lambda history: [v for v in _replay_violations(history) if v.number == number]


def _replay_violations(history: History) -> list[Violation]:
    if history.replay_violations is None:
        replays = [
            check_queue, check_journals, check_ledger, check_tasks, check_dispatch, check_flows,
            check_schedules,
        ]  # fmt: skip
        if not check_flows.is_flow_run(history):
            # The model of worlds knows the accounts only. `check_flow_intents` has the world of flow runs.
            replays.append(check_worlds)
        history.replay_violations = [
            found for replay in replays for found in replay.findings(history)
        ]
    return history.replay_violations


_INVARIANTS: list[tuple[str, str, tuple[Check, ...]]] = [
    (
        "L1",
        "validity intervals of different holders are disjoint",
        (check_lease.check_l1, _violations_numbered("L1")),
    ),
    (
        "L2",
        "epochs strictly increase per grant",
        (check_lease.check_l2, _violations_numbered("L2")),
    ),
    ("L3", "guarded writes are of the current holder, in time", (check_lease.check_l3,)),
    (
        "L4",
        "a renewal keeps holder and epoch, and was not late",
        (check_lease.check_l4, _violations_numbered("L4")),
    ),
    (
        "L5",
        "a grant after an expiry is preceded by its record",
        (check_lease.check_l5, _violations_numbered("L5")),
    ),
    ("L6", "a fenced incarnation commits nothing more", (check_lease.check_l6,)),
    ("L7", "sweeps and deletes carry a token", (check_lease.check_l7, _violations_numbered("L7"))),
    ("L8", "lease operations follow the sequential model", (check_lease.check_l8,)),
    ("L9", "no renewal without progress", (check_lease.check_l9, _violations_numbered("L9"))),
    ("L10", "a leased task has one lease, a waiting one none", (_violations_numbered("L10"),)),
    ("S1", "every transition is in its table", (check_lease.check_s1, _violations_numbered("S1"))),
    ("S2", "one terminal per attempt, committed is final", (_violations_numbered("S2"),)),
    ("S3", "budgets hold, exhaustion is death, once", (_violations_numbered("S3"),)),
    ("S4", "maintained counters are a recount", (_violations_numbered("S4"),)),
    ("S5", "reclaim is a function of its inputs", (_violations_numbered("S5"),)),
    ("S6", "a report of a lost grant changes nothing", (_violations_numbered("S6"),)),
    ("J1", "no effect before its journal record", (_violations_numbered("J1"),)),
    ("J2", "heights are gap-free, appends need the head", (_violations_numbered("J2"),)),
    ("J3", "a replay is what happened, byte for byte", (_violations_numbered("J3"),)),
    ("J4", "baseline and tail are the journal", (_violations_numbered("J4"),)),
    ("J5", "derived rows match the log", (_violations_numbered("J5"),)),
    ("J6", "each cycle ends with the digest of its state", (_violations_numbered("J6"),)),
    ("I1", "acknowledged ingress is journaled exactly once", (_violations_numbered("I1"),)),
    ("I2", "journal order is inbox order, the cursor monotone", (_violations_numbered("I2"),)),
    ("I3", "nothing below the cursor is unjournaled", (_violations_numbered("I3"),)),
    ("I4", "unknown ingress appears 0 or 1 times, retries converge", (_violations_numbered("I4"),)),
    ("I5", "same key, other body is a conflict", (_violations_numbered("I5"),)),
    ("I6", "replayed events are notified once, by a durable cursor", (_violations_numbered("I6"),)),
    ("I7", "code consumes nothing that it does not know", (_violations_numbered("I7"),)),
    ("E1", "each intent ends in exactly one receipt", (_violations_numbered("E1"),)),
    ("E2", "receipts are accepted under the current claim alone", (_violations_numbered("E2"),)),
    ("E3", "every call of an intent, or of a row, has one key", (_violations_numbered("E3"),)),
    ("F1", "mail is in one place, and its sender has one receipt", (_violations_numbered("F1"),)),
    ("K1", "a fork has its parent's state, and nothing else", (_violations_numbered("K1"),)),
    ("A1", "a lease goes to no worker that the assignment excludes", (_violations_numbered("A1"),)),
    ("A2", "no more begins in a second than a rate allows", (check_start_and_end.check_a2,)),
    ("A3", "no more tasks are leased than their limit allows", (_violations_numbered("A3"),)),
    ("A4", "the next task is granted, by priority and age", (_violations_numbered("A4"),)),
    ("A5", "a text is submitted to a pane once and complete", (_violations_numbered("A5"),)),
    ("T1", "a timer fires once, never early", (_violations_numbered("T1"),)),
    ("T2", "overdue timers fire after any downtime", (check_start_and_end.check_t2,)),
    ("D1", "ack removes item and claim; dead letters keep all", (_violations_numbered("D1"),)),
    ("D2", "each item is in exactly one place", (_violations_numbered("D2"),)),
    ("D3", "keys are kept while a retry may come", (_violations_numbered("D3"),)),
    ("R1", "readiness reports exactly the existing blockers", (_violations_numbered("R1"),)),
    ("R2", "deferred notifications are reported with their reason", (_violations_numbered("R2"),)),
    (
        "R3",
        "after faults stop, nothing runnable waits",
        (check_start_and_end.check_r3, _violations_numbered("R3")),
    ),
    ("P1", "the sink holds each committed success once, in order", (_violations_numbered("P1"),)),
    ("P2", "a finished row is not executed again", (_violations_numbered("P2"),)),
    (
        "X1",
        "a recorded step is not run again; its outcome is recorded once, under the live lease",
        (_violations_numbered("X1"),),
    ),
    (
        "X2",
        "compensations run once in reverse order; a sleep ends once; events come once, in order; "
        "a key has one flow or event; a cancellation or timeout decides the end",
        (_violations_numbered("X2"),),
    ),
    (
        "X3",
        "an occurrence submits its task once; pause, overlap and backfill obey their policy",
        (_violations_numbered("X3"),),
    ),
    ("B1", "a wrong schema marker refuses, and writes nothing", (check_start_and_end.check_b1,)),
]

CHECKERS: dict[str, Checker] = {
    number: Checker(number, says, checks) for number, says, checks in _INVARIANTS
}


def check_all(history: History) -> list[Violation]:
    found: list[Violation] = []
    for checker in CHECKERS.values():
        try:
            found += checker(history)
        except Exception as error:
            # A history that a checker cannot read counts as a violation.
            found.append(Violation(checker.number, f"unreadable: {type(error).__name__}: {error}"))
    return found
