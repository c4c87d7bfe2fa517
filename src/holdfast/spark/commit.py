"""The ordered commit: the final prefix of the ledger goes to the sink, part by part.

Parts are cut at multiples of `file_rows`, whatever tasks did in which order, so the output of a run
is the same bytes after any fault. The sink answers with the last version it holds; a restart
begins there, whatever the ledger knew of it. When the last row is final, so is the output, and the
run's record says how it ended.

Compute may run ahead of the commit; the commit waits for nothing but its head.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from holdfast.clock import SYSTEM
from holdfast.errors import HoldfastError
from holdfast.ledger import runs
from holdfast.spark.office import Office
from holdfast.spark.sinks import OutputError, Part, Sink

# Parts that are ready together share one step of the sink, up to so many.
PARTS_MAX = 4
PARTS_BYTES_MAX = 64 * 1024 * 1024
# How long the sink may refuse what it says may be repeated.
PATIENCE_NS = 300_000_000_000
WAIT_S_MAX = 5.0


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
        failed: Callable[[HoldfastError], None],
    ) -> None:
        self.office = office
        self.sink = sink
        self.file_rows = file_rows
        self._failed = failed
        self._stopping = False
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
        self._guarded(self._commit_all)

    def _commit_all(self) -> None:
        while (upto := self._ready()) is not None:
            self._commit(upto)
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
        """The sink knows best what it holds."""
        if self.sink is None:
            return
        record = self.office.record
        version = self.sink.begin(record.run_id, record.name, self.office.schema)
        with self.office.desk.lock:
            final = self.office.desk.board.terminal_prefix()
        if version >= final:
            raise OutputAhead(name=record.name, output=version + 1, ledger=final)
        self._logged(version + 1)

    def _ready(self) -> int | None:
        """How far rows can be committed now; waits for the next part. None: nothing is left."""
        desk = self.office.desk
        with desk.lock:
            while True:
                board = desk.board
                if self._stopping or desk.error is not None or board.halted is not None:
                    self._stopping = True
                    return None
                done = board.next_commit
                if done >= board.size:
                    return None
                final = board.terminal_prefix()
                upto = final if final == board.size else final - final % self.file_rows
                if upto > done:
                    return upto
                desk.changed.wait()

    def _commit(self, upto: int) -> None:
        lo = self.office.desk.board.next_commit
        while lo < upto:
            parts: list[Part] = []
            size = 0
            while lo < upto and len(parts) < PARTS_MAX and size < PARTS_BYTES_MAX:
                hi = min(lo - lo % self.file_rows + self.file_rows, upto)
                if self.sink is not None:
                    parts.append(Part(lo, hi, self.office.successes(lo, hi)))
                    size += parts[-1].table.nbytes
                lo = hi
            self._sunk(parts)
            if self._stopping:
                return
            self._logged(lo)

    def _sunk(self, parts: list[Part]) -> None:
        """Into the sink; what may pass (a full disk, somebody's lock) is waited for, for a while."""
        waits_s = 0.1
        until_ns = SYSTEM.mono_ns() + PATIENCE_NS
        while self.sink is not None and not self._stopping:
            try:
                self.sink.commit_many(parts)
                return
            except HoldfastError as error:
                if not error.retryable or SYSTEM.mono_ns() >= until_ns:
                    raise
                print(f"holdfast: the output waits: {error}", file=sys.stderr, flush=True)
            SYSTEM.sleep(waits_s)
            waits_s = min(waits_s * 2, WAIT_S_MAX)

    def _logged(self, upto: int) -> None:
        desk = self.office.desk
        with desk.lock:
            now_ns = self.office.store.now_ns()
            _, entries = desk.board.commit(upto, upto - 1, now_ns)
            ticket = desk.enqueue(entries)
        ticket.wait()

    def _finish(self) -> None:
        if self.sink is not None and not self.office.desk.board.cancelling:
            self.sink.finish()
        office = self.office
        if office.record.status in runs.GOING:
            office.publish()
            office.move(runs.Event.FINISH)
        with office.desk.lock:
            office.over = True
            office.desk.changed.notify_all()
