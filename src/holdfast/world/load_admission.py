"""Judgement of a new message against the load limits of its universe (see `durable.load_limits`).

An event of a client is new work: it may emit effects and timers. The commit that delivers it therefore refuses it at
each of these limits. Mail of another world is part of accepted work: a full inbox delays it, and no other limit
applies. Receipts and timers are never refused.
"""

from __future__ import annotations

from holdfast.config import INBOX_DEPTH_MAX
from holdfast.durable import inbox, load_limits, queue
from holdfast.durable.load_limits import BYTES, EFFECTS, LoadLimits
from holdfast.store.api import Txn
from holdfast.world import timers
from holdfast.world.catalog import subject_of


def inbox_max(limits: LoadLimits | None) -> int:
    """Return the depth at which an inbox refuses events and mail."""
    return INBOX_DEPTH_MAX if limits is None else limits.inbox or INBOX_DEPTH_MAX


def judge_event(txn: Txn, universe: str, world_id: str, size: int, limits: LoadLimits) -> None:
    """Refuse a new event with Overloaded if it would exceed a limit."""
    if limits.inbox:
        depth = inbox.depth(txn, subject_of(universe, world_id)) + 1
        if depth > limits.inbox:
            raise load_limits.refuse("inbox", universe, depth, limits.inbox, world_id=world_id)
    if limits.bytes_in_flight:
        found = load_limits.counted(txn, universe, BYTES) + size
        if found > limits.bytes_in_flight:
            raise load_limits.refuse(BYTES, universe, found, limits.bytes_in_flight)
    judge_emissions(txn, universe, limits)


def judge_emissions(txn: Txn, universe: str, limits: LoadLimits) -> None:
    """Refuse work that may emit effects and timers while their backlog has reached its limit."""
    if limits.effects:
        found = load_limits.counted(txn, universe, EFFECTS)
        if found >= limits.effects:
            raise load_limits.refuse(EFFECTS, universe, found, limits.effects)
    for effect_kind, kind_max in limits.effect_kinds.items():
        found = queue.counts(txn, f"{universe}/effects/{effect_kind}").open
        if found >= kind_max:
            name = {"effect_kind": effect_kind}
            raise load_limits.refuse("effect_kind", universe, found, kind_max, **name)
    if limits.timers:
        queues = (timers.delay_queue(universe), timers.calendar_queue(universe))
        found = sum(queue.counts(txn, name).open for name in queues)
        if found >= limits.timers:
            raise load_limits.refuse("timers", universe, found, limits.timers)
