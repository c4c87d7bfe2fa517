"""Leases: the holder, the expiry, and the fencing epoch."""

import dataclasses
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast import codec
from holdfast.clock import S, SimClock
from holdfast.config import BATCH_MAX, TTL_NS_MAX
from holdfast.durable import consistency, lease
from holdfast.durable.lease import LEASE_TRANSITIONS, Lease, LeaseAction, LeaseState
from holdfast.errors import Fenced, Held, IllegalTransition, Invalid, NotFound
from holdfast.store.api import Store, Txn
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend
from holdfast.store.postgres.store import PostgresStore
from holdfast.store.schema import Space, key_prefix

MODULES = ("holdfast.durable.lease",)
TTL = 10 * S


def acquire(
    store: Store,
    worker: str = "a",
    incarnation: str = "1",
    ttl_ns: int = TTL,
    *,
    resource: str = "w",
) -> Lease:
    granted: Lease = store.transact(lease.acquire, resource, worker, incarnation, ttl_ns)
    return granted


def guarded_write(store: Store, held: Lease) -> None:
    def write(txn: Txn) -> None:
        txn.require_live(held)
        txn.put((0, "sim", "guarded"), b"")

    store.transact(write)


def event_rows(store: Store) -> list[tuple[str, str, int]]:
    return [(e.kind, e.worker, e.epoch) for e in store.read(lease.events, 0, 100)]


def raise_generation(store: Any) -> None:
    """Raise the generation and keep the rows, like a restore."""
    engine = store._engine if isinstance(store, PostgresStore) else store.engine
    engine.generation += 1


# -- granting ------------------------------------------------------------------------------------


@pytest.mark.spec(
    "004", "Protocol A: `acquire_lease(world, worker)`", "the first grant of a lease has epoch 1"
)
def test_first_lease_grant_has_epoch_1(store: Store) -> None:
    assert acquire(store).epoch == 1


@pytest.mark.spec(
    "004",
    "1) Lease protocol with fencing epoch",
    "a live lease refuses every other worker",
)
def test_acquire_of_a_live_lease_of_another_worker_raises_held(store: Store) -> None:
    held = acquire(store, "a")
    with pytest.raises(Held) as error:
        acquire(store, "b")
    assert error.value.fields == {"resource": "w", "worker": "a", "until_ns": held.expires_ns}


