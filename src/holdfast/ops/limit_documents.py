"""The load limits of a universe as a document, for the command line and the HTTP API."""

from __future__ import annotations

import msgspec

from holdfast.errors import Invalid
from holdfast.store.api import Txn
from holdfast.workers import limit_settings

# The limits that one call changes.
CHANGES_MAX = 1_000


class LimitDocument(msgspec.Struct, frozen=True):
    """A limit. `now` is the present figure, null for a limit of each world, flow or worker."""

    limit: str
    limit_max: int
    now: int | None


class LimitsDocument(msgspec.Struct, frozen=True):
    """The limits that are set."""

    universe: str
    limits: list[LimitDocument]


def read_limits(txn: Txn, universe: str) -> LimitsDocument:
    figures = limit_settings.list_figures(txn, universe)
    return LimitsDocument(universe, [LimitDocument(*figure) for figure in figures])


def check_changes(changes: dict[str, int]) -> None:
    if not 1 <= len(changes) <= CHANGES_MAX:
        raise Invalid(what="limits", found=len(changes), min=1, max=CHANGES_MAX)


def changes_text(changes: dict[str, int]) -> str:
    """Return changes as arguments of `holdfast limits set`, for the audit log."""
    return " ".join(f"{name}={value}" for name, value in changes.items())[:1_000]
