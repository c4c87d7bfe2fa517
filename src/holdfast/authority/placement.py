"""Which worker shall host a world: the one with the highest random weight (rendezvous hashing).

Every (world, worker) pair has a weight that never changes, and a world belongs to the heaviest of
the workers there are. So anyone computes the same answer from the same names, without a table; a
worker that comes takes only worlds that are its own from now on, and one that goes leaves only its
own behind.

- `workers` are those that may host: live, and not draining. All others count as gone.
- A pin is an operator's word. It stands while its worker is gone too: the world waits for it.
- Without any worker nothing moves: whoever comes back first finds its worlds still assigned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from hashlib import blake2b
from typing import NamedTuple


class Why(Enum):
    """Why a world moves; the most urgent first, and so are the moves of a plan."""

    UNASSIGNED = "unassigned"
    WORKER_GONE = "worker_gone"
    PINNED = "pinned"
    REBALANCED = "rebalanced"


class Move(NamedTuple):
    world_id: str
    source: str | None
    target: str
    why: Why


def choose(world_id: str, workers: Sequence[str]) -> str | None:
    """The worker for a world; None when there is none. The order of workers does not matter."""
    return _heaviest(world_id.encode(), _salted(workers))


def plan(
    assigned: Mapping[str, str | None], workers: Sequence[str], pins: Mapping[str, str]
) -> list[Move]:
    """What to change so that every world is where it belongs. Nothing, once it was carried out."""
    hosts = frozenset(workers)
    salted = _salted(hosts)
    moves = []
    for world_id, source in assigned.items():
        pin = pins.get(world_id)
        target = _heaviest(world_id.encode(), salted) if pin is None else pin
        if target is None or target == source:
            continue
        if source is None:
            why = Why.UNASSIGNED
        elif source not in hosts:
            why = Why.WORKER_GONE
        else:
            why = Why.REBALANCED if pin is None else Why.PINNED
        moves.append(Move(world_id, source, target, why))
    return sorted(moves, key=lambda move: (_URGENCY[move.why], move.world_id))


# -- inside --------------------------------------------------------------------------------------

_URGENCY = {why: at for at, why in enumerate(Why)}


def _salted(workers: Iterable[str]) -> list[tuple[bytes, str]]:
    return [(worker.encode() + b"\x00", worker) for worker in workers]


def _heaviest(world: bytes, salted: Sequence[tuple[bytes, str]]) -> str | None:
    # The name breaks a tie of weights, which 64 bits make a matter of form.
    _, found = max(
        ((blake2b(salt + world, digest_size=8).digest(), worker) for salt, worker in salted),
        default=(b"", None),
    )
    return found
