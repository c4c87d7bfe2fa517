"""The events of a run's log. Each entry carries the time of its decision. A replay needs no clock
and yields the same state on every machine.

    RunOpened        size and policy of the run
    RowsAdopted      rows take the outcome that an earlier run of this name has for the same key and content
    RowsGranted      rows are leased to an owner, and the first of them may begin at once
    RowsReported     an owner reported outcomes and begins further rows, with the failures to retry
    RetriesDue       retries whose backoff has ended are free again
    GrantReclaimed   a grant ended: rows not begun are free, begun rows are suspects or failed
    CancelStarted    rows not begun are cancelled, and begun rows have the grace period
    CancelCompleted  the grace period ended: begun rows are cancelled, grants are void
    RowsCommitted    rows up to a seq are in the sink, under this version
    PolicyChanged    new budgets and times apply
    StopCountsAdded  cost and error counts for the stop rules
    StopRuleReached  a stop rule matched: no row is granted or begun
    RunResumed       a driver started the run again: rows are granted, stop counts restart
    LedgerHalted     a worker attempted an illegal transition: the run is frozen

Entries record decisions, not reasons. A replay does not evaluate the policy again.
"""

from __future__ import annotations

import msgspec

from holdfast.codec import Record
from holdfast.errors import StoreCorrupt
from holdfast.ledger.ranges import Range as Range
from holdfast.ledger.run_policy import RunPolicy


class RowRange(Record, frozen=True):
    """Rows of a grant with the same attempt number. The first attempt is 1."""

    lo: int
    hi: int
    attempt: int


class FinishedRange(Record, frozen=True):
    """Rows with the same outcome. `code` is their state. A failure has its class and an optional
    delay.
    """

    lo: int
    hi: int
    code: int
    error_class: int = 0
    # Above 0: the delay requested by the failure. It replaces the policy's backoff.
    delay_ns: int = 0


class RetriedRange(Record, frozen=True):
    lo: int
    hi: int
    error_class: int
    not_before_ns: int


class RunOpened(Record, frozen=True, tag="opened"):
    decided_ns: int
    size: int
    policy: RunPolicy


class AdoptedRange(Record, frozen=True):
    """Rows that ended in another run as its rows from `from_lo` on. `code` is their state there."""

    lo: int
    hi: int
    from_lo: int
    code: int
    error_class: int = 0


class RowsAdopted(Record, frozen=True, tag="adopted"):
    """One decision that dispatches the rows, begins them under a new epoch and finishes them."""

    decided_ns: int
    epoch: int
    from_run: str
    rows: list[AdoptedRange]


class RowsGranted(Record, frozen=True, tag="leased"):
    decided_ns: int
    epoch: int
    owner: str
    ranges: list[RowRange]
    begun: list[Range]
    isolated: bool


class RowsReported(Record, frozen=True, tag="advanced"):
    decided_ns: int
    epoch: int
    report_no: int
    digest: bytes
    done: list[FinishedRange]
    retried: list[RetriedRange]
    begun: list[Range]
    # Why the owner must not begin rows; empty while the run accepts work.
    stop: str = ""


class RetriesDue(Record, frozen=True, tag="ripened"):
    decided_ns: int


class GrantReclaimed(Record, frozen=True, tag="reclaimed"):
    """The end of a grant. `why` is expired, closed, returned or superseded."""

    decided_ns: int
    epoch: int
    why: str
    suspects: list[Range]
    failed: list[Range]
    # Used instead of both while the run is being cancelled: no owner remains to finish these rows.
    cancelled: list[Range]


class CancelStarted(Record, frozen=True, tag="cancelling"):
    decided_ns: int
    grace_ends_ns: int


class CancelCompleted(Record, frozen=True, tag="cancelled"):
    decided_ns: int


class RowsCommitted(Record, frozen=True, tag="committed"):
    decided_ns: int
    upto: int
    version: int


class PolicyChanged(Record, frozen=True, tag="retuned"):
    """Changed budgets and times. The sizes of pages and batches never change."""

    decided_ns: int
    policy: RunPolicy


class StopCountsAdded(Record, frozen=True, tag="counted"):
    decided_ns: int
    cost: float
    # (error id, rows that finally failed with it)
    errors: list[tuple[int, int]]


class StopRuleReached(Record, frozen=True, tag="stopped"):
    decided_ns: int
    why: str


class RunResumed(Record, frozen=True, tag="resumed"):
    decided_ns: int


class LedgerHalted(Record, frozen=True, tag="halted"):
    decided_ns: int
    seq: int
    prior: str
    attempted: str
    owner: str
    why: str


LogEntry = (
    RunOpened
    | RowsAdopted
    | RowsGranted
    | RowsReported
    | RetriesDue
    | GrantReclaimed
    | CancelStarted
    | CancelCompleted
    | RowsCommitted
    | PolicyChanged
    | StopCountsAdded
    | StopRuleReached
    | RunResumed
    | LedgerHalted
)


def decode_entry(body: bytes) -> LogEntry:
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreCorrupt(what="log entry", why=str(error)) from None


_decoder: msgspec.msgpack.Decoder[LogEntry] = msgspec.msgpack.Decoder(LogEntry)
