"""History: the recorded events of a run, in order. Checkers read nothing else.

A `HistoryEvent` is one operation of an incarnation, or an action on the store. `result` is the
actor's knowledge: `ok`, `fail` (`value` then names the error), or `unknown` (the actor died, or the
answer was lost). `commit_no` is above 0 exactly if the operation was applied, regardless of the
actor's knowledge. `value` is then its answer. Arguments and values are plain data, with Records as
dicts, so that tests can write a bad history by hand.

Events of the environment, by op:

    config     parameters of the run (budgets, retention, lease times), once, first
    audit      all rows at that moment, decoded by `row_decoder`
    backup     a copy of the rows is taken;  restore: a copy is restored as a new generation
    takeover   the engine was reopened;  reboot: the machine was rebooted as well
    boot       an attempt to open the store under some schema marker
    fault      an injected fault;  calm: no more faults from here on
    quiet      the run came to rest within its limit (value True), or did not
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

import msgspec

SYSTEM = "-"

# Dicts are encoded in insertion order, which is equal in equal runs.
_encoder = msgspec.msgpack.Encoder()


class HistoryEvent(msgspec.Struct, gc=False):
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
    # The client's transaction number. A transaction is applied at most once per number.
    txn_no: int = 0

    @property
    def applied(self) -> bool:
        return self.commit_no > 0

    @property
    def code(self) -> str:
        """The error code of a failed event."""
        return str(self.value["code"]) if self.result == "fail" else ""

    def __str__(self) -> str:
        arguments = " ".join(f"{name}={_abbreviate(value)}" for name, value in self.args.items())
        mark = f"#{self.commit_no}" if self.commit_no else "-"
        value = "" if self.value is None else f" → {_abbreviate(self.value)}"
        process = self.actor if not self.incarnation else f"{self.actor}/{self.incarnation}"
        return f"{self.i:5} {self.at_ns / 1e9:16.3f} {process:14} {self.op} {arguments} {self.result} {mark}{value}"


class History:
    def __init__(self, events: Iterable[HistoryEvent] = ()) -> None:
        self.events: list[HistoryEvent] = list(events)
        self._store_lives: list[list[HistoryEvent]] | None = None
        self.replay_violations: list[Any] | None = None  # violations found by the replays
        self.lease_lives: list[list[HistoryEvent]] | None = (
            None  # lives with lease operations expanded
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
    ) -> HistoryEvent:
        event = HistoryEvent(
            i=len(self.events),
            at_ns=at_ns,
            actor=actor,
            incarnation=incarnation,
            op=op,
            args=args or {},
            result=result,
            value=value,
            epoch=epoch,
            commit_no=commit_no,
            txn_no=txn_no,
        )
        self.events.append(event)
        self._store_lives = self.lease_lives = None
        return event

    def __iter__(self) -> Iterator[HistoryEvent]:
        return iter(self.events)

    def config(self, name: str, default: Any = None) -> Any:
        for event in self.events[:1]:
            if event.op == "config":
                return event.args.get(name, default)
        return default

    def store_lives(self) -> list[list[HistoryEvent]]:
        """Split the history into the lives of the store.

        A restore returns the store to its backup. The life of the restored store is the history up
        to the backup, then the history since the restore. The life that ended at the restore is
        checked as well.
        """
        if self._store_lives is None:
            self._store_lives = list(_split_lives(self.events))
        return self._store_lives

    def hash(self) -> str:
        return hashlib.sha256(_encoder.encode(self.events)).hexdigest()

    def slice(self, around: Iterable[int], margin: int = 4) -> list[HistoryEvent]:
        """The events near these indices, for a report."""
        wanted = {at for i in around for at in range(i - margin, i + margin + 1)}
        return [event for event in self.events if event.i in wanted and event.op != "audit"]


def to_plain(value: Any) -> Any:
    """Convert Records to dicts, so that checkers need no product code to read them."""
    if value is None or isinstance(value, str | int | bytes | float):
        return value
    if isinstance(value, msgspec.Struct):
        return {name: to_plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: to_plain(getattr(value, name)) for name in value._fields}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.value
    return f"<{type(value).__name__}>"  # code, not data


def _split_lives(events: list[HistoryEvent]) -> Iterator[list[HistoryEvent]]:
    life: list[HistoryEvent] = []
    until: dict[int, list[HistoryEvent]] = {}
    for event in events:
        if event.op == "backup":
            until[event.args["id"]] = list(life)
        elif event.op == "restore":
            yield life
            life = list(until[event.args["id"]])
        life.append(event)
    yield life


def _abbreviate(value: Any) -> str:
    if isinstance(value, bytes):
        text = repr(value[:24])[1:]
        return text if len(value) <= 24 else f"{text}…{len(value)}"
    if isinstance(value, dict):
        return "{" + " ".join(f"{key}:{_abbreviate(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        items = " ".join(_abbreviate(item) for item in value[:4])
        return f"[{items}{' …' if len(value) > 4 else ''}]"
    return str(value)
