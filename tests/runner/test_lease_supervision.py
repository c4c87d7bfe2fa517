"""The shared rules of lease supervision as tables, and their use with a lease table in memory."""

from __future__ import annotations

import pytest

from holdfast.clock import MS, S
from holdfast.errors import Busy
from holdfast.runner.lease_supervision import (
    EXTEND_BATCH_MAX,
    EXTEND_INTERVAL_MIN_NS,
    NEVER_NS,
    LeaseSupervision,
    expired_leases,
    leases_to_extend,
    next_renewal_ns,
)

MODULES = ("holdfast.runner.lease_supervision",)

NOW_NS = 100 * S


class Lease:
    """A lease, by the times that are left until its extension and its expiry."""

    def __init__(self, renew_in_ns: int, expires_in_ns: int) -> None:
        self.renew_ns = NOW_NS + renew_in_ns
        self.expires_ns = NOW_NS + expires_in_ns


# -- rules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left_ns", "renewed_in_ns"),
    [
        (30 * S, 10 * S),
        (9 * S, 3 * S),
        (150 * MS, 50 * MS),
        # Not more often than the minimum, but at the latest at the expiry.
        (90 * MS, EXTEND_INTERVAL_MIN_NS),
        (20 * MS, 20 * MS),
        (1, 1),
        # A lease without an extension past its expiry.
        (0, EXTEND_INTERVAL_MIN_NS),
        (-S, EXTEND_INTERVAL_MIN_NS),
    ],
)
def test_lease_is_extended_after_a_third_of_its_remaining_time(
    left_ns: int, renewed_in_ns: int
) -> None:
    assert next_renewal_ns(NOW_NS, NOW_NS + left_ns) == NOW_NS + renewed_in_ns


@pytest.mark.parametrize(
    ("leases", "extended"),
    [
        ([], []),
        # Until one is due, none is extended.
        ([(1, 20 * S)], []),
        ([(1, 20 * S), (1 * MS, 20 * S)], []),
        ([(0, 20 * S)], [0]),
        ([(-S, 19 * S)], [0]),
        # With a due lease, also a lease that is due within a sixth of its remaining time.
        ([(0, 20 * S), (4 * S, 24 * S)], [0, 1]),
        ([(0, 20 * S), (4 * S + 1, 24 * S)], [0]),
        ([(10 * S, 30 * S), (0, 20 * S), (1 * S, 21 * S)], [1, 2]),
        # A long lease does not join the extensions of a short one.
        ([(0, 1 * S), (20 * 60 * S, 3600 * S)], [0]),
        # A lease past its expiry is due, and no other lease joins because of a negative rest.
        ([(-S, -S), (1 * MS, -S)], [0]),
    ],
)
def test_leases_due_now_and_soon_are_extended_together(
    leases: list[tuple[int, int]], extended: list[int]
) -> None:
    held = [Lease(*times) for times in leases]
    assert leases_to_extend(NOW_NS, held) == [held[at] for at in extended]


@pytest.mark.parametrize(("left_ns", "lost"), [(1, False), (0, True), (-1, True)])
def test_lease_at_its_expiry_is_expired(left_ns: int, lost: bool) -> None:
    held = [Lease(0, left_ns)]
    assert expired_leases(NOW_NS, held) == (held if lost else [])


# -- supervision -----------------------------------------------------------------------------------


class LeasesInMemory:
    """Leases of `ttl_ns`, the calls of the supervision, and the leases that the store has revoked."""

    def __init__(self, *leases: Lease, ttl_ns: int = 30 * S) -> None:
        self.leases = list(leases)
        self.ttl_ns = ttl_ns
        self.now_ns = NOW_NS
        self.revocations = 0
        self.revoked: list[Lease] = []
        self.extended: list[list[Lease]] = []
        self.lookups = 0
        self.error: Busy | None = None

    def held(self) -> list[Lease]:
        return list(self.leases)

    def extend(self, due: list[Lease]) -> list[int | None]:
        self._raise_error()
        self.extended.append(due)
        return [None if lease in self.revoked else self.now_ns + self.ttl_ns for lease in due]

    def count_revocations(self) -> int:
        return self.revocations

    def find_revoked(self, held: list[Lease]) -> list[Lease]:
        self.lookups += 1
        self._raise_error()
        return [lease for lease in held if lease in self.revoked]

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error


