"""Mail within a universe, between universes of a store, and between stores: once, and told once."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

import holdfast as hf
from holdfast import store as stores
from holdfast.clock import MS, S
from holdfast.config import DEDUPE_RETENTION_NS, INBOX_DEPTH_MAX, ROUTE_KEPT_NS, ROUTE_LOOKS_MAX
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
from holdfast.ops import pending
from holdfast.roles import receipts
from holdfast.roles.adapter import AdapterPool
from holdfast.roles.crew import RunnerRole
from holdfast.roles.fabric import BATCH, Fabric
from holdfast.roles.peers import Peers
from holdfast.runner import Runner
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryBackend
from holdfast.world import catalog, outbox, publish
from tests.process.watch import until
from tests.roles.towns import (
    Cancel,
    Door,
    Letter,
    Office,
    Parcel,
    Quiet,
    Ship,
    Town,
    Want,
    Write,
    app_of,
)
from tests.world.rig import CRASH_AFTER, CRASH_BEFORE, FAULTS, UNKNOWN_AFTER, Crash
from tests.world.test_ingress import fill

MODULES = (
    "holdfast.world.fabric",
    "holdfast.world.outbox",
    "holdfast.roles.fabric",
    "holdfast.roles.sorting",
)

WAIT_S = 20.0


@pytest.fixture
def north() -> Town:
    return Town("north")


@pytest.fixture
def south(north: Town) -> Town:
    """Another universe in the same store."""
    return Town("south", north, together=True)


@pytest.fixture
def east(north: Town) -> Town:
    """Another universe in a store of its own."""
    return Town("east", north)


def exchange(towns: list[Town], pool: AdapterPool, seconds: float = 0) -> None:
    """Let a pool of the first town work, and the worlds of all."""
    towns[0].work(pool, seconds)
    for town in towns:
        town.think()


# -- within a universe ---------------------------------------------------------------------------


def test_plain_data_arrives_at_the_handler_of_its_inbox(north: Town) -> None:
    bob = north.office("bob")
    north.office("ada", Ship("bob", "parcels", {"weight": 7}))
    north.think()
    assert bob.state().weights == [7]


def test_an_inbox_without_a_type_takes_whatever_is_sent(north: Town) -> None:
    bob = north.office("bob")
    north.office("ada", Ship("bob", "anything", [1, {"a": None}]))
    north.think()
    assert bob.state().read == ["[1, {'a': None}]"]


def test_a_payload_that_does_not_fit_its_inbox_fails_its_event_alone(north: Town) -> None:
    bob = north.office("bob")
    north.office("ada", Ship("bob", "parcels", "heavy"), Ship("bob", "parcels", {"weight": 7}))
    north.think()
    assert bob.state().weights == [7]
    assert [entry.outcome for entry in bob.journal()] == ["failed", "ok"]
    assert "parcels" in bob.journal()[0].error


def test_an_inbox_that_the_app_names_and_no_handler_takes_is_journaled_and_ignored(
    north: Town,
) -> None:
    bob = north.office("bob")
    north.office("ada", Ship("bob", "cellar", 1))
    north.think()
    assert [(entry.type, entry.outcome) for entry in bob.journal()] == [("cellar", "ignored")]


def test_an_inbox_that_the_code_does_not_know_is_refused_where_it_is_wanted(north: Town) -> None:
    bob = north.office("bob")
    ada = north.office("ada", Ship("bob", "attic", 1))
    north.think()
    assert bob.journal() == []
    assert [entry.outcome for entry in ada.journal()] == ["failed"]


def test_an_inbox_and_an_event_of_the_same_name_are_two_things() -> None:
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

    rig = Town("north")
    rig.app = hf.App("north", worlds=[Both])
    rig.runtime.app = rig.app
    rig.host = rig.worker(idle_s=1e6)
    both = rig.world(Both, "b")
    both.send(Cancel())
    rig.think()
    assert both.state().seen == ["event", "inbox"]


def test_two_handlers_for_one_inbox_are_a_mistake() -> None:
    class Twice(hf.World):
        @hf.on(hf.inbox("a"))
        def one(self, mail: hf.Mail[Any], cx: hf.Context) -> None: ...

        @hf.on(hf.inbox("a", Parcel))
        def two(self, mail: hf.Mail[Parcel], cx: hf.Context) -> None: ...

    with pytest.raises(Invalid, match="handled twice"):
        hf.App("x", worlds=[Twice])


def test_a_handler_sees_where_mail_came_from_and_so_does_every_replay(north: Town) -> None:
    bob = north.office("bob")
    ada = north.world(Office, "ada")
    ada.send(Write("bob", "hi", headers={"lang": "en"}), correlation_id="c")
    ada.send(Ship("bob", "parcels", {"weight": 1}), correlation_id="d")
    north.think()
    sent = ada.state().sent[0]
    first, second = bob.state().causes
    assert first == ["north", north.id(ada), 1, sent, {"lang": "en"}, "c"]
    assert second[:3] == ["north", north.id(ada), 2]
    assert second[4:] == [{}, "d"]
    north.assign(bob, "B")
    north.host = north.worker("B", "elsewhere", idle_s=1e6)
    north.expire(60)
    bob.send(Letter("after the move"))
    north.think()
    assert bob.state().causes[0] == first
    assert bob.state().causes[2] == [None, None, None, None, {}, None]


def test_a_world_answers_whoever_wrote_by_its_id(north: Town) -> None:
    class Polite(hf.World):
        @hf.on(Letter)
        def letter(self, event: Letter, cx: hf.Context) -> None:
            assert cx.from_world is not None
            cx.send_to(cx.from_world, Letter(f"thanks for {event.text}"))

        @hf.on(Cancel)
        def never(self, event: Cancel, cx: hf.Context) -> None: ...

    app = hf.App("north", worlds=[Office, Polite])
    rig = Town("north")
    rig.app = rig.runtime.app = app
    rig.host = rig.worker(idle_s=1e6)
    polite = rig.world(Polite, "bob")
    ada = rig.office("ada", Want({"dest_world": ["Polite", "bob"], **letter("tea")}))
    rig.think()
    assert ada.state().read == ["thanks for tea"]
    # Its letter, and the receipt of its answer: offices handle such, so the app declares them.
    assert [entry.outcome for entry in polite.journal()] == ["ok", "ignored"]


def letter(text: str) -> dict[str, Any]:
    schema, value = Town("x").app.encode_event(Letter(text))
    return {"schema": schema, "value_cbor": value}


def test_the_effect_delivers_as_the_call_does(north: Town) -> None:
    bob = north.office("bob")
    want = Want({"dest_world": ["Office", "bob"], **letter("hi")}, tag="t")
    ada = north.office("ada", want)
    north.think()
    assert bob.state().read == ["hi"]
    assert ada.state().told == ["ok"]
    [told] = ada.state().receipts
    assert (told["tag"], told["world"], told["seq"]) == ("t", north.id(bob), 1)


def test_a_key_that_was_used_for_the_same_mail_sends_nothing_more(north: Town) -> None:
    bob = north.office("bob")
    want = Want({"dest_world": ["Office", "bob"], **letter("hi")}, key="k")
    ada = north.office("ada", want, want)
    north.think()
    assert bob.state().read == ["hi"]
    assert ada.state().told == ["ok"]


def test_a_key_that_was_used_for_other_mail_is_answered_with_an_error(north: Town) -> None:
    bob = north.office("bob")
    fields = {"dest_world": ["Office", "bob"]}
    wants = [Want({**fields, **letter(text)}, key="k") for text in ("one", "two")]
    ada = north.office("ada", *wants)
    north.think()
    assert bob.state().read == ["one"]
    assert sorted(ada.state().told) == ["error key_conflict", "ok"]


def test_a_message_under_the_same_id_arrives_once_and_its_repeat_is_told_so(north: Town) -> None:
    bob = north.office("bob")
    ada = north.office("ada", *[Write("bob", "hi", message_id="m")] * 2)
    north.think()
    assert bob.state().read == ["hi"]
    assert ada.state().told == ["ok", "already_enqueued"]
    first, second = ada.state().receipts
    assert (first["id"], first["world"], first["seq"]) == (
        second["id"],
        second["world"],
        second["seq"],
    )


def test_two_senders_that_use_the_same_id_send_one_message(north: Town) -> None:
    bob = north.office("bob")
    offices = [north.office(name, Write("bob", "hi", message_id="m")) for name in ("ada", "eve")]
    north.think()
    assert bob.state().read == ["hi"]
    assert sorted(office.state().told[0] for office in offices) == ["already_enqueued", "ok"]


def test_a_message_under_the_same_id_with_another_body_is_an_error_and_no_silent_drop(
    north: Town,
) -> None:
    bob = north.office("bob")
    writes = [Write("bob", text, message_id="m") for text in ("one", "two")]
    ada = north.office("ada", *writes)
    north.think()
    assert bob.state().read == ["one"]
    assert ada.state().told == ["ok", "error key_conflict"]


@pytest.mark.parametrize("deleted", [False, True])
def test_mail_to_an_id_that_leads_to_no_world_comes_back_as_not_found(
    north: Town, deleted: bool
) -> None:
    world_id = "0" * 32
    if deleted:
        bob = north.office("bob")
        world_id = north.id(bob)
        bob.delete()
    ada = north.office("ada", Write(id=world_id))
    north.think()
    assert ada.state().told == ["error not_found"]
    assert ada.state().receipts[0]["world"] == ""


def test_a_world_that_does_not_ask_hears_of_errors_all_the_same(north: Town) -> None:
    quiet = north.world(Quiet, "q")
    quiet.send(Write(id="0" * 32))
    north.think()
    assert [entry.outcome for entry in quiet.journal()] == ["ok", "ignored"]


def test_a_world_may_write_to_itself_by_its_id(north: Town) -> None:
    ada = north.world(Office, "ada")
    ada.send(Write(id=north.id(ada), text="me"))
    north.think()
    assert ada.state().read == ["me"]
    assert ada.state().told == ["ok"]


def test_a_fork_is_another_destination_and_its_parent_is_not_written_to(north: Town) -> None:
    bob = north.office("bob", Letter("before"))
    child = bob.fork("child", at=1)
    north.assign(child)
    north.office("ada", Write("child", "hi", message_id="m"), Write("bob", "hi", message_id="m"))
    north.think()
    assert (bob.state().read, child.state().read) == (["before", "hi"], ["before", "hi"])


def test_a_fork_of_a_sender_sends_nothing_again(north: Town) -> None:
    bob = north.office("bob")
    ada = north.office("ada", Write("bob", "hi"))
    child = ada.fork("child", at=1)
    north.assign(child)
    child.send(Letter())
    north.think()
    assert bob.state().read == ["hi"]


def test_a_recreated_name_knows_no_message_of_its_forerunner(north: Town) -> None:
    bob = north.office("bob")
    ada = north.office("ada", Write("bob", "hi", message_id="m"))
    bob.delete()
    ada.send(Write("bob", "hi", message_id="m"))
    north.think()
    again = north.world(Office, "bob")
    north.think()
    assert again.state().read == ["hi"]
    assert ada.state().told == ["ok", "ok"]


def test_a_full_world_gets_its_mail_by_the_queue_and_an_operator_sees_it_there(north: Town) -> None:
    bob = north.office("bob")
    bob.pause()
    fill(north, bob, INBOX_DEPTH_MAX)
    ada = north.office("ada", Write("bob", "hi"))
    row = north.store.read(pending.effect, ada.state().sent[0].hex())
    assert (row.state, row.wanted.effect_kind) == ("ready", FABRIC_SEND)
    pool = north.pool()
    north.work(pool, seconds=3)
    row = north.store.read(pending.effect, ada.state().sent[0].hex())
    assert row.state == "delayed"
    fill(north, bob, 0)
    bob.resume()
    north.work(pool, seconds=3)
    assert bob.state().read == ["hi"]
    assert ada.state().told == ["ok"]
    assert north.store.read(publish.pending, "north", ada.state().sent[0]) is None


def test_mail_that_waits_can_be_cancelled(north: Town) -> None:
    bob = north.office("bob")
    bob.pause()
    fill(north, bob, INBOX_DEPTH_MAX)
    ada = north.office("ada", Write("bob", "hi"))
    pool = north.pool()
    north.work(pool, seconds=2)
    ada.send(Cancel())
    north.think()
    fill(north, bob, 0)
    bob.resume()
    north.work(pool, seconds=5)
    assert ada.state().told == ["error cancelled"]
    assert bob.state().read == []


def test_mail_that_was_delivered_is_not_cancelled(north: Town) -> None:
    bob = north.office("bob")
    ada = north.office("ada", Write("bob", "hi"), Cancel())
    north.think()
    assert bob.state().read == ["hi"]
    assert ada.state().told == ["ok"]


# -- between universes of one store --------------------------------------------------------------


def test_nothing_of_a_message_is_in_another_universe_before_a_pool_brings_it(
    north: Town, south: Town
) -> None:
    bob = south.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="south"))
    assert (south.depth(bob), north.counts(FABRIC_SEND).ready) == (0, 1)
    exchange([north, south], north.pool())
    assert bob.state().read == ["hi"]
    north.think()
    assert ada.state().told == ["ok"]


def test_mail_to_another_universe_says_where_it_came_from(north: Town, south: Town) -> None:
    bob = south.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="south"))
    exchange([north, south], north.pool())
    [cause] = bob.state().causes
    assert cause[:4] == ["north", north.id(ada), 1, ada.state().sent[0]]


def test_an_answer_finds_its_way_back(north: Town, south: Town) -> None:
    bob = south.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="south"))
    exchange([north, south], north.pool())
    bob.send(Write(id=north.id(ada), text="thanks", universe="north"))
    south.think()
    exchange([south, north], south.pool())
    assert ada.state().read == ["thanks"]
    assert bob.state().told == ["ok"]


def test_plain_data_crosses_universes_too(north: Town, south: Town) -> None:
    bob = south.office("bob")
    north.office("ada", Ship("bob", "parcels", {"weight": 7}, universe="south"))
    exchange([north, south], north.pool())
    assert bob.state().weights == [7]


def test_a_world_of_another_universe_is_made_for_its_name(north: Town, south: Town) -> None:
    south.office("somebody")
    north.office("ada", Write("new", "hi", universe="south"))
    exchange([north, south], north.pool())
    new = south.world(Office, "new")
    south.think()
    assert new.state().read == ["hi"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("commit", [1, 2])
def test_whichever_commit_of_a_pool_goes_wrong_mail_arrives_once_and_is_answered_once(
    north: Town, south: Town, fault: str, commit: int
) -> None:
    bob = south.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="south"))
    pool = north.pool()
    north.backend.arm({commit: fault})
    try:
        north.work(pool)
    except Crash:
        pool = north.pool("another")
    north.backend.arm({})
    exchange([north, south], pool, seconds=10)
    assert bob.state().read == ["hi"]
    north.think()
    assert ada.state().told == ["ok"]


def test_the_end_of_the_item_and_the_delivery_are_one_commit(north: Town, south: Town) -> None:
    for fault in (CRASH_BEFORE, CRASH_AFTER):
        bob = south.office(f"bob-{fault}")
        north.office("ada", Write(bob.name, "hi", universe="south"))
        pool = north.pool(fault)
        north.backend.arm({2: fault})
        with pytest.raises(Crash):
            north.work(pool)
        north.backend.arm({})
        left = north.counts(FABRIC_SEND)
        assert south.depth(bob) == (fault == CRASH_AFTER)
        assert left.ready + left.claimed == (fault == CRASH_BEFORE)
        north.expire(10)
        north.work(north.pool("next"))


def test_a_full_world_of_another_universe_is_waited_for(north: Town, south: Town) -> None:
    bob = south.office("bob")
    bob.pause()
    fill(south, bob, INBOX_DEPTH_MAX)
    ada = north.office("ada", Write("bob", "hi", universe="south"))
    pool = north.pool()
    exchange([north, south], pool, seconds=5)
    assert ada.state().told == []
    fill(south, bob, 0)
    bob.resume()
    exchange([north, south], pool, seconds=5)
    assert bob.state().read == ["hi"]


def test_a_sender_that_is_deleted_meanwhile_is_not_answered_and_its_mail_arrives(
    north: Town, south: Town
) -> None:
    bob = south.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="south"))
    subject = north.subject(ada)
    ada.delete()
    exchange([north, south], north.pool())
    assert bob.state().read == ["hi"]
    assert north.store.read(inbox.depth, subject) == 0


# -- no way there --------------------------------------------------------------------------------


def sorter(pool: AdapterPool) -> Runner:
    [found] = [one for one in pool.runners if one.worker.endswith(FABRIC_SEND)]
    return found


def look_for(north: Town, runner: Runner, times: int) -> None:
    """Let a sorter look for a route, each time as late as it might."""
    for _ in range(times):
        assert runner.tick().requeued == 1
        north.expire(31)


def test_a_universe_that_nobody_knows_is_no_route_and_the_answer_says_what_to_configure(
    north: Town,
) -> None:
    ada = north.office("ada", Write("bob", "hi", universe="atlantis"))
    runner = sorter(north.pool())
    look_for(north, runner, ROUTE_LOOKS_MAX - 1)
    assert runner.tick().done == 1
    north.think()
    assert ada.state().told == ["error no_route"]
    assert "--peer" in ada.state().receipts[0]["error"]
    assert "atlantis" in ada.state().receipts[0]["error"]
    assert north.letters(FABRIC_SEND) == []


def test_a_route_is_looked_for_about_an_hour(north: Town) -> None:
    north.office("ada", Write("bob", "hi", universe="atlantis"))
    runner = sorter(north.pool())
    since_ns = north.store.now_ns()
    while not runner.tick().done:
        due_ns = north.store.read(queue.next_due_ns, publish.effects("north", FABRIC_SEND))
        assert due_ns is not None
        north.clock.advance(max(due_ns - north.store.now_ns(), MS))
    assert 50 * 60 * S < north.store.now_ns() - since_ns < 70 * 60 * S


def test_mail_that_has_no_route_waits_with_its_reason_for_an_operator_to_see(north: Town) -> None:
    ada = north.office("ada", Write("bob", "hi", universe="atlantis"))
    north.work(north.pool(), seconds=10)
    assert ada.state().told == []
    [row] = north.store.read(pending.intents, "north", FABRIC_SEND, "delayed")
    assert (row.intent.intent_hash, row.code) == (ada.state().sent[0], "no_route")
    assert "universe='atlantis'" in row.error


def test_mail_that_has_no_route_can_be_cancelled(north: Town) -> None:
    ada = north.office("ada", Write("bob", "hi", universe="atlantis"))
    pool = north.pool()
    north.work(pool, seconds=10)
    ada.send(Cancel())
    north.work(pool, seconds=60)
    assert ada.state().told == ["error cancelled"]
    assert north.counts(FABRIC_SEND) == queue.Counts(done=1)


def test_mail_without_a_route_delays_no_other(north: Town, south: Town) -> None:
    bob = south.office("bob")
    lost = [Write("bob", "lost", universe="atlantis") for _ in range(5 * BATCH)]
    north.office("ada", *lost, Write("bob", "hi", universe="south"))
    exchange([north, south], north.pool(), seconds=1)
    assert bob.state().read == ["hi"]


def test_where_much_mail_has_no_route_each_is_looked_at_less_often(
    north: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.roles.sorting.ROUTE_LOOK_EACH_NS", 10 * S)
    north.office("ada", *[Write("bob", "hi", universe="atlantis") for _ in range(5)])
    runner = sorter(north.pool())
    runner.tick()
    north.expire(31)
    assert runner.tick().requeued == 5, "nobody waited when they were first looked at"
    north.office("eve", Write("bob", "hi", universe="atlantis"))
    runner.tick()
    rows = north.store.read(pending.intents, "north", FABRIC_SEND, "delayed")
    assert rows[-1].time_ns - north.store.now_ns() >= 49 * S


def test_a_pool_that_is_started_later_brings_what_had_no_route(north: Town, east: Town) -> None:
    bob = east.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="east"))
    look_for(north, sorter(north.pool("old")), ROUTE_LOOKS_MAX - 1)
    exchange([north, east], north.pool("new", stores={"east": east.store}))
    assert bob.state().read == ["hi"]
    north.think()
    assert ada.state().told == ["ok"]


def test_a_universe_that_comes_into_this_store_later_gets_what_had_no_route(north: Town) -> None:
    ada = north.office("ada", Write("bob", "hi", universe="south"))
    pool = north.pool()
    north.work(pool, seconds=20)
    south = Town("south", north, together=True)
    bob = south.office("bob")
    exchange([north, south], pool, seconds=31)
    assert bob.state().read == ["hi"]
    assert ada.state().told == ["ok"]


def test_mail_that_lay_in_a_store_without_pools_is_looked_for_as_long_as_any(
    north: Town, east: Town
) -> None:
    bob = east.office("bob")
    north.office("ada", Write("bob", "hi", universe="east"))
    north.expire(3 * 24 * 3600)
    north.work(north.pool("first"), seconds=60)
    exchange([north, east], north.pool("second", stores={"east": east.store}), seconds=31)
    assert bob.state().read == ["hi"]


# -- routes of other pools -----------------------------------------------------------------------


def test_a_pool_without_a_route_puts_mail_into_the_lane_of_one_that_has_it(
    north: Town, east: Town
) -> None:
    bob = east.office("bob")
    routed = north.pool("routed", stores={"east": east.store})
    north.work(routed)
    ada = north.office("ada", *[Write("bob", str(n), universe="east") for n in range(10)])
    north.work(north.pool("other"))
    assert north.counts(FABRIC_SEND) == queue.Counts(done=10)
    assert north.lane("east") == queue.Counts(ready=10)
    exchange([north, east], routed)
    assert bob.state().read == [str(n) for n in range(10)]
    north.think()
    assert ada.state().told == ["ok"] * 10


def test_mail_waits_in_its_lane_while_the_pool_with_the_route_is_away(
    north: Town, east: Town
) -> None:
    bob = east.office("bob")
    north.work(north.pool("routed", stores={"east": east.store}))
    ada = north.office("ada", Write("bob", "hi", universe="east"))
    north.work(north.pool("other"), seconds=60)
    north.expire(5 * 24 * 3600)
    north.work(north.pool("other again"), seconds=60)
    assert ada.state().told == []
    exchange([north, east], north.pool("back", stores={"east": east.store}))
    assert bob.state().read == ["hi"]


def test_an_announced_route_is_forgotten_when_its_pools_are_gone_for_long(
    north: Town, east: Town
) -> None:
    north.work(north.pool("routed", stores={"east": east.store}))
    north.clock.advance(ROUTE_KEPT_NS)
    ada = north.office("ada", Write("bob", "hi", universe="east"))
    north.work(north.pool("other"), seconds=1)
    row = north.store.read(pending.effect, ada.state().sent[0].hex())
    assert row.item is not None
    assert (row.state, row.item.code) == ("delayed", "no_route")


def test_a_pool_that_runs_on_without_mail_keeps_its_route_announced(
    north: Town, east: Town
) -> None:
    routed = north.pool("routed", stores={"east": east.store})
    for _ in range(3):
        north.work(routed)
        north.clock.advance(ROUTE_KEPT_NS - S)
    assert north.store.read(outbox.routed, "north", "east")


def test_a_route_is_announced_now_and_then_and_not_with_every_tick(north: Town, east: Town) -> None:
    pool = north.pool("routed", stores={"east": east.store})
    commits = north.store.engine.commit_no
    for _ in range(60):
        for runner in pool.runners:
            runner.tick()
        north.clock.advance(S)
    assert north.store.engine.commit_no == commits + 1


@pytest.mark.parametrize("fault", FAULTS)
def test_an_announcement_that_goes_wrong_is_made_again(north: Town, east: Town, fault: str) -> None:
    pool = north.pool("routed", stores={"east": east.store})
    north.backend.arm({1: fault})
    try:
        north.work(pool)
    except Crash:
        pool = north.pool("next", stores={"east": east.store})
    north.backend.arm({})
    north.work(pool)
    assert north.store.read(outbox.routed, "north", "east")


def test_a_route_of_one_universe_is_none_of_another(north: Town, south: Town, east: Town) -> None:
    north.work(north.pool("routed", stores={"east": east.store}))
    assert not south.store.read(outbox.routed, "south", "east")


def test_the_own_universe_is_no_peer(north: Town) -> None:
    with pytest.raises(Invalid, match="the one that runs here"):
        north.pool(stores={"north": north.store})


def test_a_peer_has_the_name_of_a_universe(north: Town) -> None:
    with pytest.raises(Invalid, match="universe"):
        north.pool(stores={"a/b": north.store})


# -- between stores ------------------------------------------------------------------------------


def test_mail_to_another_store_arrives_and_is_answered(north: Town, east: Town) -> None:
    bob = east.office("bob", Letter("first"))
    ada = north.office("ada", Write("bob", "hi", universe="east"))
    exchange([north, east], north.pool(stores={"east": east.store}))
    assert bob.state().read == ["first", "hi"]
    assert bob.state().causes[1][:3] == ["north", north.id(ada), 1]
    north.think()
    assert ada.state().told == ["ok"]
    [told] = ada.state().receipts
    assert (told["world"], told["seq"], told["id"]) == (east.id(bob), 2, ada.state().sent[0])
    assert north.lane("east") == queue.Counts(done=1)


def test_mail_of_one_sender_arrives_in_another_store_in_the_order_of_its_sending(
    north: Town, east: Town
) -> None:
    bob = east.office("bob")
    north.office("ada", *[Write("bob", str(n), universe="east") for n in range(250)])
    exchange([north, east], north.pool(stores={"east": east.store}))
    assert bob.state().read == [str(n) for n in range(250)]


def test_a_batch_of_mail_is_one_commit_in_the_other_store(north: Town, east: Town) -> None:
    east.office("bob")
    writes = [Write("bob", str(n), universe="east") for n in range(BATCH)]
    north.office("ada", *writes)
    door = Door(east.store)
    exchange([north, east], north.pool(stores={"east": door}))
    assert door.commits == 1


def test_mail_that_is_large_is_brought_in_several_commits(north: Town, east: Town) -> None:
    bob = east.office("bob")
    big = "x" * 3_000_000
    north.office("ada", *[Write("bob", big, universe="east") for n in range(6)])
    door = Door(east.store)
    north.work(north.pool(stores={"east": door}))
    assert (east.depth(bob), door.commits) == (6, 3)


def test_errors_of_the_other_store_come_back_as_receipts(north: Town, east: Town) -> None:
    gone = east.office("gone")
    world_id = east.id(gone)
    gone.delete()
    ada = north.office("ada", *[Write(id=one, universe="east") for one in (world_id, "0" * 32)])
    exchange([north, east], north.pool(stores={"east": east.store}))
    north.think()
    assert ada.state().told == ["error not_found"] * 2


def test_a_full_world_of_another_store_delays_no_other_there(north: Town, east: Town) -> None:
    bob, eve = east.office("bob"), east.office("eve")
    bob.pause()
    fill(east, bob, INBOX_DEPTH_MAX)
    ada = north.office("ada", *[Write(to, "hi", universe="east") for to in ("bob", "eve", "bob")])
    pool = north.pool(stores={"east": east.store})
    exchange([north, east], pool, seconds=3)
    assert eve.state().read == ["hi"]
    assert ada.state().told == ["ok"]
    fill(east, bob, 0)
    bob.resume()
    exchange([north, east], pool, seconds=70)
    assert bob.state().read == ["hi", "hi"]
    north.think()
    assert ada.state().told == ["ok"] * 3


# Which commit fails: 1 claims and 2 forwards, 3 claims in the lane and 4 ends the item there.
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("commit", [1, 2, 3, 4, 5])
def test_whichever_commit_of_the_senders_store_goes_wrong_mail_is_there_once(
    north: Town, east: Town, fault: str, commit: int
) -> None:
    bob = east.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="east"))
    pool = north.pool(stores={"east": east.store})
    north.backend.arm({commit: fault})
    try:
        north.work(pool)
    except Crash:
        pool = north.pool("another", stores={"east": east.store})
    north.backend.arm({})
    exchange([north, east], pool, seconds=20)
    assert bob.state().read == ["hi"]
    north.think()
    assert len(ada.state().told) == 1
    assert ada.state().told[0] in ("ok", "already_enqueued")


@pytest.mark.parametrize("fault", FAULTS)
def test_whichever_way_the_other_stores_commit_goes_wrong_mail_is_there_once(
    north: Town, east: Town, fault: str
) -> None:
    bob = east.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="east"))
    pool = north.pool(stores={"east": east.store})
    east.backend.arm({1: fault})
    try:
        north.work(pool)
    except Crash:
        pool = north.pool("another", stores={"east": east.store})
    east.backend.arm({})
    exchange([north, east], pool, seconds=20)
    assert bob.state().read == ["hi"]
    north.think()
    assert ada.state().told == [
        "already_enqueued" if fault in (CRASH_AFTER, UNKNOWN_AFTER) else "ok"
    ]


def test_a_pool_that_dies_between_the_two_commits_leaves_a_repeat_that_is_known(
    north: Town, east: Town
) -> None:
    bob = east.office("bob")
    ada = north.office("ada", *[Write("bob", str(n), universe="east") for n in range(5)])
    pool = north.pool(stores={"east": east.store})
    north.backend.arm({4: CRASH_BEFORE})
    with pytest.raises(Crash):
        north.work(pool)
    assert east.depth(bob) == 5
    east.think()
    exchange([north, east], north.pool("next", stores={"east": east.store}), seconds=20)
    north.think()
    assert bob.state().read == [str(n) for n in range(5)]
    assert ada.state().told == ["already_enqueued"] * 5


def test_mail_that_was_cancelled_in_its_lane_is_not_delivered(north: Town, east: Town) -> None:
    bob = east.office("bob")
    door = Door(east.store)
    door.close_door()
    pool = north.pool(stores={"east": door})
    ada = north.office("ada", Write("bob", "hi", universe="east"))
    north.work(pool, seconds=2)
    row = north.store.read(pending.effect, ada.state().sent[0].hex())
    assert row.state == "delayed"
    ada.send(Cancel())
    north.think()
    door.shut = None
    exchange([north, east], pool, seconds=60)
    assert bob.state().read == []
    assert ada.state().told == ["error cancelled"]


def test_mail_that_is_cancelled_in_the_hands_of_a_lane_is_answered_once(
    north: Town, east: Town
) -> None:
    """It may have been delivered, as an effect may have been done: the sender is told one thing."""
    east.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="east"))

    class Slow(Door):
        def transact(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
            ada.send(Cancel())
            north.think()
            return super().transact(fn, *args, **kwargs)

    exchange([north, east], north.pool(stores={"east": Slow(east.store)}), seconds=20)
    north.think()
    assert ada.state().told == ["error cancelled"]


def test_mail_to_a_world_that_is_deleted_while_it_is_on_its_way_is_not_found(
    north: Town, east: Town
) -> None:
    bob = east.office("bob")
    door = Door(east.store)
    door.close_door()
    pool = north.pool(stores={"east": door})
    ada = north.office("ada", Write(id=east.id(bob), text="hi", universe="east"))
    north.work(pool, seconds=1)
    bob.delete()
    door.shut = None
    exchange([north, east], pool, seconds=60)
    north.think()
    assert ada.state().told == ["error not_found"]


def test_mail_to_a_world_that_is_forked_while_it_is_on_its_way_is_its_parents(
    north: Town, east: Town
) -> None:
    bob = east.office("bob", Letter("before"))
    door = Door(east.store)
    door.close_door()
    pool = north.pool(stores={"east": door})
    north.office("ada", Write("bob", "hi", universe="east"))
    north.work(pool, seconds=1)
    child = bob.fork("child")
    east.assign(child)
    door.shut = None
    exchange([north, east], pool, seconds=60)
    assert (bob.state().read, child.state().read) == (["before", "hi"], ["before"])


def test_a_world_that_mail_made_and_that_is_deleted_before_the_receipt_is_not_made_again(
    north: Town, east: Town
) -> None:
    ada = north.office("ada", Write("new", "hi", universe="east"))
    pool = north.pool(stores={"east": east.store})
    north.backend.arm({4: CRASH_BEFORE})
    with pytest.raises(Crash):
        north.work(pool)
    made = east.runtime.world(Office, "new")
    made.delete()
    north.work(north.pool("next", stores={"east": east.store}), seconds=20)
    north.think()
    assert ada.state().told == ["already_enqueued"]
    assert east.store.read(catalog.find, "east", "Office", "new") is None


def test_pools_that_work_side_by_side_bring_each_message_once(north: Town, east: Town) -> None:
    bob = east.office("bob")
    north.office("ada", *[Write("bob", str(n), universe="east") for n in range(500)])
    door = Door(east.store)
    pools = [north.pool(name, stores={"east": door}) for name in ("one", "two", "three")]
    for _ in range(20):
        for pool in pools:
            for runner in pool.runners:
                runner.tick()
    east.think()
    assert sorted(bob.state().read, key=int) == [str(n) for n in range(500)]
    assert door.commits == 5


def test_a_peer_that_leads_back_into_the_own_store_is_a_detour(north: Town, south: Town) -> None:
    bob = south.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="south"))
    exchange([north, south], north.pool(stores={"south": north.store}))
    assert bob.state().read == ["hi"]
    north.think()
    assert ada.state().told == ["ok"]


@pytest.mark.parametrize("seed", range(60))
def test_whatever_goes_wrong_in_both_stores_each_message_is_there_once_and_told_once(
    north: Town, east: Town, south: Town, seed: int
) -> None:
    chance = random.Random(seed)
    offices = {None: north.office("bob"), "south": south.office("bob"), "east": east.office("bob")}
    ada = north.office("ada", Letter())
    places = list(offices)
    sent: dict[str | None, list[str]] = {place: [] for place in places}
    pools = [north.pool(f"pool-{n}", stores={"east": east.store}) for n in range(2)]
    for n in range(12):
        to = chance.choice(places)
        sent[to].append(str(n))
        ada.send(Write("bob", str(n), universe=to))
        for town in (north, east):
            town.backend.arm({chance.randint(1, 4): chance.choice(FAULTS)})
        at = chance.randrange(len(pools))
        died = False
        try:
            north.work(pools[at], seconds=chance.choice((0, 1)))
        except Crash:
            died = True
        for town in (north, east):
            town.backend.arm({})
        if died:
            pools[at] = north.pool(f"pool-{n + 2}", stores={"east": east.store})
    north.expire(11)
    for _ in range(3):
        exchange([north, south, east], pools[0], seconds=20)
    for to, office in offices.items():
        assert sorted(office.state().read, key=int) == sent[to]
    told = ada.state()
    assert len(told.told) == 12
    assert set(told.told) <= {"ok", "already_enqueued"}
    assert {one["intent"] for one in told.receipts} == set(told.sent)
    left = [north.counts(FABRIC_SEND), north.lane("east")]
    assert all(counts.ready + counts.delayed + counts.claimed == 0 for counts in left)


def test_mail_that_is_cancelled_before_a_lane_comes_to_it_is_not_delivered(
    north: Town, east: Town
) -> None:
    """All four are claimed; two fit into one commit. The last is cancelled during the first one."""
    bob = east.office("bob")
    ada = north.office("ada", *[Write("bob", "x" * 3_000_000, universe="east") for _ in range(4)])

    class Slow(Door):
        def transact(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
            if self.tries == 0:
                ada.send(Cancel())
                north.think()
            return super().transact(fn, *args, **kwargs)

    north.work(north.pool(stores={"east": Slow(east.store)}), seconds=20)
    assert east.depth(bob) == 3
    assert sorted(ada.state().told) == ["error cancelled", "ok", "ok", "ok"]


def test_mail_that_an_operator_buries_is_answered_with_an_error_and_goes_again_when_redriven(
    north: Town, east: Town
) -> None:
    bob = east.office("bob")
    door = Door(east.store)
    door.close_door()
    pool = north.pool(stores={"east": door})
    ada = north.office("ada", Write("bob", "hi", universe="east"))
    north.work(pool)
    north.expire(1)
    lane = outbox.lane("north", "east")
    [claim] = north.store.transact(queue.claim, lane, "operator", 1, S)
    north.store.transact(queue.bury, claim.token, "given_up", "by hand")
    north.think()
    assert ada.state().told == ["error given_up"]
    kind = f"{FABRIC_SEND}>east"
    north.store.transact(receipts.redrive_effects, "north", kind, [claim.seq])
    door.shut = None
    exchange([north, east], pool, seconds=60)
    north.think()
    assert bob.state().read == ["hi"]
    assert ada.state().told == ["error given_up", "ok"]


# -- stores that cannot be reached ---------------------------------------------------------------

TROUBLES = {
    "busy": StoreBusy(),
    "its writer is lost": WriterLost(),
    "it was replaced": StoreReplaced(path="x"),
    "an error of the system": OSError(5, "no such luck"),
    "outcome unknown": CommitUnknown(),
    "an operation that it does not know": Invalid(what="operation"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_store_that_cannot_be_reached_loses_no_mail(
    north: Town, east: Town, trouble: str
) -> None:
    bob = east.office("bob")
    door = Door(east.store)
    door.close_door(TROUBLES[trouble])
    pool = north.pool(stores={"east": door})
    ada = north.office("ada", *[Write("bob", str(n), universe="east") for n in range(20)])
    exchange([north, east], pool, seconds=120)
    assert ada.state().told == []
    door.shut = None
    exchange([north, east], pool, seconds=120)
    north.think()
    assert sorted(bob.state().read, key=int) == [str(n) for n in range(20)]
    assert ada.state().told == ["ok"] * 20
    assert north.letters(FABRIC_SEND) == []


def test_a_store_that_is_gone_delays_no_mail_to_others(
    north: Town, east: Town, south: Town
) -> None:
    west = Town("west", north)
    door = Door(east.store)
    door.close_door()
    writes = [Write("bob", "x", universe="east") for _ in range(300)]
    offices = [town.office("bob") for town in (south, west)]
    north.office("ada", *writes, *[Write("bob", "hi", universe=u) for u in ("south", "west")])
    pool = north.pool(stores={"east": door, "west": west.store})
    exchange([north, south, west], pool, seconds=1)
    assert [office.state().read for office in offices] == [["hi"], ["hi"]]


def test_much_mail_to_a_store_that_is_gone_costs_a_look_now_and_then(
    north: Town, east: Town
) -> None:
    door = Door(east.store)
    door.close_door()
    north.office("ada", *[Write("bob", "x", universe="east") for _ in range(300)])
    pool = north.pool(stores={"east": door})
    north.work(pool, seconds=120)
    assert door.tries < 20
    counts = north.lane("east")
    assert counts.ready + counts.delayed == 300
    assert counts.ready >= 300 - BATCH - door.tries, "the others were not touched"


def test_the_loop_of_a_lane_rests_while_its_store_is_gone(north: Town, east: Town) -> None:
    door = Door(east.store)
    door.close_door()
    north.office("ada", *[Write("bob", "x", universe="east") for _ in range(300)])
    pool = north.pool(stores={"east": door})
    north.work(pool, seconds=60)
    lane = pool.runners[-1]
    assert lane.idle_sleep_ms() > 100


def test_mail_that_waited_longer_than_ids_are_remembered_is_told_so(
    north: Town, east: Town
) -> None:
    """Nobody could tell any more whether it was delivered before the receipt got lost."""
    bob = east.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="east"))
    door = Door(east.store)
    door.close_door()
    pool = north.pool(stores={"east": door})
    north.work(pool, seconds=1)
    north.clock.advance(DEDUPE_RETENTION_NS + 60 * S)
    east.store.transact(dedupe.collect, inbox.SCOPE, DEDUPE_RETENTION_NS, 10)
    door.shut = None
    exchange([north, east], pool, seconds=60)
    north.think()
    assert ada.state().told == ["error key_expired"]
    assert bob.state().read == []


# -- opening stores ------------------------------------------------------------------------------


class Shelf:
    """Opens stores by URL, and remembers what was opened and closed."""

    def __init__(self, **stores: Any) -> None:
        self.stores = stores
        self.opened: list[str] = []

    def open(self, url: str) -> Any:
        self.opened.append(url)
        if url not in self.stores:
            raise NotFound(what="store", url=url)
        return self.stores[url]


def memory(town: Town) -> LocalStore:
    return LocalStore("memory:", MemoryBackend(), town.clock)


def test_a_store_is_opened_when_it_is_first_needed_and_once_for_all_universes_in_it(
    north: Town, east: Town
) -> None:
    shelf = Shelf(there=east.store)
    peers = Peers({"east": "there", "far-east": "there"}, shelf.open)
    assert shelf.opened == []
    assert peers.store("east") is peers.store("far-east") is east.store
    assert shelf.opened == ["there"]


def test_closing_closes_what_was_opened_and_nothing_that_was_given(north: Town) -> None:
    given, opened = memory(north), memory(north)
    peers = Peers({"a": "url", "b": given}, Shelf(url=opened).open)
    peers.store("a")
    peers.store("b")
    peers.close()
    given.read(lambda txn: None)
    with pytest.raises(StoreClosed):
        opened.read(lambda txn: None)


def test_a_store_of_no_more_use_is_opened_again(north: Town) -> None:
    shelf = Shelf(url=memory(north))
    peers = Peers({"a": "url"}, shelf.open)
    first = peers.store("a")
    peers.drop("a", first, StoreBusy())
    peers.store("a")
    assert shelf.opened == ["url"]
    peers.drop("a", first, StoreReplaced(path="x"))
    peers.store("a")
    assert shelf.opened == ["url", "url"]


def test_a_pool_that_is_closed_opens_nothing_more(north: Town) -> None:
    shelf = Shelf(url=memory(north))
    peers = Peers({"a": "url"}, shelf.open)
    peers.close()
    with pytest.raises(Exception, match="closed"):
        peers.store("a")
    assert shelf.opened == []


@pytest.mark.parametrize("url", ["no-such-directory", "gopher://x", "postgresql://u:secret@h/db"])
def test_a_url_that_leads_nowhere_keeps_its_mail_waiting_and_makes_no_store(
    north: Town, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ada = north.office("ada", Write("bob", "hi", universe="east"))
    north.work(north.pool(stores={"east": url}), seconds=5)
    assert ada.state().told == []
    assert north.lane("east").delayed == 1
    assert list(tmp_path.iterdir()) == []


def test_a_password_of_a_url_is_in_no_error(north: Town) -> None:
    north.office("ada", Write("bob", "hi", universe="east"))
    pool = north.pool(stores={"east": "postgresql://u:secret@h/db"})
    north.work(pool, seconds=1)
    rows = repr(north.rows())
    assert "unreachable" in rows
    assert "secret" not in rows


def test_lanes_have_names_however_long_their_universes_are() -> None:
    names = {outbox.lane("n" * 100, "e" * size) for size in range(1, 101)}
    assert len(names) == 100
    assert max(map(len, names)) <= 200


def test_a_lane_whose_store_was_replaced_goes_on_with_the_new_one(north: Town, east: Town) -> None:
    bob = east.office("bob")
    ada = north.office("ada", Write("bob", "hi", universe="east"))
    replaced = Door(memory(north))
    replaced.close_door(StoreReplaced(path="x"))
    shelf = Shelf(url=replaced)
    fabric = Fabric(
        north.store,
        universe="north",
        worker="pool",
        peers={"east": "url"},
        open=shelf.open,
        clock=north.clock,
    )
    role = north.booted(RunnerRole(fabric.runners))
    north.work(role)
    shelf.stores["url"] = east.store
    north.work(role, seconds=5)
    east.think()
    assert shelf.opened == ["url", "url"]
    assert bob.state().read == ["hi"]
    assert ada.state().told == ["ok"]


# -- in threads ----------------------------------------------------------------------------------


def test_a_store_that_hangs_holds_up_nobody_but_its_own_mail() -> None:
    let_go = threading.Event()

    class Hanging(Door):
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
            assert west.read(catalog.find, "west", "Office", "bob") is not None
            assert east.read(catalog.find, "east", "Office", "bob") is None
        finally:
            let_go.set()
        until(lambda: ada.state().told == ["ok", "ok"], "the receipt of mail to the east", WAIT_S)
        assert east.read(catalog.find, "east", "Office", "bob") is not None
