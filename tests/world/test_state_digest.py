"""The state digest in the last entry of each cycle, and its comparison in replays."""

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
from holdfast.ops import world_operations
from holdfast.store.api import Txn
from holdfast.world import catalog, journal_entry, new_fields, redrive, restore
from holdfast.world import fork as forks
from holdfast.world.catalog import WorldStatus
from holdfast.world.cycle import Cycle, apply
from holdfast.world.host import Budgets, SnapshotPolicy
from tests.world.rig import WorldRig

MODULES = (
    "holdfast.world.new_fields",
    "holdfast.world.restore",
    "holdfast.world.reducer",
    "holdfast.world.journal_entry",
)

ONE_PER_CYCLE = Budgets(max_inbox_batch=1)
THREE_PER_CYCLE = Budgets(max_inbox_batch=3)


class Added(hf.Event):
    amount: int = 1


class Broke(hf.Event):
    pass


class UnhandledEvent(hf.Event):
    pass


def app_with(
    reducer: Callable[[Any, int], None], version: str = "1", **fields: tuple[Any, Any]
) -> hf.App:
    """Make an app whose world neither replies nor emits. Only its state shows the effect of its
    reducer."""

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
    return hf.App("digests", worlds=[kind], events=[UnhandledEvent], version=version)


def adds(self: Any, amount: int) -> None:
    self.balance += amount


def doubles(self: Any, amount: int) -> None:
    self.balance += 2 * amount


PLAIN = app_with(adds)
CHANGED = app_with(doubles, "2")


def nondeterministic_app(start: int = 0) -> hf.App:
    """Make an app with a nondeterministic reducer: each call gives another state."""
    calls = itertools.count(start)

    def reduce(self: Any, amount: int) -> None:
        self.balance = next(calls)

    return app_with(reduce)


def make_filled_world(rig: WorldRig, count: int, **policy: Any) -> hf.WorldHandle[Any]:
    handle = rig.world(rig.app.programs["Silent"].state, "s")
    for _ in range(count):
        handle.send(Added(100))
    rig.run(rig.worker(**policy))
    return handle


def steps_of(rig: WorldRig, handle: hf.WorldHandle[Any]) -> list[journal_entry.JournalStep]:
    return [journal_entry.decode(body) for body in rig.entry_bodies(handle)]


def rig_with_app(rig: WorldRig, app: hf.App) -> WorldRig:
    """Make a rig with other code on the same store and clock."""
    other_rig = WorldRig(app, rig.backend, rig.clock)
    other_rig.store = rig.store
    other_rig.runtime = Runtime(app, rig.store, roles=(), clock=rig.clock)
    return other_rig


# -- write -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 256])
def test_last_entry_of_every_cycle_has_the_state_digest(any_rig: WorldRig, batch: int) -> None:
    rig = rig_with_app(any_rig, PLAIN)
    silent = make_filled_world(rig, 10, budgets=Budgets(max_inbox_batch=batch))
    ends = [min(at + batch, 10) for at in range(0, 10, batch)]
    program = PLAIN.programs["Silent"]
    for height, step in enumerate(steps_of(rig, silent), 1):
        state = program.state(balance=100 * height)
        right = sha256(program.canonical_bytes(state)).digest() if height in ends else b""
        assert step.state == right, height


def test_state_digest_equals_the_snapshot_hash_of_its_height() -> None:
    rig = WorldRig(PLAIN)
    silent = make_filled_world(rig, 7, budgets=THREE_PER_CYCLE, snapshots=SnapshotPolicy(3))
    kept = rig.read(snapshot.heights, rig.subject(silent), 10)
    assert kept == [6, 3]
    steps = steps_of(rig, silent)
    for height in kept:
        state = rig.read(snapshot.load, rig.subject(silent), height)
        assert steps[height - 1].state == sha256(state).digest()


@pytest.mark.parametrize("last", [Broke(), UnhandledEvent()])
def test_cycle_ending_in_a_failed_or_ignored_step_has_a_state_digest(last: hf.Event) -> None:
    rig = WorldRig(PLAIN)
    silent = rig.world(PLAIN.programs["Silent"].state, "s")
    for event in (Added(5), last):
        silent.send(event)
    rig.run()
    program = PLAIN.programs["Silent"]
    digest = sha256(program.canonical_bytes(program.state(balance=5))).digest()
    assert [step.state for step in steps_of(rig, silent)] == [b"", digest]
    assert silent.state().balance == 5


