"""Hostile HTTP clients: connection exhaustion, expensive bodies, cross-site requests."""

from __future__ import annotations

import logging
import resource
import socket
from contextlib import suppress
from typing import Any

import pytest

from holdfast.ops.http import json_values
from holdfast.ops.http.limits import ConnectionLimits
from holdfast.ops.http.server import HttpServer
from holdfast.ops.http.worker_routes import GENERATIONS_MAX
from tests.ops.http_rig import (
    HttpRig,
    JsonClient,
    RawHttpConnection,
    client,
    post_request,
    problem_code,
    rig,
    server,
)
from tests.process.watch import until

pytestmark = pytest.mark.timeout(60)

__all__ = ["client", "rig", "server"]

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


# More than the socket buffers of a connection hold.
LARGE_BYTES = 4_000_000


def get_request(target: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {target} HTTP/1.1", "Host: localhost", *headers, "\r\n"]).encode()


# -- connections -----------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [b"", b"GET /hea", GET], ids=["nothing", "half a head", "enough"])
def test_idle_connections_are_evicted_for_new_requests(rig: HttpRig, said: bytes) -> None:
    server = rig.serve(limits=ConnectionLimits(connections_max=3))
    silent = [rig.raw(server) for _ in range(3)]
    for raw in silent:
        raw.send(said)
        if said == GET:
            assert raw.read_response()[0] == 200
    until(lambda: server.connections == 3, "all are there")
    for _ in range(5):
        newcomer = rig.raw(server)
        newcomer.send(GET)
        assert newcomer.read_response()[0] == 200
    assert server.connections == 3


def test_longest_idle_connection_is_evicted_first(rig: HttpRig) -> None:
    server = rig.serve(limits=ConnectionLimits(connections_max=2))
    first, second = rig.raw(server), rig.raw(server)
    for raw in (first, second, first):
        raw.send(GET)
        assert raw.read_response()[0] == 200
    third = rig.raw(server)
    third.send(GET)
    assert third.read_response()[0] == 200
    assert second.read_until_closed() == b""
    first.send(GET)
    assert first.read_response()[0] == 200


def test_connections_max_is_half_of_the_open_file_limit(
    rig: HttpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 1_000))
    assert rig.serve().connections_max == 50


