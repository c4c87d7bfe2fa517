"""Independent fold of the task log: the rows that document 003 requires, without product code.

It starts at the checkpoint before the latest one, as the product does. For each task it skips log
records that are already in the task's chunk of the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from holdfast.sim.row_decoder_tasks import STATUS, decided_ns, iter_records
from tests.simulation.model_tasks import DEAD, FAILED, LEASED, WAITING, TasksModel

Plain = dict[str, Any]
Findings = Iterator[tuple[str, str]]

# Fields that the fold and the rows must agree on.
FOLDED = ("state", "attempt", "failures", "expiries", "lease", "worker", "expires_ns", "ended_ns",
          "not_before_ns", "reason", "error")  # fmt: skip
NEW_STATUS: Plain = {
    "state": 0, "attempt": 0, "failures": 0, "expiries": 0, "lease": 0, "worker": "", "expires_ns": 0,
    "progress_ns": 0, "not_before_ns": 0, "waits": 0, "ended_ns": 0, "reason": "", "error": "",
    "redriven_by": 0, "result": b"", "blob": b"",
}  # fmt: skip


def stored_status(tasks: Plain, seq: int) -> Plain:
    """The stored status of a task: its own row, or the one derived from its range lease."""
    row: Plain | None = tasks["statuses"].get(seq)
    if row is None:
        row = {**NEW_STATUS, **tasks["held"].get(seq, {})}
    return row


class TaskLogFold:
    """Folds the task log."""

    def __init__(self, tasks: Plain, log: Plain) -> None:
        self.tasks = tasks
        self.log = log
        self.rows: dict[int, Plain] = {}
        self.checkpointed: list[tuple[int, int, int]] = []
        self.rejected_reports: Counter[tuple[int, int]] = Counter()

    def check(self, model: TasksModel) -> Findings:
        head, entries = self.log["head"] or {"height": 0, "floor": 1}, self.log["entries"]
        if sorted(entries) != list(range(head["floor"], head["height"] + 1)):
            yield "J2", f"tasks: heights {sorted(entries)}, head {head['height']}"
            return
        start = 0
        base = self.tasks["before"]
        for one in (base, self.tasks["latest"]):
            if one is not None and one["number"]:
                yield from self._check_complete(one)
        if base is not None and base["number"]:
            start = base["height"]
            self._load_checkpoint(base)
        if head["floor"] > start + 1:
            yield "J4", f"tasks: cut off at {head['floor']}, a replay begins at {start}"
            return
        for height in range(start + 1, head["height"] + 1):
            if entries[height]["blob"]:
                return  # the entry is stored as a blob; no simulated actor writes one
            yield from self._apply_entry(height, entries[height]["body"])
        for seq in self.tasks["bodies"]:
            folded, row = self.rows.get(seq), stored_status(self.tasks, seq)
            if folded is None:
                yield "J5", f"task {seq} is not in the log"
                continue
            for field in FOLDED:
                if folded[field] != row[field]:
                    yield (
                        "J5",
                        f"task {seq}: {field} {row[field]!r}, the log implies {folded[field]!r}",
                    )
        if not start:
            for pair, times in model.rejected_reports.items():
                if self.rejected_reports[pair] < times:
                    yield (
                        "S6",
                        f"lease {pair[1]} of {pair[0]} was lost, but the rejection is not logged",
                    )

    def _load_checkpoint(self, base: Plain) -> None:
        for chunk in self._chunks(base):
            self.checkpointed.append((chunk["lo"], chunk["hi"], chunk["height"]))
            for seq in chunk["fresh"]:
                self.rows[seq] = dict(NEW_STATUS)
            for seq, values in chunk["tasks"]:
                self.rows[seq] = dict(zip(STATUS, values, strict=True))

    def _check_complete(self, base: Plain) -> Findings:
        """Check that a checkpoint has all of its chunks, each taken after it began."""
        at, chunks = 0, self._chunks(base)
        for chunk in chunks:
            if chunk["lo"] != at or chunk["height"] < base["height"]:
                yield "J4", f"tasks: a chunk from {chunk['lo']} on, after {at}"
            at = chunk["hi"]
        if len(chunks) != base["chunks"] or at <= base["last"]:
            yield "J4", f"tasks: {len(chunks)} chunks up to {at}, of {base['chunks']}"

    def _chunks(self, base: Plain) -> list[Plain]:
        return sorted(self.tasks["chunks"].get(base["number"], []), key=lambda one: int(one["lo"]))

    def _apply_entry(self, height: int, body: bytes) -> Findings:
        now_ns = decided_ns(body)
        for tag, seq, fields in iter_records(body):
            if any(lo <= seq < hi and height <= at for lo, hi, at in self.checkpointed):
                continue
            row = self.rows.get(seq)
            if tag == 1:
                if row is not None:
                    yield "S1", f"task {seq} was created twice"
                self.rows[seq] = dict(NEW_STATUS)
            elif row is None:
                if tag != 7:
                    yield "S1", f"a record of {seq} at {height}, which does not exist"
            else:
                yield from self._apply_record(tag, seq, row, fields, now_ns)

    def _apply_record(
        self, tag: int, seq: int, row: Plain, fields: list[Any], now_ns: int
    ) -> Findings:
        is_live = (
            row["state"] == LEASED and row["lease"] == fields[0] and now_ns < row["expires_ns"]
        )
        if tag == 2:
            if row["state"] != WAITING:
                yield "L5", f"task {seq} was granted, and was in state {row['state']} by the log"
            row.update(state=LEASED, attempt=row["attempt"] + 1, lease=fields[0], worker=fields[1])
            row.update(expires_ns=fields[2], not_before_ns=0)
        elif tag == 3:
            if not is_live:
                yield "L4", f"task {seq}: lease {fields[0]} was extended, but had ended in the log"
            row["expires_ns"] = fields[1]
        elif tag == 4:
            is_overdue = row["state"] == LEASED and row["lease"] == fields[0] and not is_live
            if not is_overdue:
                yield "L5", f"task {seq}: lease {fields[0]} expired, but was live in the log"
            _set_waiting(row, expiries=row["expiries"] + 1, reason="lease_expired")
        elif tag == 5:
            if not is_live:
                yield "S6", f"task {seq} was completed under lease {fields[0]}, which was not live"
            row.update(state=2, ended_ns=now_ns, expires_ns=0, reason="", error="")
        elif tag == 6:
            if not is_live:
                yield "S6", f"task {seq} failed under lease {fields[0]}, which was not live"
            _, reason, error, counts, final, not_before_ns = fields
            row["failures"] += counts == "failure"
            row["expiries"] += counts == "expiry"
            row["error"] = error
            if final:
                row.update(state=FAILED, ended_ns=now_ns, expires_ns=0, reason=reason)
                row["not_before_ns"] = 0
            else:
                _set_waiting(row, reason=reason, not_before_ns=not_before_ns)
        elif tag == 7:
            self.rejected_reports[seq, fields[0]] += 1
        else:
            if row["state"] > LEASED:
                yield "S2", f"task {seq} died after it had ended"
            row.update(state=DEAD, ended_ns=now_ns, expires_ns=0, not_before_ns=0, reason=fields[0])


def _set_waiting(row: Plain, **fields: Any) -> None:
    row.update(state=WAITING, lease=0, worker="", expires_ns=0, not_before_ns=0)
    row.update(fields)
