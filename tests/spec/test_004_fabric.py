"""Document 004, section 6, protocol F, the anchor of fabric delivery, and its deterministic test 4.

Where the design settles a rule differently, the test guards what we built and its rule says so.
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
    RESERVED,
    FabricSendParams,
    FabricSendReceipt,
    Intent,
    Kind,
    Receipt,
    Status,
    WorldName,
)
from holdfast.world import fabric, publish
from tests.postgres import RIGS
from tests.roles.towns import Letter, Ship, Town, Want, Write
from tests.world.rig import CRASH_AFTER, CRASH_BEFORE, FAULTS, Crash
from tests.world.test_ingress import fill

MODULES = (
    "holdfast.messages",
    "holdfast.world.fabric",
    "holdfast.world.outbox",
    "holdfast.world.publish",
    "holdfast.roles.fabric",
    "holdfast.roles.sorting",
    "holdfast.app.shipped.fabric",
)


@pytest.fixture(params=RIGS)
def north(request: pytest.FixtureRequest) -> Iterator[Town]:
    made = Town("north", kind=request.param)
    yield made
    made.store.close()


@pytest.fixture
def south(north: Town) -> Town:
    return Town("south", north, together=True)


@pytest.fixture
def east(north: Town) -> Iterator[Town]:
    made = Town("east", north)
    yield made
    made.store.close()


def names(kind: type[Any]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind)]


# -- section 6 -----------------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "fabric.send is wanted by worlds and done by the runtime: nobody declares an effect of that kind",
)
def test_the_kind_is_the_runtimes() -> None:
    assert FABRIC_SEND == "fabric.send"
    assert FABRIC_SEND in RESERVED

    @hf.effect("fabric.send")
    def mine(call: hf.Call) -> None: ...

    with pytest.raises(Invalid, match="the runtime's"):
        hf.App("x", effects=[mine])


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "sys/FabricSendParams@1 has these fields in this order; ours has an id for the message besides",
)
def test_the_parameters() -> None:
    assert FABRIC_PARAMS == "sys/FabricSendParams@1"
    assert names(FabricSendParams) == [
        "dest_universe", "dest_world", "mode", "schema", "value_cbor", "inbox", "payload_cbor",
        "headers", "correlation_id", "message_id",
    ]  # fmt: skip
    assert hf.fabric.FabricSendParams is FabricSendParams


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "without a universe the destination is in the sender's",
)
def test_the_universe_is_the_senders_by_default(north: Town, south: Town) -> None:
    here, there = north.office("bob"), south.office("bob")
    north.office("ada", Write("bob", "hi"))
    north.work(north.pool())
    assert (here.state().read, south.depth(there)) == (["hi"], 0)


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "the destination is a world's id; with us also its type and name, and then it is made if need be",
)
def test_a_destination_by_id_and_by_name(north: Town) -> None:
    bob = north.office("bob")
    north.office("ada", Write(id=north.id(bob), text="by id"), Write("bob", "by name"))
    north.think()
    assert bob.state().read == ["by id", "by name"]


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "a typed event needs a schema, mail to an inbox needs its name, and neither has the other's fields",
)
@pytest.mark.parametrize("mode", ["typed_event", "inbox"])
@pytest.mark.parametrize("schema", [None, "Letter"])
@pytest.mark.parametrize("inbox", [None, "parcels"])
def test_each_mode_has_its_fields(north: Town, mode: str, schema: str, inbox: str) -> None:
    body = "value_cbor" if mode == "typed_event" else "payload_cbor"
    value = north.app.encode_event(Letter("hi"))[1] if body == "value_cbor" else codec.pack(1)
    fields = {"dest_world": ["Office", "bob"], "mode": mode, "schema": schema, "inbox": inbox}
    ada = north.office("ada", Want({**fields, body: value}))
    right = (schema, inbox) == (("Letter", None) if mode == "typed_event" else (None, "parcels"))
    assert ada.journal()[0].outcome == ("ok" if right else "failed")
    assert len(ada.state().sent) == right
    north.think()
    if right:
        [entry] = north.office("bob").journal()
        arrived = entry.step.ingress
        kind = Kind.FABRIC if mode == "typed_event" else Kind.INBOX
        assert (arrived.kind, arrived.type, arrived.value) == (kind, schema or inbox, value)
        assert arrived.from_universe is None, "it came from the same one"


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "mail to an inbox arrives at its handler as it was sent",
)
def test_the_inbox_mode(north: Town) -> None:
    bob = north.office("bob")
    north.office("ada", Ship("bob", "parcels", {"weight": 3}))
    north.think()
    assert bob.journal()[0].step.ingress.kind is Kind.INBOX
    assert bob.state().weights == [3]


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "sys/FabricSendReceipt@1: ok, already_enqueued or error; the message's id; the world; the place",
)
def test_the_receipt(north: Town) -> None:
    bob = north.office("bob", Letter("first"))
    ada = north.office("ada", Write("bob", "hi"), Write(id="nobody"))
    north.think()
    assert FABRIC_RECEIPT == "sys/FabricSendReceipt@1"
    assert names(FabricSendReceipt) == ["status", "message_id", "dest_world", "enqueued_seq"]
    stored = [
        codec.unpack_as(Receipt, entry.step.ingress.value)
        for entry in ada.journal()
        if entry.step.ingress.kind is Kind.RECEIPT
    ]
    values = [codec.unpack_as(FabricSendReceipt, one.value) for one in stored]
    sent = ada.state().sent
    assert values == [
        FabricSendReceipt("ok", sent[0], north.id(bob), (2).to_bytes(8, "big")),
        FabricSendReceipt("error", sent[1], ""),
    ]
    assert [one.status for one in stored] == [Status.OK, Status.ERROR]


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "the id of a message is the intent's hash, unless the sender says otherwise",
)
def test_the_id_of_a_message(north: Town) -> None:
    bob = north.office("bob")
    ada = north.office("ada", Write("bob", "one"), Write("bob", "two", message_id="mine"))
    north.think()
    own = codec.digest(b"message", b"mine")
    assert [told["id"] for told in ada.state().receipts] == [ada.state().sent[0], own]
    assert [cause[3] for cause in bob.state().causes] == [ada.state().sent[0], own]


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "a destination that has the id answers already_enqueued, whatever else holds it up",
)
def test_an_id_that_is_there_is_answered_first(north: Town) -> None:
    bob = north.office("bob")
    ada = north.office("ada", Write("bob", "hi", message_id="m"))
    bob.pause()
    fill(north, bob, INBOX_DEPTH_MAX)
    ada.send(Write("bob", "hi", message_id="m"))
    north.think()
    assert ada.state().told == ["ok", "already_enqueued"]


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "the receipt comes back as every receipt does, through the sender's inbox and journal",
)
def test_the_receipt_is_ingress(north: Town) -> None:
    north.office("bob")
    ada = north.office("ada", Write("bob", "hi"))
    north.think()
    told = ada.journal()[1].step.ingress
    assert (told.kind, told.type, told.intent_hash) == (
        Kind.RECEIPT,
        FABRIC_SEND,
        ada.state().sent[0],
    )


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "a destination has one order, that of its inbox",
)
def test_mail_of_many_senders_is_handled_in_the_order_of_the_inbox(north: Town) -> None:
    bob = north.office("bob")
    for n in range(10):
        north.office(f"sender-{n}", Write("bob", str(n)))
    north.think()
    assert [entry.step.seq for entry in bob.journal()] == list(range(1, 11))
    assert bob.state().read == [str(n) for n in range(10)]


@pytest.mark.spec(
    "004",
    "6) Fabric cross-world messaging (`fabric.send`)",
    "mail carries the world and the height it came from, for reducers that care; and the universe",
)
def test_mail_carries_its_cause(north: Town, south: Town) -> None:
    bob = south.office("bob")
    ada = north.office("ada", Letter(), Write("bob", "hi", universe="south"))
    north.work(north.pool())
    south.think()
    mail = bob.journal()[0].step.ingress
    assert (mail.from_universe, mail.from_world, mail.from_height) == ("north", north.id(ada), 2)


# -- protocol F ----------------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "Protocol F: `fabric_send(dest_world, message_id)`",
    "inbox item and remembered id are one commit: that of the sender within a universe",
)
@pytest.mark.parametrize("fault", [CRASH_BEFORE, CRASH_AFTER])
def test_mail_is_there_exactly_when_its_entry_is(north: Town, fault: str) -> None:
    ada, bob = north.office("ada", Letter()), north.office("bob")
    ada.send(Write("bob", "hi"))
    north.backend.arm({1: fault})
    with pytest.raises(Crash):
        north.host.tick()
    north.backend.arm({})
    there = fault == CRASH_AFTER
    assert (ada.height() == 2, north.depth(bob) == 1) == (there, there)
    intent = ada.state().sent[0] if there else b"none yet"
    key = f"fabric:{intent.hex()}"
    assert north.store.read(inbox.delivered, north.subject(bob), key) == there


@pytest.mark.spec(
    "004",
    "Protocol F: `fabric_send(dest_world, message_id)`",
    "between universes of a store, inbox item, remembered id, receipt and end of the send are one commit",
)
@pytest.mark.parametrize("fault", [CRASH_BEFORE, CRASH_AFTER])
def test_between_universes_delivery_and_receipt_are_one_commit(
    north: Town, south: Town, fault: str
) -> None:
    bob = south.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="south"))
    pool = north.pool()
    [runner] = [one for one in pool.runners if FABRIC_SEND in one.worker]
    north.backend.arm({2: fault})
    with pytest.raises(Crash):
        runner.tick()
    there = fault == CRASH_AFTER
    assert (south.depth(bob), north.depth(ada)) == (there, there)
    left = north.counts(FABRIC_SEND)
    assert left.claimed == (not there)


@pytest.mark.spec(
    "004",
    "Protocol F: `fabric_send(dest_world, message_id)`",
    "the receipt has the number under which the message was enqueued",
)
def test_the_receipt_has_the_place(north: Town) -> None:
    bob = north.office("bob", Letter("one"), Letter("two"))
    ada = north.office("ada", Write("bob", "three"))
    north.think()
    assert ada.state().receipts[0]["seq"] == bob.journal()[2].step.seq == 3


@pytest.mark.spec(
    "004",
    "Protocol F: `fabric_send(dest_world, message_id)`",
    "between stores there are two commits; whatever fails at either, a message is in the inbox once",
)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("where", ["the destination", "the sender"])
def test_delivery_is_idempotent_under_retries(
    north: Town, east: Town, fault: str, where: str
) -> None:
    bob = east.office("bob")
    ada = north.office("ada", *[Write("bob", str(n), universe="east") for n in range(3)])
    pool = north.pool(stores={"east": east.store})
    if where == "the sender":
        north.backend.arm({4: fault})
    else:
        east.backend.arm({1: fault})
    try:
        north.work(pool)
    except Crash:
        pool = north.pool("next", stores={"east": east.store})
    north.backend.arm({})
    east.backend.arm({})
    north.work(pool, seconds=20)
    east.think()
    north.think()
    assert bob.state().read == ["0", "1", "2"]
    assert len(ada.state().told) == 3
    assert set(ada.state().told) <= {"ok", "already_enqueued"}


@pytest.mark.spec(
    "004",
    "Protocol F: `fabric_send(dest_world, message_id)`",
    "pools are interchangeable: mail that one without a route takes up is brought by one that has it",
)
def test_whichever_pool_takes_mail_up_it_arrives(north: Town, east: Town) -> None:
    bob = east.office("bob")
    routed = north.pool("routed", stores={"east": east.store})
    others = [north.pool(f"other-{n}") for n in range(3)]
    ada = north.office("ada", *[Write("bob", str(n), universe="east") for n in range(20)])
    for pool in (*others, routed, *others):
        north.work(pool, seconds=1)
    ada.send(Write("bob", "20", universe="east"))
    for pool in (*others, routed):
        north.work(pool, seconds=31)
    east.think()
    north.think()
    assert sorted(bob.state().read, key=int) == [str(n) for n in range(21)]
    assert ada.state().told == ["ok"] * 21


# -- anchors and tests ---------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "Idempotency anchors",
    "fabric delivery is known by the message's id, and by default that is the intent's hash",
)
def test_the_anchor_is_the_message_id(north: Town) -> None:
    bob = north.office("bob")
    ada = north.office("ada", Write("bob", "hi"))
    key = f"fabric:{ada.state().sent[0].hex()}"
    assert north.store.read(inbox.delivered, north.subject(bob), key)


@pytest.mark.spec(
    "004",
    "Testing and Validation",
    "test 4: fabric.send repeated over and over is in the inbox of its destination once",
)
@pytest.mark.parametrize("universe", [None, "south", "east"])
def test_a_repeated_send_arrives_once(
    north: Town, south: Town, east: Town, universe: str | None
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
    intent = Intent("north", north.id(ada), b"i" * 32, FABRIC_SEND, codec.pack(mail), "ada", b"", 0)
    pool = north.pool(stores={"east": east.store})
    for _ in range(5):
        north.store.transact(publish.publish, [intent])
        north.work(pool, seconds=1)
        for town in (south, east):
            town.think()
    assert bob.state().read == ["hi"]
    assert ada.state().told == ["ok"], "one receipt, of the first"


@pytest.mark.spec(
    "004",
    "Testing and Validation",
    "test 4: every retry but the first that got through is answered already_enqueued",
)
def test_repeats_are_answered_as_such(north: Town) -> None:
    bob = north.office("bob")
    schema, value = north.app.encode_event(Letter("hi"))
    mail = FabricSendParams(
        dest_world=north.id(bob), schema=schema, value_cbor=value, message_id=b"m"
    )
    found = []
    for n in range(5):
        intent = Intent("north", "w", bytes([n]) * 32, FABRIC_SEND, codec.pack(mail), "w", b"", 0)
        [one] = north.store.transact(fabric.accept_many, [(intent, north.store.now_ns())])
        found.append((one.status, one.seq))
    assert found == [("ok", 1), *[("already_enqueued", 1)] * 4]
    north.think()
    assert bob.state().read == ["hi"]
