"""Actors of queues: producers, workers that use claims directly, and the product's Runner.

Queues are `q` (work), `t` (timers: items that must not run early) and `fx` (effects published by a
host). A payload that starts with `poison` fails on every attempt.
"""

from __future__ import annotations

import itertools

from holdfast.clock import MS, S
from holdfast.durable import queue
from holdfast.durable.queue import Claim, ItemFailure, RetryBudget
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
from holdfast.runner.policy import RunnerPolicy
from holdfast.runner.runner import Runner
from holdfast.runner.work import WorkItem
from holdfast.sim.actor import Actor, Incarnation
from holdfast.sim.settings import CLAIM_NS

STORE_ERRORS = (CommitUnknown, StoreFull, Conflict)
LARGE = 5000


class QueueProducer(Actor):
    """Puts work and timers. Items have no key, so an unknown outcome is not resent."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.sent = 0

    def run_process(self, incarnation: Incarnation) -> None:
        while True:
            if incarnation.faults_stopped:
                incarnation.sleep(S)
                continue
            try:
                self._put(incarnation)
            except STORE_ERRORS:
                incarnation.pause(ms=50)
            except StoreReplaced:
                incarnation.store.reopen()
            incarnation.pause(ms=300)

    def _put(self, incarnation: Incarnation) -> None:
        self.sent += 1
        tape, store = incarnation.tape, incarnation.store
        payload = f"{self.name}/{self.sent}".encode()
        if tape.chance(120):
            payload = b"poison/" + payload
        if tape.chance(60):
            payload = b"." * LARGE  # always the same: one blob with many references
        kind = tape.draw(4)
        if kind == 0:
            store.transact(queue.put, "q", payload, priority=tape.draw(3))
        elif kind == 1:
            payloads = [payload + f"/{n}".encode() for n in range(1 + tape.draw(4))]
            store.transact(queue.put_many, "q", payloads)
        else:
            due_ns = store.now_ns() + tape.draw(8) * 500 * MS
            store.transact(queue.put, "t", payload, not_before_ns=due_ns)


class QueueWorker(Actor):
    """Claims items, delays, and ends its claims in every way, also late."""

    def run_process(self, incarnation: Incarnation) -> None:
        budget = RetryBudget(**incarnation.settings.budget)
        forgotten: list[list[Claim]] = []
        for turn in itertools.count():
            name = incarnation.tape.pick(("q", "fx", "t"), turn)
            limit = 1 + incarnation.tape.draw(3)
            try:
                if forgotten and incarnation.tape.chance(200):
                    incarnation.store.transact(queue.ack, forgotten.pop(0))
                owner = f"{self.name}/{incarnation.incarnation_id}"
                claims = incarnation.store.transact(
                    queue.claim, name, owner, limit, CLAIM_NS, budget
                )
                if claims:
                    self._ack_old_claim(incarnation, claims, forgotten)
                    if not self._handle(incarnation, claims, budget):
                        forgotten.append(claims)
            except STORE_ERRORS:
                pass
            except ClaimLost:
                incarnation.count_coverage("late worker refused")
            except StoreReplaced:
                incarnation.store.reopen()
            incarnation.pause(ms=200)

    def _ack_old_claim(
        self, incarnation: Incarnation, claims: list[Claim], forgotten: list[list[Claim]]
    ) -> None:
        """Ack an item that it holds again, but under its old claim. The ack must be refused."""
        names = {(claim.queue, claim.seq) for claim in claims}
        old = [claim for late in forgotten for claim in late if (claim.queue, claim.seq) in names]
        if old:
            try:
                incarnation.store.transact(queue.ack, old[:1])
            except ClaimLost:
                incarnation.count_coverage("old claim refused")

    def _handle(self, incarnation: Incarnation, claims: list[Claim], budget: RetryBudget) -> bool:
        """Process claims. False: the worker abandons them and may ack them when it is too late."""
        tape, store = incarnation.tape, incarnation.store
        if incarnation.faults_stopped:
            bad = [claim for claim in claims if claim.payload.startswith(b"poison")]
            good = [claim for claim in claims if claim not in bad]
            fails = [ItemFailure(claim, "poison", "never", True, 0) for claim in bad]
            store.transact(queue.finish_batch, good, fails, budget)
            return True
        if tape.chance(250):
            incarnation.sleep(tape.draw(4) * CLAIM_NS // 2)
        first = claims[0]
        ending = tape.draw(8)
        if ending < 2:
            self._ack(incarnation, claims)
        elif ending == 2:
            delay_ns = tape.draw(3) * 400 * MS
            store.transact(
                queue.fail, first, "failed", "no luck", tape.draw(4) > 0, delay_ns, budget
            )
        elif ending == 3:
            store.transact(queue.dead_letter, first, "buried", "nobody can handle this")
        elif ending == 4:
            store.transact(queue.release, claims)
        elif ending == 5:
            expiries = store.transact(queue.extend, claims, CLAIM_NS)
            incarnation.pause(ms=500)
            self._ack(incarnation, [c for c, kept in zip(claims, expiries, strict=True) if kept])
        elif ending == 6:
            fails = [ItemFailure(first, "failed", "no luck", True, tape.draw(2) * 300 * MS)]
            store.transact(queue.finish_batch, claims[1:], fails, budget)
        return ending < 7

    def _ack(self, incarnation: Incarnation, claims: list[Claim]) -> None:
        """Ack, with a resend after an unknown outcome. The resend finds the claim lost, never the
        item."""
        try:
            incarnation.store.transact(queue.ack, claims)
        except CommitUnknown:
            incarnation.store.transact(queue.ack, claims)


class TransientHandlerError(Busy):
    code = "transient_in_handler"


class RunnerActor(Actor):
    """A process that ticks the product's Runner."""

    def __init__(self, name: str, queue: str) -> None:
        super().__init__(name)
        self.queue = queue

    def run_process(self, incarnation: Incarnation) -> None:
        settings = incarnation.settings
        policy = RunnerPolicy(
            lease_ttl_ms=CLAIM_NS // MS,
            retry_budget_max=settings.failures_max,
            expiries_max=settings.expiries_max,
            max_batch=1 + incarnation.tape.draw(6),
            requeue_max_attempts=3,
            backoff=Backoff(first_ns=100 * MS, max_ns=S),
        )
        runner = Runner(
            incarnation.store,
            self.queue,
            lambda work: self._handle(incarnation, work),
            worker=self.name,
            timers="t",
            policy=policy,
            clock=incarnation.clock,
            sleep=incarnation.clock.sleep,
            bootstrap=False,
        )
        self._boot(incarnation, runner)
        while True:
            try:
                tick = runner.tick()
            except StoreReplaced:
                return  # the process ends; its next incarnation opens the restored store
            if tick.lost:
                incarnation.count_coverage("runner lost a claim")
            if not tick.made_progress:
                incarnation.pause(ms=150)

    def _boot(self, incarnation: Incarnation, runner: Runner) -> None:
        while True:
            try:
                runner.boot()
                return
            except STORE_ERRORS:
                incarnation.pause(ms=50)
            except StoreReplaced:
                incarnation.store.reopen()

    def _handle(self, incarnation: Incarnation, work: WorkItem) -> None:
        if work.payload.startswith(b"poison"):
            raise TransientHandlerError(seq=work.seq)
        if incarnation.faults_stopped:
            return
        choice = incarnation.tape.draw(20)
        if choice == 1:
            raise TransientHandlerError(seq=work.seq)
        if choice == 2:
            raise ValueError("a bug in the handler")
        if choice == 3:
            incarnation.sleep((500 + incarnation.tape.draw(3000)) * MS)
        if choice in (4, 5):
            try:
                work.extend()
            except STORE_ERRORS:
                incarnation.count_coverage("extension in doubt")
        if choice in (6, 7):
            incarnation.pause(ms=200)


