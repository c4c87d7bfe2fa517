"""A dispatch as a value: a request on its way to a pane, a table of its moves, the fold of its events.

    pending ──notified──▶ notified ──delivered──▶ delivered
       │ tried, retried, deferred     └──failed──▶ failed
       └──────────────────failed──────────────────▶ failed

A move that the table does not have is `InvalidTransition`, and changes nothing. Every event carries
all that its move needs, so folding asks neither a clock nor a store: `DispatchRecord.after`.

Times are store time in nanoseconds; a request that has not been in a state has no time for it.
"""

from __future__ import annotations

import re
from enum import Enum
from hashlib import sha256

from msgspec import field
from msgspec.structs import replace

from holdfast.authority.outcome import QueueTransition
from holdfast.codec import Record
from holdfast.errors import IllegalTransition
from holdfast.messages import Intent
from holdfast.transitions import Transitions

MARK_CHARS = 12
_OF_INTENT = re.compile(r"\d{1,19}-([0-9a-f]{64})")


class DispatchStatus(Enum):
    PENDING = "pending"
    NOTIFIED = "notified"
    DELIVERED = "delivered"
    FAILED = "failed"


DISPATCH = Transitions(
    "dispatch",
    DispatchStatus.PENDING,
    {
        (DispatchStatus.PENDING, QueueTransition.TRIED): DispatchStatus.PENDING,
        (DispatchStatus.PENDING, QueueTransition.NOTIFIED): DispatchStatus.NOTIFIED,
        (DispatchStatus.PENDING, QueueTransition.RETRIED): DispatchStatus.PENDING,
        (DispatchStatus.PENDING, QueueTransition.DEFERRED): DispatchStatus.PENDING,
        # What cannot be typed fails without anybody having been notified.
        (DispatchStatus.PENDING, QueueTransition.FAILED): DispatchStatus.FAILED,
        (DispatchStatus.NOTIFIED, QueueTransition.DELIVERED): DispatchStatus.DELIVERED,
        (DispatchStatus.NOTIFIED, QueueTransition.FAILED): DispatchStatus.FAILED,
    },
)


class InvalidTransition(IllegalTransition):
    code = "invalid_transition"
    hint = "the request has gone on or has ended; look at its status"


class DispatchEvent(Record, frozen=True):
    """One line of the log: a request (no transition), or what happened to it."""

    event_id: str
    request_id: str
    target: str
    transition: QueueTransition | None
    status: DispatchStatus
    at_ns: int
    reason: str = ""
    # Of the request alone.
    metadata: dict[str, str] = field(default_factory=dict)
    digest: str = ""


class DispatchRecord(Record, frozen=True):
    request_id: str
    target: str
    status: DispatchStatus
    created_at: int
    notified_at: int | None = None
    delivered_at: int | None = None
    failed_at: int | None = None
    # Of the latest outcome: also why it is still pending.
    reason: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    # What is to be typed, hashed: the same id with another text is another request.
    digest: str = ""
    # How often typing was begun.
    tries: int = 0
    # It waits for the leader's pane.
    deferred: bool = False
    # How many events tell of it.
    events: int = 1

    @property
    def ended(self) -> bool:
        return self.status in DISPATCH.terminal

    @property
    def since_ns(self) -> int:
        """When it came to be in its state."""
        times = {
            DispatchStatus.PENDING: self.created_at,
            DispatchStatus.NOTIFIED: self.notified_at,
            DispatchStatus.DELIVERED: self.delivered_at,
            DispatchStatus.FAILED: self.failed_at,
        }
        return times[self.status] or 0

    def event(self, transition: QueueTransition, at_ns: int, reason: str) -> DispatchEvent:
        """What is to be logged for a move; InvalidTransition if the table has none."""
        if not DISPATCH.allows(self.status, transition):
            raise InvalidTransition(
                machine=DISPATCH.name,
                prior=self.status.name,
                attempted=transition.name,
                request_id=self.request_id,
                target=self.target,
                at_ns=at_ns,
            )
        return DispatchEvent(
            event_id(self.request_id, self.events),
            self.request_id,
            self.target,
            transition,
            DISPATCH.next(self.status, transition, request_id=self.request_id),
            at_ns,
            reason,
        )

    def after(self, event: DispatchEvent) -> DispatchRecord:
        """The fold."""
        assert event.transition is not None, "a request begins a record"
        status = DISPATCH.next(self.status, event.transition, request_id=self.request_id)
        moved = replace(
            self,
            status=status,
            # A try tells nothing yet: why it is still pending stands.
            reason=event.reason or self.reason,
            tries=self.tries + (event.transition is QueueTransition.TRIED),
            deferred=event.transition is QueueTransition.DEFERRED,
            events=self.events + 1,
        )
        if status is DispatchStatus.NOTIFIED:
            return replace(moved, notified_at=event.at_ns)
        if status is DispatchStatus.DELIVERED:
            return replace(moved, delivered_at=event.at_ns)
        if status is DispatchStatus.FAILED:
            return replace(moved, failed_at=event.at_ns)
        return moved


class Backlog(Record, frozen=True):
    """How many requests are in each state; `deferred` of those that are pending."""

    pending: int = 0
    notified: int = 0
    delivered: int = 0
    failed: int = 0
    deferred: int = 0


def requested(
    request_id: str, target: str, at_ns: int, metadata: dict[str, str], digest: str
) -> DispatchEvent:
    """The first event of a request."""
    return DispatchEvent(
        event_id(request_id, 0),
        request_id,
        target,
        None,
        DISPATCH.initial,
        at_ns,
        "",
        metadata,
        digest,
    )


def begun(event: DispatchEvent) -> DispatchRecord:
    """The record that a request begins."""
    return DispatchRecord(
        event.request_id,
        event.target,
        event.status,
        event.at_ns,
        metadata=event.metadata,
        digest=event.digest,
    )


def request_id_of(intent: Intent) -> str:
    """The request that an effect makes: one for all attempts, and another after a restore."""
    return f"{intent.generation}-{intent.intent_hash.hex()}"


def intent_hash_of(request_id: str) -> bytes | None:
    """The effect that made a request; None when none did."""
    parts = _OF_INTENT.fullmatch(request_id)
    return None if parts is None else bytes.fromhex(parts[1])


def event_id(request_id: str, n: int) -> str:
    return f"{request_id}/{n}"


def mark_of(name: str) -> str:
    """What is typed behind a text, and looked for in the pane: short, and the same for one name."""
    return sha256(name.encode()).hexdigest()[:MARK_CHARS]


def journal_of(universe: str) -> str:
    """The subject of the log."""
    return f"{universe}/dispatch"


def topic(universe: str) -> str:
    """Notified with every event of the log, and when the leader's pane is named."""
    return f"dispatch/{universe}"
