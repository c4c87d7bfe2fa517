"""Dispatch outcomes: the result of a dispatch attempt and its effect on the request, as one table
(document 000).

    reason              retries left   moves the request to
    confirmed           any            notified
    unconfirmed         yes            pending, to be retried
    unconfirmed         no             failed
    leader_missing      any            pending, deferred until a pane exists
    any other reason    any            failed

`WorkerCli` is the program in the pane. It determines how often Enter is pressed. Pure: this module
does no IO.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from holdfast.errors import Invalid


class WorkerCli(Enum):
    """The program that reads the typed text."""

    CLAUDE = "claude"
    CODEX = "codex"
    OTHER = "other"

    @property
    def presses(self) -> int:
        """The number of Enter presses that submit a text. Other programs than Claude take the first
        one as the end of a paste."""
        return 1 if self is WorkerCli.CLAUDE else 2

    @property
    def takes_lines(self) -> bool:
        """Whether the program accepts a line break as text. Other programs submit the text before
        it."""
        return self is not WorkerCli.OTHER

    @classmethod
    def named(cls, name: str) -> WorkerCli:
        """Return the program with this name, ignoring case; OTHER for any unknown name."""
        if not isinstance(name, str) or not name.strip():
            raise Invalid(what="cli", found=repr(name)[:64], expected=[one.value for one in cls])
        wanted = name.strip().lower()
        return next((one for one in cls if one.value == wanted), cls.OTHER)


class DispatchOutcomeReason(Enum):
    """The result of an attempt. The value is stable text and the `reason` of a record."""

    CONFIRMED = "confirmed"
    UNCONFIRMED = "unconfirmed"
    LEADER_MISSING = "leader_missing"
    TARGET_MISSING = "target_missing"
    TARGET_UNRESOLVED = "target_unresolved"
    PREFLIGHT_FAILED = "preflight_failed"
    SEND_FAILED = "send_failed"


class QueueTransition(Enum):
    """The events of a request. The first three leave it pending.

    `TRIED` is logged before any text is typed, so that the attempt is known after a crash.
    """

    TRIED = "tried"
    RETRIED = "retried"
    DEFERRED = "deferred"
    NOTIFIED = "notified"
    DELIVERED = "delivered"
    FAILED = "failed"


def _both(transition: QueueTransition) -> tuple[QueueTransition, QueueTransition]:
    return transition, transition


# By reason: (transition without retries left, transition with retries left).
OUTCOMES: Mapping[DispatchOutcomeReason, tuple[QueueTransition, QueueTransition]] = (
    MappingProxyType(
        {
            DispatchOutcomeReason.CONFIRMED: _both(QueueTransition.NOTIFIED),
            DispatchOutcomeReason.UNCONFIRMED: (QueueTransition.FAILED, QueueTransition.RETRIED),
            DispatchOutcomeReason.LEADER_MISSING: _both(QueueTransition.DEFERRED),
            DispatchOutcomeReason.TARGET_MISSING: _both(QueueTransition.FAILED),
            DispatchOutcomeReason.TARGET_UNRESOLVED: _both(QueueTransition.FAILED),
            DispatchOutcomeReason.PREFLIGHT_FAILED: _both(QueueTransition.FAILED),
            DispatchOutcomeReason.SEND_FAILED: _both(QueueTransition.FAILED),
        }
    )
)


def transition_of(reason: DispatchOutcomeReason, *, retries_left: int) -> QueueTransition:
    """Return the transition of a request for an outcome."""
    if retries_left < 0:
        raise Invalid(what="retries_left", why="negative", found=retries_left)
    return OUTCOMES[reason][retries_left > 0]
