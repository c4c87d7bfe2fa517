"""Plant one random bug per spec-marked test, and count the tests that detect theirs.

    python tools/mutation.py --count 100 --seed 7

The seed selects the tests. Each test runs once with a line tracer. Of the lines that it executes in its
modules (`MODULES`, or the marker's `module=`), one mutation is drawn:

    negate       if c                 ->  if not c
    compare      a < b                ->  a <= b        (also == !=, in not in, is is not)
    connect      a and b              ->  a or b
    number       3, a + 1             ->  4, a - 1
    answer       return value         ->  return None
    drop         call(...)            ->  pass

The mutated module is written into a copy of the tree, and the test runs there. A test detects the bug if it
fails or exceeds its time limit. Survivors are listed with their mutation: either the test is too weak, or
the mutation is equivalent, or the line does not belong to the rule. `make check` does not run this tool,
because it takes minutes.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.traceability import rules_of

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("src", "tests", "tools", "docs", "bench", "examples")
PAGES = ("pyproject.toml", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "Makefile")
# Tests of real processes: the tracer does not see child processes.
LEFT_OUT = ("tests/process", "tests/chaos", "tests/spark", "tests/test_traceability.py")
SELECTED = ["-q", "-p", "no:cacheprovider", "-m", "not postgresql and not deep"]
TEST_TIMEOUT_S = 240.0
TRACE_VARIABLE = "HOLDFAST_MUTATION_TRACE"
PYTEST_OK = 0

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


@dataclass(frozen=True)
class Marked:
    """A test with spec markers, and the modules that it declares to test."""

    test: str
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Mutation:
    """One change of a source text, between two byte offsets."""

    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str

    def apply(self, source: str) -> str:
        code = source.encode()
        return (code[: self.start] + self.after.encode() + code[self.end :]).decode()


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant one bug per spec-marked test.")
    parser.add_argument("--count", type=int, default=100, metavar="N", help="tests to draw")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the selection")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only tests whose name contains TEXT"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes to FILE")
    args = parser.parse_args()
    random = Random(args.seed)
    marked = [test for test in marked_tests() if args.only in test.test]
    random.shuffle(marked)
    with tempfile.TemporaryDirectory(prefix="holdfast-mutation-") as place:
        tree = Path(place)
        copy_tree(tree)
        with MutationServer(tree) as server:
            outcomes = list(planted(marked, args.count, args.seed, tree, server))
    return report(outcomes, args.seed, args.json)


def marked_tests(root: Path = ROOT) -> list[Marked]:
    tests: dict[str, Marked] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(LEFT_OUT):
            continue
        source = path.read_text(encoding="utf-8")
        # Most files have no marker. Skip the parser for them.
        for rule in rules_of(source, name) if "mark.spec" in source else ():
            tests.setdefault(rule.test, Marked(rule.test, rule.modules))
    return list(tests.values())


def copy_tree(tree: Path) -> None:
    for name in COPIED:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in PAGES:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree / name)


def planted(
    marked: list[Marked], count: int, seed: int, tree: Path, server: MutationServer
) -> Iterator[dict[str, str]]:
    """Mutations of `count` tests. A test that executes no line of its modules is skipped."""
    left, at = count, 0
    while left and at < len(marked):
        batch, at = marked[at : at + left], at + left
        lines = executed(batch, tree, server)
        for test in batch:
            drawn = draw(test, Random(f"{seed}/{test.test}"), lines.get(test.test, {}))
            if drawn is None:
                print(
                    f"passed over   {test.test}: it executes no line of {', '.join(test.modules)}"
                )
                continue
            left -= 1
            yield tried(test, *drawn, tree, server)


def tried(
    test: Marked, path: str, mutation: Mutation, tree: Path, server: MutationServer
) -> dict[str, str]:
    source = (ROOT / path).read_text(encoding="utf-8")
    (tree / path).write_text(mutation.apply(source), encoding="utf-8")
    noticed = server.run([test.test]) != PYTEST_OK
    (tree / path).write_text(source, encoding="utf-8")
    verdict = "noticed" if noticed else "SURVIVED"
    where = f"{path}:{mutation.line}"
    print(f"{verdict:13} {test.test}\n{'':13} {where} {mutation.kind}: {mutation.before!r} -> {mutation.after!r}",
          flush=True)  # fmt: skip
    return {
        "test": test.test, "where": where, "kind": mutation.kind, "before": mutation.before,
        "after": mutation.after, "noticed": "yes" if noticed else "no",
    }  # fmt: skip


def draw(test: Marked, random: Random, lines: dict[str, list[int]]) -> tuple[str, Mutation] | None:
    """A module of the test and a mutation on a line that the test executes."""
    candidates = [
        (path, mutation)
        for path in files_of(test)
        for mutation in mutations((ROOT / path).read_text(encoding="utf-8"))
        if mutation.line in lines.get(path, ())
    ]
    return random.choice(candidates) if candidates else None


def files_of(test: Marked) -> list[str]:
    paths = [f"src/{module.replace('.', '/')}" for module in test.modules]
    return [
        f"{path}.py" if (ROOT / f"{path}.py").exists() else f"{path}/__init__.py" for path in paths
    ]


def executed(
    tests: list[Marked], tree: Path, server: MutationServer
) -> dict[str, dict[str, list[int]]]:
    """The executed lines of the tests' modules, by test and file, from one run of all tests."""
    out = tree / "executed.json"
    out.unlink(missing_ok=True)
    files = sorted({path for test in tests for path in files_of(test)})
    environment = {TRACE_VARIABLE: json.dumps([str(out), *files])}
    server.run([test.test for test in tests], environment, "tools.mutation_trace")
    if not out.exists():
        return {}
    lines: dict[str, dict[str, list[int]]] = json.loads(out.read_text(encoding="utf-8"))
    return lines


