"""Planted bugs in tasks: granting, extending, expiring, reports, limits, dependents, the log and its
checkpoints."""

from __future__ import annotations

from tests.simulation.source_edits import Edit

_grant_from = "tasks.leases:_Granter._grant_from"
_shrink_range = "tasks.leases:_shrink_range"
_save_grants = "tasks.grants:GrantBuilder.save"
_grant_tasks = "tasks.leases:grant_tasks"
_expire_leases = "tasks.leases:_expire_leases"
_next_overdue = "tasks.leases:_next_overdue"
_extend = "tasks.leases:extend"
_is_live = "tasks.leases:is_live"
_apply_single = "tasks.reports:_ReportBatch.apply_single"
_judge = "tasks.reports:_ReportBatch._judge"
_complete = "tasks.reports:_ReportBatch._complete"
_complete_in_range = "tasks.reports:_ReportBatch.complete_in_range"
_open_lease = "tasks.reports:_ReportBatch._open_lease"
_save_reports = "tasks.reports:_ReportBatch.save"
_apply_failure = "tasks.reports:_apply_failure"
_add_task = "tasks.submit:_TaskBatch.add"
_enqueue = "tasks.submit:_TaskBatch._enqueue"
_save_batch = "tasks.submit:_TaskBatch.save"
_register = "tasks.dependents:register"
_on_dependency_end = "tasks.dependents:_on_dependency_end"
_cancel = "tasks.admin:cancel_within"
_redrive = "tasks.admin:redrive"
_checkpoint = "tasks.checkpoint"
_throttle = "tasks.unit_of_work:UnitOfWork.throttle"

_EXPIRE_ALL = Edit(
    _next_overdue, "expiries + pack_int(unit.now_ns + 1)", "expiries + pack_int(1 << 62)"
)
_IGNORE_EXTENSION = Edit(_expire_leases, "if status.expires_ns > now_ns:", "if False:")
_ANY_LEASE = Edit(_judge, "and prior.lease == report.lease\n", "\n")

