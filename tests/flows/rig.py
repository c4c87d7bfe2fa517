"""A flow rig: a store with simulated time, one worker, one timer, one client, and crashes at chosen commits.

The rig leases activation tasks and runs them with the code of the product. Every commit is a crash point: start, send,
lease, the commits of the flow, reports, due times. A crashed worker drops the activation and its lease expires, as
after `kill -9`. A crashed timer fires again. A crashed client repeats its call, so a call has a key.
Child tasks run at once, in the rig.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import holdfast as hf
from holdfast import codec
from holdfast.app.flow_handle import FlowHandle
from holdfast.app.flow_start import to_call
from holdfast.clock import S, SimClock
from holdfast.errors import CommitUnknown
from holdfast.flows import due_times, operations, parked_flows, retention
from holdfast.flows.model import TASK_PREFIX, FlowId, decode_body, decode_head, keys_of
from holdfast.flows.new_flow import NewFlow
from holdfast.flows.states import ENDED
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Store
from holdfast.tasks import operations as task_operations
from holdfast.tasks.operations import GrantRequest, TaskGrant, TaskReport
from holdfast.workers.flows.activation import FlowEnvironment, run_activation
from holdfast.workers.flows.definition import RecordedValues
from holdfast.workers.tasks.attempt import TaskAttempt, run_attempt

BEFORE, AFTER, UNKNOWN = CRASHES = ("before", "after", "unknown")
ROUNDS_MAX = 400


class Crashed(BaseException):
    """The worker process died."""


class CrashingStore:
    """A store of processes that die at chosen commits. Reads and other calls go to the store itself.

    The plan has the mode of a crash by the number of the commit, or by its operation and the number among the commits
    of this operation: `{("flows.commit", 2): "after"}`.
    """

    def __init__(self, store: Store, plan: dict[Any, str]) -> None:
        self._store = store
        self._plan = plan
        # The operations, in the order of the commits.
        self.operations: list[str] = []
        # The numbers of the commits that changed nothing.
        self.idle: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @property
    def commits(self) -> int:
        return len(self.operations)

    @property
    def points(self) -> list[int]:
        """The numbers of the commits that changed something."""
        return [n for n in range(1, self.commits + 1) if n not in self.idle]

    async def submit(self, fn: Any, *args: Any) -> Any:
        return self.transact(fn, *args)

    def transact(self, fn: Any, *args: Any) -> Any:
        name = fn.name
        self.operations.append(name)
        numbered = (name, self.operations.count(name))
        mode = self._plan.pop(self.commits, None) or self._plan.pop(numbered, None)
        if mode == BEFORE:
            raise Crashed
        result = self._store.transact(fn, *args)
        if mode == AFTER:
            raise Crashed
        if mode == UNKNOWN:
            raise CommitUnknown(why="the answer was lost")
        return result


class FlowRig:
    universe = "flows"

    def __init__(self, store: Store, clock: SimClock, app: hf.App) -> None:
        self.store = store
        self.clock = clock
        self.app = app
        self.plan: dict[Any, str] = {}
        self.crashing_store: Any = CrashingStore(store, self.plan)
        self.threads = ThreadPoolExecutor(4)
        self.runtime: Any = _ClientRuntime(self)
        self.environment = FlowEnvironment(
            self.crashing_store,
            self.universe,
            self.threads,
            RecordedValues(clock),
        )
        self.codes = {
            TASK_PREFIX + name: flow.within(self.universe, app) for name, flow in app.flows.items()
        }

    # -- the client --------------------------------------------------------------------------------

    def start(self, flow: Any, *args: Any, **kwargs: Any) -> FlowHandle[Any]:
        call = to_call(self.runtime, flow)
        new = NewFlow(call.spec, call.flow.pack(args, kwargs), call.key, tag=call.tag)
        [started] = self.crashing_store.transact(operations.start, self.universe, [new])
        return FlowHandle(self.runtime, FlowId(started.generation, started.seq), call.flow)

    def repeat(self, call: Callable[[], Any]) -> Any:
        """Call as a client does that dies, and that starts again until it has the answer."""
        while True:
            with suppress(Crashed, CommitUnknown):
                return call()

    def handle(self, id: FlowId) -> FlowHandle[Any]:
        return FlowHandle(self.runtime, id)

    def flow_ids(self, name: str) -> list[FlowId]:
        """The ids of the flows of a name, oldest first."""
        keys = keys_of(self.universe)
        rows = self.store.read(lambda txn: txn.scan(keys.bodies, tuples.prefix_end(keys.bodies)))
        bodies = [
            (tuples.unpack_last_int(key, len(keys.bodies)), decode_body(row)) for key, row in rows
        ]
        return [FlowId(body.generation, seq) for seq, body in bodies if body.spec.name == name]

    def blob_count(self) -> int:
        """The number of blobs with references."""
        prefix = schema.key_prefix(schema.Space.BLOB, "refs")
        rows = self.store.read(lambda txn: txn.scan(prefix, tuples.prefix_end(prefix)))
        return sum(codec.unpack_as(blobs.BlobRefs, row).count > 0 for _, row in rows)

    def result(self, handle: FlowHandle[Any]) -> Any:
        """Run until the flow has ended, and return its result or raise its error."""
        self.run(lambda: handle.done())
        return handle.result(timeout=0)

    # -- the worker --------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool], on_round: Callable[[], None] | None = None) -> None:
        """Run activations and tasks, and let time pass when nothing is ready, until the condition holds."""
        for _ in range(ROUNDS_MAX):
            if until():
                return
            if on_round is not None:
                on_round()
            if not self.run_one():
                self.pass_time()
        raise AssertionError("the flow did not come to its end")

    def run_one(self) -> bool:
        """Lease and run one task. Returns False if none is ready."""
        try:
            leased = self.crashing_store.transact(
                task_operations.lease,
                self.universe,
                GrantRequest("worker", self._queues(), 1, True),
            )
        except (Crashed, CommitUnknown):
            self._expire_leases()
            return True
        if not leased.grants:
            if not leased.overdue:
                self.crashing_store.idle.add(self.crashing_store.commits)
            return bool(leased.overdue)
        self.run_grant(leased.grants[0])
        return True

    def run_grant(self, grant: TaskGrant) -> None:
        try:
            report = self._attempt(grant)
            if report is not None:
                self._report([report])
        except (Crashed, CommitUnknown):
            self._expire_leases()

    def _report(self, reports: list[TaskReport]) -> None:
        self.crashing_store.transact(
            task_operations.apply_reports,
            self.universe,
            "worker",
            self.store.generation,
            reports,
        )

    def _expire_leases(self) -> None:
        """The leases of the dead worker expire."""
        self.clock.advance(3_600 * S)

    def _attempt(self, grant: TaskGrant) -> TaskReport | None:
        """Run a task. None if its own commit has completed it."""
        code = self.codes.get(grant.name)
        if code is None:
            return run_attempt(TaskAttempt(grant, self.app.tasks[grant.name])).report
        attempt = TaskAttempt(grant, code)  # type: ignore[arg-type]
        asyncio.run(run_activation(self.environment, code, attempt, grant.args))
        return None if attempt.reported else TaskReport(grant.seq, grant.lease)

    def run_together(self, grants: list[TaskGrant]) -> None:
        """Run activations in one event loop, as a worker does, and report those whose commits did not."""
        attempts = [TaskAttempt(grant, self.codes[grant.name]) for grant in grants]  # type: ignore[arg-type]

        async def run_all() -> None:
            await asyncio.gather(
                *(
                    run_activation(self.environment, self.codes[grant.name], attempt, grant.args)
                    for grant, attempt in zip(grants, attempts, strict=True)
                )
            )

        asyncio.run(run_all())
        left = [attempt.grant for attempt in attempts if not attempt.reported]
        if left:
            self._report([TaskReport(grant.seq, grant.lease) for grant in left])

    def pass_time(self) -> None:
        """Advance the clock to the next due time, and fire the due sleeps and timeouts."""
        due_ns = self.store.read(retention.next_due_ns, self.universe)
        left_ns = S if due_ns is None else max(due_ns - self.store.now_ns(), 0) + 1
        self.clock.advance(left_ns)
        # A timer that dies is started again.
        with suppress(Crashed, CommitUnknown):
            if not self.crashing_store.transact(due_times.fire_due, self.universe, 100):
                self.crashing_store.idle.add(self.crashing_store.commits)

    def resume_parked(self, versions: dict[str, str]) -> None:
        """Resume parked flows as a worker with this code does at its start."""
        self.store.transact(parked_flows.resume_parked, self.universe, versions)

    def _queues(self) -> list[str]:
        flows = {flow.spec.queue for flow in self.app.flows.values()}
        return sorted(flows | {task.spec.queue for task in self.app.tasks.values()})

    def is_idle(self) -> bool:
        """Whether no flow has an activation."""
        keys = keys_of(self.universe)
        heads = self.store.read(lambda txn: txn.scan(keys.heads, tuples.prefix_end(keys.heads)))
        return all(not decode_head(row).task or decode_head(row).state in ENDED for _, row in heads)


class _ClientRuntime:
    """The part of a runtime that `FlowHandle` uses."""

    def __init__(self, rig: FlowRig) -> None:
        self.store, self.clock, self.app = rig.crashing_store, rig.clock, rig.app
        self.universe = rig.universe

    def check(self) -> None:
        return
