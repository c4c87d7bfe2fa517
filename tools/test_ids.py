"""Test ids of an old commit and the tests that guard the same facts now.

    python tools/test_ids.py                    print what moved, per file, and the rules with fewer tests
    python tools/test_ids.py --check            fail when an old test has no present test and no reason
    python tools/test_ids.py --update COMMIT    follow the tests that were renamed since COMMIT
    python tools/test_ids.py --build OLD_IDS NEW_IDS    write the table from two outputs of `pytest --collect-only -q`

The table `tests/data/test_ids_621eb86.json.gz` has every test function that commit 621eb86 collected, the number of
its parameter sets, the test that replaces it, and the tests of each rule of a source document. `--check` reads the
table and the test sources, and collects nothing. Decisions by hand are in `tests/data/test_ids_621eb86.toml`:
`[merged]` names the present test of an old one, `[removed]` the reason why a test or a rule has none or fewer.

Git detects renamed files. A renamed test is found commit by commit: the function that a commit removes and the most
similar one that it adds, by the tokens of their normalised syntax trees. A test without a similar one is paired with
the test at its place between two followed tests of its file.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.traceability import BadMarker, rules_of

ROOT = Path(__file__).resolve().parent.parent
COMMIT = "621eb86"
TABLE = ROOT / "tests" / "data" / f"test_ids_{COMMIT}.json.gz"
DECISIONS = TABLE.with_name(f"test_ids_{COMMIT}.toml")

# The least similarity of a renamed test: in its file or a renamed file, and in any other file.
SIMILAR_IN_FILE = 0.45
SIMILAR_ELSEWHERE = 0.6
# The longest search through the renames of one test.
FOLLOWED_MAX = 200

NodeId = str


@dataclass
class Table:
    """`tests` has the number of collected ids per old test, `moved` the present test where it differs, `now` the
    number of collected ids of present tests with a rule if it is not 1, and `rules` the old tests of each rule."""

    tests: dict[NodeId, int] = field(default_factory=dict)
    moved: dict[NodeId, NodeId] = field(default_factory=dict)
    now: dict[NodeId, int] = field(default_factory=dict)
    rules: dict[str, list[NodeId]] = field(default_factory=dict)


@dataclass
class Decisions:
    merged: dict[NodeId, NodeId]
    removed: dict[str, str]


def load_table(path: Path = TABLE) -> Table:
    return Table(**json.loads(gzip.decompress(path.read_bytes())))


def save_table(table: Table, path: Path = TABLE) -> None:
    data = json.dumps(table.__dict__, separators=(",", ":")).encode()
    # No time in the header: equal tables have equal bytes.
    path.write_bytes(gzip.compress(data, 9, mtime=0))


def load_decisions(path: Path = DECISIONS) -> Decisions:
    data = tomllib.loads(path.read_text("utf-8")) if path.exists() else {}
    for test, reason in data.get("removed", {}).items():
        if len(reason.split()) < 3:
            raise SystemExit(f"{path.name}: {test} needs a reason")
    return Decisions(data.get("merged", {}), data.get("removed", {}))


# -- the present tests, without collecting them ----------------------------------------------------


def is_present(test: NodeId, root: Path = ROOT) -> bool:
    """Whether the file of a test defines or imports its function."""
    path, *parts = test.split("::")
    # The test of a hypothesis state machine is `Name = Machine.TestCase`.
    name = parts[0] if parts[-1] == "runTest" else parts[-1]
    return name in _names_in(root / path)


@cache
def _names_in(path: Path) -> frozenset[str]:
    if not path.is_file():
        return frozenset()
    source = path.read_text("utf-8")
    defined = re.findall(r"^\s*(?:async )?def (test\w*)\(", source, re.MULTILINE)
    machines = re.findall(r"^(\w+)(?:: .+)? = \w+\.TestCase$", source, re.MULTILINE)
    imports = re.findall(r"^from .+ import (?:\([^)]*\)|.+)$", source, re.MULTILINE)
    imported = re.findall(r"\btest_\w+", " ".join(imports))
    return frozenset([*defined, *machines, *imported])


def present_test(test: NodeId, table: Table, decisions: Decisions) -> NodeId:
    return decisions.merged.get(test) or table.moved.get(test, test)


def lost_tests(table: Table, decisions: Decisions, root: Path = ROOT) -> list[str]:
    """Old tests without a present test and without a reason, and decisions that are not needed."""
    lost = []
    for test in table.tests:
        target = present_test(test, table, decisions)
        if test in decisions.removed:
            if test in decisions.merged:
                lost.append(f"{test}: both merged and removed")
        elif not is_present(target, root):
            shown = test if test == target else f"{test}, later {target}"
            lost.append(f"{shown}: no such test now")
    known = table.tests.keys() | table.rules.keys()
    lost += [
        f"{name}: unknown" for name in (*decisions.merged, *decisions.removed) if name not in known
    ]
    return lost


# -- rules of the source documents -------------------------------------------------------------------


@dataclass(frozen=True)
class RuleCount:
    """The collected tests of an old rule, and of the present rule that most of these tests name."""

    rule: str
    old: int
    now_rule: str
    now: int


def rule_counts(
    table: Table, decisions: Decisions, rules_now: dict[str, list[NodeId]]
) -> list[RuleCount]:
    by_test: dict[NodeId, list[str]] = defaultdict(list)
    for rule, tests in rules_now.items():
        for test in tests:
            by_test[test].append(rule)
    counts = []
    for rule, tests in table.rules.items():
        old = sum(table.tests.get(test, 1) for test in tests)
        now_rule = rule
        if rule not in rules_now:
            targets = [present_test(test, table, decisions) for test in tests]
            document = rule.split(" | ")[0]
            votes = Counter(
                name
                for target in targets
                for name in by_test[target]
                if name.startswith(f"{document} | ")
            )
            now_rule = max(votes, key=lambda name: (votes[name], -len(name)), default="")
        now = sum(table.now.get(test, 1) for test in rules_now.get(now_rule, ()))
        counts.append(RuleCount(rule, old, now_rule, now))
    return counts


def rules_in(sources: Iterable[tuple[str, str]]) -> dict[str, list[NodeId]]:
    found: dict[str, list[NodeId]] = defaultdict(list)
    for path, source in sources:
        if "mark.spec" not in source:
            continue
        try:
            for rule in rules_of(source, path):
                found[f"{rule.document} | {rule.section} | {rule.text}"].append(rule.test)
        except BadMarker:
            continue
    return dict(found)


def present_sources(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    for path in sorted((root / "tests").rglob("test_*.py")):
        yield path.relative_to(root).as_posix(), path.read_text("utf-8")


def fewer_rules(table: Table, decisions: Decisions, root: Path = ROOT) -> list[RuleCount]:
    counts = rule_counts(table, decisions, rules_in(present_sources(root)))
    return [
        count for count in counts if count.now < count.old and count.rule not in decisions.removed
    ]


# -- following renames through the history -----------------------------------------------------------


def git(*arguments: str, root: Path = ROOT) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout


def show(commit: str, path: str, root: Path = ROOT) -> str:
    done = subprocess.run(
        ["git", "show", f"{commit}:{path}"], cwd=root, capture_output=True, text=True
    )
    return done.stdout if done.returncode == 0 else ""


def functions_in(source: str, path: str) -> dict[NodeId, Counter[str]]:
    """The tokens of each test function. Names of the function and its docstring do not count."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return {}
    return dict(_functions_below(tree, path))