def test_with_state_digest_changes_only_the_digest() -> None:
    rig = WorldRig(PLAIN)
    silent = make_filled_world(rig, 2)
    first, last = steps_of(rig, silent)
    assert last.state is not None
    for step in (first, replace(last, state=b"")):
        body = journal_entry.pack(step)
        again = journal_entry.with_state_digest(body, last.state)
        assert journal_entry.decode(again) == replace(step, state=last.state)
        assert again == journal_entry.pack(replace(step, state=last.state))


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
    rig = WorldRig(app_with(live, found=ANY))
    silent = make_filled_world(rig, 3)
    other = rig_with_app(rig, app_with(again, found=ANY))
    assert other.read(restore.check_snapshots, other.world_spec(silent)) == 3


def test_int_in_a_float_field_has_the_digest_of_the_float() -> None:
    rig = WorldRig(app_with(_float, rate=(float, 0.0)))
    silent = make_filled_world(rig, 2)
    program = rig.app.programs["Silent"]
    right = sha256(codec.pack({"balance": 0, "rate": 100.0})).digest()
    assert steps_of(rig, silent)[-1].state == right
    assert sha256(program.canonical_bytes(silent.state())).digest() == right


# -- compare ---------------------------------------------------------------------------------------


def test_code_computing_other_states_parks_the_world(any_rig: WorldRig) -> None:
    rig = rig_with_app(any_rig, PLAIN)
    silent = make_filled_world(rig, 10, budgets=THREE_PER_CYCLE)
    assert silent.state().balance == 1_000
    rig.advance_clock()
    other = rig_with_app(rig, CHANGED)
    silent.send(Added(1))
    other.run(other.worker("A", "2"))
    blocker = rig.record(silent).blocker
    assert blocker is not None
    assert (blocker.code, blocker.height) == ("replay_diverged", 3)
    assert rig.record(silent).status is WorldStatus.PARKED
    assert (rig.head(silent).height, rig.inbox_depth(silent)) == (10, 1)
    # A worker whose code replays the journal continues at its head.
    silent.resume()
    rig.run(rig.worker("A", "3"))
    assert silent.state().balance == 1_001


STATE_READS: dict[str, Callable[[WorldRig, hf.WorldHandle[Any]], object]] = {
    "state": lambda rig, world: world.state(),
    "state(at=)": lambda rig, world: world.state(at=5),
    "wait_for": lambda rig, world: world.wait_for(lambda state: True, timeout=0),
    "fork": lambda rig, world: world.fork("child"),
    "fork(at=)": lambda rig, world: world.fork("child", at=5),
    "fork(timers=)": lambda rig, world: world.fork("child", timers="keep"),
    "cut": lambda rig, world: rig.read(forks.plan_fork, rig.world_spec(world)),
    "service": lambda rig, world: world_operations.world_fork(
        rig.store, rig.universe, rig.id(world), "child", app=rig.app
    ),
    "restore": lambda rig, world: rig.read(restore.restore, rig.world_spec(world)),
    "check": lambda rig, world: rig.read(restore.replay_and_check, rig.world_spec(world)),
}


@pytest.mark.parametrize("read", STATE_READS)
@pytest.mark.parametrize("app", ["changed", "counting"])
def test_no_read_returns_a_state_that_diverges_from_the_journal(read: str, app: str) -> None:
    live, again = (PLAIN, CHANGED) if app == "changed" else (code := nondeterministic_app(), code)
    rig = WorldRig(live)
    make_filled_world(rig, 10, budgets=THREE_PER_CYCLE)
    other = rig_with_app(rig, again)
    again_world = other.runtime.world(again.programs["Silent"].state, "s")
    with pytest.raises(ReplayDiverged) as error:
        STATE_READS[read](other, again_world)
    assert error.value.fields["what"] == "state"
    assert error.value.fields["height"] == 3
    assert rig.read(catalog.find_id, rig.universe, "Silent", "child") is None


@pytest.mark.parametrize("at", [7, 8, 9])
def test_state_inside_a_cycle_is_compared_at_the_end_of_the_cycle(at: int) -> None:
    rig = WorldRig(PLAIN)
    silent = make_filled_world(rig, 9, budgets=THREE_PER_CYCLE)
    assert silent.state(at=at).balance == 100 * at

    def late(self: Any, amount: int) -> None:
        self.balance += amount + (self.balance >= 800)

    other = rig_with_app(rig, app_with(late))
    again = other.runtime.world(other.app.programs["Silent"].state, "s")
    assert again.state(at=6).balance == 600
    with pytest.raises(ReplayDiverged) as error:
        again.state(at=at)
    assert error.value.fields["height"] == 9


def test_replay_after_a_snapshot_is_compared() -> None:
    rig = WorldRig(PLAIN)
    silent = make_filled_world(
        rig, 8, budgets=Budgets(max_inbox_batch=2), snapshots=SnapshotPolicy(6)
    )
    assert rig.baseline(silent) == 6
    other = rig_with_app(rig, CHANGED)
    rig.advance_clock()
    silent.send(Added(1))
    other.run(other.worker("A", "2"))
    blocker = rig.record(silent).blocker
    assert blocker is not None
    assert (blocker.code, blocker.height) == ("replay_diverged", 8)


