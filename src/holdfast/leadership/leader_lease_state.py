"""The leader lease as a value: a transition table, and the pure fold of logged decisions.

Every event carries all data of its decision, so the fold needs neither a clock nor a store. The
fold of the log after a crash equals the state stored before it. An event that the table does not
allow raises `IllegalTransition`: such a log is corrupt.
"""

from __future__ import annotations

from enum import Enum

from msgspec.structs import replace

from holdfast.codec import Record
from holdfast.transitions import Transitions


class LeaderState(Enum):
    FREE = "free"
    HELD = "held"
    STALE = "stale"


class LeaderEventKind(Enum):
    ACQUIRED = "acquired"
    RENEWED = "renewed"
    MARKED_STALE = "marked_stale"
    RELEASED = "released"
    FORCE_RELEASED = "force_released"


LEADER_TRANSITIONS = Transitions(
    "authority",
    LeaderState.FREE,
    {
        (LeaderState.FREE, LeaderEventKind.ACQUIRED): LeaderState.HELD,
        (LeaderState.STALE, LeaderEventKind.ACQUIRED): LeaderState.HELD,
        (LeaderState.HELD, LeaderEventKind.RENEWED): LeaderState.HELD,
        (LeaderState.HELD, LeaderEventKind.MARKED_STALE): LeaderState.STALE,
        (LeaderState.HELD, LeaderEventKind.RELEASED): LeaderState.FREE,
        (LeaderState.STALE, LeaderEventKind.RELEASED): LeaderState.FREE,
        (LeaderState.FREE, LeaderEventKind.FORCE_RELEASED): LeaderState.FREE,
        (LeaderState.HELD, LeaderEventKind.FORCE_RELEASED): LeaderState.FREE,
        (LeaderState.STALE, LeaderEventKind.FORCE_RELEASED): LeaderState.FREE,
    },
)


class LeaderLeaseEvent(Record, frozen=True):
    """One decision, with the lease that it grants or ends."""

    kind: LeaderEventKind
    owner: str
    incarnation: str
    lease_id: str
    generation: int
    epoch: int
    decided_ns: int
    leased_until_ns: int
    reason: str = ""


class LeaderLease(Record, frozen=True):
    """The leader lease. A free lease has no owner and no expiry, and keeps the epoch."""

    state: LeaderState = LEADER_TRANSITIONS.initial
    owner: str = ""
    incarnation: str = ""
    lease_id: str = ""
    generation: int = 0
    epoch: int = 0
    leased_until_ns: int = 0

    @property
    def stale(self) -> bool:
        return self.state is LeaderState.STALE

    def live(self, now_ns: int, generation: int) -> bool:
        return (
            self.state is LeaderState.HELD
            and self.generation == generation
            and now_ns < self.leased_until_ns
        )

    def apply(self, event: LeaderLeaseEvent) -> LeaderLease:
        """Apply an event and return the lease after it."""
        state = LEADER_TRANSITIONS.next(
            self.state, event.kind, owner=event.owner, epoch=event.epoch, at_ns=event.decided_ns
        )
        if state is LeaderState.FREE:
            return LeaderLease(state, generation=self.generation, epoch=self.epoch)
        if state is LeaderState.STALE:
            return replace(self, state=state)
        return LeaderLease(
            state,
            event.owner,
            event.incarnation,
            event.lease_id,
            event.generation,
            event.epoch,
            event.leased_until_ns,
        )
