"""The runner of jobs: a service of a server that runs the jobs of all universes of its store, each at its pace.

A process holds a lease for each job that it runs. When it ends, another server continues the job at its cursor.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from holdfast.clock import SYSTEM, Clock, S
from holdfast.durable import lease as leases
from holdfast.durable.lease import Lease
from holdfast.errors import Fenced, Held, HoldfastError
from holdfast.ops.jobs import model, steps
from holdfast.ops.jobs.model import Job
from holdfast.store.api import Store, Txn
from holdfast.store.prefix_scan import iter_names
from holdfast.store.schema import Space
from holdfast.workers.service import TickService

LEASE_NS = 10 * S
RENEW_NS = 3 * S
# How long a runner leaves a job alone that another process runs.
HELD_NS = S
LOG = logging.getLogger("holdfast.jobs")


class JobRunner(TickService):
    name = "jobs"
    idle_s = 60.0

    def __init__(self, store: Store, clock: Clock = SYSTEM) -> None:
        super().__init__(store, clock)
        self._holder = f"jobs-{clock.entropy(8).hex()}"
        # The leases by resource, each with the time of its last renewal.
        self._leases: dict[str, tuple[Lease, int]] = {}
        # When the next page of a job is due, in monotonic time.
        self._due_ns: dict[str, int] = {}
        self._pause_s = 0.0

    @property
    def topics(self) -> Sequence[str]:
        return [model.TOPIC]

    def sleep_s(self) -> float:
        return self._pause_s

    def tick(self) -> bool:
        """Run a page of each job that is due."""
        jobs: list[Job] = self.store.read(_running_jobs)
        resources = {job.resource for job in jobs}
        for resource in set(self._leases) - resources:
            self._release(resource)
        self._due_ns = {name: at for name, at in self._due_ns.items() if name in resources}
        for job in jobs:
            if self._due_ns.get(job.resource, 0) <= self.clock.mono_ns():
                self._run_page(job)
        now_ns = self.clock.mono_ns()
        idle_ns = now_ns + int(self.idle_s * S)
        due_ns = min((self._due_ns.get(job.resource, now_ns) for job in jobs), default=idle_ns)
        self._pause_s = max(due_ns - now_ns, 0) / S
        return not self._pause_s

    def shut_down(self) -> None:
        for resource in list(self._leases):
            self._release(resource)

    # -- inside ------------------------------------------------------------------------------------

    def _run_page(self, job: Job) -> None:
        lease = self._hold(job)
        if lease is None:
            return
        began_ns = self.clock.mono_ns()
        try:
            count = steps.step(self.store, job, lease)
        except Fenced:
            self._leases.pop(job.resource, None)
            return
        except HoldfastError as error:
            if error.retryable:
                raise
            LOG.warning("job %s of %s failed: %s", job.id, job.universe, error)
            steps.fail(self.store, job, lease, error)
            return
        self._due_ns[job.resource] = began_ns + int(count / job.row.rate_per_s * S)

    def _hold(self, job: Job) -> Lease | None:
        """Return the lease of a job; None while another process runs it."""
        now_ns = self.clock.mono_ns()
        held = self._leases.get(job.resource)
        if held is not None and now_ns < held[1] + RENEW_NS:
            return held[0]
        lease: Lease | None = None
        try:
            if held is None:
                lease = self.store.transact(
                    leases.acquire, job.resource, self._holder, self._holder, LEASE_NS
                )
            else:
                [lease] = self.store.transact(leases.renew, [held[0]], LEASE_NS)
        except Held:
            self._due_ns[job.resource] = now_ns + HELD_NS
        if lease is None:
            self._leases.pop(job.resource, None)
        else:
            self._leases[job.resource] = (lease, now_ns)
        return lease

    def _release(self, resource: str) -> None:
        lease, _ = self._leases.pop(resource)
        try:
            self.store.transact(leases.release, lease)
        except Fenced as error:
            LOG.debug("the lease of %s was lost: %s", resource, error)


def _running_jobs(txn: Txn) -> list[Job]:
    universes = list(iter_names(txn, (int(Space.JOB),)))
    return [job for universe in universes for job in model.list_running(txn, universe)]
