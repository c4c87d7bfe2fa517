"""Write a picture of every page of the console, light and dark: `python -m tests.console.screenshots [DIRECTORY]`."""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import expect

from tests.console.browser import WAIT_MS, ConsolePage, open_browser
from tests.console.rig import ConsoleRig, wait_until
from tests.console.shop import Customer, TopUp, order, print_page, slow, trip
from tests.console.subjects import measured_run, save_report

SIZE = {"width": 1100, "height": 720}


def fill_more(rig: ConsoleRig) -> None:
    """Add work, so that lists and bars have some length."""
    runtime = rig.runtime
    for number in range(60):
        runtime.submit(
            print_page.options(key=f"page-{number}"), number if number % 9 else -number - 1
        )
    runtime.submit_many(slow.options(delay_s=7_200), [(1.0,)] * 25)
    for name in ("berta", "carl", "dora"):
        runtime.world(Customer, name).ask(TopUp(len(name) * 100))
    runtime.world(Customer, "ada").fork("ada-what-if", at=2)
    for number in range(3, 9):
        runtime.start(order.options(key=f"o-{number}"), "tea", number * 100)
    last = runtime.flow(order, key="o-8")
    wait_until(lambda: runtime.why(last)["state"] == "waiting")


def write_pictures(directory: Path) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    rig = ConsoleRig()
    written = []
    try:
        rig.fill()
        fill_more(rig)
        journey = rig.runtime.start(trip.options(key="t-1"), "tea")
        wait_until(lambda: rig.runtime.why(journey)["state"] == "waiting")
        run = measured_run(rig)
        save_report(rig)
        [page, *_] = rig.runtime.submit_many(print_page, [(-4,)])
        wait_until(lambda: rig.runtime.why(page)["state"] == "failed")
        pages = {
            "now": ("now",),
            "work": ("work",),
            "task": ("tasks", page.id),
            "flow": ("flows", journey.id),
            "worlds": ("worlds",),
            "world": ("worlds", "Customer", "ada"),
            "effects": ("effects",),
            "errors": ("errors",),
            "dead": ("dead", "shop/effects/shop.quote"),
            "schedules": ("schedules", "nightly"),
            "timers": ("timers",),
            "queues": ("queues",),
            "money": ("money",),
            "workers": ("workers",),
            "stages": ("stages",),
            "stage": ("stages", run.run_id),
            "jobs": ("jobs",),
            "deploy": ("deploy",),
            "audit": ("audit",),
        }
        with rig.serve() as server, open_browser() as browser:
            for scheme in ("light", "dark"):
                tab = ConsolePage(browser, server.url, viewport=SIZE, color_scheme=scheme)
                for name, parts in pages.items():
                    tab.open(*parts)
                    tab.is_live()
                    expect(tab.page.locator("[aria-busy]")).to_have_count(0, timeout=WAIT_MS)
                    tab.page.wait_for_timeout(500)
                    path = directory / f"console-{name}-{scheme}.png"
                    tab.page.screenshot(path=path)
                    written.append(path)
                tab.close()
    finally:
        rig.close()
    return written


if __name__ == "__main__":
    for path in write_pictures(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")):
        print(path)
