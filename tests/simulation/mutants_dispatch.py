"""Planted bugs of dispatch requests and of their replay: each guard removed in turn (see
`mutants`).

Runs with these mutants have their own settings and actors (`workload_dispatch`).
"""

from __future__ import annotations

from tests.simulation.source_edits import Edit

DISPATCH: dict[str, tuple[Edit, ...]] = {
    # the pane
    "typing: not looked for before": (
        Edit("adapters.pane_prompter:_PromptAttempt.run", "typed = where is _ABSENT", "typed = True"),
    ),
    "typing: what others left is not cleared": (
        Edit("adapters.pane_prompter:_PromptAttempt.run", "self._clear_draft()", "pass"),
    ),
    "typing: a whole text of another's is wiped": (
        Edit("adapters.pane_prompter:_PromptAttempt._clear_draft", "if _MARK_AT_END.search(draft):", "if False:"),
    ),
    "typing: any text that is seen is taken for submitted": (
        Edit("adapters.pane_prompter:_PromptAttempt._find_mark", "_draft_of(view).endswith(wanted)", "False"),
    ),
    # the log
    "log: any move is made": (
        Edit("dispatch.request:DispatchRecord.event",
             "not DISPATCH.allows(self.status, transition)", "False"),
        Edit("dispatch.request:DispatchRecord.event",
             "DISPATCH.next(self.status, transition, request_id=self.request_id)",
             "DISPATCH.table.get((self.status, transition), self.status)"),
        Edit("dispatch.request:DispatchRecord.after",
             "DISPATCH.next(self.status, event.transition, request_id=self.request_id)",
             "DISPATCH.table.get((self.status, event.transition), self.status)"),
        # Without this edit no other process retries.
        Edit("adapters.dispatch_protocol:DispatchProtocol.run",
             "if record.status is DispatchStatus.NOTIFIED and not request.acknowledge:",
             "if not request.acknowledge:"),
    ),
    "log: a counter is not taken back": (
        Edit("dispatch.log:_replace_record", "txn.add(keys.counts[was.status], -1)", "pass"),
    ),
    "log: the index keeps old places": (
        Edit("dispatch.log:_replace_record", "txn.delete(index_key(universe, was.status, was))", "pass"),
    ),
    "log: deferred ones are counted for ever": (
        Edit("dispatch.log:_replace_record", "(was is not None and was.deferred)", "False"),
    ),
    "log: a move is not logged": (
        Edit("dispatch.log:_apply_transition", "_append_event(txn, universe, event)", "pass"),
    ),
    # the replay
    "replay: a rewind meanwhile is not noticed": (
        Edit("dispatch.notifications:advance", "if state.cursor == was:", "if True:"),
    ),
    "replay: nothing is remembered": (
        Edit("dispatch.notifications:_record_handled", "for event_id in event_ids:", "for event_id in ():"),
    ),
    "replay: all that is ahead is taken for told": (
        Edit("workers.dispatch.dispatcher:Dispatcher._notify_leader", "not replayed.handled and _is_for_leader(replayed.event)", "False"),
    ),
    "replay: what was told is told again": (
        Edit("workers.dispatch.dispatcher:Dispatcher._notify_leader", "not replayed.handled and _is_for_leader(replayed.event)", "_is_for_leader(replayed.event)"),
        # The pane remembers the text as well.
        Edit("adapters.pane_prompter:_PromptAttempt.run", "typed = where is _ABSENT", "typed = True"),
    ),
    "replay: goes on although it was not told": (
        Edit("workers.dispatch.dispatcher:Dispatcher._notify_leader", "sent.reason is not DispatchOutcomeReason.CONFIRMED", "False"),
    ),
    # readiness
    "ready: events that wait are overlooked": (
        Edit("workers.readiness_facts:gather_facts", "notifications.count_pending(txn, universe)", "0"),
    ),
    "ready: a deferral is overlooked": (
        Edit("workers.readiness_facts:gather_facts", "_deferred(txn, universe)", "None"),
    ),
    "ready: deferred requests are overlooked": (
        Edit("workers.readiness:_universe_blockers", "if facts.backlog.deferred:", "if False:"),
    ),
    "ready: an overdue lease counts": (
        Edit("workers.readiness:_leader_blocker",
             "not lease.live(now_ns, generation)", "False"),
    ),
}  # fmt: skip
