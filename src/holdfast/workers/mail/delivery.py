"""Mail delivery: delivers mail that the sender's commit could not deliver (protocol F).

    MailRouter     routes every such message once: to an inbox of this store, to the peer queue of
                   another store, or back as the error `no_route` (`routing`)
    PeerDelivery   one per universe in another store: delivers a batch there in one commit, then
                   acks the batch here with its receipts

The runner of a peer queue announces its route in the store. Every pool routes mail, so a pool
started without this route uses the peer queue, too.

A crash between the two commits of a peer delivery repeats the batch. The destination deduplicates
by message id and answers `already_enqueued`. So each message reaches one inbox once, and its sender
gets one receipt.

An unreachable store loses no mail and delays no other store: its peer queue keeps the mail and
probes with backoff, one message at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from holdfast import codec
from holdfast.app_hooks import NO_HOOKS, AppHooks
from holdfast.clock import SYSTEM, Clock
from holdfast.config import ROUTE_ANNOUNCE_INTERVAL_NS, ROUTE_LOOKUP_PAUSE_NS_MAX
from holdfast.durable import queue
from holdfast.durable.queue import Claim
from holdfast.errors import HoldfastError, Invalid, Overloaded
from holdfast.messages import FABRIC_SEND, Intent
from holdfast.retry import Backoff, jitter
from holdfast.runner import Runner, WorkItem
from holdfast.runner.hooks import runner_options
from holdfast.runner.tick import TickStats
from holdfast.runner.unknown_outcome import can_repeat_claim
from holdfast.store.api import Store, Txn
from holdfast.workers.mail.peers import PeerStores, PeerUnreachable, VerifyPeer, open_existing
from holdfast.workers.mail.router import LocalRedelivery, MailRouter, has_peer_route, retry_routing
from holdfast.workers.runner_service import never_dead_letter
from holdfast.world import intents
from holdfast.world.catalog import check_universe
from holdfast.world.messaging import delivery as messaging_delivery
from holdfast.world.messaging import outbox
from holdfast.world.messaging.delivery import DeliveryResult

# A claim, identified by seq and claim number.
ClaimKey = tuple[int, int]

BATCH = 100
# The bound of claims that one runner holds, unsettled ones included.
CLAIMS_MAX = 4 * BATCH
# The approximate size of one commit into another store.
BATCH_BYTES_MAX = 8 * 1024 * 1024
# The claim time of a peer queue covers a commit in another store.
PEER_LEASE_MS = 5_000
# Idle polling interval. New mail notifies the runner, so polling only covers lost notifications of
# hundreds of mostly idle peer queues.
MAIL_IDLE_MS = 5_000
# Peer queues of one pool. Each has a thread.
PEER_QUEUES_MAX = 256
PEER_BACKOFF = Backoff(max_ns=30_000_000_000)
ROUTING_BACKOFF = Backoff(max_ns=ROUTE_LOOKUP_PAUSE_NS_MAX)


class MailDelivery:
    """The runners that deliver a universe's waiting mail, and the peer stores they open.

    `peers` maps universes to URLs or to open stores, which stay open. `routes` returns the URL of
    any other universe: its peer queue is created on the first mail, and mail is delivered only if
    that store knows the universe, because a default route matches misspelled names, too. `open`
    opens a URL and must not create a store.
    """

    def __init__(
        self,
        store: Store,
        *,
        universe: str,
        worker: str,
        peers: Mapping[str, str | Store] | None = None,
        routes: Callable[[str], str | None] | None = None,
        open: Callable[[str], Store] | None = None,
        verify_peer: VerifyPeer | None = None,
        hooks: AppHooks = NO_HOOKS,
        clock: Clock = SYSTEM,
    ) -> None:
        self._hooks = hooks
        check_peers(universe, peers or {})
        self._store = store
        self._universe = universe
        self._worker = worker
        self._clock = clock
        self._routes = routes
        self._peers = PeerStores(peers or {}, open or open_existing, verify_peer)
        self._peer_queues: set[str] = set()
        # Starts a runner created later. Returns False if the pool is stopping.
        self.start_runner: Callable[[Runner], bool] = lambda runner: False
        self.runners: list[Runner] = [
            Runner(
                store,
                intents.effect_queue(universe, FABRIC_SEND),
                MailRouter(store, universe, self._has_peer_queue),
                worker=f"{worker}/{FABRIC_SEND}",
                policy=replace(
                    never_dead_letter(max_batch=BATCH),
                    backoff=ROUTING_BACKOFF,
                    idle_sleep_max_ms=MAIL_IDLE_MS,
                ),
                clock=clock,
                **runner_options(hooks),
            ),
            *(self._new_peer_runner(peer) for peer in peers or ()),
        ]
        if routes is not None:
            # Peer queues of earlier pools, which may still hold mail.
            for peer in store.read(outbox.announced_universes, universe, PEER_QUEUES_MAX):
                url = routes(peer)
                if peer in self._peer_queues:
                    continue
                if url is not None:
                    self._peers.add(peer, url)
                    self.runners.append(self._new_peer_runner(peer, require_known=True))
                elif store.read(has_peer_route, universe, peer):
                    self.runners.append(self._new_local_runner(peer, len(self.runners)))

    def _has_peer_queue(self, universe: str) -> bool:
        """Whether a universe has a peer queue. Creates it if a route exists. Called only by the
        router.
        """
        if universe in self._peer_queues:
            return True
        url = None if self._routes is None else self._routes(universe)
        if url is None or len(self._peer_queues) >= PEER_QUEUES_MAX:
            return False
        # Announce first: after a crash, the next pool finds the peer queue by its announcement.
        self._store.transact(outbox.announce_route, self._universe, universe)
        self._peers.add(universe, url)
        runner = self._new_peer_runner(universe, require_known=True)
        if not self.start_runner(runner):
            self._peer_queues.discard(universe)
            return False
        return True

    def _new_peer_runner(self, peer: str, *, require_known: bool = False) -> Runner:
        self._peer_queues.add(peer)
        return PeerRunner(
            self._store,
            outbox.peer_queue_name(self._universe, peer),
            PeerDelivery(self._store, self._peers, peer, self._clock, require_known=require_known),
            announcer=RouteAnnouncer(self._store, self._universe, peer, self._clock),
            worker=f"{self._worker}/{FABRIC_SEND}/{len(self._peer_queues)}",
            policy=replace(
                never_dead_letter(max_batch=BATCH),
                lease_ttl_ms=PEER_LEASE_MS,
                idle_sleep_max_ms=MAIL_IDLE_MS,
            ),
            clock=self._clock,
            **runner_options(self._hooks),
        )

    def _new_local_runner(self, peer: str, number: int) -> Runner:
        redelivery = LocalRedelivery(self._store, peer, self._clock)
        return Runner(
            self._store,
            outbox.peer_queue_name(self._universe, peer),
            redelivery,
            throttle=redelivery,
            worker=f"{self._worker}/{FABRIC_SEND}<{number}",
            policy=never_dead_letter(max_batch=BATCH),
            clock=self._clock,
            **runner_options(self._hooks),
        )

    def close(self) -> None:
        self._peers.close()


def check_peers(universe: str, peers: Mapping[str, str | Store]) -> None:
    for peer in peers:
        check_universe(peer)
        if peer == universe:
            raise Invalid(what="stores", universe=peer, why="it is the universe of this process")


class RouteAnnouncer:
    """Announces the route of a peer queue periodically to pools that do not have it."""

    def __init__(self, store: Store, universe: str, peer: str, clock: Clock) -> None:
        self._store = store
        self._route = (universe, peer)
        self._clock = clock
        self._next_ns = 0

    def announce_if_due(self) -> None:
        now_ns = self._clock.mono_ns()
        if now_ns < self._next_ns:
            return
        try:
            self._store.transact(outbox.announce_route, *self._route)
        except HoldfastError as error:
            if not can_repeat_claim(error):
                raise
            return  # retried at the next tick
        self._next_ns = now_ns + ROUTE_ANNOUNCE_INTERVAL_NS


class PeerRunner(Runner):
    """The runner of a peer queue. It announces the route while it runs."""

    def __init__(
        self,
        store: Store,
        queue: str,
        delivery: PeerDelivery,
        *,
        announcer: RouteAnnouncer,
        **options: Any,
    ) -> None:
        super().__init__(store, queue, delivery, throttle=delivery, **options)
        self._delivery = delivery
        self._announcer = announcer

    def request_stop(self) -> None:
        super().request_stop()
        self._delivery.limit_outage_wait(self.policy.stop_grace_ms / 1000)

    def tick(self) -> TickStats:
        tick = super().tick()
        self._announcer.announce_if_due()
        return tick


class PeerDelivery:
    """The handler of mail to one universe in another store, and the throttle of its runner.

    The first message of a batch delivers all messages that its runner has claimed in one commit of
    the other store. The following messages find their answers cached.
    """

    def __init__(
        self,
        store: Store,
        peers: PeerStores,
        universe: str,
        clock: Clock,
        *,
        require_known: bool = False,
    ) -> None:
        """`require_known`: the route is a default, so the other store must already know the
        universe.
        """
        self._store = store
        self._peers = peers
        self._universe = universe
        self._clock = clock
        self._known = not require_known
        self._answers: dict[ClaimKey, DeliveryResult] = {}
        # Claims already delivered, whose ack is not committed here yet.
        self._delivered: set[ClaimKey] = set()
        # Consecutive failures to reach the store, and the time of the next attempt.
        self._failures = 0
        self._retry_at_ns = 0

    def __call__(self, work: WorkItem) -> None:
        claim_key = _claim_key(work.claim)
        if claim_key not in self._answers:
            if not self._is_universe_known(work):
                retry_routing(
                    self._store, work, codec.unpack_as(Intent, work.payload), self._universe
                )
                return
            self._answers = self._deliver_batch(work)
            self._delivered |= self._answers.keys()
        answer = self._answers.pop(claim_key, None)
        if answer is None:
            return  # cancelled or already answered
        if answer.status == messaging_delivery.FULL:
            raise Overloaded(universe=self._universe, world_id=answer.dest_world, retry_after_s=1.0)
        work.on_ack(outbox.finish, codec.unpack_as(Intent, work.payload), answer)

    def limit_outage_wait(self, seconds: float) -> None:
        """Bound the wait for an unavailable store."""
        self._peers.stop_within(seconds)

    # -- the throttle --------------------------------------------------------------------------

    def available(self, wanted: int) -> int:
        """Allow all items, one probe after a failure, or none during the backoff."""
        if self._failures == 0:
            return wanted
        return min(wanted, 1) if self.wait_ns() == 0 else 0

    acquire = available

    def wait_ns(self) -> int:
        return max(0, self._retry_at_ns - self._clock.mono_ns())

    # -- inside --------------------------------------------------------------------------------

    def _is_universe_known(self, work: WorkItem) -> bool:
        """Whether the other store knows the universe, if that check is required."""
        if not self._known:
            with self._peer_store(work) as peer_store:
                self._known = peer_store.read(messaging_delivery.universe_exists, self._universe)
        return self._known

    def _deliver_batch(self, work: WorkItem) -> dict[ClaimKey, DeliveryResult]:
        batch, claimed = self._store.read(read_batch, work.claim, self._delivered)
        self._delivered &= claimed
        if not batch:
            return {}
        now_ns = self._store.now_ns()
        with self._peer_store(work) as peer_store:
            answers: list[DeliveryResult] = peer_store.transact(
                messaging_delivery.accept_many,
                [(intent, now_ns - claim.enqueued_ns) for claim, intent in batch],
            )
        return {
            _claim_key(claim): answer for (claim, _), answer in zip(batch, answers, strict=True)
        }

    @contextmanager
    def _peer_store(self, work: WorkItem) -> Iterator[Store]:
        """Yield the other store. Any error there becomes `PeerUnreachable` and starts the backoff."""
        if self.wait_ns():
            raise PeerUnreachable(
                universe=self._universe, why="recently unreachable, waiting for the backoff"
            )
        peer_store: Store | None = None
        try:
            peer_store = self._peers.store(self._universe)
            yield peer_store
        except Exception as error:
            self._failures += 1
            delay_ns = PEER_BACKOFF.delay_ns(self._failures, jitter(work.seq, self._failures))
            self._retry_at_ns = self._clock.mono_ns() + delay_ns
            if peer_store is not None:
                self._peers.discard(self._universe, peer_store, error)
            raise PeerUnreachable(
                universe=self._universe, why=f"{type(error).__name__}: {error}"
            ) from error
        self._failures = 0
        self._retry_at_ns = 0


def read_batch(
    txn: Txn, first: Claim, delivered: set[ClaimKey]
) -> tuple[list[tuple[Claim, Intent]], set[ClaimKey]]:
    """Return one commit's batch and the keys of all claims of the owner.

    The batch holds the first claim and further undelivered claims of its owner, in send order.
    Cancelled and answered mail is left out.
    """
    others = queue.claims_of(txn, first.queue, first.owner, CLAIMS_MAX)
    batch: list[tuple[Claim, Intent]] = []
    size = 0
    for claim in [first, *(other for other in others if other.seq != first.seq)]:
        if _claim_key(claim) in delivered:
            continue
        payload = queue.payload_of(txn, claim)
        size += len(payload)
        if batch and (size > BATCH_BYTES_MAX or len(batch) == BATCH):
            break
        intent = codec.unpack_as(Intent, payload)
        if outbox.is_mail_pending(txn, intent):
            batch.append((claim, intent))
    return sorted(batch, key=lambda pair: pair[0].seq), {_claim_key(claim) for claim in others}


def _claim_key(claim: Claim) -> ClaimKey:
    return claim.seq, claim.number
