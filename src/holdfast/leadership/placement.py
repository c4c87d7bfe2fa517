"""Placement of worlds on workers by rendezvous hashing (highest random weight).

Every (world, worker) pair has a fixed weight, and a world belongs to the worker with the highest
weight. So every process computes the same assignment from the same names, without a table. A new
worker takes over only worlds for which it has the highest weight. A worker that leaves gives up
only its own worlds.

- `workers` are the eligible hosts: live and not draining. All other workers count as gone.
- A pin is set by an operator. It remains in force while its worker is gone: the world waits for it.
- Without any worker nothing moves: a returning worker finds its worlds still assigned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from hashlib import blake2b
from typing import NamedTuple


class MoveReason(Enum):
    """The reason of a move, the most urgent first. A plan has the same order."""

    UNASSIGNED = "unassigned"
    WORKER_GONE = "worker_gone"
    PINNED = "pinned"
    REBALANCED = "rebalanced"


class PlacementMove(NamedTuple):
    """A change of a world's assignment."""

    world_id: str
    source: str | None
    target: str
    why: MoveReason


def choose_worker(world_id: str, workers: Sequence[str]) -> str | None:
    """Return the worker of a world; None without workers. The order of workers has no effect."""
    return _heaviest(world_id.encode(), _weight_keys(workers))


def choose_with_room(
    world_id: str, workers: Sequence[str], loads: Mapping[str, int], worlds_max: int
) -> str | None:
    """Return the worker of a world below `worlds_max` worlds per worker: of the two with the highest weights, the one
    with fewer worlds. None if no worker has room."""
    world = world_id.encode()
    roomy = [worker for worker in workers if loads.get(worker, 0) < worlds_max]
    weighed = sorted(
        (
            (blake2b(salt + world, digest_size=8).digest(), worker)
            for salt, worker in _weight_keys(roomy)
        ),
        reverse=True,
    )
    heaviest = [worker for _, worker in weighed[:2]]
    return min(heaviest, key=lambda worker: loads.get(worker, 0), default=None)


def plan_moves(
    assigned: Mapping[str, str | None], workers: Sequence[str], pins: Mapping[str, str]
) -> list[PlacementMove]:
    """Return the moves that bring every world to its worker. Empty after the plan has been
    applied."""
    hosts = frozenset(workers)
    weight_keys = _weight_keys(hosts)
    moves = []
    for world_id, source in assigned.items():
        pin = pins.get(world_id)
        target = _heaviest(world_id.encode(), weight_keys) if pin is None else pin
        if target is None or target == source:
            continue
        if source is None:
            why = MoveReason.UNASSIGNED
        elif source not in hosts:
            why = MoveReason.WORKER_GONE
        else:
            why = MoveReason.REBALANCED if pin is None else MoveReason.PINNED
        moves.append(PlacementMove(world_id, source, target, why))
    return sorted(moves, key=lambda move: (_URGENCY[move.why], move.world_id))


# -- inside --------------------------------------------------------------------------------------

_URGENCY = {why: at for at, why in enumerate(MoveReason)}


def _weight_keys(workers: Iterable[str]) -> list[tuple[bytes, str]]:
    return [(worker.encode() + b"\x00", worker) for worker in workers]


def _heaviest(world: bytes, weight_keys: Sequence[tuple[bytes, str]]) -> str | None:
    # The name breaks a tie of 64-bit weights, which is very unlikely.
    _, found = max(
        ((blake2b(salt + world, digest_size=8).digest(), worker) for salt, worker in weight_keys),
        default=(b"", None),
    )
    return found
