"""The load limits that refuse new work of a subject (see `durable.load_limits`)."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.blockers.answer import Blocker, blocker
from holdfast.durable import load_limits
from holdfast.store.api import Txn
from holdfast.workers.limit_settings import NAMED, LimitFigure


def reached(universe: str, figures: Iterable[LimitFigure]) -> list[Blocker]:
    """The blockers of the limits that new work would exceed."""
    found: list[Blocker] = []
    for name, limit, used in figures:
        if used is not None and used >= limit:
            text = f"limit {name}: {used:,} of {limit:,}; new work is refused"
            names = {"limit": name, "universe": universe}
            found.append(blocker("limit_reached", text, names=names))
    return found


def queue_figures(txn: Txn, universe: str, name: str, waiting: int) -> list[LimitFigure]:
    """The limit of one queue, `queue:NAME` or `effect_kind:NAME`, with its present figure."""
    limits = load_limits.find(txn, universe)
    group, _, key = name.partition(":")
    values = {} if limits is None else getattr(limits, NAMED[group])
    return [LimitFigure(name, values[key], waiting)] if key in values else []


def flow_inbox_figures(txn: Txn, universe: str, depth: int) -> list[LimitFigure]:
    """The limit of the inbox of a flow, with its depth."""
    limits = load_limits.find(txn, universe)
    has_limit = limits is not None and limits.flow_inbox
    return [LimitFigure("flow_inbox", limits.flow_inbox, depth)] if limits and has_limit else []


def inbox_figures(txn: Txn, universe: str, depth: int) -> list[LimitFigure]:
    """The limit of the inbox of a world, with its depth."""
    limits = load_limits.find(txn, universe)
    return [] if limits is None or not limits.inbox else [LimitFigure("inbox", limits.inbox, depth)]
