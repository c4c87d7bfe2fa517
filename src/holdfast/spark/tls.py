"""TLS for connections to the ledger service: a certificate on the service, its authority on the
clients.

    Stage(..., tls=Tls("ledger.crt", "ledger.key", "ca.crt"), ledger_host="ledger.example")

The certificate names the advertised host. Its key stays on the driver's machine. The authority's
certificate travels to the executors with the address, so they need no file. The token is required as
without TLS.
"""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path

import msgspec

from holdfast.errors import Invalid


class Tls(msgspec.Struct, frozen=True):
    """PEM files: the certificate of the service (and its chain), its key, the authority."""

    cert: str | os.PathLike[str]
    key: str | os.PathLike[str]
    ca: str | os.PathLike[str]


class LedgerUntrusted(Invalid):
    code = "ledger_untrusted"
    hint = "the certificate must name the advertised ledger_host= and be signed by the ca of tls="


def read_authority(tls: Tls) -> str:
    """Read and check the certificate of the authority, which is sent to executors."""
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
        # No password prompt: the process has no terminal.
        context.load_cert_chain(cert, key, password=b"")
    except OSError as error:
        raise Invalid(what="tls", cert=cert, key=key, why=str(error)) from None
    return context


def client_context(authority: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=authority)
    return context


def wrap_client(sock: socket.socket, authority: str, name: str) -> socket.socket:
    """Wrap a client socket in TLS. The peer must have a certificate for `name`."""
    try:
        return client_context(authority).wrap_socket(sock, server_hostname=name)
    except ssl.SSLCertVerificationError as error:
        raise LedgerUntrusted(host=name, why=error.verify_message) from None


def wrap_accepted(sock: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Wrap a server socket in TLS. It reads nothing yet: `handshake` does, in the thread of the
    connection.
    """
    return context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)


def handshake(sock: ssl.SSLSocket) -> None:
    try:
        sock.do_handshake()
    except (AttributeError, ValueError):
        # Another thread shut it down before the handshake.
        raise ConnectionError("the connection was ended") from None
