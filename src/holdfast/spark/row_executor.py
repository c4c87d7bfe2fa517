"""The row executor of a child: claims rows, runs them and reports them until no rows are left.

- At most `flush_rows + concurrency` rows, or `1 + concurrency` batches, are begun and not reported. A
  crash repeats at most these. The ledger records a row as begun before its call starts.
- Reports never block calls. A separate thread has one request under way at a time. The request carries
  all outcomes since the last one, the rows to begin next, and a claim when rows run low.
- A child with a grant never waits for another child. Only a child without a grant waits.
- A lost (fenced) grant is dropped: no row of it is started or reported.
- A quarantined row is granted alone: the child finishes and reports its calls, then begins that row.
- The window adapts to slow calls: only as many rows are begun and claimed as finish within `BEGIN_AHEAD_S` and
  `CLAIM_AHEAD_S`.
- The window would throttle calls of microseconds, so it grows while the mean call is below `FAST_US`. A
  crash then repeats a few milliseconds of work.
"""

from __future__ import annotations

import itertools
import queue
import threading
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from holdfast.clock import SYSTEM
from holdfast.codec import pack
from holdfast.errors import HoldfastError
from holdfast.spark import ledger_protocol, row_reports
from holdfast.spark.arrow_rows import RowReader, decode_table
from holdfast.spark.call_metrics import UNKNOWN_MEAN_US, CallMetrics
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
from holdfast.spark.call_slots import CallSlots, StallDetector, decode_seq, timeout_error
from holdfast.spark.caller import FunctionCaller
from holdfast.spark.child_job import ChildJob, HungCall
from holdfast.spark.function_pickle import TokenEstimate
from holdfast.spark.ledger_client import LedgerClient
from holdfast.spark.spool_access import spool_client_for
from holdfast.spark.token_estimates import set_token_estimates

if TYPE_CHECKING:
    from holdfast.spark.spool_client import SpoolClient

