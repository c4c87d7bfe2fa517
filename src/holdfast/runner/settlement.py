"""The settlement buffer: finished outcomes until their commit.

One commit settles all outcomes of the buffer, each separately under its claim token. An outcome leaves
the buffer exactly once, and is counted then:

    the queue replies      done, requeued, dead or lost
    the store refuses      it stays; after `requeue_max_attempts` refusals its claim is left to expire
    the commit is unknown  it stays, marked as in doubt, and is looked up before it is settled again

The lookup resolves an in-doubt commit. If the claim still exists, it was not settled. If it is gone before
its expiry, our commit settled it. If it is gone after its expiry, it counts as lost: either our commit
settled it or another worker claimed it, and no item may be counted twice.
"""

from __future__ import annotations

import traceback

from holdfast import codec
from holdfast.clock import S
from holdfast.config import BATCH_MAX, ERROR_TEXT_CHARS_MAX, RETRY_AFTER_S_MAX, SETTLEMENT_BYTES_MAX
from holdfast.durable import queue as queues
from holdfast.durable.queue import ClaimToken, ItemFailure, JoinedOperation
from holdfast.errors import CommitUnknown, HoldfastError
from holdfast.runner import claim_ops
from holdfast.runner.error_policy import ErrorKind, code_of, is_transient
from holdfast.runner.hooks import Hooks, error_text
from holdfast.runner.policy import RunnerPolicy
from holdfast.runner.tick import TickStats
from holdfast.runner.unknown_outcome import can_repeat_claim
from holdfast.runner.work import WorkOutcome
from holdfast.store.api import Store, Txn

# The name and packed arguments of an operation.
PackedOperation = tuple[str, bytes]
PackedOutcomes = list[tuple[WorkOutcome, list[PackedOperation]]]

DONE, DEAD, LOST = "done", "dead", "lost"
# Every other reply of the queue is a requeue, immediate or delayed.
REQUEUED = "delayed"
HELD = "held"


class SettlementBuffer:
    def __init__(self, store: Store, hooks: Hooks) -> None:
        self._store = store
        self._hooks = hooks
        self.outcomes: list[WorkOutcome] = []

    def settle(self, policy: RunnerPolicy, tick: TickStats) -> None:
        """Commit all outcomes. Refused outcomes stay in the buffer, and the tick counts as busy."""
        try:
            try:
                self._commit(policy, tick)
            except CommitUnknown:
                self._mark_in_doubt()
                self._commit(policy, tick)
        except CommitUnknown as error:
            self._mark_in_doubt()
            self._on_refused(error, policy, tick)
        except HoldfastError as error:
            if not is_transient(error):
                raise
            self._on_refused(error, policy, tick)

    def _commit(self, policy: RunnerPolicy, tick: TickStats) -> None:
        if any(outcome.outcome_unknown for outcome in self.outcomes):
            self._resolve_in_doubt(tick)
        while self.outcomes:
            batch = _take_batch(self.outcomes)
            self._commit_batch(batch, policy, tick)

    def _commit_batch(self, batch: PackedOutcomes, policy: RunnerPolicy, tick: TickStats) -> None:
        acks, fails, operations = self.settle_args(batch, policy)
        ends = self._store.transact(queues.finish_batch, acks, fails, policy.budget, operations)
        self.record_committed(batch, ends, tick)

    def settle_and_claim(
        self, policy: RunnerPolicy, tick: TickStats, request: claim_ops.ClaimRequest
    ) -> claim_ops.ClaimedBatch | None:
        """Settle the buffer and claim new items in one commit. Return the claimed batch, or None if the
        store refused: then the next tick settles normally."""
        batch = _take_batch(self.outcomes)
        acks, fails, operations = self.settle_args(batch, policy)
        try:
            settled: claim_ops.SettledAndClaimed = self._store.transact(
                claim_ops.settle_and_claim, acks, fails, operations, request
            )
        except CommitUnknown as error:
            self._mark_in_doubt()
            self._on_refused(error, policy, tick)
            return None
        except HoldfastError as error:
            if not is_transient(error):
                raise
            self._on_refused(error, policy, tick)
            return None
        self.record_committed(batch, settled.ends, tick)
        return settled.taken

    def settle_args(
        self, batch: PackedOutcomes, policy: RunnerPolicy
    ) -> tuple[list[ClaimToken], list[ItemFailure], list[JoinedOperation]]:
        """Return acks, failures and joined operations for `queue.finish_batch`."""
        ordered = _acks_first(batch)
        return (
            [outcome.work.claim.token for outcome, _ in ordered if outcome.error is None],
            [to_failure(outcome, policy) for outcome, _ in ordered if outcome.error is not None],
            [
                JoinedOperation(index, name, args)
                for index, (_, packed_operations) in enumerate(ordered)
                for name, args in packed_operations
            ],
        )

    def record_committed(self, batch: PackedOutcomes, ends: list[str], tick: TickStats) -> None:
        """Remove committed outcomes from the buffer and count them."""
        self.outcomes = self.outcomes[len(batch) :]
        for (outcome, _), end in zip(_acks_first(batch), ends, strict=True):
            self._record_end(outcome, end, tick)

    def record_handed_off(
        self, outcomes: list[WorkOutcome], remaining: list[WorkOutcome], tick: TickStats
    ) -> None:
        """Count outcomes that a commit handoff settled. Those in `remaining` return to the buffer."""
        self.outcomes = remaining + self.outcomes
        tick.done += len(outcomes) - len(remaining)

    def requeue(self, outcomes: list[WorkOutcome], *, outcome_unknown: bool) -> None:
        """Return outcomes of a failed handoff to the buffer, in doubt if `unsure`."""
        for outcome in outcomes:
            outcome.outcome_unknown = outcome_unknown
        self.outcomes = outcomes + self.outcomes

    def requeue_rejected(
        self,
        outcomes: list[WorkOutcome],
        error: HoldfastError,
        policy: RunnerPolicy,
        tick: TickStats,
    ) -> None:
        """Return outcomes of a rejected handoff to the buffer. The next tick settles them normally."""
        self.requeue(outcomes, outcome_unknown=isinstance(error, CommitUnknown))
        if not can_repeat_claim(error):
            raise error
        self._on_refused(error, policy, tick)

    @property
    def is_certain(self) -> bool:
        return not any(outcome.outcome_unknown for outcome in self.outcomes)

    def _resolve_in_doubt(self, tick: TickStats) -> None:
        """Resolve in-doubt commits by reading the claims."""
        in_doubt = [outcome for outcome in self.outcomes if outcome.outcome_unknown]
        ends = self._store.read(lookup_outcomes, in_doubt)
        self.outcomes = [outcome for outcome in self.outcomes if not outcome.outcome_unknown]
        for outcome, end in zip(in_doubt, ends, strict=True):
            if end == HELD:
                outcome.outcome_unknown = False
                self.outcomes.append(outcome)
            else:
                self._record_end(outcome, end, tick)

    def _record_end(self, outcome: WorkOutcome, end: str, tick: TickStats) -> None:
        if end == DONE:
            tick.done += 1
        elif end == LOST:
            tick.lost += 1
            self._hooks.lost(outcome.work)
            outcome.work.abandon(self._store)
        elif end == DEAD:
            tick.dead += 1
            self._hooks.dead_lettered(outcome)
        else:
            tick.requeued += 1
            self._hooks.requeued(outcome)

    def _mark_in_doubt(self) -> None:
        for outcome in self.outcomes:
            outcome.outcome_unknown = True

    def _on_refused(self, error: HoldfastError, policy: RunnerPolicy, tick: TickStats) -> None:
        tick.busy += 1
        abandoned = []
        for outcome in self.outcomes:
            outcome.refusals += 1
            if outcome.refusals >= policy.requeue_max_attempts:
                abandoned.append(outcome)
        if abandoned:
            self.outcomes = [outcome for outcome in self.outcomes if outcome not in abandoned]
            self._hooks.loop_error(error)
        for outcome in abandoned:
            self._record_end(outcome, LOST, tick)


