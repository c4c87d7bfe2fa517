"""Cases of tasks, flows, queues, schedules, runs and universes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

import holdfast as hf
from holdfast import codec, failpoints
from holdfast import store as stores
from holdfast.clock import S, SimClock
from holdfast.dispatch import notifications
from holdfast.dispatch.log import DispatchLog
from holdfast.durable import dead_letters, queue
from holdfast.durable import lease as leases
from holdfast.flows import step_threads
from holdfast.flows.compensation_redrive import redrive_compensations
from holdfast.flows.step_threads import StepThreadRow
from holdfast.leadership import leader_lease, worker_registry
from holdfast.ledger import runs
from holdfast.ledger.runs import RunEvent, RunRecord
from holdfast.schedules import operations as schedule_operations
from holdfast.store import schema
from holdfast.store.api import Store, Txn
from holdfast.tasks import operations as task_operations
from holdfast.tasks.operations import AttemptOutcome, GrantRequest
from holdfast.workers.limit_settings import change_limits
from holdfast.world import catalog, cron
from holdfast.world.catalog import WorldEvent
from holdfast.world.messaging import outbox
from tests.blockers.scene import Scene, case
from tests.flows.rig import FlowRig
from tests.flows.test_upcasts import new_app, old_app
from tests.leadership.rig import simulate_restore
from tests.schedules.rig import ScheduleRig
from tests.tasks.rig import LEASE_NS, TaskOperationsRig

U = "u"


def new_store() -> tuple[Store, SimClock]:
    clock = SimClock()
    return stores.open("memory:", clock=clock), clock


# -- tasks -----------------------------------------------------------------------------------------


def task_rig() -> TaskOperationsRig:
    return TaskOperationsRig(*new_store())


def task(rig: TaskOperationsRig, seq: int) -> Scene:
    return Scene(rig.store, rig.clock, U, "task", f"1-{seq}")


def beat(rig: Any, universe: str = U) -> None:
    """The heartbeat of a task worker."""
    rig.store.transact(worker_registry.heartbeat, universe, "T:task", "1", ("task",))


@case("waits_for_tasks")
def task_with_a_dependency() -> Iterator[Scene]:
    rig = task_rig()
    first = rig.submit_one()
    yield task(rig, rig.submit_one(after=(first,)))
    rig.complete(rig.lease_one(first))
    rig.maintain()


@case("limit_key_full")
def task_of_a_busy_limit_key() -> Iterator[Scene]:
    rig = task_rig()
    rig.set_limits(per_key=1)
    first, second = rig.submit_one(limit="ada"), rig.submit_one(limit="ada")
    [grant] = rig.lease()
    yield task(rig, second)
    assert grant.seq == first
    rig.complete(grant)


@case("queue_full")
def task_of_a_busy_queue() -> Iterator[Scene]:
    rig = task_rig()
    rig.set_limits(concurrency=1)
    first, second = rig.submit_one(), rig.submit_one()
    grant = rig.lease_one(first)
    yield task(rig, second)
    rig.complete(grant)


@case("queue_paused")
def task_of_a_paused_queue() -> Iterator[Scene]:
    rig = task_rig()
    seq = rig.submit_one()
    rig.set_paused(True)
    yield task(rig, seq)
    rig.set_paused(False)


@case("queue_paused")
def paused_queue() -> Iterator[Scene]:
    rig = task_rig()
    rig.set_paused(True)
    yield Scene(rig.store, rig.clock, U, "queue", "default")
    rig.set_paused(False)


@case("limit_reached")
def queue_at_its_limit() -> Iterator[Scene]:
    rig = task_rig()
    rig.store.transact(change_limits, U, {"queue:default": 1, "tasks": 9})
    seq = rig.submit_one()
    yield Scene(rig.store, rig.clock, U, "queue", "default")
    rig.lease_one(seq)


@case("limit_reached")
def universe_at_its_limit() -> Iterator[Scene]:
    rig = task_rig()
    rig.store.transact(change_limits, U, {"tasks": 1})
    seq = rig.submit_one()
    yield Scene(rig.store, rig.clock, U, "universe", U)
    rig.lease_one(seq)


@case("no_worker_for_task")
def task_that_no_worker_declares() -> Iterator[Scene]:
    rig = task_rig()
    seq = rig.submit_one()
    rig.lease(names=("other",))
    yield task(rig, seq)
    rig.lease(names=("work",))


@case("no_worker_for_task")
def queue_of_undeclared_tasks() -> Iterator[Scene]:
    rig = task_rig()
    rig.submit_one()
    rig.lease(names=("other",))
    yield Scene(rig.store, rig.clock, U, "queue", "default")
    rig.lease(names=("work",))


@case("waits_for_start_time")
def delayed_task() -> Iterator[Scene]:
    rig = task_rig()
    seq = rig.submit_one(delay_ns=5 * S)
    yield task(rig, seq)
    rig.advance(5 * S)
    rig.maintain()


@case("waits_for_retry")
def task_after_a_failure() -> Iterator[Scene]:
    rig = task_rig()
    seq = rig.submit_one()
    rig.fail(rig.lease_one(seq), error="no route")
    yield task(rig, seq)
    rig.advance(60 * S)
    rig.maintain()


@case("quarantined")
def task_whose_lease_expired() -> Iterator[Scene]:
    rig = task_rig()
    seq = rig.submit_one()
    rig.lease_one(seq)
    rig.advance(LEASE_NS)
    rig.maintain()
    beat(rig)
    yield task(rig, seq)
    rig.lease_one(seq, alone=True)


@case("lease_overdue")
def task_of_a_dead_worker() -> Iterator[Scene]:
    rig = task_rig()
    seq = rig.submit_one()
    rig.lease_one(seq)
    rig.advance(LEASE_NS)
    yield task(rig, seq)
    rig.maintain()


@case("waits_for_worker")
def task_that_idle_workers_do_not_take() -> Iterator[Scene]:
    rig = task_rig()
    beat(rig)
    seq = rig.submit_one()
    yield task(rig, seq)
    rig.lease_one(seq)


@case("no_live_worker")
def task_without_any_worker() -> Iterator[Scene]:
    rig = task_rig()
    yield task(rig, rig.submit_one())
    beat(rig)


@case("no_live_worker")
def queue_without_any_worker() -> Iterator[Scene]:
    rig = task_rig()
    rig.submit_one()
    yield Scene(rig.store, rig.clock, U, "queue", "default")
    beat(rig)


@case("waits_in_queue")
def task_behind_others() -> Iterator[Scene]:
    rig = task_rig()
    first, second = rig.submit_one(), rig.submit_one()
    rig.lease_one(first)
    yield task(rig, second)
    rig.lease_one(second)


@case("running")
def leased_task() -> Iterator[Scene]:
    rig = task_rig()
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    yield task(rig, seq)
    rig.complete(grant)


@case("task_failed")
def task_that_failed() -> Iterator[Scene]:
    rig = task_rig()
    seq = rig.submit_one()
    rig.fail(rig.lease_one(seq), AttemptOutcome.REFUSED, reason="declined", error="no")
    yield task(rig, seq)
    rig.redrive(seq)


@case("task_dead")
def task_that_was_cancelled() -> Iterator[Scene]:
    rig = task_rig()
    seq = rig.submit_one()
    rig.cancel(seq, reason="changed our mind")
    yield task(rig, seq)
    rig.redrive(seq)


# -- flows -----------------------------------------------------------------------------------------


class SaleApproved(hf.Event):
    pass


@hf.task
def bill() -> int:
    return 1


@hf.effect("fx")
def quote(call: hf.Call) -> int:
    return 1


def double(n: int) -> int:
    return 2 * n


@hf.flow
async def child() -> None:
    await hf.receive(SaleApproved)


@hf.flow
async def sleeper() -> None:
    await hf.sleep(60)


@hf.flow
async def receiver() -> None:
    await hf.receive(SaleApproved)


@hf.flow
async def parent_of_task() -> None:
    await hf.step(bill)


@hf.flow
async def parent_of_effect() -> None:
    await hf.step(quote)


@hf.flow
async def parent_of_flow() -> None:
    await hf.step(child)


@hf.flow(attempts=1)
async def broken() -> None:
    raise ValueError("no stock")


def take_back() -> None:
    raise ConnectionError("the bank is down")


@hf.flow(attempts=1)
async def undone_in_vain() -> None:
    hf.undo(take_back)
    raise ValueError("no stock")


@hf.flow(attempts=3)
async def retried() -> None:
    raise ValueError("no stock")


FLOWS = (
    child, sleeper, receiver, parent_of_task, parent_of_effect, parent_of_flow, broken, undone_in_vain, retried,
)  # fmt: skip
APP = hf.App("flows", flows=FLOWS, tasks=[bill], effects=[quote], events=[SaleApproved])


def flow_rig(app: hf.App = APP) -> FlowRig:
    return FlowRig(*new_store(), app)


def flow(rig: FlowRig, handle: Any) -> Scene:
    return Scene(rig.store, rig.clock, rig.universe, "flow", handle.id)


def suspended(rig: FlowRig, definition: Any) -> Any:
    handle = rig.start(definition)
    assert rig.run_one()
    return handle


@case("sleeping")
def flow_that_sleeps() -> Iterator[Scene]:
    rig = flow_rig()
    handle = suspended(rig, sleeper)
    yield flow(rig, handle)
    rig.result(handle)


@case("waits_for_event")
def flow_that_receives() -> Iterator[Scene]:
    rig = flow_rig()
    handle = suspended(rig, receiver)
    yield flow(rig, handle)
    handle.send(SaleApproved())
    rig.result(handle)


@case("waits_for_task")
def flow_with_a_child_task() -> Iterator[Scene]:
    rig = flow_rig()
    handle = suspended(rig, parent_of_task)
    yield flow(rig, handle)
    rig.result(handle)


@case("waits_for_effect")
def flow_with_an_effect() -> Iterator[Scene]:
    rig = flow_rig()
    handle = suspended(rig, parent_of_effect)
    yield flow(rig, handle)
    handle.cancel()
    rig.run(handle.done)


@case("waits_for_flow")
def flow_with_a_child_flow() -> Iterator[Scene]:
    rig = flow_rig()
    handle = suspended(rig, parent_of_flow)
    yield flow(rig, handle)
    handle.cancel()
    rig.run(handle.done)


@case("waits_for_retry")
def flow_whose_code_raised() -> Iterator[Scene]:
    rig = flow_rig()
    handle = suspended(rig, retried)
    yield flow(rig, handle)
    rig.run(handle.done)


@case("flow_failed")
def flow_that_failed() -> Iterator[Scene]:
    rig = flow_rig()
    handle = rig.start(broken)
    rig.run(handle.done)
    yield flow(rig, handle)
    handle.redrive()


@case("undo_failed")
def flow_whose_compensation_failed() -> Iterator[Scene]:
    rig = flow_rig()
    handle = rig.start(undone_in_vain)
    rig.run(handle.done)
    yield flow(rig, handle)
    [letter] = rig.store.read(dead_letters.list_dead, "flows/undo-failed")
    rig.store.transact(redrive_compensations, "flows", [letter.seq])


@case("undo_failed")
def flow_whose_dead_letter_is_dropped() -> Iterator[Scene]:
    rig = flow_rig()
    handle = rig.start(undone_in_vain)
    rig.run(handle.done)
    yield flow(rig, handle)
    rig.store.transact(dead_letters.discard_dead, "flows/undo-failed", [1])


@case("no_worker_for_flow")
def flow_that_no_worker_declares() -> Iterator[Scene]:
    rig = flow_rig()
    handle = rig.start(sleeper)
    other = GrantRequest("worker", ["default"], 1, names=("other",))
    rig.store.transact(task_operations.lease, rig.universe, other)
    yield flow(rig, handle)
    rig.run_one()


@case("replay_diverged")
def flow_with_changed_arguments() -> Iterator[Scene]:
    argument = [1]

    @hf.flow
    async def order() -> int:
        first: int = await hf.step(double, argument[0])
        await hf.sleep(1)
        return first

    rig = flow_rig(hf.App("flows", flows=[order]))
    handle = suspended(rig, order)
    argument[0] = 2
    rig.run(lambda: handle.status().state == "PARKED")
    yield flow(rig, handle)
    argument[0] = 1
    handle.resume()


@case("value_unreadable")
def flow_with_a_value_of_a_former_class() -> Iterator[Scene]:
    old: Any = old_app("dataclass")
    rig = flow_rig(old)
    handle = rig.start(old.flows["order"], old.paid_type(euros=2.5))
    rig.run(lambda: any(one["code"] == "waits_for_event" for one in handle.why()))
    handle.send(old.tip_type(euros=0.5))
    rig.run(lambda: any(one["code"] == "sleeping" for one in handle.why()))
    without = FlowRig(rig.store, rig.clock, new_app("dataclass", upcasts=False))
    without.run(lambda: handle.status().state == "PARKED")
    yield flow(rig, handle)
    mended = FlowRig(rig.store, rig.clock, new_app("dataclass"))
    mended.resume_parked({"order": mended.codes["flow:order"].code_version})


@case("thread_still_running")
def flow_with_a_thread_that_timed_out() -> Iterator[Scene]:
    rig = flow_rig()
    handle = suspended(rig, receiver)
    beat(rig, rig.universe)
    row = StepThreadRow("parse", "T:task", "1")
    seq = int(handle.id.partition("-")[2])
    rig.store.transact(step_threads.add_thread, rig.universe, seq, "k", 1, row)
    yield flow(rig, handle)
    rig.store.transact(step_threads.remove_thread, rig.universe, seq, "k", 1)


# -- schedules -------------------------------------------------------------------------------------


@hf.task
def report(city: str = "Berlin") -> str:
    return city


def schedule_rig() -> ScheduleRig:
    return ScheduleRig(*new_store(), hf.App("flows", tasks=[report]))


def schedule(rig: ScheduleRig) -> Scene:
    return Scene(rig.store, rig.clock, rig.universe, "schedule", "s")


@case("schedule_paused")
def paused_schedule() -> Iterator[Scene]:
    rig = schedule_rig()
    handle = rig.create("s", report)
    handle.pause()
    yield schedule(rig)
    handle.resume()


@case("schedule_stopped")
def schedule_without_its_time_zone() -> Iterator[Scene]:
    rig = schedule_rig()
    rig.create("s", report, zone="Asia/Tokyo")

    def without_zone(zone: str) -> None:
        raise cron.UnknownTimeZone(what="zone", found=zone)

    with failpoints.on("cron.find_zone", calls=without_zone):
        rig.pass_until("2026-11-13T09:10:00")
    yield schedule(rig)
    wall_ns = rig.clock.wall_ns()
    rig.store.transact(schedule_operations.set_paused, rig.universe, "s", False, wall_ns)


@case("waits_for_due_time")
def schedule_before_its_time() -> Iterator[Scene]:
    rig = schedule_rig()
    handle = rig.create("s", report)
    yield schedule(rig)
    handle.delete()


@case("no_timer_worker")
def schedule_that_nobody_fires() -> Iterator[Scene]:
    rig = schedule_rig()
    rig.create("s", report)
    rig.clock.advance(900 * S)
    yield schedule(rig)
    rig.tick()


@case("waits_for_last_occurrence")
def schedule_behind_its_last_task() -> Iterator[Scene]:
    rig = schedule_rig()
    rig.create("s", report, overlap="queue")
    rig.pass_until("2026-11-13T09:21:00")
    yield schedule(rig)
    rig.run_tasks()


# -- runs ------------------------------------------------------------------------------------------


def run_scene(store: Store, clock: SimClock, **record: Any) -> Scene:
    def create(txn: Txn) -> None:
        runs.create(txn, RunRecord("r1", "labels", **record))
        runs.set_latest(txn, "labels", "r1")

    store.transact(create)
    return Scene(store, clock, U, "run", "labels")


def next_run(store: Store) -> None:
    def create(txn: Txn) -> None:
        runs.create(txn, RunRecord("r2", "labels"))
        runs.set_latest(txn, "labels", "r2")

    store.transact(create)


@case("run_halted")
def halted_run() -> Iterator[Scene]:
    store, clock = new_store()
    found = run_scene(store, clock)
    store.transact(lambda txn: runs.change_status(txn, "r1", RunEvent.HALT, halted="seq 9"))
    yield found
    next_run(store)


@case("run_stopped")
def stopped_run() -> Iterator[Scene]:
    store, clock = new_store()
    yield run_scene(store, clock, stopped="5 % of the rows failed")
    next_run(store)


@case("no_driver")
def run_without_a_driver() -> Iterator[Scene]:
    store, clock = new_store()
    yield run_scene(store, clock)
    store.transact(leases.acquire, runs.lease_resource("labels"), "driver", "1", 60 * S)


@case("running")
def run_with_a_driver() -> Iterator[Scene]:
    store, clock = new_store()
    found = run_scene(store, clock)
    store.transact(leases.acquire, runs.lease_resource("labels"), "driver", "1", 60 * S)
    yield found
    clock.advance(61 * S)


# -- universes -------------------------------------------------------------------------------------


def universe(store: Store, clock: SimClock, *, led: bool = True) -> Scene:
    if led:
        lead(store)
    return Scene(store, clock, U, "universe", U)


def lead(store: Store, owner: str = "O") -> None:
    store.transact(leader_lease.acquire, U, owner, "1", 60 * S)


@case("authority_missing")
def universe_without_a_leader() -> Iterator[Scene]:
    store, clock = new_store()
    yield universe(store, clock, led=False)
    lead(store)


@case("authority_expired")
def universe_of_a_dead_leader() -> Iterator[Scene]:
    store, clock = new_store()
    found = universe(store, clock)
    clock.advance(61 * S)
    yield found
    lead(store, "P")


@case("authority_stale")
def universe_with_a_stale_leader() -> Iterator[Scene]:
    store, clock = new_store()
    found = universe(store, clock)
    clock.advance(61 * S)
    store.transact(leader_lease.mark_stale, U)
    yield found
    lead(store, "P")


@case("authority_restored")
def universe_after_a_restore() -> Iterator[Scene]:
    store, clock = new_store()
    found = universe(store, clock)
    simulate_restore(store)
    yield found
    lead(store, "P")


@case("no_live_worker")
def universe_without_workers() -> Iterator[Scene]:
    store, clock = new_store()
    yield universe(store, clock)
    store.transact(worker_registry.heartbeat, U, "A", "1", ("world",))


@case("schema_mismatch")
def store_with_another_schema() -> Iterator[Scene]:
    store, clock = new_store()
    found = universe(store, clock)
    store.transact(lambda txn: txn.put(schema.MARKER_KEY, schema.encode_marker(9, 9)))
    yield found
    store.transact(lambda txn: txn.put(schema.MARKER_KEY, schema.encode_marker()))


@case("replay_pending")
def universe_with_pending_notifications() -> Iterator[Scene]:
    store, clock = new_store()
    found = universe(store, clock)
    store.transact(notifications.subscribe, U)
    DispatchLog(store, U).request("r1", "work")
    yield found
    store.transact(notifications.advance, U, 0, 1, ["r1/0"])


@case("notification_deferred")
def universe_with_a_deferred_dispatch() -> Iterator[Scene]:
    store, clock = new_store()
    found = universe(store, clock)
    store.transact(notifications.subscribe, U)
    store.transact(notifications.defer_leader_notification, U, "leader_missing", "no pane")
    yield found
    store.transact(notifications.clear_deferred, U)


@case("mail_waiting")
def universe_whose_neighbour_is_away() -> Iterator[Scene]:
    store, clock = new_store()
    found = universe(store, clock)
    store.transact(outbox.announce_route, U, "south")
    name = outbox.peer_queue_name(U, "south")
    seq = store.transact(queue.put, name, b"letter", 0, store.now_ns() + 60 * S)
    yield found
    store.transact(queue.cancel, name, seq)


@case("store_time")
def store_whose_clock_went_ahead() -> Iterator[Scene]:
    store, clock = new_store()
    found = universe(store, clock)

    def leap(txn: Txn, leap_ns: int) -> None:
        row = txn.get(schema.META_KEY)
        assert row is not None
        meta = codec.unpack_as(schema.StoreMeta, row)
        txn.put(schema.META_KEY, codec.pack(replace(meta, leap_ns=leap_ns)))

    store.transact(leap, 90 * 86_400 * S)
    yield found
    store.transact(leap, 0)


@case("world_blocked")
def universe_with_a_paused_world() -> Iterator[Scene]:
    store, clock = new_store()
    found = universe(store, clock)
    store.transact(lambda txn: catalog.create(txn, U, "Account", "ada", "id-ada"))
    store.transact(catalog.change_status, U, "id-ada", WorldEvent.PAUSE)
    yield found
    store.transact(catalog.change_status, U, "id-ada", WorldEvent.RESUME)


@case("task_backlog")
def universe_with_an_unserved_queue() -> Iterator[Scene]:
    rig = task_rig()
    found = universe(rig.store, rig.clock)
    seq = rig.submit_one()
    yield found
    rig.lease_one(seq)
