"""A running application: the store, the roles that run in this process, and handles to worlds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from holdfast.app.app import App
from holdfast.app.declare import World
from holdfast.app.handle import WorldHandle
from holdfast.clock import SYSTEM, Clock
from holdfast.errors import HoldfastError, Invalid
from holdfast.messages import Ingress, event_ingress
from holdfast.roles.adapter import CLAIM_S_MAX, AdapterPool
from holdfast.roles.fabric import check_peers
from holdfast.roles.orchestrator import Orchestrator
from holdfast.roles.role import Service
from holdfast.roles.timer_worker import TimerWorker
from holdfast.roles.world_worker import WorkerPolicy, WorldWorker
from holdfast.store import open as open_store
from holdfast.store.api import Store
from holdfast.world import ingress
from holdfast.world.catalog import check_text, check_universe

W = TypeVar("W", bound=World)

ROLES = ("orchestrator", "world", "adapter", "timer")


class Runtime:
    """Made by `app.open(url)`. Roles run in threads of this process; `roles=()` runs none.

    A store that is open already may be given instead of a URL; then it stays open.
    """

    def __init__(
        self,
        app: App,
        url: str | Store,
        *,
        roles: Iterable[str] | None = None,
        universe: str | None = None,
        worker: str | None = None,
        policy: WorkerPolicy | None = None,
        kinds: Sequence[str] | None = None,
        stores: Mapping[str, str | Store] | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        """`stores` says where universes are to which worlds of this one send, by URL."""
        self.app = app
        self.universe = app.universe if universe is None else universe
        self.clock = clock
        wanted = ROLES if roles is None else tuple(roles)
        unknown = sorted(set(wanted) - set(ROLES))
        if unknown:
            raise Invalid(what="role", found=unknown, expected=list(ROLES))
        check_universe(self.universe)
        self.incarnation = self.mint()
        self.worker = f"worker-{self.incarnation[:8]}" if worker is None else worker
        check_text("worker", self.worker)
        self._opened = isinstance(url, str)
        check_peers(self.universe, stores or {})
        self._peers = stores
        self.store: Store = open_store(url, clock=clock) if isinstance(url, str) else url
        self.roles: list[Service] = [self._role(name, policy, kinds) for name in wanted]
        for role in self.roles:
            role.start()

    def world(self, kind: type[W], name: str) -> WorldHandle[W]:
        return WorldHandle(self, kind, name)

    def send_many(self, items: Iterable[tuple[WorldHandle[Any], Any]]) -> list[int]:
        """Deliver many events in one commit, all or none, in order; their inbox seqs."""
        batch: list[tuple[ingress.Address, str | None, Ingress]] = []
        for handle, event in items:
            name, value = self.app.encode_event(event)
            batch.append((handle.address(), None, event_ingress(name, value)))
        delivered: list[ingress.Delivered] = self.store.transact(ingress.deliver_many, batch)
        return [one.seq for one in delivered]

    def mint(self) -> str:
        """A new name that nobody has."""
        return self.clock.entropy(16).hex()

    def check(self) -> None:
        """Raise what ended a role of this process, if an error did: then nobody does its work."""
        for role in self.roles:
            if role.failure is not None:
                raise role.failure

    def close(self) -> None:
        """Stop the roles and let go of the store. What ended a role is in its `failure`."""
        try:
            for role in self.roles:
                with contextlib.suppress(HoldfastError):
                    role.request_stop()
            for role in self.roles:
                with contextlib.suppress(Exception):
                    role.join(30)
        finally:
            if self._opened:
                self.store.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _role(self, name: str, policy: WorkerPolicy | None, kinds: Sequence[str] | None) -> Service:
        lease_ttl_s = (policy or WorkerPolicy()).lease_ttl_s
        if name == "adapter":
            return AdapterPool(
                self.store,
                universe=self.universe,
                adapters=self.app.effects,
                worker=self.worker,
                kinds=kinds,
                stores=self._peers,
                # A dead process's effects go on when its worlds do.
                claim_s=min(lease_ttl_s, CLAIM_S_MAX),
                clock=self.clock,
            )
        if name == "timer":
            return TimerWorker(self.store, universe=self.universe, clock=self.clock)
        if name == "orchestrator":
            return Orchestrator(
                self.store,
                universe=self.universe,
                worker=self.worker,
                incarnation=self.incarnation,
                # Well before a dead worker's leases run out there is a leader who has noticed.
                lease_ttl_s=lease_ttl_s / 2,
                worker_ttl_s=lease_ttl_s / 2,
                clock=self.clock,
            )
        return WorldWorker(
            self.store,
            universe=self.universe,
            programs=self.app.programs,
            vocabulary=self.app,
            worker=self.worker,
            incarnation=self.incarnation,
            policy=policy,
            clock=self.clock,
        )
