"""The trace of a stage run reaches the calls in Spark's executors, also in processes without the SDK."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from pyspark.sql import SparkSession

from holdfast.spark import Stage
from tests.traces.conftest import recorded
from tests.traces.recorded import Recorded, attributes_of, parent_of, span_id_of, trace_of

__all__ = ["recorded"]

pytestmark = pytest.mark.timeout(300)


def test_calls_of_executors_have_the_trace_of_the_run(
    spark: SparkSession, recorded: Recorded, tmp_path: Path
) -> None:
    def found(row: Any) -> Any:
        from holdfast import traces

        return {"headers": str(traces.headers(traces.current()))}

    stage = Stage(
        "enrich",
        found,
        schema="headers string",
        key="id",
        store=str(tmp_path / "data"),
        progress="quiet",
    )
    with trace.get_tracer("user").start_as_current_span("job") as job:
        run = stage.run(spark.range(8))
    with run:
        headers = {row.headers for row in run.output().collect()}
    span = recorded.one("stage enrich")
    assert parent_of(span) == job.get_span_context().span_id
    assert attributes_of(span) == {"holdfast.stage": "enrich", "holdfast.run": run.run_id}
    expected = f"00-{trace_of(span)}-{span_id_of(span):016x}-"
    assert len(headers) == 1
    assert expected in headers.pop()
