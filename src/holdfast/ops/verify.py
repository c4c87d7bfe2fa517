"""Verify worlds: is what is stored sound, and does the code repeat it?

Of each world, on one snapshot: the hash chain of its journal, the hash of every snapshot, and, with
the code, every kept step once more: what it emitted, what it replied, and the state at each
snapshot. The first difference of a world is its finding.

Worlds do not depend on each other, so they are shared out among processes. Those are spawned: each
opens the store and imports the application itself. A reducer that ends its process is a finding like
any other: from there on worlds are checked one by one, so that the right one is blamed.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

from holdfast import store as stores
from holdfast.app.app import App
from holdfast.config import SCAN_PAGE
from holdfast.durable import journal, snapshot
from holdfast.errors import HoldfastError, Invalid
from holdfast.ops.application import load_app
from holdfast.store.api import Store, Txn, address_of
from holdfast.world import catalog
from holdfast.world.catalog import Status, subject_of
from holdfast.world.kernel import World
from holdfast.world.restore import check_snapshots, load_snapshot

# Worlds that a process takes at a time: enough to keep it busy, few enough to see it go on.
SHARE = 64
LOST = "verifier_lost"


class Target(NamedTuple):
    universe: str
    world_id: str


class Finding(NamedTuple):
    """What was found of one world: how many steps were repeated, and what is wrong if anything."""

    universe: str
    world_id: str
    world: str
    steps: int
    code: str = ""
    height: int = 0
    text: str = ""


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
    return store.read(_check, app, target)


# -- one world -----------------------------------------------------------------------------------


def _check(txn: Txn, app: App | None, target: Target) -> Finding:
    record = catalog.record(txn, target.universe, target.world_id)
    shown = f"{record.type}/{record.name}"
    subject = subject_of(target.universe, target.world_id)
    try:
        journal.verify(txn, subject)
        for height in snapshot.heights(txn, subject, SCAN_PAGE):
            load_snapshot(txn, target.world_id, subject, height)
        steps = 0
        if app is not None:
            program = app.programs.get(record.type)
            if program is None:
                raise Invalid(what="world", type=record.type, why="unknown to the app")
            world = World(target.universe, target.world_id, record.name, program, app)
            steps = check_snapshots(txn, world)
    except HoldfastError as error:
        height = error.fields.get("height", 0)
        height = height if isinstance(height, int) else 0
        return Finding(*target, shown, 0, error.code, height, _told(error))
    return Finding(*target, shown, steps)


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
        with _processes(min(jobs, len(shares)) or 1, address_of(store), app) as pool:
            for done in as_completed([pool.submit(_check_share, share) for share in shares]):
                some = done.result()
                left -= {Target(one.universe, one.world_id) for one in some}
                yield some
    except BrokenProcessPool:
        yield from _one_by_one(store, [target for target in wanted if target in left], app)


def _one_by_one(store: Store, wanted: list[Target], app: str | None) -> Iterator[list[Finding]]:
    while wanted:
        try:
            with _processes(1, address_of(store), app) as pool:
                while wanted:
                    yield pool.submit(_check_share, wanted[:1]).result()
                    del wanted[0]
        except BrokenProcessPool:
            record = store.read(catalog.record, *wanted[0])
            shown, text = f"{record.type}/{record.name}", "replaying it ended the process"
            yield [Finding(*wanted.pop(0), shown, 0, LOST, 0, text)]


def _processes(count: int, url: str, app: str | None) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=(url, app))


class _Process(NamedTuple):
    store: Store
    app: App | None


_process: _Process | None = None


def _begin(url: str, app: str | None) -> None:
    """Once in each process: the store and the code that its shares are checked with."""
    global _process
    _process = _Process(stores.open(url, bootstrap=False), None if app is None else load_app(app))


def _check_share(share: Sequence[Target]) -> list[Finding]:
    assert _process is not None
    return [check_world(_process.store, _process.app, target) for target in share]
