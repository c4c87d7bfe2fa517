"""Call timeouts: calls without progress, calls that hold the GIL, and the hand-over to a successor child."""

from __future__ import annotations

import ctypes
import datetime as dt
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from holdfast.ledger.run_policy import ErrorClass, RunPolicy
from holdfast.spark import function_pickle, ledger_protocol
from holdfast.spark.arrow_rows import ResultEncoder, encode_stream
from holdfast.spark.call_slots import CallSlots, StallDetector, decode_seq, encode_row
from holdfast.spark.caller import FunctionCaller
from holdfast.spark.child_job import ChildJob
from holdfast.spark.ledger_client import BlockUploaderFactory, LedgerClient
from holdfast.spark.row_executor import RowExecutor
from holdfast.spark.run_data import encode_schema
from holdfast.spark.spark_task import run_child_job
from tests.ledger_service.service_rig import ServiceRig, kill_idle_children, service_thread

pytestmark = pytest.mark.timeout(120)

S = 1_000_000_000
SCHEMA = StructType([StructField("y", LongType())])
RETRY_ON = (TimeoutError,)


@pytest.fixture(scope="module", autouse=True)
def _no_child_is_left() -> Iterator[None]:
    yield
    kill_idle_children()


def child_job(service: ServiceRig, **options: Any) -> ChildJob:
    settings: dict[str, Any] = {
        "address": service.supervisor.address, "run_id": service.run_id, "lo": 0, "hi": -1,
        "schema": SCHEMA.json(), "concurrency": 1, "flush_rows": 100, "batch_rows": 0, "rate": False,
        "timeout_s": 60.0, **options,
    }  # fmt: skip
    return ChildJob(**settings)


def run_row_executor(service: ServiceRig, fn: Callable[..., Any], **options: Any) -> str:
    job = child_job(service, **options)
    caller = FunctionCaller(fn, RETRY_ON, ResultEncoder(SCHEMA), job.run_id, job.timeout_s)
    with LedgerClient(job.address, "child") as client:
        return RowExecutor(job, caller, client).run()


def run_in_children(service: ServiceRig, fn: Callable[..., Any], **options: Any) -> None:
    assert (
        run_child_job(child_job(service, **options), function_pickle.dump_function(fn, RETRY_ON))
        == "over"
    )
    service.wait_over()


def attempts_by_seq(service: ServiceRig, rows: int) -> dict[int, int]:
    return {
        row["_seq"]: row["_attempts"] for row in service.outcomes().all_rows(0, rows).to_pylist()
    }


def is_first_caller(path: str) -> bool:
    """True for the first caller in any process."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def hold_the_gil(seconds: float) -> None:
    """Sleep without releasing the GIL, as a C extension may."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


# --- progress -------------------------------------------------------------------------------------


def test_call_progress_resets_the_timeout_of_a_call() -> None:
    never = threading.Event()

    def fn(row: Any, call: Any) -> Any:
        for _ in range(6):
            never.wait(0.2)
            call.progress()
        return {"y": row.id}

    with service_thread(2) as service:
        assert run_row_executor(service, fn, timeout_s=0.8, concurrency=2) == "over"
        assert attempts_by_seq(service, 2) == {0: 1, 1: 1}


def test_call_progress_resets_the_timeout_of_an_async_call() -> None:
    import asyncio

    async def fn(row: Any, call: Any) -> Any:
        for _ in range(6):
            await asyncio.sleep(0.2)
            if row.id:
                call.progress()
            else:
                # From another thread, like a callback of a client library.
                await asyncio.to_thread(call.progress)
        return {"y": row.id}

    async def silent(row: Any) -> Any:
        await asyncio.sleep(30)

    with service_thread(2) as service:
        assert run_row_executor(service, fn, timeout_s=0.8, concurrency=2) == "over"
        assert attempts_by_seq(service, 2) == {0: 1, 1: 1}
    policy = RunPolicy(attempts_max=1)
    with service_thread(1, policy=policy) as service:
        assert run_row_executor(service, silent, timeout_s=0.2) == "over"
        [failed] = service.outcomes().failed(0, 1).to_pylist()
        assert failed["_error_class"] == "transient"
        assert failed["_error"].startswith("TimeoutError: timed out")


