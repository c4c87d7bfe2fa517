"""What every suite shares: one hypothesis profile, spec markers that are well formed, databases that go
with the test that made them, and an end to what hangs."""

import faulthandler
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import settings

TESTS = Path(__file__).parent
# Seeds below this are tried on PostgreSQL by `make test`, the others by `make chaos`.
SEEDS_ON_POSTGRESQL = 2
# What these hold is run on PostgreSQL by `make chaos`; by `make test` it is their specs and histories there.
SELDOM_ON_POSTGRESQL = ("tasks", "authority")

# pytest-timeout raises in the main thread, once. What goes on for so long after that hangs in what it does
# about the exception: the process says where its threads are, and ends. So does one that cannot leave.
HANGS_S = 90

# A busy machine is no reason to fail: pytest-timeout bounds a test, not hypothesis.
settings.register_profile("holdfast", deadline=None, print_blob=True)
settings.load_profile("holdfast")


# The limits of single tests are multiplied by it, on a machine so slow that they run out of time.
SLOWNESS = float(os.environ.get("HOLDFAST_TEST_SLOWNESS") or 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if SLOWNESS != 1 and (limit_s := _limit_s(item)):
            item.add_marker(pytest.mark.timeout(limit_s * SLOWNESS), append=False)
        if _on_postgresql(item):
            item.add_marker("postgresql")
            seldom = item.path.relative_to(TESTS).parts[0] in SELDOM_ON_POSTGRESQL
            many = _params(item).get("seed", 0) >= SEEDS_ON_POSTGRESQL
            if (seldom or many) and "postgres" in _params(item).values():
                item.add_marker("deep")
        for marker in item.iter_markers("spec"):
            if len(marker.args) != 3 or not all(isinstance(arg, str) for arg in marker.args):
                raise pytest.UsageError(
                    f"{item.nodeid}: write @pytest.mark.spec(document, section, rule), three strings"
                )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    limit_s = _limit_s(item)
    if limit_s:
        _end_after(limit_s + HANGS_S, item.config)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    _end_after(HANGS_S, session.config)


def _limit_s(item: pytest.Item) -> float:
    """How long pytest-timeout lets it run; 0 is for ever."""
    if item.config.getoption("usepdb", False):
        return 0.0
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        return float(marker.args[0] if marker.args else marker.kwargs.get("timeout", 0))
    given = item.config.getoption("timeout", None)
    return float(item.config.getini("timeout") if given is None else given)


def _end_after(seconds: float, config: pytest.Config) -> None:
    stderr = config.stash.get(fault_handler_stderr_fd_key, None)
    if stderr is not None:
        faulthandler.dump_traceback_later(seconds, file=stderr, exit=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    try:
        return (yield)
    finally:
        if (postgres := sys.modules.get("tests.postgres")) is not None:
            postgres.drop_databases()


def _on_postgresql(item: pytest.Item) -> bool:
    """By where it is, or by a parameter that names the store."""
    place = item.path.relative_to(TESTS)
    if place.parts[0] == "chaos" or "on_postgres" in place.parts:
        return True
    return place.name.startswith("test_postgres") or any(
        isinstance(param, str) and param.startswith("postgres") for param in _params(item).values()
    )


def _params(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}
