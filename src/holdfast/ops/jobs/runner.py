"""The runner of jobs: a service of a server that runs the jobs of all universes of its store, each at its pace.

- A process holds a lease for each job that it runs. When it ends, another server continues the job at its cursor.
- An error of one job ends or postpones this job. Other jobs continue.
- An error of the runner itself is logged, and the runner starts again.
- The runner also removes expired idempotency keys of requests, because a server may be the only process of its store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast import logs
from holdfast.clock import SYSTEM, Clock, S
from holdfast.config import DEDUPE_RETENTION_NS
from holdfast.durable import dedupe
from holdfast.durable import lease as leases
from holdfast.durable.lease import Lease
from holdfast.errors import (
    CommitUnknown,
    Fenced,
    Held,
    HoldfastError,
    StoreClosed,
    StoreCorrupt,
    StoreError,
    StoreGone,
    StoreReplaced,
)
from holdfast.ops.jobs import model, steps
from holdfast.ops.jobs.model import RATE_PER_S_MIN, Job
from holdfast.store.api import Store, Txn
from holdfast.store.prefix_scan import iter_names
from holdfast.store.schema import Space
from holdfast.workers.service import TickService

LEASE_NS = 10 * S
RENEW_NS = 3 * S
# How long a runner leaves a job alone that another process runs, or that met an error of the store.
HELD_NS = S
POSTPONED_NS = S
# The pause before a runner that failed starts again. It doubles with each failure.
RESTART_S = 1.0
RESTART_S_MAX = 60.0
# How often expired idempotency keys are removed, and how many of a universe in one commit.
KEY_EXPIRY_NS = 60 * S
KEYS_PER_COMMIT = 250


class LastPage(NamedTuple):
    """The last page of a job, in monotonic time."""

    began_ns: int
    subjects: int


class JobRunner(TickService):
    name = "jobs"
    idle_s = 60.0

    def __init__(self, store: Store, clock: Clock = SYSTEM) -> None:
        super().__init__(store, clock)
        self._holder = f"jobs-{clock.entropy(8).hex()}"
        # The leases by resource, each with the time of its last renewal.
        self._leases: dict[str, tuple[Lease, int]] = {}
        self._pages: dict[str, LastPage] = {}
        # The jobs that wait for a lease or after an error, each with the time of the next try.
        self._postponed: dict[str, int] = {}
        self._key_expiry_ns = 0
        self._pause_s = 0.0

    @property
    def topics(self) -> Sequence[str]:
        return [model.TOPIC]

    def sleep_s(self) -> float:
        return self._pause_s

    def run(self) -> None:
        pause_s = RESTART_S
        super().run()
        while self.failure is not None and not self._stopping.is_set():
            error = self.failure
            if isinstance(error, StoreClosed | StoreGone | StoreReplaced):
                return  # the process reports it
            logs.warn("jobs", "job runner failed", error=f"{type(error).__name__}: {error}",
                      restart_s=pause_s)  # fmt: skip
            if self._stopping.wait(pause_s):
                return
            self.failure = None
            pause_s = min(2 * pause_s, RESTART_S_MAX)
            super().run()

    def tick(self) -> bool:
        """Run a page of each job that is due. Remove a batch of expired idempotency keys."""
        jobs: list[Job] = self.store.read(_running_jobs)
        self._forget_ended({job.resource for job in jobs})
        for job in jobs:
            if self._stopping.is_set():
                return False
            self._advance(job)
        more_keys = self._expire_keys()
        now_ns = self.clock.mono_ns()
        due = [self._key_expiry_ns, *(self._due_ns(job) for job in jobs)]
        due += [renewed_ns + RENEW_NS for _, renewed_ns in self._leases.values()]
        self._pause_s = max(min(due) - now_ns, 0) / S
        return more_keys or not self._pause_s

    def shut_down(self) -> None:
        for resource in list(self._leases):
            self._release(resource)

    # -- jobs --------------------------------------------------------------------------------------

    def _forget_ended(self, resources: set[str]) -> None:
        for resource in set(self._leases) - resources:
            self._release(resource)
        self._pages = {name: page for name, page in self._pages.items() if name in resources}
        self._postponed = {name: at for name, at in self._postponed.items() if name in resources}

    def _due_ns(self, job: Job) -> int:
        """Return when the next page of a job is due, at its present pace."""
        due_ns = self._postponed.get(job.resource, 0)
        page = self._pages.get(job.resource)
        if page is not None:
            rate_per_s = max(job.row.rate_per_s, RATE_PER_S_MIN)
            due_ns = max(due_ns, page.began_ns + int(page.subjects / rate_per_s * S))
        return due_ns

    def _advance(self, job: Job) -> None:
        """Run the next page of a job if it is due. Keep the lease of a job that waits for its pace."""
        is_due = self._due_ns(job) <= self.clock.mono_ns()
        if not is_due and job.resource not in self._leases:
            return
        try:
            lease = self._hold(job)
            if is_due and lease is not None:
                self._run_page(job, lease)
        except Fenced:
            self._leases.pop(job.resource, None)
        except StoreClosed:
            raise
        except HoldfastError as error:
            # The store may answer again. The job is unchanged, or its next page continues at the new cursor.
            logs.inform(
                "jobs", "job postponed", universe=job.universe, job=job.id, error=str(error)
            )
            self._postponed[job.resource] = self.clock.mono_ns() + POSTPONED_NS

    def _run_page(self, job: Job, lease: Lease) -> None:
        began_ns = self.clock.mono_ns()
        try:
            count = steps.step(self.store, job, lease)
        except Exception as error:
            if _is_of_the_store(error):
                raise
            logs.warn("jobs", "job failed", universe=job.universe, job=job.id,
                      action=job.row.action, error=steps.error_text(error))  # fmt: skip
            steps.fail(self.store, job, lease, error)
        else:
            self._pages[job.resource] = LastPage(began_ns, count)

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
            self._postponed[job.resource] = now_ns + HELD_NS
        if lease is None:
            self._leases.pop(job.resource, None)
        else:
            self._leases[job.resource] = (lease, now_ns)
        return lease

    def _release(self, resource: str) -> None:
        lease, _ = self._leases.pop(resource)
        try:
            self.store.transact(leases.release, lease)
        except Fenced:
            return  # another process has the job

    # -- idempotency keys --------------------------------------------------------------------------

    def _expire_keys(self) -> bool:
        """Remove a batch of expired keys of each universe. Return whether more may be left."""
        now_ns = self.clock.mono_ns()
        if now_ns < self._key_expiry_ns:
            return False
        more = False
        for scope in self.store.read(dedupe.list_expired_scopes, DEDUPE_RETENTION_NS):
            removed = self.store.transact(
                dedupe.expire, scope, DEDUPE_RETENTION_NS, KEYS_PER_COMMIT
            )
            more |= removed == KEYS_PER_COMMIT
        if not more:
            self._key_expiry_ns = now_ns + KEY_EXPIRY_NS
        return more


def _running_jobs(txn: Txn) -> list[Job]:
    universes = list(iter_names(txn, (int(Space.JOB),)))
    return [job for universe in universes for job in model.list_running(txn, universe)]


def _is_of_the_store(error: Exception) -> bool:
    """Whether an error is of the store and not of the job: the same page may succeed later, here or in another process."""
    if isinstance(error, StoreCorrupt) or not isinstance(error, HoldfastError):
        return False
    return error.retryable or isinstance(error, Fenced | CommitUnknown | StoreError)
