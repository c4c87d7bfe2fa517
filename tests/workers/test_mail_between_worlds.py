"""Mail between worlds of a universe: each message is delivered once, in order, despite faults."""

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
    IngressKind,
    Intent,
    WorldName,
    intent_hash,
)
from holdfast.world import intents
from holdfast.world.messaging import delivery, outbox
from tests.workers.rig import WorkerRig
from tests.workers.shop import Buyer, Careful, Woken, Wrote
from tests.world.rig import FAULTS
from tests.world.test_ingress import fill_inbox

MODULES = (
    "holdfast.world.messaging.delivery",
    "holdfast.world.messaging.outbox",
    "holdfast.workers.mail.delivery",
)

MAIL = intents.effect_queue("shop", FABRIC_SEND)


def mail_id(rig: WorkerRig, sender: hf.WorldHandle[Any], height: int = 1) -> bytes:
    return intent_hash(rig.store.generation, rig.id(sender), (height, 0))


def full_world(rig: WorkerRig, name: str) -> hf.WorldHandle[Buyer]:
    handle = rig.buyer(name)
    handle.pause()
    fill_inbox(rig, handle, INBOX_DEPTH_MAX)
    return handle


def empty_inbox(rig: WorkerRig, handle: hf.WorldHandle[Buyer]) -> None:
    fill_inbox(rig, handle, 0)
    handle.resume()
    rig.advance_clock(11)


def test_mail_carries_its_source_headers_and_correlation_id(rig: WorkerRig) -> None:
    ada, bob = rig.buyer("ada"), rig.buyer("bob")
    ada.send(Woken())
    ada.send(Wrote("bob", "hello"), correlation_id="c")
    rig.run_worlds()
    mail = bob.journal()[0].step.ingress
    assert bob.state().woken == ["hello"]
    assert (mail.kind, mail.from_world, mail.from_height) == (IngressKind.FABRIC, rig.id(ada), 2)
    assert (mail.correlation_id, mail.headers) == ("c", {"lang": "en"})
    assert mail.intent_hash == mail_id(rig, ada, 2)


def test_mail_of_one_world_arrives_in_send_order(rig: WorkerRig) -> None:
    bob = rig.buyer("bob")
    rig.buyer("ada", *[Wrote("bob", str(n)) for n in range(50)])
    assert bob.state().woken == [str(n) for n in range(50)]


@pytest.mark.parametrize("fault", FAULTS)
def test_mail_arrives_once_despite_a_fault_in_the_senders_commit(
    rig: WorkerRig, fault: str
) -> None:
    ada, bob = rig.buyer("ada", Woken()), rig.buyer("bob")
    ada.send(Wrote("bob", "hello"))
    rig.backend.arm({1: fault})
    rig.run_worlds()
    rig.backend.arm({})
    rig.advance_clock(11)
    rig.run_worlds()
    assert bob.state().woken == ["hello"]


def test_delivered_mail_is_deduplicated(rig: WorkerRig) -> None:
    carl, bob = rig.world(Careful, "carl"), rig.buyer("bob")
    schema, value = rig.app.encode_event(Woken("hello"))
    mail = FabricSendParams(dest_world=WorldName("Buyer", "bob"), schema=schema, value_cbor=value)
    before = Intent(
        universe_id="shop",
        world_id=rig.id(carl),
        intent_hash=mail_id(rig, carl),
        effect_kind=FABRIC_SEND,
        params=codec.pack(mail),
        origin_name="carl",
        policy_context_hash=b"",
        enqueued_at_ns=0,
    )
    [put] = rig.store.transact(delivery.accept_many, [(before, rig.store.now_ns())])
    carl.send(Wrote("bob", "hello"))
    rig.run_worlds()
    assert bob.state().woken == ["hello"]
    assert (carl.state().sent, carl.state().seqs) == (["already_enqueued"], [put.seq])


# -- receipts ------------------------------------------------------------------------------------


def test_mail_receipt_contains_the_destination_sequence_number(rig: WorkerRig) -> None:
    carl, bob = rig.world(Careful, "carl"), rig.buyer("bob", Woken())
    carl.send(Wrote("bob"))
    rig.run_worlds()
    assert (carl.state().sent, carl.state().seqs) == (["ok"], [2])
    assert carl.height() == 2
    assert len(bob.state().woken) == 2


