"""Ingress of a world: durable, ordered, deduplicated by key, and bounded by inbox depth."""

from __future__ import annotations

import pytest

import holdfast as hf
from holdfast.config import BATCH_MAX, INBOX_DEPTH_MAX, MESSAGE_BYTES_MAX
from holdfast.durable import inbox
from holdfast.errors import Invalid, KeyConflict, NotFound, Overloaded, ValueTooLarge
from holdfast.messages import IntentReceipt, ReceiptStatus, event_ingress, receipt_ingress
from holdfast.store import schema
from holdfast.world.ingress import WorldAddress, deliver, deliver_by_id
from tests.world import bank
from tests.world.rig import WorldRig

MODULES = ("holdfast.world.ingress", "holdfast.messages")


@pytest.fixture
def rig(any_rig: WorldRig) -> WorldRig:
    return any_rig


def fill_inbox(
    rig: WorldRig, handle: hf.WorldHandle[bank.BankAccount], depth: int = INBOX_DEPTH_MAX
) -> None:
    """Set the inbox depth through its sequence counter. Writing a million rows would be slow."""
    entries = schema.key_prefix(schema.Space.INBOX, rig.subject(handle), "e")
    row = schema.encode_int(rig.cursor(handle) + depth)
    rig.store.transact(lambda txn: txn.put(schema.sequence_key(entries), row))


# -- order and keys ------------------------------------------------------------------------------


def test_messages_are_numbered_and_handled_in_send_order(rig: WorldRig) -> None:
    ada = rig.world()
    assert [ada.send(bank.Noted(str(n), [])) for n in range(5)] == [1, 2, 3, 4, 5]
    rig.run()
    assert ada.state().notes == ["0", "1", "2", "3", "4"]
    assert [one.step.seq for one in ada.journal()] == [1, 2, 3, 4, 5]


def test_send_with_a_repeated_key_delivers_once(rig: WorldRig) -> None:
    ada = rig.world()
    assert ada.send(bank.DepositMade(5), key="k") == 1
    assert ada.send(bank.DepositMade(1)) == 2
    assert ada.send(bank.DepositMade(5), key="k") == 1
    rig.run()
    assert ada.send(bank.DepositMade(5), key="k") == 1
    assert ada.state().balance == 6


def test_send_with_a_repeated_key_and_another_body_is_a_conflict(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.DepositMade(5), key="k")
    before = rig.rows()
    with pytest.raises(KeyConflict):
        ada.send(bank.DepositMade(6), key="k")
    assert rig.rows() == before


def test_send_keys_are_scoped_to_their_world(rig: WorldRig) -> None:
    ada, bob = rig.world(), rig.world(name="bob")
    ada.send(bank.DepositMade(5), key="k")
    assert bob.send(bank.DepositMade(6), key="k") == 1


def test_recreated_world_does_not_inherit_send_keys(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.DepositMade(5), key="k")
    ada.delete()
    assert ada.send(bank.DepositMade(6), key="k") == 1


def test_send_many_is_atomic(rig: WorldRig) -> None:
    ada, bob = rig.world(), rig.world(name="bob")
    assert rig.runtime.send_many(
        [(ada, bank.DepositMade(1)), (bob, bank.DepositMade(2)), (ada, bank.DepositMade(3))]
    ) == [1, 1, 2]
    before = rig.rows()
    fill_inbox(rig, bob)
    full = rig.rows()
    with pytest.raises(Overloaded):
        rig.runtime.send_many([(ada, bank.DepositMade(1)), (bob, bank.DepositMade(2))])
    assert rig.rows() == full
    assert len(full) == len(before)


def test_send_many_refuses_a_batch_above_its_limit(rig: WorldRig) -> None:
    ada = rig.world()
    with pytest.raises(Invalid):
        rig.runtime.send_many([(ada, bank.DepositMade(1))] * (BATCH_MAX + 1))
    assert rig.inbox_depth(ada) == 0


