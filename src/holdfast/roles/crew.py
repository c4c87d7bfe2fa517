"""A role that is a number of runners: each works off one queue, and all live and end together."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.runner import Runner, State


class RunnerRole:
    """What roles that work off queues have in common. It has the shape of `role.Service`."""

    name = "runners"
    # A runner's handlers are watched by their claims, not by the watchdog of ticks.
    ticking = False

    def __init__(self, runners: Sequence[Runner]) -> None:
        self.runners = list(runners)
        self.rounds = 0

    @property
    def failure(self) -> BaseException | None:
        return next((one.failure for one in self.runners if one.failure is not None), None)

    @property
    def running(self) -> bool:
        return all(one.state is not State.STOPPED for one in self.runners)

    def start(self) -> None:
        for one in self.runners:
            one.start()
        self.rounds = 1

    def request_stop(self) -> None:
        for one in self.runners:
            one.request_stop()

    def join(self, timeout_s: float | None = None) -> None:
        for one in self.runners:
            one.join(timeout_s)
