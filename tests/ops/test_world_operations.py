"""The operations of document 004, section 9: each operation, its repetition, and its refusals."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from holdfast import codec
from holdfast.clock import S
from holdfast.durable import inbox, snapshot
from holdfast.durable import lease as leases
from holdfast.errors import Fenced, Held, Invalid, KeyConflict, NotFound, Overloaded, ValueTooLarge
from holdfast.messages import (
    Ingress,
    IngressKind,
    IntentReceipt,
    ReceiptStatus,
    event_ingress,
    receipt_ingress,
)
from holdfast.ops import world_operations
from holdfast.ops.world_operations import NotActive, NotAssigned, SeedSnapshot
from holdfast.world import catalog
from holdfast.world import ingress as doors
from holdfast.world.catalog import WorldEvent, subject_of
from tests.ops.account_rig import UNIVERSE, WORKER, AccountRig
from tests.ops.app import QuotedAccount, QuotedDeposit, QuoteRequested, app, app_other

MODULES = ("holdfast.ops.world_operations",)

UNKNOWN_WORLD_ID = "0" * 32


@pytest.fixture
def rig() -> Iterator[AccountRig]:
    opened = AccountRig()
    with opened.store:
        opened.account().create()
        yield opened


@pytest.fixture
def ada(rig: AccountRig) -> str:
    return rig.world_id()


@contextmanager
def refused(rig: AccountRig, error: type[Exception]) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Require that the block raises exactly this error type and changes no row."""
    before = rig.rows()
    with pytest.raises(error) as raised:
        yield raised
    assert type(raised.value) is error
    assert rig.rows() == before


# -- assignment ----------------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "9) Operational APIs (internal)",
    "a repeated assignment of a world to the same worker changes nothing",
)
def test_assign_world_is_idempotent(rig: AccountRig, ada: str) -> None:
    first = world_operations.assign_world(rig.store, UNIVERSE, ada, WORKER)
    before = rig.rows()
    assert world_operations.assign_world(rig.store, UNIVERSE, ada, WORKER) == first
    assert rig.rows() == before
    assert first.desired_worker_id == WORKER


@pytest.mark.spec(
    "004",
    "9) Operational APIs (internal)",
    "list_worker_worlds returns the worlds assigned to a worker in order",
)
def test_list_worker_worlds_returns_assigned_worlds_in_order(rig: AccountRig, ada: str) -> None:
    bob = rig.account("bob").create()
    for world in (ada, bob):
        world_operations.assign_world(rig.store, UNIVERSE, world, WORKER)
    both = sorted([ada, bob])
    assert world_operations.list_worker_worlds(rig.store, UNIVERSE, WORKER) == both
    assert world_operations.list_worker_worlds(rig.store, UNIVERSE, WORKER, limit=1) == both[:1]
    assert (
        world_operations.list_worker_worlds(rig.store, UNIVERSE, WORKER, after=both[0]) == both[1:]
    )
    assert world_operations.list_worker_worlds(rig.store, UNIVERSE, "other") == []


def test_assign_world_replaces_the_previous_assignment(rig: AccountRig, ada: str) -> None:
    world_operations.assign_world(rig.store, UNIVERSE, ada, WORKER)
    world_operations.assign_world(
        rig.store, UNIVERSE, ada, "other", priority=3, reason="near", pinned=True
    )
    assert world_operations.list_worker_worlds(rig.store, UNIVERSE, WORKER) == []
    assignment = rig.store.read(catalog.find_assignment, UNIVERSE, ada)
    assert assignment == catalog.Assignment("other", 3, "near", True)


@pytest.mark.spec(
    "004",
    "9) Operational APIs (internal)",
    "unassign of an unassigned world changes nothing, and the reply reports it",
)
def test_unassign_world_is_idempotent(rig: AccountRig, ada: str) -> None:
    world_operations.assign_world(rig.store, UNIVERSE, ada, WORKER)
    assert world_operations.unassign_world(rig.store, UNIVERSE, ada) is True
    before = rig.rows()
    assert world_operations.unassign_world(rig.store, UNIVERSE, ada) is False
    assert rig.rows() == before


