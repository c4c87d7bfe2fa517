from __future__ import annotations

from holdfast.clock import S
from holdfast.errors import Busy, Conflict
from holdfast.runner import LogEvent, LogKind, RecordedStep, StepKind
from tests.runner.rig import QUEUE, TIMERS, RunnerRig, ScriptedHandler

MODULES = ("holdfast.runner.hooks",)


def event_tuples(events: list[LogEvent]) -> list[tuple[LogKind, int, str, int]]:
    return [(event.kind, event.seq, event.status, event.detail) for event in events]


def test_log_hook_gets_failures_and_outcomes_with_the_retry_count(rig: RunnerRig) -> None:
    [seq] = rig.put(b"a")
    events: list[LogEvent] = []
    rig.run_until_idle(
        rig.runner(
            ScriptedHandler(Conflict(), Busy(), Busy()), retry_budget_max=3, log=events.append
        )
    )
    assert event_tuples(events) == [
        (LogKind.RETRYABLE, seq, "conflict", 1),
        (LogKind.REQUEUED, seq, "conflict", 1),
        (LogKind.RETRYABLE, seq, "busy", 2),
        (LogKind.REQUEUED, seq, "busy", 2),
        (LogKind.RETRYABLE, seq, "busy", 3),
        (LogKind.DEAD_LETTER, seq, "busy", 3),
    ]
    assert {(event.worker, event.queue) for event in events} == {("w", QUEUE)}


def test_log_hook_gets_a_fatal_failure_with_its_error_text(rig: RunnerRig) -> None:
    rig.put(b"a")
    events: list[LogEvent] = []
    rig.runner(ScriptedHandler(KeyError("k")), log=events.append).tick()
    assert event_tuples(events) == [
        (LogKind.FATAL, 1, "handler_error", 1),
        (LogKind.DEAD_LETTER, 1, "handler_error", 1),
    ]
    assert events[0].error == "KeyError: 'k'"


def test_log_hook_is_not_called_for_success(rig: RunnerRig) -> None:
    rig.put(b"a")
    events: list[LogEvent] = []
    rig.runner(log=events.append).tick()
    assert events == []


def test_log_hook_gets_a_lost_claim(rig: RunnerRig) -> None:
    rig.put(b"a")
    events: list[LogEvent] = []
    rig.runner(lambda work: rig.clock.advance(60 * S), log=events.append).tick()
    assert event_tuples(events) == [(LogKind.LOST, 1, "claim_lost", 0)]


def test_replay_hook_gets_every_step_with_its_frame(rig: RunnerRig) -> None:
    rig.put(b"a")
    rig.put_timer(b"t")
    steps: list[RecordedStep] = []
    rig.runner(ScriptedHandler(Busy(), ValueError()), replay=steps.append).tick()
    assert [(step.kind, step.queue, step.seq, step.result, step.frame) for step in steps] == [
        (StepKind.INBOX_ATTEMPT, QUEUE, 1, "", b"a"),
        (StepKind.INBOX_RESULT, QUEUE, 1, "busy", b"a"),
        (StepKind.TIMER_ATTEMPT, TIMERS, 1, "", b"t"),
        (StepKind.TIMER_RESULT, TIMERS, 1, "handler_error", b"t"),
        (StepKind.REQUEUE, QUEUE, 1, "busy", b"a"),
        (StepKind.DEAD_LETTER, TIMERS, 1, "handler_error", b"t"),
    ]
    assert {step.worker for step in steps} == {"w"}


def test_replay_hook_gets_the_attempt_before_the_handler_runs(rig: RunnerRig) -> None:
    rig.put(b"a")
    order: list[str] = []
    rig.runner(
        lambda work: order.append("handler"), replay=lambda step: order.append(step.kind.value)
    ).tick()
    assert order == ["inbox_attempt", "handler", "inbox_result"]


def test_errors_of_hooks_are_counted_and_ignored(rig: RunnerRig) -> None:
    rig.put(b"a", b"b")

    def broken(event: object) -> None:
        raise OSError("disk full")

    runner = rig.runner(ScriptedHandler(Busy()), log=broken, replay=broken)
    tick = runner.tick()
    assert (tick.done, tick.requeued) == (1, 1)
    # Replay hook: two attempts, two results, one requeue. Log hook: one failure, one requeue.
    assert runner.counters.snapshot().sink_errors == 7


def test_hooks_can_be_installed_on_a_running_runner(rig: RunnerRig) -> None:
    rig.put(b"a")
    runner = rig.runner(ScriptedHandler(Busy()))
    events: list[LogEvent] = []
    steps: list[RecordedStep] = []
    runner.hooks.log, runner.hooks.replay = events.append, steps.append
    runner.tick()
    assert events
    assert steps
