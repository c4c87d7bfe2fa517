"""`email.send` against an SMTP server on loopback: envelopes, ids, TLS, refusals, injections."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from email.policy import default
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, Envelope

from holdfast.adapters import email
from holdfast.adapters.email import Mail, Sent
from holdfast.adapters.errors import (
    Answered,
    Interrupted,
    NotConfigured,
    Unavailable,
    Untrusted,
)
from holdfast.adapters.smtp import Server
from holdfast.errors import Invalid, Timeout, ValueTooLarge
from tests.adapters.rig import context_for
from tests.pgcluster import free_port

MODULES = ("holdfast.adapters.email", "holdfast.adapters.smtp")

ME = "robot@example.org"
SECRET = "very-secret"
# What a server may take to be there, on a busy machine.
START_S = 30.0


class Inbox:
    """Takes mail; answers to a recipient or to the text may be set."""

    def __init__(self) -> None:
        self.mails: list[Envelope] = []
        self.answers: dict[str, str] = {}
        self.at_end = "250 OK"

    async def handle_RCPT(
        self, server: Any, session: Any, envelope: Envelope, address: str, options: Any
    ) -> str:
        answer = self.answers.get(address, "250 OK")
        if answer.startswith("250"):
            envelope.rcpt_tos.append(address)
        return answer

    async def handle_DATA(self, server: Any, session: Any, envelope: Envelope) -> str:
        if self.at_end == "hang up":
            server.transport.close()
            return "250 never heard"
        if self.at_end.startswith("250"):
            self.mails.append(envelope)
        return self.at_end


@contextmanager
def receiving(inbox: Inbox | None = None, **options: Any) -> Iterator[tuple[Inbox, int]]:
    inbox = inbox or Inbox()
    # The controller visits itself to see that it is up, so it has to be told its port.
    port = free_port()
    controller = Controller(
        inbox, hostname="127.0.0.1", port=port, ready_timeout=START_S, **options
    )
    controller.start()
    try:
        yield inbox, port
    finally:
        controller.stop()


@pytest.fixture
def plain() -> Iterator[tuple[Inbox, Server]]:
    with receiving() as (inbox, port):
        yield inbox, Server("127.0.0.1", port, ME, tls="none")


Plain = tuple[Inbox, Server]


def send(server: Server, to: Any = "ada@example.org", key: str = "key-1", **options: Any) -> Sent:
    return email.send(server, to, "Hello", "Text\n", options, key=key)


def read(envelope: Envelope) -> Any:
    assert isinstance(envelope.content, bytes)
    return message_from_bytes(envelope.content, policy=default)


def test_a_mail_arrives(plain: Plain) -> None:
    inbox, server = plain
    assert send(server).refused == {}
    [envelope] = inbox.mails
    mail = read(envelope)
    assert (mail["From"], mail["To"], mail["Subject"]) == (ME, "ada@example.org", "Hello")
    assert mail.get_content().strip() == "Text"
    assert (envelope.mail_from, envelope.rcpt_tos) == (ME, ["ada@example.org"])


def test_all_attempts_of_an_intent_have_one_message_id(plain: Plain) -> None:
    inbox, server = plain
    first, again, other = send(server), send(server), send(server, key="key-2")
    assert first.message_id == again.message_id != other.message_id
    assert [read(mail)["Message-ID"] for mail in inbox.mails][:2] == [first.message_id] * 2


def test_a_key_with_line_breaks_makes_a_plain_message_id() -> None:
    made = email.message_id("a\r\nBcc: x@y <é>", ME)
    assert made.startswith("<")
    assert made.endswith("@example.org>")
    assert made.isascii()
    assert not set("\r\n ") & set(made)


def test_blind_copies_are_in_the_envelope_alone(plain: Plain) -> None:
    inbox, server = plain
    send(server, ["a@x.org", "b@x.org"], cc=["c@x.org"], bcc=["d@x.org"], reply_to="r@x.org")
    [envelope] = inbox.mails
    mail = read(envelope)
    assert envelope.rcpt_tos == ["a@x.org", "b@x.org", "c@x.org", "d@x.org"]
    assert (mail["To"], mail["Cc"], mail["Reply-To"]) == ("a@x.org, b@x.org", "c@x.org", "r@x.org")
    assert b"d@x.org" not in envelope.content  # type: ignore[operator]


def test_text_of_any_language_and_html_arrive(plain: Plain) -> None:
    inbox, server = plain
    email.send(server, "a@x.org", "Grüße 漢字", "Füße\n.\n.x\n", {"html": "<b>é</b>"}, key="k")
    mail = read(inbox.mails[0])
    assert mail["Subject"] == "Grüße 漢字"
    text, html = mail.iter_parts()
    assert text.get_content().splitlines() == ["Füße", ".", ".x"]
    assert "<b>é</b>" in html.get_content()


INJECTIONS = [
    "a\nBcc: x@y.org",
    "a\r\nBcc: x@y.org",
    "a\rb",
    "a\x00b",
    "a\x0bb",
    "a\x85b",
    "a\u2028b",
]


@pytest.mark.parametrize("text", INJECTIONS)
def test_a_line_break_in_a_header_is_refused(plain: Plain, text: str) -> None:
    inbox, server = plain
    with pytest.raises(Invalid):
        email.send(server, "a@x.org", text, "b", None, key="k")
    with pytest.raises(Invalid):
        send(server, headers={"X-A": text})
    for name in ("sender", "reply_to"):
        with pytest.raises(Invalid):
            send(server, **{name: f"{text}@x.org"})
    with pytest.raises(Invalid):
        send(server, cc=[f"{text}@x.org"])
    with pytest.raises(Invalid):
        send(server, bcc=[f"{text}@x.org"])
    with pytest.raises(Invalid):
        send(server, f"{text}@x.org")
    assert inbox.mails == []


@pytest.mark.parametrize(
    "to",
    [
        "", [], "ada", "ada@", "@x.org", "a@x.org, b@x.org", "Ada <a@x.org>", "a@x.org>", "a b@x.org",
        "a@x.org\n", "a@x org", "a@x.org SIZE=1", "a@-x.org", "a@@x.org", ["a@x.org"] * 101, [7],
        "é@x.org", "a@" + "x" * 300,
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused(plain: Plain, to: Any) -> None:
    with pytest.raises(Invalid):
        send(plain[1], to)


@pytest.mark.parametrize(
    "options",
    [
        {"headers": {"Bcc": "x@y.org"}}, {"headers": {"From": "x@y.org"}}, {"headers": {"X A": "b"}},
        {"headers": {"X-A:": "b"}}, {"headers": {"Content-Type": "x"}}, {"headers": {"Message-ID": "x"}},
        {"unknown": 1}, {"timeout_s": 0}, {"headers": {"X-A": "x" * 901}},
    ],
)  # fmt: skip
def test_options_that_are_not_the_callers_are_refused(
    plain: Plain, options: dict[str, Any]
) -> None:
    with pytest.raises(Invalid):
        send(plain[1], **options)


def test_a_mail_that_is_too_large_is_refused(plain: Plain) -> None:
    with pytest.raises(ValueTooLarge):
        email.send(plain[1], "a@x.org", "s", "x" * (4 * 1024 * 1024), None, key="k")


# -- what the server says ------------------------------------------------------------------------


def test_a_recipient_that_is_not_taken_is_told_in_the_receipt(plain: Plain) -> None:
    inbox, server = plain
    inbox.answers["b@x.org"] = "550 unknown"
    assert send(server, ["a@x.org", "b@x.org"]).refused == {"b@x.org": "550 unknown"}
    assert inbox.mails[0].rcpt_tos == ["a@x.org"]


@pytest.mark.parametrize(
    ("answer", "kind"), [("451 later", Unavailable), ("550 unknown", Answered)]
)
def test_no_recipient_taken_is_an_error_of_the_servers_kind(
    plain: Plain, answer: str, kind: type[Exception]
) -> None:
    inbox, server = plain
    inbox.answers["ada@example.org"] = answer
    with pytest.raises(kind):
        send(server)


@pytest.mark.parametrize(
    ("at_end", "kind"),
    [("452 full", Unavailable), ("554 spam", Answered), ("hang up", Interrupted)],
)
def test_the_answer_to_the_text_decides(plain: Plain, at_end: str, kind: type[Exception]) -> None:
    inbox, server = plain
    inbox.at_end = at_end
    with pytest.raises(kind):
        send(server)


def test_a_server_that_is_not_there_is_unavailable() -> None:
    with receiving() as (_, port):
        pass
    with pytest.raises(Unavailable):
        send(Server("127.0.0.1", port, ME, tls="none"))


def test_a_server_that_says_nothing_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(Timeout):
        send(Server("127.0.0.1", mute.getsockname()[1], ME, tls="none"), timeout_s=0.2)


# -- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> str:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return str(tmp_path / "ca.pem")


def log_in(server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
    known = (data.login, data.password) == (b"robot", SECRET.encode())
    return AuthResult(success=known, handled=False)


@contextmanager
def starttls(context: ssl.SSLContext) -> Iterator[tuple[Inbox, int]]:
    with receiving(tls_context=context, require_starttls=True, authenticator=log_in) as got:
        yield got


def test_starttls_and_a_log_in(authority: trustme.CA, ca_file: str) -> None:
    with starttls(context_for(authority, "127.0.0.1")) as (inbox, port):
        send(Server("127.0.0.1", port, ME, "robot", SECRET, ca_file=ca_file))
        assert len(inbox.mails) == 1


def test_a_log_in_that_is_refused_names_no_password(authority: trustme.CA, ca_file: str) -> None:
    with starttls(context_for(authority, "127.0.0.1")) as (inbox, port):
        with pytest.raises(Answered) as caught:
            send(Server("127.0.0.1", port, ME, "robot", "wrong-password", ca_file=ca_file))
        assert "wrong-password" not in str(caught.value)
        assert inbox.mails == []


@pytest.mark.parametrize("issued_to", ["other.test", "127.0.0.1"])
def test_a_certificate_that_is_not_trusted_gets_no_mail(
    authority: trustme.CA, ca_file: str, issued_to: str
) -> None:
    trusted = ca_file if issued_to == "other.test" else None
    with starttls(context_for(authority, issued_to)) as (inbox, port):
        with pytest.raises(Untrusted):
            send(Server("127.0.0.1", port, ME, ca_file=trusted))
        assert inbox.mails == []


def test_a_server_without_starttls_gets_no_mail(plain: Plain) -> None:
    inbox, server = plain
    with pytest.raises(Answered):
        send(Server("127.0.0.1", server.port, ME))
    assert inbox.mails == []


def test_tls_from_the_first_byte(authority: trustme.CA, ca_file: str) -> None:
    context = context_for(authority, "127.0.0.1")
    with receiving_tls(context, ca_file) as (inbox, port):
        send(Server("127.0.0.1", port, ME, tls="tls", ca_file=ca_file))
        assert len(inbox.mails) == 1


@contextmanager
def receiving_tls(context: ssl.SSLContext, ca_file: str) -> Iterator[tuple[Inbox, int]]:
    class Trusting(Controller):
        def _trigger_server(self) -> None:
            # The controller's own first visit does not trust our authority; ours does.
            client = ssl.create_default_context(cafile=ca_file)
            with (
                socket.create_connection((self.hostname, self.port), 5) as raw,
                client.wrap_socket(raw, server_hostname=self.hostname) as tls,
            ):
                tls.recv(1024)

    inbox, port = Inbox(), free_port()
    controller = Trusting(
        inbox, hostname="127.0.0.1", port=port, ssl_context=context, ready_timeout=START_S
    )
    controller.start()
    try:
        yield inbox, port
    finally:
        controller.stop()


def test_a_password_is_not_sent_without_tls(plain: Plain) -> None:
    with pytest.raises(NotConfigured):
        send(Server("127.0.0.1", plain[1].port, ME, "robot", SECRET, tls="none"))


# -- configuration -------------------------------------------------------------------------------


def test_the_environment_configures_the_server() -> None:
    env = {"HOLDFAST_SMTP_HOST": "mx.test", "HOLDFAST_SMTP_PORT": "465", "HOLDFAST_SMTP_TLS": "tls"}
    assert Server.from_env(env) == Server("mx.test", 465, tls="tls")


@pytest.mark.parametrize(
    "env", [{}, {"HOLDFAST_SMTP_HOST": "x", "HOLDFAST_SMTP_PORT": "many"},
            {"HOLDFAST_SMTP_HOST": "x", "HOLDFAST_SMTP_TLS": "maybe"}],
)  # fmt: skip
def test_a_server_that_is_not_configured_says_so(env: dict[str, str]) -> None:
    with pytest.raises(NotConfigured):
        Server.from_env(env)


def test_the_password_is_in_no_text_of_the_server() -> None:
    assert SECRET not in repr(Server("mx.test", 25, ME, "robot", SECRET))


def test_a_mail_composed_twice_differs_in_its_date_alone() -> None:
    made = [email.compose(ME, ["a@x.org"], "s", "b", Mail(), key="k") for _ in range(2)]
    undated = [[line for line in mail.split(b"\r\n") if b"Date: " not in line] for mail in made]
    assert undated[0] == undated[1]