def test_accept_without_a_free_file_warns_once_and_continues(
    rig: HttpRig,
    server: HttpServer,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as waiting, caplog.at_level(logging.WARNING):
        waiting.settimeout(20)
        try:
            # No number of a file is free below this limit.
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            waiting.connect((server.address.host, server.address.port))
            until(lambda: any("accept" in text for text in caplog.messages), "the warning")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        waiting.sendall(GET)
        assert waiting.recv(12) == b"HTTP/1.1 200"
    refused = [text for text in caplog.messages if "accept" in text]
    assert refused == ["cannot accept connections: [Errno 24] Too many open files"]
    assert "Traceback" not in capfd.readouterr().err


def connect_with_unread_response(rig: HttpRig, server: HttpServer) -> RawHttpConnection:
    """A connection that requested a large response and does not read it."""
    id = rig.client(server).submit("add", "x" * LARGE_BYTES)
    raw = rig.raw(server, receive_buffer_bytes=4096)
    raw.send(get_request(f"/v1/tasks/{id}", "Connection: close"))
    until(lambda: server.connections == 2, "it is there")
    return raw


def test_connection_with_an_unread_response_is_closed_after_answer_s(rig: HttpRig) -> None:
    # Long enough to observe the connection before it is closed, on a busy machine too.
    server = rig.serve(limits=ConnectionLimits(answer_s=1.0))
    unread = connect_with_unread_response(rig, server)
    until(lambda: server.connections == 1, "it is gone")
    assert len(unread.read_until_closed()) < LARGE_BYTES


def test_response_in_progress_is_completed_after_request_stop(
    rig: HttpRig, server: HttpServer
) -> None:
    slow = connect_with_unread_response(rig, server)
    until(lambda: server.busy == 1, "it is being answered")
    server.request_stop()
    assert len(slow.read_until_closed()) > LARGE_BYTES


def connections_are(server: HttpServer, *, unsent: int, serving: int) -> bool:
    """Whether these numbers of connections have unsent bytes and a request in progress."""
    with suppress(RuntimeError):  # the dict may change while this thread reads it
        connections = list(server._connections.values())
        unsent_now = sum(connection.has_unsent for connection in connections)
        return (
            unsent_now,
            sum(connection.client_wait_since_s is None for connection in connections),
        ) == (
            unsent,
            serving,
        )
    return False


def test_connection_with_an_unread_response_is_evicted_for_a_new_request(rig: HttpRig) -> None:
    server = rig.serve(limits=ConnectionLimits(connections_max=2))
    unread = connect_with_unread_response(rig, server)
    until(lambda: connections_are(server, unsent=1, serving=0), "its answer lies there")
    # The queue `q` is empty.
    rig.raw(server).send(
        post_request("/v1/tasks/lease", {"worker": "w", "queues": ["q"], "wait_s": 30})
    )
    until(lambda: connections_are(server, unsent=1, serving=1), "somebody waits for a task")
    newcomer = rig.raw(server)
    newcomer.send(GET)
    assert newcomer.read_response()[0] == 200
    assert len(unread.read_until_closed()) < LARGE_BYTES


def test_leases_of_an_evicted_connection_are_released(rig: HttpRig) -> None:
    server = rig.serve(limits=ConnectionLimits(connections_max=2))
    submitter = rig.client(server)
    ids = [submitter.submit("add", "x" * LARGE_BYTES) for _ in range(2)]
    unread = rig.raw(server, receive_buffer_bytes=4096)
    unread.send(post_request("/v1/tasks/lease", {"worker": "deaf", "limit": 2}))
    until(lambda: connections_are(server, unsent=1, serving=0), "its answer lies there")
    rig.raw(server).send(
        post_request("/v1/tasks/lease", {"worker": "w", "queues": ["q"], "wait_s": 30})
    )
    until(lambda: connections_are(server, unsent=1, serving=1), "somebody waits for a task")
    observer = rig.client(server)

    def are_waiting() -> bool:
        return {observer.task(id)["state"] for id in ids} == {"WAITING"}

    until(are_waiting, "both wait again")
    assert [observer.task(id)["expiries"] for id in ids] == [0, 0]


# -- request heads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["//[", "/v1/queues#top", "//[::1/v1/queues"])
def test_invalid_request_target_is_refused(rig: HttpRig, server: HttpServer, target: str) -> None:
    raw = rig.raw(server)
    raw.send(get_request(target))
    status, body = raw.read_response()
    assert (status, problem_code(body)) in ((400, "bad_request"), (404, "no_route"))


def test_path_with_a_double_slash_is_no_route(rig: HttpRig, server: HttpServer) -> None:
    """A proxy that filters by path must see the same path as the server."""
    raw = rig.raw(server)
    raw.send(get_request("//other.example/v1/queues"))
    status, body = raw.read_response()
    assert (status, problem_code(body)) == (404, "no_route")


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_cross_site_fetch_is_forbidden(rig: HttpRig, server: HttpServer, site: str) -> None:
    raw = rig.raw(server)
    raw.send(get_request("/v1/queues", f"Sec-Fetch-Site: {site}"))
    status, body = raw.read_response()
    assert (status, problem_code(body)) == (403, "forbidden")


# -- bodies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/v1/tasks", {"tasks": [{"name": "add"}], "options": {"queue": "q"}}),
        ("/v1/tasks", {"tasks": [{"name": "add"}], "args": [1]}),
        ("/v1/tasks/complete", {"worker": "w", "reports": [], "result": 1}),
        ("/v1/tasks/fail", {"worker": "w", "reports": [], "end": "refused"}),
        ("/v1/tasks/fail", {"worker": "w", "reports": [], "lease": "1-1-1"}),
    ],
)
def test_single_task_fields_beside_a_list_are_refused(
    client: JsonClient, path: str, document: Any
) -> None:
    response = client.post(path, document)
    assert (response.status, response.document["code"]) == (422, "invalid")
    assert client.get("/v1/tasks").document["tasks"] == []


def test_body_with_too_many_parts_is_refused(
    client: JsonClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_values, "PARTS_MAX", 100)
    response = client.post("/v1/tasks", {"name": "add", "args": [[]] * 100})
    assert (response.status, response.document["code"]) == (422, "too_many_parts")


def test_brackets_in_a_string_do_not_count_as_parts(
    client: JsonClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_values, "PARTS_MAX", 100)
    text = '[{"\\' * 200
    id = client.submit("add", text)
    assert client.task(id)["args"] == [text]


