"""`tokens_per_min`: one limit over all children. Calls reserve estimates and settle the tokens used."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from holdfast.ledger import runs
from holdfast.ledger.run_policy import RunPolicy
from holdfast.ledger.service.rate_limits import SAVED_SHARE
from holdfast.spark import Stage, ledger_protocol
from holdfast.spark.arrow_rows import ResultEncoder
from holdfast.spark.caller import FunctionCaller
from holdfast.spark.errors import NotAStage
from holdfast.spark.ledger_client import LedgerClient
from holdfast.spark.row_executor import RowExecutor
from tests.ledger_service.service_rig import ServiceRig, running_service, service_thread
from tests.ledger_service.test_row_executor import RETRY_ON, child_job
from tests.process.watch import until

pytestmark = pytest.mark.timeout(120)

SCHEMA = StructType([StructField("y", LongType())])
# 95,000 tokens per second.
PER_MIN = 6_000_000.0
PER_S = PER_MIN * (1 - SAVED_SHARE) / 60


def run_row_executor(service: ServiceRig, fn: Any, estimate: Any, **options: Any) -> str:
    job = child_job(service, rate=True, token_limited=True, **options)
    caller = FunctionCaller(fn, RETRY_ON, ResultEncoder(SCHEMA), job.run_id, job.timeout_s)
    with LedgerClient(job.address, "child") as client:
        return RowExecutor(job, caller, client, estimate=estimate).run()


def test_tokens_per_min_holds_across_children_by_tokens_used() -> None:
    """Calls use four times their estimate. The account is charged the difference and later calls wait."""

    def fn(row: Any, call: Any) -> Any:
        call.tokens = 2000
        return {"y": row.id}

    with service_thread(120, tokens_per_min=PER_MIN) as service:
        threads = [
            threading.Thread(
                target=run_row_executor, args=(service, fn, 500), kwargs={"concurrency": 4}
            )
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        service.wait_over()
        found = service.progress()
        passed_s = (found.updated_ns - found.started_ns) / 1e9
        assert found.tokens == 120 * 2000
        # The excess over the refill is in flight: running and already granted calls of both children.
        assert found.tokens <= PER_S * passed_s + 2 * 2 * 4 * 2000


def test_token_estimate_counts_when_the_call_reports_no_tokens() -> None:
    def estimate(row: Any) -> int:
        if row.id == 3:
            raise KeyError("text")
        return int(row.id)

    def fn(row: Any, call: Any) -> Any:
        if row.id == 7:
            call.tokens = 1000
        return {"y": row.id}

    with service_thread(10, tokens_per_min=PER_MIN) as service:
        assert run_row_executor(service, fn, estimate) == "over"
        service.wait_over()
        assert service.progress().tokens == sum(range(10)) - 3 - 7 + 1000
        rows = service.outcomes().all_rows(0, 10).to_pylist()
        error_text = "its tokens cannot be estimated: KeyError: 'text'"
        assert [(row["_seq"], row["_error"]) for row in rows if row["_error"]] == [(3, error_text)]


def test_token_estimate_is_made_once_per_batch() -> None:
    estimated_rows: list[int] = []

    def estimate(table: pa.Table) -> int:
        estimated_rows.append(table.num_rows)
        return 10 * table.num_rows

    policy = RunPolicy(page_rows=100, batch_rows=10)
    with service_thread(95, policy=policy, tokens_per_min=PER_MIN) as service:
        fn = lambda table: pa.table({"y": table.column("id")})  # noqa: E731
        assert run_row_executor(service, fn, estimate, batch_rows=10, concurrency=2) == "over"
        service.wait_over()
        assert sorted(estimated_rows) == [5] + [10] * 9
        assert service.progress().tokens == 950


def test_token_debt_survives_a_service_restart(tmp_path: Path) -> None:
    """A restarted service keeps the debt of calls that used more than their estimate."""

    def fn(row: Any, call: Any) -> Any:
        call.tokens = 60_000_000
        return {"y": row.id}

    with running_service(tmp_path / "data", 2, tokens_per_min=PER_MIN) as service:
        assert run_row_executor(service, fn, 1, hi=1) == "over"
        wait_ms = service.connect("child/a").request(ledger_protocol.AcquireTokens(1, [1])).wait_ms
        # The debt is ten minutes of the limit.
        assert wait_ms > 400_000
        until(lambda: _published(service).tokens_left < 0, "the published account")
        os.kill(service.supervisor.pid, signal.SIGKILL)
        service.wait_exit()
        service.supervisor.request(ledger_protocol.GetRunStatus())
        assert (
            service.connect("child/b").request(ledger_protocol.AcquireTokens(1, [1])).wait_ms
            > 400_000
        )


def _published(service: ServiceRig) -> runs.RunProgress:
    return service.store.read(runs.get_progress, service.run_id) or runs.RunProgress()


@pytest.mark.parametrize(
    "options",
    [{"tokens_per_min": 1000}, {"tokens": 10}, {"tokens_per_min": 1000, "tokens": 0}, {"tokens_per_min": -1}],
)  # fmt: skip
def test_tokens_per_min_needs_an_estimate(options: dict[str, Any]) -> None:
    with pytest.raises(NotAStage):
        Stage("job", lambda row: row, key="id", schema="y int", **options)
