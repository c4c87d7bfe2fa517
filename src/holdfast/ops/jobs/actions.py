"""The actions of jobs: how each selects its subjects, page by page, and how it is applied to them in one commit.

An action that is applied again to the same subject changes nothing, so that a page may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.durable import error_groups, queue
from holdfast.durable.item import keys_of as queue_keys_of
from holdfast.errors import Invalid
from holdfast.flows import flow_list
from holdfast.flows import operations as flow_operations
from holdfast.flows.model import keys_of as flow_keys_of
from holdfast.flows.redrive import redrive as redrive_flow
from holdfast.ops import catalog_queries, error_group_documents
from holdfast.ops.api import cursors
from holdfast.ops.dead_letter_documents import redrive_within
from holdfast.ops.jobs.model import JobRow
from holdfast.store.api import Txn
from holdfast.tasks import operations as task_operations
from holdfast.tasks import task_list
from holdfast.tasks.model import keys_of as task_keys_of
from holdfast.workers.effects import receipts
from holdfast.world import catalog
from holdfast.world.catalog import WorldEvent, WorldStatus


class Subject(NamedTuple):
    """A selected subject: its name for people, and its key for the action."""

    name: str
    key: Any


class SubjectPage(NamedTuple):
    subjects: list[Subject]
    # The start of the next page; empty on the last one.
    cursor: str


Select = Callable[[Txn, str, JobRow, int], SubjectPage]
Apply = Callable[[Txn, str, JobRow, list[Any]], object]


@dataclass(frozen=True)
class JobAction:
    """An action. `needs` are the filters that it must have, `takes` further ones, with the accepted values."""

    needs: Mapping[str, tuple[str, ...]]
    takes: Mapping[str, tuple[str, ...]]
    last: Callable[[Txn, str, dict[str, str]], int]
    select: Select
    apply: Apply


def check_selection(action: JobAction, selection: dict[str, str]) -> None:
    """Raise Invalid unless the selection has the filters of the action."""
    filters = {**action.needs, **action.takes}
    unknown = sorted(set(selection) - set(filters))
    if unknown:
        raise Invalid(what="selection", found=unknown[0][:64], expected=sorted(filters))
    missing = sorted(set(action.needs) - set(selection))
    if missing:
        raise Invalid(what="selection", why=f"needs {missing[0]}", expected=sorted(filters))
    for name, value in selection.items():
        if filters[name] and value not in filters[name]:
            raise Invalid(what=name, found=value[:64], expected=list(filters[name]))


# -- tasks -----------------------------------------------------------------------------------------


def _last_task(txn: Txn, universe: str, selection: dict[str, str]) -> int:
    return txn.count(task_keys_of(universe).seq_counter)


def _select_tasks(txn: Txn, universe: str, row: JobRow, limit: int) -> SubjectPage:
    page = task_list.list_tasks(
        txn,
        universe,
        row.selection["state"],
        row.selection.get("queue", ""),
        "",
        row.cursor,
        limit,
        owned=False,
    )
    rows = [one for one in page.rows if one.seq <= row.last and not one.status.redriven_by]
    return SubjectPage([Subject(str(one.id), one.seq) for one in rows], page.cursor)


def _cancel_tasks(txn: Txn, universe: str, row: JobRow, seqs: list[Any]) -> object:
    return task_operations.cancel(txn, universe, seqs, f"cancelled by {row.actor}"[:200])


def _redrive_tasks(txn: Txn, universe: str, row: JobRow, seqs: list[Any]) -> object:
    return task_operations.redrive(txn, universe, seqs)


# -- flows -----------------------------------------------------------------------------------------


def _last_flow(txn: Txn, universe: str, selection: dict[str, str]) -> int:
    return txn.count(flow_keys_of(universe).seq_counter)


def _select_flows(txn: Txn, universe: str, row: JobRow, limit: int) -> SubjectPage:
    page = flow_list.list_flows(txn, universe, row.selection["state"], "", row.cursor, limit)
    rows = [one for one in page.rows if one.seq <= row.last and not one.head.redriven_by]
    subjects = [Subject(str(one.id), (one.seq, one.body.generation)) for one in rows]
    return SubjectPage(subjects, page.cursor)


def _cancel_flows(txn: Txn, universe: str, row: JobRow, flows: list[Any]) -> object:
    return [flow_operations.cancel(txn, universe, seq, generation) for seq, generation in flows]


def _resume_flows(txn: Txn, universe: str, row: JobRow, flows: list[Any]) -> object:
    return [flow_operations.resume(txn, universe, seq) for seq, _ in flows]


def _redrive_flows(txn: Txn, universe: str, row: JobRow, flows: list[Any]) -> object:
    return [redrive_flow(txn, universe, seq) for seq, _ in flows]


# -- dead letters ----------------------------------------------------------------------------------


def _last_letter(txn: Txn, universe: str, selection: dict[str, str]) -> int:
    name = selection["queue"]
    if not name.startswith(f"{universe}/") and "/" in name:
        raise Invalid(what="queue", found=name[:64], why="it belongs to another universe")
    return txn.count(queue_keys_of(name).last_seq)


def _select_letters(txn: Txn, universe: str, row: JobRow, limit: int) -> SubjectPage:
    name = row.selection["queue"]
    letters = queue.list_dead(txn, name, int(row.cursor or 0), limit)
    subjects = [
        Subject(str(letter.seq), letter.seq)
        for letter in letters
        if letter.seq <= row.last and letter.died_ns <= row.created_ns
    ]
    return SubjectPage(subjects, str(letters[-1].seq) if len(letters) == limit else "")


def _redrive_letters(txn: Txn, universe: str, row: JobRow, seqs: list[Any]) -> object:
    return redrive_within(txn, row.selection["queue"], seqs)


def _drop_letters(txn: Txn, universe: str, row: JobRow, seqs: list[Any]) -> object:
    return receipts.delete_dead_letters(txn, row.selection["queue"], seqs)


# -- error groups ----------------------------------------------------------------------------------


def _select_group(txn: Txn, universe: str, row: JobRow, limit: int) -> SubjectPage:
    """A subject that failed after the creation of the job is not selected."""
    kind, group = row.selection["kind"], error_group_documents.parse_group(row.selection["group"])
    after = cursors.decode(row.cursor, bytes) or b""
    members = error_groups.list_members(txn, universe, kind, group, after, limit)
    subjects = [
        Subject("/".join(map(str, member.subject)), member.subject)
        for member in members
        if member.at_ns <= row.created_ns
    ]
    more = len(members) == limit
    return SubjectPage(subjects, cursors.encode(members[-1].position) if more else "")


def _redrive_group(txn: Txn, universe: str, row: JobRow, subjects: list[Any]) -> object:
    return error_group_documents.redrive_within(txn, universe, row.selection["kind"], subjects)


def _drop_group(txn: Txn, universe: str, row: JobRow, subjects: list[Any]) -> object:
    return error_group_documents.drop_within(txn, universe, subjects)


# -- worlds ----------------------------------------------------------------------------------------


def _no_last(txn: Txn, universe: str, selection: dict[str, str]) -> int:
    return 0


def _select_worlds(txn: Txn, universe: str, row: JobRow, limit: int) -> SubjectPage:
    """A world that was created after the job is not selected."""
    type = row.selection["type"]
    rows = catalog_queries.worlds(txn, universe, type, row.cursor, limit)
    records = [one.record for one in rows if one.record.created_ns <= row.created_ns]
    subjects = [Subject(f"{one.type}/{one.name}", one.world_id) for one in records]
    return SubjectPage(subjects, rows[-1].record.name if len(rows) == limit else "")


def _change_worlds(event: WorldEvent, goal: WorldStatus) -> Apply:
    def apply(txn: Txn, universe: str, row: JobRow, world_ids: list[Any]) -> object:
        return [
            catalog.change_status(txn, universe, world_id, event)
            for world_id in world_ids
            if catalog.get_record(txn, universe, world_id).status is not goal
        ]

    return apply


# -- the table -------------------------------------------------------------------------------------

_OPEN_TASKS = {"state": ("ready", "delayed", "blocked", "parked", "stray", "suspect", "leased")}
_ENDED = {"state": ("failed", "dead")}
_OPEN_FLOWS = {"state": ("running", "waiting", "parked")}
_QUEUE: dict[str, tuple[str, ...]] = {"queue": ()}
_TYPE: dict[str, tuple[str, ...]] = {"type": ()}
_KIND: dict[str, tuple[str, ...]] = {"kind": error_groups.KINDS}
_GROUP: dict[str, tuple[str, ...]] = {"group": ()}

ACTIONS: dict[str, JobAction] = {
    "tasks.cancel": JobAction(_OPEN_TASKS, _QUEUE, _last_task, _select_tasks, _cancel_tasks),
    "tasks.redrive": JobAction(_ENDED, _QUEUE, _last_task, _select_tasks, _redrive_tasks),
    "flows.cancel": JobAction(_OPEN_FLOWS, {}, _last_flow, _select_flows, _cancel_flows),
    "flows.resume": JobAction({"state": ("parked",)}, {}, _last_flow, _select_flows, _resume_flows),
    "flows.redrive": JobAction(_ENDED, {}, _last_flow, _select_flows, _redrive_flows),
    "dead.redrive": JobAction(_QUEUE, {}, _last_letter, _select_letters, _redrive_letters),
    "dead.drop": JobAction(_QUEUE, {}, _last_letter, _select_letters, _drop_letters),
    "errors.redrive": JobAction(_KIND | _GROUP, {}, _no_last, _select_group, _redrive_group),
    "errors.drop": JobAction(
        {"kind": (error_groups.DEAD,)} | _GROUP, {}, _no_last, _select_group, _drop_group
    ),
    "worlds.pause": JobAction(
        _TYPE, {}, _no_last, _select_worlds, _change_worlds(WorldEvent.PAUSE, WorldStatus.PAUSED)
    ),
    "worlds.resume": JobAction(
        _TYPE, {}, _no_last, _select_worlds, _change_worlds(WorldEvent.RESUME, WorldStatus.ACTIVE)
    ),
    "worlds.delete": JobAction(
        _TYPE, {}, _no_last, _select_worlds, _change_worlds(WorldEvent.DELETE, WorldStatus.DELETED)
    ),
}


def find_action(name: str) -> JobAction:
    action = ACTIONS.get(name)
    if action is None:
        raise Invalid(what="action", found=name[:64], expected=sorted(ACTIONS))
    return action
