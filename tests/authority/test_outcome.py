"""Outcomes: every reason, with and without retries left, and what it does to a request."""

import pytest

from holdfast.authority.dispatch import DISPATCH, DispatchStatus
from holdfast.authority.outcome import (
    OUTCOMES,
    DispatchOutcomeReason,
    QueueTransition,
    WorkerCli,
    transition_of,
)
from holdfast.errors import Invalid

MODULES = ("holdfast.authority.outcome",)

FAILED = QueueTransition.FAILED
# The whole table, written down a second time: (reason, retries left) → what follows.
EXPECTED = {
    ("confirmed", 0): QueueTransition.NOTIFIED,
    ("confirmed", 1): QueueTransition.NOTIFIED,
    ("unconfirmed", 0): FAILED,
    ("unconfirmed", 1): QueueTransition.RETRIED,
    ("leader_missing", 0): QueueTransition.DEFERRED,
    ("leader_missing", 1): QueueTransition.DEFERRED,
    ("target_missing", 0): FAILED,
    ("target_missing", 1): FAILED,
    ("target_unresolved", 0): FAILED,
    ("target_unresolved", 1): FAILED,
    ("preflight_failed", 0): FAILED,
    ("preflight_failed", 1): FAILED,
    ("send_failed", 0): FAILED,
    ("send_failed", 1): FAILED,
}


def test_the_table_is_complete() -> None:
    assert set(OUTCOMES) == set(DispatchOutcomeReason)
    assert {reason for reason, _ in EXPECTED} == {reason.value for reason in DispatchOutcomeReason}


@pytest.mark.parametrize(("reason", "left"), EXPECTED)
def test_every_outcome_moves_a_request_as_the_table_says(reason: str, left: int) -> None:
    found = transition_of(DispatchOutcomeReason(reason), retries_left=left)
    assert found is EXPECTED[reason, left]


@pytest.mark.parametrize("left", [2, 19])
def test_many_retries_left_are_as_one(left: int) -> None:
    for reason in DispatchOutcomeReason:
        assert transition_of(reason, retries_left=left) is EXPECTED[reason.value, 1]


@pytest.mark.parametrize("reason", DispatchOutcomeReason)
@pytest.mark.parametrize("left", [0, 1])
def test_every_outcome_is_legal_for_a_pending_request(
    reason: DispatchOutcomeReason, left: int
) -> None:
    assert DISPATCH.allows(DispatchStatus.PENDING, transition_of(reason, retries_left=left))


def test_retries_cannot_be_negative() -> None:
    with pytest.raises(Invalid):
        transition_of(DispatchOutcomeReason.UNCONFIRMED, retries_left=-1)


@pytest.mark.parametrize(
    ("name", "cli", "presses"),
    [
        ("claude", WorkerCli.CLAUDE, 1),
        ("Claude", WorkerCli.CLAUDE, 1),
        (" CODEX ", WorkerCli.CODEX, 2),
        ("other", WorkerCli.OTHER, 2),
        ("claude-next", WorkerCli.OTHER, 2),
    ],
)
def test_a_program_is_known_by_its_name(name: str, cli: WorkerCli, presses: int) -> None:
    assert WorkerCli.named(name) is cli
    assert cli.presses == presses


@pytest.mark.parametrize("name", ["", "  ", None, 7])
def test_a_program_without_a_name_is_invalid(name: str) -> None:
    with pytest.raises(Invalid):
        WorkerCli.named(name)
