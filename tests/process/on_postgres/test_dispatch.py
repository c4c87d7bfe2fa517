"""Prompts to panes on PostgreSQL: a dispatcher and an adapter in processes of their own."""

from tests.process.test_dispatch_killed import (
    foreman,
    store,
    test_a_leader_that_comes_late_gets_what_waited_for_it,
    tmux,
    up,
)

__all__ = [
    "foreman",
    "store",
    "test_a_leader_that_comes_late_gets_what_waited_for_it",
    "tmux",
    "up",
]
