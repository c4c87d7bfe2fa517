"""Derived rows of flows: the index rows, counters, timers and keys that follow from bodies, heads, open steps and records.

`consistency` compares them with the stored rows, and the rebuild of a store writes them. Some rows may exist but need
not: a retry timer that an event overtook, the value that a removed run published, the key of an event whose record was
removed. `DerivedIndex.allows` decides about them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from holdfast import codec
from holdfast.durable.tags import pack_tag
from holdfast.flows import compensation_dead_letters, name_index
from holdfast.flows.model import (
    RETRY_NAME,
    TIMEOUT_NAME,
    FlowBodyRow,
    FlowCounts,
    FlowHeadRow,
    FlowId,
    FlowKeys,
    MailRow,
    OpenStep,
    decode_body,
    decode_head,
    decode_mail,
    decode_open,
    keys_of,
    pack_int,
)
from holdfast.flows.record_facts import FlowFacts, read_facts
from holdfast.flows.records import StepCompleted, decode_record
from holdfast.flows.retention import REMOVING
from holdfast.flows.states import ENDED, FlowState
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_rows
from holdfast.store.schema import encode_int


class StoredFlow(NamedTuple):
    seq: int
    body: FlowBodyRow
    head: FlowHeadRow
    opens: dict[tuple[str, int], OpenStep]
    mail: dict[int, MailRow]
    facts: FlowFacts
    # Whether the records of all former runs are retained.
    has_all_runs: bool

    @property
    def timeout_ns(self) -> int:
        limit_ns = self.body.spec.timeout_ns
        return self.head.run_started_ns + limit_ns if limit_ns else 0


class StoredFlows(NamedTuple):
    """The flows of one universe. `one_of_two` have a body or a head. The rows of `removing` are being removed."""

    keys: FlowKeys
    flows: dict[int, StoredFlow]
    one_of_two: set[int]
    removing: set[int]

    def where(self, seq: object) -> str:
        flow = self.flows.get(seq) if isinstance(seq, int) else None
        name = seq if flow is None else FlowId(flow.body.generation, flow.seq)
        return f"{self.keys.universe}/{name}"


class DerivedIndex(NamedTuple):
    """The rows below a prefix: the required ones, and a test for further rows. `subject` is the flow of a key, or the
    name in it."""

    what: str
    prefix: bytes
    required: dict[bytes, bytes]
    allows: Callable[[bytes, bytes], bool]
    subject: Callable[[bytes], object]


def load_flows(txn: Txn, universe: str) -> StoredFlows:
    keys = keys_of(universe)
    heads = {_last_int(key): decode_head(row) for key, row in iter_rows(txn, keys.heads)}
    bodies = {_last_int(key): decode_body(row) for key, row in iter_rows(txn, keys.bodies)}
    runs: dict[int, dict[int, bytes]] = {}
    for key, mark in iter_rows(txn, keys.retained_runs):
        _, seq, run = tuples.unpack(key[len(keys.retained_runs) :])
        runs.setdefault(int(seq), {})[int(run)] = mark
    flows: dict[int, StoredFlow] = {}
    for seq in sorted(heads.keys() & bodies.keys()):
        marks = runs.get(seq, {})
        partial = {run for run, mark in marks.items() if mark == REMOVING}
        has_all_runs = all(marks.get(run) == b"" for run in range(1, heads[seq].run))
        flows[seq] = StoredFlow(
            seq,
            bodies[seq],
            heads[seq],
            _opens_of(txn, keys, seq),
            _mail_of(txn, keys, seq),
            read_facts(txn, keys, seq, partial),
            has_all_runs,
        )
    removing = {_last_int(key) for key, mark in iter_rows(txn, keys.retained) if mark == REMOVING}
    one_of_two = heads.keys() ^ bodies.keys()
    return StoredFlows(keys, flows, one_of_two, removing - flows.keys() - one_of_two)


def _opens_of(txn: Txn, keys: FlowKeys, seq: int) -> dict[tuple[str, int], OpenStep]:
    prefix = keys.open_steps + pack_int(seq)
    opens: dict[tuple[str, int], OpenStep] = {}
    for key, row in iter_rows(txn, prefix):
        name, occurrence = tuples.unpack(key[len(prefix) :])
        opens[str(name), int(occurrence)] = decode_open(row)
    return opens


def _mail_of(txn: Txn, keys: FlowKeys, seq: int) -> dict[int, MailRow]:
    return {
        _last_int(key): decode_mail(row) for key, row in iter_rows(txn, keys.mail + pack_int(seq))
    }


def derive(txn: Txn, stored: StoredFlows) -> Iterator[DerivedIndex]:
    """Yield every index of the flows with the rows that it must have."""
    yield _states(stored)
    yield names(txn, stored)
    yield _tags(stored)
    yield _counts(stored)
    yield _flow_keys(stored)
    yield _due_rows(stored)
    yield _retained(stored)
    yield _retained_runs(txn, stored)
    yield _children(stored)
    yield _published(stored)
    yield _mail_keys(txn, stored)
    yield _threads(stored)
    yield undo_letters(txn, stored)


# -- one index each --------------------------------------------------------------------------------


def _states(stored: StoredFlows) -> DerivedIndex:
    required = {
        stored.keys.states + tuples.pack((int(flow.head.state), seq)): b""
        for seq, flow in stored.flows.items()
    }
    return DerivedIndex("row of its state", stored.keys.states, required, _allows_none, _last)


def names(txn: Txn, stored: StoredFlows) -> DerivedIndex:
    """Without its mark, the index lacks the flows that an older version started."""
    universe = stored.keys.universe
    prefix = name_index.prefix_of(universe)
    rows = {
        name_index.row_key(universe, flow.body.spec.name, seq): b""
        for seq, flow in stored.flows.items()
    }

    def allows(key: bytes, row: bytes) -> bool:
        return rows.get(key) == row

    required = rows if name_index.is_complete(txn, universe) else {}
    return DerivedIndex("row of its name", prefix, required, allows, _last)


def _tags(stored: StoredFlows) -> DerivedIndex:
    prefix = stored.keys.tags
    required = {
        prefix + pack_tag(flow.body.tag) + pack_int(seq): b""
        for seq, flow in stored.flows.items()
        if flow.body.tag
    }
    return DerivedIndex("row of its tag", prefix, required, _allows_none, _last)


def _counts(stored: StoredFlows) -> DerivedIndex:
    counted: dict[str, Counter[str]] = {}
    for flow in stored.flows.values():
        state = FlowState(flow.head.state).name.lower()
        counted.setdefault(flow.body.spec.name, Counter())[state] += 1
    required = {
        stored.keys.counts + tuples.pack((name,)): codec.pack(FlowCounts(**counts))
        for name, counts in counted.items()
    }
    return DerivedIndex("counters", stored.keys.counts, required, _allows_none, _last)


def _flow_keys(stored: StoredFlows) -> DerivedIndex:
    """A key names the newest flow that has it. A flow that another one replaced may be without its row: the new flow
    took the row over, and took it along when it was removed."""
    newest: dict[bytes, StoredFlow] = {}
    for flow in stored.flows.values():
        if flow.body.key:
            newest[stored.keys.keys + tuples.pack((flow.body.spec.name, flow.body.key))] = flow
    required = {
        key: pack_int(flow.seq) for key, flow in newest.items() if not _may_be_replaced(flow)
    }

    def allows(key: bytes, row: bytes) -> bool:
        return key in newest and row == pack_int(newest[key].seq)

    return DerivedIndex("key", stored.keys.keys, required, allows, _last)


def _may_be_replaced(flow: StoredFlow) -> bool:
    is_child = flow.body.parent is not None and bool(flow.body.parent.flow)
    return bool(flow.head.redriven_by) or (is_child and flow.head.cancelled)


def _due_rows(stored: StoredFlows) -> DerivedIndex:
    keys, required = stored.keys, {}
    for seq, flow in stored.flows.items():
        head = flow.head
        for (name, occurrence), step in flow.opens.items():
            if step.due_ns:
                required[keys.due_key(step.due_ns, seq, name, occurrence)] = b""
        has_cause = head.timed_out or head.end_state or head.cancelled
        if flow.timeout_ns and head.state not in ENDED and not has_cause:
            required[keys.due_key(flow.timeout_ns, seq, TIMEOUT_NAME, 0)] = b""
        retry_ns = _pending_retry_ns(flow)
        if retry_ns:
            required[keys.due_key(retry_ns, seq, RETRY_NAME, 0)] = b""

    def allows(key: bytes, row: bytes) -> bool:
        due_ns, seq, name, _ = tuples.unpack(key[len(keys.due) :])
        flow = stored.flows.get(int(seq))
        if name == RETRY_NAME:
            # A retry that an event overtook stays until it is due, also after the end of the flow.
            return flow is None or due_ns in flow.facts.retries
        if flow is None or name != TIMEOUT_NAME:
            return False
        return due_ns == flow.timeout_ns and flow.head.state not in ENDED

    return DerivedIndex(
        "due time", keys.due, required, allows, lambda key: _elements(keys.due, key)[1]
    )


def _pending_retry_ns(flow: StoredFlow) -> int:
    """The time at which the flow's code runs again after it raised, 0 if nothing waits for it."""
    run = flow.facts.runs.get(flow.head.run)
    waits = flow.head.state in (FlowState.WAITING, FlowState.COMPENSATING) and not flow.head.task
    return run.retry_ns if run is not None and waits else 0


