"""Planted bugs in load limits and pauses of queues: the judgement of new work, its counters, placement and grants.
`tests/limits` kills each one."""

from __future__ import annotations

from tests.simulation.source_edits import Edit

_judge_tasks = "tasks.unit_of_work:UnitOfWork.judge_new_tasks"
_create_judged = "tasks.submit:_create_judged"
_take = "tasks.submit:_Rooms.take"
_judge_event = "world.load_admission:judge_event"
_put_ingress = "world.ingress:put_with_limits"

LIMITS: dict[str, tuple[Edit, ...]] = {
    "limit: accepts one task too many in a queue": (
        Edit(_judge_tasks, "waiting > queue_max", "waiting > queue_max + 1"),
    ),
    "limit: accepts one task too many in a universe": (
        Edit(_judge_tasks, "waiting > limits.tasks", "waiting > limits.tasks + 1"),
    ),
    "limit: refuses the repeat of an accepted submission": (
        Edit(
            _create_judged, "(unit.keys.seq_counter) > before", "(unit.keys.seq_counter) >= before"
        ),
    ),
    "limit: forgets the tasks that are accepted in the same commit": (
        Edit(_take, "taken.total() + 1", "1"),
    ),
    "limit: keeps leased tasks in the backlog": (
        Edit(
            "tasks.unit_of_work:UnitOfWork._save_backlog",
            "load_limits.TASKS, change)",
            "load_limits.TASKS, max(change, 0))",
        ),
    ),
    "limit: counts no task that exists when it is set": (
        Edit("workers.limit_settings:_count", "row.counts.waiting for row", "0 for row"),
    ),
    "limit: judges no flow": (
        Edit("flows.operations:judge_start", "unit.tasks.judge_new_tasks(queues, count)", "pass"),
    ),
    "limit: judges no occurrence": (
        Edit(
            "schedules.unit_of_work:ScheduleUnit._judge_start",
            "self.flows.tasks.judge_new_tasks([definition.task.queue], count)",
            "pass",
        ),
    ),
    "limit: counts the arguments of tasks from before it was set": (
        Edit(
            "tasks.unit_of_work:UnitOfWork._count_ended",
            "if body is not None and body.created_ns >= limits.bytes_since_ns",
            "if body is not None",
        ),
    ),
    "limit: keeps the arguments of ended tasks": (
        Edit("tasks.unit_of_work:UnitOfWork.finish_many", "self._count_ended(seqs)", "pass"),
    ),
    "limit: keeps the bytes of read messages": (
        Edit("durable.inbox:advance", "load_limits.BYTES, -size)", "load_limits.BYTES, 0)"),
    ),
    "limit: accepts one event too many in an inbox": (
        Edit(_judge_event, "depth > limits.inbox", "depth > limits.inbox + 1"),
    ),
    "limit: accepts mail into a full inbox": (
        Edit(
            "world.load_admission:inbox_max",
            "limits.inbox or INBOX_DEPTH_MAX",
            "INBOX_DEPTH_MAX",
        ),
    ),
    "limit: refuses the repeat of an accepted event": (
        Edit(_put_ingress, "key is None or not inbox.is_delivered(txn, subject, key)", "True"),
    ),
    "limit: refuses receipts": (
        Edit(_put_ingress, "ingress.kind is IngressKind.EVENT and is_new", "is_new"),
    ),
    "limit: keeps ended effects in the backlog": (
        Edit("durable.item:QueueCounterDelta._count_open", "if opened:", "if opened > 0:"),
    ),
    "limit: ignores the backlog of a kind of effects": (
        Edit("world.load_admission:judge_emissions", "found >= kind_max", "False"),
    ),
    "limit: ignores the backlog of timers": (
        Edit("world.load_admission:judge_emissions", "found >= limits.timers", "False"),
    ),
    "limit: places one world too many on a worker": (
        Edit(
            "leadership.placement:choose_with_room",
            "loads.get(worker, 0) < worlds_max",
            "loads.get(worker, 0) <= worlds_max",
        ),
    ),
    "queue pause: grants ready tasks": (
        Edit("tasks.leases:_queue_capacity", "if limits.paused_ns:", "if False:"),
    ),
    "queue pause: ends with a new limit": (
        Edit("tasks.admin:set_limits", ", stored.paused_ns)", ")"),
    ),
    "queue pause: notifies no worker at its end": (
        Edit("tasks.admin:set_queue_paused", "if not paused:", "if False:"),
    ),
    "queue pause: shows workers work that they do not get": (
        Edit("tasks.queries:_has_work", "limits.paused_ns or ", ""),
    ),
    "limit keys: take no turns": (
        Edit(
            "tasks.fair_turns:add",
            "keys.fair + lane + pack_int(rank)",
            "keys.fair + lane + pack_int(1)",
        ),
    ),
    "limit keys: do not advance the reached rank": (
        Edit("tasks.fair_turns:grant", "if rank > txn.count(reached):", "if False:"),
    ),
    "limit keys: keep the place of a throttled task": (
        Edit(
            "tasks.unit_of_work:UnitOfWork.throttle",
            "fair_turns.remove(txn, self.keys, spec, body.limit, packed_seq)",
            "pass",
        ),
    ),
    "limit: accepts one event too many in the inbox of a flow": (
        Edit("flows.mailbox:_judge", "depth > limits.flow_inbox", "depth > limits.flow_inbox + 1"),
    ),
    "limit: refuses the event of a waiting receive": (
        Edit(
            "flows.mailbox:_judge", "if _find_receiver(unit, flow, mail.type) is not None:", "if 0:"
        ),
    ),
    "limit: ignores the bytes of events of flows": (
        Edit("flows.mailbox:_judge", "if limits.bytes_in_flight:", "if False:"),
    ),
    "limit: keeps the bytes of received events of flows": (
        Edit("flows.unit_of_work:FlowUnit.count_event", "sign * size", "max(sign, 0) * size"),
    ),
    "limit: keeps received events in the depth of an inbox": (
        Edit(
            "flows.unit_of_work:FlowUnit.count_event",
            "flow.head.unread + sign, 0",
            "flow.head.unread + sign, flow.head.unread",
        ),
    ),
    "limit: keeps the bytes of events of ended flows": (
        Edit("flows.unit_of_work:FlowUnit._save", "was_ended != (head.state in ENDED)", "False"),
    ),
}
