"""Exponential backoff with jitter, as a pure function of the attempt and a number in [0, 1).

The delay is between half and all of the exponential value. Attempts that failed together retry at
different times, and no attempt retries immediately.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    first_ns: int = 100_000_000
    factor: float = 2.0
    max_ns: int = 60_000_000_000

    def delay_ns(self, attempt: int, jitter_unit: float) -> int:
        """Return the delay after a failed attempt (1 is the first)."""
        assert attempt >= 1
        assert 0.0 <= jitter_unit < 1.0
        # The exponent is capped so that a million attempts do not overflow a float.
        ceiling = min(self.first_ns * self.factor ** min(attempt - 1, 64), self.max_ns)
        return int(ceiling * (0.5 + jitter_unit / 2))


def jitter(*parts: int) -> float:
    """Return deterministic jitter in [0, 1), computed from the arguments alone so that replay repeats it."""
    mixed = 0x9E3779B97F4A7C15
    for part in parts:
        mixed = ((mixed ^ (part & _MASK)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed ^= mixed >> 31
    return (mixed >> 11) / (1 << 53)


_MASK = (1 << 64) - 1
