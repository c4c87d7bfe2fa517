"""What is stored of a report: the results, and how rows without a result ended, if for good."""

from __future__ import annotations

from holdfast.ledger import runs
from holdfast.ledger.answers import Taken
from holdfast.ledger.board import Board, Entries
from holdfast.ledger.classes import ErrorClass
from holdfast.ledger.error_groups import ErrorGroups
from holdfast.ledger.ranges import Ranges
from holdfast.ledger.records import Part, Reclaimed
from holdfast.ledger.service.group_log import Put
from holdfast.ledger.service.messages import Move
from holdfast.ledger.states import State

GONE = "its interpreter died, or its lease ran out, at every try"


def result_chunk(
    board: Board, move: Move, taken: Taken, batch: memoryview, errors: ErrorGroups
) -> runs.Chunk | None:
    """The chunk of a report that was taken; `errors` counts the failures."""
    if not move.done:
        return None
    again = Ranges()
    for one in taken.retried:
        again.add(one.lo, one.hi)
    others = []
    for other in move.others:
        final = not again.holds(other.seq, other.seq + 1)
        if other.state == State.TERMINAL_FAIL:
            errors.add(other.error_class, other.error, rows=int(final))
        if final:
            tries = _tries(board, other.seq)
            others.append(
                runs.Other(other.seq, other.state, tries, other.error_class, other.error, other.raw)
            )
    if not others and not batch and move.at is None:
        return None
    tried = [
        Part(lo, hi, tries + 1)
        for done in move.done
        if done.code == State.TERMINAL_SUCCESS
        for lo, hi, tries in board.ledger.tries(done.lo, done.hi)
        if tries
    ]
    return runs.Chunk(
        move.lo, move.seqs, bytes(batch), others, tried, 0.0, 0, [], at=move.at, hi=move.hi
    )


def lost_rows(
    board: Board, run_id: str, entries: Entries, first_height: int, errors: ErrorGroups
) -> list[Put]:
    """Chunks of rows that a reclaim failed for good: no child is left to report them."""
    puts: list[Put] = []
    page_rows = board.policy.page_rows
    kind = int(ErrorClass.LEASE_EXPIRED)
    for height, entry in enumerate(entries, first_height):
        if not isinstance(entry, Reclaimed):
            continue
        pages: dict[int, list[runs.Other]] = {}
        for lo, hi in entry.failed:
            for seq in range(lo, hi):
                errors.add(kind, GONE, rows=1)
                other = runs.Other(seq, int(State.TERMINAL_FAIL), _tries(board, seq), kind, GONE)
                pages.setdefault(seq // page_rows, []).append(other)
        for page, others in pages.items():
            chunk = runs.Chunk(0, b"", b"", others, [], 0.0, 0, [])
            puts += runs.chunk_rows(run_id, page, height, chunk)
    return puts


def _tries(board: Board, seq: int) -> int:
    """How often a row was tried, the last time included."""
    [(_, _, retries)] = board.ledger.tries(seq, seq + 1)
    return retries + 1
