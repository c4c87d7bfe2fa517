"""The state of a ledger service process that a run changes, and its restoration for the next run.

A run adds threads, module search paths, storage options and open storages. A process that keeps a thread of the last
run, or that has grown, serves no other run.
"""

from __future__ import annotations

import resource
import sys
import threading
from typing import NamedTuple

from holdfast.clock import SYSTEM, S
from holdfast.spark.sinks.object_store import forget_options
from holdfast.spark.spool import close_storages

# How long the threads of a run may take to end, and the memory of a process that serves another run.
THREADS_END_S = 1.0
MEMORY_KIB_MAX = 1 << 20


class ProcessState(NamedTuple):
    """The state of this process that a run changes."""

    threads: frozenset[threading.Thread]
    paths: tuple[str, ...]

    @classmethod
    def now(cls) -> ProcessState:
        return cls(frozenset(threading.enumerate()), tuple(sys.path))

    def restore(self) -> bool:
        """Restore the state. Return False if it cannot be restored."""
        until_ns = SYSTEM.mono_ns() + int(THREADS_END_S * S)
        for thread in set(threading.enumerate()) - self.threads:
            thread.join(max((until_ns - SYSTEM.mono_ns()) / S, 0.0))
            if thread.is_alive():
                return False
        sys.path[:] = self.paths
        forget_options()
        close_storages()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < MEMORY_KIB_MAX
