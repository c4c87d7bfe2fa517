"""Planted bugs in intents of worlds: effects, their receipts, timers, mail, and their forks."""

from __future__ import annotations

from tests.simulation.source_edits import Edit

_dispatch = "world.intents:_dispatch"
_is_key_used = "world.intents:_is_key_used"
_resolve = "world.intents:resolve"
_cancel = "world.intents:_cancel"
_send = "world.intents:_send"
_queue_cancel = "durable.queue:cancel"
_deliver_receipt = "workers.effects.receipts:deliver_receipt"
_deliver_dead = "workers.effects.receipts:deliver_dead_receipt"
_redrive = "workers.effects.receipts:redrive_effects"
_finish = "workers.effects.handler:EffectHandler._finish"
_perform = "app.definitions:Effect.perform"
_deliver_due = "workers.timers.delivery:deliver_due"
_deliver_timer = "workers.timers.delivery:deliver_timer"
_deliver_recurring = "workers.timers.delivery:_deliver_recurring"
_complete_item = "durable.delayed:_complete_item"
_clear_slot = "world.timers:clear_slot"
_set_timer = "world.timers:set_timer"
_consume = "world.timers:consume"
_copy_to_child = "world.fork_inheritance:copy_to_child"
_reissue = "world.fork_inheritance:_reissue"
_on_ingress = "world.fork_inheritance:_PendingTracker.on_ingress"
_accept = "world.messaging.delivery:_accept"

_SKIP_CLAIMED = Edit(_queue_cancel, "item.expires_ns and not claimed", "item.expires_ns")
_UNRESOLVED_RECEIPT = Edit(
    _deliver_receipt,
    "intents.resolve(txn, intent.universe_id, intent.intent_hash) is not None",
    "True",
)
_KEEP_FORMER_TIMER = Edit(
    _clear_slot, "queue.cancel.fn(txn, timer_slot.queue(universe), timer_slot.seq)", "pass"
)

