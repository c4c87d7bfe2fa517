"""The mutation tool: each mutation changes one expression, and a marked test can detect it."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools import mutation
from tools.mutation import Marked, Mutation, MutationServer, mutations

SOURCE = '''"""Text."""
LIMIT = 3


def judge(height: int, names: list[str], flag: bool = True) -> str | None:
    """Not a call: 7."""
    if height < LIMIT and flag:
        names.append("é" + "low")
        return f"{height + 1}"
    while names:
        names.pop()
    return None
'''


def mutation_texts(kind: str) -> list[tuple[int, str, str]]:
    return [
        (mutation.line, mutation.before, mutation.after)
        for mutation in mutations(SOURCE)
        if mutation.kind == kind
    ]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            "negate",
            [
                (7, "height < LIMIT and flag", "(not (height < LIMIT and flag))"),
                (10, "names", "(not names)"),
            ],
        ),
        ("compare", [(7, "height < LIMIT", "(height <= LIMIT)")]),
        ("connect", [(7, "height < LIMIT and flag", "(height < LIMIT or flag)")]),
        ("number", [(2, "3", "(4)")]),
        ("answer", [(9, 'return f"{height + 1}"', "return None")]),
        ("drop", [(8, 'names.append("é" + "low")', "pass"), (11, "names.pop()", "pass")]),
    ],
)
def test_each_mutation_kind_changes_its_expressions(
    kind: str, expected: list[tuple[int, str, str]]
) -> None:
    assert mutation_texts(kind) == expected


def test_mutation_changes_one_place_and_the_source_parses() -> None:
    for one in mutations(SOURCE):
        changed = one.apply(SOURCE)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))
        code = SOURCE.encode()
        assert changed.encode().startswith(code[: one.start])
        assert changed.encode().endswith(code[one.end :])


def test_every_module_of_the_package_can_be_mutated() -> None:
    kinds = set()
    for path in sorted((mutation.ROOT / "src").rglob("*.py"))[::40]:
        source = path.read_text(encoding="utf-8")
        # The last mutation of each kind: all text that could shift its offsets is before it.
        for kind, one in {one.kind: one for one in mutations(source)}.items():
            ast.parse(one.apply(source))
            kinds.add(kind)
    assert kinds == {"negate", "compare", "connect", "number", "answer", "drop"}


def test_marked_tests_have_modules_and_are_listed_once() -> None:
    marked = mutation.marked_tests()
    assert len(marked) == len({one.test for one in marked}) > 300
    assert all(one.modules for one in marked)


TEST = """
import pytest
from holdfast import retry

@pytest.mark.parametrize("n", [0])
def test_strict(n):
    assert retry.judge(n) == "low"

def test_blind():
    retry.judge(0)

def test_other():
    retry.judge(0)
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a source tree with a module that one test checks and another test only executes."""
    package = tmp_path / "src" / "holdfast"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "retry.py").write_text('def judge(n):\n    return "low"\n    return n + 1\n')
    (package / "other.py").write_text("X = 1 + 1\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_small.py").write_text(TEST)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (tmp_path / "tools").symlink_to(mutation.ROOT / "tools")
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    # The small tests need pytest and no plugin.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return tmp_path


def test_strict_test_detects_a_mutation_of_an_executed_line(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strict, blind, other = (
        Marked(f"tests/test_small.py::{name}", (module,))
        for name, module in (
            ("test_strict", "holdfast.retry"),
            ("test_blind", "holdfast.retry"),
            ("test_other", "holdfast.other"),
        )
    )
    with MutationServer(tree, "pytest") as server:
        results = list(mutation.planted([strict, other, blind], 3, 1, tree, server))
    assert [
        (result["test"], result["where"], result["kind"], result["noticed"]) for result in results
    ] == [
        (strict.test, "src/holdfast/retry.py:2", "answer", "yes"),
        (blind.test, "src/holdfast/retry.py:2", "answer", "no"),
    ]
    assert "return None" not in (tree / "src/holdfast/retry.py").read_text(), "it was taken back"
    # A test that executes no line of its modules is skipped.
    assert f"passed over   {other.test}: " in capsys.readouterr().out


def test_mutation_report_counts_and_lists_survivors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [
        {"test": f"t{n}", "where": "a.py:1", "kind": "drop", "before": "f()", "after": "pass",
         "noticed": "yes" if n else "no"}
        for n in range(3)
    ]  # fmt: skip
    assert mutation.report(results, 7, tmp_path / "out.json") == 0
    output = capsys.readouterr().out
    assert "2 of 3 marked tests noticed (seed 7)" in output
    assert "t0\n    a.py:1 drop: 'f()' -> 'pass'" in output
    assert json.loads((tmp_path / "out.json").read_text()) == results


def test_mutation_tool_runs_as_a_script() -> None:
    completed = subprocess.run(
        [sys.executable, "tools/mutation.py", "--help"],
        cwd=mutation.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--seed" in completed.stdout


def test_mutation_of_a_non_ascii_line_changes_the_right_place() -> None:
    source = 'x = f("é", 1)\n'
    [one] = [one for one in mutations(source) if one.kind == "number"]
    assert one.apply(source) == 'x = f("é", (2))\n'
    assert isinstance(one, Mutation)
