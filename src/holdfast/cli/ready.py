"""`holdfast ready`: checks the readiness of universes and prints each blocker on one line.

Exit code 0 means ready, 1 not ready. A paused or parked world is listed, but does not block its universe. A
store that does not respond blocks all its universes (`*`, unless one is given). With several configured
stores, a broken or moved store does not affect the universes of other stores. A universe that exists in
more than one store gets a warning.
"""

from __future__ import annotations

import argparse

import msgspec
from msgspec.structs import replace

from holdfast.app.universe_location import UniverseElsewhere
from holdfast.cli import EXIT_FAILED, EXIT_OK
from holdfast.cli.output import emit, printable
from holdfast.cli.store_option import (
    EVERY_UNIVERSE,
    StoreChoice,
    add_options,
    each_store,
    open_existing,
)
from holdfast.errors import Busy, HoldfastError, NotFound
from holdfast.ops import catalog_queries
from holdfast.store.admin.routing import load_unless_overridden
from holdfast.store.urls import redact
from holdfast.workers.readiness import ReadinessBlocker, ReadinessReason, ReadinessSnapshot
from holdfast.workers.readiness_facts import read_readiness, store_away_snapshot

ALL_UNIVERSES = "*"


class NoUniverse(NotFound):
    hint = "no app has run on this store yet: start one with `holdfast up module:app`"


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, universe=EVERY_UNIVERSE)


def run(args: argparse.Namespace) -> int:
    misplaced: list[UniverseElsewhere] = []
    snapshots = [
        snapshot
        for selected in each_store(args)
        for snapshot in _snapshots_or_blockers(selected, misplaced)
    ]
    snapshots = _add_warnings(snapshots, misplaced)
    if not snapshots:
        raise NoUniverse(what="universe", why="no configured store has a universe")
    ready = all(snapshot.ready for snapshot in snapshots)
    document = {
        "ready": ready,
        "universes": [msgspec.to_builtins(snapshot) for snapshot in snapshots],
    }
    emit(args, document, "\n".join(line for snapshot in snapshots for line in _lines(snapshot)))
    return EXIT_OK if ready else EXIT_FAILED


def _snapshots_or_blockers(
    selected: StoreChoice, misplaced: list[UniverseElsewhere]
) -> list[ReadinessSnapshot]:
    try:
        return _snapshots(selected, misplaced)
    except Busy as error:
        return [store_away_snapshot(name, error) for name in selected.universes or [ALL_UNIVERSES]]
    except NotFound as error:
        # A configured store that does not exist yet blocks only the universes that are mapped to it.
        if not selected.mapped:
            raise
        return [store_away_snapshot(name, error) for name in selected.universes]
    except HoldfastError as error:
        if not selected.mapped:
            raise
        return [store_away_snapshot(name, error) for name in selected.universes or [ALL_UNIVERSES]]


def _snapshots(
    selected: StoreChoice, misplaced: list[UniverseElsewhere]
) -> list[ReadinessSnapshot]:
    args = selected.args
    with open_existing(args) as store:
        names = [args.universe] if args.universe else store.read(catalog_queries.universes)
        if not names:
            raise NoUniverse(what="universe", url=store.url)
        routing = load_unless_overridden() if selected.mapped else None
        local_names = []
        for name in names:
            configured_url = args.store if routing is None else routing.find_url(name)
            if configured_url in (None, args.store):
                local_names.append(name)
            else:
                misplaced.append(
                    UniverseElsewhere(
                        universe=name, mapped=redact(configured_url), lives=redact(args.store)
                    )
                )
        return [read_readiness(store, name) for name in local_names]


def _add_warnings(
    snapshots: list[ReadinessSnapshot], misplaced: list[UniverseElsewhere]
) -> list[ReadinessSnapshot]:
    """Add a warning to each universe that also exists in a store it is not mapped to. A universe that exists
    only there is not ready."""
    with_warnings = list(snapshots)
    for error in misplaced:
        name = error.fields["universe"]
        at = next(
            (at for at, snapshot in enumerate(with_warnings) if snapshot.universe == name), None
        )
        if at is None:
            with_warnings.append(store_away_snapshot(name, error))
        else:
            warning = ReadinessBlocker(ReadinessReason.STORE_FAILED, error.code, str(error))
            with_warnings[at] = replace(
                with_warnings[at], warnings=[*with_warnings[at].warnings, warning]
            )
    return with_warnings


def _lines(snapshot: ReadinessSnapshot) -> list[str]:
    verdict = "ready" if snapshot.ready else "not ready"
    return [
        printable(f"{snapshot.universe}: {verdict}"),
        *(_line(blocker) for blocker in snapshot.reasons),
        *(
            _line(blocker, subject.name)
            for subject in snapshot.subjects
            for blocker in subject.reasons
        ),
        *([f"  … and {snapshot.subjects_omitted} more"] if snapshot.subjects_omitted else []),
        *_backlog(snapshot),
        *(_line(warning, "warning") for warning in snapshot.warnings),
    ]


def _backlog(snapshot: ReadinessSnapshot) -> list[str]:
    """Format the dispatch counts, if there are any."""
    counts = ", ".join(f"{count} {state}" for state, count in snapshot.backlog.items() if count)
    return [f"  dispatches: {counts}"] if counts else []


def _line(blocker: ReadinessBlocker, about: str = "") -> str:
    code = "" if blocker.code == blocker.reason.value else f" {blocker.code}"
    height = f" at height {blocker.height}" if blocker.height else ""
    text = f": {blocker.text}" if blocker.text else ""
    return printable(f"  {f'{about}: ' if about else ''}{blocker.reason.value}{code}{height}{text}")
