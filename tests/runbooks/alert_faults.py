"""The faults behind the alerts. A fault causes the state that its alert reports, and returns whether that state still
exists. A test runs the page of the alert in between."""

from __future__ import annotations

import socket
from collections.abc import Callable

import holdfast as hf
from holdfast.cli import main
from holdfast.effects import budget
from holdfast.effects.budget import Cost
from holdfast.leadership import leader_lease
from holdfast.workers.readiness import ReadinessReason
from holdfast.workers.readiness_facts import read_readiness
from tests.process.watch import until
from tests.runbooks.fault_scene import FaultScene, kill, small_disk
from tests.runbooks.shelf_app import (
    CheckPlanned,
    CopySent,
    DeliveryAsked,
    LabelledShelf,
    Relabelled,
    Shelf,
    Stocked,
    count_stock,
    next_app,
    refill,
)

Exists = Callable[[], bool]
Fault = Callable[[FaultScene], Exists]
FAULTS: dict[str, Fault] = {}
# Pages whose state stays after the commands.
STAYS = {"metrics-truncated", "claims-lost", "clock-step", "schema-mismatch"}
# Faults of a disk, of two stores of `holdfast.toml`, and of the machine whose clock sets store time.
EMBEDDED = {"store-nearly-full", "mail-waiting", "clock-step"}
SHORT_LEASE = ("--lease-s", "1")


def fault(page: str) -> Callable[[Fault], Fault]:
    def register(fn: Fault) -> Fault:
        FAULTS[page] = fn
        return fn

    return register


@fault("target-down")
def killed_process(scene: FaultScene) -> Exists:
    port = scene.env["PORT"]
    kill(scene.up("shop:app", "--http", f"127.0.0.1:{port}"))

    def refused() -> bool:
        try:
            socket.create_connection(("127.0.0.1", int(port)), 1).close()
        except ConnectionRefusedError:
            return True
        return False

    return refused


@fault("not-ready")
def universe_that_never_ran(scene: FaultScene) -> Exists:
    rt = scene.client()
    rt.world(Shelf, "a").send(Stocked(1))
    return lambda: scene.metric(rt, "holdfast_ready") == 0


@fault("leader-missing")
def killed_leader(scene: FaultScene) -> Exists:
    kill(scene.up("shop:app", *SHORT_LEASE))
    rt = scene.client()
    return lambda: scene.metric(rt, "holdfast_leader_lease_seconds") == 0


def stale_leader(scene: FaultScene) -> Exists:
    kill(scene.up("shop:app", *SHORT_LEASE))
    rt = scene.client()
    until(lambda: rt.store.transact(leader_lease.mark_stale, "shop"), "the end of the lease")
    return lambda: has_blocker(rt, ReadinessReason.AUTHORITY_STALE)


def restored_leader(scene: FaultScene) -> Exists:
    """A backup that has the lease of a leader, restored at the place of the store."""
    worker = scene.up("shop:app")
    backup = scene.directory / "backup"
    assert main(["backup", str(backup)]) == 0
    kill(worker)
    scene.move_store(scene.directory / "restored")
    assert main(["restore", str(backup)]) == 0
    rt = scene.client()
    return lambda: has_blocker(rt, ReadinessReason.AUTHORITY_RESTORED)


def has_blocker(rt: hf.Runtime, reason: ReadinessReason) -> bool:
    return any(one.reason is reason for one in read_readiness(rt.store, "shop").reasons)


# Further faults of a page.
VARIANTS = {"leader-missing": (stale_leader, restored_leader)}


@fault("no-live-worker")
def universe_with_a_leader_alone(scene: FaultScene) -> Exists:
    scene.up("shop:app", "--role", "orchestrator")
    rt = scene.client()
    rt.world(Shelf, "a").send(Stocked(1))
    return lambda: scene.metric(rt, "holdfast_workers", state="live") == 0


@fault("worlds-parked")
def world_with_a_reducer_that_changed(scene: FaultScene) -> Exists:
    rt = scene.client()
    shelf = rt.world(Shelf, "a")
    shelf.send(Stocked(1))
    worker = scene.up("shop:app", *SHORT_LEASE)
    shelf.wait_for(lambda state: state.count == 1)
    kill(worker)
    other = scene.file("other-code")
    changed = scene.up("shop:app", *SHORT_LEASE)
    shelf.send(Stocked(1))

    def parked() -> bool:
        return scene.metric(rt, "holdfast_worlds", status="parked") == 1

    until(parked, "the world is parked")
    # The operator deploys the former code.
    scene.stop(changed)
    other.unlink()
    return parked


@fault("worlds-stopped")
def event_of_a_newer_version(scene: FaultScene) -> Exists:
    rt = scene.client(next_app)
    scene.up("shop:app")
    rt.world(LabelledShelf, "a").send(Relabelled())
    name, code = "holdfast_readiness_blockers", "unknown_event"
    return lambda: scene.metric(rt, name, code=code) > 0


