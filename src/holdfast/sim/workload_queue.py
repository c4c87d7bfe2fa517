"""Actors around queues: putters, workers that use claims by hand, and the product's Runner.

Queues are `q` (work), `t` (timers: items that must not run before their time) and `fx` (effects
that a host published). A payload that starts with `poison` fails every time it is handled.
"""

from __future__ import annotations

import itertools

from holdfast.clock import MS, S
from holdfast.durable import queue
from holdfast.durable.queue import Budget, Claim, Failure
from holdfast.errors import (
    Busy,
    ClaimLost,
    CommitUnknown,
    Conflict,
    NotFound,
    StoreFull,
    StoreReplaced,
)
from holdfast.retry import Backoff
from holdfast.runner.policy import Policy
from holdfast.runner.runner import Runner
from holdfast.runner.work import Work
from holdfast.sim.actor import Actor, Life
from holdfast.sim.settings import CLAIM_NS

TROUBLE = (CommitUnknown, StoreFull, Conflict)
LARGE = 5000


class Putter(Actor):
    """Puts work and timers. Items have no key: what is unknown is not sent again."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.sent = 0

    def live(self, life: Life) -> None:
        while True:
            if life.calm:
                life.sleep(S)
                continue
            try:
                self._put(life)
            except TROUBLE:
                life.rest(ms=50)
            except StoreReplaced:
                life.store.reopen()
            life.rest(ms=300)

    def _put(self, life: Life) -> None:
        self.sent += 1
        tape, store = life.tape, life.store
        payload = f"{self.name}/{self.sent}".encode()
        if tape.chance(120):
            payload = b"poison/" + payload
        if tape.chance(60):
            payload = b"." * LARGE  # the same each time: one blob, many references
        kind = tape.draw(4)
        if kind == 0:
            store.transact(queue.put, "q", payload, priority=tape.draw(3))
        elif kind == 1:
            payloads = [payload + f"/{n}".encode() for n in range(1 + tape.draw(4))]
            store.transact(queue.put_many, "q", payloads)
        else:
            due_ns = store.now_ns() + tape.draw(8) * 500 * MS
            store.transact(queue.put, "t", payload, not_before_ns=due_ns)


class Worker(Actor):
    """Claims, dawdles, and ends its claims in every way there is, late ones too."""

    def live(self, life: Life) -> None:
        budget = Budget(**life.settings.budget)
        forgotten: list[list[Claim]] = []
        for turn in itertools.count():
            name = life.tape.pick(("q", "fx", "t"), turn)
            limit = 1 + life.tape.draw(3)
            try:
                if forgotten and life.tape.chance(200):
                    life.store.transact(queue.ack, forgotten.pop(0))
                owner = f"{self.name}/{life.incarnation}"
                claims = life.store.transact(queue.claim, name, owner, limit, CLAIM_NS, budget)
                if claims:
                    self._mistake(life, claims, forgotten)
                    if not self._handle(life, claims, budget):
                        forgotten.append(claims)
            except TROUBLE:
                pass
            except ClaimLost:
                life.seen("late worker refused")
            except StoreReplaced:
                life.store.reopen()
            life.rest(ms=200)

    def _mistake(self, life: Life, claims: list[Claim], forgotten: list[list[Claim]]) -> None:
        """Items that it had once before, and an answer under the old claim: it must not count."""
        names = {(claim.queue, claim.seq) for claim in claims}
        old = [claim for late in forgotten for claim in late if (claim.queue, claim.seq) in names]
        if old:
            try:
                life.store.transact(queue.ack, old[:1])
            except ClaimLost:
                life.seen("old claim refused")

    def _handle(self, life: Life, claims: list[Claim], budget: Budget) -> bool:
        """False: the worker forgets about its claims, and maybe remembers when it is too late."""
        tape, store = life.tape, life.store
        if life.calm:
            bad = [claim for claim in claims if claim.payload.startswith(b"poison")]
            good = [claim for claim in claims if claim not in bad]
            fails = [Failure(claim, "poison", "never", True, 0) for claim in bad]
            store.transact(queue.settle, good, fails, budget)
            return True
        if tape.chance(250):
            life.sleep(tape.draw(4) * CLAIM_NS // 2)
        first = claims[0]
        ending = tape.draw(8)
        if ending < 2:
            self._ack(life, claims)
        elif ending == 2:
            delay_ns = tape.draw(3) * 400 * MS
            store.transact(
                queue.fail, first, "failed", "no luck", tape.draw(4) > 0, delay_ns, budget
            )
        elif ending == 3:
            store.transact(queue.bury, first, "buried", "nobody can handle this")
        elif ending == 4:
            store.transact(queue.release, claims)
        elif ending == 5:
            expiries = store.transact(queue.extend, claims, CLAIM_NS)
            life.rest(ms=500)
            self._ack(life, [c for c, kept in zip(claims, expiries, strict=True) if kept])
        elif ending == 6:
            fails = [Failure(first, "failed", "no luck", True, tape.draw(2) * 300 * MS)]
            store.transact(queue.settle, claims[1:], fails, budget)
        return ending < 7

    def _ack(self, life: Life, claims: list[Claim]) -> None:
        """A resend after an unknown outcome finds the claim lost, never the item again."""
        try:
            life.store.transact(queue.ack, claims)
        except CommitUnknown:
            life.store.transact(queue.ack, claims)


class Transient(Busy):
    code = "transient_in_handler"


class RunnerWorker(Actor):
    """A process whose loop is the product's own Runner, ticked by hand."""

    def __init__(self, name: str, queue: str) -> None:
        super().__init__(name)
        self.queue = queue

    def live(self, life: Life) -> None:
        settings = life.settings
        policy = Policy(
            lease_ttl_ms=CLAIM_NS // MS,
            retry_budget_max=settings.failures_max,
            expiries_max=settings.expiries_max,
            max_batch=1 + life.tape.draw(6),
            requeue_max_attempts=3,
            backoff=Backoff(first_ns=100 * MS, max_ns=S),
        )
        runner = Runner(
            life.store,
            self.queue,
            lambda work: self._handle(life, work),
            worker=self.name,
            timers="t",
            policy=policy,
            clock=life.clock,
            sleep=life.clock.sleep,
            bootstrap=False,
        )
        self._boot(life, runner)
        while True:
            try:
                tick = runner.tick()
            except StoreReplaced:
                return  # the process ends; the next incarnation opens the restored store
            if tick.lost:
                life.seen("runner lost a claim")
            if not tick.moved:
                life.rest(ms=150)

    def _boot(self, life: Life, runner: Runner) -> None:
        while True:
            try:
                runner.boot()
                return
            except TROUBLE:
                life.rest(ms=50)
            except StoreReplaced:
                life.store.reopen()

    def _handle(self, life: Life, work: Work) -> None:
        if work.payload.startswith(b"poison"):
            raise Transient(seq=work.seq)
        if life.calm:
            return
        choice = life.tape.draw(20)
        if choice == 1:
            raise Transient(seq=work.seq)
        if choice == 2:
            raise ValueError("a bug in the handler")
        if choice == 3:
            life.sleep((500 + life.tape.draw(3000)) * MS)
        if choice in (4, 5):
            try:
                work.extend()
            except TROUBLE:
                life.seen("extension in doubt")
        if choice in (6, 7):
            life.rest(ms=200)


class Reaper(Actor):
    """Expires claims, drives dead letters again, purges old ones."""

    def live(self, life: Life) -> None:
        budget = Budget(**life.settings.budget)
        for turn in itertools.count():
            name = life.tape.pick(("q", "t", "fx"), turn)
            choice = life.tape.draw(6)
            try:
                if choice < 4 or life.calm:
                    life.store.transact(queue.reap, name, 1 + life.tape.draw(4), budget)
                elif choice == 4:
                    letters = life.store.read(queue.dead, name, 0, 2)
                    if letters:
                        seqs = [letter.seq for letter in letters]
                        life.store.transact(queue.redrive, name, seqs)
                        if life.tape.chance(300):
                            life.store.transact(queue.redrive, name, seqs)  # pressed twice
                else:
                    before_ns = life.store.now_ns() - life.tape.draw(3) * 4 * S
                    life.store.transact(queue.purge_dead, name, before_ns, 2)
            except TROUBLE:
                pass
            except NotFound:
                life.seen("redrive of a dead letter that is gone")
            except StoreReplaced:
                life.store.reopen()
            life.rest(ms=700)
