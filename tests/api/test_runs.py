"""The endpoints of stage runs."""

import pytest
from msgspec.structs import replace

from holdfast.errors import Invalid, NotFound
from holdfast.ledger import runs
from holdfast.ledger.run_policy import ErrorClass
from holdfast.ops.api.call import NoIndex
from tests.api.rig import ApiRig
from tests.cli.stage_runs import StageRun

MODULES = ("holdfast.ops.api.runs", "holdfast.ops.run_documents", "holdfast.ops.run_retention")
FAILING = {
    3: (ErrorClass.INPUT, "ValueError: not a document"),
    17: (ErrorClass.TRANSIENT, "TimeoutError: slow"),
    44: (ErrorClass.INPUT, "ValueError: not a document"),
}


@pytest.fixture
def labels(rig: ApiRig) -> str:
    """A finished run with three failed rows. Returns the name of its stage."""
    run = StageRun(rig.store, f"{rig.universe}-labels", 50, FAILING)
    run.finish()
    return run.name


def test_run_is_listed_and_shown(rig: ApiRig, labels: str) -> None:
    shown = rig.get(f"/v1/runs/{labels}")
    assert (shown["status"], shown["size"], shown["failed"]) == ("finished", 50, 3)
    assert {group["class"] for group in shown["errors"]} == {"transient", "input"}
    assert shown["in_all"]["failed"] == 3
    assert shown["next"]
    assert rig.get(f"/v1/runs/{shown['run_id']}") == shown
    other = StageRun(rig.store, f"{rig.universe}-articles", 50, {})
    other.finish_rows(20)
    names = [run["name"] for run in rig.pages("/v1/runs", limit=1)]
    assert names == sorted(names)
    assert {labels, other.name} <= set(names)


def test_plots_of_a_run_have_its_series(rig: ApiRig, labels: str) -> None:
    run_id = rig.get(f"/v1/runs/{labels}")["run_id"]
    progress = rig.store.read(runs.get_progress, run_id)
    assert progress is not None
    series = [(0, 0, 0, 0, 4, 0.0), (1_000, 10, 1, 2, 4, 0.5), (2_000, 40, 2, 8, 0, 1.5)]
    measured = replace(
        progress, series=series, latency_log2_us=[0, 0, 5, 0, 7, 0], failed_by_class=[0, 2, 0, 1]
    )
    rig.store.transact(runs.put_progress, run_id, measured)
    plots = rig.get(f"/v1/runs/{labels}/plots")
    assert plots["run_id"] == run_id
    assert plots["points"][1] == {
        "t_ms": 1_000, "succeeded": 10, "failed": 1, "skipped": 2, "in_flight": 4, "cost": 0.5,
    }  # fmt: skip
    ended = [one["rows_per_s"] * (one["end_s"] - one["begin_s"]) for one in plots["throughput"]]
    assert sum(ended) == pytest.approx(50)
    # The buckets between the first and the last call.
    assert [(one["from_us"], one["calls"]) for one in plots["latency"]] == [(4, 5), (8, 0), (16, 7)]
    assert plots["failed_by_class"] == rig.get(f"/v1/runs/{labels}")["failed_by_class"]


def test_failed_rows_of_a_run_are_listed_in_pages(rig: ApiRig, labels: str) -> None:
    for limit in (1, 2, 3):
        rows = rig.pages(f"/v1/runs/{labels}/failed", limit=limit)
        assert [row["seq"] for row in rows] == [3, 17, 44]
    assert (rows[1]["error_class"], rows[1]["error"]) == ("transient", "TimeoutError: slow")
    with pytest.raises(NoIndex):
        rig.get(f"/v1/runs/{labels}/failed", error="slow")


def test_failed_rows_are_marked_for_retry(rig: ApiRig, labels: str) -> None:
    marked = rig.post(f"/v1/runs/{labels}/retry")
    assert marked["marked"] == 3
    assert marked["retry_requested_ns"] > 0
    rig.post(f"/v1/runs/{labels}/retry")
    with pytest.raises(Invalid):
        rig.post(f"/v1/runs/{labels}/cancel")
    assert [entry.subject for entry in rig.audit_entries()] == [f"run/{labels}"] * 2


def test_open_run_is_cancelled(rig: ApiRig) -> None:
    run = StageRun(rig.store, f"{rig.universe}-articles", 50, FAILING)
    run.finish_rows(20)
    first = rig.post(f"/v1/runs/{run.name}/cancel")
    assert first["cancel_requested_ns"] > 0
    again = rig.post(f"/v1/runs/{run.name}/cancel")
    assert again["cancel_requested_ns"] == first["cancel_requested_ns"]


def test_old_runs_are_pruned(rig: ApiRig) -> None:
    name = f"{rig.universe}-labels"
    for number in (1, 2, 3):
        StageRun(rig.store, name, 10, {}, number=number).finish()
    dry = rig.post("/v1/runs/prune", {"name": name, "keep": 1, "dry_run": True})
    assert (dry["deleted"], len(dry["runs"])) == (0, 3)
    pruned = rig.post("/v1/runs/prune", {"name": name, "keep": 1})
    assert pruned["deleted"] == 2
    assert [run["why"] == "" for run in pruned["runs"]].count(False) == 1
    assert rig.post("/v1/runs/prune", {"name": name, "keep": 1})["deleted"] == 0
    for bad in ({"keep": 0}, {"older_than_days": -1}):
        with pytest.raises(Invalid):
            rig.post("/v1/runs/prune", {"name": name, **bad})
    with pytest.raises(NotFound):
        rig.post("/v1/runs/prune", {"name": "unheard"})
    assert [entry.action for entry in rig.audit_entries()] == ["prune_runs"]


def test_unknown_run_is_not_found(rig: ApiRig) -> None:
    for path in ("", "/failed", "/plots"):
        with pytest.raises(NotFound):
            rig.get(f"/v1/runs/unheard{path}")
    for verb in ("retry", "cancel"):
        with pytest.raises(NotFound):
            rig.post(f"/v1/runs/unheard/{verb}")
    assert rig.audit_entries() == []
