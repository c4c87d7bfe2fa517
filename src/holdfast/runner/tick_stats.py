"""Counts of one tick."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TickStats:
    claimed: int = 0
    done: int = 0
    requeued: int = 0
    dead: int = 0
    # Claims that expired or were cancelled before settlement.
    lost: int = 0
    # Transient store errors (busy, conflict, not found, unknown outcome).
    busy: int = 0
    # Claims that were released without counting a failure.
    released: int = 0
    # Due items that were not admitted: dropped, refused or delayed.
    not_admitted: int = 0

    @property
    def made_progress(self) -> bool:
        """Whether the tick made progress. Otherwise the runner may sleep."""
        return bool(
            self.claimed
            or self.done
            or self.requeued
            or self.dead
            or self.lost
            or self.not_admitted
        )
