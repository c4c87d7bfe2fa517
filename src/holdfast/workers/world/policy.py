"""The policy of a world worker: its leases, time limits and batch sizes."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.config import UNKNOWN_EVENT_TIMEOUT_S
from holdfast.world.host import Budgets, SnapshotPolicy


@dataclass(frozen=True, slots=True)
class WorldWorkerPolicy:
    lease_ttl_s: float = 10.0
    # The fraction of the TTL that is left when a lease is renewed.
    renewal_margin: float = 0.6
    # A world without work for this long is released.
    idle_s: float = 15.0
    worlds_per_tick: int = 512
    # The time limit of a tick. After it no further world is started.
    tick_s: float = 1.0
    stuck_max: int = 5
    heartbeat_s: float = 1.0
    compacted_per_tick: int = 4
    # The retry delay for a world whose lease another worker holds.
    retry_s: float = 0.1
    # An item unknown to all live workers becomes a dead letter after this much store time.
    unknown_event_s: float = UNKNOWN_EVENT_TIMEOUT_S
    budgets: Budgets = field(default_factory=Budgets)
    snapshots: SnapshotPolicy = field(default_factory=SnapshotPolicy)
