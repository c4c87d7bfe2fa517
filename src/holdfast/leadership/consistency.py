"""Consistency check of the leader lease: the stored lease, from its log."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.durable.difference import Difference
from holdfast.leadership import leader_lease
from holdfast.store.api import Txn


def check_leader_lease(txn: Txn, universe: str) -> Iterator[Difference]:
    stored, rebuilt = leader_lease.read(txn, universe), leader_lease.rebuild(txn, universe)
    if stored != rebuilt:
        yield Difference("authority", universe, "lease", stored.lease_id, rebuilt.lease_id)
