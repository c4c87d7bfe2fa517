"""The listen address and the token of the HTTP server."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import Invalid, NotFound
from holdfast.ops.http.auth import HOST, PORT, ListenAddress, parse_address, read_token


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


def test_read_token_prefers_the_file_to_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-the-file-0123456789\n")
    assert read_token("from-the-environment-1", str(file)) == "from-the-file-0123456789"
    assert read_token("from-the-environment-1", None) == "from-the-environment-1"
    assert read_token(None, None) == ""


@pytest.mark.parametrize("token", ["short", "with a space 0123456789", "ünïcode-0123456789"])
def test_read_token_rejects_a_weak_token(token: str) -> None:
    with pytest.raises(Invalid):
        read_token(token, None)


def test_read_token_rejects_a_missing_or_empty_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read_token(None, str(tmp_path / "none"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(Invalid):
        read_token("from-the-environment-1", str(tmp_path / "empty"))
