"""`email.send` against a loopback SMTP server: envelopes, message ids, TLS, rejections, header
injection."""

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
    Interrupted,
    NotConfigured,
    RejectedByServer,
    TlsNotTrusted,
    Unavailable,
)
from holdfast.adapters.smtp import Server
from holdfast.errors import Invalid, Timeout, ValueTooLarge
from tests.adapters.rig import context_for
from tests.pgcluster import free_port

MODULES = ("holdfast.adapters.email", "holdfast.adapters.smtp")

ME = "robot@example.org"
SECRET = "very-secret"
# Start-up time limit of the server, for a busy machine.
START_S = 30.0


class RecordingSmtpHandler:
    """SMTP handler that records mails. Replies to RCPT and DATA are configurable."""

    def __init__(self) -> None:
        self.mails: list[Envelope] = []
        self.recipient_replies: dict[str, str] = {}
        self.data_reply = "250 OK"

    async def handle_RCPT(
        self, server: Any, session: Any, envelope: Envelope, address: str, options: Any
    ) -> str:
        answer = self.recipient_replies.get(address, "250 OK")
        if answer.startswith("250"):
            envelope.rcpt_tos.append(address)
        return answer

    async def handle_DATA(self, server: Any, session: Any, envelope: Envelope) -> str:
        if self.data_reply == "hang up":
            server.transport.close()
            return "250 never heard"
        if self.data_reply.startswith("250"):
            self.mails.append(envelope)
        return self.data_reply


@contextmanager
def run_smtp_server(
    inbox: RecordingSmtpHandler | None = None, **options: Any
) -> Iterator[tuple[RecordingSmtpHandler, int]]:
    inbox = inbox or RecordingSmtpHandler()
    # The controller connects to itself as a health check, so it needs a fixed port.
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
def plain_smtp() -> Iterator[tuple[RecordingSmtpHandler, Server]]:
    with run_smtp_server() as (inbox, port):
        yield inbox, Server("127.0.0.1", port, ME, tls="none")


PlainSmtp = tuple[RecordingSmtpHandler, Server]


def send(server: Server, to: Any = "ada@example.org", key: str = "key-1", **options: Any) -> Sent:
    return email.send(server, to, "Hello", "Text\n", options, key=key)


def parse_mail(envelope: Envelope) -> Any:
    assert isinstance(envelope.content, bytes)
    return message_from_bytes(envelope.content, policy=default)


def test_email_send_delivers_a_mail(plain_smtp: PlainSmtp) -> None:
    inbox, server = plain_smtp
    assert send(server).refused == {}
    [envelope] = inbox.mails
    mail = parse_mail(envelope)
    assert (mail["From"], mail["To"], mail["Subject"]) == (ME, "ada@example.org", "Hello")
    assert mail.get_content().strip() == "Text"
    assert (envelope.mail_from, envelope.rcpt_tos) == (ME, ["ada@example.org"])


def test_email_attempts_of_one_intent_share_the_message_id(plain_smtp: PlainSmtp) -> None:
    inbox, server = plain_smtp
    first, again, other = send(server), send(server), send(server, key="key-2")
    assert first.message_id == again.message_id != other.message_id
    assert [parse_mail(mail)["Message-ID"] for mail in inbox.mails][:2] == [first.message_id] * 2


def test_message_id_of_a_key_with_line_breaks_is_valid() -> None:
    made = email.message_id("a\r\nBcc: x@y <é>", ME)
    assert made.startswith("<")
    assert made.endswith("@example.org>")
    assert made.isascii()
    assert not set("\r\n ") & set(made)


def test_bcc_recipients_are_only_in_the_envelope(plain_smtp: PlainSmtp) -> None:
    inbox, server = plain_smtp
    send(server, ["a@x.org", "b@x.org"], cc=["c@x.org"], bcc=["d@x.org"], reply_to="r@x.org")
    [envelope] = inbox.mails
    mail = parse_mail(envelope)
    assert envelope.rcpt_tos == ["a@x.org", "b@x.org", "c@x.org", "d@x.org"]
    assert (mail["To"], mail["Cc"], mail["Reply-To"]) == ("a@x.org, b@x.org", "c@x.org", "r@x.org")
    assert b"d@x.org" not in envelope.content  # type: ignore[operator]


