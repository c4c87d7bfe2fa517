"""The task worker: leases tasks, runs them and reports their outcomes.

    step    collect finished attempts → extend leases → report and lease in one commit → submit to the
            executors → sleep until a task arrives, ends or is due

- Plain functions run in threads, coroutines in one event loop, tasks with `isolation="process"` in
  child processes. The worker leases as many tasks as the executors will start soon at their
  measured rate. It releases tasks that are not started within `UNSTARTED_MAX_NS`, which changes
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from holdfast import failpoints, gc_control
from holdfast.app_hooks import NO_HOOKS, AppHooks
from holdfast.clock import SYSTEM, Clock, S
from holdfast.config import CONCURRENCY_MAX
from holdfast.durable.validation import check_name
from holdfast.errors import CommitUnknown, HoldfastError, Invalid, StoreClosed
from holdfast.runner.drain import Drain, DrainPhase
from holdfast.runner.executor import ExecutorExhausted
from holdfast.runner.lease_supervision import LeaseCounters
from holdfast.runner.unknown_outcome import can_repeat, orphaned_leases
from holdfast.runner.wakeup import Wakeup
from holdfast.store.api import Store, Txn, read_stale
from holdfast.store.latency_histogram import LatencyHistogram
from holdfast.tasks import operations as tasks
from holdfast.tasks.leases import SOON_NS, leases_of_worker, next_due_ns
from holdfast.tasks.model import keys_of
from holdfast.tasks.operations import (
    AttemptOutcome,
    GrantRequest,
    LeaseResult,
    ReportAndLeaseResult,
    TaskReport,
)
from holdfast.tasks.queries import queues_with_work
from holdfast.workers.tasks.attempt import AttemptObserver, TaskAttempt, TaskDefinition
from holdfast.workers.tasks.demand import LeaseCapacity, LeaseDemand, LeasePlan
from holdfast.workers.tasks.executors import TaskExecutors
from holdfast.workers.tasks.leader_handoff import LeaderHandoff, LocalRun
from holdfast.workers.tasks.lease_table import LeaseTable
from holdfast.workers.tasks.parked_request import ParkedRequest
from holdfast.workers.tasks.report_buffer import RETRY_PAUSE_S, ReportBuffer
from holdfast.workers.tasks.upkeep import TaskUpkeep, WorkerHeartbeat

CONCURRENCY = 16
STOP_GRACE_S = 10.0
STOP_GRACE_S_MAX = 3_600.0
IDLE_S = SOON_NS / S
SHUTDOWN_TRIES = 40
SHUTDOWN_RETRY_NS = 5 * S
# The batching delay of reports while the executors are busy.
REPORT_DELAY_S = 0.002
# How long the loop yields the GIL after it has submitted tasks to idle executors.
GIL_YIELD_S = 0.001


class TaskWorkerIdentity(NamedTuple):
    """The names of a task worker, its queues and the tasks that it can run."""

    universe: str
    worker: str
    incarnation: str
    # The lease holder name. New at each start, so that a restart never uses leases of the former
    # process.
    owner: str
    queues: list[str]
    task_names: tuple[str, ...]

    @property
    def own_topic(self) -> str:
        return keys_of(self.universe).worker_topic(self.owner)

    @property
    def topics(self) -> list[str]:
        """The topics that wake the worker."""
        keys = keys_of(self.universe)
        queue_topics = [keys.queue_topic(queue) for queue in self.queues]
        return [*queue_topics, keys.revoked_topic, self.own_topic]

    def check(self) -> None:
        if not self.task_names:
            raise Invalid(
                what="tasks", why="a task worker needs at least one task; see App(tasks=…)"
            )
        if not self.queues:
            raise Invalid(what="queues", why="a task worker needs at least one queue")
        for queue in self.queues:
            check_name("queue", queue)


class LoopSleep:
    """The sleep of the worker loop. A finished attempt wakes the loop only while it sleeps."""

    def __init__(self, store: Store, topics: list[str]) -> None:
        self._store = store
        self._topics = topics
        self._wakeup: Wakeup | None = None
        self._sleeping = False
        # The last commit of the topics that the loop knows.
        self._last_commit = 0

    def open(self) -> None:
        self._wakeup = Wakeup(self._store, self._topics)

    def close(self) -> None:
        if self._wakeup is not None:
            self._wakeup.close()

    def wake(self) -> None:
        if self._sleeping and self._wakeup is not None:
            self._wakeup.set()

    def wait_store(self, timeout_s: float) -> None:
        """Wait for a commit of the topics."""
        self._last_commit = self._store.wait(self._topics, self._last_commit, timeout_s)

    def wait(self, timeout_s: float, executors: TaskExecutors) -> None:
        """Wait for a finished attempt or a commit of the topics."""
        assert self._wakeup is not None
        self._sleeping = True
        if not executors.has_finished:
            self._wakeup.wait(timeout_s)
        self._sleeping = False

    def yield_gil(self, executors: TaskExecutors) -> None:
        """Yield the GIL, so that idle executor threads start their tasks at once."""
        if self._wakeup is not None:
            self._sleeping = True
            if not executors.has_finished:
                self._wakeup.wait_local(GIL_YIELD_S)
            self._sleeping = False


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
        hooks: AppHooks = NO_HOOKS,
        clock: Clock = SYSTEM,
    ) -> None:
        self.identity = identity = TaskWorkerIdentity(
            universe,
            worker=f"{worker}:task",
            incarnation=incarnation,
            owner=f"{worker}:task/{incarnation[:12]}",
            queues=list(queues),
            task_names=tuple(sorted(codes)),
        )
        identity.check()
        _check_options(concurrency, processes, stop_grace_s)
        self.store = store
        self.failure: BaseException | None = None
        self.rounds = 0
        self._clock = clock
        self._grace_ns = int(stop_grace_s * S)
        self._stopping = threading.Event()
        self._sleep = LoopSleep(store, identity.topics)
        observer = AttemptObserver(universe, identity.worker, hooks)
        self._reports = ReportBuffer(store, universe, identity.owner, observer, clock)
        self._executors = self._create_executors(
            codes, concurrency, processes or os.cpu_count() or 1
        )
        self._leases = LeaseTable(store, universe, codes, self._executors, clock)
        self._demand = LeaseDemand(identity.queues)
        self._parked = ParkedRequest(
            store, universe, identity.owner, identity.queues, identity.task_names
        )
        self._heartbeat = WorkerHeartbeat(store, universe, identity.worker, incarnation)
        self._upkeep = self._create_upkeep()
        # Whether a commit outcome is unknown and not yet resolved.
        self._outcome_unknown = False
        self._handoff = LeaderHandoff(self._loop, "holdfast-task")
        # The callable that this thread runs next, and its lease result.
        self._local_run: LocalRun | None = None
        self._local_run_lease: LeaseResult | None = None
        self._thread: threading.Thread | None = None

    def _create_executors(
        self, codes: Mapping[str, TaskDefinition], concurrency: int, processes: int
    ) -> TaskExecutors:
        return TaskExecutors(
            codes, concurrency, processes, self._sleep.wake, self._clock, self._reports.commit_one
        )

    def _create_upkeep(self) -> TaskUpkeep:
        return TaskUpkeep(self.store, self.identity.universe)

    # -- life ------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._thread is not None and not self._handoff.finished.is_set()

    @property
    def leased_count(self) -> int:
        """The number of leased tasks."""
        return len(self._leases.attempts)

    @property
    def counts(self) -> Mapping[tasks.ReportAnswer, int]:
        """The answers to this worker's reports, counted."""
        return self._reports.counts

    @property
    def outcomes(self) -> Sequence[int]:
        """The number of ended attempts by `AttemptOutcome`."""
        return self._reports.observer.outcomes

    @property
    def latencies(self) -> LatencyHistogram:
        """The durations of ended attempts."""
        return self._reports.observer.latencies

    @property
    def lease_counters(self) -> LeaseCounters:
        return self._leases.counters

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name="holdfast-task", daemon=True)
        self._thread.start()

    def request_stop(self) -> None:
        self._stopping.set()
        self._sleep.wake()
        # Fire and forget: the store may be unavailable.
        self.store.submit(lambda txn: txn.notify(self.identity.own_topic))

    def skip_grace(self) -> None:
        """Release running tasks without grace time on stop."""
        self._grace_ns = 0

    def join(self, timeout_s: float | None = None) -> None:
        if self._thread is not None:
            self._handoff.finished.wait(timeout_s)

    def run(self) -> None:
        self._sleep.open()
        self._handoff.run()

    def _loop(self) -> LocalRun | None:
        """Run the loop. It may return a task for this thread, and the standby thread continues the
        loop.
        """
        try:
            while not self._stopping.is_set():
                if not self._parked.is_open and self._local_run_lease is None:
                    self._sleep.wait_store(0.0)
                more = self.step()
                self.rounds += 1
                if self._local_run is not None:
                    local_run, self._local_run = self._local_run, None
                    return local_run
                if not more and not self._stopping.is_set():
                    self._sleep_until_due()
            self._shut_down()
        except StoreClosed:
            pass
        except BaseException as error:
            # While the store is unavailable, leases that were not released expire.
            if not (self._stopping.is_set() and can_repeat(error)):
                self.failure = error
            self._cancel_parked()
        self._upkeep.close()
        self._sleep.close()
        self._executors.close()
        return None

    def look_for_tasks(self) -> None:
        """Look for tasks in the next step."""
        self._demand.look_for_tasks = True

    def _sleep_until_due(self) -> None:
        sleep_s = self._sleep_s()
        if sleep_s > 0 and not self._executors.busy:
            # No attempt is running, so only the store can bring work.
            self._wait_parked(sleep_s)
            return
        if sleep_s > 0 and self._demand.reports_delayed:
            self._stopping.wait(sleep_s)
        elif sleep_s > 0:
            self._sleep.wait(sleep_s, self._executors)
        self.look_for_tasks()

    def _sleep_s(self) -> float:
        """Return the time until the next step without a notification."""
        now_ns = self.store.now_ns()
        busy = self._executors.busy
        until_ns = min(now_ns + int(IDLE_S * S), self._heartbeat.next_ns, self._upkeep.next_ns)
        check_ns = self._demand.next_check_ns(now_ns, busy=busy)
        if check_ns is not None:
            until_ns = min(until_ns, check_ns)
        if self._leases.attempts:
            until_ns = min(until_ns, self._leases.renew_ns)
        sleep_s = min((until_ns - now_ns) / S, self._executors.poll_s)
        return min(sleep_s, REPORT_DELAY_S) if self._demand.reports_delayed else sleep_s

    # -- one step --------------------------------------------------------------------------------

    def step(self) -> bool:
        """Do one step. Returns whether more work may be ready now."""
        try:
            if self._local_run_lease is not None:
                self._resume_as_leader()
            if self._parked.is_open and (self._outcome_unknown or self._parked.is_answered):
                # Resolve the parked request first, so that recovery does not release its grants.
                self._unpark()
                return True
            if self._outcome_unknown:
                self._recover_unknown()
            self._collect_finished()
            self._supervise_leases()
            now_ns = self.store.now_ns()
            self._heartbeat.send_if_due(now_ns, self.leased_count)
            self._apply_draining()
            self._upkeep.start_if_due(now_ns)
            # Last, so that the executors have the GIL when they start the tasks.
            moved = self._report_and_lease()
        except HoldfastError as error:
            if not can_repeat(error):
                raise
            self._leases.drop_expired()
            if isinstance(error, CommitUnknown):
                self._outcome_unknown = True
                return True
            self.look_for_tasks()
            self._pause(RETRY_PAUSE_S)
            return True
        return moved

    def _apply_draining(self) -> None:
        """Ask for no task while an operator drains the worker, and look for tasks afterwards."""
        draining = self._heartbeat.draining
        if draining == self._demand.draining:
            return
        self._demand.draining = draining
        if draining:
            for attempt in self._executors.take_unstarted():
                self._release_attempt(attempt)
            self._unpark()
        else:
            self.look_for_tasks()

    def _pause(self, seconds: float) -> None:
        """Wait before another try. A stop request ends the wait."""
        self._stopping.wait(seconds)

    def _collect_finished(self) -> None:
        results = self._executors.drain_finished()
        if results:
            self._reports.observer.observe(results)
            release = self._leases.attempts.pop
            self._reports.pending += [
                result.report
                for result in results
                if release(result.work.token, None) is not None and not result.reported
            ]
            self._reports.count_committed(sum([result.work.reported for result in results]))
        for attempt in self._executors.take_overdue():
            self._release_attempt(attempt)

    def _release_attempt(self, attempt: TaskAttempt) -> None:
        if self._leases.attempts.pop(attempt.token, None) is not None and not attempt.reported:
            self._reports.add_release(attempt.token)

    def _supervise_leases(self) -> None:
        if self._executors.exhausted:
            # The threads never return: only a new process has usable executors.
            identity = self.identity
            raise ExecutorExhausted(worker=identity.worker, queue=",".join(identity.queues))
        self._executors.wake_one_more()
        self._leases.supervise(self.store.now_ns())

    def _recover_unknown(self) -> None:
        """Resolve an unknown commit outcome: release leases that this worker holds without an
        attempt. Pending reports are sent again, and the store repeats its first answer.
        """
        identity = self.identity
        leased = self.store.read(leases_of_worker, identity.universe, identity.owner)
        known = {(report.seq, report.lease) for report in self._reports.pending}
        known.update(self._leases.attempts)
        for token in orphaned_leases(leased, known.__contains__):
            self._reports.add_release(token)
        self._outcome_unknown = False

    # -- reports and leases ----------------------------------------------------------------------

    def _report_and_lease(self) -> bool:
        """Report and lease in one commit."""
        if self._parked.is_open:
            if not self._parked.is_answered and not self._reports.pending:
                self._read_due_ns()
                due_ns = self._demand.due_ns
                if due_ns is None or self.store.now_ns() < due_ns:
                    return False
            self._unpark()
            if self._local_run is not None:
                return True
        demand, pending = self._demand, self._reports.pending
        capacity = self._capacity()
        asks = capacity.limit and (demand.look_for_tasks or pending)
        plan = demand.plan(
            capacity,
            self._queues_to_ask(capacity) if asks else [],
            report_count=len(pending),
            queued_count=self._executors.queued_count,
            now_ns=self.store.now_ns(),
        )
        if plan is None:
            return False
        self._commit(plan)
        return bool(pending) or (demand.look_for_tasks and self._capacity().limit > 0)

    def _commit(self, plan: LeasePlan) -> None:
        identity, capacity = self.identity, plan.capacity
        reports = self._reports.next_batch()
        request = GrantRequest(
            identity.owner,
            plan.queues,
            capacity.limit,
            capacity.quarantine,
            capacity.free_slots,
            identity.task_names,
        )
        with self.store.batched():
            is_idle = len(reports) == len(self._reports.pending) and not capacity.limit
            if (
                is_idle
                and not plan.due
                and not self._executors.busy
                and not self._stopping.is_set()
            ):
                # Park in the same message, so that new tasks are granted without another round
                # trip.
                self._park()
            if failpoints.armed:
                failpoints.hit("task_worker.report_and_lease", self)
            result: ReportAndLeaseResult = self.store.transact(
                tasks.report_and_lease, identity.universe, self.store.generation, reports, request
            )
        self._reports.on_committed(reports, result.answers)
        attempts = self._leases.add_grants(result.leased.grants)
        if attempts:
            self._executors.submit(attempts)
        self._on_leased(result.leased, capacity)

    def _capacity(self) -> LeaseCapacity:
        return self._demand.capacity(
            self._executors.free_slots,
            busy=self._executors.busy,
            quarantined_runs=self._leases.quarantined_runs,
            now_ns=self.store.now_ns(),
        )

    def _queues_to_ask(self, capacity: LeaseCapacity) -> list[str]:
        """Return the queues with work, in the order in which to ask them."""
        queues = self._demand.known_queues()
        if queues is None:
            kinds = [kind for kind, slots in enumerate(capacity.free_slots) if slots > 0]
            queues = self._demand.found_queues(*read_stale(self.store, self._read_queues, kinds))
        return queues

    def _read_queues(self, txn: Txn, kinds: list[int]) -> tuple[list[str], int | None]:
        """Read the queues with work for this worker, and the next due time."""
        identity = self.identity
        found = queues_with_work(
            txn, identity.universe, identity.queues, identity.task_names, kinds
        )
        return found, next_due_ns(txn, identity.universe)

    def _on_leased(self, leased: LeaseResult, capacity: LeaseCapacity) -> None:
        """Process the fields of a lease result other than its grants."""
        if self._demand.on_leased(leased, capacity):
            self._read_due_ns()
        self._leases.note_revocations(leased.revocations)

    def _read_due_ns(self) -> None:
        self._demand.due_ns = read_stale(self.store, next_due_ns, self.identity.universe)

    # -- the parked request ----------------------------------------------------------------------

    def _park(self) -> None:
        if self._demand.can_park:
            self._parked.park(self._executors.idle_slots, self._demand.due_ns)

    def _wait_parked(self, sleep_s: float) -> None:
        """Park a lease request at the store and wait."""
        self._park()
        gc_control.collect_if_near()
        if self._parked.is_open:
            self._parked.wait(sleep_s)
        else:
            self._sleep.wait_store(sleep_s)
            self.look_for_tasks()

    def _unpark(self) -> None:
        """Accept the result of the parked request, or cancel it."""
        self.look_for_tasks()
        leased = self._parked.take()
        if leased is None:
            return
        attempts = self._leases.add_grants(leased.grants)
        # A single task of an idle worker runs in this thread.
        if len(attempts) == self.leased_count == 1 and self._handoff.has_standby:
            self._local_run = (
                None if self._stopping.is_set() else self._executors.run_in_caller(attempts[0])
            )
            if self._local_run is not None:
                self._local_run_lease = leased
                return
        if attempts:
            self._executors.submit(attempts)
            self._sleep.yield_gil(self._executors)
        self._on_leased(leased, self._parked.capacity)
        # Other notifications may have arrived meanwhile.
        self.look_for_tasks()

    def _resume_as_leader(self) -> None:
        """Continue the loop in this thread after the former leader has started the granted task."""
        leased, self._local_run_lease = self._local_run_lease, None
        assert leased is not None
        self._sleep.yield_gil(self._executors)
        self._on_leased(leased, self._parked.capacity)
        self.look_for_tasks()

    def _cancel_parked(self) -> None:
        """Cancel the parked request, or release its grants."""
        with contextlib.suppress(HoldfastError):
            leased = self._parked.take()
            if leased is not None:
                self._reports.commit(
                    [
                        TaskReport(grant.seq, grant.lease, AttemptOutcome.RELEASED)
                        for grant in leased.grants
                    ]
                )

    # -- drain -----------------------------------------------------------------------------------

    def _shut_down(self) -> None:
        """Release unstarted tasks, wait for running ones, and release them after the grace time."""
        self._retry_until(self._unpark)
        if self._outcome_unknown:
            self._retry_until(self._recover_unknown)
        for attempt in self._executors.take_unstarted():
            self._release_attempt(attempt)
        drain = Drain()
        while self._drain_phase(drain) is DrainPhase.GRACE:
            self._collect_finished()
            self._retry_until(self._reports.commit_all)
            self._retry_until(self._supervise_leases)
            if self._leases.attempts:
                self._sleep.wait(RETRY_PAUSE_S, self._executors)
        for attempt in list(self._leases.attempts.values()):
            self._release_attempt(attempt)
            self._executors.abandon(attempt)
        self._collect_finished()
        self._retry_until(self._reports.commit_all)
        self._retry_until(self._heartbeat.remove)

    def _drain_phase(self, drain: Drain) -> DrainPhase:
        return drain.phase(
            self._clock.mono_ns(), grace_ns=self._grace_ns, in_progress=self.leased_count
        )

    def _retry_until(self, action: Callable[[], None]) -> None:
        """Run a shutdown action, with bounded retries while the store is busy."""
        until_ns = self._clock.mono_ns() + SHUTDOWN_RETRY_NS
        for tries_remaining in reversed(range(SHUTDOWN_TRIES)):
            try:
                return action()
            except HoldfastError as error:
                late = not tries_remaining or self._clock.mono_ns() >= until_ns
                if late or not can_repeat(error):
                    raise
                self._outcome_unknown |= isinstance(error, CommitUnknown)
                self._leases.drop_expired()
                self._clock.sleep(RETRY_PAUSE_S)


def _check_options(concurrency: int, processes: int | None, stop_grace_s: float) -> None:
    if not 0 <= stop_grace_s <= STOP_GRACE_S_MAX:
        raise Invalid(what="stop_grace_s", found=stop_grace_s, min=0, max=STOP_GRACE_S_MAX)
    for what, found in (("concurrency", concurrency), ("processes", processes or 1)):
        if type(found) is not int or not 1 <= found <= CONCURRENCY_MAX:
            raise Invalid(what=what, found=repr(found)[:64], min=1, max=CONCURRENCY_MAX)
