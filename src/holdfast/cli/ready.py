"""`holdfast ready`: whether a store's universes can serve, or exactly why not.

Exit code 0 means ready, 1 not. What blocks is told one per line. A world that is paused or parked
is listed, but does not make its universe unready. A store that does not answer blocks all universes
(`*`, unless one is named): that is an answer, too.
"""

from __future__ import annotations

import argparse

import msgspec

from holdfast.authority.readiness import Blocker, ReadinessSnapshot
from holdfast.cli import EXIT_FAILED, EXIT_OK
from holdfast.cli.output import emit, printable
from holdfast.cli.target import Chosen, add_options, each_store, existing
from holdfast.errors import Busy, NotFound
from holdfast.ops import inventory
from holdfast.roles.readiness import away, look

ALL = "*"


class NoUniverse(NotFound):
    hint = "nobody has run an app on this store yet: holdfast up module:app"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--universe", metavar="U", help="this one only; else all of the store")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    found = [one for chosen in each_store(args) for one in _told(chosen)]
    if not found:
        raise NoUniverse(what="universe", why="none in any of the stores that are mapped")
    ready = all(one.ready for one in found)
    document = {"ready": ready, "universes": [msgspec.to_builtins(one) for one in found]}
    emit(args, document, "\n".join(line for one in found for line in _lines(one)))
    return EXIT_OK if ready else EXIT_FAILED


def _told(chosen: Chosen) -> list[ReadinessSnapshot]:
    try:
        return _look(chosen.args)
    except Busy as error:
        return [away(name, error) for name in chosen.universes or [ALL]]
    except NotFound as error:
        # Where stores are mapped, one that nobody has used yet holds up nobody but those named there.
        if not chosen.mapped:
            raise
        return [away(name, error) for name in chosen.universes]


def _look(args: argparse.Namespace) -> list[ReadinessSnapshot]:
    with existing(args) as store:
        names = [args.universe] if args.universe else store.read(inventory.universes)
        if not names:
            raise NoUniverse(what="universe", url=store.url)
        return [look(store, name) for name in names]


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
