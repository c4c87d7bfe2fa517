"""Each planted bug of the counters and indexes for operators makes a test fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast import store as stores
from holdfast.errors import HoldfastError
from tests.api import test_ended as ended
from tests.api import test_errors as errors
from tests.api import test_flows as flows
from tests.api import test_pending_work as pending
from tests.api import test_tasks as tasks
from tests.api.rig import ApiRig
from tests.simulation.mutants_counters import COUNTERS
from tests.simulation.source_edits import Mutant
from tests.tasks import test_task_list as task_list
from tests.tasks.test_fair_turns import make_rig


def with_rig(test: Callable[[ApiRig], None]) -> Callable[[], None]:
    def run() -> None:
        with stores.open("memory:") as store, ApiRig(store, "shop") as rig:
            test(rig)

    return run


def remove_tagged_task() -> None:
    task_list.test_redriven_task_keeps_its_tag_and_a_removed_one_leaves_the_list(make_rig())


KILLERS: dict[str, Callable[[], None]] = {
    "tags: lists no new task": with_rig(tasks.test_tasks_are_listed_by_tag),
    "tags: keeps a removed task": remove_tagged_task,
    "tags: lists no new flow": with_rig(flows.test_flows_are_listed_by_tag),
    "tags: keeps an ended effect": with_rig(pending.test_effects_are_listed_by_tag_until_they_end),
    "error groups: count no new subject": with_rig(errors.test_failed_tasks_with_the_same_error_form_a_group),
    "error groups: keep the number of removed subjects": with_rig(errors.test_redriven_or_removed_subject_leaves_its_group),
    "error groups: count no new group": with_rig(errors.test_failed_tasks_with_the_same_error_form_a_group),
    "error groups: leave out tasks": with_rig(errors.test_failed_tasks_with_the_same_error_form_a_group),
    "error groups: keep redriven tasks": with_rig(errors.test_redriven_or_removed_subject_leaves_its_group),
    "error groups: leave out flows": with_rig(errors.test_dead_letters_and_flows_form_groups),
    "error groups: leave out dead letters": with_rig(errors.test_dead_letters_and_flows_form_groups),
    "error groups: keep dropped letters": with_rig(errors.test_redriven_or_removed_subject_leaves_its_group),
    "ended: counts no task": with_rig(ended.test_ends_are_counted_by_queue_and_outcome),
    "ended: counts one task of each batch": with_rig(ended.test_ends_are_counted_by_queue_and_outcome),
    "ended: counts activations as tasks": with_rig(ended.test_ends_are_counted_by_queue_and_outcome),
    "ended: does not note removed tasks": ended.test_counts_of_removed_work_stay_and_old_minutes_are_removed,
    "ended: keeps old minutes": ended.test_rows_of_a_day_do_not_grow,
    "ended: bounds no queues": ended.test_queues_beyond_their_maximum_are_counted_together,
}  # fmt: skip


def test_every_planted_bug_has_a_killer() -> None:
    assert set(KILLERS) == set(COUNTERS)


@pytest.mark.parametrize("name", COUNTERS)
def test_planted_bug_of_a_counter_is_killed(name: str) -> None:
    KILLERS[name]()
    errors = (AssertionError, HoldfastError, KeyError, ValueError, TypeError)
    with Mutant(name, COUNTERS[name]).planted(), pytest.raises(errors):
        KILLERS[name]()
