"""A dispatch request as a value: its transition table, its record, and the fold of its events.

    pending ──notified──▶ notified ──delivered──▶ delivered
       │ tried, retried, deferred     └──failed──▶ failed
       └──────────────────failed──────────────────▶ failed

A transition that the table does not allow raises `InvalidTransition` and changes nothing. Every
event carries all data of its transition, so the fold needs neither a clock nor a store:
`DispatchRecord.after`.

Times are store time in nanoseconds. A state that the request has not reached has no time.
"""

from __future__ import annotations

import re
from enum import Enum
from hashlib import sha256

from msgspec import field
from msgspec.structs import replace

from holdfast.codec import Record
from holdfast.dispatch.outcomes import QueueTransition
from holdfast.errors import IllegalTransition
from holdfast.messages import Intent
from holdfast.transitions import Transitions

MARK_CHARS = 12
_INTENT_REQUEST_ID = re.compile(r"\d{1,19}-([0-9a-f]{64})")


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
        # A request that cannot be typed fails without having been notified.
        (DispatchStatus.PENDING, QueueTransition.FAILED): DispatchStatus.FAILED,
        (DispatchStatus.NOTIFIED, QueueTransition.DELIVERED): DispatchStatus.DELIVERED,
        (DispatchStatus.NOTIFIED, QueueTransition.FAILED): DispatchStatus.FAILED,
    },
)


class InvalidTransition(IllegalTransition):
    """A transition that the table does not allow in the current state."""

    code = "invalid_transition"
    hint = "the request is already in another state; check its status"


class DispatchEvent(Record, frozen=True):
    """One log entry: a new request (no transition), or a transition of a request."""

    event_id: str
    request_id: str
    target: str
    transition: QueueTransition | None
    status: DispatchStatus
    at_ns: int
    reason: str = ""
    # Only in the event of a new request.
    metadata: dict[str, str] = field(default_factory=dict)
    digest: str = ""


class DispatchRecord(Record, frozen=True):
    """The current state of a dispatch request."""

    request_id: str
    target: str
    status: DispatchStatus
    created_at: int
    notified_at: int | None = None
    delivered_at: int | None = None
    failed_at: int | None = None
    # The reason of the latest outcome, also while the request is still pending.
    reason: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    # The hash of the text. The same id with another text is another request.
    digest: str = ""
    # The number of started attempts to type the text.
    tries: int = 0
    # The request waits for the leader's pane.
    deferred: bool = False
    # The number of log events of this request.
    events: int = 1

    @property
    def ended(self) -> bool:
        return self.status in DISPATCH.terminal

    @property
    def since_ns(self) -> int:
        """The time at which the request entered its state."""
        times = {
            DispatchStatus.PENDING: self.created_at,
            DispatchStatus.NOTIFIED: self.notified_at,
            DispatchStatus.DELIVERED: self.delivered_at,
            DispatchStatus.FAILED: self.failed_at,
        }
        return times[self.status] or 0

    def event(self, transition: QueueTransition, at_ns: int, reason: str) -> DispatchEvent:
        """Make the log event of a transition. Raise InvalidTransition if the table does not allow
        it."""
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
        """Apply an event and return the record after it."""
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


class DispatchBacklog(Record, frozen=True):
    """The number of requests by state. `deferred` counts a subset of the pending ones."""

    pending: int = 0
    notified: int = 0
    delivered: int = 0
    failed: int = 0
    deferred: int = 0


def make_request_event(
    request_id: str, target: str, at_ns: int, metadata: dict[str, str], digest: str
) -> DispatchEvent:
    """Make the first event of a request."""
    return DispatchEvent(
        event_id=event_id(request_id, 0),
        request_id=request_id,
        target=target,
        transition=None,
        status=DISPATCH.initial,
        at_ns=at_ns,
        reason="",
        metadata=metadata,
        digest=digest,
    )


def make_record(event: DispatchEvent) -> DispatchRecord:
    """Make the record of a new request from its first event."""
    return DispatchRecord(
        event.request_id,
        event.target,
        event.status,
        event.at_ns,
        metadata=event.metadata,
        digest=event.digest,
    )


def request_id_of(intent: Intent) -> str:
    """Return the request id of an effect: the same for all attempts, a new one after a restore of
    the store."""
    return f"{intent.generation}-{intent.intent_hash.hex()}"


def intent_hash_of(request_id: str) -> bytes | None:
    """Return the intent hash of the effect that made a request; None if no effect made it."""
    parts = _INTENT_REQUEST_ID.fullmatch(request_id)
    return None if parts is None else bytes.fromhex(parts[1])


def event_id(request_id: str, n: int) -> str:
    return f"{request_id}/{n}"


def mark_of(name: str) -> str:
    """Return the short mark that is typed behind a text and searched for in the pane. It depends
    only on the name."""
    return sha256(name.encode()).hexdigest()[:MARK_CHARS]


def log_subject(universe: str) -> str:
    """The journal subject of the dispatch log."""
    return f"{universe}/dispatch"


def topic(universe: str) -> str:
    """The topic that is notified with every log event, and when the leader's pane is set."""
    return f"dispatch/{universe}"
