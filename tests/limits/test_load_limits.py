"""Load limits: judged in the commit that would exceed them, at every entry; accepted work is never refused."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest

import holdfast as hf
from holdfast import store as stores
from holdfast.app.runtime import Runtime
from holdfast.clock import S, SimClock
from holdfast.durable import load_limits
from holdfast.durable.load_limits import BYTES, EFFECTS, TASKS
from holdfast.errors import Invalid, Overloaded
from holdfast.ops import limit_check, verify
from holdfast.ops.http.problem import problem_response
from holdfast.schedules import backfills
from holdfast.schedules import operations as schedule_operations
from holdfast.schedules.policies import QUEUED_MAX
from holdfast.store.api import Store
from holdfast.tasks import operations
from holdfast.tasks.model import TaskSpec, pack_int
from holdfast.tasks.operations import GrantRequest, TaskReport, TaskToSubmit
from holdfast.workers import limit_settings
from holdfast.workers.limit_settings import BadLimits, change_limits, list_figures
from tests.flows.rig import FlowRig
from tests.postgres import RIG_STORES_DEEP
from tests.schedules.rig import ScheduleRig
from tests.tasks.rig import KEYS, TaskOperationsRig
from tests.workers.rig import WorkerRig
from tests.workers.shop import Buyer, GoodsOrdered, Slept, Woken, Wrote
from tests.world.rig import make_backend

MODULES = ("holdfast.durable.load_limits", "holdfast.workers.limit_settings")


@hf.task(queue="mail")
def pack(n: int) -> int:
    return n


@hf.task
def ship(n: int) -> int:
    return n


@hf.flow(queue="mail")
async def sell() -> None:
    await hf.sleep(60)


@pytest.fixture(params=RIG_STORES_DEEP)
def rig(request: pytest.FixtureRequest) -> Iterator[WorkerRig]:
    made = WorkerRig(backend=make_backend(request.param))
    yield made
    made.store.close()


@pytest.fixture
def rt() -> Iterator[Runtime]:
    app = hf.App("shop", worlds=[Buyer], tasks=[pack, ship], flows=[sell])
    with app.open(stores.open("memory:"), roles=()) as rt:
        yield rt


def limit(store: Store, universe: str = "shop", **limits: int) -> None:
    changes = {name.replace("__", ":"): value for name, value in limits.items()}
    store.transact(change_limits, universe, changes)


def used(store: Store, name: str, universe: str = "shop") -> int:
    return store.read(load_limits.counted, universe, name)


def assert_refused(store: Store, call: Callable[[], Any], name: str) -> Overloaded:
    """The call is refused by this limit, with a time to wait, and changes no row."""
    before = store.read(lambda txn: txn.scan(b"\x15\x02", b"\xff\xff"))
    with pytest.raises(Overloaded) as refused:
        call()
    assert (refused.value.limit, refused.value.retryable) == (name, True)
    assert refused.value.retry_after_s > 0
    assert store.read(lambda txn: txn.scan(b"\x15\x02", b"\xff\xff")) == before
    return refused.value


# -- tasks -----------------------------------------------------------------------------------------


ENTRIES: dict[str, Callable[[Runtime], Any]] = {
    "submit": lambda rt: rt.submit(pack, 1),
    "submit with a key": lambda rt: rt.submit(pack, 1, key="new"),
    "submit with options": lambda rt: rt.submit(pack.options(delay_s=9), 1),
    "submit_many": lambda rt: rt.submit_many(pack, [(1,), (2,)]),
    "submit_all": lambda rt: rt.submit_all([pack.options().call(1)]),
    "map": lambda rt: list(rt.map(pack, [1])),
    "start": lambda rt: rt.start(sell),
    "aio.submit": lambda rt: asyncio.run(rt.aio.submit(pack, 1)),
    "aio.start": lambda rt: asyncio.run(rt.aio.start(sell)),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", ["tasks", "queue"])
def test_full_backlog_refuses_new_tasks_and_flows(rt: Runtime, entry: str, name: str) -> None:
    limit(rt.store, **({"tasks": 2} if name == "tasks" else {"queue__mail": 2}))
    rt.submit_many(pack, [(1,), (2,)])
    assert_refused(rt.store, lambda: ENTRIES[entry](rt), name)
    limit(rt.store, **({"tasks": 0} if name == "tasks" else {"queue__mail": 0}))
    if entry != "map":
        ENTRIES[entry](rt)


def test_limit_of_a_queue_applies_to_this_queue_only(rt: Runtime) -> None:
    limit(rt.store, queue__mail=1)
    rt.submit(pack, 1)
    rt.submit(ship, 1)
    assert_refused(rt.store, lambda: rt.submit(pack, 2), "queue")


def test_batch_that_would_exceed_a_limit_is_refused_as_a_whole(rt: Runtime) -> None:
    limit(rt.store, tasks=3)
    rt.submit(ship, 1)
    error = assert_refused(
        rt.store, lambda: rt.submit_many(ship, [(n,) for n in range(3)]), "tasks"
    )
    assert (error.found, error.limit_max) == (4, 3)
    rt.submit_many(ship, [(1,), (2,)])


def test_merged_submissions_are_refused_one_by_one(rt: Runtime) -> None:
    limit(rt.store, tasks=3)
    spec = TaskSpec("ship")
    answer = rt.store.transact(
        operations.submit_each, "shop", [spec], [0] * 5, [TaskToSubmit(b"")] * 5
    )
    assert [seq > 0 for seq in answer.seqs] == [True] * 3 + [False] * 2
    assert [(index, code) for index, code, _ in answer.refused] == [
        (3, "overloaded"), (4, "overloaded"),
    ]  # fmt: skip


def test_repeat_of_an_accepted_call_is_not_refused(rt: Runtime) -> None:
    limit(rt.store, tasks=2)
    task, flow = rt.submit(pack, 1, key="k"), rt.start(sell.options(key="k"))
    limit(rt.store, tasks=1)
    assert rt.submit(pack, 1, key="k").id == task.id
    assert rt.start(sell.options(key="k")).id == flow.id
    assert_refused(rt.store, lambda: rt.submit(pack, 2, key="other"), "tasks")


def test_limit_counts_the_tasks_that_exist_when_it_is_set(rt: Runtime) -> None:
    rt.submit_many(pack, [(n,) for n in range(5)])
    limit(rt.store, tasks=5)
    assert used(rt.store, TASKS) == 5
    assert_refused(rt.store, lambda: rt.submit(ship, 1), "tasks")


def test_leases_reports_and_steps_of_flows_are_never_refused() -> None:
    """A store over its limit: workers lease, fail, complete and retry, and a flow starts its children."""

    @hf.flow
    async def parent() -> int:
        return sum([await hf.step(ship, n) for n in range(3)])

    clock = SimClock()
    rig = FlowRig(
        stores.open("memory:", clock=clock), clock, hf.App("flows", flows=[parent], tasks=[ship])
    )
    handle = rig.start(parent)
    limit(rig.store, "flows", tasks=1, bytes_in_flight=1)
    rig.store.transact(operations.submit, "flows", TaskSpec("ship"), [])
    assert rig.result(handle) == 3
    assert rig.store.read(verify.find_differences) == []


def test_refused_occurrence_is_recorded_and_can_be_backfilled() -> None:
    @hf.task
    def report() -> None: ...

    clock = SimClock()
    rig = ScheduleRig(stores.open("memory:", clock=clock), clock, hf.App("flows", tasks=[report]))
    rig.create("s", report, overlap="allow")
    limit(rig.store, "flows", tasks=1)
    rig.pass_until("2026-11-13T09:20:30")
    assert rig.uses("s") == ["09:10 started", "09:20 skipped overloaded"]
    with pytest.raises(Overloaded):
        rig.flows.runtime.store.transact(
            schedule_operations.run_now, rig.universe, "s", rig.clock.wall_ns()
        )
    rig.run_tasks()
    rig.pass_until("2026-11-13T09:30:30")
    assert rig.uses("s")[-1] == "09:30 started"


def backfill_rig(every: str = "* * * * *", **options: Any) -> ScheduleRig:
    """A rig whose schedule `s` has an occurrence in each minute, and a wall clock at 09:00:30."""

    @hf.task
    def report() -> None: ...

    @hf.flow
    async def tidy() -> None: ...

    clock = SimClock()
    app = hf.App("flows", tasks=[report], flows=[tidy])
    rig = ScheduleRig(stores.open("memory:", clock=clock), clock, app)
    options = {"overlap": "allow", "target": "task"} | options
    target = tidy if options.pop("target") == "flow" else report
    rig.create("s", target, every, **options)
    return rig


def backfill(
    rig: ScheduleRig, hours: int, store: Any = None, start: str = "2026-11-05T00:00"
) -> Counter[str]:
    """Backfill some hours from a time on. Return the number of occurrences in each state."""
    first = datetime.fromisoformat(start)
    made = backfills.run(
        store or rig.store, rig.universe, "s", first, first + timedelta(hours=hours),
        wall_ns=rig.clock.wall_ns(),
    )  # fmt: skip
    return Counter(one.state for one in made)


@pytest.mark.parametrize("target", ["task", "flow"])
def test_backfill_of_several_commits_is_refused_as_a_whole(target: str) -> None:
    rig = backfill_rig(target=target)
    limit(rig.store, "flows", tasks=600)
    error = assert_refused(rig.store, lambda: backfill(rig, 18), "tasks")
    assert (error.found, error.limit_max) == (18 * 60, 600)
    assert backfill(rig, 10) == {"started": 600}
    limit(rig.store, "flows", tasks=18 * 60)
    assert backfill(rig, 18) == {"exists": 600, "started": 480}, "only new occurrences count"
    assert rig.store.read(verify.find_differences) == []


def test_accepted_backfill_continues_at_a_limit() -> None:
    rig = backfill_rig()
    limit(rig.store, "flows", tasks=18 * 60)

    class LimitingStore:
        """Another process lowers the limit after the first commit."""

        def transact(self, fn: Any, *args: Any) -> Any:
            done = rig.store.transact(fn, *args)
            limit(rig.store, "flows", tasks=1)
            return done

        def __getattr__(self, name: str) -> Any:
            return getattr(rig.store, name)

    assert backfill(rig, 18, LimitingStore()) == {"started": 18 * 60}
    new_task = (operations.submit, "flows", TaskSpec("report"), [TaskToSubmit(b"")])
    assert_refused(rig.store, lambda: rig.store.transact(*new_task), "tasks")


def test_backfill_that_waits_in_the_queue_of_its_schedule_needs_room_for_one_task() -> None:
    rig = backfill_rig(overlap="queue")
    limit(rig.store, "flows", tasks=1)
    assert backfill(rig, 18) == {"started": 1, "queued": 18 * 60 - 1}


def test_backfill_beyond_the_queue_of_its_schedule_is_refused_as_a_whole() -> None:
    rig = backfill_rig(overlap="queue")
    assert backfill(rig, 150)["queued"] == 150 * 60 - 1
    before = rig.store.read(lambda txn: txn.scan(b"\x15\x02", b"\xff\xff"))
    # The queue has room for 1,001 occurrences, more than the first commit starts.
    with pytest.raises(Invalid) as refused:
        backfill(rig, 18, start="2026-11-01T00:00")
    assert refused.value.max == QUEUED_MAX
    assert rig.store.read(lambda txn: txn.scan(b"\x15\x02", b"\xff\xff")) == before


# -- worlds ----------------------------------------------------------------------------------------


def test_full_inbox_refuses_events_and_delays_mail(rig: WorkerRig) -> None:
    ada, bob = rig.buyer("ada"), rig.world(Buyer, "bob")
    limit(rig.store, inbox=2)
    for name in "xy":
        bob.send(Woken(name))
    assert_refused(rig.store, lambda: bob.send(Woken("z")), "inbox")
    assert_refused(rig.store, lambda: rig.runtime.send_many([(bob, Woken("z"))]), "inbox")
    rig.assign(bob, "B")
    ada.send(Wrote("bob", "mail"))
    rig.run_worlds()
    assert rig.inbox_depth(bob) == 2, "the mail waits in a queue"
    rig.assign(bob, "A")
    rig.run_worlds()
    rig.run_until_idle(rig.pool(), seconds=10)
    assert bob.state().woken == ["x", "y", "mail"]


def test_repeated_event_of_a_full_inbox_is_not_refused(rig: WorkerRig) -> None:
    bob = rig.world(Buyer, "bob")
    limit(rig.store, inbox=1)
    first = bob.send(Woken("x"), key="k")
    assert bob.send(Woken("x"), key="k") == first
    assert_refused(rig.store, lambda: bob.send(Woken("y"), key="l"), "inbox")


def test_backlog_of_effects_refuses_events_until_effects_end(rig: WorkerRig) -> None:
    limit(rig.store, effects=2)
    ada = rig.buyer("ada", GoodsOrdered(times=2))
    assert used(rig.store, EFFECTS) == 2
    assert_refused(rig.store, lambda: ada.send(GoodsOrdered()), "effects")
    rig.run_until_idle(rig.pool())
    assert used(rig.store, EFFECTS) == 0
    ada.send(GoodsOrdered())
    assert len(ada.state().told) == 2, "the receipts of accepted effects were handled"


def test_cycle_of_an_accepted_event_may_exceed_the_limit(rig: WorkerRig) -> None:
    limit(rig.store, effects=1)
    ada = rig.buyer("ada", GoodsOrdered(times=10))
    assert used(rig.store, EFFECTS) == 10
    rig.run_until_idle(rig.pool())
    assert len(ada.state().told) == 10


def test_backlog_of_one_kind_and_of_timers_refuse_events(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered(), Slept(60))
    limit(rig.store, effect_kind__pay=1)
    assert_refused(rig.store, lambda: ada.send(Woken()), "effect_kind")
    limit(rig.store, effect_kind__pay=0, timers=1)
    assert_refused(rig.store, lambda: ada.send(Woken()), "timers")
    rig.run_until_idle(rig.timer_worker(), seconds=61)
    assert ada.state().woken == [""], "the timer was delivered"
    ada.send(Woken())


def test_bytes_in_flight_count_unread_messages_and_unfinished_tasks(rig: WorkerRig) -> None:
    ada = rig.world(Buyer, "ada")
    ada.send(Woken("before the limit"))
    limit(rig.store, bytes_in_flight=20_000)
    for size in (10, 9_000):
        ada.send(Woken("x" * size))
    spec = TaskSpec("work")
    rig.store.transact(operations.submit, "shop", spec, [TaskToSubmit(b"y" * 8_000)])
    assert_refused(rig.store, lambda: ada.send(Woken("z" * 5_000)), BYTES)
    new = [TaskToSubmit(b"z" * 5_000)]
    assert_refused(
        rig.store, lambda: rig.store.transact(operations.submit, "shop", spec, new), BYTES
    )
    assert rig.store.read(verify.find_differences) == []
    rig.run_worlds()
    assert used(rig.store, BYTES) == 8_000
    [grant] = rig.store.transact(operations.lease, "shop", GrantRequest("w", ["default"], 1)).grants
    report = TaskReport(grant.seq, grant.lease)
    rig.store.transact(operations.apply_reports, "shop", "w", rig.store.generation, [report])
    assert used(rig.store, BYTES) == 0


# -- invariants ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_counters_equal_the_work_after_random_operations(seed: int) -> None:
    """Submit, lease, fail, complete, cancel, redrive, with limits that change meanwhile. The counters stay exact, and an
    accepted task is never lost."""
    chance = random.Random(seed)
    clock = SimClock()
    rig = TaskOperationsRig(stores.open("memory:", clock=clock), clock)
    accepted: set[int] = set()
    for _ in range(120):
        step = chance.randrange(8)
        if step == 0:
            tasks, size = chance.choice([0, 4, 9]), chance.choice([0, 30, 99])
            limit(
                rig.store,
                "u",
                tasks=tasks,
                bytes_in_flight=size,
                queue__default=chance.choice([0, 6]),
            )
        elif step <= 3:
            new = [TaskToSubmit(b"x" * 8, key=chance.choice(["", "k"]))]
            with contextlib.suppress(Overloaded):
                accepted.update(rig.submit(*new * chance.randint(1, 3)))
        elif step == 4:
            rig.advance(chance.choice([1, 60]) * S)
            rig.maintain()
        elif step == 5 and accepted:
            rig.cancel(chance.choice(sorted(accepted)))
        else:
            for grant in rig.lease(3):
                if chance.random() < 0.7:
                    rig.complete(grant)
                else:
                    rig.fail(grant)
        assert list(rig.store.read(lambda txn: list(limit_check.find_differences(txn, "u")))) == []
    stored = rig.store.read(
        lambda txn: {seq for seq in accepted if txn.get(KEYS.bodies + pack_int(seq)) is not None}
    )
    assert stored == accepted


@pytest.mark.parametrize("seed", range(3))
def test_counters_of_effects_and_messages_stay_exact(seed: int) -> None:
    chance = random.Random(seed)
    rig = WorkerRig()
    pool = rig.pool()
    for _ in range(40):
        step = chance.randrange(5)
        if step == 0:
            limit(rig.store, effects=chance.choice([0, 5]), bytes_in_flight=chance.choice([0, 900]))
        elif step <= 2:
            with contextlib.suppress(Overloaded):
                rig.world(Buyer, chance.choice("ab")).send(GoodsOrdered(times=chance.randint(1, 4)))
        elif step == 3:
            rig.run_worlds()
        else:
            rig.fake_service.answers.extend([OSError("busy")] * chance.randrange(3))
            rig.run_until_idle(pool, seconds=chance.choice([0, 30]))
        assert rig.store.read(lambda txn: list(limit_check.find_differences(txn, "shop"))) == []


def test_verify_reports_a_wrong_counter(rt: Runtime) -> None:
    limit(rt.store, tasks=5)
    rt.submit(ship, 1)
    key = load_limits.counter_key("shop", TASKS)
    rt.store.transact(lambda txn: txn.add(key, 3))
    [found] = rt.store.read(verify.find_differences)
    assert (found.kind, found.what) == ("limit", "counter tasks")


# -- settings --------------------------------------------------------------------------------------


def test_limits_are_shown_with_their_figures_and_removed_by_zero(rt: Runtime) -> None:
    rt.submit(pack, 1)
    limit(rt.store, tasks=5, queue__mail=3, inbox=9, effect_kind__pay=2)
    figures = [tuple(one) for one in rt.store.read(list_figures, "shop")]
    assert figures == [
        ("tasks", 5, 1),
        ("inbox", 9, None),
        ("queue:mail", 3, 1),
        ("effect_kind:pay", 2, 0),
    ]
    limit(rt.store, tasks=0, queue__mail=0, inbox=0, effect_kind__pay=0)
    assert rt.store.read(load_limits.find, "shop") is None
    assert rt.store.read(list_figures, "shop") == []


@pytest.mark.parametrize(
    "changes", [{"task": 1}, {"tasks": -1}, {"tasks": True}, {"queue:": 1}, {"tasks": 1 << 60}]
)
def test_unknown_names_and_values_are_refused(rt: Runtime, changes: dict[str, int]) -> None:
    with pytest.raises(Invalid):
        rt.store.transact(change_limits, "shop", changes)
    assert rt.store.read(load_limits.find, "shop") is None


def test_file_declares_limits_and_an_operator_may_change_them(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "holdfast.toml"
    monkeypatch.setenv("HOLDFAST_CONFIG", str(file))
    file.write_text(
        "[limits]\ntasks = 5\nqueues = { mail = 2 }\n[limits.universes.other]\ninbox = 1\n"
    )
    app, store = hf.App("shop", worlds=[Buyer]), stores.open("memory:")
    with app.open(store, roles=("world",)):
        assert [tuple(one)[:2] for one in store.read(list_figures, "shop")] == [
            ("tasks", 5),
            ("queue:mail", 2),
        ]
    limit(store, tasks=7)
    with app.open(store, roles=("world",)):
        assert store.read(list_figures, "shop")[0].limit == 7, "the file did not change"
    file.write_text("[limits]\ninbox = 3\n")
    with app.open(store, roles=("world",)):
        assert [one.name for one in store.read(list_figures, "shop")] == ["inbox"]
    assert limit_settings.load_declared("other") == limit_settings.load_declared("shop")
    for text in (
        "[limits]\ntask = 1\n",
        "[limits]\ntasks = 'x'\n",
        "[limits]\nqueues = 3\n",
        "limits = 3\n",
        "[lim",
    ):
        file.write_text(text)
        with pytest.raises(BadLimits):
            limit_settings.load_declared("shop")


def test_refusal_is_503_with_retry_after() -> None:
    answer = problem_response(load_limits.refuse("tasks", "shop", 3, 2))
    assert answer.status == 503
    assert ("Retry-After", "1") in answer.headers
    assert b'"code":"overloaded"' in answer.body
    assert dict(problem_response(Overloaded(retry_after_s=2.2)).headers)["Retry-After"] == "3"
