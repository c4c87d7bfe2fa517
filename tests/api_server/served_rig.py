"""Servers of the whole API over one store, with clients that send JSON."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import holdfast as hf
from holdfast import store as stores
from holdfast.ops.api.endpoint import Scope
from holdfast.ops.api.universes import UniverseChoice
from holdfast.ops.http.auth import RequestGuard, parse_address
from holdfast.ops.http.limits import ConnectionLimits
from holdfast.ops.http.request_rate import RequestRate
from holdfast.ops.http.served_api import ServedApi
from holdfast.ops.http.server import HttpServer
from holdfast.ops.http.tls import CertificateFiles
from holdfast.ops.http.tokens import TokenFile
from holdfast.store.api import Store
from tests.ops.app import app
from tests.ops.http_rig import JsonClient, RawHttpConnection

BANK = "bank"


def token_of(name: str) -> str:
    return f"the-token-of-{name}-0123456789"


def token_lines(**scopes: str) -> str:
    """The text of a token file: names with their scopes."""
    digests = {name: hashlib.sha256(token_of(name).encode()).hexdigest() for name in scopes}
    return "\n".join(f"{name} {text} sha256:{digests[name]}" for name, text in scopes.items())


ONE_SCOPE_EACH = token_lines(**{scope.value: scope.value for scope in Scope})


class ServedRig:
    def __init__(self, store: Store) -> None:
        self.store = store
        self._open = contextlib.ExitStack()

    def serve(
        self,
        tokens: str | TokenFile = "",
        *,
        apps: Mapping[str, hf.App] | None = None,
        default: str = "",
        tls: CertificateFiles | None = None,
        limits: ConnectionLimits | None = None,
        rate_per_s: float = 0.0,
    ) -> HttpServer:
        universes = UniverseChoice(self.store, {} if apps is None else apps, default)
        address = parse_address("127.0.0.1:0")
        server = HttpServer(
            lambda server: ServedApi(server, self.store, universes),
            address=address,
            guard=RequestGuard(address, tokens),
            tls=tls,
            limits=limits,
            rate=RequestRate(rate_per_s),
        )
        return self._open.enter_context(server)

    def bank(self, tokens: str = "") -> HttpServer:
        """A server with the code of the sample application."""
        return self.serve(tokens, apps={BANK: app}, default=BANK)

    def client(self, server: HttpServer, token: str = "") -> JsonClient:
        return self._open.enter_context(JsonClient(server, token))

    def raw(self, server: HttpServer) -> RawHttpConnection:
        return self._open.enter_context(RawHttpConnection(server))

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def rig() -> Iterator[ServedRig]:
    with stores.open("memory:") as store:
        served = ServedRig(store)
        try:
            yield served
        finally:
            served.close()


@pytest.fixture
def client(rig: ServedRig) -> JsonClient:
    return rig.client(rig.bank())


def create(client: JsonClient, name: str, **options: Any) -> Any:
    response = client.post("/v1/worlds", {"type": "QuotedAccount", "name": name}, **options)
    assert response.status in (200, 201), response.document
    return response.document