FAST_US = 20
WINDOW_ROWS_MAX = 8192
# Rows to begin (or one per concurrent call) until the call duration is known.
FIRST_ROWS = 16
# Look-ahead of begins and claims in seconds: a slow node must not hoard rows.
BEGIN_AHEAD_S = 0.25
CLAIM_AHEAD_S = 1.0
# Outcomes are reported at this number of rows, at this age, or when calls would run dry.
REPORT_ROWS = 32
REPORT_NS = 250_000_000
# With a spool each report is an object: report less often.
SPOOL_REPORT_NS = 1_000_000_000
WAIT_MS = 500
PAUSE_S_MAX = 0.25
# An `async def` is cancelled at its timeout. This much later its loop is blocked, or it ignores
# cancellation.
CANCEL_S = 1.0
CHECK_NS = 50_000_000


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
        self._spool_client = spool_client_for(job.spool, client, job.run_id, job.lease_s)
        self._requester = self._spool_client or client
        self._report_ns, self._report_bytes = REPORT_NS, row_reports.REPORT_BYTES_MAX
        if self._spool_client is not None:
            self._report_ns, self._report_bytes = SPOOL_REPORT_NS, row_reports.SPOOL_BYTES_MAX
        # Totals of this job, for Spark's metrics.
        self.exchanges = 0
        self.metrics = CallMetrics()
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        make = AsyncCallPool if caller.is_async else ThreadCallPool
        self._slots = slots or CallSlots()
        self._stalls = StallDetector(self._slots)
        self._pool: CallPool = make(
            caller, self._events, job.concurrency, self._slots.open_slots(job.concurrency)
        )
        self._request_thread = _RequestThread(self._requester, self._events)
        self._grants: list[GrantedRows] = []
        self._window_rows = max(job.flush_rows >> min(job.deaths * 2, 16), 1)
        if not job.rate:
            self._window_rows = min(self._window_rows, max(FIRST_ROWS, job.concurrency))
        self._window_goal = job.flush_rows if job.deaths else 0
        self._unit_rows = 1
        self._tokens = 0
        self._tokens_wait_ns = 0
        # Calls admitted to start from `_tokens_wait_ns` on.
        self._reserved_calls = 0
        self._estimate = estimate
        # Totals of the finished calls: tokens used, and tokens reserved.
        self._tokens_used = self._tokens_estimated = 0
        self._oldest_outcome_ns = 0
        self._state = "granted"
        self._has_hung_calls = False
        self._next_check_ns = 0
        self._claim_again_ns = 0
        # Start of the idle period; 0 while there is work.
        self._idle_since_ns = 0
        self._heartbeat_ns = SYSTEM.mono_ns()
        self._sent_reports: list[tuple[GrantedRows, int]] = []

    def run(self) -> str:
        """Run until no work is left. Return the reason: over, stop or turn."""
        welcome = self.client.connect()
        heartbeat_ns = welcome.lease_ns // 3
        slice_end_ns = (
            SYSTEM.mono_ns() + int(self.job.time_slice_s * 1e9) if self.job.time_slice_s else 0
        )
        try:
            if self.job.timed_out is not None:
                self._inherit_grants()
            while True:
                self._slots.tick()
                if self._orphaned.is_set() and self._is_drained():
                    return "stop"
                if (
                    slice_end_ns
                    and self._state not in ("over", "stop")
                    and SYSTEM.mono_ns() >= slice_end_ns
                ):
                    self._stop("turn")
                self._start_calls()
                if not self._request_thread.busy:
                    self._send_next(heartbeat_ns)
                if not self._grants and not self._request_thread.busy and self._state in END_STATES:
                    return self._state
                self._drain_events(min(self._pause_s(heartbeat_ns), PAUSE_S_MAX))
                self._check_hung()
        finally:
            self._request_thread.close()
            self._pool.close()
            if self._spool_client is not None:
                self._spool_client.close()

    def _inherit_grants(self) -> None:
        """Take over the grants of the predecessor. Its begun rows are called again in the same
        attempt. Its timed-out rows are reported.
        """
        while True:
            known = [granted.epoch for granted in self._grants]
            answer, attached = self._requester.request(ledger_protocol.InheritGrant(known))
            if answer.grant is None:
                return
            granted = self._accept_grant(answer.grant, attached)
            self._fail_timed_out(granted)
            self._grants.append(granted)

    def _is_drained(self) -> bool:
        """The worker has exited: finish and report the calls under way, start no others."""
        self._stop()
        self._pool.draining = True
        return not (self._pool.running or self._unreported() or self._request_thread.busy)

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
                    hi = min(granted.started + self._unit_rows, granted.begun)
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
        if not self._oldest_outcome_ns:
            self._oldest_outcome_ns = SYSTEM.mono_ns()
        if event.batch is not None:
            granted.batches += row_reports.split_batch(event.batch, self._report_bytes)
            granted.ended += event.unit.hi - event.unit.lo
            self.metrics.add(event.batch.calls, event.batch.cost, event.batch.micros)
            self._settle_tokens(granted, granted.seqs[0], event.batch.tokens, event.batch.micros)
            return
        granted.results += event.outcomes
        granted.ended += len(event.outcomes)
        self.metrics.add_rows(event.outcomes, self.caller.calls_per_row)
        for ended in event.outcomes:
            if ended.tokens is not None or granted.token_estimates:
                self._settle_tokens(granted, ended.seq, ended.tokens, ended.micros)

    def _settle_tokens(self, granted: GrantedRows, seq: int, used: int | None, micros: int) -> None:
        """Count used against reserved tokens of a call. Without a reported usage the estimate
        counts.
        """
        estimate = granted.token_estimates.pop(seq, 0)
        self._tokens_estimated += estimate
        if micros >= 0:
            self._tokens_used += estimate if used is None else used

    def _check_hung(self) -> None:
        """Check for a call beyond its timeout. Then begin no more rows, let other calls end, and
        raise `HungCall`.
        """
        now_ns = SYSTEM.mono_ns()
        if now_ns < self._next_check_ns:
            return
        self._next_check_ns = now_ns + CHECK_NS
        self._stalls.sample(now_ns)
        allowed_s = self.job.timeout_s + (CANCEL_S if self.caller.is_async else 0.0)
        hung = self._pool.stuck_calls(self._stalls.stalled_rows(allowed_s * 1e9, now_ns))
        if hung:
            # Permanent: queued units are not started but left to the successor.
            self._has_hung_calls = self._pool.draining = True
        if not self._has_hung_calls or self._unreported() or self._request_thread.busy:
            return
        if self._pool.is_blocked or hung.keys() >= self._pool.running.keys():
            raise HungCall([decode_seq(row) for row in hung.values()], self.job.timeout_s)

    # --- the ledger -------------------------------------------------------------------------

    def _send_next(self, heartbeat_ns: int) -> None:
        """Send the next request, if one is due."""
        now_ns = SYSTEM.mono_ns()
        if self._reserved_calls and now_ns >= self._tokens_wait_ns:
            self._tokens, self._reserved_calls = self._tokens + self._reserved_calls, 0
        if self._needs_tokens(now_ns):
            prices = self._next_estimates() if self.job.token_limited else []
            count = len(prices) or self._window_size() // (self.job.batch_rows or 1)
            self._request_thread.submit(ledger_protocol.AcquireTokens(count, prices))
            return
        unreported = self._unreported()
        running = self._begun_unreported() - unreported
        room = self._free_window(unreported)
        waiting = sum(len(held.seqs) - held.begun for held in self._grants)
        claim = self._next_claim(now_ns, waiting)
        dry = running <= self._low_water() and (unreported or (waiting and room))
        due = unreported >= self._report_rows() or (
            unreported and now_ns - self._oldest_outcome_ns >= self._report_ns
        )
        # A claim justifies a separate frame only when calls are about to run dry.
        if dry or due or (claim and running <= self._low_water()):
            self._send_exchange(room, claim)
        elif self._grants and now_ns - self._heartbeat_ns >= heartbeat_ns:
            self._heartbeat_ns = now_ns
            self._request_thread.submit(
                ledger_protocol.ServiceHeartbeat([held.epoch for held in self._grants])
            )

    def _low_water(self) -> int:
        """Return the low-water mark: at or below this many begun rows, request more."""
        if self.job.batch_rows:
            return self.job.batch_rows * self.job.concurrency
        return self.job.concurrency + self._window_rows // 2

    def _report_rows(self) -> int:
        return max(min(REPORT_ROWS, self._window_rows), self._window_rows // 4)

    def _window_size(self) -> int:
        """Return how many rows may be begun and not reported."""
        # Under a rate limit, begin only calls that can start now. Otherwise they would start in a
        # burst later.
        if self.job.batch_rows:
            return self.job.batch_rows * (self.job.concurrency + (not self.job.rate))
        return self.job.concurrency + (0 if self.job.rate else self._window_rows)

    def _free_window(self, unreported: int) -> int:
        """Return how many rows an exchange may begin that reports all finished rows."""
        if self._has_hung_calls:
            return 0
        room = self._window_size() - (self._begun_unreported() - unreported)
        if not self.job.rate:
            return room
        return min(room, self._tokens * (self.job.batch_rows or 1))

    def _rows_to_begin(self, rows: int, room: int) -> int:
        """Return how many rows of a grant to begin. A batch is begun whole or not."""
        if self.job.batch_rows:
            return rows if rows <= room else 0
        return min(rows, room)

    def _rate_tokens(self, begun: int) -> int:
        """Return the rate tokens that a begin consumes: one per call."""
        if not self.job.rate or not begun:
            return 0
        return 1 if self.job.batch_rows else begun

    def _begun_unreported(self) -> int:
        return sum(held.begun - held.reported for held in self._grants)

    def _unreported(self) -> int:
        return sum(held.ended - held.reported for held in self._grants)

    def _needs_tokens(self, now_ns: int) -> bool:
        return (
            self.job.rate
            and not self._reserved_calls
            and self._tokens < max(self.job.concurrency // 2, 1)
            and bool(self._grants)
            and self._calls_not_begun() > (self._tokens if self.job.token_limited else 0)
            and now_ns >= self._tokens_wait_ns
            and self._unreported() < self._report_rows()
        )

    def _calls_not_begun(self) -> int:
        """Return the number of granted calls that are not begun."""
        waiting = [len(held.seqs) - held.begun for held in self._grants]
        return sum(map(bool, waiting)) if self.job.batch_rows else sum(waiting)

    def _next_estimates(self) -> list[int]:
        """Return the token estimates of the next calls without admission, up to the maximum under
        way.
        """
        calls = (
            held.token_estimates.get(seq, 0)
            for held in self._grants
            if held.begun < len(held.seqs)
            for seq in (held.seqs[:1] if self.job.batch_rows else held.seqs[held.begun :])
        )
        most = self._tokens + self._window_size() // (self.job.batch_rows or 1)
        return list(itertools.islice(calls, self._tokens, most))

    def _next_claim(self, now_ns: int, waiting: int) -> ledger_protocol.ClaimRows | None:
        if self._state in END_STATES or self._has_hung_calls:
            return None
        # Without a grant, claim at once: the ledger parks the claim until rows become available.
        if self._grants and now_ns < self._claim_again_ns:
            return None
        if any(held.isolated for held in self._grants):
            return None
        window = self._window_size()
        if self.job.batch_rows:
            if len(self._grants) > self.job.concurrency:
                return None
            rows = self.job.batch_rows
        else:
            if waiting >= window:
                return None
            rows = max(window, min(self._window_rows * 8, self._calls_within(CLAIM_AHEAD_S)))
        return ledger_protocol.ClaimRows(rows, 0, self.job.lo, self.job.hi)

    def _send_exchange(self, room: int, claim: ledger_protocol.ClaimRows | None) -> None:
        reports: list[ledger_protocol.GrantReport] = []
        attached: list[bytes] = []
        self._sent_reports = []
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
                    begin = self._rows_to_begin(len(granted.seqs) - granted.begun, room)
            if not begin and granted.ended == granted.reported:
                continue
            report, data = self._grant_report(granted, begin)
            room -= begin
            self._tokens -= self._rate_tokens(begin)
            reports.append(report)
            attached.append(data)
            self._sent_reports.append((granted, begin))
        if claim is not None:
            allowed = 0 if any(granted.isolated for granted in self._grants) else max(room, 0)
            if self.job.token_limited:
                allowed = 0  # their token usage is not estimated yet
            claim = msgspec.structs.replace(claim, begin=allowed)
        if not reports and claim is None:
            return
        self._heartbeat_ns = SYSTEM.mono_ns()
        self._oldest_outcome_ns = 0
        step = ledger_protocol.Exchange(
            reports,
            claim,
            0 if self._grants else WAIT_MS,
            *self.metrics.take_delta(),
            [granted.epoch for granted in self._grants],
            self._tokens_used,
            self._tokens_estimated,
        )
        self._tokens_used = self._tokens_estimated = 0
        self.exchanges += 1
        self._request_thread.submit(step, *attached)

    def _grant_report(
        self, granted: GrantedRows, begin: int
    ) -> tuple[ledger_protocol.GrantReport, bytes]:
        granted.last_report_no += 1
        done, others, data, seqs, lo = self._row_report(granted)
        begins = row_reports.to_ranges(granted.seqs[granted.begun : granted.begun + begin])
        digest = blake2b(data, digest_size=16)
        digest.update(pack([done, begins, [(other.error, other.raw) for other in others]]))
        return (
            ledger_protocol.GrantReport(
                granted.epoch,
                granted.last_report_no,
                digest.digest(),
                done,
                begins,
                seqs,
                lo,
                others,
                len(data),
            ),
            data,
        )

    def _row_report(self, granted: GrantedRows) -> row_reports.RowReport:
        """Report finished rows of a grant. An oversized report is split; the rest waits for the
        next frame.
        """
        if granted.batches:
            return self._batch_report(granted)
        results, granted.results = (
            granted.results[: row_reports.REPORT_ROWS_MAX],
            granted.results[row_reports.REPORT_ROWS_MAX :],
        )
        while True:
            report = row_reports.report_rows(results, self.caller)
            if len(report.data) + row_reports.error_bytes(report.resultless) <= self._report_bytes:
                break
            if len(results) == 1:
                if len(report.data) <= row_reports.RESULT_BYTES_MAX:
                    break
                results = [
                    self.caller.as_schema_failure(
                        results[0], row_reports.too_large_text(len(report.data))
                    )
                ]
                continue
            half = len(results) // 2
            granted.results = results[half:] + granted.results
            results = results[:half]
        granted.reported += len(results)
        return report

    def _batch_report(self, granted: GrantedRows) -> row_reports.RowReport:
        piece = granted.batches.pop(0)
        while True:
            report = row_reports.report_batch(piece)
            if len(report.data) <= self._report_bytes:
                break
            half = piece.batch.num_rows // 2
            if not half:
                if len(report.data) <= row_reports.RESULT_BYTES_MAX:
                    break
                piece = row_reports.fail_oversized(
                    piece, row_reports.too_large_text(len(report.data))
                )
                continue
            granted.batches.insert(0, row_reports.slice_batch(piece, half, piece.batch.num_rows))
            piece = row_reports.slice_batch(piece, 0, half)._replace(resultless=piece.resultless)
        granted.reported += len(piece.seqs) + len(piece.resultless)
        return report

    def _on_reply(self, reply_or_error: Any) -> None:
        self._request_thread.busy = False
        if isinstance(reply_or_error, Exception):
            raise reply_or_error
        answer, attached = reply_or_error
        now_ns = SYSTEM.mono_ns()
        if isinstance(answer, ledger_protocol.TokensGranted):
            self._reserved_calls = answer.count
            self._tokens_wait_ns = now_ns + answer.wait_ms * 1_000_000
        elif isinstance(answer, ledger_protocol.HeartbeatReply):
            for held in self._grants:
                held.lost = held.lost or held.epoch in answer.lost
        elif isinstance(answer, ledger_protocol.ExchangeReply):
            self._on_exchange_reply(answer, attached, now_ns)
        self._grants = [held for held in self._grants if self._is_active(held)]

    def _is_active(self, granted: GrantedRows) -> bool:
        return not granted.lost and granted.reported < len(granted.seqs)

    def _on_exchange_reply(
        self, answer: ledger_protocol.ExchangeReply, attached: memoryview | pa.Table, now_ns: int
    ) -> None:
        for (granted, begin), report_reply in zip(
            self._sent_reports, answer.report_replies, strict=True
        ):
            if report_reply.lost:
                granted.lost = True
            elif begin and "stop" not in (answer.state, self._state):
                granted.begun += begin
        if "stop" in (answer.state, self._state):
            self._stop()
            return
        self._adapt_window()
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
            self._tokens -= self._rate_tokens(answer.grant.begun)

    def _on_idle(self, answer: ledger_protocol.ExchangeReply, now_ns: int) -> None:
        """Free the slot when it is not needed: all rows are in backoff, or other children can call
        all remaining rows. The driver starts a job again when rows are due.
        """
        self._idle_since_ns = self._idle_since_ns or now_ns
        calls = answer.holders * self.job.concurrency * (self.job.batch_rows or 1)
        spare = not answer.holders or answer.open_rows <= calls
        if self.job.idle_s and spare and now_ns - self._idle_since_ns >= self.job.idle_s * 1e9:
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
        if self.job.token_limited:
            set_token_estimates(granted, self._estimate, batch=bool(self.job.batch_rows))
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

    def _adapt_window(self) -> None:
        if self.job.batch_rows or self.job.rate or self.metrics.mean_us == UNKNOWN_MEAN_US:
            return
        if self._window_rows < self._window_goal:
            # After a death the window grows again with each report.
            self._window_rows = min(self._window_rows * 2, self._window_goal)
            return
        if self.metrics.mean_us < FAST_US and self._window_rows < WINDOW_ROWS_MAX:
            self._window_rows = min(self._window_rows * 4, WINDOW_ROWS_MAX)
            self._unit_rows = max(self._window_rows // (4 * self.job.concurrency), 1)
        elif self.metrics.mean_us >= FAST_US * 4:
            ahead = max(self._calls_within(BEGIN_AHEAD_S), self.job.concurrency)
            self._window_rows, self._unit_rows = min(self.job.flush_rows, ahead), 1
        else:
            self._window_rows = max(self._window_rows, self.job.flush_rows)

    def _calls_within(self, seconds: float) -> int:
        """Return how many calls end within this time, at the current mean duration."""
        return int(seconds * 1e6 * self.job.concurrency / max(self.metrics.mean_us, 1.0))

    def _pause_s(self, heartbeat_ns: int) -> float:
        if self._request_thread.busy:
            return heartbeat_ns / 1e9
        now_ns = SYSTEM.mono_ns()
        until = [now_ns + heartbeat_ns]
        if self._grants:
            until.append(self._heartbeat_ns + heartbeat_ns)
        if self._oldest_outcome_ns:
            until.append(self._oldest_outcome_ns + self._report_ns)
        if self.job.rate and self._tokens_wait_ns > now_ns:
            until.append(self._tokens_wait_ns)
        if not self._grants:
            return 0.0
        if self._claim_again_ns > now_ns:
            until.append(self._claim_again_ns)
        return max((min(until) - now_ns) / 1e9, 0.001)


class _RequestThread:
    """A thread that sends one request at a time. Replies arrive in the event queue."""

    def __init__(self, client: LedgerClient | SpoolClient, events: queue.SimpleQueue[Any]) -> None:
        self.busy = False
        self._client = client
        self._events = events
        self._requests: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="ledger requests", daemon=True).start()

    def submit(self, message: ledger_protocol.WireMessage, *attached: bytes) -> None:
        assert not self.busy
        self.busy = True
        self._requests.put((message, *attached))

    def close(self) -> None:
        self._requests.put(None)

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self._events.put(self._client.request(*request))
            except (HoldfastError, OSError) as error:
                self._events.put(error)


def _drop_unbegun(granted: GrantedRows) -> None:
    granted.seqs = granted.seqs[: granted.begun]
