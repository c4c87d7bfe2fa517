"""Request handlers of the ledger service: one method per request of `ledger_protocol`.

The log writer owns the decisions (`ledger.service.handlers`), their lock and their log. This module adds the
surroundings: input, outcomes, rate limits and the run's record. Reports are posted to the log writer. Other
requests arrive from many threads.
"""

from __future__ import annotations

import threading
from typing import Any

import msgspec
from msgspec.structs import replace

from holdfast import codec, failpoints
from holdfast.clock import SYSTEM, Clock, iso_time
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
from holdfast.ledger import runs, stage_costs
from holdfast.ledger.events import LedgerHalted
from holdfast.ledger.lineage import RunLineage
from holdfast.ledger.log import load_run
from holdfast.ledger.replies import AllRowsFinal, ClaimAnswer, NoMoreRows, NoRowsYet, RowGrant
from holdfast.ledger.run_scheduler import LogEntries, RunScheduler
from holdfast.ledger.service.handlers import GRANT_BYTES_MAX, ServiceDecision
from holdfast.ledger.service.metrics import RunMetrics
from holdfast.ledger.service.rate_limits import RunRateLimits
from holdfast.spark import (
    ledger_protocol,
    outcome_bundles,
    run_transactions,
    spool_validation,
)
from holdfast.spark.arrow_rows import encode_stream
from holdfast.spark.input_blocks import InputBlocks
from holdfast.spark.ledger_client import ServiceLost
from holdfast.spark.outcome_reuse import adopt_outcomes
from holdfast.spark.part_assignments import WAIT_MS_MIN, PartAssignments
from holdfast.spark.reply_ticket import ReplyTicket
from holdfast.spark.run_data import RunInput, RunOutcomes
from holdfast.spark.service_log_writer import BlockingTicket, ServiceLogWriter
from holdfast.spark.sinks.part_files import WrittenPart
from holdfast.store.api import Store

# How long a successor waits until the connection of its predecessor has closed.
PREDECESSOR_WAIT_NS = 5_000_000_000
TIMER_MIN_NS = 10_000_000
# After these errors a new process takes over from the log.
SUCCESSION_ERRORS = (Fenced, HeadMoved, CommitUnknown)


