"""A coordinator at work: time that is moved by hand, and after every decision the rows are verified
against the log and counted again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.clock import S, SimClock
from holdfast.durable import journal
from holdfast.store.api import Store, Txn
from holdfast.tasks import coordinator as tasks
from holdfast.tasks import records, recount, verify
from holdfast.tasks.board import Board
from holdfast.tasks.coordinator import Answer, End, Grant, Hold, Leased, New, Report
from holdfast.tasks.records import Entry, Single
from holdfast.tasks.rows import (
    FRESH,
    Counts,
    Limits,
    Spec,
    Status,
    body_of,
    counts_of,
    decode_status,
    keys_of,
    pack_int,
    seq_of,
)
from holdfast.tasks.runs import SEQ_END, held_between, status_of
from holdfast.tasks.states import State

UNIVERSE = "u"
LEASE_NS = 60 * S
KEYS = keys_of(UNIVERSE)


class Desk:
    def __init__(self, store: Store, clock: SimClock) -> None:
        self.store = store
        self.clock = clock
        # The live rows as they were at each height.
        self.lived: dict[int, dict[int, Status]] = {0: {}}

    def do(self, operation: Any, *args: Any) -> Any:
        try:
            return self.store.transact(operation, UNIVERSE, *args)
        finally:
            self.check()

    # -- operations ----------------------------------------------------------------------------

    def submit(self, *new: New | bytes, **spec: Any) -> list[int]:
        """Tasks of one kind; bytes are the arguments of a plain one."""
        wanted = [one if isinstance(one, New) else New(one) for one in new]
        spec.setdefault("name", "work")
        spec.setdefault("lease_ns", LEASE_NS)
        # Whoever outlives one lease is a suspect.
        spec.setdefault("expiries_max", 2)
        found: list[int] = self.do(tasks.submit, Spec(**spec), wanted)
        return found

    def one(self, args: bytes = b"x", **options: Any) -> int:
        new = {name: options.pop(name) for name in _NEW if name in options}
        return self.submit(New(args, **new), **options)[0]

    def ask(
        self,
        limit: int = 100,
        *,
        worker: str = "w",
        queues: Sequence[str] = ("default",),
        alone: bool = False,
        names: Sequence[str] = (),
    ) -> Leased:
        asked = (worker, list(queues), limit, alone, (), tuple(names))
        leased: Leased = self.do(tasks.lease, *asked)
        return leased

    def lease(self, limit: int = 100, **options: Any) -> list[Grant]:
        return self.ask(limit, **options).grants

    def leased(self, seq: int, *, alone: bool = False) -> Grant:
        """The grant of a task that is the next to be granted."""
        [grant] = self.lease(1, alone=alone)
        assert grant.seq == seq
        return grant

    def settle(
        self, *reports: Report, worker: str = "w", generation: int | None = None
    ) -> list[Answer]:
        generation = self.store.generation if generation is None else generation
        return [Answer(a) for a in self.do(tasks.settle, worker, generation, list(reports))]

    def complete(self, grant: Grant, result: bytes = b"r") -> Answer:
        return self.settle(Report(grant.seq, grant.lease, End.OK, result))[0]

    def fail(self, grant: Grant, end: End = End.FAILED, **options: Any) -> Answer:
        return self.settle(Report(grant.seq, grant.lease, end, **options))[0]

    def extend(self, *holds: Hold, generation: int | None = None) -> list[int]:
        generation = self.store.generation if generation is None else generation
        answers: list[int] = self.do(tasks.extend, generation, list(holds))
        return answers

    def cancel(self, *seqs: int, reason: str = "cancelled") -> list[bool]:
        found: list[bool] = self.do(tasks.cancel, list(seqs), reason)
        return found

    def redrive(self, *seqs: int) -> list[int]:
        found: list[int] = self.do(tasks.redrive, list(seqs))
        return found

    def limit(self, queue: str = "default", **limits: int) -> None:
        self.do(tasks.limit, queue, Limits(**limits))

    def maintain(self, limit: int = 1000) -> int:
        done: int = self.do(tasks.maintain, limit)
        return done

    def later(self, ns: int) -> None:
        """So much later: commits are a nanosecond apart at least, so no less."""
        self.clock.advance(ns + 1000)

    def until(self, at_ns: int) -> None:
        """Let the next commit be the one of this very time."""
        while self.store.now_ns() < at_ns:
            self.clock.advance(at_ns - self.store.now_ns())
        assert self.store.now_ns() == at_ns

    # -- looking -------------------------------------------------------------------------------

    def status(self, seq: int) -> Status:
        return self.store.read(status_of, KEYS, pack_int(seq))

    def state(self, seq: int) -> State:
        return State(self.status(seq).state)

    def states(self, *seqs: int) -> list[str]:
        return [self.state(seq).name for seq in seqs]

    def kept(self, seq: int) -> bool:
        return self.store.read(body_of, KEYS, pack_int(seq)) is not None

    def counts(self, queue: str = "default") -> Counts:
        return self.store.read(counts_of, KEYS, queue)

    def entries(self) -> list[Entry]:
        return self.store.read(_entries)

    def log(self) -> list[Single]:
        return [record for entry in self.entries() for record in singles(entry)]

    def said(self, seq: int) -> list[str]:
        """The kinds of records about a task, in order."""
        return [type(record).__name__ for record in self.log() if record.task_id == seq]

    def board(self) -> Board:
        return Board().replay(self.log())

    def rows(self) -> dict[int, Status]:
        return self.store.read(_statuses)

    # -- checking ------------------------------------------------------------------------------

    def check(self) -> None:
        found, height, rows = self.store.read(_checked)
        assert not found, found
        self.lived.setdefault(height, rows)
        # Whatever changes a status is in the log; soft state is not part of it.
        before = {seq: status for seq, status in self.lived[height].items() if seq in rows}
        assert logged(before) == logged(rows), "rows changed, and the log did not"


_NEW = ("delay_ns", "key", "limit", "after")


def singles(entry: Entry) -> Iterator[Single]:
    return records.singles(entry, lambda seq: None)


def logged(rows: dict[int, Status]) -> dict[int, dict[str, Any]]:
    """The part of statuses that the log decides, of tasks that have not been forgotten."""
    return {
        seq: {field: getattr(status, field) for field in verify.FIELDS}
        for seq, status in rows.items()
    }


def _entries(txn: Txn) -> list[Entry]:
    head = journal.head(txn, KEYS.subject)
    found = journal.read(txn, KEYS.subject, head.floor, head.height + 1, 10_000)
    return [records.decode(entry.body) for entry in found]


def _statuses(txn: Txn) -> dict[int, Status]:
    rows = {seq_of(key[len(KEYS.bodies) :]): FRESH for key, _ in verify.rows_of(txn, KEYS.bodies)}
    rows |= held_between(txn, KEYS, 0, SEQ_END)
    for key, row in verify.rows_of(txn, KEYS.statuses):
        rows[seq_of(key[len(KEYS.statuses) :])] = decode_status(row)
    return rows


def _checked(txn: Txn) -> tuple[list[verify.Difference], int, dict[int, Status]]:
    found = [*verify.differences(txn, UNIVERSE), *recount.differences(txn, UNIVERSE)]
    return found, journal.head(txn, KEYS.subject).height, _statuses(txn)
