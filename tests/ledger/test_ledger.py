"""Moves in ranges, in sets and one by one: legal as the table says, all or nothing, and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import IllegalTransition, Invalid
from holdfast.ledger.ledger import Ledger
from holdfast.ledger.states import LEDGER, LEGAL, TARGET, Event, State

EPOCH = 7
CONTEXT: dict[str, Any] = {"epoch": EPOCH, "owner": "worker-1", "wall_ns": 1_700_000_000}
# How a row gets to each state.
ROUTES: dict[State, list[Event]] = {State.UNSEEN: []}
while len(ROUTES) < len(State):
    for (_prior, _event), _after in LEDGER.table.items():
        if _prior in ROUTES and _after not in ROUTES:
            ROUTES[_after] = [*ROUTES[_prior], _event]

Path = Callable[[Ledger, Event], None]
ROWS = (2, 3, 4)
PATHS: dict[str, Path] = {
    "range": lambda ledger, event: ledger.move(2, 5, event, **CONTEXT),
    "set": lambda ledger, event: ledger.move_at(np.array(ROWS), event, **CONTEXT),
    "unsorted set": lambda ledger, event: ledger.move_at(np.array([4, 2, 3]), event, **CONTEXT),
    "one": lambda ledger, event: ledger.move_one(2, event, **CONTEXT),
    "range of one": lambda ledger, event: ledger.move(2, 3, event, **CONTEXT),
}


def at_state(state: State, rows: tuple[int, ...] = ROWS, size: int = 8) -> Ledger:
    """A ledger with these rows in a state, reached by legal moves."""
    ledger = Ledger(size, page_rows=4)
    for event in ROUTES[state]:
        for row in rows:
            ledger.move_one(row, event, **CONTEXT)
            if event is Event.DISPATCH:
                ledger.own(row, row + 1, EPOCH)
    return ledger


def picture(ledger: Ledger) -> tuple[Any, ...]:
    columns = (ledger.state, ledger.attempts, ledger.reason, ledger.lease)
    return (*(column.tolist() for column in columns), ledger.counts(), list(ledger.ended))


def recount(ledger: Ledger) -> list[int]:
    return np.bincount(ledger.state, minlength=8).tolist()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("prior", State)
def test_every_event_in_every_state_does_what_the_table_says(
    prior: State, event: Event, path: str
) -> None:
    ledger = at_state(prior)
    before = picture(ledger)
    after = LEDGER.table.get((prior, event))
    if after is not None:
        PATHS[path](ledger, event)
        assert ledger.state_of(2) is after
        assert ledger.counts() == recount(ledger)
        assert ledger.owner_of(2) == (EPOCH if after is State.IN_FLIGHT else 0)
        return
    with pytest.raises(IllegalTransition) as refusal:
        PATHS[path](ledger, event)
    assert refusal.value.fields == {
        "machine": "ledger",
        "seq": 2,
        "prior": prior.name,
        "attempted": TARGET[event].name,
        "owner": "worker-1",
        "wall_ns": 1_700_000_000,
    }
    assert picture(ledger) == before


@pytest.mark.parametrize("attempted", State)
@pytest.mark.parametrize("prior", State)
def test_of_all_pairs_of_states_twelve_are_legal_and_the_others_fatal(
    prior: State, attempted: State
) -> None:
    ledger = at_state(prior)
    before = picture(ledger)
    if LEGAL[prior][attempted]:
        ledger.move_to(3, attempted, **CONTEXT)
        assert ledger.state_of(3) is attempted
        assert ledger.counts() == recount(ledger)
        return
    with pytest.raises(IllegalTransition) as refusal:
        ledger.move_to(3, attempted, **CONTEXT)
    told = refusal.value
    assert (told.seq, told.prior, told.attempted) == (3, prior.name, attempted.name)
    assert (told.owner, told.wall_ns) == ("worker-1", 1_700_000_000)
    assert picture(ledger) == before


@pytest.mark.parametrize("path", ["range", "set"])
@pytest.mark.parametrize("odd", State)
@pytest.mark.parametrize("event", Event)
def test_one_row_that_may_not_move_keeps_all_of_them_where_they_are(
    event: Event, odd: State, path: str
) -> None:
    prior = next(state for state, known in LEDGER.table if known is event)
    ledger = at_state(prior, rows=(2, 4))
    for step in ROUTES[odd]:
        ledger.move_one(3, step, **CONTEXT)
        if step is Event.DISPATCH:
            ledger.own(3, 4, EPOCH)
    before = picture(ledger)
    if LEDGER.allows(odd, event):
        PATHS[path](ledger, event)
        assert {ledger.state_of(row) for row in ROWS} == {TARGET[event]}
        assert ledger.counts() == recount(ledger)
        return
    with pytest.raises(IllegalTransition) as refusal:
        PATHS[path](ledger, event)
    assert (refusal.value.seq, refusal.value.prior) == (3, odd.name)
    assert picture(ledger) == before


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("event", [Event.BEGIN, Event.SUCCEED, Event.SKIP, Event.FAIL])
def test_a_move_by_another_than_the_owner_is_refused(event: Event, path: str) -> None:
    ledger = at_state(next(state for state, known in LEDGER.table if known is event))
    ledger.lease[2] = EPOCH + 1
    before = picture(ledger)
    with pytest.raises(IllegalTransition) as refusal:
        PATHS[path](ledger, event)
    assert (refusal.value.seq, refusal.value.held, refusal.value.current) == (2, EPOCH, EPOCH + 1)
    assert picture(ledger) == before


@pytest.mark.parametrize("count", [1, 3])
def test_nothing_begins_without_an_owner(count: int) -> None:
    ledger = Ledger(8)
    ledger.move(0, 8, Event.DISPATCH)
    for begin in (
        lambda: ledger.move(0, count, Event.BEGIN),
        lambda: ledger.move_at(np.arange(count), Event.BEGIN),
    ):
        with pytest.raises(IllegalTransition):
            begin()
    assert ledger.dispatched_count == 8


def test_a_seq_named_twice_in_a_set_is_a_second_move() -> None:
    ledger = Ledger(8)
    with pytest.raises(IllegalTransition) as refusal:
        ledger.move_at(np.array([5, 1, 5]), Event.DISPATCH, owner="w", wall_ns=1)
    assert (refusal.value.seq, refusal.value.prior) == (5, "DISPATCHED")
    assert ledger.counts() == [8, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("seqs", [[-1, 2], [2, 8]])
def test_a_seq_outside_the_ledger_is_refused(seqs: list[int]) -> None:
    ledger = Ledger(8)
    with pytest.raises(Invalid):
        ledger.move_at(np.array(seqs), Event.DISPATCH)
    with pytest.raises(Invalid):
        ledger.move(min(seqs), max(seqs) + 1, Event.DISPATCH)
    for seq in (-1, 8):
        with pytest.raises(Invalid):
            ledger.move_one(seq, Event.DISPATCH)
        with pytest.raises(Invalid):
            ledger.move_to(seq, State.DISPATCHED)
    assert ledger.counts()[0] == 8


def test_an_empty_ledger_answers() -> None:
    ledger = Ledger(0)
    ledger.move(0, 0, Event.DISPATCH)
    ledger.move_at(np.array([], dtype=np.int64), Event.DISPATCH)
    assert ledger.final_prefix() == 0
    assert ledger.is_final(0, 0)
    assert ledger.ranges() == []
    assert set(ledger.counters().values()) == {0}


@pytest.mark.parametrize("path", PATHS)
def test_a_retry_counts_an_attempt_and_keeps_the_reason(path: str) -> None:
    ledger = at_state(State.IN_FLIGHT)
    ledger.move(2, 5, Event.FAIL, epoch=EPOCH, reason=2)
    assert (ledger.attempts[2], ledger.reason[2], ledger.owner_of(2)) == (0, 2, 0)
    PATHS[path](ledger, Event.RETRY)
    assert (ledger.attempts[2], ledger.reason[2], ledger.owner_of(2)) == (1, 2, 0)
    assert ledger.ended[2] == (0 if "one" not in path else 2)


@pytest.mark.parametrize("path", PATHS)
def test_attempts_do_not_wrap_around(path: str) -> None:
    ledger = at_state(State.TERMINAL_FAIL)
    ledger.attempts[2] = 255
    before = picture(ledger)
    with pytest.raises(Invalid):
        PATHS[path](ledger, Event.RETRY)
    assert picture(ledger) == before


def test_only_ready_rows_of_nobody_can_be_given_to_somebody() -> None:
    ledger = Ledger(8)
    with pytest.raises(Invalid):
        ledger.own(0, 2, EPOCH)
    ledger.move(0, 4, Event.DISPATCH)
    ledger.own(0, 2, EPOCH)
    with pytest.raises(Invalid):
        ledger.own(1, 3, EPOCH + 1)
    ledger.own(0, 2, 0)
    ledger.own(1, 3, EPOCH + 1)
    assert ledger.lease.tolist()[:4] == [0, EPOCH + 1, EPOCH + 1, 0]


# -- at random -----------------------------------------------------------------------------------

SIZE = 30
SEQS = st.lists(st.integers(0, SIZE - 1), max_size=8)
STEPS = st.lists(st.tuples(st.sampled_from(Event), SEQS, st.booleans()), max_size=40)


def at_random(steps: list[tuple[Event, list[int], bool]]) -> tuple[Ledger, list[int]]:
    """A ledger and the model of it (a list of states) after the legal ones of these steps."""
    ledger, model = Ledger(SIZE, page_rows=8), [0] * SIZE
    for event, seqs, as_range in steps:
        if as_range and seqs:
            seqs = list(range(min(seqs), max(seqs) + 1))
        legal = len(set(seqs)) == len(seqs) and all(
            LEDGER.allows(State(model[seq]), event) for seq in seqs
        )
        if event is Event.BEGIN and legal:
            for seq in seqs:
                ledger.own(seq, seq + 1, EPOCH)
        try:
            if as_range and seqs:
                ledger.move(seqs[0], seqs[-1] + 1, event, epoch=EPOCH)
            else:
                ledger.move_at(np.array(seqs, dtype=np.int64), event, epoch=EPOCH)
        except IllegalTransition:
            assert not legal
        else:
            assert legal
            for seq in seqs:
                model[seq] = TARGET[event]
    return ledger, model


@given(steps=STEPS)
def test_counters_equal_a_recount_after_any_moves(
    steps: list[tuple[Event, list[int], bool]],
) -> None:
    ledger, model = at_random(steps)
    assert ledger.state.tolist() == model
    counts = [model.count(state) for state in State]
    assert ledger.counts() == counts
    assert ledger.counters() == {
        "terminalCount": sum(counts[3:7]),
        "inFlightCount": counts[2],
        "dispatchedCount": counts[1],
        "committedCount": counts[7],
    }
    assert ledger.final_count == sum(counts[3:])


@given(steps=STEPS)
def test_range_records_give_the_same_ledger_back(
    steps: list[tuple[Event, list[int], bool]],
) -> None:
    ledger, _ = at_random(steps)
    told = ledger.ranges()
    again = Ledger.from_ranges(SIZE, told, ledger.ended, page_rows=8)
    again.lease[:] = ledger.lease
    assert picture(again) == picture(ledger)
    assert again.ranges() == told
    for state in (0, 1):
        rows = {row for lo, hi in again.runs_of(state) for row in range(lo, hi)}
        assert rows == {seq for seq in range(SIZE) if ledger.state[seq] == state}


@given(finals=st.lists(st.booleans(), min_size=1, max_size=60), bounds=st.tuples(
    st.integers(0, 60), st.integers(0, 60)))  # fmt: skip
def test_what_is_final_is_known_without_looking_again(
    finals: list[bool], bounds: tuple[int, int]
) -> None:
    ledger = Ledger(len(finals), page_rows=8)
    lo, hi = sorted(min(bound, len(finals)) for bound in bounds)
    for seq in [*range(1, len(finals)), 0]:
        if finals[seq]:
            ledger.move_one(seq, Event.DISPATCH)
            ledger.move_one(seq, Event.CANCEL)
        states = ledger.state.tolist()
        assert ledger.final_prefix() == next(
            (at for at, state in enumerate(states) if state < 3), len(states)
        )
        assert ledger.is_final(lo, hi) == all(state >= 3 for state in states[lo:hi])


def test_a_page_of_outcomes_that_alternate_is_kept_as_it_is() -> None:
    size = 8192
    ledger = Ledger(size)
    ledger.move(0, size, Event.DISPATCH)
    ledger.move_at(np.arange(0, size, 2), Event.CANCEL, reason=7)
    [page] = ledger.ranges()
    assert page.rows
    assert not page.runs
    again = Ledger.from_ranges(size, [page], ledger.ended)
    assert picture(again) == picture(ledger)


@pytest.mark.parametrize("pages", [0, 2])
def test_pages_that_are_not_of_this_ledger_are_refused(pages: int) -> None:
    [page] = Ledger(8).ranges()
    with pytest.raises(Invalid):
        Ledger.from_ranges(8, [page] * pages, [0] * 4)
    with pytest.raises(Invalid):
        Ledger.from_ranges(9, [page], [0] * 4)
