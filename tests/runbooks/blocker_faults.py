"""The faults behind the blocker codes of `why` that have no alert: tasks, flows, queues, schedules and workers.

A fault returns whether `why` still has its code. The variants of a page are further codes of the page. They run in the
deep suite.
"""

from __future__ import annotations

from typing import Any

import holdfast as hf
from holdfast.cli import main
from holdfast.workers.limit_settings import change_limits
from holdfast.world import intents
from tests.process.watch import until
from tests.runbooks.alert_faults import SHORT_LEASE, Exists, Fault
from tests.runbooks.fault_scene import FaultScene, kill
from tests.runbooks.shelf_app import (
    CheckPlanned,
    DeliveryAsked,
    Shelf,
    Stocked,
    count_later,
    count_stock,
    move_shelf,
    refill,
    weigh,
    weigh_quickly,
    weigh_shelf,
)

CODE_FAULTS: dict[str, Fault] = {}
CODE_VARIANTS: dict[str, list[Fault]] = {}


def code_fault(page: str) -> Any:
    def register(fn: Fault) -> Fault:
        CODE_FAULTS[page] = fn
        return fn

    return register


def variant(page: str) -> Any:
    def register(fn: Fault) -> Fault:
        CODE_VARIANTS.setdefault(page, []).append(fn)
        return fn

    return register


def flow_waits(scene: FaultScene, rt: hf.Runtime, code: str, handle: Any) -> Exists:
    scene.env["FLOW"] = handle.id
    return scene.blocked(rt, code, "flow", handle.id)


def task_waits(scene: FaultScene, rt: hf.Runtime, code: str, handle: Any) -> Exists:
    scene.env["TASK"] = handle.id
    return scene.blocked(rt, code, "task", handle.id)


def weigh_slowly(scene: FaultScene, rt: hf.Runtime) -> Any:
    """A task that a worker runs and that does not return."""
    scene.file("scale-is-slow")
    handle = rt.submit(weigh, "a")
    until(lambda: scene.metric(rt, "holdfast_tasks", state="leased") == 1, "the lease")
    return handle


# -- what waits for a time, a turn, an event or another subject ----------------------------------------


@code_fault("waits-for-its-time")
def flow_that_sleeps(scene: FaultScene) -> Exists:
    rt = scene.client()
    scene.up("shop:app")
    return flow_waits(scene, rt, "sleeping", rt.start(refill, "a"))


@variant("waits-for-its-time")
def task_with_a_start_time(scene: FaultScene) -> Exists:
    rt = scene.client()
    scene.up("shop:app")
    handle = rt.submit(count_stock.options(delay_s=2), "a")
    return task_waits(scene, rt, "waits_for_start_time", handle)


@variant("waits-for-its-time")
def timer_with_a_due_time(scene: FaultScene) -> Exists:
    rt = scene.client()
    scene.up("shop:app")
    shelf = rt.world(Shelf, "a")
    shelf.send(CheckPlanned(3))
    shelf.wait_for(lambda state: state.planned == 1)
    return scene.blocked(rt, "waits_for_due_time", "timer", "Shelf/a/check")


@code_fault("waits-for-its-turn")
def task_behind_a_long_one(scene: FaultScene) -> Exists:
    rt = scene.client()
    scene.up("shop:app", "--concurrency", "1")
    weigh_slowly(scene, rt)
    return task_waits(scene, rt, "waits_in_queue", rt.submit(count_stock, "a"))


@variant("waits-for-its-turn")
def world_behind_a_stopped_orchestrator(scene: FaultScene) -> Exists:
    rt = scene.client()
    leader = scene.up("shop:app", "--role", "orchestrator", "--lease-s", "4")
    scene.up("shop:app", "--role", "world")
    leader.stop()
    rt.world(Shelf, "a").send(Stocked(1))
    return scene.blocked(rt, "waits_for_placement", "world", "Shelf/a")


@code_fault("waits-for-event")
def flow_that_waits_for_an_event(scene: FaultScene) -> Exists:
    rt = scene.client()
    scene.up("shop:app")
    return flow_waits(scene, rt, "waits_for_event", rt.start(weigh_quickly, "a"))


@code_fault("waits-for-another")
def task_behind_a_task_without_a_worker(scene: FaultScene) -> Exists:
    rt = scene.client()
    first = rt.submit(count_stock.options(queue="later"), "a")
    scene.env["OTHER"] = first.id
    scene.up("shop:app", "--queues", "default")
    second = rt.submit(count_stock.options(after=[first]), "b")
    return task_waits(scene, rt, "waits_for_tasks", second)


