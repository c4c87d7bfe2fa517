"""Model of `sample_app`: its reducers, reimplemented over plain data, and the expected journal
entries.

This module uses no product code. It reads entries position by position and computes identities and
random numbers from the specification and the layout. If the product and this module disagree about
a world, one of them is wrong.
"""

from __future__ import annotations

import hashlib
import random
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

Plain = dict[str, Any]

STEP = (
    "seq", "ingress", "wall_ns", "entropy", "code", "generation", "outcome", "emitted", "error",
    "reply", "base", "state",
)  # fmt: skip
INGRESS = (
    "kind", "type", "value", "event_hash", "intent_hash", "correlation_id", "from_world",
    "from_height", "headers", "from_universe", "message_id",
)  # fmt: skip
INTENT = ("universe_id", "world_id", "intent_hash", "effect_kind", "params")
LETTER = ("world_id", "seq", "ingress")
RECEIPT = (
    "intent_hash", "effect_kind", "status", "value", "code", "error", "attempts", "tag", "cost",
    "redrive_of",
)  # fmt: skip
TIMER = ("slot", "type", "value", "delay_ns", "wall_ns", "cron", "zone", "missed")

QUOTE, PAY, MAIL = "fx.quote", "fx.pay", "fabric.send"
EFFECTS = (QUOTE, PAY)
FICKLE = "Fickle"
MOODY = "Moody"
WHIMS = 64
OTHER_UNIVERSE = "v"
EFFECT_TIMEOUT_NS = 2_000_000_000
MARKS_KEPT = 3
ORDERS_KEPT = 3

_decode = msgspec.msgpack.Decoder().decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class ExpectedIntent:
    """An intent that an entry should have emitted."""

    hash: bytes
    kind: str
    params: bytes
    key: str | None = None
    replay_digest: bytes = b""
    wall_ns: int = 0
    # The positional id of the intent, if its hash is derived from a user key.
    positional_id: bytes = b""

    def idempotency_digest(self) -> bytes:
        """The idempotency digest: what the user key was used for."""
        return digest(self.kind.encode(), self.params)


@dataclass(slots=True)
class StepInputs:
    """Inputs of one step: the world, the height, the time and the entropy."""

    world_id: str
    name: str
    height: int
    wall_ns: int
    entropy: bytes
    generation: int
    # The value that a non-deterministic handler saw, from the entry. It is recorded nowhere else.
    unrecorded_value: int = 0


@dataclass(slots=True)
class ExpectedStep:
    outcome: str
    state: Plain
    intents: list[ExpectedIntent] = field(default_factory=list)
    reply: bytes | None = None


# The code version whose state has no `news` field.
FORMER = "0"


def initial_state() -> Plain:
    empty = {"balance": 0, "seen": 0, "rate": 0.0, "marks": [], "orders": [], "whim": 0}
    return {**empty, "news": 0}


def reload_state(state: Plain, code: str = "") -> Plain:
    """Return the state after one store and load by this code version."""
    lists = {name: list(state[name]) for name in ("marks", "orders")}
    dropped = {"news": 0} if code == FORMER else {}
    return {**state, "rate": float(state["rate"]), **lists, **dropped}


def snapshot_bytes(state: Plain, code: str = "") -> bytes:
    """Return the bytes of a snapshot written by this code version."""
    reloaded = reload_state(state, code)
    if code == FORMER:
        del reloaded["news"]
    return _encode(dict(sorted(reloaded.items())))


def state_digest(state: Plain, code: str = "") -> bytes:
    """Return the state digest that the last entry of a cycle must hold."""
    return hashlib.sha256(snapshot_bytes(state, code)).digest()


def state_digests(state: Plain) -> list[bytes]:
    """Return the state digests of both code versions. The former version has no `news` field."""
    former = [] if state["news"] else [state_digest(state, FORMER)]
    return [state_digest(state), *former]


def resolve_whim(state: Plain, digest: bytes | None) -> int | None:
    """Return the value that a Moody handler saw. Only the state digest reveals it."""
    whims = (
        whim for whim in range(1, WHIMS + 1) if digest in state_digests({**state, "whim": whim})
    )
    return next(whims, None)


def read_record(names: tuple[str, ...], body: bytes) -> Plain:
    values = _decode(body)
    return dict(zip(names, values, strict=False))


def unpack(data: bytes) -> Any:
    return _decode(data)


def step_of(body: bytes) -> Plain:
    step = read_record(STEP, body)
    step["ingress"] = dict(zip(INGRESS, step["ingress"], strict=True))
    return step


def event_of(ingress: Plain) -> Plain:
    found: Plain = _decode(ingress["value"][1:])
    return found


def receipt_of(ingress: Plain) -> Plain:
    return read_record(RECEIPT, ingress["value"])


def timer_of(params: bytes) -> Plain:
    return read_record(TIMER, params)


def is_to_other_universe(want: ExpectedIntent) -> bool:
    """Whether the message goes to another universe."""
    return _decode(want.params)[0] is not None


