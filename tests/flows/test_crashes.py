"""A flow of ten steps with two branches, and a crash at every commit and at every pair of commits.

The commits are those of the client (start, send), of the worker (lease, commits, report) and of the timer (fire due
sleeps). `make test` crashes every fourth pair of commits in one of the nine pairs of modes, in turn. `make chaos` runs all
pairs in all modes."""

import asyncio
from collections import Counter
from itertools import combinations, product
from typing import Any

import pytest

import holdfast as hf
from holdfast.clock import SimClock
from holdfast.ops.verify import find_differences
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend
from tests.flows.rig import CRASHES, FlowRig

# The share of the pairs of commits that `make test` runs.
PAIRS_STEP = 4

# The calls of step functions: (name, idempotency key).
Calls = list[tuple[str, str]]


class Approved(hf.Event):
    by: str


def make_app(calls: Calls) -> tuple[hf.App, Any, Any]:
    def call(name: str) -> str:
        calls.append((name, hf.current_step().idempotency_key))
        return name

    async def reserve(item: str) -> str:
        return call(f"reserve {item}")

    async def release(item: str) -> str:
        return call(f"release {item}")

    async def charge(cents: int) -> int:
        call("charge")
        return cents

    async def refund(cents: int) -> None:
        call("refund")

    async def pack(n: int) -> int:
        call(f"pack {n}")
        return n

    async def refuse() -> None:
        call("refuse")
        raise ValueError("refused")

    @hf.task
    def invoice(cents: int) -> str:
        return f"invoice {cents}"

    @hf.flow
    async def label(n: int) -> str:
        return await hf.step(hf.options(pack, name="label_pack"), n) and f"label {n}"

    async def branch(n: int) -> int:
        first = await hf.step(hf.options(pack, name=f"branch{n}"), n)
        return first + await hf.step(hf.options(pack, name=f"branch{n}"), first + 10)

    @hf.flow
    async def order(fails: bool) -> list[Any]:
        held = await hf.step(reserve, "a")
        hf.undo(release, "a")
        paid = await hf.step(charge, 5)
        hf.undo(refund, 5)
        hf.publish("state", "paid")
        number = hf.random()
        sums = await asyncio.gather(branch(1), branch(2))
        await hf.sleep(60)
        event = await hf.receive(Approved, timeout_s=7 * 86_400)
        tag = await hf.step(label, 7)
        bill = await hf.step(invoice, paid)
        if fails:
            await hf.step(refuse)
        return [held, paid, number == hf.random(), sums, event.by, tag, bill]

    app = hf.App("flows", flows=[order, label], tasks=[invoice], events=[Approved])
    return app, order, Approved


class CrashedRun:
    """The externally visible results of a run."""

    def __init__(self, crashes: dict[int, str], fails: bool) -> None:
        clock, self.calls = SimClock(), []
        app, order, approved = make_app(self.calls)
        with InProcessStore("memory:", MemoryBackend(), clock) as store:
            rig = FlowRig(store, clock, app)
            rig.plan.update(crashes)
            handle = rig.repeat(lambda: rig.start(order.options(key="o-1"), fails))
            rig.repeat(lambda: handle.send(approved("ada"), key="approved"))
            try:
                self.result: Any = rig.result(handle)
            except hf.FlowFailed as error:
                self.result = (error.state, error.code, error.step)
            rig.threads.shutdown(wait=True)
            self.commits = rig.crashing_store.commits
            self.points = rig.crashing_store.points
            self.operations = rig.crashing_store.operations
            self.published = handle.published()
            self.steps = [(s.name, s.occurrence, s.position, s.state) for s in handle.steps()]
            self.crashes_left = dict(rig.plan)
            assert store.read(find_differences) == []

    def compared(self) -> tuple[Any, ...]:
        undone = [name for name, _ in self.calls if name.startswith(("release", "refund"))]
        return self.result, self.published, sorted(self.steps), list(dict.fromkeys(undone))

    def check(self, undisturbed: "CrashedRun", crashes: int) -> None:
        assert self.compared() == undisturbed.compared()
        by_key = Counter(key for _, key in self.calls)
        names = {name for name, _ in self.calls}
        assert names == {name for name, _ in undisturbed.calls}
        # One key per step, and one more call for each crash at most.
        assert len(by_key) == len(undisturbed.calls)
        assert sum(by_key.values()) - len(by_key) <= 4 * crashes
        assert max(by_key.values()) <= 1 + crashes


# The operations of the crash points.
OPERATIONS = {
    "flows.start",
    "flows.send",
    "tasks.lease",
    "flows.commit",
    "tasks.apply_reports",
    "flows.fire_due",
}


@pytest.mark.parametrize("fails", [False, True])
def test_crash_at_every_commit_changes_neither_result_nor_compensations(fails: bool) -> None:
    undisturbed = CrashedRun({}, fails)
    assert {undisturbed.operations[at - 1] for at in undisturbed.points} == OPERATIONS
    for at, mode in product(undisturbed.points, CRASHES):
        outcome = CrashedRun({at: mode}, fails)
        assert not outcome.crashes_left
        outcome.check(undisturbed, 1)


def crash_pairs(fails: bool) -> list[dict[int, str]]:
    """Each pair of commits with each pair of modes. The modes change fastest."""
    points = CrashedRun({}, fails).points
    # A crash adds commits at the end.
    commits = [*points, *range(points[-1] + 1, points[-1] + 4)]
    return [
        {first: one, second: other}
        for first, second in combinations(commits, 2)
        for one, other in product(CRASHES, CRASHES)
    ]


def rotated_crash_pairs(fails: bool) -> list[dict[int, str]]:
    """Every fourth pair of commits once. The pairs of modes take turns."""
    every, modes = crash_pairs(fails), len(CRASHES) ** 2
    return [
        every[start + number % modes]
        for number, start in enumerate(range(0, len(every), PAIRS_STEP * modes))
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_rotated_crashes_cover_every_commit_and_every_pair_of_modes(fails: bool) -> None:
    every, rotated = crash_pairs(fails), rotated_crash_pairs(fails)
    assert {at for crashes in rotated for at in crashes} == {
        at for crashes in every for at in crashes
    }
    pairs = {tuple(crashes.values()) for crashes in rotated}
    assert pairs == set(product(CRASHES, CRASHES))


@pytest.mark.parametrize("fails", [False, True])
def test_crashes_at_pairs_of_commits_in_turn_change_neither_result_nor_compensations(
    fails: bool,
) -> None:
    undisturbed = CrashedRun({}, fails)
    for crashes in rotated_crash_pairs(fails):
        CrashedRun(crashes, fails).check(undisturbed, 2)


@pytest.mark.deep
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("fails", [False, True])
def test_crashes_at_every_pair_of_commits_change_neither_result_nor_compensations(
    fails: bool, part: int
) -> None:
    undisturbed = CrashedRun({}, fails)
    for crashes in crash_pairs(fails)[part::4]:
        CrashedRun(crashes, fails).check(undisturbed, 2)
