"""`make test`: one run that stops without progress, retries few failed tests alone and starts long files first."""

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.processes import ROOT
from tools import file_order, shared_imports, suite_progress, suites
from tools.suites import Outcome, Stall

# The clock of a fake suite is a file: each of its tests adds the time that it takes.
FAKE = """
import pathlib, threading, pytest
CLOCK = pathlib.Path({clock!r})

@pytest.mark.parametrize("seconds", {seconds})
def test_takes_its_time(seconds):
    while True:
        CLOCK.write_text(str(float(CLOCK.read_text()) + seconds))
        if seconds > 1:
            return
        threading.Event().wait(0.001)
"""


# A test fails in its first run only, or in every run.
FAILING = """
import pathlib, pytest

@pytest.mark.parametrize("number", range({once}))
def test_fails_once(number):
    mark = pathlib.Path({directory!r}, f"mark-{{number}}")
    first = not mark.exists()
    mark.touch()
    assert not first

@pytest.mark.parametrize("number", range({always}))
def test_always_fails(number):
    raise AssertionError

@pytest.mark.parametrize("number", range({crashing}))
def test_crashes(number):
    import os
    os._exit(1)

def test_passes():
    pass
"""


def run_fake_suite(tmp_path: Path, seconds: list[int], stalled_s: float) -> Outcome:
    """Run a suite whose tests take the given seconds of the fake clock; a test of 1 s never ends."""
    clock = tmp_path / "clock"
    clock.write_text("0")
    test = tmp_path / "test_slow.py"
    test.write_text(FAKE.format(clock=str(clock), seconds=seconds))
    outcome = suites.run(
        "fake",
        [*plain_pytest(tmp_path), str(test)],
        stalled_s,
        reports=tmp_path / "reports",
        clock=file_clock(clock),
        look_s=0.01,
    )
    assert outcome is not None
    return outcome


def plain_pytest(directory: Path) -> list[str]:
    """Return the options for a run without the configuration of this project."""
    return ["-p", "no:cacheprovider", "--rootdir", str(directory), "-c", "/dev/null"]


def file_clock(clock: Path) -> Callable[[], float]:
    # The file is empty for a moment during a write.
    last = 0.0

    def now_s() -> float:
        nonlocal last
        last = max(last, float(clock.read_text() or 0))
        return last

    return now_s


def test_suite_with_progress_has_no_total_time_limit(tmp_path: Path) -> None:
    outcome = run_fake_suite(tmp_path, [200] * 10, stalled_s=600)
    assert (outcome.passed, outcome.failed) == (10, 0)
    assert outcome.seconds == 2000


@pytest.mark.timeout(100)
def test_suite_without_progress_is_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = run_fake_suite(tmp_path, [200, 200, 1], stalled_s=600)
    assert (outcome.passed, outcome.failed) == (0, 1)
    output = capfd.readouterr()
    assert "=== fake: ended, no test has finished for 600 s" in output.out
    assert "test_takes_its_time" in output.err, "each process says where its threads are"


