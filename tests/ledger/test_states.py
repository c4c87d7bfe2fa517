"""The table of the ledger: eight states, twelve moves."""

from holdfast.ledger.states import (
    LEDGER,
    LEGAL,
    REPORTED,
    TARGET,
    TERMINAL,
    Event,
    State,
    event_of,
)


def test_states_have_the_codes_of_the_document() -> None:
    assert [state.name for state in sorted(State)] == [
        "UNSEEN", "DISPATCHED", "IN_FLIGHT", "TERMINAL_SUCCESS",
        "TERMINAL_SKIP", "TERMINAL_FAIL", "TERMINAL_CANCEL", "COMMITTED",
    ]  # fmt: skip
    assert [int(state) for state in sorted(State)] == list(range(8))


def test_the_table_has_twelve_rows_and_reaches_every_state() -> None:
    assert len(LEDGER.table) == 12
    assert LEDGER.unreachable() == frozenset()
    assert LEDGER.terminal == {State.COMMITTED}


def test_the_matrix_is_the_table() -> None:
    pairs = {(state, after) for (state, _), after in LEDGER.table.items()}
    assert len(pairs) == 12
    for prior in State:
        for attempted in State:
            legal = (prior, attempted) in pairs
            assert LEGAL[prior][attempted] is legal
            assert (event_of(prior, attempted) is not None) is legal


def test_an_event_leads_to_one_state() -> None:
    assert set(TARGET) == set(Event)
    for (_, event), after in LEDGER.table.items():
        assert TARGET[event] is after


def test_rows_are_reported_by_the_code_of_a_terminal_state() -> None:
    assert {State(code) for code in REPORTED} == TERMINAL - {State.TERMINAL_CANCEL}
    assert all(TARGET[event] == code for code, event in REPORTED.items())
