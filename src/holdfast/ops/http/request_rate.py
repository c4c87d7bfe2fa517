"""The rate limit of requests: a token bucket for each client token (`--http-rate`)."""

from __future__ import annotations

from holdfast.errors import Busy, Invalid

# The tokens of a bucket, in seconds of the rate.
BURST_S = 2.0
# Above this number of buckets, the full ones are dropped: they permit as much as new ones.
BUCKETS_MAX = 2_000


class RateExceeded(Busy):
    code = "rate_limited"
    hint = "this token has sent too many requests; wait for retry_after_s and send again"


class RequestRate:
    def __init__(self, per_s: float) -> None:
        """`per_s` is the number of requests of one token in a second; 0 is no limit."""
        if not 0 <= per_s <= 1e6:
            raise Invalid(what="--http-rate", found=per_s, min=0, max=1_000_000)
        self._per_s = per_s
        self._burst = max(per_s * BURST_S, 1.0)
        # For each name the number of requests that it may send at once, and the time of this number.
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, name: str, now_s: float) -> None:
        """Count a request. Raise RateExceeded if the bucket is empty."""
        if not self._per_s:
            return
        left, since_s = self._buckets.get(name, (self._burst, now_s))
        left = min(left + (now_s - since_s) * self._per_s, self._burst)
        if left < 1:
            self._buckets[name] = (left, now_s)
            raise RateExceeded(token=name, retry_after_s=round((1 - left) / self._per_s, 3))
        self._buckets[name] = (left - 1, now_s)
        if len(self._buckets) > BUCKETS_MAX:
            self._drop_full(now_s)

    def _drop_full(self, now_s: float) -> None:
        for name, (left, since_s) in list(self._buckets.items()):
            if left + (now_s - since_s) * self._per_s >= self._burst:
                del self._buckets[name]
