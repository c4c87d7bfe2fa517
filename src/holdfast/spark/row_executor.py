"""The row executor of a child: claims rows, runs them and reports them until no rows are left.

- At most `flush_rows + concurrency` rows, or `1 + concurrency` batches, are begun and not reported. A
  crash repeats at most these. The ledger records a row as begun before its call starts.
- Reports never block calls. A separate thread has one request under way at a time. The request carries
  all outcomes since the last one, the rows to begin next, and a claim when rows run low.
- A child with a grant never waits for another child. Only a child without a grant waits.
- A lost (fenced) grant is dropped: no row of it is started or reported.
- A quarantined row is granted alone: the child finishes and reports its calls, then begins that row.
- Outcomes are reported at a number of rows (`row_window`), at an age (`grant_reports`), or when calls would
  run dry.
"""

from __future__ import annotations

import itertools
import queue
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from holdfast.clock import SYSTEM
from holdfast.errors import HoldfastError
from holdfast.spark import ledger_protocol, row_reports
from holdfast.spark.arrow_rows import RowReader, decode_table
from holdfast.spark.call_admission import CallAdmission
from holdfast.spark.call_metrics import CallMetrics
from holdfast.spark.call_pool import (
    AsyncCallPool,
    CallPool,
    CallUnit,
    GrantedRows,
    PoolEvent,
    PresetFailure,
    ThreadCallPool,
    fail_unconvertible,
)
from holdfast.spark.call_slots import CallSlots, decode_seq, timeout_error
from holdfast.spark.caller import FunctionCaller
from holdfast.spark.child_job import ChildJob, HungCall
from holdfast.spark.function_pickle import TokenEstimate
from holdfast.spark.grant_reports import GrantReports
from holdfast.spark.hung_calls import HungCallDetector
from holdfast.spark.ledger_client import LedgerClient
from holdfast.spark.row_window import RowWindow
from holdfast.spark.spool_access import spool_client_for

if TYPE_CHECKING:
    from holdfast.spark.spool_client import SpoolClient

# With a spool each report is an object: report less often.
SPOOL_REPORT_NS = 1_000_000_000
WAIT_MS = 500
PAUSE_S_MAX = 0.25
# End states of a job: the run is over; the run stops; the time slice of the task is up.
END_STATES = ("over", "stop", "turn")


