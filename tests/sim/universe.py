"""A universe told by hand: what its actors did, and the rows that follow from it.

What is right here is right by the layouts alone; each test then makes one thing wrong.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.clock import S
from holdfast.sim import check_app
from holdfast.sim.history import History

Plain = dict[str, Any]

W = "w1"
SUBJECT = f"u/{W}"
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
    """The ingress of an event, field by field."""
    value = b"\x01" + pack(dict(sorted(fields.items())))
    return ["event", type, value, b"h", None, None, None, None, {}, None, None]


def came(kind: str, type: str, value: bytes, hash: bytes, **cause: Any) -> list[Any]:
    """The ingress of what belongs to an intent: a receipt, a timer, mail."""
    world, height = cause.get("from_world"), cause.get("from_height")
    return [kind, type, value, b"h", hash, None, world, height, {}, None, None]


def receipt(want: check_app.Want, **told: Any) -> list[Any]:
    """The ingress of a receipt, ok unless it is told otherwise."""
    fields = {
        "intent_hash": want.hash,
        "effect_kind": want.kind,
        "status": "ok",
        "value": b"",
        "code": "",
        "error": "",
        "attempts": 1,
        "tag": "",
        "cost": 0.0,
        "redrive_of": None,
        **told,
    }
    return came("receipt", want.kind, pack(list(fields.values())), want.hash)


def paid(id: str, amount: int) -> list[Any]:
    return event("Paid", id=id, amount=amount, note="")


def renewed(id: str) -> list[Any]:
    """Of a type that not every version of the code knows."""
    return event("Renewed", id=id, then="", to="")


class Universe:
    """One account, one worker; more of each where a test says so."""

    def __init__(self) -> None:
        self.history = History()
        self.history.add(0, "config", CONFIG)
        self._commits = 0
        self.states = [check_app.initial()]
        self.wants: list[check_app.Want] = []
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
                    "names": {f"Account/{W}": W},
                    "records": {W: record(W)},
                    "assignments": {},
                    "by_worker": [],
                    "counts": {"active": 1},
                    "hints": [["", W]],
                    "pending": {},
                    "slots": [],
                }
            },
        }

    # -- what happened -------------------------------------------------------------------------

    def did(self, at_s: float, op: str, args: Plain, value: Any = None, **more: Any) -> Universe:
        self._commits += 1
        more = {"actor": "a", "incarnation": "1", "commit_no": self._commits, **more}
        self.history.add(int(at_s * S), op, args, value=value, **more)
        return self

    def failed(self, at_s: float, op: str, args: Plain, code: str, actor: str = "a") -> Universe:
        told = {"code": code}
        self.history.add(
            int(at_s * S), op, args, actor=actor, incarnation="1", result="fail", value=told
        )
        return self

    def granted(self, at_s: float, worker: str = "a", epoch: int = 1, **more: Any) -> Universe:
        until_s = at_s + 10
        given = {"world_id": W, "lease": lease(worker, epoch, until_s=until_s), "record": record(W)}
        args = {
            "universe": "u",
            "worker": worker,
            "incarnation": "1",
            "ttl_ns": 10 * S,
            "stuck_max": 3,
        }
        answer = [{**given, "refusal": "", "retry_at_ns": 0, **more}]
        return self.did(at_s, "tenure.acquire", args, answer, actor=worker)

    def sent(
        self, at_s: float, seq: int, ingress: list[Any], key: str | None = None, **more: Any
    ) -> Universe:
        already = more.pop("already", False)
        args = {
            "to": {"universe": "u", "type": "Account", "name": W, "mint": None},
            "key": key,
            "ingress": dict(zip(check_app.INGRESS, ingress, strict=True)),
        }
        box = self.rows["inboxes"][SUBJECT]
        if not already:
            box["rows"][seq] = row(key, ingress)
            box["last_seq"] = max(seq, box["last_seq"])
        value = {"world_id": W, "seq": seq, "already": already, "item": more.pop("item", None)}
        return self.did(at_s, "ingress.deliver", args, value, **more)

    def cycle(
        self,
        at_s: float,
        *ingress: list[Any],
        worker: str = "a",
        epoch: int = 1,
        carried: Sequence[Plain] = (),
        **wrong: Any,
    ) -> Universe:
        """Journal these, as the model says, the last of them with the commit; `wrong` are fields of
        the entries that are not so."""
        bodies = [
            self._entry(one, wrong, last=at == len(ingress)) for at, one in enumerate(ingress, 1)
        ]
        head = wrong.get("expected_head", self.height - len(bodies))
        steps = [check_app.step_of(body) for body in bodies]
        failed = [
            {"seq": step["seq"], "body": pack(list(step["ingress"].values())), "error": "no"}
            for step in steps
            if step["outcome"] == "failed"
        ]
        cycle: Plain = {"expected_head": head, "bodies": bodies, "failed": failed, "intents": []}
        cycle["carried"] = list(carried)
        args = {"cycle": cycle, "lease": lease(worker, epoch)}
        return self.did(at_s, "commit", args, actor=worker)

    def arrived(self, *ingress: list[Any], key: str | None = None) -> Universe:
        """Into the inbox, by somebody else's commit: a receipt, a timer, mail."""
        box = self.rows["inboxes"][SUBJECT]
        for one in ingress:
            box["last_seq"] += 1
            box["rows"][box["last_seq"]] = row(key, one)
        return self

    def waits(self, want: check_app.Want, queue: str, seq: int = 1) -> Universe:
        """An intent waits in a queue, and it is known that it does."""
        self.rows["queues"][queue] = queue_of((seq, intent(want)))
        catalog = self.rows["worlds"]["u"]
        if "/effects/" in queue:
            catalog["pending"][want.hash.hex()] = {"world_id": W, "dead": False}
        else:
            slot = check_app.slot_of(want)
            catalog["slots"].append({"world_id": W, "slot": slot, "intent_hash": want.hash})
        return self

    def ended(self, queue: str) -> Universe:
        """What waited in a queue waits no more."""
        catalog = self.rows["worlds"]["u"]
        self.rows["queues"][queue] = queue_of()
        catalog["pending"].clear()
        catalog["slots"].clear()
        return self

    def audit(self, *path: Any, to: Any = ..., at_s: float = 50) -> Universe:
        """The rows as they are, or with what a path leads to changed, or gone."""
        rows = copy.deepcopy(self.rows)
        if path:
            found = rows
            for key in path[:-1]:
                found = found[key]
            if to is ...:
                del found[path[-1]]
            else:
                found[path[-1]] = to
        self.history.add(int(at_s * S), "audit", value=rows)
        return self

    @property
    def height(self) -> int:
        return len(self.states) - 1

    def state_bytes(self, height: int) -> bytes:
        return check_app.stored(self.states[height])

    def runs(self, worker: str = "a", *unknown: str, version: str = "1") -> Universe:
        """A worker whose code does not know some types."""
        told = {"unknown": list(unknown), "version": version}
        return self.did(0, "code", told, actor=worker)

    def stopped(
        self, at_s: float, seq: int, worker: str = "a", epoch: int = 1, height: int = 0
    ) -> Universe:
        """It gives the world back before an item that it does not know, or at an entry of other code."""
        args = {"universe": "u", "world_id": W, "held": lease(worker, epoch), "seq": seq}
        args["height"] = height
        return self.did(at_s, "cycle.stop", args, actor=worker)

    # -- the rows that follow ------------------------------------------------------------------

    def _entry(self, ingress: list[Any], wrong: Plain, *, last: bool) -> bytes:
        height = self.height + 1
        step: Plain = {
            "seq": wrong.get("seq", height),
            "ingress": dict(zip(check_app.INGRESS, ingress, strict=True)),
            "wall_ns": 7,
            "entropy": b"e" * 16,
            "code": wrong.get("code", "1"),
            "generation": 1,
            "outcome": "unknown" if wrong.get("outcome") == "unknown" else "ok",
            "emitted": [],
            "error": "",
            "reply": None,
            "base": wrong.get("base", 0),
        }
        should = check_app.react(self.states[-1], step, W, W, height)
        step["outcome"] = wrong.get("outcome", should.outcome)
        step["reply"] = wrong.get("reply", should.reply)
        step["emitted"] = wrong.get("emitted", [want.content for want in should.wants])
        self.states.append(should.state)
        self.wants += should.wants
        if last and should.state["whim"] is None:
            # What a moody handler saw.
            should.state["whim"] = 7
        digest = check_app.digest_of(should.state, step["code"])
        step["state"] = wrong.get("state", digest if last else b"")
        body = pack([ingress if name == "ingress" else value for name, value in step.items()])
        self._journal(height, body)
        box = self.rows["inboxes"][SUBJECT]
        box["rows"].pop(step["seq"], None)
        box["cursor"] = height
        box["last_seq"] = max(box["last_seq"], height)
        return body

    def _journal(self, height: int, body: bytes) -> None:
        kept = self.rows["journals"][SUBJECT]
        head = kept["head"] or {"floor": 1, "below": GENESIS, "hash": GENESIS, "checkpoint": 0}
        at = height.to_bytes(8, "big") + (5).to_bytes(8, "big", signed=True)
        hash = hashlib.sha256(head["hash"] + at + b"\x00" + body).digest()
        kept["entries"][height] = {"hash": hash, "at_ns": 5, "body": body, "blob": b""}
        kept["head"] = {**head, "height": height, "hash": hash, "packed": 0}


def record(world_id: str, **changes: Any) -> Plain:
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


def row(key: str | None, ingress: list[Any]) -> Plain:
    """The row of an ingress."""
    return {"key": key, "at_ns": 0, "body": pack(ingress), "blob": b""}


def queue_of(*items: tuple[int, bytes]) -> Plain:
    """The rows of a queue that holds these, all ready."""
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


def intent(want: check_app.Want, world_id: str = W) -> bytes:
    return pack(["u", world_id, want.hash, want.kind, want.params])
