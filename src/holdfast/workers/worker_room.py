"""The room of workers for worlds, below the load limit `worlds_per_worker` (see `durable.load_limits`).

The orchestrator counts the assigned worlds of each live worker when it places worlds, and only while the limit is
set. A pinned world and a world that resumes after a stop go to their worker without regard to the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.config import SCAN_PAGE
from holdfast.durable import load_limits
from holdfast.leadership import placement
from holdfast.store.api import Txn
from holdfast.world import catalog


class WorkerRoom:
    """The number of worlds of each worker, and the limit. It counts the worlds that it places."""

    def __init__(self, loads: dict[str, int], worlds_max: int) -> None:
        self._loads = loads
        self._worlds_max = worlds_max

    def is_full(self) -> bool:
        """Whether no worker has room."""
        return all(count >= self._worlds_max for count in self._loads.values())

    def choose(self, world_id: str, workers: Sequence[str]) -> str | None:
        """Choose the worker of a world; None if no worker has room."""
        chosen = placement.choose_with_room(world_id, workers, self._loads, self._worlds_max)
        if chosen is not None:
            self._loads[chosen] = self._loads.get(chosen, 0) + 1
        return chosen


def read_room(txn: Txn, universe: str, workers: Iterable[str]) -> WorkerRoom | None:
    """Read the room of workers; None without a limit."""
    limits = load_limits.find(txn, universe)
    if limits is None or not limits.worlds_per_worker:
        return None
    worlds_max = limits.worlds_per_worker
    loads = {worker: count_assigned(txn, universe, worker, worlds_max) for worker in workers}
    return WorkerRoom(loads, worlds_max)


def count_assigned(txn: Txn, universe: str, worker: str, worlds_max: int) -> int:
    """Count the worlds of a worker, up to `worlds_max`."""
    count, after = 0, ""
    while count < worlds_max:
        page = catalog.list_assigned(
            txn, universe, worker, after, min(SCAN_PAGE, worlds_max - count)
        )
        if not page:
            break
        count, after = count + len(page), page[-1]
    return count
