"""Reports finished attempts of a task worker: a log line for a failure, and calls of the hooks of the app."""

from __future__ import annotations

from holdfast import logs
from holdfast.runner.counters import RunnerCounters
from holdfast.runner.error_policy import OK_CODE, ErrorKind
from holdfast.runner.hooks import NO_HOOKS, AppHooks, LogEvent, LogKind, RecordedStep, StepKind
from holdfast.tasks.operations import AttemptOutcome
from holdfast.workers.tasks.attempt import AttemptResult


class AttemptObserver:
    def __init__(self, universe: str, worker: str, hooks: AppHooks) -> None:
        self._universe = universe
        self._worker = worker
        self._hooks = hooks
        self._counters = RunnerCounters(hooks.metrics)

    def observe(self, results: list[AttemptResult]) -> None:
        for result in results:
            if result.report.end and result.report.end != AttemptOutcome.RELEASED:
                self._log_failure(result)
        if self._hooks is not NO_HOOKS:
            for result in results:
                if result.report.end != AttemptOutcome.RELEASED:
                    self._call_hooks(result)

    def _log_failure(self, result: AttemptResult) -> None:
        report, attempt = result.report, result.work
        logs.warn("tasks", "attempt failed", universe=self._universe, task=attempt.id,
                  name=attempt.grant.name, attempt=attempt.attempt, worker=self._worker,
                  code=report.reason, error=report.error)  # fmt: skip

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