def test_acquire_by_the_holder_returns_the_same_lease_without_extension(
    sim_store: Store, clock: SimClock
) -> None:
    held = acquire(sim_store)
    clock.advance(TTL // 2)
    assert acquire(sim_store) == held


def test_acquire_by_a_new_incarnation_raises_held_while_the_lease_is_live(
    sim_store: Store, clock: SimClock
) -> None:
    acquire(sim_store, "a", "1")
    with pytest.raises(Held):
        acquire(sim_store, "a", "2")


def test_lease_of_a_new_incarnation_fences_the_former_incarnation(
    sim_store: Store, clock: SimClock
) -> None:
    former = acquire(sim_store, "a", "1")
    clock.advance(TTL)
    assert acquire(sim_store, "a", "2").epoch == former.epoch + 1
    with pytest.raises(Fenced):
        guarded_write(sim_store, former)


@pytest.mark.spec(
    "004",
    "Protocol A: `acquire_lease(world, worker)`",
    "the lease after an expiry has the next epoch",
)
def test_lease_granted_after_an_expiry_has_the_next_epoch(
    sim_store: Store, clock: SimClock
) -> None:
    acquire(sim_store, "a")
    clock.advance(TTL)
    assert acquire(sim_store, "b").epoch == 2


def test_lease_ends_at_the_instant_of_its_expiry(sim_store: Store, clock: SimClock) -> None:
    held = acquire(sim_store, "a")
    clock.advance(held.expires_ns - sim_store.now_ns() - 2)
    with pytest.raises(Held):
        acquire(sim_store, "b")
    clock.advance(held.expires_ns - sim_store.now_ns())
    assert acquire(sim_store, "b").epoch == 2


def test_leases_of_resources_are_independent(store: Store) -> None:
    acquire(store, "a")
    assert store.transact(lease.acquire, "other", "b", "1", TTL).epoch == 1


def test_lease_resource_may_be_named_like_an_index(store: Store) -> None:
    store.transact(lease.acquire, "by", "fence", "1", TTL)
    store.transact(lease.acquire, "fence", "by", "1", TTL)
    assert store.read(lease.list_by_worker, "fence", 10) == ["by"]


def test_lease_id_has_holder_generation_and_epoch(store: Store) -> None:
    assert acquire(store, "a", "1").lease_id == "a/1/1.1"


# -- the fence -----------------------------------------------------------------------------------


@pytest.mark.spec(
    "004", "1) Lease protocol with fencing epoch", "a write under the lease of the holder commits"
)
def test_write_under_the_holders_lease_commits(store: Store) -> None:
    guarded_write(store, acquire(store))


@pytest.mark.spec(
    "004",
    "1) Lease protocol with fencing epoch",
    "the store fences a write under an older epoch after a takeover",
)
def test_stale_lease_holder_is_fenced_after_takeover(sim_store: Store, clock: SimClock) -> None:
    old = acquire(sim_store, "a")
    clock.advance(TTL)
    acquire(sim_store, "b")
    with pytest.raises(Fenced):
        guarded_write(sim_store, old)


def test_expired_lease_holder_is_fenced_before_a_takeover(
    sim_store: Store, clock: SimClock
) -> None:
    held = acquire(sim_store)
    clock.advance(TTL)
    with pytest.raises(Fenced):
        guarded_write(sim_store, held)


def test_lease_handle_from_before_a_renewal_guards_writes(
    sim_store: Store, clock: SimClock
) -> None:
    held = acquire(sim_store)
    clock.advance(TTL - S)
    sim_store.transact(lease.renew, [held], TTL)
    clock.advance(TTL - S)
    guarded_write(sim_store, held)


def test_lease_renewal_does_not_change_the_fence_row(store: Store) -> None:
    held = acquire(store)
    before = store.read(lambda txn: txn.get(held.guard.fence_key))
    store.transact(lease.renew, [held], 2 * TTL)
    assert store.read(lambda txn: txn.get(held.guard.fence_key)) == before == held.guard.fence


def test_lease_holder_is_fenced_by_a_forced_release(store: Store) -> None:
    held = acquire(store)
    store.transact(lease.force_release, "w", "operator")
    with pytest.raises(Fenced):
        guarded_write(store, held)


def test_lease_holder_is_fenced_by_its_own_release(store: Store) -> None:
    held = acquire(store)
    store.transact(lease.release, held)
    with pytest.raises(Fenced):
        guarded_write(store, held)


# -- renewing ------------------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "Protocol B: `renew_lease(world, worker, epoch)`",
    "a renewal by the holder moves the expiry",
)
def test_renew_moves_the_lease_expiry(sim_store: Store, clock: SimClock) -> None:
    held = acquire(sim_store)
    clock.advance(S)
    [renewed] = sim_store.transact(lease.renew, [held], TTL)
    assert renewed.expires_ns > held.expires_ns
    assert renewed.epoch == held.epoch


def test_renew_never_shortens_a_lease(store: Store) -> None:
    held = acquire(store)
    assert store.transact(lease.renew, [held], 1) == [held]


@pytest.mark.spec(
    "004",
    "Protocol B: `renew_lease(world, worker, epoch)`",
    "only the current holder with the current epoch can renew",
)
@pytest.mark.parametrize(
    "wrong", [{"worker": "b"}, {"incarnation": "2"}, {"epoch": 2}, {"generation": 2}]
)
def test_renew_by_another_holder_or_epoch_is_refused(store: Store, wrong: dict[str, Any]) -> None:
    held = acquire(store)
    other = Lease(**{name: getattr(held, name) for name in held.__struct_fields__} | wrong)
    assert store.transact(lease.renew, [other], TTL) == [None]


@pytest.mark.spec("000", "Authority", "only the owner of a lease can renew it")
def test_renew_of_a_released_lease_is_refused(store: Store) -> None:
    held = acquire(store)
    store.transact(lease.release, held)
    assert store.transact(lease.renew, [held], TTL) == [None]


def test_renew_of_an_expired_lease_is_refused(sim_store: Store, clock: SimClock) -> None:
    held = acquire(sim_store)
    clock.advance(TTL)
    assert sim_store.transact(lease.renew, [held], TTL) == [None]


def test_renew_returns_a_result_for_each_lease(sim_store: Store, clock: SimClock) -> None:
    short = sim_store.transact(lease.acquire, "short", "a", "1", S)
    long = sim_store.transact(lease.acquire, "long", "a", "1", TTL)
    clock.advance(S)
    lost, kept = sim_store.transact(lease.renew, [short, long], TTL)
    assert lost is None
    assert kept.resource == "long"


