"""Sets are refused: their order is not the same in two processes, so no replay could repeat it."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import Invalid

MODULES = ("holdfast.app.app",)


class Inner(hf.Event):
    names: dict[str, list[frozenset[str]]]


class Joined(hf.Event):
    who: str
    inner: Inner | None = None


class Plain(hf.Event):
    who: list[str]
    more: dict[str, tuple[int, ...]] = {}  # noqa: RUF012


def world_of(annotation: Any, default: Any) -> type[hf.World]:
    return type(
        "Club", (hf.World,), {"__annotations__": {"members": annotation}, "members": default}
    )


@pytest.mark.parametrize("annotation", [set[str], frozenset[int], dict[str, set[int]], "set[str]"])
def test_a_state_with_a_set_in_it_is_refused(annotation: Any) -> None:
    default: Any = (
        {} if "dict" in str(annotation) else frozenset() if "frozen" in str(annotation) else set()
    )
    with pytest.raises(Invalid, match="order"):
        hf.App("club", worlds=[world_of(annotation, default)])


def test_an_event_with_a_set_deep_inside_is_refused() -> None:
    with pytest.raises(Invalid, match="order"):
        hf.App("club", events=[Joined])


def test_lists_tuples_and_dicts_are_welcome() -> None:
    hf.App("club", events=[Plain])
