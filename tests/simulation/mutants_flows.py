"""Planted bugs of flows and schedules: each guard removed in turn (see `mutants`).

Runs with these mutants have their own actors (`workload_flows`).
"""

from __future__ import annotations

from tests.simulation.source_edits import Edit

_LEASE = "flows.operations:_require_lease"

FLOWS: dict[str, tuple[Edit, ...]] = {
    "commit: needs no live lease": (Edit(_LEASE, "not live or ", ""),),
    "commit: needs neither a live lease nor the present activation": (
        Edit(_LEASE, "not live or flow.head.task != work.task or ", ""),
    ),
    "commit: needs neither lease, activation nor run": (
        Edit(
            _LEASE, "not live or flow.head.task != work.task or flow.head.run != work.run", "False"
        ),
    ),
    # A former run has another activation too, and a worker ends with the generation of its store. So no run of the
    # simulator reaches these two guards alone. Unit tests kill the bugs.
    "commit: accepts a former run": (Edit(_LEASE, " or flow.head.run != work.run", ""),),
    "commit: accepts another generation": (
        Edit(_LEASE, " and generation == unit.txn.generation", ""),
    ),
    "end: ignores a cancellation that the code has not seen": (
        Edit(
            "flows.operations:commit_within",
            "bool(unseen) and _ends(work) and _has_cause(unit, flow, work.known, unseen)",
            "False",
        ),
    ),
    "compensation: runs in the order of registration": (
        Edit("flows.execution:FlowExecution._compensate", "reversed(undos)", "undos"),
    ),
    "end: repeats a commit whose outcome is unknown": (
        Edit(
            "workers.flows.activation:Activation._end",
            "if is_stopped:\n            return await self._fail(self._stopped())",
            "if is_stopped:\n            try:\n                return await self._fail(self._stopped())\n"
            "            except Exception:\n                return await self._fail(self._stopped())",
        ),
    ),
    "compensation: is skipped at a failure": (
        Edit(
            "workers.flows.activation:Activation._fail",
            "if self._execution.has_undos:",
            "if False:",
        ),
    ),
    "compensation: drops the last registered one": (
        Edit(
            "flows.execution:FlowExecution._compensate", "reversed(undos)", "reversed(undos[:-1])"
        ),
    ),
    "compensation: its failure has no dead letter": (
        Edit(
            "flows.compensation_dead_letters:add_if_compensation_failed",
            "not record.name.startswith(UNDO_PREFIX)",
            "True",
        ),
    ),
    "compensation: a redrive keeps its dead letter": (
        Edit(
            "flows.compensation_redrive:redrive_compensations",
            "dead_letters.discard_dead.fn(txn, compensation_dead_letters.queue_of(universe), letters)",
            "pass",
        ),
    ),
    "compensation: a redrive does not run it again": (
        Edit("flows.execution:RecordQueue._forget_undo", "self.outcomes.pop(failed, None)", "pass"),
    ),
    "send: ignores its key": (Edit("flows.mailbox:send", "if key and (row", "if False and (row"),),
    "inbox: gives the event and keeps it": (
        Edit("flows.mailbox:take_mail", "unit.txn.delete(key)", "pass"),
    ),
    "inbox: drops an event without a receiver": (
        Edit(
            "flows.mailbox:_deliver",
            "unit.txn.put(unit.keys.mail + tuples.pack((flow.seq, number)), codec.pack(stored))",
            "pass",
        ),
    ),
    "inbox: drops the unseen events of a run that ends": (
        Edit(
            "flows.operations:commit_within",
            "mailbox.return_unseen(unit, flow, work.known, unseen)",
            "pass",
        ),
    ),
    "inbox: drops the event of a cancelled receive": (
        Edit("flows.mailbox:return_received", "if not receives:", "if True:"),
    ),
    "inbox: returns the event of a cancelled receive at every replay": (
        Edit("flows.mailbox:return_received", "returned.pop(record.mail, None)", "pass"),
    ),
    "receive: does not wake the flow": (Edit("flows.mailbox:_deliver", "unit.wake(flow)", "pass"),),
    "sleep: ends early": (
        Edit("flows.due_times:fire_due", "unit.now_ns + 1", "unit.now_ns + 200_000_000"),
    ),
    "sleep: never ends": (Edit("flows.due_times:fire_due", "unit.now_ns + 1", "0"),),
    "timeout: is not recorded": (
        Edit("flows.due_times:_fire", "unit.append(flow, FlowTimedOut())", "pass"),
    ),
    "timeout: reaches a flow that is cancelled or compensates": (
        Edit("flows.due_times:_fire", "if not head.end_state and not head.cancelled:", "if True:"),
    ),
    "cancel: the code gets further steps": (
        Edit(
            "flows.execution:FlowExecution.step",
            "(self.cancelled or self.timed_out) and self.compensation is None",
            "False",
        ),
    ),
    "cancel: does not wake the flow": (
        Edit("flows.operations:cancel_within", "unit.wake(flow)\n    return True", "return True"),
    ),
    "end: leaves its child flows running": (
        Edit(
            "flows.operations:finish", "children.close_children(unit, flow, cancel_within)", "pass"
        ),
        Edit("flows.children:cancel_open", "cancel_flow(unit, unit.load(step.child))", "pass"),
    ),
    "end: cancels abandoned children": (
        Edit(
            "flows.children:close_children",
            "parent is not None and parent.cancels and child.head.state not in ENDED",
            "child.head.state not in ENDED",
        ),
    ),
    "child: its end resolves a step of a later run": (
        Edit("flows.children:resolve_step", "flow.head.run != run or ", ""),
        Edit("flows.children:_is_awaited", "step.child == flow.seq", "True"),
    ),
    "world: the end of its flow is not delivered": (
        Edit("flows.children:notify_parent", "_answer_world(unit, flow, parent.intent)", "pass"),
    ),
    "world: the second end of a redriven flow is delivered too": (
        Edit(
            "flows.children:_answer_world",
            "intent.intent_hash) is None:",
            "intent.intent_hash) == 0:",
        ),
    ),
    "replay: gives an outcome to a step with other arguments": (
        Edit(
            "flows.execution:FlowExecution._deliver_outcome",
            "not call.accepts(record.digest)",
            "False",
        ),
    ),
    "resume: submits no activation": (
        Edit("flows.operations:resume", "unit.activate(flow)", "pass"),
    ),
    "fork: takes over the step of the fork": (
        Edit(
            "flows.fork:_records_before",
            "record.position < position",
            "record.position <= position",
        ),
    ),
    "fork: compensates the steps of its parent": (
        Edit(
            "flows.execution:FlowExecution.undo",
            "call.identity in self.records.parent_undos",
            "False",
        ),
    ),
    "fork: forgets the compensations of its parent": (
        Edit("flows.fork:_forked", "tuple(undos)", "()"),
    ),
    "fork: leaves out the compensations behind its first step": (
        Edit(
            "flows.fork:_forked", "if first < undo.position < position", "if first < undo.position"
        ),
    ),
    "fork: returns the events of its parent to its inbox": (
        Edit("flows.mailbox:return_received", " and not forked.took(index, record)", ""),
    ),
    "replay: forgets the positions of other code": (
        Edit(
            "flows.execution:FlowExecution._deliver_outcome",
            "max(self._positions, record.position)",
            "self._positions",
        ),
    ),
    "order: a set of tasks has the order of addresses": (
        Edit("flows.loop:FlowTask.__hash__", "self.number", "id(self) >> 4"),
    ),
    "order: a set of steps has the order of addresses": (
        Edit("flows.loop:FlowFuture.__hash__", "self.number", "id(self) >> 4"),
    ),
    "compensation: leaves the other tasks of the code open": (
        Edit("flows.execution:FlowExecution._start_compensation", "self.close()", "0"),
        Edit(
            "flows.execution:FlowExecution._start_compensation",
            "self.loop = self.loop.make_next()",
            "pass",
        ),
    ),
    "cancel: leaves the steps of other tasks open": (
        Edit("flows.execution:FlowExecution._cancel_main", "call.future.cancel()", "pass"),
    ),
    "generator: its clean-up is not awaited": (
        Edit(
            "flows.async_generators:AsyncGenerators.close_all", "if not self._closers:", "if True:"
        ),
    ),
    "generator: its clean-up runs when the garbage collector finds it": (
        Edit(
            "flows.async_generators:AsyncGenerators.finalize",
            " and _collecting_thread != threading.get_ident()",
            "",
        ),
    ),
    "end: an exit of the process stops the close of the code": (
        Edit(
            "flows.async_generators:run_to_end",
            "loop.unhandled.append(error.with_traceback(None))",
            "raise",
        ),
    ),
    "commit queue: one refused commit fails all of its operation": (
        Edit(
            "workers.flows.commit_queue:CommitQueue._send",
            "except HoldfastError:\n            await self._send_each(batch)",
            "except HoldfastError as error:\n            _fail(batch, error)",
        ),
    ),
    "commit queue: repeats an operation whose outcome is unknown": (
        Edit(
            "workers.flows.commit_queue:CommitQueue._send",
            "except CommitUnknown as error:\n            _fail(batch, error)",
            "except CommitUnknown:\n            await self._send_each(batch)",
        ),
    ),
    "commit queue: gives the answers to other flows": (
        Edit(
            "workers.flows.commit_queue:CommitQueue._send",
            "zip(batch, answers",
            "zip(batch[::-1], answers",
        ),
    ),
    "commit queue: has no limit": (
        Edit(
            "workers.flows.commit_queue:CommitQueue._join",
            "if len(joined) >= COMMITS_MAX:",
            "if False:",
        ),
    ),
    "batch commit: ignores a commit": (
        Edit(
            "flows.commit_batch:commit_many",
            "for work in works]\n    unit.close",
            "for work in [*works[:-1], works[0]]]\n    unit.close",
        ),
    ),
    "timer: leaves the step open": (
        Edit(
            "flows.due_times:_fire",
            "unit.delete_open(flow, name, occurrence, replace(step, due_ns=0))",
            "pass",
        ),
    ),
    "start: ignores its key": (
        Edit("flows.operations:start_within", "if index_key and (packed", "if False and (packed"),
    ),
    "receive: takes the event and leaves the step open": (
        Edit("flows.mailbox:_deliver", "unit.delete_open(flow, name, occurrence, step)", "pass"),
    ),
    "end: does not notify the parent": (
        Edit("flows.operations:finish", "children.notify_parent(unit, flow)", "pass"),
    ),
    "suspend: ignores unseen records": (
        Edit("flows.operations:commit_within", "not (unseen or resolved)", "True"),
    ),
    "wake: submits no activation": (
        Edit("flows.unit_of_work:FlowUnit.wake", "self.activate(flow)", "pass"),
    ),
    "wake: activates a running flow again": (
        Edit("flows.unit_of_work:FlowUnit.wake", "if flow.head.task:", "if False:"),
    ),
    "child task: its end is not recorded": (
        Edit("flows.children:resolve_step", "unit.wake(flow)", "pass"),
    ),
    "occurrence: is used again when it is due": (
        Edit(
            "schedules.operations:_fire",
            "unit.occurrence(schedule.name, due_ns) is None",
            "True",
        ),
    ),
    "overlap: is ignored": (
        Edit(
            "schedules.policies:judge_overlap",
            'overlap == "allow" or not (last_is_open or queued)',
            "True",
        ),
    ),
    "overlap: skips a backfilled occurrence": (
        Edit("schedules.policies:judge_overlap", " and cause != BACKFILL", ""),
    ),
    "queue: an occurrence is not started at the end of the last one": (
        Edit("schedules.end_callbacks:on_flow_end", "schedules.start_queued(name)", "pass"),
    ),
    "backfill: starts a started occurrence again": (
        Edit("schedules.operations:backfill", "if used is None or is_new:", "if True:"),
    ),
    "backfill: is not judged by the load limits": (
        Edit("schedules.unit_of_work:ScheduleUnit.judge_backfill", "if count:", "if False:"),
    ),
    "backfill: its later commits are not judged": (
        Edit("schedules.operations:backfill", " + later", ""),
    ),
    "backfill: its later commits are judged again": (
        Edit("schedules.operations:backfill", "if not accepted:", "if True:"),
    ),
    "backfill: exceeds the queue of its schedule": (
        Edit(
            "schedules.unit_of_work:ScheduleUnit.judge_backfill",
            "row.queued + count - starts > policies.QUEUED_MAX",
            "False",
        ),
    ),
    "pause: leaves the due row": (
        Edit(
            "schedules.unit_of_work:ScheduleUnit._save",
            "if stored is not None and stored.is_active:",
            "if stored is not None and row.is_active:",
        ),
    ),
}
