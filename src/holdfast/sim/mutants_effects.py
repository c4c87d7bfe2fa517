"""Planted bugs in what worlds want of others: effects, their receipts, timers, mail, and forks of those."""

from __future__ import annotations

from holdfast.sim.edits import Edit

_dispatch = "world.publish:_dispatch"
_used = "world.publish:_used"
_end = "world.publish:end"
_cancel = "world.publish:_cancel"
_send = "world.publish:_send"
_withdraw = "durable.queue:withdraw"
_receive = "roles.receipts:receive"
_bereave = "roles.receipts:bereave"
_redrive = "roles.receipts:redrive_effects"
_doing = "roles.doing:Doing._end"
_perform = "app.declare:Effect.perform"
_fire_due = "roles.firing:fire_due"
_fire = "roles.firing:fire"
_repeat = "roles.firing:_repeat"
_end_due = "durable.due:_done"
_empty = "world.timers:empty"
_set_timer = "world.timers:set_timer"
_take = "world.timers:take"
_bequeath = "world.inherit:bequeath"
_anew = "world.inherit:_anew"
_got = "world.inherit:_Wishes.got"
_accept = "world.fabric:_accept"

_KEPT_BY_WORKERS = Edit(_withdraw, "item.expires_ns and not claimed", "item.expires_ns")
_ANY_RECEIPT = Edit(
    _receive, "publish.end(txn, intent.universe_id, intent.intent_hash) is not None", "True"
)
_SLOT_KEPT = Edit(_empty, "queue.withdraw.fn(txn, held.queue(universe), held.seq)", "pass")