def _overwrite(txn: Txn, subject: str, height: int, state: bytes) -> None:
    saved = snapshot.SnapshotRow(sha256(state).digest(), txn.now_ns, len(state), state)
    txn.put(snapshot._key_at(subject, height), codec.pack(saved))


@pytest.mark.parametrize("look", ["worker", "state", "state(at=)", "fork", "seed", "check"])
def test_wrong_snapshot_is_detected_by_its_digest(look: str) -> None:
    rig = WorldRig(PLAIN)
    silent = make_filled_world(
        rig, 8, budgets=Budgets(max_inbox_batch=2), snapshots=SnapshotPolicy(6)
    )
    program = PLAIN.programs["Silent"]
    wrong = program.dump_state(program.state(balance=7))
    rig.store.transact(_overwrite, rig.subject(silent), 6, wrong)
    if look == "worker":
        rig.advance_clock()
        silent.send(Added(1))
        rig.run(rig.worker("A", "2"))
        blocker = rig.record(silent).blocker
        assert blocker is not None
        assert (blocker.code, blocker.height) == ("replay_diverged", 6)
        return
    seed = world_operations.SeedSnapshot(rig.id(silent), 6)
    looks: dict[str, Callable[[], object]] = {
        "state": silent.state,
        "state(at=)": lambda: silent.state(at=7),
        "fork": lambda: silent.fork("child", at=6),
        "seed": lambda: world_operations.world_create_from_seed(
            rig.store, rig.universe, "Silent", "child", seed
        ),
        "check": lambda: rig.read(restore.replay_and_check, rig.world_spec(silent)),
    }
    with pytest.raises(ReplayDiverged) as error:
        looks[look]()
    assert error.value.fields["height"] == 6


def test_state_changed_outside_a_step_is_not_snapshotted() -> None:
    """A reducer keeps a reference to its state, and the reducer of another world writes through
    it."""
    held: list[Any] = []

    def reduce(self: Any, amount: int) -> None:
        if held and held[0] is not self:
            held[0].balance = 77
        held.append(self)
        self.balance += amount

    rig = WorldRig(app_with(reduce))
    first, second = (rig.world(rig.app.programs["Silent"].state, name) for name in ("a", "b"))
    first.send(Added(1))
    worker = rig.run(rig.worker())
    second.send(Added(1))
    rig.run(worker)
    worker.shut_down()
    assert rig.baseline(second) == 1
    assert rig.baseline(first) == 0
    held.clear()
    assert first.state().balance == 1


def test_state_that_cannot_be_decoded_fails_its_event() -> None:
    def reduce(self: Any, amount: int) -> None:
        self.balance = "text" if amount == 2 else self.balance + amount

    rig = WorldRig(app_with(reduce))
    silent = rig.world(rig.app.programs["Silent"].state, "s")
    for amount in (1, 2, 3):
        silent.send(Added(amount))
    rig.run(rig.worker(budgets=ONE_PER_CYCLE))
    assert [one.outcome for one in silent.journal()] == ["ok", "failed", "ok"]
    [letter] = rig.failed_events()
    mended = rig_with_app(rig, app_with(adds))
    rig.advance_clock()
    rig.store.transact(queue.redrive, redrive.failed_events_queue(rig.universe), [letter.seq])
    mended.run(mended.worker("A", "2"))
    assert mended.runtime.world(mended.app.programs["Silent"].state, "s").state().balance == 6


def test_replayed_state_that_cannot_be_stored_has_diverged() -> None:
    rig = WorldRig(PLAIN)
    silent = make_filled_world(rig, 2)

    def reduce(self: Any, amount: int) -> None:
        self.balance = object()

    other = rig_with_app(rig, app_with(reduce))
    with pytest.raises(ReplayDiverged) as error:
        other.read(restore.restore, other.world_spec(silent))
    assert error.value.fields["height"] == 2