class QueueOperator(Actor):
    """Expires claims, redrives dead letters, purges old ones."""

    def run_process(self, incarnation: Incarnation) -> None:
        budget = RetryBudget(**incarnation.settings.budget)
        for turn in itertools.count():
            name = incarnation.tape.pick(("q", "t", "fx"), turn)
            choice = incarnation.tape.draw(6)
            try:
                if choice < 4 or incarnation.faults_stopped:
                    incarnation.store.transact(
                        queue.expire_overdue, name, 1 + incarnation.tape.draw(4), budget
                    )
                elif choice == 4:
                    letters = incarnation.store.read(queue.list_dead, name, 0, 2)
                    if letters:
                        seqs = [letter.seq for letter in letters]
                        incarnation.store.transact(queue.redrive, name, seqs)
                        if incarnation.tape.chance(300):
                            incarnation.store.transact(
                                queue.redrive, name, seqs
                            )  # a duplicate command
                else:
                    before_ns = incarnation.store.now_ns() - incarnation.tape.draw(3) * 4 * S
                    incarnation.store.transact(queue.purge_dead, name, before_ns, 2)
            except STORE_ERRORS:
                pass
            except NotFound:
                incarnation.count_coverage("redrive of a dead letter that is gone")
            except StoreReplaced:
                incarnation.store.reopen()
            incarnation.pause(ms=700)
