"""Planted bugs in tasks: granting, extending, expiring, reports, limits, dependents, the log and its
checkpoints."""

from __future__ import annotations

from tests.simulation.source_edits import Edit

_grant = "tasks.leases:_Granter._grant_from"
_shorten = "tasks.leases:_shrink_range"
_give = "tasks.grants:GrantBuilder.save"
_asked = "tasks.leases:grant_tasks"
_expire = "tasks.leases:_expire_leases"
_overdue = "tasks.leases:_next_overdue"
_extend = "tasks.leases:extend"
_live = "tasks.leases:is_live"
_settle = "tasks.reports:_ReportBatch.apply_single"
_judge = "tasks.reports:_ReportBatch._judge"
_complete = "tasks.reports:_ReportBatch._complete"
_in_range = "tasks.reports:_ReportBatch.complete_in_range"
_open_lease = "tasks.reports:_ReportBatch._open_lease"
_reported = "tasks.reports:_ReportBatch.save"
_fail = "tasks.reports:_apply_failure"
_decision = "tasks.unit_of_work:UnitOfWork"
_submit = "tasks.submit:_TaskBatch.add"
_enqueue = "tasks.submit:_TaskBatch._enqueue"
_submitted = "tasks.submit:_TaskBatch.save"
_block = "tasks.dependents:register"
_tell = "tasks.dependents:_on_dependency_end"
_cancel = "tasks.admin:cancel"
_redrive = "tasks.admin:redrive"
_check = "tasks.checkpoint"
_runs = "tasks.runs"

_EARLY = Edit(_overdue, "expiries + pack_int(unit.now_ns + 1)", "expiries + pack_int(1 << 62)")
_HELD = Edit(_expire, "if status.expires_ns > now_ns:", "if False:")
_AGAIN = Edit(_judge, "and prior.lease == report.lease\n", "\n")

