"""Planted bugs of dispatches and of their replay: each guard removed in turn (see `mutants`).

Runs about dispatches are drawn by themselves (`workload_dispatch`), so these are not in the kill table
of the other seeds: `tests/sim/test_dispatch.py` plants them.
"""

from __future__ import annotations

from holdfast.sim.edits import Edit, Mutant

_log = "authority.dispatch_log"
_replay = "authority.replay"
_typing = "adapters.agent:_Typing"
_role = "roles.dispatcher:Dispatcher"

_PLANTED: dict[str, tuple[Edit, ...]] = {
    # the pane
    "typing: not looked for before": (
        Edit(f"{_typing}.run", "typed = where is _ABSENT", "typed = True"),
    ),
    "typing: what others left is not cleared": (
        Edit(f"{_typing}.run", "self._clear()", "pass"),
    ),
    "typing: a whole text of another's is wiped": (
        Edit(f"{_typing}._clear", "if _COMPLETE.search(left):", "if False:"),
    ),
    "typing: any text that is seen is taken for submitted": (
        Edit(f"{_typing}._where", "_draft_in(view).endswith(wanted)", "False"),
    ),
    # the log
    "log: any move is made": (
        Edit("authority.dispatch:DispatchRecord.event",
             "not DISPATCH.allows(self.status, transition)", "False"),
        Edit("authority.dispatch:DispatchRecord.event",
             "DISPATCH.next(self.status, transition, request_id=self.request_id)",
             "DISPATCH.table.get((self.status, transition), self.status)"),
        Edit("authority.dispatch:DispatchRecord.after",
             "DISPATCH.next(self.status, event.transition, request_id=self.request_id)",
             "DISPATCH.table.get((self.status, event.transition), self.status)"),
        # Otherwise nobody tries.
        Edit("adapters.dispatching:Dispatching.run",
             "if record.status is DispatchStatus.NOTIFIED and not request.acknowledge:",
             "if not request.acknowledge:"),
    ),
    "log: a counter is not taken back": (
        Edit(f"{_log}:_put", "txn.add(keys.counts[was.status], -1)", "pass"),
    ),
    "log: the index keeps old places": (
        Edit(f"{_log}:_put", "txn.delete(place_of(universe, was.status, was))", "pass"),
    ),
    "log: deferred ones are counted for ever": (
        Edit(f"{_log}:_put", "(was is not None and was.deferred)", "False"),
    ),
    "log: a move is not logged": (
        Edit(f"{_log}:_move", "_log(txn, universe, event)", "pass"),
    ),
    # the replay
    "replay: a rewind meanwhile is not noticed": (
        Edit(f"{_replay}:advance", "if state.cursor == was:", "if True:"),
    ),
    "replay: nothing is remembered": (
        Edit(f"{_replay}:_remember", "for event_id in event_ids:", "for event_id in ():"),
    ),
    "replay: all that is ahead is taken for told": (
        Edit(f"{_role}._replay", "not one.seen and _is_news(one.event)", "False"),
    ),
    "replay: what was told is told again": (
        Edit(f"{_role}._replay", "not one.seen and _is_news(one.event)", "_is_news(one.event)"),
        # The pane remembers, too.
        Edit(f"{_typing}.run", "typed = where is _ABSENT", "typed = True"),
    ),
    "replay: goes on although it was not told": (
        Edit(f"{_role}._replay", "sent.reason is not DispatchOutcomeReason.CONFIRMED", "False"),
    ),
    # readiness
    "ready: events that wait are overlooked": (
        Edit("roles.readiness:gather", "replay.pending(txn, universe)", "0"),
    ),
    "ready: a deferral is overlooked": (
        Edit("roles.readiness:gather", "_deferred(txn, universe)", "None"),
    ),
    "ready: deferred requests are overlooked": (
        Edit("authority.readiness:_universe_blockers", "if facts.backlog.deferred:", "if False:"),
    ),
    "ready: an overdue lease counts": (
        Edit("authority.readiness:_authority_blocker",
             "not held.live(now_ns, generation)", "False"),
    ),
}  # fmt: skip

DISPATCH = {name: Mutant(name, edits) for name, edits in _PLANTED.items()}
