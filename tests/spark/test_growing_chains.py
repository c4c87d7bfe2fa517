"""Inputs that grow, shrink and change, with a service that dies: the office against a plain model.

Without Spark, so that many chains fit into a minute; `test_growing_input` has the same on Spark.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ledger import runs
from holdfast.ledger.states import State
from tests.spark.growth import Chain, Model, World


def changed(world: World, draw: random.Random, past: list[World]) -> World:
    """The next input: inserts, updates, updates back, deletes, rows that come back."""
    after = dict(world)
    for _ in range(draw.randrange(8)):
        key = draw.randrange(40)
        kind = draw.randrange(4)
        if kind == 0:
            after.pop(key, None)
        elif kind == 1 and past:
            older = draw.choice(past)
            if key in older:
                after[key] = older[key]
        else:
            after[key] = draw.randrange(1, 60)
    return after


def check(chain: Chain, model: Model) -> None:
    chain.check_replay()
    assert chain.output() == model.output()
    assert chain.records() == model.records()


@pytest.mark.spec(
    "002",
    "Atomicity",
    "2: over a chain of inputs a row that ended well is never called again, by one key outside",
    module="holdfast.spark.adoption",
)
@settings(max_examples=80)
@given(seed=st.integers(0, 1 << 32), page_rows=st.sampled_from([2, 5, 8, 64]))
def test_a_chain_of_inputs_equals_its_model(seed: int, page_rows: int) -> None:
    draw = random.Random(seed)
    chain, model = Chain(page_rows), Model()
    world: World = {draw.randrange(40): draw.randrange(1, 60) for _ in range(draw.randrange(25))}
    past: list[World] = []
    for _ in range(draw.randrange(2, 8)):
        retry_failed = draw.random() < 0.7
        mended = draw.random() < 0.3
        chain.begin(world, blocks=draw.randrange(1, 6), retry_failed=retry_failed)
        due = model.begin(chain.record.run_id, world, retry_failed)
        before = len(chain.calls)
        killed = draw.random() < 0.5
        if killed and due:
            # A worker calls some rows, tells of a part of them, and all of it dies.
            heard = len(chain.told)
            chain.work(mended=mended, calls_max=draw.randrange(1, len(due) + 1), lose=2)
            model.reported(chain.told[heard:], mended)
        if not killed or draw.random() < 0.5:
            if killed:
                chain.resume()
            left = model.open()
            before_rest = len(chain.calls)
            chain.work(mended=mended)
            rest = {called.row for called in chain.calls[before_rest:]}
            assert rest == left, "what had not ended is called, and nothing else"
            model.reported(rest, mended)
            chain.finish()
            check(chain, model)
        for called in chain.calls[before:]:
            assert called.row in due
            assert called.key == model.key(called.row)
        if draw.random() < 0.3:
            forget(chain, model, draw)
        past.append(world)
        world = changed(world, draw, past)
    chain.stop()
    chain.store.close()


def forget(chain: Chain, model: Model, draw: random.Random) -> None:
    """Delete a run that nothing rests on."""
    older = [run_id for run_id in model.known if run_id != chain.record.run_id]
    run_id = draw.choice(older or [""])
    if not run_id:
        return
    if chain.store.read(runs.pinned_by, run_id):
        with pytest.raises(runs.RunPinned):
            chain.delete(run_id)
        return
    chain.delete(run_id)
    del model.known[run_id]


def test_a_row_that_comes_back_is_not_paid_again() -> None:
    chain = Chain()
    for world in ({1: 1, 2: 2}, {2: 2}, {1: 1, 2: 3}, {1: 1, 2: 2}):
        chain.begin(world)
        chain.work()
        chain.finish()
    assert [called.row for called in chain.calls] == [(1, 1), (2, 2), (2, 3)]
    assert chain.output() == [(1, "1:1"), (2, "2:2")]
    assert chain.record.base_run == "r-3"
    # The outcome lies in the first run, whose blocks and results the last one rests on.
    assert chain.store.read(runs.rests_on, "r-4") == ["r-1"]
    chain.stop()


def test_a_failed_row_is_called_again_by_the_same_key() -> None:
    chain = Chain()
    chain.begin({1: 4, 2: 1})
    chain.work()
    chain.finish()
    assert chain.records() == {1: ("TERMINAL_FAIL", "because (1, 4)")}
    chain.begin({0: 1, 1: 4, 2: 1})
    chain.work(mended=True)
    chain.finish()
    assert [called for called in chain.calls if called.row == (1, 4)] == [((1, 4), "r-1:0")] * 2
    assert chain.output() == [(0, "0:1"), (1, "1:4"), (2, "2:1")]
    chain.stop()


def test_failed_rows_stay_failed_when_they_are_not_to_be_retried() -> None:
    chain = Chain()
    chain.begin({1: 4, 2: 1})
    chain.work()
    chain.finish()
    chain.begin({0: 1, 1: 4, 2: 1}, retry_failed=False)
    assert chain.office.desk.board.ended == [1, 0, 1, 0]
    assert chain.work(mended=True) == 1
    chain.finish()
    assert chain.records() == {1: ("TERMINAL_FAIL", "because (1, 4)")}
    chain.stop()


def test_an_unfinished_run_is_fenced_and_superseded() -> None:
    chain = Chain()
    chain.begin(dict.fromkeys(range(6), 1))
    assert chain.work(calls_max=4) == 4
    chain.begin(dict.fromkeys(range(8), 1))
    assert chain.store.read(runs.the, "r-1").status is runs.Status.SUPERSEDED
    assert chain.office.desk.board.ended[0] == 4
    assert {called.row for called in chain.calls} == {(n, 1) for n in range(4)}
    chain.work()
    keys = {called.row: called.key for called in chain.calls}
    assert keys[4, 1] == "r-1:4", "it was handed out before, and may have been called"
    assert keys[7, 1] == "r-2:7"
    chain.stop()


def test_a_service_that_dies_while_it_adopts_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.spark import adoption

    chain = Chain(page_rows=3)
    chain.begin({n: n for n in range(20)})
    chain.work(mended=True)
    chain.finish()
    whole = adoption.Adoption.page

    def dies(self: adoption.Adoption, page: int) -> adoption.PageTaken:
        if page == 4:
            raise KeyboardInterrupt
        return whole(self, page)

    world = {n: n for n in range(2, 24)}
    with monkeypatch.context() as patch:
        patch.setattr(adoption.Adoption, "page", dies)
        with pytest.raises(KeyboardInterrupt):
            chain.begin(world)
    chain.stop()
    record = chain.record
    assert record.status is runs.Status.INGESTING
    chain.take_lease()
    chain.desk, chain._office = chain.again(record)
    seal = chain.seal_again(world)
    chain.office.seal(seal)
    assert sum(chain.office.desk.board.ended) == 18
    made = chain.work(mended=True)
    assert made == 4
    chain.finish()
    chain.check_replay()
    expected = Chain(page_rows=3)
    expected.begin(world)
    expected.work(mended=True)
    expected.finish()
    assert chain.output() == expected.output()
    assert chain.store.read(runs.the, record.run_id).status is runs.Status.FINISHED
    for one in (chain, expected):
        one.stop()


def test_skipped_rows_keep_their_reason_over_two_runs() -> None:
    chain = Chain()
    for world in ({1: 6}, {1: 6, 2: 1}, {0: 1, 1: 6}):
        chain.begin(world)
        chain.work()
        chain.finish()
    assert [called.row for called in chain.calls] == [(1, 6), (2, 1), (0, 1)]
    assert chain.records() == {1: (State.TERMINAL_SKIP.name, "because (1, 6)")}
    chain.stop()
