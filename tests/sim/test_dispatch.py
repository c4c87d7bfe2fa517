"""Dispatches under faults: pools and dispatchers that die at any key and any commit."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from hashlib import sha256
from typing import Any

import pytest

from holdfast.sim.check_dispatch import findings
from holdfast.sim.checkers import CHECKERS
from holdfast.sim.edits import Mutant
from holdfast.sim.faults import Fault
from holdfast.sim.history import History
from holdfast.sim.mutants_dispatch import DISPATCH
from holdfast.sim.nemesis import Fate
from holdfast.sim.run import Result, verdict
from holdfast.sim.scheduler import Threads
from holdfast.sim.simulation import Simulation
from holdfast.sim.tape import Tape
from holdfast.sim.workload_dispatch import DispatchSettings, actors, drawn

SEEDS = int(os.environ.get("HOLDFAST_TEST_DISPATCH_SEEDS", "60"))
MUTANT_SEEDS = 150


@pytest.fixture(scope="module")
def threads() -> Iterator[Threads]:
    with Threads() as pool:
        yield pool


def run(
    seed: int, threads: Threads, mutant: Mutant | None = None, backend: str = "memory"
) -> tuple[Result, Simulation]:
    tape = Tape(seed)
    with nullcontext() if mutant is None else mutant.planted():
        settings = drawn(tape)
        cast = [*actors(settings), *([Fate("fate")] if settings.nemesis else [])]
        simulation = Simulation(tape, settings, cast, threads, backend=backend)
        simulation.run()
    return verdict(simulation), simulation


@pytest.mark.slow
@pytest.mark.timeout(60 + SEEDS)
def test_seeds_break_nothing_and_see_what_they_should(threads: Threads) -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        result, simulation = run(seed, threads)
        assert not result.violations, f"seed {seed}: {result.violations[:3]}"
        seen.update(simulation.seen)
        for event in simulation.history:
            if event.op == "fault":
                seen[event.args["kind"]] += 1
            elif event.op == "pane.submit":
                seen["a notice" if event.args["text"].startswith("[holdfast]") else "a text"] += 1
            elif event.applied or event.op == "ready":
                seen[event.op] += 1
    for what in (
        "a text", "a notice", "crash before a key", "crash after a key", "replay.advance",
        "replay.rewind", "replay.defer_leader_notification", "replay.clear_deferred",
        "dispatch: leader_missing", "dispatch: refused", "dispatch: late pool refused", "ready",
        "panes.clear_leader", "crash after", "unknown after", "stall",
    ):  # fmt: skip
        assert seen[what], f"never seen: {what}"


BOUNDARIES = 80


# Each takes some seconds; `make test` has these, `make sim` all of them.
QUICK_FAULTS = (Fault.CRASH_AFTER, Fault.UNKNOWN_AFTER)
LATE_BUGS = (
    "replay: a rewind meanwhile is not noticed",
    "replay: goes on although it was not told",
)


def deep(value: object, *, unless: bool) -> object:
    return value if unless else pytest.param(value, marks=pytest.mark.deep)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("fault", [deep(one, unless=one in QUICK_FAULTS) for one in Fault])
def test_every_boundary_of_a_small_run_may_fail(threads: Threads, fault: Fault) -> None:
    """Two pools and a dispatcher, without any fault but this one, at one commit after another."""
    reached = 0
    for boundary in range(1, BOUNDARIES + 1):
        settings = DispatchSettings(steps=500, senders=1, workers=1, operators=1)
        simulation = Simulation(
            Tape(7), settings, actors(settings), threads, forced={boundary: fault}
        )
        simulation.run()
        found = verdict(simulation).violations
        assert not found, f"{fault.value} at boundary {boundary}: {found[:3]}"
        kinds = {one.args["kind"] for one in simulation.history if one.op == "fault"}
        reached += fault.value in kinds
    assert reached == BOUNDARIES


@pytest.mark.parametrize("seed", [3, 17])
def test_a_seed_is_the_same_run_on_every_store(threads: Threads, seed: int) -> None:
    first, _ = run(seed, threads)
    again, _ = run(seed, threads)
    lmdb, _ = run(seed, threads, backend="lmdb")
    assert first.state_hash == again.state_hash == lmdb.state_hash


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [deep(one, unless=one not in LATE_BUGS) for one in DISPATCH])
def test_a_planted_bug_is_caught(threads: Threads, name: str) -> None:
    for seed in range(MUTANT_SEEDS):
        result, _ = run(seed, threads, DISPATCH[name])
        if result.violations:
            assert set(result.checkers) <= {*CHECKERS, "ACTOR"}
            return
    pytest.fail(f"no seed below {MUTANT_SEEDS} catches: {name}")


# -- the checkers, on histories written by hand ------------------------------------------------------


class Story:
    """A history in few words."""

    def __init__(self) -> None:
        self.history = History()
        self._commits = 0
        self._records: dict[str, dict[str, Any]] = {}

    def note(self, op: str, **args: Any) -> Story:
        self.history.add(0, op, args, actor="a", incarnation="1")
        return self

    def did(self, op: str, value: Any = None, **args: Any) -> Story:
        self._commits += 1
        told = {"universe": "u", **args}
        self.history.add(
            0, op, told, actor="a", incarnation="1", value=value, commit_no=self._commits
        )
        return self

    def request(self, name: str, target: str = "w0") -> Story:
        record = {"target": target, "status": "pending", "tries": 0, "deferred": False}
        self._records[name] = record
        return self.did("dispatch_log.request", dict(record), request_id=name, target=target)

    def move(self, name: str, transition: str, status: str) -> Story:
        record = self._records[name]
        record.update(status=status, deferred=transition == "deferred")
        return self.did(
            "dispatch_log.move", dict(record), request_id=name, transition=transition, reason=""
        )

    def submit(self, text: str, pane: str = "%1") -> Story:
        return self.note("pane.submit", pane=pane, text=text)

    def ready(self, *reasons: tuple[str, str], ready: bool | None = None, **counts: int) -> Story:
        backlog = dict.fromkeys(("pending", "notified", "delivered", "failed", "deferred"), 0)
        return self.note(
            "ready",
            ready=not reasons if ready is None else ready,
            reasons=[list(one) for one in reasons],
            backlog={**backlog, **counts},
        )

    def leading(self) -> Story:
        return self.did("authority.acquire", {"expires_ns": 1}, owner="a")


def text_of(name: str) -> str:
    return f"do it [hf:{sha256(name.encode()).hexdigest()[:12]}]"


MISSING = ("authority_missing", "authority_missing")
HELD_BACK = ("notification_deferred", "leader_missing")
FOLLOWED = {"cursor": 0}

BAD = {
    "S1 an illegal move": ("S1", Story().request("r").move("r", "delivered", "delivered")),
    "S1 a legal move refused": (
        "S1",
        (lambda s: (s.history.add(0, "dispatch_log.move", {"universe": "u", "request_id": "r",
          "transition": "failed"}, result="fail", value={"code": "invalid_transition"}), s)[1])(
            Story().request("r")
        ),
    ),
    "A5 notified and never typed": ("A5", Story().request("r").move("r", "notified", "notified")),
    "A5 typed twice": ("A5", Story().submit(text_of("r")).submit(text_of("r"))),
    "A5 two texts as one": ("A5", Story().submit(text_of("r") + text_of("s"))),
    "A5 half a text": ("A5", Story().submit("do")),
    "I6 the cursor goes back": (
        "I6",
        Story().request("r").did("replay.follow", {"cursor": 1})
        .did("replay.advance", {"cursor": 0}, was=0, cursor=0, event_ids=[]),
    ),
    "I6 above the log": (
        "I6",
        Story().did("replay.follow", FOLLOWED)
        .did("replay.advance", {"cursor": 9}, was=0, cursor=9, event_ids=[]),
    ),
    "I6 passed and not told": (
        "I6",
        Story().did("replay.follow", FOLLOWED).request("r").move("r", "failed", "failed")
        .did("replay.advance", {"cursor": 2}, was=0, cursor=2, event_ids=["r/0", "r/1"]),
    ),
    "I6 told again": (
        "I6",
        Story().did("replay.follow", FOLLOWED).request("r").move("r", "failed", "failed")
        .submit(text_of("r/1"))
        .did("replay.advance", {"cursor": 2}, was=0, cursor=2, event_ids=["r/0", "r/1"])
        .submit(text_of("r/1"), "%2"),
    ),
    "R1 a blocker is missing": ("R1", Story().submit(text_of("r")).ready(ready=False)),
    "R1 a blocker too many": (
        "R1",
        Story().submit(text_of("r")).ready(MISSING, ("replay_pending", "replay_pending")),
    ),
    "R1 ready with a blocker": ("R1", Story().submit(text_of("r")).ready(MISSING, ready=True)),
    "R2 held back and not told": (
        "R2",
        Story().request("r", "leader").move("r", "deferred", "pending")
        .ready(MISSING, pending=1, deferred=1),
    ),
    "R2 another reason": (
        "R2",
        Story().did("replay.follow", FOLLOWED)
        .did("replay.defer_leader_notification", {}, code="unconfirmed", text="")
        .ready(MISSING, HELD_BACK),
    ),
    "S4 a wrong count": ("S4", Story().request("r").ready(MISSING, pending=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_checker_fails_on_a_history_that_breaks_its_predicate(name: str) -> None:
    number, story = BAD[name]
    found = list(findings(story.history))
    assert [one.number for one in found] == [number]
    assert [one.number for one in CHECKERS[number](story.history)] == [number]


def test_a_good_history_breaks_nothing() -> None:
    story = (
        Story()
        .did("replay.follow", FOLLOWED)
        .request("r")
        .submit(text_of("r"))
        .move("r", "notified", "notified")
        .move("r", "delivered", "delivered")
        .ready(MISSING, ("replay_pending", "replay_pending"), delivered=1)
        .submit(text_of("r/2"), "%2")
        .did("replay.advance", {"cursor": 3}, was=0, cursor=3, event_ids=["r/0", "r/1", "r/2"])
        .ready(MISSING, delivered=1)
    )
    assert list(findings(story.history)) == []
