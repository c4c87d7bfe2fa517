"""What a child does for one task: claim rows, run them, report them, until there are none.

- Begun and not reported are at most `flush_rows + concurrency` rows, or `1 + concurrency` batches:
  that is what a crash may repeat. Rows are begun in the ledger before their calls start.
- Reports never block calls: one request is under way at a time, in a thread of its own, and
  carries whatever ended meanwhile, what begins next, and a claim when rows run low.
- A child that holds a grant never waits for another; only an empty-handed one does.
- A lost grant (fenced) is dropped: nothing more of it is started, nothing of it is told.
- A suspect comes alone: the child ends what it runs, tells it, then begins the suspect.
- Of slow calls fewer are begun and claimed: as many as end within `BEGIN_S` and `CLAIM_S`.
- Calls that take microseconds would be throttled by that window, so it grows while the mean call is
  under `FAST_US`: what a crash repeats then is a few milliseconds of work.
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
from holdfast.spark import row_reports, wire
from holdfast.spark.call_figures import UNKNOWN_US, CallFigures
from holdfast.spark.call_slots import CallSlots, Silence, seq_of, timed_out
from holdfast.spark.caller import Caller
from holdfast.spark.client import Address, Client
from holdfast.spark.code import Estimate
from holdfast.spark.estimates import set_prices
from holdfast.spark.pool import Held, Loop, News, Pool, Settled, Threads, Unit, settle_unfit
from holdfast.spark.rows import RowReader, table_of
from holdfast.spark.spool_access import SpoolAccess, line_to

if TYPE_CHECKING:
    from holdfast.spark.spool_line import SpoolLine

FAST_US = 20
WINDOW_ROWS_MAX = 8192
# Until it is known how long a call takes, so many rows (or one for each call at once) are begun.
FIRST_ROWS = 16
# Rows are begun, and claimed, for about so long ahead: a slow node must not sit on them.
BEGIN_S = 0.25
CLAIM_S = 1.0
# What ended is told when it is so many rows, or so old, or when calls would run dry.
TELL_ROWS = 32
TELL_NS = 250_000_000
# Each report is an object of the spool: fewer of them.
SPOOL_TELL_NS = 1_000_000_000
WAIT_MS = 500
PAUSE_S_MAX = 0.25
# An `async def` is cancelled at its time; so much later its loop is blocked, or it does not let go.
CANCEL_S = 1.0
LOOK_NS = 50_000_000


# How a duty ends: the run is over; it stops; the time of the task is up.
ENDED = ("over", "stop", "turn")


class Duty(msgspec.Struct, frozen=True):
    """What a child is to do: which run, which rows, how many at once."""

    address: Address
    run_id: str
    lo: int
    hi: int
    schema: str
    concurrency: int
    flush_rows: int
    batch_rows: int
    rate: bool
    timeout_s: float
    # Children of this task that died before: the more, the smaller the window.
    deaths: int = 0
    # Where the worker of Spark finds modules: what was shipped with addPyFile, for one.
    paths: list[str] = []
    # Only load the function and reach the ledger; no row is asked for.
    probe: bool = False
    # After so long nothing more is begun, and the task gives its slot back. 0: at the end of the run.
    turn_s: float = 0.0
    # After so long without a row, when tasks that have some suffice for the rest. 0: at the end of the run.
    idle_s: float = 0.0
    lease_s: float = 15.0
    # The child's name at the ledger; its successor has the same, and takes over what it held.
    owner: str = ""
    # Rows of the predecessor that were out of time, and ended with it. None: there was none.
    timed_out: list[int] | None = None
    # Calls have leave by the estimate of their tokens; `rate` is set, too.
    priced: bool = False
    # Where blocks and results are, unless the ledger service has them.
    spool: SpoolAccess | None = None
    # Of a probe: an object that the driver has put there.
    spool_marker: bytes = b""


class HungCall(Exception):
    """Calls are out of time and cannot be stopped but with their process; `seqs` are their rows."""

    def __init__(self, seqs: list[int], timeout_s: float) -> None:
        super().__init__(f"calls took longer than timeout_s={timeout_s:g}: rows {seqs}")
        self.seqs = seqs


class Engine:
    def __init__(
        self,
        duty: Duty,
        caller: Caller,
        client: Client,
        orphaned: threading.Event | None = None,
        slots: CallSlots | None = None,
        estimate: Estimate = 0,
    ) -> None:
        self.duty = duty
        self._orphaned = orphaned or threading.Event()
        self.caller = caller
        self.client = client
        self._spool_line = line_to(duty.spool, client, duty.run_id, duty.lease_s)
        self._asked = self._spool_line or client
        self._tell_ns, self._report_bytes = TELL_NS, row_reports.REPORT_BYTES_MAX
        if self._spool_line is not None:
            self._tell_ns, self._report_bytes = SPOOL_TELL_NS, row_reports.SPOOL_BYTES_MAX
        # Of this duty, for Spark's own figures.
        self.steps = 0
        self.figures = CallFigures()
        self._news: queue.SimpleQueue[Any] = queue.SimpleQueue()
        make = Loop if caller.is_async else Threads
        self._slots = slots or CallSlots()
        self._silence = Silence(self._slots)
        self._pool: Pool = make(
            caller, self._news, duty.concurrency, self._slots.watches(duty.concurrency)
        )
        self._line = _Courier(self._asked, self._news)
        self._held: list[Held] = []
        self._flush = max(duty.flush_rows >> min(duty.deaths * 2, 16), 1)
        if not duty.rate:
            self._flush = min(self._flush, max(FIRST_ROWS, duty.concurrency))
        self._careful = duty.flush_rows if duty.deaths else 0
        self._chunk = 1
        self._tokens = 0
        self._tokens_wait_ns = 0
        # Calls that have leave to start from `_tokens_wait_ns` on.
        self._reserved = 0
        self._estimate = estimate
        # Of the calls that ended: tokens that they used, and that they had leave for.
        self._used = self._priced = 0
        self._ended_ns = 0
        self._state = "granted"
        self._hung = False
        self._look_ns = 0
        self._claim_again_ns = 0
        # Since when there was nothing to do here; 0: there is.
        self._idle_ns = 0
        self._beat_ns = SYSTEM.mono_ns()
        self._sent: list[tuple[Held, int]] = []

    def run(self) -> str:
        """Until nothing is left to do here; why it ended: over, stop or turn."""
        welcome = self.client.connect()
        beat_ns = welcome.lease_ns // 3
        turn_ns = SYSTEM.mono_ns() + int(self.duty.turn_s * 1e9) if self.duty.turn_s else 0
        try:
            if self.duty.timed_out is not None:
                self._inherit()
            while True:
                self._slots.tick()
                if self._orphaned.is_set() and self._drained():
                    return "stop"
                if turn_ns and self._state not in ("over", "stop") and SYSTEM.mono_ns() >= turn_ns:
                    self._stop("turn")
                self._feed()
                if not self._line.busy:
                    self._say(beat_ns)
                if not self._held and not self._line.busy and self._state in ENDED:
                    return self._state
                self._hear(min(self._pause_s(beat_ns), PAUSE_S_MAX))
                self._check_hung()
        finally:
            self._line.close()
            self._pool.close()
            if self._spool_line is not None:
                self._spool_line.close()

    def _inherit(self) -> None:
        """Take over what the predecessor held: its begun rows are called again, in the same attempt,
        and those that were out of time are told."""
        while True:
            known = [held.epoch for held in self._held]
            answer, attached = self._asked.ask(wire.Inherit(known))
            if answer.grant is None:
                return
            held = self._take(answer.grant, attached)
            self._give_up(held)
            self._held.append(held)

    def _drained(self) -> bool:
        """The worker is gone: calls under way end and are told, others are not started."""
        self._stop()
        self._pool.draining = True
        return not (self._pool.running or self._unreported() or self._line.busy)

    def _stop(self, state: str = "stop") -> None:
        """Begin nothing more. What is begun ends and is told; the rest is no longer ours."""
        self._state = state
        for held in self._held:
            _cut(held)

    # --- calls ------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Start what is begun."""
        units: list[Unit] = []
        for held in self._held:
            while held.started < held.begun:
                if self.duty.batch_rows:
                    hi = held.begun
                else:
                    hi = min(held.started + self._chunk, held.begun)
                units.append(self._unit(held, held.started, hi))
                held.started = hi
        if units:
            self._pool.start(units)

    def _unit(self, held: Held, lo: int, hi: int) -> Unit:
        """With the rows of it. A row that cannot be converted fails with the reason, and is not called."""
        if self.duty.batch_rows:
            return Unit(held, lo, hi)
        rows = held.rows.take(hi - lo)
        if held.rows.unfit:
            settle_unfit(held)
        return Unit(held, lo, hi, rows)

    def _hear(self, pause_s: float) -> None:
        """Take what came: ended calls, an answer; wait for the first of it."""
        try:
            found = self._news.get(timeout=pause_s)
        except queue.Empty:
            return
        while True:
            if isinstance(found, News):
                self._ended(found)
            elif isinstance(found, list):
                for news in found:
                    self._ended(news)
            else:
                self._answered(found)
            try:
                found = self._news.get_nowait()
            except queue.Empty:
                return

    def _ended(self, news: News) -> None:
        held = news.unit.held
        if held.dead:
            return
        if not self._ended_ns:
            self._ended_ns = SYSTEM.mono_ns()
        if news.batch is not None:
            held.batches += row_reports.pieces(news.batch, self._report_bytes)
            held.ended += news.unit.hi - news.unit.lo
            self.figures.add(news.batch.calls, news.batch.cost, news.batch.micros)
            self._settle(held, held.seqs[0], news.batch.tokens, news.batch.micros)
            return
        held.results += news.ended
        held.ended += len(news.ended)
        self.figures.add_rows(news.ended, self.caller.calls_each)
        for ended in news.ended:
            if ended.tokens is not None or held.prices:
                self._settle(held, ended.seq, ended.tokens, ended.micros)

    def _settle(self, held: Held, seq: int, used: int | None, micros: int) -> None:
        """What a call used, beside what it had leave for; the estimate counts if it did not say."""
        price = held.prices.pop(seq, 0)
        self._priced += price
        if micros >= 0:
            self._used += price if used is None else used

    def _check_hung(self) -> None:
        """A call beyond its time: begin nothing more, let the others end, then leave without it."""
        now_ns = SYSTEM.mono_ns()
        if now_ns < self._look_ns:
            return
        self._look_ns = now_ns + LOOK_NS
        self._silence.look(now_ns)
        allowed_s = self.duty.timeout_s + (CANCEL_S if self.caller.is_async else 0.0)
        hung = self._pool.stuck(self._silence.beyond(allowed_s * 1e9, now_ns))
        if hung:
            # For good: what waits in the pool is not started any more, and left to the successor.
            self._hung = self._pool.draining = True
        if not self._hung or self._unreported() or self._line.busy:
            return
        if self._pool.blocked or hung.keys() >= self._pool.running.keys():
            raise HungCall([seq_of(row) for row in hung.values()], self.duty.timeout_s)

    # --- the ledger -------------------------------------------------------------------------

    def _say(self, beat_ns: int) -> None:
        """Send the next request, if there is reason for one."""
        now_ns = SYSTEM.mono_ns()
        if self._reserved and now_ns >= self._tokens_wait_ns:
            self._tokens, self._reserved = self._tokens + self._reserved, 0
        if self._wants_tokens(now_ns):
            prices = self._next_prices() if self.duty.priced else []
            count = len(prices) or self._window() // (self.duty.batch_rows or 1)
            self._line.ask(wire.Tokens(count, prices))
            return
        unreported = self._unreported()
        running = self._begun_unreported() - unreported
        room = self._room(unreported)
        waiting = sum(len(held.seqs) - held.begun for held in self._held)
        claim = self._wants_claim(now_ns, waiting)
        dry = running <= self._busy_at_least() and (unreported or (waiting and room))
        due = unreported >= self._tell_rows() or (
            unreported and now_ns - self._ended_ns >= self._tell_ns
        )
        # A claim is worth a frame of its own only when calls are about to run dry.
        if dry or due or (claim and running <= self._busy_at_least()):
            self._step(room, claim)
        elif self._held and now_ns - self._beat_ns >= beat_ns:
            self._beat_ns = now_ns
            self._line.ask(wire.Beat([held.epoch for held in self._held]))

    def _busy_at_least(self) -> int:
        """With so many calls at work, or begun, more are asked for."""
        if self.duty.batch_rows:
            return self.duty.batch_rows * self.duty.concurrency
        return self.duty.concurrency + self._flush // 2

    def _tell_rows(self) -> int:
        return max(min(TELL_ROWS, self._flush), self._flush // 4)

    def _window(self) -> int:
        """Rows that may be begun and not reported."""
        # Under a rate nothing is begun that cannot start now: it would be in a burst, later.
        if self.duty.batch_rows:
            return self.duty.batch_rows * (self.duty.concurrency + (not self.duty.rate))
        return self.duty.concurrency + (0 if self.duty.rate else self._flush)

    def _room(self, unreported: int) -> int:
        """How many rows may be begun by a step that reports what ended."""
        if self._hung:
            return 0
        room = self._window() - (self._begun_unreported() - unreported)
        if not self.duty.rate:
            return room
        return min(room, self._tokens * (self.duty.batch_rows or 1))

    def _begins(self, rows: int, room: int) -> int:
        """How many of a grant's rows to begin: a batch whole, or not at all."""
        if self.duty.batch_rows:
            return rows if rows <= room else 0
        return min(rows, room)

    def _price(self, begun: int) -> int:
        """What a begin takes of the rate: a token a call."""
        if not self.duty.rate or not begun:
            return 0
        return 1 if self.duty.batch_rows else begun

    def _begun_unreported(self) -> int:
        return sum(held.begun - held.reported for held in self._held)

    def _unreported(self) -> int:
        return sum(held.ended - held.reported for held in self._held)

    def _wants_tokens(self, now_ns: int) -> bool:
        return (
            self.duty.rate
            and not self._reserved
            and self._tokens < max(self.duty.concurrency // 2, 1)
            and bool(self._held)
            and self._not_begun() > (self._tokens if self.duty.priced else 0)
            and now_ns >= self._tokens_wait_ns
            and self._unreported() < self._tell_rows()
        )

    def _not_begun(self) -> int:
        """Calls that are held and not begun."""
        waiting = [len(held.seqs) - held.begun for held in self._held]
        return sum(map(bool, waiting)) if self.duty.batch_rows else sum(waiting)

    def _next_prices(self) -> list[int]:
        """Of the calls that begin next and have no leave yet, as many as may be under way at once."""
        calls = (
            held.prices.get(seq, 0)
            for held in self._held
            if held.begun < len(held.seqs)
            for seq in (held.seqs[:1] if self.duty.batch_rows else held.seqs[held.begun :])
        )
        most = self._tokens + self._window() // (self.duty.batch_rows or 1)
        return list(itertools.islice(calls, self._tokens, most))

    def _wants_claim(self, now_ns: int, waiting: int) -> wire.Claim | None:
        if self._state in ENDED or self._hung:
            return None
        # The empty-handed ask at once: they are made to wait where rows come free.
        if self._held and now_ns < self._claim_again_ns:
            return None
        if any(held.alone for held in self._held):
            return None
        window = self._window()
        if self.duty.batch_rows:
            if len(self._held) > self.duty.concurrency:
                return None
            rows = self.duty.batch_rows
        else:
            if waiting >= window:
                return None
            rows = max(window, min(self._flush * 8, self._ended_in(CLAIM_S)))
        return wire.Claim(rows, 0, self.duty.lo, self.duty.hi)

    def _step(self, room: int, claim: wire.Claim | None) -> None:
        moves: list[wire.Move] = []
        attached: list[bytes] = []
        self._sent = []
        # Rows that are not begun may lie beside a suspect; it is what runs that must not.
        drained = not any(held.begun > held.ended for held in self._held if not held.alone)
        for held in self._held:
            begin = 0
            if room > 0 and held.begun < len(held.seqs):
                if held.alone:
                    # What ended is told in the same commit.
                    begin = len(held.seqs) if drained else 0
                elif not any(other.alone for other in self._held):
                    begin = self._begins(len(held.seqs) - held.begun, room)
            if not begin and held.ended == held.reported:
                continue
            move, data = self._move(held, begin)
            room -= begin
            self._tokens -= self._price(begin)
            moves.append(move)
            attached.append(data)
            self._sent.append((held, begin))
        if claim is not None:
            allowed = 0 if any(held.alone for held in self._held) else max(room, 0)
            if self.duty.priced:
                allowed = 0  # what they will use is not known yet
            claim = msgspec.structs.replace(claim, begin=allowed)
        if not moves and claim is None:
            return
        self._beat_ns = SYSTEM.mono_ns()
        self._ended_ns = 0
        step = wire.Step(
            moves,
            claim,
            0 if self._held else WAIT_MS,
            *self.figures.taken(),
            [held.epoch for held in self._held],
            self._used,
            self._priced,
        )
        self._used = self._priced = 0
        self.steps += 1
        self._line.ask(step, *attached)

    def _move(self, held: Held, begin: int) -> tuple[wire.Move, bytes]:
        held.n += 1
        done, others, data, seqs, lo = self._report(held)
        begins = row_reports.ranges_of(held.seqs[held.begun : held.begun + begin])
        digest = blake2b(data, digest_size=16)
        digest.update(pack([done, begins, [(other.error, other.raw) for other in others]]))
        return (
            wire.Move(
                held.epoch, held.n, digest.digest(), done, begins, seqs, lo, others, len(data)
            ),
            data,
        )

    def _report(self, held: Held) -> row_reports.Report:
        """What ended of a grant and was not told yet; the rest of much waits for the next frame."""
        if held.batches:
            return self._batch_report(held)
        results, held.results = (
            held.results[: row_reports.REPORT_ROWS_MAX],
            held.results[row_reports.REPORT_ROWS_MAX :],
        )
        while True:
            report = row_reports.row_report(results, self.caller)
            if len(report.data) + row_reports.told_bytes(report.others) <= self._report_bytes:
                break
            if len(results) == 1:
                if len(report.data) <= row_reports.RESULT_BYTES_MAX:
                    break
                results = [
                    self.caller.wrong_schema(results[0], row_reports.too_large(len(report.data)))
                ]
                continue
            half = len(results) // 2
            held.results = results[half:] + held.results
            results = results[:half]
        held.reported += len(results)
        return report

    def _batch_report(self, held: Held) -> row_reports.Report:
        piece = held.batches.pop(0)
        while True:
            report = row_reports.batch_report(piece)
            if len(report.data) <= self._report_bytes:
                break
            half = piece.batch.num_rows // 2
            if not half:
                if len(report.data) <= row_reports.RESULT_BYTES_MAX:
                    break
                piece = row_reports.without_result(piece, row_reports.too_large(len(report.data)))
                continue
            held.batches.insert(0, row_reports.slice_of(piece, half, piece.batch.num_rows))
            piece = row_reports.slice_of(piece, 0, half)._replace(others=piece.others)
        held.reported += len(piece.seqs) + len(piece.others)
        return report

    def _answered(self, found: Any) -> None:
        self._line.busy = False
        if isinstance(found, Exception):
            raise found
        answer, attached = found
        now_ns = SYSTEM.mono_ns()
        if isinstance(answer, wire.Allowed):
            self._reserved = answer.count
            self._tokens_wait_ns = now_ns + answer.wait_ms * 1_000_000
        elif isinstance(answer, wire.Beaten):
            for held in self._held:
                held.dead = held.dead or held.epoch in answer.lost
        elif isinstance(answer, wire.Stepped):
            self._stepped(answer, attached, now_ns)
        self._held = [held for held in self._held if self._keeps(held)]

    def _keeps(self, held: Held) -> bool:
        return not held.dead and held.reported < len(held.seqs)

    def _stepped(self, answer: wire.Stepped, attached: memoryview | pa.Table, now_ns: int) -> None:
        for (held, begin), moved in zip(self._sent, answer.moved, strict=True):
            if moved.lost:
                held.dead = True
            elif begin and "stop" not in (answer.state, self._state):
                held.begun += begin
        if "stop" in (answer.state, self._state):
            self._stop()
            return
        self._adapt()
        if answer.state == "none":
            return
        self._state = answer.state
        self._claim_again_ns = now_ns + answer.wait_ms * 1_000_000
        if answer.state == "wait" and not self._held:
            self._idle(answer, now_ns)
        else:
            self._idle_ns = 0
        if answer.grant is not None:
            self._held.append(self._take(answer.grant, attached))
            self._tokens -= self._price(answer.grant.begun)

    def _idle(self, answer: wire.Stepped, now_ns: int) -> None:
        """Give the slot back when it is not needed: all rows rest, or others can call all that is left.
        The driver starts a job again when rows are due."""
        self._idle_ns = self._idle_ns or now_ns
        calls = answer.holders * self.duty.concurrency * (self.duty.batch_rows or 1)
        spare = not answer.holders or answer.open_rows <= calls
        if self.duty.idle_s and spare and now_ns - self._idle_ns >= self.duty.idle_s * 1e9:
            self._stop("turn")

    def _take(self, grant: wire.Granted, attached: memoryview | pa.Table) -> Held:
        table = attached if isinstance(attached, pa.Table) else table_of(attached)
        spans = [range(part.lo, part.hi) for part in grant.parts]
        seqs = spans[0] if len(spans) == 1 else list(itertools.chain.from_iterable(spans))
        attempts = list(
            itertools.chain.from_iterable(
                itertools.repeat(part.attempt, part.hi - part.lo) for part in grant.parts
            )
        )
        origins = {
            seq: (run_id, first + seq - lo)
            for lo, hi, run_id, first in grant.origins
            for seq in range(lo, hi)
        }
        rows = table if self.duty.batch_rows else RowReader(table)
        held = Held(
            grant.epoch, seqs, attempts, rows, grant.alone, grant.begun, n=grant.n, origins=origins
        )
        if self.duty.priced:
            set_prices(held, self._estimate, batch=bool(self.duty.batch_rows))
        return held

    def _give_up(self, held: Held) -> None:
        """Rows of an inherited grant that were out of time; of a batch, all that were begun."""
        late = set(self.duty.timed_out or ()).intersection(held.seqs[: held.begun])
        if not late:
            return
        error = timed_out(self.duty.timeout_s)
        spent_us = int(self.duty.timeout_s * 1e6)
        told = Settled(int(self.caller.class_of(error)), f"TimeoutError: {error}", spent_us)
        for at in range(held.begun):
            if self.duty.batch_rows or held.seqs[at] in late:
                held.settled[at] = told

    def _adapt(self) -> None:
        if self.duty.batch_rows or self.duty.rate or self.figures.mean_us == UNKNOWN_US:
            return
        if self._flush < self._careful:
            # After a death the window opens again, report by report.
            self._flush = min(self._flush * 2, self._careful)
            return
        if self.figures.mean_us < FAST_US and self._flush < WINDOW_ROWS_MAX:
            self._flush = min(self._flush * 4, WINDOW_ROWS_MAX)
            self._chunk = max(self._flush // (4 * self.duty.concurrency), 1)
        elif self.figures.mean_us >= FAST_US * 4:
            ahead = max(self._ended_in(BEGIN_S), self.duty.concurrency)
            self._flush, self._chunk = min(self.duty.flush_rows, ahead), 1
        else:
            self._flush = max(self._flush, self.duty.flush_rows)

    def _ended_in(self, seconds: float) -> int:
        """How many calls end in this time, as they went so far."""
        return int(seconds * 1e6 * self.duty.concurrency / max(self.figures.mean_us, 1.0))

    def _pause_s(self, beat_ns: int) -> float:
        if self._line.busy:
            return beat_ns / 1e9
        now_ns = SYSTEM.mono_ns()
        until = [now_ns + beat_ns]
        if self._held:
            until.append(self._beat_ns + beat_ns)
        if self._ended_ns:
            until.append(self._ended_ns + self._tell_ns)
        if self.duty.rate and self._tokens_wait_ns > now_ns:
            until.append(self._tokens_wait_ns)
        if not self._held:
            return 0.0
        if self._claim_again_ns > now_ns:
            until.append(self._claim_again_ns)
        return max((min(until) - now_ns) / 1e9, 0.001)


class _Courier:
    """One request under way at a time, in a thread of its own; answers arrive in the news."""

    def __init__(self, client: Client | SpoolLine, news: queue.SimpleQueue[Any]) -> None:
        self.busy = False
        self._client = client
        self._news = news
        self._todo: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="courier", daemon=True).start()

    def ask(self, message: wire.Message, *attached: bytes) -> None:
        assert not self.busy
        self.busy = True
        self._todo.put((message, *attached))

    def close(self) -> None:
        self._todo.put(None)

    def _work(self) -> None:
        while (asked := self._todo.get()) is not None:
            try:
                self._news.put(self._client.ask(*asked))
            except (HoldfastError, OSError) as error:
                self._news.put(error)


def _cut(held: Held) -> None:
    held.seqs = held.seqs[: held.begun]


__all__ = ["Address", "Duty", "Engine", "HungCall"]
