"""Every page of the console in each theme and width, and with hostile texts in every field that a user controls."""

from __future__ import annotations

import msgspec
import pytest
from playwright.sync_api import Browser, expect

import holdfast as hf
from holdfast.effects import budget
from holdfast.effects.budget import MONEY, Cost
from holdfast.leadership import worker_registry
from holdfast.ops import audit
from holdfast.ops.api.universes import UniverseChoice
from holdfast.ops.http.auth import RequestGuard, parse_address
from holdfast.ops.http.served_api import ServedApi
from holdfast.ops.http.server import HttpServer
from tests.api.rig import ApiRig
from tests.console.browser import WAIT_MS, ConsolePage
from tests.console.rig import UNIVERSE, ConsoleRig, browser, server, shop, wait_until
from tests.console.shop import Customer, Refuse, RemindMe, TopUp, order, print_page, slow
from tests.console.subjects import LISTS, measured_run, open_subjects, save_report

__all__ = ["browser", "server", "shop"]

pytestmark = [pytest.mark.timeout(600), pytest.mark.deep]

MODULES = ("holdfast.ops.console.files", "holdfast.ops.http.console_routes")

WIDTHS = (360, 2_560)
UNFOLD = "document.querySelectorAll('main details').forEach((one) => { one.open = true; })"


@pytest.fixture(scope="module")
def pages(shop: ConsoleRig) -> dict[str, tuple[str, ...]]:
    return open_subjects(shop)


