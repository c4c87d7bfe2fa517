"""Task and lease ids in their text form.

A task id is `<generation>-<seq>`, such as `1-42`. A lease id is `<generation>-<lease>-<seq>`. The
generation is part of the id because a store restored from a backup assigns numbers again that
clients may already hold.
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
    hint = "a task id is <generation>-<number>, such as 1-42"


class BadLeaseId(Invalid):
    code = "bad_lease_id"
    hint = "send the lease id exactly as the grant returned it, such as 1-7-42"


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


def parse_task_id(text: str) -> TaskId:
    match = _TASK.fullmatch(text)
    if match is None or (numbers := _bounded_numbers(match)) is None:
        raise BadTaskId(what="task", found=text[:64])
    return TaskId(*numbers)


def parse_lease_id(text: str) -> LeaseId:
    match = _LEASE.fullmatch(text)
    if match is None or (numbers := _bounded_numbers(match)) is None:
        raise BadLeaseId(what="lease", found=text[:64])
    return LeaseId(*numbers)


def _bounded_numbers(match: re.Match[str]) -> list[int] | None:
    numbers = [int(group) for group in match.groups()]
    return numbers if max(numbers) <= _NUMBER_MAX else None
