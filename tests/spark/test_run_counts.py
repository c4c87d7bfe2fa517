"""Equal counts of a run in the report, `counts()`, `holdfast runs show`, the output and `failed()`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from holdfast import failpoints
from holdfast.cli import main
from holdfast.spark import Run, Skip, Stage
from holdfast.spark.report import failed_rows_by_class
from holdfast.spark.sinks.parquet import read_parts

pytestmark = pytest.mark.timeout(180)

ROWS = 3000


def show_run(capsys: pytest.CaptureFixture[str], store: Path) -> Any:
    capsys.readouterr()
    assert main(["runs", "show", "labels", "--store", str(store), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def output_rows(path: Path) -> int:
    return sum(pq.read_metadata(part).num_rows for part in read_parts(path).files)


def test_counts_agree_in_report_cli_output_and_failed(
    spark: SparkSession,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, output, fixed = tmp_path / "data", tmp_path / "out", str(tmp_path / "mended")

    def work(row: Any) -> Any:
        if row.id % 100 == 7 and not (os.path.exists(fixed) and row.id < 1000):
            raise ValueError(f"no label for document {row.id}")
        if row.id % 1000 == 1:
            return Skip("empty")
        return {"y": row.id}

    stage = Stage("labels", work, key="id", schema="y bigint", store=store, progress="quiet")
    with stage.run(spark.range(ROWS), output=output) as run:
        progress, document = run.progress(), show_run(capsys, store)
        # Published counts are read without loading the scheduler.
        with failpoints.on("ledger.load_run") as load_run:
            assert Run.of("labels", spark, store).counts() == run.counts()
            assert stage.explain().failed == 30
        assert load_run.hits == 0
        counts = run.counts()
        ended = [counts[f"TERMINAL_{name}"] for name in ("SUCCESS", "SKIP", "FAIL")]
        assert ended == [2967, 3, 30]
        assert [document[name] for name in ("succeeded", "skipped", "failed")] == ended
        assert progress.ended[:3] == ended
        assert output_rows(output) == run.output().count() == 2967
        assert run.failed().count() == 30
        assert run.skipped().count() == 3
        # All failures have one class and one error group.
        assert failed_rows_by_class(progress) == {4: 30}
        assert document["failed_by_class"] == {"input": 30}
        [group] = progress.errors
        assert (group.text, group.count, group.rows) == (
            "ValueError: no label for document <n>",
            30,
            30,
        )
        assert len(group.examples) == 3
        [error] = document["errors"]
        assert (error["count"], error["rows"], error["class"]) == (30, 30, "input")
        # The set-up time is separate, and the mean rate uses the time of calls.
        assert 0 < progress.setup_ns < progress.time_ns
        assert progress.setup_ns + progress.calls_ns <= progress.time_ns
        assert document["rate_per_s"] == pytest.approx(ROWS / (progress.calls_ns / 1e9))
        report = run.report()
        assert "2,967 done, 30 failed, 3 skipped" in str(report)
        assert "until the first call" in str(report)
        for words in ("30 rows: input", "until the first call", "time of calls"):
            assert words in report.html
    Path(fixed).touch()
    assert main(["runs", "retry", "labels", "--store", str(store)]) == 0
    with stage.run(spark.range(ROWS), output=output) as run:
        counts, document = run.counts(), show_run(capsys, store)
        assert (counts["TERMINAL_SUCCESS"], counts["TERMINAL_FAIL"]) == (2977, 20)
        assert run.output().count() == 2977
        assert run.failed().count() == 20
        # A retry is a run over all rows that adopts the successful rows.
        assert document["in_all"]["succeeded"] == 2977
        assert (document["succeeded"], document["failed"]) == (2977, 20)
        assert "2,977 done, 20 failed, 3 skipped" in str(run.report())
        page = run.report().html
        assert "2,977" in page
        assert "20 rows: input" in page
