"""Tokens a minute: one limit over all children, by estimates first and by what calls used then."""

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
from holdfast.ledger.classes import Policy
from holdfast.ledger.service.pace import SAVED_SHARE
from holdfast.spark import Stage, wire
from holdfast.spark.caller import Caller
from holdfast.spark.client import Client
from holdfast.spark.engine import Engine
from holdfast.spark.errors import NotAStage
from holdfast.spark.rows import Encoder
from tests.process.watch import until
from tests.spark.service_rig import Serving, serving
from tests.spark.test_engine import RETRY_ON, duty

pytestmark = pytest.mark.timeout(120)

SCHEMA = StructType([StructField("y", LongType())])
# 95,000 tokens a second.
PER_MIN = 6_000_000.0
PER_S = PER_MIN * (1 - SAVED_SHARE) / 60


def work(service: Serving, fn: Any, estimate: Any, **options: Any) -> str:
    told = duty(service, rate=True, priced=True, **options)
    caller = Caller(fn, RETRY_ON, Encoder(SCHEMA), told.run_id, told.timeout_s)
    with Client(told.address, "child") as client:
        return Engine(told, caller, client, estimate=estimate).run()


def test_children_together_keep_the_limit_by_what_their_calls_used(tmp_path: Path) -> None:
    """Calls use four times what was estimated: the account has it, and the others wait for it."""

    def fn(row: Any, call: Any) -> Any:
        call.tokens = 2000
        return {"y": row.id}

    with serving(tmp_path / "data", 120, tokens_per_min=PER_MIN) as service:
        threads = [
            threading.Thread(target=work, args=(service, fn, 500), kwargs={"concurrency": 4})
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
        # What was used beyond the refill was in flight: calls of both children, and of their last leave.
        assert found.tokens <= PER_S * passed_s + 2 * 2 * 4 * 2000


def test_an_estimate_is_of_its_row_and_counts_when_the_call_does_not_say(tmp_path: Path) -> None:
    def estimate(row: Any) -> int:
        if row.id == 3:
            raise KeyError("text")
        return int(row.id)

    def fn(row: Any, call: Any) -> Any:
        if row.id == 7:
            call.tokens = 1000
        return {"y": row.id}

    with serving(tmp_path / "data", 10, tokens_per_min=PER_MIN) as service:
        assert work(service, fn, estimate) == "over"
        service.wait_over()
        assert service.progress().tokens == sum(range(10)) - 3 - 7 + 1000
        rows = service.outcomes().all(0, 10).to_pylist()
        told = "its tokens cannot be estimated: KeyError: 'text'"
        assert [(row["_seq"], row["_error"]) for row in rows if row["_error"]] == [(3, told)]


def test_a_batch_is_one_call_with_one_estimate(tmp_path: Path) -> None:
    asked: list[int] = []

    def estimate(table: pa.Table) -> int:
        asked.append(table.num_rows)
        return 10 * table.num_rows

    policy = Policy(page_rows=100, batch_rows=10)
    with serving(tmp_path / "data", 95, policy=policy, tokens_per_min=PER_MIN) as service:
        fn = lambda table: pa.table({"y": table.column("id")})  # noqa: E731
        assert work(service, fn, estimate, batch_rows=10, concurrency=2) == "over"
        service.wait_over()
        assert sorted(asked) == [5] + [10] * 9
        assert service.progress().tokens == 950


def test_what_is_owed_is_owed_after_a_restart(tmp_path: Path) -> None:
    """A service that is killed and comes back does not forgive what calls used beyond their estimate."""

    def fn(row: Any, call: Any) -> Any:
        call.tokens = 60_000_000
        return {"y": row.id}

    with serving(tmp_path / "data", 2, tokens_per_min=PER_MIN) as service:
        assert work(service, fn, 1, hi=1) == "over"
        wait_ms = service.line("child/a").ask(wire.Tokens(1, [1])).wait_ms
        # Ten minutes are owed.
        assert wait_ms > 400_000
        until(lambda: _published(service).tokens_left < 0, "the published account")
        os.kill(service.keeper.pid, signal.SIGKILL)
        service.wait_exit()
        service.keeper.ask(wire.Status())
        assert service.line("child/b").ask(wire.Tokens(1, [1])).wait_ms > 400_000


def _published(service: Serving) -> runs.Progress:
    return service.store.read(runs.progress, service.run_id) or runs.Progress()


@pytest.mark.parametrize(
    "options",
    [{"tokens_per_min": 1000}, {"tokens": 10}, {"tokens_per_min": 1000, "tokens": 0}, {"tokens_per_min": -1}],
)  # fmt: skip
def test_a_limit_needs_an_estimate(options: dict[str, Any]) -> None:
    with pytest.raises(NotAStage):
        Stage("job", lambda row: row, key="id", schema="y int", **options)
