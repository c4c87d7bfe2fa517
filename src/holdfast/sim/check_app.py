"""The reducers of `world_app`, stated once more over plain data, and what an entry should say.

Nothing here is the product's code: entries are read position by position, identities and random
numbers are computed from what document and layout say about them. If the product and this file
disagree about a world, one of them is wrong.
"""

from __future__ import annotations

import hashlib
import random
import uuid
from dataclasses import dataclass, field
from typing import Any

import msgspec

Plain = dict[str, Any]

STEP = (
    "seq", "ingress", "wall_ns", "entropy", "code", "generation", "outcome", "emitted", "error",
    "reply", "base",
)  # fmt: skip
INGRESS = (
    "kind", "type", "value", "event_hash", "intent_hash", "correlation_id", "from_world",
    "from_height", "headers",
)  # fmt: skip
INTENT = ("universe_id", "world_id", "intent_hash", "effect_kind", "params")
LETTER = ("world_id", "seq", "ingress")

EFFECT = "fx.quote"
FICKLE = "Fickle"
EFFECT_TIMEOUT_NS = 5_000_000_000
MARKS_KEPT = 3

_decode = msgspec.msgpack.Decoder().decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class Want:
    """An intent that an entry should have emitted."""

    hash: bytes
    kind: str
    params: bytes
    key: str | None = None
    content: bytes = b""


@dataclass(slots=True)
class Place:
    """Where a step happens, and what it may look at."""

    world_id: str
    name: str
    height: int
    wall_ns: int
    entropy: bytes
    generation: int
    # What the entry says a fickle handler saw: nobody else can know.
    told: int = 0


@dataclass(slots=True)
class Reaction:
    outcome: str
    state: Plain
    wants: list[Want] = field(default_factory=list)
    reply: bytes | None = None


def initial() -> Plain:
    return {"balance": 0, "seen": 0, "rate": 0.0, "marks": []}


def fresh(state: Plain) -> Plain:
    """The state as it is when it was stored and read again."""
    return {**state, "rate": float(state["rate"]), "marks": list(state["marks"])}


def stored(state: Plain) -> bytes:
    """The bytes of a snapshot."""
    return _encode(dict(sorted(fresh(state).items())))


def read(names: tuple[str, ...], body: bytes) -> Plain:
    values = _decode(body)
    return dict(zip(names, values, strict=False))


def step_of(body: bytes) -> Plain:
    step = read(STEP, body)
    step["ingress"] = dict(zip(INGRESS, step["ingress"], strict=True))
    return step


def event_of(ingress: Plain) -> Plain:
    found: Plain = _decode(ingress["value"][1:])
    return found


def slot_of(want: Want) -> str | None:
    """The slot that a timer is set in, or that is emptied; None for anything else."""
    if want.kind == "timer.set":
        return str(_decode(want.params)[0])
    return str(_decode(want.params)) if want.kind == "timer.cancel" else None


def react(state: Plain, step: Plain, world_id: str, name: str, height: int) -> Reaction:
    """What a step should have done to the state before it."""
    ingress = step["ingress"]
    if step["base"] == height - 1:
        state = fresh(state)
    if ingress["kind"] == "receipt" or ingress["type"] not in _HANDLERS:
        return Reaction("ignored", state)
    if ingress["type"] == "Botched":
        return Reaction("failed", fresh(state))
    place = Place(world_id, name, height, step["wall_ns"], step["entropy"], step["generation"])
    if ingress["type"] == FICKLE and step["reply"] is not None:
        place.told = _decode(step["reply"])[1]
    state = {**state, "marks": list(state["marks"])}
    wants = _HANDLERS[ingress["type"]](state, event_of(ingress), place)
    state["seen"] += 1
    reply = _encode([state["seen"], state["balance"], str(state["rate"]), state["marks"]])
    return Reaction("ok", state, wants, reply)


# -- the handlers --------------------------------------------------------------------------------


def _paid(state: Plain, event: Plain, place: Place) -> list[Want]:
    state["balance"] += event["amount"]
    state["rate"] = event["amount"]
    return []


def _moved(state: Plain, event: Plain, place: Place) -> list[Want]:
    state["balance"] -= event["amount"]
    paid = _event({"id": f"{event['id']}>", "amount": event["amount"], "note": ""})
    mail = ["Account", event["to"], "Paid", paid, None, "typed_event", None, {}, None]
    return [_want(place, "fabric.send", _encode(mail))]


def _rolled(state: Plain, event: Plain, place: Place) -> list[Want]:
    names = [_uuid(place.entropy, n) for n in (1, 2)]
    dice = random.Random(place.entropy).randrange(1_000_000)
    mark = f"{names[0]} {names[1]} {dice} {place.wall_ns}"
    state["marks"] = [*state["marks"], mark][-MARKS_KEPT:]
    return []


def _ordered(state: Plain, event: Plain, place: Place) -> list[Want]:
    params = _encode([event["what"]])
    options = {"key": event["key"], "timeout_ns": EFFECT_TIMEOUT_NS, "tag": event["id"]}
    return [_want(place, EFFECT, params, **options)]


def _slept(state: Plain, event: Plain, place: Place) -> list[Want]:
    slot = event["key"] if event["key"] is not None else f"@{place.height}.0"
    paid = _event({"id": f"{event['id']}~", "amount": 1, "note": ""})
    delay_ns = event["seconds"] * 1_000_000_000
    timer = [slot, "Paid", paid, delay_ns, None, "", "UTC", "one"]  # no calendar, no rule
    return [_want(place, "timer.set", _encode(timer))]


def _woken(state: Plain, event: Plain, place: Place) -> list[Want]:
    return [_want(place, "timer.cancel", _encode(event["key"]))]


def _deadly(state: Plain, event: Plain, place: Place) -> list[Want]:
    state["balance"] += 1
    return []


def _fickle(state: Plain, event: Plain, place: Place) -> list[Want]:
    state["balance"] = place.told
    return []


_HANDLERS: dict[str, Any] = {
    "Paid": _paid,
    "Moved": _moved,
    "Rolled": _rolled,
    "Ordered": _ordered,
    "Slept": _slept,
    "Woken": _woken,
    "Deadly": _deadly,
    "Fickle": _fickle,
    "Botched": None,
}


# -- identities ----------------------------------------------------------------------------------


def digest(*parts: bytes) -> bytes:
    """SHA-256 over parts, each after its length in eight bytes."""
    return hashlib.sha256(b"".join(len(p).to_bytes(8, "big") + p for p in parts)).digest()


def _want(
    place: Place,
    kind: str,
    params: bytes,
    *,
    key: str | None = None,
    timeout_ns: int = 0,
    tag: str = "",
) -> Want:
    # Every handler here emits one thing, so its index is 0.
    where = (
        b"p" + place.height.to_bytes(8, "big") + bytes(8) if key is None else b"k" + key.encode()
    )
    hash = digest(place.generation.to_bytes(8, "big"), place.world_id.encode(), where)
    rest = _encode([0, timeout_ns, tag, key, None])
    content = digest(hash, kind.encode(), params, place.name.encode(), rest)
    return Want(hash, kind, params, key, content)


def _event(fields: Plain) -> bytes:
    """An event's bytes: its version, then its fields by name."""
    return b"\x01" + _encode(dict(sorted(fields.items())))


def _uuid(entropy: bytes, n: int) -> uuid.UUID:
    return uuid.UUID(bytes=digest(entropy, n.to_bytes(8, "big"))[:16], version=4)
