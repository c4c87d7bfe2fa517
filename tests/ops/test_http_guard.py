"""Where the HTTP server listens, and its token."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import Invalid, NotFound
from holdfast.ops.http.guard import HOST, PORT, Address, address_of, token_of


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
def test_an_address_has_a_host_and_a_port(text: str, host: str, port: int) -> None:
    assert address_of(text) == (host, port)


@pytest.mark.parametrize("text", ["::1", "a:b:1", "localhost:x", "localhost:70000", "localhost:-1"])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        address_of(text)


def test_an_address_is_told_as_a_url_has_it() -> None:
    assert str(Address("::1", 80)) == "[::1]:80"
    assert str(Address("127.0.0.1", 80)) == "127.0.0.1:80"


def test_a_token_comes_from_the_file_before_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-the-file-0123456789\n")
    assert token_of("from-the-environment-1", str(file)) == "from-the-file-0123456789"
    assert token_of("from-the-environment-1", None) == "from-the-environment-1"
    assert token_of(None, None) == ""


@pytest.mark.parametrize("token", ["short", "with a space 0123456789", "ünïcode-0123456789"])
def test_a_weak_token_is_refused(token: str) -> None:
    with pytest.raises(Invalid):
        token_of(token, None)


def test_a_token_file_must_be_there_and_hold_something(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        token_of(None, str(tmp_path / "none"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(Invalid):
        token_of("from-the-environment-1", str(tmp_path / "empty"))
