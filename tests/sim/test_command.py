"""`holdfast sim`: exit status, output and replay of a failure."""

from collections import Counter
from pathlib import Path

import pytest

from holdfast.flows.states import FlowState
from tests.simulation import command, killers, swarm
from tests.simulation.coverage import COVERAGE_POINTS, SEEDS_MIN, uncovered_points

MUTANT = "delayed item: is promoted one second early"


def test_sim_command_reports_clean_seeds_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seeds", "4", "--start", "30", "--jobs", "1"]) == 0
    output = capsys.readouterr().out
    assert "4 seeds from 30 on memory" in output
    assert "0 failed" in output
    assert "fault: crash before" in output


@pytest.mark.slow
def test_sim_command_runs_seeds_in_spawned_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seeds", "24", "--jobs", "2"]) == 0
    assert "24 seeds" in capsys.readouterr().out


@pytest.mark.slow
def test_sim_command_prints_commands_that_replay_a_violation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = killers.load()[MUTANT].seed
    argv = ["--seed", str(seed), "--mutant", MUTANT, "--out", str(tmp_path)]
    assert command.main(argv) == 1
    output = capsys.readouterr().out
    assert f"holdfast sim --seed {seed}" in output
    [saved] = tmp_path.glob("*.json")
    # The file name ends with the checker whose violation was shrunk.
    violation = f"VIOLATION {saved.stem.rsplit('-', 1)[1]}"
    assert violation in output
    assert f"--replay {saved}" in output

    assert command.main(["--replay", str(saved)]) == 1
    assert violation in capsys.readouterr().out


def test_sim_command_exits_0_for_one_clean_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seed", "3", "--backend", "lmdb"]) == 0
    assert "no violation" in capsys.readouterr().out


def test_sim_command_lists_uncovered_points_and_exits_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = Counter(dict.fromkeys(COVERAGE_POINTS - {"fate: reboot"}, 1))
    assert uncovered_points(seen) == ["fate: reboot"]
    batch = swarm.SeedSummary(SEEDS_MIN, 0, [], seen)
    monkeypatch.setattr(swarm, "run_many", lambda *args, **kwargs: batch)
    assert command.main(["--seeds", str(SEEDS_MIN)]) == 2
    assert f"never happened in {SEEDS_MIN} seeds: fate: reboot" in capsys.readouterr().out


def test_run_many_stops_at_its_deadline() -> None:
    total = swarm.run_many(range(1000), jobs=1, until_ns=0)
    assert total.seeds == 0


@pytest.mark.parametrize(
    "point",
    [
        *(f"flow: in state {state.name}" for state in FlowState),
        *(f"schedule: occurrence in state {state}" for state in ("QUEUED", "STARTED", "SKIPPED")),
    ],
)
def test_each_state_of_flows_and_occurrences_must_occur(point: str) -> None:
    seen = Counter(dict.fromkeys(COVERAGE_POINTS, 1))
    seen[point] = 0
    assert uncovered_points(seen) == [point]
