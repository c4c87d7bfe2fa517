"""A parcel: finished work that is settled in the commit of somebody else in this process.

What a handler leaves behind is often another's next step: a receipt is what its world goes on with.
Whoever takes that step may settle the work in the same commit, and claim for the runner, too: one
commit instead of three. What the carrier cannot settle, or not in time, the runner settles as ever.

- A parcel is answered once, by its carrier, from any thread. Until then it is the carrier's, unless
  the runner takes it back: at once if the carrier has not begun with it, and after `PATIENCE_NS` in any
  case. What was taken back is looked up before it is settled, and an answer that comes late counts for
  nothing: tokens see to it that nothing is settled twice.
- Claims that a parcel asked for are in doubt until its answer is there.
- A runner that has nothing to do leaves an *offer*: a parcel without outcomes, for whoever next puts
  something into its queue to claim it in the same commit. It takes the offer back before it claims.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from holdfast.clock import MS, Clock
from holdfast.errors import HoldfastError
from holdfast.runner.claimer import Claimer
from holdfast.runner.claims import Taken
from holdfast.runner.faults import transient
from holdfast.runner.policy import Policy
from holdfast.runner.settle import Desk
from holdfast.runner.tick import Tick
from holdfast.runner.work import Outcome, Work

# Outcomes of one parcel: few enough that some are made while others are committed. And parcels under
# way: beyond that the runner settles by itself.
PARCEL_MIN = 16
PARCEL_MAX = 64
PARCELS_MAX = 32
# How long a carrier may leave a parcel alone, and how long it may take to bring it home.
BEGUN_NS = 250 * MS
PATIENCE_NS = 2_000 * MS
# How long a carrier that has left a parcel alone is given no more.
SHY_NS = 1_000 * MS


class Parcel:
    """`taking` are the arguments of `claims.take`, for `asked` claims."""

    __slots__ = ("_done", "answer", "asked", "error", "outcomes", "sent_ns", "taking")

    def __init__(
        self,
        outcomes: list[Outcome],
        taking: tuple[Any, ...] | None,
        asked: int,
        sent_ns: int,
        done: Callable[[], None],
    ) -> None:
        self.outcomes = outcomes
        self.taking = taking
        self.asked = asked
        self.sent_ns = sent_ns
        self._done = done
        self.answer: tuple[list[Outcome], Taken | None] | None = None
        self.error: HoldfastError | None = None

    @property
    def ended(self) -> bool:
        return self.answer is not None or self.error is not None

    def settled(self, left: list[Outcome], taken: Taken | None) -> None:
        """It is committed, but for those that are `left`."""
        self.answer = left, taken
        self._done()

    def refused(self, error: HoldfastError) -> None:
        """It is not, or nobody knows."""
        self.error = error
        self._done()


class Carrier(Protocol):
    """Whoever commits what follows from outcomes. Asked from the threads of runners."""

    def carries(self, outcome: Outcome) -> bool:
        """Whether something of its own would go with it."""

    def carry(self, parcel: Parcel) -> bool:
        """Take a parcel; False if it takes none any more."""

    def withdraw(self, parcel: Parcel) -> bool:
        """Give a parcel back that was not begun with; False if it was."""

    def offer(self, parcel: Parcel) -> bool:
        """Keep an offer until it is used; False if it cannot be."""

    def retract(self, parcel: Parcel) -> bool:
        """Give an offer back; False if it is used by now."""


class Post:
    """The parcels of one runner. Only its own thread comes here."""

    def __init__(
        self, carrier: Carrier, desk: Desk, claimer: Claimer, clock: Clock, ring: Callable[[], None]
    ) -> None:
        self._carrier = carrier
        self._desk = desk
        self._claimer = claimer
        self._clock = clock
        self._ring = ring
        self._under_way: deque[Parcel] = deque()
        self._offer: Parcel | None = None
        self._shy_until_ns = 0
        # Since when somebody is at it, as far as we know.
        self._used_ns = 0
        # Finished, and too few for a parcel.
        self._kept: list[Outcome] = []
        # Taken back, and still with the carrier: what they claimed is not known.
        self._late: list[Parcel] = []

    @property
    def busy(self) -> bool:
        return bool(self._under_way or self._kept)

    @property
    def asked(self) -> int:
        """How many claims are asked for and not answered."""
        return sum(parcel.asked for parcel in self._under_way)

    def offer(self, policy: Policy, room: int, again_max: int | None) -> None:
        """Let others claim for us what they put into our queue."""
        if self._offer is None and self._claimer.sure and not self.busy and room > 0:
            again = None if again_max is None else min(again_max, 1)
            asked = min(policy.max_batch, room)
            taking = self._claimer.arguments(asked, policy, again)
            parcel = Parcel([], taking, asked, self._clock.mono_ns(), self._ring)
            if self._carrier.offer(parcel):
                self._offer = parcel

    def retract(self) -> bool:
        """Take the offer back; False if somebody is claiming for us, and will say what."""
        if self._offer is not None and not self._carrier.retract(self._offer):
            self._used_ns = self._used_ns or self._clock.mono_ns()
            return False
        self._offer, self._used_ns = None, 0
        return True

    def send(self, policy: Policy, room: int, again_max: int | None) -> None:
        """Hand over what the carrier has something to add to; the rest stays on the desk."""
        if not self.retract():
            room = 0
        if self._clock.mono_ns() < self._shy_until_ns and not self._kept:
            return
        desk = self._desk
        bound = PARCEL_MIN * (PARCELS_MAX - len(self._under_way))
        mine, self._kept = self._kept, []
        left: list[Outcome] = []
        for outcome in desk.outcomes:
            new = outcome.error is None and not outcome.sent and len(mine) < bound
            (mine if new and self._carrier.carries(outcome) else left).append(outcome)
        desk.outcomes = left
        most = min(max(PARCEL_MIN, len(mine) // 4), PARCEL_MAX)
        while mine:
            if len(mine) < PARCEL_MIN and self._under_way:
                # A few wait for company: the next answer rings.
                self._kept = mine
                return
            parcel = self._parcel(mine[:most], policy, room, again_max)
            if not self._carrier.carry(parcel):
                desk.outcomes = mine + left
                return
            self._under_way.append(parcel)
            mine = mine[most:]

    def _parcel(
        self, outcomes: list[Outcome], policy: Policy, room: int, again_max: int | None
    ) -> Parcel:
        for outcome in outcomes:
            outcome.sent = True
        asked = min(room - self.asked, 2 * len(outcomes)) if self._claimer.sure else 0
        taking = None
        if asked > 0:
            again = None if again_max is None else min(again_max, 1)
            taking = self._claimer.arguments(asked, policy, again)
        return Parcel(outcomes, taking, max(asked, 0), self._clock.mono_ns(), self._ring)

    def collect(self, policy: Policy, tick: Tick, *, running: bool) -> list[Work]:
        """Take what was answered, and back what was not in time; the works that were claimed."""
        works: list[Work] = []
        offer = self._offer
        if offer is not None and offer.ended:
            self._offer, self._used_ns = None, 0
            works += self._ended(offer, policy, tick)
        elif offer is not None and 0 < self._used_ns <= self._clock.mono_ns() - PATIENCE_NS:
            self._offer, self._used_ns = None, 0
            self._late.append(offer)
            self._claimer.doubt()
        if not running:
            self.retract()
            self._desk.outcomes += self._kept
            self._kept = []
        for parcel in list(self._late):
            if parcel.ended:
                self._late.remove(parcel)
                self._claimer.doubt()
        now_ns = self._clock.mono_ns()
        for parcel in list(self._under_way):
            if parcel.ended:
                self._under_way.remove(parcel)
                works += self._ended(parcel, policy, tick)
                continue
            waited_ns = now_ns - parcel.sent_ns
            if waited_ns >= BEGUN_NS or not running:
                # It is busy with something else: what ends now does not wait for it.
                self._shy_until_ns = now_ns + SHY_NS
                if self._carrier.withdraw(parcel):
                    self._under_way.remove(parcel)
                    self._desk.outcomes += parcel.outcomes
                elif waited_ns >= PATIENCE_NS:
                    self._under_way.remove(parcel)
                    self._late.append(parcel)
                    self._desk.put_back(parcel.outcomes, unsure=True)
        return works

    def _ended(self, parcel: Parcel, policy: Policy, tick: Tick) -> list[Work]:
        if parcel.answer is not None:
            left, taken = parcel.answer
            self._desk.done(parcel.outcomes, left, tick)
            return [] if taken is None else self._brought(taken, tick)
        assert parcel.error is not None
        if parcel.taking is not None:
            self._claimer.doubt()
        self._desk.came_back(parcel.outcomes, parcel.error, policy, tick)
        return []

    def _brought(self, taken: Taken, tick: Tick) -> list[Work]:
        try:
            return list(self._claimer.brought(taken, tick))
        except HoldfastError as error:
            if not transient(error):
                raise
            tick.busy += 1
            self._claimer.doubt()
            return []
