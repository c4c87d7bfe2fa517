"""Names, records, assignments, and hints that are never lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.config import KEY_BYTES_MAX
from holdfast.durable import inbox
from holdfast.errors import IllegalTransition, Invalid, NotFound
from holdfast.messages import event_ingress
from holdfast.store.api import Txn
from holdfast.transitions import Transitions
from holdfast.world import catalog
from holdfast.world.catalog import NOBODY, WORLD, Assignment, Event, Status, subject_of
from holdfast.world.ingress import Address, deliver
from tests.world import bank
from tests.world.rig import Rig

MODULES = ("holdfast.world.catalog",)

INGRESS = event_ingress("Deposited", b"\x01\x81\xa6amount\x01")


# -- names ---------------------------------------------------------------------------------------


def test_a_world_exists_from_its_first_event_on(rig: Rig) -> None:
    ada = rig.runtime.world(bank.Account, "ada")
    with pytest.raises(NotFound):
        ada.state()
    ada.send(bank.Deposited(1))
    assert ada.record().name == "ada"
    assert ada.state() == bank.Account()


def test_creating_again_gives_the_same_world(rig: Rig) -> None:
    ada = rig.runtime.world(bank.Account, "ada")
    assert ada.create() == ada.create()
    assert rig.store.read(catalog.counts, "bank")["active"] == 1


def test_the_same_name_of_another_type_is_another_world(rig: Rig) -> None:
    account = rig.runtime.world(bank.Account, "main").create()
    assert rig.runtime.world(bank.Audit, "main").create() != account


def test_a_deleted_name_that_is_used_again_is_another_world(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Deposited(5))
    rig.run()
    first = ada.record().world_id
    ada.delete()
    with pytest.raises(NotFound):
        ada.state()
    ada.send(bank.Deposited(1))
    second = ada.record().world_id
    assert second != first
    rig.assign(ada)
    rig.run()
    assert (ada.state().balance, ada.height()) == (1, 1)
    assert rig.store.read(catalog.record, "bank", first).status is Status.DELETED


def test_deleting_takes_name_assignment_and_hints_away(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Deposited(1))
    world_id = rig.id(ada)
    ada.delete()
    rig.run()
    for worker in ("A", NOBODY):
        assert rig.hints(worker) == []
    assert rig.store.read(catalog.worlds_of, "bank", "A") == []
    assert rig.store.read(catalog.assignment, "bank", world_id) is None
    with pytest.raises(NotFound):
        rig.store.transact(catalog.assign, "bank", world_id, "A")


def test_a_name_or_id_that_is_taken_is_refused(rig: Rig) -> None:
    ada = rig.world()
    before = rig.rows()
    for name, world_id in (("ada", "fresh"), ("bob", rig.id(ada))):
        with pytest.raises(Invalid):
            rig.store.transact(catalog.create, "bank", "Account", name, world_id)
    assert rig.rows() == before


def test_worlds_are_listed_by_id_and_by_name_in_pages(rig: Rig) -> None:
    ids = sorted(rig.id(rig.world(name=f"w{n}")) for n in range(5))
    first = rig.store.read(catalog.worlds, "bank", "", 3)
    rest = rig.store.read(catalog.worlds, "bank", first[-1].world_id, 3)
    assert [record.world_id for record in first + rest] == ids
    named = rig.store.read(catalog.names, "bank", "Account", 3)
    assert [name for name, _ in named] == ["w0", "w1", "w2"]


def test_universes_share_nothing(rig: Rig) -> None:
    other = rig.app.open(rig.store, roles=(), universe="other", clock=rig.clock)
    ada = rig.world()
    ada.send(bank.Deposited(1))
    with pytest.raises(NotFound):
        other.world(bank.Account, "ada").state()
    assert rig.store.read(catalog.counts, "other")["active"] == 0


@pytest.mark.parametrize(
    "name",
    ["", "a\x00b", "\ud800", "x" * 201, "ü" * 101, 5, None, b"ada"],
    ids=["empty", "nul", "surrogate", "long", "long in bytes", "int", "none", "bytes"],
)
def test_what_is_no_name_is_refused_at_the_door(rig: Rig, name: object) -> None:
    before = rig.rows()
    with pytest.raises(Invalid) as raised:
        rig.runtime.world(bank.Account, name)  # type: ignore[arg-type]
    assert raised.value.what == "world name"
    assert rig.rows() == before


@pytest.mark.parametrize("universe", ["", "a/b", "a\x00", "\ud800", "u" * 101])
def test_what_is_no_universe_is_refused(universe: str) -> None:
    from tests.world.rig import Rig

    rig = Rig()
    with pytest.raises(Invalid):
        rig.app.open(rig.store, roles=(), universe=universe)


@given(st.text(min_size=1, max_size=200))
def test_every_name_that_is_accepted_leads_to_its_world(name: str) -> None:
    rig = Rig()
    try:
        handle = rig.runtime.world(bank.Account, name)
    except Invalid:
        assert (
            "\x00" in name
            or any("\ud800" <= c <= "\udfff" for c in name)
            or (len(name.encode(errors="surrogatepass")) > 200)
        )
        return
    handle.send(bank.Deposited(1))
    assert handle.record().name == name


def test_names_that_are_too_long_together_are_refused_before_a_key_is() -> None:
    with pytest.raises(Invalid) as raised:
        catalog.check_address("u" * 100, "t" * 200, "n" * 200)
    assert raised.value.bytes_max == KEY_BYTES_MAX


# -- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "event", "after"), list(WORLD.pairs()))
def test_a_world_moves_by_its_table_and_no_other_way(
    status: Status, event: Event, after: Status | None
) -> None:
    rig = Rig()
    ada = rig.world()
    world_id = rig.id(ada)
    for step in _way_to(WORLD, status):
        rig.store.transact(catalog.change, "bank", world_id, step)
    before = rig.rows()
    if after is None:
        with pytest.raises(IllegalTransition):
            rig.store.transact(catalog.change, "bank", world_id, event)
        assert rig.rows() == before
    else:
        assert rig.store.transact(catalog.change, "bank", world_id, event).status is after
        counts = rig.store.read(catalog.counts, "bank")
        assert {name: n for name, n in counts.items() if n} == {after.value: 1}


def _way_to(table: Transitions[Status, Event], status: Status) -> list[Event]:
    direct = {
        after: event for (before, event), after in table.table.items() if before is table.initial
    }
    return [] if status is table.initial else [direct[status]]


# -- assignment ----------------------------------------------------------------------------------


def test_an_assignment_says_who_how_urgent_and_why(rig: Rig) -> None:
    ada = rig.runtime.world(bank.Account, "ada")
    rig.store.transact(catalog.assign, "bank", rig.id(ada), "B", 3, "by hand", True)
    assert rig.store.read(catalog.assignment, "bank", rig.id(ada)) == (
        Assignment("B", 3, "by hand", True)
    )
    assert rig.store.read(catalog.worlds_of, "bank", "B") == [rig.id(ada)]


def test_assigning_the_same_again_changes_nothing(rig: Rig) -> None:
    ada = rig.world()
    before = rig.rows()
    rig.assign(ada)
    assert rig.rows() == before


def test_unassigning_what_is_not_assigned_answers_no(rig: Rig) -> None:
    ada = rig.world()
    assert rig.store.transact(catalog.unassign, "bank", rig.id(ada)) is True
    assert rig.store.transact(catalog.unassign, "bank", rig.id(ada)) is False


def test_an_unknown_world_is_not_assigned(rig: Rig) -> None:
    before = rig.rows()
    with pytest.raises(NotFound):
        rig.store.transact(catalog.assign, "bank", "nobody", "A")
    assert rig.rows() == before


# -- hints ---------------------------------------------------------------------------------------


def test_a_message_leaves_a_hint_with_the_worker_and_two_leave_one(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Deposited(1))
    ada.send(bank.Deposited(1))
    assert rig.hints("A") == [rig.id(ada)]


def test_a_message_for_a_world_without_a_worker_leaves_a_hint_with_nobody(rig: Rig) -> None:
    ada = rig.runtime.world(bank.Account, "ada")
    ada.send(bank.Deposited(1))
    assert rig.hints(NOBODY) == [rig.id(ada)]


def test_hints_come_by_priority(rig: Rig) -> None:
    handles = [rig.world(name=f"w{n}") for n in range(3)]
    for priority, handle in enumerate(handles):
        rig.assign(handle, "A", priority)
        handle.send(bank.Deposited(1))
    assert rig.hints("A") == [rig.id(handle) for handle in reversed(handles)]


def test_a_drained_inbox_leaves_no_hint(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Deposited(1))
    rig.run()
    assert rig.hints("A") == []


def test_a_hint_is_not_taken_away_from_under_a_message_that_came_meanwhile(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Deposited(1))
    worker = rig.run()
    host = worker._hosted[rig.id(ada)].host
    ada.send(bank.Deposited(1))
    cycle = host.prepare(rig.store)
    assert cycle is not None
    assert cycle.drained
    ada.send(bank.Deposited(1))
    rig.store.transact(host.commit, cycle)
    assert rig.hints("A") == [rig.id(ada)]


WORKERS = ("A", "B")
NAMES = ("x", "y")


class Hints(RuleBasedStateMachine):
    """Whatever is done in whatever order: an active world with unread messages has a hint where its
    worker, or the orchestrator, will look for it."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.store = self.rig.store
        for name in NAMES:
            self._deliver(name)

    def _deliver(self, name: str) -> str:
        to = Address("bank", "Account", name, self.rig.runtime.mint())
        world_id: str = self.store.transact(deliver, to, None, INGRESS).world_id
        return world_id

    def _id(self, name: str) -> str | None:
        return self.store.read(catalog.find, "bank", "Account", name)

    @rule(name=st.sampled_from(NAMES))
    def deliver(self, name: str) -> None:
        self._deliver(name)

    @rule(name=st.sampled_from(NAMES))
    def drain(self, name: str) -> None:
        if (world_id := self._id(name)) is None:
            return

        def consume(txn: Txn) -> None:
            subject = subject_of("bank", world_id)
            inbox.advance(txn, subject, inbox.cursor(txn, subject) + inbox.depth(txn, subject))

        self.store.transact(consume)

    @rule(name=st.sampled_from(NAMES), worker=st.sampled_from(WORKERS))
    def settle(self, name: str, worker: str) -> None:
        if (world_id := self._id(name)) is not None:
            self.store.transact(catalog.settle, "bank", world_id, worker)

    @rule(name=st.sampled_from(NAMES), worker=st.sampled_from(WORKERS), priority=st.integers(-1, 2))
    def assign(self, name: str, worker: str, priority: int) -> None:
        if (world_id := self._id(name)) is not None:
            self.store.transact(catalog.assign, "bank", world_id, worker, priority)

    @rule(name=st.sampled_from(NAMES))
    def unassign(self, name: str) -> None:
        if (world_id := self._id(name)) is not None:
            self.store.transact(catalog.unassign, "bank", world_id)

    @rule(name=st.sampled_from(NAMES), event=st.sampled_from(Event))
    def change(self, name: str, event: Event) -> None:
        if (world_id := self._id(name)) is None:
            return
        status = self.store.read(catalog.record, "bank", world_id).status
        if WORLD.allows(status, event):
            self.store.transact(catalog.change, "bank", world_id, event)

    @invariant()
    def work_is_hinted_where_it_is_looked_for(self) -> None:
        for record in self.store.read(catalog.worlds, "bank"):
            assigned = self.store.read(catalog.assignment, "bank", record.world_id)
            worker = NOBODY if assigned is None else assigned.desired_worker_id
            depth = self.store.read(inbox.depth, subject_of("bank", record.world_id))
            if record.status is Status.ACTIVE and depth:
                assert record.world_id in self.rig.hints(worker)
            if record.status is Status.DELETED:
                assert record.world_id not in self.rig.hints(NOBODY)

    @invariant()
    def every_worker_can_get_rid_of_its_hints(self) -> None:
        """What is not its work goes when it is settled: no hint stays for ever."""
        for worker in WORKERS:
            for world_id in self.rig.hints(worker):
                assigned = self.store.read(catalog.assignment, "bank", world_id)
                if assigned is None or assigned.desired_worker_id != worker:
                    self.store.transact(catalog.settle, "bank", world_id, worker)
                    assert world_id not in self.rig.hints(worker)


TestHints = Hints.TestCase
TestHints.settings = settings(max_examples=60, stateful_step_count=30)
