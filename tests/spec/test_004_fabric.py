"""Document 004, section 6, protocol F, the idempotency anchor of fabric delivery, and test 4.

Where the design differs from the document, the test checks the design and its rule text names the difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast import codec
from holdfast.config import INBOX_DEPTH_MAX
from holdfast.durable import inbox
from holdfast.errors import Invalid
from holdfast.messages import (
    FABRIC_PARAMS,
    FABRIC_RECEIPT,
    FABRIC_SEND,
    RESERVED_KINDS,
    FabricSendParams,
    FabricSendReceipt,
    IngressKind,
    Intent,
    IntentReceipt,
    ReceiptStatus,
    WorldName,
)
from holdfast.world import intents
from holdfast.world.messaging import delivery
from tests.postgres import RIG_STORES
from tests.workers.universe_rig import Letter, SendRequested, Ship, UniverseRig, Write
from tests.world.rig import CRASH_AFTER, CRASH_BEFORE, FAULTS, Crash
from tests.world.test_ingress import fill_inbox

MODULES = (
    "holdfast.messages",
    "holdfast.world.messaging.delivery",
    "holdfast.world.messaging.outbox",
    "holdfast.world.intents",
    "holdfast.workers.mail.delivery",
    "holdfast.workers.mail.router",
    "holdfast.app.builtin_effects.fabric",
)


@pytest.fixture(params=RIG_STORES)
def north(request: pytest.FixtureRequest) -> Iterator[UniverseRig]:
    opened = UniverseRig("north", kind=request.param)
    yield opened
    opened.store.close()


@pytest.fixture
def south(north: UniverseRig) -> UniverseRig:
    return UniverseRig("south", north, shared_store=True)


@pytest.fixture
def east(north: UniverseRig) -> Iterator[UniverseRig]:
    opened = UniverseRig("east", north)
    yield opened
    opened.store.close()


def field_names(kind: type[Any]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind)]


# -- section 6 -----------------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "fabric.send is a reserved effect kind that no app can declare",
)
def test_fabric_send_is_a_reserved_effect_kind() -> None:
    assert FABRIC_SEND == "fabric.send"
    assert FABRIC_SEND in RESERVED_KINDS

    @hf.effect("fabric.send")
    def mine(call: hf.Call) -> None: ...

    with pytest.raises(Invalid, match="the runtime reserves this name"):
        hf.App("x", effects=[mine])


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "FabricSendParams has the fields of the document in order, and a message id (our rule)",
)
def test_fabric_send_params_has_the_specified_fields() -> None:
    assert FABRIC_PARAMS == "sys/FabricSendParams@1"
    assert field_names(FabricSendParams) == [
        "dest_universe", "dest_world", "mode", "schema", "value_cbor", "inbox", "payload_cbor",
        "headers", "correlation_id", "message_id",
    ]  # fmt: skip
    assert hf.fabric.FabricSendParams is FabricSendParams


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "mail without a universe stays in the universe of its sender",
)
def test_fabric_send_without_a_universe_stays_in_the_senders_universe(
    north: UniverseRig, south: UniverseRig
) -> None:
    here, there = north.office("bob"), south.office("bob")
    north.office("ada", Write("bob", "hi"))
    north.run_until_idle(north.pool())
    assert (here.state().read, south.inbox_depth(there)) == (["hi"], 0)


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "the destination is a world id, or a type and name, which creates the world if necessary (our rule)",
)
def test_fabric_send_accepts_a_destination_id_or_name(north: UniverseRig) -> None:
    bob = north.office("bob")
    north.office("ada", Write(id=north.id(bob), text="by id"), Write("bob", "by name"))
    north.run_worlds()
    assert bob.state().read == ["by id", "by name"]


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "each mode of fabric.send requires its own fields and refuses the fields of the other mode",
)
@pytest.mark.parametrize("mode", ["typed_event", "inbox"])
@pytest.mark.parametrize("schema", [None, "Letter"])
@pytest.mark.parametrize("inbox", [None, "parcels"])
def test_fabric_send_requires_the_fields_of_its_mode(
    north: UniverseRig, mode: str, schema: str, inbox: str
) -> None:
    body = "value_cbor" if mode == "typed_event" else "payload_cbor"
    value = north.app.encode_event(Letter("hi"))[1] if body == "value_cbor" else codec.pack(1)
    fields = {"dest_world": ["Office", "bob"], "mode": mode, "schema": schema, "inbox": inbox}
    ada = north.office("ada", SendRequested({**fields, body: value}))
    right = (schema, inbox) == (("Letter", None) if mode == "typed_event" else (None, "parcels"))
    assert ada.journal()[0].outcome == ("ok" if right else "failed")
    assert len(ada.state().sent) == right
    north.run_worlds()
    if right:
        [entry] = north.office("bob").journal()
        arrived = entry.step.ingress
        kind = IngressKind.FABRIC if mode == "typed_event" else IngressKind.INBOX
        assert (arrived.kind, arrived.type, arrived.value) == (kind, schema or inbox, value)
        assert arrived.from_universe is None, "it came from the same one"


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "mail to a named inbox reaches its handler unchanged",
)
def test_fabric_send_to_an_inbox_reaches_its_handler(north: UniverseRig) -> None:
    bob = north.office("bob")
    north.office("ada", Ship("bob", "parcels", {"weight": 3}))
    north.run_worlds()
    assert bob.journal()[0].step.ingress.kind is IngressKind.INBOX
    assert bob.state().weights == [3]


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "FabricSendReceipt has the status, the message id, the destination and the enqueued seq",
)
def test_fabric_send_receipt_has_the_specified_fields(north: UniverseRig) -> None:
    bob = north.office("bob", Letter("first"))
    ada = north.office("ada", Write("bob", "hi"), Write(id="nobody"))
    north.run_worlds()
    assert FABRIC_RECEIPT == "sys/FabricSendReceipt@1"
    assert field_names(FabricSendReceipt) == ["status", "message_id", "dest_world", "enqueued_seq"]
    stored = [
        codec.unpack_as(IntentReceipt, entry.step.ingress.value)
        for entry in ada.journal()
        if entry.step.ingress.kind is IngressKind.RECEIPT
    ]
    values = [codec.unpack_as(FabricSendReceipt, receipt.value) for receipt in stored]
    sent = ada.state().sent
    assert values == [
        FabricSendReceipt("ok", sent[0], north.id(bob), (2).to_bytes(8, "big")),
        FabricSendReceipt("error", sent[1], ""),
    ]
    assert [receipt.status for receipt in stored] == [ReceiptStatus.OK, ReceiptStatus.ERROR]


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "the message id is the intent hash, unless the sender sets one",
)
def test_fabric_message_id_defaults_to_the_intent_hash(north: UniverseRig) -> None:
    bob = north.office("bob")
    ada = north.office("ada", Write("bob", "one"), Write("bob", "two", message_id="mine"))
    north.run_worlds()
    own = codec.digest(b"message", b"mine")
    assert [receipt["id"] for receipt in ada.state().receipts] == [ada.state().sent[0], own]
    assert [cause[3] for cause in bob.state().causes] == [ada.state().sent[0], own]


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "a destination that knows the message id answers already_enqueued, even if it is paused or full",
)
def test_known_fabric_message_id_is_answered_already_enqueued(north: UniverseRig) -> None:
    bob = north.office("bob")
    ada = north.office("ada", Write("bob", "hi", message_id="m"))
    bob.pause()
    fill_inbox(north, bob, INBOX_DEPTH_MAX)
    ada.send(Write("bob", "hi", message_id="m"))
    north.run_worlds()
    assert ada.state().told == ["ok", "already_enqueued"]


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "the receipt of fabric.send is journaled ingress of the kind receipt",
)
def test_fabric_send_receipt_is_ingress_of_kind_receipt(north: UniverseRig) -> None:
    north.office("bob")
    ada = north.office("ada", Write("bob", "hi"))
    north.run_worlds()
    ingress = ada.journal()[1].step.ingress
    assert (ingress.kind, ingress.type, ingress.intent_hash) == (
        IngressKind.RECEIPT,
        FABRIC_SEND,
        ada.state().sent[0],
    )


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "a destination handles the mail of many senders in the order of its inbox",
)
def test_fabric_mail_of_many_senders_is_handled_in_inbox_order(north: UniverseRig) -> None:
    bob = north.office("bob")
    for n in range(10):
        north.office(f"sender-{n}", Write("bob", str(n)))
    north.run_worlds()
    assert [entry.step.seq for entry in bob.journal()] == list(range(1, 11))
    assert bob.state().read == [str(n) for n in range(10)]


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "mail carries the universe, the world and the journal height of its sender",
)
def test_fabric_mail_carries_universe_world_and_height_of_its_sender(
    north: UniverseRig, south: UniverseRig
) -> None:
    bob = south.office("bob")
    ada = north.office("ada", Letter(), Write("bob", "hi", universe="south"))
    north.run_until_idle(north.pool())
    south.run_worlds()
    mail = bob.journal()[0].step.ingress
    assert (mail.from_universe, mail.from_world, mail.from_height) == ("north", north.id(ada), 2)


# -- protocol F ----------------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "Protocol F: `fabric_send(dest_world, message_id)`",
    "mail within a universe is delivered and deduplicated in the commit of the sender",
)
@pytest.mark.parametrize("fault", [CRASH_BEFORE, CRASH_AFTER])
def test_fabric_mail_and_the_senders_entry_are_one_commit(north: UniverseRig, fault: str) -> None:
    ada, bob = north.office("ada", Letter()), north.office("bob")
    ada.send(Write("bob", "hi"))
    north.backend.arm({1: fault})
    with pytest.raises(Crash):
        north.world_worker.tick()
    north.backend.arm({})
    there = fault == CRASH_AFTER
    assert (ada.height() == 2, north.inbox_depth(bob) == 1) == (there, there)
    intent = ada.state().sent[0] if there else b"none yet"
    key = f"fabric:{intent.hex()}"
    assert north.store.read(inbox.is_delivered, north.subject(bob), key) == there


@pytest.mark.spec(
    "004",
    "Protocol F: `fabric_send(dest_world, message_id)`",
    "mail between universes of a store is delivered, deduplicated, acked and receipted in one commit",
)
@pytest.mark.parametrize("fault", [CRASH_BEFORE, CRASH_AFTER])
def test_fabric_delivery_and_receipt_between_universes_are_one_commit(
    north: UniverseRig, south: UniverseRig, fault: str
) -> None:
    bob = south.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="south"))
    pool = north.pool()
    [runner] = [candidate for candidate in pool.runners if FABRIC_SEND in candidate.worker]
    north.backend.arm({2: fault})
    with pytest.raises(Crash):
        runner.tick()
    there = fault == CRASH_AFTER
    assert (south.inbox_depth(bob), north.inbox_depth(ada)) == (there, there)
    counts = north.effect_counts(FABRIC_SEND)
    assert counts.claimed == (not there)


@pytest.mark.spec(
    "004",
    "Protocol F: `fabric_send(dest_world, message_id)`",
    "the receipt of fabric.send has the seq of the message in the inbox",
)
def test_fabric_send_receipt_has_the_enqueued_seq(north: UniverseRig) -> None:
    bob = north.office("bob", Letter("one"), Letter("two"))
    ada = north.office("ada", Write("bob", "three"))
    north.run_worlds()
    assert ada.state().receipts[0]["seq"] == bob.journal()[2].step.seq == 3


@pytest.mark.spec(
    "004",
    "Protocol F: `fabric_send(dest_world, message_id)`",
    "delivery between stores uses two commits, and retries after any commit fault add no second item",
)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("where", ["the destination", "the sender"])
def test_fabric_delivery_between_stores_is_idempotent_under_retries(
    north: UniverseRig, east: UniverseRig, fault: str, where: str
) -> None:
    bob = east.office("bob")
    ada = north.office("ada", *[Write("bob", str(n), universe="east") for n in range(3)])
    pool = north.pool(stores={"east": east.store})
    if where == "the sender":
        north.backend.arm({4: fault})
    else:
        east.backend.arm({1: fault})
    try:
        north.run_until_idle(pool)
    except Crash:
        pool = north.pool("next", stores={"east": east.store})
    north.backend.arm({})
    east.backend.arm({})
    north.run_until_idle(pool, seconds=20)
    east.run_worlds()
    north.run_worlds()
    assert bob.state().read == ["0", "1", "2"]
    assert len(ada.state().told) == 3
    assert set(ada.state().told) <= {"ok", "already_enqueued"}


@pytest.mark.spec(
    "004",
    "Protocol F: `fabric_send(dest_world, message_id)`",
    "a pool with a route delivers mail that a pool without the route claimed before",
)
def test_fabric_mail_claimed_by_a_pool_without_a_route_is_delivered_by_another(
    north: UniverseRig, east: UniverseRig
) -> None:
    bob = east.office("bob")
    routed = north.pool("routed", stores={"east": east.store})
    others = [north.pool(f"other-{n}") for n in range(3)]
    ada = north.office("ada", *[Write("bob", str(n), universe="east") for n in range(20)])
    for pool in (*others, routed, *others):
        north.run_until_idle(pool, seconds=1)
    ada.send(Write("bob", "20", universe="east"))
    for pool in (*others, routed):
        north.run_until_idle(pool, seconds=31)
    east.run_worlds()
    north.run_worlds()
    assert sorted(bob.state().read, key=int) == [str(n) for n in range(21)]
    assert ada.state().told == ["ok"] * 21


# -- anchors and tests ---------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "Idempotency anchors",
    "fabric delivery deduplicates by message id, by default the intent hash",
)
def test_fabric_delivery_is_deduplicated_by_message_id(north: UniverseRig) -> None:
    bob = north.office("bob")
    ada = north.office("ada", Write("bob", "hi"))
    key = f"fabric:{ada.state().sent[0].hex()}"
    assert north.store.read(inbox.is_delivered, north.subject(bob), key)


@pytest.mark.spec(
    "004",
    "Testing and Validation",
    "test 4: a repeated fabric.send adds one inbox item",
)
@pytest.mark.parametrize("universe", [None, "south", "east"])
def test_repeated_fabric_send_is_enqueued_once(
    north: UniverseRig, south: UniverseRig, east: UniverseRig, universe: str | None
) -> None:
    bob = {None: north, "south": south, "east": east}[universe].office("bob")
    ada = north.office("ada")
    schema, value = north.app.encode_event(Letter("hi"))
    mail = FabricSendParams(
        dest_universe=universe,
        dest_world=WorldName("Office", "bob"),
        schema=schema,
        value_cbor=value,
    )
    intent = Intent(
        universe_id="north",
        world_id=north.id(ada),
        intent_hash=b"i" * 32,
        effect_kind=FABRIC_SEND,
        params=codec.pack(mail),
        origin_name="ada",
        policy_context_hash=b"",
        enqueued_at_ns=0,
    )
    pool = north.pool(stores={"east": east.store})
    for _ in range(5):
        north.store.transact(intents.publish, [intent])
        north.run_until_idle(pool, seconds=1)
        for town in (south, east):
            town.run_worlds()
    assert bob.state().read == ["hi"]
    assert ada.state().told == ["ok"], "one receipt, of the first"


@pytest.mark.spec(
    "004",
    "Testing and Validation",
    "test 4: a repeated fabric.send after a delivery is answered already_enqueued",
)
def test_repeated_fabric_send_is_answered_already_enqueued(north: UniverseRig) -> None:
    bob = north.office("bob")
    schema, value = north.app.encode_event(Letter("hi"))
    mail = FabricSendParams(
        dest_world=north.id(bob), schema=schema, value_cbor=value, message_id=b"m"
    )
    statuses = []
    for n in range(5):
        intent = Intent(
            universe_id="north",
            world_id="w",
            intent_hash=bytes([n]) * 32,
            effect_kind=FABRIC_SEND,
            params=codec.pack(mail),
            origin_name="w",
            policy_context_hash=b"",
            enqueued_at_ns=0,
        )
        [receipt] = north.store.transact(delivery.accept_many, [(intent, north.store.now_ns())])
        statuses.append((receipt.status, receipt.seq))
    assert statuses == [("ok", 1), *[("already_enqueued", 1)] * 4]
    north.run_worlds()
    assert bob.state().read == ["hi"]
