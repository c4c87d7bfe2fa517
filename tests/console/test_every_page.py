"""Every page of the console in each theme and width."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, expect

from holdfast.ops.http.server import HttpServer
from tests.console.browser import WAIT_MS, ConsolePage
from tests.console.rig import ConsoleRig, browser, server, shop
from tests.console.subjects import open_subjects

__all__ = ["browser", "server", "shop"]

pytestmark = [pytest.mark.timeout(600), pytest.mark.deep]

MODULES = ("holdfast.ops.console.files", "holdfast.ops.http.console_routes")

WIDTHS = (360, 2_560)
UNFOLD = "document.querySelectorAll('main details').forEach((one) => { one.open = true; })"


@pytest.mark.spec(
    "DESIGN", "15", "each page of the console fits narrow and wide windows in both themes"
)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_and_is_accessible(
    browser: Browser, server: HttpServer, shop: ConsoleRig, scheme: str, width: int
) -> None:
    pages = open_subjects(shop)
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
