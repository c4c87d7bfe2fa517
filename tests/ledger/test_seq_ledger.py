"""The seq ledger: moves of ranges, sets and single rows are legal by the table, atomic and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import IllegalTransition, Invalid
from holdfast.ledger.seq_ledger import SeqLedger
from holdfast.ledger.states import LEDGER, LEGAL, TARGET_STATE, RowEvent, RowState

EPOCH = 7
CONTEXT: dict[str, Any] = {"epoch": EPOCH, "owner": "worker-1", "wall_ns": 1_700_000_000}
# The events that lead a row to each state.
ROUTES: dict[RowState, list[RowEvent]] = {RowState.UNSEEN: []}
while len(ROUTES) < len(RowState):
    for (_prior, _event), _after in LEDGER.table.items():
        if _prior in ROUTES and _after not in ROUTES:
            ROUTES[_after] = [*ROUTES[_prior], _event]

MovePath = Callable[[SeqLedger, RowEvent], None]
ROWS = (2, 3, 4)
MOVE_PATHS: dict[str, MovePath] = {
    "range": lambda ledger, event: ledger.move(2, 5, event, **CONTEXT),
    "set": lambda ledger, event: ledger.move_set(np.array(ROWS), event, **CONTEXT),
    "unsorted set": lambda ledger, event: ledger.move_set(np.array([4, 2, 3]), event, **CONTEXT),
    "one": lambda ledger, event: ledger.move_one(2, event, **CONTEXT),
    "range of one": lambda ledger, event: ledger.move(2, 3, event, **CONTEXT),
}


def ledger_in_state(state: RowState, rows: tuple[int, ...] = ROWS, size: int = 8) -> SeqLedger:
    """A ledger whose `rows` are in `state`, reached by legal moves."""
    ledger = SeqLedger(size, page_rows=4)
    for event in ROUTES[state]:
        for row in rows:
            ledger.move_one(row, event, **CONTEXT)
            if event is RowEvent.DISPATCH:
                ledger.assign(row, row + 1, EPOCH)
    return ledger


def ledger_snapshot(ledger: SeqLedger) -> tuple[Any, ...]:
    columns = (ledger.state, ledger.attempts, ledger.reason, ledger.owner_epochs)
    return (*(column.tolist() for column in columns), ledger.counts(), list(ledger.ended))


def recount(ledger: SeqLedger) -> list[int]:
    return np.bincount(ledger.state, minlength=8).tolist()


@pytest.mark.parametrize("path", MOVE_PATHS)
@pytest.mark.parametrize("event", RowEvent)
@pytest.mark.parametrize("prior", RowState)
def test_every_event_in_every_state_follows_the_transition_table(
    prior: RowState, event: RowEvent, path: str
) -> None:
    ledger = ledger_in_state(prior)
    before = ledger_snapshot(ledger)
    after = LEDGER.table.get((prior, event))
    if after is not None:
        MOVE_PATHS[path](ledger, event)
        assert ledger.state_of(2) is after
        assert ledger.counts() == recount(ledger)
        assert ledger.owner_epoch_of(2) == (EPOCH if after is RowState.IN_FLIGHT else 0)
        return
    with pytest.raises(IllegalTransition) as refusal:
        MOVE_PATHS[path](ledger, event)
    assert refusal.value.fields == {
        "machine": "ledger",
        "seq": 2,
        "prior": prior.name,
        "attempted": TARGET_STATE[event].name,
        "owner": "worker-1",
        "wall_ns": 1_700_000_000,
    }
    assert ledger_snapshot(ledger) == before


@pytest.mark.parametrize("attempted", RowState)
@pytest.mark.parametrize("prior", RowState)
def test_move_to_allows_twelve_state_pairs_and_raises_for_the_rest(
    prior: RowState, attempted: RowState
) -> None:
    ledger = ledger_in_state(prior)
    before = ledger_snapshot(ledger)
    if LEGAL[prior][attempted]:
        ledger.move_to(3, attempted, **CONTEXT)
        assert ledger.state_of(3) is attempted
        assert ledger.counts() == recount(ledger)
        return
    with pytest.raises(IllegalTransition) as refusal:
        ledger.move_to(3, attempted, **CONTEXT)
    error = refusal.value
    assert (error.seq, error.prior, error.attempted) == (3, prior.name, attempted.name)
    assert (error.owner, error.wall_ns) == ("worker-1", 1_700_000_000)
    assert ledger_snapshot(ledger) == before


@pytest.mark.parametrize("path", ["range", "set"])
@pytest.mark.parametrize("odd", RowState)
@pytest.mark.parametrize("event", RowEvent)
def test_illegal_move_of_one_row_moves_no_row(event: RowEvent, odd: RowState, path: str) -> None:
    prior = next(state for state, known in LEDGER.table if known is event)
    ledger = ledger_in_state(prior, rows=(2, 4))
    for step in ROUTES[odd]:
        ledger.move_one(3, step, **CONTEXT)
        if step is RowEvent.DISPATCH:
            ledger.assign(3, 4, EPOCH)
    before = ledger_snapshot(ledger)
    if LEDGER.allows(odd, event):
        MOVE_PATHS[path](ledger, event)
        assert {ledger.state_of(row) for row in ROWS} == {TARGET_STATE[event]}
        assert ledger.counts() == recount(ledger)
        return
    with pytest.raises(IllegalTransition) as refusal:
        MOVE_PATHS[path](ledger, event)
    assert (refusal.value.seq, refusal.value.prior) == (3, odd.name)
    assert ledger_snapshot(ledger) == before


@pytest.mark.parametrize("path", MOVE_PATHS)
@pytest.mark.parametrize("event", [RowEvent.BEGIN, RowEvent.SUCCEED, RowEvent.SKIP, RowEvent.FAIL])
def test_move_by_an_epoch_that_does_not_own_the_row_is_refused(event: RowEvent, path: str) -> None:
    ledger = ledger_in_state(next(state for state, known in LEDGER.table if known is event))
    ledger.owner_epochs[2] = EPOCH + 1
    before = ledger_snapshot(ledger)
    with pytest.raises(IllegalTransition) as refusal:
        MOVE_PATHS[path](ledger, event)
    assert (refusal.value.seq, refusal.value.held, refusal.value.current) == (2, EPOCH, EPOCH + 1)
    assert ledger_snapshot(ledger) == before


@pytest.mark.parametrize("count", [1, 3])
def test_begin_without_an_owner_epoch_is_refused(count: int) -> None:
    ledger = SeqLedger(8)
    ledger.move(0, 8, RowEvent.DISPATCH)
    for begin in (
        lambda: ledger.move(0, count, RowEvent.BEGIN),
        lambda: ledger.move_set(np.arange(count), RowEvent.BEGIN),
    ):
        with pytest.raises(IllegalTransition):
            begin()
    assert ledger.dispatched_count == 8


def test_duplicate_seq_in_move_set_is_an_illegal_second_move() -> None:
    ledger = SeqLedger(8)
    with pytest.raises(IllegalTransition) as refusal:
        ledger.move_set(np.array([5, 1, 5]), RowEvent.DISPATCH, owner="w", wall_ns=1)
    assert (refusal.value.seq, refusal.value.prior) == (5, "DISPATCHED")
    assert ledger.counts() == [8, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("seqs", [[-1, 2], [2, 8]])
def test_move_of_a_seq_outside_the_ledger_is_refused(seqs: list[int]) -> None:
    ledger = SeqLedger(8)
    with pytest.raises(Invalid):
        ledger.move_set(np.array(seqs), RowEvent.DISPATCH)
    with pytest.raises(Invalid):
        ledger.move(min(seqs), max(seqs) + 1, RowEvent.DISPATCH)
    for seq in (-1, 8):
        with pytest.raises(Invalid):
            ledger.move_one(seq, RowEvent.DISPATCH)
        with pytest.raises(Invalid):
            ledger.move_to(seq, RowState.DISPATCHED)
    assert ledger.counts()[0] == 8


def test_empty_ledger_supports_every_query() -> None:
    ledger = SeqLedger(0)
    ledger.move(0, 0, RowEvent.DISPATCH)
    ledger.move_set(np.array([], dtype=np.int64), RowEvent.DISPATCH)
    assert ledger.final_prefix() == 0
    assert ledger.is_final(0, 0)
    assert ledger.encode_pages() == []
    assert set(ledger.counters().values()) == {0}


@pytest.mark.parametrize("path", MOVE_PATHS)
def test_retry_counts_an_attempt_and_keeps_the_reason(path: str) -> None:
    ledger = ledger_in_state(RowState.IN_FLIGHT)
    ledger.move(2, 5, RowEvent.FAIL, epoch=EPOCH, reason=2)
    assert (ledger.attempts[2], ledger.reason[2], ledger.owner_epoch_of(2)) == (0, 2, 0)
    MOVE_PATHS[path](ledger, RowEvent.RETRY)
    assert (ledger.attempts[2], ledger.reason[2], ledger.owner_epoch_of(2)) == (1, 2, 0)
    assert ledger.ended[2] == (0 if "one" not in path else 2)


@pytest.mark.parametrize("path", MOVE_PATHS)
def test_retry_beyond_255_attempts_is_refused(path: str) -> None:
    ledger = ledger_in_state(RowState.TERMINAL_FAIL)
    ledger.attempts[2] = 255
    before = ledger_snapshot(ledger)
    with pytest.raises(Invalid):
        MOVE_PATHS[path](ledger, RowEvent.RETRY)
    assert ledger_snapshot(ledger) == before


def test_assign_accepts_only_dispatched_rows_without_an_owner() -> None:
    ledger = SeqLedger(8)
    with pytest.raises(Invalid):
        ledger.assign(0, 2, EPOCH)
    ledger.move(0, 4, RowEvent.DISPATCH)
    ledger.assign(0, 2, EPOCH)
    with pytest.raises(Invalid):
        ledger.assign(1, 3, EPOCH + 1)
    ledger.assign(0, 2, 0)
    ledger.assign(1, 3, EPOCH + 1)
    assert ledger.owner_epochs.tolist()[:4] == [0, EPOCH + 1, EPOCH + 1, 0]


# -- random moves --------------------------------------------------------------------------------

SIZE = 30
SEQS = st.lists(st.integers(0, SIZE - 1), max_size=8)
STEPS = st.lists(st.tuples(st.sampled_from(RowEvent), SEQS, st.booleans()), max_size=40)


def random_ledger(steps: list[tuple[RowEvent, list[int], bool]]) -> tuple[SeqLedger, list[int]]:
    """A ledger and its model (a list of states) after the legal steps of `steps`."""
    ledger, model = SeqLedger(SIZE, page_rows=8), [0] * SIZE
    for event, seqs, as_range in steps:
        if as_range and seqs:
            seqs = list(range(min(seqs), max(seqs) + 1))
        legal = len(set(seqs)) == len(seqs) and all(
            LEDGER.allows(RowState(model[seq]), event) for seq in seqs
        )
        if event is RowEvent.BEGIN and legal:
            for seq in seqs:
                ledger.assign(seq, seq + 1, EPOCH)
        try:
            if as_range and seqs:
                ledger.move(seqs[0], seqs[-1] + 1, event, epoch=EPOCH)
            else:
                ledger.move_set(np.array(seqs, dtype=np.int64), event, epoch=EPOCH)
        except IllegalTransition:
            assert not legal
        else:
            assert legal
            for seq in seqs:
                model[seq] = TARGET_STATE[event]
    return ledger, model


@given(steps=STEPS)
def test_counters_equal_a_recount_after_any_moves(
    steps: list[tuple[RowEvent, list[int], bool]],
) -> None:
    ledger, model = random_ledger(steps)
    assert ledger.state.tolist() == model
    counts = [model.count(state) for state in RowState]
    assert ledger.counts() == counts
    assert ledger.counters() == {
        "terminalCount": sum(counts[3:7]),
        "inFlightCount": counts[2],
        "dispatchedCount": counts[1],
        "committedCount": counts[7],
    }
    assert ledger.final_count == sum(counts[3:])


@given(steps=STEPS)
def test_encode_pages_round_trips_the_ledger(
    steps: list[tuple[RowEvent, list[int], bool]],
) -> None:
    ledger, _ = random_ledger(steps)
    pages = ledger.encode_pages()
    again = SeqLedger.from_pages(SIZE, pages, ledger.ended, page_rows=8)
    again.owner_epochs[:] = ledger.owner_epochs
    assert ledger_snapshot(again) == ledger_snapshot(ledger)
    assert again.encode_pages() == pages
    for state in (0, 1):
        rows = {row for lo, hi in again.ranges_in_state(state) for row in range(lo, hi)}
        assert rows == {seq for seq in range(SIZE) if ledger.state[seq] == state}


@given(finals=st.lists(st.booleans(), min_size=1, max_size=60), bounds=st.tuples(
    st.integers(0, 60), st.integers(0, 60)))  # fmt: skip
def test_final_prefix_and_is_final_equal_a_full_scan(
    finals: list[bool], bounds: tuple[int, int]
) -> None:
    ledger = SeqLedger(len(finals), page_rows=8)
    lo, hi = sorted(min(bound, len(finals)) for bound in bounds)
    for seq in [*range(1, len(finals)), 0]:
        if finals[seq]:
            ledger.move_one(seq, RowEvent.DISPATCH)
            ledger.move_one(seq, RowEvent.CANCEL)
        states = ledger.state.tolist()
        assert ledger.final_prefix() == next(
            (at for at, state in enumerate(states) if state < 3), len(states)
        )
        assert ledger.is_final(lo, hi) == all(state >= 3 for state in states[lo:hi])


def test_page_of_alternating_states_is_encoded_as_rows() -> None:
    size = 8192
    ledger = SeqLedger(size)
    ledger.move(0, size, RowEvent.DISPATCH)
    ledger.move_set(np.arange(0, size, 2), RowEvent.CANCEL, reason=7)
    [page] = ledger.encode_pages()
    assert page.rows
    assert not page.runs
    again = SeqLedger.from_pages(size, [page], ledger.ended)
    assert ledger_snapshot(again) == ledger_snapshot(ledger)


@pytest.mark.parametrize("pages", [0, 2])
def test_from_pages_refuses_pages_of_another_size(pages: int) -> None:
    [page] = SeqLedger(8).encode_pages()
    with pytest.raises(Invalid):
        SeqLedger.from_pages(8, [page] * pages, [0] * 4)
    with pytest.raises(Invalid):
        SeqLedger.from_pages(9, [page], [0] * 4)
