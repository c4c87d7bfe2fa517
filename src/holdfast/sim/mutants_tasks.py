"""Planted bugs in tasks: granting, extending, expiring, reports, limits, dependents, the log and its
checkpoints."""

from __future__ import annotations

from holdfast.sim.edits import Edit

_grant = "tasks.lease:_grant_from"
_shorten = "tasks.lease:_shorten"
_give = "tasks.giving:Giving.save"
_asked = "tasks.lease:grant"
_expire = "tasks.lease:_expire"
_overdue = "tasks.lease:_overdue"
_extend = "tasks.lease:extend"
_live = "tasks.lease:live"
_settle = "tasks.settle:_settle"
_fail = "tasks.settle:_fail"
_decision = "tasks.decision:Decision"
_submit = "tasks.submit:_create"
_block = "tasks.dependents:block"
_tell = "tasks.dependents:_tell"
_cancel = "tasks.control:cancel"
_redrive = "tasks.control:redrive"
_check = "tasks.checkpoint"
_runs = "tasks.runs"

_EARLY = Edit(_overdue, "expiries + pack_int(decision.now_ns + 1)", "expiries + pack_int(1 << 62)")
_HELD = Edit(_expire, "if status.expires_ns > now_ns:", "if False:")
_AGAIN = Edit(_settle, "and was.lease == report.lease\n", "\n")

