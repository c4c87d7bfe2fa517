"""A simulated run of any application: random events, stubbed effects, crashes, then the parity check.

The seed selects everything: the crashes and their places (`hf.simulate`), the worlds and their events, and the
results of the effects. A world gets the events that its type handles or that the app names in `events=`. An effect
is never called: a stub returns a generated value of its declared result type, or fails. All calls with one
idempotency key have one outcome, as with a service that deduplicates by key.

Inboxes get no generated mail: only worlds can post to them. Tasks, flows and schedules do not run.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from holdfast import logs
from holdfast.app.app import App
from holdfast.app.definitions import Call, Effect
from holdfast.app.simulator import SimulatedApp
from holdfast.errors import HoldfastError, Invalid
from holdfast.sim.session import SimulationSession
from holdfast.sim.value_generator import ValueGenerator
from holdfast.world.definition import EventType

NAMES = ("ada", "bob", "eve")
ROUNDS = 12
WORKERS = 2
BATCH_MAX = 4
ADVANCES_S = (0.5, 5.0, 60.0)
SETTLE_S = 120.0
# Per hundred rounds. The remaining rounds send events.
CRASH_PERCENT, ADVANCE_PERCENT = 15, 20
# One in this many calls fails permanently, and one fails at its first attempt.
STUB_FAULT_ODDS = 8
# A call of an effect with more attempts than these fails at its first attempt only.
FAILED_ATTEMPTS_MAX = 5
# Values of each type that are generated before the first seed, to find types without a generator.
SAMPLES = 50

Note = Callable[[str], None]


class StubbedFailure(HoldfastError):
    """The generated failure of a stubbed effect."""

    code = "stubbed_failure"


class AppRunResult(NamedTuple):
    events: int
    crashes: int
    # The violated invariant, or None.
    violation: str | None


class _Target(NamedTuple):
    """A world and the event types that it accepts."""

    kind: type[Any]
    name: str
    events: list[EventType]


def check_generable(app: App) -> None:
    """Raise Invalid if the app accepts no event, Ungenerable for a type without a generator."""
    if not _targets(app):
        raise Invalid(what="app", name=app.name, why="no world of the app handles an event")
    generate = ValueGenerator(Random(0), NAMES)
    for _ in range(SAMPLES):
        for event in app.events.values():
            generate.value(event.kind, f"event {event.name}")
        for effect in app.effects.values():
            generate.value(effect.returns, f"result of effect {effect.kind}")


def run_app(app: App, seed: int, note: Note = lambda text: None) -> AppRunResult:
    """Simulate the app under one seed. `note` gets a line for each action."""
    random = Random(seed)
    stubs = {kind: _stub(effect, seed) for kind, effect in app.effects.items()}
    events = 0
    simulation = SimulationSession(
        app, seed=seed, crashes=True, workers=WORKERS, effects=stubs, with_tasks=False
    )
    with logs.silence(), simulation as session:
        try:
            for _ in range(ROUNDS):
                events += _run_round(session, random, _targets(app), note)
            note("run until quiet, then compare with a run without faults")
            session.run_until_quiet()
            session.advance(SETTLE_S)
            session.assert_parity()
        except AssertionError as error:
            return AppRunResult(events, session.crashes, str(error))
        return AppRunResult(events, session.crashes, None)


def _run_round(session: SimulatedApp, random: Random, targets: list[_Target], note: Note) -> int:
    draw = random.randrange(100)
    if draw < CRASH_PERCENT:
        note("crash every process")
        session.crash()
        sent = _send(session, random, targets, note)
        session.restart()
        return sent
    if draw < CRASH_PERCENT + ADVANCE_PERCENT:
        seconds = random.choice(ADVANCES_S)
        note(f"advance {seconds} s")
        session.advance(seconds)
        return 0
    return _send(session, random, targets, note)


def _send(session: SimulatedApp, random: Random, targets: list[_Target], note: Note) -> int:
    generate = ValueGenerator(random, NAMES)
    messages = []
    for _ in range(random.randint(1, BATCH_MAX)):
        target = random.choice(targets)
        event_type = random.choice(target.events)
        event = generate.value(event_type.kind, f"event {event_type.name}")
        note(f"send {target.kind.__name__}/{target.name} {event!r}")
        messages.append((session.world(target.kind, target.name), event))
    session.send_many(messages)
    return len(messages)


def _targets(app: App) -> list[_Target]:
    return [
        _Target(definition.state, name, events)
        for definition in app.programs.values()
        if (
            events := [
                app.events[cause]
                for side, cause in sorted(definition.declared_versions)
                if side == "event"
            ]
        )
        for name in NAMES
    ]


def _stub(effect: Effect[Any, Any], seed: int) -> Callable[..., Any]:
    def stub(call: Call, *args: Any) -> Any:
        random = Random(f"{seed} {effect.kind} {call.idempotency_key}")
        fault = random.randrange(STUB_FAULT_ODDS)
        lasting = fault == 0 and effect.attempts <= FAILED_ATTEMPTS_MAX
        if lasting or (fault <= 1 and call.attempt == 1):
            raise StubbedFailure(effect=effect.kind, attempt=call.attempt)
        return ValueGenerator(random, NAMES).value(
            effect.returns, f"result of effect {effect.kind}"
        )

    return stub