def test_email_send_delivers_unicode_text_and_html(plain_smtp: PlainSmtp) -> None:
    inbox, server = plain_smtp
    email.send(server, "a@x.org", "Grüße 漢字", "Füße\n.\n.x\n", {"html": "<b>é</b>"}, key="k")
    mail = parse_mail(inbox.mails[0])
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
def test_line_break_in_an_email_header_is_refused(plain_smtp: PlainSmtp, text: str) -> None:
    inbox, server = plain_smtp
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
def test_invalid_email_address_is_refused(plain_smtp: PlainSmtp, to: Any) -> None:
    with pytest.raises(Invalid):
        send(plain_smtp[1], to)


@pytest.mark.parametrize(
    "options",
    [
        {"headers": {"Bcc": "x@y.org"}}, {"headers": {"From": "x@y.org"}}, {"headers": {"X A": "b"}},
        {"headers": {"X-A:": "b"}}, {"headers": {"Content-Type": "x"}}, {"headers": {"Message-ID": "x"}},
        {"unknown": 1}, {"timeout_s": 0}, {"headers": {"X-A": "x" * 901}},
    ],
)  # fmt: skip
def test_reserved_or_invalid_email_options_are_refused(
    plain_smtp: PlainSmtp, options: dict[str, Any]
) -> None:
    with pytest.raises(Invalid):
        send(plain_smtp[1], **options)


def test_oversized_email_is_refused(plain_smtp: PlainSmtp) -> None:
    with pytest.raises(ValueTooLarge):
        email.send(plain_smtp[1], "a@x.org", "s", "x" * (4 * 1024 * 1024), None, key="k")


# -- replies of the server -----------------------------------------------------------------------


def test_refused_recipient_is_listed_in_the_result(plain_smtp: PlainSmtp) -> None:
    inbox, server = plain_smtp
    inbox.recipient_replies["b@x.org"] = "550 unknown"
    assert send(server, ["a@x.org", "b@x.org"]).refused == {"b@x.org": "550 unknown"}
    assert inbox.mails[0].rcpt_tos == ["a@x.org"]


@pytest.mark.parametrize(
    ("answer", "kind"), [("451 later", Unavailable), ("550 unknown", RejectedByServer)]
)
def test_email_with_all_recipients_refused_raises_the_servers_error(
    plain_smtp: PlainSmtp, answer: str, kind: type[Exception]
) -> None:
    inbox, server = plain_smtp
    inbox.recipient_replies["ada@example.org"] = answer
    with pytest.raises(kind):
        send(server)


@pytest.mark.parametrize(
    ("at_end", "kind"),
    [("452 full", Unavailable), ("554 spam", RejectedByServer), ("hang up", Interrupted)],
)
def test_smtp_reply_to_data_decides_the_error(
    plain_smtp: PlainSmtp, at_end: str, kind: type[Exception]
) -> None:
    inbox, server = plain_smtp
    inbox.data_reply = at_end
    with pytest.raises(kind):
        send(server)


def test_unreachable_smtp_server_is_unavailable() -> None:
    with run_smtp_server() as (_, port):
        pass
    with pytest.raises(Unavailable):
        send(Server("127.0.0.1", port, ME, tls="none"))


def test_silent_smtp_server_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Timeout):
        send(Server("127.0.0.1", silent.getsockname()[1], ME, tls="none"), timeout_s=0.2)


# -- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> str:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return str(tmp_path / "ca.pem")


