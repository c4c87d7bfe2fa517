"""The child process that runs the user's function: `python -m holdfast.spark.child`.

A Spark Python worker starts one child and reuses it for later tasks. Standard input carries jobs, one
after another: a header and the pickled function. The original standard output carries the result of each
job. Output that the function prints goes to standard error, which executors log.

End of file on the input means that the worker has exited. Calls under way are already paid for, so they
may finish and be reported for at most `DRAIN_S`. No further call is begun. The ledger reclaims the rest
when the connection closes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from holdfast import traces
from holdfast.clock import SYSTEM
from holdfast.errors import HoldfastError
from holdfast.spark import function_pickle, ledger_protocol
from holdfast.spark.arrow_rows import ResultEncoder
from holdfast.spark.call_slots import CallSlots
from holdfast.spark.caller import FunctionCaller
from holdfast.spark.child_job import ChildJob, HungCall, ProbeRequest
from holdfast.spark.ledger_client import LedgerClient
from holdfast.spark.row_executor import RowExecutor
from holdfast.wire_frames import ConnectionEnded, FrameFormat, read_frame

# Exit status of a child with a hung call that it cannot stop.
EXIT_HUNG_CALL = 75
DRAIN_S = 2.0
# Jobs: a header and the function. Results: one part.
JOB_FRAMES = FrameFormat("<II", ledger_protocol.FRAME_BYTES_MAX)
RESULT_FRAMES = FrameFormat("<I", ledger_protocol.FRAME_BYTES_MAX)


class ChildResult(msgspec.Struct, frozen=True):
    """The result of a job: over, stop, timed_out, or a set-up error; and the number of exchanges."""

    state: str
    steps: int
    error: str = ""
    code: str = ""
    # The same error in wire form.
    wire_error: list[Any] = []
    # Rows with a call that timed out. The process exits, and its successor reports them.
    timed_out: list[int] = []
    # Totals of the finished calls.
    calls: int = 0
    cost: float = 0.0

    @classmethod
    def failed(cls, error: HoldfastError, steps: int = 0) -> ChildResult:
        return cls(
            "failed", steps, str(error), error.code, ledger_protocol.error_reply(error).error
        )


def main() -> None:
    # Spark signals the whole process group of its workers. Only end of file on the pipe counts
    # here.
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # Move the pipes away from descriptors 0 and 1, which `print`, `input` and subprocesses use.
    answers, source = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    slots = CallSlots(os.fdopen(int(sys.argv[1]), "r+b")) if len(sys.argv) > 1 else CallSlots()
    jobs: queue.SimpleQueue[tuple[bytes, bytes] | None] = queue.SimpleQueue()
    orphaned = threading.Event()
    threading.Thread(target=_read_jobs, args=(source, jobs, orphaned), daemon=True).start()
    while (message := jobs.get()) is not None:
        header, function = message
        result = _run_job(msgspec.msgpack.decode(header, type=ChildJob), function, orphaned, slots)
        if orphaned.is_set():
            os._exit(0)
        answers.write(RESULT_FRAMES.encode(msgspec.msgpack.encode(result)))
        answers.flush()
        if result.state == "timed_out":
            os._exit(EXIT_HUNG_CALL)


def _run_job(
    job: ChildJob, function: bytes, orphaned: threading.Event, slots: CallSlots
) -> ChildResult:
    function_pickle.extend_module_path(job.paths)
    try:
        fn, retry_on, tokens = function_pickle.load_function(function)
    except function_pickle.NotLoadable as error:
        return ChildResult.failed(error)
    if job.probe is not None:
        return _run_probe(job, job.probe, fn)
    from pyspark.sql.types import StructType  # after the imports of the function

    _freeze_modules()

    encoder = ResultEncoder(StructType.fromJson(msgspec.json.decode(job.schema)))
    caller = FunctionCaller(fn, retry_on, encoder, job.run_id, job.timeout_s)
    with LedgerClient(job.address, "child") as client:
        client.owner = job.owner or client.owner
        executor = RowExecutor(job, caller, client, orphaned, slots, tokens)
        try:
            state = executor.run()
            return ChildResult(
                state, executor.exchanges, calls=executor.metrics.calls, cost=executor.metrics.cost
            )
        except HungCall as hung:
            print(f"holdfast: {hung}; leaving", file=sys.stderr, flush=True)
            return _announce_successor(client, hung, executor)
        except HoldfastError as error:
            return ChildResult.failed(error, executor.exchanges)
        finally:
            if job.traced.context:
                traces.flush()


@functools.cache
def _freeze_modules() -> None:
    """Exempt loaded modules from garbage collection, once, before the first row. Modules are most
    objects of this process: scanning them would take half the time of a short call.
    """
    gc.freeze()


def _run_probe(job: ChildJob, probe: ProbeRequest, fn: Callable[..., Any]) -> ChildResult:
    from holdfast.spark.executor_probe import probe_in_child  # once a run

    try:
        probe_in_child(job, probe, fn)
    except HoldfastError as error:
        return ChildResult.failed(error)
    return ChildResult("probed", 0)


def _announce_successor(client: LedgerClient, hung: HungCall, executor: RowExecutor) -> ChildResult:
    """Announce the hand-over of the grants to the successor of this process. Without it the ledger
    would reclaim them.
    """
    try:
        client.request(ledger_protocol.AnnounceHandover(client.owner))
    except HoldfastError as error:
        return ChildResult.failed(error, executor.exchanges)
    return ChildResult(
        "timed_out",
        executor.exchanges,
        timed_out=hung.seqs,
        calls=executor.metrics.calls,
        cost=executor.metrics.cost,
    )


def _read_jobs(
    source: BinaryIO,
    jobs: queue.SimpleQueue[tuple[bytes, bytes] | None],
    orphaned: threading.Event,
) -> None:
    try:
        with contextlib.suppress(ConnectionEnded):
            while (job := read_frame(source, JOB_FRAMES)) is not None:
                jobs.put((job[0], job[1]))
        orphaned.set()
        jobs.put(None)
        SYSTEM.sleep(DRAIN_S)
    finally:
        os._exit(0)


def encode_job(job: ChildJob, function: bytes) -> bytes:
    return JOB_FRAMES.encode(msgspec.msgpack.encode(job), function)


if __name__ == "__main__":
    main()
