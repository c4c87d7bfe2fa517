"""The source rules as tests: every module follows each rule, and each rule rejects a bad example."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable

import pytest

import holdfast
from holdfast import failpoints
from tests import tidy_rules as rules
from tests.tidy_rules import EXTRA_IMPORTS, EXTRA_MODULES, ROOT, Layers, Module
from tools.plain_words import load_rules

LAYERS = rules.read_layers((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
MODULES = rules.package_modules()


def ambient_breaches(module: Module) -> list[str]:
    return rules.ambient_breaches(module, LAYERS)


def layer_breaches(module: Module) -> list[str]:
    return rules.layer_breaches(module, LAYERS)


def pyspark_import_breaches(module: Module) -> list[str]:
    return rules.confined_import_breaches(module, "pyspark", frozenset({"spark"}))


def numpy_import_breaches(module: Module) -> list[str]:
    return rules.confined_import_breaches(module, "numpy", frozenset({"ledger", "spark"}))


def assert_no_breach(check: Callable[[Module], list[str]]) -> None:
    breaches = [line for module in MODULES for line in check(module)]
    assert not breaches, "\n" + "\n".join(breaches)


def assert_one_breach(check: Callable[[Module], list[str]], name: str, source: str) -> None:
    breaches = check(Module(name, source))
    assert len(breaches) == 1, breaches


def test_package_modules_are_found() -> None:
    assert "holdfast" in {module.name for module in MODULES}


# --- layers -------------------------------------------------------------------------------------


def test_layers_are_read_from_top_to_bottom() -> None:
    layers = rules.read_layers("text\n```layers\ntop  # what it is\nleft right\nbase\n```\n")
    assert layers == Layers({"top": 2, "left": 1, "right": 1, "base": 0})


def test_architecture_lists_the_layers_in_order() -> None:
    top_down = sorted(LAYERS.rank, key=LAYERS.rank.__getitem__, reverse=True)
    assert top_down[:4] == ["cli", "sim", "ops", "app"]
    assert top_down[-1] == "errors"
    assert LAYERS.rank["world"] == LAYERS.rank["ledger"]
    assert {"clock", "store", "durable"} < LAYERS.below("runner")
    assert "runner" not in LAYERS.below("runner")


def test_layer_imports_point_down() -> None:
    assert_no_breach(layer_breaches)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("holdfast.store.lmdb.store", "from holdfast.durable import lease"),
        ("holdfast.store.lmdb.store", "from holdfast import durable"),
        ("holdfast.store.lmdb.store", "import holdfast.durable.lease"),
        ("holdfast.store.lmdb.store", "from ...durable import lease"),
        ("holdfast.store.lmdb.store", "def f():\n    from holdfast.runner import loop"),
        ("holdfast.store.lmdb.store", "if TYPE_CHECKING:\n    from holdfast.runner import loop"),
        (
            "holdfast.store.lmdb.store",
            "import importlib\nimportlib.import_module('holdfast.runner')",
        ),
        ("holdfast.store.lmdb.store", "from holdfast import App"),
        ("holdfast.store.lmdb.store", "import holdfast"),
        ("holdfast.world.host", "from holdfast.effects import queue"),
        ("holdfast.clock", "from holdfast.codec import encode"),
        ("holdfast.ops.api", "from holdfast.sim import run"),
        ("holdfast.app.simulator", "from holdfast.sim import run"),
        ("holdfast.app.world", "def f():\n    from holdfast.sim import run"),
        ("holdfast", "from holdfast.ops import api"),
        ("holdfast.unheard_of", ""),
        ("holdfast.sim.simulation", "from holdfast.unheard_of import x"),
    ],
)
def test_layer_import_up_or_sideways_is_a_breach(name: str, source: str) -> None:
    assert_one_breach(layer_breaches, name, source)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("holdfast.store.lmdb.store", "from holdfast.store import api\nfrom . import tuples"),
        (
            "holdfast.store.lmdb.store",
            "from holdfast import errors\nfrom holdfast.clock import Clock",
        ),
        ("holdfast.cli.main", "from holdfast import sim, __version__"),
        ("holdfast.app.simulator", "def run():\n    from holdfast.sim import run"),
        ("holdfast.app", "def simulate():\n    from holdfast.sim import run"),
        ("holdfast", "from holdfast.app import App"),
        ("holdfast.__main__", "from holdfast.cli import main"),
    ],
)
def test_layer_import_downward_is_allowed(name: str, source: str) -> None:
    assert layer_breaches(Module(name, source)) == []


# --- determinism --------------------------------------------------------------------------------


def test_only_clock_reads_time_and_entropy_below_the_runner() -> None:
    assert_no_breach(ambient_breaches)


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "from time import monotonic_ns",
        "def f():\n    import time as t",
        "import secrets",
        "from datetime import datetime as dt\ndt.now()",
        "import datetime\ndatetime.datetime.utcnow()",
        "from datetime import date\ndate.today()",
        "import random\nrandom.random()",
        "from random import shuffle\nshuffle([])",
        "import random\nrandom.Random()",
        "import random\nrandom.SystemRandom()",
        "import uuid\nuuid.uuid4()",
        "from uuid import uuid4\nf = uuid4",
        "import os\nos.urandom(8)",
        "import numpy as np\nnp.random.rand()",
    ],
)
def test_ambient_time_or_randomness_is_a_breach(source: str) -> None:
    assert_one_breach(ambient_breaches, "holdfast.durable.lease", source)
    assert ambient_breaches(Module("holdfast.clock", source)) == []
    assert ambient_breaches(Module("holdfast.runner.loop", source)) == []


def test_seeded_random_and_passed_time_are_allowed() -> None:
    source = (
        "import random\nfrom datetime import datetime, UTC\n"
        "def f(rng: random.Random): return random.Random(7), datetime.fromtimestamp(0, UTC)"
    )
    assert ambient_breaches(Module("holdfast.retry", source)) == []


# --- restricted imports -------------------------------------------------------------------------


def test_no_module_unpickles_or_evaluates_data() -> None:
    assert_no_breach(rules.unpickling_breaches)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import cloudpickle",
        "from pyspark import cloudpickle",
        "from pyspark.cloudpickle import loads",
        "import marshal",
        "import dill",
        "import shelve",
        "import yaml\nyaml.load('')",
        "from yaml import load\nload('')",
        "eval('1')",
        "exec('1')",
        "import pandas as pd\npd.read_pickle('f')",
        "import numpy as np\nnp.load('f', allow_pickle=True)",
    ],
)
def test_unpickling_or_evaluating_is_a_breach(source: str) -> None:
    assert_one_breach(rules.unpickling_breaches, "holdfast.cli.main", source)


def test_method_named_like_a_builtin_is_allowed() -> None:
    source = "import yaml\nyaml.safe_load('')\nself.exec('x')"
    assert rules.unpickling_breaches(Module("holdfast.cli.main", source)) == []


def test_only_spark_imports_pyspark() -> None:
    assert_no_breach(pyspark_import_breaches)


def test_pyspark_import_outside_spark_is_a_breach() -> None:
    source = "def f():\n    from pyspark.sql import SparkSession"
    assert_one_breach(pyspark_import_breaches, "holdfast.ledger.plan", source)
    assert pyspark_import_breaches(Module("holdfast.spark.session", source)) == []


def test_only_ledger_and_spark_import_numpy() -> None:
    assert_no_breach(numpy_import_breaches)


def test_numpy_import_outside_ledger_and_spark_is_a_breach() -> None:
    source = "import numpy as np"
    assert_one_breach(numpy_import_breaches, "holdfast.world.host", source)
    assert numpy_import_breaches(Module("holdfast.ledger.plan", source)) == []


def test_no_module_imports_an_extra_at_import_time() -> None:
    breaches = rules.eager_extra_breaches(MODULES)
    assert not breaches, "\n" + "\n".join(breaches)


def test_eager_import_of_an_extra_is_a_breach_in_every_reached_module() -> None:
    reached = [
        Module("holdfast", "import holdfast.store.api", is_package=True),
        Module(
            "holdfast.store", "try:\n    import rich\nexcept ImportError: pass", is_package=True
        ),
        Module("holdfast.store.api", "import psycopg"),
        Module("holdfast.ops", "import fastapi"),  # not reached
    ]
    assert len(rules.eager_extra_breaches(reached)) == 2
    lazy = [Module("holdfast", "def f():\n    import rich\nif TYPE_CHECKING:\n    import numpy")]
    assert rules.eager_extra_breaches(lazy) == []


def test_extra_imports_list_every_extra_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = {
        re.match(r"[\w-]+", requirement)[0]  # type: ignore[index]
        for extra in extras.keys() - {"dev", "all"}
        for requirement in extras[extra]
    }
    assert named == EXTRA_IMPORTS.keys()


PROBE = """
import json, sys

