"""The listen address of the HTTP server."""

from __future__ import annotations

import pytest

from holdfast.errors import Invalid
from holdfast.ops.http.auth import HOST, PORT, ListenAddress, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:8000", "127.0.0.1", 8000),
        ("localhost", "localhost", PORT),
        (":9000", HOST, 9000),
        ("[::1]:9000", "::1", 9000),
        ("[::1]", "::1", PORT),
        ("0.0.0.0:0", "0.0.0.0", 0),
    ],
)
def test_parse_address_returns_host_and_port(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)


@pytest.mark.parametrize("text", ["::1", "a:b:1", "localhost:x", "localhost:70000", "localhost:-1"])
def test_parse_address_rejects_invalid_text(text: str) -> None:
    with pytest.raises(Invalid):
        parse_address(text)


def test_listen_address_str_brackets_ipv6() -> None:
    assert str(ListenAddress("::1", 80)) == "[::1]:80"
    assert str(ListenAddress("127.0.0.1", 80)) == "127.0.0.1:80"
