"""Edge cases of effects: changed releases, keys, restores, too long tags, large results."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast import codec
from holdfast import store as stores
from holdfast.app.runtime import Runtime
from holdfast.config import TAG_BYTES_MAX
from holdfast.durable import dedupe
from holdfast.runner import settlement
from holdfast.store import schema
from holdfast.store.in_process import InProcessStore
from holdfast.world import intents
from tests.workers.rig import WorkerRig
from tests.workers.shop import Buyer, Dropped, GoodsOrdered

# These tests change rows below the store, which only the memory backend allows.
memory_store_only = pytest.mark.parametrize("rig", ["memory"], indirect=True)


MODULES = (
    "holdfast.world.intents",
    "holdfast.world.fork_inheritance",
    "holdfast.runner.settlement",
)


class Go(hf.Event):
    pass


def app_release(**options: Any) -> hf.App:
    """The same application with other options of its effect."""

    @hf.effect("edge.call", **options)
    def call(call: hf.Call) -> int:
        return 1

    class Edge(hf.World):
        wanted: int = 0

        @hf.on(Go)
        def go(self, event: Go, cx: hf.Context) -> None:
            self.wanted += 1
            cx.do(call)

    return hf.App("edges", worlds=[Edge], effects=[call])


@pytest.mark.parametrize(
    "options",
    [
        {"timeout_s": 120.0},
        {"attempts": 9},
        {"expiries_max": 9},
        {"concurrency": 1},
        {"rate_per_s": 5.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_changed_effect_options_replay_old_journals(
    options: dict[str, Any],
) -> None:
    old, new = app_release(), app_release(**options)
    with stores.open("memory:") as store:
        with old.open(store, roles=("orchestrator", "world")) as runtime:
            world = runtime.world(world_class_of(old), "w")
            world.send(Go())
            world.send(Go())
            world.wait_for(lambda state: state.wanted == 2)
        with new.open(store, roles=()) as runtime:
            # There is no snapshot after the first entry, so the state is replayed.
            assert runtime.world(world_class_of(new), "w").state(at=1).wanted == 1


def world_class_of(app: hf.App) -> type[Any]:
    [program] = app.programs.values()
    return program.state


def test_cancelled_effect_is_not_reissued_for_a_fork(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered(), Dropped())
    child = ada.fork("child", at=2, effects="reissue")
    rig.assign(child)
    rig.run_until_idle(rig.pool())
    assert child.state().told == ["error cancelled 0"]
    assert rig.fake_service.calls == []


def test_too_long_effect_tag_fails_only_its_event(rig: WorkerRig) -> None:
    ada = rig.buyer(
        "ada", GoodsOrdered(tag="x" * TAG_BYTES_MAX), GoodsOrdered(tag="x" * (TAG_BYTES_MAX + 1))
    )
    rig.run_until_idle(rig.pool())
    assert len(ada.state().told) == 1
    assert ada.record().blocker is None


def restore_backup(rig: WorkerRig) -> hf.WorldHandle[Buyer]:
    """Restore a backup of the current rows: raise the generation and reopen. Return the world "ada"."""
    row = rig.backend.get(schema.META_KEY)
    assert row is not None
    meta = codec.unpack_as(schema.StoreMeta, row)
    rig.backend.set(schema.META_KEY, codec.pack(replace(meta, generation=meta.generation + 1)))
    rig.store = InProcessStore("memory:", rig.backend, rig.clock)
    rig.runtime = Runtime(rig.app, rig.store, roles=(), clock=rig.clock)
    rig.world_worker = rig.worker(incarnation="restored", idle_s=1e6)
    return rig.runtime.world(Buyer, "ada")


@memory_store_only
def test_effect_key_after_a_restore_is_the_same_intent(rig: WorkerRig) -> None:
    rig.buyer("ada", GoodsOrdered(key="k"))
    ada = restore_backup(rig)
    ada.send(GoodsOrdered(key="k"))
    rig.run_until_idle(rig.pool())
    first, again = ada.state().intents
    assert first == again
    assert ada.state().told == ["ok done 1"]
    assert len(rig.fake_service.calls) == 1


@memory_store_only
def test_keyed_effect_can_be_cancelled_after_a_restore(rig: WorkerRig) -> None:
    rig.buyer("ada", GoodsOrdered(key="k"))
    ada = restore_backup(rig)
    ada.send(GoodsOrdered(key="k"))
    ada.send(Dropped(n=1))
    rig.run_until_idle(rig.pool())
    assert ada.state().told == ["error cancelled 0"]
    assert rig.fake_service.calls == []


@memory_store_only
def test_finished_keyed_effect_after_a_restore_is_not_reissued_for_a_fork(
    rig: WorkerRig,
) -> None:
    rig.buyer("ada", GoodsOrdered(key="k"))
    rig.run_until_idle(rig.pool())
    ada = restore_backup(rig)
    ada.send(GoodsOrdered(key="k"))
    rig.run_worlds()
    child = ada.fork("child", effects="reissue")
    rig.assign(child)
    rig.run_until_idle(rig.pool())
    assert len(rig.fake_service.calls) == 1
    assert child.state().told == ["ok done 1"]


@memory_store_only
def test_call_undone_by_a_restore_gets_another_idempotency_key(rig: WorkerRig) -> None:
    ada = rig.buyer("ada")
    backup = dict(rig.backend.rows)
    ada.send(GoodsOrdered(key="k"))
    rig.run_until_idle(rig.pool())
    rig.backend.rows, rig.backend.keys = backup, sorted(backup)
    ada = restore_backup(rig)
    ada.send(GoodsOrdered(key="k"))
    rig.run_until_idle(rig.pool())
    assert len(rig.fake_service.calls) == len(rig.fake_service.keys) == 2


def test_expired_dedupe_key_of_a_pending_effect_is_the_same_intent(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered(key="k"))
    rig.clock.advance(10)
    while rig.store.transact(dedupe.expire, intents.dedupe_scope(rig.universe), 0, 100):
        pass
    ada.send(GoodsOrdered(key="k"))
    rig.run_until_idle(rig.pool())
    assert len(rig.fake_service.calls) == 1


def test_expired_dedupe_key_of_a_pending_effect_still_conflicts(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered("tea", key="k"))
    rig.clock.advance(10)
    while rig.store.transact(dedupe.expire, intents.dedupe_scope(rig.universe), 0, 100):
        pass
    ada.send(GoodsOrdered("milk", key="k", tag="other"))
    rig.run_until_idle(rig.pool())
    assert ada.state().told == ["error key_conflict 0 other", "ok done 1"]
    assert [call.args for call in rig.fake_service.calls] == [("tea",)]


def test_each_key_conflict_has_its_own_receipt(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered("tea", key="k"), GoodsOrdered("milk", times=2, key="k"))
    ada.send(GoodsOrdered("milk", key="k"))
    rig.run_until_idle(rig.pool())
    hashes = [entry.step.ingress.intent_hash for entry in ada.journal()[3:]]
    assert ada.state().told == ["error key_conflict 0"] * 3 + ["ok done 1"]
    assert len(set(hashes)) == 4
    assert hashes[3] == ada.state().intents[0]


def test_large_results_are_settled_in_several_commits(
    rig: WorkerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settlement, "SETTLEMENT_BYTES_MAX", 1000)
    ada = rig.buyer("ada", GoodsOrdered(times=20))
    rig.fake_service.answers += ["x" * 600] * 20
    commits = rig.backend.commits
    rig.run_until_idle(rig.pool())
    assert len(ada.state().told) == 20
    assert rig.backend.commits - commits > 10


@pytest.mark.parametrize("wrong", [None, "text", 7])
def test_cancel_of_a_value_that_is_no_intent_fails(wrong: Any) -> None:
    class Hopeless(hf.World):
        @hf.on(Go)
        def go(self, event: Go, cx: hf.Context) -> None:
            cx.cancel(wrong)

    with hf.App("hopeless", worlds=[Hopeless]).open("memory:") as runtime:
        world = runtime.world(Hopeless, "w")
        world.send(Go())
        world.wait_for(lambda state: world.height() == 1)
        [entry] = world.journal()
        assert "cancel" in entry.error
