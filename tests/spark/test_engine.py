"""What a child does for a task, against a real service: all rows, once each, as many at a time as said."""

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
from holdfast.ledger.classes import Policy
from holdfast.ledger.log import verify
from holdfast.ledger.states import State
from holdfast.spark import code, raw_values, row_reports, wire
from holdfast.spark.call_slots import CallSlots
from holdfast.spark.caller import Caller
from holdfast.spark.client import Client
from holdfast.spark.engine import Duty, Engine, HungCall
from holdfast.spark.journal import schema_bytes
from holdfast.spark.outcome import Call, Retry, Skip
from holdfast.spark.pool import Held, Loop, Unit
from holdfast.spark.rows import Encoder, RowReader, arrow_schema
from holdfast.spark.task import Child, ChildFailed, run_duty
from holdfast.store import schema, tuples
from tests.spark.service_rig import Serving, charge, end_children, rows_of_output, serving

pytestmark = pytest.mark.timeout(60)

SCHEMA = StructType([StructField("y", LongType())])
RETRY_ON = (TimeoutError,)


@pytest.fixture(scope="module", autouse=True)
def _no_child_is_left() -> Iterator[None]:
    yield
    end_children()


def duty(service: Serving, **options: Any) -> Duty:
    made: dict[str, Any] = {
        "address": service.keeper.address,
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
    return Duty(**made)


def work(service: Serving, fn: Callable[..., Any], **options: Any) -> str:
    """One engine in this thread, until nothing is left."""
    told = duty(service, **options)
    caller = Caller(fn, RETRY_ON, Encoder(SCHEMA), told.run_id, told.timeout_s)
    with Client(told.address, "child") as client:
        return Engine(told, caller, client).run()


def work_many(service: Serving, fn: Callable[..., Any], count: int, **options: Any) -> list[str]:
    states: list[str] = []
    threads = [
        threading.Thread(target=lambda: states.append(work(service, fn, **options)), daemon=True)
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    return states


class Calls:
    """Counts calls, and how many are at work at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.seen: Counter[int] = Counter()
        self.now = self.most = 0

    def __enter__(self) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *exc: object) -> None:
        with self.lock:
            self.now -= 1

    def note(self, seq: int) -> None:
        with self.lock:
            self.seen[seq] += 1


def ys(service: Serving, size: int) -> list[int]:
    found = service.outcomes().successes(0, size)
    assert found.column("id").to_pylist() == sorted(found.column("id").to_pylist())
    return list(found.column("y").to_pylist())


def test_engines_share_the_rows_and_call_once_for_each(tmp_path: Path) -> None:
    calls = Calls()

    def fn(row: Any) -> Any:
        with calls:
            calls.note(row.id)
            return {"y": row.id + 1}

    with serving(tmp_path / "data", 5000, blocks=7) as service:
        assert work_many(service, fn, 3, concurrency=4) == ["over"] * 3
        service.wait_over()
        assert ys(service, 5000) == list(range(1, 5001))
        assert set(calls.seen.values()) == {1}
        assert calls.most <= 12
        assert service.progress().calls == 5000


@pytest.mark.parametrize("why", ["dead", "draining"])
def test_an_async_call_that_waits_behind_a_blocked_loop_is_not_started_any_more(why: str) -> None:
    begun: list[int] = []
    blocked, go_on = threading.Event(), threading.Event()

    async def fn(row: Any) -> Any:
        begun.append(row.id)
        blocked.set()
        go_on.wait(30)  # as a call that blocks the loop does
        return {"y": 0}

    news: queue.SimpleQueue[Any] = queue.SimpleQueue()
    caller = Caller(fn, RETRY_ON, Encoder(SCHEMA), "run1", 60.0)
    pool = Loop(caller, news, 2, CallSlots().watches(2))
    rows = RowReader(pa.table({"id": range(3)}))
    held = Held(1, range(3), [1] * 3, rows, False, begun=3)
    pool.start([Unit(held, at, at + 1, rows.take(1)) for at in range(3)])
    assert blocked.wait(30)
    if why == "dead":
        held.dead = True
    else:
        pool.draining = True
    go_on.set()
    assert [one.ended[0].seq for one in news.get(timeout=30)] == [0]
    ended = threading.Event()
    pool._loop.call_soon_threadsafe(ended.set)
    assert ended.wait(30)
    pool.close()
    assert begun == [0]
    assert not pool.running


def test_calls_run_at_once_as_many_as_said(tmp_path: Path) -> None:
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

    with serving(tmp_path / "data", 40) as service:
        assert work(service, fn, concurrency=4) == "over"
    with serving(tmp_path / "data2", 400) as service:
        assert work(service, later, concurrency=16) == "over"
        assert most == 16


def test_rows_of_every_end_are_reported_however_many_there_are(tmp_path: Path) -> None:
    size = 30_000

    def fn(row: Any) -> Any:
        return Skip("even") if row.id % 2 == 0 else {"y": row.id}

    with serving(tmp_path / "data", size) as service:
        assert work(service, fn, flush_rows=50_000) == "over"
        service.wait_over()
        assert service.progress().ended == [size // 2, size // 2, 0, 0]
        assert ys(service, size) == list(range(1, size, 2))

    def by_batch(table: pa.Table) -> pa.Table:
        even = pc.equal(pc.bit_wise_and(table.column("id"), 1), 0)
        return pa.table({"y": table.column("id"), "_skip": even})

    policy = Policy(page_rows=size, batch_rows=size)
    with serving(tmp_path / "batches", size, policy=policy) as service:
        assert work(service, by_batch, batch_rows=size) == "over"
        service.wait_over()
        assert service.progress().ended == [size // 2, size // 2, 0, 0]
        assert ys(service, size) == list(range(1, size, 2))


def test_retries_come_again_and_the_others_go_on(tmp_path: Path) -> None:
    seen: Counter[int] = Counter()

    def fn(row: Any, call: Call) -> Any:
        seen[row.id] += 1
        assert seen[row.id] == call.attempt
        if row.id % 7 == 0 and call.attempt == 1:
            raise TimeoutError
        if row.id % 11 == 0 and call.attempt < 3:
            return Retry("once more", after_s=0)
        return {"y": call.attempt}

    with serving(tmp_path / "data", 200) as service:
        assert work(service, fn) == "over"
        service.wait_over()
        found = ys(service, 200)
        assert found == [3 if i % 11 == 0 else 2 if i % 7 == 0 else 1 for i in range(200)]
        attempts = service.outcomes().all(0, 200).column("_attempts").to_pylist()
        assert attempts == found


def test_batches_are_whole_whatever_the_rate(tmp_path: Path) -> None:
    sizes: list[int] = []

    def fn(table: pa.Table) -> pa.Table:
        sizes.append(table.num_rows)
        return pa.table({"y": table.column("id")})

    policy = Policy(page_rows=100, batch_rows=10)
    with serving(tmp_path / "data", 95, policy=policy, rate_per_s=100) as service:
        assert work(service, fn, batch_rows=10, rate=True) == "over"
        assert sorted(sizes) == [5] + [10] * 9


def test_a_lost_grant_is_dropped_and_its_rows_come_again(tmp_path: Path) -> None:
    """Nothing is told of what was fenced; the rows are called again by whoever gets them next."""
    seen: Counter[int] = Counter()
    policy = Policy(lease_ns=300_000_000, attempts_max=5)
    with serving(tmp_path / "data", 30, policy=policy) as service:
        line = service.line("child/idle")
        lost = line.claim(5, begin=5)

        def fn(row: Any) -> Any:
            seen[row.id] += 1
            return {"y": row.id}

        assert work(service, fn) == "over"
        assert line.report(lost, done=lost.ranges).moved[0].lost
        service.wait_over()
        assert ys(service, 30) == list(range(30))
        assert set(seen.values()) == {1}


def test_engines_go_on_when_the_service_is_killed_under_them(tmp_path: Path) -> None:
    seen: Counter[int] = Counter()
    lock = threading.Lock()

    def fn(row: Any) -> Any:
        with lock:
            seen[row.id] += 1
            first = seen[row.id] == 1
        if first and row.id in (500, 1500):
            os.kill(service.keeper.pid, signal.SIGKILL)
        return {"y": row.id}

    out = tmp_path / "out"
    sink: dict[str, str | int | bool] = {"kind": "parquet", "path": str(out)}
    # Nobody waits for a lease to run out: a grant whose answer was lost is given once more.
    policy = Policy(lease_ns=3600 * 10**9)
    options: dict[str, Any] = {"sink": sink, "file_rows": 400, "policy": policy}
    with serving(tmp_path / "data", 3000, **options) as service:
        states: list[list[str]] = []
        thread = threading.Thread(
            target=lambda: states.append(work_many(service, fn, 2, concurrency=3, flush_rows=20))
        )
        thread.start()
        # The driver asks all the time, and brings it back.
        assert service.wait_over().status == "finished"
        thread.join(30)
        assert states == [["over", "over"]]
        assert 1 <= service.keeper.restarts <= 2
        assert verify(service.store, service.run_id)
        # Grants outlive the service, so hardly anything is called again.
        assert sum(seen.values()) - 3000 <= 2 * 2 * (20 + 3)
    assert rows_of_output(out) == list(range(3000))


def test_pages_blocks_and_parts_may_be_cut_where_they_like(tmp_path: Path) -> None:
    size, out = 150_000, tmp_path / "out"

    def fn(table: pa.Table) -> pa.Table:
        ids = table.column("id")
        return pa.table({"y": ids, "_skip": pc.equal(pc.bit_wise_and(ids, 1023), 5)})

    sink: dict[str, str | int | bool] = {"kind": "parquet", "path": str(out)}
    policy = Policy(page_rows=6 * 10_000, batch_rows=10_000)
    options: dict[str, Any] = {"sink": sink, "policy": policy, "file_rows": 27_000}
    with serving(tmp_path / "data", size, blocks=11, **options) as service:
        assert work_many(service, fn, 2, batch_rows=10_000) == ["over", "over"]
        assert service.wait_over().status == "finished"
    assert rows_of_output(out) == [seq for seq in range(size) if seq & 1023 != 5]


def test_an_engine_stops_when_the_run_is_cancelled(tmp_path: Path) -> None:
    with serving(tmp_path / "data", 1000, policy=Policy(grace_ns=10**9)) as service:
        begun = threading.Event()
        cancelled = threading.Event()

        def fn(row: Any) -> Any:
            begun.set()
            cancelled.wait(30)
            return {"y": row.id}

        states: list[str] = []
        thread = threading.Thread(target=lambda: states.append(work(service, fn, flush_rows=3)))
        thread.start()
        assert begun.wait(30)
        service.keeper.ask(wire.Cancel())
        cancelled.set()
        thread.join(30)
        assert states == ["stop"]
        assert service.wait_over().status == "cancelled"
        done, _, failed, never = service.progress().ended
        assert (failed, done + never) == (0, 1000)
        assert 1 <= done <= 5


def test_a_call_that_hangs_is_told_from_a_slow_one(tmp_path: Path) -> None:
    stop = threading.Event()

    def fn(row: Any) -> Any:
        if row.id == 3:
            stop.wait(60)
        return {"y": row.id}

    policy = Policy(lease_ns=1_000_000_000)
    with serving(tmp_path / "data", 10, policy=policy) as service:
        with pytest.raises(HungCall, match="timeout_s"):
            work(service, fn, timeout_s=0.2)
        stop.set()
        # What ended beside it was told before.
        assert service.board().ledger.counts()[State.TERMINAL_SUCCESS] >= 3


# --- the process around it ----------------------------------------------------------------------


def exiting(row: Any) -> Any:
    sys.exit("no more")


def reading(row: Any) -> Any:
    """Programs that read their input would eat what the worker sends to the child."""
    told = subprocess.run(["cat"], capture_output=True, check=True, timeout=30).stdout
    print("what is printed is not taken for an answer", flush=True)
    os.write(1, b"nor is this\n")
    assert sys.stdin.read() == ""
    return {"y": len(told)}


def deadly(row: Any) -> Any:
    if row.id == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"y": 1}


@pytest.mark.parametrize("fn", [exiting, reading, deadly], ids=lambda fn: fn.__name__)
def test_whatever_a_function_does_to_its_process_every_row_ends(
    tmp_path: Path, fn: Callable[..., Any]
) -> None:
    with serving(tmp_path / "data", 12) as service:
        assert run_duty(duty(service), code.dump(fn, RETRY_ON)) == "over"
        service.wait_over()
        ended = {"exiting": [0, 0, 12, 0], "reading": [12, 0, 0, 0], "deadly": [11, 0, 1, 0]}
        assert service.progress().ended == ended[fn.__name__]


def test_a_function_that_does_not_load_fails_the_task_with_its_reason(tmp_path: Path) -> None:
    home = tmp_path / "modules"
    home.mkdir()
    (home / "not_there_later.py").write_text("def work(row):\n    return {'y': 1}\n")
    sys.path.insert(0, str(home))
    try:
        import not_there_later  # type: ignore[import-not-found]

        function = code.dump(not_there_later.work, RETRY_ON)
    finally:
        sys.path.remove(str(home))
        sys.modules.pop("not_there_later", None)
    (home / "not_there_later.py").unlink()
    with serving(tmp_path / "data", 5) as service:
        with pytest.raises(ChildFailed) as failed:
            run_duty(duty(service), function)
        assert failed.value.fields["code_of_cause"] == "not_loadable"
        assert "not_there_later" in failed.value.fields["why"]
        assert service.board().ledger.counts()[State.UNSEEN] == 5


def test_a_child_ends_with_the_worker_that_started_it() -> None:
    child = Child()
    pidfd = os.pidfd_open(child.pid)
    assert child._process.stdin is not None
    child._process.stdin.close()
    import select

    assert select.select([pidfd], [], [], 30)[0]
    os.close(pidfd)
    assert child.end() == 0


def test_rows_that_fail_with_long_words_are_told_without_harm(tmp_path: Path) -> None:
    """Their errors together are more than a value of the store may be."""

    def fn(row: Any) -> Any:
        raise ValueError("x" * 4000)

    with serving(tmp_path / "data", 8000) as service:
        assert work(service, fn) == "over"
        assert service.keeper.restarts == 0
        failed = service.outcomes().failed(0, 8000)
        assert failed.num_rows == 8000


def test_a_result_that_cannot_be_kept_fails_its_row_alone(tmp_path: Path) -> None:
    text = StructType([StructField("y", StringType())])

    def fn(row: Any) -> Any:
        return {"y": "x" * (20 << 20) if row.id == 3 else "x" * (3 << 20)}

    with serving(tmp_path / "data", 6) as service, pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_reports, "RESULT_BYTES_MAX", 19 << 20)
        told = duty(service, schema=text.json())
        caller = Caller(fn, RETRY_ON, Encoder(text), told.run_id, told.timeout_s)
        with Client(told.address, "child") as client:
            assert Engine(told, caller, client).run() == "over"
        [failed] = service.outcomes().failed(0, 6).to_pylist()
        assert (failed["_seq"], failed["_error_class"]) == (3, "schema")
        assert "a result of 20,97" in failed["_error"]
        assert len(raw_values.decode(failed["_raw"])["y"]) == 20 << 20


@pytest.mark.parametrize("batch_rows", [0, 4])
def test_a_result_larger_than_a_value_of_the_store_is_kept_in_parts(
    tmp_path: Path, batch_rows: int
) -> None:
    text = StructType([StructField("y", StringType())])

    def fn(row: Any) -> Any:
        return {"y": str(row.id) * (18 << 20)}

    def batch(table: pa.Table) -> Any:
        return pa.table({"y": [str(i) * (18 << 20) for i in table.column("id").to_pylist()]})

    made = charge(str(tmp_path / "data"), policy=Policy(batch_rows=batch_rows))
    record = msgspec.structs.replace(
        codec.unpack_as(runs.RunRecord, made.record),
        result_schema=schema_bytes(arrow_schema(text)),
    )
    made = msgspec.structs.replace(made, record=codec.pack(record))
    with serving(tmp_path / "data", 4, made=made) as service:
        told = duty(service, schema=text.json(), batch_rows=batch_rows)
        work = batch if batch_rows else fn
        caller = Caller(work, RETRY_ON, Encoder(text), told.run_id, told.timeout_s)
        with Client(told.address, "child") as client:
            assert Engine(told, caller, client).run() == "over"
        kept = service.outcomes().successes(0, 4).to_pylist()
        assert [row["id"] for row in kept] == [0, 1, 2, 3]
        assert all(row["y"] == str(row["id"]) * (18 << 20) for row in kept)
        service.wait_over()
        while service.store.transact(runs.delete, service.run_id, 1000):
            pass
        assert service.store.read(_keys_of_runs) == []


def _keys_of_runs(txn: Any) -> list[Any]:
    prefix = schema.prefix(schema.Space.RUN)
    return [key for key, _ in txn.scan(prefix, tuples.after(prefix), 1000)]


@pytest.mark.parametrize(("rate", "most"), [(True, 4), (False, 104)])
def test_under_a_rate_nothing_is_begun_that_cannot_start_now(
    tmp_path: Path, rate: bool, most: int
) -> None:
    with serving(tmp_path / "data", 10, rate_per_s=1000.0) as service:
        told = duty(service, rate=rate, concurrency=4, flush_rows=100)
        caller = Caller(lambda row: {"y": 1}, RETRY_ON, Encoder(SCHEMA), told.run_id, 60.0)
        with Client(told.address, "child") as client:
            engine = Engine(told, caller, client)
            engine._flush = 100
            assert engine._window() == most
            assert engine.run() == "over"


def test_after_deaths_the_window_is_small_and_opens_again(tmp_path: Path) -> None:
    with serving(tmp_path / "data", 20_000) as service:
        told = duty(service, deaths=3)
        caller = Caller(lambda row: {"y": 1}, RETRY_ON, Encoder(SCHEMA), told.run_id, 60.0)
        with Client(told.address, "child") as client:
            engine = Engine(told, caller, client)
            assert engine._window() == 2
            assert engine.run() == "over"
            assert engine._window() > 100


def test_an_orphan_ends_what_it_has_begun_and_begins_no_more(tmp_path: Path) -> None:
    orphaned = threading.Event()
    begun: list[int] = []

    def fn(row: Any) -> Any:
        begun.append(row.id)
        orphaned.set()
        return {"y": row.id}

    with serving(tmp_path / "data", 1000) as service:
        told = duty(service)
        caller = Caller(fn, RETRY_ON, Encoder(SCHEMA), told.run_id, 60.0)
        with Client(told.address, "child") as client:
            assert Engine(told, caller, client, orphaned).run() == "stop"
        succeeded = service.progress().ended[0]
        assert 0 < succeeded < 1000
        assert succeeded == len(begun), "what was called was told"
