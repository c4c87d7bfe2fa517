"""Deletes older runs of a stage when a run has ended (`Stage(keep_runs=)`)."""

from __future__ import annotations

import sys

from holdfast.errors import HoldfastError
from holdfast.ledger import prune
from holdfast.spark.spool_upkeep import Deletion
from holdfast.store.api import Store


def retain(store: Store, name: str, keep: int) -> None:
    """Keep the newest `keep` runs of a name, 0 for all. The run that has just ended is whole in any case: what cannot be deleted
    now is left for the next time."""
    if not keep:
        return
    try:
        prune.retain(store, name, keep, Deletion())
    except HoldfastError as error:
        print(f"holdfast: older runs of {name} stay: {error}", file=sys.stderr, flush=True)
