"""The simulator for user applications: virtual time, crashes at commit boundaries, replay parity.

    with hf.simulate(app, seed=7) as s:
        ada = s.world(Account, "ada")
        ada.send(Deposited(5))
        s.run_until_quiet()
        s.assert_parity()

The same seed gives the same run. This module holds the public interface; it imports the simulator lazily.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from holdfast.app.app import App
from holdfast.app.definitions import World
from holdfast.app.flow_definition import Flow, FlowCall
from holdfast.app.flow_handle import FlowHandle
from holdfast.app.task_handle import TaskHandle
from holdfast.app.tasks import Task, TaskCall
from holdfast.app.world_handle import WorldHandle

W = TypeVar("W", bound=World)
T = TypeVar("T")
P = ParamSpec("P")


class SimulatedApp(Protocol):
    """A simulation session, as returned by `with hf.simulate(app) as s:`."""

    seed: int

    def world(self, kind: type[W], name: str) -> WorldHandle[W]:
        """Return the handle of a world."""

    def send_many(self, items: Iterable[tuple[WorldHandle[Any], Any]]) -> list[int]: ...

    def submit(
        self, task: Task[..., T] | TaskCall[..., T], /, *args: Any, **kwargs: Any
    ) -> TaskHandle[T]:
        """Submit a task, as `rt.submit` does."""

    def task(self, id: str) -> TaskHandle[Any]:
        """Return the handle of a task by id."""

    def start(
        self, flow: Flow[P, T] | FlowCall[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> FlowHandle[T]:
        """Start a flow, as `rt.start` does."""

    @overload
    def flow(self, id: str) -> FlowHandle[Any]: ...
    @overload
    def flow(self, id: Flow[..., T], *, key: str) -> FlowHandle[T]: ...

    def advance(self, seconds: float) -> None:
        """Advance the simulated time: workers run, leases expire, timers, sleeps and schedules fire."""

    def run_until_quiet(self) -> None:
        """Run until no active world has a waiting message or a due timer, no effect is pending, no task is ready or
        waits for another attempt, and every flow has ended or waits for an event, a sleep or a child."""

    def crash(self) -> None:
        """Kill every worker immediately. Delivered messages stay and are handled after `restart`."""

    def restart(self) -> None: ...

    def assert_parity(self) -> None:
        """Run until quiet, then compare every entry and state of every world with a fault-free run from
        scratch, and run every flow again from the top with its records. The AssertionError names the first
        difference."""

    @property
    def now_s(self) -> float:
        """The simulated time, in seconds."""

    @property
    def crashes(self) -> int:
        """The number of injected faults."""

    @property
    def history_hash(self) -> str:
        """The hash of the recorded history. The same seed and the same calls give the same hash."""

    def close(self) -> None: ...
    def __enter__(self) -> SimulatedApp: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def simulate(
    app: App,
    *,
    seed: int = 0,
    crashes: bool = True,
    workers: int = 2,
    effects: Mapping[str, Callable[..., Any]] | None = None,
    effect_faults: bool = True,
) -> SimulatedApp:
    """Run an app in simulated time. `crashes` makes processes fail at commits that the seed selects.

    Effects, tasks and steps of flows are called for real, in this process. `effects` replaces effects with stubs, by
    kind. `effect_faults` kills processes before and after calls, and repeats some calls of effects.
    """
    from holdfast.sim.session import SimulationSession

    return SimulationSession(
        app,
        seed=seed,
        crashes=crashes,
        workers=workers,
        effects=effects,
        effect_faults=effect_faults,
    )
