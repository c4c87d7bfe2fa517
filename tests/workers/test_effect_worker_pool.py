"""The effect worker pool with real threads, from the intent of a world to its receipt."""

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
from holdfast.messages import IngressKind, IntentReceipt, ReceiptStatus
from holdfast.runner.isolation import SUSPECT_EXPIRIES
from holdfast.store import tuples
from holdfast.store.api import Store
from holdfast.workers.effects.pool import EffectWorkerPool
from holdfast.workers.world.worker import WorldWorker
from holdfast.world import intents as world_intents
from tests.postgres import fresh_url
from tests.workers.rig import WorkerRig
from tests.workers.shop import Dropped, GoodsOrdered
from tests.world.rig import Crash

MODULES = ("holdfast.workers.effects.pool", "holdfast.workers.effects.handler")

U = "house"
TIMEOUT_S = 30.0
NEVER_S = 3600.0


# -- the application -------------------------------------------------------------------------------


class GatedCalls:
    """Records all calls and blocks each one until its gate opens."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, hf.Call]] = []
        self.running: list[str] = []
        self.running_max = 0
        self.beside_suspect: list[list[str]] = []
        self.cancelled: list[str] = []
        self.shutdown = threading.Event()
        self._gates: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def gate(self, what: str) -> threading.Event:
        with self._lock:
            return self._gates.setdefault(what, threading.Event())

    def enter(self, call: hf.Call, what: str) -> None:
        with self._lock:
            self.calls.append((what, call))
            self.running.append(what)
            self.running_max = max(self.running_max, len(self.running))
            if len(self.running) > 1 and any("suspect" in one for one in self.running):
                self.beside_suspect.append(list(self.running))

    def exit(self, what: str) -> None:
        with self._lock:
            self.running.remove(what)

    def is_released(self, what: str) -> bool:
        return what.startswith("quick") or self.gate(what).is_set() or self.shutdown.is_set()

    def call_count(self, what: str) -> int:
        return sum(one == what for one, _ in self.calls)

    def call_of(self, what: str) -> hf.Call:
        [call] = [call for one, call in self.calls if one == what]
        return call


gated_calls = GatedCalls()


def run_call(call: hf.Call, what: str) -> str:
    gated_calls.enter(call, what)
    try:
        while not gated_calls.is_released(what):
            if "working" in what:
                call.progress()
            if "heeding" in what and call.cancelled:
                gated_calls.cancelled.append(what)
                break
            time.sleep(0.002)
        return f"{what} done"
    finally:
        gated_calls.exit(what)


async def run_call_async(call: hf.Call, what: str) -> str:
    gated_calls.enter(call, what)
    try:
        while not gated_calls.is_released(what):
            if "working" in what:
                call.progress()
            await asyncio.sleep(0.002)
        return f"{what} done"
    except asyncio.CancelledError:
        gated_calls.cancelled.append(what)
        raise
    finally:
        gated_calls.exit(what)


def declare_effects(kind: str, **options: Any) -> list[Any]:
    def plain(call: hf.Call, what: str) -> str:
        return run_call(call, what)

    async def coroutine(call: hf.Call, what: str) -> str:
        return await run_call_async(call, what)

    def wrapped(call: hf.Call, what: str) -> Any:
        """A plain function that returns a coroutine, as many decorators make them."""
        return run_call_async(call, what)

    return [
        hf.effect(f"{kind}.def", **options)(plain),
        hf.effect(f"{kind}.async", **options)(coroutine),
        hf.effect(f"{kind}.wrapped", **options)(wrapped),
    ]


EFFECTS: dict[str, Any] = {
    effect.kind: effect
    for effect in [
        *declare_effects("long", timeout_s=NEVER_S, attempts=1, concurrency=4),
        # Calls of this kind time out.
        *declare_effects("short", timeout_s=0.2, attempts=1, concurrency=1),
        # Some calls of this kind time out. All other calls must not, even on a busy machine.
        *declare_effects("brief", timeout_s=1.0, attempts=1, concurrency=1),
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
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class EffectPoolRig:
    def __init__(self, store: Store, *, fused: bool = False) -> None:
        self.store = store
        self.fused = fused
        self.pools: list[EffectWorkerPool] = []
        self.runtime = app.open(store, roles=("orchestrator", "world"))
        self.ada = self.runtime.world(Wanter, "ada")
        self.ada.create()

    def pool(self, name: str = "pool", **options: Any) -> EffectWorkerPool:
        options = {"universe": U, "adapters": app.effects, "claim_s": NEVER_S, **options}
        made = EffectWorkerPool(self.store, worker=name, **options)
        self.pools.append(made)
        if self.fused:
            [worker] = [one for one in self.runtime.roles if isinstance(one, WorldWorker)]
            made.set_commit_owner(worker.committer)
        made.start()
        return made

    def want(self, kind: str, *whats: str) -> None:
        for what in whats:
            self.ada.send(Want(kind, what))

    def receipt_texts(self) -> list[str]:
        told: list[str] = self.ada.state().told
        return told

    def counts(self, kind: str) -> queue.QueueCounts:
        return self.store.read(queue.counts, world_intents.effect_queue(U, kind))

    def stop(self, pool: EffectWorkerPool) -> None:
        pool.request_stop()
        pool.join(TIMEOUT_S)

    def close(self) -> None:
        gated_calls.shutdown.set()
        for pool in self.pools:
            self.stop(pool)
        self.runtime.close()


@contextmanager
def open_pool_rig(url: str, *, fused: bool = False) -> Iterator[EffectPoolRig]:
    gated_calls.__init__()  # type: ignore[misc]
    with stores.open(url) as store:
        rig = EffectPoolRig(store, fused=fused)
        try:
            yield rig
        finally:
            rig.close()


@pytest.fixture(
    params=["memory", "lmdb", "riding", pytest.param("postgres", marks=pytest.mark.deep)]
)
def pool_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EffectPoolRig]:
    urls = {"memory": lambda: "memory:", "postgres": fresh_url}
    url = urls.get(request.param, lambda: f"lmdb:{tmp_path}/store")()
    with open_pool_rig(url, fused=request.param == "riding") as opened:
        yield opened


@pytest.fixture
def memory_pool_rig() -> Iterator[EffectPoolRig]:
    with open_pool_rig("memory:") as opened:
        yield opened


BOTH = pytest.mark.parametrize("how", ["def", "async"])
ALL = pytest.mark.parametrize("how", ["def", "async", "wrapped"])


# -- calls and receipts ----------------------------------------------------------------------------


@BOTH
def test_effect_runs_and_its_world_gets_the_receipt(pool_rig: EffectPoolRig, how: str) -> None:
    pool_rig.pool()
    pool_rig.want(f"long.{how}", "quick tea")
    until(lambda: pool_rig.receipt_texts() == ["ok quick tea done"])
    assert pool_rig.counts(f"long.{how}") == queue.QueueCounts(done=1)


@BOTH
def test_effects_run_once_within_their_concurrency_limit(pool_rig: EffectPoolRig, how: str) -> None:
    pool_rig.pool()
    whats = [f"quick {n}" for n in range(150)]
    pool_rig.runtime.send_many([(pool_rig.ada, Want(f"long.{how}", what)) for what in whats])
    until(lambda: len(pool_rig.receipt_texts()) == 150)
    assert sorted(pool_rig.receipt_texts()) == sorted(f"ok {what} done" for what in whats)
    assert sorted(what for what, _ in gated_calls.calls) == sorted(whats)
    assert gated_calls.running_max <= 4


@BOTH
def test_slow_call_delays_no_other_call_of_its_kind(pool_rig: EffectPoolRig, how: str) -> None:
    pool_rig.pool()
    pool_rig.want(f"long.{how}", "slow")
    until(lambda: gated_calls.running == ["slow"])
    pool_rig.want(f"long.{how}", *[f"quick {n}" for n in range(10)])
    until(lambda: len(pool_rig.receipt_texts()) == 10)
    assert gated_calls.running == ["slow"]


@BOTH
def test_pools_sharing_a_queue_run_each_effect_once(pool_rig: EffectPoolRig, how: str) -> None:
    for n in range(3):
        pool_rig.pool(f"pool {n}")
    pool_rig.runtime.send_many(
        [(pool_rig.ada, Want(f"long.{how}", f"quick {n}")) for n in range(100)]
    )
    until(lambda: len(pool_rig.receipt_texts()) == 100)
    assert len(gated_calls.calls) == 100


# -- timeouts --------------------------------------------------------------------------------------


@ALL
def test_hanging_call_ends_in_a_timeout_receipt(pool_rig: EffectPoolRig, how: str) -> None:
    pool_rig.pool()
    pool_rig.want(f"short.{how}", "hang")
    until(lambda: pool_rig.receipt_texts() == ["timeout hang timeout"])
    assert pool_rig.counts(f"short.{how}") == queue.QueueCounts(dead=1)


@BOTH
def test_hanging_calls_time_out_and_the_next_call_runs(
    memory_pool_rig: EffectPoolRig, how: str
) -> None:
    memory_pool_rig.pool()
    memory_pool_rig.want(f"brief.{how}", "hang 1", "hang 2", "quick")
    until(lambda: len(memory_pool_rig.receipt_texts()) == 3)
    assert memory_pool_rig.receipt_texts()[-1] == "ok quick done"


@BOTH
def test_timeout_sets_cancelled_on_the_call(memory_pool_rig: EffectPoolRig, how: str) -> None:
    memory_pool_rig.pool()
    memory_pool_rig.want(f"short.{how}", "heeding hang")
    until(lambda: gated_calls.cancelled == ["heeding hang"])
    assert gated_calls.call_of("heeding hang").cancelled


@ALL
def test_progress_extends_the_timeout_of_a_call(memory_pool_rig: EffectPoolRig, how: str) -> None:
    memory_pool_rig.pool()
    memory_pool_rig.want(f"brief.{how}", "working")
    until(lambda: gated_calls.running == ["working"])
    memory_pool_rig.want(f"long.{how}", "slow")
    enough = time.monotonic() + 2 * EFFECTS[f"brief.{how}"].timeout_s
    until(lambda: time.monotonic() > enough)
    assert memory_pool_rig.receipt_texts() == []
    gated_calls.gate("working").set()
    until(lambda: memory_pool_rig.receipt_texts() == ["ok working done"])
    assert gated_calls.call_count("working") == 1


@BOTH
def test_claim_of_a_long_call_is_extended(memory_pool_rig: EffectPoolRig, how: str) -> None:
    memory_pool_rig.pool(claim_s=1.0)
    kind = f"long.{how}"
    memory_pool_rig.want(kind, "slow")
    until(lambda: gated_calls.running == ["slow"])
    keys = keys_of(world_intents.effect_queue(U, kind))

    def expires_ns() -> int:
        rows = memory_pool_rig.store.read(
            lambda t: t.scan(keys.by_expiry, tuples.prefix_end(keys.by_expiry))
        )
        [(key, _)] = rows
        found = tuples.unpack(key[len(keys.by_expiry) :])[0]
        assert isinstance(found, int)
        return found

    first = expires_ns()
    until(lambda: expires_ns() > first + 2_000 * MS)
    gated_calls.gate("slow").set()
    until(lambda: memory_pool_rig.receipt_texts() == ["ok slow done"])
    assert gated_calls.call_count("slow") == 1


# -- cancelling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["async", "wrapped"])
def test_cancelling_an_async_effect_cancels_its_task(pool_rig: EffectPoolRig, how: str) -> None:
    pool_rig.pool()
    pool_rig.want(f"long.{how}", "hang", "other")
    until(lambda: set(gated_calls.running) == {"hang", "other"})
    pool_rig.ada.send(Drop("hang"))
    until(lambda: gated_calls.cancelled == ["hang"])
    until(lambda: gated_calls.running == ["other"])
    until(lambda: pool_rig.receipt_texts() == ["error hang cancelled"])


def test_cancelling_a_def_effect_sets_cancelled_on_its_call(pool_rig: EffectPoolRig) -> None:
    pool_rig.pool()
    pool_rig.want("long.def", "heeding hang", "other")
    until(lambda: set(gated_calls.running) == {"heeding hang", "other"})
    assert not gated_calls.call_of("other").cancelled
    pool_rig.ada.send(Drop("heeding hang"))
    until(lambda: gated_calls.cancelled == ["heeding hang"])
    until(lambda: pool_rig.receipt_texts() == ["error heeding hang cancelled"])
    assert not gated_calls.call_of("other").cancelled


@BOTH
def test_late_result_of_a_cancelled_call_is_discarded(
    memory_pool_rig: EffectPoolRig, how: str
) -> None:
    memory_pool_rig.pool()
    memory_pool_rig.want(f"long.{how}", "hang")
    until(lambda: gated_calls.running == ["hang"])
    memory_pool_rig.ada.send(Drop("hang"))
    until(lambda: memory_pool_rig.receipt_texts() == ["error hang cancelled"])
    gated_calls.gate("hang").set()
    memory_pool_rig.want(f"long.{how}", "quick")
    until(lambda: len(memory_pool_rig.receipt_texts()) == 2)
    assert memory_pool_rig.receipt_texts() == ["error hang cancelled", "ok quick done"]
    assert memory_pool_rig.counts(f"long.{how}") == queue.QueueCounts(done=2)


@BOTH
def test_cancelled_calls_free_their_concurrency_slots(
    memory_pool_rig: EffectPoolRig, how: str
) -> None:
    memory_pool_rig.pool()
    hangs = [f"hang {n}" for n in range(4)]
    memory_pool_rig.want(f"long.{how}", *hangs)
    until(lambda: len(gated_calls.running) == 4)
    memory_pool_rig.want(f"long.{how}", "quick")
    for hang in hangs:
        memory_pool_rig.ada.send(Drop(hang))
    until(lambda: "ok quick done" in memory_pool_rig.receipt_texts())


def test_cancel_reaches_the_pool_that_runs_the_call(memory_pool_rig: EffectPoolRig) -> None:
    for n in range(3):
        memory_pool_rig.pool(f"pool {n}")
    hangs = [f"hang {n}" for n in range(6)]
    memory_pool_rig.want("long.async", *hangs)
    until(lambda: len(gated_calls.running) == 6)
    for hang in hangs:
        memory_pool_rig.ada.send(Drop(hang))
    until(lambda: sorted(gated_calls.cancelled) == hangs)


@BOTH
def test_cancel_racing_with_results_leaves_one_receipt_each(
    pool_rig: EffectPoolRig, how: str
) -> None:
    kind = f"long.{how}"
    pools = [pool_rig.pool(f"pool {n}") for n in range(2)]
    whats = [f"quick {n}" for n in range(120)]
    rng = random.Random(11)
    for batch in (whats[at : at + 12] for at in range(0, 120, 12)):
        pool_rig.runtime.send_many([(pool_rig.ada, Want(kind, what)) for what in batch])
        until(lambda batch=batch: any(map(gated_calls.call_count, batch)))  # type: ignore[misc]
        dropped = [Drop(what) for what in batch if rng.random() < 0.5]
        pool_rig.runtime.send_many([(pool_rig.ada, event) for event in dropped])
    until(lambda: len(pool_rig.receipt_texts()) == 120)
    for pool in pools:
        pool_rig.stop(pool)
    state = pool_rig.ada.state()
    assert sorted(re.findall(r"quick \d+", " ".join(state.told))) == sorted(whats)
    assert {re.sub(r"\d+", "n", told) for told in state.told} <= {
        "ok quick n done", "error quick n cancelled",
    }  # fmt: skip
    counts = pool_rig.counts(kind)
    assert (counts.ready, counts.delayed, counts.claimed, counts.dead) == (0, 0, 0, 0)
    for intent in state.intents.values():
        assert pool_rig.store.read(world_intents.find_pending, U, intent) is None


# -- stopping --------------------------------------------------------------------------------------


@BOTH
def test_stopping_pool_finishes_running_calls_and_starts_none(
    memory_pool_rig: EffectPoolRig, how: str
) -> None:
    pool = memory_pool_rig.pool()
    whats = [f"call {n}" for n in range(4)]
    memory_pool_rig.want(f"long.{how}", *whats)
    until(lambda: len(gated_calls.running) == 4)
    pool.request_stop()
    memory_pool_rig.want(f"long.{how}", "quick later")
    for what in whats:
        gated_calls.gate(what).set()
    pool.join(TIMEOUT_S)
    until(lambda: len(memory_pool_rig.receipt_texts()) == 4)
    assert gated_calls.call_count("quick later") == 0
    until(lambda: memory_pool_rig.counts(f"long.{how}") == queue.QueueCounts(ready=1, done=4))
    memory_pool_rig.pool("next")
    until(lambda: len(memory_pool_rig.receipt_texts()) == 5)


def test_stopped_pool_leaves_no_executor_thread(memory_pool_rig: EffectPoolRig) -> None:
    pool = memory_pool_rig.pool("fleeting")
    memory_pool_rig.want("long.def", "quick 1", "quick 2")
    memory_pool_rig.want("long.async", "quick 3")
    until(lambda: len(memory_pool_rig.receipt_texts()) == 3)
    memory_pool_rig.stop(pool)
    until(lambda: not any(t.name.startswith("fleeting/long") for t in threading.enumerate()))


# -- isolation of suspects -------------------------------------------------------------------------


@BOTH
def test_suspect_effect_runs_in_isolation_in_its_pool(
    pool_rig: EffectPoolRig, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither wait may end during the test, even on a slow machine.
    monkeypatch.setattr("holdfast.runner.isolation.ISOLATION_WAIT_NS", 60 * S)
    monkeypatch.setattr("holdfast.runner.claim_supervisor.ISOLATION_MAX_NS", 60 * S)
    kind = f"long.{how}"
    name = world_intents.effect_queue(U, kind)
    pool_rig.want(kind, "suspect")
    until(lambda: pool_rig.counts(kind).ready == 1)
    for _ in range(SUSPECT_EXPIRIES):
        [claim] = pool_rig.store.transact(queue.claim, name, "dead", 1, MS)
        expires_ns = claim.expires_ns
        until(lambda at=expires_ns: pool_rig.store.now_ns() > at)  # type: ignore[misc]
    pool_rig.want("long.def", "quick before")
    pool_rig.want("long.async", "quick before")
    pool_rig.pool()
    until(lambda: gated_calls.running == ["suspect"])
    pool_rig.want("long.def", "quick after")
    pool_rig.want("long.async", "quick after")
    until(lambda: pool_rig.counts("long.def").ready + pool_rig.counts("long.async").ready >= 2)
    gated_calls.gate("suspect").set()
    until(lambda: len(pool_rig.receipt_texts()) == 5)
    assert gated_calls.beside_suspect == []


# -- records of attempts ---------------------------------------------------------------------------


@pytest.fixture
def rig() -> WorkerRig:
    return WorkerRig()


def journaled_receipts(handle: hf.WorldHandle[Any]) -> list[IntentReceipt]:
    """The receipts in the journal of a world."""
    entries = [one.step.ingress for one in handle.journal()]
    return [
        codec.unpack_as(IntentReceipt, one.value)
        for one in entries
        if one.kind is IngressKind.RECEIPT
    ]


def test_receipt_lists_failed_attempts(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    rig.fake_service.answers.extend([ValueError("no"), OSError("gone")])
    rig.run_until_idle(rig.pool(), seconds=60)
    [receipt] = journaled_receipts(ada)
    assert (receipt.status, receipt.attempts) == (ReceiptStatus.OK, 3)
    assert [(one.number, one.end, one.code) for one in receipt.failed_attempts] == [
        (1, "failed", "handler_error"),
        (2, "failed", "handler_error"),
    ]
    assert [
        "no" in receipt.failed_attempts[0].error,
        "gone" in receipt.failed_attempts[1].error,
    ] == [True, True]
    assert receipt.failed_attempts[0].owner.startswith("pool/pay/")


def test_receipt_of_a_first_success_lists_no_attempts(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    rig.run_until_idle(rig.pool())
    [receipt] = journaled_receipts(ada)
    assert receipt.failed_attempts == ()


def test_effect_in_backoff_lists_its_failed_attempt(rig: WorkerRig) -> None:
    rig.buyer("ada", GoodsOrdered())
    rig.fake_service.answers.append(ValueError("no"))
    rig.run_until_idle(rig.pool())
    keys = keys_of(world_intents.effect_queue("shop", "pay"))
    item = rig.store.read(lambda txn: queue.items.load_item(txn, keys, tuples.pack_int(1)))
    assert [(one.end, one.code) for one in item.failed_attempts] == [("failed", "handler_error")]


def test_dead_letter_and_receipt_list_all_attempts(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    rig.fake_service.answers.append(Crash())
    with pytest.raises(Crash):
        rig.run_until_idle(rig.pool("first"))
    rig.advance_clock(20)
    rig.fake_service.answers.extend([ValueError("no")] * 3)
    rig.run_until_idle(rig.pool("second"), seconds=120)
    [dead_letter] = rig.dead_letters()
    [receipt] = journaled_receipts(ada)
    ends = [(one.owner.partition("/")[0], one.end) for one in dead_letter.failed_attempts]
    assert ends == [("first", "expired"), *[("second", "failed")] * 3]
    assert receipt.failed_attempts == dead_letter.failed_attempts


def test_cancel_of_a_lost_call_gives_its_receipt_immediately(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    rig.fake_service.answers.append(Crash())
    with pytest.raises(Crash):
        rig.run_until_idle(rig.pool("dies"))
    ada.send(Dropped())
    rig.run_worlds()
    assert ada.state().told == ["error cancelled 0"]
    rig.advance_clock(20)
    rig.run_until_idle(rig.pool("next"))
    assert len(rig.fake_service.calls) == 1
