"""Fair turns between limit keys: a flood of one key does not delay the tasks of another."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast import store as stores
from holdfast.clock import S, SimClock
from holdfast.ops import index_rebuild, verify
from holdfast.tasks import queries
from holdfast.tasks.model import index_key, pack_int, pack_text
from holdfast.tasks.operations import TaskGrant, TaskToSubmit
from holdfast.tasks.task_list import list_tasks
from tests.tasks.rig import KEYS, LEASE_NS, UNIVERSE, TaskOperationsRig

MODULES = ("holdfast.tasks.fair_turns", "holdfast.tasks.leases")


def of(*keys: str) -> list[TaskToSubmit]:
    return [TaskToSubmit(key.encode(), limit=key) for key in keys]


def keys_of_grants(grants: list[TaskGrant]) -> str:
    return "".join(grant.args.decode() for grant in grants)


def test_single_task_waits_for_one_task_of_a_flood(rig: TaskOperationsRig) -> None:
    rig.submit(*of(*"a" * 300))
    rig.lease(5)
    rig.submit(*of("b"))
    assert keys_of_grants(rig.lease(2)) in ("ab", "ba")


def test_limit_keys_take_turns(rig: TaskOperationsRig) -> None:
    rig.submit(*of(*"aaaabbbbc"))
    granted = "".join(keys_of_grants(rig.lease(1)) for _ in range(9))
    assert sorted(granted[:3]) == ["a", "b", "c"]
    assert sorted(granted[3:5]) == sorted(granted[5:7]) == sorted(granted[7:9]) == ["a", "b"]


def test_new_limit_keys_do_not_starve_an_older_one(rig: TaskOperationsRig) -> None:
    rig.submit(*of(*"a" * 20))
    granted = ""
    for n in range(20):
        rig.submit(TaskToSubmit(b"n", limit=f"new {n}"))
        granted += keys_of_grants(rig.lease(1))
    # Twenty keys with one task each have turns, too.
    assert granted.count("a") >= 4


def test_tasks_of_one_limit_key_keep_their_order(rig: TaskOperationsRig) -> None:
    seqs = rig.submit(*of(*"abab"), *of("a"))
    granted = [grant.seq for grant in rig.lease(5)]
    assert [seq for seq in granted if seq in (seqs[0], seqs[2], seqs[4])] == [
        seqs[0],
        seqs[2],
        seqs[4],
    ]


def test_priority_precedes_turns_and_age_decides_among_other_tasks(rig: TaskOperationsRig) -> None:
    rig.submit(*of(*"aa"))
    rig.submit(b"x", b"x")
    rig.submit(*of(*"bb"), priority=5)
    rig.submit(b"y", priority=3)
    granted = "".join(keys_of_grants(rig.lease(1)) for _ in range(7))
    assert granted == "bbyaaxx"
    rig.submit(b"x", b"x")
    rig.submit(*of("a"))
    rig.submit(b"y")
    assert keys_of_grants(rig.lease(9)) == "xxay"


def test_retry_runs_before_the_backlog_of_its_key_but_not_before_other_keys(
    rig: TaskOperationsRig,
) -> None:
    first, *_ = rig.submit(*of(*"aaaaaa"))
    rig.fail(rig.lease_one(first))
    rig.submit(*of("b"))
    rig.advance(60 * S)
    rig.maintain()
    granted = rig.lease(3)
    assert first in [grant.seq for grant in granted]
    assert "b" in keys_of_grants(granted)


def test_throttled_tasks_return_in_order(rig: TaskOperationsRig) -> None:
    rig.set_limits(per_key=1)
    seqs = rig.submit(*of(*"aaa"))
    for seq in seqs:
        [grant] = rig.lease(5)
        assert grant.seq == seq
        rig.complete(grant)


def test_ready_task_with_a_limit_key_is_listed_shown_and_cancelled(rig: TaskOperationsRig) -> None:
    seqs = rig.submit(*of(*"aab"))
    plain = rig.submit_one()
    assert rig.store.read(queries.where_is, UNIVERSE, seqs[1]) == "ready"
    found: list[int] = []
    cursor = ""
    while True:
        page = rig.store.read(list_tasks, UNIVERSE, "ready", "default", "", cursor, 1)
        found += [row.seq for row in page.rows]
        cursor = page.cursor
        if not cursor:
            break
    assert sorted(found) == [*seqs, plain]
    rig.cancel(seqs[0], plain)
    assert sorted(grant.seq for grant in rig.lease(9)) == [seqs[1], seqs[2]]
    assert rig.store.read(verify.find_differences) == []


def test_last_task_of_a_limit_key_leaves_no_row_of_it(rig: TaskOperationsRig) -> None:
    rig.submit(*of(*"aab"))
    rig.lease(9)
    for prefix in (KEYS.fair, KEYS.fair_places, KEYS.fair_groups, KEYS.fair_counts):
        assert rig.store.read(lambda txn, at=prefix: txn.scan(at, at + b"\xff")) == []


def test_row_of_an_older_release_is_granted_and_cancelled(rig: TaskOperationsRig) -> None:
    """Older code kept tasks with a limit key in the index of the other tasks."""
    seqs = rig.submit(*of(*"aaa"))
    for seq in seqs:
        packed_seq = pack_int(seq)
        row = rig.store.read(queries.get_row, KEYS, packed_seq)

        def move(txn: object, packed: bytes = packed_seq, spec: object = row.spec) -> None:
            txn.delete(txn.get(KEYS.fair_places + packed))  # type: ignore[attr-defined]
            txn.delete(KEYS.fair_places + packed)  # type: ignore[attr-defined]
            txn.delete(KEYS.fair_counts + pack_text("default"))  # type: ignore[attr-defined]
            txn.put(KEYS.ready + index_key(spec, packed), packed)  # type: ignore[attr-defined,arg-type]

        rig.store.transact(move)
    assert rig.store.read(verify.find_differences) == []
    rig.cancel(seqs[0])
    assert [grant.seq for grant in rig.lease(1)] == [seqs[1]]
    rig.submit(*of("b"))
    assert keys_of_grants(rig.lease(9)) == "ab"


@pytest.mark.parametrize("lost", ["fair", "fair_places", "fair_counts", "task"])
def test_rebuild_restores_the_index_of_fair_turns(lost: str) -> None:
    rig = make_fast_rig()
    seqs = rig.submit(*of(*"aab"))

    def damage(txn: Any) -> None:
        prefix = KEYS.statuses if lost == "task" else getattr(KEYS, lost)
        if lost == "task":
            txn.put(KEYS.fair_places + pack_int(99), KEYS.fair + b"x")
            return
        txn.delete(txn.scan(prefix, prefix + b"\xff", 1)[0][0])

    rig.store.transact(damage)
    if lost != "task":
        assert rig.store.read(verify.find_differences) != []
    rig.store.transact(index_rebuild.rebuild_wait_states, UNIVERSE)
    assert rig.store.read(verify.find_differences) == []
    assert sorted(grant.seq for grant in rig.lease(9)) == seqs


def test_random_history_with_limit_keys_stays_consistent(rig: TaskOperationsRig) -> None:
    chance = random.Random(3)
    waiting: set[int] = set()
    for _ in range(60):
        step = chance.randrange(6)
        if step <= 1:
            new = [TaskToSubmit(b"x", limit=chance.choice(["", "a", "b"])) for _ in range(4)]
            waiting.update(rig.submit(*new, priority=chance.choice([0, 1])))
        elif step == 2:
            rig.set_limits(per_key=chance.choice([0, 1, 2]))
        elif step == 3 and waiting:
            rig.cancel(chance.choice(sorted(waiting)))
        elif step == 4:
            rig.advance(chance.choice([1, LEASE_NS // S]) * S)
            rig.maintain()
        for grant in rig.lease(chance.randrange(4), names=chance.choice([(), ("other",)])):
            if chance.random() < 0.5:
                rig.complete(grant)
            else:
                rig.fail(grant)
    assert rig.store.read(verify.find_differences) == []


# -- waiting times ---------------------------------------------------------------------------------

SLOTS = 4


def waits_of(rig: TaskOperationsRig, *, flood: int, tasks: int = 120) -> list[float]:
    """Run a queue in simulated time. Tenant `b` submits at random times, with a fifth of the capacity; `a` floods the
    queue first. Return the times of `b` from submission to end, in seconds."""
    chance = random.Random(11)
    clock = rig.clock
    for at in range(0, flood, 1_000):
        rig.submit(*of(*"a" * min(1_000, flood - at)), expiries_max=9, lease_ns=10**6 * S)
    arrivals: list[float] = []
    now_s = 0.0
    for _ in range(tasks):
        now_s += chance.expovariate(SLOTS / 5)
        arrivals.append(now_s)
    ends: list[tuple[float, int, TaskGrant]] = []
    submitted: dict[int, float] = {}
    waits: list[float] = []
    now_s, next_arrival = 0.0, 0
    while len(waits) < tasks:
        for grant in rig.lease(SLOTS - len(ends)) if len(ends) < SLOTS else []:
            heapq.heappush(ends, (now_s + chance.uniform(0.5, 1.5), grant.seq, grant))
        due = [arrivals[next_arrival]] if next_arrival < tasks else []
        at_s = min(due + [end[0] for end in ends[:1]])
        clock.advance(int((at_s - now_s) * S))
        now_s = at_s
        if due and due[0] == at_s:
            [seq] = rig.submit(*of("b"), expiries_max=9, lease_ns=10**6 * S)
            submitted[seq] = now_s
            next_arrival += 1
        else:
            _, _, grant = heapq.heappop(ends)
            rig.complete(grant)
            if grant.seq in submitted:
                waits.append(now_s - submitted[grant.seq])
    return sorted(waits)


class FastRig(TaskOperationsRig):
    """A rig for many operations: it does not recount after each."""

    def check_consistency(self) -> None:
        return


def make_rig() -> TaskOperationsRig:
    clock = SimClock()
    return TaskOperationsRig(stores.open("memory:", clock=clock), clock)


def make_fast_rig() -> TaskOperationsRig:
    clock = SimClock()
    return FastRig(stores.open("memory:", clock=clock), clock)


@pytest.fixture
def fast_rig() -> Iterator[TaskOperationsRig]:
    made = make_fast_rig()
    yield made
    made.store.close()


def p95(values: list[float]) -> float:
    return values[int(len(values) * 0.95)]


def test_flood_of_one_tenant_does_not_double_the_p95_wait_of_another(
    fast_rig: TaskOperationsRig,
) -> None:
    alone = p95(waits_of(fast_rig, flood=0))
    beside = p95(waits_of(fast_rig, flood=3_000))
    assert beside < 2 * alone, (alone, beside)
    assert Counter(grant.args for grant in fast_rig.lease(4)) == {b"a": 4}, "the flood is not over"
