"""The transition table of the ledger: eight states, twelve moves."""

from holdfast.ledger.states import (
    EVENT_BY_REPORTED_CODE,
    LEDGER,
    LEGAL,
    TARGET_STATE,
    TERMINAL,
    RowEvent,
    RowState,
    event_of,
)


def test_states_have_the_codes_of_the_specification() -> None:
    assert [state.name for state in sorted(RowState)] == [
        "UNSEEN", "DISPATCHED", "IN_FLIGHT", "TERMINAL_SUCCESS",
        "TERMINAL_SKIP", "TERMINAL_FAIL", "TERMINAL_CANCEL", "COMMITTED",
    ]  # fmt: skip
    assert [int(state) for state in sorted(RowState)] == list(range(8))


def test_transition_table_has_twelve_rows_and_reaches_every_state() -> None:
    assert len(LEDGER.table) == 12
    assert LEDGER.unreachable() == frozenset()
    assert LEDGER.terminal == {RowState.COMMITTED}


def test_legal_matrix_equals_the_transition_table() -> None:
    pairs = {(state, after) for (state, _), after in LEDGER.table.items()}
    assert len(pairs) == 12
    for prior in RowState:
        for attempted in RowState:
            legal = (prior, attempted) in pairs
            assert LEGAL[prior][attempted] is legal
            assert (event_of(prior, attempted) is not None) is legal


def test_event_has_one_target_state() -> None:
    assert set(TARGET_STATE) == set(RowEvent)
    for (_, event), after in LEDGER.table.items():
        assert TARGET_STATE[event] is after


def test_reported_codes_are_codes_of_terminal_states() -> None:
    assert {RowState(code) for code in EVENT_BY_REPORTED_CODE} == TERMINAL - {
        RowState.TERMINAL_CANCEL
    }
    assert all(TARGET_STATE[event] == code for code, event in EVENT_BY_REPORTED_CODE.items())
