"""Tuple keys: order-preserving, reversible, with test vectors that fix the layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Invalid
from holdfast.store import tuples

MODULES = ("holdfast.store.tuples",)

INTEGERS = st.integers(-(2**64) + 1, 2**64 - 1)
ELEMENTS = st.one_of(INTEGERS, st.text(max_size=8), st.binary(max_size=8))
RANK = {bytes: 1, str: 2, int: 3}


def sort_key(key: tuples.Key) -> list[tuple[int, object]]:
    return [
        (RANK[type(element)], element.encode() if isinstance(element, str) else element)
        for element in key
    ]


@given(st.lists(ELEMENTS, max_size=5))
def test_unpack_returns_the_packed_key(elements: list[tuples.Element]) -> None:
    assert tuples.unpack(tuples.pack(tuple(elements))) == tuple(elements)


@given(st.lists(ELEMENTS, max_size=4), st.lists(ELEMENTS, max_size=4))
def test_packed_keys_sort_like_their_tuples(
    one: list[tuples.Element], other: list[tuples.Element]
) -> None:
    a, b = tuple(one), tuple(other)
    assert (tuples.pack(a) < tuples.pack(b)) == (sort_key(a) < sort_key(b))


@given(st.lists(ELEMENTS, max_size=3), st.lists(ELEMENTS, min_size=1, max_size=3))
def test_prefix_end_is_above_all_keys_with_the_prefix(
    head: list[tuples.Element], tail: list[tuples.Element]
) -> None:
    prefix = tuples.pack(tuple(head))
    assert prefix < tuples.pack((*head, *tail)) < tuples.prefix_end(prefix)


@given(INTEGERS)
def test_unpack_last_int_reads_only_the_last_element(value: int) -> None:
    prefix = tuples.pack(("q", 7))
    assert tuples.unpack_last_int(prefix + tuples.pack_int(value), len(prefix)) == value


@pytest.mark.parametrize(
    ("key", "packed"),
    [
        ((), ""),
        ((0,), "14"),
        ((1,), "1501"),
        ((255,), "15ff"),
        ((256,), "160100"),
        ((-1,), "13fe"),
        ((-256,), "12feff"),
        ((2**64 - 1,), "1cffffffffffffffff"),
        ((-(2**64) + 1,), "0c0000000000000000"),
        (("a", b"b"), "0261000162 00"),
        ((b"\x00",), "0100ff00"),
        (("é",), "02c3a900"),
    ],
)
def test_packed_layout_matches_the_test_vectors(key: tuples.Key, packed: str) -> None:
    assert tuples.pack(key) == bytes.fromhex(packed.replace(" ", ""))


@pytest.mark.parametrize("key", [(2**64,), (-(2**64),), (1.5,), (None,), (True,), ((1,),)])
def test_pack_of_an_unsupported_element_raises_invalid(key: tuple[object, ...]) -> None:
    with pytest.raises(Invalid):
        tuples.pack(key)  # type: ignore[arg-type]


@given(st.binary(max_size=24))
def test_unpack_of_random_bytes_returns_a_key_or_raises_invalid(data: bytes) -> None:
    try:
        key = tuples.unpack(data)
    except Invalid:
        return
    assert all(isinstance(element, bytes | str | int) for element in key)


def test_text_that_is_not_utf8_is_invalid_in_pack_and_unpack() -> None:
    with pytest.raises(Invalid):
        tuples.pack(("\ud800",))
    with pytest.raises(Invalid):
        tuples.unpack(b"\x02\xff\xfe\x00")
