"""The language ratchets: their patterns, their exceptions, and a baseline that may only fall."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from tools import plain_words

RULES = plain_words.load_rules()


def test_twenty_sentences_of_each_kind_are_kept():
    assert len(RULES.caught) >= 20
    assert len(RULES.passed) >= 20


@pytest.mark.parametrize("sentence", RULES.caught)
def test_mannered_sentence_is_caught(sentence):
    assert RULES.hits(sentence)


@pytest.mark.parametrize("sentence", RULES.passed)
def test_plain_sentence_is_not_caught(sentence):
    assert RULES.hits(sentence) == []


@pytest.mark.parametrize("name", RULES.patterns)
def test_every_pattern_catches_a_kept_sentence(name):
    if name == "household":
        assert RULES.patterns[name].search("The desk hands a parcel to the courier")
    else:
        assert any(RULES.patterns[name].search(sentence) for sentence in RULES.caught)


def test_exception_without_a_reason_is_refused(tmp_path):
    rules = tmp_path / "rules.toml"
    text = plain_words.RULES_FILE.read_text("utf-8")
    rules.write_text(text.replace("[allowed.classes]", '[allowed.classes]\nKeys = "no"'), "utf-8")
    with pytest.raises(SystemExit, match="'Keys' of classes needs a reason"):
        plain_words.load_rules(rules)


def test_exception_of_an_unknown_rule_is_refused(tmp_path):
    rules = tmp_path / "rules.toml"
    text = plain_words.RULES_FILE.read_text("utf-8")
    rules.write_text(text.replace("[allowed.classes]", "[allowed.klasses]"), "utf-8")
    with pytest.raises(SystemExit, match="names no rule"):
        plain_words.load_rules(rules)


def test_count_above_its_baseline_is_reported():
    counts = {"phrases": {"a.py": 3, "b.py": 1}}
    assert plain_words.compare(counts, {"phrases": {"a.py": 3}}) == [
        "phrases: b.py: 1, the baseline is 0"
    ]


def test_baseline_falls_and_never_rises():
    baseline = {"phrases": {"a.py": 3, "b.py": 1, "gone.py": 4}}
    counts = {"phrases": {"a.py": 2, "b.py": 5}}
    assert plain_words.lowered(counts, baseline) == {"phrases": {"a.py": 2, "b.py": 1}}


def survey_of(tmp_path: Path, files: dict[str, str]) -> plain_words.Report:
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    return plain_words.survey(tmp_path, RULES)


def test_survey_counts_phrases_by_kind_of_text(tmp_path):
    report = survey_of(
        tmp_path,
        {
            "src/a.py": '"""Nobody."""\n# Somebody\nf(help="so many", why="in vain")\n',
            "tests/test_a.py": "def test_who_waits(): ...\n",
            "README.md": "Nobody.\n\n    Nobody in code.\n",
            "docs/decisions/0001.md": "Nobody.\n",
        },
    )
    assert dict(report.phrases) == {
        "src prose": 2,
        "help texts": 1,
        "error hints": 1,
        "test names": 1,
        "README": 1,
    }


def test_survey_counts_phrases_in_names_of_planted_bugs(tmp_path):
    source = 'BUGS = {"timer: nobody told": 1, "timer: writes no event": 2}\n'
    report = survey_of(
        tmp_path, {"tests/simulation/mutants_a.py": source, "tests/simulation/model.py": source}
    )
    assert dict(report.phrases) == {"planted bugs": 2}


def test_survey_counts_phrases_in_the_rules_of_spec_markers(tmp_path):
    source = '@pytest.mark.spec("001", "who has it", "nobody " "waits")\ndef test_a(): ...\n'
    report = survey_of(tmp_path, {"tests/test_a.py": source})
    assert dict(report.phrases) == {"spec rules": 1}


def test_survey_finds_a_phrase_across_two_comment_lines(tmp_path):
    report = survey_of(tmp_path, {"src/a.py": "# It waits so\n# long.\n"})
    assert dict(report.phrases) == {"src prose": 1}


def test_survey_counts_participle_modules_of_src_and_bench_alone(tmp_path):
    files = ("src/giving.py", "bench/waiting.py", "tests/giving.py", "src/grants.py")
    report = survey_of(tmp_path, dict.fromkeys(files, ""))
    assert report.counts()["participles"] == {"src/giving.py": 1, "bench/waiting.py": 1}


def test_survey_counts_class_names_used_three_times(tmp_path):
    files = {f"src/{name}.py": "class Keys: ...\nclass Other: ...\n" for name in "ab"}
    report = survey_of(tmp_path, {**files, "tests/c.py": "class Keys: ...\n"})
    assert report.counts()["classes"] == {"Keys": 3}


def test_survey_counts_calls_with_eight_positional_arguments(tmp_path):
    report = survey_of(
        tmp_path, {"src/a.py": "f(1, 2, 3, 4, 5, 6, 7)\nf(1, 2, 3, 4, 5, 6, 7, 8)\n"}
    )
    assert report.counts()["positional"] == {"src/a.py": 1}


def test_survey_counts_functions_over_eighty_lines(tmp_path):
    body = "".join(f"    x = {n}\n" for n in range(79))
    source = f"def fits():\n{body}\n\ndef too_long():\n{body}    x = 79\n"
    report = survey_of(tmp_path, {"src/a.py": source})
    assert report.counts()["functions"] == {"src/a.py:too_long": 1}


def test_instance_attributes_are_fields_and_assignments_to_self():
    source = """
class Worker:
    limit: int
    shared: ClassVar[int]
    def __init__(self):
        self.a = self._b = 1
        other.c = 2
"""
    (cls,) = ast.parse(source).body
    assert plain_words.instance_attributes(cls) == {"limit", "a", "_b"}
