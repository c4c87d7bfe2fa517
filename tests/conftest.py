"""Shared pytest configuration: the hypothesis profile, the check of spec markers, the choice of stores, the place of
temporary files and bytecode, the start of writers, the removal of test databases, the check that no failpoint stays
armed, and the watchdog that ends a hanging test process."""

import faulthandler
import functools
import gc
import os
import shutil
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import settings

from tests import forked_writers

TESTS = Path(__file__).parent
# `make test` runs seeds below this bound on PostgreSQL, `make chaos` runs all of them.
SEEDS_ON_POSTGRESQL = 2
# Tests of these directories run on PostgreSQL in `make chaos` only; `make test` runs their specs and histories there.
DEEP_ON_POSTGRESQL = ("tasks", "leadership", "dispatch")

# `make test` runs a test that is parametrised over these stores on one of them, and `make chaos` on each other store: the
# conformance suite proves the stores equal. Tests in `EVERY_STORE` and tests of a spec rule run on all of them.
ROTATED_STORES = ("memory", "lmdb-local", "lmdb", "postgres")
EVERY_STORE = ("conformance", "store", "spec", "sim", "spark", "process", "chaos", "aio")
ROTATED_TESTS = "holdfast_rotated_tests"
_rotated = pytest.StashKey[int]()

# The tests kill processes, never the machine, so no file has to reach the disk: on tmpfs an fsync is free.
MEMORY_DISK, MEMORY_DISK_FREE_MIN = Path("/dev/shm"), 4 << 30
if (
    "PYTEST_DEBUG_TEMPROOT" not in os.environ
    and os.access(MEMORY_DISK, os.W_OK)
    and shutil.disk_usage(MEMORY_DISK).free >= MEMORY_DISK_FREE_MIN
):
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(MEMORY_DISK)

# Compiled modules are kept, for the hundreds of processes that tests start: compilation is a third of a start.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# pytest-timeout raises once, in the main thread. If the test still runs HANGS_S later, it hangs in its cleanup: the
# process dumps the stacks of its threads and exits. The same holds for a process that hangs at its exit.
HANG_GRACE_S = 90

# A busy machine is no reason to fail: pytest-timeout bounds a test, not hypothesis.
settings.register_profile("holdfast", deadline=None, print_blob=True)
settings.load_profile("holdfast")


# A factor for the time limits of single tests on slow machines.
SLOWNESS_FACTOR = float(os.environ.get("HOLDFAST_TEST_SLOWNESS") or 1)


def pytest_configure() -> None:
    forked_writers.install()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    # The collection makes thousands of lasting objects: each run of the garbage collector would visit all of them.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if SLOWNESS_FACTOR != 1 and (limit_s := _time_limit_s(item)):
            item.add_marker(pytest.mark.timeout(limit_s * SLOWNESS_FACTOR), append=False)
        if _runs_on_postgresql(item):
            item.add_marker("postgresql")
            is_deep_directory = _place(item.path)[0] in DEEP_ON_POSTGRESQL
            is_deep_seed = _params(item).get("seed", 0) >= SEEDS_ON_POSTGRESQL
            if (is_deep_directory or is_deep_seed) and "postgres" in _params(item).values():
                item.add_marker("deep")
        for marker in item.iter_markers("spec"):
            if len(marker.args) != 3 or not all(isinstance(arg, str) for arg in marker.args):
                raise pytest.UsageError(
                    f"{item.nodeid}: write @pytest.mark.spec(document, section, rule), three strings"
                )
    config.stash[_rotated] = _rotate_stores(items)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    # Otherwise each full collection of the garbage collector walks over all collected tests.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # A worker process collects the tests, and the process that starts it prints the summary.
    node.config.stash[_rotated] = getattr(node, "workeroutput", {}).get(ROTATED_TESTS, 0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if rotated := config.stash.get(_rotated, 0):
        terminalreporter.write_line(
            f"{rotated} tests are marked `deep`: the same test runs on another store"
        )


def _rotate_stores(items: list[pytest.Item]) -> int:
    """Mark each test `deep` on all of its stores but one, and return the number of marked tests. A hash of the test
    and its other parameters selects the store, so that every run selects the same one. A variant with a skip marker
    is not selected."""
    by_test: dict[str, dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        if _place(item.path)[0] in EVERY_STORE or not hasattr(item, "callspec"):
            continue
        if item.get_closest_marker("deep") or item.get_closest_marker("spec"):
            continue
        stores = [
            name
            for name, value in item.callspec.params.items()
            if isinstance(value, str) and value in ROTATED_STORES
        ]
        if len(stores) == 1:
            store = str(item.callspec.params[stores[0]])
            # Not the indices of the parameters: pytest numbers the direct ones by variant.
            others = f"-{item.callspec.id}-".replace(f"-{store}-", "-", 1)
            by_test[f"{item.nodeid.partition('[')[0]} {others}"][store] = item
    rotated = 0
    for name, by_store in by_test.items():
        stores = sorted(by_store)
        run_stores = [store for store in stores if not _has_skip_marker(by_store[store])] or stores
        selected = run_stores[zlib.crc32(name.encode()) % len(run_stores)]
        for store in stores:
            if store != selected:
                by_store[store].add_marker("deep")
                rotated += 1
    return rotated


def _has_skip_marker(item: pytest.Item) -> bool:
    return any(marker.name in ("skip", "skipif") for marker in item.iter_markers())


@pytest.fixture
def probe_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writers that this process starts know the probe operations. Other tests start the writer as shipped."""
    # Imported late: most tests start no writer.
    from holdfast.store.lmdb import writer_process
    from tests.probe_writer import PROBE_WRITER_CODE

    monkeypatch.setattr(writer_process, "WRITER_CODE", PROBE_WRITER_CODE)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    forked_writers.is_enabled = not forked_writers.spawns_writers(item.path.relative_to(TESTS))
    limit_s = _time_limit_s(item)
    if limit_s:
        _exit_after(limit_s + HANG_GRACE_S, item.config)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[ROTATED_TESTS] = session.config.stash.get(_rotated, 0)
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
        if (failpoints := sys.modules.get("holdfast.failpoints")) is not None:
            left = failpoints.armed_names()
            failpoints.disarm_all()
            assert not left, f"the test left failpoints armed: {left}"


def _runs_on_postgresql(item: pytest.Item) -> bool:
    """Whether the test runs on PostgreSQL, by its path or by a parameter that names the store."""
    place = _place(item.path)
    if place[0] == "chaos" or "on_postgres" in place:
        return True
    return place[-1].startswith("test_postgres") or any(
        isinstance(param, str) and param.startswith("postgres") for param in _params(item).values()
    )


@functools.cache
def _place(path: Path) -> tuple[str, ...]:
    """The parts of a path below `tests`. The collection asks several times for each of the tests of a file."""
    return path.relative_to(TESTS).parts


def _params(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}
