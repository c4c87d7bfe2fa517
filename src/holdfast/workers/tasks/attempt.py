"""The task attempt: one execution of a task under one lease.

The task's code reads its attempt with `current_task`: the id, the attempt number, the idempotency
key shared by all attempts, and whether the attempt is cancelled. It can also report progress.
The `AttemptObserver` logs failed attempts and calls the hooks of the app.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import msgspec

from holdfast import codec, forks, logs, traces
from holdfast.app_hooks import NO_HOOKS, AppHooks
from holdfast.clock import Clock
from holdfast.config import ERROR_TEXT_CHARS_MAX, MESSAGE_BYTES_MAX
from holdfast.errors import HoldfastError, Invalid
from holdfast.runner.counters import RunnerCounters
from holdfast.runner.error_policy import OK_CODE, ErrorKind, HandlerExited, Refused, code_of
from holdfast.runner.hooks import LogEvent, LogKind, RecordedStep, StepKind
from holdfast.store.latency_histogram import LatencyHistogram
from holdfast.tasks.operations import AttemptOutcome, TaskGrant, TaskReport


class BadTaskResult(Refused):
    code = "bad_result"
    hint = "the task's result cannot be stored, or does not match its declared return type"


class TaskDefinition(Protocol):
    """The interface of a declared task to the worker."""

    name: str
    asynchronous: bool
    isolation: str
    # "batch", or "each": the outcome is committed before the worker starts another task.
    report: str

    def invoke(self, args: bytes) -> Any:
        """Call the function. For an asynchronous task, returns the awaitable."""

    def dump(self, value: Any) -> bytes: ...

    @property
    def home(self) -> tuple[str, str]:
        """The module and qualified name for an import in another process."""


class TaskAttempt:
    """The attempt that `hf.current_task()` returns."""

    __slots__ = (
        "add_capacity",
        "began_ns",
        "code",
        "dropped",
        "expires_ns",
        "grant",
        "lease_trace",
        "now",
        "progress_value",
        "progressed",
        "renew_ns",
        "reported",
        "taken_ns",
        "token",
    )  # fmt: skip

    def __init__(
        self,
        grant: TaskGrant,
        code: TaskDefinition,
        taken_ns: int = 0,
        renew_ns: int = 0,
        now: Callable[[], int] | None = None,
    ) -> None:
        self.grant = grant
        self.code = code
        self.token = (grant.seq, grant.lease)
        self.taken_ns = taken_ns
        self.began_ns = 0
        # In store time: the lease expiry, and the time of the next extension.
        self.expires_ns = grant.expires_ns
        self.renew_ns = renew_ns
        # The local estimate of store time. It advances while the store is unavailable.
        self.now = now
        self.dropped = self.progressed = False
        # Whether the attempt's own commit has completed its task.
        self.reported = False
        # The context of the span of the lease, if it has one.
        self.lease_trace = b""
        self.progress_value: bytes | None = None
        # Adds executor capacity while this attempt waits for other tasks.
        self.add_capacity: Callable[[int], None] | None = None

    def begin(self, now_ns: int, clock: Clock) -> None:
        self.began_ns = now_ns

    # -- for the task's own code -----------------------------------------------------------------

    @property
    def id(self) -> str:
        return f"{self.grant.generation}-{self.grant.seq}"

    @property
    def attempt(self) -> int:
        """The attempt number, starting at 1."""
        return self.grant.attempt

    @property
    def idempotency_key(self) -> str:
        """The idempotency key: equal for all attempts of this task, unique among tasks."""
        return f"task-{self.grant.generation}-{self.grant.seq}"

    @property
    def cancelled(self) -> bool:
        """Whether the result of this attempt will be discarded: the task was cancelled, or the
        lease is lost.
        """
        return self.dropped or self.lease_expired

    @property
    def lease_expired(self) -> bool:
        """Whether the lease has expired by the local clock. Another worker may then have the task."""
        return self.now is not None and self.now() >= self.expires_ns

    def progress(self, value: Any = None) -> None:
        """Report progress and restart the execution window. The optional value is shown in task
        queries.
        """
        if value is not None:
            try:
                packed = codec.pack_value(value)
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                raise Invalid(what="progress", why=str(error)) from None
            if len(packed) > PROGRESS_BYTES_MAX:
                raise Invalid(what="progress", bytes=len(packed), bytes_max=PROGRESS_BYTES_MAX)
            self.progress_value = packed
        self.progressed = True


PROGRESS_BYTES_MAX = 4096
CURRENT: ContextVar[Any] = ContextVar("holdfast_task")


def current_task() -> TaskAttempt:
    """Return the attempt that runs the calling code."""
    try:
        attempt: TaskAttempt = CURRENT.get()
    except LookupError:
        raise Invalid(what="current_task", why="no task runs here") from None
    return attempt


@contextlib.contextmanager
def waiting_for_tasks() -> Iterator[None]:
    """Add one executor slot while a task waits for other tasks, so that waiting tasks cannot
    deadlock the worker. No effect outside of tasks.
    """
    attempt = CURRENT.get(None)
    add_capacity = None if attempt is None else attempt.add_capacity
    if add_capacity is not None:
        add_capacity(1)
    try:
        yield
    finally:
        if add_capacity is not None:
            add_capacity(-1)


# An enum member lookup takes longer than packing a result.
_OUTCOME_OK = int(AttemptOutcome.OK)


class AttemptResult(msgspec.Struct):
    """The result of an attempt with its report."""

    work: TaskAttempt
    report: TaskReport
    # 0 if not measured.
    latency_ns: int = 0
    # Whether the report is already committed.
    reported: bool = False


def run_attempt(task_attempt: TaskAttempt, clock: Clock | None = None) -> AttemptResult:
    """Run an attempt in this thread. Without a clock the caller measures the latency, which saves
    clock reads.
    """
    began_ns = task_attempt.began_ns
    code, grant = task_attempt.code, task_attempt.grant
    mark = CURRENT.set(task_attempt)
    traced = _enter_trace(task_attempt)
    before = forks.fork_count
    try:
        report = completed_report(grant, code.dump(code.invoke(grant.args)))
    except Exception as error:
        if forks.fork_count != before:
            forks.exit_child(error)
        report = failed_report(task_attempt, error)
    except BaseException as error:
        if forks.fork_count != before:
            forks.exit_child(error)
        # Real interrupts reach only the main thread, so the task itself raised this.
        report = failed_report(task_attempt, _handler_exited(error))
    finally:
        CURRENT.reset(mark)
    if traced is not None:
        traced.exit(report.reason, report.error)
    return AttemptResult(task_attempt, report, 0 if clock is None else clock.mono_ns() - began_ns)


async def run_attempt_async(task_attempt: TaskAttempt, clock: Clock) -> AttemptResult:
    """Run the attempt of a coroutine. It has its own asyncio task and therefore its own context."""
    began_ns = task_attempt.began_ns
    CURRENT.set(task_attempt)
    traced = _enter_trace(task_attempt)
    try:
        answer: Awaitable[Any] = task_attempt.code.invoke(task_attempt.grant.args)
        report = completed_report(task_attempt.grant, task_attempt.code.dump(await answer))
    except Exception as error:
        report = failed_report(task_attempt, error)
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and task_attempt.dropped:
            if traced is not None:
                traced.exit("cancelled")
            raise
        report = failed_report(task_attempt, _handler_exited(error))
    if traced is not None:
        traced.exit(report.reason, report.error)
    latency_ns = clock.mono_ns() - began_ns
    return AttemptResult(task_attempt, report, latency_ns, task_attempt.reported)


def _enter_trace(attempt: TaskAttempt) -> traces.TraceScope | None:
    """Start the span of an attempt, if the task has a trace context or the process has a tracer."""
    grant = attempt.grant
    if not traces.makes_span(grant.trace):
        return traces.pass_on(grant.trace)
    attributes = traces.message_attributes("run", "process", grant.queue)
    attributes |= {
        "messaging.message.id": str(grant.seq),
        "holdfast.task.id": attempt.id,
        "holdfast.task.name": grant.name,
        "holdfast.attempt": grant.attempt,
    }
    links = (attempt.lease_trace,) if attempt.lease_trace else ()
    return traces.enter(grant.trace, f"run {grant.name}", traces.CONSUMER, attributes, links=links)


def result_of_error(attempt: TaskAttempt, error: Exception, latency_ns: int) -> AttemptResult:
    return AttemptResult(attempt, failed_report(attempt, error), latency_ns)


def released_result(attempt: TaskAttempt) -> AttemptResult:
    """Return the result of an attempt that was not started because its lease was over."""
    return AttemptResult(
        attempt, TaskReport(attempt.grant.seq, attempt.grant.lease, AttemptOutcome.RELEASED)
    )


def completed_report(grant: TaskGrant, result: bytes) -> TaskReport:
    if len(result) > MESSAGE_BYTES_MAX:
        raise BadTaskResult(bytes=len(result), bytes_max=MESSAGE_BYTES_MAX)
    return TaskReport(grant.seq, grant.lease, _OUTCOME_OK, result)


def failed_report(attempt: TaskAttempt, error: Exception) -> TaskReport:
    outcome = AttemptOutcome.REFUSED if isinstance(error, Refused) else AttemptOutcome.FAILED
    return TaskReport(
        attempt.grant.seq, attempt.grant.lease, outcome, b"", code_of(error), error_text(error)
    )


def _handler_exited(error: BaseException) -> HandlerExited:
    exit_code = error.code if isinstance(error, SystemExit) else None
    return HandlerExited(
        raised=type(error).__name__, status=exit_code if isinstance(exit_code, int) else 1
    )


def error_text(error: Exception) -> str:
    """Return the text of an error, even if its `__str__` raises."""
    try:
        text = str(error)
    except Exception:
        text = "(its text could not be had)"
    full_text = text if isinstance(error, HoldfastError) else f"{type(error).__name__}: {text}"
    # A lone surrogate cannot be stored.
    return full_text[:ERROR_TEXT_CHARS_MAX].encode(errors="replace").decode()


class AttemptObserver:
    """Reports the finished attempts of a task worker: a log line for a failure, and calls of the hooks of the app."""

    def __init__(self, universe: str, worker: str, hooks: AppHooks) -> None:
        self._universe = universe
        self._worker = worker
        self._hooks = hooks
        self._counters = RunnerCounters(hooks.metrics)
        self.outcomes = [0] * len(AttemptOutcome)
        self.latencies = LatencyHistogram()

    def observe(self, results: list[AttemptResult]) -> None:
        outcomes, add_latency = self.outcomes, self.latencies.add
        for result in results:
            end = result.report.end
            outcomes[end] += 1
            if end != AttemptOutcome.RELEASED:
                add_latency(result.latency_ns)
                if end:
                    self._log_failure(result)
        if self._hooks is not NO_HOOKS:
            for result in results:
                if result.report.end != AttemptOutcome.RELEASED:
                    self._call_hooks(result)

    def _log_failure(self, result: AttemptResult) -> None:
        report, attempt = result.report, result.work
        logs.warn("tasks", "attempt failed", universe=self._universe, task=attempt.id,
                  name=attempt.grant.name, attempt=attempt.attempt, worker=self._worker,
                  code=report.reason, error=report.error, trace_id=traces.trace_id(attempt.grant.trace))  # fmt: skip

    def _call_hooks(self, result: AttemptResult) -> None:
        report, attempt = result.report, result.work
        grant = attempt.grant
        is_ok = report.end == AttemptOutcome.OK
        status = OK_CODE if is_ok else report.reason
        is_refused = report.end == AttemptOutcome.REFUSED
        kind = ErrorKind.SUCCESS if is_ok else ErrorKind.REFUSED if is_refused else ErrorKind.TRANSIENT  # fmt: skip
        self._counters.count_attempt(kind, result.latency_ns)
        try:
            if self._hooks.log is not None and not is_ok:
                self._hooks.log(
                    LogEvent(
                        kind=LogKind.FATAL if is_refused else LogKind.RETRYABLE,
                        worker=self._worker,
                        seq=grant.seq,
                        status=status,
                        detail=attempt.attempt,
                        queue=grant.name,
                        error=report.error,
                    )
                )
            if self._hooks.replay is not None:
                self._hooks.replay(
                    RecordedStep(
                        kind=StepKind.INBOX_RESULT,
                        worker=self._worker,
                        seq=grant.seq,
                        result=status,
                        frame=grant.args,
                        queue=grant.name,
                        number=grant.lease,
                        attempt=attempt.attempt,
                    )
                )
        except Exception:
            self._counters.add("sink_errors")


RunAttempt = Callable[[TaskAttempt], AttemptResult]
# The public name.
TaskRun = TaskAttempt
