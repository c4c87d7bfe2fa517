"""deploy/grafana/dashboard.json: its queries parse, name only existing metrics and labels, and show every metric."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.ops.metrics.families import BY_NAME, FAMILIES
from tests.deploy.test_alerts import family_names, metric_names, promtool
from tests.processes import ROOT

DASHBOARD = ROOT / "deploy" / "grafana" / "dashboard.json"
COLUMNS = 24


def panels() -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return listed


def targets() -> list[tuple[str, str]]:
    """Each query with its legend."""
    return [
        (target["expr"], target["legendFormat"])
        for panel in panels()
        for target in panel.get("targets", [])
    ]


def label_breaches(expression: str, legend: str) -> list[str]:
    """Labels of a query that its metrics do not have, and labels of the legend that the query drops."""
    metrics = {re.sub(r"_(bucket|sum|count)$", "", name) for name in metric_names(expression)}
    known = {"job", "instance", "le"}.union(*(BY_NAME[name].labels for name in metrics))
    grouped = {
        label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")
    }  # fmt: skip
    matched = set(re.findall(r"(\w+)\s*=~?\"", expression))
    shown = set(re.findall(r"{{(\w+)}}", legend))
    return sorted((grouped | matched) - known) + sorted(shown - grouped)


def test_queries_name_only_existing_metrics() -> None:
    unknown = {name for expression, _ in targets() for name in metric_names(expression)}
    assert unknown - family_names() == set()


def test_every_metric_is_on_the_dashboard() -> None:
    text = " ".join(expression for expression, _ in targets())
    assert [family.name for family in FAMILIES if family.name not in text] == []


def test_queries_use_only_labels_of_their_metrics() -> None:
    for expression, legend in targets():
        assert label_breaches(expression, legend) == [], expression


@pytest.mark.parametrize(
    ("expression", "legend", "breaches"),
    [
        ("max by (universe) (holdfast_ready)", "{{universe}}", []),
        ("max by (world) (holdfast_ready)", "", ["world"]),
        ("max by (universe) (holdfast_tasks)", "{{queue}}", ["queue"]),
        ('max by (queue) (holdfast_tasks{kind="x"})', "", ["kind"]),
    ],
)
def test_label_check_finds_wrong_labels(expression: str, legend: str, breaches: list[str]) -> None:
    assert label_breaches(expression, legend) == breaches


def test_promtool_parses_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$universe", ".*")}
        for number, (expression, _) in enumerate(targets())
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = promtool("check", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_panels_have_titles_and_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        assert panel["title"]
        assert place["x"] + place["w"] <= COLUMNS
        covered = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert cells.isdisjoint(covered), panel["title"]
        cells |= covered
    assert len({panel["id"] for panel in panels()}) == len(panels())
