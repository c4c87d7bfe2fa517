"""A ticket that sends the reply to an exchange from the thread that made the commit.

The thread that read the exchange does not wait. Hundreds of children report at once, and each thread
switch would cost more than the decision.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from holdfast.errors import HoldfastError, StoreError
from holdfast.spark import ledger_protocol
from holdfast.spark.service_log_writer import BlockingTicket

# Builds the reply of a durable decision. None: it needs more work, in a thread that may block.
BuildShortReply = Callable[[], ledger_protocol.WireMessage | None]
BuildLongReply = Callable[[], tuple[ledger_protocol.WireMessage, bytes]]


class ReplyTicket(BlockingTicket):
    """A ticket that sends its reply when it is both settled and decided, in either order. Then it
    wakes waiting threads.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._sock = sock
        self._builders: tuple[BuildShortReply, BuildLongReply] | None = None

    def set_builders(self, short: BuildShortReply, long: BuildLongReply) -> None:
        """Set the functions that build the reply. Called at the decision, under its lock."""
        self._builders = short, long
        if self.settled:
            self.wake()

    def wake(self) -> None:
        if self.error is not None:
            self._send(ledger_protocol.error_reply(self.error))
        elif self._builders is None:
            return
        elif (message := self._builders[0]()) is not None:
            self._send(message)
        else:
            threading.Thread(target=self._send_long, args=(self._builders[1],), daemon=True).start()
            return
        super().wake()

    def _send_long(self, build: BuildLongReply) -> None:
        message: ledger_protocol.WireMessage
        try:
            message, data = build()
        except HoldfastError as error:
            message, data = ledger_protocol.error_reply(error), b""
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            message, data = ledger_protocol.error_reply(StoreError(what="step", why=why)), b""
        with contextlib.suppress(OSError):
            ledger_protocol.send(self._sock, message, data)
        super().wake()

    def _send(self, message: ledger_protocol.WireMessage) -> None:
        """Send without blocking. A child that does not read its replies loses its connection."""
        frame = ledger_protocol.encode_frame(message)
        with contextlib.suppress(OSError):
            if self._sock.send(frame, socket.MSG_DONTWAIT) == len(frame):
                return
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
