"""HTTP servers over a store in memory, a JSON client and a raw connection."""

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
from holdfast.ops.api.universes import UniverseChoice
from holdfast.ops.http.auth import RequestGuard, parse_address
from holdfast.ops.http.limits import ConnectionLimits
from holdfast.ops.http.served_api import ServedApi
from holdfast.ops.http.server import HttpServer
from holdfast.ops.http.task_batch import DeclaredTask
from holdfast.store.api import Store

UNIVERSE = "shop"
TIMEOUT_S = 20.0
TOKEN = "a-token-of-some-length"


class JsonResponse(NamedTuple):
    status: int
    document: Any
    headers: Mapping[str, str]


class JsonClient:
    """A JSON client with one keep-alive connection."""

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
    ) -> JsonResponse:
        sent_headers = dict(headers or {})
        if self._token:
            sent_headers.setdefault("Authorization", f"Bearer {self._token}")
        if method == "POST":
            sent_headers.setdefault("Content-Type", "application/json")
            body = json.dumps(document).encode() if body is None else body
        self._connection.request(method, path, body, sent_headers)
        response = self._connection.getresponse()
        data = response.read()
        lower = {name.lower(): value for name, value in response.getheaders()}
        is_json = "json" in lower.get("content-type", "json")
        text = data.decode() if not is_json else json.loads(data) if data else None
        return JsonResponse(response.status, text, lower)

    def get(self, path: str, **options: Any) -> JsonResponse:
        return self.call("GET", path, **options)

    def post(self, path: str, document: Any = None, **options: Any) -> JsonResponse:
        return self.call("POST", path, {} if document is None else document, **options)

    # -- shortcuts --------------------------------------------------------------------------------

    def submit(self, name: str = "add", *args: Any, **options: Any) -> str:
        response = self.post("/v1/tasks", {"name": name, "args": args, "options": options})
        assert response.status == 201, response.document
        return str(response.document["id"])

    def lease(self, worker: str = "w", **fields: Any) -> list[dict[str, Any]]:
        response = self.post("/v1/tasks/lease", {"worker": worker, **fields})
        assert response.status == 200, response.document
        tasks: list[dict[str, Any]] = response.document["tasks"]
        return tasks

    def complete(self, lease: str, result: Any = None) -> str:
        response = self.post(
            "/v1/tasks/complete", {"worker": "w", "lease": lease, "result": result}
        )
        assert response.status == 200, response.document
        return str(response.document["answer"])

    def fail(self, lease: str, **fields: Any) -> str:
        response = self.post("/v1/tasks/fail", {"worker": "w", "lease": lease, **fields})
        assert response.status == 200, response.document
        return str(response.document["answer"])

    def task(self, id: str) -> dict[str, Any]:
        response = self.get(f"/v1/tasks/{id}")
        assert response.status == 200, response.document
        document: dict[str, Any] = response.document
        return document


class RawHttpConnection:
    """A TCP connection that sends and receives raw bytes."""

    def __init__(self, server: HttpServer, receive_buffer_bytes: int = 0) -> None:
        """Connect. A small receive buffer limits how far the server can send ahead of the reader."""
        self.socket = socket.socket()
        self.socket.settimeout(TIMEOUT_S)
        if receive_buffer_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
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

    def read_until_closed(self) -> bytes:
        """Read until the server closes the connection."""
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while data := self.socket.recv(65536):
                received += data
        return received

    def read_response(self) -> tuple[int, bytes]:
        """Read one response. Return its status and body."""
        received = b""
        while b"\r\n\r\n" not in received:
            data = self.socket.recv(1)
            assert data, f"hung up after {received!r}"
            received += data
        head = received.decode()
        length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
        body = b""
        while len(body) < length:
            data = self.socket.recv(length - len(body))
            assert data, f"hung up after {body!r}"
            body += data
        return int(head.split(" ")[1]), body


def problem_code(body: bytes) -> str:
    """The error code of a problem body."""
    return str(json.loads(body)["code"])


def post_request(path: str, document: Any, *headers: str) -> bytes:
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


class HttpRig:
    """HTTP servers and clients over one store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._open = contextlib.ExitStack()

    def serve(
        self,
        token: str = "",
        *,
        declared: Mapping[str, DeclaredTask] | None = None,
        limits: ConnectionLimits | None = None,
    ) -> HttpServer:
        address = parse_address("127.0.0.1:0")
        universes = UniverseChoice(self.store, {}, default=UNIVERSE)
        server = HttpServer(
            lambda server: ServedApi(server, self.store, universes, declared=declared or {}),
            address=address,
            guard=RequestGuard(address, token),
            limits=limits,
        )
        return self._open.enter_context(server)

    def client(self, server: HttpServer, token: str = "") -> JsonClient:
        return self._open.enter_context(JsonClient(server, token))

    def raw(self, server: HttpServer, receive_buffer_bytes: int = 0) -> RawHttpConnection:
        return self._open.enter_context(RawHttpConnection(server, receive_buffer_bytes))

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def rig() -> Iterator[HttpRig]:
    with stores.open("memory:") as store:
        http_rig = HttpRig(store)
        try:
            yield http_rig
        finally:
            http_rig.close()


@pytest.fixture
def server(rig: HttpRig) -> HttpServer:
    return rig.serve()


@pytest.fixture
def client(rig: HttpRig, server: HttpServer) -> JsonClient:
    return rig.client(server)