TASKS: dict[str, tuple[Edit, ...]] = {
    # granting
    "grant: leaves the task in its queue": (Edit(_shrink_range, "txn.delete(key)", "pass"),),
    "grant: reuses lease numbers": (
        Edit(_save_grants, "txn.put(keys.lease_counter, encode_int(self._lease_no))", "pass"),
    ),
    "grant: does not count the attempt": (
        Edit("tasks.status_fold:apply_grant", "prior.attempt + 1", "prior.attempt"),
    ),
    "grant: is not logged": (
        Edit(
            _save_grants,
            "decision.log.append(LeasesGranted(lease_no, worker, expires_ns, batch.tasks))",
            "pass",
        ),
    ),
    "grant: writes no expiry row": (
        Edit(
            _save_grants,
            "txn.put(\n                row_key, pack(ExpiryBatch",
            "len(\n                pack(ExpiryBatch",
        ),
    ),
    "grant: lasts one second longer": (
        Edit(
            "tasks.grants:GrantBuilder._lease_batch",
            "now_ns + lease_ns",
            "now_ns + lease_ns + 1_000_000_000",
        ),
    ),
    "grant: mixes quarantined tasks with other tasks": (
        Edit(_grant_tasks, "if request.alone and limit:", "if limit:"),
        Edit(
            "tasks.leases:_Granter.grant_quarantined",
            "kind, 1, quarantined=True",
            "kind, self._limit, quarantined=True",
        ),
    ),
    "grant: starts with the last task": (
        Edit(
            _grant_from,
            "txn.scan(start, tuples.prefix_end(index_prefix), page_size)",
            "txn.scan(start, tuples.prefix_end(index_prefix), page_size, True)",
        ),
    ),
    "grant: does not expire overdue leases first": (
        Edit(_grant_tasks, "_expire_leases(unit, EXPIRED_MAX)", "pass"),
        Edit(_grant_tasks, "if _next_overdue(unit):", "if False:"),
    ),
    "grant: starts while overdue leases remain": (
        Edit(_grant_tasks, "_expire_leases(unit, EXPIRED_MAX)", "_expire_leases(unit, 1)"),
        Edit(_grant_tasks, "if _next_overdue(unit):", "if False:"),
    ),
    "quarantine: starts after the first expiry": (
        Edit("tasks.model:is_quarantined", "spec.expiries_max - 1", "1"),
    ),
    "quarantine: never starts": (
        Edit("tasks.model:is_quarantined", "spec.expiries_max - 1", "spec.expiries_max"),
    ),
    # row ranges
    "range: loses the tasks behind a grant": (
        Edit(_shrink_range, "if first + count <= last:", "if False:"),
    ),
    "range: loses the first task behind a grant": (
        Edit(
            _shrink_range,
            "pack_int(first + count), encode_range(first + count",
            "pack_int(first + count + 1), encode_range(first + count + 1",
        ),
    ),
    "range: keeps a removed task": (
        Edit(
            "tasks.row_ranges:remove_from_range",
            "txn.put(key, encode_range(first, seq - 1))",
            "txn.put(key, encode_range(first, seq))",
        ),
    ),
    "range: loses the tasks behind a removed one": (
        Edit("tasks.row_ranges:remove_from_range", "if seq < last:", "if False:"),
    ),
    "range: is found only by its first task": (
        Edit(
            "tasks.row_ranges:find_range",
            "preceding = txn.scan(index_prefix, key, 1, True)",
            "preceding = []",
        ),
    ),
    "range: keeps a task that has dependents": (
        Edit(
            _register,
            "unit.split_from_range(packed_dependency, unit.body_and_spec(packed_dependency)[1])",
            "pass",
        ),
    ),
    "range lease: writes no index by task": (
        Edit(
            "tasks.row_ranges:RangeLeaseTable.put",
            "txn.put(keys.range_lease_starts + pack_int(first), number)",
            "pass",
        ),
    ),
    "range lease: does not save the removal of a task": (
        Edit("tasks.row_ranges:OpenRangeLease.remove", "self.changed = True", "pass"),
    ),
    "range lease: is deleted although tasks remain": (
        Edit("tasks.row_ranges:RangeLeaseTable.save", "if open_lease.ranges:", "if False:"),
    ),
    "range lease: schedules no expiry for a split-off task": (
        Edit(
            "tasks.row_ranges:RangeLeaseTable.split_off",
            "self.schedule_expiry(status.expires_ns, open_lease.lease, status.worker, [seq])",
            "pass",
        ),
    ),
    "range lease: deletes the expiry row of split-off tasks": (
        Edit(
            "tasks.row_ranges:RangeLeaseTable.save", "if not open_lease.has_split_off:", "if True:"
        ),
        Edit(
            "tasks.row_ranges:RangeLeaseTable.save",
            "for (at_ns, lease), (worker, seqs) in self._expiries_to_add.items():",
            "for (at_ns, lease), (worker, seqs) in ():",
        ),
    ),
    "range lease: keeps a split-off task": (
        Edit("tasks.row_ranges:RangeLeaseTable.split_off", "open_lease.remove(seq)", "pass"),
    ),
    "range lease: completes a task after its expiry": (
        Edit(_open_lease, " and self._unit.now_ns < found.stored.expires_ns", ""),
    ),
    "range lease: completes the task behind its last one": (
        Edit(
            "tasks.row_ranges:OpenRangeLease.index_of",
            "seq <= ranges[at][1]",
            "seq <= ranges[at][1] + 1",
        ),
    ),
    "range lease: never expires its tasks": (
        Edit(
            _expire_leases,
            "batch.listed_tasks if range_lease is None else batch.listed_tasks + range_lease.tasks()",
            "batch.listed_tasks",
        ),
    ),
    "range lease: does not decrement the leased counter": (
        Edit(_save_reports, "unit.on_lease_end(spec, count=len(seqs))", "pass"),
    ),
    "range lease: completes tasks without retention and notification": (
        Edit(
            _save_reports,
            'unit.finish_many(seqs, spec, "completed")',
            'unit.counts.add(spec.queue, "completed", len(seqs))',
        ),
    ),
    "range lease: is missing in a checkpoint": (
        Edit(
            f"{_checkpoint}:_read_chunk",
            "leased_in_ranges.get(seq, NEW_STATUS)\n            if row is None",
            "NEW_STATUS\n            if row is None",
        ),
    ),
    "range lease: stores the first result for all tasks": (
        Edit(_complete_in_range, "if result != self._completed:", "if self._completed is None:"),
    ),
    # limits
    "limit: ignores the concurrency of the queue": (
        Edit(
            "tasks.leases:_queue_capacity",
            'concurrency_max - unit.counts.current(queue, "leased")',
            "concurrency_max",
        ),
    ),
    "limit: ignores the limit of a key": (
        Edit(
            "tasks.unit_of_work:UnitOfWork.acquire_limit_slot",
            "slots_max and self.txn.count(key) >= slots_max",
            "False",
        ),
    ),
    "limit: does not count a leased task": (
        Edit("tasks.unit_of_work:UnitOfWork.acquire_limit_slot", "self.txn.add(key, 1)", "pass"),
    ),
    "limit: never releases a slot": (
        Edit("tasks.unit_of_work:UnitOfWork.on_lease_end", "if limit:", "if False:"),
    ),
    "limit: does not unthrottle tasks when a slot is free": (
        Edit(
            "tasks.unit_of_work:UnitOfWork.release_limit_slot",
            "self.note_capacity(spec.queue, limit)",
            "pass",
        ),
    ),
    "limit: does not pass on the slot of a cancelled ready task": (
        Edit(
            "tasks.unit_of_work:UnitOfWork._count_dequeued",
            "self.note_capacity(spec.queue, body.limit)",
            "pass",
        ),
    ),
    # expiry of leases
    "expiry: is not logged": (
        Edit(
            _expire_leases,
            "unit.log.append(LeasesExpired(batch.lease, [seq for seq, _, _ in expired]))",
            "pass",
        ),
    ),
    "expiry: occurs before its time": (_EXPIRE_ALL, _IGNORE_EXTENSION),
    "expiry: never occurs": (
        Edit(_next_overdue, "expiries + pack_int(unit.now_ns + 1)", "expiries + pack_int(1)"),
    ),
    "expiry: ignores the extension of a lease": (_IGNORE_EXTENSION,),
    "expiry: expires another lease of the task": (
        Edit(
            _expire_leases,
            "status.state != TaskState.LEASED or status.lease != batch.lease",
            "status.state != TaskState.LEASED",
        ),
        _IGNORE_EXTENSION,
    ),
    "expiry: does not reschedule an extended lease": (
        Edit(
            _expire_leases,
            "unit.leases.schedule_expiry(status.expires_ns, batch.lease, batch.worker, [seq])",
            "pass",
        ),
    ),
    "expiry: is not counted": (
        Edit("tasks.status_fold:apply_expiry", "prior.expiries + 1", "prior.expiries"),
    ),
    "expiry: ignores the maximum of expiries": (
        Edit("tasks.leases:_expire_task", "after.expiries >= spec.expiries_max", "False"),
    ),
    "lease: accepts any lease number": (Edit(_is_live, "status.lease == lease and ", ""),),
    "lease: is live after its expiry": (Edit(_is_live, " and now_ns < status.expires_ns", ""),),
    "lease: is live in any state and after its expiry": (
        Edit(_is_live, "status.state == TaskState.LEASED and ", ""),
        Edit(_is_live, " and now_ns < status.expires_ns", ""),
    ),
    # extending
    "extend: accepts a former generation": (Edit(_extend, "generation != txn.generation or ", ""),),
    "extend: ignores the execution window": (
        Edit(
            _extend,
            "since_ns = now_ns if hold.progressed else status.progress_ns",
            "since_ns = now_ns",
        ),
    ),
    "extend: does not record progress": (
        Edit(
            "tasks.status_fold:apply_extension",
            "at_ns if progressed else prior.progress_ns",
            "prior.progress_ns",
        ),
    ),
    "extend: is not logged": (Edit(_extend, "if record.tasks:", "if False:"),),
    "extend: does not write the status": (
        Edit(
            _extend,
            "unit.write_status(\n"
            "            packed_seq, status_fold.apply_extension(status, until_ns, hold.progressed, now_ns)\n"
            "        )",
            "pass",
        ),
    ),
    # reports
    "report: accepts a former generation": (
        Edit(_judge, "if not current or not is_live", "if not is_live"),
        Edit(_open_lease, "leases.get(lease) if self._current else None", "leases.get(lease)"),
    ),
    "report: does not log a stale report": (
        Edit(
            _apply_single,
            "unit.log.append(StaleReport(report.seq, report.lease, self._worker))",
            "pass",
        ),
    ),
    "report: answers a stale report with COMMITTED": (
        Edit(
            _apply_single,
            "return _ANSWERS[verdict]",
            "return ReportAnswer.COMMITTED if verdict is _Verdict.STALE else _ANSWERS[verdict]",
        ),
    ),
    "report: accepts a repeat under another lease": (_ANY_LEASE,),
    "report: answers a repeat with CANCELLED": (
        Edit(
            _judge,
            "report.end == AttemptOutcome.OK\n                and prior",
            "False\n                and prior",
        ),
    ),
    "report: does not log the completion": (Edit(_save_reports, "if self._tasks:", "if False:"),),
    "report: loses the result": (
        Edit(_complete, "now_ns, result, blob", 'now_ns, b"", blob'),
        Edit(
            _complete_in_range, "range_lease.status, now_ns, result", "range_lease.status, now_ns"
        ),
    ),
    "report: does not end the lease": (
        Edit(_apply_single, "unit.on_lease_end(spec, body.limit)", "pass"),
        Edit(_complete, "unit.on_lease_end(spec, body.limit)", "pass"),
    ),
    "report: releases no dependents of a completed task": (
        Edit(_complete, '"completed", awaited=prior.awaited', '"completed", awaited=False'),
    ),
    "failure: is not counted": (
        Edit(
            "tasks.status_fold:apply_failure",
            'prior.failures + (counts == "failure")',
            "prior.failures",
        ),
    ),
    "failure: ignores the maximum of attempts": (
        Edit(_apply_failure, "failures >= spec.attempts", "False"),
    ),
    "failure: is final one attempt early": (
        Edit(_apply_failure, "failures >= spec.attempts", "failures >= spec.attempts - 1"),
    ),
    "failure: is retried without backoff": (
        Edit(_apply_failure, "if counts and not final:", "if False:"),
    ),
    "failure: retries a non-retryable error": (
        Edit(_apply_failure, "outcome == AttemptOutcome.REFUSED or ", ""),
    ),
    "failure: is not logged": (
        Edit(
            _apply_failure,
            "unit.log.append(\n"
            "        AttemptFailed(report.seq, report.lease, reason, error, counts, final, not_before_ns)\n"
            "    )",
            "pass",
        ),
    ),
    "process exit: ignores the maximum of expiries": (
        Edit(_apply_failure, "after.expiries >= spec.expiries_max", "False"),
    ),
    "process exit: is not counted": (
        Edit(
            "tasks.status_fold:apply_failure",
            'prior.expiries + (counts == "expiry")',
            "prior.expiries",
        ),
    ),
    "death: releases no dependents of a dead task": (
        Edit("tasks.leases:mark_dead", "awaited=prior.awaited", "awaited=False"),
    ),
    # wait states
    "delay: is ignored": (
        Edit(
            "tasks.unit_of_work:UnitOfWork.wait_state",
            "_not_before(body, status) > self.now_ns",
            "False",
        ),
    ),
    "delay: ends one second early": (
        Edit(
            "tasks.unit_of_work:UnitOfWork.promote_due",
            "self.now_ns + 1",
            "self.now_ns + 1_000_000_000",
        ),
    ),
    "delay: never ends": (
        Edit("tasks.unit_of_work:UnitOfWork.promote_due", "self.now_ns + 1", "1"),
    ),
    "throttle: leaves the task in its queue index": (
        Edit(_throttle, "txn.delete(key)", "pass"),
        Edit(
            _throttle,
            "fair_turns.remove(txn, self.keys, spec, body.limit, packed_seq)",
            "pass",
        ),
    ),
    "counters: are not updated": (
        Edit(
            "tasks.model:CountDeltas.save", "getattr(counts, place) + n", "getattr(counts, place)"
        ),
    ),
    "unroutable: grants a task to a worker that does not define it": (
        Edit(_grant_from, "task_names and spec.name not in task_names", "False"),
    ),
    "unroutable: never returns a task to its queue": (
        Edit("tasks.unit_of_work:UnitOfWork.restore_routable", "while limit > 0:", "while False:"),
    ),
    "unroutable: does not pass on the slot of its limit": (
        Edit("tasks.unit_of_work:UnitOfWork.set_unroutable", "if body.limit:", "if False:"),
    ),
    "unroutable: leaves the task in its queue index": (
        Edit(_grant_from, "_shrink_range(txn, key, row, first, last, count)", "pass"),
    ),
    # cancelling and redriving
    "cancel: leaves the task in its queue index": (
        Edit(_cancel, "unit.dequeue(packed_seq, body, spec, status)", "pass"),
    ),
    "cancel: does not end the lease": (
        Edit(_cancel, "unit.on_lease_end(spec, body.limit)", "pass"),
    ),
    "cancel: cancels an ended task": (
        Edit(_cancel, "status.state not in (TaskState.WAITING, TaskState.LEASED)", "False"),
        Edit(
            "tasks.status_fold:apply_death",
            "(prior.state, TaskEvent.BURY) not in _legal_moves",
            "False",
        ),
        Edit(
            "tasks.unit_of_work:UnitOfWork.dequeue",
            'self.counts.add(spec.queue, "blocked", -1)',
            "pass",
        ),
    ),
    "death: is not logged": (
        Edit("tasks.leases:mark_dead", "unit.log.append(TasksDead([seq], reason))", "pass"),
    ),
    "redrive: creates another task at each repeat": (
        Edit(_redrive, "if status.redriven_by:", "if False:"),
    ),
    "redrive: accepts a completed task": (
        Edit(
            _redrive,
            "status.state not in (TaskState.FAILED, TaskState.DEAD)",
            "status.state not in (TaskState.FAILED, TaskState.DEAD, TaskState.COMPLETED)",
        ),
    ),
    "redrive: leaves the key with the former task": (Edit(_redrive, "if body.key:", "if False:"),),
    # submitting
    "submit: reuses seqs": (
        Edit(_save_batch, "self._put(unit.keys.seq_counter, encode_int(self._seq))", "pass"),
    ),
    "submit: ignores a known key": (
        Edit("tasks.submit:_find_by_key", "if packed_seq is None:", "if True:"),
    ),
    "submit: does not store the key": (Edit(_add_task, "if new_task.key:", "if False:"),),
    "submit: accepts other arguments under a known key": (
        Edit("tasks.submit:_find_by_key", "args != new_task.args", "False"),
    ),
    "submit: is not logged": (
        Edit(
            _save_batch,
            "unit.log.append(TasksCreated(self._created, digest_rows(self._rows)))",
            "pass",
        ),
    ),
    "submit: ignores the dependencies": (
        Edit(_enqueue, "waits = dependents.register(unit, packed_seq, body.after)", "waits = 0"),
    ),
    "submit: ignores a failed dependency": (
        Edit(_register, "status.state in (TaskState.FAILED, TaskState.DEAD)", "False"),
        Edit(
            _register, "status.state == TaskState.COMPLETED", "status.state >= TaskState.COMPLETED"
        ),
    ),
    # dependents
    "dependents: are never released": (
        Edit("tasks.dependents:release", "while released < limit:", "while False:"),
    ),
    "dependents: are released by their first dependency": (
        Edit(_on_dependency_end, "waits=status.waits - 1", "waits=0"),
    ),
    "dependents: run after a failed dependency": (
        Edit(_on_dependency_end, "if completed:", "if True:"),
    ),
    "dependents: do not mark their dependency as awaited": (
        Edit(_register, "if not status.awaited:", "if False:"),
    ),
    "dependents: are released after their end": (
        Edit(
            _on_dependency_end,
            "if status.state != TaskState.WAITING or not status.waits:",
            "if status.state == TaskState.LEASED:",
        ),
    ),
    # retention
    "retention: removes ended tasks at once": (
        Edit("tasks.admin:_remove_past_retention", "unit.now_ns + 1", "1 << 62"),
    ),
    "retention: leaves the key of a removed task": (
        Edit("tasks.admin:_remove_task", "if txn.get(key) == packed_seq:", "if False:"),
    ),
    "retention: leaves the blobs of a removed task": (
        Edit("tasks.admin:_remove_task", "if blob:", "if False:"),
    ),
    "retention: does not count a removed task": (
        Edit(
            "tasks.admin:_remove_task",
            "unit.counts.add(spec.queue, TaskState(status.state).name.lower(), -1)",
            "pass",
        ),
    ),
    # checkpoints
    "checkpoint: records a higher log height": (
        Edit(
            f"{_checkpoint}:_read_chunk",
            "CheckpointChunk(lo, hi, height, fresh",
            "CheckpointChunk(lo, hi, height + 1, fresh",
        ),
    ),
    "checkpoint: omits a task": (
        Edit(f"{_checkpoint}:_read_chunk", "for key, _ in bodies:", "for key, _ in bodies[1:]:"),
    ),
    "checkpoint: releases the log up to the head": (
        Edit(
            f"{_checkpoint}:install",
            "journal.checkpoint(txn, keys.subject, index.latest.height)",
            "journal.checkpoint(txn, keys.subject, journal.head(txn, keys.subject).height)",
        ),
    ),
    "checkpoint: removes the previous checkpoint": (
        Edit(
            "tasks.checkpoint:remove_unreferenced",
            "kept = {index.latest.number, index.before.number}",
            "kept = {index.latest.number}",
        ),
    ),
    "checkpoint: accepts a superseded writer": (
        Edit("tasks.checkpoint:add_chunk", "building.checkpoint.number != number", "False"),
        Edit(f"{_checkpoint}:install", "building.checkpoint.number != number", "False"),
        Edit(f"{_checkpoint}:begin", "txn.now_ns < building.moved_ns + STALLED_NS", "False"),
    ),
}
