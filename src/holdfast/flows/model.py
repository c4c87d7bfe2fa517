"""The data model of flows: records, key spaces and counters.

A flow has a body, written once, and a head, its mutable part. The head is the fold of the flow's records
(`head_fold`), plus the activation: the task under whose lease a worker runs the flow. A flow without an activation
is rows only.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

from holdfast import codec
from holdfast.clock import S
from holdfast.codec import Record
from holdfast.errors import HoldfastError, Invalid, NotFound
from holdfast.flows.states import FlowState
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.tasks.model import TASK_TOPICS, pack_text

DAY_S = 86_400
# The prefix of the names of activation tasks, and their owner in `TaskSpec.owner`.
TASK_PREFIX = "flow:"
OWNER = "flows"

SLEEP, RECEIVE, TASK, EFFECT, FLOW = OPEN_KINDS = range(5)
KIND_NAMES = ("sleep", "receive", "task", "effect", "flow")
RECEIVE_NAME = "hf.receive"
# The due rows of a flow that belong to no step.
TIMEOUT_NAME = "hf.timeout"
RETRY_NAME = "hf.retry"
# The name of a compensation is this and the name of its function. A compensation that failed has the code.
UNDO_PREFIX = "undo:"
UNDO_FAILED = "undo_failed"


class FlowEndedError(Invalid):
    code = "flow_ended"
    hint = "the flow has ended; start a new one, or redrive it"


class FlowNotFound(NotFound):
    hint = "it was never started here, or it was removed after its retention; `holdfast flows list` lists the flows"


class StartedFlow(Record, frozen=True):
    """The answer to a start, a fork or a redrive."""

    seq: int
    generation: int


class FlowSpec(Record, frozen=True):
    """The declared properties of a flow."""

    name: str
    queue: str = "default"
    priority: int = 0
    lease_ns: int = 60 * S
    # The flow is FAILED after its own code raised this many times, DEAD after this many lost workers.
    attempts: int = 5
    expiries_max: int = 3
    # 0: no limit.
    timeout_ns: int = 0
    retain_ns: int = 7 * DAY_S * S
    backoff_ns: int = S // 10
    backoff_ns_max: int = 60 * S


class Parent(Record, frozen=True):
    """The waiting owner of a flow: a step of another flow, an intent of a world, or a schedule."""

    flow: int = 0
    run: int = 0
    name: str = ""
    occurrence: int = 0
    # Whether the end of the parent cancels this flow.
    cancels: bool = True
    # The packed `Intent` of a world that started the flow.
    intent: bytes = b""
    # The name of the schedule that started the flow.
    schedule: str = ""


class FlowBodyRow(Record, frozen=True):
    """The immutable part of a flow."""

    spec: FlowSpec
    args: bytes
    created_ns: int
    generation: int
    key: str = ""
    blob: bytes = b""
    parent: Parent | None = None
    redrive_of: int = 0
    fork_of: int = 0
    fork_at: str = ""
    tag: str = ""
    # The trace context of the start. No digest of arguments includes it.
    trace: bytes = b""


class FlowHeadRow(Record, frozen=True):
    """The mutable part of a flow."""

    state: int = FlowState.RUNNING
    run: int = 1
    # The number of records of this run.
    records: int = 0
    # The seq of the activation task, 0 if none.
    task: int = 0
    failures: int = 0
    cancelled: bool = False
    timed_out: bool = False
    # Set by `CompensationStarted`: the state in which the flow will end.
    end_state: int = 0
    code: str = ""
    step: str = ""
    error_type: str = ""
    error: str = ""
    run_started_ns: int = 0
    ended_ns: int = 0
    result: bytes = b""
    blob: bytes = b""
    # The number of events ever put into the inbox, and the arguments of a later run.
    mail: int = 0
    args: bytes | None = None
    args_blob: bytes = b""
    # The number of steps started elsewhere that have no outcome.
    open_steps: int = 0
    redriven_by: int = 0
    code_version: str = ""
    # The number of compensations that completed or failed.
    undone: int = 0
    # The number of events in the inbox.
    unread: int = 0
    # The number of the last record of a redrive that names child tasks, 0 if none.
    redriven_at: int = 0


class OpenStep(Record, frozen=True):
    """A step without an outcome that no worker holds: a sleep, a receive or a child."""

    kind: int
    position: int
    digest: bytes
    began_ns: int
    due_ns: int = 0
    # The event types of a receive.
    types: tuple[str, ...] = ()
    # The task seq, the flow seq, or the intent hash of the child.
    child: int = 0
    intent: bytes = b""
    cancels_child: bool = True


class MailRow(Record, frozen=True):
    """One event in the inbox of a flow."""

    type: str
    value: bytes
    blob: bytes = b""
    key: str = ""
    sent_ns: int = 0
    # Whether the number and the bytes of unread events count it. Rows of former releases do not count.
    counted: bool = False


class FlowCounts(Record, frozen=True):
    """The number of flows of one name in each state."""

    running: int = 0
    waiting: int = 0
    parked: int = 0
    compensating: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    dead: int = 0


_ID = re.compile(r"f([1-9][0-9]{0,18})-([1-9][0-9]{0,18})")


class BadFlowId(Invalid):
    code = "bad_flow_id"
    hint = "a flow id is f<generation>-<number>, such as f1-42"


class FlowId(NamedTuple):
    generation: int
    seq: int

    def __str__(self) -> str:
        return f"f{self.generation}-{self.seq}"


def parse_flow_id(text: str) -> FlowId:
    match = _ID.fullmatch(text) if isinstance(text, str) else None
    numbers = [int(group) for group in match.groups()] if match else []
    if not numbers or max(numbers) >= 1 << 63:
        raise BadFlowId(what="flow", found=str(text)[:64])
    return FlowId(*numbers)


class FlowKeys:
    """The key spaces of one universe's flows."""

    def __init__(self, universe: str) -> None:
        def space(*path: tuples.Element) -> bytes:
            return schema.key_prefix(schema.Space.FLOW, universe, *path)

        self.universe = universe
        self.seq_counter = space("seq")
        self.bodies = space("b")
        self.heads = space("h")
        self.keys = space("k")
        self.records = space("r")
        self.open_steps = space("o")
        self.due = space("d")
        self.mail = space("m")
        self.mail_keys = space("mk")
        self.published = space("p")
        self.states = space("s")
        self.counts = space("n")
        self.tags = space("tag")
        self.retained = space("x")
        self.retained_runs = space("xr")
        self.children = space("c")
        self.threads = space("t")
        self._topics = [f"flows/{universe}/flow/{n}" for n in range(TASK_TOPICS)]
        self.due_topic = f"flows/{universe}/due"

    def topic(self, seq: int) -> str:
        """The topic notified when the flow ends, publishes a value or gets an outcome while it runs."""
        return self._topics[seq % len(self._topics)]

    def records_of(self, seq: int, run: int) -> bytes:
        return self.records + pack_int(seq) + pack_int(run)

    def open_key(self, seq: int, name: str, occurrence: int) -> bytes:
        return self.open_steps + pack_int(seq) + pack_text(name) + pack_int(occurrence)

    def due_key(self, due_ns: int, seq: int, name: str, occurrence: int) -> bytes:
        packed = pack_int(due_ns) + pack_int(seq) + pack_text(name) + pack_int(occurrence)
        return self.due + packed

    def state_key(self, state: int, seq: int) -> bytes:
        return self.states + pack_int(state) + pack_int(seq)


