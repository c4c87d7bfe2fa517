"""The names of tasks and leases, as text.

A task is `<generation>-<seq>`, such as `1-42`, and a lease `<generation>-<lease>-<seq>`. The generation is
part of the name because a store that was restored from a backup gives numbers again that somebody may
have seen before.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from holdfast.errors import Invalid

_NUMBER = r"([1-9][0-9]{0,18})"
_TASK = re.compile(rf"{_NUMBER}-{_NUMBER}")
_LEASE = re.compile(rf"{_NUMBER}-{_NUMBER}-{_NUMBER}")
_NUMBER_MAX = (1 << 63) - 1


class BadTaskId(Invalid):
    code = "bad_task_id"
    hint = "a task is named <generation>-<number>, such as 1-42"


class BadLeaseId(Invalid):
    code = "bad_lease_id"
    hint = "give back the lease as it was given, such as 1-7-42"


class TaskId(NamedTuple):
    generation: int
    seq: int

    def __str__(self) -> str:
        return f"{self.generation}-{self.seq}"


class LeaseId(NamedTuple):
    generation: int
    lease: int
    seq: int

    def __str__(self) -> str:
        return f"{self.generation}-{self.lease}-{self.seq}"


def parse_task(text: str) -> TaskId:
    found = _TASK.fullmatch(text)
    if found is None or (numbers := _numbers(found)) is None:
        raise BadTaskId(what="task", found=text[:64])
    return TaskId(*numbers)


def parse_lease(text: str) -> LeaseId:
    found = _LEASE.fullmatch(text)
    if found is None or (numbers := _numbers(found)) is None:
        raise BadLeaseId(what="lease", found=text[:64])
    return LeaseId(*numbers)


def _numbers(found: re.Match[str]) -> list[int] | None:
    numbers = [int(group) for group in found.groups()]
    return numbers if max(numbers) <= _NUMBER_MAX else None
