"""Into a world: durable, in order, once per key, refused when there is too much."""

from __future__ import annotations

import pytest

import holdfast as hf
from holdfast.config import BATCH_MAX, INBOX_DEPTH_MAX, MESSAGE_BYTES_MAX
from holdfast.durable import inbox
from holdfast.errors import Invalid, KeyConflict, NotFound, Overloaded, ValueTooLarge
from holdfast.messages import Receipt, Status, event_ingress, receipt_ingress
from holdfast.store import schema
from holdfast.world.ingress import Address, deliver, enqueue
from tests.world import bank
from tests.world.rig import Rig

MODULES = ("holdfast.world.ingress", "holdfast.messages")


@pytest.fixture
def rig(any_rig: Rig) -> Rig:
    return any_rig


def fill(rig: Rig, handle: hf.WorldHandle[bank.Account], depth: int = INBOX_DEPTH_MAX) -> None:
    """Make the inbox as deep as that, by its counters: a million rows would take a while."""
    entries = schema.prefix(schema.Space.INBOX, rig.subject(handle), "e")
    row = schema.int_bytes(rig.cursor(handle) + depth)
    rig.store.transact(lambda txn: txn.put(schema.sequence_key(entries), row))


# -- order and keys ------------------------------------------------------------------------------


def test_messages_are_numbered_and_handled_in_the_order_of_their_sending(rig: Rig) -> None:
    ada = rig.world()
    assert [ada.send(bank.Noted(str(n), [])) for n in range(5)] == [1, 2, 3, 4, 5]
    rig.run()
    assert ada.state().notes == ["0", "1", "2", "3", "4"]
    assert [one.step.seq for one in ada.journal()] == [1, 2, 3, 4, 5]


def test_the_same_key_delivers_once_and_answers_with_the_first_seq(rig: Rig) -> None:
    ada = rig.world()
    assert ada.send(bank.Deposited(5), key="k") == 1
    assert ada.send(bank.Deposited(1)) == 2
    assert ada.send(bank.Deposited(5), key="k") == 1
    rig.run()
    assert ada.send(bank.Deposited(5), key="k") == 1
    assert ada.state().balance == 6


def test_the_same_key_with_another_body_is_a_conflict_and_nothing_changes(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Deposited(5), key="k")
    before = rig.rows()
    with pytest.raises(KeyConflict):
        ada.send(bank.Deposited(6), key="k")
    assert rig.rows() == before


def test_a_key_belongs_to_its_world(rig: Rig) -> None:
    ada, bob = rig.world(), rig.world(name="bob")
    ada.send(bank.Deposited(5), key="k")
    assert bob.send(bank.Deposited(6), key="k") == 1


def test_a_recreated_world_knows_no_keys_of_the_deleted_one(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Deposited(5), key="k")
    ada.delete()
    assert ada.send(bank.Deposited(6), key="k") == 1


def test_many_are_delivered_all_or_none(rig: Rig) -> None:
    ada, bob = rig.world(), rig.world(name="bob")
    assert rig.runtime.send_many(
        [(ada, bank.Deposited(1)), (bob, bank.Deposited(2)), (ada, bank.Deposited(3))]
    ) == [1, 1, 2]
    before = rig.rows()
    fill(rig, bob)
    full = rig.rows()
    with pytest.raises(Overloaded):
        rig.runtime.send_many([(ada, bank.Deposited(1)), (bob, bank.Deposited(2))])
    assert rig.rows() == full
    assert len(full) == len(before)


def test_a_batch_has_a_bound(rig: Rig) -> None:
    ada = rig.world()
    with pytest.raises(Invalid):
        rig.runtime.send_many([(ada, bank.Deposited(1))] * (BATCH_MAX + 1))
    assert rig.depth(ada) == 0


