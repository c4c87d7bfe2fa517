"""Dispatches to panes on PostgreSQL: a dispatcher and an adapter in separate processes."""

from tests.process.test_dispatch_killed import (
    foreman,
    store,
    test_dispatch_to_a_late_leader_is_deferred_then_delivered,
    tmux,
    up,
)

__all__ = [
    "foreman",
    "store",
    "test_dispatch_to_a_late_leader_is_deferred_then_delivered",
    "tmux",
    "up",
]