@pytest.mark.spec(
    "004",
    "9) Operational APIs (internal)",
    "an operation on an unknown or deleted world raises NotFound",
)
@pytest.mark.parametrize(
    "call",
    [
        lambda store, world: world_operations.assign_world(store, UNIVERSE, world, WORKER),
        lambda store, world: world_operations.unassign_world(store, UNIVERSE, world),
        lambda store, world: world_operations.acquire_lease(store, UNIVERSE, world, WORKER, "1"),
        lambda store, world: world_operations.enqueue_ingress(
            store, UNIVERSE, world, event_ingress("E", b"\x01\x80"), key="k"
        ),
        lambda store, world: world_operations.receipt_inject(
            store, UNIVERSE, world, IntentReceipt(b"\x01" * 32, "fx.quote", ReceiptStatus.OK)
        ),
        lambda store, world: world_operations.world_fork(store, UNIVERSE, world, "child"),
        lambda store, world: world_operations.world_create_from_seed(
            store, UNIVERSE, "QuotedAccount", "child", SeedSnapshot(world, 0)
        ),
    ],
)
@pytest.mark.parametrize("deleted", [False, True])
def test_operations_on_an_unknown_or_deleted_world_raise_not_found(
    rig: AccountRig, ada: str, call: Callable[..., Any], deleted: bool
) -> None:
    if deleted:
        rig.account().delete()
    with refused(rig, NotFound):
        call(rig.store, ada if deleted else UNKNOWN_WORLD_ID)


@pytest.mark.parametrize("name", ["", "x" * 201])
def test_worker_name_length_is_checked(rig: AccountRig, ada: str, name: str) -> None:
    with refused(rig, Invalid):
        world_operations.list_worker_worlds(rig.store, UNIVERSE, name)
    with refused(rig, Invalid):
        world_operations.assign_world(rig.store, UNIVERSE, ada, name)


# -- leases --------------------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "9) Operational APIs (internal)",
    "acquire by the holder returns its lease without an extension",
)
def test_acquire_lease_is_idempotent_for_its_holder(rig: AccountRig, ada: str) -> None:
    first = world_operations.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1", ttl_s=10)
    rig.advance_s(5)
    before = rig.rows()
    assert world_operations.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1", ttl_s=10) == first
    assert rig.rows() == before


@pytest.mark.spec(
    "004",
    "9) Operational APIs (internal)",
    "acquire of a live lease of another worker raises Held with the expiry",
)
def test_acquire_lease_held_by_another_worker_raises_held(rig: AccountRig, ada: str) -> None:
    lease = world_operations.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1")
    with refused(rig, Held) as raised:
        world_operations.acquire_lease(rig.store, UNIVERSE, ada, "other", "1")
    error = raised.value
    assert error.until_ns == lease.expires_ns


def test_acquire_lease_after_restart_waits_and_increments_the_epoch(
    rig: AccountRig, ada: str
) -> None:
    first = world_operations.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1", ttl_s=10)
    with refused(rig, Held):
        world_operations.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "2")
    rig.advance_s(11)
    second = world_operations.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "2")
    assert second.epoch == first.epoch + 1


@pytest.mark.spec(
    "004",
    "9) Operational APIs (internal)",
    "acquire by a worker that is not assigned raises a typed error",
)
def test_acquire_lease_by_an_unassigned_worker_raises_not_assigned(
    rig: AccountRig, ada: str
) -> None:
    world_operations.assign_world(rig.store, UNIVERSE, ada, "other")
    with refused(rig, NotAssigned):
        world_operations.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1")
    world_operations.unassign_world(rig.store, UNIVERSE, ada)
    assert world_operations.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1").epoch == 1


def test_acquire_lease_of_a_paused_world_raises_not_active(rig: AccountRig, ada: str) -> None:
    rig.account().pause()
    with refused(rig, NotActive) as raised:
        world_operations.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1")
    error = raised.value
    assert error.status == "paused"
    rig.account().resume()
    assert world_operations.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1")


