"""The adapter pool with real threads, from a world's wish to its receipt."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast import codec
from holdfast import store as stores
from holdfast.clock import MS, S
from holdfast.durable import queue
from holdfast.durable.item import keys_of
from holdfast.messages import Kind, Receipt, Status
from holdfast.roles.adapter import AdapterPool
from holdfast.roles.world_worker import WorldWorker
from holdfast.runner.alone import SUSPECT
from holdfast.store import tuples
from holdfast.store.api import Store
from holdfast.world import publish
from tests.postgres import fresh_url
from tests.roles.rig import Rig
from tests.roles.shop import Dropped, Ordered
from tests.world.rig import Crash

MODULES = ("holdfast.roles.adapter", "holdfast.roles.doing")

U = "house"
LONG_S = 30.0
FOR_EVER_S = 3600.0


# -- the application -------------------------------------------------------------------------------


class Outside:
    """Where all calls meet: each says who it is, and stays until it is let go."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, hf.Call]] = []
        self.inside: list[str] = []
        self.most_inside = 0
        self.company: list[list[str]] = []
        self.cancelled: list[str] = []
        self.over = threading.Event()
        self._gates: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def gate(self, what: str) -> threading.Event:
        with self._lock:
            return self._gates.setdefault(what, threading.Event())

    def enter(self, call: hf.Call, what: str) -> None:
        with self._lock:
            self.calls.append((what, call))
            self.inside.append(what)
            self.most_inside = max(self.most_inside, len(self.inside))
            if len(self.inside) > 1 and any("suspect" in one for one in self.inside):
                self.company.append(list(self.inside))

    def leave(self, what: str) -> None:
        with self._lock:
            self.inside.remove(what)

    def open(self, what: str) -> bool:
        return what.startswith("quick") or self.gate(what).is_set() or self.over.is_set()

    def called(self, what: str) -> int:
        return sum(one == what for one, _ in self.calls)

    def call_of(self, what: str) -> hf.Call:
        [call] = [call for one, call in self.calls if one == what]
        return call


outside = Outside()


def do(call: hf.Call, what: str) -> str:
    outside.enter(call, what)
    try:
        while not outside.open(what):
            if "working" in what:
                call.progress()
            if "heeding" in what and call.cancelled:
                outside.cancelled.append(what)
                break
            time.sleep(0.002)
        return f"{what} done"
    finally:
        outside.leave(what)


async def do_async(call: hf.Call, what: str) -> str:
    outside.enter(call, what)
    try:
        while not outside.open(what):
            if "working" in what:
                call.progress()
            await asyncio.sleep(0.002)
        return f"{what} done"
    except asyncio.CancelledError:
        outside.cancelled.append(what)
        raise
    finally:
        outside.leave(what)


def declared(kind: str, **options: Any) -> list[Any]:
    def plain(call: hf.Call, what: str) -> str:
        return do(call, what)

    async def coroutine(call: hf.Call, what: str) -> str:
        return await do_async(call, what)

    def wrapped(call: hf.Call, what: str) -> Any:
        """A plain function by its looks, as many decorators make them."""
        return do_async(call, what)

    return [
        hf.effect(f"{kind}.def", **options)(plain),
        hf.effect(f"{kind}.async", **options)(coroutine),
        hf.effect(f"{kind}.wrapped", **options)(wrapped),
    ]


EFFECTS: dict[str, Any] = {
    effect.kind: effect
    for effect in [
        *declared("long", timeout_s=FOR_EVER_S, attempts=1, concurrency=4),
        # Calls of this kind run out of time,
        *declared("short", timeout_s=0.2, attempts=1, concurrency=1),
        # and of this kind some do and some must not, on a busy machine either.
        *declared("brief", timeout_s=1.0, attempts=1, concurrency=1),
    ]
}


class Want(hf.Event):
    kind: str
    what: str
    times: int = 1


class Drop(hf.Event):
    what: str


