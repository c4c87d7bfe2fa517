"""The conversation with a mail server: one mail is handed in, or it is said why not.

- The server and its password are the operator's: they are in no parameter, receipt or log. A password
  goes over TLS or not at all, and a server that offers no STARTTLS where one was told gets nothing.
- The time-out bounds the whole conversation. smtplib bounds each read, and a server that says a word
  now and then would never be done: so a timer cuts the line.
- A connection that breaks after the text was sent is `Interrupted`: the mail may have been taken.
"""

from __future__ import annotations

import smtplib
import socket
import ssl
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec

from holdfast.adapters.errors import (
    Answered,
    Interrupted,
    NotConfigured,
    Unavailable,
    Untrusted,
)
from holdfast.errors import HoldfastError, Timeout


class Server(msgspec.Struct, frozen=True):
    """Where mail is handed in. `tls`: from the first byte, after STARTTLS, or not at all."""

    host: str
    port: int = 587
    sender: str = ""
    user: str = ""
    password: str = ""
    tls: Literal["starttls", "tls", "none"] = "starttls"
    ca_file: str | None = None

    def __repr__(self) -> str:
        return f"Server({self.host}:{self.port}, tls={self.tls!r})"

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Server:
        """`HOLDFAST_SMTP_HOST`, `_PORT`, `_SENDER`, `_USER`, `_PASSWORD`, `_TLS`, `_CA_FILE`."""
        told = {
            name: value
            for name in cls.__struct_fields__
            if (value := env.get(f"HOLDFAST_SMTP_{name.upper()}"))
        }
        if "host" not in told:
            raise NotConfigured(what="SMTP server", hint="set HOLDFAST_SMTP_HOST")
        try:
            return msgspec.convert(told, cls, strict=False)
        except msgspec.ValidationError as error:
            raise NotConfigured(what="SMTP server", why=str(error)) from None


def hand_in(
    server: Server, sender: str, recipients: Sequence[str], text: bytes, timeout_s: float
) -> dict[str, str]:
    """Have the server take a mail; the recipients that it did not take, with its words."""
    began = False
    with _Deadline(timeout_s) as deadline:
        try:
            smtp = _connected(server, timeout_s, deadline)
            began = True
            try:
                refused = smtp.sendmail(sender, recipients, text)
            finally:
                _leave(smtp)
        except HoldfastError:
            raise
        except Exception as error:
            if deadline.passed:
                raise _too_late(server, timeout_s) from None
            raise _failure_of(error, server, timeout_s, began) from None
    return {to: f"{code} {_text(said)}" for to, (code, said) in refused.items()}


# -- inside --------------------------------------------------------------------------------------


class _Deadline:
    """Cuts the line of a conversation that takes too long."""

    def __init__(self, timeout_s: float) -> None:
        self.passed = False
        self._smtp: smtplib.SMTP | None = None
        self._timer = threading.Timer(timeout_s, self._cut)
        self._timer.daemon = True

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def watch(self, smtp: smtplib.SMTP) -> None:
        self._smtp = smtp

    def check(self) -> None:
        if self.passed:
            raise TimeoutError

    def _cut(self) -> None:
        self.passed = True
        line = getattr(self._smtp, "sock", None)
        if line is not None:
            with suppress(OSError):
                # Not the TLS socket's own: that one forgets its keys while another thread reads.
                socket.socket.shutdown(line, socket.SHUT_RDWR)


class _Watched:
    """Known to its deadline before it connects, for the first words come while it does."""

    def __init__(self, *args: Any, deadline: _Deadline, **options: Any) -> None:
        self._deadline = deadline
        deadline.watch(self)  # type: ignore[arg-type]
        try:
            super().__init__(*args, **options)
        except BaseException:
            self.close()  # type: ignore[attr-defined]
            raise

    def getreply(self) -> tuple[int, bytes]:
        self._deadline.check()
        told: tuple[int, bytes] = super().getreply()  # type: ignore[misc]
        return told


class _Plain(_Watched, smtplib.SMTP):
    pass


class _Tls(_Watched, smtplib.SMTP_SSL):
    pass


def _connected(server: Server, timeout_s: float, deadline: _Deadline) -> smtplib.SMTP:
    context = ssl.create_default_context()
    if server.ca_file is not None:
        context.load_verify_locations(server.ca_file)
    smtp: smtplib.SMTP
    if server.tls == "tls":
        smtp = _Tls(server.host, server.port, timeout=timeout_s, context=context, deadline=deadline)
    else:
        smtp = _Plain(server.host, server.port, timeout=timeout_s, deadline=deadline)
    try:
        if server.tls == "starttls":
            smtp.starttls(context=context)
        if server.user:
            if server.tls == "none":
                raise NotConfigured(what="SMTP server", why="a password is not sent without TLS")
            smtp.login(server.user, server.password)
    except BaseException:
        smtp.close()
        raise
    return smtp


def _leave(smtp: smtplib.SMTP) -> None:
    """Say goodbye. The mail is taken, or not, by now: how this ends must not send it again."""
    with suppress(smtplib.SMTPException, OSError):
        smtp.quit()
    smtp.close()


def _failure_of(error: Exception, server: Server, timeout_s: float, began: bool) -> HoldfastError:
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        told = {to: code for to, (code, _) in error.recipients.items()}
        if all(400 <= code < 500 for code in told.values()):
            return Unavailable(host=server.host, why="recipients are refused for now", codes=told)
        return Answered(host=server.host, why="no recipient is accepted", codes=told)
    if isinstance(error, smtplib.SMTPAuthenticationError):
        return Answered(host=server.host, status=error.smtp_code, why="the log-in is refused")
    if isinstance(error, smtplib.SMTPResponseException):
        said = _text(error.smtp_error)
        if 400 <= error.smtp_code < 500 or error.smtp_code < 0:
            return Unavailable(host=server.host, status=error.smtp_code, why=said)
        return Answered(host=server.host, status=error.smtp_code, why=said)
    if isinstance(error, smtplib.SMTPNotSupportedError):
        return Answered(host=server.host, why=str(error)[:200])
    if isinstance(error, ssl.SSLCertVerificationError):
        return Untrusted(host=server.host, why=error.verify_message)
    # smtplib tells a time-out as a disconnection, and keeps the reason behind it.
    if isinstance(error, TimeoutError) or isinstance(error.__context__, TimeoutError):
        return _too_late(server, timeout_s)
    why = f"{type(error).__name__}: {str(error)[:200]}"
    return (Interrupted if began else Unavailable)(host=server.host, why=why)


def _too_late(server: Server, timeout_s: float) -> Timeout:
    return Timeout(what="mail", host=server.host, waited_s=timeout_s)


def _text(said: bytes | str) -> str:
    return (said.decode(errors="replace") if isinstance(said, bytes) else str(said))[:200]
