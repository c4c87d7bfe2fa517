"""`holdfast runs list | show | failed | retry | cancel | prune`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.durable import lease
from holdfast.ledger import runs
from holdfast.ledger.classes import ErrorClass
from holdfast.ledger.runs import Event, Status
from holdfast.store.api import Store
from tests.cli.conftest import Run
from tests.cli.stage_runs import StageRun

FAILING = {
    3: (ErrorClass.INPUT, "ValueError: not a document\n  at line 7"),
    17: (ErrorClass.TRANSIENT, "TimeoutError: slow"),
    18: (ErrorClass.INPUT, "ValueError: \x1b[31m"),
    44: (ErrorClass.INPUT, "ValueError: not a document"),
}


@pytest.fixture
def finished(store: Store) -> StageRun:
    """Fifty rows: four failed, five skipped, the rest succeeded; all committed."""
    made = StageRun(store, "labels", 50, FAILING)
    made.finish()
    return made


@pytest.fixture
def going(store: Store) -> StageRun:
    """Fifty rows of which twenty have ended, and a driver that is alive."""
    made = StageRun(store, "articles", 50, FAILING)
    made.work(20)
    made.tell()
    return made


# -- list ----------------------------------------------------------------------------------------


def test_list_shows_counts_status_cost_and_age(
    run: Run, path: Path, finished: StageRun, going: StageRun
) -> None:
    ran = run("runs", "list", "--store", path)
    assert ran.code == 0
    header, articles, labels = ran.out.splitlines()
    assert header.split() == [
        *["name", "run", "status", "rows", "done", "failed", "skipped", "rate", "cost", "age"]
    ]
    assert articles.split()[:7] == ["articles", "articles-1", "open", "50", "15", "3", "2"]
    assert labels.split()[:7] == ["labels", "labels-1", "finished", "50", "41", "4", "5"]
    assert "0.50" in labels


def test_how_committed_rows_ended_is_still_told(run: Run, path: Path, finished: StageRun) -> None:
    [told] = run("runs", "list", "--store", path, "--json").document["runs"]
    assert (told["succeeded"], told["skipped"], told["failed"]) == (41, 5, 4)
    assert (told["committed"], told["status"], told["live"]) == (50, "finished", False)


def test_list_in_pages(run: Run, path: Path, finished: StageRun, going: StageRun) -> None:
    ran = run("runs", "list", "--limit", 1, "--store", path)
    assert ran.out.endswith("1 shown; more with: --after articles\n")
    rest = run("runs", "list", "--after", "articles", "--store", path, "--json").document
    assert [told["name"] for told in rest["runs"]] == ["labels"]


def test_a_store_without_runs_says_so(run: Run, path: Path, store: Store) -> None:
    assert run("runs", "list", "--store", path).out == "no runs\n"


def test_a_run_whose_driver_is_gone_is_told_apart(run: Run, path: Path, going: StageRun) -> None:
    going.leave()
    assert "open, no driver" in run("runs", "list", "--store", path).out
    shown = run("runs", "show", "articles", "--store", path).out
    assert "run the stage again" in shown


# -- show ----------------------------------------------------------------------------------------


def test_show_tells_counts_errors_output_and_the_next_step(
    run: Run, path: Path, finished: StageRun
) -> None:
    out = run("runs", "show", "labels", "--store", path).out
    assert "50: 41 done, 4 failed, 5 skipped" in out
    assert "/data/labels (parquet)" in out
    assert "1 × transient: TimeoutError: slow" in out
    assert "at line 7" not in out
    assert f"holdfast runs retry labels --store {path}" in out


def test_show_takes_the_id_of_a_run(run: Run, path: Path, finished: StageRun) -> None:
    told = run("runs", "show", "labels-1", "--store", path, "--json").document
    assert told["name"] == "labels"
    assert told["next"]


def test_show_of_a_run_without_progress(run: Run, path: Path, store: Store) -> None:
    StageRun(store, "new", 5)
    assert "5: 0 done" in run("runs", "show", "new", "--store", path).out


def test_stored_data_cannot_draw_on_the_screen(run: Run, path: Path, finished: StageRun) -> None:
    assert "\x1b" not in run("runs", "show", "labels", "--store", path).out
    assert "\x1b" not in run("runs", "failed", "labels", "--store", path).out


@pytest.mark.parametrize("action", ["show", "failed", "retry", "cancel"])
def test_an_unknown_run_says_where_to_look(run: Run, path: Path, store: Store, action: str) -> None:
    ran = run("runs", action, "nobody", "--store", path)
    assert ran.code == 1
    assert ran.error.startswith("not_found: what='run' name='nobody'")
    assert "holdfast runs list" in ran.error


# -- failed --------------------------------------------------------------------------------------


def test_failed_shows_seq_key_class_and_error(run: Run, path: Path, finished: StageRun) -> None:
    header, *rows = run("runs", "failed", "labels", "--store", path).out.splitlines()
    assert header.split() == ["seq", "doc_id", "attempts", "class", "error"]
    assert [row.split()[:2] for row in rows] == [
        ["3", "doc-003"],
        ["17", "doc-017"],
        ["18", "doc-018"],
        ["44", "doc-044"],
    ]
    assert rows[0].split()[2:] == ["1", "input", "ValueError:", "not", "a", "document"]


def test_failed_of_one_class(run: Run, path: Path, finished: StageRun) -> None:
    told = run(
        "runs", "failed", "labels", "--class", "transient", "--store", path, "--json"
    ).document
    assert [(row["seq"], row["error_class"]) for row in told["rows"]] == [(17, "transient")]


def test_failed_in_pages(run: Run, path: Path, finished: StageRun) -> None:
    ran = run("runs", "failed", "labels", "--limit", 2, "--store", path)
    assert ran.out.endswith("2 shown, 4 failed; more with --after 17\n")
    rest = run("runs", "failed", "labels", "--after", 17, "--store", path, "--json").document
    assert [row["seq"] for row in rest["rows"]] == [18, 44]


def test_failed_of_a_run_that_goes_on(run: Run, path: Path, going: StageRun) -> None:
    going.work(30)  # what is told lags behind what is there
    told = run("runs", "failed", "articles", "--store", path, "--json").document
    assert [row["seq"] for row in told["rows"]] == [3, 17, 18, 44]


def test_no_failed_rows_says_so(run: Run, path: Path, store: Store) -> None:
    StageRun(store, "good", 5).finish()
    assert run("runs", "failed", "good", "--store", path).out == "no failed rows in good\n"


def test_an_unknown_class_is_wrong_usage(run: Run, path: Path, finished: StageRun) -> None:
    assert run("runs", "failed", "labels", "--class", "odd", "--store", path).code == 2


# -- retry and cancel ----------------------------------------------------------------------------


def test_retry_marks_the_run_and_says_what_to_do(
    run: Run, path: Path, store: Store, finished: StageRun
) -> None:
    ran = run("runs", "retry", "labels", "--store", path)
    assert ran.code == 0
    assert "4 failed rows of labels are marked" in ran.out
    assert "run the stage labels again" in ran.out
    assert finished.record.retry_requested_ns > 0
    assert "retry asked" in run("runs", "show", "labels", "--store", path).out


def test_retry_of_a_run_that_goes_on_is_refused(run: Run, path: Path, going: StageRun) -> None:
    ran = run("runs", "retry", "articles", "--store", path)
    assert ran.code == 1
    assert ran.error.startswith("invalid:")
    assert going.record.retry_requested_ns == 0


def test_cancel_reaches_a_driver_that_is_alive(
    run: Run, path: Path, store: Store, going: StageRun
) -> None:
    since = store.wait(runs.topic_of(going.run_id), 0, 0)
    ran = run("runs", "cancel", "articles", "--store", path)
    assert "no row is begun any more" in ran.out
    assert going.record.cancel_requested_ns > 0
    assert store.wait(runs.topic_of(going.run_id), since, 30) > since
    assert "to be cancelled" in run("runs", "list", "--store", path).out


def test_cancel_without_a_driver_waits_for_the_next_one(
    run: Run, path: Path, going: StageRun
) -> None:
    going.leave()
    ran = run("runs", "cancel", "articles", "--store", path)
    assert "no driver of articles is alive" in ran.out
    assert going.record.cancel_requested_ns > 0


def test_cancel_of_a_finished_run_is_refused(run: Run, path: Path, finished: StageRun) -> None:
    ran = run("runs", "cancel", "labels", "--store", path)
    assert ran.code == 1
    assert "it is over" in ran.error


def test_a_lease_that_has_expired_is_no_driver(run: Run, path: Path, store: Store) -> None:
    made = StageRun(store, "labels", 5)
    made.leave()
    store.transact(lease.acquire, runs.lease_resource("labels"), "driver", "second", 1)
    assert "open, no driver" in run("runs", "list", "--store", path).out


def test_a_halted_run_says_why(run: Run, path: Path, store: Store, going: StageRun) -> None:
    store.transact(lambda txn: runs.move(txn, going.run_id, Event.HALT, halted="seq 7"))
    assert going.record.status is Status.HALTED
    assert "seq 7" in run("runs", "show", "articles", "--store", path).out


def test_looking_loads_neither_spark_nor_numpy(path: Path, finished: StageRun) -> None:
    code = (
        "import sys; from holdfast.cli import main; "
        f"main(['runs', 'show', 'labels', '--store', {str(path)!r}]); "
        "sys.exit(bool({'pyspark', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "41 done" in done.stdout


# -- prune ---------------------------------------------------------------------------------------


@pytest.fixture
def five(store: Store) -> list[str]:
    made = []
    for number in range(1, 6):
        one = StageRun(store, "labels", 10, FAILING, number=number)
        one.finish()
        made.append(one.run_id)
    return made


def test_prune_deletes_all_but_the_newest_runs(
    run: Run, path: Path, store: Store, five: list[str], going: StageRun
) -> None:
    planned = run("runs", "prune", "--store", path, "--keep", "2", "--dry-run", "--json")
    assert planned.code == 0
    assert planned.document["deleted"] == 0
    assert store.read(runs.get, five[0]) is not None
    ran = run("runs", "prune", "--store", path, "--keep", "2", "--json")
    assert ran.code == 0
    assert ran.document["deleted"] == 3
    told = {row["run_id"]: row["why"] for row in ran.document["runs"]}
    assert [told[run_id] for run_id in five] == [
        "",
        "",
        "",
        "one of the newest 2",
        "one of the newest 2",
    ]
    assert told[going.run_id] == "a driver is at work on it"
    left = [store.read(runs.get, run_id) for run_id in [*five, going.run_id]]
    assert [one is not None for one in left] == [False, False, False, True, True, True]


def test_prune_takes_one_name_and_an_age(
    run: Run, path: Path, store: Store, five: list[str]
) -> None:
    ran = run("runs", "prune", "labels", "--store", path, "--keep", "1", "--older-than", "1")
    assert ran.code == 0
    assert "0 deleted" in ran.out
    assert "younger than the bound" in ran.out
    assert all(store.read(runs.get, run_id) for run_id in five)


@pytest.mark.parametrize("options", [["--keep", "0"], ["--older-than", "-1"], ["nothing"]])
def test_prune_refuses_what_makes_no_sense(
    run: Run, path: Path, store: Store, five: list[str], options: list[str]
) -> None:
    assert run("runs", "prune", "--store", path, *options).code != 0
    assert all(store.read(runs.get, run_id) for run_id in five)
