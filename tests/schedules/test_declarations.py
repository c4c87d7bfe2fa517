"""Schedules that code declares, and schedules created at run time."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast as hf
from holdfast.app import store_calls
from holdfast.app.flow_start import find_call
from holdfast.errors import Invalid, KeyConflict, NotFound
from holdfast.schedules.model import ScheduleExists
from tests.schedules.conftest import MakeRig
from tests.schedules.rig import at

MODULES = (
    "holdfast.app.schedules",
    "holdfast.app.schedule_options",
    "holdfast.schedules.operations",
    "holdfast.schedules.model",
)


def make_app(every: str | None = "*/10 * * * *", **options: Any) -> hf.App:
    @hf.task(every=every, **options)
    def report() -> str:
        return "done"

    return hf.App("flows", tasks=[report])


@hf.task
def manual(n: int = 1) -> int:
    return n


# -- declarations ----------------------------------------------------------------------------------


def test_declared_schedules_are_stored_with_their_options(make_rig: MakeRig) -> None:
    @hf.task(every="0 3 * * *", zone="Europe/Berlin", missed="skip", overlap="allow")
    def nightly() -> None:
        return

    @hf.flow(every="*/5 * * * *", overlap="queue", args=("Kiel",))
    async def sweep(city: str) -> str:
        return city

    rig = make_rig(hf.App("flows", tasks=[nightly], flows=[sweep]))
    rig.declare()
    night, swept = rig.status("nightly"), rig.status("sweep")
    assert (night.every, night.zone, night.missed, night.overlap) == (
        "0 3 * * *", "Europe/Berlin", "skip", "allow",
    )  # fmt: skip
    assert (night.kind, night.target, night.source) == ("task", "nightly", "code")
    assert night.next_ns == at("2026-11-14T02:00")
    assert (swept.kind, swept.overlap, swept.next_ns) == ("flow", "queue", at("2026-11-13T09:05"))
    rig.pass_until("2026-11-13T09:05:00")
    rig.run_tasks()
    [id] = rig.started("sweep")
    runtime = rig.flows.runtime
    handle = store_calls.run(runtime.store, find_call(runtime, id, None))
    assert handle.result(timeout=0) == "Kiel"


def test_unchanged_declaration_makes_no_commit(make_rig: MakeRig) -> None:
    rig = make_rig(make_app())
    rig.declare()
    rig.declare(make_app())
    assert rig.changes("report") == [("declared", "")]


def test_changed_declaration_keeps_pause_and_last_occurrence(make_rig: MakeRig) -> None:
    rig = make_rig(make_app(overlap="allow"))
    rig.declare()
    rig.pass_until("2026-11-13T09:15:00")
    before = rig.status("report")
    rig.flows.runtime.app.schedules.clear()
    from holdfast.app.schedules import ScheduleHandle

    ScheduleHandle(rig.flows.runtime, "report").pause()
    rig.declare(make_app("0 * * * *", overlap="skip"))
    after = rig.status("report")
    assert (after.every, after.overlap, after.state) == ("0 * * * *", "skip", "paused")
    assert (after.last, after.last_ns) == (before.last, before.last_ns)
    ScheduleHandle(rig.flows.runtime, "report").resume()
    assert rig.status("report").next_ns == at("2026-11-13T10:00")
    assert rig.changes("report")[-2] == ("replaced", "every, overlap")


def test_deploy_after_downtime_keeps_missed_occurrences_of_an_unchanged_rule(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(make_app(missed="all", overlap="allow"))
    rig.declare()
    rig.set_wall("2026-11-13T09:25:00")
    rig.declare(make_app(missed="all", overlap="allow", priority=5))
    rig.tick()
    assert rig.uses("report") == ["09:10 started", "09:20 started"]


def test_changed_rule_applies_from_now_on(make_rig: MakeRig) -> None:
    rig = make_rig(make_app(missed="all", overlap="allow"))
    rig.declare()
    rig.set_wall("2026-11-13T09:25:00")
    rig.declare(make_app("30 * * * *", missed="all", overlap="allow"))
    rig.pass_until("2026-11-13T09:31:00")
    assert rig.uses("report") == ["09:30 started"]


def test_undeclared_schedule_continues_and_is_declared_again(make_rig: MakeRig) -> None:
    rig = make_rig(make_app(overlap="allow"))
    rig.declare()
    rig.declare(hf.App("flows", tasks=[manual]))
    assert rig.status("report").source == "undeclared"
    rig.pass_until("2026-11-13T09:10:00")
    assert rig.uses("report") == ["09:10 started"]
    rig.declare(make_app(overlap="allow"))
    assert rig.status("report").source == "code"
    assert [action for action, _ in rig.changes("report")] == [
        "declared", "undeclared", "declared",
    ]  # fmt: skip


def test_app_without_schedules_leaves_schedules_created_at_run_time(make_rig: MakeRig) -> None:
    rig = make_rig(hf.App("flows", tasks=[manual]))
    rig.create("s", manual)
    rig.declare()
    assert rig.status("s").source == "runtime"
    assert rig.changes("s") == [("created", "")]


def test_runtime_with_the_role_timer_writes_declared_schedules() -> None:
    app = make_app("0 0 1 1 *")
    with app.open("memory:", roles=()) as rt, pytest.raises(NotFound):
        rt.schedule("report")
    with app.open("memory:", roles=("timer",)) as rt:
        status = rt.schedule("report").status()
        assert (status.every, status.source) == ("0 0 1 1 *", "code")


# -- refusals --------------------------------------------------------------------------------------


def test_two_schedules_with_one_name_are_refused_in_one_line() -> None:
    @hf.task(every="* * * * *", name="tidy")
    def first() -> None:
        return

    @hf.flow(every="* * * * *", name="tidy")
    async def second() -> None:
        return

    with pytest.raises(Invalid, match="two schedules have this name") as caught:
        hf.App("flows", tasks=[first], flows=[second])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"every": "61 * * * *"},
        {"every": "* * * * *", "zone": "Mars"},
        {"every": "* * * * *", "missed": "two"},
        {"every": "* * * * *", "overlap": "replace"},
        {"every": "* * * * *", "args": (1,)},
        {"every": 5},
    ],
)
def test_wrong_schedule_is_refused_by_the_decorator(options: dict[str, Any]) -> None:
    with pytest.raises(Invalid):

        @hf.task(**options)
        def report() -> None:
            return

    with pytest.raises(Invalid):

        @hf.flow(**options)
        async def sweep() -> None:
            return


@pytest.mark.parametrize("args", ["x", object()])
def test_arguments_of_a_schedule_are_a_list(args: Any) -> None:
    with pytest.raises(Invalid, match="a list of the arguments of the function"):

        @hf.task(every="* * * * *", args=args)
        def report(name: str) -> None:
            return


def test_task_with_required_arguments_needs_them_in_its_schedule() -> None:
    with pytest.raises(Invalid, match="task arguments"):

        @hf.task(every="* * * * *")
        def report(city: str) -> str:
            return city


# -- run time --------------------------------------------------------------------------------------


def test_schedule_with_a_used_key_is_the_first_one_again(make_rig: MakeRig) -> None:
    rig = make_rig(hf.App("flows", tasks=[manual]))
    rig.create("s", manual, key="k")
    rig.create("s", manual, key="k")
    with pytest.raises(KeyConflict):
        rig.create("s", manual, key="k", args=(2,))
    with pytest.raises(KeyConflict):
        rig.create("t", manual, key="k")
    assert rig.changes("s") == [("created", "")]


def test_used_name_with_another_definition_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig(hf.App("flows", tasks=[manual]))
    rig.create("s", manual)
    rig.create("s", manual)
    with pytest.raises(ScheduleExists):
        rig.create("s", manual, "0 * * * *")


@pytest.mark.parametrize(
    "target",
    [
        None,
        "manual",
        manual.options(key="k"),
        manual.options(delay_s=5),
        manual.options(limit_key="k"),
        hf.task(name="other")(lambda: None),
    ],
)
def test_target_of_a_schedule_is_a_task_or_flow_of_the_app(make_rig: MakeRig, target: Any) -> None:
    rig = make_rig(hf.App("flows", tasks=[manual]))
    with pytest.raises(Invalid):
        rig.create("s", target)


@pytest.mark.parametrize("name", ["", "x" * 190, 5])
def test_unusable_name_of_a_schedule_is_refused(make_rig: MakeRig, name: Any) -> None:
    rig = make_rig(hf.App("flows", tasks=[manual]))
    with pytest.raises(Invalid):
        rig.create(name, manual)


def test_large_arguments_of_a_schedule_are_refused(make_rig: MakeRig) -> None:
    @hf.task
    def load(data: bytes) -> int:
        return len(data)

    rig = make_rig(hf.App("flows", tasks=[load]))
    with pytest.raises(Invalid, match="arguments of a schedule"):
        rig.create("s", load, args=(b"x" * 5_000,))
