"""`holdfast demo`: every claim that it prints holds, or it exits with an error."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from examples.demo import agent_part
from examples.demo.command import Demo, DemoOutput
from tests.cli.conftest import RunCommand
from tests.processes import ROOT, Proc

DEMO_S = 300
ACT_S = 100


@pytest.mark.slow
@pytest.mark.timeout(DEMO_S)
def test_demo_claims_all_hold(tmp_path: Path, run: RunCommand) -> None:
    # They import Spark.
    from tests.spark.class_archive import jvm_options
    from tests.spark.conftest import WARM

    settings = " ".join(f"--conf {name}={value}" for name, value in WARM.items())
    env = {
        "SPARK_SUBMIT_OPTS": jvm_options(),
        "PYSPARK_SUBMIT_ARGS": f"{settings} pyspark-shell",
        # Of Spark's Python processes.
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    }
    path = tmp_path / "store"
    command = [sys.executable, "-m", "holdfast.cli", "demo", "--store", str(path), "--json"]
    with Proc.spawn(command, ready=None, env=env) as process:
        assert process.wait(DEMO_S) == 0, "\n".join(process.errors)
        outcome = json.loads("\n".join(process.lines))
        assert "all claims hold" in "\n".join(process.errors)
    assert all(claim["holds"] for claim in outcome["claims"])
    assert len(outcome["claims"]) > 10
    # The rows that the demo refers to exist.
    letter = run("dead", "show", "orders", outcome["poison_seq"], "--store", path, "--json")
    assert "-1 cents" in letter.document["error"]
    counts = run("store", "info", "--store", path, "--json").document["queues"]
    [orders] = [row for row in counts if row["queue"] == "orders"]
    assert (orders["done"], orders["dead"]) == (1000, 1)


@pytest.mark.slow
@pytest.mark.timeout(ACT_S)
def test_demo_agent_part_claims_all_hold(tmp_path: Path, run: RunCommand) -> None:
    path = tmp_path / "store"
    play = Demo(path, DemoOutput(sys.stderr))
    agent_part.run_part(path, play.story.print_step, play._claim)
    assert [claim for claim in play.claims if not claim["holds"]] == []
    assert len(play.claims) == 11
    result = run("flows", "steps", "buy/ada", "--store", path, "--json")
    assert [step["name"] for step in result.document["steps"]].count("llm.chat") == 3


def test_demo_agent_part_is_skipped_with_a_message_without_httpx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    printed: list[str] = []
    agent_part.run_part(tmp_path, printed.append, lambda *claim: pytest.fail(str(claim)))
    assert printed == [
        "Part 4 is skipped: it needs httpx. pip install 'holdfast[ops]'",
    ]


def test_demo_refuses_an_existing_store(run: RunCommand, path: Path, letters: list[int]) -> None:
    result = run("demo", "--store", path)
    assert result.code == 1
    assert result.error.endswith("give it a directory without a store)")


def test_demo_claim_records_whether_it_holds(tmp_path: Path) -> None:
    play = Demo(tmp_path, DemoOutput(sys.stderr))
    play._claim("orders done", 999, 1000)
    play._claim("charged", 7, True)
    assert [claim["holds"] for claim in play.claims] == [False, True]
