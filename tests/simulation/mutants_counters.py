"""Planted bugs in the indexes of tags, error groups and counts of ended work. `tests/api/test_planted_bugs.py` kills them."""

from __future__ import annotations

from tests.simulation.source_edits import Edit

_groups = "durable.error_groups"
_letters = "durable.dead_letters"
_tasks = "tasks.unit_of_work:UnitOfWork"
_flows = "flows.unit_of_work:FlowUnit"

COUNTERS: dict[str, tuple[Edit, ...]] = {
    "tags: lists no new task": (
        Edit("tasks.submit:_TaskBatch.add", "tags.add(unit.txn, unit.keys.tags, body.tag, packed_seq)", "pass"),
    ),
    "tags: keeps a removed task": (
        Edit("tasks.admin:_remove_task", "tags.remove(txn, keys.tags, body.tag, packed_seq)", "pass"),
    ),
    "tags: lists no new flow": (
        Edit(f"{_flows}.create", "tags.add(self.txn, self.keys.tags, body.tag, pack_int(seq))", "pass"),
    ),
    "tags: keeps an ended effect": (
        Edit("world.intents:_unlist", "if pending_effect.listed:", "if False:"),
    ),
    "error groups: count no new subject": (
        Edit(f"{_groups}:add", "stored.count + 1", "stored.count"),
    ),
    "error groups: keep the number of removed subjects": (
        Edit(f"{_groups}:_decrement", "stored.count - 1", "stored.count"),
    ),
    "error groups: count no new group": (
        Edit(f"{_groups}:add", "txn.add(keys.numbers[kind], 1)", "pass"),
    ),
    "error groups: leave out tasks": (
        Edit(f"{_tasks}.write_status", "self._group_error(packed_seq, status)", "pass"),
    ),
    "error groups: keep redriven tasks": (
        Edit(f"{_tasks}._group_error", "self.leave_error_group(packed_seq, status)", "pass"),
    ),
    "error groups: leave out flows": (
        Edit(f"{_flows}._save", "self._group_error(flow.seq, stored, head)", "pass"),
    ),
    "error groups: leave out dead letters": (
        Edit(f"{_letters}:_store_letter", "if universe := universe_of(keys.queue):", "if universe := '':"),
    ),
    "error groups: keep dropped letters": (
        Edit(f"{_letters}:_remove_letter", "if universe := universe_of(keys.queue):", "if universe := '':"),
    ),
    "ended: counts no task": (
        Edit(f"{_tasks}.finish_many", "self.ended.add(spec.queue, place, len(seqs))", "pass"),
    ),
    "ended: counts one task of each batch": (
        Edit(f"{_tasks}.finish_many", "self.ended.add(spec.queue, place, len(seqs))", "self.ended.add(spec.queue, place)"),
    ),
    "ended: counts activations as tasks": (
        Edit(f"{_tasks}.finish_many", "if not spec.owner:", "if True:"),
    ),
    "ended: does not note removed tasks": (
        Edit("tasks.admin:_remove_task", "unit.ended.remove(spec.queue, status.ended_ns, outcome)", "pass"),
    ),
    "ended: keeps old minutes": (
        Edit("durable.ended_counts:_create", "txn.delete(expired)", "pass"),
    ),
    "ended: bounds no queues": (
        Edit("durable.ended_counts:_create", "< QUEUES_MAX:", "< 1 << 62:"),
    ),
}  # fmt: skip