class Wanter(hf.World):
    intents: dict[str, bytes] = msgspec.field(default_factory=dict)
    told: list[str] = msgspec.field(default_factory=list)

    @hf.on(Want)
    def want(self, event: Want, cx: hf.Context) -> None:
        for _ in range(event.times):
            intent = cx.do(EFFECTS[event.kind], event.what, tag=event.what)
            self.intents[event.what] = intent.intent_hash

    @hf.on(Drop)
    def drop(self, event: Drop, cx: hf.Context) -> None:
        cx.cancel(self.intents[event.what])

    @hf.on(*EFFECTS.values())
    def heard(self, receipt: hf.Receipt[str], cx: hf.Context) -> None:
        said = receipt.value if receipt.ok else f"{receipt.tag} {receipt.code}"
        self.told.append(f"{receipt.status} {said}")


app = hf.App(U, worlds=[Wanter])


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class House:
    def __init__(self, store: Store, *, riding: bool = False) -> None:
        self.store = store
        self.riding = riding
        self.pools: list[AdapterPool] = []
        self.runtime = app.open(store, roles=("orchestrator", "world"))
        self.ada = self.runtime.world(Wanter, "ada")
        self.ada.create()

    def pool(self, name: str = "pool", **options: Any) -> AdapterPool:
        options = {"universe": U, "adapters": app.effects, "claim_s": FOR_EVER_S, **options}
        made = AdapterPool(self.store, worker=name, **options)
        self.pools.append(made)
        if self.riding:
            [worker] = [one for one in self.runtime.roles if isinstance(one, WorldWorker)]
            made.ride(worker.carriage)
        made.start()
        return made

    def want(self, kind: str, *whats: str) -> None:
        for what in whats:
            self.ada.send(Want(kind, what))

    def told(self) -> list[str]:
        told: list[str] = self.ada.state().told
        return told

    def counts(self, kind: str) -> queue.Counts:
        return self.store.read(queue.counts, publish.effects(U, kind))

    def stop(self, pool: AdapterPool) -> None:
        pool.request_stop()
        pool.join(LONG_S)

    def close(self) -> None:
        outside.over.set()
        for pool in self.pools:
            self.stop(pool)
        self.runtime.close()


@contextmanager
def housed(url: str, *, riding: bool = False) -> Iterator[House]:
    outside.__init__()  # type: ignore[misc]
    with stores.open(url) as store:
        house = House(store, riding=riding)
        try:
            yield house
        finally:
            house.close()


