"""`http.request` against a loopback server: responses, refusals, limits, redirects,
certificates."""

import asyncio
import gzip
import socket
import zlib
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import trustme

from holdfast.adapters.address_guard import Reach
from holdfast.adapters.errors import (
    BadResponse,
    ForbiddenAddress,
    Interrupted,
    RejectedByServer,
    ResponseTooLarge,
    TlsNotTrusted,
    Unavailable,
)
from holdfast.adapters.http import HttpClient, Response, parse_options, retry_after_s
from holdfast.errors import Invalid, Timeout, ValueTooLarge
from tests.adapters.rig import (
    LOOPBACK,
    FakeHttpServer,
    FakeResolver,
    ReceivedRequest,
    Route,
    context_for,
    redirect,
    respond_with,
    run,
    run_http_server,
)

MODULES = ("holdfast.adapters.http", "holdfast.adapters.pinned_connection")


@pytest.fixture
def server() -> Any:
    with run_http_server() as server:
        yield server


def get(url: str, method: str = "GET", reach: Reach = LOOPBACK, **options: Any) -> Response:
    return run(HttpClient(reach).request(method, url, options, key="key-1"))


# -- requests and responses ----------------------------------------------------------------------


def test_http_response_is_plain_data(server: FakeHttpServer) -> None:
    server.routes["/"] = respond_with(
        200, b'{"a": 1}', {"content-type": "application/json", "X-A": "b"}
    )
    response = get(server.url())
    assert (response.status, response.body, response.text) == (200, b'{"a": 1}', '{"a": 1}')
    assert response.json() == {"a": 1}
    assert response.headers["x-a"] == "b"
    assert response.url == server.url()


def test_response_text_uses_the_declared_charset(server: FakeHttpServer) -> None:
    server.routes["/"] = respond_with(
        200, "é".encode("latin-1"), {"content-type": "text/plain; charset=latin-1"}
    )
    assert get(server.url()).text == "é"


def test_idempotency_key_is_sent_with_every_request(server: FakeHttpServer) -> None:
    server.routes["/"] = respond_with()
    get(server.url(), "POST", body=b"x")
    assert server.requests[0].headers["idempotency-key"] == "key-1"


def test_host_header_is_the_name_not_the_pinned_address(server: FakeHttpServer) -> None:
    server.routes["/"] = respond_with()
    http = HttpClient(LOOPBACK, resolve=FakeResolver(api_test=[["127.0.0.1"]]))
    run(http.request("GET", f"http://api.test:{server.port}/", None, key="k"))
    assert server.requests[0].headers["host"] == f"api.test:{server.port}"


@pytest.mark.parametrize(
    ("options", "body", "kind"),
    [
        ({"json": {"a": [1]}}, b'{"a":[1]}', "application/json"),
        ({"body": "text"}, b"text", None),
        ({"body": b"\x00\xff"}, b"\x00\xff", None),
    ],
)
def test_request_body_is_json_text_or_bytes(
    server: FakeHttpServer, options: dict[str, Any], body: bytes, kind: str | None
) -> None:
    server.routes["/"] = respond_with()
    get(server.url(), "POST", **options)
    assert (server.requests[0].body, server.requests[0].headers.get("content-type")) == (body, kind)


def test_environment_proxy_is_not_used(
    server: FakeHttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.routes["/"] = respond_with(200, b"direct")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert get(server.url()).body == b"direct"


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "other.test"}, {"Content-Length": "5"}, {"Transfer-Encoding": "chunked"},
        {"Connection": "close"}, {"Proxy-Authorization": "x"}, {"Idempotency-Key": "mine"},
        {"X-A": "b\r\nX-C: d"}, {"X-A\r\nX-C": "d"}, {"X A": "b"}, {"X-A": "b\x00"}, {"": "b"},
        {"X-A": "b\x85c"}, {"X-A": "é"}, {"X-A": " b"}, {"X-A": "b\t"}, {"X-A": "b\n"},
    ],
)  # fmt: skip
def test_reserved_or_malformed_headers_are_refused(
    server: FakeHttpServer, headers: dict[str, str]
) -> None:
    with pytest.raises(Invalid):
        get(server.url(), headers=headers)
    assert server.requests == []


@pytest.mark.parametrize("method", ["CONNECT", "TRACE", "get", "GET /x", "", "GET\r\n"])
def test_invalid_http_method_is_refused(server: FakeHttpServer, method: str) -> None:
    with pytest.raises(Invalid):
        get(server.url(), method)


