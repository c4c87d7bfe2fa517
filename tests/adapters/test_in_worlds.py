"""The shipped effects inside worlds, against real servers: what is tried again, how often, as whom.

An answer decides: what passes is tried again with the same key, what is final is one call and one
receipt.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme
from aiosmtpd.smtp import Envelope

import holdfast as hf
from holdfast.adapters.smtp import Server as MailServer
from tests.adapters.rig import LOOPBACK, Route, Seen, Server, answer, context_for, serving
from tests.adapters.test_email import ME, SECRET, Inbox, read, receiving, starttls
from tests.adapters.test_llm import HELLO, PATH, completion

MODULES = ("holdfast.app.shipped.http", "holdfast.app.shipped.llm", "holdfast.app.shipped.email")

ATTEMPTS = 3
WAIT_S = 30.0


class Want(hf.Event):
    args: list[Any]


class Unwant(hf.Event):
    """Stop wanting what was wanted last."""


class Told(msgspec.Struct, frozen=True):
    status: str
    code: str
    attempts: int
    cost: float
    value: Any = None


@contextmanager
def wanting(effect: Any) -> Iterator[Any]:
    """A way to want this effect from inside a world, and to be told of its one receipt."""

    class Wanter(hf.World):
        told: list[Told] = msgspec.field(default_factory=list)
        last: bytes = b""

        @hf.on(Want)
        def want(self, event: Want, cx: hf.Context) -> None:
            self.last = cx.do(effect, *event.args).intent_hash

        @hf.on(Unwant)
        def unwant(self, event: Unwant, cx: hf.Context) -> None:
            cx.cancel(self.last)

        @hf.on(effect)
        def heard(self, receipt: hf.Receipt[Any], cx: hf.Context) -> None:
            value = msgspec.to_builtins(receipt.value) if receipt.ok else receipt.error
            told = Told(receipt.status, receipt.code, receipt.attempts, receipt.cost, value)
            self.told.append(told)

    with hf.App("wanting", worlds=[Wanter]).open("memory:") as runtime:
        world = runtime.world(Wanter, "ada")
        world.create()

        def want(*args: Any, until: threading.Event | None = None) -> Told:
            """Wait for the receipt; or until something has happened, and then stop wanting it."""
            before = len(world.state().told)
            world.send(Want(list(args)))
            if until is not None:
                assert until.wait(WAIT_S)
                world.send(Unwant())
            deadline = time.monotonic() + WAIT_S
            while len(world.state().told) == before:
                assert time.monotonic() < deadline, "no receipt came"
                time.sleep(0.005)
            told: Told = world.state().told[-1]
            return told

        yield want


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def in_turn(server: Server, *routes: Route) -> Route:
    """The first call gets the first answer, and so on; the last one is kept."""

    def route(handler: Any, seen: Seen) -> None:
        routes[min(len(server.seen), len(routes)) - 1](handler, seen)

    return route


def keys(server: Server) -> list[str]:
    return [seen.headers["idempotency-key"] for seen in server.seen]


# -- chat ----------------------------------------------------------------------------------------


def chatting(server: Server, **options: Any) -> Any:
    prices = {"m": hf.llm.Price(input=1.0, output=10.0)}
    endpoint = hf.llm.Endpoint(server.url("/v1"), SECRET, prices)
    return hf.llm.declare(endpoint=endpoint, attempts=ATTEMPTS, **options)


def test_a_chat_brings_its_usage_and_its_cost(server: Server) -> None:
    server.routes[PATH] = answer(200, completion("Hi", usage=(7, 3)))
    with wanting(chatting(server)) as want:
        told = want(HELLO, "m")
    assert (told.status, told.attempts, told.cost) == ("ok", 1, pytest.approx(37e-6))
    assert told.value["usage"] == {"input_tokens": 7, "output_tokens": 3}


@pytest.mark.parametrize("status", [408, 429, 500, 503, 529])
def test_a_chat_that_was_put_off_is_tried_again_with_its_key(server: Server, status: int) -> None:
    server.routes[PATH] = in_turn(server, answer(status), answer(status), answer(200, completion()))
    with wanting(chatting(server)) as want:
        told = want(HELLO, "m")
    assert (told.status, told.attempts) == ("ok", 3)
    assert len(keys(server)) == 3
    assert len(set(keys(server))) == 1


def test_a_chat_waits_as_long_as_it_was_asked_to(server: Server) -> None:
    times: list[float] = []

    def noted(handler: Any, seen: Seen) -> None:
        times.append(time.monotonic())
        first = len(times) == 1
        answer(429 if first else 200, completion(), {"retry-after": "1"} if first else {})(
            handler, seen
        )

    server.routes[PATH] = noted
    with wanting(chatting(server)) as want:
        assert want(HELLO, "m").status == "ok"
    assert times[1] - times[0] >= 1.0


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_a_chat_that_was_refused_is_one_call(server: Server, status: int) -> None:
    server.routes[PATH] = answer(status, b"no")
    with wanting(chatting(server)) as want:
        told = want(HELLO, "m")
    assert (told.status, told.code, told.attempts, told.cost) == ("error", "error_status", 1, 0.0)
    assert len(server.seen) == 1


@pytest.mark.parametrize("body", [b"junk", b"[" * 100_000, completion(usage=(1, 10**30))])
def test_a_chat_whose_answer_cannot_be_read_is_not_paid_twice(server: Server, body: bytes) -> None:
    server.routes[PATH] = answer(200, body)
    with wanting(chatting(server)) as want:
        told = want(HELLO, "m")
    assert (told.status, told.code, told.attempts) == ("error", "bad_answer", 1)
    assert len(server.seen) == 1


def test_a_chat_that_is_put_off_for_ever_ends_with_its_attempts(server: Server) -> None:
    server.routes[PATH] = answer(503)
    with wanting(chatting(server)) as want:
        told = want(HELLO, "m")
    assert (told.status, told.code, told.attempts) == ("error", "unavailable", ATTEMPTS)
    assert SECRET not in told.value


def test_a_chat_that_nobody_answers_ends_in_a_timeout(server: Server) -> None:
    def hang(handler: Any, seen: Seen) -> None:
        server.over.wait(30)

    server.routes[PATH] = hang
    with wanting(chatting(server)) as want:
        told = want(HELLO, "m", {"timeout_s": 0.2})
    assert (told.status, told.attempts) == ("timeout", ATTEMPTS)
    assert len(set(keys(server))) == 1


# -- http ----------------------------------------------------------------------------------------


def requesting(**options: Any) -> Any:
    return hf.http.declare("http.request", LOOPBACK, attempts=ATTEMPTS, **options)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_request_that_was_put_off_is_tried_again_with_its_key(
    server: Server, status: int
) -> None:
    server.routes["/"] = in_turn(server, answer(status), answer(200, b"at last"))
    with wanting(requesting()) as want:
        told = want("POST", server.url(), {"body": b"x"})
    assert (told.status, told.attempts) == ("ok", 2)
    assert len(set(keys(server))) == 1
    assert [seen.body for seen in server.seen] == [b"x", b"x"]


@pytest.mark.parametrize("status", [400, 404, 409, 500])
def test_another_status_is_the_result_or_one_error(server: Server, status: int) -> None:
    server.routes["/"] = answer(status, b"why")
    with wanting(requesting()) as want:
        told = want("GET", server.url())
        assert (told.status, told.value["status"]) == ("ok", status)
        told = want("GET", server.url(), {"errors": "raise"})
        assert (told.status, told.code, told.attempts) == ("error", "error_status", 1)
    assert len(server.seen) == 2


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/", "http://10.0.0.1/", "file:///etc/passwd", "http://0x7f.1/"]
)
def test_a_forbidden_address_is_one_error(url: str) -> None:
    with wanting(requesting()) as want:
        told = want("GET", url)
    assert (told.status, told.code, told.attempts) == ("error", "forbidden_address", 1)


def test_two_requests_have_two_keys(server: Server) -> None:
    server.routes["/"] = answer()
    with wanting(requesting()) as want:
        want("GET", server.url())
        want("GET", server.url())
    assert len(set(keys(server))) == 2


def test_a_request_that_nobody_wants_any_more_is_broken_off(server: Server) -> None:
    called, gone = threading.Event(), threading.Event()

    def wait_for_the_end(handler: Any, seen: Seen) -> None:
        called.set()
        handler.connection.settimeout(WAIT_S)
        if handler.connection.recv(1) == b"":
            gone.set()

    server.routes["/"] = wait_for_the_end
    with wanting(requesting()) as want:
        told = want("GET", server.url(), until=called)
        assert (told.status, told.code) == ("error", "cancelled")
        assert gone.wait(WAIT_S), "the connection was closed"
    assert len(server.seen) == 1


# -- mail ----------------------------------------------------------------------------------------


class Moody(Inbox):
    """Answers to one text after another; what it heard is kept, taken or not."""

    def __init__(self, *moods: str) -> None:
        super().__init__()
        self.moods = list(moods)
        self.heard: list[str] = []

    async def handle_DATA(self, server: Any, session: Any, envelope: Envelope) -> str:
        self.heard.append(read(envelope)["Message-ID"])
        self.at_end = self.moods.pop(0) if self.moods else "250 OK"
        return await super().handle_DATA(server, session, envelope)


def mailing(port: int, **server: Any) -> Any:
    told = {"sender": ME, "tls": "none", **server}
    return hf.email.declare(server=MailServer("127.0.0.1", port, **told), attempts=ATTEMPTS)


MAIL = ("ada@example.org", "Hello", "Text\n")


def test_mail_that_was_put_off_or_cut_short_keeps_its_message_id() -> None:
    inbox = Moody("451 later", "hang up")
    with receiving(inbox) as (_, port), wanting(mailing(port)) as want:
        told = want(*MAIL)
    assert (told.status, told.attempts) == ("ok", 3)
    assert inbox.heard == [told.value["message_id"]] * 3
    assert len(inbox.mails) == 1


def test_mail_that_was_refused_is_one_call() -> None:
    inbox = Moody("554 no", "250 OK")
    with receiving(inbox) as (_, port), wanting(mailing(port)) as want:
        told = want(*MAIL)
    assert (told.status, told.code, told.attempts) == ("error", "error_status", 1)
    assert len(inbox.heard) == 1


def test_two_mails_have_two_ids() -> None:
    inbox = Moody()
    with receiving(inbox) as (_, port), wanting(mailing(port)) as want:
        want(*MAIL)
        want(*MAIL)
    assert len(set(inbox.heard)) == 2


def test_mail_goes_out_over_starttls_after_a_log_in(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with starttls(context_for(authority, "127.0.0.1")) as (inbox, port):
        effect = mailing(
            port, user="robot", password=SECRET, tls="starttls", ca_file=str(tmp_path / "ca.pem")
        )
        with wanting(effect) as want:
            assert want(*MAIL).status == "ok"
    assert len(inbox.mails) == 1


def test_a_header_with_a_line_break_is_one_error_and_no_mail() -> None:
    inbox = Moody()
    with receiving(inbox) as (_, port), wanting(mailing(port)) as want:
        told = want("ada@example.org", "Hello\r\nBcc: x@y.org", "Text")
    assert (told.status, told.code, told.attempts) == ("error", "invalid", 1)
    assert inbox.heard == []