class Asked:
    names = set()
    def find_spec(self, name, path=None, target=None):
        self.names.add(name.partition(".")[0])

sys.meta_path.insert(0, Asked())
{statement}
print(json.dumps(sorted(Asked.names | set(sys.modules))))
"""


def modules_requested_by(statement: str) -> set[str]:
    """Return the modules that a new interpreter loads or tries to load for `statement`."""
    code = PROBE.format(statement=statement)
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return set(json.loads(completed.stdout))


def test_import_holdfast_requests_no_extra() -> None:
    requested = modules_requested_by("import holdfast")
    assert "holdfast" in requested
    assert not requested & EXTRA_MODULES


def test_guarded_import_of_an_extra_is_detected() -> None:
    guarded = "try:\n    import pyspark\nexcept ImportError:\n    pass"
    assert modules_requested_by(guarded) & EXTRA_MODULES >= {"pyspark"}


def test_no_module_forks() -> None:
    assert_no_breach(rules.fork_breaches)


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.fork()",
        "from os import fork\nfork()",
        "import multiprocessing as mp\nmp.get_context('fork')",
        "import multiprocessing\nmultiprocessing.get_context()",
        "import multiprocessing\nmultiprocessing.set_start_method('fork')",
        "from multiprocessing import Process\nProcess()",
        "from concurrent.futures import ProcessPoolExecutor\nProcessPoolExecutor(2)",
    ],
)
def test_fork_is_a_breach(source: str) -> None:
    assert_one_breach(rules.fork_breaches, "holdfast.store.lmdb.writer", source)


def test_spawn_is_allowed() -> None:
    source = "import multiprocessing\nmultiprocessing.get_context('spawn').Process()"
    assert rules.fork_breaches(Module("holdfast.store.lmdb.writer", source)) == []


def test_no_module_imports_a_process_library() -> None:
    assert_no_breach(rules.process_library_breaches)


@pytest.mark.parametrize(
    "source",
    [
        "import multiprocessing",
        "def f():\n    from multiprocessing import shared_memory",
        "from multiprocessing.connection import Connection",
        "import concurrent.futures.process",
        "from concurrent.futures import ProcessPoolExecutor",
    ],
)
def test_import_of_a_process_library_is_a_breach(source: str) -> None:
    assert_one_breach(rules.process_library_breaches, "holdfast.ops.world_replay", source)


def test_thread_pool_is_allowed() -> None:
    source = "from concurrent.futures import Future, ThreadPoolExecutor"
    assert rules.process_library_breaches(Module("holdfast.ops.world_replay", source)) == []


def test_users_of_a_process_library_are_modules_with_a_reason() -> None:
    users = rules.PROCESS_LIBRARY_USERS
    assert users.keys() <= {module.name for module in MODULES}
    assert all(users.values())


# --- failpoints ---------------------------------------------------------------------------------

TEST_MODULES = rules.modules_of_tests()
REPLACEMENTS = load_rules().allowed["replacements"]


def failpoint_breaches(module: Module) -> list[str]:
    return rules.failpoint_breaches(module, failpoints.POINTS)


def test_every_place_has_a_listed_failpoint() -> None:
    assert_no_breach(failpoint_breaches)


def test_every_listed_failpoint_has_a_place_and_a_test() -> None:
    assert rules.unused_failpoints(failpoints.POINTS, MODULES, TEST_MODULES) == []


ARMED = "from holdfast import failpoints\nif failpoints.armed:\n    "


@pytest.mark.parametrize(
    "source",
    [
        ARMED + "failpoints.hit('postgres.unheard_of')",
        ARMED + "failpoints.hit(name)",
        "from holdfast import failpoints\nfailpoints.hit('postgres.send')",
        "from holdfast import failpoints\nfailpoints.on('postgres.send')",
        "from holdfast.failpoints import on\non('postgres.send')",
    ],
)
def test_failpoint_that_is_unlisted_unguarded_or_armed_by_the_product_is_a_breach(
    source: str,
) -> None:
    assert_one_breach(failpoint_breaches, "holdfast.store.engine", source)


def test_failpoint_without_a_place_or_without_a_test_is_a_breach() -> None:
    place = Module("holdfast.store.engine", ARMED + "failpoints.hit('a.b')")
    user = Module("tests.test_a", 'with failpoints.on("a.b"): ...')
    assert rules.unused_failpoints(["a.b"], [place], [user]) == []
    assert rules.unused_failpoints(["a.b"], [], [user]) == ["a.b: no place in the product"]
    assert rules.unused_failpoints(["a.b"], [place], []) == ["a.b: no test uses it"]


def test_no_test_replaces_behaviour_of_holdfast() -> None:
    found = [
        line
        for module in TEST_MODULES
        for line in rules.replacement_breaches(module, REPLACEMENTS, MODULES)
    ]
    assert found == []


def test_exceptions_for_replaced_behaviour_are_in_use_and_only_fall() -> None:
    for key in REPLACEMENTS:
        path, _, target = key.partition(": ")
        [module] = [one for one in TEST_MODULES if one.path == path]
        assert any(
            target in line for line in rules.replacement_breaches(module, package=MODULES)
        ), key
    assert len(REPLACEMENTS) <= rules.REPLACEMENTS_MAX


@pytest.mark.parametrize(
    "line",
    [
        "monkeypatch.setattr(PgEngine, '_send', cut)",
        "monkeypatch.setattr(engine, 'run_pipelined', cut)",
        "monkeypatch.setattr(engine.PgEngine, name, cut)",
        "monkeypatch.setattr('holdfast.tasks.queries.list_queues', cut)",
        "patch.setattr(store, 'transact', cut)",
        "self._patch.setattr(rig.store, 'read', cut)",
        "store.read = cut  # type: ignore[method-assign]",
    ],
)
def test_replaced_behaviour_of_holdfast_is_a_breach(line: str) -> None:
    assert len(replacements_in(line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "monkeypatch.setattr(engine, 'PART_BYTES', 10)",
        "monkeypatch.setattr('holdfast.store.postgres.engine.PART_BYTES', 10)",
        "monkeypatch.setattr(engine, '_BASES_MAX', 1)",
        "monkeypatch.setattr(redo_log.os, 'pwrite', cut)",
        "monkeypatch.setattr(socket, 'getaddrinfo', cut)",
        "monkeypatch.setattr('tempfile.tempdir', 'x')",
    ],
)
def test_replaced_constant_or_foreign_function_is_allowed(line: str) -> None:
    assert replacements_in(line) == []


def replacements_in(line: str) -> list[str]:
    imports = (
        "import socket\n"
        "from holdfast.store.lmdb import redo_log\n"
        "from holdfast.store.postgres import engine\n"
        "from holdfast.store.postgres.engine import PgEngine\n"
    )
    return rules.replacement_breaches(Module("tests.test_a", imports + line), package=MODULES)


# --- shape --------------------------------------------------------------------------------------


def test_no_module_exceeds_lines_max() -> None:
    assert_no_breach(rules.length_breaches)


def test_module_longer_than_lines_max_is_a_breach() -> None:
    assert_one_breach(rules.length_breaches, "holdfast.clock", "x = 1\n" * (rules.LINES_MAX + 1))
    assert rules.length_breaches(Module("holdfast.clock", "x = 1\n" * rules.LINES_MAX)) == []


def test_every_module_has_a_docstring() -> None:
    assert_no_breach(rules.docstring_breaches)


@pytest.mark.parametrize("source", ["", "x = 1", '"""  """', "# only a comment"])
def test_module_without_docstring_is_a_breach(source: str) -> None:
    assert_one_breach(rules.docstring_breaches, "holdfast.clock", source)


def test_no_module_has_a_vague_name() -> None:
    assert_no_breach(rules.name_breaches)


def test_bench_modules_have_specific_names_and_docstrings() -> None:
    modules = rules.modules_of_bench()
    assert "bench.peers.flow_load" in {module.name for module in modules}
    rules_of_bench = (rules.name_breaches, rules.docstring_breaches, rules.length_breaches)
    assert [line for module in modules for check in rules_of_bench for line in check(module)] == []


@pytest.mark.parametrize("name", ["utils", "common", "helpers", "manager"])
def test_vague_module_name_is_a_breach(name: str) -> None:
    assert_one_breach(rules.name_breaches, f"holdfast.store.{name}", "")
    assert_one_breach(rules.name_breaches, f"holdfast.{name}.lease", "")
    assert_one_breach(rules.name_breaches, f"bench.peers.{name}", "")


# --- pages --------------------------------------------------------------------------------------

ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
PUBLIC = frozenset(holdfast.__all__)
PAGES = ["README.md", *(str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("docs/**/*.md")))]


def test_every_path_in_the_architecture_page_exists() -> None:
    assert rules.missing_part_breaches(ARCHITECTURE) == []
    assert rules.missing_layer_part_breaches(ARCHITECTURE, MODULES, PUBLIC) == []


@pytest.mark.parametrize(
    "page", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
)
def test_every_file_named_on_a_main_page_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert rules.missing_file_breaches(text, page=page) == []


@pytest.mark.parametrize(
    "line",
    [
        "see docs/nothing.md",
        "`tools/nothing.py`",
        "[a page](docs/nothing.md)",
        "(tests/data/no.json)",
    ],
)
def test_missing_file_named_on_a_page_is_a_breach(line: str) -> None:
    assert len(rules.missing_file_breaches(f"text\n{line}\n")) == 1


def test_files_in_code_blocks_and_in_urls_are_not_checked() -> None:
    text = "```\ndocs/nothing.md\n```\n    docs/nothing.md\nhttps://example.org/nothing.md\n"
    assert rules.missing_file_breaches(text) == []


@pytest.mark.parametrize(
    "line",
    [
        "| a thing | `store/nothing.py` |",
        "| a thing | `store/engine.py`, `nothing.py` |",
        "| a thing | `nothing/` |",
        "    world     send → world/nothing: drain",
        "| `tests/nothing/` | what it holds |",
    ],
)
def test_missing_path_in_the_architecture_page_is_a_breach(line: str) -> None:
    assert len(rules.missing_part_breaches(f"text\n{line}\n")) == 1


def test_relative_paths_and_paths_without_backticks_are_resolved() -> None:
    line = "| `store/postgres/engine.py` on `session.py`; `sinks` | workers/effects/pool and `tests/chaos/` |"
    assert rules.missing_part_breaches(line) == []


@pytest.mark.parametrize("part", ["shell", "spark.run", "queue.drain"])
def test_missing_part_of_a_layer_is_a_breach(part: str) -> None:
    block = f"```layers\nadapters  # the shipped effects: http, {part}\nerrors\n```\n"
    assert rules.missing_layer_part_breaches(block, MODULES, PUBLIC) == [
        f"ARCHITECTURE.md:2: there is no {part} in adapters"
    ]


def test_glossary_has_one_row_and_one_meaning_for_each_term() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert rules.glossary_breaches(text) == []


@pytest.mark.parametrize(
    ("row", "breach"),
    [
        ("| lease | Other. | x |", "lease is a term twice"),
        ("| claim, Lease | Other. | x |", "lease is a term twice"),
        ("| claim | a permission | x |", "two terms mean: a permission"),
        ("| claim | Other. | |", "claim has an empty column"),
        ("| claim | Other. | x, lease (short) |", "lease, a synonym of claim, is another term"),
    ],
)
def test_glossary_row_that_repeats_another_or_has_no_synonym_is_a_breach(
    row: str, breach: str
) -> None:
    page = "| term | meaning | also known as |\n|---|---|---|\n| lease | A permission. | lock |\n"
    assert rules.glossary_breaches(page) == []
    assert rules.glossary_breaches(page + row) == [f"docs/glossary.md: {breach}"]


def test_glossary_of_71_rows_is_a_breach() -> None:
    page = "| term | meaning | also known as |\n|---|---|---|\n"
    rows = [f"| term {n} | meaning {n} | synonym {n} |\n" for n in range(71)]
    assert rules.glossary_breaches(page + "".join(rows[:70])) == []
    assert rules.glossary_breaches(page + "".join(rows)) == [
        "docs/glossary.md: 71 rows, at most 70"
    ]


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_exist_and_are_listed_once(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert rules.link_breaches(text, (ROOT / page).parent, page) == []


@pytest.mark.parametrize(
    "text",
    [
        "[a page](docs/nothing.md)",
        "- [docs/tasks.md](docs/tasks.md): one\n- [docs/tasks.md](docs/tasks.md): two\n",
    ],
)
def test_dead_or_duplicate_link_of_a_page_is_a_breach(text: str) -> None:
    assert len(rules.link_breaches(text)) == 1
