"""Unknown events: two app versions share a store, and an item that one version does not declare
waits for a worker of the other (I7)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import holdfast as hf
from holdfast import codec
from holdfast.app.world_handle import WorldHandle
from holdfast.clock import S
from holdfast.durable import lease, queue
from holdfast.errors import Invalid, Timeout, UnknownEvent
from holdfast.leadership import declarations, worker_registry
from holdfast.messages import FABRIC_SEND, FabricSendParams, Intent, event_ingress
from holdfast.workers.effects.pool import EffectWorkerPool
from holdfast.workers.orchestrator import Orchestrator
from holdfast.workers.readiness_facts import read_readiness
from holdfast.workers.timers.worker import TimerWorker
from holdfast.world import catalog, redrive, unknown_events
from holdfast.world.catalog import WorldEvent as Change
from holdfast.world.cycle import FailedEvent, commit
from holdfast.world.ingress import deliver_by_id
from holdfast.world.messaging.delivery import DeliveryResult, accept_many, make_receipt
from holdfast.world.reducer import WorldSpec
from holdfast.world.restore import check_snapshots, restore
from holdfast.world.unknown_events import InboxItemStatus
from tests.world.rig import make_backend
from tests.world.two_version_rig import TwoVersionRig
from tests.world.versions import EmissionRequested, Kept, Named, New, Old, new, old

MODULES = (
    "holdfast.world.unknown_events",
    "holdfast.world.code_requirement",
    "holdfast.leadership.declarations",
)

WAIT_S = 3600.0


@pytest.fixture(params=["memory", "postgres"])
def version_rig(request: pytest.FixtureRequest) -> Iterator[TwoVersionRig]:
    two_version_rig = TwoVersionRig(make_backend(request.param))
    yield two_version_rig
    two_version_rig.store.close()


@pytest.fixture
def memory_rig() -> TwoVersionRig:
    return TwoVersionRig()


def outcomes(handle: WorldHandle[Any]) -> list[tuple[str, str]]:
    return [(one.type, one.outcome) for one in handle.journal()]


def redrive_all(version_rig: TwoVersionRig) -> None:
    letters = [letter.seq for letter in version_rig.failed_events()]
    version_rig.store.transact(queue.redrive, redrive.failed_events_queue("desk"), letters)
    version_rig.tick_until_idle()


# -- stop and resume -------------------------------------------------------------------------------


def test_world_stops_before_an_unknown_event_until_a_worker_declares_it(
    version_rig: TwoVersionRig,
) -> None:
    version_rig.start_worker("A", old.app)
    for event in (Kept("1"), New("2"), Kept("3")):
        version_rig.new_desk().send(event)
    version_rig.tick_until_idle()
    desk = version_rig.new_desk()
    assert desk.state().seen == ["kept 1"]
    assert (version_rig.cursor(desk), version_rig.inbox_depth(desk)) == (1, 2)
    # The world is released: no lease, no assignment, no runnable mark.
    held = version_rig.store.read(lease.current_status, version_rig.subject(desk))
    assert held is not None
    assert held.state is lease.LeaseState.FREE
    assert version_rig.store.read(catalog.find_assignment, "desk", version_rig.id(desk)) is None
    assert version_rig.runnable("A") == []
    assert version_rig.runnable(catalog.UNASSIGNED) == []
    version_rig.start_worker("B", new.app)
    assert desk.state().seen == ["kept 1", "new 2", "kept 3"]
    assert outcomes(desk) == [("Kept", "ok"), ("New", "ok"), ("Kept", "ok")]
    assert version_rig.record(desk).unknown is None
    assert version_rig.record(desk).blocked_by is None


def test_workers_of_two_versions_alternate_on_one_inbox(version_rig: TwoVersionRig) -> None:
    version_rig.start_worker("A", old.app)
    version_rig.start_worker("B", new.app)
    for turn in range(6):
        (version_rig.desk() if turn % 2 else version_rig.new_desk()).send(
            (Old if turn % 2 else New)(str(turn))
        )
    version_rig.tick_until_idle()
    assert version_rig.desk().state().seen == ["new 0", "old 1", "new 2", "old 3", "new 4", "old 5"]


def test_stopped_world_is_not_leased_to_workers_without_the_type(memory_rig: TwoVersionRig) -> None:
    memory_rig.start_worker("A", old.app)
    memory_rig.new_desk().send(New())
    memory_rig.tick_until_idle()
    epoch = lease_epoch(memory_rig)
    memory_rig.start_worker("C", old.app)
    memory_rig.new_desk().send(Kept())
    memory_rig.advance_with_heartbeats(600)
    assert lease_epoch(memory_rig) == epoch, "it was leased again"
    assert (
        memory_rig.runnable("A")
        == memory_rig.runnable("C")
        == memory_rig.runnable(catalog.UNASSIGNED)
        == []
    )


def lease_epoch(version_rig: TwoVersionRig) -> int:
    held = version_rig.store.read(lease.current_status, version_rig.subject(version_rig.desk()))
    assert held is not None
    return held.epoch


@pytest.mark.parametrize("what", ["timer", "effect", "mail", "post"])
def test_unknown_items_of_new_code_wait_after_a_rollback(
    memory_rig: TwoVersionRig, what: str
) -> None:
    """A worker of the first version finds a timer, a receipt, mail or a posted payload of the
    second."""
    memory_rig.start_worker("B", new.app)
    desk = memory_rig.new_desk()
    desk.send(EmissionRequested(what))
    memory_rig.new_desk("other").create()
    memory_rig.new_desk("other").pause()
    memory_rig.tick_until_idle()
    memory_rig.stop_worker("B")
    memory_rig.start_worker("A", old.app)
    memory_rig.new_desk("other").resume()
    timers = TimerWorker(memory_rig.store, universe="desk", clock=memory_rig.clock)
    pool = EffectWorkerPool(
        memory_rig.store,
        universe="desk",
        adapters=new.app.effects,
        worker="pool",
        clock=memory_rig.clock,
        inline=True,
    )
    for runner in pool.runners:
        runner.boot()
    memory_rig.clock.advance(5 * S)
    timers.tick()
    for runner in pool.runners:
        runner.tick()
        runner.tick()
    memory_rig.tick_until_idle()
    where = memory_rig.new_desk("other") if what in ("mail", "post") else desk
    stopped = memory_rig.record(where)
    assert stopped.stopped, stopped
    assert "new" not in " ".join(where.state().seen)
    memory_rig.start_worker("B", new.app)
    assert where.state().seen[-1].startswith("new ")
    assert "ignored" not in dict(outcomes(where)).values()


def test_event_named_in_events_is_consumed_as_ignored(memory_rig: TwoVersionRig) -> None:
    memory_rig.start_worker("A", old.app)
    memory_rig.desk().send(Named())
    memory_rig.tick_until_idle()
    assert outcomes(memory_rig.desk()) == [("Named", "ignored")]


def test_unknown_world_type_waits_and_is_reported(memory_rig: TwoVersionRig) -> None:
    memory_rig.start_worker("A", old.app)
    extra = memory_rig.new_runtime.world(new.Extra, "x")
    extra.send(Kept())
    memory_rig.tick_until_idle()
    record = memory_rig.record(extra)
    assert record.blocked_by is not None
    assert "world type 'Extra'" in record.blocked_by.text
    # There is no timeout: without the code of the world type no entry can be journaled.
    memory_rig.advance_with_heartbeats(2 * WAIT_S)
    assert memory_rig.inbox_depth(extra) == 1
    assert memory_rig.failed_events() == []
    memory_rig.start_worker("B", new.app)
    assert extra.state().count == 1
    assert memory_rig.record(extra).unknown is None


def test_worlds_of_a_dead_worker_move_only_to_workers_of_their_type(
    memory_rig: TwoVersionRig,
) -> None:
    memory_rig.start_worker("A", old.app)
    memory_rig.start_worker("B", new.app)
    extra = memory_rig.new_runtime.world(new.Extra, "x")
    extra.send(Kept())
    memory_rig.tick_until_idle()
    memory_rig.kill_worker("B")
    extra.send(Kept())
    memory_rig.tick_until_idle()
    assert extra.state().count == 1
    assert memory_rig.inbox_depth(extra) == 1
    memory_rig.start_worker("C", new.app)
    assert extra.state().count == 2


def test_second_stop_at_the_same_event_keeps_its_start_time(memory_rig: TwoVersionRig) -> None:
    memory_rig.start_worker("A", old.app)
    memory_rig.new_desk().send(New())
    memory_rig.tick_until_idle()
    since_ns = memory_rig.record(memory_rig.desk()).unknown.since_ns  # type: ignore[union-attr]
    # This worker declares the event, but its code does not have it.
    false_worker = memory_rig.worker("B", "1", app=old.app)
    false_worker._declaration = declarations.make_declaration(
        {
            "VersionedDesk": {"event:New": 1, "event:Kept": 1}
        }  # the declaration of the second version
    )
    false_worker._code_digest = declarations.digest(false_worker._declaration)
    memory_rig.workers["B"] = false_worker
    memory_rig.clock.advance(60 * S)
    false_worker.tick()
    memory_rig.leader.tick()
    memory_rig.clock.advance(S)
    del memory_rig.workers["A"]
    false_worker.tick()
    again = memory_rig.record(memory_rig.desk()).unknown
    assert again is not None
    assert again.since_ns == since_ns


def test_world_with_unknown_journal_events_waits_for_code_that_replays_them(
    version_rig: TwoVersionRig,
) -> None:
    """A killed worker leaves no snapshot. The journal tail holds events that the next version does
    not declare."""
    version_rig.start_worker("A", old.app)
    version_rig.desk().send(Old("1"))
    version_rig.tick_until_idle()
    version_rig.kill_worker("A")
    version_rig.start_worker("B", new.app)
    desk = version_rig.new_desk()
    desk.send(Kept("2"))
    version_rig.tick_until_idle()
    blocker = version_rig.record(desk).blocked_by
    assert blocker is not None
    assert "'Old'; its journal" in blocker.text
    with pytest.raises(UnknownEvent):
        desk.state()
    # There is no timeout: there is no inbox item to give up.
    version_rig.advance_with_heartbeats(WAIT_S + 60)
    assert version_rig.failed_events() == []
    assert version_rig.record(desk).stopped
    version_rig.start_worker("A", old.app)
    assert version_rig.desk().state().seen == ["old 1", "kept 2"]
    version_rig.stop_worker("A")
    # The worker left a snapshot, so the next version does not replay events it does not declare.
    desk.send(New("3"))
    version_rig.tick_until_idle()
    assert desk.state().seen == ["old 1", "kept 2", "new 3"]


def test_pinned_world_waits_until_its_worker_declares_the_event(memory_rig: TwoVersionRig) -> None:
    memory_rig.start_worker("A", old.app)
    memory_rig.start_worker("B", new.app)
    desk = memory_rig.new_desk()
    memory_rig.store.transact(catalog.assign, "desk", memory_rig.id(desk), "A", 0, "by hand", True)
    desk.send(New("1"))
    memory_rig.tick_until_idle()
    desk.send(Kept("2"))
    memory_rig.advance_with_heartbeats(60)
    assert memory_rig.record(desk).stopped
    assert desk.state().seen == []
    assert memory_rig.runnable("A") == []
    memory_rig.stop_worker("A")
    memory_rig.start_worker("A", new.app)
    assert desk.state().seen == ["new 1", "kept 2"]


def test_paused_stopped_world_costs_the_leader_no_commit(memory_rig: TwoVersionRig) -> None:
    memory_rig.start_worker("A", old.app)
    desk = memory_rig.new_desk()
    desk.send(New("1"))
    memory_rig.tick_until_idle()
    desk.pause()
    memory_rig.start_worker("B", new.app)
    before = memory_rig.backend.commits
    for _ in range(5):
        memory_rig.leader.tick()
    assert memory_rig.backend.commits == before
    desk.resume()
    memory_rig.tick_until_idle()
    assert desk.state().seen == ["new 1"]


def test_deleted_world_is_not_listed_as_stopped(memory_rig: TwoVersionRig) -> None:
    memory_rig.start_worker("A", old.app)
    desk = memory_rig.new_desk()
    desk.send(New())
    memory_rig.tick_until_idle()
    assert memory_rig.store.read(unknown_events.list_stopped, "desk", 10) == [memory_rig.id(desk)]
    desk.delete()
    assert memory_rig.store.read(unknown_events.list_stopped, "desk", 10) == []


# -- give-up and redrive ---------------------------------------------------------------------------


def test_unknown_event_becomes_a_dead_letter_after_its_timeout_and_can_be_redriven(
    version_rig: TwoVersionRig,
) -> None:
    version_rig.start_worker("A", old.app)
    desk = version_rig.new_desk()
    for event in (Kept("1"), New("2"), Kept("3")):
        desk.send(event, key=f"k{type(event).__name__}{event.text}")
    version_rig.tick_until_idle()
    version_rig.advance_with_heartbeats(WAIT_S - 60)
    assert version_rig.failed_events() == []
    assert version_rig.inbox_depth(desk) == 2
    version_rig.advance_with_heartbeats(60)
    [letter] = version_rig.failed_events()
    assert letter.code == "unknown_event"
    assert codec.unpack_as(redrive.FailedEventRow, letter.payload).key == "user:kNew2"
    assert outcomes(desk) == [("Kept", "ok"), ("New", "unknown"), ("Kept", "ok")]
    assert version_rig.record(desk).unknown is None
    version_rig.stop_worker("A")
    version_rig.start_worker("B", new.app)
    assert desk.state().seen == ["kept 1", "kept 3"]
    redrive_all(version_rig)
    assert desk.state().seen == ["kept 1", "kept 3", "new 2"]
    assert version_rig.failed_events() == []
    # The whole journal replays without divergence.
    assert version_rig.store.read(check_snapshots, version_rig.world_spec(desk, new.app)) > 0


def test_redriven_unknown_event_starts_a_new_wait(memory_rig: TwoVersionRig) -> None:
    memory_rig.start_worker("A", old.app)
    desk = memory_rig.new_desk()
    desk.send(New("1"))
    memory_rig.tick_until_idle()
    memory_rig.advance_with_heartbeats(WAIT_S)
    redrive_all(memory_rig)
    assert memory_rig.record(desk).stopped
    assert memory_rig.failed_events() == []
    memory_rig.advance_with_heartbeats(WAIT_S - 60)
    assert memory_rig.failed_events() == []
    memory_rig.advance_with_heartbeats(60)
    assert len(memory_rig.failed_events()) == 1


def test_unknown_events_behind_a_given_up_one_share_its_wait(version_rig: TwoVersionRig) -> None:
    version_rig.start_worker("A", old.app)
    desk = version_rig.new_desk()
    for text in "123":
        desk.send(New(text))
    desk.send(Kept("4"))
    version_rig.tick_until_idle()
    version_rig.advance_with_heartbeats(1800)
    desk.send(New("5"))
    desk.send(Kept("6"))
    version_rig.advance_with_heartbeats(1800)
    assert len(version_rig.failed_events()) == 3
    # This event arrived later and has its own timeout.
    assert desk.state().seen == ["kept 4"]
    version_rig.advance_with_heartbeats(1200)
    assert len(version_rig.failed_events()) == 4
    assert desk.state().seen == ["kept 4", "kept 6"]


def test_wait_for_unknown_events_restarts_after_a_capable_host(memory_rig: TwoVersionRig) -> None:
    memory_rig.start_worker("A", old.app)
    desk = memory_rig.new_desk()
    desk.send(New("1"))
    memory_rig.tick_until_idle()
    memory_rig.advance_with_heartbeats(WAIT_S)
    assert len(memory_rig.failed_events()) == 1
    memory_rig.start_worker("B", new.app)
    desk.send(New("2"))
    memory_rig.tick_until_idle()
    assert desk.state().seen == ["new 2"]
    memory_rig.stop_worker("B")
    desk.send(New("3"))
    memory_rig.tick_until_idle()
    memory_rig.advance_with_heartbeats(1800)
    assert len(memory_rig.failed_events()) == 1
    memory_rig.advance_with_heartbeats(1800)
    assert len(memory_rig.failed_events()) == 2


def test_unknown_event_is_not_given_up_while_a_capable_worker_is_live(
    memory_rig: TwoVersionRig,
) -> None:
    memory_rig.start_worker("A", old.app)
    desk = memory_rig.new_desk()
    desk.send(New("1"))
    memory_rig.tick_until_idle()
    desk.pause()
    memory_rig.start_worker("B", new.app)
    memory_rig.advance_with_heartbeats(2 * WAIT_S)
    desk.resume()
    memory_rig.tick_until_idle()
    assert desk.state().seen == ["new 1"]
    assert memory_rig.failed_events() == []


@pytest.mark.parametrize("down_s", [0, 7200])
def test_new_leader_waits_for_heartbeats_before_giving_up_an_event(
    memory_rig: TwoVersionRig, down_s: int
) -> None:
    memory_rig.start_worker("A", old.app)
    desk = memory_rig.new_desk()
    desk.send(New("1"))
    memory_rig.tick_until_idle()
    if down_s:
        # All processes stop and restart after the timeout of the item.
        memory_rig.stop_worker("A")
        memory_rig.leader.shut_down()
        memory_rig.clock.advance(down_s * S)
        memory_rig.start_worker("A", old.app)
    else:
        # The leader changes while the world is paused and a live worker declares the item.
        desk.pause()
        memory_rig.start_worker("B", new.app)
        memory_rig.advance_with_heartbeats(2 * WAIT_S)
        memory_rig.leader.shut_down()
        memory_rig.leader = Orchestrator(
            memory_rig.store, universe="desk", worker="O2", incarnation="2", clock=memory_rig.clock
        )
        desk.resume()
        memory_rig.leader.tick()
        memory_rig.workers["A"].tick()
        memory_rig.leader.tick()
        memory_rig.workers["A"].tick()
    memory_rig.clock.advance(S)
    if down_s:
        memory_rig.start_worker("B", new.app)
    memory_rig.tick_until_idle()
    assert desk.state().seen == ["new 1"]
    assert memory_rig.failed_events() == []


def test_commit_refuses_a_dead_letter_of_an_event_not_given_up(memory_rig: TwoVersionRig) -> None:
    memory_rig.start_worker("A", old.app)
    desk = memory_rig.new_desk()
    desk.send(New("1"))
    memory_rig.tick_until_idle()
    host = memory_rig.worker("A", memory_rig.workers["A"].incarnation)
    record = memory_rig.record(desk)
    held = memory_rig.store.transact(
        lease.acquire, memory_rig.subject(desk), "A", memory_rig.workers["A"].incarnation, 10 * S
    )
    made = host._hosted._new_host(record, held, old.app.programs["VersionedDesk"])
    made._stop = catalog.StopReason("event", "New", 1, 1, 0, waits=False, given_up=True)
    cycle = made.prepare(memory_rig.store)
    assert cycle is not None
    assert cycle.failed == [
        FailedEvent(1, cycle.failed[0].body, cycle.failed[0].error, "unknown_event", "New")
    ]
    [answer] = memory_rig.store.transact(commit, [cycle])
    assert answer is not None
    assert answer[1]["why"] == "no worker has given this unknown event up; it stays in the inbox"


# -- results for senders ---------------------------------------------------------------------------


def test_send_with_a_repeated_key_reports_the_status_of_its_event(
    version_rig: TwoVersionRig,
) -> None:
    version_rig.start_worker("A", old.app)
    desk = version_rig.new_desk()
    first = desk.send(New("1"), key="k")
    assert (first.status, first.waits_for) == ("accepted", "")
    version_rig.tick_until_idle()
    again = desk.send(New("1"), key="k")
    assert (again, again.status, again.waits_for) == (first, "waiting", "New")
    version_rig.advance_with_heartbeats(WAIT_S)
    with pytest.raises(UnknownEvent) as raised:
        desk.send(New("1"), key="k")
    assert (raised.value.type, raised.value.queue) == ("New", redrive.failed_events_queue("desk"))
    assert raised.value.letter == version_rig.failed_events()[0].seq
    with pytest.raises(UnknownEvent):
        desk.ask(New("1"), key="k", timeout=0)
    version_rig.start_worker("B", new.app)
    redrive_all(version_rig)
    assert desk.send(New("1"), key="k").status == "handled"
    assert desk.ask(New("1"), key="k", timeout=0) == "new 1"


def test_discarded_dead_letter_of_an_unknown_event_still_raises(memory_rig: TwoVersionRig) -> None:
    memory_rig.start_worker("A", old.app)
    desk = memory_rig.new_desk()
    desk.send(New("1"), key="k")
    memory_rig.tick_until_idle()
    memory_rig.advance_with_heartbeats(WAIT_S)
    memory_rig.store.transact(
        queue.discard_dead, redrive.failed_events_queue("desk"), [memory_rig.failed_events()[0].seq]
    )
    with pytest.raises(UnknownEvent):
        desk.send(New("1"), key="k")


def test_send_with_a_repeated_key_reports_a_failed_handler(memory_rig: TwoVersionRig) -> None:
    memory_rig.start_worker("A", old.app)
    memory_rig.desk().send(EmissionRequested("wrong mail"), key="k")
    memory_rig.tick_until_idle()
    assert memory_rig.desk().send(EmissionRequested("wrong mail"), key="k").status == "failed"


def test_ask_timeout_names_the_event_a_stopped_world_waits_for(memory_rig: TwoVersionRig) -> None:
    memory_rig.start_worker("A", old.app)
    memory_rig.new_desk().send(New("1"))
    memory_rig.tick_until_idle()
    with pytest.raises(Timeout) as raised:
        memory_rig.desk().ask(Kept("2"), timeout=0)
    assert raised.value.waits_for == "New"


def test_duplicate_mail_receipt_reports_a_dead_letter(memory_rig: TwoVersionRig) -> None:
    memory_rig.start_worker("A", old.app)
    desk = memory_rig.new_desk()
    desk.create()
    params = FabricSendParams(
        dest_world=memory_rig.id(desk), schema="New", value_cbor=new.app.encode_event(New("1"))[1]
    )
    packed = codec.pack(params)
    intent = Intent(
        universe_id="desk",
        world_id="w",
        intent_hash=b"i" * 32,
        effect_kind=FABRIC_SEND,
        params=packed,
        origin_name="w",
        policy_context_hash=b"",
        enqueued_at_ns=0,
        from_height=1,
    )

    def accept() -> DeliveryResult:
        [found] = memory_rig.store.transact(accept_many, [(intent, 0)])
        return found

    assert accept() == DeliveryResult("ok", memory_rig.id(desk), 1)
    memory_rig.tick_until_idle()
    assert memory_rig.store.read(
        unknown_events.item_status, "desk", memory_rig.id(desk), 1
    ) == InboxItemStatus("waiting", 1, "New")
    assert accept() == DeliveryResult("already_enqueued", memory_rig.id(desk), 1)
    memory_rig.advance_with_heartbeats(WAIT_S)
    letter = memory_rig.failed_events()[0].seq
    assert memory_rig.store.read(
        unknown_events.item_status, "desk", memory_rig.id(desk), 1
    ) == InboxItemStatus("dead", 1, "New", letter)
    duplicate = accept()
    assert (duplicate.status, duplicate.seq, duplicate.code) == (
        "already_enqueued",
        1,
        "unknown_event",
    )
    assert make_receipt(intent, params, duplicate).code == "unknown_event"


# -- checks at send --------------------------------------------------------------------------------


def test_send_and_ask_refuse_events_unknown_to_the_senders_code(
    memory_rig: TwoVersionRig,
) -> None:
    desk = memory_rig.desk()
    for call in (desk.send, desk.ask):
        with pytest.raises(Invalid, match="New"):
            call(New())
    extra = memory_rig.new_runtime.world(new.Extra, "x")
    # The second version handles the event in another world type.
    for call in (extra.send, extra.ask):
        with pytest.raises(Invalid, match="events="):
            call(New())
    with pytest.raises(Invalid, match="events="):
        memory_rig.new_runtime.send_many([(extra, New())])
    extra.send(Named())


@pytest.mark.parametrize("what", ["mail", "timer", "post", "effect"])
def test_reducer_that_emits_undeclared_items_fails(memory_rig: TwoVersionRig, what: str) -> None:
    memory_rig.start_worker("A", old.app)
    memory_rig.desk().send(EmissionRequested(f"wrong {what}"))
    memory_rig.tick_until_idle()
    assert outcomes(memory_rig.desk()) == [("EmissionRequested", "failed")]
    assert [letter.code for letter in memory_rig.failed_events()] == ["reducer_failed"]
    assert "invalid" in memory_rig.failed_events()[0].error


def test_caught_undeclared_error_still_fails_its_event(memory_rig: TwoVersionRig) -> None:
    """Otherwise a replay by code that declares the event would send it."""
    memory_rig.start_worker("A", old.app)
    memory_rig.desk().send(EmissionRequested("caught"))
    memory_rig.tick_until_idle()
    assert outcomes(memory_rig.desk()) == [("EmissionRequested", "failed")]
    assert memory_rig.desk().state().seen == []


@pytest.mark.parametrize("call", ["send_to", "fabric.send"])
def test_mail_by_id_that_its_recipient_does_not_handle_fails_the_event(
    version_rig: TwoVersionRig, call: str
) -> None:
    """The recipient's world type is found by its id. This code has the type, and the type does not
    handle the event."""
    version_rig.start_worker("B", new.app)
    extra, desk = version_rig.new_runtime.world(new.Extra, "x"), version_rig.new_desk()
    extra.send(Kept())
    desk.send(Kept("1"))
    version_rig.tick_until_idle()
    desk.send(EmissionRequested(f"{call} {version_rig.id(extra)}"))
    extra.send(Kept())
    desk.send(Kept("2"))
    version_rig.tick_until_idle()
    assert outcomes(desk) == [("Kept", "ok"), ("EmissionRequested", "failed"), ("Kept", "ok")]
    [letter] = version_rig.failed_events()
    assert (letter.code, "Extra" in letter.error) == ("reducer_failed", True)
    assert "events=" in letter.error
    # The recipient received nothing and is not stopped.
    assert outcomes(extra) == [("Kept", "ok"), ("Kept", "ok")]
    assert not version_rig.record(extra).stopped
    # The replay gives the same result.
    assert version_rig.store.read(restore, version_rig.world_spec(desk, new.app)).height == 3


@pytest.mark.parametrize("call", ["send_to", "fabric.send"])
def test_mail_by_id_is_delivered_when_handled_or_type_is_unknown(
    memory_rig: TwoVersionRig, call: str
) -> None:
    memory_rig.start_worker("B", new.app)
    desk = memory_rig.new_desk()
    desk.send(Kept())
    memory_rig.tick_until_idle()
    # Mail to itself, and mail to an unknown id: the mail's receipt reports the latter.
    desk.send(EmissionRequested(f"{call} {memory_rig.id(desk)}"))
    desk.send(EmissionRequested(f"{call} nowhere"))
    memory_rig.tick_until_idle()
    assert [outcome for _, outcome in outcomes(desk)].count("failed") == 0
    assert "new by id" in desk.state().seen
    extra = memory_rig.new_runtime.world(new.Extra, "x")
    extra.send(Kept())
    memory_rig.tick_until_idle()
    memory_rig.stop_worker("B")
    # The first version does not have the recipient's type, so only its declared events are checked.
    memory_rig.start_worker("A", old.app)
    memory_rig.desk("o").send(EmissionRequested(f"{call} {memory_rig.id(extra)}"))
    memory_rig.tick_until_idle()
    assert outcomes(memory_rig.desk("o")) == [("EmissionRequested", "ok")]


@pytest.mark.parametrize("what", ["mail", "timer", "post", "effect"])
def test_replay_accepts_recorded_intents_that_code_no_longer_declares(
    memory_rig: TwoVersionRig, what: str
) -> None:
    memory_rig.start_worker("B", new.app)
    desk = memory_rig.new_desk()
    desk.send(EmissionRequested(what))
    memory_rig.tick_until_idle()

    program = new.app.programs["VersionedDesk"]
    dropped = hf.App("desk", worlds=[], version="dropped")
    # The reducers of the second version in an app that declares none of their emitted items.
    bare = type(program)("VersionedDesk", "3", program.state, program.events, program.handlers)
    bare.declared_versions = {("event", "EmissionRequested"): 1}
    dropped.programs["VersionedDesk"] = bare
    code = WorldSpec("desk", memory_rig.id(desk), "d", bare, dropped)
    assert memory_rig.store.read(restore, code).height == 1


# -- readiness -------------------------------------------------------------------------------------


def test_readiness_lists_stopped_worlds_with_reason(memory_rig: TwoVersionRig) -> None:
    memory_rig.start_worker("A", old.app)
    memory_rig.new_desk().send(New())
    memory_rig.tick_until_idle()
    readiness = read_readiness(memory_rig.store, "desk")
    assert readiness.ready, "a stopped world does not make its universe unready"
    [subject] = readiness.subjects
    [reason] = subject.reasons
    assert (subject.name, reason.code) == ("VersionedDesk/d", "unknown_event")
    assert "'New'" in reason.text
    assert reason.since_ns > 0
    memory_rig.store.transact(
        catalog.change_status, "desk", memory_rig.id(memory_rig.desk()), Change.PAUSE
    )
    [subject] = read_readiness(memory_rig.store, "desk").subjects
    assert {reason.code for reason in subject.reasons} == {"world_paused", "unknown_event"}
    assert read_readiness(memory_rig.store, "desk").subjects_omitted == 0
    memory_rig.store.transact(
        catalog.change_status, "desk", memory_rig.id(memory_rig.desk()), Change.RESUME
    )
    memory_rig.start_worker("B", new.app)
    assert read_readiness(memory_rig.store, "desk").subjects == []


def test_unknown_event_put_directly_into_the_inbox_waits_too(memory_rig: TwoVersionRig) -> None:
    memory_rig.start_worker("A", old.app)
    desk = memory_rig.desk()
    desk.create()
    memory_rig.store.transact(
        deliver_by_id, "desk", memory_rig.id(desk), None, event_ingress("Alien", b"\x01\x80")
    )
    memory_rig.tick_until_idle()
    assert memory_rig.record(desk).stopped


# -- declarations of workers -----------------------------------------------------------------------


def test_declaration_lists_types_causes_and_versions() -> None:
    found = declarations.make_declaration(
        {"A": {"event:X": 2, "event:Y": 1}, "B": {"event:X": 2, "receipt:fx": 0}}
    )
    assert found.common == {"event:X": 2}
    assert found.declares("A", "event:X", 2)
    assert not found.declares("A", "event:X", 3)
    assert found.declares("B", "receipt:fx", 0)
    assert not found.declares("B", "event:Y", 1)
    assert found.has_world_type("A")
    assert not found.has_world_type("C")
    assert not found.declares("C", "event:X", 1)
    assert declarations.make_declaration({}).common == {}


def test_collected_declaration_is_stored_again(memory_rig: TwoVersionRig) -> None:
    worker = memory_rig.start_worker("A", old.app)
    code = memory_rig.store.read(worker_registry.find, "desk", "A").code
    assert code
    assert memory_rig.store.read(declarations.is_stored, "desk", code)
    assert memory_rig.store.transact(declarations.remove_unreferenced, "desk", [code], 100) == 0
    assert memory_rig.store.transact(declarations.remove_unreferenced, "desk", [], 100) == 1
    memory_rig.clock.advance(2 * S)
    worker.tick()
    assert memory_rig.store.read(worker_registry.find, "desk", "A").code == ""
    memory_rig.clock.advance(2 * S)
    worker.tick()
    assert memory_rig.store.read(worker_registry.find, "desk", "A").code == code


def test_leader_removes_unreferenced_declarations(memory_rig: TwoVersionRig) -> None:
    memory_rig.start_worker("A", old.app)
    memory_rig.start_worker("B", new.app)
    gone = memory_rig.store.read(worker_registry.find, "desk", "B").code
    memory_rig.stop_worker("B")
    memory_rig.advance_with_heartbeats(60)
    assert not memory_rig.store.read(declarations.is_stored, "desk", gone)


# -- the result of `send` --------------------------------------------------------------------------


def test_delivery_is_encoded_as_a_number(memory_rig: TwoVersionRig) -> None:
    memory_rig.start_worker("A", old.app)
    found = memory_rig.desk().send(Kept("1"))
    assert codec.unpack(codec.pack({"seq": found, "all": [found]})) == {"seq": 1, "all": [1]}
    with pytest.raises(TypeError, match="object is unsupported"):
        codec.pack(object())
