"""What every suite shares: one hypothesis profile, spec markers that are well formed, and databases that
go with the test that made them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent

# A busy machine is no reason to fail: pytest-timeout bounds a test, not hypothesis.
settings.register_profile("holdfast", deadline=None, print_blob=True)
settings.load_profile("holdfast")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _on_postgresql(item):
            item.add_marker("postgresql")
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
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return place.name.startswith("test_postgres") or any(
        isinstance(param, str) and param.startswith("postgres") for param in params
    )
