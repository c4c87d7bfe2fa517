"""The rules of commit subjects, checked over the commits since a stored date (`make check`).

    python tools/commit_subjects.py            check the commits whose author date is not before the stored date
    python tools/commit_subjects.py TEXT ...   check these texts

A subject has at most 72 characters and starts with an imperative verb. It has no semicolon, no final period and no
mannered phrase of plain_words.toml. commit_subjects.toml has the date, the verbs and the exceptions.

A tree without its own git history, such as an unpacked archive, passes with a note. A shallow clone checks the
commits that it has. Merge commits are not checked.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import plain_words

ROOT = Path(__file__).resolve().parent.parent
RULES_FILE = ROOT / "tools" / "commit_subjects.toml"


@dataclass(frozen=True)
class SubjectRules:
    since: datetime
    length_max: int
    verbs: frozenset[str]
    exceptions: Mapping[str, str]
    phrases: plain_words.Rules

    def breaches(self, subject: str) -> list[str]:
        if subject in self.exceptions:
            return []
        found = []
        if len(subject) > self.length_max:
            found.append(f"{len(subject)} characters, at most {self.length_max}")
        first = subject.split(" ")[0]
        if first.rstrip(",").lower() not in self.verbs or not first[:1].isupper():
            found.append(f"starts with {first!r}, not with a capitalised verb of {RULES_FILE.name}")
        if ";" in subject:
            found.append("has a semicolon: one change, one clause")
        if subject.endswith("."):
            found.append("ends with a period")
        found += [f"has the phrase {hit!r}" for hit in self.phrases.hits(subject)]
        return found


def load_rules(path: Path = RULES_FILE) -> SubjectRules:
    data = tomllib.loads(path.read_text("utf-8"))
    for subject, reason in data["exceptions"].items():
        if len(reason.split()) < 3:
            raise SystemExit(f"{path.name}: the exception {subject!r} needs a reason")
    return SubjectRules(
        since=data["since"],
        length_max=data["length_max"],
        verbs=frozenset(data["verbs"].split()),
        exceptions=data["exceptions"],
        phrases=plain_words.load_rules(),
    )


@dataclass(frozen=True)
class History:
    """The subjects of a checkout since a date, or a note why there are none."""

    subjects: list[str]
    note: str = ""


def read_history(root: Path, since: datetime) -> History:
    try:
        top = _git(root, "rev-parse", "--show-toplevel").strip()
        # An archive that was unpacked inside of another checkout has no history.
        if Path(top).resolve() != root.resolve():
            return History([], "this tree has no git history")
        is_shallow = _git(root, "rev-parse", "--is-shallow-repository").strip() == "true"
        # A rebase changes the date of the committer and keeps the date of the author.
        lines = _git(root, "log", "--no-merges", "--format=%at %s", f"--since={since.isoformat()}")
    except (OSError, subprocess.CalledProcessError):
        return History([], "this tree has no git history")
    subjects = []
    for line in lines.splitlines():
        author_s, _, subject = line.partition(" ")
        if int(author_s) >= since.timestamp():
            subjects.append(subject)
    return History(subjects, "shallow clone, older commits are not checked" if is_shallow else "")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the subjects of the commits.")
    parser.add_argument("subjects", nargs="*", metavar="TEXT", help="check this text as a subject")
    options = parser.parse_args()
    rules = load_rules()
    history = History(options.subjects) if options.subjects else read_history(ROOT, rules.since)
    breaches = [
        f"{subject}: {breach}" for subject in history.subjects for breach in rules.breaches(subject)
    ]
    note = f" ({history.note})" if history.note else ""
    print(f"{len(history.subjects)} commit subjects checked{note}")
    for line in breaches:
        print(line, file=sys.stderr)
    if breaches:
        print(
            f"Amend the commit. If it is shared, add the verb or an exception to {RULES_FILE.name}.",
            file=sys.stderr,
        )
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
