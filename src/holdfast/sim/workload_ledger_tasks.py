"""Tasks of a ledger run: they claim rows, begin them, call, report, and die in every way.

A task reports until it knows that it was heard; the number of a report says that it is the same one.
Some rows kill the task that runs them. At times a task sleeps past its lease and goes on as a zombie,
loses its connection, gives its grant back, or (where the seed says so) reports a row in two ways, which
must stop the run.
"""

from __future__ import annotations

import hashlib
from itertools import groupby
from typing import NamedTuple

import msgspec

from holdfast.clock import MS
from holdfast.errors import IllegalTransition, Invalid
from holdfast.ledger.answers import Answer, Finished, Grant, Stop, Wait
from holdfast.ledger.classes import ErrorClass
from holdfast.ledger.records import Done, Range
from holdfast.ledger.service.messages import Claim, Move, Moved, Other, Step
from holdfast.ledger.service.waiting_claims import Reply
from holdfast.ledger.states import State
from holdfast.sim.actor import Actor, Life
from holdfast.sim.ledger_process import LedgerProcess, LineLost, Outside
from holdfast.sim.ledger_shape import GRANT_NS, Nature

# How long a claim waits at the service, when a task lets it.
WAIT_MS = 300


class _Row(NamedTuple):
    seq: int
    attempt: int


class Report(NamedTuple):
    """A report of one grant as it is sent: the header, and the results that are attached."""

    move: Move
    data: bytes


def report(
    epoch: int, n: int, done: list[Done], begin: list[Range], results: list[tuple[int, str]]
) -> Report:
    others = [
        Other(seq, one.code, one.error_class, "", one.delay_ns)
        for one in done
        if one.code != State.TERMINAL_SUCCESS
        for seq in range(one.lo, one.hi)
    ]
    data = msgspec.msgpack.encode(results) if results else b""
    digest = hashlib.sha256(repr((epoch, n, done, begin, results)).encode()).digest()[:8]
    lo = min((one.lo for one in done), default=0)
    return Report(Move(epoch, n, digest, done, begin, b"", lo, others, len(data)), data)


