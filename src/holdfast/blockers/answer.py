"""The answer of `why`: the subject, its state, whether it moves, and its blockers.

Each blocker has a code of `codes.CODES`. Its action is that of the code, with the names of the subject filled in. Its
runbook is the page of the code (`runbooks`).
Times are nanoseconds of store time. A schedule and a calendar timer have wall clock times.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TypedDict

from holdfast.blockers.codes import CODES
from holdfast.blockers.runbooks import PAGES, path_of
from holdfast.clock import S

COMMANDS = frozenset({"resume", "last", "flag"})


class Blocker(TypedDict):
    """One reason why a subject does not move, and what to do about it."""

    code: str
    text: str
    action: str
    runbook: str
    since: int | None
    until: int | None


class WhyAnswer(TypedDict):
    """`subject` is `kind/id`. A subject with `moving` has a worker, or gets one without an operator."""

    subject: str
    state: str
    moving: bool
    blockers: list[Blocker]


def blocker(
    code: str,
    text: str,
    since: int | None = None,
    until: int | None = None,
    *,
    names: Mapping[str, str] | None = None,
    page: str = "",
) -> Blocker:
    """Make the blocker of a registered code. `names` fills the placeholders of its action. `page` replaces the runbook
    of the code."""
    action = CODES[code].action.format_map(_quoted(names or {}))
    return Blocker(
        code=code,
        text=text,
        action=action,
        runbook=path_of(page or PAGES[code]),
        since=since or None,
        until=until or None,
    )


def _quoted(names: Mapping[str, str]) -> dict[str, str]:
    """Quote names for a shell. The names of `COMMANDS` are commands or options already."""
    return {key: text if key in COMMANDS else shlex.quote(text) for key, text in names.items()}


def answer(kind: str, id: str, state: str, blockers: list[Blocker]) -> WhyAnswer:
    """Make an answer. A subject moves if every blocker ends without an operator, and it has not ended."""
    moving = state not in ENDED_STATES and all(CODES[one["code"]].passes for one in blockers)
    return WhyAnswer(subject=f"{kind}/{id}", state=state, moving=moving, blockers=blockers)


# States in which a subject has nothing left to do.
ENDED_STATES = frozenset(
    {
        "completed",
        "failed",
        "dead",
        "cancelled",
        "deleted",
        "done",
        "finished",
        "superseded",
        "idle",
    }
)


def time_text(time_ns: int) -> str:
    """Format a time in nanoseconds as UTC."""
    return datetime.fromtimestamp(time_ns // S, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