EFFECTS: dict[str, tuple[Edit, ...]] = {
    # what is dispatched
    "publish: key not looked up": (
        Edit(_used, "if first is None:", "if True:"),
    ),
    "publish: key not remembered": (
        Edit(_used, 'dedupe.remember(txn, kept, name, content, b"")', "pass"),
    ),
    "publish: refusal not told": (
        Edit(
            _used,
            "deliver_to(txn, intent.universe_id, intent.world_id, None, answers.refused(intent))",
            "pass",
        ),
    ),
    "publish: refusal under the name of what the key stands for": (
        Edit("world.answers:refused", "intent.place_hash()", "intent.intent_hash"),
    ),
    "publish: nobody knows that it waits": (Edit(_dispatch, "txn.put(", "("),),
    "publish: no will": (Edit(_dispatch, "one.world_id, WILL", "one.world_id, ''"),),
    "publish: into the queue of another kind": (
        Edit("world.publish:effects", 'f"{universe}/effects/{kind}"', 'f"{universe}/effects/fx.quote"'),
    ),
    # its one receipt
    "receipt: pending for ever": (Edit(_end, "txn.delete(key)", "pass"),),
    "receipt: one more after death": (
        Edit(_end, "txn.put(key, codec.pack(replace(found, dead=True)))", "pass"),
    ),
    "receipt: for what has had one, by a worker that was told to stop": (
        _KEPT_BY_WORKERS,
        _ANY_RECEIPT,
    ),
    "receipt: not delivered": (Edit(_receive, "_deliver(txn, intent, receipt)", "pass"),),
    "receipt: of another": (Edit(_doing, "work.join(receive, intent, receipt)", "pass"),),
    "receipt: apart from the ack": (
        Edit(
            _doing,
            "work.join(receive, intent, receipt)",
            "self._store.transact(receive, intent, receipt)",
        ),
    ),
    "receipt: into a deleted world": (
        Edit("roles.receipts:_deliver", "_reachable(txn, intent)", "True"),
        Edit("roles.admission:admit", "gone[one.group]", "False"),
    ),
    "will: not executed": (
        Edit("durable.dead:inter", "if letter.will:", "if False:"),
    ),
    "will: nobody told": (Edit(_bereave, "_deliver(txn, intent, told)", "pass"),),
    "will: a time-out is an error": (
        Edit(_bereave, 'letter.code in ("timeout", "expiries_exhausted")', "False"),
    ),
    # calls
    "call: another key at each attempt": (
        Edit(_perform, "intent.intent_hash.hex()}", "intent.intent_hash.hex()}-{attempt}"),
    ),
    "call: one key for all": (Edit(_perform, "intent.intent_hash.hex()", "'key'"),),
    "call: of a deleted world": (Edit("roles.admission:admit", "gone[one.group]", "False"),),
    "rate: blocks overlap": (
        Edit("effects.rate:grant", ", txn.count(key))", ", 0)"),
    ),
    "rate: slots too short": (
        Edit("effects.rate:grant", "-int(-(S + LATE_NS) // rate_per_s)", "int(S // rate_per_s) - 1"),
    ),
    # taking back
    "cancel: another world's": (Edit(_cancel, "waits.world_id != world_id", "False"),),
    "cancel: nobody told": (
        Edit(_cancel, "deliver_to(txn, universe, world_id, None, told)", "pass"),
    ),
    "cancel: done all the same": (
        Edit(_cancel, "queue.withdraw.fn(txn, found.queue(universe), found.seq, True)", "pass"),
    ),
    "cancel: not from a worker": (_KEPT_BY_WORKERS,),
    "cancel: twice": (
        Edit(_cancel, "found = end(txn, universe, wanted)", "found = waits"),
    ),
    "withdraw: claim rows stay": (
        Edit(_withdraw, "items.drop_claim(txn, keys, item, packed_seq)", "pass"),
    ),
    # once more
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
        Edit(_take, "held is None or held.intent_hash != intent.intent_hash", "held is None"),
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
        Edit(_fire_due, "wall_ns))", "wall_ns + 3_600_000_000_000))"),
        Edit(_fire, "wall_ns < timer.wall_ns", "False"),
    ),
    "timer: the calendar is not looked at": (
        Edit(_fire_due, "wall_ns))", "0))"),
    ),
    "timer: done, and nobody told": (
        Edit(
            "roles.firing:_delivered",
            "deliver_to(txn, intent.universe_id, intent.world_id, key, ingress)",
            "pass",
        ),
    ),
    "timer: told, and not done": (
        Edit(_end_due, "txn.delete(keys.items + packed_seq)", "pass"),
    ),
    "timer: lost to a full inbox": (
        Edit(_fire, "_wait(txn, intent, timer, wall_ns, held.turn_ns)", "pass"),
    ),
    "timer: fired apart from its slot": (Edit(_take, "txn.delete(key)", "pass"),),
    "every: once": (
        Edit(_repeat, "timers.hang(txn, intent, timer.key, now.next_ns, on_calendar=True)", "pass"),
    ),
    "every: one name for all": (Edit("world.every:due", "intent_hash=name", "intent_hash=intent.intent_hash"),),
    "every: what was missed is told": (
        Edit("world.every:due", 'not (missed and timer.missed == "skip")', "True"),
    ),
    "every: the next is skipped": (
        Edit("world.every:due", "after_ns = wall_ns if", "after_ns = wall_ns + LATE_NS if"),
    ),
    # mail
    "mail: lost to a full inbox": (
        Edit(_send, "_dispatch(txn, [intent])\n    else:", "pass\n    else:"),
    ),
    "mail: lost to an inbox that stays full": (
        Edit(
            "world.outbox:deliver",
            "publish.moved(txn, intent, publish.enqueue(txn, intent, txn.now_ns + RETRY_FULL_NS))",
            "pass",
        ),
    ),
    "mail: nobody told": (
        Edit(_send, "tell(txn, intent, fabric.receipt_of(intent, mail, found))", "pass"),
    ),
    "mail: no hint": (Edit(_accept, "catalog.hint(txn, universe, world_id)", "pass"),),
    "mail abroad: sent again, taken for new": (
        Edit(_accept, "subject, key, body, issued_ns, meaning", "subject, None, body, None, meaning"),
    ),
    "mail abroad: delivered, and nobody told": (
        Edit(
            "roles.fabric:Lane.__call__",
            "work.join(outbox.conclude, codec.unpack_as(Intent, work.payload), found)",
            "pass",
        ),
    ),
    "mail abroad: lost on the way to its lane": (
        Edit("roles.sorting:Sorting.__call__", "work.join(outbox.forward, intent, to)", "pass"),
    ),
    "mail abroad: told, and still pending": (
        Edit("world.outbox:_end", "publish.end(txn, universe, intent.intent_hash) is None", "False"),
    ),
    # forks
    "fork: answered, and nobody told": (
        Edit(_bequeath, "deliver_to(txn, universe, child_id, None, one.answer)", "pass"),
    ),
    "fork: effects told to the parent": (
        Edit(
            _bequeath,
            "given.append(Heirloom(answer=answers.dropped(intent)))",
            "deliver_to(txn, universe, intent.world_id, None, answers.dropped(intent))",
        ),
    ),
    "fork: effects reissued for the parent": (Edit(_anew, "world_id=child_id,", ""),),
    "fork: effects reissued under the parent's name": (Edit(_anew, "intent_hash=identity,", ""),),
    "fork: effects lost": (Edit(_bequeath, "publish.dispatch(txn, again)", "pass"),),
    "fork: timers lost": (
        Edit(
            _bequeath, "slots.hang(txn, again, timer.key, due_ns, on_calendar=on_calendar)", "pass"
        ),
    ),
    "fork: receipts do not count": (Edit(_got, "self._effects.pop(named, None)", "pass"),),
    "fork: what was cancelled is not told": (
        Edit("world.inherit:_Wishes._cancel", "if gone is not None:", "if False:"),
    ),
    "fork: what was cancelled is reissued": (
        Edit("world.inherit:_Wishes._cancel", ".pop(named, None)", ".get(None)"),
    ),
    "fork: what was refused is not told": (
        Edit("world.inherit:_Wishes._is_new", "elif first != intent.wanted():", "elif False:"),
    ),
    "fork: told what was read before": (Edit(_got, "self._answers.pop(named, None)", "pass"),),
    "fork of a fork: what it was given is forgotten": (
        Edit(
            "world.inherit:open_after", "_heirlooms(txn, world.universe, world.world_id)", "()"
        ),
    ),
    "fork of a fork: wishes are not kept": (
        Edit(_bequeath, "given.append(Heirloom(again, known_as=tuple(known_as)))", "pass"),
    ),
    "fork: what was reissued cannot be cancelled": (
        Edit(_bequeath, "publish.know(txn, again, known_as)", "pass"),
    ),
}  # fmt: skip
