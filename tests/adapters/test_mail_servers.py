"""Mail servers that keep to no rule: whatever they say or do not say, sending ends in time, typed.

They are sockets on loopback that answer each line with what a script says.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from holdfast.adapters import email
from holdfast.adapters.errors import Answered, Interrupted, Unavailable
from holdfast.adapters.smtp import Server
from holdfast.errors import HoldfastError, Timeout
from tests.adapters.test_email import ME, receiving

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


class Talk:
    """One server, and what it was told."""

    def __init__(self, script: dict[str, bytes]) -> None:
        self.script = {**OK, **script}
        self.heard: list[str] = []
        self.over = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))

    def serve(self) -> None:
        while not self.over.is_set():
            try:
                line, _ = self.listener.accept()
            except OSError:
                return
            with line, suppress(OSError):
                line.settimeout(30)
                self._talk(line)

    def _talk(self, line: socket.socket) -> None:
        if not self._say(line, ""):
            return
        in_text = False
        for said in line.makefile("rb"):
            if in_text and said != b".\r\n":
                continue
            word = "." if in_text else said.split()[0].decode(errors="replace").upper()
            self.heard.append(word)
            in_text = word == "DATA" and self.script["DATA"].startswith(b"354")
            if not self._say(line, word):
                return

    def _say(self, line: socket.socket, word: str) -> bool:
        told = self.script.get(word, b"502 what\r\n")
        if told == HANG:
            self.over.wait(30)
        elif told == TRICKLE:
            while not self.over.wait(0.02):
                line.sendall(b"250-x\r\n")
        elif told != HANG_UP:
            line.sendall(told)
            return word != "QUIT"
        return False


@contextmanager
def talking(**script: bytes) -> Iterator[tuple[Talk, Server]]:
    talk = Talk(
        {{"greeting": "", "text": "."}.get(word, word): told for word, told in script.items()}
    )
    thread = threading.Thread(target=talk.serve, daemon=True)
    thread.start()
    try:
        yield talk, Server("127.0.0.1", talk.listener.getsockname()[1], ME, tls="none")
    finally:
        talk.over.set()
        with suppress(OSError):
            talk.listener.shutdown(socket.SHUT_RDWR)
        talk.listener.close()
        thread.join(30)
        assert not thread.is_alive()


def send(server: Server, **options: Any) -> email.Sent:
    return email.send(server, "ada@example.org", "Hello", "Text\n", options, key="k")


WORDS = ["greeting", "EHLO", "MAIL", "RCPT", "DATA", "text"]


def test_a_script_that_plays_along_takes_the_mail() -> None:
    with talking() as (talk, server):
        assert send(server).refused == {}
    assert talk.heard == ["EHLO", "MAIL", "RCPT", "DATA", ".", "QUIT"]


@pytest.mark.parametrize("word", WORDS)
def test_a_server_that_hangs_up_is_tried_again(word: str) -> None:
    with (
        talking(**{word: HANG_UP}) as (_, server),
        pytest.raises((Unavailable, Interrupted)) as got,
    ):
        send(server)
    assert got.value.retryable
    assert isinstance(got.value, Interrupted) == (word in ("EHLO", "MAIL", "RCPT", "DATA", "text"))


@pytest.mark.parametrize("word", WORDS)
def test_a_server_that_falls_silent_is_a_timeout(word: str) -> None:
    with talking(**{word: HANG}) as (_, server), pytest.raises(Timeout):
        send(server, timeout_s=0.3)


@pytest.mark.parametrize("word", WORDS)
def test_a_server_that_never_comes_to_an_end_is_a_timeout_of_the_whole(word: str) -> None:
    with talking(**{word: TRICKLE}) as (_, server), pytest.raises(Timeout):
        send(server, timeout_s=0.3)


@pytest.mark.parametrize("word", ["MAIL", "RCPT", "DATA", "text"])
@pytest.mark.parametrize(
    ("code", "kind"),
    [(b"421", Unavailable), (b"450", Unavailable), (b"452", Unavailable), (b"550", Answered),
     (b"552", Answered), (b"554", Answered)],
)  # fmt: skip
def test_a_code_of_the_server_decides_whether_it_is_tried_again(
    word: str, code: bytes, kind: type[HoldfastError]
) -> None:
    with talking(**{word: code + b" no\r\n"}) as (_, server), pytest.raises(kind):
        send(server)


@pytest.mark.parametrize("greeting", [b"554 not here\r\n", b"421 later\r\n"])
def test_a_server_that_will_not_talk_is_believed(greeting: bytes) -> None:
    kind = Answered if greeting.startswith(b"5") else Unavailable
    with talking(greeting=greeting) as (talk, server), pytest.raises(kind):
        send(server)
    assert talk.heard == []


@pytest.mark.parametrize(
    "junk", [b"\r\n", b"hello\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x16\x03\x01\x00\r\n",
             b"2" * 10_000 + b"\r\n", b"250 \xff\xfe\r\n" * 3]
)  # fmt: skip
@pytest.mark.parametrize("word", ["greeting", "MAIL"])
def test_words_that_make_no_sense_end_in_an_error_of_ours(word: str, junk: bytes) -> None:
    with talking(**{word: junk}) as (_, server), pytest.raises(HoldfastError):
        send(server, timeout_s=2.0)


def test_a_goodbye_that_fails_does_not_undo_the_mail() -> None:
    with talking(QUIT=HANG_UP) as (talk, server):
        assert send(server).refused == {}
    assert talk.heard.count(".") == 1


def test_a_goodbye_that_does_not_come_does_not_undo_the_mail() -> None:
    with talking(QUIT=HANG) as (talk, server):
        # So long that all before the goodbye is said within it, on a busy machine too.
        assert send(server, timeout_s=1.5).refused == {}
    assert talk.heard.count(".") == 1


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
def test_no_text_ends_the_mail_early(body: str) -> None:
    with receiving() as (inbox, port):
        email.send(Server("127.0.0.1", port, ME, tls="none"), "a@x.org", "s", body, None, key="k")
        [envelope] = inbox.mails
        assert (envelope.mail_from, envelope.rcpt_tos) == (ME, ["a@x.org"])


def test_starttls_that_is_refused_for_now_is_tried_again() -> None:
    script = {"EHLO": b"250-hello\r\n250 STARTTLS\r\n", "STARTTLS": b"454 later\r\n"}
    with talking(**script) as (talk, server), pytest.raises((Unavailable, Answered)):
        send(Server("127.0.0.1", server.port, ME))
    assert "MAIL" not in talk.heard


def test_nothing_said_before_starttls_is_believed_after_it() -> None:
    # What follows the go-ahead in the clear would be read as an answer inside TLS.
    script = {"EHLO": b"250-hello\r\n250 STARTTLS\r\n", "STARTTLS": b"220 go\r\n250 forged\r\n"}
    with talking(**script) as (talk, server), pytest.raises(HoldfastError):
        send(Server("127.0.0.1", server.port, ME), timeout_s=1.0)
    assert "MAIL" not in talk.heard
