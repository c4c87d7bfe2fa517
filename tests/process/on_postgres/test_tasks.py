"""Task workers on PostgreSQL: crashed by their tasks, stopped for longer than a lease, terminated."""

from tests.process.test_tasks_killed import (
    rt,
    store,
    test_isolated_task_that_crashes_its_process_does_not_affect_other_tasks,
    test_sigterm_lets_the_worker_finish_its_task,
    test_task_that_crashes_its_worker_is_dead_and_other_tasks_complete,
    test_worker_stopped_beyond_its_lease_reports_no_second_end,
    up,
)

__all__ = [
    "rt",
    "store",
    "test_isolated_task_that_crashes_its_process_does_not_affect_other_tasks",
    "test_sigterm_lets_the_worker_finish_its_task",
    "test_task_that_crashes_its_worker_is_dead_and_other_tasks_complete",
    "test_worker_stopped_beyond_its_lease_reports_no_second_end",
    "up",
]
