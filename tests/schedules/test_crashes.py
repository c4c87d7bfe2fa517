"""Timer workers that die at every commit: no occurrence runs twice, none is lost."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

import holdfast as hf
from holdfast.clock import SimClock
from holdfast.ops.verify import find_differences
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend
from tests.flows.rig import CRASHES
from tests.schedules.rig import ScheduleRig

MODULES = ("holdfast.schedules.operations", "holdfast.schedules.unit_of_work")


class ScheduleRun:
    """The externally visible results of a run: the occurrences, and the calls of functions."""

    def __init__(
        self, timer_crashes: dict[int, str], worker_crashes: dict[int, str] | None = None
    ) -> None:
        calls: Counter[str] = Counter()

        @hf.task
        def report(city: str) -> None:
            calls[city] += 1

        @hf.flow
        async def sweep() -> None:
            calls["sweep"] += 1
            await hf.sleep(11 * 60)

        clock = SimClock()
        app = hf.App("flows", tasks=[report], flows=[sweep])
        with InProcessStore("memory:", MemoryBackend(), clock) as store:
            rig = ScheduleRig(store, clock, app)
            rig.create("skip", report, "*/3 * * * *", args=("skip",))
            rig.create("queue", report, "*/3 * * * *", overlap="queue", args=("queue",))
            rig.create("all", report, "*/3 * * * *", overlap="allow", missed="all", args=("all",))
            rig.create("sweep", sweep, "*/5 * * * *", overlap="queue")
            rig.plan.update(timer_crashes)
            rig.flows.plan.update(worker_crashes or {})
            # Nothing runs for the first ten minutes, and the timer worker is away for five.
            rig.pass_until("2026-11-13T09:10:00")
            rig.set_wall("2026-11-13T09:15:10")
            rig.pass_until("2026-11-13T09:31:00", rig.run_tasks)
            self.commits = rig.timer_store.commits
            self.worker_commits = rig.flows.crashing_store.points
            self.uses = {name: rig.uses(name) for name in ("skip", "queue", "all", "sweep")}
            self.targets = {name: rig.started(name) for name in self.uses}
            self.calls = calls
            self.left = {**rig.plan, **rig.flows.plan}
            rig.flows.threads.shutdown(wait=True)
            assert store.read(find_differences) == []

    def started(self) -> Counter[str]:
        return Counter(
            {name: sum("started" in use for use in uses) for name, uses in self.uses.items()}
        )


def test_undisturbed_run_uses_every_occurrence() -> None:
    run = ScheduleRun({})
    assert run.uses["skip"][:4] == [
        "09:03 started", "09:06 skipped overlap", "09:09 skipped overlap", "09:12 skipped overlap",
    ]  # fmt: skip
    assert [use[:5] for use in run.uses["all"]] == [
        "09:03", "09:06", "09:09", "09:12", "09:15", "09:18", "09:21", "09:24", "09:27", "09:30",
    ]  # fmt: skip
    assert run.calls["all"] == 10
    assert len(run.targets["queue"]) == run.calls["queue"]


@pytest.mark.slow
def test_timer_worker_that_dies_at_any_commit_changes_no_outcome() -> None:
    undisturbed = ScheduleRun({})
    assert undisturbed.commits > 10
    for commit, mode in product(range(1, undisturbed.commits + 1), CRASHES):
        run = ScheduleRun({commit: mode})
        assert (run.left, run.uses, run.calls) == (
            {}, undisturbed.uses, undisturbed.calls,
        ), (commit, mode)  # fmt: skip


@pytest.mark.slow
def test_task_worker_that_dies_at_any_commit_starts_no_occurrence_twice() -> None:
    undisturbed = ScheduleRun({})
    for commit, mode in product(undisturbed.worker_commits, CRASHES):
        run = ScheduleRun({}, {commit: mode})
        assert run.left == {}
        for name, targets in run.targets.items():
            assert len(set(targets)) == len(targets) == run.started()[name], (commit, mode)
        # A repeated attempt is one more call. Every started task was called.
        for name in ("skip", "queue", "all"):
            count = len(run.targets[name])
            assert count <= run.calls[name] <= count + 1, (commit, mode, name)
