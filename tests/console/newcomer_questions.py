"""Twenty questions of a newcomer about a broken system, each with its answer from the store and its way through the console.

`break_system` breaks a system in ten ways. `draw` draws questions after that. A `Reader` answers each through roles and
labels, and counts its actions: following a link, pressing a key or a button, choosing or writing a filter. Opening the
console at its first page is not counted.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import NamedTuple

from playwright.sync_api import Locator, expect

from holdfast.durable import queue as durable_queue
from holdfast.flows import flow_list
from holdfast.ledger import summary
from holdfast.ops import catalog_queries, pending_work, run_documents
from holdfast.ops.jobs import model as job_model
from holdfast.store.api import Txn
from holdfast.tasks import queries as task_queries
from holdfast.tasks import task_list
from tests.api.rig import ApiRig
from tests.console.browser import WAIT_MS, ConsolePage
from tests.console.rig import UNIVERSE, ConsoleRig, wait_until
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
    trip,
    ways,
)
from tests.console.subjects import measured_run

ACTIONS_MAX = 4
QUESTIONS_DRAWN = 10


def break_system(rig: ConsoleRig, seed: int) -> None:
    """Break a system in ten ways. The seed chooses the numbers, so that no answer is the same for all systems."""
    chosen = random.Random(seed)
    runtime, api = rig.runtime, ApiRig(rig.store, UNIVERSE)
    # Tasks fail, wait behind a pause, and wait for a limit.
    failing = [runtime.submit(print_page, -1 - at) for at in range(chosen.randint(2, 6))]
    api.post("/v1/queues/mail/pause")
    for _ in range(chosen.randint(2, 7)):
        runtime.submit(slow.options(queue="mail"), 1.0)
    api.post("/v1/queues/slow/limit", {"concurrency": 1, "per_key": 0})
    for _ in range(chosen.randint(3, 6)):
        runtime.submit(slow, 600.0)
    # Flows fail, park, and wait for an event that never comes.
    declined = [
        runtime.start(order.options(key=f"bad-{at}"), f"item-{at}", -1)
        for at in range(chosen.randint(1, 4))
    ]
    waiting = [
        runtime.start(order.options(key=f"open-{at}"), "tea", 100 + at)
        for at in range(chosen.randint(2, 5))
    ]
    runtime.start(trip.options(key="long-trip"), "tent")
    parent = runtime.start(fickle.options(key="changed"))
    wait_until(lambda: runtime.why(parent)["state"] == "waiting")
    ways[0] = second_way
    parked = parent.fork("diverged")
    # Worlds: one is paused with unread messages, events fail, effects die.
    cents = chosen.randint(10, 99)
    idle = runtime.world(Customer, "idle")
    idle.ask(TopUp(cents))
    idle.pause()
    for _ in range(chosen.randint(1, 5)):
        idle.send(TopUp(1))
    for name in ("nina", "otto")[: chosen.randint(1, 2)]:
        world = runtime.world(Customer, name)
        world.send(Refuse(f"{name} is blocked"))
        world.send(RateWanted("XXX"))
        world.wait_for(lambda customer: customer.rate == -1.0)
    # A schedule is paused, a worker drains, a run has failed rows.
    runtime.schedule("weekly", print_page, every="0 6 * * 1", args=(1,))
    runtime.schedule("weekly").pause()
    measured_run(rig, "labels")
    for handle in failing:
        wait_until(lambda handle=handle: runtime.why(handle)["state"] == "failed")  # type: ignore[misc]
    for flow in declined:
        wait_until(lambda flow=flow: runtime.why(flow)["state"] == "failed")  # type: ignore[misc]
    for flow in waiting:
        wait_until(lambda flow=flow: runtime.why(flow)["state"] == "waiting")  # type: ignore[misc]
    wait_until(lambda: runtime.why(parked)["state"] == "parked")
    ways[0] = first_way
    # A job works slowly on many tasks.
    runtime.submit_many(
        slow.options(queue="backlog", delay_s=7_200), [(1.0,)] * chosen.randint(150, 250)
    )
    api.post(
        "/v1/jobs",
        {
            "action": "tasks.cancel",
            "selection": {"state": "delayed", "queue": "backlog"},
            "rate_per_s": 0.5,
        },
    )


class Reader:
    """A newcomer with a browser. Each method is one action."""

    def __init__(self, tab: ConsolePage) -> None:
        self.tab = tab
        self.actions = 0

    @property
    def main(self) -> Locator:
        return self.tab.page.get_by_role("main")

    def start(self) -> None:
        self.actions = 0
        self.tab.open("now")
        self.tab.heading("Now")
        self.tab.is_live()

    def page(self, name: str) -> Reader:
        self.actions += 1
        self.tab.page.get_by_role("navigation").get_by_role("link", name=name, exact=True).click()
        self.tab.heading(name)
        return self

    def follow(self, name: str | re.Pattern[str], within: Locator | None = None) -> Reader:
        self.actions += 1
        (within or self.main).get_by_role("link", name=name).first.click()
        return self

    def choose(self, label: str, value: str) -> Reader:
        self.actions += 1
        self.main.get_by_label(label).select_option(value)
        return self

    def open(self, within: Locator) -> Reader:
        """Open a folded part."""
        self.actions += 1
        within.locator("summary").first.click()
        return self

    # Reading needs no action.

    def table(self, name: str) -> Locator:
        found = self.tab.page.get_by_role("table", name=name, exact=True)
        expect(found).to_be_visible(timeout=WAIT_MS)
        return found

    def row(self, table: str, text: str | re.Pattern[str]) -> Locator:
        found = self.table(table).get_by_role("row").filter(has_text=text).first
        expect(found).to_be_visible(timeout=WAIT_MS)
        return found

    def fact(self, label: str, within: Locator | None = None) -> str:
        term = self.tab.page.get_by_text(label, exact=True)
        found = (within or self.main).locator("dl div").filter(has=term).locator("dd").first
        return found.inner_text(timeout=WAIT_MS)

    def card(self, title: str) -> Locator:
        heading = self.tab.page.get_by_role("heading", name=title, exact=True)
        found = self.main.locator("div", has=heading).last
        expect(found).to_be_visible(timeout=WAIT_MS)
        return found

    def number(self, place: Locator, pattern: str) -> int:
        """The first group of a pattern in the text of a place, as a number."""
        expect(place).to_contain_text(re.compile(pattern), timeout=WAIT_MS)
        found = re.search(pattern, place.inner_text())
        assert found is not None
        return int(found[1].replace(",", ""))


class Question(NamedTuple):
    text: str
    # The answer from the store, and from the console.
    truth: Callable[[ConsoleRig], object]
    read: Callable[[Reader], object]


# -- answers from the store ------------------------------------------------------------------------


def flow_counts(rig: ConsoleRig, name: str) -> flow_list.FlowCounts:
    rows = rig.store.read(flow_list.list_counts, UNIVERSE)
    return next(row.counts for row in rows if row.name == name)


def find_flow(rig: ConsoleRig, state: str) -> flow_list.FlowRow:
    page: flow_list.FlowPage = rig.store.read(flow_list.list_flows, UNIVERSE, state)
    return page.rows[0]


def queue_counts(rig: ConsoleRig, queue: str) -> task_queries.QueueRow:
    return rig.store.read(task_queries.read_queue, UNIVERSE, queue)


def world_row(rig: ConsoleRig, name: str) -> catalog_queries.WorldRow:
    def read(txn: Txn) -> catalog_queries.WorldRow:
        return catalog_queries.world(
            txn, catalog_queries.resolve(txn, f"Customer/{name}", UNIVERSE)
        )

    return rig.store.read(read)


def failed_task_error(rig: ConsoleRig) -> str:
    page = rig.store.read(task_list.list_tasks, UNIVERSE, "failed")
    return str(page.rows[0].status.error).strip().splitlines()[-1]


def dead_letters(rig: ConsoleRig, queue: str) -> int:
    return len(rig.store.read(durable_queue.list_dead, queue, 0, 1_000))


def run_view(rig: ConsoleRig) -> run_documents.RunView:
    return rig.store.read(run_documents.find_run, "labels")


def running_job(rig: ConsoleRig) -> job_model.Job:
    [job] = rig.store.read(job_model.list_running, UNIVERSE)
    return job


# -- ways through the console ----------------------------------------------------------------------


def read_paused_queue(reader: Reader) -> object:
    reader.page("Queues and limits")
    paused = reader.main.get_by_role("heading", level=3).filter(has_text="paused")
    expect(paused.first).to_be_visible(timeout=WAIT_MS)
    return sorted(text.replace("paused", "").strip() for text in paused.all_inner_texts())


def read_flow_step(reader: Reader) -> object:
    reader.page("Work").choose("Kind", "flows").choose("State", "failed").follow(
        re.compile("order")
    )
    return reader.fact("Step")


def read_parked_reason(reader: Reader) -> object:
    reader.page("Work").choose("State", "parked").choose("Kind", "flows").follow("fickle")
    why = reader.tab.page.get_by_role("region", name="Why", exact=True)
    expect(why.locator(".code").first).to_be_visible(timeout=WAIT_MS)
    return why.locator(".code").first.inner_text()


def read_awaited_event(reader: Reader) -> object:
    reader.page("Work").choose("Kind", "flows").choose("State", "waiting").follow(
        re.compile("order")
    )
    why = reader.tab.page.get_by_role("region", name="Why", exact=True)
    expect(why).to_contain_text("waits for an event", timeout=WAIT_MS)
    found = re.search(r"waits for an event: (\w+)", why.inner_text())
    return found and found[1]


def read_idle_state(reader: Reader) -> object:
    reader.page("Worlds").follow("idle")
    state = reader.tab.page.get_by_role("region", name="State", exact=True)
    return reader.number(state, r"cents: ([\d,]+)")


def read_job_left(reader: Reader) -> object:
    reader.page("Jobs")
    return reader.fact("At most, each second")


QUESTIONS = (
    Question("How many tasks of the queue print have failed?",
             lambda rig: queue_counts(rig, "print").counts.failed,
             lambda reader: reader.number(reader.row("What ended badly", "queue print"), r"failed\D*([\d,]+)")),
    Question("Which error did the tasks of the queue print have?", failed_task_error,
             lambda reader: reader.page("Work").choose("Kind", "tasks").choose("State", "failed").row(
                 "Tasks and flows", "print_page").get_by_role("cell").last.inner_text().strip().splitlines()[-1]),
    Question("Which queues are paused?", lambda rig: ["mail"], read_paused_queue),
    Question("How many tasks wait in the queue mail?", lambda rig: queue_counts(rig, "mail").counts.ready,
             lambda reader: reader.number(reader.page("Queues and limits").card("mail paused"), r"ready ([\d,]+)")),
    Question("How many tasks of the queue slow may run at once?",
             lambda rig: queue_counts(rig, "slow").limits.concurrency,
             lambda reader: int(reader.page("Queues and limits").fact("At once", reader.card("slow")))),
    Question("How many tasks of the queue slow run now?", lambda rig: queue_counts(rig, "slow").counts.leased,
             lambda reader: reader.number(reader.card("slow"), r"leased ([\d,]+)")),
    Question("How many flows `order` have failed?", lambda rig: flow_counts(rig, "order").failed,
             lambda reader: reader.number(reader.row("What ended badly", "flow order"), r"failed\D*([\d,]+)")),
    Question("At which step did a flow `order` fail?", lambda rig: find_flow(rig, "failed").head.step, read_flow_step),
    Question("How many flows `order` wait?", lambda rig: flow_counts(rig, "order").waiting,
             lambda reader: reader.number(reader.card("order"), r"waiting ([\d,]+)")),
    Question("Which event does a waiting flow `order` need?", lambda rig: "Rating", read_awaited_event),
    Question("Why is the flow `fickle` parked?",
             lambda rig: rig.runtime.why("flow", str(find_flow(rig, "parked").id))["blockers"][0]["code"],
             read_parked_reason),
    Question("Which world is paused?", lambda rig: "idle",
             lambda reader: reader.page("Worlds").row("Worlds", re.compile("paused")).get_by_role("link").first.inner_text()),
    Question("How many unread messages has the world idle?", lambda rig: world_row(rig, "idle").depth,
             lambda reader: int(reader.page("Worlds").follow("idle").fact("Unread messages"))),
    Question("How many cents has the world idle?",
             lambda rig: rig.runtime.world(Customer, "idle").state().cents, read_idle_state),
    Question("How many effects shop.quote are dead?",
             lambda rig: len(rig.store.read(pending_work.intents_in_state, UNIVERSE, "shop.quote", "dead")),
             lambda reader: reader.number(reader.row("What ended badly", "effect shop.quote"), r"dead\D*([\d,]+)")),
    Question("How many events of worlds failed?", lambda rig: dead_letters(rig, f"{UNIVERSE}/failed-events"),
             lambda reader: reader.number(reader.page("Dead letters").row(
                 "Queues with dead letters", "failed-events"), r"failed-events\s*([\d,]+)")),
    Question("Which schedule is paused?", lambda rig: "weekly",
             lambda reader: reader.page("Schedules").row("Schedules", re.compile("paused")).get_by_role("link").first.inner_text()),
    Question("How many rows of the stage labels failed?", lambda rig: summary.tally_rows(run_view(rig).progress).failed,
             lambda reader: reader.number(reader.page("Stages").follow("labels").main, r"failed ([\d,]+)")),
    Question("Which error did the rows of the stage labels have?",
             lambda rig: run_view(rig).progress.errors[0].text,
             lambda reader: reader.page("Stages").follow("labels").table("Errors").get_by_role("row").nth(1)
             .get_by_role("cell").nth(1).inner_text()),
    Question("How many subjects does the running job process a second?",
             lambda rig: running_job(rig).row.rate_per_s, lambda reader: float(str(read_job_left(reader)))),
)  # fmt: skip


def draw(seed: int) -> list[Question]:
    """Draw questions about a system that is broken."""
    return random.Random(seed).sample(QUESTIONS, QUESTIONS_DRAWN)


class Answered(NamedTuple):
    question: str
    answer: object
    truth: object
    actions: int


def answer_all(rig: ConsoleRig, tab: ConsolePage, questions: list[Question]) -> list[Answered]:
    """Answer questions in the console, each from its first page."""
    reader, answered = Reader(tab), []
    for question in questions:
        reader.start()
        answer = question.read(reader)
        answered.append(Answered(question.text, answer, question.truth(rig), reader.actions))
    return answered
