"""The ordered commit: the final prefix of the ledger goes to the sink, part by part.

Parts are cut by seq, rows and bytes (`part_cuts`), whatever tasks did in which order, so the output
of a run is the same bytes after any fault. Rows are read while the sink writes them, a row group at a
time. The sink answers with the last version it holds; a restart
begins there, whatever the ledger knew of it. When the last row is final, so is the output, and the
run's record says how it ended.

Compute may run ahead of the commit; the commit waits for nothing but its head.

With a spool executors write the files of the parts: the commit offers intervals of final rows to them
(`part_assignments`), and commits the files that they report, in the order of seqs. An interval ends where a part
must end (`PartCuts.limit`), so the executor finds the same parts in it.
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
from holdfast.spark import spool_upkeep, succession
from holdfast.spark.desk import Ticket
from holdfast.spark.office import Office
from holdfast.spark.outcome_rows import is_bundled
from holdfast.spark.part_assignments import PartAssignments
from holdfast.spark.part_cuts import PartCuts, Span
from holdfast.spark.row_sizes import Sizes
from holdfast.spark.sinks import (
    ExecutorSink,
    KeptPart,
    OutputError,
    Part,
    Sink,
    WrittenPart,
)

# Parts that are ready together share one step of the sink, up to so many.
PARTS_MAX = 4
# Intervals that executors may write ahead of the commit.
AHEAD_MAX = 64
# How long the sink may refuse what it says may be repeated.
PATIENCE_NS = 300_000_000_000
WAIT_S_MAX = 5.0
NO_LIMIT = 1 << 62


class OutputAhead(OutputError):
    code = "output_ahead"
    hint = (
        "the output holds rows that this ledger knows nothing of: its store was restored from a "
        "backup; run with fresh=True into another output"
    )


class Committer:
    """A thread beside the office. `failed` is told when the sink refuses for good."""

    def __init__(
        self,
        office: Office,
        sink: Sink | None,
        file_rows: int,
        file_bytes: int,
        failed: Callable[[HoldfastError], None],
        *,
        executors_write: bool = False,
    ) -> None:
        self.office = office
        self.sink = sink
        # The sink once more, if executors write its files.
        self._remote = _remote(sink, office) if executors_write else None
        # Intervals that are offered to executors, or kept, in order.
        self._ahead: deque[Span] = deque()
        self._file_rows = file_rows
        self._file_bytes = file_bytes
        self._failed = failed
        self._stopping = False
        self._rows = office.final_rows()
        # The first seq that the sink does not hold yet.
        self._at = 0
        self._cuts = self._cut(())
        self._thread = threading.Thread(target=self._run, name="commit", daemon=True)

    def start(self) -> None:
        """Returns when the sink is begun, or refused: both before the first call."""
        if self._guarded(self._reconcile):
            self._thread.start()

    def stop(self) -> None:
        desk = self.office.desk
        with desk.lock:
            self._stopping = True
            desk.changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        self._guarded(self._commit_written if self.office.parts is not None else self._commit_all)
        if self.office.parts is not None:
            with self.office.desk.lock:
                self.office.parts.close()

    def _commit_all(self) -> None:
        while (spans := self._ready()) is not None:
            self._sunk([self._part(span) for span in spans])
            if self._stopping:
                break
            self._at = spans[-1].hi
            self._logged(self._at)
        if not self._stopping:
            self._finish()

    def _guarded(self, work: Callable[[], None]) -> bool:
        """False: it was refused for good, and that was told."""
        try:
            work()
        except HoldfastError as error:
            self._failed(error)
        except Exception as error:
            # A foreign sink, perhaps; without a word the run would wait for ever.
            self._failed(OutputError(why=f"{type(error).__name__}: {error}"))
        else:
            return True
        return False

    def _reconcile(self) -> None:
        """The sink knows best which rows it holds."""
        with self.office.desk.lock:
            board = self.office.desk.board
            self._at, final = board.next_commit, board.terminal_prefix()
        if self.sink is None:
            return
        record = self.office.record
        begun = succession.begin(self.sink, self.office.store, record, self._rows.schema)
        if begun.version >= final:
            raise OutputAhead(name=record.name, output=begun.version + 1, ledger=final)
        self._cuts = self._cut(begun.kept)
        self._at = begun.version + 1
        self._logged(self._at)
        if self._remote is not None and self._at < record.size:
            with self.office.desk.lock:
                self.office.part_cut = self._file_rows, self._file_bytes
                self.office.parts = PartAssignments(self._remote.part_writer())

    def _cut(self, kept: Sequence[KeptPart]) -> PartCuts:
        if self.sink is None:
            return PartCuts(
                self.office.record.size, self._file_rows, NO_LIMIT, self._sizes, width=1
            )
        width = self._rows.row_width()
        size, rows, limit = self.office.record.size, self._file_rows, self._file_bytes
        return PartCuts(size, rows, limit, self._sizes, width=width, kept=kept)

    def _sizes(self, lo: int, hi: int) -> Sizes:
        self.office.desk.flush()
        return self._rows.row_bytes(lo, hi)

    def _ready(self) -> list[Span] | None:
        """The parts that can be committed now; waits for the next. None: nothing is left."""
        wanted = 0
        while (final := self._final(wanted)) is not None:
            spans: list[Span] = []
            at = self._at
            while len(spans) < PARTS_MAX and (span := self._cuts.next(at, final)) is not None:
                spans.append(span)
                at = span.hi
            if spans:
                return spans
            wanted = max(self._cuts.next_look(at), final + 1)
        return None

    def _final(self, wanted: int) -> int | None:
        """How many rows are final, once they are as many as `wanted` or all. None: no more come."""
        desk = self.office.desk
        with desk.lock:
            while True:
                board = desk.board
                if self._stopping or desk.error is not None or board.halted is not None:
                    self._stopping = True
                    return None
                if self._at >= board.size:
                    return None
                final = board.terminal_prefix()
                if final >= min(wanted, board.size) and final > self._at:
                    return final
                desk.wanted_prefix = max(min(wanted, board.size), self._at + 1)
                desk.changed.wait()

    # --- when executors write the files -----------------------------------------------------------

    def _commit_written(self) -> None:
        """Commit what executors report; what they cannot write just now is offered again, for a while."""
        waits_s, until_ns = 0.1, 0
        while (found := self._written()) is not None:
            spans, parts, error = found
            if error is not None:
                until_ns = until_ns or SYSTEM.mono_ns() + PATIENCE_NS
                if not error.retryable or SYSTEM.mono_ns() >= until_ns:
                    raise error
                print(f"holdfast: the output waits: {error}", file=sys.stderr, flush=True)
                SYSTEM.sleep(waits_s)
                waits_s = min(waits_s * 2, WAIT_S_MAX)
                continue
            waits_s, until_ns = 0.1, 0
            self._sunk(parts)
            if self._stopping:
                break
            self._renew_writer()
            self._at = spans[-1].hi
            self._logged(self._at)
        if not self._stopping:
            self._finish()

    def _renew_writer(self) -> None:
        """The table was read anew for the commit: credentials that its catalog lends may be new."""
        assert self._remote is not None
        writer = self._remote.part_writer()
        with self.office.desk.lock:
            assert self.office.parts is not None
            self.office.parts.writer = writer

    def _written(
        self,
    ) -> tuple[list[Span], list[Part | KeptPart | WrittenPart], HoldfastError | None] | None:
        """The next intervals that are written; waits for them. None: nothing is left."""
        desk, assignments = self.office.desk, self.office.parts
        assert assignments is not None
        spans: list[Span] = []
        parts: list[Part | KeptPart | WrittenPart] = []
        with desk.lock:
            while True:
                board = desk.board
                if self._stopping or desk.error is not None or board.halted is not None:
                    self._stopping = True
                    return None
                self._offer(board.terminal_prefix(), assignments)
                while self._ahead and len(spans) < PARTS_MAX:
                    span = self._ahead[0]
                    if span.kept is None:
                        # An error is for the next look, when what was written before it is committed.
                        if not assignments.is_over(span.lo, failed=not spans):
                            break
                        ended = assignments.take_ended(span.lo)
                        if ended.error is not None:
                            return [], [], ended.error
                        parts += ended.parts
                    else:
                        parts.append(span.kept)
                    spans.append(self._ahead.popleft())
                if not self._ahead and (spans[-1].hi if spans else self._at) >= board.size:
                    assignments.close()  # the tasks that write may end
                if spans or self._at >= board.size:
                    return (spans, parts, None) if spans else None
                desk.wanted_prefix = min(self._cuts.limit(self._offered_to), board.size)
                desk.changed.wait()

    def _offer(self, final: int, assignments: PartAssignments) -> None:
        """Offer final intervals to executors, at most `AHEAD_MAX` ahead of the commit."""
        while self._offered_to < final and len(self._ahead) < AHEAD_MAX:
            lo = self._offered_to
            hi, kept = self._cuts.limit(lo), self._cuts.kept(lo)
            if hi > final:
                return
            self._ahead.append(Span(lo, hi, (), kept))
            if kept is None:
                assignments.offer(lo, hi)

    @property
    def _offered_to(self) -> int:
        return self._ahead[-1].hi if self._ahead else self._at

    def _part(self, span: Span) -> Part | KeptPart:
        if span.kept is not None:
            return span.kept

        def groups() -> Iterator[pa.Table]:
            self.office.desk.flush()
            for lo, hi in pairwise([span.lo, *span.groups]):
                yield self._rows.successes(lo, hi)

        return Part(span.lo, span.hi, groups)

    def _sunk(self, parts: Sequence[Part | KeptPart | WrittenPart]) -> None:
        """Into the sink; what may pass (a full disk, somebody's lock) is waited for, for a while."""
        waits_s = 0.1
        until_ns = SYSTEM.mono_ns() + PATIENCE_NS
        while self.sink is not None and not self._stopping:
            try:
                # Kept parts are among them only where the sink answered with them.
                self.sink.commit_many(parts)
                return
            except HoldfastError as error:
                if not error.retryable or SYSTEM.mono_ns() >= until_ns:
                    raise
                print(f"holdfast: the output waits: {error}", file=sys.stderr, flush=True)
            SYSTEM.sleep(waits_s)
            waits_s = min(waits_s * 2, WAIT_S_MAX)

    def _logged(self, upto: int) -> None:
        desk, ticket = self.office.desk, Ticket()
        try:
            with desk.lock:
                desk.service.committed(upto, self.office.store.now_ns(), ticket)
        except IllegalTransition:
            if desk.board.halted is not None:
                desk.flush()
                self.office.mark_halted(desk.board.halted)
            raise
        ticket.wait()

    def _sweep(self) -> None:
        """Nothing more is reported: objects of the spool that nothing names go at once. Tasks that ran twice, a pass
        over the input that was given up and children that died leave some."""
        if self.office.record.spool:
            with contextlib.suppress(HoldfastError):
                spool_upkeep.sweep(self.office.store, self.office.record, grace_ns=0)

    def _finish(self) -> None:
        if self.sink is not None and not self.office.desk.board.cancelling:
            self.sink.finish()
        office = self.office
        if office.record.status in runs.GOING:
            office.publish()
            office.move(runs.Event.FINISH)
            self._sweep()
        with office.desk.lock:
            office.over = True
            office.desk.changed.notify_all()


def _remote(sink: object, office: Office) -> ExecutorSink | None:
    """The sink, if it lets executors write and everything that they need is in spools."""
    if isinstance(sink, ExecutorSink) and is_bundled(office.store, office.record):
        return sink
    return None
