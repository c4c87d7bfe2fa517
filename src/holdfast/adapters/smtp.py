"""The SMTP session: submits one mail to a server, or raises the reason of the failure.

- The operator configures the server and its password. They appear in no parameter, receipt or log.
  A password is sent only over TLS. If STARTTLS is configured and the server does not offer it, no
  mail is sent.
- The timeout bounds the whole session. smtplib bounds only each read, so a server that sends a
  little data now and then could hold the session open without end. A timer therefore shuts the socket
  down.
- A connection that breaks after the text was sent raises `Interrupted`: the server may have
  accepted the mail.
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
    Interrupted,
    NotConfigured,
    RejectedByServer,
    TlsNotTrusted,
    Unavailable,
)
from holdfast.errors import HoldfastError, Timeout


class Server(msgspec.Struct, frozen=True):
    """The mail server. `tls`: from the first byte, by STARTTLS, or none."""

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
        """Read `HOLDFAST_SMTP_HOST`, `_PORT`, `_SENDER`, `_USER`, `_PASSWORD`, `_TLS`,
        `_CA_FILE`."""
        settings = {
            name: value
            for name in cls.__struct_fields__
            if (value := env.get(f"HOLDFAST_SMTP_{name.upper()}"))
        }
        if "host" not in settings:
            raise NotConfigured(what="SMTP server", hint="set HOLDFAST_SMTP_HOST")
        try:
            return msgspec.convert(settings, cls, strict=False)
        except msgspec.ValidationError as error:
            raise NotConfigured(what="SMTP server", why=str(error)) from None


def submit_mail(
    server: Server, sender: str, recipients: Sequence[str], text: bytes, timeout_s: float
) -> dict[str, str]:
    """Submit a mail to the server. Return the rejected recipients with the server's responses."""
    connected = False
    with _SessionDeadline(timeout_s) as deadline:
        try:
            smtp = _connect(server, timeout_s, deadline)
            connected = True
            try:
                refused = smtp.sendmail(sender, recipients, text)
            finally:
                _quit(smtp)
        except HoldfastError:
            raise
        except Exception as error:
            if deadline.expired:
                raise _timeout_error(server, timeout_s) from None
            raise _to_adapter_error(error, server, timeout_s, connected) from None
    return {to: f"{code} {_response_text(response)}" for to, (code, response) in refused.items()}


# -- inside --------------------------------------------------------------------------------------


class _SessionDeadline:
    """Shuts down the socket of a session that exceeds its timeout."""

    def __init__(self, timeout_s: float) -> None:
        self.expired = False
        self._smtp: smtplib.SMTP | None = None
        self._timer = threading.Timer(timeout_s, self._shut_down)
        self._timer.daemon = True

    def __enter__(self) -> _SessionDeadline:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def watch(self, smtp: smtplib.SMTP) -> None:
        self._smtp = smtp

    def check(self) -> None:
        if self.expired:
            raise TimeoutError

    def _shut_down(self) -> None:
        self.expired = True
        sock = getattr(self._smtp, "sock", None)
        if sock is not None:
            with suppress(OSError):
                # Bypass the TLS socket's own shutdown: it discards the TLS state while another
                # thread reads.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


class _WatchedSession:
    """An SMTP session that registers with its deadline before it connects, because the server's
    greeting is read while connecting."""

    def __init__(self, *args: Any, deadline: _SessionDeadline, **options: Any) -> None:
        self._deadline = deadline
        deadline.watch(self)  # type: ignore[arg-type]
        try:
            super().__init__(*args, **options)
        except BaseException:
            self.close()  # type: ignore[attr-defined]
            raise

    def getreply(self) -> tuple[int, bytes]:
        self._deadline.check()
        reply: tuple[int, bytes] = super().getreply()  # type: ignore[misc]
        return reply


class _PlainSession(_WatchedSession, smtplib.SMTP):
    pass


class _TlsSession(_WatchedSession, smtplib.SMTP_SSL):
    pass


def _connect(server: Server, timeout_s: float, deadline: _SessionDeadline) -> smtplib.SMTP:
    context = ssl.create_default_context()
    if server.ca_file is not None:
        context.load_verify_locations(server.ca_file)
    smtp: smtplib.SMTP
    if server.tls == "tls":
        smtp = _TlsSession(
            server.host, server.port, timeout=timeout_s, context=context, deadline=deadline
        )
    else:
        smtp = _PlainSession(server.host, server.port, timeout=timeout_s, deadline=deadline)
    try:
        if server.tls == "starttls":
            smtp.starttls(context=context)
        if server.user:
            if server.tls == "none":
                raise NotConfigured(
                    what="SMTP server", why="the adapter sends no password without TLS"
                )
            smtp.login(server.user, server.password)
    except BaseException:
        smtp.close()
        raise
    return smtp


def _quit(smtp: smtplib.SMTP) -> None:
    """End the session. The server has accepted or rejected the mail by now, so errors here must not
    cause a retry."""
    with suppress(smtplib.SMTPException, OSError):
        smtp.quit()
    smtp.close()


def _to_adapter_error(
    error: Exception, server: Server, timeout_s: float, connected: bool
) -> HoldfastError:
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        codes = {to: code for to, (code, _) in error.recipients.items()}
        if all(400 <= code < 500 for code in codes.values()):
            return Unavailable(
                host=server.host, why="the server temporarily refused the recipients", codes=codes
            )
        return RejectedByServer(
            host=server.host, why="the server accepted no recipient", codes=codes
        )
    if isinstance(error, smtplib.SMTPAuthenticationError):
        return RejectedByServer(
            host=server.host, status=error.smtp_code, why="the server refused the login"
        )
    if isinstance(error, smtplib.SMTPResponseException):
        text = _response_text(error.smtp_error)
        if 400 <= error.smtp_code < 500 or error.smtp_code < 0:
            return Unavailable(host=server.host, status=error.smtp_code, why=text)
        return RejectedByServer(host=server.host, status=error.smtp_code, why=text)
    if isinstance(error, smtplib.SMTPNotSupportedError):
        return RejectedByServer(host=server.host, why=str(error)[:200])
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsNotTrusted(host=server.host, why=error.verify_message)
    # smtplib reports a timeout as a disconnection and keeps the timeout as its context.
    if isinstance(error, TimeoutError) or isinstance(error.__context__, TimeoutError):
        return _timeout_error(server, timeout_s)
    why = f"{type(error).__name__}: {str(error)[:200]}"
    return (Interrupted if connected else Unavailable)(host=server.host, why=why)


def _timeout_error(server: Server, timeout_s: float) -> Timeout:
    return Timeout(what="mail", host=server.host, waited_s=timeout_s)


def _response_text(response: bytes | str) -> str:
    return (response.decode(errors="replace") if isinstance(response, bytes) else str(response))[
        :200
    ]