@pytest.mark.parametrize(
    "options",
    [
        {"timeout_s": 0}, {"timeout_s": float("nan")}, {"bytes_max": 0}, {"bytes_max": 1 << 40},
        {"redirects_max": 21}, {"body": "a", "json": 1}, {"unknown": 1}, {"headers": {"a": 1}},
        {"errors": "maybe"},
    ],
)  # fmt: skip
def test_http_options_out_of_range_are_invalid(options: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        parse_options(options)


def test_request_body_of_wrong_type_or_size_is_refused(server: FakeHttpServer) -> None:
    with pytest.raises(Invalid):
        get(server.url(), "POST", body=7)
    with pytest.raises(ValueTooLarge):
        get(server.url(), "POST", body=bytes(4 * 1024 * 1024))


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 401, 404, 409, 500])
def test_error_status_is_a_result_or_raises_by_option(server: FakeHttpServer, status: int) -> None:
    server.routes["/"] = respond_with(status, b"why")
    assert get(server.url()).status == status
    with pytest.raises(RejectedByServer) as caught:
        get(server.url(), errors="raise")
    assert (caught.value.status, caught.value.body) == (status, "why")


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_temporary_error_status_raises_unavailable_with_retry_after(
    server: FakeHttpServer, status: int
) -> None:
    server.routes["/"] = respond_with(status, headers={"retry-after": "7"})
    with pytest.raises(Unavailable) as caught:
        get(server.url())
    assert caught.value.retryable
    assert (caught.value.status, caught.value.retry_after_s) == (status, 7.0)


@pytest.mark.parametrize(
    ("told", "wait_s"),
    [
        ("0", 0.0), ("120", 120.0), ("99999999999", 86400.0), ("Sun, 15 Nov 2026 12:01:00 GMT", 60.0),
        ("Sun, 15 Nov 2026 11:00:00 GMT", 0.0), ("soon", None), ("-5", None), ("", None),
    ],
)  # fmt: skip
def test_retry_after_is_seconds_or_a_date(told: str, wait_s: float | None) -> None:
    now = datetime(2026, 11, 15, 12, tzinfo=UTC)
    assert retry_after_s({"retry-after": told}, now) == wait_s


def test_a_closed_port_is_unavailable() -> None:
    with run_http_server() as gone:
        url = gone.url()
    with pytest.raises(Unavailable):
        get(url)


def test_connection_closed_after_the_request_is_interrupted(server: FakeHttpServer) -> None:
    def hang_up(handler: BaseHTTPRequestHandler, seen: ReceivedRequest) -> None:
        handler.connection.close()

    server.routes["/"] = hang_up
    with pytest.raises(Interrupted) as caught:
        get(server.url(), "POST", body=b"x")
    assert caught.value.retryable


def test_slow_dns_lookups_do_not_block_other_requests(
    server: FakeHttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def slow(host: Any, *args: Any, **options: Any) -> Any:
        if host == "mute.test":
            server.stopped.wait(30)
            raise OSError
        return real("127.0.0.1" if host == "api.test" else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    server.routes["/"] = respond_with(200, b"x")

    async def ask_all() -> Any:
        mute = [
            HttpClient(LOOPBACK).request("GET", "http://mute.test/", {"timeout_s": 0.2}, key="k")
            for _ in range(40)
        ]
        lost = await asyncio.gather(*mute, return_exceptions=True)
        url = f"http://api.test:{server.port}/"
        return lost, await HttpClient(LOOPBACK).request("GET", url, {"timeout_s": 20}, key="k")

    try:
        lost, found = run(ask_all())
    finally:
        server.stopped.set()
    assert [type(one) for one in lost] == [Timeout] * 40
    assert found.body == b"x"


# -- limits --------------------------------------------------------------------------------------


def test_body_with_too_large_content_length_is_refused(server: FakeHttpServer) -> None:
    server.routes["/"] = respond_with(200, b"x" * 1001)
    with pytest.raises(ResponseTooLarge):
        get(server.url(), bytes_max=1000)
    assert len(get(server.url(), bytes_max=1001).body) == 1001


def test_body_without_a_length_is_cut_off_at_bytes_max(server: FakeHttpServer) -> None:
    def endless(handler: BaseHTTPRequestHandler, seen: ReceivedRequest) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not server.stopped.is_set():
            handler.wfile.write(b"x" * 65536)

    server.routes["/"] = endless
    with pytest.raises(ResponseTooLarge):
        get(server.url(), bytes_max=200_000)


def test_decompression_bomb_is_refused(server: FakeHttpServer) -> None:
    server.routes["/"] = respond_with(
        200, gzip.compress(bytes(50_000_000)), {"content-encoding": "gzip"}
    )
    with pytest.raises(ResponseTooLarge):
        get(server.url())


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)]
)
def test_compressed_body_within_bytes_max_is_decompressed(
    server: FakeHttpServer, encoding: str, pack: Any
) -> None:
    server.routes["/"] = respond_with(200, pack(b"hello"), {"content-encoding": encoding})
    assert get(server.url()).body == b"hello"


