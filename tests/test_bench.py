"""The benchmarks run and write well-formed records. The tests do not check speed."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import __main__ as bench
from bench import churn, footprint, history, report, single, table
from bench.peers import __main__ as peers
from bench.peers import processors, tally
from bench.peers import report as peers_report
from bench.peers import table as peers_table
from bench.peers.effect_turns import HoldfastEffects
from bench.peers.effect_workload import EffectAmount
from bench.peers.flow_turns import HoldfastFlows, rate_of
from bench.peers.flow_workload import FlowAmount
from bench.peers.pg_place import serving
from bench.peers.pg_systems import HoldfastOnPostgres
from bench.peers.pg_workload import PgAmount
from bench.peers.suite import Goal, Suite
from bench.peers.suites import EFFECTS, FLOWS, POSTGRES, SUITES, TASKS
from bench.peers.tally import Tally
from bench.peers.task_holdfast import HoldfastTasks
from bench.peers.task_workload import TaskAmount
from bench.peers.workload import Amount
from bench.place import EffectSizes, Place, Sizes, TimerSizes
from bench.record import Record, Spread, Target, against_raw, gather

TINY = Sizes(
    claimer_items=400,
    backlog_small=100,
    backlog_large=500,
    wakes=5,
    memory_keys=2_000,
    churn_callers=2,
    journal_callers=2,
    ledger_rows=25_000,
    ledger_logged_rows=25_000,
    tasks_small=50,
    tasks_large=200,
    idle_s=0.3,
    effects=EffectSizes(
        chains_at_once=4,
        steps=10,
        backlog_small=40,
        backlog_large=200,
        flood=200,
        singles=2,
    ),
    timers=TimerSizes(
        count=20,
        spread_s=0.1,
        lead_s=1.0,
        pending_small=20,
        pending_large=2_000,
        due_batch=10,
        due_batches=1,
    ),
)


@pytest.fixture
def shared_directory() -> Iterator[Path]:
    """Create a directory that PostgreSQL, which runs as another user, can enter; tmp_path is private."""
    path = Path(tempfile.mkdtemp(prefix="hf-bench-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, slice_s=0.05, raw_s=0.01, repeats=3, sizes=TINY)


# The metrics marked `bench` start processes of an application, some of them several times.
METRICS = [
    pytest.param(name, marks=pytest.mark.bench)
    if name in {**EFFECTS.alone, **TASKS.alone}
    else name
    for name in bench.METRICS
]


@pytest.mark.parametrize("name", METRICS)
def test_every_bench_metric_returns_a_record(place: Place, name: str) -> None:
    record = bench.METRICS[name](place)
    document = record.document()
    assert document["metric"] == name
    assert document["repeats"] == place.repeats
    assert json.loads(json.dumps(document)) == document
    for measure in document["measures"].values():
        assert measure["unit"]
        assert measure["min"] <= measure["median"] <= measure["max"]
    for target in record.targets:
        assert target.measure in record.measures
    assert (record.met is None) == (not record.targets)
    assert list(place.directory.iterdir()) == [], "it cleans up after itself"
    [line] = table.lines([document])
    assert line[0] == name


def test_bench_ratio_uses_the_raw_loop_of_its_repeat(place: Place) -> None:
    samples = against_raw(place, lambda: {"rate": 1000.0})
    assert len(samples) == place.repeats
    assert all(sample["ratio"] == 1000.0 / sample["raw"] for sample in samples)


def test_bench_target_is_compared_with_the_median() -> None:
    measures = gather([{"p99_ms": ms} for ms in (1.0, 2.0, 90.0)], {"p99_ms": "ms"})
    assert Record("n", "what", measures, (Target("p99_ms", below=10),)).met is True
    assert Record("n", "what", measures, (Target("p99_ms", at_least=10),)).met is False
    assert Record("n", "what", measures).met is None


def test_bench_figures_have_four_significant_digits() -> None:
    assert Spread("x", (1.23456, 123456.0)).document()["max"] == 123500.0


def test_bench_run_prints_a_json_line_per_metric_and_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    options = ["--budget-s", "1", "--only", "floor", "--dir", str(tmp_path), "--json", str(file)]
    assert bench.main(options) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert json.loads(first)["metric"] == "floor"
    assert rest[1].split()[0] == "metric"
    assert rest[2].split()[0] == "floor"
    assert json.loads(file.read_text())["metrics"][0] == json.loads(first)


def test_unknown_bench_metric_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["--only", "nothing"])
    assert ended.value.code == 2


def test_bench_report_writes_the_page_from_saved_runs(tmp_path: Path) -> None:
    file, target = tmp_path / "history.json", tmp_path / "docs" / "benchmarks.md"
    assert report.main(file, target) == 1
    measures = gather([{"rate": 5.0, "raw": 2.0, "ratio": 2.5}], {"rate": "ops/s", "ratio": "×"})
    document = Record("one", "one caller", measures, (Target("ratio", at_least=0.3),)).document()
    for _ in range(2):
        history.save(history.entry([document], budget_s=120, load_before=0.1), file)
    assert len(history.load(file)) == 2
    assert report.main(file, target) == 0
    assert "| one | 5 ops/s | 2.50 | 2.5 … 2.5 |  | ratio ≥ 0.3 | yes |" in target.read_text()


def test_saved_bench_run_has_no_machine_name() -> None:
    entry = history.entry([], budget_s=120, load_before=0.1)
    assert set(entry) == {
        "date", "holdfast", "python", "cpu_count", "load_before", "budget_s", "metrics",
    }  # fmt: skip


def test_committed_bench_history_is_readable() -> None:
    for run in history.load():
        assert table.text(run["metrics"])


# -- comparison with peers -------------------------------------------------------------------------

SAMPLES = {
    "holdfast": {"timer_p95": [2.0, 3.0, 2.0], "chains_64": [900.0, 1000.0, 1100.0]},
    "restate": {"timer_p95": [4.0, 4.0, 4.0], "chains_64": [300.0, 250.0, 200.0]},
    "dbos": {"timer_p95": [1.0, 9.0, 9.0]},
}


def test_ratio_to_the_best_peer_is_computed_per_run() -> None:
    ratios = peers_table.document(EFFECTS, SAMPLES)["ratios"]
    assert ratios["best"]["timer_p95"] == {"unit": "×", "median": 0.75, "min": 0.5, "max": 2.0}


def test_best_peer_of_a_rate_has_the_highest_value() -> None:
    samples = {
        "holdfast": {"single": [30.0, 10.0]},
        "huey": {"single": [5.0, 2.0]},
        "rabbitmq": {"single": [10.0, 1.0]},
    }
    ratios = peers_table.document(TASKS, samples)["ratios"]
    assert ratios["best"]["single"] == {"unit": "×", "median": 4.0, "min": 3.0, "max": 5.0}


def test_table_of_many_peers_shows_the_ratio_to_the_best() -> None:
    samples = {name: {"single": [2.0], "p95": [1.0]} for name in TASKS.systems}
    lines = peers_table.lines(TASKS, peers_table.document(TASKS, samples))
    assert {len(line) for line in lines} == {len(peers_table.header(TASKS))}
    assert peers_table.header(TASKS)[-3:] == ("ours / the best peer's", "goal", "met")
    assert lines[0][-3:] == ("1.00 (1.00 … 1.00)", "≥ 2 × of the best peer", "NO")


def test_measures_that_are_worse_than_a_peer_are_listed() -> None:
    samples = {**SAMPLES, "dbos": {"timer_p95": [1.0, 1.5, 9.0], "chains_64": [800.0] * 3}}
    compared = peers_table.document(EFFECTS, samples)
    assert peers_table.slower(EFFECTS, compared) == ["`timer_p95`: 2.00 × DBOS's"]
    samples["dbos"]["chains_64"] = [2000.0] * 3
    compared = peers_table.document(EFFECTS, samples)
    assert peers_table.slower(EFFECTS, compared)[0] == "`chains_64`: 0.50 × DBOS's"


def test_peer_goal_is_compared_with_the_median_ratio() -> None:
    met = {record.name: record.met for record in peers_table.records(EFFECTS, SAMPLES)}
    assert met == {"effects_chains_64": True, "effects_timer_p95": True}
    slower = {**SAMPLES, "holdfast": {"timer_p95": [5.0, 5.0, 5.0], "chains_64": [500.0] * 3}}
    met = {record.name: record.met for record in peers_table.records(EFFECTS, slower)}
    assert met == {"effects_chains_64": False, "effects_timer_p95": False}


def test_missing_peer_leaves_its_goals_open() -> None:
    without_peers = {"holdfast": SAMPLES["holdfast"]}
    assert {record.met for record in peers_table.records(EFFECTS, without_peers)} == {None}


def test_goal_text_names_the_compared_peer() -> None:
    assert str(Goal("a", "a", at_least=3)) == "≥ 3 ×"
    assert str(Goal("a", "b", at_least=3)) == "≥ 3 × of its b"
    assert str(Goal("a", "a", below=1, best=True)) == "< 1 × of the best peer"


@pytest.mark.parametrize("suite", SUITES.values(), ids=list(SUITES))
def test_peer_suite_describes_every_judged_measure(suite: Suite) -> None:
    for goal in suite.goals:
        assert goal.ours in suite.what
        assert goal.ours in suite.measures
        assert goal.theirs in suite.measures
    assert not set(suite.measures) & set(suite.extra)
    compared = {measure for measures in suite.parts.values() for measure in measures}
    assert compared <= set(suite.measures)


@pytest.mark.parametrize("suite", SUITES.values(), ids=list(SUITES))
def test_saved_peer_comparisons_render_their_pages(suite: Suite) -> None:
    for run in history.load(suite.history):
        assert "| measure | unit |" in peers_report.page(suite, run)


def test_measure_of_another_peer_suite_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as ended:
        peers.main(["--suite", "effects", "--only", "hot"])
    assert ended.value.code == 2


@pytest.mark.bench
def test_holdfast_effects_run_returns_every_compared_measure(tmp_path: Path) -> None:
    amount = EffectAmount(chain_s=0.05, steps=5, timers=20, spread_s=0.1, lead_s=2.0)
    measures: dict[str, float] = {}
    with HoldfastEffects().turn(tmp_path) as turn:
        for part in EFFECTS.parts:
            measures |= getattr(turn, part)(amount)
    assert set(EFFECTS.measures) <= set(measures) <= set(EFFECTS.units)
    assert all(value > 0 for value in measures.values())


@pytest.mark.bench
def test_holdfast_flows_run_returns_every_compared_measure(tmp_path: Path) -> None:
    amount = FlowAmount(chain_s=0.1, steps=5, waking=20, lead_s=3.0)
    measures: dict[str, float] = {}
    with HoldfastFlows().turn(tmp_path) as turn:
        for part in FLOWS.parts:
            measures |= getattr(turn, part)(amount)
    assert set(measures) == set(FLOWS.units) - {"raw"}
    assert all(value > 0 for value in measures.values())


def test_rate_of_waking_flows_lasts_until_the_last_one_runs() -> None:
    assert rate_of([10.0, 500.0, 250.0]) == pytest.approx(6.0)


@pytest.mark.bench
@pytest.mark.timeout(120)
def test_bench_flows_saves_the_rate_of_every_tenth_of_the_sleepers(tmp_path: Path) -> None:
    file = tmp_path / "history.json"
    sizes = ["--sleepers", "100", "--waking", "20", "--steps", "20"]
    assert bench.main(["flows", *sizes, "--dir", str(tmp_path), "--save", str(file)]) == 0
    [run] = history.load(file)
    assert run["command"] == " ".join(["flows", *sizes])
    resume, sleepers = run["metrics"]
    assert resume["measures"]["resume_s"]["median"] > 0
    rates = sleepers["notes"]["rates"]
    assert len(rates) == len(sleepers["notes"]["latencies_ms"]) == 10
    assert sleepers["measures"]["flat"]["median"] == pytest.approx(
        max(rates) / min(rates), rel=0.05
    )
    assert sleepers["measures"]["wake_share"]["median"] > 0


@pytest.mark.bench
@pytest.mark.timeout(120)
def test_bench_telemetry_compares_each_mode_with_none(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    options = ["--rounds", "2", "--slice-s", "0.1", "--json", str(rows), "--dir", str(tmp_path)]
    assert bench.main(["telemetry", *options]) == 0
    found = json.loads(rows.read_text(encoding="utf-8"))
    modes = ["off", "control", "api", "sdk", "all"]
    assert [(row["part"], row["mode"]) for row in found] == [
        (part, mode) for part in ("tasks", "messages") for mode in modes
    ]
    assert all(row["us"] > 0 and row["ratio"] > 0 for row in found)
    assert {row["ratio"] for row in found if row["mode"] == "off"} == {1.0}


@pytest.mark.bench
@pytest.mark.timeout(120)
def test_bench_loop_lag_calls_tasks_flows_and_worlds_and_saves_its_run(tmp_path: Path) -> None:
    file = tmp_path / "history.json"
    options = ["--frozen-s", "0.3", "--repeats", "1", "--callers", "3", "--save", str(file)]
    assert bench.main(["loop_lag", *options]) in (0, 1)
    [run] = history.load(file)
    assert run["metrics"][0]["measures"]["p99_ms"]["median"] > 0
    called = run["metrics"][0]["notes"]["calls"]
    assert set(called) == {"call_tasks", "call_flows", "call_worlds"}
    assert all(count > 0 for count in called.values())


def test_bench_page_leaves_out_the_saved_runs_of_commands(tmp_path: Path) -> None:
    file, target = tmp_path / "history.json", tmp_path / "page.md"
    for name, command in (("one", ""), ("lag", "loop_lag --callers 3")):
        document = Record(name, "what", gather([{"rate": 5.0}], {"rate": "ops/s"})).document()
        history.save(history.entry([document], budget_s=0, load_before=0.1, command=command), file)
    assert report.main(file, target) == 0
    assert "| one |" in target.read_text()
    assert "| lag |" not in target.read_text()


@pytest.mark.bench
def test_holdfast_tasks_run_returns_every_measure(tmp_path: Path) -> None:
    amount = TaskAmount(
        seconds=0.1, batched=1000, small=100, large=300, drain_s=30.0, paced=10, idle_s=0.3
    )
    measures: dict[str, float] = {}
    with HoldfastTasks().turn(tmp_path) as turn:
        for part in TASKS.parts:
            measures |= getattr(turn, part)(amount)
    assert set(measures) == set(TASKS.units) - {"raw"}
    assert all(value > 0 for value in measures.values())


@pytest.mark.bench
@pytest.mark.timeout(300)
def test_holdfast_postgresql_run_returns_every_measure(shared_directory: Path) -> None:
    amount = PgAmount(
        Amount(per_key=2, hot=20, latency=5),
        EffectAmount(chain_s=0.1, steps=5, timers=20, spread_s=0.1, lead_s=3.0),
        TaskAmount(
            seconds=0.1, batched=1000, small=100, large=300, drain_s=30.0, paced=10, idle_s=0.3
        ),
    )
    measures: dict[str, float] = {}
    with serving(shared_directory), HoldfastOnPostgres().turn(shared_directory) as turn:
        for part in POSTGRES.parts:
            measures |= getattr(turn, part)(amount)
    assert set(POSTGRES.measures) - {"total"} <= set(measures) <= set(POSTGRES.units)
    assert all(value > 0 for value in measures.values())


@pytest.mark.bench
@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["tasks", "queue"])
def test_bench_churn_reports_each_minute_and_the_ratios(
    shared_directory: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    file = shared_directory / "churn.json"
    options = ["--what", what, "--backlogs", "50,200", "--minutes", "0.03", "--short", "0.03"]
    assert bench.main(["churn", *options, "--dir", str(shared_directory), "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert [minute["backlog"] for minute in document["minutes"]] == [50, 200]
    assert all(minute["rate"] > 0 for minute in document["minutes"])
    assert document["backlog 200 / 50"] > 0
    assert "last minute / first" in capsys.readouterr().out


@pytest.mark.bench
@pytest.mark.timeout(120)
def test_bench_single_stages_sum_to_the_total(
    shared_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = single.measure(shared_directory, 10, 100.0)
    assert measured
    *stages, whole, _ = single.STAGES
    for task in measured:
        assert sum(task[stage] for stage in stages) == pytest.approx(task[whole])
    assert (
        bench.main(["single", "--tasks", "5", "--per-s", "100,200", "--dir", str(shared_directory)])
        == 0
    )
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[-2:] == ["100/s", "200/s"]
    assert len(lines) == len(single.STAGES)


@pytest.mark.parametrize("command", ["churn", "footprint"])
def test_bench_commands_for_postgresql_reject_another_store(command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main([command, "--store", "./data"])
    assert ended.value.code == 2


def test_bench_churn_compares_minutes_and_backlogs() -> None:
    none = churn.Tables(0, 0, 0, 0, 0, 0)
    rates = {1_000: (100.0, 300.0), 1_000_000: (80.0, 40.0)}
    minutes = [
        churn.Minute(backlog, at + 1, rate, 0.0, none)
        for backlog, minute_rates in rates.items()
        for at, rate in enumerate(minute_rates)
    ]
    assert churn.ratios_of(minutes) == {
        "last minute / first, backlog 1,000": 3.0,
        "last minute / first, backlog 1,000,000": 0.5,
        "backlog 1,000,000 / 1,000": 0.3,
    }


@pytest.mark.bench
@pytest.mark.timeout(300)
def test_bench_footprint_has_a_line_for_each_kind(shared_directory: Path) -> None:
    file = shared_directory / "footprint.json"
    options = ["--items", "200", "--dir", str(shared_directory), "--json", str(file)]
    assert bench.main(["footprint", *options]) == 0
    lines = json.loads(file.read_text())
    assert [line["name"] for line in lines] == list(footprint.BODIES)
    assert all(line["wal_bytes"] > 0 and line["rows"] > 0 for line in lines)


@pytest.mark.bench
def test_bench_isolation_has_a_ratio_for_each_store_and_interface(shared_directory: Path) -> None:
    file = shared_directory / "isolation.json"
    options = [
        "--callers",
        "8",
        "--rounds",
        "1",
        "--dir",
        str(shared_directory),
        "--json",
        str(file),
    ]
    assert bench.main(["isolation", *options]) == 0
    lines = json.loads(file.read_text())
    assert [(line["store"], line["interface"]) for line in lines] == [
        (store, interface)
        for store in ("memory", "lmdb")
        for interface in ("threads", "coroutines", "http")
    ]
    assert all(line["ratio"] > 0 and line["failed"] == 0 for line in lines)


def test_tally_records_send_and_finish_times(tmp_path: Path) -> None:
    path = tmp_path / "done"
    assert tally.count(path) == 0
    sent = [time.monotonic_ns() for _ in range(3)]
    for at in sent:
        Tally(str(path)).mark(at)
    assert tally.count(path) == 3
    assert [sent_ns for sent_ns, _ in tally.records(path)] == sent
    assert all(done_ns >= sent_ns for sent_ns, done_ns in tally.records(path))


def test_used_processor_time_includes_ended_threads() -> None:
    before = processors.used_ns([os.getpid()])
    used: list[int] = []

    def work() -> None:
        while not used or used[-1] < 20_000_000:
            used.append(time.thread_time_ns())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert processors.used_ns([os.getpid()]) - before >= used[-1]


def test_processor_time_of_a_child_that_is_another_side_counts_once() -> None:
    command = "import time\nwhile time.process_time() < 0.2: pass\nprint(1, flush=True)\ninput()"
    child = subprocess.Popen(
        [sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"1\n"
        before = processors.used_ns([os.getpid()], without=[child.pid])
        used = processors.used_by_side({"client": [os.getpid()], "writer": [child.pid]})
        assert used["writer"] >= 200_000_000
        assert used["client"] - before < 100_000_000
        assert processors.used_ns([os.getpid()]) - before >= 200_000_000


def test_scaled_task_amount_keeps_the_backlog_sizes() -> None:
    small = TaskAmount().scaled(0.01)
    assert (small.small, small.large) == (10_000, 200_000)
    assert small.batched == 5_000
    assert small.seconds < TaskAmount().seconds


def test_spark_report_write_replaces_only_the_text_between_its_markers(tmp_path: Path) -> None:
    from bench.spark import report  # imports pyspark
    from bench.spark.faults import Line, ScenarioOutcome
    from bench.spark.speed import Figure

    page = tmp_path / "page.md"
    stage_result = ScenarioOutcome(4000, 4000, 4004, 4, 1.5)
    naive_result = ScenarioOutcome(0, 0, 360, 240, 4.0, "aborted")
    line = Line("poison", "50 rows", 208, stage_result, naive_result, True)
    figure = Figure("batch", "a million rows", [3.0, 2.0], [1.0, 2.0], ratio_max=3.0)
    for hosts, expected in ((True, "on two hosts"), (False, "two hosts need root")):
        table = report.faults([line], ["1 task"], 0.1, "make bench-spark", hosts=hosts)
        assert expected in table
        report.write("faults", table, page)
    page.write_text(page.read_text() + "\nby hand\n")
    report.write("speed", report.speed([figure], 0.1, "make bench-spark"), page)
    report.write("faults", "again", page)
    text = page.read_text()
    assert text.startswith("# Stage beside naive Spark")
    assert text.endswith("\nby hand\n")
    assert "| a million rows | 1.50 s | 2.50 s | 2.00 (1.00 … 3.00) | ≤ 3 × | yes |" in text
    assert "50 rows" not in text
    assert "<!-- faults:begin -->\nagain\n<!-- faults:end -->" in text
