"""The naming quiz: does a file name lead a new reader to the code of a mechanism?

    python tools/where_quiz.py --questions            print the file names and the numbered questions
    python tools/where_quiz.py --score ANSWERS.json   print the misses and the percentage of hits

The reader sees file names and questions, without the code, the glossary and the answers. The answers are a JSON
object from the number of a question to a list of at most three paths:

    {"1": ["errors.py"], "2": ["config.py", "store/schema.py"]}

A path is below `src/holdfast` or below the root of the repository. A question is a hit when one of its paths is
accepted or lies below an accepted directory. A question without an answer is a miss. `where_quiz.toml` has the
accepted paths. The score passes at 90 percent.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "src/holdfast"
KEY_FILE = ROOT / "tools" / "where_quiz.toml"
PATHS_MAX = 3
PASS_PERCENT = 90


@dataclass(frozen=True)
class Question:
    """A question and its accepted files. An accepted directory ends with a slash."""

    text: str
    accepted: tuple[str, ...]

    def is_hit(self, paths: list[str]) -> bool:
        return any(
            self._accepts(name)
            for path in paths
            for name in (path, f"{PACKAGE}/{path.lstrip('/')}")
        )

    def _accepts(self, name: str) -> bool:
        path = PurePosixPath(name)
        return any(
            path == PurePosixPath(accepted)
            or (accepted.endswith("/") and PurePosixPath(accepted) in path.parents)
            for accepted in self.accepted
        )


def load_questions(path: Path = KEY_FILE) -> list[Question]:
    data = tomllib.loads(path.read_text("utf-8"))
    return [Question(entry["text"], tuple(entry["accepted"])) for entry in data["question"]]


def file_names(root: Path = ROOT) -> list[str]:
    """The package, and the files outside of it that the last questions are about."""
    package = root / PACKAGE
    names = [path.relative_to(package).as_posix() for path in sorted(package.rglob("*.py"))]
    outside = [
        *sorted(root.glob("*.toml")),
        *sorted(root.glob("*.lock")),
        *sorted(root.glob("tests/*.py")),
        *sorted(root.glob("tests/simulation/*.py")),
        *sorted(root.glob("tools/*")),
    ]
    return names + [path.relative_to(root).as_posix() for path in outside if path.is_file()]


def read_answers(path: Path, questions: list[Question]) -> dict[int, list[str]]:
    answers = {int(number): paths for number, paths in json.loads(path.read_text("utf-8")).items()}
    for number, paths in answers.items():
        if not 1 <= number <= len(questions):
            raise SystemExit(f"{path}: there is no question {number}")
        if not isinstance(paths, list) or len(paths) > PATHS_MAX:
            raise SystemExit(f"{path}: question {number} needs a list of at most {PATHS_MAX} paths")
    return answers


def find_misses(questions: list[Question], answers: dict[int, list[str]]) -> list[int]:
    return [
        number
        for number, question in enumerate(questions, start=1)
        if not question.is_hit(answers.get(number, []))
    ]


def print_questions(questions: list[Question]) -> None:
    print("\n".join(file_names()))
    print(f"\nWhere do I change … (at most {PATHS_MAX} paths each)\n")
    for number, question in enumerate(questions, start=1):
        print(f"{number:3}  {question.text}")


def print_score(questions: list[Question], answers: dict[int, list[str]]) -> bool:
    misses = find_misses(questions, answers)
    for number in misses:
        question = questions[number - 1]
        print(f"miss {number}: {question.text}")
        print(f"     answered: {', '.join(answers.get(number, [])) or 'nothing'}")
        print(f"     accepted: {', '.join(question.accepted)}")
    hits = len(questions) - len(misses)
    percent = 100 * hits / len(questions)
    print(f"{hits} of {len(questions)} questions hit: {percent:.1f} %, needed {PASS_PERCENT} %")
    return percent >= PASS_PERCENT


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask and score the naming quiz.")
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--questions", action="store_true", help="print file names and questions")
    task.add_argument("--score", type=Path, metavar="ANSWERS", help="score a file of answers")
    options = parser.parse_args()
    questions = load_questions()
    if options.questions:
        print_questions(questions)
        return 0
    return 0 if print_score(questions, read_answers(options.score, questions)) else 1


if __name__ == "__main__":
    sys.exit(main())
