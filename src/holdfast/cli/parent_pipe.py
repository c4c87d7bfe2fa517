"""A pipe between a command and its child process, so that the child stops when the command is gone, also after SIGKILL.

    ParentPipe          in the command: holds the write end, and passes the read end to its children
    stop_with_parent    in the child: a thread reads the pipe until its end

Only the command has the write end. The kernel closes it with the process.
"""

from __future__ import annotations

import os
import signal
import threading

from holdfast.clock import SYSTEM

# How much longer than its grace period a child may take to stop without its parent.
STOP_EXTRA_S = 10.0


class ParentPipe:
    def __init__(self) -> None:
        # Neither end is inherited. A child gets the read end by `pass_fds`.
        self.read_fd, self._write_fd = os.pipe()


def stop_with_parent(read_fd: int, grace_s: float) -> None:
    """Stop this process as SIGTERM does when the parent is gone. Kill it if it has not stopped `STOP_EXTRA_S` after its
    grace period."""
    os.set_inheritable(read_fd, False)

    def watch() -> None:
        while os.read(read_fd, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        SYSTEM.sleep(grace_s + STOP_EXTRA_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="holdfast-parent-pipe", daemon=True).start()
