"""Builder of a hand-written universe history: events of its actors and the rows that result from them.

The builder follows the documented layouts and uses no product code. Each test then changes one value.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.clock import S
from holdfast.sim.history import History
from tests.simulation import model_app

Plain = dict[str, Any]

WORLD_ID = "w1"
SUBJECT = f"u/{WORLD_ID}"
CONFIG = {"budgets": {}, "retention_ns": 10 * S, "progress_ns": S, "rest_ns": 0, "stuck_max": 3,
          "unknown_ns": 2 * S, "keep": {"entries": 1, "ns": 2 * S}, "deleted_ns": 9 * S}  # fmt: skip
GENESIS = bytes(32)

pack = msgspec.msgpack.encode


def lease(worker: str, epoch: int, *, until_s: float = 100, resource: str = SUBJECT) -> Plain:
    return {
        "resource": resource,
        "worker": worker,
        "incarnation": "1",
        "generation": 1,
        "epoch": epoch,
        "expires_ns": int(until_s * S),
    }


def event(type: str, **fields: Any) -> list[Any]:
    """Ingress of an event with these fields."""
    value = b"\x01" + pack(dict(sorted(fields.items())))
    return ["event", type, value, b"h", None, None, None, None, {}, None, None]


def make_ingress(kind: str, type: str, value: bytes, intent_hash: bytes, **cause: Any) -> list[Any]:
    """Ingress caused by an intent: a receipt, a timer event or mail."""
    world, height = cause.get("from_world"), cause.get("from_height")
    return [kind, type, value, b"h", intent_hash, None, world, height, {}, None, None]


def receipt(intent: model_app.ExpectedIntent, **overrides: Any) -> list[Any]:
    """Ingress of a receipt with status ok, with some fields overridden."""
    fields = {
        "intent_hash": intent.hash,
        "effect_kind": intent.kind,
        "status": "ok",
        "value": b"",
        "code": "",
        "error": "",
        "attempts": 1,
        "tag": "",
        "cost": 0.0,
        "redrive_of": None,
        **overrides,
    }
    return make_ingress("receipt", intent.kind, pack(list(fields.values())), intent.hash)


def paid(event_id: str, amount: int) -> list[Any]:
    return event("Paid", id=event_id, amount=amount, note="")


def renewed(event_id: str) -> list[Any]:
    """Ingress of an event type that the former code version lacks."""
    return event("Renewed", id=event_id, then="", to="")


class UniverseHistory:
    """History of one account and one worker. Tests add further worlds and workers."""

    def __init__(self) -> None:
        self.history = History()
        self.history.add(0, "config", CONFIG)
        self._commits = 0
        self.states = [model_app.initial_state()]
        self.intents: list[model_app.ExpectedIntent] = []
        self.rows: Plain = {
            "queues": {},
            "journals": {SUBJECT: {"head": None, "entries": {}, "doubled": []}},
            "inboxes": {SUBJECT: {"rows": {}, "cursor": 0, "last_seq": 0}},
            "snapshots": {SUBJECT: {"states": {}, "baseline": None}},
            "dedupe": {},
            "leases": {},
            "blobs": {"data": {}, "refs": {}, "idle": []},
            "lease_log": [],
            "generation": 1,
            "worlds": {
                "u": {
                    "names": {f"Account/{WORLD_ID}": WORLD_ID},
                    "records": {WORLD_ID: world_record(WORLD_ID)},
                    "assignments": {},
                    "by_worker": [],
                    "counts": {"active": 1},
                    "hints": [["", WORLD_ID]],
                    "pending": {},
                    "slots": [],
                }
            },
        }

    # -- events --------------------------------------------------------------------------------

    def committed(
        self, at_s: float, op: str, args: Plain, value: Any = None, **more: Any
    ) -> UniverseHistory:
        self._commits += 1
        more = {"actor": "a", "incarnation": "1", "commit_no": self._commits, **more}
        self.history.add(int(at_s * S), op, args, value=value, **more)
        return self

    def failed(
        self, at_s: float, op: str, args: Plain, code: str, actor: str = "a"
    ) -> UniverseHistory:
        error = {"code": code}
        self.history.add(
            int(at_s * S), op, args, actor=actor, incarnation="1", result="fail", value=error
        )
        return self

    def granted(
        self, at_s: float, worker: str = "a", epoch: int = 1, **more: Any
    ) -> UniverseHistory:
        until_s = at_s + 10
        grant = {
            "world_id": WORLD_ID,
            "lease": lease(worker, epoch, until_s=until_s),
            "record": world_record(WORLD_ID),
        }
        args = {
            "universe": "u",
            "worker": worker,
            "incarnation": "1",
            "ttl_ns": 10 * S,
            "stuck_max": 3,
        }
        answer = [{**grant, "refusal": "", "retry_at_ns": 0, **more}]
        return self.committed(at_s, "hosting_lease.acquire", args, answer, actor=worker)

    def sent(
        self, at_s: float, seq: int, ingress: list[Any], key: str | None = None, **more: Any
    ) -> UniverseHistory:
        already = more.pop("already", False)
        args = {
            "to": {"universe": "u", "type": "Account", "name": WORLD_ID, "mint": None},
            "key": key,
            "ingress": dict(zip(model_app.INGRESS, ingress, strict=True)),
        }
        inbox = self.rows["inboxes"][SUBJECT]
        if not already:
            inbox["rows"][seq] = inbox_row(key, ingress)
            inbox["last_seq"] = max(seq, inbox["last_seq"])
        value = {
            "world_id": WORLD_ID,
            "seq": seq,
            "already": already,
            "item": more.pop("item", None),
        }
        return self.committed(at_s, "ingress.deliver", args, value, **more)

    def cycle(
        self,
        at_s: float,
        *ingress: list[Any],
        worker: str = "a",
        epoch: int = 1,
        fused: Sequence[Plain] = (),
        **overrides: Any,
    ) -> UniverseHistory:
        """Commit a cycle with these ingress items, with entries computed by the model. Further
        keyword arguments override fields of the entries."""
        bodies = [
            self._add_entry(item, overrides, last=at == len(ingress))
            for at, item in enumerate(ingress, 1)
        ]
        head = overrides.get("expected_head", self.height - len(bodies))
        steps = [model_app.step_of(body) for body in bodies]
        failed = [
            {"seq": step["seq"], "body": pack(list(step["ingress"].values())), "error": "no"}
            for step in steps
            if step["outcome"] == "failed"
        ]
        cycle: Plain = {"expected_head": head, "bodies": bodies, "failed": failed, "intents": []}
        cycle["carried"] = list(fused)
        args = {"cycle": cycle, "lease": lease(worker, epoch)}
        return self.committed(at_s, "commit", args, actor=worker)

    def put_in_inbox(self, *ingress: list[Any], key: str | None = None) -> UniverseHistory:
        """Put a receipt, a timer event or mail into the inbox."""
        inbox = self.rows["inboxes"][SUBJECT]
        for item in ingress:
            inbox["last_seq"] += 1
            inbox["rows"][inbox["last_seq"]] = inbox_row(key, item)
        return self

    def put_in_queue(
        self, intent: model_app.ExpectedIntent, queue: str, seq: int = 1
    ) -> UniverseHistory:
        """Put an intent into a queue, with its row in the catalog."""
        self.rows["queues"][queue] = queue_rows((seq, encode_intent(intent)))
        catalog = self.rows["worlds"]["u"]
        if "/effects/" in queue:
            catalog["pending"][intent.hash.hex()] = {"world_id": WORLD_ID, "dead": False}
        else:
            slot = model_app.slot_of(intent)
            catalog["slots"].append(
                {"world_id": WORLD_ID, "slot": slot, "intent_hash": intent.hash}
            )
        return self

    def empty_queue(self, queue: str) -> UniverseHistory:
        """Empty a queue, pending effects and timer slots."""
        catalog = self.rows["worlds"]["u"]
        self.rows["queues"][queue] = queue_rows()
        catalog["pending"].clear()
        catalog["slots"].clear()
        return self

    def audit(self, *path: Any, to: Any = ..., at_s: float = 50) -> UniverseHistory:
        """Record an audit of the rows. With a path, replace or delete the value there."""
        rows = copy.deepcopy(self.rows)
        if path:
            parent = rows
            for key in path[:-1]:
                parent = parent[key]
            if to is ...:
                del parent[path[-1]]
            else:
                parent[path[-1]] = to
        self.history.add(int(at_s * S), "audit", value=rows)
        return self

    @property
    def height(self) -> int:
        return len(self.states) - 1

    def state_bytes(self, height: int) -> bytes:
        return model_app.snapshot_bytes(self.states[height])

    def declare_code(self, worker: str = "a", *unknown: str, version: str = "1") -> UniverseHistory:
        """Declare the code of a worker and the event types it lacks."""
        code = {"unknown": list(unknown), "version": version}
        return self.committed(0, "code", code, actor=worker)

    def stopped(
        self, at_s: float, seq: int, worker: str = "a", epoch: int = 1, height: int = 0
    ) -> UniverseHistory:
        """The worker releases the world at an item of unknown type or at an entry of other code."""
        args = {"universe": "u", "world_id": WORLD_ID, "held": lease(worker, epoch), "seq": seq}
        args["height"] = height
        return self.committed(at_s, "cycle.stop_and_release", args, actor=worker)

    # -- resulting rows ------------------------------------------------------------------------

    def _add_entry(self, ingress: list[Any], overrides: Plain, *, last: bool) -> bytes:
        height = self.height + 1
        step: Plain = {
            "seq": overrides.get("seq", height),
            "ingress": dict(zip(model_app.INGRESS, ingress, strict=True)),
            "wall_ns": 7,
            "entropy": b"e" * 16,
            "code": overrides.get("code", "1"),
            "generation": 1,
            "outcome": "unknown" if overrides.get("outcome") == "unknown" else "ok",
            "emitted": [],
            "error": "",
            "reply": None,
            "base": overrides.get("base", 0),
        }
        expected = model_app.expected_step(self.states[-1], step, WORLD_ID, WORLD_ID, height)
        step["outcome"] = overrides.get("outcome", expected.outcome)
        step["reply"] = overrides.get("reply", expected.reply)
        step["emitted"] = overrides.get(
            "emitted", [want.replay_digest for want in expected.intents]
        )
        self.states.append(expected.state)
        self.intents += expected.intents
        if last and expected.state["whim"] is None:
            # The unrecorded value that the Moody handler read.
            expected.state["whim"] = 7
        digest = model_app.state_digest(expected.state, step["code"])
        step["state"] = overrides.get("state", digest if last else b"")
        body = pack([ingress if name == "ingress" else value for name, value in step.items()])
        self._add_to_journal(height, body)
        inbox = self.rows["inboxes"][SUBJECT]
        inbox["rows"].pop(step["seq"], None)
        inbox["cursor"] = height
        inbox["last_seq"] = max(inbox["last_seq"], height)
        return body

    def _add_to_journal(self, height: int, body: bytes) -> None:
        journal_rows = self.rows["journals"][SUBJECT]
        head = journal_rows["head"] or {
            "floor": 1,
            "below": GENESIS,
            "hash": GENESIS,
            "checkpoint": 0,
        }
        position = height.to_bytes(8, "big") + (5).to_bytes(8, "big", signed=True)
        hash = hashlib.sha256(head["hash"] + position + b"\x00" + body).digest()
        journal_rows["entries"][height] = {"hash": hash, "at_ns": 5, "body": body, "blob": b""}
        journal_rows["head"] = {**head, "height": height, "hash": hash, "packed": 0}


def world_record(world_id: str, **changes: Any) -> Plain:
    return {
        "universe": "u",
        "world_id": world_id,
        "type": "Account",
        "name": world_id,
        "created_ns": 1,
        "status": "active",
        "blocker": None,
        "lineage": None,
        "stuck_seq": 0,
        "stuck_count": 0,
        "stuck_alone": False,
        **changes,
    }


def inbox_row(key: str | None, ingress: list[Any]) -> Plain:
    """Inbox row of an ingress."""
    return {"key": key, "at_ns": 0, "body": pack(ingress), "blob": b""}


def queue_rows(*items: tuple[int, bytes]) -> Plain:
    """Rows of a queue with these items, all ready."""
    return {
        "items": {
            seq: {
                "payload": body,
                "blob": b"",
                "expires_ns": 0,
                "not_before_ns": 0,
                "claims": 0,
                "failures": 0,
                "expiries": 0,
                "owner": "",
            }
            for seq, body in items
        },
        "ready": [[0, seq] for seq, _ in items],
        "delayed": [],
        "expiry": [],
        "owners": [],
        "dead": {},
        "died": [],
        "counts": {"ready": len(items), "delayed": 0, "claimed": 0, "dead": 0, "done": 0},
        "last_seq": max((seq for seq, _ in items), default=0),
    }


def encode_intent(expected_intent: model_app.ExpectedIntent, world_id: str = WORLD_ID) -> bytes:
    return pack(["u", world_id, expected_intent.hash, expected_intent.kind, expected_intent.params])
