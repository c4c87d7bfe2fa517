"""Versions of an application: one that counts, and others whose replay hangs, ends its process or allocates without end.
Servers that compute states with one of them."""

from __future__ import annotations

import contextlib
import os
from typing import ClassVar

import holdfast as hf
from holdfast.ops.api.universes import UniverseChoice
from holdfast.ops.http.auth import RequestGuard, parse_address
from holdfast.ops.http.served_api import ServedApi
from holdfast.ops.http.server import HttpServer
from holdfast.ops.state_process import StateProcess
from holdfast.store.api import Store, connection_url
from tests.ops.http_rig import JsonClient

MEMORY_BYTES_MAX = 256 * 1024**2


class LitresUsed(hf.Event):
    by: int = 1
    note: str = ""


class WaterMeter(hf.World):
    total: int = 0
    note: str = ""

    replay: ClassVar[str] = "counts"

    @hf.on(LitresUsed)
    def counted(self, event: LitresUsed, cx: hf.Context) -> None:
        if self.replay == "hangs":
            while True:
                pass
        if self.replay == "exits":
            os._exit(7)
        if self.replay == "allocates":
            kept = []
            while True:
                kept.append(bytearray(16 * 1024 * 1024))
        self.total += event.by
        self.note = event.note


def _app(replay: str) -> hf.App:
    kind = type("WaterMeter", (WaterMeter,), {"__module__": __name__, "replay": replay})
    return hf.App("meters", worlds=[kind])


app = hf.App("meters", worlds=[WaterMeter])
hanging = _app("hangs")
exiting = _app("exits")
allocating = _app("allocates")


class MeterRig:
    """A store with the world WaterMeter/main at height 3, and servers over it.

    The worker has made a snapshot of its last height when it stopped. The state at height 2 needs the reducer.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._open = contextlib.ExitStack()

    def process(self, version: str, limit_s: float = 30.0, wait_s: float = 20.0) -> StateProcess:
        process = StateProcess(
            connection_url(self.store),
            f"{__name__}:{version}",
            limit_s=limit_s,
            wait_s=wait_s,
            memory_bytes_max=MEMORY_BYTES_MAX,
        )
        self._open.callback(process.close)
        return process

    def server(self, process: StateProcess | None) -> HttpServer:
        address = parse_address("127.0.0.1:0")
        apps = {} if process is None else {"meters": app}
        states = {} if process is None else {"meters": process}
        universes = UniverseChoice(self.store, apps, "meters", states=states)
        server = HttpServer(
            lambda server: ServedApi(server, self.store, universes),
            address=address,
            guard=RequestGuard(address, ""),
        )
        return self._open.enter_context(server)

    def client(self, process: StateProcess | None) -> JsonClient:
        return self._open.enter_context(JsonClient(self.server(process)))

    def close(self) -> None:
        self._open.close()
