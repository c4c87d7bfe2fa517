"""The metrics of a store: every sample equals what the store holds, and the number of series is bounded."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import holdfast as hf
import holdfast.store
from holdfast.clock import SYSTEM, S
from holdfast.durable import inbox, queue
from holdfast.effects import budget
from holdfast.ops.metrics.exposition import MetricsPage
from holdfast.ops.metrics.families import FAMILIES, STORE_FAMILIES, MetricScope, MetricType
from holdfast.ops.metrics.runner_metrics import RunnerReading
from holdfast.ops.metrics.store_samples import OTHER, UNIVERSES_MAX, VALUES_MAX, read_samples
from holdfast.runner.counters import RunnerCounters
from holdfast.runner.error_policy import ErrorKind
from holdfast.store.api import Store
from holdfast.workers.space_census import take_census
from holdfast.workers.space_kinds import KINDS
from holdfast.world import catalog
from tests.process.watch import until
from tests.tidy_rules import ROOT

SERIES_MAX = 5_000


class Metered(hf.Event):
    amount: int


class MeteredWorld(hf.World):
    balance: int = 0

    @hf.on(Metered)
    def metered(self, event: Metered, cx: hf.Context) -> None:
        if event.amount < 0:
            raise ValueError("negative")
        self.balance += event.amount
        cx.after(300, Metered(0))
        cx.reply(self.balance)
        cx.do(charge, event.amount)


@hf.effect("charge")
def charge(call: hf.Call, amount: int) -> int:
    return amount


@hf.task(queue="mails")
def send_mail(to: str) -> str:
    return to


@hf.flow
async def order(number: int) -> int:
    await hf.receive(Metered)
    return number


APP = hf.App("shop", worlds=[MeteredWorld], effects=[charge], tasks=[send_mail], flows=[order])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with holdfast.store.open(str(tmp_path / "store")) as opened:
        yield opened


Values = dict[tuple[str, tuple[str, ...]], float]


def values_of(store: Store) -> Values:
    samples = store.read(read_samples, SYSTEM.wall_ns())
    values = {(sample.family, sample.labels): sample.value for sample in samples}
    assert len(values) == len(samples)
    return values


def test_samples_of_a_store_equal_its_contents(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    with APP.open(url, roles=("orchestrator", "world", "timer")) as rt:
        account = rt.world(MeteredWorld, "ada")
        assert account.ask(Metered(5)) == 5
        account.send(Metered(-1))
        until(lambda: account.height() == 2, "the failed event")
        rt.submit(send_mail, "ada")
        rt.submit(send_mail, "bob")
        rt.start(order, 1)
    with holdfast.store.open(url) as store:
        store.transact(budget.set_limit, "shop", budget.UNIVERSE_SCOPE, budget.MONEY, 2_500_000)
        values = values_of(store)
    assert values["holdfast_worlds", ("shop", "active")] == 1
    assert values["holdfast_effects", ("shop", "charge", "ready")] == 1
    assert values["holdfast_effects_done_total", ("shop", "charge")] == 0
    assert values["holdfast_timers", ("shop", "store", "pending")] == 1
    assert values["holdfast_tasks", ("shop", "mails", "ready")] == 2
    assert values["holdfast_tasks", ("shop", "mails", "dead")] == 0
    assert values["holdfast_task_limit", ("shop", "mails")] == 0
    assert values["holdfast_flows", ("shop", "order", "running")] == 1
    assert values["holdfast_budget_limit", ("shop", "money")] == 2.5
    assert ("holdfast_budget_limit", ("shop", "tokens")) not in values
    assert values["holdfast_inbox_events", ("shop",)] == 0
    assert values["holdfast_inbox_oldest_seconds", ("shop",)] == 0
    assert values["holdfast_failed_events", ("shop",)] == 1
    assert values["holdfast_timer_lateness_seconds", ("shop",)] == 0


def test_kinds_of_the_last_census_are_samples(store: Store) -> None:
    names = (
        "holdfast_store_kind_rows",
        "holdfast_store_kind_bytes",
        "holdfast_store_census_age_seconds",
    )
    assert not {family for family, _ in values_of(store)}.intersection(names)
    for universe in ("shop", "bank"):
        store.transact(queue.put, f"{universe}/effects/charge", b"x")
    figures = [one for one in take_census(store, "test").figures if one.kind == "effects"]
    values = values_of(store)
    rows, size, age = (names[0], ("effects",)), (names[1], ("effects",)), (names[2], ())
    assert (len(figures), values[rows]) == (2, sum(one.rows for one in figures))
    assert values[size] == sum(one.bytes for one in figures)
    assert values[age] >= 0
    # A label has at most 40 values.
    assert len(KINDS) <= VALUES_MAX


def test_unread_events_are_counted_with_their_age(store: Store) -> None:
    store.transact(catalog.create, "shop", "MeteredWorld", "ada", "w1")
    subject = catalog.subject_of("shop", "w1")
    store.transact(inbox.put, subject, None, b"one")
    store.transact(inbox.put, subject, None, b"two")
    store.transact(catalog.mark_runnable, "shop", "w1")
    [entry] = store.read(inbox.read, subject, 1)
    before_ns = store.now_ns()
    values = values_of(store)
    assert values["holdfast_inbox_worlds", ("shop",)] == 1
    assert values["holdfast_inbox_events", ("shop",)] == 2
    oldest_s = values["holdfast_inbox_oldest_seconds", ("shop",)]
    assert (before_ns - entry.at_ns) / S <= oldest_s <= (store.now_ns() - entry.at_ns) / S


def test_due_timers_of_both_clocks_are_late(store: Store) -> None:
    store.transact(catalog.create, "shop", "MeteredWorld", "ada", "w1")
    store.transact(queue.put, "shop/timers", b"", not_before_ns=store.now_ns() + S)
    values = values_of(store)
    assert values["holdfast_timers", ("shop", "store", "pending")] == 1
    assert values["holdfast_timer_lateness_seconds", ("shop",)] == 0
    samples = store.read(read_samples, SYSTEM.wall_ns())
    store.transact(queue.put, "shop/timers/calendar", b"", not_before_ns=SYSTEM.wall_ns() + S)
    later = {
        sample.family: sample.value
        for sample in store.read(read_samples, SYSTEM.wall_ns() + 61 * S)
        if sample.family == "holdfast_timer_lateness_seconds"
    }
    assert samples
    assert 59 < later["holdfast_timer_lateness_seconds"] < 61


def test_series_are_bounded_and_their_sums_complete(store: Store, tmp_path: Path) -> None:
    """10,000 worlds, 1,000 queues of tasks, 1,000 kinds of effects."""

    def fill_worlds(txn: object, start: int) -> None:
        for number in range(start, start + 1_000):
            catalog.create(txn, "shop", "MeteredWorld", f"a{number}", f"w{number}")  # type: ignore[arg-type]

    for start in range(0, 10_000, 1_000):
        store.transact(fill_worlds, start)
    for number in range(1_000):
        store.transact(queue.put, f"shop/effects/kind{number:04}", b"")
    definitions = [hf.task(name=f"t{n}", queue=f"q{n:04}")(lambda: None) for n in range(1_000)]
    app = hf.App("shop", tasks=definitions)
    with app.open(str(tmp_path / "store"), roles=()) as rt:
        for definition in definitions:
            rt.submit(definition)
    values = values_of(store)
    assert len(values) < SERIES_MAX
    kinds = {labels[1] for family, labels in values if family == "holdfast_effects"}
    assert len(kinds) == VALUES_MAX + 1
    assert OTHER in kinds
    for family in ("holdfast_effects", "holdfast_tasks"):
        ready = [
            value
            for (name, labels), value in values.items()
            if name == family and labels[2] == "ready"
        ]
        assert sum(ready) == 1_000
        assert values["holdfast_metrics_truncated", (family,)] == 1
    assert values["holdfast_worlds", ("shop", "active")] == 10_000


def test_name_of_the_rest_makes_no_second_series(store: Store) -> None:
    store.transact(catalog.create, "shop", "MeteredWorld", "ada", "w1")
    for kind in (OTHER, "charge"):
        store.transact(queue.put, f"shop/effects/{kind}", b"")
    values = values_of(store)
    assert values["holdfast_effects", ("shop", OTHER, "ready")] == 1
    assert values["holdfast_effects", ("shop", "charge", "ready")] == 1


def test_universes_beyond_the_bound_are_reported_as_left_out(store: Store) -> None:
    for number in range(UNIVERSES_MAX + 5):
        store.transact(catalog.create, f"u{number:02}", "MeteredWorld", "ada", f"w{number}")
    values = values_of(store)
    assert values["holdfast_universes", ()] == UNIVERSES_MAX + 5
    exported = {labels[0] for family, labels in values if family == "holdfast_worlds"}
    assert exported == {f"u{number:02}" for number in range(UNIVERSES_MAX)}
    left_out = {labels[0] for family, labels in values if family == "holdfast_metrics_truncated"}
    assert left_out == {one.name for one in STORE_FAMILIES if "universe" in one.labels}


def test_page_has_every_family_with_its_type_and_is_valid_for_prometheus(
    store: Store, tmp_path: Path
) -> None:
    counters = RunnerCounters()
    counters.count_attempt(ErrorKind.SUCCESS, 3_000_000)
    counters.count_attempt(ErrorKind.TRANSIENT, 90_000_000_000)
    counters.add("requeues")
    page = MetricsPage(
        store, worker="w1", runners=lambda: [RunnerReading("shop/mail", counters.snapshot())]
    )
    store.transact(catalog.create, "shop", "MeteredWorld", "ada", "w1")
    content_type, body = page.render()
    assert content_type.startswith("text/plain; version=")
    metrics = {metric.name: metric for metric in text_string_to_metric_families(body.decode())}
    runner = {
        (sample.name, sample.labels.get("outcome", sample.labels.get("le"))): sample.value
        for sample in metrics["holdfast_runner_attempt_seconds"].samples
        + metrics["holdfast_runner_attempts"].samples
    }
    assert runner["holdfast_runner_attempts_total", "successes"] == 1
    assert runner["holdfast_runner_attempts_total", "transients"] == 1
    assert runner["holdfast_runner_attempt_seconds_bucket", "0.005"] == 1
    assert runner["holdfast_runner_attempt_seconds_bucket", "60.0"] == 1
    assert runner["holdfast_runner_attempt_seconds_bucket", "+Inf"] == 2
    assert runner["holdfast_runner_attempt_seconds_sum", None] == pytest.approx(90.003)
    for family in FAMILIES:
        found = metrics.get(family.name.removesuffix("_total"))
        if found is not None:
            assert found.type == family.type.value
            assert found.documentation == family.help
    assert metrics["holdfast_commits"].samples[0].value >= 1
    assert metrics["process_open_fds"].samples
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: apt-get install -y prometheus"
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=body, capture_output=True, check=False
    )
    ours = [line for line in checked.stderr.decode().splitlines() if line.startswith("holdfast")]
    assert not ours, ours
    assert checked.returncode in (0, 3), checked.stderr.decode()


def test_openmetrics_is_answered_when_it_is_accepted(store: Store) -> None:
    content_type, body = MetricsPage(store).render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_names_follow_the_conventions_of_prometheus() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    for family in FAMILIES:
        assert re.fullmatch(r"holdfast_[a-z_]+", family.name)
        assert family.name.endswith("_total") == (family.type is MetricType.COUNTER)
        assert family.help.endswith(".")
        if family.scope is MetricScope.PROCESS:
            assert family.labels[0] == "worker"
        else:
            assert "worker" not in family.labels
    assert STORE_FAMILIES


def test_documented_metrics_are_the_exported_ones() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(holdfast_\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", page, re.M)
    assert documented == [
        (
            family.name,
            family.type.value,
            ", ".join(f"`{label}`" for label in family.labels),
            family.help,
        )
        for family in FAMILIES
    ]
