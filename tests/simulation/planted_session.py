"""Pytest plugin: a planted bug for a whole test session.

HOLDFAST_PLANTED_BUG='task redrive: creates another task at each repeat' python -m pytest -p tests.simulation.planted_session tests/tasks
"""

from __future__ import annotations

import os

import pytest

from tests.simulation.mutants import MUTANTS

VARIABLE = "HOLDFAST_PLANTED_BUG"


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> object:
    name = os.environ.get(VARIABLE)
    if name is None:
        return (yield)
    with MUTANTS[name].planted():
        return (yield)
