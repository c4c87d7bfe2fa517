"""The endpoints of schedules."""

from collections import Counter
from typing import Any, cast

import pytest

from holdfast.errors import Invalid, KeyConflict, NotFound, Overloaded
from holdfast.ops.api.call import NeedsApp
from holdfast.schedules.model import ScheduleExists, keys_of
from holdfast.store import tuples
from holdfast.store.api import Row, Store
from holdfast.workers.limit_settings import change_limits
from tests.api.rig import ApiRig

MODULES = ("holdfast.ops.api.schedules", "holdfast.ops.schedule_documents")
NIGHTLY = {"name": "nightly", "target": "print_page", "every": "0 3 * * *", "args": [7]}


def create(rig: ApiRig, **fields: Any) -> Any:
    return rig.post("/v1/schedules", {**NIGHTLY, **fields})


def test_created_schedule_is_shown(rig: ApiRig) -> None:
    made = create(rig, zone="Europe/Berlin")
    assert (made["name"], made["kind"], made["target"]) == ("nightly", "task", "print_page")
    assert (made["state"], made["zone"], made["source"]) == ("active", "Europe/Berlin", "runtime")
    shown = rig.get("/v1/schedules/nightly")
    assert shown["occurrences"] == []
    assert [change["action"] for change in shown["changes"]] == ["created"]
    assert create(rig, zone="Europe/Berlin") == made
    with pytest.raises(ScheduleExists):
        create(rig, zone="UTC")


