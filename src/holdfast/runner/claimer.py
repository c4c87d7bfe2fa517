"""The claiming side of a runner: what is due, taken, adopted, given back.

Between asking for claims and having them in hand as work, anything may fail, and so may giving them
back. The claimer is *unsure* then, and next time looks first at what it holds already: claims that it
was not told of are adopted, instead of running out unused and costing their items an expiry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from holdfast.durable.queue import Admission, Claim
from holdfast.errors import CommitUnknown, HoldfastError
from holdfast.runner import claims
from holdfast.runner.faults import transient
from holdfast.runner.hooks import Hooks
from holdfast.runner.policy import Policy
from holdfast.runner.tick import Tick
from holdfast.runner.work import Work
from holdfast.store.api import Store, glance


class Claimer:
    def __init__(
        self,
        store: Store,
        queue: str,
        timers: str | None,
        *,
        owner: str,
        extend: Callable[[Claim, int | None], int | None],
        hooks: Hooks,
        admission: Callable[[], Admission | None] | None = None,
    ) -> None:
        self.owner = owner
        self._store = store
        self._queue, self._timers = queue, timers or ""
        self.names = [queue] if timers is None else [queue, timers]
        self._extend = extend
        self._hooks = hooks
        self._admission = admission
        self._turn = 0
        self._unsure = False

    def next_due_ns(self) -> int | None:
        return glance(self._store, claims.next_due_ns, self.names)

    def looks(self) -> bool:
        """Whether there is something to claim, or to adopt."""
        return self._unsure or self._is_due()

    def claim(
        self,
        limit: int,
        policy: Policy,
        tick: Tick,
        in_hand: Callable[[Claim], bool],
        again_max: int | None = None,
    ) -> deque[Work]:
        """Up to `limit` of what is due, the queue's items before timers.

        No more than `again_max` of them have been claimed before in vain.
        """
        if not limit:
            return deque()
        try:
            adopted = self._adopt(limit, in_hand) if self._unsure else []
            if adopted or not self._is_due():
                works = self._works(adopted)
            else:
                taken = self._take(limit, policy, again_max)
                tick.turned_away += taken.turned_away
                works = self._works(taken.items + taken.timers)
        except HoldfastError as error:
            if not (transient(error) or isinstance(error, CommitUnknown)):
                raise
            tick.busy += 1
            return deque()
        # There may be more of them than there is room for now.
        self._unsure = bool(adopted)
        tick.claimed += len(works)
        return works

    def hand_back(self, works: Iterable[Work], tick: Tick) -> None:
        """Give up what was not begun, unharmed. If that fails it is adopted again, or runs out."""
        works = list(works)
        for work in works:
            work.lose(self._store)  # if it was begun after all: before another can claim it
        try:
            answers = self._store.transact(
                claims.hand_back,
                [work.claim.token for work in works],
                [work.claim.token for work in works if not (work.began_ns or work.joined_lost)],
                None if self._admission is None else self._admission(),
            )
        except HoldfastError as error:
            if not (transient(error) or isinstance(error, CommitUnknown)):
                raise
            tick.busy += 1
            self._unsure = True
            return
        for work, released in zip(works, answers, strict=True):
            if released:
                tick.released += 1
                self._hooks.released()
            else:
                tick.lost += 1
                self._hooks.lost(work)

    def _is_due(self) -> bool:
        """Looking is free, a claim is a commit: so look first."""
        due_ns = self.next_due_ns()
        return due_ns is not None and due_ns <= self._store.now_ns()

    def _adopt(self, limit: int, in_hand: Callable[[Claim], bool]) -> list[Claim]:
        held = self._store.read(claims.live_claims, self.names, self.owner)
        return [claim for claim in held if not in_hand(claim)][:limit]

    def _take(self, limit: int, policy: Policy, again_max: int | None) -> claims.Taken:
        taken: claims.Taken = self._store.transact(
            claims.take, *self.asking(limit, policy, again_max)
        )
        return taken

    def asking(self, limit: int, policy: Policy, again_max: int | None) -> tuple[Any, ...]:
        """The arguments of `take`. Asked for, claims may be there whatever is answered."""
        self._unsure = True
        return self.arguments(limit, policy, again_max)

    def arguments(self, limit: int, policy: Policy, again_max: int | None) -> tuple[Any, ...]:
        """`asking` by somebody who says himself when there is doubt."""
        self._turn += 1
        return (
            self._queue,
            self._timers,
            self.owner,
            limit,
            policy.reserved(self._turn, limit),
            policy.lease_ttl_ns,
            policy.budget,
            None if self._admission is None else self._admission(),
            again_max,
        )

    def answered(self, taken: claims.Taken, tick: Tick) -> deque[Work]:
        """What was asked for, in hand."""
        works = self.brought(taken, tick)
        self._unsure = False
        return works

    def brought(self, taken: claims.Taken, tick: Tick) -> deque[Work]:
        """What somebody else asked for, in hand."""
        tick.turned_away += taken.turned_away
        works = self._works(taken.items + taken.timers)
        tick.claimed += len(works)
        return works

    def doubt(self) -> None:
        """There may be claims of ours that we were not told of."""
        self._unsure = True

    @property
    def sure(self) -> bool:
        """Whether there can be no claim of ours that we do not know of."""
        return not self._unsure

    def _works(self, taken: list[Claim]) -> deque[Work]:
        if any(claim.blob for claim in taken):
            payloads: list[bytes | None] = self._store.read(claims.payloads, taken)
        else:
            payloads = [claim.payload for claim in taken]
        return deque(
            Work(claim, payload, "timer" if claim.queue == self._timers else "queue", self._extend)
            for claim, payload in zip(taken, payloads, strict=True)
            if payload is not None
        )
