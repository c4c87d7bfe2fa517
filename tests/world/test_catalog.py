"""The world catalog: names, records, assignments, and runnable marks that are never lost."""

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
from holdfast.world.catalog import (
    UNASSIGNED,
    WORLD_TRANSITIONS,
    Assignment,
    WorldEvent,
    WorldStatus,
    subject_of,
)
from holdfast.world.ingress import WorldAddress, deliver
from tests.world import bank
from tests.world.rig import WorldRig

MODULES = ("holdfast.world.catalog",)

INGRESS = event_ingress("DepositMade", b"\x01\x81\xa6amount\x01")


# -- names ---------------------------------------------------------------------------------------


def test_world_is_created_by_its_first_event(rig: WorldRig) -> None:
    ada = rig.runtime.world(bank.BankAccount, "ada")
    with pytest.raises(NotFound):
        ada.state()
    ada.send(bank.DepositMade(1))
    assert ada.record().name == "ada"
    assert ada.state() == bank.BankAccount()


def test_create_is_idempotent(rig: WorldRig) -> None:
    ada = rig.runtime.world(bank.BankAccount, "ada")
    assert ada.create() == ada.create()
    assert rig.store.read(catalog.count_by_status, "bank")["active"] == 1


def test_same_name_of_another_type_is_another_world(rig: WorldRig) -> None:
    account = rig.runtime.world(bank.BankAccount, "main").create()
    assert rig.runtime.world(bank.Audit, "main").create() != account


def test_name_of_a_deleted_world_can_be_reused(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.DepositMade(5))
    rig.run()
    first = ada.record().world_id
    ada.delete()
    with pytest.raises(NotFound):
        ada.state()
    ada.send(bank.DepositMade(1))
    second = ada.record().world_id
    assert second != first
    rig.assign(ada)
    rig.run()
    assert (ada.state().balance, ada.height()) == (1, 1)
    assert rig.store.read(catalog.get_record, "bank", first).status is WorldStatus.DELETED


def test_delete_removes_name_assignment_and_runnable_marks(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.DepositMade(1))
    world_id = rig.id(ada)
    ada.delete()
    rig.run()
    for worker in ("A", UNASSIGNED):
        assert rig.runnable(worker) == []
    assert rig.store.read(catalog.list_assigned, "bank", "A") == []
    assert rig.store.read(catalog.find_assignment, "bank", world_id) is None
    with pytest.raises(NotFound):
        rig.store.transact(catalog.assign, "bank", world_id, "A")


def test_create_refuses_a_name_or_id_in_use(rig: WorldRig) -> None:
    ada = rig.world()
    before = rig.rows()
    for name, world_id in (("ada", "fresh"), ("bob", rig.id(ada))):
        with pytest.raises(Invalid):
            rig.store.transact(catalog.create, "bank", "BankAccount", name, world_id)
    assert rig.rows() == before


def test_worlds_are_listed_by_id_and_by_name_in_pages(rig: WorldRig) -> None:
    ids = sorted(rig.id(rig.world(name=f"w{n}")) for n in range(5))
    first = rig.store.read(catalog.list_worlds, "bank", "", 3)
    rest = rig.store.read(catalog.list_worlds, "bank", first[-1].world_id, 3)
    assert [record.world_id for record in first + rest] == ids
    named = rig.store.read(catalog.list_names, "bank", "BankAccount", 3)
    assert [name for name, _ in named] == ["w0", "w1", "w2"]


def test_universes_are_isolated(rig: WorldRig) -> None:
    other = rig.app.open(rig.store, roles=(), universe="other", clock=rig.clock)
    ada = rig.world()
    ada.send(bank.DepositMade(1))
    with pytest.raises(NotFound):
        other.world(bank.BankAccount, "ada").state()
    assert rig.store.read(catalog.count_by_status, "other")["active"] == 0


@pytest.mark.parametrize(
    "name",
    ["", "a\x00b", "\ud800", "x" * 201, "ü" * 101, 5, None, b"ada"],
    ids=["empty", "nul", "surrogate", "long", "long in bytes", "int", "none", "bytes"],
)
def test_invalid_world_name_is_refused(rig: WorldRig, name: object) -> None:
    before = rig.rows()
    with pytest.raises(Invalid) as raised:
        rig.runtime.world(bank.BankAccount, name)  # type: ignore[arg-type]
    assert raised.value.what == "world name"
    assert rig.rows() == before


