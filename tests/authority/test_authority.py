"""Authority: commands on one lease, and a log that tells the same."""

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.authority import authority
from holdfast.authority.lease import AuthorityLease, State
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
from holdfast.store.api import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryBackend
from tests.authority.rig import (
    TTL,
    U,
    acquire,
    current,
    force_release,
    lead,
    log,
    mark_stale,
    release,
    renew,
    require_log_and_state_agree,
    restored,
    story,
)

MODULES = ("holdfast.authority.authority",)


# -- acquiring -----------------------------------------------------------------------------------


def test_the_grant_and_its_event_tell_the_same(sim_store: Store) -> None:
    granted = acquire(sim_store)
    [event] = log(sim_store)
    assert (event.lease_id, event.leased_until_ns) == (granted.lease_id, granted.expires_ns)
    assert event.decided_ns + TTL == granted.expires_ns
    assert current(sim_store) == AuthorityLease(
        State.HELD, "a", "1", granted.lease_id, 1, 1, granted.expires_ns
    )


def test_acquiring_again_gives_the_same_lease_and_logs_nothing(
    sim_store: Store, clock: SimClock
) -> None:
    granted = acquire(sim_store)
    clock.advance(TTL // 2)
    assert acquire(sim_store) == granted
    assert story(sim_store) == [("acquired", "a", 1)]


def test_another_owner_is_told_who_leads_and_until_when(sim_store: Store) -> None:
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


def test_a_new_incarnation_of_the_leader_waits_for_its_former_self(
    sim_store: Store, clock: SimClock
) -> None:
    former = acquire(sim_store, "a", "1")
    with pytest.raises(AlreadyHeldByOther):
        acquire(sim_store, "a", "2")
    clock.advance(TTL)
    assert acquire(sim_store, "a", "2").epoch == former.epoch + 1
    with pytest.raises(Fenced):
        lead(sim_store, former)


def test_an_expired_leader_that_acquires_again_gets_a_new_epoch(
    sim_store: Store, clock: SimClock
) -> None:
    acquire(sim_store)
    clock.advance(TTL)
    assert acquire(sim_store).epoch == 2
    assert story(sim_store) == [
        ("acquired", "a", 1),
        ("marked_stale", "a", 1),
        ("acquired", "a", 2),
    ]


def test_the_expiry_and_the_next_grant_are_one_decision(sim_store: Store, clock: SimClock) -> None:
    acquire(sim_store, "a")
    clock.advance(TTL)
    acquire(sim_store, "b")
    _, stale, granted = log(sim_store)
    assert stale.decided_ns == granted.decided_ns


def test_universes_have_leaders_of_their_own(sim_store: Store) -> None:
    acquire(sim_store, "a")
    assert sim_store.transact(authority.acquire, "shop", "b", "1", TTL).epoch == 1
    assert sim_store.read(authority.epoch, "nowhere") == 0
    assert sim_store.read(authority.current, "nowhere") is None


def test_a_lease_of_a_restored_store_leads_nobody(sim_store: Store) -> None:
    old = acquire(sim_store, "a")
    restored(sim_store)
    with pytest.raises(NotHeld):
        renew(sim_store, old)
    with pytest.raises(NotHeld):
        release(sim_store, old)
    assert acquire(sim_store, "b").epoch == old.epoch + 1
    assert story(sim_store)[1:] == [("marked_stale", "a", 1), ("acquired", "b", 2)]
    require_log_and_state_agree(sim_store)


# -- renewing and releasing ----------------------------------------------------------------------


def test_a_renewal_runs_from_now_and_is_logged(sim_store: Store, clock: SimClock) -> None:
    held = acquire(sim_store)
    clock.advance(TTL // 2)
    renewed = renew(sim_store, held)
    assert renewed.expires_ns - held.expires_ns >= TTL // 2
    assert renewed.epoch == held.epoch
    assert log(sim_store)[-1].leased_until_ns == renewed.expires_ns


def test_a_renewal_never_shortens(sim_store: Store) -> None:
    held = acquire(sim_store)
    assert renew(sim_store, held, S).expires_ns == held.expires_ns


def test_an_expired_leader_does_not_renew(sim_store: Store, clock: SimClock) -> None:
    held = acquire(sim_store)
    clock.advance(TTL)
    with pytest.raises(NotHeld):
        renew(sim_store, held)
    assert story(sim_store) == [("acquired", "a", 1)]


def test_a_lease_that_was_marked_stale_is_not_renewed(sim_store: Store, clock: SimClock) -> None:
    held = acquire(sim_store)
    clock.advance(TTL)
    assert mark_stale(sim_store)
    with pytest.raises(NotHeld):
        renew(sim_store, held)


@pytest.mark.parametrize("former", [("b", "1"), ("a", "0")])
def test_neither_another_owner_nor_another_incarnation_renews(
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


def test_an_older_lease_of_the_same_leader_is_not_renewed(sim_store: Store) -> None:
    old = acquire(sim_store)
    release(sim_store, old)
    acquire(sim_store)
    with pytest.raises(NotHeld):
        renew(sim_store, old)


def test_a_released_authority_is_free_at_once(sim_store: Store) -> None:
    held = acquire(sim_store, "a")
    release(sim_store, held)
    assert current(sim_store) is None
    assert acquire(sim_store, "b").epoch == 2
    with pytest.raises(OwnerMismatch):
        release(sim_store, held)


def test_a_lease_that_ran_out_is_marked_before_it_is_released(
    sim_store: Store, clock: SimClock
) -> None:
    held = acquire(sim_store)
    clock.advance(TTL)
    release(sim_store, held)
    assert [kind for kind, *_ in story(sim_store)] == ["acquired", "marked_stale", "released"]


def test_releasing_twice_is_not_held(sim_store: Store) -> None:
    held = acquire(sim_store)
    release(sim_store, held)
    with pytest.raises(NotHeld):
        release(sim_store, held)
    assert story(sim_store) == [("acquired", "a", 1), ("released", "a", 1)]


# -- marking and forcing -------------------------------------------------------------------------


def test_only_an_overdue_lease_is_marked_and_only_once(sim_store: Store, clock: SimClock) -> None:
    assert not mark_stale(sim_store)
    acquire(sim_store)
    assert not mark_stale(sim_store)
    clock.advance(2 * TTL)
    assert mark_stale(sim_store)
    assert not mark_stale(sim_store)
    assert story(sim_store) == [("acquired", "a", 1), ("marked_stale", "a", 1)]


@pytest.mark.parametrize("seconds", [0, 10])
def test_a_forced_release_frees_a_live_or_overdue_lease_and_keeps_the_epoch(
    sim_store: Store, clock: SimClock, seconds: int
) -> None:
    held = acquire(sim_store, "a")
    clock.advance(seconds * S)
    assert force_release(sim_store, "it hangs") == 1
    assert current(sim_store) is None
    assert log(sim_store)[-1].reason == "it hangs"
    with pytest.raises(Fenced):
        lead(sim_store, held)
    assert acquire(sim_store, "b").epoch == 2


def test_forcing_where_nobody_ever_led_is_recorded_and_harmless(sim_store: Store) -> None:
    assert force_release(sim_store) == 0
    assert story(sim_store) == [("force_released", "", 0)]
    require_log_and_state_agree(sim_store)
    assert acquire(sim_store).epoch == 1


# -- the log -------------------------------------------------------------------------------------


def test_the_log_stays_bounded_and_rebuilds_the_same_state(
    sim_store: Store, clock: SimClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authority, "LOG_BASELINE_EVERY", 10)
    held = acquire(sim_store)
    for at in range(100):
        held = renew(sim_store, held)
        if at % 7 == 0:
            release(sim_store, held)
            held = acquire(sim_store)
        require_log_and_state_agree(sim_store)
        assert len(log(sim_store)) <= 21
    head = sim_store.read(journal.head, authority.resource(U))
    assert head.height > 100
    assert head.floor > 80


def test_a_command_that_fails_logs_nothing(sim_store: Store, clock: SimClock) -> None:
    acquire(sim_store)
    clock.advance(TTL)
    with pytest.raises(Invalid):
        acquire(sim_store, "b", ttl_ns=0)
    assert story(sim_store) == [("acquired", "a", 1)]
    held = current(sim_store)
    assert held is not None
    assert not held.stale


def test_a_change_of_hands_wakes_those_who_wait_and_a_renewal_does_not(sim_store: Store) -> None:
    held = acquire(sim_store)
    seen = sim_store.wait(authority.topic(U), 0, 0)
    assert seen
    renew(sim_store, held)
    assert sim_store.wait(authority.topic(U), seen, 0) == seen
    release(sim_store, held)
    assert sim_store.wait(authority.topic(U), seen, 0) > seen


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("universe", ["", "x" * 195])
def test_a_bad_universe_is_invalid(sim_store: Store, universe: str) -> None:
    with pytest.raises(Invalid):
        sim_store.transact(authority.acquire, universe, "a", "1", TTL)


@pytest.mark.parametrize(
    ("owner", "incarnation", "ttl_ns"), [("", "1", TTL), ("a", "", TTL), ("a", "1", -1)]
)
def test_a_bad_holder_or_time_is_invalid_and_nothing_changes(
    sim_store: Store, owner: str, incarnation: str, ttl_ns: int
) -> None:
    with pytest.raises(Invalid):
        acquire(sim_store, owner, incarnation, ttl_ns)
    assert story(sim_store) == []


def test_a_lease_of_another_resource_is_invalid(sim_store: Store) -> None:
    foreign = sim_store.transact(leases.acquire, "elsewhere", "a", "1", TTL)
    acquire(sim_store, "a", "1")
    for command in (renew, release):
        with pytest.raises(Invalid):
            command(sim_store, foreign)


@pytest.mark.parametrize("kind", [AlreadyHeldByOther, NotHeld, OwnerMismatch])
def test_the_errors_keep_their_class_between_processes(kind: type[Fenced | Held]) -> None:
    assert type(from_wire(to_wire(kind(universe=U)))) is kind


# -- against the sequential model ----------------------------------------------------------------


@dataclasses.dataclass
class Model:
    holder: tuple[str, str] | None = None
    until_ns: int = 0
    epoch: int = 0

    def acquire(self, who: tuple[str, str], now_ns: int, ttl_ns: int) -> bool:
        if self.holder is None or now_ns >= self.until_ns:
            self.holder, self.until_ns, self.epoch = who, now_ns + ttl_ns, self.epoch + 1
        return self.holder == who

    def owns(self, held: Lease) -> bool:
        return (held.worker, held.incarnation) == self.holder and held.epoch == self.epoch


HOLDERS = st.tuples(st.sampled_from("ab"), st.sampled_from("12"))
SECONDS = st.integers(1, 10)
WHICH = st.integers(0, 50)


class AuthorityMachine(RuleBasedStateMachine):
    """Every answer is the model's; the log rebuilds what is stored; no grant skips its stale mark."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = SimClock()
        self.store = LocalStore("memory:", MemoryBackend(), self.clock)
        self.model = Model()
        self.leases: list[Lease] = []

    def commit_ns(self) -> int:
        """The time that the next commit will have: at least one more than the last."""
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
                lead(self.store, held)
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
    def the_state_is_the_models(self) -> None:
        found = self.store.read(authority.read, U)
        assert found.epoch == self.model.epoch
        holder = None if found.state is State.FREE else (found.owner, found.incarnation)
        assert holder == self.model.holder

    @invariant()
    def the_log_rebuilds_the_state(self) -> None:
        require_log_and_state_agree(self.store)

    @invariant()
    def an_ended_lease_is_marked_before_the_next_grant(self) -> None:
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


TestAuthorityAgainstItsModel = AuthorityMachine.TestCase
TestAuthorityAgainstItsModel.settings = settings(max_examples=60, stateful_step_count=40)
