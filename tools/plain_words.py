"""The language ratchets: counts of names, shapes and phrases that may only fall.

    python tools/plain_words.py            print every count, per rule and per kind of text
    python tools/plain_words.py --check    fail when a count is above its baseline (`make check`)
    python tools/plain_words.py --update   lower the baseline to the present counts
    python tools/plain_words.py --list RULE [PATH]    print the findings of one rule

The rules:

    phrases       mannered phrases per file: docstrings, comments, help texts, error hints, test names, pages,
                  the rules of `spec` markers, and the names of the simulator's planted bugs
    participles   modules of `src` and `bench` named by a participle
    classes       class names that are defined more than twice in the tree
    positional    calls with more than seven positional arguments
    functions     functions of more than 80 lines
    attributes    classes with more than 20 instance attributes
    replacements  behaviour of Holdfast that a test replaces: only its exceptions, `tests/tidy_rules.py` finds the places

Patterns and exceptions are in plain_words.toml, the baseline is in plain_words_baseline.json. An exception
needs a reason. `--update` refuses to raise a count: edit the text instead.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RULES_FILE = ROOT / "tools" / "plain_words.toml"
BASELINE_FILE = ROOT / "tools" / "plain_words_baseline.json"

POSITIONAL_MAX = 7
FUNCTION_LINES_MAX = 80
ATTRIBUTES_MAX = 20
CLASS_NAME_USES_MAX = 2
HELP_KEYWORDS = frozenset({"help", "description", "epilog"})
HINT_KEYWORDS = frozenset({"hint", "why"})
# The tables of planted bugs: their keys are the names.
PLANTED_BUGS = "tests/simulation/mutants"
# The third argument of this marker is a rule of a source document.
SPEC_MARKER = "pytest.mark.spec"
SPEC_MARKER_ARGS = 3
# The nodes of a syntax tree that can have prose.
TEXT_NODES = (
    ast.Module,
    ast.ClassDef,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.Call,
    ast.Dict,
)
# A decision page is never edited after it is accepted.
FROZEN = ("docs/decisions/",)
RULES = (
    "phrases",
    "participles",
    "classes",
    "positional",
    "functions",
    "attributes",
    "replacements",
)


@dataclass(frozen=True)
class Finding:
    """One place that counts against a rule. `key` is the unit of the baseline."""

    rule: str
    key: str
    line: int
    text: str


@dataclass(frozen=True)
class Text:
    """A piece of prose: a docstring, a comment, a help text, a hint, a test name, a rule or a paragraph."""

    kind: str
    path: str
    line: int
    words: str


@dataclass
class Rules:
    patterns: dict[str, re.Pattern[str]]
    allowed: dict[str, dict[str, str]]
    caught: list[str]
    passed: list[str]

    def hits(self, words: str) -> list[str]:
        return [
            hit.group(0) for pattern in self.patterns.values() for hit in pattern.finditer(words)
        ]


@dataclass
class Report:
    findings: list[Finding] = field(default_factory=list)
    words: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    phrases: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def counts(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {rule: {} for rule in RULES}
        for finding in self.findings:
            of_rule = found[finding.rule]
            of_rule[finding.key] = of_rule.get(finding.key, 0) + 1
        return found


def load_rules(path: Path = RULES_FILE) -> Rules:
    data = tomllib.loads(path.read_text("utf-8"))
    for rule, entries in data["allowed"].items():
        if rule not in RULES:
            raise SystemExit(
                f"{path.name}: [allowed.{rule}] names no rule; rules: {', '.join(RULES)}"
            )
        for key, reason in entries.items():
            if not isinstance(reason, str) or len(reason.split()) < 3:
                raise SystemExit(f"{path.name}: the exception {key!r} of {rule} needs a reason")
    return Rules(
        patterns={name: re.compile(text, re.IGNORECASE) for name, text in data["patterns"].items()},
        allowed=data["allowed"],
        caught=data["sentences"]["caught"],
        passed=data["sentences"]["passed"],
    )


def tracked(root: Path) -> list[str]:
    """Files of the checkout, also new ones that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    return sorted(
        name for name in set(listed.stdout.split("\n")) if name and (root / name).is_file()
    )


