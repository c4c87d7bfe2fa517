"""Properties of every history: a replay is the run, a checkpoint is its log, and everything ends."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import codec
from holdfast.clock import S
from holdfast.ledger import records
from holdfast.ledger.board import Board
from holdfast.ledger.records import Reclaimed
from tests.ledger.histories import ENDINGS, KINDS, POLICIES, SIZES, STEPS, History, Step

HISTORY: dict[str, Any] = {"size": SIZES, "policy": POLICIES, "steps": STEPS, "ending": ENDINGS}


def lived(size: int, policy: dict[str, Any], steps: list[Step]) -> History:
    history = History(size, **policy)
    history.run(steps)
    return history


@settings(max_examples=300)
@given(**HISTORY)
def test_a_replay_equals_the_run_at_every_height(
    size: int, policy: dict[str, Any], steps: list[Step], ending: list[Step]
) -> None:
    history = lived(size, policy, [*steps, *ending])
    board = None
    for height, entry in enumerate(history.log, start=1):
        stored = records.decode(codec.pack(entry))
        assert stored == entry
        board = Board.replay([stored], board)
        if height in history.heights:
            assert board.dump() == history.heights[height]


@settings(max_examples=200)
@given(cut=st.integers(0, 10_000), **HISTORY)
def test_a_checkpoint_and_its_tail_equal_the_whole_log(
    size: int, policy: dict[str, Any], steps: list[Step], ending: list[Step], cut: int
) -> None:
    history = lived(size, policy, [*steps, *ending])
    height = 1 + cut % len(history.log)
    dump = Board.replay(history.log[:height]).dump()
    loaded = Board.load(dump)
    assert loaded.dump() == dump
    assert Board.replay(history.log[height:], loaded).dump() == history.board.dump()


@settings(max_examples=200)
@given(later=st.integers(0, 10**6), **HISTORY)
def test_what_a_reclaim_decides_depends_on_the_log_and_the_policy_alone(
    size: int, policy: dict[str, Any], steps: list[Step], ending: list[Step], later: int
) -> None:
    history = lived(size, policy, steps)
    boards = [history.board, Board.replay(history.log), Board.load(history.board.dump())]
    due_ns = history.now_ns + 3600 * S
    decisions = []
    for board, now_ns in zip(boards, (due_ns, due_ns + later, due_ns * 2), strict=True):
        _, entries = board.expire(now_ns)
        assert all(isinstance(entry, Reclaimed) for entry in entries)
        decisions.append([codec.pack(entry)[1:] for entry in map(undated, entries)])
    assert decisions[0] == decisions[1] == decisions[2]


@settings(max_examples=150)
@given(**HISTORY)
def test_whatever_happened_steady_workers_bring_it_to_an_end(
    size: int, policy: dict[str, Any], steps: list[Step], ending: list[Step]
) -> None:
    history = lived(size, policy, [*steps, *ending])
    history.finish_all()
    assert history.board.finished
    assert history.board.next_commit == size
    assert sum(history.board.ended) == size
    assert Board.replay(history.log).dump() == history.board.dump()


@settings(max_examples=100)
@given(**HISTORY)
def test_heartbeats_leave_no_trace(
    size: int, policy: dict[str, Any], steps: list[Step], ending: list[Step]
) -> None:
    history = lived(size, policy, steps)
    before = history.board.dump()
    for epoch in history.board.grants:
        history.board.heartbeat(epoch, history.now_ns + 7 * S)
    assert history.board.dump() == before


@pytest.mark.parametrize("seed", range(25))
def test_a_long_life_with_many_crashes_replays_and_ends(seed: int) -> None:
    random = Random(seed)
    history = History(
        random.randint(20, 60),
        attempts_max=random.randint(1, 4),
        retries_max=random.choice([0, 0, 10]),
        page_rows=random.choice([4, 16, 64]),
        batch_rows=random.choice([0, 4]),
        ahead_rows_max=random.choice([0, 10]),
        backoff_first_ns=random.choice([0, S]),
    )
    history.run(
        [(random.choice(KINDS), random.randrange(1000), random.randrange(1000)) for _ in range(300)]
    )
    if seed % 3 == 0:
        history.run([("cancel", 0, 0)])
    history.finish_all()
    assert history.board.finished
    board = None
    for height, entry in enumerate(history.log, start=1):
        board = Board.replay([entry], board)
        assert history.heights.get(height) in (None, board.dump())


def undated(entry: Any) -> Any:
    return type(entry)(0, *(getattr(entry, name) for name in entry.__struct_fields__[1:]))
