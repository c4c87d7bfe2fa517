"""Argument validation. A bad argument raises `Invalid` with the field and its bounds, and changes nothing."""

from __future__ import annotations

from holdfast.config import BATCH_MAX, NAME_BYTES_MAX, TTL_NS_MAX
from holdfast.errors import Invalid

# The latest valid time. Adding a claim's TTL to it must not overflow.
TIME_NS_MAX = (1 << 63) - 1 - TTL_NS_MAX


def check_name(what: str, name: str) -> None:
    size = len(name.encode(errors="surrogatepass")) if isinstance(name, str) else -1
    if not 0 < size <= NAME_BYTES_MAX:
        why = "a name is text of 1 or more bytes" if size <= 0 else "the name is too long"
        raise Invalid(what=what, why=why, found=str(name)[:64], bytes_max=NAME_BYTES_MAX)


def check_limit(limit: int, what: str = "limit") -> None:
    if not 0 <= limit <= BATCH_MAX:
        raise Invalid(what=what, why="out of bounds", found=limit, min=0, max=BATCH_MAX)


def check_ttl(ttl_ns: int) -> None:
    if not 0 < ttl_ns <= TTL_NS_MAX:
        raise Invalid(what="ttl_ns", why="out of bounds", found=ttl_ns, min=1, max=TTL_NS_MAX)


def check_time(what: str, time_ns: int) -> None:
    if not 0 <= time_ns <= TIME_NS_MAX:
        raise Invalid(what=what, why="out of bounds", found=time_ns, min=0, max=TIME_NS_MAX)
