"""Scenarios: a user's function that drives a simulation, run under many seeds.

A seed that fails is shrunk: the scenario runs again with fewer faults of the seed, and the smallest
found set with the same type of error is reported, with the line that replays it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.app.app import App
from holdfast.clock import S
from holdfast.errors import Invalid
from holdfast.sim.effect_stubs import EffectFunction
from holdfast.sim.session import SimulationSession

SEEDS = 20
# Runs that one failure may take to find fewer faults.
SHRINK_RUNS = 100
ERROR_CHARS_MAX = 2_000
# Outcomes of pytest that are no failure of the scenario.
_PASSED_ON = ("Skipped", "XFailed", "Exit")

Scenario = Callable[[Any], object]


class ScenarioFailed(AssertionError):
    """A seed of a scenario fails. The text has the seed, the fewest faults found and the replay line."""


class ScenarioOptions(NamedTuple):
    crashes: bool = True
    workers: int = 2
    effects: Mapping[str, EffectFunction] | None = None
    effect_faults: bool = True
    # Whether `assert_parity` ends each run.
    parity: bool = True


class ScenarioRun(NamedTuple):
    """The outcome of one run: its error, the positions of its faults, and their descriptions."""

    error: BaseException | None
    faults: list[int]
    schedule: list[str]


def run_seeds(
    app: App,
    scenario: Scenario,
    *,
    seeds: int = SEEDS,
    start: int = 0,
    allowed_faults: Container[int] | None = None,
    shrink_runs: int = SHRINK_RUNS,
    replay: str = "",
    **options: Any,
) -> None:
    """Run a scenario under `seeds` seeds from `start`. Raise ScenarioFailed for the first that fails.

    `options` are those of `hf.simulate`, and `parity=False` to end runs without `assert_parity`. `replay` is the
    command of the replay line.
    """
    __tracebackhide__ = True
    unknown = sorted(options.keys() - set(ScenarioOptions._fields))
    if unknown:
        raise Invalid(
            what="holdfast_sim",
            found=unknown,
            expected=["seeds", "start", "shrink_runs", *ScenarioOptions._fields],
        )
    for what, found, low in (
        ("seeds", seeds, 1),
        ("start", start, 0),
        ("shrink_runs", shrink_runs, 0),
    ):
        if type(found) is not int or found < low:
            raise Invalid(what=what, found=repr(found)[:64], min=low)
    if not callable(scenario):
        raise Invalid(what="scenario", found=repr(scenario)[:64], expected="a function scenario(s)")
    chosen = ScenarioOptions(**options)
    for seed in range(start, start + seeds):
        run = run_scenario(app, scenario, seed, chosen, allowed_faults)
        if run.error is not None:
            runs_max = shrink_runs if allowed_faults is None else 0
            least = shrink_faults(app, scenario, seed, chosen, run, runs_max=runs_max)
            error = least.error or run.error
            raise ScenarioFailed(_report(seed, run, least, replay)) from error


def run_scenario(
    app: App,
    scenario: Scenario,
    seed: int,
    options: ScenarioOptions,
    allowed_faults: Container[int] | None = None,
) -> ScenarioRun:
    """Run a scenario once. The module `random` starts with the seed and is restored at the end."""
    state = random.getstate()
    random.seed(seed)
    simulation_options = {**options._asdict()}
    parity = simulation_options.pop("parity")
    error: BaseException | None = None
    try:
        with SimulationSession(
            app, seed=seed, allowed_faults=allowed_faults, **simulation_options
        ) as session:
            try:
                scenario(session)
                if parity:
                    session.assert_parity()
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as raised:
                if type(raised).__name__ in _PASSED_ON:
                    raise
                error = raised
            return ScenarioRun(error, session.tape.faults, _schedule(session))
    finally:
        random.setstate(state)


def shrink_faults(
    app: App,
    scenario: Scenario,
    seed: int,
    options: ScenarioOptions,
    failed: ScenarioRun,
    *,
    runs_max: int = SHRINK_RUNS,
) -> ScenarioRun:
    """Find a run of the seed with fewer faults and the same type of error, by delta debugging."""
    best, remaining = failed, runs_max

    def still_fails(faults: Sequence[int]) -> bool:
        nonlocal best, remaining
        remaining -= 1
        run = run_scenario(app, scenario, seed, options, frozenset(faults))
        if type(run.error) is not type(failed.error) or len(run.faults) >= len(best.faults):
            return False
        best = run
        return True

    if not failed.faults or runs_max <= 0 or still_fails([]):
        return best
    size = max(1, len(best.faults) // 2)
    while remaining > 0:
        at, before = 0, len(best.faults)
        while at < len(best.faults) and remaining > 0:
            if not still_fails(best.faults[:at] + best.faults[at + size :]):
                at += size
        if size == 1 and len(best.faults) == before:
            break
        size = max(1, size // 2)
    return best


def _schedule(session: SimulationSession) -> list[str]:
    """Describe the injected faults of a run in their order."""
    events = list(session.history)
    lines = []
    for index, event in enumerate(events):
        if event.op != "fault" or "kind" not in event.args:
            continue
        what = event.args.get("call") or event.args.get("effect")
        if what is None:
            following = (one for one in events[index + 1 :] if one.actor == event.actor)
            what = next((one.op for one in following if one.op != "fault"), "a commit")
        lines.append(
            f"at {(event.at_ns - events[0].at_ns) / S:.3f} s {event.actor}: {event.args['kind']}, {what}"
        )
    return lines


def _report(seed: int, first: ScenarioRun, least: ScenarioRun, replay: str) -> str:
    error = least.error or first.error
    text = f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]
    lines = [f"seed {seed} fails: {text}"]
    if least.faults:
        lines.append(f"with {len(least.faults)} of its {len(first.faults)} faults:")
        lines += [f"  {number}. {line}" for number, line in enumerate(least.schedule, 1)]
    else:
        lines.append(f"also without its {len(first.faults)} faults")
    faults = ",".join(map(str, least.faults)) or "none"
    lines.append(f"again: {replay} --holdfast-seed {seed} --holdfast-faults {faults}")
    return "\n".join(lines)
