"""World replay: checks stored hashes and, with the application code, replays every kept step.

For each world, on one snapshot, it checks the hash chain of the journal and the hash of every snapshot.
With the code it also replays every kept step and compares the emitted intents, the reply, and the state
at each digest and each snapshot. The first difference of a world is its finding.

With the code, each world is replayed twice, in processes with different hash seeds. Both replays must end
in the same state. This detects a reducer that depends on the iteration order of a set of strings, even for
entries without a digest.

Worlds are independent, so child processes replay them in parallel (`ops.replay_process`). A world whose child ends is
replayed again at the end, alone: the child may have been killed because the machine was out of memory. A
reducer that ends its process again is a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from holdfast.app.app import App
from holdfast.config import SCAN_PAGE
from holdfast.durable import journal, snapshot
from holdfast.errors import HoldfastError, Invalid, NotFound, ReplayDiverged, StoreCorrupt
from holdfast.ops import decode_errors
from holdfast.ops.app_loader import load_app
from holdfast.ops.replay_process import (
    HASH_SEEDS,
    PROCESS_LOST,
    LostReplay,
    ReplayLane,
    ReplayPool,
    replay_function,
)
from holdfast.store.api import Store, Txn, connection_url
from holdfast.world import catalog
from holdfast.world.catalog import WorldStatus, subject_of
from holdfast.world.reducer import WorldSpec
from holdfast.world.restore import ReplayCheck, load_snapshot, replay_and_check

# Worlds per unit of work: large enough to keep a process busy, small enough for visible progress.
SHARE_SIZE = 64


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
    # A lone surrogate cannot be sent to the parent process.
    return " ".join(text.split()).encode(errors="replace").decode()


# -- many worlds ---------------------------------------------------------------------------------


def _check_all(
    store: Store, targets: Sequence[WorldTarget], app: str | None, jobs: int
) -> Iterator[list[WorldFinding]]:
    shares = [targets[at : at + SHARE_SIZE] for at in range(0, len(targets), SHARE_SIZE)]
    if app is None and (jobs == 1 or len(shares) <= 1):
        # No user code runs, so no separate process is needed.
        yield from ([check_world(store, None, target)] for target in targets)
        return
    seeds = HASH_SEEDS if app is not None else HASH_SEEDS[:1]
    url = connection_url(store)
    lost: list[Sequence[WorldTarget]] = []
    for findings in ReplayPool(url, app, jobs).run(_ShareCheck(seeds), shares):
        lost += [[target] for target, finding in findings.items() if finding is None]
        yield [finding for finding in findings.values() if finding is not None]
    for findings in ReplayPool(url, app, 1).run(_ShareCheck(seeds), lost):
        for target, finding in findings.items():
            yield [_lost_finding(store, target) if finding is None else finding]


def _lost_finding(store: Store, target: WorldTarget) -> WorldFinding:
    record = store.read(catalog.get_record, *target)
    world_name, text = f"{record.type}/{record.name}", "replaying it ended the process"
    return WorldFinding(*target, world_name, 0, PROCESS_LOST, 0, text)


class _ShareCheck:
    """Replays a share of worlds under each hash seed. The finding of a world whose child ended is None."""

    def __init__(self, hash_seeds: Sequence[str]) -> None:
        self._hash_seeds = hash_seeds

    def __call__(
        self, lane: ReplayLane, share: Sequence[WorldTarget]
    ) -> dict[WorldTarget, WorldFinding | None]:
        findings: dict[WorldTarget, WorldFinding | None] = dict.fromkeys(share)
        first_results: list[_ReplayResult] = []
        for result in lane.replay(_replay_first, self._hash_seeds[0], share):
            if isinstance(result, HoldfastError):
                raise result
            if not isinstance(result, LostReplay):
                findings[result.target] = result.finding
                if not result.finding.code:
                    first_results.append(result)
        for hash_seed in self._hash_seeds[1:]:
            answers = lane.replay(_replay_again, hash_seed, first_results)
            for first, finding in zip(first_results, answers, strict=True):
                if isinstance(finding, HoldfastError):
                    raise finding
                findings[first.target] = None if isinstance(finding, LostReplay) else finding
        return findings


@replay_function(WorldTarget, _ReplayResult)
def _replay_first(
    store: Store, app: App | None, target: WorldTarget, limit_s: float | None
) -> _ReplayResult:
    return store.read(_check_target, app, target)


@replay_function(_ReplayResult, WorldFinding)
def _replay_again(
    store: Store, app: App, first: _ReplayResult, limit_s: float | None
) -> WorldFinding:
    return store.read(_check_again, app, first)
