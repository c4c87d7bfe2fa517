"""A ticket that sends the reply to a report itself, in the thread that made the commit.

The thread of the connection is back at its socket by then. Hundreds of children report at once, and each hand-over
between threads costs more than the decision.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from holdfast.errors import HoldfastError
from holdfast.spark import wire
from holdfast.spark.desk import Ticket


class ReplyTicket(Ticket):
    """`reply`, or how to come by it, is set before the ticket can be settled."""

    def __init__(self, line: socket.socket) -> None:
        super().__init__()
        self.reply: wire.Message | None = None
        self._line = line
        self._compute: Callable[[], wire.Message] | None = None

    def reply_by(self, compute: Callable[[], wire.Message]) -> None:
        """The reply takes more than the commit: compute it, in a thread of its own, after that."""
        self._compute = compute

    def refuse(self, error: HoldfastError) -> None:
        """Reply that nothing was decided."""
        self.reply = None
        self.settle(error)

    def wake(self) -> None:
        if self.error is None and self._compute is not None:
            threading.Thread(target=self._computed, args=(self._compute,), daemon=True).start()
            return
        self._send(wire.refused(self.error) if self.error is not None else self.reply)
        super().wake()

    def _computed(self, compute: Callable[[], wire.Message]) -> None:
        try:
            message = compute()
        except HoldfastError as error:
            message = wire.refused(error)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            message = wire.refused(HoldfastError(what="report", why=why))
        self._send(message)
        super().wake()

    def _send(self, message: wire.Message | None) -> None:
        """Never waits: a child that does not read its replies loses its connection."""
        assert message is not None
        frame = wire.frame(message)
        with contextlib.suppress(OSError):
            if self._line.send(frame, socket.MSG_DONTWAIT) == len(frame):
                return
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
