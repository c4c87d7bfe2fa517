"""Model of a run's ledger: a list of row states, and the effect of each log entry.

It is deliberately simple: one row at a time, sets instead of ranges, all budgets recounted. Entries
are read by position from the stored log. An illegal entry is reported to `bad` with the number of
the invariant it violates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

UNSEEN, DISPATCHED, IN_FLIGHT, SUCCESS, SKIP, FAIL, CANCEL, COMMITTED = range(8)
# The twelve legal transitions.
MOVES = {
    (UNSEEN, DISPATCHED), (DISPATCHED, IN_FLIGHT), (DISPATCHED, CANCEL), (IN_FLIGHT, SUCCESS),
    (IN_FLIGHT, SKIP), (IN_FLIGHT, FAIL), (IN_FLIGHT, CANCEL), (FAIL, DISPATCHED),
    (SUCCESS, COMMITTED), (SKIP, COMMITTED), (FAIL, COMMITTED), (CANCEL, COMMITTED),
}  # fmt: skip
# Error classes: transient, resource, lease expired.
RETRYABLE = (1, 2, 3)
EXPIRED = 3
POLICY = [
    "attempts_max",
    "retries_max",
    "lease_ns",
    "grace_ns",
    "page_rows",
    "batch_rows",
    "ahead_rows_max",
    "backoff_first_ns",
    "backoff_factor",
    "backoff_max_ns",
    "stop",
]

ReportViolation = Callable[[str, str], None]
Ranges = Iterable[tuple[int, int]]

_decode = msgspec.msgpack.Decoder().decode


class GrantModel:
    """A grant: its rows that are not begun, and its begun rows."""

    def __init__(self, rows: Iterable[int], at_ns: int) -> None:
        self.not_begun = set(rows)
        self.begun: set[int] = set()
        self.last_report = 0
        # Time of the last heartbeat or report. The grant must not expire before a lease time has
        # passed.
        self.last_contact_ns = at_ns


@dataclass(slots=True)
class RunPhase:
    """The phase of a run: opened, then cancelling, stopped or halted."""

    opened: bool = False
    cancelling: bool = False
    # End of the grace period of a cancelled run.
    grace_ends_ns: int = 0
    halted: bool = False
    stopped: bool = False


class LedgerModel:
    """Model of one run, entry by entry."""

    def __init__(
        self, run: str, report_violation: ReportViolation, *, claims_any_rows: bool = False
    ) -> None:
        self.run = run
        self._report_violation = report_violation
        # Whether every claim accepts any rows. The rows that hold up the commit then have priority.
        self._claims_any_rows = claims_any_rows
        self.phase = RunPhase()
        self.policy: dict[str, Any] = {}
        self.state: list[int] = []
        self.attempts: list[int] = []
        self.ended = [0, 0, 0, 0]
        self.grants: dict[int, GrantModel] = {}
        self.epoch = 0
        self.begins: set[tuple[int, int]] = set()  # (epoch, seq)
        self.terminals: set[tuple[int, int]] = set()  # (seq, attempt)
        self.replies: dict[tuple[int, int], bytes] = {}  # (epoch, n) → digest
        self.suspects: set[int] = set()
        self.backoffs: dict[int, int] = {}  # seq → earliest retry
        self.retries = 0
        self.next_commit = 0
        self.decided_ns = 0

    def apply(self, body: bytes) -> str:
        """Apply one entry. Return its kind."""
        kind, decided_ns, *rest = _decode(body)
        if self.phase.opened != (kind != "opened"):
            self.add_violation(
                "S1", f"{kind} {'after' if self.phase.opened else 'before'} it was opened"
            )
        if self.phase.halted:
            self.add_violation("S1", f"{kind} after the run was halted")
        if decided_ns < self.decided_ns:
            self.add_violation("S5", f"{kind}: time runs backward")
        self.decided_ns = decided_ns
        getattr(self, f"_{kind}")(*rest)
        return str(kind)

    def add_violation(self, number: str, what: str) -> None:
        self._report_violation(number, f"{self.run}: {what}")

    def counts(self) -> list[int]:
        return [self.state.count(code) for code in range(8)]

    def terminal_prefix(self) -> int:
        """The first row that is not final."""
        return next((s for s, code in enumerate(self.state) if code < SUCCESS), len(self.state))

    # -- entries -------------------------------------------------------------------------------

    def _opened(self, size: int, policy: list[Any]) -> None:
        self.phase.opened = True
        # Logs written before the last field existed have one field less.
        if not len(POLICY) - 1 <= len(policy) <= len(POLICY):
            self.add_violation("S1", f"a policy of {len(policy)} fields")
        self.policy = dict(zip(POLICY, policy, strict=False))
        self.state, self.attempts = [UNSEEN] * size, [0] * size

    def _leased(self, epoch: int, owner: str, parts: list[Any], begun: Ranges, alone: bool) -> None:
        if epoch != self.epoch + 1:
            self.add_violation("S1", f"epoch {epoch} follows {self.epoch}")
        self.epoch = epoch
        if self.phase.cancelling:
            self.add_violation("S1", "rows granted while the run is being cancelled")
        if self.phase.stopped:
            self.add_violation("S1", "rows granted after the run was stopped")
        granted = {seq for held in self.grants.values() for seq in held.not_begun | held.begun}
        unseen = next((s for s, code in enumerate(self.state) if code == UNSEEN), 0)
        rows = [(seq, part[2]) for part in parts for seq in range(part[0], part[1])]
        if len({seq // self.policy["page_rows"] for seq, _ in rows}) > 1:
            self.add_violation("S1", f"grant {epoch} crosses a page")
        for seq, attempt in rows:
            if self.state[seq] == UNSEEN:
                ahead = self.policy["ahead_rows_max"]
                if ahead and unseen - self.next_commit > ahead:
                    self.add_violation("S3", f"{seq} granted too far ahead of {self.next_commit}")
                self._move(seq, DISPATCHED)
            elif self.state[seq] >= SUCCESS:
                self.add_violation("P2", f"{seq} granted again after its end")
            elif self.state[seq] != DISPATCHED or seq in granted:
                self.add_violation("S1", f"{seq} granted while another grant has it")
            if attempt != self.attempts[seq] + 1:
                self.add_violation("S2", f"{seq} granted as attempt {attempt}")
            if self.backoffs.pop(seq, 0) > self.decided_ns:
                self.add_violation("T1", f"{seq} retried before its time")
        seqs = [seq for seq, _ in rows]
        if alone != bool(self.suspects & set(seqs)) or (alone and not set(seqs) <= self.suspects):
            self.add_violation(
                "S5", f"suspects {sorted(self.suspects)}, granted {seqs}, alone {alone}"
            )
        head = self.terminal_prefix()
        if self._claims_any_rows and head in self.suspects and head not in seqs:
            self.add_violation("S5", f"{seqs} granted, and suspect {head} holds up the commit")
        if alone and len(seqs) > max(1, int(self.policy["batch_rows"] ** 0.5)):
            self.add_violation("S5", f"{len(seqs)} suspects at once")
        self.suspects -= set(seqs)
        held = self.grants[epoch] = GrantModel(seqs, self.decided_ns)
        self._begin(epoch, held, begun)

    def _advanced(
        self, epoch: int, n: int, digest: bytes, done: list[Any], retried: list[Any],
        begun: Ranges, stop: str,
    ) -> None:  # fmt: skip
        held = self.grants.get(epoch)
        if held is None:
            self.add_violation("S6", f"a report of grant {epoch}, which is lost or finished")
            held = GrantModel((), 0)
        if (epoch, n) in self.replies:
            self.add_violation("S2", f"report {n} of grant {epoch} was counted twice")
        elif n != held.last_report + 1:
            self.add_violation("S2", f"report {n} of grant {epoch} after {held.last_report}")
        held.last_report, held.last_contact_ns = n, self.decided_ns
        self.replies[epoch, n] = digest
        for lo, hi, error, not_before_ns in retried:
            for seq in range(lo, hi):
                if not self._may_retry(seq, error):
                    self.add_violation("S3", f"{seq} retried beyond its budget")
                self._end(epoch, held, seq, FAIL)
                self._retry(seq)
                self.backoffs[seq] = not_before_ns
        # Applied after the retries, which use up budget first.
        for lo, hi, code, error, *_ in done:
            for seq in range(lo, hi):
                if code == FAIL and self._may_retry(seq, error):
                    self.add_violation("S3", f"{seq} failed finally with budget left")
                self._end(epoch, held, seq, code)
        if begun and self.phase.cancelling:
            self.add_violation("S1", "rows begun while the run is being cancelled")
        self._begin(epoch, held, begun)
        if not held.not_begun and not held.begun:
            self.grants.pop(epoch, None)

    def _ripened(self) -> None: ...

    def _counted(self, cost: float, errors: list[Any]) -> None: ...

    def _stopped(self, why: str) -> None:
        self.phase.stopped = True

    def _resumed(self) -> None:
        self.phase.stopped = False

    def _reclaimed(
        self, epoch: int, why: str, suspects: Ranges, failed: Ranges, cancelled: Ranges
    ) -> None:
        held = self.grants.pop(epoch, None)
        if held is None:
            self.add_violation("S1", f"grant {epoch} reclaimed, which is lost or finished")
            return
        if why == "expired" and self.decided_ns - held.last_contact_ns < self.policy["lease_ns"]:
            self.add_violation("S5", f"grant {epoch} expired before its time")
        expected = self._expected_reclaim(held)
        decided = [set(_seqs(suspects)), set(_seqs(failed)), set(_seqs(cancelled))]
        if decided != expected:
            self.add_violation("S5", f"grant {epoch}: {decided} decided, not {expected}")
        for seq in sorted(decided[0] | decided[1]):
            self._end(epoch, held, seq, FAIL)
            if seq in decided[0]:
                self._retry(seq)
        self.suspects |= decided[0]
        for seq in decided[2]:
            self._end(epoch, held, seq, CANCEL)

    def _expected_reclaim(self, held: GrantModel) -> list[set[int]]:
        """Suspect, failed and cancelled rows of a lost grant. The lowest rows use the budget
        first."""
        if self.phase.cancelling:
            return [set(), set(), set(held.begun)]
        suspects: set[int] = set()
        for seq in sorted(held.begun):
            if self._may_retry(seq, EXPIRED, len(suspects)):
                suspects.add(seq)
        return [suspects, held.begun - suspects, set()]

    def _cancelling(self, grace_ends_ns: int) -> None:
        self.phase.cancelling, self.phase.grace_ends_ns = True, grace_ends_ns
        if grace_ends_ns != self.decided_ns + self.policy["grace_ns"]:
            self.add_violation("S5", "a grace of another length")
        for seq, code in enumerate(self.state):
            if code == UNSEEN:
                self._move(seq, DISPATCHED)
            if code in (UNSEEN, DISPATCHED):
                self._finish(seq, CANCEL)
        self.suspects.clear()
        for epoch, held in list(self.grants.items()):
            held.not_begun.clear()
            if not held.begun:
                del self.grants[epoch]

    def _cancelled(self) -> None:
        if not self.phase.cancelling or self.decided_ns < self.phase.grace_ends_ns:
            self.add_violation("S5", "the grace ended before its time")
        for held in self.grants.values():
            for seq in held.begun:
                self._finish(seq, CANCEL)
        self.grants.clear()

    def _committed(self, upto: int, version: int) -> None:
        if version != upto - 1 or upto <= self.next_commit:
            self.add_violation("P1", f"{self.next_commit} to {upto} committed as version {version}")
        for seq in range(self.next_commit, upto):
            self._move(seq, COMMITTED)
        self.next_commit = upto

    def _halted(self, *about: Any) -> None:
        self.phase.halted = True

    # -- rows ----------------------------------------------------------------------------------

    def _move(self, seq: int, to: int) -> None:
        if (self.state[seq], to) not in MOVES:
            self.add_violation("S1", f"{seq}: {self.state[seq]} to {to}")
        self.state[seq] = to

    def _finish(self, seq: int, code: int) -> None:
        """Record a terminal state, once per attempt."""
        if self.state[seq] == COMMITTED or (seq, self.attempts[seq]) in self.terminals:
            self.add_violation("S2", f"{seq} ended twice in attempt {self.attempts[seq] + 1}")
        self.terminals.add((seq, self.attempts[seq]))
        self._move(seq, code)
        self.ended[code - SUCCESS] += 1

    def _end(self, epoch: int, held: GrantModel, seq: int, code: int) -> None:
        if seq not in held.begun:
            self.add_violation("S1", f"{seq} ended by grant {epoch}, which had not begun it")
        held.begun.discard(seq)
        self._finish(seq, code)

    def _retry(self, seq: int) -> None:
        self._move(seq, DISPATCHED)
        self.ended[FAIL - SUCCESS] -= 1
        self.attempts[seq] += 1
        self.retries += 1

    def _may_retry(self, seq: int, error: int, besides: int = 0) -> bool:
        bound = self.policy["retries_max"]
        return (
            not self.phase.cancelling
            and error in RETRYABLE
            and self.attempts[seq] + 1 < self.policy["attempts_max"]
            and (not bound or self.retries + besides < bound)
        )

    def _begin(self, epoch: int, held: GrantModel, begun: Ranges) -> None:
        for seq in _seqs(begun):
            if seq not in held.not_begun:
                self.add_violation("S1", f"{seq} begun by grant {epoch}, which does not have it")
            held.not_begun.discard(seq)
            held.begun.add(seq)
            self.begins.add((epoch, seq))
            self._move(seq, IN_FLIGHT)


def _seqs(ranges: Ranges) -> Iterator[int]:
    for lo, hi in ranges:
        yield from range(lo, hi)
