"""Each planted bug of the load limits makes a test of this directory fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import holdfast as hf
from holdfast import store as stores
from holdfast.app.runtime import Runtime
from holdfast.errors import HoldfastError
from tests.flows.rig import FlowRig
from tests.limits import test_flow_inboxes as inboxes
from tests.limits import test_load_limits as limits
from tests.limits import test_worlds_per_worker as placement
from tests.simulation.mutants_limits import LIMITS
from tests.simulation.source_edits import Mutant
from tests.tasks import test_fair_turns as turns
from tests.tasks import test_queue_pause as pauses
from tests.workers.rig import WorkerRig
from tests.workers.shop import Buyer
from tests.world.rig import WorldRig

MODULES = ("holdfast.durable.load_limits", "holdfast.world.load_admission")


def with_runtime(test: Callable[[Runtime], None]) -> Callable[[], None]:
    def run() -> None:
        app = hf.App("shop", worlds=[Buyer], tasks=[limits.pack, limits.ship], flows=[limits.sell])
        with app.open(stores.open("memory:"), roles=()) as rt:
            test(rt)

    return run


def with_rig(test: Callable[[WorkerRig], None]) -> Callable[[], None]:
    return lambda: test(WorkerRig())


def with_flows(test: Callable[[FlowRig], None]) -> Callable[[], None]:
    return lambda: test(inboxes.make_rig())


def entry(name: str, limit: str) -> Callable[[], None]:
    return with_runtime(
        lambda rt: limits.test_full_backlog_refuses_new_tasks_and_flows(rt, name, limit)
    )


def place_worlds() -> None:
    rig = WorldRig()
    placement.test_no_worker_gets_more_worlds_than_the_limit(rig, placement.make_leader(rig))


def random_tasks() -> None:
    for seed in range(6):
        limits.test_counters_equal_the_work_after_random_operations(seed)


KILLERS: dict[str, Callable[[], None]] = {
    "limit: accepts one task too many in a queue": entry("submit with a key", "queue"),
    "limit: accepts one task too many in a universe": entry("submit with a key", "tasks"),
    "limit: refuses the repeat of an accepted submission": with_runtime(limits.test_repeat_of_an_accepted_call_is_not_refused),
    "limit: forgets the tasks that are accepted in the same commit": with_runtime(limits.test_merged_submissions_are_refused_one_by_one),
    "limit: keeps leased tasks in the backlog": random_tasks,
    "limit: counts no task that exists when it is set": with_runtime(limits.test_limit_counts_the_tasks_that_exist_when_it_is_set),
    "limit: judges no flow": entry("start", "queue"),
    "limit: judges no occurrence": limits.test_refused_occurrence_is_recorded_and_can_be_backfilled,
    "limit: counts the arguments of tasks from before it was set": random_tasks,
    "limit: keeps the arguments of ended tasks": random_tasks,
    "limit: keeps the bytes of read messages": with_rig(limits.test_bytes_in_flight_count_unread_messages_and_unfinished_tasks),
    "limit: accepts one event too many in an inbox": with_rig(limits.test_full_inbox_refuses_events_and_delays_mail),
    "limit: accepts mail into a full inbox": with_rig(limits.test_full_inbox_refuses_events_and_delays_mail),
    "limit: refuses the repeat of an accepted event": with_rig(limits.test_repeated_event_of_a_full_inbox_is_not_refused),
    "limit: refuses receipts": with_rig(limits.test_cycle_of_an_accepted_event_may_exceed_the_limit),
    "limit: keeps ended effects in the backlog": with_rig(limits.test_backlog_of_effects_refuses_events_until_effects_end),
    "limit: ignores the backlog of a kind of effects": with_rig(limits.test_backlog_of_one_kind_and_of_timers_refuse_events),
    "limit: ignores the backlog of timers": with_rig(limits.test_backlog_of_one_kind_and_of_timers_refuse_events),
    "queue pause: grants ready tasks": lambda: pauses.test_paused_queue_grants_nothing_and_accepts_tasks(turns.make_rig()),
    "queue pause: ends with a new limit": lambda: pauses.test_new_limit_does_not_resume_a_queue(turns.make_rig()),
    "queue pause: notifies no worker at its end": lambda: pauses.test_resume_notifies_the_queue(turns.make_rig()),
    "queue pause: shows workers work that they do not get": lambda: pauses.test_paused_queue_shows_no_work(turns.make_rig()),
    "limit keys: take no turns": lambda: turns.test_flood_of_one_tenant_does_not_double_the_p95_wait_of_another(turns.make_fast_rig()),
    "limit keys: do not advance the reached rank": lambda: turns.test_new_limit_keys_do_not_starve_an_older_one(turns.make_rig()),
    "limit keys: keep the place of a throttled task": lambda: turns.test_throttled_tasks_return_in_order(turns.make_rig()),
    "limit: places one world too many on a worker": place_worlds,
    "limit: accepts one event too many in the inbox of a flow": with_flows(inboxes.test_received_event_makes_room_in_the_inbox),
    "limit: refuses the event of a waiting receive": with_flows(inboxes.test_waiting_receive_gets_its_event_at_any_limit),
    "limit: ignores the bytes of events of flows": with_flows(inboxes.test_waiting_receive_gets_its_event_at_any_limit),
    "limit: keeps the bytes of received events of flows": with_flows(inboxes.test_received_event_makes_room_in_the_inbox),
    "limit: keeps received events in the depth of an inbox": with_flows(inboxes.test_received_event_makes_room_in_the_inbox),
    "limit: keeps the bytes of events of ended flows": with_flows(inboxes.test_bytes_in_flight_counts_the_events_of_open_flows),
}  # fmt: skip


def test_every_planted_bug_has_a_killer() -> None:
    assert set(KILLERS) == set(LIMITS)


@pytest.mark.parametrize("name", LIMITS)
def test_planted_bug_of_a_limit_is_killed(name: str) -> None:
    KILLERS[name]()
    # A refusal that does not come is `Failed`, a refusal too many an error of the product.
    errors = (AssertionError, pytest.fail.Exception, HoldfastError)
    with Mutant(name, LIMITS[name]).planted(), pytest.raises(errors):
        KILLERS[name]()
