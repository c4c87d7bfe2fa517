"""The digest of the state in the last entry of each cycle, and the replays that compare it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast import codec
from holdfast.app.runtime import Runtime
from holdfast.durable import queue, snapshot
from holdfast.errors import HoldfastError, ReplayDiverged
from holdfast.ops import service
from holdfast.store.api import Txn
from holdfast.world import catalog, entry, growth, redrive, restore
from holdfast.world import fork as forks
from holdfast.world.catalog import Status
from holdfast.world.cycle import Cycle, apply
from holdfast.world.host import Budgets, SnapshotPolicy
from tests.world.rig import Rig

MODULES = (
    "holdfast.world.growth",
    "holdfast.world.restore",
    "holdfast.world.kernel",
    "holdfast.world.entry",
)

ONE_BY_ONE = Budgets(max_inbox_batch=1)
THREE = Budgets(max_inbox_batch=3)


class Added(hf.Event):
    amount: int = 1


class Broke(hf.Event):
    pass


class Unheard(hf.Event):
    pass


def app_with(
    reducer: Callable[[Any, int], None], version: str = "1", **fields: tuple[Any, Any]
) -> hf.App:
    """A world that neither replies nor emits: nothing but its state tells what its reducer did."""

    def added(self: Any, event: Added, cx: hf.Context) -> None:
        reducer(self, event.amount)

    def broke(self: Any, event: Broke, cx: hf.Context) -> None:
        self.balance += 1_000
        raise RuntimeError("as told")

    shape = {"balance": (int, 0), **fields}
    members = {name: default for name, (_, default) in shape.items()}
    hints = {name: kind for name, (kind, _) in shape.items()}
    body = {
        "__annotations__": hints,
        "__module__": __name__,
        **members,
        "added": hf.on(Added)(added),
        "broke": hf.on(Broke)(broke),
    }
    kind = type(hf.World)("Silent", (hf.World,), body)
    return hf.App("digests", worlds=[kind], events=[Unheard], version=version)


def adds(self: Any, amount: int) -> None:
    self.balance += amount


def doubles(self: Any, amount: int) -> None:
    self.balance += 2 * amount


PLAIN = app_with(adds)
CHANGED = app_with(doubles, "2")


def counting(start: int = 0) -> hf.App:
    """A reducer that looks at what no journal holds: each call gives another state."""
    calls = itertools.count(start)

    def reduce(self: Any, amount: int) -> None:
        self.balance = next(calls)

    return app_with(reduce)


def filled(rig: Rig, count: int, **policy: Any) -> hf.WorldHandle[Any]:
    handle = rig.world(rig.app.programs["Silent"].state, "s")
    for _ in range(count):
        handle.send(Added(100))
    rig.run(rig.worker(**policy))
    return handle


def steps_of(rig: Rig, handle: hf.WorldHandle[Any]) -> list[entry.Step]:
    return [entry.decode(body) for body in rig.bodies(handle)]


def as_run_by(rig: Rig, app: hf.App) -> Rig:
    """Other code on the same rows and clock."""
    other = Rig(app, rig.backend, rig.clock)
    other.store = rig.store
    other.runtime = Runtime(app, rig.store, roles=(), clock=rig.clock)
    return other


# -- written ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 256])
def test_the_last_entry_of_every_cycle_has_the_digest_of_the_state(
    any_rig: Rig, batch: int
) -> None:
    rig = as_run_by(any_rig, PLAIN)
    silent = filled(rig, 10, budgets=Budgets(max_inbox_batch=batch))
    ends = [min(at + batch, 10) for at in range(0, 10, batch)]
    program = PLAIN.programs["Silent"]
    for height, step in enumerate(steps_of(rig, silent), 1):
        state = program.state(balance=100 * height)
        right = sha256(program.canonical(state)).digest() if height in ends else b""
        assert step.state == right, height


def test_a_digest_is_that_of_the_snapshot_of_its_height() -> None:
    rig = Rig(PLAIN)
    silent = filled(rig, 7, budgets=THREE, snapshots=SnapshotPolicy(3))
    kept = rig.read(snapshot.heights, rig.subject(silent), 10)
    assert kept == [6, 3]
    steps = steps_of(rig, silent)
    for height in kept:
        state = rig.read(snapshot.load, rig.subject(silent), height)
        assert steps[height - 1].state == sha256(state).digest()


@pytest.mark.parametrize("last", [Broke(), Unheard()])
def test_a_cycle_that_ends_in_a_step_without_effect_has_a_digest(last: hf.Event) -> None:
    rig = Rig(PLAIN)
    silent = rig.world(PLAIN.programs["Silent"].state, "s")
    for event in (Added(5), last):
        silent.send(event)
    rig.run()
    program = PLAIN.programs["Silent"]
    digest = sha256(program.canonical(program.state(balance=5))).digest()
    assert [step.state for step in steps_of(rig, silent)] == [b"", digest]
    assert silent.state().balance == 5


def test_the_digest_takes_the_place_of_the_empty_one_and_changes_nothing_else() -> None:
    rig = Rig(PLAIN)
    silent = filled(rig, 2)
    first, last = steps_of(rig, silent)
    assert last.state is not None
    for step in (first, replace(last, state=b"")):
        body = entry.pack(step)
        again = entry.with_state(body, last.state)
        assert entry.decode(again) == replace(step, state=last.state)
        assert again == entry.pack(replace(step, state=last.state))


def _float(self: Any, amount: int) -> None:
    self.rate = amount


def _pairs(order: list[str]) -> Callable[[Any, int], None]:
    def reduce(self: Any, amount: int) -> None:
        self.found = dict.fromkeys(order, amount)

    return reduce


def _anything(value: Any) -> Callable[[Any, int], None]:
    def reduce(self: Any, amount: int) -> None:
        self.found = value

    return reduce


ANY: tuple[Any, Any] = (Any, None)


@pytest.mark.parametrize(
    ("live", "again"),
    [
        (_pairs(["a", "b"]), _pairs(["b", "a"])),
        (_anything({"a", "b", "c"}), _anything(["a", "b", "c"])),
        (_anything(frozenset({"x", "y"})), _anything(("x", "y"))),
        (_anything(b"bytes"), _anything(bytearray(b"bytes"))),
    ],
    ids=["order of a dict", "a set and a list", "a frozen set and a tuple", "two kinds of bytes"],
)
def test_equal_states_have_equal_digests(
    live: Callable[[Any, int], None], again: Callable[[Any, int], None]
) -> None:
    rig = Rig(app_with(live, found=ANY))
    silent = filled(rig, 3)
    other = as_run_by(rig, app_with(again, found=ANY))
    assert other.read(restore.check_snapshots, other.kernel(silent)) == 3


def test_an_int_in_a_floats_place_has_the_digest_of_the_float() -> None:
    rig = Rig(app_with(_float, rate=(float, 0.0)))
    silent = filled(rig, 2)
    program = rig.app.programs["Silent"]
    right = sha256(codec.pack({"balance": 0, "rate": 100.0})).digest()
    assert steps_of(rig, silent)[-1].state == right
    assert sha256(program.canonical(silent.state())).digest() == right


# -- compared --------------------------------------------------------------------------------------


def test_code_that_gives_other_states_parks_the_world_and_handles_nothing(any_rig: Rig) -> None:
    rig = as_run_by(any_rig, PLAIN)
    silent = filled(rig, 10, budgets=THREE)
    assert silent.state().balance == 1_000
    rig.expire()
    other = as_run_by(rig, CHANGED)
    silent.send(Added(1))
    other.run(other.worker("A", "2"))
    blocker = rig.record(silent).blocker
    assert blocker is not None
    assert (blocker.code, blocker.height) == ("replay_diverged", 3)
    assert rig.record(silent).status is Status.PARKED
    assert (rig.head(silent).height, rig.depth(silent)) == (10, 1)
    # Code that repeats the journal goes on from where it was.
    silent.resume()
    rig.run(rig.worker("A", "3"))
    assert silent.state().balance == 1_001


READS: dict[str, Callable[[Rig, hf.WorldHandle[Any]], object]] = {
    "state": lambda rig, world: world.state(),
    "state(at=)": lambda rig, world: world.state(at=5),
    "wait_for": lambda rig, world: world.wait_for(lambda state: True, timeout=0),
    "fork": lambda rig, world: world.fork("child"),
    "fork(at=)": lambda rig, world: world.fork("child", at=5),
    "fork(timers=)": lambda rig, world: world.fork("child", timers="keep"),
    "cut": lambda rig, world: rig.read(forks.cut, rig.kernel(world)),
    "service": lambda rig, world: service.world_fork(
        rig.store, rig.universe, rig.id(world), "child", app=rig.app
    ),
    "restore": lambda rig, world: rig.read(restore.restore, rig.kernel(world)),
    "check": lambda rig, world: rig.read(restore.check, rig.kernel(world)),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("app", ["changed", "counting"])
def test_no_read_answers_with_a_state_that_the_journal_does_not_tell_of(
    read: str, app: str
) -> None:
    live, again = (PLAIN, CHANGED) if app == "changed" else (code := counting(), code)
    rig = Rig(live)
    filled(rig, 10, budgets=THREE)
    other = as_run_by(rig, again)
    again_world = other.runtime.world(again.programs["Silent"].state, "s")
    with pytest.raises(ReplayDiverged) as error:
        READS[read](other, again_world)
    assert error.value.fields["what"] == "state"
    assert error.value.fields["height"] == 3
    assert rig.read(catalog.find, rig.universe, "Silent", "child") is None


@pytest.mark.parametrize("at", [7, 8, 9])
def test_a_state_inside_a_cycle_is_compared_at_the_end_of_the_cycle(at: int) -> None:
    rig = Rig(PLAIN)
    silent = filled(rig, 9, budgets=THREE)
    assert silent.state(at=at).balance == 100 * at

    def late(self: Any, amount: int) -> None:
        self.balance += amount + (self.balance >= 800)

    other = as_run_by(rig, app_with(late))
    again = other.runtime.world(other.app.programs["Silent"].state, "s")
    assert again.state(at=6).balance == 600
    with pytest.raises(ReplayDiverged) as error:
        again.state(at=at)
    assert error.value.fields["height"] == 9


def test_a_tail_on_top_of_a_snapshot_is_compared() -> None:
    rig = Rig(PLAIN)
    silent = filled(rig, 8, budgets=Budgets(max_inbox_batch=2), snapshots=SnapshotPolicy(6))
    assert rig.baseline(silent) == 6
    other = as_run_by(rig, CHANGED)
    rig.expire()
    silent.send(Added(1))
    other.run(other.worker("A", "2"))
    blocker = rig.record(silent).blocker
    assert blocker is not None
    assert (blocker.code, blocker.height) == ("replay_diverged", 8)


def _overwrite(txn: Txn, subject: str, height: int, state: bytes) -> None:
    saved = snapshot.Saved(sha256(state).digest(), txn.now_ns, len(state), state)
    txn.put(snapshot._at(subject, height), codec.pack(saved))


@pytest.mark.parametrize("look", ["worker", "state", "state(at=)", "fork", "seed", "check"])
def test_a_snapshot_that_is_not_the_state_of_its_height_is_found(look: str) -> None:
    rig = Rig(PLAIN)
    silent = filled(rig, 8, budgets=Budgets(max_inbox_batch=2), snapshots=SnapshotPolicy(6))
    program = PLAIN.programs["Silent"]
    wrong = program.dump(program.state(balance=7))
    rig.store.transact(_overwrite, rig.subject(silent), 6, wrong)
    if look == "worker":
        rig.expire()
        silent.send(Added(1))
        rig.run(rig.worker("A", "2"))
        blocker = rig.record(silent).blocker
        assert blocker is not None
        assert (blocker.code, blocker.height) == ("replay_diverged", 6)
        return
    seed = service.SeedSnapshot(rig.id(silent), 6)
    looks: dict[str, Callable[[], object]] = {
        "state": silent.state,
        "state(at=)": lambda: silent.state(at=7),
        "fork": lambda: silent.fork("child", at=6),
        "seed": lambda: service.world_create_from_seed(
            rig.store, rig.universe, "Silent", "child", seed
        ),
        "check": lambda: rig.read(restore.check, rig.kernel(silent)),
    }
    with pytest.raises(ReplayDiverged) as error:
        looks[look]()
    assert error.value.fields["height"] == 6


def test_a_state_that_something_else_than_a_step_has_changed_is_no_snapshot() -> None:
    """A reducer keeps a reference to its state, and another world's reducer writes through it."""
    held: list[Any] = []

    def reduce(self: Any, amount: int) -> None:
        if held and held[0] is not self:
            held[0].balance = 77
        held.append(self)
        self.balance += amount

    rig = Rig(app_with(reduce))
    first, second = (rig.world(rig.app.programs["Silent"].state, name) for name in ("a", "b"))
    first.send(Added(1))
    worker = rig.run(rig.worker())
    second.send(Added(1))
    rig.run(worker)
    worker.finish()
    assert rig.baseline(second) == 1
    assert rig.baseline(first) == 0
    held.clear()
    assert first.state().balance == 1


