"""Actors around a run's ledger: services that contend for it, tasks that work its rows off, a sink.

A `Service` is the process that holds the run's lease: it opens the log, decides, commits to the sink
in order, and starts the next run when one is over. A `Labourer` is a task: it claims rows, begins
them, calls, reports, and does so again until it knows that it was heard; some rows kill it, at times
it sleeps past its lease and wakes as a zombie. What survives them all is `Outside`: the address of
the service, the sink, and what the rows are like.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

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
from holdfast.ledger.answers import Finished, Grant, Stop, Taken, Wait
from holdfast.ledger.board import Board
from holdfast.ledger.classes import ErrorClass, Policy
from holdfast.ledger.log import RunLog, open_run, verify
from holdfast.ledger.records import Done, Range
from holdfast.ledger.runs import RunRecord, Status
from holdfast.ledger.states import State
from holdfast.sim.actor import Actor, Halted, Life
from holdfast.sim.ledger_office import Claim, LineLost, Move, Office, Stepped, successes
from holdfast.sim.ledger_shape import GRANT_NS, LedgerShape, Nature, nature
from holdfast.sim.settings import LEASE_NS, Settings
from holdfast.store.api import Txn

NAME = "job"
# Parts that one step of the sink takes, at most.
PARTS_MAX = 2
IDLE_NS = 40 * MS
# What ends the process of a service, for the next one to begin from the log.
FATAL = (CommitUnknown, Conflict, Fenced, HeadMoved, StoreFull)


class Outside:
    """What is not on the store, and outlives every process: the address, the sink, the rows."""

    def __init__(self, shape: LedgerShape) -> None:
        self.shape = shape
        self.offices: dict[str, Office] = {}
        self.at: Office | None = None
        self.natures: dict[str, list[Nature]] = {}
        self.versions: dict[str, int] = {}
        self.calls = 0
        self.runs = 0
        self.resting = False

    def version(self, run_id: str) -> int:
        """The last version that the sink holds; -1 is none."""
        return self.versions.get(run_id, -1)

    def nature(self, run_id: str, seq: int) -> Nature:
        natures = self.natures.get(run_id)
        return natures[seq] if natures else Nature.FINE


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
        self.outside.natures[run_id] = [nature(life.tape) for _ in range(shape.rows)]
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


class _Row(NamedTuple):
    seq: int
    attempt: int


class Labourer(Actor):
    """A task that works rows off, as long as it lives."""

    def __init__(self, name: str, outside: Outside) -> None:
        super().__init__(name)
        self.outside = outside

    def live(self, life: Life) -> None:
        owner = f"{self.name}/{life.incarnation}"
        shape = self.outside.shape
        while True:
            office = self._line(life, "")
            if office is None:
                life.rest(ms=300)
                continue
            run_id = office.record.run_id
            claim = Claim(shape.claim_rows, shape.begin_rows * life.tape.draw(2))
            try:
                stepped = self._ask(life, owner, office, [], claim)
            except LineLost:
                self._hung_up(life, owner, office)
                continue
            answer = stepped.answer
            if isinstance(answer, Grant):
                try:
                    _Work(life, self, owner, run_id, answer).run()
                except LineLost:
                    life.seen("ledger: task gave up its grant")
            elif isinstance(answer, Wait):
                life.seen(f"ledger: wait for {answer.why}")
                life.rest(ms=150)
            elif isinstance(answer, Finished | Stop):
                life.rest(ms=400)

    def _line(self, life: Life, run_id: str) -> Office | None:
        """Whoever answers at the address; at times a service that has been replaced there."""
        office = self.outside.at
        if len(self.outside.offices) > 1 and life.tape.chance(100):
            office = life.tape.pick(list(self.outside.offices.values()))
        if office is None or not office.alive:
            return None
        return office if run_id in ("", office.record.run_id) else None

    def _ask(
        self, life: Life, owner: str, office: Office, moves: list[Move], claim: Claim | None
    ) -> Stepped:
        """One request on one line. LineLost: nobody here knows whether it was taken."""
        lost = 0 if life.calm else self.outside.shape.lost_mille
        life.scheduler.yield_()
        if not office.alive or (lost and life.tape.chance(lost // 2)):
            raise LineLost
        stepped, ticket = office.step(life, owner, moves, claim)
        office.wait(life, ticket)
        if lost and life.tape.chance(lost):
            life.seen("ledger: answer lost")
            raise LineLost
        return stepped

    def _hung_up(self, life: Life, owner: str, office: Office) -> None:
        """Sooner or later the service, if there is one, sees that the line is closed."""
        if life.tape.chance(400):
            life.seen("ledger: connection closed")
            office.gone(owner)
        life.rest(ms=100)


class _Work:
    """A grant, worked off."""

    def __init__(self, life: Life, task: Labourer, owner: str, run_id: str, grant: Grant) -> None:
        self.life = life
        self.task = task
        self.owner = owner
        self.run_id = run_id
        self.epoch = grant.epoch
        rows = [_Row(s, p.attempt) for p in grant.parts for s in range(p.lo, p.hi)]
        self.begun, self.idle = rows[: grant.begun], rows[grant.begun :]
        self.done: list[Done] = []
        self.results: list[tuple[int, str]] = []
        self.n = 0

    def run(self) -> None:
        shape, life = self.task.outside.shape, self.life
        while self.begun or self.idle:
            if not life.calm and life.tape.chance(15):
                life.seen("ledger: grant given back")
                office = self.task._line(life, self.run_id)
                if office is not None and not self.begun and not self.done:
                    office.give_back(self.epoch)
                    return
            while self.begun:
                self._call(self.begun.pop(0))
                if len(self.done) >= shape.flush_rows:
                    break
            if not self._report():
                return

    def _call(self, row: _Row) -> None:
        life, outside = self.life, self.task.outside
        if not life.calm and life.tape.chance(outside.shape.pause_mille):
            life.seen("ledger: task slept past its lease")
            life.sleep(GRANT_NS * 3 // 2)
        elif life.tape.chance(200):
            self._beat()
        outside.calls += 1
        key = f"{self.run_id}/{row.seq}"
        life.note("ledger.call", run=self.run_id, seq=row.seq, attempt=row.attempt,
                  epoch=self.epoch, key=key)  # fmt: skip
        kind = outside.nature(self.run_id, row.seq)
        if kind is Nature.POISON:
            life.seen("ledger: row killed its task")
            current = life.scheduler.current
            assert current is not None
            # Its connection closes: that is seen at once, or not before its lease is over.
            office = self.task._line(life, self.run_id)
            if office is not None and life.tape.chance(700):
                office.gone(self.owner)
            life.scheduler.kill(current)
        life.scheduler.yield_()
        self._end(row, kind)

    def _end(self, row: _Row, kind: Nature) -> None:
        code, error, delay_ns = State.TERMINAL_SUCCESS, ErrorClass.NONE, 0
        if kind is Nature.SKIPPED:
            code = State.TERMINAL_SKIP
        elif kind is Nature.WRONG:
            code, error = State.TERMINAL_FAIL, ErrorClass.INPUT
        elif kind is Nature.STUBBORN or (kind is Nature.FLAKY and row.attempt == 1):
            code, error = State.TERMINAL_FAIL, ErrorClass.TRANSIENT
            delay_ns = self.life.tape.draw(3) * 150 * MS
        else:
            self.results.append((row.seq, f"{row.seq}.{self.task.outside.calls}"))
        self.done.append(Done(row.seq, row.seq + 1, int(code), int(error), delay_ns))

    def _report(self) -> bool:
        """Report what is done and begin what is next; False when the grant is not ours any more."""
        shape, life = self.task.outside.shape, self.life
        room = max(shape.begin_rows - len(self.begun), 0)
        begin, self.idle = self.idle[:room], self.idle[room:]
        if not self.done and not begin:
            return True
        self.n += 1
        results = [one for one in self.results if any(d.lo == one[0] for d in self.done)]
        move = Move(self.epoch, self.n, self.done, _ranges(begin), results)
        self.done, self.results = [], []
        taken = self._sent(move)
        if taken is None:
            life.seen("ledger: zombie stopped")
            return False
        self._heard(move, taken)
        if taken.begun:
            self.begun += begin
        else:
            life.seen("ledger: told to stop")
            self.idle = []
        if not life.calm and life.tape.chance(40):
            self._again(move)
        if move.done and life.tape.chance(shape.careless_mille) and not life.calm:
            self._careless(move)
        return True

    def _sent(self, move: Move) -> Taken | None:
        """Send until it is answered: the number says that it is the same."""
        life, task = self.life, self.task
        while True:
            office = task._line(life, self.run_id)
            if office is None:
                at = task.outside.at
                if at is not None and at.alive and at.record.run_id != self.run_id:
                    raise LineLost  # the run is over
                life.rest(ms=200)
                continue
            try:
                stepped = task._ask(life, self.owner, office, [move], None)
                return stepped.moved[0]
            except LineLost:
                task._hung_up(life, self.owner, office)
            except IllegalTransition:
                raise LineLost from None

    def _again(self, move: Move) -> None:
        """A request that comes twice is answered as it was."""
        office = self.task._line(self.life, self.run_id)
        if office is None:
            return
        try:
            stepped = self.task._ask(self.life, self.owner, office, [move], None)
        except (LineLost, IllegalTransition):
            return
        self._heard(move, stepped.moved[0])

    def _heard(self, move: Move, taken: Taken | None) -> None:
        if taken is not None:
            told = {"held": taken.held, "begun": taken.begun, "stop": taken.stop}
            self.life.note("ledger.acked", run=self.run_id, epoch=self.epoch, n=move.n,
                           digest=move.digest, told=told)  # fmt: skip

    def _careless(self, move: Move) -> None:
        """A task that reports a row another way than it did: this must stop the run."""
        office = self.task._line(self.life, self.run_id)
        if office is None:
            return
        other = [Done(d.lo, d.hi, int(State.TERMINAL_SKIP)) for d in move.done]
        n = move.n + self.life.tape.draw(2)
        wrong = Move(self.epoch, n, other, [], [])
        self.life.note("ledger.careless", run=self.run_id)
        try:
            stepped = self.task._ask(self.life, self.owner, office, [wrong], None)
            self._heard(wrong, stepped.moved[0])
        except IllegalTransition:
            self.life.seen("ledger: halted by an illegal report")
            raise LineLost from None
        except (LineLost, Invalid):
            return

    def _beat(self) -> None:
        office = self.task._line(self.life, self.run_id)
        if office is not None and not office.beat(self.life, self.epoch):
            self.life.seen("ledger: heartbeat fenced")


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


def _ranges(rows: list[_Row]) -> list[Range]:
    """Neighbouring rows together."""
    found = []
    for _, group in groupby(enumerate(rows), key=lambda pair: pair[1].seq - pair[0]):
        seqs = [row.seq for _, row in group]
        found.append((seqs[0], seqs[-1] + 1))
    return found


def _lease_of_log(fn: Any) -> Lease | None:
    log = getattr(fn, "__self__", None)
    return log.lease if isinstance(log, RunLog) else None
