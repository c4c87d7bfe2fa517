"""Cases of worlds, effects, timers and budgets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

import holdfast as hf
from holdfast import codec
from holdfast.clock import S
from holdfast.durable import queue
from holdfast.durable.item import QueueItem, keys_of, pack_int
from holdfast.leadership import leader_lease, worker_registry
from holdfast.store import tuples
from holdfast.store.schema import Space, key_prefix
from holdfast.workers.limit_settings import change_limits
from holdfast.workers.orchestrator import Orchestrator
from holdfast.world import catalog, hosting_lease, intents, timers
from tests.blockers.scene import Scene, case
from tests.workers.rig import WorkerRig
from tests.workers.shop import Buyer, GoodsOrdered, Slept
from tests.workers.test_effect_budgets import COST_BOUND, TOKENS, Ask, BudgetRig, fake_chat
from tests.world.rig import Crash
from tests.world.test_replay_by_other_code import FIRST, WITH_TIPS, rig_after_kill

ADA = "Buyer/ada"


def scene(rig: Any, kind: str = "world", id: str = ADA, universe: str = "") -> Scene:
    return Scene(rig.store, rig.clock, universe or rig.universe, kind, id)


def leader(rig: WorkerRig) -> Orchestrator:
    """An orchestrator that leads."""
    found = Orchestrator(
        rig.store, universe=rig.universe, worker="O", incarnation="1", clock=rig.clock, inline=True
    )
    found.tick()
    return found


def send(rig: WorkerRig, *, assigned: bool = False) -> hf.WorldHandle[Buyer]:
    ada = rig.runtime.world(Buyer, "ada")
    ada.send(GoodsOrdered())
    if assigned:
        rig.assign(ada)
    return ada


@case("world_paused")
def paused() -> Iterator[Scene]:
    rig = WorkerRig()
    ada = rig.buyer("ada", GoodsOrdered())
    ada.pause()
    yield scene(rig)
    ada.resume()


@case("world_parked")
def parked_by_a_damaged_message() -> Iterator[Scene]:
    rig = WorkerRig()
    ada = send(rig, assigned=True)
    prefix = key_prefix(Space.INBOX, rig.subject(ada), "e")
    [(key, row)] = rig.store.read(lambda txn: txn.scan(prefix, tuples.prefix_end(prefix)))
    rig.store.transact(lambda txn: txn.put(key, b"\xff"))
    rig.run_worlds()
    yield scene(rig)
    rig.store.transact(lambda txn: txn.put(key, row))
    ada.resume()


@case("reducer_stuck")
def stuck() -> Iterator[Scene]:
    rig = WorkerRig()
    ada = send(rig, assigned=True)
    for n in range(3):
        args = (rig.universe, [rig.id(ada)], "A", f"i{n}", S, 2)
        rig.store.transact(hosting_lease.acquire, *args)
        rig.advance_clock(2)
    yield scene(rig)
    ada.resume()


@case("code_missing")
def entry_of_other_code() -> Iterator[Scene]:
    rig = rig_after_kill(FIRST, WITH_TIPS)
    yield scene(rig, id="Till/t", universe="till")
    rig.start_worker("C", WITH_TIPS)


@case("replay_diverged")
def parked_for_another_replay() -> Iterator[Scene]:
    rig = rig_after_kill(FIRST, WITH_TIPS)
    rig.advance_with_heartbeats(3_660)
    yield scene(rig, id="Till/t", universe="till")
    rig.start_worker("C", WITH_TIPS)
    rig.till().resume()


@case("unknown_event")
def no_worker_has_the_world_type() -> Iterator[Scene]:
    rig = WorkerRig()
    orchestrator = leader(rig)
    for name in ("A", "B"):
        rig.worker(name, app=hf.App("shop")).tick()
    send(rig)
    orchestrator.tick()
    yield scene(rig)
    rig.worker("C").tick()
    orchestrator.tick()


@case("no_leader")
def world_without_an_orchestrator() -> Iterator[Scene]:
    rig = WorkerRig()
    send(rig)
    rig.worker("A").tick()
    yield scene(rig)
    leader(rig)


@case("no_live_worker")
def world_without_a_worker() -> Iterator[Scene]:
    rig = WorkerRig()
    leader(rig)
    send(rig)
    yield scene(rig)
    rig.worker("A").tick()


@case("workers_full")
def world_without_room_on_any_worker() -> Iterator[Scene]:
    rig = WorkerRig()
    orchestrator = leader(rig)
    rig.worker("A").tick()
    rig.store.transact(change_limits, rig.universe, {"worlds_per_worker": 1})
    bob = rig.runtime.world(Buyer, "bob")
    bob.send(GoodsOrdered())
    orchestrator.tick()
    send(rig)
    orchestrator.tick()
    yield scene(rig)
    rig.worker("B").tick()
    orchestrator.tick()


@case("limit_reached")
def world_with_a_full_inbox() -> Iterator[Scene]:
    rig = WorkerRig()
    rig.store.transact(change_limits, rig.universe, {"inbox": 1})
    send(rig, assigned=True)
    yield scene(rig)
    rig.run_worlds()


@case("waits_for_placement")
def world_before_its_placement() -> Iterator[Scene]:
    rig = WorkerRig()
    orchestrator = leader(rig)
    rig.worker("A").tick()
    send(rig)
    yield scene(rig)
    orchestrator.tick()


@case("worker_dead")
def world_of_a_dead_worker() -> Iterator[Scene]:
    rig = WorkerRig()
    rig.worker("A").tick()
    send(rig, assigned=True)
    rig.advance_clock(11)
    yield scene(rig)
    rig.worker("A").tick()


@case("worker_pinned_away")
def world_pinned_to_an_absent_worker() -> Iterator[Scene]:
    rig = WorkerRig()
    ada = send(rig)
    rig.store.transact(catalog.assign, rig.universe, rig.id(ada), "A", 0, "", True)
    yield scene(rig)
    rig.worker("A").tick()


@case("lease_held")
def world_assigned_to_another_worker() -> Iterator[Scene]:
    rig = WorkerRig()
    ada = rig.buyer("ada", GoodsOrdered())
    rig.worker("B").tick()
    rig.assign(ada, "B")
    ada.send(GoodsOrdered())
    yield scene(rig)
    rig.run_worlds()


@case("lease_held")
def world_whose_host_went_silent() -> Iterator[Scene]:
    rig = WorkerRig()
    ada = send(rig, assigned=True)
    args = (rig.universe, [rig.id(ada)], "A", "1", 60 * S)
    rig.store.transact(hosting_lease.acquire, *args)
    rig.advance_clock(11)
    yield scene(rig)
    rig.advance_clock(60)


@case("waits_for_host")
def world_before_its_lease() -> Iterator[Scene]:
    rig = WorkerRig()
    rig.world_worker.tick()
    send(rig, assigned=True)
    yield scene(rig)
    rig.run_worlds()


# -- effects ---------------------------------------------------------------------------------------


def ordered(rig: WorkerRig) -> str:
    """Emit one effect and return its intent hash."""
    return rig.buyer("ada", GoodsOrdered()).state().intents[0].hex()


@case("waits_in_queue")
def effect_that_was_just_emitted() -> Iterator[Scene]:
    rig = WorkerRig()
    yield scene(rig, "effect", ordered(rig))
    rig.run_until_idle(rig.pool())


@case("no_effect_worker")
def effect_without_a_pool() -> Iterator[Scene]:
    rig = WorkerRig()
    intent = ordered(rig)
    rig.advance_clock(10)
    yield scene(rig, "effect", intent)
    rig.run_until_idle(rig.pool())


@case("no_effect_worker")
def queue_of_effects_without_a_pool() -> Iterator[Scene]:
    rig = WorkerRig()
    ordered(rig)
    rig.advance_clock(10)
    yield scene(rig, "queue", "effects/pay")
    rig.run_until_idle(rig.pool())


@case("waits_for_retry")
def effect_whose_attempt_failed() -> Iterator[Scene]:
    rig = WorkerRig()
    intent = ordered(rig)
    rig.fake_service.answers.append(OSError("busy"))
    pool = rig.pool()
    for runner in pool.runners:
        runner.tick()
        runner.tick()
    yield scene(rig, "effect", intent)
    rig.run_until_idle(pool, seconds=60)


@case("running")
def effect_that_a_worker_runs() -> Iterator[Scene]:
    rig = WorkerRig()
    intent = ordered(rig)
    rig.store.transact(queue.claim, intents.effect_queue("shop", "pay"), "pool", 1, 60 * S)
    yield scene(rig, "effect", intent)
    rig.advance_clock(61)


@case("claim_expired")
def effect_of_a_dead_pool() -> Iterator[Scene]:
    rig = WorkerRig()
    intent = ordered(rig)
    rig.store.transact(queue.claim, intents.effect_queue("shop", "pay"), "pool", 1, 1 * S)
    rig.advance_clock(2)
    yield scene(rig, "effect", intent)
    rig.run_until_idle(rig.pool())


def dead_effect(rig: WorkerRig) -> str:
    intent = ordered(rig)
    rig.fake_service.answers.extend([ValueError("no")] * 3)
    rig.run_until_idle(rig.pool(), seconds=60)
    return intent


@case("effect_dead")
def effect_that_failed_for_good() -> Iterator[Scene]:
    rig = WorkerRig()
    intent = dead_effect(rig)
    yield scene(rig, "effect", intent)
    [letter] = rig.dead_letters()
    rig.store.transact(queue.discard_dead, letter.queue, [letter.seq])
    rig.store.transact(intents.drop_dead, "shop", bytes.fromhex(intent), letter.seq)


@case("dead_letters")
def queue_with_dead_letters() -> Iterator[Scene]:
    rig = WorkerRig()
    dead_effect(rig)
    yield scene(rig, "queue", "effects/pay")
    [letter] = rig.dead_letters()
    rig.store.transact(queue.discard_dead, letter.queue, [letter.seq])


@case("rate_limited")
def effect_before_its_token() -> Iterator[Scene]:
    @hf.effect("slow", rate_per_s=1, concurrency=1)
    def slow(call: hf.Call) -> None: ...

    class SlowCall(hf.Event):
        pass

    class Caller(hf.World):
        hashes: list[bytes] = msgspec.field(default_factory=list)

        @hf.on(SlowCall)
        def go(self, event: SlowCall, cx: hf.Context) -> None:
            self.hashes.append(cx.do(slow).intent_hash)

    rig = WorkerRig(hf.App("slow", worlds=[Caller], effects=[slow]))
    handle = rig.world(Caller, "ada")
    for _ in range(2):
        handle.send(SlowCall())
    rig.run_worlds()
    pool = rig.pool()
    for runner in pool.runners:
        runner.tick()
    yield scene(rig, "effect", handle.state().hashes[1].hex())
    for _ in range(300):
        rig.clock.advance(S // 100)
        for runner in pool.runners:
            runner.tick()
    rig.run_until_idle(pool)


@case("budget_reserved")
def effect_behind_the_reservation_of_another() -> Iterator[Scene]:
    rig = BudgetRig()
    rig.limit(COST_BOUND[TOKENS] + 1)
    ada = rig.asker("ada", Ask(), Ask())
    pool = rig.pool()
    second = ada.state().intents[1].hex()
    fake_chat.answers.append(Crash())
    try:
        rig.run_until_idle(pool)
    except Crash:
        rig.backend.arm({})
    yield scene(rig, "effect", second)
    rig.limit(None)
    rig.advance_clock(20)
    rig.run_until_idle(rig.pool("second"), seconds=30)


# -- timers ----------------------------------------------------------------------------------------


@case("waits_for_due_time")
def timer_before_its_time() -> Iterator[Scene]:
    rig = WorkerRig()
    rig.buyer("ada", Slept(60, key="nap"))
    yield scene(rig, "timer", f"{ADA}/nap")
    rig.run_until_idle(rig.timer_worker(), seconds=61)


@case("no_timer_worker")
def timer_that_nobody_fires() -> Iterator[Scene]:
    rig = WorkerRig()
    rig.buyer("ada", Slept(1, key="nap"))
    rig.advance_clock(30)
    yield scene(rig, "timer", f"{ADA}/nap")
    rig.run_until_idle(rig.timer_worker(), seconds=1)


@case("timer_dead")
def timer_that_cannot_be_read() -> Iterator[Scene]:
    rig = WorkerRig()
    ada = rig.buyer("ada", Slept(1, key="nap"))
    name = timers.delay_queue("shop")
    keys = keys_of(name)
    slot = rig.store.read(timers.find_slot, "shop", rig.id(ada), "nap")

    def damage(txn: Any) -> None:
        key = keys.items + pack_int(slot.seq)
        item = codec.unpack_as(QueueItem, txn.get(key))
        txn.put(key, codec.pack(msgspec.structs.replace(item, payload=b"nonsense")))

    rig.store.transact(damage)
    rig.run_until_idle(rig.timer_worker(), seconds=5)
    yield scene(rig, "timer", f"{ADA}/nap")
    ada.send(Slept(100, key="nap"))
    rig.run_worlds()


# -- workers ---------------------------------------------------------------------------------------


@case("worker_dead")
def silent_worker() -> Iterator[Scene]:
    rig = WorkerRig()
    rig.worker("A").tick()
    rig.advance_clock(11)
    yield scene(rig, "worker", "A")
    rig.worker("A", "2").tick()


@case("worker_draining")
def drained_worker() -> Iterator[Scene]:
    rig = WorkerRig()
    rig.worker("A").tick()
    rig.store.transact(worker_registry.set_draining, rig.universe, "A", True)
    yield scene(rig, "worker", "A")
    rig.store.transact(worker_registry.set_draining, rig.universe, "A", False)


@case("worker_not_counted")
def worker_that_has_not_met_the_leader() -> Iterator[Scene]:
    rig = WorkerRig()
    rig.worker("A").tick()
    rig.store.transact(leader_lease.acquire, rig.universe, "O", "1", 60 * S)
    yield scene(rig, "worker", "A")
    rig.worker("A").tick()
