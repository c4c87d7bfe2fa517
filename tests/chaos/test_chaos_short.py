"""The short form of `make chaos` on PostgreSQL: crashes, restarts, a promotion, cut connections and kills."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos import run as chaos

MODULES = (
    "holdfast.store.postgres.store",
    "holdfast.store.postgres.engine",
    "holdfast.workers.service",
    "holdfast.runner.runner",
)

pytestmark = pytest.mark.postgresql

SECONDS = 4.0
SERVER_FAULT_INTERVAL_S = (0.4, 0.8)
# As many faults as in ten seconds of `make chaos`.
TIME_SCALE = 0.4


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.timeout(240)
@pytest.mark.spec(
    "004",
    "Chaos/failure injection matrix",
    "acknowledged commits survive server crashes and cut connections and are applied once",
)
def test_acknowledged_commits_survive_server_crashes_and_cut_connections(
    tmp_path: Path,
) -> None:
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}: python -m tests.chaos.run --seconds {SECONDS:g} --seed {seed}")
    ran = chaos.run(
        tmp_path,
        seconds=SECONDS,
        seed=seed,
        server_faults_min=chaos.PROMOTION_EVERY,
        workers=2,
        server_fault_interval_s=SERVER_FAULT_INTERVAL_S,
        time_scale=TIME_SCALE,
    )
    assert not ran.breaches
    assert ran.done["promotions"] > 0
    assert ran.client_logs.count("acked") > 0
