"""Writes part files of the output in Spark's Python worker, while its child makes calls.

A thread asks the ledger service for rows to write (`wire.TakePart`), reads their outcomes from the spool, writes the
files of their parts into the output and reports them. It runs no code of the user. Where a part ends depends on its
rows alone (`part_cuts`), so it does not matter which executor writes it, or whether two do.

Before the first call of its task the thread checks that the output can be written from here.
"""

from __future__ import annotations

import sys
import threading
from types import TracebackType

import msgspec

from holdfast import codec
from holdfast.clock import SYSTEM
from holdfast.errors import HoldfastError
from holdfast.spark import wire
from holdfast.spark.client import Address, Client, ServiceLost
from holdfast.spark.outcome_rows import opened
from holdfast.spark.output_parts import parts_between
from holdfast.spark.sinks import ExecutorSink, OutputError, Part, WrittenPart, open_sink
from holdfast.spark.sinks.object_store import keep_options
from holdfast.spark.write_access import WriteAccess

# How long the end of a task waits for its thread, which may be in a request.
END_S = 5.0
# How long it waits after a refusal that may pass, and how long it does so before its first call.
REFUSED_S = 1.0
PATIENCE_NS = 300_000_000_000


class PartWriter:
    """`finish` waits until the output is written, or until nothing is to be written just now."""

    def __init__(self, address: Address, access: WriteAccess) -> None:
        for url, options in access.options.items():
            keep_options(url, options)
        self._client = Client(address, "writer")
        self._ended = threading.Event()
        self._leaving = False
        self._checked = threading.Event()
        # Whether the output can be written from here.
        self.fit = True
        self._thread = threading.Thread(target=self._run, name="parts", daemon=True)

    def __enter__(self) -> PartWriter:
        """Waits until the output has been checked."""
        self._thread.start()
        self._checked.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._client.close()
        self._thread.join(END_S)

    def finish(self, *, all_rows: bool) -> None:
        """`all_rows`: until no rows are left to write. Else until the service has none for this executor."""
        self._leaving = not all_rows
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                try:
                    work, data = self._client.ask(wire.TakePart())
                except ServiceLost:
                    return  # the ledger service is gone, or the task is: another job goes on
                except HoldfastError:
                    self._ended.wait(REFUSED_S)
                    continue
                if not self._checked.is_set():
                    self._check(work)
                if work.state == "write":
                    self._write(work, data)
                elif work.state == "over" or self._leaving:
                    return
                else:
                    self._ended.wait(work.wait_ms / 1000)
        except HoldfastError as error:
            print(f"holdfast: this task writes no more of the output: {error}", file=sys.stderr)
        finally:
            self._checked.set()

    def _check(self, work: wire.PartWork) -> None:
        """Once the output is begun: see that this executor can write to it. What may pass is waited for."""
        if not work.sink:
            return
        until_ns = SYSTEM.mono_ns() + PATIENCE_NS
        while not self._ended.is_set():
            try:
                check(work)
                break
            except Exception as raised:
                error = _told(raised)
                if error.retryable and SYSTEM.mono_ns() < until_ns:
                    self._ended.wait(REFUSED_S)
                    continue
                # Nothing was called here: the run ends with it.
                self.fit = False
                self._client.ask(wire.Broken(wire.refused(error).error))
                break
        self._checked.set()

    def _write(self, work: wire.PartWork, data: memoryview) -> None:
        try:
            parts = written(work, data)
        except Exception as error:
            self._client.ask(wire.PartFailed(work.lo, wire.refused(_told(error)).error))
            return
        self._client.ask(wire.PartWritten(work.lo, codec.pack(parts)))


def check(work: wire.PartWork) -> None:
    """Refuse an output that cannot be written from here."""
    _sink(work).check_writer(work.writer)


def written(work: wire.PartWork, data: bytes | memoryview) -> list[WrittenPart]:
    """Write the parts of an interval, which the bundle `data` leads to."""
    sink = _sink(work)
    outcomes, lo, hi = opened(data)
    return [
        sink.write_part(work.writer, part)
        for part in parts_between(outcomes, lo, hi, work.file_rows, work.file_bytes)
        if isinstance(part, Part)
    ]


def _sink(work: wire.PartWork) -> ExecutorSink:
    found = open_sink(msgspec.json.decode(work.sink))
    assert isinstance(found, ExecutorSink)
    return found


def _told(error: Exception) -> HoldfastError:
    if isinstance(error, HoldfastError):
        return error
    return OutputError(why=f"{type(error).__name__}: {error}")
