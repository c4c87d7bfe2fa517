"""What a child and the ledger service tell each other of rows. `spark.wire` carries these in frames.

Headers are typed structs, so a message that does not fit is refused, never half understood.
"""

from __future__ import annotations

import msgspec

from holdfast.ledger.ranges import Range
from holdfast.ledger.records import Done
from holdfast.ledger.runs import Stored


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A header. Fields are positional on the wire."""


class Other(Message, frozen=True):
    """A row that ended without a result: skipped or failed. `state` is its ledger state; `raw` is the
    text of a result that did not fit the schema."""

    seq: int
    state: int
    error_class: int
    error: str
    delay_ns: int = 0
    raw: str = ""


class Move(Message, frozen=True):
    """A report of one grant: what ended, what begins. Results are in the attachment, `size` bytes."""

    epoch: int
    n: int
    digest: bytes
    done: list[Done]
    begin: list[Range]
    seqs: bytes
    lo: int
    others: list[Other]
    size: int
    # With a spool: the object that holds the results, which are of [lo, hi), and `raw` of the others.
    at: Stored | None = None
    hi: int = 0


class Claim(Message, frozen=True):
    """Ask for rows in [lo, hi); `begin` of the first are begun at once. hi = -1: to the end."""

    rows: int
    begin: int
    lo: int = 0
    hi: int = -1


class Step(Message, frozen=True):
    """Report and ask in one frame, one commit. `wait_ms` only for a child without a grant; `held` are
    the grants it knows of, so that one whose answer was lost with a service is given once more."""

    moves: list[Move]
    claim: Claim | None
    wait_ms: int
    calls: int
    cost: float
    latency: list[int]
    held: list[int] = []
    # Tokens that the ended calls used, and the estimate under which the service admitted them.
    tokens: int = 0
    priced: int = 0


class Moved(Message, frozen=True):
    """Of one move: `lost` when the grant is no longer the child's; else what it still holds."""

    lost: bool
    left: int
    stop: str