def test_progress_of_an_ended_call_does_not_reset_a_timeout() -> None:
    slots = CallSlots()
    [slot] = slots.open_slots(1)
    stalls = StallDetector(slots)
    slot.begin(3, 1)
    stalls.sample(0)
    slot.progress(2, 1)
    stalls.sample(10)
    assert stalls.stalled_rows(9, 10) == {slot.offset: encode_row(3, 1)}
    slot.progress(3, 1)
    stalls.sample(20)
    assert stalls.stalled_rows(9, 29) == {}
    assert [decode_seq(row) for row in stalls.stalled_rows(9, 30).values()] == [3]
    slot.end()
    stalls.sample(40)
    assert not stalls.has_active_calls


# --- timeouts -------------------------------------------------------------------------------------


def hanging_function(path: str, how: Callable[[], Any]) -> Callable[..., Any]:
    """A function that hangs in the first attempt of row 3. Other calls return immediately."""
    mark = f"{path}/hung"

    def fn(row: Any) -> Any:
        if row.id == 3 and is_first_caller(mark):
            how()
        return {"y": row.id}

    return fn


def loop_blocking_function(path: str, how: Callable[[], Any]) -> Callable[..., Any]:
    fn = hanging_function(path, how)

    async def later(row: Any) -> Any:
        return fn(row)

    return later


HANGING_FUNCTIONS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "def": (hanging_function, lambda: time.sleep(600)),
    "async def that blocks its loop": (loop_blocking_function, lambda: time.sleep(600)),
    "def that holds the GIL": (hanging_function, lambda: hold_the_gil(600)),
}


@pytest.mark.parametrize(
    "batch_rows", [0, pytest.param(4, marks=pytest.mark.deep)], ids=["rows", "batches"]
)
@pytest.mark.parametrize("kind", HANGING_FUNCTIONS)
def test_call_timeout_repeats_only_the_timed_out_call(
    tmp_path: Path, kind: str, batch_rows: int
) -> None:
    make, how = HANGING_FUNCTIONS[kind]
    fn = make(str(tmp_path), how)
    if batch_rows:
        if kind.startswith("async"):
            fn = batched_async(fn)
        else:
            fn = batched(fn)
    policy = RunPolicy(
        lease_ns=5 * S, batch_rows=batch_rows, page_rows=32, backoff_first_ns=0, backoff_max_ns=0
    )
    with service_thread(32, policy=policy) as service:
        run_in_children(
            service, fn, timeout_s=2.0, lease_s=5.0, batch_rows=batch_rows,
            concurrency=1 if "GIL" in kind else 2,
        )  # fmt: skip
        late = {3} if not batch_rows else {0, 1, 2, 3}
        assert attempts_by_seq(service, 32) == {seq: 2 if seq in late else 1 for seq in range(32)}
        progress = service.progress()
        assert progress.reclaims == 0
        [group] = progress.errors
        assert group.error_class == ErrorClass.TRANSIENT
        assert group.text.startswith(
            "TimeoutError: timed out: no end and no progress for timeout_s="
        )


def batched(fn: Callable[..., Any]) -> Callable[..., Any]:
    def work(table: pa.Table) -> Any:
        return pa.table({"y": [fn(FakeRow(one))["y"] for one in table.column("id").to_pylist()]})

    return work


def batched_async(fn: Callable[..., Any]) -> Callable[..., Any]:
    async def work(table: pa.Table) -> Any:
        ys = [(await fn(FakeRow(one)))["y"] for one in table.column("id").to_pylist()]
        return pa.table({"y": ys})

    return work


class FakeRow:
    def __init__(self, number: int) -> None:
        self.id = number


