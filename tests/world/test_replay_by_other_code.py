"""Replay by other code: if this code diverges on entries that other code wrote, the world waits for
a worker with that code (J6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast import codec
from holdfast.app.runtime import Runtime
from holdfast.app.world_handle import WorldHandle
from holdfast.clock import S
from holdfast.durable import lease, snapshot
from holdfast.errors import ReplayDiverged
from holdfast.ops import verify
from holdfast.workers.readiness import ReadinessReason
from holdfast.workers.readiness_facts import read_readiness
from holdfast.world import catalog, journal_entry, restore
from holdfast.world.catalog import WorldStatus
from holdfast.world.host import SnapshotPolicy
from holdfast.world.state_shape import StateShape
from tests.world.rig import make_backend
from tests.world.two_version_rig import TwoVersionRig

MODULES = (
    "holdfast.world.state_shape",
    "holdfast.world.unknown_events",
    "holdfast.world.code_requirement",
    "holdfast.world.new_fields",
    "holdfast.workers.orchestrator",
    "holdfast.workers.world.worker",
    "holdfast.workers.world.hosted_worlds",
)

WAIT_S = 3600.0


class BillPaid(hf.Event):
    """Handled by all versions."""

    amount: int = 1


class Tipped(hf.Event):
    """Handled by all versions. Versions with the field `tips` write it."""

    amount: int = 1


class BillLine(msgspec.Struct):
    amount: int = 0


class NotedLine(msgspec.Struct):
    amount: int = 0
    note: str = "new"


NotedLine.__name__ = "BillLine"


def make_app(
    version: str,
    fields: dict[str, tuple[Any, Any]] | None = None,
    pays: Callable[[Any, int], None] | None = None,
    line: type[Any] | None = None,
) -> hf.App:
    """Make a version of the app. Only the state shows the effect of its handlers."""

    def paid(self: Any, event: BillPaid, cx: hf.Context) -> None:
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
        "paid": hf.on(BillPaid)(paid),
        "tipped": hf.on(Tipped)(tipped),
    }
    kind = type(hf.World)("Till", (hf.World,), body)
    return hf.App("till", worlds=[kind], version=version)


TIPS = {"tips": (int, 0)}
BOOK = {"book": (str, "red")}


def doubles(self: Any, amount: int) -> None:
    self.total += 2 * amount


FIRST = make_app("1")
WITH_TIPS = make_app("2", TIPS)
DOUBLES = make_app("2", pays=doubles)


class TillRig(TwoVersionRig):
    def __init__(self, first: hf.App, second: hf.App, backend: Any = None) -> None:
        super().__init__(backend, first, second)

    def till(self, app: hf.App | None = None, name: str = "t") -> WorldHandle[Any]:
        """Return a handle of a Till world through a version, by default the second."""
        code = app or self.new_runtime.app
        runtime = Runtime(code, self.store, roles=(), clock=self.clock)
        return runtime.world(code.programs["Till"].state, name)

    def pay(self, *amounts: int) -> None:
        for amount in amounts:
            self.till().send(BillPaid(amount))
        self.tick_until_idle()

    def replay_and_check(self, app: hf.App) -> restore.ReplayCheck:
        """Replay the whole journal with a version."""
        check: restore.ReplayCheck = self.read(
            restore.replay_and_check, self.world_spec(self.till(app), app)
        )
        return check

    @property
    def entry_versions(self) -> list[str]:
        return [journal_entry.decode(body).code for body in self.entry_bodies(self.till())]

    @property
    def blocker_code(self) -> tuple[str, int] | None:  # type: ignore[override]
        blocker = self.record(self.till()).blocked_by
        return None if blocker is None else (blocker.code, blocker.height)

    @property
    def status(self) -> WorldStatus:
        return self.record(self.till()).status


@pytest.fixture(params=["memory", "postgres"])
def till_rig(request: pytest.FixtureRequest) -> Iterator[TillRig]:
    made = TillRig(FIRST, WITH_TIPS, make_backend(request.param))
    yield made
    made.store.close()


def rig_after_kill(first: hf.App, second: hf.App, backend: Any = None) -> TillRig:
    """Make a rig in which the second version handled events without a snapshot, was killed, and the
    first version takes over."""
    till_rig = TillRig(first, second, backend)
    till_rig.start_worker("B", second)
    till_rig.pay(100, 10)
    till_rig.start_worker("A", first)
    till_rig.kill_worker("B")
    till_rig.pay(1)
    return till_rig


# -- other fields: the world waits for code --------------------------------------------------------


def test_rollback_of_a_deploy_that_added_a_field_parks_nothing(till_rig: TillRig) -> None:
    till_rig.start_worker("B", WITH_TIPS)
    till_rig.pay(100, 10)
    till_rig.start_worker("A", FIRST)
    till_rig.kill_worker("B")
    till_rig.pay(1)
    till = till_rig.till()
    assert till_rig.status is WorldStatus.ACTIVE
    assert till_rig.blocker_code == ("code_missing", 2)
    assert (till_rig.head(till).height, till_rig.inbox_depth(till)) == (2, 1)
    # The world is released: no lease, no assignment, no runnable mark.
    held = till_rig.read(lease.current_status, till_rig.subject(till))
    assert held.state is lease.LeaseState.FREE
    assert till_rig.read(catalog.find_assignment, "till", till_rig.id(till)) is None
    assert (till_rig.runnable("A"), till_rig.runnable(catalog.UNASSIGNED)) == ([], [])
    assert till_rig.read(verify.find_differences) == []
    # A worker with the code of the entries continues and handles the waiting event.
    till_rig.start_worker("C", WITH_TIPS)
    assert till.state().total == 111
    assert till_rig.blocker_code is None
    assert till_rig.record(till).unknown is None
    assert till_rig.entry_versions == ["2", "2", "2"]


def test_code_missing_blocker_names_the_code_and_the_entry() -> None:
    till_rig = rig_after_kill(FIRST, WITH_TIPS)
    program = WITH_TIPS.programs["Till"]
    found = till_rig.record(till_rig.till()).blocked_by
    assert found is not None
    assert f"'2@{program.shape.hex()}', which made entry 2" in found.text
    ready = read_readiness(till_rig.store, "till")
    [subject] = ready.subjects
    assert (subject.name, [one.reason for one in subject.reasons]) == (
        "Till/t",
        [ReadinessReason.CODE_MISSING],
    )
    assert subject.reasons[0].height == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (make_app("1", BOOK), make_app("2", TIPS)),
        (make_app("1", line=BillLine), make_app("2", line=NotedLine)),
        (make_app("same"), make_app("same", TIPS)),
        (make_app("1", TIPS), make_app("2")),
    ],
    ids=["one added and one removed", "in a class inside", "under one version", "removed"],
)
def test_world_waits_for_code_with_other_fields(first: hf.App, second: hf.App) -> None:
    for older, newer in ((first, second), (second, first)):
        till_rig = rig_after_kill(older, newer)
        fields = [set(app.programs["Till"].state.__struct_fields__) for app in (older, newer)]
        has_all = fields[0] > fields[1]
        if not has_all:
            assert (till_rig.status, till_rig.blocker_code) == (
                WorldStatus.ACTIVE,
                ("code_missing", 2),
            )
        till_rig.start_worker("C", newer)
        # Code with one additional field replays the entries without waiting.
        assert till_rig.till(older if has_all else newer).state().total == 111
        assert till_rig.blocker_code is None


def test_code_missing_times_out_and_parks_the_world() -> None:
    till_rig = rig_after_kill(FIRST, WITH_TIPS)
    till_rig.advance_with_heartbeats(WAIT_S - 60)
    assert till_rig.blocker_code == ("code_missing", 2)
    till_rig.advance_with_heartbeats(120)
    assert (till_rig.status, till_rig.blocker_code) == (WorldStatus.PARKED, ("replay_diverged", 2))
    assert till_rig.record(till_rig.till()).unknown is None
    assert till_rig.read(verify.find_differences) == []
    till_rig.start_worker("C", WITH_TIPS)
    assert till_rig.status is WorldStatus.PARKED
    till_rig.till().resume()
    till_rig.tick_until_idle()
    assert till_rig.till().state().total == 111
    assert till_rig.entry_versions == ["2", "2", "2"]


def test_code_missing_wait_continues_when_a_capable_worker_dies() -> None:
    till_rig = rig_after_kill(FIRST, WITH_TIPS)
    was = till_rig.record(till_rig.till()).unknown
    assert was is not None
    till_rig.clock.advance(600 * S)
    # The worker declares its code, is assigned the world, and dies before it acquires the lease.
    dying = till_rig.worker("C", "1", app=WITH_TIPS)
    till_rig.tick_until_idle()
    dying.tick()
    till_rig.leader.tick()
    placed = till_rig.record(till_rig.till()).unknown
    assert placed is not None
    assert not placed.waits
    till_rig.advance_clock(31)
    till_rig.tick_until_idle()
    till_rig.wait_for_heartbeats()
    now = till_rig.record(till_rig.till()).unknown
    assert now is not None
    assert (now.waits, now.since_ns) == (True, was.since_ns)


def test_worker_with_the_entrys_code_that_diverges_parks_the_world() -> None:
    drift = [0]

    def unsteady(self: Any, amount: int) -> None:
        self.total += amount + drift[0]

    newer = make_app("2", TIPS, unsteady)
    till_rig = rig_after_kill(FIRST, newer)
    assert till_rig.blocker_code == ("code_missing", 2)
    drift[0] = 5
    till_rig.start_worker("C", newer)
    assert (till_rig.status, till_rig.blocker_code) == (WorldStatus.PARKED, ("replay_diverged", 2))
    assert till_rig.record(till_rig.till()).unknown is None
    assert till_rig.head(till_rig.till()).height == 2


def test_pinned_world_waits_until_its_worker_has_the_code() -> None:
    till_rig = rig_after_kill(FIRST, WITH_TIPS)
    till_rig.store.transact(catalog.assign, "till", till_rig.id(till_rig.till()), "A", 0, "", True)
    till_rig.start_worker("C", WITH_TIPS)
    assert till_rig.blocker_code == ("code_missing", 2)
    till_rig.stop_worker("A")
    till_rig.start_worker("A", WITH_TIPS)
    assert till_rig.till().state().total == 111


def test_send_with_a_repeated_key_reports_the_missing_code() -> None:
    till_rig = rig_after_kill(FIRST, WITH_TIPS)
    till_rig.till().send(BillPaid(5), key="k")
    again = till_rig.till().send(BillPaid(5), key="k")
    assert again.status == "waiting"
    assert again.waits_for == f"code:{WITH_TIPS.programs['Till'].code}"


def test_deleted_world_does_not_wait_for_code() -> None:
    till_rig = rig_after_kill(FIRST, WITH_TIPS)
    till_rig.till().delete()
    assert till_rig.read(verify.find_differences) == []
    till_rig.start_worker("C", WITH_TIPS)


# -- same fields: a live worker has the code, or the world is parked -------------------------------


def test_changed_handlers_park_the_world_when_no_worker_has_its_code() -> None:
    till_rig = TillRig(FIRST, DOUBLES)
    till_rig.start_worker("A", FIRST)
    till_rig.pay(100)
    till_rig.kill_worker("A")
    till_rig.pay(1)
    worker = till_rig.start_worker("B", DOUBLES)
    assert (till_rig.status, till_rig.blocker_code) == (WorldStatus.PARKED, ("replay_diverged", 1))
    assert worker.hosted == []
    assert till_rig.entry_versions == ["1"]
    assert till_rig.read(verify.find_differences) == []


def test_changed_handlers_move_the_world_to_a_worker_with_its_code() -> None:
    till_rig = TillRig(FIRST, DOUBLES)
    till_rig.start_worker("A", FIRST)
    till_rig.pay(100)
    till_rig.start_worker("B", DOUBLES)
    till_rig.start_worker("C", FIRST)
    till = till_rig.till(FIRST)
    till_rig.store.transact(catalog.assign, "till", till_rig.id(till), "B")
    # The host dies without a release. The worker with diverging code gets the world first.
    del till_rig.workers["A"]
    till_rig.advance_clock(31)
    for worker in till_rig.workers.values():
        worker._heartbeat()
    till_rig.pay(1)
    assert till_rig.blocker_code is None
    assert till.state().total == 101
    assert till_rig.entry_versions == ["1", "1"]
    # A clean stop leaves a snapshot, from which the other code continues.
    till_rig.stop_worker("C")
    till_rig.pay(1)
    assert till_rig.blocker_code is None
    assert till_rig.till().state().total == 103
    assert till_rig.entry_versions == ["1", "1", "2"]


def test_changed_handlers_park_the_world_when_the_last_capable_worker_dies() -> None:
    till_rig = TillRig(FIRST, DOUBLES)
    till_rig.start_worker("A", FIRST)
    till_rig.pay(100)
    # Its heartbeat is recent and its lease is released: another worker takes over before the leader
    # detects the death.
    del till_rig.workers["A"]
    till_rig.store.transact(lease.force_release, till_rig.subject(till_rig.till()), "it is gone")
    till_rig.store.transact(catalog.unassign, "till", till_rig.id(till_rig.till()))
    till_rig.start_worker("B", DOUBLES)
    till_rig.pay(1)
    assert till_rig.status is WorldStatus.ACTIVE
    till_rig.advance_clock(6)
    till_rig.wait_for_heartbeats()
    assert (till_rig.status, till_rig.blocker_code) == (WorldStatus.PARKED, ("replay_diverged", 1))
    assert till_rig.entry_versions == ["1"]


def test_new_leader_waits_for_heartbeats_before_parking() -> None:
    till_rig = TillRig(FIRST, DOUBLES)
    till_rig.start_worker("A", FIRST)
    till_rig.pay(100)
    till_rig.kill_worker("A")
    till_rig.start_worker("C", FIRST)
    till_rig.start_worker("B", DOUBLES)
    till = till_rig.till(FIRST)
    stopped = till_rig.workers.pop("C")
    till_rig.store.transact(catalog.assign, "till", till_rig.id(till), "B")
    till_rig.pay(1)
    # "C" has sent no heartbeat to the new leader yet.
    till_rig.leader.shut_down()
    till_rig.leader = till_rig.make_leader("P")
    till_rig.tick_until_idle()
    assert till_rig.status is WorldStatus.ACTIVE
    till_rig.workers["C"] = stopped
    till_rig.wait_for_heartbeats()
    assert till_rig.blocker_code is None
    assert till.state().total == 101


def test_entry_without_a_shape_is_identified_by_its_version() -> None:
    """Entries in the format without shapes are treated as if the state had the same fields."""
    with pytest.raises(ReplayDiverged) as error:
        _replay_without_shape(WITH_TIPS, FIRST)
    assert error.value.fields["made_by"] == "2"
    assert FIRST.programs["Till"].has_shape_of("2")
    with pytest.raises(ReplayDiverged) as error:
        _replay_without_shape(make_app("2", pays=doubles), make_app("2"))
    assert "made_by" not in error.value.fields


def _replay_without_shape(made_by: hf.App, repeated_by: hf.App) -> None:
    till_rig = TillRig(repeated_by, made_by)
    till_rig.start_worker("A", made_by)
    till_rig.pay(100)
    [body] = till_rig.entry_bodies(till_rig.till())
    fields = codec.unpack(body)
    step = journal_entry.decode(codec.pack(fields[:-1]))
    assert step.shape is None
    world = till_rig.world_spec(till_rig.till(), repeated_by)
    restore.reducer.replay_step(world, world.definition.initial_state(), step, height=1)


# -- fields dropped by older code ------------------------------------------------------------------


def test_field_dropped_by_older_code_has_its_default_in_every_replay() -> None:
    till_rig = TillRig(FIRST, WITH_TIPS)
    till_rig.start_worker("B", WITH_TIPS)
    till_rig.till().send(Tipped(5))
    till_rig.pay(100)
    assert till_rig.till().state().tips == 5
    till_rig.stop_worker("B")
    # Clean rollback: the older code continues from the snapshot, without the field.
    till_rig.start_worker("A", FIRST)
    till_rig.pay(10)
    till_rig.start_worker("B", WITH_TIPS)
    till_rig.kill_worker("A")
    till_rig.pay(1)
    assert till_rig.blocker_code is None
    assert (till_rig.till().state().total, till_rig.till().state().tips) == (111, 0)
    assert till_rig.till().state(at=2).tips == 5
    assert till_rig.entry_versions == ["2", "2", "1", "2"]
    assert till_rig.replay_and_check(WITH_TIPS).compared == 4


def test_changed_result_without_a_dropped_field_diverges() -> None:
    """The code of the entry has all fields, so the difference is not a dropped field."""
    till_rig = TillRig(WITH_TIPS, make_app("3", TIPS, doubles))
    till_rig.start_worker("B", WITH_TIPS)
    till_rig.till().send(Tipped(5))
    till_rig.pay(100)
    with pytest.raises(ReplayDiverged):
        till_rig.till().state()


# -- snapshots of a state with new fields ----------------------------------------------------------


def test_releasing_worker_snapshots_a_state_with_new_fields() -> None:
    till_rig = TillRig(FIRST, WITH_TIPS)
    till_rig.start_worker("A", FIRST)
    till_rig.pay(100, 10)
    till_rig.kill_worker("A")
    till = till_rig.till()
    worker = till_rig.worker("B", "1", app=WITH_TIPS)
    till_rig.assign(till, "B")
    worker._acquire_leases([till_rig.id(till)])
    till_rig.store.read(worker.host_of(till_rig.id(till)).load)
    worker.shut_down()
    assert till_rig.baseline(till) == 2
    # The snapshot is the state of its height for every version.
    held = till_rig.read(snapshot.load, till_rig.subject(till), 2)
    assert sha256(held).digest() == journal_entry.decode(till_rig.entry_bodies(till)[-1]).state
    for app in (FIRST, WITH_TIPS, DOUBLES):
        till_rig.replay_and_check(FIRST)
        assert till_rig.till(app).state().total == 110


def test_due_snapshot_of_a_state_with_new_fields_is_taken() -> None:
    till_rig = TillRig(FIRST, WITH_TIPS)
    till_rig.start_worker("A", FIRST)
    till_rig.pay(1, 1, 1)
    till_rig.kill_worker("A")
    till = till_rig.till()
    till_rig.assign(till, "B")
    worker = till_rig.worker("B", "1", app=WITH_TIPS, snapshots=SnapshotPolicy(entries=2))
    worker._acquire_leases([till_rig.id(till)])
    host = worker.host_of(till_rig.id(till))
    cycle = host.prepare(till_rig.store)
    assert cycle is not None
    till_rig.store.transact(host.commit, cycle)
    host.on_committed(cycle)
    assert host.prepare(till_rig.store) is None
    assert till_rig.baseline(till) == 3
    assert till_rig.till(FIRST).state().total == 3


# -- shapes ----------------------------------------------------------------------------------------


def shape_of(**fields: tuple[Any, Any]) -> StateShape:
    return StateShape(make_app("1", fields).programs["Till"].state)


def test_state_shape_ignores_field_types_and_order() -> None:
    assert shape_of(tips=(int, 0)).digest == shape_of(tips=(float, 1.5)).digest
    assert shape_of(tips=(int, 0)).digest != shape_of(tip=(int, 0)).digest
    assert shape_of(a=(int, 0), b=(int, 0)).digest == shape_of(b=(int, 0), a=(int, 0)).digest


def test_state_shape_includes_nested_classes() -> None:
    plain, noted = shape_of(x=(list[BillLine], [])), shape_of(x=(list[NotedLine], []))
    assert plain.digest != noted.digest
    assert noted.digest == shape_of(x=(dict[str, NotedLine | None], {})).digest


class Node(msgspec.Struct):
    below: list[Node] = []


def test_recursive_class_has_a_state_shape() -> None:
    assert shape_of(x=(list[Node], [])).digest != shape_of(x=(list[BillLine], [])).digest


def test_state_shape_lists_fields_missing_in_another() -> None:
    many = dict.fromkeys("abcdefgh", (int, 0))
    shape = shape_of(**many)
    assert shape.fields_missing_in(shape.digest) == frozenset()
    assert shape.fields_missing_in(shape_of().digest) == set(many)
    assert shape.fields_missing_in(
        shape_of(**{k: v for k, v in many.items() if k not in "bg"}).digest
    ) == {
        "b",
        "g",
    }
    assert shape.fields_missing_in(shape_of(other=(int, 0)).digest) == frozenset()
    assert shape_of().fields_missing_in(shape.digest) == frozenset()
