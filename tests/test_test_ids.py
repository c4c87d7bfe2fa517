"""The table of former tests: every test of the old commit has a present test or a reason."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tools import test_ids
from tools.test_ids import Decisions, Table

NOTHING = Decisions({}, {})


def test_no_test_of_the_old_commit_is_lost():
    assert test_ids.lost_tests(test_ids.load_table(), test_ids.load_decisions()) == []


def test_no_rule_has_fewer_tests_than_in_the_old_commit():
    assert test_ids.fewer_rules(test_ids.load_table(), test_ids.load_decisions()) == []


def write_tests(root: Path, source: str) -> None:
    (root / "tests").mkdir()
    (root / "tests" / "test_a.py").write_text(source, "utf-8")


def test_old_test_without_a_present_test_is_lost(tmp_path):
    write_tests(tmp_path, "def test_kept(): ...\n")
    table = Table(tests={"tests/test_a.py::test_kept": 1, "tests/test_a.py::test_gone": 2})
    assert test_ids.lost_tests(table, NOTHING, tmp_path) == [
        "tests/test_a.py::test_gone: no such test now"
    ]


def test_moved_merged_and_removed_tests_are_not_lost(tmp_path):
    write_tests(
        tmp_path,
        "from b import (\n    test_imported,\n)\ndef test_new(): ...\nTestModel = M.TestCase\n",
    )
    old = [
        "tests/b.py::test_1",
        "tests/b.py::test_2",
        "tests/b.py::test_3",
        "tests/b.py::M::runTest",
    ]
    table = Table(
        tests=dict.fromkeys(old, 1),
        moved={old[0]: "tests/test_a.py::test_new", old[3]: "tests/test_a.py::TestModel::runTest"},
    )
    decisions = Decisions(
        {old[1]: "tests/test_a.py::test_imported"}, {old[2]: "its function is gone"}
    )
    assert test_ids.lost_tests(table, decisions, tmp_path) == []


def test_decision_for_an_unknown_test_is_reported(tmp_path):
    decisions = Decisions({}, {"tests/test_a.py::test_unknown": "a reason with words"})
    assert test_ids.lost_tests(Table(), decisions, tmp_path) == [
        "tests/test_a.py::test_unknown: unknown"
    ]


def test_reworded_rule_is_found_by_its_tests():
    table = Table(
        tests={"t::a": 3, "t::b": 1},
        moved={"t::a": "t::c"},
        rules={"001 | Boot | old words": ["t::a", "t::b"], "001 | Boot | same": ["t::b"]},
    )
    now = {"001 | Boot | new words": ["t::c", "t::b"], "001 | Boot | same": ["t::b"]}
    counts = test_ids.rule_counts(table, NOTHING, now)
    assert [(c.old, c.now_rule, c.now) for c in counts] == [
        (4, "001 | Boot | new words", 2),
        (1, "001 | Boot | same", 1),
    ]


def test_collected_ids_are_counted_per_function():
    output = "tests/a.py::test_x[1]\ntests/a.py::test_x[a b]\ntests/a.py::T::test_y\n\n3 tests collected\n"
    assert test_ids.count_ids(output) == Counter(
        {"tests/a.py::test_x": 2, "tests/a.py::T::test_y": 1}
    )


def test_renamed_test_is_matched_by_its_body():
    old = test_ids.functions_in(
        "def test_a():\n    assert f(1) == 2\ndef test_b():\n    g(x)\n    h(y, z)\n", "o.py"
    )
    new = test_ids.functions_in(
        "def test_c():\n    g(x)\n    h(y, z)\ndef test_d():\n    assert f(1) == 2\n", "n.py"
    )
    assert test_ids.match(old, new, {"o.py": "n.py"}) == {
        "o.py::test_a": "n.py::test_d",
        "o.py::test_b": "n.py::test_c",
    }


def test_test_between_two_followed_tests_is_aligned():
    old = ["o.py::test_1", "o.py::test_2", "o.py::test_3"]
    new = ["n.py::test_a", "n.py::test_b", "n.py::test_c"]
    moved = {old[0]: new[0], old[2]: new[2]}
    assert test_ids.align(moved, old, new) == {**moved, old[1]: new[1]}
    assert test_ids.align(moved, old, [new[0], new[2]]) == moved


def test_chain_of_renames_is_followed_to_a_present_test():
    edges = {"a": ["b", "x"], "b": ["c"], "c": ["d"]}
    assert test_ids.follow(["a", "z"], edges, {"d"}) == {"a": "d"}
