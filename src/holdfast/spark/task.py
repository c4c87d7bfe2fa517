"""What runs in Spark's Python worker: it keeps a child at work, and yields what is asked for.

User code runs in the child alone, so a row that kills its interpreter costs a child, not the Spark
task and not the job, in `local[2]` as on a cluster. When a child dies its rows are reclaimed by the
service and another child goes on, except those of one that ended for the time-out of a call: its
successor takes them over, in the same attempt. One that dies again and again without a single report is a
fault of the set-up, and the task fails with what it said.

The idle child outlives the task: Spark reuses its workers, and the next task finds the interpreter
warm. It dies with the worker.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pyarrow as pa

from holdfast.clock import SYSTEM
from holdfast.errors import StoreError
from holdfast.spark import wire
from holdfast.spark.call_slots import CallSlots
from holdfast.spark.child import Verdict, frame
from holdfast.spark.child_guard import ChildGuard
from holdfast.spark.client import Client
from holdfast.spark.engine import Duty
from holdfast.spark.errors import RowsFailed, RunCancelled, RunStopped
from holdfast.spark.rows import table_of
from holdfast.spark.write_access import WriteAccess

# Deaths in a row of children that reported nothing: then it is not a row's fault.
BARREN_DEATHS_MAX = 5
FETCH_ROWS = 65_536

_idle: list[Child] = []


class ChildFailed(StoreError):
    code = "child_failed"
    hint = "see the executor's log for what the child process wrote"


class Child:
    def __init__(self) -> None:
        self.slots = CallSlots.shared()
        assert self.slots.file is not None
        handle = self.slots.file.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.spark.child", str(handle)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            pass_fds=(handle,),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def do(self, duty: Duty, function: bytes) -> Verdict | None:
        """How the duty ended; None when the child died over it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(frame(duty, function))
            self._process.stdin.flush()
            with ChildGuard(duty, self.slots, self.pid) as guard:
                while not select.select([self._process.stdout], [], [], guard.every_s)[0]:
                    late = guard.look()
                    if late:
                        return Verdict("timed_out", 0, timed_out=late)
            size = self._process.stdout.read(4)
            if len(size) < 4:
                return None
            data = self._process.stdout.read(*struct.unpack("<I", size))
            return msgspec.msgpack.decode(data, type=Verdict)
        except (OSError, msgspec.MsgspecError):
            return None

    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> int:
        """Make sure that it is gone; its exit code, negative for a signal."""
        with contextlib.suppress(OSError):
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout, self.slots.file):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        return self._process.wait()


def warm(count: int = 1) -> None:
    """Have children ready: called while the input is read, so that no task waits for one."""
    while len(_idle) < count:
        _idle.append(Child())


def take_child() -> Child:
    while _idle:
        child = _idle.pop(0)
        if child.alive():
            return child
        child.end()
    return Child()


def give_back(child: Child) -> None:
    """Keep a child that is idle again for the next task."""
    _idle.append(child)


def new_owner() -> str:
    """A name for a child and its successors, at the ledger."""
    return f"child/{socket.gethostname()[:60]}/{os.getpid()}/{SYSTEM.entropy(6).hex()}"


class Tally:
    """What the children of a task say of their calls. A child that dies says nothing."""

    def __init__(self) -> None:
        self.calls = 0
        self.cost = 0.0

    def add(self, verdict: Verdict | None) -> None:
        if verdict is not None:
            self.calls += verdict.calls
            self.cost += verdict.cost