def test_acquire_lease_of_a_parked_world_raises_not_active(rig: AccountRig, ada: str) -> None:
    blocker = catalog.WorldBlocker("replay_diverged", "at 7")
    rig.store.transact(catalog.change_status, UNIVERSE, ada, WorldEvent.PARK, blocker)
    with refused(rig, NotActive) as raised:
        world_operations.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1")
    error = raised.value
    assert error.status == "parked"


@pytest.mark.spec(
    "004",
    "9) Operational APIs (internal)",
    "renew_lease requires the current holder and the current epoch",
)
def test_renew_lease_extends_from_now_for_the_current_holder_and_epoch(
    rig: AccountRig, ada: str
) -> None:
    lease = world_operations.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1", ttl_s=10)
    rig.advance_s(6)
    renewed = world_operations.renew_lease(rig.store, UNIVERSE, ada, WORKER, lease.epoch, ttl_s=10)
    # Commits have distinct store times, so store time may be ahead of the clock by a few ns.
    assert renewed.expires_ns == pytest.approx(lease.expires_ns + 6 * S, abs=100)
    again = world_operations.renew_lease(rig.store, UNIVERSE, ada, WORKER, lease.epoch, ttl_s=10)
    assert again.expires_ns == pytest.approx(renewed.expires_ns, abs=100)
    shorter = world_operations.renew_lease(rig.store, UNIVERSE, ada, WORKER, lease.epoch, ttl_s=1)
    assert shorter == again
    wrong = [("other", lease.epoch), (WORKER, lease.epoch + 1), (WORKER, lease.epoch - 1)]
    for worker, epoch in wrong:
        with refused(rig, Fenced):
            world_operations.renew_lease(rig.store, UNIVERSE, ada, worker, epoch)
    # After a takeover the former holder and epoch are stale.
    rig.advance_s(11)
    successor = world_operations.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "2", ttl_s=10)
    assert successor.epoch == lease.epoch + 1
    with refused(rig, Fenced):
        world_operations.renew_lease(rig.store, UNIVERSE, ada, WORKER, lease.epoch)


@pytest.mark.parametrize(
    ("worker", "epoch", "generation"),
    [("other", 1, None), (WORKER, 2, None), (WORKER, 0, None), (WORKER, 1, 99)],
)
def test_renew_lease_with_another_holder_or_epoch_is_fenced(
    rig: AccountRig, ada: str, worker: str, epoch: int, generation: int | None
) -> None:
    world_operations.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1")

    def renew() -> None:
        world_operations.renew_lease(rig.store, UNIVERSE, ada, worker, epoch, generation=generation)

    with refused(rig, Fenced):
        renew()


def test_renew_lease_after_expiry_is_fenced(rig: AccountRig, ada: str) -> None:
    lease = world_operations.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1", ttl_s=10)
    rig.advance_s(11)
    with refused(rig, Fenced):
        world_operations.renew_lease(rig.store, UNIVERSE, ada, WORKER, lease.epoch)


def test_renew_lease_that_was_never_granted_is_fenced(rig: AccountRig, ada: str) -> None:
    with refused(rig, Fenced):
        world_operations.renew_lease(rig.store, UNIVERSE, ada, WORKER, 1)
    with refused(rig, NotFound):
        world_operations.renew_lease(rig.store, UNIVERSE, UNKNOWN_WORLD_ID, WORKER, 1)


@pytest.mark.spec(
    "004",
    "9) Operational APIs (internal)",
    "a repeated release changes nothing and keeps the epoch",
)
def test_release_lease_is_idempotent_and_keeps_the_epoch(rig: AccountRig, ada: str) -> None:
    lease = world_operations.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1")
    assert world_operations.release_lease(rig.store, UNIVERSE, ada, WORKER, lease.epoch) is True
    before = rig.rows()
    assert world_operations.release_lease(rig.store, UNIVERSE, ada, WORKER, lease.epoch) is False
    assert rig.rows() == before
    assert (
        world_operations.acquire_lease(rig.store, UNIVERSE, ada, "other", "1").epoch
        == lease.epoch + 1
    )


