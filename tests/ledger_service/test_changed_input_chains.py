"""Chains of changed inputs with service crashes: the service requests compared with a simple model.

These tests run without Spark, so that many chains fit into a minute. `test_changed_input` tests the same on Spark.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import failpoints
from holdfast.ledger import runs
from holdfast.ledger.states import RowState
from tests.ledger_service.run_chain import ChainModel, InputRows, RunChain


def next_input(
    input_rows: InputRows, draw: random.Random, earlier_inputs: list[InputRows]
) -> InputRows:
    """The next input, with inserts, updates, reverted updates, deletes and returning rows."""
    after = dict(input_rows)
    for _ in range(draw.randrange(8)):
        key = draw.randrange(40)
        kind = draw.randrange(4)
        if kind == 0:
            after.pop(key, None)
        elif kind == 1 and earlier_inputs:
            older = draw.choice(earlier_inputs)
            if key in older:
                after[key] = older[key]
        else:
            after[key] = draw.randrange(1, 60)
    return after


def check_chain(chain: RunChain, model: ChainModel) -> None:
    chain.check_replay()
    assert chain.output() == model.output()
    assert chain.resultless_rows() == model.resultless_rows()


@pytest.mark.spec(
    "002",
    "Atomicity",
    "2: over a chain of changed inputs a row is called again only if its final outcome was not reported",
    module="holdfast.spark.outcome_reuse",
)
@settings(max_examples=80)
@given(seed=st.integers(0, 1 << 32), page_rows=st.sampled_from([2, 5, 8, 64]))
def test_chain_of_changed_inputs_equals_its_model(seed: int, page_rows: int) -> None:
    draw = random.Random(seed)
    chain, model = RunChain(page_rows), ChainModel()
    input_rows: InputRows = {
        draw.randrange(40): draw.randrange(1, 60) for _ in range(draw.randrange(25))
    }
    earlier_inputs: list[InputRows] = []
    for _ in range(draw.randrange(2, 8)):
        retry_failed = draw.random() < 0.7
        fixed = draw.random() < 0.3
        chain.begin_run(input_rows, blocks=draw.randrange(1, 6), retry_failed=retry_failed)
        expected_calls = model.begin_run(chain.record.run_id, input_rows, retry_failed)
        before = len(chain.calls)
        killed = draw.random() < 0.5
        if killed and expected_calls:
            # A worker calls some rows and reports a part of them. Then the worker and the service die.
            reported_before = len(chain.reported)
            chain.call_rows(
                fixed=fixed, calls_max=draw.randrange(1, len(expected_calls) + 1), unreported=2
            )
            model.mark_reported(chain.reported[reported_before:], fixed)
        if not killed or draw.random() < 0.5:
            if killed:
                chain.resume()
            unfinished = model.unfinished_rows()
            before_rest = len(chain.calls)
            chain.call_rows(fixed=fixed)
            rest = {called.row for called in chain.calls[before_rest:]}
            assert rest == unfinished, "what had not ended is called, and nothing else"
            model.mark_reported(rest, fixed)
            chain.finish_run()
            check_chain(chain, model)
        for called in chain.calls[before:]:
            assert called.row in expected_calls
            assert called.key == model.idempotency_key(called.row)
        if draw.random() < 0.3:
            delete_unpinned_run(chain, model, draw)
        earlier_inputs.append(input_rows)
        input_rows = next_input(input_rows, draw, earlier_inputs)
    chain.stop_service()
    chain.store.close()


def delete_unpinned_run(chain: RunChain, model: ChainModel, draw: random.Random) -> None:
    """Delete an older run, unless another run pins it."""
    older = [run_id for run_id in model.known if run_id != chain.record.run_id]
    run_id = draw.choice(older or [""])
    if not run_id:
        return
    if chain.store.read(runs.list_pinning_runs, run_id):
        with pytest.raises(runs.RunPinned):
            chain.delete_run(run_id)
        return
    chain.delete_run(run_id)
    del model.known[run_id]


def test_returning_row_is_not_called_again() -> None:
    chain = RunChain()
    for input_rows in ({1: 1, 2: 2}, {2: 2}, {1: 1, 2: 3}, {1: 1, 2: 2}):
        chain.begin_run(input_rows)
        chain.call_rows()
        chain.finish_run()
    assert [called.row for called in chain.calls] == [(1, 1), (2, 2), (2, 3)]
    assert chain.output() == [(1, "1:1"), (2, "2:2")]
    assert chain.record.base_run == "r-3"
    # The outcome is in the first run. The last run pins its blocks and results.
    assert chain.store.read(runs.list_pinned_runs, "r-4") == ["r-1"]
    chain.stop_service()


def test_failed_row_is_retried_with_the_same_idempotency_key() -> None:
    chain = RunChain()
    chain.begin_run({1: 4, 2: 1})
    chain.call_rows()
    chain.finish_run()
    assert chain.resultless_rows() == {1: ("TERMINAL_FAIL", "because (1, 4)")}
    chain.begin_run({0: 1, 1: 4, 2: 1})
    chain.call_rows(fixed=True)
    chain.finish_run()
    assert [called for called in chain.calls if called.row == (1, 4)] == [((1, 4), "r-1:0")] * 2
    assert chain.output() == [(0, "0:1"), (1, "1:4"), (2, "2:1")]
    chain.stop_service()


def test_failed_rows_are_adopted_without_retry_failed() -> None:
    chain = RunChain()
    chain.begin_run({1: 4, 2: 1})
    chain.call_rows()
    chain.finish_run()
    chain.begin_run({0: 1, 1: 4, 2: 1}, retry_failed=False)
    assert chain.requests.log_writer.scheduler.ended == [1, 0, 1, 0]
    assert chain.call_rows(fixed=True) == 1
    chain.finish_run()
    assert chain.resultless_rows() == {1: ("TERMINAL_FAIL", "because (1, 4)")}
    chain.stop_service()


def test_unfinished_run_is_superseded_by_the_next_run() -> None:
    chain = RunChain()
    chain.begin_run(dict.fromkeys(range(6), 1))
    assert chain.call_rows(calls_max=4) == 4
    chain.begin_run(dict.fromkeys(range(8), 1))
    assert chain.store.read(runs.get_existing, "r-1").status is runs.RunLifecycle.SUPERSEDED
    assert chain.requests.log_writer.scheduler.ended[0] == 4
    assert {called.row for called in chain.calls} == {(n, 1) for n in range(4)}
    chain.call_rows()
    keys = {called.row: called.key for called in chain.calls}
    assert keys[4, 1] == "r-1:4", "it was handed out before, and may have been called"
    assert keys[7, 1] == "r-2:7"
    chain.stop_service()


def test_service_crash_during_adoption_resumes() -> None:
    chain = RunChain(page_rows=3)
    chain.begin_run({n: n for n in range(20)})
    chain.call_rows(fixed=True)
    chain.finish_run()

    def dies(page: int) -> None:
        if page == 4:
            raise KeyboardInterrupt

    input_rows = {n: n for n in range(2, 24)}
    with failpoints.on("spark.adopt_page", calls=dies), pytest.raises(KeyboardInterrupt):
        chain.begin_run(input_rows)
    chain.stop_service()
    record = chain.record
    assert record.status is runs.RunLifecycle.INGESTING
    chain.take_lease()
    chain.log_writer, chain._requests = chain.reopen_service(record)
    seal = chain.repeat_seal(input_rows)
    chain.requests.seal(seal)
    assert sum(chain.requests.log_writer.scheduler.ended) == 18
    calls_made = chain.call_rows(fixed=True)
    assert calls_made == 4
    chain.finish_run()
    chain.check_replay()
    expected = RunChain(page_rows=3)
    expected.begin_run(input_rows)
    expected.call_rows(fixed=True)
    expected.finish_run()
    assert chain.output() == expected.output()
    assert chain.store.read(runs.get_existing, record.run_id).status is runs.RunLifecycle.FINISHED
    for run_chain in (chain, expected):
        run_chain.stop_service()


def test_skipped_rows_keep_their_reason_over_several_runs() -> None:
    chain = RunChain()
    for input_rows in ({1: 6}, {1: 6, 2: 1}, {0: 1, 1: 6}):
        chain.begin_run(input_rows)
        chain.call_rows()
        chain.finish_run()
    assert [called.row for called in chain.calls] == [(1, 6), (2, 1), (0, 1)]
    assert chain.resultless_rows() == {1: (RowState.TERMINAL_SKIP.name, "because (1, 6)")}
    chain.stop_service()