class MutationServer:
    """Runs tests in a copied tree, one after the other (`tools/mutation_server.py`).

    `libraries` are imported before the first test. The default is all libraries that the tests import.
    """

    def __init__(self, tree: Path, *libraries: str) -> None:
        self._tree = tree
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("mutation_server.py")), *libraries],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=tree,
            text=True,
        )

    def __enter__(self) -> MutationServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, tests: list[str], more: dict[str, str] | None = None, plugin: str = "") -> int:
        """The exit code of the tests in the tree. A time-out counts as a failure."""
        # A traced run executes all tests. Otherwise the first failure is enough.
        plugins = ["-p", plugin] if plugin else ["-x"]
        request = {
            "cwd": str(self._tree),
            "env": {"PYTHONPATH": str(self._tree / "src"), **(more or {})},
            "args": [*SELECTED, *plugins, *tests],
            "timeout_s": TEST_TIMEOUT_S * len(tests),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def mutations(source: str) -> list[Mutation]:
    """All mutations of a module, in the order of its text."""
    tree = ast.parse(source)
    offsets = [0]
    for line in source.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    result = []
    for node, kind, changed in _changes(tree):
        start = offsets[node.lineno - 1] + node.col_offset
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        end = offsets[node.end_lineno - 1] + node.end_col_offset
        before = source.encode()[start:end].decode()
        after = ast.unparse(ast.fix_missing_locations(changed))
        if isinstance(changed, ast.expr):
            after = f"({after})"
        result.append(Mutation(node.lineno, kind, start, end, before, after))
    return sorted(result, key=lambda mutation: (mutation.start, mutation.end, mutation.kind))


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str, ast.AST]]:
    for node in _code(tree):
        match node:
            case ast.If() | ast.While() | ast.IfExp() if not isinstance(node.test, ast.Constant):
                yield node.test, "negate", ast.UnaryOp(ast.Not(), node.test)
            case ast.Compare() if type(node.ops[0]) in _COMPARISONS:
                changed = copy.deepcopy(node)
                changed.ops[0] = _COMPARISONS[type(node.ops[0])]()
                yield node, "compare", changed
            case ast.BoolOp():
                other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
                yield node, "connect", ast.BoolOp(other, node.values)
            case ast.BinOp(op=ast.Add() | ast.Sub()) if not _is_text(node):
                swapped = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
                yield node, "number", ast.BinOp(node.left, swapped, node.right)
            case ast.Constant(value=int() as value) if type(value) is int:
                yield node, "number", ast.Constant(value + 1)
            case ast.Return(value=ast.expr() as value) if not _is_none(value):
                yield node, "answer", ast.Return(ast.Constant(None))
            case ast.Expr(value=ast.Call() | ast.Await()):
                yield node, "drop", ast.Pass()


def _code(tree: ast.Module) -> Iterator[ast.AST]:
    """The executed nodes: no annotations, no patterns, no parts of a formatted string."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        left_out: list[object] = [
            getattr(node, name, None) for name in ("annotation", "returns", "type_params")
        ]
        for child in ast.iter_child_nodes(node):
            excluded = any(child is node_part for node_part in left_out)
            if not excluded and not isinstance(child, ast.pattern | ast.JoinedStr):
                waiting.append(child)


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        for side in (node.left, node.right)
    )


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def report(found: list[dict[str, str]], seed: int, path: Path | None) -> int:
    survivors = [survivor for survivor in found if survivor["noticed"] == "no"]
    print(f"\n{len(found) - len(survivors)} of {len(found)} marked tests noticed (seed {seed})")
    for survivor in survivors:
        print(
            f"  {survivor['test']}\n    {survivor['where']} {survivor['kind']}: {survivor['before']!r} -> {survivor['after']!r}"
        )
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
