"""Fork detection for handlers: the forked child of a handler must exit and not continue as a worker.

The child runs in a copy of the worker's thread, but locks, threads and connections belong to the parent. When the
child returns from the handler or calls `sys.exit`, the process exits at once with that status and without exit hooks.

    before = forks.fork_count
    try:
        handler()
    except BaseException as error:
        if forks.fork_count != before:
            forks.exit_child(error)
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import NoReturn

# Number of forks between the process that imported this module and this process.
fork_count = 0


def exit_child(error: BaseException | None = None) -> NoReturn:
    """Exit a forked child after its handler has returned or raised, so that it does not continue as a worker."""
    status = 0
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        status = 1
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status & 0xFF)


def _count_fork() -> None:
    global fork_count
    fork_count += 1


os.register_at_fork(after_in_child=_count_fork)
