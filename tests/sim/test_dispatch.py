"""Dispatches under faults: pools and dispatchers crash at any key press and any commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import pytest

from holdfast.sim.choice_tape import ChoiceTape
from holdfast.sim.faults import Fault
from holdfast.sim.history import History
from holdfast.sim.scheduler import SimThreadPool
from holdfast.sim.simulation import Simulation
from tests.simulation.check_dispatch import findings
from tests.simulation.checkers import CHECKERS
from tests.simulation.seed_run import SeedResult, check_simulation
from tests.simulation.workload_dispatch import (
    DispatchSettings,
    dispatch_actors,
    draw_dispatch_settings,
)
from tests.simulation.workloads import fault_injectors

# Number of seeds: few in `make test`, many in `make sim`.
SEEDS = (25, pytest.param(200, marks=pytest.mark.deep))


@pytest.fixture(scope="module")
def threads() -> Iterator[SimThreadPool]:
    with SimThreadPool() as pool:
        yield pool


def run(
    seed: int, threads: SimThreadPool, backend: str = "memory"
) -> tuple[SeedResult, Simulation]:
    tape = ChoiceTape(seed)
    settings = draw_dispatch_settings(tape)
    all_actors = [*dispatch_actors(settings), *fault_injectors(settings)]
    simulation = Simulation(tape, settings, all_actors, threads, backend=backend)
    simulation.run()
    return check_simulation(simulation), simulation


@pytest.mark.slow
@pytest.mark.parametrize("seeds", SEEDS)
def test_dispatch_seeds_break_no_invariant_and_cover_all_points(
    seeds: int, threads: SimThreadPool
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(seeds):
        result, simulation = run(seed, threads)
        assert not result.violations, f"seed {seed}: {result.violations[:3]}"
        seen.update(simulation.coverage)
        for event in simulation.history:
            if event.op == "fault":
                seen[event.args["kind"]] += 1
            elif event.op == "pane.submit":
                seen["a notice" if event.args["text"].startswith("[holdfast]") else "a text"] += 1
            elif event.applied or event.op == "ready":
                seen[event.op] += 1
    for point in (
        "a text", "a notice", "crash before a key", "crash after a key", "notifications.advance",
        "notifications.rewind", "notifications.defer_leader_notification", "notifications.clear_deferred",
        "dispatch: leader_missing", "dispatch: refused", "dispatch: late pool refused", "ready",
        "leader_pane.clear_leader", "crash after", "unknown after", "stall",
    ):  # fmt: skip
        assert seen[point], f"never seen: {point}"


BOUNDARIES = 80


# Each fault takes some seconds. `make test` runs these, `make sim` runs all.
QUICK_FAULTS = (Fault.CRASH_AFTER, Fault.UNKNOWN_AFTER)


def mark_deep(case: object, *, unless: bool) -> object:
    return case if unless else pytest.param(case, marks=pytest.mark.deep)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("fault", [mark_deep(one, unless=one in QUICK_FAULTS) for one in Fault])
def test_no_fault_at_any_commit_breaks_a_small_dispatch_run(
    threads: SimThreadPool, fault: Fault
) -> None:
    """Two pools and a dispatcher with exactly one fault, injected at each commit in turn."""
    reached = 0
    for boundary in range(1, BOUNDARIES + 1):
        settings = DispatchSettings(steps=500, senders=1, workers=1, operators=1)
        simulation = Simulation(
            ChoiceTape(7),
            settings,
            dispatch_actors(settings),
            threads,
            faults_by_commit={boundary: fault},
        )
        simulation.run()
        violations = check_simulation(simulation).violations
        assert not violations, f"{fault.value} at boundary {boundary}: {violations[:3]}"
        kinds = {event.args["kind"] for event in simulation.history if event.op == "fault"}
        reached += fault.value in kinds
    assert reached == BOUNDARIES


@pytest.mark.parametrize("seed", [3, 17])
def test_dispatch_seed_has_the_same_state_on_memory_and_lmdb(
    threads: SimThreadPool, seed: int
) -> None:
    first, _ = run(seed, threads)
    again, _ = run(seed, threads)
    lmdb, _ = run(seed, threads, backend="lmdb")
    assert first.state_hash == again.state_hash == lmdb.state_hash


# -- checkers on hand-written histories --------------------------------------------------------------


class DispatchHistory:
    """Builder of a dispatch history."""

    def __init__(self) -> None:
        self.history = History()
        self._commits = 0
        self._records: dict[str, dict[str, Any]] = {}

    def note(self, op: str, **args: Any) -> DispatchHistory:
        self.history.add(0, op, args, actor="a", incarnation="1")
        return self

    def committed(self, op: str, value: Any = None, **args: Any) -> DispatchHistory:
        self._commits += 1
        all_args = {"universe": "u", **args}
        self.history.add(
            0, op, all_args, actor="a", incarnation="1", value=value, commit_no=self._commits
        )
        return self

    def request(self, name: str, target: str = "w0") -> DispatchHistory:
        record = {"target": target, "status": "pending", "tries": 0, "deferred": False}
        self._records[name] = record
        return self.committed("dispatch.request", dict(record), request_id=name, target=target)

    def move(self, name: str, transition: str, status: str) -> DispatchHistory:
        record = self._records[name]
        record.update(status=status, deferred=transition == "deferred")
        return self.committed(
            "dispatch.move", dict(record), request_id=name, transition=transition, reason=""
        )

    def submit(self, text: str, pane: str = "%1") -> DispatchHistory:
        return self.note("pane.submit", pane=pane, text=text)

    def ready(
        self, *reasons: tuple[str, str], ready: bool | None = None, **counts: int
    ) -> DispatchHistory:
        backlog = dict.fromkeys(("pending", "notified", "delivered", "failed", "deferred"), 0)
        return self.note(
            "ready",
            ready=not reasons if ready is None else ready,
            reasons=[list(reason) for reason in reasons],
            backlog={**backlog, **counts},
        )

    def leader_acquired(self) -> DispatchHistory:
        return self.committed("leader_lease.acquire", {"expires_ns": 1}, owner="a")


def prompt_text(name: str) -> str:
    return f"do it [hf:{sha256(name.encode()).hexdigest()[:12]}]"


LEADER_LEASE_MISSING = ("authority_missing", "authority_missing")
NOTIFICATION_DEFERRED = ("notification_deferred", "leader_missing")
FOLLOWED = {"cursor": 0}

BAD = {
    "S1 an illegal move": ("S1", DispatchHistory().request("r").move("r", "delivered", "delivered")),
    "S1 a legal move refused": (
        "S1",
        (lambda s: (s.history.add(0, "dispatch.move", {"universe": "u", "request_id": "r",
          "transition": "failed"}, result="fail", value={"code": "invalid_transition"}), s)[1])(
            DispatchHistory().request("r")
        ),
    ),
    "A5 notified and never typed": ("A5", DispatchHistory().request("r").move("r", "notified", "notified")),
    "A5 typed twice": ("A5", DispatchHistory().submit(prompt_text("r")).submit(prompt_text("r"))),
    "A5 two texts as one": ("A5", DispatchHistory().submit(prompt_text("r") + prompt_text("s"))),
    "A5 half a text": ("A5", DispatchHistory().submit("do")),
    "I6 the cursor goes back": (
        "I6",
        DispatchHistory().request("r").committed("notifications.subscribe", {"cursor": 1})
        .committed("notifications.advance", {"cursor": 0}, was=0, cursor=0, event_ids=[]),
    ),
    "I6 above the log": (
        "I6",
        DispatchHistory().committed("notifications.subscribe", FOLLOWED)
        .committed("notifications.advance", {"cursor": 9}, was=0, cursor=9, event_ids=[]),
    ),
    "I6 passed and not told": (
        "I6",
        DispatchHistory().committed("notifications.subscribe", FOLLOWED).request("r").move("r", "failed", "failed")
        .committed("notifications.advance", {"cursor": 2}, was=0, cursor=2, event_ids=["r/0", "r/1"]),
    ),
    "I6 told again": (
        "I6",
        DispatchHistory().committed("notifications.subscribe", FOLLOWED).request("r").move("r", "failed", "failed")
        .submit(prompt_text("r/1"))
        .committed("notifications.advance", {"cursor": 2}, was=0, cursor=2, event_ids=["r/0", "r/1"])
        .submit(prompt_text("r/1"), "%2"),
    ),
    "R1 a blocker is missing": ("R1", DispatchHistory().submit(prompt_text("r")).ready(ready=False)),
    "R1 a blocker too many": (
        "R1",
        DispatchHistory().submit(prompt_text("r")).ready(LEADER_LEASE_MISSING, ("replay_pending", "replay_pending")),
    ),
    "R1 ready with a blocker": ("R1", DispatchHistory().submit(prompt_text("r")).ready(LEADER_LEASE_MISSING, ready=True)),
    "R2 held back and not told": (
        "R2",
        DispatchHistory().request("r", "leader").move("r", "deferred", "pending")
        .ready(LEADER_LEASE_MISSING, pending=1, deferred=1),
    ),
    "R2 another reason": (
        "R2",
        DispatchHistory().committed("notifications.subscribe", FOLLOWED)
        .committed("notifications.defer_leader_notification", {}, code="unconfirmed", text="")
        .ready(LEADER_LEASE_MISSING, NOTIFICATION_DEFERRED),
    ),
    "S4 a wrong count": ("S4", DispatchHistory().request("r").ready(LEADER_LEASE_MISSING, pending=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_dispatch_checker_reports_a_violating_history(name: str) -> None:
    number, story = BAD[name]
    violations = list(findings(story.history))
    assert [violation.number for violation in violations] == [number]
    assert [violation.number for violation in CHECKERS[number](story.history)] == [number]


def test_dispatch_checkers_accept_a_valid_history() -> None:
    story = (
        DispatchHistory()
        .committed("notifications.subscribe", FOLLOWED)
        .request("r")
        .submit(prompt_text("r"))
        .move("r", "notified", "notified")
        .move("r", "delivered", "delivered")
        .ready(LEADER_LEASE_MISSING, ("replay_pending", "replay_pending"), delivered=1)
        .submit(prompt_text("r/2"), "%2")
        .committed(
            "notifications.advance", {"cursor": 3}, was=0, cursor=3, event_ids=["r/0", "r/1", "r/2"]
        )
        .ready(LEADER_LEASE_MISSING, delivered=1)
    )
    assert list(findings(story.history)) == []
