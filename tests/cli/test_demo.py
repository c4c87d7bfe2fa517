"""`holdfast demo`: it tells the truth, or fails."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from holdfast.cli import demo, demo_agent
from tests.cli.conftest import Run
from tests.processes import Proc

DEMO_S = 300
ACT_S = 100


@pytest.mark.slow
@pytest.mark.timeout(DEMO_S)
def test_the_demo_holds_what_it_claims(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "store"
    command = [sys.executable, "-m", "holdfast.cli", "demo", "--store", str(path), "--json"]
    with Proc.spawn(command, ready=None) as process:
        assert process.wait(DEMO_S) == 0, "\n".join(process.errors)
        outcome = json.loads("\n".join(process.lines))
        assert "all of it holds" in "\n".join(process.errors)
    assert all(claim["holds"] for claim in outcome["claims"])
    assert len(outcome["claims"]) > 10
    # What it says to look at is there.
    letter = run("dead", "show", "orders", outcome["poison_seq"], "--store", path, "--json")
    assert "-1 cents" in letter.document["error"]
    counts = run("store", "info", "--store", path, "--json").document["queues"]
    [orders] = [one for one in counts if one["queue"] == "orders"]
    assert (orders["done"], orders["dead"]) == (1000, 1)


@pytest.mark.slow
@pytest.mark.timeout(ACT_S)
def test_the_agent_of_the_demo_does_what_its_act_claims(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "store"
    play = demo.Demo(path, demo.Story(sys.stderr))
    demo_agent.play(path, play.story.tell, play._claim)
    assert [claim for claim in play.claims if not claim["holds"]] == []
    assert len(play.claims) == 10
    ran = run("worlds", "journal", "Agent/ada", "--store", path, "--json")
    assert [entry["type"] for entry in ran.document["entries"]].count("llm.chat") == 3


def test_without_httpx_the_act_is_left_out_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    told: list[str] = []
    demo_agent.play(tmp_path, told.append, lambda *claim: pytest.fail(str(claim)))
    assert told == [
        "The fourth act is left out: it needs httpx. pip install 'holdfast[ops]'",
    ]


def test_the_demo_keeps_away_from_a_store_that_is_there(
    run: Run, path: Path, letters: list[int]
) -> None:
    ran = run("demo", "--store", path)
    assert ran.code == 1
    assert ran.error.endswith("give it a directory without a store)")


def test_a_claim_that_does_not_hold_is_told(tmp_path: Path) -> None:
    play = demo.Demo(tmp_path, demo.Story(sys.stderr))
    play._claim("orders done", 999, 1000)
    play._claim("charged", 7, True)
    assert [claim["holds"] for claim in play.claims] == [False, True]
