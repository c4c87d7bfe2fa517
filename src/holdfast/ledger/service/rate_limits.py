"""Rate limits across all tasks of a run. A child acquires permits before it starts calls.

`CallRateLimiter` is a token bucket of calls per second. It grants permits in blocks. A block may
use the refill of `BURST_S`, so that requests are rare. No child gets more than is available.

`TokenRateLimiter` limits tokens per minute, as providers of language models do. A call is admitted
by its estimated tokens in request order. If too few tokens are left, the call still gets its
permit, with a delay before it may start. Small calls therefore cannot starve a large one. The child
reports the tokens used, and `settle` corrects the balance. By the estimates no minute exceeds the
limit, except by one call larger than `SAVED_SHARE` of it.

Pure: the caller passes the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BURST_S = 0.2
# The burst share of a minute's tokens. The refill rate is the rest, so that both add up to the
# limit.
SAVED_SHARE = 0.05


class CallRateLimiter:
    def __init__(self, per_s: float, now_ns: int) -> None:
        self.per_s = per_s
        self._burst = max(per_s * BURST_S, 1.0)
        self._tokens = 1.0
        self._at_ns = now_ns

    def acquire(self, count: int, now_ns: int) -> tuple[int, int]:
        """Return how many calls may start now, and the delay in ms before the next request if none."""
        refilled = max(now_ns - self._at_ns, 0) / 1e9 * self.per_s
        self._tokens = min(self._tokens + refilled, self._burst)
        self._at_ns = max(now_ns, self._at_ns)
        granted = min(int(self._tokens), count)
        self._tokens -= granted
        # Wait for half a burst, or for one call.
        worth_waiting_for = max(min(self._burst / 2, count), 1.0)
        wait_s = 0.0 if granted else max(worth_waiting_for - self._tokens, 0.0) / self.per_s
        return granted, max(int(wait_s * 1000), 0 if granted else 1)

    def refund(self, count: int) -> None:
        """Return permits of calls that do not start."""
        self._tokens = min(self._tokens + count, self._burst)


class TokenRateLimiter:
    """A token bucket. While its balance is negative, new calls are delayed."""

    def __init__(
        self, per_min: float, now_ns: int, carried_over: tuple[float, int] = (0.0, 0)
    ) -> None:
        """Restore the balance of a predecessor: `carried_over` is (balance, time). No surplus is
        kept, because permits that it granted later are unknown.
        """
        self._burst = per_min * SAVED_SHARE
        self._per_s = per_min * (1 - SAVED_SHARE) / 60
        self.balance, self._at_ns = carried_over
        self.refill(now_ns)
        self.balance = min(self.balance, 0.0)

    def acquire(self, prices: Sequence[int], now_ns: int) -> tuple[int, int]:
        """Return how many of these calls are admitted, in order and at least one, and their delay
        in ms.
        """
        self.refill(now_ns)
        count, price = 1, prices[0]
        for one in prices[1:]:
            if price + one > self.balance:
                break
            count, price = count + 1, price + one
        deficit = min(price, self._burst) - self.balance
        self.balance -= price
        return count, max(math.ceil(deficit / self._per_s * 1000), 0)

    def settle(self, estimated: int, used: int) -> None:
        """Replace the estimate of finished calls by the tokens they used."""
        self.balance += estimated - used

    def refill(self, now_ns: int) -> None:
        refilled = max(now_ns - self._at_ns, 0) / 1e9 * self._per_s
        self.balance = min(self.balance + refilled, self._burst)
        self._at_ns = max(now_ns, self._at_ns)


class RunRateLimits:
    """Both limits of a run; 0 means unlimited."""

    def __init__(
        self,
        rate_per_s: float,
        tokens_per_min: float,
        now_ns: int,
        carried_over: tuple[float, int] = (0.0, 0),
    ) -> None:
        self._calls = CallRateLimiter(rate_per_s, now_ns) if rate_per_s else None
        self._tokens = (
            TokenRateLimiter(tokens_per_min, now_ns, carried_over) if tokens_per_min else None
        )

    def acquire(self, count: int, prices: Sequence[int], now_ns: int) -> tuple[int, int]:
        """Return how many calls are admitted, and the delay in ms before they start or before the
        next request.
        """
        granted, wait_ms = self._calls.acquire(count, now_ns) if self._calls else (count, 0)
        if self._tokens is None or not granted or not prices:
            return granted, wait_ms
        allowed, wait_ms = self._tokens.acquire(prices[:granted], now_ns)
        if self._calls is not None:
            self._calls.refund(granted - allowed)
        return allowed, wait_ms

    def settle(self, estimated: int, used: int) -> None:
        if self._tokens is not None:
            self._tokens.settle(estimated, used)

    def tokens_left(self, now_ns: int) -> float:
        """The token balance, for a successor of this process."""
        if self._tokens is None:
            return 0.0
        self._tokens.refill(now_ns)
        return self._tokens.balance