def _acks_first(batch: PackedOutcomes) -> PackedOutcomes:
    return sorted(batch, key=lambda entry: entry[0].error is not None)


def _take_batch(outcomes: list[WorkOutcome]) -> PackedOutcomes:
    """Return the first outcomes that fit into one commit, with their joined operations."""
    batch: PackedOutcomes = []
    size = 0
    for outcome in outcomes[:BATCH_MAX]:
        work = outcome.work
        joined = work.ack_operations if outcome.error is None else work.failure_operations
        packed = [(operation.name, codec.pack(args)) for operation, args in joined]
        size += sum(len(args) for _, args in packed)
        if batch and size > SETTLEMENT_BYTES_MAX:
            break
        batch.append((outcome, packed))
    return batch


def to_failure(outcome: WorkOutcome, policy: RunnerPolicy) -> ItemFailure:
    claim, error = outcome.work.claim, outcome.error
    kind = policy.faults.classify(error)
    return ItemFailure(
        claim.token,
        code_of(error),
        error_with_traceback(error) if kind is ErrorKind.FATAL else error_text(error),
        kind.retryable,
        max(policy.delay_ns(claim.seq, claim.failures + 1), retry_after_ns(error))
        if kind.retryable
        else 0,
    )


def retry_after_ns(error: Exception | None) -> int:
    """Return the `retry_after_s` of an error in nanoseconds, or 0."""
    retry_after_s = error.fields.get("retry_after_s") if isinstance(error, HoldfastError) else None
    if not isinstance(retry_after_s, int | float) or not 0 < retry_after_s <= RETRY_AFTER_S_MAX:
        return 0
    return int(retry_after_s * S)


def lookup_outcomes(txn: Txn, outcomes: list[WorkOutcome]) -> list[str]:
    """Return for each in-doubt outcome how it ended, or that its claim is still held."""
    held_claims = {
        (claim.queue, claim.seq, claim.number)
        for queue, owner in {(o.work.claim.queue, o.work.claim.owner) for o in outcomes}
        for claim in queues.claims_of(txn, queue, owner, BATCH_MAX)
    }
    return [_lookup_outcome(txn, outcome, held_claims) for outcome in outcomes]


def _lookup_outcome(txn: Txn, outcome: WorkOutcome, held_claims: set[tuple[str, int, int]]) -> str:
    claim = outcome.work.claim
    if (claim.queue, claim.seq, claim.number) in held_claims:
        return HELD
    for letter in queues.list_dead(txn, claim.queue, claim.seq - 1, 1):
        if (letter.seq, letter.claims) == (claim.seq, claim.number):
            return DEAD if letter.code == code_of(outcome.error) else LOST
    if txn.now_ns >= outcome.work.expires_ns:
        return LOST
    return DONE if outcome.error is None else REQUEUED


def error_with_traceback(error: Exception | None) -> str:
    """Format an error for a dead letter: one summary line, then the end of the traceback."""
    summary = error_text(error)[: ERROR_TEXT_CHARS_MAX // 2]
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception:
        return summary
    trace = trace.encode(errors="replace").decode()
    return summary + "\n" + trace[-(ERROR_TEXT_CHARS_MAX - len(summary) - 1) :]
