"""Worlds and their effects in one process, which is killed while steps are under way."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.app.handle import WorldHandle
from holdfast.durable import journal, queue
from holdfast.world import publish
from holdfast.world.catalog import subject_of
from tests.process.conftest import LIMITS
from tests.process.stepping import LOG, Begun, Chain, app
from tests.process.watch import until
from tests.processes import Proc

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.stepping:app"]
# In the terms 200; fewer where time is short.
KILLS = max(int(os.environ.get("HOLDFAST_TEST_KILLS", "20")) // 4, 3)
CHAINS = 6
# Steps between two kills, of all chains together.
BETWEEN = 60
LEASE_S = "1"


@pytest.mark.timeout(60 + 6 * KILLS)
def test_a_process_killed_in_the_middle_of_steps_loses_none_and_doubles_none(
    home: Path, tmp_path: Path
) -> None:
    steps = (KILLS + 1) * 2 * BETWEEN // CHAINS
    calls = tmp_path / "calls"
    argv = [*UP, "--store", str(home), "--lease-s", LEASE_S]
    with contextlib.ExitStack() as running:
        store = running.enter_context(stores.open(home, limits=LIMITS))
        runtime = running.enter_context(app.open(store, roles=()))
        chains = [runtime.world(Chain, f"chain {n}") for n in range(CHAINS)]
        runtime.send_many([(one, Begun(steps)) for one in chains])

        def seen() -> int:
            return sum(_height(runtime.store, one) for one in chains)

        for _ in range(KILLS):
            before = seen()
            with Proc.spawn(argv, ready="ready", env={LOG: str(calls)}) as proc:
                until(lambda before=before: seen() >= before + BETWEEN, "steps go on")
                assert proc.kill() == -signal.SIGKILL
        with Proc.spawn(argv, ready="ready", env={LOG: str(calls)}):
            until(lambda: seen() == CHAINS * (steps + 2), "the chains end")
        for one in chains:
            assert one.state().seen == list(range(steps, -1, -1)), "each receipt once, in order"
            store.read(journal.verify, subject_of("steps", one.create()))
        counts = store.read(queue.counts, publish.effects("steps", "step"))
    assert counts == queue.Counts(done=CHAINS * (steps + 1))
    made = Counter(calls.read_text().split())
    assert len(made) == CHAINS * (steps + 1), "each effect was called, under one key"
    repeated = made.total() - len(made)
    print(f"{KILLS} kills: {len(made)} effects, {repeated} calls repeated, each with its first key")


def _height(store: stores.Store, chain: WorldHandle[Chain]) -> int:
    return store.read(journal.head, subject_of("steps", chain.create())).height
