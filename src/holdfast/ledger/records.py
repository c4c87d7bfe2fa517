"""What a run's log is made of. Each entry carries the time it was decided; none needs a clock to be
applied, so a replay on another day gives the same bits.

    Opened      the size and the policy of the run
    Adopted     rows take the outcome that another run of this name has for the same key and content
    Leased      rows were granted to an owner; the first of them may be begun at once
    Advanced    an owner reported rows and began others; what is retried instead of final is named
    Ripened     retries whose time has come are free again
    Reclaimed   a grant is over: un-begun rows are free, begun ones are suspects, or failed for good
    Cancelling  everything that was not begun is cancelled; begun rows have until the grace ends
    Cancelled   the grace is over: begun rows are cancelled, grants void
    Committed   rows up to here are in the sink, as this version
    Retuned     budgets and times of the policy are others from here on
    Counted     what counts towards the stop rules besides how rows ended: cost, and equal errors
    Stopped     a stop rule was reached: nothing is handed out or begun any more
    Resumed     somebody started the run again: it is handed out, and the stop rules count anew
    Halted      an illegal move was attempted; nothing moves any more

Entries say what was decided, not why: the policy that led to a retry is not asked again.
"""

from __future__ import annotations

import msgspec

from holdfast.codec import Record
from holdfast.errors import StoreCorrupt
from holdfast.ledger.classes import Policy
from holdfast.ledger.ranges import Range as Range


class Part(Record, frozen=True):
    """Rows of a grant that have had equally many tries; the first attempt is 1."""

    lo: int
    hi: int
    attempt: int


class Done(Record, frozen=True):
    """Rows that ended alike: `code` is a state, a failure says its class, and how long to wait."""

    lo: int
    hi: int
    code: int
    error_class: int = 0
    # Above 0: what the failure itself asked for, instead of the policy's backoff.
    delay_ns: int = 0


class Retried(Record, frozen=True):
    lo: int
    hi: int
    error_class: int
    not_before_ns: int


class Opened(Record, frozen=True, tag="opened"):
    decided_ns: int
    size: int
    policy: Policy


class AdoptedRange(Record, frozen=True):
    """Rows that ended in another run as its rows from `from_lo` on; `code` is their state there."""

    lo: int
    hi: int
    from_lo: int
    code: int
    error_class: int = 0


class Adopted(Record, frozen=True, tag="adopted"):
    """One decision dispatches the rows, begins them under an epoch of its own and ends them."""

    decided_ns: int
    epoch: int
    from_run: str
    rows: list[AdoptedRange]


class Leased(Record, frozen=True, tag="leased"):
    decided_ns: int
    epoch: int
    owner: str
    parts: list[Part]
    begun: list[Range]
    alone: bool


class Advanced(Record, frozen=True, tag="advanced"):
    decided_ns: int
    epoch: int
    n: int
    digest: bytes
    done: list[Done]
    retried: list[Retried]
    begun: list[Range]
    # What the caller is told not to do any more; empty while the run goes on.
    stop: str = ""


class Ripened(Record, frozen=True, tag="ripened"):
    decided_ns: int


class Reclaimed(Record, frozen=True, tag="reclaimed"):
    """`why` is expired, closed, returned or superseded."""

    decided_ns: int
    epoch: int
    why: str
    suspects: list[Range]
    failed: list[Range]
    # Instead of both, while the run is being cancelled: nobody is left to finish them.
    cancelled: list[Range]


class Cancelling(Record, frozen=True, tag="cancelling"):
    decided_ns: int
    grace_ends_ns: int


class Cancelled(Record, frozen=True, tag="cancelled"):
    decided_ns: int


class Committed(Record, frozen=True, tag="committed"):
    decided_ns: int
    upto: int
    version: int


class Retuned(Record, frozen=True, tag="retuned"):
    """Budgets and times changed; how rows are cut into pages and batches never does."""

    decided_ns: int
    policy: Policy


class Counted(Record, frozen=True, tag="counted"):
    decided_ns: int
    cost: float
    # (the id of an error, rows that it ended for good)
    errors: list[tuple[int, int]]


class Stopped(Record, frozen=True, tag="stopped"):
    decided_ns: int
    why: str


class Resumed(Record, frozen=True, tag="resumed"):
    decided_ns: int


class Halted(Record, frozen=True, tag="halted"):
    decided_ns: int
    seq: int
    prior: str
    attempted: str
    owner: str
    why: str


LogEntry = (
    Opened
    | Adopted
    | Leased
    | Advanced
    | Ripened
    | Reclaimed
    | Cancelling
    | Cancelled
    | Committed
    | Retuned
    | Counted
    | Stopped
    | Resumed
    | Halted
)


def decode(body: bytes) -> LogEntry:
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreCorrupt(what="log entry", why=str(error)) from None


_decoder: msgspec.msgpack.Decoder[LogEntry] = msgspec.msgpack.Decoder(LogEntry)
