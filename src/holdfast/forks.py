"""A handler that forks: its child runs in a copy of the worker's thread and must not go on as a worker.

The worker's locks, threads and connections are the parent's. A child that comes back from the handler, or leaves it
by `sys.exit`, ends there: with the status it asked for, without exit hooks, as a plain thread would end it.

    before = forks.made
    try:
        handler()
    except BaseException as error:
        if forks.made != before:
            forks.leave(error)
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import NoReturn

# How many forks lie between this process and the one that imported this module.
made = 0


def leave(error: BaseException | None = None) -> NoReturn:
    """End a forked child that has come back from a handler."""
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


def _count() -> None:
    global made
    made += 1


os.register_at_fork(after_in_child=_count)
