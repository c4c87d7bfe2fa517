"""The reading sample: its items, and the draw by a seed."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter

import pytest

from tools import reading_sample
from tools.reading_sample import SampleItem

SOURCE = '''
"""The module keeps four words here."""

class Missing(HoldfastError):
    """A row that the caller named does not exist."""
    hint = f"create the row first, at most {MAX} bytes"

def find(parser, row):
    """Too short."""
    parser.add_argument("--row", metavar="N", help="the number of the row to print")
    raise Invalid(what="row", found=row, why=f"the row {row} " + "is not a number")
'''


def test_reading_sample_collects_docstrings_help_texts_and_error_messages():
    items = {
        item.text: (item.kind, item.place)
        for item in reading_sample.items_of("src/holdfast/a/b.py", SOURCE)
    }
    assert items == {
        "a.b\nThe module keeps four words here.": ("docstrings", "src/holdfast/a/b.py:1"),
        "a.b: Missing\nA row that the caller named does not exist.": ("docstrings", "src/holdfast/a/b.py:4"),
        "Missing\nhint: create the row first, at most … bytes": ("error messages", "src/holdfast/a/b.py:6"),
        "a.b: --row\nthe number of the row to print": ("help texts", "src/holdfast/a/b.py:10"),
        "Invalid\nwhat: row\nfound: …\nwhy: the row … is not a number": ("error messages", "src/holdfast/a/b.py:11"),
    }  # fmt: skip


def test_reading_sample_takes_only_docstrings_of_files_outside_src():
    assert {item.kind for item in reading_sample.items_of("tests/b.py", SOURCE)} == {"docstrings"}


def test_reading_sample_has_the_rules_of_spec_markers():
    source = "@pytest.mark.spec('002', 'Retry', 'a retry keeps the seq')\ndef test_a(): ...\n"
    assert list(reading_sample.items_of("tests/b.py", source)) == [
        SampleItem("rules", "tests/b.py::test_a", "document 002, Retry\na retry keeps the seq")
    ]


@pytest.mark.parametrize(
    ("expression", "text"),
    [("'a'", "a"), ("f'a {b} c'", "a … c"), ("'a' + b", "a…"), ("b", "…"), ("3", "3")],
)
def test_literal_text_shows_an_ellipsis_for_each_inserted_value(expression, text):
    assert reading_sample.literal_text(ast.parse(expression, mode="eval").body) == text


def test_reading_sample_of_a_seed_is_repeatable_and_has_the_stated_sizes():
    kinds = ("docstrings", "help texts", "error messages", "rules")
    items = [
        SampleItem(kind, f"a.py:{line}", f"text {line}") for kind in kinds for line in range(99)
    ]
    first = reading_sample.draw(items, 7)
    assert first == reading_sample.draw(list(reversed(items)), 7)
    assert first != reading_sample.draw(items, 8)
    assert Counter(item.kind for item in first) == dict(zip(kinds, (40, 20, 20, 20), strict=True))


def test_reading_sample_collects_tracked_files_only(tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(f'"""The docstring of the file {name}."""\n', "utf-8")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "a.py"], cwd=tmp_path, check=True)
    assert [item.place for item in reading_sample.collect(tmp_path)] == ["a.py:1"]


def test_reading_sample_has_the_subjects_of_the_last_commits():
    subjects = reading_sample.commit_subjects(count=2)
    assert len(subjects) == 2
    assert all(item.text and " " not in item.place for item in subjects)


def test_reading_sample_prints_places_only_for_the_second_reader():
    items = [SampleItem("docstrings", "src/a.py:3", "function f\nIt does this.")]
    assert "src/a.py" not in reading_sample.format_items(items, with_places=False)
    assert "1. function f  [src/a.py:3]\n    It does this." in reading_sample.format_items(
        items, with_places=True
    )
