"""Effect admission: decides in the claim's commit which effects may start.

    drop      the world is deleted, so no receipt is needed
    refuse    the budget can never cover the call: dead letter and the receipt `over_budget`
    later     reservations of other calls may be released: retried when one of them ends (by
              priority and fair-share rank), and after a timeout

Admission reserves the cost bound of the call in the same commit, so concurrent calls cannot exceed
a budget together. If a world has to wait, one of its candidates is checked per batch and the rest
wait with it, so a blocked backlog is cheap.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast import codec
from holdfast.clock import MS, S
from holdfast.codec import Record
from holdfast.durable import queue as queues
from holdfast.durable.queue import ADMIT, AdmissionVerdict, Candidate
from holdfast.effects import budget
from holdfast.effects.budget import MONEY, UNITS, UNIVERSE_SCOPE, Cost
from holdfast.errors import HoldfastError, Invalid, NotFound
from holdfast.messages import FLOW_WORLD_PREFIX, Intent
from holdfast.store.api import Txn, find_operation, operation
from holdfast.workers.effects.handler import CostEstimator
from holdfast.world import catalog, intents

# The longest wait for reservations of other calls ...
RETRY_NS_MAX = 5 * S
# ... plus this much for each waiting effect of the same world, so that a long queue is checked no
# more often than a short one ...
RETRY_PER_WORLD_ITEM_NS = 1 * MS
# ... plus this much for each waiting effect of any world.
RETRY_PER_ITEM_NS = MS // 5
# Retry times are rounded up to this step, so that retries form batches.
RETRY_STEP_NS = 100 * MS

DROP = AdmissionVerdict("drop")
LATER = AdmissionVerdict("later", code=budget.BUDGET_RESERVED)


class AdmissionTerms(Record, frozen=True):
    universe: str
    billing: CostEstimator | None = None


class PriceNotConfigured(HoldfastError):
    code = "not_configured"
    hint = "a budget in money needs the price of the model; it may be 0"


@operation("effects.admit")
def admit(txn: Txn, queue: str, candidates: list[Candidate], args: bytes) -> list[AdmissionVerdict]:
    """Decide the admission of effects. The queue group of an effect is its world."""
    terms = codec.unpack_as(AdmissionTerms, args)
    deleted_worlds = {
        world: _is_world_gone(txn, terms.universe, world) for world in {c.group for c in candidates}
    }
    later_ns = RETRY_NS_MAX + queues.counts(txn, queue).delayed * RETRY_PER_ITEM_NS
    verdicts: list[AdmissionVerdict] = []
    exhausted_scopes: dict[str, str] = {}
    for candidate in candidates:
        if deleted_worlds[candidate.group]:
            verdict = _drop_intent(txn, terms, candidate)
        elif candidate.group in exhausted_scopes and not _has_reservation(txn, terms, candidate):
            # It waits behind the earlier candidate of its world.
            verdict = LATER
        else:
            verdict, scope = _judge(txn, terms, candidate)
            if verdict is LATER:
                exhausted_scopes[candidate.group] = scope
        if verdict is LATER:
            place = budget.WaitingItem(
                queue, candidate.seq, candidate.priority, candidate.fair_rank
            )
            budget.wait_for_capacity(txn, terms.universe, exhausted_scopes[candidate.group], place)
            queue_delay_ns = budget.waiting_delay_ns(
                txn, terms.universe, candidate.group, RETRY_PER_WORLD_ITEM_NS
            )
            verdict = replace(
                LATER, delay_ns=_round_up_to_step(txn.now_ns, later_ns + queue_delay_ns)
            )
        verdicts.append(verdict)
    return verdicts


@operation("effects.undo_admission")
def undo_admission(txn: Txn, queue: str, candidates: list[Candidate], args: bytes) -> None:
    """Release the reservations of admitted effects that are released unstarted."""
    terms = codec.unpack_as(AdmissionTerms, args)
    for candidate in candidates:
        key = codec.unpack_as(Intent, candidate.payload).intent_hash.hex()
        budget.settle_after_loss.fn(txn, terms.universe, key, candidate.claim, [])


def _is_world_gone(txn: Txn, universe: str, world_id: str) -> bool:
    if world_id.startswith(FLOW_WORLD_PREFIX):
        # Imported here: few applications have flows.
        from holdfast.flows import children

        return children.is_flow_gone(txn, universe, world_id)
    try:
        return catalog.get_record(txn, universe, world_id).status is catalog.WorldStatus.DELETED
    except NotFound:
        return True


def _drop_intent(txn: Txn, terms: AdmissionTerms, candidate: Candidate) -> AdmissionVerdict:
    intent = codec.unpack_as(Intent, candidate.payload)
    intents.drop(txn, terms.universe, intent.intent_hash)
    budget.settle_by_claim.fn(txn, terms.universe, intent.intent_hash.hex(), None)
    return DROP


def _round_up_to_step(now_ns: int, delay_ns: int) -> int:
    """Round a delay up to the next retry step."""
    return delay_ns + -(now_ns + delay_ns) % RETRY_STEP_NS


def _has_reservation(txn: Txn, terms: AdmissionTerms, candidate: Candidate) -> bool:
    key = codec.unpack_as(Intent, candidate.payload).intent_hash.hex()
    return budget.reservation(txn, terms.universe, key) is not None


def _judge(txn: Txn, terms: AdmissionTerms, candidate: Candidate) -> tuple[AdmissionVerdict, str]:
    """Return the verdict and the scope of the exhausted budget."""
    if terms.billing is None:
        return ADMIT, ""
    try:
        answer = _reserve(txn, terms.universe, terms.billing, candidate)
    except HoldfastError as error:
        return AdmissionVerdict("refuse", code=error.code, error=str(error)), ""
    except Exception as error:
        # Refuse the candidate for any error, so that it cannot block the queue.
        return AdmissionVerdict("refuse", code=Invalid.code, error=repr(error)), ""
    if answer.granted:
        return ADMIT, ""
    if answer.retry_later:
        return LATER, answer.scope
    reason = _explain_refusal(txn, terms.universe, answer)
    return AdmissionVerdict("refuse", code="over_budget", error=reason), answer.scope


def _reserve(
    txn: Txn, universe: str, billing: CostEstimator, candidate: Candidate
) -> budget.ReservationResult:
    intent = codec.unpack_as(Intent, candidate.payload)
    limited = {
        unit
        for unit in UNITS
        for scope in (intent.world_id, UNIVERSE_SCOPE)
        if budget.limit_of(txn, universe, scope, unit) is not None
    }
    estimate_cost = find_operation(billing.operation).fn
    cost_bound: list[Cost] = estimate_cost(txn, intent.params, billing.args, bool(limited))
    if MONEY in limited and all(charge.unit != MONEY for charge in cost_bound):
        # A money budget requires a known price.
        raise PriceNotConfigured(kind=intent.effect_kind)
    key = intent.intent_hash.hex()
    return budget.reserve.fn(
        txn, universe, intent.world_id, key, cost_bound, candidate.claim, candidate.expiries
    )


def _explain_refusal(txn: Txn, universe: str, answer: budget.ReservationResult) -> str:
    """Describe the exhausted account for an operator."""
    owner = "the universe"
    if answer.scope.startswith(FLOW_WORLD_PREFIX):
        owner = answer.scope
    elif answer.scope:
        world = catalog.get_record(txn, universe, answer.scope)
        owner = f"{world.type}/{world.name}"
    account = answer.account
    per_unit = 1_000_000 if answer.unit == MONEY else 1
    spent, reserved, limit = (
        f"{(amount or 0) / per_unit:,g}"
        for amount in (account.spent, account.reserved, account.limit)
    )
    return f"{answer.unit} of {owner}: spent {spent}, reserved {reserved}, limit {limit}"
