"""Metrics of the sequence ledger: moves per second and the cost of a record, with and without its log."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import cycle
from time import perf_counter

import numpy as np

from bench.memory import rss_anon
from bench.place import Place
from bench.record import Record, Target, gather
from holdfast import store as stores
from holdfast.clock import S
from holdfast.durable import lease
from holdfast.ledger.events import FinishedRange
from holdfast.ledger.log import RunLog, open_run
from holdfast.ledger.replies import RowGrant
from holdfast.ledger.run_policy import RunPolicy
from holdfast.ledger.run_scheduler import LogEntries, RunScheduler
from holdfast.ledger.seq_ledger import SeqLedger
from holdfast.ledger.states import RowEvent, RowState

BATCH = 10_000
EPOCH = 1
# Grants between two checkpoints.
CHECKPOINT_GRANTS = 200


def ledger_moves(place: Place) -> Record:
    """Every row moves from unseen to committed, once in ranges and once in scattered sets."""
    rows = place.sizes.ledger_rows
    samples = []
    for _ in range(place.repeats):
        rates = {}
        for name, movers in (("rate", _in_ranges), ("set_rate", _in_sets)):
            ledger = SeqLedger(rows)
            moved, seconds = _through(movers(ledger))
            assert ledger.committed_count == rows
            rates[name] = moved / seconds
        samples.append(rates)
    return Record(
        "ledger_moves",
        f"a ledger of {rows:,} rows, unseen to committed, by {BATCH:,}: ranges, and scattered sets",
        gather(samples, {"rate": "moves/s", "set_rate": "moves/s"}),
        (Target("rate", at_least=50e6),),
        {"rows": rows, "batch": BATCH},
    )


def ledger_records(place: Place) -> Record:
    """Claim, begin, report and commit, as decisions of the run state. Nothing is stored."""
    rows = place.sizes.ledger_rows
    samples = []
    for _ in range(place.repeats):
        before = rss_anon(os.getpid())
        board, _ = RunScheduler.open(rows, RunPolicy(), now_ns=S)
        began = perf_counter()
        for _ in _work(board):
            pass
        seconds = perf_counter() - began
        used = rss_anon(os.getpid()) - before
        assert board.ledger.committed_count == rows
        dump = board.dump()
        # Measured before the next one is created, which would reuse this memory.
        del board
        began = perf_counter()
        RunScheduler.load(dump)
        loaded = perf_counter() - began
        samples.append(
            {
                "us_each": seconds / rows * 1e6,
                "memory_mb": max(used, 0) / 1e6,
                "load_ms": loaded * 1e3,
            }
        )
    return Record(
        "ledger_records",
        f"claim, begin, report and commit {rows:,} records by {BATCH:,}: the decisions alone",
        gather(samples, {"us_each": "µs", "memory_mb": "MB", "load_ms": "ms"}),
        (Target("us_each", below=0.5), Target("memory_mb", below=200)),
        {"rows": rows, "batch": BATCH},
    )


def ledger_logged(place: Place) -> Record:
    """The same with each decision durable before the next. One worker, so that no commit is shared."""
    rows = place.sizes.ledger_logged_rows
    samples = []
    for repeat in range(place.repeats):
        with place.store(f"ledger-{repeat}") as path, stores.open(path) as store:
            held = store.transact(lease.acquire, "run/bench", "bench", "1", 3600 * S)
            log = RunLog(store, "bench", held)
            board, entries = RunScheduler.open(rows, RunPolicy(), now_ns=store.now_ns())
            log.append(entries)
            began = perf_counter()
            for grant, decided in enumerate(_work(board)):
                due = grant % CHECKPOINT_GRANTS == CHECKPOINT_GRANTS - 1
                log.append(decided, (), board.dump() if due else None)
            seconds = perf_counter() - began
            began = perf_counter()
            _, again = open_run(store, "bench", held)
            opened = perf_counter() - began
            assert again.dump() == board.dump()
        moved = 4 * rows
        samples.append(
            {
                "rate": moved / seconds,
                "us_each": seconds / rows * 1e6,
                "open_ms": opened * 1e3,
            }
        )
    return Record(
        "ledger_logged",
        f"the same with {rows:,} records, every decision durable in its log before the next",
        gather(samples, {"rate": "moves/s", "us_each": "µs", "open_ms": "ms"}),
        (),
        {"rows": rows, "batch": BATCH},
    )


# -- helpers -------------------------------------------------------------------------------------

_LIFE = (RowEvent.DISPATCH, RowEvent.BEGIN, RowEvent.SUCCEED, RowEvent.COMMIT)
_ENDS = cycle((RowState.TERMINAL_SUCCESS, RowState.TERMINAL_SKIP))

Mover = Callable[[RowEvent], int]


def _through(movers: Iterator[Mover]) -> tuple[int, float]:
    """Move every batch through all its states. Returns the number of moves and the seconds."""
    moved, seconds = 0, 0.0
    for move in movers:
        for event in _LIFE:
            began = perf_counter()
            moved += move(event)
            seconds += perf_counter() - began
    return moved, seconds


def _in_ranges(ledger: SeqLedger) -> Iterator[Mover]:
    for lo in range(0, ledger.size, BATCH):
        hi = min(lo + BATCH, ledger.size)

        def move(event: RowEvent, lo: int = lo, hi: int = hi) -> int:
            if event is RowEvent.BEGIN:
                ledger.assign(lo, hi, EPOCH)
            ledger.move(lo, hi, event, epoch=EPOCH)
            return hi - lo

        yield move


def _in_sets(ledger: SeqLedger) -> Iterator[Mover]:
    """Each set is spread over a hundred times its size, so that no two of its rows are adjacent."""
    span = min(100 * BATCH, ledger.size)
    for lo in range(0, ledger.size, span):
        hi = min(lo + span, ledger.size)
        stride = -(-(hi - lo) // BATCH)
        for offset in range(stride):
            seqs = np.arange(lo + offset, hi, stride)

            def move(event: RowEvent, seqs: np.ndarray = seqs) -> int:  # type: ignore[type-arg]
                if event is RowEvent.BEGIN:
                    ledger.owner_epochs[seqs] = EPOCH
                ledger.move_set(seqs, event, epoch=EPOCH)
                return len(seqs)

            yield move


def _work(board: RunScheduler) -> Iterator[LogEntries]:
    """One worker processes all rows. Yields the entries to log before it continues."""
    now_ns = S
    while True:
        now_ns += 1
        grant, entries = board.claim("w", BATCH, now_ns=now_ns, begin=BATCH)
        if not isinstance(grant, RowGrant):
            return
        yield entries
        code = next(_ENDS)
        done = [FinishedRange(part.lo, part.hi, code) for part in grant.ranges]
        _, entries = board.report(grant.epoch, 1, b"", done=done, now_ns=now_ns)
        upto = board.terminal_prefix()
        _, more = board.commit(upto, upto - 1, now_ns)
        yield [*entries, *more]
