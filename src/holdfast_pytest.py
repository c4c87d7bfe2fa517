"""The pytest plugin of Holdfast: the fixture `holdfast_sim`.

It is a module beside the package, so that pytest imports nothing of Holdfast before a test uses the
fixture.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest

SEED, SEEDS, FAULTS = "--holdfast-seed", "--holdfast-seeds", "--holdfast-faults"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("holdfast", "simulation of Holdfast applications")
    group.addoption(SEEDS, type=int, metavar="N", help="run N seeds of each scenario")
    group.addoption(SEED, type=int, metavar="K", help="run this seed of each scenario only")
    group.addoption(
        FAULTS,
        metavar="LIST",
        help=f"with {SEED}: inject the faults at these positions only, as a failure prints them; 'none' for no fault",
    )


@pytest.fixture
def holdfast_sim(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Run a scenario of an app under many seeds: `holdfast_sim(app, scenario, seeds=20)`."""
    config = request.config
    seed, faults = config.getoption(SEED), config.getoption(FAULTS)
    if faults is not None and seed is None:
        raise pytest.UsageError(f"{FAULTS} needs {SEED}")
    allowed = None if faults is None else _positions(faults)

    def run(app: Any, scenario: Callable[[Any], object], **options: Any) -> None:
        from holdfast.sim.scenario import run_seeds

        __tracebackhide__ = True
        if (count := config.getoption(SEEDS)) is not None:
            options["seeds"] = count
        if seed is not None:
            options |= {"start": seed, "seeds": 1}
        replay = f"pytest {shlex.quote(request.node.nodeid)}"
        run_seeds(app, scenario, allowed_faults=allowed, replay=replay, **options)

    return run


def _positions(text: str) -> frozenset[int]:
    try:
        return frozenset(int(word) for word in text.split(",") if text != "none")
    except ValueError:
        raise pytest.UsageError(f"{FAULTS} is a list of numbers, or none: {text}") from None
