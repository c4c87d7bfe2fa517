"""What every suite shares: one hypothesis profile, spec markers that are well formed, and databases that
go with the test that made them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent
# Seeds below this are tried on PostgreSQL by `make test`, the others by `make chaos`.
SEEDS_ON_POSTGRESQL = 2
# What these hold is run on PostgreSQL by `make chaos`; by `make test` it is their specs and histories there.
SELDOM_ON_POSTGRESQL = ("tasks", "authority")

# A busy machine is no reason to fail: pytest-timeout bounds a test, not hypothesis.
settings.register_profile("holdfast", deadline=None, print_blob=True)
settings.load_profile("holdfast")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
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