def target_of(want: ExpectedIntent) -> str:
    """The name of the destination account of a message."""
    return str(_decode(want.params)[1][1])


def slot_of(want: ExpectedIntent) -> str | None:
    """The slot that a timer intent sets or cancels. None for other intents."""
    if want.kind == "timer.set":
        return str(_decode(want.params)[0])
    return str(_decode(want.params)) if want.kind == "timer.cancel" else None


def expected_step(state: Plain, step: Plain, world_id: str, name: str, height: int) -> ExpectedStep:
    """Return the expected outcome of a step applied to the state before it."""
    ingress = step["ingress"]
    if step["base"] == height - 1:
        state = reload_state(state, step["code"])
    receipt = ingress["kind"] == "receipt"
    handlers = _RECEIPTS if receipt else _HANDLERS
    if step["outcome"] == "unknown":
        # The runtime gave the event up. `check_worlds` decides whether it was allowed to (I7).
        return ExpectedStep("unknown", state)
    if ingress["type"] not in handlers:
        return ExpectedStep("ignored", state)
    if ingress["type"] == "Botched":
        return ExpectedStep("failed", reload_state(state))
    inputs = StepInputs(
        world_id, name, height, step["wall_ns"], step["entropy"], step["generation"]
    )
    if ingress["type"] == FICKLE and step["reply"] is not None:
        inputs.unrecorded_value = _decode(step["reply"])[1]
    state = {**state, "marks": list(state["marks"]), "orders": list(state["orders"])}
    event = receipt_of(ingress) if receipt else event_of(ingress)
    wants = handlers[ingress["type"]](state, event, inputs)
    if ingress["type"] == MOODY:
        return ExpectedStep("ok", state, wants)
    state["seen"] += 1
    reply = _encode([state["seen"], state["balance"], str(state["rate"]), state["marks"]])
    return ExpectedStep("ok", state, wants, reply)


# -- handlers ------------------------------------------------------------------------------------


def _paid(state: Plain, event: Plain, place: StepInputs) -> list[ExpectedIntent]:
    state["balance"] += event["amount"]
    state["rate"] = event["amount"]
    return []


def _moved(state: Plain, event: Plain, place: StepInputs) -> list[ExpectedIntent]:
    state["balance"] -= event["amount"]
    paid = _event({"id": f"{event['id']}>", "amount": event["amount"], "note": ""})
    to = ["Account", event["to"]]
    mail: list[Any] = [None, to, "typed_event", "Paid", paid, None, None, {}, None, None]
    return [_intent(place, "fabric.send", _encode(mail))]


def _wrote(state: Plain, event: Plain, place: StepInputs) -> list[ExpectedIntent]:
    paid = _event({"id": f"{event['id']}>", "amount": 1, "note": ""})
    to = ["Account", event["to"]]
    mail: list[Any] = [OTHER_UNIVERSE, to, "typed_event", "Paid", paid, None, None, {}, None, None]
    return [_intent(place, MAIL, _encode(mail))]


def _rolled(state: Plain, event: Plain, place: StepInputs) -> list[ExpectedIntent]:
    names = [_uuid(place.entropy, n) for n in (1, 2)]
    dice = random.Random(place.entropy).randrange(1_000_000)
    mark = f"{names[0]} {names[1]} {dice} {place.wall_ns}"
    state["marks"] = [*state["marks"], mark][-MARKS_KEPT:]
    return []


def _ordered(state: Plain, event: Plain, place: StepInputs) -> list[ExpectedIntent]:
    return [_effect(QUOTE, event, place)]


def _bought(state: Plain, event: Plain, place: StepInputs) -> list[ExpectedIntent]:
    want = _effect(PAY, event, place, priority=event["priority"])
    state["orders"] = [*state["orders"], want.hash.hex()][-ORDERS_KEPT:]
    return [want]


def _effect(kind: str, event: Plain, place: StepInputs, priority: int = 0) -> ExpectedIntent:
    params = _encode([event["what"], event["id"] if event["key"] is None else ""])
    options = {"key": event["key"], "timeout_ns": EFFECT_TIMEOUT_NS, "tag": event["id"]}
    return _intent(place, kind, params, priority=priority, **options)


def _settled(state: Plain, receipt: Plain, place: StepInputs) -> list[ExpectedIntent]:
    value = _decode(receipt["value"]) if receipt["status"] == "ok" else None
    mark_parts = (
        receipt["tag"],
        receipt["status"],
        receipt["code"],
        str(value),
        receipt["attempts"],
    )
    state["marks"] = [*state["marks"], " ".join(map(str, mark_parts))][-MARKS_KEPT:]
    return []


def _mailed(state: Plain, receipt: Plain, place: StepInputs) -> list[ExpectedIntent]:
    mark = f"mail {receipt['status']} {receipt['code']}"
    state["marks"] = [*state["marks"], mark][-MARKS_KEPT:]
    return []


def _regretted(state: Plain, event: Plain, place: StepInputs) -> list[ExpectedIntent]:
    orders = state["orders"]
    if not orders:
        return []
    return [_intent(place, "effect.cancel", bytes.fromhex(orders[event["nth"] % len(orders)]))]


