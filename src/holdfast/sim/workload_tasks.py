"""Actors around tasks: submitters, workers, operators. None of them behaves.

A worker runs nothing: it dawdles, and then reports an end that the tape decides, at times late, twice,
or under a lease that it never had. Once faults have stopped it completes whatever it is granted.
"""

from __future__ import annotations

from typing import Any

from holdfast.clock import MS, S
from holdfast.errors import (
    CommitUnknown,
    Conflict,
    Invalid,
    KeyConflict,
    NotFound,
    StoreFull,
    StoreReplaced,
)
from holdfast.sim.actor import Actor, Life
from holdfast.sim.audit_tasks import UNIVERSE
from holdfast.sim.settings import LEASE_NS, Settings
from holdfast.store.api import Txn
from holdfast.tasks import checkpoint
from holdfast.tasks import coordinator as tasks
from holdfast.tasks.coordinator import End, Grant, Hold, New, Report
from holdfast.tasks.rows import Limits, Spec, keys_of
from holdfast.tasks.runs import batch_of, run_of

TROUBLE = (CommitUnknown, StoreFull, Conflict)
QUEUES = ("a", "b")
NAMES = ("work", "play")
LARGE = b"." * 5000
# More than there ever is to sweep: the model takes a sweep for a whole one.
SWEEP = 1000
_KEYS = keys_of(UNIVERSE)


def actors(settings: Settings) -> list[Actor]:
    return [
        *(Submitter(f"submitter{n}") for n in range(settings.senders)),
        *(TaskWorker(f"taskworker{n}") for n in range(1 + settings.workers)),
        *(TaskKeeper(f"taskkeeper{n}") for n in range(settings.operators)),
    ]


