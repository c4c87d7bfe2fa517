"""Planted bugs in intents of worlds: effects, their receipts, timers, mail, and their forks."""

from __future__ import annotations

from tests.simulation.source_edits import Edit

_dispatch = "world.intents:_dispatch"
_used = "world.intents:_is_key_used"
_end = "world.intents:resolve"
_cancel = "world.intents:_cancel"
_send = "world.intents:_send"
_withdraw = "durable.queue:cancel"
_receive = "workers.effects.receipts:deliver_receipt"
_bereave = "workers.effects.receipts:deliver_dead_receipt"
_redrive = "workers.effects.receipts:redrive_effects"
_doing = "workers.effects.handler:EffectHandler._finish"
_perform = "app.definitions:Effect.perform"
_fire_due = "workers.timers.delivery:deliver_due"
_fire = "workers.timers.delivery:deliver_timer"
_repeat = "workers.timers.delivery:_deliver_recurring"
_end_due = "durable.delayed:_complete_item"
_empty = "world.timers:clear_slot"
_set_timer = "world.timers:set_timer"
_take = "world.timers:consume"
_bequeath = "world.fork_inheritance:copy_to_child"
_anew = "world.fork_inheritance:_reissue"
_got = "world.fork_inheritance:_PendingTracker.on_ingress"
_accept = "world.messaging.delivery:_accept"

_KEPT_BY_WORKERS = Edit(_withdraw, "item.expires_ns and not claimed", "item.expires_ns")
_ANY_RECEIPT = Edit(
    _receive, "intents.resolve(txn, intent.universe_id, intent.intent_hash) is not None", "True"
)
_SLOT_KEPT = Edit(
    _empty, "queue.cancel.fn(txn, timer_slot.queue(universe), timer_slot.seq)", "pass"
)

