"""The runner of jobs: a thread of a server that runs the jobs of all universes of its store, each at its pace.

A process holds a lease for each job that it runs. When it ends, another server continues the job at its cursor.
"""

from __future__ import annotations

import logging
import threading

from holdfast.clock import SYSTEM, Clock, S
from holdfast.durable import lease as leases
from holdfast.durable.lease import Lease
from holdfast.errors import Conflict, Fenced, Held, HoldfastError
from holdfast.ops.jobs import model, steps
from holdfast.ops.jobs.model import Job
from holdfast.store.api import Store, Txn
from holdfast.store.prefix_scan import iter_names
from holdfast.store.schema import Space

LEASE_NS = 10 * S
RENEW_NS = 3 * S
# The longest wait for a notification, and the longest time that `close` waits for it.
WAIT_S = 0.5
LOG = logging.getLogger("holdfast.jobs")


class JobRunner:
    def __init__(self, store: Store, *, clock: Clock = SYSTEM) -> None:
        self._store = store
        self._clock = clock
        self._holder = f"jobs-{clock.entropy(8).hex()}"
        self._leases: dict[str, tuple[Lease, int]] = {}
        # When the next page of a job is due, in monotonic time.
        self._due_ns: dict[str, int] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-jobs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop between two pages and release the leases."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        for resource in list(self._leases):
            self._release(resource)

    def run_round(self) -> float:
        """Run a page of each job that is due. Return the time until the next one is due, in seconds."""
        jobs = self._store.read(_running_jobs)
        for resource in set(self._leases) - {job.resource for job in jobs}:
            self._release(resource)
        for job in jobs:
            if self._closing.is_set():
                break
            if self._due_ns.get(job.resource, 0) <= self._clock.mono_ns():
                self._run_page(job)
        now_ns = self._clock.mono_ns()
        due = [self._due_ns.get(job.resource, now_ns) for job in jobs]
        return max(min(due, default=now_ns + int(WAIT_S * S)) - now_ns, 0) / S

    # -- inside ------------------------------------------------------------------------------------

    def _run(self) -> None:
        since = self._store.wait(model.TOPIC, 0, 0.0)
        while not self._closing.is_set():
            try:
                wait_s = self.run_round()
                if wait_s:
                    since = self._store.wait(model.TOPIC, since, min(wait_s, WAIT_S))
            except HoldfastError as error:
                LOG.warning("jobs wait: %s", error)
                self._closing.wait(WAIT_S)

    def _run_page(self, job: Job) -> None:
        lease = self._hold(job)
        if lease is None:
            return
        began_ns = self._clock.mono_ns()
        try:
            count = steps.step(self._store, job, lease)
        except Fenced:
            self._leases.pop(job.resource, None)
            return
        except Conflict:
            return
        except HoldfastError as error:
            if error.retryable:
                raise
            steps.fail(self._store, job, lease, error)
            return
        self._due_ns[job.resource] = began_ns + int(count / job.row.rate_per_s * S)

    def _hold(self, job: Job) -> Lease | None:
        """Return the lease of a job; None while another server runs it."""
        now_ns = self._clock.mono_ns()
        held = self._leases.get(job.resource)
        try:
            if held is None:
                lease = self._store.transact(
                    leases.acquire, job.resource, self._holder, self._holder, LEASE_NS
                )
            elif now_ns < held[1] + RENEW_NS:
                return held[0]
            else:
                [lease] = self._store.transact(leases.renew, [held[0]], LEASE_NS)
        except Held:
            self._due_ns[job.resource] = now_ns + int(WAIT_S * S)
            return None
        if lease is None:
            self._leases.pop(job.resource, None)
            return None
        self._leases[job.resource] = (lease, now_ns)
        return lease  # type: ignore[no-any-return]

    def _release(self, resource: str) -> None:
        lease, _ = self._leases.pop(resource)
        self._due_ns.pop(resource, None)
        try:
            self._store.transact(leases.release, lease)
        except HoldfastError as error:
            LOG.debug("the lease of %s was lost: %s", resource, error)


def _running_jobs(txn: Txn) -> list[Job]:
    universes = list(iter_names(txn, (int(Space.JOB),)))
    return [job for universe in universes for job in model.list_running(txn, universe)]