@variant("waits-for-another")
def flow_behind_a_task_without_a_worker(scene: FaultScene) -> Exists:
    rt = scene.client()
    scene.up("shop:app", "--queues", "default")
    handle = rt.start(count_later, "a")
    waits = flow_waits(scene, rt, "waits_for_task", handle)
    until(waits, "its child")
    [step] = [one for one in rt.why(handle)["blockers"] if one["code"] == "waits_for_task"]
    scene.env["OTHER"] = step["action"].split()[3]
    return waits


# -- what failed ---------------------------------------------------------------------------------------


@code_fault("task-failed")
def task_that_failed(scene: FaultScene) -> Exists:
    broken = scene.file("scale-is-broken")
    rt = scene.client()
    scene.up("shop:app")
    failed = task_waits(scene, rt, "task_failed", rt.submit(weigh, "a"))
    until(failed, "the failure")
    broken.unlink()
    return failed


@variant("task-failed")
def task_that_was_cancelled(scene: FaultScene) -> Exists:
    rt = scene.client()
    handle = rt.submit(count_stock, "a")
    handle.cancel()
    scene.up("shop:app")
    return task_waits(scene, rt, "task_dead", handle)


@code_fault("flow-failed")
def flow_that_failed(scene: FaultScene) -> Exists:
    broken = scene.file("scale-is-broken")
    rt = scene.client()
    scene.up("shop:app")
    failed = flow_waits(scene, rt, "flow_failed", rt.start(weigh_shelf, "a"))
    until(failed, "the failure")
    broken.unlink()
    return failed


@code_fault("compensation-failed")
def flow_whose_compensation_failed(scene: FaultScene) -> Exists:
    broken = scene.file("scale-is-broken")
    rt = scene.client()
    scene.up("shop:app")
    handle = rt.start(move_shelf, "a")
    until(lambda: "waits_for_event" in [one["code"] for one in handle.why()], "its receive")
    handle.cancel()
    failed = flow_waits(scene, rt, "undo_failed", handle)
    until(failed, "the failure of its compensation")
    scene.env["LETTER"] = handle.why()[0]["action"].rstrip("`").split()[-1]
    broken.unlink()
    return failed


@code_fault("task-quarantined")
def task_that_lost_its_worker(scene: FaultScene) -> Exists:
    rt = scene.client()
    first = scene.up("shop:app", "--queues", "default")
    handle = weigh_slowly(scene, rt)
    # The other worker is busy, so it does not run the quarantined task.
    scene.up("shop:app", "--queues", "default,later")
    rt.submit(weigh.options(queue="later"), "b")
    until(lambda: scene.metric(rt, "holdfast_tasks", state="leased") == 2, "its lease")
    kill(first)
    waits = task_waits(scene, rt, "quarantined", handle)
    until(waits, "the end of the lease")
    scene.file("scale-is-slow").unlink()
    return waits


@code_fault("thread-still-running")
def step_that_does_not_return(scene: FaultScene) -> Exists:
    rt = scene.client()
    slow = scene.file("scale-is-slow")
    scene.up("shop:app", "--grace-s", "0.1")
    running = flow_waits(scene, rt, "thread_still_running", rt.start(weigh_quickly, "a"))
    until(running, "the timeout of the step")
    slow.unlink(missing_ok=True)
    return running


# -- workers, worlds, effects, schedules ---------------------------------------------------------------


@code_fault("worker-dead")
def task_of_a_killed_worker(scene: FaultScene) -> Exists:
    rt = scene.client()
    worker = scene.up("shop:app", *SHORT_LEASE)
    handle = weigh_slowly(scene, rt)
    kill(worker)
    scene.file("scale-is-slow").unlink()
    return task_waits(scene, rt, "lease_overdue", handle)


@variant("worker-dead")
def effect_of_a_killed_worker(scene: FaultScene) -> Exists:
    slow = scene.file("carrier-is-slow")
    rt = scene.client()
    worker = scene.up("shop:app", *SHORT_LEASE)
    rt.world(Shelf, "a").send(DeliveryAsked())
    until(lambda: scene.metric(rt, "holdfast_effects", state="claimed") == 1, "the claim")
    kill(worker)
    slow.unlink()
    [(intent_hash, _)] = rt.store.read(intents.pending_page, "shop", b"", 10)
    return scene.blocked(rt, "claim_expired", "effect", intent_hash.hex())


@variant("worker-dead")
def world_of_a_killed_worker(scene: FaultScene) -> Exists:
    rt = scene.client()
    shelf = rt.world(Shelf, "a")
    shelf.send(Stocked(1))
    worker = scene.up("shop:app", *SHORT_LEASE)
    shelf.wait_for(lambda state: state.count == 1)
    kill(worker)
    shelf.send(Stocked(1))
    return scene.blocked(rt, "worker_dead", "world", "Shelf/a")


