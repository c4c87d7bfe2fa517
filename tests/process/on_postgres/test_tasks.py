"""Task workers on PostgreSQL, ended by their own tasks, stopped for longer than a lease, told to stop."""

from tests.process.test_tasks_killed import (
    rt,
    store,
    test_a_task_that_ends_its_worker_is_dead_and_those_beside_it_complete,
    test_a_worker_that_is_told_to_stop_ends_what_it_has_begun,
    test_a_worker_that_stood_still_beyond_its_lease_brings_no_second_end,
    test_an_isolated_task_that_ends_its_process_leaves_its_worker_and_the_others_alone,
    up,
)

__all__ = [
    "rt",
    "store",
    "test_a_task_that_ends_its_worker_is_dead_and_those_beside_it_complete",
    "test_a_worker_that_is_told_to_stop_ends_what_it_has_begun",
    "test_a_worker_that_stood_still_beyond_its_lease_brings_no_second_end",
    "test_an_isolated_task_that_ends_its_process_leaves_its_worker_and_the_others_alone",
    "up",
]
