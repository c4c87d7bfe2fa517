"""Admission control of claims: an operation that accepts or rejects candidates in the claim's transaction.

The state that admission reads and changes (a budget, a rate, a cancellation) and the claim therefore
commit together or not at all.
"""

from __future__ import annotations

from holdfast.codec import Record


class Candidate(Record, frozen=True):
    """An item that a claim is about to lease."""

    seq: int
    group: str
    payload: bytes
    failures: int = 0
    expiries: int = 0
    # The number of its current or next claim.
    claim: int = 0
    # Its position in the ready index: priority, then fair-share rank.
    priority: int = 0
    fair_rank: int = 0


class AdmissionVerdict(Record, frozen=True):
    """The decision on a candidate: `take` claims it, `drop` completes it silently, `later` delays it,
    `refuse` dead-letters it and runs its `on_dead` operation."""

    action: str = "take"
    delay_ns: int = 0
    code: str = ""
    error: str = ""


ADMIT = AdmissionVerdict()


class Admission(Record, frozen=True):
    """The admission operation, (queue, candidates, args) → one verdict per candidate, and its undo."""

    operation: str
    args: bytes = b""
    # The operation (queue, candidates, args) that reverts an admission. It runs in the commit that releases
    # an item before its handler started.
    undo: str = ""
