"""What every suite shares: one hypothesis profile, spec markers that are well formed, and databases that
go with the test that made them."""

import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import settings

# A busy machine is no reason to fail: pytest-timeout bounds a test, not hypothesis.
settings.register_profile("holdfast", deadline=None, print_blob=True)
settings.load_profile("holdfast")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "postgres" in getattr(item, "callspec", _Plain).params.values():
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


class _Plain:
    """A test without parameters."""

    params: ClassVar[dict[str, Any]] = {}
