"""The row executor of a child process, against a real ledger service."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from holdfast import codec
from holdfast.ledger import runs
from holdfast.ledger.log import verify_run
from holdfast.ledger.run_policy import RunPolicy
from holdfast.ledger.states import RowState
from holdfast.spark import function_pickle, ledger_protocol, raw_values, row_reports
from holdfast.spark.arrow_rows import ResultEncoder, RowReader, to_arrow
from holdfast.spark.call_pool import AsyncCallPool, CallUnit, GrantedRows
from holdfast.spark.call_slots import CallSlots
from holdfast.spark.caller import FunctionCaller
from holdfast.spark.child_job import ChildJob, HungCall
from holdfast.spark.ledger_client import LedgerClient
from holdfast.spark.row_executor import RowExecutor
from holdfast.spark.row_results import Call, Retry, Skip
from holdfast.spark.run_data import encode_schema
from holdfast.spark.spark_task import ChildFailed, FunctionChild, run_child_job
from holdfast.store import schema, tuples
from tests.ledger_service.service_rig import (
    ServiceRig,
    kill_idle_children,
    output_ids,
    running_service,
    service_config,
    service_thread,
)

pytestmark = pytest.mark.timeout(60)

SCHEMA = StructType([StructField("y", LongType())])
RETRY_ON = (TimeoutError,)


@pytest.fixture(scope="module", autouse=True)
def _end_children() -> Iterator[None]:
    yield
    kill_idle_children()


def child_job(service: ServiceRig, **options: Any) -> ChildJob:
    fields: dict[str, Any] = {
        "address": service.supervisor.address,
        "run_id": service.run_id,
        "lo": 0,
        "hi": -1,
        "schema": SCHEMA.json(),
        "concurrency": 1,
        "flush_rows": 100,
        "batch_rows": 0,
        "rate": False,
        "timeout_s": 60.0,
        **options,
    }
    return ChildJob(**fields)


def run_executor(service: ServiceRig, fn: Callable[..., Any], **options: Any) -> str:
    """Run one executor in this thread until no rows are left."""
    job = child_job(service, **options)
    caller = FunctionCaller(fn, RETRY_ON, ResultEncoder(SCHEMA), job.run_id, job.timeout_s)
    with LedgerClient(job.address, "child") as client:
        return RowExecutor(job, caller, client).run()


def run_executors(
    service: ServiceRig, fn: Callable[..., Any], count: int, **options: Any
) -> list[str]:
    states: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: states.append(run_executor(service, fn, **options)), daemon=True
        )
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    return states


class CallCounter:
    """Counts calls by row and the maximum of concurrent calls."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls_by_seq: Counter[int] = Counter()
        self.running = self.running_max = 0

    def __enter__(self) -> None:
        with self.lock:
            self.running += 1
            self.running_max = max(self.running_max, self.running)

    def __exit__(self, *exc: object) -> None:
        with self.lock:
            self.running -= 1

    def count_call(self, seq: int) -> None:
        with self.lock:
            self.calls_by_seq[seq] += 1


def result_values(service: ServiceRig, size: int) -> list[int]:
    successes = service.outcomes().successes(0, size)
    assert successes.column("id").to_pylist() == sorted(successes.column("id").to_pylist())
    return list(successes.column("y").to_pylist())


def test_executors_share_the_rows_and_call_each_row_once() -> None:
    calls = CallCounter()

    def fn(row: Any) -> Any:
        with calls:
            calls.count_call(row.id)
            return {"y": row.id + 1}

    with service_thread(5000, blocks=7) as service:
        assert run_executors(service, fn, 3, concurrency=4) == ["over"] * 3
        service.wait_over()
        assert result_values(service, 5000) == list(range(1, 5001))
        assert set(calls.calls_by_seq.values()) == {1}
        assert calls.running_max <= 12
        assert service.progress().calls == 5000