def authenticate(server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
    known = (data.login, data.password) == (b"robot", SECRET.encode())
    return AuthResult(success=known, handled=False)


@contextmanager
def run_starttls_server(context: ssl.SSLContext) -> Iterator[tuple[RecordingSmtpHandler, int]]:
    with run_smtp_server(
        tls_context=context, require_starttls=True, authenticator=authenticate
    ) as got:
        yield got


def test_email_send_uses_starttls_and_login(authority: trustme.CA, ca_file: str) -> None:
    with run_starttls_server(context_for(authority, "127.0.0.1")) as (inbox, port):
        send(Server("127.0.0.1", port, ME, "robot", SECRET, ca_file=ca_file))
        assert len(inbox.mails) == 1


def test_refused_smtp_login_error_omits_the_password(authority: trustme.CA, ca_file: str) -> None:
    with run_starttls_server(context_for(authority, "127.0.0.1")) as (inbox, port):
        with pytest.raises(RejectedByServer) as caught:
            send(Server("127.0.0.1", port, ME, "robot", "wrong-password", ca_file=ca_file))
        assert "wrong-password" not in str(caught.value)
        assert inbox.mails == []


@pytest.mark.parametrize("issued_to", ["other.test", "127.0.0.1"])
def test_untrusted_smtp_certificate_gets_no_mail(
    authority: trustme.CA, ca_file: str, issued_to: str
) -> None:
    trusted = ca_file if issued_to == "other.test" else None
    with run_starttls_server(context_for(authority, issued_to)) as (inbox, port):
        with pytest.raises(TlsNotTrusted):
            send(Server("127.0.0.1", port, ME, ca_file=trusted))
        assert inbox.mails == []


def test_smtp_server_without_starttls_gets_no_mail(plain_smtp: PlainSmtp) -> None:
    inbox, server = plain_smtp
    with pytest.raises(RejectedByServer):
        send(Server("127.0.0.1", server.port, ME))
    assert inbox.mails == []


def test_email_send_uses_implicit_tls(authority: trustme.CA, ca_file: str) -> None:
    context = context_for(authority, "127.0.0.1")
    with run_tls_server(context, ca_file) as (inbox, port):
        send(Server("127.0.0.1", port, ME, tls="tls", ca_file=ca_file))
        assert len(inbox.mails) == 1


@contextmanager
def run_tls_server(
    context: ssl.SSLContext, ca_file: str
) -> Iterator[tuple[RecordingSmtpHandler, int]]:
    class Trusting(Controller):
        def _trigger_server(self) -> None:
            # The controller's health check does not trust the test CA, so this one replaces it.
            client = ssl.create_default_context(cafile=ca_file)
            with (
                socket.create_connection((self.hostname, self.port), 5) as raw,
                client.wrap_socket(raw, server_hostname=self.hostname) as tls,
            ):
                tls.recv(1024)

    inbox, port = RecordingSmtpHandler(), free_port()
    controller = Trusting(
        inbox, hostname="127.0.0.1", port=port, ssl_context=context, ready_timeout=START_S
    )
    controller.start()
    try:
        yield inbox, port
    finally:
        controller.stop()


def test_smtp_password_is_not_sent_without_tls(plain_smtp: PlainSmtp) -> None:
    with pytest.raises(NotConfigured):
        send(Server("127.0.0.1", plain_smtp[1].port, ME, "robot", SECRET, tls="none"))


# -- configuration -------------------------------------------------------------------------------


def test_smtp_server_is_configured_from_the_environment() -> None:
    env = {"HOLDFAST_SMTP_HOST": "mx.test", "HOLDFAST_SMTP_PORT": "465", "HOLDFAST_SMTP_TLS": "tls"}
    assert Server.from_env(env) == Server("mx.test", 465, tls="tls")


@pytest.mark.parametrize(
    "env", [{}, {"HOLDFAST_SMTP_HOST": "x", "HOLDFAST_SMTP_PORT": "many"},
            {"HOLDFAST_SMTP_HOST": "x", "HOLDFAST_SMTP_TLS": "maybe"}],
)  # fmt: skip
def test_missing_or_invalid_smtp_environment_raises_not_configured(env: dict[str, str]) -> None:
    with pytest.raises(NotConfigured):
        Server.from_env(env)


def test_smtp_password_is_not_in_the_repr() -> None:
    assert SECRET not in repr(Server("mx.test", 25, ME, "robot", SECRET))


def test_mail_composed_twice_differs_only_in_its_date() -> None:
    made = [email.compose(ME, ["a@x.org"], "s", "b", Mail(), key="k") for _ in range(2)]
    undated = [[line for line in mail.split(b"\r\n") if b"Date: " not in line] for mail in made]
    assert undated[0] == undated[1]
