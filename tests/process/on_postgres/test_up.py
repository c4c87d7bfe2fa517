"""`holdfast up` on PostgreSQL: two processes share a database; one is stopped, drained, killed."""

from tests.process.test_up import (
    runtime,
    store,
    test_a_signal_drains_at_once,
    test_a_worker_that_is_drained_gives_up_its_worlds_and_no_message,
    test_a_worker_that_was_stopped_finds_its_worlds_taken_and_goes_on,
    test_another_process_sends,
    test_another_worker_takes_over_within_the_lease,
    test_it_says_that_it_is_ready_and_serves,
    test_roles_may_run_in_processes_of_their_own,
    test_what_is_sent_while_nobody_runs_waits,
    up,
)

__all__ = [
    "runtime",
    "store",
    "test_a_signal_drains_at_once",
    "test_a_worker_that_is_drained_gives_up_its_worlds_and_no_message",
    "test_a_worker_that_was_stopped_finds_its_worlds_taken_and_goes_on",
    "test_another_process_sends",
    "test_another_worker_takes_over_within_the_lease",
    "test_it_says_that_it_is_ready_and_serves",
    "test_roles_may_run_in_processes_of_their_own",
    "test_what_is_sent_while_nobody_runs_waits",
    "up",
]
