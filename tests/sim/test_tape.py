"""A tape is a run: recorded, replayed, saved and cut down."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.sim import tape
from holdfast.sim.tape import Tape


def test_a_seed_draws_the_same_numbers_every_time() -> None:
    first, second = Tape(5), Tape(5)
    assert [first.draw(100) for _ in range(50)] == [second.draw(100) for _ in range(50)]


def test_a_replayed_tape_answers_what_was_drawn() -> None:
    recorded = Tape(5)
    drawn = [recorded.draw(n) for n in range(1, 50)]
    again = Tape.replay(recorded.drawn)
    assert [again.draw(n) for n in range(1, 50)] == drawn


def test_a_worn_out_tape_answers_zero_and_no() -> None:
    worn = Tape.replay([])
    assert [worn.draw(9), worn.pick("abc"), worn.chance(999)] == [0, "a", False]


def test_a_chance_comes_about_as_often_as_it_says() -> None:
    drawn = Tape(1)
    assert 150 < sum(drawn.chance(200) for _ in range(1000)) < 250
    assert not any(drawn.chance(0) for _ in range(1000))
    assert all(drawn.chance(1000) for _ in range(1000))


def test_a_saved_tape_is_loaded_with_all_that_was_said_about_it(tmp_path: Path) -> None:
    tape.save(tmp_path / "t.json", [1, 2, 3], seed=9, mutant=None)
    assert tape.load(tmp_path / "t.json") == {
        "format": 1,
        "seed": 9,
        "mutant": None,
        "tape": [1, 2, 3],
    }


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"format": 2}')
    with pytest.raises(ValueError, match="not a decision tape"):
        tape.load(tmp_path / "t.json")


def test_shrinking_keeps_only_what_the_failure_needs() -> None:
    def fails(candidate: Sequence[int]) -> bool:
        return 7 in candidate and 3 in candidate[candidate.index(7) :]

    recorded = [*range(10, 60), 7, *range(60, 90), 3, *range(90, 120)]
    assert tape.shrink(recorded, fails) == [7, 3]


def test_shrinking_is_bounded() -> None:
    runs = []

    def fails(candidate: Sequence[int]) -> bool:
        runs.append(1)
        return sum(candidate) > 5000

    tape.shrink([9] * 1000, fails, runs_max=30)
    assert len(runs) <= 30
