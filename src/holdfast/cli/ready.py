"""`holdfast ready`: whether a store's universes can serve, or exactly why not.

Exit code 0 means ready, 1 not. What blocks is told one per line. A world that is paused or parked
is listed, but does not make its universe unready. A store that does not answer blocks all universes
(`*`, unless one is named): that is an answer, too. Where stores are mapped, one that is broken or was moved
says nothing of the others, and a universe that another store holds as well is warned of.
"""

from __future__ import annotations

import argparse

import msgspec
from msgspec.structs import replace

from holdfast.app.locating import UniverseElsewhere
from holdfast.authority.readiness import Blocker, ReadinessSnapshot, Reason
from holdfast.cli import EXIT_FAILED, EXIT_OK
from holdfast.cli.output import emit, printable
from holdfast.cli.target import Chosen, add_options, each_store, existing
from holdfast.errors import Busy, HoldfastError, NotFound
from holdfast.ops import inventory
from holdfast.roles.readiness import away, look
from holdfast.store.mapping import found_for_all
from holdfast.store.urls import shown

ALL = "*"


class NoUniverse(NotFound):
    hint = "nobody has run an app on this store yet: holdfast up module:app"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--universe", metavar="U", help="this one only; else all of the store")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    strays: list[UniverseElsewhere] = []
    found = [one for chosen in each_store(args) for one in _told(chosen, strays)]
    found = _warned(found, strays)
    if not found:
        raise NoUniverse(what="universe", why="none in any of the stores that are mapped")
    ready = all(one.ready for one in found)
    document = {"ready": ready, "universes": [msgspec.to_builtins(one) for one in found]}
    emit(args, document, "\n".join(line for one in found for line in _lines(one)))
    return EXIT_OK if ready else EXIT_FAILED


def _told(chosen: Chosen, strays: list[UniverseElsewhere]) -> list[ReadinessSnapshot]:
    try:
        return _look(chosen, strays)
    except Busy as error:
        return [away(name, error) for name in chosen.universes or [ALL]]
    except NotFound as error:
        # Where stores are mapped, one that nobody has used yet holds up nobody but those named there.
        if not chosen.mapped:
            raise
        return [away(name, error) for name in chosen.universes]
    except HoldfastError as error:
        if not chosen.mapped:
            raise
        return [away(name, error) for name in chosen.universes or [ALL]]


def _look(chosen: Chosen, strays: list[UniverseElsewhere]) -> list[ReadinessSnapshot]:
    args = chosen.args
    with existing(args) as store:
        names = [args.universe] if args.universe else store.read(inventory.universes)
        if not names:
            raise NoUniverse(what="universe", url=store.url)
        mapped = found_for_all() if chosen.mapped else None
        mine = []
        for name in names:
            where = args.store if mapped is None else mapped.find(name)
            if where in (None, args.store):
                mine.append(name)
            else:
                strays.append(
                    UniverseElsewhere(universe=name, mapped=shown(where), lives=shown(args.store))
                )
        return [look(store, name) for name in mine]


def _warned(
    found: list[ReadinessSnapshot], strays: list[UniverseElsewhere]
) -> list[ReadinessSnapshot]:
    """What lives where it is not mapped to is told with its universe; alone, that is not ready."""
    told = list(found)
    for stray in strays:
        name = stray.fields["universe"]
        at = next((at for at, one in enumerate(told) if one.universe == name), None)
        if at is None:
            told.append(away(name, stray))
        else:
            warning = Blocker(Reason.STORE_FAILED, stray.code, str(stray))
            told[at] = replace(told[at], warnings=[*told[at].warnings, warning])
    return told


def _lines(found: ReadinessSnapshot) -> list[str]:
    said = "ready" if found.ready else "not ready"
    return [
        printable(f"{found.universe}: {said}"),
        *(_line(blocker) for blocker in found.reasons),
        *(
            _line(blocker, subject.name)
            for subject in found.subjects
            for blocker in subject.reasons
        ),
        *([f"  … and {found.subjects_omitted} more"] if found.subjects_omitted else []),
        *_backlog(found),
        *(_line(warning, "warning") for warning in found.warnings),
    ]


def _backlog(found: ReadinessSnapshot) -> list[str]:
    """How dispatches stand, where there are any."""
    told = ", ".join(f"{count} {state}" for state, count in found.backlog.items() if count)
    return [f"  dispatches: {told}"] if told else []


def _line(blocker: Blocker, about: str = "") -> str:
    code = "" if blocker.code == blocker.reason.value else f" {blocker.code}"
    height = f" at height {blocker.height}" if blocker.height else ""
    text = f": {blocker.text}" if blocker.text else ""
    return printable(f"  {f'{about}: ' if about else ''}{blocker.reason.value}{code}{height}{text}")
