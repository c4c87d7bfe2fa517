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
from holdfast.sim.ledger_office import Office, Outside, successes
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
        office = self._open()
        if office is None:
            self.outside.resting = True
            self.life.store.transact(leases.release, self.held)
            self.life.sleep(1000 * MS)
            return
        self.outside.offices[self.life.name] = self.outside.at = office
        try:
            self._reconcile(office)
            while not self._turned(office):
                pass
        finally:
            office.close()
        office.flush()
        self.life.store.transact(leases.release, self.held)

    # -- starting ------------------------------------------------------------------------------

    def _open(self) -> Office | None:
        life = self.life
        record = life.store.read(runs.latest, NAME)
        if record is None or record.status not in runs.GOING or record.status is Status.INGESTING:
            if life.calm and self.outside.runs:
                return None
            return self._new()
        log, board = open_run(life.store, record.run_id, self.held)
        office = Office(life, self.shape, record, log, board)
        office.opened()
        if life.tape.chance(100):
            verify(life.store, record.run_id)
        if life.tape.chance(self.shape.anew_mille):
            life.seen("ledger: opened by a new driver")
            life.note("ledger.anew", run=record.run_id, epoch=board.epoch)
            office.drop_all()
        else:
            life.seen("ledger: opened again by its driver")
        self._told(office)
        return office

    def _new(self) -> Office:
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
        return Office(life, shape, record, log, board)

    def _reconcile(self, office: Office) -> None:
        """The sink knows best what it holds."""
        version = self.outside.version(office.record.run_id)
        if office.board.halted is None:
            if version >= office.board.next_commit:
                self.life.seen("ledger: reconciled with the sink")
            office.committed(version + 1)

    # -- at work -------------------------------------------------------------------------------

    def _turned(self, office: Office) -> bool:
        try:
            return self._turn(office)
        except IllegalTransition:
            # Halted by a report while this was on its way to the sink: the next turn sees it.
            self.life.seen("ledger: halted during a commit")
            return False

    def _turn(self, office: Office) -> bool:
        """One round of what the service's threads do; True when it leaves in good order."""
        life = self.life
        if not life.calm and life.tape.chance(8):
            life.seen("ledger: service paused")
            life.sleep(life.tape.pick((LEASE_NS // 2, LEASE_NS * 5 // 4, LEASE_NS * 3)))
        office.tick()
        if office.pending:
            office.write()
        if life.store.now_ns() - self.renewed_ns > LEASE_NS // 3:
            self._renew()
        if not life.calm and life.tape.chance(20) and office.record.status in runs.GOING:
            self._told(office)
        if office.board.halted is not None:
            return self._halt(office)
        if self._commit(office):
            return True
        if not life.calm and life.tape.chance(self.shape.careless_mille // 4):
            self._overreach(office)
        if not life.calm and life.tape.chance(10):
            life.seen("ledger: service left in good order")
            return True
        if not office.pending:
            life.sleep(IDLE_NS)
        return False

    def _renew(self) -> None:
        self.renewed_ns = self.life.store.now_ns()
        [renewed] = self.life.store.transact(leases.renew, [self.held], LEASE_NS)
        if renewed is None:
            self.life.seen("ledger: renewal refused")
            raise Halted

    def _told(self, office: Office) -> None:
        """Whether somebody asked for the end of it; what is logged, the record says, too."""
        found = self.life.store.read(runs.the, office.record.run_id)
        if found.cancel_requested_ns and not office.board.cancelling:
            office.cancel()
            office.flush()
        if office.board.cancelling and found.status is Status.OPEN:
            office.record = self._moved(office, runs.Event.CANCEL)

    def _moved(self, office: Office, event: runs.Event) -> RunRecord:
        record: RunRecord = self.life.store.transact(
            move_run, self.held, office.record.run_id, event
        )
        return record

    def _halt(self, office: Office) -> bool:
        """An illegal move: it is for a person now. Here the next run begins."""
        office.flush()
        self._over(office, runs.Event.HALT)
        return True

    def _over(self, office: Office, event: runs.Event) -> None:
        if office.record.status in runs.GOING:
            office.record = self._moved(office, event)
            status = office.record.status.value
            self.life.note("ledger.over", run=office.record.run_id, status=status)

    # -- the ordered commit --------------------------------------------------------------------

    def _commit(self, office: Office) -> bool:
        """The next files of the final prefix; True when the last row is in the sink, and logged."""
        board, file_rows = office.board, self.shape.file_rows
        final = board.terminal_prefix()
        upto = final if final == board.size else final - final % file_rows
        lo = board.next_commit
        if upto > lo:
            office.flush()
            parts: list[tuple[int, int]] = []
            while lo < upto and len(parts) < PARTS_MAX:
                hi = min(lo - lo % file_rows + file_rows, upto)
                parts.append((lo, hi))
                lo = hi
            self._sink(office, parts)
            office.committed(lo)
        if board.next_commit < board.size:
            return False
        office.flush()
        if board.cancelling and office.record.status is Status.OPEN:
            self._told(office)
        self._over(office, runs.Event.FINISH)
        return True

    def _overreach(self, office: Office) -> None:
        """A committer that commits a row which has not ended: this must stop the run."""
        upto = office.board.terminal_prefix() + 1
        if upto > office.board.size:
            return
        self.life.note("ledger.careless", run=office.record.run_id)
        try:
            office.committed(upto)
        except IllegalTransition:
            self.life.seen("ledger: halted by an illegal commit")
            office.halt()

    def _sink(self, office: Office, parts: list[tuple[int, int]]) -> None:
        """One step of a store outside: all of it or nothing, and nothing twice."""
        life, run_id = self.life, office.record.run_id
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
