"""A ticket that sends the reply to a step itself, in the thread that made the commit.

The thread that read the step has gone on by then. Hundreds of children report at once, and each hand-over between
threads costs more than the decision.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from holdfast.errors import HoldfastError, StoreError
from holdfast.spark import wire
from holdfast.spark.desk import Ticket

# The reply of a decision that is durable. None: it takes more than that, and a thread that may wait.
Short = Callable[[], wire.Message | None]
Long = Callable[[], tuple[wire.Message, bytes]]


class ReplyTicket(Ticket):
    """Settled and decided, in either order, it sends the reply; then threads that wait for it go on."""

    def __init__(self, line: socket.socket) -> None:
        super().__init__()
        self._line = line
        self._decided: tuple[Short, Long] | None = None

    def decided(self, short: Short, long: Long) -> None:
        """How to come by the reply. Called where the decision is made, under its lock."""
        self._decided = short, long
        if self.settled:
            self.wake()

    def wake(self) -> None:
        if self.error is not None:
            self._send(wire.refused(self.error))
        elif self._decided is None:
            return
        elif (message := self._decided[0]()) is not None:
            self._send(message)
        else:
            threading.Thread(target=self._reply, args=(self._decided[1],), daemon=True).start()
            return
        super().wake()

    def _reply(self, long: Long) -> None:
        message: wire.Message
        try:
            message, data = long()
        except HoldfastError as error:
            message, data = wire.refused(error), b""
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            message, data = wire.refused(StoreError(what="step", why=why)), b""
        with contextlib.suppress(OSError):
            wire.send(self._line, message, data)
        super().wake()

    def _send(self, message: wire.Message) -> None:
        """Never waits: a child that does not read its replies loses its connection."""
        frame = wire.frame(message)
        with contextlib.suppress(OSError):
            if self._line.send(frame, socket.MSG_DONTWAIT) == len(frame):
                return
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