def _functions_below(node: ast.AST, prefix: str) -> Iterator[tuple[NodeId, Counter[str]]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions_below(child, f"{prefix}::{child.name}")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if child.name.startswith("test"):
                yield f"{prefix}::{child.name}", _tokens(child)


def _tokens(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Counter[str]:
    body = function.body[ast.get_docstring(function) is not None :]
    nodes = [*body, function.args, *function.decorator_list]
    words = [*function.name.split("_"), *re.findall(r"\w+", " ".join(map(ast.unparse, nodes)))]
    return Counter(words)


def similarity(a: Counter[str], b: Counter[str]) -> float:
    common = (a & b).total()
    return 2 * common / max(a.total() + b.total(), 1)


def renames_between(old: str, new: str, root: Path = ROOT) -> dict[NodeId, NodeId]:
    """The tests that the change from one commit to another removes, and the similar tests that it adds."""
    diff = git(
        "diff", "--name-status", "-M30%", "-l0", old, *filter(None, [new]), "--", "tests", root=root
    )
    removed: dict[NodeId, Counter[str]] = {}
    added: dict[NodeId, Counter[str]] = {}
    renamed_files: dict[str, str] = {}
    for line in diff.splitlines():
        status, *paths = line.split("\t")
        if not paths[-1].endswith(".py"):
            continue
        before, after = paths[0], paths[-1]
        old_ids = {} if status == "A" else functions_in(show(old, before, root), before)
        new_source = "" if status == "D" else _source_of(new, after, root)
        new_ids = functions_in(new_source, after)
        renamed_files[before] = after
        removed |= {test: tokens for test, tokens in old_ids.items() if test not in new_ids}
        added |= {test: tokens for test, tokens in new_ids.items() if test not in old_ids}
    return match(removed, added, renamed_files)


def _source_of(commit: str, path: str, root: Path) -> str:
    if commit:
        return show(commit, path, root)
    return (root / path).read_text("utf-8") if (root / path).is_file() else ""


def match(
    removed: dict[NodeId, Counter[str]],
    added: dict[NodeId, Counter[str]],
    renamed_files: dict[str, str],
) -> dict[NodeId, NodeId]:
    """Pair removed tests with added tests, the most similar pairs first. Then several removed tests may share one."""
    pairs = []
    for old, tokens in removed.items():
        path, *_, name = old.split("::")
        for new, other in added.items():
            near = new.split("::")[0] in (path, renamed_files.get(path))
            score = similarity(tokens, other)
            score += 0.5 * (name == new.split("::")[-1])
            if score >= (SIMILAR_IN_FILE if near else SIMILAR_ELSEWHERE):
                pairs.append((score + 0.05 * near, old, new))
    pairs.sort(reverse=True)
    found: dict[NodeId, NodeId] = {}
    used: set[NodeId] = set()
    for _, old, new in pairs:
        if old not in found and new not in used:
            found[old] = new
            used.add(new)
    for _, old, new in pairs:
        found.setdefault(old, new)
    return found


def follow(
    tests: Iterable[NodeId], edges: dict[NodeId, list[NodeId]], present: set[NodeId]
) -> dict[NodeId, NodeId]:
    """The present test at the end of each chain of renames."""
    found = {}
    for test in tests:
        seen, ahead = {test}, [test]
        while ahead and test not in found:
            at = ahead.pop(0)
            if at in present:
                found[test] = at
            for following in edges.get(at, ()):
                if following not in seen and len(seen) < FOLLOWED_MAX:
                    seen.add(following)
                    ahead.append(following)
    return found


def align(
    moved: dict[NodeId, NodeId], old: Iterable[NodeId], now: Iterable[NodeId]
) -> dict[NodeId, NodeId]:
    """Add the old tests that are between two followed tests of their file, if as many new tests are between the
    targets. Both sequences have the order of the sources."""
    found = dict(moved)
    old_files, new_files = _by_file(old), _by_file(now)
    for tests in old_files.values():
        targets = [found.get(test) for test in tests]
        files = Counter(target.split("::")[0] for target in targets if target)
        if not files:
            continue
        news = new_files[files.most_common(1)[0][0]]
        place = {test: at for at, test in enumerate(news)}
        taken = set(found.values())
        gap: list[NodeId] = []
        last = -1
        for test, target in [*zip(tests, targets, strict=True), ("", None)]:
            if test and target is None:
                gap.append(test)
                continue
            at = place.get(target or "", len(news) if not test else -1)
            if at < 0:
                continue
            free = [new for new in news[last + 1 : at] if new not in taken]
            if gap and len(free) == len(gap):
                found.update(zip(gap, free, strict=True))
            gap, last = [], max(at, last)
    return found


def _by_file(tests: Iterable[NodeId]) -> dict[str, list[NodeId]]:
    found: dict[str, list[NodeId]] = defaultdict(list)
    for test in tests:
        found[test.split("::")[0]].append(test)
    return found


def follow_imported(
    moved: dict[NodeId, NodeId], old: Iterable[NodeId], now: Iterable[NodeId]
) -> dict[NodeId, NodeId]:
    """Add the old tests that a file imports from another one, by the new name of the imported test."""
    found = dict(moved)
    new_names: dict[str, str] = {}
    for test, target in moved.items():
        new_names.setdefault(test.split("::")[-1], target.split("::")[-1])
    present = defaultdict(list)
    for test in now:
        present[test.split("::")[-1]].append(test)
    for test in old:
        directory = str(Path(test.split("::")[0]).parent)
        name = new_names.get(test.split("::")[-1], "")
        near = [
            target
            for target in present[name]
            if str(Path(target.split("::")[0]).parent) == directory
        ]
        if test not in found and len(near) == 1:
            found[test] = near[0]
    return found


def history_edges(old: str, new: str, root: Path = ROOT) -> dict[NodeId, list[NodeId]]:
    edges: dict[NodeId, list[NodeId]] = defaultdict(list)
    commits = git(
        "rev-list", "--no-merges", "--topo-order", f"{old}..{new}", "--", "tests", root=root
    ).split()
    for commit in commits:
        for before, after in renames_between(f"{commit}^", commit, root).items():
            edges[before].append(after)
    return edges


# -- building and printing the table -----------------------------------------------------------------


def count_ids(output: str) -> Counter[NodeId]:
    """The number of collected ids per test function in the output of `pytest --collect-only -q`."""
    return Counter(
        line.partition("[")[0] for line in output.splitlines() if re.match(r"tests/\S+\.py::", line)
    )


def build(old_ids: Path, new_ids: Path) -> Table:
    old, now = count_ids(old_ids.read_text("utf-8")), count_ids(new_ids.read_text("utf-8"))
    missing = [test for test in old if test not in now]
    present = set(now)
    moved = follow(missing, history_edges(COMMIT, "HEAD"), present)
    direct = renames_between(COMMIT, "HEAD")
    for test in missing:
        if test not in moved and direct.get(test) in present:
            moved[test] = direct[test]
    staying = {test: test for test in old if test in present}
    moved = align(follow_imported(staying | moved, old, now), old, now)
    moved = {test: target for test, target in moved.items() if test != target}
    paths = git("ls-tree", "-r", "--name-only", COMMIT, "tests").splitlines()
    old_sources = (
        (path, show(COMMIT, path)) for path in paths if Path(path).name.startswith("test_")
    )
    with_rule = {test for tests in rules_in(present_sources()).values() for test in tests}
    counts = {test: count for test, count in now.items() if count > 1 and test in with_rule}
    return Table(dict(old), moved, counts, rules_in(old_sources))


def update(table: Table, decisions: Decisions, commit: str) -> int:
    """Follow the targets that no longer exist from a commit to the working tree. Return their number."""
    edges = renames_between(commit, "")
    followed = 0
    for test in table.tests:
        target = present_test(test, table, decisions)
        if not is_present(target) and (later := edges.get(target)) and is_present(later):
            table.moved[test] = later
            followed += 1
    table.now = {
        test if is_present(test) else edges.get(test, test): count
        for test, count in table.now.items()
    }
    return followed


def print_table(table: Table, decisions: Decisions) -> None:
    moves: Counter[tuple[str, str]] = Counter()
    for test in table.tests:
        target = "(removed)" if test in decisions.removed else present_test(test, table, decisions)
        if target != test:
            moves[test.split("::")[0], target.split("::")[0]] += 1
    for (before, after), count in sorted(moves.items()):
        print(f"{count:5}  {before} -> {'renamed in the file' if before == after else after}")
    same = len(table.tests) - moves.total()
    print(
        f"{len(table.tests)} test functions of {COMMIT}, {sum(table.tests.values())} collected ids"
    )
    print(
        f"{same} have the same id, {moves.total() - len(decisions.removed.keys() & table.tests.keys())} moved"
    )
    print(
        f"{len(decisions.merged)} by hand, {len(decisions.removed.keys() & table.tests.keys())} removed with a reason"
    )
    counts = rule_counts(table, decisions, rules_in(present_sources()))
    print(f"{len(counts)} rules, {sum(count.old for count in counts)} tests then")
    for count in counts:
        if count.now < count.old:
            reason = decisions.removed.get(count.rule, "no reason")
            print(
                f"  {count.old} -> {count.now}  {count.rule}  [{count.now_rule or 'no rule now'}]: {reason}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Compare the test ids of an old commit with the present tests."
    )
    parser.add_argument("--check", action="store_true", help="fail when an old test is lost")
    parser.add_argument(
        "--update", metavar="COMMIT", help="follow the tests that were renamed since COMMIT"
    )
    parser.add_argument(
        "--build", nargs=2, type=Path, metavar=("OLD_IDS", "NEW_IDS"), help="write the table"
    )
    options = parser.parse_args()
    decisions = load_decisions()
    if options.build:
        save_table(build(*options.build))
    table = load_table()
    if options.update:
        print(f"{update(table, decisions, options.update)} tests followed")
        save_table(table)
    lost = lost_tests(table, decisions)
    lost += [
        f"{count.rule}: {count.now} tests, then {count.old}"
        for count in fewer_rules(table, decisions)
    ]
    if not options.check:
        print_table(table, decisions)
    for line in lost:
        print(line, file=sys.stderr)
    if lost:
        print(
            f"{len(lost)} lost; `--update COMMIT`, or a decision in {DECISIONS.relative_to(ROOT)}",
            file=sys.stderr,
        )
    return 1 if lost and (options.check or options.update) else 0


if __name__ == "__main__":
    sys.exit(main())