def test_a_state_that_cannot_be_read_back_is_never_journaled_its_event_fails() -> None:
    def reduce(self: Any, amount: int) -> None:
        self.balance = "text" if amount == 2 else self.balance + amount

    rig = Rig(app_with(reduce))
    silent = rig.world(rig.app.programs["Silent"].state, "s")
    for amount in (1, 2, 3):
        silent.send(Added(amount))
    rig.run(rig.worker(budgets=ONE_BY_ONE))
    assert [one.outcome for one in silent.journal()] == ["ok", "failed", "ok"]
    [letter] = rig.dead()
    mended = as_run_by(rig, app_with(adds))
    rig.expire()
    rig.store.transact(queue.redrive, redrive.failures(rig.universe), [letter.seq])
    mended.run(mended.worker("A", "2"))
    assert mended.runtime.world(mended.app.programs["Silent"].state, "s").state().balance == 6


def test_a_state_that_a_replay_cannot_store_has_diverged() -> None:
    rig = Rig(PLAIN)
    silent = filled(rig, 2)

    def reduce(self: Any, amount: int) -> None:
        self.balance = object()

    other = as_run_by(rig, app_with(reduce))
    with pytest.raises(ReplayDiverged) as error:
        other.read(restore.restore, other.kernel(silent))
    assert error.value.fields["height"] == 2


