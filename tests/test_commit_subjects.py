"""The rules of commit subjects, in a repository, in a shallow clone and in a tree without git."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tools import commit_subjects

RULES = commit_subjects.load_rules()
SINCE = datetime(2026, 1, 10, tzinfo=UTC)
GIT_ENV = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.org",
}


def git(root: Path, *arguments: str, author_date: str = "2026-01-20T00:00:00Z") -> None:
    dates = {"GIT_AUTHOR_DATE": author_date, "GIT_COMMITTER_DATE": "2026-01-20T00:00:00Z"}
    subprocess.run(
        ["git", *arguments],
        cwd=root,
        check=True,
        capture_output=True,
        env=os.environ | GIT_ENV | dates,
    )


def commit(root: Path, subject: str, author_date: str = "2026-01-20T00:00:00Z") -> None:
    git(root, "commit", "--allow-empty", "-m", subject, author_date=author_date)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "--quiet")
    commit(root, "The old way", "2026-01-01T00:00:00Z")
    commit(root, "Add a lease")
    commit(root, "Drop a row")
    return root


@pytest.mark.parametrize(
    "subject",
    [
        "A lease for worlds",
        "Added a lease",
        "Leases for worlds",
        "add a lease",
        "Add a lease; drop a row",
        "Add a lease.",
        "Wait for whoever has the lease",
        f"Add {'x' * 69}",
    ],
)
def test_subject_that_breaks_one_rule_has_one_breach(subject: str) -> None:
    assert len(RULES.breaches(subject)) == 1


@pytest.mark.parametrize(
    "subject", ["Add a lease", "Rename, split and move the queue", f"Add {'x' * 68}"]
)
def test_plain_subject_has_no_breach(subject: str) -> None:
    assert RULES.breaches(subject) == []


def test_subject_with_an_exception_has_no_breach(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    text = commit_subjects.RULES_FILE.read_text("utf-8")
    path.write_text(f'{text}\n"The old way" = "it was pushed before"\n', "utf-8")
    assert commit_subjects.load_rules(path).breaches("The old way") == []
    path.write_text(f'{text}\n"The old way" = "pushed"\n', "utf-8")
    with pytest.raises(SystemExit, match="needs a reason"):
        commit_subjects.load_rules(path)


def test_history_has_the_commits_since_the_stored_date(repository: Path) -> None:
    history = commit_subjects.read_history(repository, SINCE)
    assert history == commit_subjects.History(["Drop a row", "Add a lease"])


def test_history_of_a_shallow_clone_has_its_commits_and_a_note(
    repository: Path, tmp_path: Path
) -> None:
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{repository}", "clone")
    history = commit_subjects.read_history(tmp_path / "clone", SINCE)
    assert history.subjects == ["Drop a row"]
    assert "shallow clone" in history.note


@pytest.mark.parametrize("place", ["outside", "repository/inside"])
def test_tree_without_its_own_git_history_has_a_note(repository: Path, place: str) -> None:
    tree = repository.parent / place
    tree.mkdir()
    assert commit_subjects.read_history(tree, SINCE) == commit_subjects.History(
        [], "this tree has no git history"
    )
