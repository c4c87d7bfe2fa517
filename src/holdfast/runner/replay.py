"""Replay of recorded attempts through a handler, without a store.

Replay calls the handler with the frame of each attempt and compares the result code with the recorded
one. An attempt without a recorded result marks a worker crash. It is run too, and reported as unfinished.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.durable.queue import Claim
from holdfast.runner.error_policy import code_of
from holdfast.runner.hooks import RecordedStep, StepKind
from holdfast.runner.recorder import RecordingDamaged, read_steps
from holdfast.runner.work import WorkHandler, WorkItem, WorkKind

_ATTEMPTS: dict[StepKind, WorkKind] = {
    StepKind.INBOX_ATTEMPT: "queue",
    StepKind.TIMER_ATTEMPT: "timer",
}
_RESULTS = frozenset({StepKind.INBOX_RESULT, StepKind.TIMER_RESULT})
_NO_DEADLINE_NS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ReplayedAttempt:
    """One replayed attempt. `recorded` is None when the recording has no result."""

    attempt: RecordedStep
    recorded: str | None
    result: str


@dataclass(slots=True)
class ReplayReport:
    attempts: int = 0
    matched: int = 0
    mismatches: list[ReplayedAttempt] = field(default_factory=list)
    unfinished: list[ReplayedAttempt] = field(default_factory=list)
    # Recorded counts. Replay has no store, so it does not requeue or dead-letter.
    requeues: int = 0
    dead_letters: int = 0
    # The damage that ended the recording, if any. All steps before it were run.
    damage: RecordingDamaged | None = None

    @property
    def ok(self) -> bool:
        return not self.mismatches and self.damage is None


def replay_file(path: str | os.PathLike[str], handler: WorkHandler) -> ReplayReport:
    report = ReplayReport()
    try:
        _replay(read_steps(path), handler, report)
    except RecordingDamaged as damage:
        report.damage = damage
    return report


def replay(steps: Iterable[RecordedStep], handler: WorkHandler) -> ReplayReport:
    report = ReplayReport()
    _replay(steps, handler, report)
    return report


def _replay(steps: Iterable[RecordedStep], handler: WorkHandler, report: ReplayReport) -> None:
    """Fill the report incrementally, so that it contains the steps before a damage."""
    open_attempts: dict[tuple[str, str, int, int], ReplayedAttempt] = {}
    try:
        for step in steps:
            key = (step.worker, step.queue, step.seq, step.number)
            if step.kind in _ATTEMPTS:
                report.attempts += 1
                open_attempts[key] = ReplayedAttempt(step, None, _result_of(step, handler))
            elif step.kind in _RESULTS:
                if key in open_attempts:
                    _compare(open_attempts.pop(key), step.result, report)
            elif step.kind is StepKind.REQUEUE:
                report.requeues += 1
            else:
                report.dead_letters += 1
    finally:
        report.unfinished.extend(open_attempts.values())


def _compare(rerun: ReplayedAttempt, recorded: str, report: ReplayReport) -> None:
    if rerun.result == recorded:
        report.matched += 1
    else:
        report.mismatches.append(ReplayedAttempt(rerun.attempt, recorded, rerun.result))


def _result_of(step: RecordedStep, handler: WorkHandler) -> str:
    claim = Claim(
        queue=step.queue,
        seq=step.seq,
        number=step.number,
        owner=step.worker,
        expires_ns=_NO_DEADLINE_NS,
        priority=0,
        failures=step.attempt - 1,
        expiries=0,
        enqueued_ns=0,
        payload=step.frame,
    )
    try:
        handler(
            WorkItem(
                claim, step.frame, _ATTEMPTS[step.kind], lambda claim, ttl_ms: claim.expires_ns
            )
        )
    except Exception as error:
        return code_of(error)
    return code_of(None)
