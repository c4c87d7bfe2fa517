"""Shared pytest configuration: the hypothesis profile, the check of spec markers, the removal of test databases,
and the watchdog that ends a hanging test process."""

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
# Every writer process that a test starts loads the operations of the test suite.
os.environ["HOLDFAST_TEST_OPERATIONS"] = str(TESTS / "probe_operations.py")
# `make test` runs seeds below this bound on PostgreSQL, `make chaos` runs all of them.
SEEDS_ON_POSTGRESQL = 2
# Tests of these directories run on PostgreSQL in `make chaos` only; `make test` runs their specs and histories there.
DEEP_ON_POSTGRESQL = ("tasks", "leadership", "dispatch")

# pytest-timeout raises once, in the main thread. If the test still runs HANGS_S later, it hangs in its cleanup: the
# process dumps the stacks of its threads and exits. The same holds for a process that hangs at its exit.
HANG_GRACE_S = 90

# A busy machine is no reason to fail: pytest-timeout bounds a test, not hypothesis.
settings.register_profile("holdfast", deadline=None, print_blob=True)
settings.load_profile("holdfast")


# A factor for the time limits of single tests on slow machines.
SLOWNESS_FACTOR = float(os.environ.get("HOLDFAST_TEST_SLOWNESS") or 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if SLOWNESS_FACTOR != 1 and (limit_s := _time_limit_s(item)):
            item.add_marker(pytest.mark.timeout(limit_s * SLOWNESS_FACTOR), append=False)
        if _runs_on_postgresql(item):
            item.add_marker("postgresql")
            is_deep_directory = item.path.relative_to(TESTS).parts[0] in DEEP_ON_POSTGRESQL
            is_deep_seed = _params(item).get("seed", 0) >= SEEDS_ON_POSTGRESQL
            if (is_deep_directory or is_deep_seed) and "postgres" in _params(item).values():
                item.add_marker("deep")
        for marker in item.iter_markers("spec"):
            if len(marker.args) != 3 or not all(isinstance(arg, str) for arg in marker.args):
                raise pytest.UsageError(
                    f"{item.nodeid}: write @pytest.mark.spec(document, section, rule), three strings"
                )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    limit_s = _time_limit_s(item)
    if limit_s:
        _exit_after(limit_s + HANG_GRACE_S, item.config)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    _exit_after(HANG_GRACE_S, session.config)


def _time_limit_s(item: pytest.Item) -> float:
    """Return the time limit of pytest-timeout; 0 means no limit."""
    if item.config.getoption("usepdb", False):
        return 0.0
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        return float(marker.args[0] if marker.args else marker.kwargs.get("timeout", 0))
    option = item.config.getoption("timeout", None)
    return float(item.config.getini("timeout") if option is None else option)


def _exit_after(seconds: float, config: pytest.Config) -> None:
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


def _runs_on_postgresql(item: pytest.Item) -> bool:
    """Whether the test runs on PostgreSQL, by its path or by a parameter that names the store."""
    path = item.path.relative_to(TESTS)
    if path.parts[0] == "chaos" or "on_postgres" in path.parts:
        return True
    return path.name.startswith("test_postgres") or any(
        isinstance(param, str) and param.startswith("postgres") for param in _params(item).values()
    )


def _params(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}
