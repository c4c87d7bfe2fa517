"""How an attempt to dispatch ended, and what that does to the request: one table (document 000).

    reason              retries left   moves the request to
    confirmed           any            notified
    unconfirmed         yes            pending, to be tried again
    unconfirmed         no             failed
    leader_missing      any            pending, deferred until a pane is there
    anything else       any            failed

`WorkerCli` is what runs in the pane: it decides how often Enter is pressed. Pure: nothing here types.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from holdfast.errors import Invalid


class WorkerCli(Enum):
    """The program that reads what is typed."""

    CLAUDE = "claude"
    CODEX = "codex"
    OTHER = "other"

    @property
    def presses(self) -> int:
        """How often Enter is pressed to submit: others take the first for the end of a paste."""
        return 1 if self is WorkerCli.CLAUDE else 2

    @property
    def takes_lines(self) -> bool:
        """Whether a line break is text to it. Elsewhere it submits what stands before it."""
        return self is not WorkerCli.OTHER

    @classmethod
    def named(cls, name: str) -> WorkerCli:
        """By its name, in any case. A program that we do not know is another one."""
        if not isinstance(name, str) or not name.strip():
            raise Invalid(what="cli", found=repr(name)[:64], expected=[one.value for one in cls])
        wanted = name.strip().lower()
        return next((one for one in cls if one.value == wanted), cls.OTHER)


class DispatchOutcomeReason(Enum):
    """What came of an attempt. The value is stable text, and the `reason` of a record."""

    CONFIRMED = "confirmed"
    UNCONFIRMED = "unconfirmed"
    LEADER_MISSING = "leader_missing"
    TARGET_MISSING = "target_missing"
    TARGET_UNRESOLVED = "target_unresolved"
    PREFLIGHT_FAILED = "preflight_failed"
    SEND_FAILED = "send_failed"


class QueueTransition(Enum):
    """What may happen to a request. The first three leave it pending.

    `TRIED` is written before anything is typed, so that whoever comes after a crash knows of it.
    """

    TRIED = "tried"
    RETRIED = "retried"
    DEFERRED = "deferred"
    NOTIFIED = "notified"
    DELIVERED = "delivered"
    FAILED = "failed"


def _either(transition: QueueTransition) -> tuple[QueueTransition, QueueTransition]:
    return transition, transition


# By reason: without retries left, and with.
OUTCOMES: Mapping[DispatchOutcomeReason, tuple[QueueTransition, QueueTransition]] = (
    MappingProxyType(
        {
            DispatchOutcomeReason.CONFIRMED: _either(QueueTransition.NOTIFIED),
            DispatchOutcomeReason.UNCONFIRMED: (QueueTransition.FAILED, QueueTransition.RETRIED),
            DispatchOutcomeReason.LEADER_MISSING: _either(QueueTransition.DEFERRED),
            DispatchOutcomeReason.TARGET_MISSING: _either(QueueTransition.FAILED),
            DispatchOutcomeReason.TARGET_UNRESOLVED: _either(QueueTransition.FAILED),
            DispatchOutcomeReason.PREFLIGHT_FAILED: _either(QueueTransition.FAILED),
            DispatchOutcomeReason.SEND_FAILED: _either(QueueTransition.FAILED),
        }
    )
)


def transition_of(reason: DispatchOutcomeReason, *, retries_left: int) -> QueueTransition:
    """What an outcome does to its request."""
    if retries_left < 0:
        raise Invalid(what="retries_left", why="negative", found=retries_left)
    return OUTCOMES[reason][retries_left > 0]
