"""deploy/systemd and deploy/kubernetes: checked by systemd-analyze and kubernetes-validate, and against the commands."""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.app.runtime import ROLES
from holdfast.cli import COMMANDS
from holdfast.cli.up import EXIT_STUCK
from holdfast.workers.tasks.worker import STOP_GRACE_S
from tests.deploy.dockerfile import read_dockerfile
from tests.deploy.test_alerts import alert_tests, family_names, metric_names, promtool
from tests.processes import ROOT, require_programs

UNIT = ROOT / "deploy" / "systemd" / "holdfast.service"
KUBERNETES = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
COMPOSE = ROOT / "deploy" / "compose.yaml"
PROGRAM = Path(sys.executable).parent / "holdfast"
# The exposure that `systemd-analyze security` computes, in tenths. A service without sandbox has 92.
EXPOSURE_MAX = 25


def unit_file(directory: Path, change: tuple[str, str] = ("", "")) -> Path:
    """The unit with a program that exists on this machine."""
    text = UNIT.read_text().replace("/opt/holdfast/bin/holdfast", str(PROGRAM))
    path = directory / UNIT.name
    path.write_text(text.replace(*change))
    return path


def analyze(*words: object) -> subprocess.CompletedProcess[str]:
    try:
        require_programs("systemd-analyze")
    except AssertionError:
        raise AssertionError("systemd-analyze is missing: apt-get install -y systemd") from None
    line = ["systemd-analyze", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    done = analyze("verify", "--man=no", unit_file(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_rejects_a_unit_with_a_mistake(tmp_path: Path) -> None:
    done = analyze("verify", "--man=no", unit_file(tmp_path, ("Type=exec", "Typ=exec")))
    assert "Unknown key" in done.stderr


def test_unit_has_a_sandbox(tmp_path: Path) -> None:
    line = ("security", "--offline=true", f"--threshold={EXPOSURE_MAX}")
    done = analyze(*line, unit_file(tmp_path))
    assert done.returncode == 0, done.stdout[-300:]
    change = ("ProtectSystem=strict", "PrivateNetwork=no\nProtectSystem=no")
    less = unit_file(tmp_path, change)
    text = re.sub(
        r"(?m)^(Protect|Restrict|Private|System|Lock|NoNew|Capab).*\n", "", less.read_text()
    )
    less.write_text(text)
    assert analyze(*line, less).returncode == 1


def test_unit_restarts_a_worker_without_progress_and_waits_for_its_drain() -> None:
    settings = dict(re.findall(r"(?m)^(\w+)=(.*)$", UNIT.read_text()))
    assert settings["RestartForceExitStatus"] == str(EXIT_STUCK)
    assert int(settings["TimeoutStopSec"]) > STOP_GRACE_S


# -- kubernetes ------------------------------------------------------------------------------------


def manifests() -> list[dict[str, Any]]:
    return [one for path in KUBERNETES for one in yaml.safe_load_all(path.read_text())]


def deployments() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each deployment: its part, its pod and its container."""
    for one in manifests():
        if one["kind"] == "Deployment":
            pod = one["spec"]["template"]["spec"]
            yield one["metadata"]["labels"]["part"], pod, pod["containers"][0]


def validate(path: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "kubernetes-validate"
    line = [program, "--strict", path]
    return subprocess.run(line, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_manifest_fits_the_schema_of_kubernetes(path: Path) -> None:
    done = validate(path)
    lines = (done.stdout + done.stderr).splitlines()
    assert done.returncode == 0
    # The schema has no custom resources.
    known = "Couldn't find schema for kind ScaledObject"
    assert [line for line in lines if not line.startswith("INFO") and known not in line] == []


def test_schema_check_rejects_an_unknown_field(tmp_path: Path) -> None:
    [workers] = [path for path in KUBERNETES if path.name == "workers.yaml"]
    bad = tmp_path / "workers.yaml"
    bad.write_text(workers.read_text().replace("replicas: 2", "replica: 2"))
    assert validate(bad).returncode == 1


def test_deployments_run_every_role_once() -> None:
    roles = [
        word
        for _, _, container in deployments()
        for before, word in zip(container["command"], container["command"][1:], strict=False)
        if before == "--role"
    ]
    assert sorted(roles) == sorted(ROLES)


def test_commands_of_containers_parse() -> None:
    commands = [container["command"] for _, _, container in deployments()]
    services = yaml.safe_load(COMPOSE.read_text())["services"].values()
    commands += [service["command"] for service in services if "command" in service]
    commands.append(read_dockerfile(ROOT / "deploy" / "Dockerfile")[-1].command)
    assert len(commands) == 9
    for words in commands:
        assert words[0] == "holdfast"
        parser = argparse.ArgumentParser()
        importlib.import_module(COMMANDS[words[1]].module).configure(parser)
        parser.parse_args(words[2:])


def test_containers_run_without_privileges() -> None:
    uid = read_dockerfile(ROOT / "deploy" / "Dockerfile")[-1].user[0]
    for _, pod, container in deployments():
        assert pod["securityContext"]["runAsUser"] == uid
        assert pod["securityContext"]["runAsNonRoot"]
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert pod["terminationGracePeriodSeconds"] > STOP_GRACE_S


def test_every_deployment_has_probes_and_a_disruption_budget() -> None:
    budgets = {
        one["spec"]["selector"]["matchLabels"]["part"]
        for one in manifests()
        if one["kind"] == "PodDisruptionBudget"
    }
    parts = set()
    for part, _, container in deployments():
        parts.add(part)
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert budgets == parts


def test_scaling_targets_the_task_workers_by_waiting_and_running_tasks(tmp_path: Path) -> None:
    [scaled] = [one for one in manifests() if one["kind"] == "ScaledObject"]
    assert scaled["apiVersion"] == "keda.sh/v1alpha1"
    names = {one["metadata"]["name"] for one in manifests() if one["kind"] == "Deployment"}
    assert scaled["spec"]["scaleTargetRef"]["name"] in names
    [trigger] = scaled["spec"]["triggers"]
    assert trigger["type"] == "prometheus"
    query = trigger["metadata"]["query"]
    assert metric_names(query) <= family_names()
    assert float(trigger["metadata"]["threshold"]) > 0
    rule = {"groups": [{"name": "scaling", "rules": [{"record": "wanted:tasks", "expr": query}]}]}
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump(rule))
    values = {("a", "ready"): 70, ("b", "ready"): 70, ("a", "leased"): 5, ("a", "completed"): 900}
    inputs = [
        {
            "series": f'holdfast_tasks{{universe="shop",queue="q",instance="{instance}",state="{state}"}}',
            "values": f"{count}x5",
        }
        for (instance, state), count in values.items()
    ]
    expected = [{"labels": "wanted:tasks", "value": 75}]
    check = {"expr": "wanted:tasks", "eval_time": "2m", "exp_samples": expected}
    document = alert_tests([], rules) | {
        "tests": [{"interval": "1m", "input_series": inputs, "promql_expr_test": [check]}]
    }
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump(document))
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr
