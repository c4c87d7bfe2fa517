"""Document 001, the sinks and the replay hook of a runner: an app installs them for every role of its processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.app.task_handle import TaskFailedError
from holdfast.errors import Invalid
from holdfast.runner.counters import Metrics
from holdfast.runner.hooks import LogEvent, LogKind, RecordedStep, StepKind
from tests.process.watch import until


class Pulled(hf.Event):
    pass


@hf.effect("pull", attempts=1)
def pull(call: hf.Call) -> int:
    raise ValueError("stuck")


class Lever(hf.World):
    ends: int = 0

    @hf.on(Pulled)
    def pulled(self, event: Pulled, cx: hf.Context) -> None:
        cx.do(pull)

    @hf.on(pull)
    def ended(self, receipt: Any, cx: hf.Context) -> None:
        self.ends += 1


@hf.task(attempts=1)
def lift(weight: int) -> int:
    if weight > 10:
        raise ValueError("too heavy")
    return weight


class Collected:
    def __init__(self) -> None:
        self.events: list[LogEvent] = []
        self.metrics: list[Metrics] = []
        self.steps: list[RecordedStep] = []
        self.hooks = hf.AppHooks(
            log=self.events.append, metrics=self.metrics.append, replay=self.steps.append
        )


def app_with(hooks: hf.AppHooks) -> hf.App:
    return hf.App("yard", worlds=[Lever], effects=[pull], tasks=[lift], hooks=hooks)


def test_hooks_of_an_app_are_called_for_effects_and_tasks(tmp_path: Path) -> None:
    collected = Collected()
    with app_with(collected.hooks).open(str(tmp_path / "store")) as rt:
        assert rt.submit(lift, 3).result(timeout=30) == 3
        with pytest.raises(TaskFailedError):
            rt.submit(lift, 30).result(timeout=30)
        lever = rt.world(Lever, "left")
        lever.send(Pulled())
        until(lambda: lever.state().ends == 1, "the receipt")
        until(lambda: any(one.kind is LogKind.DEAD_LETTER for one in collected.events), "the event")
    [task] = [one for one in collected.events if one.queue == "lift"]
    assert (task.kind, task.detail, task.error) == (LogKind.RETRYABLE, 1, "ValueError: too heavy")
    [dead] = [one for one in collected.events if one.kind is LogKind.DEAD_LETTER]
    assert (dead.queue, dead.error) == ("yard/effects/pull", "ValueError: stuck")
    results = [one for one in collected.steps if one.queue == "lift"]
    assert [one.kind for one in results] == [StepKind.INBOX_RESULT] * 2
    assert [one.result for one in results] == ["ok", task.status]
    assert [b"\x1e" in one.frame for one in results] == [False, True]
    assert {one.kind for one in collected.steps if one.queue == dead.queue} == {
        StepKind.INBOX_ATTEMPT, StepKind.INBOX_RESULT, StepKind.DEAD_LETTER,
    }  # fmt: skip
    assert any(one.successes == 1 and one.transients == 1 for one in collected.metrics)
    assert any(one.dead_letters == 1 for one in collected.metrics)


def test_errors_of_hooks_do_not_reach_tasks_or_effects(tmp_path: Path) -> None:
    def fail(event: object) -> None:
        raise RuntimeError("a hook failed")

    hooks = hf.AppHooks(log=fail, metrics=fail, replay=fail)
    with app_with(hooks).open(str(tmp_path / "store")) as rt:
        assert rt.submit(lift, 3).result(timeout=30) == 3
        lever = rt.world(Lever, "left")
        lever.send(Pulled())
        until(lambda: lever.state().ends == 1, "the receipt")


def test_hooks_of_another_type_are_refused() -> None:
    with pytest.raises(Invalid, match="AppHooks"):
        app_with(print)  # type: ignore[arg-type]
