"""`hf.simulate`: user apps in simulated time with crashes, and parity with a run without faults."""

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


class AlarmRang(hf.Event):
    pass


class Broke(hf.Event):
    pass


class Looked(hf.Event):
    pass


class Spoiled(hf.Event):
    """Its handler leaves a state that cannot be stored."""


class Brooded(hf.Event):
    """Its handler reads an unrecorded input and neither replies nor emits."""


class Purse(hf.World):
    coins: int = 0
    rings: int = 0

    @hf.on(Put)
    def put(self, event: Put, cx: hf.Context) -> None:
        self.coins += event.amount
        cx.after(60, AlarmRang(), key="ring")
        cx.reply(self.coins)

    @hf.on(Gave)
    def gave(self, event: Gave, cx: hf.Context) -> None:
        self.coins -= event.amount
        cx.send(Purse, event.to, Put(event.amount))

    @hf.on(AlarmRang)
    def rang(self, event: AlarmRang, cx: hf.Context) -> None:
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


def run_scenario(seed: int, crashes: bool = True) -> dict[str, Any]:
    """Run a scenario. Return its journal, states, history hash and crash count."""
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
            "ada": [(entry.type, entry.event, entry.outcome) for entry in ada.journal()],
            "emitted": [entry.step.outcome.value for entry in ada.journal()],
            "states": [ada.state(), bob.state(), child.state()],
            "hash": s.history_hash,
            "crashes": s.crashes,
        }


@pytest.fixture(scope="module")
def run_without_crashes() -> dict[str, Any]:
    return run_scenario(0, crashes=False)


def test_simulate_without_crashes_reaches_the_expected_states(
    run_without_crashes: dict[str, Any],
) -> None:
    assert run_without_crashes["states"] == [Purse(coins=34), Purse(coins=6), Purse(coins=115)]
    assert run_without_crashes["crashes"] == 0


@pytest.mark.parametrize("seed", range(8))
def test_simulate_with_crashes_ends_in_the_same_states(
    seed: int, run_without_crashes: dict[str, Any]
) -> None:
    scenario = run_scenario(seed)
    assert scenario["crashes"] > 0
    for name in ("ada", "emitted", "states"):
        assert scenario[name] == run_without_crashes[name]


def test_simulate_is_deterministic_per_seed() -> None:
    assert run_scenario(3) == run_scenario(3)
    assert run_scenario(3)["hash"] != run_scenario(4)["hash"]


def test_simulated_time_moves_only_by_advance() -> None:
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


def test_simulate_advances_a_year_quickly() -> None:
    with hf.simulate(app, seed=5) as s:
        ada = s.world(Purse, "ada")
        ada.send(Put(1))
        s.advance(365 * 24 * 3600)
        assert ada.state() == Purse(coins=1, rings=1)
        s.assert_parity()


def test_event_sent_after_crash_is_handled_after_restart() -> None:
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


def test_simulate_raises_call_errors_to_the_caller() -> None:
    with hf.simulate(app, seed=1) as s:
        ada = s.world(Purse, "ada")
        with pytest.raises(NoReply):
            ada.ask(Broke())
        with pytest.raises(NotFound):
            s.world(Purse, "nobody").state()


def test_parity_reports_a_nondeterministic_reply_with_its_height() -> None:
    with hf.simulate(app, seed=2, crashes=False) as s:
        ada = s.world(Purse, "ada")
        ada.send(Put(1))
        ada.send(Looked())
        with pytest.raises(Disparity, match=r"Purse/ada at height 2: .* its reply is"):
            s.assert_parity()


def test_parity_reports_a_nondeterministic_state() -> None:
    with hf.simulate(app, seed=2, crashes=False) as s:
        ada = s.world(Purse, "ada")
        for event in (Brooded(), Put(1)):
            ada.send(event)
        s.run_until_quiet()
        assert [entry.step.state for entry in ada.journal()].count(b"") < 2
        with pytest.raises(Disparity, match=r"Purse/ada at height \d: .* its state is b'"):
            s.assert_parity()


def test_event_with_an_unstorable_state_fails_on_every_replay() -> None:
    with hf.simulate(app, seed=2) as s:
        ada = s.world(Purse, "ada")
        for event in (Put(1), Spoiled(), Put(2)):
            ada.send(event)
        s.run_until_quiet()
        assert ada.state().coins == 3
        assert [entry.outcome for entry in ada.journal()][:3] == ["ok", "failed", "ok"]
        s.assert_parity()


def test_world_with_a_nondeterministic_state_is_parked_after_a_crash() -> None:
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


def test_parity_fails_for_a_world_parked_after_a_crash() -> None:
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


def test_simulate_send_many_delivers_to_all_worlds() -> None:
    with hf.simulate(app, seed=9, workers=3) as s:
        purses = [s.world(Purse, f"p{n}") for n in range(6)]
        s.send_many([(purse, Put(n)) for n, purse in enumerate(purses)])
        s.run_until_quiet()
        assert [purse.state().coins for purse in purses] == list(range(6))
        s.assert_parity()


def test_examples_in_simulate_docs_run() -> None:
    examples = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S)
    assert len(examples) == 3
    exec(compile("\n".join(examples), str(DOCS), "exec"), {"__name__": "example"})
