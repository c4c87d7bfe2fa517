"""The traceability page is generated from the spec markers in the test sources."""

from pathlib import Path

import pytest

from tools.traceability import BadMarker, Rule, publish, render, require_modules, rules_of

FILE = """
import pytest
MODULES = ("holdfast.errors",)

@pytest.mark.spec("001", "Boot", "a rule | with a bar")
@pytest.mark.parametrize("n", [1, 2])
def test_one(n): ...

class TestGroup:
    @pytest.mark.spec("001", "Boot", "another", module=("holdfast.clock", "holdfast.retry"))
    def test_two(self): ...

def test_without_a_rule(): ...
"""


def test_spec_markers_are_collected_with_their_modules() -> None:
    assert list(rules_of(FILE, "tests/spec/test_x.py")) == [
        Rule(
            "001",
            "Boot",
            "a rule | with a bar",
            ("holdfast.errors",),
            "tests/spec/test_x.py::test_one",
        ),
        Rule(
            "001",
            "Boot",
            "another",
            ("holdfast.clock", "holdfast.retry"),
            "tests/spec/test_x.py::TestGroup::test_two",
        ),
    ]


def test_spec_marker_of_a_file_or_class_applies_to_its_tests() -> None:
    source = (
        "pytestmark = [pytest.mark.spec('2', 'S', 'file')]\n"
        "@pytest.mark.spec('2', 'S', 'class')\n"
        "class TestA:\n    def test_a(self): ...\n"
    )
    assert [rule.text for rule in rules_of(source, "t.py")] == ["file", "class"]


@pytest.mark.parametrize(
    "marker", ["spec('001', 'Boot')", "spec('001', 'Boot', RULE)", "spec('1', '2', '3', module=M)"]
)
def test_spec_marker_without_literals_raises_bad_marker(marker: str) -> None:
    with pytest.raises(BadMarker, match=r"t\.py:1"):
        list(rules_of(f"@pytest.mark.{marker}\ndef test_a(): ...", "t.py"))


@pytest.mark.parametrize("length", [120, 121])
def test_rule_of_more_than_120_characters_raises_bad_marker(length: int) -> None:
    source = f"@pytest.mark.spec('1', 'S', '{'x' * length}', module='holdfast')\ndef test_a(): ..."
    if length == 120:
        assert [len(rule.text) for rule in rules_of(source, "t.py")] == [120]
        return
    with pytest.raises(BadMarker, match="shorten the rule to 120 characters"):
        list(rules_of(source, "t.py"))


@pytest.mark.parametrize("modules", [(), ("holdfast.no_such_thing",)])
def test_rule_without_an_existing_module_raises_bad_marker(modules: tuple[str, ...]) -> None:
    with pytest.raises(BadMarker):
        require_modules(Rule("001", "Boot", "rule", modules, "t.py::test"))


def test_traceability_page_is_sorted_and_escaped() -> None:
    rules = [Rule("001", s, "a | b", ("holdfast",), "t.py::test") for s in ("10", "9", "Boot")]
    rows = [
        line for line in render(rules).splitlines() if line.startswith("| ") and "`t.py" in line
    ]
    assert [row.split(" | ")[0] for row in rows] == ["| 9", "| 10", "| Boot"]
    assert "a \\| b" in rows[0]


def test_publish_check_fails_on_an_outdated_page_without_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.traceability.ROOT", tmp_path)
    page = tmp_path / "docs" / "page.md"
    assert publish(page, "new\n", check=True) == 1
    assert not page.exists()
    assert publish(page, "new\n", check=False) == 0
    assert publish(page, "new\n", check=True) == 0
    assert publish(page, "newer\n", check=True) == 1
    assert page.read_text() == "new\n"
