"""Backoff, as a pure function of the attempt and a random number in [0, 1).

Full jitter between half and all of an exponential delay: retries that failed together do not come
back together, and none comes back at once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    first_ns: int = 100_000_000
    factor: float = 2.0
    max_ns: int = 60_000_000_000

    def delay_ns(self, attempt: int, unit: float) -> int:
        """How long to wait after the given failed attempt (1 is the first)."""
        assert attempt >= 1
        assert 0.0 <= unit < 1.0
        # The exponent is capped so that a million attempts do not overflow a float.
        ceiling = min(self.first_ns * self.factor ** min(attempt - 1, 64), self.max_ns)
        return int(ceiling * (0.5 + unit / 2))


def spread(*parts: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments (jitter that replays)."""
    x = 0x9E3779B97F4A7C15
    for part in parts:
        x = ((x ^ (part & _MASK)) * 0xBF58476D1CE4E5B9) & _MASK
        x ^= x >> 31
    return (x >> 11) / (1 << 53)


_MASK = (1 << 64) - 1