def _retained(stored: StoredFlows) -> DerivedIndex:
    prefix = stored.keys.retained
    required = {
        prefix + tuples.pack((flow.head.ended_ns + flow.body.spec.retain_ns, seq)): b""
        for seq, flow in stored.flows.items()
        if flow.head.state in ENDED
    }

    def allows(key: bytes, row: bytes) -> bool:
        return row == REMOVING and _last_int(key) in stored.removing

    return DerivedIndex("retention", prefix, required, allows, _last)


def _retained_runs(txn: Txn, stored: StoredFlows) -> DerivedIndex:
    """A former run is retained from its end, which lies between its last record and the first one of the next run."""
    prefix, required = stored.keys.retained_runs, {}
    by_run: dict[tuple[int, int], list[tuple[bytes, bytes]]] = {}
    for key, mark in iter_rows(txn, prefix):
        _, seq, run = _elements(prefix, key)
        by_run.setdefault((int(seq), int(run)), []).append((key, mark))
    for seq, flow in stored.flows.items():
        for run in range(1, flow.head.run):
            first_ns, last_ns = _end_of_run(txn, flow, run)
            retain_ns = flow.body.spec.retain_ns
            rows = [
                (key, mark)
                for key, mark in by_run.get((seq, run), [])
                if first_ns <= int(_elements(prefix, key)[0]) - retain_ns <= last_ns
            ]
            if rows:
                required[rows[0][0]] = REMOVING if rows[0][1] == REMOVING else b""
            elif run in flow.facts.runs:
                required[prefix + tuples.pack((last_ns + retain_ns, seq, run))] = b""
    return DerivedIndex(
        "retention of a run", prefix, required, _allows_none, lambda key: _elements(prefix, key)[1]
    )


