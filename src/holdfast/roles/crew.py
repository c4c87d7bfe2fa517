"""A role that is a number of runners: each works off one queue, and all live and end together."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from holdfast.runner import Policy, Runner, State


def certain(max_batch: int) -> Policy:
    """For mail and timers: nobody would hear of their death, so they are never given up.

    Delivering takes no time, so a claim is short: it is how late a timer is when its worker dies.
    """
    return Policy(
        lease_ttl_ms=3_000, max_batch=max_batch, retry_budget_max=1 << 31, expiries_max=1 << 31
    )


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
        # One that has begun may hire more.
        for one in list(self.runners):
            one.start()
        self.rounds = 1

    def request_stop(self) -> None:
        for one in self.runners:
            one.request_stop()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for all of them, then raise what ended the first that failed."""
        for one in self.runners:
            with contextlib.suppress(Exception):
                one.join(timeout_s)
        if self.failure is not None:
            raise self.failure