# -- new fields ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "new",
    [
        {"limit": (int, 7)},
        {"limit": (int, 0), "names": (list[str], []), "rate": (float, 1.5)},
        dict.fromkeys("abcdefgh", (int, 0)),
    ],
    ids=["one", "three", "eight"],
)
def test_new_fields_with_defaults_are_no_divergence(new: dict[str, tuple[Any, Any]]) -> None:
    rig = WorldRig(PLAIN)
    silent = make_filled_world(rig, 8, budgets=THREE_PER_CYCLE, snapshots=SnapshotPolicy(6))
    rig.advance_clock()
    other = rig_with_app(rig, app_with(adds, "2", **new))
    again = other.runtime.world(other.app.programs["Silent"].state, "s")
    assert again.state().balance == 800
    assert again.state(at=2).balance == 200
    # A host that restores the world and releases it unchanged causes no divergence.
    worker = other.worker("A", "2")
    worker._acquire_leases([rig.id(silent)])
    rig.store.read(worker.host_of(rig.id(silent)).load)
    worker.shut_down()
    again.send(Added(1))
    other.run(other.worker("A", "3")).shut_down()
    assert other.blocker_code(again) == ""
    assert other.read(restore.replay_and_check, other.world_spec(again)).compared == 9
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
def test_new_field_does_not_hide_a_divergence(
    reducer: Callable[[Any, int], None], new: dict[str, tuple[Any, Any]]
) -> None:
    rig = WorldRig(PLAIN)
    silent = make_filled_world(rig, 3)
    other = rig_with_app(rig, app_with(reducer, "2", **new))
    with pytest.raises(ReplayDiverged):
        other.read(restore.restore, other.world_spec(silent))


def _limits_large(self: Any, amount: int) -> None:
    self.balance += amount
    if amount > 1:
        self.limit = amount


def test_new_field_written_later_is_a_divergence() -> None:
    """At the first digest the field still has its default. The result for that state must not be
    reused for others."""
    rig = WorldRig(PLAIN)
    silent = rig.world(PLAIN.programs["Silent"].state, "s")
    worker = rig.worker()
    for amount in (1, 5):
        silent.send(Added(amount))
        rig.run(worker)
    other = rig_with_app(rig, app_with(_limits_large, "2", limit=(int, 0)))
    with pytest.raises(ReplayDiverged) as told:
        other.read(restore.restore, other.world_spec(silent))
    assert told.value.fields["height"] == 2


def test_new_field_of_a_large_state_is_no_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_fields, "HASHED_BYTES_MAX", 4)
    rig = WorldRig(PLAIN)
    silent = make_filled_world(rig, 3)
    other = rig_with_app(rig, app_with(adds, "2", limit=(int, 7)))
    assert other.read(restore.restore, other.world_spec(silent)).state.balance == 300


@pytest.mark.parametrize(
    ("was", "now"),
    [({"limit": (int, 7)}, {}), ({"limit": (int, 7)}, {"limit": (int, 8)})],
    ids=["a field that is gone", "a default that was changed"],
)
def test_removed_field_or_changed_default_is_a_divergence(
    was: dict[str, tuple[Any, Any]], now: dict[str, tuple[Any, Any]]
) -> None:
    rig = WorldRig(app_with(adds, **was))
    silent = make_filled_world(rig, 3)
    other = rig_with_app(rig, app_with(adds, "2", **now))
    with pytest.raises(ReplayDiverged):
        other.read(restore.restore, other.world_spec(silent))


# -- entries without digest ------------------------------------------------------------------------


def without_digest(body: bytes) -> bytes:
    """Convert an entry body to the format without digests."""
    fields = msgspec.msgpack.decode(body)
    return codec.pack(fields[:-2])


def run_without_digests(rig: WorldRig, handle: hf.WorldHandle[Any], count: int) -> None:
    """Commit cycles of one entry each in the format without digests."""
    worker = rig.worker(budgets=ONE_PER_CYCLE)
    for _ in range(count):
        handle.send(Added(100))
        worker._acquire_leases([] if worker.hosted else [rig.id(handle)])
        host = worker.host_of(rig.id(handle))
        cycle = host.prepare(rig.store)
        assert isinstance(cycle, Cycle)
        old = replace(cycle, bodies=[without_digest(body) for body in cycle.bodies])
        rig.store.transact(apply, old)
        host.invalidate()
    worker.shut_down()


def test_entries_without_digest_are_replayed_but_not_compared() -> None:
    rig = WorldRig(PLAIN)
    silent = rig.world(PLAIN.programs["Silent"].state, "s")
    run_without_digests(rig, silent, 4)
    assert [step.state for step in steps_of(rig, silent)] == [None] * 4
    assert silent.state().balance == 400
    assert silent.state(at=2).balance == 200
    for _ in range(5):
        silent.send(Added(100))
    rig.run(rig.worker("A", "2", budgets=THREE_PER_CYCLE))
    checked = rig.read(restore.replay_and_check, rig.world_spec(silent))
    assert (checked.steps, checked.compared, checked.not_compared) == (9, 5, 4)
    assert silent.state().balance == 900
    # A later digest detects a divergence that began in entries without digest.
    other = rig_with_app(rig, CHANGED)
    with pytest.raises(HoldfastError) as error:
        other.read(restore.restore, other.world_spec(silent))
    assert error.value.fields["height"] == 7
