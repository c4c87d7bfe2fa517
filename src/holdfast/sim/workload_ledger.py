"""Actors around a run's ledger: services that contend for it, tasks that work its rows off, a sink.

A `Service` is the process that holds the run's lease: it opens the log, decides, commits to the sink
in order, and starts the next run when one is over. Its tasks are in `workload_ledger_tasks`. What
survives them all is `Outside`: the address of the service, the sink, and what the rows are like.
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
from holdfast.ledger.board import Board
from holdfast.ledger.classes import Policy
from holdfast.ledger.log import RunLog, open_run, verify
from holdfast.ledger.runs import RunRecord, Status
from holdfast.sim.actor import Actor, Halted, Life
from holdfast.sim.ledger_process import LedgerProcess, Outside, successes
from holdfast.sim.ledger_shape import nature
from holdfast.sim.settings import LEASE_NS, Settings
from holdfast.sim.workload_ledger_tasks import Labourer
from holdfast.store.api import Txn

NAME = "job"
# Parts that one step of the sink takes, at most.
PARTS_MAX = 2
IDLE_NS = 40 * MS
# What ends the process of a service, for the next one to begin from the log.
FATAL = (CommitUnknown, Conflict, Fenced, HeadMoved, StoreFull)


def ledger(settings: Settings) -> list[Actor]:
    """Everybody that a run needs."""
    outside = Outside(settings.ledger)
    return [
        *(Service(f"ledger{n}", outside) for n in range(settings.ledger.services)),
        *(Labourer(f"task{n}", outside) for n in range(settings.ledger.tasks)),
        *([Canceller("canceller")] if settings.ledger.cancel_mille else []),
    ]


# -- transactions of a service -------------------------------------------------------------------


def create_run(txn: Txn, lease: Lease, record: RunRecord) -> None:
    txn.require_live(lease)
    runs.create(txn, record)


def move_run(txn: Txn, lease: Lease, run_id: str, event: runs.Event) -> RunRecord:
    txn.require_live(lease)
    return runs.move(txn, run_id, event)


class Service(Actor):
    """The process that serves a run, or waits until it may."""

    def __init__(self, name: str, outside: Outside) -> None:
        super().__init__(name)
        self.outside = outside

    def idle(self) -> bool:
        return self.outside.resting

    def live(self, life: Life) -> None:
        life.store.acting = _lease_of_log
        try:
            held = self._acquire(life)
            _Serving(life, self.outside, held).serve()
        except FATAL as error:
            life.seen(f"ledger: service ended by {error.code}")
            raise Halted from None

    def _acquire(self, life: Life) -> Lease:
        while True:
            try:
                held: Lease = life.store.transact(
                    leases.acquire, runs.lease_resource(NAME), self.name, life.incarnation, LEASE_NS
                )
                return held
            except Held:
                life.rest(ms=500)


class _Serving:
    """One tenure of the run's lease."""

    def __init__(self, life: Life, outside: Outside, held: Lease) -> None:
        self.life = life
        self.outside = outside
        self.shape = outside.shape
        self.held = held
        self.renewed_ns = life.store.now_ns()

    def serve(self) -> None:
        process = self._open()
        if process is None:
            self.outside.resting = True
            self.life.store.transact(leases.release, self.held)
            self.life.sleep(1000 * MS)
            return
        self.outside.processes[self.life.name] = self.outside.at = process
        try:
            self._reconcile(process)
            while not self._turned(process):
                pass
        finally:
            process.close()
        process.flush()
        self.life.store.transact(leases.release, self.held)

    # -- starting ------------------------------------------------------------------------------

    def _open(self) -> LedgerProcess | None:
        life = self.life
        record = life.store.read(runs.latest, NAME)
        if record is None or record.status not in runs.GOING or record.status is Status.INGESTING:
            if life.calm and self.outside.runs:
                return None
            return self._new()
        log, board = open_run(life.store, record.run_id, self.held)
        process = LedgerProcess(life, self.shape, record, log, board)
        process.opened()
        if life.tape.chance(100):
            verify(life.store, record.run_id)
        anew = life.tape.chance(self.shape.anew_mille)
        if anew:
            life.seen("ledger: opened by a new driver")
            life.note("ledger.anew", run=record.run_id, epoch=board.epoch)
        else:
            life.seen("ledger: opened again by its driver")
        process.start(same_driver=not anew)
        self._told(process)
        return process

    def _new(self) -> LedgerProcess:
        life, shape = self.life, self.shape
        self.outside.runs += 1
        run_id = f"{NAME}-{self.outside.runs}"
        drawn = [nature(life.tape) for _ in range(shape.rows)]
        self.outside.natures[run_id] = shape.natures or drawn
        now_ns = life.store.now_ns()
        policy = Policy(**shape.policy())
        record = RunRecord(run_id, NAME, created_ns=now_ns, size=shape.rows, policy=policy)
        life.store.transact(create_run, self.held, record)
        log = RunLog(life.store, run_id, self.held)
        board, entries = Board.open(shape.rows, policy, now_ns=now_ns)
        life.note("ledger.live", run=run_id, height=1)
        log.append(entries)
        record = life.store.transact(move_run, self.held, run_id, runs.Event.SEAL)
        return LedgerProcess(life, shape, record, log, board)

    def _reconcile(self, process: LedgerProcess) -> None:
        """The sink knows best what it holds."""
        version = self.outside.version(process.record.run_id)
        if process.board.halted is None:
            if version >= process.board.next_commit:
                self.life.seen("ledger: reconciled with the sink")
            process.committed(version + 1)

    # -- at work -------------------------------------------------------------------------------

    def _turned(self, process: LedgerProcess) -> bool:
        try:
            return self._turn(process)
        except IllegalTransition:
            # Halted by a report while this was on its way to the sink: the next turn sees it.
            self.life.seen("ledger: halted during a commit")
            self.life.sleep(IDLE_NS)
            return False

    def _turn(self, process: LedgerProcess) -> bool:
        """One round of what the service's threads do; True when it leaves in good order."""
        life = self.life
        if not life.calm and life.tape.chance(8):
            life.seen("ledger: service paused")
            life.sleep(life.tape.pick((LEASE_NS // 2, LEASE_NS * 5 // 4, LEASE_NS * 3)))
        process.tick()
        if process.pending:
            process.write()
        if life.store.now_ns() - self.renewed_ns > LEASE_NS // 3:
            self._renew()
        if not life.calm and life.tape.chance(20) and process.record.status in runs.GOING:
            self._told(process)
        if process.board.halted is not None:
            return self._halt(process)
        if self._commit(process):
            return True
        if not life.calm and life.tape.chance(self.shape.careless_mille // 4):
            self._overreach(process)
        if not life.calm and life.tape.chance(10):
            life.seen("ledger: service left in good order")
            return True
        if not process.pending:
            life.sleep(IDLE_NS)
        return False

    def _renew(self) -> None:
        self.renewed_ns = self.life.store.now_ns()
        [renewed] = self.life.store.transact(leases.renew, [self.held], LEASE_NS)
        if renewed is None:
            self.life.seen("ledger: renewal refused")
            raise Halted

    def _told(self, process: LedgerProcess) -> None:
        """Whether somebody asked for the end of it; what is logged, the record says, too."""
        found = self.life.store.read(runs.the, process.record.run_id)
        if found.cancel_requested_ns and not process.board.cancelling:
            process.cancel()
            process.flush()
        if process.board.cancelling and found.status is Status.OPEN:
            process.record = self._moved(process, runs.Event.CANCEL)

    def _moved(self, process: LedgerProcess, event: runs.Event) -> RunRecord:
        record: RunRecord = self.life.store.transact(
            move_run, self.held, process.record.run_id, event
        )
        return record

    def _halt(self, process: LedgerProcess) -> bool:
        """An illegal move: it is for a person now. Here the next run begins."""
        process.flush()
        self._over(process, runs.Event.HALT)
        return True

    def _over(self, process: LedgerProcess, event: runs.Event) -> None:
        if process.record.status in runs.GOING:
            process.record = self._moved(process, event)
            status = process.record.status.value
            self.life.note("ledger.over", run=process.record.run_id, status=status)

    # -- the ordered commit --------------------------------------------------------------------

    def _commit(self, process: LedgerProcess) -> bool:
        """The next files of the final prefix; True when the last row is in the sink, and logged."""
        board, file_rows = process.board, self.shape.file_rows
        final = board.terminal_prefix()
        upto = final if final == board.size else final - final % file_rows
        lo = board.next_commit
        if upto > lo:
            process.flush()
            parts: list[tuple[int, int]] = []
            while lo < upto and len(parts) < PARTS_MAX:
                hi = min(lo - lo % file_rows + file_rows, upto)
                parts.append((lo, hi))
                lo = hi
            self._sink(process, parts)
            process.committed(lo)
        if board.next_commit < board.size:
            return False
        process.flush()
        if board.cancelling and process.record.status is Status.OPEN:
            self._told(process)
        self._over(process, runs.Event.FINISH)
        return True

    def _overreach(self, process: LedgerProcess) -> None:
        """A committer that commits a row which has not ended: this must stop the run."""
        upto = process.board.terminal_prefix() + 1
        if upto > process.board.size:
            return
        self.life.note("ledger.careless", run=process.record.run_id)
        try:
            process.committed(upto)
        except IllegalTransition:
            self.life.seen("ledger: halted by an illegal commit")

    def _sink(self, process: LedgerProcess, parts: list[tuple[int, int]]) -> None:
        """One step of a store outside: all of it or nothing, and nothing twice."""
        life, run_id = self.life, process.record.run_id
        rows = [
            [
                [lo, hi],
                life.store.read(successes, run_id, lo, hi, self.shape.page_rows),
            ]
            for lo, hi in parts
        ]
        fate = 0 if life.calm else life.tape.draw(40)
        if fate == 39:
            life.seen("ledger: died before the sink's commit")
            self._die()
        if fate == 37:
            life.seen("ledger: late at the sink")
            life.sleep(LEASE_NS * 3 // 2)
        for (lo, hi), found in rows:
            if hi - 1 > self.outside.version(run_id):
                self.outside.versions[run_id] = hi - 1
                life.note("sink.commit", run=run_id, lo=lo, hi=hi, rows=[list(r) for r in found])
            else:
                life.seen("ledger: the sink has it already")
        if fate == 38:
            life.seen("ledger: died between the sink's commit and the log")
            self._die()
        if fate > 30:
            life.scheduler.yield_()

    def _die(self) -> None:
        current = self.life.scheduler.current
        assert current is not None
        self.life.scheduler.kill(current)


class Canceller(Actor):
    """Somebody who changes their mind."""

    def live(self, life: Life) -> None:
        while True:
            life.rest(ms=1500)
            if life.calm or not life.tape.chance(life.settings.ledger.cancel_mille):
                continue
            try:
                record = life.store.read(runs.latest, NAME)
                if record is not None:
                    life.store.transact(runs.request_cancel, record.run_id)
                    life.seen("ledger: cancellation asked for")
            except (*FATAL, Invalid):
                pass


def _lease_of_log(fn: Any) -> Lease | None:
    log = getattr(fn, "__self__", None)
    return log.lease if isinstance(log, RunLog) else None