@variant("tasks-waiting")
def task_that_no_worker_declares(scene: FaultScene) -> Exists:
    """The live workers serve the queue with an app without the task."""
    rt = scene.client()
    scene.up("shop:former_app")
    return task_waits(scene, rt, "no_worker_for_task", rt.submit(weigh, "a"))


@code_fault("worker-draining")
def drained_worker(scene: FaultScene) -> Exists:
    rt = scene.client()
    scene.up("shop:app")
    assert main(["workers", "drain", scene.env["WORKER"]]) == 0
    return scene.blocked(rt, "worker_draining", "worker", scene.env["WORKER"])


@code_fault("world-pinned")
def world_pinned_to_a_former_machine(scene: FaultScene) -> Exists:
    rt = scene.client()
    rt.world(Shelf, "a").send(Stocked(1))
    assert main(["worlds", "pin", "Shelf/a", "former-machine"]) == 0
    scene.up("shop:app")
    return scene.blocked(rt, "worker_pinned_away", "world", "Shelf/a")


@code_fault("world-paused")
def paused_world(scene: FaultScene) -> Exists:
    rt = scene.client()
    shelf = rt.world(Shelf, "a")
    shelf.send(Stocked(1))
    shelf.pause()
    return scene.blocked(rt, "world_paused", "world", "Shelf/a")


@variant("world-paused")
def universe_with_a_paused_world(scene: FaultScene) -> Exists:
    paused_world(scene)
    return scene.blocked(scene.client(), "world_blocked", "universe", "shop")


@code_fault("effects-waiting")
def effect_without_a_worker(scene: FaultScene) -> Exists:
    rt = scene.client()
    scene.up("shop:app", "--role", "orchestrator", "--role", "world")
    rt.world(Shelf, "a").send(DeliveryAsked())
    waits = scene.blocked(rt, "no_effect_worker", "queue", "effects/carrier.send")
    until(lambda: scene.metric(rt, "holdfast_effects", state="ready") == 1, "the effect")
    return waits


@code_fault("schedule-stopped")
def paused_schedule(scene: FaultScene) -> Exists:
    rt = scene.client()
    rt.schedule("each-minute", count_stock, every="* * * * *", args=("a",)).pause()
    return scene.blocked(rt, "schedule_paused", "schedule", "each-minute")


@code_fault("queue-paused")
def paused_queue(scene: FaultScene) -> Exists:
    rt = scene.client()
    rt.submit(count_stock, "a")
    assert main(["queues", "pause", "default"]) == 0
    return scene.blocked(rt, "queue_paused", "queue", "default")


# -- limits --------------------------------------------------------------------------------------------


@code_fault("limit-reached")
def universe_with_a_full_backlog(scene: FaultScene) -> Exists:
    rt = scene.client()
    rt.store.transact(change_limits, "shop", {"tasks": 1})
    rt.submit(count_stock, "a")
    return scene.blocked(rt, "limit_reached", "universe", "shop")


@variant("limit-reached")
def world_without_room_on_the_only_worker(scene: FaultScene) -> Exists:
    rt = scene.client()
    rt.store.transact(change_limits, "shop", {"worlds_per_worker": 1})
    first = rt.world(Shelf, "a")
    first.send(Stocked(1))
    scene.up("shop:app")
    first.wait_for(lambda state: state.count == 1)
    rt.world(Shelf, "b").send(Stocked(1))
    return scene.blocked(rt, "workers_full", "world", "Shelf/b")


@code_fault("queue-full")
def queue_with_a_limit_of_one(scene: FaultScene) -> Exists:
    rt = scene.client()
    assert main(["tasks", "limit", "default", "--concurrency", "1", "--universe", "shop"]) == 0
    scene.up("shop:app")
    weigh_slowly(scene, rt)
    return task_waits(scene, rt, "queue_full", rt.submit(count_stock, "a"))


@variant("queue-full")
def queue_with_a_limit_for_each_key(scene: FaultScene) -> Exists:
    rt = scene.client()
    assert main(["tasks", "limit", "default", "--per-key", "1", "--universe", "shop"]) == 0
    scene.up("shop:app")
    scene.file("scale-is-slow")
    rt.submit(weigh.options(limit_key="ada"), "a")
    until(lambda: scene.metric(rt, "holdfast_tasks", state="leased") == 1, "the lease")
    handle = rt.submit(count_stock.options(limit_key="ada"), "a")
    return task_waits(scene, rt, "limit_key_full", handle)
