"""Hostile SMTP servers: for every server behaviour, `email.send` ends within its timeout with a
typed error.

The servers are loopback sockets that answer each command from a script.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from holdfast.adapters import email
from holdfast.adapters.errors import Interrupted, RejectedByServer, Unavailable
from holdfast.adapters.smtp import Server
from holdfast.errors import HoldfastError, Timeout
from tests.adapters.test_email import ME, run_smtp_server

MODULES = ("holdfast.adapters.smtp",)

OK = {
    "": b"220 hello\r\n",
    "EHLO": b"250 hello\r\n",
    "HELO": b"250 hello\r\n",
    "MAIL": b"250 ok\r\n",
    "RCPT": b"250 ok\r\n",
    "DATA": b"354 go on\r\n",
    ".": b"250 taken\r\n",
    "RSET": b"250 ok\r\n",
    "QUIT": b"221 bye\r\n",
}
HANG_UP, HANG, TRICKLE = b"(hang up)", b"(hang)", b"(trickle)"


class ScriptedSmtpServer:
    """SMTP server that replies from a script and records the received commands."""

    def __init__(self, script: dict[str, bytes]) -> None:
        self.script = {**OK, **script}
        self.commands: list[str] = []
        self.stopped = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))

    def serve(self) -> None:
        while not self.stopped.is_set():
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.settimeout(30)
                self._run_session(connection)

    def _run_session(self, connection: socket.socket) -> None:
        if not self._reply(connection, ""):
            return
        in_data = False
        for command_line in connection.makefile("rb"):
            if in_data and command_line != b".\r\n":
                continue
            word = "." if in_data else command_line.split()[0].decode(errors="replace").upper()
            self.commands.append(word)
            in_data = word == "DATA" and self.script["DATA"].startswith(b"354")
            if not self._reply(connection, word):
                return

    def _reply(self, connection: socket.socket, word: str) -> bool:
        reply = self.script.get(word, b"502 what\r\n")
        if reply == HANG:
            self.stopped.wait(30)
        elif reply == TRICKLE:
            while not self.stopped.wait(0.02):
                connection.sendall(b"250-x\r\n")
        elif reply != HANG_UP:
            connection.sendall(reply)
            return word != "QUIT"
        return False


@contextmanager
def run_smtp_script(**script: bytes) -> Iterator[tuple[ScriptedSmtpServer, Server]]:
    smtp = ScriptedSmtpServer(
        {{"greeting": "", "text": "."}.get(word, word): told for word, told in script.items()}
    )
    thread = threading.Thread(target=smtp.serve, daemon=True)
    thread.start()
    try:
        yield smtp, Server("127.0.0.1", smtp.listener.getsockname()[1], ME, tls="none")
    finally:
        smtp.stopped.set()
        with suppress(OSError):
            smtp.listener.shutdown(socket.SHUT_RDWR)
        smtp.listener.close()
        thread.join(30)
        assert not thread.is_alive()


def send(server: Server, **options: Any) -> email.Sent:
    return email.send(server, "ada@example.org", "Hello", "Text\n", options, key="k")


COMMANDS = ["greeting", "EHLO", "MAIL", "RCPT", "DATA", "text"]


def test_scripted_smtp_server_accepts_a_mail() -> None:
    with run_smtp_script() as (smtp, server):
        assert send(server).refused == {}
    assert smtp.commands == ["EHLO", "MAIL", "RCPT", "DATA", ".", "QUIT"]


@pytest.mark.parametrize("word", COMMANDS)
def test_smtp_disconnect_is_retryable(word: str) -> None:
    with (
        run_smtp_script(**{word: HANG_UP}) as (_, server),
        pytest.raises((Unavailable, Interrupted)) as got,
    ):
        send(server)
    assert got.value.retryable
    assert isinstance(got.value, Interrupted) == (word in ("EHLO", "MAIL", "RCPT", "DATA", "text"))


@pytest.mark.parametrize("word", COMMANDS)
def test_silent_smtp_server_is_a_timeout(word: str) -> None:
    with run_smtp_script(**{word: HANG}) as (_, server), pytest.raises(Timeout):
        send(server, timeout_s=0.3)


@pytest.mark.parametrize("word", COMMANDS)
def test_endless_smtp_reply_is_a_timeout_of_the_whole_session(word: str) -> None:
    with run_smtp_script(**{word: TRICKLE}) as (_, server), pytest.raises(Timeout):
        send(server, timeout_s=0.3)


@pytest.mark.parametrize("word", ["MAIL", "RCPT", "DATA", "text"])
@pytest.mark.parametrize(
    ("code", "kind"),
    [(b"421", Unavailable), (b"450", Unavailable), (b"452", Unavailable), (b"550", RejectedByServer),
     (b"552", RejectedByServer), (b"554", RejectedByServer)],
)  # fmt: skip
def test_smtp_reply_code_decides_between_unavailable_and_rejected(
    word: str, code: bytes, kind: type[HoldfastError]
) -> None:
    with run_smtp_script(**{word: code + b" no\r\n"}) as (_, server), pytest.raises(kind):
        send(server)


@pytest.mark.parametrize("greeting", [b"554 not here\r\n", b"421 later\r\n"])
def test_smtp_greeting_error_ends_the_session(greeting: bytes) -> None:
    kind = RejectedByServer if greeting.startswith(b"5") else Unavailable
    with run_smtp_script(greeting=greeting) as (smtp, server), pytest.raises(kind):
        send(server)
    assert smtp.commands == []


@pytest.mark.parametrize(
    "junk", [b"\r\n", b"hello\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x16\x03\x01\x00\r\n",
             b"2" * 10_000 + b"\r\n", b"250 \xff\xfe\r\n" * 3]
)  # fmt: skip
@pytest.mark.parametrize("word", ["greeting", "MAIL"])
def test_malformed_smtp_reply_raises_a_typed_error(word: str, junk: bytes) -> None:
    with run_smtp_script(**{word: junk}) as (_, server), pytest.raises(HoldfastError):
        send(server, timeout_s=2.0)


def test_failed_quit_does_not_fail_the_mail() -> None:
    with run_smtp_script(QUIT=HANG_UP) as (smtp, server):
        assert send(server).refused == {}
    assert smtp.commands.count(".") == 1


def test_missing_quit_reply_does_not_fail_the_mail() -> None:
    with run_smtp_script(QUIT=HANG) as (smtp, server):
        # Long enough for the whole session before QUIT, even on a busy machine.
        assert send(server, timeout_s=1.5).refused == {}
    assert smtp.commands.count(".") == 1


@pytest.mark.parametrize(
    "body",
    [
        "a\r\n.\r\nMAIL FROM:<evil@x.org>\r\n",
        "a\n.\nRCPT TO:<evil@x.org>\n",
        "a\r.\rb",
        "a\r\n.\nDATA\n.\r\n",
        ".\n..\n...\n",
        "a\x00b",
        "x" * 5000,
        "\n" * 500,
    ],
    ids=range(8),
)
def test_mail_body_cannot_end_the_smtp_data_early(body: str) -> None:
    with run_smtp_server() as (inbox, port):
        email.send(Server("127.0.0.1", port, ME, tls="none"), "a@x.org", "s", body, None, key="k")
        [envelope] = inbox.mails
        assert (envelope.mail_from, envelope.rcpt_tos) == (ME, ["a@x.org"])


def test_temporary_starttls_refusal_sends_no_mail() -> None:
    script = {"EHLO": b"250-hello\r\n250 STARTTLS\r\n", "STARTTLS": b"454 later\r\n"}
    with (
        run_smtp_script(**script) as (smtp, server),
        pytest.raises((Unavailable, RejectedByServer)),
    ):
        send(Server("127.0.0.1", server.port, ME))
    assert "MAIL" not in smtp.commands


def test_plaintext_after_starttls_is_not_trusted() -> None:
    # Plaintext sent after the STARTTLS reply must not be read as a reply inside TLS.
    script = {"EHLO": b"250-hello\r\n250 STARTTLS\r\n", "STARTTLS": b"220 go\r\n250 forged\r\n"}
    with run_smtp_script(**script) as (smtp, server), pytest.raises(HoldfastError):
        send(Server("127.0.0.1", server.port, ME), timeout_s=1.0)
    assert "MAIL" not in smtp.commands
