"""Occurrences of schedules in simulated time: due, missed, overlapping, backfilled and removed ones."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

import holdfast as hf
from holdfast import failpoints
from holdfast.clock import S
from holdfast.errors import Invalid, KeyExpired, NotFound
from holdfast.flows import operations as flow_operations
from holdfast.schedules import backfills, operations, policies
from holdfast.schedules.model import OCCURRENCE_RETAIN_NS
from holdfast.tasks import operations as task_operations
from holdfast.world import cron
from tests.schedules.conftest import MakeRig
from tests.schedules.rig import ScheduleRig, at

MODULES = (
    "holdfast.schedules.operations",
    "holdfast.schedules.unit_of_work",
    "holdfast.schedules.end_callbacks",
    "holdfast.schedules.backfills",
    "holdfast.workers.timers.worker",
)


@hf.task
def report(city: str = "Kiel") -> str:
    return city


@hf.flow
async def sweep() -> str:
    await hf.sleep(25 * 60)
    return "swept"


app = hf.App("flows", tasks=[report], flows=[sweep])
TARGETS = pytest.mark.parametrize("target", [report, sweep], ids=["task", "flow"])


def backfill(rig: ScheduleRig, start: str, end: str, name: str = "s") -> list[tuple[str, str]]:
    made = backfills.run(
        rig.store, rig.universe, name, _time(start), _time(end), wall_ns=rig.clock.wall_ns()
    )
    return [(one.state, one.target) for one in made]


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


@TARGETS
def test_due_occurrence_starts_its_target_once(make_rig: MakeRig, target: Any) -> None:
    rig = make_rig(app)
    rig.create("s", target, overlap="allow")
    rig.pass_until("2026-11-13T09:09:50")
    assert rig.uses("s") == []
    rig.pass_until("2026-11-13T09:20:00")
    assert rig.uses("s") == ["09:10 started", "09:20 started"]
    assert len(set(rig.started("s"))) == 2
    assert rig.fire() == 0


def test_task_of_an_occurrence_has_the_arguments_and_the_key_of_the_schedule(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(app)
    rig.create("s", report.options(queue="night"), args=("Bonn",))
    rig.pass_until("2026-11-13T09:10:00")
    [id] = rig.started("s")
    assert rig.task_key(id) == "s@2026-11-13T09:10:00Z"
    leased = rig.store.transact(
        task_operations.lease,
        rig.universe,
        task_operations.GrantRequest("worker", ["night"], 1, True),
    )
    assert report.invoke(leased.grants[0].args) == "Bonn"


def test_two_timer_workers_start_an_occurrence_once(make_rig: MakeRig) -> None:
    rig = make_rig(app)
    rig.create("s", report, overlap="allow")
    rig.set_wall("2026-11-13T09:10:00")
    assert [rig.fire(), rig.fire()] == [1, 0]
    rig.tick()
    assert rig.uses("s") == ["09:10 started"]


@pytest.mark.parametrize(
    ("missed", "expected"),
    [
        ("one", ["09:10 started", "09:40 started"]),
        ("skip", ["09:10 skipped missed", "09:40 started"]),
        ("all", ["09:10 started", "09:20 started", "09:30 started", "09:40 started"]),
    ],
)
def test_occurrences_during_downtime_follow_the_missed_policy(
    make_rig: MakeRig, missed: str, expected: list[str]
) -> None:
    rig = make_rig(app)
    rig.create("s", report, missed=missed, overlap="allow")
    rig.set_wall("2026-11-13T09:35:00")
    rig.tick()
    rig.pass_until("2026-11-13T09:40:00")
    assert rig.uses("s") == expected


def test_long_backlog_is_started_in_bounded_commits(make_rig: MakeRig) -> None:
    rig = make_rig(app)
    rig.create("s", report, "* * * * *", missed="all", overlap="allow")
    rig.set_wall("2026-11-13T13:00:00")
    assert rig.fire() == operations.CATCH_UP_MAX
    rig.tick()
    assert len(rig.uses("s")) == 240


@TARGETS
def test_overlap_skip_records_the_skipped_occurrence(make_rig: MakeRig, target: Any) -> None:
    rig = make_rig(app)
    rig.create("s", target, overlap="skip")
    rig.pass_until("2026-11-13T09:20:00")
    assert rig.uses("s") == ["09:10 started", "09:20 skipped overlap"]
    # The flow sleeps until 09:45.
    rig.pass_until("2026-11-13T09:50:00", rig.run_tasks)
    assert rig.uses("s")[-1] == "09:50 started"


@TARGETS
def test_overlap_queue_starts_each_occurrence_after_the_end_of_the_last(
    make_rig: MakeRig, target: Any
) -> None:
    rig = make_rig(app)
    rig.create("s", target, overlap="queue")
    rig.pass_until("2026-11-13T09:30:00")
    assert rig.uses("s") == ["09:10 started", "09:20 queued", "09:30 queued"]
    assert rig.status("s").queued == 2
    rig.store.transact(operations.set_paused, rig.universe, "s", True, rig.clock.wall_ns())
    assert rig.flows.run_one()
    if target is sweep:
        # The flow sleeps for 25 minutes.
        rig.pass_until("2026-11-13T09:56:00")
        assert rig.flows.run_one()
    assert rig.uses("s") == ["09:10 started", "09:20 started", "09:30 queued"]
    rig.pass_until("2026-11-13T11:00:00", rig.run_tasks)
    assert rig.uses("s") == ["09:10 started", "09:20 started", "09:30 started"]
    assert rig.status("s").queued == 0


@TARGETS
def test_queue_continues_after_a_cancelled_occurrence(make_rig: MakeRig, target: Any) -> None:
    rig = make_rig(app)
    rig.create("s", target, overlap="queue")
    rig.pass_until("2026-11-13T09:20:00")
    if target is report:
        generation, seq = map(int, rig.started("s")[0].split("-"))
        rig.store.transact(task_operations.cancel, rig.universe, [seq])
    else:
        generation, seq = map(int, rig.started("s")[0].removeprefix("f").split("-"))
        rig.store.transact(flow_operations.cancel, rig.universe, seq, generation)
        assert rig.flows.run_one()
    assert rig.uses("s") == ["09:10 started", "09:20 started"]


def test_full_queue_skips_further_occurrences(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "QUEUED_MAX", 1)
    rig = make_rig(app)
    rig.create("s", report, overlap="queue")
    rig.pass_until("2026-11-13T09:30:00")
    assert rig.uses("s") == ["09:10 started", "09:20 queued", "09:30 skipped queue_full"]


def test_wall_clock_set_back_starts_no_occurrence_twice(make_rig: MakeRig) -> None:
    rig = make_rig(app)
    rig.create("s", report, overlap="allow")
    rig.pass_until("2026-11-13T09:20:00")
    rig.set_wall("2026-11-13T09:05:00")
    rig.pass_until("2026-11-13T09:30:00")
    assert rig.uses("s") == ["09:10 started", "09:20 started", "09:30 started"]


def test_pause_stops_occurrences_and_resume_continues_with_the_next(make_rig: MakeRig) -> None:
    rig = make_rig(app)
    handle = rig.create("s", report, overlap="allow", missed="all")
    assert handle.pause()
    assert not handle.pause()
    rig.pass_until("2026-11-13T09:25:00")
    assert rig.uses("s") == []
    assert rig.status("s").state == "paused"
    assert handle.resume()
    rig.pass_until("2026-11-13T09:30:00")
    assert rig.uses("s") == ["09:30 started"]
    assert rig.changes("s") == [("created", ""), ("paused", ""), ("resumed", "")]


def test_run_now_starts_an_extra_occurrence_of_a_paused_schedule(make_rig: MakeRig) -> None:
    rig = make_rig(app)
    handle = rig.create("s", report)
    handle.pause()
    id = handle.run_now()
    assert rig.started("s") == [id]
    assert handle.run_now() == id, "the same microsecond is the same occurrence"
    rig.clock.advance(S)
    assert handle.run_now() is None, "the last one has not ended"
    assert rig.uses("s") == ["09:00 started", "09:00 skipped overlap"]


# -- backfill --------------------------------------------------------------------------------------


def test_backfill_starts_only_occurrences_that_have_not_run(make_rig: MakeRig) -> None:
    rig = make_rig(app)
    rig.create("s", report, overlap="allow")
    rig.pass_until("2026-11-13T09:20:10")
    [ten, twenty] = rig.started("s")
    first = backfill(rig, "2026-11-13T08:50", "2026-11-13T09:20:01")
    assert [state for state, _ in first] == ["started", "started", "exists", "exists"]
    assert [target for _, target in first][2:] == [ten, twenty]
    again = backfill(rig, "2026-11-13T08:50", "2026-11-13T09:20:01")
    assert again == [("exists", target) for _, target in first]
    assert len(set(rig.started("s"))) == 4


def test_backfill_starts_skipped_occurrences_one_after_another(make_rig: MakeRig) -> None:
    rig = make_rig(app)
    rig.create("s", report, overlap="skip", missed="skip")
    rig.set_wall("2026-11-13T09:25:00")
    rig.tick()
    assert rig.uses("s") == ["09:10 skipped missed"]
    made = backfill(rig, "2026-11-13T09:00", "2026-11-13T09:25")
    assert [state for state, _ in made] == ["started", "queued", "queued"]
    rig.run_tasks()
    assert rig.uses("s") == ["09:00 started", "09:10 started", "09:20 started"]


def test_backfilled_occurrence_does_not_start_again_when_it_is_due(make_rig: MakeRig) -> None:
    rig = make_rig(app)
    rig.create("s", report, overlap="allow")
    rig.set_wall("2026-11-13T09:10:05")
    [(_, target)] = backfill(rig, "2026-11-13T09:10", "2026-11-13T09:10:05")
    rig.tick()
    assert rig.started("s") == [target]
    assert rig.status("s").next_ns == at("2026-11-13T09:20")


def test_backfill_dry_run_changes_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(app)
    rig.create("s", report)
    made = backfills.dry_run(
        rig.store,
        rig.universe,
        "s",
        _time("2026-11-13T08:40"),
        _time("2026-11-13T09:00"),
        wall_ns=rig.clock.wall_ns(),
    )
    assert [one.state for one in made] == ["new", "new"]
    assert rig.uses("s") == []


def test_backfill_reads_times_in_the_zone_of_the_schedule(make_rig: MakeRig) -> None:
    rig = make_rig(app)
    rig.create("s", report, "0 3 * * *", zone="Europe/Berlin", overlap="allow")
    made = backfill(rig, "2026-11-12", "2026-11-13")
    assert len(made) == 1
    assert rig.uses("s") == ["02:00 started"]


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("2026-11-13T09:00", "2026-11-13T08:00"),
        ("2026-11-13T09:00", "2026-11-14T09:00"),
        ("1990-01-01", "2026-01-01"),
    ],
)
def test_backfill_of_an_impossible_range_is_refused(
    make_rig: MakeRig, start: str, end: str
) -> None:
    rig = make_rig(app)
    rig.create("s", report)
    with pytest.raises(Invalid):
        backfill(rig, start, end)


def test_occurrence_keys_outlive_the_tasks_and_are_removed_later(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(app)
    rig.create("s", report, "0 12 * * *", overlap="allow")
    rig.pass_until("2026-11-13T12:00:00")
    rig.run_tasks()
    rig.clock.advance(8 * 86_400 * S)
    rig.store.transact(task_operations.maintain, rig.universe, 100)
    rig.tick()
    made = backfill(rig, "2026-11-13T11:00", "2026-11-13T13:00")
    assert [state for state, _ in made] == ["exists"], "the task is gone, its key is not"
    rig.clock.advance(OCCURRENCE_RETAIN_NS)
    rig.tick()
    with pytest.raises(KeyExpired):
        backfill(rig, "2026-11-13T11:00", "2026-11-13T13:00")


# -- the end of a schedule -------------------------------------------------------------------------


def test_deleted_schedule_starts_nothing_and_its_tasks_continue(make_rig: MakeRig) -> None:
    rig = make_rig(app)
    handle = rig.create("s", report, overlap="queue", key="k")
    rig.pass_until("2026-11-13T09:20:00")
    [id] = rig.started("s")
    handle.delete()
    with pytest.raises(NotFound):
        rig.status("s")
    with pytest.raises(NotFound):
        handle.delete()
    rig.run_tasks()
    rig.pass_until("2026-11-13T09:40:00")
    assert rig.task_key(id) == "s@2026-11-13T09:10:00Z"
    assert rig.uses("s") == []


def test_recreated_schedule_does_not_repeat_a_stored_occurrence(make_rig: MakeRig) -> None:
    rig = make_rig(app)
    handle = rig.create("s", report, overlap="allow")
    rig.pass_until("2026-11-13T09:10:00")
    [id] = rig.started("s")
    handle.delete()
    rig.create("s", report, overlap="allow", args=("Bonn",))
    rig.pass_until("2026-11-13T09:11:00")
    assert backfill(rig, "2026-11-13T09:05", "2026-11-13T09:11") == [("started", id)]


def test_schedule_without_its_time_zone_stops_alone(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(app)
    rig.create("broken", report, zone="Asia/Tokyo")
    handle = rig.create("sound", report)

    def without_tokyo(zone: str) -> None:
        if zone == "Asia/Tokyo":
            raise cron.UnknownTimeZone(what="zone", found=zone)

    with failpoints.on("cron.find_zone", calls=without_tokyo):
        rig.pass_until("2026-11-13T09:10:00")
        assert rig.status("broken").state == "stopped"
        assert "Asia/Tokyo" in rig.status("broken").error
        assert rig.uses("sound") == ["09:10 started"]
    rig.store.transact(operations.set_paused, rig.universe, "broken", False, rig.clock.wall_ns())
    assert rig.status("broken").state == "active"
    assert handle.status().state == "active"
