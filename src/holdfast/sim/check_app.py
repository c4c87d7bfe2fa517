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
ABROAD = "v"
EFFECT_TIMEOUT_NS = 2_000_000_000
MARKS_KEPT = 3
ORDERS_KEPT = 3

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
    wall_ns: int = 0
    # The name of this one use, where a key gives the intent another.
    place: bytes = b""

    def means(self) -> bytes:
        """What its key stands for."""
        return digest(self.kind.encode(), self.params)


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


# The version of the code whose state has no `news`.
FORMER = "0"


def initial() -> Plain:
    empty = {"balance": 0, "seen": 0, "rate": 0.0, "marks": [], "orders": [], "whim": 0}
    return {**empty, "news": 0}


def fresh(state: Plain, code: str = "") -> Plain:
    """The state as it is when it was stored and read again, by code of a version."""
    lists = {name: list(state[name]) for name in ("marks", "orders")}
    dropped = {"news": 0} if code == FORMER else {}
    return {**state, "rate": float(state["rate"]), **lists, **dropped}


def stored(state: Plain, code: str = "") -> bytes:
    """The bytes of a snapshot, by code of a version."""
    kept = fresh(state, code)
    if code == FORMER:
        del kept["news"]
    return _encode(dict(sorted(kept.items())))


def digest_of(state: Plain, code: str = "") -> bytes:
    """What the last entry of a cycle says of the state after it."""
    return hashlib.sha256(stored(state, code)).digest()


def digests(state: Plain) -> list[bytes]:
    """The digests of the state, by either version of the code. The former one has none of the news."""
    former = [] if state["news"] else [digest_of(state, FORMER)]
    return [digest_of(state), *former]


def resolve(state: Plain, digest: bytes | None) -> int | None:
    """What a moody handler saw, by the digest of the state that it left: nothing else tells."""
    whims = (whim for whim in range(1, WHIMS + 1) if digest in digests({**state, "whim": whim}))
    return next(whims, None)


def read(names: tuple[str, ...], body: bytes) -> Plain:
    values = _decode(body)
    return dict(zip(names, values, strict=False))


def unpacked(data: bytes) -> Any:
    return _decode(data)


def step_of(body: bytes) -> Plain:
    step = read(STEP, body)
    step["ingress"] = dict(zip(INGRESS, step["ingress"], strict=True))
    return step


def event_of(ingress: Plain) -> Plain:
    found: Plain = _decode(ingress["value"][1:])
    return found


def receipt_of(ingress: Plain) -> Plain:
    return read(RECEIPT, ingress["value"])


def timer_of(params: bytes) -> Plain:
    return read(TIMER, params)


def leaves(want: Want) -> bool:
    """Whether mail goes to another universe."""
    return _decode(want.params)[0] is not None


def target_of(want: Want) -> str:
    """The name of the account that mail goes to."""
    return str(_decode(want.params)[1][1])


def slot_of(want: Want) -> str | None:
    """The slot that a timer is set in, or that is emptied; None for anything else."""
    if want.kind == "timer.set":
        return str(_decode(want.params)[0])
    return str(_decode(want.params)) if want.kind == "timer.cancel" else None


def react(state: Plain, step: Plain, world_id: str, name: str, height: int) -> Reaction:
    """What a step should have done to the state before it."""
    ingress = step["ingress"]
    if step["base"] == height - 1:
        state = fresh(state, step["code"])
    receipt = ingress["kind"] == "receipt"
    handlers = _RECEIPTS if receipt else _HANDLERS
    if step["outcome"] == "unknown":
        # It was given up: whether it might be is another question (I7).
        return Reaction("unknown", state)
    if ingress["type"] not in handlers:
        return Reaction("ignored", state)
    if ingress["type"] == "Botched":
        return Reaction("failed", fresh(state))
    place = Place(world_id, name, height, step["wall_ns"], step["entropy"], step["generation"])
    if ingress["type"] == FICKLE and step["reply"] is not None:
        place.told = _decode(step["reply"])[1]
    state = {**state, "marks": list(state["marks"]), "orders": list(state["orders"])}
    told = receipt_of(ingress) if receipt else event_of(ingress)
    wants = handlers[ingress["type"]](state, told, place)
    if ingress["type"] == MOODY:
        return Reaction("ok", state, wants)
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
    to = ["Account", event["to"]]
    mail: list[Any] = [None, to, "typed_event", "Paid", paid, None, None, {}, None, None]
    return [_want(place, "fabric.send", _encode(mail))]


def _wrote(state: Plain, event: Plain, place: Place) -> list[Want]:
    paid = _event({"id": f"{event['id']}>", "amount": 1, "note": ""})
    to = ["Account", event["to"]]
    mail: list[Any] = [ABROAD, to, "typed_event", "Paid", paid, None, None, {}, None, None]
    return [_want(place, MAIL, _encode(mail))]


def _rolled(state: Plain, event: Plain, place: Place) -> list[Want]:
    names = [_uuid(place.entropy, n) for n in (1, 2)]
    dice = random.Random(place.entropy).randrange(1_000_000)
    mark = f"{names[0]} {names[1]} {dice} {place.wall_ns}"
    state["marks"] = [*state["marks"], mark][-MARKS_KEPT:]
    return []


