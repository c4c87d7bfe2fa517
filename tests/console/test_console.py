"""The console in a real browser: every page, every action with its effect in the store, in the audit log and in a second
browser, sign-in, live updates, a lost connection, accessibility, and texts that try to be code."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import Browser, expect

from holdfast.errors import NotFound
from holdfast.ops.http.tokens import TokenSet, parse_tokens
from tests.api_server.served_rig import token_lines, token_of
from tests.console.browser import WAIT_MS, ConsolePage
from tests.console.rig import (
    ConsoleRig,
    browser,
    other,
    server,
    shop,
    tab,
    wait_until,
)
from tests.console.shop import Customer, TopUp, order, print_page, slow

__all__ = ["browser", "other", "server", "shop", "tab"]

pytestmark = pytest.mark.timeout(300)

MODULES = (
    "holdfast.ops.console.files",
    "holdfast.ops.http.console_routes",
    "holdfast.ops.http.events",
)

PAGES = {
    "now": "Now", "work": "Work", "worlds": "Worlds", "effects": "Effects", "errors": "Errors", "dead": "Dead letters", "schedules": "Schedules",
    "timers": "Timers", "queues": "Queues and limits", "money": "Money", "workers": "Workers", "stages": "Stages",
    "jobs": "Jobs", "deploy": "Deploy", "audit": "Audit",
}  # fmt: skip


# -- pages -----------------------------------------------------------------------------------------


def test_navigation_opens_every_page_without_errors_and_with_accessible_parts(
    tab: ConsolePage,
) -> None:
    tab.open("now")
    for name, title in PAGES.items():
        tab.page.get_by_role("navigation").get_by_role("link", name=title, exact=True).click()
        tab.heading(title)
        expect(tab.page.locator("[aria-busy]")).to_have_count(0, timeout=WAIT_MS)
        assert f"/{name}" in tab.page.url
        assert tab.accessibility() == [], name


def test_now_shows_readiness_in_words_and_what_ended_badly(tab: ConsolePage) -> None:
    tab.open("now")
    tab.sees("Ready: work moves.")
    bad = tab.page.get_by_role("table", name="What ended badly")
    for where in ("queue print", "flow order", "effect shop.quote"):
        expect(bad.get_by_role("row").filter(has_text=where)).to_have_count(1, timeout=WAIT_MS)


def test_pages_of_subjects_are_accessible(tab: ConsolePage, shop: ConsoleRig) -> None:
    failed = shop.runtime.flow(order, key="o-2")
    for parts, title in (
        (("tasks", shop.runtime.submit(print_page, 1).id), "print_page"),
        (("flows", failed.id), "order o-2"),
        (("worlds", "Customer", "ada"), "Customer/ada"),
        (("schedules", "nightly"), "nightly"),
        (("dead", "shop/effects/shop.quote"), "shop/effects/shop.quote"),
    ):
        tab.open(*parts)
        tab.heading(title)
        expect(tab.page.locator("[aria-busy]")).to_have_count(0, timeout=WAIT_MS)
        assert tab.accessibility() == [], parts


def test_work_is_one_list_with_filters_in_its_address(tab: ConsolePage) -> None:
    tab.open("work")
    rows = tab.page.get_by_role("table", name="Tasks and flows").get_by_role("row")
    expect(rows.filter(has_text="o-1")).to_have_count(1, timeout=WAIT_MS)
    expect(rows.filter(has_text="print_page").first).to_be_visible()
    tab.page.get_by_label("State").select_option("failed")
    tab.page.get_by_label("Kind").select_option("tasks")
    expect(rows.filter(has_text="no page -3")).to_have_count(1, timeout=WAIT_MS)
    expect(rows.filter(has_text="o-1")).to_have_count(0)
    assert "state=failed" in tab.page.url
    tab.page.reload()
    expect(rows.filter(has_text="no page -3")).to_have_count(1, timeout=WAIT_MS)


def test_flow_page_shows_steps_and_the_reason_of_its_end(
    tab: ConsolePage, shop: ConsoleRig
) -> None:
    tab.open("flows", shop.runtime.flow(order, key="o-2").id)
    for text in ("flow_failed", "reserve", "charge", "undo:release", "card of tin was declined"):
        tab.sees(text)


@pytest.mark.spec(
    "DESIGN", "15", "the console shows the state of a world after any entry of its journal"
)
def test_slider_shows_the_state_at_a_height_and_what_the_entry_changed(tab: ConsolePage) -> None:
    tab.open("worlds", "Customer", "ada")
    state = tab.page.get_by_role("region", name="State")
    expect(state.get_by_text("cents: 18")).to_be_visible(timeout=WAIT_MS)
    tab.page.get_by_label("Height as a number").fill("2")
    tab.page.get_by_label("Height as a number").press("Tab")
    expect(state.get_by_text("cents: 11")).to_be_visible(timeout=WAIT_MS)
    expect(state.get_by_text("Marked: changed by this entry.")).to_be_visible(timeout=WAIT_MS)
    # The address shows this height again.
    tab.page.reload()
    expect(state.get_by_text("cents: 11")).to_be_visible(timeout=WAIT_MS)


# -- actions: the store, the audit log, a second browser -------------------------------------------


def test_cancelled_task_ends_in_the_store_and_in_both_browsers(
    tab: ConsolePage, other: ConsolePage, shop: ConsoleRig
) -> None:
    task = shop.runtime.submit(slow, 600.0)
    for page in (tab, other):
        page.open("tasks", task.id)
        page.is_live()
    tab.act("Cancel task", {"Reason": "not needed"})
    wait_until(lambda: shop.runtime.why(task)["state"] == "dead")
    assert f"cancel_task task/{task.id}" in shop.audited()
    for page in (tab, other):
        page.sees("it is dead, reason: not needed")


def test_redriven_task_is_a_new_task_on_its_page(tab: ConsolePage, shop: ConsoleRig) -> None:
    task = shop.runtime.submit(print_page, -7)
    wait_until(lambda: shop.runtime.why(task)["state"] == "failed")
    tab.open("tasks", task.id)
    tab.act("Redrive task")
    tab.sees("Redrive of")
    assert f"redrive_task task/{task.id}" in shop.audited()


def test_event_sent_in_the_console_completes_the_flow(
    tab: ConsolePage, other: ConsolePage, shop: ConsoleRig
) -> None:
    flow = shop.runtime.start(order.options(key="console-send"), "cup", 5)
    for page in (tab, other):
        page.open("flows", flow.id)
        page.is_live()
    tab.sees("waits for an event: Rating")
    tab.act("Send event", {"Type of the event": "Rating", "stars": "4"})
    assert flow.result(timeout=60) == "cup: 4"
    for page in (tab, other):
        page.sees('"cup: 4"')


def test_wrong_event_is_refused_in_the_dialog_and_changes_nothing(
    tab: ConsolePage, shop: ConsoleRig
) -> None:
    flow = shop.runtime.start(order.options(key="console-wrong"), "cup", 5)
    tab.open("flows", flow.id)
    tab.page.get_by_role("button", name="Send event").click()
    dialog = tab.page.get_by_role("dialog")
    dialog.get_by_label("stars").fill("4.5")
    dialog.get_by_role("button", name="Send event").click()
    expect(dialog.get_by_role("alert")).to_contain_text("Rating", timeout=WAIT_MS)
    assert flow.events() == []
    # The browser reports each answer of 400 and more.
    assert [error for error in tab.errors if "422" not in error and "404" not in error] == []
    tab.errors.clear()


def test_cancel_fork_and_redrive_of_a_flow(tab: ConsolePage, shop: ConsoleRig) -> None:
    flow = shop.runtime.start(order.options(key="console-cancel"), "pot", 5)
    wait_until(lambda: shop.runtime.why(flow)["state"] == "waiting")
    tab.open("flows", flow.id)
    tab.sees("charge")
    tab.act("Fork flow", {"Key of the fork": "console-fork", "Before the step": "charge"})
    tab.heading("order console-fork")
    fork = shop.runtime.flow(order, key="console-fork")
    assert fork.steps()[0].name == "reserve"
    tab.open("flows", flow.id)
    tab.act("Cancel flow")
    wait_until(lambda: shop.runtime.why(flow)["state"] == "cancelled")
    failed = shop.runtime.flow(order, key="o-2")
    tab.open("flows", failed.id)
    tab.act("Redrive flow")
    tab.sees("Redrive of")
    audited = shop.audited()
    for action in (
        f"fork_flow flow/{flow.id}",
        f"cancel_flow flow/{flow.id}",
        f"redrive_flow flow/{failed.id}",
    ):
        assert action in audited


def test_world_is_created_used_forked_paused_pinned_and_deleted(
    tab: ConsolePage, other: ConsolePage, shop: ConsoleRig
) -> None:
    tab.open("worlds")
    tab.act("Create world", {"Type": "Customer", "Name": "berta"})
    tab.heading("Customer/berta")
    other.open("worlds", "Customer", "berta")
    other.is_live()
    tab.act("Send event", {"Type of the event": "TopUp", "cents": "12"})
    berta = shop.runtime.world(Customer, "berta")
    berta.wait_for(lambda customer: customer.cents == 12)
    other.sees("cents: 12")
    tab.act("Fork world", {"Name of the fork": "berta-2"})
    tab.heading("Customer/berta-2")
    assert shop.runtime.world(Customer, "berta-2").state().cents == 12
    tab.sees("from height 1")
    tab.open("worlds", "Customer", "berta")
    tab.act("Pause world")
    other.sees("paused")
    assert berta.record().status.value == "paused"
    tab.act("Resume world")
    other.sees("active")
    tab.act("Pin world")
    tab.act("Unpin world")
    tab.act("Delete world")
    other.sees("This world is deleted.")
    audited = shop.audited()
    for verb in (
        "pause_world",
        "resume_world",
        "pin_world",
        "unpin_world",
        "delete_world",
        "fork_world",
    ):
        assert f"{verb} world/Customer/berta" in audited
    # The deleted world has no document.
    tab.errors.clear()
    other.errors.clear()


def test_dead_effect_is_redriven_and_dead_letters_are_dropped_by_a_job(
    tab: ConsolePage, shop: ConsoleRig
) -> None:
    queue = "shop/failed-events"
    tab.open("dead")
    tab.page.get_by_role("link", name="shop/effects/shop.quote").click()
    tab.page.get_by_role("link", name="1", exact=True).click()
    tab.sees("no rate for XXX")
    tab.act("Redrive letter")
    tab.heading("shop/effects/shop.quote")
    tab.open("dead", queue)
    tab.act("Drop all", {"At most, each second": "1000"})
    tab.heading("Jobs")
    tab.sees("done")
    audited = shop.audited()
    assert any(entry.startswith("redrive_dead_letter") for entry in audited)
    assert any(entry.startswith("create_job") for entry in audited)
    tab.open("dead", queue)
    tab.sees("this queue has no dead letters")


def test_schedule_is_paused_run_backfilled_and_deleted(
    tab: ConsolePage, other: ConsolePage, shop: ConsoleRig
) -> None:
    shop.runtime.schedule("hourly", print_page, every="0 * * * *", args=(1,))
    for page in (tab, other):
        page.open("schedules", "hourly")
        page.is_live()
    tab.act("Pause schedule")
    other.sees("paused")
    tab.act("Resume schedule")
    other.sees("active")
    tab.act("Run now")
    other.sees("run_now")
    dates = {"From": "2026-01-01T00:30", "To": "2026-01-01T02:30"}
    tab.act("Backfill", {**dates, "Only show the occurrences": "yes"})
    tab.sees("The backfill would start")
    tab.act("Backfill", {**dates, "Only show the occurrences": "no"})
    tab.sees("The backfill started")
    tab.act("Delete schedule")
    tab.heading("Schedules")
    with pytest.raises(NotFound):
        shop.runtime.schedule("hourly")
    audited = shop.audited()
    for verb in ("pause", "resume", "delete", "backfill"):
        assert f"{verb}_schedule schedule/hourly" in audited
    other.errors.clear()


def redriven(shop: ConsoleRig, id: str) -> bool:
    """Whether a failed task was redriven: nothing is left to do about it."""
    return not shop.runtime.why("task", id)["blockers"]


def test_group_of_errors_is_redriven_by_a_job(tab: ConsolePage, shop: ConsoleRig) -> None:
    handles = shop.runtime.submit_many(print_page, [(-101,), (-102,)])
    for handle in handles:
        wait_until(lambda handle=handle: shop.runtime.why(handle)["state"] == "failed")  # type: ignore[misc]
    tab.open("errors", filters="kind=task")
    group = tab.page.get_by_role("table", name="Groups of errors").get_by_role("link").first
    expect(group).to_contain_text("no page")
    group.click()
    subjects = tab.page.get_by_role("table", name="Subjects with this error").get_by_role("link")
    expect(subjects.filter(has_text=handles[0].id)).to_have_count(1, timeout=WAIT_MS)
    tab.act("Redrive group")
    tab.heading("Jobs")
    tab.sees("errors.redrive")
    for handle in handles:
        wait_until(lambda handle=handle: redriven(shop, handle.id))  # type: ignore[misc]


def test_tag_filters_tasks_and_flows(tab: ConsolePage, shop: ConsoleRig) -> None:
    shop.runtime.submit(slow.options(tag="blue", key="tagged-task", delay_s=3600), 1.0)
    shop.runtime.start(order.options(tag="blue", key="tagged-flow"), "cup", 5)
    tab.open("work", filters="tag=blue")
    rows = tab.page.get_by_role("table", name="Tasks and flows").get_by_role("row")
    for key in ("tagged-task", "tagged-flow"):
        expect(rows.filter(has_text=key)).to_have_count(1, timeout=WAIT_MS)
    expect(rows.filter(has_text="o-2")).to_have_count(0)


def test_histogram_counts_the_ends_of_the_last_hour(tab: ConsolePage) -> None:
    tab.open("work")
    histogram = tab.page.get_by_role("img", name="Ended in the last hour")
    expect(histogram).to_be_visible(timeout=WAIT_MS)
    assert " 0 completed" not in str(histogram.get_attribute("aria-label"))


def test_queue_is_paused_and_resumed(
    tab: ConsolePage, other: ConsolePage, shop: ConsoleRig
) -> None:
    waiting = shop.runtime.submit(print_page.options(queue="pausing", delay_s=3600), 1)
    for page in (tab, other):
        page.open("queues")
        page.is_live()
    name = tab.page.get_by_role("heading", name="pausing", exact=True)
    card = tab.page.get_by_role("main").locator("div", has=name).last
    tab.act("Pause queue", within=card)
    assert "pause_queue queue/pausing" in shop.audited()
    other.sees("paused")
    assert any(
        one["code"] == "queue_paused" for one in shop.runtime.why("queue", "pausing")["blockers"]
    )
    card = (
        tab.page.get_by_role("main")
        .locator("div", has=tab.page.get_by_role("heading", name="pausing"))
        .last
    )
    tab.act("Resume queue", within=card)
    assert "resume_queue queue/pausing" in shop.audited()
    assert shop.runtime.why(waiting)["state"] == "delayed"


def test_limits_of_queues_and_of_load_are_set(tab: ConsolePage, shop: ConsoleRig) -> None:
    tab.open("queues")
    card = (
        tab.page.get_by_role("main")
        .locator("div", has=tab.page.get_by_role("heading", name="print", exact=True))
        .last
    )
    tab.act("Set limit", {"Concurrency": "3"}, within=card)
    wait_until(lambda: "limit_queue queue/print" in shop.audited())
    tab.act("Set load limit", {"Limit": "tasks", "Most": "100000"})
    tab.sees("100,000")
    tab.act("Set load limit", {"Limit": "tasks", "Most": "0"})
    tab.sees("no load limit is set")


def test_job_cancels_every_task_of_the_filters(tab: ConsolePage, shop: ConsoleRig) -> None:
    handles = [shop.runtime.submit(slow.options(queue="bulk", delay_s=3600), 1.0) for _ in range(5)]
    tab.open("work", filters="kind=tasks&state=delayed&queue=bulk")
    tab.act("Cancel all delayed tasks")
    tab.heading("Jobs")
    tab.sees("Processed")
    for handle in handles:
        wait_until(lambda handle=handle: shop.runtime.why(handle)["state"] == "dead")  # type: ignore[misc]


def test_worker_is_drained_and_undrained(tab: ConsolePage, shop: ConsoleRig) -> None:
    tab.open("workers")
    row = tab.page.get_by_role("row").filter(has_text="world").first
    tab.act("Drain", within=row)
    tab.sees("draining")
    tab.act("Undrain", within=row)
    expect(tab.page.get_by_role("main").get_by_text("draining")).to_have_count(0, timeout=WAIT_MS)


def test_dialog_shows_the_equal_command(tab: ConsolePage, shop: ConsoleRig) -> None:
    flow = shop.runtime.start(order.options(key="console-command"), "cup", 5)
    tab.open("flows", flow.id)
    tab.page.get_by_role("button", name="Fork flow").click()
    dialog = tab.page.get_by_role("dialog")
    dialog.get_by_label("Key of the fork").fill("a key")
    command = f"holdfast flows fork {flow.id} 'a key' --universe shop"
    expect(dialog.locator("code")).to_have_text(command, timeout=WAIT_MS)
    # A dialog of one page must not act on another one.
    tab.page.evaluate("window.location.hash = '#/shop/audit'")
    tab.heading("Audit")
    expect(dialog).to_have_count(0)


def test_fork_starts_at_the_height_of_the_slider(tab: ConsolePage) -> None:
    tab.open("worlds", "Customer", "ada", filters="at=2")
    tab.sees("cents: 11")
    tab.act("Fork world", {"Name of the fork": "ada-at-2"})
    tab.heading("Customer/ada-at-2")
    tab.sees("from height 2")
    tab.sees("cents: 11")


def test_refused_list_is_not_asked_for_again_at_once(tab: ConsolePage) -> None:
    asked: list[str] = []
    tab.page.on(
        "request", lambda request: "/v1/flows?" in request.url and asked.append(request.url)
    )
    tab.open("work", filters="kind=flows&state=ready")
    tab.heading("Work")
    tab.page.wait_for_timeout(1_500)
    assert 1 <= len(asked) <= 5
    tab.errors.clear()


def test_unknown_universe_is_named(tab: ConsolePage) -> None:
    tab.open("audit", universe="nowhere")
    tab.sees("This store has no universe nowhere.")


# -- sign-in ---------------------------------------------------------------------------------------


def test_sign_in_with_a_token_that_may_only_read(browser: Browser, shop: ConsoleRig) -> None:
    with shop.serve(token_lines(reader="read", boss="operate")) as server:
        tab = ConsolePage(browser, server.url).open("worlds", "Customer", "ada")
        token = tab.page.get_by_label("Token")
        token.fill("a-wrong-token-0123456789")
        tab.page.get_by_role("button", name="Sign in").click()
        expect(tab.page.get_by_role("alert")).to_have_text(
            "This token is not valid.", timeout=WAIT_MS
        )
        assert tab.accessibility() == []
        token.fill(token_of("reader"))
        tab.page.get_by_role("button", name="Sign in").click()
        tab.heading("Customer/ada")
        expect(tab.page.get_by_role("button", name="Pause world")).to_be_disabled()
        tab.is_live()
        stored = json.dumps(tab.context.storage_state())
        assert token_of("reader") not in stored
        assert token_of("reader") not in tab.page.url
        assert tab.page.evaluate("document.cookie") == ""
        # Only the refused sign-in was an error.
        assert all("401" in error for error in tab.errors)
        tab.page.get_by_role("button", name="Sign out").click()
        expect(tab.page.get_by_label("Token")).to_be_visible(timeout=WAIT_MS)
        tab.page.get_by_label("Token").fill(token_of("boss"))
        tab.page.get_by_role("button", name="Sign in").click()
        expect(tab.page.get_by_role("button", name="Pause world")).to_be_enabled(timeout=WAIT_MS)
        tab.act("Pause world")
        tab.act("Resume world")
        # A rotated token ends the session and its event stream, also on a page that sends no requests.
        tab.open("now")
        tab.is_live()
        server.guard._tokens = TokenSet(parse_tokens(token_lines(reader="read")))
        shop.runtime.submit(print_page, 1)
        expect(tab.page.get_by_label("Token")).to_be_visible(timeout=WAIT_MS)
        tab.close()


def test_lost_connection_is_shown_and_heals(browser: Browser, shop: ConsoleRig) -> None:
    with shop.serve() as server:
        tab = ConsolePage(browser, server.url).open("worlds", "Customer", "ada")
        tab.is_live()
        address = str(server.address)
    header = tab.page.get_by_role("banner")
    expect(header.get_by_text("live", exact=True)).to_have_count(0, timeout=WAIT_MS)
    shop.runtime.world(Customer, "ada").ask(TopUp(100))
    with shop.serve(address=address):
        tab.is_live()
        state = tab.page.get_by_role("region", name="State")
        expect(state.get_by_text("cents: 118")).to_be_visible(timeout=WAIT_MS)
        shop.runtime.world(Customer, "ada").ask(TopUp(-100))
        expect(state.get_by_text("cents: 18")).to_be_visible(timeout=WAIT_MS)
        assert tab.violations() == []
        tab.close()


# -- texts that try to be code ---------------------------------------------------------------------

CODE = (
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    "\"'><svg/onload=alert(1)>",
    "javascript:alert(1)",
    "</title><script>alert(1)</script>",
    "{{constructor.constructor('alert(1)')()}}",
)


def test_texts_of_users_stay_texts(tab: ConsolePage, shop: ConsoleRig) -> None:
    for number, text in enumerate(CODE):
        world = shop.runtime.world(Customer, text)
        world.ask(TopUp(1))
        shop.runtime.submit(print_page.options(key=f"{text}{number}", queue=text), -1)
        flow = shop.runtime.start(order.options(key=text), text, 5)
        wait_until(lambda flow=flow: shop.runtime.why(flow)["state"] == "waiting")  # type: ignore[misc]
        for parts in (("worlds", "Customer", text), ("flows", flow.id), ("work",), ("queues",)):
            tab.open(*parts)
            expect(tab.page.get_by_role("main").get_by_text(text).first).to_be_attached(
                timeout=WAIT_MS
            )
    assert tab.page.locator("main img, main script, main iframe, main svg").count() == 0


# -- long lists ------------------------------------------------------------------------------------


def test_long_list_keeps_few_rows_as_elements(tab: ConsolePage, shop: ConsoleRig) -> None:
    shop.runtime.submit_many(slow.options(queue="long", delay_s=3600), [(1.0,)] * 1_000)
    tab.open("work", filters="kind=tasks&queue=long")
    rows = tab.page.get_by_role("table", name="Tasks and flows").get_by_role("row")
    expect(rows.nth(5)).to_be_visible(timeout=WAIT_MS)
    viewport = tab.page.locator(".viewport")
    for _ in range(20):
        viewport.evaluate("element => element.scrollTo(0, element.scrollHeight)")
        tab.page.wait_for_timeout(100)
        assert rows.count() <= 200
        if tab.page.get_by_text("1,000 in all").count():
            break
    tab.sees("1,000 in all")
