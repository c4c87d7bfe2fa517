"""Why an effect does not run: its claim, its delay, its budget, the rate of its kind, its dead letter."""

from __future__ import annotations

from holdfast.blockers.answer import Blocker, WhyAnswer, answer, blocker
from holdfast.clock import S
from holdfast.durable import item as items
from holdfast.durable import queue as queues
from holdfast.durable.item import QueueItem, keys_of, pack_int
from holdfast.effects import budget, rate
from holdfast.effects.budget import MONEY, UNITS, UNIVERSE_SCOPE
from holdfast.errors import Invalid, NotFound
from holdfast.messages import FLOW_WORLD_PREFIX
from holdfast.store.api import Txn
from holdfast.world import catalog, intents
from holdfast.world.intents import PendingEffect

# An item that is ready this long, while no worker has a claim of its kind, has no worker.
UNSERVED_NS = 5 * S
# Open reservations that an answer reads.
RESERVATIONS_MAX = 1_000


def explain(txn: Txn, universe: str, id: str) -> WhyAnswer:
    try:
        intent_hash = bytes.fromhex(id)
    except ValueError:
        raise Invalid(what="intent", found=id[:80], expected="hexadecimal") from None
    pending = intents.find_pending(txn, universe, intent_hash)
    if pending is None:
        why = "done (its world has the receipt), or never emitted"
        raise NotFound(what="effect", effect=id[:80], universe=universe, why=why)
    if pending.dead:
        return answer("effect", id, "dead", [_dead(txn, universe, pending)])
    if pending.starts_flow:
        text = f"waits for the flow {pending.seq} that it started"
        return answer("effect", id, "started", [blocker("running", text)])
    state, blockers = _judge(txn, universe, pending)
    return answer("effect", id, state, blockers)


def _dead(txn: Txn, universe: str, pending: PendingEffect) -> Blocker:
    letters = queues.list_dead(txn, pending.queue(universe), pending.seq - 1, 1)
    letter = letters[0] if letters and letters[0].seq == pending.seq else None
    text = "it is a dead letter"
    if letter is not None:
        text += f": {letter.code}: {letter.error.partition(chr(10))[0][:200]}"
    names = {"effect_kind": pending.effect_kind, "seq": str(pending.seq), "universe": universe}
    return blocker("effect_dead", text, 0 if letter is None else letter.died_ns, names=names)


def _judge(txn: Txn, universe: str, pending: PendingEffect) -> tuple[str, list[Blocker]]:
    queue = pending.queue(universe)
    keys, packed_seq = keys_of(queue), pack_int(pending.seq)
    item = items.load_with_claim(txn, keys, packed_seq)
    if item.expires_ns:
        if txn.now_ns >= item.expires_ns:
            text = f"the claim of worker {item.owner} is overdue; the next claim request returns it"
            return "claimed", [blocker("claim_expired", text, item.expires_ns)]
        text = f"worker {item.owner} runs it, attempt {item.claims}"
        return "claimed", [blocker("running", text, item.claimed_ns, item.expires_ns)]
    if txn.get(keys.ready_key(item.priority, item.fair_rank, packed_seq)) is not None:
        return "ready", [ready_blocker(txn, queue, pending.effect_kind, item.enqueued_ns)]
    if item.code == budget.BUDGET_RESERVED:
        return "delayed", _budget_blockers(txn, universe, pending, queue, item)
    if item.failures:
        text = (
            f"attempt {item.failures} failed, {item.code}: {item.error.partition(chr(10))[0][:200]}"
        )
        return "delayed", [blocker("waits_for_retry", text, until=item.not_before_ns)]
    text = "it waits for its start time"
    return "delayed", [blocker("waits_for_start_time", text, until=item.not_before_ns)]


def ready_blocker(txn: Txn, queue: str, kind: str, enqueued_ns: int) -> Blocker:
    """The blocker of a ready effect: its rate, or a missing worker, or the effects before it."""
    counts = queues.counts(txn, queue)
    granted_until_ns = rate.granted_until_ns(txn, queue)
    if granted_until_ns > txn.now_ns:
        text = f"the rate of {kind} grants no further start before this time"
        return blocker("rate_limited", text, until=granted_until_ns)
    if not counts.claimed and txn.now_ns - enqueued_ns >= UNSERVED_NS:
        waited_s = (txn.now_ns - enqueued_ns) / S
        text = f"ready for {waited_s:,.0f} s, and no worker claims effects of kind {kind}"
        return blocker("no_effect_worker", text, enqueued_ns)
    text = f"it is ready ({counts.ready:,} ready, {counts.claimed:,} running)"
    return blocker("waits_in_queue", text)


def _budget_blockers(
    txn: Txn, universe: str, pending: PendingEffect, queue: str, item: QueueItem
) -> list[Blocker]:
    place = budget.WaitingItem(queue, pending.seq, item.priority, item.fair_rank)
    scopes = (UNIVERSE_SCOPE, pending.world_id)
    waits_at = [s for s in scopes if budget.is_waiting(txn, universe, s, place)] or list(scopes)
    found = [
        _budget_blocker(txn, universe, scope, unit, item.not_before_ns)
        for scope in waits_at
        for unit in UNITS
        if budget.account(txn, universe, scope, unit).limit is not None
    ]
    text = "it waits for reservations of other calls; its budget has no limit any more"
    return found or [blocker("budget_reserved", text, until=item.not_before_ns)]


def _budget_blocker(txn: Txn, universe: str, scope: str, unit: str, until_ns: int) -> Blocker:
    """Format an account: `budget `agents`: 0.48 of 0.50 set aside by 3 calls, oldest 12 s`."""
    account = budget.account(txn, universe, scope, unit)
    found = budget.open_reservations(txn, universe, RESERVATIONS_MAX)
    own = [
        one
        for one in found
        if scope in (UNIVERSE_SCOPE, one.world) and any(c.unit == unit for c in one.charges)
    ]
    more = "at least " if len(found) == RESERVATIONS_MAX else ""
    oldest_ns = min((one.reserved_ns for one in own), default=txn.now_ns)
    amounts = f"{amount_text(unit, account.reserved)} of {amount_text(unit, account.limit or 0)}"
    tokens = "" if unit == MONEY else f" {unit}"
    calls = f"{more}{len(own):,} call{'' if len(own) == 1 else 's'}"
    text = f"budget `{_account_name(txn, universe, scope)}`: {amounts}{tokens} set aside by {calls}"
    text += f", oldest {(txn.now_ns - oldest_ns) / S:,.0f} s" if own else ""
    text += f"; {amount_text(unit, account.spent)} spent" if account.spent else ""
    return blocker("budget_reserved", text, oldest_ns if own else None, until_ns)


def amount_text(unit: str, amount: int) -> str:
    """Format an amount of money with two decimals, or with as many as it has; tokens as a number."""
    if unit != MONEY:
        return f"{amount:,}"
    rest = amount % 10_000
    return f"{amount / 1_000_000:,.2f}" if not rest else f"{amount / 1_000_000:,.6f}".rstrip("0")


def _account_name(txn: Txn, universe: str, scope: str) -> str:
    if scope == UNIVERSE_SCOPE:
        return universe
    if scope.startswith(FLOW_WORLD_PREFIX):
        return scope
    record = catalog.get_record(txn, universe, scope)
    return f"{record.type}/{record.name}"
