"""The limits of the HTTP server: sizes of requests, times, and the number of connections."""

from __future__ import annotations

from dataclasses import dataclass

HEAD_BYTES_MAX = 16 * 1024
HEADERS_MAX = 64
TARGET_BYTES_MAX = 4096
# The limit of a whole batch; each stored value has its own limit.
BODY_BYTES_MAX = 16 * 1024 * 1024
# The limit of a route that a client without a token may use.
OPEN_BODY_BYTES_MAX = 16 * 1024
# The bytes after a request that a connection keeps before it reads no more from its client.
UNREAD_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    # Also limited to half of the process's file descriptors, because the store needs some.
    connections_max: int = 1_000
    bodies_bytes_max: int = 256 * 1024 * 1024
    # Timeouts: an idle connection, the arrival of a head and of a body, the client's read of a response.
    idle_s: float = 75.0
    head_s: float = 10.0
    body_s: float = 60.0
    answer_s: float = 60.0
    # The total pause allowed to a body, beyond the time that its bytes need at the minimum rate.
    body_pause_s: float = 5.0
    body_bytes_per_s_min: int = 16 * 1024
    # The most unproven connections, as a share of all connections: in total and per client address. Above
    # it, unproven connections older than the grace period are evicted.
    unproven_share: float = 0.5
    unproven_per_peer_share: float = 0.25
    unproven_grace_s: float = 1.0
    # How much of a rejected body is read and discarded, so that the client can read the error; and the most
    # rejected connections at a time.
    linger_s: float = 2.0
    linger_bytes_max: int = 64 * 1024 * 1024
    rejected_max: int = 32
    # The head timeout of a connection above the connection limit.
    rejected_head_s: float = 1.0
