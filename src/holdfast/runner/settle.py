"""The desk where finished work waits until the store knows about it.

All outcomes on the desk go into one commit, each judged alone by the queue under its claim token.
An outcome leaves the desk exactly once, and is counted when it does:

    the queue answers      done, requeued, dead or lost, as it says
    the store refuses      it stays; after `requeue_max_attempts` refusals its claim is left to expire
    the commit is unknown  it stays, marked unsure, and is looked up before it is settled again

Looking up: a claim that is still ours was not settled. One that is gone before it could have expired
was settled, by us, as we wanted. One that is gone after that is counted as lost: perhaps it was our
commit, perhaps another worker has it, and nothing may be counted twice.
"""

from __future__ import annotations

import traceback
from typing import Any

from holdfast import codec
from holdfast.clock import S
from holdfast.config import (
    BATCH_MAX,
    ERROR_TEXT_CHARS_MAX,
    RETRY_AFTER_S_MAX,
    SETTLED_BYTES_MAX,
)
from holdfast.durable import queue as queues
from holdfast.durable.queue import Failure, Then, Token
from holdfast.errors import CommitUnknown, HoldfastError
from holdfast.runner import claims
from holdfast.runner.faults import Fault, code_of, transient
from holdfast.runner.hooks import Hooks, text_of
from holdfast.runner.policy import Policy
from holdfast.runner.tick import Tick
from holdfast.runner.work import Outcome
from holdfast.store.api import Store, Txn

# An operation and its arguments, as they are sent.
Packed = tuple[str, bytes]
Some = list[tuple[Outcome, list[Packed]]]
# The arguments of `claims.take`.
Take = tuple[Any, ...]

DONE, DEAD, LOST = "done", "dead", "lost"
# Anything else that the queue answers is a requeue: at once, or after a delay.
REQUEUED = "delayed"
HELD = "held"


class Desk:
    def __init__(self, store: Store, hooks: Hooks) -> None:
        self._store = store
        self._hooks = hooks
        self.outcomes: list[Outcome] = []

    def settle(self, policy: Policy, tick: Tick) -> None:
        """Try to clear the desk. What the store refuses stays on it, and the tick was busy."""
        try:
            try:
                self._commit(policy, tick)
            except CommitUnknown:
                self._doubt()
                self._commit(policy, tick)
        except CommitUnknown as error:
            self._doubt()
            self._refused(error, policy, tick)
        except HoldfastError as error:
            if not transient(error):
                raise
            self._refused(error, policy, tick)

    def _commit(self, policy: Policy, tick: Tick) -> None:
        if any(outcome.unsure for outcome in self.outcomes):
            self._look(tick)
        while self.outcomes:
            some = _some(self.outcomes)
            self._commit_some(some, policy, tick)

    def _commit_some(self, some: Some, policy: Policy, tick: Tick) -> None:
        acks, fails, then = self.arguments(some, policy)
        ends = self._store.transact(queues.settle, acks, fails, policy.budget, then)
        self.closed(some, ends, tick)

    def turn(self, policy: Policy, tick: Tick, take: Take) -> claims.Taken | None:
        """Settle what is on the desk and claim anew in one commit; what was taken, or None if the
        store did not take it: then it is settled as ever, next time."""
        some = _some(self.outcomes)
        acks, fails, then = self.arguments(some, policy)
        try:
            turned: claims.Turned = self._store.transact(claims.turn, acks, fails, then, *take)
        except CommitUnknown as error:
            self._doubt()
            self._refused(error, policy, tick)
            return None
        except HoldfastError as error:
            if not transient(error):
                raise
            self._refused(error, policy, tick)
            return None
        self.closed(some, turned.ends, tick)
        return turned.taken

    def arguments(
        self, some: Some, policy: Policy
    ) -> tuple[list[Token], list[Failure], list[Then]]:
        """Acks, failures and what joins them, as `queue.settle` takes them."""
        ordered = _acks_first(some)
        return (
            [one.work.claim.token for one, _ in ordered if one.error is None],
            [failure_of(one, policy) for one, _ in ordered if one.error is not None],
            [
                Then(index, name, args)
                for index, (_, then) in enumerate(ordered)
                for name, args in then
            ],
        )

    def closed(self, some: Some, ends: list[str], tick: Tick) -> None:
        """The store has taken these."""
        self.outcomes = self.outcomes[len(some) :]
        for (outcome, _), end in zip(_acks_first(some), ends, strict=True):
            self._close(outcome, end, tick)

    def done(self, outcomes: list[Outcome], left: list[Outcome], tick: Tick) -> None:
        """Somebody else has settled these, all but those left."""
        self.outcomes = left + self.outcomes
        tick.done += len(outcomes) - len(left)

    def put_back(self, outcomes: list[Outcome], *, unsure: bool) -> None:
        """Somebody else was to settle these, and perhaps did."""
        for outcome in outcomes:
            outcome.unsure = unsure
        self.outcomes = outcomes + self.outcomes

    def came_back(
        self, outcomes: list[Outcome], error: HoldfastError, policy: Policy, tick: Tick
    ) -> None:
        """The store did not take these from somebody else: they are settled as ever, next time."""
        self.put_back(outcomes, unsure=isinstance(error, CommitUnknown))
        if not (transient(error) or isinstance(error, CommitUnknown)):
            raise error
        self._refused(error, policy, tick)

    @property
    def sure(self) -> bool:
        return not any(outcome.unsure for outcome in self.outcomes)

    def _look(self, tick: Tick) -> None:
        """Find out what became of a commit of unknown outcome."""
        unsure = [outcome for outcome in self.outcomes if outcome.unsure]
        ends = self._store.read(whereabouts, unsure)
        self.outcomes = [outcome for outcome in self.outcomes if not outcome.unsure]
        for outcome, end in zip(unsure, ends, strict=True):
            if end == HELD:
                outcome.unsure = False
                self.outcomes.append(outcome)
            else:
                self._close(outcome, end, tick)

    def _close(self, outcome: Outcome, end: str, tick: Tick) -> None:
        if end == DONE:
            tick.done += 1
        elif end == LOST:
            tick.lost += 1
            self._hooks.lost(outcome.work)
            outcome.work.lose(self._store)
        elif end == DEAD:
            tick.dead += 1
            self._hooks.buried(outcome)
        else:
            tick.requeued += 1
            self._hooks.requeued(outcome)

    def _doubt(self) -> None:
        for outcome in self.outcomes:
            outcome.unsure = True

    def _refused(self, error: HoldfastError, policy: Policy, tick: Tick) -> None:
        tick.busy += 1
        given_up = []
        for outcome in self.outcomes:
            outcome.refusals += 1
            if outcome.refusals >= policy.requeue_max_attempts:
                given_up.append(outcome)
        if given_up:
            self.outcomes = [outcome for outcome in self.outcomes if outcome not in given_up]
            self._hooks.loop_error(error)
        for outcome in given_up:
            self._close(outcome, LOST, tick)