def supervised(leases: LeasesInMemory) -> LeaseSupervision[Lease]:
    supervision: LeaseSupervision[Lease] = LeaseSupervision(leases)
    for lease in leases.leases:
        lease.renew_ns = supervision.add_lease(NOW_NS, lease.expires_ns)
    return supervision


def test_next_extension_is_the_earliest_of_all_leases() -> None:
    leases = LeasesInMemory(Lease(0, 30 * S), Lease(0, 9 * S), Lease(0, 60 * S))
    supervision = supervised(leases)
    assert supervision.renew_ns == NOW_NS + 3 * S
    assert LeaseSupervision(LeasesInMemory()).renew_ns == NEVER_NS


def test_check_before_the_next_extension_calls_no_extension() -> None:
    leases = LeasesInMemory(Lease(0, 30 * S))
    assert list(supervised(leases).check(NOW_NS + 10 * S - 1)) == []
    assert (leases.extended, leases.lookups) == ([], 0)


def test_check_extends_a_due_lease_and_schedules_the_next_extension() -> None:
    [lease] = held = [Lease(0, 30 * S)]
    leases = LeasesInMemory(*held)
    supervision = supervised(leases)
    leases.now_ns += 10 * S
    assert list(supervision.check(leases.now_ns)) == []
    assert leases.extended == [[lease]]
    assert (lease.expires_ns, lease.renew_ns) == (NOW_NS + 40 * S, NOW_NS + 20 * S)
    assert supervision.renew_ns == lease.renew_ns


def test_extension_never_shortens_a_lease() -> None:
    [lease] = held = [Lease(0, 300 * S)]
    leases = LeasesInMemory(*held)
    supervision = supervised(leases)
    leases.now_ns += 100 * S
    assert list(supervision.check(leases.now_ns)) == []
    assert lease.expires_ns == NOW_NS + 300 * S


def test_check_yields_the_work_whose_extension_is_refused() -> None:
    kept, lost = Lease(0, 30 * S), Lease(0, 30 * S)
    leases = LeasesInMemory(kept, lost)
    supervision = supervised(leases)
    leases.revoked, leases.now_ns = [lost], NOW_NS + 10 * S
    found = []
    for work in supervision.check(leases.now_ns):
        found.append(work)
        leases.leases.remove(work)
    assert found == [lost]
    assert supervision.renew_ns == kept.renew_ns


def test_store_error_leaves_the_extension_due() -> None:
    [lease] = held = [Lease(0, 30 * S)]
    leases = LeasesInMemory(*held)
    supervision = supervised(leases)
    leases.now_ns, leases.error = NOW_NS + 10 * S, Busy()
    with pytest.raises(Busy):
        list(supervision.check(leases.now_ns))
    leases.error = None
    assert list(supervision.check(leases.now_ns)) == []
    assert leases.extended == [[lease]]


def test_more_leases_than_a_batch_are_extended_in_several_commits() -> None:
    leases = LeasesInMemory(*(Lease(0, 30 * S) for _ in range(2 * EXTEND_BATCH_MAX + 1)))
    supervision = supervised(leases)
    assert list(supervision.check(NOW_NS + 10 * S)) == []
    assert [len(batch) for batch in leases.extended] == [EXTEND_BATCH_MAX, EXTEND_BATCH_MAX, 1]


def test_changed_revocation_counter_looks_up_the_leases_once() -> None:
    kept, lost = Lease(0, 30 * S), Lease(0, 30 * S)
    leases = LeasesInMemory(kept, lost)
    supervision = supervised(leases)
    leases.revocations, leases.revoked = 1, [lost]
    assert list(supervision.check(NOW_NS)) == [lost]
    assert list(supervision.check(NOW_NS)) == []
    assert (leases.lookups, leases.extended) == (1, [])


def test_revocations_are_looked_up_again_after_a_store_error() -> None:
    [lost] = held = [Lease(0, 30 * S)]
    leases = LeasesInMemory(*held)
    supervision = supervised(leases)
    leases.revocations, leases.revoked, leases.error = 1, [lost], Busy()
    with pytest.raises(Busy):
        list(supervision.note_revocations(1))
    leases.error = None
    assert list(supervision.note_revocations(1)) == [lost]
    assert list(supervision.note_revocations(1)) == []


def test_expired_leases_need_no_store_call() -> None:
    expired, live = Lease(0, 1 * S), Lease(0, 30 * S)
    leases = LeasesInMemory(expired, live)
    assert supervised(leases).expired(NOW_NS + 1 * S) == [expired]
    assert (leases.extended, leases.lookups) == ([], 0)