@fault("flows-parked")
def flow_with_other_steps(scene: FaultScene) -> Exists:
    rt = scene.client()
    handle = rt.start(refill, "a")
    scene.env["FLOW"] = handle.id
    worker = scene.up("shop:app")
    until(lambda: scene.metric(rt, "holdfast_flows", state="waiting") == 1, "its sleep")
    kill(worker)
    other = scene.file("other-code")
    changed = scene.up("shop:app")

    def parked() -> bool:
        return scene.metric(rt, "holdfast_flows", state="parked") == 1

    until(parked, "the flow is parked")
    # The operator deploys the former code.
    scene.stop(changed)
    other.unlink()
    return parked


@fault("dead-letters-growing")
def effect_that_fails(scene: FaultScene) -> Exists:
    down = scene.file("carrier-is-down")
    rt = scene.client()
    scene.up("shop:app")
    rt.world(Shelf, "a").send(DeliveryAsked())
    rt.submit(count_stock, "a")
    rt.start(refill, "a")
    until(lambda: scene.metric(rt, "holdfast_effects", state="dead") == 1, "the dead letter")
    down.unlink()
    return lambda: scene.metric(rt, "holdfast_effects", state="dead") > 0


@fault("inbox-old")
def events_without_a_world_worker(scene: FaultScene) -> Exists:
    rt = scene.client()
    rt.world(Shelf, "a").send(Stocked(1))
    return lambda: scene.metric(rt, "holdfast_inbox_oldest_seconds") > 0


@fault("timers-late")
def timer_without_a_timer_worker(scene: FaultScene) -> Exists:
    rt = scene.client()
    shelf = rt.world(Shelf, "a")
    shelf.send(CheckPlanned(0.01))
    scene.up("shop:app", "--role", "orchestrator", "--role", "world")
    return lambda: scene.metric(rt, "holdfast_timer_lateness_seconds") > 0


@fault("schedules-late")
def schedule_without_a_timer_worker(scene: FaultScene) -> Exists:
    rt = scene.client()
    rt.schedule("each-minute", count_stock, every="* * * * *", args=("a",))
    return lambda: scene.metric(rt, "holdfast_workers", state="live") == 0


@fault("tasks-waiting")
def task_without_a_worker(scene: FaultScene) -> Exists:
    rt = scene.client()
    rt.submit(count_stock, "a")
    return lambda: scene.metric(rt, "holdfast_tasks", state="ready") > 0


@fault("budget-nearly-used")
def budget_with_a_large_bill(scene: FaultScene) -> Exists:
    rt = scene.client()
    rt.world(Shelf, "a").send(Stocked(1))
    rt.store.transact(budget.set_limit, "shop", budget.UNIVERSE_SCOPE, budget.TOKENS, 100)
    rt.store.transact(budget.reserve, "shop", "a", "call-1", [Cost(budget.TOKENS, 95)])

    def nearly_used() -> bool:
        limit = scene.metric(rt, "holdfast_budget_limit", unit="tokens")
        return scene.metric(rt, "holdfast_budget_reserved", unit="tokens") > 0.9 * limit

    return nearly_used


@fault("store-nearly-full")
def store_on_a_full_disk(scene: FaultScene) -> Exists:
    disk = scene.enter(small_disk(scene.directory / "disk", 24))
    scene.move_store(disk / "store")
    scene.env["DISK"] = str(disk)
    rt = scene.client()
    shelf = rt.world(Shelf, "a")
    shelf.send(Stocked(1))
    (disk / "filler").write_bytes(bytes(scene.free_bytes(disk)))

    def full() -> bool:
        return scene.free_bytes(disk) < 1_000_000

    return full


@fault("claims-lost")
def worker_that_stopped_for_longer_than_its_lease(scene: FaultScene) -> Exists:
    slow = scene.file("carrier-is-slow")
    rt = scene.client()
    frozen = scene.up("shop:app", *SHORT_LEASE)
    rt.world(Shelf, "a").send(DeliveryAsked())
    until(lambda: scene.metric(rt, "holdfast_effects", state="claimed") == 1, "the claim")
    frozen.stop()
    scene.up("shop:app", *SHORT_LEASE)
    slow.unlink()
    rt.world(Shelf, "a").wait_for(lambda state: state.delivered == 1)
    frozen.cont()
    lost = "claim lost"
    until(lambda: any(lost in line for line in frozen.errors), "the log line")
    scene.stop(frozen)
    return lambda: True


@fault("metrics-truncated")
def forty_one_queues(scene: FaultScene) -> Exists:
    rt = scene.client()
    for number in range(41):
        rt.submit(count_stock.options(queue=f"q-{number}"), "a")
    return lambda: scene.metric(rt, "holdfast_metrics_truncated") > 0


@fault("mail-waiting")
def mail_for_a_store_that_does_not_exist(scene: FaultScene) -> Exists:
    scene.use_configuration('[stores.universes]\nshop = "./store"\ndepot = "./depot"\n')
    rt = scene.client()
    rt.world(Shelf, "a").send(CopySent())
    scene.up("shop:app")
    until(lambda: scene.metric(rt, "holdfast_mail_waiting") == 1, "the mail waits")
    return lambda: scene.metric(rt, "holdfast_mail_waiting") > 0
