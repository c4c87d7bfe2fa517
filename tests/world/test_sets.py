"""Sets in declared types are refused: their iteration order differs between processes, so a replay
would diverge. A set inside an `Any` value is encoded to the same bytes in every process."""

from __future__ import annotations

import datetime
import enum
from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast import codec
from holdfast.errors import Invalid
from tests.processes import python_proc

MODULES = ("holdfast.app.app", "holdfast.codec")


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
def test_state_with_a_set_is_refused(annotation: Any) -> None:
    default: Any = (
        {} if "dict" in str(annotation) else frozenset() if "frozen" in str(annotation) else set()
    )
    with pytest.raises(Invalid, match="order"):
        hf.App("club", worlds=[world_of(annotation, default)])


def test_event_with_a_nested_set_is_refused() -> None:
    with pytest.raises(Invalid, match="order"):
        hf.App("club", events=[Joined])


def test_lists_tuples_and_dicts_are_accepted() -> None:
    hf.App("club", events=[Plain])


# -- sets inside `Any` values ----------------------------------------------------------------------


class Suit(enum.Enum):
    HEARTS = "hearts"
    SPADES = "spades"


class Card(msgspec.Struct, frozen=True):
    marks: Any = None


@dataclass(frozen=True)
class Deck:
    cards: Any = field(default_factory=frozenset)


Pair = namedtuple("Pair", "left right")

NESTED = frozenset(
    {frozenset({"a", "b"}), frozenset({"c"}), frozenset({"d", frozenset({"e", "f"})})}
)
VALUES: dict[str, Any] = {
    "sets within a set": NESTED,
    "within a list, a dict and a tuple": [{"one": (NESTED, 1)}],
    "in a dataclass": Deck(NESTED),
    "in a struct": [Card(NESTED)],
    "in a named tuple": Pair(NESTED, 1),
    "structs of sets in a set": {Card(frozenset({"a", "b"})), Card(frozenset({"c"}))},
    "numbers and text": {1, "a", None, 2.5, b"b", float("nan")},
    "tuples": {("a", 1), (1, "a"), ("a", NESTED)},
    "members of an enum": {Suit.HEARTS, Suit.SPADES},
    "dates": {datetime.date(2026, 1, 2), datetime.date(2025, 1, 2)},
}


def test_set_in_an_any_value_encodes_equally_under_every_hash_seed() -> None:
    """Separate processes are used because the hash seed is fixed at process start."""
    code = """
        from holdfast import codec
        from tests.world.test_sets import VALUES
        for name, value in VALUES.items():
            print(name, codec.pack_value(value).hex())
    """
    outputs: list[list[str]] = []
    for seed in ("1", "2", "3"):
        with python_proc(code, ready=None, env={"PYTHONHASHSEED": seed}) as proc:
            assert proc.wait() == 0
            outputs.append(proc.lines)
    assert len(outputs[0]) == len(VALUES)
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("value", VALUES.values(), ids=list(VALUES))
def test_encoded_set_decodes_as_a_list(value: Any) -> None:
    codec.unpack(codec.pack_value(value))


@pytest.mark.parametrize(
    "value",
    [
        {"b", "aa", "c"},
        {-1, 3, 2},
        {2.5, -1.0},
        [{b"b", b"aa"}],
        {"x": 1},
        Card({"y", "x"}),
        None,
        7,
    ],
    ids=["texts", "numbers", "fractions", "bytes", "dict", "record", "none", "number"],
)
def test_set_of_one_plain_type_is_encoded_in_sorted_order(value: Any) -> None:
    assert codec.pack_value(value) == codec.pack(value)


def test_pack_value_raises_encode_errors_for_unencodable_values() -> None:
    knot: list[Any] = [NESTED]
    knot.append(knot)
    for value in (knot, [NESTED, object()], {"a": NESTED, 1: 2}):
        with pytest.raises(codec.ENCODE_ERRORS):
            codec.pack_value(value)
