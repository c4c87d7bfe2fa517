"""`holdfast up` on PostgreSQL: two processes share a database, and one is stopped, drained or killed."""

from tests.process.test_up import (
    runtime,
    store,
    test_events_sent_without_a_worker_wait_for_the_next_worker,
    test_signal_drains_the_worker_and_releases_its_leases,
    test_stopped_worker_loses_its_worlds_and_keeps_running,
    test_up_handles_events_sent_by_another_process,
    test_up_prints_ready_and_serves_worlds,
    test_up_runs_roles_in_separate_processes,
    test_workers_drain_moves_worlds_without_losing_events,
    test_worlds_of_a_killed_worker_fail_over_within_the_lease,
    up,
)

__all__ = [
    "runtime",
    "store",
    "test_events_sent_without_a_worker_wait_for_the_next_worker",
    "test_signal_drains_the_worker_and_releases_its_leases",
    "test_stopped_worker_loses_its_worlds_and_keeps_running",
    "test_up_handles_events_sent_by_another_process",
    "test_up_prints_ready_and_serves_worlds",
    "test_up_runs_roles_in_separate_processes",
    "test_workers_drain_moves_worlds_without_losing_events",
    "test_worlds_of_a_killed_worker_fail_over_within_the_lease",
    "up",
]
