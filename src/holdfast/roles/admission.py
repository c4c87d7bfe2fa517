"""Which effects may be claimed: judged in the commit of the claim itself.

    dropped   its world is deleted: nobody waits for the receipt
    refused   its budget cannot pay for it, ever: a dead letter, and the receipt `over_budget`
    later     what other calls have set aside may come back: asked again when one of them has ended, the
              first by priority and turn, and after a while in any case

What is admitted has the most that it can cost set aside in the same commit, so calls that begin at
the same time cannot spend more together than a budget has. Of a world that has to wait one is asked in
a batch: the others wait with it, so a backlog that cannot begin costs little.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast import codec
from holdfast.clock import MS, S
from holdfast.codec import Record
from holdfast.durable import queue as queues
from holdfast.durable.queue import TAKE, Candidate, Verdict
from holdfast.effects import budget
from holdfast.effects.budget import MONEY, UNITS, UNIVERSE, Charge
from holdfast.errors import HoldfastError, Invalid, NotFound
from holdfast.messages import Intent
from holdfast.roles.doing import Billing
from holdfast.store.api import Txn, operation, resolve
from holdfast.world import catalog, publish

# How long an effect waits at most for reservations of others to be settled ...
LATER_NS = 5 * S
# ... and for each of its world that waits already: a long line is looked at no more often than a
# short one ...
LATER_EACH_NS = 1 * MS
# ... and, far less, for each of any world: many lines cost little more than one.
LATER_ALL_NS = MS // 5
# They are asked again many at a time, of which one answers for its world.
LATER_STEP_NS = 100 * MS

DROP = Verdict("drop")
LATER = Verdict("later", code=budget.WAITS)


class Terms(Record, frozen=True):
    universe: str
    billing: Billing | None = None


class Unpriced(HoldfastError):
    code = "not_configured"
    hint = "a budget in money needs the price of the model; it may be 0"


@operation
def admit(txn: Txn, queue: str, candidates: list[Candidate], args: bytes) -> list[Verdict]:
    """Judge effects; their group is their world."""
    terms = codec.unpack_as(Terms, args)
    gone = {world: _gone(txn, terms.universe, world) for world in {c.group for c in candidates}}
    later_ns = LATER_NS + queues.counts(txn, queue).delayed * LATER_ALL_NS
    verdicts: list[Verdict] = []
    full: dict[str, str] = {}
    for one in candidates:
        if gone[one.group]:
            verdict = _dropped(txn, terms, one)
        elif one.group in full and not _reserved(txn, terms, one):
            # It would have to wait behind the other in any case.
            verdict = LATER
        else:
            verdict, scope = _judge(txn, terms, one)
            if verdict is LATER:
                full[one.group] = scope
        if verdict is LATER:
            place = budget.Place(queue, one.seq, one.priority, one.turn)
            budget.await_room(txn, terms.universe, full[one.group], place)
            line_ns = budget.line_up(txn, terms.universe, one.group, LATER_EACH_NS)
            verdict = replace(LATER, delay_ns=_until_step(txn.now_ns, later_ns + line_ns))
        verdicts.append(verdict)
    return verdicts


@operation
def undo(txn: Txn, queue: str, candidates: list[Candidate], args: bytes) -> None:
    """They were admitted and are given back unbegun: nothing was spent, and nothing stays set aside."""
    terms = codec.unpack_as(Terms, args)
    for one in candidates:
        key = codec.unpack_as(Intent, one.payload).intent_hash.hex()
        budget.book_late.fn(txn, terms.universe, key, one.claim, [])


def _gone(txn: Txn, universe: str, world_id: str) -> bool:
    try:
        return catalog.record(txn, universe, world_id).status is catalog.Status.DELETED
    except NotFound:
        return True


def _dropped(txn: Txn, terms: Terms, one: Candidate) -> Verdict:
    intent = codec.unpack_as(Intent, one.payload)
    publish.forget(txn, terms.universe, intent.intent_hash)
    budget.close.fn(txn, terms.universe, intent.intent_hash.hex(), None)
    return DROP


def _until_step(now_ns: int, delay_ns: int) -> int:
    """The delay, and what is missing to the next step."""
    return delay_ns + -(now_ns + delay_ns) % LATER_STEP_NS


def _reserved(txn: Txn, terms: Terms, one: Candidate) -> bool:
    key = codec.unpack_as(Intent, one.payload).intent_hash.hex()
    return budget.reservation(txn, terms.universe, key) is not None


def _judge(txn: Txn, terms: Terms, one: Candidate) -> tuple[Verdict, str]:
    """The verdict, and the scope whose budget stands against it."""
    if terms.billing is None:
        return TAKE, ""
    try:
        answer = _reserve(txn, terms.universe, terms.billing, one)
    except HoldfastError as error:
        return Verdict("refuse", code=error.code, error=str(error)), ""
    except Exception as error:
        # It is this one's fault, whatever it is: no other waits behind it for ever.
        return Verdict("refuse", code=Invalid.code, error=repr(error)), ""
    if answer.granted:
        return TAKE, ""
    if answer.later:
        return LATER, answer.scope
    told = _told(txn, terms.universe, answer)
    return Verdict("refuse", code="over_budget", error=told), answer.scope


def _reserve(txn: Txn, universe: str, billing: Billing, one: Candidate) -> budget.Answer:
    intent = codec.unpack_as(Intent, one.payload)
    limited = {
        unit
        for unit in UNITS
        for scope in (intent.world_id, UNIVERSE)
        if budget.limit_of(txn, universe, scope, unit) is not None
    }
    ask = resolve(billing.operation).fn
    most: list[Charge] = ask(txn, intent.params, billing.args, bool(limited))
    if MONEY in limited and all(charge.unit != MONEY for charge in most):
        # Where money is limited, a call of unknown price is not made.
        raise Unpriced(kind=intent.effect_kind)
    key = intent.intent_hash.hex()
    return budget.reserve.fn(txn, universe, intent.world_id, key, most, one.claim, one.expiries)


def _told(txn: Txn, universe: str, answer: budget.Answer) -> str:
    """For people: the account by its name, money in its currency."""
    whose = "the universe"
    if answer.scope:
        world = catalog.record(txn, universe, answer.scope)
        whose = f"{world.type}/{world.name}"
    account = answer.account
    per_unit = 1_000_000 if answer.unit == MONEY else 1
    spent, reserved, limit = (
        f"{(amount or 0) / per_unit:,g}"
        for amount in (account.spent, account.reserved, account.limit)
    )
    return f"{answer.unit} of {whose}: spent {spent}, reserved {reserved}, limit {limit}"
