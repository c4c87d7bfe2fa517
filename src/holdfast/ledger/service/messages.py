"""Messages between children and the ledger service about rows. `spark.ledger_protocol` carries them in
frames.

Headers are typed structs. A malformed message is refused as a whole.
"""

from __future__ import annotations

import msgspec

from holdfast.ledger.events import FinishedRange
from holdfast.ledger.ranges import Range
from holdfast.ledger.runs import SpoolObject


class WireMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message header. Its fields are positional on the wire."""


class ResultlessRowReport(WireMessage, frozen=True, tag="Other"):
    """A row that ended without a result: skipped or failed. `state` is its ledger state. `raw` is
    the text of a result that did not match the schema.
    """

    seq: int
    state: int
    error_class: int
    error: str
    delay_ns: int = 0
    raw: str = ""


class GrantReport(WireMessage, frozen=True, tag="Move"):
    """A report of one grant: finished rows and rows to begin. The attachment has the results,
    `size` bytes.
    """

    epoch: int
    report_no: int
    digest: bytes
    done: list[FinishedRange]
    begin: list[Range]
    seqs: bytes
    lo: int
    resultless: list[ResultlessRowReport]
    size: int
    # With a spool: the object that holds the results of [lo, hi) and the `raw` texts.
    spool_object: SpoolObject | None = None
    hi: int = 0


class ClaimRows(WireMessage, frozen=True, tag="Claim"):
    """A request for rows in [lo, hi). The first `begin` of them begin at once. hi = -1: to the end."""

    rows: int
    begin: int
    lo: int = 0
    hi: int = -1


class Exchange(WireMessage, frozen=True, tag="Step"):
    """Reports and a claim in one frame and one commit. Only a child without a grant sets `wait_ms`.
    `known_epochs` are the grants that the child knows. The service sends a missing one again, whose
    reply was lost with a former service.
    """

    reports: list[GrantReport]
    claim: ClaimRows | None
    wait_ms: int
    calls: int
    cost: float
    latency: list[int]
    known_epochs: list[int] = []
    # Tokens used by the finished calls, and the estimate under which the service admitted them.
    tokens: int = 0
    tokens_estimated: int = 0


class GrantReportReply(WireMessage, frozen=True, tag="Moved"):
    """The reply to one report. `lost`: the child no longer owns the grant. Otherwise `rows_left`
    rows remain.
    """

    lost: bool
    rows_left: int
    stop: str
