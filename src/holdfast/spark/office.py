"""What the ledger service does for whoever asks: one method a request of `wire`.

The desk keeps the board and its log; the office adds what surrounds it: input and outcomes, the
rate, the figures that people watch. Requests come from many threads, one per connection.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from holdfast import codec
from holdfast.clock import SYSTEM, Clock, iso_time
from holdfast.config import VALUE_BYTES_MAX
from holdfast.errors import (
    CommitUnknown,
    Conflict,
    Fenced,
    HeadMoved,
    HoldfastError,
    IllegalTransition,
    Invalid,
    ValueTooLarge,
)
from holdfast.ledger import runs
from holdfast.ledger.answers import Answer, Finished, Grant, Stop, Taken, Wait
from holdfast.ledger.board import Board, Entries
from holdfast.ledger.classes import ErrorClass
from holdfast.ledger.lineage import Ancestry
from holdfast.ledger.log import load
from holdfast.ledger.ranges import Ranges
from holdfast.ledger.records import Halted, Part, Reclaimed, Stopped
from holdfast.ledger.states import State
from holdfast.spark import merge, run_writes, wire
from holdfast.spark.adoption import take_over
from holdfast.spark.child_succession import Succession, child_of, regranted
from holdfast.spark.client import ServiceLost
from holdfast.spark.desk import Desk, Put, Ticket
from holdfast.spark.journal import Input, Outcomes
from holdfast.spark.metrics import RunMetrics
from holdfast.spark.pace import Pace
from holdfast.spark.rows import stream_of
from holdfast.spark.wait_queue import Rows, WaitQueue
from holdfast.store.api import Store

WAIT_MS_MAX = 5000
GRANT_BYTES_MAX = 64 * 1024 * 1024
# One report: the largest result (`row_reports.RESULT_BYTES_MAX`) and what surrounds it.
REPORT_BYTES_MAX = 96 * 1024 * 1024
DELETE_BLOCKS = 100
SPIN_NS = 10_000_000
# Blocks out of order beyond what a merge holds: Spark sorts the input.
SORT_BYTES = merge.MEMORY_BYTES
# After these a new process reads the log and goes on.
LOST = (Fenced, HeadMoved, CommitUnknown)
GONE = "its interpreter died, or its lease ran out, at every try"


class Office:
    def __init__(
        self,
        store: Store,
        desk: Desk,
        record: runs.RunRecord,
        rate_per_s: float,
        clock: Clock = SYSTEM,
        *,
        same_driver: bool = False,
    ) -> None:
        self.store = store
        # Its wall clock tells people when a run was halted. Decisions are made by store time.
        self._clock = clock
        # The last time that was told: by store time, and by the wall clock.
        self._told_ns = (0, 0)
        self.desk = desk
        self.record = record
        # The run's record says how it ended; what the sink said when it refused for good.
        self.over = False
        # The driver is gone: reports are taken, nothing is handed out or begun.
        self.leaving = False
        self.sink_error: HoldfastError | None = None
        self.owners: set[str] = set()
        now_ns = store.now_ns()
        self._pace = Pace(rate_per_s, now_ns) if rate_per_s else None
        self.metrics = RunMetrics(now_ns)
        self.succession = Succession(store, desk, self.owners)
        self._reading = threading.Lock()
        self._input: Input | None = None
        self._sizes: Input | None = None
        self._outcomes: Outcomes | None = None
        self._ancestry: Ancestry | None = None
        self._blocks = 0
        # Of the blocks that were put: all, and those whose rows came out of order.
        self._taken_bytes = 0
        self._unordered_bytes = 0
        self._reused = 0
        self._served: set[int] = set()
        self._waiting = WaitQueue(desk.lock, self._claimable, lambda: bool(desk.board.resting))
        desk.on_change = self._waiting.wake
        if record.status is not runs.Status.INGESTING:
            self.metrics = RunMetrics(
                now_ns,
                store.read(runs.progress, record.run_id),
                same_driver=same_driver,
            )
            self._open_input()
        else:
            self._blocks = store.read(runs.next_block, record.run_id)

    # --- the input --------------------------------------------------------------------------

    def put_block(self, data: memoryview, in_order: bool = True) -> wire.Block:
        """Store a block, or answer `STOP`: too much came out of order for a merge to hold."""
        if len(data) > VALUE_BYTES_MAX:
            # A block is cut by its rows: this is one of them.
            raise ValueTooLarge(what="input row", bytes=len(data), max=VALUE_BYTES_MAX)
        with self.desk.lock:
            if self.desk.has_board:
                raise Invalid(what="input", why="the run has its input already")
            self._unordered_bytes += 0 if in_order else len(data)
            if self._unordered_bytes > SORT_BYTES:
                return wire.Block(wire.STOP)
            self._taken_bytes += len(data)
            n = self._blocks
            self._blocks += 1
            ticket = self.desk.enqueue((), [(runs.block_key(self.record.run_id, n), bytes(data))])
        ticket.wait()
        return wire.Block(n)

    def drop_input(self) -> wire.Ok:
        """Remove the blocks of a pass that ended because the input is in no order."""
        with self.desk.lock:
            if self.desk.has_board:
                raise Invalid(what="input", why="the run has its input already")
            self._unordered_bytes = self._taken_bytes = 0
        self._drop_blocks(set())
        return wire.Ok()

    def seal(self, seal: wire.Seal) -> wire.Sealed:
        """Merge if need be, open the board, make the run known as open; all or nothing.

        It may come again, on another line or to another process: then as much of it as is left.
        """
        if self.record.status is not runs.Status.INGESTING:
            return wire.Sealed(self.record.size)
        blocks = list(seal.blocks)
        if seal.merge:
            merged = merge.merge(
                [merge.Staged(*staged) for staged in seal.staged],
                self.record.key,
                self._read_block,
                self._write_block,
            )
            blocks = merged.blocks
        size = sum(rows for _, rows in blocks)
        entries: Entries = []
        if self.desk.height:
            board = load(self.store, self.record.run_id)
            if board.size != size:
                raise Conflict(what="input", why="sealed with another size", found=size)
        else:
            board, entries = Board.open(size, self.record.policy, now_ns=self.store.now_ns())
        with self.desk.lock:
            ticket = self.desk.begin(board, entries)
        ticket.wait()
        sealed: dict[str, Any] = {
            "size": size,
            "blocks": blocks,
            "input_schema": seal.schema,
            "input_hash": seal.input_hash,
            "plan": seal.plan,
            "match": seal.match,
            "match_digest": seal.match_digest,
        }
        if self.record.base_run:
            take_over(self.store, self.desk, replace(self.record, **sealed))
        self.move(runs.Event.SEAL, **sealed)
        self._drop_blocks({n for n, _ in blocks})
        self._open_input()
        return wire.Sealed(size)

    def move(self, event: runs.Event, **changes: Any) -> None:
        """Change the run's status, under its lease; the log has what it rests on already."""
        self.record = self.store.transact(
            run_writes.moved, self.desk.log.lease, self.record.run_id, event, changes
        )

    def _read_block(self, n: int) -> bytes:
        data = self.store.read(runs.block, self.record.run_id, n)
        assert data is not None
        return bytes(data)

    def _write_block(self, data: bytes) -> int:
        return self.put_block(memoryview(data)).n

    def _drop_blocks(self, kept: set[int]) -> None:
        """Blocks that nobody named: of tasks that ran twice, or merged into others."""
        spare = [n for n in range(self._blocks) if n not in kept]
        for at in range(0, len(spare), DELETE_BLOCKS):
            self.store.transact(
                run_writes.without_blocks,
                self.desk.log.lease,
                self.record.run_id,
                spare[at : at + DELETE_BLOCKS],
            )

    def _open_input(self) -> None:
        self._input = Input(self.store, self.record)
        self._sizes = Input(self.store, self.record)
        self._ancestry = Ancestry(self.store, self.record)
        self._outcomes = Outcomes(self.store, self.record, Input(self.store, self.record))
        with self.desk.lock:
            self._reused = sum(self.desk.board.ended[:2])
            # Rows that were adopted may have failed.
            self.metrics.failed_by_class = self.desk.board.ledger.failed_by_class()

    # --- work -------------------------------------------------------------------------------

    def step(self, owner: str, step: wire.Step, data: memoryview) -> tuple[wire.Stepped, bytes]:
        moved: list[wire.Moved] = []
        entries: Entries = []
        puts: list[Put] = []
        answer: Answer | None = None
        failure: Exception | None = None
        with self.desk.lock:
            board, was = self.desk.board, self.desk.board.halted
            fresh = not step.moves or not all(
                board.was_taken(move.epoch, move.n) for move in step.moves
            )
            try:
                if fresh:
                    entries += self.desk.board.spend(step.cost, self.store.now_ns())
                self._moves(step.moves, data, moved, entries, puts)
                if step.claim is not None:
                    answer = self._granted_before(owner, step.held)
                    more: Entries = []
                    if answer is None:
                        answer, more = self._claim(owner, step.claim)
                    entries += more
            except Exception as error:
                # What was decided before is on the board, so it is logged all the same.
                failure = self._timed(error)
            halted = self.desk.board.halted
            if halted is not None and was is None:
                entries.append(halted)
            # A step that is only answered again tells of no new calls.
            if fresh:
                self.metrics.took(step.calls, step.cost, step.latency)
            self._counted(entries)
            # Who is told to wait is told nothing that must be durable.
            idle = not (step.moves or entries or puts or failure) and isinstance(answer, Wait)
            ticket = None if idle else self.desk.enqueue(entries, puts)
        if ticket is not None:
            ticket.wait()
        if halted is not None and was is None:
            self.mark_halted(halted)
        if any(isinstance(entry, Stopped) for entry in entries):
            self.mark_stopped()
        if failure is not None:
            raise failure
        if isinstance(answer, Wait) and step.wait_ms and step.claim is not None:
            answer = self._wait(owner, step.claim, answer, step.wait_ms)
        stop = next((one for one in moved if one.stop), None)
        return self._stepped(moved, answer, stop.stop if stop else "")

    def _moves(
        self,
        moves: Sequence[wire.Move],
        data: memoryview,
        moved: list[wire.Moved],
        entries: Entries,
        puts: list[Put],
    ) -> None:
        """Take each report; what came of it is added to the three lists."""
        at = 0
        for move in moves:
            batch = data[at : at + move.size]
            at += move.size
            height = self.desk.height + len(entries) + 1
            told = move.size + sum(4 * len(one.error) + len(one.raw) for one in move.others)
            if told > REPORT_BYTES_MAX:
                raise ValueTooLarge(what="report", bytes=told, max=REPORT_BYTES_MAX)
            errors = None
            if self.desk.board.policy.stop.same_error:
                errors = {other.seq: other.error for other in move.others}
            try:
                taken, more = self.desk.board.advance(
                    move.epoch,
                    move.n,
                    move.digest,
                    done=move.done,
                    begin=() if self.leaving else move.begin,
                    now_ns=self.store.now_ns(),
                    errors=errors,
                )
            except Fenced:
                moved.append(wire.Moved(True, 0, ""))
                continue
            stop = taken.stop or ("leaving" if self.leaving else "")
            moved.append(wire.Moved(False, taken.held, stop))
            if not more:
                continue
            entries += more
            chunk = self._chunk(move, taken, batch)
            if chunk is not None:
                page = self._first(move) // self.record.policy.page_rows
                puts += runs.chunk_rows(self.record.run_id, page, height, chunk)

    def mark_stopped(self) -> None:
        """The log has what stopped the run, or that it goes on: say it in the run's record."""
        stopped = self.desk.board.stopped
        why = stopped.why if stopped is not None else ""
        if self.record.stopped != why and self.record.status in runs.GOING:
            self.record = self.store.transact(
                run_writes.changed, self.desk.log.lease, self.record.run_id, {"stopped": why}
            )

    def resume(self) -> wire.Ok:
        """A driver runs it again: the stop rules count anew."""
        with self.desk.lock:
            entries = self.desk.board.resume(self.store.now_ns())
            ticket = self.desk.enqueue(entries)
        ticket.wait()
        self.mark_stopped()
        return wire.Ok()

    def mark_halted(self, halted: Halted) -> None:
        """The log has the illegal move; say it in the run's record: it is for a person now."""
        at = iso_time(self._wall_ns(halted.decided_ns))
        why = (
            f"seq {halted.seq}: {halted.prior} -> {halted.attempted} by {halted.owner} at {at} "
            f"(store time {iso_time(halted.decided_ns)}) {halted.why}"
        )
        if self.record.status in runs.GOING:
            self.move(runs.Event.HALT, halted=why)

    def _wall_ns(self, decided_ns: int) -> int:
        """The wall clock at a store time. Asked again it is the same: both clocks go on between two
        readings, and the error and the record of an illegal move tell one time."""
        told_ns, wall_ns = self._told_ns
        if told_ns != decided_ns:
            wall_ns = self._clock.wall_ns() - (self.store.now_ns() - decided_ns)
            self._told_ns = decided_ns, wall_ns
        return wall_ns

    def _timed(self, error: Exception) -> Exception:
        """The board knows store time alone: an illegal move is told with both times."""
        if isinstance(error, IllegalTransition) and "wall_ns" in error.fields:
            store_ns = error.fields["wall_ns"]
            wall_ns = self._wall_ns(store_ns)
            times = {"wall_ns": wall_ns, "store_ns": store_ns}
            iso = {"wall_time": iso_time(wall_ns), "store_time": iso_time(store_ns)}
            return type(error)(**{**error.fields, **times, **iso})
        return error

    def _first(self, move: wire.Move) -> int:
        return min(done.lo for done in move.done)

    def _chunk(self, move: wire.Move, taken: Taken, batch: memoryview) -> runs.Chunk | None:
        """What is kept of a report: results, and how the rows without one ended, if for good."""
        if not move.done:
            return None
        again = Ranges()
        for one in taken.retried:
            again.add(one.lo, one.hi)
        board = self.desk.board
        others = []
        for other in move.others:
            final = not again.holds(other.seq, other.seq + 1)
            if other.state == State.TERMINAL_FAIL:
                self.metrics.errors.add(other.error_class, other.error, rows=int(final))
            if final:
                tries = _tries(board, other.seq)
                others.append(
                    runs.Other(
                        other.seq, other.state, tries, other.error_class, other.error, other.raw
                    )
                )
        if not others and not batch:
            return None
        tried = [
            Part(lo, hi, tries + 1)
            for done in move.done
            if done.code == State.TERMINAL_SUCCESS
            for lo, hi, tries in board.ledger.tries(done.lo, done.hi)
            if tries
        ]
        return runs.Chunk(move.lo, move.seqs, bytes(batch), others, tried, 0.0, 0, [])

    def _lost(self, entries: Entries) -> list[Put]:
        """Rows that a reclaim failed for good have nobody to report them: it is done here."""
        puts: list[Put] = []
        page_rows = self.record.policy.page_rows
        for height, entry in enumerate(entries, self.desk.height + 1):
            if not isinstance(entry, Reclaimed):
                continue
            pages: dict[int, list[runs.Other]] = {}
            for lo, hi in entry.failed:
                for seq in range(lo, hi):
                    tries = _tries(self.desk.board, seq)
                    kind = int(ErrorClass.LEASE_EXPIRED)
                    self.metrics.errors.add(kind, GONE, rows=1)
                    pages.setdefault(seq // page_rows, []).append(
                        runs.Other(seq, int(State.TERMINAL_FAIL), tries, kind, GONE)
                    )
            for page, others in pages.items():
                key = runs.chunk_key(self.record.run_id, page, height)
                puts.append((key, codec.pack(runs.Chunk(0, b"", b"", others, [], 0.0, 0, []))))
        return puts

    def _granted_before(self, owner: str, held: list[int]) -> Grant | None:
        """A grant of this child that it never heard of: the service died before it could answer."""
        board = self.desk.board
        if board.cancelling or board.halted is not None:
            return None
        for grant in board.grants.values():
            if grant.n or grant.epoch in held or child_of(grant.owner) != child_of(owner):
                continue
            return regranted(board, grant, self.store.now_ns())
        return None

    def _claim(self, owner: str, claim: wire.Claim) -> tuple[Answer, Entries]:
        if self.leaving:
            return Stop("leaving"), []
        board = self.desk.board
        hi = board.size if claim.hi < 0 else min(claim.hi, board.size)
        rows = claim.rows
        if not self.record.policy.batch_rows:
            # Towards the end the rest is shared out, so that nobody is left with all of it.
            left = board.size - sum(board.ended)
            fair = left // (2 * max(len(self.owners), 1))
            # Rows may be whole documents: what is handed out must fit into a frame.
            assert self._sizes is not None
            next_up = board.unseen.first(claim.lo, hi) or (claim.lo, hi)
            fair = min(fair, GRANT_BYTES_MAX // self._sizes.row_bytes(next_up[0]))
            rows = max(min(rows, fair), 1)
        return board.claim(
            owner, rows, now_ns=self.store.now_ns(), lo=claim.lo, hi=hi, begin=claim.begin
        )

    def _wait(self, owner: str, claim: wire.Claim, answer: Answer, wait_ms: int) -> Answer:
        """For the empty-handed: until rows are free again, or the time is up."""
        until_ns = self.store.now_ns() + min(wait_ms, WAIT_MS_MAX) * 1_000_000
        ticket: Ticket | None = None
        with self.desk.lock, self._waiting.place((claim.lo, claim.hi)) as place:
            while True:
                # Asked again before it waits: rows may have come free since it was told to wait.
                answer, entries = self._claim(owner, claim)
                if entries:
                    ticket = self.desk.enqueue(entries)
                now_ns = self.store.now_ns()
                if not isinstance(answer, Wait) or now_ns >= until_ns:
                    break
                due_ns = until_ns
                if place.first and self.desk.board.resting:
                    due_ns = min(max(self.desk.board.resting[0][0], now_ns + SPIN_NS), until_ns)
                place.wait((due_ns - now_ns) / 1e9)
        if ticket is not None:
            ticket.wait()
        return answer

    def _claimable(self, rows: Rows) -> bool:
        """Whether a child that asks for these rows would be told anything but to wait."""
        board = self.desk.board
        lo, hi = rows
        hi = board.size if hi < 0 else min(hi, board.size)
        return self.leaving or board.would_answer(lo, hi, self.store.now_ns())

    def wake_all(self) -> None:
        """With the lock held: nothing is handed out any more, and children that wait are told so."""
        self._waiting.wake_all()

    def _stepped(
        self, moved: list[wire.Moved], answer: Answer | None, stop: str
    ) -> tuple[wire.Stepped, bytes]:
        if stop or isinstance(answer, Stop):
            why = stop or (answer.why if isinstance(answer, Stop) else "")
            return wire.Stepped(moved, "stop", None, 0, why), b""
        if answer is None:
            return wire.Stepped(moved, "none", None, 0, ""), b""
        if isinstance(answer, Finished):
            return wire.Stepped(moved, "over", None, 0, ""), b""
        if isinstance(answer, Wait):
            wait_ms = 50
            if answer.until_ns:
                wait_ms = max(min((answer.until_ns - self.store.now_ns()) // 1_000_000, 500), 10)
            return wire.Stepped(moved, "wait", None, wait_ms, answer.why), b""
        assert isinstance(answer, Grant)
        assert self._input is not None
        assert self._ancestry is not None
        with self._reading:
            origins = [
                (one.lo, one.hi, one.run, one.from_lo)
                for part in answer.parts
                for one in self._ancestry.origins(part.lo, part.hi)
            ]
            table = self._input.rows([(part.lo, part.hi) for part in answer.parts])
        granted = wire.Granted(answer.epoch, answer.parts, answer.begun, answer.alone, origins)
        return wire.Stepped(moved, "granted", granted, 0, ""), stream_of(table)

    def at_work(self) -> bool:
        """Whether somebody who is connected still holds rows that are begun."""
        if not self.desk.has_board or self.desk.error is not None:
            return False
        board = self.desk.board
        return bool(board.ledger.in_flight_count and board.halted is None and self.owners)

    def beat(self, epochs: list[int]) -> wire.Beaten:
        lost = []
        with self.desk.lock:
            now_ns = self.store.now_ns()
            for epoch in epochs:
                try:
                    self.desk.board.heartbeat(epoch, now_ns)
                except Fenced:
                    lost.append(epoch)
        return wire.Beaten(lost)

    def inherit(self, owner: str, held: list[int]) -> tuple[wire.Stepped, bytes]:
        """A grant of the predecessor of this child, if there is one more."""
        with self.desk.lock:
            found = None if self.leaving else self.succession.next_grant(owner, held)
        answer, data = self._stepped([], found[0] if found else None, "")
        if found is not None and answer.grant is not None:
            grant = replace(answer.grant, n=found[1])
            answer = replace(answer, grant=grant)
        return answer, data

    def tokens(self, count: int) -> wire.Allowed:
        if self._pace is None:
            return wire.Allowed(count, 0)
        with self.desk.lock:
            given, wait_ms = self._pace.take(count, self.store.now_ns())
        return wire.Allowed(given, wait_ms)

    def gone(self, owner: str) -> None:
        """A connection closed: what it held is free again, before any lease runs out."""
        with self.desk.lock:
            self.owners.discard(owner)
            if not self.desk.has_board or self.desk.error is not None:
                return
            # Grants that outlived a service are under the name that its line had there.
            board, child = self.desk.board, child_of(owner)
            self.desk.changed.notify_all()
            if self.succession.is_handed_over(child):
                # Until a lease runs out, nobody else is given its rows.
                return
            for name in board.owners():
                if child_of(name) == child and name not in self.owners:
                    self.reclaimed(board.drop(name, self.store.now_ns())[1])

    def tick(self) -> None:
        """What time alone brings: leases that run out, the end of a grace."""
        with self.desk.lock:
            if not self.desk.has_board or self.desk.error is not None:
                return
            board = self.desk.board
            if board.halted is not None:
                return
            now_ns = self.store.now_ns()
            _, entries = board.expire(now_ns)
            _, more = board.end_grace(now_ns)
            self.reclaimed([*entries, *more])

    def reclaimed(self, entries: Entries) -> None:
        """With the lock held: log what was taken back."""
        if entries:
            self._counted(entries)
            self.desk.enqueue(entries, self._lost(entries))

    def cancel(self) -> wire.Ok:
        """No more rows are handed out or begun; what is begun has the grace to end."""
        with self.desk.lock:
            _, entries = self.desk.board.cancel(self.store.now_ns())
            ticket = self.desk.enqueue(entries)
            cancelling = self.desk.board.cancelling
        ticket.wait()
        # A run whose rows have all ended cannot be cancelled any more.
        if cancelling and self.record.status is runs.Status.OPEN:
            self.move(runs.Event.CANCEL)
        return wire.Ok()

    # --- what became of it --------------------------------------------------------------------

    def outcomes(self, ask: wire.Outcomes) -> tuple[wire.Table, bytes]:
        with self.desk.lock:
            size = self.desk.board.size
            if not 0 <= ask.lo <= ask.hi <= size:
                raise Invalid(what="range", why="not in the run", found=(ask.lo, ask.hi), size=size)
            ready = self.desk.board.ledger.is_final(ask.lo, ask.hi)
            cancelled = self.desk.board.cancelling
            if ask.lo in self._served:
                self._reused += ask.hi - ask.lo
            self._served.add(ask.lo)
            stopped = self.desk.board.stopped
        if cancelled or not ready:
            why = stopped.why if stopped is not None else ""
            return wire.Table(ready, cancelled, stopped=why), b""
        self.desk.flush()
        assert self._outcomes is not None
        with self._reading:
            read = self._outcomes.all if ask.meta else self._outcomes.successes
            table = read(ask.lo, ask.hi)
            if table.nbytes > GRANT_BYTES_MAX and ask.hi - ask.lo > 1:
                return wire.Table(True, large=True), b""
            failed = self._outcomes.failed(ask.lo, ask.hi)
        example = failed.column("_error")[0].as_py() if failed.num_rows else ""
        found = wire.Table(True, False, failed.num_rows, example)
        return found, stream_of(table.combine_chunks())

    @property
    def schema(self) -> Any:
        assert self._outcomes is not None
        return self._outcomes.schema

    def final_rows(self) -> Outcomes:
        """For the commit, which has a thread of its own. What is read of it is flushed first."""
        return Outcomes(self.store, self.record, Input(self.store, self.record))

    # --- figures ------------------------------------------------------------------------------

    def status(self) -> wire.Stand:
        with self.desk.lock:
            refused = self.sink_error or self.desk.error
            if isinstance(self.desk.error, LOST):
                # This process is of no more use and about to end; another one goes on.
                raise ServiceLost(why=str(self.desk.error))
            return wire.Stand(
                self.record.status.value,
                self.record.halted,
                self.over,
                wire.refused(refused).error if refused is not None else None,
                codec.pack(self.progress()),
                self.desk.height.to_bytes(8, "big"),
                self._taken_bytes,
                self._stopped(),
            )

    def _stopped(self) -> str:
        stopped = self.desk.board.stopped if self.desk.has_board else None
        return stopped.why if stopped is not None else ""

    def progress(self) -> runs.Progress:
        now_ns = self.store.now_ns()
        if not self.desk.has_board:
            return runs.Progress(now_ns, self.metrics.started_ns, [0] * 8)
        board = self.desk.board
        return self.metrics.progress(
            now_ns,
            counts=board.ledger.counts(),
            ended=board.ended,
            reused=self._reused,
            retries=board.retries,
            reclaims=board.reclaims,
            fenced=board.fenced,
            tasks=len(self.owners),
            height=self.desk.height,
        )

    def publish(self) -> None:
        """Figures for whoever looks into the store."""
        with self.desk.lock:
            progress = self.progress()
        self.store.transact(runs.put_progress, self.record.run_id, progress)
        self.mark_stopped()

    def _counted(self, entries: Entries) -> None:
        """With the lock held: what decisions mean for the figures."""
        ledger = self.desk.board.ledger
        self.metrics.moved(entries)
        self.metrics.stand(self.store.now_ns(), sum(ledger.ended), ledger.in_flight_count)


def _tries(board: Board, seq: int) -> int:
    """How often a row was tried, the last time included."""
    [(_, _, retries)] = board.ledger.tries(seq, seq + 1)
    return retries + 1
