"""The choice tape of a run: recording, replay, saving and shrinking."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.sim import choice_tape
from holdfast.sim.choice_tape import ChoiceTape


def test_tape_draws_are_deterministic_per_seed() -> None:
    first, second = ChoiceTape(5), ChoiceTape(5)
    assert [first.draw(100) for _ in range(50)] == [second.draw(100) for _ in range(50)]


def test_replayed_tape_returns_the_recorded_draws() -> None:
    recorded = ChoiceTape(5)
    drawn = [recorded.draw(n) for n in range(1, 50)]
    again = ChoiceTape.replay(recorded.choices)
    assert [again.draw(n) for n in range(1, 50)] == drawn


def test_exhausted_tape_returns_zero_and_false() -> None:
    exhausted = ChoiceTape.replay([])
    assert [exhausted.draw(9), exhausted.pick("abc"), exhausted.chance(999)] == [0, "a", False]


def test_tape_chance_has_the_given_probability() -> None:
    drawn = ChoiceTape(1)
    assert 150 < sum(drawn.chance(200) for _ in range(1000)) < 250
    assert not any(drawn.chance(0) for _ in range(1000))
    assert all(drawn.chance(1000) for _ in range(1000))


def test_saved_tape_is_loaded_with_its_metadata(tmp_path: Path) -> None:
    choice_tape.save_tape(tmp_path / "t.json", [1, 2, 3], seed=9, mutant=None)
    assert choice_tape.load_tape(tmp_path / "t.json") == {
        "format": 1,
        "seed": 9,
        "mutant": None,
        "tape": [1, 2, 3],
    }


def test_load_rejects_a_file_that_is_not_a_tape(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"format": 2}')
    with pytest.raises(ValueError, match="not a decision tape"):
        choice_tape.load_tape(tmp_path / "t.json")


def test_shrink_keeps_only_the_draws_the_failure_needs() -> None:
    def fails(candidate: Sequence[int]) -> bool:
        return 7 in candidate and 3 in candidate[candidate.index(7) :]

    recorded = [*range(10, 60), 7, *range(60, 90), 3, *range(90, 120)]
    assert choice_tape.shrink_tape(recorded, fails) == [7, 3]


def test_shrink_makes_at_most_runs_max_runs() -> None:
    runs = []

    def fails(candidate: Sequence[int]) -> bool:
        runs.append(1)
        return sum(candidate) > 5000

    choice_tape.shrink_tape([9] * 1000, fails, runs_max=30)
    assert len(runs) <= 30