class Submitter(Actor):
    """Submits tasks of every kind. What it does not know the fate of, it sends again if it has a key."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.sent = 0
        self.seqs: list[int] = []
        # Under a key, sent and not answered: it must be sent until it is.
        self.owed: tuple[Spec, list[New]] | None = None

    def idle(self) -> bool:
        return self.owed is None

    def live(self, life: Life) -> None:
        while True:
            try:
                if self.owed is not None:
                    self._send(life, *self.owed)
                elif not life.calm:
                    self._send(life, *self._made(life))
            except TROUBLE:
                life.rest(ms=50)
            except KeyConflict:
                life.seen("task: key refused")
                self.owed = None
            except (NotFound, tasks.CyclicDependency):
                # It was forgotten, or, after a restore, was never there.
                life.seen("task: after one that is none")
                self.owed = None
            except StoreReplaced:
                life.store.reopen()
                # What it knows may be of a future that is none any more.
                self.seqs, self.owed = [], None
            life.rest(ms=400)

    def _send(self, life: Life, spec: Spec, new: list[New]) -> None:
        keyed = all(one.key for one in new)
        self.owed = (spec, new) if keyed else None
        found: list[int] = life.store.transact(tasks.submit, UNIVERSE, spec, new)
        self.owed = None
        self.seqs = [*self.seqs, *found][-12:]

    def _made(self, life: Life) -> tuple[Spec, list[New]]:
        tape = life.tape
        self.sent += 1
        spec = Spec(
            NAMES[tape.draw(2)],
            queue=QUEUES[tape.draw(2)],
            priority=tape.draw(3),
            lease_ns=(LEASE_NS, LEASE_NS // 2)[tape.draw(2)],
            attempts=1 + tape.draw(3),
            expiries_max=1 + tape.draw(3),
            window_ns=(4 * LEASE_NS, LEASE_NS)[tape.draw(2)],
            retain_ns=(3600 * S, 2 * S, 0)[tape.draw(3)],
            backoff_ns=200 * MS,
            backoff_ns_max=S,
            kind=tape.draw(3),
        )
        if tape.chance(400):
            # Alike in all but their arguments: a run.
            count = 1 + tape.draw(8)
            return spec, [New(f"{self.name}/{self.sent}/{n}".encode()) for n in range(count)]
        new = []
        keyed = tape.chance(300)
        for n in range(1 + tape.draw(4)):
            after: tuple[int, ...] = ()
            if self.seqs and tape.chance(250):
                after = (tape.pick(self.seqs),)
            if n and tape.chance(250):
                after += (-1 - tape.draw(n),)
            args = LARGE if tape.chance(50) else f"{self.name}/{self.sent}/{n}".encode()
            key = f"{self.name}/{self.sent}/{n}" if keyed else ""
            if tape.chance(100):
                key = f"shared{tape.draw(2)}"
            limit = ("", "", "x", "y")[tape.draw(4)]
            delay_ns = (0, 0, 0, 500 * MS, 2 * S)[tape.draw(5)]
            new.append(New(args, delay_ns, key, limit, after))
        return spec, new


class TaskWorker(Actor):
    """Leases and reports, in turns; what it forgot it reports too late, if it lives to do so."""

    def live(self, life: Life) -> None:
        me = f"{self.name}/{life.incarnation}"
        held: list[Grant] = []
        late: list[tuple[int, Grant]] = []
        reports: list[Report] = []
        generation = life.store.generation
        alone = False
        while True:
            tape = life.tape
            queues = list(QUEUES) if life.calm or tape.chance(600) else [QUEUES[tape.draw(2)]]
            try:
                if late and (tape.chance(200) or late[0][0] != generation):
                    self._too_late(life, me, late)
                # At times it is of another release, and knows one task only.
                known = () if life.calm or tape.chance(700) else (NAMES[tape.draw(2)],)
                asked = [queues, 1 + tape.draw(5), alone, (), known]
                if reports and tape.chance(300):
                    life.store.transact(tasks.settle, UNIVERSE, me, generation, reports)
                    reports = []
                turned = life.store.transact(
                    tasks.turn, UNIVERSE, me, generation, reports, *asked
                )  # fmt: skip
                reports = []
                held = turned.leased.grants
                alone = turned.leased.suspects or tape.chance(200)
                if held:
                    reports, forgotten = self._work(life, held, generation)
                    late += [(generation, grant) for grant in forgotten]
            except CommitUnknown:
                # It may have leases that it does not know of: they run out.
                life.seen("task: turn of unknown outcome")
            except (StoreFull, Conflict):
                pass
            except StoreReplaced:
                life.store.reopen()
                late += [(generation, grant) for grant in held]
                generation, reports = life.store.generation, []
            life.rest(ms=150 if held else 300)

    def _work(
        self, life: Life, held: list[Grant], generation: int
    ) -> tuple[list[Report], list[Grant]]:
        tape = life.tape
        if life.calm:
            return [Report(grant.seq, grant.lease, End.OK, b"done") for grant in held], []
        reports: list[Report] = []
        forgotten: list[Grant] = []
        if tape.chance(200):
            life.sleep((LEASE_NS // 4) * (1 + tape.draw(8)))
        if tape.chance(400):
            holds = [Hold(grant.seq, grant.lease, tape.chance(500)) for grant in held]
            life.store.transact(tasks.extend, UNIVERSE, generation, holds)
            life.rest(ms=LEASE_NS // MS // 2)
        for grant in held:
            end = (End.OK, End.OK, End.OK, End.FAILED, End.FAILED, *End)[tape.draw(10)]
            result = b"" if end else b"done %d" % (grant.seq % 3)
            report = Report(grant.seq, grant.lease, end, result, "", "no luck")
            fate = tape.draw(20)
            if fate == 19:
                forgotten.append(grant)
                continue
            if fate == 18:
                reports += [report, report]
            elif fate == 17:
                wrong = grant.lease + (1, -1)[tape.draw(2)]
                reports.append(Report(grant.seq, wrong, end))
                forgotten.append(grant)
            elif fate == 16:
                reports += [report, Report(grant.seq, grant.lease, End.OK, b"another")]
            else:
                reports.append(report)
        if tape.chance(60):
            reports.append(Report(tape.draw(200), 1 + tape.draw(50)))
        return reports, forgotten

    def _too_late(self, life: Life, me: str, late: list[tuple[int, Grant]]) -> None:
        generation, grant = late.pop(0)
        if life.tape.chance(500):
            hold = Hold(grant.seq, grant.lease, True)
            life.store.transact(tasks.extend, UNIVERSE, generation, [hold])
        report = Report(grant.seq, grant.lease, End.OK, b"late")
        [answer] = life.store.transact(tasks.settle, UNIVERSE, me, generation, [report])
        if answer == tasks.Answer.CANCELLED:
            life.seen("task: late worker told")
        if generation != life.store.generation:
            life.seen("task: worker of another generation")


class TaskKeeper(Actor):
    """Cancels, redrives, limits, forgets, and cuts the log."""

    def live(self, life: Life) -> None:
        while True:
            try:
                self._step(life, life.tape.draw(10))
            except TROUBLE:
                pass
            except NotFound:
                life.seen("task: forgotten before it was cancelled")
            except Invalid:
                life.seen("task: not to be redriven")
            except StoreReplaced:
                life.store.reopen()
            life.rest(ms=500)

    def _step(self, life: Life, choice: int) -> None:
        tape, store = life.tape, life.store
        if choice < 3:
            store.transact(tasks.maintain, UNIVERSE, SWEEP)
        elif choice == 3:
            if checkpoint.make(store, UNIVERSE):
                life.seen("task: checkpoint made")
        elif life.calm:
            store.transact(tasks.maintain, UNIVERSE, SWEEP)
        elif choice < 6:
            seqs = self._next(life) if tape.chance(400) else self._some(life)
            if seqs:
                store.transact(tasks.cancel, UNIVERSE, seqs)
        elif choice < 8:
            seqs = self._some(life)
            if seqs:
                store.transact(tasks.redrive, UNIVERSE, seqs[:1])
        elif choice == 8:
            limits = Limits((0, 0, 2, 1)[tape.draw(4)], (1, 1, 2, 0)[tape.draw(4)])
            store.transact(tasks.limit, UNIVERSE, QUEUES[tape.draw(2)], limits)
        else:
            # Whoever was let in by a lease that ended is cancelled before anybody asks for it.
            running = self._leased(life)
            if running:
                store.transact(tasks.cancel, UNIVERSE, running)
            seqs = self._next(life)
            if seqs:
                store.transact(tasks.cancel, UNIVERSE, seqs)

    def _next(self, life: Life) -> list[int]:
        """Some of those that are about to be granted."""
        ready: Any = life.store.read(lambda txn: txn.scan(_KEYS.ready, _KEYS.ready + b"\xff", 20))
        found = [seq for _, row in ready for seq in range(run_of(row)[0], run_of(row)[1] + 1)]
        return sorted(seq for seq in found[:20] if life.tape.chance(300))

    def _leased(self, life: Life) -> list[int]:
        def read(txn: Txn) -> list[int]:
            rows = txn.scan(_KEYS.expiries, _KEYS.expiries + b"\xff", 20)
            return sorted({seq for key, row in rows for seq in batch_of(txn, _KEYS, key, row)[1]})

        found: Any = life.store.read(read)
        return list(found[:3])

    def _some(self, life: Life) -> list[int]:
        last: Any = life.store.read(lambda txn: txn.count(_KEYS.seq))
        if not last:
            return []
        # Young ones for the most part: they have not ended.
        first = max(0, last - 12) if life.tape.chance(700) else 0
        count = 1 + life.tape.draw(3)
        return sorted({first + 1 + life.tape.draw(last - first) for _ in range(count)})
