"""`hf.simulate`: users' own apps in simulated time, with crashes, and parity with a calm run."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import NoReply, NotFound, ReplayDiverged, Timeout
from holdfast.sim.parity import Disparity

DOCS = Path(__file__).parents[2] / "docs" / "simulate.md"


class Put(hf.Event):
    amount: int


class Gave(hf.Event):
    amount: int
    to: str


class Rang(hf.Event):
    pass


class Broke(hf.Event):
    pass


class Looked(hf.Event):
    pass


class Spoiled(hf.Event):
    """Its handler leaves a state that cannot be read back."""


class Brooded(hf.Event):
    """Its handler looks at what no journal holds, and neither replies nor emits."""


class Purse(hf.World):
    coins: int = 0
    rings: int = 0

    @hf.on(Put)
    def put(self, event: Put, cx: hf.Context) -> None:
        self.coins += event.amount
        cx.after(60, Rang(), key="ring")
        cx.reply(self.coins)

    @hf.on(Gave)
    def gave(self, event: Gave, cx: hf.Context) -> None:
        self.coins -= event.amount
        cx.send(Purse, event.to, Put(event.amount))

    @hf.on(Rang)
    def rang(self, event: Rang, cx: hf.Context) -> None:
        self.rings += 1

    @hf.on(Broke)
    def broke(self, event: Broke, cx: hf.Context) -> None:
        self.coins = -1
        raise ValueError("no")

    @hf.on(Brooded)
    def brooded(self, event: Brooded, cx: hf.Context) -> None:
        self.rings = next(_ambient)

    @hf.on(Spoiled)
    def spoiled(self, event: Spoiled, cx: hf.Context) -> None:
        self.coins = "many"  # type: ignore[assignment]

    @hf.on(Looked)
    def looked(self, event: Looked, cx: hf.Context) -> None:
        cx.reply(next(_ambient))


_ambient = itertools.count()

app = hf.App("purses", worlds=[Purse])


def story(seed: int, crashes: bool = True) -> dict[str, Any]:
    """A run, and what became of it."""
    with hf.simulate(app, seed=seed, crashes=crashes) as s:
        ada, bob = s.world(Purse, "ada"), s.world(Purse, "bob")
        for amount in range(1, 9):
            ada.send(Put(amount))
        ada.send(Broke())
        ada.send(Gave(6, "bob"))
        assert ada.ask(Put(4)) == 34
        child = ada.fork("child", at=5)
        child.send(Put(100))
        s.assert_parity()
        return {
            "ada": [(one.type, one.event, one.outcome) for one in ada.journal()],
            "emitted": [one.step.outcome.value for one in ada.journal()],
            "states": [ada.state(), bob.state(), child.state()],
            "hash": s.history_hash,
            "crashes": s.crashes,
        }


@pytest.fixture(scope="module")
def calm() -> dict[str, Any]:
    return story(0, crashes=False)


def test_a_calm_run_is_as_one_would_count(calm: dict[str, Any]) -> None:
    assert calm["states"] == [Purse(coins=34), Purse(coins=6), Purse(coins=115)]
    assert calm["crashes"] == 0


@pytest.mark.parametrize("seed", range(8))
def test_crashes_change_nothing(seed: int, calm: dict[str, Any]) -> None:
    found = story(seed)
    assert found["crashes"] > 0
    for name in ("ada", "emitted", "states"):
        assert found[name] == calm[name]


def test_the_same_seed_is_the_same_run() -> None:
    assert story(3) == story(3)
    assert story(3)["hash"] != story(4)["hash"]


def test_time_passes_only_when_it_is_told_to() -> None:
    with hf.simulate(app, seed=5) as s:
        ada = s.world(Purse, "ada")
        ada.send(Put(1))
        s.run_until_quiet()
        assert ada.state().rings == 0
        before = s.now_s
        s.advance(90)
        assert 90 <= s.now_s - before < 95
        s.run_until_quiet()
        assert ada.state().rings == 1


def test_a_year_is_soon_over() -> None:
    with hf.simulate(app, seed=5) as s:
        ada = s.world(Purse, "ada")
        ada.send(Put(1))
        s.advance(365 * 24 * 3600)
        assert ada.state() == Purse(coins=1, rings=1)
        s.assert_parity()


def test_what_is_sent_while_all_is_down_waits_for_the_restart() -> None:
    with hf.simulate(app, seed=6) as s:
        ada = s.world(Purse, "ada")
        assert ada.ask(Put(1)) == 1
        s.crash()
        ada.send(Put(2))
        s.advance(30)
        assert ada.state().coins == 1
        with pytest.raises(Timeout):
            ada.ask(Put(4), timeout=5)
        s.restart()
        s.run_until_quiet()
        assert ada.state().coins == 7
        s.assert_parity()


def test_errors_of_calls_are_the_callers() -> None:
    with hf.simulate(app, seed=1) as s:
        ada = s.world(Purse, "ada")
        with pytest.raises(NoReply):
            ada.ask(Broke())
        with pytest.raises(NotFound):
            s.world(Purse, "nobody").state()


def test_a_reducer_that_looks_elsewhere_is_named_with_its_height() -> None:
    with hf.simulate(app, seed=2, crashes=False) as s:
        ada = s.world(Purse, "ada")
        ada.send(Put(1))
        ada.send(Looked())
        with pytest.raises(Disparity, match=r"Purse/ada at height 2: .* its reply is"):
            s.assert_parity()


def test_a_silent_reducer_that_looks_elsewhere_is_found_by_its_state() -> None:
    with hf.simulate(app, seed=2, crashes=False) as s:
        ada = s.world(Purse, "ada")
        for event in (Brooded(), Put(1)):
            ada.send(event)
        s.run_until_quiet()
        assert [entry.step.state for entry in ada.journal()].count(b"") < 2
        with pytest.raises(Disparity, match=r"Purse/ada at height \d: .* its state is b'"):
            s.assert_parity()


def test_an_event_that_leaves_what_cannot_be_stored_fails_again() -> None:
    with hf.simulate(app, seed=2) as s:
        ada = s.world(Purse, "ada")
        for event in (Put(1), Spoiled(), Put(2)):
            ada.send(event)
        s.run_until_quiet()
        assert ada.state().coins == 3
        assert [one.outcome for one in ada.journal()][:3] == ["ok", "failed", "ok"]
        s.assert_parity()


def test_a_silent_reducer_that_looks_elsewhere_is_parked_after_a_crash() -> None:
    with hf.simulate(app, seed=2) as s:
        ada = s.world(Purse, "ada")
        ada.send(Brooded())
        s.run_until_quiet()
        s.crash()
        s.restart()
        ada.send(Put(1))
        s.run_until_quiet()
        assert ada.height() == 1
        with pytest.raises(ReplayDiverged):
            ada.state()
        with pytest.raises(
            Disparity, match=r"Purse/ada at height 1: it is parked: replay_diverged"
        ):
            s.assert_parity()


def test_a_world_that_crashes_have_parked_has_no_parity() -> None:
    with hf.simulate(app, seed=2) as s:
        ada = s.world(Purse, "ada")
        ada.send(Looked())
        s.run_until_quiet()
        s.crash()
        s.restart()
        ada.send(Put(1))
        s.run_until_quiet()
        with pytest.raises(AssertionError, match="Purse/ada at height 1"):
            s.assert_parity()


def test_many_are_sent_at_once() -> None:
    with hf.simulate(app, seed=9, workers=3) as s:
        purses = [s.world(Purse, f"p{n}") for n in range(6)]
        s.send_many([(purse, Put(n)) for n, purse in enumerate(purses)])
        s.run_until_quiet()
        assert [purse.state().coins for purse in purses] == list(range(6))
        s.assert_parity()


def test_the_example_in_the_docs_runs() -> None:
    examples = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S)
    assert len(examples) == 2
    exec(compile("\n".join(examples), str(DOCS), "exec"), {"__name__": "example"})
