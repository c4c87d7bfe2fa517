"""Spool access: the settings with which a process reaches the spool of a run. Every child imports
it, so it has few imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from holdfast.spark.ledger_client import LedgerClient
    from holdfast.spark.spool_client import SpoolClient


class SpoolAccess(msgspec.Struct, frozen=True):
    """URL and credentials of a spool. It travels to executors with the function and is never
    displayed.
    """

    url: str
    # The key columns, which are first in a block.
    key: list[str] = []
    options: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"SpoolAccess({self.url!r})"


def spool_client_for(
    access: SpoolAccess | None, client: LedgerClient, run_id: str, lease_s: float
) -> SpoolClient | None:
    """Return the spool client of a child, if the run has a spool."""
    if access is None:
        return None
    from holdfast.spark.spool_client import SpoolClient  # a heavy import, needed with a spool only

    return SpoolClient(client, access, run_id, lease_s)
