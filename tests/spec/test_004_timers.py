"""Document 004, section 5, protocol E, the crash window and the chaos row of timers, and test 3.

Where the design differs from the document, the test checks the design and its rule text names the difference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from holdfast import codec, failpoints
from holdfast.clock import S
from holdfast.durable import item as items
from holdfast.durable import queue
from holdfast.durable.item import keys_of
from holdfast.errors import CommitUnknown
from holdfast.messages import IngressKind, Intent
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.workers.timers import delivery
from holdfast.world import timers
from tests.postgres import RIG_STORES
from tests.workers.rig import WorkerRig
from tests.workers.shop import GoodsOrdered, Planned, Repeated, Slept, Unset, Woken
from tests.world.rig import CRASH_AFTER, CRASH_BEFORE, FAULTS, Crash, make_backend

MODULES = (
    "holdfast.world.timers",
    "holdfast.durable.delayed",
    "holdfast.workers.timers.delivery",
    "holdfast.workers.timers.worker",
)

DELAYS, CALENDAR = timers.delay_queue("shop"), timers.calendar_queue("shop")


@pytest.fixture(params=RIG_STORES)
def rig(request: pytest.FixtureRequest) -> Iterator[WorkerRig]:
    opened = WorkerRig(backend=make_backend(request.param))
    yield opened
    opened.store.close()


def pending(txn: Txn, name: str) -> list[tuple[int, Intent]]:
    """The waiting timers as (due, intent), in index order."""
    keys = keys_of(name)
    timers_found = []
    for key, packed_seq in txn.scan(keys.delayed, tuples.prefix_end(keys.delayed), 100):
        due_ns = tuples.unpack(key[len(keys.delayed) :])[0]
        assert isinstance(due_ns, int)
        payload = queue.payload_of(txn, items.load_item(txn, keys, packed_seq))
        timers_found.append((due_ns, codec.unpack_as(Intent, payload)))
    return timers_found


# -- section 5 -----------------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "5) Durable timer runtime",
    "a timer and the journal entry that sets it are one commit",
)
@pytest.mark.parametrize("fault", FAULTS)
def test_timer_and_its_journal_entry_are_one_commit(rig: WorkerRig, fault: str) -> None:
    ada = rig.buyer("ada", Woken("x"))
    ada.send(Slept(60))
    rig.backend.arm({1: fault})
    rig.run_worlds()
    rig.backend.arm({})
    rig.advance_clock()
    rig.run_worlds()
    assert ada.height() == 2
    assert rig.timer_counts().delayed == 1


@pytest.mark.spec(
    "004",
    "5) Durable timer runtime",
    "due timers are ordered by due time, with separate queues for store time and calendar time",
)
def test_due_timers_are_ordered_by_due_time(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Woken("x"))
    wall_s = rig.clock.wall_ns() // S
    for event in (Slept(30), Slept(10), Planned(wall_s + 20), Slept(20), Planned(wall_s + 5)):
        ada.send(event)
    # The step commits late. Delays count from the time at which its reducer ran.
    ran_ns = rig.store.now_ns()
    with failpoints.on("world.submit_cycles", calls=lambda _: rig.clock.advance(7 * S)) as submit:
        rig.run_worlds()
    assert submit.hits
    assert ada.height() == 6
    for name, zero_ns, times_s in ((DELAYS, ran_ns, (10, 20, 30)), (CALENDAR, wall_s * S, (5, 20))):
        waiting = rig.store.read(pending, name)
        assert [round((due_ns - zero_ns) / S, 3) for due_ns, _ in waiting] == list(times_s)
        assert len({intent.intent_hash for _, intent in waiting}) == len(times_s)


@pytest.mark.spec(
    "004", "5) Durable timer runtime", "a delay timer never fires before its due time in store time"
)
def test_fire_due_fires_no_delay_timer_early(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(60))
    due_ns = rig.store.read(queue.next_due_ns, DELAYS)
    rig.clock.advance(due_ns - rig.store.now_ns() - 100)
    wall_ns = rig.clock.wall_ns()
    assert rig.store.transact(delivery.deliver_due, "shop", wall_ns, 10) == 0
    rig.clock.advance(200)
    assert rig.store.transact(delivery.deliver_due, "shop", wall_ns, 10) == 1
    assert rig.inbox_depth(ada) == 1


@pytest.mark.spec(
    "004",
    "5) Durable timer runtime",
    "a calendar timer fires when the wall clock of the worker reaches the due time, never earlier",
)
def test_fire_due_fires_no_calendar_timer_early(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Planned(rig.clock.wall_ns() // S + 60.0))
    [(due_ns, _)] = rig.store.read(pending, CALENDAR)
    rig.clock.advance(10_000 * S)
    assert rig.store.transact(delivery.deliver_due, "shop", due_ns - 1, 10) == 0
    assert rig.store.transact(delivery.deliver_due, "shop", due_ns, 10) == 1
    assert rig.inbox_depth(ada) == 1


@pytest.mark.spec(
    "004",
    "5) Durable timer runtime",
    "a fired timer is ingress of the kind timer with the hash of its intent",
)
def test_fired_timer_is_ingress_of_kind_timer(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(1, name="up"))
    [(_, intent)] = rig.store.read(pending, DELAYS)
    rig.run_until_idle(rig.timer_worker(), seconds=2)
    ingress = ada.journal()[1].step.ingress
    assert (ingress.kind, ingress.type) == (IngressKind.TIMER, "Woken")
    assert ingress.intent_hash == intent.intent_hash


@pytest.mark.spec("004", "5) Durable timer runtime", "a timer that fires twice is delivered once")
def test_timer_fired_twice_is_delivered_once(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(1))
    rig.clock.advance(2 * S)
    [(_, intent)] = rig.store.read(pending, DELAYS)
    for _ in range(2):
        rig.store.transact(delivery.deliver_timer, codec.pack(intent), rig.clock.wall_ns())
    rig.run_until_idle(rig.timer_worker())
    assert ada.state().woken == [""]


@pytest.mark.spec(
    "004",
    "5) Durable timer runtime",
    "a timer is delivered to a world that moved to another worker",
)
def test_timer_reaches_a_world_that_moved(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(60), Planned(rig.clock.wall_ns() / S + 60))
    rig.assign(ada, "B")
    rig.run(rig.world_worker)
    rig.world_worker = rig.worker("B", idle_s=1e6)
    rig.run_until_idle(rig.timer_worker(), seconds=70)
    assert ada.state().woken == ["", ""]


@pytest.mark.spec(
    "004",
    "Runtime Roles (In Scope)",
    "the timer worker delivers overdue timers in due order after downtime",
)
def test_overdue_timers_fire_in_due_order(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", *[Slept(100 - n, name=str(100 - n)) for n in range(50)])
    rig.clock.advance(86_400 * S)
    rig.run_until_idle(rig.timer_worker())
    assert ada.state().woken == [str(n) for n in range(51, 101)]


# -- protocol E ----------------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "Protocol E: `timer_claim_fire_ack(intent_hash)`",
    "the delivery and the ack of a timer are one commit",
)
@pytest.mark.parametrize("fault", [CRASH_BEFORE, CRASH_AFTER])
def test_timer_delivery_and_ack_are_one_commit(rig: WorkerRig, fault: str) -> None:
    ada = rig.buyer("ada", Slept(1))
    rig.clock.advance(2 * S)
    worker = rig.timer_worker()
    rig.backend.arm({1: fault})
    with pytest.raises(Crash):
        worker.tick()
    rig.backend.arm({})
    assert rig.inbox_depth(ada) == rig.timer_counts().done == (fault == CRASH_AFTER)
    assert rig.timer_counts().claimed == 0, "nothing is ever in the hands of a worker"


@pytest.mark.spec(
    "004",
    "Protocol E: `timer_claim_fire_ack(intent_hash)`",
    "a fired timer leaves no due row and no slot",
)
def test_fired_timer_leaves_no_due_row_and_no_slot(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(1, "k"), Planned(rig.clock.wall_ns() / S, "l"))
    rig.run_until_idle(rig.timer_worker(), seconds=2)
    for name in (DELAYS, CALENDAR):
        assert rig.store.read(pending, name) == []
        assert rig.store.read(queue.counts, name) == queue.QueueCounts(done=1)
    assert rig.store.read(timers.list_slots, "shop", rig.id(ada), 10) == []


@pytest.mark.spec(
    "004",
    "Protocol E: `timer_claim_fire_ack(intent_hash)`",
    "the commit that delivers a recurring timer also schedules its next occurrence",
)
@pytest.mark.parametrize("fault", [CRASH_BEFORE, CRASH_AFTER])
def test_recurring_timer_is_rescheduled_in_the_delivering_commit(
    rig: WorkerRig, fault: str
) -> None:
    ada = rig.buyer("ada", Repeated("* * * * *"))
    [(first_ns, _)] = rig.store.read(pending, CALENDAR)
    rig.clock.advance(first_ns - rig.clock.wall_ns())
    rig.backend.arm({1: fault})
    with pytest.raises(Crash):
        rig.timer_worker().tick()
    rig.backend.arm({})
    [(next_ns, _)] = rig.store.read(pending, CALENDAR)
    fired = fault == CRASH_AFTER
    assert (rig.inbox_depth(ada), next_ns - first_ns) == (fired, fired * 60 * S)


# -- crash windows, anchors, tests ---------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "Failure Semantics and Safety",
    "a timer that a dead worker claimed fires after the claim expires",
)
def test_timer_claimed_by_a_dead_worker_is_fired_after_the_claim_expires(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(1))
    rig.clock.advance(2 * S)
    assert rig.store.transact(queue.claim, DELAYS, "the dead", 1, S)
    rig.run_until_idle(rig.timer_worker())
    assert ada.state().woken == []
    rig.run_until_idle(rig.timer_worker(), seconds=5)
    assert ada.state().woken == [""]


@pytest.mark.spec(
    "004",
    "Failure Semantics and Safety",
    "a replaced timer is never delivered, even if a worker has already read it",
)
def test_replaced_timer_is_void_after_a_worker_read_it(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(1, "k", "old"))
    rig.clock.advance(2 * S)
    [(_, old)] = rig.store.read(pending, DELAYS)
    ada.send(Slept(1, "k", "new"))
    rig.run_worlds()
    rig.store.transact(delivery.deliver_timer, codec.pack(old), rig.clock.wall_ns())
    rig.run_until_idle(rig.timer_worker(), seconds=2)
    assert ada.state().woken == ["new"]


@pytest.mark.spec(
    "004",
    "Testing and Validation",
    "a timer fires after a crash of its worker and a move of its world",
)
def test_timer_survives_a_crash_and_a_move_of_its_world(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(60))
    rig.assign(ada, "B")
    rig.world_worker = rig.worker("B", "after the crash", idle_s=1e6)
    rig.advance_clock(30)
    rig.run_until_idle(rig.timer_worker(), seconds=60)
    assert ada.state().woken == [""]


@pytest.mark.spec(
    "004",
    "Testing and Validation",
    "a fault in the delivering commit neither loses nor repeats the event of a timer, and a replay agrees",
)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "events",
    [
        [Slept(10)],
        [Slept(10), GoodsOrdered()],
        [Slept(10, "k"), Slept(20, "k"), Unset("j")],
        [Slept(10, "k"), Unset("k"), Slept(10)],
    ],
)
def test_timer_is_delivered_once_under_every_commit_fault(
    rig: WorkerRig, fault: str, events: list[object]
) -> None:
    ada = rig.buyer("ada", *events)
    rig.clock.advance(30 * S)
    worker = rig.timer_worker()
    rig.backend.arm({1: fault})
    with contextlib.suppress(Crash, CommitUnknown):
        worker.tick()
    rig.backend.arm({})
    rig.run_until_idle(rig.timer_worker())
    assert ada.state().woken == [""]
    assert ada.state(at=ada.height()) == ada.state(), "as the journal repeats it"
    assert rig.blocker_code(ada) == ""
