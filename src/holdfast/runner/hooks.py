"""What a runner tells about itself: counters, a log, and steps that can be run again.

    counters       numbers, for dashboards            `Counters` and its sink
    log sink       what went wrong, for people        `LogEvent`
    replay hook    every step, for a post-mortem      `Step`, kept by `Recorder`

All three are called synchronously and none can break the loop: what they raise is counted under
`sink_errors` and dropped. Frames are immutable bytes, so a hook may keep what it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from holdfast.codec import Record
from holdfast.runner.counters import Counters
from holdfast.runner.faults import OK, Fault, code_of
from holdfast.runner.work import Outcome, Work


class LogKind(Enum):
    RETRYABLE = "retryable_failure"
    FATAL = "fatal_failure"
    REQUEUED = "requeued"
    DEAD_LETTER = "dead_letter"
    LOST = "lost"
    LOOP_ERROR = "loop_error"


class LogEvent(Record, frozen=True):
    kind: LogKind
    worker: str
    # The item's number in its queue, or 0 for what concerns the loop itself.
    seq: int
    # "ok", or the code of the error.
    status: str
    # How often the item has failed, this time included.
    detail: int = 0
    queue: str = ""
    error: str = ""


class StepKind(Enum):
    INBOX_ATTEMPT = "inbox_attempt"
    INBOX_RESULT = "inbox_result"
    TIMER_ATTEMPT = "timer_attempt"
    TIMER_RESULT = "timer_result"
    REQUEUE = "requeue"
    DEAD_LETTER = "dead_letter"


ATTEMPT = {"queue": StepKind.INBOX_ATTEMPT, "timer": StepKind.TIMER_ATTEMPT}
RESULT = {"queue": StepKind.INBOX_RESULT, "timer": StepKind.TIMER_RESULT}


class Step(Record, frozen=True):
    kind: StepKind
    worker: str
    seq: int
    # "ok", or the code of the error; empty for an attempt, which has no result yet.
    result: str
    frame: bytes
    queue: str
    # Which claim and which attempt of the item this was: they pair a result with its attempt.
    number: int
    attempt: int


LogSink = Callable[[LogEvent], object]
ReplayHook = Callable[[Step], object]


class Hooks:
    """One call per thing that happens; it reaches all three."""

    def __init__(
        self,
        worker: str,
        counters: Counters,
        log: LogSink | None = None,
        replay: ReplayHook | None = None,
    ) -> None:
        self.worker = worker
        self.counters = counters
        self.log = log
        self.replay = replay

    def began(self, work: Work) -> None:
        self.counters.add("attempts")
        self._step(ATTEMPT[work.kind], work, "")

    def ended(self, outcome: Outcome, fault: Fault) -> None:
        self.counters.finished(fault, outcome.latency_ns)
        self._step(RESULT[outcome.work.kind], outcome.work, code_of(outcome.error))
        if fault is not Fault.SUCCESS:
            self._log(LogKind.RETRYABLE if fault.retryable else LogKind.FATAL, outcome)

    def requeued(self, outcome: Outcome) -> None:
        self.counters.add("requeues")
        self._step(StepKind.REQUEUE, outcome.work, code_of(outcome.error))
        self._log(LogKind.REQUEUED, outcome)

    def buried(self, outcome: Outcome) -> None:
        self.counters.add("dead_letters")
        self._step(StepKind.DEAD_LETTER, outcome.work, code_of(outcome.error))
        self._log(LogKind.DEAD_LETTER, outcome)

    def lost(self, work: Work) -> None:
        self.counters.add("lost")
        claim = work.claim
        self._tell(
            self.log,
            LogEvent,
            LogKind.LOST,
            self.worker,
            work.seq,
            "claim_lost",
            claim.failures,
            claim.queue,
        )

    def released(self) -> None:
        self.counters.add("released")

    def loop_error(self, error: BaseException) -> None:
        self.counters.add("loop_errors")
        status = code_of(error) if isinstance(error, Exception) else type(error).__name__
        self._tell(
            self.log, LogEvent, LogKind.LOOP_ERROR, self.worker, 0, status, 0, "", str(error)
        )

    def _log(self, kind: LogKind, outcome: Outcome) -> None:
        claim, error = outcome.work.claim, outcome.error
        status, failures = code_of(error), claim.failures + 1
        self._tell(
            self.log,
            LogEvent,
            kind,
            self.worker,
            claim.seq,
            status,
            failures,
            claim.queue,
            text_of(error),
        )

    def _step(self, kind: StepKind, work: Work, result: str) -> None:
        claim = work.claim
        self._tell(
            self.replay,
            Step,
            kind,
            self.worker,
            claim.seq,
            result,
            work.payload,
            claim.queue,
            claim.number,
            work.attempt,
        )

    def _tell(
        self, listener: Callable[[Any], object] | None, event: type[Record], *fields: Any
    ) -> None:
        if listener is None:
            return
        try:
            listener(event(*fields))
        except Exception:
            self.counters.add("sink_errors")


def text_of(error: Exception | None) -> str:
    """One line for people. The code is for machines."""
    if error is None:
        return OK
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        # An exception whose text cannot be made must not cost us the item.
        text = type(error).__name__
    # Half a surrogate pair is legal in a string and in no store.
    return text.encode(errors="replace").decode()
