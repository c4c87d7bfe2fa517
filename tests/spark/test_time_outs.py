"""Calls that are silent for too long, or hold the GIL: what ends, what goes on, and what is said of it."""

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

from holdfast.ledger.classes import ErrorClass, Policy
from holdfast.spark import code, wire
from holdfast.spark.call_slots import CallSlots, Silence, row_of, seq_of
from holdfast.spark.caller import Caller
from holdfast.spark.client import Blocks, Client
from holdfast.spark.engine import Duty, Engine
from holdfast.spark.journal import schema_bytes
from holdfast.spark.rows import Encoder, stream_of
from holdfast.spark.task import run_duty
from tests.spark.service_rig import Serving, end_children, serving

pytestmark = pytest.mark.timeout(120)

S = 1_000_000_000
SCHEMA = StructType([StructField("y", LongType())])
RETRY_ON = (TimeoutError,)


@pytest.fixture(scope="module", autouse=True)
def _no_child_is_left() -> Iterator[None]:
    yield
    end_children()


def duty(service: Serving, **options: Any) -> Duty:
    made: dict[str, Any] = {
        "address": service.keeper.address, "run_id": service.run_id, "lo": 0, "hi": -1,
        "schema": SCHEMA.json(), "concurrency": 1, "flush_rows": 100, "batch_rows": 0, "rate": False,
        "timeout_s": 60.0, **options,
    }  # fmt: skip
    return Duty(**made)


def work(service: Serving, fn: Callable[..., Any], **options: Any) -> str:
    told = duty(service, **options)
    caller = Caller(fn, RETRY_ON, Encoder(SCHEMA), told.run_id, told.timeout_s)
    with Client(told.address, "child") as client:
        return Engine(told, caller, client).run()


def in_children(service: Serving, fn: Callable[..., Any], **options: Any) -> None:
    assert run_duty(duty(service, **options), code.dump(fn, RETRY_ON)) == "over"
    service.wait_over()


def tries(service: Serving, rows: int) -> dict[int, int]:
    return {row["_seq"]: row["_attempts"] for row in service.outcomes().all(0, rows).to_pylist()}


def once(path: str) -> bool:
    """True for the first that asks, in whatever process."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def hold_the_gil(seconds: float) -> None:
    """Sleep as a C extension does that never lets go of the interpreter."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


# --- progress -------------------------------------------------------------------------------------


def test_progress_bounds_silence_and_not_length(tmp_path: Path) -> None:
    never = threading.Event()

    def fn(row: Any, call: Any) -> Any:
        for _ in range(6):
            never.wait(0.2)
            call.progress()
        return {"y": row.id}

    with serving(tmp_path / "data", 2) as service:
        assert work(service, fn, timeout_s=0.8, concurrency=2) == "over"
        assert tries(service, 2) == {0: 1, 1: 1}


def test_progress_of_an_async_call_moves_its_time_out(tmp_path: Path) -> None:
    import asyncio

    async def fn(row: Any, call: Any) -> Any:
        for _ in range(6):
            await asyncio.sleep(0.2)
            if row.id:
                call.progress()
            else:
                # From another thread, as a callback of a client would.
                await asyncio.to_thread(call.progress)
        return {"y": row.id}

    async def silent(row: Any) -> Any:
        await asyncio.sleep(30)

    with serving(tmp_path / "data", 2) as service:
        assert work(service, fn, timeout_s=0.8, concurrency=2) == "over"
        assert tries(service, 2) == {0: 1, 1: 1}
    policy = Policy(attempts_max=1)
    with serving(tmp_path / "other", 1, policy=policy) as service:
        assert work(service, silent, timeout_s=0.2) == "over"
        [failed] = service.outcomes().failed(0, 1).to_pylist()
        assert failed["_error_class"] == "transient"
        assert failed["_error"].startswith("TimeoutError: timed out")


def test_progress_of_a_call_that_has_ended_moves_nothing() -> None:
    slots = CallSlots()
    [watch] = slots.watches(1)
    silence = Silence(slots)
    watch.begin(3, 1)
    silence.look(0)
    watch.progress(2, 1)
    silence.look(10)
    assert silence.beyond(9, 10) == {watch.place: row_of(3, 1)}
    watch.progress(3, 1)
    silence.look(20)
    assert silence.beyond(9, 29) == {}
    assert [seq_of(row) for row in silence.beyond(9, 30).values()] == [3]
    watch.end()
    silence.look(40)
    assert not silence.at_work


# --- out of time ----------------------------------------------------------------------------------


def hanging(path: str, how: Callable[[], Any]) -> Callable[..., Any]:
    """Row 3 hangs at its first try; the others are as quick as can be."""
    mark = f"{path}/hung"

    def fn(row: Any) -> Any:
        if row.id == 3 and once(mark):
            how()
        return {"y": row.id}

    return fn


def blocking(path: str, how: Callable[[], Any]) -> Callable[..., Any]:
    fn = hanging(path, how)

    async def later(row: Any) -> Any:
        return fn(row)

    return later


HANGS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "def": (hanging, lambda: time.sleep(600)),
    "async def that blocks its loop": (blocking, lambda: time.sleep(600)),
    "def that holds the GIL": (hanging, lambda: hold_the_gil(600)),
}


