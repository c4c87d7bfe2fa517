"""The options of a declared schedule: `@hf.task(every=…)`, `@hf.flow(every=…)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from holdfast.errors import Invalid


class ScheduleOptions(NamedTuple):
    """A cron rule, its time zone, its policies, and the arguments of each task or flow."""

    every: Any
    zone: str
    missed: str
    overlap: str
    args: tuple[Any, ...]

    def check(self, pack: Callable[[tuple[Any, ...], dict[str, Any]], bytes]) -> None:
        """Raise Invalid unless the options are valid and the arguments fit the function."""
        # Imported lazily: most tasks have no schedule.
        from holdfast.schedules.policies import check_rule

        check_rule(self.every, self.zone, self.missed, self.overlap)
        pack(self.args, {})


def checked_args(args: Any) -> tuple[Any, ...]:
    """The arguments of a schedule. Text is one argument, so it is not a list of letters."""
    if not isinstance(args, list | tuple):
        raise Invalid(
            what="args", found=repr(args)[:64], expected="a list of the arguments of the function"
        )
    return tuple(args)


def schedules_of(targets: Iterable[Any]) -> dict[str, Any]:
    """Return the tasks and flows with a schedule by name. Two schedules with one name raise Invalid."""
    by_name: dict[str, Any] = {}
    for target in targets:
        if getattr(target, "schedule", None) is None:
            continue
        if by_name.setdefault(target.name, target) is not target:
            raise Invalid(
                what="schedule",
                name=target.name,
                why="two schedules have this name; give one function another name=",
            )
    return by_name
