"""Deploys of flows, forward and back under load: the parked flows equal the prediction of `holdfast verify --app`.

Release 2 inserts, removes and renames a step and changes the arguments of a step, each in another flow. A client
starts flows and sends events all the time. Before each deploy the workers are stopped and `verify --app` replays the
flows on the other release.

The prediction is compared with every flow of the deploy: with the ones that wait, the ones that ran when the workers
were stopped, and the ones that had ended. An ended flow keeps its state, its result and its steps.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast import store as stores
from holdfast.app.flow_handle import FlowStatus
from holdfast.app.runtime import Runtime
from holdfast.flows.step_list import FlowStep
from tests.process import flow_release_1
from tests.process.conftest import LIMITS
from tests.process.watch import until
from tests.processes import Proc

MODULES = ("holdfast.ops.flow_replay", "holdfast.flows.parked_flows")

LONG_S = 120.0
FLOWS = tuple(flow_release_1.app.flows.values())


class DeployLoad:
    """Starts flows and sends events in a thread. Every second flow gets its event only in `release`."""

    def __init__(self, store: stores.Store) -> None:
        self.runtime = Runtime(flow_release_1.app, store, roles=())
        self.handles: list[Any] = []
        self.held: list[Any] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> DeployLoad:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(0.02):
            self.start(len(self.handles))

    def start(self, n: int) -> None:
        key = f"k{n}"
        handle = self.runtime.start(FLOWS[n % len(FLOWS)].options(key=key), key)
        if n // len(FLOWS) % 2:
            handle.send(flow_release_1.Departure(), key="go")
        else:
            self.held.append(handle)
        self.handles.append(handle)

    def release(self) -> list[Any]:
        """Send the events that were held back. Returns all flows that have got their events by now."""
        started = list(self.handles)
        held, self.held = self.held, []
        for handle in held:
            handle.send(flow_release_1.Departure(), key="go")
        return started


@contextlib.contextmanager
def workers(home: Path, release: int) -> Iterator[None]:
    """Run a worker process of a release, and stop it in order."""
    module = f"tests.process.flow_release_{release}:app"
    argv = [sys.executable, "-m", "holdfast.cli", "up", module, "--store", str(home)]
    with Proc.spawn([*argv, "--lease-s", "2"], timeout_s=LONG_S) as process:
        yield
        process.terminate()
        assert process.wait(LONG_S) == 0


def verify(home: Path, release: int) -> Any:
    module = f"tests.process.flow_release_{release}:app"
    argv = [sys.executable, "-m", "holdfast.cli", "verify", "--app", module, "--store", str(home)]
    done = subprocess.run(
        [*argv, "--jobs", "1", "--json"], capture_output=True, text=True, timeout=LONG_S
    )
    document = json.loads(done.stdout)
    assert done.returncode == (1 if document["parks"] else 0), done.stderr
    assert document["differences"] == []
    return document


def states(handles: list[Any]) -> dict[str, str]:
    return {handle.id: handle.status().state for handle in handles}


class EndedFlow(NamedTuple):
    """What an ended flow shows to the outside."""

    status: FlowStatus
    result: str
    steps: list[FlowStep]

    @classmethod
    def of(cls, handle: Any) -> EndedFlow:
        return cls(handle.status(), handle.result(timeout=0), handle.steps())


class DeployedFlows:
    """All flows that were started before a deploy, and what the ended ones among them showed."""

    def __init__(self) -> None:
        self._ended: dict[str, EndedFlow] = {}

    def settle(self, handles: list[Any], predicted: Set[str] = frozenset()) -> None:
        """Wait until exactly the predicted flows are parked and all others have ended. Flows that had ended before
        have not changed, and each flow ends with its own result and with one outcome for each step."""
        running = [handle for handle in handles if handle.id not in self._ended]
        assert predicted <= set(states(running))

        def is_settled() -> bool:
            # A flow that the former release had parked is PARKED until a worker of this release resumes it.
            return all(
                state == ("PARKED" if id in predicted else "COMPLETED")
                for id, state in states(running).items()
            )

        until(is_settled, "exactly the predicted flows are parked", LONG_S, poll_s=0.1)
        for handle in handles:
            if handle.id in predicted:
                continue
            found = EndedFlow.of(handle)
            assert found == self._ended.setdefault(handle.id, found)
            assert found.result == f"shelf of {handle.key}"
            labels = [(step.name, step.occurrence) for step in found.steps]
            assert len(labels) == len(set(labels))
            assert {step.state for step in found.steps} == {"completed"}

    @property
    def ended(self) -> set[str]:
        return set(self._ended)


def wait_until_held(load: DeployLoad, count: int) -> None:
    """Wait until the worker has run this number of held flows up to their receive."""

    def is_held() -> bool:
        waiting = [handle for handle in list(load.held) if handle.status().state == "WAITING"]
        return len(waiting) >= count

    until(is_held, "flows wait for their event", LONG_S, poll_s=0.1)


def run(home: Path, rounds: int, held: int) -> None:
    with stores.open(home, limits=LIMITS) as store, DeployLoad(store) as load:
        predicted: set[str] = set()
        parked = predicted
        deployed = DeployedFlows()
        for release in [1, 2] * rounds + [1, 2, 1]:
            before, parked = load.release(), predicted
            with workers(home, release):
                # Every flow of the former release ends, except for the ones that were predicted to be parked.
                deployed.settle(before, parked)
                wait_until_held(load, held)
            document = verify(home, 3 - release)
            predicted = set(document["parks"])
            assert not predicted & deployed.ended
            names = {one["name"] for one in document["flow_findings"] if one["parks"]}
            assert names == {"changed"}
            assert all(
                one["step"] == "charge#1" for one in document["flow_findings"] if one["parks"]
            )
            gone = {label for one in document["flow_findings"] for label in one["removed"]}
            assert ({"notify#1", "tell#1"} if release == 1 else {"greet#1", "inform#1"}) <= gone
        # The flows that release 1 parked belong to release 2 and the other way round: each release ends its own.
        load.__exit__()
        load.release()
        for release in (1, 2):
            with workers(home, release):
                deployed.settle(load.handles, parked if release == 1 else frozenset())
        assert deployed.ended == set(states(load.handles))
        print(f"{len(load.handles)} flows, {2 * rounds + 2} deploys")


@pytest.mark.timeout(600)
def test_parked_flows_equal_the_prediction_of_verify(home: Path) -> None:
    run(home, 0, 6)


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_parked_flows_equal_the_prediction_of_verify_ten_times(home: Path) -> None:
    run(home, 10, 60)