@pytest.mark.parametrize(
    "batch_rows", [0, pytest.param(4, marks=pytest.mark.deep)], ids=["rows", "batches"]
)
@pytest.mark.parametrize("kind", HANGS)
def test_a_call_out_of_time_fails_alone_and_costs_its_neighbours_nothing(
    tmp_path: Path, kind: str, batch_rows: int
) -> None:
    make, how = HANGS[kind]
    fn = make(str(tmp_path), how)
    if batch_rows:
        if kind.startswith("async"):
            fn = batched_async(fn)
        else:
            fn = batched(fn)
    policy = Policy(
        lease_ns=5 * S, batch_rows=batch_rows, page_rows=32, backoff_first_ns=0, backoff_max_ns=0
    )
    with serving(tmp_path / "data", 32, policy=policy) as service:
        in_children(
            service, fn, timeout_s=2.0, lease_s=5.0, batch_rows=batch_rows,
            concurrency=1 if "GIL" in kind else 2,
        )  # fmt: skip
        late = {3} if not batch_rows else {0, 1, 2, 3}
        assert tries(service, 32) == {seq: 2 if seq in late else 1 for seq in range(32)}
        progress = service.progress()
        assert progress.reclaims == 0
        [group] = progress.errors
        assert group.error_class == ErrorClass.TRANSIENT
        assert group.text.startswith(
            "TimeoutError: timed out: no end and no progress for timeout_s="
        )


def batched(fn: Callable[..., Any]) -> Callable[..., Any]:
    def work(table: pa.Table) -> Any:
        return pa.table({"y": [fn(Row(one))["y"] for one in table.column("id").to_pylist()]})

    return work


def batched_async(fn: Callable[..., Any]) -> Callable[..., Any]:
    async def work(table: pa.Table) -> Any:
        ys = [(await fn(Row(one)))["y"] for one in table.column("id").to_pylist()]
        return pa.table({"y": ys})

    return work


class Row:
    def __init__(self, number: int) -> None:
        self.id = number


def test_a_call_that_holds_the_gil_keeps_its_lease(tmp_path: Path) -> None:
    fn = hanging(str(tmp_path), lambda: hold_the_gil(4))
    with serving(tmp_path / "data", 8, policy=Policy(lease_ns=S)) as service:
        in_children(service, fn, timeout_s=60.0, lease_s=1.0)
        assert set(tries(service, 8).values()) == {1}
        assert service.progress().reclaims == 0


def test_a_call_that_is_out_of_time_at_every_try_says_so(tmp_path: Path) -> None:
    def fn(row: Any) -> Any:
        if row.id == 1:
            time.sleep(600)
        return {"y": row.id}

    policy = Policy(attempts_max=2, lease_ns=2 * S, backoff_first_ns=0, backoff_max_ns=0)
    with serving(tmp_path / "data", 4, policy=policy) as service:
        in_children(service, fn, timeout_s=0.3, lease_s=2.0)
        [failed] = service.outcomes().failed(0, 4).to_pylist()
        assert (failed["_seq"], failed["_attempts"]) == (1, 2)
        assert (
            failed["_error"] == "TimeoutError: timed out: no end and no progress for timeout_s=0.3"
        )


def test_a_successor_that_does_not_come_loses_the_grant_when_its_lease_ends(tmp_path: Path) -> None:
    with serving(tmp_path / "data", 4, policy=Policy(lease_ns=S)) as service:
        line = service.line("child/a")
        grants = line.take(4)
        service.keeper.ask(wire.HandOver("child/a"))
        line.close()
        other = service.line("child/b")
        # Not while the lease lasts, and then as of any child that is lost.
        again = other.claim(4, wait_ms=5000)
        assert again.alone
        assert set(again.attempts) == {2}
        assert service.progress().reclaims == len(grants)


def test_a_successor_is_given_what_is_left_and_goes_on_with_its_numbers(tmp_path: Path) -> None:
    with serving(tmp_path / "data", 8) as service:
        first = service.line("child/a")
        grant = first.claim(8, begin=3)
        rows = grant.seqs
        first.report(grant, done=[(rows[0], rows[0] + 1)])
        service.keeper.ask(wire.HandOver("child/a"))
        first.close()
        second = service.line("child/a")
        answer = second.ask(wire.Inherit([]))
        heir = second.granted(answer)
        assert (heir.epoch, answer.grant.n, heir.begun) == (grant.epoch, 1, 2)
        assert heir.seqs == rows[1:]
        assert set(heir.attempts) == {1}
        assert second.ask(wire.Inherit([heir.epoch])).grant is None
        heir.n = answer.grant.n
        second.report(heir, done=[(rows[1], rows[1] + 2)])
        assert service.progress().reclaims == 0


# --- rows that cannot be converted ----------------------------------------------------------------


def test_a_row_that_cannot_be_converted_fails_alone_with_its_cause(tmp_path: Path) -> None:
    far = pa.array([0, 1 << 60, 2], pa.int64()).cast(pa.timestamp("us"))
    table = pa.table({"id": pa.array([0, 1, 2], pa.int64()), "at": far})
    seen: list[Any] = []

    def fn(row: Any) -> Any:
        seen.append(row.at)
        return {"y": row.id}

    with serving(tmp_path / "data") as service:
        line = Blocks(service.keeper.address)()
        block = line.put_block(stream_of(table))
        line.close()
        sealed = wire.Seal([(block, 3)], False, [], schema_bytes(table.schema), "hash", "plan")
        service.keeper.ask(sealed)
        assert work(service, fn) == "over"
        [failed] = service.outcomes().failed(0, 3).to_pylist()
        assert (failed["_seq"], failed["_error_class"], failed["_attempts"]) == (1, "input", 1)
        assert failed["_error"].startswith("its input cannot be converted: ")
        assert seen == [dt.datetime(1970, 1, 1), dt.datetime(1970, 1, 1, 0, 0, 0, 2)]
        service.wait_over()
        assert service.progress().calls == 2