@pytest.fixture(
    params=["memory", "lmdb", "riding", pytest.param("postgres", marks=pytest.mark.deep)]
)
def house(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[House]:
    urls = {"memory": lambda: "memory:", "postgres": fresh_url}
    url = urls.get(request.param, lambda: f"lmdb:{tmp_path}/store")()
    with housed(url, riding=request.param == "riding") as made:
        yield made


@pytest.fixture
def quick_house() -> Iterator[House]:
    with housed("memory:") as made:
        yield made


BOTH = pytest.mark.parametrize("how", ["def", "async"])
ALL = pytest.mark.parametrize("how", ["def", "async", "wrapped"])


# -- calls and receipts ----------------------------------------------------------------------------


@BOTH
def test_what_a_world_wants_is_done_and_its_receipt_comes_back(house: House, how: str) -> None:
    house.pool()
    house.want(f"long.{how}", "quick tea")
    until(lambda: house.told() == ["ok quick tea done"])
    assert house.counts(f"long.{how}") == queue.Counts(done=1)


@BOTH
def test_many_are_done_once_each_and_no_more_at_once_than_the_kind_allows(
    house: House, how: str
) -> None:
    house.pool()
    whats = [f"quick {n}" for n in range(150)]
    house.runtime.send_many([(house.ada, Want(f"long.{how}", what)) for what in whats])
    until(lambda: len(house.told()) == 150)
    assert sorted(house.told()) == sorted(f"ok {what} done" for what in whats)
    assert sorted(what for what, _ in outside.calls) == sorted(whats)
    assert outside.most_inside <= 4


@BOTH
def test_a_slow_call_holds_up_no_other_of_its_kind(house: House, how: str) -> None:
    house.pool()
    house.want(f"long.{how}", "slow")
    until(lambda: outside.inside == ["slow"])
    house.want(f"long.{how}", *[f"quick {n}" for n in range(10)])
    until(lambda: len(house.told()) == 10)
    assert outside.inside == ["slow"]


@BOTH
def test_pools_that_share_a_queue_do_each_effect_once(house: House, how: str) -> None:
    for n in range(3):
        house.pool(f"pool {n}")
    house.runtime.send_many([(house.ada, Want(f"long.{how}", f"quick {n}")) for n in range(100)])
    until(lambda: len(house.told()) == 100)
    assert len(outside.calls) == 100


# -- out of time -----------------------------------------------------------------------------------


@ALL
def test_a_call_that_hangs_ends_in_a_timeout_receipt(house: House, how: str) -> None:
    house.pool()
    house.want(f"short.{how}", "hang")
    until(lambda: house.told() == ["timeout hang timeout"])
    assert house.counts(f"short.{how}") == queue.Counts(dead=1)


@BOTH
def test_calls_that_hang_hold_up_nobody_behind_them(quick_house: House, how: str) -> None:
    quick_house.pool()
    quick_house.want(f"brief.{how}", "hang 1", "hang 2", "quick")
    until(lambda: len(quick_house.told()) == 3)
    assert quick_house.told()[-1] == "ok quick done"


@BOTH
def test_a_call_that_was_out_of_time_is_told_so(quick_house: House, how: str) -> None:
    quick_house.pool()
    quick_house.want(f"short.{how}", "heeding hang")
    until(lambda: outside.cancelled == ["heeding hang"])
    assert outside.call_of("heeding hang").cancelled


@ALL
def test_a_call_that_makes_progress_has_all_the_time_it_needs(quick_house: House, how: str) -> None:
    quick_house.pool()
    quick_house.want(f"brief.{how}", "working")
    until(lambda: outside.inside == ["working"])
    quick_house.want(f"long.{how}", "slow")
    enough = time.monotonic() + 2 * EFFECTS[f"brief.{how}"].timeout_s
    until(lambda: time.monotonic() > enough)
    assert quick_house.told() == []
    outside.gate("working").set()
    until(lambda: quick_house.told() == ["ok working done"])
    assert outside.called("working") == 1


@BOTH
def test_a_call_may_take_much_longer_than_a_claim_lasts(quick_house: House, how: str) -> None:
    quick_house.pool(claim_s=1.0)
    kind = f"long.{how}"
    quick_house.want(kind, "slow")
    until(lambda: outside.inside == ["slow"])
    keys = keys_of(publish.effects(U, kind))

    def expires_ns() -> int:
        rows = quick_house.store.read(lambda t: t.scan(keys.claims, tuples.after(keys.claims)))
        [(key, _)] = rows
        found = tuples.unpack(key[len(keys.claims) :])[0]
        assert isinstance(found, int)
        return found

    first = expires_ns()
    until(lambda: expires_ns() > first + 2_000 * MS)
    outside.gate("slow").set()
    until(lambda: quick_house.told() == ["ok slow done"])
    assert outside.called("slow") == 1


# -- cancelling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["async", "wrapped"])
def test_cancelling_an_async_effect_cancels_its_task(house: House, how: str) -> None:
    house.pool()
    house.want(f"long.{how}", "hang", "other")
    until(lambda: set(outside.inside) == {"hang", "other"})
    house.ada.send(Drop("hang"))
    until(lambda: outside.cancelled == ["hang"])
    until(lambda: outside.inside == ["other"])
    until(lambda: house.told() == ["error hang cancelled"])


def test_cancelling_a_def_effect_tells_its_call(house: House) -> None:
    house.pool()
    house.want("long.def", "heeding hang", "other")
    until(lambda: set(outside.inside) == {"heeding hang", "other"})
    assert not outside.call_of("other").cancelled
    house.ada.send(Drop("heeding hang"))
    until(lambda: outside.cancelled == ["heeding hang"])
    until(lambda: house.told() == ["error heeding hang cancelled"])
    assert not outside.call_of("other").cancelled


@BOTH
def test_what_a_cancelled_call_still_brings_counts_for_nothing(
    quick_house: House, how: str
) -> None:
    quick_house.pool()
    quick_house.want(f"long.{how}", "hang")
    until(lambda: outside.inside == ["hang"])
    quick_house.ada.send(Drop("hang"))
    until(lambda: quick_house.told() == ["error hang cancelled"])
    outside.gate("hang").set()
    quick_house.want(f"long.{how}", "quick")
    until(lambda: len(quick_house.told()) == 2)
    assert quick_house.told() == ["error hang cancelled", "ok quick done"]
    assert quick_house.counts(f"long.{how}") == queue.Counts(done=2)


@BOTH
def test_cancelled_calls_give_their_places_back(quick_house: House, how: str) -> None:
    quick_house.pool()
    hangs = [f"hang {n}" for n in range(4)]
    quick_house.want(f"long.{how}", *hangs)
    until(lambda: len(outside.inside) == 4)
    quick_house.want(f"long.{how}", "quick")
    for hang in hangs:
        quick_house.ada.send(Drop(hang))
    until(lambda: "ok quick done" in quick_house.told())


def test_whichever_pool_has_the_call_hears_of_the_cancellation(quick_house: House) -> None:
    for n in range(3):
        quick_house.pool(f"pool {n}")
    hangs = [f"hang {n}" for n in range(6)]
    quick_house.want("long.async", *hangs)
    until(lambda: len(outside.inside) == 6)
    for hang in hangs:
        quick_house.ada.send(Drop(hang))
    until(lambda: sorted(outside.cancelled) == hangs)


@BOTH
def test_cancellations_that_race_with_answers_leave_one_receipt_each(
    house: House, how: str
) -> None:
    kind = f"long.{how}"
    pools = [house.pool(f"pool {n}") for n in range(2)]
    whats = [f"quick {n}" for n in range(120)]
    chance = random.Random(11)
    for batch in (whats[at : at + 12] for at in range(0, 120, 12)):
        house.runtime.send_many([(house.ada, Want(kind, what)) for what in batch])
        until(lambda batch=batch: any(map(outside.called, batch)))  # type: ignore[misc]
        dropped = [Drop(what) for what in batch if chance.random() < 0.5]
        house.runtime.send_many([(house.ada, event) for event in dropped])
    until(lambda: len(house.told()) == 120)
    for pool in pools:
        house.stop(pool)
    state = house.ada.state()
    assert sorted(re.findall(r"quick \d+", " ".join(state.told))) == sorted(whats)
    assert {re.sub(r"\d+", "n", told) for told in state.told} <= {
        "ok quick n done", "error quick n cancelled",
    }  # fmt: skip
    counts = house.counts(kind)
    assert (counts.ready, counts.delayed, counts.claimed, counts.dead) == (0, 0, 0, 0)
    for intent in state.intents.values():
        assert house.store.read(publish.pending, U, intent) is None


# -- stopping --------------------------------------------------------------------------------------


@BOTH
def test_a_pool_that_stops_finishes_what_is_under_way_and_begins_nothing_more(
    quick_house: House, how: str
) -> None:
    pool = quick_house.pool()
    whats = [f"call {n}" for n in range(4)]
    quick_house.want(f"long.{how}", *whats)
    until(lambda: len(outside.inside) == 4)
    pool.request_stop()
    quick_house.want(f"long.{how}", "quick later")
    for what in whats:
        outside.gate(what).set()
    pool.join(LONG_S)
    until(lambda: len(quick_house.told()) == 4)
    assert outside.called("quick later") == 0
    until(lambda: quick_house.counts(f"long.{how}") == queue.Counts(ready=1, done=4))
    quick_house.pool("next")
    until(lambda: len(quick_house.told()) == 5)


def test_a_pool_that_has_ended_leaves_no_thread_of_its_hands_behind(quick_house: House) -> None:
    pool = quick_house.pool("fleeting")
    quick_house.want("long.def", "quick 1", "quick 2")
    quick_house.want("long.async", "quick 3")
    until(lambda: len(quick_house.told()) == 3)
    quick_house.stop(pool)
    until(lambda: not any(t.name.startswith("fleeting/long") for t in threading.enumerate()))


# -- suspects --------------------------------------------------------------------------------------


@BOTH
def test_an_effect_that_pools_may_have_died_of_runs_by_itself_in_its_pool(
    house: House, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a slow machine neither wait comes to its end here.
    monkeypatch.setattr("holdfast.runner.alone.PATIENCE_NS", 60 * S)
    monkeypatch.setattr("holdfast.runner.tending.SOLITUDE_NS", 60 * S)
    kind = f"long.{how}"
    name = publish.effects(U, kind)
    house.want(kind, "suspect")
    until(lambda: house.counts(kind).ready == 1)
    for _ in range(SUSPECT):
        [claim] = house.store.transact(queue.claim, name, "dead", 1, MS)
        expires_ns = claim.expires_ns
        until(lambda at=expires_ns: house.store.now_ns() > at)  # type: ignore[misc]
    house.want("long.def", "quick before")
    house.want("long.async", "quick before")
    house.pool()
    until(lambda: outside.inside == ["suspect"])
    house.want("long.def", "quick after")
    house.want("long.async", "quick after")
    until(lambda: house.counts("long.def").ready + house.counts("long.async").ready >= 2)
    outside.gate("suspect").set()
    until(lambda: len(house.told()) == 5)
    assert outside.company == []


# -- records of attempts ---------------------------------------------------------------------------


@pytest.fixture
def rig() -> Rig:
    return Rig()


def journaled(handle: hf.WorldHandle[Any]) -> list[Receipt]:
    """The receipts in a world's journal."""
    found = [one.step.ingress for one in handle.journal()]
    return [codec.unpack_as(Receipt, one.value) for one in found if one.kind is Kind.RECEIPT]


def test_a_receipt_tells_of_the_attempts_that_came_to_nothing(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    rig.outside.answers.extend([ValueError("no"), OSError("gone")])
    rig.work(rig.pool(), seconds=60)
    [receipt] = journaled(ada)
    assert (receipt.status, receipt.attempts) == (Status.OK, 3)
    assert [(one.number, one.end, one.code) for one in receipt.tried] == [
        (1, "failed", "handler_error"),
        (2, "failed", "handler_error"),
    ]
    assert ["no" in receipt.tried[0].error, "gone" in receipt.tried[1].error] == [True, True]
    assert receipt.tried[0].owner.startswith("pool/pay/")


def test_a_first_success_has_nothing_to_tell(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    rig.work(rig.pool())
    [receipt] = journaled(ada)
    assert receipt.tried == ()


def test_an_effect_that_waits_for_its_next_attempt_tells_of_the_last(rig: Rig) -> None:
    rig.buyer("ada", Ordered())
    rig.outside.answers.append(ValueError("no"))
    rig.work(rig.pool())
    keys = keys_of(publish.effects("shop", "pay"))
    item = rig.store.read(lambda txn: queue.items.load(txn, keys, tuples.pack_int(1)))
    assert [(one.end, one.code) for one in item.tried] == [("failed", "handler_error")]


def test_an_effect_that_is_given_up_tells_of_its_attempts_in_letter_and_receipt(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    rig.outside.answers.append(Crash())
    with pytest.raises(Crash):
        rig.work(rig.pool("first"))
    rig.expire(20)
    rig.outside.answers.extend([ValueError("no")] * 3)
    rig.work(rig.pool("second"), seconds=120)
    [letter] = rig.letters()
    [receipt] = journaled(ada)
    ends = [(one.owner.partition("/")[0], one.end) for one in letter.tried]
    assert ends == [("first", "expired"), *[("second", "failed")] * 3]
    assert receipt.tried == letter.tried


def test_a_cancelled_effect_has_its_receipt_at_once_although_nobody_will_answer(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    rig.outside.answers.append(Crash())
    with pytest.raises(Crash):
        rig.work(rig.pool("dies"))
    ada.send(Dropped())
    rig.think()
    assert ada.state().told == ["error cancelled 0"]
    rig.expire(20)
    rig.work(rig.pool("next"))
    assert len(rig.outside.calls) == 1
