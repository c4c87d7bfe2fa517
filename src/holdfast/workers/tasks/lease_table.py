"""The lease table of a task worker: the attempts under lease, their renewal, expiry and revocation."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.clock import MS, Clock, S
from holdfast.store.api import Store, Txn, read_stale
from holdfast.tasks import operations as tasks
from holdfast.tasks.leases import LEASE_BATCH_MAX, is_current_lease
from holdfast.tasks.model import keys_of
from holdfast.tasks.operations import HeldLease, TaskGrant
from holdfast.tasks.parked_lease import SOON_NS
from holdfast.workers.tasks.attempt import TaskAttempt, TaskDefinition
from holdfast.workers.tasks.executors import TaskExecutors

PROGRESS_NS = S


class LeaseTable:
    """Attempts by lease token. `renew_ns` is the time of the next renewal."""

    def __init__(
        self,
        store: Store,
        universe: str,
        definitions: Mapping[str, TaskDefinition],
        executors: TaskExecutors,
        clock: Clock,
    ) -> None:
        self.attempts: dict[tuple[int, int], TaskAttempt] = {}
        self.renew_ns = 0
        self._store = store
        self._universe = universe
        self._definitions = definitions
        self._executors = executors
        self._clock = clock
        self._progress_ns = 0
        self._revocations = 0
        self._quarantined: TaskAttempt | None = None

    @property
    def quarantined_runs(self) -> bool:
        """Whether a quarantined task is under lease."""
        attempt = self._quarantined
        return attempt is not None and self.attempts.get(attempt.token) is attempt

    def add_grants(self, grants: list[TaskGrant]) -> list[TaskAttempt]:
        """Create attempts for the grants and register their leases."""
        taken_ns, now, definitions = self._clock.mono_ns(), self._store.now_ns, self._definitions
        expires_ns = lease_ns = renew_ns = 0
        attempts_by_token = self.attempts
        attempts = []
        for grant in grants:
            # Tasks granted together usually share the expiry.
            if grant.expires_ns != expires_ns or grant.lease_ns != lease_ns:
                expires_ns, lease_ns = grant.expires_ns, grant.lease_ns
                renew_ns = expires_ns - lease_ns + lease_ns // 3
                if not attempts_by_token or renew_ns < self.renew_ns:
                    self.renew_ns = renew_ns
            attempt = TaskAttempt(grant, definitions[grant.name], taken_ns, renew_ns, now)
            attempts_by_token[attempt.token] = attempt
            attempts.append(attempt)
        # A quarantined task is always the only grant.
        if attempts and attempts[0].grant.suspect:
            self._quarantined = attempts[0]
        return attempts

    def supervise(self, now_ns: int) -> None:
        """Extend leases that are due, report progress, and abandon attempts with a revoked lease."""
        if not self.attempts:
            self.renew_ns = now_ns + SOON_NS
            return
        if now_ns >= self.renew_ns:
            self._extend(now_ns)
        if now_ns - self._progress_ns >= PROGRESS_NS:
            self._progress_ns = now_ns
            self._report_progress()
        revocations: int = read_stale(
            self._store, lambda txn: txn.count(keys_of(self._universe).revocations)
        )
        self.note_revocations(revocations)

    def note_revocations(self, revocations: int) -> None:
        """Compare the store's revocation counter with the last known one."""
        if revocations != self._revocations:
            self._revocations = revocations
            self._drop_revoked()

    def _extend(self, now_ns: int) -> None:
        due = [attempt for attempt in self.attempts.values() if now_ns >= attempt.renew_ns]
        for start in range(0, len(due), LEASE_BATCH_MAX):
            batch = due[start : start + LEASE_BATCH_MAX]
            progressed = [attempt.progressed for attempt in batch]
            held_leases = [
                HeldLease(*attempt.token, had_progress)
                for attempt, had_progress in zip(batch, progressed, strict=True)
            ]
            answers: list[int] = self._store.transact(
                tasks.extend, self._universe, self._store.generation, held_leases
            )
            for attempt, had_progress, expires_ns in zip(batch, progressed, answers, strict=True):
                if not expires_ns:
                    self.abandon(attempt)
                    continue
                attempt.progressed = attempt.progressed and not had_progress
                attempt.expires_ns = expires_ns
                # Past the execution window the lease is not extended: check again at its expiry.
                left_ns = expires_ns - now_ns
                attempt.renew_ns = now_ns + max(left_ns // 3, min(left_ns, 50 * MS))
        self.renew_ns = min(
            (attempt.renew_ns for attempt in self.attempts.values()),
            default=now_ns + SOON_NS,
        )

    def drop_expired(self) -> None:
        """Abandon attempts whose leases have expired by the local clock, while the store is
        unavailable.
        """
        for attempt in [attempt for attempt in self.attempts.values() if attempt.lease_expired]:
            self.abandon(attempt)

    def _drop_revoked(self) -> None:
        def lost(txn: Txn) -> list[TaskAttempt]:
            return [
                run
                for run in self.attempts.values()
                if not is_current_lease(txn, self._universe, *run.token)
            ]

        for run in self._store.read(lost):
            self.abandon(run)

    def abandon(self, attempt: TaskAttempt) -> None:
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
