"""The leader's pane: the tmux pane that dispatches to `leader` go to, as set by the leader.

A universe has at most one. Setting it subscribes the leader to notifications of finished dispatches
(`notifications`), and clearing it unsubscribes. The adapter checks whether the pane exists.
"""

from __future__ import annotations

from holdfast import codec
from holdfast.codec import Record
from holdfast.dispatch import notifications
from holdfast.dispatch.request import topic
from holdfast.durable.validation import check_name
from holdfast.store import schema
from holdfast.store.api import Txn, operation

# The target name that resolves to the leader's pane.
LEADER = "leader"


class LeaderPane(Record, frozen=True):
    """A pane: its tmux target, the program that runs there, and the socket of its tmux server."""

    target: str
    cli: str
    socket: str = ""
    since_ns: int = 0


@operation("leader_pane.set_leader")
def set_leader(txn: Txn, universe: str, target: str, cli: str, socket: str) -> LeaderPane:
    """Set the leader's pane, replacing the former one."""
    check_name("target", target)
    check_name("cli", cli)
    if socket:
        check_name("socket", socket)
    pane = LeaderPane(target, cli, socket, txn.now_ns)
    txn.put(_key(universe), codec.pack(pane))
    notifications.subscribe.fn(txn, universe)
    txn.notify(topic(universe))
    return pane


@operation("leader_pane.clear_leader")
def clear_leader(txn: Txn, universe: str) -> bool:
    """Clear the leader's pane. Return whether one was set."""
    if find_leader(txn, universe) is None:
        return False
    txn.delete(_key(universe))
    notifications.unsubscribe.fn(txn, universe)
    return True


def find_leader(txn: Txn, universe: str) -> LeaderPane | None:
    """Return the leader's pane, or None."""
    row = txn.get(_key(universe))
    return None if row is None else codec.unpack_as(LeaderPane, row)


def _key(universe: str) -> bytes:
    check_name("universe", universe)
    return schema.key_prefix(schema.Space.APP_STATE, "dispatch", universe, "leader")
