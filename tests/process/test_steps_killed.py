"""Worlds and their effects in one process, which is killed during steps."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.app.world_handle import WorldHandle
from holdfast.durable import journal, queue
from holdfast.world import intents
from holdfast.world.catalog import subject_of
from tests.process.conftest import LIMITS
from tests.process.effect_chain_app import LOG, Begun, Chain, app
from tests.process.watch import KILLS, until
from tests.processes import Proc

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.effect_chain_app:app"]
CHAINS = 6
# Steps of all chains together between two kills.
BETWEEN = 60
LEASE_S = "1"


@pytest.mark.timeout(60 + 6 * KILLS)
def test_steps_are_neither_lost_nor_repeated_when_their_process_is_killed(
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

        def total_height() -> int:
            return sum(_height(runtime.store, one) for one in chains)

        for _ in range(KILLS):
            before = total_height()
            with Proc.spawn(argv, ready="ready", env={LOG: str(calls)}) as proc:
                until(lambda before=before: total_height() >= before + BETWEEN, "steps go on")
                assert proc.kill() == -signal.SIGKILL
        with Proc.spawn(argv, ready="ready", env={LOG: str(calls)}):
            until(lambda: total_height() == CHAINS * (steps + 2), "the chains end")
        for one in chains:
            assert one.state().seen == list(range(steps, -1, -1)), "each receipt once, in order"
            store.read(journal.verify, subject_of("steps", one.create()))
        counts = store.read(queue.counts, intents.effect_queue("steps", "step"))
    assert counts == queue.QueueCounts(done=CHAINS * (steps + 1))
    made = Counter(calls.read_text().split())
    assert len(made) == CHAINS * (steps + 1), "each effect was called, under one key"
    repeated = made.total() - len(made)
    print(f"{KILLS} kills: {len(made)} effects, {repeated} calls repeated, each with its first key")


def _height(store: stores.Store, chain: WorldHandle[Chain]) -> int:
    return store.read(journal.head, subject_of("steps", chain.create())).height