def _ordered(state: Plain, event: Plain, place: Place) -> list[Want]:
    return [_effect(QUOTE, event, place)]


def _bought(state: Plain, event: Plain, place: Place) -> list[Want]:
    want = _effect(PAY, event, place, priority=event["priority"])
    state["orders"] = [*state["orders"], want.hash.hex()][-ORDERS_KEPT:]
    return [want]


def _effect(kind: str, event: Plain, place: Place, priority: int = 0) -> Want:
    params = _encode([event["what"], event["id"] if event["key"] is None else ""])
    options = {"key": event["key"], "timeout_ns": EFFECT_TIMEOUT_NS, "tag": event["id"]}
    return _want(place, kind, params, priority=priority, **options)


def _settled(state: Plain, receipt: Plain, place: Place) -> list[Want]:
    value = _decode(receipt["value"]) if receipt["status"] == "ok" else None
    told = (receipt["tag"], receipt["status"], receipt["code"], str(value), receipt["attempts"])
    state["marks"] = [*state["marks"], " ".join(map(str, told))][-MARKS_KEPT:]
    return []


def _mailed(state: Plain, receipt: Plain, place: Place) -> list[Want]:
    told = f"mail {receipt['status']} {receipt['code']}"
    state["marks"] = [*state["marks"], told][-MARKS_KEPT:]
    return []


def _regretted(state: Plain, event: Plain, place: Place) -> list[Want]:
    orders = state["orders"]
    if not orders:
        return []
    return [_want(place, "effect.cancel", bytes.fromhex(orders[event["nth"] % len(orders)]))]


def _slept(state: Plain, event: Plain, place: Place) -> list[Want]:
    return [_timer(event, place, event["seconds"] * 1_000_000_000, None)]


def _dated(state: Plain, event: Plain, place: Place) -> list[Want]:
    now = datetime.fromtimestamp(place.wall_ns / 1e9, UTC)
    when = now + timedelta(seconds=event["seconds"])
    wall_ns = (when - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1000
    return [_timer(event, place, None, wall_ns)]


def _ticked(state: Plain, event: Plain, place: Place) -> list[Want]:
    return [_timer(event, place, None, None, event["rule"], event["missed"])]


def _timer(
    event: Plain,
    place: Place,
    delay_ns: int | None,
    wall_ns: int | None,
    rule: str = "",
    missed: str = "one",
) -> Want:
    slot = event["key"] if event["key"] is not None else f"@{place.height}.0"
    paid = _event({"id": f"{event['id']}~", "amount": 1, "note": ""})
    timer = [slot, "Paid", paid, delay_ns, wall_ns, rule, "UTC", missed]
    return _want(place, "timer.set", _encode(timer))


def _woken(state: Plain, event: Plain, place: Place) -> list[Want]:
    return [_want(place, "timer.cancel", _encode(event["key"]))]


def _renewed(state: Plain, event: Plain, place: Place) -> list[Want]:
    state["balance"] += 1
    state["news"] += 1
    if event["then"] == "timer":
        again = _event({"id": f"{event['id']}~", "then": "", "to": ""})
        slot = f"@{place.height}.0"
        timer = [slot, "Renewed", again, 1_000_000_000, None, "", "UTC", "one"]
        return [_want(place, "timer.set", _encode(timer))]
    if event["then"] == "mail":
        again = _event({"id": f"{event['id']}>", "then": "", "to": ""})
        to = ["Account", event["to"]]
        mail: list[Any] = [None, to, "typed_event", "Renewed", again, None, None, {}, None, None]
        return [_want(place, "fabric.send", _encode(mail))]
    return []


def _deadly(state: Plain, event: Plain, place: Place) -> list[Want]:
    state["balance"] += 1
    return []


def _fickle(state: Plain, event: Plain, place: Place) -> list[Want]:
    state["balance"] = place.told
    return []


def _moody(state: Plain, event: Plain, place: Place) -> list[Want]:
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
# Receipts that the account hears of; those of quotes are journaled and ignored.
_RECEIPTS: dict[str, Any] = {PAY: _settled, MAIL: _mailed}


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
    priority: int = 0,
) -> Want:
    born = digest(place.generation.to_bytes(8, "big"), place.world_id.encode(), b"p")[:20]
    # Every handler here emits one thing, so its index is 0.
    at = born + place.height.to_bytes(8, "big") + bytes(4)
    hash = at if key is None else keyed_hash(place.world_id, key)
    rest = _encode([priority, timeout_ns, tag, key, None])
    content = digest(hash, kind.encode(), params, place.name.encode(), rest)
    return Want(hash, kind, params, key, content, place.wall_ns, at)


def keyed_hash(world_id: str, key: str) -> bytes:
    """The name of an intent with a user's key, in whatever generation."""
    return digest(world_id.encode(), b"k" + key.encode())


def _event(fields: Plain) -> bytes:
    """An event's bytes: its version, then its fields by name."""
    return b"\x01" + _encode(dict(sorted(fields.items())))


def _uuid(entropy: bytes, n: int) -> uuid.UUID:
    return uuid.UUID(bytes=digest(entropy, n.to_bytes(8, "big"))[:16], version=4)