def test_identities_are_preserved_from_the_door_to_the_journal(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Deposited(5), correlation_id="order-7")
    rig.run()
    kept = ada.journal()[0].step.ingress
    assert kept == event_ingress(
        *bank.app.encode_event(bank.Deposited(5)), correlation_id="order-7"
    )


# -- too much ------------------------------------------------------------------------------------


def test_a_full_inbox_refuses_events_and_says_when_to_come_again(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Deposited(1))
    rig.run()
    fill(rig, ada)
    before = rig.rows()
    with pytest.raises(Overloaded) as raised:
        ada.send(bank.Deposited(1))
    assert raised.value.retryable
    assert raised.value.retry_after_s > 0
    assert rig.rows() == before


def test_an_inbox_with_room_for_one_takes_one(rig: Rig) -> None:
    ada = rig.world()
    fill(rig, ada, INBOX_DEPTH_MAX - 1)
    ada.send(bank.Deposited(1))
    with pytest.raises(Overloaded):
        ada.send(bank.Deposited(1))


def test_receipts_are_never_refused(rig: Rig) -> None:
    ada = rig.world()
    fill(rig, ada)
    receipt = receipt_ingress(Receipt(b"i" * 32, "fx.quote", Status.OK))
    put = rig.store.transact(enqueue, "bank", rig.id(ada), "receipt:1", receipt)
    assert put.seq == INBOX_DEPTH_MAX + 1


def test_an_ingress_that_would_not_fit_into_a_journal_entry_is_refused_at_the_door(
    rig: Rig,
) -> None:
    ada = rig.world()
    before = rig.rows()
    for large in (
        event_ingress("Deposited", b"x" * (MESSAGE_BYTES_MAX + 100_000)),
        event_ingress("Deposited", b"x", headers={"h": "x" * (MESSAGE_BYTES_MAX + 100_000)}),
        receipt_ingress(Receipt(b"i", "fx.quote", Status.OK, b"x" * (MESSAGE_BYTES_MAX + 100_000))),
    ):
        with pytest.raises(ValueTooLarge):
            rig.store.transact(enqueue, "bank", rig.id(ada), None, large)
    assert rig.rows() == before


# -- to whom -------------------------------------------------------------------------------------


def test_a_world_that_must_be_there_and_is_not_is_not_found(rig: Rig) -> None:
    before = rig.rows()
    with pytest.raises(NotFound):
        rig.store.transact(
            deliver, Address("bank", "Account", "ada"), None, event_ingress("X", b"")
        )
    with pytest.raises(NotFound):
        rig.store.transact(enqueue, "bank", "nobody", None, event_ingress("X", b""))
    assert rig.rows() == before


def test_a_deleted_world_takes_nothing_by_its_id(rig: Rig) -> None:
    ada = rig.world()
    world_id = rig.id(ada)
    ada.delete()
    with pytest.raises(NotFound):
        rig.store.transact(enqueue, "bank", world_id, None, event_ingress("X", b""))


def test_a_world_stops_before_an_event_of_an_unknown_type(rig: Rig) -> None:
    ada = rig.world()
    rig.store.transact(enqueue, "bank", rig.id(ada), None, event_ingress("Alien", b"\x01\x80"))
    rig.run()
    assert ada.journal() == []
    assert rig.depth(ada) == 1
    blocker = rig.record(ada).blocked_by
    assert blocker is not None
    assert blocker.code == "unknown_event"
    assert "Alien" in blocker.text


def test_an_event_that_the_app_names_and_no_handler_takes_is_journaled_and_ignored(
    rig: Rig,
) -> None:
    ada = rig.world()
    ada.send(bank.Unheard())
    rig.run()
    assert [(one.type, one.outcome) for one in ada.journal()] == [("Unheard", "ignored")]


def test_a_large_event_takes_the_way_of_blobs_and_leaves_none_behind(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Noted("x" * 100_000, []))
    rig.run()
    assert ada.state().notes == ["x" * 100_000]
    assert rig.store.read(inbox.read, rig.subject(ada), 10) == []
