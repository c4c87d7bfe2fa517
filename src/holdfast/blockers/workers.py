"""Why a worker gets no work: it is silent, draining, or unknown to the current leader."""

from __future__ import annotations

from holdfast.blockers.answer import Blocker, WhyAnswer, answer, blocker
from holdfast.blockers.live_workers import is_live
from holdfast.clock import S
from holdfast.errors import NotFound
from holdfast.leadership import leader_lease, worker_registry
from holdfast.store.api import Txn


def explain(txn: Txn, universe: str, id: str) -> WhyAnswer:
    record = worker_registry.find(txn, universe, id)
    if record is None:
        raise NotFound(what="worker", worker=id[:200], universe=universe)
    if not is_live(txn, record):
        ago_s = (txn.now_ns - record.heartbeat_ns) / S
        text = f"its last heartbeat was {ago_s:,.0f} s ago"
        return answer("worker", id, "silent", [blocker("worker_dead", text, record.heartbeat_ns)])
    found: list[Blocker] = []
    if record.draining:
        names = {"worker": id, "universe": universe}
        text = f"drained by an operator; it hosts {record.worlds:,} worlds and has {record.leases:,} tasks"
        found.append(blocker("worker_draining", text, names=names))
    epoch = leader_lease.epoch(txn, universe)
    if record.authority_epoch != epoch:
        text = f"its last heartbeat is of leader epoch {record.authority_epoch}, the leader has epoch {epoch}"
        found.append(blocker("worker_not_counted", text))
    return answer("worker", id, "draining" if record.draining else "live", found)
