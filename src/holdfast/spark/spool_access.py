"""How a process reaches the spool of a run. Light to import: every child process has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from holdfast.spark.client import Client
    from holdfast.spark.spool_line import SpoolLine


class SpoolAccess(msgspec.Struct, frozen=True):
    """What a process needs to use a spool. It travels to executors with the function, and is shown nowhere."""

    url: str
    # The columns of the key, which come first in a block.
    key: list[str] = []
    options: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"SpoolAccess({self.url!r})"


def line_to(
    access: SpoolAccess | None, client: Client, run_id: str, lease_s: float
) -> SpoolLine | None:
    """A child's line for a run with a spool."""
    if access is None:
        return None
    from holdfast.spark.spool_line import SpoolLine  # loads much that others do without

    return SpoolLine(client, access, run_id, lease_s)
