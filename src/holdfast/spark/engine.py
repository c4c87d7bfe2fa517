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
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from holdfast.clock import SYSTEM
from holdfast.codec import pack
from holdfast.errors import HoldfastError
from holdfast.ledger.classes import ErrorClass
from holdfast.ledger.ranges import Range
from holdfast.ledger.records import Done
from holdfast.ledger.states import State
from holdfast.spark import raw_values, wire
from holdfast.spark.caller import BatchEnded, Caller, Ended
from holdfast.spark.client import Address, Client
from holdfast.spark.pool import Held, Loop, News, Pool, Threads, Unit
from holdfast.spark.rows import message_of, rows_of, table_of

FAST_US = 20
UNKNOWN_US = 1e9
WINDOW_ROWS_MAX = 8192
# Until it is known how long a call takes, so many rows (or one for each call at once) are begun.
FIRST_ROWS = 16
# Rows are begun, and claimed, for about so long ahead: a slow node must not sit on them.
BEGIN_S = 0.25
CLAIM_S = 1.0
# What ended is told when it is so many rows, or so old, or when calls would run dry.
TELL_ROWS = 32
TELL_NS = 250_000_000
WAIT_MS = 500
PAUSE_S_MAX = 0.25
# One report of a grant: so many rows, unless they are consecutive, and about so many bytes; a single
# row may be larger, and is stored in parts.
REPORT_ROWS_MAX = 5000
REPORT_BYTES_MAX = 8 * 1024 * 1024
RESULT_BYTES_MAX = 64 * 1024 * 1024
LATENCY_BUCKETS = 32


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


class HungCall(Exception):
    """A call ran into its time-out and cannot be stopped but with its process."""


