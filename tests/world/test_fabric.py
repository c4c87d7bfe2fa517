"""What may be sent, checked in the reducer; and what a destination makes of it, once."""

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
from holdfast.messages import FABRIC_SEND, FabricSendParams, Intent, Kind, WorldName
from holdfast.world import catalog, fabric
from holdfast.world.context import Context, Frame
from holdfast.world.fabric import Accepted
from tests.world import bank
from tests.world.rig import Rig
from tests.world.test_ingress import fill

MODULES = ("holdfast.world.fabric", "holdfast.world.context", "holdfast.messages")

FRAME = Frame("bank", "w1", "ada", 7, 1_700_000_000_000_000_000, b"e" * 16, 1, "c-1")
SEEN = b"\x01" + codec.pack({"amount": 3})


@pytest.fixture
def cx() -> Context:
    return Context(FRAME, bank.app)


def mail(cx: Context) -> FabricSendParams:
    [intent] = cx.intents
    return fabric.read(intent)


def params(**fields: Any) -> FabricSendParams:
    usual = {"dest_world": WorldName("Audit", "main"), "schema": "Seen", "value_cbor": SEEN}
    return FabricSendParams(**{**usual, **fields})


# -- in the reducer ------------------------------------------------------------------------------


def test_an_event_is_sent_by_its_schema_and_its_bytes(cx: Context) -> None:
    cx.send(bank.Audit, "main", bank.Seen(3))
    assert mail(cx) == params(correlation_id="c-1")


def test_a_world_is_sent_to_by_its_id(cx: Context) -> None:
    cx.send_to("w2", bank.Seen(3))
    assert mail(cx) == params(dest_world="w2", correlation_id="c-1")


def test_plain_data_is_put_into_a_named_inbox(cx: Context) -> None:
    cx.post(bank.Audit, "main", "orders", {"b": 1, "a": [2]}, headers={"lang": "en"})
    sent = mail(cx)
    assert (sent.mode, sent.inbox, sent.schema, sent.value_cbor) == ("inbox", "orders", None, None)
    assert codec.unpack(sent.payload_cbor or b"") == {"a": [2], "b": 1}
    assert sent.headers == {"lang": "en"}


def test_an_effect_of_the_same_fields_is_the_same_intent(cx: Context) -> None:
    cx.send(bank.Audit, "main", bank.Seen(3), trace="t")
    other = Context(FRAME, bank.app)
    other.do(hf.fabric.send, params(headers={"trace": "t"}))
    assert [one.content() for one in cx.intents] == [one.content() for one in other.intents]


def test_an_effect_takes_its_fields_as_a_mapping_too(cx: Context) -> None:
    fields = {"dest_world": "w2", "schema": "Seen", "value_cbor": SEEN}
    cx.do(hf.fabric.send, fields)
    assert mail(cx) == params(dest_world="w2", correlation_id="c-1")


def test_an_effect_has_a_key_a_tag_and_a_priority(cx: Context) -> None:
    cx.do(hf.fabric.send.options(key="k", priority=3), params(), tag="t")
    [intent] = cx.intents
    assert (intent.key, intent.tag, intent.priority) == ("k", "t", 3)


def test_another_universe_may_have_worlds_that_are_unknown_here(cx: Context) -> None:
    class Elsewhere(hf.World):
        pass

    cx.send(Elsewhere, "main", bank.Seen(3), universe="north")
    cx.send("Elsewhere", "main", bank.Seen(3), universe="north")
    first, second = (fabric.read(intent) for intent in cx.intents)
    assert first == second
    assert (first.dest_universe, first.dest_world) == ("north", WorldName("Elsewhere", "main"))


def test_the_own_universe_by_name_is_no_other_universe(cx: Context) -> None:
    cx.send(bank.Audit, "main", bank.Seen(3), universe="bank")
    assert mail(cx).dest_universe is None


def test_headers_come_as_keywords_and_as_a_mapping(cx: Context) -> None:
    cx.send(bank.Audit, "main", bank.Seen(3), headers={"universe": "a header"}, lang="en")
    assert mail(cx).headers == {"universe": "a header", "lang": "en"}


def test_a_message_id_may_be_text_or_bytes(cx: Context) -> None:
    cx.send(bank.Audit, "main", bank.Seen(3), message_id="order-7")
    cx.send(bank.Audit, "main", bank.Seen(3), message_id=b"raw")
    text, raw = (fabric.read(intent).message_id for intent in cx.intents)
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
def test_what_cannot_be_sent_is_invalid_where_it_is_wanted(cx: Context, why: str) -> None:
    usual = {"dest_world": WorldName("Audit", "main"), "schema": "Seen", "value_cbor": SEEN}
    with pytest.raises(Invalid):
        cx.do(hf.fabric.send, {**usual, **BAD_FIELDS[why]})
    assert cx.intents == []


