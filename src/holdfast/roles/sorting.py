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

from holdfast import codec
from holdfast.clock import S
from holdfast.config import ROUTE_LOOK_EACH_NS, ROUTE_LOOKS_MAX
from holdfast.durable import queue
from holdfast.errors import HoldfastError
from holdfast.messages import Intent
from holdfast.runner import Work
from holdfast.store.api import Store
from holdfast.world import fabric, outbox
from holdfast.world.fabric import Accepted


class NoRoute(HoldfastError):
    code = "no_route"
    retryable = True
    hint = (
        "is its name right? else start a pool with --peer UNIVERSE=URL, or stores={universe: url}"
    )


class Sorting:
    """The handler of mail that waits: where does it go?"""

    def __init__(self, store: Store, universe: str, peers: frozenset[str]) -> None:
        self._store = store
        self._universe = universe
        self._peers = peers

    def __call__(self, work: Work) -> None:
        intent = codec.unpack_as(Intent, work.payload)
        to = fabric.read(intent).dest_universe or self._universe
        if to == self._universe:
            work.join(outbox.deliver, intent)
        elif to in self._peers or self._store.read(outbox.routed, self._universe, to):
            work.join(outbox.forward, intent, to)
        elif self._store.read(fabric.known, to):
            work.join(outbox.deliver, intent)
        elif work.claim.failures + 1 < ROUTE_LOOKS_MAX:
            raise self._not_yet(work, to)
        else:
            lost = NoRoute(universe=to)
            work.join(
                outbox.conclude, intent, Accepted(fabric.ERROR, code=lost.code, error=str(lost))
            )

    def _not_yet(self, work: Work, to: str) -> NoRoute:
        """It waits, with this as its reason; where many wait, each is looked at less often."""
        counts = self._store.read(queue.counts, work.claim.queue)
        pause_s = (counts.ready + counts.delayed) * ROUTE_LOOK_EACH_NS // S
        return NoRoute(universe=to, retry_after_s=pause_s) if pause_s else NoRoute(universe=to)