def _acks_first(some: Some) -> Some:
    return sorted(some, key=lambda one: one[0].error is not None)


def _some(outcomes: list[Outcome]) -> Some:
    """The first outcomes, as many as fit into one commit, with what joins them."""
    some: Some = []
    size = 0
    for outcome in outcomes[:BATCH_MAX]:
        work = outcome.work
        joined = work.joined if outcome.error is None else work.joined_failing
        then = [(operation.name, codec.pack(args)) for operation, args in joined]
        size += sum(len(args) for _, args in then)
        if some and size > SETTLED_BYTES_MAX:
            break
        some.append((outcome, then))
    return some


def failure_of(outcome: Outcome, policy: Policy) -> Failure:
    claim, error = outcome.work.claim, outcome.error
    fault = policy.faults.of(error)
    return Failure(
        claim.token,
        code_of(error),
        story_of(error) if fault is Fault.FATAL else text_of(error),
        fault.retryable,
        max(policy.delay_ns(claim.seq, claim.failures + 1), asked_ns(error))
        if fault.retryable
        else 0,
    )


def asked_ns(error: Exception | None) -> int:
    """How long whoever refused asked us to wait: errors may carry a `retry_after_s`."""
    asked = error.fields.get("retry_after_s") if isinstance(error, HoldfastError) else None
    if not isinstance(asked, int | float) or not 0 < asked <= RETRY_AFTER_S_MAX:
        return 0
    return int(asked * S)


def whereabouts(txn: Txn, outcomes: list[Outcome]) -> list[str]:
    """Of each outcome whose settlement is in doubt: how it ended, or that the claim is still held."""
    held = {
        (claim.queue, claim.seq, claim.number)
        for queue, owner in {(o.work.claim.queue, o.work.claim.owner) for o in outcomes}
        for claim in queues.claims_of(txn, queue, owner, BATCH_MAX)
    }
    return [_whereabouts(txn, outcome, held) for outcome in outcomes]


def _whereabouts(txn: Txn, outcome: Outcome, held: set[tuple[str, int, int]]) -> str:
    claim = outcome.work.claim
    if (claim.queue, claim.seq, claim.number) in held:
        return HELD
    for letter in queues.dead(txn, claim.queue, claim.seq - 1, 1):
        if (letter.seq, letter.claims) == (claim.seq, claim.number):
            return DEAD if letter.code == code_of(outcome.error) else LOST
    if txn.now_ns >= outcome.work.deadline_ns:
        return LOST
    return DONE if outcome.error is None else REQUEUED


def story_of(error: Exception | None) -> str:
    """For a dead letter: what went wrong in one line, then where, its innermost part last."""
    summary = text_of(error)[: ERROR_TEXT_CHARS_MAX // 2]
    try:
        where = "".join(traceback.format_exception(error))
    except Exception:
        return summary
    where = where.encode(errors="replace").decode()
    return summary + "\n" + where[-(ERROR_TEXT_CHARS_MAX - len(summary) - 1) :]
