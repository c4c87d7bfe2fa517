"""World replay: checks stored hashes and, with the application code, replays every kept step.

For each world, on one snapshot, it checks the hash chain of the journal and the hash of every snapshot.
With the code it also replays every kept step and compares the emitted intents, the reply, and the state
at each digest and each snapshot. The first difference of a world is its finding.

With the code, each world is replayed twice, in processes with different hash seeds. Both replays must end
in the same state. This detects a reducer that depends on the iteration order of a set of strings, even for
entries without a digest.

Worlds are independent, so a pool of spawned processes checks them in parallel. Each process opens the store
and imports the application. A reducer that kills its process is also a finding: the remaining worlds are
then checked one at a time, so that the finding names the right world.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from holdfast import store as stores
from holdfast.app.app import App
from holdfast.config import SCAN_PAGE
from holdfast.durable import journal, snapshot
from holdfast.errors import HoldfastError, Invalid, NotFound, ReplayDiverged, StoreCorrupt
from holdfast.ops import decode_errors
from holdfast.ops.app_loader import load_app
from holdfast.store.api import Store, Txn, connection_url
from holdfast.world import catalog
from holdfast.world.catalog import WorldStatus, subject_of
from holdfast.world.reducer import WorldSpec
from holdfast.world.restore import ReplayCheck, load_snapshot, replay_and_check

# Worlds per unit of work: large enough to keep a process busy, small enough for visible progress.
SHARE_SIZE = 64
PROCESS_LOST = "verifier_lost"
# Two seeds that give strings different hashes.
HASH_SEEDS = ("1", "2")


class WorldTarget(NamedTuple):
    universe: str
    world_id: str


class WorldFinding(NamedTuple):
    """The result for one world: the replayed steps, how many states were compared with a digest, and the
    error if there is one."""

    universe: str
    world_id: str
    world: str
    steps: int
    code: str = ""
    height: int = 0
    text: str = ""
    compared: int = 0
    not_compared: int = 0


class _ReplayResult(NamedTuple):
    """The result of one replay of a world, with the digest of its final state."""

    finding: WorldFinding
    height: int = 0
    digest: bytes = b""

    @property
    def target(self) -> WorldTarget:
        return WorldTarget(self.finding.universe, self.finding.world_id)


def targets(txn: Txn, universe: str) -> list[WorldTarget]:
    """Return the worlds of a universe that are not deleted."""
    found_targets: list[WorldTarget] = []
    after = ""
    while page := catalog.list_worlds(txn, universe, after, SCAN_PAGE):
        found_targets += [
            WorldTarget(universe, record.world_id)
            for record in page
            if record.status is not WorldStatus.DELETED
        ]
        after = page[-1].world_id
    return found_targets


def verify_worlds(
    store: Store,
    targets: Sequence[WorldTarget],
    *,
    app: str | None = None,
    jobs: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> list[WorldFinding]:
    """Verify worlds and return a finding for each, in the order of `targets`. `app` is `module:attribute`."""
    if jobs < 1:
        raise Invalid(what="jobs", why="must be at least 1", found=jobs)
    if app is not None:
        load_app(app)
    findings: dict[WorldTarget, WorldFinding] = {}
    for batch in _check_all(store, targets, app, jobs):
        findings |= {WorldTarget(finding.universe, finding.world_id): finding for finding in batch}
        progress(len(findings))
    return [findings[target] for target in targets]


def check_world(store: Store, app: App | None, target: WorldTarget) -> WorldFinding:
    """Verify one world once, in this process."""
    return store.read(_check_target, app, target).finding


# -- one world -----------------------------------------------------------------------------------


def _check_target(txn: Txn, app: App | None, target: WorldTarget) -> _ReplayResult:
    record = catalog.get_record(txn, target.universe, target.world_id)
    world_name = f"{record.type}/{record.name}"
    subject = subject_of(target.universe, target.world_id)
    try:
        journal.verify(txn, subject)
        for height in snapshot.heights(txn, subject, SCAN_PAGE):
            load_snapshot(txn, target.world_id, subject, height)
        if app is None:
            return _ReplayResult(WorldFinding(*target, world_name, 0))
        checked = _replay(txn, app, target, record.type, record.name)
    except HoldfastError as error:
        return _ReplayResult(_finding_of(target, world_name, error))
    except decode_errors.DECODE_ERRORS as error:
        if app is not None:
            raise  # the error may come from user code
        corrupt = StoreCorrupt(why=decode_errors.error_text(error))
        return _ReplayResult(_finding_of(target, world_name, corrupt))
    counts = WorldFinding(
        *target,
        world_name,
        checked.steps,
        compared=checked.compared,
        not_compared=checked.not_compared,
    )
    return _ReplayResult(counts, checked.height, checked.digest)


def _check_again(txn: Txn, app: App, first: _ReplayResult) -> WorldFinding:
    """Replay the same steps under another hash seed and compare the final state."""
    finding, target = first.finding, first.target
    try:
        record = catalog.get_record(txn, *target)
        second = _replay(txn, app, target, record.type, record.name, first.height)
        # If the history was pruned in between, the two states are not comparable.
        if second.height == first.height and second.digest != first.digest:
            raise ReplayDiverged(
                height=second.height, what="state", why="two replays end in different states"
            )
    except NotFound:
        # The world was removed in between.
        return finding
    except HoldfastError as error:
        wrong = _finding_of(target, finding.world, error)
        return wrong._replace(text=f"{wrong.text} (PYTHONHASHSEED={HASH_SEEDS[1]})")
    return finding


def _replay(
    txn: Txn, app: App, target: WorldTarget, type: str, name: str, to: int | None = None
) -> ReplayCheck:
    program = app.programs.get(type)
    if program is None:
        raise Invalid(what="world", type=type, why="unknown to the app")
    return replay_and_check(
        txn, WorldSpec(target.universe, target.world_id, name, program, app), to=to
    )


def _finding_of(target: WorldTarget, world_name: str, error: HoldfastError) -> WorldFinding:
    height = error.fields.get("height", 0)
    height = height if isinstance(height, int) else 0
    return WorldFinding(*target, world_name, 0, error.code, height, _error_text(error))


def _error_text(error: HoldfastError) -> str:
    """Format the error fields, without code, height and world, which the finding already has."""
    omitted = ("height", "world", "world_id", "subject", "type", "name")
    shown = {name: value for name, value in error.fields.items() if name not in omitted}
    text = " ".join(f"{name}={value}" for name, value in shown.items())
    return " ".join(text.split())


# -- many worlds ---------------------------------------------------------------------------------


def _check_all(
    store: Store, targets: Sequence[WorldTarget], app: str | None, jobs: int
) -> Iterator[list[WorldFinding]]:
    shares = [targets[at : at + SHARE_SIZE] for at in range(0, len(targets), SHARE_SIZE)]
    if app is None and (jobs == 1 or len(shares) <= 1):
        # No user code runs, so no separate process is needed.
        yield from ([check_world(store, None, target)] for target in targets)
        return
    unchecked = set(targets)
    try:
        with _open_pools(store, app, jobs) as processes:
            for batch in processes.check(shares):
                unchecked -= {WorldTarget(finding.universe, finding.world_id) for finding in batch}
                yield batch
    except BrokenProcessPool:
        yield from _one_by_one(store, [target for target in targets if target in unchecked], app)


def _one_by_one(
    store: Store, targets: list[WorldTarget], app: str | None
) -> Iterator[list[WorldFinding]]:
    while targets:
        try:
            with _open_pools(store, app, 1) as processes:
                while targets:
                    yield from processes.check([targets[:1]])
                    del targets[0]
        except BrokenProcessPool:
            record = store.read(catalog.get_record, *targets[0])
            world_name, text = f"{record.type}/{record.name}", "replaying it ended the process"
            yield [WorldFinding(*targets.pop(0), world_name, 0, PROCESS_LOST, 0, text)]


@contextmanager
def _open_pools(store: Store, app: str | None, jobs: int) -> Iterator[_VerifierPools]:
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pools = [
            stack.enter_context(
                ProcessPoolExecutor(
                    jobs,
                    mp_context=context,
                    initializer=_initialise,
                    initargs=(connection_url(store), app),
                )
            )
            for _ in (HASH_SEEDS if app is not None else HASH_SEEDS[:1])
        ]
        yield _VerifierPools(pools, jobs)


class _VerifierPools:
    """Process pools, one per hash seed. With the code, each share is checked once in every pool."""

    def __init__(self, pools: Sequence[ProcessPoolExecutor], jobs: int) -> None:
        self._pools = pools
        self._jobs = jobs

    def check(self, shares: Sequence[Sequence[WorldTarget]]) -> Iterator[list[WorldFinding]]:
        """Yield the findings of each share. At most `jobs` processes work at the same time."""
        waiting = deque(shares)
        in_flight: dict[Future[Any], int] = {}
        while waiting or in_flight:
            while waiting and len(in_flight) < self._jobs:
                in_flight[self._submit(0, _check_share, waiting.popleft())] = 0
            for done in wait(in_flight, return_when=FIRST_COMPLETED).done:
                seed, results = in_flight.pop(done), done.result()
                if seed + 1 < len(self._pools):
                    in_flight[self._submit(seed + 1, _check_share_again, results)] = seed + 1
                elif seed:
                    yield results
                else:
                    yield [result.finding for result in results]

    def _submit(self, seed: int, fn: Callable[..., Any], share: Sequence[Any]) -> Future[Any]:
        """Submit a share. The pool spawns its process here, so the hash seed must be in the environment now."""
        with spawn_environment("PYTHONHASHSEED", HASH_SEEDS[seed]):
            return self._pools[seed].submit(fn, share)


_spawn_lock = threading.Lock()


@contextmanager
def spawn_environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for the processes that this thread spawns meanwhile."""
    with _spawn_lock:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


class _VerifierState(NamedTuple):
    store: Store
    app: App | None


_verifier: _VerifierState | None = None


def _initialise(url: str, app: str | None) -> None:
    """Initialise a pool process: open the store and import the application."""
    global _verifier
    _verifier = _VerifierState(
        stores.open(url, bootstrap=False), None if app is None else load_app(app)
    )


def _check_share(share: Sequence[WorldTarget]) -> list[_ReplayResult]:
    assert _verifier is not None
    return [_verifier.store.read(_check_target, _verifier.app, target) for target in share]


def _check_share_again(share: Sequence[_ReplayResult]) -> list[WorldFinding]:
    assert _verifier is not None
    assert _verifier.app is not None
    app = _verifier.app
    return [
        result.finding if result.finding.code else _verifier.store.read(_check_again, app, result)
        for result in share
    ]