# -- releasing -----------------------------------------------------------------------------------


def test_lease_granted_after_a_release_has_the_next_epoch(store: Store) -> None:
    store.transact(lease.release, acquire(store, "a"))
    assert acquire(store, "b").epoch == 2


def test_released_lease_keeps_its_row_and_epoch(store: Store) -> None:
    store.transact(lease.release, acquire(store))
    status = store.read(lease.current_status, "w")
    assert (status.state, status.worker, status.epoch) == (LeaseState.FREE, "", 1)


def test_expired_lease_can_be_released(sim_store: Store, clock: SimClock) -> None:
    held = acquire(sim_store)
    clock.advance(TTL)
    sim_store.transact(lease.release, held)
    assert sim_store.read(lease.current_status, "w").state is LeaseState.FREE


def test_release_of_a_lease_held_by_another_worker_is_fenced(
    sim_store: Store, clock: SimClock
) -> None:
    old = acquire(sim_store, "a")
    clock.advance(TTL)
    acquire(sim_store, "b")
    with pytest.raises(Fenced) as error:
        sim_store.transact(lease.release, old)
    assert (error.value.held, error.value.current) == ("1.1", "1.2")


@pytest.mark.spec("000", "Authority", "a forced release clears the lease of any holder")
def test_force_release_frees_a_live_lease(store: Store) -> None:
    acquire(store, "a")
    assert store.transact(lease.force_release, "w", "operator") == 1
    assert acquire(store, "b").epoch == 2


@pytest.mark.spec("000", "Authority", "a forced release also clears the stale mark of a lease")
@pytest.mark.parametrize("marked", [True, False], ids=["marked", "overdue"])
def test_force_release_clears_a_stale_lease(
    sim_store: Store, clock: SimClock, marked: bool
) -> None:
    worker = acquire(sim_store).worker
    clock.advance(TTL)
    if marked:
        sim_store.transact(lease.mark_stale, "w")
    assert sim_store.read(lease.list_by_worker, worker, 10) == ([] if marked else ["w"])
    sim_store.transact(lease.force_release, "w", "operator")
    status = sim_store.read(lease.current_status, "w")
    assert (status.state, status.worker, status.epoch, status.expires_ns) == (
        LeaseState.FREE,
        "",
        1,
        0,
    )
    assert sim_store.read(lease.list_by_worker, worker, 10) == []
    last = sim_store.read(lease.events, 0, 10)[-1]
    assert (last.kind, last.worker, last.epoch, last.reason) == ("forced", worker, 1, "operator")


def test_force_release_of_an_unknown_lease_raises_not_found(store: Store) -> None:
    with pytest.raises(NotFound):
        store.transact(lease.force_release, "w", "operator")


# -- expiry --------------------------------------------------------------------------------------


@pytest.mark.spec(
    "000", "Authority", "the log records the expiry of a lease before the grant to the next owner"
)
def test_lease_expiry_is_logged_before_the_next_grant(sim_store: Store, clock: SimClock) -> None:
    acquire(sim_store, "a")
    clock.advance(TTL)
    acquire(sim_store, "b")
    assert event_rows(sim_store) == [("granted", "a", 1), ("expired", "a", 1), ("granted", "b", 2)]
    assert len({event.decided_ns for event in sim_store.read(lease.events, 1, 2)}) == 1


def test_mark_stale_marks_an_overdue_lease_once(sim_store: Store, clock: SimClock) -> None:
    acquire(sim_store)
    clock.advance(TTL)
    assert sim_store.transact(lease.mark_stale, "w") is True
    assert sim_store.transact(lease.mark_stale, "w") is False
    assert sim_store.read(lease.current_status, "w").state is LeaseState.STALE


def test_lease_marked_stale_is_not_logged_again_by_the_next_grant(
    sim_store: Store, clock: SimClock
) -> None:
    acquire(sim_store, "a")
    clock.advance(TTL)
    sim_store.transact(lease.mark_stale, "w")
    acquire(sim_store, "b")
    assert [kind for kind, _, _ in event_rows(sim_store)] == ["granted", "expired", "granted"]


def test_mark_stale_does_not_mark_a_live_lease(store: Store) -> None:
    acquire(store)
    assert store.transact(lease.mark_stale, "w") is False


def test_mark_stale_of_an_unknown_lease_returns_false(store: Store) -> None:
    assert store.transact(lease.mark_stale, "w") is False


