"""Planted bugs in timers that are delivered by a fused commit, in the commit of their world.

Three checks decide whether such a timer still fires: its slot, its queue item, and the inbox length
that the world read. A timer that the fused commit does not deliver fires through the timer worker.
These checks cover for each other, so most bugs remove several of them.
"""

from __future__ import annotations

from tests.simulation.source_edits import Edit

_check = "world.cycle:_check"
_apply_cycle = "world.cycle:_apply_cycle"
_is_due = "world.timers:is_due"
_complete = "world.timers:complete"
_collect_hosted = "workers.timers.worker:TimerWorker._collect_hosted"

_COMPLETE_ITEM = "delayed.complete(txn, timer.queue, timer.seq, _now_ns(txn, universe, timer))"
# Completes a timer although its item is gone.
_COMPLETE_IF_PRESENT = Edit(
    _complete, _COMPLETE_ITEM, "if delayed.is_due(txn, timer.queue, timer.seq, _now_ns(txn, universe, timer)):\n        delayed.complete(txn, timer.queue, timer.seq, _now_ns(txn, universe, timer))"
)  # fmt: skip
_SKIP_DUE_CHECK = Edit(
    _check,
    "not timers.is_due(\n                    txn, cycle.universe, cycle.world_id, one.intent_hash, one.alarm\n                )",
    "False",
)

FUSED_COMMIT: dict[str, tuple[Edit, ...]] = {
    "fused commit: delivers a timer without completing it": (
        Edit(_apply_cycle, "timers.complete(txn, universe, world_id, one.alarm)", "pass"),
    ),
    "fused commit: delivers a timer without clearing its slot": (
        Edit(_complete, "txn.delete(_key(universe, world_id, timer.slot))", "pass"),
    ),
    "fused commit: delivers a timer without removing its queue item": (
        Edit(_complete, _COMPLETE_ITEM, "pass"),
    ),
    "fused commit: completes the timers of a conflicting cycle": (
        Edit(
            "world.cycle:commit",
            "errors[index] = error\n",
            "errors[index] = error\n            if error.fields.get('why') == 'other items arrived first':\n                for one in cycle.carried:\n                    if one.alarm is not None:\n                        timers.complete(txn, cycle.universe, cycle.world_id, one.alarm)\n",
        ),
        _COMPLETE_IF_PRESENT,
    ),
    "fused commit: delivers a timer again after an unknown outcome": (
        Edit(
            "workers.world.fused_commit:FusedCommitter._on_answered",
            "batch.answered.set()",
            "batch.answered.set()\n            if any(isinstance(error, CommitUnknown) for error in errors):\n                self._timer_batches.append(TimerBatch([\n                    hosted_timer_of_world._replace(due_timer=DueTimerRef(hosted_timer_of_world.due_timer.queue, hosted_timer_of_world.due_timer.seq, hosted_timer_of_world.due_timer.slot, 1 << 62)) for hosted_timer_of_world in batch.timers]))",
        ),
        # Submits the timers at once although the world must be restored first, and skips their
        # checks.
        Edit(
            "workers.world.worker:WorldWorker._read_inboxes",
            "if hosted.host.loaded and not hosted.isolated_left",
            "if not hosted.isolated_left",
        ),
        Edit(
            _is_due,
            "if timer_slot is None or",
            "if timer.wall_ns == 1 << 62:\n        return True\n    if timer_slot is None or",
        ),
        _COMPLETE_IF_PRESENT,
    ),
    "fused commit: delivers a timer without checking that it is still due": (
        _SKIP_DUE_CHECK,
        _COMPLETE_IF_PRESENT,
    ),
    "fused commit: delivers a timer under a lost lease": (
        Edit(
            _check,
            "txn.require_live(cycle.lease)",
            "any(one.alarm for one in cycle.carried) or txn.require_live(cycle.lease)",
        ),
    ),
    "fused commit: delivers a cancelled timer": (
        # Remembers cancelled timers, so that fired timers can be distinguished from them.
        Edit(
            "world.timers:clear_slot",
            "txn.delete(key)",
            "txn.delete(key)\n        clear_slot.__dict__.setdefault('gone', set()).add(timer_slot.intent_hash)",
        ),
        Edit(
            _is_due,
            "if timer_slot is None or (",
            "if timer_slot is None and intent_hash in clear_slot.__dict__.get('gone', ()):\n        return True\n    if timer_slot is None or (",
        ),
        _COMPLETE_IF_PRESENT,
    ),
    "fused commit: delivers a replaced timer": (
        Edit(
            _is_due,
            "(timer_slot.intent_hash, timer_slot.seq) != (intent_hash, timer.seq):\n        return False",
            "False:\n        return False\n    if timer_slot.intent_hash != intent_hash:\n        return True",
        ),
        _COMPLETE_IF_PRESENT,
    ),
    "fused commit: delivers a timer one second early": (
        Edit(
            "workers.timers.worker:TimerWorker._read_due",
            "self.store.now_ns())",
            "self.store.now_ns() + 1_000_000_000)",
        ),
        Edit("world.timers:_now_ns", "txn.now_ns", "txn.now_ns + 1_000_000_000"),
    ),
    "fused commit: delivers the event of the world's first timer for every timer": (
        Edit(
            "workers.world.fused_commit:FusedCommitter._timer_cycles",
            "timer_ingress(hosted_timer_of_world.intent, hosted_timer_of_world.timer)",
            "timer_ingress(timers[0].intent, timers[0].timer)",
        ),
    ),
    "fused commit: delivers a recurring timer as a one-shot timer": (
        Edit(
            _collect_hosted,
            "timer.cron or world_id in skipped_worlds",
            "world_id in skipped_worlds",
        ),
    ),
    "fused commit: starves the timers that it cannot deliver": (
        Edit(
            _collect_hosted,
            "self._has_leftover = bool(skipped_worlds)",
            "self._has_leftover = False",
        ),
        Edit(_collect_hosted, "TimerBatch(timers) if timers else None", "TimerBatch(timers)"),
    ),
}
