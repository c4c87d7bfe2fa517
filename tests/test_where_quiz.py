"""The naming quiz: its answer key names existing files, and its score counts hits."""

from __future__ import annotations

import json

import pytest

from tools import where_quiz
from tools.where_quiz import Question

QUESTIONS = where_quiz.load_questions()


def test_quiz_has_the_59_questions_each_once():
    assert len(QUESTIONS) == 59
    assert len({question.text for question in QUESTIONS}) == 59


def test_every_accepted_path_of_the_quiz_exists():
    missing = [
        path
        for question in QUESTIONS
        for path in question.accepted
        if not (where_quiz.ROOT / path).exists()
    ]
    assert missing == []


def test_accepted_directories_of_the_quiz_end_with_a_slash():
    unmarked = [
        path
        for question in QUESTIONS
        for path in question.accepted
        if (where_quiz.ROOT / path).is_dir() != path.endswith("/")
    ]
    assert unmarked == []


def test_every_question_has_an_accepted_path_among_the_printed_names():
    names = where_quiz.file_names()
    hidden = [
        question.text
        for question in QUESTIONS
        if not any(map(question.is_hit, [[n] for n in names]))
    ]
    assert hidden == []


@pytest.mark.parametrize(
    ("path", "hit"),
    [
        ("store/api.py", True),
        ("src/holdfast/store/api.py", True),
        ("runner", True),
        ("runner/loop.py", True),
        ("store/schema.py", False),
        ("store", False),
        ("runner_loop.py", False),
    ],
)
def test_quiz_answer_is_a_hit_below_an_accepted_path(path, hit):
    question = Question("a", ("src/holdfast/store/api.py", "src/holdfast/runner/"))
    assert question.is_hit([path]) is hit


def test_quiz_score_counts_a_missing_answer_as_a_miss():
    questions = [Question("a", ("src/holdfast/a.py",)), Question("b", ("src/holdfast/b.py",))]
    assert where_quiz.find_misses(questions, {1: ["c.py", "a.py"]}) == [2]


def test_quiz_refuses_more_than_three_paths_for_a_question(tmp_path):
    answers = tmp_path / "answers.json"
    answers.write_text(json.dumps({"1": ["a", "b", "c", "d"]}), "utf-8")
    with pytest.raises(SystemExit, match="at most 3 paths"):
        where_quiz.read_answers(answers, QUESTIONS)


def test_quiz_refuses_a_question_number_that_does_not_exist(tmp_path):
    answers = tmp_path / "answers.json"
    answers.write_text(json.dumps({"60": ["a"]}), "utf-8")
    with pytest.raises(SystemExit, match="no question 60"):
        where_quiz.read_answers(answers, QUESTIONS)
