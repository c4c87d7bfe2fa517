"""The HTTP server: framing, authentication, validation, limits, and isolation from slow clients."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast import failpoints
from holdfast.errors import Invalid
from holdfast.ops.http.auth import RequestGuard, parse_address
from holdfast.ops.http.json_values import DEPTH_MAX
from holdfast.ops.http.limits import BODY_BYTES_MAX, HEAD_BYTES_MAX, ConnectionLimits
from holdfast.ops.http.server import HttpServer
from tests.ops.http_rig import (
    TOKEN,
    HttpRig,
    JsonClient,
    client,
    post_request,
    problem_code,
    rig,
    server,
)
from tests.process.watch import until

__all__ = ["client", "rig", "server"]

pytestmark = pytest.mark.timeout(60)

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


# -- requests and responses ------------------------------------------------------------------------


def test_connection_serves_many_requests(rig: HttpRig, server: HttpServer) -> None:
    raw = rig.raw(server)
    for _ in range(3):
        raw.send(GET)
        assert raw.read_response() == (200, b'{"ok":true}')


def test_pipelined_requests_are_answered_in_order(rig: HttpRig, server: HttpServer) -> None:
    raw = rig.raw(server)
    raw.send(GET + post_request("/v1/tasks", {"name": "add"}) + GET)
    assert [raw.read_response()[0] for _ in range(3)] == [200, 201, 200]


def test_connection_close_header_closes_the_connection(rig: HttpRig, server: HttpServer) -> None:
    raw = rig.raw(server)
    raw.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert raw.read_until_closed().endswith(b'{"ok":true}')


def test_http_1_0_connection_is_closed_without_keep_alive(rig: HttpRig, server: HttpServer) -> None:
    raw = rig.raw(server)
    raw.send(b"GET /healthz HTTP/1.0\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n")
    assert raw.read_response()[0] == 200
    raw.send(b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n")
    assert b"Connection: close" in raw.read_until_closed()


def test_head_response_has_no_body(rig: HttpRig, server: HttpServer) -> None:
    raw = rig.raw(server)
    raw.send(b"HEAD /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    response = raw.read_until_closed()
    assert response.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: 11\r\n" in response
    assert response.endswith(b"\r\n\r\n")


def test_expect_100_continue_is_answered(rig: HttpRig, server: HttpServer) -> None:
    raw = rig.raw(server)
    head, _, body = post_request("/v1/tasks", {"name": "add"}, "Expect: 100-continue").partition(
        b"\r\n\r\n"
    )
    raw.send(head + b"\r\n\r\n")
    assert raw.socket.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
    raw.send(body)
    assert raw.read_response()[0] == 201


def test_error_response_is_problem_json(client: JsonClient) -> None:
    response = client.get("/v1/tasks/1-1")
    assert response.headers["content-type"] == "application/problem+json"
    document = response.document
    assert (document["status"], document["title"]) == (404, "Not Found")
    assert (document["code"], document["retryable"]) == ("not_found", False)
    assert "1-1" in document["detail"]


def test_internal_error_response_hides_the_exception(
    rig: HttpRig,
    client: JsonClient,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with failpoints.on("http.handle", raises=RuntimeError("a secret")):
        response = client.get("/v1/queues")
    assert (response.status, response.document["code"]) == (500, "internal")
    assert "secret" not in json.dumps(response.document)
    assert "RuntimeError: a secret" in capsys.readouterr().err
    assert client.get("/healthz").status == 200


def test_unknown_path_is_404_and_wrong_method_is_405(client: JsonClient) -> None:
    assert client.get("/v1/nothing").document["code"] == "no_route"
    assert client.get("/v1/tasks/1-1/cancel/x").document["code"] == "no_route"
    response = client.call("DELETE", "/v1/tasks", headers={"Content-Type": "application/json"})
    assert (response.status, response.document["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "GET, POST"


# -- authentication --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["127.0.0.1:1", "localhost", "LOCALHOST:80", "[::1]:9", "10.0.0.7"]
)
def test_host_header_with_an_address_or_own_name_is_accepted(client: JsonClient, host: str) -> None:
    assert client.get("/v1/queues", headers={"Host": host}).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8787", "localhost.evil.example", ""]
)
def test_host_header_with_another_name_is_forbidden(client: JsonClient, host: str) -> None:
    for response in (
        client.get("/v1/queues", headers={"Host": host}),
        client.post("/v1/tasks", {"name": "add"}, headers={"Host": host}),
    ):
        assert (response.status, response.document["code"]) == (403, "forbidden")


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://localhost:1", ""])
def test_foreign_origin_header_is_forbidden(client: JsonClient, origin: str) -> None:
    for method in ("GET", "POST"):
        response = client.call(
            method, "/v1/tasks", {"name": "add"}, headers={"Host": "localhost", "Origin": origin}
        )
        assert (response.status, response.document["code"]) == (403, "forbidden")
    assert client.get("/v1/tasks").document["tasks"] == []


def test_own_origin_header_is_accepted(client: JsonClient) -> None:
    headers = {"Host": "localhost:8787", "Origin": "http://localhost:8787"}
    assert client.post("/v1/tasks", {"name": "add"}, headers=headers).status == 201


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "json"])
def test_body_without_json_content_type_is_refused(client: JsonClient, kind: str) -> None:
    response = client.post("/v1/tasks", {"name": "add"}, headers={"Content-Type": kind})
    assert (response.status, response.document["code"]) == (415, "unsupported_media_type")


def test_request_without_the_token_is_unauthorized(rig: HttpRig) -> None:
    server = rig.serve(TOKEN)
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": TOKEN},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": "Bearer é"},
    ):
        for path in ("/v1/tasks", "/v1/queues"):
            response = rig.client(server).get(path, headers=headers)
            assert (response.status, response.document["code"]) == (401, "unauthorized")
            assert response.headers["www-authenticate"] == "Bearer"
    assert rig.client(server, TOKEN).get("/v1/tasks").document["tasks"] == []


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.0.0.7:80", "example.com:80"])
def test_guard_beyond_loopback_requires_a_token(address: str) -> None:
    with pytest.raises(Invalid) as caught:
        RequestGuard(parse_address(address), "")
    assert caught.value.code == "no_token"
    RequestGuard(parse_address(address), TOKEN)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "[::1]:0", "127.9.9.9"])
def test_guard_on_loopback_needs_no_token(address: str) -> None:
    RequestGuard(parse_address(address), "")


# -- validation ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /healthz HTTP/1.1\r\n\r\n", 400),
        ("GET /healthz HTTP/2.0\r\nHost: localhost\r\n\r\n", 400),
        ("GET  /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        ("GET healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        ("GET http://localhost/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        ("GET /%ff HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        ("GET /v1/tasks?a=1&a=2 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        ("GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
        ("GET /healthz HTTP/1.1\r\nHost: localhost\r\nA : b\r\n\r\n", 400),
        ("GET /healthz HTTP/1.1\r\nHost: localhost\r\nA: b\r\n c\r\n\r\n", 400),
        ("GET /healthz HTTP/1.1\r\nHost: localhost\r\nA: b\nC: d\r\n\r\n", 400),
        ("GET /healthz HTTP/1.1\r\nHost: localhost\r\nA: \x00\r\n\r\n", 400),
        ("POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Length: +2\r\n\r\n{}", 400),
        ("POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2, 2\r\n\r\n{}", 400),
        (
            "POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
            "Content-Length: 2\r\n\r\n{}",
            400,
        ),
        ("POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\n\r\n", 411),
        (
            "POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
            "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            411,
        ),
        ("GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + "A: b\r\n" * 70 + "\r\n", 431),
        ("GET /" + "x" * 5000 + " HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (
            "GET /healthz HTTP/1.1\r\nHost: localhost\r\nA: " + "x" * HEAD_BYTES_MAX + "\r\n\r\n",
            431,
        ),
    ],
)
def test_ambiguous_request_head_is_refused_and_closes_the_connection(
    rig: HttpRig, server: HttpServer, head: str, status: int
) -> None:
    raw = rig.raw(server)
    raw.send(head.encode("latin-1"))
    response = raw.read_until_closed()
    assert response.startswith(f"HTTP/1.1 {status} ".encode())
    assert response.count(b"Content-Length: ") == 1


def test_content_length_above_the_limit_is_413_before_the_body(
    rig: HttpRig, server: HttpServer
) -> None:
    raw = rig.raw(server)
    head = (
        "POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {BODY_BYTES_MAX + 1}\r\n\r\n"
    )
    raw.send(head.encode())
    status, body = raw.read_response()
    assert (status, problem_code(body)) == (413, "body_too_large")


def test_task_arguments_of_5_mb_are_413_value_too_large(client: JsonClient) -> None:
    response = client.post(
        "/v1/tasks", body=b'{"name": "add", "args": ["%s"]}' % (b"x" * 5_000_000)
    )
    assert (response.status, response.document["code"]) == (413, "value_too_large")


def test_body_of_50_mb_gets_a_413_response(rig: HttpRig, server: HttpServer) -> None:
    raw = rig.raw(server)
    raw.send(post_request("/v1/tasks", {"name": "add", "args": ["x" * 50_000_000]}))
    status, body = raw.read_response()
    assert (status, problem_code(body)) == (413, "body_too_large")
    assert rig.client(server).get("/v1/tasks").document["tasks"] == []


def test_refused_body_beyond_linger_bytes_closes_the_connection(rig: HttpRig) -> None:
    server = rig.serve(limits=ConnectionLimits(linger_bytes_max=1024 * 1024))
    whole = post_request("/v1/tasks", {"name": "add", "args": ["x" * 50_000_000]})
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        rig.raw(server).send(whole)
    assert rig.client(server).get("/v1/tasks").document["tasks"] == []


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "bad_request"),
        (b"{", 400, "bad_request"),
        (b"[]", 422, "invalid"),
        (b"null", 422, "invalid"),
        (b'{"name": "add", "arg": []}', 422, "invalid"),
        (b'{"name": "add", "options": {"ttl": 3}}', 422, "invalid"),
        (b'{"tasks": [{"name": "add", "when": 3}]}', 422, "invalid"),
        (b'{"name": 3}', 422, "invalid"),
        (b'{"name": ""}', 422, "invalid"),
        (b'{"args": []}', 422, "invalid"),
        (b'{"name": "add", "tasks": []}', 422, "invalid"),
        (b'{"name": "add", "args": [1e999]}', 422, "invalid"),
        (b'{"name": "add", "args": [NaN]}', 400, "bad_request"),
        (b'{"name": "add", "args": [99999999999999999999999]}', 422, "invalid"),
        (b'{"name": "add", "args": ["\xff"]}', 400, "bad_request"),
        (b'{"name": "add", "args": ["\\ud800"]}', 400, "bad_request"),
        (b'{"name": "add", "options": {"delay_s": -1}}', 422, "invalid"),
        (b'{"name": "add", "options": {"delay_s": 1e300}}', 422, "invalid"),
        (b'{"name": "add", "options": {"lease_s": 0}}', 422, "invalid"),
        (b'{"name": "add", "options": {"attempts": 0}}', 422, "invalid"),
        (b'{"name": "add", "options": {"queue": ""}}', 422, "invalid"),
        (b'{"name": "add", "options": {"priority": 99999999999}}', 422, "invalid"),
    ],
)
def test_invalid_submit_body_is_refused_and_submits_nothing(
    client: JsonClient, body: bytes, status: int, code: str
) -> None:
    response = client.post("/v1/tasks", body=body)
    assert (response.status, response.document["code"]) == (status, code)
    assert client.get("/v1/tasks").document["tasks"] == []


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("lease", {}),
        ("lease", {"worker": ""}),
        ("lease", {"worker": "w", "limit": 0}),
        ("lease", {"worker": "w", "limit": 1_000_000}),
        ("lease", {"worker": "w", "queues": []}),
        ("lease", {"worker": "w", "queues": [""]}),
        ("lease", {"worker": "w", "wait_s": -1}),
        ("lease", {"worker": "w", "wait_s": 3600}),
        ("heartbeat", {}),
        ("heartbeat", {"leases": [{"lease": "1-2"}]}),
        ("heartbeat", {"leases": [{"lease": "1-1-1", "progress": "x" * 5000}]}),
        ("complete", {"worker": "w"}),
        ("complete", {"worker": "w", "lease": "what"}),
        ("complete", {"worker": "w", "lease": "1-1-1", "reports": []}),
        ("complete", {"lease": "1-1-1"}),
        ("complete", {"worker": "w", "lease": "99999999999999999999-1-1"}),
        ("fail", {"worker": "w", "lease": "1-1-1", "end": "lost"}),
        ("fail", {"worker": "w", "lease": "1-1-1", "retry": True}),
    ],
)
def test_invalid_worker_request_is_422(client: JsonClient, path: str, document: Any) -> None:
    response = client.post(f"/v1/tasks/{path}", document)
    assert response.status == 422
    assert response.document["retryable"] is False


def test_values_nested_beyond_depth_max_are_too_deep(client: JsonClient) -> None:
    def nested(depth: int) -> bytes:
        return b'{"name": "add", "args": [%s%s]}' % (b"[" * depth, b"]" * depth)

    assert client.post("/v1/tasks", body=nested(DEPTH_MAX - 2)).status == 201
    for depth in (DEPTH_MAX + 5, 2000, 150_000):
        response = client.post("/v1/tasks", body=nested(depth))
        assert (response.status, response.document["code"]) == (422, "too_deep")


# -- limits ----------------------------------------------------------------------------------------


def test_slow_request_head_times_out_with_408(rig: HttpRig) -> None:
    raw = rig.raw(rig.serve(limits=ConnectionLimits(head_s=0.1)))
    raw.send(b"GET /healthz HT")
    status, body = raw.read_response()
    assert (status, problem_code(body)) == (408, "too_slow")


def test_slow_request_body_times_out_with_408(rig: HttpRig) -> None:
    raw = rig.raw(rig.serve(limits=ConnectionLimits(body_s=0.1)))
    raw.send(post_request("/v1/tasks", {"name": "add"})[:-1])
    status, body = raw.read_response()
    assert (status, problem_code(body)) == (408, "too_slow")


def test_idle_connection_is_closed_after_idle_s(rig: HttpRig) -> None:
    raw = rig.raw(rig.serve(limits=ConnectionLimits(idle_s=0.1)))
    raw.send(post_request("/v1/tasks", {"name": "add"}))
    assert raw.read_response()[0] == 201
    assert raw.read_until_closed() == b""


def test_connection_without_a_request_is_closed_after_head_s(rig: HttpRig) -> None:
    raw = rig.raw(rig.serve(limits=ConnectionLimits(head_s=0.1)))
    assert raw.read_until_closed() == b""


def test_slow_clients_do_not_delay_other_clients(
    rig: HttpRig, server: HttpServer, client: JsonClient
) -> None:
    """Clients with partial heads, partial bodies and long polls do not block other clients."""
    slow = [rig.raw(server) for _ in range(30)]
    for at, raw in enumerate(slow):
        whole = post_request(
            "/v1/tasks/lease", {"worker": "slow", "queues": ["none"], "wait_s": 30}
        )
        raw.send([whole[:20], whole[:-3], whole][at % 3])
    until(lambda: server.busy == len(slow), "all of them are under way")
    id = client.submit("add")
    assert [granted["id"] for granted in client.lease()] == [id]


def test_connection_above_connections_max_gets_503_too_many(rig: HttpRig) -> None:
    server = rig.serve(limits=ConnectionLimits(connections_max=2))
    polling = [rig.raw(server) for _ in range(2)]
    for raw in polling:
        raw.send(post_request("/v1/tasks/lease", {"worker": "w", "wait_s": 30}))
    until(lambda: server.busy == 2, "both wait for a task")
    third = rig.raw(server)
    third.send(GET.replace(b"/healthz", b"/v1/queues"))
    status, body = third.read_response()
    assert (status, problem_code(body)) == (503, "too_many")
    polling[0].socket.close()
    third.socket.close()

    def served() -> bool:
        with rig.raw(server) as again:
            again.send(GET.replace(b"/healthz", b"/v1/queues"))
            return again.read_response()[0] == 200

    until(served, "there is room again")


def test_body_above_bodies_bytes_max_gets_503_too_many(rig: HttpRig) -> None:
    server = rig.serve(limits=ConnectionLimits(bodies_bytes_max=100))
    first = rig.raw(server)
    half = post_request("/v1/tasks", {"name": "add", "args": ["x" * 30]})
    first.send(half[:-1])
    until(lambda: server.bodies_bytes > 0, "its body is awaited")
    second = rig.raw(server)
    second.send(half)
    status, body = second.read_response()
    assert (status, problem_code(body)) == (503, "too_many")
    first.send(half[-1:])
    assert first.read_response()[0] == 201


def test_request_stop_ends_long_polls_with_an_empty_response(
    rig: HttpRig, server: HttpServer
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rig.client(server).lease, wait_s=50)
        until(lambda: server.busy == 1, "somebody waits")
        server.request_stop()
        assert waiting.result(20) == []
    server.join(20)
    assert not server.running
    assert server.failure is None


def test_request_stop_closes_idle_connections(rig: HttpRig, server: HttpServer) -> None:
    raw = rig.raw(server)
    raw.send(GET)
    assert raw.read_response()[0] == 200
    server.request_stop()
    assert raw.read_until_closed() == b""
    server.join(20)
    assert not server.running


def test_server_on_a_used_port_raises_invalid(rig: HttpRig, server: HttpServer) -> None:
    with pytest.raises(Invalid) as caught:
        HttpServer(lambda _: None, address=server.address, guard=RequestGuard(server.address, ""))  # type: ignore[arg-type, return-value]
    assert caught.value.fields["address"] == str(server.address)