@pytest.mark.parametrize(
    ("encoding", "body"),
    [("br", b"x"), ("gzip", b"junk"), ("gzip", gzip.compress(b"hello", mtime=0)[:-4])],
)
def test_body_that_cannot_be_decompressed_is_a_bad_response(
    server: FakeHttpServer, encoding: str, body: bytes
) -> None:
    server.routes["/"] = respond_with(200, body, {"content-encoding": encoding})
    with pytest.raises(BadResponse):
        get(server.url())


def test_missing_http_response_is_a_timeout(server: FakeHttpServer) -> None:
    def hang(handler: BaseHTTPRequestHandler, seen: ReceivedRequest) -> None:
        server.stopped.wait(30)

    server.routes["/"] = hang
    with pytest.raises(Timeout):
        get(server.url(), timeout_s=0.2)


def test_trickling_body_is_a_timeout_of_the_whole_request(server: FakeHttpServer) -> None:
    def trickle(handler: BaseHTTPRequestHandler, seen: ReceivedRequest) -> None:
        handler.send_response(200)
        handler.send_header("content-length", "100000")
        handler.end_headers()
        while not server.stopped.wait(0.02):
            handler.wfile.write(b"x")

    server.routes["/"] = trickle
    with pytest.raises(Timeout):
        get(server.url(), timeout_s=0.3)


# -- redirects -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "to",
    [
        "http://10.0.0.1/", "http://169.254.169.254/latest/meta-data/", "http://[::ffff:127.0.0.1]/",
        "http://[fd00:ec2::254]/", "http://0x7f.1/", "http://2130706433/", "http://0/",
        "file:///etc/passwd", "gopher://127.0.0.1/", "//10.0.0.1/", "http://user:pw@127.0.0.1/",
        "http://localtest.test/", "//[fe80::1]/",
    ],
)  # fmt: skip
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirect_to_a_forbidden_address_is_refused(
    server: FakeHttpServer, status: int, to: str
) -> None:
    server.routes["/"] = redirect("/second", 302)
    server.routes["/second"] = redirect(to, status)
    http = HttpClient(LOOPBACK, resolve=FakeResolver(localtest_test=[["192.168.0.1"]]))
    with pytest.raises(ForbiddenAddress):
        run(http.request("GET", server.url(), None, key="k"))
    assert [seen.path for seen in server.requests] == ["/", "/second"]


def test_redirect_to_an_invalid_url_is_a_bad_response(server: FakeHttpServer) -> None:
    server.routes["/"] = redirect("http://[::1")
    with pytest.raises(BadResponse):
        get(server.url())


def test_name_that_becomes_forbidden_between_redirects_is_refused(server: FakeHttpServer) -> None:
    names = FakeResolver(turns_test=[["127.0.0.1"], ["10.0.0.1"]])
    server.routes["/"] = redirect("/again")
    with pytest.raises(ForbiddenAddress):
        run(HttpClient(LOOPBACK, resolve=names).request(
            "GET", f"http://turns.test:{server.port}/", None, key="k"
        ))  # fmt: skip
    assert names.lookups == ["turns.test", "turns.test"]
    assert [seen.path for seen in server.requests] == ["/"]


def test_allowed_redirect_is_followed(server: FakeHttpServer) -> None:
    server.routes["/"] = redirect("/end?x=1")
    server.routes["/end"] = respond_with(200, b"end")
    response = get(server.url())
    assert (response.body, response.url) == (b"end", server.url("/end?x=1"))


@pytest.mark.parametrize(
    ("status", "method", "body"),
    [
        (301, "GET", b""),
        (302, "GET", b""),
        (303, "GET", b""),
        (307, "POST", b"x"),
        (308, "POST", b"x"),
    ],
)
def test_redirected_post_keeps_its_body_only_for_307_and_308(
    server: FakeHttpServer, status: int, method: str, body: bytes
) -> None:
    server.routes["/"], server.routes["/end"] = redirect("/end", status), respond_with()
    get(server.url(), "POST", body=b"x")
    assert (server.requests[1].method, server.requests[1].body) == (method, body)


