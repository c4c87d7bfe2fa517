"""`GET /v1/events`: an event for each change of a subject, and reconnects with Last-Event-ID."""

from __future__ import annotations

import http.client
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from holdfast.ops.http import events
from holdfast.ops.http.server import HttpServer
from tests.api_server.served_rig import ONE_SCOPE_EACH, ServedRig, create, rig, token_of
from tests.ops.http_rig import JsonClient
from tests.process.watch import until

__all__ = ["rig"]

pytestmark = pytest.mark.timeout(60)


class Event(NamedTuple):
    id: str
    name: str
    data: Any


class EventReader:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    def next(self) -> Event | None:
        """Return the next event; None at the end of the stream."""
        fields: dict[str, str] = {}
        while line := self._response.readline().decode():
            if line == "\n":
                if "data" in fields:
                    return Event(fields["id"], fields["event"], json.loads(fields["data"]))
                fields = {}
                continue
            name, _, value = line.rstrip("\n").partition(": ")
            fields[name] = value
        return None

    def __iter__(self) -> Iterator[Event]:
        while event := self.next():
            yield event


@contextmanager
def streaming(server: HttpServer, subject: str, last_id: str = "") -> Iterator[EventReader]:
    connection = http.client.HTTPConnection(*server.address, timeout=20)
    try:
        connection.request(
            "GET", f"/v1/events?subject={subject}", headers={"Last-Event-ID": last_id}
        )
        response = connection.getresponse()
        assert (response.status, response.getheader("Content-Type")) == (200, "text/event-stream")
        yield EventReader(response)
    finally:
        connection.close()


@pytest.fixture
def server(rig: ServedRig) -> HttpServer:
    return rig.bank()


@pytest.fixture
def client(rig: ServedRig, server: HttpServer) -> JsonClient:
    made = rig.client(server)
    create(made, "ada")
    return made


def test_stream_begins_with_the_document_and_continues_with_each_change(
    server: HttpServer, client: JsonClient
) -> None:
    with streaming(server, "world/QuotedAccount/ada") as stream:
        first = stream.next()
        assert first is not None
        assert first.name == "world"
        assert first.data == client.get("/v1/worlds/QuotedAccount/ada").document
        client.post("/v1/worlds/QuotedAccount/ada/pause")
        second = stream.next()
        assert second is not None
        assert (second.data["status"], second.id != first.id) == ("paused", True)


def test_last_event_id_suppresses_an_unchanged_document_on_any_server(
    rig: ServedRig, server: HttpServer, client: JsonClient
) -> None:
    with streaming(server, "world/QuotedAccount/ada") as stream:
        first = stream.next()
    assert first is not None
    with streaming(rig.bank(), "world/QuotedAccount/ada", first.id) as stream:
        client.post("/v1/worlds/QuotedAccount/ada/pause")
        event = stream.next()
        assert event is not None
        assert event.data["status"] == "paused"
    client.post("/v1/worlds/QuotedAccount/ada/resume")
    with streaming(rig.bank(), "world/QuotedAccount/ada", event.id) as stream:
        missed = stream.next()
        assert missed is not None
        assert missed.data["status"] == "active"


def test_progress_of_a_task_is_streamed_to_its_end(server: HttpServer, client: JsonClient) -> None:
    task = client.submit("add")
    states = []
    with streaming(server, f"task/{task}") as stream:
        for event in stream:
            states.append(event.data["state"])
            if states == ["WAITING"]:
                [granted] = client.lease()
            elif states == ["WAITING", "LEASED"]:
                client.complete(granted["lease"], 3)
            else:
                break
    assert states == ["WAITING", "LEASED", "COMPLETED"]
    assert event.data["result"] == 3


def test_counts_and_readiness_are_subjects(server: HttpServer, client: JsonClient) -> None:
    with streaming(server, "counts") as stream:
        before = stream.next()
        client.submit("add")
        after = stream.next()
    assert before is not None
    assert after is not None
    assert before.data["queues"] == []
    assert after.data["queues"][0]["ready"] == 1
    assert {"flows", "effects"} <= set(after.data)
    with streaming(server, "readiness") as stream:
        event = stream.next()
        assert event is not None
        assert event.data["universe"] == "bank"


def test_stream_of_a_deleted_subject_ends_with_gone(server: HttpServer, client: JsonClient) -> None:
    with streaming(server, "world/QuotedAccount/ada") as stream:
        assert stream.next() is not None
        client.post("/v1/worlds/QuotedAccount/ada/delete")
        assert [event.name for event in stream][-1] == "gone"


@pytest.mark.parametrize(
    ("subject", "status"),
    [
        ("world/QuotedAccount/none", 404),
        ("task/1-99", 404),
        ("task", 422),
        ("world/QuotedAccount", 422),
        ("counts/more", 422),
        ("planet/x", 422),
        ("", 422),
        ("counts&universe=none", 404),
        ("counts&more=1", 422),
    ],
)
def test_invalid_or_missing_subject_is_a_problem(
    client: JsonClient, subject: str, status: int
) -> None:
    assert client.get(f"/v1/events?subject={subject}").status == status


def test_streams_are_bounded_and_free_their_place_when_they_end(
    rig: ServedRig, server: HttpServer, client: JsonClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "STREAMS_MAX", 1)
    with streaming(server, "counts") as stream:
        assert stream.next() is not None
        refused = client.get("/v1/events?subject=counts")
        assert (refused.status, refused.document["code"]) == (503, "too_many")
    until(lambda: server.busy == 0, "the client's disconnect is noticed")
    with streaming(server, "counts") as stream:
        assert stream.next() is not None


def test_streams_that_begin_at_once_are_bounded(
    rig: ServedRig, server: HttpServer, client: JsonClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "STREAMS_MAX", 3)
    request = b"GET /v1/events?subject=counts HTTP/1.1\r\nHost: localhost\r\n\r\n"
    raws = [rig.raw(server) for _ in range(12)]
    for raw in raws:
        raw.send(request)
    status_lines = [raw.socket.recv(12) for raw in raws]
    assert Counter(status_lines) == {b"HTTP/1.1 200": 3, b"HTTP/1.1 503": 9}


def test_refused_stream_and_a_head_request_free_their_place(
    server: HttpServer, client: JsonClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "STREAMS_MAX", 1)
    for _ in range(2):
        assert client.get("/v1/events?subject=task/1-99").status == 404
        assert client.get("/v1/events?subject=counts&universe=none").status == 404
        assert client.call("HEAD", "/v1/events?subject=counts").status == 200
    with streaming(server, "counts") as stream:
        assert stream.next() is not None


def test_idle_stream_stays_open_with_comments(
    server: HttpServer, client: JsonClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "COMMENT_S", 0.05)
    with streaming(server, "world/QuotedAccount/ada") as stream:
        assert stream.next() is not None
        assert stream._response.readline() == b":\n"


def test_stop_of_the_server_ends_the_streams(
    rig: ServedRig, server: HttpServer, client: JsonClient
) -> None:
    with streaming(server, "counts") as stream:
        assert stream.next() is not None
        server.request_stop()
        assert list(stream) == []
    server.join(20)
    assert not server.running


def test_stream_needs_the_scope_read(rig: ServedRig) -> None:
    server = rig.bank(ONE_SCOPE_EACH)
    refused = rig.client(server, token_of("submit")).get("/v1/events?subject=counts")
    assert (refused.status, refused.document["code"]) == (403, "scope")
