from __future__ import annotations

from holdfast.clock import S
from holdfast.errors import Busy, Conflict
from holdfast.runner import LogEvent, LogKind, Step, StepKind
from tests.runner.rig import QUEUE, TIMERS, Rig, Scripted

MODULES = ("holdfast.runner.hooks",)


def told(events: list[LogEvent]) -> list[tuple[LogKind, int, str, int]]:
    return [(event.kind, event.seq, event.status, event.detail) for event in events]


def test_failures_and_dispositions_are_logged_with_the_retry_count(rig: Rig) -> None:
    [seq] = rig.put(b"a")
    events: list[LogEvent] = []
    rig.run(rig.runner(Scripted(Conflict(), Busy(), Busy()), retry_budget_max=3, log=events.append))
    assert told(events) == [
        (LogKind.RETRYABLE, seq, "conflict", 1),
        (LogKind.REQUEUED, seq, "conflict", 1),
        (LogKind.RETRYABLE, seq, "busy", 2),
        (LogKind.REQUEUED, seq, "busy", 2),
        (LogKind.RETRYABLE, seq, "busy", 3),
        (LogKind.DEAD_LETTER, seq, "busy", 3),
    ]
    assert {(event.worker, event.queue) for event in events} == {("w", QUEUE)}


def test_a_fatal_failure_is_logged_as_one_with_its_text(rig: Rig) -> None:
    rig.put(b"a")
    events: list[LogEvent] = []
    rig.runner(Scripted(KeyError("k")), log=events.append).tick()
    assert told(events) == [
        (LogKind.FATAL, 1, "handler_error", 1),
        (LogKind.DEAD_LETTER, 1, "handler_error", 1),
    ]
    assert events[0].error == "KeyError: 'k'"


def test_success_is_not_news(rig: Rig) -> None:
    rig.put(b"a")
    events: list[LogEvent] = []
    rig.runner(log=events.append).tick()
    assert events == []


def test_a_lost_claim_is_logged(rig: Rig) -> None:
    rig.put(b"a")
    events: list[LogEvent] = []
    rig.runner(lambda work: rig.clock.advance(60 * S), log=events.append).tick()
    assert told(events) == [(LogKind.LOST, 1, "claim_lost", 0)]


def test_every_step_reaches_the_replay_hook_with_its_frame(rig: Rig) -> None:
    rig.put(b"a")
    rig.put_timer(b"t")
    steps: list[Step] = []
    rig.runner(Scripted(Busy(), ValueError()), replay=steps.append).tick()
    assert [(step.kind, step.queue, step.seq, step.result, step.frame) for step in steps] == [
        (StepKind.INBOX_ATTEMPT, QUEUE, 1, "", b"a"),
        (StepKind.INBOX_RESULT, QUEUE, 1, "busy", b"a"),
        (StepKind.TIMER_ATTEMPT, TIMERS, 1, "", b"t"),
        (StepKind.TIMER_RESULT, TIMERS, 1, "handler_error", b"t"),
        (StepKind.REQUEUE, QUEUE, 1, "busy", b"a"),
        (StepKind.DEAD_LETTER, TIMERS, 1, "handler_error", b"t"),
    ]
    assert {step.worker for step in steps} == {"w"}


def test_an_attempt_is_told_before_the_handler_runs(rig: Rig) -> None:
    rig.put(b"a")
    order: list[str] = []
    rig.runner(
        lambda work: order.append("handler"), replay=lambda step: order.append(step.kind.value)
    ).tick()
    assert order == ["inbox_attempt", "handler", "inbox_result"]


def test_hooks_that_raise_are_counted_and_break_nothing(rig: Rig) -> None:
    rig.put(b"a", b"b")

    def broken(event: object) -> None:
        raise OSError("disk full")

    runner = rig.runner(Scripted(Busy()), log=broken, replay=broken)
    tick = runner.tick()
    assert (tick.done, tick.requeued) == (1, 1)
    # Two attempts, two results and a requeue for the one; a failure and a requeue for the other.
    assert runner.counters.snapshot().sink_errors == 7


def test_sinks_and_hooks_can_be_installed_while_it_runs(rig: Rig) -> None:
    rig.put(b"a")
    runner = rig.runner(Scripted(Busy()))
    events: list[LogEvent] = []
    steps: list[Step] = []
    runner.hooks.log, runner.hooks.replay = events.append, steps.append
    runner.tick()
    assert events
    assert steps
