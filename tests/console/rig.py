"""A store with work that waits, runs and has ended badly, its workers, and a server with the console."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser

import holdfast as hf
from holdfast import store as stores
from holdfast.durable import queue as durable_queue
from holdfast.ops import audit
from holdfast.ops.api.universes import UniverseChoice
from holdfast.ops.http.auth import RequestGuard, parse_address
from holdfast.ops.http.served_api import ServedApi
from holdfast.ops.http.server import HttpServer
from tests.console.browser import ConsolePage, open_browser
from tests.console.shop import (
    Customer,
    RateWanted,
    Refuse,
    RemindMe,
    TopUp,
    app,
    order,
    print_page,
    slow,
)

UNIVERSE = "shop"
WAIT_S = 60.0


def wait_until(condition: Callable[[], Any]) -> Any:
    """Return the first true value of a condition."""
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.02)
    return value


class ConsoleRig:
    """The store, a runtime with every role, and servers."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self.store = self._open.enter_context(stores.open("memory:"))
        self.runtime = self._open.enter_context(app.open(self.store, stop_grace_s=0.0))

    def serve(
        self, tokens: str = "", address: str = "127.0.0.1:0", trace_url: str = ""
    ) -> HttpServer:
        listen = parse_address(address)
        universes = UniverseChoice(self.store, {UNIVERSE: app}, UNIVERSE)
        return HttpServer(
            lambda server: ServedApi(server, self.store, universes, trace_url=trace_url),
            address=listen,
            guard=RequestGuard(listen, tokens),
        )

    def fill(self) -> None:
        """Make one subject of each kind."""
        ada = self.runtime.world(Customer, "ada")
        for cents in (5, 6, 7):
            ada.ask(TopUp(cents))
        ada.send(Refuse("no more"))
        ada.send(RateWanted("XXX"))
        ada.send(RemindMe())
        ada.wait_for(lambda customer: customer.rate == -1.0)
        self.runtime.start(order.options(key="o-1"), "tea", 500)
        with contextlib.suppress(hf.FlowFailed):
            self.runtime.start(order.options(key="o-2"), "tin", -1).result(timeout=WAIT_S)
        self.runtime.submit(print_page, 1).result(timeout=WAIT_S)
        self.runtime.submit(print_page, -3)
        self.runtime.submit(slow, 600.0)

    def audited(self) -> list[str]:
        """The actions of operators, newest first."""
        entries = self.store.read(audit.list_entries, UNIVERSE, None, 100)
        return [f"{entry.action} {entry.subject}" for _, entry in entries]

    def letters(self, queue: str) -> set[int]:
        """The numbers of the dead letters of a queue."""
        found = self.store.read(durable_queue.list_dead, queue, 0, 1_000)
        return {letter.seq for letter in found}

    def close(self) -> None:
        self._open.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def shop() -> Iterator[ConsoleRig]:
    rig = ConsoleRig()
    try:
        rig.fill()
        yield rig
    finally:
        rig.close()


@pytest.fixture(scope="module")
def server(shop: ConsoleRig) -> Iterator[HttpServer]:
    with shop.serve() as running:
        yield running


@contextlib.contextmanager
def clean_tab(browser: Browser, server: HttpServer) -> Iterator[ConsolePage]:
    """A tab that may end with neither errors nor violations of the policy."""
    opened = ConsolePage(browser, server.url)
    try:
        yield opened
        found = opened.errors + opened.violations()
        assert not found, found
    finally:
        opened.close()


@pytest.fixture
def tab(browser: Browser, server: HttpServer) -> Iterator[ConsolePage]:
    with clean_tab(browser, server) as opened:
        yield opened


@pytest.fixture
def other(browser: Browser, server: HttpServer) -> Iterator[ConsolePage]:
    """A second browser."""
    with clean_tab(browser, server) as opened:
        yield opened