def _end_of_run(txn: Txn, flow: StoredFlow, run: int) -> tuple[int, int]:
    """The earliest and the latest time at which a former run can have ended."""
    runs = flow.facts.runs
    first_ns = runs[run].last_ns if run in runs else flow.body.created_ns
    later = [runs[n].first_ns for n in range(run + 1, flow.head.run + 1) if n in runs]
    last_ns = later[0] if later else txn.now_ns
    if run + 1 == flow.head.run and first_ns <= flow.head.run_started_ns <= last_ns:
        last_ns = flow.head.run_started_ns
    return first_ns, last_ns


def _children(stored: StoredFlows) -> DerivedIndex:
    prefix = stored.keys.children
    parents = {
        seq: flow.body.parent.flow
        for seq, flow in stored.flows.items()
        if flow.body.parent is not None and flow.body.parent.flow
    }
    required = {
        prefix + tuples.pack((parent, seq)): b""
        for seq, parent in parents.items()
        if parent in stored.flows
    }

    def allows(key: bytes, row: bytes) -> bool:
        # A child may outlive its parent.
        parent, child = _elements(prefix, key)
        return parents.get(int(child)) == parent or parent in stored.removing

    return DerivedIndex("child", prefix, required, allows, lambda key: _elements(prefix, key)[0])


def _published(stored: StoredFlows) -> DerivedIndex:
    prefix = stored.keys.published
    required = {
        prefix + tuples.pack((seq, name)): value
        for seq, flow in stored.flows.items()
        for name, value in flow.facts.published.items()
    }

    def allows(key: bytes, row: bytes) -> bool:
        seq = int(_elements(prefix, key)[0])
        if seq in stored.removing:
            return True
        # A removed run has published the value.
        return key not in required and seq in stored.flows and not stored.flows[seq].has_all_runs

    return DerivedIndex(
        "published value", prefix, required, allows, lambda key: _elements(prefix, key)[0]
    )


