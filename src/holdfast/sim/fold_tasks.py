"""The log of tasks, folded by itself: what the rows must be, by document 003 and nothing of the product.

It starts at the checkpoint before the latest, as the product does, and skips for each task what its
chunk of the checkpoint knows already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from holdfast.sim.audit_tasks import STATUS, decided_ns, singles
from holdfast.sim.model_tasks import DEAD, FAILED, LEASED, WAITING, Model

Plain = dict[str, Any]
Found = Iterator[tuple[str, str]]

# What the fold and the rows must agree about.
FOLDED = ("state", "attempt", "failures", "expiries", "lease", "worker", "expires_ns", "ended_ns",
          "not_before_ns", "reason", "error")  # fmt: skip
FRESH: Plain = {
    "state": 0, "attempt": 0, "failures": 0, "expiries": 0, "lease": 0, "worker": "", "expires_ns": 0,
    "progress_ns": 0, "not_before_ns": 0, "waits": 0, "ended_ns": 0, "reason": "", "error": "",
    "redriven_by": 0, "result": b"", "blob": b"",
}  # fmt: skip


def status_of(tasks: Plain, seq: int) -> Plain:
    """What the rows say of a task: its own status, or that of the run in which it is leased."""
    row: Plain | None = tasks["statuses"].get(seq)
    if row is None:
        row = {**FRESH, **tasks["held"].get(seq, {})}
    return row


class Fold:
    """The log, folded by itself."""

    def __init__(self, tasks: Plain, log: Plain) -> None:
        self.tasks = tasks
        self.log = log
        self.rows: dict[int, Plain] = {}
        self.known: list[tuple[int, int, int]] = []
        self.told: Counter[tuple[int, int]] = Counter()

    def check(self, model: Model) -> Found:
        head, entries = self.log["head"] or {"height": 0, "floor": 1}, self.log["entries"]
        if sorted(entries) != list(range(head["floor"], head["height"] + 1)):
            yield "J2", f"tasks: heights {sorted(entries)}, head {head['height']}"
            return
        start = 0
        base = self.tasks["before"]
        for one in (base, self.tasks["latest"]):
            if one is not None and one["number"]:
                yield from self._whole(one)
        if base is not None and base["number"]:
            start = base["height"]
            self._begin(base)
        if head["floor"] > start + 1:
            yield "J4", f"tasks: cut off at {head['floor']}, a replay begins at {start}"
            return
        for height in range(start + 1, head["height"] + 1):
            if entries[height]["blob"]:
                return  # too long to be kept in a row; nobody writes such here
            yield from self._entry(height, entries[height]["body"])
        for seq in self.tasks["bodies"]:
            mine, row = self.rows.get(seq), status_of(self.tasks, seq)
            if mine is None:
                yield "J5", f"task {seq} is not in the log"
                continue
            for field in FOLDED:
                if mine[field] != row[field]:
                    yield "J5", f"task {seq}: {field} {row[field]!r}, the log says {mine[field]!r}"
        if not start:
            for pair, times in model.told.items():
                if self.told[pair] < times:
                    yield "S6", f"lease {pair[1]} of {pair[0]} was lost, and that is not on record"

    def _begin(self, base: Plain) -> None:
        for chunk in self._chunks(base):
            self.known.append((chunk["lo"], chunk["hi"], chunk["height"]))
            for seq in chunk["fresh"]:
                self.rows[seq] = dict(FRESH)
            for seq, values in chunk["tasks"]:
                self.rows[seq] = dict(zip(STATUS, values, strict=True))

    def _whole(self, base: Plain) -> Found:
        """Whether a checkpoint has all of its chunks, none from before it began."""
        at, chunks = 0, self._chunks(base)
        for chunk in chunks:
            if chunk["lo"] != at or chunk["height"] < base["height"]:
                yield "J4", f"tasks: a chunk from {chunk['lo']} on, after {at}"
            at = chunk["hi"]
        if len(chunks) != base["chunks"] or at <= base["last"]:
            yield "J4", f"tasks: {len(chunks)} chunks up to {at}, of {base['chunks']}"

    def _chunks(self, base: Plain) -> list[Plain]:
        return sorted(self.tasks["chunks"].get(base["number"], []), key=lambda one: int(one["lo"]))

    def _entry(self, height: int, body: bytes) -> Found:
        now_ns = decided_ns(body)
        for tag, seq, said in singles(body):
            if any(lo <= seq < hi and height <= at for lo, hi, at in self.known):
                continue
            row = self.rows.get(seq)
            if tag == 1:
                if row is not None:
                    yield "S1", f"task {seq} was created twice"
                self.rows[seq] = dict(FRESH)
            elif row is None:
                if tag != 7:
                    yield "S1", f"a record of {seq} at {height}, which is no task"
            else:
                yield from self._record(tag, seq, row, said, now_ns)

    def _record(self, tag: int, seq: int, row: Plain, said: list[Any], now_ns: int) -> Found:
        held = row["state"] == LEASED and row["lease"] == said[0] and now_ns < row["expires_ns"]
        if tag == 2:
            if row["state"] != WAITING:
                yield "L5", f"task {seq} was granted, and was in state {row['state']} by the log"
            row.update(state=LEASED, attempt=row["attempt"] + 1, lease=said[0], worker=said[1])
            row.update(expires_ns=said[2], not_before_ns=0)
        elif tag == 3:
            if not held:
                yield "L4", f"task {seq}: lease {said[0]} was extended, and was over by the log"
            row["expires_ns"] = said[1]
        elif tag == 4:
            over = row["state"] == LEASED and row["lease"] == said[0] and not held
            if not over:
                yield "L5", f"task {seq}: lease {said[0]} expired, and was not over by the log"
            _wait(row, expiries=row["expiries"] + 1, reason="lease_expired")
        elif tag == 5:
            if not held:
                yield "S6", f"task {seq} was completed under lease {said[0]}, which was none"
            row.update(state=2, ended_ns=now_ns, expires_ns=0, reason="", error="")
        elif tag == 6:
            if not held:
                yield "S6", f"task {seq} failed under lease {said[0]}, which was none"
            _, reason, error, counts, final, not_before_ns = said
            row["failures"] += counts == "failure"
            row["expiries"] += counts == "expiry"
            row["error"] = error
            if final:
                row.update(state=FAILED, ended_ns=now_ns, expires_ns=0, reason=reason)
                row["not_before_ns"] = 0
            else:
                _wait(row, reason=reason, not_before_ns=not_before_ns)
        elif tag == 7:
            self.told[seq, said[0]] += 1
        else:
            if row["state"] > LEASED:
                yield "S2", f"task {seq} died, and had ended"
            row.update(state=DEAD, ended_ns=now_ns, expires_ns=0, not_before_ns=0, reason=said[0])


def _wait(row: Plain, **fields: Any) -> None:
    row.update(state=WAITING, lease=0, worker="", expires_ns=0, not_before_ns=0)
    row.update(fields)
