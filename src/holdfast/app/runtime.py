"""A running application: the store, the roles that run in this process, and handles to worlds."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.app import submitting
from holdfast.app.app import App
from holdfast.app.declare import World
from holdfast.app.task_handle import TaskHandle
from holdfast.app.task_waiting import Waiting
from holdfast.app.tasks import Submission
from holdfast.app.tasks import limits_of as declared_limits
from holdfast.clock import SYSTEM, Clock
from holdfast.errors import HoldfastError, Invalid
from holdfast.messages import Ingress, event_ingress
from holdfast.roles.adapter import CLAIM_S_MAX, AdapterPool
from holdfast.roles.fabric import check_peers
from holdfast.roles.orchestrator import Orchestrator
from holdfast.roles.role import Service
from holdfast.roles.task_child import importing
from holdfast.roles.task_worker import CONCURRENCY, STOP_GRACE_S, TaskWorker
from holdfast.roles.timer_worker import TimerWorker
from holdfast.roles.world_worker import WorkerPolicy, WorldWorker
from holdfast.store import open as open_store
from holdfast.store.api import Store
from holdfast.tasks import coordinator
from holdfast.tasks.ids import parse_task
from holdfast.tasks.rows import keys_of, limits_of
from holdfast.world import ingress
from holdfast.world.catalog import check_text, check_universe

# What not every program needs is imported by the functions that use it: nothing that a first task waits for.
if TYPE_CHECKING:
    from holdfast.app.handle import WorldHandle
    from holdfast.store.mapping import StoreMap

W = TypeVar("W", bound=World)

ROLES = ("orchestrator", "world", "adapter", "timer", "dispatch", "task")


class Runtime:
    """Made by `app.open(url)`. Roles run in threads of this process; `roles=()` runs none.

    A store that is open already may be given instead of a URL; then it stays open. Without either it is
    the store of the universe: `HOLDFAST_STORE`, else what `holdfast.toml` says, else `./data`.
    """

    def __init__(
        self,
        app: App,
        url: str | Store | None = None,
        *,
        roles: Iterable[str] | None = None,
        universe: str | None = None,
        worker: str | None = None,
        policy: WorkerPolicy | None = None,
        kinds: Sequence[str] | None = None,
        queues: Sequence[str] | None = None,
        concurrency: int | None = None,
        stop_grace_s: float = STOP_GRACE_S,
        stores: Mapping[str, str | Store] | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        """`stores` says where universes are to which worlds of this one send, by URL."""
        if importing():
            raise Invalid(
                what="app",
                why="opened while a task of this script was looked for; put what a script does when it is run under "
                'if __name__ == "__main__":',
            )
        self.app = app
        self.universe = app.universe if universe is None else universe
        self.clock = clock
        wanted = _needed_by(app) if roles is None else tuple(roles)
        unknown = sorted(set(wanted) - set(ROLES))
        if unknown:
            raise Invalid(what="role", found=unknown, expected=list(ROLES))
        check_universe(self.universe)
        self.incarnation = self.mint()
        self.worker = f"worker-{self.incarnation[:8]}" if worker is None else worker
        check_text("worker", self.worker)
        mapped: StoreMap | None = None
        if url is None:
            from holdfast.store.mapping import locate

            url, mapped = locate(self.universe)
        self._opened = isinstance(url, str)
        check_peers(self.universe, stores or {})
        self._peers = (
            stores if mapped is None else mapped.elsewhere(self.universe) | dict(stores or {})
        )
        self._mapped = mapped
        self._given = frozenset(stores or ())
        self._others: dict[str, Runtime] = {}
        self.store: Store = open_store(url, clock=clock) if isinstance(url, str) else url
        if mapped is not None:
            try:
                _refuse_elsewhere(self.store, self.universe, mapped)
            except BaseException:
                self.store.close()
                raise
        self._pid = os.getpid()
        self._take_callers()
        _runtimes.add(self)
        self._queues = queues
        self._concurrency = concurrency
        self._stop_grace_s = stop_grace_s
        self.roles: list[Service] = []
        try:
            made = [self._role(name, policy, kinds) for name in wanted]
            self._join_hands(made)
            # Whoever does work before whoever hands it out: a first task finds its worker asking for it, and
            # nobody else's first commits before its own.
            for role in reversed(made):
                self.roles.insert(0, role)
                role.start()
        except BaseException:
            # Nobody has us yet, so nobody else would stop what has begun.
            self.close()
            raise
        if self.roles:
            atexit.register(self._at_exit)

    def _take_callers(self) -> None:
        """What joins the calls of many threads and event loops of this process."""
        self.submitter = submitting.Submitter(self.store, self.universe)
        self.waiting = Waiting(self.store, self.universe, self.check)
        self.async_submitter = submitting.AsyncSubmitter(self.store, self.universe)

    def world(self, kind: type[W], name: str, *, universe: str | None = None) -> WorldHandle[W]:
        """A world of this universe, or of another one, wherever that lives."""
        from holdfast.app.handle import WorldHandle

        if universe is None or universe == self.universe:
            return WorldHandle(self, kind, name)
        return WorldHandle(self._other(universe), kind, name)

    def send_many(self, items: Iterable[tuple[WorldHandle[Any], Any]]) -> list[int]:
        """Deliver many events in one commit, all or none, in order; their inbox seqs."""
        batch: list[tuple[ingress.Address, str | None, Ingress]] = []
        for handle, event in items:
            name, value = self.app.check_event(handle.type, event)
            batch.append((handle.address(), None, event_ingress(name, value)))
        delivered: list[ingress.Delivered] = self.store.transact(ingress.deliver_many, batch)
        return [one.seq for one in delivered]

    # -- tasks ---------------------------------------------------------------------------------

    def submit(self, task: Any, /, *args: Any, **kwargs: Any) -> TaskHandle[Any]:
        """Submit a task, or `task.options(…)`; durable when it returns. `key=` makes it idempotent."""
        return submitting.submit(self, task, args, kwargs)

    async def submit_async(self, task: Any, /, *args: Any, **kwargs: Any) -> TaskHandle[Any]:
        """`submit`, for coroutines; those of one event loop share commits. Await the handle for the
        result."""
        return await submitting.submit_async(self, task, args, kwargs)

    def submit_many(self, task: Any, many: Iterable[Any], /) -> list[TaskHandle[Any]]:
        """Submit a task for each tuple of arguments."""
        return submitting.submit_many(self, task, many)

    def submit_all(self, submissions: Iterable[Submission], /) -> list[TaskHandle[Any]]:
        """Submit `task.options(…).call(…)` for different tasks in one commit, all or none. Those with
        a key may be named in `after` by the others."""
        return submitting.submit_all(self, submissions)

    def map(
        self, task: Any, values: Iterable[Any], /, *, timeout: float | None = None
    ) -> Iterator[Any]:
        """Submit a task for each value; their results, in order, as they are asked for."""
        found: Iterator[Any] = submitting.run_map(self, task, values, timeout)
        return found

    def task(self, id: str) -> TaskHandle[Any]:
        """The task of this id; NotFound if there is none."""
        handle: TaskHandle[Any] = TaskHandle(self, parse_task(id if type(id) is str else repr(id)))
        handle.status()
        return handle

    def _other(self, universe: str) -> Runtime:
        """The same app as a client of another universe, by its route, or in this store without one."""
        if universe not in self._others:
            where = (self._peers or {}).get(universe)
            if where is None and self._mapped is not None:
                where = self._mapped.route(self.universe, universe)
            made = Runtime(
                self.app, where or self.store, roles=(), universe=universe, clock=self.clock
            )
            try:
                self._vouch(universe, made.store)
            except BaseException:
                made.close()
                raise
            self._others[universe] = made
        return self._others[universe]

    def _vouch(self, universe: str, store: Store) -> None:
        """Another universe lives in this store, as far as the configuration can tell."""
        if self._mapped is not None and universe not in self._given:
            _refuse_elsewhere(store, universe, self._mapped)

    def _task_queues(self) -> list[str]:
        if self._queues is not None:
            # One name is not a list of letters.
            return [self._queues] if isinstance(self._queues, str) else list(self._queues)
        declared = {task.spec.queue for task in self.app.tasks.values()}
        return sorted(declared | set(self.app.queues)) or ["default"]

    def _tune(self) -> None:
        """Write down the limits that the app declares, where they are not known yet."""
        for queue in self.app.queues.values():
            limits = declared_limits(queue)
            known = self.store.read(limits_of, keys_of(self.universe), queue.name)
            if known.declared != (limits.concurrency, limits.per_key):
                self.store.transact(coordinator.limit, self.universe, queue.name, limits, True)

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
        atexit.unregister(self._at_exit)
        if os.getpid() != self._pid:
            return  # a forked child: roles, their threads and the store are the parent's
        try:
            for role in self.roles:
                with contextlib.suppress(HoldfastError):
                    role.request_stop()
            for role in self.roles:
                with contextlib.suppress(Exception):
                    role.join(30 + self._stop_grace_s)
        finally:
            for other in self._others.values():
                other.close()
            if self._opened:
                self.store.close()

    def _at_exit(self) -> None:
        """A program that ends without closing: what it had is given back, and waited for no longer."""
        for role in self.roles:
            if isinstance(role, TaskWorker):
                role.hurry()
        self.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _join_hands(self, roles: Sequence[Service]) -> None:
        """Where effects are done beside their worlds, a receipt and what follows are one commit."""
        workers = [role for role in roles if isinstance(role, WorldWorker)]
        for role in roles:
            if isinstance(role, AdapterPool | TimerWorker) and workers:
                role.ride(workers[0].carriage)

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
                routes=None if self._mapped is None else partial(self._mapped.route, self.universe),
                vouch=self._vouch,
                # A dead process's effects go on when its worlds do.
                claim_s=min(lease_ttl_s, CLAIM_S_MAX),
                clock=self.clock,
            )
        if name == "dispatch":
            from holdfast.roles.dispatcher import Dispatcher

            return Dispatcher(
                self.store,
                universe=self.universe,
                worker=self.worker,
                incarnation=self.incarnation,
                lease_ttl_s=lease_ttl_s,
                clock=self.clock,
            )
        if name == "task":
            self._tune()
            return TaskWorker(
                self.store,
                universe=self.universe,
                codes=self.app.tasks,
                worker=self.worker,
                incarnation=self.incarnation,
                queues=self._task_queues(),
                concurrency=CONCURRENCY if self._concurrency is None else self._concurrency,
                stop_grace_s=self._stop_grace_s,
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
                histories=self.app.histories,
                unknown_event_s=(policy or WorkerPolicy()).unknown_event_s,
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


# Those of this process.
_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _disown_in_child() -> None:
    """A lock that another thread holds at a fork is never released in the child: calls get new ones, and hear
    from the store that it was forked."""
    for runtime in _runtimes:
        runtime._take_callers()


os.register_at_fork(after_in_child=_disown_in_child)


def _refuse_elsewhere(store: Store, universe: str, stores: StoreMap) -> None:
    from holdfast.app.locating import refuse_elsewhere

    refuse_elsewhere(store, universe, stores)


def _needed_by(app: App) -> tuple[str, ...]:
    """All roles but those that only tasks or some effects need, if this app has none of them."""
    needed = {role for effect in app.effects.values() for role in effect.roles}
    if app.tasks:
        needed.add("task")
    return tuple(role for role in ROLES if role not in ("dispatch", "task") or role in needed)
