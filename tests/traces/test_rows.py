"""Stored rows with a trace context: rows of older releases are read, and older releases read newer rows."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast import codec, traces
from holdfast.durable.inbox import InboxRow
from holdfast.flows.model import FlowBodyRow, FlowSpec
from holdfast.messages import Intent
from holdfast.tasks.model import TaskBodyRow
from holdfast.world.redrive import FailedEventRow

TRACE = traces.parse("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "congo=1")

ROWS = {
    "task": TaskBodyRow(b"spec", b"args", 1, 1, key="k", trace=TRACE),
    "flow": FlowBodyRow(FlowSpec("order"), b"args", 1, 1, "k", trace=TRACE),
    "inbox": InboxRow("k", 1, b"body", trace=TRACE),
    "intent": Intent(
        universe_id="bank",
        world_id="w",
        intent_hash=b"hash",
        effect_kind="charge",
        params=b"params",
        origin_name="x",
        policy_context_hash=b"",
        enqueued_at_ns=1,
        trace=TRACE,
    ),
    "failed event": FailedEventRow("w", 1, b"ingress", "k", TRACE),
}


def before_trace(kind: Any) -> int:
    """The number of fields before the trace context."""
    return list(kind.__struct_fields__).index("trace")


@pytest.mark.parametrize("name", ROWS)
def test_row_of_an_older_release_has_no_context(name: str) -> None:
    row: Any = ROWS[name]
    older = codec.pack(codec.unpack(codec.pack(row))[: before_trace(type(row))])
    assert codec.unpack_as(type(row), older) == msgspec.structs.replace(row, trace=b"")


@pytest.mark.parametrize("name", ROWS)
def test_older_release_reads_a_row_with_a_context(name: str) -> None:
    row: Any = ROWS[name]
    fields = msgspec.structs.fields(type(row))[: before_trace(type(row))]
    older = msgspec.defstruct(
        "Older",
        [
            (one.name, one.type)
            if one.required
            else (
                one.name,
                one.type,
                one.default
                if one.default is not msgspec.NODEFAULT
                else msgspec.field(default_factory=one.default_factory),
            )
            for one in fields
        ],
        array_like=True,
    )
    read = msgspec.msgpack.decode(codec.pack(row), type=older)
    assert [getattr(read, one.name) for one in fields] == [getattr(row, one.name) for one in fields]


def test_digests_of_an_intent_leave_the_context_out() -> None:
    intent: Any = ROWS["intent"]
    without = msgspec.structs.replace(intent, trace=b"")
    assert intent.replay_digest() == without.replay_digest()
    assert intent.idempotency_digest() == without.idempotency_digest()
