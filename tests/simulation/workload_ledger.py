"""Actors of a run's ledger: services that compete for it, tasks that process its rows, a sink.

A `Service` is the process that holds the run's lease. It opens the log, decides, commits to the
sink in order, and starts the next run after the end of one. Its tasks are in
`workload_ledger_tasks`. `Outside` survives all processes: it holds the address of the service, the
sink, and the behaviour of the rows.
"""

from __future__ import annotations

from typing import Any

from holdfast.clock import MS
from holdfast.durable import lease as leases
from holdfast.durable.lease import Lease
from holdfast.errors import (
    CommitUnknown,
    Conflict,
    Fenced,
    HeadMoved,
    Held,
    IllegalTransition,
    Invalid,
    StoreFull,
)
from holdfast.ledger import runs
from holdfast.ledger.log import RunLog, open_run, verify_run
from holdfast.ledger.run_policy import RunPolicy
from holdfast.ledger.run_scheduler import RunScheduler
from holdfast.ledger.runs import RunLifecycle, RunRecord
from holdfast.sim.actor import Actor, Incarnation, ProcessHalted
from holdfast.sim.run_parameters import draw_behaviour
from holdfast.sim.settings import LEASE_NS, SimulationSettings
from holdfast.store.api import Txn
from tests.simulation.ledger_process import LedgerEnvironment, LedgerProcess, results_between
from tests.simulation.workload_ledger_tasks import LedgerWorker

RUN_NAME = "job"
# Maximum number of files per sink commit.
FILES_PER_COMMIT_MAX = 2
IDLE_NS = 40 * MS
# Errors that end the process of a service. The next one rebuilds the state from the log.
FATAL_ERRORS = (CommitUnknown, Conflict, Fenced, HeadMoved, StoreFull)


def ledger_actors(settings: SimulationSettings) -> list[Actor]:
    """Create the actors of a ledger run."""
    outside = LedgerEnvironment(settings.ledger)
    return [
        *(LedgerServiceActor(f"ledger{n}", outside) for n in range(settings.ledger.services)),
        *(LedgerWorker(f"task{n}", outside) for n in range(settings.ledger.tasks)),
        *([Canceller("canceller")] if settings.ledger.cancel_mille else []),
    ]


# -- transactions of a service -------------------------------------------------------------------


def create_run(txn: Txn, lease: Lease, record: RunRecord) -> None:
    txn.require_live(lease)
    runs.create(txn, record)


def move_run(txn: Txn, lease: Lease, run_id: str, event: runs.RunEvent) -> RunRecord:
    txn.require_live(lease)
    return runs.change_status(txn, run_id, event)


class LedgerServiceActor(Actor):
    """The process that serves a run, or waits for its lease."""

    def __init__(self, name: str, outside: LedgerEnvironment) -> None:
        super().__init__(name)
        self.outside = outside

    def is_idle(self) -> bool:
        return self.outside.is_finished

    def run_process(self, incarnation: Incarnation) -> None:
        incarnation.store.acting_lease = _lease_of_log
        try:
            held = self._acquire(incarnation)
            _LeasePeriod(incarnation, self.outside, held).serve()
        except FATAL_ERRORS as error:
            incarnation.count_coverage(f"ledger: service ended by {error.code}")
            raise ProcessHalted from None

    def _acquire(self, incarnation: Incarnation) -> Lease:
        while True:
            try:
                held: Lease = incarnation.store.transact(
                    leases.acquire,
                    runs.lease_resource(RUN_NAME),
                    self.name,
                    incarnation.incarnation_id,
                    LEASE_NS,
                )
                return held
            except Held:
                incarnation.pause(ms=500)