@pytest.mark.parametrize("universe", ["", "a/b", "a\x00", "\ud800", "u" * 101])
def test_invalid_universe_name_is_refused(universe: str) -> None:
    from tests.world.rig import WorldRig

    rig = WorldRig()
    with pytest.raises(Invalid):
        rig.app.open(rig.store, roles=(), universe=universe)


@given(st.text(min_size=1, max_size=200))
def test_every_accepted_name_finds_its_world(name: str) -> None:
    rig = WorldRig()
    try:
        handle = rig.runtime.world(bank.BankAccount, name)
    except Invalid:
        assert (
            "\x00" in name
            or any("\ud800" <= c <= "\udfff" for c in name)
            or (len(name.encode(errors="surrogatepass")) > 200)
        )
        return
    handle.send(bank.DepositMade(1))
    assert handle.record().name == name


def test_address_longer_than_a_store_key_is_refused() -> None:
    with pytest.raises(Invalid) as raised:
        catalog.check_address("u" * 100, "t" * 200, "n" * 200)
    assert raised.value.bytes_max == KEY_BYTES_MAX


# -- transitions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "event", "after"), list(WORLD_TRANSITIONS.pairs()))
def test_world_status_follows_its_transition_table(
    status: WorldStatus, event: WorldEvent, after: WorldStatus | None
) -> None:
    rig = WorldRig()
    ada = rig.world()
    world_id = rig.id(ada)
    for step in _events_to(WORLD_TRANSITIONS, status):
        rig.store.transact(catalog.change_status, "bank", world_id, step)
    before = rig.rows()
    if after is None:
        with pytest.raises(IllegalTransition):
            rig.store.transact(catalog.change_status, "bank", world_id, event)
        assert rig.rows() == before
    else:
        assert rig.store.transact(catalog.change_status, "bank", world_id, event).status is after
        counts = rig.store.read(catalog.count_by_status, "bank")
        assert {name: n for name, n in counts.items() if n} == {after.value: 1}


def _events_to(
    table: Transitions[WorldStatus, WorldEvent], status: WorldStatus
) -> list[WorldEvent]:
    direct = {
        after: event for (before, event), after in table.table.items() if before is table.initial
    }
    return [] if status is table.initial else [direct[status]]


# -- assignment ----------------------------------------------------------------------------------


def test_assignment_records_worker_priority_reason_and_pin(rig: WorldRig) -> None:
    ada = rig.runtime.world(bank.BankAccount, "ada")
    rig.store.transact(catalog.assign, "bank", rig.id(ada), "B", 3, "by hand", True)
    assert rig.store.read(catalog.find_assignment, "bank", rig.id(ada)) == (
        Assignment("B", 3, "by hand", True)
    )
    assert rig.store.read(catalog.list_assigned, "bank", "B") == [rig.id(ada)]


def test_repeated_assign_changes_nothing(rig: WorldRig) -> None:
    ada = rig.world()
    before = rig.rows()
    rig.assign(ada)
    assert rig.rows() == before


def test_unassign_of_an_unassigned_world_returns_false(rig: WorldRig) -> None:
    ada = rig.world()
    assert rig.store.transact(catalog.unassign, "bank", rig.id(ada)) is True
    assert rig.store.transact(catalog.unassign, "bank", rig.id(ada)) is False


def test_assign_of_an_unknown_world_is_not_found(rig: WorldRig) -> None:
    before = rig.rows()
    with pytest.raises(NotFound):
        rig.store.transact(catalog.assign, "bank", "nobody", "A")
    assert rig.rows() == before


# -- runnable marks ------------------------------------------------------------------------------


def test_message_marks_its_world_runnable_once(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.DepositMade(1))
    ada.send(bank.DepositMade(1))
    assert rig.runnable("A") == [rig.id(ada)]


def test_message_to_an_unassigned_world_marks_it_as_unassigned_work(rig: WorldRig) -> None:
    ada = rig.runtime.world(bank.BankAccount, "ada")
    ada.send(bank.DepositMade(1))
    assert rig.runnable(UNASSIGNED) == [rig.id(ada)]


