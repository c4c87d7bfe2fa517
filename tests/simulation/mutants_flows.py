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
    "compensation: runs in the order of registration": (
        Edit("flows.execution:FlowExecution._compensate", "reversed(undos)", "undos"),
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
    "send: ignores its key": (
        Edit("flows.operations:send", "if key and (row", "if False and (row"),
    ),
    "inbox: gives the event and keeps it": (
        Edit("flows.operations:_take_mail", "unit.txn.delete(key)", "pass"),
    ),
    "inbox: drops an event without a receiver": (
        Edit(
            "flows.operations:_deliver",
            "unit.txn.put(unit.keys.mail + tuples.pack((flow.seq, number)), codec.pack(stored))",
            "pass",
        ),
    ),
    "receive: does not wake the flow": (
        Edit("flows.operations:_deliver", "unit.wake(flow)", "pass"),
    ),
    "sleep: ends early": (
        Edit("flows.operations:fire_due", "unit.now_ns + 1", "unit.now_ns + 200_000_000"),
    ),
    "sleep: never ends": (Edit("flows.operations:fire_due", "unit.now_ns + 1", "0"),),
    "cancel: does not wake the flow": (
        Edit("flows.operations:cancel_within", "unit.wake(flow)\n    return True", "return True"),
    ),
    "end: leaves its child flows running": (
        Edit(
            "flows.operations:finish", "children.close_children(unit, flow, cancel_within)", "pass"
        ),
        Edit("flows.children:cancel_open", "cancel_flow(unit, unit.load(step.child))", "pass"),
    ),
    "timer: leaves the step open": (
        Edit(
            "flows.operations:_fire",
            "unit.delete_open(flow, name, occurrence, replace(step, due_ns=0))",
            "pass",
        ),
    ),
    "start: ignores its key": (
        Edit("flows.operations:start_within", "if index_key and (packed", "if False and (packed"),
    ),
    "receive: takes the event and leaves the step open": (
        Edit("flows.operations:_deliver", "unit.delete_open(flow, name, occurrence, step)", "pass"),
    ),
    "end: does not notify the parent": (
        Edit("flows.operations:finish", "children.notify_parent(unit, flow)", "pass"),
    ),
    "suspend: ignores unseen records": (
        Edit("flows.operations:commit", "not (unseen or resolved)", "True"),
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
    "pause: leaves the due row": (
        Edit(
            "schedules.unit_of_work:ScheduleUnit._save",
            "if stored is not None and stored.is_active:",
            "if stored is not None and row.is_active:",
        ),
    ),
}
