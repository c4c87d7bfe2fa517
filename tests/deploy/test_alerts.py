"""deploy/prometheus: promtool checks the rules. Each alert fires on its fault and not on the series beside it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from holdfast.ops.metrics import families
from holdfast.ops.metrics.families import MetricType
from tests.processes import ROOT, require_programs

PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = PROMETHEUS / "alerts.yaml"
# Series of Prometheus itself.
FOREIGN = {"up"}
_SUFFIXES = {MetricType.HISTOGRAM: ("_bucket", "_sum", "_count")}


class AlertCase(NamedTuple):
    """Series of a fault and of a healthy store. `at` is when the alert is evaluated."""

    alert: str
    fault: dict[str, str]
    healthy: dict[str, str]
    labels: dict[str, str]
    at: str = "30m"


def series(name: str, **labels: str) -> str:
    text = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{text}}}"


def both_servers(name: str, values: str, **labels: str) -> dict[str, str]:
    """The same series from two servers of a store."""
    return {
        series(name, job="holdfast", instance=instance, **labels): values
        for instance in ("a:8787", "b:8787")
    }


def case(
    alert: str, name: str, fault: str, healthy: str, at: str = "30m", **labels: str
) -> AlertCase:
    """A case with one gauge: the labels of the alert are those of the gauge without `of` and `state`."""
    selected = {"universe": "shop", **labels}
    shown = {key: value for key, value in selected.items() if key not in ("state", "status")}
    return AlertCase(
        alert, both_servers(name, fault, **selected), both_servers(name, healthy, **selected), shown, at
    )  # fmt: skip


CASES = [
    AlertCase(
        "HoldfastTargetDown",
        {series("up", job="holdfast", instance="a:8787"): "1 0x40"},
        {series("up", job="holdfast", instance="a:8787"): "0 1x40", series("up", job="node"): "0x40"},
        {"job": "holdfast", "instance": "a:8787"},
    ),
    case("HoldfastNotReady", "holdfast_ready", "0x40", "1x40"),
    case("HoldfastLeaderMissing", "holdfast_leader_lease_seconds", "4 0x40", "4x40"),
    case("HoldfastNoLiveWorker", "holdfast_workers", "0x40", "1x40", state="live"),
    case("HoldfastWorldsParked", "holdfast_worlds", "3x40", "0x40", status="parked"),
    AlertCase(
        "HoldfastWorldsStopped",
        both_servers("holdfast_readiness_blockers", "2x40", universe="shop", code="code_missing"),
        both_servers("holdfast_readiness_blockers", "2x40", universe="shop", code="world_paused"),
        {"universe": "shop"},
    ),
    case("HoldfastFlowsParked", "holdfast_flows", "1x40", "0x40", state="parked", flow="trip"),
    case("HoldfastInboxOld", "holdfast_inbox_oldest_seconds", "310x40", "290x40"),
    case("HoldfastTimersLate", "holdfast_timer_lateness_seconds", "61x40", "59x40"),
    case("HoldfastSchedulesLate", "holdfast_schedule_lateness_seconds", "61x40", "59x40"),
    AlertCase(
        "HoldfastTasksWaiting",
        {
            **both_servers("holdfast_tasks", "7x40", universe="shop", queue="q", state="ready"),
            **both_servers("holdfast_tasks", "0x40", universe="shop", queue="q", state="leased"),
            **both_servers("holdfast_tasks", "1x40", universe="shop", queue="r", state="leased"),
        },
        {
            **both_servers("holdfast_tasks", "7x40", universe="shop", queue="q", state="ready"),
            **both_servers("holdfast_tasks", "1x40", universe="shop", queue="q", state="leased"),
        },
        {"universe": "shop", "queue": "q"},
    ),
    case("HoldfastMailWaiting", "holdfast_mail_waiting", "1x40", "0x40", to="accounts"),
    AlertCase(
        "HoldfastBudgetNearlyUsed",
        {
            **both_servers("holdfast_budget_spent", "80x40", universe="shop", unit="money"),
            **both_servers("holdfast_budget_reserved", "11x40", universe="shop", unit="money"),
            **both_servers("holdfast_budget_limit", "100x40", universe="shop", unit="money"),
        },
        {
            **both_servers("holdfast_budget_spent", "80x40", universe="shop", unit="money"),
            **both_servers("holdfast_budget_reserved", "9x40", universe="shop", unit="money"),
            **both_servers("holdfast_budget_limit", "100x40", universe="shop", unit="money"),
        },
        {"universe": "shop", "unit": "money"},
    ),
    AlertCase(
        "HoldfastStoreNearlyFull",
        both_servers("holdfast_store_bytes", "81x40") | both_servers("holdfast_store_limit_bytes", "100x40"),
        both_servers("holdfast_store_bytes", "79x40") | both_servers("holdfast_store_limit_bytes", "100x40"),
        {"job": "holdfast"},
    ),
    AlertCase(
        "HoldfastStoreNearlyFull",
        both_servers("holdfast_store_disk_free_bytes", "1900000000x40"),
        both_servers("holdfast_store_disk_free_bytes", "2100000000x40"),
        {"job": "holdfast"},
    ),
    AlertCase(
        "HoldfastClaimsLost",
        {series("holdfast_runner_claims_lost_total", worker="w", queue="mail"): "0+1x40"},
        {series("holdfast_runner_claims_lost_total", worker="w", queue="mail"): "7x40"},
        {"queue": "mail"},
    ),
    AlertCase(
        "HoldfastMetricsTruncated",
        both_servers("holdfast_metrics_truncated", "1x40", family="holdfast_tasks"),
        both_servers("holdfast_metrics_truncated", "0x40", family="holdfast_tasks"),
        {"family": "holdfast_tasks"},
    ),
    # A counter that appears, one that grows, and one that has grown before.
    *(
        AlertCase(
            "HoldfastDeadLettersGrowing",
            both_servers(name, values, universe="shop", **labels),
            both_servers(name, "5x40", universe="shop", **labels),
            {"universe": "shop"},
        )
        for name, labels in (
            ("holdfast_effects", {"kind": "card", "state": "dead"}),
            ("holdfast_failed_events", {}),
            ("holdfast_timers", {"clock": "store", "state": "dead"}),
            ("holdfast_tasks", {"queue": "q", "state": "failed"}),
            ("holdfast_tasks", {"queue": "q", "state": "dead"}),
            ("holdfast_flows", {"flow": "trip", "state": "dead"}),
        )
        for values in ("1x22 2x40", "0x25 3x40")
    ),
]  # fmt: skip


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load(RULES.read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def promtool(*words: object) -> subprocess.CompletedProcess[str]:
    require_promtool()
    line = ["promtool", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, check=False, cwd=PROMETHEUS)


def require_promtool() -> None:
    try:
        require_programs("promtool")
    except AssertionError:
        raise AssertionError("promtool is missing: apt-get install -y prometheus") from None


def alert_tests(cases: list[AlertCase], rules_file: Path) -> dict[str, Any]:
    """A file for `promtool test rules`: each case with its fault and without it."""
    tests = []
    rule_of = alerts()
    for one in cases:
        severity = rule_of[one.alert]["labels"]["severity"]
        for values, fires in ((one.fault, True), (one.healthy, False)):
            expected = [{"exp_labels": {"severity": severity, **one.labels}}] if fires else []
            tests.append(
                {
                    "interval": "1m",
                    "input_series": [
                        {"series": name, "values": value} for name, value in values.items()
                    ],
                    "alert_rule_test": [
                        {"eval_time": one.at, "alertname": one.alert, "exp_alerts": expected}
                    ],
                }
            )
    return {"rule_files": [str(rules_file)], "evaluation_interval": "1m", "tests": tests}


def without_texts(directory: Path, change: tuple[str, str] = ("", "")) -> Path:
    """The rules without annotations, whose texts promtool would compare, too."""
    document = yaml.safe_load(RULES.read_text().replace(*change))
    for group in document["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)
    path = directory / "rules.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def run_alert_tests(
    directory: Path, cases: list[AlertCase], change: tuple[str, str] = ("", "")
) -> subprocess.CompletedProcess[str]:
    file = directory / "tests.yaml"
    file.write_text(yaml.safe_dump(alert_tests(cases, without_texts(directory, change))))
    return promtool("test", "rules", file)


def test_promtool_accepts_the_rules() -> None:
    done = promtool("check", "rules", RULES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_sample_configuration(tmp_path: Path) -> None:
    for name in ("prometheus.yaml", "alerts.yaml"):
        (tmp_path / name).write_bytes((PROMETHEUS / name).read_bytes())
    (tmp_path / "token").write_text("a-token")
    done = promtool("check", "config", tmp_path / "prometheus.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_on_its_fault_and_only_then(tmp_path: Path) -> None:
    assert {one.alert for one in CASES} == alerts().keys()
    done = run_alert_tests(tmp_path, CASES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("alert", "change"),
    [
        ("HoldfastNotReady", ("(holdfast_ready) == 0", "(holdfast_ready) == 1")),
        ("HoldfastInboxOld", ("> 300", "> 320")),
    ],
)
def test_alert_tests_reject_a_wrong_rule(
    tmp_path: Path, alert: str, change: tuple[str, str]
) -> None:
    assert change[0] in RULES.read_text()
    cases = [one for one in CASES if one.alert == alert]
    assert run_alert_tests(tmp_path, cases, change).returncode == 1


def metric_names(expression: str) -> set[str]:
    """The names of the metrics of an expression, without recording rules."""
    text = re.sub(r'"[^"]*"', "", expression)
    return set(re.findall(r"(?<![\w:])(?:holdfast_[a-z_]+|up)(?![\w:])", text))


def family_names() -> set[str]:
    return {
        family.name + suffix
        for family in families.FAMILIES
        for suffix in _SUFFIXES.get(family.type, ("",))
    }


def test_rules_name_only_existing_metrics() -> None:
    for rule in rules():
        unknown = metric_names(rule["expr"]) - family_names() - FOREIGN
        assert not unknown, rule


def test_every_alert_has_a_severity_a_summary_and_a_runbook() -> None:
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), name
        words = re.sub(r"(?<!^)(?=[A-Z])", "-", name.removeprefix("Holdfast")).lower()
        assert rule["annotations"]["runbook"] == f"docs/runbooks/{words}.md"
        assert rule["annotations"]["summary"]
