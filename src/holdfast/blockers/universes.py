"""Why a universe is not ready, or does not move: its readiness, and the task queues without a worker."""

from __future__ import annotations

from holdfast.blockers import limits, queues
from holdfast.blockers.answer import Blocker, WhyAnswer, answer, blocker
from holdfast.blockers.codes import CODES
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.tasks.model import get_counts, keys_of
from holdfast.workers import limit_settings
from holdfast.workers.readiness import ReadinessBlocker, SubjectReadiness, derive_readiness
from holdfast.workers.readiness_facts import clock_warnings, gather_facts

# Subjects and queues that an answer names.
NAMED_MAX = 20
# Queues that are checked.
QUEUES_MAX = 1_000
_ROLES = {"no_live_worker": "world"}


def explain(txn: Txn, id: str) -> WhyAnswer:
    snapshot = derive_readiness(gather_facts(txn, id), txn.now_ns)
    reasons = [_reason(id, one) for one in snapshot.reasons]
    reasons += [_reason(id, one) for one in (*snapshot.warnings, *clock_warnings(txn))]
    subjects = [_subject(id, one) for one in snapshot.subjects[:NAMED_MAX]]
    full = limits.reached(id, limit_settings.list_figures(txn, id))
    found = [*reasons, *subjects, *_unserved_queues(txn, id), *full]
    return answer("universe", id, "ready" if snapshot.ready else "not ready", found)


def _reason(universe: str, one: ReadinessBlocker) -> Blocker:
    code = one.reason.value
    names = {"universe": universe, "role": _ROLES.get(code, "world")}
    return blocker(code, one.text, one.since_ns, names=names)


def _subject(universe: str, one: SubjectReadiness) -> Blocker:
    """The blocker of a world or a run that is not ready."""
    why = one.reasons[0]
    text = f"{one.name}: {why.code}: {why.text}" if why.text else f"{one.name}: {why.code}"
    if one.subject.startswith("run/"):
        return blocker("run_halted", text, why.since_ns)
    return blocker(
        "world_blocked", text, why.since_ns, names={"world": one.name, "universe": universe}
    )


def _unserved_queues(txn: Txn, universe: str) -> list[Blocker]:
    """The blockers of task queues that wait for an operator."""
    keys = keys_of(universe)
    found: list[Blocker] = []
    for key, _ in txn.scan(keys.counts, tuples.prefix_end(keys.counts), QUEUES_MAX):
        queue = str(tuples.unpack(key[len(keys.counts) :])[0])
        counts = get_counts(txn, keys, queue)
        unserved = (counts.ready + counts.suspect and not counts.leased) or counts.stray
        if not unserved:
            continue
        waiting = [
            one
            for one in queues.explain(txn, universe, queue)["blockers"]
            if not CODES[one["code"]].passes
        ]
        if waiting:
            text = f"queue {queue}: {waiting[0]['text']}"
            found.append(
                blocker("task_backlog", text, names={"queue": queue, "universe": universe})
            )
        if len(found) == NAMED_MAX:
            break
    return found