SECRET_HEADERS = [
    "Authorization", "Cookie", "X-API-Key", "x-api-key", "Api-Key", "X-Auth-Token", "X-Amz-Security-Token",
    "PRIVATE-TOKEN", "X-Goog-Api-Key", "Ocp-Apim-Subscription-Key", "X-Vault-Token", "X-Of-Our-Own",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRET_HEADERS)
@pytest.mark.parametrize("status", [302, 307])
def test_secret_headers_are_not_redirected_to_another_origin(
    server: FakeHttpServer, name: str, status: int
) -> None:
    with run_http_server("127.0.0.2") as other:
        server.routes["/"] = redirect("/same", status)
        server.routes["/same"] = redirect(other.url("/next"), status)
        other.routes["/next"] = redirect(server.url("/end"), status)
        server.routes["/end"] = respond_with()
        get(server.url(), headers={name: "s", "Accept-Language": "de"})
        first, same, end = (seen.headers for seen in server.requests)
        assert first[name.lower()] == same[name.lower()] == "s"
        assert name.lower() not in other.requests[0].headers
        assert name.lower() not in end, (
            "nor back again: the other origin has sent the request there"
        )
        assert other.requests[0].headers["accept-language"] == "de"
        assert other.requests[0].headers["idempotency-key"] == "key-1"


def test_header_named_in_follow_is_redirected_to_another_origin(server: FakeHttpServer) -> None:
    with run_http_server("127.0.0.2") as other:
        server.routes["/"] = redirect(other.url("/end"))
        other.routes["/end"] = respond_with()
        get(server.url(), headers={"X-Trace": "7", "X-Other": "8"}, follow=["x-TRACE"])
        assert other.requests[0].headers["x-trace"] == "7"
        assert "x-other" not in other.requests[0].headers


@pytest.mark.parametrize("key", ["a\r\nX-Evil: 1", "é", " k"])
def test_idempotency_key_invalid_as_a_header_is_refused(server: FakeHttpServer, key: str) -> None:
    with pytest.raises(Invalid):
        run(HttpClient(LOOPBACK).request("GET", server.url(), None, key=key))
    assert server.requests == []


def test_redirect_loop_ends_at_redirects_max(server: FakeHttpServer) -> None:
    server.routes["/"] = redirect("/")
    with pytest.raises(BadResponse):
        get(server.url(), redirects_max=3)
    assert len(server.requests) == 4


def test_redirects_max_zero_returns_the_redirect(server: FakeHttpServer) -> None:
    server.routes["/"] = redirect("http://10.0.0.1/")
    response = get(server.url(), redirects_max=0)
    assert (response.status, response.headers["location"]) == (302, "http://10.0.0.1/")


# -- certificates --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def request_over_tls(
    authority: trustme.CA, tmp_path: Path, *, issued_to: str, route: Route
) -> Response:
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca_file))
    reach = Reach(ports=(), cidrs=("127.0.0.0/8",), ca_file=str(ca_file))
    with run_http_server(context=context_for(authority, issued_to)) as server:
        server.routes["/"] = route
        http = HttpClient(reach, resolve=FakeResolver(api_test=[["127.0.0.1"]]))
        return run(http.request("GET", f"https://api.test:{server.port}/", None, key="k"))


def test_tls_verifies_the_name_although_the_address_is_pinned(
    authority: trustme.CA, tmp_path: Path
) -> None:
    assert (
        request_over_tls(
            authority, tmp_path, issued_to="api.test", route=respond_with(200, b"x")
        ).body
        == b"x"
    )


def test_tls_certificate_of_another_name_is_not_trusted(
    authority: trustme.CA, tmp_path: Path
) -> None:
    with pytest.raises(TlsNotTrusted):
        request_over_tls(authority, tmp_path, issued_to="other.test", route=respond_with())


def test_tls_certificate_of_an_unknown_authority_is_not_trusted(authority: trustme.CA) -> None:
    with run_http_server(context=context_for(authority, "127.0.0.1")) as server:
        server.routes["/"] = respond_with()
        with pytest.raises(TlsNotTrusted):
            get(server.url())
        assert server.requests == []


def test_redirect_from_https_to_http_is_refused(
    authority: trustme.CA, tmp_path: Path, server: FakeHttpServer
) -> None:
    with pytest.raises(ForbiddenAddress):
        request_over_tls(authority, tmp_path, issued_to="api.test", route=redirect(server.url()))
    assert server.requests == []
