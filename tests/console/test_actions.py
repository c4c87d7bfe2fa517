"""Every action of the console: its dialog asks and shows a command that the command line accepts; then the store, the audit
log and a second browser show the change."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from playwright.sync_api import Locator, expect

import holdfast as hf
from holdfast.cli import COMMANDS
from holdfast.effects import budget
from holdfast.effects.budget import MONEY, Cost
from holdfast.errors import NotFound
from holdfast.ledger import runs
from holdfast.ledger.run_policy import ErrorClass
from holdfast.ops import catalog_queries, pending_work
from holdfast.ops.console.files import console_files
from holdfast.ops.jobs import model as job_model
from holdfast.ops.jobs.states import JobState
from holdfast.tasks import queries as task_queries
from tests.api.rig import ApiRig
from tests.cli.stage_runs import StageRun
from tests.console.browser import WAIT_MS, ConsolePage
from tests.console.rig import UNIVERSE, ConsoleRig, browser, other, server, shop, tab, wait_until
from tests.console.shop import (
    Customer,
    RateWanted,
    Refuse,
    TopUp,
    fickle,
    first_way,
    order,
    print_page,
    second_way,
    slow,
    ways,
)

__all__ = ["browser", "other", "server", "shop", "tab"]

pytestmark = [pytest.mark.timeout(300), pytest.mark.deep]

Check = Callable[[], Any]
Look = Callable[[ConsolePage], None]


class Acted(NamedTuple):
    """What an action needs and changes: the page with its button, the change in the store, the beginning of its audit entry
    (empty: the action submits work and has none), and what the second browser shows on its page."""

    page: tuple[str, ...]
    changed: Check
    audit: str
    seen: Look
    values: Mapping[str, str] = MappingProxyType({})
    filters: str = ""
    # Where the second browser looks, if it is another page.
    watched: tuple[str, ...] = ()
    watched_filters: str = ""
    # The part of the page with the button.
    within: str = ""


def text(found: str) -> Look:
    return lambda page: page.sees(found)


def gone(found: str) -> Look:
    def look(page: ConsolePage) -> None:
        main = page.page.get_by_role("main")
        expect(main.get_by_text(found)).to_have_count(0, timeout=WAIT_MS)

    return look


def state_of(shop: ConsoleRig, handle: Any, state: str) -> Check:
    return lambda: shop.runtime.why(handle)["state"] == state


def world_of(shop: ConsoleRig, name: str) -> catalog_queries.WorldRow:
    record = shop.store.read(catalog_queries.resolve, f"Customer/{name}", UNIVERSE)
    return shop.store.read(catalog_queries.world, record)


def is_gone(shop: ConsoleRig, name: str) -> bool:
    try:
        world_of(shop, name)
    except NotFound:
        return True
    return False


def post(shop: ConsoleRig, route: str, body: Any = None) -> None:
    """Change the store by a request of another client."""
    ApiRig(shop.store, UNIVERSE).post(f"/v1/{route}", body)


# -- tasks and flows -------------------------------------------------------------------------------


def cancel_task(shop: ConsoleRig) -> Acted:
    task = shop.runtime.submit(slow, 600.0)
    return Acted(("tasks", task.id), state_of(shop, task, "dead"), f"cancel_task task/{task.id}",
                 text("reason: not needed"), {"Reason": "not needed"})  # fmt: skip


def redrive_task(shop: ConsoleRig) -> Acted:
    task = shop.runtime.submit(print_page, -51)
    wait_until(state_of(shop, task, "failed"))
    return Acted(("tasks", task.id), lambda: not shop.runtime.why(task)["blockers"],
                 f"redrive_task task/{task.id}", text("Redriven by"))  # fmt: skip


def waiting_order(shop: ConsoleRig, key: str) -> hf.FlowHandle[str]:
    flow = shop.runtime.start(order.options(key=key), "cup", 5)
    wait_until(state_of(shop, flow, "waiting"))
    return flow


def send_event_to_flow(shop: ConsoleRig) -> Acted:
    flow = waiting_order(shop, "a-send")
    return Acted(("flows", flow.id), state_of(shop, flow, "completed"), "", text('"cup: 4"'),
                 {"Type of the event": "Rating", "stars": "4"})  # fmt: skip


def cancel_flow(shop: ConsoleRig) -> Acted:
    flow = waiting_order(shop, "a-cancel")
    return Acted(("flows", flow.id), state_of(shop, flow, "cancelled"), f"cancel_flow flow/{flow.id}",
                 text("undo:release"))  # fmt: skip


def fork_flow(shop: ConsoleRig) -> Acted:
    flow = waiting_order(shop, "a-fork")
    return Acted(("flows", flow.id), lambda: shop.runtime.flow(order, key="a-forked").id,
                 f"fork_flow flow/{flow.id}", text("a-forked"), {"Key of the fork": "a-forked"},
                 watched=("work",), watched_filters="kind=flows")  # fmt: skip


def redrive_flow(shop: ConsoleRig) -> Acted:
    flow = shop.runtime.start(order.options(key="a-redrive"), "tin", -1)
    wait_until(state_of(shop, flow, "failed"))
    return Acted(("flows", flow.id), lambda: not shop.runtime.why(flow)["blockers"],
                 f"redrive_flow flow/{flow.id}", text("Redriven by"))  # fmt: skip


def parked_flow(shop: ConsoleRig, key: str) -> hf.FlowHandle[int]:
    """A fork whose recorded step the code did not ask for. The code asks for it again."""
    ways[0] = first_way
    flow = shop.runtime.start(fickle.options(key=f"{key}-parent"))
    wait_until(state_of(shop, flow, "waiting"))
    ways[0] = second_way
    fork = flow.fork(key)
    wait_until(state_of(shop, fork, "parked"))
    ways[0] = first_way
    return fork


def resume_flow(shop: ConsoleRig) -> Acted:
    flow = parked_flow(shop, "a-resume")
    return Acted(("flows", flow.id), state_of(shop, flow, "waiting"), f"resume_flow flow/{flow.id}",
                 text("waiting"))  # fmt: skip


# -- worlds ----------------------------------------------------------------------------------------


def new_world(shop: ConsoleRig, name: str) -> tuple[str, str, str]:
    shop.runtime.world(Customer, name).ask(TopUp(3))
    return ("worlds", "Customer", name)


def create_world(shop: ConsoleRig) -> Acted:
    return Acted(("worlds",), lambda: not is_gone(shop, "a-new"), "", text("a-new"),
                 {"Type": "Customer", "Name": "a-new"}, watched=("worlds",))  # fmt: skip


def send_event_to_world(shop: ConsoleRig) -> Acted:
    page = new_world(shop, "a-send")
    world = shop.runtime.world(Customer, "a-send")
    return Acted(page, lambda: world.state().cents == 43, "", text("cents: 43"),
                 {"Type of the event": "TopUp", "cents": "40"})  # fmt: skip


def fork_world(shop: ConsoleRig) -> Acted:
    page = new_world(shop, "a-fork")
    return Acted(page, lambda: not is_gone(shop, "a-forked"), "fork_world world/Customer/a-fork",
                 text("a-forked"), {"Name of the fork": "a-forked"},
                 watched=("worlds",))  # fmt: skip


def pause_world(shop: ConsoleRig) -> Acted:
    page = new_world(shop, "a-pause")
    return Acted(page, lambda: world_of(shop, "a-pause").record.status.value == "paused",
                 "pause_world world/Customer/a-pause", text("paused"))  # fmt: skip


def resume_world(shop: ConsoleRig) -> Acted:
    page = new_world(shop, "a-resume")
    shop.runtime.world(Customer, "a-resume").pause()
    return Acted(page, lambda: world_of(shop, "a-resume").record.status.value == "active",
                 "resume_world world/Customer/a-resume", text("active"))  # fmt: skip


def pin_world(shop: ConsoleRig) -> Acted:
    page = new_world(shop, "a-pin")
    return Acted(page, lambda: world_of(shop, "a-pin").worker == "worker-9",
                 "pin_world world/Customer/a-pin", text("worker-9"), {"Worker": "worker-9"})  # fmt: skip


def unpin_world(shop: ConsoleRig) -> Acted:
    page = new_world(shop, "a-unpin")
    post(shop, "worlds/Customer/a-unpin/pin", {"worker": "worker-9"})
    return Acted(page, lambda: world_of(shop, "a-unpin").worker != "worker-9",
                 "unpin_world world/Customer/a-unpin", gone("worker-9"))  # fmt: skip


def delete_world(shop: ConsoleRig) -> Acted:
    page = new_world(shop, "a-delete")
    return Acted(page, lambda: is_gone(shop, "a-delete"), "delete_world world/Customer/a-delete",
                 text("This world is deleted."))  # fmt: skip


def purge_world(shop: ConsoleRig) -> Acted:
    page = new_world(shop, "a-purge")
    return Acted(page, lambda: is_gone(shop, "a-purge"), "purge_world world/Customer/a-purge",
                 text("This world is deleted."), {"Also with open effects or a lease": "yes"})  # fmt: skip


# -- effects and dead letters ----------------------------------------------------------------------


def dead_intents(shop: ConsoleRig) -> list[pending_work.IntentRow]:
    return shop.store.read(pending_work.intents_in_state, UNIVERSE, "shop.quote", "dead")


def dead_effect(shop: ConsoleRig, name: str) -> pending_work.IntentRow:
    world = shop.runtime.world(Customer, name)
    world.send(RateWanted("XXX"))
    wait_until(lambda: any(row.world == f"Customer/{name}" for row in dead_intents(shop)))
    [row] = [row for row in dead_intents(shop) if row.world == f"Customer/{name}"]
    return row


def redrive_effect(shop: ConsoleRig) -> Acted:
    row = dead_effect(shop, "a-redrive-effect")
    intent = row.intent.intent_hash.hex()
    return Acted(("effects", intent), lambda: row.seq not in [one.seq for one in dead_intents(shop)],
                 f"redrive_effect effect/{intent}", gone(f"{intent[:16]}…"),
                 watched=("effects",), watched_filters="kind=shop.quote&state=dead")  # fmt: skip


def redrive_letter(shop: ConsoleRig) -> Acted:
    row = dead_effect(shop, "a-redrive-letter")
    queue = f"{UNIVERSE}/effects/shop.quote"
    return Acted(("dead", queue, str(row.seq)), lambda: row.seq not in [one.seq for one in dead_intents(shop)],
                 "redrive_dead_letter", gone("Customer/a-redrive-letter"), watched=("dead", queue))  # fmt: skip


def refused_event(shop: ConsoleRig, name: str) -> int:
    """Let an event of a world fail. Returns the number of its dead letter."""
    queue = f"{UNIVERSE}/failed-events"
    before = shop.letters(queue)
    shop.runtime.world(Customer, name).send(Refuse(name))
    wait_until(lambda: shop.letters(queue) - before)
    [seq] = shop.letters(queue) - before
    return seq


def drop_letter(shop: ConsoleRig) -> Acted:
    seq, queue = refused_event(shop, "a-drop-letter"), f"{UNIVERSE}/failed-events"
    return Acted(("dead", queue, str(seq)), lambda: seq not in shop.letters(queue), "drop_dead_letter",
                 gone("Customer/a-drop-letter"), watched=("dead", queue))  # fmt: skip


def jobs_done(shop: ConsoleRig, action: str) -> bool:
    jobs = shop.store.read(job_model.list_jobs, UNIVERSE, None, 100)
    return any(job.row.action == action and job.row.state == JobState.DONE for job in jobs)


def by_job(
    page: tuple[str, ...], action: str, changed: Check, shop: ConsoleRig, filters: str = ""
) -> Acted:
    """An action on a selection: a job does it, and both browsers show the job."""
    return Acted(page, lambda: changed() and jobs_done(shop, action), "create_job job", text(action),
                 {"At most, each second": "1000"}, filters, watched=("jobs",))  # fmt: skip


def redrive_all_letters(shop: ConsoleRig) -> Acted:
    row = dead_effect(shop, "a-redrive-all")
    page = ("dead", f"{UNIVERSE}/effects/shop.quote")
    return by_job(
        page, "dead.redrive", lambda: row.seq not in [one.seq for one in dead_intents(shop)], shop
    )


def drop_all_letters(shop: ConsoleRig) -> Acted:
    seq, queue = refused_event(shop, "a-drop-all"), f"{UNIVERSE}/failed-events"
    return by_job(("dead", queue), "dead.drop", lambda: seq not in shop.letters(queue), shop)


def group_of(shop: ConsoleRig, kind: str, name: str, value: object) -> str:
    """The group of errors with a subject."""
    api = ApiRig(shop.store, UNIVERSE)
    for one in api.pages("/v1/errors", kind=kind):
        subjects = api.pages(f"/v1/errors/{kind}/{one['group']}/subjects")
        if any(str(subject.get(name)) == str(value) for subject in subjects):
            return str(one["group"])
    raise AssertionError(f"no group of {kind} has {value}")


def redrive_group(shop: ConsoleRig) -> Acted:
    task = shop.runtime.submit(print_page, -52)
    wait_until(state_of(shop, task, "failed"))
    page = ("errors", "task", group_of(shop, "task", "id", task.id))
    return by_job(page, "errors.redrive", lambda: not shop.runtime.why(task)["blockers"], shop)


def drop_group(shop: ConsoleRig) -> Acted:
    seq, queue = refused_event(shop, "a-drop-group"), f"{UNIVERSE}/failed-events"
    page = ("errors", "dead", group_of(shop, "dead", "seq", seq))
    return by_job(page, "errors.drop", lambda: seq not in shop.letters(queue), shop)


# -- selections ------------------------------------------------------------------------------------


def cancel_tasks(shop: ConsoleRig) -> Acted:
    task = shop.runtime.submit(slow.options(queue="a-bulk", delay_s=3600), 1.0)
    return by_job(
        ("work",),
        "tasks.cancel",
        state_of(shop, task, "dead"),
        shop,
        "kind=tasks&state=delayed&queue=a-bulk",
    )


def redrive_tasks(shop: ConsoleRig) -> Acted:
    task = shop.runtime.submit(print_page, -53)
    wait_until(state_of(shop, task, "failed"))
    return by_job(("work",), "tasks.redrive", lambda: not shop.runtime.why(task)["blockers"], shop,
                  "kind=tasks&state=failed&queue=print")  # fmt: skip


def cancel_flows(shop: ConsoleRig) -> Acted:
    flow = waiting_order(shop, "a-cancel-all")
    return by_job(
        ("work",),
        "flows.cancel",
        state_of(shop, flow, "cancelled"),
        shop,
        "kind=flows&state=waiting",
    )


def redrive_flows(shop: ConsoleRig) -> Acted:
    flow = shop.runtime.start(order.options(key="a-redrive-all"), "tin", -1)
    wait_until(state_of(shop, flow, "failed"))
    return by_job(("work",), "flows.redrive", lambda: not shop.runtime.why(flow)["blockers"], shop,
                  "kind=flows&state=failed")  # fmt: skip


def resume_flows(shop: ConsoleRig) -> Acted:
    flow = parked_flow(shop, "a-resume-all")
    return by_job(
        ("work",), "flows.resume", state_of(shop, flow, "waiting"), shop, "kind=flows&state=parked"
    )


def change_worlds(shop: ConsoleRig, verb: str, state: str) -> Acted:
    new_world(shop, "a-all")
    return by_job(
        ("worlds",),
        f"worlds.{verb}",
        lambda: world_of(shop, "a-all").record.status.value == state,
        shop,
        "type=Customer",
    )


def pause_worlds(shop: ConsoleRig) -> Acted:
    return change_worlds(shop, "pause", "paused")


def resume_worlds(shop: ConsoleRig) -> Acted:
    new_world(shop, "a-resumed")
    shop.runtime.world(Customer, "a-resumed").pause()
    return by_job(("worlds",), "worlds.resume",
                  lambda: world_of(shop, "a-resumed").record.status.value == "active", shop, "type=Customer")  # fmt: skip


def delete_worlds(shop: ConsoleRig) -> Acted:
    new_world(shop, "a-deleted")
    return by_job(
        ("worlds",), "worlds.delete", lambda: is_gone(shop, "a-deleted"), shop, "type=Customer"
    )


def running_job(shop: ConsoleRig, queue: str) -> job_model.Job:
    from holdfast.ops.jobs import steps

    shop.runtime.submit_many(slow.options(queue=queue, delay_s=3600), [(1.0,)] * 200)
    row = job_model.JobRow(
        "tasks.cancel", {"state": "delayed", "queue": queue}, "test", 0, rate_per_s=1.0
    )
    return shop.store.transact(
        lambda txn: job_model.create(txn, UNIVERSE, steps.prepare(txn, UNIVERSE, row))
    )


def job_row(shop: ConsoleRig, number: int) -> job_model.JobRow:
    return shop.store.read(job_model.get, UNIVERSE, number).row


def change_pace(shop: ConsoleRig) -> Acted:
    job = running_job(shop, "a-pace")
    return Acted(("jobs",), lambda: job_row(shop, job.number).rate_per_s == 2.5, f"pace_job job/{job.number}",
                 text("2.5"), {"At most, each second": "2.5"}, within=f"Job {job.id}")  # fmt: skip


def cancel_job(shop: ConsoleRig) -> Acted:
    job = running_job(shop, "a-cancel-job")

    def cancelled(page: ConsolePage) -> None:
        article = page.page.get_by_role("article", name=f"Job {job.id}", exact=True)
        page.sees("cancelled", within=article)

    return Acted(("jobs",), lambda: job_row(shop, job.number).state == JobState.CANCELLED,
                 f"cancel_job job/{job.number}", cancelled, within=f"Job {job.id}")  # fmt: skip


# -- schedules, queues, money, workers, stages -----------------------------------------------------


def schedule_acted(shop: ConsoleRig, verb: str, changed: Callable[[Any], bool], audit: str, seen: Look,
                   values: dict[str, str] | None = None) -> Acted:  # fmt: skip
    name = f"a-{verb}"
    shop.runtime.schedule(name, print_page, every="0 0 1 1 *", args=(1,))
    return Acted(
        ("schedules", name),
        lambda: changed(ApiRig(shop.store, UNIVERSE).get(f"/v1/schedules/{name}")),
        f"{audit} schedule/{name}",
        seen,
        values or {},
    )


def has_occurrence(cause: str) -> Callable[[Any], bool]:
    return lambda schedule: cause in [one["cause"] for one in schedule["occurrences"]]


def pause_schedule(shop: ConsoleRig) -> Acted:
    return schedule_acted(
        shop, "pause", lambda one: one["state"] == "paused", "pause_schedule", text("paused")
    )


def resume_schedule(shop: ConsoleRig) -> Acted:
    acted = schedule_acted(
        shop, "resume", lambda one: one["state"] == "active", "resume_schedule", text("active")
    )
    shop.runtime.schedule("a-resume").pause()
    return acted


def run_now(shop: ConsoleRig) -> Acted:
    return schedule_acted(
        shop, "run", has_occurrence("run_now"), "run_schedule_now", text("run_now")
    )


def backfill(shop: ConsoleRig) -> Acted:
    values = {
        "From": "2025-12-31T00:00",
        "To": "2026-01-02T00:00",
        "Only show the occurrences": "no",
    }
    return schedule_acted(
        shop, "backfill", has_occurrence("backfill"), "backfill_schedule", text("backfill"), values
    )


def delete_schedule(shop: ConsoleRig) -> Acted:
    name = "a-delete"
    shop.runtime.schedule(name, print_page, every="0 0 1 1 *", args=(1,))

    def is_deleted() -> bool:
        try:
            shop.runtime.schedule(name)
        except NotFound:
            return True
        return False

    return Acted(
        ("schedules", name),
        is_deleted,
        f"delete_schedule schedule/{name}",
        gone(name),
        watched=("schedules",),
    )


def queue_row(shop: ConsoleRig, queue: str) -> Any:
    return shop.store.read(task_queries.read_queue, UNIVERSE, queue)


def new_queue(shop: ConsoleRig, queue: str) -> None:
    shop.runtime.submit(slow.options(queue=queue, delay_s=3600), 1.0)


def set_limit(shop: ConsoleRig) -> Acted:
    new_queue(shop, "a-limit")
    return Acted(("queues",), lambda: queue_row(shop, "a-limit").limits.concurrency == 37, "limit_queue queue/a-limit",
                 text("37"), {"Concurrency": "37"}, within="card a-limit")  # fmt: skip


def pause_queue(shop: ConsoleRig) -> Acted:
    new_queue(shop, "a-pause")
    return Acted(("queues",), lambda: queue_row(shop, "a-pause").limits.paused_ns > 0, "pause_queue queue/a-pause",
                 text("paused"), within="card a-pause")  # fmt: skip


def resume_queue(shop: ConsoleRig) -> Acted:
    new_queue(shop, "a-resume")
    post(shop, "queues/a-resume/pause")

    def resumed(page: ConsolePage) -> None:
        card = part_of(page, "card a-resume")
        expect(card.get_by_role("button", name="Pause queue")).to_be_visible(timeout=WAIT_MS)

    return Acted(("queues",), lambda: not queue_row(shop, "a-resume").limits.paused_ns, "resume_queue queue/a-resume",
                 resumed, within="card a-resume")  # fmt: skip


def set_load_limit(shop: ConsoleRig) -> Acted:
    from holdfast.ops import limit_documents

    def is_set() -> bool:
        limits = shop.store.read(limit_documents.read_limits, UNIVERSE).limits
        return any((one.limit, one.limit_max) == ("timers", 654_321) for one in limits)

    return Acted(
        ("queues",), is_set, "set_limits", text("654,321"), {"Limit": "timers", "Most": "654321"}
    )


def change_limit(shop: ConsoleRig) -> Acted:
    shop.store.transact(budget.reserve, UNIVERSE, "w-1", "k", [Cost(MONEY, 5)])
    limit = lambda: shop.store.read(budget.account, UNIVERSE, "w-1", MONEY).limit  # noqa: E731
    return Acted(("money",), lambda: limit() == 765_432, "limit_budget budget/w-1", text("765,432"),
                 {"Limit in money": "765432"}, within="row w-1")  # fmt: skip


def worker_row(shop: ConsoleRig) -> catalog_queries.WorkerRow:
    rows = shop.store.read(catalog_queries.workers_after, UNIVERSE, "", 100)
    return next(row for row in rows if "world" in row.record.roles)


def drain(shop: ConsoleRig) -> Acted:
    worker = worker_row(shop).record.worker
    return Acted(("workers",), lambda: worker_row(shop).record.draining, f"drain_worker worker/{worker}",
                 text("draining"), within=f"row {worker}")  # fmt: skip


def undrain(shop: ConsoleRig) -> Acted:
    worker = worker_row(shop).record.worker
    post(shop, f"workers/{worker}/drain")
    return Acted(("workers",), lambda: not worker_row(shop).record.draining, f"undrain_worker worker/{worker}",
                 gone("draining"), within=f"row {worker}")  # fmt: skip


def run_of(shop: ConsoleRig, run: StageRun) -> runs.RunRecord:
    record = shop.store.read(runs.get_record, run.run_id)
    assert record is not None
    return record


def retry_rows(shop: ConsoleRig) -> Acted:
    run = StageRun(shop.store, "a-retry", 10, {3: (ErrorClass.INPUT, "ValueError: not a document")})
    run.finish()
    return Acted(("stages", run.run_id), lambda: run_of(shop, run).retry_requested_ns > 0,
                 f"retry_run run/{run.run_id}", text("Retry requested"))  # fmt: skip


def cancel_run(shop: ConsoleRig) -> Acted:
    run = StageRun(shop.store, "a-cancel", 10)
    return Acted(("stages", run.run_id), lambda: run_of(shop, run).cancel_requested_ns > 0,
                 f"cancel_run run/{run.run_id}", text("Cancel requested"))  # fmt: skip


# The label of each action, and the function that prepares it.
ACTIONS: tuple[tuple[str, Callable[[ConsoleRig], Acted]], ...] = (
    ("Cancel task", cancel_task), ("Redrive task", redrive_task), ("Send event", send_event_to_flow),
    ("Cancel flow", cancel_flow), ("Resume flow", resume_flow), ("Redrive flow", redrive_flow), ("Fork flow", fork_flow),
    ("Create world", create_world), ("Send event", send_event_to_world), ("Fork world", fork_world),
    ("Pause world", pause_world), ("Resume world", resume_world), ("Pin world", pin_world), ("Unpin world", unpin_world),
    ("Delete world", delete_world), ("Purge world", purge_world), ("Redrive effect", redrive_effect),
    ("Redrive letter", redrive_letter), ("Drop letter", drop_letter), ("Redrive all", redrive_all_letters),
    ("Drop all", drop_all_letters), ("Redrive group", redrive_group), ("Drop group", drop_group),
    ("Cancel all delayed tasks", cancel_tasks), ("Redrive all failed tasks", redrive_tasks),
    ("Resume all parked flows", resume_flows), ("Redrive all failed flows", redrive_flows),
    ("Cancel all waiting flows", cancel_flows), ("Change pace", change_pace), ("Cancel job", cancel_job),
    ("Pause schedule", pause_schedule), ("Resume schedule", resume_schedule), ("Run now", run_now),
    ("Backfill", backfill), ("Delete schedule", delete_schedule), ("Set limit", set_limit),
    ("Pause queue", pause_queue), ("Resume queue", resume_queue), ("Set load limit", set_load_limit),
    ("Change limit", change_limit), ("Drain", drain), ("Undrain", undrain), ("Retry failed rows", retry_rows),
    ("Cancel run", cancel_run), ("Pause all Customer", pause_worlds), ("Resume all Customer", resume_worlds),
    ("Delete all Customer", delete_worlds),
)  # fmt: skip


def part_of(page: ConsolePage, name: str) -> Locator:
    """The part of a page with the button: the whole page, `row TEXT`, `card HEADING`, or an article by its label."""
    main = page.page.get_by_role("main")
    kind, _, found = name.partition(" ")
    if kind == "row":
        return main.get_by_role("row").filter(has_text=found).first
    if kind == "card":
        heading = page.page.get_by_role("heading", name=re.compile(rf"^{found}( paused)?$"))
        return main.locator("div", has=heading).last
    return main.get_by_role("article", name=name, exact=True) if name else main


def check_command(line: str) -> None:
    """Parse a command as `holdfast` does. argparse ends the process of a wrong one."""
    program, command, *words = shlex.split(line)
    assert program == "holdfast"
    parser = argparse.ArgumentParser(prog=f"holdfast {command}")
    importlib.import_module(COMMANDS[command].module).configure(parser)
    parser.parse_args(words)


@pytest.fixture
def no_leftovers() -> Iterator[None]:
    yield
    ways[0] = first_way


@pytest.mark.usefixtures("no_leftovers")
@pytest.mark.parametrize(
    ("label", "prepare"), ACTIONS, ids=[prepare.__name__ for _, prepare in ACTIONS]
)
def test_action_asks_then_changes_store_audit_log_and_second_browser(
    tab: ConsolePage,
    other: ConsolePage,
    shop: ConsoleRig,
    label: str,
    prepare: Callable[[ConsoleRig], Acted],
) -> None:
    acted = prepare(shop)
    tab.open(*acted.page, filters=acted.filters)
    other.open(*(acted.watched or acted.page), filters=acted.watched_filters)
    tab.is_live()
    other.is_live()
    place = part_of(tab, acted.within)
    button = place.get_by_role("button", name=label, exact=True).first
    audited = shop.audited()
    # The keyboard opens the dialog, and its first button changes nothing.
    expect(button).to_be_enabled(timeout=WAIT_MS)
    button.focus()
    button.press("Enter")
    dialog = tab.page.get_by_role("dialog", name=label, exact=True)
    expect(dialog).to_be_visible(timeout=WAIT_MS)
    dialog.get_by_role("button", name="Back", exact=True).press("Enter")
    expect(dialog).to_have_count(0, timeout=WAIT_MS)
    assert shop.audited() == audited
    button.press("Enter")
    tab.fill(dialog, acted.values)
    check_command(str(dialog.locator("code.command").text_content()))
    dialog.get_by_role("button", name=label, exact=True).press("Enter")
    expect(dialog).to_have_count(0, timeout=WAIT_MS)
    wait_until(acted.changed)
    if acted.audit:
        added = len(shop.audited()) - len(audited)
        assert any(entry.startswith(acted.audit) for entry in shop.audited()[:added])
    acted.seen(other)
    for page in (tab, other):
        # A deleted subject has no document.
        page.errors[:] = [error for error in page.errors if "404" not in error]


def test_table_has_every_action_of_the_assets() -> None:
    """Labels with a variable part are those of jobs on a selection."""
    source = "".join(file.content.decode() for file in console_files().values())
    labels = set(
        re.findall(
            r'(?:label: |verb\(|jobAction\()"([A-Z][^"]*)"(?:, scope|, danger|, disabled|, route|, "[a-z.-]+")',
            source,
        )
    )
    labels |= set(re.findall(r'action\(\{\s*label: "([^"]*)"', source))
    tested = {label for label, _ in ACTIONS}
    assert labels <= tested, labels - tested
    assert len(labels) > 30, labels