class Labourer(Actor):
    """A task that works rows off, as long as it lives."""

    def __init__(self, name: str, outside: Outside) -> None:
        super().__init__(name)
        self.outside = outside
        # The grants that this incarnation knows of.
        self.held: list[int] = []

    def live(self, life: Life) -> None:
        owner = f"{self.name}/{life.incarnation}"
        self.held = []
        while True:
            process = self.line(life, "")
            if process is None:
                life.rest(ms=300)
                continue
            run_id = process.record.run_id
            try:
                reply = self.ask(life, owner, process, None, self.claim(life))
            except LineLost:
                self.hung_up(life, owner, process)
                continue
            answer = reply.answer
            while isinstance(answer, Grant):
                self.held.append(answer.epoch)
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
            return Claim(shape.claim_rows, begin)
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

    def line(self, life: Life, run_id: str) -> LedgerProcess | None:
        """Whoever answers at the address; at times a service that has been replaced there."""
        process = self.outside.at
        if len(self.outside.processes) > 1 and life.tape.chance(100):
            process = life.tape.pick(list(self.outside.processes.values()))
        if process is None or not process.alive:
            return None
        return process if run_id in ("", process.record.run_id) else None

    def ask(
        self,
        life: Life,
        owner: str,
        process: LedgerProcess,
        sent: Report | None,
        claim: Claim | None,
    ) -> Reply:
        """One request on one line. LineLost: the request was taken, or it was not."""
        lost = 0 if life.calm else self.outside.shape.lost_mille
        life.scheduler.yield_()
        if not process.alive or (lost and life.tape.chance(lost // 2)):
            raise LineLost
        moves, data = ([sent.move], sent.data) if sent is not None else ([], b"")
        wait_ms = WAIT_MS if claim is not None and not moves and life.tape.chance(400) else 0
        calls = sum(done.hi - done.lo for move in moves for done in move.done)
        step = Step(moves, claim, wait_ms, calls, 0.0, [], self.held)
        reply = process.step(life, owner, step, data)
        if lost and life.tape.chance(lost):
            life.seen("ledger: answer lost")
            raise LineLost
        if claim is not None and isinstance(reply.answer, Finished):
            hi = None if claim.hi < 0 else claim.hi
            life.note("ledger.finished", run=process.record.run_id, lo=claim.lo, hi=hi)
        return reply

    def hung_up(self, life: Life, owner: str, process: LedgerProcess) -> None:
        """Sooner or later the service, if there is one, sees that the line is closed."""
        if life.tape.chance(400):
            life.seen("ledger: connection closed")
            process.gone(owner)
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
                process = self.task.line(life, self.run_id)
                if process is not None and not self.begun and not self.done:
                    life.seen("ledger: grant given back")
                    process.gone(self.owner)
                    return
            if not life.calm and life.tape.chance(60):
                self._claim_ahead()
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
            process = self.task.line(life, self.run_id)
            if process is not None and life.tape.chance(700):
                process.gone(self.owner)
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
        sent = report(self.epoch, self.n, self.done, _ranges(begin), results)
        self.done, self.results = [], []
        last = not self.begun and not begin and not self.idle
        moved = self._sent(sent, self._next_claim(last))
        if moved.lost:
            life.seen("ledger: zombie stopped")
            return False
        self._heard(sent.move, moved)
        if not moved.stop:
            self.begun += begin
        else:
            life.seen("ledger: told to stop")
            self.idle = []
        if not life.calm and life.tape.chance(40):
            self._again(sent)
        if sent.move.done and life.tape.chance(shape.careless_mille) and not life.calm:
            self._careless(sent.move)
        return True

    def _next_claim(self, last: bool) -> Claim | None:
        """The claim that goes with a report: at the end of a grant, at times, for the next one."""
        life, shape = self.life, self.task.outside.shape
        if isinstance(self.more, Grant):
            return None
        if not life.calm and life.tape.chance(20):
            # Of rows that the run does not have: refused, and the report is taken all the same.
            life.seen("ledger: claim refused, report taken")
            return Claim(1, 0, shape.rows + 1, shape.rows + 1)
        return self.task.claim(life) if last and life.tape.chance(500) else None

    def _claim_ahead(self) -> None:
        """Ask for the next grant while this one is at work."""
        process = self.task.line(self.life, self.run_id)
        if process is None or isinstance(self.more, Grant):
            return
        try:
            reply = self.task.ask(self.life, self.owner, process, None, self.task.claim(self.life))
        except LineLost:
            return
        self.more = reply.answer
        if isinstance(self.more, Grant):
            self.life.seen("ledger: grant claimed ahead")

    def _sent(self, sent: Report, claim: Claim | None) -> Moved:
        """Send until it is answered: the number says that it is the same."""
        life, task = self.life, self.task
        while True:
            process = task.line(life, self.run_id)
            if process is None:
                at = task.outside.at
                if at is not None and at.alive and at.record.run_id != self.run_id:
                    raise LineLost  # the run is over
                life.rest(ms=200)
                continue
            try:
                reply = task.ask(life, self.owner, process, sent, claim)
                if claim is not None:
                    self.more = reply.answer
                return reply.moved[0]
            except (LineLost, Invalid):
                # Invalid: a service that was replaced, and does not know what it missed, or the claim.
                claim = None
                task.hung_up(life, self.owner, process)
            except IllegalTransition:
                raise LineLost from None

    def _again(self, sent: Report) -> None:
        """A request that comes twice is answered as it was."""
        process = self.task.line(self.life, self.run_id)
        if process is None:
            return
        try:
            reply = self.task.ask(self.life, self.owner, process, sent, None)
        except (LineLost, IllegalTransition, Invalid):
            return
        self._heard(sent.move, reply.moved[0])

    def _heard(self, move: Move, moved: Moved) -> None:
        if not moved.lost:
            told = {"left": moved.left, "stop": moved.stop}
            self.life.note("ledger.acked", run=self.run_id, epoch=self.epoch, n=move.n,
                           digest=move.digest, told=told)  # fmt: skip

    def _careless(self, move: Move) -> None:
        """A task that reports a row another way than it did: this must stop the run."""
        process = self.task.line(self.life, self.run_id)
        if process is None:
            return
        other = [Done(d.lo, d.hi, int(State.TERMINAL_SKIP)) for d in move.done]
        n = move.n + self.life.tape.draw(2)
        wrong = report(self.epoch, n, other, [], [])
        self.life.note("ledger.careless", run=self.run_id)
        try:
            reply = self.task.ask(self.life, self.owner, process, wrong, None)
            self._heard(wrong.move, reply.moved[0])
        except IllegalTransition:
            self.life.seen("ledger: halted by an illegal report")
            raise LineLost from None
        except (LineLost, Invalid):
            return

    def _beat(self) -> None:
        process = self.task.line(self.life, self.run_id)
        if process is not None and not process.beat(self.life, self.epoch):
            self.life.seen("ledger: heartbeat fenced")


def _ranges(rows: list[_Row]) -> list[Range]:
    """Neighbouring rows together."""
    found = []
    for _, group in groupby(enumerate(rows), key=lambda pair: pair[1].seq - pair[0]):
        seqs = [row.seq for _, row in group]
        found.append((seqs[0], seqs[-1] + 1))
    return found
