"""The Spark task bodies: they run in Spark's Python worker, supervise a child process and yield
rows.

User code runs only in the child, so a row that kills its interpreter costs a child, not the Spark task or
the job, in `local[2]` and on a cluster. When a child dies, the service reclaims its rows and another child
continues. After a call timeout the successor inherits the rows instead, in the same attempt. Repeated
deaths without a single report indicate a broken set-up: then the task fails with the child's error.

The idle child outlives the task: Spark reuses its workers, and the next task gets a started interpreter.
The child exits with the worker.
"""

from __future__ import annotations

import os
import re
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pyspark

from holdfast.child_process import ChildPool, SpawnedChild
from holdfast.clock import SYSTEM
from holdfast.errors import Invalid, StoreError
from holdfast.spark import ledger_protocol
from holdfast.spark.arrow_rows import decode_table
from holdfast.spark.call_slots import CallSlots
from holdfast.spark.child import RESULT_FRAMES, ChildResult, encode_job
from holdfast.spark.child_job import ChildJob
from holdfast.spark.child_watchdog import ChildWatchdog
from holdfast.spark.errors import RowsFailed, RunCancelled, RunStopped
from holdfast.spark.ledger_client import LedgerClient
from holdfast.spark.write_access import WriteAccess
from holdfast.wire_frames import read_frame

# Maximum number of consecutive deaths without a report: then no single row is the cause.
STUCK_DEATHS_MAX = 5
FETCH_ROWS = 65_536
_SPARK_ARCHIVE = re.compile(r"/(pyspark|py4j-[^/]*-src)\.zip$")
_VERSION = re.compile(r"""__version__[^=]*=\s*["']([^"']+)""")


class ChildFailed(StoreError):
    code = "child_failed"
    hint = "see the executor's log for the output of the child process"


