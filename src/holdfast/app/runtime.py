"""The runtime: an open store, the roles of an app that run in this process, and handles to worlds and tasks."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, TypeVarTuple, Unpack, overload

from holdfast import traces
from holdfast.app import store_calls, submission
from holdfast.app.app import App
from holdfast.app.definitions import World
from holdfast.app.result_waiter import ResultWaiter
from holdfast.app.schedule_options import ScheduleOptions, checked_args
from holdfast.app.task_handle import TaskHandle
from holdfast.app.tasks import Submission, Task, TaskCall
from holdfast.app.tasks import to_limits as declared_limits
from holdfast.clock import SYSTEM, Clock
from holdfast.config import CONFIG_FILE, CONFIG_VARIABLE
from holdfast.durable import load_limits
from holdfast.errors import HoldfastError, Invalid
from holdfast.flows import parked_flows
from holdfast.flows.model import keys_of as flow_keys_of
from holdfast.messages import Ingress, event_ingress
from holdfast.store import open as open_store
from holdfast.store.api import Store
from holdfast.tasks import operations
from holdfast.tasks.ids import parse_task_id
from holdfast.tasks.model import get_limits, keys_of
from holdfast.workers.effects.pool import CLAIM_S_MAX, EffectWorkerPool
from holdfast.workers.mail.delivery import check_peers
from holdfast.workers.orchestrator import Orchestrator
from holdfast.workers.service import ManagedService
from holdfast.workers.tasks.attempt import TaskDefinition
from holdfast.workers.tasks.process import is_importing_script
from holdfast.workers.tasks.worker import CONCURRENCY, STOP_GRACE_S, TaskWorker
from holdfast.workers.timers.worker import TimerWorker
from holdfast.workers.world.policy import WorldWorkerPolicy
from holdfast.workers.world.worker import WorldWorker
from holdfast.world import ingress
from holdfast.world.catalog import check_text, check_universe

# Optional parts are imported by the functions that use them, so that the first task does not wait for them.
if TYPE_CHECKING:
    from holdfast.app.aio import AsyncRuntime
    from holdfast.app.flow_definition import Flow, FlowCall
    from holdfast.app.flow_handle import FlowHandle
    from holdfast.app.schedules import ScheduleHandle
    from holdfast.app.tasks import AsyncTask, Task, TaskCall
    from holdfast.app.world_handle import WorldHandle
    from holdfast.blockers.answer import WhyAnswer
    from holdfast.store.admin.routing import StoreRouting

W = TypeVar("W", bound=World)
T = TypeVar("T")
P = ParamSpec("P")
V = TypeVar("V")
A = TypeVarTuple("A")

ROLES = ("orchestrator", "world", "adapter", "timer", "dispatch", "task")
# A process with one of these roles takes part in the census of its store. Its failure ends no role.
COUNTING_ROLES = frozenset(["orchestrator", "task"])


class Runtime:
    """The running app, created by `app.open(url)`. Roles run in threads of this process; `roles=()` runs none.

    `url` may also be an open store, which `close` then leaves open. Without a URL the store is
    `HOLDFAST_STORE`, else the one that `holdfast.toml` configures for the universe, else `./data`.
    """

    def __init__(
        self,
        app: App,
        url: str | Store | None = None,
        *,
        roles: Iterable[str] | None = None,
        universe: str | None = None,
        worker: str | None = None,
        policy: WorldWorkerPolicy | None = None,
        kinds: Sequence[str] | None = None,
        queues: Sequence[str] | None = None,
        concurrency: int | None = None,
        stop_grace_s: float = STOP_GRACE_S,
        stores: Mapping[str, str | Store] | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        """Open the store and start the roles. `stores` maps other universes, to which worlds of this one
        send mail, to their store URLs."""
        if is_importing_script():
            raise Invalid(
                what="app",
                why="opened while a task process imported this script; move the script's main code under "
                'if __name__ == "__main__":',
            )
        self.app = app
        self.universe = app.universe if universe is None else universe
        self.clock = clock
        role_names = _default_roles(app) if roles is None else _known_roles(roles)
        if app.redactor and role_names:
            # The roles run the code of the application, whose errors may quote hidden values.
            traces.hide_error_texts(self)
        check_universe(self.universe)
        self.incarnation = self.mint()
        self.worker = f"worker-{self.incarnation[:8]}" if worker is None else worker
        check_text("worker", self.worker)
        routing: StoreRouting | None = None
        if url is None:
            from holdfast.store.admin.routing import locate_store

            url, routing = locate_store(self.universe)
        self._owns_store = isinstance(url, str)
        check_peers(self.universe, stores or {})
        self._peers = (
            stores
            if routing is None
            else routing.universes_of_other_stores(self.universe) | dict(stores or {})
        )
        self._routing = routing
        self._explicit_peers = frozenset(stores or ())
        self._peer_runtimes: dict[str, Runtime] = {}
        self.store: Store = open_store(url, clock=clock) if isinstance(url, str) else url
        if routing is not None:
            try:
                _require_here(self.store, self.universe, routing)
            except BaseException:
                self.store.close()
                raise
        self._pid = os.getpid()
        self._create_coalescers()
        _runtimes.add(self)
        self._queues = queues
        self._concurrency = concurrency
        self._stop_grace_s = stop_grace_s
        self.roles: list[ManagedService] = []
        try:
            if role_names:
                self._declare_load_limits()
            services = [self._create_role(name, policy, kinds) for name in role_names]
            self._colocate_roles(services)
            self._start_roles(services)
            if COUNTING_ROLES.intersection(role_names):
                self._start_census()
        except BaseException:
            # The caller has no runtime to close yet, so started roles must be stopped here.
            self.close()
            raise
        if self.roles:
            atexit.register(self._at_exit)

    def _start_roles(self, services: Sequence[ManagedService]) -> None:
        """Start task workers first, orchestrators last: the first task then finds a worker that already requests
        leases, and does not wait behind the first commits of other roles."""
        for role in reversed(services):
            self.roles.insert(0, role)
            role.start()

    def _start_census(self) -> None:
        from holdfast.workers.space_census import CensusTaker

        _censuses[self] = CensusTaker(self.store, self.incarnation, self.clock)
        _censuses[self].start()

    def _create_coalescers(self) -> None:
        """Create the coalescers that merge calls of the threads and event loops of this process."""
        self.submitter = submission.SubmitCoalescer(self.store, self.universe)
        self.waiting = ResultWaiter(self.store, self.check, keys_of(self.universe).task_topic)
        self.flow_waiting = ResultWaiter(self.store, self.check, flow_keys_of(self.universe).topic)
        self.async_submitter = submission.AsyncSubmitCoalescer(self.store, self.universe)

    def world(self, kind: type[W], name: str, *, universe: str | None = None) -> WorldHandle[W]:
        """Return the handle of a world in this universe, or in another universe in its own store."""
        from holdfast.app.world_handle import WorldHandle

        if universe is None or universe == self.universe:
            return WorldHandle(self, kind, name)
        return WorldHandle(self._peer_runtime(universe), kind, name)

    def send_many(self, items: Iterable[tuple[WorldHandle[Any], Any]]) -> list[int]:
        """Deliver many events in order in one atomic commit, and return their inbox seqs."""
        batch: list[tuple[ingress.WorldAddress, str | None, Ingress]] = []
        for handle, event in items:
            name, value = self.app.check_event(handle.type, event)
            batch.append((handle.address(), None, event_ingress(name, value)))
        with traces.sending("send", "worlds", self.universe) as sending:
            delivered: list[ingress.IngressResult] = self.store.transact(
                ingress.deliver_many, batch, *filter(None, [sending.context])
            )
            sending.sent_batch(len(delivered))
        return [delivery.seq for delivery in delivered]

    @cached_property
    def aio(self) -> AsyncRuntime:
        """The same calls for coroutines: `await rt.aio.submit(task, …)`. They never block the event loop."""
        from holdfast.app.aio import AsyncRuntime

        return AsyncRuntime(self)

    # -- tasks ---------------------------------------------------------------------------------

    @overload
    def submit(
        self, task: Task[P, T] | TaskCall[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> TaskHandle[T]: ...
    @overload
    def submit(
        self, task: Task[..., T] | TaskCall[..., T], /, *args: Any, key: str, **kwargs: Any
    ) -> TaskHandle[T]: ...

    def submit(self, task: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Submit a task, or `task.options(…)`. The task is durable on return. `key=` makes it idempotent."""
        return submission.submit(self, task, args, kwargs)

    @overload
    async def submit_async(
        self, task: Task[P, T] | TaskCall[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> TaskHandle[T]: ...
    @overload
    async def submit_async(
        self, task: Task[..., T] | TaskCall[..., T], /, *args: Any, key: str, **kwargs: Any
    ) -> TaskHandle[T]: ...

    async def submit_async(self, task: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The same as `rt.aio.submit`."""
        return await submission.submit_async(self, task, args, kwargs)

    @overload
    def submit_many(
        self, task: AsyncTask[..., T], many: Iterable[Sequence[Any]], /
    ) -> list[TaskHandle[T]]: ...
    @overload
    def submit_many(
        self, task: Callable[[Unpack[A]], T], many: Iterable[tuple[*A]], /
    ) -> list[TaskHandle[T]]: ...
    @overload
    def submit_many(
        self, task: TaskCall[..., T], many: Iterable[Sequence[Any]], /
    ) -> list[TaskHandle[T]]: ...

    def submit_many(self, task: Any, many: Iterable[Any], /) -> list[Any]:
        """Submit a task for each tuple of arguments."""
        return submission.submit_many(self, task, many)

    def submit_all(self, submissions: Iterable[Submission], /) -> list[TaskHandle[Any]]:
        """Submit `task.options(…).call(…)` for different tasks in one atomic commit. `after` may name other
        tasks of the same call by their key."""
        return submission.submit_all(self, submissions)

    @overload
    def map(
        self,
        task: Callable[[V], Coroutine[Any, Any, T]],
        values: Iterable[V],
        /,
        *,
        timeout: float | None = None,
    ) -> Iterator[T]: ...
    @overload
    def map(
        self, task: Callable[[V], T], values: Iterable[V], /, *, timeout: float | None = None
    ) -> Iterator[T]: ...
    @overload
    def map(
        self, task: TaskCall[..., T], values: Iterable[Any], /, *, timeout: float | None = None
    ) -> Iterator[T]: ...

    def map(
        self, task: Any, values: Iterable[Any], /, *, timeout: float | None = None
    ) -> Iterator[Any]:
        """Submit a task for each value. The iterator returns the results in order and waits for each."""
        results: Iterator[Any] = submission.map_results(self, task, values, timeout)
        return results

    def task(self, id: str) -> TaskHandle[Any]:
        """Return the handle of a task by id. Raise NotFound if there is no such task."""
        handle: TaskHandle[Any] = TaskHandle(
            self, parse_task_id(id if type(id) is str else repr(id))
        )
        handle.status()
        return handle

    # -- flows ---------------------------------------------------------------------------------

    def start(
        self, flow: Flow[P, T] | FlowCall[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> FlowHandle[T]:
        """Start a flow, or `flow.options(…)`. The flow is durable on return. `key=` makes it idempotent."""
        from holdfast.app import flow_start

        return flow_start.start(self, flow, args, kwargs)

    @overload
    def flow(self, id: str) -> FlowHandle[Any]: ...
    @overload
    def flow(self, id: Flow[..., T], *, key: str) -> FlowHandle[T]: ...

    def flow(self, id: Any, *, key: str | None = None) -> FlowHandle[Any]:
        """Return the handle of a flow by id, or of a declared flow by key. Raise NotFound if there is none."""
        from holdfast.app import flow_start

        return store_calls.run(self.store, flow_start.find_call(self, id, key))

    # -- schedules -----------------------------------------------------------------------------

    def schedule(
        self,
        name: str,
        target: Task[Any, Any]
        | TaskCall[Any, Any]
        | Flow[Any, Any]
        | FlowCall[Any, Any]
        | None = None,
        /,
        *,
        every: str | None = None,
        zone: str = "UTC",
        missed: str = "one",
        overlap: str = "skip",
        args: Sequence[Any] = (),
        key: str | None = None,
    ) -> ScheduleHandle:
        """Start a task or flow at the times of a cron rule. The schedule is durable on return. `key=` makes the call
        idempotent. Without a target, return the handle of an existing schedule."""
        from holdfast.app import schedules

        if target is None and every is None:
            return schedules.find(self, name)
        return schedules.create(
            self,
            name,
            target,
            ScheduleOptions(every, zone, missed, overlap, checked_args(args)),
            key,
        )

    # -- why -----------------------------------------------------------------------------------

    def why(self, of: Any, id: str | None = None, /) -> WhyAnswer:
        """Return why a subject does not move: of a handle, or of a kind and an id."""
        from holdfast.app.why_call import subject_of, why_call

        subject = subject_of(self, of, id)
        return store_calls.run(subject.runtime.store, why_call(subject))

    def declare_schedules(self) -> None:
        """Store the schedules that the app declares, if they changed."""
        from holdfast.app import schedules

        schedules.declare(self)

    def _peer_runtime(self, universe: str) -> Runtime:
        """Return a client runtime of the same app for another universe: in the store that `stores` or
        `holdfast.toml` maps it to, else in this store."""
        if universe not in self._peer_runtimes:
            url_or_store = (self._peers or {}).get(universe)
            if url_or_store is None and self._routing is not None:
                url_or_store = self._routing.remote_url(self.universe, universe)
            runtime = Runtime(
                self.app, url_or_store or self.store, roles=(), universe=universe, clock=self.clock
            )
            try:
                self._verify_peer(universe, runtime.store)
            except BaseException:
                runtime.close()
                raise
            self._peer_runtimes[universe] = runtime
        return self._peer_runtimes[universe]

    def _verify_peer(self, universe: str, store: Store) -> None:
        """Verify, for a store that `holdfast.toml` names, that the universe does not exist in another one."""
        if self._routing is not None and universe not in self._explicit_peers:
            _require_here(store, universe, self._routing)

    def task_queues(self) -> list[str]:
        if self._queues is not None:
            # A single name must not be split into characters.
            return [self._queues] if isinstance(self._queues, str) else list(self._queues)
        declared = {task.spec.queue for task in self.app.tasks.values()}
        declared |= {flow.spec.queue for flow in self.app.flows.values()}
        return sorted(declared | set(self.app.queues)) or ["default"]

    def _task_definitions(self) -> Mapping[str, TaskDefinition]:
        """The tasks of the app, and the activation tasks of its flows."""
        if not self.app.flows:
            return self.app.tasks
        from holdfast.workers.flows.definition import task_definitions

        app = self.app
        codes = {name: flow.within(self.universe, app) for name, flow in app.flows.items()}
        threads_max = CONCURRENCY if self._concurrency is None else self._concurrency
        worker = (f"{self.worker}:task", self.incarnation)
        flows = task_definitions(self.store, self.universe, codes, threads_max, self.clock, worker)
        return {**app.tasks, **flows}

    def _resume_parked_flows(self) -> None:
        """Run flows again that other code had parked, once for each version of the code."""
        if not self.app.flows:
            return
        app = self.app
        versions = {
            name: flow.within(self.universe, app).code_version for name, flow in app.flows.items()
        }
        last = -1
        while last:
            last = self.store.transact(
                parked_flows.resume_parked, self.universe, versions, max(last, 0)
            )

    def prepare_tasks(self) -> None:
        """Store what a task worker declares at its start, and resume parked flows."""
        self._declare_limits()
        self._resume_parked_flows()

    def _declare_limits(self) -> None:
        """Store the queue limits that the app declares, if they changed."""
        for queue in self.app.queues.values():
            limits = declared_limits(queue)
            stored = self.store.read(get_limits, keys_of(self.universe), queue.name)
            if stored.declared != (limits.concurrency, limits.per_key):
                self.store.transact(operations.set_limits, self.universe, queue.name, limits, True)

    def _declare_load_limits(self) -> None:
        """Store the load limits that `holdfast.toml` declares, if they changed."""
        if not (os.environ.get(CONFIG_VARIABLE) or os.path.exists(CONFIG_FILE)):
            return
        from holdfast.workers import limit_settings

        declared = limit_settings.load_declared(self.universe)
        if declared is not None:
            stored = self.store.read(load_limits.find, self.universe)
            if stored is None or stored.declared != declared.digest:
                self.store.transact(limit_settings.change_limits, self.universe, *declared)

    def mint(self) -> str:
        """Return a new unique id."""
        return self.clock.entropy(16).hex()

    def check(self) -> None:
        """Raise the error that ended a role of this process, if there is one."""
        for role in self.roles:
            if role.failure is not None:
                raise role.failure

    def close(self) -> None:
        """Stop the roles and close the store. The error that ended a role is in its `failure`."""
        atexit.unregister(self._at_exit)
        if os.getpid() != self._pid:
            return  # in a forked child: the roles, their threads and the store belong to the parent
        try:
            services = [*self.roles, *filter(None, [census_of(self)])]
            for role in services:
                with contextlib.suppress(HoldfastError):
                    role.request_stop()
            for role in services:
                with contextlib.suppress(Exception):
                    role.join(30 + self._stop_grace_s)
        finally:
            traces.show_error_texts(self)
            _task_definitions.pop(self, None)
            for other in self._peer_runtimes.values():
                other.close()
            if self._owns_store:
                self.store.close()

    def _at_exit(self) -> None:
        """Release claims without a grace period when the program exits without calling `close`."""
        for role in self.roles:
            if isinstance(role, TaskWorker):
                role.skip_grace()
        self.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _colocate_roles(self, services: Sequence[ManagedService]) -> None:
        """Connect effect and timer workers to the world worker of this process, which then commits a receipt
        together with the world's next step (fused commit)."""
        world_workers = [role for role in services if isinstance(role, WorldWorker)]
        for role in services:
            if isinstance(role, EffectWorkerPool | TimerWorker) and world_workers:
                role.set_commit_owner(world_workers[0].committer)

    def _create_role(
        self, name: str, policy: WorldWorkerPolicy | None, kinds: Sequence[str] | None
    ) -> ManagedService:
        lease_ttl_s = (policy or WorldWorkerPolicy()).lease_ttl_s
        if name == "adapter":
            return EffectWorkerPool(
                self.store,
                universe=self.universe,
                adapters=self.app.effects,
                worker=self.worker,
                kinds=kinds,
                stores=self._peers,
                routes=None
                if self._routing is None
                else partial(self._routing.remote_url, self.universe),
                verify_peer=self._verify_peer,
                # After a crash, effects are reclaimed as soon as the worlds are.
                claim_s=min(lease_ttl_s, CLAIM_S_MAX),
                hooks=self.app.hooks,
                clock=self.clock,
            )
        if name == "dispatch":
            from holdfast.workers.dispatch.dispatcher import Dispatcher

            return Dispatcher(
                self.store,
                universe=self.universe,
                worker=self.worker,
                incarnation=self.incarnation,
                lease_ttl_s=lease_ttl_s,
                clock=self.clock,
            )
        if name == "task":
            self.prepare_tasks()
            definitions = self._task_definitions()
            register_definitions(self, definitions)
            return TaskWorker(
                self.store,
                universe=self.universe,
                codes=definitions,
                worker=self.worker,
                incarnation=self.incarnation,
                queues=self.task_queues(),
                concurrency=CONCURRENCY if self._concurrency is None else self._concurrency,
                stop_grace_s=self._stop_grace_s,
                hooks=self.app.hooks,
                clock=self.clock,
            )
        if name == "timer":
            self.declare_schedules()
            return TimerWorker(self.store, universe=self.universe, clock=self.clock)
        if name == "orchestrator":
            return Orchestrator(
                self.store,
                universe=self.universe,
                worker=self.worker,
                incarnation=self.incarnation,
                # A leader detects a dead worker before the worker's leases expire.
                lease_ttl_s=lease_ttl_s / 2,
                worker_ttl_s=lease_ttl_s / 2,
                histories=self.app.histories,
                unknown_event_s=(policy or WorldWorkerPolicy()).unknown_event_s,
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


# The open runtimes of this process.
_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()
# The definitions that the task worker of each open runtime runs.
_task_definitions: weakref.WeakKeyDictionary[Runtime, Mapping[str, TaskDefinition]] = (
    weakref.WeakKeyDictionary()
)

# The census service of each open runtime that has one.
_censuses: weakref.WeakKeyDictionary[Runtime, ManagedService] = weakref.WeakKeyDictionary()


def census_of(runtime: Runtime) -> ManagedService | None:
    """Return the service that takes part in the census of the store of a runtime."""
    return _censuses.get(runtime)


def register_definitions(runtime: Runtime, definitions: Mapping[str, TaskDefinition]) -> None:
    """Make a runtime the one that `hf.world(…)` uses in these tasks and flows."""
    _task_definitions[runtime] = definitions


def runtime_of(code: TaskDefinition) -> Runtime:
    """Return the runtime of this process whose worker runs a task or flow."""
    found = [one for one, codes in _task_definitions.items() if codes.get(code.name) is code]
    if len(found) == 1:
        return found[0]
    why = "several open runtimes run this task" if found else "no runtime of this process runs it"
    raise Invalid(what="world", task=code.name, why=f"{why}; use rt.world(…) of the runtime")


def _replace_coalescers_in_child() -> None:
    """Replace the coalescers in a forked child: a lock that another thread held at the fork is never released
    there. Calls in the child then get the store's error about the fork."""
    for runtime in _runtimes:
        runtime._create_coalescers()


os.register_at_fork(after_in_child=_replace_coalescers_in_child)


def _require_here(store: Store, universe: str, routing: StoreRouting) -> None:
    from holdfast.app.universe_location import require_here

    require_here(store, universe, routing)


def _known_roles(roles: Iterable[str]) -> tuple[str, ...]:
    names = tuple(roles)
    if unknown := sorted(set(names) - set(ROLES)):
        raise Invalid(what="role", found=unknown, expected=list(ROLES))
    return names


def _default_roles(app: App) -> tuple[str, ...]:
    """Return the roles that the app needs: all, without `task` or `dispatch` if the app does not use them."""
    needed = {role for effect in app.effects.values() for role in effect.roles}
    if app.tasks or app.flows:
        needed.add("task")
    return tuple(role for role in ROLES if role not in ("dispatch", "task") or role in needed)
