"""Recovery after an unknown outcome as tables: which errors are repeated, which leases are orphans."""

from __future__ import annotations

import pytest

from holdfast.errors import (
    Busy,
    CommitUnknown,
    Conflict,
    HoldfastError,
    Invalid,
    NotFound,
    StoreClosed,
    StoreCorrupt,
    StoreGone,
    WriterLost,
)
from holdfast.runner.unknown_outcome import can_repeat, can_repeat_claim, orphaned_leases

MODULES = ("holdfast.runner.unknown_outcome",)


@pytest.mark.parametrize(
    ("error", "repeated", "claim_repeated"),
    [
        (CommitUnknown(), True, True),
        (Busy(), True, True),
        (Conflict(), True, True),
        (WriterLost(), True, True),
        # Another worker may have removed a queue item. The task operations never raise it.
        (NotFound(), False, True),
        (StoreGone(), False, False),
        (StoreCorrupt(), False, False),
        (StoreClosed(), False, False),
        (Invalid(what="test"), False, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, HoldfastError) else None,
)
def test_calls_repeated_after_a_store_error(
    error: HoldfastError, repeated: bool, claim_repeated: bool
) -> None:
    assert (can_repeat(error), can_repeat_claim(error)) == (repeated, claim_repeated)


def test_error_of_another_kind_is_not_repeated() -> None:
    assert not can_repeat(ValueError())


@pytest.mark.parametrize(
    ("stored", "known", "limit", "orphans"),
    [
        ([], [], None, []),
        ([1, 2], [1, 2], None, []),
        ([1, 2, 3], [2], None, [1, 3]),
        ([1, 2], [3], None, [1, 2]),
        ([1, 2, 3], [1], 1, [2]),
        ([1, 2, 3], [1], 5, [2, 3]),
    ],
)
def test_stored_leases_without_work_are_orphans(
    stored: list[int], known: list[int], limit: int | None, orphans: list[int]
) -> None:
    assert orphaned_leases(stored, known.__contains__, limit) == orphans
