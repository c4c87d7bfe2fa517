"""`holdfast runs list | show | failed | retry | cancel | prune`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.durable import lease
from holdfast.ledger import runs
from holdfast.ledger.run_policy import ErrorClass
from holdfast.ledger.runs import RunEvent, RunLifecycle
from holdfast.store.api import Store
from tests.cli.conftest import RunCommand
from tests.cli.stage_runs import StageRun

FAILING = {
    3: (ErrorClass.INPUT, "ValueError: not a document\n  at line 7"),
    17: (ErrorClass.TRANSIENT, "TimeoutError: slow"),
    18: (ErrorClass.INPUT, "ValueError: \x1b[31m"),
    44: (ErrorClass.INPUT, "ValueError: not a document"),
}


@pytest.fixture
def finished_run(store: Store) -> StageRun:
    """A finished run of fifty rows: 4 failed, 5 skipped, 41 succeeded, all committed."""
    run = StageRun(store, "labels", 50, FAILING)
    run.finish()
    return run


@pytest.fixture
def open_run(store: Store) -> StageRun:
    """An open run of fifty rows with twenty ended rows and a live driver."""
    run = StageRun(store, "articles", 50, FAILING)
    run.finish_rows(20)
    run.write_progress()
    return run


# -- list ----------------------------------------------------------------------------------------


def test_runs_list_prints_counts_status_cost_and_age(
    run: RunCommand, path: Path, finished_run: StageRun, open_run: StageRun
) -> None:
    result = run("runs", "list", "--store", path)
    assert result.code == 0
    header, articles, labels = result.out.splitlines()
    assert header.split() == [
        *["name", "run", "status", "rows", "done", "failed", "skipped", "rate", "cost", "age"]
    ]
    assert articles.split()[:7] == ["articles", "articles-1", "open", "50", "15", "3", "2"]
    assert labels.split()[:7] == ["labels", "labels-1", "finished", "50", "41", "4", "5"]
    assert "0.50" in labels


def test_runs_list_counts_outcomes_of_committed_rows(
    run: RunCommand, path: Path, finished_run: StageRun
) -> None:
    [listed_run] = run("runs", "list", "--store", path, "--json").document["runs"]
    assert (listed_run["succeeded"], listed_run["skipped"], listed_run["failed"]) == (41, 5, 4)
    assert (listed_run["committed"], listed_run["status"], listed_run["live"]) == (
        50,
        "finished",
        False,
    )


def test_runs_list_is_paged_by_limit_and_after(
    run: RunCommand, path: Path, finished_run: StageRun, open_run: StageRun
) -> None:
    result = run("runs", "list", "--limit", 1, "--store", path)
    assert result.out.endswith("1 shown; more with: --after articles\n")
    rest = run("runs", "list", "--after", "articles", "--store", path, "--json").document
    assert [listed_run["name"] for listed_run in rest["runs"]] == ["labels"]


def test_runs_list_of_a_store_without_runs_prints_no_runs(
    run: RunCommand, path: Path, store: Store
) -> None:
    assert run("runs", "list", "--store", path).out == "no runs\n"


def test_runs_list_and_show_mark_an_open_run_without_a_driver(
    run: RunCommand, path: Path, open_run: StageRun
) -> None:
    open_run.release_lease()
    assert "open, no driver" in run("runs", "list", "--store", path).out
    shown = run("runs", "show", "articles", "--store", path).out
    assert "run the stage again" in shown


# -- show ----------------------------------------------------------------------------------------


def test_runs_show_prints_counts_errors_output_and_next_command(
    run: RunCommand, path: Path, finished_run: StageRun
) -> None:
    out = run("runs", "show", "labels", "--store", path).out
    assert "50: 41 done, 4 failed, 5 skipped" in out
    assert "/data/labels (parquet)" in out
    assert "1 × transient: TimeoutError: slow" in out
    assert "at line 7" not in out
    assert f"holdfast runs retry labels --store {path}" in out


def test_runs_show_accepts_a_run_id(run: RunCommand, path: Path, finished_run: StageRun) -> None:
    document = run("runs", "show", "labels-1", "--store", path, "--json").document
    assert document["name"] == "labels"
    assert document["next"]


def test_runs_show_of_a_run_without_progress(run: RunCommand, path: Path, store: Store) -> None:
    StageRun(store, "new", 5)
    assert "5: 0 done" in run("runs", "show", "new", "--store", path).out


def test_runs_show_and_failed_escape_control_characters(
    run: RunCommand, path: Path, finished_run: StageRun
) -> None:
    assert "\x1b" not in run("runs", "show", "labels", "--store", path).out
    assert "\x1b" not in run("runs", "failed", "labels", "--store", path).out


@pytest.mark.parametrize("action", ["show", "failed", "retry", "cancel"])
def test_unknown_run_is_not_found_with_a_hint_to_runs_list(
    run: RunCommand, path: Path, store: Store, action: str
) -> None:
    result = run("runs", action, "nobody", "--store", path)
    assert result.code == 1
    assert result.error.startswith("not_found: what='run' name='nobody'")
    assert "holdfast runs list" in result.error


# -- failed --------------------------------------------------------------------------------------


def test_runs_failed_prints_seq_key_class_and_error(
    run: RunCommand, path: Path, finished_run: StageRun
) -> None:
    header, *rows = run("runs", "failed", "labels", "--store", path).out.splitlines()
    assert header.split() == ["seq", "doc_id", "attempts", "class", "error"]
    assert [row.split()[:2] for row in rows] == [
        ["3", "doc-003"],
        ["17", "doc-017"],
        ["18", "doc-018"],
        ["44", "doc-044"],
    ]
    assert rows[0].split()[2:] == ["1", "input", "ValueError:", "not", "a", "document"]


def test_runs_failed_filters_by_class(run: RunCommand, path: Path, finished_run: StageRun) -> None:
    document = run(
        "runs", "failed", "labels", "--class", "transient", "--json", store=path
    ).document
    assert [(row["seq"], row["error_class"]) for row in document["rows"]] == [(17, "transient")]


def test_runs_failed_is_paged_by_limit_and_after(
    run: RunCommand, path: Path, finished_run: StageRun
) -> None:
    result = run("runs", "failed", "labels", "--limit", 2, "--store", path)
    assert result.out.endswith("2 shown, 4 failed; more with --after 17\n")
    rest = run("runs", "failed", "labels", "--after", 17, "--json", store=path).document
    assert [row["seq"] for row in rest["rows"]] == [18, 44]


def test_runs_failed_of_an_open_run_reads_the_ledger(
    run: RunCommand, path: Path, open_run: StageRun
) -> None:
    open_run.finish_rows(30)  # the progress record is older than the ledger
    document = run("runs", "failed", "articles", "--store", path, "--json").document
    assert [row["seq"] for row in document["rows"]] == [3, 17, 18, 44]


def test_runs_failed_without_failures_prints_no_failed_rows(
    run: RunCommand, path: Path, store: Store
) -> None:
    StageRun(store, "good", 5).finish()
    assert run("runs", "failed", "good", "--store", path).out == "no failed rows in good\n"


def test_runs_failed_with_an_unknown_class_exits_with_2(
    run: RunCommand, path: Path, finished_run: StageRun
) -> None:
    assert run("runs", "failed", "labels", "--class", "odd", "--store", path).code == 2


# -- retry and cancel ----------------------------------------------------------------------------


def test_runs_retry_marks_the_run_and_prints_the_next_step(
    run: RunCommand, path: Path, store: Store, finished_run: StageRun
) -> None:
    result = run("runs", "retry", "labels", "--store", path)
    assert result.code == 0
    assert "4 failed rows of labels are marked" in result.out
    assert "run the stage labels again" in result.out
    assert finished_run.record.retry_requested_ns > 0
    assert "retry asked" in run("runs", "show", "labels", "--store", path).out


def test_runs_retry_of_an_open_run_is_refused(
    run: RunCommand, path: Path, open_run: StageRun
) -> None:
    result = run("runs", "retry", "articles", "--store", path)
    assert result.code == 1
    assert result.error.startswith("invalid:")
    assert open_run.record.retry_requested_ns == 0


def test_runs_cancel_notifies_a_live_driver(
    run: RunCommand, path: Path, store: Store, open_run: StageRun
) -> None:
    since = store.wait(runs.topic_of(open_run.run_id), 0, 0)
    result = run("runs", "cancel", "articles", "--store", path)
    assert "no further rows start" in result.out
    assert open_run.record.cancel_requested_ns > 0
    assert store.wait(runs.topic_of(open_run.run_id), since, 30) > since
    assert "to be cancelled" in run("runs", "list", "--store", path).out


def test_runs_cancel_without_a_driver_is_recorded_for_the_next_driver(
    run: RunCommand, path: Path, open_run: StageRun
) -> None:
    open_run.release_lease()
    result = run("runs", "cancel", "articles", "--store", path)
    assert "no driver of articles is alive" in result.out
    assert open_run.record.cancel_requested_ns > 0


def test_runs_cancel_of_a_finished_run_is_refused(
    run: RunCommand, path: Path, finished_run: StageRun
) -> None:
    result = run("runs", "cancel", "labels", "--store", path)
    assert result.code == 1
    assert "the run has ended" in result.error


def test_runs_list_ignores_an_expired_driver_lease(
    run: RunCommand, path: Path, store: Store
) -> None:
    stage_run = StageRun(store, "labels", 5)
    stage_run.release_lease()
    store.transact(lease.acquire, runs.lease_resource("labels"), "driver", "second", 1)
    assert "open, no driver" in run("runs", "list", "--store", path).out


def test_runs_show_prints_why_a_run_is_halted(
    run: RunCommand, path: Path, store: Store, open_run: StageRun
) -> None:
    store.transact(
        lambda txn: runs.change_status(txn, open_run.run_id, RunEvent.HALT, halted="seq 7")
    )
    assert open_run.record.status is RunLifecycle.HALTED
    assert "seq 7" in run("runs", "show", "articles", "--store", path).out


def test_runs_show_imports_neither_spark_nor_numpy(path: Path, finished_run: StageRun) -> None:
    code = (
        "import sys; from holdfast.cli import main; "
        f"main(['runs', 'show', 'labels', '--store', {str(path)!r}]); "
        "sys.exit(bool({'pyspark', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], timeout=60, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr
    assert "41 done" in completed.stdout


# -- prune ---------------------------------------------------------------------------------------


@pytest.fixture
def five_runs(store: Store) -> list[str]:
    run_ids = []
    for number in range(1, 6):
        run = StageRun(store, "labels", 10, FAILING, number=number)
        run.finish()
        run_ids.append(run.run_id)
    return run_ids


def test_runs_prune_keeps_the_newest_and_open_runs(
    run: RunCommand, path: Path, store: Store, five_runs: list[str], open_run: StageRun
) -> None:
    planned = run("runs", "prune", "--keep", "2", "--dry-run", "--json", store=path)
    assert planned.code == 0
    assert planned.document["deleted"] == 0
    assert store.read(runs.get_record, five_runs[0]) is not None
    result = run("runs", "prune", "--store", path, "--keep", "2", "--json")
    assert result.code == 0
    assert result.document["deleted"] == 3
    reasons = {row["run_id"]: row["why"] for row in result.document["runs"]}
    assert [reasons[run_id] for run_id in five_runs] == [
        "",
        "",
        "",
        "it is one of the newest 2 runs",
        "it is one of the newest 2 runs",
    ]
    assert reasons[open_run.run_id] == "a driver runs it"
    records = [store.read(runs.get_record, run_id) for run_id in [*five_runs, open_run.run_id]]
    assert [record is not None for record in records] == [False, False, False, True, True, True]


def test_runs_prune_accepts_a_name_and_a_minimum_age(
    run: RunCommand, path: Path, store: Store, five_runs: list[str]
) -> None:
    result = run("runs", "prune", "labels", "--keep", "1", "--older-than", "1", store=path)
    assert result.code == 0
    assert "0 deleted" in result.out
    assert "it is younger than the age limit" in result.out
    assert all(store.read(runs.get_record, run_id) for run_id in five_runs)


@pytest.mark.parametrize("options", [["--keep", "0"], ["--older-than", "-1"], ["nothing"]])
def test_runs_prune_rejects_invalid_options(
    run: RunCommand, path: Path, store: Store, five_runs: list[str], options: list[str]
) -> None:
    assert run("runs", "prune", "--store", path, *options).code != 0
    assert all(store.read(runs.get_record, run_id) for run_id in five_runs)
