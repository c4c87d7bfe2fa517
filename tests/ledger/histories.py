"""Histories at random: what workers, a clock, a driver and a committer may do to a board.

A step is a small tuple of numbers; what it means depends on where the board stands, so every list of
steps is a history, and hypothesis can shrink it. `Watcher` checks after each step what must hold at
any time, against its own simple notion of it.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from holdfast.clock import S
from holdfast.errors import Fenced
from holdfast.ledger.answers import Finished, Grant, Stop, Wait
from holdfast.ledger.board import Board
from holdfast.ledger.records import Done
from tests.ledger.rig import LEASE_NS, Table

CLASSES = [1, 2, 3, 4, 5, 6]
OWNERS = ["a", "b", "c"]

Step = tuple[str, int, int]

# Cancellations end most of what can happen, so they are rare.
KINDS = (
    ["claim"] * 6 + ["begin"] * 4 + ["done"] * 8 + ["sleep"] * 2 + ["commit"] * 2 + ["repeat"]
    + ["expire", "drop", "give_back", "heartbeat", "stale", "crash", "restart"]
)  # fmt: skip
STEPS: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 1000), st.integers(0, 1000)),
    max_size=60,
)
ENDINGS: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(
        st.sampled_from(["cancel", "claim", "begin", "done", "sleep", "end_grace", "expire"]),
        st.integers(0, 1000),
        st.integers(0, 1000),
    ),
    max_size=12,
)
POLICIES = st.fixed_dictionaries(
    {
        "attempts_max": st.integers(1, 4),
        "retries_max": st.sampled_from([0, 0, 3, 10]),
        "page_rows": st.sampled_from([4, 8, 64]),
        "batch_rows": st.sampled_from([0, 0, 4]),
        "ahead_rows_max": st.sampled_from([0, 0, 6]),
        "backoff_first_ns": st.sampled_from([0, S]),
    }
)
SIZES = st.integers(0, 30)


class History(Table):
    """A table that follows steps. `heights` are the dumps after each length of the log."""

    def __init__(self, size: int, **policy: Any) -> None:
        super().__init__(size, **policy)
        self.heights: dict[int, bytes] = {}
        self._last: tuple[int, int, bytes, list[Done], Any] | None = None
        self._watch = Watcher(size)

    def run(self, steps: list[Step]) -> None:
        for kind, a, b in steps:
            getattr(self, f"_{kind}")(a, b)
            self.heights[len(self.log)] = self.board.dump()
            self._watch.look(self.board)

    def finish_all(self, rounds: int = 400) -> None:
        """Steady workers take over: everything must end."""
        for _ in range(rounds):
            self.take(self.board.expire(self.now_ns))
            self.take(self.board.end_grace(self.now_ns))
            answer = self.ask("steady", 8, begin=8)
            match answer:
                case Finished():
                    break
                case Stop():
                    if self.board.finished:
                        break
                    self.now_ns = self.board.next_due_ns() or self.now_ns
                case Wait():
                    self.commit()
                    self.now_ns = max(self.now_ns, self.board.next_due_ns() or 0)
                case Grant():
                    if answer.alone:
                        self.report(answer, begin=[(p.lo, p.hi) for p in answer.parts])
                    self.finish(answer)
        self.commit()
        self.heights[len(self.log)] = self.board.dump()
        self._watch.look(self.board)

    def recover(self, board: Board, height: int) -> None:
        """The process died with entries that may not be logged: go on from what was."""
        board.renew(self.now_ns)
        self.board, self.log = board, self.log[:height]
        self._numbers = {epoch: held.n for epoch, held in board.grants.items()}
        self._last = None
        self._watch = Watcher(board.size)

    # -- steps ---------------------------------------------------------------------------------

    def _claim(self, a: int, b: int) -> None:
        lo, hi = 0, self.board.size
        if a % 5 == 0 and hi:
            lo = b % hi
            hi = min(hi, lo + 1 + a % 7)
        self.ask(OWNERS[a % 3], 1 + b % 7, begin=b % 4, lo=lo, hi=hi)

    def _begin(self, a: int, b: int) -> None:
        held = self._some(a)
        if held is None or not held.idle.rows:
            return
        lo, hi = list(held.idle)[b % len(held.idle)]
        self._send(held.epoch, [], [(lo, min(hi, lo + 1 + b % 3))])

    def _done(self, a: int, b: int) -> None:
        held = self._some(a)
        if held is None or not held.begun.rows:
            return
        lo, hi = list(held.begun)[b % len(held.begun)]
        code = (3, 3, 4, 5, 5)[b % 5]
        kind = CLASSES[a % len(CLASSES)] if code == 5 else 0
        delay_ns = S if a % 11 == 0 else 0
        done = [Done(lo, min(hi, lo + 1 + b % 3), code, kind, delay_ns)]
        begin = [next(iter(held.idle))] if b % 7 == 0 and held.idle.rows else []
        self._send(held.epoch, done, begin)

    def _repeat(self, a: int, b: int) -> None:
        if self._last is None:
            return
        epoch, n, digest, done, taken = self._last
        if epoch in self.board.grants or epoch in self.board.over:
            answer = self.board.advance(epoch, n, digest, done=done, now_ns=self.now_ns)
            assert answer == (taken, [])

    def _stale(self, a: int, b: int) -> None:
        gone = [e for e in range(1, self.board.epoch + 1) if e not in self.board.grants]
        gone = [epoch for epoch in gone if epoch not in self.board.over]
        if not gone:
            return
        try:
            self.board.advance(
                gone[a % len(gone)], 1, b"stale", done=[Done(0, 1, 3)], now_ns=self.now_ns
            )
        except Fenced:
            return
        raise AssertionError("a grant that is gone was heard")

    def _heartbeat(self, a: int, b: int) -> None:
        if (held := self._some(a)) is not None:
            self.board.heartbeat(held.epoch, self.now_ns)

    def _sleep(self, a: int, b: int) -> None:
        self.now_ns += (a % 4) * S + (LEASE_NS if b % 5 == 0 else 0)

    def _expire(self, a: int, b: int) -> None:
        self.take(self.board.expire(self.now_ns))

    def _drop(self, a: int, b: int) -> None:
        self.take(self.board.drop(OWNERS[a % 3], self.now_ns))

    def _give_back(self, a: int, b: int) -> None:
        if (held := self._some(a)) is not None:
            self.take(self.board.drop_epoch(held.epoch, self.now_ns))

    def _commit(self, a: int, b: int) -> None:
        upto = self.board.terminal_prefix()
        upto = max(upto - a % 3, 0)
        self.take(self.board.commit(upto, upto - 1, self.now_ns))

    def _cancel(self, a: int, b: int) -> None:
        self.take(self.board.cancel(self.now_ns))

    def _end_grace(self, a: int, b: int) -> None:
        self.take(self.board.end_grace(self.now_ns))

    def _crash(self, a: int, b: int) -> None:
        """The process ends; the next one has the checkpoint, or the log, at another time."""
        was = self.board.dump()
        self.now_ns += b * S
        self.board = Board.load(was) if a % 2 else Board.replay(self.log)
        self.board.renew(self.now_ns)
        assert self.board.dump() == was

    def _restart(self, a: int, b: int) -> None:
        self.take(self.board.drop_all(self.now_ns))

    # -- inside --------------------------------------------------------------------------------

    def _some(self, a: int) -> Any:
        grants = list(self.board.grants.values())
        return grants[a % len(grants)] if grants else None

    def _send(self, epoch: int, done: list[Done], begin: list[tuple[int, int]]) -> None:
        taken = self.report(epoch, *done, begin=begin)
        n = self._numbers[epoch]
        self._last = (epoch, n, b"%d" % n, done, taken)


class Watcher:
    def __init__(self, size: int) -> None:
        self._final = [False] * size
        self._ends = [-1] * size

    def look(self, board: Board) -> None:
        ledger = board.ledger
        states, attempts = ledger.state.tolist(), ledger.attempts.tolist()
        assert ledger.counts() == [states.count(code) for code in range(8)]
        # Every row is in exactly one place.
        places = [""] * len(states)
        for name, ranges in (
            ("unseen", board.unseen),
            ("free", board.free),
            ("suspect", board.suspects),
            ("resting", [(lo, hi) for _, lo, hi in board.resting]),
        ):
            for lo, hi in ranges:
                for seq in range(lo, hi):
                    assert not places[seq], (seq, places[seq], name)
                    places[seq] = name
                    assert states[seq] == (0 if name == "unseen" else 1)
                    assert ledger.owner_of(seq) == 0
        for held in board.grants.values():
            assert held.rows
            for code, ranges in ((1, held.idle), (2, held.begun)):
                for lo, hi in ranges:
                    for seq in range(lo, hi):
                        assert not places[seq], (seq, places[seq], held.epoch)
                        places[seq] = "grant"
                        assert states[seq] == code
                        assert ledger.owner_of(seq) == held.epoch
        # What is final stays as it ended; it is committed in order.
        for seq, state in enumerate(states):
            assert bool(places[seq]) == (state < 3)
            if self._final[seq]:
                assert state in (self._ends[seq], 7)
            elif state >= 3:
                self._final[seq], self._ends[seq] = True, state
            assert attempts[seq] < board.policy.attempts_max
            assert (state == 7) == (seq < board.next_commit)
        assert board.terminal_prefix() == next(
            (seq for seq, state in enumerate(states) if state < 3), len(states)
        )
        assert sum(board.ended) == sum(self._final) == ledger.final_count
        assert sum(attempts) == board.retries
        if board.policy.retries_max:
            assert board.retries <= board.policy.retries_max