def survey(root: Path, rules: Rules) -> Report:
    report = Report()
    definitions: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for name in tracked(root):
        if name.endswith(".py"):
            source = (root / name).read_text("utf-8")
            tree = ast.parse(source)
            nodes = list(ast.walk(tree))
            report.findings += shape_findings(name, tree)
            for node in nodes:
                if isinstance(node, ast.ClassDef):
                    definitions[node.name].append((name, node.lineno))
            texts = list(python_texts(name, source, nodes))
        elif name.endswith(".md") and not name.startswith(FROZEN):
            texts = list(page_texts(name, (root / name).read_text("utf-8")))
        else:
            continue
        for text in texts:
            report.words[text.kind] += len(text.words.split())
            for hit in rules.hits(text.words):
                report.phrases[text.kind] += 1
                report.findings.append(Finding("phrases", text.path, text.line, hit))
    for name, places in definitions.items():
        if len(places) > CLASS_NAME_USES_MAX:
            report.findings += [Finding("classes", name, line, path) for path, line in places]
    report.findings = [
        finding
        for finding in report.findings
        if finding.key not in rules.allowed.get(finding.rule, {})
    ]
    return report


def shape_findings(path: str, tree: ast.Module) -> Iterator[Finding]:
    stem = Path(path).stem
    if path.startswith(("src/", "bench/")) and re.fullmatch(r"\w*ing", stem):
        yield Finding("participles", path, 1, stem)
    yield from _shapes_below(path, tree, "")


def _shapes_below(path: str, node: ast.AST, prefix: str) -> Iterator[Finding]:
    for child in ast.iter_child_nodes(node):
        name = f"{prefix}{getattr(child, 'name', '')}"
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (child.end_lineno or child.lineno) - child.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield Finding("functions", f"{path}:{name}", child.lineno, f"{lines} lines")
            yield from _shapes_below(path, child, f"{name}.")
        elif isinstance(child, ast.ClassDef):
            attributes = instance_attributes(child)
            if len(attributes) > ATTRIBUTES_MAX:
                count = f"{len(attributes)} attributes"
                yield Finding("attributes", f"{path}:{name}", child.lineno, count)
            yield from _shapes_below(path, child, f"{name}.")
        else:
            if (
                isinstance(child, ast.Call)
                and len(child.args) > POSITIONAL_MAX
                and not any(isinstance(argument, ast.Starred) for argument in child.args)
            ):
                yield Finding("positional", path, child.lineno, ast.unparse(child.func))
            yield from _shapes_below(path, child, prefix)


def instance_attributes(cls: ast.ClassDef) -> set[str]:
    """Fields declared in the class body and attributes that its methods assign to `self`."""
    found: set[str] = set()
    for statement in cls.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if "ClassVar" not in ast.unparse(statement.annotation):
                found.add(statement.target.id)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(statement):
                if (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.ctx, ast.Store)
                    and isinstance(node.value, ast.Name)
                    and node.value.id == "self"
                ):
                    found.add(node.attr)
    return found


def python_texts(path: str, source: str, nodes: Iterable[ast.AST]) -> Iterator[Text]:
    """Return the prose of a module. `nodes` are all nodes of its syntax tree."""
    area = path.split("/")[0]
    for node in nodes:
        if not isinstance(node, TEXT_NODES):
            continue
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if words := ast.get_docstring(node):
                yield Text(f"{area} prose", path, getattr(node, "lineno", 1), words)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
            "test_"
        ):
            yield Text("test names", path, node.lineno, node.name[5:].replace("_", " "))
        if (
            isinstance(node, ast.Call)
            and len(node.args) == SPEC_MARKER_ARGS
            # Unparsing is slow, so only calls that may be the marker are unparsed.
            and getattr(node.func, "attr", "") == SPEC_MARKER.rpartition(".")[2]
            and ast.unparse(node.func) == SPEC_MARKER
        ):
            yield Text("spec rules", path, node.lineno, literal_text(node.args[-1]))
        if isinstance(node, ast.Call) and area == "src":
            for keyword in node.keywords:
                kind = {
                    **dict.fromkeys(HELP_KEYWORDS, "help texts"),
                    **dict.fromkeys(HINT_KEYWORDS, "error hints"),
                }.get(keyword.arg or "")
                if kind and (words := literal_text(keyword.value)):
                    yield Text(kind, path, keyword.value.lineno, words)
        if isinstance(node, ast.Dict) and path.startswith(PLANTED_BUGS):
            for key in node.keys:
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield Text("planted bugs", path, key.lineno, key.value)
    yield from comment_texts(f"{area} prose", path, source)


