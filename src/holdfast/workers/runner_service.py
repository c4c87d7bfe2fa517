"""The runner service: a group of runners, one per queue, that start and stop together."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from holdfast.runner import Runner, RunnerPolicy, RunnerState


def never_dead_letter(max_batch: int) -> RunnerPolicy:
    """Return the policy for mail and timers: retry without limit, because no component handles
    their dead letters.

    A delivery is fast, so the claim is short. The claim time bounds the delay of an item after its
    worker dies.
    """
    return RunnerPolicy(
        lease_ttl_ms=3_000, max_batch=max_batch, retry_budget_max=1 << 31, expiries_max=1 << 31
    )


class RunnerService:
    """The base class of services that consume queues. It implements `service.ManagedService`."""

    name = "runners"
    # Claims supervise the handlers of a runner, not the tick watchdog.
    ticking = False

    def __init__(self, runners: Sequence[Runner]) -> None:
        self.runners = list(runners)
        self.rounds = 0

    @property
    def failure(self) -> BaseException | None:
        return next((one.failure for one in self.runners if one.failure is not None), None)

    @property
    def running(self) -> bool:
        return all(one.state is not RunnerState.STOPPED for one in self.runners)

    def start(self) -> None:
        # A started runner may add further runners to the list.
        for runner in list(self.runners):
            runner.start()
        self.rounds = 1

    def request_stop(self) -> None:
        for runner in self.runners:
            runner.request_stop()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for all runners, then raise the failure of the first failed one."""
        for runner in self.runners:
            with contextlib.suppress(Exception):
                runner.join(timeout_s)
        if self.failure is not None:
            raise self.failure
