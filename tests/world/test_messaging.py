"""Mail between worlds: validation in the reducer, and exactly-once delivery at the destination."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast import codec
from holdfast.clock import S
from holdfast.config import (
    DEDUPE_RETENTION_NS,
    HEADERS_BYTES_MAX,
    INBOX_DEPTH_MAX,
    MESSAGE_BYTES_MAX,
    MESSAGE_ID_BYTES_MAX,
)
from holdfast.durable import dedupe, inbox
from holdfast.errors import Invalid, ValueTooLarge
from holdfast.messages import FABRIC_SEND, FabricSendParams, IngressKind, Intent, WorldName
from holdfast.world import catalog
from holdfast.world.context import Context, ReducerInputs
from holdfast.world.messaging import delivery
from holdfast.world.messaging.delivery import DeliveryResult
from tests.world import bank
from tests.world.rig import WorldRig
from tests.world.test_ingress import fill_inbox

MODULES = ("holdfast.world.messaging.delivery", "holdfast.world.context", "holdfast.messages")

INPUTS = ReducerInputs(
    "bank",
    "w1",
    "ada",
    7,
    wall_ns=1_700_000_000_000_000_000,
    entropy=b"e" * 16,
    generation=1,
    correlation_id="c-1",
)
SEEN = b"\x01" + codec.pack({"amount": 3})


@pytest.fixture
def cx() -> Context:
    return Context(INPUTS, bank.app)


def sent_params(cx: Context) -> FabricSendParams:
    [intent] = cx.intents
    return delivery.mail_of(intent)


def params(**fields: Any) -> FabricSendParams:
    usual = {"dest_world": WorldName("Audit", "main"), "schema": "Seen", "value_cbor": SEEN}
    return FabricSendParams(**{**usual, **fields})


# -- in the reducer ------------------------------------------------------------------------------


def test_send_encodes_the_event_as_schema_and_bytes(cx: Context) -> None:
    cx.send(bank.Audit, "main", bank.Seen(3))
    assert sent_params(cx) == params(correlation_id="c-1")


def test_send_to_addresses_a_world_by_id(cx: Context) -> None:
    cx.send_to("w2", bank.Seen(3))
    assert sent_params(cx) == params(dest_world="w2", correlation_id="c-1")


def test_post_puts_plain_data_into_a_named_inbox(cx: Context) -> None:
    cx.post(bank.Audit, "main", "orders", {"b": 1, "a": [2]}, headers={"lang": "en"})
    sent = sent_params(cx)
    assert (sent.mode, sent.inbox, sent.schema, sent.value_cbor) == ("inbox", "orders", None, None)
    assert codec.unpack(sent.payload_cbor or b"") == {"a": [2], "b": 1}
    assert sent.headers == {"lang": "en"}


def test_fabric_send_effect_and_send_make_the_same_intent(cx: Context) -> None:
    cx.send(bank.Audit, "main", bank.Seen(3), trace="t")
    other = Context(INPUTS, bank.app)
    other.do(hf.fabric.send, params(headers={"trace": "t"}))
    assert [one.replay_digest() for one in cx.intents] == [
        one.replay_digest() for one in other.intents
    ]


def test_fabric_send_accepts_its_parameters_as_a_mapping(cx: Context) -> None:
    fields = {"dest_world": "w2", "schema": "Seen", "value_cbor": SEEN}
    cx.do(hf.fabric.send, fields)
    assert sent_params(cx) == params(dest_world="w2", correlation_id="c-1")


def test_fabric_send_keeps_key_tag_and_priority(cx: Context) -> None:
    cx.do(hf.fabric.send.options(key="k", priority=3), params(), tag="t")
    [intent] = cx.intents
    assert (intent.key, intent.tag, intent.priority) == ("k", "t", 3)


def test_send_to_another_universe_accepts_unknown_world_types(cx: Context) -> None:
    class Elsewhere(hf.World):
        pass

    cx.send(Elsewhere, "main", bank.Seen(3), universe="north")
    cx.send("Elsewhere", "main", bank.Seen(3), universe="north")
    first, second = (delivery.mail_of(intent) for intent in cx.intents)
    assert first == second
    assert (first.dest_universe, first.dest_world) == ("north", WorldName("Elsewhere", "main"))


def test_send_naming_the_own_universe_stays_local(cx: Context) -> None:
    cx.send(bank.Audit, "main", bank.Seen(3), universe="bank")
    assert sent_params(cx).dest_universe is None


def test_send_merges_headers_from_mapping_and_keywords(cx: Context) -> None:
    cx.send(bank.Audit, "main", bank.Seen(3), headers={"universe": "a header"}, lang="en")
    assert sent_params(cx).headers == {"universe": "a header", "lang": "en"}


def test_message_id_may_be_text_or_bytes(cx: Context) -> None:
    cx.send(bank.Audit, "main", bank.Seen(3), message_id="order-7")
    cx.send(bank.Audit, "main", bank.Seen(3), message_id=b"raw")
    text, raw = (delivery.mail_of(intent).message_id for intent in cx.intents)
    assert (text, raw) == (codec.digest(b"message", b"order-7"), b"raw")


BAD_FIELDS: dict[str, dict[str, Any]] = {
    "a mode that there is not": {"mode": "smoke"},
    "a typed event without a schema": {"schema": None},
    "a typed event without a value": {"value_cbor": None},
    "a typed event with an inbox": {"inbox": "orders"},
    "a typed event with a payload": {"payload_cbor": b"\x01"},
    "an inbox without its name": {"mode": "inbox", "schema": None, "value_cbor": None,
                                  "payload_cbor": b"\x01"},
    "an inbox without a payload": {"mode": "inbox", "schema": None, "value_cbor": None,
                                   "inbox": "orders"},
    "an inbox with a schema": {"mode": "inbox", "value_cbor": None, "inbox": "orders",
                               "payload_cbor": b"\x01"},
    "an inbox with a value": {"mode": "inbox", "schema": None, "inbox": "orders",
                              "payload_cbor": b"\x01"},
    "an empty schema": {"schema": ""},
    "an empty inbox": {"mode": "inbox", "schema": None, "value_cbor": None, "inbox": "",
                       "payload_cbor": b"\x01"},
    "a payload that is no data": {"mode": "inbox", "schema": None, "value_cbor": None,
                                  "inbox": "orders", "payload_cbor": b"\xc1"},
    "a schema that is unknown here": {"schema": "NoSuchEvent"},
    "a value that is no such event": {"value_cbor": b"\x01" + codec.pack({"amount": "x"})},
    "a value that is no event at all": {"value_cbor": b""},
    "a type that is unknown here": {"dest_world": WorldName("Nothing", "main")},
    "an empty name": {"dest_world": WorldName("Audit", "")},
    "an empty id": {"dest_world": ""},
    "an id with a NUL": {"dest_world": "a\x00b"},
    "an id that is a number": {"dest_world": 7},
    "a universe with a slash": {"dest_universe": "a/b"},
    "an empty universe": {"dest_universe": ""},
    "headers that are no text": {"headers": {"n": 1}},
    "headers that are too large": {"headers": {"h": "x" * HEADERS_BYTES_MAX}},
    "an empty message id": {"message_id": b""},
    "a message id that is too long": {"message_id": b"x" * (MESSAGE_ID_BYTES_MAX + 1)},
    "a value that is no bytes": {"value_cbor": "text"},
    "a field that there is not": {"colour": "red"},
    "an empty correlation id": {"correlation_id": ""},
}  # fmt: skip


@pytest.mark.parametrize("why", BAD_FIELDS)
def test_fabric_send_with_bad_fields_is_invalid_in_the_reducer(cx: Context, why: str) -> None:
    usual = {"dest_world": WorldName("Audit", "main"), "schema": "Seen", "value_cbor": SEEN}
    with pytest.raises(Invalid):
        cx.do(hf.fabric.send, {**usual, **BAD_FIELDS[why]})
    assert cx.intents == []


def test_sent_is_an_alias_of_fabric_send() -> None:
    assert hf.sent is hf.fabric.send


@pytest.mark.parametrize("args", [(), (params(), params()), ("text",), (None,)])
def test_fabric_send_takes_exactly_one_argument(cx: Context, args: tuple[Any, ...]) -> None:
    with pytest.raises(Invalid, match="sys/FabricSendParams@1"):
        cx.do(hf.fabric.send, *args)


def test_fabric_send_refuses_a_timeout(cx: Context) -> None:
    with pytest.raises(Invalid, match="timeout_s"):
        cx.do(hf.fabric.send.options(timeout_s=3), params())


def test_send_refuses_a_duplicate_header(cx: Context) -> None:
    with pytest.raises(Invalid, match="given twice"):
        cx.send(bank.Audit, "main", bank.Seen(3), headers={"lang": "en"}, lang="de")
    assert cx.intents == []


@pytest.mark.parametrize(
    "options",
    [
        {"headers": ["lang"]},
        {"headers": {"n": 1}},
        {"universe": 7},
        {"message_id": 7},
        {"message_id": ""},
        {"message_id": "\ud800"},
    ],
)
def test_send_options_of_the_wrong_type_are_invalid(cx: Context, options: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        cx.send(bank.Audit, "main", bank.Seen(3), **options)
    assert cx.intents == []


@pytest.mark.parametrize("world", [7, None, bank.Audit()])
def test_send_to_another_universe_needs_a_class_or_its_name(cx: Context, world: Any) -> None:
    with pytest.raises(Invalid, match="neither a class nor its name"):
        cx.send(world, "main", bank.Seen(3), universe="north")


def test_post_refuses_a_payload_that_cannot_be_encoded(cx: Context) -> None:
    with pytest.raises(Invalid, match="payload"):
        cx.post(bank.Audit, "main", "orders", object())


def test_post_refuses_a_payload_that_is_too_large(cx: Context) -> None:
    with pytest.raises(ValueTooLarge):
        cx.post(bank.Audit, "main", "orders", b"x" * MESSAGE_BYTES_MAX)
    assert cx.intents == []


def test_send_to_an_unknown_world_type_of_the_own_universe_is_invalid(cx: Context) -> None:
    class Elsewhere(hf.World):
        pass

    with pytest.raises(Invalid, match="unknown"):
        cx.send(Elsewhere, "main", bank.Seen(3))


# -- at the destination --------------------------------------------------------------------------


def mail_intent(number: int = 0, /, universe: str = "bank", **fields: Any) -> Intent:
    return Intent(
        universe_id=universe,
        world_id="w1",
        intent_hash=bytes([number]) * 32,
        effect_kind=FABRIC_SEND,
        params=codec.pack(params(**fields)),
        origin_name="ada",
        policy_context_hash=b"",
        enqueued_at_ns=0,
        from_height=7,
    )


def deliver_mail(rig: WorldRig, sent: Intent, issued_ns: int | None = None) -> DeliveryResult:
    issued_ns = rig.store.now_ns() if issued_ns is None else issued_ns
    [result] = rig.store.transact(delivery.accept_many, [(sent, issued_ns)])
    assert isinstance(result, DeliveryResult)
    return result


def test_delivery_returns_the_inbox_seq(rig: WorldRig) -> None:
    main = rig.world(bank.Audit, "main")
    main.send(bank.Seen(1))
    assert deliver_mail(rig, mail_intent()) == DeliveryResult("ok", rig.id(main), 2)


def test_delivered_message_records_its_origin(rig: WorldRig) -> None:
    main = rig.world(bank.Audit, "main")
    deliver_mail(rig, mail_intent(3, headers={"lang": "en"}, correlation_id="c", message_id=b"m"))
    rig.run()
    seen = main.journal()[0].step.ingress
    assert (seen.kind, seen.type, seen.value) == (IngressKind.FABRIC, "Seen", SEEN)
    assert (seen.from_universe, seen.from_world, seen.from_height) == (None, "w1", 7)
    assert (seen.intent_hash, seen.message_id) == (b"\x03" * 32, b"m")
    assert (seen.headers, seen.correlation_id) == ({"lang": "en"}, "c")


def test_delivery_from_another_universe_records_that_universe(rig: WorldRig) -> None:
    main = rig.world(bank.Audit, "main")
    deliver_mail(rig, mail_intent(universe="north", dest_universe="bank"))
    rig.run()
    assert main.journal()[0].step.ingress.from_universe == "north"


def test_duplicate_delivery_returns_the_first_seq_after_consumption(rig: WorldRig) -> None:
    main = rig.world(bank.Audit, "main")
    first = deliver_mail(rig, mail_intent())
    rig.run()
    assert deliver_mail(rig, mail_intent()) == DeliveryResult(
        "already_enqueued", rig.id(main), first.seq
    )
    assert rig.inbox_depth(main) == 0


def test_duplicate_delivery_to_a_full_inbox_is_recognised(rig: WorldRig) -> None:
    main = rig.world(bank.Audit, "main")
    first = deliver_mail(rig, mail_intent())
    fill_inbox(rig, main, INBOX_DEPTH_MAX)
    assert deliver_mail(rig, mail_intent()) == DeliveryResult(
        "already_enqueued", rig.id(main), first.seq
    )
    assert deliver_mail(rig, mail_intent(1)).status == "full"


def test_message_id_deduplicates_across_intents(rig: WorldRig) -> None:
    main = rig.world(bank.Audit, "main")
    assert deliver_mail(rig, mail_intent(1, message_id=b"m")).status == "ok"
    assert deliver_mail(rig, mail_intent(2, message_id=b"m")).status == "already_enqueued"
    assert rig.inbox_depth(main) == 1


def test_message_id_ignores_headers(rig: WorldRig) -> None:
    rig.world(bank.Audit, "main")
    deliver_mail(rig, mail_intent(1, message_id=b"m", headers={"try": "1"}, correlation_id="a"))
    again = mail_intent(2, message_id=b"m", headers={"try": "2"}, correlation_id="b")
    assert deliver_mail(rig, again).status == "already_enqueued"


@pytest.mark.parametrize(
    "other",
    [
        {"value_cbor": b"\x01" + codec.pack({"amount": 4})},
        {"schema": "DepositMade"},
        {
            "mode": "inbox",
            "inbox": "Seen",
            "payload_cbor": SEEN,
            "schema": None,
            "value_cbor": None,
        },
    ],
    ids=["value", "schema", "mode"],
)
def test_message_id_reused_for_another_message_is_a_conflict(
    rig: WorldRig, other: dict[str, Any]
) -> None:
    main = rig.world(bank.Audit, "main")
    deliver_mail(rig, mail_intent(1, message_id=b"m"))
    found = deliver_mail(rig, mail_intent(2, **{"message_id": b"m", **other}))
    assert (found.status, found.code) == ("error", "key_conflict")
    assert rig.inbox_depth(main) == 1


def test_message_ids_of_different_destinations_are_independent(rig: WorldRig) -> None:
    for number, name in enumerate(("one", "two")):
        sent = mail_intent(number, message_id=b"m", dest_world=WorldName("Audit", name))
        assert deliver_mail(rig, sent).status == "ok"


def test_delivery_by_name_creates_a_missing_world(rig: WorldRig) -> None:
    found = deliver_mail(rig, mail_intent())
    assert rig.store.read(catalog.find_id, "bank", "Audit", "main") == found.dest_world
    assert (found.status, found.seq) == ("ok", 1)


def test_duplicate_delivery_does_not_recreate_a_deleted_world(rig: WorldRig) -> None:
    first = deliver_mail(rig, mail_intent())
    rig.store.transact(catalog.change_status, "bank", first.dest_world, catalog.WorldEvent.DELETE)
    assert deliver_mail(rig, mail_intent()) == DeliveryResult("already_enqueued", first.dest_world)
    assert rig.store.read(catalog.find_id, "bank", "Audit", "main") is None


def test_delivery_to_a_recreated_name_reaches_the_new_world(rig: WorldRig) -> None:
    main = rig.world(bank.Audit, "main")
    was = deliver_mail(rig, mail_intent())
    main.delete()
    found = deliver_mail(rig, mail_intent(1))
    assert found.status == "ok"
    assert found.dest_world != was.dest_world
    assert deliver_mail(rig, mail_intent()).status == "ok", "it was never delivered to this one"


def test_delivery_to_an_unknown_world_id_is_not_found(rig: WorldRig) -> None:
    found = deliver_mail(rig, mail_intent(dest_world="nobody"))
    assert (found.status, found.code) == ("error", "not_found")


def test_delivery_to_a_deleted_world_id_is_not_found(rig: WorldRig) -> None:
    main = rig.world(bank.Audit, "main")
    world_id = rig.id(main)
    main.delete()
    found = deliver_mail(rig, mail_intent(dest_world=world_id))
    assert (found.status, found.code) == ("error", "not_found")
    assert "deleted" in found.error


def test_delivery_to_a_paused_world_is_accepted(rig: WorldRig) -> None:
    main = rig.world(bank.Audit, "main")
    main.pause()
    assert deliver_mail(rig, mail_intent()).status == "ok"


def test_delivery_older_than_dedupe_retention_is_refused(
    rig: WorldRig,
) -> None:
    issued_ns = rig.store.now_ns()
    rig.clock.advance(DEDUPE_RETENTION_NS + S)
    rig.store.transact(dedupe.expire, inbox.DEDUPE_SCOPE, DEDUPE_RETENTION_NS, 10)
    found = deliver_mail(rig, mail_intent(), issued_ns)
    assert (found.status, found.code) == ("error", "key_expired")
    assert rig.store.read(catalog.find_id, "bank", "Audit", "main") is None


def test_undecodable_message_does_not_fail_its_delivery_batch(rig: WorldRig) -> None:
    main = rig.world(bank.Audit, "main")
    broken = msgspec.structs.replace(mail_intent(1), params=b"\xc1")
    now_ns = rig.store.now_ns()
    mails = [(one, now_ns) for one in (mail_intent(0), broken, mail_intent(2))]
    found = rig.store.transact(delivery.accept_many, mails)
    assert [one.status for one in found] == ["ok", "error", "ok"]
    assert rig.inbox_depth(main) == 2


def test_universe_exists_when_it_has_worlds(rig: WorldRig) -> None:
    rig.world(bank.Audit, "main")
    assert rig.store.read(delivery.universe_exists, "bank")
    assert not rig.store.read(delivery.universe_exists, "north")
