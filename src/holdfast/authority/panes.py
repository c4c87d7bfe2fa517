"""Where the leader sits: the pane that dispatches to `leader` go to, named by whoever sits there.

A universe has at most one. Naming it makes the leader somebody who is told of dispatches that ended
(`replay`); taking the name back ends that. Whether the pane is there is for the adapter to see.
"""

from __future__ import annotations

from holdfast import codec
from holdfast.authority import replay
from holdfast.authority.dispatch import topic
from holdfast.codec import Record
from holdfast.durable.bounds import check_name
from holdfast.store import schema
from holdfast.store.api import Txn, operation

# The target that means the leader's pane, wherever that is.
LEADER = "leader"


class Pane(Record, frozen=True):
    """A pane as tmux is asked for it, what runs there, and the server that has it."""

    target: str
    cli: str
    socket: str = ""
    since_ns: int = 0


@operation
def set_leader(txn: Txn, universe: str, target: str, cli: str, socket: str) -> Pane:
    """Name the leader's pane, instead of the one before."""
    check_name("target", target)
    check_name("cli", cli)
    if socket:
        check_name("socket", socket)
    pane = Pane(target, cli, socket, txn.now_ns)
    txn.put(_key(universe), codec.pack(pane))
    replay.follow.fn(txn, universe)
    txn.notify(topic(universe))
    return pane


@operation
def clear_leader(txn: Txn, universe: str) -> bool:
    """Nobody leads from a pane any more; whether anybody did."""
    if leader(txn, universe) is None:
        return False
    txn.delete(_key(universe))
    replay.unfollow.fn(txn, universe)
    return True


def leader(txn: Txn, universe: str) -> Pane | None:
    row = txn.get(_key(universe))
    return None if row is None else codec.unpack_as(Pane, row)


def _key(universe: str) -> bytes:
    check_name("universe", universe)
    return schema.prefix(schema.Space.APP_STATE, "dispatch", universe, "leader")
