"""Control of Python's garbage collector: runs collections between requests instead of during them.

The interpreter collects cycles after a number of allocations, which is usually while a caller waits. A
collection takes 0.1 ms, occasionally 1 ms. Components that know an idle moment call this module.
"""

from __future__ import annotations

import gc
import sys

# A collection is near when fewer allocations than this are left before it.
NEAR_ALLOCATIONS = 350
# A busy process defers a full collection at most until the count of the oldest generation reaches this.
FULL_COLLECTION_DEFERRALS_MAX = 1_000
# The allocations between two collections of young objects in a process that runs roles.
YOUNG_ALLOCATIONS = 5_000
_INITIAL_THRESHOLDS = gc.get_threshold()


def collect_if_near() -> None:
    """Trigger the interpreter's next automatic collection now if it is near. The function allocates lists
    up to the threshold instead of calling `gc.collect`: the process belongs to the application, so the
    interpreter's own settings decide which generations it collects."""
    remaining = gc.get_threshold()[0] - gc.get_count()[0]
    if 0 <= remaining <= NEAR_ALLOCATIONS and gc.isenabled():
        filler: list[list[None]] = []
        for _ in range(remaining + 2):
            filler.append([])


def reduce_automatic() -> None:
    """Freeze the current objects and collect young objects less often. For processes that run the roles of an
    application until they are stopped: a full collection then visits only the objects of current work. No effect if
    the application configured the collector, and in free-threaded builds."""
    if "t" in sys.abiflags or not gc.isenabled() or gc.get_threshold() != _INITIAL_THRESHOLDS:
        return
    gc.freeze()
    gc.set_threshold(max(YOUNG_ALLOCATIONS, _INITIAL_THRESHOLDS[0]), *_INITIAL_THRESHOLDS[1:])


def disable_automatic() -> None:
    """Freeze the current objects and disable automatic GC. For processes that Holdfast owns, which then
    call `collect_between_batches`. No effect in free-threaded builds: there every collection is a full one."""
    if "t" not in sys.abiflags:
        gc.disable()
        gc.freeze()


def collect_between_batches(*, busy: bool) -> None:
    """Collect the generations that are due, between two batches of a process that Holdfast owns. A full
    collection takes long, so a busy process defers it."""
    young, middle, old = gc.get_count()
    if gc.isenabled() or young < NEAR_ALLOCATIONS:
        return
    _, middle_max, old_max = gc.get_threshold()
    if middle <= middle_max:
        gc.collect(0)
    elif old <= old_max or (busy and old < FULL_COLLECTION_DEFERRALS_MAX):
        gc.collect(1)
    else:
        gc.collect(2)