# -- fields that are new ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "new",
    [
        {"limit": (int, 7)},
        {"limit": (int, 0), "names": (list[str], []), "rate": (float, 1.5)},
        dict.fromkeys("abcdefgh", (int, 0)),
    ],
    ids=["one", "three", "eight"],
)
def test_fields_that_were_added_since_are_no_difference(new: dict[str, tuple[Any, Any]]) -> None:
    rig = Rig(PLAIN)
    silent = filled(rig, 8, budgets=THREE, snapshots=SnapshotPolicy(6))
    rig.expire()
    other = as_run_by(rig, app_with(adds, "2", **new))
    again = other.runtime.world(other.app.programs["Silent"].state, "s")
    assert again.state().balance == 800
    assert again.state(at=2).balance == 200
    # A host that restores and leaves again does no harm either.
    worker = other.worker("A", "2")
    worker._acquire([rig.id(silent)])
    rig.store.read(worker.host_of(rig.id(silent)).load)
    worker.finish()
    again.send(Added(1))
    other.run(other.worker("A", "3")).finish()
    assert other.blocker(again) == ""
    assert other.read(restore.check, other.kernel(again)).compared == 9
    assert again.state().balance == 801


def _limits(self: Any, amount: int) -> None:
    self.balance += amount
    self.limit = amount