TASKS: dict[str, tuple[Edit, ...]] = {
    # granting
    "grant: stays in its queue": (Edit(_shorten, "txn.delete(key)", "pass"),),
    "grant: lease numbers given again": (
        Edit(_give, "txn.put(keys.lease_counter, encode_int(self._lease_no))", "pass"),
    ),
    "grant: attempt not counted": (
        Edit("tasks.status_fold:apply_grant", "prior.attempt + 1", "prior.attempt"),
    ),
    "grant: not logged": (
        Edit(
            _give,
            "decision.log.append(LeasesGranted(lease_no, worker, expires_ns, batch.tasks))",
            "pass",
        ),
    ),
    "grant: nobody looks when its time is up": (
        Edit(
            _give,
            "txn.put(\n                row_key, pack(ExpiryBatch",
            "len(\n                pack(ExpiryBatch",
        ),
    ),
    "grant: lasts a second longer": (
        Edit(
            "tasks.grants:GrantBuilder._lease_batch",
            "now_ns + lease_ns",
            "now_ns + lease_ns + 1_000_000_000",
        ),
    ),
    "grant: suspects among the others": (
        Edit(_asked, "if request.alone and limit:", "if limit:"),
        Edit(
            "tasks.leases:_Granter.grant_quarantined",
            "kind, 1, quarantined=True",
            "kind, self._limit, quarantined=True",
        ),
    ),
    "grant: the last first": (
        Edit(
            _grant,
            "txn.scan(start, tuples.prefix_end(index_prefix), page_size)",
            "txn.scan(start, tuples.prefix_end(index_prefix), page_size, True)",
        ),
    ),
    "grant: nothing is swept before": (
        Edit(_asked, "_expire_leases(unit, EXPIRED_MAX)", "pass"),
        Edit(_asked, "if _next_overdue(unit):", "if False:"),
    ),
    "grant: before all that is overdue has expired": (
        Edit(_asked, "_expire_leases(unit, EXPIRED_MAX)", "_expire_leases(unit, 1)"),
        Edit(_asked, "if _next_overdue(unit):", "if False:"),
    ),
    "suspect: from the first on": (
        Edit("tasks.model:is_quarantined", "spec.expiries_max - 1", "1"),
    ),
    "suspect: never": (
        Edit("tasks.model:is_quarantined", "spec.expiries_max - 1", "spec.expiries_max"),
    ),
    # row ranges
    "run: the rest of it is lost": (Edit(_shorten, "if first + count <= last:", "if False:"),),
    "run: the rest begins too late": (
        Edit(
            _shorten,
            "pack_int(first + count), encode_range(first + count",
            "pack_int(first + count + 1), encode_range(first + count + 1",
        ),
    ),
    "run: cancelled, and still in it": (
        Edit(
            "tasks.row_ranges:remove_from_range",
            "txn.put(key, encode_range(first, seq - 1))",
            "txn.put(key, encode_range(first, seq))",
        ),
    ),
    "run: those after a cancelled one are lost": (
        Edit("tasks.row_ranges:remove_from_range", "if seq < last:", "if False:"),
    ),
    "run: only its first is found": (
        Edit(
            "tasks.row_ranges:find_range",
            "preceding = txn.scan(index_prefix, key, 1, True)",
            "preceding = []",
        ),
    ),
    "run: awaited, and still in it": (
        Edit(
            _block,
            "unit.split_from_range(packed_dependency, unit.body_and_spec(packed_dependency)[1])",
            "pass",
        ),
    ),
    "held: nobody finds it by its task": (
        Edit(
            "tasks.row_ranges:LeaseTable.put",
            "txn.put(keys.range_lease_starts + pack_int(first), number)",
            "pass",
        ),
    ),
    "held: completed, and still held": (
        Edit("tasks.row_ranges:OpenRangeLease.remove", "self.changed = True", "pass"),
    ),
    "held: the others of it are let go": (
        Edit("tasks.row_ranges:LeaseTable.save", "if open_lease.ranges:", "if False:"),
    ),
    "held: what left it is not looked at": (
        Edit(
            "tasks.row_ranges:LeaseTable.split_off",
            "self.schedule_expiry(status.expires_ns, open_lease.lease, status.worker, [seq])",
            "pass",
        ),
    ),
    "held: looked at no more when others are left": (
        Edit("tasks.row_ranges:LeaseTable.save", "if not open_lease.has_split_off:", "if True:"),
        Edit(
            "tasks.row_ranges:LeaseTable.save",
            "for (at_ns, lease), (worker, seqs) in self._expiries_to_add.items():",
            "for (at_ns, lease), (worker, seqs) in ():",
        ),
    ),
    "held: has a status, and is still in it": (
        Edit("tasks.row_ranges:LeaseTable.split_off", "open_lease.remove(seq)", "pass"),
    ),
    "held: completes after its time": (
        Edit(_open_lease, " and self._unit.now_ns < found.stored.expires_ns", ""),
    ),
    "held: one too many completes": (
        Edit(
            "tasks.row_ranges:OpenRangeLease.index_of",
            "seq <= ranges[at][1]",
            "seq <= ranges[at][1] + 1",
        ),
    ),
    "held: never expires": (
        Edit(
            _expire,
            "batch.listed_tasks if range_lease is None else batch.listed_tasks + range_lease.tasks()",
            "batch.listed_tasks",
        ),
    ),
    "held: not counted when completed": (
        Edit(_reported, "unit.on_lease_end(spec, count=len(seqs))", "pass"),
    ),
    "held: not kept when completed": (
        Edit(
            _reported,
            'unit.finish_many(seqs, spec, "completed")',
            'unit.counts.add(spec.queue, "completed", len(seqs))',
        ),
    ),
    "held: in no checkpoint": (
        Edit(
            f"{_check}:_read_chunk",
            "leased_in_ranges.get(seq, NEW_STATUS)\n            if row is None",
            "NEW_STATUS\n            if row is None",
        ),
    ),
    "held: a result for all": (
        Edit(_in_range, "if result != self._completed:", "if self._completed is None:"),
    ),
    # limits
    "limit: of the queue not looked at": (
        Edit(
            "tasks.leases:_queue_capacity",
            'concurrency_max - unit.counts.current(queue, "leased")',
            "concurrency_max",
        ),
    ),
    "limit: of the key not looked at": (
        Edit(
            "tasks.unit_of_work:UnitOfWork.acquire_limit_slot",
            "slots_max and self.txn.count(key) >= slots_max",
            "False",
        ),
    ),
    "limit: not counted": (
        Edit("tasks.unit_of_work:UnitOfWork.acquire_limit_slot", "self.txn.add(key, 1)", "pass"),
    ),
    "limit: held for ever": (
        Edit("tasks.unit_of_work:UnitOfWork.on_lease_end", "if limit:", "if False:"),
    ),
    "limit: those that wait are not let in": (
        Edit(
            "tasks.unit_of_work:UnitOfWork.release_limit_slot",
            "self.note_capacity(spec.queue, limit)",
            "pass",
        ),
    ),
    "limit: let in, cancelled, and nobody follows": (
        Edit(
            "tasks.unit_of_work:UnitOfWork._count_dequeued",
            "self.note_capacity(spec.queue, body.limit)",
            "pass",
        ),
    ),
    # expiry of leases
    "expiry: not logged": (
        Edit(
            _expire,
            "unit.log.append(LeasesExpired(batch.lease, [seq for seq, _, _ in expired]))",
            "pass",
        ),
    ),
    "expiry: before its time": (_EARLY, _HELD),
    "expiry: never": (
        Edit(_overdue, "expiries + pack_int(unit.now_ns + 1)", "expiries + pack_int(1)"),
    ),
    "expiry: extended ones too": (_HELD,),
    "expiry: of another lease": (
        Edit(
            _expire,
            "status.state != TaskState.LEASED or status.lease != batch.lease",
            "status.state != TaskState.LEASED",
        ),
        _HELD,
    ),
    "expiry: looked at once": (
        Edit(
            _expire,
            "unit.leases.schedule_expiry(status.expires_ns, batch.lease, batch.worker, [seq])",
            "pass",
        ),
    ),
    "expiry: not counted": (
        Edit("tasks.status_fold:apply_expiry", "prior.expiries + 1", "prior.expiries"),
    ),
    "expiry: without end": (
        Edit("tasks.leases:_expire_task", "after.expiries >= spec.expiries_max", "False"),
    ),
    "lease: of anybody": (Edit(_live, "status.lease == lease and ", ""),),
    "lease: for ever": (Edit(_live, " and now_ns < status.expires_ns", ""),),
    "lease: of any state, for ever": (
        Edit(_live, "status.state == TaskState.LEASED and ", ""),
        Edit(_live, " and now_ns < status.expires_ns", ""),
    ),
    # extending
    "extend: of another generation": (Edit(_extend, "generation != txn.generation or ", ""),),
    "extend: without progress, for ever": (
        Edit(
            _extend,
            "since_ns = now_ns if hold.progressed else status.progress_ns",
            "since_ns = now_ns",
        ),
    ),
    "extend: progress not noted": (
        Edit(
            "tasks.status_fold:apply_extension",
            "at_ns if progressed else prior.progress_ns",
            "prior.progress_ns",
        ),
    ),
    "extend: not logged": (Edit(_extend, "if record.tasks:", "if False:"),),
    "extend: not written": (
        Edit(
            _extend,
            "unit.write_status(\n"
            "            packed_seq, status_fold.apply_extension(status, until_ns, hold.progressed, now_ns)\n"
            "        )",
            "pass",
        ),
    ),
    # reports
    "report: of another generation": (
        Edit(_judge, "if not current or not is_live", "if not is_live"),
        Edit(_open_lease, "leases.get(lease) if self._current else None", "leases.get(lease)"),
    ),
    "report: a late one is not on record": (
        Edit(
            _settle, "unit.log.append(StaleReport(report.seq, report.lease, self._worker))", "pass"
        ),
    ),
    "report: a late one is told that it counted": (
        Edit(
            _settle,
            "return _ANSWERS[verdict]",
            "return ReportAnswer.COMMITTED if verdict is _Verdict.STALE else _ANSWERS[verdict]",
        ),
    ),
    "report: any lease of what has completed": (_AGAIN,),
    "report: the same again is refused": (
        Edit(
            _judge,
            "report.end == AttemptOutcome.OK\n                and prior",
            "False\n                and prior",
        ),
    ),
    "report: completion not logged": (Edit(_reported, "if self._tasks:", "if False:"),),
    "report: result lost": (
        Edit(_complete, "now_ns, result, blob", 'now_ns, b"", blob'),
        Edit(_in_range, "range_lease.status, now_ns, result", "range_lease.status, now_ns"),
    ),
    "report: lease still counted": (
        Edit(_settle, "unit.on_lease_end(spec, body.limit)", "pass"),
        Edit(_complete, "unit.on_lease_end(spec, body.limit)", "pass"),
    ),
    "report: nobody waits for it": (
        Edit(_complete, '"completed", awaited=prior.awaited', '"completed", awaited=False'),
    ),
    "failure: not counted": (
        Edit(
            "tasks.status_fold:apply_failure",
            'prior.failures + (counts == "failure")',
            "prior.failures",
        ),
    ),
    "failure: without end": (Edit(_fail, "failures >= spec.attempts", "False"),),
    "failure: one too few": (
        Edit(_fail, "failures >= spec.attempts", "failures >= spec.attempts - 1"),
    ),
    "failure: tried again at once": (Edit(_fail, "if counts and not final:", "if False:"),),
    "failure: a refusal is tried again": (
        Edit(_fail, "outcome == AttemptOutcome.REFUSED or ", ""),
    ),
    "failure: not logged": (
        Edit(
            _fail,
            "unit.log.append(\n"
            "        AttemptFailed(report.seq, report.lease, reason, error, counts, final, not_before_ns)\n"
            "    )",
            "pass",
        ),
    ),
    "exit: without end": (Edit(_fail, "after.expiries >= spec.expiries_max", "False"),),
    "exit: not counted": (
        Edit(
            "tasks.status_fold:apply_failure",
            'prior.expiries + (counts == "expiry")',
            "prior.expiries",
        ),
    ),
    "exit: nobody waits for it": (
        Edit("tasks.leases:mark_dead", "awaited=prior.awaited", "awaited=False"),
    ),
    # wait states
    "delay: none": (
        Edit(
            "tasks.unit_of_work:UnitOfWork.wait_state",
            "_not_before(body, status) > self.now_ns",
            "False",
        ),
    ),
    "delay: woken early": (
        Edit(
            "tasks.unit_of_work:UnitOfWork.promote_due",
            "self.now_ns + 1",
            "self.now_ns + 1_000_000_000",
        ),
    ),
    "delay: never woken": (
        Edit("tasks.unit_of_work:UnitOfWork.promote_due", "self.now_ns + 1", "1"),
    ),
    "park: in its old place, too": (
        Edit("tasks.unit_of_work:UnitOfWork.throttle", "txn.delete(key)", "pass"),
    ),
    "counts: not kept": (
        Edit(
            "tasks.model:CountDeltas.save", "getattr(counts, place) + n", "getattr(counts, place)"
        ),
    ),
    "stray: granted to anybody": (
        Edit(_grant, "task_names and spec.name not in task_names", "False"),
    ),
    "stray: never recalled": (
        Edit("tasks.unit_of_work:UnitOfWork.restore_routable", "while limit > 0:", "while False:"),
    ),
    "stray: holds up the others of its limit": (
        Edit("tasks.unit_of_work:UnitOfWork.set_unroutable", "if body.limit:", "if False:"),
    ),
    "stray: in its old place, too": (
        Edit(_grant, "_shrink_range(txn, key, row, first, last, count)", "pass"),
    ),
    # cancelling and redriving
    "cancel: stays where it waits": (
        Edit(_cancel, "unit.dequeue(packed_seq, body, spec, status)", "pass"),
    ),
    "cancel: its lease still counted": (
        Edit(_cancel, "unit.on_lease_end(spec, body.limit)", "pass"),
    ),
    "cancel: what has ended, too": (
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
    "cancel: not logged": (
        Edit("tasks.leases:mark_dead", "unit.log.append(TasksDead([seq], reason))", "pass"),
    ),
    "redrive: again and again": (Edit(_redrive, "if status.redriven_by:", "if False:"),),
    "redrive: what has completed": (
        Edit(
            _redrive,
            "status.state not in (TaskState.FAILED, TaskState.DEAD)",
            "status.state not in (TaskState.FAILED, TaskState.DEAD, TaskState.COMPLETED)",
        ),
    ),
    "redrive: the key stays with the old": (Edit(_redrive, "if body.key:", "if False:"),),
    # submitting
    "submit: seqs given again": (
        Edit(_submitted, "self._put(unit.keys.seq_counter, encode_int(self._seq))", "pass"),
    ),
    "submit: key not looked up": (
        Edit("tasks.submit:_find_by_key", "if packed_seq is None:", "if True:"),
    ),
    "submit: key not remembered": (Edit(_submit, "if new_task.key:", "if False:"),),
    "submit: other arguments under a key": (
        Edit("tasks.submit:_find_by_key", "args != new_task.args", "False"),
    ),
    "submit: not logged": (
        Edit(
            _submitted,
            "unit.log.append(TasksCreated(self._created, digest_rows(self._rows)))",
            "pass",
        ),
    ),
    "submit: does not wait for others": (
        Edit(_enqueue, "waits = dependents.register(unit, packed_seq, body.after)", "waits = 0"),
    ),
    "submit: after one that has failed": (
        Edit(_block, "status.state in (TaskState.FAILED, TaskState.DEAD)", "False"),
        Edit(_block, "status.state == TaskState.COMPLETED", "status.state >= TaskState.COMPLETED"),
    ),
    # dependents
    "dependents: told nothing": (
        Edit("tasks.dependents:release", "while released < limit:", "while False:"),
    ),
    "dependents: the first will do": (Edit(_tell, "waits=status.waits - 1", "waits=0"),),
    "dependents: run after a failure": (Edit(_tell, "if completed:", "if True:"),),
    "dependents: nobody knows that they wait": (
        Edit(_block, "if not status.awaited:", "if False:"),
    ),
    "dependents: those that died wake up": (
        Edit(
            _tell,
            "if status.state != TaskState.WAITING or not status.waits:",
            "if status.state == TaskState.LEASED:",
        ),
    ),
    # retention
    "retention: none": (Edit("tasks.admin:_remove_past_retention", "unit.now_ns + 1", "1 << 62"),),
    "retention: key kept": (
        Edit("tasks.admin:_remove_task", "if txn.get(key) == packed_seq:", "if False:"),
    ),
    "retention: blobs kept": (Edit("tasks.admin:_remove_task", "if blob:", "if False:"),),
    "retention: not counted": (
        Edit(
            "tasks.admin:_remove_task",
            "unit.counts.add(spec.queue, TaskState(status.state).name.lower(), -1)",
            "pass",
        ),
    ),
    # checkpoints
    "checkpoint: says another height": (
        Edit(
            f"{_check}:_read_chunk",
            "CheckpointChunk(lo, hi, height, fresh",
            "CheckpointChunk(lo, hi, height + 1, fresh",
        ),
    ),
    "checkpoint: a task left out": (
        Edit(f"{_check}:_read_chunk", "for key, _ in bodies:", "for key, _ in bodies[1:]:"),
    ),
    "checkpoint: log cut at the latest": (
        Edit(
            f"{_check}:install",
            "journal.checkpoint(txn, keys.subject, index.latest.height)",
            "journal.checkpoint(txn, keys.subject, journal.head(txn, keys.subject).height)",
        ),
    ),
    "checkpoint: the one before is swept": (
        Edit(
            "tasks.checkpoint:remove_unreferenced",
            "kept = {index.latest.number, index.before.number}",
            "kept = {index.latest.number}",
        ),
    ),
    "checkpoint: whoever was superseded goes on": (
        Edit("tasks.checkpoint:add_chunk", "building.checkpoint.number != number", "False"),
        Edit(f"{_check}:install", "building.checkpoint.number != number", "False"),
        Edit(f"{_check}:begin", "txn.now_ns < building.moved_ns + STALLED_NS", "False"),
    ),
}
