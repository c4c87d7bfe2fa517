"""Two versions of an app on one store: what one of them does not know waits for the other (I7)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import holdfast as hf
from holdfast import codec
from holdfast.app.handle import WorldHandle
from holdfast.authority import declarations, workers
from holdfast.clock import S
from holdfast.durable import lease, queue
from holdfast.errors import Invalid, Timeout, UnknownEvent
from holdfast.messages import FABRIC_SEND, FabricSendParams, Intent, event_ingress
from holdfast.roles.adapter import AdapterPool
from holdfast.roles.orchestrator import Orchestrator
from holdfast.roles.readiness import look
from holdfast.roles.timer_worker import TimerWorker
from holdfast.world import catalog, redrive, unknown
from holdfast.world.catalog import Event as Change
from holdfast.world.cycle import Failed, commit
from holdfast.world.fabric import Accepted, accept_many, receipt_of
from holdfast.world.ingress import enqueue
from holdfast.world.kernel import World
from holdfast.world.restore import check_snapshots, restore
from holdfast.world.unknown import Item
from tests.world.rig import rows_on
from tests.world.town import Town
from tests.world.versions import Asked, Kept, Named, New, Old, new, old

MODULES = ("holdfast.world.unknown", "holdfast.world.need", "holdfast.authority.declarations")

WAIT_S = 3600.0


@pytest.fixture(params=["memory", "postgres"])
def town(request: pytest.FixtureRequest) -> Iterator[Town]:
    made = Town(rows_on(request.param))
    yield made
    made.store.close()


@pytest.fixture
def sim() -> Town:
    return Town()


def outcomes(handle: WorldHandle[Any]) -> list[tuple[str, str]]:
    return [(one.type, one.outcome) for one in handle.journal()]


def redrive_all(town: Town) -> None:
    letters = [letter.seq for letter in town.dead()]
    town.store.transact(queue.redrive, redrive.failures("desk"), letters)
    town.go_on()


# -- stopping and going on -------------------------------------------------------------------------


def test_a_world_stops_before_an_unknown_event_and_goes_on_where_it_is_known(town: Town) -> None:
    town.start("A", old.app)
    for event in (Kept("1"), New("2"), Kept("3")):
        town.later().send(event)
    town.go_on()
    desk = town.later()
    assert desk.state().seen == ["kept 1"]
    assert (town.cursor(desk), town.depth(desk)) == (1, 2)
    # It is given back: no lease, no assignment, no hint.
    held = town.store.read(lease.current, town.subject(desk))
    assert held is not None
    assert held.state is lease.State.FREE
    assert town.store.read(catalog.assignment, "desk", town.id(desk)) is None
    assert town.hints("A") == []
    assert town.hints(catalog.NOBODY) == []
    town.start("B", new.app)
    assert desk.state().seen == ["kept 1", "new 2", "kept 3"]
    assert outcomes(desk) == [("Kept", "ok"), ("New", "ok"), ("Kept", "ok")]
    assert town.record(desk).unknown is None
    assert town.record(desk).blocked_by is None


def test_versions_take_turns_over_one_inbox(town: Town) -> None:
    town.start("A", old.app)
    town.start("B", new.app)
    for turn in range(6):
        (town.desk() if turn % 2 else town.later()).send((Old if turn % 2 else New)(str(turn)))
    town.go_on()
    assert town.desk().state().seen == ["new 0", "old 1", "new 2", "old 3", "new 4", "old 5"]


def test_a_stopped_world_is_offered_to_no_worker_that_does_not_know_the_type(sim: Town) -> None:
    sim.start("A", old.app)
    sim.later().send(New())
    sim.go_on()
    epoch = _epoch(sim)
    sim.start("C", old.app)
    sim.later().send(Kept())
    sim.wait(600)
    assert _epoch(sim) == epoch, "it was leased again"
    assert sim.hints("A") == sim.hints("C") == sim.hints(catalog.NOBODY) == []


def _epoch(town: Town) -> int:
    held = town.store.read(lease.current, town.subject(town.desk()))
    assert held is not None
    return held.epoch


@pytest.mark.parametrize("what", ["timer", "effect", "mail", "post"])
def test_what_new_code_wanted_waits_after_a_rollback_for_new_code(sim: Town, what: str) -> None:
    """A timer, a receipt, mail and a posted payload of the second version, met by the first."""
    sim.start("B", new.app)
    desk = sim.later()
    desk.send(Asked(what))
    sim.later("other").create()
    sim.later("other").pause()
    sim.go_on()
    sim.stop("B")
    sim.start("A", old.app)
    sim.later("other").resume()
    timers = TimerWorker(sim.store, universe="desk", clock=sim.clock)
    pool = AdapterPool(
        sim.store,
        universe="desk",
        adapters=new.app.effects,
        worker="pool",
        clock=sim.clock,
        inline=True,
    )
    for runner in pool.runners:
        runner.boot()
    sim.clock.advance(5 * S)
    timers.tick()
    for runner in pool.runners:
        runner.tick()
        runner.tick()
    sim.go_on()
    where = sim.later("other") if what in ("mail", "post") else desk
    stopped = sim.record(where)
    assert stopped.stopped, stopped
    assert "new" not in " ".join(where.state().seen)
    sim.start("B", new.app)
    assert where.state().seen[-1].startswith("new ")
    assert "ignored" not in dict(outcomes(where)).values()


def test_an_event_that_the_app_names_is_consumed_by_either_version(sim: Town) -> None:
    sim.start("A", old.app)
    sim.desk().send(Named())
    sim.go_on()
    assert outcomes(sim.desk()) == [("Named", "ignored")]


def test_a_world_type_that_no_worker_has_waits_and_is_shown(sim: Town) -> None:
    sim.start("A", old.app)
    extra = sim.newer.world(new.Extra, "x")
    extra.send(Kept())
    sim.go_on()
    record = sim.record(extra)
    assert record.blocked_by is not None
    assert "world type 'Extra'" in record.blocked_by.text
    # It is waited for as long as it takes: without its code nothing can be journaled.
    sim.wait(2 * WAIT_S)
    assert sim.depth(extra) == 1
    assert sim.dead() == []
    sim.start("B", new.app)
    assert extra.state().count == 1
    assert sim.record(extra).unknown is None


def test_worlds_of_a_dead_worker_move_only_to_workers_of_their_type(sim: Town) -> None:
    sim.start("A", old.app)
    sim.start("B", new.app)
    extra = sim.newer.world(new.Extra, "x")
    extra.send(Kept())
    sim.go_on()
    sim.kill("B")
    extra.send(Kept())
    sim.go_on()
    assert extra.state().count == 1
    assert sim.depth(extra) == 1
    sim.start("C", new.app)
    assert extra.state().count == 2


def test_a_worker_that_dies_before_the_item_starts_no_new_time(sim: Town) -> None:
    sim.start("A", old.app)
    sim.later().send(New())
    sim.go_on()
    since_ns = sim.record(sim.desk()).unknown.since_ns  # type: ignore[union-attr]
    # A worker that claims to know it, and has other code by the time it gets the world.
    liar = sim.worker("B", "1", app=old.app)
    liar._declaration = declarations.declaration(
        {"Desk": {"event:New": 1, "event:Kept": 1}}  # what the second version says
    )
    liar._code = declarations.digest(liar._declaration)
    sim.crew["B"] = liar
    sim.clock.advance(60 * S)
    liar.tick()
    sim.leader.tick()
    sim.clock.advance(S)
    del sim.crew["A"]
    liar.tick()
    again = sim.record(sim.desk()).unknown
    assert again is not None
    assert again.since_ns == since_ns


def test_a_journal_that_this_code_cannot_repeat_waits_for_code_that_can(town: Town) -> None:
    """A killed worker leaves no snapshot: its tail holds events that the next version has dropped."""
    town.start("A", old.app)
    town.desk().send(Old("1"))
    town.go_on()
    town.kill("A")
    town.start("B", new.app)
    desk = town.later()
    desk.send(Kept("2"))
    town.go_on()
    blocker = town.record(desk).blocked_by
    assert blocker is not None
    assert "'Old'; its journal" in blocker.text
    with pytest.raises(UnknownEvent):
        desk.state()
    # It is waited for as long as it takes: there is no item to give up.
    town.wait(WAIT_S + 60)
    assert town.dead() == []
    assert town.record(desk).stopped
    town.start("A", old.app)
    assert town.desk().state().seen == ["old 1", "kept 2"]
    town.stop("A")
    # It left a snapshot: the next version need not repeat what it does not know.
    desk.send(New("3"))
    town.go_on()
    assert desk.state().seen == ["old 1", "kept 2", "new 3"]


def test_a_pinned_world_waits_for_its_worker_to_know(sim: Town) -> None:
    sim.start("A", old.app)
    sim.start("B", new.app)
    desk = sim.later()
    sim.store.transact(catalog.assign, "desk", sim.id(desk), "A", 0, "by hand", True)
    desk.send(New("1"))
    sim.go_on()
    desk.send(Kept("2"))
    sim.wait(60)
    assert sim.record(desk).stopped
    assert desk.state().seen == []
    assert sim.hints("A") == []
    sim.stop("A")
    sim.start("A", new.app)
    assert desk.state().seen == ["new 1", "kept 2"]


def test_a_stopped_world_that_is_paused_costs_the_leader_no_commit(sim: Town) -> None:
    sim.start("A", old.app)
    desk = sim.later()
    desk.send(New("1"))
    sim.go_on()
    desk.pause()
    sim.start("B", new.app)
    before = sim.backend.commits
    for _ in range(5):
        sim.leader.tick()
    assert sim.backend.commits == before
    desk.resume()
    sim.go_on()
    assert desk.state().seen == ["new 1"]


def test_a_deleted_world_waits_for_nothing(sim: Town) -> None:
    sim.start("A", old.app)
    desk = sim.later()
    desk.send(New())
    sim.go_on()
    assert sim.store.read(unknown.stopped, "desk", 10) == [sim.id(desk)]
    desk.delete()
    assert sim.store.read(unknown.stopped, "desk", 10) == []


# -- giving up, and bringing back ------------------------------------------------------------------


def test_after_its_time_an_unknown_event_is_a_dead_letter_and_redrive_brings_it_back(
    town: Town,
) -> None:
    town.start("A", old.app)
    desk = town.later()
    for event in (Kept("1"), New("2"), Kept("3")):
        desk.send(event, key=f"k{type(event).__name__}{event.text}")
    town.go_on()
    town.wait(WAIT_S - 60)
    assert town.dead() == []
    assert town.depth(desk) == 2
    town.wait(60)
    [letter] = town.dead()
    assert letter.code == "unknown_event"
    assert codec.unpack_as(redrive.Letter, letter.payload).key == "user:kNew2"
    assert outcomes(desk) == [("Kept", "ok"), ("New", "unknown"), ("Kept", "ok")]
    assert town.record(desk).unknown is None
    town.stop("A")
    town.start("B", new.app)
    assert desk.state().seen == ["kept 1", "kept 3"]
    redrive_all(town)
    assert desk.state().seen == ["kept 1", "kept 3", "new 2"]
    assert town.dead() == []
    # Each entry comes out alike again, from the first on.
    assert town.store.read(check_snapshots, town.kernel(desk, new.app)) > 0


def test_time_begins_anew_for_an_item_that_was_redriven(sim: Town) -> None:
    sim.start("A", old.app)
    desk = sim.later()
    desk.send(New("1"))
    sim.go_on()
    sim.wait(WAIT_S)
    redrive_all(sim)
    assert sim.record(desk).stopped
    assert sim.dead() == []
    sim.wait(WAIT_S - 60)
    assert sim.dead() == []
    sim.wait(60)
    assert len(sim.dead()) == 1


def test_items_behind_one_that_was_given_up_have_waited_with_it(town: Town) -> None:
    town.start("A", old.app)
    desk = town.later()
    for text in "123":
        desk.send(New(text))
    desk.send(Kept("4"))
    town.go_on()
    town.wait(1800)
    desk.send(New("5"))
    desk.send(Kept("6"))
    town.wait(1800)
    assert len(town.dead()) == 3
    # This one came later, and has its own time.
    assert desk.state().seen == ["kept 4"]
    town.wait(1200)
    assert len(town.dead()) == 4
    assert desk.state().seen == ["kept 4", "kept 6"]


def test_the_time_begins_anew_after_another_host(sim: Town) -> None:
    sim.start("A", old.app)
    desk = sim.later()
    desk.send(New("1"))
    sim.go_on()
    sim.wait(WAIT_S)
    assert len(sim.dead()) == 1
    sim.start("B", new.app)
    desk.send(New("2"))
    sim.go_on()
    assert desk.state().seen == ["new 2"]
    sim.stop("B")
    desk.send(New("3"))
    sim.go_on()
    sim.wait(1800)
    assert len(sim.dead()) == 1
    sim.wait(1800)
    assert len(sim.dead()) == 2


def test_no_item_is_given_up_while_a_worker_that_knows_it_is_live(sim: Town) -> None:
    sim.start("A", old.app)
    desk = sim.later()
    desk.send(New("1"))
    sim.go_on()
    desk.pause()
    sim.start("B", new.app)
    sim.wait(2 * WAIT_S)
    desk.resume()
    sim.go_on()
    assert desk.state().seen == ["new 1"]
    assert sim.dead() == []


@pytest.mark.parametrize("down_s", [0, 7200])
def test_a_new_leader_hears_all_workers_before_it_gives_up(sim: Town, down_s: int) -> None:
    sim.start("A", old.app)
    desk = sim.later()
    desk.send(New("1"))
    sim.go_on()
    if down_s:
        # Everybody goes, and comes back after the item's time.
        sim.stop("A")
        sim.leader.finish()
        sim.clock.advance(down_s * S)
        sim.start("A", old.app)
    else:
        # A leader is followed by another while the world is paused and a worker knows the item.
        desk.pause()
        sim.start("B", new.app)
        sim.wait(2 * WAIT_S)
        sim.leader.finish()
        sim.leader = Orchestrator(
            sim.store, universe="desk", worker="O2", incarnation="2", clock=sim.clock
        )
        desk.resume()
        sim.leader.tick()
        sim.crew["A"].tick()
        sim.leader.tick()
        sim.crew["A"].tick()
    sim.clock.advance(S)
    if down_s:
        sim.start("B", new.app)
    sim.go_on()
    assert desk.state().seen == ["new 1"]
    assert sim.dead() == []


def test_the_store_refuses_a_dead_letter_of_an_item_that_was_not_given_up(sim: Town) -> None:
    sim.start("A", old.app)
    desk = sim.later()
    desk.send(New("1"))
    sim.go_on()
    host = sim.worker("A", sim.crew["A"].incarnation)
    record = sim.record(desk)
    held = sim.store.transact(
        lease.acquire, sim.subject(desk), "A", sim.crew["A"].incarnation, 10 * S
    )
    made = host._host(record, held, old.app.programs["Desk"])
    made._unknown = catalog.Unknown("event", "New", 1, 1, 0, waits=False, given_up=True)
    cycle = made.prepare(sim.store)
    assert cycle is not None
    assert cycle.failed == [
        Failed(1, cycle.failed[0].body, cycle.failed[0].error, "unknown_event", "New")
    ]
    [answer] = sim.store.transact(commit, [cycle])
    assert answer is not None
    assert answer[1]["why"] == "it was not given up"


# -- what senders are told -------------------------------------------------------------------------


def test_a_key_is_answered_with_what_became_of_its_event(town: Town) -> None:
    town.start("A", old.app)
    desk = town.later()
    first = desk.send(New("1"), key="k")
    assert (first.status, first.waits_for) == ("accepted", "")
    town.go_on()
    again = desk.send(New("1"), key="k")
    assert (again, again.status, again.waits_for) == (first, "waiting", "New")
    town.wait(WAIT_S)
    with pytest.raises(UnknownEvent) as told:
        desk.send(New("1"), key="k")
    assert (told.value.type, told.value.queue) == ("New", redrive.failures("desk"))
    assert told.value.letter == town.dead()[0].seq
    with pytest.raises(UnknownEvent):
        desk.ask(New("1"), key="k", timeout=0)
    town.start("B", new.app)
    redrive_all(town)
    assert desk.send(New("1"), key="k").status == "handled"
    assert desk.ask(New("1"), key="k", timeout=0) == "new 1"


def test_a_dead_letter_that_was_dropped_is_never_answered_as_handled(sim: Town) -> None:
    sim.start("A", old.app)
    desk = sim.later()
    desk.send(New("1"), key="k")
    sim.go_on()
    sim.wait(WAIT_S)
    sim.store.transact(queue.discard_dead, redrive.failures("desk"), [sim.dead()[0].seq])
    with pytest.raises(UnknownEvent):
        desk.send(New("1"), key="k")


def test_a_key_whose_handler_raised_is_answered_as_failed(sim: Town) -> None:
    sim.start("A", old.app)
    sim.desk().send(Asked("wrong mail"), key="k")
    sim.go_on()
    assert sim.desk().send(Asked("wrong mail"), key="k").status == "failed"


def test_ask_says_that_the_world_has_stopped(sim: Town) -> None:
    sim.start("A", old.app)
    sim.later().send(New("1"))
    sim.go_on()
    with pytest.raises(Timeout) as told:
        sim.desk().ask(Kept("2"), timeout=0)
    assert told.value.waits_for == "New"


def test_a_repeat_of_mail_is_told_that_the_first_is_a_dead_letter(sim: Town) -> None:
    sim.start("A", old.app)
    desk = sim.later()
    desk.create()
    params = FabricSendParams(
        dest_world=sim.id(desk), schema="New", value_cbor=new.app.encode_event(New("1"))[1]
    )
    packed = codec.pack(params)
    intent = Intent("desk", "w", b"i" * 32, FABRIC_SEND, packed, "w", b"", 0, from_height=1)

    def accept() -> Accepted:
        [found] = sim.store.transact(accept_many, [(intent, 0)])
        return found

    assert accept() == Accepted("ok", sim.id(desk), 1)
    sim.go_on()
    assert sim.store.read(unknown.item, "desk", sim.id(desk), 1) == Item("waiting", 1, "New")
    assert accept() == Accepted("already_enqueued", sim.id(desk), 1)
    sim.wait(WAIT_S)
    letter = sim.dead()[0].seq
    assert sim.store.read(unknown.item, "desk", sim.id(desk), 1) == Item("dead", 1, "New", letter)
    told = accept()
    assert (told.status, told.seq, told.code) == ("already_enqueued", 1, "unknown_event")
    assert receipt_of(intent, params, told).code == "unknown_event"


# -- the door --------------------------------------------------------------------------------------


def test_an_event_that_the_senders_own_code_does_not_know_is_refused_at_the_door(
    sim: Town,
) -> None:
    desk = sim.desk()
    for call in (desk.send, desk.ask):
        with pytest.raises(Invalid, match="New"):
            call(New())
    extra = sim.newer.world(new.Extra, "x")
    # The second version handles it, but in another world type.
    for call in (extra.send, extra.ask):
        with pytest.raises(Invalid, match="events="):
            call(New())
    with pytest.raises(Invalid, match="events="):
        sim.newer.send_many([(extra, New())])
    extra.send(Named())


@pytest.mark.parametrize("what", ["mail", "timer", "post", "effect"])
def test_a_reducer_that_wants_what_its_code_does_not_know_fails(sim: Town, what: str) -> None:
    sim.start("A", old.app)
    sim.desk().send(Asked(f"wrong {what}"))
    sim.go_on()
    assert outcomes(sim.desk()) == [("Asked", "failed")]
    assert [letter.code for letter in sim.dead()] == ["reducer_failed"]
    assert "invalid" in sim.dead()[0].error


def test_a_refusal_that_a_reducer_catches_fails_its_event_all_the_same(sim: Town) -> None:
    """Else a replay by code that knows the event would send it."""
    sim.start("A", old.app)
    sim.desk().send(Asked("caught"))
    sim.go_on()
    assert outcomes(sim.desk()) == [("Asked", "failed")]
    assert sim.desk().state().seen == []


@pytest.mark.parametrize("call", ["send_to", "fabric.send"])
def test_mail_by_id_that_the_senders_code_does_not_handle_there_fails_its_event(
    town: Town, call: str
) -> None:
    """The id leads to the type, which this code has, and which does not handle the event."""
    town.start("B", new.app)
    extra, desk = town.newer.world(new.Extra, "x"), town.later()
    extra.send(Kept())
    desk.send(Kept("1"))
    town.go_on()
    desk.send(Asked(f"{call} {town.id(extra)}"))
    extra.send(Kept())
    desk.send(Kept("2"))
    town.go_on()
    assert outcomes(desk) == [("Kept", "ok"), ("Asked", "failed"), ("Kept", "ok")]
    [letter] = town.dead()
    assert (letter.code, "Extra" in letter.error) == ("reducer_failed", True)
    assert "events=" in letter.error
    # The destination got nothing, and goes on.
    assert outcomes(extra) == [("Kept", "ok"), ("Kept", "ok")]
    assert not town.record(extra).stopped
    # A replay makes the same of it.
    assert town.store.read(restore, town.kernel(desk, new.app)).height == 3


@pytest.mark.parametrize("call", ["send_to", "fabric.send"])
def test_mail_by_id_arrives_where_this_code_handles_it_or_does_not_have_the_type(
    sim: Town, call: str
) -> None:
    sim.start("B", new.app)
    desk = sim.later()
    desk.send(Kept())
    sim.go_on()
    # To itself, and to an id that leads nowhere: the receipt of the mail tells of that.
    desk.send(Asked(f"{call} {sim.id(desk)}"))
    desk.send(Asked(f"{call} nowhere"))
    sim.go_on()
    assert [outcome for _, outcome in outcomes(desk)].count("failed") == 0
    assert "new by id" in desk.state().seen
    extra = sim.newer.world(new.Extra, "x")
    extra.send(Kept())
    sim.go_on()
    sim.stop("B")
    # The first version does not have the type: its own code decides.
    sim.start("A", old.app)
    sim.desk("o").send(Asked(f"{call} {sim.id(extra)}"))
    sim.go_on()
    assert outcomes(sim.desk("o")) == [("Asked", "ok")]


@pytest.mark.parametrize("what", ["mail", "timer", "post", "effect"])
def test_a_replay_admits_what_its_entry_holds_though_the_code_dropped_it(
    sim: Town, what: str
) -> None:
    sim.start("B", new.app)
    desk = sim.later()
    desk.send(Asked(what))
    sim.go_on()

    program = new.app.programs["Desk"]
    dropped = hf.App("desk", worlds=[], version="dropped")
    # The reducers of the second version, in an app that declares none of what they want.
    bare = type(program)("Desk", "3", program.state, program.events, program.handlers)
    bare.known = {("event", "Asked"): 1}
    dropped.programs["Desk"] = bare
    code = World("desk", sim.id(desk), "d", bare, dropped)
    assert sim.store.read(restore, code).height == 1


# -- what operators see ----------------------------------------------------------------------------


def test_readiness_tells_of_stopped_worlds_by_type(sim: Town) -> None:
    sim.start("A", old.app)
    sim.later().send(New())
    sim.go_on()
    told = look(sim.store, "desk")
    assert told.ready, "a stopped world does not make its universe unready"
    [subject] = told.subjects
    [reason] = subject.reasons
    assert (subject.name, reason.code) == ("Desk/d", "unknown_event")
    assert "'New'" in reason.text
    assert reason.since_ns > 0
    sim.store.transact(catalog.change, "desk", sim.id(sim.desk()), Change.PAUSE)
    [subject] = look(sim.store, "desk").subjects
    assert {reason.code for reason in subject.reasons} == {"world_paused", "unknown_event"}
    assert look(sim.store, "desk").subjects_omitted == 0
    sim.store.transact(catalog.change, "desk", sim.id(sim.desk()), Change.RESUME)
    sim.start("B", new.app)
    assert look(sim.store, "desk").subjects == []


def test_an_unknown_item_that_came_by_no_door_waits_too(sim: Town) -> None:
    sim.start("A", old.app)
    desk = sim.desk()
    desk.create()
    sim.store.transact(enqueue, "desk", sim.id(desk), None, event_ingress("Alien", b"\x01\x80"))
    sim.go_on()
    assert sim.record(desk).stopped


# -- what workers declare --------------------------------------------------------------------------


def test_a_declaration_names_types_causes_and_versions() -> None:
    found = declarations.declaration(
        {"A": {"event:X": 2, "event:Y": 1}, "B": {"event:X": 2, "receipt:fx": 0}}
    )
    assert found.common == {"event:X": 2}
    assert found.knows("A", "event:X", 2)
    assert not found.knows("A", "event:X", 3)
    assert found.knows("B", "receipt:fx", 0)
    assert not found.knows("B", "event:Y", 1)
    assert found.has("A")
    assert not found.has("C")
    assert not found.knows("C", "event:X", 1)
    assert declarations.declaration({}).common == {}


def test_a_declaration_that_was_collected_is_written_again(sim: Town) -> None:
    worker = sim.start("A", old.app)
    code = sim.store.read(workers.find, "desk", "A").code
    assert code
    assert sim.store.read(declarations.written, "desk", code)
    assert sim.store.transact(declarations.collect, "desk", [code], 100) == 0
    assert sim.store.transact(declarations.collect, "desk", [], 100) == 1
    sim.clock.advance(2 * S)
    worker.tick()
    assert sim.store.read(workers.find, "desk", "A").code == ""
    sim.clock.advance(2 * S)
    worker.tick()
    assert sim.store.read(workers.find, "desk", "A").code == code


def test_the_leader_collects_declarations_that_no_worker_names(sim: Town) -> None:
    sim.start("A", old.app)
    sim.start("B", new.app)
    gone = sim.store.read(workers.find, "desk", "B").code
    sim.stop("B")
    sim.wait(60)
    assert not sim.store.read(declarations.written, "desk", gone)


# -- the number that `send` answers with -----------------------------------------------------------


def test_the_answer_of_send_is_stored_as_a_number(sim: Town) -> None:
    sim.start("A", old.app)
    found = sim.desk().send(Kept("1"))
    assert codec.unpack(codec.pack({"seq": found, "all": [found]})) == {"seq": 1, "all": [1]}
    with pytest.raises(TypeError, match="object is unsupported"):
        codec.pack(object())
