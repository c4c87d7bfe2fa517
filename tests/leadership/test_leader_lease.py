"""The leader lease: acquire, renew, release, mark stale, force release, and the event log."""

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.clock import S, SimClock
from holdfast.durable import journal
from holdfast.durable import lease as leases
from holdfast.durable.lease import Lease
from holdfast.errors import (
    AlreadyHeldByOther,
    Fenced,
    Held,
    Invalid,
    NotHeld,
    OwnerMismatch,
    from_wire,
    to_wire,
)
from holdfast.leadership import leader_lease
from holdfast.leadership.leader_lease_state import LeaderLease, LeaderState
from holdfast.store.api import Store
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend
from tests.leadership.rig import (
    TTL,
    U,
    acquire,
    current,
    force_release,
    log,
    logged_events,
    mark_stale,
    release,
    renew,
    require_log_and_state_agree,
    simulate_restore,
    write_with_lease,
)

MODULES = ("holdfast.leadership.leader_lease",)


# -- acquire -------------------------------------------------------------------------------------


def test_acquire_logs_an_event_equal_to_the_granted_lease(sim_store: Store) -> None:
    granted = acquire(sim_store)
    [event] = log(sim_store)
    assert (event.lease_id, event.leased_until_ns) == (granted.lease_id, granted.expires_ns)
    assert event.decided_ns + TTL == granted.expires_ns
    assert current(sim_store) == LeaderLease(
        LeaderState.HELD, "a", "1", granted.lease_id, 1, 1, granted.expires_ns
    )


