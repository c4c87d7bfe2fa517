"""Mail delivery within a universe, between universes, and between stores: once, with one receipt."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

import holdfast as hf
from holdfast import store as stores
from holdfast.clock import MS, S
from holdfast.config import DEDUPE_RETENTION_NS, INBOX_DEPTH_MAX, ROUTE_LOOKUPS_MAX, ROUTE_TTL_NS
from holdfast.durable import dedupe, inbox, queue
from holdfast.errors import (
    CommitUnknown,
    Invalid,
    NotFound,
    StoreBusy,
    StoreClosed,
    StoreReplaced,
    WriterLost,
)
from holdfast.messages import FABRIC_SEND
from holdfast.ops import pending_work
from holdfast.runner import Runner
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend
from holdfast.workers.effects import receipts
from holdfast.workers.effects.pool import EffectWorkerPool
from holdfast.workers.mail.delivery import BATCH, MailDelivery
from holdfast.workers.mail.peers import PeerStores
from holdfast.workers.runner_service import RunnerService
from holdfast.world import catalog, intents
from holdfast.world.messaging import outbox
from tests.deep_variants import deep_after
from tests.process.watch import until
from tests.workers.universe_rig import (
    Cancel,
    Letter,
    Office,
    Parcel,
    PeerStoreProxy,
    Quiet,
    SendRequested,
    Ship,
    UniverseRig,
    Write,
    app_of,
)
from tests.world.rig import CRASH_AFTER, CRASH_BEFORE, FAULTS, UNKNOWN_AFTER, Crash
from tests.world.test_ingress import fill_inbox

MODULES = (
    "holdfast.world.messaging.delivery",
    "holdfast.world.messaging.outbox",
    "holdfast.workers.mail.delivery",
    "holdfast.workers.mail.router",
)

WAIT_S = 20.0


@pytest.fixture
def north() -> UniverseRig:
    return UniverseRig("north")


@pytest.fixture
def south(north: UniverseRig) -> UniverseRig:
    """Another universe in the same store."""
    return UniverseRig("south", north, shared_store=True)


@pytest.fixture
def east(north: UniverseRig) -> UniverseRig:
    """Another universe in a separate store."""
    return UniverseRig("east", north)


def run_delivery(rigs: list[UniverseRig], pool: EffectWorkerPool, seconds: float = 0) -> None:
    """Run a pool of the first universe, and then the worlds of all universes."""
    rigs[0].run_until_idle(pool, seconds)
    for rig in rigs:
        rig.run_worlds()


# -- within a universe ---------------------------------------------------------------------------


def test_posted_data_arrives_at_the_inbox_handler(north: UniverseRig) -> None:
    bob = north.office("bob")
    north.office("ada", Ship("bob", "parcels", {"weight": 7}))
    north.run_worlds()
    assert bob.state().weights == [7]


def test_untyped_inbox_accepts_any_payload(north: UniverseRig) -> None:
    bob = north.office("bob")
    north.office("ada", Ship("bob", "anything", [1, {"a": None}]))
    north.run_worlds()
    assert bob.state().read == ["[1, {'a': None}]"]


def test_payload_of_the_wrong_inbox_type_fails_only_its_event(north: UniverseRig) -> None:
    bob = north.office("bob")
    north.office("ada", Ship("bob", "parcels", "heavy"), Ship("bob", "parcels", {"weight": 7}))
    north.run_worlds()
    assert bob.state().weights == [7]
    assert [entry.outcome for entry in bob.journal()] == ["failed", "ok"]
    assert "parcels" in bob.journal()[0].error


def test_declared_inbox_without_a_handler_is_journaled_and_ignored(
    north: UniverseRig,
) -> None:
    bob = north.office("bob")
    north.office("ada", Ship("bob", "cellar", 1))
    north.run_worlds()
    assert [(entry.type, entry.outcome) for entry in bob.journal()] == [("cellar", "ignored")]


def test_post_to_an_undeclared_inbox_fails_in_the_sender(north: UniverseRig) -> None:
    bob = north.office("bob")
    ada = north.office("ada", Ship("bob", "attic", 1))
    north.run_worlds()
    assert bob.journal() == []
    assert [entry.outcome for entry in ada.journal()] == ["failed"]


def test_inbox_and_event_of_the_same_name_are_distinct() -> None:
    class Both(hf.World):
        seen: list[str] = []  # noqa: RUF012

        @hf.on(Letter)
        def letter(self, event: Letter, cx: hf.Context) -> None:
            self.seen.append("event")

        @hf.on(hf.inbox("Letter"))
        def inbox(self, mail: hf.Mail[Any], cx: hf.Context) -> None:
            self.seen.append("inbox")

        @hf.on(Cancel)
        def both(self, event: Cancel, cx: hf.Context) -> None:
            cx.send(Both, cx.name, Letter())
            cx.post(Both, cx.name, "Letter", None)

    rig = UniverseRig("north")
    rig.app = hf.App("north", worlds=[Both])
    rig.runtime.app = rig.app
    rig.world_worker = rig.worker(idle_s=1e6)
    both = rig.world(Both, "b")
    both.send(Cancel())
    rig.run_worlds()
    assert both.state().seen == ["event", "inbox"]


def test_two_handlers_for_one_inbox_are_invalid() -> None:
    class Twice(hf.World):
        @hf.on(hf.inbox("a"))
        def one(self, mail: hf.Mail[Any], cx: hf.Context) -> None: ...

        @hf.on(hf.inbox("a", Parcel))
        def two(self, mail: hf.Mail[Parcel], cx: hf.Context) -> None: ...

    with pytest.raises(Invalid, match="two methods handle this inbox"):
        hf.App("x", worlds=[Twice])


def test_handler_and_replay_see_the_source_of_mail(north: UniverseRig) -> None:
    bob = north.office("bob")
    ada = north.world(Office, "ada")
    ada.send(Write("bob", "hi", headers={"lang": "en"}), correlation_id="c")
    ada.send(Ship("bob", "parcels", {"weight": 1}), correlation_id="d")
    north.run_worlds()
    sent = ada.state().sent[0]
    first, second = bob.state().causes
    assert first == ["north", north.id(ada), 1, sent, {"lang": "en"}, "c"]
    assert second[:3] == ["north", north.id(ada), 2]
    assert second[4:] == [{}, "d"]
    north.assign(bob, "B")
    north.world_worker = north.worker("B", "elsewhere", idle_s=1e6)
    north.advance_clock(60)
    bob.send(Letter("after the move"))
    north.run_worlds()
    assert bob.state().causes[0] == first
    assert bob.state().causes[2] == [None, None, None, None, {}, None]


def test_send_to_answers_the_sender_by_its_world_id(north: UniverseRig) -> None:
    class Polite(hf.World):
        @hf.on(Letter)
        def letter(self, event: Letter, cx: hf.Context) -> None:
            assert cx.from_world is not None
            cx.send_to(cx.from_world, Letter(f"thanks for {event.text}"))

        @hf.on(Cancel)
        def never(self, event: Cancel, cx: hf.Context) -> None: ...

    app = hf.App("north", worlds=[Office, Polite])
    rig = UniverseRig("north")
    rig.app = rig.runtime.app = app
    rig.world_worker = rig.worker(idle_s=1e6)
    polite = rig.world(Polite, "bob")
    ada = rig.office(
        "ada", SendRequested({"dest_world": ["Polite", "bob"], **encoded_letter("tea")})
    )
    rig.run_worlds()
    assert ada.state().read == ["thanks for tea"]
    # The letter, and the receipt of the answer. The app declares receipts because Office handles them.
    assert [entry.outcome for entry in polite.journal()] == ["ok", "ignored"]


def encoded_letter(text: str) -> dict[str, Any]:
    schema, value = UniverseRig("x").app.encode_event(Letter(text))
    return {"schema": schema, "value_cbor": value}


def test_fabric_send_effect_delivers_like_cx_send(north: UniverseRig) -> None:
    bob = north.office("bob")
    want = SendRequested({"dest_world": ["Office", "bob"], **encoded_letter("hi")}, tag="t")
    ada = north.office("ada", want)
    north.run_worlds()
    assert bob.state().read == ["hi"]
    assert ada.state().told == ["ok"]
    [receipt] = ada.state().receipts
    assert (receipt["tag"], receipt["world"], receipt["seq"]) == ("t", north.id(bob), 1)


def test_same_key_for_the_same_mail_sends_it_once(north: UniverseRig) -> None:
    bob = north.office("bob")
    want = SendRequested({"dest_world": ["Office", "bob"], **encoded_letter("hi")}, key="k")
    ada = north.office("ada", want, want)
    north.run_worlds()
    assert bob.state().read == ["hi"]
    assert ada.state().told == ["ok"]


def test_same_key_for_other_mail_is_a_key_conflict(north: UniverseRig) -> None:
    bob = north.office("bob")
    fields = {"dest_world": ["Office", "bob"]}
    wants = [SendRequested({**fields, **encoded_letter(text)}, key="k") for text in ("one", "two")]
    ada = north.office("ada", *wants)
    north.run_worlds()
    assert bob.state().read == ["one"]
    assert sorted(ada.state().told) == ["error key_conflict", "ok"]


def test_repeated_message_id_arrives_once_and_is_already_enqueued(north: UniverseRig) -> None:
    bob = north.office("bob")
    ada = north.office("ada", *[Write("bob", "hi", message_id="m")] * 2)
    north.run_worlds()
    assert bob.state().read == ["hi"]
    assert ada.state().told == ["ok", "already_enqueued"]
    first, second = ada.state().receipts
    assert (first["id"], first["world"], first["seq"]) == (
        second["id"],
        second["world"],
        second["seq"],
    )


def test_same_message_id_from_two_senders_arrives_once(north: UniverseRig) -> None:
    bob = north.office("bob")
    offices = [north.office(name, Write("bob", "hi", message_id="m")) for name in ("ada", "eve")]
    north.run_worlds()
    assert bob.state().read == ["hi"]
    assert sorted(office.state().told[0] for office in offices) == ["already_enqueued", "ok"]


def test_same_message_id_with_another_body_is_a_key_conflict(
    north: UniverseRig,
) -> None:
    bob = north.office("bob")
    writes = [Write("bob", text, message_id="m") for text in ("one", "two")]
    ada = north.office("ada", *writes)
    north.run_worlds()
    assert bob.state().read == ["one"]
    assert ada.state().told == ["ok", "error key_conflict"]


@pytest.mark.parametrize("deleted", [False, True])
def test_mail_to_an_unknown_or_deleted_world_id_is_not_found(
    north: UniverseRig, deleted: bool
) -> None:
    world_id = "0" * 32
    if deleted:
        bob = north.office("bob")
        world_id = north.id(bob)
        bob.delete()
    ada = north.office("ada", Write(id=world_id))
    north.run_worlds()
    assert ada.state().told == ["error not_found"]
    assert ada.state().receipts[0]["world"] == ""


def test_mail_error_receipt_reaches_a_world_without_a_sent_handler(north: UniverseRig) -> None:
    quiet = north.world(Quiet, "q")
    quiet.send(Write(id="0" * 32))
    north.run_worlds()
    assert [entry.outcome for entry in quiet.journal()] == ["ok", "ignored"]


def test_world_can_send_mail_to_itself_by_id(north: UniverseRig) -> None:
    ada = north.world(Office, "ada")
    ada.send(Write(id=north.id(ada), text="me"))
    north.run_worlds()
    assert ada.state().read == ["me"]
    assert ada.state().told == ["ok"]


def test_fork_and_parent_are_separate_mail_destinations(north: UniverseRig) -> None:
    bob = north.office("bob", Letter("before"))
    child = bob.fork("child", at=1)
    north.assign(child)
    north.office("ada", Write("child", "hi", message_id="m"), Write("bob", "hi", message_id="m"))
    north.run_worlds()
    assert (bob.state().read, child.state().read) == (["before", "hi"], ["before", "hi"])


def test_fork_of_a_sender_does_not_resend_mail(north: UniverseRig) -> None:
    bob = north.office("bob")
    ada = north.office("ada", Write("bob", "hi"))
    child = ada.fork("child", at=1)
    north.assign(child)
    child.send(Letter())
    north.run_worlds()
    assert bob.state().read == ["hi"]


def test_recreated_world_does_not_deduplicate_earlier_message_ids(north: UniverseRig) -> None:
    bob = north.office("bob")
    ada = north.office("ada", Write("bob", "hi", message_id="m"))
    bob.delete()
    ada.send(Write("bob", "hi", message_id="m"))
    north.run_worlds()
    again = north.world(Office, "bob")
    north.run_worlds()
    assert again.state().read == ["hi"]
    assert ada.state().told == ["ok", "ok"]


def test_mail_to_a_full_inbox_is_listed_as_pending_and_delivered_later(north: UniverseRig) -> None:
    bob = north.office("bob")
    bob.pause()
    fill_inbox(north, bob, INBOX_DEPTH_MAX)
    ada = north.office("ada", Write("bob", "hi"))
    row = north.store.read(pending_work.effect, ada.state().sent[0].hex())
    assert (row.state, row.pending_effect.effect_kind) == ("ready", FABRIC_SEND)
    pool = north.pool()
    north.run_until_idle(pool, seconds=3)
    row = north.store.read(pending_work.effect, ada.state().sent[0].hex())
    assert row.state == "delayed"
    fill_inbox(north, bob, 0)
    bob.resume()
    north.run_until_idle(pool, seconds=3)
    assert bob.state().read == ["hi"]
    assert ada.state().told == ["ok"]
    assert north.store.read(intents.find_pending, "north", ada.state().sent[0]) is None


def test_waiting_mail_can_be_cancelled(north: UniverseRig) -> None:
    bob = north.office("bob")
    bob.pause()
    fill_inbox(north, bob, INBOX_DEPTH_MAX)
    ada = north.office("ada", Write("bob", "hi"))
    pool = north.pool()
    north.run_until_idle(pool, seconds=2)
    ada.send(Cancel())
    north.run_worlds()
    fill_inbox(north, bob, 0)
    bob.resume()
    north.run_until_idle(pool, seconds=5)
    assert ada.state().told == ["error cancelled"]
    assert bob.state().read == []


def test_cancel_of_delivered_mail_has_no_effect(north: UniverseRig) -> None:
    bob = north.office("bob")
    ada = north.office("ada", Write("bob", "hi"), Cancel())
    north.run_worlds()
    assert bob.state().read == ["hi"]
    assert ada.state().told == ["ok"]


# -- between universes of one store --------------------------------------------------------------


def test_mail_to_another_universe_is_delivered_only_by_a_pool(
    north: UniverseRig, south: UniverseRig
) -> None:
    bob = south.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="south"))
    assert (south.inbox_depth(bob), north.effect_counts(FABRIC_SEND).ready) == (0, 1)
    run_delivery([north, south], north.pool())
    assert bob.state().read == ["hi"]
    north.run_worlds()
    assert ada.state().told == ["ok"]


def test_mail_to_another_universe_carries_its_source(
    north: UniverseRig, south: UniverseRig
) -> None:
    bob = south.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="south"))
    run_delivery([north, south], north.pool())
    [cause] = bob.state().causes
    assert cause[:4] == ["north", north.id(ada), 1, ada.state().sent[0]]


def test_reply_to_another_universe_is_delivered(north: UniverseRig, south: UniverseRig) -> None:
    bob = south.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="south"))
    run_delivery([north, south], north.pool())
    bob.send(Write(id=north.id(ada), text="thanks", universe="north"))
    south.run_worlds()
    run_delivery([south, north], south.pool())
    assert ada.state().read == ["thanks"]
    assert bob.state().told == ["ok"]


def test_posted_data_is_delivered_to_another_universe(
    north: UniverseRig, south: UniverseRig
) -> None:
    bob = south.office("bob")
    north.office("ada", Ship("bob", "parcels", {"weight": 7}, universe="south"))
    run_delivery([north, south], north.pool())
    assert bob.state().weights == [7]


def test_mail_creates_the_named_world_in_another_universe(
    north: UniverseRig, south: UniverseRig
) -> None:
    south.office("somebody")
    north.office("ada", Write("new", "hi", universe="south"))
    run_delivery([north, south], north.pool())
    new = south.world(Office, "new")
    south.run_worlds()
    assert new.state().read == ["hi"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("commit", [1, 2])
def test_mail_arrives_and_is_answered_once_despite_a_pool_commit_fault(
    north: UniverseRig, south: UniverseRig, fault: str, commit: int
) -> None:
    bob = south.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="south"))
    pool = north.pool()
    north.backend.arm({commit: fault})
    try:
        north.run_until_idle(pool)
    except Crash:
        pool = north.pool("another")
    north.backend.arm({})
    run_delivery([north, south], pool, seconds=10)
    assert bob.state().read == ["hi"]
    north.run_worlds()
    assert ada.state().told == ["ok"]


def test_mail_ack_and_delivery_are_one_commit(north: UniverseRig, south: UniverseRig) -> None:
    for fault in (CRASH_BEFORE, CRASH_AFTER):
        bob = south.office(f"bob-{fault}")
        north.office("ada", Write(bob.name, "hi", universe="south"))
        pool = north.pool(fault)
        north.backend.arm({2: fault})
        with pytest.raises(Crash):
            north.run_until_idle(pool)
        north.backend.arm({})
        left = north.effect_counts(FABRIC_SEND)
        assert south.inbox_depth(bob) == (fault == CRASH_AFTER)
        assert left.ready + left.claimed == (fault == CRASH_BEFORE)
        north.advance_clock(10)
        north.run_until_idle(north.pool("next"))


def test_mail_waits_for_a_full_inbox_in_another_universe(
    north: UniverseRig, south: UniverseRig
) -> None:
    bob = south.office("bob")
    bob.pause()
    fill_inbox(south, bob, INBOX_DEPTH_MAX)
    ada = north.office("ada", Write("bob", "hi", universe="south"))
    pool = north.pool()
    run_delivery([north, south], pool, seconds=5)
    assert ada.state().told == []
    fill_inbox(south, bob, 0)
    bob.resume()
    run_delivery([north, south], pool, seconds=5)
    assert bob.state().read == ["hi"]


def test_mail_of_a_deleted_sender_arrives_without_a_receipt(
    north: UniverseRig, south: UniverseRig
) -> None:
    bob = south.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="south"))
    subject = north.subject(ada)
    ada.delete()
    run_delivery([north, south], north.pool())
    assert bob.state().read == ["hi"]
    assert north.store.read(inbox.depth, subject) == 0


# -- mail without route --------------------------------------------------------------------------


def routing_runner(pool: EffectWorkerPool) -> Runner:
    [runner] = [one for one in pool.runners if one.worker.endswith(FABRIC_SEND)]
    return runner


def tick_without_route(north: UniverseRig, runner: Runner, times: int) -> None:
    """Tick a routing runner that finds no route, each time after the maximum retry delay."""
    for _ in range(times):
        assert runner.tick().requeued == 1
        north.advance_clock(31)


def test_mail_to_an_unknown_universe_is_no_route_with_a_hint(
    north: UniverseRig,
) -> None:
    ada = north.office("ada", Write("bob", "hi", universe="atlantis"))
    runner = routing_runner(north.pool())
    tick_without_route(north, runner, ROUTE_LOOKUPS_MAX - 1)
    assert runner.tick().done == 1
    north.run_worlds()
    assert ada.state().told == ["error no_route"]
    assert "--peer" in ada.state().receipts[0]["error"]
    assert "atlantis" in ada.state().receipts[0]["error"]
    assert north.dead_letters(FABRIC_SEND) == []


def test_mail_routing_is_retried_for_about_an_hour(north: UniverseRig) -> None:
    north.office("ada", Write("bob", "hi", universe="atlantis"))
    runner = routing_runner(north.pool())
    since_ns = north.store.now_ns()
    while not runner.tick().done:
        due_ns = north.store.read(queue.next_due_ns, intents.effect_queue("north", FABRIC_SEND))
        assert due_ns is not None
        north.clock.advance(max(due_ns - north.store.now_ns(), MS))
    assert 50 * 60 * S < north.store.now_ns() - since_ns < 70 * 60 * S


def test_mail_without_route_is_listed_with_its_reason(north: UniverseRig) -> None:
    ada = north.office("ada", Write("bob", "hi", universe="atlantis"))
    north.run_until_idle(north.pool(), seconds=10)
    assert ada.state().told == []
    [row] = north.store.read(pending_work.intents_in_state, "north", FABRIC_SEND, "delayed")
    assert (row.intent.intent_hash, row.code) == (ada.state().sent[0], "no_route")
    assert "universe='atlantis'" in row.error


def test_mail_without_route_can_be_cancelled(north: UniverseRig) -> None:
    ada = north.office("ada", Write("bob", "hi", universe="atlantis"))
    pool = north.pool()
    north.run_until_idle(pool, seconds=10)
    ada.send(Cancel())
    north.run_until_idle(pool, seconds=60)
    assert ada.state().told == ["error cancelled"]
    assert north.effect_counts(FABRIC_SEND) == queue.QueueCounts(done=1)


def test_mail_without_route_delays_no_other_mail(north: UniverseRig, south: UniverseRig) -> None:
    bob = south.office("bob")
    lost = [Write("bob", "lost", universe="atlantis") for _ in range(5 * BATCH)]
    north.office("ada", *lost, Write("bob", "hi", universe="south"))
    run_delivery([north, south], north.pool(), seconds=1)
    assert bob.state().read == ["hi"]


def test_routing_retry_interval_grows_with_the_amount_of_unrouted_mail(
    north: UniverseRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.workers.mail.router.ROUTE_LOOKUP_PAUSE_PER_MESSAGE_NS", 10 * S)
    north.office("ada", *[Write("bob", "hi", universe="atlantis") for _ in range(5)])
    runner = routing_runner(north.pool())
    runner.tick()
    north.advance_clock(31)
    assert runner.tick().requeued == 5, "nobody waited when they were first looked at"
    north.office("eve", Write("bob", "hi", universe="atlantis"))
    runner.tick()
    rows = north.store.read(pending_work.intents_in_state, "north", FABRIC_SEND, "delayed")
    assert rows[-1].time_ns - north.store.now_ns() >= 49 * S


def test_later_pool_with_a_route_delivers_unrouted_mail(
    north: UniverseRig, east: UniverseRig
) -> None:
    bob = east.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="east"))
    tick_without_route(north, routing_runner(north.pool("old")), ROUTE_LOOKUPS_MAX - 1)
    run_delivery([north, east], north.pool("new", stores={"east": east.store}))
    assert bob.state().read == ["hi"]
    north.run_worlds()
    assert ada.state().told == ["ok"]


def test_universe_created_later_in_this_store_gets_unrouted_mail(north: UniverseRig) -> None:
    ada = north.office("ada", Write("bob", "hi", universe="south"))
    pool = north.pool()
    north.run_until_idle(pool, seconds=20)
    south = UniverseRig("south", north, shared_store=True)
    bob = south.office("bob")
    run_delivery([north, south], pool, seconds=31)
    assert bob.state().read == ["hi"]
    assert ada.state().told == ["ok"]


def test_routing_retries_count_from_the_first_pool_attempt(
    north: UniverseRig, east: UniverseRig
) -> None:
    bob = east.office("bob")
    north.office("ada", Write("bob", "hi", universe="east"))
    north.advance_clock(3 * 24 * 3600)
    north.run_until_idle(north.pool("first"), seconds=60)
    run_delivery([north, east], north.pool("second", stores={"east": east.store}), seconds=31)
    assert bob.state().read == ["hi"]


# -- announced routes ----------------------------------------------------------------------------


def test_pool_without_route_forwards_mail_to_an_announced_peer_queue(
    north: UniverseRig, east: UniverseRig
) -> None:
    bob = east.office("bob")
    routed = north.pool("routed", stores={"east": east.store})
    north.run_until_idle(routed)
    ada = north.office("ada", *[Write("bob", str(n), universe="east") for n in range(10)])
    north.run_until_idle(north.pool("other"))
    assert north.effect_counts(FABRIC_SEND) == queue.QueueCounts(done=10)
    assert north.peer_queue_counts("east") == queue.QueueCounts(ready=10)
    run_delivery([north, east], routed)
    assert bob.state().read == [str(n) for n in range(10)]
    north.run_worlds()
    assert ada.state().told == ["ok"] * 10


def test_mail_waits_in_its_peer_queue_while_the_routed_pool_is_down(
    north: UniverseRig, east: UniverseRig
) -> None:
    bob = east.office("bob")
    north.run_until_idle(north.pool("routed", stores={"east": east.store}))
    ada = north.office("ada", Write("bob", "hi", universe="east"))
    north.run_until_idle(north.pool("other"), seconds=60)
    north.advance_clock(5 * 24 * 3600)
    north.run_until_idle(north.pool("other again"), seconds=60)
    assert ada.state().told == []
    run_delivery([north, east], north.pool("back", stores={"east": east.store}))
    assert bob.state().read == ["hi"]


def test_announced_route_expires_after_its_pools_are_gone(
    north: UniverseRig, east: UniverseRig
) -> None:
    north.run_until_idle(north.pool("routed", stores={"east": east.store}))
    north.clock.advance(ROUTE_TTL_NS)
    ada = north.office("ada", Write("bob", "hi", universe="east"))
    north.run_until_idle(north.pool("other"), seconds=1)
    row = north.store.read(pending_work.effect, ada.state().sent[0].hex())
    assert row.item is not None
    assert (row.state, row.item.code) == ("delayed", "no_route")


def test_idle_pool_keeps_its_route_announced(north: UniverseRig, east: UniverseRig) -> None:
    routed = north.pool("routed", stores={"east": east.store})
    for _ in range(3):
        north.run_until_idle(routed)
        north.clock.advance(ROUTE_TTL_NS - S)
    assert north.store.read(outbox.has_route, "north", "east")


def test_route_announcement_is_not_repeated_every_tick(
    north: UniverseRig, east: UniverseRig
) -> None:
    pool = north.pool("routed", stores={"east": east.store})
    commits = north.store.engine.commit_no
    for _ in range(60):
        for runner in pool.runners:
            runner.tick()
        north.clock.advance(S)
    assert north.store.engine.commit_no == commits + 1


@pytest.mark.parametrize("fault", FAULTS)
def test_failed_route_announcement_is_retried(
    north: UniverseRig, east: UniverseRig, fault: str
) -> None:
    pool = north.pool("routed", stores={"east": east.store})
    north.backend.arm({1: fault})
    try:
        north.run_until_idle(pool)
    except Crash:
        pool = north.pool("next", stores={"east": east.store})
    north.backend.arm({})
    north.run_until_idle(pool)
    assert north.store.read(outbox.has_route, "north", "east")


def test_route_is_announced_for_one_source_universe_only(
    north: UniverseRig, south: UniverseRig, east: UniverseRig
) -> None:
    north.run_until_idle(north.pool("routed", stores={"east": east.store}))
    assert not south.store.read(outbox.has_route, "south", "east")


def test_own_universe_as_peer_is_invalid(north: UniverseRig) -> None:
    with pytest.raises(Invalid, match="it is the universe of this process"):
        north.pool(stores={"north": north.store})


def test_peer_with_a_bad_universe_name_is_invalid(north: UniverseRig) -> None:
    with pytest.raises(Invalid, match="universe"):
        north.pool(stores={"a/b": north.store})


# -- between stores ------------------------------------------------------------------------------


def test_mail_to_another_store_arrives_and_has_a_receipt(
    north: UniverseRig, east: UniverseRig
) -> None:
    bob = east.office("bob", Letter("first"))
    ada = north.office("ada", Write("bob", "hi", universe="east"))
    run_delivery([north, east], north.pool(stores={"east": east.store}))
    assert bob.state().read == ["first", "hi"]
    assert bob.state().causes[1][:3] == ["north", north.id(ada), 1]
    north.run_worlds()
    assert ada.state().told == ["ok"]
    [receipt] = ada.state().receipts
    assert (receipt["world"], receipt["seq"], receipt["id"]) == (
        east.id(bob),
        2,
        ada.state().sent[0],
    )
    assert north.peer_queue_counts("east") == queue.QueueCounts(done=1)


def test_mail_of_one_sender_arrives_in_another_store_in_send_order(
    north: UniverseRig, east: UniverseRig
) -> None:
    bob = east.office("bob")
    north.office("ada", *[Write("bob", str(n), universe="east") for n in range(250)])
    run_delivery([north, east], north.pool(stores={"east": east.store}))
    assert bob.state().read == [str(n) for n in range(250)]


def test_mail_batch_is_one_commit_in_the_peer_store(north: UniverseRig, east: UniverseRig) -> None:
    east.office("bob")
    writes = [Write("bob", str(n), universe="east") for n in range(BATCH)]
    north.office("ada", *writes)
    proxy = PeerStoreProxy(east.store)
    run_delivery([north, east], north.pool(stores={"east": proxy}))
    assert proxy.commits == 1


def test_large_mail_is_delivered_in_several_commits(north: UniverseRig, east: UniverseRig) -> None:
    bob = east.office("bob")
    big = "x" * 3_000_000
    north.office("ada", *[Write("bob", big, universe="east") for n in range(6)])
    proxy = PeerStoreProxy(east.store)
    north.run_until_idle(north.pool(stores={"east": proxy}))
    assert (east.inbox_depth(bob), proxy.commits) == (6, 3)


def test_errors_of_the_peer_store_become_receipts(north: UniverseRig, east: UniverseRig) -> None:
    gone = east.office("gone")
    world_id = east.id(gone)
    gone.delete()
    ada = north.office("ada", *[Write(id=one, universe="east") for one in (world_id, "0" * 32)])
    run_delivery([north, east], north.pool(stores={"east": east.store}))
    north.run_worlds()
    assert ada.state().told == ["error not_found"] * 2


def test_full_inbox_in_a_peer_store_delays_no_other_world(
    north: UniverseRig, east: UniverseRig
) -> None:
    bob, eve = east.office("bob"), east.office("eve")
    bob.pause()
    fill_inbox(east, bob, INBOX_DEPTH_MAX)
    ada = north.office("ada", *[Write(to, "hi", universe="east") for to in ("bob", "eve", "bob")])
    pool = north.pool(stores={"east": east.store})
    run_delivery([north, east], pool, seconds=3)
    assert eve.state().read == ["hi"]
    assert ada.state().told == ["ok"]
    fill_inbox(east, bob, 0)
    bob.resume()
    run_delivery([north, east], pool, seconds=70)
    assert bob.state().read == ["hi", "hi"]
    north.run_worlds()
    assert ada.state().told == ["ok"] * 3


# The failing commit: 1 claims, 2 forwards, 3 claims in the peer queue, 4 acks the item there.
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("commit", [1, 2, 3, 4, 5])
def test_mail_arrives_once_despite_a_fault_in_the_senders_store(
    north: UniverseRig, east: UniverseRig, fault: str, commit: int
) -> None:
    bob = east.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="east"))
    pool = north.pool(stores={"east": east.store})
    north.backend.arm({commit: fault})
    try:
        north.run_until_idle(pool)
    except Crash:
        pool = north.pool("another", stores={"east": east.store})
    north.backend.arm({})
    run_delivery([north, east], pool, seconds=20)
    assert bob.state().read == ["hi"]
    north.run_worlds()
    assert len(ada.state().told) == 1
    assert ada.state().told[0] in ("ok", "already_enqueued")


@pytest.mark.parametrize("fault", FAULTS)
def test_mail_arrives_once_despite_a_fault_in_the_peer_store(
    north: UniverseRig, east: UniverseRig, fault: str
) -> None:
    bob = east.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="east"))
    pool = north.pool(stores={"east": east.store})
    east.backend.arm({1: fault})
    try:
        north.run_until_idle(pool)
    except Crash:
        pool = north.pool("another", stores={"east": east.store})
    east.backend.arm({})
    run_delivery([north, east], pool, seconds=20)
    assert bob.state().read == ["hi"]
    north.run_worlds()
    assert ada.state().told == [
        "already_enqueued" if fault in (CRASH_AFTER, UNKNOWN_AFTER) else "ok"
    ]


def test_crash_between_the_two_commits_leaves_already_enqueued_mail(
    north: UniverseRig, east: UniverseRig
) -> None:
    bob = east.office("bob")
    ada = north.office("ada", *[Write("bob", str(n), universe="east") for n in range(5)])
    pool = north.pool(stores={"east": east.store})
    north.backend.arm({4: CRASH_BEFORE})
    with pytest.raises(Crash):
        north.run_until_idle(pool)
    assert east.inbox_depth(bob) == 5
    east.run_worlds()
    run_delivery([north, east], north.pool("next", stores={"east": east.store}), seconds=20)
    north.run_worlds()
    assert bob.state().read == [str(n) for n in range(5)]
    assert ada.state().told == ["already_enqueued"] * 5


def test_mail_cancelled_in_its_peer_queue_is_not_delivered(
    north: UniverseRig, east: UniverseRig
) -> None:
    bob = east.office("bob")
    proxy = PeerStoreProxy(east.store)
    proxy.make_unreachable()
    pool = north.pool(stores={"east": proxy})
    ada = north.office("ada", Write("bob", "hi", universe="east"))
    north.run_until_idle(pool, seconds=2)
    row = north.store.read(pending_work.effect, ada.state().sent[0].hex())
    assert row.state == "delayed"
    ada.send(Cancel())
    north.run_worlds()
    proxy.error = None
    run_delivery([north, east], pool, seconds=60)
    assert bob.state().read == []
    assert ada.state().told == ["error cancelled"]


def test_mail_cancelled_during_peer_delivery_has_one_receipt(
    north: UniverseRig, east: UniverseRig
) -> None:
    """The mail may have been delivered, as an effect may have run. The sender gets one receipt."""
    east.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="east"))

    class Slow(PeerStoreProxy):
        def transact(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
            ada.send(Cancel())
            north.run_worlds()
            return super().transact(fn, *args, **kwargs)

    run_delivery([north, east], north.pool(stores={"east": Slow(east.store)}), seconds=20)
    north.run_worlds()
    assert ada.state().told == ["error cancelled"]


def test_mail_to_a_world_deleted_in_transit_is_not_found(
    north: UniverseRig, east: UniverseRig
) -> None:
    bob = east.office("bob")
    proxy = PeerStoreProxy(east.store)
    proxy.make_unreachable()
    pool = north.pool(stores={"east": proxy})
    ada = north.office("ada", Write(id=east.id(bob), text="hi", universe="east"))
    north.run_until_idle(pool, seconds=1)
    bob.delete()
    proxy.error = None
    run_delivery([north, east], pool, seconds=60)
    north.run_worlds()
    assert ada.state().told == ["error not_found"]


def test_mail_to_a_world_forked_in_transit_goes_to_the_parent(
    north: UniverseRig, east: UniverseRig
) -> None:
    bob = east.office("bob", Letter("before"))
    proxy = PeerStoreProxy(east.store)
    proxy.make_unreachable()
    pool = north.pool(stores={"east": proxy})
    north.office("ada", Write("bob", "hi", universe="east"))
    north.run_until_idle(pool, seconds=1)
    child = bob.fork("child")
    east.assign(child)
    proxy.error = None
    run_delivery([north, east], pool, seconds=60)
    assert (bob.state().read, child.state().read) == (["before", "hi"], ["before"])


def test_mail_does_not_recreate_a_world_deleted_before_the_receipt(
    north: UniverseRig, east: UniverseRig
) -> None:
    ada = north.office("ada", Write("new", "hi", universe="east"))
    pool = north.pool(stores={"east": east.store})
    north.backend.arm({4: CRASH_BEFORE})
    with pytest.raises(Crash):
        north.run_until_idle(pool)
    made = east.runtime.world(Office, "new")
    made.delete()
    north.run_until_idle(north.pool("next", stores={"east": east.store}), seconds=20)
    north.run_worlds()
    assert ada.state().told == ["already_enqueued"]
    assert east.store.read(catalog.find_id, "east", "Office", "new") is None


def test_concurrent_pools_deliver_each_message_once(north: UniverseRig, east: UniverseRig) -> None:
    bob = east.office("bob")
    north.office("ada", *[Write("bob", str(n), universe="east") for n in range(500)])
    proxy = PeerStoreProxy(east.store)
    pools = [north.pool(name, stores={"east": proxy}) for name in ("one", "two", "three")]
    for _ in range(20):
        for pool in pools:
            for runner in pool.runners:
                runner.tick()
    east.run_worlds()
    assert sorted(bob.state().read, key=int) == [str(n) for n in range(500)]
    assert proxy.commits == 5


def test_peer_that_is_the_own_store_delivers_mail(north: UniverseRig, south: UniverseRig) -> None:
    bob = south.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="south"))
    run_delivery([north, south], north.pool(stores={"south": north.store}))
    assert bob.state().read == ["hi"]
    north.run_worlds()
    assert ada.state().told == ["ok"]


@pytest.mark.parametrize("seed", deep_after(30, range(60)))
def test_random_faults_in_both_stores_deliver_and_answer_each_message_once(
    north: UniverseRig, east: UniverseRig, south: UniverseRig, seed: int
) -> None:
    rng = random.Random(seed)
    offices = {None: north.office("bob"), "south": south.office("bob"), "east": east.office("bob")}
    ada = north.office("ada", Letter())
    places = list(offices)
    sent: dict[str | None, list[str]] = {place: [] for place in places}
    pools = [north.pool(f"pool-{n}", stores={"east": east.store}) for n in range(2)]
    for n in range(12):
        to = rng.choice(places)
        sent[to].append(str(n))
        ada.send(Write("bob", str(n), universe=to))
        for rig in (north, east):
            rig.backend.arm({rng.randint(1, 4): rng.choice(FAULTS)})
        at = rng.randrange(len(pools))
        died = False
        try:
            north.run_until_idle(pools[at], seconds=rng.choice((0, 1)))
        except Crash:
            died = True
        for rig in (north, east):
            rig.backend.arm({})
        if died:
            pools[at] = north.pool(f"pool-{n + 2}", stores={"east": east.store})
    north.advance_clock(11)
    for _ in range(3):
        run_delivery([north, south, east], pools[0], seconds=20)
    for to, office in offices.items():
        assert sorted(office.state().read, key=int) == sent[to]
    sender_state = ada.state()
    assert len(sender_state.told) == 12
    assert set(sender_state.told) <= {"ok", "already_enqueued"}
    assert {one["intent"] for one in sender_state.receipts} == set(sender_state.sent)
    left = [north.effect_counts(FABRIC_SEND), north.peer_queue_counts("east")]
    assert all(counts.ready + counts.delayed + counts.claimed == 0 for counts in left)


def test_mail_cancelled_before_its_peer_batch_is_not_delivered(
    north: UniverseRig, east: UniverseRig
) -> None:
    """All four are claimed, and a commit holds two. The last is cancelled during the first commit."""
    bob = east.office("bob")
    ada = north.office("ada", *[Write("bob", "x" * 3_000_000, universe="east") for _ in range(4)])

    class Slow(PeerStoreProxy):
        def transact(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
            if self.attempts == 0:
                ada.send(Cancel())
                north.run_worlds()
            return super().transact(fn, *args, **kwargs)

    north.run_until_idle(north.pool(stores={"east": Slow(east.store)}), seconds=20)
    assert east.inbox_depth(bob) == 3
    assert sorted(ada.state().told) == ["error cancelled", "ok", "ok", "ok"]


def test_dead_lettered_mail_has_an_error_receipt_and_can_be_redriven(
    north: UniverseRig, east: UniverseRig
) -> None:
    bob = east.office("bob")
    proxy = PeerStoreProxy(east.store)
    proxy.make_unreachable()
    pool = north.pool(stores={"east": proxy})
    ada = north.office("ada", Write("bob", "hi", universe="east"))
    north.run_until_idle(pool)
    north.advance_clock(1)
    lane = outbox.peer_queue_name("north", "east")
    [claim] = north.store.transact(queue.claim, lane, "operator", 1, S)
    north.store.transact(queue.dead_letter, claim.token, "given_up", "by hand")
    north.run_worlds()
    assert ada.state().told == ["error given_up"]
    kind = f"{FABRIC_SEND}>east"
    north.store.transact(receipts.redrive_effects, "north", kind, [claim.seq])
    proxy.error = None
    run_delivery([north, east], pool, seconds=60)
    north.run_worlds()
    assert bob.state().read == ["hi"]
    assert ada.state().told == ["error given_up", "ok"]


# -- unreachable peer stores ---------------------------------------------------------------------

STORE_ERRORS = {
    "busy": StoreBusy(),
    "its writer is lost": WriterLost(),
    "it was replaced": StoreReplaced(path="x"),
    "an error of the system": OSError(5, "no such luck"),
    "outcome unknown": CommitUnknown(),
    "an operation that it does not know": Invalid(what="operation"),
}


@pytest.mark.parametrize("trouble", STORE_ERRORS)
def test_unreachable_peer_store_loses_no_mail(
    north: UniverseRig, east: UniverseRig, trouble: str
) -> None:
    bob = east.office("bob")
    proxy = PeerStoreProxy(east.store)
    proxy.make_unreachable(STORE_ERRORS[trouble])
    pool = north.pool(stores={"east": proxy})
    ada = north.office("ada", *[Write("bob", str(n), universe="east") for n in range(20)])
    run_delivery([north, east], pool, seconds=120)
    assert ada.state().told == []
    proxy.error = None
    run_delivery([north, east], pool, seconds=120)
    north.run_worlds()
    assert sorted(bob.state().read, key=int) == [str(n) for n in range(20)]
    assert ada.state().told == ["ok"] * 20
    assert north.dead_letters(FABRIC_SEND) == []


def test_unreachable_peer_store_delays_no_mail_to_other_stores(
    north: UniverseRig, east: UniverseRig, south: UniverseRig
) -> None:
    west = UniverseRig("west", north)
    proxy = PeerStoreProxy(east.store)
    proxy.make_unreachable()
    writes = [Write("bob", "x", universe="east") for _ in range(300)]
    offices = [rig.office("bob") for rig in (south, west)]
    north.office("ada", *writes, *[Write("bob", "hi", universe=u) for u in ("south", "west")])
    pool = north.pool(stores={"east": proxy, "west": west.store})
    run_delivery([north, south, west], pool, seconds=1)
    assert [office.state().read for office in offices] == [["hi"], ["hi"]]


def test_unreachable_peer_store_is_tried_rarely(north: UniverseRig, east: UniverseRig) -> None:
    proxy = PeerStoreProxy(east.store)
    proxy.make_unreachable()
    north.office("ada", *[Write("bob", "x", universe="east") for _ in range(300)])
    pool = north.pool(stores={"east": proxy})
    north.run_until_idle(pool, seconds=120)
    assert proxy.attempts < 20
    counts = north.peer_queue_counts("east")
    assert counts.ready + counts.delayed == 300
    assert counts.ready >= 300 - BATCH - proxy.attempts, "the others were not touched"


def test_peer_runner_sleeps_while_its_store_is_unreachable(
    north: UniverseRig, east: UniverseRig
) -> None:
    proxy = PeerStoreProxy(east.store)
    proxy.make_unreachable()
    north.office("ada", *[Write("bob", "x", universe="east") for _ in range(300)])
    pool = north.pool(stores={"east": proxy})
    north.run_until_idle(pool, seconds=60)
    lane = pool.runners[-1]
    assert lane.idle_sleep_ms() > 100


def test_mail_older_than_the_dedupe_retention_is_key_expired(
    north: UniverseRig, east: UniverseRig
) -> None:
    """The dedupe record has expired, so an earlier delivery can no longer be detected."""
    bob = east.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="east"))
    proxy = PeerStoreProxy(east.store)
    proxy.make_unreachable()
    pool = north.pool(stores={"east": proxy})
    north.run_until_idle(pool, seconds=1)
    north.clock.advance(DEDUPE_RETENTION_NS + 60 * S)
    east.store.transact(dedupe.expire, inbox.DEDUPE_SCOPE, DEDUPE_RETENTION_NS, 10)
    proxy.error = None
    run_delivery([north, east], pool, seconds=60)
    north.run_worlds()
    assert ada.state().told == ["error key_expired"]
    assert bob.state().read == []


# -- opening peer stores -------------------------------------------------------------------------


class FakeStoreOpener:
    """Opens stores by URL and records the opened URLs."""

    def __init__(self, **stores: Any) -> None:
        self.stores = stores
        self.opened: list[str] = []

    def open(self, url: str) -> Any:
        self.opened.append(url)
        if url not in self.stores:
            raise NotFound(what="store", url=url)
        return self.stores[url]


def memory_store(rig: UniverseRig) -> InProcessStore:
    return InProcessStore("memory:", MemoryBackend(), rig.clock)


def test_peer_store_is_opened_once_on_first_use(north: UniverseRig, east: UniverseRig) -> None:
    opener = FakeStoreOpener(there=east.store)
    peers = PeerStores({"east": "there", "far-east": "there"}, opener.open)
    assert opener.opened == []
    assert peers.store("east") is peers.store("far-east") is east.store
    assert opener.opened == ["there"]


def test_close_closes_only_peer_stores_it_opened(north: UniverseRig) -> None:
    given, opened = memory_store(north), memory_store(north)
    peers = PeerStores({"a": "url", "b": given}, FakeStoreOpener(url=opened).open)
    peers.store("a")
    peers.store("b")
    peers.close()
    given.read(lambda txn: None)
    with pytest.raises(StoreClosed):
        opened.read(lambda txn: None)


def test_discarded_peer_store_is_reopened(north: UniverseRig) -> None:
    opener = FakeStoreOpener(url=memory_store(north))
    peers = PeerStores({"a": "url"}, opener.open)
    first = peers.store("a")
    peers.discard("a", first, StoreBusy())
    peers.store("a")
    assert opener.opened == ["url"]
    peers.discard("a", first, StoreReplaced(path="x"))
    peers.store("a")
    assert opener.opened == ["url", "url"]


def test_closed_peer_stores_open_nothing(north: UniverseRig) -> None:
    opener = FakeStoreOpener(url=memory_store(north))
    peers = PeerStores({"a": "url"}, opener.open)
    peers.close()
    with pytest.raises(Exception, match="closed"):
        peers.store("a")
    assert opener.opened == []


@pytest.mark.parametrize("url", ["no-such-directory", "gopher://x", "postgresql://u:secret@h/db"])
def test_bad_peer_url_keeps_mail_waiting_and_creates_no_store(
    north: UniverseRig, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ada = north.office("ada", Write("bob", "hi", universe="east"))
    north.run_until_idle(north.pool(stores={"east": url}), seconds=5)
    assert ada.state().told == []
    assert north.peer_queue_counts("east").delayed == 1
    assert list(tmp_path.iterdir()) == []


def test_peer_url_password_is_in_no_stored_error(north: UniverseRig) -> None:
    north.office("ada", Write("bob", "hi", universe="east"))
    pool = north.pool(stores={"east": "postgresql://u:secret@h/db"})
    north.run_until_idle(pool, seconds=1)
    rows = repr(north.rows())
    assert "unreachable" in rows
    assert "secret" not in rows


def test_peer_queue_names_are_unique_and_bounded() -> None:
    names = {outbox.peer_queue_name("n" * 100, "e" * size) for size in range(1, 101)}
    assert len(names) == 100
    assert max(map(len, names)) <= 200


def test_peer_delivery_continues_with_a_replaced_store(
    north: UniverseRig, east: UniverseRig
) -> None:
    bob = east.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="east"))
    replaced = PeerStoreProxy(memory_store(north))
    replaced.make_unreachable(StoreReplaced(path="x"))
    opener = FakeStoreOpener(url=replaced)
    fabric = MailDelivery(
        north.store,
        universe="north",
        worker="pool",
        peers={"east": "url"},
        open=opener.open,
        clock=north.clock,
    )
    role = north.boot(RunnerService(fabric.runners))
    north.run_until_idle(role)
    opener.stores["url"] = east.store
    north.run_until_idle(role, seconds=5)
    east.run_worlds()
    assert opener.opened == ["url", "url"]
    assert bob.state().read == ["hi"]
    assert ada.state().told == ["ok"]


# -- real threads --------------------------------------------------------------------------------


def test_hanging_peer_store_delays_only_its_own_mail() -> None:
    let_go = threading.Event()

    class Hanging(PeerStoreProxy):
        def transact(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
            let_go.wait(WAIT_S)
            return super().transact(fn, *args, **kwargs)

    with (
        stores.open("memory:") as here,
        stores.open("memory:") as east,
        stores.open("memory:") as west,
        app_of("north").open(here, stores={"east": Hanging(east), "west": west}) as north,
    ):
        ada = north.world(Office, "ada")
        try:
            for universe in ("east", "west"):
                ada.send(Write("bob", "hi", universe=universe))
            until(lambda: ada.state().told == ["ok"], "the receipt of mail to the west", WAIT_S)
            assert west.read(catalog.find_id, "west", "Office", "bob") is not None
            assert east.read(catalog.find_id, "east", "Office", "bob") is None
        finally:
            let_go.set()
        until(lambda: ada.state().told == ["ok", "ok"], "the receipt of mail to the east", WAIT_S)
        assert east.read(catalog.find_id, "east", "Office", "bob") is not None