@pytest.mark.parametrize(
    "fields",
    [
        {"target": "unheard"},
        {"every": "now"},
        {"zone": "Atlantis"},
        {"missed": "maybe"},
        {"overlap": "maybe"},
        {"args": []},
        {"name": ""},
        {"more": 1},
    ],
)
def test_bad_schedule_is_refused(rig: ApiRig, fields: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        create(rig, **fields)
    assert rig.pages("/v1/schedules") == []


def test_schedule_without_the_code_needs_the_app(rig: ApiRig) -> None:
    rig.app = None
    with pytest.raises(NeedsApp):
        create(rig)


def test_schedules_are_listed_by_name_in_pages(rig: ApiRig) -> None:
    for name in ("c", "a", "b"):
        create(rig, name=name)
    for limit in (1, 2, 3):
        found = rig.pages("/v1/schedules", limit=limit)
        assert [schedule["name"] for schedule in found] == ["a", "b", "c"]


def test_schedule_is_paused_and_resumed(rig: ApiRig) -> None:
    create(rig)
    paused = rig.post("/v1/schedules/nightly/pause")
    assert (paused["state"], paused["changed"], paused["next_ns"]) == ("paused", True, None)
    assert rig.post("/v1/schedules/nightly/pause")["changed"] is False
    resumed = rig.post("/v1/schedules/nightly/resume")
    assert (resumed["state"], resumed["changed"]) == ("active", True)
    assert [entry.subject for entry in rig.audit_entries()] == ["schedule/nightly"] * 4


def test_extra_occurrence_starts_a_task(rig: ApiRig) -> None:
    create(rig)
    started = rig.post("/v1/schedules/nightly/run-now", key="k")
    assert (started["state"], started["cause"]) == ("started", "run_now")
    assert rig.post("/v1/schedules/nightly/run-now", key="k") == started
    shown = rig.get("/v1/schedules/nightly")
    assert shown["occurrences"] == [started]
    assert shown["last"] == started["target"]


def test_backfill_starts_each_past_occurrence_once(rig: ApiRig) -> None:
    create(rig, overlap="allow")
    span = {"from": "2026-01-01", "to": "2026-01-03"}
    dry = rig.post("/v1/schedules/nightly/backfill", {**span, "dry_run": True})
    assert [one["state"] for one in dry["occurrences"]] == ["new", "new"]
    made = rig.post("/v1/schedules/nightly/backfill", span)
    assert [one["state"] for one in made["occurrences"]] == ["started", "started"]
    again = rig.post("/v1/schedules/nightly/backfill", span)
    targets = [[one["target"] for one in answer["occurrences"]] for answer in (made, again)]
    assert targets[0] == targets[1]
    for bad in ({"from": "x", "to": "2026-01-03"}, {"from": "2026-01-03", "to": "2026-01-01"}, {}):
        with pytest.raises(Invalid):
            rig.post("/v1/schedules/nightly/backfill", bad)


SPAN = {"from": "2026-01-01T00:00", "to": "2026-01-01T18:00"}
BACKFILL = "/v1/schedules/nightly/backfill"
DELETE = "/v1/schedules/nightly/delete"


def rows_of_occurrences(rig: ApiRig) -> list[Row]:
    prefix = keys_of(rig.universe).occurrences
    rows: list[Row] = rig.store.read(lambda txn: txn.scan(prefix, tuples.prefix_end(prefix)))
    return rows


def set_limit(rig: ApiRig, tasks: int) -> None:
    rig.store.transact(change_limits, rig.universe, {"tasks": tasks})


def test_refused_backfill_changes_nothing_and_its_key_works_later(rig: ApiRig) -> None:
    create(rig, every="* * * * *", overlap="allow")
    set_limit(rig, 600)
    for _ in range(2):
        with pytest.raises(Overloaded):
            rig.post(BACKFILL, SPAN, key="k")
    shown = rig.get("/v1/schedules/nightly")
    assert (shown["occurrences"], len(shown["changes"])) == ([], 1)
    assert [entry.action for entry in rig.audit_entries()] == ["create_schedule"]
    set_limit(rig, 0)
    made = rig.post(BACKFILL, SPAN, key="k")
    assert Counter(one["state"] for one in made["occurrences"]) == {"started": 18 * 60}
    assert rig.post(BACKFILL, SPAN, key="k") == made
    actions = [entry.action for entry in rig.audit_entries()]
    assert actions == ["create_schedule", "backfill_schedule"]


class DyingStore:
    """A store of a server that dies before its commit of this number."""

    def __init__(self, store: Store, dies_at: int) -> None:
        self.store, self.left = store, dies_at

    def transact(self, fn: Any, *args: Any) -> Any:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return self.store.transact(fn, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.mark.parametrize(("dies_at", "started"), [(1, 0), (2, 500), (3, 1000), (4, 1080)])
def test_repeat_with_the_key_continues_an_unfinished_backfill(
    rig: ApiRig, dies_at: int, started: int
) -> None:
    """The backfill has three commits, and its answer a fourth one. No limit refuses the rest of an accepted backfill."""
    create(rig, every="* * * * *", overlap="allow")
    store = rig.store
    rig.store = cast(Store, DyingStore(store, dies_at))
    with pytest.raises(KeyboardInterrupt):
        rig.post(BACKFILL, SPAN, key="k")
    rig.store = store
    if started:
        set_limit(rig, 1)
        with pytest.raises(KeyConflict):
            rig.post(BACKFILL, {**SPAN, "to": "2026-01-01T17:00"}, key="k")
    made = rig.post(BACKFILL, SPAN, key="k")
    states = Counter(one["state"] for one in made["occurrences"])
    assert states == +Counter({"exists": started, "started": 1080 - started})
    assert len({one["target"] for one in made["occurrences"]}) == 1080
    assert rig.post(BACKFILL, SPAN, key="k") == made
    actions = [entry.action for entry in rig.audit_entries()]
    assert actions == ["create_schedule", "backfill_schedule"]


def test_deleted_schedule_is_gone(rig: ApiRig) -> None:
    create(rig)
    assert rig.post("/v1/schedules/nightly/delete") == {"deleted": "nightly"}
    with pytest.raises(NotFound):
        rig.post("/v1/schedules/nightly/delete")
    assert rig.pages("/v1/schedules") == []


@pytest.mark.parametrize(("dies_at", "rows"), [(1, 1080), (2, 580), (3, 80), (4, 0)])
def test_repeat_with_the_key_continues_an_unfinished_deletion(
    rig: ApiRig, dies_at: int, rows: int
) -> None:
    """The deletion has three commits, and its answer a fourth one."""
    create(rig, every="* * * * *", overlap="allow")
    rig.post(BACKFILL, SPAN)
    store = rig.store
    rig.store = cast(Store, DyingStore(store, dies_at))
    with pytest.raises(KeyboardInterrupt):
        rig.post(DELETE, key="k")
    rig.store = store
    assert len(rows_of_occurrences(rig)) == rows
    assert rig.post(DELETE, key="k") == {"deleted": "nightly"}
    assert rows_of_occurrences(rig) == []
    assert rig.post(DELETE, key="k") == {"deleted": "nightly"}
    assert [entry.action for entry in rig.audit_entries()].count("delete_schedule") == 1


def test_repeated_deletion_keeps_a_new_schedule_of_the_name(rig: ApiRig) -> None:
    create(rig, every="* * * * *", overlap="allow")
    rig.post(BACKFILL, SPAN)
    store = rig.store
    rig.store = cast(Store, DyingStore(store, 2))
    with pytest.raises(KeyboardInterrupt):
        rig.post(DELETE, key="k")
    rig.store = store
    create(rig)
    assert rig.post(DELETE, key="k") == {"deleted": "nightly"}
    assert rig.get("/v1/schedules/nightly")["name"] == "nightly"


@pytest.mark.parametrize("verb", ["pause", "resume", "run-now", "backfill", "delete"])
def test_acting_on_an_unknown_schedule_is_not_found(rig: ApiRig, verb: str) -> None:
    body = {"from": "2026-01-01", "to": "2026-01-02"} if verb == "backfill" else None
    with pytest.raises(NotFound):
        rig.post(f"/v1/schedules/nightly/{verb}", body)
    with pytest.raises(NotFound):
        rig.get("/v1/schedules/nightly")
    assert rig.audit_entries() == []
