"""Which rows of two runs are the same, for the output that one of them takes over from the other."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ledger import runs
from holdfast.spark.succession import same_rows
from tests.spark.growth import Chain, World
from tests.spark.test_growing_chains import changed


def outcomes(chain: Chain, run_id: str) -> dict[int, tuple[int, str | None]]:
    """Of each row that ended well: its id and its result, or why it was skipped."""
    record = chain.store.read(runs.the, run_id)
    found = chain.outcomes_of(record).all(0, record.size).to_pylist()
    return {
        row["_seq"]: (row["id"], row["y"] or row["_error"])
        for row in found
        if row["_state"] != "TERMINAL_FAIL"
    }


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 32))
def test_same_rows_are_those_of_one_outcome(seed: int) -> None:
    draw = random.Random(seed)
    chain = Chain(page_rows=draw.choice([3, 8]))
    world: World = {draw.randrange(40): draw.randrange(1, 60) for _ in range(20)}
    past: list[World] = []
    for _ in range(4):
        chain.begin(world)
        chain.work()
        chain.finish()
        past.append(world)
        world = changed(world, draw, past)
    last = chain.record
    mine = outcomes(chain, last.run_id)
    for owner in ("r-1", "r-2", "r-3"):
        theirs = outcomes(chain, owner)
        found = same_rows(chain.store, last, owner)
        pairs = {lo + i: base_lo + i for lo, hi, base_lo in found for i in range(hi - lo)}
        assert len(pairs) == sum(one.hi - one.lo for one in found)
        assert all(mine[seq] == theirs[there] for seq, there in pairs.items())
        known = {told: seq for seq, told in theirs.items()}
        # A row of the same outcome was never called twice, so all of them are found.
        assert pairs == {seq: known[told] for seq, told in mine.items() if told in known}
        for one, two in itertools.pairwise(found):
            assert one.hi <= two.lo
            assert (one.hi, one.base_lo + one.hi - one.lo) != (two.lo, two.base_lo), "joined"
    chain.stop()
