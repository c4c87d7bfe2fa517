"""The HTTP server itself: who may ask, what is refused, and that nobody waits for a slow client."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.errors import Invalid
from holdfast.ops.http.connection import Limits
from holdfast.ops.http.guard import Guard, address_of
from holdfast.ops.http.server import HttpServer
from holdfast.ops.http.values import DEPTH_MAX
from holdfast.ops.http.wire import BODY_BYTES_MAX, HEAD_BYTES_MAX
from tests.ops.http_rig import TOKEN, Client, Rig, client, code, request, rig, server
from tests.process.watch import until

__all__ = ["client", "rig", "server"]

pytestmark = pytest.mark.timeout(60)

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


# -- requests and answers --------------------------------------------------------------------------


def test_a_connection_carries_many_requests(rig: Rig, server: HttpServer) -> None:
    raw = rig.raw(server)
    for _ in range(3):
        raw.send(GET)
        assert raw.answer() == (200, b'{"ok":true}')


def test_requests_that_come_together_are_answered_in_order(rig: Rig, server: HttpServer) -> None:
    raw = rig.raw(server)
    raw.send(GET + request("/v1/tasks", {"name": "add"}) + GET)
    assert [raw.answer()[0] for _ in range(3)] == [200, 201, 200]


def test_whoever_says_close_is_closed(rig: Rig, server: HttpServer) -> None:
    raw = rig.raw(server)
    raw.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert raw.until_closed().endswith(b'{"ok":true}')


def test_an_old_client_is_closed_unless_it_asks_otherwise(rig: Rig, server: HttpServer) -> None:
    raw = rig.raw(server)
    raw.send(b"GET /healthz HTTP/1.0\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n")
    assert raw.answer()[0] == 200
    raw.send(b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n")
    assert b"Connection: close" in raw.until_closed()


def test_the_head_alone_has_no_body(rig: Rig, server: HttpServer) -> None:
    raw = rig.raw(server)
    raw.send(b"HEAD /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answer = raw.until_closed()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: 11\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


def test_whoever_waits_to_send_its_body_is_told_to_go_on(rig: Rig, server: HttpServer) -> None:
    raw = rig.raw(server)
    head, _, body = request("/v1/tasks", {"name": "add"}, "Expect: 100-continue").partition(
        b"\r\n\r\n"
    )
    raw.send(head + b"\r\n\r\n")
    assert raw.socket.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
    raw.send(body)
    assert raw.answer()[0] == 201


def test_an_error_is_a_problem_body(client: Client) -> None:
    answer = client.get("/v1/tasks/1-1")
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.document
    assert (document["status"], document["title"]) == (404, "Not Found")
    assert (document["code"], document["retryable"]) == ("not_found", False)
    assert "1-1" in document["detail"]


def test_an_error_of_ours_tells_nothing_of_it(
    rig: Rig,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr("holdfast.tasks.look.queues", broken)
    answer = client.get("/v1/queues")
    assert (answer.status, answer.document["code"]) == (500, "internal")
    assert "secret" not in json.dumps(answer.document)
    assert "RuntimeError: a secret" in capsys.readouterr().err
    assert client.get("/healthz").status == 200


def test_what_is_not_there_is_404_and_what_is_otherwise_405(client: Client) -> None:
    assert client.get("/v1/nothing").document["code"] == "no_route"
    assert client.get("/v1/tasks/1-1/cancel/x").document["code"] == "no_route"
    answer = client.call("DELETE", "/v1/tasks", headers={"Content-Type": "application/json"})
    assert (answer.status, answer.document["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, POST"


# -- who may ask -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["127.0.0.1:1", "localhost", "LOCALHOST:80", "[::1]:9", "10.0.0.7"]
)
def test_a_host_that_is_an_address_or_ours_is_let_in(client: Client, host: str) -> None:
    assert client.get("/v1/queues", headers={"Host": host}).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8787", "localhost.evil.example", ""]
)
def test_a_host_of_another_name_is_refused(client: Client, host: str) -> None:
    for answer in (
        client.get("/v1/queues", headers={"Host": host}),
        client.post("/v1/tasks", {"name": "add"}, headers={"Host": host}),
    ):
        assert (answer.status, answer.document["code"]) == (403, "forbidden")


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://localhost:1", ""])
def test_an_origin_that_is_not_ours_is_refused(client: Client, origin: str) -> None:
    for method in ("GET", "POST"):
        answer = client.call(
            method, "/v1/tasks", {"name": "add"}, headers={"Host": "localhost", "Origin": origin}
        )
        assert (answer.status, answer.document["code"]) == (403, "forbidden")
    assert client.get("/v1/tasks").document["tasks"] == []


def test_our_own_origin_is_let_in(client: Client) -> None:
    headers = {"Host": "localhost:8787", "Origin": "http://localhost:8787"}
    assert client.post("/v1/tasks", {"name": "add"}, headers=headers).status == 201


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "json"])
def test_a_body_that_does_not_say_that_it_is_json_is_refused(client: Client, kind: str) -> None:
    answer = client.post("/v1/tasks", {"name": "add"}, headers={"Content-Type": kind})
    assert (answer.status, answer.document["code"]) == (415, "unsupported_media_type")


def test_without_the_token_nothing_is_told_or_done(rig: Rig) -> None:
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
            answer = rig.client(server).get(path, headers=headers)
            assert (answer.status, answer.document["code"]) == (401, "unauthorized")
            assert answer.headers["www-authenticate"] == "Bearer"
    assert rig.client(server, TOKEN).get("/v1/tasks").document["tasks"] == []


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.0.0.7:80", "example.com:80"])
def test_beyond_loopback_a_server_without_a_token_does_not_start(address: str) -> None:
    with pytest.raises(Invalid) as caught:
        Guard(address_of(address), "")
    assert caught.value.code == "no_token"
    Guard(address_of(address), TOKEN)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "[::1]:0", "127.9.9.9"])
def test_on_loopback_it_needs_none(address: str) -> None:
    Guard(address_of(address), "")


# -- what is refused -------------------------------------------------------------------------------


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
def test_a_head_that_could_be_read_in_two_ways_is_refused_and_hung_up_on(
    rig: Rig, server: HttpServer, head: str, status: int
) -> None:
    raw = rig.raw(server)
    raw.send(head.encode("latin-1"))
    answer = raw.until_closed()
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert answer.count(b"Content-Length: ") == 1


def test_a_body_that_is_too_large_is_refused_by_its_length_alone(
    rig: Rig, server: HttpServer
) -> None:
    raw = rig.raw(server)
    head = (
        "POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {BODY_BYTES_MAX + 1}\r\n\r\n"
    )
    raw.send(head.encode())
    status, body = raw.answer()
    assert (status, code(body)) == (413, "body_too_large")


def test_arguments_of_5_mb_are_too_large(client: Client) -> None:
    answer = client.post("/v1/tasks", body=b'{"name": "add", "args": ["%s"]}' % (b"x" * 5_000_000))
    assert (answer.status, answer.document["code"]) == (413, "value_too_large")


def test_whoever_sends_50_mb_is_told_why_it_is_refused(rig: Rig, server: HttpServer) -> None:
    raw = rig.raw(server)
    raw.send(request("/v1/tasks", {"name": "add", "args": ["x" * 50_000_000]}))
    status, body = raw.answer()
    assert (status, code(body)) == (413, "body_too_large")
    assert rig.client(server).get("/v1/tasks").document["tasks"] == []


def test_whoever_sends_on_and_on_is_hung_up_on_and_the_server_goes_on(rig: Rig) -> None:
    server = rig.serve(limits=Limits(linger_bytes_max=1024 * 1024))
    whole = request("/v1/tasks", {"name": "add", "args": ["x" * 50_000_000]})
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
def test_a_body_that_is_wrong_is_refused_and_changes_nothing(
    client: Client, body: bytes, status: int, code: str
) -> None:
    answer = client.post("/v1/tasks", body=body)
    assert (answer.status, answer.document["code"]) == (status, code)
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
def test_a_worker_that_asks_wrongly_is_told(client: Client, path: str, document: Any) -> None:
    answer = client.post(f"/v1/tasks/{path}", document)
    assert answer.status == 422
    assert answer.document["retryable"] is False


def test_values_are_nested_so_deep_and_no_deeper(client: Client) -> None:
    def nested(depth: int) -> bytes:
        return b'{"name": "add", "args": [%s%s]}' % (b"[" * depth, b"]" * depth)

    assert client.post("/v1/tasks", body=nested(DEPTH_MAX - 2)).status == 201
    for depth in (DEPTH_MAX + 5, 2000, 150_000):
        answer = client.post("/v1/tasks", body=nested(depth))
        assert (answer.status, answer.document["code"]) == (422, "too_deep")


# -- limits ----------------------------------------------------------------------------------------


def test_a_head_that_does_not_arrive_in_time_is_refused(rig: Rig) -> None:
    raw = rig.raw(rig.serve(limits=Limits(head_s=0.1)))
    raw.send(b"GET /healthz HT")
    status, body = raw.answer()
    assert (status, code(body)) == (408, "too_slow")


def test_a_body_that_does_not_arrive_in_time_is_refused(rig: Rig) -> None:
    raw = rig.raw(rig.serve(limits=Limits(body_s=0.1)))
    raw.send(request("/v1/tasks", {"name": "add"})[:-1])
    status, body = raw.answer()
    assert (status, code(body)) == (408, "too_slow")


def test_a_connection_that_idles_is_closed(rig: Rig) -> None:
    raw = rig.raw(rig.serve(limits=Limits(idle_s=0.1)))
    assert raw.until_closed() == b""


def test_slow_clients_delay_nobody(rig: Rig, server: HttpServer, client: Client) -> None:
    """Half heads, half bodies, polls, and a reader that does not read: others are served."""
    slow = [rig.raw(server) for _ in range(30)]
    for at, raw in enumerate(slow):
        whole = request("/v1/tasks/lease", {"worker": "slow", "queues": ["none"], "wait_s": 30})
        raw.send([whole[:20], whole[:-3], whole][at % 3])
    until(lambda: server.busy == len(slow), "all of them are under way")
    id = client.submit("add")
    assert [one["id"] for one in client.lease()] == [id]


def test_too_many_connections_are_told_so(rig: Rig) -> None:
    server = rig.serve(limits=Limits(connections_max=2))
    held = [rig.raw(server) for _ in range(2)]
    for raw in held:
        raw.send(request("/v1/tasks/lease", {"worker": "w", "wait_s": 30}))
    until(lambda: server.busy == 2, "both wait for a task")
    third = rig.raw(server)
    third.send(GET.replace(b"/healthz", b"/v1/queues"))
    status, body = third.answer()
    assert (status, code(body)) == (503, "too_many")
    held[0].socket.close()
    third.socket.close()

    def served() -> bool:
        with rig.raw(server) as again:
            again.send(GET.replace(b"/healthz", b"/v1/queues"))
            return again.answer()[0] == 200

    until(served, "there is room again")


def test_too_many_bytes_in_flight_are_told_so(rig: Rig) -> None:
    server = rig.serve(limits=Limits(bodies_bytes_max=100))
    first = rig.raw(server)
    half = request("/v1/tasks", {"name": "add", "args": ["x" * 30]})
    first.send(half[:-1])
    until(lambda: server.bodies_bytes > 0, "its body is awaited")
    second = rig.raw(server)
    second.send(half)
    status, body = second.answer()
    assert (status, code(body)) == (503, "too_many")
    first.send(half[-1:])
    assert first.answer()[0] == 201


def test_stopping_ends_polls_with_what_they_have(rig: Rig, server: HttpServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rig.client(server).lease, wait_s=50)
        until(lambda: server.busy == 1, "somebody waits")
        server.request_stop()
        assert waiting.result(20) == []
    server.join(20)
    assert not server.running
    assert server.failure is None


def test_stopping_closes_what_idles(rig: Rig, server: HttpServer) -> None:
    raw = rig.raw(server)
    raw.send(GET)
    assert raw.answer()[0] == 200
    server.request_stop()
    assert raw.until_closed() == b""
    server.join(20)
    assert not server.running


def test_a_port_that_is_taken_is_told_at_once(rig: Rig, server: HttpServer) -> None:
    with pytest.raises(Invalid) as caught:
        HttpServer(lambda _: None, address=server.address, guard=Guard(server.address, ""))  # type: ignore[arg-type, return-value]
    assert caught.value.fields["address"] == str(server.address)
