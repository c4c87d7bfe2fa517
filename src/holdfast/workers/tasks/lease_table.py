"""The lease table of a task worker: the attempts under lease. `runner.lease_supervision` has the rules
of their extension and loss.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast import logs, traces
from holdfast.clock import Clock, S
from holdfast.runner.lease_supervision import LeaseCounters, LeaseSupervision
from holdfast.store.api import Store, Txn, read_stale
from holdfast.tasks import operations as tasks
from holdfast.tasks.leases import is_current_lease
from holdfast.tasks.model import keys_of
from holdfast.tasks.operations import HeldLease, TaskGrant
from holdfast.workers.tasks.attempt import TaskAttempt, TaskDefinition
from holdfast.workers.tasks.executors import TaskExecutors

PROGRESS_NS = S


class LeaseTable:
    """Attempts by lease token."""

    def __init__(
        self,
        store: Store,
        universe: str,
        definitions: Mapping[str, TaskDefinition],
        executors: TaskExecutors,
        clock: Clock,
    ) -> None:
        self.attempts: dict[tuple[int, int], TaskAttempt] = {}
        self._store = store
        self._universe = universe
        self._definitions = definitions
        self._executors = executors
        self._clock = clock
        self._progress_ns = 0
        self._quarantined: TaskAttempt | None = None
        self._supervision: LeaseSupervision[TaskAttempt] = LeaseSupervision(self)

    @property
    def renew_ns(self) -> int:
        """The time of the next extension."""
        return self._supervision.renew_ns

    @property
    def quarantined_runs(self) -> bool:
        """Whether a quarantined task is under lease."""
        attempt = self._quarantined
        return attempt is not None and self.attempts.get(attempt.token) is attempt

    def add_grants(self, grants: list[TaskGrant]) -> list[TaskAttempt]:
        """Create attempts for the grants and register their leases."""
        taken_ns, now, definitions = self._clock.mono_ns(), self._store.now_ns, self._definitions
        expires_ns = renew_ns = 0
        attempts_by_token = self.attempts
        attempts = []
        lease_trace = self._record_lease(grants)
        for grant in grants:
            # Tasks granted together usually share the expiry.
            if grant.expires_ns != expires_ns:
                expires_ns = grant.expires_ns
                renew_ns = self._supervision.add_lease(now(), expires_ns)
            attempt = TaskAttempt(grant, definitions[grant.name], taken_ns, renew_ns, now)
            attempt.lease_trace = lease_trace
            attempts_by_token[attempt.token] = attempt
            attempts.append(attempt)
        # A quarantined task is always the only grant.
        if attempts and attempts[0].grant.suspect:
            self._quarantined = attempts[0]
        return attempts

    def _record_lease(self, grants: list[TaskGrant]) -> bytes:
        """Make the span of a lease if a leased task is sampled. Return its context if it is sampled, too.

        One lease serves tasks of many traces, so it has links to them.
        """
        sampled = [
            grant.trace for grant in grants if grant.trace and traces.is_sampled(grant.trace)
        ]
        if not sampled:
            return b""
        attributes = traces.message_attributes("lease", "receive", grants[0].queue)
        attributes |= {
            "holdfast.universe": self._universe,
            "messaging.batch.message_count": len(grants),
        }
        parent = sampled[0] if len(grants) == 1 else b""
        span = traces.start_root(
            f"lease {grants[0].queue}",
            traces.CLIENT,
            attributes,
            parent,
            sampled[: traces.LINKS_MAX],
        )
        if span is None:
            return b""
        span.end()
        return span.context if traces.is_sampled(span.context) else b""

    def supervise(self, now_ns: int) -> None:
        """Extend leases that are due, report progress, and abandon attempts with a lost lease."""
        if not self.attempts:
            return
        for attempt in self._supervision.check(now_ns):
            log = logs.warn if attempt.lease_expired else logs.inform
            log("tasks", "lease lost" if attempt.lease_expired else "lease revoked",
                universe=self._universe, task=attempt.id, name=attempt.grant.name,
                attempt=attempt.attempt, trace_id=traces.trace_id(attempt.grant.trace))  # fmt: skip
            self.abandon(attempt)
        if now_ns - self._progress_ns >= PROGRESS_NS:
            self._progress_ns = now_ns
            self._report_progress()

    def note_revocations(self, revocations: int) -> None:
        """Abandon attempts with a revoked lease if the store's revocation counter has changed."""
        for attempt in self._supervision.note_revocations(revocations):
            self.abandon(attempt)

    def drop_expired(self) -> None:
        """Abandon attempts with an expired lease, while the store does not answer."""
        for attempt in self._supervision.expired(self._store.now_ns()):
            self.abandon(attempt)

    @property
    def counters(self) -> LeaseCounters:
        return self._supervision.counters

    def abandon(self, attempt: TaskAttempt) -> None:
        self._supervision.counters.lost += 1
        self.attempts.pop(attempt.token, None)
        self._executors.abandon(attempt)

    def _report_progress(self) -> None:
        updates = []
        for attempt in self.attempts.values():
            value, attempt.progress_value = attempt.progress_value, None
            if value is not None:
                updates.append((*attempt.token, value))
        if updates:
            self._store.transact(tasks.report_progress, self._universe, updates)

    # -- called by the lease supervision ---------------------------------------------------------

    def held(self) -> list[TaskAttempt]:
        return [attempt for attempt in self.attempts.values() if not attempt.reported]

    def extend(self, due: list[TaskAttempt]) -> list[int]:
        # A lease is not extended past the execution window, which progress restarts.
        progressed = [attempt.progressed for attempt in due]
        held_leases = [
            HeldLease(*attempt.token, had_progress)
            for attempt, had_progress in zip(due, progressed, strict=True)
        ]
        expiries: list[int] = self._store.transact(
            tasks.extend, self._universe, self._store.generation, held_leases
        )
        for attempt, had_progress in zip(due, progressed, strict=True):
            if had_progress:
                attempt.progressed = False
        return expiries

    def count_revocations(self) -> int:
        revocations: int = read_stale(
            self._store, lambda txn: txn.count(keys_of(self._universe).revocations)
        )
        return revocations

    def find_revoked(self, held: list[TaskAttempt]) -> list[TaskAttempt]:
        def lost(txn: Txn) -> list[TaskAttempt]:
            return [
                attempt
                for attempt in held
                if not is_current_lease(txn, self._universe, *attempt.token)
            ]

        return self._store.read(lost)
