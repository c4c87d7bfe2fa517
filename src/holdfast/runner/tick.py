"""What one tick did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tick:
    claimed: int = 0
    done: int = 0
    requeued: int = 0
    dead: int = 0
    # Claims that ran out, or were taken over, before they were settled.
    lost: int = 0
    # Times that the store refused and will not for ever (busy, conflict, not found, unknown).
    busy: int = 0
    # Claimed but not begun, and given back unharmed.
    released: int = 0
    # Due, and not admitted: dropped, refused, or put off.
    turned_away: int = 0

    @property
    def moved(self) -> bool:
        """Whether anything happened at all; else the runner may rest."""
        return bool(
            self.claimed or self.done or self.requeued or self.dead or self.lost or self.turned_away
        )