class ServiceRequests:
    def __init__(
        self,
        store: Store,
        log_writer: ServiceLogWriter,
        record: runs.RunRecord,
        rate_per_s: float,
        clock: Clock = SYSTEM,
        *,
        same_driver: bool = False,
        tokens_per_min: float = 0.0,
    ) -> None:
        self.store = store
        # The wall clock is only for messages about a halted run. Decisions use store time.
        self._clock = clock
        # The last converted time: (store time, wall clock).
        self._converted_time = (0, 0)
        self.log_writer = log_writer
        self.record = record
        # `is_over`: the run's record has its final status. `sink_error`: the permanent error of the
        # sink.
        self.is_over = False
        # Held from the check of `record` to its replacement: several threads change the record.
        self._record_lock = threading.RLock()
        self.sink_error: HoldfastError | None = None
        # Set by the committer when executors write the output: assignments, and rows and bytes per
        # file.
        self.part_assignments: PartAssignments | None = None
        self.file_limits: tuple[int, int] = (0, 0)
        now_ns = store.now_ns()
        self.service = log_writer.service
        # When the tick thread wakes next.
        self._timer_ns = 0
        self._read_lock = threading.Lock()
        self._input: RunInput | None = None
        self._outcomes: RunOutcomes | None = None
        self._ancestry: RunLineage | None = None
        self.blocks = InputBlocks(store, log_writer, record)
        self._reused_rows = 0
        self._served_intervals: set[int] = set()
        last_progress = None
        if record.status is not runs.RunLifecycle.INGESTING:
            last_progress = store.read(runs.get_progress, record.run_id)
        self.service.metrics = RunMetrics(now_ns, last_progress, same_driver=same_driver)
        token_state = (
            (last_progress.tokens_left, last_progress.updated_ns)
            if last_progress is not None
            else (0.0, now_ns)
        )
        self.service.limits = RunRateLimits(rate_per_s, tokens_per_min, now_ns, token_state)
        if record.status is not runs.RunLifecycle.INGESTING:
            self._open_input()

    # --- the input --------------------------------------------------------------------------

    def drop_input(self) -> ledger_protocol.Ok:
        self.blocks.drop()
        return ledger_protocol.Ok()

    def seal(self, seal: ledger_protocol.SealInput) -> ledger_protocol.InputSealed:
        """Merge blocks if needed, open the scheduler and mark the run as open; all or nothing.

        It is idempotent: repeated on another connection or in another process, it completes the
        remaining steps.
        """
        if self.record.status is not runs.RunLifecycle.INGESTING:
            return ledger_protocol.InputSealed(self.record.size)
        blocks = self.blocks.merge(seal.staged) if seal.merge else list(seal.blocks)
        size = sum(rows for _, rows in blocks)
        entries: LogEntries = []
        if self.log_writer.height:
            scheduler = load_run(self.store, self.record.run_id)
            if scheduler.size != size:
                raise Conflict(
                    what="input", why="the input was sealed with another size", found=size
                )
        else:
            scheduler, entries = RunScheduler.open(
                size, self.record.policy, now_ns=self.store.now_ns()
            )
        with self.log_writer.lock:
            ticket = self.log_writer.start_log(scheduler, entries)
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
            adopt_outcomes(self.store, self.log_writer, replace(self.record, **sealed))
        self.change_status(runs.RunEvent.SEAL, **sealed)
        self.blocks.delete_unused({n for n, _ in blocks})
        self._open_input()
        return ledger_protocol.InputSealed(size)

    def change_status(self, event: runs.RunEvent, **changes: Any) -> None:
        """Change the run's status under its lease. The log already holds the cause."""
        with self._record_lock:
            self.record = self.store.transact(
                run_transactions.change_status,
                self.log_writer.log.lease,
                self.record.run_id,
                event,
                changes,
            )

    def finish(self) -> None:
        """Store the end of a run whose rows are all final."""
        with self._record_lock:
            self._mark_cancelling()
            self.change_status(runs.RunEvent.FINISH)

    def _mark_cancelling(self) -> None:
        """Copy the cancellation from the log to the run's record."""
        with self._record_lock:
            is_open = self.record.status is runs.RunLifecycle.OPEN
            if is_open and self.log_writer.scheduler.cancelling:
                self.change_status(runs.RunEvent.CANCEL)

    def _open_input(self) -> None:
        self._input = RunInput(self.store, self.record)
        self.service.row_bytes = RunInput(self.store, self.record).row_bytes
        self._ancestry = RunLineage(self.store, self.record)
        self._outcomes = RunOutcomes(self.store, self.record, RunInput(self.store, self.record))
        with self.log_writer.lock:
            self._reused_rows = sum(self.log_writer.scheduler.ended[:2])
            # Adopted rows may have failed.
            self.service.metrics.failed_by_class = (
                self.log_writer.scheduler.ledger.failed_by_class()
            )

    # --- work -------------------------------------------------------------------------------

    def handle_exchange(
        self, owner: str, exchange: ledger_protocol.Exchange, data: memoryview
    ) -> tuple[ledger_protocol.ExchangeReply, bytes]:
        """Apply the reports and the claim of a child. Return when the commit is durable and a parked claim has its answer."""
        for report in exchange.reports:
            spool_validation.check_spool_report(self.record, report)
        ticket = BlockingTicket()
        with self.log_writer.lock:
            decision = self.service.submit(owner, exchange, data, self.store.now_ns(), ticket)
            self._wake_timer_if_sooner()
        ticket.wait()
        return self._full_reply(decision)

    def post_exchange(
        self, owner: str, exchange: ledger_protocol.Exchange, data: memoryview, ticket: ReplyTicket
    ) -> None:
        """Post an exchange to the log writer. The ticket sends the reply."""
        self.log_writer.post(lambda: self._decide_exchange(owner, exchange, data, ticket))

    def _decide_exchange(
        self, owner: str, exchange: ledger_protocol.Exchange, data: memoryview, ticket: ReplyTicket
    ) -> None:
        """Decide a posted exchange, in the writer thread with the lock held."""
        try:
            for report in exchange.reports:
                spool_validation.check_spool_report(self.record, report)
            decision = self.service.submit(owner, exchange, data, self.store.now_ns(), ticket)
        except HoldfastError as error:
            ticket.settle(error)
            return
        except Exception as error:
            ticket.settle(StoreError(what="step", why=f"{type(error).__name__}: {error}"))
            return
        ticket.set_builders(lambda: self._short_reply(decision), lambda: self._full_reply(decision))
        self._wake_timer_if_sooner()

    def _short_reply(self, decision: ServiceDecision) -> ledger_protocol.ExchangeReply | None:
        """Return the reply if it needs neither a read nor a write; else None."""
        changes_record = decision.halted is not None or decision.stopped
        if decision.failure or changes_record or isinstance(decision.reply.answer, RowGrant):
            return None
        return self._full_reply(decision)[0]

    def _full_reply(self, decision: ServiceDecision) -> tuple[ledger_protocol.ExchangeReply, bytes]:
        """Build the reply of a durable decision."""
        if decision.halted is not None:
            self.mark_halted(decision.halted)
        if decision.stopped:
            self.mark_stopped()
        if decision.failure is not None:
            raise self._with_times(decision.failure)
        reply = decision.reply
        stop = next((one.stop for one in reply.report_replies if one.stop), "")
        return self._exchange_reply(reply.report_replies, reply.answer, stop)

    def mark_stopped(self) -> None:
        """Copy the stop state from the log to the run's record."""
        stopped = self.log_writer.scheduler.stopped
        why = stopped.why if stopped is not None else ""
        with self._record_lock:
            if self.record.stopped != why and self.record.status in runs.UNFINISHED:
                self.record = self.store.transact(
                    run_transactions.change_fields,
                    self.log_writer.log.lease,
                    self.record.run_id,
                    {"stopped": why},
                )

    def continue_run(self, *, same_driver: bool) -> None:
        """Resume a run from its log."""
        with self.log_writer.lock:
            now_ns = self.store.now_ns()
            self.service.continue_from_log(self.record.policy, now_ns, same_driver=same_driver)
        if not same_driver:
            self.log_writer.flush()
            self.mark_stopped()

    def resume(self) -> ledger_protocol.Ok:
        """Resume a stopped run: the counters of its stop rules restart."""
        ticket = BlockingTicket()
        with self.log_writer.lock:
            self.service.resume(self.store.now_ns(), ticket)
        ticket.wait()
        self.mark_stopped()
        return ledger_protocol.Ok()

    def mark_halted(self, halted: LedgerHalted) -> None:
        """Copy the illegal transition from the log to the run's record, for a person to inspect."""
        at = iso_time(self._wall_clock_ns(halted.decided_ns))
        why = (
            f"seq {halted.seq}: {halted.prior} -> {halted.attempted} by {halted.owner} at {at} "
            f"(store time {iso_time(halted.decided_ns)}) {halted.why}"
        )
        with self._record_lock:
            if self.record.status in runs.UNFINISHED:
                self.change_status(runs.RunEvent.HALT, halted=why)

    def _wall_clock_ns(self, decided_ns: int) -> int:
        """Convert store time to wall clock time. The result is cached, since both clocks advance
        between reads: the error and the record of an illegal transition show the same time.
        """
        cached_ns, wall_ns = self._converted_time
        if cached_ns != decided_ns:
            wall_ns = self._clock.wall_ns() - (self.store.now_ns() - decided_ns)
            self._converted_time = decided_ns, wall_ns
        return wall_ns

    def _with_times(self, error: Exception) -> Exception:
        """Add wall clock time to an illegal transition. The scheduler only knows store time."""
        if isinstance(error, IllegalTransition) and "wall_ns" in error.fields:
            store_ns = error.fields["wall_ns"]
            wall_ns = self._wall_clock_ns(store_ns)
            times = {"wall_ns": wall_ns, "store_ns": store_ns}
            iso = {"wall_time": iso_time(wall_ns), "store_time": iso_time(store_ns)}
            return type(error)(**{**error.fields, **times, **iso})
        return error

    def _exchange_reply(
        self,
        report_replies: list[ledger_protocol.GrantReportReply],
        answer: ClaimAnswer | None,
        stop: str,
    ) -> tuple[ledger_protocol.ExchangeReply, bytes]:
        if stop or isinstance(answer, NoMoreRows):
            why = stop or (answer.why if isinstance(answer, NoMoreRows) else "")
            return ledger_protocol.ExchangeReply(report_replies, "stop", None, 0, why), b""
        if answer is None:
            return ledger_protocol.ExchangeReply(report_replies, "none", None, 0, ""), b""
        if isinstance(answer, AllRowsFinal):
            return ledger_protocol.ExchangeReply(report_replies, "over", None, 0, ""), b""
        if isinstance(answer, NoRowsYet):
            wait_ms = 50
            if answer.until_ns:
                wait_ms = max(min((answer.until_ns - self.store.now_ns()) // 1_000_000, 500), 10)
            with self.log_writer.lock:
                scheduler = self.log_writer.scheduler
                waiting_counts = scheduler.size - sum(scheduler.ended), len(scheduler.owners())
            return ledger_protocol.ExchangeReply(
                report_replies, "wait", None, wait_ms, answer.why, *waiting_counts
            ), b""
        assert isinstance(answer, RowGrant)
        assert self._input is not None
        assert self._ancestry is not None
        with self._read_lock:
            origins = [
                (one.lo, one.hi, one.run, one.from_lo)
                for part in answer.ranges
                for one in self._ancestry.origins(part.lo, part.hi)
            ]
            granted = ledger_protocol.GrantedRowsMessage(
                answer.epoch, answer.ranges, answer.begun, answer.isolated, origins
            )
            granted, data = spool_validation.attach_rows(granted, self._input)
        return ledger_protocol.ExchangeReply(report_replies, "granted", granted, 0, ""), data

    def has_running_rows(self) -> bool:
        """Whether a connected child still holds begun rows."""
        if not self.service.running:
            return False
        scheduler = self.log_writer.scheduler
        return bool(
            scheduler.ledger.in_flight_count
            and scheduler.halted is None
            and self.service.connected_owners
        )

    def heartbeat(self, epochs: list[int]) -> ledger_protocol.HeartbeatReply:
        with self.log_writer.lock:
            return ledger_protocol.HeartbeatReply(
                self.service.heartbeat(epochs, self.store.now_ns())
            )

    def keep_child(self, child: str) -> ledger_protocol.Ok:
        with self.log_writer.lock:
            self.service.renew_child(child, self.store.now_ns())
        return ledger_protocol.Ok()

    def hand_over(self, child: str) -> ledger_protocol.Ok:
        with self.log_writer.lock:
            self.service.announce_handover(child, self.store.now_ns())
        return ledger_protocol.Ok()

    def inherit(
        self, owner: str, known_epochs: list[int]
    ) -> tuple[ledger_protocol.ExchangeReply, bytes]:
        """Grant the next grant of this child's predecessor, if there is one."""
        with self.log_writer.lock:
            until_ns = self.store.now_ns() + PREDECESSOR_WAIT_NS
            while self.service.handover.is_predecessor_connected(owner):
                left_ns = until_ns - self.store.now_ns()
                if left_ns <= 0:
                    break
                self.log_writer.changed.wait(left_ns / 1e9)
            grant_and_report_no = self.service.next_inherited_grant(
                owner, known_epochs, self.store.now_ns()
            )
        answer, data = self._exchange_reply(
            [], grant_and_report_no[0] if grant_and_report_no else None, ""
        )
        if grant_and_report_no is not None and answer.grant is not None:
            grant = replace(answer.grant, last_report_no=grant_and_report_no[1])
            answer = replace(answer, grant=grant)
        return answer, data

    def acquire_tokens(
        self, request: ledger_protocol.AcquireTokens
    ) -> ledger_protocol.TokensGranted:
        """Admit calls under the rate limits, first come first served over all children."""
        with self.log_writer.lock:
            admission = self.service.limits.acquire(
                request.count, request.token_estimates, self.store.now_ns()
            )
        return ledger_protocol.TokensGranted(*admission)

    def on_connect(self, owner: str) -> None:
        with self.log_writer.lock:
            self.service.connected_owners.add(owner)

    def on_disconnect(self, owner: str) -> None:
        """Reclaim the grants of a closed connection, before their leases expire."""
        with self.log_writer.lock:
            if self.part_assignments is not None:
                self.part_assignments.on_disconnect(owner)
            self.service.on_disconnect(owner, self.store.now_ns())
            self.log_writer.changed.notify_all()

    def post_disconnect(self, owner: str) -> None:
        """Reclaim the grants of a closed connection after its posted exchanges."""
        self.log_writer.post(lambda: self.on_disconnect(owner))

    def tick(self) -> None:
        """Process deadlines: expired leases, the end of a grace period, parked claims."""
        with self.log_writer.lock:
            self.service.tick(self.store.now_ns())

    def wait_for_deadline(self, most_s: float) -> None:
        """Wait for the next deadline, at most `most_s`."""
        with self.log_writer.lock:
            now_ns = self.store.now_ns()
            self._timer_ns = now_ns + int(most_s * 1e9)
            soon_ns = self.service.next_due_ns()
            if soon_ns is not None:
                self._timer_ns = min(self._timer_ns, max(soon_ns, now_ns + TIMER_MIN_NS))
            self.log_writer.timer.wait((self._timer_ns - now_ns) / 1e9)

    def wake_timer(self) -> None:
        with self.log_writer.lock:
            self.log_writer.timer.notify_all()

    def _wake_timer_if_sooner(self) -> None:
        """Wake the tick thread if a deadline precedes its next wake-up. Call it with the lock held."""
        soon_ns = self.service.next_due_ns()
        if soon_ns is not None and soon_ns < self._timer_ns:
            self.log_writer.timer.notify_all()

    def drain(self) -> None:
        """Drain after the driver has exited: accept reports, grant and begin nothing."""
        with self.log_writer.lock:
            self.service.drain(self.store.now_ns())
            self.log_writer.changed.notify_all()

    def report_broken(self, error: HoldfastError) -> ledger_protocol.Ok:
        """Record that a child cannot read data of the run. The driver receives the error and stops."""
        with self.log_writer.lock:
            self.sink_error = self.sink_error or error
        return ledger_protocol.Ok()

    # --- the output, when executors write it ----------------------------------------------------

    def assign_part(self, owner: str) -> tuple[ledger_protocol.PartAssignment, bytes]:
        """Assign rows to an executor for writing, with the names of the objects that hold them."""
        with self.log_writer.lock:
            assignments = self.part_assignments
            if (
                assignments is None
                or assignments.closed
                or self.log_writer.scheduler.halted is not None
            ):
                over = self.is_over or assignments is not None
                return ledger_protocol.PartAssignment(
                    "over" if over else "wait", wait_ms=WAIT_MS_MIN
                ), b""
            interval = assignments.assign(owner, self.store.now_ns())
            if interval is None:
                # Send writer and sink settings as well: the executor checks them before its first
                # call.
                return self._part_work_reply(
                    "wait", assignments, wait_ms=assignments.wait_ms()
                ), b""
        try:
            self.log_writer.flush()
            data = outcome_bundles.make_bundle(
                self.store, self.record, interval.lo, interval.hi, successes_only=True
            )
            if len(data) > ledger_protocol.FRAME_BYTES_MAX:
                raise ValueTooLarge(what="names of results", bytes=len(data), rows=interval)
        except HoldfastError as error:
            self.part_failed(owner, interval.lo, error)
            raise
        return self._part_work_reply("write", assignments, lo=interval.lo, hi=interval.hi), data

    def _part_work_reply(
        self, state: str, assignments: PartAssignments, **fields: int
    ) -> ledger_protocol.PartAssignment:
        rows, size = self.file_limits
        sink = msgspec.json.encode(self.record.sink)
        return ledger_protocol.PartAssignment(
            state, sink=sink, writer=assignments.writer, file_rows=rows, file_bytes=size, **fields
        )

    def part_written(self, owner: str, lo: int, packed: bytes) -> ledger_protocol.Ok:
        parts = codec.unpack_as(list[WrittenPart], packed)
        with self.log_writer.lock:
            if self.part_assignments is not None and self.part_assignments.report(
                owner, lo, parts, self.store.now_ns()
            ):
                self.log_writer.changed.notify_all()
        return ledger_protocol.Ok()

    def part_failed(self, owner: str, lo: int, error: HoldfastError) -> ledger_protocol.Ok:
        with self.log_writer.lock:
            if self.part_assignments is not None:
                self.part_assignments.report_failure(owner, lo, error)
                self.log_writer.changed.notify_all()
        return ledger_protocol.Ok()

    def cancel(self) -> ledger_protocol.Ok:
        """Stop granting and beginning rows. Begun rows may finish within the grace period."""
        ticket = BlockingTicket()
        with self.log_writer.lock:
            # A run without unfinished rows can no longer be cancelled.
            self.service.cancel(self.store.now_ns(), ticket)
        ticket.wait()
        if failpoints.armed:
            failpoints.hit("ledger.cancel_logged", self.record.run_id)
        self._mark_cancelling()
        return ledger_protocol.Ok()

    # --- outcomes ------------------------------------------------------------------------------

    def outcomes(
        self, request: ledger_protocol.FetchOutcomes
    ) -> tuple[ledger_protocol.OutcomesReply, bytes]:
        with self.log_writer.lock:
            size = self.log_writer.scheduler.size
            if not 0 <= request.lo <= request.hi <= size:
                raise Invalid(
                    what="range", why="not in the run", found=(request.lo, request.hi), size=size
                )
            ready = self.log_writer.scheduler.ledger.is_final(request.lo, request.hi)
            cancelled = self.log_writer.scheduler.cancelling
            if request.lo in self._served_intervals:
                self._reused_rows += request.hi - request.lo
            self._served_intervals.add(request.lo)
            why = self._stop_reason()
        if cancelled or not ready:
            return ledger_protocol.OutcomesReply(ready, cancelled, stopped=why), b""
        self.log_writer.flush()
        assert self._outcomes is not None
        if outcome_bundles.can_bundle(self.store, self.record):
            data = outcome_bundles.make_bundle(self.store, self.record, request.lo, request.hi)
            return ledger_protocol.OutcomesReply(True, stopped=why, bundled=True), data
        with self._read_lock:
            read = self._outcomes.all_rows if request.meta else self._outcomes.successes
            table = read(request.lo, request.hi)
            if table.nbytes > GRANT_BYTES_MAX and request.hi - request.lo > 1:
                return ledger_protocol.OutcomesReply(True, large=True), b""
            failed = self._outcomes.failed(request.lo, request.hi)
        example = failed.column("_error")[0].as_py() if failed.num_rows else ""
        reply = ledger_protocol.OutcomesReply(True, False, failed.num_rows, example, stopped=why)
        return reply, encode_stream(table.combine_chunks())

    @property
    def schema(self) -> Any:
        assert self._outcomes is not None
        return self._outcomes.schema

    def open_outcomes(self) -> RunOutcomes:
        """Open the outcomes for the committer thread. The committer flushes the log before it
        reads.
        """
        return RunOutcomes(self.store, self.record, RunInput(self.store, self.record))

    # --- metrics ------------------------------------------------------------------------------

    def status(self) -> ledger_protocol.RunStatusReply:
        with self.log_writer.lock:
            error = self.sink_error or self.log_writer.error
            if isinstance(self.log_writer.error, SUCCESSION_ERRORS):
                # This process is about to exit. Its successor takes over.
                raise ServiceLost(why=str(self.log_writer.error))
            return ledger_protocol.RunStatusReply(
                status=self.record.status.value,
                halted=self.record.halted,
                over=self.is_over,
                error=ledger_protocol.error_reply(error).error if error is not None else None,
                progress=codec.pack(self.progress()),
                position=self._progress_position(),
                input_bytes=self.blocks.total_bytes,
                stopped=self._stop_reason(),
                claim_ready=self._is_claim_answerable(),
                writing=self.part_assignments is not None and not self.part_assignments.closed,
                needs_sort=self.blocks.needs_sort,
            )

    def _progress_position(self) -> bytes:
        """Return a value that changes with every progress of the ledger or the output."""
        written = self.part_assignments.written_count if self.part_assignments is not None else 0
        return (self.log_writer.height + (written << 40)).to_bytes(16, "big")

    def _is_claim_answerable(self) -> bool:
        if not self.log_writer.has_scheduler or self.service.connected_owners:
            return True
        if self.part_assignments is not None and self.part_assignments.has_unassigned:
            return True
        scheduler = self.log_writer.scheduler
        return scheduler.can_answer_claim(0, scheduler.size, self.store.now_ns())

    def _stop_reason(self) -> str:
        stopped = self.log_writer.scheduler.stopped if self.log_writer.has_scheduler else None
        return stopped.why if stopped is not None else ""

    def progress(self) -> runs.RunProgress:
        return self.service.progress(self.store.now_ns(), self._reused_rows)

    def publish(self) -> None:
        """Store the metrics for readers of the store."""
        with self.log_writer.lock:
            progress = self.progress()
        self.store.transact(stage_costs.publish_progress, self.record.run_id, progress)
        self.mark_stopped()