def test_a_call_that_holds_the_gil_keeps_its_lease(tmp_path: Path) -> None:
    fn = hanging_function(str(tmp_path), lambda: hold_the_gil(4))
    with service_thread(8, policy=RunPolicy(lease_ns=S)) as service:
        run_in_children(service, fn, timeout_s=60.0, lease_s=1.0)
        assert set(attempts_by_seq(service, 8).values()) == {1}
        assert service.progress().reclaims == 0


def test_call_timeout_at_every_attempt_fails_the_row() -> None:
    def fn(row: Any) -> Any:
        if row.id == 1:
            time.sleep(600)
        return {"y": row.id}

    policy = RunPolicy(attempts_max=2, lease_ns=2 * S, backoff_first_ns=0, backoff_max_ns=0)
    with service_thread(4, policy=policy) as service:
        run_in_children(service, fn, timeout_s=0.3, lease_s=2.0)
        [failed] = service.outcomes().failed(0, 4).to_pylist()
        assert (failed["_seq"], failed["_attempts"]) == (1, 2)
        assert (
            failed["_error"] == "TimeoutError: timed out: no end and no progress for timeout_s=0.3"
        )


def test_grant_without_a_successor_child_expires_with_its_lease() -> None:
    with service_thread(4, policy=RunPolicy(lease_ns=S)) as service:
        line = service.connect("child/a")
        grants = line.claim_all(4)
        service.supervisor.request(ledger_protocol.AnnounceHandover("child/a"))
        line.close()
        other = service.connect("child/b")
        # The rows are granted after the lease ends, as rows of a lost child.
        again = other.claim(4, wait_ms=5000)
        assert again.isolated
        assert set(again.attempts) == {2}
        assert service.progress().reclaims == len(grants)


def test_successor_child_inherits_the_rest_of_a_grant() -> None:
    with service_thread(8) as service:
        first = service.connect("child/a")
        grant = first.claim(8, begin=3)
        rows = grant.seqs
        first.report(grant, done=[(rows[0], rows[0] + 1)])
        service.supervisor.request(ledger_protocol.AnnounceHandover("child/a"))
        first.close()
        second = service.connect("child/a")
        answer = second.request(ledger_protocol.InheritGrant([]))
        inherited = second.record_grant(answer)
        assert (inherited.epoch, answer.grant.last_report_no, inherited.begun) == (
            grant.epoch,
            1,
            2,
        )
        assert inherited.seqs == rows[1:]
        assert set(inherited.attempts) == {1}
        assert second.request(ledger_protocol.InheritGrant([inherited.epoch])).grant is None
        inherited.report_no = answer.grant.last_report_no
        second.report(inherited, done=[(rows[1], rows[1] + 2)])
        assert service.progress().reclaims == 0


# --- rows that cannot be converted ----------------------------------------------------------------


def test_row_that_cannot_be_converted_fails_alone_with_its_cause() -> None:
    far = pa.array([0, 1 << 60, 2], pa.int64()).cast(pa.timestamp("us"))
    table = pa.table({"id": pa.array([0, 1, 2], pa.int64()), "at": far})
    seen: list[Any] = []

    def fn(row: Any) -> Any:
        seen.append(row.at)
        return {"y": row.id}

    with service_thread() as service:
        line = BlockUploaderFactory(service.supervisor.address)()
        block = line.put_block(encode_stream(table))
        line.close()
        sealed = ledger_protocol.SealInput(
            [(block, 3)], False, [], encode_schema(table.schema), "hash", "plan"
        )
        service.supervisor.request(sealed)
        assert run_row_executor(service, fn) == "over"
        [failed] = service.outcomes().failed(0, 3).to_pylist()
        assert (failed["_seq"], failed["_error_class"], failed["_attempts"]) == (1, "input", 1)
        assert failed["_error"].startswith("its input cannot be converted: ")
        assert seen == [dt.datetime(1970, 1, 1), dt.datetime(1970, 1, 1, 0, 0, 0, 2)]
        service.wait_over()
        assert service.progress().calls == 2
