"""The registry of blocker codes: what each code means, and what an operator does about it.

`docs/why.md` has a row for each code. A test compares the page with this registry, in both directions. An action
is a text with commands in backticks. A word in capitals is for the operator to fill in. `passes` marks a blocker
that ends without an operator.
"""

from __future__ import annotations

from typing import NamedTuple


class BlockerCode(NamedTuple):
    code: str
    meaning: str
    action: str
    passes: bool = False


_U = "--universe {universe}"
_START_ROLE = "start a worker with the role `{role}`"

_ALL = (
    # -- worlds
    BlockerCode("world_paused", "An operator paused the world. It accepts messages and handles none.", f"`holdfast worlds resume {{world}} {_U}`"),
    BlockerCode("world_parked", "The host parked the world after an error whose code is not on this page.", f"mend what the text names, then `holdfast worlds resume {{world}} {_U}`"),
    BlockerCode("replay_diverged", "The code replays recorded work of a world or a flow differently.", "deploy code that replays the entries of a world identically, or asks for the recorded steps of a flow, then `{resume}`"),
    BlockerCode("reducer_stuck", "The lease was lost several times while a reducer handled the same message.", f"mend the reducer, then `holdfast worlds resume {{world}} {_U}`"),
    BlockerCode("unknown_event", "No live worker declares the type of the next message, or the world type.", "start a worker whose app declares the type"),
    BlockerCode("code_missing", "No live worker has the code that made an entry of the journal.", "start a worker with the code that the text names"),
    BlockerCode("no_leader", "No orchestrator leads the universe, so no world gets a worker.", _START_ROLE),
    BlockerCode("no_live_worker", "No live worker has the role that the subject needs.", _START_ROLE),
    BlockerCode("waits_for_placement", "The orchestrator has not yet assigned the world to a worker.", "", passes=True),
    BlockerCode("worker_dead", "The worker has no recent heartbeat.", "start the worker again, or wait until the orchestrator moves its worlds"),
    BlockerCode("worker_pinned_away", "The world is pinned to a worker that is not live. It waits for that worker.", f"start that worker, or `holdfast worlds unpin {{world}} {_U}`"),
    BlockerCode("lease_held", "A former worker of the subject still holds its lease until it expires.", "", passes=True),
    BlockerCode("waits_for_host", "The assigned worker has not yet acquired the lease of the world.", "", passes=True),
    # -- tasks
    BlockerCode("waits_for_tasks", "The task depends on tasks that have not completed.", ""),
    BlockerCode("limit_key_full", "The tasks with the same limit key use all slots of their limit.", f"wait, or raise it: `holdfast tasks limit {{queue}} --per-key N {_U}`", passes=True),
    BlockerCode("queue_full", "The queue runs as many tasks as its limit allows.", f"wait, or raise it: `holdfast tasks limit {{queue}} --concurrency N {_U}`", passes=True),
    BlockerCode("queue_paused", "An operator paused the queue. It accepts tasks and grants none.", f"`holdfast queues resume {{queue}} {_U}`"),
    BlockerCode("no_worker_for_task", "Workers of the queue are live, but none that asked declares the task.", "start a worker whose app declares it"),
    BlockerCode("waits_for_start_time", "The time at which the subject starts is in the future.", "", passes=True),
    BlockerCode("waits_for_retry", "The last attempt failed. The next one starts after a delay.", "", passes=True),
    BlockerCode("quarantined", "The leases of the task expired. Only a worker without other tasks runs it.", "wait until a worker has ended its other tasks, or start another worker", passes=True),
    BlockerCode("lease_overdue", "The lease has expired. The next lease request of a worker returns the task to its queue.", _START_ROLE),
    BlockerCode("waits_for_worker", "The task is ready, and no task of its queue runs.", "start a worker of the queue, or give it free capacity"),
    BlockerCode("waits_in_queue", "The subject is ready. Its turn comes after those before it in its queue.", "", passes=True),
    BlockerCode("running", "A worker runs it now.", "", passes=True),
    BlockerCode("task_failed", "The task failed, and its attempts are used up.", f"`holdfast tasks redrive {{task}} {_U}`"),
    BlockerCode("task_dead", "The task is dead: cancelled, or its leases expired too often.", f"`holdfast tasks redrive {{task}} {_U}`"),
    # -- flows
    BlockerCode("sleeping", "The flow sleeps until a time.", "", passes=True),
    BlockerCode("waits_for_event", "The flow waits for an event.", f"send it: `holdfast flows send {{flow}} TYPE JSON --app MODULE:APP {_U}`"),
    BlockerCode("waits_for_task", "The flow waits for the task of a step.", f"`holdfast why task {{child}} {_U}`", passes=True),
    BlockerCode("waits_for_effect", "The flow waits for the effect of a step.", f"`holdfast why effect {{child}} {_U}`", passes=True),
    BlockerCode("waits_for_flow", "The flow waits for the child flow of a step.", f"`holdfast why flow {{child}} {_U}`", passes=True),
    BlockerCode("no_worker_for_flow", "Workers of the queue are live, but none that asked declares the flow.", "start a worker whose app declares it"),
    BlockerCode("value_unreadable", "The code cannot read a recorded value.", "deploy an `hf.upcast` of the type in `App(upcasts=…)`, or the type that wrote the value, then `{resume}`"),
    BlockerCode("thread_still_running", "The thread of a step that timed out still runs.", "let the function return, or restart the worker", passes=True),
    BlockerCode("flow_failed", "The flow failed, was cancelled or is dead.", f"`holdfast flows redrive {{flow}} {_U}`"),
    BlockerCode("undo_failed", "A compensation of the flow failed in its last attempt. Its dead letter waits for an operator.", "remove the cause, then `holdfast dead redrive {queue} {seq}`"),
    # -- effects and timers
    BlockerCode("budget_reserved", "Reservations of other calls use the rest of a budget. The effect starts when one of them ends.", "", passes=True),
    BlockerCode("rate_limited", "The starts of this kind of effect are granted until a later time.", "", passes=True),
    BlockerCode("no_effect_worker", "Effects of this kind wait, and no worker claims them.", "start a worker that runs this kind of effect"),
    BlockerCode("claim_expired", "The claim of the worker has expired. The next claim request returns the effect to its queue.", "start a worker that runs this kind of effect"),
    BlockerCode("effect_dead", "The effect is a dead letter. Its world has the receipt.", f"`holdfast effects redrive {{effect_kind}} {{seq}} {_U}`"),
    BlockerCode("timer_dead", "The timer is a dead letter.", f"`holdfast timers redrive {{seq}} {{flag}} {_U}`"),
    BlockerCode("waits_for_due_time", "The timer or the occurrence is due at a time in the future.", "", passes=True),
    BlockerCode("no_timer_worker", "It is due, and no worker has fired it.", "start a worker with the role `timer`"),
    # -- schedules and runs
    BlockerCode("schedule_paused", "An operator paused the schedule.", f"`holdfast schedules resume {{schedule}} {_U}`"),
    BlockerCode("schedule_stopped", "The rule of the schedule cannot be evaluated.", f"mend the rule in the code, or `holdfast schedules delete {{schedule}} {_U}`"),
    BlockerCode("waits_for_last_occurrence", "Occurrences wait for the end of the last started one.", "`{last}`", passes=True),
    BlockerCode("run_halted", "The run stopped at an error of the runtime itself, such as an illegal transition.", "report the text as a bug; run the stage with `fresh=True` into another output"),
    BlockerCode("run_stopped", "A stop rule of the stage was reached. The run grants no rows.", "`holdfast runs retry {run}`, then run the stage again"),
    BlockerCode("no_driver", "No driver process holds the run.", "run the stage again: it resumes"),
    # -- queues and workers
    BlockerCode("worker_draining", "An operator drains the worker. It gets no more worlds and no tasks.", f"`holdfast workers undrain {{worker}} {_U}`"),
    BlockerCode("worker_not_counted", "The worker has no heartbeat under the current leader.", "", passes=True),
    BlockerCode("dead_letters", "The queue has dead letters.", "`holdfast dead list {queue}`"),
    BlockerCode("limit_reached", "A limit of unfinished work is reached. New work is refused with `overloaded`; accepted work continues.", f"wait, or raise it: `holdfast limits set {{limit}}=N {_U}`", passes=True),
    BlockerCode("workers_full", "Every live worker with the type of the world has as many worlds as the limit allows.", f"start another worker, or `holdfast limits set worlds_per_worker=N {_U}`"),
    # -- universes: the reasons of readiness
    BlockerCode("schema_mismatch", "The store has another schema version.", "use the version of holdfast that wrote the store"),
    BlockerCode("authority_missing", "No worker holds the leader lease.", "start a worker with the role `orchestrator`"),
    BlockerCode("authority_stale", "The leader lease has expired and is marked stale.", "start a worker with the role `orchestrator`"),
    BlockerCode("authority_expired", "The leader lease has expired and is not yet marked stale.", f"start a worker with the role `orchestrator`, or `holdfast authority mark-stale {_U}`"),
    BlockerCode("authority_restored", "The leader lease was granted before the store was restored.", "start a worker with the role `orchestrator`"),
    BlockerCode("replay_pending", "Leader notifications wait to be delivered.", "start a worker with the role `dispatch`"),
    BlockerCode("notification_deferred", "Leader notifications are deferred.", "open the pane of the leader: `holdfast dispatch leader`"),
    BlockerCode("mail_waiting", "Messages wait for a universe in another store that was not reached.", "start the other store, or correct its address"),
    BlockerCode("store_time", "The system clock contradicts the times of earlier commits.", "check the system clock"),
    BlockerCode("world_blocked", "Worlds of the universe are paused, parked or stopped.", f"`holdfast why world {{world}} {_U}`"),
    BlockerCode("task_backlog", "Tasks of the universe wait in a queue without a worker that runs them.", f"`holdfast why queue {{queue}} {_U}`"),
)  # fmt: skip

CODES = {one.code: one for one in _ALL}