def test_wall_clock_step_does_not_expire_a_lease(sim_store: Store, clock: SimClock) -> None:
    held = acquire(sim_store)
    clock.step_wall(3600 * S)
    guarded_write(sim_store, held)


# -- generations ---------------------------------------------------------------------------------


def test_lease_of_an_older_generation_is_not_live(sim_store: Store) -> None:
    acquire(sim_store, "a")
    raise_generation(sim_store)
    granted = acquire(sim_store, "b")
    assert (granted.generation, granted.epoch) == (2, 2)


def test_expiry_of_a_lease_of_an_older_generation_is_logged(sim_store: Store) -> None:
    acquire(sim_store, "a")
    raise_generation(sim_store)
    acquire(sim_store, "b")
    assert ("expired", "a", 1) in event_rows(sim_store)


def test_holder_of_a_lease_of_an_older_generation_gets_a_new_epoch(sim_store: Store) -> None:
    acquire(sim_store, "a", "1")
    raise_generation(sim_store)
    assert acquire(sim_store, "a", "1").epoch == 2


def test_lease_of_an_older_generation_cannot_be_renewed_or_released(
    sim_store: Store,
) -> None:
    held = acquire(sim_store)
    raise_generation(sim_store)
    assert sim_store.transact(lease.renew, [held], TTL) == [None]
    with pytest.raises(Fenced):
        sim_store.transact(lease.release, held)


def test_write_under_a_lease_of_an_older_generation_is_fenced(sim_store: Store) -> None:
    held = acquire(sim_store)
    raise_generation(sim_store)
    with pytest.raises(Fenced):
        guarded_write(sim_store, held)


# -- reads ---------------------------------------------------------------------------------------


def test_current_status_of_an_unknown_lease_is_none(store: Store) -> None:
    assert store.read(lease.current_status, "w") is None


def test_list_by_worker_returns_leases_sorted_by_resource(store: Store) -> None:
    for resource in ("b", "a"):
        store.transact(lease.acquire, resource, "x", "1", TTL)
    store.transact(lease.acquire, "c", "y", "1", TTL)
    assert store.read(lease.list_by_worker, "x", 10) == ["a", "b"]
    assert store.read(lease.list_by_worker, "x", 1) == ["a"]


@pytest.mark.parametrize("end", ["release", "force", "stale"])
def test_list_by_worker_omits_lost_leases(sim_store: Store, clock: SimClock, end: str) -> None:
    held = acquire(sim_store)
    if end == "release":
        sim_store.transact(lease.release, held)
    elif end == "force":
        sim_store.transact(lease.force_release, "w", "")
    else:
        clock.advance(TTL)
        sim_store.transact(lease.mark_stale, "w")
    assert sim_store.read(lease.list_by_worker, "a", 10) == []


def test_lease_events_are_read_in_pages(store: Store) -> None:
    for _ in range(3):
        store.transact(lease.release, acquire(store))
    first = store.read(lease.events, 0, 4)
    rest = store.read(lease.events, first[-1].n, 4)
    assert [event.n for event in first + rest] == [1, 2, 3, 4, 5, 6]


def test_force_release_is_logged_with_its_reason(store: Store) -> None:
    acquire(store)
    store.transact(lease.force_release, "w", "node gone")
    assert store.read(lease.events, 1, 1)[0].reason == "node gone"


def test_truncate_events_removes_lease_events_up_to_its_limit(
    sim_store: Store, clock: SimClock
) -> None:
    for _ in range(2):
        sim_store.transact(lease.release, acquire(sim_store))
    clock.advance(S)
    cut_ns = sim_store.now_ns()
    clock.advance(S)
    acquire(sim_store)
    removed = [sim_store.transact(lease.truncate_events, cut_ns, 3) for _ in range(3)]
    assert removed == [3, 1, 0]
    assert event_rows(sim_store) == [("granted", "a", 3)]


def test_lease_event_numbers_are_not_reused_after_truncation(store: Store) -> None:
    acquire(store)
    store.transact(lease.truncate_events, store.now_ns() + S, 10)
    store.transact(lease.force_release, "w", "")
    assert [event.n for event in store.read(lease.events, 0, 10)] == [2]


def test_truncate_excess_keeps_the_last_lines(store: Store) -> None:
    for _ in range(4):
        store.transact(lease.release, acquire(store))
    removed = [store.transact(lease.truncate_excess, 3, 4) for _ in range(3)]
    assert removed == [4, 1, 0]
    assert [event.n for event in store.read(lease.events, 0, 10)] == [6, 7, 8]


