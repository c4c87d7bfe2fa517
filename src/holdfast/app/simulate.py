"""The simulator for users' own apps: virtual time, crashes at every boundary, parity.

    with hf.simulate(app, seed=7) as s:
        ada = s.world(Account, "ada")
        ada.send(Deposited(5))
        s.run_until_quiet()
        s.assert_parity()

The same seed is the same run. This module is only the door: the simulator is loaded when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Protocol, TypeVar

from holdfast.app.app import App
from holdfast.app.declare import World
from holdfast.app.handle import WorldHandle

W = TypeVar("W", bound=World)


class Simulated(Protocol):
    """What `with hf.simulate(app) as s:` gives."""

    seed: int

    def world(self, kind: type[W], name: str) -> WorldHandle[W]:
        """A world, with send, ask, state, journal, fork and all the rest."""

    def send_many(self, items: Iterable[tuple[WorldHandle[Any], Any]]) -> list[int]: ...

    def advance(self, seconds: float) -> None:
        """Let time pass: workers work, leases run out, timers fire."""

    def run_until_quiet(self) -> None:
        """Until no message waits, and no timer is due, of any world that may go on, and no effect
        is to be done."""

    def crash(self) -> None:
        """Kill every worker where it stands. What was sent stays, and waits for `restart`."""

    def restart(self) -> None: ...

    def assert_parity(self) -> None:
        """Come to rest, then compare every world with a run from scratch and without faults, entry
        by entry and state by state. AssertionError names the first difference."""

    @property
    def now_s(self) -> float:
        """The simulated time, in seconds."""

    @property
    def crashes(self) -> int:
        """How many faults there have been."""

    @property
    def history_hash(self) -> str:
        """The hash of all that happened. The same seed and the same calls: the same hash."""

    def close(self) -> None: ...
    def __enter__(self) -> Simulated: ...

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
) -> Simulated:
    """Run an app in simulated time. `crashes` lets processes fail at commits that the seed picks.

    Effects are really called, in this process; `effects` puts a stand-in in the place of some, by
    kind. `effect_faults` lets processes die before and after calls, and makes some calls twice.
    """
    from holdfast.sim.session import Session

    return Session(
        app,
        seed=seed,
        crashes=crashes,
        workers=workers,
        effects=effects,
        effect_faults=effect_faults,
    )
