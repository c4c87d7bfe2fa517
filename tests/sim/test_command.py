"""`holdfast sim`: exit status, what is printed, and that a failure can be seen again."""

from collections import Counter
from pathlib import Path

import pytest

from holdfast.sim import command, swarm
from holdfast.sim.sometimes import SEEDS_MIN, SOMETIMES, never

MUTANT = "timer: woken early"


def test_clean_seeds_are_told_and_exit_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seeds", "4", "--start", "30", "--jobs", "1"]) == 0
    told = capsys.readouterr().out
    assert "4 seeds from 30 on memory" in told
    assert "0 failed" in told
    assert "fault: crash before" in told


@pytest.mark.slow
def test_seeds_run_in_spawned_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seeds", "24", "--jobs", "2"]) == 0
    assert "24 seeds" in capsys.readouterr().out


@pytest.mark.slow
def test_a_violation_is_told_with_the_commands_that_show_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = swarm.first_kill((MUTANT, 20)).seed
    asked = ["--seed", str(seed), "--mutant", MUTANT, "--out", str(tmp_path)]
    assert command.main(asked) == 1
    told = capsys.readouterr().out
    assert f"holdfast sim --seed {seed}" in told
    [saved] = tmp_path.glob("*.json")
    # The name of the file ends with the checker whose violation was made shorter.
    violation = f"VIOLATION {saved.stem.rsplit('-', 1)[1]}"
    assert violation in told
    assert f"--replay {saved}" in told

    assert command.main(["--replay", str(saved)]) == 1
    assert violation in capsys.readouterr().out


def test_one_clean_seed_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seed", "3", "--backend", "lmdb"]) == 0
    assert "no violation" in capsys.readouterr().out


def test_what_never_happened_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = Counter(dict.fromkeys(SOMETIMES - {"fate: reboot"}, 1))
    assert never(seen) == ["fate: reboot"]
    nothing = swarm.Batch(SEEDS_MIN, 0, [], seen)
    monkeypatch.setattr(swarm, "run_many", lambda *args, **kwargs: nothing)
    assert command.main(["--seeds", str(SEEDS_MIN)]) == 2
    assert f"never happened in {SEEDS_MIN} seeds: fate: reboot" in capsys.readouterr().out


def test_a_run_stops_when_its_time_is_up() -> None:
    total = swarm.run_many(range(1000), jobs=1, until_ns=0)
    assert total.seeds == 0
