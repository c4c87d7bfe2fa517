"""Garbage, collected when nobody waits for us.

The interpreter collects cycles whenever enough was allocated, which is as good as certainly while somebody
waits: a tenth of a millisecond, now and then a whole one. Who knows a better moment says so here.
"""

from __future__ import annotations

import gc

# New objects for which a moment is worth using.
YOUNG = 350


def collect_young(most: int = 1) -> None:
    """Collect what the interpreter would soon collect by itself, of generations up to this one."""
    counts = gc.get_count()
    if counts[0] < YOUNG:
        return
    thresholds = gc.get_threshold()
    generation = 0
    while generation < most and counts[generation + 1] > thresholds[generation + 1]:
        generation += 1
    gc.collect(generation)


def take_over() -> None:
    """For a process that is ours alone: what there is now is kept for good, and the rest is collected only
    by `collect_young`."""
    gc.disable()
    gc.freeze()
