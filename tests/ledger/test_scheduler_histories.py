"""Properties of random scheduler histories: replay, checkpoint and termination."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import codec
from holdfast.clock import S
from holdfast.ledger import events
from holdfast.ledger.events import GrantReclaimed
from holdfast.ledger.run_scheduler import RunScheduler
from tests.ledger.scheduler_histories import (
    ENDINGS,
    POLICIES,
    SIZES,
    STEP_KINDS,
    STEPS,
    HistoryStep,
    SchedulerHistory,
)

HISTORY: dict[str, Any] = {"size": SIZES, "policy": POLICIES, "steps": STEPS, "ending": ENDINGS}


def run_history(size: int, policy: dict[str, Any], steps: list[HistoryStep]) -> SchedulerHistory:
    history = SchedulerHistory(size, **policy)
    history.run(steps)
    return history


@settings(max_examples=300)
@given(**HISTORY)
def test_replay_equals_the_scheduler_at_every_height(
    size: int, policy: dict[str, Any], steps: list[HistoryStep], ending: list[HistoryStep]
) -> None:
    history = run_history(size, policy, [*steps, *ending])
    scheduler = None
    for height, entry in enumerate(history.log, start=1):
        stored = events.decode_entry(codec.pack(entry))
        assert stored == entry
        scheduler = RunScheduler.replay([stored], scheduler)
        if height in history.dumps_by_height:
            assert scheduler.dump() == history.dumps_by_height[height]


@settings(max_examples=200)
@given(cut=st.integers(0, 10_000), **HISTORY)
def test_checkpoint_plus_log_tail_equals_the_whole_log(
    size: int, policy: dict[str, Any], steps: list[HistoryStep], ending: list[HistoryStep], cut: int
) -> None:
    history = run_history(size, policy, [*steps, *ending])
    height = 1 + cut % len(history.log)
    dump = RunScheduler.replay(history.log[:height]).dump()
    loaded = RunScheduler.load(dump)
    assert loaded.dump() == dump
    assert RunScheduler.replay(history.log[height:], loaded).dump() == history.scheduler.dump()


@settings(max_examples=200)
@given(later=st.integers(0, 10**6), **HISTORY)
def test_reclaim_decision_depends_only_on_the_log_and_the_policy(
    size: int,
    policy: dict[str, Any],
    steps: list[HistoryStep],
    ending: list[HistoryStep],
    later: int,
) -> None:
    history = run_history(size, policy, steps)
    schedulers = [
        history.scheduler,
        RunScheduler.replay(history.log),
        RunScheduler.load(history.scheduler.dump()),
    ]
    due_ns = history.now_ns + 3600 * S
    decisions = []
    for scheduler, now_ns in zip(schedulers, (due_ns, due_ns + later, due_ns * 2), strict=True):
        _, entries = scheduler.expire(now_ns)
        assert all(isinstance(entry, GrantReclaimed) for entry in entries)
        decisions.append([codec.pack(entry)[1:] for entry in map(without_time, entries)])
    assert decisions[0] == decisions[1] == decisions[2]


@settings(max_examples=150)
@given(**HISTORY)
def test_steady_workers_finish_a_run_after_any_history(
    size: int, policy: dict[str, Any], steps: list[HistoryStep], ending: list[HistoryStep]
) -> None:
    history = run_history(size, policy, [*steps, *ending])
    history.finish_all()
    assert history.scheduler.finished
    assert history.scheduler.next_commit == size
    assert sum(history.scheduler.ended) == size
    assert RunScheduler.replay(history.log).dump() == history.scheduler.dump()


@settings(max_examples=100)
@given(**HISTORY)
def test_heartbeat_does_not_change_the_checkpoint(
    size: int, policy: dict[str, Any], steps: list[HistoryStep], ending: list[HistoryStep]
) -> None:
    history = run_history(size, policy, steps)
    before = history.scheduler.dump()
    for epoch in history.scheduler.grants:
        history.scheduler.heartbeat(epoch, history.now_ns + 7 * S)
    assert history.scheduler.dump() == before


@pytest.mark.parametrize("seed", range(25))
def test_long_history_with_many_crashes_replays_and_finishes(seed: int) -> None:
    random = Random(seed)
    history = SchedulerHistory(
        random.randint(20, 60),
        attempts_max=random.randint(1, 4),
        retries_max=random.choice([0, 0, 10]),
        page_rows=random.choice([4, 16, 64]),
        batch_rows=random.choice([0, 4]),
        ahead_rows_max=random.choice([0, 10]),
        backoff_first_ns=random.choice([0, S]),
    )
    history.run(
        [
            (random.choice(STEP_KINDS), random.randrange(1000), random.randrange(1000))
            for _ in range(300)
        ]
    )
    if seed % 3 == 0:
        history.run([("cancel", 0, 0)])
    history.finish_all()
    assert history.scheduler.finished
    scheduler = None
    for height, entry in enumerate(history.log, start=1):
        scheduler = RunScheduler.replay([entry], scheduler)
        assert history.dumps_by_height.get(height) in (None, scheduler.dump())


def without_time(entry: Any) -> Any:
    return type(entry)(0, *(getattr(entry, name) for name in entry.__struct_fields__[1:]))
