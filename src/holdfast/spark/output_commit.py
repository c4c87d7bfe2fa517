"""The ordered commit: writes the final prefix of the run to the sink, part by part.

Parts are cut by seq, rows and bytes (`part_cuts`), independent of the order in which tasks finished. The
output of a run therefore has the same bytes after any fault. Rows are read while the sink writes them,
one row group at a time. The sink returns the last version that it holds. A restart resumes there,
independent of the commit position in the ledger. When the last row is final, the output is finished and
the run's record gets its final status.

Calls may run ahead of the commit. The commit waits only for the first row that is not final.

With a spool, executors write the part files: the committer offers intervals of final rows
(`part_assignments`) and commits the reported files in seq order. An interval ends where a part must end
(`PartCuts.hard_end`), so the executor computes the same parts in it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pyarrow as pa

from holdfast.clock import SYSTEM
from holdfast.errors import HoldfastError, IllegalTransition
from holdfast.ledger import runs
from holdfast.spark import output_succession, spool_maintenance
from holdfast.spark.outcome_bundles import can_bundle
from holdfast.spark.part_assignments import PartAssignments
from holdfast.spark.part_cuts import PartCuts, PartSpan
from holdfast.spark.row_sizes import RowSizes
from holdfast.spark.service_log_writer import BlockingTicket
from holdfast.spark.service_requests import ServiceRequests
from holdfast.spark.sinks import (
    ExecutorSink,
    KeptPart,
    OutputError,
    Part,
    Sink,
    WrittenPart,
)

# Ready parts share one sink commit, up to this number.
PARTS_MAX = 4
# Intervals that executors may write ahead of the commit.
OFFERED_MAX = 64
# How long retryable errors of the sink are retried.
SINK_RETRY_NS = 300_000_000_000
WAIT_S_MAX = 5.0
NO_LIMIT = 1 << 62


class OutputAhead(OutputError):
    code = "output_ahead"
    hint = (
        "the output holds rows that are missing from this ledger: its store was restored from a "
        "backup; run with fresh=True into another output"
    )


class OutputCommitter:
    """The commit thread of a run. It calls `on_failure` when the sink fails permanently."""

    def __init__(
        self,
        requests: ServiceRequests,
        sink: Sink | None,
        file_rows: int,
        file_bytes: int,
        on_failure: Callable[[HoldfastError], None],
        *,
        executors_write: bool = False,
    ) -> None:
        self.requests = requests
        self.sink = sink
        # The same sink, if executors write its files.
        self._executor_sink = _find_executor_sink(sink, requests) if executors_write else None
        # Intervals that are offered to executors or kept, in order.
        self._offered: deque[PartSpan] = deque()
        self._file_rows = file_rows
        self._file_bytes = file_bytes
        self._on_failure = on_failure
        self._stopping = False
        self._outcomes = requests.open_outcomes()
        # The first seq that is not in the sink yet.
        self._next_seq = 0
        self._cuts = self._make_cuts(())
        self._thread = threading.Thread(target=self._run, name="output-commit", daemon=True)

    def start(self) -> None:
        """Begin the sink and start the thread. Returns when the sink has begun or failed, before
        the first call.
        """
        if self._run_reporting_errors(self._reconcile):
            self._thread.start()

    def stop(self) -> None:
        log_writer = self.requests.log_writer
        with log_writer.lock:
            self._stopping = True
            log_writer.changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        self._run_reporting_errors(
            self._commit_written if self.requests.part_assignments is not None else self._commit_all
        )
        if self.requests.part_assignments is not None:
            with self.requests.log_writer.lock:
                self.requests.part_assignments.close()

    def _commit_all(self) -> None:
        while (spans := self._next_committable()) is not None:
            self._write_to_sink([self._part_of(span) for span in spans])
            if self._stopping:
                break
            self._next_seq = spans[-1].hi
            self._log_committed(self._next_seq)
        if not self._stopping:
            self._finish()

    def _run_reporting_errors(self, work: Callable[[], None]) -> bool:
        """Run `work`. Return False if it failed permanently; the failure has been reported then."""
        try:
            work()
        except HoldfastError as error:
            self._on_failure(error)
        except Exception as error:
            # A custom sink may raise anything. Unreported, the run would wait forever.
            self._on_failure(OutputError(why=f"{type(error).__name__}: {error}"))
        else:
            return True
        return False

    def _reconcile(self) -> None:
        """Set the position from the version that the sink holds: the sink is authoritative."""
        with self.requests.log_writer.lock:
            scheduler = self.requests.log_writer.scheduler
            self._next_seq, final = scheduler.next_commit, scheduler.terminal_prefix()
        if self.sink is None:
            return
        record = self.requests.record
        begun = output_succession.begin_sink(
            self.sink, self.requests.store, record, self._outcomes.schema
        )
        if begun.version >= final:
            raise OutputAhead(name=record.name, output=begun.version + 1, ledger=final)
        self._cuts = self._make_cuts(begun.kept)
        self._next_seq = begun.version + 1
        self._log_committed(self._next_seq)
        if self._executor_sink is not None and self._next_seq < record.size:
            with self.requests.log_writer.lock:
                self.requests.file_limits = self._file_rows, self._file_bytes
                self.requests.part_assignments = PartAssignments(self._executor_sink.part_writer())

    def _make_cuts(self, kept: Sequence[KeptPart]) -> PartCuts:
        if self.sink is None:
            return PartCuts(
                self.requests.record.size, self._file_rows, NO_LIMIT, self._row_sizes, width=1
            )
        width = self._outcomes.row_width()
        size, rows, limit = self.requests.record.size, self._file_rows, self._file_bytes
        return PartCuts(size, rows, limit, self._row_sizes, width=width, kept=kept)

    def _row_sizes(self, lo: int, hi: int) -> RowSizes:
        self.requests.log_writer.flush()
        return self._outcomes.row_bytes(lo, hi)

    def _next_committable(self) -> list[PartSpan] | None:
        """Return the parts that can be committed now, waiting for the next one. None: no rows are
        left.
        """
        wanted = 0
        while (final := self._wait_for_final(wanted)) is not None:
            spans: list[PartSpan] = []
            next_seq = self._next_seq
            while (
                len(spans) < PARTS_MAX
                and (span := self._cuts.next_part(next_seq, final)) is not None
            ):
                spans.append(span)
                next_seq = span.hi
            if spans:
                return spans
            wanted = max(self._cuts.next_scan_at(next_seq), final + 1)
        return None

    def _wait_for_final(self, wanted: int) -> int | None:
        """Wait until at least `wanted` rows, or all, are final. Return their number; None if no
        more will become final.
        """
        log_writer = self.requests.log_writer
        with log_writer.lock:
            while True:
                scheduler = log_writer.scheduler
                if self._stopping or log_writer.error is not None or scheduler.halted is not None:
                    self._stopping = True
                    return None
                if self._next_seq >= scheduler.size:
                    return None
                final = scheduler.terminal_prefix()
                if final >= min(wanted, scheduler.size) and final > self._next_seq:
                    return final
                log_writer.wanted_prefix = max(min(wanted, scheduler.size), self._next_seq + 1)
                log_writer.changed.wait()

    # --- when executors write the files -----------------------------------------------------------

    def _commit_written(self) -> None:
        """Commit the parts that executors report. Intervals with a retryable error are offered
        again for a while.
        """
        waits_s, until_ns = 0.1, 0
        while (committable := self._next_written()) is not None:
            spans, parts, error = committable
            if error is not None:
                until_ns = until_ns or SYSTEM.mono_ns() + SINK_RETRY_NS
                if not error.retryable or SYSTEM.mono_ns() >= until_ns:
                    raise error
                print(f"holdfast: the output waits: {error}", file=sys.stderr, flush=True)
                SYSTEM.sleep(waits_s)
                waits_s = min(waits_s * 2, WAIT_S_MAX)
                continue
            waits_s, until_ns = 0.1, 0
            self._write_to_sink(parts)
            if self._stopping:
                break
            self._renew_writer()
            self._next_seq = spans[-1].hi
            self._log_committed(self._next_seq)
        if not self._stopping:
            self._finish()

    def _renew_writer(self) -> None:
        """Publish new writer settings: the commit has reloaded the table, and the catalog may have
        issued new credentials.
        """
        assert self._executor_sink is not None
        writer = self._executor_sink.part_writer()
        with self.requests.log_writer.lock:
            assert self.requests.part_assignments is not None
            self.requests.part_assignments.writer = writer

    def _next_written(
        self,
    ) -> tuple[list[PartSpan], list[Part | KeptPart | WrittenPart], HoldfastError | None] | None:
        """Return the next written intervals, waiting for them. None: no rows are left."""
        log_writer, assignments = self.requests.log_writer, self.requests.part_assignments
        assert assignments is not None
        spans: list[PartSpan] = []
        parts: list[Part | KeptPart | WrittenPart] = []
        with log_writer.lock:
            while True:
                scheduler = log_writer.scheduler
                if self._stopping or log_writer.error is not None or scheduler.halted is not None:
                    self._stopping = True
                    return None
                self._offer_intervals(scheduler.terminal_prefix(), assignments)
                while self._offered and len(spans) < PARTS_MAX:
                    span = self._offered[0]
                    if span.kept is None:
                        # Commit the intervals before an error first. The next call returns the
                        # error.
                        if not assignments.has_result(span.lo, failed=not spans):
                            break
                        result = assignments.take_result(span.lo)
                        if result.error is not None:
                            return [], [], result.error
                        parts += result.parts
                    else:
                        parts.append(span.kept)
                    spans.append(self._offered.popleft())
                if (
                    not self._offered
                    and (spans[-1].hi if spans else self._next_seq) >= scheduler.size
                ):
                    assignments.close()  # writer tasks may end
                if spans or self._next_seq >= scheduler.size:
                    return (spans, parts, None) if spans else None
                log_writer.wanted_prefix = min(
                    self._cuts.hard_end(self._offered_to), scheduler.size
                )
                log_writer.changed.wait()

    def _offer_intervals(self, final: int, assignments: PartAssignments) -> None:
        """Offer final intervals to executors, at most `OFFERED_MAX` ahead of the commit."""
        while self._offered_to < final and len(self._offered) < OFFERED_MAX:
            lo = self._offered_to
            hi, kept = self._cuts.hard_end(lo), self._cuts.kept_at(lo)
            if hi > final:
                return
            self._offered.append(PartSpan(lo, hi, (), kept))
            if kept is None:
                assignments.offer(lo, hi)

    @property
    def _offered_to(self) -> int:
        return self._offered[-1].hi if self._offered else self._next_seq

    def _part_of(self, span: PartSpan) -> Part | KeptPart:
        if span.kept is not None:
            return span.kept

        def groups() -> Iterator[pa.Table]:
            self.requests.log_writer.flush()
            for lo, hi in pairwise([span.lo, *span.groups]):
                yield self._outcomes.successes(lo, hi)

        return Part(span.lo, span.hi, groups)

    def _write_to_sink(self, parts: Sequence[Part | KeptPart | WrittenPart]) -> None:
        """Commit to the sink. Retry temporary errors (a full disk, a foreign lock) for a while."""
        waits_s = 0.1
        until_ns = SYSTEM.mono_ns() + SINK_RETRY_NS
        while self.sink is not None and not self._stopping:
            try:
                # Kept parts occur only if the sink returned them.
                self.sink.commit_many(parts)
                return
            except HoldfastError as error:
                if not error.retryable or SYSTEM.mono_ns() >= until_ns:
                    raise
                print(f"holdfast: the output waits: {error}", file=sys.stderr, flush=True)
            SYSTEM.sleep(waits_s)
            waits_s = min(waits_s * 2, WAIT_S_MAX)

    def _log_committed(self, upto: int) -> None:
        log_writer, ticket = self.requests.log_writer, BlockingTicket()
        try:
            with log_writer.lock:
                log_writer.service.mark_committed(upto, self.requests.store.now_ns(), ticket)
        except IllegalTransition:
            if log_writer.scheduler.halted is not None:
                log_writer.flush()
                self.requests.mark_halted(log_writer.scheduler.halted)
            raise
        ticket.wait()

    def _sweep_spool(self) -> None:
        """Delete spool objects that the ledger does not reference, since no report can follow.
        Duplicate tasks, an abandoned pass over the input and dead children leave such objects.
        """
        if self.requests.record.spool:
            with contextlib.suppress(HoldfastError):
                spool_maintenance.sweep_run(self.requests.store, self.requests.record, grace_ns=0)

    def _finish(self) -> None:
        if self.sink is not None and not self.requests.log_writer.scheduler.cancelling:
            self.sink.finish()
        requests = self.requests
        if requests.record.status in runs.UNFINISHED:
            requests.publish()
            requests.finish()
            self._sweep_spool()
        with requests.log_writer.lock:
            requests.is_over = True
            requests.log_writer.changed.notify_all()


def _find_executor_sink(sink: object, requests: ServiceRequests) -> ExecutorSink | None:
    """Return the sink if executors can write it and all data that they need is in spools."""
    if isinstance(sink, ExecutorSink) and can_bundle(requests.store, requests.record):
        return sink
    return None
