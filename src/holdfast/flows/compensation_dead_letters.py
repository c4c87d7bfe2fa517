"""Dead letters of failed compensations, in the queue `<universe>/undo-failed` of each universe.

The commit that records the failure writes the letter, and a row that finds it by the flow. Its payload is JSON, so that
the commands for dead letters show it. `compensation_redrive` runs the compensation again. The letter outlives its flow,
but cannot be redriven then. An operator may drop the letter: then the row names a letter that does not exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import msgspec

from holdfast import codec
from holdfast.durable import dead_letters
from holdfast.flows.model import (
    UNDO_FAILED,
    UNDO_PREFIX,
    FlowBodyRow,
    FlowId,
    pack_int,
    parse_flow_id,
)
from holdfast.flows.records import AnyRecord, StepFailure
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.store.schema import Space, decode_int, encode_int, key_prefix

_QUEUE = "undo-failed"


class UndoLetter(NamedTuple):
    """The dead letter of a failed compensation. `step` is its name and occurrence."""

    step: str
    seq: int
    error: str
    died_ns: int


class FailedCompensation(msgspec.Struct, frozen=True):
    """The payload of a letter."""

    flow: str
    name: str
    key: str
    run: int
    step: str
    occurrence: int

    @property
    def id(self) -> FlowId:
        return parse_flow_id(self.flow)


decode_payload = codec.new_json_decoder(FailedCompensation).decode


def queue_of(universe: str) -> str:
    return f"{universe}/{_QUEUE}"


def universe_of(queue: str) -> str | None:
    """Return the universe of a queue of failed compensations; None for any other queue."""
    universe = queue.rpartition("/")[0]
    return universe if universe and queue_of(universe) == queue else None


def add_if_compensation_failed(
    txn: Txn, universe: str, seq: int, body: FlowBodyRow, run: int, record: AnyRecord
) -> None:
    """Write the dead letter of a compensation that failed finally."""
    if not isinstance(record, StepFailure) or not record.name.startswith(UNDO_PREFIX):
        return
    flow = str(FlowId(body.generation, seq))
    payload = FailedCompensation(
        flow, body.spec.name, body.key, run, record.name, record.occurrence
    )
    error = f"{record.error_type}: {record.error}"
    letter = dead_letters.add_dead_letter.fn(
        txn, queue_of(universe), msgspec.json.encode(payload), UNDO_FAILED, error
    )
    txn.put(letter_key(universe, seq, record.name, record.occurrence), encode_int(letter))


def letter_key(universe: str, seq: int, name: str, occurrence: int) -> bytes:
    """The key of the row that finds the letter of a compensation."""
    return letter_prefix(universe) + tuples.pack((seq, name, occurrence))


@lru_cache(1024)
def letter_prefix(universe: str) -> bytes:
    return key_prefix(Space.FLOW, universe, "u")


def iter_letters(txn: Txn, universe: str) -> Iterator[tuple[int, FailedCompensation]]:
    """Yield every letter of the universe with its seq."""
    after = 0
    while letters := dead_letters.list_dead(txn, queue_of(universe), after):
        for letter in letters:
            yield letter.seq, decode_payload(letter.payload)
        after = letters[-1].seq


def list_letters(txn: Txn, universe: str, seq: int, limit: int) -> list[UndoLetter]:
    """List the dead letters of the failed compensations of a flow."""
    prefix = letter_prefix(universe) + pack_int(seq)
    found: list[UndoLetter] = []
    for key, row in txn.scan(prefix, tuples.prefix_end(prefix), limit):
        *_, name, occurrence = tuples.unpack(key)
        letter = decode_int(row)
        at = dead_letters.list_dead(txn, queue_of(universe), letter - 1, 1)
        if at and at[0].seq == letter:
            found.append(UndoLetter(f"{name!s}#{occurrence!s}", letter, at[0].error, at[0].died_ns))
    return found
