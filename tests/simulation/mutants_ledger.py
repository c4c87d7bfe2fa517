"""Planted bugs in the ledger: the run scheduler, the fold, the log, and the core of its service."""

from __future__ import annotations

from tests.simulation.source_edits import Edit

_board = "ledger.run_scheduler:RunScheduler"
_claim = "ledger.run_scheduler:RunScheduler.claim"
_advance = "ledger.run_scheduler:RunScheduler.report"
_fold = "ledger.run_state:RunState"
_restore = "ledger.run_state:RunState.restore"
_move = "ledger.seq_ledger:SeqLedger.move"
_one = "ledger.seq_ledger:SeqLedger.move_one"
_write = "ledger.log:RunLog._write"
_allowed = "ledger.outcome_rules:_retryable_rows"
_reclaim = "ledger.outcome_rules:decide_reclaim"
_group = "ledger.service.group_log:GroupLog"
_service = "ledger.service.handlers:RunService"
_LEASE = Edit(_write, "txn.require_live(self.lease)", "pass")
_HEAD = Edit(
    _write, "expected_head=height", "expected_head=journal.head(txn, self._subject).height"
)

LEDGER: dict[str, tuple[Edit, ...]] = {
    # granting rows
    "claim: begin not logged": (
        Edit(
            _claim,
            "RowsGranted(now_ns, epoch, owner, ranges, begun, isolated)",
            "RowsGranted(now_ns, epoch, owner, ranges, [], isolated)",
        ),
    ),
    "claim: ripening not logged": (
        Edit(
            _claim,
            "entries.append(self._apply_new(RetriesDue(now_ns)))",
            "self._apply_new(RetriesDue(now_ns))",
        ),
    ),
    "claim: free rows stay free": (
        Edit("ledger.run_state:RunState._apply_granted", "self.free.remove(lo, hi)", "pass"),
    ),
    "claim: epoch given twice": (
        Edit(_claim, "epoch = self.epoch + 1", "epoch = max(self.epoch, 1)"),
    ),
    "claim: always the first attempt": (
        Edit("ledger.assignment:_take_rows", "RowRange(a, b, tries + 1)", "RowRange(a, b, 1)"),
    ),
    "claim: any distance from the commit": (
        Edit("ledger.assignment:_first_unseen", "unseen[0] - run.next_commit > ahead", "False"),
    ),
    "suspects: not set apart": (
        Edit(
            "ledger.run_state:RunState._apply_reclaimed",
            "self.suspects.add(lo, hi)",
            "self.free.add(lo, hi)",
        ),
    ),
    "suspects: last, even at the head of the commit": (
        Edit("ledger.assignment:next_rows", "if run.suspects.rows:", "if False:"),
    ),
    "suspects: a whole batch at once": (
        Edit(
            "ledger.assignment:_next_suspect",
            "isqrt(run.policy.atomic_rows)",
            "run.policy.atomic_rows",
        ),
    ),
    # reports
    "report: begin not logged": (
        Edit(
            _advance,
            "            begun=begun,",
            "            begun=[],",
        ),
    ),
    "report: sent again, counted twice": (
        Edit(_advance, "if reply.report_no == report_no:", "if False:"),
        Edit(_advance, "if report_no != grant.last_report_no + 1:", "if False:"),
    ),
    "report: another of the same number": (
        Edit(_advance, "if reply.digest != digest:", "if False:"),
    ),
    "report: a zombie is told that it was heard": (
        Edit(
            _advance,
            "if known_grant is None:\n            raise self._fenced_error(epoch)",
            "if known_grant is None:\n            return ReportAccepted(0, True, '', []), []",
        ),
    ),
    "report: does not prolong the lease": (
        Edit(
            _advance,
            "self._expires_ns[epoch] = max(self._expires_ns[epoch], now_ns + self.policy.lease_ns)",
            "pass",
        ),
    ),
    "report: begins what a cancellation ended": (
        Edit(
            _advance,
            "outcome_rules.check_report(self, grant, done, begun)",
            "outcome_rules.check_report(self, grant, done, begin)",
        ),
    ),
    # budgets
    "retry: attempt not counted": (
        Edit(_move, "attempts += 1", "pass"),
        Edit(_one, "self._attempts[seq] += 1", "pass"),
    ),
    "retry: no budget of a row": (
        Edit("ledger.run_policy:decide_retry", " or attempts + 1 >= policy.attempts_max", ""),
    ),
    "retry: one attempt too few": (
        Edit("ledger.run_policy:decide_retry", "attempts + 1 >= policy", "attempts + 2 >= policy"),
    ),
    "retry: no budget of the run": (
        Edit("ledger.run_policy:decide_retry", "policy.retries_max and", "False and"),
        Edit(_allowed, "min(rows, bound - used) if bound else rows", "rows"),
    ),
    "retry: budget of the run not kept": (
        Edit(
            "ledger.run_state:RunState._apply_reported",
            "self.retries += retry.hi - retry.lo",
            "pass",
        ),
    ),
    "retry: of what cannot be retried": (
        Edit("ledger.run_policy:decide_retry", "error_class not in RETRYABLE or ", ""),
    ),
    "retry: while cancelling": (Edit(_allowed, "if run.cancelling:", "if False:"),),
    "retry: at once": (
        Edit(
            "ledger.run_state:RunState._apply_reported",
            "retry.not_before_ns > entry.decided_ns",
            "False",
        ),
    ),
    "retry: ripe before its time": (
        Edit(_claim, "self.backoff_heap[0][0] <= now_ns", "True"),
        Edit(
            "ledger.run_state:RunState.apply", "self.backoff_heap[0][0] > entry.decided_ns", "False"
        ),
    ),
    # reclaiming grants
    "reclaim: grant kept": (
        Edit("ledger.run_state:RunState._apply_reclaimed", "self._remove_grant(grant)", "pass"),
    ),
    "reclaim: rows not begun are lost": (
        Edit("ledger.run_state:RunState._apply_reclaimed", "self.free.add(lo, hi)", "pass"),
    ),
    "reclaim: the budget goes to the highest rows": (
        Edit(_reclaim, "suspects.add(lo, retry_end)", "suspects.add(hi - (retry_end - lo), hi)"),
        Edit(_reclaim, "failed.add(retry_end, hi)", "failed.add(lo, hi - (retry_end - lo))"),
    ),
    "reclaim: retried while cancelling": (Edit(_reclaim, "if run.cancelling:", "if False:"),),
    "expire: heartbeats not heeded": (
        Edit("ledger.run_scheduler:RunScheduler.expire", "until_ns <= now_ns:\n", "True:\n"),
    ),
    "expire: heartbeat not kept": (
        Edit(
            "ledger.run_scheduler:RunScheduler.heartbeat",
            "self._expires_ns[epoch] = max(self._expires_ns[epoch], now_ns + self.policy.lease_ns)\n        return self._expires_ns[epoch]",
            "return now_ns + self.policy.lease_ns",
        ),
    ),
    "expire: grants not renewed on opening": (
        Edit(
            "ledger.run_scheduler:RunScheduler.renew_all_grants",
            "for epoch in self.grants:",
            "for epoch in ():",
        ),
    ),
    "expire: never": (
        Edit("ledger.run_scheduler:RunScheduler.expire", "due.append(epoch)", "pass"),
    ),
    "drop all: forgotten": (
        Edit("ledger.run_scheduler:RunScheduler.reclaim_all", "self.grants, ", "(), "),
    ),
    "cancel: granted rows kept": (
        Edit("ledger.run_state:RunState._apply_cancel_started", "grant.idle = RowRanges()", "pass"),
    ),
    "cancel: no grace": (
        Edit(
            "ledger.run_scheduler:RunScheduler.end_cancel_grace",
            "now_ns < self.grace_ends_ns",
            "False",
        ),
    ),
    "cancel: begun rows outlive the grace": (
        Edit(
            "ledger.run_state:RunState.apply",
            "self._move(lo, hi, RowEvent.CANCEL, grant, reason=ErrorClass.CANCELLATION)",
            "pass",
        ),
    ),
    # committing
    "commit: prefix one too far": (
        Edit(
            "ledger.seq_ledger:SeqLedger.final_prefix", "return at", "return min(at + 1, self.size)"
        ),
    ),
    "commit: beyond the prefix": (
        Edit("ledger.run_scheduler:RunScheduler.commit", "if upto > head:", "if False:"),
        Edit("ledger.seq_ledger:SeqLedger._check_priors", "if not allowed.all():", "if False:"),
        Edit(_one, "after = _NEXT[event][prior]", "after = int(TARGET_STATE[event])"),
    ),
    "commit: known prefix again": (
        Edit(
            "ledger.run_scheduler:RunScheduler.commit", "if upto <= self.next_commit:", "if False:"
        ),
    ),
    # counters
    "counters: state not counted": (Edit(_one, "self._counts[after] += 1", "pass"),),
    "counters: ends not counted": (Edit(_one, "self.ended[_ENDED_INDEX[event]] += 1", "pass"),),
    # the log and its checkpoints
    "log: lease not checked": (_LEASE,),
    "log: neither lease nor head checked": (_LEASE, _HEAD),
    "log: outcomes not written": (Edit(_write, "txn.put(key, value)", "pass"),),
    "log: checkpoint at another height": (
        Edit(
            _write,
            "_save_checkpoint(txn, self._subject, height, checkpoint)",
            "_save_checkpoint(txn, self._subject, height - 1, checkpoint)",
        ),
    ),
    "log: truncated up to the newest checkpoint": (
        Edit(
            "ledger.log:_save_checkpoint",
            "journal.checkpoint(txn, subject, previous.height)",
            "journal.checkpoint(txn, subject, height)",
        ),
    ),
    "log: an entry too few replayed": (
        Edit(
            "ledger.log:_load",
            "_rebuild(txn, subject, start, head)",
            "_rebuild(txn, subject, start, max(head - 1, start or 1))",
        ),
    ),
    "log: old answers of a checkpoint lost": (
        Edit(_restore, "self._keep_finished(finished)", "pass"),
    ),
    "log: answers of a checkpoint lost": (
        Edit(
            "ledger.run_state:RunState._restore_grant",
            "grant.replies.extend(snapshot.replies)",
            "pass",
        ),
    ),
    "log: suspects of a checkpoint lost": (Edit(_restore, "self.suspects.add(lo, hi)", "pass"),),
    "log: retries of a checkpoint lost": (
        Edit(_restore, "self.retries = checkpoint.retries", "pass"),
    ),
    "log: grants of a checkpoint lost": (Edit(_restore, "self._restore_grant(grant)", "pass"),),
    # the service: the group log
    "desk: answered before it is durable": (
        Edit(
            f"{_group}.enqueue",
            "self._queue.append(QueuedDecision(entries, puts, ticket))",
            "self._queue.append(QueuedDecision(entries, puts, None))\n        ticket is not None and ticket.settle(None)",
        ),
    ),
    "desk: checkpoint while decisions are pending": (
        Edit("ledger.service.group_log:GroupLog._checkpoint_if_due", " or self._queue", ""),
    ),
    "desk: goes on after a commit that failed": (
        Edit(
            "ledger.service.group_log:GroupLog.settle_commit",
            "self.error = error",
            "self._append.__self__._is_broken = False",
        ),
    ),
    # the service: reports and claims
    "service: decided before a refusal, and not logged": (
        Edit(
            "ledger.service.handlers:RunService.decide",
            "failure = error",
            "failure = error; entries.clear()",
        ),
    ),
    "service: illegal move not logged": (
        Edit("ledger.service.handlers:RunService.decide", "entries.append(halted)", "pass"),
    ),
    "service: illegal commit not logged": (
        Edit(
            "ledger.service.handlers:RunService.mark_committed",
            "self._log([self.scheduler.halted], now_ns=now_ns)",
            "pass",
        ),
    ),
    "service: outcomes under the height of others": (
        Edit(
            f"{_service}._take_reports",
            "height = self.log.height + len(entries) + 1",
            "height = 1",
        ),
    ),
    "service: results of a fenced report stored": (
        Edit(
            f"{_service}._take_reports",
            'replies.append(GrantReportReply(True, 0, ""))',
            "puts += runs.chunk_rows(self.run_id, 0, height, runs.OutcomeChunk(0, b'', bytes(batch), [], [], 0.0, 0, []))\n                replies.append(GrantReportReply(True, 0, ''))",
        ),
    ),
    "service: failure that is tried again kept as an outcome": (
        Edit(
            "ledger.service.outcome_chunks:build_chunk",
            "not retried.contains(row.seq, row.seq + 1)",
            "True",
        ),
    ),
    "service: rows that a reclaim failed have no outcome": (
        Edit(
            "ledger.service.outcome_chunks:reclaimed_chunk_rows",
            "puts += runs.chunk_rows(run_id, page, height, chunk)",
            "pass",
        ),
    ),
    "service: grant that the child has, given again": (
        Edit(
            "ledger.service.child_handover:unacknowledged_grant",
            " or grant.epoch in known_epochs",
            "",
        ),
    ),
    "service: claim that waited answered before it is durable": (
        Edit(
            "ledger.service.handlers:RunService._answer_waiting",
            "self.log.enqueue(entries, (), waiting.ticket)",
            "self.log.enqueue(entries); waiting.ticket.settle(None)",
        ),
    ),
}
