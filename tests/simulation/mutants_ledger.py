"""Planted bugs in the ledger: the run scheduler, the fold, the log, and the core of its service."""

from __future__ import annotations

from tests.simulation.source_edits import Edit

_claim = "ledger.run_scheduler:RunScheduler.claim"
_report = "ledger.run_scheduler:RunScheduler.report"
_restore = "ledger.run_state:RunState.restore"
_move = "ledger.seq_ledger:SeqLedger.move"
_move_one = "ledger.seq_ledger:SeqLedger.move_one"
_write = "ledger.log:RunLog._write"
_retryable_rows = "ledger.outcome_rules:_retryable_rows"
_decide_reclaim = "ledger.outcome_rules:decide_reclaim"
_group_log = "ledger.service.group_log:GroupLog"
_service = "ledger.service.handlers:RunService"
_LEASE = Edit(_write, "txn.require_live(self.lease)", "pass")
_HEAD = Edit(
    _write, "expected_head=height", "expected_head=journal.head(txn, self._subject).height"
)

LEDGER: dict[str, tuple[Edit, ...]] = {
    # granting rows
    "claim: does not log the begun rows": (
        Edit(
            _claim,
            "RowsGranted(now_ns, epoch, owner, ranges, begun, isolated)",
            "RowsGranted(now_ns, epoch, owner, ranges, [], isolated)",
        ),
    ),
    "claim: does not log the due retries": (
        Edit(
            _claim,
            "entries.append(self._apply_new(RetriesDue(now_ns)))",
            "self._apply_new(RetriesDue(now_ns))",
        ),
    ),
    "claim: leaves granted rows in the free pool": (
        Edit("ledger.run_state:RunState._apply_granted", "self.free.remove(lo, hi)", "pass"),
    ),
    "claim: grants the same epoch twice": (
        Edit(_claim, "epoch = self.epoch + 1", "epoch = max(self.epoch, 1)"),
    ),
    "claim: numbers every attempt as the first": (
        Edit("ledger.assignment:_take_rows", "RowRange(a, b, tries + 1)", "RowRange(a, b, 1)"),
    ),
    "claim: ignores the maximum distance to the commit": (
        Edit("ledger.assignment:_first_unseen", "unseen[0] - run.next_commit > ahead", "False"),
    ),
    "suspects: returns them to the free pool": (
        Edit(
            "ledger.run_state:RunState._apply_reclaimed",
            "self.suspects.add(lo, hi)",
            "self.free.add(lo, hi)",
        ),
    ),
    "suspects: grants them last even at the commit head": (
        Edit("ledger.assignment:next_rows", "if run.suspects.rows:", "if False:"),
    ),
    "suspects: grants a whole batch at once": (
        Edit(
            "ledger.assignment:_next_suspect",
            "isqrt(run.policy.atomic_rows)",
            "run.policy.atomic_rows",
        ),
    ),
    # reports
    "report: does not log the begun rows": (
        Edit(
            _report,
            "            begun=begun,",
            "            begun=[],",
        ),
    ),
    "report: applies a repeated report again": (
        Edit(_report, "if reply.report_no == report_no:", "if False:"),
        Edit(_report, "if report_no != grant.last_report_no + 1:", "if False:"),
    ),
    "report: accepts other content under a known number": (
        Edit(_report, "if reply.digest != digest:", "if False:"),
    ),
    "report: accepts a report of a reclaimed grant without applying it": (
        Edit(
            _report,
            "if known_grant is None:\n            raise self._fenced_error(epoch)",
            "if known_grant is None:\n            return ReportAccepted(0, True, '', []), []",
        ),
    ),
    "report: does not extend the lease": (
        Edit(
            _report,
            "self._expires_ns[epoch] = max(self._expires_ns[epoch], now_ns + self.policy.lease_ns)",
            "pass",
        ),
    ),
    "report: halts on rows that a cancellation ended": (
        Edit(
            _report,
            "outcome_rules.check_report(self, grant, done, begun)",
            "outcome_rules.check_report(self, grant, done, begin)",
        ),
    ),
    # budgets
    "retry: does not count the attempt": (
        Edit(_move, "attempts += 1", "pass"),
        Edit(_move_one, "self._attempts[seq] += 1", "pass"),
    ),
    "retry: ignores the budget of a row": (
        Edit("ledger.run_policy:decide_retry", " or attempts + 1 >= policy.attempts_max", ""),
    ),
    "retry: fails a row one attempt early": (
        Edit("ledger.run_policy:decide_retry", "attempts + 1 >= policy", "attempts + 2 >= policy"),
    ),
    "retry: ignores the budget of the run": (
        Edit("ledger.run_policy:decide_retry", "policy.retries_max and", "False and"),
        Edit(_retryable_rows, "min(rows, bound - used) if bound else rows", "rows"),
    ),
    "retry: does not count retries against the budget of the run": (
        Edit(
            "ledger.run_state:RunState._apply_reported",
            "self.retries += retry.hi - retry.lo",
            "pass",
        ),
    ),
    "retry: retries permanent errors": (
        Edit("ledger.run_policy:decide_retry", "error_class not in RETRYABLE or ", ""),
    ),
    "retry: retries reported failures during a cancellation": (
        Edit(_retryable_rows, "if run.cancelling:", "if False:"),
    ),
    "retry: ignores the backoff": (
        Edit(
            "ledger.run_state:RunState._apply_reported",
            "retry.not_before_ns > entry.decided_ns",
            "False",
        ),
    ),
    "retry: is due before its time": (
        Edit(_claim, "self.backoff_heap[0][0] <= now_ns", "True"),
        Edit(
            "ledger.run_state:RunState.apply", "self.backoff_heap[0][0] > entry.decided_ns", "False"
        ),
    ),
    # reclaiming grants
    "reclaim: leaves the grant open": (
        Edit("ledger.run_state:RunState._apply_reclaimed", "self._remove_grant(grant)", "pass"),
    ),
    "reclaim: loses the rows that were not begun": (
        Edit("ledger.run_state:RunState._apply_reclaimed", "self.free.add(lo, hi)", "pass"),
    ),
    "reclaim: spends the retry budget on the highest rows": (
        Edit(
            _decide_reclaim,
            "suspects.add(lo, retry_end)",
            "suspects.add(hi - (retry_end - lo), hi)",
        ),
        Edit(_decide_reclaim, "failed.add(retry_end, hi)", "failed.add(lo, hi - (retry_end - lo))"),
    ),
    "reclaim: retries lost rows during a cancellation": (
        Edit(_decide_reclaim, "if run.cancelling:", "if False:"),
    ),
    "expiry: ignores the extension by a heartbeat": (
        Edit("ledger.run_scheduler:RunScheduler.expire", "until_ns <= now_ns:\n", "True:\n"),
    ),
    "expiry: does not store the heartbeat": (
        Edit(
            "ledger.run_scheduler:RunScheduler.heartbeat",
            "self._expires_ns[epoch] = max(self._expires_ns[epoch], now_ns + self.policy.lease_ns)\n        return self._expires_ns[epoch]",
            "return now_ns + self.policy.lease_ns",
        ),
    ),
    "expiry: does not renew the grants of an opened run": (
        Edit(
            "ledger.run_scheduler:RunScheduler.renew_all_grants",
            "for epoch in self.grants:",
            "for epoch in ():",
        ),
    ),
    "expiry: never reclaims an expired grant": (
        Edit("ledger.run_scheduler:RunScheduler.expire", "due.append(epoch)", "pass"),
    ),
    "reclaim: keeps the grants of a former driver": (
        Edit("ledger.run_scheduler:RunScheduler.reclaim_all", "self.grants, ", "(), "),
    ),
    "cancel: leaves cancelled rows in their grants": (
        Edit("ledger.run_state:RunState._apply_cancel_started", "grant.idle = RowRanges()", "pass"),
    ),
    "cancel: skips the grace period": (
        Edit(
            "ledger.run_scheduler:RunScheduler.end_cancel_grace",
            "now_ns < self.grace_ends_ns",
            "False",
        ),
    ),
    "cancel: leaves begun rows uncancelled after the grace period": (
        Edit(
            "ledger.run_state:RunState.apply",
            "self._move(lo, hi, RowEvent.CANCEL, grant, reason=ErrorClass.CANCELLATION)",
            "pass",
        ),
    ),
    # committing
    "commit: includes one row beyond the final prefix": (
        Edit(
            "ledger.seq_ledger:SeqLedger.final_prefix", "return at", "return min(at + 1, self.size)"
        ),
    ),
    "commit: accepts rows beyond the final prefix": (
        Edit("ledger.run_scheduler:RunScheduler.commit", "if upto > head:", "if False:"),
        Edit("ledger.seq_ledger:SeqLedger._check_priors", "if not allowed.all():", "if False:"),
        Edit(_move_one, "after = _NEXT[event][prior]", "after = int(TARGET_STATE[event])"),
    ),
    "commit: applies a committed prefix again": (
        Edit(
            "ledger.run_scheduler:RunScheduler.commit", "if upto <= self.next_commit:", "if False:"
        ),
    ),
    # counters
    "counters: does not count the new state of a row": (
        Edit(_move_one, "self._counts[after] += 1", "pass"),
    ),
    "counters: does not count ended rows": (
        Edit(_move_one, "self.ended[_ENDED_INDEX[event]] += 1", "pass"),
    ),
    # the log and its checkpoints
    "log: skips the lease check": (_LEASE,),
    "log: skips the lease and the head check": (_LEASE, _HEAD),
    "log: does not write the outcomes": (Edit(_write, "txn.put(key, value)", "pass"),),
    "log: saves a checkpoint under a lower height": (
        Edit(
            _write,
            "_save_checkpoint(txn, self._subject, height, checkpoint)",
            "_save_checkpoint(txn, self._subject, height - 1, checkpoint)",
        ),
    ),
    "log: releases the entries below the newest checkpoint": (
        Edit(
            "ledger.log:_save_checkpoint",
            "journal.checkpoint(txn, subject, previous.height)",
            "journal.checkpoint(txn, subject, height)",
        ),
    ),
    "log: omits the last entry of a replay": (
        Edit(
            "ledger.log:_load",
            "_rebuild(txn, subject, start, head)",
            "_rebuild(txn, subject, start, max(head - 1, start or 1))",
        ),
    ),
    "log: loses the replies of finished grants in a checkpoint": (
        Edit(_restore, "self._keep_finished(finished)", "pass"),
    ),
    "log: loses the replies of open grants in a checkpoint": (
        Edit(
            "ledger.run_state:RunState._restore_grant",
            "grant.replies.extend(snapshot.replies)",
            "pass",
        ),
    ),
    "log: loses the suspects in a checkpoint": (
        Edit(_restore, "self.suspects.add(lo, hi)", "pass"),
    ),
    "log: loses the number of retries in a checkpoint": (
        Edit(_restore, "self.retries = checkpoint.retries", "pass"),
    ),
    "log: loses the grants in a checkpoint": (
        Edit(_restore, "self._restore_grant(grant)", "pass"),
    ),
    # the service: the group log
    "group log: settles a ticket before the commit": (
        Edit(
            f"{_group_log}.enqueue",
            "self._queue.append(QueuedDecision(entries, puts, ticket))",
            "self._queue.append(QueuedDecision(entries, puts, None))\n        ticket is not None and ticket.settle(None)",
        ),
    ),
    "group log: writes a checkpoint while decisions are queued": (
        Edit("ledger.service.group_log:GroupLog._checkpoint_if_due", " or self._queue", ""),
    ),
    "group log: accepts decisions after a failed commit": (
        Edit(
            "ledger.service.group_log:GroupLog.settle_commit",
            "self.error = error",
            "self._append.__self__._is_broken = False",
        ),
    ),
    # the service: reports and claims
    "service: does not log the decisions before a refusal": (
        Edit(
            "ledger.service.handlers:RunService.decide",
            "failure = error",
            "failure = error; entries.clear()",
        ),
    ),
    "service: does not log the halt of an illegal transition": (
        Edit("ledger.service.handlers:RunService.decide", "entries.append(halted)", "pass"),
    ),
    "service: does not log the halt of an illegal commit": (
        Edit(
            "ledger.service.handlers:RunService.mark_committed",
            "self._log([self.scheduler.halted], now_ns=now_ns)",
            "pass",
        ),
    ),
    "service: stores the outcomes of every report under one height": (
        Edit(
            f"{_service}._take_reports",
            "height = self.log.height + len(entries) + 1",
            "height = 1",
        ),
    ),
    "service: stores the results of a fenced report": (
        Edit(
            f"{_service}._take_reports",
            'replies.append(GrantReportReply(True, 0, ""))',
            "puts += runs.chunk_rows(self.run_id, 0, height, runs.OutcomeChunk(0, b'', bytes(batch), [], [], 0.0, 0, []))\n                replies.append(GrantReportReply(True, 0, ''))",
        ),
    ),
    "service: stores a retried failure as an outcome": (
        Edit(
            "ledger.service.outcome_chunks:build_chunk",
            "not retried.contains(row.seq, row.seq + 1)",
            "True",
        ),
    ),
    "service: stores no outcome of rows that a reclaim failed": (
        Edit(
            "ledger.service.outcome_chunks:reclaimed_chunk_rows",
            "puts += runs.chunk_rows(run_id, page, height, chunk)",
            "pass",
        ),
    ),
    "service: sends a grant again that the child knows": (
        Edit(
            "ledger.service.child_handover:unacknowledged_grant",
            " or grant.epoch in known_epochs",
            "",
        ),
    ),
    "service: answers a waiting claim before the commit": (
        Edit(
            "ledger.service.handlers:RunService._answer_waiting",
            "self.log.enqueue(entries, (), waiting.ticket)",
            "self.log.enqueue(entries); waiting.ticket.settle(None)",
        ),
    ),
}
