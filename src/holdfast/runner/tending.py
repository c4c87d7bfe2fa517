"""What a runner's crew has in its hands, and what waits for it: given, tended, ended, given back.

- A work is with the crew, or it waits: a suspect for solitude (`alone`), a throttled one for its token.
  All of it is under claims of ours; claims that are tended are extended together, in one commit.
- A handler that is out of its time ends as a time-out, whatever it is doing. One whose claim was taken
  away (cancelled, withdrawn) is dropped: nobody waits for it.
- After a stop nothing more is begun. What is under way has a while, and is given back unharmed then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from holdfast.clock import MS, Clock
from holdfast.durable import queue as queues
from holdfast.durable.queue import Claim
from holdfast.errors import CommitUnknown, HoldfastError, Timeout
from holdfast.runner import claims
from holdfast.runner.alone import SUSPECT, Alone, Member
from holdfast.runner.claimer import Claimer
from holdfast.runner.crew import NUDGE_NS, Crew
from holdfast.runner.faults import transient
from holdfast.runner.hooks import Hooks
from holdfast.runner.policy import Policy
from holdfast.runner.tick import Tick
from holdfast.runner.work import Outcome, Work
from holdfast.store.api import Store, glance

# How often a crew whose claims are tended is looked after.
ATTEND_NS = 50 * MS
# What was claimed and has waited so long for a hand is given back.
UNBEGUN_NS = 1_000 * MS
# How long a suspect keeps all others from being begun.
SOLITUDE_NS = 2_000 * MS


class HandsLost(HoldfastError):
    code = "hands_lost"
    hint = (
        "calls that never return hold all threads: give what they wait for a time-out; start anew"
    )


class Throttle(Protocol):
    """Something that bounds how many items may be begun now."""

    def stock(self, wanted: int) -> int:
        """How many of those wanted may be begun now or very soon: so many are claimed."""

    def take(self, wanted: int) -> int:
        """How many of those wanted may be begun now. They are begun at once."""

    def wait_ns(self) -> int:
        """How long it allows nothing more."""


class Tending:
    def __init__(
        self,
        store: Store,
        queue: str,
        claimer: Claimer,
        *,
        member: Member,
        hooks: Hooks,
        clock: Clock,
        hire: Callable[[Policy], Crew],
        ended: Callable[[Outcome, Policy, Tick], None],
        crewed: bool,
        alone: Alone | None,
        throttle: Throttle | None,
    ) -> None:
        """`hire` makes the crew when it is needed; `ended` is told of every outcome."""
        self._store = store
        self._queue = queue
        self._claimer = claimer
        self._member = member
        self._hooks = hooks
        self._clock = clock
        self._hire = hire
        self._ended = ended
        self._crewed = crewed
        self._alone = alone
        self._throttle = throttle
        self.crew: Crew | None = None
        # Claimed and not with the crew: those that run alone, and those that the throttle holds.
        self.suspects: deque[Work] = deque()
        self.paced: deque[Work] = deque()
        self._alone_since_ns = 0
        self._stop_by_ns = 0
        self._attend_at_ns = 0
        self._extend_at_ns = 0
        self._withdrawn = 0

    # -- looking -------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self.suspects or self.paced or self.under_way)

    @property
    def under_way(self) -> int:
        """How many items are with the crew. Others may ask, from their threads."""
        crew = self.crew
        return 0 if crew is None else crew.count

    @property
    def barred(self) -> bool:
        """Whether nothing may be begun because somebody is, or wants to be, alone."""
        return bool(self.suspects) or (self._alone is not None and self._alone.wanted)

    def attend_s(self, policy: Policy) -> float:
        """How long the crew may be left to itself."""
        if self.crew is not None and self.crew.standing:
            return NUDGE_NS / 1e9
        if self.paced and self._throttle is not None:
            return max(min(self._throttle.wait_ns(), ATTEND_NS), MS) / 1e9
        return ATTEND_NS / 1e9 if policy.tend else float("inf")

    def allowed(self, throttle: Throttle, limit: int, tick: Tick) -> int:
        """How many of `limit` may be claimed. If nothing is due, no token is spent on it."""
        try:
            if not self._claimer.looks():
                return 0
            held = len(self.paced)
            near = throttle.stock(limit + held) - held
            return near if self._crewed or near <= 0 else throttle.take(near)
        except HoldfastError as error:
            _check_transient(error)
            tick.busy += 1
            return 0

    def attend(self, policy: Policy, tick: Tick, *, running: bool) -> None:
        """Look after what the crew has: end what is out of time, or not wanted; extend the rest."""
        crew = self.crew
        if crew is None:
            return
        now_ns = self._clock.mono_ns()
        if running and crew.spent:
            raise HandsLost(worker=self._hooks.worker, queue=self._queue)
        if not running:
            self._leave(crew, policy, tick, now_ns)
        if policy.tend:
            crew.nudge()
            if crew.busy or self.suspects or self.paced:
                try:
                    self._look_after(crew, policy, tick, now_ns)
                except HoldfastError as error:
                    _check_transient(error)
                    tick.busy += 1
                    self._lapse(crew, tick)
        if self._alone is not None and self._alone.wanted:
            # Whoever has run so long by itself is not what kills at once.
            since_ns = self._alone_since_ns
            survived = since_ns and now_ns - since_ns >= SOLITUDE_NS
            if survived or not (crew.busy or self.suspects):
                self._alone_since_ns = 0
                self._alone.leave(self._member)

    def _leave(self, crew: Crew, policy: Policy, tick: Tick, now_ns: int) -> None:
        """At the end. What is not begun will not be; what is has a while to finish, and is given
        back unharmed then: it is another's to do again."""
        unbegun = [*(crew.waiting() if policy.tend else ()), *self.suspects, *self.paced]
        self.suspects.clear()
        self.paced.clear()
        self._give_back(unbegun, tick)
        self._stop_by_ns = self._stop_by_ns or now_ns + policy.stop_grace_ms * MS
        if policy.tend and crew.busy and now_ns >= self._stop_by_ns:
            works = crew.held
            for work in works:
                # Its claim is another's from now on: a bill that still comes is booked by itself.
                work.lost = True
                crew.drop(work)
            self._give_back(works, tick)

    def _look_after(self, crew: Crew, policy: Policy, tick: Tick, now_ns: int) -> None:
        if now_ns >= self._attend_at_ns:
            self._attend_at_ns = now_ns + ATTEND_NS
            for work in crew.held:
                if work.began_ns and 0 < work.limit_ns <= now_ns - work.began_ns:
                    crew.drop(work)
                    late = Timeout(what="handler", waited_s=work.limit_ns / 1e9)
                    self._ended(Outcome(work, late, now_ns - work.began_ns), policy, tick)
            # What waited too long for a hand is another's to do.
            self._give_back(crew.overdue(UNBEGUN_NS), tick)
        withdrawn = glance(self._store, queues.withdrawn, self._queue)
        if withdrawn != self._withdrawn:
            self._drop_lost(crew, tick)
            self._withdrawn = withdrawn
        if now_ns >= self._extend_at_ns:
            self._tend(crew, policy, tick)
            self._extend_at_ns = now_ns + policy.lease_ttl_ns // 3

    def _tend(self, crew: Crew, policy: Policy, tick: Tick) -> None:
        """Extend claims, all in one commit."""
        works = [work for work in crew.held if work.limit_ns or not work.began_ns]
        works += [*self.suspects, *self.paced]
        if not works:
            return
        answers: list[int | None] = self._store.transact(
            queues.extend, [work.claim.token for work in works], policy.lease_ttl_ns
        )
        for work, deadline_ns in zip(works, answers, strict=True):
            if deadline_ns is not None:
                work.deadline_ns = max(work.deadline_ns, deadline_ns)
            else:
                self._lose(crew, work, tick)

    def _drop_lost(self, crew: Crew, tick: Tick) -> None:
        """Some claim was taken from its holder: if it was ours, nobody waits for the answer."""
        works = [*crew.held, *self.suspects, *self.paced]
        tokens = [work.claim.token for work in works]
        for work, lost in zip(works, self._store.read(claims.lost, tokens), strict=True):
            if lost:
                self._lose(crew, work, tick)

    def _lapse(self, crew: Crew, tick: Tick) -> None:
        """The store is away. What is ours no more by our own clock is given up without it."""
        now_ns = self._store.now_ns()
        for work in [*crew.held, *self.suspects, *self.paced]:
            if work.deadline_ns <= now_ns:
                self._lose(crew, work, tick)

    def _lose(self, crew: Crew, work: Work, tick: Tick) -> None:
        # Before it is dropped: whoever sees that it is knows why.
        work.lost = True
        for waiting in (self.suspects, self.paced):
            if work in waiting:
                waiting.remove(work)
        crew.drop(work)
        tick.lost += 1
        self._hooks.lost(work)

    def _give_back(self, works: Sequence[Work], tick: Tick) -> None:
        if works:
            self._claimer.hand_back(works, tick)

    def _try_suspect(self, crew: Crew) -> None:
        now_ns = self._clock.mono_ns()
        if self._alone is None or not self._alone.ask(self._member, now_ns):
            return
        if self._throttle is None or self._throttle.take(1):
            self._alone_since_ns = now_ns
            self._give(crew, [self.suspects.popleft()])

    def _give(self, crew: Crew, works: Sequence[Work]) -> None:
        now_ns = self._clock.mono_ns()
        for work in works:
            work.taken_ns = now_ns
        crew.give(works)

    def take(self, works: Sequence[Work], policy: Policy, tick: Tick) -> None:
        """Take what was claimed into the hands of the crew."""
        crew = self.crew
        if crew is None:
            if not works:
                return
            crew = self.crew = self._hire(policy)
        if self._alone is None:
            self._start(crew, list(works), tick)
            return
        self.suspects += [work for work in works if work.claim.expiries >= SUSPECT]
        sound = [work for work in works if work.claim.expiries < SUSPECT]
        # What was claimed in vain before is begun first: it is charged if we die.
        sound.sort(key=lambda work: -work.claim.expiries)
        self._start(crew, sound, tick)
        if self.suspects:
            try:
                self._try_suspect(crew)
            except HoldfastError as error:
                _check_transient(error)
                tick.busy += 1

    def _start(self, crew: Crew, works: list[Work], tick: Tick) -> None:
        """Give works to the crew: those that the throttle lets begin now, in the order they came."""
        if self._throttle is not None:
            self.paced += works
            works = []
            wanted = min(len(self.paced), crew.free)
            if wanted:
                try:
                    begun = self._throttle.take(wanted)
                except HoldfastError as error:
                    _check_transient(error)
                    tick.busy += 1
                    return
                works = [self.paced.popleft() for _ in range(begun)]
        if not works:
            return
        if self._alone is None:
            self._give(crew, works)
        elif not self._alone.begin(lambda: self._give(crew, works)):
            self._give_back(works, tick)

    def has(self, claim: Claim) -> bool:
        if self.crew is not None and self.crew.has(claim.token):
            return True
        kept = (*self.suspects, *self.paced)
        return any(work.claim.token == claim.token for work in kept)

    def collect(self, policy: Policy, tick: Tick, *, running: bool) -> None:
        """Take what has finished, and begin what has its token by now."""
        if self.crew is None:
            return
        for outcome in self.crew.collect():
            self._ended(outcome, policy, tick)
        if self.paced and running:
            self._start(self.crew, [], tick)

    def close(self) -> None:
        """The end: whatever is still in hand is left to run out."""
        if self.crew is not None:
            self.crew.close()
            self.crew = None
        self.suspects.clear()
        self.paced.clear()


def _check_transient(error: HoldfastError) -> None:
    if not (transient(error) or isinstance(error, CommitUnknown)):
        raise error