def _mail_keys(txn: Txn, stored: StoredFlows) -> DerivedIndex:
    """The keys of the events. The record of a received event has no key, so a lost row of one is not noticed."""
    prefix, required = stored.keys.mail_keys, {}
    for seq, flow in stored.flows.items():
        for number, mail in flow.mail.items():
            if mail.key and (not mail.blob or blobs.exists(txn, mail.blob)):
                row = codec.pack([number, _digest_of(txn, mail.type, mail.value, mail.blob)])
                required[prefix + tuples.pack((seq, mail.key))] = row

    def allows(key: bytes, row: bytes) -> bool:
        seq = int(_elements(prefix, key)[0])
        if seq in stored.removing:
            return True
        if key in required or seq not in stored.flows:
            return False
        number, digest = codec.unpack(row)
        return _is_digest_of_event(txn, stored.flows[seq], number, digest)

    return DerivedIndex(
        "key of an event", prefix, required, allows, lambda key: _elements(prefix, key)[0]
    )


def _is_digest_of_event(txn: Txn, flow: StoredFlow, number: int, digest: bytes) -> bool:
    """Whether the flow got an event of this number and digest. A removed run may have received it."""
    if not 1 <= number <= flow.head.mail:
        return False
    if number in flow.mail:
        mail = flow.mail[number]
        if mail.blob and not blobs.exists(txn, mail.blob):
            return True  # reported as a lost blob
        return digest == _digest_of(txn, mail.type, mail.value, mail.blob)
    if number not in flow.facts.received or flow.body.fork_of:
        return not flow.has_all_runs or bool(flow.body.fork_of)
    row = txn.get(flow.facts.received[number])
    record = None if row is None else decode_record(row).record
    assert isinstance(record, StepCompleted)
    if record.blob and not blobs.exists(txn, record.blob):
        return True  # reported as a lost blob
    type, value = codec.unpack(blobs.get(txn, record.blob) if record.blob else record.value)
    return digest == _digest_of(txn, type, value)


def _digest_of(txn: Txn, type: str, value: bytes, blob: bytes = b"") -> bytes:
    return codec.digest(type.encode(), blobs.get(txn, blob) if blob else value)


def _threads(stored: StoredFlows) -> DerivedIndex:
    prefix = stored.keys.threads

    def allows(key: bytes, row: bytes) -> bool:
        seq = int(_elements(prefix, key)[0])
        return seq in stored.flows or seq in stored.removing

    return DerivedIndex(
        "thread of a step", prefix, {}, allows, lambda key: _elements(prefix, key)[0]
    )


def undo_letters(txn: Txn, stored: StoredFlows) -> DerivedIndex:
    """An older version wrote letters without these rows. They may be missing until the index of names is complete."""
    universe = stored.keys.universe
    prefix, rows = compensation_dead_letters.letter_prefix(universe), {}
    for seq, undo in compensation_dead_letters.iter_letters(txn, universe):
        flow = stored.flows.get(undo.id.seq)
        if flow is not None and flow.body.generation == undo.id.generation:
            key = compensation_dead_letters.letter_key(
                universe, flow.seq, undo.step, undo.occurrence
            )
            rows[key] = encode_int(seq)

    def allows(key: bytes, row: bytes) -> bool:
        # An operator has dropped the letter, or the flow is being removed.
        seq = int(_elements(prefix, key)[0])
        return seq in stored.removing or (seq in stored.flows and rows.get(key, row) == row)

    return DerivedIndex(
        "dead letter of a compensation",
        prefix,
        rows if name_index.is_complete(txn, universe) else {},
        allows,
        lambda key: _elements(prefix, key)[0],
    )


# -- keys ------------------------------------------------------------------------------------------


def _allows_none(key: bytes, row: bytes) -> bool:
    return False


def _elements(prefix: bytes, key: bytes) -> tuple[tuples.Element, ...]:
    return tuple(tuples.unpack(key[len(prefix) :]))


def _last(key: bytes) -> object:
    return tuples.unpack(key)[-1]


def _last_int(key: bytes) -> int:
    return int(tuples.unpack(key)[-1])