@pytest.mark.parametrize(
    ("reducer", "new"),
    [
        (_limits, {"limit": (int, 7)}),
        (doubles, {"limit": (int, 7)}),
    ],
    ids=["a new field that is written", "another state"],
)
def test_a_new_field_hides_no_difference(
    reducer: Callable[[Any, int], None], new: dict[str, tuple[Any, Any]]
) -> None:
    rig = Rig(PLAIN)
    silent = filled(rig, 3)
    other = as_run_by(rig, app_with(reducer, "2", **new))
    with pytest.raises(ReplayDiverged):
        other.read(restore.restore, other.kernel(silent))


def _limits_much(self: Any, amount: int) -> None:
    self.balance += amount
    if amount > 1:
        self.limit = amount


def test_a_new_field_that_is_written_later_is_a_difference() -> None:
    """At the first digest it still has its default; what was found there holds for no other state."""
    rig = Rig(PLAIN)
    silent = rig.world(PLAIN.programs["Silent"].state, "s")
    worker = rig.worker()
    for amount in (1, 5):
        silent.send(Added(amount))
        rig.run(worker)
    other = as_run_by(rig, app_with(_limits_much, "2", limit=(int, 0)))
    with pytest.raises(ReplayDiverged) as told:
        other.read(restore.restore, other.kernel(silent))
    assert told.value.fields["height"] == 2


