"""Deadlock of a simulation: a call waits for a flow or a task, and nothing that was started can go on.

In production such a call waits until its timeout is over. In a simulation nothing outside sends an event, so the
call raises `Deadlock`, which names the open flows and tasks and what each of them waits for. The next occurrence of a
schedule does not end a wait: it starts another task or flow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.blockers import flows as flow_blockers
from holdfast.blockers import tasks as task_blockers
from holdfast.errors import Timeout
from holdfast.flows import flow_list
from holdfast.store.api import Txn
from holdfast.tasks import task_list

# Lines of the error, and subjects of one state that are read for them.
SUBJECTS_MAX = 10
OPEN_FLOW_STATES = ("waiting", "parked", "running", "compensating")


class Deadlock(Timeout):
    """A call in a simulation waits for a flow or a task that cannot end."""

    code = "deadlock"
    retryable = False
    hint = (
        "nothing is left to run and no time is due: send the event before you wait for the result, or give the receive a "
        "timeout_s; after crash() call restart()"
    )


def waits_for_subject(topics: str | Sequence[str], universe: str) -> bool:
    """Whether topics are those of one flow or one task, as a call for its result waits for."""
    names = [topics] if isinstance(topics, str) else topics
    prefixes = (f"flows/{universe}/flow/", f"tasks/{universe}/task/")
    return all(name.startswith(prefixes) for name in names)


def describe_waits(txn: Txn, universe: str) -> list[str]:
    """What each open flow and task waits for, one line each."""
    found = [*_flow_lines(txn, universe), *_task_lines(txn, universe)]
    more = len(found) - SUBJECTS_MAX
    return found[:SUBJECTS_MAX] + ([f"and {more} more"] if more > 0 else [])


def _flow_lines(txn: Txn, universe: str) -> Iterator[str]:
    for state in OPEN_FLOW_STATES:
        for row in flow_list.list_flows(txn, universe, state, limit=SUBJECTS_MAX).rows:
            name = row.body.spec.name + (f"/{row.body.key}" if row.body.key else "")
            for blocker in flow_blockers.list_blockers(txn, universe, row.seq):
                yield f"flow {name} {row.id}: {blocker['text']}"


def _task_lines(txn: Txn, universe: str) -> Iterator[str]:
    for row in task_list.list_tasks(txn, universe, "waiting", limit=SUBJECTS_MAX, owned=False).rows:
        for blocker in task_blockers.blockers_of(txn, universe, row):
            yield f"task {row.spec.name} {row.id}: {blocker['text']}"
