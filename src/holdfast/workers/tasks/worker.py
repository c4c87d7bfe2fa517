"""The task worker: leases tasks, runs them and reports their outcomes.

    step    collect finished attempts → extend leases → report and lease in one commit → submit to the
            executors → sleep until a task arrives, ends or is due

- Plain functions run in threads, coroutines in one event loop, tasks with `isolation="process"` in
  child processes. The worker leases as many tasks as the executors will start soon at their
  measured rate. It releases tasks that are not started within `RETURN_UNSTARTED_NS`, which changes
  no counter.
- A lease is extended while its function runs, within the task's execution window. Each progress
  report restarts the window. When a lease is lost (expired or cancelled), the attempt is marked
  cancelled and its executor slot is abandoned.
- Reports are committed in batches. The outcome of a task with `report="each"` is committed in its
  executor thread, and no task of this worker starts meanwhile (`report_barrier`).
- A quarantined task is leased only when the worker is idle, and nothing is leased beside it.
- On stop the worker releases unstarted tasks at once, and running ones after `STOP_GRACE_S`.

The leases come from the task operations, not from queue claims, and a task may take microseconds.
The worker is therefore a separate loop beside the Runner, over the same executors
(docs/decisions/0012).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping

from holdfast import gc_control
from holdfast.clock import SYSTEM, Clock, S
from holdfast.config import CONCURRENCY_MAX, SETTLEMENT_BYTES_MAX
from holdfast.durable.validation import check_name
from holdfast.errors import CommitUnknown, HoldfastError, Invalid, StoreClosed
from holdfast.leadership import worker_registry
from holdfast.runner.claim_supervisor import ExecutorExhausted
from holdfast.runner.wakeup import Wakeup
from holdfast.store.api import ParkedTransaction, Store, Txn, read_stale
from holdfast.tasks import operations as tasks
from holdfast.tasks.leases import LEASE_BATCH_MAX, leases_of_worker, next_due_ns
from holdfast.tasks.model import keys_of
from holdfast.tasks.operations import (
    AttemptOutcome,
    LeaseResult,
    ReportAndLeaseResult,
    TaskReport,
)
from holdfast.tasks.parked_lease import SOON_NS
from holdfast.tasks.queries import queues_with_work
from holdfast.workers.tasks.attempt import AttemptResult, TaskAttempt, TaskDefinition
from holdfast.workers.tasks.executors import TaskExecutors
from holdfast.workers.tasks.leader_handoff import LeaderHandoff, LocalRun
from holdfast.workers.tasks.lease_table import LeaseTable
from holdfast.workers.tasks.quarantine_window import QuarantineWindow
from holdfast.workers.tasks.upkeep import TaskUpkeep

CONCURRENCY = 16
REPORTS_MAX = 2_000
# Queues that one commit leases from.
QUEUES_PER_COMMIT = 16
STOP_GRACE_S = 10.0
STOP_GRACE_S_MAX = 3_600.0
IDLE_S = SOON_NS / S
HEARTBEAT_NS = 3 * S
RETRY_PAUSE_S = 0.05
SHUTDOWN_TRIES = 40
SHUTDOWN_RETRY_NS = 5 * S
# The batching delay of reports while the executors are busy.
REPORT_DELAY_S = 0.002
# How long the loop yields the GIL after it has submitted tasks to idle executors.
GIL_YIELD_S = 0.001


class TaskWorker:
    name = "task"
    # Leases supervise the functions, not the tick watchdog.
    ticking = False

    def __init__(
        self,
        store: Store,
        *,
        universe: str,
        codes: Mapping[str, TaskDefinition],
        worker: str,
        incarnation: str,
        queues: Iterable[str],
        concurrency: int = CONCURRENCY,
        processes: int | None = None,
        stop_grace_s: float = STOP_GRACE_S,
        clock: Clock = SYSTEM,
    ) -> None:
        self.store = store
        self.universe = universe
        self.worker = f"{worker}:task"
        self.incarnation = incarnation
        # The lease holder name. New at each start, so that a restart never uses leases of the
        # former process.
        self.owner = f"{self.worker}/{incarnation[:12]}"
        self.queues = list(queues)
        if not codes:
            raise Invalid(
                what="tasks", why="a task worker needs at least one task; see App(tasks=…)"
            )
        if not self.queues:
            raise Invalid(what="queues", why="a task worker needs at least one queue")
        for queue in self.queues:
            check_name("queue", queue)
        if not 0 <= stop_grace_s <= STOP_GRACE_S_MAX:
            raise Invalid(what="stop_grace_s", found=stop_grace_s, min=0, max=STOP_GRACE_S_MAX)
        for what, found in (("concurrency", concurrency), ("processes", processes or 1)):
            if type(found) is not int or not 1 <= found <= CONCURRENCY_MAX:
                raise Invalid(what=what, found=repr(found)[:64], min=1, max=CONCURRENCY_MAX)
        self.failure: BaseException | None = None
        self.rounds = 0
        self.counts = dict.fromkeys(tasks.ReportAnswer, 0)
        self._counting = threading.Lock()
        keys = keys_of(universe)
        self._queue_topics = [keys.queue_topic(queue) for queue in self.queues]
        self._own_topic = keys.worker_topic(self.owner)
        self._topics = [*self._queue_topics, keys.revoked_topic, self._own_topic]
        # The parked lease request, and the capacity it asks for.
        self._parked: ParkedTransaction | None = None
        self._parked_capacity: tuple[int, tuple[int, ...]] = (0, ())
        # The last commit that notified this worker's own topic.
        self._last_wakeup = 0
        self._definitions = codes
        self._task_names = tuple(sorted(codes))
        self._clock = clock
        self._grace_ns = int(stop_grace_s * S)
        self._executors = TaskExecutors(
            codes,
            concurrency,
            processes or os.cpu_count() or 1,
            self._wake,
            clock,
            self._commit_report,
        )
        self._leases = LeaseTable(store, universe, self._executors)
        # The table's own dict: the hot path reads it directly.
        self._leased = self._leases.attempts
        self._reports: list[TaskReport] = []
        self._look_for_tasks = True
        # Whether a commit outcome is unknown and not yet resolved.
        self._outcome_unknown = False
        self._reports_delayed = False
        self._queue_rotation = 0
        # Whether the last lease left tasks behind, and queues found with work but not asked yet.
        self._more = False
        self._queues_left: list[str] = []
        self._due_ns: int | None = None
        self._quarantine_waits = False
        self._quarantined: TaskAttempt | None = None
        self._window = QuarantineWindow()
        self._heartbeat_ns = 0
        self._stopping = threading.Event()
        self._sleeping = False
        self._task_upkeep = TaskUpkeep(store, universe)
        self._wakeup: Wakeup | None = None
        self._handoff = LeaderHandoff(self._loop, "holdfast-task")
        self._last_commit = 0
        # The callable that this thread runs next, and its lease result.
        self._local_run: LocalRun | None = None
        self._local_run_lease: LeaseResult | None = None
        self._thread: threading.Thread | None = None

    # -- life ------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._thread is not None and not self._handoff.finished.is_set()

    @property
    def leased_count(self) -> int:
        """The number of leased tasks."""
        return len(self._leased)

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name="holdfast-task", daemon=True)
        self._thread.start()

    def request_stop(self) -> None:
        self._stopping.set()
        self._wake()
        # Fire and forget: the store may be unavailable.
        self.store.submit(lambda txn: txn.notify(self._own_topic))

    def skip_grace(self) -> None:
        """Release running tasks without grace time on stop."""
        self._grace_ns = 0

    def join(self, timeout_s: float | None = None) -> None:
        if self._thread is not None:
            self._handoff.finished.wait(timeout_s)

    def run(self) -> None:
        self._wakeup = Wakeup(self.store, self._topics)
        self._handoff.run()

    def _loop(self) -> LocalRun | None:
        """Run the loop. It may return a task for this thread, and the standby thread continues the
        loop.
        """
        assert self._wakeup is not None
        try:
            while not self._stopping.is_set():
                if self._parked is None and self._local_run_lease is None:
                    self._last_commit = self.store.wait(self._topics, self._last_commit, 0.0)
                more = self.step()
                self.rounds += 1
                if self._local_run is not None:
                    local_run, self._local_run = self._local_run, None
                    return local_run
                if not more and not self._stopping.is_set():
                    self._last_commit = self._sleep(self._last_commit)
            self._shut_down()
        except StoreClosed:
            pass
        except BaseException as error:
            # While the store is unavailable, leases that were not released expire.
            if not (self._stopping.is_set() and _is_transient(error)):
                self.failure = error
            self._cancel_parked()
        self._task_upkeep.close()
        self._wakeup.close()
        self._executors.close()
        return None

    def look_for_tasks(self) -> None:
        """Look for tasks in the next step."""
        self._look_for_tasks = True

    def _sleep(self, since: int) -> int:
        sleep_s = self._sleep_s()
        if sleep_s <= 0:
            # Something is due now.
            self.look_for_tasks()
            return since
        if not self._executors.busy:
            # No attempt is running, so only the store can bring work.
            return self._wait_parked(since, sleep_s)
        else:
            assert self._wakeup is not None
            if self._reports_delayed:
                self._stopping.wait(sleep_s)
            else:
                self._sleeping = True
                if not self._executors.has_finished:
                    self._wakeup.wait(sleep_s)
                self._sleeping = False
        self.look_for_tasks()
        return since

    def _wait_parked(self, since: int, sleep_s: float) -> int:
        """Park a lease request at the store and wait. The commit that submits tasks leases them for
        this worker.
        """
        self._park()
        gc_control.collect_if_near()
        if self._parked is None:
            since = self.store.wait(self._topics, since, sleep_s)
            self.look_for_tasks()
        else:
            self._last_wakeup = self._parked.wait([self._own_topic], self._last_wakeup, sleep_s)
        return since

    def _park(self) -> None:
        if (
            self._parked is None
            and len(self.queues) <= QUEUES_PER_COMMIT
            and not self._quarantine_waits
        ):
            idle_slots = self._executors.idle_slots
            self._parked_capacity = min(sum(idle_slots), LEASE_BATCH_MAX), idle_slots
            self._parked = self.store.submit_when(
                self._queue_topics,
                tasks.lease_or_park,
                self.universe,
                self.owner,
                self.queues,
                *self._parked_capacity,
                self._task_names,
                self._due_ns or 0,
            )

    def _unpark(self) -> None:
        """Accept the result of the parked request, or cancel it."""
        parked, self._parked = self._parked, None
        self._look_for_tasks = True
        if parked is not None and (parked.is_answered or not parked.cancel()):
            leased = parked.result()
            attempts = self._new_attempts(leased)
            # A single task of an idle worker runs in this thread.
            if len(attempts) == len(self._leased) == 1 and self._handoff.has_standby:
                self._local_run = (
                    None if self._stopping.is_set() else self._executors.run_in_caller(attempts[0])
                )
                if self._local_run is not None:
                    self._local_run_lease = leased
                    return
            if attempts:
                self._executors.submit(attempts)
                self._yield_gil()
            self._on_leased(leased, *self._parked_capacity)
            # Other notifications may have arrived meanwhile.
            self.look_for_tasks()

    def _cancel_parked(self) -> None:
        """Cancel the parked request, or release its grants."""
        parked, self._parked = self._parked, None
        with contextlib.suppress(HoldfastError):
            if parked is not None and not parked.cancel():
                grants = parked.result().grants
                releases = [
                    TaskReport(grant.seq, grant.lease, AttemptOutcome.RELEASED) for grant in grants
                ]
                self.store.transact(
                    tasks.apply_reports, self.universe, self.owner, self.store.generation, releases
                )

    def _resume_as_leader(self) -> None:
        """Continue the loop in this thread after the former leader has started the granted task."""
        leased, self._local_run_lease = self._local_run_lease, None
        assert leased is not None
        self._yield_gil()
        self._on_leased(leased, *self._parked_capacity)
        self.look_for_tasks()

    def _yield_gil(self) -> None:
        """Yield the GIL, so that idle executor threads start their tasks at once."""
        if self._wakeup is not None:
            self._sleeping = True
            if not self._executors.has_finished:
                self._wakeup.wait_local(GIL_YIELD_S)
            self._sleeping = False

    def _wake(self) -> None:
        if self._sleeping and self._wakeup is not None:
            self._wakeup.set()

    def _sleep_s(self) -> float:
        """Return the time until the next step without a notification."""
        now_ns = self.store.now_ns()
        until_ns = now_ns + int(IDLE_S * S)
        until_ns = min(until_ns, self._heartbeat_ns, self._task_upkeep.next_ns)
        if self._due_ns is not None:
            until_ns = min(until_ns, self._due_ns)
        if self._leased:
            until_ns = min(until_ns, self._leases.renew_ns)
        if self._quarantine_waits and self._executors.busy:
            until_ns = min([until_ns, *self._window.next_changes_ns(now_ns)])
        sleep_s = (until_ns - now_ns) / S
        return min(
            sleep_s, self._executors.poll_s, REPORT_DELAY_S if self._reports_delayed else sleep_s
        )

    # -- one step --------------------------------------------------------------------------------

    def step(self) -> bool:
        """Do one step. Returns whether more work may be ready now."""
        try:
            if self._local_run_lease is not None:
                self._resume_as_leader()
            if self._parked is not None and (self._outcome_unknown or self._parked.is_answered):
                # Resolve the parked request first, so that recovery does not release its grants.
                self._unpark()
                return True
            if self._outcome_unknown:
                self._recover_unknown()
            self._collect_finished()
            self._supervise_leases()
            self._upkeep()
            # Last, so that the executors have the GIL when they start the tasks.
            moved = self._report_and_lease()
        except CommitUnknown:
            self._outcome_unknown = True
            self._leases.drop_expired()
            return True
        except HoldfastError as error:
            if not error.retryable:
                raise
            self._leases.drop_expired()
            self._look_for_tasks = True
            self._stopping.wait(RETRY_PAUSE_S)
            return True
        return moved

    def _collect_finished(self) -> None:
        results = self._executors.drain_finished()
        if results:
            release = self._leased.pop
            self._reports += [
                result.report
                for result in results
                if release(result.work.token, None) is not None and not result.reported
            ]
        for attempt in self._executors.take_overdue():
            self._release_attempt(attempt)

    def _commit_report(self, result: AttemptResult) -> bool:
        """Commit one report in its executor thread, while no task starts. Returns whether it
        succeeded. On failure the report joins the next batch, which is safe because reports are
        idempotent.
        """
        attempt = result.work
        while not attempt.lease_expired and not attempt.dropped:
            try:
                [answer] = self.store.transact(
                    tasks.apply_reports,
                    self.universe,
                    self.owner,
                    self.store.generation,
                    [result.report],
                )
            except HoldfastError as error:
                if not _is_transient(error):
                    return False
                # Not `_stopping.wait`: a stopping worker keeps retrying until the lease is over.
                self._clock.sleep(RETRY_PAUSE_S)
                continue
            with self._counting:
                self.counts[tasks.ReportAnswer(answer)] += 1
            return True
        return False

    def _release_attempt(self, attempt: TaskAttempt) -> None:
        if self._leased.pop(attempt.token, None) is not None:
            self._reports.append(TaskReport(*attempt.token, AttemptOutcome.RELEASED))

    def _report_and_lease(self) -> bool:
        """Report and lease in one commit."""
        if self._parked is not None:
            if not self._parked.is_answered and not self._reports:
                self._due_ns = read_stale(self.store, next_due_ns, self.universe)
                if self._due_ns is None or self.store.now_ns() < self._due_ns:
                    return False
            self._unpark()
            if self._local_run is not None:
                return True
        limit, quarantine, free_slots = self._capacity()
        queues = (
            self._queues_to_ask(free_slots)
            if limit and (self._look_for_tasks or self._reports)
            else []
        )
        if limit and not queues:
            # No queue has work. The check is a local read, a lease request would be a commit.
            self._look_for_tasks = False
            limit = 0
        due = self._due_ns is not None and self.store.now_ns() >= self._due_ns
        # A worker without free slots also processes due tasks, because other workers may wait for
        # them.
        if not self._reports and not (self._look_for_tasks and limit) and not due:
            return False
        full = limit >= LEASE_BATCH_MAX
        if (
            len(self._reports) < self._executors.queued_count
            and not self._reports_delayed
            and not full
        ):
            # The executors have queued work: outcomes that follow shortly join the same commit.
            self._reports_delayed = True
            return False
        self._reports_delayed = False
        reports = _first_commit_of(self._reports, SETTLEMENT_BYTES_MAX)
        with self.store.batched():
            all_reported = len(reports) == len(self._reports) and not limit and not due
            if all_reported and not self._executors.busy and not self._stopping.is_set():
                # Park in the same message, so that new tasks are granted without another round
                # trip.
                self._park()
            result: ReportAndLeaseResult = self.store.transact(
                tasks.report_and_lease,
                self.universe,
                self.owner,
                self.store.generation,
                reports,
                queues,
                limit,
                quarantine,
                free_slots,
                self._task_names,
            )
        del self._reports[: len(reports)]
        with self._counting:
            for answer in tasks.ReportAnswer:
                self.counts[answer] += result.answers.count(int(answer))
        self._accept(result.leased, limit, free_slots)
        return bool(self._reports) or (self._look_for_tasks and self._capacity()[0] > 0)

    def _queues_to_ask(self, free_slots: tuple[int, ...]) -> list[str]:
        """Return the queues with work, rotated, so that a queue that is always full starves no
        other.
        """
        if len(self.queues) <= QUEUES_PER_COMMIT and self._more:
            queues = self.queues
        elif self._queues_left:
            # Queues found by the last read and not asked yet.
            queues, self._queues_left = (
                self._queues_left[:QUEUES_PER_COMMIT],
                self._queues_left[QUEUES_PER_COMMIT:],
            )
        else:
            queues, self._due_ns = read_stale(
                self.store, self._read_queues, self.queues, free_slots
            )
            queues, self._queues_left = queues[:QUEUES_PER_COMMIT], queues[QUEUES_PER_COMMIT:]
        if not queues:
            return queues
        self._queue_rotation = (self._queue_rotation + 1) % len(queues)
        return queues[self._queue_rotation :] + queues[: self._queue_rotation]

    def _read_queues(
        self, txn: Txn, queues: list[str], free_slots: tuple[int, ...]
    ) -> tuple[list[str], int | None]:
        """Read the queues with work for this worker, and the next due time."""
        kinds = [kind for kind, room in enumerate(free_slots) if room > 0]
        found = queues_with_work(txn, self.universe, queues, self._task_names, kinds)
        return found, next_due_ns(txn, self.universe)

    def _capacity(self) -> tuple[int, bool, tuple[int, ...]]:
        """Return the number of tasks to lease, whether to lease a quarantined task, and the slots
        by kind.
        """
        if (
            self._quarantined is not None
            and self._leased.get(self._quarantined.token) is self._quarantined
        ):
            return 0, False, ()  # a quarantined task runs alone
        free_slots = self._executors.free_slots
        usual = min(sum(free_slots), LEASE_BATCH_MAX), False, free_slots
        if not self._quarantine_waits:
            return usual
        if not self._executors.busy:
            return 1, True, free_slots
        return (0, False, ()) if self._window.should_drain(self.store.now_ns()) else usual

    def _accept(self, leased: LeaseResult, limit: int, free_slots: tuple[int, ...]) -> None:
        attempts = self._new_attempts(leased)
        if attempts:
            self._executors.submit(attempts)
        self._on_leased(leased, limit, free_slots)

    def _new_attempts(self, leased: LeaseResult) -> list[TaskAttempt]:
        """Create attempts for the grants and register their leases."""
        taken_ns, now, codes = self._clock.mono_ns(), self.store.now_ns, self._definitions
        expires_ns = lease_ns = renew_ns = 0
        leased_by_token = self._leased
        attempts = []
        for grant in leased.grants:
            # Tasks granted together usually share the expiry.
            if grant.expires_ns != expires_ns or grant.lease_ns != lease_ns:
                expires_ns, lease_ns = grant.expires_ns, grant.lease_ns
                renew_ns = expires_ns - lease_ns + lease_ns // 3
                if not leased_by_token or renew_ns < self._leases.renew_ns:
                    self._leases.renew_ns = renew_ns
            attempt = TaskAttempt(grant, codes[grant.name], taken_ns, renew_ns, now)
            leased_by_token[attempt.token] = attempt
            attempts.append(attempt)
        # A quarantined task is always the only grant.
        if attempts and attempts[0].grant.suspect:
            self._quarantined = attempts[0]
            self._window.reset()
        return attempts

    def _on_leased(self, leased: LeaseResult, limit: int, free_slots: tuple[int, ...]) -> None:
        """Process the other fields of a lease result."""
        if limit:
            # If the grants filled the slots of a kind, more tasks may be ready.
            full = len(leased.grants) >= min(limit, max(free_slots))
            self._more = full or leased.suspects or leased.overdue
            self._look_for_tasks = self._more or bool(self._queues_left)
            if not leased.overdue:
                self._quarantine_waits = leased.suspects
        if not limit or not self._look_for_tasks:
            self._due_ns = read_stale(self.store, next_due_ns, self.universe)
        self._leases.note_revocations(leased.revocations)

    # -- leases ----------------------------------------------------------------------------------

    def _supervise_leases(self) -> None:
        if self._executors.exhausted:
            # The threads are stuck for good: only a new process has usable executors.
            raise ExecutorExhausted(worker=self.worker, queue=",".join(self.queues))
        self._executors.wake_one_more()
        self._leases.supervise(self.store.now_ns())

    def _recover_unknown(self) -> None:
        """Resolve an unknown commit outcome: release leases that this worker holds without an
        attempt. Pending reports are sent again, and the store repeats its first answer.
        """
        leased = self.store.read(leases_of_worker, self.universe, self.owner)
        reported = {(report.seq, report.lease) for report in self._reports}
        for token in leased:
            if token not in self._leased and token not in reported:
                self._reports.append(TaskReport(*token, AttemptOutcome.RELEASED))
        self._outcome_unknown = False

    # -- upkeep ----------------------------------------------------------------------------------

    def _upkeep(self) -> None:
        now_ns = self.store.now_ns()
        if now_ns >= self._heartbeat_ns:
            self.store.transact(
                worker_registry.heartbeat,
                self.universe,
                self.worker,
                self.incarnation,
                ("task",),
                0,
                len(self._leased),
            )
            self._heartbeat_ns = now_ns + HEARTBEAT_NS
        self._task_upkeep.start_if_due(now_ns)

    def _shut_down(self) -> None:
        """Release unstarted tasks, wait for running ones, and release them after the grace time."""
        self._retry_until(self._unpark)
        for attempt in self._executors.take_unstarted():
            self._release_attempt(attempt)
        until_ns = self._clock.mono_ns() + self._grace_ns
        while self._leased and self._clock.mono_ns() < until_ns:
            self._collect_finished()
            self._retry_until(self._report_all)
            self._retry_until(self._supervise_leases)
            self._wait_while_stopping()
        for attempt in list(self._leased.values()):
            self._release_attempt(attempt)
            self._executors.abandon(attempt)
        self._collect_finished()
        self._retry_until(self._report_all)
        self._retry_until(self._unregister)

    def _retry_until(self, action: Callable[[], None]) -> None:
        """Run a shutdown action, with bounded retries while the store is busy."""
        until_ns = self._clock.mono_ns() + SHUTDOWN_RETRY_NS
        for left in reversed(range(SHUTDOWN_TRIES)):
            try:
                return action()
            except HoldfastError as error:
                late = not left or self._clock.mono_ns() >= until_ns
                if late or not _is_transient(error):
                    raise
                self._clock.sleep(RETRY_PAUSE_S)

    def _unregister(self) -> None:
        self.store.transact(worker_registry.remove, self.universe, self.worker, self.incarnation)

    def _wait_while_stopping(self) -> None:
        assert self._wakeup is not None
        self._sleeping = True
        if self._leased and not self._executors.has_finished:
            self._wakeup.wait(RETRY_PAUSE_S)
        self._sleeping = False

    def _report_all(self) -> None:
        while self._reports:
            reports = _first_commit_of(self._reports, SETTLEMENT_BYTES_MAX)
            self.store.transact(
                tasks.apply_reports, self.universe, self.owner, self.store.generation, reports
            )
            del self._reports[: len(reports)]


def _is_transient(error: BaseException) -> bool:
    """Whether a store error is transient."""
    return isinstance(error, CommitUnknown) or (
        isinstance(error, HoldfastError) and error.retryable
    )


def _first_commit_of(reports: list[TaskReport], bytes_max: int) -> list[TaskReport]:
    """Return the first reports, within the limits of one commit."""
    size = 0
    for count, report in enumerate(reports[:REPORTS_MAX]):
        size += len(report.result) + len(report.error)
        if size > bytes_max and count:
            return reports[:count]
    return reports[:REPORTS_MAX]
