"""The pages of one flow, task, world and stage run, and of the replay report, compared with the store."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from playwright.sync_api import Browser, Locator, expect

from holdfast import traces
from holdfast.effects import budget
from holdfast.effects.budget import MONEY, Cost
from holdfast.ledger import runs
from holdfast.ledger.run_policy import ErrorClass
from holdfast.ops import catalog_queries, verify_report
from tests.cli.stage_runs import StageRun
from tests.console.browser import WAIT_MS, ConsolePage
from tests.console.rig import (
    UNIVERSE,
    ConsoleRig,
    browser,
    clean_tab,
    server,
    shop,
    tab,
    wait_until,
)
from tests.console.shop import Customer, RateWanted, RemindMe, TopUp, app, delivery, slow, trip

__all__ = ["browser", "server", "shop", "tab"]

pytestmark = [pytest.mark.timeout(300), pytest.mark.deep]

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def row_of(tab: ConsolePage, text: str, region: str = "Steps") -> Locator:
    """A row of a time line."""
    rows = tab.page.get_by_role("region", name=region).get_by_role("listitem")
    return rows.filter(has_text=text).first


def fact(place: Locator, name: str) -> Locator:
    """The value of a labelled fact."""
    return (
        place.locator("dl div").filter(has=place.page.get_by_text(name, exact=True)).locator("dd")
    )


@pytest.fixture
def traced() -> Iterator[None]:
    token = traces.receive(traces.parse(f"00-{TRACE}-00f067aa0ba902b7-01"))
    yield
    traces.forget(token)


def test_flow_page_shows_waits_and_children_as_a_waterfall(
    tab: ConsolePage, shop: ConsoleRig
) -> None:
    flow = shop.runtime.start(trip.options(key="t-1"), "tea")
    wait_until(lambda: shop.runtime.why(flow)["state"] == "waiting")
    steps = {step.kind: step for step in flow.steps() if step.state == "open"}
    tab.open("flows", flow.id)
    tab.heading("trip t-1")
    for text in ("hf.sleep", "waits for Rating", "waits for task", "waits for flow", "shop.quote"):
        expect(row_of(tab, text)).to_be_visible(timeout=WAIT_MS)
    receive = row_of(tab, "waits for Rating")
    receive.get_by_text("hf.receive").click()
    expect(fact(receive, "Until")).to_contain_text("in 5", timeout=WAIT_MS)
    child = row_of(tab, "waits for flow")
    child.locator("summary").click()
    link = child.get_by_role("link", name=steps["flow"].child)
    expect(link).to_be_visible(timeout=WAIT_MS)
    children = tab.page.get_by_role("region", name="Child flows")
    expect(children.get_by_role("link")).to_have_text(f"order {steps['flow'].child}")
    link.click()
    tab.heading("order")
    expect(fact(tab.page.get_by_role("main"), "Parent")).to_have_text(flow.id, timeout=WAIT_MS)


def test_running_step_shows_the_worker_and_the_lease_of_the_flow(
    tab: ConsolePage, shop: ConsoleRig
) -> None:
    flow = shop.runtime.start(delivery.options(key="d-1"), 600.0)
    tab.open("flows", flow.id)
    row = row_of(tab, f"run by {shop.runtime.worker}")
    expect(row).to_be_visible(timeout=WAIT_MS)
    row.locator("summary").click()
    expect(fact(row, "Worker")).to_contain_text(shop.runtime.worker, timeout=WAIT_MS)
    expect(fact(row, "Lease ends")).to_contain_text("in ", timeout=WAIT_MS)
    expect(row.get_by_role("link")).to_have_count(1)
    flow.cancel()


@pytest.mark.usefixtures("traced")
def test_task_and_flow_link_to_their_traces(browser: Browser, shop: ConsoleRig) -> None:
    url = "https://traces.example/trace/{trace_id}?from=holdfast"
    flow = shop.runtime.start(delivery.options(key="d-2"), 600.0)
    task = shop.runtime.submit(slow, 600.0)
    with shop.serve(trace_url=url) as server, clean_tab(browser, server) as tab:
        for parts in (("flows", flow.id), ("tasks", task.id)):
            tab.open(*parts)
            link = tab.page.get_by_role("link", name="trace 4bf92f35…")
            expect(link).to_have_attribute("href", url.format(trace_id=TRACE), timeout=WAIT_MS)
    with shop.serve() as server, clean_tab(browser, server) as tab:
        tab.open("tasks", task.id)
        expect(fact(tab.page.get_by_role("main"), "Trace")).to_have_text(TRACE, timeout=WAIT_MS)
    flow.cancel()
    task.cancel()


def test_task_page_shows_its_attempt_with_worker_and_lease(
    tab: ConsolePage, shop: ConsoleRig
) -> None:
    task = shop.runtime.submit(slow, 600.0)
    wait_until(lambda: shop.runtime.why(task)["state"] == "leased")
    tab.open("tasks", task.id)
    row = row_of(tab, f"attempt 1 on {shop.runtime.worker}", "Time line")
    expect(row).to_be_visible(timeout=WAIT_MS)
    row.locator("summary").click()
    expect(fact(row, "Lease ends")).to_contain_text("in ", timeout=WAIT_MS)
    assert row.locator(".piece").count() == 3, "the wait, the attempt, and the rest of the lease"
    task.cancel()


def test_flow_page_shows_its_cost(tab: ConsolePage, shop: ConsoleRig) -> None:
    flow = shop.runtime.start(delivery.options(key="d-3"), 600.0)
    scope = f"flow/{flow.id.partition('-')[2]}"
    shop.store.transact(budget.reserve, UNIVERSE, scope, "k", [Cost(MONEY, 250_000)])
    tab.open("flows", flow.id)
    expect(fact(tab.page.get_by_role("main"), "Cost")).to_have_text(
        "0.0000 money and 0.2500 reserved", timeout=WAIT_MS
    )
    flow.cancel()


def test_world_page_shows_lease_effects_timers_and_lineage(
    tab: ConsolePage, shop: ConsoleRig
) -> None:
    world = shop.runtime.world(Customer, "elsa")
    world.ask(TopUp(3))
    for event in (RateWanted("XXX"), RemindMe()):
        world.send(event)
    world.wait_for(lambda customer: customer.rate == -1.0)
    world.fork("elsa-1", at=1)
    shop.runtime.world(Customer, "elsa-1").fork("elsa-2")
    tab.open("worlds", "Customer", "elsa")
    main = tab.page.get_by_role("main")
    record = shop.store.read(catalog_queries.resolve, "Customer/elsa", UNIVERSE)
    row = shop.store.read(catalog_queries.world, record)
    expect(fact(main, "Epoch of the lease")).to_have_text(str(row.epoch), timeout=WAIT_MS)
    expect(fact(main, "Lease of")).to_have_text(row.holder)
    effects = tab.page.get_by_role("table", name="Open effects", exact=True)
    expect(effects.get_by_role("row").filter(has_text="shop.quote")).to_contain_text("dead")
    timers = tab.page.get_by_role("table", name="Timers of this world", exact=True)
    expect(timers.get_by_role("row").filter(has_text="reminder")).to_contain_text("TopUp")
    lineage = tab.page.get_by_role("region", name="Lineage")
    expect(lineage.get_by_role("link", name="Customer/elsa-1")).to_be_visible()
    lineage.get_by_role("link", name="Customer/elsa-1").click()
    tab.heading("Customer/elsa-1")
    expect(lineage.get_by_role("link", name="Customer/elsa", exact=True)).to_be_visible()
    # Ancestor, world and fork are below each other.
    expect(lineage.locator("ul ul ul").get_by_role("link")).to_have_text(
        "Customer/elsa-2", timeout=WAIT_MS
    )


def test_form_of_an_event_has_the_fields_of_its_type(tab: ConsolePage, shop: ConsoleRig) -> None:
    world = shop.runtime.world(Customer, "fred")
    world.ask(TopUp(1))
    tab.open("worlds", "Customer", "fred")
    tab.page.get_by_role("button", name="Send event").click()
    dialog = tab.page.get_by_role("dialog", name="Send event")
    types = dialog.get_by_label("Type of the event").get_by_role("option")
    expect(types).to_have_text(["RateWanted", "Refuse", "RemindMe", "TopUp"], timeout=WAIT_MS)
    dialog.get_by_label("Type of the event").select_option("TopUp")
    expect(dialog.get_by_label("cents")).to_have_value("1")
    dialog.get_by_label("cents").fill("40")
    expect(dialog.locator("code")).to_contain_text(
        """worlds send Customer/fred TopUp '{"cents":40}'"""
    )
    dialog.get_by_label("Type of the event").select_option("Refuse")
    expect(dialog.get_by_label("cents")).to_have_count(0)
    dialog.get_by_label("reason").fill('a "quoted" word')
    dialog.get_by_role("button", name="Send event").click()
    expect(dialog).to_have_count(0, timeout=WAIT_MS)
    tab.sees('a "quoted" word', within=tab.page.get_by_role("table", name="Journal"))


@pytest.fixture
def labels(shop: ConsoleRig) -> StageRun:
    run = StageRun(shop.store, "labels", 50, {3: (ErrorClass.INPUT, "ValueError: not a document")})
    run.finish()
    return run


def measured(shop: ConsoleRig, run: StageRun, rows: int) -> None:
    progress = shop.store.read(runs.get_progress, run.run_id)
    assert progress is not None
    series = [(second * 1_000, second * rows, 1, 2, 4, second / 10) for second in range(5)]
    changed = replace(progress, series=series, latency_log2_us=[0] * 10 + [5, 7], failed_by_class=[0, 1],
                      updated_ns=shop.store.now_ns())  # fmt: skip
    shop.store.transact(runs.put_progress, run.run_id, changed)


def test_plots_of_a_run_are_drawn_from_its_series_and_follow_it(
    tab: ConsolePage, shop: ConsoleRig, labels: StageRun
) -> None:
    measured(shop, labels, 10)
    tab.open("stages", labels.run_id)
    tab.is_live()
    for name in ("Rows over time: 40 done", "Throughput", "In flight", "Cost over time: 0.4",
                 "Time of a call: 12 calls", "Failures by class"):  # fmt: skip
        expect(tab.page.get_by_role("img", name=name)).to_be_visible(timeout=WAIT_MS)
    expect(tab.page.get_by_text("5 calls took 1 ms to 2 ms")).to_have_count(1)
    svg = tab.page.locator("figure svg")
    assert svg.locator("[style]").count() == 0
    drawn = svg.first.locator("polyline").last.get_attribute("points")
    assert drawn is not None
    assert len(drawn.split()) == 5
    assert tab.accessibility() == []
    measured(shop, labels, 25)
    expect(tab.page.get_by_role("img", name="Rows over time: 100 done")).to_be_visible(
        timeout=WAIT_MS
    )


def saved_report(shop: ConsoleRig, **lists: list[dict[str, Any]]) -> None:
    document: dict[str, Any] = dict.fromkeys(
        ("worlds", "steps", "compared", "not_compared", "flows"), 7
    )
    document |= {
        "sound": not lists,
        "findings": [],
        "differences": [],
        "flow_findings": [],
        "parks": [],
    }
    build = verify_report.build_of(app)
    report = verify_report.make_report(
        document | lists, shop.store.now_ns(), UNIVERSE, "shop:app", build
    )
    shop.store.transact(verify_report.save, report)


def test_deploy_names_worlds_and_flows_that_differ_with_the_first_difference(
    tab: ConsolePage, shop: ConsoleRig
) -> None:
    tab.open("deploy")
    tab.sees("There is no report yet.")
    expect(tab.page.locator("main code")).to_have_text("holdfast verify --app MODULE:APP --save")
    flow = shop.runtime.start(delivery.options(key="d-4"), 600.0)
    world = {
        "world": "Customer/ada",
        "height": 2,
        "code": "replay_diverged",
        "text": "cents: 11, replayed 12",
    }
    parked = {"flow": flow.id, "name": "delivery", "key": "d-4", "state": "RUNNING", "steps": 1, "parks": True,
              "step": "pack", "code": "replay_diverged", "text": "asks for wrap", "removed": []}  # fmt: skip
    saved_report(shop, findings=[world], flow_findings=[parked], parks=[parked])
    tab.page.reload()
    tab.sees("This code differs from what is stored.")
    expect(fact(tab.page.get_by_role("main"), "Build")).to_have_text(verify_report.build_of(app))
    worlds = tab.page.get_by_role("table", name="Worlds that differ", exact=True).get_by_role("row")
    expect(worlds.nth(1)).to_have_text(
        re.compile("Customer/ada.*2.*replay_diverged.*cents: 11, replayed 12")
    )
    flows = tab.page.get_by_role("table", name="Flows that differ", exact=True).get_by_role("row")
    expect(flows.nth(1)).to_have_text(re.compile("delivery d-4.*running.*yes.*pack.*asks for wrap"))
    worlds.get_by_role("link").click()
    tab.heading("Customer/ada")
    expect(tab.page.get_by_label("Height as a number")).to_have_value("2", timeout=WAIT_MS)
    saved_report(shop)
    tab.open("deploy")
    tab.sees("No difference: this code replays what is stored.")
    flow.cancel()