EFFECTS: dict[str, tuple[Edit, ...]] = {
    # publishing intents
    "publish: key not looked up": (
        Edit(_used, "if first is None:", "if True:"),
    ),
    "publish: key not remembered": (
        Edit(_used, 'dedupe.remember(txn, scope_name, name, digest, b"")', "pass"),
    ),
    "publish: refusal not told": (
        Edit(
            _used,
            "put_ingress(\n            txn,\n            intent.universe_id,\n            intent.world_id,\n"
            "            None,\n            synthetic_receipts.key_conflict_receipt(intent),\n        )",
            "pass",
        ),
    ),
    "publish: refusal under the name of what the key stands for": (
        Edit("world.synthetic_receipts:key_conflict_receipt", "intent.positional_id()", "intent.intent_hash"),
    ),
    "publish: nobody knows that it waits": (Edit(_dispatch, "txn.put(", "("),),
    "publish: no will": (Edit(_dispatch, "one.world_id, ON_DEAD_OPERATION", "one.world_id, ''"),),
    "publish: into the queue of another kind": (
        Edit("world.intents:effect_queue", 'f"{universe}/effects/{kind}"', 'f"{universe}/effects/fx.quote"'),
    ),
    # exactly one receipt
    "receipt: pending for ever": (Edit(_end, "txn.delete(key)", "pass"),),
    "receipt: one more after death": (
        Edit(_end, "txn.put(key, codec.pack(replace(pending_effect, dead=True)))", "pass"),
    ),
    "receipt: for what has had one, by a worker that was told to stop": (
        _KEPT_BY_WORKERS,
        _ANY_RECEIPT,
    ),
    "receipt: not delivered": (Edit(_receive, "_put_in_inbox(txn, intent, receipt)", "pass"),),
    "receipt: of another": (Edit(_doing, "work.on_ack(deliver_receipt, intent, receipt)", "pass"),),
    "receipt: apart from the ack": (
        Edit(
            _doing,
            "work.on_ack(deliver_receipt, intent, receipt)",
            "self._store.transact(deliver_receipt, intent, receipt)",
        ),
    ),
    "receipt: into a deleted world": (
        Edit("workers.effects.receipts:_put_in_inbox", "_world_exists(txn, intent)", "True"),
        Edit("workers.effects.admission:admit", "deleted_worlds[candidate.group]", "False"),
    ),
    "will: not executed": (
        Edit("durable.dead_letters:write_letter", "if letter.on_dead:", "if False:"),
    ),
    "will: nobody told": (Edit(_bereave, "_put_in_inbox(txn, intent, receipt)", "pass"),),
    "will: a time-out is an error": (
        Edit(_bereave, 'dead_letter.code in ("timeout", "expiries_exhausted")', "False"),
    ),
    # calls
    "call: another key at each attempt": (
        Edit(_perform, "intent.intent_hash.hex()}", "intent.intent_hash.hex()}-{attempt}"),
    ),
    "call: one key for all": (Edit(_perform, "intent.intent_hash.hex()", "'key'"),),
    "call: of a deleted world": (Edit("workers.effects.admission:admit", "deleted_worlds[candidate.group]", "False"),),
    "rate: blocks overlap": (
        Edit("effects.rate:grant", ", txn.count(key))", ", 0)"),
    ),
    "rate: slots too short": (
        Edit("effects.rate:grant", "-int(-(S + LATENESS_NS) // rate_per_s)", "int(S // rate_per_s) - 1"),
    ),
    # cancelling
    "cancel: another world's": (Edit(_cancel, "pending_effect.world_id != world_id", "False"),),
    "cancel: nobody told": (
        Edit(_cancel, "put_ingress(txn, universe, world_id, None, receipt)", "pass"),
    ),
    "cancel: done all the same": (
        Edit(_cancel, "queue.cancel.fn(txn, resolved.queue(universe), resolved.seq, True)", "pass"),
    ),
    "cancel: not from a worker": (_KEPT_BY_WORKERS,),
    "cancel: twice": (
        Edit(_cancel, "resolved = resolve(txn, universe, cancelled_hash)", "resolved = pending_effect"),
    ),
    "withdraw: claim rows stay": (
        Edit(_withdraw, "items.delete_claim(txn, keys, item, packed_seq)", "pass"),
    ),
    # redriving
    "effects redriven: dead letter kept": (
        Edit(_redrive, "queue.discard_dead.fn(txn, name, [seq])", "pass"),
    ),
    "effects redriven: under the old name": (
        Edit(
            _redrive,
            'intent_hash=codec.digest(b"redrive", old.intent_hash, seq.to_bytes(8, "big")),',
            "",
        ),
    ),
    # timers
    "timer: slot holds two": (_SLOT_KEPT,),
    "timer: slot holds two, and both fire": (
        _SLOT_KEPT,
        Edit(_take, "timer_slot is None or timer_slot.intent_hash != intent.intent_hash", "timer_slot is None"),
    ),
    "timer: by the reducer's clock": (
        Edit(
            _set_timer,
            "min(wanted_ns, txn.now_ns) if wanted_ns else txn.now_ns",
            "intent.enqueued_at_ns",
        ),
    ),
    "timer: a second early": (
        Edit(_fire_due, "txn.now_ns)", "txn.now_ns + 1_000_000_000)"),
    ),
    "timer: an hour early by the calendar": (
        Edit(_fire_due, ", wall_ns),", ", wall_ns + 3_600_000_000_000),"),
        Edit(_fire, "wall_ns < timer.wall_ns", "False"),
    ),
    "timer: the calendar is not looked at": (
        Edit(_fire_due, ", wall_ns),", ", 0),"),
    ),
    "timer: done, and nobody told": (
        Edit(
            "workers.timers.delivery:_try_deliver",
            "put_ingress(txn, intent.universe_id, intent.world_id, key, ingress)",
            "pass",
        ),
    ),
    "timer: told, and not done": (
        Edit(_end_due, "txn.delete(keys.items + packed_seq)", "pass"),
    ),
    "timer: lost to a full inbox": (
        Edit(_fire, "_retry_when_inbox_full(txn, intent, timer, wall_ns, slot.original_due_ns)", "pass"),
    ),
    "timer: fired apart from its slot": (Edit(_take, "txn.delete(key)", "pass"),),
    "every: once": (
        Edit(_repeat, "timers.schedule(txn, intent, timer.key, occurrence.next_ns, on_calendar=True)", "pass"),
    ),
    "every: one name for all": (Edit("world.recurring_timers:next_occurrence", "intent_hash=next_hash", "intent_hash=intent.intent_hash"),),
    "every: what was missed is told": (
        Edit("world.recurring_timers:next_occurrence", 'not (missed and timer.missed == "skip")', "True"),
    ),
    "every: the next is skipped": (
        Edit("world.recurring_timers:next_occurrence", "after_ns = wall_ns if", "after_ns = wall_ns + MISSED_AFTER_NS if"),
    ),
    # mail
    "mail: lost to a full inbox": (
        Edit(_send, "_dispatch(txn, [intent])\n    else:", "pass\n    else:"),
    ),
    "mail: lost to an inbox that stays full": (
        Edit(
            "world.messaging.outbox:deliver_local",
            "intents.relocate(\n"
            "            txn, intent, intents.enqueue_effect(txn, intent, txn.now_ns + FULL_INBOX_RETRY_NS)\n"
            "        )",
            "pass",
        ),
    ),
    "mail: nobody told": (
        Edit(_send, "deliver_receipt(txn, intent, delivery.make_receipt(intent, mail, result))", "pass"),
    ),
    "mail: no hint": (Edit(_accept, "catalog.mark_runnable(txn, universe, world_id)", "pass"),),
    "mail abroad: sent again, taken for new": (
        Edit(_accept, "subject, key, body, issued_ns, meaning", "subject, None, body, None, meaning"),
    ),
    "mail abroad: delivered, and nobody told": (
        Edit(
            "workers.mail.delivery:PeerDelivery.__call__",
            "work.on_ack(outbox.finish, codec.unpack_as(Intent, work.payload), answer)",
            "pass",
        ),
    ),
    "mail abroad: lost on the way to its lane": (
        Edit("workers.mail.router:MailRouter.__call__", "work.on_ack(outbox.forward_to_peer, intent, dest_universe)", "pass"),
    ),
    "mail abroad: told, and still pending": (
        Edit("world.messaging.outbox:_finish", "intents.resolve(txn, universe, intent.intent_hash) is None", "False"),
    ),
    # forks
    "fork: answered, and nobody told": (
        Edit(_bequeath, "put_ingress(txn, universe, child_id, None, one.answer)", "pass"),
    ),
    "fork: effects told to the parent": (
        Edit(
            _bequeath,
            "inherited.append(\n"
            "                InheritedItem(answer=synthetic_receipts.dropped_by_fork_receipt(intent))\n"
            "            )",
            "put_ingress(txn, universe, intent.world_id, None, synthetic_receipts.dropped_by_fork_receipt(intent))",
        ),
    ),
    "fork: effects reissued for the parent": (Edit(_anew, "world_id=child_id,", ""),),
    "fork: effects reissued under the parent's name": (Edit(_anew, "intent_hash=identity,", ""),),
    "fork: effects lost": (Edit(_bequeath, "intents.dispatch(txn, reissued)", "pass"),),
    "fork: timers lost": (
        Edit(
            _bequeath, "slots.schedule(txn, reissued, timer.key, due_ns, on_calendar=on_calendar)", "pass"
        ),
    ),
    "fork: receipts do not count": (Edit(_got, "self._effects.pop(named, None)", "pass"),),
    "fork: what was cancelled is not told": (
        Edit("world.fork_inheritance:_PendingTracker._cancel", "if cancelled is not None:", "if False:"),
    ),
    "fork: what was cancelled is reissued": (
        Edit("world.fork_inheritance:_PendingTracker._cancel", ".pop(named, None)", ".get(None)"),
    ),
    "fork: what was refused is not told": (
        Edit("world.fork_inheritance:_PendingTracker._is_new", "elif first_digest != intent.idempotency_digest():", "elif False:"),
    ),
    "fork: told what was read before": (Edit(_got, "self._answers.pop(named, None)", "pass"),),
    "fork of a fork: what it was given is forgotten": (
        Edit(
            "world.fork_inheritance:pending_after", "_inherited_items(txn, world.universe, world.world_id)", "()"
        ),
    ),
    "fork of a fork: wishes are not kept": (
        Edit(_bequeath, "inherited.append(InheritedItem(reissued, known_as=tuple(known_as)))", "pass"),
    ),
    "fork: what was reissued cannot be cancelled": (
        Edit(_bequeath, "intents.add_aliases(txn, reissued, known_as)", "pass"),
    ),
}  # fmt: skip
