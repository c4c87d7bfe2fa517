"""Why a stage run does not move: it is halted or stopped, or no driver process holds it."""

from __future__ import annotations

from holdfast.blockers.answer import WhyAnswer, answer, blocker
from holdfast.durable import lease as leases
from holdfast.errors import NotFound
from holdfast.ledger import runs
from holdfast.ledger.runs import UNFINISHED, RunLifecycle
from holdfast.store.api import Txn


def explain(txn: Txn, id: str) -> WhyAnswer:
    """Explain the latest run of a stage name, or a run by its id."""
    record = runs.get_latest(txn, id) or runs.get_record(txn, id)
    if record is None:
        raise NotFound(what="run", found=id[:200])
    state = record.status.value
    if record.status is RunLifecycle.HALTED:
        text = f"halted: {record.halted or 'the run record has no reason'}"
        return answer(
            "run", record.run_id, state, [blocker("run_halted", text, record.finished_ns)]
        )
    if record.status not in UNFINISHED:
        return answer("run", record.run_id, state, [])
    if record.stopped:
        text = f"stopped by a rule of the stage: {record.stopped}"
        return answer(
            "run",
            record.run_id,
            state,
            [blocker("run_stopped", text, names={"run": record.run_id})],
        )
    lease = leases.current_status(txn, runs.lease_resource(record.name))
    if lease is None or not lease.is_live(txn.now_ns, txn.generation):
        since_ns = 0 if lease is None else lease.expires_ns
        return answer(
            "run",
            record.run_id,
            state,
            [blocker("no_driver", "no driver process holds the run", since_ns)],
        )
    text = f"process {lease.worker} holds the run"
    return answer("run", record.run_id, state, [blocker("running", text, until=lease.expires_ns)])
