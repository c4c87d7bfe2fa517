"""Effects where something else than a call changes: releases, keys, long words, large answers."""

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
from holdfast.runner import settle
from holdfast.store import schema
from holdfast.store.local import LocalStore
from holdfast.world import publish
from tests.roles.rig import Rig
from tests.roles.shop import Buyer, Dropped, Ordered

# What it does to the rows below the store can be done to rows in memory only.
on_rows_at_hand = pytest.mark.parametrize("rig", ["memory"], indirect=True)


MODULES = ("holdfast.world.publish", "holdfast.world.inherit", "holdfast.runner.settle")


class Go(hf.Event):
    pass


def release(**options: Any) -> hf.App:
    """The same application, with an effect that is declared another way."""

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
    [{"timeout_s": 120.0}, {"attempts": 9}, {"concurrency": 1}, {"rate_per_s": 5.0}],
    ids=lambda options: next(iter(options)),
)
def test_a_release_that_declares_an_effect_another_way_replays_old_journals(
    options: dict[str, Any],
) -> None:
    old, new = release(), release(**options)
    with stores.open("memory:") as store:
        with old.open(store, roles=("orchestrator", "world")) as runtime:
            world = runtime.world(kind_of(old), "w")
            world.send(Go())
            world.send(Go())
            world.wait_for(lambda state: state.wanted == 2)
        with new.open(store, roles=()) as runtime:
            # After the first entry there is no snapshot: it is repeated.
            assert runtime.world(kind_of(new), "w").state(at=1).wanted == 1


def kind_of(app: hf.App) -> type[Any]:
    [program] = app.programs.values()
    return program.state


def test_an_effect_that_its_world_cancelled_is_not_reissued_for_a_fork(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(), Dropped())
    child = ada.fork("child", at=2, effects="reissue")
    rig.assign(child)
    rig.work(rig.pool())
    assert child.state().told == ["error cancelled 0"]
    assert rig.outside.calls == []


def test_a_tag_that_is_too_long_fails_its_event_and_nothing_else(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(tag="x" * TAG_BYTES_MAX), Ordered(tag="x" * (TAG_BYTES_MAX + 1)))
    rig.work(rig.pool())
    assert len(ada.state().told) == 1
    assert ada.record().blocker is None


def restored(rig: Rig) -> hf.WorldHandle[Buyer]:
    """Ada, in a store into which a backup of this moment was put back: another generation."""
    row = rig.backend.get(schema.META_KEY)
    assert row is not None
    meta = codec.unpack_as(schema.Meta, row)
    rig.backend.set(schema.META_KEY, codec.pack(replace(meta, generation=meta.generation + 1)))
    rig.store = LocalStore("memory:", rig.backend, rig.clock)
    rig.runtime = Runtime(rig.app, rig.store, roles=(), clock=rig.clock)
    rig.host = rig.worker(incarnation="restored", idle_s=1e6)
    return rig.runtime.world(Buyer, "ada")


@on_rows_at_hand
def test_a_key_wanted_again_after_a_restore_is_the_same_intent(rig: Rig) -> None:
    rig.buyer("ada", Ordered(key="k"))
    ada = restored(rig)
    ada.send(Ordered(key="k"))
    rig.work(rig.pool())
    first, again = ada.state().intents
    assert first == again
    assert ada.state().told == ["ok done 1"]
    assert len(rig.outside.calls) == 1


@on_rows_at_hand
def test_what_was_wanted_again_after_a_restore_can_be_cancelled_by_its_new_intent(rig: Rig) -> None:
    rig.buyer("ada", Ordered(key="k"))
    ada = restored(rig)
    ada.send(Ordered(key="k"))
    ada.send(Dropped(n=1))
    rig.work(rig.pool())
    assert ada.state().told == ["error cancelled 0"]
    assert rig.outside.calls == []


@on_rows_at_hand
def test_a_key_that_is_done_and_wanted_again_after_a_restore_is_not_open_for_a_fork(
    rig: Rig,
) -> None:
    rig.buyer("ada", Ordered(key="k"))
    rig.work(rig.pool())
    ada = restored(rig)
    ada.send(Ordered(key="k"))
    rig.think()
    child = ada.fork("child", effects="reissue")
    rig.assign(child)
    rig.work(rig.pool())
    assert len(rig.outside.calls) == 1
    assert child.state().told == ["ok done 1"]


@on_rows_at_hand
def test_a_call_that_a_restore_undid_is_made_again_under_another_idempotency_key(rig: Rig) -> None:
    ada = rig.buyer("ada")
    backup = dict(rig.backend.rows)
    ada.send(Ordered(key="k"))
    rig.work(rig.pool())
    rig.backend.rows, rig.backend.keys = backup, sorted(backup)
    ada = restored(rig)
    ada.send(Ordered(key="k"))
    rig.work(rig.pool())
    assert len(rig.outside.calls) == len(rig.outside.keys) == 2


def test_a_key_that_is_forgotten_while_its_effect_waits_is_the_same_wish(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(key="k"))
    rig.clock.advance(10)
    while rig.store.transact(dedupe.collect, publish.scope(rig.universe), 0, 100):
        pass
    ada.send(Ordered(key="k"))
    rig.work(rig.pool())
    assert len(rig.outside.calls) == 1


def test_a_key_that_is_forgotten_while_its_effect_waits_still_stands_for_it(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered("tea", key="k"))
    rig.clock.advance(10)
    while rig.store.transact(dedupe.collect, publish.scope(rig.universe), 0, 100):
        pass
    ada.send(Ordered("milk", key="k", tag="other"))
    rig.work(rig.pool())
    assert ada.state().told == ["error key_conflict 0 other", "ok done 1"]
    assert [call.args for call in rig.outside.calls] == [("tea",)]


def test_every_use_of_a_key_for_something_else_has_a_receipt_of_its_own(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered("tea", key="k"), Ordered("milk", times=2, key="k"))
    ada.send(Ordered("milk", key="k"))
    rig.work(rig.pool())
    hashes = [entry.step.ingress.intent_hash for entry in ada.journal()[3:]]
    assert ada.state().told == ["error key_conflict 0"] * 3 + ["ok done 1"]
    assert len(set(hashes)) == 4
    assert hashes[3] == ada.state().intents[0]


def test_answers_that_do_not_fit_into_one_commit_go_into_several(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settle, "SETTLED_BYTES_MAX", 1000)
    ada = rig.buyer("ada", Ordered(times=20))
    rig.outside.answers += ["x" * 600] * 20
    commits = rig.backend.commits
    rig.work(rig.pool())
    assert len(ada.state().told) == 20
    assert rig.backend.commits - commits > 10


@pytest.mark.parametrize("wrong", [None, "text", 7])
def test_what_is_no_intent_cannot_be_cancelled(wrong: Any) -> None:
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