def test_repeated_acquire_returns_the_same_lease_and_logs_nothing(
    sim_store: Store, clock: SimClock
) -> None:
    granted = acquire(sim_store)
    clock.advance(TTL // 2)
    assert acquire(sim_store) == granted
    assert logged_events(sim_store) == [("acquired", "a", 1)]


def test_acquire_by_another_owner_raises_already_held_with_leader_and_expiry(
    sim_store: Store,
) -> None:
    granted = acquire(sim_store, "a")
    with pytest.raises(AlreadyHeldByOther) as error:
        acquire(sim_store, "b")
    assert error.value.fields == {
        "universe": U,
        "owner": "a",
        "incarnation": "1",
        "until_ns": granted.expires_ns,
    }
    assert isinstance(error.value, Held)
    assert error.value.retryable


def test_new_incarnation_acquires_only_after_the_former_lease_expires(
    sim_store: Store, clock: SimClock
) -> None:
    former = acquire(sim_store, "a", "1")
    with pytest.raises(AlreadyHeldByOther):
        acquire(sim_store, "a", "2")
    clock.advance(TTL)
    assert acquire(sim_store, "a", "2").epoch == former.epoch + 1
    with pytest.raises(Fenced):
        write_with_lease(sim_store, former)


def test_acquire_after_expiry_increments_the_epoch(sim_store: Store, clock: SimClock) -> None:
    acquire(sim_store)
    clock.advance(TTL)
    assert acquire(sim_store).epoch == 2
    assert logged_events(sim_store) == [
        ("acquired", "a", 1),
        ("marked_stale", "a", 1),
        ("acquired", "a", 2),
    ]


def test_stale_mark_and_next_acquire_have_the_same_decision_time(
    sim_store: Store, clock: SimClock
) -> None:
    acquire(sim_store, "a")
    clock.advance(TTL)
    acquire(sim_store, "b")
    _, stale, granted = log(sim_store)
    assert stale.decided_ns == granted.decided_ns


def test_each_universe_has_its_own_leader_lease(sim_store: Store) -> None:
    acquire(sim_store, "a")
    assert sim_store.transact(leader_lease.acquire, "shop", "b", "1", TTL).epoch == 1
    assert sim_store.read(leader_lease.epoch, "nowhere") == 0
    assert sim_store.read(leader_lease.current, "nowhere") is None


def test_leader_lease_is_not_held_after_a_store_restore(sim_store: Store) -> None:
    old = acquire(sim_store, "a")
    simulate_restore(sim_store)
    with pytest.raises(NotHeld):
        renew(sim_store, old)
    with pytest.raises(NotHeld):
        release(sim_store, old)
    assert acquire(sim_store, "b").epoch == old.epoch + 1
    assert logged_events(sim_store)[1:] == [("marked_stale", "a", 1), ("acquired", "b", 2)]
    require_log_and_state_agree(sim_store)


# -- renew and release ---------------------------------------------------------------------------


def test_renew_extends_the_lease_from_now_and_logs_it(sim_store: Store, clock: SimClock) -> None:
    held = acquire(sim_store)
    clock.advance(TTL // 2)
    renewed = renew(sim_store, held)
    assert renewed.expires_ns - held.expires_ns >= TTL // 2
    assert renewed.epoch == held.epoch
    assert log(sim_store)[-1].leased_until_ns == renewed.expires_ns


def test_renew_never_shortens_the_lease(sim_store: Store) -> None:
    held = acquire(sim_store)
    assert renew(sim_store, held, S).expires_ns == held.expires_ns


def test_renew_of_an_expired_lease_raises_not_held(sim_store: Store, clock: SimClock) -> None:
    held = acquire(sim_store)
    clock.advance(TTL)
    with pytest.raises(NotHeld):
        renew(sim_store, held)
    assert logged_events(sim_store) == [("acquired", "a", 1)]


def test_renew_of_a_lease_marked_stale_raises_not_held(sim_store: Store, clock: SimClock) -> None:
    held = acquire(sim_store)
    clock.advance(TTL)
    assert mark_stale(sim_store)
    with pytest.raises(NotHeld):
        renew(sim_store, held)


@pytest.mark.parametrize("former", [("b", "1"), ("a", "0")])
def test_renew_by_another_owner_or_incarnation_raises_owner_mismatch(
    sim_store: Store, clock: SimClock, former: tuple[str, str]
) -> None:
    old = acquire(sim_store, *former)
    clock.advance(TTL)
    held = acquire(sim_store, "a", "1")
    with pytest.raises(OwnerMismatch) as error:
        renew(sim_store, old)
    assert error.value.fields == {
        "universe": U,
        "lease_id": old.lease_id,
        "current": held.lease_id,
    }


def test_renew_of_an_older_lease_of_the_leader_raises_not_held(sim_store: Store) -> None:
    old = acquire(sim_store)
    release(sim_store, old)
    acquire(sim_store)
    with pytest.raises(NotHeld):
        renew(sim_store, old)


def test_lease_can_be_acquired_immediately_after_release(sim_store: Store) -> None:
    held = acquire(sim_store, "a")
    release(sim_store, held)
    assert current(sim_store) is None
    assert acquire(sim_store, "b").epoch == 2
    with pytest.raises(OwnerMismatch):
        release(sim_store, held)


def test_release_of_an_expired_lease_logs_a_stale_mark_first(
    sim_store: Store, clock: SimClock
) -> None:
    held = acquire(sim_store)
    clock.advance(TTL)
    release(sim_store, held)
    assert [kind for kind, *_ in logged_events(sim_store)] == [
        "acquired",
        "marked_stale",
        "released",
    ]


def test_second_release_raises_not_held(sim_store: Store) -> None:
    held = acquire(sim_store)
    release(sim_store, held)
    with pytest.raises(NotHeld):
        release(sim_store, held)
    assert logged_events(sim_store) == [("acquired", "a", 1), ("released", "a", 1)]


# -- mark stale and force release ---------------------------------------------------------------------


def test_mark_stale_marks_only_an_expired_lease_and_only_once(
    sim_store: Store, clock: SimClock
) -> None:
    assert not mark_stale(sim_store)
    acquire(sim_store)
    assert not mark_stale(sim_store)
    clock.advance(2 * TTL)
    assert mark_stale(sim_store)
    assert not mark_stale(sim_store)
    assert logged_events(sim_store) == [("acquired", "a", 1), ("marked_stale", "a", 1)]


@pytest.mark.parametrize("seconds", [0, 10])
def test_force_release_frees_a_live_or_expired_lease_and_keeps_the_epoch(
    sim_store: Store, clock: SimClock, seconds: int
) -> None:
    held = acquire(sim_store, "a")
    clock.advance(seconds * S)
    assert force_release(sim_store, "it hangs") == 1
    assert current(sim_store) is None
    assert log(sim_store)[-1].reason == "it hangs"
    with pytest.raises(Fenced):
        write_with_lease(sim_store, held)
    assert acquire(sim_store, "b").epoch == 2


def test_force_release_without_a_leader_is_only_logged(sim_store: Store) -> None:
    assert force_release(sim_store) == 0
    assert logged_events(sim_store) == [("force_released", "", 0)]
    require_log_and_state_agree(sim_store)
    assert acquire(sim_store).epoch == 1


# -- the log -------------------------------------------------------------------------------------


def test_leader_log_is_truncated_and_rebuilds_the_same_state(
    sim_store: Store, clock: SimClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_lease, "LOG_BASELINE_EVERY", 10)
    held = acquire(sim_store)
    for at in range(100):
        held = renew(sim_store, held)
        if at % 7 == 0:
            release(sim_store, held)
            held = acquire(sim_store)
        require_log_and_state_agree(sim_store)
        assert len(log(sim_store)) <= 21
    head = sim_store.read(journal.head, leader_lease.resource(U))
    assert head.height > 100
    assert head.floor > 80


def test_failed_acquire_logs_nothing(sim_store: Store, clock: SimClock) -> None:
    acquire(sim_store)
    clock.advance(TTL)
    with pytest.raises(Invalid):
        acquire(sim_store, "b", ttl_ns=0)
    assert logged_events(sim_store) == [("acquired", "a", 1)]
    held = current(sim_store)
    assert held is not None
    assert not held.stale


def test_release_notifies_the_leader_topic_and_renew_does_not(sim_store: Store) -> None:
    held = acquire(sim_store)
    seen = sim_store.wait(leader_lease.topic(U), 0, 0)
    assert seen
    renew(sim_store, held)
    assert sim_store.wait(leader_lease.topic(U), seen, 0) == seen
    release(sim_store, held)
    assert sim_store.wait(leader_lease.topic(U), seen, 0) > seen


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("universe", ["", "x" * 195])
def test_acquire_with_a_bad_universe_name_is_invalid(sim_store: Store, universe: str) -> None:
    with pytest.raises(Invalid):
        sim_store.transact(leader_lease.acquire, universe, "a", "1", TTL)


@pytest.mark.parametrize(
    ("owner", "incarnation", "ttl_ns"), [("", "1", TTL), ("a", "", TTL), ("a", "1", -1)]
)
def test_acquire_with_a_bad_owner_incarnation_or_ttl_is_invalid(
    sim_store: Store, owner: str, incarnation: str, ttl_ns: int
) -> None:
    with pytest.raises(Invalid):
        acquire(sim_store, owner, incarnation, ttl_ns)
    assert logged_events(sim_store) == []


def test_renew_and_release_of_another_resources_lease_are_invalid(sim_store: Store) -> None:
    foreign = sim_store.transact(leases.acquire, "elsewhere", "a", "1", TTL)
    acquire(sim_store, "a", "1")
    for command in (renew, release):
        with pytest.raises(Invalid):
            command(sim_store, foreign)


@pytest.mark.parametrize("kind", [AlreadyHeldByOther, NotHeld, OwnerMismatch])
def test_leader_lease_errors_keep_their_class_across_the_wire(kind: type[Fenced | Held]) -> None:
    assert type(from_wire(to_wire(kind(universe=U)))) is kind


# -- against the sequential model ----------------------------------------------------------------


@dataclasses.dataclass
class LeaderLeaseModel:
    holder: tuple[str, str] | None = None
    until_ns: int = 0
    epoch: int = 0

    def acquire(self, holder: tuple[str, str], now_ns: int, ttl_ns: int) -> bool:
        if self.holder is None or now_ns >= self.until_ns:
            self.holder, self.until_ns, self.epoch = holder, now_ns + ttl_ns, self.epoch + 1
        return self.holder == holder

    def owns(self, lease: Lease) -> bool:
        return (lease.worker, lease.incarnation) == self.holder and lease.epoch == self.epoch


HOLDERS = st.tuples(st.sampled_from("ab"), st.sampled_from("12"))
SECONDS = st.integers(1, 10)
WHICH = st.integers(0, 50)


class LeaderLeaseMachine(RuleBasedStateMachine):
    """Every result equals the model's. The log rebuilds the stored state. Every grant follows a logged
    end of the previous lease."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = SimClock()
        self.store = InProcessStore("memory:", MemoryBackend(), self.clock)
        self.model = LeaderLeaseModel()
        self.leases: list[Lease] = []

    def commit_ns(self) -> int:
        """The timestamp of the next commit: at least one more than the last."""
        engine = self.store.engine
        return max(engine.now_ns(), engine._last_ns + 1)

    @rule(who=HOLDERS, ttl=SECONDS)
    def acquire(self, who: tuple[str, str], ttl: int) -> None:
        expected = self.model.acquire(who, self.commit_ns(), ttl * S)
        try:
            got = acquire(self.store, *who, ttl_ns=ttl * S)
        except AlreadyHeldByOther:
            assert not expected
        else:
            assert expected
            assert (got.epoch, got.expires_ns) == (self.model.epoch, self.model.until_ns)
            self.leases.append(got)

    @rule(at=WHICH, ttl=SECONDS)
    def renew(self, at: int, ttl: int) -> None:
        if self.leases:
            held = self.leases[at % len(self.leases)]
            now_ns = self.commit_ns()
            legal = self.model.owns(held) and now_ns < self.model.until_ns
            try:
                got = renew(self.store, held, ttl * S)
            except (NotHeld, OwnerMismatch):
                assert not legal
            else:
                assert legal
                self.model.until_ns = max(self.model.until_ns, now_ns + ttl * S)
                assert got.expires_ns == self.model.until_ns

    @rule(at=WHICH)
    def lead(self, at: int) -> None:
        if self.leases:
            held = self.leases[at % len(self.leases)]
            legal = self.model.owns(held) and self.commit_ns() < self.model.until_ns
            try:
                write_with_lease(self.store, held)
            except Fenced:
                assert not legal
            else:
                assert legal

    @rule(at=WHICH)
    def release(self, at: int) -> None:
        if self.leases:
            held = self.leases[at % len(self.leases)]
            legal = self.model.owns(held)
            try:
                release(self.store, held)
            except (NotHeld, OwnerMismatch):
                assert not legal
            else:
                assert legal
                self.model.holder = None

    @rule()
    def force_release(self) -> None:
        assert force_release(self.store) == self.model.epoch
        self.model.holder = None

    @rule()
    def mark_stale(self) -> None:
        overdue = self.model.holder is not None and self.commit_ns() >= self.model.until_ns
        assert not mark_stale(self.store) or overdue

    @rule(seconds=st.integers(0, 12))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds * S)

    @invariant()
    def state_equals_the_model(self) -> None:
        found = self.store.read(leader_lease.read, U)
        assert found.epoch == self.model.epoch
        holder = None if found.state is LeaderState.FREE else (found.owner, found.incarnation)
        assert holder == self.model.holder

    @invariant()
    def log_rebuilds_the_state(self) -> None:
        require_log_and_state_agree(self.store)

    @invariant()
    def lease_end_is_logged_before_the_next_grant(self) -> None:
        until_ns = 0
        for event in log(self.store):
            match event.kind.value:
                case "acquired":
                    assert not until_ns, "granted over a lease that nobody ended"
                    until_ns = event.leased_until_ns
                case "renewed":
                    assert event.decided_ns < until_ns
                    until_ns = event.leased_until_ns
                case "marked_stale":
                    assert event.decided_ns >= until_ns > 0
                    until_ns = 0
                case _:
                    assert not until_ns or event.decided_ns < until_ns
                    until_ns = 0


TestLeaderLeaseAgainstItsModel = LeaderLeaseMachine.TestCase
TestLeaderLeaseAgainstItsModel.settings = settings(max_examples=60, stateful_step_count=40)
