"""Limits across all tasks of a run: a child that wants to start calls asks for leave first.

`Pace` is a rate of calls. Its leave is given out in blocks; a block may take what has gathered in
`BURST_S`, so that asking costs little, and no child is given more than is there.

`TokenPace` is a limit of tokens a minute, as providers of language models set it. A call has leave by the
estimate of its tokens, in the order of asking: a call for which there is too little left has its leave
at once and the time from which on it may start, so that a large one is not overtaken for ever by small ones.
The child reports the tokens that a call used, and `settle` corrects the account. By estimates no minute holds more than
the limit, except for one call that is larger than `SAVED_SHARE` of it.

Pure: the caller brings the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BURST_S = 0.2
# What may be saved up of a minute's tokens. The refill is the rest, so both together are the limit.
SAVED_SHARE = 0.05


class Pace:
    def __init__(self, per_s: float, now_ns: int) -> None:
        self.per_s = per_s
        self._burst = max(per_s * BURST_S, 1.0)
        self._tokens = 1.0
        self._at_ns = now_ns

    def take(self, count: int, now_ns: int) -> tuple[int, int]:
        """How many calls may start now, and in how many milliseconds to ask again if none."""
        gathered = max(now_ns - self._at_ns, 0) / 1e9 * self.per_s
        self._tokens = min(self._tokens + gathered, self._burst)
        self._at_ns = max(now_ns, self._at_ns)
        given = min(int(self._tokens), count)
        self._tokens -= given
        # Worth asking for: half a burst, or the one call that is due next.
        wanted = max(min(self._burst / 2, count), 1.0)
        wait_s = 0.0 if given else max(wanted - self._tokens, 0.0) / self.per_s
        return given, max(int(wait_s * 1000), 0 if given else 1)

    def put_back(self, count: int) -> None:
        """Calls that were given leave and do not start."""
        self._tokens = min(self._tokens + count, self._burst)


class TokenPace:
    """`left` is what is left to give; below 0 it is owed, and calls that come wait for it."""

    def __init__(self, per_min: float, now_ns: int, was: tuple[float, int] = (0.0, 0)) -> None:
        """`was`: what a predecessor had left, and when. A restart saves nothing up: what the other one
        gave after that time is not known."""
        self._most = per_min * SAVED_SHARE
        self._per_s = per_min * (1 - SAVED_SHARE) / 60
        self.left, self._at_ns = was
        self.look(now_ns)
        self.left = min(self.left, 0.0)

    def take(self, prices: Sequence[int], now_ns: int) -> tuple[int, int]:
        """How many of these calls, in their order, have leave: one at least; and in how many milliseconds
        they may start."""
        self.look(now_ns)
        count, price = 1, prices[0]
        for one in prices[1:]:
            if price + one > self.left:
                break
            count, price = count + 1, price + one
        short = min(price, self._most) - self.left
        self.left -= price
        return count, max(math.ceil(short / self._per_s * 1000), 0)

    def settle(self, priced: int, used: int) -> None:
        """Replace the estimate of ended calls (`priced`) by the tokens that they used."""
        self.left += priced - used

    def look(self, now_ns: int) -> None:
        gathered = max(now_ns - self._at_ns, 0) / 1e9 * self._per_s
        self.left = min(self.left + gathered, self._most)
        self._at_ns = max(now_ns, self._at_ns)


class Limits:
    """Both limits of a run; 0 is none."""

    def __init__(
        self,
        rate_per_s: float,
        tokens_per_min: float,
        now_ns: int,
        was: tuple[float, int] = (0.0, 0),
    ) -> None:
        self._calls = Pace(rate_per_s, now_ns) if rate_per_s else None
        self._tokens = TokenPace(tokens_per_min, now_ns, was) if tokens_per_min else None

    def take(self, count: int, prices: Sequence[int], now_ns: int) -> tuple[int, int]:
        """How many calls have leave, and in how many milliseconds: to start them, or to ask again."""
        given, wait_ms = self._calls.take(count, now_ns) if self._calls else (count, 0)
        if self._tokens is None or not given or not prices:
            return given, wait_ms
        allowed, wait_ms = self._tokens.take(prices[:given], now_ns)
        if self._calls is not None:
            self._calls.put_back(given - allowed)
        return allowed, wait_ms

    def settle(self, priced: int, used: int) -> None:
        if self._tokens is not None:
            self._tokens.settle(priced, used)

    def left(self, now_ns: int) -> float:
        """Tokens that are left to give, for a successor of this process."""
        if self._tokens is None:
            return 0.0
        self._tokens.look(now_ns)
        return self._tokens.left