class FunctionChild(SpawnedChild):
    """A child that runs the user's function, with the slots that show its calls."""

    def __init__(self) -> None:
        self.slots = CallSlots.shared()
        assert self.slots.file is not None
        handle = self.slots.file.fileno()
        super().__init__(
            [sys.executable, "-m", "holdfast.spark.child", str(handle)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": _child_python_path()},
            pass_fds=(handle,),
        )

    def run_job(self, job: ChildJob, function: bytes) -> ChildResult | None:
        """Run a job. Return its result; None if the child died."""
        try:
            self.stdin.write(encode_job(job, function))
            self.stdin.flush()
            with ChildWatchdog(job, self.slots, self.pid) as watchdog:
                while not select.select([self.stdout], [], [], watchdog.interval_s)[0]:
                    late = watchdog.check()
                    if late:
                        return ChildResult("timed_out", 0, timed_out=late)
            frame = read_frame(self.stdout, RESULT_FRAMES)
            return None if frame is None else msgspec.msgpack.decode(frame[0], type=ChildResult)
        except (OSError, Invalid, msgspec.MsgspecError):
            return None

    def discard(self) -> None:
        self.end()

    def end(self, timeout_s: float = 0.0) -> int:
        code = super().end(timeout_s)
        if self.slots.file is not None:
            self.slots.file.close()
        return code


def _child_python_path() -> str:
    """Return PYTHONPATH without the archives of Spark if the same PySpark and Py4J are installed. A process compiles
    all modules that it imports from an archive, which takes half a second.
    """
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # The directory `python` of a Spark distribution has PySpark, but Py4J only as an archive.
    is_installed = any(
        _installed_version(directory) == pyspark.__version__ and Path(directory, "py4j").is_dir()
        for directory in sys.path
        if not directory.endswith(".zip")
    )
    return os.pathsep.join(
        path for path in paths if not (is_installed and _SPARK_ARCHIVE.search(path))
    )


def _installed_version(directory: str) -> str:
    """Return the version of the PySpark that is installed in a directory; empty if there is none."""
    try:
        found = _VERSION.search(Path(directory, "pyspark", "version.py").read_text())
    except OSError:
        return ""
    return found[1] if found else ""


# The oldest first: a child that was started just now still loads its modules.
children = ChildPool(FunctionChild)


def new_owner() -> str:
    """Return a new owner name at the ledger, for a child and its successors."""
    return f"child/{socket.gethostname()[:60]}/{os.getpid()}/{SYSTEM.entropy(6).hex()}"


class TaskCallTotals:
    """Call totals of the children of a task. A child that dies reports none."""

    def __init__(self) -> None:
        self.calls = 0
        self.cost = 0.0

    def add(self, result: ChildResult | None) -> None:
        if result is not None:
            self.calls += result.calls
            self.cost += result.cost


def run_child_job(job: ChildJob, function: bytes, totals: TaskCallTotals | None = None) -> str:
    """Run a job in children until its rows are done. Return over, stop or turn."""
    totals = totals or TaskCallTotals()
    deaths = stuck_deaths = 0
    last_position = b""
    job = msgspec.structs.replace(job, paths=[path for path in sys.path if path])
    timed_out: list[int] | None = None
    while True:
        child = children.take()
        if timed_out is None:
            job = msgspec.structs.replace(job, owner=new_owner())
        result = child.run_job(
            msgspec.structs.replace(job, deaths=deaths, timed_out=timed_out), function
        )
        totals.add(result)
        if result is not None and result.state not in ("failed", "timed_out"):
            children.put(child)
            return result.state
        status = child.end()
        if result is not None and result.state == "timed_out":
            # The successor has the same name and continues its rows.
            timed_out = result.timed_out
            children.prestart(2)
            continue
        timed_out = None
        if result is not None:
            raise ChildFailed(code_of_cause=result.code, why=result.error)
        deaths += 1
        # The next child may die the same way: prestart its successor.
        children.prestart(2)
        position = _ledger_position(job)
        stuck_deaths = stuck_deaths + 1 if position == last_position else 0
        last_position = position
        if stuck_deaths >= STUCK_DEATHS_MAX:
            raise ChildFailed(
                why="child processes died repeatedly before they began a row", exit_status=status
            )
        print(f"holdfast: a child ended with {status}, starting another", file=sys.stderr)


def _ledger_position(job: ChildJob) -> bytes:
    """Return a value that changes with every progress of the ledger."""
    with LedgerClient(job.address, "task") as client:
        answer, _ = client.request(ledger_protocol.GetRunStatus())
        return bytes(answer.position)


class PullRows(msgspec.Struct, frozen=True):
    """The body of a `run` job: every task pulls rows until the ledger has none left."""

    job: ChildJob
    function: bytes
    # Rows that need no call at the start of the job. The first task counts them.
    reused: int = 0
    # Set if tasks also write the files of the output.
    writes: WriteAccess | None = None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # Run before reading the input. The input only contains the partition number, and its one
        # small batch may arrive 40 ms late: the sender waits for a delayed TCP acknowledgement.
        totals = TaskCallTotals()
        state = self._run(totals)
        for part in (part for batch in batches for part in batch.column(0).to_pylist()):
            yield pa.RecordBatch.from_pydict(
                {
                    "part": [part],
                    "state": [state],
                    "calls": [totals.calls],
                    "cost": [totals.cost],
                    "reused": [0 if part else self.reused],
                }
            )

    def _run(self, totals: TaskCallTotals) -> str:
        if self.writes is None:
            return run_child_job(self.job, self.function, totals)
        from holdfast.spark.part_writer import (
            PartWriterThread,  # needed with a spool and an output only
        )

        with PartWriterThread(self.job.address, self.writes) as writer:
            if not writer.can_write:
                return "stop"
            state = run_child_job(self.job, self.function, totals)
            writer.finish(all_rows=state == "over")
            return state


class FixedRanges(msgspec.Struct, frozen=True):
    """The body of the lazy form: a task covers fixed rows, runs the unfinished ones and yields the
    results.
    """

    job: ChildJob
    function: bytes
    ranges: list[tuple[int, int]]
    schema: bytes
    meta: bool
    # A failed row fails the task, which would otherwise omit it.
    strict: bool

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        parts = [part for batch in batches for part in batch.column(0).to_pylist()]
        schema = pa.ipc.read_schema(pa.py_buffer(self.schema))
        for part in parts:
            lo, hi = self.ranges[part]
            job = msgspec.structs.replace(self.job, lo=lo, hi=hi)
            run_child_job(job, self.function)
            with LedgerClient(job.address, "task") as client:
                yield from self._fetch(client, lo, hi, schema)

    def _fetch(
        self, client: LedgerClient, lo: int, hi: int, schema: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        rows = FETCH_ROWS
        while lo < hi:
            upto = min(lo + rows, hi)
            answer, data = client.request(ledger_protocol.FetchOutcomes(lo, upto, self.meta))
            if answer.cancelled:
                raise RunCancelled(run_id=self.job.run_id)
            if answer.bundled:
                from holdfast.spark.outcome_bundles import read_bundle  # needed with a spool only

                table, failed, example = read_bundle(data, self.job.spool, meta=self.meta)
                answer = msgspec.structs.replace(answer, failed=failed, example=example)
            elif answer.ready and not answer.large:
                table = decode_table(data)
            has_failed = self.strict and answer.failed
            if answer.stopped and (has_failed or not answer.ready):
                raise RunStopped(run_id=self.job.run_id, why=answer.stopped)
            if has_failed:
                raise RowsFailed(failed=answer.failed, example=answer.example)
            if not answer.ready:
                raise ChildFailed(why="rows of this task are not finished", lo=lo, hi=hi)
            if answer.large:
                rows = max((upto - lo) // 2, 1)
                continue
            yield from table.cast(schema).to_batches()
            lo = upto