class Engine:
    def __init__(
        self,
        duty: Duty,
        caller: Caller,
        client: Client,
        orphaned: threading.Event | None = None,
    ) -> None:
        self.duty = duty
        self._orphaned = orphaned or threading.Event()
        self.caller = caller
        self.client = client
        self.steps = 0
        self._news: queue.SimpleQueue[Any] = queue.SimpleQueue()
        make = Loop if caller.is_async else Threads
        self._pool: Pool = make(caller, self._news, duty.concurrency)
        self._line = _Courier(client, self._news)
        self._held: list[Held] = []
        self._flush = max(duty.flush_rows >> min(duty.deaths * 2, 16), 1)
        if not duty.rate:
            self._flush = min(self._flush, max(FIRST_ROWS, duty.concurrency))
        self._careful = duty.flush_rows if duty.deaths else 0
        self._chunk = 1
        self._tokens = 0
        self._tokens_wait_ns = 0
        self._ended_ns = 0
        self._calls = 0
        self._cost = 0.0
        self._latency = [0] * LATENCY_BUCKETS
        self._mean_us = UNKNOWN_US
        self._state = "granted"
        self._hung = False
        self._claim_again_ns = 0
        self._beat_ns = SYSTEM.mono_ns()
        self._sent: list[tuple[Held, int]] = []

    def run(self) -> str:
        """Until nothing is left to do here; why it ended: over, stop or turn."""
        welcome = self.client.connect()
        beat_ns = welcome.lease_ns // 3
        turn_ns = SYSTEM.mono_ns() + int(self.duty.turn_s * 1e9) if self.duty.turn_s else 0
        try:
            while True:
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
                units.append(Unit(held, held.started, hi))
                held.started = hi
        if units:
            self._pool.start(units)

    def _hear(self, pause_s: float) -> None:
        """Take what came: ended calls, an answer; wait for the first of it."""
        try:
            found = self._news.get(timeout=pause_s)
        except queue.Empty:
            return
        while True:
            if isinstance(found, News):
                self._ended(found)
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
            held.batches += _pieces(news.batch)
            held.ended += news.unit.hi - news.unit.lo
            self._count(news.batch.calls, news.batch.cost, news.batch.micros)
            return
        held.results += news.ended
        held.ended += len(news.ended)
        each = self.caller.calls_each
        for ended in news.ended:
            self._count(each, ended.cost, ended.micros)

    def _count(self, calls: int, cost: float, micros: int) -> None:
        self._calls += calls
        self._cost += cost
        self._latency[min(micros.bit_length(), LATENCY_BUCKETS) - 1 if micros else 0] += calls
        self._mean_us = micros if self._mean_us > 1e8 else self._mean_us * 0.98 + micros * 0.02

    def _check_hung(self) -> None:
        """A call beyond its time: begin nothing more, tell what ended, then leave without it."""
        oldest = self._pool.oldest_ns()
        # An `async def` is cancelled at its time; one that blocks the loop is not.
        allowed_s = self.duty.timeout_s * (2 if self.caller.is_async else 1)
        self._hung = oldest is not None and SYSTEM.mono_ns() - oldest > allowed_s * 1e9
        if self._hung and not self._unreported() and not self._line.busy:
            raise HungCall(f"a call took longer than timeout_s={self.duty.timeout_s}")

    # --- the ledger -------------------------------------------------------------------------

    def _say(self, beat_ns: int) -> None:
        """Send the next request, if there is reason for one."""
        now_ns = SYSTEM.mono_ns()
        if self._wants_tokens(now_ns):
            self._line.ask(wire.Tokens(self._window() // (self.duty.batch_rows or 1)))
            return
        unreported = self._unreported()
        running = self._begun_unreported() - unreported
        room = self._room(unreported)
        waiting = sum(len(held.seqs) - held.begun for held in self._held)
        claim = self._wants_claim(now_ns, waiting)
        dry = running <= self._busy_at_least() and (unreported or (waiting and room))
        due = unreported >= self._tell_rows() or (unreported and now_ns - self._ended_ns >= TELL_NS)
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
            and self._tokens < max(self.duty.concurrency // 2, 1)
            and bool(self._held)
            and any(held.begun < len(held.seqs) for held in self._held)
            and now_ns >= self._tokens_wait_ns
            and self._unreported() < self._tell_rows()
        )

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
            claim = msgspec.structs.replace(claim, begin=allowed)
        if not moves and claim is None:
            return
        self._beat_ns = SYSTEM.mono_ns()
        self._ended_ns = 0
        step = wire.Step(
            moves,
            claim,
            0 if self._held else WAIT_MS,
            self._calls,
            self._cost,
            self._latency,
            [held.epoch for held in self._held],
        )
        self._calls, self._cost, self._latency = 0, 0.0, [0] * LATENCY_BUCKETS
        self.steps += 1
        self._line.ask(step, *attached)

    def _move(self, held: Held, begin: int) -> tuple[wire.Move, bytes]:
        held.n += 1
        done, others, data, seqs, lo = self._report(held)
        begins = ranges_of(held.seqs[held.begun : held.begun + begin])
        digest = blake2b(data, digest_size=16)
        digest.update(pack([done, begins, [(other.error, other.raw) for other in others]]))
        return (
            wire.Move(
                held.epoch, held.n, digest.digest(), done, begins, seqs, lo, others, len(data)
            ),
            data,
        )

    def _report(self, held: Held) -> Report:
        """What ended of a grant and was not told yet; the rest of much waits for the next frame."""
        if held.batches:
            return self._batch_report(held)
        results, held.results = held.results[:REPORT_ROWS_MAX], held.results[REPORT_ROWS_MAX:]
        while True:
            report = _row_report(results, self.caller)
            if len(report.data) + _told_bytes(report.others) <= REPORT_BYTES_MAX:
                break
            if len(results) == 1:
                if len(report.data) <= RESULT_BYTES_MAX:
                    break
                results = [self.caller.wrong_schema(results[0], _too_large(len(report.data)))]
                continue
            half = len(results) // 2
            held.results = results[half:] + held.results
            results = results[:half]
        held.reported += len(results)
        return report

    def _batch_report(self, held: Held) -> Report:
        piece = held.batches.pop(0)
        while True:
            report = _batch_report(piece)
            if len(report.data) <= REPORT_BYTES_MAX:
                break
            half = piece.batch.num_rows // 2
            if not half:
                if len(report.data) <= RESULT_BYTES_MAX:
                    break
                piece = _without_result(piece, _too_large(len(report.data)))
                continue
            held.batches.insert(0, _slice(piece, half, piece.batch.num_rows))
            piece = _slice(piece, 0, half)._replace(others=piece.others)
        held.reported += len(piece.seqs) + len(piece.others)
        return report

    def _answered(self, found: Any) -> None:
        self._line.busy = False
        if isinstance(found, Exception):
            raise found
        answer, attached = found
        now_ns = SYSTEM.mono_ns()
        if isinstance(answer, wire.Allowed):
            self._tokens += answer.count
            self._tokens_wait_ns = now_ns + answer.wait_ms * 1_000_000
        elif isinstance(answer, wire.Beaten):
            for held in self._held:
                held.dead = held.dead or held.epoch in answer.lost
        elif isinstance(answer, wire.Stepped):
            self._stepped(answer, attached, now_ns)
        self._held = [held for held in self._held if self._keeps(held)]

    def _keeps(self, held: Held) -> bool:
        return not held.dead and held.reported < len(held.seqs)

    def _stepped(self, answer: wire.Stepped, attached: memoryview, now_ns: int) -> None:
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
        if answer.grant is not None:
            self._held.append(self._take(answer.grant, attached))
            self._tokens -= self._price(answer.grant.begun)

    def _take(self, grant: wire.Granted, attached: memoryview) -> Held:
        table = table_of(attached)
        spans = [range(part.lo, part.hi) for part in grant.parts]
        seqs = spans[0] if len(spans) == 1 else list(itertools.chain.from_iterable(spans))
        attempts = list(
            itertools.chain.from_iterable(
                itertools.repeat(part.attempt, part.hi - part.lo) for part in grant.parts
            )
        )
        rows: Any = table if self.duty.batch_rows else rows_of(table)
        origins = {
            seq: (run_id, first + seq - lo)
            for lo, hi, run_id, first in grant.origins
            for seq in range(lo, hi)
        }
        return Held(grant.epoch, seqs, attempts, rows, grant.alone, grant.begun, origins=origins)

    def _adapt(self) -> None:
        if self.duty.batch_rows or self.duty.rate or self._mean_us == UNKNOWN_US:
            return
        if self._flush < self._careful:
            # After a death the window opens again, report by report.
            self._flush = min(self._flush * 2, self._careful)
            return
        if self._mean_us < FAST_US and self._flush < WINDOW_ROWS_MAX:
            self._flush = min(self._flush * 4, WINDOW_ROWS_MAX)
            self._chunk = max(self._flush // (4 * self.duty.concurrency), 1)
        elif self._mean_us >= FAST_US * 4:
            ahead = max(self._ended_in(BEGIN_S), self.duty.concurrency)
            self._flush, self._chunk = min(self.duty.flush_rows, ahead), 1
        else:
            self._flush = max(self._flush, self.duty.flush_rows)

    def _ended_in(self, seconds: float) -> int:
        """How many calls end in this time, as they went so far."""
        return int(seconds * 1e6 * self.duty.concurrency / max(self._mean_us, 1.0))

    def _pause_s(self, beat_ns: int) -> float:
        if self._line.busy:
            return beat_ns / 1e9
        now_ns = SYSTEM.mono_ns()
        until = [now_ns + beat_ns]
        if self._held:
            until.append(self._beat_ns + beat_ns)
        if self._ended_ns:
            until.append(self._ended_ns + TELL_NS)
        if self.duty.rate and self._tokens_wait_ns > now_ns:
            until.append(self._tokens_wait_ns)
        if not self._held:
            return 0.0
        if self._claim_again_ns > now_ns:
            until.append(self._claim_again_ns)
        return max((min(until) - now_ns) / 1e9, 0.001)


class _Courier:
    """One request under way at a time, in a thread of its own; answers arrive in the news."""

    def __init__(self, client: Client, news: queue.SimpleQueue[Any]) -> None:
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


def ranges_of(seqs: Iterable[int]) -> list[Range]:
    """Ascending numbers as half-open ranges."""
    if isinstance(seqs, range):
        return [(seqs.start, seqs.stop)] if seqs else []
    found: list[Range] = []
    lo = hi = -1
    for seq in seqs:
        if seq != hi:
            if lo >= 0:
                found.append((lo, hi))
            lo = seq
        hi = seq + 1
    if lo >= 0:
        found.append((lo, hi))
    return found


def _cut(held: Held) -> None:
    held.seqs = held.seqs[: held.begun]


class Report(NamedTuple):
    done: list[Done]
    others: list[wire.Other]
    data: bytes
    seqs: bytes
    lo: int


def _row_report(results: list[Ended], caller: Caller) -> Report:
    if not results:
        return Report([], [], b"", b"", 0)
    results.sort()
    good = [ended for ended in results if ended.values is not None]
    rest = [ended for ended in results if ended.values is None]
    batch = None
    if good:
        try:
            batch = caller.encoder.batch([ended.values for ended in good if ended.values])
        except Exception:
            good, rest, batch = _sift(good, rest, caller)
    done = [Done(lo, hi, int(State.TERMINAL_SUCCESS)) for lo, hi in _runs(good)]
    done += _alike(rest)
    data = message_of(batch) if batch is not None and batch.num_rows else b""
    return Report(done, _others(rest), data, *_places([ended.seq for ended in good]))


def _runs(ended: list[Ended]) -> list[Range]:
    return ranges_of(one.seq for one in ended)


def _sift(
    good: list[Ended], rest: list[Ended], caller: Caller
) -> tuple[list[Ended], list[Ended], pa.RecordBatch]:
    """Find the rows whose values are no values of the schema: they fail, the others stay."""
    kept: list[Ended] = []
    for ended in good:
        assert ended.values is not None
        why = caller.encoder.fits(ended.values)
        if why:
            bad = caller.wrong_schema(ended, f"returned {why}")
            rest = [*rest, bad]
        else:
            kept.append(ended)
    batch = caller.encoder.batch([ended.values for ended in kept if ended.values])
    return kept, sorted(rest), batch


def _pieces(ended: BatchEnded) -> list[BatchEnded]:
    """A batch's outcome in parts that fit into a frame, and into a value of the store."""
    rows, size = ended.batch.num_rows, ended.batch.nbytes
    step = min(max(rows * REPORT_BYTES_MAX // max(size, 1) // 2, 1), max(rows, 1))
    if not isinstance(ended.seqs, range):
        step = min(step, REPORT_ROWS_MAX)
    others = _lots(ended.others)
    if rows <= step and len(others) <= 1:
        return [ended]
    found = [_slice(ended, at, min(at + step, rows)) for at in range(0, rows, step)]
    nothing = ended.batch.slice(0, 0)
    return found + [BatchEnded([], nothing, lot, 0.0, 0, 0) for lot in others]


def _slice(ended: BatchEnded, lo: int, hi: int) -> BatchEnded:
    return BatchEnded(ended.seqs[lo:hi], ended.batch.slice(lo, hi - lo), [], 0.0, 0, 0)


def _lots(others: list[Ended]) -> list[list[Ended]]:
    """Rows without a result, so many at a time that their errors fit into a report."""
    found: list[list[Ended]] = []
    size = 0
    for other in others:
        more = 4 * len(other.error) + len(other.raw)
        size += more
        if not found or len(found[-1]) >= REPORT_ROWS_MAX or size > REPORT_BYTES_MAX:
            found.append([])
            size = more
        found[-1].append(other)
    return found


def _told_bytes(others: list[wire.Other]) -> int:
    """A character of an error is up to four bytes of the store's; raw text is ASCII."""
    return sum(4 * len(other.error) + len(other.raw) for other in others)


def _too_large(size: int) -> str:
    return f"returned a result of {size:,} bytes; at most {RESULT_BYTES_MAX:,} fit"


def _without_result(ended: BatchEnded, why: str) -> BatchEnded:
    """The one row of it fails: its result is too large. Its beginning is kept."""
    fail, kind = int(State.TERMINAL_FAIL), int(ErrorClass.SCHEMA)
    [row] = ended.batch.to_pylist()
    failed = Ended(ended.seqs[0], fail, None, kind, why, 0, 0.0, 0, raw_values.encode(row))
    others = sorted([*ended.others, failed])
    return BatchEnded([], ended.batch.slice(0, 0), others, 0.0, 0, 0)


def _batch_report(ended: BatchEnded) -> Report:
    done = [Done(lo, hi, int(State.TERMINAL_SUCCESS)) for lo, hi in ranges_of(ended.seqs)]
    done += _alike(ended.others)
    data = message_of(ended.batch) if ended.batch.num_rows else b""
    return Report(done, _others(ended.others), data, *_places(ended.seqs))


def _alike(rest: list[Ended]) -> list[Done]:
    """Rows without a result, in order; neighbours that ended alike are one."""
    found: list[Done] = []
    for one in rest:
        last = found[-1] if found else None
        how = (int(one.state), int(one.error_class), one.delay_ns)
        if last and last.hi == one.seq and (last.code, last.error_class, last.delay_ns) == how:
            found[-1] = Done(last.lo, one.seq + 1, *how)
        else:
            found.append(Done(one.seq, one.seq + 1, *how))
    return found


def _places(seqs: Sequence[int]) -> tuple[bytes, int]:
    """Where results belong: their distances from the first; none when they are consecutive."""
    if not seqs:
        return b"", 0
    if seqs[-1] - seqs[0] + 1 == len(seqs):
        return b"", seqs[0]
    first = seqs[0]
    return array("I", [seq - first for seq in seqs]).tobytes(), first


def _others(rest: list[Ended]) -> list[wire.Other]:
    return [
        wire.Other(one.seq, int(one.state), int(one.error_class), one.error, one.delay_ns, one.raw)
        for one in rest
    ]


__all__ = ["Address", "Duty", "Engine", "HungCall"]
