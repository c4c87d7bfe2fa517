"""The state of a world in a real browser: computed by code that hangs, without code, and with a value above 64 KiB."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from holdfast import store as stores
from holdfast.store.api import Store
from tests.api_server import meter_apps
from tests.api_server.meter_apps import LitresUsed, MeterRig, WaterMeter
from tests.console.browser import WAIT_MS, ConsolePage
from tests.console.rig import browser

__all__ = ["browser"]

pytestmark = pytest.mark.timeout(300)

SHOWN_BYTES = 64 * 1024
# Fewer than 65,536 characters, but more bytes. The cut divides a character. Only the whole value has the end.
NOTE = "é" * 40_000 + "THE END"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    path: Path = tmp_path_factory.mktemp("meters") / "data"
    with stores.open(path) as store:
        with meter_apps.app.open(store) as runtime:
            meter = runtime.world(WaterMeter, "main")
            for counted in (LitresUsed(5), LitresUsed(6, note=NOTE), LitresUsed(7, note="short")):
                meter.send(counted)
            meter.wait_for(lambda state: state.total == 18)
        yield store


@pytest.fixture
def rig(store: Store) -> Iterator[MeterRig]:
    rig = MeterRig(store)
    try:
        yield rig
    finally:
        rig.close()


def open_world(browser: Browser, url: str, at: int | None = None) -> ConsolePage:
    page = ConsolePage(browser, url)
    filters = "" if at is None else f"at={at}"
    return page.open("worlds", "WaterMeter", "main", universe="meters", filters=filters)


def test_value_above_64_kib_is_shown_in_part_and_downloaded_whole(
    browser: Browser, rig: MeterRig, tmp_path: Path
) -> None:
    tab = open_world(browser, rig.server(rig.process("app")).url, at=2)
    try:
        state = tab.page.get_by_role("region", name="State")
        button = state.get_by_role("button", name="Download", exact=True)
        expect(button).to_be_visible(timeout=WAIT_MS)
        shown = state.locator(".value.string").first.inner_text()
        part, mark, _ = shown.partition("…")
        assert part == '"' + "é" * (SHOWN_BYTES // 2 - 1)
        assert mark, "the text shows that it is a part"
        with tab.page.expect_download() as download:
            button.click()
        download.value.save_as(tmp_path / "value")
        assert (tmp_path / "value").read_text(encoding="utf-8") == NOTE
        with tab.page.expect_download() as download:
            state.get_by_role("button", name="Download all").click()
        assert json.loads(download.value.path().read_bytes()) == {"total": 11, "note": NOTE}
        # A short value has no download.
        tab.page.get_by_label("Height as a number").fill("3")
        tab.page.get_by_label("Height as a number").press("Tab")
        expect(state.get_by_text('"short"')).to_be_visible(timeout=WAIT_MS)
        expect(button).to_have_count(0)
        assert tab.errors + tab.violations() == []
    finally:
        tab.close()


@pytest.mark.deep
def test_state_that_hangs_is_an_error_on_the_page_and_the_page_stays_usable(
    browser: Browser, rig: MeterRig
) -> None:
    tab = open_world(browser, rig.server(rig.process("hanging", limit_s=0.5)).url, at=2)
    try:
        state = tab.page.get_by_role("region", name="State")
        expect(state.get_by_text("reducer_timeout")).to_be_visible(timeout=WAIT_MS)
        # The server answers: a height that needs no reducer, and the journal.
        tab.page.get_by_label("Height as a number").fill("0")
        tab.page.get_by_label("Height as a number").press("Tab")
        expect(state.get_by_text("total: 0")).to_be_visible(timeout=WAIT_MS)
        journal = tab.page.get_by_role("table", name="Journal")
        expect(journal.get_by_role("row")).to_have_count(4, timeout=WAIT_MS)
    finally:
        tab.close()


def test_without_code_the_page_shows_raw_values(browser: Browser, rig: MeterRig) -> None:
    tab = open_world(browser, rig.server(None).url)
    try:
        state = tab.page.get_by_role("region", name="State")
        expect(state.get_by_text("total: 18")).to_be_visible(timeout=WAIT_MS)
        tab.sees("These are the raw values of the snapshot after entry 3.", within=state)
        assert tab.errors + tab.violations() == []
        # No snapshot is at or below height 2. The journal shows the stored events.
        tab.page.get_by_label("Height as a number").fill("2")
        tab.page.get_by_label("Height as a number").press("Tab")
        expect(state.get_by_text("needs_app")).to_be_visible(timeout=WAIT_MS)
        journal = tab.page.get_by_role("table", name="Journal")
        tab.sees("LitresUsed {'by': 5, 'note': ''}", within=journal)
    finally:
        tab.close()
