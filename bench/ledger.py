"""Metrics of the seq ledger: moves a second, what a record costs, with and without its log."""

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
from holdfast.ledger.answers import Grant
from holdfast.ledger.board import Board, Entries
from holdfast.ledger.classes import Policy
from holdfast.ledger.ledger import Ledger
from holdfast.ledger.log import RunLog, open_run
from holdfast.ledger.records import Done
from holdfast.ledger.states import Event, State

BATCH = 10_000
EPOCH = 1
# A checkpoint every so many grants.
CHECKPOINT_GRANTS = 200


def ledger_moves(place: Place) -> Record:
    """Every row goes from unseen to committed, once in ranges and once in scattered sets."""
    rows = place.sizes.ledger_rows
    samples = []
    for _ in range(place.repeats):
        rates = {}
        for name, movers in (("rate", _in_ranges), ("set_rate", _in_sets)):
            ledger = Ledger(rows)
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
    """Claim, begin, report and commit, decided by the board; nothing is stored."""
    rows = place.sizes.ledger_rows
    samples = []
    for _ in range(place.repeats):
        before = rss_anon(os.getpid())
        board, _ = Board.open(rows, Policy(), now_ns=S)
        began = perf_counter()
        for _ in _work(board):
            pass
        seconds = perf_counter() - began
        used = rss_anon(os.getpid()) - before
        assert board.ledger.committed_count == rows
        dump = board.dump()
        # Before the next is made, or its memory would be this one's, used again.
        del board
        began = perf_counter()
        Board.load(dump)
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
    """The same, each decision durable before the next, one worker: nothing shares its commits."""
    rows = place.sizes.ledger_logged_rows
    samples = []
    for repeat in range(place.repeats):
        with place.store(f"ledger-{repeat}") as path, stores.open(path) as store:
            held = store.transact(lease.acquire, "run/bench", "bench", "1", 3600 * S)
            log = RunLog(store, "bench", held)
            board, entries = Board.open(rows, Policy(), now_ns=store.now_ns())
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


# -- inside --------------------------------------------------------------------------------------

_LIFE = (Event.DISPATCH, Event.BEGIN, Event.SUCCEED, Event.COMMIT)
_ENDS = cycle((State.TERMINAL_SUCCESS, State.TERMINAL_SKIP))

Mover = Callable[[Event], int]


def _through(movers: Iterator[Mover]) -> tuple[int, float]:
    """Move every batch through its life; how many moves, in how many seconds."""
    moved, seconds = 0, 0.0
    for move in movers:
        for event in _LIFE:
            began = perf_counter()
            moved += move(event)
            seconds += perf_counter() - began
    return moved, seconds


def _in_ranges(ledger: Ledger) -> Iterator[Mover]:
    for lo in range(0, ledger.size, BATCH):
        hi = min(lo + BATCH, ledger.size)

        def move(event: Event, lo: int = lo, hi: int = hi) -> int:
            if event is Event.BEGIN:
                ledger.own(lo, hi, EPOCH)
            ledger.move(lo, hi, event, epoch=EPOCH)
            return hi - lo

        yield move


def _in_sets(ledger: Ledger) -> Iterator[Mover]:
    """Each set is spread over a hundred times its size: no two of its rows are neighbours."""
    span = min(100 * BATCH, ledger.size)
    for lo in range(0, ledger.size, span):
        hi = min(lo + span, ledger.size)
        stride = -(-(hi - lo) // BATCH)
        for offset in range(stride):
            seqs = np.arange(lo + offset, hi, stride)

            def move(event: Event, seqs: np.ndarray = seqs) -> int:  # type: ignore[type-arg]
                if event is Event.BEGIN:
                    ledger.lease[seqs] = EPOCH
                ledger.move_at(seqs, event, epoch=EPOCH)
                return len(seqs)

            yield move


def _work(board: Board) -> Iterator[Entries]:
    """One worker goes through all rows. Yields what is to be logged before it goes on."""
    now_ns = S
    while True:
        now_ns += 1
        grant, entries = board.claim("w", BATCH, now_ns=now_ns, begin=BATCH)
        if not isinstance(grant, Grant):
            return
        yield entries
        code = next(_ENDS)
        done = [Done(part.lo, part.hi, code) for part in grant.parts]
        _, entries = board.advance(grant.epoch, 1, b"", done=done, now_ns=now_ns)
        upto = board.terminal_prefix()
        _, more = board.commit(upto, upto - 1, now_ns)
        yield [*entries, *more]
