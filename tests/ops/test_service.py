"""The operations of document 004, section 9: each one, repeated, and refused."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast import codec
from holdfast.clock import S
from holdfast.durable import inbox, snapshot
from holdfast.durable import lease as leases
from holdfast.errors import Fenced, Held, Invalid, KeyConflict, NotFound, Overloaded, ValueTooLarge
from holdfast.messages import (
    Ingress,
    Kind,
    Receipt,
    Status,
    event_ingress,
    receipt_ingress,
)
from holdfast.ops import service
from holdfast.ops.service import NotActive, NotAssigned, SeedSnapshot
from holdfast.world import catalog
from holdfast.world import ingress as doors
from holdfast.world.catalog import Event, subject_of
from tests.ops.app import Account, Asked, Deposited, app, app_other
from tests.ops.rig import UNIVERSE, WORKER, Rig

MODULES = ("holdfast.ops.service",)

NOBODY = "0" * 32


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    with made.store:
        made.account().create()
        yield made


@pytest.fixture
def ada(rig: Rig) -> str:
    return rig.world_id()


def assert_refused(rig: Rig, error: type[Exception], call: Callable[..., Any], *args: Any) -> Any:
    """The call raises exactly this kind of error, and not one row is another afterwards."""
    before = rig.rows()
    with pytest.raises(error) as refused:
        call(*args)
    assert type(refused.value) is error
    assert rig.rows() == before
    return refused.value


# -- assignment ----------------------------------------------------------------------------------


@pytest.mark.spec(
    "004", "9) Operational APIs (internal)", "assigning a world to the same worker again is idle"
)
def test_assigning_twice_is_assigning_once(rig: Rig, ada: str) -> None:
    first = service.assign_world(rig.store, UNIVERSE, ada, WORKER)
    before = rig.rows()
    assert service.assign_world(rig.store, UNIVERSE, ada, WORKER) == first
    assert rig.rows() == before
    assert first.desired_worker_id == WORKER


@pytest.mark.spec(
    "004", "9) Operational APIs (internal)", "a worker's worlds are those assigned to it, in order"
)
def test_a_worker_lists_what_is_assigned_to_it(rig: Rig, ada: str) -> None:
    bob = rig.account("bob").create()
    for world in (ada, bob):
        service.assign_world(rig.store, UNIVERSE, world, WORKER)
    both = sorted([ada, bob])
    assert service.list_worker_worlds(rig.store, UNIVERSE, WORKER) == both
    assert service.list_worker_worlds(rig.store, UNIVERSE, WORKER, limit=1) == both[:1]
    assert service.list_worker_worlds(rig.store, UNIVERSE, WORKER, after=both[0]) == both[1:]
    assert service.list_worker_worlds(rig.store, UNIVERSE, "other") == []


def test_an_assignment_replaces_the_one_before(rig: Rig, ada: str) -> None:
    service.assign_world(rig.store, UNIVERSE, ada, WORKER)
    service.assign_world(rig.store, UNIVERSE, ada, "other", priority=3, reason="near", pinned=True)
    assert service.list_worker_worlds(rig.store, UNIVERSE, WORKER) == []
    found = rig.store.read(catalog.assignment, UNIVERSE, ada)
    assert found == catalog.Assignment("other", 3, "near", True)


@pytest.mark.spec(
    "004", "9) Operational APIs (internal)", "taking away what is not assigned is idle, and says so"
)
def test_unassigning_twice_is_unassigning_once(rig: Rig, ada: str) -> None:
    service.assign_world(rig.store, UNIVERSE, ada, WORKER)
    assert service.unassign_world(rig.store, UNIVERSE, ada) is True
    before = rig.rows()
    assert service.unassign_world(rig.store, UNIVERSE, ada) is False
    assert rig.rows() == before


@pytest.mark.spec(
    "004", "9) Operational APIs (internal)", "a world that is not there, or deleted, is NotFound"
)
@pytest.mark.parametrize(
    "call",
    [
        lambda store, world: service.assign_world(store, UNIVERSE, world, WORKER),
        lambda store, world: service.unassign_world(store, UNIVERSE, world),
        lambda store, world: service.acquire_lease(store, UNIVERSE, world, WORKER, "1"),
        lambda store, world: service.enqueue_ingress(
            store, UNIVERSE, world, event_ingress("E", b"\x01\x80"), key="k"
        ),
        lambda store, world: service.receipt_inject(
            store, UNIVERSE, world, Receipt(b"\x01" * 32, "fx.quote", Status.OK)
        ),
        lambda store, world: service.world_fork(store, UNIVERSE, world, "child"),
        lambda store, world: service.world_create_from_seed(
            store, UNIVERSE, "Account", "child", SeedSnapshot(world, 0)
        ),
    ],
)
@pytest.mark.parametrize("deleted", [False, True])
def test_a_world_that_is_not_there(
    rig: Rig, ada: str, call: Callable[..., Any], deleted: bool
) -> None:
    if deleted:
        rig.account().delete()
    assert_refused(rig, NotFound, call, rig.store, ada if deleted else NOBODY)


@pytest.mark.parametrize("name", ["", "x" * 201])
def test_a_worker_has_a_name(rig: Rig, ada: str, name: str) -> None:
    assert_refused(rig, Invalid, service.list_worker_worlds, rig.store, UNIVERSE, name)
    assert_refused(rig, Invalid, service.assign_world, rig.store, UNIVERSE, ada, name)


# -- leases --------------------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "9) Operational APIs (internal)",
    "a holder that acquires again gets the lease it has, not extended",
)
def test_acquiring_twice_is_acquiring_once(rig: Rig, ada: str) -> None:
    first = service.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1", ttl_s=10)
    rig.later(5)
    before = rig.rows()
    assert service.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1", ttl_s=10) == first
    assert rig.rows() == before


@pytest.mark.spec(
    "004", "9) Operational APIs (internal)", "a live lease of another is Held, with its end"
)
def test_a_lease_that_another_holds_is_refused(rig: Rig, ada: str) -> None:
    held = service.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1")
    error = assert_refused(rig, Held, service.acquire_lease, rig.store, UNIVERSE, ada, "other", "1")
    assert error.until_ns == held.expires_ns


def test_a_restarted_worker_waits_and_gets_a_higher_epoch(rig: Rig, ada: str) -> None:
    first = service.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1", ttl_s=10)
    assert_refused(rig, Held, service.acquire_lease, rig.store, UNIVERSE, ada, WORKER, "2")
    rig.later(11)
    second = service.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "2")
    assert second.epoch == first.epoch + 1


@pytest.mark.spec(
    "004",
    "9) Operational APIs (internal)",
    "a worker that the assignment excludes gets no lease, and is told so",
)
def test_a_worker_that_is_not_assigned_is_refused(rig: Rig, ada: str) -> None:
    service.assign_world(rig.store, UNIVERSE, ada, "other")
    assert_refused(rig, NotAssigned, service.acquire_lease, rig.store, UNIVERSE, ada, WORKER, "1")
    service.unassign_world(rig.store, UNIVERSE, ada)
    assert service.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1").epoch == 1


def test_nobody_hosts_a_paused_world(rig: Rig, ada: str) -> None:
    rig.account().pause()
    error = assert_refused(
        rig, NotActive, service.acquire_lease, rig.store, UNIVERSE, ada, WORKER, "1"
    )
    assert error.status == "paused"
    rig.account().resume()
    assert service.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1")


def test_a_parked_world_says_that_it_is(rig: Rig, ada: str) -> None:
    blocker = catalog.Blocker("replay_diverged", "at 7")
    rig.store.transact(catalog.change, UNIVERSE, ada, Event.PARK, blocker)
    error = assert_refused(
        rig, NotActive, service.acquire_lease, rig.store, UNIVERSE, ada, WORKER, "1"
    )
    assert error.status == "parked"


@pytest.mark.spec(
    "004", "9) Operational APIs (internal)", "renewing needs the holder and the epoch, both current"
)
def test_renewing_extends_from_now(rig: Rig, ada: str) -> None:
    lease = service.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1", ttl_s=10)
    rig.later(6)
    renewed = service.renew_lease(rig.store, UNIVERSE, ada, WORKER, lease.epoch, ttl_s=10)
    # Two commits never have the same store time, so it may be ahead of the clock by a few ns.
    assert renewed.expires_ns == pytest.approx(lease.expires_ns + 6 * S, abs=100)
    again = service.renew_lease(rig.store, UNIVERSE, ada, WORKER, lease.epoch, ttl_s=10)
    assert again.expires_ns == pytest.approx(renewed.expires_ns, abs=100)
    shorter = service.renew_lease(rig.store, UNIVERSE, ada, WORKER, lease.epoch, ttl_s=1)
    assert shorter == again
    wrong = [("other", lease.epoch), (WORKER, lease.epoch + 1), (WORKER, lease.epoch - 1)]
    for worker, epoch in wrong:
        assert_refused(rig, Fenced, service.renew_lease, rig.store, UNIVERSE, ada, worker, epoch)
    # Both were current, and are not any more once another has taken over.
    rig.later(11)
    taken = service.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "2", ttl_s=10)
    assert taken.epoch == lease.epoch + 1
    assert_refused(rig, Fenced, service.renew_lease, rig.store, UNIVERSE, ada, WORKER, lease.epoch)


@pytest.mark.parametrize(
    ("worker", "epoch", "generation"),
    [("other", 1, None), (WORKER, 2, None), (WORKER, 0, None), (WORKER, 1, 99)],
)
def test_renewing_with_another_holder_or_epoch_is_fenced(
    rig: Rig, ada: str, worker: str, epoch: int, generation: int | None
) -> None:
    service.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1")

    def renew() -> None:
        service.renew_lease(rig.store, UNIVERSE, ada, worker, epoch, generation=generation)

    assert_refused(rig, Fenced, renew)


def test_renewing_a_lease_that_ran_out_is_fenced(rig: Rig, ada: str) -> None:
    lease = service.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1", ttl_s=10)
    rig.later(11)
    assert_refused(rig, Fenced, service.renew_lease, rig.store, UNIVERSE, ada, WORKER, lease.epoch)


def test_renewing_what_was_never_granted_is_fenced(rig: Rig, ada: str) -> None:
    assert_refused(rig, Fenced, service.renew_lease, rig.store, UNIVERSE, ada, WORKER, 1)
    assert_refused(rig, NotFound, service.renew_lease, rig.store, UNIVERSE, NOBODY, WORKER, 1)


@pytest.mark.spec(
    "004", "9) Operational APIs (internal)", "releasing twice is idle; the epoch is never lowered"
)
def test_releasing_twice_is_releasing_once(rig: Rig, ada: str) -> None:
    lease = service.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1")
    assert service.release_lease(rig.store, UNIVERSE, ada, WORKER, lease.epoch) is True
    before = rig.rows()
    assert service.release_lease(rig.store, UNIVERSE, ada, WORKER, lease.epoch) is False
    assert rig.rows() == before
    assert service.acquire_lease(rig.store, UNIVERSE, ada, "other", "1").epoch == lease.epoch + 1


def test_releasing_what_another_holds_is_fenced(rig: Rig, ada: str) -> None:
    lease = service.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1", ttl_s=10)
    rig.later(11)
    service.acquire_lease(rig.store, UNIVERSE, ada, "other", "1")
    assert_refused(
        rig, Fenced, service.release_lease, rig.store, UNIVERSE, ada, WORKER, lease.epoch
    )
    subject = subject_of(UNIVERSE, ada)
    found = rig.store.read(leases.current, subject)
    assert found is not None
    assert found.worker == "other"


# -- ingress -------------------------------------------------------------------------------------


def deposit(amount: int = 5) -> Ingress:
    return event_ingress(*app.encode_event(Deposited(amount)))


def depth(rig: Rig, world_id: str) -> int:
    return rig.store.read(inbox.depth, subject_of(UNIVERSE, world_id))


@pytest.mark.spec(
    "004", "9) Operational APIs (internal)", "ingress under the same key is taken once"
)
def test_enqueueing_twice_is_enqueueing_once(rig: Rig, ada: str) -> None:
    first = service.enqueue_ingress(rig.store, UNIVERSE, ada, deposit(), key="k", app=app)
    before = rig.rows()
    again = service.enqueue_ingress(rig.store, UNIVERSE, ada, deposit(), key="k", app=app)
    assert (first.seq, first.already) == (1, False)
    assert (again.seq, again.already) == (1, True)
    assert rig.rows() == before


def test_the_same_key_with_another_body_is_refused(rig: Rig, ada: str) -> None:
    service.enqueue_ingress(rig.store, UNIVERSE, ada, deposit(5), key="k")

    def other() -> None:
        service.enqueue_ingress(rig.store, UNIVERSE, ada, deposit(6), key="k")

    assert_refused(rig, KeyConflict, other)


@pytest.mark.parametrize("key", [None, ""])
def test_ingress_without_a_key_could_not_be_repeated(rig: Rig, ada: str, key: str | None) -> None:
    def enqueue() -> None:
        service.enqueue_ingress(rig.store, UNIVERSE, ada, deposit(), key=key)

    assert_refused(rig, Invalid, enqueue)


@pytest.mark.spec(
    "004", "3) Durable ingress normalization path", "shape is checked before anything is enqueued"
)
@pytest.mark.parametrize(
    "ingress",
    [
        event_ingress("NoSuchEvent", b"\x01\x80"),
        event_ingress("Deposited", b"\x01" + codec.pack({"amount": "five"})),
        event_ingress("Deposited", b"\x07" + codec.pack({"amount": 5})),
        event_ingress("Deposited", b""),
        Ingress(Kind.EVENT, "Deposited", b"\x01\x80", b"another hash"),
        {"kind": "event"},
    ],
)
def test_what_the_code_could_not_read_stays_outside(rig: Rig, ada: str, ingress: Any) -> None:
    def enqueue() -> None:
        service.enqueue_ingress(rig.store, UNIVERSE, ada, ingress, key="k", app=app)

    assert_refused(rig, Invalid, enqueue)


def test_an_event_of_50_mb_is_refused(rig: Rig, ada: str) -> None:
    large = event_ingress("Deposited", b"\x01" + bytes(50 * 1024 * 1024))

    def enqueue() -> None:
        service.enqueue_ingress(rig.store, UNIVERSE, ada, large, key="k")

    assert_refused(rig, ValueTooLarge, enqueue)
    text = Asked("x" * 50 * 1024 * 1024)
    assert_refused(rig, ValueTooLarge, service.event_send, rig.store, app, "Account", "ada", text)


def test_a_world_that_the_app_does_not_know_is_refused(rig: Rig, ada: str) -> None:
    def enqueue() -> None:
        service.enqueue_ingress(rig.store, UNIVERSE, ada, deposit(), key="k", app=app_other)

    assert_refused(rig, Invalid, enqueue)


def test_what_answers_an_intent_has_the_intent_for_its_key(rig: Rig, ada: str) -> None:
    name, value = app.encode_event(Deposited(5))
    fired = Ingress(
        Kind.TIMER, name, value, codec.digest(name.encode(), value), intent_hash=b"\x07" * 32
    )
    for key in (None, "one", "another"):
        service.enqueue_ingress(rig.store, UNIVERSE, ada, fired, key=key, app=app)
    assert depth(rig, ada) == 1


def test_an_event_is_sent_by_name_and_makes_its_world(rig: Rig) -> None:
    first = service.event_send(rig.store, app, "Account", "new", Deposited(5), key="k")
    again = service.event_send(rig.store, app, "Account", "new", Deposited(5), key="k")
    assert (first.seq, again.seq, again.already) == (1, 1, True)
    assert first.world_id == rig.world_id("new")
    rig.work()
    assert rig.account("new").state().balance == 5


def test_correlation_is_kept(rig: Rig) -> None:
    service.event_send(rig.store, app, "Account", "ada", Deposited(5), correlation_id="c-1")
    rig.work()
    [line] = rig.account().journal()
    assert line.step.ingress.correlation_id == "c-1"


def test_an_event_or_world_that_the_app_does_not_know_is_not_sent(rig: Rig) -> None:
    assert_refused(rig, Invalid, service.event_send, rig.store, app, "Nope", "x", Deposited(5))
    assert_refused(rig, Invalid, service.event_send, rig.store, app, "Account", "x", object())
    for name in ("", "a\0b", "\udc80", "x" * 1000):
        assert_refused(
            rig, Invalid, service.event_send, rig.store, app, "Account", name, Deposited(5)
        )


def test_an_event_is_made_of_plain_fields() -> None:
    assert service.event_of(app, "Deposited", {"amount": 5}) == Deposited(5)
    for type, fields in (("Deposited", {"amount": "x"}), ("Deposited", {}), ("Nope", {})):
        with pytest.raises(Invalid):
            service.event_of(app, type, fields)


# -- receipts ------------------------------------------------------------------------------------


@pytest.fixture
def intent(rig: Rig, ada: str) -> bytes:
    """An intent that ada has pending."""
    rig.account().send(Asked("EUR"))
    rig.work()
    return rig.intent().intent_hash


def quoted(intent: bytes, rate: float = 1.1) -> Receipt:
    return Receipt(intent, "fx.quote", Status.OK, codec.pack(rate))


@pytest.mark.spec(
    "004",
    "3) Durable ingress normalization path",
    "an injected receipt reaches the reducer like an adapter's",
)
def test_an_injected_receipt_is_handled(rig: Rig, ada: str, intent: bytes) -> None:
    service.receipt_inject(rig.store, UNIVERSE, ada, quoted(intent))
    rig.work()
    assert rig.account().state() == Account(rate=1.1, quotes=1)


@pytest.mark.spec(
    "004",
    "9) Operational APIs (internal)",
    "an intent has one receipt: the same again is idle, another is refused",
)
def test_one_receipt_for_an_intent(rig: Rig, ada: str, intent: bytes) -> None:
    first = service.receipt_inject(rig.store, UNIVERSE, ada, quoted(intent))
    again = service.receipt_inject(rig.store, UNIVERSE, ada, quoted(intent))
    assert (again.seq, again.already) == (first.seq, True)
    assert_refused(
        rig, KeyConflict, service.receipt_inject, rig.store, UNIVERSE, ada, quoted(intent, 2.0)
    )
    rig.work()
    assert_refused(
        rig, KeyConflict, service.receipt_inject, rig.store, UNIVERSE, ada, quoted(intent, 2.0)
    )
    assert rig.account().state().quotes == 1


@pytest.mark.spec(
    "004", "9) Operational APIs (internal)", "a receipt for an intent nobody had is NotFound"
)
def test_a_receipt_for_an_unknown_intent_is_refused(rig: Rig, ada: str, intent: bytes) -> None:
    assert_refused(
        rig, NotFound, service.receipt_inject, rig.store, UNIVERSE, ada, quoted(b"\x07" * 32)
    )
    assert_refused(rig, Invalid, service.receipt_inject, rig.store, UNIVERSE, ada, quoted(b""))
    assert_refused(rig, Invalid, service.receipt_inject, rig.store, UNIVERSE, ada, "ok")


def test_a_receipt_of_another_kind_of_effect_is_refused(rig: Rig, ada: str, intent: bytes) -> None:
    wrong = Receipt(intent, "fx.other", Status.OK)
    assert_refused(rig, Invalid, service.receipt_inject, rig.store, UNIVERSE, ada, wrong)


@pytest.mark.spec(
    "004",
    "7) World fork and seed from snapshot",
    "a fork gets no receipt for an intent that its parent had pending",
)
def test_a_receipt_for_an_inherited_intent_is_refused(rig: Rig, ada: str, intent: bytes) -> None:
    child = rig.account().fork("child")
    assert_refused(
        rig,
        Invalid,
        service.receipt_inject,
        rig.store,
        UNIVERSE,
        child.record().world_id,
        quoted(intent),
    )
    service.receipt_inject(rig.store, UNIVERSE, ada, quoted(intent))
    rig.work()
    assert (rig.account().state().quotes, child.state().quotes) == (1, 0)


def test_a_receipt_that_comes_as_ingress_obeys_the_same_rules(
    rig: Rig, ada: str, intent: bytes
) -> None:
    def enqueue(receipt: Receipt, **fields: Any) -> Any:
        made = receipt_ingress(receipt)
        if fields:
            made = Ingress(made.kind, made.type, made.value, made.event_hash, **fields)
        return service.enqueue_ingress(rig.store, UNIVERSE, ada, made)

    assert_refused(rig, NotFound, lambda: enqueue(quoted(b"\x07" * 32)))
    # The envelope says one intent, the letter another.
    assert_refused(rig, Invalid, lambda: enqueue(quoted(intent), intent_hash=b"\x07" * 32))
    first = enqueue(quoted(intent))
    assert service.receipt_inject(rig.store, UNIVERSE, ada, quoted(intent)).seq == first.seq


def test_a_full_inbox_takes_receipts(
    rig: Rig, ada: str, intent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "INBOX_DEPTH_MAX", 0)

    def enqueue() -> None:
        service.enqueue_ingress(rig.store, UNIVERSE, ada, deposit(), key="k")

    assert_refused(rig, Overloaded, enqueue)
    assert service.receipt_inject(rig.store, UNIVERSE, ada, quoted(intent)).seq == 2


# -- fork and seed -------------------------------------------------------------------------------


@pytest.fixture
def deposits(rig: Rig, ada: str) -> list[int]:
    """Three deposits, handled; the last height has a snapshot."""
    for amount in (1, 2, 3):
        rig.account().send(Deposited(amount))
    rig.work()
    return [1, 3, 6]


@pytest.mark.spec(
    "004",
    "9) Operational APIs (internal)",
    "forking again under the same name answers with the same world",
)
def test_forking_twice_is_forking_once(rig: Rig, ada: str, deposits: list[int]) -> None:
    first = service.world_fork(rig.store, UNIVERSE, ada, "child", at=3)
    before = rig.rows()
    assert service.world_fork(rig.store, UNIVERSE, ada, "child", at=3) == first
    assert rig.rows() == before
    assert rig.account("child").state().balance == 6
    assert first.lineage is not None
    assert (first.lineage.parent_world_id, first.lineage.forked_at_height) == (ada, 3)


def test_forking_as_it_is_now_can_be_repeated_later(
    rig: Rig, ada: str, deposits: list[int]
) -> None:
    first = service.world_fork(rig.store, UNIVERSE, ada, "child")
    rig.account().send(Deposited(100))
    rig.work()
    assert service.world_fork(rig.store, UNIVERSE, ada, "child") == first


@pytest.mark.parametrize("height", [0, 1, 2, 3])
def test_a_fork_at_any_height_needs_the_code_only_where_there_is_no_snapshot(
    rig: Rig, ada: str, deposits: list[int], height: int
) -> None:
    def codeless() -> Any:
        return service.world_fork(rig.store, UNIVERSE, ada, "child", at=height)

    if height != 3:
        error = assert_refused(rig, NotFound, codeless)
        assert error.what == "snapshot"
    service.world_fork(rig.store, UNIVERSE, ada, "child", at=height, app=app)
    assert rig.account("child").state().balance == [0, *deposits][height]
    assert codeless().name == "child"


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (NotFound, {"at": 4}),
        (NotFound, {"at": -1}),
        (Invalid, {"at": 3, "effects": "keep"}),
        (Invalid, {"at": 3, "timers": "fail"}),
        (Invalid, {"at": 3, "name": "taken"}),
        (Invalid, {"at": 3, "name": "ada"}),
        (Invalid, {"at": 3, "name": "a\0b"}),
        (Invalid, {"at": 1, "app": app_other}),
    ],
)
def test_a_fork_that_cannot_be_is_refused(
    rig: Rig, ada: str, deposits: list[int], error: type[Exception], fields: dict[str, Any]
) -> None:
    rig.account("taken").create()
    name = fields.pop("name", "child")

    def fork() -> None:
        service.world_fork(rig.store, UNIVERSE, ada, name, **fields)

    assert_refused(rig, error, fork)


@pytest.mark.spec(
    "004",
    "7) World fork and seed from snapshot",
    "a world is created from a snapshot of another, with its lineage",
)
def test_a_world_from_a_seed(rig: Rig, ada: str, deposits: list[int]) -> None:
    seed = SeedSnapshot(ada, 3)
    made = service.world_create_from_seed(rig.store, UNIVERSE, "Account", "child", seed)
    before = rig.rows()
    assert service.world_create_from_seed(rig.store, UNIVERSE, "Account", "child", seed) == made
    assert rig.rows() == before
    subject = subject_of(UNIVERSE, ada)
    baseline = rig.store.read(snapshot.baseline, subject)
    assert baseline is not None
    assert made.lineage == catalog.Lineage(ada, baseline.hash, 3)
    rig.account("child").send(Deposited(10))
    rig.work()
    assert rig.account("child").state().balance == 16
    assert rig.account().state().balance == 6
    known = SeedSnapshot(ada, 3, baseline.hash)
    again = service.world_create_from_seed(rig.store, UNIVERSE, "Account", "child", known)
    assert again.world_id == made.world_id


@pytest.mark.parametrize(
    ("error", "type", "name", "height", "hash"),
    [
        (NotFound, "Account", "child", 2, None),
        (NotFound, "Account", "child", 9, None),
        (Invalid, "Account", "child", -1, None),
        (Invalid, "Other", "child", 3, None),
        (Invalid, "Account", "child", 3, b"another state"),
        (Invalid, "Account", "taken", 3, None),
        (Invalid, "Account", "", 3, None),
    ],
)
def test_a_seed_that_is_not_there_or_foreign_is_refused(
    rig: Rig,
    ada: str,
    deposits: list[int],
    error: type[Exception],
    type: str,
    name: str,
    height: int,
    hash: bytes | None,
) -> None:
    rig.account("taken").create()

    def create() -> None:
        seed = SeedSnapshot(ada, height, hash)
        service.world_create_from_seed(rig.store, UNIVERSE, type, name, seed)

    assert_refused(rig, error, create)


def test_a_seed_of_another_universe_is_not_found(rig: Rig, ada: str, deposits: list[int]) -> None:
    def create() -> None:
        service.world_create_from_seed(
            rig.store, "elsewhere", "Account", "child", SeedSnapshot(ada, 3)
        )

    assert_refused(rig, NotFound, create)
