"""Where mail goes that the commit of its sender could not deliver.

    a universe that some pool has a route to    on, into the lane of its store
    a universe of this store                    into the inbox, in the commit that ends the item
    any other                                   it waits, and is looked for again

Every pool sorts, also those that were started without a route. So a pool goes by what others have
announced as well, and what nobody has announced is no error yet: pools start one after the other. It
waits with its reason, for an operator to see, and ends as `no_route` when pools have looked for about
an hour. It is looks that count, not age: mail that lay in a store without pools has its hour still.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast import codec
from holdfast.clock import Clock, S
from holdfast.config import ROUTE_LOOK_EACH_NS, ROUTE_LOOKS_MAX
from holdfast.durable import queue
from holdfast.errors import HoldfastError
from holdfast.messages import Intent
from holdfast.runner import Work
from holdfast.store.api import Store, Txn
from holdfast.world import fabric, outbox
from holdfast.world.fabric import Accepted

# How often it is asked whether a universe has come to this store.
HOME_LOOK_NS = 2 * S


class NoRoute(HoldfastError):
    code = "no_route"
    retryable = True
    hint = (
        "is its name right? else name its store in [stores] of holdfast.toml, or start a pool with "
        "--peer UNIVERSE=URL, or stores={universe: url}"
    )


class Sorting:
    """The handler of mail that waits: where does it go?"""

    def __init__(self, store: Store, universe: str, leads_to: Callable[[str], bool]) -> None:
        """`leads_to` says whether this pool has a lane to a universe."""
        self._store = store
        self._universe = universe
        self._leads_to = leads_to

    def __call__(self, work: Work) -> None:
        intent = codec.unpack_as(Intent, work.payload)
        to = fabric.read(intent).dest_universe or self._universe
        if to == self._universe:
            work.join(outbox.deliver, intent)
        elif self._leads_to(to) or self._store.read(outbox.routed, self._universe, to):
            work.join(outbox.forward, intent, to)
        elif self._store.read(fabric.known, to):
            work.join(outbox.deliver, intent)
        else:
            look_again(self._store, work, intent, to)


class Returning:
    """The handler of a lane to a universe that is mapped to this very store now, and the throttle of its
    runner: what waited for another store, or still goes that way, is delivered here, once it is here."""

    def __init__(self, store: Store, to: str, clock: Clock) -> None:
        self._store = store
        self._to = to
        self._clock = clock
        self._known = False
        self._again_ns = 0

    def __call__(self, work: Work) -> None:
        work.join(outbox.deliver, codec.unpack_as(Intent, work.payload))

    def stock(self, wanted: int) -> int:
        if not self._known and not self.wait_ns():
            self._known = self._store.read(fabric.known, self._to)
            self._again_ns = self._clock.mono_ns() + HOME_LOOK_NS
        return wanted if self._known else 0

    take = stock

    def wait_ns(self) -> int:
        return 0 if self._known else max(0, self._again_ns - self._clock.mono_ns())


def goes_by_lane(txn: Txn, universe: str, to: str) -> bool:
    """Whether mail is in the lane to a universe, or may be put there."""
    counts = queue.counts(txn, outbox.lane(universe, to))
    return outbox.routed(txn, universe, to) or bool(counts.ready + counts.delayed + counts.claimed)


def look_again(store: Store, work: Work, intent: Intent, to: str) -> None:
    """Nobody knows the universe: its mail waits, with this as its reason, until it was looked for often
    enough. Where many wait, each is looked at less often."""
    if work.claim.failures + 1 >= ROUTE_LOOKS_MAX:
        lost = NoRoute(universe=to)
        answer = Accepted(fabric.ERROR, code=lost.code, error=str(lost))
        work.join(outbox.conclude, intent, answer)
        return
    counts = store.read(queue.counts, work.claim.queue)
    pause_s = (counts.ready + counts.delayed) * ROUTE_LOOK_EACH_NS // S
    raise NoRoute(universe=to, retry_after_s=pause_s) if pause_s else NoRoute(universe=to)
