"""Planted bugs in the ledger: the board's decisions, the fold, the log, and the core of its service."""

from __future__ import annotations

from holdfast.sim.edits import Edit

_board = "ledger.board:Board"
_claim = f"{_board}.claim"
_advance = f"{_board}.advance"
_fold = "ledger.position:Position"
_restore = f"{_fold}.restore"
_move = "ledger.ledger:Ledger.move"
_one = "ledger.ledger:Ledger.move_one"
_write = "ledger.log:RunLog._write"
_allowed = "ledger.judge:_allowed"
_reclaim = "ledger.judge:reclaim"
_group = "ledger.service.group_log:GroupLog"
_service = "ledger.service.handlers:RunService"
_LEASE = Edit(_write, "txn.require_live(self.lease)", "pass")
_HEAD = Edit(
    _write, "expected_head=height", "expected_head=journal.head(txn, self._subject).height"
)

LEDGER: dict[str, tuple[Edit, ...]] = {
    # handing out
    "claim: begin not logged": (
        Edit(
            _claim,
            "Leased(now_ns, epoch, owner, parts, begun, alone)",
            "Leased(now_ns, epoch, owner, parts, [], alone)",
        ),
    ),
    "claim: ripening not logged": (
        Edit(
            _claim, "entries.append(self._decide(Ripened(now_ns)))", "self._decide(Ripened(now_ns))"
        ),
    ),
    "claim: free rows stay free": (Edit(f"{_fold}._leased", "self.free.remove(lo, hi)", "pass"),),
    "claim: epoch given twice": (
        Edit(_claim, "epoch = self.epoch + 1", "epoch = max(self.epoch, 1)"),
    ),
    "claim: always the first attempt": (
        Edit("ledger.choose:_take", "Part(a, b, tries + 1)", "Part(a, b, 1)"),
    ),
    "claim: any distance from the commit": (
        Edit("ledger.choose:_fresh", "found[0] - at.next_commit > ahead", "False"),
    ),
    "suspects: not set apart": (
        Edit(f"{_fold}._reclaimed", "self.suspects.add(lo, hi)", "self.free.add(lo, hi)"),
    ),
    "suspects: last, even at the head of the commit": (
        Edit("ledger.choose:choose", "if at.suspects.rows:", "if False:"),
    ),
    "suspects: a whole batch at once": (
        Edit("ledger.choose:_suspect", "isqrt(at.policy.unit)", "at.policy.unit"),
    ),
    # reports
    "report: begin not logged": (
        Edit(
            _advance,
            "entry = Advanced(now_ns, epoch, n, digest, final, retried, begun, stop)",
            "entry = Advanced(now_ns, epoch, n, digest, final, retried, [], stop)",
        ),
    ),
    "report: sent again, counted twice": (
        Edit(_advance, "if reply.n == n:", "if False:"),
        Edit(_advance, "if n != held.n + 1:", "if False:"),
    ),
    "report: another of the same number": (
        Edit(_advance, "if reply.digest != digest:", "if False:"),
    ),
    "report: a zombie is told that it was heard": (
        Edit(
            _advance,
            "if told is None:\n            raise self._fence(epoch)",
            "if told is None:\n            return Taken(0, True, '', []), []",
        ),
    ),
    "report: does not prolong the lease": (
        Edit(
            _advance,
            "self._expires[epoch] = max(self._expires[epoch], now_ns + self.policy.lease_ns)",
            "pass",
        ),
    ),
    "report: begins what a cancellation ended": (
        Edit(
            _advance,
            "judge.misfit(self, held, done, begun)",
            "judge.misfit(self, held, done, begin)",
        ),
    ),
    # budgets
    "retry: attempt not counted": (
        Edit(_move, "attempts += 1", "pass"),
        Edit(_one, "self._attempts[seq] += 1", "pass"),
    ),
    "retry: no budget of a row": (
        Edit("ledger.classes:decide", " or attempts + 1 >= policy.attempts_max", ""),
    ),
    "retry: one attempt too few": (
        Edit("ledger.classes:decide", "attempts + 1 >= policy", "attempts + 2 >= policy"),
    ),
    "retry: no budget of the run": (
        Edit("ledger.classes:decide", "policy.retries_max and", "False and"),
        Edit(_allowed, "min(rows, bound - used) if bound else rows", "rows"),
    ),
    "retry: budget of the run not kept": (
        Edit(f"{_fold}._advanced", "self.retries += again.hi - again.lo", "pass"),
    ),
    "retry: of what cannot be retried": (
        Edit("ledger.classes:decide", "error_class not in RETRYABLE or ", ""),
    ),
    "retry: while cancelling": (Edit(_allowed, "if at.cancelling:", "if False:"),),
    "retry: at once": (
        Edit(f"{_fold}._advanced", "again.not_before_ns > entry.decided_ns", "False"),
    ),
    "retry: ripe before its time": (
        Edit(_claim, "self.resting[0][0] <= now_ns", "True"),
        Edit(f"{_fold}.apply", "self.resting[0][0] > entry.decided_ns", "False"),
    ),
    # taking back
    "reclaim: grant kept": (Edit(f"{_fold}._reclaimed", "self._forget(held)", "pass"),),
    "reclaim: rows not begun are lost": (
        Edit(f"{_fold}._reclaimed", "self.free.add(lo, hi)", "pass"),
    ),
    "reclaim: the budget goes to the highest rows": (
        Edit(_reclaim, "suspects.add(lo, cut)", "suspects.add(hi - (cut - lo), hi)"),
        Edit(_reclaim, "failed.add(cut, hi)", "failed.add(lo, hi - (cut - lo))"),
    ),
    "reclaim: retried while cancelling": (Edit(_reclaim, "if at.cancelling:", "if False:"),),
    "expire: heartbeats not heeded": (
        Edit(f"{_board}.expire", "until_ns <= now_ns:\n", "True:\n"),
    ),
    "expire: heartbeat not kept": (
        Edit(
            f"{_board}.heartbeat",
            "self._expires[epoch] = max(self._expires[epoch], now_ns + self.policy.lease_ns)\n"
            "        return self._expires[epoch]",
            "return now_ns + self.policy.lease_ns",
        ),
    ),
    "expire: grants not renewed on opening": (
        Edit(f"{_board}.renew", "for epoch in self.grants:", "for epoch in ():"),
    ),
    "expire: never": (Edit(f"{_board}.expire", "due.append(epoch)", "pass"),),
    "drop all: forgotten": (Edit(f"{_board}.drop_all", "self.grants, ", "(), "),),
    "cancel: granted rows kept": (Edit(f"{_fold}._cancelling", "held.idle = Ranges()", "pass"),),
    "cancel: no grace": (Edit(f"{_board}.end_grace", "now_ns < self.grace_ends_ns", "False"),),
    "cancel: begun rows outlive the grace": (
        Edit(
            f"{_fold}.apply",
            "self._move(lo, hi, Event.CANCEL, held, reason=ErrorClass.CANCELLATION)",
            "pass",
        ),
    ),
    # committing
    "commit: prefix one too far": (
        Edit("ledger.ledger:Ledger.final_prefix", "return at", "return min(at + 1, self.size)"),
    ),
    "commit: beyond the prefix": (
        Edit(f"{_board}.commit", "if upto > head:", "if False:"),
        Edit("ledger.ledger:Ledger._priors", "if not allowed.all():", "if False:"),
        Edit(_one, "after = _NEXT[event][prior]", "after = int(TARGET[event])"),
    ),
    "commit: known prefix again": (
        Edit(f"{_board}.commit", "if upto <= self.next_commit:", "if False:"),
    ),
    # counters
    "counters: state not counted": (Edit(_one, "self._counts[after] += 1", "pass"),),
    "counters: ends not counted": (Edit(_one, "self.ended[_ENDED[event]] += 1", "pass"),),
    # the log and its checkpoints
    "log: lease not checked": (_LEASE,),
    "log: neither lease nor head checked": (_LEASE, _HEAD),
    "log: outcomes not written": (Edit(_write, "txn.put(key, value)", "pass"),),
    "log: checkpoint at another height": (
        Edit(
            _write,
            "_keep(txn, self._subject, height, checkpoint)",
            "_keep(txn, self._subject, height - 1, checkpoint)",
        ),
    ),
    "log: truncated up to the newest checkpoint": (
        Edit(
            "ledger.log:_keep",
            "journal.checkpoint(txn, subject, before.height)",
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
    "log: old answers of a checkpoint lost": (Edit(_restore, "self._keep(ended)", "pass"),),
    "log: answers of a checkpoint lost": (
        Edit(f"{_fold}._regrant", "held.replies.extend(told.replies)", "pass"),
    ),
    "log: suspects of a checkpoint lost": (Edit(_restore, "self.suspects.add(lo, hi)", "pass"),),
    "log: retries of a checkpoint lost": (Edit(_restore, "self.retries = told.retries", "pass"),),
    "log: grants of a checkpoint lost": (Edit(_restore, "self._regrant(grant)", "pass"),),
    # the service: the group log
    "desk: answered before it is durable": (
        Edit(
            f"{_group}.enqueue",
            "self._queue.append(Decided(entries, puts, ticket))",
            "self._queue.append(Decided(entries, puts, None))\n"
            "        ticket is not None and ticket.settle(None)",
        ),
    ),
    "desk: checkpoint while decisions are pending": (
        Edit(f"{_group}._checkpoint", " or self._queue", ""),
    ),
    "desk: goes on after a commit that failed": (
        Edit(f"{_group}.settle", "self.error = error", "self._append.__self__._lost = False"),
    ),
    # the service: reports and claims
    "service: decided before a refusal, and not logged": (
        Edit(f"{_service}.handle", "failure = error", "failure = error; entries.clear()"),
    ),
    "service: illegal move not logged": (
        Edit(f"{_service}.handle", "entries.append(halted)", "pass"),
    ),
    "service: illegal commit not logged": (
        Edit(f"{_service}.committed", "self._log([self.board.halted], now_ns=now_ns)", "pass"),
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
            'moved.append(Moved(True, 0, ""))',
            "puts += runs.chunk_rows(self.run_id, 0, height, runs.Chunk(0, b'', bytes(batch), "
            "[], [], 0.0, 0, []))\n                moved.append(Moved(True, 0, ''))",
        ),
    ),
    "service: failure that is tried again kept as an outcome": (
        Edit(
            "ledger.service.outcome_chunks:result_chunk",
            "not again.holds(other.seq, other.seq + 1)",
            "True",
        ),
    ),
    "service: rows that a reclaim failed have no outcome": (
        Edit(
            "ledger.service.outcome_chunks:lost_rows",
            "puts += runs.chunk_rows(run_id, page, height, chunk)",
            "pass",
        ),
    ),
    "service: grant that the child has, given again": (
        Edit("ledger.service.succession:granted_before", " or grant.epoch in held", ""),
    ),
    "service: claim that waited answered before it is durable": (
        Edit(
            f"{_service}._answered",
            "self.log.enqueue(entries, (), waiting.ticket)",
            "self.log.enqueue(entries); waiting.ticket.settle(None)",
        ),
    ),
}
