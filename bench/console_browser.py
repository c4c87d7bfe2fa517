"""The console in Chromium on a large store: first data of pages, a long scroll, and a search, with Chromium's trace."""

from __future__ import annotations

import json
import time
from typing import Any

from playwright.sync_api import Browser, Locator, expect

from bench.console_store import UNIVERSE
from bench.record import Record, Sample, Target, gather
from tests.console.browser import WAIT_MS, ConsolePage, open_browser

REPEATS = 3
SCROLLED_ROWS = 100_000
SCROLL_S = 300.0
FIND = "order-90000"
# A row of each page that shows data of the store.
FIRST_DATA = {
    "now": ".bar",
    "work": "[data-row]",
    "worlds": "[data-row]",
    "errors": "[data-row]",
    "dead": "tbody tr",
    "queues": ".card",
    "money": "tbody tr",
    "audit": "[data-row]",
}
TRACED = ["devtools.timeline", "toplevel", "disabled-by-default-devtools.timeline"]


def measure(port: int) -> Record:
    """Measure the console of a server on loopback."""
    url = f"http://127.0.0.1:{port}"
    samples: list[Sample] = []
    notes: dict[str, Any] = {}
    with open_browser() as browser:
        for _ in range(REPEATS):
            first = {name: _first_data_s(browser, url, name) for name in FIRST_DATA}
            notes["first_data_s"] = {name: round(one, 2) for name, one in first.items()}
            samples.append({"first_data_s": max(first.values()), **_scroll(browser, url, notes)})
    units = {"first_data_s": "s", "row_elements": "rows", "longest_task_ms": "ms", "find_s": "s"}
    return Record(
        "console_browser",
        f"the slowest first data of {len(FIRST_DATA)} pages, and a scroll through {SCROLLED_ROWS:,} rows",
        gather(samples, units),
        (
            Target("first_data_s", below=1.0),
            Target("row_elements", below=201.0),
            Target("longest_task_ms", below=50.0),
        ),
        notes,
    )


def _first_data_s(browser: Browser, url: str, name: str) -> float:
    """Return the time from the navigation to the first element with data."""
    tab = ConsolePage(browser, url)
    try:
        began = time.monotonic()
        tab.open(name, universe=UNIVERSE)
        tab.page.locator("main").locator(FIRST_DATA[name]).first.wait_for(state="attached")
        return time.monotonic() - began
    finally:
        tab.close()


def _scroll(browser: Browser, url: str, notes: dict[str, Any]) -> Sample:
    tab = ConsolePage(browser, url)
    page = tab.page
    try:
        tab.open("work", universe=UNIVERSE, filters="kind=tasks")
        table = page.get_by_role("table", name="Tasks and flows")
        expect(table.get_by_role("row").nth(5)).to_be_visible(timeout=WAIT_MS)
        browser.start_tracing(page=page, categories=TRACED)
        began = time.monotonic()
        most = _scroll_to(page.locator(".viewport"), SCROLLED_ROWS)
        took = time.monotonic() - began
        trace = json.loads(browser.stop_tracing())
        notes["rows_per_s"] = round(SCROLLED_ROWS / took)
        began = time.monotonic()
        page.get_by_placeholder("id or key").fill(FIND)
        page.get_by_role("button", name="Open", exact=True).click()
        tab.heading("ship")
        found_s = time.monotonic() - began
        return {
            "row_elements": most,
            "longest_task_ms": _longest_task_ms(trace["traceEvents"]),
            "find_s": found_s,
        }
    finally:
        tab.close()


# Scroll to the last row in each frame, until this number of rows is read. Return the largest number of row elements.
_SCROLL = """
(element, [rows, seconds]) => new Promise((resolve, reject) => {
  let most = 0;
  const until = performance.now() + seconds * 1000;
  const step = () => {
    most = Math.max(most, element.querySelectorAll("[data-row]").length);
    if (element.scrollHeight >= rows * 36) resolve(most);
    else if (performance.now() > until) reject(new Error(`only ${element.scrollHeight / 36} rows in time`));
    else {
      element.scrollTo(0, element.scrollHeight);
      requestAnimationFrame(step);
    }
  };
  step();
})
"""


def _scroll_to(viewport: Locator, rows: int) -> int:
    most: int = viewport.evaluate(_SCROLL, [rows, SCROLL_S])
    return most


def _longest_task_ms(events: list[dict[str, Any]]) -> float:
    """Return the longest task of the main thread of the page, by Chromium's trace."""
    mains = {
        (one["pid"], one["tid"])
        for one in events
        if one.get("name") == "thread_name" and one["args"]["name"] == "CrRendererMain"
    }
    tasks = [
        one.get("dur", 0)
        for one in events
        if one.get("name", "").endswith("RunTask") and (one["pid"], one["tid"]) in mains
    ]
    assert tasks, "the trace has no task of a page"
    return float(max(tasks)) / 1e3
