"""`same_rows`: the equal rows of two runs, when one run succeeds the other in an output."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ledger import runs
from holdfast.spark.output_succession import same_rows
from tests.ledger_service.run_chain import InputRows, RunChain
from tests.ledger_service.test_changed_input_chains import next_input


def outcomes(chain: RunChain, run_id: str) -> dict[int, tuple[int, str | None]]:
    """By seq of each row that did not fail: its id and its result or skip reason."""
    record = chain.store.read(runs.get_existing, run_id)
    found = chain.outcomes_of(record).all_rows(0, record.size).to_pylist()
    return {
        row["_seq"]: (row["id"], row["y"] or row["_error"])
        for row in found
        if row["_state"] != "TERMINAL_FAIL"
    }


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 32))
def test_same_rows_are_the_rows_with_equal_outcomes(seed: int) -> None:
    draw = random.Random(seed)
    chain = RunChain(page_rows=draw.choice([3, 8]))
    world: InputRows = {draw.randrange(40): draw.randrange(1, 60) for _ in range(20)}
    past: list[InputRows] = []
    for _ in range(4):
        chain.begin_run(world)
        chain.call_rows()
        chain.finish_run()
        past.append(world)
        world = next_input(world, draw, past)
    last = chain.record
    mine = outcomes(chain, last.run_id)
    for owner in ("r-1", "r-2", "r-3"):
        theirs = outcomes(chain, owner)
        found = same_rows(chain.store, last, owner)
        pairs = {lo + i: base_lo + i for lo, hi, base_lo in found for i in range(hi - lo)}
        assert len(pairs) == sum(one.hi - one.lo for one in found)
        assert all(mine[seq] == theirs[there] for seq, there in pairs.items())
        seq_by_outcome = {outcome: seq for seq, outcome in theirs.items()}
        # Equal outcomes come from one call, so every equal row is found.
        assert pairs == {
            seq: seq_by_outcome[outcome]
            for seq, outcome in mine.items()
            if outcome in seq_by_outcome
        }
        for one, two in itertools.pairwise(found):
            assert one.hi <= two.lo
            assert (one.hi, one.base_lo + one.hi - one.lo) != (two.lo, two.base_lo), "joined"
    chain.stop_service()
