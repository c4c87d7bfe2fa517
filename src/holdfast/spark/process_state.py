"""The state of a ledger service process that a run changes, and its restoration for the next run.

A run adds threads, module search paths, storage options and open storages. A process that keeps a thread of the last
run, that has grown, or that has loaded a library with a configuration of the last run, serves no other run.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from holdfast.clock import SYSTEM, S
from holdfast.spark.sinks.object_store import forget_options
from holdfast.spark.spool import close_storages

# How long the threads of a run may take to end, and the memory of a process that serves another run.
THREADS_END_S = 1.0
THREAD_POLL_S = 0.001
MEMORY_KIB_MAX = 1 << 20
# These read their configuration once: the environment and a file with the addresses and credentials of catalogs.
CONFIGURED_ONCE = ("pyiceberg",)


def set_environment(wanted: Mapping[bytes, bytes]) -> None:
    """Change the environment of this process. An equal value is left alone: other threads read the environment, and
    they may crash while it changes."""
    present = dict(os.environb)
    for name in present.keys() - wanted.keys():
        del os.environb[name]
    for name, value in wanted.items():
        if present.get(name) != value:
            os.environb[name] = value


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
        # Again after each: a thread of the run may have started another one.
        while added := set(threading.enumerate()) - self.threads:
            thread = added.pop()
            left_s = (until_ns - SYSTEM.mono_ns()) / S
            if left_s <= 0:
                return False
            if thread.is_alive():
                thread.join(left_s)
            else:
                # It is starting or has just ended. `join` raises for a thread that is starting.
                time.sleep(min(left_s, THREAD_POLL_S))
        sys.path[:] = self.paths
        forget_options()
        close_storages()
        if any(library in sys.modules for library in CONFIGURED_ONCE):
            return False
        return _memory_peak_kib() < MEMORY_KIB_MAX


def _memory_peak_kib() -> int:
    """The largest memory of this process. (`ru_maxrss` would include the memory of the driver that started it.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return MEMORY_KIB_MAX