def test_release_lease_held_by_another_worker_is_fenced(rig: AccountRig, ada: str) -> None:
    lease = world_operations.acquire_lease(rig.store, UNIVERSE, ada, WORKER, "1", ttl_s=10)
    rig.advance_s(11)
    world_operations.acquire_lease(rig.store, UNIVERSE, ada, "other", "1")
    with refused(rig, Fenced):
        world_operations.release_lease(rig.store, UNIVERSE, ada, WORKER, lease.epoch)
    subject = subject_of(UNIVERSE, ada)
    current = rig.store.read(leases.current_status, subject)
    assert current is not None
    assert current.worker == "other"


# -- ingress -------------------------------------------------------------------------------------


def deposit(amount: int = 5) -> Ingress:
    return event_ingress(*app.encode_event(QuotedDeposit(amount)))


def depth(rig: AccountRig, world_id: str) -> int:
    return rig.store.read(inbox.depth, subject_of(UNIVERSE, world_id))


@pytest.mark.spec(
    "004",
    "9) Operational APIs (internal)",
    "enqueue_ingress with a repeated key adds no second item",
)
def test_enqueue_ingress_with_the_same_key_is_idempotent(rig: AccountRig, ada: str) -> None:
    first = world_operations.enqueue_ingress(rig.store, UNIVERSE, ada, deposit(), key="k", app=app)
    before = rig.rows()
    again = world_operations.enqueue_ingress(rig.store, UNIVERSE, ada, deposit(), key="k", app=app)
    assert (first.seq, first.already) == (1, False)
    assert (again.seq, again.already) == (1, True)
    assert rig.rows() == before


def test_enqueue_ingress_with_the_same_key_and_another_body_raises_key_conflict(
    rig: AccountRig, ada: str
) -> None:
    world_operations.enqueue_ingress(rig.store, UNIVERSE, ada, deposit(5), key="k")

    def other() -> None:
        world_operations.enqueue_ingress(rig.store, UNIVERSE, ada, deposit(6), key="k")

    with refused(rig, KeyConflict):
        other()


@pytest.mark.parametrize("key", [None, ""])
def test_enqueue_ingress_requires_a_key(rig: AccountRig, ada: str, key: str | None) -> None:
    def enqueue() -> None:
        world_operations.enqueue_ingress(rig.store, UNIVERSE, ada, deposit(), key=key)

    with refused(rig, Invalid):
        enqueue()


@pytest.mark.spec(
    "004",
    "3) Durable ingress normalization path",
    "ingress that cannot be decoded is refused before the inbox",
)
@pytest.mark.parametrize(
    "ingress",
    [
        event_ingress("NoSuchEvent", b"\x01\x80"),
        event_ingress("QuotedDeposit", b"\x01" + codec.pack({"amount": "five"})),
        event_ingress("QuotedDeposit", b"\x07" + codec.pack({"amount": 5})),
        event_ingress("QuotedDeposit", b""),
        Ingress(IngressKind.EVENT, "QuotedDeposit", b"\x01\x80", b"another hash"),
        {"kind": "event"},
    ],
)
def test_enqueue_ingress_rejects_undecodable_events(
    rig: AccountRig, ada: str, ingress: Any
) -> None:
    def enqueue() -> None:
        world_operations.enqueue_ingress(rig.store, UNIVERSE, ada, ingress, key="k", app=app)

    with refused(rig, Invalid):
        enqueue()


def test_enqueue_ingress_and_event_send_of_50_mb_raise_value_too_large(
    rig: AccountRig, ada: str
) -> None:
    large = event_ingress("QuotedDeposit", b"\x01" + bytes(50 * 1024 * 1024))

    def enqueue() -> None:
        world_operations.enqueue_ingress(rig.store, UNIVERSE, ada, large, key="k")

    with refused(rig, ValueTooLarge):
        enqueue()
    text = QuoteRequested("x" * 50 * 1024 * 1024)
    with refused(rig, ValueTooLarge):
        world_operations.event_send(rig.store, app, "QuotedAccount", "ada", text)


def test_enqueue_ingress_to_a_world_type_unknown_to_the_app_is_refused(
    rig: AccountRig, ada: str
) -> None:
    def enqueue() -> None:
        world_operations.enqueue_ingress(
            rig.store, UNIVERSE, ada, deposit(), key="k", app=app_other
        )

    with refused(rig, Invalid):
        enqueue()


