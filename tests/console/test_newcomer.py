"""A newcomer answers ten drawn questions about a broken system in the console, each in under five actions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.console.newcomer_questions import (
    ACTIONS_MAX,
    QUESTIONS,
    answer_all,
    break_system,
    draw,
)
from tests.console.rig import ConsoleRig, browser, clean_tab
from tests.console.shop import first_way, ways

__all__ = ["browser"]

pytestmark = [pytest.mark.timeout(600), pytest.mark.deep]

SEEDS = (1, 2, 3)


@pytest.fixture
def broken(request: pytest.FixtureRequest) -> Iterator[ConsoleRig]:
    rig = ConsoleRig()
    try:
        break_system(rig, request.param)
        yield rig
    finally:
        ways[0] = first_way
        rig.close()


@pytest.mark.parametrize(("broken", "seed"), [(seed, seed) for seed in SEEDS], indirect=["broken"])
def test_ten_drawn_questions_are_answered_in_under_five_actions(
    browser: Browser, broken: ConsoleRig, seed: int
) -> None:
    with broken.serve() as server, clean_tab(browser, server) as tab:
        answered = answer_all(broken, tab, draw(seed))
    wrong = [one for one in answered if one.answer != one.truth or one.actions > ACTIONS_MAX]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("broken", [4], indirect=True)
def test_every_question_has_its_answer_in_the_console(browser: Browser, broken: ConsoleRig) -> None:
    with broken.serve() as server, clean_tab(browser, server) as tab:
        answered = answer_all(broken, tab, list(QUESTIONS))
    assert len(answered) == 20
    wrong = [one for one in answered if one.answer != one.truth or one.actions > ACTIONS_MAX]
    assert not wrong, "\n".join(map(str, wrong))


def test_every_question_is_drawn_by_some_seed_and_each_seed_draws_ten() -> None:
    drawn = {seed: [one.text for one in draw(seed)] for seed in range(50)}
    assert {len(set(texts)) for texts in drawn.values()} == {10}
    assert {text for texts in drawn.values() for text in texts} == {one.text for one in QUESTIONS}
