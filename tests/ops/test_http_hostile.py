"""Those who mean no good: connections that are kept from others, bodies made to cost, pages of other sites."""

from __future__ import annotations

import resource
import socket
from contextlib import suppress
from typing import Any

import pytest

from holdfast.ops.http import values
from holdfast.ops.http.connection import Limits
from holdfast.ops.http.server import HttpServer
from holdfast.ops.http.work import GENERATIONS_MAX
from tests.ops.http_rig import Client, Raw, Rig, client, code, request, rig, server
from tests.process.watch import until

pytestmark = pytest.mark.timeout(60)

__all__ = ["client", "rig", "server"]

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


# More than the buffers of a connection take.
LARGE = 4_000_000


def get(target: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {target} HTTP/1.1", "Host: localhost", *headers, "\r\n"]).encode()


# -- connections -----------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [b"", b"GET /hea", GET], ids=["nothing", "half a head", "enough"])
def test_connections_that_ask_for_nothing_keep_nobody_out(rig: Rig, said: bytes) -> None:
    server = rig.serve(limits=Limits(connections_max=3))
    silent = [rig.raw(server) for _ in range(3)]
    for raw in silent:
        raw.send(said)
        if said == GET:
            assert raw.answer()[0] == 200
    until(lambda: server.connections == 3, "all are there")
    for _ in range(5):
        late = rig.raw(server)
        late.send(GET)
        assert late.answer()[0] == 200
    assert server.connections == 3


def test_of_those_who_are_silent_the_longest_gives_way(rig: Rig) -> None:
    server = rig.serve(limits=Limits(connections_max=2))
    first, second = rig.raw(server), rig.raw(server)
    for raw in (first, second, first):
        raw.send(GET)
        assert raw.answer()[0] == 200
    third = rig.raw(server)
    third.send(GET)
    assert third.answer()[0] == 200
    assert second.until_closed() == b""
    first.send(GET)
    assert first.answer()[0] == 200


def test_half_of_the_files_that_a_process_may_open_are_not_for_connections(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 1_000))
    assert rig.serve().connections_max == 50


def asking_for_more_than_fits(rig: Rig, server: HttpServer) -> Raw:
    """A connection on which a large answer was asked for and none of it is read."""
    id = rig.client(server).submit("add", "x" * LARGE)
    raw = rig.raw(server, receives=4096)
    raw.send(get(f"/v1/tasks/{id}", "Connection: close"))
    until(lambda: server.connections == 2, "it is there")
    return raw


def test_whoever_does_not_take_an_answer_is_hung_up_on_and_counts_until_then(rig: Rig) -> None:
    # So long that it is seen before it is gone, on a busy machine too.
    server = rig.serve(limits=Limits(answer_s=1.0))
    deaf = asking_for_more_than_fits(rig, server)
    until(lambda: server.connections == 1, "it is gone")
    assert len(deaf.until_closed()) < LARGE


def test_an_answer_that_is_being_read_outlives_the_server(rig: Rig, server: HttpServer) -> None:
    slow = asking_for_more_than_fits(rig, server)
    until(lambda: server.busy == 1, "it is being answered")
    server.request_stop()
    assert len(slow.until_closed()) > LARGE


def stand(server: HttpServer, *, unread: int, asking: int) -> bool:
    """Whether so many do not take their answers, and so many wait for theirs."""
    with suppress(RuntimeError):  # they are counted from another thread than theirs
        found = list(server._connections.values())
        unread_now = sum(one.unread for one in found)
        return (unread_now, sum(one.waits_since_s is None for one in found)) == (unread, asking)
    return False


def test_whoever_does_not_take_an_answer_keeps_nobody_out(rig: Rig) -> None:
    server = rig.serve(limits=Limits(connections_max=2))
    deaf = asking_for_more_than_fits(rig, server)
    until(lambda: stand(server, unread=1, asking=0), "its answer lies there")
    # Of a queue that is empty.
    rig.raw(server).send(request("/v1/tasks/lease", {"worker": "w", "queues": ["q"], "wait_s": 30}))
    until(lambda: stand(server, unread=1, asking=1), "somebody waits for a task")
    late = rig.raw(server)
    late.send(GET)
    assert late.answer()[0] == 200
    assert len(deaf.until_closed()) < LARGE


def test_what_was_granted_to_whoever_gave_way_is_given_back(rig: Rig) -> None:
    server = rig.serve(limits=Limits(connections_max=2))
    submitter = rig.client(server)
    ids = [submitter.submit("add", "x" * LARGE) for _ in range(2)]
    deaf = rig.raw(server, receives=4096)
    deaf.send(request("/v1/tasks/lease", {"worker": "deaf", "limit": 2}))
    until(lambda: stand(server, unread=1, asking=0), "its answer lies there")
    rig.raw(server).send(request("/v1/tasks/lease", {"worker": "w", "queues": ["q"], "wait_s": 30}))
    until(lambda: stand(server, unread=1, asking=1), "somebody waits for a task")
    late = rig.client(server)

    def wait_again() -> bool:
        return {late.task(id)["state"] for id in ids} == {"WAITING"}

    until(wait_again, "both wait again")
    assert [late.task(id)["expiries"] for id in ids] == [0, 0]


# -- heads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["//[", "/v1/queues#top", "//[::1/v1/queues"])
def test_a_target_that_is_none_is_refused(rig: Rig, server: HttpServer, target: str) -> None:
    raw = rig.raw(server)
    raw.send(get(target))
    status, body = raw.answer()
    assert (status, code(body)) in ((400, "bad_request"), (404, "no_route"))


