"""JSON documents of error groups, and the redrive and removal of their subjects, shared by the HTTP API, jobs and the
command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.durable import error_groups
from holdfast.durable.error_groups import DEAD, FLOW, TASK, GroupSummary, Member
from holdfast.errors import Invalid, NotFound
from holdfast.flows import flow_list
from holdfast.flows.model import keys_of as flow_keys_of
from holdfast.flows.redrive import redrive as redrive_flow
from holdfast.ops.api import cursors
from holdfast.ops.dead_letter_documents import redrive_within as redrive_letters
from holdfast.store.api import Txn
from holdfast.tasks import operations as task_operations
from holdfast.tasks import queries
from holdfast.tasks.model import keys_of as task_keys_of
from holdfast.tasks.model import pack_int
from holdfast.workers.effects import receipts

GROUP_BYTES = 16


class NoGroup(NotFound):
    hint = "`holdfast errors list` lists the groups; a group ends with its last subject"


class ErrorSubjectDocument(msgspec.Struct, frozen=True):
    """A task or flow by its id, or a dead letter by its queue and seq."""

    at_ns: int
    id: str | None
    queue: str | None
    seq: int


class ErrorGroupDocument(msgspec.Struct, frozen=True):
    """The subjects of a kind with the same normalised error. `example` is the newest one."""

    kind: str
    group: str
    text: str
    count: int
    oldest_ns: int
    newest_ns: int
    example: ErrorSubjectDocument


def parse_group(text: str) -> bytes:
    """Return a group of which the id was given in hexadecimal."""
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    if len(raw) != GROUP_BYTES:
        raise Invalid(what="group", found=text[:64], expected="32 hexadecimal digits")
    return raw


def check_kind(kind: str) -> None:
    if kind not in error_groups.KINDS:
        raise Invalid(what="kind", found=kind[:64], expected=list(error_groups.KINDS))


def existing_group(txn: Txn, universe: str, kind: str, group: str) -> GroupSummary:
    check_kind(kind)
    found = error_groups.find_group(txn, universe, kind, parse_group(group))
    if found is None:
        raise NoGroup(what="error group", kind=kind, group=group[:64])
    return found


def group_document(txn: Txn, universe: str, summary: GroupSummary) -> ErrorGroupDocument:
    return ErrorGroupDocument(
        kind=summary.kind,
        group=summary.group,
        text=summary.text,
        count=summary.size,
        oldest_ns=summary.oldest.at_ns,
        newest_ns=summary.newest.at_ns,
        example=subject_document(txn, universe, summary.kind, summary.newest),
    )


def subject_document(txn: Txn, universe: str, kind: str, member: Member) -> ErrorSubjectDocument:
    *names, seq = member.subject
    assert isinstance(seq, int)
    if kind == DEAD:
        return ErrorSubjectDocument(member.at_ns, None, _queue(universe, names[0]), seq)
    if kind == TASK:
        task = queries.get_row(txn, task_keys_of(universe), pack_int(seq))
        id = None if task is None else str(task.id)
    else:
        flow = flow_list.get_flow(txn, flow_keys_of(universe), seq)
        id = None if flow is None else str(flow.id)
    return ErrorSubjectDocument(member.at_ns, id, None, seq)


def members_page(
    txn: Txn, universe: str, kind: str, group: str, cursor: str, limit: int
) -> tuple[list[int], str | None]:
    """Return the seqs of a page of the tasks or flows of a group, the oldest first, and the cursor of the next page."""
    existing_group(txn, universe, kind, group)
    after = cursors.decode(cursor, bytes) or b""
    members = error_groups.list_members(txn, universe, kind, parse_group(group), after, limit + 1)
    seqs = [member.subject[0] for member in members[:limit]]
    assert all(isinstance(seq, int) for seq in seqs)
    more = len(members) > limit
    return seqs, cursors.encode(members[limit - 1].position) if more else None  # type: ignore[return-value]


def redrive_within(txn: Txn, universe: str, kind: str, subjects: Sequence[Any]) -> list[Any]:
    """Redrive subjects of a group in this transaction, all or none."""
    check_kind(kind)
    if kind == TASK:
        return [task_operations.redrive(txn, universe, [seq for (seq,) in subjects])]
    if kind == FLOW:
        return [redrive_flow(txn, universe, seq) for (seq,) in subjects]
    return [
        redrive_letters(txn, _queue(universe, name), seqs)
        for name, seqs in _by_queue(subjects).items()
    ]


def drop_within(txn: Txn, universe: str, subjects: Sequence[Any]) -> list[Any]:
    """Delete dead letters of a group in this transaction, all or none."""
    return [
        receipts.delete_dead_letters(txn, _queue(universe, name), seqs)
        for name, seqs in _by_queue(subjects).items()
    ]


def _queue(universe: str, name: Any) -> str:
    return f"{universe}/{name}"


def _by_queue(subjects: Sequence[Any]) -> dict[str, list[int]]:
    seqs: dict[str, list[int]] = {}
    for name, seq in subjects:
        seqs.setdefault(name, []).append(seq)
    return seqs
