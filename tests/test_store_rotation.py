"""`make test` runs a test that is parametrised over stores on one of them, and never on a skipped one."""

from __future__ import annotations

from collections import Counter

import pytest

from tests import conftest

pytest_plugins = ("pytester",)

ALL = '"memory", "lmdb", "postgres"'
SKIPPED = (
    'pytest.param("lmdb", marks=pytest.mark.skip(reason="unavailable")), '
    'pytest.param("postgres", marks=pytest.mark.skipif(True, reason="unavailable"))'
)
COUNT = 20
# This plugin collects garbage several times at the end of a session.
OPTIONS = ("-p", "no:unraisableexception", "-o", "markers=deep")


def selected_stores(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, params: str
) -> Counter[str]:
    """Collect `COUNT` tests with these parameters. Return how many of them run on each store."""
    monkeypatch.setattr(conftest, "TESTS", pytester.path)
    tests = [
        f'@pytest.mark.parametrize("store", [{params}])\ndef test_{n}(store): ...\n'
        for n in range(COUNT)
    ]
    module = pytester.getmodulecol("\n".join(["import pytest", *tests]), configargs=OPTIONS)
    items = pytester.genitems([module])
    rotated = conftest._rotate_stores(items)
    selected = [item for item in items if not item.get_closest_marker("deep")]
    assert rotated == len(items) - COUNT
    assert len({item.name.partition("[")[0] for item in selected}) == len(selected) == COUNT
    return Counter(item.callspec.params["store"] for item in selected)


def test_rotation_selects_every_store_for_some_test(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert selected_stores(pytester, monkeypatch, ALL).keys() == {"memory", "lmdb", "postgres"}


def test_rotation_selects_one_store_for_each_value_of_a_second_parameter(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "TESTS", pytester.path)
    test = f"""
import pytest

@pytest.fixture(params=[{ALL}])
def store(request): ...

@pytest.mark.parametrize("number", range({COUNT}))
@pytest.mark.parametrize("letter", ["a", "b"])
def test(store, letter, number): ...
"""
    module = pytester.getmodulecol(test, configargs=OPTIONS)
    items = pytester.genitems([module])
    conftest._rotate_stores(items)
    params = [item.callspec.params for item in items if not item.get_closest_marker("deep")]
    assert sorted((one["letter"], one["number"]) for one in params) == [
        (letter, number) for letter in "ab" for number in range(COUNT)
    ]
    assert {one["store"] for one in params} == {"memory", "lmdb", "postgres"}


def test_rotation_selects_no_store_with_a_skip_marker(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert selected_stores(pytester, monkeypatch, f'"memory", {SKIPPED}') == {"memory": COUNT}


def test_rotation_keeps_one_variant_of_a_test_that_is_skipped_on_every_store(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert selected_stores(pytester, monkeypatch, SKIPPED).total() == COUNT