def test_enqueue_ingress_of_an_intent_is_deduplicated_by_its_intent_hash(
    rig: AccountRig, ada: str
) -> None:
    name, value = app.encode_event(QuotedDeposit(5))
    fired = Ingress(
        IngressKind.TIMER, name, value, codec.digest(name.encode(), value), intent_hash=b"\x07" * 32
    )
    for key in (None, "one", "another"):
        world_operations.enqueue_ingress(rig.store, UNIVERSE, ada, fired, key=key, app=app)
    assert depth(rig, ada) == 1


def test_event_send_creates_the_world_by_name(rig: AccountRig) -> None:
    first = world_operations.event_send(
        rig.store, app, "QuotedAccount", "new", QuotedDeposit(5), key="k"
    )
    again = world_operations.event_send(
        rig.store, app, "QuotedAccount", "new", QuotedDeposit(5), key="k"
    )
    assert (first.seq, again.seq, again.already) == (1, 1, True)
    assert first.world_id == rig.world_id("new")
    rig.run_worker()
    assert rig.account("new").state().balance == 5


def test_event_send_keeps_the_correlation_id(rig: AccountRig) -> None:
    world_operations.event_send(
        rig.store, app, "QuotedAccount", "ada", QuotedDeposit(5), correlation_id="c-1"
    )
    rig.run_worker()
    [line] = rig.account().journal()
    assert line.step.ingress.correlation_id == "c-1"


def test_event_send_rejects_unknown_types_and_invalid_names(rig: AccountRig) -> None:
    with refused(rig, Invalid):
        world_operations.event_send(rig.store, app, "Nope", "x", QuotedDeposit(5))
    with refused(rig, Invalid):
        world_operations.event_send(rig.store, app, "QuotedAccount", "x", object())
    for name in ("", "a\0b", "\udc80", "x" * 1000):
        with refused(rig, Invalid):
            world_operations.event_send(rig.store, app, "QuotedAccount", name, QuotedDeposit(5))


def test_event_of_converts_plain_fields() -> None:
    assert world_operations.event_of(app, "QuotedDeposit", {"amount": 5}) == QuotedDeposit(5)
    for type, fields in (("QuotedDeposit", {"amount": "x"}), ("QuotedDeposit", {}), ("Nope", {})):
        with pytest.raises(Invalid):
            world_operations.event_of(app, type, fields)


# -- receipts ------------------------------------------------------------------------------------


@pytest.fixture
def intent(rig: AccountRig, ada: str) -> bytes:
    """The hash of a pending intent of ada."""
    rig.account().send(QuoteRequested("EUR"))
    rig.run_worker()
    return rig.intent().intent_hash


def quoted(intent: bytes, rate: float = 1.1) -> IntentReceipt:
    return IntentReceipt(intent, "fx.quote", ReceiptStatus.OK, codec.pack(rate))


@pytest.mark.spec(
    "004",
    "3) Durable ingress normalization path",
    "an injected receipt reaches the reducer like the receipt of an adapter",
)
def test_receipt_inject_reaches_the_reducer(rig: AccountRig, ada: str, intent: bytes) -> None:
    world_operations.receipt_inject(rig.store, UNIVERSE, ada, quoted(intent))
    rig.run_worker()
    assert rig.account().state() == QuotedAccount(rate=1.1, quotes=1)


@pytest.mark.spec(
    "004",
    "9) Operational APIs (internal)",
    "an intent accepts one receipt: the same receipt again changes nothing, and another one is refused",
)
def test_receipt_inject_accepts_one_receipt_per_intent(
    rig: AccountRig, ada: str, intent: bytes
) -> None:
    first = world_operations.receipt_inject(rig.store, UNIVERSE, ada, quoted(intent))
    again = world_operations.receipt_inject(rig.store, UNIVERSE, ada, quoted(intent))
    assert (again.seq, again.already) == (first.seq, True)
    with refused(rig, KeyConflict):
        world_operations.receipt_inject(rig.store, UNIVERSE, ada, quoted(intent, 2.0))
    rig.run_worker()
    with refused(rig, KeyConflict):
        world_operations.receipt_inject(rig.store, UNIVERSE, ada, quoted(intent, 2.0))
    assert rig.account().state().quotes == 1