def test_runnable_worlds_are_ordered_by_priority(rig: WorldRig) -> None:
    handles = [rig.world(name=f"w{n}") for n in range(3)]
    for priority, handle in enumerate(handles):
        rig.assign(handle, "A", priority)
        handle.send(bank.DepositMade(1))
    assert rig.runnable("A") == [rig.id(handle) for handle in reversed(handles)]


def test_drained_inbox_clears_the_runnable_mark(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.DepositMade(1))
    rig.run()
    assert rig.runnable("A") == []


def test_commit_keeps_the_runnable_mark_when_a_new_message_arrived(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.DepositMade(1))
    worker = rig.run()
    host = worker._hosted[rig.id(ada)].host
    ada.send(bank.DepositMade(1))
    cycle = host.prepare(rig.store)
    assert cycle is not None
    assert cycle.drained
    ada.send(bank.DepositMade(1))
    rig.store.transact(host.commit, cycle)
    assert rig.runnable("A") == [rig.id(ada)]


WORKERS = ("A", "B")
NAMES = ("x", "y")


class RunnableMarks(RuleBasedStateMachine):
    """Invariant under any order of operations: an active world with unread messages has a runnable
    mark under its assigned worker, or under UNASSIGNED for the orchestrator."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = WorldRig()
        self.store = self.rig.store
        for name in NAMES:
            self._deliver(name)

    def _deliver(self, name: str) -> str:
        to = WorldAddress("bank", "BankAccount", name, self.rig.runtime.mint())
        world_id: str = self.store.transact(deliver, to, None, INGRESS).world_id
        return world_id

    def _id(self, name: str) -> str | None:
        return self.store.read(catalog.find_id, "bank", "BankAccount", name)

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
    def clear_runnable(self, name: str, worker: str) -> None:
        if (world_id := self._id(name)) is not None:
            self.store.transact(catalog.clear_runnable, "bank", world_id, worker)

    @rule(name=st.sampled_from(NAMES), worker=st.sampled_from(WORKERS), priority=st.integers(-1, 2))
    def assign(self, name: str, worker: str, priority: int) -> None:
        if (world_id := self._id(name)) is not None:
            self.store.transact(catalog.assign, "bank", world_id, worker, priority)

    @rule(name=st.sampled_from(NAMES))
    def unassign(self, name: str) -> None:
        if (world_id := self._id(name)) is not None:
            self.store.transact(catalog.unassign, "bank", world_id)

    @rule(name=st.sampled_from(NAMES), event=st.sampled_from(WorldEvent))
    def change_status(self, name: str, event: WorldEvent) -> None:
        if (world_id := self._id(name)) is None:
            return
        status = self.store.read(catalog.get_record, "bank", world_id).status
        if WORLD_TRANSITIONS.allows(status, event):
            self.store.transact(catalog.change_status, "bank", world_id, event)

    @invariant()
    def active_world_with_mail_is_marked_runnable(self) -> None:
        for record in self.store.read(catalog.list_worlds, "bank"):
            assigned = self.store.read(catalog.find_assignment, "bank", record.world_id)
            worker = UNASSIGNED if assigned is None else assigned.desired_worker_id
            depth = self.store.read(inbox.depth, subject_of("bank", record.world_id))
            if record.status is WorldStatus.ACTIVE and depth:
                assert record.world_id in self.rig.runnable(worker)
            if record.status is WorldStatus.DELETED:
                assert record.world_id not in self.rig.runnable(UNASSIGNED)

    @invariant()
    def stale_marks_can_be_cleared(self) -> None:
        """`clear_runnable` removes marks of worlds that are not assigned to the worker."""
        for worker in WORKERS:
            for world_id in self.rig.runnable(worker):
                assigned = self.store.read(catalog.find_assignment, "bank", world_id)
                if assigned is None or assigned.desired_worker_id != worker:
                    self.store.transact(catalog.clear_runnable, "bank", world_id, worker)
                    assert world_id not in self.rig.runnable(worker)


TestRunnableMarks = RunnableMarks.TestCase
TestRunnableMarks.settings = settings(max_examples=60, stateful_step_count=30)
