"""What happened, in order: the only thing that checkers look at.

An `Event` is one operation of one actor's incarnation, or something done to the store. `result` is
what the actor learned: `ok`, `fail` (then `value` names the error), or `unknown` (it died, or the
answer was lost). `commit_no` is more than 0 exactly if it was applied, whatever the actor learned;
`value` is then its answer. Arguments and values are plain data, Records turned into dicts, so a bad
history can be written by hand.

Events of the environment, by op:

    config     what the run promises (budgets, retention, time-to-live), once, first
    audit      all rows, decoded by `audit.py`, at that moment
    backup     a copy of the rows is taken;  restore: that copy is put back, as a new generation
    takeover   the engine was opened again;  reboot: the machine was, too
    boot       an attempt to open the store under some schema marker
    fault      an injected fault;  calm: no more faults from here on
    quiet      the run came to rest (value True), or did not within its bound
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

import msgspec

SYSTEM = "-"

# In the order of insertion: the same run inserts in the same order.
_encoder = msgspec.msgpack.Encoder()


class Event(msgspec.Struct, gc=False):
    i: int
    at_ns: int
    actor: str
    incarnation: str
    op: str
    args: dict[str, Any] = {}
    result: str = "ok"
    value: Any = None
    epoch: int = 0
    commit_no: int = 0
    # The caller's number for its transaction: one number is applied once.
    txn_no: int = 0

    @property
    def applied(self) -> bool:
        return self.commit_no > 0

    @property
    def code(self) -> str:
        """The error's code, of a failed event."""
        return str(self.value["code"]) if self.result == "fail" else ""

    def __str__(self) -> str:
        told = " ".join(f"{name}={_short(value)}" for name, value in self.args.items())
        mark = f"#{self.commit_no}" if self.commit_no else "-"
        value = "" if self.value is None else f" → {_short(self.value)}"
        who = self.actor if not self.incarnation else f"{self.actor}/{self.incarnation}"
        return f"{self.i:5} {self.at_ns / 1e9:16.3f} {who:14} {self.op} {told} {self.result} {mark}{value}"


class History:
    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events: list[Event] = list(events)
        self._lives: list[list[Event]] | None = None
        self.memo: list[Any] | None = None  # what one pass of each replay found
        self.lease_lives: list[list[Event]] | None = (
            None  # lives, as the checkers of leases see them
        )

    def add(
        self,
        at_ns: int,
        op: str,
        args: dict[str, Any] | None = None,
        *,
        actor: str = SYSTEM,
        incarnation: str = "",
        result: str = "ok",
        value: Any = None,
        epoch: int = 0,
        commit_no: int = 0,
        txn_no: int = 0,
    ) -> Event:
        i = len(self.events)
        event = Event(
            i, at_ns, actor, incarnation, op, args or {}, result, value, epoch, commit_no, txn_no
        )
        self.events.append(event)
        self._lives = self.lease_lives = None
        return event

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def config(self, name: str, default: Any = None) -> Any:
        for event in self.events[:1]:
            if event.op == "config":
                return event.args.get(name, default)
        return default

    def lives(self) -> list[list[Event]]:
        """The history as each copy of the store lived it.

        A restore takes the store back to its backup. So what the restored store has seen is: all
        up to the backup, then all since the restore. The life that ended there is a history of its
        own, and must be right too.
        """
        if self._lives is None:
            self._lives = list(_lives(self.events))
        return self._lives

    def hash(self) -> str:
        return hashlib.sha256(_encoder.encode(self.events)).hexdigest()

    def slice(self, around: Iterable[int], margin: int = 4) -> list[Event]:
        """The events near these indices, for a report."""
        wanted = {at for i in around for at in range(i - margin, i + margin + 1)}
        return [event for event in self.events if event.i in wanted and event.op != "audit"]


def plain(value: Any) -> Any:
    """Records as dicts, so that a checker needs no product code to read them."""
    if value is None or isinstance(value, str | int | bytes | float):
        return value
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: plain(getattr(value, name)) for name in value._fields}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.value
    return f"<{type(value).__name__}>"  # code, which is no data


def _lives(events: list[Event]) -> Iterator[list[Event]]:
    life: list[Event] = []
    until: dict[int, list[Event]] = {}
    for event in events:
        if event.op == "backup":
            until[event.args["id"]] = list(life)
        elif event.op == "restore":
            yield life
            life = list(until[event.args["id"]])
        life.append(event)
    yield life


def _short(value: Any) -> str:
    if isinstance(value, bytes):
        text = repr(value[:24])[1:]
        return text if len(value) <= 24 else f"{text}…{len(value)}"
    if isinstance(value, dict):
        return "{" + " ".join(f"{key}:{_short(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        items = " ".join(_short(item) for item in value[:4])
        return f"[{items}{' …' if len(value) > 4 else ''}]"
    return str(value)
