"""The world workload: its parts, the amounts for every system, and the goals beside Restate.

    batch       KEYS keys, messages in batches of BATCH; rate until all are handled
    senders     the same, one message per call, by SENDERS callers at once
    hot         one key gets all messages, as fast as the system accepts them
    latency     one message every 20 ms, until it is handled: p50 and p95

`total` is the better of `batch` and `senders`: the throughput over all keys in the faster way. Our rates
are compared with the total of Restate.

A slow system gets fewer messages: rates are steady, and a run must end. The table has the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.peers.suite import Goal

KEYS = 100
BATCH = 1000
SENDERS = 64
LATENCY_PER_S = 50

MEASURES = {
    "batch": "messages/s",
    "senders": "messages/s",
    "total": "messages/s",
    "hot": "messages/s",
    "p50": "ms",
    "p95": "ms",
}
EXTRA = {"ask_p95": "ms", "raw": "fdatasync/s"}
WHAT = {
    "batch": f"messages to {KEYS} worlds in batches of {BATCH:,}, until journaled",
    "senders": f"messages to {KEYS} worlds by {SENDERS} callers, until journaled",
    "hot": f"messages to one world in batches of {BATCH:,}, until journaled",
    "p95": f"send to journaled at {LATENCY_PER_S}/s",
}
# The measures of each part of a turn.
PARTS = {"batch": ("batch",), "senders": ("senders",), "hot": ("hot",), "latency": ("p50", "p95")}


@dataclass(frozen=True)
class Amount:
    """The number of messages of a system."""

    per_key: int = 100
    hot: int = 10_000
    latency: int = 250

    def scaled(self, by: float) -> Amount:
        """Reduce the amount for a small budget. Never increases it, never to zero."""
        by = min(by, 1.0)
        return replace(
            self,
            per_key=max(int(self.per_key * by), 2),
            hot=max(int(self.hot * by), 50),
            latency=max(int(self.latency * by), 50),
        )

    def __str__(self) -> str:
        return f"{KEYS} × {self.per_key}, hot {self.hot}, latency {self.latency}"


GOALS = (
    Goal("batch", "total", at_least=10),
    Goal("senders", "total", at_least=3),
    Goal("hot", "total", at_least=5),
    Goal("p95", "p95", below=1),
)
