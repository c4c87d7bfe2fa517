"""Lease supervision: extends the leases of work in progress and finds the work whose lease is lost.

The task worker (task leases) and the runner (claims of queue items) share these rules. All times are
store times.

    extend      a lease is extended when a third of its remaining time has passed, so two more attempts fit
                before it expires
    together    a lease that is due soon is extended in the commit of a lease that is due now
    at its end  a lease that the store did not extend is checked again, at the latest at its expiry
    revoked     when the revocation counter has changed, the store is asked which leases are lost
    lost        a lease is lost if the store answers so
    expired     while the store does not answer, a lease is lost when the local clock has passed its expiry:
                another worker may have the work

The rules are pure functions. `LeaseSupervision` applies them with the store calls of its owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from holdfast.clock import MS

# Leases that one commit extends.
EXTEND_BATCH_MAX = 1_000
# The shortest time between two extensions of a lease, unless it expires earlier.
EXTEND_INTERVAL_MIN_NS = 50 * MS
# A lease joins an extension if its own is due within this part of its remaining time.
JOIN_PART = 6
# The time of the next extension while there is no lease.
NEVER_NS = 1 << 63


class LeasedWork(Protocol):
    """Work under a lease: the time of the next extension and the expiry."""

    renew_ns: int
    expires_ns: int


Work = TypeVar("Work", bound=LeasedWork)


def next_renewal_ns(now_ns: int, expires_ns: int) -> int:
    """Return when to extend a lease that was granted, extended or left unchanged now."""
    left_ns = expires_ns - now_ns
    if left_ns <= 0:
        return now_ns + EXTEND_INTERVAL_MIN_NS
    return now_ns + max(left_ns // 3, min(left_ns, EXTEND_INTERVAL_MIN_NS))


def leases_to_extend(now_ns: int, held: Sequence[Work]) -> list[Work]:
    """Return the leases to extend now: none until one is due, then also the leases that are due soon."""
    if all(now_ns < work.renew_ns for work in held):
        return []
    return [
        work
        for work in held
        if work.renew_ns - now_ns <= max(work.expires_ns - now_ns, 0) // JOIN_PART
    ]


def expired_leases(now_ns: int, held: Iterable[Work]) -> list[Work]:
    """Return the work whose lease has expired by the local clock."""
    return [work for work in held if work.expires_ns <= now_ns]


class LeaseOperations(Protocol[Work]):
    """The leases of one owner, and their store calls."""

    def held(self) -> list[Work]:
        """Return all work under lease."""

    def extend(self, due: list[Work]) -> Sequence[int | None]:
        """Extend leases in one commit. Return the expiry of each, 0 or None for a lost lease."""

    def count_revocations(self) -> int:
        """Read the counter that changes when a lease is revoked."""

    def find_revoked(self, held: list[Work]) -> list[Work]:
        """Read which of the leases are lost."""


@dataclass(slots=True)
class LeaseCounters:
    """The numbers of extended and of lost leases."""

    renewed: int = 0
    lost: int = 0


class LeaseSupervision(Generic[Work]):
    """Every method that yields work yields it because its lease is lost. The caller abandons it."""

    def __init__(self, leases: LeaseOperations[Work]) -> None:
        # The time of the next extension.
        self.renew_ns = NEVER_NS
        self.counters = LeaseCounters()
        self._leases = leases
        self._revocations = 0

    def add_lease(self, now_ns: int, expires_ns: int) -> int:
        """Note a new lease and return the time of its first extension."""
        renew_ns = next_renewal_ns(now_ns, expires_ns)
        if renew_ns < self.renew_ns:
            self.renew_ns = renew_ns
        return renew_ns

    def check(self, now_ns: int) -> Iterator[Work]:
        """Check the leases in the store, and extend the due ones."""
        yield from self.note_revocations(self._leases.count_revocations())
        if now_ns >= self.renew_ns:
            yield from self._extend(now_ns)

    def note_revocations(self, revocations: int) -> Iterator[Work]:
        """Compare the revocation counter with the last known one, and check the leases if it differs."""
        if revocations != self._revocations:
            yield from self._leases.find_revoked(self._leases.held())
            # Last: after a store error the next call checks again.
            self._revocations = revocations

    def expired(self, now_ns: int) -> list[Work]:
        """Return the work whose lease has expired, while the store does not answer."""
        return expired_leases(now_ns, self._leases.held())

    def _extend(self, now_ns: int) -> Iterator[Work]:
        due = leases_to_extend(now_ns, self._leases.held())
        for start in range(0, len(due), EXTEND_BATCH_MAX):
            batch = due[start : start + EXTEND_BATCH_MAX]
            for work, expires_ns in zip(batch, self._leases.extend(batch), strict=True):
                if not expires_ns:
                    yield work
                    continue
                # The owner of the work may have extended the lease further meanwhile.
                work.expires_ns = max(work.expires_ns, expires_ns)
                work.renew_ns = next_renewal_ns(now_ns, work.expires_ns)
                self.counters.renewed += 1
        self.renew_ns = min((work.renew_ns for work in self._leases.held()), default=NEVER_NS)
