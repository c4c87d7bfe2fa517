"""The error groups, recomputed from tasks, flows and dead letters: for `verify` and `rebuild`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from holdfast import codec
from holdfast.durable import dead_letters, error_groups, item
from holdfast.durable.difference import Difference
from holdfast.durable.error_groups import DEAD, FLOW, KINDS, OTHER, OTHER_TEXT, TASK, ErrorGroupRow
from holdfast.flows import model as flow_rows
from holdfast.flows.unit_of_work import error_of as error_of_flow
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_names, iter_rows
from holdfast.tasks import consistency as task_consistency
from holdfast.tasks import model as task_rows
from holdfast.tasks.unit_of_work import UNSUCCESSFUL
from holdfast.tasks.unit_of_work import error_of as error_of_task

# A subject: its kind, the time of its end, and its names.
Subject = tuple[str, int, tuple[tuples.Element, ...]]


class StoredGroups(NamedTuple):
    """The stored rows: the group of each subject, and the texts and counts of the groups."""

    members: dict[Subject, bytes]
    groups: dict[tuple[str, bytes], ErrorGroupRow]


def find_differences(txn: Txn, universe: str) -> Iterator[Difference]:
    since_ns = error_groups.since_ns(txn, universe)
    everything = failed_subjects(txn, universe)
    expected = {
        subject: text
        for subject, text in everything.items()
        if since_ns is not None and subject[1] >= since_ns
    }
    stored = _stored(txn, universe)
    for subject in sorted(expected.keys() | stored.members.keys(), key=repr):
        group, text = stored.members.get(subject), everything.get(subject)
        own = None if text is None else error_groups.group_id(text)
        if group is None or own is None or group not in (own, OTHER):
            found = None if group is None else group.hex()
            yield Difference("statistic", _where(universe, subject), "error group", found, text)
    counted = Counter((subject[0], group) for subject, group in stored.members.items())
    for kind, group in sorted(counted.keys() | stored.groups.keys()):
        row = stored.groups.get((kind, group), ErrorGroupRow(""))
        if row.count != counted[kind, group]:
            what = f"subjects of the group of {kind}s {row.text[:64]}"
            yield Difference("statistic", universe, what, row.count, counted[kind, group])
        if row.count and error_groups.group_id(row.text) != group:
            yield Difference("statistic", universe, "text of a group", row.text, group.hex())
    numbers = Counter(kind for kind, _ in stored.groups)
    for kind in KINDS:
        number = txn.count(error_groups.keys_of(universe).numbers[kind])
        if number != numbers[kind]:
            what = f"number of groups of {kind}s"
            yield Difference("statistic", universe, what, number, numbers[kind])


def rebuild(txn: Txn, universe: str) -> None:
    """Group every failed subject, also those of older versions."""
    keys = error_groups.keys_of(universe)
    stored = _stored(txn, universe)
    subjects = failed_subjects(txn, universe)
    since_ns = error_groups.since_ns(txn, universe)
    oldest_ns = min((at_ns for _, at_ns, _ in subjects), default=None)
    if oldest_ns is not None and (since_ns is None or oldest_ns < since_ns):
        txn.put(keys.since, schema.encode_int(oldest_ns))
    members: dict[bytes, bytes] = {}
    groups: dict[tuple[str, bytes], ErrorGroupRow] = {}
    numbers: Counter[str] = Counter()
    for (kind, at_ns, names), own_text in sorted(subjects.items(), key=lambda pair: pair[0][1]):
        group, text = error_groups.group_id(own_text), own_text
        is_new = (kind, group) not in groups
        is_full = is_new and numbers[kind] >= error_groups.GROUPS_MAX
        if is_full or stored.members.get((kind, at_ns, names)) == OTHER:
            group, text = OTHER, OTHER_TEXT
        members[error_groups.member_key(keys, kind, group, at_ns, names)] = b""
        numbers[kind] += (kind, group) not in groups
        count = groups.get((kind, group), ErrorGroupRow(text)).count
        groups[kind, group] = ErrorGroupRow(text, count + 1)
    for kind in KINDS:
        _replace(txn, keys.members[kind], members)
        rows = {
            keys.groups[kind] + tuples.pack((group,)): codec.pack(row)
            for (of, group), row in groups.items()
            if of == kind
        }
        _replace(txn, keys.groups[kind], rows)
        if txn.count(keys.numbers[kind]) != numbers[kind]:
            txn.put(keys.numbers[kind], schema.encode_int(numbers[kind]))


def failed_subjects(txn: Txn, universe: str) -> dict[Subject, str]:
    """Return the text of the error of every failed task and flow, and of every dead letter."""
    subjects: dict[Subject, str] = {}
    tasks = task_consistency.load_tasks(txn, task_rows.keys_of(universe))
    for seq, task in tasks.items():
        status = task.status
        if status.state in UNSUCCESSFUL and not status.redriven_by and not task.spec.owner:
            subjects[TASK, status.ended_ns, (seq,)] = error_of_task(status)
    keys = flow_rows.keys_of(universe)
    for key, row in iter_rows(txn, keys.heads):
        error = error_of_flow(flow_rows.decode_head(row))
        if error is not None:
            subjects[FLOW, error[1], (tuples.unpack(key)[-1],)] = error[0]
    for name in iter_names(txn, (int(schema.Space.QUEUE),)):
        if dead_letters.universe_of(name) != universe:
            continue
        for _, row in iter_rows(txn, item.keys_of(name).dead):
            letter = codec.unpack_as(dead_letters.DeadLetter, row)
            text, at_ns, names = dead_letters.grouped(letter)
            subjects[DEAD, at_ns, names] = text
    return subjects


def _stored(txn: Txn, universe: str) -> StoredGroups:
    keys = error_groups.keys_of(universe)
    members: dict[Subject, bytes] = {}
    groups: dict[tuple[str, bytes], ErrorGroupRow] = {}
    for kind in KINDS:
        for key, _ in iter_rows(txn, keys.members[kind]):
            group, at_ns, *names = tuples.unpack(key[len(keys.members[kind]) :])
            assert isinstance(group, bytes)
            assert isinstance(at_ns, int)
            members[kind, at_ns, tuple(names)] = group
        for key, row in iter_rows(txn, keys.groups[kind]):
            group = tuples.unpack(key)[-1]
            assert isinstance(group, bytes)
            groups[kind, group] = error_groups.decode_group(row)
    return StoredGroups(members, groups)


def _replace(txn: Txn, prefix: bytes, rows: dict[bytes, bytes]) -> None:
    """Make the rows below a prefix equal to those among these rows that have it."""
    expected = {key: row for key, row in rows.items() if key.startswith(prefix)}
    for key, _ in list(iter_rows(txn, prefix)):
        if key not in expected:
            txn.delete(key)
    for key, row in expected.items():
        txn.put(key, row)


def _where(universe: str, subject: Subject) -> str:
    kind, _, names = subject
    return f"{universe}/{kind}/" + "/".join(map(str, names))