def test_a_new_field_of_a_large_state_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "TRIED_BYTES_MAX", 4)
    rig = Rig(PLAIN)
    silent = filled(rig, 3)
    other = as_run_by(rig, app_with(adds, "2", limit=(int, 7)))
    assert other.read(restore.restore, other.kernel(silent)).state.balance == 300


@pytest.mark.parametrize(
    ("was", "now"),
    [({"limit": (int, 7)}, {}), ({"limit": (int, 7)}, {"limit": (int, 8)})],
    ids=["a field that is gone", "a default that was changed"],
)
def test_a_class_that_cannot_have_had_the_state_is_a_difference(
    was: dict[str, tuple[Any, Any]], now: dict[str, tuple[Any, Any]]
) -> None:
    rig = Rig(app_with(adds, **was))
    silent = filled(rig, 3)
    other = as_run_by(rig, app_with(adds, "2", **now))
    with pytest.raises(ReplayDiverged):
        other.read(restore.restore, other.kernel(silent))


# -- entries from before ---------------------------------------------------------------------------


def without_digest(body: bytes) -> bytes:
    """An entry as it was written before there were digests."""
    fields = msgspec.msgpack.decode(body)
    return codec.pack(fields[:-2])


def run_as_before(rig: Rig, handle: hf.WorldHandle[Any], count: int) -> None:
    """Cycles of one entry each, committed as the code before did."""
    worker = rig.worker(budgets=ONE_BY_ONE)
    for _ in range(count):
        handle.send(Added(100))
        worker._acquire([] if worker.hosted else [rig.id(handle)])
        host = worker.host_of(rig.id(handle))
        cycle = host.prepare(rig.store)
        assert isinstance(cycle, Cycle)
        old = replace(cycle, bodies=[without_digest(body) for body in cycle.bodies])
        rig.store.transact(apply, old)
        host.forget()
    worker.finish()


def test_entries_from_before_are_read_and_are_not_compared() -> None:
    rig = Rig(PLAIN)
    silent = rig.world(PLAIN.programs["Silent"].state, "s")
    run_as_before(rig, silent, 4)
    assert [step.state for step in steps_of(rig, silent)] == [None] * 4
    assert silent.state().balance == 400
    assert silent.state(at=2).balance == 200
    for _ in range(5):
        silent.send(Added(100))
    rig.run(rig.worker("A", "2", budgets=THREE))
    checked = rig.read(restore.check, rig.kernel(silent))
    assert (checked.steps, checked.compared, checked.not_compared) == (9, 5, 4)
    assert silent.state().balance == 900
    # States that are compared later tell of a difference that began before.
    other = as_run_by(rig, CHANGED)
    with pytest.raises(HoldfastError) as error:
        other.read(restore.restore, other.kernel(silent))
    assert error.value.fields["height"] == 7