def test_mail_receipt_without_a_handler_is_journaled_and_ignored(
    rig: WorkerRig,
) -> None:
    ada = rig.buyer("ada", Wrote("bob"))
    rig.run_worlds()
    entries = [(entry.type, entry.outcome) for entry in ada.journal()]
    assert entries == [("Wrote", "ok"), ("fabric.send", "ignored")]


def test_mail_has_a_receipt_only_if_the_app_declares_it() -> None:
    class Plain(hf.World):
        @hf.on(Wrote)
        def wrote(self, event: Wrote, cx: hf.Context) -> None:
            if event.to:
                cx.send(Plain, event.to, Wrote(""))

    for effects, height in (((), 1), ((hf.fabric.send,), 2)):
        rig = WorkerRig(hf.App("shop", worlds=[Plain], effects=effects))
        ada = rig.world(Plain, "ada")
        ada.send(Wrote("bob"))
        rig.run_worlds()
        assert ada.height() == height


# -- destinations --------------------------------------------------------------------------------


def test_mail_to_a_full_inbox_and_its_receipt_wait_for_space(
    rig: WorkerRig,
) -> None:
    bob, carl = full_world(rig, "bob"), rig.world(Careful, "carl")
    carl.send(Wrote("bob", "hello"))
    rig.run_worlds()
    pool = rig.pool()
    rig.run_until_idle(pool, seconds=20)
    assert carl.state().sent == []
    empty_inbox(rig, bob)
    rig.run_until_idle(pool, seconds=5)
    assert bob.state().woken == ["hello"]
    assert carl.state().sent == ["ok"]
    assert rig.effect_counts(FABRIC_SEND).delayed == rig.effect_counts(FABRIC_SEND).ready == 0


def test_waiting_mail_is_delivered_once_after_pool_crashes(rig: WorkerRig) -> None:
    bob = full_world(rig, "bob")
    rig.buyer("ada", Wrote("bob", "hello"))
    for n in range(10):
        assert rig.store.transact(queue.claim, MAIL, f"pool-{n}", 1, S, queue.RetryBudget(1, 100))
        rig.clock.advance(2 * S)
    empty_inbox(rig, bob)
    rig.run_until_idle(rig.pool(), seconds=5)
    assert bob.state().woken == ["hello"]
    assert rig.dead_letters(FABRIC_SEND) == []


def test_full_inbox_delays_no_mail_to_other_worlds(rig: WorkerRig) -> None:
    full_world(rig, "bob")
    eve = rig.buyer("eve")
    rig.buyer("ada", Wrote("bob"), Wrote("eve", "hello"))
    assert eve.state().woken == ["hello"]


def test_mail_to_a_deleted_world_goes_to_a_new_world_of_its_name(rig: WorkerRig) -> None:
    bob = rig.buyer("bob", Woken("old"))
    old_id = rig.id(bob)
    bob.delete()
    rig.buyer("ada", Wrote("bob", "hello"))
    new = rig.world(Buyer, "bob")
    rig.run_worlds()
    assert rig.id(new) != old_id
    assert new.state().woken == ["hello"]


def test_world_can_send_mail_to_itself(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Wrote("ada", "me"))
    assert ada.state().woken == ["me"]
    assert rig.store.read(inbox.depth, rig.subject(ada)) == 0


def test_forked_world_sends_mail_under_its_own_message_ids(rig: WorkerRig) -> None:
    bob, ada = rig.buyer("bob"), rig.buyer("ada", Woken())
    child = ada.fork("child", at=1)
    rig.assign(child)
    for handle in (ada, child):
        handle.send(Wrote("bob", handle.name))
    rig.run_worlds()
    assert sorted(bob.state().woken) == ["ada", "child"]


def test_mail_published_twice_is_delivered_once(rig: WorkerRig) -> None:
    ada, bob = rig.buyer("ada"), rig.buyer("bob")
    full_bob = full_world(rig, "full")
    ada.send(Wrote("full", "x"))
    rig.run_worlds()
    [payload] = rig.queued(MAIL)
    mail = codec.unpack_as(Intent, payload)
    empty_inbox(rig, full_bob)
    for _ in range(3):
        rig.store.transact(outbox.deliver_local, mail)
    rig.run_until_idle(rig.pool())
    assert full_bob.state().woken == ["x"]
    assert bob.state().woken == []
