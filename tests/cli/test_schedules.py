"""`holdfast schedules list | show | pause | resume | run-now | backfill | delete`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import holdfast as hf
from holdfast import store as stores
from holdfast.app import schedules
from holdfast.app.runtime import Runtime
from holdfast.schedules import queries
from holdfast.schedules.model import keys_of
from holdfast.store.api import Store, Txn
from tests.cli.conftest import RunCommand

MODULES = (
    "holdfast.cli.schedules",
    "holdfast.schedules.queries",
    "holdfast.schedules.backfills",
    "holdfast.schedules.consistency",
)


@hf.task(every="0 3 * * *", zone="Europe/Berlin", overlap="allow")
def report() -> str:
    return "done"


@hf.flow(every="0 0 1 1 *")
async def sweep() -> None:
    return


app = hf.App("jobs", tasks=[report], flows=[sweep])


@pytest.fixture
def jobs(path: Path) -> Iterator[Store]:
    """A declared task and flow, and a schedule created at run time."""
    with stores.open(path) as store:
        runtime = Runtime(app, store, roles=())
        schedules.declare(runtime)
        runtime.schedule("monthly", report, every="0 0 1 * *")
        yield store


def test_schedules_list_has_rule_target_state_and_source(
    run: RunCommand, path: Path, jobs: Store
) -> None:
    listed = run("schedules", "list", "--store", path, "--json").document["schedules"]
    assert [(one["name"], one["kind"], one["source"], one["state"]) for one in listed] == [
        ("monthly", "task", "runtime", "active"),
        ("report", "task", "code", "active"),
        ("sweep", "flow", "code", "active"),
    ]
    header, *rows = run("schedules", "list", "--store", path).out.splitlines()
    assert header.split() == [
        "schedule", "every", "zone", "starts", "state", "source", "next", "last",
    ]  # fmt: skip
    assert len(rows) == 3


def test_schedules_list_of_a_store_without_schedules(run: RunCommand, path: Path) -> None:
    with stores.open(path):
        pass
    assert run("schedules", "list", "--store", path).out == "no schedules\n"


def test_schedules_list_shows_an_undeclared_schedule(
    run: RunCommand, path: Path, jobs: Store
) -> None:
    schedules.declare(Runtime(hf.App("jobs", flows=[sweep]), jobs, roles=()))
    listed = run("schedules", "list", "--store", path, "--json").document["schedules"]
    assert {one["name"]: one["source"] for one in listed} == {
        "monthly": "runtime", "report": "undeclared", "sweep": "code",
    }  # fmt: skip


def test_schedules_pause_and_resume_report_the_change(
    run: RunCommand, path: Path, jobs: Store
) -> None:
    paused = run("schedules", "pause", "report", "--store", path, "--json").document
    assert (paused["changed"], paused["state"], paused["next_ns"]) == (True, "paused", None)
    assert run("schedules", "pause", "report", "--store", path).out == "unchanged\n"
    resumed = run("schedules", "resume", "report", "--store", path, "--json").document
    assert (resumed["changed"], resumed["state"]) == (True, "active")
    assert resumed["next_ns"] is not None


def test_schedules_run_now_prints_the_task(run: RunCommand, path: Path, jobs: Store) -> None:
    first = run("schedules", "run-now", "sweep", "--store", path, "--json").document
    assert (first["state"], first["cause"], first["target"]) == ("started", "run_now", "f1-1")
    second = run("schedules", "run-now", "sweep", "--store", path)
    assert second.out == "skipped: overlap\n"


def test_schedules_backfill_is_idempotent_and_has_a_dry_run(
    run: RunCommand, path: Path, jobs: Store
) -> None:
    span = ("report", "--from", "2026-10-24", "--to", "2026-10-27", "--store", path, "--json")
    dry = run("schedules", "backfill", *span, "--dry-run").document
    assert (dry["dry_run"], {one["state"] for one in dry["occurrences"]}) == (True, {"new"})
    made = run("schedules", "backfill", *span).document["occurrences"]
    assert [one["state"] for one in made] == ["started"] * 3
    times = [datetime.fromtimestamp(one["occurrence_ns"] // 10**9, UTC) for one in made]
    # The clock of Berlin is set back on 25 October.
    assert [time.strftime("%d %H:%M") for time in times] == ["24 01:00", "25 02:00", "26 02:00"]
    again = run("schedules", "backfill", *span).document["occurrences"]
    assert again == [{**one, "state": "exists"} for one in made]


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("yesterday", "2026-10-27"),
        ("2026-10-27", "2026-10-24"),
        ("2026-10-27", "2999-01-01"),
    ],
)
def test_schedules_backfill_refuses_a_bad_range_in_one_line(
    run: RunCommand, path: Path, jobs: Store, start: str, end: str
) -> None:
    result = run("schedules", "backfill", "report", "--from", start, "--to", end, store=path)
    assert result.code == 1
    assert result.error.startswith("invalid")


def test_schedules_show_has_occurrences_and_changes(
    run: RunCommand, path: Path, jobs: Store
) -> None:
    run("schedules", "run-now", "report", "--store", path)
    document = run("schedules", "show", "report", "--store", path, "--json").document
    assert [one["cause"] for one in document["occurrences"]] == ["run_now"]
    assert [change["action"] for change in document["changes"]] == ["declared", "run_now"]
    assert "run_now" in run("schedules", "show", "report", "--store", path).out


def test_schedules_delete_removes_the_schedule(run: RunCommand, path: Path, jobs: Store) -> None:
    assert run("schedules", "delete", "monthly", "--store", path).out == "monthly deleted\n"
    result = run("schedules", "delete", "monthly", "--store", path)
    assert (result.code, result.error.split(":")[0]) == (1, "not_found")
    assert [one.name for one in jobs.read(queries.list_schedules, "jobs")] == ["report", "sweep"]


@pytest.mark.parametrize("action", ["show", "pause", "resume", "run-now", "delete"])
def test_unknown_schedule_is_not_found(
    run: RunCommand, path: Path, jobs: Store, action: str
) -> None:
    assert run("schedules", action, "none", "--store", path).error.startswith("not_found")


def test_schedule_in_two_universes_needs_the_universe(
    run: RunCommand, path: Path, jobs: Store
) -> None:
    schedules.declare(Runtime(app, jobs, roles=(), universe="other"))
    assert run("schedules", "show", "sweep", "--store", path).error.startswith("invalid")
    shown = run("schedules", "show", "sweep", "--universe", "other", "--json", store=path)
    assert shown.document["universe"] == "other"
    assert run("schedules", "list", "--store", path).out.startswith("universe")


def test_verify_finds_a_lost_due_row_and_a_wrong_queue(
    run: RunCommand, path: Path, jobs: Store
) -> None:
    assert run("verify", "--store", path).code == 0
    keys = keys_of("jobs")
    next_ns = jobs.read(queries.get_status, "jobs", "report").next_ns
    assert next_ns is not None
    past_ns = int((datetime.now(UTC) - timedelta(days=1)).timestamp()) * 10**9

    def damage(txn: Txn) -> None:
        txn.delete(keys.due_row(next_ns, "report"))
        txn.put(keys.queued("sweep", past_ns), b"")

    jobs.transact(damage)
    result = run("verify", "--store", path, "--json")
    assert result.code == 1
    found = {(one["kind"], one["where"]) for one in result.document["differences"]}
    assert found == {("schedule", "jobs/report"), ("schedule", "jobs/sweep")}
