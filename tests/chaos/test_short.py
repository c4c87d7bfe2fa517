"""The short form of `make chaos` on PostgreSQL: a crash, a restart, a promotion, cuts and kills, in seconds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos import run as chaos

MODULES = (
    "holdfast.store.postgres",
    "holdfast.store.pg.engine",
    "holdfast.roles.role",
    "holdfast.runner.runner",
)

pytestmark = pytest.mark.postgresql

SECONDS = 10.0
STRIKE_S = (1.0, 2.0)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.spec(
    "004",
    "Chaos/failure injection matrix",
    "whatever happens to servers, connections and workers, nothing acknowledged is lost, nothing is done twice",
)
def test_nothing_acknowledged_is_lost_when_servers_crash_and_connections_are_cut(
    tmp_path: Path,
) -> None:
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}: python -m tests.chaos.run --seconds {SECONDS:g} --seed {seed}")
    ran = chaos.run(
        tmp_path,
        seconds=SECONDS,
        seed=seed,
        strikes_min=chaos.PROMOTION_EVERY,
        workers=2,
        strike_s=STRIKE_S,
    )
    assert not ran.breaches
    assert ran.done["promotions"] > 0
    assert ran.told.count("acked") > 0