def test_truncation_keeps_the_last_decision_about_each_resource(store: Store) -> None:
    for name in ("ada", "bob", "ada", "eve"):
        store.transact(lease.release, acquire(store, resource=name))
    before = store.read(consistency.logged_leases)
    assert store.transact(lease.truncate_excess, 2, 10) == 6
    assert {event.resource for event in store.read(lambda txn: list(lease.baselines(txn)))} == {
        "ada",
        "bob",
    }
    assert store.read(consistency.logged_leases) == before


def test_difference_to_a_removed_line_is_found(store: Store) -> None:
    store.transact(lease.release, acquire(store, resource="ada"))
    store.transact(lease.truncate_events, store.now_ns() + S, 10)
    assert store.read(lambda txn: list(consistency.check_leases(txn))) == []
    fence = key_prefix(Space.LEASE, "fence", "ada")
    store.transact(
        lambda txn: txn.put(fence, codec.pack(lease.LeaseFence(LeaseState.FREE, "", "", 1, 7)))
    )
    [found] = store.read(lambda txn: list(consistency.check_leases(txn)))
    assert (found.where, found.expected) == ("ada", "free nobody 1.1")


def test_deleted_lease_leaves_no_baseline(store: Store) -> None:
    for name in ("deleted first", "truncated first"):
        store.transact(lease.release, acquire(store, resource=name))
        if name == "truncated first":
            store.transact(lease.truncate_excess, 0, 10)
        store.transact(lease.delete_lease, name)
        store.transact(lease.truncate_excess, 0, 10)
    assert store.read(lambda txn: list(lease.baselines(txn))) == []


# -- the table -----------------------------------------------------------------------------------

LEGAL = {
    ("FREE", "ACQUIRE", "HELD"),
    ("STALE", "ACQUIRE", "HELD"),
    ("HELD", "RENEW", "HELD"),
    ("HELD", "EXPIRE", "STALE"),
    ("HELD", "RELEASE", "FREE"),
    ("STALE", "RELEASE", "FREE"),
    ("FREE", "FORCE_RELEASE", "FREE"),
    ("HELD", "FORCE_RELEASE", "FREE"),
    ("STALE", "FORCE_RELEASE", "FREE"),
}


@pytest.mark.parametrize(("state", "event", "after"), list(LEASE_TRANSITIONS.pairs()))
def test_every_lease_transition_matches_the_table(
    state: LeaseState, event: LeaseAction, after: LeaseState | None
) -> None:
    if after is None:
        assert not [row for row in LEGAL if row[:2] == (state.name, event.name)]
        with pytest.raises(IllegalTransition):
            LEASE_TRANSITIONS.next(state, event)
    else:
        assert (state.name, event.name, after.name) in LEGAL


def test_every_lease_state_is_reachable_and_none_is_final() -> None:
    assert LEASE_TRANSITIONS.unreachable() == frozenset()
    assert LEASE_TRANSITIONS.terminal == frozenset()


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resource", "worker", "incarnation", "ttl_ns", "what"),
    [
        ("", "a", "1", TTL, "resource"),
        ("w", "", "1", TTL, "worker"),
        ("w", "a", "", TTL, "incarnation"),
        ("w" * 1000, "a", "1", TTL, "resource"),
        ("w", "a", "1", 0, "ttl_ns"),
        ("w", "a", "1", -1, "ttl_ns"),
        ("w", "a", "1", TTL_NS_MAX + 1, "ttl_ns"),
    ],
)
def test_acquire_lease_with_bad_input_raises_invalid_with_the_field(
    store: Store, resource: str, worker: str, incarnation: str, ttl_ns: int, what: str
) -> None:
    with pytest.raises(Invalid) as error:
        store.transact(lease.acquire, resource, worker, incarnation, ttl_ns)
    assert error.value.what == what
    assert event_rows(store) == []


@pytest.mark.parametrize("limit", [-1, BATCH_MAX + 1])
def test_lease_reads_with_a_limit_out_of_bounds_raise_invalid(store: Store, limit: int) -> None:
    for look in (
        lambda: store.read(lease.list_by_worker, "a", limit),
        lambda: store.read(lease.events, 0, limit),
        lambda: store.transact(lease.truncate_events, 0, limit),
    ):
        with pytest.raises(Invalid) as error:
            look()
        assert error.value.what == "limit"


