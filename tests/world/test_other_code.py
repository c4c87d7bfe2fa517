"""Entries that other code made and that this code repeats otherwise: the world waits for that code (J6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast import codec
from holdfast.app.handle import WorldHandle
from holdfast.app.runtime import Runtime
from holdfast.authority.readiness import Reason
from holdfast.clock import S
from holdfast.durable import lease, snapshot
from holdfast.errors import ReplayDiverged
from holdfast.ops import recount
from holdfast.roles.readiness import look
from holdfast.world import catalog, entry, restore
from holdfast.world.catalog import Status
from holdfast.world.host import SnapshotPolicy
from holdfast.world.shape import Shape
from tests.world.rig import rows_on
from tests.world.town import Town

MODULES = (
    "holdfast.world.shape",
    "holdfast.world.unknown",
    "holdfast.world.need",
    "holdfast.world.growth",
    "holdfast.roles.orchestrator",
    "holdfast.roles.world_worker",
)

WAIT_S = 3600.0


class Paid(hf.Event):
    """All versions handle it."""

    amount: int = 1


class Tipped(hf.Event):
    """All versions handle it; those with a field for it write that."""

    amount: int = 1


class Line(msgspec.Struct):
    amount: int = 0


class NotedLine(msgspec.Struct):
    amount: int = 0
    note: str = "new"


NotedLine.__name__ = "Line"


def code(
    version: str,
    fields: dict[str, tuple[Any, Any]] | None = None,
    pays: Callable[[Any, int], None] | None = None,
    line: type[Any] | None = None,
) -> hf.App:
    """A version of the app. Nothing but the state tells what its handlers did."""

    def paid(self: Any, event: Paid, cx: hf.Context) -> None:
        if pays is not None:
            pays(self, event.amount)
        else:
            self.total += event.amount
        if line is not None:
            self.lines = [*self.lines, line(event.amount)]

    def tipped(self: Any, event: Tipped, cx: hf.Context) -> None:
        if hasattr(self, "tips"):
            self.tips += event.amount

    shape = {"total": (int, 0), **(fields or {})}
    if line is not None:
        shape["lines"] = (list[line], [])  # type: ignore[valid-type]
    body = {
        "__annotations__": {name: kind for name, (kind, _) in shape.items()},
        "__module__": __name__,
        **{name: default for name, (_, default) in shape.items()},
        "paid": hf.on(Paid)(paid),
        "tipped": hf.on(Tipped)(tipped),
    }
    kind = type(hf.World)("Till", (hf.World,), body)
    return hf.App("till", worlds=[kind], version=version)


TIPS = {"tips": (int, 0)}
BOOK = {"book": (str, "red")}


def doubles(self: Any, amount: int) -> None:
    self.total += 2 * amount


FIRST = code("1")
GROWN = code("2", TIPS)
DOUBLES = code("2", pays=doubles)


class Tills(Town):
    def __init__(self, first: hf.App, second: hf.App, backend: Any = None) -> None:
        super().__init__(backend, first, second)

    def till(self, app: hf.App | None = None, name: str = "t") -> WorldHandle[Any]:
        """A world as a version sees it; by default as the second does."""
        code = app or self.newer.app
        runtime = Runtime(code, self.store, roles=(), clock=self.clock)
        return runtime.world(code.programs["Till"].state, name)

    def pay(self, *amounts: int) -> None:
        for amount in amounts:
            self.till().send(Paid(amount))
        self.go_on()

    def entries(self, app: hf.App) -> restore.Checked:
        """The whole journal, repeated by a version."""
        found: restore.Checked = self.read(restore.check, self.kernel(self.till(app), app))
        return found

    @property
    def made_by(self) -> list[str]:
        return [entry.decode(body).code for body in self.bodies(self.till())]

    @property
    def blocker(self) -> tuple[str, int] | None:  # type: ignore[override]
        found = self.record(self.till()).blocked_by
        return None if found is None else (found.code, found.height)

    @property
    def status(self) -> Status:
        return self.record(self.till()).status


@pytest.fixture(params=["memory", "postgres"])
def tills(request: pytest.FixtureRequest) -> Iterator[Tills]:
    made = Tills(FIRST, GROWN, rows_on(request.param))
    yield made
    made.store.close()


def after_a_kill(first: hf.App, second: hf.App, backend: Any = None) -> Tills:
    """The second version has handled events without a snapshot, and is gone; the first one takes over."""
    made = Tills(first, second, backend)
    made.start("B", second)
    made.pay(100, 10)
    made.start("A", first)
    made.kill("B")
    made.pay(1)
    return made


# -- other fields: the code is waited for ----------------------------------------------------------


def test_a_rolled_back_deploy_that_added_a_field_parks_nothing(tills: Tills) -> None:
    tills.start("B", GROWN)
    tills.pay(100, 10)
    tills.start("A", FIRST)
    tills.kill("B")
    tills.pay(1)
    till = tills.till()
    assert tills.status is Status.ACTIVE
    assert tills.blocker == ("code_missing", 2)
    assert (tills.head(till).height, tills.depth(till)) == (2, 1)
    # It is given back: no lease, no assignment, no hint.
    held = tills.read(lease.current, tills.subject(till))
    assert held.state is lease.State.FREE
    assert tills.read(catalog.assignment, "till", tills.id(till)) is None
    assert (tills.hints("A"), tills.hints(catalog.NOBODY)) == ([], [])
    assert tills.read(recount.recount) == []
    # Code that made the entries goes on, and takes what waits.
    tills.start("C", GROWN)
    assert till.state().total == 111
    assert tills.blocker is None
    assert tills.record(till).unknown is None
    assert tills.made_by == ["2", "2", "2"]


def test_the_blocker_names_the_code_and_the_entry() -> None:
    sim = after_a_kill(FIRST, GROWN)
    program = GROWN.programs["Till"]
    found = sim.record(sim.till()).blocked_by
    assert found is not None
    assert f"'2@{program.shape.hex()}', which made entry 2" in found.text
    ready = look(sim.store, "till")
    [subject] = ready.subjects
    assert (subject.name, [one.reason for one in subject.reasons]) == (
        "Till/t",
        [Reason.CODE_MISSING],
    )
    assert subject.reasons[0].height == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (code("1", BOOK), code("2", TIPS)),
        (code("1", line=Line), code("2", line=NotedLine)),
        (code("same"), code("same", TIPS)),
        (code("1", TIPS), code("2")),
    ],
    ids=["one added and one removed", "in a class inside", "under one version", "removed"],
)
def test_code_with_other_fields_is_waited_for_in_either_order(
    first: hf.App, second: hf.App
) -> None:
    for older, newer in ((first, second), (second, first)):
        sim = after_a_kill(older, newer)
        fields = [set(app.programs["Till"].state.__struct_fields__) for app in (older, newer)]
        has_all = fields[0] > fields[1]
        if not has_all:
            assert (sim.status, sim.blocker) == (Status.ACTIVE, ("code_missing", 2))
        sim.start("C", newer)
        # Code with one field more repeats the entries, and goes on by itself.
        assert sim.till(older if has_all else newer).state().total == 111
        assert sim.blocker is None


def test_without_that_code_in_time_the_world_is_parked_with_the_height() -> None:
    sim = after_a_kill(FIRST, GROWN)
    sim.wait(WAIT_S - 60)
    assert sim.blocker == ("code_missing", 2)
    sim.wait(120)
    assert (sim.status, sim.blocker) == (Status.PARKED, ("replay_diverged", 2))
    assert sim.record(sim.till()).unknown is None
    assert sim.read(recount.recount) == []
    sim.start("C", GROWN)
    assert sim.status is Status.PARKED
    sim.till().resume()
    sim.go_on()
    assert sim.till().state().total == 111
    assert sim.made_by == ["2", "2", "2"]


def test_time_goes_on_while_the_needed_code_comes_and_dies() -> None:
    sim = after_a_kill(FIRST, GROWN)
    was = sim.record(sim.till()).unknown
    assert was is not None
    sim.clock.advance(600 * S)
    # It declares its code, is given the world, and dies before it takes it.
    dying = sim.worker("C", "1", app=GROWN)
    sim.go_on()
    dying.tick()
    sim.leader.tick()
    placed = sim.record(sim.till()).unknown
    assert placed is not None
    assert not placed.waits
    sim.expire(31)
    sim.go_on()
    sim.hear()
    now = sim.record(sim.till()).unknown
    assert now is not None
    assert (now.waits, now.since_ns) == (True, was.since_ns)


def test_a_worker_of_that_code_that_differs_itself_parks_the_world_at_once() -> None:
    drift = [0]

    def unsteady(self: Any, amount: int) -> None:
        self.total += amount + drift[0]

    newer = code("2", TIPS, unsteady)
    sim = after_a_kill(FIRST, newer)
    assert sim.blocker == ("code_missing", 2)
    drift[0] = 5
    sim.start("C", newer)
    assert (sim.status, sim.blocker) == (Status.PARKED, ("replay_diverged", 2))
    assert sim.record(sim.till()).unknown is None
    assert sim.head(sim.till()).height == 2


def test_a_pinned_world_waits_for_its_worker_to_have_the_code() -> None:
    sim = after_a_kill(FIRST, GROWN)
    sim.store.transact(catalog.assign, "till", sim.id(sim.till()), "A", 0, "", True)
    sim.start("C", GROWN)
    assert sim.blocker == ("code_missing", 2)
    sim.stop("A")
    sim.start("A", GROWN)
    assert sim.till().state().total == 111


def test_a_key_whose_event_waits_for_code_is_answered_with_that() -> None:
    sim = after_a_kill(FIRST, GROWN)
    sim.till().send(Paid(5), key="k")
    again = sim.till().send(Paid(5), key="k")
    assert again.status == "waiting"
    assert again.waits_for == f"code:{GROWN.programs['Till'].code}"


def test_a_deleted_world_waits_for_no_code() -> None:
    sim = after_a_kill(FIRST, GROWN)
    sim.till().delete()
    assert sim.read(recount.recount) == []
    sim.start("C", GROWN)


# -- the same fields: a live worker has the code, or the world is parked ---------------------------


def test_changed_handlers_park_at_once_when_no_worker_has_the_code_of_the_entry() -> None:
    sim = Tills(FIRST, DOUBLES)
    sim.start("A", FIRST)
    sim.pay(100)
    sim.kill("A")
    sim.pay(1)
    worker = sim.start("B", DOUBLES)
    assert (sim.status, sim.blocker) == (Status.PARKED, ("replay_diverged", 1))
    assert worker.hosted == []
    assert sim.made_by == ["1"]
    assert sim.read(recount.recount) == []


def test_changed_handlers_give_the_world_to_a_live_worker_with_the_code_of_the_entry() -> None:
    sim = Tills(FIRST, DOUBLES)
    sim.start("A", FIRST)
    sim.pay(100)
    sim.start("B", DOUBLES)
    sim.start("C", FIRST)
    till = sim.till(FIRST)
    sim.store.transact(catalog.assign, "till", sim.id(till), "B")
    # Its host is gone without a word; the code that differs is asked first.
    del sim.crew["A"]
    sim.expire(31)
    for worker in sim.crew.values():
        worker._heartbeat()
    sim.pay(1)
    assert sim.blocker is None
    assert till.state().total == 101
    assert sim.made_by == ["1", "1"]
    # In good order it leaves a snapshot: from there the other code goes on.
    sim.stop("C")
    sim.pay(1)
    assert sim.blocker is None
    assert sim.till().state().total == 103
    assert sim.made_by == ["1", "1", "2"]


def test_changed_handlers_park_when_the_last_worker_with_the_code_is_gone() -> None:
    sim = Tills(FIRST, DOUBLES)
    sim.start("A", FIRST)
    sim.pay(100)
    # It spoke a moment ago, and its lease ran out: another takes over before anybody knows it is dead.
    del sim.crew["A"]
    sim.store.transact(lease.force_release, sim.subject(sim.till()), "it is gone")
    sim.store.transact(catalog.unassign, "till", sim.id(sim.till()))
    sim.start("B", DOUBLES)
    sim.pay(1)
    assert sim.status is Status.ACTIVE
    sim.expire(6)
    sim.hear()
    assert (sim.status, sim.blocker) == (Status.PARKED, ("replay_diverged", 1))
    assert sim.made_by == ["1"]


def test_a_new_leader_hears_all_workers_before_it_parks() -> None:
    sim = Tills(FIRST, DOUBLES)
    sim.start("A", FIRST)
    sim.pay(100)
    sim.kill("A")
    sim.start("C", FIRST)
    sim.start("B", DOUBLES)
    till = sim.till(FIRST)
    stopped = sim.crew.pop("C")
    sim.store.transact(catalog.assign, "till", sim.id(till), "B")
    sim.pay(1)
    # "C" has not spoken to the new leader yet.
    sim.leader.finish()
    sim.leader = sim.lead("P")
    sim.go_on()
    assert sim.status is Status.ACTIVE
    sim.crew["C"] = stopped
    sim.hear()
    assert sim.blocker is None
    assert till.state().total == 101


def test_an_entry_without_a_shape_is_told_by_its_version_alone() -> None:
    """Entries that were written before there were shapes: as if the state had the same fields."""
    with pytest.raises(ReplayDiverged) as error:
        _repeat_without_shape(GROWN, FIRST)
    assert error.value.fields["made_by"] == "2"
    assert FIRST.programs["Till"].has_shape_of("2")
    with pytest.raises(ReplayDiverged) as error:
        _repeat_without_shape(code("2", pays=doubles), code("2"))
    assert "made_by" not in error.value.fields


def _repeat_without_shape(made_by: hf.App, repeated_by: hf.App) -> None:
    sim = Tills(repeated_by, made_by)
    sim.start("A", made_by)
    sim.pay(100)
    [body] = sim.bodies(sim.till())
    fields = codec.unpack(body)
    step = entry.decode(codec.pack(fields[:-1]))
    assert step.shape is None
    world = sim.kernel(sim.till(), repeated_by)
    restore.kernel.repeat(world, world.program.initial(), step, height=1)


# -- fields that older code dropped ----------------------------------------------------------------


def test_a_field_that_older_code_dropped_is_at_its_default_in_every_replay() -> None:
    sim = Tills(FIRST, GROWN)
    sim.start("B", GROWN)
    sim.till().send(Tipped(5))
    sim.pay(100)
    assert sim.till().state().tips == 5
    sim.stop("B")
    # Rolled back in good order: the older code goes on from the snapshot, without the field.
    sim.start("A", FIRST)
    sim.pay(10)
    sim.start("B", GROWN)
    sim.kill("A")
    sim.pay(1)
    assert sim.blocker is None
    assert (sim.till().state().total, sim.till().state().tips) == (111, 0)
    assert sim.till().state(at=2).tips == 5
    assert sim.made_by == ["2", "2", "1", "2"]
    assert sim.entries(GROWN).compared == 4


def test_a_field_that_is_not_dropped_is_no_excuse() -> None:
    """The code of the entry has all fields: what differs is no field that it dropped."""
    sim = Tills(GROWN, code("3", TIPS, doubles))
    sim.start("B", GROWN)
    sim.till().send(Tipped(5))
    sim.pay(100)
    with pytest.raises(ReplayDiverged):
        sim.till().state()


# -- snapshots of a state that has only grown ------------------------------------------------------


def test_a_worker_that_leaves_a_state_that_has_only_grown_leaves_a_snapshot() -> None:
    sim = Tills(FIRST, GROWN)
    sim.start("A", FIRST)
    sim.pay(100, 10)
    sim.kill("A")
    till = sim.till()
    worker = sim.worker("B", "1", app=GROWN)
    sim.assign(till, "B")
    worker._acquire([sim.id(till)])
    sim.store.read(worker.host_of(sim.id(till)).load)
    worker.finish()
    assert sim.baseline(till) == 2
    # It is the state of its height, whatever code reads it.
    held = sim.read(snapshot.load, sim.subject(till), 2)
    assert sha256(held).digest() == entry.decode(sim.bodies(till)[-1]).state
    for app in (FIRST, GROWN, DOUBLES):
        sim.entries(FIRST)
        assert sim.till(app).state().total == 110


def test_a_snapshot_that_is_due_of_a_state_that_has_only_grown_is_made() -> None:
    sim = Tills(FIRST, GROWN)
    sim.start("A", FIRST)
    sim.pay(1, 1, 1)
    sim.kill("A")
    till = sim.till()
    sim.assign(till, "B")
    worker = sim.worker("B", "1", app=GROWN, snapshots=SnapshotPolicy(entries=2))
    worker._acquire([sim.id(till)])
    host = worker.host_of(sim.id(till))
    cycle = host.prepare(sim.store)
    assert cycle is not None
    sim.store.transact(host.commit, cycle)
    host.settle(cycle)
    assert host.prepare(sim.store) is None
    assert sim.baseline(till) == 3
    assert sim.till(FIRST).state().total == 3


# -- shapes ----------------------------------------------------------------------------------------


def shape_of(**fields: tuple[Any, Any]) -> Shape:
    return Shape(code("1", fields).programs["Till"].state)


def test_a_shape_is_the_names_of_fields_and_not_their_types() -> None:
    assert shape_of(tips=(int, 0)).digest == shape_of(tips=(float, 1.5)).digest
    assert shape_of(tips=(int, 0)).digest != shape_of(tip=(int, 0)).digest
    assert shape_of(a=(int, 0), b=(int, 0)).digest == shape_of(b=(int, 0), a=(int, 0)).digest


def test_a_shape_has_the_fields_of_classes_inside() -> None:
    plain, noted = shape_of(x=(list[Line], [])), shape_of(x=(list[NotedLine], []))
    assert plain.digest != noted.digest
    assert noted.digest == shape_of(x=(dict[str, NotedLine | None], {})).digest


class Node(msgspec.Struct):
    below: list[Node] = []


def test_a_class_that_names_itself_has_a_shape() -> None:
    assert shape_of(x=(list[Node], [])).digest != shape_of(x=(list[Line], [])).digest


def test_a_shape_finds_the_fields_that_another_lacks() -> None:
    many = dict.fromkeys("abcdefgh", (int, 0))
    shape = shape_of(**many)
    assert shape.lacks(shape.digest) == frozenset()
    assert shape.lacks(shape_of().digest) == set(many)
    assert shape.lacks(shape_of(**{k: v for k, v in many.items() if k not in "bg"}).digest) == {
        "b",
        "g",
    }
    assert shape.lacks(shape_of(other=(int, 0)).digest) == frozenset()
    assert shape_of().lacks(shape.digest) == frozenset()
