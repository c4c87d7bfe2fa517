"""Asks over HTTP: clients that disconnect while they wait, and the error of a reducer."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable
from urllib.parse import quote

import pytest

from holdfast.config import ERROR_TEXT_CHARS_MAX
from holdfast.ops.api.exception_text import exception_text
from holdfast.ops.http.threads import WAITING_THREADS
from tests.api_server.served_rig import ServedRig, rig
from tests.ops.app import app
from tests.ops.http_rig import post_request
from tests.process.watch import until

__all__ = ["rig"]

pytestmark = pytest.mark.timeout(60)

ASK = "/v1/worlds/QuotedAccount/ada/ask"
# Longer than this test. No worker of these servers handles the event.
FOREVER = {"type": "QuotedDeposit", "event": {"amount": 1}, "timeout_s": 60}


@pytest.mark.parametrize("leave", ["close", "shutdown"])
def test_clients_that_disconnect_free_their_threads(rig: ServedRig, leave: str) -> None:
    server = rig.bank()
    raws = [rig.raw(server) for _ in range(WAITING_THREADS)]
    for raw in raws:
        raw.send(post_request(ASK, FOREVER))
    client = rig.client(server)
    short = {**FOREVER, "timeout_s": 0.05}
    until(lambda: client.post(ASK, short).document["code"] == "too_many", "all threads wait")
    for raw in raws:
        if leave == "close":
            raw.socket.close()
        else:
            raw.socket.shutdown(socket.SHUT_WR)
    until(lambda: client.post(ASK, short).document["code"] == "timeout", "a thread is free")
    if leave == "shutdown":
        assert {raw.read_response()[0] for raw in raws} == {503}


def test_one_abandoned_ask_leaves_the_other_waiting(rig: ServedRig) -> None:
    server = rig.bank()
    leaving, staying = rig.raw(server), rig.raw(server)
    for raw in (leaving, staying):
        raw.send(post_request(ASK, FOREVER))
    until(lambda: server.busy == 2, "both wait")
    leaving.socket.close()
    until(lambda: server.busy == 1, "the abandoned ask has ended")
    with app.open(rig.store):
        assert staying.read_response() == (200, b'{"reply":1}')


def test_error_of_a_reducer_has_its_text_and_no_source_paths(rig: ServedRig) -> None:
    client = rig.client(rig.bank())
    with app.open(rig.store):
        response = client.post(ASK, {"type": "Refused"})
    assert (response.status, response.document["code"]) == (409, "no_reply")
    assert "error='ValueError: this account refuses'" in response.document["detail"]
    assert "app.py" not in response.document["detail"]
    [queue] = client.get("/v1/dead").document["items"]
    [letter] = client.get(f"/v1/dead/{quote(queue['queue'], safe='')}").document["items"]
    assert "app.py" in letter["error"]


def fail_simply() -> None:
    raise ValueError("no credit\nat all")


def fail_with_a_cause() -> None:
    try:
        fail_simply()
    except ValueError as error:
        raise KeyError("card") from error


def fail_as_a_group() -> None:
    raise ExceptionGroup("several", [ValueError("one"), TypeError("two")])


def fail_in_source() -> None:
    compile("1 +", "/srv/source.py", "exec")


def fail_deeply() -> None:
    fail_deeply()


def fail_at_length() -> None:
    raise ValueError("x" * 2 * ERROR_TEXT_CHARS_MAX)


@pytest.mark.parametrize(
    ("fail", "text"),
    [
        (fail_simply, "ValueError: no credit\nat all"),
        (fail_with_a_cause, "KeyError: 'card'"),
        (fail_as_a_group, "ExceptionGroup: several (2 sub-exceptions)"),
        (fail_in_source, "SyntaxError: invalid syntax"),
        (fail_deeply, "RecursionError: maximum recursion depth exceeded"),
        (fail_at_length, "x" * (ERROR_TEXT_CHARS_MAX - 1)),
    ],
)
def test_exception_text_is_the_last_exception_of_a_traceback(
    fail: Callable[[], None], text: str
) -> None:
    try:
        fail()
    except Exception as error:
        stored = "".join(traceback.format_exception(error))[-ERROR_TEXT_CHARS_MAX:]
    assert exception_text(stored) == text


@pytest.mark.parametrize("text", ["", "invalid: what='handler'"])
def test_text_without_a_traceback_is_unchanged(text: str) -> None:
    assert exception_text(text) == text


@pytest.mark.parametrize("cut", range(0, 400, 7))
def test_text_that_begins_within_a_frame_has_no_source_path(cut: int) -> None:
    try:
        fail_simply()
    except ValueError as error:
        stored = "".join(traceback.format_exception(error))
    stored = stored[min(cut, stored.index("ValueError: no credit")) :]
    stored += "x" * (ERROR_TEXT_CHARS_MAX - len(stored))
    assert "test_asks.py" not in exception_text(stored)
    assert "raise ValueError" not in exception_text(stored)
