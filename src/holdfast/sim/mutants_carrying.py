"""Planted bugs in timers that worlds hear in the commits in which they go on.

Whether such a timer still rings is judged by its slot, by its item, and by the length of the inbox that its
world believed in; whatever was not told fires the ordinary way. Each of these covers for others, so most
bugs take several away.
"""

from __future__ import annotations

from holdfast.sim.edits import Edit

_check = "world.cycle:_check"
_advance = "world.cycle:_advance"
_rings = "world.timers:rings"
_end = "world.timers:end"
_round = "roles.timer_worker:TimerWorker._round"

_END = "due.end(txn, alarm.queue, alarm.seq, _now_ns(txn, universe, alarm))"
# What is not there any more is ended all the same.
_ENDED_ANYHOW = Edit(
    _end, _END, "if due.is_due(txn, alarm.queue, alarm.seq, _now_ns(txn, universe, alarm)):"
    f"\n        {_END}"
)  # fmt: skip
_UNJUDGED = Edit(
    _check,
    "not timers.rings(\n"
    "                    txn, cycle.universe, cycle.world_id, one.intent_hash, one.alarm\n"
    "                )",
    "False",
)

CARRYING: dict[str, tuple[Edit, ...]] = {
    "carried timer: told, and not taken off": (
        Edit(_advance, "timers.end(txn, universe, world_id, one.alarm)", "pass"),
    ),
    "carried timer: told, and its slot not freed": (
        Edit(_end, "txn.delete(_key(universe, world_id, alarm.slot))", "pass"),
    ),
    "carried timer: told, and still waiting": (Edit(_end, _END, "pass"),),
    "carried timer: taken off by a cycle that was refused": (
        Edit(
            "world.cycle:commit",
            "told[index] = error\n",
            "told[index] = error\n"
            "            if error.fields.get('why') == 'others came first':\n"
            "                for one in cycle.carried:\n"
            "                    if one.alarm is not None:\n"
            "                        timers.end(txn, cycle.universe, cycle.world_id, one.alarm)\n",
        ),
        _ENDED_ANYHOW,
    ),
    "carried timer: told again after a lost answer": (
        Edit(
            "roles.carrying:Carriage._brought",
            "round.answered.set()",
            "round.answered.set()\n"
            "            if any(isinstance(error, CommitUnknown) for error in told):\n"
            "                self._rounds.append(Round([\n"
            "                    one._replace(alarm=Alarm(one.alarm.queue, one.alarm.seq, one.alarm.slot,"
            " 1 << 62)) for one in round.rings]))",
        ),
        # At once, although its world must be restored first; and these, and no others, are not judged.
        Edit(
            "roles.world_worker:WorldWorker._drain",
            "if hosted.host.loaded and not hosted.suspect",
            "if not hosted.suspect",
        ),
        Edit(
            _rings,
            "if held is None or",
            "if alarm.wall_ns == 1 << 62:\n        return True\n    if held is None or",
        ),
        _ENDED_ANYHOW,
    ),
    "carried timer: told although it was fired meanwhile": (_UNJUDGED, _ENDED_ANYHOW),
    "carried timer: told under a lost lease": (
        Edit(
            _check,
            "txn.require_live(cycle.lease)",
            "any(one.alarm for one in cycle.carried) or txn.require_live(cycle.lease)",
        ),
    ),
    "carried timer: told although it was cancelled": (
        # What was cancelled is remembered, so that what was fired is told from it.
        Edit(
            "world.timers:empty",
            "txn.delete(key)",
            "txn.delete(key)\n        take.__dict__.setdefault('gone', set()).add(held.intent_hash)",
        ),
        Edit(
            _rings,
            "if held is None or (",
            "if held is None and intent_hash in take.__dict__.get('gone', ()):\n"
            "        return True\n"
            "    if held is None or (",
        ),
        _ENDED_ANYHOW,
    ),
    "carried timer: told although it was replaced": (
        Edit(
            _rings,
            "(held.intent_hash, held.seq) != (intent_hash, alarm.seq):\n        return False",
            "False:\n        return False\n    if held.intent_hash != intent_hash:\n        return True",
        ),
        _ENDED_ANYHOW,
    ),
    "carried timer: a second early": (
        Edit(
            "roles.timer_worker:TimerWorker._peek",
            "self.store.now_ns())",
            "self.store.now_ns() + 1_000_000_000)",
        ),
        Edit("world.timers:_now_ns", "txn.now_ns", "txn.now_ns + 1_000_000_000"),
    ),
    "carried timer: each told as the first of its world": (
        Edit(
            "roles.carrying:Carriage._ringing",
            "ingress_of(one.intent, one.timer)",
            "ingress_of(rings[0].intent, rings[0].timer)",
        ),
    ),
    "carried timer: one that repeats, told as if it did not": (
        Edit(_round, "timer.cron or world_id in left", "world_id in left"),
    ),
    "carried timer: those of other worlds starve": (
        Edit(_round, "self._left = bool(left)", "self._left = False"),
        Edit(_round, "Round(rings) if rings else None", "Round(rings)"),
    ),
}