def test_correlation_id_is_kept_in_the_journal(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.DepositMade(5), correlation_id="order-7")
    rig.run()
    kept = ada.journal()[0].step.ingress
    assert kept == event_ingress(
        *bank.app.encode_event(bank.DepositMade(5)), correlation_id="order-7"
    )


# -- limits --------------------------------------------------------------------------------------


def test_full_inbox_refuses_events_with_retry_after(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.DepositMade(1))
    rig.run()
    fill_inbox(rig, ada)
    before = rig.rows()
    with pytest.raises(Overloaded) as raised:
        ada.send(bank.DepositMade(1))
    assert raised.value.retryable
    assert raised.value.retry_after_s > 0
    assert rig.rows() == before


def test_inbox_with_room_for_one_accepts_one(rig: WorldRig) -> None:
    ada = rig.world()
    fill_inbox(rig, ada, INBOX_DEPTH_MAX - 1)
    ada.send(bank.DepositMade(1))
    with pytest.raises(Overloaded):
        ada.send(bank.DepositMade(1))


def test_full_inbox_still_accepts_receipts(rig: WorldRig) -> None:
    ada = rig.world()
    fill_inbox(rig, ada)
    receipt = receipt_ingress(IntentReceipt(b"i" * 32, "fx.quote", ReceiptStatus.OK))
    put = rig.store.transact(deliver_by_id, "bank", rig.id(ada), "receipt:1", receipt)
    assert put.seq == INBOX_DEPTH_MAX + 1


def test_ingress_too_large_for_a_journal_entry_is_refused(
    rig: WorldRig,
) -> None:
    ada = rig.world()
    before = rig.rows()
    for large in (
        event_ingress("DepositMade", b"x" * (MESSAGE_BYTES_MAX + 100_000)),
        event_ingress("DepositMade", b"x", headers={"h": "x" * (MESSAGE_BYTES_MAX + 100_000)}),
        receipt_ingress(
            IntentReceipt(b"i", "fx.quote", ReceiptStatus.OK, b"x" * (MESSAGE_BYTES_MAX + 100_000))
        ),
    ):
        with pytest.raises(ValueTooLarge):
            rig.store.transact(deliver_by_id, "bank", rig.id(ada), None, large)
    assert rig.rows() == before


# -- recipients ----------------------------------------------------------------------------------


def test_delivery_to_a_missing_world_is_not_found(rig: WorldRig) -> None:
    before = rig.rows()
    with pytest.raises(NotFound):
        rig.store.transact(
            deliver, WorldAddress("bank", "BankAccount", "ada"), None, event_ingress("X", b"")
        )
    with pytest.raises(NotFound):
        rig.store.transact(deliver_by_id, "bank", "nobody", None, event_ingress("X", b""))
    assert rig.rows() == before


def test_delivery_to_a_deleted_world_id_is_not_found(rig: WorldRig) -> None:
    ada = rig.world()
    world_id = rig.id(ada)
    ada.delete()
    with pytest.raises(NotFound):
        rig.store.transact(deliver_by_id, "bank", world_id, None, event_ingress("X", b""))


def test_a_world_stops_before_an_event_of_an_unknown_type(rig: WorldRig) -> None:
    ada = rig.world()
    rig.store.transact(
        deliver_by_id, "bank", rig.id(ada), None, event_ingress("Alien", b"\x01\x80")
    )
    rig.run()
    assert ada.journal() == []
    assert rig.inbox_depth(ada) == 1
    blocker = rig.record(ada).blocked_by
    assert blocker is not None
    assert blocker.code == "unknown_event"
    assert "Alien" in blocker.text


def test_event_named_in_events_without_a_handler_is_ignored(
    rig: WorldRig,
) -> None:
    ada = rig.world()
    ada.send(bank.UnhandledEvent())
    rig.run()
    assert [(one.type, one.outcome) for one in ada.journal()] == [("UnhandledEvent", "ignored")]


def test_large_event_is_stored_as_a_blob_and_cleaned_up(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.Noted("x" * 100_000, []))
    rig.run()
    assert ada.state().notes == ["x" * 100_000]
    assert rig.store.read(inbox.read, rig.subject(ada), 10) == []
