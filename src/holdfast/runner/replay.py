"""Replay: every recorded attempt once more, through a handler, without a store.

Each attempt's frame is handed to the handler at once and what comes of it is compared, by result
code, with what was recorded. An attempt without a recorded result is where a worker died in mid-step:
it is run too, and reported as unfinished.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.durable.queue import Claim
from holdfast.runner.faults import code_of
from holdfast.runner.hooks import Step, StepKind
from holdfast.runner.recording import Damaged, read_steps
from holdfast.runner.work import Handler, Kind, Work

_ATTEMPTS: dict[StepKind, Kind] = {
    StepKind.INBOX_ATTEMPT: "queue",
    StepKind.TIMER_ATTEMPT: "timer",
}
_RESULTS = frozenset({StepKind.INBOX_RESULT, StepKind.TIMER_RESULT})
_NO_DEADLINE_NS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Rerun:
    """One attempt, then and now. `recorded` is None when no result was."""

    attempt: Step
    recorded: str | None
    result: str


@dataclass(slots=True)
class ReplayReport:
    attempts: int = 0
    matched: int = 0
    mismatches: list[Rerun] = field(default_factory=list)
    unfinished: list[Rerun] = field(default_factory=list)
    # Dispositions that were recorded; a replay has no store to dispose in.
    requeues: int = 0
    dead_letters: int = 0
    # Where the file ends to be sound, if it does. Everything before it was run.
    damage: Damaged | None = None

    @property
    def ok(self) -> bool:
        return not self.mismatches and self.damage is None


def replay_file(path: str | os.PathLike[str], handler: Handler) -> ReplayReport:
    report = ReplayReport()
    try:
        _replay(read_steps(path), handler, report)
    except Damaged as damage:
        report.damage = damage
    return report


def replay(steps: Iterable[Step], handler: Handler) -> ReplayReport:
    report = ReplayReport()
    _replay(steps, handler, report)
    return report


def _replay(steps: Iterable[Step], handler: Handler, report: ReplayReport) -> None:
    """Fills the report as it goes, so that it holds what came before a damage."""
    open_attempts: dict[tuple[str, str, int, int], Rerun] = {}
    try:
        for step in steps:
            key = (step.worker, step.queue, step.seq, step.number)
            if step.kind in _ATTEMPTS:
                report.attempts += 1
                open_attempts[key] = Rerun(step, None, _result_of(step, handler))
            elif step.kind in _RESULTS:
                if key in open_attempts:
                    _compare(open_attempts.pop(key), step.result, report)
            elif step.kind is StepKind.REQUEUE:
                report.requeues += 1
            else:
                report.dead_letters += 1
    finally:
        report.unfinished.extend(open_attempts.values())


def _compare(rerun: Rerun, recorded: str, report: ReplayReport) -> None:
    if rerun.result == recorded:
        report.matched += 1
    else:
        report.mismatches.append(Rerun(rerun.attempt, recorded, rerun.result))


def _result_of(step: Step, handler: Handler) -> str:
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
            Work(claim, step.frame, _ATTEMPTS[step.kind], lambda claim, ttl_ms: claim.expires_ns)
        )
    except Exception as error:
        return code_of(error)
    return code_of(None)
