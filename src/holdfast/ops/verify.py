"""Verify worlds: is what is stored sound, and does the code repeat it?

Of each world, on one snapshot: the hash chain of its journal, the hash of every snapshot, and, with
the code, every kept step once more: what it emitted, what it replied, and the state at each digest
and each snapshot. The first difference of a world is its finding.

With the code, each world is replayed twice, in processes with different hash seeds. The order of a set
of strings differs between them, so a reducer that depends on it is found, also by entries from before
there were digests: the two replays must end in the same state.

Worlds do not depend on each other, so they are shared out among processes. Those are spawned: each
opens the store and imports the application itself. A reducer that ends its process is a finding like
any other: from there on worlds are checked one by one, so that the right one is blamed.
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
from holdfast.ops import unreadable
from holdfast.ops.application import load_app
from holdfast.store.api import Store, Txn, address_of
from holdfast.world import catalog
from holdfast.world.catalog import Status, subject_of
from holdfast.world.kernel import World
from holdfast.world.restore import Checked, check, load_snapshot

# Worlds that a process takes at a time: enough to keep it busy, few enough to see it go on.
SHARE = 64
LOST = "verifier_lost"
# Strings hash in one way in a process with the first, and in another with the second.
HASH_SEEDS = ("1", "2")


class Target(NamedTuple):
    universe: str
    world_id: str


class Finding(NamedTuple):
    """What was found of one world: how many steps were repeated, for how many of them the state was
    compared with a digest, and what is wrong if anything."""

    universe: str
    world_id: str
    world: str
    steps: int
    code: str = ""
    height: int = 0
    text: str = ""
    compared: int = 0
    not_compared: int = 0


class _Replayed(NamedTuple):
    """What one replay found of a world, and the state that it ended in."""

    finding: Finding
    height: int = 0
    digest: bytes = b""

    @property
    def target(self) -> Target:
        return Target(self.finding.universe, self.finding.world_id)


def targets(txn: Txn, universe: str) -> list[Target]:
    """The worlds of a universe that are not deleted."""
    found: list[Target] = []
    after = ""
    while page := catalog.worlds(txn, universe, after, SCAN_PAGE):
        found += [
            Target(universe, one.world_id) for one in page if one.status is not Status.DELETED
        ]
        after = page[-1].world_id
    return found


def verify(
    store: Store,
    wanted: Sequence[Target],
    *,
    app: str | None = None,
    jobs: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Finding]:
    """A finding for each world, in the order asked for. `app` is `module:attribute`."""
    if jobs < 1:
        raise Invalid(what="jobs", why="one or more", found=jobs)
    if app is not None:
        load_app(app)
    found: dict[Target, Finding] = {}
    for some in _checked(store, wanted, app, jobs):
        found |= {Target(one.universe, one.world_id): one for one in some}
        progress(len(found))
    return [found[target] for target in wanted]


def check_world(store: Store, app: App | None, target: Target) -> Finding:
    """A world once, in this process."""
    return store.read(_check, app, target).finding


# -- one world -----------------------------------------------------------------------------------


def _check(txn: Txn, app: App | None, target: Target) -> _Replayed:
    record = catalog.record(txn, target.universe, target.world_id)
    shown = f"{record.type}/{record.name}"
    subject = subject_of(target.universe, target.world_id)
    try:
        journal.verify(txn, subject)
        for height in snapshot.heights(txn, subject, SCAN_PAGE):
            load_snapshot(txn, target.world_id, subject, height)
        if app is None:
            return _Replayed(Finding(*target, shown, 0))
        done = _replay(txn, app, target, record.type, record.name)
    except HoldfastError as error:
        return _Replayed(_wrong(target, shown, error))
    except unreadable.ERRORS as error:
        if app is not None:
            raise  # it may be the user's code
        corrupt = StoreCorrupt(why=unreadable.told(error))
        return _Replayed(_wrong(target, shown, corrupt))
    counts = Finding(
        *target, shown, done.steps, compared=done.compared, not_compared=done.not_compared
    )
    return _Replayed(counts, done.height, done.digest)


def _check_again(txn: Txn, app: App, first: _Replayed) -> Finding:
    """The same steps once more, in a process with another hash seed, and the state at the end."""
    finding, target = first.finding, first.target
    try:
        record = catalog.record(txn, *target)
        again = _replay(txn, app, target, record.type, record.name, first.height)
        # Where the history was cut meanwhile, the two say nothing about each other.
        if again.height == first.height and again.digest != first.digest:
            raise ReplayDiverged(
                height=again.height, what="state", why="two replays end in different states"
            )
    except NotFound:
        # It was removed meanwhile.
        return finding
    except HoldfastError as error:
        wrong = _wrong(target, finding.world, error)
        return wrong._replace(text=f"{wrong.text} (PYTHONHASHSEED={HASH_SEEDS[1]})")
    return finding


def _replay(
    txn: Txn, app: App, target: Target, type: str, name: str, to: int | None = None
) -> Checked:
    program = app.programs.get(type)
    if program is None:
        raise Invalid(what="world", type=type, why="unknown to the app")
    return check(txn, World(target.universe, target.world_id, name, program, app), to=to)


def _wrong(target: Target, shown: str, error: HoldfastError) -> Finding:
    height = error.fields.get("height", 0)
    height = height if isinstance(height, int) else 0
    return Finding(*target, shown, 0, error.code, height, _told(error))


def _told(error: HoldfastError) -> str:
    """What the error says beyond its code, the height and the world, which are told anyway."""
    known = ("height", "world", "world_id", "subject", "type", "name")
    rest = {name: value for name, value in error.fields.items() if name not in known}
    lines = " ".join(f"{name}={value}" for name, value in rest.items())
    return " ".join(lines.split())


# -- many worlds ---------------------------------------------------------------------------------


def _checked(
    store: Store, wanted: Sequence[Target], app: str | None, jobs: int
) -> Iterator[list[Finding]]:
    shares = [wanted[at : at + SHARE] for at in range(0, len(wanted), SHARE)]
    if app is None and (jobs == 1 or len(shares) <= 1):
        # None of the user's code runs: no process is needed to keep it apart.
        yield from ([check_world(store, None, target)] for target in wanted)
        return
    left = set(wanted)
    try:
        with _processes(store, app, jobs) as processes:
            for some in processes.check(shares):
                left -= {Target(one.universe, one.world_id) for one in some}
                yield some
    except BrokenProcessPool:
        yield from _one_by_one(store, [target for target in wanted if target in left], app)


def _one_by_one(store: Store, wanted: list[Target], app: str | None) -> Iterator[list[Finding]]:
    while wanted:
        try:
            with _processes(store, app, 1) as processes:
                while wanted:
                    yield from processes.check([wanted[:1]])
                    del wanted[0]
        except BrokenProcessPool:
            record = store.read(catalog.record, *wanted[0])
            shown, text = f"{record.type}/{record.name}", "replaying it ended the process"
            yield [Finding(*wanted.pop(0), shown, 0, LOST, 0, text)]


@contextmanager
def _processes(store: Store, app: str | None, jobs: int) -> Iterator[_Processes]:
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pools = [
            stack.enter_context(
                ProcessPoolExecutor(
                    jobs, mp_context=context, initializer=_begin, initargs=(address_of(store), app)
                )
            )
            for _ in (HASH_SEEDS if app is not None else HASH_SEEDS[:1])
        ]
        yield _Processes(pools, jobs)


class _Processes:
    """Processes that check shares: with the code, each share by one of each hash seed."""

    def __init__(self, pools: Sequence[ProcessPoolExecutor], jobs: int) -> None:
        self._pools = pools
        self._jobs = jobs

    def check(self, shares: Sequence[Sequence[Target]]) -> Iterator[list[Finding]]:
        """Findings, a share at a time. No more than `jobs` processes are at work."""
        ahead = deque(shares)
        under_way: dict[Future[Any], int] = {}
        while ahead or under_way:
            while ahead and len(under_way) < self._jobs:
                under_way[self._submit(0, _check_share, ahead.popleft())] = 0
            for done in wait(under_way, return_when=FIRST_COMPLETED).done:
                seed, found = under_way.pop(done), done.result()
                if seed + 1 < len(self._pools):
                    under_way[self._submit(seed + 1, _check_share_again, found)] = seed + 1
                elif seed:
                    yield found
                else:
                    yield [one.finding for one in found]

    def _submit(self, seed: int, fn: Callable[..., Any], share: Sequence[Any]) -> Future[Any]:
        """A process is started when there is work for it, with the environment of that moment."""
        with _spawning, _environment("PYTHONHASHSEED", HASH_SEEDS[seed]):
            return self._pools[seed].submit(fn, share)


_spawning = threading.Lock()


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class _Process(NamedTuple):
    store: Store
    app: App | None


_process: _Process | None = None


def _begin(url: str, app: str | None) -> None:
    """Once in each process: the store and the code that its shares are checked with."""
    global _process
    _process = _Process(stores.open(url, bootstrap=False), None if app is None else load_app(app))


def _check_share(share: Sequence[Target]) -> list[_Replayed]:
    assert _process is not None
    return [_process.store.read(_check, _process.app, target) for target in share]


def _check_share_again(share: Sequence[_Replayed]) -> list[Finding]:
    assert _process is not None
    assert _process.app is not None
    app = _process.app
    return [
        one.finding if one.finding.code else _process.store.read(_check_again, app, one)
        for one in share
    ]
