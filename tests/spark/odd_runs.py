"""Cases: executors, repeated runs and outputs."""

from __future__ import annotations

from typing import Any

from tests.spark.odd_bench import Case, OddInputBench, ReferencedCase, append_call

REFUSED = "refused before the first call"
CHANGED = "spark/test_stage.py::test_run_changed_names_the_changed_setting"
NOT_OURS = "spark/test_stage.py::test_foreign_output_is_refused_and_unchanged"
LEFT_ALONE = f"{REFUSED}: `OutputNotOurs`, nothing is touched"


def run_another_function(bench: OddInputBench) -> str:
    log = str(bench.path / "calls")

    def other(row: Any) -> dict[str, int]:
        append_call(log)
        return {"y": 2}

    df = bench.spark.range(0, 3, 1, 1)
    with bench.run(df) as first, bench.run(df, other) as again:
        assert first.run_id == again.run_id
        found = {row.y for row in again.output().collect()}
    assert (bench.calls(), found) == (3, {1}), (bench.calls(), found)
    return "success: the finished run, nothing is called"


EXECUTORS = [
    ReferencedCase("an executor without holdfast", f"{REFUSED}: `HoldfastDiffers`",
          "ledger_service/test_executor_probe.py::test_executor_without_holdfast_returns_holdfast_differs"),
    ReferencedCase("an executor with another version of holdfast", f"{REFUSED}: `HoldfastDiffers`",
          "ledger_service/test_executor_probe.py::test_executor_with_another_holdfast_version_names_both_versions"),
    ReferencedCase("an executor with another minor version of Python", f"{REFUSED}: `PythonDiffers`",
          "ledger_service/test_executor_probe.py::test_executor_with_another_python_names_both_versions_and_starts_no_child"),
    ReferencedCase("an executor without the Python of `PYSPARK_PYTHON`", f"{REFUSED}: `ExecutorUnfit`",
          "ledger_service/test_executor_probe.py::test_failed_probe_job_names_what_the_executor_lacks"),
    ReferencedCase("an executor that lacks a module of the function", f"{REFUSED}: `NotLoadable`",
          "spark/test_hosts.py::test_module_missing_on_an_executor_is_reported_before_the_first_call"),
    ReferencedCase("an executor that cannot reach the ledger service", f"{REFUSED}: `LedgerUnreachable`",
          "spark/test_hosts.py::test_ledger_unreachable_from_an_executor_is_reported_before_the_first_call"),
    ReferencedCase("an output that executors do not see", f"{REFUSED}: `OutputNotShared`",
          "spark/test_hosts.py::test_output_on_the_driver_disk_is_refused_before_the_first_call"),
]  # fmt: skip

AGAIN = [
    Case("another function for a run that is finished", "success: the finished run, nothing is called",
         run_another_function),
    *(
        ReferencedCase(f"another {what} for a run of the same name", f"{REFUSED}: `RunChanged`, which names it", CHANGED)
        for what in ("schema", "batching", "`file_rows`", "`version`", "key", "output")
    ),
    ReferencedCase("another input for a run of the same name", f"{REFUSED}: `InputChanged`",
          "spark/test_stage.py::test_another_input_of_a_run_name_raises_input_changed"),
    ReferencedCase("a second driver while the first one works", f"{REFUSED}: `RunAtWork`",
          "ledger_service/test_service.py::test_a_name_has_one_service_at_a_time"),
]  # fmt: skip

OUTPUTS = [
    ReferencedCase("an output that holds files of others", LEFT_ALONE, NOT_OURS),
    ReferencedCase("an output that holds Parquet files of Spark", LEFT_ALONE, NOT_OURS),
    ReferencedCase("an output of another stage", LEFT_ALONE, NOT_OURS),
    ReferencedCase("a read-only output", f"{REFUSED}: `OutputReadOnly`",
          "spark/test_stage_output.py::test_read_only_output_is_refused_before_the_first_call"),
    ReferencedCase("the disk of the output is full for a while", "success: the commit waits, no call is repeated",
          "spark/test_stage_output.py::test_commit_waits_while_the_output_disk_is_full"),
    ReferencedCase("the disk of the store is full", "the run ends with `StoreFull` and resumes once there is space",
          "spark/test_stage_output.py::test_full_store_disk_raises_store_full_and_the_run_resumes"),
    ReferencedCase("a part file is deleted after the end",
          "`run.output()` raises `OutputCorrupt` with its path, `run.write()` writes the rows again",
          "spark/test_stage_output.py::test_deleted_part_file_is_named_and_run_write_restores_its_rows"),
    ReferencedCase("the whole output is deleted after the end", "`run.write()` writes it again, nothing is called",
          "spark/test_stage_output.py::test_run_write_restores_a_deleted_output_and_exports_elsewhere"),
]  # fmt: skip
