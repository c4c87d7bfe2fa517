"""Document 004, section 5, protocol E, the crash window and the chaos row of timers, its test 3.

Where the design settles a rule differently, the test guards what we built and its rule says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast import codec
from holdfast.clock import S
from holdfast.durable import item as items
from holdfast.durable import queue
from holdfast.durable.item import keys_of
from holdfast.errors import CommitUnknown
from holdfast.messages import Intent, Kind
from holdfast.roles import firing
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.world import timers
from tests.postgres import RIGS
from tests.roles.rig import Rig
from tests.roles.shop import Ordered, Planned, Repeated, Slept, Unset, Woken
from tests.world.rig import CRASH_AFTER, CRASH_BEFORE, FAULTS, Crash, rows_on

MODULES = (
    "holdfast.world.timers",
    "holdfast.durable.due",
    "holdfast.roles.firing",
    "holdfast.roles.timer_worker",
)

DELAYS, CALENDAR = timers.delays("shop"), timers.calendar("shop")


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(backend=rows_on(request.param))
    yield made
    made.store.close()


def pending(txn: Txn, name: str) -> list[tuple[int, Intent]]:
    """(due, intent) of what waits, in the order of the index."""
    keys = keys_of(name)
    found = []
    for key, packed_seq in txn.scan(keys.delayed, tuples.after(keys.delayed), 100):
        due_ns = tuples.unpack(key[len(keys.delayed) :])[0]
        assert isinstance(due_ns, int)
        payload = queue.payload_of(txn, items.load(txn, keys, packed_seq))
        found.append((due_ns, codec.unpack_as(Intent, payload)))
    return found


# -- section 5 -----------------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "5) Durable timer runtime",
    "a timer is durable with the entry that set it, in an index by its time",
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_timer_is_set_with_its_entry_or_not_at_all(rig: Rig, fault: str) -> None:
    ada = rig.buyer("ada", Woken("x"))
    ada.send(Slept(60))
    rig.backend.arm({1: fault})
    rig.think()
    rig.backend.arm({})
    rig.expire()
    rig.think()
    assert ada.height() == 2
    assert rig.timers().delayed == 1


@pytest.mark.spec(
    "004",
    "5) Durable timer runtime",
    "due records lie by the time of delivery and name their intent, store time and calendar apart",
)
def test_due_records_are_ordered_by_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    ada = rig.buyer("ada", Woken("x"))
    wall_s = rig.clock.wall_ns() // S
    for event in (Slept(30), Slept(10), Planned(wall_s + 20), Slept(20), Planned(wall_s + 5)):
        ada.send(event)
    # The commit of the step is late: the delays count from the time at which its reducer ran.
    submit, ran_ns = rig.store.submit, rig.store.now_ns()

    def late(fn: Any, *args: Any) -> Any:
        rig.clock.advance(7 * S)
        return submit(fn, *args)

    monkeypatch.setattr(rig.store, "submit", late)
    rig.think()
    assert ada.height() == 6
    for name, zero_ns, times_s in ((DELAYS, ran_ns, (10, 20, 30)), (CALENDAR, wall_s * S, (5, 20))):
        found = rig.store.read(pending, name)
        assert [round((due_ns - zero_ns) / S, 3) for due_ns, _ in found] == list(times_s)
        assert len({intent.intent_hash for _, intent in found}) == len(times_s)


@pytest.mark.spec(
    "004", "5) Durable timer runtime", "a timer is taken at or after its time, never before"
)
def test_nothing_is_fired_before_its_time(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(60))
    due_ns = rig.store.read(queue.next_due_ns, DELAYS)
    rig.clock.advance(due_ns - rig.store.now_ns() - 100)
    wall_ns = rig.clock.wall_ns()
    assert rig.store.transact(firing.fire_due, "shop", wall_ns, 10) == 0
    rig.clock.advance(200)
    assert rig.store.transact(firing.fire_due, "shop", wall_ns, 10) == 1
    assert rig.depth(ada) == 1


@pytest.mark.spec(
    "004",
    "5) Durable timer runtime",
    "a calendar time is taken when the wall clock of who fires it has reached it, never before",
)
def test_nothing_of_the_calendar_is_fired_before_its_time(rig: Rig) -> None:
    ada = rig.buyer("ada", Planned(rig.clock.wall_ns() // S + 60.0))
    [(due_ns, _)] = rig.store.read(pending, CALENDAR)
    rig.clock.advance(10_000 * S)
    assert rig.store.transact(firing.fire_due, "shop", due_ns - 1, 10) == 0
    assert rig.store.transact(firing.fire_due, "shop", due_ns, 10) == 1
    assert rig.depth(ada) == 1


@pytest.mark.spec(
    "004", "5) Durable timer runtime", "a fired timer is ingress that names its intent"
)
def test_a_fired_timer_is_ingress_of_its_own_kind(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(1, name="up"))
    [(_, intent)] = rig.store.read(pending, DELAYS)
    rig.work(rig.timer_worker(), seconds=2)
    ingress = ada.journal()[1].step.ingress
    assert (ingress.kind, ingress.type) == (Kind.TIMER, "Woken")
    assert ingress.intent_hash == intent.intent_hash


@pytest.mark.spec("004", "5) Durable timer runtime", "firing twice delivers once")
def test_a_timer_that_is_fired_twice_is_delivered_once(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(1))
    rig.clock.advance(2 * S)
    [(_, intent)] = rig.store.read(pending, DELAYS)
    for _ in range(2):
        rig.store.transact(firing.fire, codec.pack(intent), rig.clock.wall_ns())
    rig.work(rig.timer_worker())
    assert ada.state().woken == [""]


@pytest.mark.spec("004", "5) Durable timer runtime", "a world may move while its timer waits")
def test_a_timer_finds_its_world_wherever_it_is(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(60), Planned(rig.clock.wall_ns() / S + 60))
    rig.assign(ada, "B")
    rig.run(rig.host)
    rig.host = rig.worker("B", idle_s=1e6)
    rig.work(rig.timer_worker(), seconds=70)
    assert ada.state().woken == ["", ""]


@pytest.mark.spec(
    "004",
    "Runtime Roles (In Scope)",
    "a timer worker delivers what is due, in the order of its times, after any downtime",
)
def test_overdue_timers_fire_in_the_order_of_their_times(rig: Rig) -> None:
    ada = rig.buyer("ada", *[Slept(100 - n, name=str(100 - n)) for n in range(50)])
    rig.clock.advance(86_400 * S)
    rig.work(rig.timer_worker())
    assert ada.state().woken == [str(n) for n in range(51, 101)]


# -- protocol E ----------------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "Protocol E: `timer_claim_fire_ack(intent_hash)`",
    "taking, delivering and the end of the timer are one commit",
)
@pytest.mark.parametrize("fault", [CRASH_BEFORE, CRASH_AFTER])
def test_a_timer_is_delivered_exactly_when_it_is_done(rig: Rig, fault: str) -> None:
    ada = rig.buyer("ada", Slept(1))
    rig.clock.advance(2 * S)
    worker = rig.timer_worker()
    rig.backend.arm({1: fault})
    with pytest.raises(Crash):
        worker.tick()
    rig.backend.arm({})
    assert rig.depth(ada) == rig.timers().done == (fault == CRASH_AFTER)
    assert rig.timers().claimed == 0, "nothing is ever in the hands of a worker"


@pytest.mark.spec(
    "004",
    "Protocol E: `timer_claim_fire_ack(intent_hash)`",
    "when a timer has been delivered, its due record and its slot are gone",
)
def test_what_has_fired_is_gone(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(1, "k"), Planned(rig.clock.wall_ns() / S, "l"))
    rig.work(rig.timer_worker(), seconds=2)
    for name in (DELAYS, CALENDAR):
        assert rig.store.read(pending, name) == []
        assert rig.store.read(queue.counts, name) == queue.Counts(done=1)
    assert rig.store.read(timers.slots_of, "shop", rig.id(ada), 10) == []


@pytest.mark.spec(
    "004",
    "Protocol E: `timer_claim_fire_ack(intent_hash)`",
    "a repeating timer hangs its next time in the commit that delivers this one",
)
@pytest.mark.parametrize("fault", [CRASH_BEFORE, CRASH_AFTER])
def test_a_repeating_timer_goes_on_in_the_commit_that_delivers(rig: Rig, fault: str) -> None:
    ada = rig.buyer("ada", Repeated("* * * * *"))
    [(first_ns, _)] = rig.store.read(pending, CALENDAR)
    rig.clock.advance(first_ns - rig.clock.wall_ns())
    rig.backend.arm({1: fault})
    with pytest.raises(Crash):
        rig.timer_worker().tick()
    rig.backend.arm({})
    [(next_ns, _)] = rig.store.read(pending, CALENDAR)
    fired = fault == CRASH_AFTER
    assert (rig.depth(ada), next_ns - first_ns) == (fired, fired * 60 * S)


# -- crash windows, anchors, tests ---------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "Failure Semantics and Safety",
    "a timer that somebody died with is fired by the next worker, when the claim is over",
)
def test_a_claimed_timer_is_fired_by_the_next_worker(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(1))
    rig.clock.advance(2 * S)
    assert rig.store.transact(queue.claim, DELAYS, "the dead", 1, S)
    rig.work(rig.timer_worker())
    assert ada.state().woken == []
    rig.work(rig.timer_worker(), seconds=5)
    assert ada.state().woken == [""]


@pytest.mark.spec(
    "004",
    "Failure Semantics and Safety",
    "a timer is delivered under its intent: set again it is another, and the old one is void",
)
def test_a_replaced_timer_is_void_even_in_the_hands_of_somebody(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(1, "k", "old"))
    rig.clock.advance(2 * S)
    [(_, old)] = rig.store.read(pending, DELAYS)
    ada.send(Slept(1, "k", "new"))
    rig.think()
    rig.store.transact(firing.fire, codec.pack(old), rig.clock.wall_ns())
    rig.work(rig.timer_worker(), seconds=2)
    assert ada.state().woken == ["new"]


@pytest.mark.spec(
    "004",
    "Testing and Validation",
    "a timer that was set before a crash and a move fires after them",
)
def test_a_timer_survives_crash_and_move(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(60))
    rig.assign(ada, "B")
    rig.host = rig.worker("B", "after the crash", idle_s=1e6)
    rig.expire(30)
    rig.work(rig.timer_worker(), seconds=60)
    assert ada.state().woken == [""]


@pytest.mark.spec(
    "004",
    "Testing and Validation",
    "however the commit that fires goes wrong, no ingress is lost or doubled, and replay agrees",
)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "events",
    [
        [Slept(10)],
        [Slept(10), Ordered()],
        [Slept(10, "k"), Slept(20, "k"), Unset("j")],
        [Slept(10, "k"), Unset("k"), Slept(10)],
    ],
)
def test_the_chaos_row_of_timers(rig: Rig, fault: str, events: list[object]) -> None:
    ada = rig.buyer("ada", *events)
    rig.clock.advance(30 * S)
    worker = rig.timer_worker()
    rig.backend.arm({1: fault})
    with contextlib.suppress(Crash, CommitUnknown):
        worker.tick()
    rig.backend.arm({})
    rig.work(rig.timer_worker())
    assert ada.state().woken == [""]
    assert ada.state(at=ada.height()) == ada.state(), "as the journal repeats it"
    assert rig.blocker(ada) == ""