def test_its_receipts_are_handled_under_either_name() -> None:
    assert hf.sent is hf.fabric.send


@pytest.mark.parametrize("args", [(), (params(), params()), ("text",), (None,)])
def test_the_effect_has_one_argument(cx: Context, args: tuple[Any, ...]) -> None:
    with pytest.raises(Invalid, match="sys/FabricSendParams@1"):
        cx.do(hf.fabric.send, *args)


def test_mail_has_no_time_of_its_own(cx: Context) -> None:
    with pytest.raises(Invalid, match="timeout_s"):
        cx.do(hf.fabric.send.options(timeout_s=3), params())


def test_a_header_that_is_given_twice_is_invalid(cx: Context) -> None:
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
def test_options_of_the_wrong_type_are_invalid(cx: Context, options: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        cx.send(bank.Audit, "main", bank.Seen(3), **options)
    assert cx.intents == []


@pytest.mark.parametrize("world", [7, None, bank.Audit()])
def test_a_world_elsewhere_is_a_class_or_its_name(cx: Context, world: Any) -> None:
    with pytest.raises(Invalid, match="neither a class nor its name"):
        cx.send(world, "main", bank.Seen(3), universe="north")


def test_a_payload_that_is_no_data_is_invalid(cx: Context) -> None:
    with pytest.raises(Invalid, match="payload"):
        cx.post(bank.Audit, "main", "orders", object())


def test_a_payload_that_is_too_large_is_refused(cx: Context) -> None:
    with pytest.raises(ValueTooLarge):
        cx.post(bank.Audit, "main", "orders", b"x" * MESSAGE_BYTES_MAX)
    assert cx.intents == []


def test_an_unknown_world_of_the_own_universe_is_invalid(cx: Context) -> None:
    class Elsewhere(hf.World):
        pass

    with pytest.raises(Invalid, match="unknown"):
        cx.send(Elsewhere, "main", bank.Seen(3))


# -- at the destination --------------------------------------------------------------------------


def intent(number: int = 0, /, universe: str = "bank", **fields: Any) -> Intent:
    return Intent(
        universe,
        "w1",
        bytes([number]) * 32,
        FABRIC_SEND,
        codec.pack(params(**fields)),
        "ada",
        b"",
        0,
        from_height=7,
    )


def accept(rig: Rig, sent: Intent, issued_ns: int | None = None) -> Accepted:
    issued_ns = rig.store.now_ns() if issued_ns is None else issued_ns
    [found] = rig.store.transact(fabric.accept_many, [(sent, issued_ns)])
    assert isinstance(found, Accepted)
    return found


def test_a_message_is_accepted_with_its_place_in_the_inbox(rig: Rig) -> None:
    main = rig.world(bank.Audit, "main")
    main.send(bank.Seen(1))
    assert accept(rig, intent()) == Accepted("ok", rig.id(main), 2)


def test_what_is_accepted_says_where_it_came_from(rig: Rig) -> None:
    main = rig.world(bank.Audit, "main")
    accept(rig, intent(3, headers={"lang": "en"}, correlation_id="c", message_id=b"m"))
    rig.run()
    seen = main.journal()[0].step.ingress
    assert (seen.kind, seen.type, seen.value) == (Kind.FABRIC, "Seen", SEEN)
    assert (seen.from_universe, seen.from_world, seen.from_height) == (None, "w1", 7)
    assert (seen.intent_hash, seen.message_id) == (b"\x03" * 32, b"m")
    assert (seen.headers, seen.correlation_id) == ({"lang": "en"}, "c")


def test_mail_of_another_universe_says_which(rig: Rig) -> None:
    main = rig.world(bank.Audit, "main")
    accept(rig, intent(universe="north", dest_universe="bank"))
    rig.run()
    assert main.journal()[0].step.ingress.from_universe == "north"


def test_a_repeat_is_answered_with_the_first_place_though_it_is_consumed(rig: Rig) -> None:
    main = rig.world(bank.Audit, "main")
    first = accept(rig, intent())
    rig.run()
    assert accept(rig, intent()) == Accepted("already_enqueued", rig.id(main), first.seq)
    assert rig.depth(main) == 0


def test_a_repeat_to_a_full_inbox_is_known_all_the_same(rig: Rig) -> None:
    main = rig.world(bank.Audit, "main")
    first = accept(rig, intent())
    fill(rig, main, INBOX_DEPTH_MAX)
    assert accept(rig, intent()) == Accepted("already_enqueued", rig.id(main), first.seq)
    assert accept(rig, intent(1)).status == "full"


def test_an_id_of_the_senders_stands_for_one_message_whichever_intent_brings_it(rig: Rig) -> None:
    main = rig.world(bank.Audit, "main")
    assert accept(rig, intent(1, message_id=b"m")).status == "ok"
    assert accept(rig, intent(2, message_id=b"m")).status == "already_enqueued"
    assert rig.depth(main) == 1


def test_headers_are_no_part_of_what_an_id_stands_for(rig: Rig) -> None:
    rig.world(bank.Audit, "main")
    accept(rig, intent(1, message_id=b"m", headers={"try": "1"}, correlation_id="a"))
    again = intent(2, message_id=b"m", headers={"try": "2"}, correlation_id="b")
    assert accept(rig, again).status == "already_enqueued"


@pytest.mark.parametrize(
    "other",
    [
        {"value_cbor": b"\x01" + codec.pack({"amount": 4})},
        {"schema": "Deposited"},
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
def test_an_id_that_stood_for_something_else_is_a_conflict(rig: Rig, other: dict[str, Any]) -> None:
    main = rig.world(bank.Audit, "main")
    accept(rig, intent(1, message_id=b"m"))
    found = accept(rig, intent(2, **{"message_id": b"m", **other}))
    assert (found.status, found.code) == ("error", "key_conflict")
    assert rig.depth(main) == 1


def test_ids_of_different_destinations_have_nothing_to_do_with_each_other(rig: Rig) -> None:
    for number, name in enumerate(("one", "two")):
        sent = intent(number, message_id=b"m", dest_world=WorldName("Audit", name))
        assert accept(rig, sent).status == "ok"


def test_a_world_that_is_not_there_is_made_for_its_name(rig: Rig) -> None:
    found = accept(rig, intent())
    assert rig.store.read(catalog.find, "bank", "Audit", "main") == found.dest_world
    assert (found.status, found.seq) == ("ok", 1)


def test_a_world_that_a_message_made_and_that_is_gone_is_not_made_again_by_it(rig: Rig) -> None:
    first = accept(rig, intent())
    rig.store.transact(catalog.change, "bank", first.dest_world, catalog.Event.DELETE)
    assert accept(rig, intent()) == Accepted("already_enqueued", first.dest_world)
    assert rig.store.read(catalog.find, "bank", "Audit", "main") is None


def test_a_recreated_name_is_another_destination(rig: Rig) -> None:
    main = rig.world(bank.Audit, "main")
    was = accept(rig, intent())
    main.delete()
    found = accept(rig, intent(1))
    assert found.status == "ok"
    assert found.dest_world != was.dest_world
    assert accept(rig, intent()).status == "ok", "it was never delivered to this one"


def test_an_id_that_leads_nowhere_is_not_found(rig: Rig) -> None:
    found = accept(rig, intent(dest_world="nobody"))
    assert (found.status, found.code) == ("error", "not_found")


def test_an_id_of_a_deleted_world_is_not_found(rig: Rig) -> None:
    main = rig.world(bank.Audit, "main")
    world_id = rig.id(main)
    main.delete()
    found = accept(rig, intent(dest_world=world_id))
    assert (found.status, found.code) == ("error", "not_found")
    assert "deleted" in found.error


def test_a_paused_world_takes_mail(rig: Rig) -> None:
    main = rig.world(bank.Audit, "main")
    main.pause()
    assert accept(rig, intent()).status == "ok"


def test_mail_that_is_too_old_to_be_told_from_a_repeat_is_refused_and_changes_nothing(
    rig: Rig,
) -> None:
    issued_ns = rig.store.now_ns()
    rig.clock.advance(DEDUPE_RETENTION_NS + S)
    rig.store.transact(dedupe.collect, inbox.SCOPE, DEDUPE_RETENTION_NS, 10)
    found = accept(rig, intent(), issued_ns)
    assert (found.status, found.code) == ("error", "key_expired")
    assert rig.store.read(catalog.find, "bank", "Audit", "main") is None


def test_a_message_that_cannot_be_read_spoils_no_other_of_its_batch(rig: Rig) -> None:
    main = rig.world(bank.Audit, "main")
    broken = msgspec.structs.replace(intent(1), params=b"\xc1")
    now_ns = rig.store.now_ns()
    mails = [(one, now_ns) for one in (intent(0), broken, intent(2))]
    found = rig.store.transact(fabric.accept_many, mails)
    assert [one.status for one in found] == ["ok", "error", "ok"]
    assert rig.depth(main) == 2


def test_a_universe_is_known_by_its_worlds(rig: Rig) -> None:
    rig.world(bank.Audit, "main")
    assert rig.store.read(fabric.known, "bank")
    assert not rig.store.read(fabric.known, "north")
