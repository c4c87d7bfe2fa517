"""The lists of the console: filters with an index, the search by key, id and name, and hidden tabs."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from holdfast import __version__
from holdfast.durable.queue import add_dead_letter
from holdfast.effects import budget
from holdfast.ops.http.server import HttpServer
from holdfast.tasks.model import QueueLimits
from holdfast.tasks.operations import GrantRequest, lease, set_limits
from tests.console.browser import WAIT_MS, ConsolePage
from tests.console.rig import ConsoleRig, browser, server, shop, tab, wait_until
from tests.console.shop import order, print_page, slow

__all__ = ["browser", "server", "shop", "tab"]

pytestmark = pytest.mark.timeout(300)

MODULES = ("holdfast.ops.api.find", "holdfast.ops.http.console_routes")


def find(tab: ConsolePage, text: str) -> None:
    tab.open("work")
    tab.page.get_by_label("Find").fill(text)
    tab.page.get_by_role("button", name="Open", exact=True).click()


def test_find_opens_a_task_flow_or_world_by_key_id_or_name(
    tab: ConsolePage, shop: ConsoleRig
) -> None:
    task = shop.runtime.submit(slow.options(key="find-me", delay_s=3600), 1.0)
    for text in ("find-me", task.id):
        find(tab, text)
        tab.heading("slow")
        assert f"tasks/{task.id}" in tab.page.url
    find(tab, "o-1")
    tab.heading("order o-1")
    find(tab, "ada")
    tab.heading("Customer/ada")
    find(tab, "nobody")
    tab.sees("no task, flow or world has the id, key or name nobody")


@pytest.mark.deep
def test_find_lists_subjects_with_the_same_key(tab: ConsolePage, shop: ConsoleRig) -> None:
    shop.runtime.submit(slow.options(key="twice", delay_s=3600), 1.0)
    shop.runtime.start(order.options(key="twice"), "cup", 5)
    find(tab, "twice")
    tab.page.get_by_role("link", name="flow order twice").click()
    tab.heading("order twice")


def test_work_is_filtered_by_key_time_and_error(tab: ConsolePage, shop: ConsoleRig) -> None:
    failed = shop.runtime.submit(print_page.options(key="torn"), -55)
    wait_until(lambda: shop.runtime.why(failed)["state"] == "failed")
    tab.open("work")
    page = tab.page
    rows = page.get_by_role("table", name="Tasks and flows").get_by_role("row")
    expect(rows.filter(has_text="torn")).to_have_count(1, timeout=WAIT_MS)
    expect(rows.filter(has_text="o-1").first).to_be_visible()
    page.get_by_label("Key", exact=True).fill("torn")
    page.get_by_label("Key", exact=True).press("Tab")
    expect(rows.filter(has_text="o-1")).to_have_count(0, timeout=WAIT_MS)
    expect(rows.filter(has_text="torn")).to_have_count(1)
    # An error has no index beside a key: the key is no longer chosen.
    error = page.get_by_role("combobox", name="Error")
    expect(error.locator("option").filter(has_text="no page")).to_have_count(1, timeout=WAIT_MS)
    error.select_option(label=error.locator("option").filter(has_text="no page").inner_text())
    expect(page.get_by_label("Key", exact=True)).to_have_value("")
    expect(rows.filter(has_text="no page -55")).to_have_count(1, timeout=WAIT_MS)
    expect(rows.filter(has_text="no page -3")).to_have_count(1)
    expect(page.get_by_role("button", name="Redrive all tasks with this error")).to_be_visible()
    assert tab.accessibility() == []
    tab.open("work", filters="since=2000-01-01T00:00&until=2000-01-02T00:00")
    tab.sees("no task or flow has these properties")
    tab.open("work", filters="since=2000-01-01T00:00&kind=tasks&name=print_page")
    expect(rows.filter(has_text="torn")).to_have_count(1, timeout=WAIT_MS)


@pytest.mark.deep
def test_money_sets_a_budget_and_redrives_refused_calls(tab: ConsolePage, shop: ConsoleRig) -> None:
    queue = "shop/effects/shop.quote"
    error = "money of Customer/ada: spent 1, reserved 0, limit 2"
    [letter] = [shop.store.transact(add_dead_letter, queue, b"x", "over_budget", error)]
    tab.open("money")
    tab.act("Set a budget", {"Unit": "tokens", "Limit": "77000"})
    tab.sees("77,000")
    assert shop.store.read(budget.limit_of, "shop", "", "tokens") == 77_000
    assert "limit_budget budget/" in shop.audited()
    tab.act("Redrive refused calls")
    tab.heading("Jobs")
    tab.sees("errors.redrive")
    job = tab.page.get_by_role("article").filter(has_text="errors.redrive").first
    # The letter has no intent, so the job refuses it.
    expect(job).to_contain_text("done", timeout=WAIT_MS)
    expect(job).to_contain_text(f"effects/shop.quote/{letter}")
    shop.store.transact(budget.set_limit, "shop", "", "tokens", None)


@pytest.mark.deep
def test_queue_shows_the_limit_keys_that_tasks_wait_for(tab: ConsolePage, shop: ConsoleRig) -> None:
    limited = slow.options(queue="keyed", limit_key="acme")
    shop.store.transact(set_limits, "shop", "keyed", QueueLimits(per_key=1))
    handles = [shop.runtime.submit(limited, 600.0) for _ in range(3)]
    granted = shop.store.transact(lease, "shop", GrantRequest("w", ["keyed"], 3)).grants
    assert len(granted) == 1
    tab.open("queues")
    card = (
        tab.page.get_by_role("main")
        .locator("div.card")
        .filter(has=tab.page.get_by_role("heading", name="keyed", exact=True))
    )
    card.get_by_text("Which limit keys are full?").click()
    row = card.get_by_role("row").filter(has_text="acme")
    expect(row).to_contain_text("1 of 1", timeout=WAIT_MS)
    expect(row.get_by_role("link")).to_have_text(handles[1].id)


@pytest.mark.deep
def test_workers_show_their_version_and_tasks(tab: ConsolePage) -> None:
    tab.open("workers")
    row = tab.page.get_by_role("table", name="Workers").get_by_role("row").filter(has_text="live")
    expect(row.first).to_contain_text(__version__, timeout=WAIT_MS)


def streams_of(server: HttpServer) -> int:
    """The number of open event streams of a server."""
    streams: int = server._api._events._streams  # type: ignore[attr-defined]
    return streams


HIDE = """hidden => {
  Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_tab_that_is_hidden_for_a_minute_gives_its_connection_back(
    tab: ConsolePage, shop: ConsoleRig
) -> None:
    with shop.serve() as server:
        other = ConsolePage(tab.context.browser, server.url)  # type: ignore[arg-type]
        other.page.clock.install()
        other.open("worlds", "Customer", "ada")
        other.is_live()
        wait_until(lambda: streams_of(server) == 1)
        other.page.evaluate(HIDE, True)
        other.page.clock.fast_forward(59_000)
        assert streams_of(server) == 1
        other.page.clock.fast_forward(2_000)
        wait_until(lambda: streams_of(server) == 0)
        other.page.evaluate(HIDE, False)
        wait_until(lambda: streams_of(server) == 1)
        other.is_live()
        other.close()
