"""Record facts: how the stored records of a flow determine its other rows. A fold of all runs, for checks and rebuilds.

Each run is folded again with `head_fold`. A record with a gap before it, with an earlier time than the one before it,
or with an illegal transition is a problem of the run, and the fold stops there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from holdfast.errors import IllegalTransition
from holdfast.flows import head_fold
from holdfast.flows.model import FlowHeadRow, FlowKeys, pack_int
from holdfast.flows.records import (
    AttemptRaised,
    FlowEnded,
    FlowRedriven,
    Published,
    RecordRow,
    StepCompleted,
    decode_record,
)
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_rows


@dataclass
class RunFacts:
    """The records of one run, and the head that they give."""

    head: FlowHeadRow
    first_ns: int = 0
    last_ns: int = 0
    # The time of the retry if the last record is a failure of the flow's own code.
    retry_ns: int = 0
    # The digest of the result, if the run completed the flow.
    result_digest: bytes = b""
    is_sound: bool = True


@dataclass
class FlowFacts:
    runs: dict[int, RunFacts] = field(default_factory=dict)
    # The last published values, by name.
    published: dict[str, bytes] = field(default_factory=dict)
    # The keys of the records of received events, by the number of the event.
    received: dict[int, bytes] = field(default_factory=dict)
    # The times of all retries.
    retries: set[int] = field(default_factory=set)
    # The faults of the records: a description, the stored value, the expected value.
    problems: list[tuple[str, object, object]] = field(default_factory=list)


def read_facts(txn: Txn, keys: FlowKeys, seq: int, removing: set[int]) -> FlowFacts:
    """Fold the records of all runs of a flow. The first records of the runs in `removing` are deleted already."""
    facts = FlowFacts()
    prefix = keys.records + pack_int(seq)
    for key, row in iter_rows(txn, prefix):
        run, number = tuples.unpack(key[len(prefix) :])
        assert isinstance(run, int)
        assert isinstance(number, int)
        if run not in facts.runs:
            facts.runs[run] = RunFacts(FlowHeadRow(run=run))
        stored = decode_record(row)
        if facts.runs[run].is_sound:
            _fold(facts, facts.runs[run], number, stored, run in removing)
        _note(txn, facts, key, stored)
    return facts


def _fold(
    facts: FlowFacts, run: RunFacts, number: int, stored: RecordRow, is_partial: bool
) -> None:
    what = f"run {run.head.run}: record {number}"
    if not run.first_ns:
        run.first_ns = stored.decided_ns
        if is_partial:
            run.head = replace(run.head, records=number - 1)
    if number != run.head.records + 1:
        run.is_sound = False
        facts.problems.append((what, "a record", f"record {run.head.records + 1}"))
        return
    if stored.decided_ns < run.last_ns:
        facts.problems.append((f"time of {what}", stored.decided_ns, run.last_ns))
    run.last_ns = stored.decided_ns
    run.retry_ns = stored.record.not_before_ns if isinstance(stored.record, AttemptRaised) else 0
    if isinstance(stored.record, FlowEnded):
        run.result_digest = stored.record.digest
    if is_partial:
        run.head = replace(run.head, records=number)
        return
    if isinstance(stored.record, FlowRedriven):
        run.head = replace(run.head, task=0)
    try:
        run.head = head_fold.apply_record(run.head, stored.record, stored.decided_ns)
    except IllegalTransition as error:
        run.is_sound = False
        facts.problems.append((what, str(error), "a legal record"))


def _note(txn: Txn, facts: FlowFacts, key: bytes, stored: RecordRow) -> None:
    record = stored.record
    if isinstance(record, Published):
        facts.published[record.name] = record.value
    elif isinstance(record, AttemptRaised):
        facts.retries.add(record.not_before_ns)
    elif isinstance(record, StepCompleted):
        if record.mail:
            facts.received[record.mail] = key
        if record.blob and not blobs.exists(txn, record.blob):
            label = f"{record.name}#{record.occurrence}"
            facts.problems.append((f"blob of step {label}", "none", record.blob.hex()))
