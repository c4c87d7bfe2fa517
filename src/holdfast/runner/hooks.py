"""Observability hooks of a runner: counters, a log sink and a replay hook.

    counters       metrics                            `RunnerCounters` and its sink
    log sink       errors, for operators              `LogEvent`
    replay hook    every step, for a post-mortem      `RecordedStep`, written by `Recorder`

All three are called synchronously and cannot break the loop: their exceptions are counted as
`sink_errors` and dropped. Frames are immutable bytes, so a hook may keep its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from holdfast import codec, logs, traces
from holdfast.app_hooks import AppHooks
from holdfast.codec import Record
from holdfast.errors import Invalid, StoreClosed, StoreGone, StoreReplaced
from holdfast.messages import Intent
from holdfast.runner.counters import RunnerCounters
from holdfast.runner.error_policy import OK_CODE, ErrorKind, code_of
from holdfast.runner.work import WorkItem, WorkOutcome


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
    # The seq of the item, or 0 for an error of the loop.
    seq: int
    # "ok", or the code of the error.
    status: str
    # Failures of the item, including this one.
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


ATTEMPT_KIND = {"queue": StepKind.INBOX_ATTEMPT, "timer": StepKind.TIMER_ATTEMPT}
RESULT_KIND = {"queue": StepKind.INBOX_RESULT, "timer": StepKind.TIMER_RESULT}


class RecordedStep(Record, frozen=True):
    kind: StepKind
    worker: str
    seq: int
    # "ok" or the error code. Empty for an attempt, which has no result yet.
    result: str
    frame: bytes
    queue: str
    # Claim number and attempt number of the item. They match a result with its attempt.
    number: int
    attempt: int


LogSink = Callable[[LogEvent], object]
ReplayHook = Callable[[RecordedStep], object]


def runner_options(hooks: AppHooks) -> dict[str, Any]:
    """Return the options of a runner with the hooks of an app."""
    return {"log": hooks.log, "replay": hooks.replay, "counters": RunnerCounters(hooks.metrics)}


class Hooks:
    """The dispatcher of runner events: each method updates the counters and calls the log sink and the replay hook."""

    def __init__(
        self,
        worker: str,
        counters: RunnerCounters,
        log: LogSink | None = None,
        replay: ReplayHook | None = None,
    ) -> None:
        self.worker = worker
        self.counters = counters
        self.log = log
        self.replay = replay

    def began(self, work: WorkItem) -> None:
        self.counters.add("attempts")
        self._step(ATTEMPT_KIND[work.kind], work, "")

    def ended(self, outcome: WorkOutcome, kind: ErrorKind) -> None:
        self.counters.count_attempt(kind, outcome.latency_ns)
        self._step(RESULT_KIND[outcome.work.kind], outcome.work, code_of(outcome.error))
        if kind is not ErrorKind.SUCCESS:
            self._log(LogKind.RETRYABLE if kind.retryable else LogKind.FATAL, outcome)

    def requeued(self, outcome: WorkOutcome) -> None:
        self.counters.add("requeues")
        self._step(StepKind.REQUEUE, outcome.work, code_of(outcome.error))
        self._log(LogKind.REQUEUED, outcome)
        _log_line(logs.inform, "attempt failed", self.worker, outcome)

    def dead_lettered(self, outcome: WorkOutcome) -> None:
        self.counters.add("dead_letters")
        self._step(StepKind.DEAD_LETTER, outcome.work, code_of(outcome.error))
        self._log(LogKind.DEAD_LETTER, outcome)
        _log_line(logs.warn, "dead letter", self.worker, outcome)

    def lost(self, work: WorkItem) -> None:
        self.counters.add("lost")
        claim = work.claim
        ids = _intent_ids(work.payload) if "/effects/" in claim.queue else {}
        logs.warn(
            "runner", "claim lost", queue=claim.queue, seq=work.seq, worker=self.worker, **ids
        )
        self._call_sink(
            self.log,
            LogEvent,
            kind=LogKind.LOST,
            worker=self.worker,
            seq=work.seq,
            status="claim_lost",
            detail=claim.failures,
            queue=claim.queue,
        )

    def released(self) -> None:
        self.counters.add("released")

    def loop_error(self, error: BaseException) -> None:
        self.counters.add("loop_errors")
        status = code_of(error) if isinstance(error, Exception) else type(error).__name__
        # The process reports a store that is gone, in one line for all runners.
        is_reported = isinstance(error, StoreClosed | StoreGone | StoreReplaced)
        log = logs.inform if is_reported else logs.warn
        log("runner", "runner failed", worker=self.worker, code=status, error=str(error))
        self._call_sink(
            self.log,
            LogEvent,
            kind=LogKind.LOOP_ERROR,
            worker=self.worker,
            seq=0,
            status=status,
            error=str(error),
        )

    def _log(self, kind: LogKind, outcome: WorkOutcome) -> None:
        claim, error = outcome.work.claim, outcome.error
        status, failures = code_of(error), claim.failures + 1
        self._call_sink(
            self.log,
            LogEvent,
            kind=kind,
            worker=self.worker,
            seq=claim.seq,
            status=status,
            detail=failures,
            queue=claim.queue,
            error=error_text(error),
        )

    def _step(self, kind: StepKind, work: WorkItem, result: str) -> None:
        if self.replay is None:
            return
        claim = work.claim
        self._call_sink(
            self.replay,
            RecordedStep,
            kind=kind,
            worker=self.worker,
            seq=claim.seq,
            result=result,
            frame=work.payload,
            queue=claim.queue,
            number=claim.number,
            attempt=work.attempt,
        )

    def _call_sink(
        self, sink: Callable[[Any], object] | None, event: type[Record], **fields: Any
    ) -> None:
        if sink is None:
            return
        try:
            sink(event(**fields))
        except Exception:
            self.counters.add("sink_errors")


def _log_line(log: Callable[..., None], message: str, worker: str, outcome: WorkOutcome) -> None:
    claim, error = outcome.work.claim, outcome.error
    universe, is_effect, kind = claim.queue.partition("/effects/")
    area, ids = "runner", {"queue": claim.queue}
    if is_effect:
        area, ids = "effects", {"universe": universe, "kind": kind, **_intent_ids(outcome.work.payload)}  # fmt: skip
    log(area, message, **ids, seq=claim.seq, worker=worker, failures=claim.failures + 1,
        code=code_of(error), error=error_text(error))  # fmt: skip


def _intent_ids(payload: bytes) -> dict[str, str]:
    try:
        intent = codec.unpack_as(Intent, payload)
    except Invalid:
        return {}
    return {
        "world_id": intent.world_id,
        "intent": intent.intent_hash.hex(),
        "trace_id": traces.trace_id(intent.trace),
    }


def error_text(error: Exception | None) -> str:
    """Format an error as one line for operators. Programs use the code."""
    if error is None:
        return OK_CODE
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        # An exception whose `str` fails must not lose the item.
        text = type(error).__name__
    # A lone surrogate is legal in a Python string but cannot be stored.
    return text.encode(errors="replace").decode()