EFFECTS: dict[str, tuple[Edit, ...]] = {
    # publishing intents
    "intent publish: ignores a known key": (
        Edit(_is_key_used, "if first is None:", "if True:"),
    ),
    "intent publish: does not store the key": (
        Edit(_is_key_used, 'dedupe.remember(txn, scope_name, name, digest, b"")', "pass"),
    ),
    "intent publish: delivers no key_conflict receipt": (
        Edit(
            _is_key_used,
            "put_ingress(\n            txn,\n            intent.universe_id,\n            intent.world_id,\n"
            "            None,\n            synthetic_receipts.key_conflict_receipt(intent),\n            intent.trace,\n        )",
            "pass",
        ),
    ),
    "intent publish: sends the key_conflict receipt under the hash of the first intent": (
        Edit("world.synthetic_receipts:key_conflict_receipt", "intent.positional_id()", "intent.intent_hash"),
    ),
    "intent publish: writes no pending row": (Edit(_dispatch, "_put_pending(txn, intent, seq)", "pass"),),
    "intent publish: enqueues an effect without its dead-letter callback": (Edit(_dispatch, "one.world_id, ON_DEAD_OPERATION", "one.world_id, ''"),),
    "intent publish: uses the queue of another effect kind": (
        Edit("world.intents:effect_queue", 'f"{universe}/effects/{kind}"', 'f"{universe}/effects/fx.quote"'),
    ),
    # exactly one receipt
    "receipt: leaves the pending row": (Edit(_resolve, "txn.delete(key)", "pass"),),
    "receipt: does not mark the pending row of a dead effect": (
        Edit(_resolve, "txn.put(key, codec.pack(replace(pending_effect, dead=True)))", "pass"),
    ),
    "receipt: delivers a second receipt after a cancel of a claimed effect": (
        _SKIP_CLAIMED,
        _UNRESOLVED_RECEIPT,
    ),
    "receipt: is not put into the inbox": (Edit(_deliver_receipt, "_put_in_inbox(txn, intent, receipt)", "pass"),),
    "effect handler: acks an effect without its receipt": (Edit(_finish, "work.on_ack(deliver_receipt, intent, receipt)", "pass"),),
    "effect handler: commits the receipt before the ack": (
        Edit(
            _finish,
            "work.on_ack(deliver_receipt, intent, receipt)",
            "self._store.transact(deliver_receipt, intent, receipt)",
        ),
    ),
    "receipt: is delivered to a deleted world": (
        Edit("workers.effects.receipts:_put_in_inbox", "_world_exists(txn, intent)", "True"),
        Edit("workers.effects.admission:admit", "deleted_worlds[candidate.group]", "False"),
    ),
    "dead letter: does not run the dead-letter callback": (
        Edit("durable.dead_letters:write_letter", "if letter.on_dead:", "if False:"),
    ),
    "dead effect: delivers no receipt": (Edit(_deliver_dead, "_put_in_inbox(txn, intent, receipt)", "pass"),),
    "dead effect: reports a timeout as an error": (
        Edit(_deliver_dead, 'dead_letter.code in ("timeout", "expiries_exhausted")', "False"),
    ),
    # calls
    "effect call: uses another idempotency key for each attempt": (
        Edit(_perform, "intent.intent_hash.hex()}", "intent.intent_hash.hex()}-{attempt}"),
    ),
    "effect call: uses one idempotency key for all intents": (Edit(_perform, "intent.intent_hash.hex()", "'key'"),),
    "effect admission: admits effects of a deleted world": (Edit("workers.effects.admission:admit", "deleted_worlds[candidate.group]", "False"),),
    "rate limit: grants overlapping token blocks": (
        Edit("effects.rate:grant", ", txn.count(key))", ", 0)"),
    ),
    "rate limit: grants slots that are too short": (
        Edit("effects.rate:grant", "-int(-(S + LATENESS_NS) // rate_per_s)", "int(S // rate_per_s) - 1"),
    ),
    # cancelling
    "effect cancel: cancels an effect of another world": (Edit(_cancel, "pending_effect.world_id != world_id", "False"),),
    "effect cancel: delivers no receipt": (
        Edit(_cancel, "put_ingress(txn, universe, world_id, None, receipt, intent.trace)", "pass"),
    ),
    "effect cancel: leaves the item in its queue": (
        Edit(_cancel, "withdraw(txn, universe, resolved)", "pass"),
    ),
    "queue cancel: skips claimed items": (_SKIP_CLAIMED,),
    "effect cancel: does not resolve the pending row": (
        Edit(_cancel, "resolved = resolve(txn, universe, cancelled_hash)", "resolved = pending_effect"),
    ),
    "queue cancel: leaves the claim rows": (
        Edit(_queue_cancel, "items.delete_claim(txn, keys, item, packed_seq)", "pass"),
    ),
    # redriving
    "effect redrive: leaves the dead letter": (
        Edit(_redrive, "queue.discard_dead.fn(txn, name, [seq])", "pass"),
    ),
    "effect redrive: keeps the intent hash of the dead effect": (
        Edit(
            _redrive,
            'intent_hash=codec.digest(b"redrive", old.intent_hash, seq.to_bytes(8, "big")),',
            "",
        ),
    ),
    # timers
    "timer slot: leaves the former timer in its queue": (_KEEP_FORMER_TIMER,),
    "timer slot: leaves the former timer in its queue and delivers it": (
        _KEEP_FORMER_TIMER,
        Edit(_consume, "timer_slot is None or timer_slot.intent_hash != intent.intent_hash", "timer_slot is None"),
    ),
    "timer set: counts the delay from the wall clock of the reducer": (
        Edit(
            _set_timer,
            "min(wanted_ns, txn.now_ns) if wanted_ns else txn.now_ns",
            "intent.enqueued_at_ns",
        ),
    ),
    "timer delivery: delivers delays one second early": (
        Edit(_deliver_due, "txn.now_ns)", "txn.now_ns + 1_000_000_000)"),
    ),
    "timer delivery: delivers calendar timers one hour early": (
        Edit(_deliver_due, ", wall_ns),", ", wall_ns + 3_600_000_000_000),"),
        Edit(_deliver_timer, "wall_ns < timer.wall_ns", "False"),
    ),
    "timer delivery: never delivers calendar timers": (
        Edit(_deliver_due, ", wall_ns),", ", 0),"),
    ),
    "timer delivery: completes a timer without its event": (
        Edit(
            "workers.timers.delivery:_try_deliver",
            "put_ingress(txn, intent.universe_id, intent.world_id, key, ingress, trace)",
            "pass",
        ),
    ),
    "timer delivery: leaves the queue item": (
        Edit(_complete_item, "txn.delete(keys.items + packed_seq)", "pass"),
    ),
    "timer delivery: drops a timer when the inbox is full": (
        Edit(_deliver_timer, "_retry_when_inbox_full(txn, intent, timer, wall_ns, slot.original_due_ns)", "pass"),
    ),
    "timer delivery: does not clear the slot": (Edit(_consume, "txn.delete(key)", "pass"),),
    "recurring timer: schedules no next occurrence": (
        Edit(_deliver_recurring, "timers.schedule(txn, intent, timer.key, occurrence.next_ns, on_calendar=True)", "pass"),
    ),
    "recurring timer: gives all occurrences one intent hash": (Edit("world.recurring_timers:next_occurrence", "intent_hash=next_hash", "intent_hash=intent.intent_hash"),),
    "recurring timer: delivers missed occurrences that the policy skips": (
        Edit("world.recurring_timers:judge_due", 'not (late and missed == "skip")', "True"),
    ),
    "recurring timer: skips the occurrence after a missed one": (
        Edit("world.recurring_timers:judge_due", "after_ns = wall_ns if", "after_ns = wall_ns + MISSED_AFTER_NS if"),
    ),
    # mail
    "mail: is dropped when the inbox is full": (
        Edit(_send, "_dispatch(txn, [intent])\n    else:", "pass\n    else:"),
    ),
    "mail: is dropped when the inbox is full at the retry": (
        Edit(
            "world.messaging.outbox:deliver_local",
            "intents.relocate(\n"
            "            txn, intent, intents.enqueue_effect(txn, intent, txn.now_ns + FULL_INBOX_RETRY_NS)\n"
            "        )",
            "pass",
        ),
    ),
    "mail: delivers no receipt to the sender": (
        Edit(_send, "deliver_receipt(txn, intent, delivery.make_receipt(intent, mail, result))", "pass"),
    ),
    "mail: sets no runnable mark at the destination": (Edit(_accept, "catalog.mark_runnable(txn, universe, world_id)", "pass"),),
    "peer mail: accepts a repeated message as new": (
        Edit(_accept, "subject, key, body, issued_ns, meaning", "subject, None, body, None, meaning"),
    ),
    "peer mail: acks a delivered message without its receipt": (
        Edit(
            "workers.mail.delivery:PeerDelivery.__call__",
            "work.on_ack(outbox.finish, codec.unpack_as(Intent, work.payload), answer)",
            "pass",
        ),
    ),
    "peer mail: is dropped on the way to the peer queue": (
        Edit("workers.mail.router:MailRouter.__call__", "work.on_ack(outbox.forward_to_peer, intent, dest_universe)", "pass"),
    ),
    "peer mail: delivers the receipt and leaves the pending row": (
        Edit("world.messaging.outbox:_finish", "intents.resolve(txn, universe, intent.intent_hash) is None", "False"),
    ),
    # forks
    "fork: delivers no inherited receipts": (
        Edit(_copy_to_child, "put_ingress(txn, universe, child_id, None, one.answer)", "pass"),
    ),
    "fork: sends dropped_by_fork receipts to the parent": (
        Edit(
            _copy_to_child,
            "inherited.append(\n"
            "                InheritedItem(answer=synthetic_receipts.dropped_by_fork_receipt(intent))\n"
            "            )",
            "put_ingress(txn, universe, intent.world_id, None, synthetic_receipts.dropped_by_fork_receipt(intent))",
        ),
    ),
    "fork: reissues effects for the parent": (Edit(_reissue, "world_id=child_id,", ""),),
    "fork: reissues effects under the parent's intent hash": (Edit(_reissue, "intent_hash=identity,", ""),),
    "fork: does not dispatch the reissued effects": (Edit(_copy_to_child, "intents.dispatch(txn, reissued)", "pass"),),
    "fork: does not schedule the kept timers": (
        Edit(
            _copy_to_child, "slots.schedule(txn, reissued, timer.key, due_ns, on_calendar=on_calendar)", "pass"
        ),
    ),
    "fork: inherits effects that have their receipt": (Edit(_on_ingress, "self._effects.pop(named, None)", "pass"),),
    "fork: drops the receipt of a cancelled effect": (
        Edit("world.fork_inheritance:_PendingTracker._cancel", "if cancelled is not None:", "if False:"),
    ),
    "fork: reissues cancelled effects": (
        Edit("world.fork_inheritance:_PendingTracker._cancel", ".pop(named, None)", ".get(None)"),
    ),
    "fork: drops the key_conflict receipt": (
        Edit("world.fork_inheritance:_PendingTracker._is_new", "elif first_digest != intent.idempotency_digest():", "elif False:"),
    ),
    "fork: inherits receipts that the parent had consumed": (Edit(_on_ingress, "self._answers.pop(named, None)", "pass"),),
    "fork of a fork: ignores the items that the parent inherited": (
        Edit(
            "world.fork_inheritance:pending_after", "_inherited_items(txn, world.universe, world.world_id)", "()"
        ),
    ),
    "fork of a fork: does not store reissued effects as inherited": (
        Edit(_copy_to_child, "inherited.append(InheritedItem(reissued, known_as=tuple(known_as)))", "pass"),
    ),
    "fork: stores no aliases of reissued effects": (
        Edit(_copy_to_child, "intents.add_aliases(txn, reissued, known_as)", "pass"),
    ),
}  # fmt: skip
