"""The short form of `make chaos`: four workers, eight kills, no lost commit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.process import chaos

MODULES = (
    "holdfast.store.lmdb.writer",
    "holdfast.store.lmdb.writer_client",
    "holdfast.store.lmdb.writer_process",
    "holdfast.durable.lease",
    "holdfast.durable.queue",
    "holdfast.durable.journal",
)

KILLS = 8


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.spec(
    "004",
    "Chaos/failure injection matrix",
    "acknowledged commits survive kills and stops of workers and writers and are applied once",
)
def test_acknowledged_commits_survive_kills_of_workers_and_writers(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}: python -m tests.process.chaos --kills {KILLS} --seed {seed}")
    ran = chaos.run(tmp_path, kills=KILLS, seconds=0, seed=seed, processes=4)
    assert not ran.breaches
    assert ran.kills >= KILLS
    assert ran.done["acked"] > 0