TASKS: dict[str, tuple[Edit, ...]] = {
    # granting
    "grant: stays in its queue": (Edit(_shorten, "txn.delete(key)", "pass"),),
    "grant: lease numbers given again": (
        Edit(_give, "txn.put(keys.lease, int_bytes(self._number))", "pass"),
    ),
    "grant: attempt not counted": (Edit("tasks.board:granted", "was.attempt + 1", "was.attempt"),),
    "grant: not logged": (
        Edit(_give, "decision.log.say(Granted(lease_no, worker, expires_ns, batch.tasks))", "pass"),
    ),
    "grant: nobody looks when its time is up": (
        Edit(_give, "txn.put(row_key, pack(Batch", "len(pack(Batch"),
    ),
    "grant: lasts a second longer": (
        Edit(
            "tasks.giving:Giving._batch", "now_ns + lease_ns", "now_ns + lease_ns + 1_000_000_000"
        ),
    ),
    "grant: suspects among the others": (
        Edit(_asked, "if alone and limit:", "if limit:"),
        Edit(
            _asked,
            "kind, 1, grants, names, suspects=True",
            "kind, limit, grants, names, suspects=True",
        ),
    ),
    "grant: the last first": (
        Edit(
            _grant,
            "txn.scan(start, tuples.after(lane), asked)",
            "txn.scan(start, tuples.after(lane), asked, True)",
        ),
    ),
    "grant: nothing is swept before": (
        Edit(_asked, "_expire(decision, EXPIRED_MAX)", "pass"),
        Edit(_asked, "if _overdue(decision):", "if False:"),
    ),
    "grant: before all that is overdue has expired": (
        Edit(_asked, "_expire(decision, EXPIRED_MAX)", "_expire(decision, 1)"),
        Edit(_asked, "if _overdue(decision):", "if False:"),
    ),
    "suspect: from the first on": (Edit("tasks.rows:is_suspect", "spec.expiries_max - 1", "1"),),
    "suspect: never": (
        Edit("tasks.rows:is_suspect", "spec.expiries_max - 1", "spec.expiries_max"),
    ),
    # runs
    "run: the rest of it is lost": (Edit(_shorten, "if first + count <= last:", "if False:"),),
    "run: the rest begins too late": (
        Edit(
            _shorten,
            "pack_int(first + count), run_row(first + count",
            "pack_int(first + count + 1), run_row(first + count + 1",
        ),
    ),
    "run: cancelled, and still in it": (
        Edit(
            f"{_runs}:lift",
            "txn.put(key, run_row(first, seq - 1))",
            "txn.put(key, run_row(first, seq))",
        ),
    ),
    "run: those after a cancelled one are lost": (
        Edit(f"{_runs}:lift", "if seq < last:", "if False:"),
    ),
    "run: only its first is found": (
        Edit(f"{_runs}:find", "before = txn.scan(lane, key, 1, True)", "before = []"),
    ),
    "run: awaited, and still in it": (
        Edit(_block, "decision.single_out(packed, decision.known(packed)[1])", "pass"),
    ),
    "held: nobody finds it by its task": (
        Edit(f"{_runs}:Leases.give", "txn.put(keys.held_at + pack_int(first), number)", "pass"),
    ),
    "held: completed, and still held": (Edit(f"{_runs}:Open.take", "self.changed = True", "pass"),),
    "held: the others of it are let go": (
        Edit(f"{_runs}:Leases.save", "if one.runs:", "if False:"),
    ),
    "held: what left it is not looked at": (
        Edit(
            f"{_runs}:Leases.leave",
            "self.look_at(status.expires_ns, one.lease, status.worker, [seq])",
            "pass",
        ),
    ),
    "held: looked at no more when others are left": (
        Edit(f"{_runs}:Leases.save", "if not one.others:", "if True:"),
        Edit(
            f"{_runs}:Leases.save",
            "for (at_ns, lease), (worker, seqs) in self._listed.items():",
            "for (at_ns, lease), (worker, seqs) in ():",
        ),
    ),
    "held: has a status, and is still in it": (
        Edit(f"{_runs}:Leases.leave", "one.take(seq)", "pass"),
    ),
    "held: completes after its time": (Edit(_settle, " and now_ns < held.held.expires_ns", ""),),
    "held: one too many completes": (
        Edit(f"{_runs}:Open.at", "seq <= runs[at][1]", "seq <= runs[at][1] + 1"),
    ),
    "held: never expires": (
        Edit(_expire, "batch.named if held is None else batch.named + held.tasks()", "batch.named"),
    ),
    "held: not counted when completed": (
        Edit(_settle, "decision.unlease(spec, count=len(seqs))", "pass"),
    ),
    "held: not kept when completed": (
        Edit(
            _settle,
            'decision.end_all(seqs, spec, "completed")',
            'decision.tally.add(spec.queue, "completed", len(seqs))',
        ),
    ),
    "held: in no checkpoint": (
        Edit(
            f"{_check}:_read_chunk", "held.get(seq, FRESH) if row is None", "FRESH if row is None"
        ),
    ),
    "held: a result for all": (Edit(_settle, "if result != last:", "if last is None:"),),
    # limits
    "limit: of the queue not looked at": (
        Edit("tasks.lease:_room", 'most - decision.tally.now(queue, "leased")', "most"),
    ),
    "limit: of the key not looked at": (
        Edit(f"{_decision}.begin_limited", "most and self.txn.count(key) >= most", "False"),
    ),
    "limit: not counted": (Edit(f"{_decision}.begin_limited", "self.txn.add(key, 1)", "pass"),),
    "limit: held for ever": (Edit(f"{_decision}.unlease", "if limit:", "if False:"),),
    "limit: those that wait are not let in": (
        Edit(f"{_decision}.end_limited", "self.let_in(spec.queue, limit)", "pass"),
    ),
    "limit: let in, cancelled, and nobody follows": (
        Edit(f"{_decision}._left", "self.let_in(spec.queue, body.limit)", "pass"),
    ),
    # the end of leases
    "expiry: not logged": (
        Edit(_expire, "decision.log.say(Expired(batch.lease, [seq for seq, _, _ in out]))", "pass"),
    ),
    "expiry: before its time": (_EARLY, _HELD),
    "expiry: never": (
        Edit(_overdue, "expiries + pack_int(decision.now_ns + 1)", "expiries + pack_int(1)"),
    ),
    "expiry: extended ones too": (_HELD,),
    "expiry: of another lease": (
        Edit(
            _expire,
            "status.state != State.LEASED or status.lease != batch.lease",
            "status.state != State.LEASED",
        ),
        _HELD,
    ),
    "expiry: looked at once": (
        Edit(
            _expire,
            "decision.leases.look_at(status.expires_ns, batch.lease, batch.worker, [seq])",
            "pass",
        ),
    ),
    "expiry: not counted": (Edit("tasks.board:expired", "was.expiries + 1", "was.expiries"),),
    "expiry: without end": (
        Edit("tasks.lease:_give_up", "after.expiries >= spec.expiries_max", "False"),
    ),
    "lease: of anybody": (Edit(_live, "status.lease == lease and ", ""),),
    "lease: for ever": (Edit(_live, " and now_ns < status.expires_ns", ""),),
    "lease: of any state, for ever": (
        Edit(_live, "status.state == State.LEASED and ", ""),
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
        Edit("tasks.board:extended", "at_ns if progressed else was.progress_ns", "was.progress_ns"),
    ),
    "extend: not logged": (Edit(_extend, "if said.tasks:", "if False:"),),
    "extend: not written": (
        Edit(
            _extend,
            "decision.write(packed_seq, board.extended(status, until_ns, hold.progressed, now_ns))",
            "pass",
        ),
    ),
    # reports
    "report: of another generation": (
        Edit(_settle, "if not current or not live", "if not live"),
        Edit(_settle, "leases.get(lease) if current else None", "leases.get(lease)"),
    ),
    "report: a late one is not on record": (
        Edit(_settle, "decision.log.say(Cancelled(report.seq, report.lease, worker))", "pass"),
    ),
    "report: a late one is told that it counted": (
        Edit(_settle, "Answer.COMMITTED if again else Answer.CANCELLED", "Answer.COMMITTED"),
    ),
    "report: any lease of what has completed": (_AGAIN,),
    "report: the same again is refused": (
        Edit(
            _settle,
            "report.end == End.OK\n                and was",
            "False\n                and was",
        ),
    ),
    "report: completion not logged": (Edit(_settle, "if tasks:", "if False:"),),
    "report: result lost": (
        Edit(_settle, "now_ns, result, blob", 'now_ns, b"", blob'),
        Edit(_settle, "held.status, now_ns, result", "held.status, now_ns"),
    ),
    "report: lease still counted": (Edit(_settle, "decision.unlease(spec, body.limit)", "pass"),),
    "report: nobody waits for it": (
        Edit(_settle, '"completed", awaited=was.awaited', '"completed", awaited=False'),
    ),
    "failure: not counted": (
        Edit("tasks.board:failed", 'was.failures + (counts == "failure")', "was.failures"),
    ),
    "failure: without end": (Edit(_fail, "failures >= spec.attempts", "False"),),
    "failure: one too few": (
        Edit(_fail, "failures >= spec.attempts", "failures >= spec.attempts - 1"),
    ),
    "failure: tried again at once": (Edit(_fail, "if counts and not final:", "if False:"),),
    "failure: a refusal is tried again": (Edit(_fail, "end == End.REFUSED or ", ""),),
    "failure: not logged": (
        Edit(
            _fail,
            "decision.log.say(Failed(report.seq, report.lease, reason, error, counts, final, not_before_ns))",
            "pass",
        ),
    ),
    "exit: without end": (Edit(_fail, "after.expiries >= spec.expiries_max", "False"),),
    "exit: not counted": (
        Edit("tasks.board:failed", 'was.expiries + (counts == "expiry")', "was.expiries"),
    ),
    "exit: nobody waits for it": (
        Edit("tasks.lease:bury", "awaited=was.awaited", "awaited=False"),
    ),
    # places
    "delay: none": (
        Edit(f"{_decision}.place", "_not_before(body, status) > self.now_ns", "False"),
    ),
    "delay: woken early": (
        Edit(f"{_decision}.wake_due", "self.now_ns + 1", "self.now_ns + 1_000_000_000"),
    ),
    "delay: never woken": (Edit(f"{_decision}.wake_due", "self.now_ns + 1", "1"),),
    "park: in its old place, too": (Edit(f"{_decision}.park", "txn.delete(key)", "pass"),),
    "counts: not kept": (
        Edit("tasks.rows:Tally.save", "getattr(counts, place) + n", "getattr(counts, place)"),
    ),
    "stray: granted to anybody": (Edit(_grant, "names and spec.name not in names", "False"),),
    "stray: never recalled": (Edit(f"{_decision}.recall", "while limit > 0:", "while False:"),),
    "stray: holds up the others of its limit": (
        Edit(f"{_decision}.stray", "if body.limit:", "if False:"),
    ),
    "stray: in its old place, too": (
        Edit(_grant, "_shorten(txn, key, row, first, last, count)", "pass"),
    ),
    # cancelling and redriving
    "cancel: stays where it waits": (
        Edit(_cancel, "decision.leave(packed_seq, body, spec, status)", "pass"),
    ),
    "cancel: its lease still counted": (
        Edit(_cancel, "decision.unlease(spec, body.limit)", "pass"),
    ),
    "cancel: what has ended, too": (
        Edit(_cancel, "status.state not in (State.WAITING, State.LEASED)", "False"),
        Edit("tasks.board:buried", "(was.state, Event.BURY) not in _next", "False"),
        Edit("tasks.decision:Decision.leave", 'self.tally.add(spec.queue, "blocked", -1)', "pass"),
    ),
    "cancel: not logged": (
        Edit("tasks.lease:bury", "decision.log.say(Dead([seq], reason))", "pass"),
    ),
    "redrive: again and again": (Edit(_redrive, "if status.redriven_by:", "if False:"),),
    "redrive: what has completed": (
        Edit(
            _redrive,
            "status.state not in (State.FAILED, State.DEAD)",
            "status.state not in (State.FAILED, State.DEAD, State.COMPLETED)",
        ),
    ),
    "redrive: the key stays with the old": (Edit(_redrive, "if body.key:", "if False:"),),
    # submitting
    "submit: seqs given again": (Edit(_submit, "put(keys.seq, int_bytes(seq))", "pass"),),
    "submit: key not looked up": (Edit("tasks.submit:_keyed", "if found is None:", "if True:"),),
    "submit: key not remembered": (Edit(_submit, "if one.key:", "if False:"),),
    "submit: other arguments under a key": (
        Edit("tasks.submit:_keyed", "args != one.args", "False"),
    ),
    "submit: not logged": (
        Edit(_submit, "decision.log.say(Created(created, digest_of(rows)))", "pass"),
    ),
    "submit: does not wait for others": (
        Edit(_submit, "waits = dependents.block(decision, packed_seq, others)", "waits = 0"),
    ),
    "submit: after one that has failed": (
        Edit(_block, "status.state in (State.FAILED, State.DEAD)", "False"),
        Edit(_block, "status.state == State.COMPLETED", "status.state >= State.COMPLETED"),
    ),
    # dependents
    "dependents: told nothing": (
        Edit("tasks.dependents:release", "while told < limit:", "while False:"),
    ),
    "dependents: the first will do": (Edit(_tell, "waits=status.waits - 1", "waits=0"),),
    "dependents: run after a failure": (Edit(_tell, "if completed:", "if True:"),),
    "dependents: nobody knows that they wait": (
        Edit(_block, "if not status.awaited:", "if False:"),
    ),
    "dependents: those that died wake up": (
        Edit(
            _tell,
            "if status.state != State.WAITING or not status.waits:",
            "if status.state == State.LEASED:",
        ),
    ),
    # forgetting
    "retention: none": (Edit("tasks.control:_collect", "decision.now_ns + 1", "1 << 62"),),
    "retention: key kept": (
        Edit("tasks.control:_forget", "if txn.get(key) == packed_seq:", "if False:"),
    ),
    "retention: blobs kept": (Edit("tasks.control:_forget", "if blob:", "if False:"),),
    "retention: not counted": (
        Edit(
            "tasks.control:_forget",
            "decision.tally.add(spec.queue, State(status.state).name.lower(), -1)",
            "pass",
        ),
    ),
    # checkpoints
    "checkpoint: says another height": (
        Edit(
            f"{_check}:_read_chunk",
            "Chunk(lo, hi, height, fresh",
            "Chunk(lo, hi, height + 1, fresh",
        ),
    ),
    "checkpoint: a task left out": (
        Edit(f"{_check}:_read_chunk", "for key, _ in bodies:", "for key, _ in bodies[1:]:"),
    ),
    "checkpoint: log cut at the latest": (
        Edit(
            f"{_check}:install",
            "journal.checkpoint(txn, keys.subject, now.latest.height)",
            "journal.checkpoint(txn, keys.subject, journal.head(txn, keys.subject).height)",
        ),
    ),
    "checkpoint: the one before is swept": (
        Edit(
            f"{_check}:sweep",
            "kept = {now.latest.number, now.before.number}",
            "kept = {now.latest.number}",
        ),
    ),
    "checkpoint: whoever was superseded goes on": (
        Edit(f"{_check}:add", "building.checkpoint.number != number", "False"),
        Edit(f"{_check}:install", "building.checkpoint.number != number", "False"),
        Edit(f"{_check}:begin", "txn.now_ns < building.moved_ns + STALLED_NS", "False"),
    ),
}
