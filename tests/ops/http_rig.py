"""An HTTP server over a store in memory, and clients: one that speaks JSON, one that speaks bytes."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

import pytest

from holdfast import store as stores
from holdfast.ops.http.connection import Limits
from holdfast.ops.http.guard import Guard, address_of
from holdfast.ops.http.server import HttpServer
from holdfast.ops.http.submit import Declared
from holdfast.ops.http.tasks import TaskApi
from holdfast.store.api import Store

UNIVERSE = "shop"
TIMEOUT_S = 20.0
TOKEN = "a-token-of-some-length"


class Answer(NamedTuple):
    status: int
    document: Any
    headers: Mapping[str, str]


class Client:
    """One connection that is kept alive."""

    def __init__(self, server: HttpServer, token: str = "") -> None:
        self._connection = http.client.HTTPConnection(
            server.address.host, server.address.port, timeout=TIMEOUT_S
        )
        self._token = token

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._connection.close()

    def call(
        self,
        method: str,
        path: str,
        document: Any = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> Answer:
        sent = dict(headers or {})
        if self._token:
            sent.setdefault("Authorization", f"Bearer {self._token}")
        if method == "POST":
            sent.setdefault("Content-Type", "application/json")
            body = json.dumps(document).encode() if body is None else body
        self._connection.request(method, path, body, sent)
        answer = self._connection.getresponse()
        data = answer.read()
        lower = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, json.loads(data) if data else None, lower)

    def get(self, path: str, **options: Any) -> Answer:
        return self.call("GET", path, **options)

    def post(self, path: str, document: Any = None, **options: Any) -> Answer:
        return self.call("POST", path, {} if document is None else document, **options)

    # -- what tests say most ----------------------------------------------------------------------

    def submit(self, name: str = "add", *args: Any, **options: Any) -> str:
        answer = self.post("/v1/tasks", {"name": name, "args": args, "options": options})
        assert answer.status == 201, answer.document
        return str(answer.document["id"])

    def lease(self, worker: str = "w", **asked: Any) -> list[dict[str, Any]]:
        answer = self.post("/v1/tasks/lease", {"worker": worker, **asked})
        assert answer.status == 200, answer.document
        found: list[dict[str, Any]] = answer.document["tasks"]
        return found

    def complete(self, lease: str, result: Any = None) -> str:
        answer = self.post("/v1/tasks/complete", {"worker": "w", "lease": lease, "result": result})
        assert answer.status == 200, answer.document
        return str(answer.document["answer"])

    def fail(self, lease: str, **said: Any) -> str:
        answer = self.post("/v1/tasks/fail", {"worker": "w", "lease": lease, **said})
        assert answer.status == 200, answer.document
        return str(answer.document["answer"])

    def task(self, id: str) -> dict[str, Any]:
        answer = self.get(f"/v1/tasks/{id}")
        assert answer.status == 200, answer.document
        found: dict[str, Any] = answer.document
        return found


class Raw:
    """Bytes there, bytes back."""

    def __init__(self, server: HttpServer, receives: int = 0) -> None:
        """`receives`: how many bytes lie here unread before the other side cannot send any more."""
        self.socket = socket.socket()
        self.socket.settimeout(TIMEOUT_S)
        if receives:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        self.socket.connect((server.address.host, server.address.port))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def until_closed(self) -> bytes:
        """All that comes, until the other side hangs up."""
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while data := self.socket.recv(65536):
                found += data
        return found

    def answer(self) -> tuple[int, bytes]:
        """One answer: its status, its body."""
        found = b""
        while b"\r\n\r\n" not in found:
            data = self.socket.recv(1)
            assert data, f"hung up after {found!r}"
            found += data
        head = found.decode()
        length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
        body = b""
        while len(body) < length:
            data = self.socket.recv(length - len(body))
            assert data, f"hung up after {body!r}"
            body += data
        return int(head.split(" ")[1]), body


def code(body: bytes) -> str:
    """Of a problem."""
    return str(json.loads(body)["code"])


def request(path: str, document: Any, *headers: str) -> bytes:
    body = json.dumps(document).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
        "\r\n",
    ]
    return "\r\n".join(lines).encode() + body


class Rig:
    """Servers over one store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._open = contextlib.ExitStack()

    def serve(
        self,
        token: str = "",
        *,
        declared: Mapping[str, Declared] | None = None,
        limits: Limits | None = None,
    ) -> HttpServer:
        address = address_of("127.0.0.1:0")
        server = HttpServer(
            lambda server: TaskApi(server, self.store, UNIVERSE, declared or {}),
            address=address,
            guard=Guard(address, token),
            limits=limits,
        )
        return self._open.enter_context(server)

    def client(self, server: HttpServer, token: str = "") -> Client:
        return self._open.enter_context(Client(server, token))

    def raw(self, server: HttpServer, receives: int = 0) -> Raw:
        return self._open.enter_context(Raw(server, receives))

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    with stores.open("memory:") as store:
        made = Rig(store)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def server(rig: Rig) -> HttpServer:
    return rig.serve()


@pytest.fixture
def client(rig: Rig, server: HttpServer) -> Client:
    return rig.client(server)
