"""examples/fastapi_orders over real HTTP: uvicorn on loopback, killed and started again. `hf.asgi.lifespan`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import holdfast as hf
from holdfast.errors import Invalid, StoreClosed
from tests.aio import shop
from tests.aio.faces import LONG_S
from tests.processes import ROOT, Proc

MODULES = ("holdfast.app.asgi",)

SERVER = """
import socket, sys, uvicorn
from examples.fastapi_orders.app import api
listening = socket.create_server(("127.0.0.1", 0))
print("port", listening.getsockname()[1])
uvicorn.Server(uvicorn.Config(api, log_level="warning")).run(sockets=[listening])
print("ended")
"""


@contextmanager
def served(store: Path) -> Iterator[tuple[Proc, httpx.Client]]:
    with Proc.spawn(
        [sys.executable, "-c", SERVER], ready="port", cwd=ROOT, env={"ORDERS_STORE": str(store)}
    ) as server:
        port = server.lines[0].split()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LONG_S) as client:
            yield server, client


@pytest.mark.timeout(180)
def test_orders_survive_a_kill_of_the_server(tmp_path: Path) -> None:
    order = {"id": "o-1", "item": "pen", "cents": 120}
    with served(tmp_path) as (server, client):
        posted = client.post("/orders", json=order)
        assert posted.status_code == 202
        assert client.post("/orders", json=order).json() == posted.json()
        assert client.post("/orders", json={**order, "cents": 5}).status_code == 409
        assert client.post("/orders", json={**order, "cents": 0}).status_code == 422
        assert client.get("/orders/none").status_code == 404
        server.kill()
    with served(tmp_path) as (server, client):
        answer = client.get("/orders/o-1", params={"wait_s": LONG_S}).json()
        assert answer == {"status": "done", "receipt": "charged 120 for o-1"}
        assert client.get("/sales/pen").json() == {"count": 1, "cents": 120}
        server.terminate()
        server.wait()
        assert not server.errors


def test_lifespan_opens_the_runtime_and_closes_it() -> None:
    server = SimpleNamespace(state=SimpleNamespace())

    async def go() -> hf.Runtime:
        async with hf.asgi.lifespan(shop.app, "memory:", queues=["default"])(server) as state:
            rt = hf.asgi.runtime(server)
            assert state == {"holdfast": rt}
            assert await (await rt.aio.submit(shop.add, 1)) == 2
        return rt

    rt = asyncio.run(go())
    with pytest.raises(StoreClosed):
        rt.submit(shop.add, 1)


def test_runtime_of_an_application_without_the_lifespan_is_refused() -> None:
    request: Any = SimpleNamespace(state=SimpleNamespace())
    with pytest.raises(Invalid, match="lifespan"):
        hf.asgi.runtime(request)
