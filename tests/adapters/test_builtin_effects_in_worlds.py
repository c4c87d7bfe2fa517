"""Built-in effects in worlds against loopback servers: retries, attempts, idempotency keys.

The response decides: a temporary error is retried with the same key, a final error is one call and
one receipt.
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
from tests.adapters.rig import (
    LOOPBACK,
    FakeHttpServer,
    ReceivedRequest,
    Route,
    context_for,
    respond_with,
    run_http_server,
)
from tests.adapters.test_email import (
    ME,
    SECRET,
    RecordingSmtpHandler,
    parse_mail,
    run_smtp_server,
    run_starttls_server,
)
from tests.adapters.test_llm import HELLO, PATH, completion

MODULES = (
    "holdfast.app.builtin_effects.http",
    "holdfast.app.builtin_effects.llm",
    "holdfast.app.builtin_effects.email",
)

ATTEMPTS = 3
WAIT_S = 30.0


class BuiltinRequested(hf.Event):
    args: list[Any]


class Unwant(hf.Event):
    """Cancel the last effect."""


class RecordedReceipt(msgspec.Struct, frozen=True):
    status: str
    code: str
    attempts: int
    cost: float
    value: Any = None


@contextmanager
def run_effect_world(effect: Any) -> Iterator[Any]:
    """Run a world that emits this effect. Yield a function that emits it and returns its
    receipt."""

    class Wanter(hf.World):
        told: list[RecordedReceipt] = msgspec.field(default_factory=list)
        last: bytes = b""

        @hf.on(BuiltinRequested)
        def want(self, event: BuiltinRequested, cx: hf.Context) -> None:
            self.last = cx.do(effect, *event.args).intent_hash

        @hf.on(Unwant)
        def unwant(self, event: Unwant, cx: hf.Context) -> None:
            cx.cancel(self.last)

        @hf.on(effect)
        def heard(self, receipt: hf.Receipt[Any], cx: hf.Context) -> None:
            value = msgspec.to_builtins(receipt.value) if receipt.ok else receipt.error
            told = RecordedReceipt(
                receipt.status, receipt.code, receipt.attempts, receipt.cost, value
            )
            self.told.append(told)

    with hf.App("wanting", worlds=[Wanter]).open("memory:") as runtime:
        world = runtime.world(Wanter, "ada")
        world.create()

        def want(*args: Any, until: threading.Event | None = None) -> RecordedReceipt:
            """Emit the effect and wait for its receipt. With `until`, cancel the effect when the
            event is set."""
            before = len(world.state().told)
            world.send(BuiltinRequested(list(args)))
            if until is not None:
                assert until.wait(WAIT_S)
                world.send(Unwant())
            deadline = time.monotonic() + WAIT_S
            while len(world.state().told) == before:
                assert time.monotonic() < deadline, "no receipt came"
                time.sleep(0.005)
            told: RecordedReceipt = world.state().told[-1]
            return told

        yield want


@pytest.fixture
def server() -> Iterator[FakeHttpServer]:
    with run_http_server() as server:
        yield server


def respond_in_turn(server: FakeHttpServer, *routes: Route) -> Route:
    """Make a route that answers the n-th call with the n-th route. The last route repeats."""

    def route(handler: Any, seen: ReceivedRequest) -> None:
        routes[min(len(server.requests), len(routes)) - 1](handler, seen)

    return route


def idempotency_keys(server: FakeHttpServer) -> list[str]:
    return [seen.headers["idempotency-key"] for seen in server.requests]


# -- chat ----------------------------------------------------------------------------------------


def chat_effect(server: FakeHttpServer, **options: Any) -> Any:
    prices = {"m": hf.llm.Price(input=1.0, output=10.0)}
    endpoint = hf.llm.Endpoint(server.url("/v1"), SECRET, prices)
    return hf.llm.declare(endpoint=endpoint, attempts=ATTEMPTS, **options)


def test_chat_receipt_has_usage_and_cost(server: FakeHttpServer) -> None:
    server.routes[PATH] = respond_with(200, completion("Hi", usage=(7, 3)))
    with run_effect_world(chat_effect(server)) as run_effect:
        receipt = run_effect(HELLO, "m")
    assert (receipt.status, receipt.attempts, receipt.cost) == ("ok", 1, pytest.approx(37e-6))
    assert receipt.value["usage"] == {"input_tokens": 7, "output_tokens": 3}


@pytest.mark.parametrize("status", [408, 429, 500, 503, 529])
def test_temporary_chat_error_is_retried_with_the_same_key(
    server: FakeHttpServer, status: int
) -> None:
    server.routes[PATH] = respond_in_turn(
        server, respond_with(status), respond_with(status), respond_with(200, completion())
    )
    with run_effect_world(chat_effect(server)) as run_effect:
        receipt = run_effect(HELLO, "m")
    assert (receipt.status, receipt.attempts) == ("ok", 3)
    assert len(idempotency_keys(server)) == 3
    assert len(set(idempotency_keys(server))) == 1


def test_chat_retry_waits_for_retry_after(server: FakeHttpServer) -> None:
    times: list[float] = []

    def noted(handler: Any, seen: ReceivedRequest) -> None:
        times.append(time.monotonic())
        first = len(times) == 1
        respond_with(429 if first else 200, completion(), {"retry-after": "1"} if first else {})(
            handler, seen
        )

    server.routes[PATH] = noted
    with run_effect_world(chat_effect(server)) as run_effect:
        assert run_effect(HELLO, "m").status == "ok"
    assert times[1] - times[0] >= 1.0


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_rejected_chat_is_not_retried(server: FakeHttpServer, status: int) -> None:
    server.routes[PATH] = respond_with(status, b"no")
    with run_effect_world(chat_effect(server)) as run_effect:
        receipt = run_effect(HELLO, "m")
    assert (receipt.status, receipt.code, receipt.attempts, receipt.cost) == (
        "error",
        "error_status",
        1,
        0.0,
    )
    assert len(server.requests) == 1


@pytest.mark.parametrize("body", [b"junk", b"[" * 100_000, completion(usage=(1, 10**30))])
def test_chat_with_an_unreadable_reply_is_not_retried(server: FakeHttpServer, body: bytes) -> None:
    server.routes[PATH] = respond_with(200, body)
    with run_effect_world(chat_effect(server)) as run_effect:
        receipt = run_effect(HELLO, "m")
    assert (receipt.status, receipt.code, receipt.attempts) == ("error", "bad_answer", 1)
    assert len(server.requests) == 1


def test_chat_retries_end_after_its_attempts(server: FakeHttpServer) -> None:
    server.routes[PATH] = respond_with(503)
    with run_effect_world(chat_effect(server)) as run_effect:
        receipt = run_effect(HELLO, "m")
    assert (receipt.status, receipt.code, receipt.attempts) == ("error", "unavailable", ATTEMPTS)
    assert SECRET not in receipt.value


def test_chat_without_a_reply_ends_in_a_timeout(server: FakeHttpServer) -> None:
    def hang(handler: Any, seen: ReceivedRequest) -> None:
        server.stopped.wait(30)

    server.routes[PATH] = hang
    with run_effect_world(chat_effect(server)) as run_effect:
        receipt = run_effect(HELLO, "m", {"timeout_s": 0.2})
    assert (receipt.status, receipt.attempts) == ("timeout", ATTEMPTS)
    assert len(set(idempotency_keys(server))) == 1


# -- http ----------------------------------------------------------------------------------------


def http_effect(**options: Any) -> Any:
    return hf.http.declare("http.request", LOOPBACK, attempts=ATTEMPTS, **options)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_temporary_http_error_is_retried_with_the_same_key(
    server: FakeHttpServer, status: int
) -> None:
    server.routes["/"] = respond_in_turn(
        server, respond_with(status), respond_with(200, b"at last")
    )
    with run_effect_world(http_effect()) as run_effect:
        receipt = run_effect("POST", server.url(), {"body": b"x"})
    assert (receipt.status, receipt.attempts) == ("ok", 2)
    assert len(set(idempotency_keys(server))) == 1
    assert [seen.body for seen in server.requests] == [b"x", b"x"]


@pytest.mark.parametrize("status", [400, 404, 409, 500])
def test_other_http_status_is_a_result_or_one_error(server: FakeHttpServer, status: int) -> None:
    server.routes["/"] = respond_with(status, b"why")
    with run_effect_world(http_effect()) as run_effect:
        receipt = run_effect("GET", server.url())
        assert (receipt.status, receipt.value["status"]) == ("ok", status)
        receipt = run_effect("GET", server.url(), {"errors": "raise"})
        assert (receipt.status, receipt.code, receipt.attempts) == ("error", "error_status", 1)
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/", "http://10.0.0.1/", "file:///etc/passwd", "http://0x7f.1/"]
)
def test_forbidden_address_is_not_retried(url: str) -> None:
    with run_effect_world(http_effect()) as run_effect:
        receipt = run_effect("GET", url)
    assert (receipt.status, receipt.code, receipt.attempts) == ("error", "forbidden_address", 1)


def test_two_http_requests_have_different_idempotency_keys(server: FakeHttpServer) -> None:
    server.routes["/"] = respond_with()
    with run_effect_world(http_effect()) as run_effect:
        run_effect("GET", server.url())
        run_effect("GET", server.url())
    assert len(set(idempotency_keys(server))) == 2


def test_cancelled_http_request_is_aborted(server: FakeHttpServer) -> None:
    called, gone = threading.Event(), threading.Event()

    def wait_for_the_end(handler: Any, seen: ReceivedRequest) -> None:
        called.set()
        handler.connection.settimeout(WAIT_S)
        if handler.connection.recv(1) == b"":
            gone.set()

    server.routes["/"] = wait_for_the_end
    with run_effect_world(http_effect()) as run_effect:
        receipt = run_effect("GET", server.url(), until=called)
        assert (receipt.status, receipt.code) == ("error", "cancelled")
        assert gone.wait(WAIT_S), "the connection was closed"
    assert len(server.requests) == 1


# -- mail ----------------------------------------------------------------------------------------


class ScriptedSmtpHandler(RecordingSmtpHandler):
    """SMTP handler with scripted replies to DATA. It records the message id of every mail, accepted
    or not."""

    def __init__(self, *data_replies: str) -> None:
        super().__init__()
        self.data_replies = list(data_replies)
        self.message_ids: list[str] = []

    async def handle_DATA(self, server: Any, session: Any, envelope: Envelope) -> str:
        self.message_ids.append(parse_mail(envelope)["Message-ID"])
        self.data_reply = self.data_replies.pop(0) if self.data_replies else "250 OK"
        return await super().handle_DATA(server, session, envelope)


def email_effect(port: int, **server: Any) -> Any:
    settings = {"sender": ME, "tls": "none", **server}
    return hf.email.declare(server=MailServer("127.0.0.1", port, **settings), attempts=ATTEMPTS)


MAIL = ("ada@example.org", "Hello", "Text\n")


def test_retried_mail_keeps_its_message_id() -> None:
    inbox = ScriptedSmtpHandler("451 later", "hang up")
    with run_smtp_server(inbox) as (_, port), run_effect_world(email_effect(port)) as run_effect:
        receipt = run_effect(*MAIL)
    assert (receipt.status, receipt.attempts) == ("ok", 3)
    assert inbox.message_ids == [receipt.value["message_id"]] * 3
    assert len(inbox.mails) == 1


def test_rejected_mail_is_not_retried() -> None:
    inbox = ScriptedSmtpHandler("554 no", "250 OK")
    with run_smtp_server(inbox) as (_, port), run_effect_world(email_effect(port)) as run_effect:
        receipt = run_effect(*MAIL)
    assert (receipt.status, receipt.code, receipt.attempts) == ("error", "error_status", 1)
    assert len(inbox.message_ids) == 1


def test_two_mails_have_different_message_ids() -> None:
    inbox = ScriptedSmtpHandler()
    with run_smtp_server(inbox) as (_, port), run_effect_world(email_effect(port)) as run_effect:
        run_effect(*MAIL)
        run_effect(*MAIL)
    assert len(set(inbox.message_ids)) == 2


def test_mail_effect_uses_starttls_and_login(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with run_starttls_server(context_for(authority, "127.0.0.1")) as (inbox, port):
        effect = email_effect(
            port, user="robot", password=SECRET, tls="starttls", ca_file=str(tmp_path / "ca.pem")
        )
        with run_effect_world(effect) as run_effect:
            assert run_effect(*MAIL).status == "ok"
    assert len(inbox.mails) == 1


def test_mail_header_with_a_line_break_is_one_error() -> None:
    inbox = ScriptedSmtpHandler()
    with run_smtp_server(inbox) as (_, port), run_effect_world(email_effect(port)) as run_effect:
        receipt = run_effect("ada@example.org", "Hello\r\nBcc: x@y.org", "Text")
    assert (receipt.status, receipt.code, receipt.attempts) == ("error", "invalid", 1)
    assert inbox.message_ids == []
