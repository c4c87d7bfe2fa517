"""Mail between worlds: once per message, in the order of the destination, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast as hf
from holdfast import codec
from holdfast.clock import S
from holdfast.config import INBOX_DEPTH_MAX
from holdfast.durable import inbox, queue
from holdfast.messages import (
    FABRIC_SEND,
    FabricSendParams,
    Intent,
    Kind,
    WorldName,
    intent_hash,
)
from holdfast.world import fabric, outbox, publish
from tests.roles.rig import Rig
from tests.roles.shop import Buyer, Careful, Woken, Wrote
from tests.world.rig import FAULTS
from tests.world.test_ingress import fill

MODULES = ("holdfast.world.fabric", "holdfast.world.outbox", "holdfast.roles.fabric")

MAIL = publish.effects("shop", FABRIC_SEND)


def identity(rig: Rig, sender: hf.WorldHandle[Any], height: int = 1) -> bytes:
    return intent_hash(rig.store.generation, rig.id(sender), (height, 0))


def full(rig: Rig, name: str) -> hf.WorldHandle[Buyer]:
    handle = rig.buyer(name)
    handle.pause()
    fill(rig, handle, INBOX_DEPTH_MAX)
    return handle


def emptied(rig: Rig, handle: hf.WorldHandle[Buyer]) -> None:
    fill(rig, handle, 0)
    handle.resume()
    rig.expire(11)


def test_mail_says_where_it_came_from(rig: Rig) -> None:
    ada, bob = rig.buyer("ada"), rig.buyer("bob")
    ada.send(Woken())
    ada.send(Wrote("bob", "hello"), correlation_id="c")
    rig.think()
    mail = bob.journal()[0].step.ingress
    assert bob.state().woken == ["hello"]
    assert (mail.kind, mail.from_world, mail.from_height) == (Kind.FABRIC, rig.id(ada), 2)
    assert (mail.correlation_id, mail.headers) == ("c", {"lang": "en"})
    assert mail.intent_hash == identity(rig, ada, 2)


def test_mail_of_one_world_arrives_in_the_order_of_its_sending(rig: Rig) -> None:
    bob = rig.buyer("bob")
    rig.buyer("ada", *[Wrote("bob", str(n)) for n in range(50)])
    assert bob.state().woken == [str(n) for n in range(50)]


@pytest.mark.parametrize("fault", FAULTS)
def test_whichever_way_the_senders_commit_goes_wrong_the_mail_arrives_once(
    rig: Rig, fault: str
) -> None:
    ada, bob = rig.buyer("ada", Woken()), rig.buyer("bob")
    ada.send(Wrote("bob", "hello"))
    rig.backend.arm({1: fault})
    rig.think()
    rig.backend.arm({})
    rig.expire(11)
    rig.think()
    assert bob.state().woken == ["hello"]


def test_a_message_that_was_delivered_before_is_not_delivered_again(rig: Rig) -> None:
    carl, bob = rig.world(Careful, "carl"), rig.buyer("bob")
    schema, value = rig.app.encode_event(Woken("hello"))
    mail = FabricSendParams(dest_world=WorldName("Buyer", "bob"), schema=schema, value_cbor=value)
    before = Intent(
        "shop", rig.id(carl), identity(rig, carl), FABRIC_SEND, codec.pack(mail), "carl", b"", 0
    )
    [put] = rig.store.transact(fabric.accept_many, [(before, rig.store.now_ns())])
    carl.send(Wrote("bob", "hello"))
    rig.think()
    assert bob.state().woken == ["hello"]
    assert (carl.state().sent, carl.state().seqs) == (["already_enqueued"], [put.seq])


# -- receipts ------------------------------------------------------------------------------------


def test_a_world_that_asks_is_told_where_its_mail_lies(rig: Rig) -> None:
    carl, bob = rig.world(Careful, "carl"), rig.buyer("bob", Woken())
    carl.send(Wrote("bob"))
    rig.think()
    assert (carl.state().sent, carl.state().seqs) == (["ok"], [2])
    assert carl.height() == 2
    assert len(bob.state().woken) == 2


def test_a_receipt_of_mail_that_the_app_declares_is_journaled_and_ignored_without_a_handler(
    rig: Rig,
) -> None:
    ada = rig.buyer("ada", Wrote("bob"))
    rig.think()
    told = [(entry.type, entry.outcome) for entry in ada.journal()]
    assert told == [("Wrote", "ok"), ("fabric.send", "ignored")]


def test_without_a_declaration_delivered_mail_has_no_receipt() -> None:
    class Plain(hf.World):
        @hf.on(Wrote)
        def wrote(self, event: Wrote, cx: hf.Context) -> None:
            if event.to:
                cx.send(Plain, event.to, Wrote(""))

    for effects, height in (((), 1), ((hf.fabric.send,), 2)):
        rig = Rig(hf.App("shop", worlds=[Plain], effects=effects))
        ada = rig.world(Plain, "ada")
        ada.send(Wrote("bob"))
        rig.think()
        assert ada.height() == height


# -- destinations --------------------------------------------------------------------------------


def test_mail_to_a_full_world_is_delivered_when_there_is_room_and_the_sender_told_then(
    rig: Rig,
) -> None:
    bob, carl = full(rig, "bob"), rig.world(Careful, "carl")
    carl.send(Wrote("bob", "hello"))
    rig.think()
    pool = rig.pool()
    rig.work(pool, seconds=20)
    assert carl.state().sent == []
    emptied(rig, bob)
    rig.work(pool, seconds=5)
    assert bob.state().woken == ["hello"]
    assert carl.state().sent == ["ok"]
    assert rig.counts(FABRIC_SEND).delayed == rig.counts(FABRIC_SEND).ready == 0


def test_mail_that_waits_is_delivered_once_though_pools_die_with_it_in_hand(rig: Rig) -> None:
    bob = full(rig, "bob")
    rig.buyer("ada", Wrote("bob", "hello"))
    for n in range(10):
        assert rig.store.transact(queue.claim, MAIL, f"pool-{n}", 1, S, queue.Budget(1, 100))
        rig.clock.advance(2 * S)
    emptied(rig, bob)
    rig.work(rig.pool(), seconds=5)
    assert bob.state().woken == ["hello"]
    assert rig.letters(FABRIC_SEND) == []


def test_a_full_world_delays_no_mail_to_others(rig: Rig) -> None:
    full(rig, "bob")
    eve = rig.buyer("eve")
    rig.buyer("ada", Wrote("bob"), Wrote("eve", "hello"))
    assert eve.state().woken == ["hello"]


def test_mail_to_a_deleted_world_goes_to_a_new_one_of_its_name(rig: Rig) -> None:
    bob = rig.buyer("bob", Woken("old"))
    was = rig.id(bob)
    bob.delete()
    rig.buyer("ada", Wrote("bob", "hello"))
    new = rig.world(Buyer, "bob")
    rig.think()
    assert rig.id(new) != was
    assert new.state().woken == ["hello"]


def test_a_world_may_write_to_itself_and_be_told(rig: Rig) -> None:
    ada = rig.buyer("ada", Wrote("ada", "me"))
    assert ada.state().woken == ["me"]
    assert rig.store.read(inbox.depth, rig.subject(ada)) == 0


def test_a_forked_world_sends_under_its_own_identities(rig: Rig) -> None:
    bob, ada = rig.buyer("bob"), rig.buyer("ada", Woken())
    child = ada.fork("child", at=1)
    rig.assign(child)
    for handle in (ada, child):
        handle.send(Wrote("bob", handle.name))
    rig.think()
    assert sorted(bob.state().woken) == ["ada", "child"]


def test_the_same_message_published_twice_is_in_the_inbox_once(rig: Rig) -> None:
    ada, bob = rig.buyer("ada"), rig.buyer("bob")
    full_bob = full(rig, "full")
    ada.send(Wrote("full", "x"))
    rig.think()
    [payload] = rig.queued(MAIL)
    mail = codec.unpack_as(Intent, payload)
    emptied(rig, full_bob)
    for _ in range(3):
        rig.store.transact(outbox.deliver, mail)
    rig.work(rig.pool())
    assert full_bob.state().woken == ["x"]
    assert bob.state().woken == []
