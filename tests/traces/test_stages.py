"""Spans of the rows of a stage: one for each grant of rows to a child."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import StatusCode

from holdfast import traces
from holdfast.spark.child_job import StageTrace
from tests.ledger_service.service_rig import service_thread
from tests.ledger_service.test_row_executor import run_executor
from tests.traces.recorded import Recorded, attributes_of, parent_of, span_id_of

PARENT = traces.parse("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
UNSAMPLED = PARENT[:24] + b"\x00"
ROWS = 600


def plain(row: Any) -> Any:
    if row.id % 100 == 0:
        with trace.get_tracer("user").start_as_current_span("user call"):
            pass
    return {"y": int(traces.trace_id(traces.current())[:8], 16)}


async def coroutine(row: Any) -> Any:
    await asyncio.sleep(0)
    return plain(row)


@pytest.mark.parametrize("fn", [plain, coroutine])
def test_each_grant_of_rows_is_a_span_of_the_stage(recorded: Recorded, fn: Any) -> None:
    with service_thread(ROWS, blocks=3) as service:
        assert (
            run_executor(service, fn, concurrency=2, traced=StageTrace("enrich", PARENT)) == "over"
        )
        service.wait_over()
        values = service.outcomes().successes(0, ROWS).column("y").to_pylist()
    assert set(values) == {int(traces.trace_id(PARENT)[:8], 16)}
    spans = recorded.finished("rows enrich")
    assert sum(attributes_of(span)["holdfast.rows"] for span in spans) == ROWS
    assert {parent_of(span) for span in spans} == {int.from_bytes(PARENT[16:24], "big")}
    assert {span.status.status_code for span in spans} == {StatusCode.UNSET}
    called = recorded.finished("user call")
    assert len(called) == 6
    assert Counter(parent_of(span) for span in called).keys() <= {span_id_of(one) for one in spans}


def test_unsampled_stage_makes_no_span_and_its_calls_have_the_context(recorded: Recorded) -> None:
    with service_thread(100, blocks=1) as service:
        assert run_executor(service, plain, traced=StageTrace("enrich", UNSAMPLED)) == "over"
        service.wait_over()
        values = service.outcomes().successes(0, 100).column("y").to_pylist()
    assert set(values) == {int(traces.trace_id(PARENT)[:8], 16)}
    assert recorded.names() == []
