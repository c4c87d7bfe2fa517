"""Dispatch outcomes: the transition of every reason, with and without retries left."""

import pytest

from holdfast.dispatch.outcomes import (
    OUTCOMES,
    DispatchOutcomeReason,
    QueueTransition,
    WorkerCli,
    transition_of,
)
from holdfast.dispatch.request import DISPATCH, DispatchStatus
from holdfast.errors import Invalid

MODULES = ("holdfast.dispatch.outcomes",)

FAILED = QueueTransition.FAILED
# A second copy of the whole table: (reason, retries left) → transition.
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


def test_outcome_table_is_complete() -> None:
    assert set(OUTCOMES) == set(DispatchOutcomeReason)
    assert {reason for reason, _ in EXPECTED} == {reason.value for reason in DispatchOutcomeReason}


@pytest.mark.parametrize(("reason", "left"), EXPECTED)
def test_transition_of_every_outcome_equals_the_expected_table(reason: str, left: int) -> None:
    found = transition_of(DispatchOutcomeReason(reason), retries_left=left)
    assert found is EXPECTED[reason, left]


@pytest.mark.parametrize("left", [2, 19])
def test_transition_of_many_retries_left_equals_one_left(left: int) -> None:
    for reason in DispatchOutcomeReason:
        assert transition_of(reason, retries_left=left) is EXPECTED[reason.value, 1]


@pytest.mark.parametrize("reason", DispatchOutcomeReason)
@pytest.mark.parametrize("left", [0, 1])
def test_transition_of_every_outcome_is_legal_for_a_pending_request(
    reason: DispatchOutcomeReason, left: int
) -> None:
    assert DISPATCH.allows(DispatchStatus.PENDING, transition_of(reason, retries_left=left))


def test_negative_retries_left_is_invalid() -> None:
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
def test_worker_cli_named_recognises_programs(name: str, cli: WorkerCli, presses: int) -> None:
    assert WorkerCli.named(name) is cli
    assert cli.presses == presses


@pytest.mark.parametrize("name", ["", "  ", None, 7])
def test_worker_cli_named_without_a_name_is_invalid(name: str) -> None:
    with pytest.raises(Invalid):
        WorkerCli.named(name)
