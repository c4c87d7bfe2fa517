"""Garbage, collected when it holds up nobody.

The interpreter collects cycles whenever enough was allocated, which is as good as certainly while somebody
waits: a tenth of a millisecond, now and then a whole one. Who knows a better moment says so here.
"""

from __future__ import annotations

import gc
import sys

# A collection that is fewer new objects away than this is brought on, or is worth a moment.
NEAR = 350
# A process of ours collects everything also while it is busy, once it has put that off so often.
PUT_OFF_MAX = 1_000


def bring_on() -> None:
    """If the interpreter is about to collect, let it do so now: what, how much and whether at all is left to
    it, for the process is not ours alone."""
    left = gc.get_threshold()[0] - gc.get_count()[0]
    if 0 <= left <= NEAR and gc.isenabled():
        bait: list[list[None]] = []
        for _ in range(left + 2):
            bait.append([])


def take_over() -> None:
    """For a process of ours: what there is now is kept for good, and the rest is collected by `collect`.
    Not in builds without the interpreter's lock: every collection there is one of all generations."""
    if "t" not in sys.abiflags:
        gc.disable()
        gc.freeze()


def collect(*, busy: bool) -> None:
    """For a process of ours, between two things that it does: collect what is due, if it is due. All there
    is takes long, and is left for when it is not busy."""
    young, middle, old = gc.get_count()
    if gc.isenabled() or young < NEAR:
        return
    _, middle_max, old_max = gc.get_threshold()
    if middle <= middle_max:
        gc.collect(0)
    elif old <= old_max or (busy and old < PUT_OFF_MAX):
        gc.collect(1)
    else:
        gc.collect(2)