class RowExecutor:
    def __init__(
        self,
        job: ChildJob,
        caller: FunctionCaller,
        client: LedgerClient,
        orphaned: threading.Event | None = None,
        slots: CallSlots | None = None,
        estimate: TokenEstimate = 0,
    ) -> None:
        self.job = job
        self._orphaned = orphaned or threading.Event()
        self.caller = caller
        self.client = client
        # Totals of this job, for Spark's metrics.
        self.exchanges = 0
        self.metrics = CallMetrics()
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        make = AsyncCallPool if caller.is_async else ThreadCallPool
        slots = slots or CallSlots()
        self._pool: CallPool = make(
            caller, self._events, job.concurrency, slots.open_slots(job.concurrency)
        )
        self._hung_calls = HungCallDetector(
            slots, self._pool, job.timeout_s, is_async=caller.is_async
        )
        spool_client = spool_client_for(job.spool, client, job.run_id, job.lease_s)
        self._requests = RequestThread(client, spool_client, self._events)
        self._reports = GrantReports(caller)
        if spool_client is not None:
            self._reports = GrantReports(caller, SPOOL_REPORT_NS, row_reports.SPOOL_BYTES_MAX)
        self._grants: list[GrantedRows] = []
        self._window = RowWindow(job, self.metrics)
        self._admission = CallAdmission(job, estimate)
        self._state = "granted"
        self._claim_again_ns = 0
        # Start of the idle period; 0 while there is work.
        self._idle_since_ns = 0
        self._heartbeat_ns = SYSTEM.mono_ns()

    def run(self) -> str:
        """Run until no work is left. Return the reason: over, stop or turn."""
        welcome = self.client.connect()
        heartbeat_ns = welcome.lease_ns // 3
        time_slice_s = self.job.slot_release.time_slice_s
        slice_end_ns = SYSTEM.mono_ns() + int(time_slice_s * 1e9) if time_slice_s else 0
        try:
            if self.job.timed_out is not None:
                self._inherit_grants()
            while True:
                self._hung_calls.tick()
                if self._orphaned.is_set() and self._is_drained():
                    return "stop"
                if (
                    slice_end_ns
                    and self._state not in ("over", "stop")
                    and SYSTEM.mono_ns() >= slice_end_ns
                ):
                    self._stop("turn")
                self._start_calls()
                if not self._requests.busy:
                    self._send_next(heartbeat_ns)
                if not self._grants and not self._requests.busy and self._state in END_STATES:
                    return self._state
                self._drain_events(min(self._pause_s(heartbeat_ns), PAUSE_S_MAX))
                self._check_hung()
        finally:
            for held in self._grants:
                held.end_span()
            self._requests.close()
            self._pool.close()
            self._requests.close_spool()

    def _inherit_grants(self) -> None:
        """Take over the grants of the predecessor. Its begun rows are called again in the same
        attempt. Its timed-out rows are reported.
        """
        while True:
            known = [granted.epoch for granted in self._grants]
            answer, attached = self._requests.call(ledger_protocol.InheritGrant(known))
            if answer.grant is None:
                return
            granted = self._accept_grant(answer.grant, attached)
            self._fail_timed_out(granted)
            self._grants.append(granted)

    def _is_drained(self) -> bool:
        """The worker has exited: finish and report the calls under way, start no others."""
        self._stop()
        self._pool.draining = True
        return not (self._pool.running or self._unreported() or self._requests.busy)

    def _stop(self, state: str = "stop") -> None:
        """Stop beginning rows. Begun rows finish and are reported. The ledger reclaims the rest."""
        self._state = state
        for granted in self._grants:
            _drop_unbegun(granted)

    # --- calls ------------------------------------------------------------------------------

    def _start_calls(self) -> None:
        """Start the calls of begun rows."""
        units: list[CallUnit] = []
        for granted in self._grants:
            while granted.started < granted.begun:
                if self.job.batch_rows:
                    hi = granted.begun
                else:
                    hi = min(granted.started + self._window.unit_rows, granted.begun)
                units.append(self._make_unit(granted, granted.started, hi))
                granted.started = hi
        if units:
            self._pool.start(units)

    def _make_unit(self, granted: GrantedRows, lo: int, hi: int) -> CallUnit:
        """Build a unit with its rows. A row that cannot be converted fails with the reason and is
        not called.
        """
        if self.job.batch_rows:
            return CallUnit(granted, lo, hi)
        rows = granted.rows.take(hi - lo)
        if granted.rows.conversion_errors:
            fail_unconvertible(granted)
        return CallUnit(granted, lo, hi, rows)

    def _drain_events(self, pause_s: float) -> None:
        """Process events (finished calls, a reply), waiting for the first one."""
        try:
            event = self._events.get(timeout=pause_s)
        except queue.Empty:
            return
        while True:
            if isinstance(event, PoolEvent):
                self._on_call_ended(event)
            elif isinstance(event, list):
                for news in event:
                    self._on_call_ended(news)
            else:
                self._on_reply(event)
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return

    def _on_call_ended(self, event: PoolEvent) -> None:
        granted = event.unit.granted
        if granted.lost:
            return
        if not self._reports.oldest_outcome_ns:
            self._reports.oldest_outcome_ns = SYSTEM.mono_ns()
        if event.batch is not None:
            granted.batches += row_reports.split_batch(event.batch, self._reports.bytes_max)
            granted.ended += event.unit.hi - event.unit.lo
            self.metrics.add(event.batch.calls, event.batch.cost, event.batch.micros)
            self._admission.settle(granted, granted.seqs[0], event.batch.tokens, event.batch.micros)
            return
        granted.results += event.outcomes
        granted.ended += len(event.outcomes)
        self.metrics.add_rows(event.outcomes, self.caller.calls_per_row)
        for ended in event.outcomes:
            if ended.tokens is not None or granted.token_estimates:
                self._admission.settle(granted, ended.seq, ended.tokens, ended.micros)

    def _check_hung(self) -> None:
        """Check for a call beyond its timeout. Then begin no more rows, let other calls end, and
        raise `HungCall`.
        """
        hung = self._hung_calls.check(SYSTEM.mono_ns())
        if hung is None or self._unreported() or self._requests.busy:
            return
        if self._pool.is_blocked or hung.keys() >= self._pool.running.keys():
            raise HungCall([decode_seq(row) for row in hung.values()], self.job.timeout_s)

    # --- the ledger -------------------------------------------------------------------------

    def _send_next(self, heartbeat_ns: int) -> None:
        """Send the next request, if one is due."""
        now_ns = SYSTEM.mono_ns()
        unreported = self._unreported()
        self._admission.begin_reserved(now_ns)
        if (
            self.job.rate
            and unreported < self._window.report_rows()
            and self._admission.is_short(self._grants, now_ns)
        ):
            self._requests.submit(self._admission.next_request(self._grants, self._window.size()))
            return
        running = self._begun_unreported() - unreported
        room = self._free_window(unreported)
        waiting = sum(len(held.seqs) - held.begun for held in self._grants)
        claim = self._next_claim(now_ns, waiting)
        dry = running <= self._window.low_water() and (unreported or (waiting and room))
        due = unreported >= self._window.report_rows() or (
            unreported and now_ns >= self._reports.due_ns()
        )
        # A claim justifies a separate frame only when calls are about to run dry.
        if dry or due or (claim and running <= self._window.low_water()):
            self._send_exchange(room, claim)
        elif self._grants and now_ns - self._heartbeat_ns >= heartbeat_ns:
            self._heartbeat_ns = now_ns
            self._requests.submit(
                ledger_protocol.ServiceHeartbeat([held.epoch for held in self._grants])
            )

    def _free_window(self, unreported: int) -> int:
        """Return how many rows an exchange may begin that reports all finished rows."""
        if self._hung_calls.found:
            return 0
        return self._admission.limit(self._window.size() - (self._begun_unreported() - unreported))

    def _begun_unreported(self) -> int:
        return sum(held.begun - held.reported for held in self._grants)

    def _unreported(self) -> int:
        return sum(held.ended - held.reported for held in self._grants)

    def _next_claim(self, now_ns: int, waiting: int) -> ledger_protocol.ClaimRows | None:
        if self._state in END_STATES or self._hung_calls.found:
            return None
        # Without a grant, claim at once: the ledger parks the claim until rows become available.
        if self._grants and now_ns < self._claim_again_ns:
            return None
        if any(held.isolated for held in self._grants):
            return None
        if self.job.batch_rows:
            if len(self._grants) > self.job.concurrency:
                return None
        elif waiting >= self._window.size():
            return None
        rows = self._window.claim_rows()
        return ledger_protocol.ClaimRows(rows, 0, self.job.lo, self.job.hi)

    def _send_exchange(self, room: int, claim: ledger_protocol.ClaimRows | None) -> None:
        reports: list[ledger_protocol.GrantReport] = []
        attached: list[bytes] = []
        self._reports.sent = []
        # Only running rows conflict with a quarantined row. Rows that are not begun may wait beside
        # it.
        drained = not any(
            granted.begun > granted.ended for granted in self._grants if not granted.isolated
        )
        for granted in self._grants:
            begin = 0
            if room > 0 and granted.begun < len(granted.seqs):
                if granted.isolated:
                    # The same commit reports the finished rows.
                    begin = len(granted.seqs) if drained else 0
                elif not any(other.isolated for other in self._grants):
                    begin = self._window.rows_to_begin(len(granted.seqs) - granted.begun, room)
            if not begin and granted.ended == granted.reported:
                continue
            report, data = self._reports.build(granted, begin)
            room -= begin
            self._admission.spend(begin)
            reports.append(report)
            attached.append(data)
            self._reports.sent.append((granted, begin))
        if claim is not None:
            allowed = 0 if any(granted.isolated for granted in self._grants) else max(room, 0)
            if self.job.token_limited:
                allowed = 0  # their token usage is not estimated yet
            claim = msgspec.structs.replace(claim, begin=allowed)
        if not reports and claim is None:
            return
        self._heartbeat_ns = SYSTEM.mono_ns()
        self._reports.oldest_outcome_ns = 0
        step = ledger_protocol.Exchange(
            reports,
            claim,
            0 if self._grants else WAIT_MS,
            *self.metrics.take_delta(),
            [granted.epoch for granted in self._grants],
            *self._admission.take_usage(),
        )
        self.exchanges += 1
        self._requests.submit(step, *attached)

    def _on_reply(self, reply_or_error: Any) -> None:
        self._requests.busy = False
        if isinstance(reply_or_error, Exception):
            raise reply_or_error
        answer, attached = reply_or_error
        now_ns = SYSTEM.mono_ns()
        if isinstance(answer, ledger_protocol.TokensGranted):
            self._admission.reserve(answer, now_ns)
        elif isinstance(answer, ledger_protocol.HeartbeatReply):
            for held in self._grants:
                held.lost = held.lost or held.epoch in answer.lost
        elif isinstance(answer, ledger_protocol.ExchangeReply):
            self._on_exchange_reply(answer, attached, now_ns)
        for held in self._grants:
            if held.is_done:
                held.end_span()
        self._grants = [held for held in self._grants if not held.is_done]

    def _on_exchange_reply(
        self, answer: ledger_protocol.ExchangeReply, attached: memoryview | pa.Table, now_ns: int
    ) -> None:
        for (granted, begin), report_reply in zip(
            self._reports.sent, answer.report_replies, strict=True
        ):
            if report_reply.lost:
                granted.lost = True
            elif begin and "stop" not in (answer.state, self._state):
                granted.begun += begin
        if "stop" in (answer.state, self._state):
            self._stop()
            return
        self._window.adapt()
        if answer.state == "none":
            return
        self._state = answer.state
        self._claim_again_ns = now_ns + answer.wait_ms * 1_000_000
        if answer.state == "wait" and not self._grants:
            self._on_idle(answer, now_ns)
        else:
            self._idle_since_ns = 0
        if answer.grant is not None:
            self._grants.append(self._accept_grant(answer.grant, attached))
            self._admission.spend(answer.grant.begun)

    def _on_idle(self, answer: ledger_protocol.ExchangeReply, now_ns: int) -> None:
        """Free the slot when it is not needed: all rows are in backoff, or other children can call
        all remaining rows. The driver starts a job again when rows are due.
        """
        self._idle_since_ns = self._idle_since_ns or now_ns
        calls = answer.holders * self.job.concurrency * (self.job.batch_rows or 1)
        spare = not answer.holders or answer.open_rows <= calls
        idle_s = self.job.slot_release.idle_s
        if idle_s and spare and now_ns - self._idle_since_ns >= idle_s * 1e9:
            self._stop("turn")

    def _accept_grant(
        self, grant: ledger_protocol.GrantedRowsMessage, attached: memoryview | pa.Table
    ) -> GrantedRows:
        table = attached if isinstance(attached, pa.Table) else decode_table(attached)
        spans = [range(part.lo, part.hi) for part in grant.ranges]
        seqs = spans[0] if len(spans) == 1 else list(itertools.chain.from_iterable(spans))
        attempts = list(
            itertools.chain.from_iterable(
                itertools.repeat(part.attempt, part.hi - part.lo) for part in grant.ranges
            )
        )
        origins = {
            seq: (run_id, first + seq - lo)
            for lo, hi, run_id, first in grant.origins
            for seq in range(lo, hi)
        }
        rows = table if self.job.batch_rows else RowReader(table)
        granted = GrantedRows(
            grant.epoch,
            seqs,
            attempts,
            rows,
            grant.isolated,
            grant.begun,
            last_report_no=grant.last_report_no,
            origins=origins,
        )
        granted.start_span(self.job.traced, self.job.run_id)
        if self.job.token_limited:
            self._admission.estimate(granted)
        return granted

    def _fail_timed_out(self, granted: GrantedRows) -> None:
        """Fail the rows of an inherited grant that timed out. Of a batch, fail all begun rows."""
        late = set(self.job.timed_out or ()).intersection(granted.seqs[: granted.begun])
        if not late:
            return
        error = timeout_error(self.job.timeout_s)
        spent_us = int(self.job.timeout_s * 1e6)
        failure = PresetFailure(
            int(self.caller.class_of(error)), f"TimeoutError: {error}", spent_us
        )
        for at in range(granted.begun):
            if self.job.batch_rows or granted.seqs[at] in late:
                granted.preset_failures[at] = failure

    def _pause_s(self, heartbeat_ns: int) -> float:
        if self._requests.busy:
            return heartbeat_ns / 1e9
        now_ns = SYSTEM.mono_ns()
        until = [now_ns + heartbeat_ns]
        if self._grants:
            until.append(self._heartbeat_ns + heartbeat_ns)
        if self._reports.oldest_outcome_ns:
            until.append(self._reports.due_ns())
        if self.job.rate and self._admission.start_ns > now_ns:
            until.append(self._admission.start_ns)
        if not self._grants:
            return 0.0
        if self._claim_again_ns > now_ns:
            until.append(self._claim_again_ns)
        return max((min(until) - now_ns) / 1e9, 0.001)


class RequestThread:
    """A thread that sends one request at a time. Replies arrive in the event queue. It owns the spool
    client of the job, if there is one.
    """

    def __init__(
        self,
        client: LedgerClient,
        spool_client: SpoolClient | None,
        events: queue.SimpleQueue[Any],
    ) -> None:
        self.busy = False
        self._client = spool_client or client
        self._spool_client = spool_client
        self._events = events
        self._requests: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="ledger requests", daemon=True).start()

    def submit(self, message: ledger_protocol.WireMessage, *attached: bytes) -> None:
        assert not self.busy
        self.busy = True
        self._requests.put((message, *attached))

    def call(self, message: ledger_protocol.WireMessage) -> tuple[Any, Any]:
        """Send a request from the calling thread, while no submitted request is under way."""
        assert not self.busy
        return self._client.request(message)

    def close(self) -> None:
        self._requests.put(None)

    def close_spool(self) -> None:
        if self._spool_client is not None:
            self._spool_client.close()

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self._events.put(self._client.request(*request))
            except (HoldfastError, OSError) as error:
                self._events.put(error)


def _drop_unbegun(granted: GrantedRows) -> None:
    granted.seqs = granted.seqs[: granted.begun]
