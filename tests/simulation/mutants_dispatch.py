"""Planted bugs of dispatch requests and of their replay: each guard removed in turn (see
`mutants`).

Runs with these mutants have their own settings and actors (`workload_dispatch`).
"""

from __future__ import annotations

from tests.simulation.source_edits import Edit

DISPATCH: dict[str, tuple[Edit, ...]] = {
    # the pane
    "prompter: types the text again although its mark is visible": (
        Edit("adapters.pane_prompter:_PromptAttempt.run", "typed = where is _ABSENT", "typed = True"),
    ),
    "prompter: leaves a foreign draft in the pane": (
        Edit("adapters.pane_prompter:_PromptAttempt.run", "self._clear_draft()", "pass"),
    ),
    "prompter: deletes the complete draft of another request": (
        Edit("adapters.pane_prompter:_PromptAttempt._clear_draft", "if _MARK_AT_END.search(draft):", "if False:"),
    ),
    "prompter: counts a draft as submitted": (
        Edit("adapters.pane_prompter:_PromptAttempt._find_mark", "_draft_of(view).endswith(wanted)", "False"),
    ),
    # the log
    "log: accepts illegal transitions": (
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
    "log: does not decrement the counter of the former status": (
        Edit("dispatch.log:_replace_record", "txn.add(keys.counts[was.status], -1)", "pass"),
    ),
    "log: leaves the index entry of the former status": (
        Edit("dispatch.log:_replace_record", "txn.delete(index_key(universe, was.status, was))", "pass"),
    ),
    "log: never decrements the deferred counter": (
        Edit("dispatch.log:_replace_record", "(was is not None and was.deferred)", "False"),
    ),
    "log: does not append the event of a transition": (
        Edit("dispatch.log:_apply_transition", "_append_event(txn, universe, event)", "pass"),
    ),
    # the replay
    "replay: moves the cursor after a concurrent rewind": (
        Edit("dispatch.notifications:advance", "if state.cursor == was:", "if True:"),
    ),
    "replay: does not record handled events": (
        Edit("dispatch.notifications:_record_handled", "for event_id in event_ids:", "for event_id in ():"),
    ),
    "replay: skips every event ahead of the cursor": (
        Edit("workers.dispatch.dispatcher:Dispatcher._notify_leader", "not replayed.handled and _is_for_leader(replayed.event)", "False"),
    ),
    "replay: sends notices of handled events again": (
        Edit("workers.dispatch.dispatcher:Dispatcher._notify_leader", "not replayed.handled and _is_for_leader(replayed.event)", "_is_for_leader(replayed.event)"),
        # The pane remembers the text as well.
        Edit("adapters.pane_prompter:_PromptAttempt.run", "typed = where is _ABSENT", "typed = True"),
    ),
    "replay: continues without confirmation of the notice": (
        Edit("workers.dispatch.dispatcher:Dispatcher._notify_leader", "sent.reason is not DispatchOutcomeReason.CONFIRMED", "False"),
    ),
    # readiness
    "readiness: ignores pending notices": (
        Edit("workers.readiness_facts:gather_facts", "notifications.count_pending(txn, universe)", "0"),
    ),
    "readiness: ignores a deferred notice": (
        Edit("workers.readiness_facts:gather_facts", "_deferred(txn, universe)", "None"),
    ),
    "readiness: ignores deferred requests": (
        Edit("workers.readiness:_universe_blockers", "if facts.backlog.deferred:", "if False:"),
    ),
    "readiness: counts an expired leader lease as live": (
        Edit("workers.readiness:_leader_blocker",
             "not lease.live(now_ns, generation)", "False"),
    ),
}  # fmt: skip