@pytest.mark.spec(
    "004", "9) Operational APIs (internal)", "a receipt for an unknown intent raises NotFound"
)
def test_receipt_inject_for_an_unknown_intent_is_not_found(
    rig: AccountRig, ada: str, intent: bytes
) -> None:
    with refused(rig, NotFound):
        world_operations.receipt_inject(rig.store, UNIVERSE, ada, quoted(b"\x07" * 32))
    with refused(rig, Invalid):
        world_operations.receipt_inject(rig.store, UNIVERSE, ada, quoted(b""))
    with refused(rig, Invalid):
        world_operations.receipt_inject(rig.store, UNIVERSE, ada, "ok")


def test_receipt_inject_of_another_effect_kind_is_refused(
    rig: AccountRig, ada: str, intent: bytes
) -> None:
    wrong = IntentReceipt(intent, "fx.other", ReceiptStatus.OK)
    with refused(rig, Invalid):
        world_operations.receipt_inject(rig.store, UNIVERSE, ada, wrong)


@pytest.mark.spec(
    "004",
    "7) World fork and seed from snapshot",
    "a fork refuses a receipt for an intent that its parent had pending",
)
def test_receipt_inject_to_a_fork_for_an_inherited_intent_is_refused(
    rig: AccountRig, ada: str, intent: bytes
) -> None:
    child = rig.account().fork("child")
    with refused(rig, Invalid):
        world_operations.receipt_inject(
            rig.store, UNIVERSE, child.record().world_id, quoted(intent)
        )
    world_operations.receipt_inject(rig.store, UNIVERSE, ada, quoted(intent))
    rig.run_worker()
    assert (rig.account().state().quotes, child.state().quotes) == (1, 0)


def test_enqueue_ingress_of_a_receipt_follows_the_receipt_inject_rules(
    rig: AccountRig, ada: str, intent: bytes
) -> None:
    def enqueue(receipt: IntentReceipt, **fields: Any) -> Any:
        ingress = receipt_ingress(receipt)
        if fields:
            ingress = Ingress(
                ingress.kind, ingress.type, ingress.value, ingress.event_hash, **fields
            )
        return world_operations.enqueue_ingress(rig.store, UNIVERSE, ada, ingress)

    with refused(rig, NotFound):
        enqueue(quoted(b"\x07" * 32))
    # The intent hash of the envelope differs from that of the receipt.
    with refused(rig, Invalid):
        enqueue(quoted(intent), intent_hash=b"\x07" * 32)
    first = enqueue(quoted(intent))
    assert (
        world_operations.receipt_inject(rig.store, UNIVERSE, ada, quoted(intent)).seq == first.seq
    )


def test_receipt_inject_into_a_full_inbox_is_accepted(
    rig: AccountRig, ada: str, intent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "INBOX_DEPTH_MAX", 0)

    def enqueue() -> None:
        world_operations.enqueue_ingress(rig.store, UNIVERSE, ada, deposit(), key="k")

    with refused(rig, Overloaded):
        enqueue()
    assert world_operations.receipt_inject(rig.store, UNIVERSE, ada, quoted(intent)).seq == 2


# -- fork and seed -------------------------------------------------------------------------------


@pytest.fixture
def deposits(rig: AccountRig, ada: str) -> list[int]:
    """The balances after three handled deposits. The last height has a snapshot."""
    for amount in (1, 2, 3):
        rig.account().send(QuotedDeposit(amount))
    rig.run_worker()
    return [1, 3, 6]


@pytest.mark.spec(
    "004",
    "9) Operational APIs (internal)",
    "a repeated fork under the same name returns the same world",
)
def test_world_fork_is_idempotent(rig: AccountRig, ada: str, deposits: list[int]) -> None:
    first = world_operations.world_fork(rig.store, UNIVERSE, ada, "child", at=3)
    before = rig.rows()
    assert world_operations.world_fork(rig.store, UNIVERSE, ada, "child", at=3) == first
    assert rig.rows() == before
    assert rig.account("child").state().balance == 6
    assert first.lineage is not None
    assert (first.lineage.parent_world_id, first.lineage.forked_at_height) == (ada, 3)


