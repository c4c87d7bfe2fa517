"""The reading sample: prose of the whole tree, drawn with a seed, for a reader without the code.

    python tools/reading_sample.py --seed N                  print the numbered items, without code
    python tools/reading_sample.py --seed N --with-places    also print file and line of each item

The sample has 40 docstrings, 20 help texts, 20 error messages, 20 rules of `spec` markers and the last 30 commit
subjects. A first reader paraphrases each item. A second reader sees the code (`--with-places`) and judges: an item needs a second reading when
its paraphrase misses what the code does. At most two of the items may need one.

A docstring is printed with the module and the name that it describes, a help text with its command and option, an
error message with its class and fields, and a rule with its document and section. An inserted value is printed as `…`.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.traceability import BadMarker, rules_of

ROOT = Path(__file__).resolve().parent.parent
DOCSTRINGS, HELP_TEXTS, ERRORS, RULES, COMMITS = 40, 20, 20, 20, 30
HELP_KEYWORDS = frozenset({"help", "description", "epilog"})
# A class attribute or an argument of an error that explains it.
ERROR_KEYWORDS = frozenset({"why", "hint"})
SHORTEST_WORDS = 4


class SampleItem(NamedTuple):
    """One piece of prose with its place. A commit has its short hash as the place."""

    kind: str
    place: str
    text: str


def collect(root: Path = ROOT) -> list[SampleItem]:
    """Every docstring, help text, error message and rule of the tracked Python files."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True, check=True
    )
    items: list[SampleItem] = []
    for name in sorted(listed.stdout.split()):
        if (root / name).is_file():
            items += items_of(name, (root / name).read_text("utf-8"))
    return items


def items_of(name: str, source: str) -> Iterator[SampleItem]:
    tree = ast.parse(source)
    yield from _docstrings(name, tree, [module_name(name)])
    if name.startswith("tests/"):
        yield from _rules(name, source)
    if not name.startswith("src/"):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from _class_hint(name, node)
        elif isinstance(node, ast.Call):
            yield from _help_text(name, node)
            yield from _error(name, node)


def module_name(name: str) -> str:
    """The name by which code imports a file: `store.engine` for `src/holdfast/store/engine.py`."""
    path = name.removeprefix("src/holdfast/").removesuffix(".py").removesuffix("/__init__")
    return path.replace("/", ".")


def _docstrings(name: str, node: ast.AST, names: list[str]) -> Iterator[SampleItem]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text and len(text.split()) >= SHORTEST_WORDS:
            line = 1 if isinstance(node, ast.Module) else node.lineno
            described = ": ".join(part for part in (names[0], ".".join(names[1:])) if part)
            yield SampleItem("docstrings", f"{name}:{line}", f"{described}\n{text}")
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(name, child, [*names, child.name])
        else:
            yield from _docstrings(name, child, names)


def _rules(name: str, source: str) -> Iterator[SampleItem]:
    if "mark.spec" not in source:
        return
    try:
        for rule in rules_of(source, name):
            yield SampleItem(
                "rules", rule.test, f"document {rule.document}, {rule.section}\n{rule.text}"
            )
    except BadMarker:
        return


def _class_hint(name: str, node: ast.ClassDef) -> Iterator[SampleItem]:
    for statement in node.body:
        if isinstance(statement, ast.Assign) and _names(statement.targets) == ["hint"]:
            text = f"{node.name}\nhint: {literal_text(statement.value)}"
            yield SampleItem("error messages", f"{name}:{statement.lineno}", text)


def _help_text(name: str, node: ast.Call) -> Iterator[SampleItem]:
    for keyword in node.keywords:
        if keyword.arg in HELP_KEYWORDS and (text := literal_text(keyword.value)):
            option = literal_text(node.args[0]) if node.args else ""
            if option == "…":
                option = ""
            if len(text.split()) >= SHORTEST_WORDS:
                place = f"{name}:{keyword.value.lineno}"
                yield SampleItem("help texts", place, f"{module_name(name)}: {option}\n{text}")


def _error(name: str, node: ast.Call) -> Iterator[SampleItem]:
    fields = {keyword.arg: literal_text(keyword.value) for keyword in node.keywords if keyword.arg}
    reasons = [fields[word] for word in ERROR_KEYWORDS if word in fields]
    if any(len(text.split()) >= SHORTEST_WORDS for text in reasons):
        error = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        lines = [error, *(f"{field}: {text}" for field, text in fields.items())]
        yield SampleItem("error messages", f"{name}:{node.lineno}", "\n".join(lines))


def _names(targets: list[ast.expr]) -> list[str]:
    return [target.id for target in targets if isinstance(target, ast.Name)]


def literal_text(node: ast.expr) -> str:
    """A string expression as text, with `…` for each inserted value."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "…"
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return literal_text(node.left) + literal_text(node.right)
    return "…"


def draw(items: list[SampleItem], seed: int) -> list[SampleItem]:
    """The sample of one seed. An item of each kind has the same chance."""
    chance = random.Random(seed)
    drawn: list[SampleItem] = []
    for kind, count in (
        ("docstrings", DOCSTRINGS),
        ("help texts", HELP_TEXTS),
        ("error messages", ERRORS),
        ("rules", RULES),
    ):
        of_kind = sorted(item for item in items if item.kind == kind)
        drawn += chance.sample(of_kind, min(count, len(of_kind)))
    return drawn


def commit_subjects(root: Path = ROOT, count: int = COMMITS) -> list[SampleItem]:
    listed = subprocess.run(
        ["git", "log", "--no-merges", f"-{count}", "--format=%h %s"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    parts = [line.partition(" ") for line in listed.stdout.splitlines()]
    return [SampleItem("commit subjects", number, subject) for number, _, subject in parts]


def format_items(items: list[SampleItem], *, with_places: bool) -> str:
    lines: list[str] = []
    kind = ""
    for number, item in enumerate(items, start=1):
        if item.kind != kind:
            kind = item.kind
            lines += ["", f"== {kind} =="]
        place = f"  [{item.place}]" if with_places else ""
        first, *rest = item.text.split("\n")
        lines += ["", f"{number}. {first}{place}", *(f"    {line}".rstrip() for line in rest)]
    return "\n".join(lines).lstrip("\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw prose of the tree for a reader.")
    parser.add_argument("--seed", type=int, required=True, metavar="N", help="seed of the draw")
    parser.add_argument("--with-places", action="store_true", help="print file and line of each")
    options = parser.parse_args()
    items = [*draw(collect(), options.seed), *commit_subjects()]
    print(format_items(items, with_places=options.with_places))
    return 0


if __name__ == "__main__":
    sys.exit(main())