def test_renew_lease_with_a_zero_ttl_raises_invalid(store: Store) -> None:
    with pytest.raises(Invalid):
        store.transact(lease.renew, [acquire(store)], 0)


# -- against the sequential model ----------------------------------------------------------------


@dataclasses.dataclass
class LeaseReferenceModel:
    """A sequential model of one resource: its holder, its expiry and its last epoch."""

    holder: tuple[str, str] | None = None
    until_ns: int = 0
    epoch: int = 0

    def acquire(self, holder: tuple[str, str], now_ns: int, ttl_ns: int) -> int | None:
        if self.holder is not None and now_ns < self.until_ns:
            return self.epoch if self.holder == holder else None
        self.holder, self.until_ns, self.epoch = holder, now_ns + ttl_ns, self.epoch + 1
        return self.epoch

    def owns(self, held: Lease) -> bool:
        return (held.worker, held.incarnation) == self.holder and held.epoch == self.epoch


HOLDERS = st.tuples(st.sampled_from("ab"), st.sampled_from("12"))


class LeaseMachine(RuleBasedStateMachine):
    """Every result equals the result of the model, and epochs never decrease."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = SimClock()
        self.store = InProcessStore("memory:", MemoryBackend(), self.clock)
        self.model = LeaseReferenceModel()
        self.leases: list[Lease] = []
        self.epoch_seen = 0

    def commit_ns(self) -> int:
        """Return the time of the next commit: at least one more than the last."""
        engine = self.store.engine
        return max(engine.now_ns(), engine._last_ns + 1)

    @rule(who=HOLDERS, ttl=st.integers(1, 10))
    def acquire(self, who: tuple[str, str], ttl: int) -> None:
        expected = self.model.acquire(who, self.commit_ns(), ttl * S)
        try:
            granted = self.store.transact(lease.acquire, "w", *who, ttl * S)
        except Held:
            assert expected is None
        else:
            assert (granted.epoch, granted.expires_ns) == (expected, self.model.until_ns)
            self.leases.append(granted)

    @rule(at=st.integers(0, 50), ttl=st.integers(1, 10))
    def renew(self, at: int, ttl: int) -> None:
        if self.leases:
            held = self.leases[at % len(self.leases)]
            now_ns = self.commit_ns()
            legal = self.model.owns(held) and now_ns < self.model.until_ns
            [renewed] = self.store.transact(lease.renew, [held], ttl * S)
            assert (renewed is not None) == legal
            if legal:
                self.model.until_ns = max(self.model.until_ns, now_ns + ttl * S)
                assert renewed.expires_ns == self.model.until_ns

    @rule(at=st.integers(0, 50))
    def write(self, at: int) -> None:
        if self.leases:
            held = self.leases[at % len(self.leases)]
            legal = self.model.owns(held) and self.commit_ns() < self.model.until_ns
            try:
                guarded_write(self.store, held)
            except Fenced:
                assert not legal
            else:
                assert legal

    @rule(at=st.integers(0, 50))
    def release(self, at: int) -> None:
        if self.leases:
            held = self.leases[at % len(self.leases)]
            legal = self.model.owns(held)
            try:
                self.store.transact(lease.release, held)
            except Fenced:
                assert not legal
            else:
                assert legal
                self.model.holder = None

    @rule()
    def force_release(self) -> None:
        try:
            assert self.store.transact(lease.force_release, "w", "") == self.model.epoch
        except NotFound:
            assert self.model.epoch == 0
        self.model.holder = None

    @rule()
    def mark_stale(self) -> None:
        overdue = self.model.holder is not None and self.commit_ns() >= self.model.until_ns
        marked = self.store.transact(lease.mark_stale, "w")
        assert not marked or overdue

    @rule(seconds=st.integers(0, 12))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds * S)

    @invariant()
    def epochs_never_decrease(self) -> None:
        status = self.store.read(lease.current_status, "w")
        epoch = 0 if status is None else status.epoch
        assert epoch == self.model.epoch >= self.epoch_seen
        self.epoch_seen = epoch

    @invariant()
    def log_has_every_grant_once(self) -> None:
        granted = [e.epoch for e in self.store.read(lease.events, 0, 1000) if e.kind == "granted"]
        assert granted == list(range(1, self.model.epoch + 1))


TestLeaseMatchesItsModel = LeaseMachine.TestCase
TestLeaseMatchesItsModel.settings = settings(max_examples=60, stateful_step_count=40)
