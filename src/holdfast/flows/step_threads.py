"""Threads of timed-out steps: rows that show which of them still run.

A thread cannot be stopped. When a step in a thread exceeds its timeout, its worker writes a row, and deletes it when the
thread ends. The row of a worker that died stays until its flow is removed. It counts only while the worker registry has
a heartbeat of that incarnation.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast import codec
from holdfast.codec import Record
from holdfast.flows.model import keys_of, pack_int
from holdfast.leadership import worker_registry
from holdfast.store import tuples
from holdfast.store.api import Txn, operation


class StepThread(NamedTuple):
    """The identity of a thread: the flow, the idempotency key of the step, and the attempt."""

    flow: int
    key: str
    attempt: int


class StepThreadRow(Record, frozen=True):
    step: str
    worker: str
    incarnation: str
    timed_out_ns: int = 0


def _key_of(universe: str, thread: StepThread) -> bytes:
    return keys_of(universe).threads + tuples.pack(tuple(thread))


@operation("flows.add_thread")
def add_thread(
    txn: Txn, universe: str, flow: int, key: str, attempt: int, row: StepThreadRow
) -> None:
    """Store that the thread of a timed-out attempt still runs."""
    if txn.get(keys_of(universe).bodies + pack_int(flow)) is not None:
        stored = StepThreadRow(row.step, row.worker, row.incarnation, txn.now_ns)
        txn.put(_key_of(universe, StepThread(flow, key, attempt)), codec.pack(stored))


@operation("flows.remove_thread")
def remove_thread(txn: Txn, universe: str, flow: int, key: str, attempt: int) -> None:
    """Delete the row of a thread that has ended."""
    txn.delete(_key_of(universe, StepThread(flow, key, attempt)))


def list_running(txn: Txn, universe: str, flow: int) -> list[tuple[StepThread, StepThreadRow]]:
    """The threads of a flow's timed-out steps that still run on live workers."""
    prefix = keys_of(universe).threads + pack_int(flow)
    found: list[tuple[StepThread, StepThreadRow]] = []
    for stored_key, packed in txn.scan(prefix, tuples.prefix_end(prefix)):
        row = codec.unpack_as(StepThreadRow, packed)
        worker = worker_registry.find(txn, universe, row.worker)
        if (
            worker is not None
            and worker.incarnation == row.incarnation
            and txn.now_ns < worker.heartbeat_ns + worker_registry.TTL_NS
        ):
            *_, key, attempt = tuples.unpack(stored_key)
            found.append((StepThread(flow, str(key), int(attempt)), row))
    return found
