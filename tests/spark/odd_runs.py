"""Executors, runs that come again, and outputs."""

from __future__ import annotations

from typing import Any

from tests.spark.odd_bench import Bench, Case, Named, note

REFUSED = "refused before the first call"
CHANGED = "test_stage.py::test_what_must_not_change_under_a_name_is_named_when_it_did"
NOT_OURS = "test_stage.py::test_an_output_that_is_not_ours_is_left_as_it_is"
LEFT_ALONE = f"{REFUSED}: `OutputNotOurs`, nothing is touched"


def another_function(bench: Bench) -> str:
    log = str(bench.path / "calls")

    def other(row: Any) -> dict[str, int]:
        note(log)
        return {"y": 2}

    df = bench.spark.range(0, 3, 1, 1)
    with bench.run(df) as first, bench.run(df, other) as again:
        assert first.run_id == again.run_id
        found = {row.y for row in again.output().collect()}
    assert (bench.calls(), found) == (3, {1}), (bench.calls(), found)
    return "success: the finished run, nothing is called"


EXECUTORS = [
    Named("an executor without holdfast", f"{REFUSED}: `HoldfastDiffers`",
          "test_probe.py::test_an_executor_without_holdfast_says_so"),
    Named("an executor with another version of holdfast", f"{REFUSED}: `HoldfastDiffers`",
          "test_probe.py::test_an_executor_with_another_holdfast_names_both_versions"),
    Named("an executor with another minor version of Python", f"{REFUSED}: `PythonDiffers`",
          "test_probe.py::test_an_executor_with_another_python_names_both_and_starts_no_child"),
    Named("an executor without the Python of `PYSPARK_PYTHON`", f"{REFUSED}: `ExecutorUnfit`",
          "test_probe.py::test_a_failed_job_is_told_by_what_the_executor_lacks"),
    Named("an executor that lacks a module of the function", f"{REFUSED}: `NotLoadable`",
          "test_hosts.py::test_a_module_that_an_executor_lacks_is_named_before_the_first_call"),
    Named("an executor that cannot reach the ledger service", f"{REFUSED}: `LedgerUnreachable`",
          "test_hosts.py::test_a_ledger_that_an_executor_cannot_reach_is_named_before_the_first_call"),
    Named("an output that executors do not see", f"{REFUSED}: `OutputNotShared`",
          "test_hosts.py::test_an_output_on_the_disk_of_the_driver_is_refused_before_the_first_call"),
]  # fmt: skip

AGAIN = [
    Case("another function for a run that is finished", "success: the finished run, nothing is called",
         another_function),
    *(
        Named(f"another {what} for a run of the same name", f"{REFUSED}: `RunChanged`, which names it", CHANGED)
        for what in ("schema", "batching", "`file_rows`", "`version`", "key", "output")
    ),
    Named("another input for a run of the same name", f"{REFUSED}: `InputChanged`",
          "test_stage.py::test_another_input_under_a_name_is_refused"),
    Named("a second driver while the first one works", f"{REFUSED}: `RunAtWork`",
          "test_service.py::test_a_name_has_one_service_at_a_time"),
]  # fmt: skip

OUTPUTS = [
    Named("an output that holds files of others", LEFT_ALONE, NOT_OURS),
    Named("an output that holds Parquet files of Spark", LEFT_ALONE, NOT_OURS),
    Named("an output of another stage", LEFT_ALONE, NOT_OURS),
    Named("a read-only output", f"{REFUSED}: `OutputReadOnly`",
          "test_stage_output.py::test_an_output_that_cannot_be_written_is_refused_before_the_first_call"),
    Named("the disk of the output is full for a while", "success: the commit waits, no call is repeated",
          "test_stage_output.py::test_a_full_disk_of_the_output_is_waited_for"),
    Named("the disk of the store is full", "the run ends with `StoreFull` and resumes once there is space",
          "test_stage_output.py::test_a_full_disk_of_the_store_ends_the_run_and_it_resumes"),
    Named("a part file is deleted after the end",
          "`run.output()` raises `OutputCorrupt` with its path, `run.write()` writes the rows again",
          "test_stage_output.py::test_a_part_file_that_was_deleted_is_named_and_its_rows_are_written_again"),
    Named("the whole output is deleted after the end", "`run.write()` writes it again, nothing is called",
          "test_stage_output.py::test_an_output_that_was_deleted_is_written_again_and_elsewhere"),
]  # fmt: skip