@lru_cache(1024)
def keys_of(universe: str) -> FlowKeys:
    return FlowKeys(universe)


pack_int = tuples.pack_int
decode_body = codec.decoder(FlowBodyRow).decode
decode_head = codec.decoder(FlowHeadRow).decode
decode_open = codec.decoder(OpenStep).decode
decode_mail = codec.decoder(MailRow).decode


def get_body(txn: Txn, keys: FlowKeys, seq: int) -> FlowBodyRow:
    row = txn.get(keys.bodies + pack_int(seq))
    if row is None:
        raise FlowNotFound(what="flow", flow=seq)
    return decode_body(row)


def get_head(txn: Txn, keys: FlowKeys, seq: int) -> FlowHeadRow:
    row = txn.get(keys.heads + pack_int(seq))
    if row is None:
        raise FlowNotFound(what="flow", flow=seq)
    return decode_head(row)


def step_key(generation: int, seq: int, run: int, name: str, occurrence: int) -> str:
    """The idempotency key of a step: equal for all attempts, also after a redrive."""
    return f"flow-{generation}-{seq}-{run}-{name}-{occurrence}"


class FlowFailed(HoldfastError):
    """The flow ended as FAILED, CANCELLED or DEAD."""

    code = "flow_failed"
    hint = "inspect it with `holdfast flows show`, retry it with `holdfast flows redrive`"

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        # The code of the flow's end: step_failed, raised, timeout, cancelled, worker_lost.
        self.__dict__["code"] = fields.get("code", "flow_failed")
        if fields.get("state") == FlowState.CANCELLED.name:
            self.__dict__["hint"] = "it was cancelled; start a new one if it is needed"

    def __str__(self) -> str:
        described = " ".join(f"{name}={value!r}" for name, value in self.fields.items() if value)
        return f"flow_failed: {described} ({self.hint})"