def test_stall_restarts_with_each_finished_test() -> None:
    stall = Stall(0.0)
    assert [stall.seconds(at // 500, float(at)) for at in range(0, 2000, 100)] == [
        0, 100, 200, 300, 400, 0, 100, 200, 300, 400, 0, 100, 200, 300, 400, 0, 100, 200, 300, 400,
    ]  # fmt: skip


def test_stall_limit_is_longer_than_the_timeout_of_a_test(
    request: pytest.FixtureRequest,
) -> None:
    from tests.conftest import HANG_GRACE_S

    assert float(request.config.getini("timeout")) + HANG_GRACE_S < suites.STALLED_S
    assert suites.PROGRESS == suite_progress.PROGRESS
    assert suites.FAILED == suite_progress.FAILED


def test_deep_run_has_two_workers_and_leaves_the_simulator_out() -> None:
    arguments = suites.pytest_arguments([], is_deep=True)
    assert arguments[:6] == ["tests", "-m", "deep", "--ignore=tests/sim", "-n", "2"]
    assert suites.pytest_arguments([])[:5] == ["tests", "-m", "not bench and not deep", "-n", "4"]
    makefile = (ROOT / "Makefile").read_text()
    assert "tools/suites.py --deep\n" in makefile


def test_stall_limit_of_a_deep_run_is_longer_than_the_longest_timeout_of_a_test() -> None:
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    limits = [int(limit) for limit in re.findall(r"mark\.timeout\((\d+)\)", sources)]
    assert max(limits) < suites.DEEP_STALLED_S


def test_suite_is_timed_by_the_monotonic_clock() -> None:
    assert suites.run.__kwdefaults__["clock"] is time.monotonic


@pytest.fixture
def other_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with tests that is not this project. Its pytest imports the plugins from here."""
    monkeypatch.setenv("PYTHONPATH", str(suites.ROOT))
    return tmp_path


def retried(
    root: Path, *options: str, once: int = 0, always: int = 0, crashing: int = 0
) -> tuple[Outcome, list[str]]:
    """Run tests that fail, then retry them; return the outcome and the unstable tests."""
    (root / "test_failing.py").write_text(
        FAILING.format(once=once, always=always, crashing=crashing, directory=str(root))
    )
    reports = root / "reports"
    outcome = suites.run("fake", ["test_failing.py", *options], 600, root=root, reports=reports)
    assert outcome is not None
    return outcome, suites.retry_failed(outcome, 600, root=root, reports=reports)


def test_failed_test_is_unstable_if_it_passes_alone_and_fails_the_run_otherwise(
    other_root: Path,
) -> None:
    outcome, unstable = retried(other_root, once=1, always=1)
    assert (outcome.passed, outcome.failed) == (2, 1)
    assert [test.rpartition("::")[2] for test in unstable] == ["test_fails_once[0]"]
    assert (other_root / "reports" / "unstable.txt").read_text() == f"{unstable[0]}\n"


def test_test_that_crashes_its_process_is_not_retried(other_root: Path) -> None:
    outcome, unstable = retried(other_root, "-n", "1", once=1, crashing=1)
    assert (outcome.failed, unstable) == (2, [])


def test_second_run_without_a_report_makes_no_test_unstable(tmp_path: Path) -> None:
    hanging = tmp_path / "test_hanging.py"
    hanging.write_text("import os\ndef test_hangs():\n    os._exit(1)\n")
    options = [*plain_pytest(tmp_path), "-p", "no:xdist", str(hanging)]
    outcome = Outcome(1.0, failed=1, exit_code=1, failed_ids=["x"], retried_ids=["x"])
    second = suites.run("second-run", options, 600, reports=tmp_path / "reports")
    assert second is not None
    assert (second.exit_code, second.failed_ids) == (1, [])
    outcome.retried_ids = outcome.failed_ids = options[-1:]
    assert suites.retry_failed(outcome, 600, reports=tmp_path / "reports") == []
    assert outcome.failed == 1


def test_more_failed_tests_than_the_bound_are_not_retried(other_root: Path) -> None:
    outcome, unstable = retried(other_root, once=suites.RETRIED_MAX + 1)
    assert (outcome.failed, unstable) == (suites.RETRIED_MAX + 1, [])


def test_recorded_durations_order_the_files_of_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "durations.json"
    tests = [
        suites.TestTime(1.0, "tests.test_short", "test_a"),
        suites.TestTime(3.0, "tests.store.test_long", "test_b"),
        suites.TestTime(4.0, "tests.store.test_long", "test_c"),
    ]
    suites.record_durations(tests, path)
    assert json.loads(path.read_text()) == {"tests/store/test_long.py": 7, "tests/test_short.py": 1}
    monkeypatch.setattr(file_order, "DURATIONS", path)
    names = ["test_short", "store/test_long", "test_new", "test_short"]
    items = [CollectedItem(suites.ROOT / "tests" / f"{name}.py") for name in names]
    file_order.pytest_collection_modifyitems(items)  # type: ignore[arg-type]
    assert [item.path.stem for item in items] == [
        "test_new", "test_long", "test_short", "test_short",
    ]  # fmt: skip


@dataclass
class CollectedItem:
    path: Path


def test_named_parts_select_their_directories() -> None:
    assert suites.selected_paths([]) == ["tests"]
    assert suites.selected_paths(["processes"]) == ["tests/process", "tests/chaos"]
    ignored = suites.selected_paths(["unit", "spark"])
    assert ignored == [
        "tests",
        "--ignore=tests/sim",
        "--ignore=tests/process",
        "--ignore=tests/chaos",
    ]


def test_every_part_has_its_directories() -> None:
    for directories in suites.PARTS.values():
        for directory in directories:
            assert any((suites.ROOT / "tests" / directory).glob("test_*.py")), directory


def test_files_of_spark_alternate_with_other_files_longest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(file_order, "OTHERS_FIRST", 0)
    seconds = {
        "tests/spark/a.py": 4.0,
        "tests/spark/b.py": 2.0,
        "c.py": 3.0,
        "d.py": 2.0,
        "e.py": 1.0,
    }
    assert file_order.ordered(seconds) == [
        "tests/spark/a.py", "c.py", "d.py", "tests/spark/b.py", "e.py",
    ]  # fmt: skip


def test_files_that_share_a_session_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_order, "OTHERS_FIRST", 0)
    seconds = {
        "tests/spark/a.py": 4.0,
        "tests/spark/b.py": 3.0,
        "tests/spark/c.py": 2.0,
        "d.py": 9.0,
    }
    sessions = {"tests/spark/a.py": "local", "tests/spark/c.py": "local"}
    order = file_order.ordered(seconds, sessions)
    assert order == ["tests/spark/a.py", "tests/spark/c.py", "d.py", "tests/spark/b.py"]


def test_every_file_of_spark_has_a_session_or_its_own_process() -> None:
    sessions = file_order.session_of(file_order.read_durations())
    paths = [path.stem for path in (suites.ROOT / "tests" / "spark").glob("test_*.py")]
    assert set(paths) >= file_order.CONNECT_FILES | file_order.OWN_PROCESS_FILES
    shared = {name.removeprefix("tests/spark/").removesuffix(".py") for name in sessions}
    assert shared | file_order.OWN_PROCESS_FILES == set(paths)
    assert set(sessions.values()) == {"connect", *file_order.LOCAL_SESSIONS}
    for name in paths:
        text = (suites.ROOT / "tests" / "spark" / f"{name}.py").read_text()
        uses_connect = re.search(r"\bconnected: SparkSession", text) is not None
        assert uses_connect == (name in file_order.CONNECT_FILES), name


def test_other_workers_start_with_files_without_spark() -> None:
    spark = {f"tests/spark/{n}.py": 90.0 - n for n in range(8)} | {"tests/cli/test_demo.py": 99.0}
    others = {f"{n}.py": 20.0 - n for n in range(12)}
    order = file_order.ordered(spark | others)
    assert sorted(order) == sorted(spark | others)
    assert order[0] == "tests/cli/test_demo.py"
    assert order[1 : 1 + file_order.OTHERS_FIRST] == list(others)[: file_order.OTHERS_FIRST]
    assert order[1 + file_order.OTHERS_FIRST] == "tests/spark/0.py"


def test_worker_processes_share_the_first_import_of_all_test_modules() -> None:
    modules = shared_imports.modules_below([ROOT / "tests"], [ROOT / "tests" / "spark"], root=ROOT)
    assert "tests.test_suites" in modules
    assert "tests.sim.test_tasks" in modules
    assert not [name for name in modules if name.startswith("tests.spark.")]
    shares = [shared_imports.share(modules, number, 4) for number in range(4)]
    assert sorted(name for share in shares for name in share) == modules
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_worker_imports_its_share_before_the_collection_and_skips_broken_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"test_shared_imports_{number}" for number in range(4)]
    for name in names:
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / f"{names[0]}.py").write_text("import pytest; pytest.skip(allow_module_level=True)")
    (tmp_path / f"{names[1]}.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(str(tmp_path))
    for number, imported in ((0, names[2]), (1, names[3])):
        config = SimpleNamespace(
            workerinput={"workerid": f"gw{number}", "workercount": 2},
            args=[str(tmp_path)],
            rootpath=tmp_path,
            getoption=lambda name: None,
        )
        shared_imports.pytest_collection(SimpleNamespace(config=config))
        assert [name for name in names if sys.modules.pop(name, None)] == [imported]