def run_duty(duty: Duty, function: bytes, tally: Tally | None = None) -> str:
    """Keep a child at it until the rows of the duty are done; over, stop or turn."""
    tally = tally or Tally()
    deaths = barren = 0
    before = b""
    duty = msgspec.structs.replace(duty, paths=[path for path in sys.path if path])
    timed_out: list[int] | None = None
    while True:
        child = take_child()
        if timed_out is None:
            duty = msgspec.structs.replace(duty, owner=new_owner())
        verdict = child.do(
            msgspec.structs.replace(duty, deaths=deaths, timed_out=timed_out), function
        )
        tally.add(verdict)
        if verdict is not None and verdict.state not in ("failed", "timed_out"):
            give_back(child)
            return verdict.state
        status = child.end()
        if verdict is not None and verdict.state == "timed_out":
            # Its successor has its name, and goes on with its rows.
            timed_out = verdict.timed_out
            warm(2)
            continue
        timed_out = None
        if verdict is not None:
            raise ChildFailed(code_of_cause=verdict.code, why=verdict.error)
        deaths += 1
        # The next one may go the same way: its successor starts up meanwhile.
        warm(2)
        now = _position(duty)
        barren = barren + 1 if now == before else 0
        before = now
        if barren >= BARREN_DEATHS_MAX:
            raise ChildFailed(why="children die before they begin a row", exit_status=status)
        print(f"holdfast: a child ended with {status}, starting another", file=sys.stderr)


def _position(duty: Duty) -> bytes:
    """Something that changes whenever the ledger moves."""
    with Client(duty.address, "task") as client:
        answer, _ = client.ask(wire.Status())
        return bytes(answer.position)


class Pull(msgspec.Struct, frozen=True):
    """The body of a `run` job: every task pulls rows until the ledger has none left."""

    duty: Duty
    function: bytes
    # Rows of the run that need no call, when the job begins: the first task counts them.
    reused: int = 0
    # Tasks write the files of the output, too.
    writes: WriteAccess | None = None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # Before the input is read. It says only which part this is, and its one small batch may come 40 ms
        # late: Spark's end of the socket waits for an acknowledgement that this end delays.
        tally = Tally()
        state = self._work(tally)
        for part in (part for batch in batches for part in batch.column(0).to_pylist()):
            yield pa.RecordBatch.from_pydict(
                {
                    "part": [part],
                    "state": [state],
                    "calls": [tally.calls],
                    "cost": [tally.cost],
                    "reused": [0 if part else self.reused],
                }
            )

    def _work(self, tally: Tally) -> str:
        if self.writes is None:
            return run_duty(self.duty, self.function, tally)
        from holdfast.spark.part_writer import PartWriter  # of runs with a spool and an output

        with PartWriter(self.duty.address, self.writes) as writer:
            if not writer.fit:
                return "stop"
            state = run_duty(self.duty, self.function, tally)
            writer.finish(all_rows=state == "over")
            return state


class Ranges(msgspec.Struct, frozen=True):
    """The body of the lazy form: a task covers fixed rows, works what is left, yields the results."""

    duty: Duty
    function: bytes
    ranges: list[tuple[int, int]]
    schema: bytes
    meta: bool
    # A row that failed fails the task that would leave it out.
    strict: bool

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        parts = [part for batch in batches for part in batch.column(0).to_pylist()]
        schema = pa.ipc.read_schema(pa.py_buffer(self.schema))
        for part in parts:
            lo, hi = self.ranges[part]
            duty = msgspec.structs.replace(self.duty, lo=lo, hi=hi)
            run_duty(duty, self.function)
            with Client(duty.address, "task") as client:
                yield from self._fetch(client, lo, hi, schema)

    def _fetch(
        self, client: Client, lo: int, hi: int, schema: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        rows = FETCH_ROWS
        while lo < hi:
            upto = min(lo + rows, hi)
            answer, data = client.ask(wire.Outcomes(lo, upto, self.meta))
            if answer.cancelled:
                raise RunCancelled(run_id=self.duty.run_id)
            if answer.bundled:
                from holdfast.spark.outcome_rows import read_lazily  # of runs with a spool alone

                table, failed, example = read_lazily(data, self.duty.spool, meta=self.meta)
                answer = msgspec.structs.replace(answer, failed=failed, example=example)
            elif answer.ready and not answer.large:
                table = table_of(data)
            missed = self.strict and answer.failed
            if answer.stopped and (missed or not answer.ready):
                raise RunStopped(run_id=self.duty.run_id, why=answer.stopped)
            if missed:
                raise RowsFailed(failed=answer.failed, example=answer.example)
            if not answer.ready:
                raise ChildFailed(why="rows of this task are not finished", lo=lo, hi=hi)
            if answer.large:
                rows = max((upto - lo) // 2, 1)
                continue
            yield from table.cast(schema).to_batches()
            lo = upto
