"""The runbook of each blocker code: a page of `docs/runbooks` with the commands for an operator.

Codes with the same cause and remedy share a page. `PARKED_FLOW` is the page of a flow whose replay diverged. A test
compares this table with the registry of codes, with the index of the runbooks and with `docs/why.md`.
"""

from __future__ import annotations

DIRECTORY = "docs/runbooks"
PARKED_FLOW = "flows-parked"

_CODES_OF_PAGES = {
    "budget-nearly-used": ("budget_reserved",),
    "clock-step": ("store_time",),
    "dead-letters-growing": ("effect_dead", "timer_dead", "dead_letters"),
    "dispatch-waiting": ("replay_pending", "notification_deferred"),
    "effects-waiting": ("no_effect_worker",),
    "compensation-failed": ("undo_failed",),
    "flow-failed": ("flow_failed",),
    PARKED_FLOW: ("value_unreadable",),
    "leader-missing": (
        "no_leader",
        "authority_missing",
        "authority_stale",
        "authority_expired",
        "authority_restored",
    ),
    "limit-reached": ("limit_reached", "workers_full"),
    "mail-waiting": ("mail_waiting",),
    "no-live-worker": ("no_live_worker",),
    "queue-full": ("queue_full", "limit_key_full"),
    "queue-paused": ("queue_paused",),
    "run-stopped": ("run_halted", "run_stopped", "no_driver"),
    "schedule-stopped": ("schedule_paused", "schedule_stopped"),
    "schema-mismatch": ("schema_mismatch",),
    "task-failed": ("task_failed", "task_dead"),
    "task-quarantined": ("quarantined",),
    "tasks-waiting": (
        "no_worker_for_task",
        "no_worker_for_flow",
        "waits_for_worker",
        "task_backlog",
    ),
    "thread-still-running": ("thread_still_running",),
    "timers-late": ("no_timer_worker",),
    "waits-for-another": (
        "waits_for_tasks",
        "waits_for_task",
        "waits_for_effect",
        "waits_for_flow",
        "waits_for_last_occurrence",
    ),
    "waits-for-event": ("waits_for_event",),
    "waits-for-its-time": (
        "waits_for_start_time",
        "waits_for_retry",
        "waits_for_due_time",
        "sleeping",
        "rate_limited",
    ),
    "waits-for-its-turn": (
        "running",
        "waits_in_queue",
        "waits_for_placement",
        "waits_for_host",
        "worker_not_counted",
    ),
    "worker-dead": ("worker_dead", "lease_held", "lease_overdue", "claim_expired"),
    "worker-draining": ("worker_draining",),
    "world-paused": ("world_paused", "world_blocked"),
    "world-pinned": ("worker_pinned_away",),
    "worlds-parked": ("world_parked", "replay_diverged", "reducer_stuck"),
    "worlds-stopped": ("unknown_event", "code_missing"),
}

PAGES: dict[str, str] = {code: page for page, codes in _CODES_OF_PAGES.items() for code in codes}


def path_of(page: str) -> str:
    """The path of a page from the root of the repository."""
    return f"{DIRECTORY}/{page}.md"
