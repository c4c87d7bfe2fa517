"""The authority lease as a value: a table of moves, and the pure fold of logged decisions.

Every event carries what its decision needs, so folding asks neither a clock nor a store, and what
the log tells after a crash is what was stored before it. Events that the table does not allow are
`IllegalTransition`: a log in which one stands was not written by us.
"""

from __future__ import annotations

from enum import Enum

from msgspec.structs import replace

from holdfast.codec import Record
from holdfast.transitions import Transitions


class State(Enum):
    FREE = "free"
    HELD = "held"
    STALE = "stale"


class Kind(Enum):
    ACQUIRED = "acquired"
    RENEWED = "renewed"
    MARKED_STALE = "marked_stale"
    RELEASED = "released"
    FORCE_RELEASED = "force_released"


AUTHORITY = Transitions(
    "authority",
    State.FREE,
    {
        (State.FREE, Kind.ACQUIRED): State.HELD,
        (State.STALE, Kind.ACQUIRED): State.HELD,
        (State.HELD, Kind.RENEWED): State.HELD,
        (State.HELD, Kind.MARKED_STALE): State.STALE,
        (State.HELD, Kind.RELEASED): State.FREE,
        (State.STALE, Kind.RELEASED): State.FREE,
        (State.FREE, Kind.FORCE_RELEASED): State.FREE,
        (State.HELD, Kind.FORCE_RELEASED): State.FREE,
        (State.STALE, Kind.FORCE_RELEASED): State.FREE,
    },
)


class AuthorityEvent(Record, frozen=True):
    """One decision. It tells of the lease it is about: the one granted, or the one that ended."""

    kind: Kind
    owner: str
    incarnation: str
    lease_id: str
    generation: int
    epoch: int
    decided_ns: int
    leased_until_ns: int
    reason: str = ""


class AuthorityLease(Record, frozen=True):
    """Who leads. When free it has neither owner nor time, and keeps the epoch."""

    state: State = AUTHORITY.initial
    owner: str = ""
    incarnation: str = ""
    lease_id: str = ""
    generation: int = 0
    epoch: int = 0
    leased_until_ns: int = 0

    @property
    def stale(self) -> bool:
        return self.state is State.STALE

    def live(self, now_ns: int, generation: int) -> bool:
        return (
            self.state is State.HELD
            and self.generation == generation
            and now_ns < self.leased_until_ns
        )

    def after(self, event: AuthorityEvent) -> AuthorityLease:
        """The fold."""
        state = AUTHORITY.next(
            self.state, event.kind, owner=event.owner, epoch=event.epoch, at_ns=event.decided_ns
        )
        if state is State.FREE:
            return AuthorityLease(state, generation=self.generation, epoch=self.epoch)
        if state is State.STALE:
            return replace(self, state=state)
        return AuthorityLease(
            state,
            event.owner,
            event.incarnation,
            event.lease_id,
            event.generation,
            event.epoch,
            event.leased_until_ns,
        )
