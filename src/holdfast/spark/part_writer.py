"""The part writer thread of Spark's Python worker: it writes part files while the child makes
calls.

The thread requests rows from the ledger service (`TakePart`), reads their outcomes from the spool, writes
the part files into the output and reports them. It runs no user code. Part boundaries depend only on the
rows (`part_cuts`), so any executor may write a part, or two of them.

Before the first call of its task the thread checks that this executor can write to the output.
"""

from __future__ import annotations

import sys
import threading
from types import TracebackType

import msgspec

from holdfast import codec, failpoints
from holdfast.clock import SYSTEM
from holdfast.errors import HoldfastError
from holdfast.spark import ledger_protocol
from holdfast.spark.ledger_client import LedgerClient, ServiceAddress, ServiceLost
from holdfast.spark.outcome_bundles import open_bundle
from holdfast.spark.output_parts import parts_between
from holdfast.spark.sinks import ExecutorSink, OutputError, Part, WrittenPart, open_sink
from holdfast.spark.sinks.object_store import keep_options
from holdfast.spark.write_access import WriteAccess

# How long the end of a task waits for the thread, which may be in a request.
THREAD_JOIN_S = 5.0
# Delay after a retryable error, and how long the first check is retried.
RETRY_DELAY_S = 1.0
CHECK_RETRY_NS = 300_000_000_000


class PartWriterThread:
    """`finish` waits until the output is written, or until this executor has no interval."""

    def __init__(self, address: ServiceAddress, access: WriteAccess) -> None:
        for url, options in access.options.items():
            keep_options(url, options)
        self._client = LedgerClient(address, "writer")
        self._stopping = threading.Event()
        self._stop_when_idle = False
        self._checked = threading.Event()
        # Whether this executor can write to the output.
        self.can_write = True
        self._thread = threading.Thread(target=self._run, name="part-writer", daemon=True)

    def __enter__(self) -> PartWriterThread:
        """Start the thread and wait for its check of the output."""
        self._thread.start()
        self._checked.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        self._client.close()
        self._thread.join(THREAD_JOIN_S)

    def finish(self, *, all_rows: bool) -> None:
        """Wait for the thread. With `all_rows`, until no rows are left to write; else until the
        service has none for this executor.
        """
        self._stop_when_idle = not all_rows
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    work, data = self._client.request(ledger_protocol.RequestPart())
                except ServiceLost:
                    return  # service or task has ended: another job continues
                except HoldfastError:
                    self._stopping.wait(RETRY_DELAY_S)
                    continue
                if not self._checked.is_set():
                    self._check_output(work)
                if work.state == "write":
                    self._write_parts(work, data)
                elif work.state == "over" or self._stop_when_idle:
                    return
                else:
                    self._stopping.wait(work.wait_ms / 1000)
        except HoldfastError as error:
            print(f"holdfast: this task writes no more of the output: {error}", file=sys.stderr)
        finally:
            self._checked.set()

    def _check_output(self, work: ledger_protocol.PartAssignment) -> None:
        """Check once that this executor can write to the output. Retry temporary errors."""
        if not work.sink:
            return
        until_ns = SYSTEM.mono_ns() + CHECK_RETRY_NS
        while not self._stopping.is_set():
            try:
                check_output(work)
                break
            except Exception as raised:
                error = _as_holdfast_error(raised)
                if error.retryable and SYSTEM.mono_ns() < until_ns:
                    self._stopping.wait(RETRY_DELAY_S)
                    continue
                # No call was made here: fail the run.
                self.can_write = False
                self._client.request(
                    ledger_protocol.ReportBroken(ledger_protocol.error_reply(error).error)
                )
                break
        self._checked.set()

    def _write_parts(self, work: ledger_protocol.PartAssignment, data: memoryview) -> None:
        try:
            parts = write_interval(work, data)
        except Exception as error:
            self._client.request(
                ledger_protocol.PartFailed(
                    work.lo, ledger_protocol.error_reply(_as_holdfast_error(error)).error
                )
            )
            return
        self._client.request(ledger_protocol.PartWritten(work.lo, codec.pack(parts)))


def check_output(work: ledger_protocol.PartAssignment) -> None:
    """Refuse an output that this executor cannot write."""
    if failpoints.armed:
        failpoints.hit("spark.check_output", work)
    _open_sink(work).check_writer(work.writer)


def write_interval(
    work: ledger_protocol.PartAssignment, data: bytes | memoryview
) -> list[WrittenPart]:
    """Write the parts of an interval. `data` is its outcome bundle."""
    sink = _open_sink(work)
    outcomes, lo, hi = open_bundle(data)
    return [
        sink.write_part(work.writer, part)
        for part in parts_between(outcomes, lo, hi, work.file_rows, work.file_bytes)
        if isinstance(part, Part)
    ]


def _open_sink(work: ledger_protocol.PartAssignment) -> ExecutorSink:
    sink = open_sink(msgspec.json.decode(work.sink))
    assert isinstance(sink, ExecutorSink)
    return sink


def _as_holdfast_error(error: Exception) -> HoldfastError:
    if isinstance(error, HoldfastError):
        return error
    return OutputError(why=f"{type(error).__name__}: {error}")
