"""TLS on the lines to the ledger service: a certificate there, its authority here.

    Stage(..., tls=Tls("ledger.crt", "ledger.key", "ca.crt"), ledger_host="ledger.example")

The certificate names the advertised host. Its key stays on the driver's machine; the authority's certificate
travels to the executors with the address, so they need no file. The token is asked for as without TLS.
"""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path

import msgspec

from holdfast.errors import Invalid


class Tls(msgspec.Struct, frozen=True):
    """Files in PEM form: the certificate of the service (and its chain), its key, the authority."""

    cert: str | os.PathLike[str]
    key: str | os.PathLike[str]
    ca: str | os.PathLike[str]


class LedgerUntrusted(Invalid):
    code = "ledger_untrusted"
    hint = "the certificate must name the advertised ledger_host= and be signed by the ca of tls="


def authority(tls: Tls) -> str:
    """The certificate of the authority, as it travels to executors."""
    try:
        text = Path(tls.ca).read_text("ascii")
        client_context(text)
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(what="tls", ca=os.fspath(tls.ca), why=str(error)) from None
    return text


def server_context(cert: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # A password is never asked for: the process has no terminal.
        context.load_cert_chain(cert, key, password=b"")
    except OSError as error:
        raise Invalid(what="tls", cert=cert, key=key, why=str(error)) from None
    return context


def client_context(authority: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=authority)
    return context


def connect(line: socket.socket, authority: str, name: str) -> socket.socket:
    """The line, encrypted, to a peer that has a certificate of that name."""
    try:
        return client_context(authority).wrap_socket(line, server_hostname=name)
    except ssl.SSLCertVerificationError as error:
        raise LedgerUntrusted(host=name, why=error.verify_message) from None


def accepted(line: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
    """The server's end. Nothing is read yet: `handshake` does that, in the thread of the line."""
    return context.wrap_socket(line, server_side=True, do_handshake_on_connect=False)


def handshake(line: ssl.SSLSocket) -> None:
    try:
        line.do_handshake()
    except (AttributeError, ValueError):
        # Another thread shut it down before it began.
        raise ConnectionError("the connection was ended") from None
