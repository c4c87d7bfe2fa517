"""What the ledger service does for each request of `wire`: one method a request.

The desk keeps the decisions (`ledger.service`), their lock and their log; the office adds what surrounds them:
input and outcomes, the rate, the run's record. Reports are posted; other requests come from many threads.
"""

from __future__ import annotations

import threading
from typing import Any

import msgspec
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
    StoreError,
    ValueTooLarge,
)
from holdfast.ledger import runs
from holdfast.ledger.answers import Answer, Finished, Grant, Stop, Wait
from holdfast.ledger.board import Board, Entries
from holdfast.ledger.lineage import Ancestry
from holdfast.ledger.log import load
from holdfast.ledger.records import Halted
from holdfast.ledger.service.handlers import GRANT_BYTES_MAX, Decision
from holdfast.ledger.service.metrics import RunMetrics
from holdfast.ledger.service.pace import Limits
from holdfast.spark import merge, outcome_rows, run_writes, spool_reports, spool_upkeep, wire
from holdfast.spark.adoption import take_over
from holdfast.spark.client import ServiceLost
from holdfast.spark.desk import Desk, Ticket
from holdfast.spark.journal import Input, Outcomes
from holdfast.spark.part_assignments import WAIT_MS_MIN, PartAssignments
from holdfast.spark.reply_ticket import ReplyTicket
from holdfast.spark.rows import stream_of
from holdfast.spark.sinks.written import WrittenPart
from holdfast.store.api import Store

