"""Who may be claimed: an operation that judges a batch inside the claim's own commit.

So what it decides on (a budget, a rate, whether somebody still wants it) and the claim happen
together, or not at all.
"""

from __future__ import annotations

from holdfast.codec import Record


class Candidate(Record, frozen=True):
    """An item that is about to be claimed."""

    seq: int
    group: str
    payload: bytes
    failures: int = 0
    expiries: int = 0
    # The number that its claim would have, or has.
    claim: int = 0
    # Its place among those that are ready.
    priority: int = 0
    turn: int = 0


class Verdict(Record, frozen=True):
    """What becomes of a candidate: `take` it, `drop` it (done, without a word), `later` after a
    delay, or `refuse` it: then it is a dead letter, and its will is done."""

    end: str = "take"
    delay_ns: int = 0
    code: str = ""
    error: str = ""


TAKE = Verdict()


class Admission(Record, frozen=True):
    """An operation that judges candidates inside the claim's own commit: (queue, candidates, args) →
    a verdict for each."""

    operation: str
    args: bytes = b""
    # The operation that undoes an admission whose item is given back before anybody began with it, in
    # the same commit: (queue, candidates, args).
    undo: str = ""