@pytest.mark.parametrize("why", ["dead", "draining"])
def test_async_call_queued_behind_a_blocked_loop_is_not_started(why: str) -> None:
    begun: list[int] = []
    blocked, release = threading.Event(), threading.Event()

    async def fn(row: Any) -> Any:
        begun.append(row.id)
        blocked.set()
        release.wait(30)  # blocks the event loop
        return {"y": 0}

    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    caller = FunctionCaller(fn, RETRY_ON, ResultEncoder(SCHEMA), "run1", 60.0)
    pool = AsyncCallPool(caller, events, 2, CallSlots().open_slots(2))
    rows = RowReader(pa.table({"id": range(3)}))
    granted = GrantedRows(1, range(3), [1] * 3, rows, False, begun=3)
    pool.start([CallUnit(granted, at, at + 1, rows.take(1)) for at in range(3)])
    assert blocked.wait(30)
    if why == "dead":
        granted.lost = True
    else:
        pool.draining = True
    release.set()
    assert [event.outcomes[0].seq for event in events.get(timeout=30)] == [0]
    ended = threading.Event()
    pool._loop.call_soon_threadsafe(ended.set)
    assert ended.wait(30)
    pool.close()
    assert begun == [0]
    assert not pool.running


def test_concurrency_bounds_the_running_calls() -> None:
    both = threading.Barrier(4)

    def fn(row: Any) -> Any:
        both.wait(30)
        return {"y": 0}

    running = most = 0

    async def later(row: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return {"y": 0}

    with service_thread(40) as service:
        assert run_executor(service, fn, concurrency=4) == "over"
    with service_thread(400) as service:
        assert run_executor(service, later, concurrency=16) == "over"
        assert most == 16


def test_many_successes_and_skips_are_all_reported() -> None:
    size = 30_000

    def fn(row: Any) -> Any:
        return Skip("even") if row.id % 2 == 0 else {"y": row.id}

    with service_thread(size) as service:
        assert run_executor(service, fn, flush_rows=50_000) == "over"
        service.wait_over()
        assert service.progress().ended == [size // 2, size // 2, 0, 0]
        assert result_values(service, size) == list(range(1, size, 2))

    def by_batch(table: pa.Table) -> pa.Table:
        even = pc.equal(pc.bit_wise_and(table.column("id"), 1), 0)
        return pa.table({"y": table.column("id"), "_skip": even})

    policy = RunPolicy(page_rows=size, batch_rows=size)
    with service_thread(size, policy=policy) as service:
        assert run_executor(service, by_batch, batch_rows=size) == "over"
        service.wait_over()
        assert service.progress().ended == [size // 2, size // 2, 0, 0]
        assert result_values(service, size) == list(range(1, size, 2))


def test_retried_rows_are_called_again_with_the_next_attempt() -> None:
    seen: Counter[int] = Counter()

    def fn(row: Any, call: Call) -> Any:
        seen[row.id] += 1
        assert seen[row.id] == call.attempt
        if row.id % 7 == 0 and call.attempt == 1:
            raise TimeoutError
        if row.id % 11 == 0 and call.attempt < 3:
            return Retry("once more", after_s=0)
        return {"y": call.attempt}

    with service_thread(200) as service:
        assert run_executor(service, fn) == "over"
        service.wait_over()
        values = result_values(service, 200)
        assert values == [3 if i % 11 == 0 else 2 if i % 7 == 0 else 1 for i in range(200)]
        attempts = service.outcomes().all_rows(0, 200).column("_attempts").to_pylist()
        assert attempts == values


def test_batches_are_whole_under_a_rate_limit() -> None:
    sizes: list[int] = []

    def fn(table: pa.Table) -> pa.Table:
        sizes.append(table.num_rows)
        return pa.table({"y": table.column("id")})

    policy = RunPolicy(page_rows=100, batch_rows=10)
    with service_thread(95, policy=policy, rate_per_s=100) as service:
        assert run_executor(service, fn, batch_rows=10, rate=True) == "over"
        assert sorted(sizes) == [5] + [10] * 9


def test_rows_of_an_expired_grant_are_called_again() -> None:
    """The fenced grant reports nothing. The next executor calls its rows."""
    seen: Counter[int] = Counter()
    policy = RunPolicy(lease_ns=300_000_000, attempts_max=5)
    with service_thread(30, policy=policy) as service:
        line = service.connect("child/idle")
        lost = line.claim(5, begin=5)

        def fn(row: Any) -> Any:
            seen[row.id] += 1
            return {"y": row.id}

        assert run_executor(service, fn) == "over"
        assert line.report(lost, done=lost.ranges).report_replies[0].lost
        service.wait_over()
        assert result_values(service, 30) == list(range(30))
        assert set(seen.values()) == {1}


def test_executors_continue_after_the_service_is_killed(tmp_path: Path) -> None:
    seen: Counter[int] = Counter()
    lock = threading.Lock()

    def fn(row: Any) -> Any:
        with lock:
            seen[row.id] += 1
            first = seen[row.id] == 1
        if first and row.id in (500, 1500):
            os.kill(service.supervisor.pid, signal.SIGKILL)
        return {"y": row.id}

    out = tmp_path / "out"
    sink: dict[str, str | int | bool] = {"kind": "parquet", "path": str(out)}
    # No lease expires in this test: the service sends an unacknowledged grant again.
    policy = RunPolicy(lease_ns=3600 * 10**9)
    options: dict[str, Any] = {"sink": sink, "file_rows": 400, "policy": policy}
    with running_service(tmp_path / "data", 3000, **options) as service:
        states: list[list[str]] = []
        thread = threading.Thread(
            target=lambda: states.append(
                run_executors(service, fn, 2, concurrency=3, flush_rows=20)
            )
        )
        thread.start()
        # The driver polls the service and restarts it.
        assert service.wait_over().status == "finished"
        thread.join(30)
        assert states == [["over", "over"]]
        assert 1 <= service.supervisor.restarts <= 2
        assert verify_run(service.store, service.run_id)
        # Grants survive the service, so only a few rows are called again.
        assert sum(seen.values()) - 3000 <= 2 * 2 * (20 + 3)
    assert output_ids(out) == list(range(3000))


def test_output_does_not_depend_on_page_block_and_part_boundaries(tmp_path: Path) -> None:
    size, out = 150_000, tmp_path / "out"

    def fn(table: pa.Table) -> pa.Table:
        ids = table.column("id")
        return pa.table({"y": ids, "_skip": pc.equal(pc.bit_wise_and(ids, 1023), 5)})

    sink: dict[str, str | int | bool] = {"kind": "parquet", "path": str(out)}
    policy = RunPolicy(page_rows=6 * 10_000, batch_rows=10_000)
    options: dict[str, Any] = {"sink": sink, "policy": policy, "file_rows": 27_000}
    with service_thread(size, blocks=11, **options) as service:
        assert run_executors(service, fn, 2, batch_rows=10_000) == ["over", "over"]
        assert service.wait_over().status == "finished"
    assert output_ids(out) == [seq for seq in range(size) if seq & 1023 != 5]


def test_executor_stops_when_the_run_is_cancelled() -> None:
    with service_thread(1000, policy=RunPolicy(grace_ns=10**9)) as service:
        begun = threading.Event()
        cancelled = threading.Event()

        def fn(row: Any) -> Any:
            begun.set()
            cancelled.wait(30)
            return {"y": row.id}

        states: list[str] = []
        thread = threading.Thread(
            target=lambda: states.append(run_executor(service, fn, flush_rows=3))
        )
        thread.start()
        assert begun.wait(30)
        service.supervisor.request(ledger_protocol.CancelRun())
        cancelled.set()
        thread.join(30)
        assert states == ["stop"]
        assert service.wait_over().status == "cancelled"
        done, _, failed, cancelled_rows = service.progress().ended
        assert (failed, done + cancelled_rows) == (0, 1000)
        assert 1 <= done <= 5


def test_call_beyond_its_timeout_raises_hung_call() -> None:
    stop = threading.Event()

    def fn(row: Any) -> Any:
        if row.id == 3:
            stop.wait(60)
        return {"y": row.id}

    policy = RunPolicy(lease_ns=1_000_000_000)
    with service_thread(10, policy=policy) as service:
        with pytest.raises(HungCall, match="timeout_s"):
            run_executor(service, fn, timeout_s=0.2)
        stop.set()
        # Rows that ended beside the hung call were reported before.
        assert service.load_scheduler().ledger.counts()[RowState.TERMINAL_SUCCESS] >= 3


# --- the child process --------------------------------------------------------------------------


def exiting(row: Any) -> Any:
    sys.exit("no more")


def reading(row: Any) -> Any:
    """The row function starts a program that reads stdin.

    The program gets an empty stdin, not the pipe on which the executor sends messages to this child process.
    """
    output = subprocess.run(["cat"], capture_output=True, check=True, timeout=30).stdout
    print("what is printed is not taken for an answer", flush=True)
    os.write(1, b"nor is this\n")
    assert sys.stdin.read() == ""
    return {"y": len(output)}


def deadly(row: Any) -> Any:
    if row.id == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"y": 1}


@pytest.mark.parametrize("fn", [exiting, reading, deadly], ids=lambda fn: fn.__name__)
def test_every_row_ends_when_the_function_disturbs_its_process(fn: Callable[..., Any]) -> None:
    with service_thread(12) as service:
        assert (
            run_child_job(child_job(service), function_pickle.dump_function(fn, RETRY_ON)) == "over"
        )
        service.wait_over()
        ended = {"exiting": [0, 0, 12, 0], "reading": [12, 0, 0, 0], "deadly": [11, 0, 1, 0]}
        assert service.progress().ended == ended[fn.__name__]


def test_function_that_does_not_load_fails_the_task_with_the_reason(tmp_path: Path) -> None:
    module_directory = tmp_path / "modules"
    module_directory.mkdir()
    (module_directory / "not_there_later.py").write_text("def work(row):\n    return {'y': 1}\n")
    sys.path.insert(0, str(module_directory))
    try:
        import not_there_later  # type: ignore[import-not-found]

        function = function_pickle.dump_function(not_there_later.work, RETRY_ON)
    finally:
        sys.path.remove(str(module_directory))
        sys.modules.pop("not_there_later", None)
    (module_directory / "not_there_later.py").unlink()
    with service_thread(5) as service:
        with pytest.raises(ChildFailed) as failed:
            run_child_job(child_job(service), function)
        assert failed.value.fields["code_of_cause"] == "not_loadable"
        assert "not_there_later" in failed.value.fields["why"]
        assert service.load_scheduler().ledger.counts()[RowState.UNSEEN] == 5


def test_child_process_exits_when_its_stdin_closes() -> None:
    child = FunctionChild()
    pidfd = os.pidfd_open(child.pid)
    child.stdin.close()
    import select

    assert select.select([pidfd], [], [], 30)[0]
    os.close(pidfd)
    assert child.end() == 0


def test_many_long_error_texts_are_reported(tmp_path: Path) -> None:
    """The error texts together exceed the maximum size of a store value."""

    def fn(row: Any) -> Any:
        raise ValueError("x" * 4000)

    with running_service(tmp_path / "data", 8000) as service:
        assert run_executor(service, fn) == "over"
        assert service.supervisor.restarts == 0
        failed = service.outcomes().failed(0, 8000)
        assert failed.num_rows == 8000


def test_oversized_result_fails_its_row_alone(tmp_path: Path) -> None:
    text = StructType([StructField("y", StringType())])

    def fn(row: Any) -> Any:
        return {"y": "x" * (20 << 20) if row.id == 3 else "x" * (3 << 20)}

    with running_service(tmp_path / "data", 6) as service, pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_reports, "RESULT_BYTES_MAX", 19 << 20)
        job = child_job(service, schema=text.json())
        caller = FunctionCaller(fn, RETRY_ON, ResultEncoder(text), job.run_id, job.timeout_s)
        with LedgerClient(job.address, "child") as client:
            assert RowExecutor(job, caller, client).run() == "over"
        [failed] = service.outcomes().failed(0, 6).to_pylist()
        assert (failed["_seq"], failed["_error_class"]) == (3, "schema")
        assert "a result of 20,97" in failed["_error"]
        assert len(raw_values.decode(failed["_raw"])["y"]) == 20 << 20


@pytest.mark.parametrize("batch_rows", [0, 4])
def test_result_larger_than_a_store_value_is_stored_in_parts(
    tmp_path: Path, batch_rows: int
) -> None:
    text = StructType([StructField("y", StringType())])

    def fn(row: Any) -> Any:
        return {"y": str(row.id) * (18 << 20)}

    def batch(table: pa.Table) -> Any:
        return pa.table({"y": [str(i) * (18 << 20) for i in table.column("id").to_pylist()]})

    config = service_config(str(tmp_path / "data"), policy=RunPolicy(batch_rows=batch_rows))
    record = msgspec.structs.replace(
        codec.unpack_as(runs.RunRecord, config.record),
        result_schema=encode_schema(to_arrow(text)),
    )
    config = msgspec.structs.replace(config, record=codec.pack(record))
    with running_service(tmp_path / "data", 4, config=config) as service:
        job = child_job(service, schema=text.json(), batch_rows=batch_rows)
        work = batch if batch_rows else fn
        caller = FunctionCaller(work, RETRY_ON, ResultEncoder(text), job.run_id, job.timeout_s)
        with LedgerClient(job.address, "child") as client:
            assert RowExecutor(job, caller, client).run() == "over"
        kept = service.outcomes().successes(0, 4).to_pylist()
        assert [row["id"] for row in kept] == [0, 1, 2, 3]
        assert all(row["y"] == str(row["id"]) * (18 << 20) for row in kept)
        service.wait_over()
        while service.store.transact(runs.delete_rows, service.run_id, 1000):
            pass
        assert service.store.read(_run_keys) == []


def _run_keys(txn: Any) -> list[Any]:
    prefix = schema.key_prefix(schema.Space.RUN)
    return [key for key, _ in txn.scan(prefix, tuples.prefix_end(prefix), 1000)]


@pytest.mark.parametrize(("rate", "most"), [(True, 4), (False, 104)])
def test_window_under_a_rate_limit_is_the_concurrency(rate: bool, most: int) -> None:
    with service_thread(10, rate_per_s=1000.0) as service:
        job = child_job(service, rate=rate, concurrency=4, flush_rows=100)
        caller = FunctionCaller(
            lambda row: {"y": 1}, RETRY_ON, ResultEncoder(SCHEMA), job.run_id, 60.0
        )
        with LedgerClient(job.address, "child") as client:
            executor = RowExecutor(job, caller, client)
            executor._window.rows = 100
            assert executor._window.size() == most
            assert executor.run() == "over"


def test_window_is_small_after_child_deaths_and_grows_again() -> None:
    with service_thread(20_000) as service:
        job = child_job(service, deaths=3)
        caller = FunctionCaller(
            lambda row: {"y": 1}, RETRY_ON, ResultEncoder(SCHEMA), job.run_id, 60.0
        )
        with LedgerClient(job.address, "child") as client:
            executor = RowExecutor(job, caller, client)
            assert executor._window.size() == 2
            assert executor.run() == "over"
            assert executor._window.size() > 100


def test_orphaned_executor_reports_begun_calls_and_begins_no_more() -> None:
    orphaned = threading.Event()
    begun: list[int] = []

    def fn(row: Any) -> Any:
        begun.append(row.id)
        orphaned.set()
        return {"y": row.id}

    with service_thread(1000) as service:
        job = child_job(service)
        caller = FunctionCaller(fn, RETRY_ON, ResultEncoder(SCHEMA), job.run_id, 60.0)
        with LedgerClient(job.address, "child") as client:
            assert RowExecutor(job, caller, client, orphaned).run() == "stop"
        succeeded = service.progress().ended[0]
        assert 0 < succeeded < 1000
        assert succeeded == len(begun), "what was called was told"
