"""Retention: deletes older runs of a stage after a run has ended (`Stage(keep_runs=)`)."""

from __future__ import annotations

import sys

from holdfast.errors import HoldfastError
from holdfast.ledger import run_deletion
from holdfast.spark.spool_maintenance import SpoolDeletion
from holdfast.store.api import Store


def retain(store: Store, name: str, keep: int) -> None:
    """Keep the newest `keep` runs of a name; 0 keeps all. Runs that cannot be deleted now are left
    for the next call.
    """
    if not keep:
        return
    try:
        run_deletion.keep_newest(store, name, keep, SpoolDeletion())
    except HoldfastError as error:
        print(f"holdfast: older runs of {name} are kept: {error}", file=sys.stderr, flush=True)