def literal_text(node: ast.expr) -> str:
    """The constant parts of a string expression."""
    parts = [
        n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]
    return " ".join(parts)


def comment_texts(kind: str, path: str, source: str) -> Iterator[Text]:
    """Comments; lines of one block are one text, so that a phrase is found across a line break."""
    block: list[str] = []
    first = last = 0
    if "#" not in source:
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if block and line != last + 1:
            yield Text(kind, path, first, " ".join(block))
            block = []
        if not block:
            first = line
        block.append(token.string.lstrip("#:! "))
        last = line
    if block:
        yield Text(kind, path, first, " ".join(block))


def page_texts(path: str, source: str) -> Iterator[Text]:
    """Paragraphs of a Markdown page without code. Of the changelog, only the unreleased part."""
    kind = "README" if path == "README.md" else "pages"
    fenced = False
    block: list[str] = []
    first = 1
    for number, line in enumerate([*source.split("\n"), ""], start=1):
        if path == "CHANGELOG.md" and re.match(r"## (?!.*[Uu]nreleased)", line):
            break
        if line.lstrip().startswith("```"):
            fenced = not fenced
            line = ""
        if fenced or line.startswith("    "):
            line = ""
        if line.strip():
            if not block:
                first = number
            block.append(re.sub(r"`[^`]*`", "`", line))
        elif block:
            yield Text(kind, path, first, " ".join(block))
            block = []


def compare(counts: dict[str, dict[str, int]], baseline: dict[str, dict[str, int]]) -> list[str]:
    """Lines that say which count is above its baseline."""
    risen = []
    for rule, of_rule in counts.items():
        for key, count in sorted(of_rule.items()):
            allowed = baseline.get(rule, {}).get(key, 0)
            if count > allowed:
                risen.append(f"{rule}: {key}: {count}, the baseline is {allowed}")
    return risen


def lowered(
    counts: dict[str, dict[str, int]], baseline: dict[str, dict[str, int]]
) -> dict[str, dict[str, int]]:
    """The baseline with every count that fell. It never rises."""
    return {
        rule: {
            key: min(count, counts.get(rule, {}).get(key, 0))
            for key, count in sorted(of_rule.items())
            if counts.get(rule, {}).get(key, 0)
        }
        for rule, of_rule in baseline.items()
    }


def print_summary(report: Report, rules: Rules) -> None:
    counts = report.counts()
    for kind in sorted(report.words):
        words, hits = report.words[kind], report.phrases[kind]
        print(
            f"{kind:18} {words:8} words {hits:6} phrases {1000 * hits / max(words, 1):6.1f} per 1,000"
        )
    for rule in RULES:
        total, exceptions = sum(counts[rule].values()), len(rules.allowed.get(rule, {}))
        print(f"{rule:18} {total:5} in {len(counts[rule]):4} places, {exceptions} exceptions")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Count names, shapes and phrases that may only fall."
    )
    parser.add_argument(
        "--check", action="store_true", help="fail when a count is above its baseline"
    )
    parser.add_argument(
        "--update", action="store_true", help="lower the baseline to the present counts"
    )
    parser.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--list", nargs="+", metavar=("RULE", "PATH"), help="print the findings of a rule"
    )
    options = parser.parse_args()
    rules = load_rules()
    report = survey(ROOT, rules)
    if options.list:
        rule, *paths = options.list
        for finding in report.findings:
            if finding.rule == rule and (not paths or finding.key.startswith(paths[0])):
                print(f"{finding.key}:{finding.line}: {finding.text}")
        return 0
    print_summary(report, rules)
    counts = report.counts()
    if options.first:
        write_baseline(counts)
        return 0
    baseline = json.loads(BASELINE_FILE.read_text("utf-8"))
    if options.update:
        write_baseline(lowered(counts, baseline))
    risen = compare(counts, baseline)
    for line in risen:
        print(line, file=sys.stderr)
    if risen:
        print(
            "`python tools/plain_words.py --list RULE PATH` shows each place. Use the field's term and name the component.",
            file=sys.stderr,
        )
    return 1 if risen and (options.check or options.update) else 0


def write_baseline(counts: dict[str, dict[str, int]]) -> None:
    BASELINE_FILE.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