@pytest.mark.spec(
    "DESIGN", "15", "each page of the console fits narrow and wide windows in both themes"
)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_and_is_accessible(
    browser: Browser, server: HttpServer, pages: dict[str, tuple[str, ...]], scheme: str, width: int
) -> None:
    tab = ConsolePage(
        browser, server.url, viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    found: list[str] = []
    for name, parts in pages.items():
        tab.open(*parts)
        tab.is_live()
        expect(tab.page.locator("main h1")).to_have_count(1, timeout=WAIT_MS)
        expect(tab.page.locator("[aria-busy]")).to_have_count(0, timeout=WAIT_MS)
        tab.page.evaluate(UNFOLD)
        wide = tab.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        found += [f"{name}: {wide} px wider than the window"] if wide > 0 else []
        found += [f"{name}: {one}" for one in tab.accessibility()]
        found += [f"{name}: {one}" for one in tab.errors + tab.violations()]
        tab.errors.clear()
    tab.close()
    assert not found, "\n".join(found)


# -- hostile texts ---------------------------------------------------------------------------------

CODE = (
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    "\"'><svg/onload=alert(1)>",
    "javascript:alert(1)",
    "</title></textarea></style><script>alert(1)</script>",
    "<iframe srcdoc='<script>parent.alert(1)</script>'></iframe>",
    "{{constructor.constructor('alert(1)')()}}",
    "${alert(1)}`+alert(1)+`",
    "%3Cimg%20src=x%20onerror=alert(1)%3E",
    "\u202e<a href=javascript:alert(1)>x</a>",
)
# The pages that show a text of `fill_with`.
SHOWN = frozenset((
    "work", "worlds", "schedules", "queues", "money", "stages", "deploy", "audit", "world", "task", "cancelled",
    "flow", "failed", "schedule", "stage",
))  # fmt: skip


def hostile_app(text: str) -> hf.App:
    """An application whose types have a hostile text as their names."""
    event = type(text, (hf.Event,), {"__annotations__": {"note": str}, "note": text})

    class Base(hf.World):
        note: str = ""
        notes: dict[str, str] = msgspec.field(default_factory=dict)

        @hf.on(event)
        def noted(self, message: object, cx: hf.Context) -> None:
            self.note = text
            self.notes = {text: text}
            cx.after(3_600.0, event(text), key=text)

    world = type(text, (Base,), {})
    return hf.App("hostile", worlds=[world], events=[event])


def fill_with(shop: ConsoleRig, text: str) -> dict[str, tuple[str, ...]]:
    """Put a text into every field that a user controls. Returns the pages that show it."""
    runtime, store, api = shop.runtime, shop.store, ApiRig(shop.store, UNIVERSE)
    ada = runtime.world(Customer, text)
    ada.ask(TopUp(1))
    ada.send(Refuse(text))
    ada.send(RemindMe())
    task = runtime.submit(
        slow.options(key=text, queue=text, tag=text, limit_key=text, delay_s=3600), 1.0
    )
    api.post(
        "/v1/tasks",
        {"name": text, "args": [text], "kwargs": {text: text}, "options": {"queue": text}},
    )
    cancelled = runtime.submit(slow.options(delay_s=3600), 1.0)
    api.post(f"/v1/tasks/{cancelled.id}/cancel", {"reason": text})
    flow = runtime.start(order.options(key=text, tag=text), text, 5)
    failed = runtime.start(order.options(key=f"{text} failed"), text, -1)
    wait_until(lambda: runtime.why(flow)["state"] == "waiting")
    wait_until(lambda: runtime.why(failed)["state"] == "failed")
    runtime.schedule(text, print_page, every="0 0 1 1 *", args=(1,))
    store.transact(budget.reserve, UNIVERSE, text, text, [Cost(MONEY, 5, text)])
    store.transact(audit.record, UNIVERSE, text, text, text, text)
    store.transact(worker_registry.heartbeat, UNIVERSE, text, "first", ("world",))
    run = measured_run(shop, text)
    save_report(shop, world=text, text=text)
    return {name: (name,) for name in LISTS} | {
        "world": ("worlds", "Customer", text),
        "task": ("tasks", task.id),
        "cancelled": ("tasks", cancelled.id),
        "flow": ("flows", flow.id),
        "failed": ("flows", failed.id),
        "schedule": ("schedules", text),
        "stage": ("stages", run.run_id),
        "letters": ("dead", f"{UNIVERSE}/failed-events"),
        "by tag": ("work",),
    }


@pytest.mark.parametrize("text", CODE)
def test_hostile_text_in_every_field_runs_nothing(
    browser: Browser, server: HttpServer, shop: ConsoleRig, text: str
) -> None:
    pages = fill_with(shop, text)
    tab = ConsolePage(browser, server.url)
    tab.context.add_init_script("window.alert = () => { window.ran = true; };")
    found = []
    for name, parts in pages.items():
        tab.open(*parts)
        tab.is_live()
        expect(tab.page.locator("main h1")).to_have_count(1, timeout=WAIT_MS)
        expect(tab.page.locator("[aria-busy]")).to_have_count(0, timeout=WAIT_MS)
        tab.page.evaluate(UNFOLD)
        if name in SHOWN:
            # The text is on the page, as text.
            expect(tab.page.get_by_role("main")).to_contain_text(text, timeout=WAIT_MS)
        made = "main img, main script, main iframe, main a[href^='javascript' i], main [onerror]"
        found += [f"{name}: it became an element"] if tab.page.locator(made).count() else []
        found += [f"{name}: it ran"] if tab.page.evaluate("Boolean(window.ran)") else []
        found += [f"{name}: {one}" for one in tab.errors + tab.violations()]
        tab.errors.clear()
    tab.close()
    assert not found, "\n".join(found)


# A slash separates the type and the name of a world.
@pytest.mark.parametrize("text", [text.replace("/", "") for text in CODE])
def test_hostile_names_of_types_run_nothing(browser: Browser, text: str) -> None:
    app = hostile_app(text)
    with hf.store.open("memory:") as store, app.open(store, stop_grace_s=0.0) as runtime:
        kind = app.world_class(text)
        event = app.events[text].kind
        world = runtime.world(kind, "w")
        world.send(event(text))
        world.wait_for(lambda state: state.note == text)
        address = parse_address("127.0.0.1:0")
        universes = UniverseChoice(store, {"hostile": app}, "hostile")
        guard = RequestGuard(address, "")
        with HttpServer(
            lambda server: ServedApi(server, store, universes), address=address, guard=guard
        ) as running:
            tab = ConsolePage(browser, running.url)
            tab.context.add_init_script("window.alert = () => { window.ran = true; };")
            for parts in (("worlds",), ("worlds", text, "w"), ("timers",)):
                tab.open(*parts, universe="hostile")
                tab.sees(text)
            tab.open("worlds", text, "w", universe="hostile")
            tab.page.get_by_role("button", name="Send event").click()
            dialog = tab.page.get_by_role("dialog")
            expect(dialog.get_by_label("Type of the event")).to_have_value(text, timeout=WAIT_MS)
            assert not tab.page.evaluate("Boolean(window.ran)")
            assert tab.errors + tab.violations() == []
            tab.close()
