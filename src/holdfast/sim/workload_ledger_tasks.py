"""Tasks of a ledger run: they claim rows, begin them, call, report, and die in every way.

A task reports until it knows that it was heard; the number of a report says that it is the same one.
Some rows kill the task that runs them. At times a task sleeps past its lease and goes on as a zombie,
loses its connection, gives its grant back, or (where the seed says so) reports a row in two ways, which
must stop the run.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from holdfast.clock import MS
from holdfast.errors import IllegalTransition, Invalid
from holdfast.ledger.answers import Answer, Finished, Grant, Stop, Taken, Wait
from holdfast.ledger.classes import ErrorClass
from holdfast.ledger.records import Done, Range
from holdfast.ledger.states import State
from holdfast.sim.actor import Actor, Life
from holdfast.sim.ledger_office import Claim, LineLost, Move, Office, Outside, Stepped
from holdfast.sim.ledger_shape import GRANT_NS, Nature


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
        while True:
            office = self.line(life, "")
            if office is None:
                life.rest(ms=300)
                continue
            run_id = office.record.run_id
            try:
                stepped = self.ask(life, owner, office, [], self.claim(life))
            except LineLost:
                self.hung_up(life, owner, office)
                continue
            answer = stepped.answer
            while isinstance(answer, Grant):
                answer = self._work(life, owner, run_id, answer)
            if isinstance(answer, Wait):
                life.seen(f"ledger: wait for {answer.why}")
                life.rest(ms=150)
            elif isinstance(answer, Finished | Stop):
                life.rest(ms=400)

    def claim(self, life: Life) -> Claim:
        """What a task asks for: any rows, or those of the partition that it was given."""
        shape = self.outside.shape
        begin = shape.begin_rows * life.tape.draw(2)
        if not shape.partitions or life.tape.chance(300):
            return Claim(shape.claim_rows, begin, 0, None)
        size = -(-shape.rows // shape.partitions)
        lo = life.tape.draw(shape.partitions) * size
        return Claim(shape.claim_rows, begin, min(lo, shape.rows), min(lo + size, shape.rows))

    def _work(self, life: Life, owner: str, run_id: str, grant: Grant) -> Answer | None:
        """Work a grant off; what the service answered when it was asked for more at the end."""
        work = _Work(life, self, owner, run_id, grant)
        try:
            work.run()
        except LineLost:
            life.seen("ledger: task gave up its grant")
            return None
        return work.more

    def line(self, life: Life, run_id: str) -> Office | None:
        """Whoever answers at the address; at times a service that has been replaced there."""
        office = self.outside.at
        if len(self.outside.offices) > 1 and life.tape.chance(100):
            office = life.tape.pick(list(self.outside.offices.values()))
        if office is None or not office.alive:
            return None
        return office if run_id in ("", office.record.run_id) else None

    def ask(
        self, life: Life, owner: str, office: Office, moves: list[Move], claim: Claim | None
    ) -> Stepped:
        """One request on one line. LineLost: nobody here knows whether it was taken."""
        lost = 0 if life.calm else self.outside.shape.lost_mille
        life.scheduler.yield_()
        if not office.alive or (lost and life.tape.chance(lost // 2)):
            raise LineLost
        stepped = office.step(life, owner, moves, claim)
        if lost and life.tape.chance(lost):
            life.seen("ledger: answer lost")
            raise LineLost
        if claim is not None and isinstance(stepped.answer, Finished):
            life.note("ledger.finished", run=office.record.run_id, lo=claim.lo, hi=claim.hi)
        return stepped

    def hung_up(self, life: Life, owner: str, office: Office) -> None:
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
        # The answer to the claim that went with the last report.
        self.more: Answer | None = None

    def run(self) -> None:
        shape, life = self.task.outside.shape, self.life
        while self.begun or self.idle:
            if not life.calm and life.tape.chance(15):
                office = self.task.line(life, self.run_id)
                if office is not None and not self.begun and not self.done:
                    life.seen("ledger: grant given back")
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
            office = self.task.line(life, self.run_id)
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
        last = not self.begun and not begin and not self.idle
        taken = self._sent(move, self.task.claim(life) if last and life.tape.chance(500) else None)
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

    def _sent(self, move: Move, claim: Claim | None) -> Taken | None:
        """Send until it is answered: the number says that it is the same."""
        life, task = self.life, self.task
        while True:
            office = task.line(life, self.run_id)
            if office is None:
                at = task.outside.at
                if at is not None and at.alive and at.record.run_id != self.run_id:
                    raise LineLost  # the run is over
                life.rest(ms=200)
                continue
            try:
                stepped = task.ask(life, self.owner, office, [move], claim)
                self.more = stepped.answer
                return stepped.moved[0]
            except (LineLost, Invalid):
                # Invalid: a service that was replaced, and does not know what it missed.
                task.hung_up(life, self.owner, office)
            except IllegalTransition:
                raise LineLost from None

    def _again(self, move: Move) -> None:
        """A request that comes twice is answered as it was."""
        office = self.task.line(self.life, self.run_id)
        if office is None:
            return
        try:
            stepped = self.task.ask(self.life, self.owner, office, [move], None)
        except (LineLost, IllegalTransition, Invalid):
            return
        self._heard(move, stepped.moved[0])

    def _heard(self, move: Move, taken: Taken | None) -> None:
        if taken is not None:
            told = {"held": taken.held, "begun": taken.begun, "stop": taken.stop}
            self.life.note("ledger.acked", run=self.run_id, epoch=self.epoch, n=move.n,
                           digest=move.digest, told=told)  # fmt: skip

    def _careless(self, move: Move) -> None:
        """A task that reports a row another way than it did: this must stop the run."""
        office = self.task.line(self.life, self.run_id)
        if office is None:
            return
        other = [Done(d.lo, d.hi, int(State.TERMINAL_SKIP)) for d in move.done]
        n = move.n + self.life.tape.draw(2)
        wrong = Move(self.epoch, n, other, [], [])
        self.life.note("ledger.careless", run=self.run_id)
        try:
            stepped = self.task.ask(self.life, self.owner, office, [wrong], None)
            self._heard(wrong, stepped.moved[0])
        except IllegalTransition:
            self.life.seen("ledger: halted by an illegal report")
            raise LineLost from None
        except (LineLost, Invalid):
            return

    def _beat(self) -> None:
        office = self.task.line(self.life, self.run_id)
        if office is not None and not office.beat(self.life, self.epoch):
            self.life.seen("ledger: heartbeat fenced")


def _ranges(rows: list[_Row]) -> list[Range]:
    """Neighbouring rows together."""
    found = []
    for _, group in groupby(enumerate(rows), key=lambda pair: pair[1].seq - pair[0]):
        seqs = [row.seq for _, row in group]
        found.append((seqs[0], seqs[-1] + 1))
    return found