def _slept(state: Plain, event: Plain, place: StepInputs) -> list[ExpectedIntent]:
    return [_timer(event, place, event["seconds"] * 1_000_000_000, None)]


def _dated(state: Plain, event: Plain, place: StepInputs) -> list[ExpectedIntent]:
    now = datetime.fromtimestamp(place.wall_ns / 1e9, UTC)
    when = now + timedelta(seconds=event["seconds"])
    wall_ns = (when - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1000
    return [_timer(event, place, None, wall_ns)]


def _ticked(state: Plain, event: Plain, place: StepInputs) -> list[ExpectedIntent]:
    return [_timer(event, place, None, None, event["rule"], event["missed"])]


def _timer(
    event: Plain,
    place: StepInputs,
    delay_ns: int | None,
    wall_ns: int | None,
    rule: str = "",
    missed: str = "one",
) -> ExpectedIntent:
    slot = event["key"] if event["key"] is not None else f"@{place.height}.0"
    paid = _event({"id": f"{event['id']}~", "amount": 1, "note": ""})
    timer = [slot, "Paid", paid, delay_ns, wall_ns, rule, "UTC", missed]
    return _intent(place, "timer.set", _encode(timer))


def _woken(state: Plain, event: Plain, place: StepInputs) -> list[ExpectedIntent]:
    return [_intent(place, "timer.cancel", _encode(event["key"]))]


def _renewed(state: Plain, event: Plain, place: StepInputs) -> list[ExpectedIntent]:
    state["balance"] += 1
    state["news"] += 1
    if event["then"] == "timer":
        again = _event({"id": f"{event['id']}~", "then": "", "to": ""})
        slot = f"@{place.height}.0"
        timer = [slot, "Renewed", again, 1_000_000_000, None, "", "UTC", "one"]
        return [_intent(place, "timer.set", _encode(timer))]
    if event["then"] == "mail":
        again = _event({"id": f"{event['id']}>", "then": "", "to": ""})
        to = ["Account", event["to"]]
        mail: list[Any] = [None, to, "typed_event", "Renewed", again, None, None, {}, None, None]
        return [_intent(place, "fabric.send", _encode(mail))]
    return []


def _deadly(state: Plain, event: Plain, place: StepInputs) -> list[ExpectedIntent]:
    state["balance"] += 1
    return []


def _fickle(state: Plain, event: Plain, place: StepInputs) -> list[ExpectedIntent]:
    state["balance"] = place.unrecorded_value
    return []


def _moody(state: Plain, event: Plain, place: StepInputs) -> list[ExpectedIntent]:
    state["whim"] = None
    return []


_HANDLERS: dict[str, Any] = {
    "Paid": _paid,
    "Moved": _moved,
    "Wrote": _wrote,
    "Rolled": _rolled,
    "Ordered": _ordered,
    "Bought": _bought,
    "Regretted": _regretted,
    "Slept": _slept,
    "Dated": _dated,
    "Ticked": _ticked,
    "Woken": _woken,
    "Deadly": _deadly,
    "Renewed": _renewed,
    "Fickle": _fickle,
    "Moody": _moody,
    "Botched": None,
}
# Receipts that the account handles. Receipts of quotes are journaled and ignored.
_RECEIPTS: dict[str, Any] = {PAY: _settled, MAIL: _mailed}


# -- identities ----------------------------------------------------------------------------------


def digest(*parts: bytes) -> bytes:
    """SHA-256 over the parts, each prefixed with its length in eight bytes."""
    return hashlib.sha256(b"".join(len(p).to_bytes(8, "big") + p for p in parts)).digest()


def _intent(
    inputs: StepInputs,
    kind: str,
    params: bytes,
    *,
    key: str | None = None,
    timeout_ns: int = 0,
    tag: str = "",
    priority: int = 0,
) -> ExpectedIntent:
    prefix = digest(inputs.generation.to_bytes(8, "big"), inputs.world_id.encode(), b"p")[:20]
    # Every handler here emits at most one intent, so its index is 0.
    positional_id = prefix + inputs.height.to_bytes(8, "big") + bytes(4)
    hash = positional_id if key is None else keyed_hash(inputs.world_id, key)
    rest = _encode([priority, timeout_ns, tag, key, None])
    content = digest(hash, kind.encode(), params, inputs.name.encode(), rest)
    return ExpectedIntent(hash, kind, params, key, content, inputs.wall_ns, positional_id)


def keyed_hash(world_id: str, key: str) -> bytes:
    """The hash of an intent with a user key. It does not depend on the generation."""
    return digest(world_id.encode(), b"k" + key.encode())


def _event(fields: Plain) -> bytes:
    """Encode an event: its version, then its fields by name."""
    return b"\x01" + _encode(dict(sorted(fields.items())))


def _uuid(entropy: bytes, n: int) -> uuid.UUID:
    return uuid.UUID(bytes=digest(entropy, n.to_bytes(8, "big"))[:16], version=4)