def test_request_with_leases_of_too_many_generations_is_refused(client: JsonClient) -> None:
    """Each generation costs a commit, and a client can invent generations at no cost."""
    leases = [{"lease": f"{generation}-1-1"} for generation in range(1, GENERATIONS_MAX + 2)]
    response = client.post("/v1/tasks/heartbeat", {"leases": leases[:-1]})
    assert {reply["answer"] for reply in response.document["leases"]} == {"REJECTED"}
    for path in ("heartbeat", "complete"):
        body = {"leases": leases} if path == "heartbeat" else {"worker": "w", "reports": leases}
        assert client.post(f"/v1/tasks/{path}", body).document["code"] == "invalid"


# -- half-closed connections and eviction ----------------------------------------------------------


def test_half_closed_connection_gets_an_empty_lease_response(
    rig: HttpRig, server: HttpServer
) -> None:
    raw = rig.raw(server)
    raw.send(post_request("/v1/tasks/lease", {"worker": "w", "wait_s": 30}))
    raw.socket.shutdown(socket.SHUT_WR)
    status, body = raw.read_response()
    assert (status, body) == (200, b'{"tasks":[],"suspects":false}')


def test_healthz_is_answered_when_all_connections_are_busy(rig: HttpRig) -> None:
    server = rig.serve(
        limits=ConnectionLimits(connections_max=3, unproven_share=1, unproven_per_peer_share=1)
    )
    polls = [rig.raw(server) for _ in range(3)]
    for raw in polls:
        raw.send(post_request("/v1/tasks/lease", {"worker": "w", "queues": ["q"], "wait_s": 30}))
    until(lambda: server.busy == 3, "all of them wait")
    for _ in range(3):
        newcomer = rig.raw(server)
        newcomer.send(GET)
        assert newcomer.read_response()[0] == 200
        refused = rig.raw(server)
        refused.send(get_request("/v1/queues"))
        status, body = refused.read_response()
        assert (status, problem_code(body)) == (503, "too_many")
    assert server.connections == 3


def test_healthz_is_answered_despite_silent_rejected_connections(rig: HttpRig) -> None:
    limits = ConnectionLimits(connections_max=1, rejected_max=2, rejected_head_s=60)
    server = rig.serve(limits=limits)
    poll = rig.raw(server)
    poll.send(post_request("/v1/tasks/lease", {"worker": "w", "queues": ["q"], "wait_s": 30}))
    until(lambda: server.busy == 1, "it waits")
    silent = [rig.raw(server) for _ in range(5)]
    newcomer = rig.raw(server)
    newcomer.send(GET)
    assert newcomer.read_response()[0] == 200
    assert silent[0].read_until_closed() == b""


def test_stalled_body_is_evicted_for_an_arriving_body(rig: HttpRig) -> None:
    limits = ConnectionLimits(bodies_bytes_max=100_000, unproven_grace_s=0.0, body_pause_s=60)
    server = rig.serve(limits=limits)
    whole = post_request("/v1/tasks", {"name": "add", "args": ["x" * 60_000]})
    stalled = rig.raw(server)
    stalled.send(whole[:-1])
    until(lambda: server.bodies_bytes > 60_000, "it is kept")
    other = rig.raw(server)
    other.send(whole)
    assert other.read_response()[0] == 201
    assert stalled.read_until_closed() == b""
    until(lambda: server.bodies_bytes == 0, "nothing is kept")


def test_bodies_bytes_counts_received_bytes_only(rig: HttpRig) -> None:
    server = rig.serve(limits=ConnectionLimits(bodies_bytes_max=50_000))
    raw = rig.raw(server)
    raw.send(post_request("/v1/tasks", {"name": "add", "args": ["x" * 40_000]})[:1_000])
    until(lambda: server.busy == 1 and server.bodies_bytes > 0, "some of it is kept")
    assert server.bodies_bytes < 1_000
    assert rig.client(server).submit("add", "x" * 40_000)
    raw.socket.close()
    until(lambda: server.bodies_bytes == 0, "nothing is kept")
    assert rig.client(server).post("/v1/tasks", {"name": "x" * 60_000}).status == 503
    until(lambda: server.bodies_bytes == 0, "nothing is kept of what was refused")


def test_unproven_connections_above_the_share_of_an_address_are_evicted(rig: HttpRig) -> None:
    limits = ConnectionLimits(connections_max=8, unproven_grace_s=0.0)
    server = rig.serve(limits=limits)
    proven = rig.raw(server)
    proven.send(GET)
    assert proven.read_response()[0] == 200
    silent = [rig.raw(server) for _ in range(20)]
    assert silent[0].read_until_closed() == b""
    until(lambda: server.connections <= 4, "a few of them are kept")
    proven.send(GET)
    assert proven.read_response()[0] == 200
