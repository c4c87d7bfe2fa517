"""The records of a flow: everything that a replay needs, in one total order.

A record is its own row, written in the commit of its decision. A replay delivers the outcomes of steps in the
order of their records. `decided_ns` is the store time of the commit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import msgspec

from holdfast import codec


class _FlowRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class StepCompleted(_FlowRecord, frozen=True, tag=1):
    """The outcome of a step. Its identity is (name, occurrence). `digest` is of its arguments."""

    name: str
    occurrence: int
    position: int
    digest: bytes
    value: bytes = b""
    blob: bytes = b""
    attempts: int = 1
    began_ns: int = 0
    # The number of the received event.
    mail: int = 0


class StepFailure(_FlowRecord, frozen=True, tag=2):
    """The final failure of a step. `code` "timeout" of a receive raises `Timeout` in the flow."""

    name: str
    occurrence: int
    position: int
    digest: bytes
    code: str
    error_type: str = ""
    error: str = ""
    attempts: int = 1
    began_ns: int = 0
    # The seq of the child task that failed.
    child: int = 0


class Published(_FlowRecord, frozen=True, tag=3):
    name: str
    value: bytes


class UndoRegistered(_FlowRecord, frozen=True, tag=4):
    """A registered compensation. The compensations run in the reverse order of these records."""

    name: str
    occurrence: int
    position: int
    digest: bytes


class CancelRequested(_FlowRecord, frozen=True, tag=5):
    pass


class FlowTimedOut(_FlowRecord, frozen=True, tag=6):
    pass


class AttemptRaised(_FlowRecord, frozen=True, tag=7):
    """The flow's own code raised. The flow runs again after `not_before_ns`."""

    error_type: str
    error: str
    not_before_ns: int


class CompensationStarted(_FlowRecord, frozen=True, tag=8):
    """The flow ends in `state` after its compensations."""

    state: int
    code: str
    step: str = ""
    error_type: str = ""
    error: str = ""
    # Of the step.
    occurrence: int = 0


class FlowParked(_FlowRecord, frozen=True, tag=9):
    """The replay diverged at a step. `code_version` is the fingerprint of the code that found it. `code` is
    that of the blocker."""

    step: str
    why: str
    code_version: str = ""
    code: str = ""


class FlowResumed(_FlowRecord, frozen=True, tag=10):
    pass


class FlowEnded(_FlowRecord, frozen=True, tag=11):
    state: int
    code: str = ""
    step: str = ""
    error_type: str = ""
    error: str = ""
    # The digest of the result.
    digest: bytes = b""
    # Of the step.
    occurrence: int = 0


class FlowRedriven(_FlowRecord, frozen=True, tag=12):
    """An operator redrove the flow: the failed step runs again. `tasks` has the child tasks of the steps that run again:
    (name, occurrence, seq)."""

    name: str = ""
    occurrence: int = 0
    tasks: tuple[tuple[str, int, int], ...] = ()


class ParentUndo(NamedTuple):
    """A compensation that the parent of a fork registered."""

    name: str
    occurrence: int
    position: int


class Forked(_FlowRecord, frozen=True, tag=13):
    """The flow is a fork. `position` is that of the step at which it was forked, in its parent."""

    position: int
    # The number of records after this one that were taken over. -1 in the records of former releases: there the steps
    # and the compensations before `position` are those of the parent.
    taken: int = -1
    # The compensations of the parent's steps. The fork does not register them.
    undos: tuple[ParentUndo, ...] = ()

    def took(self, index: int, outcome: StepOutcome) -> bool:
        """Whether the outcome is one of the parent. `index` counts the records of the run from 0."""
        return index <= self.taken if self.taken >= 0 else outcome.position < self.position


class UndoRedriven(_FlowRecord, frozen=True, tag=14):
    """An operator redrove a failed compensation: it runs again. `tasks` as in `FlowRedriven`, also those of the
    compensations that were redriven before."""

    name: str
    occurrence: int
    tasks: tuple[tuple[str, int, int], ...] = ()


AnyRecord: TypeAlias = (
    StepCompleted
    | StepFailure
    | Published
    | UndoRegistered
    | CancelRequested
    | FlowTimedOut
    | AttemptRaised
    | CompensationStarted
    | FlowParked
    | FlowResumed
    | FlowEnded
    | FlowRedriven
    | Forked
    | UndoRedriven
)
StepOutcome: TypeAlias = StepCompleted | StepFailure


def without_end(records: Iterable[AnyRecord], redriven: FlowRedriven) -> list[AnyRecord]:
    """The records of a flow after a redrive: without its end, the failure that caused it, and the failures after that
    one, which its code has not seen. These steps run again."""
    failed = (redriven.name, redriven.occurrence)
    kept: list[AnyRecord] = []
    reached = False
    for record in records:
        if isinstance(record, StepFailure):
            reached = reached or (record.name, record.occurrence) == failed
        if not (
            isinstance(record, CancelRequested | FlowTimedOut | CompensationStarted | FlowEnded)
            or (reached and isinstance(record, StepFailure))
        ):
            kept.append(record)
    return kept


class RecordRow(codec.Record, frozen=True):
    decided_ns: int
    record: AnyRecord


decode_record = codec.decoder(RecordRow).decode