class _LeasePeriod:
    """One period of holding the run's lease."""

    def __init__(self, incarnation: Incarnation, outside: LedgerEnvironment, lease: Lease) -> None:
        self.incarnation = incarnation
        self.outside = outside
        self.parameters = outside.parameters
        self.lease = lease
        self.renewed_ns = incarnation.store.now_ns()

    def serve(self) -> None:
        process = self._open()
        if process is None:
            self.outside.is_finished = True
            self.incarnation.store.transact(leases.release, self.lease)
            self.incarnation.sleep(1000 * MS)
            return
        self.outside.processes[self.incarnation.name] = self.outside.current_process = process
        try:
            self._reconcile(process)
            while not self._turn_safely(process):
                pass
        finally:
            process.close()
        process.flush()
        self.incarnation.store.transact(leases.release, self.lease)

    # -- starting ------------------------------------------------------------------------------

    def _open(self) -> LedgerProcess | None:
        incarnation = self.incarnation
        record = incarnation.store.read(runs.get_latest, RUN_NAME)
        if (
            record is None
            or record.status not in runs.UNFINISHED
            or record.status is RunLifecycle.INGESTING
        ):
            if incarnation.faults_stopped and self.outside.runs:
                return None
            return self._new()
        log, board = open_run(incarnation.store, record.run_id, self.lease)
        process = LedgerProcess(incarnation, self.parameters, record, log, board)
        process.record_opened()
        if incarnation.tape.chance(100):
            verify_run(incarnation.store, record.run_id)
        anew = incarnation.tape.chance(self.parameters.new_driver_mille)
        if anew:
            incarnation.count_coverage("ledger: opened by a new driver")
            incarnation.record("ledger.anew", run=record.run_id, epoch=board.epoch)
        else:
            incarnation.count_coverage("ledger: opened again by its driver")
        process.start(same_driver=not anew)
        self._apply_cancellation(process)
        return process

    def _new(self) -> LedgerProcess:
        incarnation, shape = self.incarnation, self.parameters
        self.outside.runs += 1
        run_id = f"{RUN_NAME}-{self.outside.runs}"
        drawn = [draw_behaviour(incarnation.tape) for _ in range(shape.rows)]
        self.outside.behaviours[run_id] = shape.behaviours or drawn
        now_ns = incarnation.store.now_ns()
        policy = RunPolicy(**shape.policy())
        record = RunRecord(run_id, RUN_NAME, created_ns=now_ns, size=shape.rows, policy=policy)
        incarnation.store.transact(create_run, self.lease, record)
        log = RunLog(incarnation.store, run_id, self.lease)
        board, entries = RunScheduler.open(shape.rows, policy, now_ns=now_ns)
        incarnation.record("ledger.live", run=run_id, height=1)
        log.append(entries)
        record = incarnation.store.transact(move_run, self.lease, run_id, runs.RunEvent.SEAL)
        return LedgerProcess(incarnation, shape, record, log, board)

    def _reconcile(self, process: LedgerProcess) -> None:
        """Align the log with the sink, which is authoritative for its own content."""
        version = self.outside.version(process.record.run_id)
        if process.scheduler.halted is None:
            if version >= process.scheduler.next_commit:
                self.incarnation.count_coverage("ledger: reconciled with the sink")
            process.record_committed(version + 1)

    # -- serving
    # -------------------------------------------------------------------------------------

    def _turn_safely(self, process: LedgerProcess) -> bool:
        try:
            return self._turn(process)
        except IllegalTransition:
            # A report halted the run during the sink's commit. The next turn handles it.
            self.incarnation.count_coverage("ledger: halted during a commit")
            self.incarnation.sleep(IDLE_NS)
            return False

    def _turn(self, process: LedgerProcess) -> bool:
        """Run one round of the service's threads. True after a graceful shutdown."""
        incarnation = self.incarnation
        if not incarnation.faults_stopped and incarnation.tape.chance(8):
            incarnation.count_coverage("ledger: service paused")
            incarnation.sleep(
                incarnation.tape.pick((LEASE_NS // 2, LEASE_NS * 5 // 4, LEASE_NS * 3))
            )
        process.tick()
        if process.pending:
            process.write()
        if incarnation.store.now_ns() - self.renewed_ns > LEASE_NS // 3:
            self._renew()
        if (
            not incarnation.faults_stopped
            and incarnation.tape.chance(20)
            and process.record.status in runs.UNFINISHED
        ):
            self._apply_cancellation(process)
        if process.scheduler.halted is not None:
            return self._halt(process)
        if self._commit(process):
            return True
        if not incarnation.faults_stopped and incarnation.tape.chance(
            self.parameters.illegal_action_mille // 4
        ):
            self._commit_too_far(process)
        if not incarnation.faults_stopped and incarnation.tape.chance(10):
            incarnation.count_coverage("ledger: service left in good order")
            return True
        if not process.pending:
            incarnation.sleep(IDLE_NS)
        return False

    def _renew(self) -> None:
        self.renewed_ns = self.incarnation.store.now_ns()
        [renewed] = self.incarnation.store.transact(leases.renew, [self.lease], LEASE_NS)
        if renewed is None:
            self.incarnation.count_coverage("ledger: renewal refused")
            raise ProcessHalted

    def _apply_cancellation(self, process: LedgerProcess) -> None:
        """Handle a requested cancellation. Update the run's record to match the log."""
        found = self.incarnation.store.read(runs.get_existing, process.record.run_id)
        if found.cancel_requested_ns and not process.scheduler.cancelling:
            process.cancel()
            process.flush()
        if process.scheduler.cancelling and found.status is RunLifecycle.OPEN:
            process.record = self._move_record(process, runs.RunEvent.CANCEL)

    def _move_record(self, process: LedgerProcess, event: runs.RunEvent) -> RunRecord:
        record: RunRecord = self.incarnation.store.transact(
            move_run, self.lease, process.record.run_id, event
        )
        return record

    def _halt(self, process: LedgerProcess) -> bool:
        """End a run after an illegal transition. It needs an operator; here the next run starts."""
        process.flush()
        self._end_run(process, runs.RunEvent.HALT)
        return True

    def _end_run(self, process: LedgerProcess, event: runs.RunEvent) -> None:
        if process.record.status in runs.UNFINISHED:
            process.record = self._move_record(process, event)
            status = process.record.status.value
            self.incarnation.record("ledger.over", run=process.record.run_id, status=status)

    # -- the ordered commit --------------------------------------------------------------------

    def _commit(self, process: LedgerProcess) -> bool:
        """Commit the next files of the final prefix. True when the last row is in the sink and
        logged."""
        board, file_rows = process.scheduler, self.parameters.file_rows
        final = board.terminal_prefix()
        upto = final if final == board.size else final - final % file_rows
        lo = board.next_commit
        if upto > lo:
            process.flush()
            parts: list[tuple[int, int]] = []
            while lo < upto and len(parts) < FILES_PER_COMMIT_MAX:
                hi = min(lo - lo % file_rows + file_rows, upto)
                parts.append((lo, hi))
                lo = hi
            self._sink(process, parts)
            process.record_committed(lo)
        if board.next_commit < board.size:
            return False
        process.flush()
        if board.cancelling and process.record.status is RunLifecycle.OPEN:
            self._apply_cancellation(process)
        self._end_run(process, runs.RunEvent.FINISH)
        return True

    def _commit_too_far(self, process: LedgerProcess) -> None:
        """Commit a row that has not ended, as a buggy committer would. This must halt the run."""
        upto = process.scheduler.terminal_prefix() + 1
        if upto > process.scheduler.size:
            return
        self.incarnation.record("ledger.careless", run=process.record.run_id)
        try:
            process.record_committed(upto)
        except IllegalTransition:
            self.incarnation.count_coverage("ledger: halted by an illegal commit")

    def _sink(self, process: LedgerProcess, parts: list[tuple[int, int]]) -> None:
        """Commit to an external sink: atomically and at most once per version."""
        incarnation, run_id = self.incarnation, process.record.run_id
        rows = [
            [
                [lo, hi],
                incarnation.store.read(results_between, run_id, lo, hi, self.parameters.page_rows),
            ]
            for lo, hi in parts
        ]
        fate = 0 if incarnation.faults_stopped else incarnation.tape.draw(40)
        if fate == 39:
            incarnation.count_coverage("ledger: died before the sink's commit")
            self._crash()
        if fate == 37:
            incarnation.count_coverage("ledger: late at the sink")
            incarnation.sleep(LEASE_NS * 3 // 2)
        for (lo, hi), found in rows:
            if hi - 1 > self.outside.version(run_id):
                self.outside.versions[run_id] = hi - 1
                incarnation.record(
                    "sink.commit", run=run_id, lo=lo, hi=hi, rows=[list(r) for r in found]
                )
            else:
                incarnation.count_coverage("ledger: the sink has it already")
        if fate == 38:
            incarnation.count_coverage("ledger: died between the sink's commit and the log")
            self._crash()
        if fate > 30:
            incarnation.scheduler.yield_()

    def _crash(self) -> None:
        current = self.incarnation.scheduler.current
        assert current is not None
        self.incarnation.scheduler.kill(current)


class Canceller(Actor):
    """Requests cancellation of runs."""

    def run_process(self, incarnation: Incarnation) -> None:
        while True:
            incarnation.pause(ms=1500)
            if incarnation.faults_stopped or not incarnation.tape.chance(
                incarnation.settings.ledger.cancel_mille
            ):
                continue
            try:
                record = incarnation.store.read(runs.get_latest, RUN_NAME)
                if record is not None:
                    incarnation.store.transact(runs.request_cancel, record.run_id)
                    incarnation.count_coverage("ledger: cancellation asked for")
            except (*FATAL_ERRORS, Invalid):
                pass


def _lease_of_log(fn: Any) -> Lease | None:
    log = getattr(fn, "__self__", None)
    return log.lease if isinstance(log, RunLog) else None
