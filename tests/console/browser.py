"""Debian's Chromium, driven by Playwright through roles and labels."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Waits end as soon as the condition holds. A slow machine needs more than the default of 5 s.
WAIT_MS = 30_000
# A page records the violations of its policy, before its scripts run.
RECORD_VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
"""


@contextmanager
def open_browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    assert program, "chromium is missing: apt-get install -y chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


class ConsolePage:
    """A tab with the console. Collects errors of scripts, error messages and violations of the policy."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.context.add_init_script(RECORD_VIOLATIONS)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.url = url
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "console",
            lambda message: message.type == "error" and self.errors.append(message.text),
        )
        self.page.on(
            "response",
            lambda answer: (
                answer.status >= 400 and self.errors.append(f"{answer.status} {answer.url}")
            ),
        )
        self.page.on("dialog", lambda dialog: self.errors.append(f"dialog {dialog.message}"))

    def open(self, *parts: str, universe: str = "shop", filters: str = "") -> ConsolePage:
        address = "/".join(quote(part, safe="") for part in (universe, *parts))
        self.page.goto(f"{self.url}/#/{address}{'?' + filters if filters else ''}")
        return self

    def act(
        self, label: str, values: dict[str, str] | None = None, *, within: Locator | None = None
    ) -> None:
        """Press the button of an action, fill the fields of its dialog, and confirm."""
        (within or self.page).get_by_role("button", name=label, exact=True).first.click()
        dialog = self.page.get_by_role("dialog", name=label)
        self.fill(dialog, values or {})
        dialog.get_by_role("button", name=label, exact=True).click()
        expect(dialog).to_have_count(0, timeout=WAIT_MS)

    def fill(self, dialog: Locator, values: Mapping[str, str]) -> None:
        """Fill the fields of a dialog."""
        for field, value in values.items():
            control = dialog.get_by_label(field, exact=False)
            if control.evaluate("element => element.tagName") == "SELECT":
                control.select_option(value)
            elif value in ("yes", "no") and control.get_attribute("type") == "checkbox":
                control.set_checked(value == "yes")
            else:
                control.fill(value)

    def sees(self, text: str, *, within: Locator | None = None) -> None:
        expect((within or self.page.get_by_role("main")).get_by_text(text).first).to_be_visible(
            timeout=WAIT_MS
        )

    def heading(self, text: str) -> None:
        expect(self.page.get_by_role("heading", level=1)).to_contain_text(text, timeout=WAIT_MS)

    def is_live(self) -> None:
        expect(self.page.get_by_role("banner").get_by_text("live", exact=True)).to_be_visible(
            timeout=WAIT_MS
        )

    def violations(self) -> list[str]:
        found: list[str] = self.page.evaluate("window.violations")
        return found

    def accessibility(self) -> list[str]:
        response = Axe().run(self.page).response
        return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in response["violations"]]

    def close(self) -> None:
        self.context.close()
