"""The listening socket of the ledger service."""

from __future__ import annotations

import errno
import socket

from holdfast.errors import Invalid

# Connections that wait to be accepted: a job connects all of its children at once.
BACKLOG = 512


def listen(host: str, port: int, bind: str) -> socket.socket:
    """Listen at `bind`, or else at `host`, the address for executors."""
    address = bind or host
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        what = "bind" if bind else "ledger_host"
        raise Invalid(what=what, host=address, port=port, why=_bind_error(bind, error)) from None
    listener.listen(BACKLOG)
    return listener


def _bind_error(bind: str, error: OSError) -> str:
    if error.errno == errno.EADDRNOTAVAIL and not bind:
        return f"{error.strerror}; bind= is the listening address, ledger_host= is the address for executors"
    return error.strerror or str(error)