def test_a_path_has_one_spelling(rig: Rig, server: HttpServer) -> None:
    """Whoever lets only some paths through, in front of us, must see those that we see."""
    raw = rig.raw(server)
    raw.send(get("//other.example/v1/queues"))
    status, body = raw.answer()
    assert (status, code(body)) == (404, "no_route")


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_a_page_of_another_site_embeds_is_refused(
    rig: Rig, server: HttpServer, site: str
) -> None:
    raw = rig.raw(server)
    raw.send(get("/v1/queues", f"Sec-Fetch-Site: {site}"))
    status, body = raw.answer()
    assert (status, code(body)) == (403, "forbidden")


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
def test_what_would_be_passed_over_beside_a_list_is_refused(
    client: Client, path: str, document: Any
) -> None:
    answer = client.post(path, document)
    assert (answer.status, answer.document["code"]) == (422, "invalid")
    assert client.get("/v1/tasks").document["tasks"] == []


def test_many_small_lists_are_refused_before_they_are_made(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "PARTS_MAX", 100)
    answer = client.post("/v1/tasks", {"name": "add", "args": [[]] * 100})
    assert (answer.status, answer.document["code"]) == (422, "too_many_parts")


def test_brackets_in_text_are_text(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "PARTS_MAX", 100)
    text = '[{"\\' * 200
    id = client.submit("add", text)
    assert client.task(id)["args"] == [text]


def test_leases_of_a_few_generations_are_taken_at_a_time(client: Client) -> None:
    """Each is a commit, and it takes no more to make somebody up than to write numbers."""
    leases = [{"lease": f"{generation}-1-1"} for generation in range(1, GENERATIONS_MAX + 2)]
    answer = client.post("/v1/tasks/heartbeat", {"leases": leases[:-1]})
    assert {one["answer"] for one in answer.document["leases"]} == {"REJECTED"}
    for path in ("heartbeat", "complete"):
        said = {"leases": leases} if path == "heartbeat" else {"worker": "w", "reports": leases}
        assert client.post(f"/v1/tasks/{path}", said).document["code"] == "invalid"


# -- half of a connection --------------------------------------------------------------------------


def test_whoever_has_closed_its_side_is_told_that_there_is_nothing(
    rig: Rig, server: HttpServer
) -> None:
    raw = rig.raw(server)
    raw.send(request("/v1/tasks/lease", {"worker": "w", "wait_s": 30}))
    raw.socket.shutdown(socket.SHUT_WR)
    status, body = raw.answer()
    assert (status, body) == (200, b'{"tasks":[],"suspects":false}')


def test_health_is_answered_though_every_connection_has_a_request_under_way(rig: Rig) -> None:
    server = rig.serve(
        limits=Limits(connections_max=3, unproven_share=1, unproven_per_peer_share=1)
    )
    polls = [rig.raw(server) for _ in range(3)]
    for raw in polls:
        raw.send(request("/v1/tasks/lease", {"worker": "w", "queues": ["q"], "wait_s": 30}))
    until(lambda: server.busy == 3, "all of them wait")
    for _ in range(3):
        late = rig.raw(server)
        late.send(GET)
        assert late.answer()[0] == 200
        refused = rig.raw(server)
        refused.send(get("/v1/queues"))
        status, body = refused.answer()
        assert (status, code(body)) == (503, "too_many")
    assert server.connections == 3


def test_silent_connections_that_are_one_too_many_keep_health_from_nobody(rig: Rig) -> None:
    limits = Limits(connections_max=1, refused_max=2, refused_head_s=60)
    server = rig.serve(limits=limits)
    poll = rig.raw(server)
    poll.send(request("/v1/tasks/lease", {"worker": "w", "queues": ["q"], "wait_s": 30}))
    until(lambda: server.busy == 1, "it waits")
    silent = [rig.raw(server) for _ in range(5)]
    late = rig.raw(server)
    late.send(GET)
    assert late.answer()[0] == 200
    assert silent[0].until_closed() == b""


def test_bodies_that_stall_give_way_to_one_that_arrives(rig: Rig) -> None:
    limits = Limits(bodies_bytes_max=100_000, unproven_grace_s=0.0, body_pause_s=60)
    server = rig.serve(limits=limits)
    whole = request("/v1/tasks", {"name": "add", "args": ["x" * 60_000]})
    stalled = rig.raw(server)
    stalled.send(whole[:-1])
    until(lambda: server.bodies_bytes > 60_000, "it is kept")
    other = rig.raw(server)
    other.send(whole)
    assert other.answer()[0] == 201
    assert stalled.until_closed() == b""
    until(lambda: server.bodies_bytes == 0, "nothing is kept")


def test_bytes_of_bodies_count_as_they_arrive(rig: Rig) -> None:
    server = rig.serve(limits=Limits(bodies_bytes_max=50_000))
    raw = rig.raw(server)
    raw.send(request("/v1/tasks", {"name": "add", "args": ["x" * 40_000]})[:1_000])
    until(lambda: server.busy == 1 and server.bodies_bytes > 0, "some of it is kept")
    assert server.bodies_bytes < 1_000
    assert rig.client(server).submit("add", "x" * 40_000)
    raw.socket.close()
    until(lambda: server.bodies_bytes == 0, "nothing is kept")
    assert rig.client(server).post("/v1/tasks", {"name": "x" * 60_000}).status == 503
    until(lambda: server.bodies_bytes == 0, "nothing is kept of what was refused")


def test_unproven_connections_of_one_address_give_way_above_their_share(rig: Rig) -> None:
    limits = Limits(connections_max=8, unproven_grace_s=0.0)
    server = rig.serve(limits=limits)
    known = rig.raw(server)
    known.send(GET)
    assert known.answer()[0] == 200
    silent = [rig.raw(server) for _ in range(20)]
    assert silent[0].until_closed() == b""
    until(lambda: server.connections <= 4, "a few of them are kept")
    known.send(GET)
    assert known.answer()[0] == 200
