"""What every suite shares: one hypothesis profile, and spec markers that are well formed."""

import pytest
from hypothesis import settings

# A busy machine is no reason to fail: pytest-timeout bounds a test, not hypothesis.
settings.register_profile("holdfast", deadline=None, print_blob=True)
settings.load_profile("holdfast")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("spec"):
            if len(marker.args) != 3 or not all(isinstance(arg, str) for arg in marker.args):
                raise pytest.UsageError(
                    f"{item.nodeid}: write @pytest.mark.spec(document, section, rule), three strings"
                )