# How long a successor waits for the connection of its predecessor to close.
PREDECESSOR_NS_MAX = 5_000_000_000
DELETE_BLOCKS = 100
SPIN_NS = 10_000_000
# Blocks out of order beyond what a merge holds: Spark sorts the input.
SORT_BYTES = merge.MEMORY_BYTES
# After these a new process reads the log and goes on.
LOST = (Fenced, HeadMoved, CommitUnknown)


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
        tokens_per_min: float = 0.0,
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
        self.sink_error: HoldfastError | None = None
        # Set by the commit when executors write the output; then also how its parts are cut.
        self.parts: PartAssignments | None = None
        self.part_cut: tuple[int, int] = (0, 0)
        now_ns = store.now_ns()
        self.service = desk.service
        # When the thread that lets time pass looks next.
        self._due_ns = 0
        self._reading = threading.Lock()
        self._input: Input | None = None
        self._outcomes: Outcomes | None = None
        self._ancestry: Ancestry | None = None
        self._blocks = 0
        # Of the blocks that were put: all, and those whose rows came out of order.
        self._taken_bytes = 0
        self._unordered_bytes = 0
        # The pass that is under way is over the input that Spark sorts.
        self._sorted = False
        self._reused = 0
        self._served: set[int] = set()
        known = None
        if record.status is not runs.Status.INGESTING:
            known = store.read(runs.progress, record.run_id)
        self.service.metrics = RunMetrics(now_ns, known, same_driver=same_driver)
        was = (known.tokens_left, known.updated_ns) if known is not None else (0.0, now_ns)
        self.service.limits = Limits(rate_per_s, tokens_per_min, now_ns, was)
        if record.status is not runs.Status.INGESTING:
            self._open_input()
        else:
            self._blocks = store.read(runs.next_block, record.run_id)

    # --- the input --------------------------------------------------------------------------

    def put_block(
        self,
        data: memoryview,
        in_order: bool = True,
        at: runs.StoredBlock | None = None,
        sorted: bool | None = None,
    ) -> wire.Block:
        """Store a block, or answer `STOP`: too much came out of order for a merge to hold, or the block is of
        a task of the first pass, which has ended."""
        if len(data) > VALUE_BYTES_MAX:
            # A block is cut by its rows: this is one of them.
            raise ValueTooLarge(what="input row", bytes=len(data), max=VALUE_BYTES_MAX)
        size, value = spool_reports.block_value(self.record, data, at)
        with self.desk.lock:
            if self.desk.has_board:
                raise Invalid(what="input", why="the run has its input already")
            # A service that was started again learns it from the first block of the second pass.
            self._sorted = self._sorted or bool(sorted)
            if sorted is False and self._sorted:
                return wire.Block(wire.STOP)
            self._unordered_bytes += 0 if in_order else size
            if self._unordered_bytes > SORT_BYTES:
                return wire.Block(wire.STOP)
            self._taken_bytes += size
            n = self._blocks
            self._blocks += 1
            ticket = self.desk.enqueue((), [(runs.block_key(self.record.run_id, n), value)])
        ticket.wait()
        return wire.Block(n)

    def drop_input(self) -> wire.Ok:
        """Remove the blocks of a pass that ended because the input is in no order."""
        with self.desk.lock:
            if self.desk.has_board:
                raise Invalid(what="input", why="the run has its input already")
            self._unordered_bytes = self._taken_bytes = 0
            self._sorted = True
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
            some = spare[at : at + DELETE_BLOCKS]
            objects = spool_upkeep.block_objects(self.store, self.record, some)
            self.store.transact(
                run_writes.without_blocks, self.desk.log.lease, self.record.run_id, some
            )
            spool_upkeep.delete_objects(self.record, objects)

    def _open_input(self) -> None:
        self._input = Input(self.store, self.record)
        self.service.row_bytes = Input(self.store, self.record).row_bytes
        self._ancestry = Ancestry(self.store, self.record)
        self._outcomes = Outcomes(self.store, self.record, Input(self.store, self.record))
        with self.desk.lock:
            self._reused = sum(self.desk.board.ended[:2])
            # Rows that were adopted may have failed.
            self.service.metrics.failed_by_class = self.desk.board.ledger.failed_by_class()

    # --- work -------------------------------------------------------------------------------

    def step(self, owner: str, step: wire.Step, data: memoryview) -> tuple[wire.Stepped, bytes]:
        """Decide under the lock; answer when it is durable, and when a claim that waits has its answer."""
        for move in step.moves:
            spool_reports.check_report(self.record, move)
        ticket = Ticket()
        with self.desk.lock:
            decision = self.service.submit(owner, step, data, self.store.now_ns(), ticket)
            self._retime()
        ticket.wait()
        return self._replied(decision)

    def post_step(self, owner: str, step: wire.Step, data: memoryview, ticket: ReplyTicket) -> None:
        """Have the writer of the log decide a step. The ticket sends the reply."""
        self.desk.post(lambda: self._decide(owner, step, data, ticket))

    def _decide(self, owner: str, step: wire.Step, data: memoryview, ticket: ReplyTicket) -> None:
        """With the lock held, in the thread of the writer."""
        try:
            for move in step.moves:
                spool_reports.check_report(self.record, move)
            decision = self.service.submit(owner, step, data, self.store.now_ns(), ticket)
        except HoldfastError as error:
            ticket.settle(error)
            return
        except Exception as error:
            ticket.settle(StoreError(what="step", why=f"{type(error).__name__}: {error}"))
            return
        ticket.decided(lambda: self._short(decision), lambda: self._replied(decision))
        self._retime()

    def _short(self, decision: Decision) -> wire.Stepped | None:
        """The reply, if nothing is read or written for it."""
        changes_record = decision.halted is not None or decision.stopped
        if decision.failure or changes_record or isinstance(decision.reply.answer, Grant):
            return None
        return self._replied(decision)[0]

    def _replied(self, decision: Decision) -> tuple[wire.Stepped, bytes]:
        """The reply of a decision that is durable."""
        if decision.halted is not None:
            self.mark_halted(decision.halted)
        if decision.stopped:
            self.mark_stopped()
        if decision.failure is not None:
            raise self._timed(decision.failure)
        reply = decision.reply
        stop = next((one.stop for one in reply.moved if one.stop), "")
        return self._stepped(reply.moved, reply.answer, stop)

    def mark_stopped(self) -> None:
        """The log has what stopped the run, or that it goes on: say it in the run's record."""
        stopped = self.desk.board.stopped
        why = stopped.why if stopped is not None else ""
        if self.record.stopped != why and self.record.status in runs.GOING:
            self.record = self.store.transact(
                run_writes.changed, self.desk.log.lease, self.record.run_id, {"stopped": why}
            )

    def start(self, *, same_driver: bool) -> None:
        """Go on with a run from its log."""
        with self.desk.lock:
            now_ns = self.store.now_ns()
            self.service.start(self.record.policy, now_ns, same_driver=same_driver)
        if not same_driver:
            self.desk.flush()
            self.mark_stopped()

    def resume(self) -> wire.Ok:
        """A driver runs it again: the stop rules count anew."""
        ticket = Ticket()
        with self.desk.lock:
            self.service.resume(self.store.now_ns(), ticket)
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
            with self.desk.lock:
                board = self.desk.board
                left = board.size - sum(board.ended), len(board.owners())
            return wire.Stepped(moved, "wait", None, wait_ms, answer.why, *left), b""
        assert isinstance(answer, Grant)
        assert self._input is not None
        assert self._ancestry is not None
        with self._reading:
            origins = [
                (one.lo, one.hi, one.run, one.from_lo)
                for part in answer.parts
                for one in self._ancestry.origins(part.lo, part.hi)
            ]
            granted = wire.Granted(answer.epoch, answer.parts, answer.begun, answer.alone, origins)
            granted, data = spool_reports.with_rows(granted, self._input)
        return wire.Stepped(moved, "granted", granted, 0, ""), data

    def at_work(self) -> bool:
        """Whether a child that is connected still holds rows that are begun."""
        if not self.service.running:
            return False
        board = self.desk.board
        return bool(board.ledger.in_flight_count and board.halted is None and self.service.owners)

    def beat(self, epochs: list[int]) -> wire.Beaten:
        with self.desk.lock:
            return wire.Beaten(self.service.heartbeat(epochs, self.store.now_ns()))

    def keep(self, child: str) -> wire.Ok:
        with self.desk.lock:
            self.service.keep(child, self.store.now_ns())
        return wire.Ok()

    def hand_over(self, child: str) -> wire.Ok:
        with self.desk.lock:
            self.service.hand_over(child, self.store.now_ns())
        return wire.Ok()

    def inherit(self, owner: str, held: list[int]) -> tuple[wire.Stepped, bytes]:
        """A grant of the predecessor of this child, if there is one more."""
        with self.desk.lock:
            until_ns = self.store.now_ns() + PREDECESSOR_NS_MAX
            while self.service.succession.has_predecessor(owner):
                left_ns = until_ns - self.store.now_ns()
                if left_ns <= 0:
                    break
                self.desk.changed.wait(left_ns / 1e9)
            found = self.service.inherit(owner, held, self.store.now_ns())
        answer, data = self._stepped([], found[0] if found else None, "")
        if found is not None and answer.grant is not None:
            grant = replace(answer.grant, n=found[1])
            answer = replace(answer, grant=grant)
        return answer, data

    def tokens(self, ask: wire.Tokens) -> wire.Allowed:
        """Leave for calls: of all children, in the order of asking."""
        with self.desk.lock:
            found = self.service.limits.take(ask.count, ask.prices, self.store.now_ns())
        return wire.Allowed(*found)

    def connected(self, owner: str) -> None:
        with self.desk.lock:
            self.service.owners.add(owner)

    def gone(self, owner: str) -> None:
        """A connection closed: what it held is free again, before any lease runs out."""
        with self.desk.lock:
            if self.parts is not None:
                self.parts.gone(owner)
            self.service.on_disconnect(owner, self.store.now_ns())
            self.desk.changed.notify_all()

    def post_gone(self, owner: str) -> None:
        """The same, behind the steps of this connection that were posted."""
        self.desk.post(lambda: self.gone(owner))

    def tick(self) -> None:
        """What time alone brings: leases that run out, the end of a grace, claims whose time is up."""
        with self.desk.lock:
            self.service.tick(self.store.now_ns())

    def wait_for_time(self, most_s: float) -> None:
        """Until something is due by time alone, at most so long."""
        with self.desk.lock:
            now_ns = self.store.now_ns()
            self._due_ns = now_ns + int(most_s * 1e9)
            soon_ns = self.service.next_due_ns()
            if soon_ns is not None:
                self._due_ns = min(self._due_ns, max(soon_ns, now_ns + SPIN_NS))
            self.desk.timer.wait((self._due_ns - now_ns) / 1e9)

    def wake_timer(self) -> None:
        with self.desk.lock:
            self.desk.timer.notify_all()

    def _retime(self) -> None:
        """With the lock held: wake the thread that lets time pass, if something is due before it looks."""
        soon_ns = self.service.next_due_ns()
        if soon_ns is not None and soon_ns < self._due_ns:
            self.desk.timer.notify_all()

    def leave(self) -> None:
        """The driver is gone: reports are taken, nothing is handed out or begun."""
        with self.desk.lock:
            self.service.leave(self.store.now_ns())
            self.desk.changed.notify_all()

    def broken(self, error: HoldfastError) -> wire.Ok:
        """A child cannot read what the run rests on: the driver is told, and ends."""
        with self.desk.lock:
            self.sink_error = self.sink_error or error
        return wire.Ok()

    # --- the output, when executors write it ----------------------------------------------------

    def take_part(self, owner: str) -> tuple[wire.PartWork, bytes]:
        """Rows for an executor to write, with the names of the objects that hold them."""
        with self.desk.lock:
            parts = self.parts
            if parts is None or parts.closed or self.desk.board.halted is not None:
                over = self.over or parts is not None
                return wire.PartWork("over" if over else "wait", wait_ms=WAIT_MS_MIN), b""
            found = parts.take(owner, self.store.now_ns())
            if found is None:
                # The writer and the sink come with it: the executor checks them before its first call.
                return self._part_work("wait", parts, wait_ms=parts.wait_ms()), b""
        try:
            self.desk.flush()
            data = outcome_rows.bundle(
                self.store, self.record, found.lo, found.hi, successes_only=True
            )
            if len(data) > wire.FRAME_BYTES_MAX:
                raise ValueTooLarge(what="names of results", bytes=len(data), rows=found)
        except HoldfastError as error:
            self.part_failed(owner, found.lo, error)
            raise
        return self._part_work("write", parts, lo=found.lo, hi=found.hi), data

    def _part_work(self, state: str, parts: PartAssignments, **told: int) -> wire.PartWork:
        rows, size = self.part_cut
        sink = msgspec.json.encode(self.record.sink)
        return wire.PartWork(
            state, sink=sink, writer=parts.writer, file_rows=rows, file_bytes=size, **told
        )

    def part_written(self, owner: str, lo: int, packed: bytes) -> wire.Ok:
        found = codec.unpack_as(list[WrittenPart], packed)
        with self.desk.lock:
            if self.parts is not None and self.parts.report(owner, lo, found, self.store.now_ns()):
                self.desk.changed.notify_all()
        return wire.Ok()

    def part_failed(self, owner: str, lo: int, error: HoldfastError) -> wire.Ok:
        with self.desk.lock:
            if self.parts is not None:
                self.parts.fail(owner, lo, error)
                self.desk.changed.notify_all()
        return wire.Ok()

    def cancel(self) -> wire.Ok:
        """No more rows are handed out or begun; what is begun has the grace to end."""
        ticket = Ticket()
        with self.desk.lock:
            cancelling = self.service.cancel(self.store.now_ns(), ticket)
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
            why = self._stopped()
        if cancelled or not ready:
            return wire.Table(ready, cancelled, stopped=why), b""
        self.desk.flush()
        assert self._outcomes is not None
        if outcome_rows.is_bundled(self.store, self.record):
            data = outcome_rows.bundle(self.store, self.record, ask.lo, ask.hi)
            return wire.Table(True, stopped=why, bundled=True), data
        with self._reading:
            read = self._outcomes.all if ask.meta else self._outcomes.successes
            table = read(ask.lo, ask.hi)
            if table.nbytes > GRANT_BYTES_MAX and ask.hi - ask.lo > 1:
                return wire.Table(True, large=True), b""
            failed = self._outcomes.failed(ask.lo, ask.hi)
        example = failed.column("_error")[0].as_py() if failed.num_rows else ""
        found = wire.Table(True, False, failed.num_rows, example, stopped=why)
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
                self._position(),
                self._taken_bytes,
                self._stopped(),
                self._ready(),
                self.parts is not None and not self.parts.closed,
                self._unordered_bytes > SORT_BYTES,
            )

    def _position(self) -> bytes:
        """It changes as the ledger moves, and as the output does."""
        written = self.parts.count if self.parts is not None else 0
        return (self.desk.height + (written << 40)).to_bytes(16, "big")

    def _ready(self) -> bool:
        if not self.desk.has_board or self.service.owners:
            return True
        if self.parts is not None and self.parts.waiting:
            return True
        board = self.desk.board
        return board.would_answer(0, board.size, self.store.now_ns())

    def _stopped(self) -> str:
        stopped = self.desk.board.stopped if self.desk.has_board else None
        return stopped.why if stopped is not None else ""

    def progress(self) -> runs.Progress:
        return self.service.progress(self.store.now_ns(), self._reused)

    def publish(self) -> None:
        """Figures for whoever looks into the store."""
        with self.desk.lock:
            progress = self.progress()
        self.store.transact(runs.put_progress, self.record.run_id, progress)
        self.mark_stopped()