def test_world_fork_without_a_height_is_idempotent_after_new_events(
    rig: AccountRig, ada: str, deposits: list[int]
) -> None:
    first = world_operations.world_fork(rig.store, UNIVERSE, ada, "child")
    rig.account().send(QuotedDeposit(100))
    rig.run_worker()
    assert world_operations.world_fork(rig.store, UNIVERSE, ada, "child") == first


@pytest.mark.parametrize("height", [0, 1, 2, 3])
def test_world_fork_requires_the_app_without_a_snapshot(
    rig: AccountRig, ada: str, deposits: list[int], height: int
) -> None:
    def fork_without_app() -> Any:
        return world_operations.world_fork(rig.store, UNIVERSE, ada, "child", at=height)

    if height != 3:
        with refused(rig, NotFound) as raised:
            fork_without_app()
        error = raised.value
        assert error.what == "snapshot"
    world_operations.world_fork(rig.store, UNIVERSE, ada, "child", at=height, app=app)
    assert rig.account("child").state().balance == [0, *deposits][height]
    assert fork_without_app().name == "child"


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
def test_world_fork_with_invalid_arguments_is_refused(
    rig: AccountRig, ada: str, deposits: list[int], error: type[Exception], fields: dict[str, Any]
) -> None:
    rig.account("taken").create()
    name = fields.pop("name", "child")

    def fork() -> None:
        world_operations.world_fork(rig.store, UNIVERSE, ada, name, **fields)

    with refused(rig, error):
        fork()


@pytest.mark.spec(
    "004",
    "7) World fork and seed from snapshot",
    "a world that is created from a snapshot has its state and its lineage",
)
def test_world_create_from_seed_copies_state_and_lineage(
    rig: AccountRig, ada: str, deposits: list[int]
) -> None:
    seed = SeedSnapshot(ada, 3)
    created = world_operations.world_create_from_seed(
        rig.store, UNIVERSE, "QuotedAccount", "child", seed
    )
    before = rig.rows()
    assert (
        world_operations.world_create_from_seed(rig.store, UNIVERSE, "QuotedAccount", "child", seed)
        == created
    )
    assert rig.rows() == before
    subject = subject_of(UNIVERSE, ada)
    baseline = rig.store.read(snapshot.baseline, subject)
    assert baseline is not None
    assert created.lineage == catalog.ForkLineage(ada, baseline.hash, 3)
    rig.account("child").send(QuotedDeposit(10))
    rig.run_worker()
    assert rig.account("child").state().balance == 16
    assert rig.account().state().balance == 6
    seed_with_hash = SeedSnapshot(ada, 3, baseline.hash)
    again = world_operations.world_create_from_seed(
        rig.store, UNIVERSE, "QuotedAccount", "child", seed_with_hash
    )
    assert again.world_id == created.world_id


@pytest.mark.parametrize(
    ("error", "type", "name", "height", "hash"),
    [
        (NotFound, "QuotedAccount", "child", 2, None),
        (NotFound, "QuotedAccount", "child", 9, None),
        (Invalid, "QuotedAccount", "child", -1, None),
        (Invalid, "Other", "child", 3, None),
        (Invalid, "QuotedAccount", "child", 3, b"another state"),
        (Invalid, "QuotedAccount", "taken", 3, None),
        (Invalid, "QuotedAccount", "", 3, None),
    ],
)
def test_world_create_from_seed_rejects_a_missing_or_foreign_snapshot(
    rig: AccountRig,
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
        world_operations.world_create_from_seed(rig.store, UNIVERSE, type, name, seed)

    with refused(rig, error):
        create()


def test_world_create_from_seed_of_another_universe_is_not_found(
    rig: AccountRig, ada: str, deposits: list[int]
) -> None:
    def create() -> None:
        world_operations.world_create_from_seed(
            rig.store, "elsewhere", "QuotedAccount", "child", SeedSnapshot(ada, 3)
        )

    with refused(rig, NotFound):
        create()
